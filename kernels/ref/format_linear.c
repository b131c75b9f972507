/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_format.h"

#include <string.h>

#include "kernels/op_exl3.h"
#include "kernels/ref/op_dot.h"
#include "lib/base/check.h"

#define LINEAR_TILE 512 /* weights decoded at a time; a multiple of the eight lanes */
#define EXL3_ROWS   8u  /* rows of x that share a decoded row of tiles */

static const float *x_row(const struct op_quantised_linear_args *a, uint32_t r)
{
    return a->x + (a->x_rows != NULL ? a->x_rows[r] : r) * a->x_stride;
}

static void row_outs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_quantised_linear_args *a = arg;
    const struct op_quantised *w = a->w;
    float tile[LINEAR_TILE];
    for (uint32_t o = begin; o < end; o++)
        for (uint32_t r = 0; r < a->rows; r++) {
            struct op_lanes s;
            op_lanes_clear(&s);
            for (uint32_t i = 0; i < w->in; i += LINEAR_TILE) {
                uint32_t n = w->in - i < LINEAR_TILE ? w->in - i : LINEAR_TILE;
                op_quantised_row(w, o, i, n, tile);
                op_lanes_add(&s, tile, x_row(a, r) + i, n);
            }
            a->y[r * a->y_stride + o] = (float)(op_lanes_sum(&s) + op_quantised_bias(w, o));
        }
}

/* The padding counts as zero inputs, so what is stored there has no influence. */
static void rotate_input(const struct op_quantised *w, const float *x, uint32_t first,
                         double ret_a[OP_EXL3_BLOCK])
{
    for (uint32_t i = 0; i < OP_EXL3_BLOCK; i++)
        ret_a[i] = first + i < w->in ? x[first + i] * op_exl3_in_scale(w, first + i) : 0;
    op_hadamard128(ret_a);
}

/* Outputs [out_first, + 128) of `rows` rows of x; every row of tiles is decoded once for them. */
static void exl3_block(const struct op_quantised_linear_args *a, uint32_t out_first,
                       uint32_t row_first, uint32_t rows)
{
    const struct op_quantised *w = a->w;
    double z[EXL3_ROWS][OP_EXL3_BLOCK], rotated[EXL3_ROWS][OP_EXL3_BLOCK];
    float d[OP_EXL3_TILE][OP_EXL3_BLOCK];
    memset(z, 0, sizeof(z));
    /* The transform spreads the inputs over the whole block, so the padded rows count too. */
    for (uint32_t i = 0; i < op_exl3_padded(w->in); i += OP_EXL3_TILE) {
        if (i % OP_EXL3_BLOCK == 0)
            for (uint32_t r = 0; r < rows; r++)
                rotate_input(w, x_row(a, row_first + r), i, rotated[r]);
        for (uint32_t t = 0; t < OP_EXL3_BLOCK / OP_EXL3_TILE; t++)
            op_exl3_tile(w, i / OP_EXL3_TILE, out_first / OP_EXL3_TILE + t, &d[0][t * OP_EXL3_TILE],
                         OP_EXL3_BLOCK);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t k = 0; k < OP_EXL3_TILE; k++)
                for (uint32_t o = 0; o < OP_EXL3_BLOCK; o++)
                    z[r][o] += rotated[r][i % OP_EXL3_BLOCK + k] * d[k][o];
    }
    for (uint32_t r = 0; r < rows; r++) {
        float *y = a->y + (row_first + r) * a->y_stride;
        op_hadamard128(z[r]);
        for (uint32_t o = 0; o < OP_EXL3_BLOCK && out_first + o < w->out; o++)
            y[out_first + o] = (float)(z[r][o] * op_exl3_out_scale(w, out_first + o) * 0x1p-7 +
                                       op_quantised_bias(w, out_first + o));
    }
}

static void exl3_outs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_quantised_linear_args *a = arg;
    for (uint32_t block = begin; block < end; block++)
        for (uint32_t r = 0; r < a->rows; r += EXL3_ROWS)
            exl3_block(a, block * OP_EXL3_BLOCK, r,
                       a->rows - r < EXL3_ROWS ? a->rows - r : EXL3_ROWS);
}

