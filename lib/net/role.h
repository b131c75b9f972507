/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/role.h - how every role starts and ends: parameters, lock, PID file, exit codes.
 *
 * Owned by the main thread.  Holds no memory.  A role that cannot start exits with 2 when its
 * configuration is at fault, so that nobody starts it again in vain, and with 1 when the world may
 * soon be another (an address or a lock still taken). */
#ifndef LIB_NET_ROLE_H
#define LIB_NET_ROLE_H

#include <stddef.h>

#include "lib/base/err.h"
#include "lib/base/params.h"

struct role {
    const char *name; /* "router" */
    const struct param *table;
    size_t count;
    void *params; /* filled by role_load */
    /* What single rows of the table cannot say, all faults at once.  May be NULL. */
    enum err (*check)(const void *params, struct err_detail *ret_faults);
    char instance[32]; /* "router-0"; set by role_load, like run_dir */
    char run_dir[PARAM_STR_BYTES];
};

/* Reads the parameters and sets the log up; dies on a fault. */
void role_load(struct role *r, int argc, char **argv);
/* Makes the folders, takes the lock, writes the PID file, logs the parameters; exits if refused. */
void role_begin(struct role *r);
/* Something could not be opened after role_begin: says why, and exits. */
_Noreturn void role_refuse(const struct role *r, enum err code, const struct err_detail *why);
void role_end(const struct role *r); /* removes the PID file */

/* Where process `id` of a role listens: ipc://RUN_DIR/ROLE.sock, for others than 0
 * ipc://RUN_DIR/ROLE-ID.sock. */
void role_endpoint(const char *run_dir, const char *role, uint32_t id, char *ret_endpoint,
                   size_t bytes);

#endif
