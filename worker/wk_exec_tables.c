/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_exec_tables.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define WK_TABLES_MAGIC 0x574b5442u
#define LOGPROB_LEAST   (-9999.0f) /* the wire takes finite numbers only */

struct wk_tables {
    uint32_t magic;
    uint32_t entry_count, vocab_size, blocks_max;
    struct wk_entry *entries;
    uint32_t *blocks;
    uint8_t *in_context;
    uint16_t *output_count;
};

struct wk_tables *wk_tables_create(uint32_t entries, uint32_t vocab_size)
{
    CHECK(entries > 0 && vocab_size > 0);
    struct wk_tables *t = mem_take(sizeof *t);
    t->magic = WK_TABLES_MAGIC;
    t->entry_count = entries;
    t->vocab_size = vocab_size;
    t->entries = mem_take_array(entries, sizeof *t->entries);
    t->in_context = mem_take_array((size_t)entries * vocab_size, sizeof *t->in_context);
    t->output_count = mem_take_array((size_t)entries * vocab_size, sizeof *t->output_count);
    for (uint32_t i = 0; i < entries; i++) {
        t->entries[i].in_context = t->in_context + (size_t)i * vocab_size;
        t->entries[i].output_count = t->output_count + (size_t)i * vocab_size;
    }
    return t;
}

void wk_tables_destroy(struct wk_tables **tables_p)
{
    CHECK(tables_p != NULL);
    struct wk_tables *t = *tables_p;
    if (t == NULL)
        return;
    CHECK_OBJ(t, WK_TABLES_MAGIC);
    mem_give(t->entries);
    mem_give(t->blocks);
    mem_give(t->in_context);
    mem_give(t->output_count);
    t->magic = 0;
    mem_give(t);
    *tables_p = NULL;
}

void wk_tables_blocks(struct wk_tables *t, uint32_t blocks_max)
{
    CHECK_OBJ(t, WK_TABLES_MAGIC);
    if (blocks_max > t->blocks_max) {
        mem_give(t->blocks);
        t->blocks = mem_take_array((size_t)t->entry_count * blocks_max, sizeof *t->blocks);
        t->blocks_max = blocks_max;
    }
    for (uint32_t i = 0; i < t->entry_count; i++) {
        t->entries[i].blocks = t->blocks + (size_t)i * t->blocks_max;
        t->entries[i].block_count = 0;
    }
}

struct wk_entry *wk_tables_at(struct wk_tables *t, uint32_t entry)
{
    CHECK_OBJ(t, WK_TABLES_MAGIC);
    CHECK(entry < t->entry_count);
    return &t->entries[entry];
}

static void setup_take(struct wk_tables *t, struct wk_entry *e, const struct wk_plan_setup *s)
{
    e->setup = *s;
    e->block_count = 0;
    e->history_count = 0;
    e->penalised = wk_plan_penalised(s);
    if (e->penalised) {
        memset(e->in_context, 0, t->vocab_size * sizeof *e->in_context);
        memset(e->output_count, 0, t->vocab_size * sizeof *e->output_count);
    }
    e->params = (struct sampler_params){
        .temperature = s->temperature,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .top_k = s->top_k,
        .repetition_penalty = s->repetition_penalty,
        .presence_penalty = s->presence_penalty,
        .frequency_penalty = s->frequency_penalty,
        .seed = s->seed,
        .choice = s->choice,
        .bias_count = s->bias_count,
        .bias_ids = e->setup.bias_ids,
        .bias_values = e->setup.bias_values,
        .banned_ids = e->setup.banned_ids,
        .top_logprobs = s->top_logprobs,
        .logprobs = s->logprobs,
    };
}

/* The tokens before the first rows: those whose rows came from the cache. */
static void history_take(struct wk_tables *t, struct wk_entry *e, const struct wk_plan *plan,
                         const struct wk_plan_seq *s)
{
    e->history_count = s->position_start;
    if (!e->penalised)
        return;
    CHECK(s->history_count == s->position_start);
    CHECK(s->history_count <= plan->history_total - s->history_at);
    e->history_count = 0;
    wk_tables_add(t, s->entry, plan->history + s->history_at, s->history_count);
}

