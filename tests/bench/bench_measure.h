/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_measure.h - what many streams together turned out to be.
 *
 * One owner thread; about 300 KiB whatever the number of streams.  Times in microseconds, rates in
 * thousandths of a token a second. */
#ifndef TESTS_BENCH_BENCH_MEASURE_H
#define TESTS_BENCH_BENCH_MEASURE_H

#include <stdint.h>

#include "tests/bench/bench_result.h"
#include "tests/bench/bench_stats.h"

#define BENCH_NAMES_MAX   8u
#define BENCH_SAMPLES_MAX 5u

struct bench_names { /* how often each name came; the last place takes all that do not fit */
    uint32_t count;
    char names[BENCH_NAMES_MAX][BENCH_NAME_BYTES];
    uint64_t times[BENCH_NAMES_MAX];
};

struct bench_measure {
    struct bench_hist ttft, gap, token_gap, rate, duration;
    struct bench_hist queue, prefill, decode; /* by receipt */
    uint64_t started_count, ended_count, failed_count;
    uint64_t faults[BENCH_FAULT_COUNT];
    struct bench_names http_statuses, finishes, specs;
    uint32_t sample_count;
    char samples[BENCH_SAMPLES_MAX][BENCH_TEXT_BYTES]; /* the first errors' details */
    uint64_t token_count, live_token_count;            /* live: also of streams that still run */
    uint64_t prompt_token_count, cached_token_count;
    uint64_t receipt_count, drafted, accepted, steps, preempted, resumed;
    uint64_t receipt_token_count; /* tokens of streams with a receipt */
    uint64_t concurrency_max;
    uint64_t no_usage_count;       /* finished streams without usage */
    uint64_t no_ids_count;         /* streams with tokens but without token_ids */
    uint64_t count_mismatch_count; /* ids and usage differ by more than the end token */
    uint64_t late_start_count;     /* started over 10 ms after due: all slots were taken */
    uint64_t first_start_us, last_end_us;
    uint64_t run_us; /* all runs together, without what lay between them; 0 = not known */
};

struct bench_measure *bench_measure_create(void);
void bench_measure_destroy(struct bench_measure **measure_p);
void bench_measure_start(struct bench_measure *m);
void bench_measure_tokens(struct bench_measure *m, uint64_t before_us, uint64_t now_us,
                          uint32_t tokens);
void bench_measure_end(struct bench_measure *m, const struct bench_result *r);
/* Of the runs; where those are not known, from the first start to the last end. */
double bench_measure_seconds(const struct bench_measure *m);
double bench_measure_rate(const struct bench_measure *m); /* all tokens a second */

#endif
