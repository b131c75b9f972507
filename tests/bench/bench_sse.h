/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_sse.h - server-sent events out of a byte stream cut anywhere.
 *
 * Pure; one owner thread.  Accepts the whole WHATWG form (LF, CRLF and CR line ends, several data
 * lines an event, comments, other fields).  Holds one event at most, bounded by event_bytes_max. */
#ifndef TESTS_BENCH_BENCH_SSE_H
#define TESTS_BENCH_BENCH_SSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/str.h"

/* data is borrowed for the call.  Returning false ends the parsing: nothing more is delivered. */
typedef bool (*bench_sse_fn)(void *arg, const char *data, size_t bytes);

struct bench_sse {
    uint32_t magic;
    bool after_cr; /* the last byte was CR: an LF now belongs to it */
    bool has_data; /* the event has at least one data line */
    bool over;     /* fn said so, or an error */
    struct str line;
    struct str data;
    size_t event_bytes_max;
    uint64_t event_count;
    uint64_t comment_count; /* keep-alives */
    bench_sse_fn fn;
    void *arg;
};

void bench_sse_init(struct bench_sse *s, size_t event_bytes_max, bench_sse_fn fn, void *arg);
void bench_sse_fini(struct bench_sse *s);
void bench_sse_reset(struct bench_sse *s); /* for the next stream; keeps the memory */

/* ERR_TOO_LARGE when a line or an event passes event_bytes_max; the parser is over then. */
MUST_USE enum err bench_sse_feed(struct bench_sse *s, const char *bytes, size_t count);

/* True when the stream ended between events: no half line or undelivered data is held. */
bool bench_sse_clean(const struct bench_sse *s);

#endif
