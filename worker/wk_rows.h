/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_rows.h - the cache memory of a rank above 0: the arena of its node's own kvmgr.
 *
 * The device thread writes data and headers: WRITING before the first byte of a block or slot,
 * COMMITTED with the sum of its data when rank 0 says what it is, before rank 0 tells the
 * authority.  So whatever the authority may find again is sealed here, whichever process dies when.
 * The loop thread carries question and answer between device thread and kvmgr; two rings lie
 * between. */
#ifndef WORKER_WK_ROWS_H
#define WORKER_WK_ROWS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/model.h"
#include "proto/kv_layout.h"
#include "proto/msg.h"

struct wk_rows;

/* What rank 0 will name to the authority: a full block, or a state snapshot. */
struct wk_seal {
    uint32_t snapshot; /* 0: a block */
    uint32_t index;    /* of the block or slot */
    uint32_t place;    /* block: its index in the chain; snapshot: its tokens */
    uint32_t zero;
    struct hash128 hash;
    struct hash128 parent; /* of a block; snapshot: zeros */
};

struct wk_rows_options {
    uint32_t worker_id, rank; /* rank: of the group, also where all keep all rows */
    uint64_t incarnation;     /* of this worker */
    void (*wake)(void *arg);  /* device thread: there is a question for the loop thread */
    void *arg;
};

struct wk_rows *wk_rows_create(const struct wk_rows_options *options);
void wk_rows_destroy(struct wk_rows **rows_p);

/* ---- device thread ---- */

/* The memory of that layout, which kvmgr may need a while to read through; what was mapped before
 * is given up first.  settings: rows written under others are other rows.  ERR_TIMEOUT: kvmgr does
 * not answer; ERR_CANCELLED: *stop (may be NULL) became true; others: it refuses, or its arena is
 * not what was asked for. */
MUST_USE enum err wk_rows_open(struct wk_rows *r, const struct kv_layout *layout,
                               const struct hash128 *settings, uint32_t wait_ms,
                               const atomic_bool *stop, struct model_kv *ret_kv,
                               struct err_detail *detail);
void wk_rows_close(struct wk_rows *r);
/* Stands for all that was committed here; 0 = no memory. */
struct wk_rows_identity {
    uint64_t incarnation;
    uint32_t epoch;
    uint32_t zero;
};
struct wk_rows_identity wk_rows_identity(const struct wk_rows *r);
bool wk_rows_lost(const struct wk_rows *r); /* kvmgr was restarted: open again */

void wk_rows_write_block(struct wk_rows *r, uint32_t block); /* before data of it are written */
void wk_rows_write_slot(struct wk_rows *r, uint32_t slot, bool snapshot);
/* ERR_INVALID: out of bounds, or nothing was written there since it was committed as another. */
MUST_USE enum err wk_rows_seal(struct wk_rows *r, const struct wk_seal *seals, uint32_t count,
                               struct err_detail *detail);

/* ---- loop thread ---- */

bool wk_rows_question(struct wk_rows *r, struct msg *ret_attach); /* to send to kvmgr */
void wk_rows_answer(struct wk_rows *r, const struct msg *m); /* KvAttachReply or KvState heard */
uint64_t wk_rows_worker(const struct wk_rows *r);            /* the incarnation, for KvPing */

#endif
