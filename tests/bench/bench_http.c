/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_http.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/event_struct.h>
#include <http_parser.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "tests/bench/bench_sse.h"

#define BENCH_CLIENT_MAGIC 0x42434c49u
#define BENCH_SLOT_MAGIC   0x42534c54u
#define BENCH_EVENT_BYTES  ((size_t)1 << 20)
#define BENCH_ERROR_BYTES  ((size_t)64 << 10)
#define BENCH_ARENA_BYTES  ((size_t)256 << 20)
#define BENCH_READ_BYTES   65536u
#define BENCH_HEADER_BYTES 64u

struct slot {
    uint32_t magic;
    uint32_t index;
    bool busy;
    bool reading; /* inside the parser: the connection must not be freed */
    bool over;
    struct bench_client *client;
    struct bufferevent *connection;
    struct event refused; /* reports a connect that failed at once, from the loop */
    const struct bench_sink *sink;
    struct http_parser parser;
    char header_name[BENCH_HEADER_BYTES], header_value[BENCH_HEADER_BYTES];
    bool header_in_value, is_event_stream;
    struct bench_sse sse;
    struct str error_body;
    uint64_t now_us; /* of the read being parsed */
    struct bench_result result;
};

struct bench_client {
    uint32_t magic;
    uint32_t slots_max;
    uint32_t busy_count;
    struct loop *loop;
    const struct bench_target *target;
    char *api_key; /* NULL = none */
    struct timeval silence;
    struct arena arena; /* of the event being read */
    struct slot *slots;
    char *piece; /* bytes just read */
};

static void set_fault(struct slot *s, enum bench_fault fault, const char *format, ...)
    PRINTF_LIKE(3, 4);

/* The first fault is the one that counts: later ones follow from it. */
static void set_fault(struct slot *s, enum bench_fault fault, const char *format, ...)
{
    CHECK_OBJ(s, BENCH_SLOT_MAGIC);
    if (s->result.fault != BENCH_NONE)
        return;
    s->result.fault = fault;
    va_list args;
    va_start(args, format);
    vsnprintf(s->result.detail, sizeof(s->result.detail), format, args);
    va_end(args);
}

static void finish(struct slot *s)
{
    CHECK_OBJ(s, BENCH_SLOT_MAGIC);
    CHECK(s->busy && !s->reading);
    event_del(&s->refused);
    if (s->connection != NULL)
        bufferevent_free(s->connection);
    s->connection = NULL;
    s->busy = false;
    s->client->busy_count--;
    s->result.end_us = loop_now_us(s->client->loop);
    struct bench_result result = s->result; /* on_end may start the slot again */
    s->sink->on_end(s->sink->arg, s->index, &result);
}

/* ---- one event ---- */

static void take_tokens(struct slot *s, const struct bench_chunk *chunk)
{
    struct bench_result *r = &s->result;
    r->ids_seen |= chunk->has_ids;
    if (!chunk->has_text && chunk->id_count == 0)
        return;
    /* Text without ids in a stream with ids was counted with the ids before it. */
    uint32_t tokens = chunk->has_ids ? chunk->id_count : r->ids_seen ? 0 : 1;
    uint64_t before_us = r->last_us;
    if (r->first_us == 0) {
        r->first_us = s->now_us;
        r->first_token_count = tokens;
    }
    r->last_us = s->now_us;
    r->event_count++;
    r->token_count += tokens;
    s->sink->on_tokens(s->sink->arg, s->index, before_us, s->now_us, tokens);
}

