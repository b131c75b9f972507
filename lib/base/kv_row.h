/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/kv_row.h - how a row of the KV cache is stored, and how many bytes it takes.
 *
 * Pure.  The one place that knows the size: the arena's layout and the ops both ask here.
 *   f32    dim floats
 *   bf16   dim values, rounded to nearest even
 *   fp8    dim E4M3 codes, then one f32 scale for each group of 128 (the last may be smaller)
 * A latent row of 512 takes 528 bytes in fp8, an index row of 128 takes 132. */
#ifndef LIB_BASE_KV_ROW_H
#define LIB_BASE_KV_ROW_H

#include <stdint.h>

enum kv_row { KV_ROW_F32, KV_ROW_BF16, KV_ROW_FP8, KV_ROW_COUNT };

#define KV_ROW_GROUP 128u

static inline uint64_t kv_row_bytes(enum kv_row type, uint32_t dim)
{
    if (type == KV_ROW_F32)
        return 4ull * dim;
    if (type == KV_ROW_BF16)
        return 2ull * dim;
    return dim + 4ull * (((uint64_t)dim + KV_ROW_GROUP - 1) / KV_ROW_GROUP);
}

#endif
