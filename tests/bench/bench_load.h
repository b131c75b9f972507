/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_load.h - one run: a number of streams kept busy, or arrivals at a rate.
 *
 * Owned by the loop thread; bench_load_run holds the loop until the run is over.  Closed loop:
 * each slot starts its next request when the last one ended (0.1 s later after an error).  With a
 * rate, requests are due at seeded exponential times; one that finds no free slot waits, and its
 * time to the first token counts from when it was due. */
#ifndef TESTS_BENCH_BENCH_LOAD_H
#define TESTS_BENCH_BENCH_LOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/bench/bench_result.h"

struct bench_client;
struct bench_measure;
struct loop;
struct str;

struct bench_load {
    struct loop *loop;
    struct bench_client *client;
    struct bench_measure *measure; /* taken as it is, added to */
    uint32_t stream_count;         /* slots 0..stream_count-1 of the client */
    uint64_t request_count;        /* 0 = until stop_us */
    uint64_t run_us_max;           /* after it running streams are ended; 0 = never */
    bool run_us_max_is_fault;      /* a limit that was not meant to be reached */
    uint64_t ramp_us;              /* slot i starts at ramp_us * i / stream_count */
    double rate;                   /* requests a second; 0 = closed loop */
    uint64_t seed;                 /* of the arrivals */
    bool progress;                 /* a line a second on stderr */
    const bool *interrupted;       /* set by a signal: end what runs, start nothing */
    /* Writes the body of request number `index`. */
    void (*write_body)(void *arg, uint64_t index, struct str *out);
    /* May be NULL. */
    void (*on_result)(void *arg, uint64_t index, const struct bench_result *result);
    void *arg;
};

void bench_load_run(const struct bench_load *load);

#endif
