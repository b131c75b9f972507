/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_linear.h - y = W x for rows of activations; row gather of an embedding.
 *
 * Contract: x f32 [rows, in] with stride, W [out, in] in f32, bf16 or f16, y f32 [rows, out] with
 * stride, not overlapping x.  Products and sums in f64 over eight fixed lanes (lane = index % 8)
 * that are added in a fixed order, so a row's bits do not depend on the number of rows. */
#ifndef KERNELS_OP_LINEAR_H
#define KERNELS_OP_LINEAR_H

#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

struct op_linear_args {
    const float *x;
    struct op_weight w;
    float *y;
    uint32_t rows, in, out;
    uint64_t x_stride, y_stride;
};

/* Pair p of the grouped form: y[p] = W[expert of p] x[row of p].  Tables are device memory, made
 * by op_moe_dispatch. */
struct op_grouped_linear_args {
    const float *x;
    const struct op_weight *w;   /* [experts] */
    float *y;                    /* [pairs, out] */
    const uint32_t *offsets;     /* [experts + 1] first pair of each expert */
    const uint32_t *x_rows;      /* [pairs] row of x; NULL = the pair's own number */
    uint32_t experts, pairs_max; /* pairs_max bounds offsets[experts] */
    uint32_t in, out;
    uint64_t x_stride, y_stride;
};

/* h[r, s, :] = w[ids[r], :] for every stream s. */
struct op_embed_args {
    const uint32_t *ids;
    struct op_weight w; /* [vocab, hidden] */
    float *h;           /* [rows, streams, hidden] */
    uint32_t rows, streams, hidden;
};

MUST_USE enum err op_linear_ref(const struct op_linear_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_grouped_linear_ref(const struct op_grouped_linear_args *a,
                                        const struct op_ctx *ctx);
MUST_USE enum err op_embed_ref(const struct op_embed_args *a, const struct op_ctx *ctx);

#endif
