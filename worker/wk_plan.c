/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_plan.h"

#include <inttypes.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define WK_PLAN_MAGIC 0x574b504cu
#define WK_RING_MAGIC 0x574b5247u

/* Upper bounds of the encoded pieces; the writer CHECKs against the sum. */
#define PLAN_HEAD_BYTES  64u
#define PLAN_SEQ_BYTES   (20u * 4u + 4u * WK_STEP_ROWS_MAX)
#define PLAN_SETUP_BYTES (128u + 8u * MSG_BIAS_MAX + 4u * WK_STOP_IDS_MAX)

struct wk_plan_ring {
    uint32_t magic;
    uint64_t added;
    struct wk_plan_past items[WK_PLAN_RING_COUNT];
    uint64_t starts[WK_PLAN_RING_COUNT]; /* running byte offset of each encoding */
    uint64_t bytes_added;
    size_t bytes_max;
    uint8_t *bytes;
};

struct wk_plan *wk_plan_create(uint32_t seqs_max, uint32_t rows_max, uint32_t blocks_max,
                               uint32_t history_max)
{
    CHECK(seqs_max > 0 && rows_max > 0 && blocks_max > 0 && history_max > 0);
    struct wk_plan *p = mem_take(sizeof *p);
    p->magic = WK_PLAN_MAGIC;
    p->seqs_max = seqs_max;
    p->rows_max = rows_max;
    p->blocks_max = blocks_max;
    p->history_max = history_max;
    p->seqs = mem_take_array(seqs_max, sizeof *p->seqs);
    p->ids = mem_take_array(rows_max, sizeof *p->ids);
    p->blocks = mem_take_array(blocks_max, sizeof *p->blocks);
    p->history = mem_take_array(history_max, sizeof *p->history);
    p->setups = mem_take_array(WK_PREFILL_SEQS_MAX, sizeof *p->setups);
    p->encoding_bytes_max = PLAN_HEAD_BYTES + (size_t)seqs_max * PLAN_SEQ_BYTES +
                            4u * ((size_t)rows_max + blocks_max + history_max) +
                            (size_t)WK_PREFILL_SEQS_MAX * PLAN_SETUP_BYTES;
    p->encoding = mem_take(p->encoding_bytes_max);
    return p;
}

void wk_plan_destroy(struct wk_plan **plan_p)
{
    CHECK(plan_p != NULL);
    struct wk_plan *p = *plan_p;
    if (p == NULL)
        return;
    CHECK_OBJ(p, WK_PLAN_MAGIC);
    mem_give(p->seqs);
    mem_give(p->ids);
    mem_give(p->blocks);
    mem_give(p->history);
    mem_give(p->setups);
    mem_give(p->encoding);
    p->magic = 0;
    mem_give(p);
    *plan_p = NULL;
}

void wk_plan_clear(struct wk_plan *p, uint64_t step, uint32_t epoch, enum wk_plan_kind kind)
{
    CHECK_OBJ(p, WK_PLAN_MAGIC);
    CHECK(kind >= WK_PLAN_PREFILL && kind <= WK_PLAN_ABANDON);
    p->step = step;
    p->epoch = epoch;
    p->kind = kind;
    p->begin = false;
    p->finish = false;
    p->layer_end = 0;
    p->seq_count = 0;
    p->row_count = 0;
    p->block_count = 0;
    p->setup_count = 0;
    p->history_total = 0;
    p->encoding_bytes = 0;
    memset(&p->hash, 0, sizeof p->hash);
}

bool wk_plan_penalised(const struct wk_plan_setup *s)
{
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

/* ---- encoding ---- */

struct writer {
    uint8_t *bytes;
    size_t count, count_max;
};

static void put_u32(struct writer *w, uint32_t value)
{
    CHECK(w->count + 4 <= w->count_max);
    for (int i = 0; i < 4; i++)
        w->bytes[w->count++] = (uint8_t)(value >> (8 * i));
}

static void put_u64(struct writer *w, uint64_t value)
{
    put_u32(w, (uint32_t)value);
    put_u32(w, (uint32_t)(value >> 32));
}

static void put_f64(struct writer *w, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_u64(w, bits);
}

static void put_array(struct writer *w, const void *words, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, (const uint8_t *)words + (size_t)i * 4, 4);
        put_u32(w, word);
    }
}

