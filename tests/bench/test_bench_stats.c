/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "tests/bench/bench_stats.h"

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void buckets_cover_every_value_in_order(void **state)
{
    (void)state;
    for (uint32_t i = 0; i + 1 < BENCH_HIST_BUCKETS; i++) {
        uint64_t top = bench_hist_bucket_top(i);
        assert_int_equal(bench_hist_bucket(top), i);
        assert_int_equal(bench_hist_bucket(top + 1), i + 1);
    }
    assert_int_equal(bench_hist_bucket(0), 0);
    assert_int_equal(bench_hist_bucket_top(BENCH_HIST_BUCKETS - 1), BENCH_HIST_MAX);
    assert_int_equal(bench_hist_bucket(UINT64_MAX), BENCH_HIST_BUCKETS - 1);
}

static void empty_and_single(void **state)
{
    (void)state;
    struct bench_hist *h = mem_take(sizeof(*h));
    assert_int_equal(bench_hist_percentile(h, 0.5), 0);
    assert_true(bench_hist_mean(h) == 0);
    bench_hist_add(h, 5, 0);
    assert_int_equal(h->count, 0);
    bench_hist_add(h, 1234567, 1);
    assert_int_equal(bench_hist_percentile(h, 0), 1234567);
    assert_int_equal(bench_hist_percentile(h, 0.5), 1234567);
    assert_int_equal(bench_hist_percentile(h, 1), 1234567);
    bench_hist_add(h, UINT64_MAX, 1);
    assert_int_equal(h->max, BENCH_HIST_MAX);
    mem_give(h);
}

static void small_percentiles_are_exact_ranks(void **state)
{
    (void)state;
    struct bench_hist *h = mem_take(sizeof(*h));
    for (uint64_t v = 1; v <= 10; v++)
        bench_hist_add(h, v, 1);
    assert_int_equal(bench_hist_percentile(h, 0.5), 5);
    assert_int_equal(bench_hist_percentile(h, 0.9), 9);
    assert_int_equal(bench_hist_percentile(h, 0.91), 10);
    assert_int_equal(bench_hist_percentile(h, 0.99), 10);
    assert_int_equal(bench_hist_percentile(h, 0), 1);
    assert_int_equal(bench_hist_above(h, 7), 3);
    assert_int_equal(bench_hist_above(h, 10), 0);
    mem_give(h);
}

static void percentiles_stay_within_a_step_of_sorting(void **state)
{
    (void)state;
    enum { COUNT = 20000 };
    static uint64_t values[COUNT];
    struct bench_hist *h = mem_take(sizeof(*h)), *half = mem_take(sizeof(*half));
    struct rng rng;
    rng_init(&rng, 11);
    double sum = 0;
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = (uint64_t)exp(rng_unit(&rng) * 25.0);
        bench_hist_add(i % 2 ? h : half, values[i], 1);
        sum += (double)values[i];
    }
    bench_hist_merge(h, half);
    qsort(values, COUNT, sizeof(values[0]), compare_u64);
    const double shares[] = {0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1};
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        size_t rank = (size_t)ceil(shares[i] * COUNT - 1e-9);
        double exact = (double)values[rank ? rank - 1 : 0];
        double got = (double)bench_hist_percentile(h, shares[i]);
        assert_true(got >= exact && got <= exact * (1 + 1.0 / 128) + 1);
    }
    assert_int_equal(h->count, COUNT);
    assert_int_equal(h->min, values[0]);
    assert_int_equal(h->max, values[COUNT - 1]);
    assert_true(fabs(bench_hist_mean(h) / (sum / COUNT) - 1) < 1e-9);
    mem_give(h);
    mem_give(half);
}

static void weights_count_as_repeats(void **state)
{
    (void)state;
    struct bench_hist *a = mem_take(sizeof(*a)), *b = mem_take(sizeof(*b));
    for (uint64_t v = 0; v < 300; v += 7) {
        bench_hist_add(a, v, 3);
        for (int i = 0; i < 3; i++)
            bench_hist_add(b, v, 1);
    }
    assert_memory_equal(a, b, sizeof(*a));
    mem_give(a);
    mem_give(b);
}

static void medians(void **state)
{
    (void)state;
    double odd[] = {9, 1, 5}, even[] = {4, 1, 3, 2}, one[] = {7};
    assert_true(bench_median(odd, 3) == 5);
    assert_true(bench_median(even, 4) == 2.5);
    assert_true(bench_median(one, 1) == 7);
}

static void a_constant_has_no_width(void **state)
{
    (void)state;
    double values[40], scratch[40], rounds[200];
    for (size_t i = 0; i < 40; i++)
        values[i] = 1.25;
    struct bench_interval r = bench_bootstrap(values, 40, 200, 3, scratch, rounds);
    assert_true(r.median == 1.25 && r.low == 1.25 && r.high == 1.25);
    assert_int_equal(r.count, 40);
}

/* Over many samples of a known distribution the interval holds the true median about 95 % of the
 * time: 190 of 200 trials, with a standard deviation of 3. */
static void intervals_cover_the_truth(void **state)
{
    (void)state;
    enum { TRIALS = 200, COUNT = 41, ROUNDS = 400 };
    double values[COUNT], scratch[COUNT], medians_of[ROUNDS];
    struct rng rng;
    rng_init(&rng, 5);
    int covered = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        for (size_t i = 0; i < COUNT; i++)
            values[i] = exp(rng_unit(&rng) - 0.5); /* median 1 */
        struct bench_interval r =
            bench_bootstrap(values, COUNT, ROUNDS, rng_u64(&rng), scratch, medians_of);
        assert_true(r.low <= r.median && r.median <= r.high);
        covered += r.low <= 1 && 1 <= r.high;
    }
    assert_true(covered >= 180 && covered < TRIALS);
}

static void bootstrap_repeats_by_seed(void **state)
{
    (void)state;
    double values[25], scratch[25], rounds[300];
    struct rng rng;
    rng_init(&rng, 1);
    for (size_t i = 0; i < 25; i++)
        values[i] = rng_unit(&rng);
    struct bench_interval a = bench_bootstrap(values, 25, 300, 9, scratch, rounds);
    struct bench_interval b = bench_bootstrap(values, 25, 300, 9, scratch, rounds);
    assert_memory_equal(&a, &b, sizeof(a));
    assert_true(a.low < a.high);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_cover_every_value_in_order),
        cmocka_unit_test(empty_and_single),
        cmocka_unit_test(small_percentiles_are_exact_ranks),
        cmocka_unit_test(percentiles_stay_within_a_step_of_sorting),
        cmocka_unit_test(weights_count_as_repeats),
        cmocka_unit_test(medians),
        cmocka_unit_test(a_constant_has_no_width),
        cmocka_unit_test(intervals_cover_the_truth),
        cmocka_unit_test(bootstrap_repeats_by_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
