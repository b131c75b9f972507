/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_follower.h - the process of a rank above 0: a device thread, its status, and the kvmgr
 * of its own node, which has its memory.
 *
 * Loop thread.  Has no router and no drafter: rank 0 speaks with them for the group. */
#ifndef WORKER_WK_FOLLOWER_H
#define WORKER_WK_FOLLOWER_H

#include "lib/base/err.h"

struct loop;
struct wk_follower;
struct wk_params;

/* params are borrowed for the follower's life. */
MUST_USE enum err wk_follower_create(struct loop *l, const struct wk_params *params,
                                     struct wk_follower **ret_follower, struct err_detail *detail);
int wk_follower_exit_code(const struct wk_follower *w);
/* Waits for the step in flight, which the fabric's deadline bounds. */
void wk_follower_destroy(struct wk_follower **follower_p);

#endif
