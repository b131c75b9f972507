/* SPDX-License-Identifier: Apache-2.0 */
/* A toy target of five tokens under speculation: its texts have the law of the plain chain, and
 * are the very texts that it gives without drafts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "lib/base/rng.h"
#include "lib/model/sampler.h"
#include "worker/wk_exec_tables.h"
#include "worker/wk_verify.h"

#define VOCAB   5u
#define PROMPT  2u
#define TOKENS  3u /* of each text; VOCAB^3 cells */
#define CELLS   125u
#define TEXTS   12000u
#define ENTRIES 8u

/* Order 2: logits by the last two tokens. */
static float table[VOCAB][VOCAB][VOCAB];
static uint8_t has_token[VOCAB] = {1, 1, 1, 1, 1};

static void table_fill(void)
{
    struct rng rng;
    rng_init(&rng, 0x5eed0081);
    for (uint32_t i = 0; i < VOCAB * VOCAB * VOCAB; i++)
        ((float *)table)[i] = (float)(rng_unit(&rng) * 5 - 2);
}

struct toy {
    struct wk_tables *tables;
    struct sampler *sampler;
    struct wk_plan *plan;
};

/* ---- the law, computed on its own ---- */

static double processed(const struct wk_plan_setup *s, const uint32_t *ids, uint32_t count,
                        uint32_t v)
{
    double z = table[ids[count - 2]][ids[count - 1]][v];
    uint32_t all = 0, output = 0;
    for (uint32_t i = 0; i < count; i++) {
        all += ids[i] == v;
        output += i >= PROMPT && ids[i] == v;
    }
    if (all > 0)
        z = z > 0 ? z / s->repetition_penalty : z * s->repetition_penalty;
    z -= output > 0 ? s->presence_penalty : 0;
    return (z - s->frequency_penalty * output) / s->temperature;
}

static void law(const struct wk_plan_setup *s, const uint32_t *ids, uint32_t count, double p[VOCAB])
{
    double weight[VOCAB], total = 0, kept = 0, most = 0;
    uint32_t order[VOCAB], left = s->top_k != 0 && s->top_k < VOCAB ? s->top_k : VOCAB;
    for (uint32_t v = 0; v < VOCAB; v++) {
        weight[v] = exp(processed(s, ids, count, v));
        most = fmax(most, weight[v]);
        uint32_t at = v;
        for (; at > 0 && weight[order[at - 1]] < weight[v]; at--)
            order[at] = order[at - 1];
        order[at] = v;
        p[v] = 0;
    }
    for (uint32_t i = 0; i < left; i++)
        total += weight[order[i]];
    double sum = 0;
    for (uint32_t i = 0; i < left && (i == 0 || sum < s->top_p * total); i++) {
        sum += weight[order[i]];
        if (weight[order[i]] >= s->min_p * most) {
            p[order[i]] = weight[order[i]];
            kept += weight[order[i]];
        }
    }
    for (uint32_t v = 0; v < VOCAB; v++)
        p[v] /= kept;
}

/* ---- the worker's path: rows, samples, verdicts ---- */

enum drafting { DRAFT_NONE, DRAFT_GOOD, DRAFT_RANDOM, DRAFT_MIXED };

static uint32_t draft_of(const uint32_t *ids, uint32_t count, enum drafting how, struct rng *rng)
{
    if (how == DRAFT_RANDOM || (how == DRAFT_MIXED && rng_below(rng, 3) == 0))
        return rng_below(rng, VOCAB);
    const float *row = table[ids[count - 2]][ids[count - 1]];
    uint32_t best = 0;
    for (uint32_t v = 1; v < VOCAB; v++)
        best = row[v] > row[best] ? v : best;
    return best;
}

struct tally {
    uint64_t drafted, accepted;
};

struct text {
    struct wk_plan_setup setup;
    uint32_t entry, count, ids[PROMPT + TOKENS];
};

static void text_begin(struct toy *t, struct text *x)
{
    x->count = PROMPT;
    wk_plan_clear(t->plan, 1, 1, WK_PLAN_PREFILL);
    t->plan->seq_count = t->plan->setup_count = 1;
    t->plan->seqs[0] = (struct wk_plan_seq){.entry = x->entry, .fresh = true, .row_count = 1};
    t->plan->setups[0] = x->setup;
    wk_tables_take(t->tables, t->plan);
    wk_tables_add(t->tables, x->entry, x->ids, PROMPT);
}

