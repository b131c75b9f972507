/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of FP8, MXFP8, MXFP4 and NVFP4 to f32, compiled once per instruction set. */
#include "kernels/cpu/op_quant_fast.h"

#include <stdbool.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"

#define E4M3_FACTOR  VF_E4M3_FACTOR
#define SCALE_MAX    VF_E4M3_SCALE_MAX
#define MX_SCALE_END (127u + VF_E4M3_SCALE_MAX_LOG2) /* first E8M0 code that SCALE_MAX rules out */
#define FP4_SCALES   (DOT_BLOCK / 16)                /* of a piece of a row, one for 16 columns */

/* True if a code of the run is NaN: such a row takes the slow way. */
static bool has_nan(const uint8_t *codes, uint32_t n)
{
    int found = bytes_have_nan(codes, n / 32 * 32);
    for (uint32_t i = n / 32 * 32; i < n; i++)
        found |= (codes[i] & OP_E4M3_NAN_MASK) == OP_E4M3_NAN_MASK;
    return found != 0;
}

VF_INLINE void e4m3_run32(const uint8_t *codes, float scale, float *out)
{
    vf factor = vf_all(scale * E4M3_FACTOR);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 32; i += VF_LANES)
        vf_store(out + i, vf_from_e4m3(codes + i) * factor);
}

static void e4m3_run(const uint8_t *codes, uint32_t n, float scale, float *out)
{
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32)
        e4m3_run32(codes + i, scale, out + i);
    for (; i < n; i++)
        out[i] = op_e4m3_values[codes[i]] * scale;
}

static inline float power_of_two(uint8_t code)
{
    return code != 0 && code != OP_E8M0_NAN ? op_f32_from_bits((uint32_t)code << 23)
                                            : op_f32_from_e8m0(code);
}

/* One scale for each `shared` columns, rows by themselves, first a multiple of `shared`. */
static bool plain_scales(const struct op_quantised *w, uint32_t first, uint32_t shared)
{
    const struct op_scales *s = &w->scales;
    return s->rows_shared == 1 && s->columns_shared == shared && s->row_phase == 0 &&
           s->column_phase == 0 && first % shared == 0;
}

static bool mxfp8_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                      float *out)
{
    const uint8_t *codes = w->codes + row * w->row_bytes + first;
    if (!plain_scales(w, first, 32) || w->scales.dtype != OP_SCALE_E8M0 ||
        (!w->no_nan && has_nan(codes, n)))
        return false;
    const uint8_t *scales = (const uint8_t *)w->scales.data + row * w->scales.stride + first / 32;
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        float scale = power_of_two(scales[i / 32]);
        if (!(scale < SCALE_MAX))
            return false;
        e4m3_run32(codes + i, scale, out + i);
    }
    if (i < n)
        e4m3_run(codes + i, n - i, power_of_two(scales[i / 32]), out + i);
    return true;
}

static bool fp8_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                    float *out)
{
    const uint8_t *codes = w->codes + row * w->row_bytes + first;
    if (!w->no_nan && has_nan(codes, n))
        return false;
    uint32_t end = first;
    for (uint32_t i = 0, count; i < n; i += count) {
        float scale = op_quantised_scale(w, row, end, &end);
        count = end - (first + i) < n - i ? end - (first + i) : n - i;
        if (!(scale < SCALE_MAX && scale > -SCALE_MAX))
            return false;
        e4m3_run(codes + i, count, scale, out + i);
    }
    return true;
}

/* Twice the values of 32 nibbles, low one first. */
#if VF_LANES == 8
/* NOTE: every value is a bf16, whose two bytes come from one table each.  The codes are spread so
 * that unpacking inside the halves of a register leaves eight that follow each other. */
VF_INLINE void nibbles32(const uint8_t *codes, vf out[4])
{
    const __m256i spread =
        _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 2, -1, 3, -1, 6,
                         -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, 0, 64, -128, -64, 0, 64, 0, -128, 0, 64, -128, -64, 0, 64));
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 63, 64, 64, 64, 64, 65, 65, -128, -65, -64, -64, -64, -64, -63, -63));
    const __m256i zero = _mm256_setzero_si256();
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)codes));
    v = _mm256_shuffle_epi8(v, spread);
    v = _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
    __m256i a = _mm256_shuffle_epi8(low, v), b = _mm256_shuffle_epi8(high, v);
    __m256i first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
    out[0] = (vf)_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first));
    out[1] = (vf)_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first));
    out[2] = (vf)_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second));
    out[3] = (vf)_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second));
}
#elif VF_LANES == 16
/* NOTE: the permutation looks at the low four bits of each lane alone, so that a byte need only
 * stand in both halves of eight, four bits higher in the upper. */
