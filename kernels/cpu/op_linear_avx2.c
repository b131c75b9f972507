/* SPDX-License-Identifier: Apache-2.0 */
/* The linear ops with AVX2 and FMA: bit for bit the reference's result.
 *
 * NOTE: a product of two f32 is exact in f64, so a fused multiply-add rounds as the reference's
 * separate multiplication and addition do; lanes and their order of addition are the same. */
#include "kernels/op_linear.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernels/cpu/op_fast.h"
#include "kernels/op_dtype.h"
#include "lib/base/check.h"

#define OUTS_MAX        4
#define ROWS_MAX        2
#define PREFETCH_BLOCKS 3
#define TILE            512 /* weights widened at a time; a multiple of the eight lanes */

/* A block of weight rows against a block of activation rows. */
struct block {
    const struct op_weight *w;
    uint64_t w_first; /* element where the first weight row begins */
    uint32_t in;
    const float *x[ROWS_MAX];
    float *y[ROWS_MAX]; /* place of the first output */
};

static inline __attribute__((always_inline)) __m256d load4(const void *w, uint32_t i, bool bf16)
{
    if (!bf16)
        return _mm256_cvtps_pd(_mm_loadu_ps((const float *)w + i));
    __m128i half = _mm_loadl_epi64((const void *)((const uint16_t *)w + i));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16)));
}

/* NOTE: a decode step reads every weight once, from the last-level cache at best, and rows are too
 * short for the hardware's own prefetcher: `ahead` is PREFETCH_BLOCKS further on. */
static inline __attribute__((always_inline)) void lanes_add(__m256d acc[OUTS_MAX][ROWS_MAX][2],
                                                            const void *const w[OUTS_MAX],
                                                            const float *const x[ROWS_MAX],
                                                            uint32_t n, int outs, int rows,
                                                            bool bf16, const char *ahead)
{
    for (uint32_t i = 0; i < n; i += 8) {
        __m256d x0[ROWS_MAX], x1[ROWS_MAX];
        if (outs == OUTS_MAX) {
            _mm_prefetch(ahead + (size_t)i * (bf16 ? 8 : 16), _MM_HINT_T0);
            if (!bf16)
                _mm_prefetch(ahead + (size_t)i * 16 + 64, _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            x0[r] = _mm256_cvtps_pd(_mm_loadu_ps(x[r] + i));
            x1[r] = _mm256_cvtps_pd(_mm_loadu_ps(x[r] + i + 4));
        }
        for (int o = 0; o < outs; o++) {
            __m256d w0 = load4(w[o], i, bf16), w1 = load4(w[o], i + 4, bf16);
            for (int r = 0; r < rows; r++) {
                acc[o][r][0] = _mm256_fmadd_pd(w0, x0[r], acc[o][r][0]);
                acc[o][r][1] = _mm256_fmadd_pd(w1, x1[r], acc[o][r][1]);
            }
        }
    }
}

/* The last in % 8 products, then the lanes in the reference's order. */
static float lanes_sum(const __m256d acc[2], const struct op_weight *w, uint64_t first,
                       const float *x, uint32_t tail)
{
    double lane[8];
    _mm256_storeu_pd(lane, acc[0]);
    _mm256_storeu_pd(lane + 4, acc[1]);
    for (uint32_t i = 0; i < tail; i++)
        lane[i] += (double)op_weight_at(w, first + i) * (double)x[i];
    double even = (lane[0] + lane[2]) + (lane[4] + lane[6]);
    double odd = (lane[1] + lane[3]) + (lane[5] + lane[7]);
    return (float)(even + odd);
}

/* F16 goes through tiles; the other two are widened as they are loaded. */
static void add_tiles(const struct block *b, __m256d acc[OUTS_MAX][ROWS_MAX][2], int outs, int rows)
{
    float tile[OUTS_MAX][TILE];
    const void *w[OUTS_MAX] = {tile[0], tile[1], tile[2], tile[3]};
    uint32_t whole = b->in & ~7u;
    for (uint32_t i = 0; i < whole; i += TILE) {
        uint32_t n = whole - i < TILE ? whole - i : TILE;
        const float *x[ROWS_MAX] = {b->x[0] + i, b->x[1] + i};
        for (int o = 0; o < outs; o++)
            op_widen(b->w, b->w_first + (uint64_t)o * b->in + i, n, tile[o]);
        lanes_add(acc, w, x, n, outs, rows, false, (const char *)tile);
    }
}

static inline __attribute__((always_inline)) void run_block(const struct block *b, int outs,
                                                            int rows)
{
    __m256d acc[OUTS_MAX][ROWS_MAX][2];
    const void *w[OUTS_MAX];
    uint32_t whole = b->in & ~7u, bytes = op_dtype_bytes(b->w->dtype);
    for (int o = 0; o < outs; o++) {
        w[o] = (const char *)b->w->data + (b->w_first + (uint64_t)o * b->in) * bytes;
        for (int r = 0; r < rows; r++)
            acc[o][r][0] = acc[o][r][1] = _mm256_setzero_pd();
    }
    const char *ahead = (const char *)w[0] + (size_t)PREFETCH_BLOCKS * OUTS_MAX * b->in * bytes;
    if (b->w->dtype == OP_F32)
        lanes_add(acc, w, b->x, whole, outs, rows, false, ahead);
    else if (b->w->dtype == OP_BF16)
        lanes_add(acc, w, b->x, whole, outs, rows, true, ahead);
    else
        add_tiles(b, acc, outs, rows);
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++)
            b->y[r][o] = lanes_sum(acc[o][r], b->w, b->w_first + (uint64_t)o * b->in + whole,
                                   b->x[r] + whole, b->in - whole);
}

