/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_quant_fast.h - quantised weights for the fast linear ops.
 *
 * Inner part of the libraries per instruction set.  Row formats are decoded to f32 in pieces that
 * stay in the first-level cache and then summed like any weight; EXL3 has its own kernel. */
#ifndef KERNELS_CPU_OP_QUANT_FAST_H
#define KERNELS_CPU_OP_QUANT_FAST_H

#ifdef OP_ISA /* nothing where no instruction set was chosen */

#include <stdbool.h>

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
};

static inline const float *job_x(const struct linear_job *j, uint32_t r)
{
    return j->x + (j->x_rows != NULL ? j->x_rows[r] : j->x_first + r) * j->x_stride;
}

/* Columns [first, first + n) of a row, not of EXL3; zeros up to a whole vector.  Values within one
 * more rounding of op_quantised_row's. */
void OP_FAST(quant_row)(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                        float *out);

/* Products of rows [row, row + 4) with one x on columns [first, first + n), in the order and with
 * the bits of dot_tile over what quant_row gives.  False: not for this weight or piece. */
bool OP_FAST(quant_dots)(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                         const float *x, vf4 *ret_sums);

/* Outputs [128 block, + 128) of an EXL3 weight for all rows of the job. */
void OP_FAST(exl3_block)(const struct linear_job *j, uint32_t block);

#endif

#endif
