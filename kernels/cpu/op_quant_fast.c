/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of FP8, MXFP8, MXFP4 and NVFP4 to f32, compiled once per instruction set. */
#include "kernels/cpu/op_quant_fast.h"

#include <stdbool.h>

#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"

#define E4M3_FACTOR VF_E4M3_FACTOR
#define SCALE_MAX   VF_E4M3_SCALE_MAX
/* The first E8M0 code that is too large for a factor. */
#define MX_SCALE_END(log2) ((log2) == VF_E4M3_LOW_LOG2 ? 134u : 127u + VF_E4M3_SCALE_MAX_LOG2)
#define FP4_SCALES         (DOT_BLOCK / 16) /* of a piece of a row, one for 16 columns */

/* True if a code of the run is NaN: such a row takes the slow way. */
VF_INLINE bool has_nan(const uint8_t *codes, uint32_t n)
{
    int found = bytes_have_nan(codes, n / 32 * 32);
    for (uint32_t i = n / 32 * 32; i < n; i++)
        found |= (codes[i] & OP_E4M3_NAN_MASK) == OP_E4M3_NAN_MASK;
    return found != 0;
}

VF_INLINE void e4m3_run32(const uint8_t *codes, float scale_factor, float *out)
{
    vf factor = vf_all(scale_factor);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 32; i += VF_LANES)
        vf_store(out + i, vf_from_e4m3(codes + i) * factor);
}

static void e4m3_run(const uint8_t *codes, uint32_t n, float scale, float *out)
{
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32)
        e4m3_run32(codes + i, scale * E4M3_FACTOR, out + i);
    for (; i < n; i++)
        out[i] = op_e4m3_values[codes[i]] * scale;
}

static inline float power_of_two(uint8_t code)
{
    return code != 0 && code != OP_E8M0_NAN ? op_f32_from_bits((uint32_t)code << 23)
                                            : op_f32_from_e8m0(code);
}

/* The scale times 2^log2, of code 0, too. */
VF_INLINE float mx_factor(uint8_t code, uint32_t log2)
{
    return op_f32_from_bits((code + log2) << 23);
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
        e4m3_run32(codes + i, scale * E4M3_FACTOR, out + i);
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

/* What the scales of NVFP4 are multiplied with: values come doubled. */
static float fp4_global(const struct op_quantised *w)
{
    return w->global_divides ? 0.5f / w->global : 0.5f * w->global;
}

VF_INLINE void nvfp4_scales(const uint8_t *codes, uint32_t count, float global, float *out)
{
    uint32_t i = 0;
    if (global < SCALE_MAX && global > -SCALE_MAX && !has_nan(codes, count))
        for (; i + VF_LANES <= count; i += VF_LANES)
            vf_store(out + i, vf_from_e4m3(codes + i) * (global * E4M3_FACTOR));
    for (; i < count; i++)
        out[i] = op_e4m3_values[codes[i]] * global;
}

/* The scales of n columns, a multiple of 32, for 16 columns each, times a half. */
VF_INLINE void fp4_scales(enum op_format format, const uint8_t *scales, uint32_t n, float global,
                          float *out)
{
    if (format == OP_FORMAT_MXFP4)
        for (uint32_t i = 0; i < n / 32; i++)
            out[2 * i] = out[2 * i + 1] = power_of_two(scales[i]) * 0.5f;
    else
        nvfp4_scales(scales, n / 16, global, out);
}

#if FP4_RUN > 0
/* Twice the values of a run of FP4_RUN columns, in their order: vector k of eight. */
VF_INLINE vf run_vector(__m512i codes, int k)
{
    const __m512 table =
        _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
    return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * (unsigned)k), table);
}

/* The scales of a run, one for 16 columns, as every vector of it wants them. */
VF_INLINE vf run_spread(__m256 scales)
{
    const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return (vf)_mm512_permutexvar_ps(pairs, _mm512_castps256_ps512(scales));
}
#endif