static bool on_event(void *arg, const char *data, size_t bytes)
{
    struct slot *s = arg;
    struct bench_result *r = &s->result;
    struct bench_chunk chunk;
    struct err_detail detail = {{0}};
    if (s->over)
        return false;
    if (r->done_seen) {
        set_fault(s, BENCH_PROTOCOL, "an event after [DONE]");
        return false;
    }
    if (bench_chunk_parse(&s->client->arena, data, bytes, &r->text_hash, &chunk, &detail) !=
        ERR_OK) {
        set_fault(s, BENCH_PROTOCOL, "%.*s", BENCH_TEXT_BYTES - 1, detail.text);
        return false;
    }
    if (chunk.is_error)
        set_fault(s, BENCH_ERROR_EVENT, "%s", chunk.detail);
    r->done_seen = chunk.done;
    if (chunk.finish[0] != '\0')
        memcpy(r->finish, chunk.finish, sizeof(r->finish));
    if (chunk.has_usage) {
        r->has_usage = true;
        r->prompt_tokens = chunk.prompt_tokens;
        r->completion_tokens = chunk.completion_tokens;
        r->cached_tokens = chunk.cached_tokens;
    }
    if (chunk.has_receipt) {
        r->has_receipt = true;
        r->receipt = chunk.receipt;
    }
    take_tokens(s, &chunk);
    return !s->over;
}

/* ---- HTTP ---- */

static void end_header(struct slot *s)
{
    if (strcasecmp(s->header_name, "content-type") == 0)
        s->is_event_stream = strncasecmp(s->header_value, "text/event-stream", 17) == 0;
    s->header_name[0] = s->header_value[0] = '\0';
    s->header_in_value = false;
}

static void append(char *text, const char *at, size_t bytes)
{
    size_t have = strlen(text), room = BENCH_HEADER_BYTES - 1 - have;
    memcpy(text + have, at, bytes < room ? bytes : room);
    text[have + (bytes < room ? bytes : room)] = '\0';
}

static int on_header_field(http_parser *parser, const char *at, size_t bytes)
{
    struct slot *s = parser->data;
    if (s->header_in_value)
        end_header(s);
    append(s->header_name, at, bytes);
    return 0;
}

static int on_header_value(http_parser *parser, const char *at, size_t bytes)
{
    struct slot *s = parser->data;
    s->header_in_value = true;
    append(s->header_value, at, bytes);
    return 0;
}

static int on_headers_complete(http_parser *parser)
{
    struct slot *s = parser->data;
    end_header(s);
    if (parser->status_code >= 100 && parser->status_code < 200)
        return 0;
    s->result.http_status = (int)parser->status_code;
    if (parser->status_code == 200 && !s->is_event_stream) {
        set_fault(s, BENCH_PROTOCOL, "status 200, but no text/event-stream");
        return -1;
    }
    return 0;
}

static int on_body(http_parser *parser, const char *at, size_t bytes)
{
    struct slot *s = parser->data;
    if (s->result.http_status != 200) {
        str_add(&s->error_body, at, bytes); /* past its bound the rest is left away */
        return 0;
    }
    if (bench_sse_feed(&s->sse, at, bytes) != ERR_OK)
        set_fault(s, BENCH_PROTOCOL, "an event of more than %zu bytes", BENCH_EVENT_BYTES);
    /* An error event is followed by [DONE]; all other faults end the reading. */
    return s->over || (s->sse.over && s->result.fault != BENCH_NONE) ? -1 : 0;
}

static int on_message_complete(http_parser *parser)
{
    struct slot *s = parser->data;
    if (s->result.http_status == 0) /* 100 Continue: the answer comes after it */
        return 0;
    s->over = true;
    if (s->result.http_status != 200) {
        char text[BENCH_TEXT_BYTES] = "";
        if (s->error_body.bytes > 0)
            (void)bench_error_text(&s->client->arena, s->error_body.text, s->error_body.bytes,
                                   text);
        set_fault(s, BENCH_HTTP, "status %d: %.*s", s->result.http_status, 180, text);
    } else if (!s->result.done_seen) {
        set_fault(s, BENCH_CUT, "the stream ended without [DONE]");
    } else if (!bench_sse_clean(&s->sse)) {
        set_fault(s, BENCH_CUT, "the stream ended inside an event");
    }
    return 0;
}

