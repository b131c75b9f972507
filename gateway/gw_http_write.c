/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_http_conn.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include <event2/buffer.h>
#include <event2/bufferevent.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"

#define REPLY_HEAD_BYTES_MAX 4096

const char *gw_http_reason(int status)
{
    switch (status) {
    case 100:
        return "Continue";
    case 200:
        return "OK";
    case 204:
        return "No Content";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 408:
        return "Request Timeout";
    case 413:
        return "Content Too Large";
    case 414:
        return "URI Too Long";
    case 415:
        return "Unsupported Media Type";
    case 417:
        return "Expectation Failed";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 500:
        return "Internal Server Error";
    case 501:
        return "Not Implemented";
    case 503:
        return "Service Unavailable";
    case 505:
        return "HTTP Version Not Supported";
    default:
        return "Unknown";
    }
}

void conn_set_date(struct gw_http *h)
{
    time_t seconds = (time_t)(clock_unix_us() / 1000000);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    strftime(h->date, sizeof(h->date), "%a, %d %b %Y %H:%M:%S GMT", &tm);
}

uint64_t conn_output_bytes(const struct gw_http_request *c)
{
    return evbuffer_get_length(c->pending) + evbuffer_get_length(bufferevent_get_output(c->bev));
}

static void conn_lose(struct gw_http_request *c, enum gw_http_gone why)
{
    if (c->lost)
        return;
    c->lost = true;
    c->lost_why = why;
    conn_work(c);
}

/* Straight to the socket while nothing waits: one system call for all that a stream has gathered in
 * this round of the loop.  What the kernel does not take waits in the bufferevent. */
void conn_flush(struct gw_http_request *c)
{
    if (c->lost || evbuffer_get_length(c->pending) == 0)
        return;
    struct evbuffer *output = bufferevent_get_output(c->bev);
    if (evbuffer_get_length(output) == 0) {
        int n = evbuffer_write(c->pending, c->fd);
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            conn_lose(c, GW_HTTP_GONE_CLIENT);
            return;
        }
        if (evbuffer_get_length(c->pending) == 0)
            return;
        c->progress_us = c->http->now_us;
    }
    if (bufferevent_write_buffer(c->bev, c->pending) != 0)
        conn_lose(c, GW_HTTP_GONE_SLOW);
}

void conn_send(struct gw_http_request *c, const void *bytes, size_t count)
{
    if (c->lost || count == 0)
        return;
    c->added_bytes += count;
    if (evbuffer_add(c->pending, bytes, count) != 0)
        conn_lose(c, GW_HTTP_GONE_SLOW);
    if (!c->pumping)
        conn_work(c);
}

/* The answer's head in one buffer.  length UINT64_MAX = chunked or until close. */
static void send_head(struct gw_http_request *c, int status, const char *content_type,
                      const char *headers, uint64_t length)
{
    char text[REPLY_HEAD_BYTES_MAX];
    struct gw_http *h = c->http;
    if (h->draining || !c->head.keep_alive || c->head.state != GW_HEAD_DONE)
        c->last = true;
    int n = snprintf(text, sizeof(text), "HTTP/1.1 %d %s\r\nServer: %s\r\nDate: %s\r\n", status,
                     gw_http_reason(status), h->options.server, h->date);
    if (status != 204)
        n += snprintf(text + n, sizeof(text) - (size_t)n, "Content-Type: %s\r\n",
                      content_type ? content_type : "application/json");
    if (length != UINT64_MAX && status != 204)
        n += snprintf(text + n, sizeof(text) - (size_t)n, "Content-Length: %llu\r\n",
                      (unsigned long long)length);
    else if (c->stream_chunked && length == UINT64_MAX)
        n += snprintf(text + n, sizeof(text) - (size_t)n, "Transfer-Encoding: chunked\r\n");
    if (h->options.cors_origin[0])
        n += snprintf(text + n, sizeof(text) - (size_t)n, "Access-Control-Allow-Origin: %s\r\n",
                      h->options.cors_origin);
    n +=
        snprintf(text + n, sizeof(text) - (size_t)n, "x-request-id: %s\r\n", gw_http_request_id(c));
    if (c->last)
        n += snprintf(text + n, sizeof(text) - (size_t)n, "Connection: close\r\n");
    else if (c->head.minor == 0)
        n += snprintf(text + n, sizeof(text) - (size_t)n, "Connection: keep-alive\r\n");
    n += snprintf(text + n, sizeof(text) - (size_t)n, "%s\r\n", headers ? headers : "");
    CHECK(n > 0 && (size_t)n < sizeof(text)); /* headers are made here and bounded */
    conn_send(c, text, (size_t)n);
}

