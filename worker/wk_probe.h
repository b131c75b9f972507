/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_probe.h - the fabric's self-test at start: time by size against configured floors.
 *
 * A link that silently fell back to a slow path works, and halves the speed of every token: it is
 * refused before the worker serves.  Every rank measures, the worst of all ranks counts, so that
 * all come to the same verdict.  Runs on the fabric's thread, in a joined group, in bounded time:
 * rounds of one size end after WK_PROBE_SIZE_MS. */
#ifndef WORKER_WK_PROBE_H
#define WORKER_WK_PROBE_H

#include <stdint.h>

#include "lib/base/err.h"

#define WK_PROBE_SIZES   4u
#define WK_PROBE_SIZE_MS 100u

struct model_group;
struct wk_fabric;

struct wk_probe_floors {       /* 0 = not asked for */
    uint32_t latency_us_max;   /* median of an exchange of 4 KiB */
    uint32_t bandwidth_mb_min; /* MB/s that a rank receives in exchanges of 1 MiB */
};

struct wk_probe_row {
    uint32_t bytes; /* that each rank gives */
    uint32_t rounds;
    uint32_t median_us, p95_us;
    uint32_t bandwidth_mb; /* from the median */
};

struct wk_probe_report {
    struct wk_probe_row rows[WK_PROBE_SIZES]; /* worst rank of each size */
};

/* What is measured are exchanges of the group, which may go over NCCL; the fabric is its own.
 * path names the link for the message: "tcp 10.0.0.1 (enp1s0f0np0)".  ERR_UNSUPPORTED: below a
 * floor, with the numbers and the likely cause in detail; other errors are the fabric's. */
MUST_USE enum err wk_probe_run(struct wk_fabric *f, const struct model_group *group,
                               const struct wk_probe_floors *floors, const char *path,
                               struct wk_probe_report *ret_report, struct err_detail *detail);

/* The judgement alone; pure. */
MUST_USE enum err wk_probe_judge(const struct wk_probe_report *report,
                                 const struct wk_probe_floors *floors, const char *path,
                                 struct err_detail *detail);

#endif