static void put_setup(struct writer *w, const struct wk_plan_setup *s)
{
    put_array(w, &s->id, sizeof s->id / 4);
    put_u32(w, s->taps);
    put_u32(w, s->mtp);
    put_u32(w, s->prompt_count);
    put_u32(w, s->output_tokens_min);
    put_f64(w, s->temperature);
    put_f64(w, s->top_p);
    put_f64(w, s->min_p);
    put_u32(w, s->top_k);
    put_f64(w, s->repetition_penalty);
    put_f64(w, s->presence_penalty);
    put_f64(w, s->frequency_penalty);
    put_u64(w, s->seed);
    put_u32(w, s->choice);
    put_u32(w, s->logprobs);
    put_u32(w, s->top_logprobs);
    put_u32(w, s->bias_count);
    put_array(w, s->bias_ids, s->bias_count);
    put_array(w, s->bias_values, s->bias_count);
    put_u32(w, s->banned_count);
    put_array(w, s->banned_ids, s->banned_count);
}

static void put_seq(struct writer *w, const struct wk_plan_seq *s)
{
    put_u32(w, s->entry);
    put_u32(w, s->setup);
    put_u32(w, s->state_slot);
    put_u32(w, s->position_start);
    put_u32(w, s->row_count);
    put_u32(w, s->replay_count);
    put_u32(w, s->logits_from);
    put_u32(w, (uint32_t)s->fresh | (uint32_t)s->journal << 1 | (uint32_t)s->restore << 2 |
                   (uint32_t)s->snapshot << 3);
    put_u32(w, s->restore_slot);
    put_u32(w, s->snapshot_slot);
    put_u32(w, s->history_at);
    put_u32(w, s->history_count);
    put_u32(w, s->ids_at);
    put_u32(w, s->final_count);
    put_array(w, s->final_ids, s->final_count);
    put_u32(w, s->block_first);
    put_u32(w, s->block_count);
    put_u32(w, s->blocks_at);
}

/* Returns the bytes written to `bytes`, which has room for p->encoding_bytes_max. */
static size_t plan_encode(const struct wk_plan *p, uint8_t *bytes)
{
    struct writer w = {.bytes = bytes, .count_max = p->encoding_bytes_max};
    put_u64(&w, p->step);
    put_u32(&w, p->epoch);
    put_u32(&w, (uint32_t)p->kind);
    put_u32(&w, (uint32_t)p->begin | (uint32_t)p->finish << 1);
    put_u32(&w, p->layer_end);
    put_u32(&w, p->seq_count);
    put_u32(&w, p->row_count);
    put_u32(&w, p->block_count);
    put_u32(&w, p->setup_count);
    put_u32(&w, p->history_total);
    for (uint32_t i = 0; i < p->seq_count; i++)
        put_seq(&w, &p->seqs[i]);
    put_array(&w, p->ids, p->row_count);
    put_array(&w, p->blocks, p->block_count);
    put_array(&w, p->history, p->history_total);
    for (uint32_t i = 0; i < p->setup_count; i++)
        put_setup(&w, &p->setups[i]);
    return w.count;
}

void wk_plan_seal(struct wk_plan *p)
{
    CHECK_OBJ(p, WK_PLAN_MAGIC);
    CHECK(p->seq_count <= p->seqs_max && p->row_count <= p->rows_max);
    CHECK(p->block_count <= p->blocks_max && p->setup_count <= WK_PREFILL_SEQS_MAX);
    CHECK(p->history_total <= p->history_max);
    p->encoding_bytes = plan_encode(p, p->encoding);
    p->hash = hash_xxh3_once(p->encoding, p->encoding_bytes);
}

