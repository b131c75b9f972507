/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "lib/base/rng.h"
#include "lib/model/sampler.h"

#define VOCAB 12

static const struct sampler_params plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
static const struct sampler_history no_history = {NULL, NULL};
static uint8_t every_token[VOCAB];

static uint32_t pick(struct sampler *s, const struct sampler_params *p, const float *logits,
                     uint64_t position)
{
    struct sampler_result r;
    sampler_pick(s, p, &no_history, logits, position, &r);
    return r.id;
}

static int setup(void **state)
{
    memset(every_token, 1, sizeof(every_token));
    *state = sampler_create(VOCAB, every_token);
    return 0;
}

static int teardown(void **state)
{
    sampler_destroy((struct sampler **)state);
    assert_null(*state);
    sampler_destroy((struct sampler **)state);
    return 0;
}

static void test_greedy(void **state)
{
    struct sampler_params p = plain;
    float logits[VOCAB] = {1, 5, 2, 5, -1, 0, 0, 0, 0, 0, 0, 0};
    p.temperature = 0;
    for (uint64_t m = 0; m < 20; m++)
        assert_int_equal(pick(*state, &p, logits, m), 1); /* ties to the lowest id */
    uint32_t banned[] = {1, 4000000000u};
    p.banned_ids = banned;
    p.banned_count = 2;
    assert_int_equal(pick(*state, &p, logits, 0), 3);
    uint32_t bias_ids[] = {5, 99};
    float bias[] = {7, 100};
    p.bias_ids = bias_ids;
    p.bias_values = bias;
    p.bias_count = 2;
    assert_int_equal(pick(*state, &p, logits, 0), 5);
    logits[5] = NAN;
    assert_int_equal(pick(*state, &p, logits, 0), 3);
}

/* The definition, by brute force: argmax over v of log p(v) + Gumbel. */
static void test_sample_and_match(void **state)
{
    struct rng rng;
    rng_init(&rng, 5);
    for (uint64_t m = 0; m < 500; m++) {
        float logits[VOCAB];
        struct sampler_params p = plain;
        double total = 0, best = 0;
        uint32_t want = VOCAB;
        p.temperature = 0.2 + 2 * rng_unit(&rng);
        p.seed = rng_u64(&rng);
        p.choice = rng_below(&rng, 3);
        for (uint32_t v = 0; v < VOCAB; v++) {
            logits[v] = (float)(rng_unit(&rng) * 8 - 4);
            total += exp(logits[v] / p.temperature);
        }
        for (uint32_t v = 0; v < VOCAB; v++) {
            double score =
                log(exp(logits[v] / p.temperature) / total) + rng_gumbel(p.seed, m, v, p.choice);
            if (want == VOCAB || score > best) {
                want = v;
                best = score;
            }
        }
        assert_int_equal(pick(*state, &p, logits, m), want);
        assert_int_equal(pick(*state, &p, logits, m), want);
    }
}

/* Fixed answers: a change of the generator, of its counter or of the order would show. */
static void test_known(void **state)
{
    float logits[VOCAB] = {0, 0.5f, 1, 1.5f, 2, 2.5f, 2, 1.5f, 1, 0.5f, 0, -1};
    struct sampler_params p = plain;
    uint32_t have[16];
    p.seed = 42;
    for (uint64_t m = 0; m < 8; m++)
        have[m] = pick(*state, &p, logits, m);
    p.seed = 0xfeedfacecafebeefu;
    p.choice = 1;
    for (uint64_t m = 0; m < 8; m++)
        have[8 + m] = pick(*state, &p, logits, ((uint64_t)1 << 32) + m);
    static const uint32_t want[16] = {7, 5, 3, 5, 4, 5, 7, 9, 10, 7, 6, 7, 3, 4, 4, 9};
    for (int i = 0; i < 16; i++)
        assert_int_equal(have[i], want[i]);
}

/* Draws at many positions against the wanted distribution; 0 probability must never come. */
static void check_distribution(struct sampler *s, const struct sampler_params *p,
                               const struct sampler_history *h, const float *logits,
                               const double *want)
{
    enum { DRAWS = 20000 };
    uint32_t seen[VOCAB] = {0}, degrees = 0;
    double chi = 0, total = 0;
    for (uint64_t m = 0; m < DRAWS; m++) {
        struct sampler_result r;
        sampler_pick(s, p, h, logits, m, &r);
        assert_true(r.id < VOCAB);
        seen[r.id]++;
    }
    for (uint32_t v = 0; v < VOCAB; v++)
        total += want[v];
    for (uint32_t v = 0; v < VOCAB; v++) {
        double expected = want[v] / total * DRAWS;
        if (want[v] == 0) {
            assert_int_equal(seen[v], 0);
            continue;
        }
        chi += (seen[v] - expected) * (seen[v] - expected) / expected;
        degrees++;
    }
    /* Mean d, deviation sqrt(2 d): five deviations; the draws are the same in every run. */
    if (!(chi < degrees + 5 * sqrt(2.0 * degrees) + 5))
        fail_msg("chi square %.1f with %u categories", chi, degrees);
}

