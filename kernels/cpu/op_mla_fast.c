/* SPDX-License-Identifier: Apache-2.0 */
/* Latent attention over selected rows in f32, compiled once per instruction set.  Sums run over
 * key channels, latents and positions in rising order, whatever shares the launch. */
#include "kernels/op_mla.h"

#include <math.h>
#include <stddef.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/cpu/op_fast.h"
#include "kernels/cpu/op_kv_row_fast.h"
#include "lib/base/check.h"

#define ABSORB_VECTORS 4 /* a strip of latents */
#define ABSORB_COLUMNS (ABSORB_VECTORS * VF_LANES)
#define ABSORB_ROWS    3
#define HEADS          8  /* of one item: they read the same latents while those are near */
#define POSITIONS      24 /* latents that stay near while values are summed */
#define VALUE_VECTORS  2
#define VALUE_COLUMNS  (VALUE_VECTORS * VF_LANES)

/* Key rows of one head against up to ABSORB_ROWS rows of q, on a strip of latents. */
VF_INLINE void absorb_strip(const struct op_mla_absorb_args *a, enum op_dtype dtype, uint32_t head,
                            uint32_t row, int rows, uint32_t column)
{
    vf acc[ABSORB_ROWS][ABSORB_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < ABSORB_VECTORS; c++)
            acc[r][c] = vf_zero();
    uint64_t at = (uint64_t)head * (a->nope + a->v_dim) * a->latent + column;
    const float *q = a->q + ((uint64_t)row * a->heads + head) * a->nope;
    uint64_t q_stride = (uint64_t)a->heads * a->nope;
    for (uint32_t d = 0; d < a->nope; d++, at += a->latent) {
        vf w[ABSORB_VECTORS];
#pragma GCC unroll 4
        for (int c = 0; c < ABSORB_VECTORS; c++)
            w[c] = weights_at(a->kv_b.data, at + (uint64_t)c * VF_LANES, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf x = vf_all(q[r * q_stride + d]);
#pragma GCC unroll 4
            for (int c = 0; c < ABSORB_VECTORS; c++)
                acc[r][c] = vf_fma(x, w[c], acc[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < ABSORB_VECTORS; c++)
            vf_store(a->q_abs + ((uint64_t)(row + r) * a->heads + head) * a->latent + column +
                         c * VF_LANES,
                     acc[r][c]);
}

/* The last latents where they do not fill a strip: one vector, one row at a time. */
static void absorb_rest(const struct op_mla_absorb_args *a, uint32_t head, uint32_t row,
                        uint32_t column, uint32_t count)
{
    uint64_t item = (uint64_t)row * a->heads + head;
    uint64_t at = (uint64_t)head * (a->nope + a->v_dim) * a->latent + column;
    for (uint32_t c = 0; c < count; c += VF_LANES) {
        uint32_t some = count - c < VF_LANES ? count - c : VF_LANES;
        vf acc = vf_zero();
        for (uint32_t d = 0; d < a->nope; d++) {
            vf w =
                weights_at_n(a->kv_b.data, at + (uint64_t)d * a->latent + c, a->kv_b.dtype, some);
            acc = vf_fma(vf_all(a->q[item * a->nope + d]), w, acc);
        }
        vf_put(a->q_abs + item * a->latent + column + c, acc, some);
    }
}

VF_INLINE void absorb_dtype(const struct op_mla_absorb_args *a, enum op_dtype dtype, uint32_t head,
                            uint32_t column)
{
    uint32_t r = 0;
    for (; r + ABSORB_ROWS <= a->rows; r += ABSORB_ROWS)
        absorb_strip(a, dtype, head, r, ABSORB_ROWS, column);
    for (; r < a->rows; r++)
        absorb_strip(a, dtype, head, r, 1, column);
}

/* An item is a strip of latents of one head, for all rows. */
static void absorb_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mla_absorb_args *a = arg;
    uint32_t strips = (a->latent + ABSORB_COLUMNS - 1) / ABSORB_COLUMNS;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t head = i / strips, column = i % strips * ABSORB_COLUMNS;
        if (a->latent - column < ABSORB_COLUMNS) {
            for (uint32_t r = 0; r < a->rows; r++)
                absorb_rest(a, head, r, column, a->latent - column);
        } else if (a->kv_b.dtype == OP_BF16) {
            absorb_dtype(a, OP_BF16, head, column);
        } else if (a->kv_b.dtype == OP_F32) {
            absorb_dtype(a, OP_F32, head, column);
        } else {
            absorb_dtype(a, OP_F16, head, column);
        }
    }
}

enum err OP_FAST(mla_absorb)(const struct op_mla_absorb_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    uint32_t strips = (a->latent + ABSORB_COLUMNS - 1) / ABSORB_COLUMNS;
    op_for(ctx, a->heads * strips, (uint64_t)a->rows * a->nope * ABSORB_COLUMNS / 4, absorb_items,
           a);
    return ERR_OK;
}

/* Up to HEADS heads of one row of the batch. */
struct attend {
    const struct op_mla_attend_args *a;
    const struct op_seq *seq;
    const uint32_t *selected;
    uint32_t count, heads;
    const float *q;       /* [heads, latent] */
    float *o;             /* [heads, latent] */
    float *weight[HEADS]; /* [count], in the work space */
};

static const float *latent_row(const struct attend *t, uint32_t j, float *tile)
{
    return kv_row_at(&t->a->pages, t->seq->blocks, t->selected[j], t->a->latent, tile);
}

/* weight[h][j] = scale * q_h . c_j */
static void attend_scores(const struct attend *t)
{
    uint32_t latent = t->a->latent;
    _Alignas(64) float tile[VF_ROWS][OP_LATENT_MAX];
    for (uint32_t j = 0; j < t->count; j += VF_ROWS) {
        uint32_t some = t->count - j < VF_ROWS ? t->count - j : VF_ROWS;
        const float *c[VF_ROWS];
        for (uint32_t k = 0; k < VF_ROWS; k++)
            c[k] = latent_row(t, j + (k < some ? k : 0), tile[k]);
        for (uint32_t h = 0; h < t->heads; h += DOT_OUTS) {
            const float *q[DOT_OUTS];
            vf4 sums[VF_ROWS];
            for (uint32_t o = 0; o < DOT_OUTS; o++)
                q[o] = t->q + (uint64_t)(h + o < t->heads ? h + o : h) * latent;
            dot_rows(c, q, latent, some, sums);
            for (uint32_t o = 0; o < DOT_OUTS && h + o < t->heads; o++)
                for (uint32_t k = 0; k < some; k++)
                    t->weight[h + o][j + k] = sums[k][o] * (float)t->a->scale;
        }
    }
}

/* Returns the log of the sum of exponentials. */
static float softmax(float *x, uint32_t count)
{
    float top = -INFINITY;
    for (uint32_t j = 0; j < count; j++)
        top = x[j] > top ? x[j] : top;
    vf sum = vf_zero();
    VF_EACH(count, j, n)
    {
        float lane[VF_LANES] = {0};
        vf_put(lane, vf_exp(vf_get(x + j, n) - top), n);
        sum += vf_load(lane);
        vf_put(x + j, vf_load(lane), n);
    }
    float all = vf_sum(sum), factor = 1 / all;
    VF_EACH(count, j, n)
    vf_put(x + j, vf_get(x + j, n) * factor, n);
    return count > 0 ? top + logf(all) : -INFINITY;
}

/* o[h] += sum over j in [first, last) of weight[h][j] c_j, on VALUE_COLUMNS latents of DOT_OUTS
 * heads. */
VF_INLINE void values_strip(const struct attend *t, const float *const *c, uint32_t first,
                            uint32_t last, uint32_t h, uint32_t column)
{
    vf acc[DOT_OUTS][VALUE_VECTORS];
    float *o = t->o + (uint64_t)h * t->a->latent + column;
#pragma GCC unroll 4
    for (int k = 0; k < DOT_OUTS; k++)
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
            acc[k][v] = vf_load(o + (uint64_t)k * t->a->latent + v * VF_LANES);
    for (uint32_t j = first; j < last; j++) {
        vf row[VALUE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
            row[v] = vf_load(c[j - first] + column + v * VF_LANES);
#pragma GCC unroll 4
        for (int k = 0; k < DOT_OUTS; k++) {
            vf w = vf_all(t->weight[h + (uint32_t)k][j]);
#pragma GCC unroll 4
            for (int v = 0; v < VALUE_VECTORS; v++)
                acc[k][v] = vf_fma(w, row[v], acc[k][v]);
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < DOT_OUTS; k++)
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
            vf_store(o + (uint64_t)k * t->a->latent + v * VF_LANES, acc[k][v]);
}

/* The same for one head and the latents from column on. */
static void values_rest(const struct attend *t, const float *const *c, uint32_t first,
                        uint32_t last, uint32_t h, uint32_t column)
{
    float *o = t->o + (uint64_t)h * t->a->latent;
    for (uint32_t d = column; d < t->a->latent; d += VF_LANES) {
        uint32_t n = t->a->latent - d < VF_LANES ? t->a->latent - d : VF_LANES;
        vf acc = vf_get(o + d, n);
        for (uint32_t j = first; j < last; j++)
            acc = vf_fma(vf_all(t->weight[h][j]), vf_get(c[j - first] + d, n), acc);
        vf_put(o + d, acc, n);
    }
}

static void attend_values(const struct attend *t)
{
    uint32_t whole = t->a->latent / VALUE_COLUMNS * VALUE_COLUMNS;
    _Alignas(64) float tile[POSITIONS][OP_LATENT_MAX];
    memset(t->o, 0, (uint64_t)t->heads * t->a->latent * sizeof(float));
    for (uint32_t first = 0; first < t->count; first += POSITIONS) {
        uint32_t last = t->count - first < POSITIONS ? t->count : first + POSITIONS;
        const float *c[POSITIONS];
        for (uint32_t j = first; j < last; j++)
            c[j - first] = latent_row(t, j, tile[j - first]);
        uint32_t h = 0;
        for (; h + DOT_OUTS <= t->heads; h += DOT_OUTS) {
            for (uint32_t column = 0; column < whole; column += VALUE_COLUMNS)
                values_strip(t, c, first, last, h, column);
            for (uint32_t k = 0; whole < t->a->latent && k < DOT_OUTS; k++)
                values_rest(t, c, first, last, h + k, whole);
        }
        for (; h < t->heads; h++)
            values_rest(t, c, first, last, h, 0);
    }
}

static uint32_t head_groups(const struct op_mla_attend_args *a)
{
    return (a->heads + HEADS - 1) / HEADS;
}

static void attend_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mla_attend_args *a = arg;
    uint32_t groups = head_groups(a);
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = i / groups, head = i % groups * HEADS;
        uint64_t item = (uint64_t)row * a->heads + head;
        struct attend t = {.a = a,
                           .seq = &a->seqs[a->seq_of[row]],
                           .selected = a->selected + (uint64_t)row * a->selected_stride,
                           .count = a->selected_count[row],
                           .heads = a->heads - head < HEADS ? a->heads - head : HEADS,
                           .q = a->q_abs + item * a->latent,
                           .o = a->o_abs + item * a->latent};
        for (uint32_t h = 0; h < t.heads; h++)
            t.weight[h] = (float *)(void *)(a->work + (item + h) * a->selected_stride);
        attend_scores(&t);
        for (uint32_t h = 0; h < t.heads; h++) {
            float lse = softmax(t.weight[h], t.count);
            if (a->lse != NULL)
                a->lse[item + h] = lse;
        }
        attend_values(&t);
    }
}

enum err OP_FAST(mla_attend)(const struct op_mla_attend_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    CHECK(a->selected_stride > 0);
    uint64_t cost = (uint64_t)a->selected_stride * a->latent * HEADS / 2;
    op_for(ctx, a->rows * head_groups(a), cost, attend_items, a);
    return ERR_OK;
}
