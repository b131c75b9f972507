/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_exec.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "lib/model/sampler.h"
#include "lib/net/loop.h"
#include "worker/wk_canary.h"
#include "worker/wk_exec_tables.h"
#include "worker/wk_fabric.h"
#include "worker/wk_plan_dump.h"
#include "worker/wk_ranks.h"
#include "worker/wk_taps.h"

#define WK_EXEC_MAGIC 0x574b4558u
#define RING_ITEMS    16u
/* Between two looks of a following rank at whether it should end. */
#define FOLLOW_WAIT_MS 100u
#define REFUSED_US     10000000u
#define RING_BYTES     (4u << 20) /* encodings of past plans */

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
    atomic_bool ending;
    _Atomic uint64_t steps;
    atomic_bool grouped; /* all ranks are there */

    /* device thread only */
    struct model *model;
    struct model_cursor *prefill_cursor, *decode_cursor;
    struct sampler *sampler;
    struct wk_tables *tables;
    struct mtp *mtp; /* NULL = not loaded */
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

static uint32_t prefill_seqs_max(const struct wk_exec_options *o)
{
    return o->slice_rows_max < WK_PREFILL_SEQS_MAX ? o->slice_rows_max : WK_PREFILL_SEQS_MAX;
}

static uint32_t decode_seqs_max(const struct wk_exec_options *o)
{
    return o->plan_seqs < o->decode_rows_max ? o->plan_seqs : o->decode_rows_max;
}

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

/* ---- drafts of the model's own layer ---- */

static void mtp_take(struct wk_exec *x, const struct wk_plan *p)
{
    for (uint32_t i = 0; x->mtp != NULL && i < p->seq_count; i++)
        if (p->seqs[i].setup != WK_NONE)
            mtp_begin(x->mtp, p->seqs[i].entry);
}

/* The first count rows of a sequence of the batch, whose tokens are final, and the one after. */
static void mtp_run(struct wk_exec *x, const struct model_cursor *c, struct wk_result_seq *r,
                    uint32_t first, uint32_t count, uint32_t position, const uint32_t *ids)
{
    uint32_t wanted = wk_tables_at(x->tables, r->entry)->setup.mtp;
    struct mtp_rows rows = {.entry = r->entry,
                            .cursor = c,
                            .first = first,
                            .count = count,
                            .position = position,
                            .ids = ids,
                            .next = r->count > 0 ? r->ids[r->count - 1] : MTP_NO_ID};
    r->draft_count =
        x->mtp != NULL && wanted > 0 ? mtp_feed(x->mtp, &rows, wanted, r->draft_ids) : 0;
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

static void state_copy(struct wk_exec *x, uint32_t to, uint32_t from)
{
    CHECK(to < x->kv.slot_count && from < x->kv.slot_count && to != from);
    memcpy(x->kv.slots + to * x->kv.slot_stride, x->kv.slots + from * x->kv.slot_stride,
           x->loaded.info->state_bytes);
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
        x->batch_snapshots[i] = s->snapshot ? s->snapshot_slot : WK_NONE;
        if (s->restore)
            state_copy(x, s->state_slot, s->restore_slot);
        wk_tables_add(x->tables, s->entry, p->ids + s->ids_at, s->row_count);
    }
    x->batch = (struct model_batch){.seq_count = p->seq_count,
                                    .row_count = p->row_count,
                                    .seqs = x->batch_seqs,
                                    .ids = x->batch_ids};
    model_begin(x->prefill_cursor, &x->kv, &x->batch);
}

/* Copies are kept only if every rank has made its own: nothing else comes after the last
 * collective of a step. */
static enum err snapshots_agree(struct wk_exec *x, uint32_t count)
{
    return x->ranks != NULL && count > 0 ? wk_barrier(wk_ranks_fabric(x->ranks)) : ERR_OK;
}

