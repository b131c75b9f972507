/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/sampler.h - sample-and-match: the token at a position as a pure function.
 *
 * Pure; any thread with its own scratch.  token = argmax over v of (log p(v) + Gumbel(seed, m, v)),
 * after penalties, bias, mask, temperature, top-k, top-p, min-p, in this order (design.md 5.3);
 * temperature 0 is plain argmax after penalties, bias and mask.  Ties go to the lowest id. */
#ifndef LIB_MODEL_SAMPLER_H
#define LIB_MODEL_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#define SAMPLER_TOP_LOGPROBS_MAX 20

struct sampler_params {
    double temperature;        /* 0 = greedy */
    double top_p;              /* 1 = off */
    double min_p;              /* 0 = off */
    uint32_t top_k;            /* 0 = off */
    double repetition_penalty; /* 1 = off; prompt and output */
    double presence_penalty;   /* 0 = off; output only */
    double frequency_penalty;  /* 0 = off; output only */
    uint64_t seed;
    uint32_t choice; /* index among n choices */
    uint32_t bias_count;
    const uint32_t *bias_ids; /* borrowed */
    const float *bias_values;
    /* ids masked out at this position (stop ids below min_tokens) */
    uint32_t banned_count;
    const uint32_t *banned_ids;
    uint32_t top_logprobs; /* 0..20 */
    bool logprobs;
};

/* Token counts of a sequence, kept by the caller: in_context[v] != 0 if v stands in prompt or
 * output so far, output_count[v] times in the output.  Either may be NULL when its penalty is
 * off. */
struct sampler_history {
    const uint8_t *in_context;
    const uint16_t *output_count;
};

struct sampler_result {
    uint32_t id;
    float logprob; /* of the unprocessed logits */
    uint32_t top_count;
    uint32_t top_ids[SAMPLER_TOP_LOGPROBS_MAX]; /* logprob descending, then id ascending */
    float top_logprobs[SAMPLER_TOP_LOGPROBS_MAX];
};

struct sampler;
/* borrows has_token */
struct sampler *sampler_create(uint32_t vocab_size, const uint8_t *has_token);
void sampler_destroy(struct sampler **sampler_p);

/* logits [vocab_size] are not changed.  position m: of the token being chosen, prompt counted. */
void sampler_pick(struct sampler *s, const struct sampler_params *params,
                  const struct sampler_history *history, const float *logits, uint64_t position,
                  struct sampler_result *ret_result);

#endif
