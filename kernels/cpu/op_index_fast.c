/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of the sparse indexer in f32, compiled once per instruction set.
 *
 * A product that is not positive counts as exactly zero, as in the reference, so that ties stay
 * ties and are resolved by pool id. */
#include "kernels/op_index.h"

#include <math.h>
#include <stddef.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/cpu/op_fast.h"
#include "kernels/cpu/op_kv_row_fast.h"
#include "lib/base/check.h"

#define POOLS 512 /* of one item; a multiple of DOT_OUTS */

typedef int32_t vi4 __attribute__((vector_size(16)));

static vf4 positive(vf4 x)
{
    vi4 bits;
    memcpy(&bits, &x, sizeof(bits));
    bits &= (vi4)(x > 0);
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Scores of DOT_OUTS pools: heads in rising order. */
static vf4 score_pools(const struct op_index_score_args *a, const float *const *keys,
                       const float *q, const float *w)
{
    float scale = 1 / sqrtf((float)a->heads * (float)a->dim);
    vf4 score = {0};
    for (uint32_t h = 0; h < a->heads; h += VF_ROWS) {
        uint32_t some = a->heads - h < VF_ROWS ? a->heads - h : VF_ROWS;
        const float *x[VF_ROWS];
        vf4 sums[VF_ROWS];
        for (uint32_t k = 0; k < VF_ROWS; k++)
            x[k] = q + (uint64_t)(h + (k < some ? k : 0)) * a->dim;
        dot_rows(x, keys, a->dim, some, sums);
        for (uint32_t k = 0; k < some; k++)
            score += w[h + k] * scale * positive(sums[k]);
    }
    return score;
}

static void score_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_score_args *a = arg;
    uint32_t parts = (uint32_t)((a->score_stride + POOLS - 1) / POOLS);
    for (uint32_t i = begin; i < end; i++) {
        uint32_t index = i / parts, row = a->row_first + index;
        const struct op_seq *seq = &a->seqs[a->seq_of[row]];
        uint32_t pools = (seq->position_start + (row - seq->row_begin) + 1) / a->kpool;
        uint32_t first = i % parts * POOLS, last = first + POOLS < pools ? first + POOLS : pools;
        if (pools <= a->pools_kept)
            continue;
        double *out = a->score + index * a->score_stride;
        for (uint32_t p = first; p < last; p += DOT_OUTS) {
            const float *keys[DOT_OUTS];
            _Alignas(64) float tile[DOT_OUTS][OP_INDEX_DIM_MAX];
            uint32_t some = last - p < DOT_OUTS ? last - p : DOT_OUTS, owned = 0;
            for (uint32_t k = 0; k < some; k++)
                owned += (uint32_t)op_shard_owns(&a->pages.shard, p + k);
            if (owned == 0)
                continue;
            for (uint32_t k = 0; k < DOT_OUTS; k++)
                keys[k] =
                    k < some ? kv_row_at(&a->pages, seq->blocks, p + k, a->dim, tile[k]) : keys[0];
            vf4 score = score_pools(a, keys, a->q + (uint64_t)row * a->heads * a->dim,
                                    a->w + (uint64_t)row * a->heads);
            for (uint32_t k = 0; k < some; k++)
                out[p + k] = (double)score[k];
        }
    }
}

enum err OP_FAST(index_score)(const struct op_index_score_args *a, const struct op_ctx *ctx)
{
    CHECK(a->kpool > 1);
    CHECK(a->dim > 0 && a->dim <= OP_INDEX_DIM_MAX);
    CHECK(a->pools_kept > 0 && a->pools_kept <= OP_POOLS_KEPT_MAX);
    uint32_t parts = (uint32_t)((a->score_stride + POOLS - 1) / POOLS);
    op_for(ctx, a->row_count * parts, (uint64_t)POOLS * a->heads * a->dim / 8, score_items, a);
    return ERR_OK;
}
