/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_mla.h - latent attention in absorbed form over selected rows of paged latents.
 *
 * Contract: f32 in memory, sums in f64, one rounding per output.  Selected positions are given in
 * rising order and are summed in that order.  kv_b is [heads * (nope + v_dim), latent]: per head
 * first nope key rows, then v_dim value rows. */
#ifndef KERNELS_OP_MLA_H
#define KERNELS_OP_MLA_H

#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

/* Writes the rows' latents to their positions' places. */
struct op_latent_write_args {
    const struct op_seq *seqs;
    const float *latent; /* [rows, latent_dim] */
    struct op_pages pages;
    uint32_t seq_count, latent_dim;
};

/* q_abs[r, h, :] = W_K,h^T q[r, h, :] */
struct op_mla_absorb_args {
    const float *q; /* [rows, heads * nope] */
    struct op_weight kv_b;
    float *q_abs; /* [rows, heads, latent] */
    uint32_t rows, heads, nope, v_dim, latent;
};

/* o_abs[r, h, :] = sum over selected j of softmax_j(scale q_abs . c_j) c_j */
struct op_mla_attend_args {
    const struct op_seq *seqs;
    const uint32_t *seq_of; /* [rows] sequence of each row */
    const float *q_abs;
    struct op_pages pages;
    const uint32_t *selected;       /* [rows, selected_stride] positions */
    const uint32_t *selected_count; /* [rows] */
    float *o_abs;                   /* [rows, heads, latent]; 0 where nothing is selected */
    float
        *lse; /* [rows, heads] log sum exp of the scores, natural; -inf where nothing is; or NULL */
    double *work; /* [rows, heads, selected_stride] */
    uint32_t rows, heads, latent, selected_stride;
    double scale;
};

/* o[r, h, :] = W_V,h o_abs[r, h, :] */
struct op_mla_value_args {
    const float *o_abs;
    struct op_weight kv_b;
    float *o; /* [rows, heads * v_dim] */
    uint32_t rows, heads, nope, v_dim, latent;
};

MUST_USE enum err op_latent_write_ref(const struct op_latent_write_args *a,
                                      const struct op_ctx *ctx);
MUST_USE enum err op_mla_absorb_ref(const struct op_mla_absorb_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_mla_attend_ref(const struct op_mla_attend_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_mla_value_ref(const struct op_mla_value_args *a, const struct op_ctx *ctx);

#endif