static void finish_answer(struct gw_http_request *c)
{
    c->answered = true;
    c->open = false;
    c->streaming = false;
    if (!c->pumping)
        conn_work(c);
}

/* What still comes of a refused body is thrown away, so that the next request is not garbage; a
 * client that waits for 100 may or may not send it, so that connection ends. */
static void give_up_body(struct gw_http_request *c)
{
    if (c->body_done)
        return;
    c->body_drop = true;
    if (c->head.expect_continue && !c->continue_sent)
        c->last = true;
}

void gw_http_reply(struct gw_http_request *r, const struct gw_http_reply *reply)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    CHECK(r->open && !r->answered && !r->streaming);
    if (reply->close)
        r->last = true;
    give_up_body(r);
    send_head(r, reply->status, reply->content_type, reply->headers, reply->body_bytes);
    if (!r->head.method || strcmp(r->head.method, "HEAD") != 0)
        conn_send(r, reply->body, reply->body_bytes);
    finish_answer(r);
}

void gw_http_stream_begin(struct gw_http_request *r, int status, const char *content_type,
                          const char *headers)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    CHECK(r->open && !r->answered && !r->streaming && r->body_done);
    r->streaming = true;
    r->stream_chunked = r->head.minor == 1;
    if (!r->stream_chunked)
        r->last = true;
    send_head(r, status, content_type, headers, UINT64_MAX);
}

/* One event above the bound is no fault of the client's: what is left of it does not count. */
static bool stream_room(struct gw_http_request *c, size_t count)
{
    uint64_t max = c->http->options.output_bytes_max, waiting = conn_output_bytes(c);
    uint64_t written = c->added_bytes - waiting;
    uint64_t left = c->large_end > written ? c->large_end - written : 0;
    if (left > c->large_bytes)
        left = c->large_bytes;
    if (waiting - left + count <= max)
        return true;
    if (left > 0 || waiting > max || count <= max)
        return false;
    c->large_bytes = count;
    c->large_end = c->added_bytes + count;
    return true;
}

bool gw_http_stream_write(struct gw_http_request *r, const void *bytes, size_t count)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    CHECK(r->streaming && !r->answered && count > 0);
    if (r->lost)
        return false;
    if (!stream_room(r, count)) {
        conn_lose(r, GW_HTTP_GONE_SLOW);
        return false;
    }
    if (!r->stream_chunked) {
        conn_send(r, bytes, count);
        return !r->lost;
    }
    char small[4096];
    int n = snprintf(small, sizeof(small), "%zx\r\n", count);
    if ((size_t)n + count + 2 <= sizeof(small)) {
        memcpy(small + n, bytes, count);
        memcpy(small + (size_t)n + count, "\r\n", 2);
        conn_send(r, small, (size_t)n + count + 2);
    } else {
        conn_send(r, small, (size_t)n);
        conn_send(r, bytes, count);
        conn_send(r, "\r\n", 2);
    }
    return !r->lost;
}

void gw_http_stream_end(struct gw_http_request *r)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    CHECK(r->streaming && !r->answered);
    if (r->stream_chunked)
        conn_send(r, "0\r\n\r\n", 5);
    finish_answer(r);
}

/* A request that no handler sees. */
void conn_refuse(struct gw_http_request *c, int status, const char *reason)
{
    char body[512];
    const char *type = status == 500 || status == 503 ? "server_error" : "invalid_request_error";
    const char *code = status == 413 ? "\"body_too_large\"" : "null";
    int n = snprintf(body, sizeof(body),
                     "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":%s}}",
                     reason, type, code);
    CHECK(n > 0 && (size_t)n < sizeof(body));
    c->http->stats.bad_requests++;
    if (c->http->options.handler.refused)
        c->http->options.handler.refused(c->http->options.arg, status);
    c->open = true;
    gw_http_reply(c, &(struct gw_http_reply){.status = status,
                                             .headers = status == 503 ? "Retry-After: 1\r\n"
                                                                      : "x-should-retry: false\r\n",
                                             .body = body,
                                             .body_bytes = (size_t)n,
                                             .close = true});
}
