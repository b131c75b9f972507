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
#include "kernels/cpu/op_quant_fast.h"
#include "kernels/op_dtype.h"
#include "kernels/op_exl3.h"
#include "lib/base/check.h"

#define PACK_ROWS    144              /* rows of x packed together: 297 KiB */
#define PACK_STRIDE  (DOT_BLOCK + 16) /* rows must not all begin in the same cache set */
#define ORDER_FLOATS (VF_ROWS * 8192)
#define ROWS_DIRECT  2 /* up to here packing costs more than it saves */

/* One vector's width of columns. */
VF_INLINE void direct_columns(const void *const w[DOT_OUTS], enum op_dtype dtype,
                              const float *const x[ROWS_DIRECT], uint32_t i, int outs, int rows,
                              vf acc[ROWS_DIRECT][DOT_OUTS])
{
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

/* One block of `outs` weight rows against `rows` rows of x, all where they lie.
 * NOTE: `ahead` are the bytes to the same place in the next weight rows, which follow in memory: a
 * row is often no longer than a page, where the hardware's own prefetcher begins anew. */
VF_INLINE void direct_block(const void *const w[DOT_OUTS], enum op_dtype dtype,
                            const float *const x[ROWS_DIRECT], uint32_t n, int outs, int rows,
                            uint64_t ahead, vf4 ret_sums[ROWS_DIRECT])
{
    vf acc[ROWS_DIRECT][DOT_OUTS];
    const uint32_t bytes = dtype == OP_F32 ? 4 : 2, line = 64 / bytes;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < DOT_OUTS; o++)
            acc[r][o] = vf_zero();
    uint32_t i = 0;
    for (; i + line <= n; i += line) {
        if (outs == DOT_OUTS)
#pragma GCC unroll 4
            for (int o = 0; o < outs; o++)
                __builtin_prefetch((const char *)w[o] + ahead + (size_t)i * bytes, 0, 3);
#pragma GCC unroll 4
        for (uint32_t k = 0; k < line; k += VF_LANES)
            direct_columns(w, dtype, x, i + k, outs, rows, acc);
    }
    for (; i + VF_LANES <= n; i += VF_LANES)
        direct_columns(w, dtype, x, i, outs, rows, acc);
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
    uint64_t ahead = (uint64_t)DOT_OUTS * j->in * bytes;
    for (uint32_t i = 0; i < j->in; i += DOT_BLOCK) {
        uint32_t n = j->in - i < DOT_BLOCK ? j->in - i : DOT_BLOCK;
        const void *w[DOT_OUTS] = {0};
        const float *x[ROWS_DIRECT];
        for (int k = 0; k < outs; k++)
            w[k] = base + ((uint64_t)k * j->in + i) * bytes;
        for (int r = 0; r < rows; r++)
            x[r] = job_x(j, (uint32_t)r) + i;
        direct_block(w, dtype, x, n, outs, rows, ahead, sums);
        for (int r = 0; r < rows; r++)
            total[r] = i == 0 ? sums[r] : total[r] + sums[r];
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < outs; k++)
            j->y[r * j->y_stride + o + (uint32_t)k] = total[r][k];
}

/* Sums of one block of one weight row against `rows` rows of x, lanes apart. */
VF_INLINE void stream_block(const void *w, enum op_dtype dtype, const float *const x[ROWS_DIRECT],
                            uint32_t n, int rows, vf acc[ROWS_DIRECT])
{
    uint32_t i = 0;
    fetch_next_page(w, n * (dtype == OP_F32 ? 4 : 2));
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
        acc[r] = vf_zero();
#pragma GCC unroll 4
    for (; i + VF_LANES <= n; i += VF_LANES) {
        vf ws = weights_at(w, i, dtype);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
            acc[r] = vf_fma(ws, vf_load(x[r] + i), acc[r]);
    }
    if (i < n) {
        vf ws = weights_at_n(w, i, dtype, n - i);
        for (int r = 0; r < rows; r++)
            acc[r] = vf_fma(ws, vf_load_n(x[r] + i, n - i), acc[r]);
    }
}

