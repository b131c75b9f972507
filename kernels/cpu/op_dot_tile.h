/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_dot_tile.h - dot products of the fast kernels, every one summed the same way.
 *
 * Pure.  A dot product over n is cut into blocks of DOT_BLOCK elements.  In a block, lane l of one
 * vector takes the products of indices i with i % VF_LANES == l in rising order by fused
 * multiply-add; the lanes are then added in the order of vf_sum4, and the block sums in rising
 * order.  However many rows and outputs are computed together, an output's bits are the same. */
#ifndef KERNELS_CPU_OP_DOT_TILE_H
#define KERNELS_CPU_OP_DOT_TILE_H

#include "kernels/cpu/op_vec.h"

#define DOT_BLOCK 512 /* elements; a multiple of every VF_LANES */
#define DOT_OUTS  4

/* Sums of rows x DOT_OUTS products of n elements, n a multiple of VF_LANES; x row r at
 * x + r * x_stride, w row o at w + o * w_stride. */
VF_INLINE void dot_tile(const float *x, uint64_t x_stride, const float *w, uint64_t w_stride,
                        uint32_t n, int rows, vf4 *ret_sums)
{
    vf acc[VF_ROWS][DOT_OUTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int o = 0; o < DOT_OUTS; o++)
            acc[r][o] = vf_zero();
    for (uint32_t i = 0; i < n; i += VF_LANES) {
        vf xs[VF_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            xs[r] = vf_load(x + r * x_stride + i);
#pragma GCC unroll 8
        for (int o = 0; o < DOT_OUTS; o++) {
            vf ws = vf_load(w + o * w_stride + i);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r][o] = vf_fma(ws, xs[r], acc[r][o]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        ret_sums[r] = vf_sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

/* The same for any number of rows up to VF_ROWS. */
VF_INLINE void dot_tile_rows(const float *x, uint64_t x_stride, const float *w, uint64_t w_stride,
                             uint32_t n, uint32_t rows, vf4 *ret_sums)
{
    switch (rows) {
    case 1:
        dot_tile(x, x_stride, w, w_stride, n, 1, ret_sums);
        return;
    case 2:
        dot_tile(x, x_stride, w, w_stride, n, 2, ret_sums);
        return;
#if VF_ROWS > 3
    case 3:
        dot_tile(x, x_stride, w, w_stride, n, 3, ret_sums);
        return;
    case 4:
        dot_tile(x, x_stride, w, w_stride, n, 4, ret_sums);
        return;
    case 5:
        dot_tile(x, x_stride, w, w_stride, n, 5, ret_sums);
        return;
#endif
    default:
        dot_tile(x, x_stride, w, w_stride, n, VF_ROWS, ret_sums);
    }
}

#endif
