/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_http*: framing, limits, timeouts and hang-ups on socket pairs, split at every byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>

#include "gateway/gw_http.h"
#include "gateway/gw_http_conn.h"
#include "lib/net/loop.h"

static struct loop *loop;
static struct gw_http *http;
static struct gw_http_request *waiting;
static uint32_t gone_count, request_count;
static enum gw_http_gone gone_why;
static char out[1 << 20];
static size_t out_bytes;
static struct gw_http_options options;
static char large[1 << 22];
static size_t large_bytes; /* of the answer to /large */

static void answer(struct gw_http_request *r, int status, const char *text, size_t bytes)
{
    gw_http_reply(
        r, &(struct gw_http_reply){
               .status = status, .content_type = "text/plain", .body = text, .body_bytes = bytes});
}

static void on_head(void *arg, struct gw_http_request *r)
{
    if (strcmp(gw_http_path(r), "/nowhere") == 0)
        answer(r, 404, "nowhere", 7);
}

static void on_request(void *arg, struct gw_http_request *r)
{
    request_count++;
    if (strcmp(gw_http_path(r), "/wait") == 0) {
        waiting = r;
        return;
    }
    if (strcmp(gw_http_path(r), "/stream") == 0) {
        gw_http_stream_begin(r, 200, "text/event-stream", NULL);
        gw_http_stream_write(r, "one", 3);
        gw_http_stream_write(r, "two!", 4);
        gw_http_stream_end(r);
        return;
    }
    if (strcmp(gw_http_path(r), "/large") == 0) {
        answer(r, 200, large, large_bytes);
        return;
    }
    struct gw_http_body body;
    gw_http_take_body(r, &body);
    char text[4096];
    int n = snprintf(text, sizeof(text), "%s %s?%s [%.*s]", gw_http_method(r), gw_http_path(r),
                     gw_http_query(r), (int)(body.count > 2000 ? 2000 : body.count),
                     body.count ? body.bytes : "");
    answer(r, 200, text, (size_t)n);
    gw_http_give_body(http, &body);
}

static void on_gone(void *arg, struct gw_http_request *r, enum gw_http_gone why)
{
    gone_count++;
    gone_why = why;
    if (waiting == r)
        waiting = NULL;
}

static void set_options(void)
{
    options = (struct gw_http_options){
        .server = "tandem/test",
        .cors_origin = "",
        .connections_max = 4,
        .header_bytes_max = 2048,
        .header_fields_max = 20,
        .target_bytes_max = 512,
        .body_bytes_max = 1000,
        .bodies_bytes_max = 100000,
        .output_bytes_max = 100000,
        .idle_ms = 60000,
        .header_ms = 60000,
        .body_ms = 60000,
        .body_rate_min = 1000,
        .write_ms = 60000,
        .linger_ms = 60000,
        .handler = {on_head, on_request, on_gone, NULL},
    };
}

static void start(void)
{
    loop = loop_create();
    http = gw_http_create(loop, &options);
    waiting = NULL;
    gone_count = request_count = 0;
    memset(large, 'x', sizeof(large));
}

static void stop(void)
{
    assert_int_equal(gw_http_stats(http)->bodies_bytes, 0);
    gw_http_destroy(&http);
    loop_destroy(&loop);
}

static int setup(void **state)
{
    set_options();
    start();
    return 0;
}

static int teardown(void **state)
{
    stop();
    return 0;
}

static void turn(void)
{
    for (int i = 0; i < 6; i++)
        event_base_loop(loop_base(loop), EVLOOP_NONBLOCK);
}

static void turn_ms(uint32_t ms)
{
    uint64_t end = loop_now_us(loop) + ms * 1000u;
    while (loop_now_us(loop) < end) {
        turn();
        usleep(2000);
    }
}

static int open_client(void)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_true(gw_http_adopt(http, pair[1]));
    return pair[0];
}

