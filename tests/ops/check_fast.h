/* SPDX-License-Identifier: Apache-2.0 */
/* tests/ops/check_fast.h - what the checks of fast variants share.
 *
 * For tests only; one thread.  Every case runs once for each instruction set the processor has;
 * where it has none the tests count as skipped.  TANDEM_TEST_SEED sets the start value. */
#ifndef TESTS_OPS_CHECK_FAST_H
#define TESTS_OPS_CHECK_FAST_H

#include "tests/ops/check.h"

#include "kernels/op_dtype.h"

static struct op_table fast_ref;   /* the reference */
static struct op_table fast_table; /* the variant under test */
static const char *fast_name;

static inline uint64_t fast_seed(void)
{
    const char *text = getenv("TANDEM_TEST_SEED");
    uint64_t seed = text != NULL ? strtoull(text, NULL, 10) : 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    return seed;
}

/* Calls `test` for each instruction set. */
static inline void fast_each(void (*test)(struct rng *rng))
{
    uint32_t sets = 0;
    uint64_t seed = fast_seed();
    op_table_ref(&fast_ref);
    for (unsigned cpu = OP_CPU_REF + 1; cpu < OP_CPU_COUNT; cpu++) {
        struct rng rng;
        if (!op_cpu_has((enum op_cpu)cpu)) {
            print_message("%s: not on this processor\n", op_cpu_name((enum op_cpu)cpu));
            continue;
        }
        rng_init(&rng, seed);
        op_table_cpu(&fast_table, OP_FAST_F32, (enum op_cpu)cpu);
        fast_name = op_cpu_name((enum op_cpu)cpu);
        test(&rng);
        sets++;
    }
    if (sets == 0)
        skip();
}

/* Splits a launch at random places and runs the parts backwards: no result may notice. */
static inline void fast_split(void *pool, uint32_t items, op_range_fn fn, const void *arg)
{
    struct rng *rng = pool;
    uint32_t end = items;
    while (end > 0) {
        uint32_t begin = end - 1 - rng_below(rng, end < 9 ? end : 9);
        fn(arg, begin, end);
        end = begin;
    }
}

static inline struct op_weight fast_weight(struct check *k, size_t count, enum op_dtype dtype,
                                           struct rng *rng)
{
    float *wide = check_random(k, count, rng, 1);
    if (dtype == OP_F32)
        return (struct op_weight){.data = wide, .dtype = OP_F32};
    uint16_t *narrow = check_words(k, (count + 1) / 2);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits, half = 0x2c00u + rng_below(rng, 0x1000);
        memcpy(&bits, &wide[i], sizeof(bits));
        narrow[i] = (uint16_t)(dtype == OP_BF16 ? bits >> 16 : (bits >> 16 & 0x8000u) | half);
    }
    return (struct op_weight){.data = narrow, .dtype = dtype};
}

/* |have - want| <= bound * max(floor, |want|) everywhere, NaN in the same places. */
static inline void fast_close(const char *what, const float *have, const float *want, size_t count,
                              double bound, double floor)
{
    for (size_t i = 0; i < count; i++) {
        if (isnan(want[i]) && isnan(have[i]))
            continue;
        if (have[i] == want[i])
            continue;
        double allowed = bound * fmax(floor, fabs((double)want[i]));
        if (!(fabs((double)have[i] - want[i]) <= allowed))
            fail_msg("%s %s[%zu]: %.9g, expected %.9g within %.3g", fast_name, what, i,
                     (double)have[i], (double)want[i], allowed);
    }
}

static inline void fast_same(const char *what, const void *have, const void *want, size_t bytes)
{
    if (memcmp(have, want, bytes) != 0)
        fail_msg("%s %s: other bits", fast_name, what);
}

#endif
