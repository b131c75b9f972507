/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_exec.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "lib/model/dflash.h"
#include "lib/model/sampler.h"
#include "lib/net/loop.h"
#include "worker/wk_exec_state.h"
#include "worker/wk_taps.h"

#define WK_EXEC_MAGIC 0x574b4558u
#define RING_ITEMS    16u
#define RING_BYTES    (4u << 20) /* encodings of past plans */

enum order_type { ORDER_ATTACH = 1, ORDER_RUN, ORDER_TAPS, ORDER_SEAL, ORDER_END };

struct order {
    enum order_type type;
    const struct wk_plan *plan;
    struct model_kv kv;
    uint32_t epoch;
    struct wk_taps *taps;
    const struct wk_seal *seals;
    uint32_t seal_count;
};

/* ---- the thread ---- */

static void news_push(struct wk_exec *x, const struct wk_news *news)
{
    CHECK(ring_push(x->news, news));
    loop_wake(x->options.waker);
}

static void on_bytes(void *arg, uint64_t done, uint64_t total)
{
    struct wk_exec *x = arg;
    atomic_store_explicit(&x->bytes_total, total, memory_order_relaxed);
    atomic_store_explicit(&x->bytes_done, done, memory_order_relaxed);
}

static enum err cursors_create(struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    struct model_cursor_options prefill = {
        .rows_max = o->slice_rows_max,
        .seqs_max = wk_exec_prefill_seqs_max(o),
        .context_max = x->loaded.context_max,
    };
    prefill.logits_rows_max = prefill.seqs_max;
    struct model_cursor_options decode = {
        .rows_max = o->decode_rows_max,
        .seqs_max = wk_exec_decode_seqs_max(o),
        .logits_rows_max = o->decode_rows_max,
        .context_max = x->loaded.context_max,
    };
    TRY(model_cursor_create(x->model, &prefill, &x->prefill_cursor, &x->failure));
    return model_cursor_create(x->model, &decode, &x->decode_cursor, &x->failure);
}

struct wk_canary wk_exec_canary(const struct wk_exec *x)
{
    struct model_group group = {.ranks = 1};
    if (x->ranks != NULL)
        group = wk_ranks_group(x->ranks);
    return (struct wk_canary){.model = x->model,
                              .prefill = x->prefill_cursor,
                              .decode = x->decode_cursor,
                              .sampler = x->sampler,
                              .rows_max = x->options.slice_rows_max,
                              .interleave = group.interleave,
                              .shards = group.interleave > 0 ? group.ranks : 1};
}

static enum err canary_run(struct wk_exec *x)
{
    if (x->ranks == NULL) {
        struct wk_canary canary = wk_exec_canary(x);
        wk_canary_run(&canary, &x->loaded);
        return ERR_OK;
    }
    return wk_exec_group_begin(x);
}

/* The drafter's fc, if it can be one for this model. */
static enum err tap_fc_load(struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    const struct model_info *info = x->loaded.info;
    struct dflash_options options = {.directory = o->tap_fc,
                                     .context_only = true,
                                     .exact = o->numerics == MODEL_EXACT,
                                     .ctx = model_ctx(x->model)};
    if (o->tap_fc == NULL || o->tap_fc[0] == '\0' || x->follows)
        return ERR_OK; /* rank 0 alone speaks with a drafter */
    TRY(dflash_load(&options, &x->loaded.tap_fc, &x->failure));
    const struct dflash_config *c = dflash_config(x->loaded.tap_fc);
    if (c->hidden != info->hidden)
        return err_set(&x->failure, ERR_INVALID, "tap_fc: %s: hidden_size %u, the model has %u",
                       o->tap_fc, c->hidden, info->hidden);
    return dflash_check_taps(c, info->layer_count, &x->failure);
}

