/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_http.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <http_parser.h>

#include "gateway/gw_http_conn.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/net/loop.h"

#define SWEEP_US         250000u
#define ACCEPT_PAUSE_US  100000u
#define INPUT_BYTES_MAX  (128u << 10) /* unread input of a connection */
#define BODY_FIRST_BYTES (16u << 10)
#define LISTEN_BACKLOG   1024
/* Pipelined requests: so many in a turn of the loop, and none while more output than this waits. */
#define TURN_REQUESTS_MAX 16u
#define UNSENT_BYTES_MAX  (64u << 10)

struct gw_http_parser {
    http_parser parser;
};

static bool conn_pump(struct gw_http_request *c);

/* ---- http-parser: checks the head once more and finds the end of the body ---- */

static bool body_room(struct gw_http_request *c, size_t count)
{
    struct gw_http *h = c->http;
    size_t wanted = c->body.count + count;
    if (wanted <= c->body.capacity)
        return true;
    size_t capacity = c->body.capacity ? c->body.capacity * 2 : BODY_FIRST_BYTES;
    while (capacity < wanted)
        capacity *= 2;
    if (c->head.has_length && capacity > c->head.length)
        capacity = (size_t)c->head.length;
    size_t extra = capacity - c->body.capacity;
    if (h->stats.bodies_bytes + extra > h->options.bodies_bytes_max)
        return false;
    char *bytes = realloc(c->body.bytes, capacity);
    if (!bytes)
        return false;
    h->stats.bodies_bytes += extra;
    c->body.bytes = bytes;
    c->body.capacity = capacity;
    return true;
}

static int on_body(http_parser *p, const char *at, size_t count)
{
    struct gw_http_request *c = p->data;
    c->body_seen += count;
    if (c->body_drop)
        return 0;
    if (c->body_seen > c->http->options.body_bytes_max) {
        conn_refuse(c, 413, "the request body is too large");
        return 0;
    }
    if (!body_room(c, count)) {
        conn_refuse(c, 503, "too many request bodies at once");
        return 0;
    }
    memcpy(c->body.bytes + c->body.count, at, count);
    c->body.count += count;
    return 0;
}

static int on_headers_complete(http_parser *p)
{
    p->upgrade = 0; /* Upgrade is ignored: the message is plain HTTP/1.1 */
    return 0;
}

static int on_chunk_header(http_parser *p)
{
    struct gw_http_request *c = p->data;
    if (p->content_length == 0) {
        c->state = CONN_TRAILER;
        gw_trailer_init(&c->trailer);
        http_parser_pause(p, 1);
    }
    return 0;
}

static int on_message_complete(http_parser *p)
{
    struct gw_http_request *c = p->data;
    c->body_done = true;
    return 0;
}

static const http_parser_settings parser_settings = {
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_chunk_header = on_chunk_header,
    .on_message_complete = on_message_complete,
};

/* ---- life of a connection ---- */

void conn_work(struct gw_http_request *c)
{
    if (c->work_listed)
        return;
    c->work_listed = true;
    c->work_next = c->http->work;
    c->http->work = c;
    event_active(c->http->work_event, EV_TIMEOUT, 0);
}

/* The same after others have had their turn: a timer is due only once sockets were looked at. */
static void conn_work_later(struct gw_http_request *c)
{
    if (c->work_listed)
        return;
    c->work_listed = true;
    c->work_next = c->http->work;
    c->http->work = c;
    event_add(c->http->work_event, &(struct timeval){0, 0});
}

static void conn_drop_body(struct gw_http_request *c)
{
    gw_http_give_body(c->http, &c->body);
}

static void conn_enter(struct gw_http_request *c, enum conn_state state)
{
    c->state = state;
    c->since_us = c->http->now_us;
}

/* Too much unread input while the handler works or the client does not read: stop reading, and let
 * the kernel tell of a hang-up.  A read watermark will not do: libevent then calls back without
 * end. */
