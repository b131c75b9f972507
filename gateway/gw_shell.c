/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_shell.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_shell_state.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/text/tokenizer.h"
#include "proto/wire.h"

#define TICK_US           100000u
#define DRAIN_GRACE_US    300000u
#define RECONNECT_US      3000000u
#define ANNOUNCE_US       500000u
#define QUEUE_MAX         65536u
#define WIRE_BYTES        (256u << 10)
#define WIRE_BYTES_MAX    (64u << 20)
#define REQUEST_BYTES_MAX ((size_t)256 << 20)
#define REPLY_BYTES_MAX   ((size_t)1 << 30)
#define EVENTS_BYTES_MAX  (64u << 20)

STATIC_CHECK(WIRE_FRAMES_MAX <= BUS_FRAMES_MAX);

const struct metric_row gw_metric_rows[GW_M_COUNT] = {
#define COUNTER(ident, name, labels, help) {METRIC_COUNTER, name, labels, NULL, help},
#define GAUGE(ident, name, labels, help)   {METRIC_GAUGE, name, labels, NULL, help},
#define HISTOGRAM(ident, name, labels, buckets, help)                                              \
    {METRIC_HISTOGRAM, name, labels, &buckets, help},
#include "gateway/gw_metrics.def"
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
};

uint64_t gw_shell_now(struct gw_shell *s)
{
    return loop_now_us(s->loop);
}

void gw_metric_add(struct gw_shell *s, uint32_t metric, double amount)
{
    metric_add(&s->metrics[metric], amount);
}

void gw_metric_observe(struct gw_shell *s, uint32_t metric, double value)
{
    metric_observe(&gw_metric_rows[metric], &s->metrics[metric], value);
}

/* ---- to the router ---- */

/* A beat is said again soon: it does not queue up for a router that is away. */
static enum err send_frames(struct gw_shell *s, const struct msg *m, bool beat)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    arena_reset(&s->wire_out);
    enum err e = s->socket ? wire_encode(&s->wire_out, m, frames, &count) : ERR_CLOSED;
    if (e == ERR_OK) {
        for (uint32_t i = 0; i < count; i++)
            out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
        e = beat ? bus_send_beat(s->socket, out, count) : bus_send(s->socket, NULL, out, count);
    }
    if (e != ERR_OK && !(beat && e == ERR_CLOSED)) {
        gw_metric_add(s, GW_M_unsent, 1);
        log_warn(GATEWAY, "message not sent", "type=%s code=%s", msg_type_name(m->type),
                 err_name(e));
    }
    return e;
}

static enum err send_msg(struct gw_shell *s, const struct msg *m)
{
    return send_frames(s, m, false);
}

/* Prompt, and what is final of the output, in one array. */
static const uint32_t *leg_ids(struct gw_shell *s, const struct gw_prompt *p, uint32_t leg,
                               uint32_t *ret_count)
{
    uint32_t output = gw_core_output_count(s->core, leg);
    *ret_count = p->count + output;
    if (output == 0)
        return p->ids;
    CHECK(*ret_count <= MSG_IDS_MAX);
    if (!s->resubmit_ids)
        s->resubmit_ids = mem_take_array(MSG_IDS_MAX, sizeof(uint32_t));
    memcpy(s->resubmit_ids, p->ids, p->count * sizeof(uint32_t));
    gw_core_output(s->core, leg, s->resubmit_ids + p->count);
    return s->resubmit_ids;
}

static void send_submit(struct gw_shell *s, const struct gw_action *a)
{
    const struct gw_exchange *x = a->owner;
    const struct gw_request *r = &x->job.request;
    const struct gw_prompt *p = &r->prompts[a->choice / r->n];
    struct msg m = {.type = MSG_ROUTER_SUBMIT, .id = a->id};
    m.u.request = r->base;
    m.u.request.prompt_count = p->count;
    m.u.request.ids = leg_ids(s, p, a->leg, &m.u.request.ids_count);
    m.u.request.sampling.choice = a->choice % r->n;
    uint32_t room = x->job.window - p->count;
    uint32_t max = r->max_tokens && r->max_tokens < room ? r->max_tokens : room;
    m.u.request.limits.output_tokens_max = max;
    m.u.request.limits.output_tokens_min = r->min_tokens < max ? r->min_tokens : max;
    m.u.request.attempt = a->again;
    m.u.request.made_by = a->made_by;
    m.u.request.group_index = a->choice;
    m.u.request.group_count = r->choice_count;
    for (uint32_t i = 0; i < r->choice_count; i++)
        m.u.request.group_tokens += r->prompts[i / r->n].count;
    if (send_msg(s, &m) != ERR_OK)
        gw_shell_defer(s, &(struct gw_deferred){.type = DEFER_BUSY, .id = a->id});
}

