/* SPDX-License-Identifier: Apache-2.0 */
/* EXL3 against rows of activations in f32, compiled once per instruction set.
 *
 * Weights stay in their tile's own order: eight weights that follow each other belong to two
 * columns and four rows of the tile, so they are multiplied by four inputs, twice the same, and
 * summed lane by lane; lanes are added once at the end.  A tile is decoded once for all rows of a
 * pass.  A row's sums run over the tiles from top to bottom, whatever else is in the pass. */
#include <stddef.h>
#include <string.h>

#include "kernels/cpu/op_quant_fast.h"
#include "kernels/cpu/op_vec.h"
#include "kernels/op_exl3.h"
#include "lib/base/check.h"

#define BLOCK       OP_EXL3_BLOCK
#define TILES       (BLOCK / OP_EXL3_TILE)
#define PASS_ROWS   512 /* rows that share a decoded tile */
#define PATTERN     32  /* weights after which the rows of the tile repeat */
#define COLUMN_SUMS 64  /* lanes of sums of a tile's 16 columns: eight for each two */

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

#if !defined(__aarch64__)

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

/* The tile's 256 weights in its own order, exact. */
static void decode_tile(const struct op_quantised *w, const uint8_t *tile, float *out)
{
#if !defined(__aarch64__)
    if (w->half_bits == 8 && w->codebook == OP_CODEBOOK_MCG) {
        tile_mcg4(tile, out);
        return;
    }
#endif
    uint16_t states[256];
    op_exl3_states(tile, w->half_bits, states);
    for (uint32_t t = 0; t < 256; t += VF_LANES) {
        vu wide;
        for (uint32_t i = 0; i < VF_LANES; i++)
            wide[i] = states[t + i];
        vf_store(out + t, values_of(wide, w->codebook));
    }
}

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

/* What a pass over up to PASS_ROWS rows keeps. */
struct pass {
    const struct linear_job *j;
    uint32_t row, rows;
    float (*inputs)[TILES][PATTERN];   /* [rows] rotated, in the order of a tile's rows */
    float (*sums)[TILES][COLUMN_SUMS]; /* [rows] */
};

/* Inputs [first, + BLOCK) of every row: scaled, rotated, ordered.  The padding counts as zero. */
static void rotate_inputs(const struct pass *p, const struct op_quantised *w, uint32_t first)
{
    float scale[BLOCK];
    uint32_t n = w->in - first < BLOCK ? w->in - first : BLOCK;
    for (uint32_t i = 0; i < n; i++)
        scale[i] = (float)op_exl3_in_scale(w, first + i);
    for (uint32_t r = 0; r < p->rows; r++) {
        float a[BLOCK] = {0};
        const float *x = job_x(p->j, p->row + r) + first;
        for (uint32_t i = 0; i < n; i++)
            a[i] = x[i] * scale[i];
        hadamard(a);
        for (uint32_t t = 0; t < TILES; t++)
            for (uint32_t k = 0; k < PATTERN; k += 8) {
                float *to = &p->inputs[r][t][k];
                const float *from = a + t * OP_EXL3_TILE + k / 4;
                memcpy(to, from, 8);
                memcpy(to + 2, from + 8, 8);
                memcpy(to + 4, to, 16);
            }
    }
}

/* sums += weights * inputs for one tile and one row. */
VF_INLINE void tile_row(const float *weights, const float *inputs, float *sums)
{
    enum { KEPT = VF_LANES < 8 ? 2 : 1, STEPS = PATTERN / VF_LANES, EACH = KEPT * VF_LANES };
    vf in[STEPS];
#pragma GCC unroll 8
    for (int i = 0; i < STEPS; i++)
        in[i] = vf_load(inputs + i * VF_LANES);
#pragma GCC unroll 2
    for (int c = 0; c < 8; c++) {
        /* NOTE: sixteen lanes hold two portions of the same columns; they take turns below. */
        vf acc[KEPT];
#if VF_LANES >= 16
        acc[0] = vf_zero();
#else
#pragma GCC unroll 2
        for (int k = 0; k < KEPT; k++)
            acc[k] = vf_load(sums + c * 8 + k * VF_LANES);
#endif
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++)
            acc[i % KEPT] =
                vf_fma(vf_load(weights + c * PATTERN + i * VF_LANES), in[i], acc[i % KEPT]);
#if VF_LANES >= 16
        float lane[VF_LANES];
        vf_store(lane, acc[0]);
        for (int i = 0; i < 8; i++)
            sums[c * 8 + i] += lane[i] + lane[8 + i];
#else
#pragma GCC unroll 2
        for (int k = 0; k < KEPT; k++)
            vf_store(sums + c * 8 + k * VF_LANES, acc[k]);
#endif
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
    memset(p->sums, 0, p->rows * sizeof(p->sums[0]));
    for (uint32_t i = 0; i < op_exl3_padded(w->in); i += BLOCK) {
        rotate_inputs(p, w, i);
        for (uint32_t tr = 0; tr < TILES; tr++) {
            const uint8_t *tiles = w->codes + (i / OP_EXL3_TILE + tr) * w->row_bytes +
                                   (uint64_t)block * TILES * tile_bytes;
            for (uint32_t tc = 0; tc < TILES; tc++) {
                float weights[OP_EXL3_TILE_WEIGHTS];
                const uint8_t *tile = tiles + tc * tile_bytes;
                for (uint32_t b = 0; b < tile_bytes; b += 64)
                    __builtin_prefetch(tile + 2 * w->row_bytes + b, 0, 2);
                decode_tile(w, tile, weights);
                for (uint32_t r = 0; r < p->rows; r++)
                    tile_row(weights, p->inputs[r][tr], p->sums[r][tc]);
            }
        }
    }
    for (uint32_t r = 0; r < p->rows; r++)
        finish_row(p, w, r, block * BLOCK);
}

/* NOTE: two frames, so that a decode step does not walk over the stack of a prefill. */
static __attribute__((noinline)) void pass_one(const struct linear_job *j, uint32_t block,
                                               uint32_t row)
{
    _Alignas(64) float inputs[1][TILES][PATTERN], sums[1][TILES][COLUMN_SUMS];
    struct pass p = {j, row, 1, inputs, sums};
    run_pass(&p, block);
}

static __attribute__((noinline)) void pass_many(const struct linear_job *j, uint32_t block,
                                                uint32_t row, uint32_t rows)
{
    _Alignas(64) float inputs[PASS_ROWS][TILES][PATTERN], sums[PASS_ROWS][TILES][COLUMN_SUMS];
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
