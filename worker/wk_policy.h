/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_policy.h - how many drafts a step verifies, from what became of earlier ones.
 *
 * Pure.  The drafter always drafts its whole block; a policy only chooses how much of it is
 * verified, so it can change the speed and never the text.  `ema` reads the request's own history;
 * `goodput` also the cost of a step as measured. */
#ifndef WORKER_WK_POLICY_H
#define WORKER_WK_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "worker/wk_spec.h"

#define WK_EMA_SET_MAX 7u

struct wk_ema_knobs {
    uint32_t set_count;
    uint32_t set[WK_EMA_SET_MAX]; /* rising, 1..WK_SPEC_DRAFTS_MAX */
    double alpha, margin;
    uint32_t steps_min; /* the full block before so many steps */
    bool saturate;      /* all accepted counts as the longest draft */
};

/* "2,4,7"; refusals name the entry. */
MUST_USE enum err wk_ema_set_parse(const char *text, struct wk_ema_knobs *knobs,
                                   struct err_detail *detail);

/* What a request's steps showed. */
struct wk_history {
    double mean;       /* of accepted drafts, smoothed; starts at the longest draft */
    uint32_t observed; /* steps with drafts */
    double chance[WK_SPEC_DRAFTS_MAX]; /* draft j+1 is right, given those before it were */
    uint32_t seen[WK_SPEC_DRAFTS_MAX];
    uint32_t idle_steps, probe_every; /* goodput: steps without drafts, next probe */
};

void wk_history_begin(struct wk_history *h);
/* A step that verified `drafted` >= 1 drafts. */
void wk_history_add(struct wk_history *h, const struct wk_ema_knobs *knobs, uint32_t drafted,
                    uint32_t accepted);
/* A goodput step without drafts. */
void wk_history_idle(struct wk_history *h);

uint32_t wk_policy_ema(const struct wk_history *h, const struct wk_ema_knobs *knobs);
/* The batch rule of ema: the least K of its requests. */
uint32_t wk_policy_ema_batch(const uint32_t *wanted, uint32_t count);

/* cost_us[k]: a step of the same batch in which this request verifies k drafts. */
uint32_t wk_policy_goodput(const struct wk_history *h,
                           const double cost_us[WK_SPEC_DRAFTS_MAX + 1]);

#endif
