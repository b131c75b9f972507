/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_hessian.h"

#include <math.h>
#include <string.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/model/quant.h"

#define DAMPING      0.025
#define FACTOR_TRIES 10
#define MEAN_MIN     1e-20
#define PANEL        64u  /* columns factored at a time */
#define SKEW_TOP     0.02 /* share of the inputs ... */
#define SKEW_SUM     0.15 /* ... that carries this share of the weight */

struct quant_hessian *quant_hessian_create(uint32_t in)
{
    CHECK(in > 0);
    struct quant_hessian *h = mem_take(sizeof(*h));
    h->magic = HESSIAN_MAGIC;
    h->in = in;
    h->size = op_exl3_padded(in);
    h->h = mem_take_array((size_t)h->size * h->size, sizeof(*h->h));
    h->signs = mem_take(h->size);
    return h;
}

void quant_hessian_destroy(struct quant_hessian **h_p)
{
    struct quant_hessian *h = *h_p;
    if (h == NULL)
        return;
    CHECK_OBJ(h, HESSIAN_MAGIC);
    mem_give(h->h);
    mem_give(h->l);
    mem_give(h->c);
    mem_give(h->signs);
    h->magic = 0;
    mem_give(h);
    *h_p = NULL;
}

bool quant_hessian_usable(const struct quant_hessian *h)
{
    CHECK_OBJ(h, HESSIAN_MAGIC);
    CHECK(h->finished);
    return h->usable;
}

void quant_signs(uint64_t seed, uint32_t stream, int8_t *ret_signs, uint32_t count)
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t counter[4] = {i / 128, stream, 0, 0}, out[4];
        if (i % 128 == 0)
            rng_philox4x32(counter, key, out);
        ret_signs[i] = (out[i / 32 % 4] >> (i % 32) & 1u) != 0 ? -1 : 1;
    }
}

struct add_job {
    struct quant_hessian *h;
    const float *x;
    uint32_t rows;
    uint64_t stride;
};

/* The lower triangle suffices. */
static void add_lines(const void *arg, uint32_t begin, uint32_t end)
{
    const struct add_job *job = arg;
    for (uint32_t i = begin; i < end; i++) {
        double *line = job->h->h + (size_t)i * job->h->size;
        for (uint32_t r = 0; r < job->rows; r++) {
            const float *x = job->x + r * job->stride;
            double xi = x[i];
            for (uint32_t j = 0; xi != 0 && j <= i; j++)
                line[j] += xi * x[j];
        }
    }
}

void quant_hessian_add(struct quant_hessian *h, const float *x, uint32_t rows, uint64_t stride,
                       const struct op_ctx *ctx)
{
    CHECK_OBJ(h, HESSIAN_MAGIC);
    CHECK(!h->finished);
    struct add_job job = {h, x, rows, stride};
    op_for(ctx, h->in, (uint64_t)rows * h->in / 2 + 1, add_lines, &job);
    h->rows += rows;
}

/* Rows of a symmetric matrix times Hb / sqrt(128). */
static void rotate_lines(const void *arg, uint32_t begin, uint32_t end)
{
    const struct quant_hessian *h = arg;
    for (uint32_t i = begin; i < end; i++)
        for (uint32_t j = 0; j < h->size; j += OP_EXL3_BLOCK) {
            double *v = h->h + (size_t)i * h->size + j;
            op_hadamard128(v);
            for (uint32_t k = 0; k < OP_EXL3_BLOCK; k++)
                v[k] *= 0.08838834764831845;
        }
}

static void transpose(double *h, uint32_t size)
{
    for (uint32_t i = 0; i < size; i++)
        for (uint32_t j = 0; j < i; j++) {
            double swap = h[(size_t)i * size + j];
            h[(size_t)i * size + j] = h[(size_t)j * size + i];
            h[(size_t)j * size + i] = swap;
        }
}

static double mean_diagonal(const struct quant_hessian *h)
{
    double sum = 0;
    for (uint32_t i = 0; i < h->size; i++)
        sum += h->h[(size_t)i * h->size + i];
    return sum / h->size;
}

/* Share of the weight that the strongest inputs carry; a selection by counting ranks is slow but
 * done once. */
static bool is_skewed(const struct quant_hessian *h)
{
    double sum = 0, top_sum = 0;
    uint32_t top = (uint32_t)ceil(h->in * SKEW_TOP);
    for (uint32_t i = 0; i < h->in; i++) {
        double weight = sqrt(fmax(h->h[(size_t)i * h->size + i], 0));
        uint32_t above = 0;
        for (uint32_t j = 0; j < h->in; j++) {
            double other = sqrt(fmax(h->h[(size_t)j * h->size + j], 0));
            above += other > weight || (other == weight && j < i);
        }
        sum += weight;
        top_sum += above < top ? weight : 0;
    }
    return top_sum >= SKEW_SUM * sum;
}

/* Means, the full matrix from its lower triangle, signs, damping.  False: not usable. */
static bool prepare(struct quant_hessian *h, const struct op_ctx *ctx)
{
    double scale = h->rows > 0 ? 1.0 / (double)h->rows : 0;
    for (uint32_t i = 0; i < h->size; i++)
        for (uint32_t j = 0; j <= i; j++) {
            double value = h->h[(size_t)i * h->size + j] * scale;
            if (!isfinite(value))
                return false;
            h->h[(size_t)i * h->size + j] = value;
        }
    double mean = mean_diagonal(h);
    if (mean < MEAN_MIN)
        return false;
    h->skewed = is_skewed(h);
    for (uint32_t i = 0; i < h->size; i++) {
        h->h[(size_t)i * h->size + i] += DAMPING * mean;
        for (uint32_t j = 0; j <= i; j++) {
            double value = h->h[(size_t)i * h->size + j] * h->signs[i] * h->signs[j];
            h->h[(size_t)i * h->size + j] = value;
            h->h[(size_t)j * h->size + i] = value;
        }
    }
    op_for(ctx, h->size, h->size * 8ull, rotate_lines, h);
    transpose(h->h, h->size);
    op_for(ctx, h->size, h->size * 8ull, rotate_lines, h);
    return true;
}

