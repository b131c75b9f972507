/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_ab.h - two settings of the request body against each other.
 *
 * Owned by the loop thread.  Runs A B, B A, A B ...: the request of a round has the same prompt
 * and seed in both, and a cache salt of its own, so that neither is served what the other left. */
#ifndef TESTS_BENCH_BENCH_AB_H
#define TESTS_BENCH_BENCH_AB_H

#include <stdint.h>

struct bench_session;
struct str;

/* Appends the report; returns how many streams failed. */
uint64_t bench_ab_run(struct bench_session *s, struct str *out);

#endif
