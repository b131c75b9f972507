/* SPDX-License-Identifier: Apache-2.0 */
/* The linear ops in f32, compiled once per instruction set.
 *
 * One or two rows go against the weights as they lie in memory: a decode step reads every weight
 * once and the memory sets the pace.  More rows are packed in blocks that stay in the second-level
 * cache, against weights widened once for all of them.  Both sum as op_dot_tile.h says, so that a
 * row's bits depend on nothing but the row. */
#include "kernels/op_linear.h"

#include <stdbool.h>
#include <stddef.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/cpu/op_fast.h"
#include "kernels/op_dtype.h"
#include "lib/base/check.h"

#define PACK_ROWS   144              /* rows of x packed together: 297 KiB */
#define PACK_STRIDE (DOT_BLOCK + 16) /* rows must not all begin in the same cache set */
#define ROWS_DIRECT 2                /* up to here packing costs more than it saves */

/* Outputs of one weight matrix for `rows` rows.  x row r is the one numbered x_rows[r], or
 * x_first + r without a table. */
struct linear_job {
    const struct op_weight *w;
    uint32_t in, out, rows;
    const float *x;
    const uint32_t *x_rows;
    uint32_t x_first;
    uint64_t x_stride;
    float *y; /* row 0 of the outputs */
    uint64_t y_stride;
};

static const float *job_x(const struct linear_job *j, uint32_t r)
{
    return j->x + (j->x_rows != NULL ? j->x_rows[r] : j->x_first + r) * j->x_stride;
}

/* One block of `outs` weight rows against `rows` rows of x, all where they lie.
 * NOTE: `ahead` is the same place in the next weight rows: they follow in memory, and a row is too
 * short for the hardware's own prefetcher to get going. */
