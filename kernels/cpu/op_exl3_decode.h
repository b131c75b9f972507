/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_exl3_decode.h - a tile of EXL3 to f32, exact, in the tile's own order.
 *
 * Inner part of op_exl3_fast.c.  Whole numbers of bits go 32 weights at a time where there are
 * 512-bit vectors, the usual four bits 16 at a time with AVX2; the rest by the reference's
 * states. */
#ifndef KERNELS_CPU_OP_EXL3_DECODE_H
#define KERNELS_CPU_OP_EXL3_DECODE_H

#include <string.h>

#include "kernels/cpu/op_vec.h"
#include "kernels/op_exl3.h"

#ifdef OP_ISA

typedef uint32_t vu __attribute__((vector_size(VF_LANES * 4)));

VF_INLINE vu bits_of(vf x)
{
    vu v;
    memcpy(&v, &x, sizeof(v));
    return v;
}

VF_INLINE vf float_of(vu x)
{
    vf v;
    memcpy(&v, &x, sizeof(v));
    return v;
}

/* See op_exl3_value; the same in lanes. */
VF_INLINE vf round_to_f16(vf x)
{
    vu bits = bits_of(x);
    bits += 0xfffu + ((bits >> 13) & 1u);
    return float_of(bits & 0xffffe000u);
}

VF_INLINE vf half_value(vu bits)
{
    return float_of((bits & 0x8000u) << 16 | ((bits & 0x7fffu) + (112u << 10)) << 13);
}

VF_INLINE vf values_of(vu states, enum op_codebook codebook)
{
    if (codebook == OP_CODEBOOK_MUL1) {
        vu x = states * OP_EXL3_MARKER_MUL1;
        vu sum = (x & 0xffu) + (x >> 8 & 0xffu) + (x >> 16 & 0xffu) + (x >> 24);
        vi whole;
        memcpy(&whole, &sum, sizeof(whole));
        return round_to_f16(vf_from_int(whole + 1024) * 0.00676727294921875f - 10.3828125f);
    }
    vu x =
        codebook == OP_CODEBOOK_MCG ? states * OP_EXL3_MARKER_MCG : states * 89226354u + 64248484u;
    vu y = (x & 0x8fff8fffu) ^ 0x3b603b60u;
    return round_to_f16(half_value(y & 0xffffu) + half_value(y >> 16));
}

#if VF_LANES == 16

/* How 32 states come out of the words that hold them and the one before.  With 16-bit units in the
 * order of the ring, a state is the end of one unit and the beginning of the next. */
struct exl3_windows {
    __m512i first, second; /* which units */
    __m512i left, right;   /* shifts */
};

VF_INLINE void windows_make(uint32_t half_bits, struct exl3_windows *w)
{
    uint16_t first[32], second[32], left[32], right[32];
    for (uint32_t t = 0; t < 32; t++) {
        uint32_t begin = 16 + (t + 1) * half_bits / 2, unit = begin / 16;
        first[t] = (uint16_t)(unit ^ 1); /* the upper half of a word comes first */
        second[t] = (uint16_t)((unit + 1) ^ 1);
        left[t] = (uint16_t)(begin % 16);
        right[t] = (uint16_t)(16 - begin % 16);
    }
    w->first = _mm512_loadu_si512(first);
    w->second = _mm512_loadu_si512(second);
    w->left = _mm512_loadu_si512(left);
    w->right = _mm512_loadu_si512(right);
}

/* States 32 * group and on; bits: of a weight, a whole number.  Reads nothing beyond the tile. */
VF_INLINE __m512i states32(const struct exl3_windows *w, const uint8_t *tile, uint32_t bits,
                           uint32_t group)
{
    __m512i words;
    if (group == 0) { /* the word before the first is the last */
        int32_t last;
        memcpy(&last, tile + 4 * (8 * bits - 1), sizeof(last));
        words = _mm512_maskz_loadu_epi32((__mmask16)((1u << bits) - 1), tile);
        words = _mm512_alignr_epi32(words, _mm512_set1_epi32(last), 15);
    } else {
        words =
            _mm512_maskz_loadu_epi32((__mmask16)((2u << bits) - 1), tile + 4 * (group * bits - 1));
    }
    __m512i a = _mm512_sllv_epi16(_mm512_permutexvar_epi16(w->first, words), w->left);
    __m512i b = _mm512_srlv_epi16(_mm512_permutexvar_epi16(w->second, words), w->right);
    return _mm512_or_si512(a, b);
}

VF_INLINE vf mcg_sum(__m256i y0, __m256i y1)
{
    __m512 sum = _mm512_add_ps(_mm512_cvtph_ps(y0), _mm512_cvtph_ps(y1));
    return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* The products of mcg in 16-bit halves: the codebook's two f16 are those of x, masked. */
VF_INLINE void mcg_values32(__m512i s, float *out)
{
    const __m512i low = _mm512_set1_epi16((short)(OP_EXL3_MARKER_MCG & 0xffff));
    const __m512i high = _mm512_set1_epi16((short)(OP_EXL3_MARKER_MCG >> 16));
    const __m512i mask = _mm512_set1_epi16((short)0x8fff), flip = _mm512_set1_epi16(0x3b60);
    __m512i x0 = _mm512_mullo_epi16(s, low);
    __m512i x1 = _mm512_add_epi16(_mm512_mulhi_epu16(s, low), _mm512_mullo_epi16(s, high));
    __m512i y0 = _mm512_xor_si512(_mm512_and_si512(x0, mask), flip);
    __m512i y1 = _mm512_xor_si512(_mm512_and_si512(x1, mask), flip);
    vf_store(out, mcg_sum(_mm512_castsi512_si256(y0), _mm512_castsi512_si256(y1)));
    vf_store(out + 16, mcg_sum(_mm512_extracti64x4_epi64(y0, 1), _mm512_extracti64x4_epi64(y1, 1)));
}

VF_INLINE void values32(__m512i s, enum op_codebook codebook, float *out)
{
    __m512i half[2] = {_mm512_cvtepu16_epi32(_mm512_castsi512_si256(s)),
                       _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(s, 1))};
    vf_store(out, values_of((vu)half[0], codebook));
    vf_store(out + 16, values_of((vu)half[1], codebook));
}

