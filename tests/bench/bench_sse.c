/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_sse.h"

#include <string.h>

#include "lib/base/check.h"

#define BENCH_SSE_MAGIC 0x42535345u

void bench_sse_init(struct bench_sse *s, size_t event_bytes_max, bench_sse_fn fn, void *arg)
{
    CHECK(event_bytes_max > 0 && fn != NULL);
    memset(s, 0, sizeof(*s));
    s->magic = BENCH_SSE_MAGIC;
    s->event_bytes_max = event_bytes_max;
    s->fn = fn;
    s->arg = arg;
    str_init(&s->line, event_bytes_max);
    str_init(&s->data, event_bytes_max);
}

void bench_sse_fini(struct bench_sse *s)
{
    CHECK_OBJ(s, BENCH_SSE_MAGIC);
    str_fini(&s->line);
    str_fini(&s->data);
    s->magic = 0;
}

void bench_sse_reset(struct bench_sse *s)
{
    CHECK_OBJ(s, BENCH_SSE_MAGIC);
    str_clear(&s->line);
    str_clear(&s->data);
    s->after_cr = s->has_data = s->over = false;
    s->event_count = s->comment_count = 0;
}

/* An empty line: what has been collected is an event, unless it had no data. */
static void end_event(struct bench_sse *s)
{
    if (!s->has_data)
        return;
    s->event_count++;
    if (!s->fn(s->arg, s->data.bytes ? s->data.text : "", s->data.bytes))
        s->over = true;
    str_clear(&s->data);
    s->has_data = false;
}

static void take_line(struct bench_sse *s, const char *line, size_t bytes)
{
    if (bytes == 0) {
        end_event(s);
        return;
    }
    const char *colon = memchr(line, ':', bytes);
    size_t name = colon ? (size_t)(colon - line) : bytes;
    if (name == 0) {
        s->comment_count++;
        return;
    }
    if (name != 4 || memcmp(line, "data", 4) != 0)
        return; /* event, id, retry and unknown fields carry nothing we measure */
    const char *value = line + name;
    size_t left = bytes - name;
    if (left > 0) { /* the colon, then at most one space */
        value++, left--;
        if (left > 0 && *value == ' ')
            value++, left--;
    }
    if (s->has_data)
        str_add_char(&s->data, '\n');
    str_add(&s->data, value, left);
    s->has_data = true;
}

enum err bench_sse_feed(struct bench_sse *s, const char *bytes, size_t count)
{
    CHECK_OBJ(s, BENCH_SSE_MAGIC);
    CHECK(bytes != NULL || count == 0);
    size_t at = 0;
    while (at < count && !s->over) {
        if (s->after_cr) {
            s->after_cr = false;
            if (bytes[at] == '\n') {
                at++;
                continue;
            }
        }
        size_t end = at;
        while (end < count && bytes[end] != '\n' && bytes[end] != '\r')
            end++;
        if (end == count) {
            str_add(&s->line, bytes + at, count - at);
            at = count;
        } else {
            s->after_cr = bytes[end] == '\r';
            if (s->line.bytes == 0 && !s->line.overflow) {
                take_line(s, bytes + at, end - at);
            } else {
                str_add(&s->line, bytes + at, end - at);
                if (!s->line.overflow)
                    take_line(s, s->line.text, s->line.bytes);
                if (!s->line.overflow)
                    str_clear(&s->line);
            }
            at = end + 1;
        }
        if (s->line.overflow || s->data.overflow) {
            s->over = true;
            return ERR_TOO_LARGE;
        }
    }
    return ERR_OK;
}

bool bench_sse_clean(const struct bench_sse *s)
{
    CHECK_OBJ(s, BENCH_SSE_MAGIC);
    return s->line.bytes == 0 && !s->has_data && !s->line.overflow && !s->data.overflow;
}
