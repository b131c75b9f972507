/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_linear.h"

#include <string.h>

#include "kernels/op_dtype.h"
#include "kernels/op_format.h"
#include "kernels/ref/op_dot.h"
#include "lib/base/check.h"

#define QUANTISED_BLOCK 128
#define LINEAR_TILE     512 /* weights widened at a time; a multiple of the eight lanes */

/* Rows named by x_rows (or consecutive) against one weight row; writes y[r * y_stride]. */
struct linear_row {
    const struct op_weight *w;
    uint64_t w_first;
    const float *x;
    const uint32_t *x_rows;
    uint32_t row_first; /* used when x_rows is NULL */
    float *y;
    uint64_t x_stride, y_stride;
    uint32_t in;
};

static const float *linear_x(const struct linear_row *l, uint32_t r)
{
    return l->x + (l->x_rows != NULL ? l->x_rows[r] : l->row_first + r) * l->x_stride;
}

static void linear_two(const struct linear_row *l, uint32_t r, uint32_t rows)
{
    struct op_lanes s, t;
    op_lanes_clear(&s);
    op_lanes_clear(&t);
    const float *x = linear_x(l, r), *z = rows == 2 ? linear_x(l, r + 1) : x;
    float tile[LINEAR_TILE];
    uint32_t step = l->w->dtype == OP_F32 ? l->in : LINEAR_TILE;
    for (uint32_t i = 0; i < l->in; i += step) {
        uint32_t n = l->in - i < step ? l->in - i : step;
        const float *w = tile;
        if (l->w->dtype == OP_F32)
            w = (const float *)l->w->data + l->w_first;
        else
            op_widen(l->w, l->w_first + i, n, tile);
        if (rows == 2)
            op_lanes_add2(&s, &t, w, x + i, z + i, n);
        else
            op_lanes_add(&s, w, x + i, n);
    }
    l->y[r * l->y_stride] = (float)op_lanes_sum(&s);
    if (rows == 2)
        l->y[(r + 1) * l->y_stride] = (float)op_lanes_sum(&t);
}

static void linear_outs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_linear_args *a = arg;
    struct linear_row l = {
        .w = &a->w, .x = a->x, .x_stride = a->x_stride, .y_stride = a->y_stride, .in = a->in};
    for (uint32_t r = 0; r < a->rows; r += 2) {
        uint32_t rows = a->rows - r < 2 ? 1 : 2;
        l.row_first = r;
        for (uint32_t o = begin; o < end; o++) {
            l.w_first = (uint64_t)o * a->in;
            l.y = a->y + r * a->y_stride + o;
            linear_two(&l, 0, rows);
        }
    }
}

static enum err quantised_rows(const struct op_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->w.quantised->in == a->in && a->w.quantised->out == a->out);
    struct op_quantised_linear_args q = {.x = a->x,
                                         .w = a->w.quantised,
                                         .y = a->y,
                                         .rows = a->rows,
                                         .x_stride = a->x_stride,
                                         .y_stride = a->y_stride};
    return op_quantised_linear_ref(&q, ctx);
}

enum err op_linear_ref(const struct op_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->w.data != NULL || a->w.quantised != NULL);
    if (a->w.quantised != NULL)
        return quantised_rows(a, ctx);
    op_for(ctx, a->out, (uint64_t)a->in * a->rows, linear_outs, a);
    return ERR_OK;
}

/* An item is one output column of one expert, over all of its pairs. */
static void grouped_outs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_grouped_linear_args *a = arg;
    struct linear_row l = {
        .x = a->x, .x_stride = a->x_stride, .y_stride = a->y_stride, .in = a->in};
    for (uint32_t i = begin; i < end; i++) {
        uint32_t expert = i / a->out, o = i % a->out;
        uint32_t first = a->offsets[expert], count = a->offsets[expert + 1] - first;
        if (count == 0 || a->w[expert].quantised != NULL) {
            i += a->out - o - 1;
            continue;
        }
        l.w = &a->w[expert];
        l.w_first = (uint64_t)o * a->in;
        l.x_rows = a->x_rows != NULL ? a->x_rows + first : NULL;
        l.row_first = first;
        l.y = a->y + first * a->y_stride + o;
        for (uint32_t r = 0; r < count; r += 2)
            linear_two(&l, r, count - r < 2 ? 1 : 2);
    }
}

/* An item is a block of outputs of one quantised expert: whole blocks, as EXL3 needs. */
static void grouped_blocks(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_grouped_linear_args *a = arg;
    uint32_t blocks = (a->out + QUANTISED_BLOCK - 1) / QUANTISED_BLOCK;
    const struct op_ctx one = {NULL, NULL};
    for (uint32_t i = begin; i < end; i++) {
        uint32_t expert = i / blocks, o = i % blocks * QUANTISED_BLOCK;
        uint32_t outs = a->out - o < QUANTISED_BLOCK ? a->out - o : QUANTISED_BLOCK;
        uint32_t first = a->offsets[expert], count = a->offsets[expert + 1] - first;
        struct op_quantised piece;
        if (count == 0 || a->w[expert].quantised == NULL)
            continue;
        CHECK(op_quantised_cut(a->w[expert].quantised, o, outs, 0, a->in, &piece) == ERR_OK);
        struct op_quantised_linear_args q = {.x = a->x_rows != NULL ? a->x
                                                                    : a->x + first * a->x_stride,
                                             .x_rows = a->x_rows != NULL ? a->x_rows + first : NULL,
                                             .w = &piece,
                                             .y = a->y + first * a->y_stride + o,
                                             .rows = count,
                                             .x_stride = a->x_stride,
                                             .y_stride = a->y_stride};
        CHECK(op_quantised_linear_ref(&q, &one) == ERR_OK);
    }
}

static enum err grouped_quantised(const struct op_grouped_linear_args *a, const struct op_ctx *ctx)
{
    uint32_t blocks = (a->out + QUANTISED_BLOCK - 1) / QUANTISED_BLOCK;
    uint64_t cost = (uint64_t)a->in * QUANTISED_BLOCK * a->pairs_max / a->experts + 1;
    op_for(ctx, a->experts * blocks, cost, grouped_blocks, a);
    return ERR_OK;
}

enum err op_grouped_linear_ref(const struct op_grouped_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->experts > 0 && a->experts <= OP_EXPERTS_MAX);
    uint64_t cost = (uint64_t)a->in * a->pairs_max / a->experts + 1;
    op_for(ctx, a->experts * a->out, cost, grouped_outs, a);
    for (uint32_t e = 0; e < a->experts; e++)
        if (a->w[e].quantised != NULL)
            return grouped_quantised(a, ctx);
    return ERR_OK;
}

static void embed_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_embed_args *a = arg;
    for (uint32_t r = begin; r < end; r++) {
        float *h = a->h + (uint64_t)r * a->streams * a->hidden;
        if (a->w.quantised != NULL)
            op_quantised_row(a->w.quantised, a->ids[r], 0, a->hidden, h);
        else
            op_widen(&a->w, (uint64_t)a->ids[r] * a->hidden, a->hidden, h);
        for (uint32_t s = 1; s < a->streams; s++)
            memcpy(h + (uint64_t)s * a->hidden, h, a->hidden * sizeof(float));
    }
}

enum err op_embed_ref(const struct op_embed_args *a, const struct op_ctx *ctx)
{
    CHECK(a->streams > 0);
    CHECK(a->w.quantised == NULL || a->w.quantised->format != OP_FORMAT_EXL3);
    op_for(ctx, a->rows, a->hidden * a->streams, embed_rows, a);
    return ERR_OK;
}
