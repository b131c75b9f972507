/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_shell.h - the router's I/O: frames and timers become events, actions become frames.
 *
 * Owned by the loop thread.  All memory is taken at create. */
#ifndef ROUTER_RT_SHELL_H
#define ROUTER_RT_SHELL_H

#include "lib/base/err.h"

struct loop;
struct rt_params;
struct rt_shell;

/* params must outlive the shell. */
MUST_USE enum err rt_shell_create(struct loop *l, const struct rt_params *params,
                                  struct rt_shell **ret_shell, struct err_detail *detail);
void rt_shell_destroy(struct rt_shell **shell_p);

#endif