static void fp4_order(const float *x, uint32_t n, float *out)
{
    uint32_t i = 0;
#if FP4_RUN > 0
    for (; i + FP4_RUN <= n; i += FP4_RUN) {
        vf v[8], u[8];
        for (int k = 0; k < 8; k++)
            v[k] = vf_load(x + i + k * VF_LANES);
        for (int round = 0; round < 3; round++) { /* each brings the even ones before the odd */
            for (int k = 0; k < 4; k++) {
                u[k] = VF_EVEN(v[2 * k], v[2 * k + 1]);
                u[k + 4] = VF_ODD(v[2 * k], v[2 * k + 1]);
            }
            memcpy(v, u, sizeof(v));
        }
        for (int k = 0; k < 8; k++)
            vf_store(out + i + k * VF_LANES, v[k]);
    }
#endif
    VF_EACH(n - i, c, count)
    vf_store(out + i + c, vf_get(x + i + c, count));
}

/* Where the 32 columns lie that stand at `at`, a multiple of 32. */
static uint32_t e4m3_column(uint32_t in, uint32_t at)
{
    uint32_t piece = at / E4M3_PIECE * E4M3_PIECE;
    if (in - piece < E4M3_PIECE)
        return at;
    uint32_t block = at % E4M3_PIECE / DOT_BLOCK, run = at % DOT_BLOCK / 32;
    return piece + (run * STREAM_BLOCKS + block) * 32;
}

static void e4m3_order(uint32_t in, const float *x, uint32_t first, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i += 32) {
        uint32_t from = e4m3_column(in, first + i), count = n - i < 32 ? n - i : 32;
        VF_EACH(count, c, left)
        vf_store(out + i + c, vf_get(x + from + c, left));
    }
}

void OP_FAST(quant_order)(const struct op_quantised *w, const float *x, uint32_t first, uint32_t n,
                          float *out)
{
    if (quant_e4m3(w))
        e4m3_order(w->in, x, first, n, out);
    else
        fp4_order(x + first, n, out);
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
    fp4_scales(w->format, scales, n, nv ? fp4_global(w) : 0, scale);
    uint32_t i = 0;
#if FP4_RUN > 0
    for (; i + FP4_RUN <= n; i += FP4_RUN) {
        __m512i run = _mm512_loadu_si512(codes + i / 2);
        vf by = run_spread(_mm256_loadu_ps(scale + i / 16));
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            vf_store(out + i + k * VF_LANES, run_vector(run, k) * by);
    }
#endif
    for (; i < n; i += 32) {
        vf doubled[32 / VF_LANES];
        nibbles32(codes + i / 2, doubled);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 32; k += VF_LANES)
            vf_store(out + i + k, doubled[k / VF_LANES] * scale[(i + k) / 16]);
    }
    return true;
}

/* Any row, the way of the reference. */
static void slow_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                     float *out)
{
    float natural[DOT_BLOCK];
    bool fp4_ordered = quant_ordered(w) && !quant_e4m3(w);
    op_quantised_row(w, row, first, n, fp4_ordered ? natural : out);
    if (fp4_ordered)
        fp4_order(natural, n, out);
}

static bool e4m3_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                     float *out)
{
    return w->format == OP_FORMAT_FP8 ? fp8_row(w, row, first, n, out)
                                      : mxfp8_row(w, row, first, n, out);
}

/* Every scale covers whole runs of 32 columns here. */
static bool fp8_factors(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                        uint32_t log2, float *out)
{
    const struct op_scales *s = &w->scales;
    const float most = log2 == VF_E4M3_LOW_LOG2 ? 128.0f : SCALE_MAX;
    const float factor = op_f32_from_bits((127 + log2) << 23);
    uint32_t end = 0;
    const float *next = NULL; /* where scales are what is to be read */
    if (s->dtype == OP_SCALE_F32 && s->columns_shared != OP_SHARED_BY_ALL) {
        uint64_t scale_row = ((uint64_t)s->row_phase + row) / s->rows_shared;
        uint64_t column = ((uint64_t)s->column_phase + first) / s->columns_shared;
        next = (const float *)s->data + scale_row * s->stride + column;
    }
    uint32_t done = 0;
    if (next != NULL && s->columns_shared == 128 && (s->column_phase + first) % 128 == 0)
        for (; done + 128 <= n; done += 128, next++) { /* as people have it */
            float scale;
            memcpy(&scale, next, sizeof(scale));
            if (!(scale < most && scale > -most))
                return false;
            vf4 all = scale * factor - (vf4){0};
            memcpy(out + done / 32, &all, sizeof(all));
        }
    for (uint32_t i = done; i < n; i = end) {
        float scale;
        if (i == 0 || next == NULL) {
            scale = op_quantised_scale(w, row, first + i, &end);
            end -= first;
        } else {
            memcpy(&scale, next, sizeof(scale));
            end = s->columns_shared < n - i ? i + s->columns_shared : n;
        }
        next += next != NULL;
        if (!(scale < most && scale > -most))
            return false;
        end = end < n ? end : n;
        for (uint32_t k = i / 32; k < end / 32; k++)
            out[k] = scale * factor;
    }
    return true;
}

