/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_link_local.h - the link between ranks of one host: rings in a shared-memory file.
 *
 * Threads share one mapping, processes open the file each; both may restart and come again.  Per
 * directed pair of ranks a ring of two messages: its writer and its reader each own one counter,
 * so that no restart has to clear anything.  A rank that waits spins shortly, then sleeps on a
 * futex.  A rank holds a lock on its byte of the file: the kernel drops it when the process dies,
 * so a death is seen at once and a taken rank is refused. */
#ifndef WORKER_WK_LINK_LOCAL_H
#define WORKER_WK_LINK_LOCAL_H

#include "worker/wk_link.h"

struct wk_local;

struct wk_local_options {
    const char *path; /* made if it is not there; mode 0600 */
    uint32_t ranks;
    uint32_t message_bytes_max; /* multiple of 64 */
    uint32_t spin_us;           /* before sleeping */
};

/* Maps the file.  ERR_INVALID: it is another group's (ranks or sizes differ), or no such file. */
MUST_USE enum err wk_local_open(const struct wk_local_options *options, struct wk_local **ret_local,
                                struct err_detail *detail);
void wk_local_close(struct wk_local **local_p); /* after its links */

/* ERR_BUSY: another process or thread holds this rank. */
MUST_USE enum err wk_link_local(struct wk_local *local, uint32_t rank, struct wk_link *ret_link,
                                struct err_detail *detail);

#endif
