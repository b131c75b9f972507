/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_rows_shell.h - the process around km_rows.h: its socket, its status page.
 *
 * Loop thread.  Speaks with the worker of its own node alone. */
#ifndef KVMGR_KM_ROWS_SHELL_H
#define KVMGR_KM_ROWS_SHELL_H

#include "lib/base/err.h"

struct km_params;
struct km_rows_shell;
struct loop;

/* params are borrowed for the shell's life. */
MUST_USE enum err km_rows_shell_create(struct loop *l, const struct km_params *params,
                                       struct km_rows_shell **ret_shell, struct err_detail *detail);
void km_rows_shell_destroy(struct km_rows_shell **shell_p);

#endif