/* True if scales of FP8 change at multiples of 32 columns alone. */
static bool in_runs32(const struct op_scales *s)
{
    return (s->column_phase % 32 == 0 && s->columns_shared % 32 == 0) ||
           s->columns_shared == OP_SHARED_BY_ALL;
}

/* A block of a piece: its columns lie apart.  The row DOT_OUTS further on is wanted next. */
static void e4m3_ordered_row(const struct op_quantised *w, uint32_t row, uint32_t first, float *out)
{
    const uint8_t *codes = w->codes + row * w->row_bytes;
    uint32_t piece = first / E4M3_PIECE * E4M3_PIECE;
    float factors[E4M3_PIECE / 32];
    if (w->format == OP_FORMAT_FP8 && w->no_nan && in_runs32(&w->scales) &&
        fp8_factors(w, row, piece, E4M3_PIECE, VF_E4M3_FACTOR_LOG2, factors)) {
        for (uint32_t i = 0; i < DOT_BLOCK; i += 32) {
            uint32_t column = e4m3_column(w->in, first + i);
            __builtin_prefetch(codes + DOT_OUTS * w->row_bytes + column, 0, 3);
            e4m3_run32(codes + column, factors[(column - piece) / 32], out + i);
        }
        return;
    }
    const bool mx = w->format == OP_FORMAT_MXFP8 && w->no_nan && plain_scales(w, 0, 32) &&
                    w->scales.dtype == OP_SCALE_E8M0;
    const uint8_t *scales = (const uint8_t *)w->scales.data + row * w->scales.stride;
    for (uint32_t i = 0; i < DOT_BLOCK; i += 32) {
        uint32_t column = e4m3_column(w->in, first + i);
        __builtin_prefetch(codes + DOT_OUTS * w->row_bytes + column, 0, 3);
        if (mx && scales[column / 32] < MX_SCALE_END(VF_E4M3_FACTOR_LOG2))
            e4m3_run32(codes + column, mx_factor(scales[column / 32], VF_E4M3_FACTOR_LOG2),
                       out + i);
        else if (!e4m3_row(w, row, column, 32, out + i))
            slow_row(w, row, column, 32, out + i);
    }
}

void OP_FAST(quant_row)(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t n,
                        float *out)
{
    bool done = false;
    DCHECK(n <= DOT_BLOCK);
    if (quant_e4m3(w) && quant_ordered(w) && e4m3_column(w->in, first + 32) != first + 32) {
        CHECK(n == DOT_BLOCK && first % DOT_BLOCK == 0);
        e4m3_ordered_row(w, row, first, out);
        return;
    }
    if (quant_e4m3(w))
        done = e4m3_row(w, row, first, n, out);
    else if (w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4)
        done = fp4_row(w, row, first, n, out);
    if (!done)
        slow_row(w, row, first, n, out);
    for (uint32_t i = n; i % VF_LANES != 0; i++)
        out[i] = 0;
}

/* One piece, of at most DOT_BLOCK columns, of some rows. */
struct piece {
    const uint8_t *codes[QUANT_ROWS];
    const uint8_t *scales[DOT_OUTS]; /* MXFP8 */
    const float *by[QUANT_ROWS];     /* FP4: scales for 16 columns each, as fp4_scales gives them */
    const float *x;
    uint32_t n;     /* a multiple of 32 */
    uint64_t ahead; /* bytes to the same place in the next rows, which are wanted soon */
    uint64_t scales_ahead;
};

