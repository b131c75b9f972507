/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_exec_tables.h - what the device thread knows of each sequence: block table, sampling
 * parameters, token counts for penalties.  Device thread only; changed by plans alone. */
#ifndef WORKER_WK_EXEC_TABLES_H
#define WORKER_WK_EXEC_TABLES_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/sampler.h"
#include "worker/wk_plan.h"

struct wk_entry {
    struct wk_plan_setup setup;
    struct sampler_params params; /* of setup; borrows its arrays */
    uint32_t *blocks;
    uint32_t block_count;
    bool penalised;         /* the counts below are kept */
    uint32_t history_count; /* tokens in them */
    uint8_t *in_context;    /* [vocab] */
    uint16_t *output_count; /* [vocab] */
};

struct wk_tables;

struct wk_tables *wk_tables_create(uint32_t entries, uint32_t vocab_size);
void wk_tables_destroy(struct wk_tables **tables_p);
/* Room for block tables; grows only when an arena with other blocks is attached. */
void wk_tables_blocks(struct wk_tables *t, uint32_t blocks_max);

/* What the executor can carry out at the moment. */
struct wk_tables_room {
    uint32_t prefill_rows, prefill_seqs, decode_rows, decode_seqs; /* of the cursors */
    uint32_t block_tokens;
    bool paused; /* a prefill batch waits between layers */
};

/* Whether the plan can be carried out as it is: it fits the tables, the cursors and what is going
 * on.  Changes nothing.  Together with wk_plan_decode it keeps every CHECK behind it out of reach
 * of another machine's bytes.  ERR_INVALID says what does not fit. */
MUST_USE enum err wk_tables_admit(const struct wk_tables *t, const struct wk_tables_room *room,
                                  const struct wk_plan *plan, struct err_detail *detail);
/* Applies what a plan says of its sequences: setups and new blocks. */
void wk_tables_take(struct wk_tables *t, const struct wk_plan *plan);
struct wk_entry *wk_tables_at(struct wk_tables *t, uint32_t entry);

/* Tokens that became part of the history, in order. */
void wk_tables_add(struct wk_tables *t, uint32_t entry, const uint32_t *ids, uint32_t count);

/* Samples rows [0, row_count) of a sequence: logits [row_count, vocab]; drafts[j] is the input of
 * row j + 1 and counts as history for it.  Stops after the first row whose token is not the next
 * row's input.  position = of row 0.  The history is left as it was. */
void wk_tables_sample(struct wk_tables *t, struct sampler *s, uint32_t entry, const float *logits,
                      uint32_t row_count, const uint32_t *drafts, uint32_t position,
                      struct wk_result_seq *ret_result);

#endif
