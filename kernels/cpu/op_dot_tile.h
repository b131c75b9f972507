/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_dot_tile.h - dot products of the fast kernels, every one summed the same way.
 *
 * Pure.  A dot product over n is cut into blocks of DOT_BLOCK elements.  In a block, lane l of one
 * vector takes the products of indices i with i % VF_LANES == l in rising order by fused
 * multiply-add; the lanes are then added in the order of vf_sum4, and the block sums in rising
 * order.  However many rows and outputs are computed together, an output's bits are the same. */
#ifndef KERNELS_CPU_OP_DOT_TILE_H
#define KERNELS_CPU_OP_DOT_TILE_H

#ifdef OP_ISA /* nothing where no instruction set was chosen */

#include <stdbool.h>

#include "kernels/cpu/op_vec.h"
#include "kernels/op_dtype.h"

#define DOT_BLOCK 512 /* elements; a multiple of every VF_LANES */
#define DOT_OUTS  4

/* Weights that lie one after the other, `bytes` from `at` on now.
 * NOTE: the processor's own prefetcher stops at the end of a page and needs a few misses to begin
 * anew.  The first lines of the next page are all that it wants: with more asked for it does worse,
 * and so it does with several rows at once. */
#define PAGE_BYTES 4096u
VF_INLINE void fetch_next_page(const void *at, uint32_t bytes)
{
    const char *page = (const char *)((uintptr_t)at / PAGE_BYTES * PAGE_BYTES);
    if ((uintptr_t)at % PAGE_BYTES < bytes)
        for (uint32_t line = 0; line < 2; line++)
            __builtin_prefetch(page + PAGE_BYTES + line * 64, 0, 3);
}

/* True where one weight row at a time keeps up with the memory: what is added to one sum waits for
 * what was added before, so that it takes wide vectors. */
#define STREAMED      (VF_LANES == 16)
#define STREAM_BLOCKS 4 /* of a row, whose sums of lanes are formed together */

/* total and the next blocks of the same row, in their order. */
VF_INLINE float stream_add(float total, bool first, const vf acc[STREAM_BLOCKS], uint32_t blocks)
{
    vf4 sums = vf_sum4(acc[0], acc[1], acc[2], acc[3]);
    for (uint32_t k = 0; k < blocks; k++)
        total = first && k == 0 ? sums[0] : total + sums[k];
    return total;
}

VF_INLINE vf weights_at(const void *w, uint64_t i, enum op_dtype dtype)
{
    if (dtype == OP_F32)
        return vf_load((const float *)w + i);
    const uint16_t *half = (const uint16_t *)w + i;
    return dtype == OP_BF16 ? vf_from_bf16(half) : vf_from_f16(half);
}

VF_INLINE vf weights_at_n(const void *w, uint64_t i, enum op_dtype dtype, uint32_t n)
{
    float lane[VF_LANES] = {0};
    struct op_weight all = {.data = w, .dtype = dtype};
    op_widen(&all, i, n, lane);
    return vf_load(lane);
}

/* Elements [first, first + n) of a weight, zeros up to a whole vector.  What lies `ahead` elements
 * further on is wanted next. */
VF_INLINE void widen_dtype(const void *w, enum op_dtype dtype, uint64_t first, uint32_t n,
                           uint64_t ahead, float *out)
{
    const uint32_t bytes = dtype == OP_F32 ? 4 : 2;
    const char *next = (const char *)w + (first + ahead) * bytes;
    for (uint32_t i = 0; i < n * bytes; i += 64)
        __builtin_prefetch(next + i, 0, 3);
    uint32_t i = 0;
    for (; i + VF_LANES <= n; i += VF_LANES)
        vf_store(out + i, weights_at(w, first + i, dtype));
    if (i < n)
        vf_store(out + i, weights_at_n(w, first + i, dtype, n - i));
}

static inline void widen_ahead(const struct op_weight *w, uint64_t first, uint32_t n,
                               uint64_t ahead, float *out)
{
    if (w->dtype == OP_BF16)
        widen_dtype(w->data, OP_BF16, first, n, ahead, out);
    else if (w->dtype == OP_F32)
        widen_dtype(w->data, OP_F32, first, n, ahead, out);
    else
        widen_dtype(w->data, OP_F16, first, n, ahead, out);
}

/* Sums of rows x DOT_OUTS products of one block of n elements. */
VF_INLINE void dot_tile(const float *const *x, const float *const *w, uint32_t n, int rows,
                        vf4 *ret_sums)
{
    vf acc[VF_ROWS][DOT_OUTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int o = 0; o < DOT_OUTS; o++)
            acc[r][o] = vf_zero();
    uint32_t i = 0;
    for (; i + VF_LANES <= n; i += VF_LANES) {
        vf xs[VF_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            xs[r] = vf_load(x[r] + i);
#pragma GCC unroll 8
        for (int o = 0; o < DOT_OUTS; o++) {
            vf ws = vf_load(w[o] + i);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r][o] = vf_fma(ws, xs[r], acc[r][o]);
        }
    }
    if (i < n)
#pragma GCC unroll 8
        for (int o = 0; o < DOT_OUTS; o++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r][o] =
                    vf_fma(vf_load_n(w[o] + i, n - i), vf_load_n(x[r] + i, n - i), acc[r][o]);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        ret_sums[r] = vf_sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

/* The same for any number of rows up to VF_ROWS. */
VF_INLINE void dot_tile_rows(const float *const *x, const float *const *w, uint32_t n,
                             uint32_t rows, vf4 *ret_sums)
{
    switch (rows) {
    case 1:
        dot_tile(x, w, n, 1, ret_sums);
        return;
    case 2:
        dot_tile(x, w, n, 2, ret_sums);
        return;
#if VF_ROWS > 3
    case 3:
        dot_tile(x, w, n, 3, ret_sums);
        return;
    case 4:
        dot_tile(x, w, n, 4, ret_sums);
        return;
    case 5:
        dot_tile(x, w, n, 5, ret_sums);
        return;
#endif
    default:
        dot_tile(x, w, n, VF_ROWS, ret_sums);
    }
}

/* The same over any n, block by block. */
VF_INLINE void dot_rows(const float *const *x, const float *const *w, uint32_t n, uint32_t rows,
                        vf4 *ret_sums)
{
    dot_tile_rows(x, w, n < DOT_BLOCK ? n : DOT_BLOCK, rows, ret_sums);
    for (uint32_t i = DOT_BLOCK; i < n; i += DOT_BLOCK) {
        const float *xs[VF_ROWS], *ws[DOT_OUTS];
        vf4 sums[VF_ROWS];
        for (uint32_t r = 0; r < VF_ROWS; r++) /* those beyond `rows` repeat the first */
            xs[r] = x[r < rows ? r : 0] + i;
        for (uint32_t o = 0; o < DOT_OUTS; o++)
            ws[o] = w[o] + i;
        dot_tile_rows(xs, ws, n - i < DOT_BLOCK ? n - i : DOT_BLOCK, rows, sums);
        for (uint32_t r = 0; r < rows; r++)
            ret_sums[r] += sums[r];
    }
}

#endif

#endif