/* NOTE: a row is often no longer than a page, where the hardware's own prefetcher begins anew. */
VF_INLINE void fetch_ahead(const struct piece *p, uint32_t at, uint32_t rows)
{
#pragma GCC unroll 8
    for (uint32_t o = 0; o < rows; o++)
        __builtin_prefetch(p->codes[o] + p->ahead + at, 0, 3);
}

/* Of DOT_OUTS rows: factor[o][k] is for columns [32 k, 32 k + 32) of row o. */
struct factors {
    float at[DOT_OUTS][DOT_BLOCK / 32];
    const float *of[DOT_OUTS]; /* rows may share them */
};

/* 32 columns of DOT_OUTS rows. */
VF_INLINE void e4m3_add32(const struct piece *p, const struct factors *f, uint32_t i,
                          vf acc[DOT_OUTS])
{
#pragma GCC unroll 8
    for (uint32_t k = 0; k < 32; k += VF_LANES) {
        vf x = vf_load(p->x + i + k);
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++)
            acc[o] =
                vf_fma(vf_from_e4m3(p->codes[o] + i + k) * vf_all(f->of[o][i / 32]), x, acc[o]);
    }
}

/* Sums of a piece of DOT_OUTS rows: more would not leave registers for all that is needed. */
static vf4 e4m3_sums(const struct piece *p, const struct factors *f)
{
    vf acc[DOT_OUTS];
    uint32_t i = 0;
#pragma GCC unroll 4
    for (int o = 0; o < DOT_OUTS; o++)
        acc[o] = vf_zero();
    for (; i + 64 <= p->n; i += 64) {
        fetch_ahead(p, i, DOT_OUTS);
        e4m3_add32(p, f, i, acc);
        e4m3_add32(p, f, i + 32, acc);
    }
    if (i < p->n)
        e4m3_add32(p, f, i, acc);
    return vf_sum4(acc[0], acc[1], acc[2], acc[3]);
}

/* The scales of a piece's row times 2^log2; false if one is too large for that, or NaN. */
VF_INLINE bool mx_factors_of(const uint8_t *codes, uint32_t count, uint32_t log2, float *out)
{
    uint8_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        most = codes[i] > most ? codes[i] : most;
        out[i] = mx_factor(codes[i], log2);
    }
    return most < MX_SCALE_END(log2);
}

VF_INLINE bool mx_factors(const uint8_t *codes, uint32_t count, uint32_t log2, float *out)
{
    if (count == DOT_BLOCK / 32) /* known to the compiler: whole vectors */
        return mx_factors_of(codes, DOT_BLOCK / 32, log2, out);
    return mx_factors_of(codes, count, log2, out);
}

static bool mxfp8_sums(const struct piece *p, vf4 *ret_sums)
{
    struct factors f;
    for (int o = 0; o < DOT_OUTS; o++) {
        f.of[o] = f.at[o];
        __builtin_prefetch(p->scales[o] + p->scales_ahead, 0, 3);
        if (!mx_factors(p->scales[o], p->n / 32, VF_E4M3_FACTOR_LOG2, f.at[o]))
            return false;
    }
    *ret_sums = e4m3_sums(p, &f);
    return true;
}

static bool fp8_sums(const struct op_quantised *w, uint32_t row, uint32_t first,
                     const struct piece *p, vf4 *ret_sums)
{
    const struct op_scales *s = &w->scales;
    struct factors f;
    /* Rows of one block of scales share them. */
    uint32_t rows_left = s->rows_shared - (s->row_phase + row) % s->rows_shared;
    for (uint32_t o = 0; o < DOT_OUTS; o++) {
        bool shares = o > 0 && o < rows_left;
        f.of[o] = f.at[shares ? 0 : o];
        if (!shares && !fp8_factors(w, row + o, first, p->n, VF_E4M3_FACTOR_LOG2, f.at[o]))
            return false;
    }
    *ret_sums = e4m3_sums(p, &f);
    return true;
}