static void conn_pause_reading(struct gw_http_request *c, bool pause)
{
    if (pause == c->reading_paused)
        return;
    c->reading_paused = pause;
    if (pause) {
        bufferevent_disable(c->bev, EV_READ);
        event_add(c->closed_event, NULL);
    } else {
        event_del(c->closed_event);
        bufferevent_enable(c->bev, EV_READ);
    }
}

static void conn_free(struct gw_http_request *c)
{
    struct gw_http *h = c->http;
    CHECK(c->state != CONN_FREE && !c->open && !c->pumping);
    conn_pause_reading(c, false);
    event_free(c->closed_event);
    bufferevent_free(c->bev); /* closes the socket */
    evbuffer_free(c->pending);
    c->pending = NULL;
    c->closed_event = NULL;
    c->bev = NULL;
    c->fd = -1;
    conn_drop_body(c);
    gw_head_reset(&c->head);
    c->state = CONN_FREE;
    struct gw_http_request *moved = h->live[--h->live_count];
    h->live[c->live_index] = moved;
    moved->live_index = c->live_index;
    h->free_list[h->free_count++] = c;
    h->stats.connections = h->live_count;
}

/* Between two requests of one connection. */
static void conn_next(struct gw_http_request *c)
{
    conn_drop_body(c);
    gw_head_reset(&c->head);
    c->user = NULL;
    c->request_id[0] = '\0';
    c->open = c->answered = c->streaming = c->stream_chunked = false;
    c->body_done = c->body_drop = c->continue_sent = false;
    c->body_seen = 0;
    conn_enter(c, CONN_IDLE);
}

static void conn_start_linger(struct gw_http_request *c)
{
    shutdown(c->fd, SHUT_WR);
    conn_pause_reading(c, false);
    conn_enter(c, c->input_ended ? CONN_DEAD : CONN_LINGER);
}

static void conn_tell_gone(struct gw_http_request *c, enum gw_http_gone why)
{
    if (!c->open)
        return;
    c->open = false;
    if (c->http->options.handler.gone)
        c->http->options.handler.gone(c->http->options.arg, c, why);
}

/* A client that asks on without reading: the next request waits until the output is out. */
static bool conn_held(const struct gw_http_request *c)
{
    return c->state == CONN_IDLE && conn_output_bytes(c) > UNSENT_BYTES_MAX;
}

/* What follows from the flags.  The only place that frees. */
static void conn_settle(struct gw_http_request *c)
{
    for (uint32_t answers = 0;;) {
        if (c->state == CONN_FREE)
            return;
        conn_flush(c);
        if (c->lost || c->state == CONN_DEAD) {
            conn_tell_gone(c, c->lost ? c->lost_why : GW_HTTP_GONE_CLIENT);
            conn_free(c);
            return;
        }
        if (c->answered && c->state != CONN_FLUSH && c->state != CONN_LINGER) {
            if (c->last || (c->body_done && c->http->draining))
                conn_enter(c, CONN_FLUSH);
            else if (c->body_done) {
                conn_next(c);
                if (++answers == TURN_REQUESTS_MAX) {
                    conn_work_later(c);
                    return;
                }
            }
        }
        if (c->state == CONN_FLUSH && conn_output_bytes(c) == 0)
            conn_start_linger(c);
        if (c->state != CONN_DEAD && !conn_pump(c)) {
            conn_flush(c);
            if (!c->lost)
                return;
        }
    }
}

static void on_work(evutil_socket_t fd, short what, void *arg)
{
    struct gw_http *h = arg;
    h->now_us = loop_now_us(h->loop);
    struct gw_http_request *c = h->work;
    h->work = NULL;
    while (c) {
        struct gw_http_request *next = c->work_next;
        c->work_listed = false;
        conn_settle(c);
        c = next;
    }
}

/* ---- reading ---- */

static void body_complete(struct gw_http_request *c)
{
    c->body_done = true;
    if (c->answered)
        return;
    c->http->stats.requests++;
    conn_enter(c, CONN_WAIT);
    c->open = true;
    c->http->options.handler.request(c->http->options.arg, c);
}

