/* SPDX-License-Identifier: Apache-2.0 */
/* Hyper-connections in f32, compiled once per instruction set.  Before a sublayer: first
 * the 24 projections of all rows, then norm, gates, mixing matrix and weighted sum row by row. */
#include "kernels/op_mhc.h"

#include <math.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/cpu/op_fast.h"
#include "lib/base/check.h"

#define MHC_BLOCK 24 /* rows that share widened weights; a multiple of every VF_ROWS */

/* c[i] is row i. */
static void transpose(vf4 c[4])
{
    vf4 a = __builtin_shufflevector(c[0], c[1], 0, 4, 1, 5);
    vf4 b = __builtin_shufflevector(c[2], c[3], 0, 4, 1, 5);
    vf4 d = __builtin_shufflevector(c[0], c[1], 2, 6, 3, 7);
    vf4 e = __builtin_shufflevector(c[2], c[3], 2, 6, 3, 7);
    c[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    c[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    c[2] = __builtin_shufflevector(d, e, 0, 1, 4, 5);
    c[3] = __builtin_shufflevector(d, e, 2, 3, 6, 7);
}

/* Divides every column by its sum + eps. */
static void divide_columns(vf4 c[4], float eps)
{
    vf4 factor = 1.0f / ((c[0] + c[1]) + (c[2] + c[3]) + eps);
    for (int i = 0; i < 4; i++)
        c[i] *= factor;
}

/* From the 16 logits; the first column step counts as the first iteration. */
static void sinkhorn(float m[16], uint32_t iters, float eps)
{
    vf4 c[4];
    for (int i = 0; i < 4; i++) {
        float *row = m + 4 * i;
        float top = fmaxf(fmaxf(row[0], row[1]), fmaxf(row[2], row[3]));
        for (int j = 0; j < 4; j++)
            row[j] -= top;
    }
    VF_EACH(16, i, count)
    vf_put(m + i, vf_exp(vf_get(m + i, count)), count);
    memcpy(c, m, sizeof(c));
    transpose(c);
    divide_columns(c, 0); /* the softmax of the rows */
    for (int i = 0; i < 4; i++)
        c[i] += eps;
    transpose(c);
    divide_columns(c, eps);
    for (uint32_t k = 1; k < iters; k++) {
        transpose(c);
        divide_columns(c, eps);
        transpose(c);
        divide_columns(c, eps);
    }
    memcpy(m, c, sizeof(c));
}

/* Where projection k of a row lies between the two passes: in the row's own outputs. */
static float *projection(const struct op_mhc_pre_args *a, uint64_t row, uint32_t k)
{
    if (k >= 8)
        return a->mix + row * 16 + (k - 8);
    return (k < 4 ? a->pre : a->post) + row * 4 + k % 4;
}

/* Projections [k, k + DOT_OUTS) of the rows, not normalised yet. */
static void project(const struct op_mhc_pre_args *a, uint32_t row, uint32_t rows, uint32_t k)
{
    _Alignas(64) float wide[DOT_OUTS][DOT_BLOCK + 16];
    uint32_t n = OP_STREAMS * a->hidden;
    const float *h = a->h + (uint64_t)row * n;
    for (uint32_t i = 0; i < n; i += DOT_BLOCK) {
        uint32_t count = n - i < DOT_BLOCK ? n - i : DOT_BLOCK;
        const float *w[DOT_OUTS];
        for (uint32_t o = 0; o < DOT_OUTS; o++) {
            w[o] = wide[o];
            if (a->fn.dtype == OP_F32)
                w[o] = (const float *)a->fn.data + (uint64_t)(k + o) * n + i;
            else
                widen_ahead(&a->fn, (uint64_t)(k + o) * n + i, count, DOT_BLOCK, wide[o]);
        }
        for (uint32_t r = 0; r < rows; r += VF_ROWS) {
            uint32_t some = rows - r < VF_ROWS ? rows - r : VF_ROWS;
            const float *x[VF_ROWS];
            vf4 sums[VF_ROWS];
            for (uint32_t s = 0; s < VF_ROWS; s++)
                x[s] = h + (uint64_t)(r + (s < some ? s : 0)) * n + i;
            dot_tile_rows(x, w, count, some, sums);
            for (uint32_t s = 0; s < some; s++) {
                float *m = projection(a, row + r + s, k);
                for (uint32_t o = 0; o < DOT_OUTS; o++)
                    m[o] = i == 0 ? sums[s][o] : m[o] + sums[s][o];
            }
        }
    }
}

/* An item is DOT_OUTS projections of a block of rows. */
static void project_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mhc_pre_args *a = arg;
    const uint32_t groups = OP_MHC_ROWS / DOT_OUTS;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = i / groups * MHC_BLOCK;
        uint32_t rows = a->rows - row < MHC_BLOCK ? a->rows - row : MHC_BLOCK;
        project(a, row, rows, i % groups * DOT_OUTS);
    }
}

