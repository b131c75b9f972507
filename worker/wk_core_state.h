/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_core_state.h - the core's own data, shared by wk_core*.c and wk_batch.c only.
 *
 * Loop thread.  Pure.  All arrays are taken at create. */
#ifndef WORKER_WK_CORE_STATE_H
#define WORKER_WK_CORE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/wk_blocks.h"
#include "worker/wk_core.h"
#include "worker/wk_cost.h"
#include "worker/wk_ids.h"
#include "worker/wk_plan.h"
#include "worker/wk_policy.h"
#include "worker/wk_spec.h"
#include "worker/wk_verify.h"

#define WK_CORE_MAGIC 0x574b434fu
#define WK_SEQ_MAGIC  0x574b5351u
#define WK_GRANTS_MAX (2u * MSG_GRANTS_MAX) /* named ones may not be in the newest list */

enum wk_seq_state {
    WK_SEQ_FREE,
    WK_SEQ_WAITING, /* no lease: kv.state says whether one is asked for */
    WK_SEQ_PREFILL,
    WK_SEQ_DECODE,
    WK_SEQ_ZOMBIE, /* over for the client; the executor may still write its rows */
};

enum wk_draft_state { WK_DRAFT_NONE, WK_DRAFT_ASKED, WK_DRAFT_READY };

struct wk_draft {
    enum wk_draft_state state;
    bool opened;
    bool barred;     /* too long for this drafter: not asked again */
    uint32_t epoch;  /* of the DraftOpen */
    uint32_t length; /* tokens that the drafter holds */
    uint64_t step;   /* of the question */
    uint64_t deadline_us;
    uint32_t wanted, count;
    uint32_t verify; /* of them, as the policy of the request has it */
    uint32_t ids[MSG_DRAFT_IDS_MAX];
};

struct wk_seq {
    uint32_t magic;
    enum wk_seq_state state;
    struct msg_id id;
    uint32_t attempt;
    bool canary;
    bool in_flight, in_batch;
    bool replan; /* to be planned anew as soon as the executor lets go of it */
    bool replan_release;
    bool keep;       /* ends here but goes on elsewhere: what it computed is worth keeping */
    uint64_t serial; /* order of arrival */
    char session_key[MSG_TEXT_MAX + 1], cache_salt[MSG_TEXT_MAX + 1];
    struct hash128 salt;
    uint32_t prompt_count;
    struct wk_limits limits;
    uint32_t stop_ids[WK_STOP_IDS_MAX];
    struct wk_plan_setup setup;
    struct wk_spec spec;
    struct wk_history history; /* of its drafts */
    uint64_t deadline_us;      /* 0 = none */

    uint32_t computed; /* tokens whose rows are in the cache and final */
    uint32_t replay;   /* journal rows that the next step applies */
    uint32_t final_count, final_ids[WK_STEP_ROWS_MAX]; /* not yet told to the executor */
    uint32_t step_drafts;                              /* of the step in flight */
    uint32_t step_rows;                                /* of the batch or step in flight */
    uint32_t step_ids[WK_STEP_ROWS_MAX];
    bool step_journal;
    bool
        flush; /* over, but its last step brought it to a boundary: one more row for the snapshot */
    uint32_t snap_tokens, snap_slot; /* snapshot in the plan in flight; tokens 0 = none */
    struct wk_blocks kv;
    struct wk_draft draft;

    uint64_t assigned_us, first_slice_us, first_token_us, last_emit_us;
    uint64_t ready_us, served_us; /* prefill: since when, last slice (0 = none yet) */
    uint32_t drafted, accepted, steps, preempted, resumed, concurrency;
    uint64_t draft_us, verify_us; /* its steps: waited for drafts, were computed */
    uint32_t cached;              /* tokens of the prompt that its first lease brought along */
    bool opened;                  /* had a lease */
};

enum wk_grant_state {
    WK_GRANT_FREE,
    WK_GRANT_PLANNED, /* in a plan that is not done */
    WK_GRANT_NAMED,   /* in a KvSnapshot that is not answered */
};