static void decode_whole_bits(const struct op_quantised *w, const struct exl3_windows *windows,
                              const uint8_t *tile, float *out)
{
    uint32_t bits = w->half_bits / 2;
    if (w->codebook == OP_CODEBOOK_MCG) {
        for (uint32_t g = 0; g < 8; g++)
            mcg_values32(states32(windows, tile, bits, g), out + 32 * g);
        return;
    }
    for (uint32_t g = 0; g < 8; g++)
        values32(states32(windows, tile, bits, g), w->codebook, out + 32 * g);
}

#elif !defined(__aarch64__)

/* Four bits and mcg, sixteen weights at a time in 16-bit lanes.
 * NOTE: with bits counted from the word before the two that end the windows, window j begins at bit
 * 20 + 4 j: on a byte for odd j, inside one for even j, where three bytes are needed. */
static void tile_mcg4(const uint8_t *tile, float *out)
{
    uint32_t words[36]; /* the last word, then all, then room for a wide load */
    memcpy(words + 1, tile, 128);
    words[0] = words[32];
    memset(words + 33, 0, 12);
    const __m256i first = _mm256_setr_epi8(0, 1, 7, 0, 7, 0, 6, 7, 6, 7, 5, 6, 5, 6, 4, 5, 4, 5, 11,
                                           4, 11, 4, 10, 11, 10, 11, 9, 10, 9, 10, 8, 9);
    const __m256i third =
        _mm256_setr_epi8(7, -1, -1, -1, 6, -1, -1, -1, 5, -1, -1, -1, 4, -1, -1, -1, 11, -1, -1, -1,
                         10, -1, -1, -1, 9, -1, -1, -1, 8, -1, -1, -1);
    const __m256i left = _mm256_set1_epi32(0x00010010), right = _mm256_set1_epi32(0x00001000);
    const __m256i low = _mm256_set1_epi16(OP_EXL3_MARKER_MCG & 0xffff);
    const __m256i high = _mm256_set1_epi16((short)(OP_EXL3_MARKER_MCG >> 16));
    const __m256i mask = _mm256_set1_epi16((short)0x8fff), flip = _mm256_set1_epi16(0x3b60);
#pragma GCC unroll 2
    for (int m = 0; m < 16; m++) {
        __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(words + 2 * m)));
        __m256i a = _mm256_mullo_epi16(_mm256_shuffle_epi8(v, first), left);
        __m256i b = _mm256_mulhi_epu16(_mm256_shuffle_epi8(v, third), right);
        __m256i s = _mm256_or_si256(a, b);
        __m256i x0 = _mm256_mullo_epi16(s, low);
        __m256i x1 = _mm256_add_epi16(_mm256_mulhi_epu16(s, low), _mm256_mullo_epi16(s, high));
        __m256i y0 = _mm256_xor_si256(_mm256_and_si256(x0, mask), flip);
        __m256i y1 = _mm256_xor_si256(_mm256_and_si256(x1, mask), flip);
        __m256 d0 = _mm256_add_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(y0)),
                                  _mm256_cvtph_ps(_mm256_castsi256_si128(y1)));
        __m256 d1 = _mm256_add_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(y0, 1)),
                                  _mm256_cvtph_ps(_mm256_extracti128_si256(y1, 1)));
        __m128i h0 = _mm256_cvtps_ph(d0, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m128i h1 = _mm256_cvtps_ph(d1, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_ps(out + 16 * m, _mm256_cvtph_ps(h0));
        _mm256_storeu_ps(out + 16 * m + 8, _mm256_cvtph_ps(h1));
    }
}

#endif

/* What a matrix's tiles share. */
struct exl3_decoder {
    const struct op_quantised *w;
#if VF_LANES == 16
    struct exl3_windows windows;
#endif
};

VF_INLINE void decoder_make(const struct op_quantised *w, struct exl3_decoder *d)
{
    d->w = w;
#if VF_LANES == 16
    windows_make(w->half_bits, &d->windows);
#endif
}

/* The tile's 256 weights in its own order, exact. */
static void decode_tile(const struct exl3_decoder *d, const uint8_t *tile, float *out)
{
    const struct op_quantised *w = d->w;
#if VF_LANES == 16
    if (w->half_bits % 2 == 0) {
        decode_whole_bits(w, &d->windows, tile, out);
        return;
    }
#elif !defined(__aarch64__)
    if (w->half_bits == 8 && w->codebook == OP_CODEBOOK_MCG) {
        tile_mcg4(tile, out);
        return;
    }
#endif
    uint16_t states[OP_EXL3_TILE_WEIGHTS];
    op_exl3_states(tile, w->half_bits, states);
    for (uint32_t t = 0; t < OP_EXL3_TILE_WEIGHTS; t += VF_LANES) {
        vu wide;
        for (uint32_t i = 0; i < VF_LANES; i++)
            wide[i] = states[t + i];
        vf_store(out + t, values_of(wide, w->codebook));
    }
}

#endif

#endif
