/* SPDX-License-Identifier: Apache-2.0 */
/* A router without workers, for tests and measurements of the gateway: accepts every request and
 * emits tokens at a given pace.
 *
 *   fake-router RUN_DIR [tokens=N] [piece=N] [interval_us=N] [model=DIR script=FILE]
 *
 * Without a script a stream is N made-up ids (or as many as it asks for, if fewer), piece at a time
 * every interval.  With a script (one text a line, \n for line ends) a request gets the text of the
 * line that its `priority` names, then a stop id; `spec` fixed:K sends K tokens a message. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/text/token_ids.h"
#include "lib/text/tokenizer.h"
#include "proto/wire.h"

#define STREAMS_MAX 8192u
#define LINES_MAX   1024u
#define STATE_US    500000u

struct stream {
    bool used;
    struct msg_id id;
    struct bus_peer peer;
    const struct token_ids *script; /* NULL = made-up ids */
    uint32_t sent, total, prompt, piece;
};

static struct loop *loop;
static struct bus *bus;
static struct bus_socket *socket_router;
static struct arena wire_in, wire_out;
static struct stream *streams;
static uint32_t stream_count; /* slots ever used */
static struct token_ids script[LINES_MAX];
static uint32_t line_count;
static struct bus_peer gateway;
static bool gateway_known;
static uint64_t incarnation, emitted;
static uint32_t tokens = 1000, piece = 1;
static uint64_t interval_us = 10000;

static bool send_msg(const struct bus_peer *peer, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    arena_reset(&wire_out);
    CHECK(wire_encode(&wire_out, m, frames, &count) == ERR_OK);
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    return bus_send(socket_router, peer, out, count) == ERR_OK;
}

static struct stream *find(const struct msg_id *id)
{
    for (uint32_t i = 0; i < stream_count; i++)
        if (streams[i].used && memcmp(&streams[i].id, id, sizeof(*id)) == 0)
            return &streams[i];
    return NULL;
}

static struct stream *take(void)
{
    for (uint32_t i = 0; i < stream_count; i++)
        if (!streams[i].used)
            return &streams[i];
    return stream_count < STREAMS_MAX ? &streams[stream_count++] : NULL;
}

static uint32_t live(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < stream_count; i++)
        n += streams[i].used;
    return n;
}

static void on_submit(const struct bus_peer *peer, const struct msg *m)
{
    const struct msg_request *r = &m->u.request;
    struct stream *s = find(&m->id);
    struct msg reply = {.type = MSG_SUBMIT_REPLY, .id = m->id};
    if (!s)
        s = take();
    reply.u.submit_reply.code = s ? ERR_OK : ERR_BUSY;
    reply.u.submit_reply.text = s ? "" : "full";
    reply.u.submit_reply.retry_after_ms = s ? 0 : 1000;
    if (s) {
        *s = (struct stream){.used = true, .id = m->id, .peer = *peer, .piece = piece};
        s->prompt = r->prompt_count;
        s->sent = r->ids_count - r->prompt_count;
        s->total = tokens;
        if (line_count && r->priority >= 0 && (uint32_t)r->priority < line_count) {
            s->script = &script[r->priority];
            s->total = (uint32_t)s->script->count;
        }
        if (r->spec && strncmp(r->spec, "fixed:", 6) == 0)
            s->piece = (uint32_t)atoi(r->spec + 6) ? (uint32_t)atoi(r->spec + 6) : 1000;
        if (s->total > r->limits.output_tokens_max)
            s->total = r->limits.output_tokens_max;
        reply.u.submit_reply.concurrency = live();
    }
    (void)send_msg(peer, &reply);
}

static void on_message(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t count)
{
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail;
    struct msg m;
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&wire_in);
    if (wire_decode(&wire_in, in, count, &m, &detail) != ERR_OK) {
        fprintf(stderr, "malformed: %s\n", detail.text);
        return;
    }
    gateway = *peer;
    gateway_known = true;
    if (m.type == MSG_ROUTER_SUBMIT) {
        on_submit(peer, &m);
    } else if (m.type == MSG_ROUTER_CANCEL) {
        struct stream *s = find(&m.id);
        if (s)
            s->used = false;
    }
}

static void emit(struct stream *s)
{
    uint32_t ids[MSG_EMIT_IDS_MAX], n = s->total - s->sent;
    if (n > s->piece)
        n = s->piece;
    if (n > MSG_EMIT_IDS_MAX)
        n = MSG_EMIT_IDS_MAX;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = s->script ? s->script->ids[s->sent + i] : 300 + (s->sent + i) * 7 % 500;
    struct msg m = {.type = MSG_TOKENS_EMITTED, .id = s->id};
    m.u.tokens.seq = s->sent;
    m.u.tokens.count = n;
    m.u.tokens.ids = ids;
    if (s->sent + n == s->total) {
        bool whole = s->script && s->total == s->script->count;
        m.u.tokens.finish = whole ? MSG_FINISH_STOP : MSG_FINISH_LENGTH;
        m.u.tokens.has_receipt = true;
        m.u.tokens.receipt = (struct msg_receipt){.prompt_tokens = s->prompt,
                                                  .output_tokens = s->total,
                                                  .steps = s->total,
                                                  .concurrency = 1,
                                                  .spec = "off",
                                                  .config_hash = "fake"};
    }
    if (!send_msg(&s->peer, &m))
        return; /* full: the next interval tries again */
    s->sent += n;
    emitted += n;
    if (m.u.tokens.finish)
        s->used = false;
}