static void check_expect(struct gw_http_request *c)
{
    if (c->answered || c->body_done || !c->head.expect_continue)
        return;
    static const char line[] = "HTTP/1.1 100 Continue\r\n\r\n";
    conn_send(c, line, sizeof(line) - 1);
    c->continue_sent = true;
}

static void head_complete(struct gw_http_request *c)
{
    const struct gw_http_options *o = &c->http->options;
    http_parser *p = &c->parser->parser;
    if (c->head.expect_unknown) {
        conn_refuse(c, 417, "the only supported Expect is 100-continue");
        return;
    }
    if (c->head.has_length && c->head.length > o->body_bytes_max) {
        conn_refuse(c, 413, "the request body is too large");
        return;
    }
    conn_enter(c, CONN_BODY);
    bool none = !c->head.chunked && (!c->head.has_length || c->head.length == 0);
    CHECK(none == c->body_done || p->http_errno != HPE_OK);
    if (o->handler.head) {
        c->open = true;
        o->handler.head(o->arg, c);
        c->open = false;
    }
    if (c->body_done) {
        body_complete(c);
        return;
    }
    check_expect(c);
}

/* The parser sees the head as it stood on the wire, rebuilt from the checked pieces. */
static bool parser_takes_head(struct gw_http_request *c)
{
    http_parser *p = &c->parser->parser;
    gw_http_chunk_init(&c->chunk);
    http_parser_init(p, HTTP_REQUEST);
    p->data = c;
    char line[64];
    int n = snprintf(line, sizeof(line), " / HTTP/1.%u\r\n", c->head.minor);
    http_parser_execute(p, &parser_settings, c->head.method, strlen(c->head.method));
    http_parser_execute(p, &parser_settings, line, (size_t)n);
    for (uint32_t i = 0; i < c->head.field_count && p->http_errno == HPE_OK; i++) {
        const struct gw_head_field *f = &c->head.fields[i];
        const char *text = c->head.text;
        http_parser_execute(p, &parser_settings, text + f->name, f->name_bytes);
        http_parser_execute(p, &parser_settings, ": ", 2);
        if (f->value_bytes > 0) /* no bytes mean the end of input to the parser */
            http_parser_execute(p, &parser_settings, text + f->value, f->value_bytes);
        http_parser_execute(p, &parser_settings, "\r\n", 2);
    }
    if (p->http_errno == HPE_OK)
        http_parser_execute(p, &parser_settings, "\r\n", 2);
    return p->http_errno == HPE_OK;
}

static size_t pump_head(struct gw_http_request *c, const char *bytes, size_t count)
{
    size_t used = 0;
    if (c->state == CONN_IDLE)
        conn_enter(c, CONN_HEAD);
    switch (gw_head_feed(&c->head, bytes, count, &used)) {
    case GW_HEAD_MORE:
        break;
    case GW_HEAD_REFUSED:
        conn_refuse(c, c->head.status, c->head.reason);
        break;
    case GW_HEAD_DONE:
        if (parser_takes_head(c))
            head_complete(c);
        else if (HTTP_PARSER_ERRNO(&c->parser->parser) == HPE_INVALID_METHOD)
            conn_refuse(c, 501, "unknown method");
        else
            conn_refuse(c, 400, http_errno_description(HTTP_PARSER_ERRNO(&c->parser->parser)));
        break;
    }
    return used;
}

static size_t pump_body(struct gw_http_request *c, const char *bytes, size_t count)
{
    http_parser *p = &c->parser->parser;
    if (c->head.has_length && count > c->head.length - c->body_seen)
        count = (size_t)(c->head.length - c->body_seen);
    size_t used = http_parser_execute(p, &parser_settings, bytes, count);
    if (!c->head.has_length && !gw_http_chunk_feed(&c->chunk, bytes, used)) {
        if (!c->answered)
            conn_refuse(c, 400, "malformed framing of a chunked request body");
        c->last = true;
        return count;
    }
    if (c->state == CONN_TRAILER) {
        CHECK(HTTP_PARSER_ERRNO(p) == HPE_PAUSED);
        return used;
    }
    if (HTTP_PARSER_ERRNO(p) != HPE_OK) {
        if (!c->answered)
            conn_refuse(c, 400, "malformed chunked request body");
        c->last = true;
        return count;
    }
    if (c->body_done)
        body_complete(c);
    return used;
}

