/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/model_parts.h"

#include <math.h>

#include "lib/model/weights.h"

#define KDA_L2_EPS 1e-6 /* part of the architecture, not in the config */

/* q, k and v rows stand side by side: [rows, 3 * inner]. */
static void kda_qkv(struct model_cursor *c, const struct weights_kda *w, uint32_t layer)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    struct cursor_buffers *b = &c->b;
    uint32_t dim = config->kda_dim, inner = config->kda_heads * dim;
    const struct op_weight *projections[3] = {&w->q, &w->k, &w->v};
    for (uint32_t i = 0; i < 3; i++)
        RUN(c, linear, .x = b->x, .w = *projections[i], .y = b->qkv_raw + i * inner,
            .rows = c->row_count, .in = config->hidden, .out = inner, .x_stride = config->hidden,
            .y_stride = (uint64_t)3 * inner);
    RUN(c, short_conv, .seqs = c->seqs, .x = b->qkv_raw, .w = w->conv, .y = b->qkv,
        .ring_offset = m->state[layer].ring, .seq_count = c->seq_count, .row_count = c->row_count,
        .channels = 3 * inner, .taps = config->conv_taps, .ring_rows = m->conv_ring_rows);
    for (uint32_t i = 0; i < 2; i++)
        RUN(c, l2norm, .x = b->qkv + i * inner, .y = b->qkv + i * inner, .rows = c->row_count,
            .groups = config->kda_heads, .n = dim, .x_stride = (uint64_t)3 * inner,
            .y_stride = (uint64_t)3 * inner, .eps = KDA_L2_EPS,
            .scale = i == 0 ? 1 / sqrt((double)dim) : 1);
}

void layer_kda(struct model_cursor *c, uint32_t layer)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    const struct weights_kda *w = &m->weights->layers[layer].kda;
    struct cursor_buffers *b = &c->b;
    uint32_t heads = config->kda_heads, dim = config->kda_dim, inner = heads * dim;

    cursor_tap(c, layer, MODEL_INPUT_MIXER, b->x, config->hidden);
    kda_qkv(c, w, layer);
    cursor_linear(c, &w->f_a, b->x, config->hidden, b->rank, dim);
    cursor_linear(c, &w->f_b, b->rank, dim, b->decay, inner);
    cursor_linear(c, &w->b, b->x, config->hidden, b->beta, heads);
    RUN(c, kda_gates, .u = b->decay, .b = b->beta, .a_log = w->a_log, .dt_bias = w->dt_bias,
        .log_decay = b->decay, .beta = b->beta, .rows = c->row_count, .heads = heads, .dim = dim,
        .lower_bound = config->gate_lower_bound);
    RUN(c, kda, .seqs = c->seqs, .q = b->qkv, .k = b->qkv + inner, .v = b->qkv + 2 * inner,
        .qkv_stride = (uint64_t)3 * inner, .log_decay = b->decay, .beta = b->beta, .o = b->o,
        .state_offset = m->state[layer].state, .journal_offset = m->state[layer].journal,
        .seq_count = c->seq_count, .row_count = c->row_count, .heads = heads, .dim = dim,
        .journal_rows = MODEL_DRAFT_ROWS_MAX);
    cursor_linear(c, &w->g_a, b->x, config->hidden, b->rank, dim);
    cursor_linear(c, &w->g_b, b->rank, dim, b->gate, inner);
    RUN(c, kda_out, .o = b->o, .gate = b->gate, .w = w->o_norm, .y = b->o, .rows = c->row_count,
        .heads = heads, .dim = dim, .eps = config->rms_eps);
    cursor_tap(c, layer, MODEL_INPUT_O, b->o, inner);
    cursor_linear(c, &w->o, b->o, inner, b->y, config->hidden);
    cursor_reduce(c);
}
