/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP layer on a socket pair: bytes of a client, cut as the first byte says, with handlers that
 * answer at once, later, in pieces or never.  After the client has gone nothing may be left. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <event2/event.h>

#include "gateway/gw_http.h"
#include "lib/base/check.h"
#include "lib/net/loop.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct loop *loop;
static struct gw_http *http;
static struct gw_http_request *waiting;
static uint32_t open_count;

static void answer(struct gw_http_request *r, int status)
{
    gw_http_reply(r, &(struct gw_http_reply){
                         .status = status, .body = "{}", .body_bytes = 2, .close = status == 400});
}

static void on_head(void *arg, struct gw_http_request *r)
{
    if (gw_http_path(r)[1] == 'h')
        answer(r, gw_http_field(r, "x-close") ? 400 : 404);
}

static void on_request(void *arg, struct gw_http_request *r)
{
    struct gw_http_body body;
    char what = gw_http_path(r)[0] ? gw_http_path(r)[1] : '\0';
    gw_http_take_body(r, &body);
    CHECK(body.count <= 4096);
    gw_http_give_body(http, &body);
    if (what == 'w') {
        waiting = r;
        open_count++;
    } else if (what == 's') {
        gw_http_stream_begin(r, 200, "text/event-stream", NULL);
        for (int i = 0; i < 3; i++)
            (void)gw_http_stream_write(r, "data: x\n\n", 9);
        gw_http_stream_end(r);
    } else {
        answer(r, 200);
    }
}

static void on_gone(void *arg, struct gw_http_request *r, enum gw_http_gone why)
{
    CHECK(r == waiting && open_count > 0);
    waiting = NULL;
    open_count--;
}

static void start(void)
{
    const struct gw_http_options options = {
        .server = "fuzz",
        .cors_origin = "*",
        .connections_max = 2,
        .header_bytes_max = 2048,
        .header_fields_max = 16,
        .target_bytes_max = 256,
        .body_bytes_max = 4096,
        .bodies_bytes_max = 8192,
        .output_bytes_max = 65536,
        .idle_ms = 60000,
        .header_ms = 60000,
        .body_ms = 60000,
        .body_rate_min = 1,
        .write_ms = 60000,
        .linger_ms = 60000,
        .handler = {on_head, on_request, on_gone, NULL},
    };
    loop = loop_create();
    http = gw_http_create(loop, &options);
}

static void turn(void)
{
    event_base_loop(loop_base(loop), EVLOOP_NONBLOCK);
}

static void drain(int fd)
{
    char block[4096];
    while (recv(fd, block, sizeof(block), MSG_DONTWAIT) > 0)
        ;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int pair[2];
    if (!loop)
        start();
    if (size < 2 || size > 16384 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        return 0;
    CHECK(gw_http_adopt(http, pair[1]));
    size_t step = data[0] % 64 ? data[0] % 64 : size;
    bool finish_later = data[0] & 64;
    for (size_t at = 1; at < size; at += step) {
        size_t n = size - at < step ? size - at : step;
        if (send(pair[0], data + at, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
            break;
        turn();
        if (waiting && finish_later) {
            open_count--;
            struct gw_http_request *r = waiting;
            waiting = NULL;
            answer(r, 200);
            turn();
        }
        drain(pair[0]);
    }
    close(pair[0]);
    for (int i = 0; i < 8 && gw_http_stats(http)->connections > 0; i++)
        turn();
    CHECK(gw_http_stats(http)->connections == 0);
    CHECK(gw_http_stats(http)->bodies_bytes == 0);
    CHECK(open_count == 0 && waiting == NULL);
    return 0;
}