static size_t pump_trailer(struct gw_http_request *c, const char *bytes, size_t count)
{
    size_t used = 0;
    switch (gw_trailer_feed(&c->trailer, bytes, count, &used)) {
    case GW_HEAD_MORE:
        break;
    case GW_HEAD_REFUSED:
        if (!c->answered)
            conn_refuse(c, 400, "malformed trailer after a chunked request body");
        c->last = true;
        break;
    case GW_HEAD_DONE:
        body_complete(c);
        break;
    }
    return used;
}

/* Reads what the state allows.  True: flags changed, settle again. */
static bool conn_pump(struct gw_http_request *c)
{
    if (c->pumping)
        return false;
    c->pumping = true;
    struct evbuffer *input = bufferevent_get_input(c->bev);
    bool settle = false;
    while (!settle && evbuffer_get_length(input) > 0 && c->state != CONN_WAIT && !conn_held(c)) {
        if (c->state == CONN_LINGER || c->state == CONN_FLUSH) {
            evbuffer_drain(input, evbuffer_get_length(input));
            break;
        }
        size_t count = evbuffer_get_contiguous_space(input);
        const char *bytes = (const char *)evbuffer_pullup(input, (ssize_t)count);
        size_t used = c->state == CONN_BODY      ? pump_body(c, bytes, count)
                      : c->state == CONN_TRAILER ? pump_trailer(c, bytes, count)
                                                 : pump_head(c, bytes, count);
        evbuffer_drain(input, used);
        settle = c->answered || c->lost;
        if (settle && c->answered && !c->last && !c->body_done)
            settle = false; /* go on dropping the body */
    }
    conn_pause_reading(c, evbuffer_get_length(input) >= INPUT_BYTES_MAX);
    c->pumping = false;
    return settle;
}

static void on_read(struct bufferevent *bev, void *arg)
{
    struct gw_http_request *c = arg;
    c->http->now_us = loop_now_us(c->http->loop);
    conn_settle(c);
}

static void on_written(struct bufferevent *bev, void *arg)
{
    struct gw_http_request *c = arg;
    c->http->now_us = loop_now_us(c->http->loop);
    conn_settle(c);
}

static void conn_hung_up(struct gw_http_request *c, bool reset)
{
    c->http->now_us = loop_now_us(c->http->loop);
    c->input_ended = true;
    /* Answers that are complete are still sent to a client that has only closed its side. */
    if (!reset && !c->open && c->state != CONN_LINGER && conn_output_bytes(c) > 0) {
        c->last = true;
        conn_enter(c, CONN_FLUSH);
        return;
    }
    c->lost = true;
    c->lost_why = GW_HTTP_GONE_CLIENT;
    conn_work(c);
}

static void on_event(struct bufferevent *bev, short what, void *arg)
{
    if (what & (BEV_EVENT_EOF | BEV_EVENT_ERROR))
        conn_hung_up(arg, (what & BEV_EVENT_ERROR) != 0);
}

static void on_closed(evutil_socket_t fd, short what, void *arg)
{
    conn_hung_up(arg, false);
}

/* ---- accepting ---- */

/* False: no memory; the socket is closed. */
static bool conn_open_events(struct gw_http_request *c, int fd)
{
    struct event_base *base = loop_base(c->http->loop);
    c->bev = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);
    c->closed_event = event_new(base, fd, EV_CLOSED, on_closed, c);
    c->pending = evbuffer_new();
    if (!c->bev || !c->closed_event || !c->pending) {
        if (c->closed_event)
            event_free(c->closed_event);
        if (c->pending)
            evbuffer_free(c->pending);
        if (c->bev)
            bufferevent_free(c->bev);
        else
            close(fd);
        c->bev = NULL;
        return false;
    }
    bufferevent_setcb(c->bev, on_read, on_written, on_event, c);
    bufferevent_set_max_single_read(c->bev, INPUT_BYTES_MAX);
    bufferevent_enable(c->bev, EV_READ | EV_WRITE);
    return true;
}

