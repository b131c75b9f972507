/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_kv_row_fast.h - cached rows as f32 vectors, compiled once per instruction set.
 *
 * Inner part of the libraries per instruction set.  The same values as op_kv_row_load, bit for bit,
 * but that a group with a NaN scale is all NaN whatever its codes. */
#ifndef KERNELS_CPU_OP_KV_ROW_FAST_H
#define KERNELS_CPU_OP_KV_ROW_FAST_H

#ifdef OP_ISA /* nothing where no instruction set was chosen */

#include "kernels/cpu/op_vec.h"
#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "kernels/op_types.h"

static inline void kv_row_fp8(const uint8_t *row, uint32_t dim, float *out)
{
    for (uint32_t i = 0; i < dim; i += KV_ROW_GROUP) {
        float scale;
        uint32_t k = i, end = dim - i < KV_ROW_GROUP ? dim : i + KV_ROW_GROUP;
        memcpy(&scale, row + dim + i / KV_ROW_GROUP * sizeof(float), sizeof(scale));
        if (scale < VF_E4M3_SCALE_MAX)
            for (; k + VF_LANES <= end; k += VF_LANES)
                vf_store(out + k, vf_from_e4m3(row + k) * (scale * VF_E4M3_FACTOR));
        for (; k < end; k++)
            out[k] = op_e4m3_values[row[k]] * scale;
    }
}

static inline void kv_row_bf16(const uint8_t *row, uint32_t dim, float *out)
{
    for (uint32_t i = 0; i < dim; i++) {
        uint16_t bits;
        memcpy(&bits, row + 2ull * i, sizeof(bits));
        out[i] = op_f32_from_bf16(bits);
    }
}

/* Where the row lies, or decoded into tile [dim]. */
static inline const float *kv_row_at(const struct op_pages *pages, const uint32_t *blocks,
                                     uint32_t row, uint32_t dim, float *tile)
{
    const uint8_t *at = op_page_row(pages, blocks, row, dim);
    if (pages->type == KV_ROW_F32)
        return (const float *)(const void *)at;
    if (pages->type == KV_ROW_BF16)
        kv_row_bf16(at, dim, tile);
    else
        kv_row_fp8(at, dim, tile);
    return tile;
}

#endif

#endif