static enum err prefill_snapshots(struct wk_exec *x)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < x->batch.seq_count; i++) {
        if (x->batch_snapshots[i] == WK_NONE)
            continue;
        state_copy(x, x->batch_snapshots[i], x->batch_seqs[i].state_slot);
        count++;
    }
    return snapshots_agree(x, count);
}

/* Rank 0 samples, and tells the tokens with the next plan. */
static void prefill_sample(struct wk_exec *x, const float *logits)
{
    uint32_t vocab = x->loaded.info->vocab_size;
    uint32_t row = 0;
    for (uint32_t i = 0; i < x->batch.seq_count; i++) {
        const struct model_seq *s = &x->batch_seqs[i];
        struct wk_result_seq *r = &x->result.seqs[i];
        r->entry = x->batch_entries[i];
        r->count = 0;
        taps_write(x, x->prefill_cursor, r->entry, row, s->row_count, s->position_start);
        if (s->logits_from < s->row_count) {
            CHECK(s->logits_from + 1 == s->row_count);
            wk_tables_sample(x->tables, x->sampler, r->entry, logits, 1, NULL,
                             s->position_start + s->row_count - 1, r);
            logits += vocab;
        }
        mtp_run(x, x->prefill_cursor, r, row, s->row_count, s->position_start, x->batch_ids + row);
        row += s->row_count;
    }
    x->result.seq_count = x->batch.seq_count;
}

static enum err prefill_finish(struct wk_exec *x)
{
    const float *logits = model_finish(x->prefill_cursor);
    enum err e = model_cursor_fault(x->prefill_cursor);
    if (e == ERR_OK)
        e = prefill_snapshots(x);
    if (e == ERR_OK && !x->follows)
        prefill_sample(x, logits);
    x->batch.row_count = 0;
    return e;
}

/* The fault of a collective while the plan ran. */
static enum err run_prefill(struct wk_exec *x, const struct wk_plan *p)
{
    if (p->begin)
        prefill_begin(x, p);
    CHECK(x->batch.row_count > 0);
    if (p->finish)
        return prefill_finish(x);
    model_advance(x->prefill_cursor, p->layer_end);
    return model_cursor_fault(x->prefill_cursor);
}

static enum err decode_snapshots(struct wk_exec *x, const struct wk_plan *p)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->seq_count; i++) {
        if (!p->seqs[i].snapshot)
            continue;
        state_copy(x, p->seqs[i].snapshot_slot, p->seqs[i].state_slot);
        count++;
    }
    return snapshots_agree(x, count);
}

static void decode_sample(struct wk_exec *x, const struct wk_plan *p, const float *logits)
{
    uint32_t vocab = x->loaded.info->vocab_size;
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        wk_tables_sample(x->tables, x->sampler, s->entry, logits, s->row_count,
                         p->ids + s->ids_at + 1, s->position_start, &x->result.seqs[i]);
        logits += (size_t)s->row_count * vocab;
        struct wk_result_seq *r = &x->result.seqs[i];
        taps_write(x, x->decode_cursor, s->entry, s->ids_at, r->count, s->position_start);
        mtp_run(x, x->decode_cursor, r, s->ids_at, r->count, s->position_start, p->ids + s->ids_at);
    }
    x->result.seq_count = p->seq_count;
}

static enum err run_decode(struct wk_exec *x, const struct wk_plan *p)
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
    TRY(model_cursor_fault(x->decode_cursor));
    TRY(decode_snapshots(x, p));
    if (!x->follows)
        decode_sample(x, p, logits);
    return ERR_OK;
}

static void batch_drop(struct wk_exec *x)
{
    if (x->batch.row_count > 0)
        model_abandon(x->prefill_cursor);
    x->batch.row_count = 0;
}

static enum err kind_run(struct wk_exec *x, const struct wk_plan *p)
{
    if (p->kind == WK_PLAN_PREFILL)
        return run_prefill(x, p);
    if (p->kind == WK_PLAN_DECODE)
        return run_decode(x, p);
    CHECK(x->batch.row_count > 0);
    batch_drop(x);
    return ERR_OK;
}