static enum err seq_bad(const struct wk_plan_seq *s, const char *why, struct err_detail *detail)
{
    return err_set(detail, ERR_INVALID, "plan: entry %u: %s", s->entry, why);
}

/* What wk_tables_take and model_begin rely on. */
static enum err seq_admit(const struct wk_tables *t, const struct wk_tables_room *room,
                          const struct wk_plan *p, const struct wk_plan_seq *s,
                          struct err_detail *detail)
{
    if (s->entry >= t->entry_count)
        return seq_bad(s, "no such entry", detail);
    if (s->setup != WK_NONE && s->setup >= p->setup_count)
        return seq_bad(s, "a setup that the plan does not have", detail);
    if (s->fresh && s->setup == WK_NONE)
        return seq_bad(s, "fresh without a setup", detail);
    if (s->setup != WK_NONE && s->history_count != s->position_start &&
        (s->history_count != 0 || wk_plan_penalised(&p->setups[s->setup])))
        return seq_bad(s, "the tokens before its rows are missing", detail);
    uint32_t have = s->setup != WK_NONE ? 0 : t->entries[s->entry].block_count;
    if (s->block_first != have || s->block_count > t->blocks_max - have)
        return seq_bad(s, "blocks that do not continue its table", detail);
    if (((uint64_t)have + s->block_count) * room->block_tokens <
        (uint64_t)s->position_start + s->row_count)
        return seq_bad(s, "rows beyond its blocks", detail);
    if (p->kind == WK_PLAN_PREFILL
            ? s->row_count - s->logits_from > 1
            : s->logits_from != 0 || s->row_count > WK_STEP_ROWS_MAX || s->final_count == 0)
        return seq_bad(s, "rows with logits, or tokens before them, that do not fit", detail);
    return ERR_OK;
}

/* Rows lie one after another in ids; no sequence and no state twice. */
static enum err seqs_admit(const struct wk_tables *t, const struct wk_tables_room *room,
                           const struct wk_plan *p, struct err_detail *detail)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        TRY(seq_admit(t, room, p, s, detail));
        if (s->ids_at != rows)
            return seq_bad(s, "its ids are not next", detail);
        rows += s->row_count;
        for (uint32_t k = 0; k < i; k++)
            if (p->seqs[k].entry == s->entry || p->seqs[k].state_slot == s->state_slot)
                return seq_bad(s, "twice, or its state is another's", detail);
    }
    if (rows != p->row_count)
        return err_set(detail, ERR_INVALID, "plan: %u rows, its sequences have %llu", p->row_count,
                       (unsigned long long)rows);
    return ERR_OK;
}

enum err wk_tables_admit(const struct wk_tables *t, const struct wk_tables_room *room,
                         const struct wk_plan *plan, struct err_detail *detail)
{
    CHECK_OBJ(t, WK_TABLES_MAGIC);
    const struct wk_plan *p = plan;
    bool goes_on = p->kind == WK_PLAN_ABANDON || (p->kind == WK_PLAN_PREFILL && !p->begin);
    if (goes_on) {
        if (!room->paused)
            return err_set(detail, ERR_INVALID, "plan: goes on with a batch, none is paused");
        if (p->seq_count > 0 || p->row_count > 0 || p->block_count > 0)
            return err_set(detail, ERR_INVALID, "plan: goes on with a batch and names rows");
        return ERR_OK;
    }
    bool prefill = p->kind == WK_PLAN_PREFILL;
    uint32_t rows_max = prefill ? room->prefill_rows : room->decode_rows;
    uint32_t seqs_max = prefill ? room->prefill_seqs : room->decode_seqs;
    if (prefill && room->paused)
        return err_set(detail, ERR_INVALID, "plan: begins a batch, one is paused");
    if (p->seq_count == 0 || p->seq_count > seqs_max || p->row_count > rows_max)
        return err_set(detail, ERR_INVALID, "plan: %u rows of %u sequences, at most %u of %u",
                       p->row_count, p->seq_count, rows_max, seqs_max);
    return seqs_admit(t, room, p, detail);
}