struct wk_grant {
    uint32_t slot;
    enum wk_grant_state state;
    struct msg_id request; /* of the KvSnapshot, to send it again */
    uint64_t lease, asked_us;
    uint32_t tokens;
    struct hash128 hash;
};

struct wk_flight {
    bool active;
    enum wk_plan_kind kind;
    uint64_t step, begun_us;
    uint32_t rows, layers;
    double context, share;
    uint32_t seq_count;
    uint32_t *entries; /* decode: in plan order */
};

/* The prefill batch in the executor, paused between two slices or in flight. */
struct wk_prefill {
    bool active;
    uint32_t layer; /* next to run */
    uint32_t rows, seq_count;
    double context;
    uint32_t entries[WK_PREFILL_SEQS_MAX];
};

struct wk_core {
    uint32_t magic;
    struct wk_core_options options;
    uint32_t stop_ids[16];
    uint32_t entry_count, live_count;
    struct wk_seq *seqs;
    uint32_t *order; /* entries in use, by serial */
    uint32_t order_count;
    uint32_t *chosen; /* work space of a decision */
    uint32_t *block_ids;
    struct hash128 *hashes;
    struct wk_ids *ids;
    struct wk_plan *plan;
    struct wk_plan_ring *ring;
    struct wk_cost cost_prefill, cost_decode;
    struct wk_cost cost_draft; /* time that steps wait for drafts, by how many asked */
    struct wk_flight flight;
    struct wk_prefill prefill;
    uint64_t step, serial, draft_step;
    enum wk_plan_kind last_kind;
    uint32_t decode_next;                    /* rotates who rides when a step cannot hold all */
    uint64_t debt_us;                        /* decode time owed before the next prefill slice */
    uint64_t prefill_run_us, decode_us_last; /* slices since the last step; that step */
    double decode_context;                   /* mean length in the last step */
    uint64_t cycle_us;                       /* when the last plan was done */
    uint32_t decoders;                       /* at that time */
    uint32_t draft_pause, draft_pause_next;  /* steps for which the drafter is not asked */
    uint64_t preempted_serial;
    bool draining, stopping;
    uint64_t drain_deadline_us;
    uint64_t router_incarnation;
    bool kv_attached;
    uint32_t kv_epoch, kv_blocks_free, context_max;
    struct wk_arena_shape shape;
    uint32_t grant_count;
    struct wk_grant grants[WK_GRANTS_MAX];
    uint64_t kv_seen_us, kv_retry_us;
    uint64_t drafter_incarnation, drafter_seen_us;
    uint32_t drafter_max;
    bool drafter_taps;  /* it wants hidden states */
    uint64_t tap_end;   /* of the last result */
    double accept_rate; /* of the drafter's own drafts, smoothed */
    uint32_t accept_steps;
    bool drafter_poor;                /* fewer of its drafts are right than accept_floor */
    double decode_rate, prefill_rate; /* tokens a second, smoothed */
    uint64_t gap_us_window;
    struct wk_stats stats;
    uint64_t now_us, now_unix_us; /* of the event at hand */
    struct wk_actions *actions;   /* of the event at hand */
};

/* wk_core.c */
struct msg *wk_core_send(struct wk_core *core, enum wk_action_type to, enum msg_type type,
                         const struct msg_id *id);
struct wk_seq *wk_core_find(struct wk_core *core, const struct msg_id *id);
uint32_t wk_core_entry(const struct wk_core *core, const struct wk_seq *seq);
uint32_t wk_core_length(const struct wk_core *core, const struct wk_seq *seq);
uint32_t wk_core_outputs(const struct wk_core *core, const struct wk_seq *seq);
void wk_core_free(struct wk_core *core, struct wk_seq *seq);
/* Nothing more is to be computed for it. */
void wk_core_flush_end(struct wk_core *core, struct wk_seq *seq);

