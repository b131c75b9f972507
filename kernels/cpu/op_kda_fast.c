/* SPDX-License-Identifier: Apache-2.0 */
/* The recurrence of KDA in f32, compiled once per instruction set.
 *
 * Rows go one by one, or sixteen at a time in the chunked form where a whole chunk of positions
 * [16 n, 16 n + 16) is at hand and final.  Chunks are cut by absolute position, so slices that
 * begin and end at multiples of 16 give the same bits as one long run.  Journal rows and their
 * replay always go one by one, and S is rounded to f32 after each row in any case.
 *
 * Chunked, with G the running sum of log decays inside the chunk:
 *   u_i = beta_i (v_i - S^T (k_i e^G_i) - sum over j < i of <k_i e^G_i, k_j e^-G_j> u_j)
 *   o_i = S^T (q_i e^G_i) + sum over j <= i of <q_i e^G_i, k_j e^-G_j> u_j
 *   S  <- e^G_16 S + sum over j of (k_j e^(G_16 - G_j)) u_j^T
 * NOTE: e^-G must stay in f32's range: sixteen rows at a decay of -5 give e^80, which does.  A
 * chunk that decays more goes row by row. */
#include "kernels/op_kda.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernels/cpu/op_dot_tile.h"
#include "kernels/cpu/op_fast.h"
#include "lib/base/check.h"

#define COLUMNS   32 /* value channels of a strip; columns of S are independent */
#define STRIP     (COLUMNS / VF_LANES)
#define CHUNK     16
#define DECAY_MIN (-85.0f) /* e^85 is in range */
#define KDA_ROWS  3        /* rows of a tile: KDA_ROWS * STRIP sums stay in registers */

/* One row of one head; v and o point to the head's first channel. */
struct kda_row {
    const float *q; /* NULL: only the state is wanted (replay) */
    const float *k, *v, *log_decay;
    float beta;
    float *o;
};

/* The head that is worked on: S may be the slot's own or a copy. */
struct kda_head {
    const struct op_kda_args *a;
    const struct op_seq *seq;
    uint32_t head;
    float *s;
    uint64_t stride;        /* of S's rows */
    uint32_t column, count; /* strip [column, column + count) of the value channels */
};

static struct kda_row journal_row(const struct kda_head *h, uint32_t r)
{
    uint32_t dim = h->a->dim, inner = h->a->heads * dim, head = h->head;
    const float *j = (const float *)(const void *)(h->seq->slot + h->a->journal_offset) +
                     r * op_kda_journal_floats(h->a->heads, dim);
    return (struct kda_row){.k = j + head * dim,
                            .v = j + inner + head * dim,
                            .log_decay = j + 2 * inner + head * dim,
                            .beta = j[3 * inner + head]};
}

static struct kda_row own_row(const struct kda_head *h, uint32_t index)
{
    const struct op_kda_args *a = h->a;
    uint64_t r = h->seq->row_begin + index, inner = (uint64_t)a->heads * a->dim;
    uint64_t at = r * a->qkv_stride + h->head * a->dim, own = r * inner + h->head * a->dim;
    return (struct kda_row){.q = a->q + at,
                            .k = a->k + at,
                            .v = a->v + at,
                            .log_decay = a->log_decay + own,
                            .beta = a->beta[r * a->heads + h->head],
                            .o = a->o + own};
}

/* A row's vectors over the key channels. */
struct kda_keys {
    float alpha[OP_HEAD_DIM_MAX];     /* e^log_decay */
    float alpha_key[OP_HEAD_DIM_MAX]; /* alpha k */
    float key[OP_HEAD_DIM_MAX], query[OP_HEAD_DIM_MAX];
};