static enum err load(struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    uint64_t begun = clock_mono_us();
    struct model_options options = {
        .directory = o->directory,
        .numerics = o->numerics,
        .threads = o->threads,
        .mtp = o->mtp,
        .progress = on_bytes,
        .progress_arg = x,
    };
    struct model_group group;
    if (x->ranks != NULL) {
        group = wk_ranks_group(x->ranks);
        x->follows = group.rank > 0;
        options.group = &group;
    }
    TRY(model_load(&options, &x->model, &x->failure));
    struct wk_loaded *l = &x->loaded;
    l->info = model_info(x->model);
    l->context_max = o->context_max != 0 && o->context_max < l->info->context_max
                         ? o->context_max
                         : l->info->context_max;
    if (l->context_max > MSG_IDS_MAX)
        l->context_max = MSG_IDS_MAX;
    TRY(cursors_create(x));
    x->sampler = sampler_create(l->info->vocab_size, l->info->has_token);
    x->tables = wk_tables_create(o->entries, l->info->vocab_size);
    struct mtp_options mtp = {.entries = o->entries,
                              .context_max = l->context_max,
                              .tokens_max = o->mtp_tokens,
                              .recycle = o->mtp_recycle};
    if (o->mtp && !x->follows)
        TRY(mtp_create(x->model, &mtp, &x->mtp, &x->failure));
    TRY(tap_fc_load(x));
    TRY(canary_run(x));
    l->load_us = clock_mono_us() - begun;
    return ERR_OK;
}

static void attach(struct wk_exec *x, const struct order *order)
{
    CHECK(x->batch.row_count == 0);
    atomic_fetch_sub(&x->attaches, 1);
    x->kv = order->kv;
    x->epoch = order->epoch;
    wk_tables_blocks(x->tables, x->loaded.context_max / order->kv.block_tokens + 2);
    if (x->ranks == NULL)
        return;
    struct wk_news news = {.type = WK_NEWS_ATTACHED};
    enum err e = wk_exec_shape_tell(x, &news.memory);
    if (e == ERR_OK || e == ERR_BUSY) /* which the shell counts, and waits for the next */
        news_push(x, &news);
}

static void lead(struct wk_exec *x, bool good)
{
    for (;;) {
        struct order order;
        while (sem_wait(&x->wake) != 0)
            CHECK(errno == EINTR);
        if (!ring_pop(x->orders, &order))
            continue;
        if (order.type == ORDER_END)
            return;
        CHECK(good);
        if (order.type == ORDER_ATTACH) {
            attach(x, &order);
        } else if (order.type == ORDER_TAPS) {
            wk_taps_destroy(&x->taps_next);
            x->taps_next = order.taps;
        } else if (order.type == ORDER_SEAL) {
            enum err e = wk_exec_seal_tell(x, order.seals, order.seal_count);
            news_push(x, &(struct wk_news){.type = WK_NEWS_SEALED, .status = e});
        } else {
            wk_exec_plan(x, order.plan);
            news_push(x, &(struct wk_news){.type = WK_NEWS_DONE, .result = &x->result});
        }
    }
}

static void *thread_main(void *arg)
{
    struct wk_exec *x = arg;
    x->ranks = x->options.ranks;
    if (x->ranks != NULL)
        x->ring = wk_plan_ring_create(RING_BYTES);
    enum err e = load(x);
    if (e == ERR_CANCELLED)
        return NULL; /* ended while waiting for the other ranks */
    news_push(x, &(struct wk_news){.type = e == ERR_OK ? WK_NEWS_LOADED : WK_NEWS_FAILED});
    if (!x->follows || e != ERR_OK)
        lead(x, e == ERR_OK);
    else
        while (!atomic_load(&x->ending))
            wk_exec_follow(x);
    return NULL;
}

/* ---- loop thread ---- */

struct wk_exec *wk_exec_create(const struct wk_exec_options *options)
{
    CHECK(options != NULL && options->directory != NULL && options->waker != NULL);
    CHECK(options->entries > 0 && options->plan_seqs >= WK_PREFILL_SEQS_MAX);
    struct wk_exec *x = mem_take(sizeof *x);
    x->magic = WK_EXEC_MAGIC;
    x->options = *options;
    snprintf(x->dump_path, sizeof x->dump_path, "%s",
             options->dump_path != NULL ? options->dump_path : "");
    x->orders = ring_create(RING_ITEMS, sizeof(struct order));
    x->news = ring_create(RING_ITEMS, sizeof(struct wk_news));
    x->seqs = mem_take_array(options->plan_seqs, sizeof *x->seqs);
    x->batch_ids = mem_take_array(options->slice_rows_max, sizeof *x->batch_ids);
    x->result.seqs = mem_take_array(options->plan_seqs, sizeof *x->result.seqs);
    x->feeds = mem_take_array(options->plan_seqs, sizeof *x->feeds);
    x->fed = mem_take_array(options->plan_seqs, sizeof *x->fed);
    CHECK(sem_init(&x->wake, 0, 0) == 0);
    if (pthread_create(&x->thread, NULL, thread_main, x) != 0)
        die("device thread: %s", strerror(errno));
    return x;
}

