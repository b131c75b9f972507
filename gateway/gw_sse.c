/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_sse.h"

#include <string.h>

#include "gateway/gw_http.h"
#include "lib/base/check.h"
#include "lib/base/str.h"

void gw_sse_begin(struct gw_sse *s, struct gw_http_request *http, struct str *buffer,
                  const char *headers, uint64_t now_us)
{
    char all[2048] = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";
    size_t at = strlen(all), bytes = strlen(headers);
    CHECK(at + bytes < sizeof(all));
    CHECK(buffer->bytes == 0);
    memcpy(all + at, headers, bytes + 1);
    s->http = http;
    s->buffer = buffer;
    s->sent_us = now_us;
    gw_http_stream_begin(http, 200, "text/event-stream; charset=utf-8", all);
}

void gw_sse_event(struct gw_sse *s, const char *json, size_t bytes)
{
    CHECK(s->http != NULL && bytes > 0);
    DCHECK(memchr(json, '\n', bytes) == NULL);
    str_add(s->buffer, "data: ", 6);
    str_add(s->buffer, json, bytes);
    str_add(s->buffer, "\n\n", 2);
}

bool gw_sse_flush(struct gw_sse *s, uint64_t now_us)
{
    CHECK(s->http != NULL);
    if (s->buffer->bytes == 0)
        return true;
    bool ok =
        !s->buffer->overflow && gw_http_stream_write(s->http, s->buffer->text, s->buffer->bytes);
    str_clear(s->buffer);
    s->sent_us = now_us;
    return ok;
}

void gw_sse_ping(struct gw_sse *s, uint64_t ping_us, uint64_t now_us)
{
    static const char comment[] = ": ping\n\n";
    CHECK(s->http != NULL && s->buffer->bytes == 0);
    if (ping_us == 0 || now_us - s->sent_us < ping_us)
        return;
    s->sent_us = now_us;
    (void)gw_http_stream_write(s->http, comment, sizeof(comment) - 1);
}

void gw_sse_done(struct gw_sse *s)
{
    static const char done[] = "data: [DONE]\n\n";
    CHECK(s->http != NULL);
    str_add(s->buffer, done, sizeof(done) - 1);
    (void)gw_http_stream_write(s->http, s->buffer->text, s->buffer->bytes);
    str_clear(s->buffer);
    gw_http_stream_end(s->http);
    s->http = NULL;
}