static float mean_square(const float *h, uint32_t n)
{
    vf sum[2] = {vf_zero(), vf_zero()};
    uint32_t turn = 0;
    VF_EACH(n, i, count)
    {
        vf v = vf_get(h + i, count);
        sum[turn] = vf_fma(v, v, sum[turn]);
        turn ^= 1;
    }
    return vf_sum(sum[0] + sum[1]) / (float)n;
}

static void mix_row(const struct op_mhc_pre_args *a, uint32_t row)
{
    float m[OP_MHC_ROWS];
    uint32_t n = OP_STREAMS * a->hidden;
    const float *h = a->h + (uint64_t)row * n;
    float factor = 1 / sqrtf(mean_square(h, n) + (float)a->norm_eps);
    float gates[16] = {0};
    for (uint32_t k = 0; k < OP_MHC_ROWS; k++) {
        float scale = a->scale[k < 4 ? 0 : k < 8 ? 1 : 2];
        m[k] = *projection(a, row, k) * factor * scale + a->base[k];
        if (k < 8)
            gates[k] = m[k];
    }
    VF_EACH(16, i, count)
    vf_put(gates + i, vf_sigmoid(vf_get(gates + i, count)), count);
    float *pre = a->pre + (uint64_t)row * 4, *post = a->post + (uint64_t)row * 4;
    for (uint32_t i = 0; i < OP_STREAMS; i++) {
        pre[i] = gates[i] + (float)a->hc_eps;
        post[i] = 2 * gates[4 + i];
    }
    sinkhorn(m + 8, a->sinkhorn_iters, (float)a->hc_eps);
    memcpy(a->mix + (uint64_t)row * 16, m + 8, 16 * sizeof(float));

    float *x = a->x + (uint64_t)row * a->hidden;
    VF_EACH(a->hidden, c, count)
    {
        vf sum = pre[0] * vf_get(h + c, count);
        for (uint32_t s = 1; s < OP_STREAMS; s++)
            sum = vf_fma(vf_all(pre[s]), vf_get(h + (uint64_t)s * a->hidden + c, count), sum);
        vf_put(x + c, sum, count);
    }
}

static void pre_rows(const void *arg, uint32_t begin, uint32_t end)
{
    for (uint32_t r = begin; r < end; r++)
        mix_row(arg, r);
}

enum err OP_FAST(mhc_pre)(const struct op_mhc_pre_args *a, const struct op_ctx *ctx)
{
    CHECK(a->hidden > 0);
    CHECK(a->sinkhorn_iters > 0);
    STATIC_CHECK(OP_MHC_ROWS % DOT_OUTS == 0 && DOT_OUTS == 4);
    uint32_t blocks = (a->rows + MHC_BLOCK - 1) / MHC_BLOCK;
    uint64_t rows = a->rows < MHC_BLOCK ? a->rows : MHC_BLOCK;
    op_for(ctx, blocks * (OP_MHC_ROWS / DOT_OUTS), rows * OP_STREAMS * a->hidden, project_items, a);
    op_for(ctx, a->rows, (uint64_t)4 * a->hidden, pre_rows, a);
    return ERR_OK;
}

static void post_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mhc_post_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        float *h = a->h + (uint64_t)r * OP_STREAMS * a->hidden;
        const float *y = a->y + (uint64_t)r * a->hidden;
        const float *post = a->post + (uint64_t)r * 4, *mix = a->mix + (uint64_t)r * 16;
        VF_EACH(a->hidden, c, count)
        {
            vf old[OP_STREAMS], v = vf_get(y + c, count);
            for (int s = 0; s < OP_STREAMS; s++)
                old[s] = vf_get(h + (uint64_t)s * a->hidden + c, count);
            for (int s = 0; s < OP_STREAMS; s++) {
                vf sum = post[s] * v;
                for (int i = 0; i < OP_STREAMS; i++)
                    sum = vf_fma(vf_all(mix[4 * i + s]), old[i], sum);
                vf_put(h + (uint64_t)s * a->hidden + c, sum, count);
            }
        }
    }
}

enum err OP_FAST(mhc_post)(const struct op_mhc_post_args *a, const struct op_ctx *ctx)
{
    CHECK(a->hidden > 0);
    op_for(ctx, a->rows, (uint64_t)4 * a->hidden, post_rows, a);
    return ERR_OK;
}

static void mean_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_stream_mean_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        uint64_t row = a->rows_of != NULL ? a->rows_of[r] : r;
        const float *h0 = a->h + row * OP_STREAMS * a->hidden;
        const float *h1 = h0 + a->hidden, *h2 = h1 + a->hidden, *h3 = h2 + a->hidden;
        float *z = a->z + (uint64_t)r * a->hidden;
        VF_EACH(a->hidden, c, count)
        vf_put(z + c,
               ((vf_get(h0 + c, count) + vf_get(h1 + c, count)) +
                (vf_get(h2 + c, count) + vf_get(h3 + c, count))) *
                   0.25f,
               count);
    }
}

enum err OP_FAST(stream_mean)(const struct op_stream_mean_args *a, const struct op_ctx *ctx)
{
    CHECK(a->hidden > 0);
    op_for(ctx, a->rows, a->hidden, mean_rows, a);
    return ERR_OK;
}
