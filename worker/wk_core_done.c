/* SPDX-License-Identifier: Apache-2.0 */
/* The core's handler of a plan's result: verdicts, emissions, commits. */
#include <string.h>

#include "lib/base/check.h"
#include "worker/wk_core_state.h"

#define RATE_SMOOTH 0.1
#define DEBT_US_MAX 2000000u

static void smooth(double *rate, double count, uint64_t us)
{
    double now = count * 1e6 / (double)(us > 0 ? us : 1);
    *rate = *rate == 0 ? now : *rate + RATE_SMOOTH * (now - *rate);
}

/* The executor has let go of seq.  True if its result still counts. */
static bool let_go(struct wk_core *core, struct wk_seq *seq, bool good)
{
    if (seq->state == WK_SEQ_ZOMBIE) {
        wk_snap_settle(core, seq, seq->flush && good);
        wk_core_kv_release(core, seq, seq->keep);
        wk_core_free(core, seq);
        return false;
    }
    if (seq->replan) {
        wk_snap_settle(core, seq, false);
        bool release = seq->replan_release;
        seq->replan = false;
        seq->replan_release = false;
        wk_core_replan(core, seq, release);
        return false;
    }
    return true;
}

/* Appends, emits, commits; ends the sequence or asks for drafts for its next step. */
static void settle(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r,
                   struct wk_verdict v, uint32_t computed)
{
    uint32_t entry = wk_core_entry(core, seq);
    CHECK(v.final_count <= WK_STEP_ROWS_MAX);
    if (!wk_ids_append(core->ids, entry, r->ids, v.final_count)) {
        wk_snap_settle(core, seq, false);
        wk_core_emit(core, seq, NULL, 0, MSG_FINISH_FAILED, ERR_NOMEM);
        wk_core_end(core, seq, MSG_FINISH_FAILED);
        return;
    }
    seq->computed = computed;
    memcpy(seq->final_ids, r->ids, v.final_count * sizeof *r->ids);
    seq->final_count = v.final_count;
    wk_core_emit(core, seq, r, v.final_count, v.finish, ERR_OK);
    wk_core_kv_commit(core, seq);
    wk_snap_settle(core, seq, true);
    if (v.finish != MSG_FINISH_NONE) {
        wk_core_end(core, seq, v.finish);
        return;
    }
    CHECK(seq->computed + 1 == wk_core_length(core, seq));
    if (wk_core_draft_own(&seq->spec))
        wk_core_draft_take(core, seq, r);
    else
        wk_core_draft_ask(core, seq);
}

static void prefill_done(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r)
{
    seq->in_batch = false;
    if (!let_go(core, seq, r != NULL))
        return;
    CHECK(seq->state == WK_SEQ_PREFILL);
    uint32_t length = wk_core_length(core, seq);
    uint32_t computed = seq->computed + seq->step_rows;
    CHECK(computed <= length);
    seq->served_us = core->now_us;
    if (computed < length) {
        seq->computed = computed;
        wk_core_kv_commit(core, seq);
        wk_snap_settle(core, seq, true);
        wk_core_draft_feed(core, seq);
        return;
    }
    CHECK(r->count >= 1);
    struct wk_verdict v =
        wk_verify(&seq->limits, length, wk_core_outputs(core, seq), NULL, 0, r->ids, 1);
    seq->state = WK_SEQ_DECODE;
    seq->replay = 0;
    settle(core, seq, r, v, computed);
}

static void decode_done(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r)
{
    seq->in_flight = false;
    if (!let_go(core, seq, r != NULL))
        return;
    CHECK(seq->state == WK_SEQ_DECODE && r->count >= 1);
    uint32_t length = wk_core_length(core, seq);
    struct wk_verdict v = wk_verify(&seq->limits, length, wk_core_outputs(core, seq), seq->step_ids,
                                    seq->step_drafts, r->ids, r->count);
    struct wk_stats *s = &core->stats;
    seq->steps++;
    seq->drafted += seq->step_drafts;
    seq->accepted += v.accepted;
    s->drafted += seq->step_drafts;
    s->accepted += v.accepted;
    for (uint32_t j = 0; j < seq->step_drafts; j++) {
        s->drafted_at[j]++;
        s->accepted_at[j] += j < v.accepted;
    }
    wk_core_draft_verdict(core, seq, v.accepted);
    /* Rows in the journal wait for the next step; a single row is final at once. */
    seq->replay = seq->step_journal ? v.final_count : 0;
    settle(core, seq, r, v, length - 1 + v.final_count);
}