VF_INLINE void nibbles32(const uint8_t *codes, vf out[2])
{
    const __m512 table =
        _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512i v = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)(codes + 8 * i)));
        v = _mm512_or_si512(v, _mm512_slli_epi64(v, 28));
        out[i] = (vf)_mm512_permutexvar_ps(v, table);
    }
}
#else
VF_INLINE void nibbles32(const uint8_t *codes, vf out[32 / VF_LANES])
{
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    int8_t values[32];
    int8x16_t table = vld1q_s8(doubled);
    uint8x16_t v = vld1q_u8(codes);
    int8x16_t low = vqtbl1q_s8(table, vandq_u8(v, vdupq_n_u8(15)));
    int8x16_t high = vqtbl1q_s8(table, vshrq_n_u8(v, 4));
    vst1q_s8(values, vzip1q_s8(low, high));
    vst1q_s8(values + 16, vzip2q_s8(low, high));
#pragma GCC unroll 8
    for (int i = 0; i < 32 / VF_LANES; i++)
        out[i] = vf_from_i8(values + i * VF_LANES);
}
#endif

/* The scales of n columns, a multiple of 32, for 16 columns each, times a half. */
VF_INLINE void fp4_scales(const struct op_quantised *w, const uint8_t *scales, uint32_t n,
                          float *out)
{
    if (w->format == OP_FORMAT_MXFP4) {
        for (uint32_t i = 0; i < n / 32; i++)
            out[2 * i] = out[2 * i + 1] = power_of_two(scales[i]) * 0.5f;
        return;
    }
    float global = w->global_divides ? 0.5f / w->global : 0.5f * w->global;
    uint32_t i = 0;
    if (global < SCALE_MAX && !has_nan(scales, n / 16))
        for (; i + VF_LANES <= n / 16; i += VF_LANES)
            vf_store(out + i, vf_from_e4m3(scales + i) * (global * E4M3_FACTOR));
    for (; i < n / 16; i++)
        out[i] = op_e4m3_values[scales[i]] * global;
}

/* MXFP4 (32 columns a scale) and NVFP4 (16). */
static bool fp4_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                    float *out)
{
    bool nv = w->format == OP_FORMAT_NVFP4;
    uint32_t shared = nv ? 16 : 32;
    if (!plain_scales(w, first, shared) || first % 32 != 0 || n % 32 != 0 ||
        w->scales.dtype != (nv ? OP_SCALE_E4M3 : OP_SCALE_E8M0))
        return false;
    const uint8_t *codes = w->codes + row * w->row_bytes + first / 2;
    const uint8_t *scales =
        (const uint8_t *)w->scales.data + row * w->scales.stride + first / shared;
    float scale[FP4_SCALES];
    for (uint32_t i = 0; i < n; i += 32) {
        vf doubled[32 / VF_LANES];
        if (i % DOT_BLOCK == 0)
            fp4_scales(w, scales + i / shared, n - i < DOT_BLOCK ? n - i : DOT_BLOCK, scale);
        nibbles32(codes + i / 2, doubled);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 32; k += VF_LANES)
            vf_store(out + i + k, doubled[k / VF_LANES] * scale[(i % DOT_BLOCK + k) / 16]);
    }
    return true;
}

void OP_FAST(quant_row)(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                        float *out)
{
    bool done = false;
    if (w->format == OP_FORMAT_FP8)
        done = fp8_row(w, row, first, n, out);
    else if (w->format == OP_FORMAT_MXFP8)
        done = mxfp8_row(w, row, first, n, out);
    else if (w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4)
        done = fp4_row(w, row, first, n, out);
    if (!done)
        op_quantised_row(w, row, first, n, out);
    for (uint32_t i = n; i % VF_LANES != 0; i++)
        out[i] = 0;
}

/* One piece of DOT_OUTS rows. */
struct piece {
    const uint8_t *codes[DOT_OUTS];
    const uint8_t *scales[DOT_OUTS]; /* of the formats with plain scales */
    const float *x;
    uint32_t n;     /* a multiple of 32 */
    uint64_t ahead; /* bytes to the same place in the next rows, which are wanted soon */
};

/* Columns [i, end), multiples of 32, under one factor for each row. */
VF_INLINE void e4m3_dots(const struct piece *p, uint32_t i, uint32_t end, const vf factor[DOT_OUTS],
                         vf *acc)
{
    for (; i < end; i += 32) {
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++)
            __builtin_prefetch(p->codes[o] + p->ahead + i, 0, 3);
#pragma GCC unroll 8
        for (uint32_t k = i; k < i + 32; k += VF_LANES) {
            vf x = vf_load(p->x + k);
#pragma GCC unroll 4
            for (int o = 0; o < DOT_OUTS; o++)
                acc[o] = vf_fma(vf_from_e4m3(p->codes[o] + k) * factor[o], x, acc[o]);
        }
    }
}