static enum err carry_out(struct wk_exec *x, const struct wk_plan *p)
{
    uint64_t begun = clock_mono_us();
    x->step_last = p->step;
    atomic_fetch_add_explicit(&x->steps, 1, memory_order_relaxed);
    wk_tables_take(x->tables, p);
    mtp_take(x, p);
    enum err e = kind_run(x, p);
    if (x->ring != NULL && e == ERR_OK)
        wk_plan_ring_done(x->ring, p->step, clock_mono_us() - begun);
    return e;
}

static void grouped_set(struct wk_exec *x, bool grouped)
{
    atomic_store(&x->grouped, grouped);
    loop_wake(x->options.waker);
}

static void group_lost(struct wk_exec *x, enum err e, const char *text)
{
    struct err_detail why = {{0}};
    if (text == NULL) {
        wk_fabric_fault(wk_ranks_fabric(x->ranks), &why);
        text = why.text;
    }
    struct err_detail fault;
    struct wk_plan_dump_head head = {.rank = wk_fabric_rank(wk_ranks_fabric(x->ranks)),
                                     .ranks = wk_fabric_ranks(wk_ranks_fabric(x->ranks)),
                                     .epoch = wk_fabric_epoch(wk_ranks_fabric(x->ranks)),
                                     .now_us = clock_mono_us(),
                                     .reason = text};
    if (x->dump_path[0] != '\0' && wk_plan_dump(x->ring, &head, x->dump_path, &fault) != ERR_OK)
        log_warn(WORKER, "plans not dumped", "reason=\"%s\"", fault.text);
    log_warn(WORKER, "group lost", "code=%s step=%" PRIu64 " reason=\"%s\"", err_name(e),
             x->step_last, text);
    batch_drop(x);
    grouped_set(x, false);
}

static struct wk_tables_room room_of(const struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    return (struct wk_tables_room){
        .prefill_rows = o->slice_rows_max,
        .prefill_seqs = prefill_seqs_max(o),
        .decode_rows = o->decode_rows_max,
        .decode_seqs = decode_seqs_max(o),
        .block_tokens = x->kv.block_tokens,
        .paused = x->batch.row_count > 0,
    };
}

static void run_plan(struct wk_exec *x, const struct wk_plan *p)
{
    struct err_detail detail = {{0}};
    uint64_t begun = clock_mono_us();
    x->result.step = p->step;
    x->result.plan_hash = p->hash;
    x->result.seq_count = 0;
    struct wk_tables_room room = room_of(x);
    x->result.status = wk_plan_admit(p, x->step_last, x->epoch, &detail);
    if (x->result.status == ERR_OK)
        x->result.status = wk_tables_admit(x->tables, &room, p, &detail);
    CHECK(x->result.status == ERR_OK); /* our own core's plan, in our own process */
    taps_change(x);
    if (x->ring != NULL) /* before it is agreed on: a refused one is what the dump is for */
        wk_plan_ring_add(x->ring, p, begun);
    if (x->ranks != NULL)
        x->result.status = wk_ranks_tell_plan(x->ranks, p, ERR_OK, &detail);
    if (x->result.status != ERR_OK) {
        x->step_last = p->step;
        group_lost(x, x->result.status, detail.text);
    } else {
        x->result.status = carry_out(x, p);
        if (x->result.status != ERR_OK)
            group_lost(x, x->result.status, NULL);
    }
    if (x->result.status != ERR_OK)
        x->result.seq_count = 0;
    x->result.tap_end = wk_taps_end(x->taps);
    x->result.step_us = clock_mono_us() - begun;
}

/* ---- the thread ---- */

