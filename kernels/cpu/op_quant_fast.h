/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_quant_fast.h - quantised weights for the fast linear ops.
 *
 * Inner part of the libraries per instruction set.  Row formats are decoded to f32 in pieces that
 * stay in the first-level cache and then summed like any weight; EXL3 has its own kernel. */
#ifndef KERNELS_CPU_OP_QUANT_FAST_H
#define KERNELS_CPU_OP_QUANT_FAST_H

#ifdef OP_ISA /* nothing where no instruction set was chosen */

#include <stdbool.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/cpu/op_fast.h"
#include "kernels/cpu/op_vec.h"
#include "kernels/op_format.h"

/* Outputs of one weight matrix for `rows` rows.  x row r is the one numbered x_rows[r], or
 * x_first + r without a table. */
struct linear_job {
    const struct op_weight *w;
    uint32_t in, out, rows;
    const float *x;
    const uint32_t *x_rows;
    uint32_t x_first;
    uint64_t x_stride;
    float *y; /* row 0 of the outputs */
    uint64_t y_stride;
    bool ordered; /* x is in the order of the weight's columns: see quant_order */
};

static inline const float *job_x(const struct linear_job *j, uint32_t r)
{
    return j->x + (j->x_rows != NULL ? j->x_rows[r] : j->x_first + r) * j->x_stride;
}

/* NOTE: 16 lanes take the eight nibbles of 16 words by eight shifts, moving nothing between lanes,
 * when columns are summed in another order: column c of each run of FP4_RUN stands at
 * (c % 8) * 16 + c / 8.  What is left at the end of a row stays as it is.  All numbers of rows do
 * it alike. */
#if VF_LANES == 16
#define FP4_RUN 128u
#else
#define FP4_RUN 0u /* no other order */
#endif

/* NOTE: what is added to one sum waits for what was added before, so that FP8 takes four sums at
 * once, and yet memory is read fastest from end to end.  So columns go to the four blocks of a
 * piece in turns of 32: those of run r of a piece stand in block r % 4.  What is left at the end of
 * a row stays as it is. */
#define E4M3_PIECE (STREAM_BLOCKS * DOT_BLOCK)

static inline bool quant_e4m3(const struct op_quantised *w)
{
    return w->format == OP_FORMAT_FP8 || w->format == OP_FORMAT_MXFP8;
}

static inline bool quant_ordered(const struct op_quantised *w)
{
    if (quant_e4m3(w))
        return STREAMED && w->in >= E4M3_PIECE;
    return FP4_RUN > 0 && (w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4);
}

/* Columns [first, first + n) of x in the order of a weight that is quant_ordered, first a multiple
 * of DOT_BLOCK; zeros up to a whole vector. */
void OP_FAST(quant_order)(const struct op_quantised *w, const float *x, uint32_t first, uint32_t n,
                          float *out);

/* Columns [first, first + n) of a row, not of EXL3, in their order, n up to DOT_BLOCK; zeros up to
 * a whole vector.  Values within one more rounding of op_quantised_row's. */
void OP_FAST(quant_row)(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                        float *out);

/* NOTE: the more rows at once, the more lines are on their way from memory; rows of FP4 are short.
 * Eight fit into 32 registers where x is in their order. */
#if FP4_RUN > 0
#define QUANT_ROWS 8
#else
#define QUANT_ROWS DOT_OUTS
#endif

static inline uint32_t quant_rows(const struct op_quantised *w)
{
    return quant_ordered(w) ? QUANT_ROWS : DOT_OUTS;
}

/* Products of rows [row, row + rows) with one x, in the order of the columns and with the bits of
 * dot_tile over what quant_row gives, into y.  rows is quant_rows or DOT_OUTS.  False: not for
 * these rows, and y is as it was. */
bool OP_FAST(quant_dots)(const struct op_quantised *w, uint32_t row, uint32_t rows, const float *x,
                         float *y);

/* Outputs [128 block, + 128) of an EXL3 weight for all rows of the job. */
void OP_FAST(exl3_block)(const struct linear_job *j, uint32_t block);

#endif

#endif
