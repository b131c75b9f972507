/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_agree.h"

#include <inttypes.h>
#include <string.h>

#include "lib/base/check.h"
#include "worker/wk_fabric_parts.h"
#include "worker/wk_plan.h"

/* What a rank shows; compared byte by byte. */
struct ballot {
    uint64_t step;
    struct hash128 hash;
    uint32_t epochs[2]; /* of rank 0's arena and of the others' */
    uint32_t own;       /* enum err */
    uint32_t zero;
};
STATIC_CHECK(sizeof(struct ballot) == 40);

static uint32_t hash_word(const struct hash128 *h)
{
    return (uint32_t)h->bytes[0] << 24 | (uint32_t)h->bytes[1] << 16 | (uint32_t)h->bytes[2] << 8 |
           h->bytes[3];
}

/* The verdict depends on the ballots alone, which all ranks have. */
static enum err judge(struct wk_fabric *f, const struct ballot *all, struct err_detail *detail)
{
    uint32_t ranks = wk_fabric_ranks(f);
    enum err e = ERR_OK;
    struct err_detail why = {{0}};
    for (uint32_t r = 0; r < ranks && e == ERR_OK; r++) {
        if (all[r].own == ERR_OK)
            continue;
        e = all[r].own < ERR_COUNT ? (enum err)all[r].own : ERR_CORRUPT;
        err_set(&why, e, "step %" PRIu64 ": rank %u refuses the plan: %s", all[0].step, r,
                err_text(e));
    }
    for (uint32_t r = 1; r < ranks && e == ERR_OK; r++) {
        if (memcmp(&all[r], &all[0], sizeof all[0]) == 0)
            continue;
        bool epochs = memcmp(all[r].epochs, all[0].epochs, sizeof all[0].epochs) != 0;
        e = err_set(&why, epochs ? ERR_EPOCH : ERR_INVALID,
                    "plans differ: rank 0 has step %" PRIu64 " hash %08x epochs %u,%u; rank %u has "
                    "step %" PRIu64 " hash %08x epochs %u,%u",
                    all[0].step, hash_word(&all[0].hash), all[0].epochs[0], all[0].epochs[1], r,
                    all[r].step, hash_word(&all[r].hash), all[r].epochs[0], all[r].epochs[1]);
    }
    if (e == ERR_OK)
        return ERR_OK;
    if (detail != NULL)
        *detail = why;
    return wk_fabric_fail(f, e, "%s", why.text);
}

enum err wk_agree_step(struct wk_fabric *f, const struct wk_plan *plan, uint64_t step,
                       const struct wk_agree_epochs *epochs, enum err own,
                       struct err_detail *detail)
{
    struct ballot ballot = {.step = step, .own = (uint32_t)own}, all[WK_RANKS_MAX];
    bool first = wk_fabric_rank(f) == 0;
    CHECK(own != ERR_OK || (plan != NULL && plan->step == step));
    ballot.epochs[0] = first ? epochs->self : epochs->peer;
    ballot.epochs[1] = first ? epochs->peer : epochs->self;
    if (plan != NULL)
        ballot.hash = plan->hash;
    /* The ballots themselves travel outside of any step: ranks that differ in it must meet. */
    wk_fabric_step(f, 0);
    enum err e = wk_all_gather(f, &ballot, sizeof ballot, all);
    if (e != ERR_OK) {
        wk_fabric_fault(f, detail);
        return e;
    }
    TRY(judge(f, all, detail));
    wk_fabric_step(f, step);
    return ERR_OK;
}
