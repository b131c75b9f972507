/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_plan_decode.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"
#include "worker/wk_plan.h"

struct reader {
    const uint8_t *bytes;
    size_t at, count;
    bool short_of; /* ran past the end: every value since is 0 */
};

static uint32_t get_u32(struct reader *r)
{
    if (r->count - r->at < 4) {
        r->short_of = true;
        return 0;
    }
    const uint8_t *b = r->bytes + r->at;
    r->at += 4;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static uint64_t get_u64(struct reader *r)
{
    uint64_t low = get_u32(r);
    return low | (uint64_t)get_u32(r) << 32;
}

static double get_f64(struct reader *r)
{
    uint64_t bits = get_u64(r);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void get_array(struct reader *r, void *words, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word = get_u32(r);
        memcpy((uint8_t *)words + (size_t)i * 4, &word, 4);
    }
}

/* A refusal; field and value go into the text. */
static enum err bad(struct err_detail *detail, const char *field, uint64_t value, uint64_t max)
{
    return err_set(detail, ERR_INVALID, "plan: %s is %llu, at most %llu", field,
                   (unsigned long long)value, (unsigned long long)max);
}

#define AT_MOST(field, value, max)                                                                 \
    do {                                                                                           \
        uint64_t value_ = (value), max_ = (max);                                                   \
        if (value_ > max_)                                                                         \
            return bad(detail, field, value_, max_);                                               \
    } while (0)

static enum err get_setup(struct reader *r, const struct wk_plan_limits *limits,
                          struct wk_plan_setup *s, struct err_detail *detail)
{
    get_array(r, &s->id, sizeof s->id / 4);
    uint32_t taps = get_u32(r);
    AT_MOST("taps", taps, 1);
    s->taps = taps != 0;
    s->mtp = get_u32(r);
    AT_MOST("mtp", s->mtp, WK_STEP_ROWS_MAX - 1);
    s->prompt_count = get_u32(r);
    s->output_tokens_min = get_u32(r);
    s->temperature = get_f64(r);
    s->top_p = get_f64(r);
    s->min_p = get_f64(r);
    s->top_k = get_u32(r);
    s->repetition_penalty = get_f64(r);
    s->presence_penalty = get_f64(r);
    s->frequency_penalty = get_f64(r);
    s->seed = get_u64(r);
    s->choice = get_u32(r);
    uint32_t logprobs = get_u32(r);
    s->top_logprobs = get_u32(r);
    AT_MOST("logprobs", logprobs, 1);
    AT_MOST("top_logprobs", s->top_logprobs, MSG_TOP_LOGPROBS_MAX);
    s->logprobs = logprobs != 0;
    if (!(s->temperature >= 0) || !isfinite(s->temperature) || !isfinite(s->top_p) ||
        !isfinite(s->min_p) || !(s->repetition_penalty > 0) || !isfinite(s->repetition_penalty) ||
        !isfinite(s->presence_penalty) || !isfinite(s->frequency_penalty))
        return err_set(detail, ERR_INVALID, "plan: sampling parameter out of range");
    s->bias_count = get_u32(r);
    AT_MOST("bias_count", s->bias_count, MSG_BIAS_MAX);
    get_array(r, s->bias_ids, s->bias_count);
    get_array(r, s->bias_values, s->bias_count);
    s->banned_count = get_u32(r);
    AT_MOST("banned_count", s->banned_count, WK_STOP_IDS_MAX);
    get_array(r, s->banned_ids, s->banned_count);
    for (uint32_t i = 0; i < s->bias_count; i++)
        AT_MOST("bias id", s->bias_ids[i], limits->vocab_size - 1u);
    for (uint32_t i = 0; i < s->banned_count; i++)
        AT_MOST("banned id", s->banned_ids[i], limits->vocab_size - 1u);
    return ERR_OK;
}

static enum err snapshot_check(const char *what, uint32_t slot, const struct wk_plan_limits *limits,
                               struct err_detail *detail)
{
    AT_MOST(what, slot, limits->slot_count - 1u);
    if (slot < limits->live_slots)
        return err_set(detail, ERR_INVALID, "plan: %s %u is a live slot", what, slot);
    return ERR_OK;
}

/* What comes from the cache and goes to it. */
static enum err get_cache(struct reader *r, const struct wk_plan *p,
                          const struct wk_plan_limits *limits, struct wk_plan_seq *s,
                          struct err_detail *detail)
{
    s->restore_slot = get_u32(r);
    s->snapshot_slot = get_u32(r);
    s->history_at = get_u32(r);
    s->history_count = get_u32(r);
    if (s->restore)
        TRY(snapshot_check("restore_slot", s->restore_slot, limits, detail));
    if (s->snapshot)
        TRY(snapshot_check("snapshot_slot", s->snapshot_slot, limits, detail));
    AT_MOST("history_at", (uint64_t)s->history_at + s->history_count, p->history_total);
    if ((s->restore && s->fresh) ||
        (s->history_count != 0 && (s->setup == WK_NONE || s->history_count != s->position_start)))
        return err_set(detail, ERR_INVALID, "plan: cache of entry %u does not fit", s->entry);
    return ERR_OK;
}

static enum err get_seq(struct reader *r, const struct wk_plan *p,
                        const struct wk_plan_limits *limits, struct wk_plan_seq *s,
                        struct err_detail *detail)
{
    s->entry = get_u32(r);
    s->setup = get_u32(r);
    s->state_slot = get_u32(r);
    s->position_start = get_u32(r);
    s->row_count = get_u32(r);
    s->replay_count = get_u32(r);
    s->logits_from = get_u32(r);
    uint32_t flags = get_u32(r);
    s->fresh = (flags & 1) != 0;
    s->journal = (flags & 2) != 0;
    s->restore = (flags & 4) != 0;
    s->snapshot = (flags & 8) != 0;
    TRY(get_cache(r, p, limits, s, detail));
    s->ids_at = get_u32(r);
    s->final_count = get_u32(r);
    AT_MOST("entry", s->entry, limits->entries - 1u);
    AT_MOST("state_slot", s->state_slot, limits->live_slots - 1u);
    if (s->setup != WK_NONE)
        AT_MOST("setup", (uint64_t)s->setup + 1, p->setup_count);
    AT_MOST("row_count of a sequence", s->row_count, p->row_count);
    AT_MOST("ids_at", (uint64_t)s->ids_at + s->row_count, p->row_count);
    AT_MOST("position", (uint64_t)s->position_start + s->row_count, limits->context_max);
    AT_MOST("logits_from", s->logits_from, s->row_count);
    AT_MOST("replay_count", s->replay_count, WK_STEP_ROWS_MAX);
    AT_MOST("replay_count", s->replay_count, s->position_start);
    AT_MOST("flags of a sequence", flags, 15);
    AT_MOST("final_count", s->final_count, WK_STEP_ROWS_MAX);
    if (s->row_count == 0 || (s->fresh && (s->position_start != 0 || s->replay_count != 0)) ||
        (s->journal && s->row_count > WK_STEP_ROWS_MAX))
        return err_set(detail, ERR_INVALID, "plan: rows of entry %u do not fit together", s->entry);
    get_array(r, s->final_ids, s->final_count);
    for (uint32_t i = 0; i < s->final_count; i++)
        AT_MOST("final id", s->final_ids[i], limits->vocab_size - 1u);
    s->block_first = get_u32(r);
    s->block_count = get_u32(r);
    s->blocks_at = get_u32(r);
    AT_MOST("blocks_at", (uint64_t)s->blocks_at + s->block_count, p->block_count);
    AT_MOST("block table", (uint64_t)s->block_first + s->block_count, limits->table_max);
    return ERR_OK;
}

static enum err get_head(struct reader *r, const struct wk_plan_limits *limits, struct wk_plan *p,
                         struct err_detail *detail)
{
    p->step = get_u64(r);
    p->epoch = get_u32(r);
    uint32_t kind = get_u32(r), flags = get_u32(r);
    p->layer_end = get_u32(r);
    p->seq_count = get_u32(r);
    p->row_count = get_u32(r);
    p->block_count = get_u32(r);
    p->setup_count = get_u32(r);
    p->history_total = get_u32(r);
    if (kind < WK_PLAN_PREFILL || kind > WK_PLAN_ABANDON)
        return bad(detail, "kind", kind, WK_PLAN_ABANDON);
    AT_MOST("flags", flags, 3);
    AT_MOST("layer_end", p->layer_end, limits->layer_count);
    AT_MOST("seq_count", p->seq_count, p->seqs_max);
    AT_MOST("row_count", p->row_count, p->rows_max);
    AT_MOST("block_count", p->block_count, p->blocks_max);
    AT_MOST("setup_count", p->setup_count, WK_PREFILL_SEQS_MAX);
    AT_MOST("history_total", p->history_total, p->history_max);
    p->kind = (enum wk_plan_kind)kind;
    p->begin = (flags & 1) != 0;
    p->finish = (flags & 2) != 0;
    return ERR_OK;
}

static enum err get_ids(struct reader *r, const struct wk_plan_limits *limits, struct wk_plan *p,
                        struct err_detail *detail)
{
    get_array(r, p->ids, p->row_count);
    get_array(r, p->blocks, p->block_count);
    get_array(r, p->history, p->history_total);
    for (uint32_t i = 0; i < p->history_total; i++)
        AT_MOST("id of the history", p->history[i], limits->vocab_size - 1u);
    for (uint32_t i = 0; i < p->row_count; i++)
        AT_MOST("id", p->ids[i], limits->vocab_size - 1u);
    for (uint32_t i = 0; i < p->block_count; i++)
        AT_MOST("block", p->blocks[i], limits->block_count - 1u);
    return ERR_OK;
}

enum err wk_plan_decode(const uint8_t *bytes, size_t count, const struct wk_plan_limits *limits,
                        struct wk_plan *ret_plan, struct err_detail *detail)
{
    struct wk_plan *p = ret_plan;
    struct reader r = {.bytes = bytes, .count = count};
    CHECK(p != NULL && limits->entries > 0 && limits->live_slots > 0);
    CHECK(limits->block_count > 0 && limits->vocab_size > 0);
    wk_plan_clear(p, 0, 0, WK_PLAN_DECODE);
    AT_MOST("bytes", count, p->encoding_bytes_max);
    TRY(get_head(&r, limits, p, detail));
    for (uint32_t i = 0; i < p->seq_count && !r.short_of; i++)
        TRY(get_seq(&r, p, limits, &p->seqs[i], detail));
    TRY(get_ids(&r, limits, p, detail));
    for (uint32_t i = 0; i < p->setup_count && !r.short_of; i++)
        TRY(get_setup(&r, limits, &p->setups[i], detail));
    if (r.short_of || r.at != r.count)
        return err_set(detail, ERR_INVALID, "plan: %zu bytes, its counts ask for %s", count,
                       r.short_of ? "more" : "fewer");
    memcpy(p->encoding, bytes, count);
    p->encoding_bytes = count;
    p->hash = hash_xxh3_once(bytes, count);
    return ERR_OK;
}
