/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_dcp.h - cache rows shared over ranks by position: choosing pools, merging attention.
 *
 * Contract: the best pools_kept pools of the whole are among the best pools_kept of every rank, in
 * the same order on both levels (score descending, then pool id ascending), so that candidates of
 * all ranks, merged, choose the same set as one rank would.  Sums in f64, in rank order, one
 * rounding per output: the same bits wherever they are formed. */
#ifndef KERNELS_OP_DCP_H
#define KERNELS_OP_DCP_H

#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

struct op_candidate {
    double score;
    uint32_t pool; /* OP_NO_POOL: no candidate, nor any after it */
    uint32_t zero;
};
#define OP_NO_POOL UINT32_MAX

/* The best pools of this rank for each row, in order of choice.  Rows whose pools are all selected
 * anyway have none. */
struct op_index_best_args {
    const struct op_seq *seqs;
    const uint32_t *seq_of;
    const double *score; /* [row_count, score_stride], by pool of the whole */
    uint64_t score_stride;
    struct op_candidate *best; /* [row_count, pools_kept] */
    struct op_shard shard;     /* of pools */
    uint32_t row_first, row_count;
    uint32_t kpool, pools_kept;
};

/* This rank's positions among those that a row attends to, rising; all: the candidates of every
 * rank for this launch's rows. */
struct op_index_merge_args {
    const struct op_seq *seqs;
    const uint32_t *seq_of;
    const struct op_candidate *all; /* [ranks, row_count, pools_kept] */
    uint32_t *selected;             /* [rows, selected_stride] */
    uint32_t *selected_count;       /* [rows] */
    struct op_shard shard;          /* of positions */
    uint32_t row_first, row_count;
    uint32_t kpool, pools_kept, selected_stride;
};

/* o = sum over ranks of exp(lse_r - lse) o_r with lse = log sum exp lse_r.  An empty part (-inf)
 * counts as nothing; where all are empty o is 0. */
struct op_mla_merge_args {
    const float *parts;   /* rank r, item i at parts + r * part_stride + i * latent */
    const float *lse;     /* rank r, item i at lse + r * part_stride + i */
    float *o_abs;         /* [items, latent] */
    uint64_t part_stride; /* floats */
    uint32_t ranks, items, latent;
};

MUST_USE enum err op_index_best_ref(const struct op_index_best_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_index_merge_ref(const struct op_index_merge_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_mla_merge_ref(const struct op_mla_merge_args *a, const struct op_ctx *ctx);

#endif