static void say(int fd, const char *text, size_t bytes)
{
    assert_int_equal(send(fd, text, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
    turn();
}

/* Everything readable now; true if the server has closed its side. */
static bool hear(int fd)
{
    for (;;) {
        ssize_t n = recv(fd, out + out_bytes, sizeof(out) - 1 - out_bytes, MSG_DONTWAIT);
        if (n == 0)
            return true;
        if (n < 0)
            break;
        out_bytes += (size_t)n;
        turn();
    }
    out[out_bytes] = '\0';
    return false;
}

static bool exchange(const char *text, size_t bytes, size_t split)
{
    int fd = open_client();
    out_bytes = 0;
    out[0] = '\0';
    if (split)
        say(fd, text, split);
    if (split < bytes && send(fd, text + split, bytes - split, MSG_NOSIGNAL) > 0)
        turn();
    bool closed = hear(fd);
    out[out_bytes] = '\0';
    close(fd);
    turn();
    return closed;
}

static uint32_t count_text(const char *text)
{
    uint32_t n = 0;
    for (const char *p = out; (p = strstr(p, text)) != NULL; p++)
        n++;
    return n;
}

struct framing_case {
    const char *request;
    const char *first; /* the answer begins with this */
    uint32_t answers;  /* how many there are */
    bool closed;
    const char *holds; /* NULL = anything */
};

#define H "Host: a\r\n"
static const struct framing_case framing_cases[] = {
    {"GET /a?b=c HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 200 OK", 1, false, "GET /a?b=c []"},
    {"\r\n\r\nGET / HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 200", 1, false, NULL},
    {"GET http://x.y/p?q HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 200", 1, false, "GET /p?q []"},
    {"GET / HTTP/1.0\r\n\r\n", "HTTP/1.1 200", 1, true, "Connection: close"},
    {"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "HTTP/1.1 200", 1, false,
     "Connection: keep-alive"},
    {"GET / HTTP/1.1\r\n" H "Connection: close\r\n\r\n", "HTTP/1.1 200", 1, true, "close"},
    {"GET / HTTP/1.1\r\n" H "\r\nGET /2 HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 200", 2, false, "/2"},
    {"HEAD /h HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 200", 1, false, "Content-Length: 11\r\n"},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nhelloGET /n HTTP/1.1\r\n" H "\r\n",
     "HTTP/1.1 200", 2, false, "[hello]"},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
     "3\r\nabc\r\n0a;x=y\r\n0123456789\r\n0\r\n\r\nGET /n HTTP/1.1\r\n" H "\r\n",
     "HTTP/1.1 200", 2, false, "[abc0123456789]"},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: Chunked\r\n\r\n"
     "3\r\nabc\r\n0\r\nX-Sum: 7\r\nY: \r\n\r\nGET /n HTTP/1.1\r\n" H "\r\n",
     "HTTP/1.1 200", 2, false, "[abc]"},
    {"POST /nowhere HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nhelloGET /n HTTP/1.1\r\n" H "\r\n",
     "HTTP/1.1 404", 2, false, "GET /n? []"},
    {"GET / HTTP/1.1\r\n" H "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
     "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\nGET /n HTTP/1.1\r\n" H "\r\n",
     "HTTP/1.1 200", 2, false, "GET /n? []"},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 0\r\n\r\n", "HTTP/1.1 200", 1, false, "POST /? []"},
    {"GET /stream HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 200", 1, false,
     "\r\n\r\n3\r\none\r\n4\r\ntwo!\r\n0\r\n\r\n"},
    {"GET /stream HTTP/1.0\r\n\r\n", "HTTP/1.1 200", 1, true, "\r\n\r\nonetwo!"},
    {"POST / HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
     "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200", 2, false, "[hi]"},
    {"POST /nowhere HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
     "HTTP/1.1 404", 1, true, "Connection: close"},
    {"POST / HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2000\r\n\r\n", "HTTP/1.1 413",
     1, true, "body_too_large"},
    {"POST / HTTP/1.1\r\n" H "Expect: tea\r\nContent-Length: 2\r\n\r\nhi", "HTTP/1.1 417", 1, true,
     NULL},
    /* what must be refused */
    {"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 400", 1, true, "Host"},
    {"GET / HTTP/1.1\r\n" H H "\r\n", "HTTP/1.1 400", 1, true, "Host"},
    {"GET / HTTP/1.1\n" H "\r\n", "HTTP/1.1 400", 1, true, "line feed"},
    {"GET / HTTP/1.1\r\nHost: a\n\r\n", "HTTP/1.1 400", 1, true, "line feed"},
    {"GET / HTTP/1.1\r\n" H "\n", "HTTP/1.1 400", 1, true, "line feed"},
    {"GET / HTTP/1.1\r\n" H "A: b\rC: d\r\n\r\n", "HTTP/1.1 400", 1, true, "carriage return"},
    {"GET / HTTP/1.1\r\n" H "A: b\r\n c\r\n\r\n", "HTTP/1.1 400", 1, true, "folded"},
    {"GET / HTTP/1.1\r\n" H "A: b\r\n\tc\r\n\r\n", "HTTP/1.1 400", 1, true, "folded"},
    {"GET / HTTP/1.1\r\nHost : a\r\n\r\n", "HTTP/1.1 400", 1, true, "colon"},
    {"GET / HTTP/1.1\r\n" H "A\r\n\r\n", "HTTP/1.1 400", 1, true, "field name"},
    {"GET / HTTP/1.1\r\n" H ": v\r\n\r\n", "HTTP/1.1 400", 1, true, "field name"},
    {"GET / HTTP/1.1\r\n" H "A(b): v\r\n\r\n", "HTTP/1.1 400", 1, true, "field name"},
    {"GET / HTTP/1.1\r\n" H "A: \001\r\n\r\n", "HTTP/1.1 400", 1, true, "control"},
    {"GET /\r\n\r\n", "HTTP/1.1 505", 1, true, NULL},
    {"GET / HTTP/0.9\r\n\r\n", "HTTP/1.1 505", 1, true, NULL},
    {"GET / HTTP/2.7\r\n" H "\r\n", "HTTP/1.1 505", 1, true, NULL},
    {"GET / HTTP/1.2\r\n" H "\r\n", "HTTP/1.1 505", 1, true, NULL},
    {"GET / HTTP/1.10\r\n" H "\r\n", "HTTP/1.1 400", 1, true, NULL},
    {"GET / http/1.1\r\n" H "\r\n", "HTTP/1.1 400", 1, true, NULL},
    {"GET  / HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 400", 1, true, NULL},
    {"GET / x HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 400", 1, true, NULL},
    {"get / HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 400", 1, true, NULL},
    {"BREW / HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 501", 1, true, "unknown method"},
    {"GET a HTTP/1.1\r\n" H "\r\n", "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi", "HTTP/1.1 400", 1,
     true, "Content-Length"},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi", "HTTP/1.1 400", 1,
     true, "Content-Length"},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 2, 2\r\n\r\nhi", "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length: +2\r\n\r\nhi", "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length: -2\r\n\r\nhi", "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 0x2\r\n\r\nhi", "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length:\r\n\r\nhi", "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 99999999999999999999999\r\n\r\nhi", "HTTP/1.1 400", 1,
     true, NULL},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, "both"},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, "both"},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 501", 1,
     true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: identity\r\n\r\n", "HTTP/1.1 501", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 400", 1, true,
     NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n\r\n", "HTTP/1.1 400", 1, true,
     NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabcZZ0\r\n\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\rXabc\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3;a=\x01\r\nabc\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\rX\r\n", "HTTP/1.1 400", 1, true,
     NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
     "HTTP/1.1 400", 1, true, NULL},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\n\r\n", "HTTP/1.1 400", 1,
     true, "trailer"},
    {"POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\r\n y\r\n\r\n",
     "HTTP/1.1 400", 1, true, "trailer"},
    {"POST / HTTP/1.1\r\n" H "Content-Length: 1001\r\n\r\n", "HTTP/1.1 413", 1, true,
     "body_too_large"},
};