static void news_push(struct wk_exec *x, enum wk_news_type type, const struct wk_result *result,
                      const struct hash128 *memory)
{
    struct wk_news news = {.type = type, .result = result};
    if (memory != NULL)
        news.memory = *memory;
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
        .seqs_max = prefill_seqs_max(o),
        .context_max = x->loaded.context_max,
    };
    prefill.logits_rows_max = prefill.seqs_max;
    struct model_cursor_options decode = {
        .rows_max = o->decode_rows_max,
        .seqs_max = decode_seqs_max(o),
        .logits_rows_max = o->decode_rows_max,
        .context_max = x->loaded.context_max,
    };
    TRY(model_cursor_create(x->model, &prefill, &x->prefill_cursor, &x->failure));
    return model_cursor_create(x->model, &decode, &x->decode_cursor, &x->failure);
}

/* Whatever must be the same on all ranks, or they would not compute the same. */
static struct hash128 settings_of(const struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    const struct model_info *info = x->loaded.info;
    struct hash_xxh3 h;
    struct model_group group = wk_ranks_group(x->ranks);
    uint32_t numbers[] = {o->entries,        o->plan_seqs,
                          o->slice_rows_max, o->decode_rows_max,
                          o->context_max,    (uint32_t)o->numerics,
                          group.ranks,       group.moe,
                          group.interleave,  o->group};
    hash_xxh3_init(&h);
    hash_xxh3_add(&h, info->model_fp.bytes, sizeof info->model_fp.bytes);
    hash_xxh3_add(&h, info->kernels, strlen(info->kernels));
    hash_xxh3_add(&h, numbers, sizeof numbers);
    hash_xxh3_add(&h, TANDEM_VERSION, sizeof TANDEM_VERSION);
    return hash_xxh3_end(&h);
}

static struct wk_canary canary_of(const struct wk_exec *x)
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

/* ERR_CORRUPT: the canary comes out otherwise than before. */
static enum err group_canary(struct wk_exec *x, struct err_detail *detail)
{
    struct wk_canary canary = canary_of(x);
    struct wk_loaded loaded = x->loaded;
    enum err e = ERR_OK;
    wk_canary_run(&canary, &loaded);
    if (x->settled &&
        memcmp(loaded.canary_output, x->loaded.canary_output, sizeof loaded.canary_output) != 0)
        e = err_set(detail, ERR_CORRUPT, "canary: the group computes otherwise than before");
    TRY(wk_ranks_verdict(x->ranks, e, detail));
    if (!x->settled) /* nobody else reads it before WK_NEWS_LOADED */
        x->loaded = loaded;
    return ERR_OK;
}

/* The probe and the canary of all ranks together, where one of them has seen neither: at the
 * start, and when one was restarted. */
static enum err group_settle(struct wk_exec *x, struct err_detail *detail)
{
    struct wk_fabric *f = wk_ranks_fabric(x->ranks);
    uint32_t needs = !x->settled, all[WK_RANKS_MAX], any = 0;
    TRY(wk_all_gather(f, &needs, sizeof needs, all));
    for (uint32_t r = 0; r < wk_fabric_ranks(f); r++)
        any |= all[r];
    if (any == 0)
        return ERR_OK;
    TRY(wk_ranks_probe(x->ranks, detail));
    TRY(group_canary(x, detail));
    x->settled = true;
    return ERR_OK;
}

/* Said once, then every REFUSED_US while it lasts; nobody would hear of a refusal that is repeated
 * without a pause. */
static void group_refused(struct wk_exec *x, enum err e, const char *text)
{
    struct timespec piece = {0, 50000000};
    uint64_t now = clock_mono_us();
    if (e != x->refused || now - x->refused_us >= REFUSED_US) {
        log_error(WORKER, "group refused", "code=%s step=%" PRIu64 " reason=\"%s\"", err_name(e),
                  x->step_last, text);
        x->refused = e;
        x->refused_us = now;
    }
    for (uint32_t i = 0; i < 20 && !atomic_load(&x->ending); i++)
        nanosleep(&piece, NULL);
}

