/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/model_parts.h"

#include <string.h>

#include "lib/model/weights.h"

static void mlp_plain(struct model_cursor *c, const struct weights_mlp *w, uint32_t layer,
                      uint32_t width)
{
    const struct model_config *config = &c->model->config;
    struct cursor_buffers *b = &c->b;
    if (width == 0) { /* other ranks have all of it */
        memset(b->y, 0, (size_t)c->row_count * config->hidden * sizeof(*b->y));
        return;
    }
    cursor_tap(c, layer, MODEL_INPUT_MLP, b->x, config->hidden);
    cursor_linear(c, &w->gate, b->x, config->hidden, b->mlp_gate, width);
    cursor_linear(c, &w->up, b->x, config->hidden, b->mlp_up, width);
    RUN(c, swiglu, .gate = b->mlp_gate, .up = b->mlp_up, .y = b->mlp_gate, .rows = c->row_count,
        .n = width, .limit = config->swiglu_limit);
    cursor_tap(c, layer, MODEL_INPUT_DOWN, b->mlp_gate, width);
    cursor_linear(c, &w->down, b->mlp_gate, width, b->y, config->hidden);
}

/* Pairs lie expert by expert; rows_of NULL: x holds a row per pair. */
static void tap_experts(struct model_cursor *c, uint32_t layer, enum model_input which,
                        const float *x, const uint32_t *rows_of, uint32_t in)
{
    const uint32_t *offsets = c->b.offsets;
    const struct shard_range *own = &c->model->shard.experts;
    for (uint32_t e = 0; c->tap.input != NULL && e < own->count; e++) {
        uint32_t first = offsets[e], rows = offsets[e + 1] - first;
        if (rows > 0)
            c->tap.input(c->tap.arg, layer, which, own->first + e,
                         rows_of != NULL ? x : x + (uint64_t)first * in,
                         rows_of != NULL ? rows_of + first : NULL, rows, in);
    }
}

static void mlp_experts(struct model_cursor *c, const struct weights_layer *w, uint32_t layer)
{
    const struct model_config *config = &c->model->config;
    const struct shard_range *own = &c->model->shard.experts;
    struct cursor_buffers *b = &c->b;
    uint32_t top_k = config->experts_per_token, width = config->expert_width;
    uint32_t hidden = config->hidden, pairs = c->row_count * top_k;

    cursor_linear(c, &w->router, b->x, hidden, b->router, config->experts);
    RUN(c, router, .logits = b->router, .bias = w->router_bias, .chosen = b->chosen,
        .weights = b->chosen_weights, .rows = c->row_count, .experts = config->experts,
        .top_k = top_k, .scale = config->routed_scale);
    RUN(c, moe_dispatch, .chosen = b->chosen, .offsets = b->offsets, .pair_rows = b->pair_rows,
        .pair_of = b->pair_of, .rows = c->row_count, .experts = own->count, .top_k = top_k,
        .expert_first = own->first, .outside = c->options.rows_max * top_k);
    tap_experts(c, layer, MODEL_INPUT_EXPERT, b->x, b->pair_rows, hidden);
    RUN(c, grouped_linear, .x = b->x, .w = w->gate, .y = b->mlp_gate, .offsets = b->offsets,
        .x_rows = b->pair_rows, .experts = own->count, .pairs_max = pairs, .in = hidden,
        .out = width, .x_stride = hidden, .y_stride = width);
    RUN(c, grouped_linear, .x = b->x, .w = w->up, .y = b->mlp_up, .offsets = b->offsets,
        .x_rows = b->pair_rows, .experts = own->count, .pairs_max = pairs, .in = hidden,
        .out = width, .x_stride = hidden, .y_stride = width);
    RUN(c, swiglu, .gate = b->mlp_gate, .up = b->mlp_up, .y = b->mlp_gate, .rows = pairs,
        .n = width, .limit = config->swiglu_limit);
    tap_experts(c, layer, MODEL_INPUT_EXPERT_DOWN, b->mlp_gate, NULL, width);
    RUN(c, grouped_linear, .x = b->mlp_gate, .w = w->down, .y = b->expert_out,
        .offsets = b->offsets, .experts = own->count, .pairs_max = pairs, .in = width,
        .out = hidden, .x_stride = width, .y_stride = hidden);
}

void layer_mlp(struct model_cursor *c, uint32_t layer)
{
    const struct model_config *config = &c->model->config;
    const struct weights_layer *w = &c->model->weights->layers[layer];
    struct cursor_buffers *b = &c->b;
    if (!config->layer_moe[layer]) {
        mlp_plain(c, &w->dense, layer, config->dense_width);
        cursor_reduce(c);
        return;
    }
    mlp_experts(c, w, layer);
    mlp_plain(c, &w->shared, layer, c->model->shard.shared.count);
    RUN(c, moe_combine, .out = b->expert_out, .pair_of = b->pair_of, .weights = b->chosen_weights,
        .shared = b->y, .y = b->y, .rows = c->row_count, .top_k = config->experts_per_token,
        .hidden = config->hidden);
    cursor_reduce(c);
}