static void send_cancel(struct gw_shell *s, const struct msg_id *id)
{
    struct msg m = {.type = MSG_ROUTER_CANCEL, .id = *id};
    (void)!send_msg(s, &m); /* the next announcement no longer names it */
}

static void announce(struct gw_shell *s)
{
    struct msg m = {.type = MSG_ROUTER_ANNOUNCE};
    m.u.announce.kind = "gateway";
    m.u.announce.id = s->params->id;
    m.u.announce.incarnation = s->incarnation;
    m.u.announce.live_count = gw_core_live_ids(s->core, s->live_ids);
    m.u.announce.live_ids = s->live_ids;
    (void)!send_frames(s, &m, true);
}

/* ---- the core ---- */

void gw_shell_defer(struct gw_shell *s, const struct gw_deferred *d)
{
    CHECK(s->stepping && s->deferred_count < s->deferred_max);
    s->deferred[s->deferred_count++] = *d;
}

static void run_actions(struct gw_shell *s, const struct gw_event *e)
{
    for (uint32_t i = 0; i < s->actions.count; i++) {
        const struct gw_action *a = &s->actions.items[i];
        if (a->type == GW_ACTION_SUBMIT)
            send_submit(s, a);
        else if (a->type == GW_ACTION_CANCEL)
            send_cancel(s, &a->id);
        else
            gw_exchange_action(s, a, e);
    }
}

static void run_step(struct gw_shell *s, struct gw_event *e)
{
    e->now_us = loop_now_us(s->loop);
    gw_core_step(s->core, e, &s->actions);
    run_actions(s, e);
}

static void run_deferred(struct gw_shell *s, const struct gw_deferred *d)
{
    static const struct msg_submit_reply busy = {
        .code = ERR_BUSY, .retry_after_ms = 1000, .text = "the router's queue is full"};
    struct gw_event e = {.type = GW_EVENT_CUT};
    switch (d->type) {
    case DEFER_CUT:
        e.u.cut.flow = d->flow;
        e.u.cut.choice = d->choice;
        run_step(s, &e);
        break;
    case DEFER_CLOSE:
        e.type = GW_EVENT_CLOSE;
        e.u.close.flow = d->flow;
        run_step(s, &e);
        gw_exchange_action(s,
                           &(struct gw_action){.type = GW_ACTION_FAILED,
                                               .owner = d->exchange,
                                               .code = ERR_INTERNAL,
                                               .text = "the answer is too large to be held"},
                           &e);
        break;
    case DEFER_BUSY:
        e.type = GW_EVENT_SUBMIT_REPLY;
        e.u.submit_reply.id = d->id;
        e.u.submit_reply.reply = &busy;
        run_step(s, &e);
        break;
    case DEFER_COMPLETE:
        gw_exchange_complete(d->exchange);
        break;
    }
}

/* One event, and whatever follows from it; the event's memory lives until the end. */
void gw_shell_step(struct gw_shell *s, struct gw_event *event)
{
    CHECK(!s->stepping);
    s->stepping = true;
    s->deferred_count = 0;
    run_step(s, event);
    for (uint32_t i = 0; i < s->deferred_count; i++) {
        struct gw_deferred d = s->deferred[i];
        run_deferred(s, &d);
    }
    s->stepping = false;
}

/* ---- from the router ---- */

static void copy_text(char *out, size_t bytes, const char *text)
{
    snprintf(out, bytes, "%s", text ? text : "");
}

static void take_router_info(struct gw_shell *s, const struct msg_router_info *m)
{
    struct gw_router *r = &s->router;
    if (!r->known || r->incarnation != m->incarnation)
        log_info(GATEWAY, r->known ? "router restarted" : "router up",
                 "incarnation=%016" PRIx64 " workers_ready=%u", m->incarnation, m->workers_ready);
    uint64_t now_us = loop_now_us(s->loop);
    if (!r->known || r->incarnation != m->incarnation || m->workers_live > 0)
        r->live_us = now_us;
    r->known = true;
    r->seen_us = now_us;
    r->incarnation = m->incarnation;
    r->ready = m->ready;
    r->workers_ready = m->workers_ready;
    r->running = m->running;
    r->waiting = m->waiting;
    r->block_tokens = m->block_tokens;
    r->blocks_total = m->blocks_total;
    r->blocks_free = m->blocks_free;
    copy_text(r->reason, sizeof(r->reason), m->reason);
    copy_text(r->warnings, sizeof(r->warnings), m->warnings);
    if (m->workers_ready == 0)
        return; /* what follows is of the workers: keep the last known */
    r->context_max = m->context_max;
    hex_encode(m->model_fp.bytes, sizeof(m->model_fp.bytes), r->model_fp);
    copy_text(r->quantization, sizeof(r->quantization), m->quantization);
    copy_text(r->spec, sizeof(r->spec), m->spec);
    copy_text(r->config_hash, sizeof(r->config_hash), m->config_hash);
}

