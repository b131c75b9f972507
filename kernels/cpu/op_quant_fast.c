/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of FP8, MXFP8, MXFP4 and NVFP4 to f32, compiled once per instruction set. */
#include "kernels/cpu/op_quant_fast.h"

#include <stdbool.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"

#define E4M3_FACTOR 256.0f /* vf_from_e4m3 gives the value over this */
#define SCALE_MAX   0x1p100f

/* True if a code of the run is NaN: such a row takes the slow way. */
static bool has_nan(const uint8_t *codes, uint32_t n)
{
    int found = 0;
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32)
        found |= bytes32_have_nan(codes + i);
    for (; i < n; i++)
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
    if (!plain_scales(w, first, 32) || w->scales.dtype != OP_SCALE_E8M0 || has_nan(codes, n))
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
    if (has_nan(codes, n))
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
VF_INLINE void nibbles32(const uint8_t *codes, int8_t out[32])
{
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if defined(__aarch64__)
    int8x16_t table = vld1q_s8(doubled);
    uint8x16_t v = vld1q_u8(codes);
    int8x16_t low = vqtbl1q_s8(table, vandq_u8(v, vdupq_n_u8(15)));
    int8x16_t high = vqtbl1q_s8(table, vshrq_n_u8(v, 4));
    vst1q_s8(out, vzip1q_s8(low, high));
    vst1q_s8(out + 16, vzip2q_s8(low, high));
#else
    __m128i table = _mm_loadu_si128((const void *)doubled), mask = _mm_set1_epi8(15);
    __m128i v = _mm_loadu_si128((const void *)codes);
    __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(v, mask));
    __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(v, 4), mask));
    _mm_storeu_si128((void *)out, _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128((void *)(out + 16), _mm_unpackhi_epi8(low, high));
#endif
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
    float global = !nv ? 0.5f : w->global_divides ? 0.5f / w->global : 0.5f * w->global;
    for (uint32_t i = 0; i < n; i += 32) {
        int8_t doubled[32];
        nibbles32(codes + i / 2, doubled);
        for (uint32_t half = 0; half < 32; half += 16) {
            uint8_t code = scales[(i + half) / shared];
            float scale = (nv ? op_e4m3_values[code] : power_of_two(code)) * global;
            for (uint32_t k = half; k < half + 16; k += VF_LANES)
                vf_store(out + i + k, vf_from_i8(doubled + k) * scale);
        }
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

VF_INLINE void e4m3_dot32(const struct piece *p, uint32_t i, const float *scale, vf *acc)
{
    vf factor[DOT_OUTS];
#pragma GCC unroll 4
    for (int o = 0; o < DOT_OUTS; o++) {
        __builtin_prefetch(p->codes[o] + p->ahead + i, 0, 3);
        factor[o] = vf_all(scale[o] * E4M3_FACTOR);
    }
#pragma GCC unroll 8
    for (uint32_t k = i; k < i + 32; k += VF_LANES) {
        vf x = vf_load(p->x + k);
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++)
            acc[o] = vf_fma(vf_from_e4m3(p->codes[o] + k) * factor[o], x, acc[o]);
    }
}

static bool mxfp8_dots(const struct piece *p, vf *acc)
{
    for (uint32_t i = 0; i < p->n; i += 32) {
        float scale[DOT_OUTS];
        bool fine = true;
        for (int o = 0; o < DOT_OUTS; o++) {
            scale[o] = power_of_two(p->scales[o][i / 32]);
            fine = fine && scale[o] < SCALE_MAX;
        }
        if (!fine)
            return false;
        e4m3_dot32(p, i, scale, acc);
    }
    return true;
}

/* Every scale covers whole runs of 32 columns here. */
static bool fp8_dots(const struct op_quantised *w, uint32_t row, uint32_t first,
                     const struct piece *p, vf *acc)
{
    float scale[DOT_OUTS] = {0};
    uint32_t end = first;
    for (uint32_t i = 0; i < p->n; i += 32) {
        if (first + i >= end)
            for (uint32_t o = 0; o < DOT_OUTS; o++) {
                scale[o] = op_quantised_scale(w, row + o, first + i, &end);
                if (!(scale[o] < SCALE_MAX && scale[o] > -SCALE_MAX))
                    return false;
            }
        e4m3_dot32(p, i, scale, acc);
    }
    return true;
}

static void fp4_dots(const struct op_quantised *w, const struct piece *p, vf *acc)
{
    bool nv = w->format == OP_FORMAT_NVFP4;
    float global = !nv ? 0.5f : w->global_divides ? 0.5f / w->global : 0.5f * w->global;
    for (uint32_t i = 0; i < p->n; i += 32) {
        int8_t doubled[DOT_OUTS][32];
        float scale[DOT_OUTS][2];
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++) {
            __builtin_prefetch(p->codes[o] + p->ahead + i / 2, 0, 3);
            nibbles32(p->codes[o] + i / 2, doubled[o]);
            for (uint32_t h = 0; h < 2; h++)
                scale[o][h] = (nv ? op_e4m3_values[p->scales[o][i / 16 + h]]
                                  : power_of_two(p->scales[o][i / 32])) *
                              global;
        }
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 32; k += VF_LANES) {
            vf x = vf_load(p->x + i + k);
#pragma GCC unroll 4
            for (int o = 0; o < DOT_OUTS; o++)
                acc[o] = vf_fma(vf_from_i8(doubled[o] + k) * scale[o][k / 16], x, acc[o]);
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
    if (n % 32 != 0 || first % 32 != 0)
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
        if (!fp4 && has_nan(p.codes[o], n))
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