static void keys_of(const struct kda_row *row, uint32_t dim, struct kda_keys *ret)
{
    VF_EACH(dim, i, count)
    {
        vf alpha = vf_exp(vf_get(row->log_decay + i, count)), k = vf_get(row->k + i, count);
        vf_store(ret->alpha + i, alpha);
        vf_store(ret->alpha_key + i, alpha * k);
        vf_store(ret->key + i, k);
        vf_store(ret->query + i, row->q != NULL ? vf_get(row->q + i, count) : vf_zero());
    }
}

/* r = S^T (alpha k) on a strip. */
VF_INLINE void read_state(const float *s, uint64_t stride, const struct kda_keys *keys,
                          uint32_t dim, vf r[STRIP])
{
    for (int c = 0; c < STRIP; c++)
        r[c] = vf_zero();
    for (uint32_t i = 0; i < dim; i++) {
        vf ak = vf_all(keys->alpha_key[i]);
#pragma GCC unroll 8
        for (int c = 0; c < STRIP; c++)
            r[c] = vf_fma(ak, vf_load(s + i * stride + c * VF_LANES), r[c]);
    }
}

/* S <- alpha S + k u^T and o = S^T q on a strip. */
VF_INLINE void advance_state(float *s, uint64_t stride, const struct kda_keys *keys, uint32_t dim,
                             const vf u[STRIP], vf o[STRIP])
{
    for (int c = 0; c < STRIP; c++)
        o[c] = vf_zero();
    for (uint32_t i = 0; i < dim; i++) {
        vf alpha = vf_all(keys->alpha[i]), k = vf_all(keys->key[i]), q = vf_all(keys->query[i]);
#pragma GCC unroll 8
        for (int c = 0; c < STRIP; c++) {
            float *at = s + i * stride + c * VF_LANES;
            vf value = vf_fma(k, u[c], alpha * vf_load(at));
            vf_store(at, value);
            o[c] = vf_fma(q, value, o[c]);
        }
    }
}

static void step_strip(const struct kda_head *h, const struct kda_row *row,
                       const struct kda_keys *keys)
{
    vf r[STRIP], o[STRIP];
    float v[COLUMNS] = {0}, out[COLUMNS];
    memcpy(v, row->v + h->column, h->count * sizeof(float));
    read_state(h->s, h->stride, keys, h->a->dim, r);
    for (int c = 0; c < STRIP; c++)
        r[c] = row->beta * (vf_load(v + c * VF_LANES) - r[c]);
    advance_state(h->s, h->stride, keys, h->a->dim, r, o);
    if (row->o == NULL)
        return;
    for (int c = 0; c < STRIP; c++)
        vf_store(out + c * VF_LANES, o[c]);
    memcpy(row->o + h->column, out, h->count * sizeof(float));
}

/* A chunk's vectors and products, shared by the strips of a head. */
struct kda_chunk {
    float left[2 * CHUNK][OP_HEAD_DIM_MAX]; /* k e^G, then q e^G */
    float right[CHUNK][OP_HEAD_DIM_MAX];    /* k e^-G, then k e^(G_16 - G) */
    float decay[OP_HEAD_DIM_MAX];           /* e^G_16 */
    float product[2 * CHUNK][CHUNK];        /* left . right */
    struct kda_row row[CHUNK];
};

/* False if the decays are too strong for this form. */
static bool chunk_vectors(struct kda_chunk *c, uint32_t dim)
{
    float sum[OP_HEAD_DIM_MAX + VF_LANES] = {0}, worst = 0;
    for (uint32_t r = 0; r < CHUNK; r++) {
        VF_EACH(dim, i, count)
        {
            vf g = vf_load(sum + i) + vf_get(c->row[r].log_decay + i, count);
            vf k = vf_get(c->row[r].k + i, count), grown = vf_exp(g);
            vf_store(sum + i, g);
            vf_store(&c->left[r][i], k * grown);
            vf_store(&c->left[CHUNK + r][i], vf_get(c->row[r].q + i, count) * grown);
            vf_store(&c->right[r][i], k * vf_exp(-g));
            vf_store(&c->decay[i], grown);
        }
    }
    for (uint32_t i = 0; i < dim; i++)
        worst = sum[i] < worst ? sum[i] : worst;
    return worst >= DECAY_MIN;
}