static void take_msg(struct gw_shell *s, const struct msg *m)
{
    struct gw_event e = {.type = GW_EVENT_TICK};
    switch (m->type) {
    case MSG_SUBMIT_REPLY:
        e.type = GW_EVENT_SUBMIT_REPLY;
        e.u.submit_reply.id = m->id;
        e.u.submit_reply.reply = &m->u.submit_reply;
        break;
    case MSG_TOKENS_EMITTED:
        e.type = GW_EVENT_TOKENS;
        e.u.tokens.id = m->id;
        e.u.tokens.tokens = &m->u.tokens;
        break;
    case MSG_ROUTER_STATE:
        take_router_info(s, &m->u.router);
        e.type = GW_EVENT_ROUTER;
        e.u.router.incarnation = m->u.router.incarnation;
        e.u.router.reconnected = s->reconnected;
        s->reconnected = false;
        break;
    default:
        gw_metric_add(s, GW_M_malformed, 1);
        log_warn(GATEWAY, "unexpected message dropped", "type=%s", msg_type_name(m->type));
        return;
    }
    gw_shell_step(s, &e);
}

static void on_message(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t count)
{
    struct gw_shell *s = arg;
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail;
    struct msg m;
    CHECK(count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&s->wire_in);
    enum err e = wire_decode(&s->wire_in, in, count, &m, &detail);
    if (e != ERR_OK) {
        gw_metric_add(s, GW_M_malformed, 1);
        log_warn(GATEWAY, "malformed message dropped", "code=%s reason=\"%s\"", err_name(e),
                 detail.text);
        return;
    }
    take_msg(s, &m);
}

/* ---- time ---- */

/* Running answers may go on until the deadline, then they end with an error; what has been written
 * gets a moment to leave. */
static void check_drained(struct gw_shell *s, uint64_t now_us)
{
    if (s->live_count > 0) {
        if (now_us >= s->drain_until_us)
            gw_exchange_fail_all(s, ERR_DRAINING);
        s->idle_since_us = now_us;
        return;
    }
    bool gone = gw_http_stats(s->http)->connections == 0;
    if (s->drained && (gone || now_us - s->idle_since_us >= DRAIN_GRACE_US)) {
        void (*fn)(void *arg) = s->drained;
        s->drained = NULL;
        fn(s->drained_arg);
    }
}

static enum err connect_router(struct gw_shell *s, struct err_detail *detail)
{
    char endpoint[PARAM_STR_BYTES + 32], name[32];
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/router.sock", s->params->run_dir);
    snprintf(name, sizeof(name), "gateway-%u", s->params->id);
    s->connected_us = loop_now_us(s->loop);
    return bus_connect(s->bus, endpoint, name, QUEUE_MAX, on_message, s, &s->socket, detail);
}

/* A router that sees another connection under our name forgets ours without closing it, so ZeroMQ
 * will not connect again by itself: silence is answered with a new connection. */
static void check_connection(struct gw_shell *s, uint64_t now_us)
{
    struct err_detail detail;
    uint64_t heard_us = s->router.seen_us > s->connected_us ? s->router.seen_us : s->connected_us;
    if (s->socket && (!s->router.known || now_us - heard_us < RECONNECT_US))
        return;
    bus_socket_destroy(&s->socket);
    s->reconnected = true;
    log_info(GATEWAY, "router is silent, connecting again", "silent_ms=%" PRIu64,
             (now_us - s->router.seen_us) / 1000);
    if (connect_router(s, &detail) == ERR_OK)
        announce(s);
    else
        log_error(GATEWAY, "no connection to the router", "reason=\"%s\"", detail.text);
}

static void on_tick(void *arg)
{
    struct gw_shell *s = arg;
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    uint64_t now_us = loop_now_us(s->loop);
    struct gw_event e = {.type = GW_EVENT_TICK};
    check_connection(s, now_us);
    gw_shell_step(s, &e);
    if (now_us - s->announced_us >= ANNOUNCE_US) {
        s->announced_us = now_us;
        announce(s);
    }
    gw_exchange_tick(s, now_us);
    gw_status_tick(s->status, now_us);
    if (s->draining)
        check_drained(s, now_us);
}

