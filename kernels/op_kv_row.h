/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_kv_row.h - values of cached rows: latents and pooled index keys.
 *
 * Pure.  Decoding is exact in f32 up to one rounding of code times scale.  fp8 latents: the scale
 * of a group is max(amax / 448, the smallest normal f32), no power of two.  fp8 index keys are
 * rotated first (see op_index_rotate_row), rounded to bf16 and given a scale that is a power of
 * two, at least that of amax 1e-4; queries are rotated alike, so that products are kept.  bf16
 * and f32 index keys are not rotated.  A value that is NaN makes its whole group NaN. */
#ifndef KERNELS_OP_KV_ROW_H
#define KERNELS_OP_KV_ROW_H

#include <stdint.h>

#include "kernels/op_types.h"

void op_latent_row_store(enum kv_row type, const float *x, uint32_t dim, uint8_t *row);
void op_index_row_store(enum kv_row type, const float *x, uint32_t dim, uint8_t *row);
void op_kv_row_load(enum kv_row type, const uint8_t *row, uint32_t dim, float *ret_x);

/* In place: orthonormal Hadamard transform of each run of the largest power of two, at most 128,
 * that divides dim.  Applying it twice gives x back. */
void op_index_rotate_row(float *x, uint32_t dim);

/* Row of the pages as f32: where it lies, or decoded into tile [dim]. */
static inline const float *op_page_load(const struct op_pages *pages, const uint32_t *blocks,
                                        uint32_t row, uint32_t dim, float *tile)
{
    const uint8_t *at = op_page_row(pages, blocks, row, dim);
    if (pages->type == KV_ROW_F32)
        return (const float *)(const void *)at;
    op_kv_row_load(pages->type, at, dim, tile);
    return tile;
}

#endif
