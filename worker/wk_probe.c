/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_probe.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/model/model.h"
#include "worker/wk_fabric.h"

#define ROUNDS_MAX 200u
#define ROUNDS_MIN 5u
#define WARM_UP    3u

static const uint32_t sizes[WK_PROBE_SIZES] = {8, 4096, 65536, 1u << 20};
#define SIZE_LATENCY   1u /* index of the size that each floor speaks of */
#define SIZE_BANDWIDTH 3u
/* A path of 1 Gbit/s carries 125 MB/s at best; Ethernet of that kind is what fabrics fall to. */
#define GIGABIT_MB 125u

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

struct work {
    const struct model_group *group;
    uint8_t *own, *all;
    uint32_t us[ROUNDS_MAX];
};

/* Rank 0 decides when a size is done, for all: ranks never differ in the number of rounds. */
static enum err size_run(struct wk_fabric *f, struct work *w, uint32_t bytes,
                         struct wk_probe_row *ret_row)
{
    uint64_t end_us = clock_mono_us() + WK_PROBE_SIZE_MS * 1000u;
    uint32_t rounds = 0, ranks = wk_fabric_ranks(f), go[WK_RANKS_MAX], more;
    for (uint32_t i = 0; i < WARM_UP; i++)
        TRY(w->group->all_gather(w->group->arg, w->own, bytes, w->all));
    do {
        uint64_t begun = clock_mono_us();
        TRY(w->group->all_gather(w->group->arg, w->own, bytes, w->all));
        w->us[rounds++] = (uint32_t)(clock_mono_us() - begun);
        more = rounds < ROUNDS_MIN || (rounds < ROUNDS_MAX && clock_mono_us() < end_us);
        TRY(wk_all_gather(f, &more, sizeof more, go));
    } while (go[0]);
    qsort(w->us, rounds, sizeof w->us[0], by_value);
    ret_row->bytes = bytes;
    ret_row->rounds = rounds;
    ret_row->median_us = w->us[rounds / 2] > 0 ? w->us[rounds / 2] : 1;
    ret_row->p95_us = w->us[rounds - 1 - rounds / 20];
    ret_row->bandwidth_mb =
        (uint32_t)((uint64_t)bytes * (ranks > 1 ? ranks - 1 : 1) / ret_row->median_us);
    return ERR_OK;
}

static enum err rows_run(struct wk_fabric *f, struct work *w, struct wk_probe_report *report)
{
    struct wk_probe_report all[WK_RANKS_MAX];
    memset(report, 0, sizeof *report);
    for (uint32_t i = 0; i < WK_PROBE_SIZES; i++)
        TRY(size_run(f, w, sizes[i], &report->rows[i]));
    TRY(wk_all_gather(f, report, sizeof *report, all));
    *report = all[0]; /* all ranks must come to the same, also where medians are equal */
    for (uint32_t r = 1; r < wk_fabric_ranks(f); r++)
        for (uint32_t i = 0; i < WK_PROBE_SIZES; i++)
            if (all[r].rows[i].median_us > report->rows[i].median_us)
                report->rows[i] = all[r].rows[i];
    return ERR_OK;
}

enum err wk_probe_judge(const struct wk_probe_report *report, const struct wk_probe_floors *floors,
                        const char *path, struct err_detail *detail)
{
    const struct wk_probe_row *small = &report->rows[SIZE_LATENCY];
    const struct wk_probe_row *big = &report->rows[SIZE_BANDWIDTH];
    if (floors->bandwidth_mb_min > 0 && big->bandwidth_mb < floors->bandwidth_mb_min)
        return err_set(
            detail, ERR_UNSUPPORTED,
            "fabric %s is too slow: %u MB/s in exchanges of 1 MiB (median %u us, p95 %u us), the "
            "floor is %u MB/s; likely cause: %s",
            path, big->bandwidth_mb, big->median_us, big->p95_us, floors->bandwidth_mb_min,
            big->bandwidth_mb <= GIGABIT_MB
                ? "the wrong interface, no more than 1 Gbit/s passes: give the address of the "
                  "fast link"
                : "one of two rails is down, the MTU is small, or the host is busy");
    if (floors->latency_us_max > 0 && small->median_us > floors->latency_us_max)
        return err_set(detail, ERR_UNSUPPORTED,
                       "fabric %s is too slow: an exchange of 4 KiB takes %u us (p95 %u us), the "
                       "floor is %u us; likely cause: %s",
                       path, small->median_us, small->p95_us, floors->latency_us_max,
                       small->median_us >= 1000 ? "the path leaves the rack or the wrong interface"
                                                : "a transport without RDMA, or a busy host");
    return ERR_OK;
}

enum err wk_probe_run(struct wk_fabric *f, const struct model_group *group,
                      const struct wk_probe_floors *floors, const char *path,
                      struct wk_probe_report *ret_report, struct err_detail *detail)
{
    uint32_t largest = sizes[WK_PROBE_SIZES - 1];
    struct work *w = mem_take(sizeof *w);
    struct wk_probe_report report;
    w->group = group;
    w->own = mem_take(largest);
    w->all = mem_take_array(wk_fabric_ranks(f), largest);
    wk_fabric_step(f, 0);
    enum err e = rows_run(f, w, &report);
    if (e != ERR_OK)
        wk_fabric_fault(f, detail);
    mem_give(w->own);
    mem_give(w->all);
    mem_give(w);
    TRY(e);
    *ret_report = report;
    return wk_probe_judge(&report, floors, path, detail);
}
