/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_regular.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/quant_search.h"

#define STEP          0.075
#define STEPS_MAX     24u
#define DIAGONAL_WIDE 3u
#define EXTREMES_MIN  8u
#define TILE_COST     (1u << 24) /* multiply-adds of a search, roughly */

struct place {
    uint32_t row, column;
};

/* Tiles are told apart by place alone, so that equal RMS sort alike everywhere. */
struct ranked {
    double square;
    struct place place;
};

struct sample {
    const struct quant_regular *m;
    const struct quant_codebook *book;
    uint32_t bits, beam;
    struct place *places;
    uint32_t count;
};

static int by_square(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->square != y->square)
        return x->square < y->square ? -1 : 1;
    if (x->place.row != y->place.row)
        return x->place.row < y->place.row ? -1 : 1;
    return (x->place.column > y->place.column) - (x->place.column < y->place.column);
}

static struct ranked *rank_tiles(const struct quant_regular *m, uint32_t rows, uint32_t columns)
{
    struct ranked *ranked = mem_take_array((size_t)rows * columns, sizeof(*ranked));
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < columns; c++) {
            struct ranked *tile = &ranked[(size_t)r * columns + c];
            float values[OP_EXL3_TILE_WEIGHTS];
            quant_tile_values(m, r, c, 1, values);
            tile->place = (struct place){r, c};
            for (uint32_t t = 0; t < OP_EXL3_TILE_WEIGHTS; t++)
                tile->square += (double)values[t] * values[t];
        }
    qsort(ranked, (size_t)rows * columns, sizeof(*ranked), by_square);
    return ranked;
}

/* A wrapped diagonal, and the extreme tiles: rare large values decide the scale at high rates. */
static void sample_fill(struct sample *s)
{
    uint32_t rows = s->m->in / OP_EXL3_TILE, columns = s->m->out / OP_EXL3_TILE;
    uint32_t length = rows > columns ? rows : columns;
    uint32_t wide = columns < DIAGONAL_WIDE ? columns : DIAGONAL_WIDE;
    uint64_t total = (uint64_t)rows * columns;
    uint32_t extremes = length * wide * 3 / 16;
    extremes = extremes > EXTREMES_MIN ? extremes : EXTREMES_MIN;
    if (extremes > total / 2)
        extremes = (uint32_t)(total / 2);
    s->places = mem_take_array((size_t)length * wide + 2ull * extremes, sizeof(*s->places));
    for (uint32_t i = 0; i < length; i++)
        for (uint32_t d = 0; d < wide; d++)
            s->places[s->count++] = (struct place){i % rows, (i + d) % columns};
    struct ranked *ranked = rank_tiles(s->m, rows, columns);
    for (uint32_t i = 0; i < extremes; i++) {
        s->places[s->count++] = ranked[total - 1 - i].place;
        s->places[s->count++] = ranked[i].place;
    }
    mem_give(ranked);
}

/* Best scales for Gaussian values of unit deviation by rate, found with the full search: where to
 * begin. */
static const double usual_scale[3][9] = {
    [OP_CODEBOOK_3INST] = {0, 1.13, 1.00, 0.93, 0.88, 0.90, 0.83, 0.85, 0.85},
    [OP_CODEBOOK_MCG] = {0, 1.13, 1.00, 0.94, 0.90, 0.90, 0.82, 0.85, 0.85},
    [OP_CODEBOOK_MUL1] = {0, 0.92, 0.80, 0.76, 0.74, 0.73, 0.70, 0.70, 0.69},
};

struct trial {
    const struct sample *sample;
    const double *scales;
    uint32_t scale_count;
    double *errors; /* [tiles][scale_count] */
};

static void try_tiles(const void *arg, uint32_t begin, uint32_t end)
{
    const struct trial *trial = arg;
    const struct sample *s = trial->sample;
    struct quant_search *search = quant_search_create(s->book, s->bits, s->beam);
    for (uint32_t i = begin; i < end; i++) {
        struct place place = s->places[i / trial->scale_count];
        double scale = trial->scales[i % trial->scale_count];
        float values[OP_EXL3_TILE_WEIGHTS];
        uint16_t states[OP_EXL3_TILE_WEIGHTS];
        quant_tile_values(s->m, place.row, place.column, scale, values);
        trial->errors[i] = quant_search_tile(search, values, states) / (scale * scale);
    }
    quant_search_destroy(&search);
}

/* Error of every scale, summed over the sample. */
static void try_scales(const struct sample *s, const double *scales, uint32_t count,
                       double *ret_errors, const struct op_ctx *ctx)
{
    double *errors = mem_take_array((size_t)s->count * count, sizeof(*errors));
    struct trial trial = {s, scales, count, errors};
    op_for(ctx, s->count * count, TILE_COST, try_tiles, &trial);
    for (uint32_t k = 0; k < count; k++) {
        ret_errors[k] = 0;
        for (uint32_t i = 0; i < s->count; i++)
            ret_errors[k] += errors[(size_t)i * count + k];
    }
    mem_give(errors);
}

/* Vertex of the parabola through three neighbours, in steps from the middle one. */
static double vertex(double left, double middle, double right)
{
    double curvature = left - 2 * middle + right;
    if (!(curvature > 0))
        return 0;
    double at = (left - right) / (2 * curvature);
    return fmin(fmax(at, -1), 1);
}

/* Three neighbours that go downhill until the middle one is the best. */
struct bracket {
    double scale[3], error[3];
};

static void bracket_shift(struct bracket *b, uint32_t towards, const struct sample *s,
                          const struct op_ctx *ctx)
{
    uint32_t from = towards == 0 ? 2 : 0;
    b->scale[from] = b->scale[1];
    b->error[from] = b->error[1];
    b->scale[1] = b->scale[towards];
    b->error[1] = b->error[towards];
    b->scale[towards] += towards == 0 ? -STEP : STEP;
    try_scales(s, &b->scale[towards], 1, &b->error[towards], ctx);
}

double quant_scale_search(const struct quant_regular *m, const struct quant_codebook *book,
                          uint32_t bits, uint32_t beam, const struct op_ctx *ctx)
{
    CHECK(bits >= 1 && bits <= 8);
    struct sample s = {.m = m, .book = book, .bits = bits, .beam = beam};
    double usual = usual_scale[book->codebook][bits];
    struct bracket b = {.scale = {usual - STEP, usual, usual + STEP}};
    sample_fill(&s);
    try_scales(&s, b.scale, 3, b.error, ctx);
    for (uint32_t steps = 0; steps < STEPS_MAX; steps++) {
        if (b.error[0] < b.error[1] && b.error[0] <= b.error[2] && b.scale[0] > 2 * STEP)
            bracket_shift(&b, 0, &s, ctx);
        else if (b.error[2] < b.error[1])
            bracket_shift(&b, 2, &s, ctx);
        else
            break;
    }
    mem_give(s.places);
    return b.scale[1] + STEP * vertex(b.error[0], b.error[1], b.error[2]);
}