static void on_interval(void *arg)
{
    for (uint32_t i = 0; i < stream_count; i++)
        if (streams[i].used)
            emit(&streams[i]);
}

static void on_state(void *arg)
{
    static uint64_t before;
    struct msg m = {.type = MSG_ROUTER_STATE};
    m.u.router = (struct msg_router_info){.incarnation = incarnation,
                                          .ready = true,
                                          .reason = "",
                                          .workers_ready = 1,
                                          .workers_live = 1,
                                          .running = live(),
                                          .context_max = 1048576,
                                          .quantization = "none (fake router)",
                                          .spec = "off",
                                          .config_hash = "fake",
                                          .warnings = ""};
    if (gateway_known)
        (void)send_msg(&gateway, &m);
    if (emitted != before)
        fprintf(stderr, "live=%u tokens_per_s=%" PRIu64 "\n", live(),
                (emitted - before) * 1000000 / STATE_US);
    before = emitted;
}

static void load_script(const char *model, const char *path)
{
    char name[4096];
    static char line[1 << 20];
    struct tokenizer *t = NULL;
    struct err_detail detail;
    uint32_t stop = 0;
    snprintf(name, sizeof(name), "%s/tokenizer.json", model);
    if (tokenizer_load(name, NULL, &t, &detail) != ERR_OK)
        die("%s", detail.text);
    CHECK(tokenizer_find(t, "<|user|>", 8, &stop));
    FILE *f = fopen(path, "r");
    if (!f)
        die("cannot open %s", path);
    while (line_count < LINES_MAX && fgets(line, sizeof(line), f)) {
        size_t n = 0;
        for (const char *p = line; *p && *p != '\n'; p++) {
            bool line_end = p[0] == '\\' && p[1] == 'n';
            line[n++] = line_end ? '\n' : *p;
            p += line_end;
        }
        struct token_ids *ids = &script[line_count++];
        token_ids_init(ids, 1 << 20);
        CHECK(tokenizer_encode(t, line, n, true, ids) == ERR_OK);
        token_ids_add(ids, stop);
    }
    fclose(f);
    tokenizer_destroy(&t);
}

static void on_stop(void *arg)
{
    loop_stop(loop);
}

int main(int argc, char **argv)
{
    const char *model = NULL, *path = NULL;
    char endpoint[4096];
    struct err_detail detail;
    log_init("fake-router", LOG_WARN);
    if (argc < 2)
        die("usage: fake-router RUN_DIR [name=value ...]");
    for (int i = 2; i < argc; i++) {
        if (strncmp(argv[i], "tokens=", 7) == 0)
            tokens = (uint32_t)atoi(argv[i] + 7);
        else if (strncmp(argv[i], "piece=", 6) == 0)
            piece = (uint32_t)atoi(argv[i] + 6);
        else if (strncmp(argv[i], "interval_us=", 12) == 0)
            interval_us = (uint64_t)atoll(argv[i] + 12);
        else if (strncmp(argv[i], "model=", 6) == 0)
            model = argv[i] + 6;
        else if (strncmp(argv[i], "script=", 7) == 0)
            path = argv[i] + 7;
        else
            die("%s: unknown", argv[i]);
    }
    if (tokens == 0 || piece == 0 || interval_us == 0)
        die("tokens, piece and interval_us are above 0");
    if (path)
        load_script(model ? model : "deploy/demo", path);
    rng_system(&incarnation, sizeof(incarnation));
    streams = mem_take_array(STREAMS_MAX, sizeof(*streams));
    arena_init(&wire_in, 256u << 10, 64u << 20);
    arena_init(&wire_out, 256u << 10, 64u << 20);
    loop = loop_create();
    bus = bus_create(loop);
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/router.sock", argv[1]);
    if (bus_bind(bus, endpoint, 65536, on_message, NULL, &socket_router, &detail) != ERR_OK)
        die("%s", detail.text);
    struct loop_timer *interval = loop_timer_create(loop, on_interval, NULL);
    struct loop_timer *state = loop_timer_create(loop, on_state, NULL);
    loop_timer_start(interval, interval_us, true);
    loop_timer_start(state, STATE_US, true);
    loop_on_stop_signal(loop, on_stop, NULL);
    loop_run(loop);
    loop_timer_destroy(&interval);
    loop_timer_destroy(&state);
    bus_socket_destroy(&socket_router);
    bus_destroy(&bus);
    loop_destroy(&loop);
    return 0;
}