static void framing(void **state)
{
    for (size_t i = 0; i < sizeof(framing_cases) / sizeof(*framing_cases); i++) {
        const struct framing_case *c = &framing_cases[i];
        size_t bytes = strlen(c->request);
        for (size_t split = 0; split < bytes; split++) {
            bool closed = exchange(c->request, bytes, split);
            if (strncmp(out, c->first, strlen(c->first)) != 0 ||
                count_text("HTTP/1.1 ") != c->answers || closed != c->closed ||
                (c->holds && !strstr(out, c->holds)))
                fail_msg("case %zu split %zu closed %d\n%s\n--- answered\n%s", i, split, closed,
                         c->request, out);
        }
    }
    assert_int_equal(gone_count, 0);
    assert_int_equal(gw_http_stats(http)->connections, 0);
}

static void byte_by_byte(void **state)
{
    static const char text[] = "POST /x HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
                               "3\r\nabc\r\n2\r\nde\r\n0\r\nT: u\r\n\r\n"
                               "GET /y HTTP/1.1\r\n" H "\r\n";
    int fd = open_client();
    out_bytes = 0;
    for (size_t i = 0; i < sizeof(text) - 1; i++)
        say(fd, text + i, 1);
    assert_false(hear(fd));
    assert_int_equal(count_text("HTTP/1.1 200"), 2);
    assert_non_null(strstr(out, "POST /x? [abcde]"));
    close(fd);
    turn();
}