void wk_tables_take(struct wk_tables *t, const struct wk_plan *plan)
{
    CHECK_OBJ(t, WK_TABLES_MAGIC);
    for (uint32_t i = 0; i < plan->seq_count; i++) {
        const struct wk_plan_seq *s = &plan->seqs[i];
        struct wk_entry *e = wk_tables_at(t, s->entry);
        CHECK(!s->fresh || s->setup != WK_NONE);
        if (s->setup != WK_NONE) {
            CHECK(s->setup < plan->setup_count);
            setup_take(t, e, &plan->setups[s->setup]);
            history_take(t, e, plan, s);
        }
        CHECK(s->block_first == e->block_count);
        CHECK(s->block_count <= t->blocks_max - e->block_count);
        memcpy(e->blocks + e->block_count, plan->blocks + s->blocks_at,
               s->block_count * sizeof *e->blocks);
        e->block_count += s->block_count;
    }
}

void wk_tables_add(struct wk_tables *t, uint32_t entry, const uint32_t *ids, uint32_t count)
{
    struct wk_entry *e = wk_tables_at(t, entry);
    for (uint32_t i = 0; e->penalised && i < count; i++) {
        CHECK(ids[i] < t->vocab_size);
        e->in_context[ids[i]] = 1;
        if (e->history_count + i >= e->setup.prompt_count && e->output_count[ids[i]] < UINT16_MAX)
            e->output_count[ids[i]]++;
    }
    e->history_count += count;
}

static void result_add(struct wk_result_seq *r, const struct sampler_result *picked, bool logprobs)
{
    uint32_t at = r->count++;
    r->ids[at] = picked->id;
    if (!logprobs)
        return;
    r->logprob[at] = isfinite(picked->logprob) ? picked->logprob : LOGPROB_LEAST;
    for (uint32_t k = 0; k < r->top_count; k++) {
        bool there = k < picked->top_count;
        float value = there ? picked->top_logprobs[k] : LOGPROB_LEAST;
        r->top_ids[at * r->top_count + k] = there ? picked->top_ids[k] : 0;
        r->top_logprobs[at * r->top_count + k] = isfinite(value) ? value : LOGPROB_LEAST;
    }
}

void wk_tables_sample(struct wk_tables *t, struct sampler *s, uint32_t entry, const float *logits,
                      uint32_t row_count, const uint32_t *drafts, uint32_t position,
                      struct wk_result_seq *ret_result)
{
    struct wk_entry *e = wk_tables_at(t, entry);
    CHECK(row_count >= 1 && row_count <= WK_STEP_ROWS_MAX);
    CHECK(e->history_count == position + 1);
    struct wk_result_seq *r = ret_result;
    r->entry = entry;
    r->count = 0;
    r->top_count = e->setup.logprobs ? e->setup.top_logprobs : 0;
    /* Counts of the drafts that were taken on trust, to be put back at the end. */
    uint8_t was_in_context[WK_STEP_ROWS_MAX];
    uint16_t was_count[WK_STEP_ROWS_MAX];
    struct sampler_history history = {e->penalised ? e->in_context : NULL,
                                      e->penalised ? e->output_count : NULL};
    uint32_t added = 0;
    for (uint32_t j = 0; j < row_count; j++) {
        struct sampler_result picked;
        uint32_t token_at = position + j + 1;
        uint32_t output_index = token_at - e->setup.prompt_count;
        e->params.banned_count =
            output_index < e->setup.output_tokens_min ? e->setup.banned_count : 0;
        sampler_pick(s, &e->params, &history, logits + (size_t)j * t->vocab_size, token_at,
                     &picked);
        result_add(r, &picked, e->setup.logprobs);
        if (j + 1 == row_count || picked.id != drafts[j])
            break;
        if (e->penalised) {
            was_in_context[added] = e->in_context[picked.id];
            was_count[added] = e->output_count[picked.id];
        }
        added++;
        wk_tables_add(t, entry, &picked.id, 1);
    }
    while (added > 0) {
        added--;
        e->history_count--;
        if (e->penalised) {
            e->in_context[r->ids[added]] = was_in_context[added];
            e->output_count[r->ids[added]] = was_count[added];
        }
    }
    CHECK(r->count >= 1 && e->history_count == position + 1);
}