/* The scales of a piece's row times E4M3_FACTOR; false if one is too large for that, or NaN. */
VF_INLINE bool mx_factors_of(const uint8_t *codes, uint32_t count, float *out)
{
    uint8_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        most = codes[i] > most ? codes[i] : most;
        out[i] = op_f32_from_bits((codes[i] + VF_E4M3_FACTOR_LOG2) << 23); /* of code 0, too */
    }
    return most < MX_SCALE_END;
}

static bool mx_factors(const uint8_t *codes, uint32_t count, float *out)
{
    if (count == DOT_BLOCK / 32) /* known to the compiler: whole vectors */
        return mx_factors_of(codes, DOT_BLOCK / 32, out);
    return mx_factors_of(codes, count, out);
}

static bool mxfp8_dots(const struct piece *p, vf *acc)
{
    float factors[DOT_OUTS][DOT_BLOCK / 32];
    for (int o = 0; o < DOT_OUTS; o++)
        if (!mx_factors(p->scales[o], p->n / 32, factors[o]))
            return false;
    for (uint32_t i = 0; i < p->n; i += 32) {
        vf factor[DOT_OUTS];
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++)
            factor[o] = vf_all(factors[o][i / 32]);
        e4m3_dots(p, i, i + 32, factor, acc);
    }
    return true;
}

/* Every scale covers whole runs of 32 columns here. */
static bool fp8_dots(const struct op_quantised *w, uint32_t row, uint32_t first,
                     const struct piece *p, vf *acc)
{
    /* Rows of one block of scales share them. */
    uint32_t rows_left =
        w->scales.rows_shared - (w->scales.row_phase + row) % w->scales.rows_shared;
    for (uint32_t i = 0, end = 0; i < p->n; i = end) {
        vf factor[DOT_OUTS];
        float scale = 0;
        for (uint32_t o = 0; o < DOT_OUTS; o++) {
            if (o == 0 || o >= rows_left)
                scale = op_quantised_scale(w, row + o, first + i, &end);
            if (!(scale < SCALE_MAX && scale > -SCALE_MAX))
                return false;
            factor[o] = vf_all(scale * E4M3_FACTOR);
        }
        end = end - first < p->n ? end - first : p->n;
        e4m3_dots(p, i, end, factor, acc);
    }
    return true;
}

static void fp4_dots(const struct op_quantised *w, const struct piece *p, vf *acc)
{
    float scale[DOT_OUTS][FP4_SCALES];
    for (int o = 0; o < DOT_OUTS; o++)
        fp4_scales(w, p->scales[o], p->n, scale[o]);
    for (uint32_t i = 0; i < p->n; i += 32) {
        vf x[32 / VF_LANES];
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 32; k += VF_LANES)
            x[k / VF_LANES] = vf_load(p->x + i + k);
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++) {
            vf doubled[32 / VF_LANES];
            __builtin_prefetch(p->codes[o] + p->ahead + i / 2, 0, 3);
            nibbles32(p->codes[o] + i / 2, doubled);
#pragma GCC unroll 8
            for (uint32_t k = 0; k < 32; k += VF_LANES)
                acc[o] =
                    vf_fma(doubled[k / VF_LANES] * scale[o][(i + k) / 16], x[k / VF_LANES], acc[o]);
        }
    }
}

bool OP_FAST(quant_dots)(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                         const float *x, vf4 *ret_sums)
{
    bool fp4 = w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4, done = true;
    uint32_t shared = w->format == OP_FORMAT_NVFP4 ? 16 : 32;
    struct piece p = {.x = x, .n = n, .ahead = DOT_OUTS * w->row_bytes};
    vf acc[DOT_OUTS];
    if (n % 32 != 0 || first % 32 != 0 || n > DOT_BLOCK)
        return false;
    if (w->format == OP_FORMAT_FP8) {
        if (w->scales.column_phase % 32 != 0 || w->scales.columns_shared % 32 != 0)
            if (w->scales.columns_shared != OP_SHARED_BY_ALL)
                return false;
    } else if (!plain_scales(w, first, shared) ||
               w->scales.dtype != (shared == 16 ? OP_SCALE_E4M3 : OP_SCALE_E8M0)) {
        return false;
    }
    for (uint32_t o = 0; o < DOT_OUTS; o++) {
        p.codes[o] = w->codes + (row + o) * w->row_bytes + (fp4 ? first / 2 : first);
        if (w->format != OP_FORMAT_FP8)
            p.scales[o] =
                (const uint8_t *)w->scales.data + (row + o) * w->scales.stride + first / shared;
        if (!fp4 && !w->no_nan && has_nan(p.codes[o], n))
            return false;
        acc[o] = vf_zero();
    }
    if (w->format == OP_FORMAT_FP8)
        done = fp8_dots(w, row, first, &p, acc);
    else if (w->format == OP_FORMAT_MXFP8)
        done = mxfp8_dots(&p, acc);
    else
        fp4_dots(w, &p, acc);
    *ret_sums = vf_sum4(acc[0], acc[1], acc[2], acc[3]);
    return done;
}