/* Nothing is read of it, so the id of the request is not known. */
static void refuse_full(struct gw_http *h, int fd)
{
    static const char body[] = "{\"error\":{\"message\":\"too many connections\","
                               "\"type\":\"server_error\",\"param\":null,\"code\":null}}";
    char id[GW_REQUEST_ID_BYTES + 1], full[512], scrap[4096];
    gw_request_id_make(id);
    int n = snprintf(full, sizeof(full),
                     "HTTP/1.1 503 Service Unavailable\r\nServer: %s\r\nDate: %s\r\n"
                     "Content-Type: application/json\r\nContent-Length: %zu\r\nRetry-After: 1\r\n"
                     "x-request-id: %s\r\nConnection: close\r\n\r\n%s",
                     h->options.server, h->date, sizeof(body) - 1, id, body);
    CHECK(n > 0 && (size_t)n < sizeof(full));
    h->stats.refused_full++;
    (void)!recv(fd, scrap, sizeof(scrap), MSG_DONTWAIT);
    (void)!send(fd, full, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
    close(fd);
}

bool gw_http_adopt(struct gw_http *h, int fd)
{
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    h->now_us = loop_now_us(h->loop);
    evutil_make_socket_nonblocking(fd);
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if (h->free_count == 0) {
        refuse_full(h, fd);
        return false;
    }
    struct gw_http_request *c = h->free_list[--h->free_count];
    CHECK_OBJ(c, GW_HTTP_CONN_MAGIC);
    CHECK(c->state == CONN_FREE);
    c->fd = fd;
    if (!conn_open_events(c, fd)) {
        h->free_list[h->free_count++] = c;
        return false;
    }
    c->lost = c->last = c->pumping = c->input_ended = c->reading_paused = false;
    c->added_bytes = c->written_bytes = c->large_end = 0;
    c->progress_us = h->now_us;
    c->live_index = h->live_count;
    h->live[h->live_count++] = c;
    h->stats.accepted++;
    h->stats.connections = h->live_count;
    conn_next(c);
    return true;
}

static void on_accept(struct evconnlistener *l, evutil_socket_t fd, struct sockaddr *address,
                      int address_bytes, void *arg)
{
    (void)gw_http_adopt(arg, fd);
}

static void on_accept_again(void *arg)
{
    struct gw_http *h = arg;
    if (h->listener && !h->draining)
        evconnlistener_enable(h->listener);
}

static void on_accept_error(struct evconnlistener *l, void *arg)
{
    struct gw_http *h = arg;
    log_warn(HTTP, "accept failed", "errno=%d", errno);
    evconnlistener_disable(l);
    loop_timer_start(h->accept_timer, ACCEPT_PAUSE_US, false);
}

/* ---- deadlines ---- */

/* A byte now and then is no progress: a reader keeps the rate that a sender of a body must. */
static bool write_stalled(struct gw_http_request *c)
{
    const struct gw_http_options *o = &c->http->options;
    uint64_t waiting = conn_output_bytes(c);
    uint64_t written = c->added_bytes - waiting;
    uint64_t wanted = (uint64_t)o->body_rate_min * o->write_ms / 1000 + 1;
    if (waiting == 0 || written - c->written_bytes >= wanted) {
        c->written_bytes = written;
        c->progress_us = c->http->now_us;
        return false;
    }
    return c->http->now_us - c->progress_us > (uint64_t)o->write_ms * 1000;
}

static bool body_too_slow(const struct gw_http_request *c, uint64_t age_ms)
{
    const struct gw_http_options *o = &c->http->options;
    if (age_ms <= o->body_ms)
        return false;
    return c->body_seen < (age_ms - o->body_ms) * o->body_rate_min / 1000 + 1;
}

static void sweep_conn(struct gw_http_request *c)
{
    const struct gw_http_options *o = &c->http->options;
    uint64_t age_ms = (c->http->now_us - c->since_us) / 1000;
    if (write_stalled(c)) {
        c->lost = true;
        c->lost_why = GW_HTTP_GONE_SLOW;
    } else if (c->state == CONN_IDLE && !c->http->draining && conn_output_bytes(c) > 0) {
        c->since_us = c->http->now_us; /* not idle before the answer is out */
        return;
    } else if (c->state == CONN_IDLE && (age_ms > o->idle_ms || c->http->draining)) {
        conn_enter(c, CONN_FLUSH);
    } else if (c->state == CONN_HEAD && age_ms > o->header_ms) {
        conn_refuse(c, 408, "the request header did not arrive in time");
    } else if ((c->state == CONN_BODY || c->state == CONN_TRAILER) && body_too_slow(c, age_ms)) {
        c->last = true;
        if (!c->answered)
            conn_refuse(c, 408, "the request body did not arrive in time");
    } else if (c->state == CONN_LINGER && age_ms > o->linger_ms) {
        c->state = CONN_DEAD;
    } else {
        return;
    }
    conn_settle(c);
}

static void on_sweep(void *arg)
{
    struct gw_http *h = arg;
    h->now_us = loop_now_us(h->loop);
    conn_set_date(h);
    for (uint32_t i = h->live_count; i-- > 0;)
        if (i < h->live_count)
            sweep_conn(h->live[i]);
}

/* ---- the server ---- */

struct gw_http *gw_http_create(struct loop *l, const struct gw_http_options *options)
{
    CHECK(options->connections_max > 0 && options->handler.request != NULL);
    struct gw_http *h = mem_take(sizeof(*h));
    h->magic = GW_HTTP_MAGIC;
    h->loop = l;
    h->options = *options;
    uint32_t n = options->connections_max;
    h->conns = mem_take_array(n, sizeof(*h->conns));
    h->free_list = mem_take_array(n, sizeof(struct gw_http_request *));
    h->live = mem_take_array(n, sizeof(struct gw_http_request *));
    struct gw_http_parser *parsers = mem_take_array(n, sizeof(*parsers));
    struct gw_head_limits limits = {options->header_bytes_max, options->header_fields_max,
                                    options->target_bytes_max};
    for (uint32_t i = 0; i < n; i++) {
        struct gw_http_request *c = &h->conns[i];
        c->magic = GW_HTTP_CONN_MAGIC;
        c->http = h;
        c->fd = -1;
        c->parser = &parsers[i];
        gw_head_init(&c->head, &limits);
        h->free_list[n - 1 - i] = c;
    }
    h->free_count = n;
    http_parser_set_max_header_size(options->header_bytes_max * 2 + 1024);
    h->work_event = event_new(loop_base(l), -1, 0, on_work, h);
    CHECK(h->work_event != NULL);
    h->sweep_timer = loop_timer_create(l, on_sweep, h);
    h->accept_timer = loop_timer_create(l, on_accept_again, h);
    loop_timer_start(h->sweep_timer, SWEEP_US, true);
    h->now_us = loop_now_us(l);
    conn_set_date(h);
    return h;
}

void gw_http_destroy(struct gw_http **http_p)
{
    struct gw_http *h = *http_p;
    if (!h)
        return;
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    if (h->listener)
        evconnlistener_free(h->listener);
    while (h->live_count > 0) {
        struct gw_http_request *c = h->live[h->live_count - 1];
        conn_tell_gone(c, GW_HTTP_GONE_STOP);
        conn_free(c);
    }
    event_free(h->work_event);
    loop_timer_destroy(&h->sweep_timer);
    loop_timer_destroy(&h->accept_timer);
    for (uint32_t i = 0; i < h->options.connections_max; i++)
        gw_head_fini(&h->conns[i].head);
    mem_give(h->conns[0].parser);
    mem_give(h->conns);
    mem_give(h->free_list);
    mem_give(h->live);
    mem_give(h);
    *http_p = NULL;
}

static enum err split_address(const char *address, char *host, size_t host_bytes,
                              const char **ret_port)
{
    const char *colon = strrchr(address, ':');
    if (!colon || colon == address || !colon[1])
        return ERR_INVALID;
    size_t n = (size_t)(colon - address);
    if (address[0] == '[' && colon[-1] == ']') {
        address++;
        n -= 2;
    }
    if (n == 0 || n >= host_bytes)
        return ERR_INVALID;
    memcpy(host, address, n);
    host[n] = '\0';
    *ret_port = colon + 1;
    return ERR_OK;
}

enum err gw_http_listen(struct gw_http *h, const char *address, struct err_detail *detail)
{
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    CHECK(h->listener == NULL);
    char host[256];
    const char *port = NULL;
    if (split_address(address, host, sizeof(host), &port) != ERR_OK)
        return err_set(detail, ERR_INVALID, "listen: %s is not HOST:PORT", address);
    struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    int e = getaddrinfo(host, port, &hints, &found);
    if (e != 0)
        return err_set(detail, ERR_INVALID, "listen: %s: %s", address, gai_strerror(e));
    h->listener =
        evconnlistener_new_bind(loop_base(h->loop), on_accept, h,
                                LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC | LEV_OPT_REUSEABLE,
                                LISTEN_BACKLOG, found->ai_addr, (int)found->ai_addrlen);
    int error = errno;
    freeaddrinfo(found);
    if (!h->listener)
        return err_set(detail, error == EADDRINUSE ? ERR_BUSY : ERR_IO, "listen: %s: %s", address,
                       strerror(error));
    evconnlistener_set_error_cb(h->listener, on_accept_error);
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof(bound);
    if (getsockname(evconnlistener_get_fd(h->listener), (struct sockaddr *)&bound, &bytes) == 0)
        h->port = bound.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&bound)->sin6_port)
                                              : ntohs(((struct sockaddr_in *)&bound)->sin_port);
    return ERR_OK;
}

