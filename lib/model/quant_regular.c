/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_regular.h"

#include <math.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"

#define CODEBOOK_DEVIATION 1.24371088 /* of 3inst; the convention of all codebooks */
#define ROOT_128           0.08838834764831845
#define COLUMN_ZERO        1e-30
#define NEVER_ZERO         1e-10
#define DEAD_SCALE         0.1 /* stands in for a scale that does not matter */

/* RMS of every column over their mean; 0 for a matrix of zeros. */
static void column_weights(const struct quant_regular *m, double *ret_weights)
{
    double mean = 0;
    for (uint32_t c = 0; c < m->out; c++)
        ret_weights[c] = 0;
    for (uint32_t r = 0; r < m->in; r++)
        for (uint32_t c = 0; c < m->out; c++) {
            double v = m->r[(uint64_t)r * m->out + c];
            ret_weights[c] += v * v;
        }
    for (uint32_t c = 0; c < m->out; c++) {
        ret_weights[c] = sqrt(ret_weights[c] / m->in);
        mean += ret_weights[c] / m->out;
    }
    for (uint32_t c = 0; c < m->out && mean > 0; c++)
        ret_weights[c] /= mean;
}

/* Columns of zeros keep a scale of exactly 0, so that they decode to 0. */
static void scale_columns(struct quant_regular *m, bool out_scales, double *weights)
{
    column_weights(m, weights);
    for (uint32_t c = 0; c < m->out; c++) {
        double weight = weights[c] < COLUMN_ZERO ? DEAD_SCALE : weights[c];
        if (out_scales)
            m->sv[c] = m->sv[c] * weight + NEVER_ZERO;
    }
    for (uint32_t r = 0; r < m->in; r++)
        for (uint32_t c = 0; c < m->out; c++)
            m->r[(uint64_t)r * m->out + c] = (float)(m->r[(uint64_t)r * m->out + c] / m->sv[c]);
    for (uint32_t c = 0; c < m->out; c++)
        if (weights[c] < COLUMN_ZERO)
            m->sv[c] = 0;
}

/* One row: transform along the outputs, then its own scale. */
static void regular_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct quant_regular *m = arg;
    for (uint32_t r = begin; r < end; r++) {
        float *row = m->r + (uint64_t)r * m->out;
        double square = 0, v[OP_EXL3_BLOCK];
        for (uint32_t c = 0; c < m->out; c += OP_EXL3_BLOCK) {
            for (uint32_t i = 0; i < OP_EXL3_BLOCK; i++)
                v[i] = row[c + i];
            op_hadamard128(v);
            for (uint32_t i = 0; i < OP_EXL3_BLOCK; i++) {
                row[c + i] = (float)(v[i] * ROOT_128);
                square += (double)row[c + i] * row[c + i];
            }
        }
        double rms = square > 0 ? sqrt(square / m->out) : DEAD_SCALE;
        m->su[r] = m->su[r] * rms / -CODEBOOK_DEVIATION + NEVER_ZERO;
        for (uint32_t c = 0; c < m->out; c++)
            row[c] = (float)(row[c] / m->su[r]);
    }
}

/* 128 rows: transform along the inputs. */
static void regular_blocks(const void *arg, uint32_t begin, uint32_t end)
{
    const struct quant_regular *m = arg;
    for (uint32_t block = begin; block < end; block++)
        for (uint32_t c = 0; c < m->out; c++) {
            float *column = m->r + (uint64_t)block * OP_EXL3_BLOCK * m->out + c;
            double v[OP_EXL3_BLOCK];
            for (uint32_t i = 0; i < OP_EXL3_BLOCK; i++)
                v[i] = column[(uint64_t)i * m->out];
            op_hadamard128(v);
            for (uint32_t i = 0; i < OP_EXL3_BLOCK; i++)
                column[(uint64_t)i * m->out] = (float)(v[i] * ROOT_128);
        }
}

void quant_regularise(struct quant_regular *m, bool out_scales, const struct op_ctx *ctx)
{
    CHECK(m->in % OP_EXL3_BLOCK == 0 && m->out % OP_EXL3_BLOCK == 0);
    double *weights = mem_take_array(m->out, sizeof(*weights));
    scale_columns(m, out_scales, weights);
    mem_give(weights);
    op_for(ctx, m->in, m->out * 16ull, regular_rows, m);
    op_for(ctx, m->in / OP_EXL3_BLOCK, m->out * 16ull * OP_EXL3_BLOCK, regular_blocks, m);
}

void quant_tile_values(const struct quant_regular *m, uint32_t tile_row, uint32_t tile_column,
                       double scale, float ret_values[256])
{
    const float *tile =
        m->r + (uint64_t)tile_row * OP_EXL3_TILE * m->out + (uint64_t)tile_column * OP_EXL3_TILE;
    for (uint32_t t = 0; t < OP_EXL3_TILE_WEIGHTS; t++)
        ret_values[t] =
            (float)(scale * tile[(uint64_t)op_exl3_row_of(t) * m->out + op_exl3_column_of(t)]);
}
