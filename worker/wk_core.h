/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_core.h - continuous batching as a state machine: events in, actions out.
 *
 * Owned by the worker's loop thread.  Pure: no clock, socket or thread; time comes in as now_us.
 * Everything is sized at create from the options; actions are bounded by wk_core_actions_max, and
 * arrays in their messages lie in the caller's arena.  One plan is in flight at a time; its plan
 * object belongs to the executor from WK_ACT_RUN until WK_EV_DONE.
 *
 * Sequence: waiting (for a lease) -> opening -> prefill -> decode -> gone.  A sequence that ends
 * while the executor still writes its rows stays as a zombie until that batch is done; only then is
 * its lease released (two-phase free). */
#ifndef WORKER_WK_CORE_H
#define WORKER_WK_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/block_hash.h"
#include "proto/msg.h"
#include "worker/wk_blocks.h"
#include "worker/wk_plan.h"
#include "worker/wk_policy.h"
#include "worker/wk_spec.h"

struct arena;
struct wk_core;

struct wk_core_options {
    uint32_t seqs_max;
    uint32_t slice_rows_max;
    uint32_t slice_layers_max; /* 0 = all */
    uint32_t slice_ms;
    uint32_t decode_rows_max; /* rows of one decode step; >= seqs_max is best */
    uint32_t deadline_ms;     /* longest wait for drafts */
    uint64_t ids_max;         /* token ids of all live requests together */
    uint32_t context_max;     /* of the model or the operator */
    uint32_t vocab_size, layer_count;
    const uint8_t *has_token; /* [vocab_size]; borrowed */
    uint32_t stop_id_count;   /* the model's own, <= 16; copied */
    const uint32_t *stop_ids;
    bool mtp;            /* the model's own layer is loaded */
    struct wk_spec spec; /* the worker's own policy */
    struct wk_ema_knobs ema;
    double accept_floor; /* below this share of right drafts the drafter counts as degraded */
    struct wk_arena_shape shape;
    struct block_hash_key key;
    struct hash128 model_fp;
    char config_hash[33];
    uint64_t step_first;                           /* plans are numbered from step_first + 1 on */
    double prefill_us_per_row, decode_us_per_step; /* measured at load; start of the cost fit */
};

enum wk_event_type {
    WK_EV_MSG = 1,     /* a checked message of router, kvmgr or drafter */
    WK_EV_DONE,        /* result of the plan in flight */
    WK_EV_TICK,        /* the time asked for in wake_us has come */
    WK_EV_KV_ATTACHED, /* the arena is mapped; only while wk_core_quiet */
    WK_EV_KV_DETACHED, /* kvmgr lost our leases: all sequences are planned again */
    WK_EV_STOP,        /* orderly end: no new plan, leases released after the current one */
};

struct wk_event {
    uint64_t now_us;
    uint64_t now_unix_us; /* for deadlines in assignments and drains */
    enum wk_event_type type;
    const struct msg *msg;
    const struct wk_result *result;
    uint32_t kv_epoch; /* WK_EV_KV_ATTACHED */
    struct wk_arena_shape shape;
    uint32_t granted_count; /* snapshot slots that the worker may write */
    const uint32_t *granted;
};

enum wk_action_type { WK_ACT_ROUTER = 1, WK_ACT_KVMGR, WK_ACT_DRAFTER, WK_ACT_RUN };

struct wk_action {
    enum wk_action_type type;
    struct msg msg;
    /* Of a KvCommit, for the other ranks: the blocks that it is of, the hash before the first. */
    const uint32_t *blocks;
    struct hash128 parent;
};

struct wk_actions {
    uint32_t count, count_max;
    struct wk_action *items;
    struct arena *arena;        /* arrays of the messages; reset by the caller before each step */
    const struct wk_plan *plan; /* with WK_ACT_RUN, which is always the last action */
    uint64_t wake_us;           /* 0 = nothing to wait for */
};

/* What happened, for metrics: running totals and what the last step showed. */
struct wk_stats {
    uint64_t steps_prefill, steps_decode, steps_abandoned;
    uint64_t rows_prefill, rows_decode, tokens_output;
    uint64_t drafted, accepted;
    uint64_t accepted_at[WK_SPEC_DRAFTS_MAX], drafted_at[WK_SPEC_DRAFTS_MAX];
    uint64_t preempted, replanned, kv_full, drafts_late, drafts_garbage, drafts_timeout;
    uint64_t steps_failed, tap_records;
    uint64_t tokens_cached, prompts_cached, prompts_cold;
    uint64_t snapshots, snapshots_refused, snapshots_skipped; /* skipped: no slot at that moment */
    uint64_t step_us_last, verify_us;              /* of a decode step: all of them together */
    uint64_t draft_waits, draft_us_last, draft_us; /* waits for drafts: how many, last, together */
    enum wk_plan_kind kind_last;
    uint32_t rows_last;
    uint64_t gap_us_last, gap_us_max; /* between two emissions of one request */
    uint64_t gaps;                    /* count: tells a new gap_us_last */
    struct msg_ledger ledger;
};

/* Sequences by state, for gauges. */
struct wk_census {
    uint32_t waiting, opening, prefill, decode, zombie;
    uint32_t blocks_held;
};

struct wk_core *wk_core_create(const struct wk_core_options *options);
void wk_core_destroy(struct wk_core **core_p);

uint32_t wk_core_actions_max(const struct wk_core_options *options);
void wk_core_step(struct wk_core *core, const struct wk_event *event,
                  struct wk_actions *ret_actions);

/* No plan in flight and no prefill batch paused in the executor: the arena may be exchanged. */
bool wk_core_quiet(const struct wk_core *core);
/* After WK_EV_STOP: nothing in flight, every lease released. */
bool wk_core_stopped(const struct wk_core *core);
bool wk_core_draining(const struct wk_core *core); /* takes nothing new, until it may again */

/* Fills the fields of WorkerState that the core knows; gap_us_max starts anew. */
void wk_core_info(struct wk_core *core, uint64_t now_us, struct msg_worker_info *ret_info);
/* Live leases, for KvPing; writes at most max and returns how many there are. */
uint32_t wk_core_leases(const struct wk_core *core, uint64_t *ret_leases, uint32_t max);
const struct wk_stats *wk_core_stats(const struct wk_core *core);
void wk_core_census(const struct wk_core *core, struct wk_census *ret_census);
bool wk_core_drafter_up(const struct wk_core *core, uint64_t now_us);
bool wk_core_drafter_poor(const struct wk_core *core);
const struct wk_plan_ring *wk_core_ring(const struct wk_core *core);
/* Entries in the executor's table: seqs_max and room for zombies. */
uint32_t wk_core_entries(const struct wk_core_options *options);
/* Capacities of a plan, for whoever makes buffers of the same size. */
uint32_t wk_core_plan_seqs(const struct wk_core_options *options);

/* Another key for block hashes: earlier blocks will not be found again.  Only while detached. */
void wk_core_key(struct wk_core *core, const struct block_hash_key *key);

#endif
