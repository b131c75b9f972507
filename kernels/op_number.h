/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_number.h - the small number formats: E4M3, E2M1, E8M0, and rounding to f16 and bf16.
 *
 * Pure.  Decoding is exact.  Encoding rounds to nearest, ties to even.  E4M3 is the variant
 * without infinity (0x7f and 0xff are NaN); it and E2M1 saturate, f16 and bf16 overflow to
 * infinity.  Subnormals are kept on both sides, a NaN stays a NaN. */
#ifndef KERNELS_OP_NUMBER_H
#define KERNELS_OP_NUMBER_H

#include <stdint.h>

#define OP_E4M3_MAX      448.0f
#define OP_E2M1_MAX      6.0f
#define OP_E8M0_NAN      255u
#define OP_E4M3_NAN_MASK 0x7fu /* code & mask == mask: NaN */

/* Values by code. */
extern const float op_e4m3_values[256];
extern const float op_e2m1_values[16];

float op_f32_from_e8m0(uint8_t code); /* 2^(code - 127); 255 is NaN */

uint8_t op_e4m3_from_f32(float value); /* NaN becomes 0x7f */
uint8_t op_e2m1_from_f32(float value); /* 4 bits; NaN becomes 7 or 15 */

/* Smallest exponent code whose scale lets E4M3 reach amax: 127 + ceil(log2(amax / 448)), at
 * least 0 and at most 254.  amax is finite and not negative. */
uint8_t op_e8m0_for_e4m3(float amax);

uint16_t op_f16_from_f32(float value);
uint16_t op_bf16_from_f32(float value);

#endif
