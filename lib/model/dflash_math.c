/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/model/dflash_parts.h"

void dflash_rope(const double *frequencies, float *x, uint32_t rows, uint32_t heads, uint32_t dim,
                 uint32_t start)
{
    uint32_t half = dim / 2;
    for (uint32_t r = 0; r < rows; r++) {
        double position = (double)start + r;
        for (uint32_t i = 0; i < half; i++) {
            /* By the angle itself: a table would have to be as long as the context. */
            double c = cos(position * frequencies[i]), s = sin(position * frequencies[i]);
            for (uint32_t h = 0; h < heads; h++) {
                float *v = x + ((uint64_t)r * heads + h) * dim;
                double low = v[i], high = v[i + half];
                v[i] = (float)(low * c - high * s);
                v[i + half] = (float)(high * c + low * s);
            }
        }
    }
}

void dflash_conv_run(const struct dflash_config *config, const float *base, const float *delta,
                     uint32_t side, const float *x, float *y, uint32_t rows, uint32_t block)
{
    uint32_t hidden = config->hidden, taps = config->conv_taps;
    uint32_t groups = hidden / config->conv_group;
    for (uint32_t r = 0; r < rows; r++) {
        const float *d = delta + (uint64_t)r * 2 * taps * groups + (uint64_t)side * taps * groups;
        for (uint32_t c = 0; c < hidden; c++) {
            double sum = 0;
            for (uint32_t o = 0; o < taps && o <= r % block; o++) {
                double kernel = (double)base[((uint64_t)side * taps + o) * hidden + c] +
                                d[o * groups + c / config->conv_group];
                sum += kernel * x[(uint64_t)(r - o) * hidden + c];
            }
            y[(uint64_t)r * hidden + c] = (float)sum;
        }
    }
}

/* A softmax over keys that come one by one. */
struct running {
    double most, total;
    double *sum; /* [dim] */
    uint32_t dim;
};

static double dot(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static void see(struct running *s, double score, const float *v)
{
    if (score > s->most) {
        double shrink = exp(s->most - score);
        s->most = score;
        s->total *= shrink;
        for (uint32_t i = 0; i < s->dim; i++)
            s->sum[i] *= shrink;
    }
    double weight = exp(score - s->most);
    s->total += weight;
    for (uint32_t i = 0; i < s->dim; i++)
        s->sum[i] += weight * v[i];
}

/* First context position that row `row` of the block sees. */
static uint32_t first_seen(const struct dflash_attend *a, uint32_t row)
{
    const struct dflash_config *config = &a->drafter->config;
    uint32_t first = a->context->first;
    if (!config->layer_sliding[a->layer])
        return first;
    uint64_t position = (uint64_t)a->context->length + row;
    uint64_t edge = position + 1 > config->window ? position + 1 - config->window : 0;
    return edge > first ? (uint32_t)edge : first;
}

static bool block_sees(const struct dflash_config *config, uint32_t layer, uint32_t row,
                       uint32_t other)
{
    uint32_t apart = row > other ? row - other : other - row;
    if (config->layer_sliding[layer] && apart >= config->window)
        return false;
    return !config->layer_causal[layer] || other <= row;
}

static void attend_head(const struct dflash_attend *a, uint32_t row, uint32_t head)
{
    const struct dflash_config *config = &a->drafter->config;
    uint32_t dim = config->head_dim, kv_heads = config->kv_heads;
    uint32_t kv_head = (uint32_t)((uint64_t)head * kv_heads / config->heads);
    double sum[1024] = {0}, scale = 1 / sqrt((double)dim);
    struct running s = {.most = -INFINITY, .sum = sum, .dim = dim};
    const float *q = a->q + ((uint64_t)row * config->heads + head) * dim;
    const float *keys = dflash_rows(a->drafter, a->context, a->layer, 0);
    const float *values = dflash_rows(a->drafter, a->context, a->layer, 1);
    uint32_t held = a->drafter->layer_rows[a->layer];
    for (uint32_t p = first_seen(a, row); p < a->context->length; p++) {
        uint64_t at = ((uint64_t)(p % held) * kv_heads + kv_head) * dim;
        see(&s, scale * dot(q, keys + at, dim), values + at);
    }
    for (uint32_t other = 0; other < config->block_size; other++) {
        uint64_t at = ((uint64_t)other * kv_heads + kv_head) * dim;
        if (block_sees(config, a->layer, row, other))
            see(&s, scale * dot(q, a->k + at, dim), a->v + at);
    }
    float *o = a->o + ((uint64_t)row * config->heads + head) * dim;
    for (uint32_t i = 0; i < dim; i++)
        o[i] = (float)(sum[i] / s.total); /* a row always sees itself */
}

static void attend_items(const void *arg, uint32_t begin, uint32_t end)
{
    const struct dflash_attend *a = arg;
    uint32_t heads = a->drafter->config.heads;
    for (uint32_t i = begin; i < end; i++)
        attend_head(a, i / heads, i % heads);
}

void dflash_attend_run(const struct dflash_attend *a)
{
    const struct dflash_config *config = &a->drafter->config;
    STATIC_CHECK(DFLASH_BLOCK_MAX <= 16);
    CHECK(config->head_dim <= 1024);
    uint64_t keys = a->context->length - a->context->first + config->block_size;
    op_for(&a->drafter->ctx, config->block_size * config->heads, keys * config->head_dim * 2,
           attend_items, a);
}

uint32_t dflash_top(const struct dflash *d, const float *logits, uint32_t k, uint32_t *ret_rows,
                    float *ret_logits)
{
    uint32_t rows = d->weights.head.out, count = 0;
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t id = d->weights.head_ids != NULL ? d->weights.head_ids[row] : row;
        float value = logits[row];
        if (!d->has_token[id] || (count == k && !(value > ret_logits[k - 1])))
            continue;
        uint32_t at = count < k ? count++ : k - 1;
        while (at > 0 && value > ret_logits[at - 1]) {
            ret_rows[at] = ret_rows[at - 1];
            ret_logits[at] = ret_logits[at - 1];
            at--;
        }
        ret_rows[at] = row;
        ret_logits[at] = value;
    }
    return count;
}

void dflash_walk(const struct dflash *d, uint32_t anchor, const float *project,
                 const uint32_t *top_ids, const float *top_logits, float *scores, uint32_t *ret_ids)
{
    uint32_t k = d->config.selector_top_k, rank = d->config.selector_rank;
    uint32_t previous = anchor;
    for (uint32_t t = 0; t + 1 < d->config.block_size; t++) {
        uint32_t best = 0;
        for (uint32_t b = 0; b < k; b++) {
            double sum = 0;
            uint64_t from = (uint64_t)previous * rank, to = (uint64_t)top_ids[t * k + b] * rank;
            for (uint32_t r = 0; r < rank; r++)
                sum += (double)op_weight_at(&d->weights.predecessor, from + r) *
                       project[(uint64_t)t * rank + r] *
                       op_weight_at(&d->weights.successor, to + r);
            scores[t * k + b] = (float)(top_logits[t * k + b] + sum);
            if (scores[t * k + b] > scores[t * k + best])
                best = b;
        }
        previous = top_ids[t * k + best];
        ret_ids[t] = previous;
    }
}