VF_INLINE void direct_block(const void *const w[DOT_OUTS], enum op_dtype dtype,
                            const float *const x[ROWS_DIRECT], uint32_t n, int outs, int rows,
                            const char *ahead, vf4 ret_sums[ROWS_DIRECT])
{
    vf acc[ROWS_DIRECT][DOT_OUTS];
    const int bytes = dtype == OP_F32 ? 4 : 2;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++)
            acc[r][o] = vf_zero();
    uint32_t i = 0;
    for (; i + VF_LANES <= n; i += VF_LANES) {
        if (outs == DOT_OUTS)
#pragma GCC unroll 4
            for (int line = 0; line < VF_LANES * DOT_OUTS * bytes; line += 64)
                __builtin_prefetch(ahead + (size_t)i * DOT_OUTS * bytes + line, 0, 2);
        vf xs[ROWS_DIRECT];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            xs[r] = vf_load(x[r] + i);
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            vf ws = weights_at(w[o], i, dtype);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                acc[r][o] = vf_fma(ws, xs[r], acc[r][o]);
        }
    }
    if (i < n)
        for (int o = 0; o < outs; o++) {
            vf ws = weights_at_n(w[o], i, dtype, n - i);
            for (int r = 0; r < rows; r++)
                acc[r][o] = vf_fma(ws, vf_load_n(x[r] + i, n - i), acc[r][o]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        ret_sums[r] = vf_sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

/* outs <= DOT_OUTS outputs from o on. */
VF_INLINE void direct_outs(const struct linear_job *j, enum op_dtype dtype, uint32_t o, int outs,
                           int rows)
{
    const int bytes = dtype == OP_F32 ? 4 : 2;
    vf4 total[ROWS_DIRECT] = {{0}}, sums[ROWS_DIRECT];
    const char *base = (const char *)j->w->data + (uint64_t)o * j->in * bytes;
    const char *ahead = base + (size_t)DOT_OUTS * j->in * bytes;
    for (uint32_t i = 0; i < j->in; i += DOT_BLOCK) {
        uint32_t n = j->in - i < DOT_BLOCK ? j->in - i : DOT_BLOCK;
        const void *w[DOT_OUTS] = {0};
        const float *x[ROWS_DIRECT];
        for (int k = 0; k < outs; k++)
            w[k] = base + ((uint64_t)k * j->in + i) * bytes;
        for (int r = 0; r < rows; r++)
            x[r] = job_x(j, (uint32_t)r) + i;
        direct_block(w, dtype, x, n, outs, rows, ahead + (size_t)i * DOT_OUTS * bytes, sums);
        for (int r = 0; r < rows; r++)
            total[r] = i == 0 ? sums[r] : total[r] + sums[r];
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < outs; k++)
            j->y[r * j->y_stride + o + (uint32_t)k] = total[r][k];
}

VF_INLINE void direct_dtype(const struct linear_job *j, enum op_dtype dtype, uint32_t o,
                            uint32_t end)
{
    for (; o + DOT_OUTS <= end; o += DOT_OUTS) {
        if (j->rows == 1)
            direct_outs(j, dtype, o, DOT_OUTS, 1);
        else
            direct_outs(j, dtype, o, DOT_OUTS, 2);
    }
    for (; o < end; o++) {
        if (j->rows == 1)
            direct_outs(j, dtype, o, 1, 1);
        else
            direct_outs(j, dtype, o, 1, 2);
    }
}

static void direct(const struct linear_job *j, uint32_t o, uint32_t end)
{
    if (j->w->dtype == OP_F32)
        direct_dtype(j, OP_F32, o, end);
    else if (j->w->dtype == OP_BF16)
        direct_dtype(j, OP_BF16, o, end);
    else
        direct_dtype(j, OP_F16, o, end);
}

static void pack_rows(const struct linear_job *j, uint32_t row, uint32_t rows, uint32_t i,
                      uint32_t n, float (*pack)[PACK_STRIDE])
{
    for (uint32_t r = 0; r < rows; r++) {
        const float *x = job_x(j, row + r) + i;
        VF_EACH(n, c, count)
        vf_store(&pack[r][c], vf_get(x + c, count));
    }
}

/* Packed rows [row, row + rows) against `outs` widened weight rows; adds to or sets y. */
static void packed_outs(const struct linear_job *j, uint32_t row, uint32_t rows,
                        float (*pack)[PACK_STRIDE], float (*w)[PACK_STRIDE], uint32_t n, uint32_t o,
                        uint32_t outs, bool add)
{
    const float *ws[DOT_OUTS] = {w[0], w[1], w[2], w[3]};
    for (uint32_t r = 0; r < rows; r += VF_ROWS) {
        uint32_t count = rows - r < VF_ROWS ? rows - r : VF_ROWS;
        const float *xs[VF_ROWS];
        vf4 sums[VF_ROWS];
        for (uint32_t k = 0; k < VF_ROWS; k++)
            xs[k] = pack[r + (k < count ? k : 0)];
        dot_tile_rows(xs, ws, n, count, sums);
        for (uint32_t k = 0; k < count; k++) {
            float *y = j->y + (row + r + k) * j->y_stride + o;
            if (outs == DOT_OUTS) {
                vf4 old;
                memcpy(&old, y, sizeof(old));
                sums[k] = add ? old + sums[k] : sums[k];
                memcpy(y, &sums[k], sizeof(old));
            } else {
                for (uint32_t c = 0; c < outs; c++)
                    y[c] = add ? y[c] + sums[k][c] : sums[k][c];
            }
        }
    }
}

static void packed(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    _Alignas(64) float pack[PACK_ROWS][PACK_STRIDE];
    _Alignas(64) float w[DOT_OUTS][PACK_STRIDE];
    for (uint32_t row = 0; row < j->rows; row += PACK_ROWS) {
        uint32_t rows = j->rows - row < PACK_ROWS ? j->rows - row : PACK_ROWS;
        for (uint32_t i = 0; i < j->in; i += DOT_BLOCK) {
            uint32_t n = j->in - i < DOT_BLOCK ? j->in - i : DOT_BLOCK;
            uint32_t padded = (n + VF_LANES - 1) / VF_LANES * VF_LANES;
            pack_rows(j, row, rows, i, n, pack);
            for (uint32_t o = begin; o < end; o += DOT_OUTS) {
                uint32_t outs = end - o < DOT_OUTS ? end - o : DOT_OUTS;
                for (uint32_t k = 0; k < DOT_OUTS; k++) /* missing outputs repeat the last */
                    widen_ahead(j->w, (uint64_t)(o + (k < outs ? k : outs - 1)) * j->in + i, n,
                                (uint64_t)DOT_OUTS * j->in, w[k]);
                packed_outs(j, row, rows, pack, w, padded, o, outs, i != 0);
            }
        }
    }
}

static void linear_run(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    if (j->rows <= ROWS_DIRECT)
        direct(j, begin, end);
    else
        packed(j, begin, end);
}

static uint32_t groups_of(uint32_t outs)
{
    return (outs + DOT_OUTS - 1) / DOT_OUTS;
}

/* An item is DOT_OUTS outputs of all rows. */
static void linear_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct linear_job *j = arg;
    uint32_t last = end * DOT_OUTS;
    linear_run(j, begin * DOT_OUTS, last < j->out ? last : j->out);
}

enum err OP_FAST(linear)(const struct op_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->w.data != NULL);
    struct linear_job j = {.w = &a->w,
                           .in = a->in,
                           .out = a->out,
                           .rows = a->rows,
                           .x = a->x,
                           .x_stride = a->x_stride,
                           .y = a->y,
                           .y_stride = a->y_stride};
    if (a->rows > 0)
        op_for(ctx, groups_of(a->out), (uint64_t)a->in * a->rows * DOT_OUTS, linear_items, &j);
    return ERR_OK;
}