/* The same output as one of direct_outs, the weight row read from end to end. */
VF_INLINE void stream_out(const struct linear_job *j, enum op_dtype dtype, uint32_t o, int rows)
{
    const uint32_t bytes = dtype == OP_F32 ? 4 : 2;
    const char *w = (const char *)j->w->data + (uint64_t)o * j->in * bytes;
    float total[ROWS_DIRECT] = {0};
    for (uint32_t i = 0; i < j->in;) {
        vf acc[ROWS_DIRECT][STREAM_BLOCKS] = {{{0}}};
        bool first = i == 0;
        uint32_t blocks = 0;
        for (; blocks < STREAM_BLOCKS && i < j->in; blocks++) {
            uint32_t n = j->in - i < DOT_BLOCK ? j->in - i : DOT_BLOCK;
            const void *block = w + (uint64_t)i * bytes;
            const float *x[ROWS_DIRECT];
            vf sums[ROWS_DIRECT];
            for (int r = 0; r < rows; r++)
                x[r] = job_x(j, (uint32_t)r) + i;
            if (n == DOT_BLOCK) /* known to the compiler */
                stream_block(block, dtype, x, DOT_BLOCK, rows, sums);
            else
                stream_block(block, dtype, x, n, rows, sums);
            for (int r = 0; r < rows; r++)
                acc[r][blocks] = sums[r];
            i += n;
        }
        for (int r = 0; r < rows; r++)
            total[r] = stream_add(total[r], first, acc[r], blocks);
    }
    for (int r = 0; r < rows; r++)
        j->y[r * j->y_stride + o] = total[r];
}