#if STREAMED
#define STREAM_IN_MAX 32768u /* columns of a row whose scales are laid out before it is read */

/* Factors for every 32 columns of a row; false if one is too large or NaN. */
static bool row_factors(const struct op_quantised *w, uint32_t row, float *out)
{
    const uint32_t count = w->in / 32;
    const uint8_t *codes = (const uint8_t *)w->scales.data + row * w->scales.stride;
    if (w->format == OP_FORMAT_FP8)
        return fp8_factors(w, row, 0, w->in, VF_E4M3_LOW_LOG2, out);
    __m128i most = _mm_setzero_si128(), end = _mm_set1_epi8((char)MX_SCALE_END(VF_E4M3_LOW_LOG2));
    uint32_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m128i some = _mm_loadu_si128((const void *)(codes + i));
        __m512i wide = _mm512_cvtepu8_epi32(some);
        wide = _mm512_add_epi32(wide, _mm512_set1_epi32((int)VF_E4M3_LOW_LOG2));
        most = _mm_max_epu8(most, some);
        _mm512_storeu_si512(out + i, _mm512_slli_epi32(wide, 23));
    }
    return _mm_cmpge_epu8_mask(most, end) == 0 &&
           mx_factors_of(codes + i, count - i, VF_E4M3_LOW_LOG2, out + i);
}

/* 32 columns of a block. */
VF_INLINE vf e4m3_columns(const uint8_t *codes, float factor, const float *x, vf acc)
{
#pragma GCC unroll 8
    for (uint32_t k = 0; k < 32; k += VF_LANES)
        acc = vf_fma(vf_from_e4m3_low(codes + k) * vf_all(factor), vf_load(x + k), acc);
    return acc;
}

/* One piece of a row, whose columns go to the blocks in turns; x is in their order. */
VF_INLINE void e4m3_piece(const uint8_t *codes, const float *factors, const float *x,
                          vf acc[STREAM_BLOCKS])
{
    vf sum[STREAM_BLOCKS] = {{0}};
    fetch_next_page(codes, E4M3_PIECE);
    for (uint32_t i = 0; i < DOT_BLOCK; i += 32)
#pragma GCC unroll 4
        for (uint32_t b = 0; b < STREAM_BLOCKS; b++)
            sum[b] =
                e4m3_columns(codes + STREAM_BLOCKS * i + 32 * b,
                             factors[STREAM_BLOCKS * i / 32 + b], x + b * DOT_BLOCK + i, sum[b]);
#pragma GCC unroll 4
    for (uint32_t b = 0; b < STREAM_BLOCKS; b++)
        acc[b] = sum[b];
}

static float e4m3_row_sum(const uint8_t *codes, const float *factors, const float *x, uint32_t in)
{
    vf acc[STREAM_BLOCKS] = {{0}};
    uint32_t i = 0, blocks = 0;
    float total = 0;
    for (; in - i >= E4M3_PIECE; i += E4M3_PIECE) {
        e4m3_piece(codes + i, factors + i / 32, x + i, acc);
        total = stream_add(total, i == 0, acc, STREAM_BLOCKS);
    }
    if (i == in)
        return total;
    bool first = i == 0;
    for (; i < in; blocks++) {
        uint32_t end = in - i < DOT_BLOCK ? in : i + DOT_BLOCK;
        acc[blocks] = vf_zero();
        for (; i < end; i += 32)
            acc[blocks] = e4m3_columns(codes + i, factors[i / 32], x + i, acc[blocks]);
    }
    return stream_add(total, first, acc, blocks);
}

/* FP8 and MXFP8, row by row from end to end. */
static bool e4m3_stream(const struct op_quantised *w, uint32_t row, uint32_t rows, const float *x,
                        float *y)
{
    const struct op_scales *s = &w->scales;
    float factors[STREAM_IN_MAX / 32], sums[QUANT_ROWS];
    if (w->format == OP_FORMAT_MXFP8) /* the scales of the next rows, in one go */
        for (uint64_t i = 0; i < rows * s->stride; i += 64)
            __builtin_prefetch((const uint8_t *)s->data + (row + rows) * s->stride + i, 0, 3);
    for (uint32_t o = 0; o < rows; o++) {
        const uint8_t *codes = w->codes + (row + o) * w->row_bytes;
        bool shares = o > 0 && (s->row_phase + row + o) % s->rows_shared != 0;
        if (!w->no_nan && has_nan(codes, w->in))
            return false;
        if (!shares && !row_factors(w, row + o, factors))
            return false;
        sums[o] = e4m3_row_sum(codes, factors, x, w->in);
    }
    memcpy(y, sums, rows * sizeof(*y));
    return true;
}
#endif

