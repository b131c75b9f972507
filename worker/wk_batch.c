/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_batch.h"

#include <string.h>

#include "lib/base/check.h"
#include "worker/wk_core_state.h"

#define PASS_SLICES_ALONE  4u /* slices of a whole prefill pass while nobody decodes */
#define PASS_SLICES_SHARED 2u /* and while somebody does: a newcomer waits for the pass */
/* A decode step takes no longer than this many slices for the sake of drafts. */
#define STEP_SLICES_SHARED 1.5
#define STEP_SLICES_ALONE  2.5
#define SHARE_ROWS_MIN     16u
#define PAUSE_STEPS_MAX    64u /* without drafts, after many that came too late */

uint32_t wk_batch_rows(const struct wk_cost *cost, uint32_t rows_max, double context,
                       double pass_us)
{
    CHECK(rows_max > 0);
    uint32_t rows = rows_max;
    while (rows > 1 && wk_cost_predict(cost, rows, context, 1) > pass_us)
        rows = rows - (rows + 3) / 4;
    return rows;
}

uint32_t wk_batch_layers(const struct wk_cost *cost, uint32_t rows, double context,
                         uint32_t layers_left, uint32_t layers_max, uint32_t layer_count,
                         double slice_us)
{
    CHECK(layers_left > 0 && layers_left <= layer_count);
    uint32_t layers = layers_max != 0 && layers_max < layers_left ? layers_max : layers_left;
    while (layers > 1 &&
           wk_cost_predict(cost, rows, context, (double)layers / layer_count) > slice_us)
        layers--;
    return layers;
}

/* ---- who is there ---- */

struct roll {
    uint32_t decode_ready, decode_waiting; /* waiting = for drafts */
    uint32_t prefill_ready;                /* not yet in a batch */
    uint64_t drafts_due_us;
    bool overdue; /* a newcomer or a prompt that stands still */
};

static bool can_decode(const struct wk_core *core, const struct wk_seq *seq)
{
    return (seq->state == WK_SEQ_DECODE || seq->flush) && !seq->in_flight && !seq->replan &&
           wk_blocks_room(&seq->kv, &core->shape) >= wk_core_length(core, seq);
}

static bool can_prefill(const struct wk_seq *seq)
{
    return seq->state == WK_SEQ_PREFILL && !seq->in_batch && !seq->replan;
}

static struct roll roll_call(const struct wk_core *core)
{
    struct roll r = {0};
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        if (can_decode(core, seq)) {
            if (wk_core_draft_settled(core, seq)) {
                r.decode_ready++;
            } else {
                r.decode_waiting++;
                if (r.drafts_due_us == 0 || seq->draft.deadline_us < r.drafts_due_us)
                    r.drafts_due_us = seq->draft.deadline_us;
            }
        }
        if (seq->state == WK_SEQ_PREFILL && !seq->replan) {
            r.prefill_ready += !seq->in_batch;
            uint64_t since = seq->served_us ? seq->served_us : seq->ready_us;
            uint32_t bound = seq->served_us ? WK_STANDSTILL_US : WK_NEWCOMER_US;
            r.overdue |= core->now_us > since + bound;
        }
    }
    return r;
}

/* ---- prefill ---- */

static double slice_us(const struct wk_core *core)
{
    return (double)core->options.slice_ms * 1000.0;
}

/* Fills core->chosen with the candidates: never served first, then the longest unserved. */
static uint32_t prefill_candidates(struct wk_core *core)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        uint32_t entry = core->order[i];
        const struct wk_seq *seq = &core->seqs[entry];
        if (!can_prefill(seq))
            continue;
        uint32_t at = count++;
        while (at > 0 && core->seqs[core->chosen[at - 1]].served_us > seq->served_us) {
            core->chosen[at] = core->chosen[at - 1];
            at--;
        }
        core->chosen[at] = entry;
    }
    return count;
}

static uint32_t rows_left(const struct wk_core *core, const struct wk_seq *seq)
{
    return wk_snap_prefill_end(core, seq) - seq->computed;
}

