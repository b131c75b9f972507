/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_prompts.h - where prompts come from: a file, or words drawn from a seed.
 *
 * One owner thread.  A file is read at start: one prompt a line, or a JSON object a line with
 * "messages" (or "prompt") and any other body members.  At most 100,000 lines and 256 MiB.  Drawn
 * prompts begin with their own number, so that no two share a prefix that a cache could serve. */
#ifndef TESTS_BENCH_BENCH_PROMPTS_H
#define TESTS_BENCH_BENCH_PROMPTS_H

#include <stdint.h>

#include "lib/base/err.h"

struct bench_fields;
struct bench_prompts;
struct str;

struct bench_prompts *bench_prompts_create(uint64_t seed);
void bench_prompts_destroy(struct bench_prompts **prompts_p);

/* Names the line in detail when one is no prompt. */
MUST_USE enum err bench_prompts_load(struct bench_prompts *p, const char *path,
                                     struct err_detail *detail);
uint32_t bench_prompts_count(const struct bench_prompts *p); /* 0 = drawn */

/* Words a token, learned from what the server counted for a prompt we drew. */
void bench_prompts_calibrate(struct bench_prompts *p, uint32_t tokens_asked,
                             uint64_t tokens_counted);

/* The members of prompt number `index` (with "messages"): borrowed, valid until the next call.
 * From a file, in turn; else about `tokens` tokens of drawn words. */
const struct bench_fields *bench_prompts_get(struct bench_prompts *p, uint64_t index,
                                             uint32_t tokens);
/* The same, drawn even where there is a file. */
const struct bench_fields *bench_prompts_draw(struct bench_prompts *p, uint64_t index,
                                              uint32_t tokens);

#endif
