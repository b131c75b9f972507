/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_dcp.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "lib/base/check.h"

#define RANKS_MAX 8u

static uint32_t row_tokens(const struct op_seq *seq, uint32_t row)
{
    return seq->position_start + (row - seq->row_begin) + 1;
}

/* True if x is chosen after y. */
static bool after(const struct op_candidate *x, const struct op_candidate *y)
{
    return x->score < y->score || (x->score == y->score && x->pool > y->pool);
}

/* Moves the item at `at` down a heap whose root is the last in order. */
static void sink(struct op_candidate *heap, uint32_t at, uint32_t count)
{
    struct op_candidate item = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && after(&heap[child + 1], &heap[child]))
            child++;
        if (!after(&heap[child], &item))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

static void best_row(const struct op_index_best_args *a, uint32_t index)
{
    uint32_t row = a->row_first + index, count = 0;
    uint32_t pools = row_tokens(&a->seqs[a->seq_of[row]], row) / a->kpool;
    const double *score = a->score + index * a->score_stride;
    struct op_candidate *best = a->best + (uint64_t)index * a->pools_kept;
    bool heap = false;
    for (uint32_t p = 0; p < pools && pools > a->pools_kept; p++) {
        struct op_candidate c = {score[p], p, 0};
        if (!op_shard_owns(&a->shard, p))
            continue;
        if (count < a->pools_kept) {
            best[count++] = c;
            continue;
        }
        for (uint32_t at = count / 2; !heap && at-- > 0;)
            sink(best, at, count);
        heap = true;
        if (after(&best[0], &c)) {
            best[0] = c;
            sink(best, 0, count);
        }
    }
    for (uint32_t at = count / 2; !heap && at-- > 0;)
        sink(best, at, count);
    /* The root is the last: taking it off again and again sorts from the end. */
    for (uint32_t left = count; left > 1; left--) {
        struct op_candidate last = best[0];
        best[0] = best[left - 1];
        best[left - 1] = last;
        sink(best, 0, left - 1);
    }
    for (uint32_t i = count; i < a->pools_kept; i++)
        best[i] = (struct op_candidate){0, OP_NO_POOL, 0};
}

static void best_rows(const void *arg, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        best_row(arg, i);
}

enum err op_index_best_ref(const struct op_index_best_args *a, const struct op_ctx *ctx)
{
    CHECK(a->pools_kept > 0 && a->pools_kept <= OP_POOLS_KEPT_MAX);
    CHECK(a->shard.ranks <= RANKS_MAX);
    op_for(ctx, a->row_count, a->score_stride * 2, best_rows, a);
    return ERR_OK;
}

/* The last candidate that is chosen, by a merge of the ranks' ordered lists. */
static struct op_candidate merge_cut(const struct op_index_merge_args *a, uint32_t index)
{
    uint32_t at[RANKS_MAX] = {0};
    struct op_candidate cut = {0, OP_NO_POOL, 0};
    for (uint32_t i = 0; i < a->pools_kept; i++) {
        uint32_t from = RANKS_MAX;
        const struct op_candidate *next = NULL;
        for (uint32_t r = 0; r < a->shard.ranks; r++) {
            const struct op_candidate *c =
                a->all + ((uint64_t)r * a->row_count + index) * a->pools_kept + at[r];
            if (at[r] == a->pools_kept || c->pool == OP_NO_POOL)
                continue;
            if (next == NULL || after(next, c)) {
                next = c;
                from = r;
            }
        }
        if (next == NULL) /* together the ranks have more, unless one sent too few */
            break;
        cut = *next;
        at[from]++;
    }
    return cut;
}

static void sort_rising(uint32_t *pools, uint32_t count)
{
    static const uint32_t gaps[] = {701, 301, 132, 57, 23, 10, 4, 1}; /* Ciura's */
    for (uint32_t g = 0; g < ARRAY_COUNT(gaps); g++) {
        for (uint32_t i = gaps[g]; i < count; i++) {
            uint32_t pool = pools[i], at = i;
            for (; at >= gaps[g] && pools[at - gaps[g]] > pool; at -= gaps[g])
                pools[at] = pools[at - gaps[g]];
            pools[at] = pool;
        }
    }
}