static void text_step(struct toy *t, struct text *x, enum drafting how, struct rng *rng,
                      struct tally *tally)
{
    static const struct wk_limits limits = {.output_tokens_max = TOKENS, .context_max = 64};
    uint32_t hypothesis[PROMPT + TOKENS + WK_STEP_ROWS_MAX], count = x->count;
    float logits[WK_STEP_ROWS_MAX][VOCAB];
    struct wk_result_seq result;
    uint32_t drafts = wk_verify_drafts_max(&limits, count, count - PROMPT,
                                           how == DRAFT_NONE ? 0 : 1 + rng_below(rng, 7));
    memcpy(hypothesis, x->ids, count * sizeof *x->ids);
    for (uint32_t j = 0; j <= drafts; j++) {
        uint32_t at = count + j;
        memcpy(logits[j], table[hypothesis[at - 2]][hypothesis[at - 1]], sizeof logits[j]);
        if (j < drafts)
            hypothesis[at] = draft_of(hypothesis, at, how, rng);
    }
    wk_tables_sample(t->tables, t->sampler, x->entry, logits[0], drafts + 1, hypothesis + count,
                     count - 1, &result);
    struct wk_verdict v = wk_verify(&limits, count, count - PROMPT, hypothesis + count, drafts,
                                    result.ids, result.count);
    memcpy(x->ids + count, result.ids, v.final_count * sizeof *x->ids);
    wk_tables_add(t->tables, x->entry, result.ids, v.final_count);
    x->count += v.final_count;
    tally->drafted += drafts;
    tally->accepted += v.accepted;
}

/* Texts side by side, each in its own entry and at its own pace. */
static void texts_make(struct toy *t, struct text *texts, uint32_t count, enum drafting how,
                       struct rng *rng, struct tally *tally)
{
    for (uint32_t i = 0; i < count; i++)
        text_begin(t, &texts[i]);
    for (bool more = true; more;) {
        more = false;
        for (uint32_t i = 0; i < count; i++) {
            if (texts[i].count == PROMPT + TOKENS)
                continue;
            text_step(t, &texts[i], how, rng, tally);
            more = true;
        }
    }
}

static void toy_open(struct toy *t)
{
    t->tables = wk_tables_create(ENTRIES, VOCAB);
    wk_tables_blocks(t->tables, 4);
    t->sampler = sampler_create(VOCAB, has_token);
    t->plan = wk_plan_create(WK_PREFILL_SEQS_MAX, 16, 16, 256);
}

static void toy_close(struct toy *t)
{
    wk_plan_destroy(&t->plan);
    sampler_destroy(&t->sampler);
    wk_tables_destroy(&t->tables);
}

/* ---- chi-square ---- */

static void cells_expected(const struct wk_plan_setup *s, const uint32_t prompt[PROMPT],
                           double expected[CELLS])
{
    for (uint32_t cell = 0; cell < CELLS; cell++) {
        uint32_t ids[PROMPT + TOKENS] = {prompt[0], prompt[1], cell / 25, cell / 5 % 5, cell % 5};
        expected[cell] = TEXTS;
        for (uint32_t i = PROMPT; i < PROMPT + TOKENS; i++) {
            double p[VOCAB];
            law(s, ids, i, p);
            expected[cell] *= p[ids[i]];
        }
    }
}

/* Rare cells together; the bound is passed by chance once in a million (Wilson and Hilferty). */
static void chi_check(const char *name, const uint32_t seen[CELLS], const double expected[CELLS])
{
    double chi = 0, rare = 0;
    uint32_t degrees = 0, rare_seen = 0;
    for (uint32_t cell = 0; cell < CELLS; cell++) {
        if (expected[cell] == 0) {
            assert_int_equal(seen[cell], 0);
        } else if (expected[cell] < 8) {
            rare += expected[cell];
            rare_seen += seen[cell];
        } else {
            chi += pow(seen[cell] - expected[cell], 2) / expected[cell];
            degrees++;
        }
    }
    if (rare >= 8) {
        chi += pow(rare_seen - rare, 2) / rare;
        degrees++;
    }
    assert_true(degrees > 1);
    double n = degrees - 1, part = 2 / (9 * n);
    double bound = n * pow(1 - part + 4.753 * sqrt(part), 3);
    if (chi > bound)
        fail_msg("%s: chi-square %.1f, bound %.1f at %.0f degrees", name, chi, bound, n);
}

