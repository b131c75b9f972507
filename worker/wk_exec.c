/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_exec.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "lib/model/sampler.h"
#include "lib/net/loop.h"
#include "worker/wk_canary.h"
#include "worker/wk_exec_tables.h"
#include "worker/wk_taps.h"

#define WK_EXEC_MAGIC 0x574b4558u
#define RING_ITEMS    16u

STATIC_CHECK(WK_STEP_ROWS_MAX == MODEL_DRAFT_ROWS_MAX);
STATIC_CHECK(SAMPLER_TOP_LOGPROBS_MAX == MSG_TOP_LOGPROBS_MAX);

enum order_type { ORDER_ATTACH = 1, ORDER_RUN, ORDER_TAPS, ORDER_END };

struct order {
    enum order_type type;
    const struct wk_plan *plan;
    struct model_kv kv;
    uint32_t epoch;
    struct wk_taps *taps;
};

struct wk_exec {
    uint32_t magic;
    struct wk_exec_options options;
    pthread_t thread;
    sem_t wake;
    struct ring *orders, *news;
    _Atomic uint64_t bytes_done, bytes_total;
    struct err_detail failure;
    struct wk_loaded loaded;

    /* device thread only */
    struct model *model;
    struct model_cursor *prefill_cursor, *decode_cursor;
    struct sampler *sampler;
    struct wk_tables *tables;
    struct model_kv kv;
    uint32_t epoch;
    uint64_t step_last;
    struct model_seq *seqs; /* of a decode step */
    struct model_seq batch_seqs[WK_PREFILL_SEQS_MAX];
    uint32_t batch_entries[WK_PREFILL_SEQS_MAX];
    struct model_batch batch; /* of prefill; row_count 0 = none paused */
    uint32_t *batch_ids;
    struct wk_taps *taps, *taps_next; /* in use; to be used once no batch is paused */
    struct wk_result result;
};

/* ---- taps ---- */

/* Only between batches: a paused one still collects for the ring it began with. */
static void taps_change(struct wk_exec *x)
{
    if (x->taps_next == NULL || x->batch.row_count > 0)
        return;
    wk_taps_destroy(&x->taps);
    x->taps = x->taps_next;
    x->taps_next = NULL;
    wk_taps_watch(x->taps, x->prefill_cursor);
    wk_taps_watch(x->taps, x->decode_cursor);
}

/* The first count rows of a sequence of the batch, whose tokens are final. */
static void taps_write(struct wk_exec *x, const struct model_cursor *c, uint32_t entry,
                       uint32_t first, uint32_t count, uint32_t position)
{
    const struct wk_plan_setup *setup = &wk_tables_at(x->tables, entry)->setup;
    if (x->taps != NULL && setup->taps)
        wk_taps_write(x->taps, c, &setup->id, x->step_last, first, count, position);
}

/* ---- carrying out ---- */

static struct model_seq model_seq_of(struct wk_exec *x, const struct wk_plan_seq *s)
{
    const struct wk_entry *e = wk_tables_at(x->tables, s->entry);
    return (struct model_seq){
        .state_slot = s->state_slot,
        .position_start = s->position_start,
        .row_count = s->row_count,
        .replay_count = s->replay_count,
        .fresh = s->fresh,
        .journal = s->journal,
        .logits_from = s->logits_from,
        .blocks = e->blocks,
        .block_count = e->block_count,
    };
}

static void prefill_begin(struct wk_exec *x, const struct wk_plan *p)
{
    CHECK(x->batch.row_count == 0);
    CHECK(p->seq_count <= WK_PREFILL_SEQS_MAX && p->row_count <= x->options.slice_rows_max);
    memcpy(x->batch_ids, p->ids, p->row_count * sizeof *p->ids);
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        x->batch_seqs[i] = model_seq_of(x, s);
        x->batch_entries[i] = s->entry;
        wk_tables_add(x->tables, s->entry, p->ids + s->ids_at, s->row_count);
    }
    x->batch = (struct model_batch){.seq_count = p->seq_count,
                                    .row_count = p->row_count,
                                    .seqs = x->batch_seqs,
                                    .ids = x->batch_ids};
    model_begin(x->prefill_cursor, &x->kv, &x->batch);
}

