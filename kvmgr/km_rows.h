/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_rows.h - the arena of a rank above 0: made, locked, adopted and handed to its worker.
 *
 * Owned by the loop thread; file I/O.  Decides nothing about blocks: the authority does, and the
 * worker writes the headers (KV_FLAG_FOLLOWS).  Epoch and incarnation of the file stay as long as
 * all that was committed is there and sound, whoever died meanwhile; anything else gives new ones,
 * under which nothing that was kept counts any more. */
#ifndef KVMGR_KM_ROWS_H
#define KVMGR_KM_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_arena.h"
#include "lib/base/err.h"
#include "proto/msg.h"

struct km_rows;

struct km_rows_options {
    const char *path;      /* of the arena; borrowed for the call */
    const char *state_dir; /* for the epoch: km_epoch.h */
    uint32_t id;
    uint32_t boot; /* of the host; 0 = unknown */
};

struct km_rows_counts {
    uint64_t attaches, refused;
    uint64_t blocks_adopted, snapshots_adopted, broken; /* broken: headers and data */
};

/* ERR_IO, ERR_TOO_LARGE: the file with the epoch. */
MUST_USE enum err km_rows_create(const struct km_rows_options *options, struct km_rows **ret_rows,
                                 struct err_detail *detail);
void km_rows_destroy(struct km_rows **rows_p); /* the file stays */

/* The worker writes nothing while it asks.  What it has already it gets again at once; a worker
 * that is new here, or another shape, opens the file anew and reads all that is committed.  The
 * answer's texts live until the next call. */
void km_rows_attach(struct km_rows *r, const struct msg_kv_attach *want,
                    struct msg_kv_attach_reply *ret_reply);
/* The answer to that worker's ping: the arena it has, or incarnation 0 if it has none from us. */
void km_rows_ping(const struct km_rows *r, uint64_t worker, struct msg_kv_state *ret_state);

const struct km_arena *km_rows_arena(const struct km_rows *r); /* NULL before the first attach */
const struct km_rows_counts *km_rows_counts(const struct km_rows *r);

#endif
