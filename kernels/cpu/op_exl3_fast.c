/* SPDX-License-Identifier: Apache-2.0 */
/* EXL3 against rows of activations in f32, compiled once per instruction set.
 *
 * Weights stay in their tile's own order: eight weights that follow each other belong to two
 * columns and four rows of the tile, so they are multiplied by four inputs, twice the same, and
 * summed lane by lane; lanes are added once at the end.  A strip of tiles, 128 inputs by 16
 * outputs, is decoded once for all rows of a pass and then stays in the first-level cache.  A row's
 * sums run over the tiles from top to bottom, whatever else is in the pass. */
#include <stddef.h>
#include <string.h>

#include "kernels/cpu/op_exl3_decode.h"
#include "kernels/cpu/op_quant_fast.h"
#include "kernels/cpu/op_vec.h"
#include "kernels/op_exl3.h"
#include "lib/base/check.h"

#define BLOCK       OP_EXL3_BLOCK
#define TILES       (BLOCK / OP_EXL3_TILE)
#define PASS_ROWS   512 /* rows that share a decoded tile */
#define PATTERN     32  /* weights after which the rows of the tile repeat */
#define STEPS       (PATTERN / VF_LANES)
#define COLUMN_SUMS 64 /* lanes of sums of a tile's 16 columns: eight for each two */

/* v = H v, unscaled. */
static void hadamard(float *v)
{
    for (uint32_t i = 0; i < BLOCK; i += VF_LANES) {
        vf x = vf_load(v + i);
        x = vf_turn(x, 1) + VF_SWAP1(x);
        x = vf_turn(x, 2) + VF_SWAP2(x);
#if VF_LANES >= 8
        x = vf_turn(x, 4) + VF_SWAP4(x);
#endif
#if VF_LANES >= 16
        x = vf_turn(x, 8) + VF_SWAP8(x);
#endif
        vf_store(v + i, x);
    }
    for (uint32_t step = VF_LANES; step < BLOCK; step *= 2)
        for (uint32_t base = 0; base < BLOCK; base += 2 * step)
            for (uint32_t i = base; i < base + step; i += VF_LANES) {
                vf a = vf_load(v + i), b = vf_load(v + i + step);
                vf_store(v + i, a + b);
                vf_store(v + i + step, a - b);
            }
}

/* A tile's inputs as its weights meet them: rows 0 1 8 9, twice, then 2 3 10 11 and so on.  Sixteen
 * lanes are put in that order when they are used. */
#if VF_LANES == 16
#define INPUTS       OP_EXL3_TILE
#define ROWS_AT_ONCE 2
#else
#define INPUTS       PATTERN
#define ROWS_AT_ONCE 1
#endif

VF_INLINE void inputs_get(const float *inputs, vf ret_steps[STEPS])
{
#if VF_LANES == 16
    vf x = vf_load(inputs);
    ret_steps[0] =
        __builtin_shufflevector(x, x, 0, 1, 8, 9, 0, 1, 8, 9, 2, 3, 10, 11, 2, 3, 10, 11);
    ret_steps[1] =
        __builtin_shufflevector(x, x, 4, 5, 12, 13, 4, 5, 12, 13, 6, 7, 14, 15, 6, 7, 14, 15);
#else
#pragma GCC unroll 8
    for (int i = 0; i < STEPS; i++)
        ret_steps[i] = vf_load(inputs + i * VF_LANES);
#endif
}

VF_INLINE void inputs_put(const float *a, float *inputs)
{
#if VF_LANES == 16
    vf_store(inputs, vf_load(a));
#else
    for (uint32_t k = 0; k < PATTERN; k += 8) {
        memcpy(inputs + k, a + k / 4, 8);
        memcpy(inputs + k + 2, a + k / 4 + 8, 8);
        memcpy(inputs + k + 4, inputs + k, 16);
    }
#endif
}

/* What a pass over up to PASS_ROWS rows keeps. */
struct pass {
    const struct linear_job *j;
    uint32_t row, rows;
    float (*inputs)[TILES][INPUTS];    /* [rows] rotated */
    float (*sums)[TILES][COLUMN_SUMS]; /* [rows] */
};

/* Inputs [first, + BLOCK) of every row: scaled, rotated.  The padding counts as zero. */
static void rotate_inputs(const struct pass *p, const struct op_quantised *w, uint32_t first)
{
    float scale[BLOCK];
    uint32_t n = w->in - first < BLOCK ? w->in - first : BLOCK;
    for (uint32_t i = 0; i < n; i++)
        scale[i] = (float)op_exl3_in_scale(w, first + i);
    for (uint32_t r = 0; r < p->rows; r++) {
        _Alignas(64) float a[BLOCK] = {0};
        const float *x = job_x(p->j, p->row + r) + first;
        for (uint32_t i = 0; i < n; i++)
            a[i] = x[i] * scale[i];
        hadamard(a);
        for (uint32_t t = 0; t < TILES; t++)
            inputs_put(a + t * OP_EXL3_TILE, p->inputs[r][t]);
    }
}

/* sums += weights * inputs for one strip and `rows` rows: p's r and on.
 * NOTE: sixteen lanes hold two portions of the same columns, which are added at the end. */
