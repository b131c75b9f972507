/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_group.h - what ranks exchange their activations over, as the model sees it.
 *
 * Pure glue: NCCL where there is a communicator, else the fabric.  The model is loaded before the
 * group can form, so both are looked up at every call: what struct wk_paths points to is borrowed,
 * and the fabric must be there by the model's first forward pass. */
#ifndef WORKER_WK_GROUP_H
#define WORKER_WK_GROUP_H

#include "lib/model/model.h"

struct wk_fabric;
struct wk_nccl_host;

struct wk_paths {
    struct wk_fabric *fabric;
    struct wk_nccl_host *nccl; /* NULL = activations too go over the fabric */
};

/* interleave 0: every rank keeps all cache rows. */
struct model_group wk_group(struct wk_paths *paths, uint32_t rank, uint32_t ranks,
                            enum shard_moe moe, uint32_t interleave);

#endif