static void account(struct wk_core *core, const struct wk_flight *f, const struct wk_result *result)
{
    struct wk_stats *s = &core->stats;
    uint32_t decoders = 0;
    for (uint32_t i = 0; i < core->order_count; i++)
        decoders += core->seqs[core->order[i]].state == WK_SEQ_DECODE;
    core->decoders = decoders;
    s->step_us_last = result->step_us;
    s->kind_last = f->kind;
    s->rows_last = f->rows;
    if (f->kind == WK_PLAN_PREFILL) {
        s->steps_prefill++;
        core->prefill_run_us += result->step_us;
        wk_cost_learn(&core->cost_prefill, f->rows, f->context, f->share, (double)result->step_us);
        smooth(&core->prefill_rate, f->rows * f->share, result->step_us);
        /* G4: decoders keep 60, 70, 80 % of the time with one, two, three or more of them. */
        if (decoders > 0) {
            uint64_t factor_tenths = decoders == 1 ? 15 : decoders == 2 ? 23 : 40;
            core->debt_us += result->step_us * factor_tenths / 10;
            if (core->debt_us > DEBT_US_MAX)
                core->debt_us = DEBT_US_MAX;
        }
    } else if (f->kind == WK_PLAN_DECODE) {
        s->steps_decode++;
        s->verify_us += result->step_us;
        core->prefill_run_us = 0;
        core->decode_us_last = result->step_us;
        s->rows_decode += f->rows;
        wk_cost_learn(&core->cost_decode, f->rows, f->context, 1, (double)result->step_us);
        uint64_t cycle = core->now_us - core->cycle_us;
        core->debt_us -= core->debt_us < cycle ? core->debt_us : cycle;
    } else {
        s->steps_abandoned++;
    }
    core->cycle_us = core->now_us;
}

/* The step failed or was dropped: its rows are worth nothing. */
static void lost(struct wk_core *core, struct wk_seq *seq)
{
    if (seq->state == WK_SEQ_ZOMBIE || seq->replan)
        return;
    seq->resumed++;
    seq->replan = true;
    seq->replan_release = core->kv_attached;
}

static void batch_over(struct wk_core *core, const struct wk_result *result, bool good)
{
    struct wk_prefill *b = &core->prefill;
    uint32_t count = b->seq_count;
    b->active = false;
    b->layer = 0;
    b->seq_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct wk_seq *seq = &core->seqs[b->entries[i]];
        CHECK(seq->in_batch);
        if (!good)
            lost(core, seq);
        prefill_done(core, seq, good ? &result->seqs[i] : NULL);
    }
    if (good)
        core->stats.rows_prefill += b->rows;
}

void wk_core_done(struct wk_core *core, const struct wk_result *result)
{
    struct wk_flight *f = &core->flight;
    CHECK(f->active && result != NULL && result->step == f->step);
    CHECK(memcmp(&result->plan_hash, &core->plan->hash, sizeof result->plan_hash) == 0);
    f->active = false;
    wk_plan_ring_done(core->ring, result->step, result->step_us);
    bool good = result->status == ERR_OK;
    core->tap_end = result->tap_end;
    core->stats.tap_records = result->tap_end;
    uint64_t tokens_before = core->stats.tokens_output;
    uint64_t cycle_before = core->cycle_us;
    if (good)
        account(core, f, result);
    else
        core->stats.steps_failed++;
    if (f->kind == WK_PLAN_DECODE) {
        CHECK(!good || result->seq_count == f->seq_count);
        for (uint32_t i = 0; i < f->seq_count; i++) {
            struct wk_seq *seq = &core->seqs[f->entries[i]];
            CHECK(seq->in_flight);
            if (good)
                seq->verify_us += result->step_us;
            else
                lost(core, seq);
            decode_done(core, seq, good ? &result->seqs[i] : NULL);
        }
        if (good)
            smooth(&core->decode_rate, (double)(core->stats.tokens_output - tokens_before),
                   core->now_us - cycle_before);
    } else if (f->kind == WK_PLAN_ABANDON || !good) {
        batch_over(core, result, false);
    } else if (core->prefill.layer + f->layers >= core->options.layer_count) {
        CHECK(result->seq_count == core->prefill.seq_count);
        batch_over(core, result, true);
    } else {
        core->prefill.layer += f->layers;
        for (uint32_t i = 0; i < core->prefill.seq_count; i++)
            core->seqs[core->prefill.entries[i]].served_us = core->now_us;
    }
    core->last_kind = f->kind;
}
