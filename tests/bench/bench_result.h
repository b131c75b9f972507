/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_result.h - what one stream turned out to be, as its client saw it.
 *
 * Pure values.  Times are CLOCK_MONOTONIC microseconds; 0 = did not happen. */
#ifndef TESTS_BENCH_BENCH_RESULT_H
#define TESTS_BENCH_BENCH_RESULT_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/bench/bench_chunk.h"

enum bench_fault {
#define BENCH_FAULT(code, text) BENCH_##code,
#include "tests/bench/bench_faults.def"
#undef BENCH_FAULT
    BENCH_FAULT_COUNT
};

const char *bench_fault_name(enum bench_fault fault);

struct bench_result {
    enum bench_fault fault;
    int http_status;               /* 0 = no answer */
    char detail[BENCH_TEXT_BYTES]; /* of the fault */
    uint64_t due_us;               /* when the request should have started */
    uint64_t start_us;             /* when it did: the connect */
    uint64_t first_us, last_us;    /* first and last event that carried tokens */
    uint64_t end_us;
    uint64_t event_count;       /* that carried tokens or text */
    uint64_t token_count;       /* by token_ids, else one an event */
    uint64_t first_token_count; /* in the first event */
    bool ids_seen, done_seen, has_usage, has_receipt;
    uint64_t text_hash; /* of all that was generated */
    char finish[BENCH_NAME_BYTES];
    uint64_t prompt_tokens, completion_tokens, cached_tokens; /* by usage */
    struct bench_receipt receipt;
};

/* Tokens by their ids; without ids by usage; without usage by events. */
uint64_t bench_result_tokens(const struct bench_result *r);
uint64_t bench_result_ttft_us(const struct bench_result *r); /* from due_us; 0 = no token */
/* Tokens a second after the first event; 0 = not measurable. */
double bench_result_rate(const struct bench_result *r);
bool bench_result_failed(const struct bench_result *r); /* a fault that is an error */

#endif
