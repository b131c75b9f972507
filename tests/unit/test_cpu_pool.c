/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <unistd.h>

#include "lib/base/rng.h"
#include "lib/model/cpu_pool.h"

#define ITEMS_MAX 5000

struct job {
    uint32_t *times; /* [ITEMS_MAX] how often each item was done */
    uint32_t spin;
};

static void work(const void *arg, uint32_t begin, uint32_t end)
{
    const struct job *job = arg;
    for (uint32_t i = begin; i < end; i++) {
        volatile uint32_t waste = 0;
        for (uint32_t k = 0; k < job->spin; k++)
            waste += k;
        job->times[i]++;
    }
}

/* Every item exactly once, with all sizes, short and long jobs, and pauses that let workers sleep. */
static void test_items(void **state)
{
    (void)state;
    static uint32_t times[ITEMS_MAX];
    struct rng rng;
    rng_init(&rng, 1);
    for (uint32_t threads = 2; threads <= 6; threads += 2) {
        struct cpu_pool *pool = cpu_pool_create(threads);
        for (uint32_t round = 0; round < 2000; round++) {
            struct job job = {times, rng_below(&rng, 50)};
            uint32_t items = 1 + rng_below(&rng, round % 50 == 0 ? ITEMS_MAX : 40);
            memset(times, 0, sizeof(times));
            cpu_pool_run(pool, items, work, &job);
            for (uint32_t i = 0; i < ITEMS_MAX; i++)
                assert_int_equal(times[i], i < items);
            if (round % 100 == 0)
                usleep(1000);
        }
        cpu_pool_destroy(&pool);
        assert_null(pool);
    }
    struct cpu_pool *none = NULL;
    cpu_pool_destroy(&none);
}

static void test_create_destroy(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 50; i++) {
        struct cpu_pool *pool = cpu_pool_create(2 + i % 3);
        if (i % 2 == 0)
            usleep(300);
        cpu_pool_destroy(&pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_items),
                                       cmocka_unit_test(test_create_destroy)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
