/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant.h"

#include <math.h>
#include <string.h>

#include "kernels/op_exl3.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/quant_hessian.h"
#include "lib/model/quant_regular.h"
#include "lib/model/quant_search.h"

#define TILE      OP_EXL3_TILE
#define TILE_COST (1u << 24) /* multiply-adds of a search, roughly */

/* What one stripe of 16 columns adds to the report. */
struct stripe_sums {
    double error, square;
};

struct exl3_job {
    const struct quant_regular *m;
    const struct quant_hessian *h; /* NULL: no feedback */
    const struct quant_codebook *book;
    const struct quant_exl3_options *options;
    double scale;
    uint8_t *trellis;
    struct stripe_sums *sums; /* [stripes] */
    uint64_t *tiles_done;
};

/* Working memory of one stripe: the scaled R and what is left of it after quantising. */
struct stripe {
    const struct exl3_job *job;
    uint32_t column;
    float *w, *e; /* [in][16] */
};

/* ret = a[band] + sum over the rows r of later bands of L[r, band]^T a[r]. */
static void feed_back(const struct stripe *s, const float *a, uint32_t band, double ret[TILE][TILE])
{
    uint32_t size = s->job->m->in, first = band * TILE;
    for (uint32_t i = 0; i < TILE; i++)
        for (uint32_t c = 0; c < TILE; c++)
            ret[i][c] = a[(size_t)(first + i) * TILE + c];
    if (s->job->h == NULL)
        return;
    for (uint32_t r = first + TILE; r < size; r++) {
        const float *l = s->job->h->l + (size_t)r * size + first;
        const float *row = a + (size_t)r * TILE;
        for (uint32_t i = 0; i < TILE; i++)
            for (uint32_t c = 0; c < TILE; c++)
                ret[i][c] += (double)l[i] * row[c];
    }
}

/* |C[band, band]^T a|^2; without a Hessian |a|^2. */
static double weighted_square(const struct stripe *s, uint32_t band, double a[TILE][TILE])
{
    double sum = 0;
    for (uint32_t i = 0; i < TILE; i++)
        for (uint32_t c = 0; c < TILE; c++) {
            double v = a[i][c];
            if (s->job->h != NULL) {
                const double *block = s->job->h->c + (size_t)band * TILE * TILE;
                v = 0;
                for (uint32_t k = i; k < TILE; k++)
                    v += block[k * TILE + i] * a[k][c];
            }
            sum += v * v;
        }
    return sum;
}

/* The bits as written must give the states that were chosen: everything else rests on it. */
static void write_tile(const struct stripe *s, uint32_t band, const uint16_t states[256])
{
    uint32_t half_bits = 2 * s->job->options->bits, tile_bytes = 2 * op_exl3_tile_u16(half_bits);
    uint64_t index = (uint64_t)band * (s->job->m->out / TILE) + s->column;
    uint16_t again[OP_EXL3_TILE_WEIGHTS];
    uint8_t *tile = s->job->trellis + index * tile_bytes;
    op_exl3_pack(states, half_bits, tile);
    op_exl3_states(tile, half_bits, again);
    CHECK(memcmp(states, again, sizeof(again)) == 0);
}

static void quantise_band(const struct stripe *s, uint32_t band, struct quant_search *search)
{
    double target[TILE][TILE], whole[TILE][TILE];
    float values[OP_EXL3_TILE_WEIGHTS];
    uint16_t states[OP_EXL3_TILE_WEIGHTS];
    struct stripe_sums *sums = &s->job->sums[s->column];
    feed_back(s, s->w, band, whole);
    sums->square += weighted_square(s, band, whole);
    feed_back(s, s->e, band, target); /* e of this band still holds w */
    for (uint32_t t = 0; t < OP_EXL3_TILE_WEIGHTS; t++)
        values[t] = (float)target[op_exl3_row_of(t)][op_exl3_column_of(t)];
    quant_search_tile(search, values, states);
    write_tile(s, band, states);
    for (uint32_t t = 0; t < OP_EXL3_TILE_WEIGHTS; t++) {
        uint32_t r = op_exl3_row_of(t), c = op_exl3_column_of(t);
        float q = s->job->book->values[states[t]];
        s->e[(size_t)(band * TILE + r) * TILE + c] -= q;
        target[r][c] -= q;
    }
    sums->error += weighted_square(s, band, target);
}

