/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_index.h"

#include <math.h>
#include <string.h>

#include "kernels/op_kv_row.h"
#include "kernels/ref/op_dot.h"
#include "lib/base/check.h"

/* Key (part 0) or gate (part 1) of a position, from the batch or from the ring. */
static const float *index_row(const struct op_index_pool_args *a, const struct op_seq *seq,
                              uint32_t position, uint32_t part)
{
    if (position >= seq->position_start) {
        uint64_t row = seq->row_begin + (position - seq->position_start);
        return (part == 0 ? a->key : a->gate) + row * a->dim;
    }
    const float *ring = (const float *)(const void *)(seq->slot + a->ring_offset);
    return ring + ((uint64_t)(position % a->ring_rows) * 2 + part) * a->dim;
}

static void pool_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_pool_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        const struct op_seq *seq = &a->seqs[a->seq_of[r]];
        uint32_t last = seq->position_start + (r - seq->row_begin);
        if ((last + 1) % a->kpool != 0 || !op_shard_owns(&a->pages.shard, last / a->kpool))
            continue;
        const float *key[OP_KPOOL_MAX], *gate[OP_KPOOL_MAX];
        for (uint32_t j = 0; j < a->kpool; j++) {
            key[j] = index_row(a, seq, last + 1 - a->kpool + j, 0);
            gate[j] = index_row(a, seq, last + 1 - a->kpool + j, 1);
        }
        float pool[OP_INDEX_DIM_MAX];
        for (uint32_t c = 0; c < a->dim; c++) {
            double top = -INFINITY, sum = 0, value = 0;
            for (uint32_t j = 0; j < a->kpool; j++)
                top = fmax(top, (double)gate[j][c] + a->ape[j * a->dim + c]);
            for (uint32_t j = 0; j < a->kpool; j++) {
                double weight = exp((double)gate[j][c] + a->ape[j * a->dim + c] - top);
                sum += weight;
                value += weight * key[j][c];
            }
            pool[c] = (float)(value / sum);
        }
        op_index_row_store(a->pages.type, pool, a->dim,
                           op_page_row(&a->pages, seq->blocks, last / a->kpool, a->dim));
    }
}

/* Second pass, after every pool has read the old ring. */
static void ring_seqs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_pool_args *a = arg;
    for (uint32_t s = begin; s < end; s++) {
        const struct op_seq *seq = &a->seqs[s];
        float *ring = (float *)(void *)(seq->slot + a->ring_offset);
        uint32_t first = seq->row_count > a->ring_rows ? seq->row_count - a->ring_rows : 0;
        for (uint32_t r = first; r < seq->row_count; r++) {
            float *to = ring + (uint64_t)((seq->position_start + r) % a->ring_rows) * 2 * a->dim;
            uint64_t from = (uint64_t)(seq->row_begin + r) * a->dim;
            memcpy(to, a->key + from, a->dim * sizeof(float));
            memcpy(to + a->dim, a->gate + from, a->dim * sizeof(float));
        }
    }
}

enum err op_index_pool_ref(const struct op_index_pool_args *a, const struct op_ctx *ctx)
{
    CHECK(a->kpool > 1 && a->kpool <= OP_KPOOL_MAX);
    CHECK(a->ring_rows + 1 >= a->kpool);
    CHECK(a->dim > 0 && a->dim <= OP_INDEX_DIM_MAX);
    op_for(ctx, a->rows, (uint64_t)a->dim * 16, pool_rows, a);
    op_for(ctx, a->seq_count, a->dim, ring_seqs, a);
    return ERR_OK;
}

/* Complete pools among the row's visible tokens. */
static uint32_t row_pools(const struct op_seq *seq, uint32_t row, uint32_t kpool)
{
    return (seq->position_start + (row - seq->row_begin) + 1) / kpool;
}