/* wk_core_request.c */
void wk_core_assign(struct wk_core *core, const struct msg *m);
void wk_core_router_state(struct wk_core *core, const struct msg *m);
uint64_t wk_core_deadlines(struct wk_core *core); /* when the next one passes; 0 = none */
/* Hands every request that no plan holds back to the router, which carries on elsewhere. */
void wk_core_hand_back(struct wk_core *core);
/* Tokens [0, count) of r (NULL with 0) leave, with the finish unless it is NONE. */
void wk_core_emit(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r,
                  uint32_t count, uint32_t finish, enum err code);
/* Counts and forgets a request whose finish has left. */
void wk_core_end(struct wk_core *core, struct wk_seq *seq, uint32_t finish);
/* Both, without tokens. */
void wk_core_fail(struct wk_core *core, struct wk_seq *seq, uint32_t finish, enum err code);

/* wk_core_done.c */
void wk_core_done(struct wk_core *core, const struct wk_result *result);

/* wk_core_kv.c */
void wk_core_kv_msg(struct wk_core *core, const struct msg *m);
void wk_core_kv_attached(struct wk_core *core, const struct wk_event *event);
void wk_core_kv_detached(struct wk_core *core);
void wk_core_kv_pump(struct wk_core *core);
void wk_core_kv_commit(struct wk_core *core, struct wk_seq *seq);
void wk_core_kv_release(struct wk_core *core, struct wk_seq *seq, bool keep);
/* Plans the sequence anew from its tokens, now or when the executor lets go of it.  release: the
 * lease is given back, what was computed stays cached. */
void wk_core_replan(struct wk_core *core, struct wk_seq *seq, bool release);
void wk_core_preempt_if_stuck(struct wk_core *core);
bool wk_core_kv_silent(const struct wk_core *core);

/* wk_core_snap.c */
/* Where seq's next prefill pass has to stop for the sake of a snapshot, or its length. */
uint32_t wk_snap_prefill_end(const struct wk_core *core, const struct wk_seq *seq);
/* As many of these drafts as do not step over the next boundary. */
uint32_t wk_snap_drafts_max(const struct wk_core *core, const struct wk_seq *seq, uint32_t position,
                            uint32_t drafts);
/* True: the plan at hand is to copy the state, which will hold `tokens` tokens, to *ret_slot. */
bool wk_snap_plan(struct wk_core *core, struct wk_seq *seq, uint32_t tokens, uint32_t *ret_slot);
/* Whether an ending sequence needs one more step to have its last boundary kept. */
bool wk_snap_flush(const struct wk_core *core, const struct wk_seq *seq);
/* The plan is done: tells kvmgr of the copy if it is good and its block committed. */
void wk_snap_settle(struct wk_core *core, struct wk_seq *seq, bool good);
void wk_snap_granted(struct wk_core *core, const uint32_t *slots, uint32_t count);
void wk_snap_reply(struct wk_core *core, const struct msg_kv_snapshot_reply *reply);
void wk_snap_pump(struct wk_core *core);

/* wk_core_draft.c */
void wk_core_draft_msg(struct wk_core *core, const struct msg *m);
void wk_core_draft_ask(struct wk_core *core, struct wk_seq *seq);
/* Whether the model drafts by a layer of its own; then its drafts come with the result. */
bool wk_core_draft_own(const struct wk_spec *spec);
void wk_core_draft_take(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r);
void wk_core_draft_close(struct wk_core *core, struct wk_seq *seq);
bool wk_core_draft_settled(const struct wk_core *core, const struct wk_seq *seq);
void wk_core_draft_check(struct wk_core *core);
/* Tells the drafter what is new of a sequence that asks nothing now, so that its taps are taken as
 * they come; opens it where that was not done. */
void wk_core_draft_feed(struct wk_core *core, struct wk_seq *seq);
/* What became of a step's drafts. */
void wk_core_draft_verdict(struct wk_core *core, struct wk_seq *seq, uint32_t accepted);

/* wk_batch.c: drafts that ride along with each of `decoders` sequences, as rows allow */
uint32_t wk_batch_drafts_max(const struct wk_core *core, uint32_t decoders);
/* Decides what runs next and fills core->plan; false = nothing now. */
bool wk_batch_next(struct wk_core *core, uint64_t *ret_wake_us);

#endif