/* Tokens before the first rows that the plan has to tell of. */
static uint32_t history_of(const struct wk_seq *seq)
{
    return seq->kv.sent == 0 && wk_plan_penalised(&seq->setup) ? seq->computed : 0;
}

/* What one plan can carry besides rows: a few long tables and histories at most. */
static bool plan_fits(const struct wk_core *core, const struct wk_seq *seq, uint32_t rows_max,
                      uint32_t *blocks, uint32_t *history)
{
    uint32_t rest = rows_left(core, seq);
    uint32_t end = seq->computed + (rest < rows_max ? rest : rows_max);
    uint32_t need = wk_blocks_for(&core->shape, end);
    need -= need < seq->kv.sent ? need : seq->kv.sent;
    *blocks += need;
    *history += history_of(seq);
    return *blocks <= core->plan->blocks_max && *history <= core->plan->history_max;
}

/* Shares rows_max out over the candidates: newcomers get equal parts so that all of them begin,
 * what is left goes by the order.  Returns how many take part; rows in seq->step_rows. */
static uint32_t rows_share(struct wk_core *core, uint32_t count, uint32_t rows_max)
{
    uint32_t newcomers = 0, taken = 0, left = rows_max, blocks = 0, history = 0;
    for (uint32_t i = 0; i < count; i++)
        newcomers += core->seqs[core->chosen[i]].served_us == 0;
    uint32_t share = newcomers > 1 ? rows_max / newcomers : rows_max;
    if (share < SHARE_ROWS_MIN)
        share = SHARE_ROWS_MIN;
    while (taken < count && taken < WK_PREFILL_SEQS_MAX && left > 0) {
        struct wk_seq *seq = &core->seqs[core->chosen[taken]];
        if (!plan_fits(core, seq, rows_max, &blocks, &history))
            break;
        uint32_t rest = rows_left(core, seq);
        uint32_t most = seq->served_us == 0 && share < left ? share : left;
        seq->step_rows = rest < most ? rest : most;
        CHECK(seq->step_rows > 0);
        left -= seq->step_rows;
        taken++;
    }
    for (uint32_t i = 0; i < taken && left > 0; i++) {
        struct wk_seq *seq = &core->seqs[core->chosen[i]];
        uint32_t rest = rows_left(core, seq) - seq->step_rows;
        uint32_t more = rest < left ? rest : left;
        seq->step_rows += more;
        left -= more;
    }
    CHECK(taken > 0); /* one sequence always fits */
    return taken;
}

static void blocks_add(struct wk_core *core, struct wk_seq *seq, struct wk_plan_seq *ps)
{
    struct wk_plan *p = core->plan;
    uint32_t need = wk_blocks_for(&core->shape, ps->position_start + ps->row_count);
    CHECK(need <= seq->kv.count && seq->kv.sent <= seq->kv.count);
    ps->block_first = seq->kv.sent;
    ps->blocks_at = p->block_count;
    ps->block_count = need > seq->kv.sent ? need - seq->kv.sent : 0;
    CHECK(ps->block_count <= p->blocks_max - p->block_count);
    memcpy(p->blocks + p->block_count, seq->kv.ids + seq->kv.sent,
           ps->block_count * sizeof *p->blocks);
    p->block_count += ps->block_count;
    seq->kv.sent += ps->block_count;
}

/* The first rows of a lease: what the executor must know of the sequence, and of what came with
 * the lease. */
static void first_rows(struct wk_core *core, struct wk_seq *seq, struct wk_plan_seq *ps)
{
    struct wk_plan *p = core->plan;
    CHECK(seq->computed == seq->kv.reused);
    ps->setup = p->setup_count++;
    p->setups[ps->setup] = seq->setup;
    ps->fresh = seq->computed == 0;
    ps->restore = !ps->fresh;
    ps->restore_slot = seq->kv.restore_slot;
    ps->history_at = p->history_total;
    ps->history_count = history_of(seq);
    wk_ids_copy(core->ids, ps->entry, 0, ps->history_count, p->history + p->history_total);
    p->history_total += ps->history_count;
}

