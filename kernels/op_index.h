/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_index.h - the sparse indexer: pooled keys, scores, selection.
 *
 * Contract: keys f32, scores f64.  Pool p covers positions [p * kpool, (p + 1) * kpool) of its
 * sequence and exists when all of them do.  Selection order is score descending, then pool id
 * ascending; the incomplete tail is always appended. */
#ifndef KERNELS_OP_INDEX_H
#define KERNELS_OP_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

/* Every pool whose last token is in the batch: P[c] = sum_j softmax_j(gate_j[c] + ape[j][c]) *
 * key_j[c], written to its place in the pages (rows_per_block counts pools).  Keys and gates
 * before the batch come from the ring (position % ring_rows; per row key, then gate); the batch's
 * last rows are then written to it.  ring_rows >= kpool - 1 + rows of a verify step. */
struct op_index_pool_args {
    const struct op_seq *seqs;
    const uint32_t *seq_of;  /* [rows] */
    const float *key, *gate; /* [rows, dim] */
    const float *ape;        /* [kpool, dim] */
    struct op_pages pages;
    uint64_t ring_offset; /* in the slot: [ring_rows, 2, dim] f32 */
    uint32_t seq_count, rows, dim, kpool, ring_rows;
};

/* q [rows, heads, dim] in place, as op_kv_row.h says: before scores against fp8 keys. */
struct op_index_rotate_args {
    float *q;
    uint32_t rows, heads, dim;
};

/* score[r, p] = sum_h w[r, h] / sqrt(heads) * relu(q[r, h] . P_p / sqrt(dim)) for every pool that
 * the row may see.  Rows whose pools are all selected anyway (pools <= pools_kept) are skipped. */
struct op_index_score_args {
    const struct op_seq *seqs;
    const uint32_t *seq_of;
    const float *q; /* [rows, heads * dim] */
    const float *w; /* [rows, heads] */
    struct op_pages pages;
    double *score; /* [row_count, score_stride] */
    uint64_t score_stride;
    uint32_t row_first, row_count; /* the rows of this launch, numbered in the batch */
    uint32_t heads, dim, kpool, pools_kept;
};

/* Positions that a row attends to, rising.  selected and counts are indexed by batch row, score
 * by row - row_first. */
struct op_index_select_args {
    const struct op_seq *seqs;
    const uint32_t *seq_of;
    const double *score;
    uint64_t score_stride;
    uint32_t *selected;       /* [rows, selected_stride] */
    uint32_t *selected_count; /* [rows] */
    uint32_t row_first, row_count;
    uint32_t kpool, pools_kept, selected_stride;
};

MUST_USE enum err op_index_pool_ref(const struct op_index_pool_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_index_rotate_ref(const struct op_index_rotate_args *a,
                                      const struct op_ctx *ctx);
MUST_USE enum err op_index_score_ref(const struct op_index_score_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_index_select_ref(const struct op_index_select_args *a,
                                      const struct op_ctx *ctx);

#endif