VF_INLINE void fp4_sums(const struct piece *p, uint32_t rows, vf4 *ret_sums)
{
    vf acc[QUANT_ROWS];
#pragma GCC unroll 8
    for (uint32_t o = 0; o < rows; o++)
        acc[o] = vf_zero();
    uint32_t i = 0;
#if FP4_RUN > 0
    for (; i + FP4_RUN <= p->n; i += FP4_RUN) {
        __m512i run[QUANT_ROWS];
        vf by[QUANT_ROWS];
        fetch_ahead(p, i / 2, rows);
#pragma GCC unroll 8
        for (uint32_t o = 0; o < rows; o++) {
            run[o] = _mm512_loadu_si512(p->codes[o] + i / 2);
            by[o] = run_spread(_mm256_loadu_ps(p->by[o] + i / 16));
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            vf x = vf_load(p->x + i + k * VF_LANES);
#pragma GCC unroll 8
            for (uint32_t o = 0; o < rows; o++)
                acc[o] = vf_fma(run_vector(run[o], k) * by[o], x, acc[o]);
        }
    }
#endif
    for (; i < p->n; i += 32) {
        vf x[32 / VF_LANES];
        if (i % 128 == 0)
            fetch_ahead(p, i / 2, rows);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 32; k += VF_LANES)
            x[k / VF_LANES] = vf_load(p->x + i + k);
#pragma GCC unroll 8
        for (uint32_t o = 0; o < rows; o++) {
            vf doubled[32 / VF_LANES];
            nibbles32(p->codes[o] + i / 2, doubled);
#pragma GCC unroll 8
            for (uint32_t k = 0; k < 32; k += VF_LANES)
                acc[o] =
                    vf_fma(doubled[k / VF_LANES] * p->by[o][(i + k) / 16], x[k / VF_LANES], acc[o]);
        }
    }
#pragma GCC unroll 2
    for (uint32_t o = 0; o < rows; o += 4)
        ret_sums[o / 4] = vf_sum4(acc[o], acc[o + 1], acc[o + 2], acc[o + 3]);
}

/* True if whole rows can go the way of quant_dots, but for the values of scales. */
static bool dots_fit(const struct op_quantised *w)
{
    const struct op_scales *s = &w->scales;
    if (w->in % 32 != 0)
        return false;
    if (w->format == OP_FORMAT_FP8)
        return in_runs32(s);
    bool nv = w->format == OP_FORMAT_NVFP4;
    return plain_scales(w, 0, nv ? 16 : 32) && s->dtype == (nv ? OP_SCALE_E4M3 : OP_SCALE_E8M0);
}

/* DOT_OUTS rows of FP8 or MXFP8, piece by piece. */
VF_INLINE bool e4m3_dots(const struct op_quantised *w, enum op_format format, uint32_t row,
                         const float *x, float *y)
{
    vf4 total = {0}, sums;
    for (uint32_t first = 0; first < w->in; first += DOT_BLOCK) {
        struct piece p = {.x = x + first,
                          .n = w->in - first < DOT_BLOCK ? w->in - first : DOT_BLOCK,
                          .ahead = DOT_OUTS * w->row_bytes,
                          .scales_ahead = DOT_OUTS * w->scales.stride};
        for (uint32_t o = 0; o < DOT_OUTS; o++) {
            p.codes[o] = w->codes + (row + o) * w->row_bytes + first;
            if (format == OP_FORMAT_MXFP8)
                p.scales[o] =
                    (const uint8_t *)w->scales.data + (row + o) * w->scales.stride + first / 32;
            if (!w->no_nan && has_nan(p.codes[o], p.n))
                return false;
        }
        if (format == OP_FORMAT_FP8 && !fp8_sums(w, row, first, &p, &sums))
            return false;
        if (format == OP_FORMAT_MXFP8 && !mxfp8_sums(&p, &sums))
            return false;
        total = first == 0 ? sums : total + sums;
    }
    memcpy(y, &total, sizeof(total));
    return true;
}

