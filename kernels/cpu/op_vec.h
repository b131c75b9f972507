/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_vec.h - f32 vectors of the instruction set a file is compiled for.
 *
 * Pure.  VF_LANES is 8 (AVX2), 16 (AVX-512) or 4 (NEON); arithmetic operators work on vf as they
 * do on float.  Sums of lanes are formed in one fixed order.  Compiled once per instruction set in
 * a library of its own: never include this where the code must run elsewhere. */
#ifndef KERNELS_CPU_OP_VEC_H
#define KERNELS_CPU_OP_VEC_H

#ifdef OP_ISA /* nothing where no instruction set was chosen */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VF_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define VF_LANES 16
#define VF_ROWS  6 /* rows of a tile of dot products; VF_ROWS * 4 sums stay in registers */
#elif defined(__AVX2__)
#define VF_LANES 8
#define VF_ROWS  3
#elif defined(__aarch64__)
#define VF_LANES 4
#define VF_ROWS  6
#else
#error "no vector instruction set"
#endif

typedef float vf __attribute__((vector_size(VF_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(VF_LANES * 4)));
typedef float vf4 __attribute__((vector_size(16)));

VF_INLINE vf vf_zero(void)
{
    return (vf){0};
}

VF_INLINE vf vf_all(float x)
{
    return x - (vf){0};
}

VF_INLINE vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof(v));
    return v;
}

VF_INLINE void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof(v));
}

/* The first n < VF_LANES elements, the rest zero. */
VF_INLINE vf vf_load_n(const float *p, uint32_t n)
{
    float lane[VF_LANES] = {0};
    for (uint32_t i = 0; i < n; i++)
        lane[i] = p[i];
    return vf_load(lane);
}

VF_INLINE void vf_store_n(float *p, vf v, uint32_t n)
{
    float lane[VF_LANES];
    vf_store(lane, v);
    for (uint32_t i = 0; i < n; i++)
        p[i] = lane[i];
}

/* vf_from_e4m3 gives the values of E4M3 codes, not NaN, over VF_E4M3_FACTOR, exact: shifted into
 * place a code is an f16 whose exponent is 8 too small.  Scales times the factor must stay finite.
 * NOTE: placed in an f32 likewise, with an exponent 120 too small, a subnormal code would become a
 * subnormal f32, which halves the pace of an AMD core as soon as it is multiplied. */
#define VF_E4M3_FACTOR_LOG2    8u
#define VF_E4M3_SCALE_MAX_LOG2 100u
#define VF_E4M3_LOW_LOG2       120u
#define VF_E4M3_FACTOR         256.0f
#define VF_E4M3_SCALE_MAX      0x1p100f

#if defined(__AVX512F__)

VF_INLINE vf vf_fma(vf a, vf b, vf c) /* a * b + c, one rounding */
{
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

VF_INLINE vf vf_from_bf16(const uint16_t *p)
{
    __m256i half = _mm256_loadu_si256((const void *)p);
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

VF_INLINE vf vf_from_f16(const uint16_t *p)
{
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}

VF_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
    __m256i bits = _mm256_slli_epi16(wide, 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((int16_t)0xbf80)));
}

/* Over 2^VF_E4M3_LOW_LOG2 instead, one instruction less: placed in an f32 a code has an exponent
 * 120 too small.  NOTE: subnormals may be multiplied by a factor that makes them normal, at no
 * cost on Zen 5; in a fused multiply-add they take many times as long. */
VF_INLINE vf vf_from_e4m3_low(const uint8_t *p)
{
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)), 20);
    return (vf)_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0x87f00000)));
}

VF_INLINE vf vf_from_i8(const int8_t *p)
{
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}

/* The smaller, larger; a NaN in x stays. */
VF_INLINE vf vf_min(vf x, vf bound)
{
    return (vf)_mm512_min_ps((__m512)bound, (__m512)x);
}

