/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/sampler.h"

#include <math.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"

#define SAMPLER_MAGIC 0x73616d70u

struct sampler {
    uint32_t magic;
    uint32_t vocab_size;
    const uint8_t *has_token;
    double *score;   /* [vocab]; -inf = cannot be chosen */
    uint32_t *order; /* [vocab] candidates; heap, or sorted from the end */
};

struct sampler *sampler_create(uint32_t vocab_size, const uint8_t *has_token)
{
    CHECK(vocab_size > 0);
    CHECK(has_token != NULL);
    struct sampler *s = mem_take(sizeof(*s));
    s->magic = SAMPLER_MAGIC;
    s->vocab_size = vocab_size;
    s->has_token = has_token;
    s->score = mem_take_array(vocab_size, sizeof(*s->score));
    s->order = mem_take_array(vocab_size, sizeof(*s->order));
    return s;
}

void sampler_destroy(struct sampler **sampler_p)
{
    struct sampler *s = *sampler_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, SAMPLER_MAGIC);
    mem_give(s->score);
    mem_give(s->order);
    s->magic = 0;
    mem_give(s);
    *sampler_p = NULL;
}

static double penalised(double logit, const struct sampler_params *p,
                        const struct sampler_history *h, uint32_t id)
{
    if (h->in_context != NULL && p->repetition_penalty != 1 && h->in_context[id])
        logit = logit > 0 ? logit / p->repetition_penalty : logit * p->repetition_penalty;
    if (h->output_count != NULL && h->output_count[id] > 0)
        logit -= p->presence_penalty + p->frequency_penalty * h->output_count[id];
    return logit;
}

/* Penalties, bias, mask.  A NaN logit counts as never to be chosen. */
static void process(struct sampler *s, const struct sampler_params *p,
                    const struct sampler_history *h, const float *logits)
{
    static const struct sampler_history none = {NULL, NULL};
    h = h != NULL ? h : &none;
    for (uint32_t v = 0; v < s->vocab_size; v++)
        s->score[v] = s->has_token[v] && !isnan(logits[v]) ? penalised(logits[v], p, h, v)
                                                           : -(double)INFINITY;
    for (uint32_t i = 0; i < p->bias_count; i++)
        if (p->bias_ids[i] < s->vocab_size)
            s->score[p->bias_ids[i]] += (double)p->bias_values[i];
    for (uint32_t i = 0; i < p->banned_count; i++)
        if (p->banned_ids[i] < s->vocab_size)
            s->score[p->banned_ids[i]] = -(double)INFINITY;
}

static uint32_t best_id(const struct sampler *s)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t v = 0; v < s->vocab_size; v++)
        if (s->has_token[v] && (best == UINT32_MAX || s->score[v] > s->score[best]))
            best = v;
    CHECK(best != UINT32_MAX); /* a vocabulary without any token was refused at load */
    return best;
}

/* Order of preference: score descending, then id ascending. */
static bool before(const struct sampler *s, uint32_t x, uint32_t y)
{
    return s->score[x] > s->score[y] || (s->score[x] == s->score[y] && x < y);
}

static void sink(struct sampler *s, uint32_t at, uint32_t count)
{
    uint32_t id = s->order[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && before(s, s->order[child + 1], s->order[child]))
            child++;
        if (!before(s, s->order[child], id))
            break;
        s->order[at] = s->order[child];
        at = child;
    }
    s->order[at] = id;
}

/* Moves the best of the heap [0, count) to order[count - 1]. */
static uint32_t pop(struct sampler *s, uint32_t count)
{
    uint32_t top = s->order[0];
    s->order[0] = s->order[count - 1];
    s->order[count - 1] = top;
    sink(s, 0, count - 1);
    return top;
}

/* The candidates after top-k and top-p.  Kept ids stand in order[ret_first ..candidates). */
static uint32_t keep_best(struct sampler *s, const struct sampler_params *p, uint32_t candidates)
{
    for (uint32_t i = candidates / 2; i-- > 0;)
        sink(s, i, candidates);
    uint32_t most = p->top_k > 0 && p->top_k < candidates ? p->top_k : candidates;
    uint32_t heap = candidates;
    double total = 0;
    if (most < candidates) {
        while (candidates - heap < most)
            total += exp(s->score[pop(s, heap--)]);
    } else {
        for (uint32_t v = 0; v < s->vocab_size; v++)
            total += s->score[v] > -(double)INFINITY ? exp(s->score[v]) : 0;
    }
    if (p->top_p >= 1)
        return most < candidates ? candidates - most : 0;
    double sum = 0;
    uint32_t kept = 0;
    while (kept < most && (kept == 0 || sum < p->top_p * total)) {
        if (most == candidates)
            (void)pop(s, heap--);
        sum += exp(s->score[s->order[candidates - 1 - kept]]);
        kept++;
    }
    return candidates - kept;
}

