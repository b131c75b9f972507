/* SPDX-License-Identifier: Apache-2.0 */
/* Norms and elementwise ops in f32, compiled once per instruction set.  Every row by itself. */
#include "kernels/op_norm.h"

#include <math.h>

#include "kernels/cpu/op_fast.h"
#include "kernels/cpu/op_vec.h"
#include "lib/base/check.h"

/* Sum of (x - mean)^2: two vectors take turns. */
static float square_sum(const float *x, uint32_t n, float mean)
{
    vf sum[2] = {vf_zero(), vf_zero()};
    uint32_t turn = 0;
    VF_EACH(n, i, count)
    {
        vf v = vf_get(x + i, count) - mean;
        if (count < VF_LANES) { /* lanes beyond the end must not count */
            float lane[VF_LANES] = {0};
            vf_store_n(lane, v, count);
            v = vf_load(lane);
        }
        sum[turn] = vf_fma(v, v, sum[turn]);
        turn ^= 1;
    }
    return vf_sum(sum[0] + sum[1]);
}

static void rms_norm_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_rms_norm_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        uint64_t group = (uint64_t)(i % a->groups) * a->n;
        const float *x = a->x + i / a->groups * a->x_stride + group;
        float *y = a->y + i / a->groups * a->y_stride + group;
        float factor = 1 / sqrtf(square_sum(x, a->n, 0) / (float)a->n + (float)a->eps);
        VF_EACH(a->n, c, count)
        vf_put(y + c, vf_get(a->w + c, count) * (vf_get(x + c, count) * factor), count);
    }
}

enum err OP_FAST(rms_norm)(const struct op_rms_norm_args *a, const struct op_ctx *ctx)
{
    CHECK(a->n > 0);
    CHECK(a->groups > 0);
    op_for(ctx, a->rows * a->groups, a->n / 2, rms_norm_rows, a);
    return ERR_OK;
}

static void l2norm_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_l2norm_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        uint64_t group = (uint64_t)(i % a->groups) * a->n;
        const float *x = a->x + i / a->groups * a->x_stride + group;
        float *y = a->y + i / a->groups * a->y_stride + group;
        float factor = (float)a->scale / sqrtf(square_sum(x, a->n, 0) + (float)a->eps);
        VF_EACH(a->n, c, count)
        vf_put(y + c, vf_get(x + c, count) * factor, count);
    }
}

enum err OP_FAST(l2norm)(const struct op_l2norm_args *a, const struct op_ctx *ctx)
{
    CHECK(a->n > 0);
    CHECK(a->groups > 0);
    op_for(ctx, a->rows * a->groups, a->n / 2, l2norm_rows, a);
    return ERR_OK;
}

static void layer_norm_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_layer_norm_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        const float *x = a->x + r * a->x_stride;
        float *y = a->y + r * a->y_stride;
        vf sum = vf_zero();
        VF_EACH(a->n, c, count)
        sum += vf_get(x + c, count);
        float mean = vf_sum(sum) / (float)a->n;
        float factor = 1 / sqrtf(square_sum(x, a->n, mean) / (float)a->n + (float)a->eps);
        VF_EACH(a->n, c, count)
        {
            vf v = (vf_get(x + c, count) - mean) * factor;
            vf_put(y + c, vf_fma(vf_get(a->w + c, count), v, vf_get(a->b + c, count)), count);
        }
    }
}

enum err OP_FAST(layer_norm)(const struct op_layer_norm_args *a, const struct op_ctx *ctx)
{
    CHECK(a->n > 0);
    op_for(ctx, a->rows, a->n, layer_norm_rows, a);
    return ERR_OK;
}

static void swiglu_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_swiglu_args *a = arg;
    vf limit = vf_all((float)a->limit);
    uint64_t first = (uint64_t)begin * a->n;
    for (uint32_t r = begin; r < end; r++, first += a->n)
        VF_EACH(a->n, c, count)
        {
            vf gate = vf_min(vf_get(a->gate + first + c, count), limit);
            vf up = vf_max(vf_min(vf_get(a->up + first + c, count), limit), -limit);
            vf_put(a->y + first + c, gate / (1.0f + vf_exp(-gate)) * up, count);
        }
}

enum err OP_FAST(swiglu)(const struct op_swiglu_args *a, const struct op_ctx *ctx)
{
    CHECK(a->limit > 0);
    op_for(ctx, a->rows, (uint64_t)4 * a->n, swiglu_rows, a);
    return ERR_OK;
}

static void combine_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_moe_combine_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        const uint32_t *pair_of = a->pair_of + (uint64_t)r * a->top_k;
        const float *weights = a->weights + (uint64_t)r * a->top_k;
        uint64_t at = (uint64_t)r * a->hidden;
        VF_EACH(a->hidden, c, count)
        {
            vf sum = vf_zero();
            for (uint32_t k = 0; k < a->top_k; k++)
                sum = vf_fma(vf_all(weights[k]),
                             vf_get(a->out + (uint64_t)pair_of[k] * a->hidden + c, count), sum);
            vf_put(a->y + at + c, sum + vf_get(a->shared + at + c, count), count);
        }
    }
}

enum err OP_FAST(moe_combine)(const struct op_moe_combine_args *a, const struct op_ctx *ctx)
{
    CHECK(a->top_k > 0 && a->top_k <= OP_TOP_K_MAX);
    op_for(ctx, a->rows, (uint64_t)a->hidden * a->top_k / 2, combine_rows, a);
    return ERR_OK;
}
