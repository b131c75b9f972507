/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_mhc.h - manifold-constrained hyper-connections: before and after a sublayer; the end.
 *
 * Contract: streams h f32 [rows, 4, hidden], contiguous.  All mixing in f64, one rounding per
 * output.  pre within 5e-7 of double, the rest 2e-6 * max(1, |x|). */
#ifndef KERNELS_OP_MHC_H
#define KERNELS_OP_MHC_H

#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

/* From the streams: pre_i = sigmoid(m_i s0 + b_i) + hc_eps, post_i = 2 sigmoid(m_{4+i} s1 +
 * b_{4+i}), C = Sinkhorn(m[8:24] s2 + b[8:24]), x = sum_i pre_i h_i, with m = fn . RMS(flat h). */
struct op_mhc_pre_args {
    const float *h;
    struct op_weight fn; /* [24, 4 * hidden] */
    const float *scale;  /* [3] */
    const float *base;   /* [24] */
    float *pre;          /* [rows, 4] */
    float *post;         /* [rows, 4] */
    float *mix;          /* [rows, 4, 4]: C, row-major */
    float *x;            /* [rows, hidden] */
    uint32_t rows, hidden;
    uint32_t sinkhorn_iters;
    double hc_eps, norm_eps;
};

/* h_j = post_j y + sum_i C[i][j] h_i, in place: column j of C feeds new stream j. */
struct op_mhc_post_args {
    float *h;
    const float *y; /* [rows, hidden] */
    const float *post;
    const float *mix;
    uint32_t rows, hidden;
};

/* z[r] = mean over the streams of h[rows_of[r]]; rows_of NULL = row r itself. */
struct op_stream_mean_args {
    const float *h;
    const uint32_t *rows_of; /* [rows] */
    float *z;                /* [rows, hidden] */
    uint32_t rows, hidden;
};

MUST_USE enum err op_mhc_pre_ref(const struct op_mhc_pre_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_mhc_post_ref(const struct op_mhc_post_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_stream_mean_ref(const struct op_stream_mean_args *a, const struct op_ctx *ctx);

#endif
