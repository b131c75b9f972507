/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/model_parts.h"

#include <math.h>

#include "lib/model/weights.h"

#define INDEX_NORM_EPS 1e-6 /* part of the architecture, not in the config */

static void dsa_index(struct model_cursor *c, const struct weights_dsa *w, uint32_t layer)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    struct cursor_buffers *b = &c->b;
    uint32_t dim = config->index_dim, heads = config->index_heads, kpool = config->index_kpool;
    uint8_t *base = c->kv.blocks + m->dsa_number[layer] * c->kv.layer_stride + c->kv.index_offset;
    struct op_pages pages = {.base = base,
                             .block_stride = c->kv.block_stride,
                             .rows_per_block = cursor_block_rows(c) / kpool,
                             .type = c->kv.index_type,
                             .shard = cursor_shard(c, kpool)};

    cursor_linear(c, &w->index_q, b->c_q, config->q_rank, b->index_q, heads * dim);
    cursor_linear(c, &w->index_k, b->x, config->hidden, b->index_key, dim);
    cursor_linear(c, &w->index_gate, b->x, config->hidden, b->index_gate, dim);
    cursor_linear(c, &w->index_w, b->x, config->hidden, b->index_w, heads);
    RUN(c, layer_norm, .x = b->index_key, .w = w->index_norm, .b = w->index_norm_bias,
        .y = b->index_key, .rows = c->row_count, .n = dim, .x_stride = dim, .y_stride = dim,
        .eps = INDEX_NORM_EPS);
    RUN(c, index_pool, .seqs = c->seqs, .seq_of = c->seq_of, .key = b->index_key,
        .gate = b->index_gate, .ape = w->index_ape, .pages = pages,
        .ring_offset = m->state[layer].ring, .seq_count = c->seq_count, .rows = c->row_count,
        .dim = dim, .kpool = kpool, .ring_rows = m->index_ring_rows);
    if (pages.type == KV_ROW_FP8)
        RUN(c, index_rotate, .q = b->index_q, .rows = c->row_count, .heads = heads, .dim = dim);
    for (uint32_t row = 0; row < c->row_count; row += b->score_rows) {
        uint32_t left = c->row_count - row, count = left < b->score_rows ? left : b->score_rows;
        RUN(c, index_score, .seqs = c->seqs, .seq_of = c->seq_of, .q = b->index_q, .w = b->index_w,
            .pages = pages, .score = b->score, .score_stride = b->score_stride, .row_first = row,
            .row_count = count, .heads = heads, .dim = dim, .kpool = kpool,
            .pools_kept = m->pools_kept);
        if (dcp_on(m)) {
            dcp_select(c, row, count);
            continue;
        }
        RUN(c, index_select, .seqs = c->seqs, .seq_of = c->seq_of, .score = b->score,
            .score_stride = b->score_stride, .selected = b->selected,
            .selected_count = b->selected_count, .row_first = row, .row_count = count,
            .kpool = kpool, .pools_kept = m->pools_kept, .selected_stride = m->selected_max);
    }
}

static void dsa_attend(struct model_cursor *c, const struct op_pages *pages)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    struct cursor_buffers *b = &c->b;
    uint64_t width = (uint64_t)config->heads * config->kv_rank;
    for (uint32_t row = 0; row < c->row_count; row += b->attend_rows) {
        uint32_t left = c->row_count - row, count = left < b->attend_rows ? left : b->attend_rows;
        RUN(c, mla_attend, .seqs = c->seqs, .seq_of = c->seq_of + row,
            .q_abs = b->q_abs + row * width, .pages = *pages,
            .selected = b->selected + (uint64_t)row * m->selected_max,
            .selected_count = b->selected_count + row, .o_abs = b->o_abs + row * width,
            .work = b->attend, .rows = count, .heads = config->heads, .latent = config->kv_rank,
            .selected_stride = m->selected_max, .scale = 1 / sqrt((double)config->nope_dim));
    }
}

void layer_dsa(struct model_cursor *c, uint32_t layer)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    const struct weights_dsa *w = &m->weights->layers[layer].dsa;
    struct cursor_buffers *b = &c->b;
    uint32_t heads = config->heads, rank = config->kv_rank;
    struct op_pages pages = {.base = c->kv.blocks + m->dsa_number[layer] * c->kv.layer_stride,
                             .block_stride = c->kv.block_stride,
                             .rows_per_block = cursor_block_rows(c),
                             .type = c->kv.kv_type,
                             .shard = cursor_shard(c, 1)};

    cursor_tap(c, layer, MODEL_INPUT_MIXER, b->x, config->hidden);
    cursor_linear(c, &w->q_a, b->x, config->hidden, b->c_q, config->q_rank);
    RUN(c, rms_norm, .x = b->c_q, .w = w->q_a_norm, .y = b->c_q, .rows = c->row_count, .groups = 1,
        .n = config->q_rank, .x_stride = config->q_rank, .y_stride = config->q_rank,
        .eps = config->rms_eps);
    cursor_tap(c, layer, MODEL_INPUT_Q_B, b->c_q, config->q_rank);
    cursor_linear(c, &w->q_b, b->c_q, config->q_rank, b->q, heads * config->nope_dim);
    cursor_linear(c, &w->kv_a, b->x, config->hidden, b->latent, rank);
    RUN(c, rms_norm, .x = b->latent, .w = w->kv_a_norm, .y = b->latent, .rows = c->row_count,
        .groups = 1, .n = rank, .x_stride = rank, .y_stride = rank, .eps = config->rms_eps);
    RUN(c, latent_write, .seqs = c->seqs, .latent = b->latent, .pages = pages,
        .seq_count = c->seq_count, .latent_dim = rank);
    dsa_index(c, w, layer);
    RUN(c, mla_absorb, .q = b->q, .kv_b = w->kv_b, .q_abs = b->q_abs, .rows = c->row_count,
        .heads = heads, .nope = config->nope_dim, .v_dim = config->v_dim, .latent = rank);
    if (dcp_on(m))
        dcp_attend(c, &pages);
    else
        dsa_attend(c, &pages);
    RUN(c, mla_value, .o_abs = b->o_abs, .kv_b = w->kv_b, .o = b->o, .rows = c->row_count,
        .heads = heads, .nope = config->nope_dim, .v_dim = config->v_dim, .latent = rank);
    cursor_tap(c, layer, MODEL_INPUT_O, b->o, heads * config->v_dim);
    cursor_linear(c, &w->o, b->o, heads * config->v_dim, b->y, config->hidden);
    cursor_reduce(c);
}