/* A group that breaks while it forms is formed again; one that is whole and no good is refused. */
static enum err group_try(struct wk_exec *x, struct err_detail *detail)
{
    enum err e;
    for (;;) {
        TRY(wk_ranks_form(x->ranks, &x->settings, &x->ending, detail));
        e = group_settle(x, detail);
        if (e == ERR_OK)
            return e;
        if (wk_fabric_fault(wk_ranks_fabric(x->ranks), NULL) == ERR_OK)
            break;
    }
    wk_fabric_leave(wk_ranks_fabric(x->ranks));
    return e;
}

/* Whatever speaks against the group may pass, since it takes another rank: that one is restarted
 * with other settings, the cable is mended.  ERR_CANCELLED alone comes back. */
static enum err group_form(struct wk_exec *x)
{
    struct err_detail detail = {{0}};
    enum err e;
    batch_drop(x);
    while ((e = group_try(x, &detail)) != ERR_OK) {
        if (e == ERR_CANCELLED)
            return e;
        group_refused(x, e, detail.text);
    }
    log_info(WORKER, "group formed", "rank=%u ranks=%u epoch=%u",
             wk_fabric_rank(wk_ranks_fabric(x->ranks)), wk_fabric_ranks(wk_ranks_fabric(x->ranks)),
             wk_fabric_epoch(wk_ranks_fabric(x->ranks)));
    grouped_set(x, true);
    return ERR_OK;
}

static enum err canary_run(struct wk_exec *x)
{
    if (x->ranks == NULL) {
        struct wk_canary canary = canary_of(x);
        wk_canary_run(&canary, &x->loaded);
        return ERR_OK;
    }
    x->settings = settings_of(x);
    return group_form(x);
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
    if (o->mtp)
        TRY(mtp_create(x->model, &mtp, &x->mtp, &x->failure));
    TRY(canary_run(x));
    l->load_us = clock_mono_us() - begun;
    return ERR_OK;
}

/* Of this rank's own model and its share of the rows. */
static struct kv_geometry geometry_of(const struct wk_exec *x)
{
    const struct model_info *info = x->loaded.info;
    struct model_group group = wk_ranks_group(x->ranks);
    bool shared = group.interleave > 0; /* else every rank keeps all rows */
    return (struct kv_geometry){.dsa_layers = info->dsa_layers,
                                .latent_dim = info->latent_dim,
                                .index_dim = info->index_dim,
                                .index_kpool = info->index_kpool,
                                .rank = shared ? group.rank : 0,
                                .ranks = shared ? group.ranks : 1,
                                .interleave = group.interleave,
                                .state_bytes = info->state_bytes};
}

static struct wk_ranks_shape shape_of(const struct wk_exec *x)
{
    struct wk_ranks_shape s;
    memset(&s, 0, sizeof s); /* its bytes are told */
    s.geometry = geometry_of(x);
    s.geometry.block_tokens = x->kv.block_tokens;
    if (s.geometry.ranks == 1)
        s.geometry.interleave = x->kv.block_tokens;
    s.geometry.kv_dtype = KV_F32 + (uint32_t)x->kv.kv_type;
    s.geometry.index_dtype = KV_F32 + (uint32_t)x->kv.index_type;
    s.block_count = x->kv.block_count;
    s.slot_count = x->kv.slot_count;
    s.epoch = x->epoch;
    s.step_last = x->step_last;
    return s;
}

/* A shape that a rank refuses is no good until something else changes: another arena, room. */
static void shape_failed(struct wk_exec *x, enum err e, bool refused, const char *text)
{
    if (!refused) {
        group_lost(x, e, text);
        return;
    }
    batch_drop(x);
    grouped_set(x, false);
    group_refused(x, e, text);
}