static void prefill_finish(struct wk_exec *x)
{
    const float *logits = model_finish(x->prefill_cursor);
    uint32_t vocab = x->loaded.info->vocab_size;
    uint32_t row = 0;
    for (uint32_t i = 0; i < x->batch.seq_count; i++) {
        const struct model_seq *s = &x->batch_seqs[i];
        struct wk_result_seq *r = &x->result.seqs[i];
        r->entry = x->batch_entries[i];
        r->count = 0;
        taps_write(x, x->prefill_cursor, r->entry, row, s->row_count, s->position_start);
        row += s->row_count;
        if (s->logits_from == s->row_count)
            continue;
        CHECK(s->logits_from + 1 == s->row_count);
        wk_tables_sample(x->tables, x->sampler, r->entry, logits, 1, NULL,
                         s->position_start + s->row_count - 1, r);
        logits += vocab;
    }
    x->result.seq_count = x->batch.seq_count;
    x->batch.row_count = 0;
}

static void run_prefill(struct wk_exec *x, const struct wk_plan *p)
{
    if (p->begin)
        prefill_begin(x, p);
    CHECK(x->batch.row_count > 0);
    if (p->finish)
        prefill_finish(x);
    else
        model_advance(x->prefill_cursor, p->layer_end);
}

static void run_decode(struct wk_exec *x, const struct wk_plan *p)
{
    CHECK(p->row_count <= x->options.decode_rows_max && p->seq_count <= x->options.plan_seqs);
    struct model_batch batch = {
        .seq_count = p->seq_count, .row_count = p->row_count, .seqs = x->seqs, .ids = p->ids};
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        CHECK(s->logits_from == 0);
        x->seqs[i] = model_seq_of(x, s);
        wk_tables_add(x->tables, s->entry, s->final_ids, s->final_count);
    }
    model_begin(x->decode_cursor, &x->kv, &batch);
    const float *logits = model_finish(x->decode_cursor);
    uint32_t vocab = x->loaded.info->vocab_size;
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        wk_tables_sample(x->tables, x->sampler, s->entry, logits, s->row_count,
                         p->ids + s->ids_at + 1, s->position_start, &x->result.seqs[i]);
        logits += (size_t)s->row_count * vocab;
        taps_write(x, x->decode_cursor, s->entry, s->ids_at, x->result.seqs[i].count,
                   s->position_start);
    }
    x->result.seq_count = p->seq_count;
}

static void run_plan(struct wk_exec *x, const struct wk_plan *p)
{
    struct err_detail detail;
    uint64_t begun = clock_mono_us();
    x->result.step = p->step;
    x->result.plan_hash = p->hash;
    x->result.seq_count = 0;
    x->result.status = wk_plan_admit(p, x->step_last, x->epoch, &detail);
    CHECK(x->result.status == ERR_OK); /* one process, one rank: the core's own bug */
    x->step_last = p->step;
    taps_change(x);
    wk_tables_take(x->tables, p);
    if (p->kind == WK_PLAN_PREFILL) {
        run_prefill(x, p);
    } else if (p->kind == WK_PLAN_DECODE) {
        run_decode(x, p);
    } else {
        CHECK(x->batch.row_count > 0);
        model_abandon(x->prefill_cursor);
        x->batch.row_count = 0;
    }
    x->result.tap_end = wk_taps_end(x->taps);
    x->result.step_us = clock_mono_us() - begun;
}

/* ---- the thread ---- */

static void news_push(struct wk_exec *x, enum wk_news_type type, const struct wk_result *result)
{
    struct wk_news news = {.type = type, .result = result};
    CHECK(ring_push(x->news, &news));
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
        .seqs_max =
            o->slice_rows_max < WK_PREFILL_SEQS_MAX ? o->slice_rows_max : WK_PREFILL_SEQS_MAX,
        .context_max = x->loaded.context_max,
    };
    prefill.logits_rows_max = prefill.seqs_max;
    struct model_cursor_options decode = {
        .rows_max = o->decode_rows_max,
        .seqs_max = o->plan_seqs < o->decode_rows_max ? o->plan_seqs : o->decode_rows_max,
        .logits_rows_max = o->decode_rows_max,
        .context_max = x->loaded.context_max,
    };
    TRY(model_cursor_create(x->model, &prefill, &x->prefill_cursor, &x->failure));
    return model_cursor_create(x->model, &decode, &x->decode_cursor, &x->failure);
}

