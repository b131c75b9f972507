/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_norm.h - the three norms.
 *
 * Contract: f32 in and out, sums in f64, one rounding per output.  Row r, group g begins at
 * x + r * x_stride + g * n (floats).  In place (y == x, same strides) is allowed.
 * Tolerance against double: 2e-6 * max(1, |y|). */
#ifndef KERNELS_OP_NORM_H
#define KERNELS_OP_NORM_H

#include <stdint.h>

#include "lib/base/err.h"

struct op_ctx;

/* y = w * x / sqrt(mean(x^2) + eps); w [n] shared by all groups. */
struct op_rms_norm_args {
    const float *x;
    const float *w;
    float *y;
    uint32_t rows, groups, n;
    uint64_t x_stride, y_stride;
    double eps;
};

/* y = scale * x / sqrt(sum(x^2) + eps) */
struct op_l2norm_args {
    const float *x;
    float *y;
    uint32_t rows, groups, n;
    uint64_t x_stride, y_stride;
    double eps, scale;
};

/* y = w * (x - mean) / sqrt(var + eps) + b; var is the biased variance. */
struct op_layer_norm_args {
    const float *x;
    const float *w, *b;
    float *y;
    uint32_t rows, n;
    uint64_t x_stride, y_stride;
    double eps;
};

MUST_USE enum err op_rms_norm_ref(const struct op_rms_norm_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_l2norm_ref(const struct op_l2norm_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_layer_norm_ref(const struct op_layer_norm_args *a, const struct op_ctx *ctx);

#endif
