/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/wk_world_base.h - what the core's world is made of: its state, the fake model, the
 * queue of what comes later. */
#ifndef TESTS_UNIT_WK_WORLD_BASE_H
#define TESTS_UNIT_WK_WORLD_BASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/arena.h"
#include "lib/base/rng.h"
#include "worker/wk_core.h"

#define VOCAB      64u
#define STOP_ID    5u
#define REQS_MAX   24u
#define TEXT_MAX   512u
#define BLOCKS_MAX 256u
#define BT_MAX     16u
#define SLOTS_MAX  48u
#define SNAPS      28u /* most snapshot slots of a world with a cache */
#define GRANTS     3u
#define QUEUE_MAX  4096u
#define ENTRIES    64u

struct request {
    struct msg_id id;
    struct msg_request q;
    uint32_t ids[TEXT_MAX];
    uint32_t text[TEXT_MAX], text_count, finish; /* the plain run */
    uint32_t got[TEXT_MAX], got_count;
    uint32_t finishes, finish_seen, code;
    bool live, waiting, cancelled;
    uint64_t arrive_us, cancel_us, opened_us, sliced_us;
    char spec[16];
    uint32_t drafter_count;
    uint32_t drafter_ids[TEXT_MAX];
    bool drafter_open;
    struct msg_receipt receipt;
    char receipt_spec[16];
};

struct lease {
    uint64_t lease;
    uint32_t request, slot, count;
    uint32_t blocks[BLOCKS_MAX];
    uint32_t shared;  /* blocks that came from the cache */
    uint32_t restore; /* snapshot that may still be read, 0 = none */
};

enum snap_state { SNAP_FREE, SNAP_GRANTED, SNAP_KEPT };

struct item {
    uint64_t at_us, order;
    bool used;
    enum wk_event_type type;
    uint32_t arrive; /* request + 1: assign it */
    struct msg msg;
    uint32_t ids[BLOCKS_MAX];
};

struct state_slot {
    uint32_t count, journal_count;
    uint64_t hash;
    uint32_t journal[WK_STEP_ROWS_MAX];
};

enum drafter_mode {
    DRAFT_RIGHT,
    DRAFT_MIXED,
    DRAFT_WRONG,
    DRAFT_GARBAGE,
    DRAFT_SILENT,
    DRAFT_SLOW,
    DRAFT_NONE
};

struct world {
    struct rng rng;
    uint64_t now_us, order, wake_us;
    struct wk_core *core;
    struct wk_core_options options;
    struct wk_actions actions;
    struct arena arena;
    struct item *queue;
    uint32_t queue_end; /* none was ever used from here on */
    struct request reqs[REQS_MAX];
    uint32_t req_count;
    /* kvmgr */
    struct lease leases[ENTRIES];
    uint64_t lease_next;
    uint32_t block_count, slot_count, block_used, kv_refusals;
    bool slot_taken[SLOTS_MAX];
    uint32_t refs[BLOCKS_MAX];         /* leases that hold the block */
    bool known[BLOCKS_MAX];            /* committed, under a hash */
    struct hash128 hashes[BLOCKS_MAX]; /* of known ones */
    uint32_t snap[BLOCKS_MAX];         /* snapshot slot at its end, 0 = none */
    enum snap_state snaps[SLOTS_MAX];
    uint32_t snap_count; /* slots behind slot_count */
    uint32_t granted[MSG_GRANTS_MAX];
    uint64_t reused, kept; /* tokens that came from the cache; snapshots */
    bool kv_restart_pending;
    uint64_t kv_incarnation, kv_last_us;
    /* executor */
    uint32_t rows[BLOCKS_MAX * BT_MAX];
    struct state_slot slots[SLOTS_MAX];
    uint32_t table[ENTRIES][BLOCKS_MAX];
    uint32_t table_count[ENTRIES];
    struct wk_plan_setup setups[ENTRIES];
    struct wk_plan_seq batch[WK_PREFILL_SEQS_MAX];
    uint32_t batch_ids[TEXT_MAX * WK_PREFILL_SEQS_MAX];
    uint32_t batch_count, batch_layer;
    struct wk_result result;
    bool running;
    uint64_t step;
    double us_per_row, us_fixed;
    uint64_t slice_us_max;
    uint32_t fail_steps;
    /* drafter */
    enum drafter_mode drafter;
    uint64_t drafter_incarnation;
    uint32_t drafter_code; /* every proposal is answered with it; 0 = by its merits */
    uint32_t drafter_opens, drafter_asked, drafter_fed;
    bool drafter_taps;           /* it wants hidden states */
    uint64_t drafter_us_per_ask; /* a question waits for those before it */
    uint64_t drafter_free_us;
    uint64_t gap_us_max;
    uint32_t step_rows_max;
};