/* outs consecutive outputs of one or two rows. */
static void run_outs(struct block *b, uint32_t outs, uint32_t rows)
{
    uint32_t o = 0;
    while (o < outs) {
        uint32_t step = 1;
        if (rows == 2 && outs - o >= 2) {
            step = 2;
            run_block(b, 2, 2);
        } else if (rows == 2) {
            run_block(b, 1, 2);
        } else if (outs - o >= 4) {
            step = 4;
            run_block(b, 4, 1);
        } else {
            run_block(b, 1, 1);
        }
        o += step;
        b->w_first += (uint64_t)step * b->in;
        b->y[0] += step;
        b->y[1] += rows == 2 ? step : 0;
    }
}

static void linear_outs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_linear_args *a = arg;
    for (uint32_t r = 0; r < a->rows; r += 2) {
        uint32_t rows = a->rows - r < 2 ? 1 : 2, second = r + rows - 1;
        struct block b = {&a->w,
                          (uint64_t)begin * a->in,
                          a->in,
                          {a->x + r * a->x_stride, a->x + second * a->x_stride},
                          {a->y + r * a->y_stride + begin, a->y + second * a->y_stride + begin}};
        run_outs(&b, end - begin, rows);
    }
}

enum err op_linear_avx2(const struct op_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->w.data != NULL || a->w.quantised != NULL);
    if (a->w.quantised != NULL)
        return op_linear_ref(a, ctx);
    op_for(ctx, a->out, (uint64_t)a->in * a->rows, linear_outs, a);
    return ERR_OK;
}

/* Outputs [o, o_end) of one expert over all of its pairs. */
static void grouped_expert(const struct op_grouped_linear_args *a, uint32_t expert, uint32_t o,
                           uint32_t o_end)
{
    uint32_t first = a->offsets[expert], count = a->offsets[expert + 1] - first;
    for (uint32_t p = first; p < first + count; p += 2) {
        uint32_t rows = first + count - p < 2 ? 1 : 2, second = p + rows - 1;
        uint64_t x0 = a->x_rows != NULL ? a->x_rows[p] : p;
        uint64_t x1 = a->x_rows != NULL ? a->x_rows[second] : second;
        struct block b = {&a->w[expert],
                          (uint64_t)o * a->in,
                          a->in,
                          {a->x + x0 * a->x_stride, a->x + x1 * a->x_stride},
                          {a->y + p * a->y_stride + o, a->y + second * a->y_stride + o}};
        run_outs(&b, o_end - o, rows);
    }
}

static void grouped_outs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_grouped_linear_args *a = arg;
    while (begin < end) {
        uint32_t expert = begin / a->out, o = begin % a->out;
        uint32_t left = a->out - o, count = end - begin < left ? end - begin : left;
        grouped_expert(a, expert, o, o + count);
        begin += count;
    }
}

enum err op_grouped_linear_avx2(const struct op_grouped_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->experts > 0 && a->experts <= OP_EXPERTS_MAX);
    for (uint32_t e = 0; e < a->experts; e++)
        if (a->w[e].quantised != NULL)
            return op_grouped_linear_ref(a, ctx);
    uint64_t cost = (uint64_t)a->in * a->pairs_max / a->experts + 1;
    op_for(ctx, a->experts * a->out, cost, grouped_outs, a);
    return ERR_OK;
}
