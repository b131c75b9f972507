/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_stats.h - histograms with bounded error, medians, bootstrap intervals.
 *
 * Pure; one owner thread.  A histogram is a fixed 36 KiB whatever it counts: 128 linear steps per
 * octave, so a percentile is off by less than 0.8 %; count, sum, minimum and maximum are exact. */
#ifndef TESTS_BENCH_BENCH_STATS_H
#define TESTS_BENCH_BENCH_STATS_H

#include <stddef.h>
#include <stdint.h>

#define BENCH_HIST_STEPS   128u /* per octave */
#define BENCH_HIST_OCTAVES 34u  /* beyond the first: values up to 2^41 - 1 */
#define BENCH_HIST_BUCKETS (BENCH_HIST_STEPS * (BENCH_HIST_OCTAVES + 1u))
#define BENCH_HIST_MAX     ((UINT64_C(1) << 41) - 1u)

struct bench_hist {
    uint64_t count;
    double sum;
    uint64_t min, max; /* 0 while empty */
    uint64_t buckets[BENCH_HIST_BUCKETS];
};

void bench_hist_add(struct bench_hist *h, uint64_t value, uint64_t times); /* clamped to MAX */
void bench_hist_merge(struct bench_hist *into, const struct bench_hist *from);
/* Smallest value that at least share (0..1) of all values do not exceed; 0 while empty. */
uint64_t bench_hist_percentile(const struct bench_hist *h, double share);
double bench_hist_mean(const struct bench_hist *h); /* 0 while empty */
/* Values strictly above a limit, to the accuracy of a bucket. */
uint64_t bench_hist_above(const struct bench_hist *h, uint64_t limit);

/* Where a value falls and the highest value that falls there. */
uint32_t bench_hist_bucket(uint64_t value);
uint64_t bench_hist_bucket_top(uint32_t bucket);

/* Median of values, which get reordered; the mean of the middle two for an even count. */
double bench_median(double *values, size_t count);

struct bench_interval {
    double median;
    double low, high; /* 95 % percentile bootstrap */
    size_t count;
};

/* Resamples values (finite, count > 0) `rounds` times with a seeded stream.  scratch holds count
 * doubles, medians holds rounds doubles. */
struct bench_interval bench_bootstrap(const double *values, size_t count, uint32_t rounds,
                                      uint64_t seed, double *scratch, double *medians);

#endif