static void order_push(struct wk_exec *x, const struct order *order)
{
    CHECK(ring_push(x->orders, order));
    CHECK(sem_post(&x->wake) == 0);
}

/* Plans and seals come one at a time and there is one end: the other half of the ring is theirs. */
static bool orders_full(const struct wk_exec *x)
{
    return ring_count(x->orders) >= RING_ITEMS / 2;
}

void wk_exec_destroy(struct wk_exec **exec_p)
{
    CHECK(exec_p != NULL);
    struct wk_exec *x = *exec_p;
    if (x == NULL)
        return;
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    atomic_store(&x->ending, true);
    order_push(x, &(struct order){.type = ORDER_END});
    CHECK(pthread_join(x->thread, NULL) == 0);
    wk_taps_destroy(&x->taps);
    wk_taps_destroy(&x->taps_next);
    dflash_destroy(&x->loaded.tap_fc);
    model_cursor_destroy(&x->prefill_cursor);
    model_cursor_destroy(&x->decode_cursor);
    sampler_destroy(&x->sampler);
    wk_tables_destroy(&x->tables);
    mtp_destroy(&x->mtp);
    model_destroy(&x->model);
    ring_destroy(&x->orders);
    ring_destroy(&x->news);
    sem_destroy(&x->wake);
    wk_plan_destroy(&x->heard);
    wk_plan_ring_destroy(&x->ring);
    mem_give(x->seqs);
    mem_give(x->batch_ids);
    mem_give(x->result.seqs);
    mem_give(x->feeds);
    mem_give(x->fed);
    x->magic = 0;
    mem_give(x);
    *exec_p = NULL;
}

uint64_t wk_exec_steps(const struct wk_exec *x)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    return atomic_load_explicit(&x->steps, memory_order_relaxed);
}

bool wk_exec_grouped(const struct wk_exec *x)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    return atomic_load(&x->grouped);
}

bool wk_exec_news(struct wk_exec *x, struct wk_news *ret_news)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    return ring_pop(x->news, ret_news);
}

void wk_exec_progress(const struct wk_exec *x, uint64_t *ret_done, uint64_t *ret_total)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    *ret_done = atomic_load_explicit(&x->bytes_done, memory_order_relaxed);
    *ret_total = atomic_load_explicit(&x->bytes_total, memory_order_relaxed);
}

const struct wk_loaded *wk_exec_loaded(const struct wk_exec *x)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    CHECK(x->loaded.info != NULL);
    return &x->loaded;
}

const struct err_detail *wk_exec_failure(const struct wk_exec *x)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    return &x->failure;
}

enum err wk_exec_attach(struct wk_exec *x, const struct model_kv *kv, uint32_t epoch)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    CHECK(kv->blocks != NULL && kv->block_tokens > 0);
    if (orders_full(x))
        return ERR_BUSY;
    atomic_fetch_add(&x->attaches, 1);
    order_push(x, &(struct order){.type = ORDER_ATTACH, .kv = *kv, .epoch = epoch});
    return ERR_OK;
}

enum err wk_exec_taps(struct wk_exec *x, struct wk_taps **taps_p)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    CHECK(*taps_p != NULL);
    if (orders_full(x))
        return ERR_BUSY;
    order_push(x, &(struct order){.type = ORDER_TAPS, .taps = *taps_p});
    *taps_p = NULL;
    return ERR_OK;
}

void wk_exec_run(struct wk_exec *x, const struct wk_plan *plan)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    order_push(x, &(struct order){.type = ORDER_RUN, .plan = plan});
}

void wk_exec_seal(struct wk_exec *x, const struct wk_seal *seals, uint32_t count)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    CHECK(x->options.ranks != NULL && count > 0);
    order_push(x, &(struct order){.type = ORDER_SEAL, .seals = seals, .seal_count = count});
}