enum err wk_plan_admit(const struct wk_plan *p, uint64_t step_last, uint32_t epoch,
                       struct err_detail *detail)
{
    CHECK_OBJ(p, WK_PLAN_MAGIC);
    if (p->step != step_last + 1)
        return err_set(detail, ERR_INVALID, "plan %" PRIu64 " after %" PRIu64, p->step, step_last);
    if (p->epoch != epoch)
        return err_set(detail, ERR_EPOCH, "plan of epoch %" PRIu32 " in %" PRIu32, p->epoch, epoch);
    struct hash128 hash = hash_xxh3_once(p->encoding, p->encoding_bytes);
    if (memcmp(&hash, &p->hash, sizeof hash) != 0)
        return err_set(detail, ERR_CORRUPT, "plan %" PRIu64 ": hash of its bytes", p->step);
    return ERR_OK;
}

/* ---- ring of past plans ---- */

struct wk_plan_ring *wk_plan_ring_create(size_t bytes_max)
{
    CHECK(bytes_max > 0);
    struct wk_plan_ring *r = mem_take(sizeof *r);
    r->magic = WK_RING_MAGIC;
    r->bytes_max = bytes_max;
    r->bytes = mem_take(bytes_max);
    return r;
}

void wk_plan_ring_destroy(struct wk_plan_ring **ring_p)
{
    CHECK(ring_p != NULL);
    struct wk_plan_ring *r = *ring_p;
    if (r == NULL)
        return;
    CHECK_OBJ(r, WK_RING_MAGIC);
    mem_give(r->bytes);
    r->magic = 0;
    mem_give(r);
    *ring_p = NULL;
}

void wk_plan_ring_add(struct wk_plan_ring *r, const struct wk_plan *p, uint64_t now_us)
{
    CHECK_OBJ(r, WK_RING_MAGIC);
    CHECK_OBJ(p, WK_PLAN_MAGIC);
    CHECK(p->encoding_bytes > 0);
    uint32_t at = (uint32_t)(r->added++ % WK_PLAN_RING_COUNT);
    uint32_t bytes = (uint32_t)p->encoding_bytes;
    /* An encoding never wraps: it starts over at 0 where the tail is too short. */
    uint64_t start = r->bytes_added;
    size_t offset = (size_t)(start % r->bytes_max);
    if (offset + bytes > r->bytes_max) {
        start += r->bytes_max - offset;
        offset = 0;
    }
    bool kept = bytes <= r->bytes_max;
    if (kept) {
        memcpy(r->bytes + offset, p->encoding, bytes);
        r->bytes_added = start + bytes;
    }
    r->starts[at] = start;
    r->items[at] = (struct wk_plan_past){
        .step = p->step,
        .hash = p->hash,
        .kind = p->kind,
        .seq_count = p->seq_count,
        .row_count = p->row_count,
        .layer_end = p->layer_end,
        .begun_us = now_us,
        .bytes = bytes,
        .encoding = kept ? r->bytes + offset : NULL,
    };
}

void wk_plan_ring_done(struct wk_plan_ring *r, uint64_t step, uint64_t step_us)
{
    CHECK_OBJ(r, WK_RING_MAGIC);
    CHECK(r->added > 0);
    struct wk_plan_past *newest = &r->items[(r->added - 1) % WK_PLAN_RING_COUNT];
    if (newest->step == step)
        newest->step_us = step_us > 0 ? step_us : 1;
}

bool wk_plan_ring_at(const struct wk_plan_ring *r, uint32_t back, struct wk_plan_past *ret_past)
{
    CHECK_OBJ(r, WK_RING_MAGIC);
    if (back >= WK_PLAN_RING_COUNT || back >= r->added)
        return false;
    uint32_t at = (uint32_t)((r->added - 1 - back) % WK_PLAN_RING_COUNT);
    *ret_past = r->items[at];
    if (r->bytes_added - r->starts[at] > r->bytes_max)
        ret_past->encoding = NULL; /* later ones lie over it */
    return true;
}
