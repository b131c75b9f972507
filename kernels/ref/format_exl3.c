/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_exl3.h"

#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/base/check.h"

#define EXL3_WORDS_MAX 64u /* 32-bit words of a tile at 8 bits */

bool op_exl3_rate_exists(uint32_t half_bits, enum op_codebook codebook)
{
    if (half_bits % 2 == 0)
        return half_bits >= 2 && half_bits <= 16;
    return codebook == OP_CODEBOOK_MUL1 && half_bits >= 3 && half_bits <= 7;
}

void op_exl3_states(const uint8_t *tile, uint32_t half_bits, uint16_t ret_states[256])
{
    CHECK(half_bits >= 2 && half_bits <= 16);
    uint32_t words[EXL3_WORDS_MAX + 1];
    uint32_t word_count = 4 * half_bits, ring = 128 * half_bits;
    for (uint32_t i = 0; i < word_count; i++) {
        const uint8_t *b = tile + 4 * i;
        words[i] = b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    }
    words[word_count] = words[0];
    for (uint32_t t = 0; t < 256; t++) {
        uint32_t begin = op_exl3_ring_end(half_bits, t) + ring - 16;
        if (begin >= ring)
            begin -= ring;
        uint64_t pair = (uint64_t)words[begin / 32] << 32 | words[begin / 32 + 1];
        ret_states[t] = (uint16_t)(pair >> (48 - begin % 32));
    }
}

void op_exl3_pack(const uint16_t states[256], uint32_t half_bits, uint8_t *ret_tile)
{
    CHECK(half_bits >= 2 && half_bits <= 16);
    uint64_t pending = 0;
    uint32_t pending_bits = 0, ring_bits = 0;
    for (uint32_t t = 0; t < 256; t++) {
        uint32_t bits = op_exl3_ring_end(half_bits, t) - ring_bits;
        ring_bits += bits;
        pending = pending << bits | (states[t] & ((1u << bits) - 1));
        pending_bits += bits;
        if (pending_bits < 32)
            continue;
        pending_bits -= 32;
        uint32_t word = (uint32_t)(pending >> pending_bits);
        for (uint32_t i = 0; i < 4; i++)
            *ret_tile++ = (uint8_t)(word >> (8 * i));
    }
    CHECK(pending_bits == 0);
}

/* Nearest f16 of a sum that is zero or of magnitude 2^-13 to 4: always normal in f16. */
static float round_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    bits += 0xfffu + ((bits >> 13) & 1u);
    return op_f32_from_bits(bits & 0xffffe000u);
}

/* Half of a masked product: exponent field 12 to 15, so normal. */
static float half_value(uint32_t bits)
{
    return op_f32_from_bits((bits & 0x8000u) << 16 | ((bits & 0x7fffu) + (112u << 10)) << 13);
}

float op_exl3_value(enum op_codebook codebook, uint16_t state)
{
    if (codebook == OP_CODEBOOK_MUL1) {
        uint32_t x = state * OP_EXL3_MARKER_MUL1;
        uint32_t sum = (x & 0xff) + (x >> 8 & 0xff) + (x >> 16 & 0xff) + (x >> 24);
        /* Product and sum are exact in f32, so one rounding remains, as of a fused f16 FMA. */
        return round_to_f16((float)(1024 + sum) * 0.00676727294921875f - 10.3828125f);
    }
    uint32_t x =
        codebook == OP_CODEBOOK_MCG ? state * OP_EXL3_MARKER_MCG : state * 89226354u + 64248484u;
    uint32_t y = (x & 0x8fff8fffu) ^ 0x3b603b60u;
    return round_to_f16(half_value(y & 0xffffu) + half_value(y >> 16));
}

void op_exl3_tile(const struct op_quantised *w, uint32_t tile_row, uint32_t tile_column,
                  float *ret_values, uint64_t stride)
{
    uint16_t states[256];
    uint64_t tile_bytes = 2 * op_exl3_tile_u16(w->half_bits);
    op_exl3_states(w->codes + tile_row * w->row_bytes + tile_column * tile_bytes, w->half_bits,
                   states);
    for (uint32_t t = 0; t < 256; t++)
        ret_values[op_exl3_row_of(t) * stride + op_exl3_column_of(t)] =
            op_exl3_value(w->codebook, states[t]);
}

static uint16_t u16_at(const void *words, uint32_t index)
{
    uint16_t word;
    memcpy(&word, (const uint8_t *)words + 2ull * index, sizeof(word));
    return word;
}

static double side_scale(const void *scale, const void *signs, uint32_t index)
{
    if (scale != NULL)
        return op_f32_from_f16(u16_at(scale, index));
    CHECK(signs != NULL);
    return (u16_at(signs, index / 16) >> (index % 16) & 1u) != 0 ? -1.0 : 1.0;
}

double op_exl3_in_scale(const struct op_quantised *w, uint32_t i)
{
    return side_scale(w->suh, w->su, i);
}

double op_exl3_out_scale(const struct op_quantised *w, uint32_t o)
{
    return side_scale(w->svh, w->sv, o);
}

void op_hadamard128(double v[128])
{
    for (uint32_t step = 1; step < 128; step *= 2)
        for (uint32_t base = 0; base < 128; base += 2 * step)
            for (uint32_t i = base; i < base + step; i++) {
                double a = v[i], b = v[i + step];
                v[i] = a + b;
                v[i + step] = a - b;
            }
}