VF_INLINE void direct_dtype(const struct linear_job *j, enum op_dtype dtype, uint32_t o,
                            uint32_t end)
{
    for (; !STREAMED && o + DOT_OUTS <= end; o += DOT_OUTS) {
        if (j->rows == 1)
            direct_outs(j, dtype, o, DOT_OUTS, 1);
        else
            direct_outs(j, dtype, o, DOT_OUTS, 2);
    }
    for (; o < end; o++) {
        if (j->rows == 1)
            stream_out(j, dtype, o, 1);
        else
            stream_out(j, dtype, o, 2);
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

static bool wants_order(const struct linear_job *j)
{
    return j->w->quantised != NULL && quant_ordered(j->w->quantised) && !j->ordered;
}

static void pack_rows(const struct linear_job *j, uint32_t row, uint32_t rows, uint32_t i,
                      uint32_t n, bool order, float (*pack)[PACK_STRIDE])
{
    for (uint32_t r = 0; r < rows; r++) {
        const float *x = job_x(j, row + r) + i;
        if (order) {
            OP_FAST(quant_order)(j->w->quantised, job_x(j, row + r), i, n, pack[r]);
            continue;
        }
        VF_EACH(n, c, count)
        vf_store(&pack[r][c], vf_get(x + c, count));
    }
}

/* The x rows of one pass, packed or where they lie. */
struct pass {
    const float *x[PACK_ROWS];
    uint32_t row, rows; /* of the job */
    uint32_t n;         /* elements of this block of the inputs */
    bool add;           /* to y: not the first block */
};

/* The rows of a pass against `outs` widened weight rows; adds to or sets y. */
static void pass_outs(const struct linear_job *j, const struct pass *p, float (*w)[PACK_STRIDE],
                      uint32_t o, uint32_t outs)
{
    const float *ws[DOT_OUTS] = {w[0], w[1], w[2], w[3]};
    for (uint32_t r = 0; r < p->rows; r += VF_ROWS) {
        uint32_t count = p->rows - r < VF_ROWS ? p->rows - r : VF_ROWS;
        const float *xs[VF_ROWS];
        vf4 sums[VF_ROWS];
        for (uint32_t k = 0; k < VF_ROWS; k++)
            xs[k] = p->x[r + (k < count ? k : 0)];
        dot_tile_rows(xs, ws, p->n, count, sums);
        for (uint32_t k = 0; k < count; k++) {
            float *y = j->y + (p->row + r + k) * j->y_stride + o;
            if (outs == DOT_OUTS) {
                vf4 old;
                memcpy(&old, y, sizeof(old));
                sums[k] = p->add ? old + sums[k] : sums[k];
                memcpy(y, &sums[k], sizeof(old));
            } else {
                for (uint32_t c = 0; c < outs; c++)
                    y[c] = p->add ? y[c] + sums[k][c] : sums[k][c];
            }
        }
    }
}

/* A piece of weight row o as f32.  The row DOT_OUTS further on is wanted next. */
static void widen(const struct linear_job *j, uint32_t o, uint32_t i, uint32_t n, float *out)
{
    if (j->w->quantised == NULL) {
        widen_ahead(j->w, (uint64_t)o * j->in + i, n, (uint64_t)DOT_OUTS * j->in, out);
        return;
    }
    const struct op_quantised *q = j->w->quantised;
    const char *next = (const char *)q->codes + (o + DOT_OUTS) * q->row_bytes;
    uint64_t from = i * q->row_bytes / j->in, to = (i + n) * q->row_bytes / j->in;
    for (; from < to && !(quant_e4m3(q) && quant_ordered(q)); from += 64)
        __builtin_prefetch(next + from, 0, 3);
    OP_FAST(quant_row)(q, o, i, n, out);
}

/* Any number of rows against weights that are widened once for PACK_ROWS of them. */
static void packed(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    _Alignas(64) float pack[PACK_ROWS][PACK_STRIDE];
    _Alignas(64) float w[DOT_OUTS][PACK_STRIDE];
    bool order = wants_order(j), in_place = j->rows <= VF_ROWS && !order;
    struct pass p;
    for (p.row = 0; p.row < j->rows; p.row += PACK_ROWS) {
        p.rows = j->rows - p.row < PACK_ROWS ? j->rows - p.row : PACK_ROWS;
        for (uint32_t i = 0; i < j->in; i += DOT_BLOCK) {
            uint32_t n = j->in - i < DOT_BLOCK ? j->in - i : DOT_BLOCK;
            p.n = in_place ? n : (n + VF_LANES - 1) / VF_LANES * VF_LANES;
            p.add = i != 0;
            if (!in_place)
                pack_rows(j, p.row, p.rows, i, n, order, pack);
            for (uint32_t r = 0; r < p.rows; r++)
                p.x[r] = in_place ? job_x(j, p.row + r) + i : pack[r];
            for (uint32_t o = begin; o < end; o += DOT_OUTS) {
                uint32_t outs = end - o < DOT_OUTS ? end - o : DOT_OUTS;
                for (uint32_t k = 0; k < DOT_OUTS; k++) /* missing outputs repeat the last */
                    widen(j, o + (k < outs ? k : outs - 1), i, n, w[k]);
                pass_outs(j, &p, w, o, outs);
            }
        }
    }
}

/* Few rows of a quantised weight: each weight row is read from end to end. */
static void packed_few(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    bool alone = j->rows == 1 && !wants_order(j);
    uint32_t most = quant_rows(j->w->quantised);
    for (uint32_t o = begin; o < end;) {
        uint32_t outs = end - o < most ? DOT_OUTS : most;
        if (!alone || end - o < DOT_OUTS ||
            !OP_FAST(quant_dots)(j->w->quantised, o, outs, job_x(j, 0), j->y + o)) {
            outs = end - o < DOT_OUTS ? end - o : DOT_OUTS;
            packed(j, o, o + outs);
        }
        o += outs;
    }
}

/* The same with the rows of x brought into the weight's order once, if there is room for them. */
static void ordered_few(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    _Alignas(64) float x[ORDER_FLOATS];
    struct linear_job ordered = *j;
    uint64_t stride = ((uint64_t)j->in + VF_LANES - 1) / VF_LANES * VF_LANES;
    if (stride * j->rows > ORDER_FLOATS) {
        packed_few(j, begin, end);
        return;
    }
    for (uint32_t r = 0; r < j->rows; r++)
        OP_FAST(quant_order)(j->w->quantised, job_x(j, r), 0, j->in, x + r * stride);
    ordered.x = x;
    ordered.x_rows = NULL;
    ordered.x_first = 0;
    ordered.x_stride = stride;
    ordered.ordered = true;
    packed_few(&ordered, begin, end);
}

static void add_bias(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    for (uint32_t r = 0; r < j->rows; r++)
        for (uint32_t o = begin; o < end; o++)
            j->y[r * j->y_stride + o] += op_quantised_bias(j->w->quantised, o);
}

static void linear_run(const struct linear_job *j, uint32_t begin, uint32_t end)
{
    const struct op_quantised *q = j->w->quantised;
    if (q == NULL && j->rows <= ROWS_DIRECT)
        direct(j, begin, end);
    else if (q != NULL && j->rows <= VF_ROWS && wants_order(j))
        ordered_few(j, begin, end);
    else if (q != NULL && j->rows <= VF_ROWS)
        packed_few(j, begin, end);
    else
        packed(j, begin, end);
    if (q != NULL && q->bias != NULL)
        add_bias(j, begin, end);
}

static bool is_exl3(const struct op_weight *w)
{
    return w->quantised != NULL && w->quantised->format == OP_FORMAT_EXL3;
}

static uint32_t exl3_blocks(uint32_t out)
{
    return (out + OP_EXL3_BLOCK - 1) / OP_EXL3_BLOCK;
}

static void exl3_items(const void *arg, uint32_t begin, uint32_t end)
{
    for (uint32_t block = begin; block < end; block++)
        OP_FAST(exl3_block)(arg, block);
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
    CHECK(a->w.data != NULL || a->w.quantised != NULL);
    struct linear_job j = {.w = &a->w,
                           .in = a->in,
                           .out = a->out,
                           .rows = a->rows,
                           .x = a->x,
                           .x_stride = a->x_stride,
                           .y = a->y,
                           .y_stride = a->y_stride};
    uint64_t cost = (uint64_t)a->in * a->rows;
    if (a->w.quantised != NULL)
        CHECK(a->w.quantised->in == a->in && a->w.quantised->out == a->out);
    if (a->rows > 0 && is_exl3(&a->w))
        op_for(ctx, exl3_blocks(a->out), cost * OP_EXL3_BLOCK, exl3_items, &j);
    else if (a->rows > 0)
        op_for(ctx, groups_of(a->out), cost * DOT_OUTS, linear_items, &j);
    return ERR_OK;
}

static struct linear_job expert_job(const struct op_grouped_linear_args *a, uint32_t expert)
{
    uint32_t first = a->offsets[expert];
    return (struct linear_job){.w = &a->w[expert],
                               .in = a->in,
                               .out = a->out,
                               .rows = a->offsets[expert + 1] - first,
                               .x = a->x,
                               .x_rows = a->x_rows != NULL ? a->x_rows + first : NULL,
                               .x_first = first,
                               .x_stride = a->x_stride,
                               .y = a->y + first * a->y_stride,
                               .y_stride = a->y_stride};
}

static void grouped_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_grouped_linear_args *a = arg;
    uint32_t groups = groups_of(a->out);
    while (begin < end) {
        uint32_t expert = begin / groups, group = begin % groups;
        uint32_t count = end - begin < groups - group ? end - begin : groups - group;
        uint32_t last = (group + count) * DOT_OUTS;
        struct linear_job j = expert_job(a, expert);
        if (j.rows > 0 && !is_exl3(j.w))
            linear_run(&j, group * DOT_OUTS, last < a->out ? last : a->out);
        begin += count;
    }
}

static void grouped_exl3_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_grouped_linear_args *a = arg;
    uint32_t blocks = exl3_blocks(a->out);
    for (uint32_t i = begin; i < end; i++) {
        struct linear_job j = expert_job(a, i / blocks);
        if (j.rows > 0 && is_exl3(j.w))
            OP_FAST(exl3_block)(&j, i % blocks);
    }
}

/* Experts in EXL3 come in items of their own size, in a second pass. */
enum err OP_FAST(grouped_linear)(const struct op_grouped_linear_args *a, const struct op_ctx *ctx)
{
    CHECK(a->in > 0);
    CHECK(a->experts > 0 && a->experts <= OP_EXPERTS_MAX);
    uint64_t cost = (uint64_t)a->in * a->pairs_max / a->experts + 1;
    uint32_t exl3 = 0;
    for (uint32_t e = 0; e < a->experts; e++)
        exl3 += is_exl3(&a->w[e]);
    if (exl3 < a->experts)
        op_for(ctx, a->experts * groups_of(a->out), cost * DOT_OUTS, grouped_items, a);
    if (exl3 > 0)
        op_for(ctx, a->experts * exl3_blocks(a->out), cost * OP_EXL3_BLOCK, grouped_exl3_items, a);
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
