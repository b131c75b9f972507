/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_mla.h"

#include <math.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "kernels/op_kv_row.h"
#include "kernels/ref/op_dot.h"
#include "lib/base/check.h"

static void latent_write_seqs(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_latent_write_args *a = arg;
    for (uint32_t s = begin; s < end; s++) {
        const struct op_seq *seq = &a->seqs[s];
        for (uint32_t r = 0; r < seq->row_count; r++) {
            if (!op_shard_owns(&a->pages.shard, seq->position_start + r))
                continue;
            uint8_t *to =
                op_page_row(&a->pages, seq->blocks, seq->position_start + r, a->latent_dim);
            op_latent_row_store(a->pages.type,
                                a->latent + (uint64_t)(seq->row_begin + r) * a->latent_dim,
                                a->latent_dim, to);
        }
    }
}

enum err op_latent_write_ref(const struct op_latent_write_args *a, const struct op_ctx *ctx)
{
    CHECK(a->pages.rows_per_block > 0);
    op_for(ctx, a->seq_count, a->latent_dim, latent_write_seqs, a);
    return ERR_OK;
}

/* Row i of W_K,h, widened where needed. */
static const float *weight_row(const struct op_weight *w, uint64_t row, uint32_t n, float *tile)
{
    if (w->dtype == OP_F32)
        return (const float *)w->data + row * n;
    op_widen(w, row * n, n, tile);
    return tile;
}

static void absorb_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mla_absorb_args *a = arg;
    float tile[OP_LATENT_MAX];
    double sum[OP_LATENT_MAX];
    for (uint32_t i = begin; i < end; i++) {
        uint32_t head = i % a->heads;
        const float *q = a->q + (uint64_t)i * a->nope;
        memset(sum, 0, a->latent * sizeof(double));
        for (uint32_t d = 0; d < a->nope; d++) {
            uint64_t row = (uint64_t)head * (a->nope + a->v_dim) + d;
            const float *w = weight_row(&a->kv_b, row, a->latent, tile);
            double x = q[d];
            for (uint32_t c = 0; c < a->latent; c++)
                sum[c] += x * w[c];
        }
        float *out = a->q_abs + (uint64_t)i * a->latent;
        for (uint32_t c = 0; c < a->latent; c++)
            out[c] = (float)sum[c];
    }
}

enum err op_mla_absorb_ref(const struct op_mla_absorb_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    op_for(ctx, a->rows * a->heads, (uint64_t)a->nope * a->latent, absorb_items, a);
    return ERR_OK;
}

static void attend_item(const struct op_mla_attend_args *a, uint32_t item)
{
    uint32_t row = item / a->heads;
    const struct op_seq *seq = &a->seqs[a->seq_of[row]];
    const uint32_t *selected = a->selected + (uint64_t)row * a->selected_stride;
    uint32_t count = a->selected_count[row];
    const float *q = a->q_abs + (uint64_t)item * a->latent;
    double *p = a->work + (uint64_t)item * a->selected_stride;
    float tile[OP_LATENT_MAX];
    double top = -INFINITY;
    for (uint32_t j = 0; j < count; j++) {
        const float *c = op_page_load(&a->pages, seq->blocks, selected[j], a->latent, tile);
        p[j] = op_dot(c, q, a->latent) * a->scale;
        top = p[j] > top ? p[j] : top;
    }
    double sum = 0;
    for (uint32_t j = 0; j < count; j++) {
        p[j] = exp(p[j] - top);
        sum += p[j];
    }
    if (a->lse != NULL)
        a->lse[item] = count > 0 ? (float)(top + log(sum)) : -INFINITY;
    double out[OP_LATENT_MAX];
    memset(out, 0, a->latent * sizeof(double));
    for (uint32_t j = 0; j < count; j++) {
        const float *c = op_page_load(&a->pages, seq->blocks, selected[j], a->latent, tile);
        double weight = p[j] / sum;
        for (uint32_t d = 0; d < a->latent; d++)
            out[d] += weight * c[d];
    }
    for (uint32_t d = 0; d < a->latent; d++)
        a->o_abs[(uint64_t)item * a->latent + d] = (float)out[d];
}

static void attend_items(const void *arg, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        attend_item(arg, i);
}

enum err op_mla_attend_ref(const struct op_mla_attend_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    CHECK(a->selected_stride > 0);
    uint64_t cost = (uint64_t)a->selected_stride * a->latent * 2;
    op_for(ctx, a->rows * a->heads, cost, attend_items, a);
    return ERR_OK;
}

static void value_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct op_mla_value_args *a = arg;
    float tile[OP_LATENT_MAX];
    for (uint32_t i = begin; i < end; i++) {
        uint32_t head = i % a->heads;
        const float *x = a->o_abs + (uint64_t)i * a->latent;
        for (uint32_t d = 0; d < a->v_dim; d++) {
            uint64_t row = (uint64_t)head * (a->nope + a->v_dim) + a->nope + d;
            const float *w = weight_row(&a->kv_b, row, a->latent, tile);
            a->o[(uint64_t)i * a->v_dim + d] = (float)op_dot(w, x, a->latent);
        }
    }
}

enum err op_mla_value_ref(const struct op_mla_value_args *a, const struct op_ctx *ctx)
{
    CHECK(a->latent > 0 && a->latent <= OP_LATENT_MAX);
    op_for(ctx, a->rows * a->heads, (uint64_t)a->v_dim * a->latent, value_items, a);
    return ERR_OK;
}