static double dot(const double *a, const double *b, uint32_t count)
{
    double sum[4] = {0, 0, 0, 0};
    uint32_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (uint32_t k = 0; k < 4; k++)
            sum[k] += a[i + k] * b[i + k];
    for (; i < count; i++)
        sum[0] += a[i] * b[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

struct panel_job {
    double *c;
    uint32_t size, first;
};

/* Columns [first, first + PANEL) of rows below the panel; the panel's own rows are done. */
static void panel_lines(const void *arg, uint32_t begin, uint32_t end)
{
    const struct panel_job *job = arg;
    for (uint32_t line = begin; line < end; line++) {
        double *row = job->c + (size_t)(job->first + PANEL + line) * job->size;
        for (uint32_t j = job->first; j < job->first + PANEL; j++) {
            const double *other = job->c + (size_t)j * job->size;
            row[j] = (row[j] - dot(row, other, j)) / other[j];
        }
    }
}

/* Lower Cholesky factor in place; false where the matrix is not positive. */
static bool factor(double *c, uint32_t size, const struct op_ctx *ctx)
{
    for (uint32_t first = 0; first < size; first += PANEL) {
        for (uint32_t i = first; i < first + PANEL; i++) {
            double *row = c + (size_t)i * size;
            for (uint32_t j = first; j < i; j++) {
                const double *other = c + (size_t)j * size;
                row[j] = (row[j] - dot(row, other, j)) / other[j];
            }
            double square = row[i] - dot(row, row, i);
            if (!(square > 0))
                return false;
            row[i] = sqrt(square);
        }
        struct panel_job job = {c, size, first};
        op_for(ctx, size - first - PANEL, (uint64_t)PANEL * (first + PANEL / 2), panel_lines, &job);
    }
    return true;
}

/* Tries with more and more on the diagonal; leaves the factor in h->h. */
static bool factor_damped(struct quant_hessian *h, const struct op_ctx *ctx)
{
    size_t count = (size_t)h->size * h->size;
    double *work = mem_take_array(count, sizeof(*work));
    double mean = mean_diagonal(h);
    bool done = false;
    for (uint32_t i = 0; i < FACTOR_TRIES && !done; i++) {
        memcpy(work, h->h, count * sizeof(*work));
        done = factor(work, h->size, ctx);
        for (uint32_t j = 0; j < h->size && !done; j++)
            h->h[(size_t)j * h->size + j] += 2 * DAMPING * mean;
    }
    if (done) {
        mem_give(h->h);
        h->h = work;
    } else {
        mem_give(work);
    }
    return done;
}

static void invert_lower(double c[QUANT_BLOCK][QUANT_BLOCK],
                         double ret_inverse[QUANT_BLOCK][QUANT_BLOCK])
{
    memset(ret_inverse, 0, sizeof(double[QUANT_BLOCK][QUANT_BLOCK]));
    for (uint32_t j = 0; j < QUANT_BLOCK; j++)
        for (uint32_t i = j; i < QUANT_BLOCK; i++) {
            double sum = i == j ? 1 : 0;
            for (uint32_t k = j; k < i; k++)
                sum -= c[i][k] * ret_inverse[k][j];
            ret_inverse[i][j] = sum / c[i][i];
        }
}

/* L[r, b] = C[r, b] C[b, b]^-1. */
static void split_blocks(const void *arg, uint32_t begin, uint32_t end)
{
    const struct quant_hessian *h = arg;
    for (uint32_t b = begin; b < end; b++) {
        double block[QUANT_BLOCK][QUANT_BLOCK], inverse[QUANT_BLOCK][QUANT_BLOCK];
        uint32_t first = b * QUANT_BLOCK;
        for (uint32_t i = 0; i < QUANT_BLOCK; i++)
            for (uint32_t j = 0; j < QUANT_BLOCK; j++)
                block[i][j] = j > i ? 0 : h->h[(size_t)(first + i) * h->size + first + j];
        memcpy(h->c + (size_t)b * QUANT_BLOCK * QUANT_BLOCK, block, sizeof(block));
        invert_lower(block, inverse);
        for (uint32_t r = first + QUANT_BLOCK; r < h->size; r++)
            for (uint32_t j = 0; j < QUANT_BLOCK; j++) {
                double sum = 0;
                for (uint32_t k = j; k < QUANT_BLOCK; k++)
                    sum += h->h[(size_t)r * h->size + first + k] * inverse[k][j];
                h->l[(size_t)r * h->size + first + j] = (float)sum;
            }
    }
}

void quant_hessian_finish(struct quant_hessian *h, uint64_t seed, const struct op_ctx *ctx)
{
    CHECK_OBJ(h, HESSIAN_MAGIC);
    CHECK(!h->finished);
    h->finished = true;
    quant_signs(seed, 0, h->signs, h->size);
    h->usable = prepare(h, ctx) && factor_damped(h, ctx);
    if (h->usable) {
        uint32_t blocks = h->size / QUANT_BLOCK;
        h->l = mem_take_array((size_t)h->size * h->size, sizeof(*h->l));
        h->c = mem_take_array((size_t)blocks * QUANT_BLOCK * QUANT_BLOCK, sizeof(*h->c));
        op_for(ctx, blocks, (uint64_t)h->size * QUANT_BLOCK * QUANT_BLOCK, split_blocks, h);
    }
    mem_give(h->h);
    h->h = NULL;
}
