/* SPDX-License-Identifier: Apache-2.0 */
/* The block forward of a batch: embeddings, layers, head, candidates, walk. */
#include <math.h>
#include <string.h>

#include "lib/model/dflash_parts.h"

static void embed_rows(struct dflash *d, const struct dflash_block *blocks, uint32_t count)
{
    const struct dflash_config *c = &d->config;
    for (uint32_t s = 0; s < count; s++) {
        CHECK(blocks[s].anchor < c->vocab_size);
        for (uint32_t j = 0; j < c->block_size; j++) {
            float *x = d->b.x + ((uint64_t)s * c->block_size + j) * c->hidden;
            uint32_t id = j == 0 ? blocks[s].anchor : c->mask_id;
            if (j > 0 && d->weights.mask != NULL) {
                memcpy(x, d->weights.mask, c->hidden * sizeof *x);
            } else {
                struct op_embed_args a = {.ids = &id,
                                          .w = d->weights.embed.weight,
                                          .h = x,
                                          .rows = 1,
                                          .streams = 1,
                                          .hidden = c->hidden};
                CHECK(d->ops.embed(&a, &d->ctx) == ERR_OK);
            }
            for (uint32_t i = 0; c->embed_scale != 1 && i < c->hidden; i++)
                x[i] = (float)(x[i] * c->embed_scale);
        }
    }
}

/* h -> the sublayer's input in b.y (v2: through the convolution), its kernels in b.delta. */
static const float *prepare(struct dflash *d, const struct dflash_conv *conv, uint32_t rows)
{
    struct dflash_buffers *b = &d->b;
    if (!d->config.v2)
        return b->h;
    dflash_linear_run(d, &conv->kernel, b->h, d->config.hidden, b->delta, rows);
    dflash_conv_run(&d->config, conv->base, b->delta, 0, b->h, b->y, rows, d->config.block_size);
    return b->y;
}

/* x += finish(y); y may be b.h only. */
static void finish(struct dflash *d, const struct dflash_conv *conv, uint32_t rows)
{
    struct dflash_buffers *b = &d->b;
    const float *y = b->h;
    if (d->config.v2) {
        dflash_conv_run(&d->config, conv->base, b->delta, 1, b->h, b->y, rows,
                        d->config.block_size);
        y = b->y;
    }
    uint64_t n = (uint64_t)rows * d->config.hidden;
    for (uint64_t i = 0; i < n; i++)
        b->x[i] += y[i];
}

static void attention(struct dflash *d, const struct dflash_block *blocks, uint32_t count,
                      uint32_t layer, const float *x)
{
    const struct dflash_config *c = &d->config;
    const struct dflash_layer *l = &d->weights.layers[layer];
    struct dflash_buffers *b = &d->b;
    uint32_t block = c->block_size, rows = count * block;
    uint64_t q_width = (uint64_t)c->heads * c->head_dim,
             kv_width = (uint64_t)c->kv_heads * c->head_dim;
    dflash_linear_run(d, &l->q, x, c->hidden, b->q, rows);
    dflash_linear_run(d, &l->k, x, c->hidden, b->k, rows);
    dflash_linear_run(d, &l->v, x, c->hidden, b->v, rows);
    dflash_norm(d, l->q_norm, b->q, b->q, rows, c->heads, c->head_dim);
    dflash_norm(d, l->k_norm, b->k, b->k, rows, c->kv_heads, c->head_dim);
    for (uint32_t s = 0; s < count; s++) {
        uint32_t start = blocks[s].context->length;
        float *q = b->q + s * block * q_width, *k = b->k + s * block * kv_width;
        dflash_rope(d->rope, q, block, c->heads, c->head_dim, start);
        dflash_rope(d->rope, k, block, c->kv_heads, c->head_dim, start);
        struct dflash_attend a = {.drafter = d,
                                  .context = blocks[s].context,
                                  .layer = layer,
                                  .q = q,
                                  .k = k,
                                  .v = b->v + s * block * kv_width,
                                  .o = b->o + s * block * q_width};
        dflash_attend_run(&a);
    }
    dflash_linear_run(d, &l->o, b->o, q_width, b->h, rows);
}

static void mlp(struct dflash *d, const struct dflash_layer *l, const float *x, uint32_t rows)
{
    const struct dflash_config *c = &d->config;
    struct dflash_buffers *b = &d->b;
    dflash_linear_run(d, &l->gate, x, c->hidden, b->gate, rows);
    dflash_linear_run(d, &l->up, x, c->hidden, b->up, rows);
    uint64_t n = (uint64_t)rows * c->ffn;
    for (uint64_t i = 0; i < n; i++) {
        double g = b->gate[i];
        b->gate[i] = (float)(g / (1 + exp(-g)) * b->up[i]);
    }
    dflash_linear_run(d, &l->down, b->gate, c->ffn, b->h, rows);
}

static void layer_run(struct dflash *d, const struct dflash_block *blocks, uint32_t count,
                      uint32_t layer)
{
    const struct dflash_layer *l = &d->weights.layers[layer];
    uint32_t rows = count * d->config.block_size, hidden = d->config.hidden;
    dflash_norm(d, l->input_norm, d->b.x, d->b.h, rows, 1, hidden);
    attention(d, blocks, count, layer, prepare(d, &l->attention_conv, rows));
    finish(d, &l->attention_conv, rows);
    dflash_norm(d, l->post_norm, d->b.x, d->b.h, rows, 1, hidden);
    mlp(d, l, prepare(d, &l->mlp_conv, rows), rows);
    finish(d, &l->mlp_conv, rows);
    dflash_tell(d, "block_out", layer, d->b.x, rows, hidden);
}

static void choose(struct dflash *d, struct dflash_block *block, uint32_t s)
{
    const struct dflash_config *c = &d->config;
    struct dflash_buffers *b = &d->b;
    uint32_t drafts = c->block_size - 1, k = c->v2 ? c->selector_top_k : 1;
    const float *x = b->h + ((uint64_t)s * c->block_size + 1) * c->hidden;
    dflash_head_run(d, x, drafts, k, b->top_ids, b->top_logits);
    if (!c->v2) {
        memcpy(block->ids, b->top_ids, drafts * sizeof *block->ids);
        return;
    }
    dflash_linear_run(d, &d->weights.selector, x, c->hidden, b->project, drafts);
    dflash_walk(d, block->anchor, b->project, b->top_ids, b->top_logits, b->scores, block->ids);
    dflash_tell(d, "top_ids", s, (const float *)(const void *)b->top_ids, drafts, k);
    dflash_tell(d, "top_logits", s, b->top_logits, drafts, k);
    dflash_tell(d, "scores", s, b->scores, drafts, k);
}

void dflash_draft(struct dflash *d, struct dflash_block *blocks, uint32_t count)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    CHECK(count >= 1 && count <= d->options.seqs_max);
    uint32_t rows = count * d->config.block_size;
    embed_rows(d, blocks, count);
    dflash_tell(d, "block_in", 0, d->b.x, rows, d->config.hidden);
    for (uint32_t l = 0; l < d->config.layers; l++)
        layer_run(d, blocks, count, l);
    dflash_norm(d, d->weights.norm, d->b.x, d->b.h, rows, 1, d->config.hidden);
    dflash_tell(d, "hidden", 0, d->b.h, rows, d->config.hidden);
    for (uint32_t s = 0; s < count; s++)
        choose(d, &blocks[s], s);
}
