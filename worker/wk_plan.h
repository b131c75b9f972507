/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_plan.h - the step plan: what every rank carries out, its encoding, hash and ring.
 *
 * A plan is filled by the batching core (loop thread), handed to the device thread whole and left
 * alone until its result is back.  All arrays are sized once by wk_plan_create.  Pure. */
#ifndef WORKER_WK_PLAN_H
#define WORKER_WK_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

#define WK_STEP_ROWS_MAX    8u  /* rows of a verify step: the anchor and up to 7 drafts */
#define WK_PREFILL_SEQS_MAX 16u /* sequences that may share one prefill batch */
#define WK_STOP_IDS_MAX     (MSG_STOP_IDS_MAX + 16u) /* a request's and the model's */
#define WK_PLAN_RING_COUNT  256u
#define WK_NONE             UINT32_MAX

enum wk_plan_kind {
    WK_PLAN_PREFILL = 1, /* a slice of a prefill batch: rows at begin, then layers */
    WK_PLAN_DECODE = 2,  /* one decode or verify step of all its sequences */
    WK_PLAN_ABANDON = 3, /* drop the prefill batch that is paused */
};

/* What the executor must know of a sequence; travels with the sequence's first rows. */
struct wk_plan_setup {
    struct msg_id id;      /* of the request: names the taps */
    bool taps;             /* hidden states go to the drafter */
    uint32_t mtp;          /* drafts of the model's own layer after each step, 0..7 */
    uint32_t prompt_count; /* ids at or past it count as output for penalties */
    uint32_t output_tokens_min;
    double temperature, top_p, min_p;
    uint32_t top_k;
    double repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    uint32_t choice;
    bool logprobs;
    uint32_t top_logprobs;
    uint32_t bias_count;
    uint32_t bias_ids[MSG_BIAS_MAX];
    float bias_values[MSG_BIAS_MAX];
    uint32_t banned_count; /* stop ids, banned below output_tokens_min */
    uint32_t banned_ids[WK_STOP_IDS_MAX];
};

struct wk_plan_seq {
    uint32_t entry; /* index in the executor's table of sequences */
    uint32_t setup; /* index in setups, WK_NONE unless these are the first rows */
    uint32_t state_slot;
    uint32_t position_start;
    uint32_t row_count;
    uint32_t replay_count;
    uint32_t logits_from; /* row_count = none */
    bool fresh, journal;
    bool restore;  /* with the first rows: restore_slot's state is copied to state_slot before */
    bool snapshot; /* state_slot's state is copied to snapshot_slot after these rows */
    uint32_t restore_slot, snapshot_slot;
    uint32_t history_at, history_count; /* with a setup that counts tokens: those before the rows */
    uint32_t ids_at;                    /* rows' ids in ids */
    uint32_t final_count;               /* decode: ids that became final since the last plan; */
    uint32_t final_ids[WK_STEP_ROWS_MAX]; /* the last of them is row 0 */
    uint32_t block_first, block_count;    /* table gets blocks[blocks_at...] from block_first on */
    uint32_t blocks_at;
};

struct wk_plan {
    uint32_t magic;
    uint64_t step;
    uint32_t epoch;
    enum wk_plan_kind kind;
    bool begin;         /* prefill: starts a batch (seqs given); else goes on with the paused one */
    bool finish;        /* prefill: last slice of its batch, logits follow */
    uint32_t layer_end; /* prefill: run up to this layer */
    uint32_t seq_count, row_count, block_count, setup_count;
    struct wk_plan_seq *seqs;
    uint32_t *ids;
    uint32_t *blocks;
    uint32_t history_total;
    uint32_t *history; /* ids whose rows are in the cache already */
    struct wk_plan_setup *setups;
    uint32_t seqs_max, rows_max, blocks_max, history_max; /* capacities */
    struct hash128 hash; /* over the encoding; set by wk_plan_seal */
    uint8_t *encoding;
    size_t encoding_bytes, encoding_bytes_max;
};

/* Setups: WK_PREFILL_SEQS_MAX. */
struct wk_plan *wk_plan_create(uint32_t seqs_max, uint32_t rows_max, uint32_t blocks_max,
                               uint32_t history_max);
/* Whether sampling by this setup looks at the tokens before. */
bool wk_plan_penalised(const struct wk_plan_setup *s);
void wk_plan_destroy(struct wk_plan **plan_p);
void wk_plan_clear(struct wk_plan *p, uint64_t step, uint32_t epoch, enum wk_plan_kind kind);

/* Encodes every field of the plan (little-endian, no padding) and hashes the bytes. */
void wk_plan_seal(struct wk_plan *p);

/* Refuses, before anything runs, a plan that is not the next one: ERR_INVALID for a gap or a
 * duplicate, ERR_EPOCH for another epoch, ERR_CORRUPT where the hash is not that of the content. */
MUST_USE enum err wk_plan_admit(const struct wk_plan *p, uint64_t step_last, uint32_t epoch,
                                struct err_detail *detail);

/* What came of a plan: sampled ids per sequence of the batch, in its order. */
struct wk_result_seq {
    uint32_t entry;
    uint32_t count; /* 0 where the sequence had no logits */
    uint32_t ids[WK_STEP_ROWS_MAX];
    uint32_t draft_count; /* of the model's own layer: what may follow ids */
    uint32_t draft_ids[WK_STEP_ROWS_MAX];
    uint32_t top_count;
    float logprob[WK_STEP_ROWS_MAX];
    uint32_t top_ids[WK_STEP_ROWS_MAX * MSG_TOP_LOGPROBS_MAX]; /* row j at j * top_count */
    float top_logprobs[WK_STEP_ROWS_MAX * MSG_TOP_LOGPROBS_MAX];
};

struct wk_result {
    uint64_t step;
    struct hash128 plan_hash;
    enum err status;
    uint64_t step_us;
    uint64_t tap_end; /* records in the tap ring; 0 without one */
    uint32_t seq_count;
    struct wk_result_seq *seqs;
};

/* The last WK_PLAN_RING_COUNT plans for a post-mortem; encodings as far as bytes_max holds. */
struct wk_plan_past {
    uint64_t step;
    struct hash128 hash;
    enum wk_plan_kind kind;
    uint32_t seq_count, row_count, layer_end;
    uint64_t begun_us, step_us; /* step_us 0 = no result yet */
    uint32_t bytes;             /* of the encoding */
    const uint8_t *encoding;    /* NULL once overwritten */
};
struct wk_plan_ring;
struct wk_plan_ring *wk_plan_ring_create(size_t bytes_max);
void wk_plan_ring_destroy(struct wk_plan_ring **ring_p);
void wk_plan_ring_add(struct wk_plan_ring *r, const struct wk_plan *p, uint64_t now_us);
void wk_plan_ring_done(struct wk_plan_ring *r, uint64_t step, uint64_t step_us);
/* back = 0 is the newest.  False where there is none. */
bool wk_plan_ring_at(const struct wk_plan_ring *r, uint32_t back, struct wk_plan_past *ret_past);

#endif
