/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_blocks.h - one sequence's block table and the state of its lease at kvmgr.
 *
 * Loop thread.  Pure.  The table has count_max places, taken by the core at its creation.  Replies
 * of kvmgr come from outside: every id is checked against the arena's geometry. */
#ifndef WORKER_WK_BLOCKS_H
#define WORKER_WK_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

enum wk_kv_state {
    WK_KV_NONE,    /* no lease, none asked for */
    WK_KV_OPENING, /* KvOpen in flight */
    WK_KV_FULL,    /* refused for want of blocks or slots: tried again */
    WK_KV_HELD,
};
enum wk_extend_state { WK_EXTEND_NONE, WK_EXTEND_ASKED, WK_EXTEND_FULL };

struct wk_arena_shape {
    uint32_t block_tokens, block_count, slot_count;
    uint32_t live_slots;     /* slots below are for running sequences, the others for snapshots */
    uint32_t snapshot_every; /* tokens; 0 = no snapshots within a prompt */
};

struct wk_blocks {
    enum wk_kv_state state;
    enum wk_extend_state extend;
    uint64_t lease;
    uint32_t state_slot;
    uint32_t count, count_max;
    uint32_t *ids;
    uint32_t sent;         /* blocks that the executor's table has */
    uint32_t committed;    /* blocks whose KvCommit was sent, or that came committed */
    uint32_t asked_max;    /* tokens that the open allowed to come from the cache */
    uint32_t reused;       /* tokens that came with the lease; whole blocks, never written */
    uint32_t restore_slot; /* where reused > 0: the snapshot to begin from */
    uint32_t snapped;      /* tokens of the latest state that kvmgr keeps of this sequence */
    uint64_t asked_us;     /* of the open or extend in flight */
    uint64_t full_since_us;
    /* Chain hashes of the sequence's first full blocks; they outlive a lease. */
    uint32_t hash_count;
    struct hash128 *hashes; /* [count_max] */
};

void wk_blocks_init(struct wk_blocks *b, uint32_t *ids, struct hash128 *hashes, uint32_t count_max);
void wk_blocks_reset(struct wk_blocks *b); /* as if never opened; hashes stay */

/* ERR_OK: HELD.  ERR_KV_FULL: FULL, for every code that may be tried again.  Others: NONE, the
 * reply is unusable. */
MUST_USE enum err wk_blocks_opened(struct wk_blocks *b, const struct wk_arena_shape *shape,
                                   const struct msg_kv_open_reply *reply, uint32_t blocks_wanted,
                                   uint64_t now_us);
/* ERR_OK also for a repeated answer; ERR_KV_FULL: extend is FULL; others: the lease is gone or the
 * reply unusable. */
MUST_USE enum err wk_blocks_extended(struct wk_blocks *b, const struct wk_arena_shape *shape,
                                     const struct msg_kv_extend_reply *reply, uint64_t now_us);

/* Blocks that hold `tokens` tokens. */
uint32_t wk_blocks_for(const struct wk_arena_shape *shape, uint32_t tokens);
/* Tokens that the held blocks have room for. */
uint64_t wk_blocks_room(const struct wk_blocks *b, const struct wk_arena_shape *shape);

#endif