void gw_shell_hold(struct gw_shell *s, bool hold, uint64_t deadline_us)
{
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    if (s->drained != NULL)
        return; /* the process ends already */
    uint64_t now_us = loop_now_us(s->loop);
    s->draining = hold;
    s->idle_since_us = now_us;
    s->drain_until_us = deadline_us > 0 ? now_us + deadline_us : UINT64_MAX;
}

void gw_shell_drain(struct gw_shell *s, void (*fn)(void *arg), void *arg)
{
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    s->draining = true;
    s->idle_since_us = loop_now_us(s->loop);
    s->drain_until_us = loop_now_us(s->loop) + s->params->drain_ms * 1000ull;
    s->drained = fn;
    s->drained_arg = arg;
    gw_http_drain(s->http);
}

/* ---- start and end ---- */

static enum err take_keys(struct gw_shell *s, struct err_detail *detail)
{
    const char *text = getenv("TANDEM_API_KEYS");
    while (text && *text) {
        text += strspn(text, ", \t");
        size_t n = strcspn(text, ", \t");
        if (n == 0)
            break;
        if (n >= GW_KEY_BYTES_MAX || s->key_count == GW_KEYS_MAX)
            return err_set(detail, ERR_INVALID, "TANDEM_API_KEYS: at most %u keys of %u bytes",
                           GW_KEYS_MAX, GW_KEY_BYTES_MAX - 1);
        memcpy(s->keys[s->key_count], text, n);
        s->keys[s->key_count++][n] = '\0';
        text += n;
    }
    unsetenv("TANDEM_API_KEYS");
    return ERR_OK;
}

static void take_exchanges(struct gw_shell *s)
{
    uint32_t n = s->params->requests_max;
    s->exchanges = mem_take_array(n, sizeof(*s->exchanges));
    s->free_list = mem_take_array(n, sizeof(struct gw_exchange *));
    s->live = mem_take_array(n, sizeof(struct gw_exchange *));
    for (uint32_t i = 0; i < n; i++) {
        gw_request_init(&s->exchanges[i].job.request, REQUEST_BYTES_MAX);
        str_init(&s->exchanges[i].job.answer, REPLY_BYTES_MAX);
        s->free_list[n - 1 - i] = &s->exchanges[i];
    }
    s->free_count = n;
}

static void take_core(struct gw_shell *s)
{
    const struct gw_params *p = s->params;
    struct gw_core_options o = {
        .flows_max = p->requests_max,
        .legs_max = MSG_LIVE_IDS_MAX,
        .output_ids_max = p->output_ids_max,
        .submit_us_max = p->submit_ms * 1000ull,
        .router_silent_us = p->router_silence_ms * 1000ull,
        .router_lost_us = p->router_lost_ms * 1000ull,
        .stall_us = p->stall_ms * 1000ull,
    };
    s->core = gw_core_create(&o);
    s->actions.max = 2 * o.legs_max + 8;
    s->actions.items = mem_take_array(s->actions.max, sizeof(*s->actions.items));
    s->deferred_max = 4 * o.legs_max;
    s->deferred = mem_take_array(s->deferred_max, sizeof(*s->deferred));
    s->live_ids = mem_take_array(o.legs_max, sizeof(*s->live_ids));
}

static struct gw_http *take_http(struct gw_shell *s)
{
    const struct gw_params *p = s->params;
    const struct gw_http_options o = {
        .server = "tandem/" TANDEM_VERSION,
        .cors_origin = p->cors_origin,
        .connections_max = p->connections_max,
        .header_bytes_max = p->header_bytes_max,
        .header_fields_max = p->header_fields_max,
        .target_bytes_max = p->target_bytes_max,
        .body_bytes_max = p->body_bytes_max,
        .bodies_bytes_max = p->bodies_bytes_max,
        .output_bytes_max = p->output_bytes_max,
        .idle_ms = p->idle_ms,
        .header_ms = p->header_ms,
        .body_ms = p->body_ms,
        .body_rate_min = p->body_rate_min,
        .write_ms = p->write_ms,
        .linger_ms = p->linger_ms,
        .handler = {gw_shell_http_head, gw_shell_http_request, gw_shell_http_gone, NULL},
        .arg = s,
    };
    return gw_http_create(s->loop, &o);
}

static struct redis *take_redis(struct gw_shell *s)
{
    struct redis_options o = {.address = ""};
    if (strcmp(s->params->redis, "off") == 0)
        return NULL;
    int n = s->params->redis[0]
                ? snprintf(o.address, sizeof(o.address), "%s", s->params->redis)
                : snprintf(o.address, sizeof(o.address), "unix:%s/redis.sock", s->params->run_dir);
    if (n < 0 || (size_t)n >= sizeof(o.address)) {
        log_error(GATEWAY, "redis address too long, going on without", "");
        return NULL;
    }
    return redis_create(s->loop, &o);
}

