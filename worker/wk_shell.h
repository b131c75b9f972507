/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_shell.h - everything around the core: sockets, timers, arena, device thread, status.
 *
 * Owned by the loop thread.  Connects to router.sock and to its group's kvmgr and drafter in
 * run_dir as worker-<id>; any of them may be missing and come later.  The core is made when the
 * model is loaded and kvmgr has named an arena; until then requests are answered with
 * ERR_LOADING. */
#ifndef WORKER_WK_SHELL_H
#define WORKER_WK_SHELL_H

#include "lib/base/err.h"

struct loop;
struct wk_params;
struct wk_shell;

/* params and config_hash are borrowed for the shell's life. */
MUST_USE enum err wk_shell_create(struct loop *l, const struct wk_params *params,
                                  const char *config_hash, struct wk_shell **ret_shell,
                                  struct err_detail *detail);
/* Orderly end: finishes the step in flight, hands requests and leases back, then stops the loop;
 * after at most 1.5 s in any case. */
void wk_shell_stop(struct wk_shell *s);
/* 0 after wk_shell_stop; else what the process should exit with. */
int wk_shell_exit_code(const struct wk_shell *s);
/* False while the device thread is busy: then the process must leave without destroying it. */
bool wk_shell_idle(const struct wk_shell *s);
void wk_shell_destroy(struct wk_shell **shell_p);
/* The quick way out beside a busy device thread: lets queued messages leave, removes what others
 * see of us. */
void wk_shell_leave(struct wk_shell *s);

#endif
