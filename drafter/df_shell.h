/* SPDX-License-Identifier: Apache-2.0 */
/* drafter/df_shell.h - everything around the core: sockets, timers, status window, memory.
 *
 * Owned by the loop thread.  Binds run_dir/drafter.sock.  Takes address space for all sequences at
 * create; pages are used as sequences grow and go back to the system when they end, so at most
 * tokens_max tokens' worth of them is resident. */
#ifndef DRAFTER_DF_SHELL_H
#define DRAFTER_DF_SHELL_H

#include "lib/base/err.h"

struct df_params;
struct df_shell;
struct loop;

MUST_USE enum err df_shell_create(struct loop *l, const struct df_params *params,
                                  struct df_shell **ret_shell, struct err_detail *detail);
void df_shell_destroy(struct df_shell **shell_p);

#endif