VF_INLINE vf vf_max(vf x, vf bound)
{
    return (vf)_mm512_max_ps((__m512)bound, (__m512)x);
}

VF_INLINE vi vf_to_int(vf x) /* nearest */
{
    return (vi)_mm512_cvtps_epi32((__m512)x);
}

VF_INLINE vf vf_from_int(vi x)
{
    return (vf)_mm512_cvtepi32_ps((__m512i)x);
}

VF_INLINE __m256 vf_fold(vf x)
{
    __m256 low = _mm512_castps512_ps256((__m512)x);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1));
    return _mm256_add_ps(low, high);
}

#elif defined(__AVX2__)

VF_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

VF_INLINE vf vf_from_bf16(const uint16_t *p)
{
    __m128i half = _mm_loadu_si128((const void *)p);
    return (vf)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

VF_INLINE vf vf_from_f16(const uint16_t *p)
{
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
}

VF_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)p));
    __m128i bits = _mm_slli_epi16(wide, 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16((int16_t)0xbf80)));
}

VF_INLINE vf vf_from_i8(const int8_t *p)
{
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}

VF_INLINE vf vf_min(vf x, vf bound)
{
    return (vf)_mm256_min_ps((__m256)bound, (__m256)x);
}

VF_INLINE vf vf_max(vf x, vf bound)
{
    return (vf)_mm256_max_ps((__m256)bound, (__m256)x);
}

VF_INLINE vi vf_to_int(vf x)
{
    return (vi)_mm256_cvtps_epi32((__m256)x);
}

VF_INLINE vf vf_from_int(vi x)
{
    return (vf)_mm256_cvtepi32_ps((__m256i)x);
}

VF_INLINE __m256 vf_fold(vf x)
{
    return (__m256)x;
}

#else

VF_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

VF_INLINE vf vf_from_bf16(const uint16_t *p)
{
    return (vf)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

VF_INLINE vf vf_from_f16(const uint16_t *p)
{
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

VF_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof(four));
    uint16x4_t high = vshl_n_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))), 8);
    int16x4_t half =
        vand_s16(vshr_n_s16(vreinterpret_s16_u16(high), 1), vdup_n_s16((int16_t)0xbf80));
    return (vf)vcvt_f32_f16(vreinterpret_f16_s16(half));
}

VF_INLINE vf vf_from_i8(const int8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof(four));
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}

VF_INLINE vf vf_min(vf x, vf bound)
{
    return (vf)vminq_f32((float32x4_t)x, (float32x4_t)bound);
}

VF_INLINE vf vf_max(vf x, vf bound)
{
    return (vf)vmaxq_f32((float32x4_t)x, (float32x4_t)bound);
}

VF_INLINE vi vf_to_int(vf x)
{
    return (vi)vcvtnq_s32_f32((float32x4_t)x);
}

VF_INLINE vf vf_from_int(vi x)
{
    return (vf)vcvtq_f32_s32((int32x4_t)x);
}

#endif

/* 1 if one of n bytes, a multiple of 32, is an E4M3 NaN: all bits but the sign set. */
VF_INLINE int bytes_have_nan(const uint8_t *p, uint32_t n)
{
#if defined(__aarch64__)
    uint8x16_t mask = vdupq_n_u8(0x7f), most = vdupq_n_u8(0);
    for (uint32_t i = 0; i < n; i += 16)
        most = vmaxq_u8(most, vandq_u8(vld1q_u8(p + i), mask));
    return vmaxvq_u8(most) == 0x7f;
#else
    __m256i mask = _mm256_set1_epi8(0x7f), most = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += 32)
        most = _mm256_max_epu8(most,
                               _mm256_and_si256(_mm256_loadu_si256((const void *)(p + i)), mask));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, mask)) != 0;
#endif
}

