/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_regular.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/quant_search.h"

#define COARSE_FIRST  0.1
#define COARSE_STEP   0.2
#define COARSE_COUNT  10u
#define COARSE_EVERY  3u /* tile of the sample */
#define FINE_STEP     0.075
#define FINE_COUNT    5u
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

struct trial {
    const struct sample *sample;
    const double *scales;
    uint32_t scale_count, every;
    double *errors; /* [tiles of the trial][scale_count] */
};

static void try_tiles(const void *arg, uint32_t begin, uint32_t end)
{
    const struct trial *trial = arg;
    const struct sample *s = trial->sample;
    struct quant_search *search = quant_search_create(s->book, s->bits, s->beam);
    for (uint32_t i = begin; i < end; i++) {
        struct place place = s->places[i / trial->scale_count * trial->every];
        double scale = trial->scales[i % trial->scale_count];
        float values[OP_EXL3_TILE_WEIGHTS];
        uint16_t states[OP_EXL3_TILE_WEIGHTS];
        quant_tile_values(s->m, place.row, place.column, scale, values);
        trial->errors[i] = quant_search_tile(search, values, states) / (scale * scale);
    }
    quant_search_destroy(&search);
}

/* Mean error of every scale over the sample; returns the number of the best. */
static uint32_t try_scales(const struct sample *s, const double *scales, uint32_t count,
                           uint32_t every, double *ret_errors, const struct op_ctx *ctx)
{
    uint32_t tiles = (s->count + every - 1) / every, best = 0;
    double *errors = mem_take_array((size_t)tiles * count, sizeof(*errors));
    struct trial trial = {s, scales, count, every, errors};
    op_for(ctx, tiles * count, TILE_COST, try_tiles, &trial);
    for (uint32_t k = 0; k < count; k++) {
        ret_errors[k] = 0;
        for (uint32_t i = 0; i < tiles; i++)
            ret_errors[k] += errors[(size_t)i * count + k];
        if (ret_errors[k] < ret_errors[best])
            best = k;
    }
    mem_give(errors);
    return best;
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

double quant_scale_search(const struct quant_regular *m, const struct quant_codebook *book,
                          uint32_t bits, uint32_t beam, const struct op_ctx *ctx)
{
    struct sample s = {.m = m, .book = book, .bits = bits, .beam = beam};
    double scales[COARSE_COUNT], errors[COARSE_COUNT];
    STATIC_CHECK(FINE_COUNT <= COARSE_COUNT);
    sample_fill(&s);
    for (uint32_t i = 0; i < COARSE_COUNT; i++)
        scales[i] = COARSE_FIRST + COARSE_STEP * i;
    double centre = scales[try_scales(&s, scales, COARSE_COUNT, COARSE_EVERY, errors, ctx)];
    for (uint32_t i = 0; i < FINE_COUNT; i++) {
        scales[i] = centre + FINE_STEP * ((double)i - FINE_COUNT / 2);
        scales[i] = fmax(scales[i], FINE_STEP / 4 * (i + 1));
    }
    uint32_t best = try_scales(&s, scales, FINE_COUNT, 1, errors, ctx);
    mem_give(s.places);
    if (best == 0 || best == FINE_COUNT - 1)
        return scales[best];
    return scales[best] + FINE_STEP * vertex(errors[best - 1], errors[best], errors[best + 1]);
}