enum err op_quantised_linear_ref(const struct op_quantised_linear_args *a, const struct op_ctx *ctx)
{
    const struct op_quantised *w = a->w;
    CHECK(w->in > 0 && w->codes != NULL);
    uint64_t cost = (uint64_t)w->in * a->rows;
    if (w->format == OP_FORMAT_EXL3)
        op_for(ctx, op_exl3_padded(w->out) / OP_EXL3_BLOCK, cost * OP_EXL3_BLOCK, exl3_outs, a);
    else
        op_for(ctx, w->out, cost, row_outs, a);
    return ERR_OK;
}

static void dense_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_dequantise_args *a = arg;
    for (uint32_t o = begin; o < end; o++)
        op_quantised_row(a->w, o, 0, a->w->in, a->y + (uint64_t)o * a->w->in);
}

/* Columns of D are transformed first, then rows; both in place.  All sums are exact in f64: an
 * f16 value of a codebook is a multiple of 2^-23 below 4, and there are 2^14 of them. */
static void dense_block(const struct op_dequantise_args *a, uint32_t in_first, uint32_t out_first)
{
    const struct op_quantised *w = a->w;
    double d[OP_EXL3_BLOCK][OP_EXL3_BLOCK]; /* [out, in] */
    float tile[OP_EXL3_TILE_WEIGHTS];
    for (uint32_t i = 0; i < OP_EXL3_BLOCK; i += OP_EXL3_TILE)
        for (uint32_t o = 0; o < OP_EXL3_BLOCK; o += OP_EXL3_TILE) {
            op_exl3_tile(w, (in_first + i) / OP_EXL3_TILE, (out_first + o) / OP_EXL3_TILE, tile,
                         OP_EXL3_TILE);
            for (uint32_t t = 0; t < OP_EXL3_TILE_WEIGHTS; t++)
                d[o + t % OP_EXL3_TILE][i + t / OP_EXL3_TILE] = tile[t];
        }
    for (uint32_t o = 0; o < OP_EXL3_BLOCK; o++)
        op_hadamard128(d[o]);
    for (uint32_t step = 1; step < OP_EXL3_BLOCK; step *= 2)
        for (uint32_t o = 0; o < OP_EXL3_BLOCK; o++)
            for (uint32_t i = 0; (o & step) == 0 && i < OP_EXL3_BLOCK; i++) {
                double p = d[o][i], q = d[o + step][i];
                d[o][i] = p + q;
                d[o + step][i] = p - q;
            }
    for (uint32_t o = 0; o < OP_EXL3_BLOCK && out_first + o < w->out; o++) {
        double scale = op_exl3_out_scale(w, out_first + o) * 0x1p-7;
        for (uint32_t i = 0; i < OP_EXL3_BLOCK && in_first + i < w->in; i++)
            a->y[(uint64_t)(out_first + o) * w->in + in_first + i] =
                (float)(d[o][i] * scale * op_exl3_in_scale(w, in_first + i));
    }
}

static void dense_blocks(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_dequantise_args *a = arg;
    for (uint32_t block = begin; block < end; block++)
        for (uint32_t i = 0; i < a->w->in; i += OP_EXL3_BLOCK)
            dense_block(a, i, block * OP_EXL3_BLOCK);
}

enum err op_dequantise_ref(const struct op_dequantise_args *a, const struct op_ctx *ctx)
{
    const struct op_quantised *w = a->w;
    CHECK(w->in > 0 && w->codes != NULL);
    if (w->format == OP_FORMAT_EXL3)
        op_for(ctx, op_exl3_padded(w->out) / OP_EXL3_BLOCK, (uint64_t)w->in * OP_EXL3_BLOCK,
               dense_blocks, a);
    else
        op_for(ctx, w->out, w->in, dense_rows, a);
    return ERR_OK;
}