static void head_has_no_body(void **state)
{
    static const char text[] = "HEAD / HTTP/1.1\r\n" H "\r\n";
    exchange(text, sizeof(text) - 1, 0);
    assert_string_equal(out + strlen(out) - 4, "\r\n\r\n");
    assert_int_equal(count_text("\r\n\r\n"), 1);
}

static void bounds(void **state)
{
    static char big[100000];
    size_t n = (size_t)snprintf(big, sizeof(big), "GET / HTTP/1.1\r\n" H "A: ");
    memset(big + n, 'x', 3000);
    assert_true(exchange(big, n + 3000, 0));
    assert_int_equal(strncmp(out, "HTTP/1.1 431", 12), 0);
    n = (size_t)snprintf(big, sizeof(big), "GET / HTTP/1.1\r\n" H);
    for (int i = 0; i < 20; i++)
        n += (size_t)snprintf(big + n, sizeof(big) - n, "F%d: 1\r\n", i);
    n += (size_t)snprintf(big + n, sizeof(big) - n, "\r\n");
    assert_true(exchange(big, n, 0));
    assert_int_equal(strncmp(out, "HTTP/1.1 431", 12), 0);
    n = (size_t)snprintf(big, sizeof(big), "GET /");
    memset(big + n, 'x', 600);
    n += 600;
    n += (size_t)snprintf(big + n, sizeof(big) - n, " HTTP/1.1\r\n" H "\r\n");
    assert_true(exchange(big, n, 0));
    assert_int_equal(strncmp(out, "HTTP/1.1 414", 12), 0);
    /* a chunked body that passes the bound */
    n = (size_t)snprintf(big, sizeof(big),
                         "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n7d0\r\n");
    memset(big + n, 'x', 2000);
    assert_true(exchange(big, n + 2000, 0));
    assert_int_equal(strncmp(out, "HTTP/1.1 413", 12), 0);
}

static void connection_limit(void **state)
{
    int fds[4];
    for (int i = 0; i < 4; i++)
        fds[i] = open_client();
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_false(gw_http_adopt(http, pair[1]));
    out_bytes = 0;
    hear(pair[0]);
    out[out_bytes] = '\0';
    assert_int_equal(strncmp(out, "HTTP/1.1 503", 12), 0);
    const char *body = strstr(out, "\r\n\r\n") + 4;
    assert_int_equal(strlen(body), atoi(strstr(out, "Content-Length: ") + 16));
    close(pair[0]);
    for (int i = 0; i < 4; i++)
        close(fds[i]);
    turn();
    assert_int_equal(gw_http_stats(http)->connections, 0);
}

static void hang_up_is_noticed(void **state)
{
    static const char text[] = "GET /wait HTTP/1.1\r\n" H "\r\n";
    for (int half = 0; half < 2; half++) {
        int fd = open_client();
        say(fd, text, sizeof(text) - 1);
        assert_non_null(waiting);
        if (half)
            shutdown(fd, SHUT_WR);
        else
            close(fd);
        turn();
        assert_null(waiting);
        assert_int_equal(gone_why, GW_HTTP_GONE_CLIENT);
        assert_int_equal(gone_count, half + 1);
        if (half)
            close(fd);
    }
    turn();
    assert_int_equal(gw_http_stats(http)->connections, 0);
}

