/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_exec.h - the device thread: loads the model, carries out plans, decides nothing.
 *
 * Owner of the model, its two cursors (one prefill batch that may pause between layers, one decode
 * step), the sampler and the tables of sequences; those change by plans alone.  The loop thread
 * talks to it through two rings; a waker tells the loop that there is news.  One plan at a time. */
#ifndef WORKER_WK_EXEC_H
#define WORKER_WK_EXEC_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/model.h"
#include "lib/model/mtp.h"
#include "worker/wk_plan.h"

#define WK_CANARY_PROMPT 16u
#define WK_CANARY_OUTPUT 8u

struct loop_waker;
struct dflash;
struct wk_taps;
struct wk_exec;
struct wk_ranks;
struct wk_rows;
struct wk_seal;

struct wk_exec_options {
    const char *directory; /* of the model; borrowed */
    enum model_numerics numerics;
    uint32_t threads;
    uint32_t entries;   /* sequences in the tables: wk_core_entries */
    uint32_t plan_seqs; /* wk_core_plan_seqs */
    uint32_t slice_rows_max, decode_rows_max;
    uint32_t context_max; /* 0 = the model's */
    bool mtp;             /* load the MTP layer; of several ranks rank 0 does */
    enum mtp_recycle mtp_recycle;
    uint64_t mtp_tokens;
    const char *tap_fc;     /* drafter weights whose fc is applied to taps; NULL or "" = none */
    uint32_t group;         /* no rank of another one joins */
    struct wk_ranks *ranks; /* NULL = this worker holds the whole model; borrowed */
    struct wk_rows *rows;   /* of a rank above 0: its cache memory; borrowed */
    const char *dump_path;  /* with ranks: the last plans go there when the group is lost */
    struct loop_waker *waker;
};

/* What loading found out; borrowed from the executor, valid from WK_NEWS_LOADED on. */
struct wk_loaded {
    const struct model_info *info;
    struct dflash *tap_fc; /* NULL = taps go whole; the loop thread may only ask what it is */
    uint32_t context_max;
    uint32_t canary_ids[WK_CANARY_PROMPT];
    /* by the types of the latent and of the index rows */
    uint32_t canary_output[KV_ROW_COUNT][KV_ROW_COUNT][WK_CANARY_OUTPUT];
    double prefill_us_per_row, decode_us_per_step; /* of the canary */
    uint64_t load_us;
};

enum wk_news_type {
    WK_NEWS_LOADED = 1,
    WK_NEWS_FAILED,
    WK_NEWS_DONE,
    WK_NEWS_ATTACHED,
    WK_NEWS_SEALED
};
struct wk_news {
    enum wk_news_type type;
    const struct wk_result *result; /* DONE: valid until the next wk_exec_run */
    struct hash128 memory; /* ATTACHED: of the other ranks' cache memory; another one, other rows */
    enum err status;       /* SEALED: whether all ranks have done it */
};

/* Starts the thread, which loads the model at once. */
struct wk_exec *wk_exec_create(const struct wk_exec_options *options);
/* Waits for the thread: not while it loads or runs a plan if the end must be quick. */
void wk_exec_destroy(struct wk_exec **exec_p);

bool wk_exec_news(struct wk_exec *x, struct wk_news *ret_news);
void wk_exec_progress(const struct wk_exec *x, uint64_t *ret_done, uint64_t *ret_total);
const struct wk_loaded *wk_exec_loaded(const struct wk_exec *x);
const struct err_detail *wk_exec_failure(const struct wk_exec *x); /* after WK_NEWS_FAILED */

/* Names the cache memory for all later plans, which are of this epoch.  Only while no plan is in
 * flight and no prefill batch is paused.  With several ranks WK_NEWS_ATTACHED says when all have
 * it, which takes as long as the group takes to form; ERR_BUSY when too many are waiting.  A plan
 * that fails because of another rank comes back with its error, and the memory has to be named
 * again. */
MUST_USE enum err wk_exec_attach(struct wk_exec *x, const struct model_kv *kv, uint32_t epoch);
/* Ranks above 0 carry out what rank 0 tells them from loading on; nothing is handed to them. */
uint64_t wk_exec_steps(const struct wk_exec *x); /* plans carried out */
bool wk_exec_grouped(const struct wk_exec *x);   /* all ranks are there; a change wakes the loop */

/* Hands a tap ring over; it is written to from the next batch that begins with none paused.
 * ERR_BUSY, and the ring is still the caller's: too many wait for the device thread. */
MUST_USE enum err wk_exec_taps(struct wk_exec *x, struct wk_taps **taps_p);
/* Rank 0 of several: hands over, until WK_NEWS_SEALED, what the other ranks are to mark as
 * committed after all plans before it; one at a time. */
void wk_exec_seal(struct wk_exec *x, const struct wk_seal *seals, uint32_t count);
/* Hands the plan over until its WK_NEWS_DONE. */
void wk_exec_run(struct wk_exec *x, const struct wk_plan *plan);

#endif
