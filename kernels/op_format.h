/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_format.h - a weight in any storage format as it lies in memory, and its exact values.
 *
 * Pure.  W is [out, in] for every format; EXL3 stores the transpose in tiles (see op_exl3.h).
 * Each value is formed with one rounding to f32:
 *   plain   the element widened
 *   FP8     e4m3 * scale                  scale f32, bf16, f16 or E8M0, shared by a block of W
 *   MXFP8   e4m3 * 2^(b - 127)            one byte for 32 inputs
 *   MXFP4   e2m1 * 2^(b - 127)            one byte for 32 inputs, low nibble first
 *   NVFP4   (e2m1 * e4m3) * global        one E4M3 for 16 inputs; or / global
 *   EXL3    suh[i] svh[o] (H D H)[i][o] / 128, formed in f64
 * A NaN code gives NaN, overflow gives infinity, subnormals are kept: whether such a weight may be
 * used at all is the loader's question.  Nothing here needs aligned codes or scales. */
#ifndef KERNELS_OP_FORMAT_H
#define KERNELS_OP_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"

enum op_format {
    OP_FORMAT_PLAIN,
    OP_FORMAT_FP8, /* per tensor, per channel or per block: see struct op_scales */
    OP_FORMAT_MXFP8,
    OP_FORMAT_MXFP4,
    OP_FORMAT_NVFP4,
    OP_FORMAT_EXL3,
};

enum op_scale_dtype { OP_SCALE_F32, OP_SCALE_BF16, OP_SCALE_F16, OP_SCALE_E8M0, OP_SCALE_E4M3 };

enum op_codebook { OP_CODEBOOK_3INST, OP_CODEBOOK_MCG, OP_CODEBOOK_MUL1 };

#define OP_SHARED_BY_ALL UINT32_MAX /* rows or columns of W under one scale: all of them */

/* W[o][i] has the scale at row (row_phase + o) / rows_shared, column (column_phase + i) /
 * columns_shared.  The phases are 0 but in a piece that was cut inside a block. */
struct op_scales {
    const void *data;
    enum op_scale_dtype dtype;
    uint32_t rows_shared, columns_shared;
    uint32_t row_phase, column_phase;
    uint64_t stride; /* elements from a row of scales to the next */
};

/* Everything a weight consists of; borrows all memory. */
struct op_quantised {
    enum op_format format;
    uint32_t out, in; /* as the model counts, without padding */
    const uint8_t *codes;
    uint64_t row_bytes; /* from an output row to the next; EXL3: from a row of tiles to the next */
    struct op_scales scales; /* FP8, MXFP8, MXFP4, NVFP4 */
    float global;            /* NVFP4 */
    bool global_divides;     /* NVFP4: compressed-tensors divides, modelopt multiplies */
    bool no_nan;             /* FP8, MXFP8: somebody has looked, and no code is NaN */
    enum op_dtype dtype;     /* plain */
    const void *bias;        /* [out], NULL if there is none; EXL3 rounds it to f16 */
    enum op_dtype bias_dtype;
    /* EXL3 */
    enum op_codebook codebook;
    uint32_t half_bits;  /* twice the bits of a weight: 2, 3, 4, 5, 6, 7, 8, 10 .. 16 */
    const void *suh;     /* f16 [padded in]; NULL: signs in su */
    const void *svh;     /* f16 [padded out]; NULL: signs in sv */
    const void *su, *sv; /* 16-bit words, a bit for an element, low bit first, set = -1 */
};

/* Columns [first, first + count) of row `row` of W.  Not for EXL3. */
void op_quantised_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t count,
                      float *ret_values);

/* The scale of W[row][column] and the first column after it that has another; the formats with
 * scales only. */
float op_quantised_scale(const struct op_quantised *w, uint32_t row, uint32_t column,
                         uint32_t *ret_end);

float op_quantised_bias(const struct op_quantised *w, uint32_t out); /* 0 if there is none */

/* A piece for one rank: rows [out_first, + out_count), columns [in_first, + in_count) of W,
 * sharing the memory of w.  Outputs of pieces by rows concatenate; outputs of pieces by columns
 * add up, the bias staying with the piece that begins at column 0.  ERR_INVALID: empty, out of
 * range, or a cut inside a unit of storage (EXL3: 128 in both directions; FP4: a byte). */
MUST_USE enum err op_quantised_cut(const struct op_quantised *w, uint32_t out_first,
                                   uint32_t out_count, uint32_t in_first, uint32_t in_count,
                                   struct op_quantised *ret_piece);

/* The range of rank `rank` of `ranks` over `size` in blocks of 128; earlier ranks take one block
 * more where it does not come out even.  May be empty. */
void op_cut_range(uint32_t size, uint32_t ranks, uint32_t rank, uint32_t *ret_first,
                  uint32_t *ret_count);

/* y = W x + bias.  x f32 [rows, in] and y f32 [rows, out] with strides, not overlapping.
 * Products and sums in f64 in a fixed order, one rounding to f32 at the end; a row's bits do not
 * depend on the other rows, nor on the threads. */
struct op_quantised_linear_args {
    const float *x;
    const struct op_quantised *w;
    float *y;
    const uint32_t *x_rows; /* [rows] row of x for each row of y; NULL = its own number */
    uint32_t rows;
    uint64_t x_stride, y_stride;
};

/* y [out, in] = W, dense. */
struct op_dequantise_args {
    const struct op_quantised *w;
    float *y;
};

MUST_USE enum err op_quantised_linear_ref(const struct op_quantised_linear_args *a,
                                          const struct op_ctx *ctx);
MUST_USE enum err op_dequantise_ref(const struct op_dequantise_args *a, const struct op_ctx *ctx);

#endif
