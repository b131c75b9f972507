/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_norm.h"

#include <math.h>

#include "kernels/op_types.h"
#include "lib/base/check.h"

static void rms_norm_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_rms_norm_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *x = a->x + i / a->groups * a->x_stride + (uint64_t)(i % a->groups) * a->n;
        float *y = a->y + i / a->groups * a->y_stride + (uint64_t)(i % a->groups) * a->n;
        double sum = 0;
        for (uint32_t c = 0; c < a->n; c++)
            sum += (double)x[c] * x[c];
        double factor = 1 / sqrt(sum / a->n + a->eps);
        for (uint32_t c = 0; c < a->n; c++)
            y[c] = (float)(a->w[c] * (x[c] * factor));
    }
}

enum err op_rms_norm_ref(const struct op_rms_norm_args *a, const struct op_ctx *ctx)
{
    CHECK(a->n > 0);
    CHECK(a->groups > 0);
    op_for(ctx, a->rows * a->groups, a->n * 2, rms_norm_rows, a);
    return ERR_OK;
}

static void l2norm_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_l2norm_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *x = a->x + i / a->groups * a->x_stride + (uint64_t)(i % a->groups) * a->n;
        float *y = a->y + i / a->groups * a->y_stride + (uint64_t)(i % a->groups) * a->n;
        double sum = 0;
        for (uint32_t c = 0; c < a->n; c++)
            sum += (double)x[c] * x[c];
        double factor = a->scale / sqrt(sum + a->eps);
        for (uint32_t c = 0; c < a->n; c++)
            y[c] = (float)(x[c] * factor);
    }
}

enum err op_l2norm_ref(const struct op_l2norm_args *a, const struct op_ctx *ctx)
{
    CHECK(a->n > 0);
    CHECK(a->groups > 0);
    op_for(ctx, a->rows * a->groups, a->n * 2, l2norm_rows, a);
    return ERR_OK;
}

static void layer_norm_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_layer_norm_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        const float *x = a->x + r * a->x_stride;
        float *y = a->y + r * a->y_stride;
        double sum = 0;
        for (uint32_t c = 0; c < a->n; c++)
            sum += x[c];
        double mean = sum / a->n;
        double squares = 0;
        for (uint32_t c = 0; c < a->n; c++)
            squares += (x[c] - mean) * (x[c] - mean);
        double factor = 1 / sqrt(squares / a->n + a->eps);
        for (uint32_t c = 0; c < a->n; c++)
            y[c] = (float)(a->w[c] * ((x[c] - mean) * factor) + a->b[c]);
    }
}

enum err op_layer_norm_ref(const struct op_layer_norm_args *a, const struct op_ctx *ctx)
{
    CHECK(a->n > 0);
    op_for(ctx, a->rows, a->n * 3, layer_norm_rows, a);
    return ERR_OK;
}
