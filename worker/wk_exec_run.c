/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_exec_state.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/model/sampler.h"
#include "worker/wk_fabric.h"
#include "worker/wk_state.h"
#include "worker/wk_taps.h"

STATIC_CHECK(WK_STEP_ROWS_MAX == MODEL_DRAFT_ROWS_MAX);
STATIC_CHECK(SAMPLER_TOP_LOGPROBS_MAX == MSG_TOP_LOGPROBS_MAX);

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
static void mtp_add(struct wk_exec *x, const struct model_cursor *c, struct wk_result_seq *r,
                    uint32_t first, uint32_t count, uint32_t position, const uint32_t *ids)
{
    uint32_t wanted = wk_tables_at(x->tables, r->entry)->setup.mtp;
    r->draft_count = 0;
    if (x->mtp == NULL || wanted == 0)
        return;
    CHECK(x->feed_count < x->options.plan_seqs);
    x->fed[x->feed_count] = r;
    x->feeds[x->feed_count++] =
        (struct mtp_feed){.rows = {.entry = r->entry,
                                   .cursor = c,
                                   .first = first,
                                   .count = count,
                                   .position = position,
                                   .ids = ids,
                                   .next = r->count > 0 ? r->ids[r->count - 1] : MTP_NO_ID},
                          .drafts_max = wanted};
}

/* All that were added, in one pass of the layer. */
static void mtp_run(struct wk_exec *x)
{
    if (x->feed_count == 0)
        return;
    mtp_feed(x->mtp, x->feeds, x->feed_count);
    for (uint32_t i = 0; i < x->feed_count; i++) {
        struct wk_result_seq *r = x->fed[i];
        r->draft_count = x->feeds[i].count;
        memcpy(r->draft_ids, x->feeds[i].ids, r->draft_count * sizeof *r->draft_ids);
    }
    x->feed_count = 0;
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

/* A rank above 0: what the plan's rows go into is no longer what it was committed as. */
static void rows_mark(struct wk_exec *x, const struct wk_plan_seq *s)
{
    struct wk_rows *rows = x->options.rows;
    const struct wk_entry *e = wk_tables_at(x->tables, s->entry);
    uint32_t first = s->position_start / x->kv.block_tokens;
    if (rows == NULL)
        return;
    wk_rows_write_slot(rows, s->state_slot, false);
    if (s->snapshot)
        wk_rows_write_slot(rows, s->snapshot_slot, true);
    for (uint32_t i = first; i * x->kv.block_tokens < s->position_start + s->row_count; i++)
        wk_rows_write_block(rows, e->blocks[i]);
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
        rows_mark(x, s);
        if (s->restore)
            wk_state_restore(&x->kv, s->state_slot, s->restore_slot, x->loaded.info->state_bytes);
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
        wk_state_keep(&x->kv, x->batch_snapshots[i], x->batch_seqs[i].state_slot,
                      x->loaded.info->state_bytes);
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
        mtp_add(x, x->prefill_cursor, r, row, s->row_count, s->position_start, x->batch_ids + row);
        row += s->row_count;
    }
    mtp_run(x);
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
        wk_state_keep(&x->kv, p->seqs[i].snapshot_slot, p->seqs[i].state_slot,
                      x->loaded.info->state_bytes);
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
        mtp_add(x, x->decode_cursor, r, s->ids_at, r->count, s->position_start, p->ids + s->ids_at);
    }
    mtp_run(x);
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
        rows_mark(x, s);
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

void wk_exec_batch_drop(struct wk_exec *x)
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
    wk_exec_batch_drop(x);
    return ERR_OK;
}

enum err wk_exec_carry_out(struct wk_exec *x, const struct wk_plan *p)
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

struct wk_tables_room wk_exec_room(const struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    return (struct wk_tables_room){
        .prefill_rows = o->slice_rows_max,
        .prefill_seqs = wk_exec_prefill_seqs_max(o),
        .decode_rows = o->decode_rows_max,
        .decode_seqs = wk_exec_decode_seqs_max(o),
        .block_tokens = x->kv.block_tokens,
        .paused = x->batch.row_count > 0,
    };
}

void wk_exec_plan(struct wk_exec *x, const struct wk_plan *p)
{
    struct err_detail detail = {{0}};
    uint64_t begun = clock_mono_us();
    x->result.step = p->step;
    x->result.plan_hash = p->hash;
    x->result.seq_count = 0;
    if (x->ranks != NULL && !wk_ranks_formed(x->ranks)) {
        /* Lost since it was made, by a step or a seal, and a paused batch with it. */
        x->step_last = p->step;
        x->result.status = ERR_CLOSED;
        x->result.tap_end = wk_taps_end(x->taps);
        x->result.step_us = 0;
        return;
    }
    struct wk_tables_room room = wk_exec_room(x);
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
        wk_exec_group_lost(x, x->result.status, detail.text);
    } else {
        x->result.status = wk_exec_carry_out(x, p);
        if (x->result.status != ERR_OK)
            wk_exec_group_lost(x, x->result.status, NULL);
    }
    if (x->result.status != ERR_OK)
        x->result.seq_count = 0;
    x->result.tap_end = wk_taps_end(x->taps);
    x->result.step_us = clock_mono_us() - begun;
}