static void quantise_stripes(const void *arg, uint32_t begin, uint32_t end)
{
    const struct exl3_job *job = arg;
    const struct quant_regular *m = job->m;
    const struct quant_exl3_options *options = job->options;
    uint64_t tiles_total = (uint64_t)(m->in / TILE) * (m->out / TILE);
    struct quant_search *search = quant_search_create(job->book, options->bits, options->beam);
    struct stripe s = {.job = job};
    s.w = mem_take_array((size_t)m->in * TILE, sizeof(*s.w));
    s.e = mem_take_array((size_t)m->in * TILE, sizeof(*s.e));
    for (s.column = begin; s.column < end; s.column++) {
        for (uint32_t r = 0; r < m->in; r++)
            for (uint32_t c = 0; c < TILE; c++)
                s.w[(size_t)r * TILE + c] =
                    (float)(job->scale * m->r[(uint64_t)r * m->out + s.column * TILE + c]);
        memcpy(s.e, s.w, (size_t)m->in * TILE * sizeof(*s.e));
        for (uint32_t band = m->in / TILE; band > 0; band--) {
            quantise_band(&s, band - 1, search);
            uint64_t done = __atomic_add_fetch(job->tiles_done, 1, __ATOMIC_RELAXED);
            if (options->progress != NULL)
                options->progress(options->progress_arg, done, tiles_total);
        }
    }
    mem_give(s.w);
    mem_give(s.e);
    quant_search_destroy(&search);
}

/* LDLQ makes the targets wider than R; these factors undo it. */
static double drift_of(uint32_t bits)
{
    static const double drift[] = {0, 1.08, 1.018, 1.004};
    return bits < ARRAY_COUNT(drift) ? drift[bits] : 1;
}

static enum err check_options(const struct quant_matrix *m,
                              const struct quant_exl3_options *options, struct err_detail *detail)
{
    if (options->bits < 1 || options->bits > 8)
        return err_set(detail, ERR_INVALID, "bits: %u, not 1 to 8", options->bits);
    if (options->beam > QUANT_BEAM_MAX)
        return err_set(detail, ERR_INVALID, "beam: %u, at most %u", options->beam, QUANT_BEAM_MAX);
    if (!(options->scale >= 0 && options->scale < 100))
        return err_set(detail, ERR_INVALID, "scale: %g, not 0 to 100", options->scale);
    if (m->in == 0 || m->out == 0 || m->in > 1u << 20 || m->out > 1u << 20)
        return err_set(detail, ERR_INVALID, "size: [%u, %u]", m->in, m->out);
    for (uint32_t i = 0; i < m->in; i++)
        for (uint32_t o = 0; o < m->out; o++)
            if (!isfinite(m->w[i * m->in_stride + o * m->out_stride]))
                return err_set(detail, ERR_INVALID, "W[%u][%u] is not finite", i, o);
    return ERR_OK;
}

static void regular_init(struct quant_regular *r, const struct quant_matrix *m,
                         const struct quant_hessian *h, uint64_t seed)
{
    r->in = op_exl3_padded(m->in);
    r->out = op_exl3_padded(m->out);
    r->r = mem_take_array((size_t)r->in * r->out, sizeof(*r->r));
    r->su = mem_take_array(r->in, sizeof(*r->su));
    r->sv = mem_take_array(r->out, sizeof(*r->sv));
    int8_t *signs = mem_take(r->in > r->out ? r->in : r->out);
    quant_signs(seed, 0, signs, r->in);
    for (uint32_t i = 0; i < r->in; i++)
        r->su[i] = h != NULL ? h->signs[i] : signs[i];
    quant_signs(seed, 1, signs, r->out);
    for (uint32_t o = 0; o < r->out; o++)
        r->sv[o] = signs[o];
    mem_give(signs);
    for (uint32_t i = 0; i < m->in; i++)
        for (uint32_t o = 0; o < m->out; o++)
            r->r[(uint64_t)i * r->out + o] = m->w[i * m->in_stride + o * m->out_stride];
}

static void regular_fini(struct quant_regular *r)
{
    mem_give(r->r);
    mem_give(r->su);
    mem_give(r->sv);
}

static enum err write_scales(const struct quant_regular *r, double scale, struct quant_exl3 *q,
                             struct err_detail *detail)
{
    for (uint32_t i = 0; i < r->in; i++)
        q->suh[i] = op_f16_from_f32((float)(r->su[i] / scale));
    for (uint32_t o = 0; o < r->out; o++)
        q->svh[o] = op_f16_from_f32((float)r->sv[o]);
    for (uint32_t i = 0; i < r->in; i++)
        if ((q->suh[i] & 0x7c00u) == 0x7c00u)
            return err_set(detail, ERR_INVALID, "the scale of input %u is beyond f16", i);
    for (uint32_t o = 0; o < r->out; o++)
        if ((q->svh[o] & 0x7c00u) == 0x7c00u)
            return err_set(detail, ERR_INVALID, "the scale of output %u is beyond f16", o);
    return ERR_OK;
}

