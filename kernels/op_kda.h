/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_kda.h - Kimi Delta Attention: short convolution, gates, recurrence, gated output.
 *
 * Contract: f32 in memory, sums in f64.  The recurrence runs row by row in one fixed order and
 * rounds S to f32 after each row, so that replaying a journal gives the same bits as having
 * advanced the state at once.  State areas lie in a sequence's slot at byte offsets given in the
 * args, the same for all sequences. */
#ifndef KERNELS_OP_KDA_H
#define KERNELS_OP_KDA_H

#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

/* y[p] = silu(sum over t of w[c][t] * x[p - taps + 1 + t]), rows before position 0 are zero.
 * Rows before the batch come from the ring, where position p lies at p % ring_rows; the last
 * ring_rows rows of the batch are then written to it, so rejected drafts are overwritten by
 * whatever comes next.  ring_rows >= taps - 1 + rows of a verify step. */
struct op_short_conv_args {
    const struct op_seq *seqs;
    const float *x;                /* [rows, channels] */
    const float *w;                /* [channels, taps] */
    float *y;                      /* [rows, channels], not x */
    uint64_t ring_offset;          /* in the slot: [ring_rows, channels] f32 */
    uint32_t seq_count, row_count; /* row_count over all sequences */
    uint32_t channels, taps, ring_rows;
};

/* log_decay = lower_bound * sigmoid(exp(a_log[h]) * (u + dt_bias)), beta = sigmoid(b). */
struct op_kda_gates_args {
    const float *u;       /* [rows, heads * dim] */
    const float *b;       /* [rows, heads] */
    const float *a_log;   /* [heads] */
    const float *dt_bias; /* [heads * dim] */
    float *log_decay;     /* [rows, heads * dim]; may be u */
    float *beta;          /* [rows, heads]; may be b */
    uint32_t rows, heads, dim;
    double lower_bound;
};

/* Per head: S <- diag(exp(log_decay)) S; r = S^T k; S <- S + k (beta (v - r))^T; o = S^T q.
 * S is [dim (key), dim (value)].  First replay_count journal rows are applied to S, then the own
 * rows; with seq.journal the own rows do not reach S but the journal. */
struct op_kda_args {
    const struct op_seq *seqs;
    const float *q, *k, *v; /* row r, head h: x + r * qkv_stride + h * dim */
    uint64_t qkv_stride;
    const float *log_decay;  /* [rows, heads * dim] */
    const float *beta;       /* [rows, heads] */
    float *o;                /* [rows, heads * dim] */
    uint64_t state_offset;   /* in the slot: [heads, dim, dim] f32 */
    uint64_t journal_offset; /* in the slot: journal_rows * op_kda_journal_floats f32 */
    uint32_t seq_count, row_count;
    uint32_t heads, dim, journal_rows;
};

/* A journal row: k, v, log_decay [heads * dim] each, then beta [heads]. */
static inline uint64_t op_kda_journal_floats(uint32_t heads, uint32_t dim)
{
    return (uint64_t)heads * (3 * dim + 1);
}

/* y = RMS(o; w, eps) * sigmoid(gate) per head; y may be o. */
struct op_kda_out_args {
    const float *o, *gate; /* [rows, heads * dim] */
    const float *w;        /* [dim] */
    float *y;
    uint32_t rows, heads, dim;
    double eps;
};

MUST_USE enum err op_short_conv_ref(const struct op_short_conv_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_kda_gates_ref(const struct op_kda_gates_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_kda_ref(const struct op_kda_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_kda_out_ref(const struct op_kda_out_args *a, const struct op_ctx *ctx);

#endif
