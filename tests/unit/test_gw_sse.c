/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_sse: events, comments and the end of a stream as a client sees them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>

#include <event2/event.h>

#include "gateway/gw_http.h"
#include "gateway/gw_sse.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"

static struct loop *loop;
static struct gw_http *http;
static struct gw_http_request *waiting;
static uint32_t gone_count;
static struct str buffer;
static char out[65536];

static void on_request(void *arg, struct gw_http_request *r)
{
    waiting = r;
}

static void on_gone(void *arg, struct gw_http_request *r, enum gw_http_gone why)
{
    gone_count++;
    waiting = NULL;
}

static int setup(void **state)
{
    const struct gw_http_options options = {
        .server = "t",
        .cors_origin = "",
        .connections_max = 4,
        .header_bytes_max = 2048,
        .header_fields_max = 20,
        .target_bytes_max = 512,
        .body_bytes_max = 1000,
        .bodies_bytes_max = 10000,
        .output_bytes_max = 200000,
        .idle_ms = 60000,
        .header_ms = 60000,
        .body_ms = 60000,
        .body_rate_min = 1,
        .write_ms = 60000,
        .linger_ms = 60000,
        .handler = {NULL, on_request, on_gone, NULL},
    };
    loop = loop_create();
    http = gw_http_create(loop, &options);
    str_init(&buffer, 1 << 20);
    gone_count = 0;
    return 0;
}

static int teardown(void **state)
{
    gw_http_destroy(&http);
    loop_destroy(&loop);
    str_fini(&buffer);
    return 0;
}

static void turn(void)
{
    for (int i = 0; i < 5; i++)
        event_base_loop(loop_base(loop), EVLOOP_NONBLOCK);
}

static int ask(const char *version)
{
    int pair[2];
    char text[100];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_true(gw_http_adopt(http, pair[1]));
    int n = snprintf(text, sizeof(text), "GET / HTTP/%s\r\nHost: a\r\n\r\n", version);
    assert_int_equal(send(pair[0], text, (size_t)n, 0), n);
    turn();
    assert_non_null(waiting);
    return pair[0];
}

static const char *hear(int fd)
{
    turn();
    ssize_t n = recv(fd, out, sizeof(out) - 1, MSG_DONTWAIT);
    out[n > 0 ? n : 0] = '\0';
    return out;
}

static void a_stream(void **state)
{
    struct gw_sse s;
    int fd = ask("1.1");
    gw_sse_begin(&s, waiting, &buffer, "x-a: b\r\n", 1000);
    const char *head = hear(fd);
    assert_non_null(strstr(head, "HTTP/1.1 200 OK\r\n"));
    assert_non_null(strstr(head, "Content-Type: text/event-stream; charset=utf-8\r\n"));
    assert_non_null(strstr(head, "Cache-Control: no-cache\r\n"));
    assert_non_null(strstr(head, "Transfer-Encoding: chunked\r\n"));
    assert_non_null(strstr(head, "x-a: b\r\n"));
    gw_sse_event(&s, "{\"a\":1}", 7);
    gw_sse_event(&s, "{\"b\":2}", 7);
    assert_true(gw_sse_flush(&s, 2000));
    assert_true(gw_sse_flush(&s, 2000)); /* nothing to send: no empty chunk */
    assert_string_equal(hear(fd), "1e\r\ndata: {\"a\":1}\n\ndata: {\"b\":2}\n\n\r\n");
    gw_sse_ping(&s, 5000, 6999);
    assert_string_equal(hear(fd), "");
    gw_sse_ping(&s, 5000, 7000);
    assert_string_equal(hear(fd), "8\r\n: ping\n\n\r\n");
    gw_sse_ping(&s, 5000, 8000);
    gw_sse_ping(&s, 0, 90000); /* switched off */
    assert_string_equal(hear(fd), "");
    gw_sse_event(&s, "{}", 2);
    gw_sse_done(&s);
    assert_string_equal(hear(fd), "18\r\ndata: {}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    assert_int_equal(gone_count, 0);
    close(fd);
    turn();
}

static void old_protocol(void **state)
{
    struct gw_sse s;
    int fd = ask("1.0");
    gw_sse_begin(&s, waiting, &buffer, "", 0);
    assert_null(strstr(hear(fd), "chunked"));
    gw_sse_event(&s, "1", 1);
    gw_sse_done(&s);
    assert_string_equal(hear(fd), "data: 1\n\ndata: [DONE]\n\n");
    assert_int_equal(recv(fd, out, 1, MSG_DONTWAIT), 0);
    close(fd);
    turn();
}

static void a_client_that_does_not_read(void **state)
{
    static char big[20000];
    struct gw_sse s;
    int fd = ask("1.1");
    memset(big, 'x', sizeof(big));
    gw_sse_begin(&s, waiting, &buffer, "", 0);
    bool ok = true;
    for (int i = 0; i < 100 && ok; i++) {
        gw_sse_event(&s, big, sizeof(big));
        ok = gw_sse_flush(&s, 0);
    }
    assert_false(ok);
    assert_int_equal(gone_count, 0);
    gw_sse_event(&s, "1", 1);
    assert_false(gw_sse_flush(&s, 0)); /* dropped, and nothing breaks */
    gw_sse_ping(&s, 1, 10);
    turn();
    assert_int_equal(gone_count, 1);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(old_protocol, setup, teardown),
        cmocka_unit_test_setup_teardown(a_client_that_does_not_read, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
