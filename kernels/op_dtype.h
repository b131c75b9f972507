/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_dtype.h - exact widening of bf16 and f16 to f32.
 *
 * Pure.  Both conversions are exact, subnormals, infinities and NaN payloads included. */
#ifndef KERNELS_OP_DTYPE_H
#define KERNELS_OP_DTYPE_H

#include <stdint.h>
#include <string.h>

#include "kernels/op_types.h"

static inline float op_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float op_f32_from_bf16(uint16_t bits)
{
    return op_f32_from_bits((uint32_t)bits << 16);
}

static inline float op_f32_from_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 31u;
    uint32_t fraction = bits & 1023u;
    if (exponent == 31)
        return op_f32_from_bits(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0)
        return op_f32_from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
    float magnitude = (float)fraction * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
}

static inline uint32_t op_dtype_bytes(enum op_dtype dtype)
{
    return dtype == OP_F32 ? 4 : 2;
}

/* Widens count elements that begin at element `first` of the weight. */
static inline void op_widen(const struct op_weight *w, uint64_t first, uint32_t count, float *out)
{
    if (w->dtype == OP_F32) {
        memcpy(out, (const float *)w->data + first, (uint64_t)count * sizeof(float));
        return;
    }
    const uint16_t *in = (const uint16_t *)w->data + first;
    for (uint32_t i = 0; i < count; i++)
        out[i] = w->dtype == OP_BF16 ? op_f32_from_bf16(in[i]) : op_f32_from_f16(in[i]);
}

static inline float op_weight_at(const struct op_weight *w, uint64_t index)
{
    if (w->dtype == OP_F32)
        return ((const float *)w->data)[index];
    uint16_t bits = ((const uint16_t *)w->data)[index];
    return w->dtype == OP_BF16 ? op_f32_from_bf16(bits) : op_f32_from_f16(bits);
}

#endif