static void prefill_seq_add(struct wk_core *core, struct wk_seq *seq)
{
    struct wk_plan *p = core->plan;
    CHECK(p->seq_count < p->seqs_max && p->row_count + seq->step_rows <= p->rows_max);
    uint32_t entry = wk_core_entry(core, seq);
    uint32_t end = seq->computed + seq->step_rows;
    bool last = end == wk_core_length(core, seq);
    struct wk_plan_seq *ps = &p->seqs[p->seq_count++];
    *ps = (struct wk_plan_seq){
        .entry = entry,
        .setup = WK_NONE,
        .state_slot = seq->kv.state_slot,
        .position_start = seq->computed,
        .row_count = seq->step_rows,
        .logits_from = last ? seq->step_rows - 1 : seq->step_rows,
        .ids_at = p->row_count,
    };
    if (seq->kv.sent == 0)
        first_rows(core, seq, ps);
    if (end == wk_snap_prefill_end(core, seq))
        ps->snapshot = wk_snap_plan(core, seq, end, &ps->snapshot_slot);
    wk_ids_copy(core->ids, entry, seq->computed, seq->step_rows, p->ids + p->row_count);
    p->row_count += seq->step_rows;
    blocks_add(core, seq, ps);
    seq->in_batch = true;
    if (seq->first_slice_us == 0)
        seq->first_slice_us = core->now_us;
    core->prefill.entries[core->prefill.seq_count++] = entry;
}

static void prefill_begin(struct wk_core *core, bool decoders)
{
    struct wk_prefill *b = &core->prefill;
    CHECK(!b->active && b->seq_count == 0);
    uint32_t count = prefill_candidates(core);
    CHECK(count > 0);
    double context = core->seqs[core->chosen[0]].computed;
    double pass = slice_us(core) * (decoders ? PASS_SLICES_SHARED : PASS_SLICES_ALONE);
    uint32_t rows_max =
        wk_batch_rows(&core->cost_prefill, core->options.slice_rows_max, context, pass);
    uint32_t taken = rows_share(core, count, rows_max);
    double positions = 0;
    for (uint32_t i = 0; i < taken; i++) {
        struct wk_seq *seq = &core->seqs[core->chosen[i]];
        positions += (double)seq->step_rows * seq->computed;
        prefill_seq_add(core, seq);
    }
    b->active = true;
    b->layer = 0;
    b->rows = core->plan->row_count;
    b->context = positions / b->rows;
}

static void fly(struct wk_core *core, uint32_t rows, double context, double share)
{
    struct wk_flight *f = &core->flight;
    f->active = true;
    f->kind = core->plan->kind;
    f->step = core->plan->step;
    f->begun_us = core->now_us;
    f->rows = rows;
    f->context = context;
    f->share = share;
    f->layers = 0;
}

static void prefill_slice(struct wk_core *core, bool decoders)
{
    struct wk_plan *p = core->plan;
    struct wk_prefill *b = &core->prefill;
    uint32_t layer_count = core->options.layer_count;
    wk_plan_clear(p, ++core->step, core->kv_epoch, WK_PLAN_PREFILL);
    p->begin = !b->active;
    if (p->begin)
        prefill_begin(core, decoders);
    uint32_t layers =
        wk_batch_layers(&core->cost_prefill, b->rows, b->context, layer_count - b->layer,
                        core->options.slice_layers_max, layer_count, slice_us(core));
    p->layer_end = b->layer + layers;
    p->finish = p->layer_end == layer_count;
    fly(core, b->rows, b->context, (double)layers / layer_count);
    core->flight.layers = layers;
    core->flight.seq_count = 0;
}

static bool prefill_is_dead(const struct wk_core *core)
{
    for (uint32_t i = 0; i < core->prefill.seq_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->prefill.entries[i]];
        if (seq->state != WK_SEQ_ZOMBIE && !seq->replan)
            return false;
    }
    return true;
}

static void prefill_abandon(struct wk_core *core)
{
    wk_plan_clear(core->plan, ++core->step, core->kv_epoch, WK_PLAN_ABANDON);
    fly(core, 0, 0, 0);
    core->flight.seq_count = 0;
}

/* ---- decode ---- */