static enum err shell_start(struct gw_shell *s, struct err_detail *detail)
{
    const struct gw_params *p = s->params;
    TRY(take_keys(s, detail));
    TRY(gw_checkpoint_load(p->model, p->served_name, p->max_model_len, &s->checkpoint, detail));
    if (s->checkpoint.warning[0])
        log_warn(GATEWAY, "chat template differs", "warning=\"%s\"", s->checkpoint.warning);
    log_info(GATEWAY, "model", "name=%s context_max=%u ids=%u", s->checkpoint.name,
             s->checkpoint.context_max, s->checkpoint.id_count);
    take_exchanges(s);
    take_core(s);
    const struct gw_tokenize_options o = {
        p->threads,        p->thread_queue_max,   p->default_effort,
        p->clear_thinking, gw_exchange_text_done, s};
    s->tokenize = gw_tokenize_create(s->loop, &s->checkpoint, &o);
    s->http = take_http(s);
    s->redis = take_redis(s);
    s->bus = bus_create(s->loop);
    TRY(connect_router(s, detail));
    TRY(gw_status_create(s, &s->status, detail));
    TRY(gw_http_listen(s->http, p->listen, detail));
    announce(s);
    s->announced_us = loop_now_us(s->loop);
    s->tick_timer = loop_timer_create(s->loop, on_tick, s);
    loop_timer_start(s->tick_timer, TICK_US, true);
    return ERR_OK;
}

enum err gw_shell_create(struct loop *l, const struct gw_params *params,
                         struct gw_shell **ret_shell, struct err_detail *detail)
{
    struct gw_shell *s = mem_take(sizeof(*s));
    s->magic = GW_SHELL_MAGIC;
    s->params = params;
    s->loop = l;
    rng_system(&s->incarnation, sizeof(s->incarnation));
    arena_init(&s->wire_in, WIRE_BYTES, WIRE_BYTES_MAX);
    arena_init(&s->wire_out, WIRE_BYTES, WIRE_BYTES_MAX);
    for (uint32_t i = 0; i < GW_SCRATCH_COUNT; i++)
        str_init(&s->scratch[i], EVENTS_BYTES_MAX);
    str_init(&s->sse_buffer, EVENTS_BYTES_MAX);
    str_init(&s->reply, REPLY_BYTES_MAX);
    enum err e = shell_start(s, detail);
    if (e != ERR_OK) {
        gw_shell_destroy(&s);
        return e;
    }
    *ret_shell = s;
    return ERR_OK;
}

static void free_exchanges(struct gw_shell *s)
{
    for (uint32_t i = 0; s->exchanges && i < s->params->requests_max; i++) {
        struct gw_exchange *x = &s->exchanges[i];
        if (x->http)
            gw_http_set_user(x->http, NULL);
        if (x->job.body.bytes && s->http)
            gw_http_give_body(s->http, &x->job.body);
        if (x->answer_open)
            gw_answer_fini(&x->answer);
        gw_request_fini(&x->job.request);
        str_fini(&x->job.answer);
    }
    mem_give(s->exchanges);
    mem_give(s->free_list);
    mem_give(s->live);
}

void gw_shell_destroy(struct gw_shell **shell_p)
{
    struct gw_shell *s = *shell_p;
    if (!s)
        return;
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    loop_timer_destroy(&s->tick_timer);
    gw_tokenize_destroy(&s->tokenize);
    gw_status_destroy(&s->status);
    if (s->http && s->socket)
        gw_exchange_fail_all(s, ERR_DRAINING);
    free_exchanges(s);
    gw_http_destroy(&s->http);
    if (s->socket)
        bus_socket_destroy(&s->socket);
    if (s->bus)
        bus_destroy(&s->bus);
    if (s->redis)
        redis_destroy(&s->redis);
    gw_core_destroy(&s->core);
    gw_checkpoint_fini(&s->checkpoint);
    mem_give(s->actions.items);
    mem_give(s->deferred);
    mem_give(s->live_ids);
    mem_give(s->resubmit_ids);
    arena_fini(&s->wire_in);
    arena_fini(&s->wire_out);
    for (uint32_t i = 0; i < GW_SCRATCH_COUNT; i++)
        str_fini(&s->scratch[i]);
    str_fini(&s->sse_buffer);
    str_fini(&s->reply);
    s->magic = 0;
    mem_give(s);
    *shell_p = NULL;
}
