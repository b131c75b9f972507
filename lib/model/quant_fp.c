/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant.h"

#include <math.h>

#include "kernels/op_number.h"
#include "lib/base/check.h"

#define FP8_BLOCK    128u
#define MX_GROUP     32u
#define NV_GROUP     16u
#define NV_SCALE_MIN 0x1p-9f /* smallest E4M3 above 0 */

static float at(const struct quant_matrix *m, uint32_t out, uint32_t in)
{
    return m->w[in * m->in_stride + out * m->out_stride];
}

/* Largest magnitude in a rectangle that may reach over the edge. */
static float rectangle_max(const struct quant_matrix *m, uint32_t out_first, uint32_t out_count,
                           uint32_t in_first, uint32_t in_count)
{
    float top = 0;
    for (uint32_t o = out_first; o < m->out && o - out_first < out_count; o++)
        for (uint32_t i = in_first; i < m->in && i - in_first < in_count; i++)
            top = fmaxf(top, fabsf(at(m, o, i)));
    return top;
}

static bool is_finite(const struct quant_matrix *m)
{
    for (uint32_t o = 0; o < m->out; o++)
        for (uint32_t i = 0; i < m->in; i++)
            if (!isfinite(at(m, o, i)))
                return false;
    return true;
}

enum err quant_fp8(const struct quant_matrix *m, enum quant_fp8 kind, uint8_t *ret_codes,
                   float *ret_scales)
{
    uint32_t rows = kind == QUANT_FP8_CHANNEL ? 1 : FP8_BLOCK;
    uint32_t columns = kind == QUANT_FP8_BLOCK ? FP8_BLOCK : UINT32_MAX;
    if (kind == QUANT_FP8_TENSOR)
        rows = UINT32_MAX;
    if (!is_finite(m))
        return ERR_INVALID;
    uint32_t index = 0;
    for (uint64_t o = 0; o < m->out; o += rows)
        for (uint64_t i = 0; i < m->in; i += columns) {
            uint32_t out_first = (uint32_t)o, in_first = (uint32_t)i;
            float scale = rectangle_max(m, out_first, rows, in_first, columns) / OP_E4M3_MAX;
            scale = scale > 0 ? scale : 1;
            ret_scales[index++] = scale;
            for (uint32_t r = out_first; r < m->out && r - out_first < rows; r++)
                for (uint32_t c = in_first; c < m->in && c - in_first < columns; c++)
                    ret_codes[(uint64_t)r * m->in + c] = op_e4m3_from_f32(at(m, r, c) / scale);
        }
    return ERR_OK;
}

enum err quant_mxfp8(const struct quant_matrix *m, uint8_t *ret_codes, uint8_t *ret_scales)
{
    if (m->in % MX_GROUP != 0 || !is_finite(m))
        return ERR_INVALID;
    for (uint32_t o = 0; o < m->out; o++)
        for (uint32_t i = 0; i < m->in; i += MX_GROUP) {
            uint8_t scale = op_e8m0_for_e4m3(rectangle_max(m, o, 1, i, MX_GROUP));
            *ret_scales++ = scale;
            for (uint32_t k = 0; k < MX_GROUP; k++)
                ret_codes[(uint64_t)o * m->in + i + k] =
                    op_e4m3_from_f32(ldexpf(at(m, o, i + k), 127 - scale));
        }
    return ERR_OK;
}

/* E4M3 code of a group's scale, given what one unit of it is worth. */
static uint8_t group_scale(float top, float unit)
{
    if (top == 0)
        return op_e4m3_from_f32(1);
    float scale = top / OP_E2M1_MAX / unit;
    return op_e4m3_from_f32(fminf(fmaxf(scale, NV_SCALE_MIN), OP_E4M3_MAX));
}

enum err quant_nvfp4(const struct quant_matrix *m, bool global_divides, uint8_t *ret_codes,
                     uint8_t *ret_scales, float *ret_global)
{
    if (m->in % NV_GROUP != 0 || !is_finite(m))
        return ERR_INVALID;
    float top = rectangle_max(m, 0, m->out, 0, m->in);
    float range = OP_E2M1_MAX * OP_E4M3_MAX;
    /* A matrix of zeros, and one so small that its global scale leaves the normal f32. */
    if (!(top > 0x1p-100f))
        top = range;
    float global = global_divides ? range / top : top / range;
    float unit = global_divides ? 1 / global : global;
    *ret_global = global;
    for (uint32_t o = 0; o < m->out; o++)
        for (uint32_t i = 0; i < m->in; i += NV_GROUP) {
            uint8_t code = group_scale(rectangle_max(m, o, 1, i, NV_GROUP), unit);
            float scale = op_e4m3_values[code] * unit;
            *ret_scales++ = code;
            for (uint32_t k = 0; k < NV_GROUP; k += 2) {
                uint8_t low = op_e2m1_from_f32(at(m, o, i + k) / scale);
                uint8_t high = op_e2m1_from_f32(at(m, o, i + k + 1) / scale);
                *ret_codes++ = (uint8_t)(low | high << 4);
            }
        }
    return ERR_OK;
}
