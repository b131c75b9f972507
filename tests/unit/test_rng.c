/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "lib/base/clock.h"
#include "lib/base/rng.h"

static void philox_known_answers(void **state)
{
    (void)state;
    /* kat_vectors of the authors' Random123 package: zeros, ones, digits of pi. */
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t out[4];
        rng_philox4x32(cases[i].counter, cases[i].key, out);
        assert_memory_equal(out, cases[i].out, sizeof out);
    }
}

static void gumbel_takes_the_lane_of_the_token(void **state)
{
    (void)state;
    const uint64_t seed = 0x0123456789abcdefu;
    const uint64_t position = 0x1122334455u;
    for (uint32_t token = 0; token < 64; token++) {
        const uint32_t key[2] = {0x89abcdefu, 0x01234567u};
        const uint32_t counter[4] = {0x22334455u, 0x11u, token / 4, 3};
        uint32_t lanes[4];
        rng_philox4x32(counter, key, lanes);
        double u = (lanes[token % 4] + 0.5) / 4294967296.0;
        assert_true(rng_gumbel(seed, position, token, 3) == -log(-log(u)));
    }
    assert_true(rng_gumbel(seed, position, 5, 3) != rng_gumbel(seed, position, 5, 4));
}

static void gumbel_has_the_right_mean(void **state)
{
    (void)state;
    double sum = 0, squares = 0;
    const int count = 100000;
    for (int i = 0; i < count; i++) {
        double g = rng_gumbel(7, (uint64_t)i, 12345, 0);
        assert_true(isfinite(g));
        sum += g;
        squares += g * g;
    }
    double mean = sum / count;
    assert_true(fabs(mean - 0.57721566) < 0.02);
    assert_true(fabs(squares / count - mean * mean - 1.64493407) < 0.05);
}

static void streams_repeat_and_differ(void **state)
{
    (void)state;
    struct rng a, b, other;
    rng_init(&a, 42);
    rng_init(&b, 42);
    rng_init(&other, 43);
    int equal = 0;
    for (int i = 0; i < 1000; i++) {
        uint32_t value = rng_u32(&a);
        assert_int_equal(value, rng_u32(&b));
        equal += value == rng_u32(&other);
    }
    assert_true(equal < 3);
    /* The stream is the counter form with the block number as counter. */
    const uint32_t counter[4] = {0, 0, 0, 0}, key[2] = {42, 0};
    uint32_t out[4];
    rng_philox4x32(counter, key, out);
    rng_init(&a, 42);
    for (int i = 0; i < 4; i++)
        assert_int_equal(rng_u32(&a), out[i]);
}

static void below_is_uniform_and_bounded(void **state)
{
    (void)state;
    struct rng r;
    rng_init(&r, 0x5eed0003);
    int counts[7] = {0};
    for (int i = 0; i < 70000; i++)
        counts[rng_below(&r, 7)]++;
    for (int i = 0; i < 7; i++)
        assert_in_range(counts[i], 9500, 10500);
    for (int i = 0; i < 100; i++)
        assert_int_equal(rng_below(&r, 1), 0);
    for (int i = 0; i < 1000; i++)
        assert_true(rng_below(&r, 0xffffffffu) < 0xffffffffu);
    double sum = 0;
    for (int i = 0; i < 10000; i++) {
        double u = rng_unit(&r);
        assert_true(u >= 0 && u < 1);
        sum += u;
    }
    assert_true(fabs(sum / 10000 - 0.5) < 0.02);
}

static void system_bytes_differ(void **state)
{
    (void)state;
    unsigned char a[64] = {0}, b[64] = {0};
    rng_system(a, sizeof a);
    rng_system(b, sizeof b);
    assert_memory_not_equal(a, b, sizeof a);
    rng_system(NULL, 0);
}

static void clocks_run_forward(void **state)
{
    (void)state;
    uint64_t before = clock_mono_us();
    for (int i = 0; i < 1000; i++) {
        uint64_t now = clock_mono_us();
        assert_true(now >= before);
        before = now;
    }
    assert_true(clock_unix_us() > 1700000000000000u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(gumbel_takes_the_lane_of_the_token),
        cmocka_unit_test(gumbel_has_the_right_mean),
        cmocka_unit_test(streams_repeat_and_differ),
        cmocka_unit_test(below_is_uniform_and_bounded),
        cmocka_unit_test(system_bytes_differ),
        cmocka_unit_test(clocks_run_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