/* What this step has waited for, since the plan before it was done.  A drafter that missed the
 * deadline for most is asked no more for a while, ever longer: it would be waited for in vain. */
static void draft_wait_learn(struct wk_core *core)
{
    uint32_t asked = 0, late = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        if (!can_decode(core, seq) || wk_core_draft_own(&seq->spec))
            continue;
        asked += seq->draft.state != WK_DRAFT_NONE;
        late += seq->draft.state == WK_DRAFT_ASKED;
    }
    if (asked == 0) {
        core->draft_pause -= core->draft_pause > 0;
        return;
    }
    core->draft_pause = 2 * late > asked ? core->draft_pause_next : 0;
    core->draft_pause_next =
        core->draft_pause == 0
            ? 1
            : (2 * core->draft_pause < PAUSE_STEPS_MAX ? 2 * core->draft_pause : PAUSE_STEPS_MAX);
    uint64_t wait_us = core->now_us - core->cycle_us, most_us = core->options.deadline_ms * 1000ull;
    wait_us = wait_us < most_us ? wait_us : most_us; /* the rest was for something else: blocks */
    wk_cost_learn(&core->cost_draft, asked, 0, 1, (double)wait_us);
    core->stats.draft_waits++;
    core->stats.draft_us_last = wait_us;
    core->stats.draft_us += wait_us;
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        if (can_decode(core, seq) && !wk_core_draft_own(&seq->spec) &&
            seq->draft.state != WK_DRAFT_NONE)
            seq->draft_us += wait_us;
    }
}

static void decode_seq_add(struct wk_core *core, struct wk_seq *seq, uint32_t drafts_max,
                           uint32_t ema_max)
{
    struct wk_plan *p = core->plan;
    uint32_t entry = wk_core_entry(core, seq), length = wk_core_length(core, seq);
    CHECK(seq->computed + 1 == length && seq->final_count > 0);
    uint32_t drafts = seq->draft.state == WK_DRAFT_READY ? seq->draft.count : 0;
    core->stats.drafts_timeout += seq->draft.state == WK_DRAFT_ASKED;
    uint64_t room = wk_blocks_room(&seq->kv, &core->shape) - length;
    uint32_t verify = seq->draft.verify;
    if (seq->spec.policy == WK_POLICY_EMA && ema_max < verify)
        verify = ema_max;
    drafts = drafts < verify ? drafts : verify;
    drafts = drafts < drafts_max ? drafts : drafts_max;
    drafts = drafts < room ? drafts : (uint32_t)room;
    drafts = seq->flush ? 0 : wk_snap_drafts_max(core, seq, length - 1, drafts);
    CHECK(drafts < WK_STEP_ROWS_MAX && p->row_count + drafts + 1 <= p->rows_max);
    struct wk_plan_seq *ps = &p->seqs[p->seq_count++];
    *ps = (struct wk_plan_seq){
        .entry = entry,
        .setup = WK_NONE,
        .state_slot = seq->kv.state_slot,
        .position_start = length - 1,
        .row_count = drafts + 1,
        .replay_count = seq->replay,
        .journal = drafts > 0,
        .ids_at = p->row_count,
        .final_count = seq->final_count,
    };
    /* With its rows in the journal the state stands before them, else behind the one row. */
    ps->snapshot = wk_snap_plan(core, seq, length - 1, &ps->snapshot_slot);
    ps->journal |= ps->snapshot || seq->flush;
    if (!ps->journal)
        ps->snapshot = wk_snap_plan(core, seq, length, &ps->snapshot_slot);
    seq->step_journal = ps->journal;
    memcpy(ps->final_ids, seq->final_ids, seq->final_count * sizeof *seq->final_ids);
    seq->final_count = 0;
    p->ids[p->row_count++] = wk_ids_at(core->ids, entry, length - 1);
    memcpy(p->ids + p->row_count, seq->draft.ids, drafts * sizeof *p->ids);
    p->row_count += drafts;
    memcpy(seq->step_ids, seq->draft.ids, drafts * sizeof *seq->step_ids);
    seq->step_drafts = drafts;
    seq->step_rows = drafts + 1;
    seq->draft.state = WK_DRAFT_NONE;
    blocks_add(core, seq, ps);
    seq->in_flight = true;
    core->flight.entries[core->flight.seq_count++] = entry;
}