/* After process() and with a positive temperature. */
static uint32_t sample(struct sampler *s, const struct sampler_params *p, uint64_t position)
{
    double top = s->score[best_id(s)];
    uint32_t candidates = 0;
    if (top == -(double)INFINITY || top == (double)INFINITY)
        return best_id(s);
    for (uint32_t v = 0; v < s->vocab_size; v++) {
        if (s->score[v] == -(double)INFINITY)
            continue;
        s->score[v] = (s->score[v] - top) / p->temperature;
        if (s->score[v] > -(double)INFINITY) /* a tiny temperature overflows here, rightly */
            s->order[candidates++] = v;
    }
    uint32_t first = 0;
    if ((p->top_k > 0 && p->top_k < candidates) || p->top_p < 1)
        first = keep_best(s, p, candidates);

    uint32_t chosen = UINT32_MAX;
    double chosen_score = 0;
    for (uint32_t i = first; i < candidates; i++) {
        uint32_t v = s->order[i];
        if (p->min_p > 0 && exp(s->score[v]) < p->min_p)
            continue;
        double score = s->score[v] + rng_gumbel(p->seed, position, v, p->choice);
        if (chosen == UINT32_MAX || score > chosen_score || (score == chosen_score && v < chosen)) {
            chosen = v;
            chosen_score = score;
        }
    }
    CHECK(chosen != UINT32_MAX); /* the best candidate has score 0 and passes every filter */
    return chosen;
}

/* Of the unprocessed logits, over the ids that have a token. */
static double log_total(const struct sampler *s, const float *logits)
{
    double top = -(double)INFINITY, sum = 0;
    for (uint32_t v = 0; v < s->vocab_size; v++)
        if (s->has_token[v] && (double)logits[v] > top)
            top = logits[v];
    for (uint32_t v = 0; v < s->vocab_size; v++)
        if (s->has_token[v] && !isnan(logits[v]))
            sum += exp(logits[v] - top);
    return top + log(sum);
}

static void fill_top(const struct sampler *s, const struct sampler_params *p, const float *logits,
                     double total, struct sampler_result *result)
{
    uint32_t count = 0;
    for (uint32_t v = 0; v < s->vocab_size && p->top_logprobs > 0; v++) {
        if (!s->has_token[v] || isnan(logits[v]))
            continue;
        uint32_t at = count;
        while (at > 0 && logits[v] > logits[result->top_ids[at - 1]])
            at--;
        if (at == p->top_logprobs)
            continue;
        count += count < p->top_logprobs ? 1 : 0;
        for (uint32_t i = count - 1; i > at; i--)
            result->top_ids[i] = result->top_ids[i - 1];
        result->top_ids[at] = v;
    }
    result->top_count = count;
    for (uint32_t i = 0; i < count; i++)
        result->top_logprobs[i] = (float)(logits[result->top_ids[i]] - total);
}

void sampler_pick(struct sampler *s, const struct sampler_params *params,
                  const struct sampler_history *history, const float *logits, uint64_t position,
                  struct sampler_result *ret_result)
{
    CHECK_OBJ(s, SAMPLER_MAGIC);
    CHECK(params->temperature >= 0);
    CHECK(params->repetition_penalty > 0);
    CHECK(params->top_logprobs <= SAMPLER_TOP_LOGPROBS_MAX);
    process(s, params, history, logits);
    ret_result->id = params->temperature > 0 ? sample(s, params, position) : best_id(s);
    ret_result->logprob = 0;
    ret_result->top_count = 0;
    if (params->logprobs || params->top_logprobs > 0) {
        double total = log_total(s, logits);
        ret_result->logprob = (float)(logits[ret_result->id] - total);
        fill_top(s, params, logits, total, ret_result);
    }
}