static void hang_up_behind_unread_input(void **state)
{
    static const char text[] = "GET /wait HTTP/1.1\r\n" H "\r\n";
    static char junk[40000];
    int fd = open_client();
    say(fd, text, sizeof(text) - 1);
    assert_non_null(waiting);
    for (int i = 0; i < 10; i++) {
        if (send(fd, junk, sizeof(junk), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
            break;
        turn();
    }
    assert_int_equal(gone_count, 0);
    close(fd);
    turn();
    assert_int_equal(gone_count, 1);
}

static void late_answers_stay_in_order(void **state)
{
    static const char text[] = "GET /wait HTTP/1.1\r\n" H "\r\nGET /2 HTTP/1.1\r\n" H "\r\n";
    int fd = open_client();
    out_bytes = 0;
    say(fd, text, sizeof(text) - 1);
    assert_false(hear(fd));
    assert_int_equal(out_bytes, 0);
    answer(waiting, 200, "first", 5);
    turn();
    assert_false(hear(fd));
    char *first = strstr(out, "first"), *second = strstr(out, "GET /2");
    assert_true(first && second && first < second);
    close(fd);
    turn();
    assert_int_equal(gone_count, 0);
}

static void slow_reader(void **state)
{
    static const char text[] = "GET /wait HTTP/1.1\r\n" H "\r\n";
    static char block[50000];
    int fd = open_client();
    int small = 4096;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    say(fd, text, sizeof(text) - 1);
    memset(block, 'x', sizeof(block));
    gw_http_stream_begin(waiting, 200, "text/event-stream", NULL);
    bool ok = true;
    for (int i = 0; i < 50 && ok; i++) {
        ok = gw_http_stream_write(waiting, block, sizeof(block));
        if (ok)
            turn();
    }
    assert_false(ok);
    assert_int_equal(gone_count, 0); /* never from inside a call */
    turn();
    assert_int_equal(gone_count, 1);
    assert_int_equal(gone_why, GW_HTTP_GONE_SLOW);
    close(fd);
}

/* Sends `text` over and over and reads nothing, until the server takes no more. */
static size_t ask_on(int fd, const char *text, size_t bytes, size_t bytes_max)
{
    size_t sent = 0;
    while (sent < bytes_max) {
        size_t at = sent % bytes;
        ssize_t n = send(fd, text + at, bytes - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0)
            sent += (size_t)n;
        turn();
        if (n < 0)
            break;
    }
    return sent;
}

static size_t input_bytes(void)
{
    return http->live_count ? evbuffer_get_length(bufferevent_get_input(http->live[0]->bev)) : 0;
}

/* Answers that nobody reads hold up the requests behind them, and those the reading of more. */
static void pipelined_without_reading(void **state)
{
    static const char text[] = "GET /large HTTP/1.1\r\n" H "\r\n";
    large_bytes = 40000;
    int fd = open_client();
    size_t sent = ask_on(fd, text, sizeof(text) - 1, 4u << 20);
    assert_true(sent < 2u << 20);
    assert_true(input_bytes() <= 256u << 10);
    /* what the socket holds, one bound of output and one answer */
    assert_in_range(request_count, 1, 20);
    assert_true(conn_output_bytes(http->live[0]) <= (64u << 10) + 2 * large_bytes);
    /* read after all: every request is answered */
    size_t heard = 0;
    for (uint64_t end = loop_now_us(loop) + 20000000;
         request_count < sent / (sizeof(text) - 1) && loop_now_us(loop) < end;) {
        ssize_t n = recv(fd, out, sizeof(out), MSG_DONTWAIT);
        heard += n > 0 ? (size_t)n : 0;
        turn();
    }
    assert_int_equal(request_count, sent / (sizeof(text) - 1));
    assert_true(heard > (request_count - 20) * large_bytes);
    close(fd);
    turn();
    assert_int_equal(gw_http_stats(http)->connections, 0);
}

/* Others have their turn between the requests of one who sent many at once. */
static void pipelined_by_turns(void **state)
{
    static const char text[] = "HEAD / HTTP/1.1\r\n" H "\r\n";
    static char many[200 * sizeof(text)];
    for (int i = 0; i < 200; i++)
        memcpy(many + i * (sizeof(text) - 1), text, sizeof(text) - 1);
    int fd = open_client();
    turn();
    size_t bytes = 200 * (sizeof(text) - 1);
    assert_int_equal(send(fd, many, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
    event_base_loop(loop_base(loop), EVLOOP_NONBLOCK | EVLOOP_ONCE);
    assert_in_range(request_count, 1, 32);
    out_bytes = 0;
    for (int i = 0; i < 20; i++)
        turn();
    assert_int_equal(request_count, 200);
    assert_false(hear(fd));
    assert_int_equal(count_text("HTTP/1.1 200"), 200);
    close(fd);
    turn();
}

/* What comes behind the last request is thrown away, not kept. */
static void input_after_the_last_answer(void **state)
{
    static const char text[] = "GET /large HTTP/1.1\r\n" H "Connection: close\r\n\r\n";
    static char junk[65536];
    large_bytes = 2u << 20;
    int fd = open_client();
    say(fd, text, sizeof(text) - 1);
    assert_int_equal(request_count, 1);
    ask_on(fd, junk, sizeof(junk), 4u << 20);
    assert_int_equal(gw_http_stats(http)->connections, 1);
    assert_true(conn_output_bytes(http->live[0]) > 0);
    assert_true(input_bytes() <= 256u << 10);
    close(fd);
    turn();
}

/* A little now and then is not reading. */
static void reader_below_the_rate(void **state)
{
    static const char text[] = "GET /large HTTP/1.1\r\n" H "\r\n";
    stop();
    options.write_ms = 300;
    options.body_rate_min = 10000000;
    start();
    large_bytes = sizeof(large);
    int fd = open_client();
    say(fd, text, sizeof(text) - 1);
    uint64_t begin_us = loop_now_us(loop), end_us = begin_us + 2000000;
    while (gw_http_stats(http)->connections > 0 && loop_now_us(loop) < end_us) {
        /* 1 MB a second: 4 s for all of it */
        size_t due = (size_t)(loop_now_us(loop) - begin_us);
        while (out_bytes < due && recv(fd, out, 4096, MSG_DONTWAIT) > 0)
            out_bytes += 4096;
        turn();
        usleep(2000);
    }
    assert_int_equal(gw_http_stats(http)->connections, 0);
    close(fd);
}

/* An event above the bound is let through; what comes behind it obeys the bound. */
static void one_large_event(void **state)
{
    static const char text[] = "GET /wait HTTP/1.1\r\n" H "\r\n";
    for (int reads = 0; reads < 2; reads++) {
        int fd = open_client();
        gone_count = 0;
        say(fd, text, sizeof(text) - 1);
        gw_http_stream_begin(waiting, 200, "text/event-stream", NULL);
        assert_true(gw_http_stream_write(waiting, large, 3u << 20));
        turn();
        for (int i = 0; i < 9; i++)
            assert_true(gw_http_stream_write(waiting, large, 10000));
        assert_false(reads == 0 && gw_http_stream_write(waiting, large, 20000));
        size_t heard = 0;
        if (reads) {
            gw_http_stream_end(waiting);
            for (int i = 0; i < 10000 && heard < (3u << 20) + 90000; i++) {
                ssize_t n = recv(fd, out, sizeof(out), MSG_DONTWAIT);
                heard += n > 0 ? (size_t)n : 0;
                turn();
            }
            assert_true(heard > (3u << 20) + 90000);
        }
        turn();
        assert_int_equal(gone_count, reads ? 0 : 1);
        close(fd);
        turn();
    }
}

/* Once it is out, the bound is what it was. */
static void bound_after_a_large_event(void **state)
{
    static const char text[] = "GET /wait HTTP/1.1\r\n" H "\r\n";
    int fd = open_client();
    say(fd, text, sizeof(text) - 1);
    gw_http_stream_begin(waiting, 200, "text/event-stream", NULL);
    assert_true(gw_http_stream_write(waiting, large, 1u << 20));
    for (int i = 0; i < 1000 && conn_output_bytes(waiting) > 0; i++) {
        (void)!recv(fd, out, sizeof(out), MSG_DONTWAIT);
        turn();
    }
    assert_int_equal(conn_output_bytes(waiting), 0);
    while (gw_http_stream_write(waiting, large, 50000)) {
        assert_true(conn_output_bytes(waiting) <= 100100);
        turn();
    }
    turn();
    assert_int_equal(gone_count, 1);
    close(fd);
    turn();
}

static void expect_closed_after(int fd, uint32_t ms, const char *status)
{
    out_bytes = 0;
    turn_ms(ms);
    bool closed = hear(fd);
    out[out_bytes] = '\0';
    assert_true(closed);
    assert_int_equal(strncmp(out, status, strlen(status)), 0);
    close(fd);
    turn();
}

static void deadlines(void **state)
{
    stop();
    options.idle_ms = options.header_ms = options.body_ms = 200;
    options.write_ms = options.linger_ms = 200;
    start();
    int idle = open_client();
    expect_closed_after(idle, 800, "");
    int head = open_client();
    say(head, "GET / HT", 8);
    expect_closed_after(head, 800, "HTTP/1.1 408");
    int body = open_client();
    static const char text[] = "POST / HTTP/1.1\r\n" H "Content-Length: 900\r\n\r\nabc";
    say(body, text, sizeof(text) - 1);
    expect_closed_after(body, 800, "HTTP/1.1 408");
    turn_ms(600);
    assert_int_equal(gw_http_stats(http)->connections, 0);
    /* a reader that stopped: the stream ends by the write deadline */
    int fd = open_client();
    static const char wait[] = "GET /wait HTTP/1.1\r\n" H "\r\n";
    say(fd, wait, sizeof(wait) - 1);
    gw_http_stream_begin(waiting, 200, "text/event-stream", NULL);
    static char block[90000];
    while (gw_http_stats(http) && gone_count == 0) {
        if (!gw_http_stream_write(waiting, block, sizeof(block)))
            break;
        turn();
        if (waiting)
            turn_ms(20);
    }
    turn_ms(800);
    assert_int_equal(gone_count, 1);
    assert_int_equal(gone_why, GW_HTTP_GONE_SLOW);
    close(fd);
}

static void bodies_together(void **state)
{
    stop();
    options.body_bytes_max = 80000;
    start();
    static char big[70000];
    size_t n =
        (size_t)snprintf(big, sizeof(big), "POST / HTTP/1.1\r\n" H "Content-Length: 80000\r\n\r\n");
    memset(big + n, 'x', 60000);
    int a = open_client(), b = open_client();
    say(a, big, n + 60000);
    out_bytes = 0;
    say(b, big, n + 60000);
    turn();
    hear(b);
    out[out_bytes] = '\0';
    assert_int_equal(strncmp(out, "HTTP/1.1 503", 12), 0);
    close(a);
    close(b);
    turn();
    assert_int_equal(gw_http_stats(http)->bodies_bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(framing, setup, teardown),
        cmocka_unit_test_setup_teardown(byte_by_byte, setup, teardown),
        cmocka_unit_test_setup_teardown(head_has_no_body, setup, teardown),
        cmocka_unit_test_setup_teardown(bounds, setup, teardown),
        cmocka_unit_test_setup_teardown(connection_limit, setup, teardown),
        cmocka_unit_test_setup_teardown(hang_up_is_noticed, setup, teardown),
        cmocka_unit_test_setup_teardown(hang_up_behind_unread_input, setup, teardown),
        cmocka_unit_test_setup_teardown(late_answers_stay_in_order, setup, teardown),
        cmocka_unit_test_setup_teardown(slow_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(pipelined_without_reading, setup, teardown),
        cmocka_unit_test_setup_teardown(pipelined_by_turns, setup, teardown),
        cmocka_unit_test_setup_teardown(input_after_the_last_answer, setup, teardown),
        cmocka_unit_test_setup_teardown(reader_below_the_rate, setup, teardown),
        cmocka_unit_test_setup_teardown(one_large_event, setup, teardown),
        cmocka_unit_test_setup_teardown(bound_after_a_large_event, setup, teardown),
        cmocka_unit_test_setup_teardown(deadlines, setup, teardown),
        cmocka_unit_test_setup_teardown(bodies_together, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
