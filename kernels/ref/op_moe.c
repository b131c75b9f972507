/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_moe.h"

#include <math.h>

#include "lib/base/check.h"

static void swiglu_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_swiglu_args *a = arg;
    for (uint64_t i = (uint64_t)begin * a->n; i < (uint64_t)end * a->n; i++) {
        double gate = a->gate[i], up = a->up[i];
        gate = gate > a->limit ? a->limit : gate; /* comparisons let a NaN through */
        up = up > a->limit ? a->limit : up;
        up = up < -a->limit ? -a->limit : up;
        a->y[i] = (float)(gate / (1 + exp(-gate)) * up);
    }
}

enum err op_swiglu_ref(const struct op_swiglu_args *a, const struct op_ctx *ctx)
{
    CHECK(a->limit > 0);
    op_for(ctx, a->rows, (uint64_t)16 * a->n, swiglu_rows, a);
    return ERR_OK;
}

static void router_row(const struct op_router_args *a, uint32_t r)
{
    const float *logits = a->logits + (uint64_t)r * a->experts;
    double score[OP_EXPERTS_MAX];
    uint8_t taken[OP_EXPERTS_MAX] = {0};
    for (uint32_t e = 0; e < a->experts; e++)
        score[e] = 1 / (1 + exp(-(double)logits[e]));
    for (uint32_t k = 0; k < a->top_k; k++) {
        uint32_t best = a->experts;
        for (uint32_t e = 0; e < a->experts; e++) {
            if (taken[e])
                continue;
            if (best == a->experts || score[e] + a->bias[e] > score[best] + a->bias[best])
                best = e;
        }
        taken[best] = 1;
    }
    double sum = 0;
    for (uint32_t e = 0; e < a->experts; e++)
        sum += taken[e] ? score[e] : 0;
    uint64_t at = (uint64_t)r * a->top_k;
    for (uint32_t e = 0; e < a->experts; e++) {
        if (!taken[e])
            continue;
        a->chosen[at] = (int32_t)e;
        a->weights[at++] = (float)(score[e] / (sum + 1e-20) * a->scale);
    }
}

static void router_rows(const void *arg, uint32_t begin, uint32_t end)
{
    for (uint32_t r = begin; r < end; r++)
        router_row(arg, r);
}

enum err op_router_ref(const struct op_router_args *a, const struct op_ctx *ctx)
{
    CHECK(a->experts <= OP_EXPERTS_MAX);
    CHECK(a->top_k > 0 && a->top_k <= a->experts);
    op_for(ctx, a->rows, (uint64_t)a->experts * (a->top_k + 16), router_rows, a);
    return ERR_OK;
}

enum err op_moe_dispatch_ref(const struct op_moe_dispatch_args *a, const struct op_ctx *ctx)
{
    (void)ctx;
    uint32_t next[OP_EXPERTS_MAX] = {0};
    CHECK(a->experts <= OP_EXPERTS_MAX);
    uint32_t pairs = a->rows * a->top_k;
    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t expert = (uint32_t)a->chosen[i] - a->expert_first;
        if (expert < a->experts)
            next[expert]++;
    }
    uint32_t sum = 0;
    for (uint32_t e = 0; e < a->experts; e++) {
        uint32_t count = next[e];
        a->offsets[e] = next[e] = sum;
        sum += count;
    }
    a->offsets[a->experts] = sum;
    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t expert = (uint32_t)a->chosen[i] - a->expert_first;
        a->pair_of[i] = a->outside;
        if (expert >= a->experts)
            continue;
        uint32_t pair = next[expert]++;
        a->pair_rows[pair] = i / a->top_k;
        a->pair_of[i] = pair;
    }
    return ERR_OK;
}

static void combine_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_moe_combine_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        const uint32_t *pair_of = a->pair_of + (uint64_t)r * a->top_k;
        const float *weights = a->weights + (uint64_t)r * a->top_k;
        for (uint32_t c = 0; c < a->hidden; c++) {
            double sum = 0;
            for (uint32_t k = 0; k < a->top_k; k++)
                sum += (double)weights[k] * a->out[(uint64_t)pair_of[k] * a->hidden + c];
            uint64_t at = (uint64_t)r * a->hidden + c;
            a->y[at] = (float)(sum + a->shared[at]);
        }
    }
}

enum err op_moe_combine_ref(const struct op_moe_combine_args *a, const struct op_ctx *ctx)
{
    CHECK(a->top_k > 0 && a->top_k <= OP_TOP_K_MAX);
    op_for(ctx, a->rows, (uint64_t)a->hidden * a->top_k * 2, combine_rows, a);
    return ERR_OK;
}