static void test_filters(void **state)
{
    static const double prob[VOCAB] = {.02, .3, .05, .2, .02, .2, .1, .03, .03, .02, .02, .01};
    float logits[VOCAB];
    double want[VOCAB];
    struct sampler_params p = plain;
    p.seed = 9;
    for (uint32_t v = 0; v < VOCAB; v++)
        logits[v] = (float)log(prob[v]);
    check_distribution(*state, &p, &no_history, logits, prob);

    p.top_k = 2; /* .3, and of the two .2 the lower id */
    memset(want, 0, sizeof(want));
    want[1] = .3;
    want[3] = .2;
    check_distribution(*state, &p, &no_history, logits, want);

    p.top_k = 0;
    p.top_p = 0.65; /* .3 + .2 + .2 reaches it */
    want[5] = .2;
    check_distribution(*state, &p, &no_history, logits, want);
    p.top_k = 4; /* of the four's sum .8: .3 + .2 + .2 = .875 */
    p.top_p = 0.8;
    check_distribution(*state, &p, &no_history, logits, want);
    p.top_p = 0.9;
    want[6] = .1;
    check_distribution(*state, &p, &no_history, logits, want);

    p = plain;
    p.min_p = 0.3; /* of .3: .09 and more */
    check_distribution(*state, &p, &no_history, logits, want);
    p.temperature = 0.5; /* squares: .09 .04 .04, .01 is below .027 */
    want[1] = .09;
    want[3] = want[5] = .04;
    want[6] = 0;
    check_distribution(*state, &p, &no_history, logits, want);
    p = plain;
    p.top_p = 1e-9;
    memset(want, 0, sizeof(want));
    want[1] = 1;
    check_distribution(*state, &p, &no_history, logits, want);
}

static void test_penalties(void **state)
{
    float logits[VOCAB] = {1, -1, 0.5f, 2, 0, 0, 0, 0, 0, 0, 0, 0};
    uint8_t in_context[VOCAB] = {1, 1, 0, 1};
    uint16_t output_count[VOCAB] = {0, 3, 0, 1};
    struct sampler_history h = {in_context, output_count};
    struct sampler_params p = plain;
    double want[VOCAB];
    p.repetition_penalty = 2;
    p.presence_penalty = 0.25;
    p.frequency_penalty = 0.5;
    for (uint32_t v = 0; v < VOCAB; v++)
        want[v] = exp(logits[v]);
    want[0] = exp(0.5);
    want[1] = exp(-2 - 0.25 - 1.5);
    want[3] = exp(1 - 0.25 - 0.5);
    check_distribution(*state, &p, &h, logits, want);
    p.temperature = 0;
    struct sampler_result r;
    sampler_pick(*state, &p, &h, logits, 0, &r);
    assert_int_equal(r.id, 0); /* 0.5 with a penalty ties with id 2: the lower id */
}

static void test_tokens_only(void **state)
{
    (void)state;
    uint8_t has[VOCAB];
    memset(has, 0, sizeof(has));
    has[2] = has[7] = 1;
    struct sampler *s = sampler_create(VOCAB, has);
    float logits[VOCAB] = {9, 9, 1, 9, 9, 9, 9, 2, 9, 9, 9, 9};
    double want[VOCAB] = {0};
    struct sampler_params p = plain;
    want[2] = exp(1);
    want[7] = exp(2);
    check_distribution(s, &p, &no_history, logits, want);
    p.logprobs = true;
    p.top_logprobs = 5;
    struct sampler_result r;
    sampler_pick(s, &p, &no_history, logits, 3, &r);
    assert_int_equal(r.top_count, 2);
    assert_int_equal(r.top_ids[0], 7);
    assert_true(fabs(r.top_logprobs[0] - log(want[7] / (want[2] + want[7]))) < 1e-6);
    assert_true(fabs(exp(r.top_logprobs[0]) + exp(r.top_logprobs[1]) - 1) < 1e-6);
    sampler_destroy(&s);
}

/* Logprobs are those of the unprocessed logits, whatever was done to choose. */
static void test_logprobs(void **state)
{
    float logits[VOCAB] = {0, 1, 3, 1, 2, -1, 3, 0, 0, 0, 0, 0};
    uint32_t banned = 2, bias_id = 9;
    float bias = 50;
    struct sampler_params p = plain;
    struct sampler_result r;
    double total = 0;
    p.temperature = 0.7;
    p.top_k = 3;
    p.banned_ids = &banned;
    p.banned_count = 1;
    p.bias_ids = &bias_id;
    p.bias_values = &bias;
    p.bias_count = 1;
    p.logprobs = true;
    p.top_logprobs = 4;
    for (uint32_t v = 0; v < VOCAB; v++)
        total += exp(logits[v]);
    sampler_pick(*state, &p, &no_history, logits, 0, &r);
    assert_int_equal(r.id, 9);
    assert_true(fabs(r.logprob - log(1 / total)) < 1e-6);
    static const uint32_t want[4] = {2, 6, 4, 1};
    assert_int_equal(r.top_count, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(r.top_ids[i], want[i]);
        assert_true(fabs(r.top_logprobs[i] - (logits[want[i]] - log(total))) < 1e-6);
    }
}

static void test_extremes(void **state)
{
    float logits[VOCAB] = {-1e30f, 1e30f, 1e30f, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    struct sampler_params p = plain;
    p.temperature = 1e-300;
    p.top_p = 0.5;
    assert_int_equal(pick(*state, &p, logits, 0), 1);
    for (uint32_t v = 0; v < VOCAB; v++)
        logits[v] = -INFINITY;
    assert_int_equal(pick(*state, &p, logits, 0), 0);
    logits[4] = INFINITY;
    assert_int_equal(pick(*state, &p, logits, 0), 4);
    for (uint32_t v = 0; v < VOCAB; v++)
        logits[v] = NAN;
    assert_int_equal(pick(*state, &p, logits, 0), 0);
    p.top_k = 1000;
    assert_int_equal(pick(*state, &p, logits, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),    cmocka_unit_test(test_sample_and_match),
        cmocka_unit_test(test_known),     cmocka_unit_test(test_filters),
        cmocka_unit_test(test_penalties), cmocka_unit_test(test_tokens_only),
        cmocka_unit_test(test_logprobs),  cmocka_unit_test(test_extremes)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