static enum err load(struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    uint64_t begun = clock_mono_us();
    struct model_options options = {
        .directory = o->directory,
        .numerics = o->numerics,
        .threads = o->threads,
        .progress = on_bytes,
        .progress_arg = x,
    };
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
    struct wk_canary canary = {.model = x->model,
                               .prefill = x->prefill_cursor,
                               .decode = x->decode_cursor,
                               .sampler = x->sampler,
                               .rows_max = o->slice_rows_max};
    wk_canary_run(&canary, l);
    l->load_us = clock_mono_us() - begun;
    return ERR_OK;
}

static void *thread_main(void *arg)
{
    struct wk_exec *x = arg;
    bool good = load(x) == ERR_OK;
    news_push(x, good ? WK_NEWS_LOADED : WK_NEWS_FAILED, NULL);
    for (;;) {
        struct order order;
        while (sem_wait(&x->wake) != 0)
            CHECK(errno == EINTR);
        if (!ring_pop(x->orders, &order))
            continue;
        if (order.type == ORDER_END)
            return NULL;
        CHECK(good);
        if (order.type == ORDER_ATTACH) {
            CHECK(x->batch.row_count == 0);
            x->kv = order.kv;
            x->epoch = order.epoch;
            wk_tables_blocks(x->tables, x->loaded.context_max / order.kv.block_tokens + 2);
        } else if (order.type == ORDER_TAPS) {
            wk_taps_destroy(&x->taps_next);
            x->taps_next = order.taps;
        } else {
            run_plan(x, order.plan);
            news_push(x, WK_NEWS_DONE, &x->result);
        }
    }
}

/* ---- loop thread ---- */

struct wk_exec *wk_exec_create(const struct wk_exec_options *options)
{
    CHECK(options != NULL && options->directory != NULL && options->waker != NULL);
    CHECK(options->entries > 0 && options->plan_seqs >= WK_PREFILL_SEQS_MAX);
    struct wk_exec *x = mem_take(sizeof *x);
    x->magic = WK_EXEC_MAGIC;
    x->options = *options;
    x->orders = ring_create(RING_ITEMS, sizeof(struct order));
    x->news = ring_create(RING_ITEMS, sizeof(struct wk_news));
    x->seqs = mem_take_array(options->plan_seqs, sizeof *x->seqs);
    x->batch_ids = mem_take_array(options->slice_rows_max, sizeof *x->batch_ids);
    x->result.seqs = mem_take_array(options->plan_seqs, sizeof *x->result.seqs);
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

void wk_exec_destroy(struct wk_exec **exec_p)
{
    CHECK(exec_p != NULL);
    struct wk_exec *x = *exec_p;
    if (x == NULL)
        return;
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    order_push(x, &(struct order){.type = ORDER_END});
    CHECK(pthread_join(x->thread, NULL) == 0);
    wk_taps_destroy(&x->taps);
    wk_taps_destroy(&x->taps_next);
    model_cursor_destroy(&x->prefill_cursor);
    model_cursor_destroy(&x->decode_cursor);
    sampler_destroy(&x->sampler);
    wk_tables_destroy(&x->tables);
    model_destroy(&x->model);
    ring_destroy(&x->orders);
    ring_destroy(&x->news);
    sem_destroy(&x->wake);
    mem_give(x->seqs);
    mem_give(x->batch_ids);
    mem_give(x->result.seqs);
    x->magic = 0;
    mem_give(x);
    *exec_p = NULL;
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

void wk_exec_attach(struct wk_exec *x, const struct model_kv *kv, uint32_t epoch)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    CHECK(kv->blocks != NULL && kv->block_tokens > 0);
    order_push(x, &(struct order){.type = ORDER_ATTACH, .kv = *kv, .epoch = epoch});
}

void wk_exec_taps(struct wk_exec *x, struct wk_taps **taps_p)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    CHECK(*taps_p != NULL);
    order_push(x, &(struct order){.type = ORDER_TAPS, .taps = *taps_p});
    *taps_p = NULL;
}

void wk_exec_run(struct wk_exec *x, const struct wk_plan *plan)
{
    CHECK_OBJ(x, WK_EXEC_MAGIC);
    order_push(x, &(struct order){.type = ORDER_RUN, .plan = plan});
}
