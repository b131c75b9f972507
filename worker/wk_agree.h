/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_agree.h - all ranks hold the same plan, or none begins it.
 *
 * Before the first collective of a step every rank shows step, epochs and hash of its plan, or why
 * it refuses it; the same comparison on every rank gives the same verdict and text.  A rank with
 * nothing to do in the step takes part too.  Device thread; allocates nothing. */
#ifndef WORKER_WK_AGREE_H
#define WORKER_WK_AGREE_H

#include <stdint.h>

#include "lib/base/err.h"

struct wk_fabric;
struct wk_plan;

struct wk_agree_epochs { /* of the arenas, by rank: blocks and slots mean the same or nothing */
    uint32_t self, peer;
};

/* own: what this rank found about the plan (wk_plan_admit, wk_plan_decode); ERR_OK = good.  With
 * another own verdict the plan may be NULL.  On refusal the group is left on every rank. */
MUST_USE enum err wk_agree_step(struct wk_fabric *f, const struct wk_plan *plan, uint64_t step,
                                const struct wk_agree_epochs *epochs, enum err own,
                                struct err_detail *detail);

#endif