static uint8_t has_token[VOCAB];

/* ---- the fake model ---- */

static inline uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9e3779b97f4a7c15ull;
    return h ^ (h >> 29);
}

static inline bool banned(const struct wk_plan_setup *s, uint32_t position, uint32_t id)
{
    if (position - s->prompt_count >= s->output_tokens_min)
        return false;
    for (uint32_t i = 0; i < s->banned_count; i++)
        if (s->banned_ids[i] == id)
            return true;
    return false;
}

static inline uint32_t model_token(uint64_t hash, uint32_t position, const struct wk_plan_setup *s)
{
    uint64_t h = mix(mix(hash, position), s->seed);
    for (;;) {
        uint32_t id = (uint32_t)(h % VOCAB);
        if (has_token[id] && !banned(s, position, id))
            return id;
        h = mix(h, 1);
    }
}

static inline void plain_run(struct world *w, struct request *r)
{
    struct wk_plan_setup s = {.prompt_count = r->q.prompt_count,
                              .output_tokens_min = r->q.limits.output_tokens_min,
                              .seed = r->q.sampling.seed,
                              .banned_count = 1,
                              .banned_ids = {STOP_ID}};
    uint64_t hash = 0;
    for (uint32_t i = 0; i < r->q.prompt_count; i++)
        hash = mix(hash, r->ids[i]);
    r->finish = MSG_FINISH_NONE;
    while (r->finish == MSG_FINISH_NONE) {
        uint32_t id = model_token(hash, r->q.prompt_count + r->text_count, &s);
        r->text[r->text_count++] = id;
        hash = mix(hash, id);
        if (id == STOP_ID && r->text_count > r->q.limits.output_tokens_min)
            r->finish = MSG_FINISH_STOP;
        else if (r->text_count >= r->q.limits.output_tokens_max ||
                 r->q.prompt_count + r->text_count >= w->options.context_max)
            r->finish = MSG_FINISH_LENGTH;
    }
}

/* ---- queue ---- */

static inline struct item *later(struct world *w, uint64_t delay_us)
{
    for (uint32_t i = 0; i < QUEUE_MAX; i++)
        if (!w->queue[i].used) {
            struct item *it = &w->queue[i];
            w->queue_end = i < w->queue_end ? w->queue_end : i + 1;
            memset(it, 0, offsetof(struct item, ids));
            it->used = true;
            it->at_us = w->now_us + delay_us;
            it->order = w->order++;
            it->type = WK_EV_MSG;
            return it;
        }
    fail_msg("queue is full");
    return NULL;
}

/* An answer of kvmgr: they keep their order. */
static inline struct item *later_kv(struct world *w, enum msg_type type)
{
    struct item *it = later(w, 20 + rng_below(&w->rng, 2000));
    if (it->at_us < w->kv_last_us)
        it->at_us = w->kv_last_us;
    w->kv_last_us = it->at_us;
    it->msg.type = type;
    return it;
}

static inline struct item *earliest(struct world *w)
{
    struct item *best = NULL;
    for (uint32_t i = 0; i < w->queue_end; i++) {
        struct item *it = &w->queue[i];
        if (it->used && (best == NULL || it->at_us < best->at_us ||
                         (it->at_us == best->at_us && it->order < best->order)))
            best = it;
    }
    return best;
}

static inline struct request *request_of(struct world *w, const struct msg_id *id)
{
    uint32_t index;
    memcpy(&index, id->bytes, sizeof index);
    assert_true(index < w->req_count);
    return &w->reqs[index];
}

#endif
