/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_number.h"

#include <math.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/base/check.h"

/* Eight mantissas of one exponent; unit is the weight of the last mantissa bit. */
#define E4M3_ROW(first, unit)                                                                      \
    (first) * (unit), ((first) + 1) * (unit), ((first) + 2) * (unit), ((first) + 3) * (unit),      \
        ((first) + 4) * (unit), ((first) + 5) * (unit), ((first) + 6) * (unit)
#define E4M3_FULL(first, unit) E4M3_ROW(first, unit), ((first) + 7) * (unit)
#define E4M3_HALF(s)                                                                               \
    E4M3_FULL(0.0f, s * 0x1p-9f), E4M3_FULL(8.0f, s * 0x1p-9f), E4M3_FULL(8.0f, s * 0x1p-8f),      \
        E4M3_FULL(8.0f, s * 0x1p-7f), E4M3_FULL(8.0f, s * 0x1p-6f), E4M3_FULL(8.0f, s * 0x1p-5f),  \
        E4M3_FULL(8.0f, s * 0x1p-4f), E4M3_FULL(8.0f, s * 0x1p-3f), E4M3_FULL(8.0f, s * 0x1p-2f),  \
        E4M3_FULL(8.0f, s * 0x1p-1f), E4M3_FULL(8.0f, s * 0x1p0f), E4M3_FULL(8.0f, s * 0x1p1f),    \
        E4M3_FULL(8.0f, s * 0x1p2f), E4M3_FULL(8.0f, s * 0x1p3f), E4M3_FULL(8.0f, s * 0x1p4f),     \
        E4M3_ROW(8.0f, s * 0x1p5f), NAN

const float op_e4m3_values[256] = {E4M3_HALF(1.0f), E4M3_HALF(-1.0f)};

const float op_e2m1_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

float op_f32_from_e8m0(uint8_t code)
{
    if (code == OP_E8M0_NAN)
        return NAN;
    /* 2^-127 lies below the normal f32 and needs its own bits. */
    return op_f32_from_bits(code == 0 ? 0x00400000u : (uint32_t)code << 23);
}

uint8_t op_e4m3_from_f32(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint8_t sign = (uint8_t)(bits >> 24) & 0x80u;
    if (magnitude > 0x7f800000u)
        return 0x7f;
    if (magnitude >= 0x43e00000u) /* 448 and all above */
        return sign | 0x7eu;
    if (magnitude < 0x3c800000u) { /* below 2^-6: count units of 2^-9, rounded by the adder */
        float units = op_f32_from_bits(magnitude) * 0x1p9f + 0x1p23f;
        return sign | (uint8_t)(bits_of(units) & 0xffu);
    }
    uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    uint32_t code = (rounded >> 20) - (120u << 3);
    return sign | (uint8_t)(code > 0x7eu ? 0x7eu : code);
}

uint8_t op_e2m1_from_f32(float value)
{
    /* A tie goes to the even code: the last code of a pair below belongs to the even side. */
    float v = fabsf(value);
    uint8_t code = 7;
    if (v <= 0.25f)
        code = 0;
    else if (v < 0.75f)
        code = 1;
    else if (v <= 1.25f)
        code = 2;
    else if (v < 1.75f)
        code = 3;
    else if (v <= 2.5f)
        code = 4;
    else if (v < 3.5f)
        code = 5;
    else if (v <= 5.0f)
        code = 6;
    return signbit(value) ? code | 8u : code;
}

uint8_t op_e8m0_for_e4m3(float amax)
{
    uint32_t bits = bits_of(amax);
    CHECK(bits < 0x7f800000u);
    /* 448 = 1.75 * 2^8; a mantissa up to 1.75 fits its own exponent, a larger one the next. */
    int32_t code = (int32_t)(bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
    return (uint8_t)(code < 0 ? 0 : code);
}

uint16_t op_f16_from_f32(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u)
        return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) /* 65520 and above */
        return sign | 0x7c00u;
    if (magnitude < 0x38800000u) { /* below 2^-14: units of 2^-24, rounded by the adder */
        float units = op_f32_from_bits(magnitude) * 0x1p24f + 0x1p23f;
        return sign | (uint16_t)(bits_of(units) & 0x7ffu);
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | (uint16_t)((rounded >> 13) - (112u << 10));
}

uint16_t op_bf16_from_f32(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16) | 0x40u;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
