/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/rng.h"
#include "worker/wk_policy.h"

static struct wk_ema_knobs knobs(const char *set)
{
    struct wk_ema_knobs k = {.alpha = 0.25, .margin = 1, .steps_min = 4, .saturate = true};
    struct err_detail detail;
    assert_int_equal(wk_ema_set_parse(set, &k, &detail), ERR_OK);
    return k;
}

static void sets_by_text(void **state)
{
    (void)state;
    static const char *const bad[] = {"",   "0",  "8",   "2,2",           "4,2",
                                      "2,", ",2", "2 4", "1,2,3,4,5,6,7,"};
    struct wk_ema_knobs k = knobs("1,2,3,4,5,6,7");
    struct err_detail detail;
    assert_int_equal(k.set_count, 7);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        k.set_count = 99;
        assert_int_equal(wk_ema_set_parse(bad[i], &k, &detail), ERR_INVALID);
        assert_non_null(strstr(detail.text, "ema_set"));
        assert_int_equal(k.set_count, 99);
    }
}

/* The rule by hand: m <- a/4 + 3m/4 from 7 on, K = largest of 2, 4, 7 up to ceil(m + 1). */
static void ema_follows_its_rule(void **state)
{
    (void)state;
    struct wk_ema_knobs k = knobs("2,4,7");
    struct wk_history h;
    wk_history_begin(&h);
    static const uint32_t want[] = {7, 7, 7, 4, 2, 2};
    double mean = 7;
    for (uint32_t i = 0; i < 6; i++) {
        wk_history_add(&h, &k, 7, 0); /* nothing is ever right */
        mean *= 0.75;
        assert_true(h.mean > mean - 1e-12 && h.mean < mean + 1e-12);
        /* 5.25 3.94 2.95 2.21 1.66 1.25; the first three are before steps_min */
        assert_int_equal(wk_policy_ema(&h, &k), want[i]);
    }
    for (uint32_t i = 0; i < 20; i++)
        wk_history_add(&h, &k, 2, 2); /* all that were verified were right */
    assert_int_equal(wk_policy_ema(&h, &k), 7);
    for (uint32_t i = 0; i < 40; i++)
        wk_history_add(&h, &k, 2, 1);
    assert_int_equal(wk_policy_ema(&h, &k), 2); /* the mean comes down to 1: ceil(2.0001) = 3 */
    k.saturate = false;                         /* two right ones never say more than two */
    for (uint32_t i = 0; i < 40; i++)
        wk_history_add(&h, &k, 2, 2);
    assert_int_equal(wk_policy_ema(&h, &k), 2);
}

static void batches_take_the_least(void **state)
{
    (void)state;
    const uint32_t wanted[] = {7, 4, 2, 7};
    assert_int_equal(wk_policy_ema_batch(wanted, 4), 2);
    assert_int_equal(wk_policy_ema_batch(wanted, 2), 4);
    assert_int_equal(wk_policy_ema_batch(wanted, 0), 7);
}

/* Against a plain search for the best of E(K) / C(K). */
static void goodput_weighs_cost(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 0x5eed0071);
    uint32_t seen[8] = {0};
    for (uint32_t run = 0; run < 2000; run++) {
        struct wk_history h;
        double cost[8], expected = 1, survival = 1, most = 0;
        uint32_t best = 0;
        wk_history_begin(&h);
        double each = 0.02 + 0.5 * (rng_below(&rng, 1000) / 1000.0);
        for (uint32_t j = 0; j < 8; j++) {
            cost[j] = 1000 * (1 + each * j);
            if (j < 7)
                h.chance[j] = rng_below(&rng, 1001) / 1000.0;
        }
        for (uint32_t j = 0; j < 8; j++) {
            if (j > 0) {
                survival *= h.chance[j - 1];
                expected += survival;
            }
            if (expected / cost[j] > most) {
                most = expected / cost[j];
                best = j;
            }
        }
        assert_int_equal(wk_policy_goodput(&h, cost), best);
        seen[best]++;
    }
    for (uint32_t j = 0; j < 8; j++)
        assert_true(seen[j] > 0);
}

static void goodput_learns_and_probes(void **state)
{
    (void)state;
    struct wk_ema_knobs k = knobs("2,4,7");
    struct wk_history h;
    double cost[8];
    for (uint32_t j = 0; j < 8; j++)
        cost[j] = 1000 + 300 * j;
    wk_history_begin(&h);
    for (uint32_t i = 0; i < 30; i++)
        wk_history_add(&h, &k, 1, 0);
    assert_true(h.chance[0] < 0.05);
    uint32_t probes = 0, steps = 3000;
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t drafts = wk_policy_goodput(&h, cost);
        if (drafts == 0) {
            wk_history_idle(&h);
        } else {
            assert_int_equal(drafts, 1);
            wk_history_add(&h, &k, 1, 0);
            probes++;
        }
    }
    assert_true(probes >= 5 && probes < 15); /* every 512 steps in the end */
    /* Once drafts are right again it finds out by such a probe. */
    uint32_t step = 0;
    for (; step < 5000 && wk_policy_goodput(&h, cost) < 3; step++) {
        uint32_t drafts = wk_policy_goodput(&h, cost);
        if (drafts == 0)
            wk_history_idle(&h);
        else
            wk_history_add(&h, &k, drafts, drafts);
    }
    assert_true(step < 600);
}

static void positions_are_conditional(void **state)
{
    (void)state;
    struct wk_ema_knobs k = knobs("7");
    struct wk_history h;
    wk_history_begin(&h);
    for (uint32_t i = 0; i < 60; i++)
        wk_history_add(&h, &k, 7, 2); /* two right, the third wrong, the rest never judged */
    assert_true(h.chance[0] > 0.99 && h.chance[1] > 0.99 && h.chance[2] < 0.01);
    assert_int_equal(h.seen[2], 60);
    assert_int_equal(h.seen[3], 0);
    assert_true(h.chance[3] < 0.7); /* relaxes towards the one before it */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets_by_text),
        cmocka_unit_test(ema_follows_its_rule),
        cmocka_unit_test(batches_take_the_least),
        cmocka_unit_test(goodput_weighs_cost),
        cmocka_unit_test(goodput_learns_and_probes),
        cmocka_unit_test(positions_are_conditional),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