/* A pool lies on one rank whole: interleave is a multiple of kpool. */
static uint32_t own_pools(const struct op_index_merge_args *a, uint32_t index, uint32_t pools,
                          uint32_t *ret_pools)
{
    uint32_t count = 0;
    if (pools <= a->pools_kept) {
        for (uint32_t p = 0; p < pools; p++)
            if (op_shard_owns(&a->shard, p * a->kpool))
                ret_pools[count++] = p;
        return count;
    }
    struct op_candidate cut = merge_cut(a, index);
    const struct op_candidate *own =
        a->all + ((uint64_t)a->shard.rank * a->row_count + index) * a->pools_kept;
    for (uint32_t i = 0; i < a->pools_kept && own[i].pool != OP_NO_POOL; i++) {
        if (after(&own[i], &cut))
            break;
        ret_pools[count++] = own[i].pool;
    }
    sort_rising(ret_pools, count);
    return count;
}

static void merge_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_index_merge_args *a = arg;
    uint32_t chosen[OP_POOLS_KEPT_MAX];
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = a->row_first + i, count = 0;
        uint32_t tokens = row_tokens(&a->seqs[a->seq_of[row]], row), pools = tokens / a->kpool;
        uint32_t *out = a->selected + (uint64_t)row * a->selected_stride;
        uint32_t own = own_pools(a, i, pools, chosen);
        for (uint32_t k = 0; k < own; k++)
            for (uint32_t j = 0; j < a->kpool; j++)
                out[count++] = chosen[k] * a->kpool + j;
        for (uint32_t position = pools * a->kpool; position < tokens; position++)
            if (op_shard_owns(&a->shard, position))
                out[count++] = position;
        a->selected_count[row] = count;
    }
}

enum err op_index_merge_ref(const struct op_index_merge_args *a, const struct op_ctx *ctx)
{
    CHECK(a->pools_kept > 0 && a->pools_kept <= OP_POOLS_KEPT_MAX);
    CHECK(a->selected_stride >= (a->pools_kept + 1) * a->kpool - 1);
    CHECK(a->shard.ranks > 1 && a->shard.ranks <= RANKS_MAX);
    CHECK(a->shard.interleave % a->kpool == 0);
    op_for(ctx, a->row_count, (uint64_t)a->pools_kept * a->shard.ranks * 4, merge_rows, a);
    return ERR_OK;
}

static void merge_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mla_merge_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        double top = -INFINITY, sum = 0, weight[RANKS_MAX];
        double out[OP_LATENT_MAX];
        memset(out, 0, a->latent * sizeof(double));
        for (uint32_t r = 0; r < a->ranks; r++) {
            double lse = a->lse[r * a->part_stride + i];
            /* NaN and +inf are no sums of exponentials: such a part counts as empty. */
            weight[r] = lse < INFINITY ? lse : -INFINITY;
            top = weight[r] > top ? weight[r] : top;
        }
        for (uint32_t r = 0; r < a->ranks && top > -INFINITY; r++)
            sum += exp(weight[r] - top);
        for (uint32_t r = 0; r < a->ranks && top > -INFINITY; r++) {
            const float *o = a->parts + r * a->part_stride + (uint64_t)i * a->latent;
            double w = exp(weight[r] - top) / sum;
            for (uint32_t d = 0; d < a->latent && w > 0; d++)
                out[d] += w * o[d];
        }
        for (uint32_t d = 0; d < a->latent; d++)
            a->o_abs[(uint64_t)i * a->latent + d] = (float)out[d];
    }
}

enum err op_mla_merge_ref(const struct op_mla_merge_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    CHECK(a->ranks > 0 && a->ranks <= RANKS_MAX);
    op_for(ctx, a->items, (uint64_t)a->latent * a->ranks * 2, merge_items, a);
    return ERR_OK;
}