#define FP4_STRETCH 4096u /* columns whose scales are laid out before they are read */

/* The scales of a stretch of some rows; those of the rows behind them are asked for: they lie in a
 * place of their own, where the processor sees no order. */
VF_INLINE void fp4_stretch(const struct op_quantised *w, enum op_format format, uint32_t row,
                           uint32_t rows, uint32_t first, float (*out)[FP4_STRETCH / 16])
{
    const uint32_t n = w->in - first < FP4_STRETCH ? w->in - first : FP4_STRETCH;
    const uint32_t shared = format == OP_FORMAT_NVFP4 ? 16 : 32;
    const float global = format == OP_FORMAT_NVFP4 ? fp4_global(w) : 0;
    for (uint32_t o = 0; o < rows; o++) {
        const uint8_t *scales =
            (const uint8_t *)w->scales.data + (row + o) * w->scales.stride + first / shared;
        for (uint32_t i = 0; i < n / shared; i += 64)
            __builtin_prefetch(scales + rows * w->scales.stride + i, 0, 3);
        fp4_scales(format, scales, n, global, out[o]);
    }
}

VF_INLINE void fp4_rows(const struct op_quantised *w, enum op_format format, uint32_t row,
                        uint32_t rows, const float *x, float *y)
{
    _Alignas(64) float by[QUANT_ROWS][FP4_STRETCH / 16];
    vf4 total[QUANT_ROWS / 4] = {{0}}, sums[QUANT_ROWS / 4];
    for (uint32_t first = 0; first < w->in; first += DOT_BLOCK) {
        uint32_t place = first % FP4_STRETCH;
        if (place == 0)
            fp4_stretch(w, format, row, rows, first, by);
        struct piece p = {.x = x + first,
                          .n = w->in - first < DOT_BLOCK ? w->in - first : DOT_BLOCK,
                          .ahead = rows * w->row_bytes};
        for (uint32_t o = 0; o < rows; o++) {
            p.codes[o] = w->codes + (row + o) * w->row_bytes + first / 2;
            p.by[o] = by[o] + place / 16;
        }
        fp4_sums(&p, rows, sums);
        for (uint32_t o = 0; o < rows / 4; o++)
            total[o] = first == 0 ? sums[o] : total[o] + sums[o];
    }
    memcpy(y, total, rows * sizeof(*y));
}

VF_INLINE bool fp4_dots(const struct op_quantised *w, enum op_format format, uint32_t row,
                        uint32_t rows, const float *x, float *y)
{
    if (rows == QUANT_ROWS)
        fp4_rows(w, format, row, QUANT_ROWS, x, y);
    else
        fp4_rows(w, format, row, DOT_OUTS, x, y);
    return true;
}

bool OP_FAST(quant_dots)(const struct op_quantised *w, uint32_t row, uint32_t rows, const float *x,
                         float *y)
{
    CHECK(rows == DOT_OUTS || rows == quant_rows(w));
    if (!dots_fit(w))
        return false;
#if STREAMED
    if (quant_e4m3(w))
        return w->in <= STREAM_IN_MAX && e4m3_stream(w, row, rows, x, y);
#endif
    switch (w->format) {
    case OP_FORMAT_FP8:
        return e4m3_dots(w, OP_FORMAT_FP8, row, x, y);
    case OP_FORMAT_MXFP8:
        return e4m3_dots(w, OP_FORMAT_MXFP8, row, x, y);
    case OP_FORMAT_MXFP4:
        return fp4_dots(w, OP_FORMAT_MXFP4, row, rows, x, y);
    case OP_FORMAT_NVFP4:
        return fp4_dots(w, OP_FORMAT_NVFP4, row, rows, x, y);
    default:
        return false;
    }
}
