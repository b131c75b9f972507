/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_plan_dump.h - the last plans of a rank as a file, for the post-mortem of a fault.
 *
 * The format is described in docs/architecture.md ("Plan dump").  Called on a fault only; replaces
 * an older dump whole. */
#ifndef WORKER_WK_PLAN_DUMP_H
#define WORKER_WK_PLAN_DUMP_H

#include <stdint.h>

#include "lib/base/err.h"

struct wk_plan_ring;

struct wk_plan_dump_head {
    uint32_t rank, ranks;
    uint32_t epoch;     /* of the group */
    uint64_t now_us;    /* on the clock of the ring's times */
    const char *reason; /* one line */
};

MUST_USE enum err wk_plan_dump(const struct wk_plan_ring *ring,
                               const struct wk_plan_dump_head *head, const char *path,
                               struct err_detail *detail);

#endif