static void attach(struct wk_exec *x, const struct order *order)
{
    CHECK(x->batch.row_count == 0);
    x->kv = order->kv;
    x->epoch = order->epoch;
    wk_tables_blocks(x->tables, x->loaded.context_max / order->kv.block_tokens + 2);
    if (x->ranks == NULL)
        return;
    struct hash128 memory;
    struct err_detail detail = {{0}};
    struct wk_ranks_shape shape = shape_of(x);
    for (;;) {
        if (!wk_ranks_formed(x->ranks) && group_form(x) != ERR_OK)
            return;
        enum err e = wk_ranks_tell_shape(x->ranks, &shape, &memory, &detail);
        if (e == ERR_OK)
            break;
        shape_failed(x, e, e == ERR_UNSUPPORTED, detail.text);
    }
    news_push(x, WK_NEWS_ATTACHED, NULL, &memory);
}

static struct wk_plan_limits heard_limits(const struct wk_exec *x)
{
    return (struct wk_plan_limits){
        .entries = x->options.entries,
        .slot_count = x->kv.slot_count,
        .block_count = x->kv.block_count,
        .table_max = x->loaded.context_max / x->kv.block_tokens + 2,
        .context_max = x->loaded.context_max,
        .vocab_size = x->loaded.info->vocab_size,
        .layer_count = x->loaded.info->layer_count,
    };
}

static enum err heard_admit(void *arg, const struct wk_plan *p, struct err_detail *detail)
{
    struct wk_exec *x = arg;
    struct wk_tables_room room = room_of(x);
    wk_plan_ring_add(x->ring, p, clock_mono_us());
    return wk_tables_admit(x->tables, &room, p, detail);
}

static void shape_take(struct wk_exec *x, const struct wk_ranks_heard *heard)
{
    uint32_t rows = x->options.slice_rows_max > x->options.decode_rows_max
                        ? x->options.slice_rows_max
                        : x->options.decode_rows_max;
    batch_drop(x);
    x->kv = heard->kv;
    x->epoch = heard->shape.epoch;
    x->step_last = heard->shape.step_last;
    uint32_t table = x->loaded.context_max / x->kv.block_tokens + 2;
    wk_tables_blocks(x->tables, table);
    wk_plan_destroy(&x->heard); /* as wide as the core's own, whose tables hang on the shape too */
    x->heard = wk_plan_create(x->options.plan_seqs, rows, rows + 4 * x->options.entries + table,
                              x->loaded.context_max);
}

/* One order of rank 0, or the group formed anew. */
static void follow_once(struct wk_exec *x)
{
    struct err_detail detail = {{0}};
    struct wk_ranks_heard heard = {.order = WK_ORDER_NONE};
    enum err e = ERR_OK;
    if (!wk_ranks_formed(x->ranks) && group_form(x) != ERR_OK)
        return;
    struct wk_plan_limits limits = {0};
    struct kv_geometry geometry = geometry_of(x);
    if (x->heard != NULL)
        limits = heard_limits(x);
    struct wk_ranks_hear want = {.geometry = &geometry,
                                 .limits = &limits,
                                 .plan = x->heard,
                                 .step_last = x->step_last,
                                 .epoch = x->epoch,
                                 .admit = heard_admit,
                                 .arg = x};
    e = wk_ranks_hear(x->ranks, &want, FOLLOW_WAIT_MS, &heard, &detail);
    if (e == ERR_OK && heard.order == WK_ORDER_SHAPE)
        shape_take(x, &heard);
    if (e == ERR_OK && heard.order == WK_ORDER_PLAN) {
        e = carry_out(x, x->heard);
        wk_fabric_fault(wk_ranks_fabric(x->ranks), &detail);
    }
    if (e != ERR_OK)
        shape_failed(x, e, heard.order == WK_ORDER_SHAPE, detail.text);
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
        } else {
            run_plan(x, order.plan);
            news_push(x, WK_NEWS_DONE, &x->result, NULL);
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
    news_push(x, e == ERR_OK ? WK_NEWS_LOADED : WK_NEWS_FAILED, NULL, NULL);
    if (!x->follows || e != ERR_OK)
        lead(x, e == ERR_OK);
    else
        while (!atomic_load(&x->ending))
            follow_once(x);
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

/* Plans come one at a time and there is one end: the other half of the ring is theirs. */
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