static const struct http_parser_settings parser_settings = {
    .on_header_field = on_header_field,
    .on_header_value = on_header_value,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

static void parse(struct slot *s, const char *bytes, size_t count)
{
    s->reading = true;
    size_t used = http_parser_execute(&s->parser, &parser_settings, bytes, count);
    s->reading = false;
    enum http_errno error = HTTP_PARSER_ERRNO(&s->parser);
    if (!s->over && (used != count || error != HPE_OK || s->parser.upgrade)) {
        if (count == 0)
            set_fault(s, BENCH_CUT, "closed in the middle");
        else
            set_fault(s, BENCH_PROTOCOL, "no HTTP response: %s", http_errno_description(error));
        s->over = true;
    }
}

static void on_readable(struct bufferevent *connection, void *arg)
{
    struct slot *s = arg;
    CHECK_OBJ(s, BENCH_SLOT_MAGIC);
    CHECK(s->busy && s->connection == connection);
    s->now_us = loop_now_us(s->client->loop);
    size_t got;
    while (!s->over && (got = bufferevent_read(connection, s->client->piece, BENCH_READ_BYTES)) > 0)
        parse(s, s->client->piece, got);
    if (s->over)
        finish(s);
}

static void on_connection_event(struct bufferevent *connection, short what, void *arg)
{
    struct slot *s = arg;
    CHECK_OBJ(s, BENCH_SLOT_MAGIC);
    CHECK(s->busy && s->connection == connection);
    if (what & BEV_EVENT_CONNECTED) {
        bufferevent_enable(connection, EV_READ | EV_WRITE);
        return;
    }
    bool answered = s->result.http_status != 0;
    if (what & BEV_EVENT_TIMEOUT) {
        set_fault(s, BENCH_SILENT, "not a byte for %ld s", (long)s->client->silence.tv_sec);
    } else if (what & BEV_EVENT_EOF) {
        s->now_us = loop_now_us(s->client->loop);
        if (answered)
            parse(s, NULL, 0); /* a body may end with the connection */
        else
            set_fault(s, BENCH_CUT, "closed without an answer");
    } else {
        int error = EVUTIL_SOCKET_ERROR();
        set_fault(s, answered ? BENCH_CUT : BENCH_CONNECT, "%s", strerror(error));
    }
    finish(s);
}

static void on_refused(evutil_socket_t fd, short what, void *arg)
{
    struct slot *s = arg;
    CHECK_OBJ(s, BENCH_SLOT_MAGIC);
    finish(s);
}

/* ---- the client ---- */

struct bench_client *bench_client_create(struct loop *loop, const struct bench_target *target,
                                         const char *api_key, uint32_t slots_max,
                                         uint64_t silence_us_max)
{
    CHECK(slots_max > 0 && silence_us_max > 0);
    struct bench_client *c = mem_take(sizeof(*c));
    c->magic = BENCH_CLIENT_MAGIC;
    c->loop = loop;
    c->target = target;
    c->slots_max = slots_max;
    c->silence.tv_sec = (time_t)(silence_us_max / 1000000u);
    c->silence.tv_usec = (suseconds_t)(silence_us_max % 1000000u);
    if (api_key != NULL) {
        c->api_key = mem_take(strlen(api_key) + 1);
        memcpy(c->api_key, api_key, strlen(api_key));
    }
    arena_init(&c->arena, (size_t)64 << 10, BENCH_ARENA_BYTES);
    c->piece = mem_take(BENCH_READ_BYTES);
    c->slots = mem_take_array(slots_max, sizeof(*c->slots));
    for (uint32_t i = 0; i < slots_max; i++) {
        struct slot *s = &c->slots[i];
        s->magic = BENCH_SLOT_MAGIC;
        s->index = i;
        s->client = c;
        bench_sse_init(&s->sse, BENCH_EVENT_BYTES, on_event, s);
        str_init(&s->error_body, BENCH_ERROR_BYTES);
        CHECK(evtimer_assign(&s->refused, loop_base(loop), on_refused, s) == 0);
    }
    return c;
}

void bench_client_destroy(struct bench_client **client_p)
{
    struct bench_client *c = *client_p;
    if (c == NULL)
        return;
    CHECK_OBJ(c, BENCH_CLIENT_MAGIC);
    CHECK(c->busy_count == 0);
    for (uint32_t i = 0; i < c->slots_max; i++) {
        bench_sse_fini(&c->slots[i].sse);
        str_fini(&c->slots[i].error_body);
    }
    arena_fini(&c->arena);
    mem_give(c->slots);
    mem_give(c->piece);
    mem_give(c->api_key);
    c->magic = 0;
    mem_give(c);
    *client_p = NULL;
}

static void write_request(struct slot *s, const char *body, size_t bytes)
{
    const struct bench_client *c = s->client;
    struct evbuffer *out = bufferevent_get_output(s->connection);
    evbuffer_add_printf(out,
                        "POST %s/v1/chat/completions HTTP/1.1\r\nHost: %s\r\n"
                        "User-Agent: tandem-bench/" TANDEM_VERSION "\r\n"
                        "Accept: text/event-stream\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\nConnection: close\r\n",
                        c->target->prefix, c->target->host, bytes);
    if (c->api_key != NULL)
        evbuffer_add_printf(out, "Authorization: Bearer %s\r\n", c->api_key);
    evbuffer_add(out, "\r\n", 2);
    CHECK(evbuffer_add(out, body, bytes) == 0);
}

void bench_client_start(struct bench_client *c, uint32_t slot, const char *body, size_t bytes,
                        uint64_t due_us, const struct bench_sink *sink)
{
    CHECK_OBJ(c, BENCH_CLIENT_MAGIC);
    CHECK(slot < c->slots_max && !c->slots[slot].busy);
    struct slot *s = &c->slots[slot];
    s->busy = true;
    s->over = s->header_in_value = s->is_event_stream = false;
    s->header_name[0] = s->header_value[0] = '\0';
    s->sink = sink;
    c->busy_count++;
    memset(&s->result, 0, sizeof(s->result));
    s->result.text_hash = BENCH_HASH_START;
    s->result.start_us = loop_now_us(c->loop);
    s->result.due_us = due_us;
    CHECK(due_us <= s->result.start_us);
    bench_sse_reset(&s->sse);
    str_clear(&s->error_body);
    http_parser_init(&s->parser, HTTP_RESPONSE);
    s->parser.data = s;

    s->connection = bufferevent_socket_new(loop_base(c->loop), -1, BEV_OPT_CLOSE_ON_FREE);
    CHECK(s->connection != NULL);
    bufferevent_setcb(s->connection, on_readable, NULL, on_connection_event, s);
    bufferevent_set_timeouts(s->connection, &c->silence, &c->silence);
    write_request(s, body, bytes);
    struct sockaddr_storage address = c->target->address;
    if (bufferevent_socket_connect(s->connection, (struct sockaddr *)&address,
                                   (int)c->target->address_bytes) != 0) {
        set_fault(s, BENCH_CONNECT, "%s", strerror(errno));
        struct timeval now = {0, 0};
        CHECK(evtimer_add(&s->refused, &now) == 0);
    }
}

bool bench_client_busy(const struct bench_client *c, uint32_t slot)
{
    CHECK_OBJ(c, BENCH_CLIENT_MAGIC);
    CHECK(slot < c->slots_max);
    return c->slots[slot].busy;
}

void bench_client_cancel(struct bench_client *c, uint32_t slot, enum bench_fault fault)
{
    CHECK_OBJ(c, BENCH_CLIENT_MAGIC);
    CHECK(slot < c->slots_max && c->slots[slot].busy);
    struct slot *s = &c->slots[slot];
    set_fault(s, fault, "ended by the client");
    s->over = true;
    if (!s->reading)
        finish(s);
}
