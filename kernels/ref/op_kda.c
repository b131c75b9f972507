/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_kda.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"

#define KDA_COLUMNS 32 /* value channels of one item; columns of S are independent */

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static void gates_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_gates_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t head = i % a->heads;
        const float *bias = a->dt_bias + (uint64_t)head * a->dim;
        const float *u = a->u + (uint64_t)i * a->dim;
        float *g = a->log_decay + (uint64_t)i * a->dim;
        double rate = exp(a->a_log[head]);
        for (uint32_t c = 0; c < a->dim; c++)
            g[c] = (float)(a->lower_bound * sigmoid(rate * ((double)u[c] + bias[c])));
        a->beta[i] = (float)sigmoid(a->b[i]);
    }
}

enum err op_kda_gates_ref(const struct op_kda_gates_args *a, const struct op_ctx *ctx)
{
    CHECK(a->heads > 0);
    CHECK(a->lower_bound < 0);
    op_for(ctx, a->rows * a->heads, (uint64_t)16 * a->dim, gates_rows, a);
    return ERR_OK;
}

/* One row of one head on a strip of columns. */
struct kda_row {
    const float *q; /* NULL: only the state is wanted (replay) */
    const float *k, *v, *log_decay;
    float beta;
    float *o;
};

static void kda_step(float (*s)[KDA_COLUMNS], const struct kda_row *row, uint32_t dim,
                     uint32_t columns)
{
    double r[KDA_COLUMNS] = {0}, o[KDA_COLUMNS] = {0}, alpha[OP_HEAD_DIM_MAX];
    for (uint32_t i = 0; i < dim; i++) {
        double k = row->k[i];
        alpha[i] = exp(row->log_decay[i]);
        for (uint32_t j = 0; j < KDA_COLUMNS; j++)
            r[j] += k * (alpha[i] * s[i][j]);
    }
    double update[KDA_COLUMNS] = {0};
    for (uint32_t j = 0; j < columns; j++)
        update[j] = row->beta * (row->v[j] - r[j]);
    for (uint32_t i = 0; i < dim; i++) {
        double k = row->k[i], q = row->q != NULL ? row->q[i] : 0;
        for (uint32_t j = 0; j < KDA_COLUMNS; j++) {
            s[i][j] = (float)(alpha[i] * s[i][j] + k * update[j]);
            o[j] += q * s[i][j];
        }
    }
    if (row->o != NULL)
        for (uint32_t j = 0; j < columns; j++)
            row->o[j] = (float)o[j];
}

static void strip_load(float (*s)[KDA_COLUMNS], const float *state, uint32_t dim, uint32_t columns)
{
    for (uint32_t i = 0; i < dim; i++) {
        memset(s[i], 0, sizeof(s[i]));
        memcpy(s[i], state + (uint64_t)i * dim, columns * sizeof(float));
    }
}

static void strip_store(float (*s)[KDA_COLUMNS], float *state, uint32_t dim, uint32_t columns)
{
    for (uint32_t i = 0; i < dim; i++)
        memcpy(state + (uint64_t)i * dim, s[i], columns * sizeof(float));
}

