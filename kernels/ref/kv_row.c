/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_kv_row.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"

#define INDEX_AMAX_MIN 1e-4f

static float largest(const float *x, uint32_t n)
{
    float amax = 0;
    for (uint32_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        amax = a > amax || isnan(a) ? a : amax;
        if (isnan(amax))
            return amax;
    }
    return amax;
}

static void store_bf16(const float *x, uint32_t dim, uint8_t *row)
{
    for (uint32_t i = 0; i < dim; i++) {
        uint16_t bits = op_bf16_from_f32(x[i]);
        memcpy(row + 2ull * i, &bits, sizeof(bits));
    }
}

static void store_group(const float *x, uint32_t n, float scale, uint8_t *codes, uint8_t *ret_scale)
{
    for (uint32_t i = 0; i < n; i++)
        codes[i] = op_e4m3_from_f32(x[i] / scale);
    memcpy(ret_scale, &scale, sizeof(scale));
}

static uint32_t group_of(uint32_t dim, uint32_t first)
{
    return dim - first < KV_ROW_GROUP ? dim - first : KV_ROW_GROUP;
}

void op_latent_row_store(enum kv_row type, const float *x, uint32_t dim, uint8_t *row)
{
    CHECK(type < KV_ROW_COUNT);
    if (type == KV_ROW_F32) {
        memcpy(row, x, dim * sizeof(float));
    } else if (type == KV_ROW_BF16) {
        store_bf16(x, dim, row);
    } else {
        for (uint32_t i = 0; i < dim; i += KV_ROW_GROUP) {
            uint32_t n = group_of(dim, i);
            float scale = largest(x + i, n) / OP_E4M3_MAX;
            scale = scale < FLT_MIN ? FLT_MIN : scale;
            store_group(x + i, n, scale, row + i, row + dim + i / KV_ROW_GROUP * sizeof(float));
        }
    }
}

void op_index_rotate_row(float *x, uint32_t dim)
{
    uint32_t run = dim & -dim;
    run = run < KV_ROW_GROUP ? run : KV_ROW_GROUP;
    float norm = (float)(1 / sqrt((double)run));
    for (float *v = x; v < x + dim; v += run) {
        for (uint32_t step = 1; step < run; step *= 2)
            for (uint32_t base = 0; base < run; base += 2 * step)
                for (uint32_t i = base; i < base + step; i++) {
                    float a = v[i], b = v[i + step];
                    v[i] = a + b;
                    v[i + step] = a - b;
                }
        for (uint32_t i = 0; i < run; i++)
            v[i] *= norm;
    }
}

static float power_of_two_scale(float amax)
{
    if (!isfinite(amax))
        return NAN;
    return op_f32_from_e8m0(op_e8m0_for_e4m3(amax > INDEX_AMAX_MIN ? amax : INDEX_AMAX_MIN));
}

void op_index_row_store(enum kv_row type, const float *x, uint32_t dim, uint8_t *row)
{
    CHECK(type < KV_ROW_COUNT && dim <= OP_INDEX_DIM_MAX);
    if (type != KV_ROW_FP8) {
        op_latent_row_store(type, x, dim, row);
        return;
    }
    float rotated[OP_INDEX_DIM_MAX];
    memcpy(rotated, x, dim * sizeof(float));
    op_index_rotate_row(rotated, dim);
    for (uint32_t i = 0; i < dim; i++)
        rotated[i] = op_f32_from_bf16(op_bf16_from_f32(rotated[i]));
    for (uint32_t i = 0; i < dim; i += KV_ROW_GROUP) {
        uint32_t n = group_of(dim, i);
        store_group(rotated + i, n, power_of_two_scale(largest(rotated + i, n)), row + i,
                    row + dim + i / KV_ROW_GROUP * sizeof(float));
    }
}

void op_kv_row_load(enum kv_row type, const uint8_t *row, uint32_t dim, float *ret_x)
{
    CHECK(type < KV_ROW_COUNT);
    if (type == KV_ROW_F32) {
        memcpy(ret_x, row, dim * sizeof(float));
    } else if (type == KV_ROW_BF16) {
        for (uint32_t i = 0; i < dim; i++) {
            uint16_t bits;
            memcpy(&bits, row + 2ull * i, sizeof(bits));
            ret_x[i] = op_f32_from_bf16(bits);
        }
    } else {
        for (uint32_t i = 0; i < dim; i += KV_ROW_GROUP) {
            float scale;
            uint32_t n = group_of(dim, i);
            memcpy(&scale, row + dim + i / KV_ROW_GROUP * sizeof(float), sizeof(scale));
            for (uint32_t k = i; k < i + n; k++)
                ret_x[k] = op_e4m3_values[row[k]] * scale;
        }
    }
}
