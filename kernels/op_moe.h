/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_moe.h - clamped SwiGLU, router, dispatch tables and the sum over experts.
 *
 * Contract: f32 activations, f64 inside, one rounding per output.  Integers are exact.  The
 * expert products themselves are op_grouped_linear over the tables made here. */
#ifndef KERNELS_OP_MOE_H
#define KERNELS_OP_MOE_H

#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

/* y = silu(min(gate, limit)) * clamp(up, -limit, limit), elementwise; y may be gate or up. */
struct op_swiglu_args {
    const float *gate, *up;
    float *y;
    uint32_t rows, n;
    double limit;
};

/* The top_k largest of sigmoid(logit) + bias, equal scores by lower id; weights are the unbiased
 * scores over their sum, times scale. */
struct op_router_args {
    const float *logits; /* [rows, experts] */
    const float *bias;   /* [experts] */
    int32_t *chosen;     /* [rows, top_k] ascending ids */
    float *weights;      /* [rows, top_k] */
    uint32_t rows, experts, top_k;
    double scale;
};

/* Sorts the (row, choice) pairs by expert, rows rising inside an expert.  Only the experts
 * [expert_first, + experts) take part: a choice of another one gets the pair number `outside`. */
struct op_moe_dispatch_args {
    const int32_t *chosen; /* [rows, top_k] */
    uint32_t *offsets;     /* [experts + 1] */
    uint32_t *pair_rows;   /* [rows * top_k] row of each pair */
    uint32_t *pair_of;     /* [rows, top_k] pair number of each choice */
    uint32_t rows, experts, top_k;
    uint32_t expert_first, outside;
};

/* y[r] = sum over choices in rising expert id of weight * out[pair] + shared[r]. */
struct op_moe_combine_args {
    const float *out; /* [pairs, hidden] */
    const uint32_t *pair_of;
    const float *weights;
    const float *shared; /* [rows, hidden] */
    float *y;            /* [rows, hidden]; may be shared */
    uint32_t rows, top_k, hidden;
};

MUST_USE enum err op_swiglu_ref(const struct op_swiglu_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_router_ref(const struct op_router_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_moe_dispatch_ref(const struct op_moe_dispatch_args *a,
                                      const struct op_ctx *ctx);
MUST_USE enum err op_moe_combine_ref(const struct op_moe_combine_args *a, const struct op_ctx *ctx);

#endif