static void kda_strip(const struct op_kda_args *a, const struct op_seq *seq, uint32_t head,
                      uint32_t column)
{
    uint32_t dim = a->dim, inner = a->heads * dim;
    uint32_t columns = dim - column < KDA_COLUMNS ? dim - column : KDA_COLUMNS;
    float s[OP_HEAD_DIM_MAX][KDA_COLUMNS];
    float *state =
        (float *)(void *)(seq->slot + a->state_offset) + (uint64_t)head * dim * dim + column;
    if (seq->fresh)
        memset(s, 0, dim * sizeof(s[0]));
    else
        strip_load(s, state, dim, columns);

    const float *journal = (const float *)(const void *)(seq->slot + a->journal_offset);
    for (uint32_t r = 0; r < seq->replay_count; r++) {
        const float *j = journal + r * op_kda_journal_floats(a->heads, dim);
        struct kda_row row = {.k = j + head * dim,
                              .v = j + inner + head * dim + column,
                              .log_decay = j + 2 * inner + head * dim,
                              .beta = j[3 * inner + head]};
        kda_step(s, &row, dim, columns);
    }
    if (seq->journal && (seq->fresh || seq->replay_count > 0))
        strip_store(s, state, dim, columns);

    for (uint32_t r = seq->row_begin; r < seq->row_begin + seq->row_count; r++) {
        uint64_t at = r * a->qkv_stride + head * dim;
        uint64_t own = (uint64_t)r * inner + head * dim;
        struct kda_row row = {.q = a->q + at,
                              .k = a->k + at,
                              .v = a->v + at + column,
                              .log_decay = a->log_decay + own,
                              .beta = a->beta[(uint64_t)r * a->heads + head],
                              .o = a->o + own + column};
        kda_step(s, &row, dim, columns);
    }
    if (!seq->journal)
        strip_store(s, state, dim, columns);
}

static void kda_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_args *a = arg;
    uint32_t strips = (a->dim + KDA_COLUMNS - 1) / KDA_COLUMNS;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t head = i / strips % a->heads;
        kda_strip(a, &a->seqs[i / strips / a->heads], head, i % strips * KDA_COLUMNS);
    }
}

/* Second pass, after every strip has read the old journal. */
static void journal_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_args *a = arg;
    uint32_t inner = a->heads * a->dim;
    for (uint32_t i = begin; i < end; i++) {
        const struct op_seq *seq = &a->seqs[i];
        if (!seq->journal)
            continue;
        DCHECK(seq->row_count <= a->journal_rows);
        float *j = (float *)(void *)(seq->slot + a->journal_offset);
        for (uint32_t r = seq->row_begin; r < seq->row_begin + seq->row_count; r++) {
            memcpy(j, a->k + r * a->qkv_stride, inner * sizeof(float));
            memcpy(j + inner, a->v + r * a->qkv_stride, inner * sizeof(float));
            memcpy(j + 2 * inner, a->log_decay + (uint64_t)r * inner, inner * sizeof(float));
            memcpy(j + 3 * inner, a->beta + (uint64_t)r * a->heads, a->heads * sizeof(float));
            j += op_kda_journal_floats(a->heads, a->dim);
        }
    }
}

enum err op_kda_ref(const struct op_kda_args *a, const struct op_ctx *ctx)
{
    CHECK(a->dim > 0 && a->dim <= OP_HEAD_DIM_MAX);
    CHECK(a->seq_count > 0);
    uint32_t strips = (a->dim + KDA_COLUMNS - 1) / KDA_COLUMNS;
    uint64_t rows = a->row_count / a->seq_count + 1;
    op_for(ctx, a->seq_count * a->heads * strips, rows * a->dim * KDA_COLUMNS * 4, kda_items, a);
    op_for(ctx, a->seq_count, rows * a->heads * a->dim, journal_items, a);
    return ERR_OK;
}

static void out_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_out_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *o = a->o + (uint64_t)i * a->dim, *gate = a->gate + (uint64_t)i * a->dim;
        float *y = a->y + (uint64_t)i * a->dim;
        double sum = 0;
        for (uint32_t c = 0; c < a->dim; c++)
            sum += (double)o[c] * o[c];
        double factor = 1 / sqrt(sum / a->dim + a->eps);
        for (uint32_t c = 0; c < a->dim; c++)
            y[c] = (float)(a->w[c] * (o[c] * factor) * sigmoid(gate[c]));
    }
}

enum err op_kda_out_ref(const struct op_kda_out_args *a, const struct op_ctx *ctx)
{
    CHECK(a->heads > 0);
    CHECK(a->dim > 0);
    op_for(ctx, a->rows * a->heads, (uint64_t)16 * a->dim, out_rows, a);
    return ERR_OK;
}
