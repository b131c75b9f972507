/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_plan_decode.h - a plan from its encoding, as a rank above 0 receives it.
 *
 * Pure.  The bytes come from another machine: every count and index is checked against the plan's
 * capacities and the executor's limits before anything uses it. */
#ifndef WORKER_WK_PLAN_DECODE_H
#define WORKER_WK_PLAN_DECODE_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct wk_plan;

/* What the receiving executor has room for. */
struct wk_plan_limits {
    uint32_t entries;     /* sequences in its tables */
    uint32_t live_slots;  /* state slots of running sequences */
    uint32_t slot_count;  /* with those behind them for snapshots */
    uint32_t block_count; /* blocks of the arena */
    uint32_t table_max;   /* blocks in one sequence's table */
    uint32_t context_max, vocab_size, layer_count;
};

/* Fills a plan made by wk_plan_create, hash and encoding included, so that wk_plan_admit judges
 * it.  ERR_INVALID names the field; the plan is then undefined. */
MUST_USE enum err wk_plan_decode(const uint8_t *bytes, size_t count,
                                 const struct wk_plan_limits *limits, struct wk_plan *ret_plan,
                                 struct err_detail *detail);

#endif