uint32_t gw_http_port(const struct gw_http *h)
{
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    return h->port;
}

void gw_http_drain(struct gw_http *h)
{
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    h->draining = true;
    if (h->listener)
        evconnlistener_disable(h->listener);
}

const struct gw_http_stats *gw_http_stats(const struct gw_http *h)
{
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    return &h->stats;
}

const char *gw_http_method(const struct gw_http_request *r)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    return r->head.method;
}

const char *gw_http_path(const struct gw_http_request *r)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    return r->head.path;
}

const char *gw_http_query(const struct gw_http_request *r)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    return r->head.query;
}

const char *gw_http_field(const struct gw_http_request *r, const char *name)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    return gw_head_value(&r->head, name);
}

const char *gw_http_request_id(struct gw_http_request *r)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    if (r->request_id[0])
        return r->request_id;
    size_t bytes = 0;
    const char *given = gw_head_seen(&r->head, "x-request-id", &bytes);
    if (given && gw_request_id_valid(given, bytes)) {
        memcpy(r->request_id, given, bytes);
        r->request_id[bytes] = '\0';
    } else {
        gw_request_id_make(r->request_id);
    }
    return r->request_id;
}

void gw_http_set_request_id(struct gw_http_request *r, const char *id)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    size_t bytes = strlen(id);
    CHECK(gw_request_id_valid(id, bytes) && !r->streaming && !r->answered);
    memcpy(r->request_id, id, bytes + 1);
}

void gw_http_set_user(struct gw_http_request *r, void *user)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    r->user = user;
}

void *gw_http_user(const struct gw_http_request *r)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    return r->user;
}

void gw_http_take_body(struct gw_http_request *r, struct gw_http_body *ret_body)
{
    CHECK_OBJ(r, GW_HTTP_CONN_MAGIC);
    *ret_body = r->body;
    memset(&r->body, 0, sizeof(r->body));
}

void gw_http_give_body(struct gw_http *h, struct gw_http_body *body)
{
    CHECK_OBJ(h, GW_HTTP_MAGIC);
    CHECK(h->stats.bodies_bytes >= body->capacity);
    h->stats.bodies_bytes -= body->capacity;
    free(body->bytes);
    memset(body, 0, sizeof(*body));
}