/* NOTE: products above the diagonal are never used and may be anything. */
static void chunk_products(struct kda_chunk *c, uint32_t dim)
{
    for (uint32_t j = 0; j < CHUNK; j += DOT_OUTS) {
        const float *w[DOT_OUTS] = {c->right[j], c->right[j + 1], c->right[j + 2], c->right[j + 3]};
        for (uint32_t r = 0; r < 2 * CHUNK; r += VF_ROWS) {
            uint32_t some = 2 * CHUNK - r < VF_ROWS ? 2 * CHUNK - r : VF_ROWS;
            const float *x[VF_ROWS];
            vf4 sums[VF_ROWS];
            for (uint32_t k = 0; k < VF_ROWS; k++)
                x[k] = c->left[r + (k < some ? k : 0)];
            dot_rows(x, w, dim, some, sums);
            for (uint32_t k = 0; k < some; k++)
                memcpy(&c->product[r + k][j], &sums[k], sizeof(vf4));
        }
    }
    for (uint32_t r = 0; r < CHUNK; r++)
        VF_EACH(dim, i, count)
        {
            vf value = vf_load(&c->right[r][i]) * vf_load(&c->decay[i]);
            vf_store(&c->right[r][i], value);
        }
}

/* out[r] = sum over i of weight[r][i] s[i] on a strip, for `rows` <= KDA_ROWS rows. */
VF_INLINE void strip_rows(const float *const *weight, const float *s, uint64_t stride, uint32_t n,
                          int rows, vf out[KDA_ROWS][STRIP])
{
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < STRIP; c++)
            out[r][c] = vf_zero();
    for (uint32_t i = 0; i < n; i++) {
        vf row[STRIP];
#pragma GCC unroll 8
        for (int c = 0; c < STRIP; c++)
            row[c] = vf_load(s + i * stride + c * VF_LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf w = vf_all(weight[r][i]);
#pragma GCC unroll 8
            for (int c = 0; c < STRIP; c++)
                out[r][c] = vf_fma(w, row[c], out[r][c]);
        }
    }
}

/* read[r] = S^T left[r] */
static void chunk_read(const struct kda_head *h, const struct kda_chunk *c, vf (*read)[STRIP])
{
    for (uint32_t r = 0; r < 2 * CHUNK; r += KDA_ROWS) {
        vf out[KDA_ROWS][STRIP];
        uint32_t some = 2 * CHUNK - r < KDA_ROWS ? 2 * CHUNK - r : KDA_ROWS;
        const float *weight[KDA_ROWS];
        for (uint32_t k = 0; k < KDA_ROWS; k++)
            weight[k] = c->left[r + (k < some ? k : 0)];
        strip_rows(weight, h->s, h->stride, h->a->dim, KDA_ROWS, out);
        memcpy(read[r], out, some * sizeof(out[0]));
    }
}

/* S <- decay S + sum over j of right[j] u[j]^T, two key channels at a time. */
static void chunk_write(const struct kda_head *h, const struct kda_chunk *c, const vf (*u)[STRIP])
{
    for (uint32_t i = 0; i < h->a->dim; i++) {
        vf sum[STRIP];
        float *s = h->s + i * h->stride;
        vf decay = vf_all(c->decay[i]);
#pragma GCC unroll 8
        for (int k = 0; k < STRIP; k++)
            sum[k] = decay * vf_load(s + k * VF_LANES);
#pragma GCC unroll 16
        for (uint32_t j = 0; j < CHUNK; j++) {
            vf w = vf_all(c->right[j][i]);
#pragma GCC unroll 8
            for (int k = 0; k < STRIP; k++)
                sum[k] = vf_fma(w, u[j][k], sum[k]);
        }
#pragma GCC unroll 8
        for (int k = 0; k < STRIP; k++)
            vf_store(s + k * VF_LANES, sum[k]);
    }
}

