/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/calib.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/config.h"
#include "lib/model/quant.h"
#include "lib/model/tool/texts.h"

#define CALIB_MAGIC  0x63616c69u
#define BLOCK_TOKENS 64u /* rounded up to whole pools */
#define HESSIAN_ROWS 1024u

struct kept {
    float *x;
    uint32_t rows, in;
};

struct calib {
    uint32_t magic;
    struct model *model;
    struct model_cursor *cursor;
    struct model_kv kv;
    struct model_seq *seqs;
    uint32_t *ids, *blocks;
    struct kept plain[MODEL_INPUT_COUNT];
    struct kept *experts, *experts_down; /* [experts] */
    uint32_t expert_count;
    bool keep;
};

static struct kept *place_of(const struct calib *c, enum model_input which, uint32_t expert)
{
    CHECK(which < MODEL_INPUT_COUNT);
    if (which != MODEL_INPUT_EXPERT && which != MODEL_INPUT_EXPERT_DOWN)
        return (struct kept *)&c->plain[which];
    CHECK(expert < c->expert_count);
    return which == MODEL_INPUT_EXPERT ? &c->experts[expert] : &c->experts_down[expert];
}

static void keep_input(void *arg, uint32_t layer, enum model_input which, uint32_t expert,
                       const float *x, const uint32_t *rows_of, uint32_t rows, uint32_t in)
{
    struct calib *c = arg;
    (void)layer;
    if (!c->keep)
        return;
    struct kept *k = place_of(c, which, expert);
    CHECK(k->x == NULL);
    k->x = mem_take_array((size_t)rows * in, sizeof(float));
    k->rows = rows;
    k->in = in;
    for (uint32_t r = 0; r < rows; r++)
        memcpy(k->x + (size_t)r * in, x + (size_t)(rows_of != NULL ? rows_of[r] : r) * in,
               in * sizeof(float));
}

static void forget(struct kept *k)
{
    mem_give(k->x);
    memset(k, 0, sizeof(*k));
}

static void forget_all(struct calib *c)
{
    for (uint32_t i = 0; i < MODEL_INPUT_COUNT; i++)
        forget(&c->plain[i]);
    for (uint32_t e = 0; e < c->expert_count; e++) {
        forget(&c->experts[e]);
        forget(&c->experts_down[e]);
    }
}

static void take_cache(struct calib *c, const struct texts *texts)
{
    const struct model_info *info = model_info(c->model);
    uint32_t kpool = info->index_kpool, tokens = (BLOCK_TOKENS + kpool - 1) / kpool * kpool;
    uint64_t latents = (uint64_t)tokens * info->latent_dim * sizeof(float);
    uint64_t pools = (uint64_t)tokens / kpool * info->index_dim * sizeof(float);
    uint32_t block_count = 0;
    for (uint32_t i = 0; i < texts->count; i++)
        block_count += (texts->cases[i].count + tokens - 1) / tokens;
    c->kv = (struct model_kv){.block_tokens = tokens,
                              .index_offset = latents,
                              .layer_stride = latents + pools,
                              .block_count = block_count,
                              .slot_stride = info->state_bytes,
                              .slot_count = texts->count};
    c->kv.block_stride = c->kv.layer_stride * (info->dsa_layers > 0 ? info->dsa_layers : 1);
    c->kv.blocks = mem_take_array(block_count, c->kv.block_stride);
    c->kv.slots = mem_take_array(texts->count, info->state_bytes);
    c->blocks = mem_take_array(block_count, sizeof(uint32_t));
    for (uint32_t i = 0; i < block_count; i++)
        c->blocks[i] = i;
}

/* Every text is a sequence of its own, no logits. */
static void begin(struct calib *c, const struct texts *texts)
{
    uint32_t row = 0, block = 0;
    c->seqs = mem_take_array(texts->count, sizeof(*c->seqs));
    c->ids = mem_take_array(texts->tokens, sizeof(*c->ids));
    for (uint32_t i = 0; i < texts->count; i++) {
        const struct text_case *t = &texts->cases[i];
        uint32_t blocks = (t->count + c->kv.block_tokens - 1) / c->kv.block_tokens;
        memcpy(c->ids + row, t->ids, t->count * sizeof(uint32_t));
        c->seqs[i] = (struct model_seq){.state_slot = i,
                                        .row_count = t->count,
                                        .fresh = true,
                                        .logits_from = t->count,
                                        .blocks = c->blocks + block,
                                        .block_count = blocks};
        row += t->count;
        block += blocks;
    }
    struct model_batch batch = {texts->count, row, c->seqs, c->ids};
    model_begin(c->cursor, &c->kv, &batch);
}

enum err calib_create(struct model *m, const struct texts *texts, struct calib **ret_calib,
                      struct err_detail *detail)
{
    uint32_t longest = 0;
    CHECK(texts->count > 0 && texts->tokens <= UINT32_MAX);
    for (uint32_t i = 0; i < texts->count; i++)
        longest = texts->cases[i].count > longest ? texts->cases[i].count : longest;
    struct calib *c = mem_take(sizeof(*c));
    struct model_cursor_options options = {(uint32_t)texts->tokens, texts->count, 0, longest + 1};
    c->magic = CALIB_MAGIC;
    c->model = m;
    c->expert_count = model_config(m)->experts;
    c->experts = mem_take_array(c->expert_count + 1u, sizeof(*c->experts));
    c->experts_down = mem_take_array(c->expert_count + 1u, sizeof(*c->experts_down));
    enum err e = model_cursor_create(m, &options, &c->cursor, detail);
    if (e != ERR_OK) {
        calib_destroy(&c);
        return e;
    }
    struct model_tap tap = {keep_input, c};
    model_cursor_tap(c->cursor, &tap);
    take_cache(c, texts);
    begin(c, texts);
    *ret_calib = c;
    return ERR_OK;
}

void calib_destroy(struct calib **c_p)
{
    struct calib *c = *c_p;
    if (c == NULL)
        return;
    CHECK_OBJ(c, CALIB_MAGIC);
    forget_all(c);
    if (c->cursor != NULL)
        model_abandon(c->cursor);
    model_cursor_destroy(&c->cursor);
    mem_give(c->experts);
    mem_give(c->experts_down);
    mem_give(c->kv.blocks);
    mem_give(c->kv.slots);
    mem_give(c->blocks);
    mem_give(c->seqs);
    mem_give(c->ids);
    c->magic = 0;
    mem_give(c);
    *c_p = NULL;
}

void calib_layer(struct calib *c, bool keep)
{
    CHECK_OBJ(c, CALIB_MAGIC);
    forget_all(c);
    c->keep = keep;
    model_advance(c->cursor, model_cursor_layer(c->cursor) + 1);
}

struct quant_hessian *calib_hessian(const struct calib *c, enum model_input which, uint32_t expert,
                                    uint64_t seed, const struct op_ctx *ctx, uint64_t *ret_rows)
{
    CHECK_OBJ(c, CALIB_MAGIC);
    const struct kept *k = place_of(c, which, expert);
    *ret_rows = k->rows;
    if (k->rows == 0)
        return NULL;
    struct quant_hessian *h = quant_hessian_create(k->in);
    for (uint32_t r = 0; r < k->rows; r += HESSIAN_ROWS) {
        uint32_t left = k->rows - r, rows = left < HESSIAN_ROWS ? left : HESSIAN_ROWS;
        quant_hessian_add(h, k->x + (size_t)r * k->in, rows, k->in, ctx);
    }
    quant_hessian_finish(h, seed, ctx);
    return h;
}