VF_INLINE void strip_rows(const struct pass *p, float (*weights)[OP_EXL3_TILE_WEIGHTS], uint32_t r,
                          uint32_t strip, int rows)
{
    enum { KEPT = VF_LANES < 8 ? 2 : 1 };
    vf acc[ROWS_AT_ONCE][8][KEPT];
#pragma GCC unroll 2
    for (int k = 0; k < rows; k++)
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++)
#pragma GCC unroll 2
            for (int l = 0; l < KEPT; l++)
                acc[k][c][l] = vf_zero();
    for (uint32_t t = 0; t < TILES; t++) {
        vf in[ROWS_AT_ONCE][STEPS];
#pragma GCC unroll 2
        for (int k = 0; k < rows; k++)
            inputs_get(p->inputs[r + (uint32_t)k][t], in[k]);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++)
#pragma GCC unroll 8
            for (int i = 0; i < STEPS; i++) {
                vf w = vf_load(weights[t] + c * PATTERN + i * VF_LANES);
#pragma GCC unroll 2
                for (int k = 0; k < rows; k++)
                    acc[k][c][i % KEPT] = vf_fma(w, in[k][i], acc[k][c][i % KEPT]);
            }
    }
#pragma GCC unroll 2
    for (int k = 0; k < rows; k++) {
        float *sums = p->sums[r + (uint32_t)k][strip];
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) {
#if VF_LANES >= 8
            __m256 old = _mm256_loadu_ps(sums + c * 8);
            _mm256_storeu_ps(sums + c * 8, _mm256_add_ps(old, vf_fold(acc[k][c][0])));
#else
#pragma GCC unroll 2
            for (int l = 0; l < KEPT; l++) {
                float *at = sums + c * 8 + l * VF_LANES;
                vf_store(at, vf_load(at) + acc[k][c][l]);
            }
#endif
        }
    }
}

/* Lanes to columns, back rotation, scales and bias. */
static void finish_row(const struct pass *p, const struct op_quantised *w, uint32_t r,
                       uint32_t out_first)
{
    float z[BLOCK];
    float *y = p->j->y + (p->row + r) * p->j->y_stride + out_first;
    for (uint32_t t = 0; t < TILES; t++)
        for (uint32_t c = 0; c < 8; c++) {
            const float *lane = p->sums[r][t] + 8 * c;
            z[t * OP_EXL3_TILE + c] = (lane[0] + lane[1]) + (lane[2] + lane[3]);
            z[t * OP_EXL3_TILE + 8 + c] = (lane[4] + lane[5]) + (lane[6] + lane[7]);
        }
    hadamard(z);
    for (uint32_t o = 0; o < BLOCK && out_first + o < w->out; o++)
        y[o] = z[o] * ((float)op_exl3_out_scale(w, out_first + o) * 0x1p-7f) +
               op_quantised_bias(w, out_first + o);
}

static void run_pass(const struct pass *p, uint32_t block)
{
    const struct op_quantised *w = p->j->w->quantised;
    uint64_t tile_bytes = 2 * (uint64_t)op_exl3_tile_u16(w->half_bits);
    struct exl3_decoder decoder;
    _Alignas(64) float weights[TILES][OP_EXL3_TILE_WEIGHTS];
    decoder_make(w, &decoder);
    memset(p->sums, 0, p->rows * sizeof(p->sums[0]));
    for (uint32_t i = 0; i < op_exl3_padded(w->in); i += BLOCK) {
        rotate_inputs(p, w, i);
        for (uint32_t strip = 0; strip < TILES; strip++) {
            const uint8_t *tile = w->codes + i / OP_EXL3_TILE * w->row_bytes +
                                  ((uint64_t)block * TILES + strip) * tile_bytes;
            for (uint32_t t = 0; t < TILES; t++, tile += w->row_bytes) {
                for (uint32_t b = 0; b < tile_bytes; b += 64) /* the same place a block on */
                    __builtin_prefetch(tile + TILES * w->row_bytes + b, 0, 2);
                decode_tile(&decoder, tile, weights[t]);
            }
            uint32_t r = 0;
            for (; r + ROWS_AT_ONCE <= p->rows; r += ROWS_AT_ONCE)
                strip_rows(p, weights, r, strip, ROWS_AT_ONCE);
            for (; r < p->rows; r++)
                strip_rows(p, weights, r, strip, 1);
        }
    }
    for (uint32_t r = 0; r < p->rows; r++)
        finish_row(p, w, r, block * BLOCK);
}

/* NOTE: two frames, so that a decode step does not walk over the stack of a prefill. */
static __attribute__((noinline)) void pass_one(const struct linear_job *j, uint32_t block,
                                               uint32_t row)
{
    _Alignas(64) float inputs[1][TILES][INPUTS], sums[1][TILES][COLUMN_SUMS];
    struct pass p = {j, row, 1, inputs, sums};
    run_pass(&p, block);
}

static __attribute__((noinline)) void pass_many(const struct linear_job *j, uint32_t block,
                                                uint32_t row, uint32_t rows)
{
    _Alignas(64) float inputs[PASS_ROWS][TILES][INPUTS], sums[PASS_ROWS][TILES][COLUMN_SUMS];
    struct pass p = {j, row, rows, inputs, sums};
    run_pass(&p, block);
}

void OP_FAST(exl3_block)(const struct linear_job *j, uint32_t block)
{
    CHECK(j->w->quantised != NULL && j->w->quantised->format == OP_FORMAT_EXL3);
    if (j->rows == 1) {
        pass_one(j, block, 0);
        return;
    }
    for (uint32_t row = 0; row < j->rows; row += PASS_ROWS)
        pass_many(j, block, row, j->rows - row < PASS_ROWS ? j->rows - row : PASS_ROWS);
}
