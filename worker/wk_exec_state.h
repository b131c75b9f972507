/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_exec_state.h - the executor's own data, shared by wk_exec.c (the thread and what the
 * loop thread may call), wk_exec_run.c (carries out plans) and wk_exec_group.c (forms the group of
 * ranks, follows rank 0) only.  Device thread, except where a field says otherwise. */
#ifndef WORKER_WK_EXEC_STATE_H
#define WORKER_WK_EXEC_STATE_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "worker/wk_canary.h"
#include "worker/wk_exec.h"
#include "worker/wk_exec_tables.h"
#include "worker/wk_plan_dump.h"
#include "worker/wk_ranks.h"
#include "worker/wk_rows.h"

struct wk_exec {
    uint32_t magic;
    struct wk_exec_options options;
    pthread_t thread;
    sem_t wake;
    struct ring *orders, *news;
    _Atomic uint64_t bytes_done, bytes_total;
    struct err_detail failure;
    struct wk_loaded loaded;
    atomic_bool ending;
    _Atomic uint64_t steps;
    atomic_bool grouped;  /* all ranks are there */
    atomic_uint attaches; /* orders that wait */

    /* device thread only */
    struct model *model;
    struct model_cursor *prefill_cursor, *decode_cursor;
    struct sampler *sampler;
    struct wk_tables *tables;
    struct mtp *mtp;        /* NULL = not loaded */
    struct mtp_feed *feeds; /* [plan_seqs] of one batch, and whose results they are */
    struct wk_result_seq **fed;
    uint32_t feed_count;
    struct model_kv kv;
    uint32_t epoch;
    uint64_t step_last;
    struct model_seq *seqs; /* of a decode step */
    struct model_seq batch_seqs[WK_PREFILL_SEQS_MAX];
    uint32_t batch_entries[WK_PREFILL_SEQS_MAX];
    uint32_t batch_snapshots[WK_PREFILL_SEQS_MAX]; /* slot that takes the state, WK_NONE */
    struct model_batch batch;                      /* of prefill; row_count 0 = none paused */
    uint32_t *batch_ids;
    struct wk_taps *taps, *taps_next; /* in use; to be used once no batch is paused */
    struct wk_result result;
    struct wk_ranks *ranks;
    bool follows;     /* a rank above 0 */
    bool settled;     /* has seen the probe and the canary of a whole group */
    enum err refused; /* the group, last: by what, and when it was said */
    uint64_t refused_us;
    struct hash128 settings;
    struct wk_plan *heard;
    struct wk_plan_ring *ring; /* with ranks: for the dump */
    char dump_path[512];
};

static inline uint32_t wk_exec_prefill_seqs_max(const struct wk_exec_options *o)
{
    return o->slice_rows_max < WK_PREFILL_SEQS_MAX ? o->slice_rows_max : WK_PREFILL_SEQS_MAX;
}

static inline uint32_t wk_exec_decode_seqs_max(const struct wk_exec_options *o)
{
    return o->plan_seqs < o->decode_rows_max ? o->plan_seqs : o->decode_rows_max;
}

struct wk_canary wk_exec_canary(const struct wk_exec *x);

/* ---- wk_exec_run.c ---- */

/* Rank 0: agrees on the plan with the others and carries it out; x->result says how it went. */
void wk_exec_plan(struct wk_exec *x, const struct wk_plan *p);
/* The plan, admitted before.  The fault of a collective while it ran. */
MUST_USE enum err wk_exec_carry_out(struct wk_exec *x, const struct wk_plan *p);
struct wk_tables_room wk_exec_room(const struct wk_exec *x);
void wk_exec_batch_drop(struct wk_exec *x); /* the paused prefill batch, if any */

/* ---- wk_exec_group.c: only with ranks ---- */

/* The first forming, probe and canary; these return when the group is whole or, with
 * ERR_CANCELLED, when the executor ends. */
MUST_USE enum err wk_exec_group_begin(struct wk_exec *x);
/* Rank 0: tells the others of the cache memory in x->kv.  ERR_BUSY: they refused it, and the shell
 * has named another since. */
MUST_USE enum err wk_exec_shape_tell(struct wk_exec *x, struct hash128 *ret_memory);
/* Rank 0: all ranks have marked as committed what it names; else the group is lost. */
MUST_USE enum err wk_exec_seal_tell(struct wk_exec *x, const struct wk_seal *seals, uint32_t count);
/* Other ranks: one order of rank 0, or the group formed anew. */
void wk_exec_follow(struct wk_exec *x);
/* text NULL = what the fabric says. */
void wk_exec_group_lost(struct wk_exec *x, enum err e, const char *text);

#endif
