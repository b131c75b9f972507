/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_mhc.h"

#include <math.h>

#include "kernels/op_dtype.h"
#include "kernels/ref/op_dot.h"
#include "lib/base/check.h"

#define MHC_TILE 512

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static void sinkhorn_columns(double c[4][4], double eps)
{
    for (int j = 0; j < 4; j++) {
        double sum = c[0][j] + c[1][j] + c[2][j] + c[3][j] + eps;
        for (int i = 0; i < 4; i++)
            c[i][j] /= sum;
    }
}

/* The first column step counts as the first iteration. */
static void sinkhorn(double c[4][4], uint32_t iters, double eps)
{
    for (int i = 0; i < 4; i++) {
        double top = fmax(fmax(c[i][0], c[i][1]), fmax(c[i][2], c[i][3]));
        double sum = 0;
        for (int j = 0; j < 4; j++) {
            c[i][j] = exp(c[i][j] - top);
            sum += c[i][j];
        }
        for (int j = 0; j < 4; j++)
            c[i][j] = c[i][j] / sum + eps;
    }
    sinkhorn_columns(c, eps);
    for (uint32_t k = 1; k < iters; k++) {
        for (int i = 0; i < 4; i++) {
            double sum = c[i][0] + c[i][1] + c[i][2] + c[i][3] + eps;
            for (int j = 0; j < 4; j++)
                c[i][j] /= sum;
        }
        sinkhorn_columns(c, eps);
    }
}

/* fn_row . h, the weight row widened in tiles where it is not f32. */
static double mhc_project(const struct op_weight *fn, uint32_t row, const float *h, uint32_t n)
{
    if (fn->dtype == OP_F32)
        return op_dot((const float *)fn->data + (uint64_t)row * n, h, n);
    struct op_lanes s;
    op_lanes_clear(&s);
    float tile[MHC_TILE];
    for (uint32_t i = 0; i < n; i += MHC_TILE) {
        uint32_t count = n - i < MHC_TILE ? n - i : MHC_TILE;
        op_widen(fn, (uint64_t)row * n + i, count, tile);
        op_lanes_add(&s, tile, h + i, count);
    }
    return op_lanes_sum(&s);
}

static void mhc_pre_row(const struct op_mhc_pre_args *a, uint32_t r)
{
    uint32_t n = OP_STREAMS * a->hidden;
    const float *h = a->h + (uint64_t)r * n;
    double factor = 1 / sqrt(op_dot(h, h, n) / n + a->norm_eps);
    double m[OP_MHC_ROWS];
    for (uint32_t k = 0; k < OP_MHC_ROWS; k++)
        m[k] = mhc_project(&a->fn, k, h, n) * factor;

    double pre[OP_STREAMS], mix[4][4];
    for (uint32_t i = 0; i < OP_STREAMS; i++) {
        pre[i] = sigmoid(m[i] * a->scale[0] + a->base[i]) + a->hc_eps;
        a->pre[(uint64_t)r * 4 + i] = (float)pre[i];
        a->post[(uint64_t)r * 4 + i] =
            (float)(2 * sigmoid(m[4 + i] * a->scale[1] + a->base[4 + i]));
    }
    for (uint32_t k = 0; k < 16; k++)
        mix[k / 4][k % 4] = m[8 + k] * a->scale[2] + a->base[8 + k];
    sinkhorn(mix, a->sinkhorn_iters, a->hc_eps);
    for (uint32_t k = 0; k < 16; k++)
        a->mix[(uint64_t)r * 16 + k] = (float)mix[k / 4][k % 4];

    float *x = a->x + (uint64_t)r * a->hidden;
    const float *h1 = h + a->hidden, *h2 = h1 + a->hidden, *h3 = h2 + a->hidden;
    for (uint32_t c = 0; c < a->hidden; c++)
        x[c] = (float)(pre[0] * h[c] + pre[1] * h1[c] + pre[2] * h2[c] + pre[3] * h3[c]);
}

static void mhc_pre_rows(const void *arg, uint32_t begin, uint32_t end)
{
    for (uint32_t r = begin; r < end; r++)
        mhc_pre_row(arg, r);
}

enum err op_mhc_pre_ref(const struct op_mhc_pre_args *a, const struct op_ctx *ctx)
{
    CHECK(a->hidden > 0);
    CHECK(a->sinkhorn_iters > 0);
    op_for(ctx, a->rows, (uint64_t)OP_MHC_ROWS * OP_STREAMS * a->hidden, mhc_pre_rows, a);
    return ERR_OK;
}

static void mhc_post_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mhc_post_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        float *h = a->h + (uint64_t)r * OP_STREAMS * a->hidden;
        float *h1 = h + a->hidden, *h2 = h1 + a->hidden, *h3 = h2 + a->hidden;
        const float *y = a->y + (uint64_t)r * a->hidden;
        const float *p = a->post + (uint64_t)r * 4, *m = a->mix + (uint64_t)r * 16;
        double post[4], mix[16];
        for (int k = 0; k < 4; k++)
            post[k] = p[k];
        for (int k = 0; k < 16; k++)
            mix[k] = m[k];
        for (uint32_t c = 0; c < a->hidden; c++) {
            double s0 = h[c], s1 = h1[c], s2 = h2[c], s3 = h3[c], v = y[c];
            h[c] = (float)(post[0] * v + mix[0] * s0 + mix[4] * s1 + mix[8] * s2 + mix[12] * s3);
            h1[c] = (float)(post[1] * v + mix[1] * s0 + mix[5] * s1 + mix[9] * s2 + mix[13] * s3);
            h2[c] = (float)(post[2] * v + mix[2] * s0 + mix[6] * s1 + mix[10] * s2 + mix[14] * s3);
            h3[c] = (float)(post[3] * v + mix[3] * s0 + mix[7] * s1 + mix[11] * s2 + mix[15] * s3);
        }
    }
}

enum err op_mhc_post_ref(const struct op_mhc_post_args *a, const struct op_ctx *ctx)
{
    CHECK(a->hidden > 0);
    op_for(ctx, a->rows, (uint64_t)20 * a->hidden, mhc_post_rows, a);
    return ERR_OK;
}

static void stream_mean_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_stream_mean_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        uint64_t row = a->rows_of != NULL ? a->rows_of[r] : r;
        const float *h = a->h + row * OP_STREAMS * a->hidden;
        const float *h1 = h + a->hidden, *h2 = h1 + a->hidden, *h3 = h2 + a->hidden;
        float *z = a->z + (uint64_t)r * a->hidden;
        for (uint32_t c = 0; c < a->hidden; c++)
            z[c] = (float)(((double)h[c] + h1[c] + h2[c] + h3[c]) / OP_STREAMS);
    }
}

enum err op_stream_mean_ref(const struct op_stream_mean_args *a, const struct op_ctx *ctx)
{
    CHECK(a->hidden > 0);
    op_for(ctx, a->rows, (uint64_t)4 * a->hidden, stream_mean_rows, a);
    return ERR_OK;
}
