/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_kda.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"

#define CONV_CHUNK 64 /* channels of one item */

/* The row of position p, NULL where the sequence had none: before its start. */
static const float *conv_row(const struct op_short_conv_args *a, const struct op_seq *seq,
                             const float *ring, int64_t position)
{
    if (position < 0)
        return NULL;
    if (position >= seq->position_start)
        return a->x + (seq->row_begin + (uint64_t)(position - seq->position_start)) * a->channels;
    return ring + (uint64_t)(position % a->ring_rows) * a->channels;
}

static void conv_chunk(const struct op_short_conv_args *a, const struct op_seq *seq,
                       uint32_t c_begin, uint32_t c_end)
{
    float *ring = (float *)(void *)(seq->slot + a->ring_offset);
    for (uint32_t r = 0; r < seq->row_count; r++) {
        const float *rows[OP_CONV_TAPS_MAX];
        for (uint32_t t = 0; t < a->taps; t++)
            rows[t] = conv_row(a, seq, ring, (int64_t)seq->position_start + r + t - (a->taps - 1));
        float *y = a->y + (uint64_t)(seq->row_begin + r) * a->channels;
        for (uint32_t c = c_begin; c < c_end; c++) {
            const float *w = a->w + (uint64_t)c * a->taps;
            double sum = 0;
            for (uint32_t t = 0; t < a->taps; t++)
                sum += rows[t] != NULL ? (double)w[t] * rows[t][c] : 0;
            y[c] = (float)(sum / (1 + exp(-sum)));
        }
    }
    uint32_t first = seq->row_count > a->ring_rows ? seq->row_count - a->ring_rows : 0;
    for (uint32_t r = first; r < seq->row_count; r++) {
        float *to = ring + (uint64_t)((seq->position_start + r) % a->ring_rows) * a->channels;
        const float *from = a->x + (uint64_t)(seq->row_begin + r) * a->channels;
        memcpy(to + c_begin, from + c_begin, (c_end - c_begin) * sizeof(float));
    }
}

static void conv_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_short_conv_args *a = arg;
    uint32_t chunks = (a->channels + CONV_CHUNK - 1) / CONV_CHUNK;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t c = i % chunks * CONV_CHUNK;
        uint32_t c_end = c + CONV_CHUNK < a->channels ? c + CONV_CHUNK : a->channels;
        conv_chunk(a, &a->seqs[i / chunks], c, c_end);
    }
}

enum err op_short_conv_ref(const struct op_short_conv_args *a, const struct op_ctx *ctx)
{
    CHECK(a->taps > 0 && a->taps <= OP_CONV_TAPS_MAX);
    CHECK(a->ring_rows + 1 >= a->taps);
    CHECK(a->seq_count > 0);
    uint32_t chunks = (a->channels + CONV_CHUNK - 1) / CONV_CHUNK;
    uint64_t cost = (uint64_t)CONV_CHUNK * (a->taps + 16) * (a->row_count / a->seq_count + 1);
    op_for(ctx, a->seq_count * chunks, cost, conv_items, a);
    return ERR_OK;
}