static void chunk_strip(const struct kda_head *h, const struct kda_chunk *c)
{
    vf read[2 * CHUNK][STRIP], u[CHUNK][STRIP];
    chunk_read(h, c, read);
    for (uint32_t r = 0; r < CHUNK; r++) {
        float v[COLUMNS] = {0};
        vf sum[STRIP];
        memcpy(v, c->row[r].v + h->column, h->count * sizeof(float));
        for (int k = 0; k < STRIP; k++)
            sum[k] = read[r][k];
        for (uint32_t j = 0; j < r; j++)
            for (int k = 0; k < STRIP; k++)
                sum[k] = vf_fma(vf_all(c->product[r][j]), u[j][k], sum[k]);
        for (int k = 0; k < STRIP; k++)
            u[r][k] = c->row[r].beta * (vf_load(v + k * VF_LANES) - sum[k]);
    }
    for (uint32_t r = 0; r < CHUNK; r++) {
        float out[COLUMNS];
        vf *sum = read[CHUNK + r];
        for (uint32_t j = 0; j <= r; j++)
            for (int k = 0; k < STRIP; k++)
                sum[k] = vf_fma(vf_all(c->product[CHUNK + r][j]), u[j][k], sum[k]);
        for (int k = 0; k < STRIP; k++)
            vf_store(out + k * VF_LANES, sum[k]);
        memcpy(c->row[r].o + h->column, out, h->count * sizeof(float));
    }
    chunk_write(h, c, (const vf(*)[STRIP])u);
}

/* Calls one of the two on every strip of columns [first, end). */
static void each_strip(const struct kda_head *whole, uint32_t first, uint32_t end,
                       const struct kda_row *row, const struct kda_keys *keys,
                       const struct kda_chunk *chunk)
{
    for (uint32_t column = first; column < end; column += COLUMNS) {
        struct kda_head h = *whole;
        h.column = column;
        h.count = end - column < COLUMNS ? end - column : COLUMNS;
        h.s += column - first;
        if (chunk != NULL)
            chunk_strip(&h, chunk);
        else
            step_strip(&h, row, keys);
    }
}

/* Rows [from, ...) as one chunk if they are a whole one; 0 if not. */
static uint32_t try_chunk(const struct kda_head *h, uint32_t from, uint32_t first, uint32_t end)
{
    struct kda_chunk chunk;
    const struct op_seq *seq = h->seq;
    if (seq->journal || (seq->position_start + from) % CHUNK != 0 || seq->row_count - from < CHUNK)
        return 0;
    for (uint32_t r = 0; r < CHUNK; r++)
        chunk.row[r] = own_row(h, from + r);
    if (!chunk_vectors(&chunk, h->a->dim))
        return 0;
    chunk_products(&chunk, h->a->dim);
    each_strip(h, first, end, NULL, NULL, &chunk);
    return CHUNK;
}

/* The copy of a part of S that may not, or cannot, be worked on in place. */
struct kda_copy {
    _Alignas(64) float s[OP_HEAD_DIM_MAX][OP_HEAD_DIM_MAX + COLUMNS];
};

static void copy_state(const struct kda_head *h, float *state, uint32_t first, uint32_t end,
                       bool back)
{
    size_t bytes = (end - first) * sizeof(float);
    for (uint32_t i = 0; i < h->a->dim; i++) {
        float *slot = state + (uint64_t)i * h->a->dim + first, *s = h->s + i * h->stride;
        if (back)
            memcpy(slot, s, bytes);
        else
            memcpy(s, slot, bytes);
    }
}

