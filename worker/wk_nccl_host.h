/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_nccl_host.h - the model's collectives over NCCL for activations in the host's memory.
 *
 * NCCL moves device memory, and the cpu device computes in the host's: each piece goes through
 * pinned memory to the GPU, over NCCL, and back.  Owner: the device thread.  The memory for pieces
 * is taken at create; a call allocates nothing, and ends as wk_nccl.h says. */
#ifndef WORKER_WK_NCCL_HOST_H
#define WORKER_WK_NCCL_HOST_H

#include "worker/wk_nccl.h"

#define WK_NCCL_PIECE_BYTES (1u << 20) /* that each rank gives at a time */

struct wk_nccl_host;

/* All ranks call it; all succeed or none does.  A fault takes the fabric with it. */
MUST_USE enum err wk_nccl_host_create(const struct wk_nccl_options *options,
                                      struct wk_nccl_host **ret_host, struct err_detail *detail);
void wk_nccl_host_destroy(struct wk_nccl_host **host_p);

/* As the fabric's calls of the same names. */
MUST_USE enum err wk_nccl_host_reduce(struct wk_nccl_host *h, float *values, size_t count);
MUST_USE enum err wk_nccl_host_gather(struct wk_nccl_host *h, const void *own, size_t bytes,
                                      void *ret_all);
MUST_USE enum err wk_nccl_host_to_all(struct wk_nccl_host *h, const void *own, size_t bytes,
                                      void *ret_all);

#endif
