/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_solo.h - what a cold long prefill does to the streams that decode beside it.
 *
 * Owned by the loop thread.  A round has three phases: the decoders alone, the cold prompt alone,
 * and both, with the same decoder prompts and a fresh cold prompt each time.  Speeds beside count
 * only while the prefill runs and the decoder has begun; gaps count if they touch that time. */
#ifndef TESTS_BENCH_BENCH_SOLO_H
#define TESTS_BENCH_BENCH_SOLO_H

#include <stdbool.h>
#include <stdint.h>

struct bench_session;
struct str;

/* Appends the report; returns how many streams failed.  *ret_held: every limit was kept. */
uint64_t bench_solo_run(struct bench_session *s, struct str *out, bool *ret_held);

#endif