static const struct {
    const char *name;
    struct wk_plan_setup setup;
} modes[] = {
    {"plain", {.temperature = 1, .top_p = 1, .repetition_penalty = 1}},
    {"cool", {.temperature = 0.6, .top_p = 1, .repetition_penalty = 1}},
    {"top-k", {.temperature = 1, .top_p = 1, .top_k = 3, .repetition_penalty = 1}},
    {"top-p", {.temperature = 1, .top_p = 0.8, .repetition_penalty = 1}},
    {"min-p", {.temperature = 1.2, .top_p = 1, .min_p = 0.2, .repetition_penalty = 1}},
    {"top-k and top-p", {.temperature = 0.9, .top_p = 0.9, .top_k = 4, .repetition_penalty = 1}},
    {"repetition", {.temperature = 1, .top_p = 1, .repetition_penalty = 1.6}},
    {"presence", {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .presence_penalty = 1.5}},
    {"frequency",
     {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .frequency_penalty = 1.1}},
};

static uint32_t cell_of(const struct text *x)
{
    return x->ids[2] * 25 + x->ids[3] * 5 + x->ids[4];
}

static void texts_have_the_law_of_the_chain(void **state)
{
    (void)state;
    struct toy t;
    struct rng rng;
    table_fill();
    toy_open(&t);
    rng_init(&rng, 0x5eed0082);
    for (size_t mode = 0; mode < sizeof modes / sizeof modes[0]; mode++) {
        for (uint32_t how = DRAFT_GOOD; how <= DRAFT_MIXED; how++) {
            uint32_t seen[CELLS] = {0}, prompt[PROMPT] = {(uint32_t)mode % VOCAB, how};
            double expected[CELLS];
            struct tally tally = {0, 0}, none = {0, 0};
            for (uint32_t made = 0, batch; made < TEXTS; made += batch) {
                struct text texts[ENTRIES], plain;
                batch = 1u << made / ENTRIES % 4; /* 1, 2, 4, 8 at a time */
                batch = batch < TEXTS - made ? batch : TEXTS - made;
                for (uint32_t i = 0; i < batch; i++) {
                    texts[i] = (struct text){.setup = modes[mode].setup,
                                             .entry = (made + i * 3) % ENTRIES,
                                             .ids = {prompt[0], prompt[1]}};
                    texts[i].setup.prompt_count = PROMPT;
                    texts[i].setup.seed = rng_u64(&rng);
                }
                texts_make(&t, texts, batch, (enum drafting)how, &rng, &tally);
                for (uint32_t i = 0; i < batch; i++)
                    seen[cell_of(&texts[i])]++;
                plain = texts[batch - 1]; /* the same alone and without drafts */
                plain.entry = (plain.entry + 3) % ENTRIES;
                memset(plain.ids + PROMPT, 0, TOKENS * sizeof *plain.ids);
                texts_make(&t, &plain, 1, DRAFT_NONE, &rng, &none);
                assert_memory_equal(texts[batch - 1].ids, plain.ids, sizeof plain.ids);
            }
            assert_true(tally.accepted > 0 && tally.accepted < tally.drafted);
            cells_expected(&modes[mode].setup, prompt, expected);
            chi_check(modes[mode].name, seen, expected);
        }
    }
    toy_close(&t);
}

/* The check can fail: a law that is off by a little is seen. */
static void a_wrong_law_is_seen(void **state)
{
    (void)state;
    struct toy t;
    struct rng rng;
    table_fill();
    toy_open(&t);
    rng_init(&rng, 0x5eed0083);
    struct text x = {.setup = modes[0].setup};
    struct wk_plan_setup other = x.setup;
    uint32_t seen[CELLS] = {0}, prompt[PROMPT] = {1, 2};
    double expected[CELLS], chi = 0;
    struct tally tally = {0, 0};
    x.setup.prompt_count = PROMPT;
    memcpy(x.ids, prompt, sizeof prompt);
    for (uint32_t i = 0; i < TEXTS; i++) {
        x.setup.seed = rng_u64(&rng);
        texts_make(&t, &x, 1, DRAFT_GOOD, &rng, &tally);
        seen[cell_of(&x)]++;
    }
    other.temperature = 1.08;
    cells_expected(&other, prompt, expected);
    for (uint32_t cell = 0; cell < CELLS; cell++)
        chi += pow(seen[cell] - expected[cell], 2) / expected[cell];
    assert_true(chi > 230); /* the bound at 124 degrees is 214 */
    toy_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_have_the_law_of_the_chain),
        cmocka_unit_test(a_wrong_law_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
