/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_shell.h - kvmgr's I/O around the core: bus, arena file, Redis, status window.
 *
 * Owned by the loop thread.  The socket is bound only when the epoch is known: Redis is asked for
 * it and has 50 ms to answer. */
#ifndef KVMGR_KM_SHELL_H
#define KVMGR_KM_SHELL_H

#include <stdbool.h>

#include "lib/base/err.h"

struct loop;
struct km_params;
struct km_shell;

/* params is kept and must outlive the shell. */
MUST_USE enum err km_shell_create(struct loop *l, const struct km_params *params,
                                  struct km_shell **ret_shell, struct err_detail *detail);
void km_shell_destroy(struct km_shell **shell_p);
/* Writes what is cached to the tier, for 5 s at most, then stops the loop; called again: at
 * once. */
void km_shell_stop(struct km_shell *s);
/* The loop was stopped because the start could not be finished (logged). */
bool km_shell_failed(const struct km_shell *s);

#endif