/* The lane sums of four vectors, each formed in the same order. */
VF_INLINE vf4 vf_sum4(vf a, vf b, vf c, vf d)
{
#if defined(__aarch64__)
    float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b);
    return (vf4)vpaddq_f32(ab, vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
    __m256 ab = _mm256_hadd_ps(vf_fold(a), vf_fold(b)), cd = _mm256_hadd_ps(vf_fold(c), vf_fold(d));
    __m256 all = _mm256_hadd_ps(ab, cd);
    return (vf4)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#endif
}

VF_INLINE float vf_sum(vf a)
{
    return vf_sum4(a, a, a, a)[0];
}

#if VF_LANES == 16
/* The even lanes of a, then those of b; the odd ones. */
#define VF_EVEN(a, b)                                                                              \
    __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define VF_ODD(a, b)                                                                               \
    __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#endif

/* Lane i of the result is lane i ^ STEP of x. */
#if VF_LANES == 16
#define VF_SWAP_(x, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                \
    __builtin_shufflevector(x, x, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
#define VF_SWAP1(x) VF_SWAP_(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define VF_SWAP2(x) VF_SWAP_(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define VF_SWAP4(x) VF_SWAP_(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define VF_SWAP8(x) VF_SWAP_(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#elif VF_LANES == 8
#define VF_SWAP1(x) __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#define VF_SWAP2(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
#define VF_SWAP4(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#else
#define VF_SWAP1(x) __builtin_shufflevector(x, x, 1, 0, 3, 2)
#define VF_SWAP2(x) __builtin_shufflevector(x, x, 2, 3, 0, 1)
#endif

/* Lane i of x with the sign turned where i has the bit `step`. */
VF_INLINE vf vf_turn(vf x, uint32_t step)
{
    float sign[VF_LANES];
    for (uint32_t i = 0; i < VF_LANES; i++)
        sign[i] = (i & step) != 0 ? -1.0f : 1.0f;
    return x * vf_load(sign);
}

VF_INLINE vf vf_power_of_two(vi n) /* -126 <= n <= 127 */
{
    vi bits = (n + 127) << 23;
    vf v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}

/* e^x within 2 units of the last place; 0 and infinity where they belong, NaN stays.
 * x = n ln 2 + r with |r| <= ln 2 / 2; 2^n goes in two halves, as it may be out of range. */
VF_INLINE vf vf_exp(vf x)
{
    x = vf_max(vf_min(x, vf_all(89.0f)), vf_all(-104.0f));
    vi n = vf_to_int(x * 1.44269504f);
    vf whole = vf_from_int(n);
    vf r = vf_fma(whole, vf_all(-0.693359375f), x);
    r = vf_fma(whole, vf_all(2.12194440e-4f), r);
    vf p = vf_all(1.0f / 5040);
    p = vf_fma(p, r, vf_all(1.0f / 720));
    p = vf_fma(p, r, vf_all(1.0f / 120));
    p = vf_fma(p, r, vf_all(1.0f / 24));
    p = vf_fma(p, r, vf_all(1.0f / 6));
    p = vf_fma(p, r, vf_all(0.5f));
    p = vf_fma(p, r, vf_all(1.0f));
    p = vf_fma(p, r, vf_all(1.0f));
    vi half = n >> 1;
    return p * vf_power_of_two(half) * vf_power_of_two(n - half);
}

VF_INLINE vf vf_sigmoid(vf x)
{
    return 1.0f / (1.0f + vf_exp(-x));
}

/* Calls BODY(i, n) for every whole vector (n == VF_LANES) and once for what is left. */
#define VF_EACH(count, i, n)                                                                       \
    for (uint32_t i = 0, n; i < (count) && (n = (count)-i < VF_LANES ? (count)-i : VF_LANES);      \
         i += VF_LANES)

VF_INLINE vf vf_get(const float *p, uint32_t n)
{
    return n == VF_LANES ? vf_load(p) : vf_load_n(p, n);
}

VF_INLINE void vf_put(float *p, vf v, uint32_t n)
{
    if (n == VF_LANES)
        vf_store(p, v);
    else
        vf_store_n(p, v, n);
}

#endif

#endif
