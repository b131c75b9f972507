/* SPDX-License-Identifier: Apache-2.0 */
/* What surrounds the recurrence of KDA, in f32: short convolution, gates, gated output. */
#include "kernels/op_kda.h"

#include <math.h>
#include <stddef.h>

#include "kernels/cpu/op_fast.h"
#include "kernels/cpu/op_vec.h"
#include "lib/base/check.h"

#define CONV_CHUNK 64 /* channels of one item; a multiple of every VF_LANES */

/* The row of a position, NULL where the sequence had none. */
static const float *conv_row(const struct op_short_conv_args *a, const struct op_seq *seq,
                             int64_t position)
{
    if (position >= seq->position_start)
        return a->x + (seq->row_begin + (uint64_t)(position - seq->position_start)) * a->channels;
    if (position < 0 || seq->fresh)
        return NULL;
    const float *ring = (const float *)(const void *)(seq->slot + a->ring_offset);
    return ring + (uint64_t)(position % a->ring_rows) * a->channels;
}

static void conv_chunk(const struct op_short_conv_args *a, const struct op_seq *seq, uint32_t first,
                       uint32_t channels)
{
    float taps[OP_CONV_TAPS_MAX][CONV_CHUNK] = {{0}};
    for (uint32_t t = 0; t < a->taps; t++)
        for (uint32_t c = 0; c < channels; c++)
            taps[t][c] = a->w[(uint64_t)(first + c) * a->taps + t];
    for (uint32_t r = 0; r < seq->row_count; r++) {
        const float *rows[OP_CONV_TAPS_MAX];
        for (uint32_t t = 0; t < a->taps; t++)
            rows[t] = conv_row(a, seq, (int64_t)seq->position_start + r + t - (a->taps - 1));
        float *y = a->y + (uint64_t)(seq->row_begin + r) * a->channels + first;
        VF_EACH(channels, c, count)
        {
            vf sum = vf_zero();
            for (uint32_t t = 0; t < a->taps; t++)
                if (rows[t] != NULL)
                    sum = vf_fma(vf_load(&taps[t][c]), vf_get(rows[t] + first + c, count), sum);
            vf_put(y + c, sum / (1.0f + vf_exp(-sum)), count);
        }
    }
    float *ring = (float *)(void *)(seq->slot + a->ring_offset);
    uint32_t kept = seq->row_count > a->ring_rows ? seq->row_count - a->ring_rows : 0;
    for (uint32_t r = kept; r < seq->row_count; r++) {
        float *to = ring + (uint64_t)((seq->position_start + r) % a->ring_rows) * a->channels;
        const float *from = a->x + (uint64_t)(seq->row_begin + r) * a->channels;
        memcpy(to + first, from + first, channels * sizeof(float));
    }
}

static void conv_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_short_conv_args *a = arg;
    uint32_t chunks = (a->channels + CONV_CHUNK - 1) / CONV_CHUNK;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t first = i % chunks * CONV_CHUNK;
        uint32_t left = a->channels - first;
        conv_chunk(a, &a->seqs[i / chunks], first, left < CONV_CHUNK ? left : CONV_CHUNK);
    }
}

enum err OP_FAST(short_conv)(const struct op_short_conv_args *a, const struct op_ctx *ctx)
{
    CHECK(a->taps > 0 && a->taps <= OP_CONV_TAPS_MAX);
    CHECK(a->ring_rows + 1 >= a->taps);
    CHECK(a->seq_count > 0);
    uint32_t chunks = (a->channels + CONV_CHUNK - 1) / CONV_CHUNK;
    uint64_t cost = (uint64_t)CONV_CHUNK * 4 * (a->row_count / a->seq_count + 1);
    op_for(ctx, a->seq_count * chunks, cost, conv_items, a);
    return ERR_OK;
}

static void gates_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_gates_args *a = arg;
    vf bound = vf_all((float)a->lower_bound);
    for (uint32_t i = begin; i < end; i++) {
        uint32_t head = i % a->heads;
        const float *bias = a->dt_bias + (uint64_t)head * a->dim;
        const float *u = a->u + (uint64_t)i * a->dim;
        float *g = a->log_decay + (uint64_t)i * a->dim;
        vf rate = vf_exp(vf_all(a->a_log[head]));
        VF_EACH(a->dim, c, count)
        {
            vf x = rate * (vf_get(u + c, count) + vf_get(bias + c, count));
            vf_put(g + c, bound * vf_sigmoid(x), count);
        }
        a->beta[i] = vf_sigmoid(vf_all(a->b[i]))[0];
    }
}

enum err OP_FAST(kda_gates)(const struct op_kda_gates_args *a, const struct op_ctx *ctx)
{
    CHECK(a->heads > 0);
    CHECK(a->lower_bound < 0);
    op_for(ctx, a->rows * a->heads, (uint64_t)4 * a->dim, gates_rows, a);
    return ERR_OK;
}

static void out_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_out_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *o = a->o + (uint64_t)i * a->dim, *gate = a->gate + (uint64_t)i * a->dim;
        float *y = a->y + (uint64_t)i * a->dim;
        vf sum = vf_zero();
        VF_EACH(a->dim, c, count)
        {
            vf v = vf_get(o + c, count);
            sum = vf_fma(v, v, sum);
        }
        float factor = 1 / sqrtf(vf_sum(sum) / (float)a->dim + (float)a->eps);
        VF_EACH(a->dim, c, count)
        {
            vf v = vf_get(a->w + c, count) * (vf_get(o + c, count) * factor);
            vf_put(y + c, v * vf_sigmoid(vf_get(gate + c, count)), count);
        }
    }
}

enum err OP_FAST(kda_out)(const struct op_kda_out_args *a, const struct op_ctx *ctx)
{
    CHECK(a->heads > 0);
    CHECK(a->dim > 0);
    op_for(ctx, a->rows * a->heads, (uint64_t)4 * a->dim, out_rows, a);
    return ERR_OK;
}
