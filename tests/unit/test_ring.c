/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>

#include "lib/base/ring.h"
#include "lib/base/rng.h"

static void full_and_empty_are_answers(void **state)
{
    (void)state;
    struct ring *r = ring_create(5, sizeof(uint32_t)); /* rounded up to 8 */
    uint32_t item = 0;
    assert_false(ring_pop(r, &item));
    for (uint32_t i = 0; i < 8; i++)
        assert_true(ring_push(r, &i));
    assert_int_equal(ring_count(r), 8);
    uint32_t more = 99;
    assert_false(ring_push(r, &more));
    for (uint32_t i = 0; i < 8; i++) {
        assert_true(ring_pop(r, &item));
        assert_int_equal(item, i);
    }
    assert_false(ring_pop(r, &item));
    assert_int_equal(item, 7); /* left alone */
    assert_int_equal(ring_count(r), 0);
    ring_destroy(&r);
    assert_null(r);
    ring_destroy(&r);
}

static void order_holds_over_many_rounds(void **state)
{
    (void)state;
    struct odd {
        uint32_t number;
        uint8_t rest[7];
    } item;
    struct rng rng;
    rng_init(&rng, 0x5eed0002);
    struct ring *r = ring_create(1, sizeof item);
    struct ring *wide = ring_create(64, sizeof item);
    uint32_t pushed = 0, popped = 0;
    for (int step = 0; step < 100000; step++) {
        if (rng_below(&rng, 2) == 0) {
            item = (struct odd){.number = pushed, .rest = {(uint8_t)pushed}};
            if (ring_push(wide, &item))
                pushed++;
            else
                assert_int_equal(pushed - popped, 64);
        } else if (ring_pop(wide, &item)) {
            assert_int_equal(item.number, popped);
            assert_int_equal(item.rest[0], (uint8_t)popped);
            popped++;
        } else {
            assert_int_equal(pushed, popped);
        }
        assert_int_equal(ring_count(wide), pushed - popped);
    }
    assert_true(ring_push(r, &item));
    assert_false(ring_push(r, &item));
    ring_destroy(&r);
    ring_destroy(&wide);
}

#define THREAD_ITEMS 200000u

static void *produce(void *arg)
{
    struct ring *r = arg;
    for (uint64_t i = 0; i < THREAD_ITEMS; i++) {
        const uint64_t item[3] = {i, ~i, i * 0x9e3779b97f4a7c15u};
        while (!ring_push(r, item))
            sched_yield();
    }
    return NULL;
}

static void two_threads(void **state)
{
    (void)state;
    struct ring *r = ring_create(128, 3 * sizeof(uint64_t));
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, produce, r), 0);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < THREAD_ITEMS; i++) {
        uint64_t item[3];
        while (!ring_pop(r, item))
            sched_yield();
        wrong += item[0] != i || item[1] != ~i || item[2] != i * 0x9e3779b97f4a7c15u;
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(wrong, 0);
    assert_int_equal(ring_count(r), 0);
    ring_destroy(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_and_empty_are_answers),
        cmocka_unit_test(order_holds_over_many_rounds),
        cmocka_unit_test(two_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