uint32_t wk_batch_drafts_max(const struct wk_core *core, uint32_t decoders)
{
    uint32_t rows = core->options.decode_rows_max;
    uint32_t count = decoders > 0 ? decoders : 1; /* the one that is about to begin */
    uint32_t drafts = count < rows ? (rows - count) / count : 0;
    return drafts < WK_SPEC_DRAFTS_MAX ? drafts : WK_SPEC_DRAFTS_MAX;
}

/* Drafts of each of count sequences: what the rows allow, and no more than keeps the step short. */
static uint32_t drafts_allowed(const struct wk_core *core, uint32_t count, bool prefill_waits)
{
    uint32_t drafts = wk_batch_drafts_max(core, count);
    double most_us = slice_us(core) * (prefill_waits ? STEP_SLICES_SHARED : STEP_SLICES_ALONE);
    /* One draft always: where it is right it makes up for its row. */
    while (drafts > 1 && wk_cost_predict(&core->cost_decode, count * (drafts + 1.0),
                                         core->decode_context, 1) > most_us)
        drafts--;
    return drafts;
}

/* ema's batch rule over all that ride in this step. */
static uint32_t ema_allowed(struct wk_core *core)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->spec.policy == WK_POLICY_EMA && can_decode(core, seq) &&
            seq->draft.state == WK_DRAFT_READY)
            core->chosen[count++] = seq->draft.verify;
    }
    return wk_policy_ema_batch(core->chosen, count);
}

static void decode_step(struct wk_core *core, uint32_t ready, bool prefill_waits)
{
    wk_plan_clear(core->plan, ++core->step, core->kv_epoch, WK_PLAN_DECODE);
    uint32_t rows_max = core->options.decode_rows_max;
    uint32_t count = ready < rows_max ? ready : rows_max;
    uint32_t drafts_max = drafts_allowed(core, count, prefill_waits);
    uint32_t ema_max = ema_allowed(core);
    double positions = 0;
    draft_wait_learn(core);
    core->flight.seq_count = 0;
    uint32_t start = core->decode_next % core->order_count;
    for (uint32_t i = 0; i < core->order_count && core->flight.seq_count < count; i++) {
        uint32_t at = (start + i) % core->order_count;
        struct wk_seq *seq = &core->seqs[core->order[at]];
        if (!can_decode(core, seq) || !wk_core_draft_settled(core, seq))
            continue;
        positions += wk_core_length(core, seq);
        decode_seq_add(core, seq, drafts_max, ema_max);
        core->decode_next = at + 1;
    }
    CHECK(core->flight.seq_count == count);
    core->decode_context = positions / count;
    fly(core, core->plan->row_count, core->decode_context, 1);
}

bool wk_batch_next(struct wk_core *core, uint64_t *ret_wake_us)
{
    CHECK(!core->flight.active);
    *ret_wake_us = 0;
    if (core->prefill.active && prefill_is_dead(core)) {
        prefill_abandon(core);
        return true;
    }
    if (!core->kv_attached)
        return false;
    struct roll r = roll_call(core);
    uint32_t decoders = r.decode_ready + r.decode_waiting;
    bool prefill_can = core->prefill.active || r.prefill_ready > 0;
    if (decoders == 0) {
        if (!prefill_can)
            return false;
        prefill_slice(core, false);
        return true;
    }
    /* Slices and steps take turns; where steps are long and a newcomer has waited for long, slices
     * may take up to the time of a step. */
    bool owed = core->debt_us > 0 && !r.overdue;
    bool turn = core->last_kind != WK_PLAN_PREFILL ||
                (r.overdue &&
                 (double)core->prefill_run_us + slice_us(core) <= (double)core->decode_us_last);
    if (prefill_can && !owed && turn) {
        prefill_slice(core, true);
        return true;
    }
    if (r.decode_waiting > 0) {
        *ret_wake_us = r.drafts_due_us;
        return false;
    }
    decode_step(core, r.decode_ready, prefill_can);
    return true;
}
