/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_chunk.h - what one data line of a chat.completion.chunk stream says.
 *
 * Pure; one owner thread.  Reads only the public protocol: deltas, token_ids, usage and its
 * tandem receipt, error events.  Fields that are absent stay zero. */
#ifndef TESTS_BENCH_BENCH_CHUNK_H
#define TESTS_BENCH_BENCH_CHUNK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct arena;

#define BENCH_TEXT_BYTES 200
#define BENCH_NAME_BYTES 24

struct bench_receipt { /* usage.tandem */
    char spec[BENCH_NAME_BYTES];
    uint64_t concurrency, drafted, accepted, steps, preempted, resumed;
    double queue_ms, prefill_ms, decode_ms;
};

struct bench_chunk {
    bool done;      /* the line was [DONE] */
    bool is_error;  /* an error object: detail says what */
    bool has_text;  /* a delta with content, reasoning or a tool call in it */
    bool has_ids;   /* choices[0].token_ids is an array, maybe empty */
    bool has_usage; /* usage with completion_tokens */
    bool has_receipt;
    uint32_t id_count;
    char finish[BENCH_NAME_BYTES]; /* "" = none */
    uint64_t prompt_tokens, completion_tokens, cached_tokens;
    struct bench_receipt receipt;
    char detail[BENCH_TEXT_BYTES]; /* is_error: "code: message" */
};

#define BENCH_HASH_START UINT64_C(0xcbf29ce484222325) /* FNV-1a */

/* ERR_INVALID for what is no such chunk, with the reason in detail.  *hash takes in what was
 * generated: the ids where there are any, else the text. */
MUST_USE enum err bench_chunk_parse(struct arena *arena, const char *data, size_t bytes,
                                    uint64_t *hash, struct bench_chunk *ret_chunk,
                                    struct err_detail *detail);

/* "code: message" of a body {"error": {...}}; false if it is no such body. */
bool bench_error_text(struct arena *arena, const char *body, size_t bytes,
                      char ret_text[BENCH_TEXT_BYTES]);

#endif