static void grouped_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_grouped_linear_args *a = arg;
    uint32_t groups = groups_of(a->out);
    while (begin < end) {
        uint32_t expert = begin / groups, group = begin % groups;
        uint32_t count = end - begin < groups - group ? end - begin : groups - group;
        uint32_t first = a->offsets[expert], last = (group + count) * DOT_OUTS;
        struct linear_job j = {.w = &a->w[expert],
                               .in = a->in,
                               .out = a->out,
                               .rows = a->offsets[expert + 1] - first,
                               .x = a->x,
                               .x_rows = a->x_rows != NULL ? a->x_rows + first : NULL,
                               .x_first = first,
                               .x_stride = a->x_stride,
                               .y = a->y + first * a->y_stride,
                               .y_stride = a->y_stride};
        if (j.rows > 0)
            linear_run(&j, group * DOT_OUTS, last < a->out ? last : a->out);
        begin += count;
    }
}

enum err OP_FAST(grouped_linear)(const struct op_grouped_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->experts > 0 && a->experts <= OP_EXPERTS_MAX);
    uint64_t cost = (uint64_t)a->in * a->pairs_max * DOT_OUTS / a->experts + 1;
    op_for(ctx, a->experts * groups_of(a->out), cost, grouped_items, a);
    return ERR_OK;
}

/* The value rows of kv_b, head by head; an item is DOT_OUTS outputs of one head for all rows. */
static void value_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mla_value_args *a = arg;
    uint32_t groups = groups_of(a->v_dim);
    uint64_t bytes = op_dtype_bytes(a->kv_b.dtype);
    while (begin < end) {
        uint32_t head = begin / groups, group = begin % groups;
        uint32_t count = end - begin < groups - group ? end - begin : groups - group;
        uint32_t last = (group + count) * DOT_OUTS;
        uint64_t w_row = (uint64_t)head * (a->nope + a->v_dim) + a->nope;
        struct op_weight w = a->kv_b;
        w.data = (const char *)w.data + w_row * a->latent * bytes;
        struct linear_job j = {.w = &w,
                               .in = a->latent,
                               .out = a->v_dim,
                               .rows = a->rows,
                               .x = a->o_abs + (uint64_t)head * a->latent,
                               .x_stride = (uint64_t)a->heads * a->latent,
                               .y = a->o + (uint64_t)head * a->v_dim,
                               .y_stride = (uint64_t)a->heads * a->v_dim};
        linear_run(&j, group * DOT_OUTS, last < a->v_dim ? last : a->v_dim);
        begin += count;
    }
}

enum err OP_FAST(mla_value)(const struct op_mla_value_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    if (a->rows > 0)
        op_for(ctx, a->heads * groups_of(a->v_dim), (uint64_t)a->rows * a->latent * DOT_OUTS,
               value_items, a);
    return ERR_OK;
}
