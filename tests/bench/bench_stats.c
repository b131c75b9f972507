/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/rng.h"

#define STEP_BITS 7u

STATIC_CHECK(BENCH_HIST_STEPS == 1u << STEP_BITS);
STATIC_CHECK(BENCH_HIST_MAX == (UINT64_C(1) << (STEP_BITS + BENCH_HIST_OCTAVES)) - 1u);

uint32_t bench_hist_bucket(uint64_t value)
{
    if (value > BENCH_HIST_MAX)
        value = BENCH_HIST_MAX;
    if (value < BENCH_HIST_STEPS)
        return (uint32_t)value;
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(value) - STEP_BITS;
    uint32_t step = (uint32_t)(value >> octave) - BENCH_HIST_STEPS;
    CHECK(octave < BENCH_HIST_OCTAVES && step < BENCH_HIST_STEPS);
    return BENCH_HIST_STEPS * (octave + 1u) + step;
}

uint64_t bench_hist_bucket_top(uint32_t bucket)
{
    CHECK(bucket < BENCH_HIST_BUCKETS);
    if (bucket < BENCH_HIST_STEPS)
        return bucket;
    uint32_t octave = bucket / BENCH_HIST_STEPS - 1u;
    uint64_t step = bucket % BENCH_HIST_STEPS + BENCH_HIST_STEPS;
    return ((step + 1u) << octave) - 1u;
}

void bench_hist_add(struct bench_hist *h, uint64_t value, uint64_t times)
{
    if (times == 0)
        return;
    if (value > BENCH_HIST_MAX)
        value = BENCH_HIST_MAX;
    h->buckets[bench_hist_bucket(value)] += times;
    if (h->count == 0 || value < h->min)
        h->min = value;
    if (value > h->max)
        h->max = value;
    h->count += times;
    h->sum += (double)value * (double)times;
}

void bench_hist_merge(struct bench_hist *into, const struct bench_hist *from)
{
    CHECK(into != from);
    if (from->count == 0)
        return;
    for (uint32_t i = 0; i < BENCH_HIST_BUCKETS; i++)
        into->buckets[i] += from->buckets[i];
    if (into->count == 0 || from->min < into->min)
        into->min = from->min;
    if (from->max > into->max)
        into->max = from->max;
    into->count += from->count;
    into->sum += from->sum;
}

uint64_t bench_hist_percentile(const struct bench_hist *h, double share)
{
    CHECK(share >= 0 && share <= 1);
    if (h->count == 0)
        return 0;
    /* The small slack keeps 0.9 * 10 from becoming the tenth value. */
    double rank = ceil(share * (double)h->count - 1e-9);
    uint64_t wanted = rank < 1 ? 1 : (uint64_t)rank;
    uint64_t seen = 0;
    for (uint32_t i = 0; i < BENCH_HIST_BUCKETS; i++) {
        seen += h->buckets[i];
        if (seen >= wanted) {
            uint64_t top = bench_hist_bucket_top(i);
            if (top > h->max)
                top = h->max;
            return top < h->min ? h->min : top;
        }
    }
    CHECK(seen == h->count);
    return h->max;
}

double bench_hist_mean(const struct bench_hist *h)
{
    return h->count ? h->sum / (double)h->count : 0;
}

uint64_t bench_hist_above(const struct bench_hist *h, uint64_t limit)
{
    uint64_t count = 0;
    for (uint32_t i = bench_hist_bucket(limit) + 1u; i < BENCH_HIST_BUCKETS; i++)
        count += h->buckets[i];
    return count;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, size_t count)
{
    CHECK(count > 0);
    qsort(values, count, sizeof(*values), compare_doubles);
    size_t middle = count / 2;
    return count % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/* The value at a share of sorted values, between neighbours by proportion. */
static double at_share(const double *sorted, size_t count, double share)
{
    double place = share * (double)(count - 1);
    size_t below = (size_t)place;
    size_t above = below + 1 < count ? below + 1 : below;
    return sorted[below] + (sorted[above] - sorted[below]) * (place - (double)below);
}

struct bench_interval bench_bootstrap(const double *values, size_t count, uint32_t rounds,
                                      uint64_t seed, double *scratch, double *medians)
{
    CHECK(count > 0 && count <= UINT32_MAX && rounds > 0);
    struct bench_interval r = {.count = count};
    memcpy(scratch, values, count * sizeof(*values));
    r.median = bench_median(scratch, count);
    struct rng rng;
    rng_init(&rng, seed);
    for (uint32_t round = 0; round < rounds; round++) {
        for (size_t i = 0; i < count; i++)
            scratch[i] = values[rng_below(&rng, (uint32_t)count)];
        medians[round] = bench_median(scratch, count);
    }
    qsort(medians, rounds, sizeof(*medians), compare_doubles);
    r.low = at_share(medians, rounds, 0.025);
    r.high = at_share(medians, rounds, 0.975);
    CHECK(r.low <= r.high);
    return r;
}