/* Value channels [first, end) of one head of one sequence. */
static void run_head(const struct op_kda_args *a, const struct op_seq *seq, uint32_t head,
                     uint32_t first, uint32_t end)
{
    struct kda_copy copy;
    struct kda_keys keys;
    uint32_t dim = a->dim;
    float *state = (float *)(void *)(seq->slot + a->state_offset) + (uint64_t)head * dim * dim;
    bool in_place = !seq->journal && (end - first) % COLUMNS == 0;
    struct kda_head h = {.a = a, .seq = seq, .head = head, .s = state + first, .stride = dim};
    if (!in_place) {
        h.s = copy.s[0];
        h.stride = OP_HEAD_DIM_MAX + COLUMNS;
        for (uint32_t i = 0; i < dim; i++)
            memset(copy.s[i], 0, (end - first + COLUMNS) * sizeof(float));
    }
    if (seq->fresh)
        for (uint32_t i = 0; i < dim; i++)
            memset(h.s + i * h.stride, 0, (end - first) * sizeof(float));
    else if (!in_place)
        copy_state(&h, state, first, end, false);

    for (uint32_t r = 0; r < seq->replay_count; r++) {
        struct kda_row row = journal_row(&h, r);
        keys_of(&row, dim, &keys);
        each_strip(&h, first, end, &row, &keys, NULL);
    }
    if (seq->journal && (seq->fresh || seq->replay_count > 0))
        copy_state(&h, state, first, end, true);
    for (uint32_t r = 0; r < seq->row_count;) {
        uint32_t done = try_chunk(&h, r, first, end);
        if (done == 0) {
            struct kda_row row = own_row(&h, r);
            keys_of(&row, dim, &keys);
            each_strip(&h, first, end, &row, &keys, NULL);
            done = 1;
        }
        r += done;
    }
    if (!seq->journal && !in_place)
        copy_state(&h, state, first, end, true);
}

/* Value channels of one item: few rows are spread over the threads strip by strip, a prefill head
 * by head, so that its strips share what a chunk needs. */
static uint32_t item_columns(const struct op_kda_args *a)
{
    return a->row_count / a->seq_count >= CHUNK ? a->dim : COLUMNS;
}

static void kda_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_args *a = arg;
    uint32_t columns = item_columns(a), strips = (a->dim + columns - 1) / columns;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t first = i % strips * columns, head = i / strips % a->heads;
        uint32_t last = a->dim - first < columns ? a->dim : first + columns;
        run_head(a, &a->seqs[i / strips / a->heads], head, first, last);
    }
}

/* Second pass, after everyone has read the old journal. */
static void journal_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_kda_args *a = arg;
    uint32_t inner = a->heads * a->dim;
    for (uint32_t i = begin; i < end; i++) {
        const struct op_seq *seq = &a->seqs[i];
        float *j = (float *)(void *)(seq->slot + a->journal_offset);
        if (!seq->journal)
            continue;
        DCHECK(seq->row_count <= a->journal_rows);
        for (uint32_t r = seq->row_begin; r < seq->row_begin + seq->row_count; r++) {
            memcpy(j, a->k + r * a->qkv_stride, inner * sizeof(float));
            memcpy(j + inner, a->v + r * a->qkv_stride, inner * sizeof(float));
            memcpy(j + 2 * inner, a->log_decay + (uint64_t)r * inner, inner * sizeof(float));
            memcpy(j + 3 * inner, a->beta + (uint64_t)r * a->heads, a->heads * sizeof(float));
            j += op_kda_journal_floats(a->heads, a->dim);
        }
    }
}

enum err OP_FAST(kda)(const struct op_kda_args *a, const struct op_ctx *ctx)
{
    CHECK(a->dim > 0 && a->dim <= OP_HEAD_DIM_MAX);
    CHECK(a->seq_count > 0);
    uint32_t columns = item_columns(a), strips = (a->dim + columns - 1) / columns;
    uint64_t rows = a->row_count / a->seq_count + 1;
    op_for(ctx, a->seq_count * a->heads * strips, rows * a->dim * columns, kda_items, a);
    op_for(ctx, a->seq_count, rows * a->heads * a->dim / 4, journal_items, a);
    return ERR_OK;
}