static void score_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_score_args *a = arg;
    double head_scale = 1 / sqrt((double)a->heads), dim_scale = 1 / sqrt((double)a->dim);
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = a->row_first + i;
        const struct op_seq *seq = &a->seqs[a->seq_of[row]];
        uint32_t pools = row_pools(seq, row, a->kpool);
        if (pools <= a->pools_kept)
            continue;
        const float *q = a->q + (uint64_t)row * a->heads * a->dim;
        const float *w = a->w + (uint64_t)row * a->heads;
        for (uint32_t p = 0; p < pools; p++) {
            if (!op_shard_owns(&a->pages.shard, p))
                continue;
            float tile[OP_INDEX_DIM_MAX];
            const float *key = op_page_load(&a->pages, seq->blocks, p, a->dim, tile);
            double sum = 0;
            for (uint32_t h = 0; h < a->heads; h++) {
                double dot = op_dot(key, q + (uint64_t)h * a->dim, a->dim);
                sum += dot > 0 ? w[h] * head_scale * (dot * dim_scale) : 0;
            }
            a->score[i * a->score_stride + p] = sum;
        }
    }
}

enum err op_index_score_ref(const struct op_index_score_args *a, const struct op_ctx *ctx)
{
    CHECK(a->kpool > 1);
    CHECK(a->dim > 0 && a->dim <= OP_INDEX_DIM_MAX);
    CHECK(a->pools_kept > 0 && a->pools_kept <= OP_POOLS_KEPT_MAX);
    uint64_t cost = a->score_stride * a->heads * a->dim / 2;
    op_for(ctx, a->row_count, cost, score_rows, a);
    return ERR_OK;
}

static void rotate_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_rotate_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        op_index_rotate_row(a->q + (uint64_t)i * a->dim, a->dim);
}

enum err op_index_rotate_ref(const struct op_index_rotate_args *a, const struct op_ctx *ctx)
{
    CHECK(a->dim > 0 && a->dim <= OP_INDEX_DIM_MAX);
    op_for(ctx, a->rows * a->heads, (uint64_t)a->dim * 8, rotate_rows, a);
    return ERR_OK;
}

/* True if pool x comes after pool y in the order of choice. */
static bool pool_after(const double *score, uint32_t x, uint32_t y)
{
    return score[x] < score[y] || (score[x] == score[y] && x > y);
}

static void heap_sink(uint32_t *heap, uint32_t count, const double *score)
{
    uint32_t at = 0, pool = heap[0];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && pool_after(score, heap[child + 1], heap[child]))
            child++;
        if (!pool_after(score, heap[child], pool))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = pool;
}

/* The last of the chosen pools: the root of a heap of the best kept ones. */
static uint32_t pool_cut(const double *score, uint32_t pools, uint32_t kept, uint32_t *heap)
{
    for (uint32_t i = 0; i < kept; i++) {
        uint32_t at = i;
        while (at > 0 && pool_after(score, i, heap[(at - 1) / 2])) {
            heap[at] = heap[(at - 1) / 2];
            at = (at - 1) / 2;
        }
        heap[at] = i;
    }
    for (uint32_t p = kept; p < pools; p++) {
        if (pool_after(score, heap[0], p)) {
            heap[0] = p;
            heap_sink(heap, kept, score);
        }
    }
    return heap[0];
}

static void select_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_select_args *a = arg;
    uint32_t heap[OP_POOLS_KEPT_MAX];
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = a->row_first + i;
        const struct op_seq *seq = &a->seqs[a->seq_of[row]];
        uint32_t tokens = seq->position_start + (row - seq->row_begin) + 1;
        uint32_t pools = tokens / a->kpool, count = 0;
        uint32_t *out = a->selected + (uint64_t)row * a->selected_stride;
        const double *score = a->score + i * a->score_stride;
        uint32_t cut = pools;
        if (pools > a->pools_kept)
            cut = pool_cut(score, pools, a->pools_kept, heap);
        for (uint32_t p = 0; p < pools && count < a->pools_kept * a->kpool; p++) {
            if (cut != pools && p != cut && !pool_after(score, cut, p))
                continue;
            for (uint32_t j = 0; j < a->kpool; j++)
                out[count++] = p * a->kpool + j;
        }
        for (uint32_t position = pools * a->kpool; position < tokens; position++)
            out[count++] = position;
        a->selected_count[row] = count;
    }
}

enum err op_index_select_ref(const struct op_index_select_args *a, const struct op_ctx *ctx)
{
    CHECK(a->pools_kept > 0 && a->pools_kept <= OP_POOLS_KEPT_MAX);
    CHECK(a->selected_stride >= (a->pools_kept + 1) * a->kpool - 1);
    op_for(ctx, a->row_count, a->score_stride * 2, select_rows, a);
    return ERR_OK;
}