static double relative_error(const struct quant_matrix *m, const struct quant_exl3 *q,
                             const struct op_ctx *ctx)
{
    struct op_quantised w = quant_exl3_weight(q);
    float *dense = mem_take_array((size_t)m->in * m->out, sizeof(*dense));
    struct op_dequantise_args args = {.w = &w, .y = dense};
    double error = 0, square = 0;
    CHECK(op_dequantise_ref(&args, ctx) == ERR_OK);
    for (uint32_t o = 0; o < m->out; o++)
        for (uint32_t i = 0; i < m->in; i++) {
            double v = m->w[i * m->in_stride + o * m->out_stride];
            double difference = dense[(size_t)o * m->in + i] - v;
            error += difference * difference;
            square += v * v;
        }
    mem_give(dense);
    return square > 0 ? error / square : error;
}

static void search_all(const struct quant_regular *r, const struct quant_hessian *h,
                       const struct quant_exl3_options *options, const struct op_ctx *ctx,
                       struct quant_exl3 *q)
{
    uint32_t stripes = r->out / TILE;
    uint64_t tiles_done = 0;
    struct quant_codebook *book = mem_take(sizeof(*book));
    struct stripe_sums *sums = mem_take_array(stripes, sizeof(*sums));
    quant_codebook_fill(book, options->codebook);
    q->scale = options->scale;
    if (q->scale == 0) {
        q->scale = quant_scale_search(r, book, options->bits, options->beam, ctx);
        q->scale *= h != NULL ? drift_of(options->bits) : 1;
    }
    struct exl3_job job = {r, h, book, options, q->scale, (uint8_t *)q->trellis, sums, &tiles_done};
    op_for(ctx, stripes, (uint64_t)TILE_COST * (r->in / TILE), quantise_stripes, &job);
    double error = 0, square = 0;
    for (uint32_t i = 0; i < stripes; i++) {
        error += sums[i].error;
        square += sums[i].square;
    }
    q->proxy_error = square > 0 ? error / square : error;
    mem_give(sums);
    mem_give(book);
}

enum err quant_exl3(const struct quant_matrix *m, const struct quant_hessian *h,
                    const struct quant_exl3_options *options, const struct op_ctx *ctx,
                    struct quant_exl3 *ret_result, struct err_detail *detail)
{
    struct quant_regular r;
    TRY(check_options(m, options, detail));
    if (h != NULL) {
        CHECK(h->finished);
        CHECK(h->in == m->in);
    }
    bool out_scales = options->out_scales == QUANT_OUT_SCALES_ALWAYS ||
                      (options->out_scales == QUANT_OUT_SCALES_AUTO && !(h != NULL && h->skewed));
    regular_init(&r, m, h, options->seed);
    quant_regularise(&r, out_scales, ctx);
    struct quant_exl3 q = {.in = m->in,
                           .out = m->out,
                           .in_padded = r.in,
                           .out_padded = r.out,
                           .bits = options->bits,
                           .codebook = options->codebook};
    q.trellis_bytes = (uint64_t)r.in * r.out / OP_EXL3_TILE_WEIGHTS * 32 * q.bits;
    q.trellis = mem_take(q.trellis_bytes);
    q.suh = mem_take_array(r.in, sizeof(*q.suh));
    q.svh = mem_take_array(r.out, sizeof(*q.svh));
    search_all(&r, h != NULL && h->usable ? h : NULL, options, ctx, &q);
    enum err e = write_scales(&r, q.scale, &q, detail);
    regular_fini(&r);
    if (e != ERR_OK) {
        quant_exl3_fini(&q);
        return e;
    }
    q.relative_error = relative_error(m, &q, ctx);
    *ret_result = q;
    return ERR_OK;
}

void quant_exl3_fini(struct quant_exl3 *q)
{
    mem_give(q->trellis);
    mem_give(q->suh);
    mem_give(q->svh);
    memset(q, 0, sizeof(*q));
}

struct op_quantised quant_exl3_weight(const struct quant_exl3 *q)
{
    return (struct op_quantised){
        .format = OP_FORMAT_EXL3,
        .out = q->out,
        .in = q->in,
        .codes = (const uint8_t *)q->trellis,
        .row_bytes = (uint64_t)q->out_padded / TILE * 32 * q->bits,
        .codebook = q->codebook,
        .half_bits = 2 * q->bits,
        .suh = q->suh,
        .svh = q->svh,
    };
}
