/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_shell.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/rng.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"
#include "proto/wire.h"
#include "router/rt_core.h"
#include "router/rt_shell_look.h"
#include "router/rt_params.h"
#include "router/rt_shell_status.h"
#include "router/rt_table.h"

#define SHELL_MAGIC    0x52545348u
#define TICK_US        50000u
#define QUEUE_MAX      65536u
#define WIRE_BYTES     (256u << 10)
#define WIRE_BYTES_MAX (64u << 20)
#define LATER_MAX      1024u

STATIC_CHECK(RT_PEER_BYTES_MAX == BUS_PEER_BYTES_MAX);
STATIC_CHECK(WIRE_FRAMES_MAX <= BUS_FRAMES_MAX);

struct rt_shell {
    uint32_t magic;
    const struct rt_params *params;
    struct loop *loop;
    struct bus *bus;
    struct bus_socket *socket;
    struct redis *redis;
    struct rt_shell_status *status;
    struct loop_timer *tick;
    struct arena wire_in;  /* one message */
    struct arena wire_out; /* one message */
    struct rt_core *core;
    struct rt_actions *actions;
    /* What failed while actions were carried out; each becomes an event afterwards. */
    uint32_t later_count;
    struct rt_event later[LATER_MAX];
    struct rt_shell_look *look;  /* NULL: without Redis */
    struct loop_timer *look_end; /* the core looks at questions that nobody answered */
    uint64_t malformed;
    bool closing;
    char endpoint[PARAM_STR_BYTES + 32];
};

static void peer_text(const struct rt_peer *peer, char ret_text[2 * RT_PEER_BYTES_MAX + 1])
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < peer->count; i++) {
        uint8_t b = peer->bytes[i];
        ret_text[at++] = b > ' ' && b < 0x7f && b != '"' ? (char)b : '?';
    }
    ret_text[at] = '\0';
}

static void trace(const struct rt_trace *t)
{
    char peer[2 * RT_PEER_BYTES_MAX + 1];
    uint64_t id = 0;
    peer_text(&t->peer, peer);
    for (uint32_t i = 0; i < 8; i++)
        id = id << 8 | t->id.bytes[i];
    switch (t->level) {
    case RT_TRACE_DEBUG:
        log_debug(ROUTER, t->text, "peer=%s req=%016" PRIx64 " value=%" PRIu64, peer, id, t->value);
        break;
    case RT_TRACE_INFO:
        log_info(ROUTER, t->text, "peer=%s req=%016" PRIx64 " value=%" PRIu64, peer, id, t->value);
        break;
    case RT_TRACE_WARN:
        log_warn(ROUTER, t->text, "peer=%s req=%016" PRIx64 " value=%" PRIu64, peer, id, t->value);
        break;
    }
}

static void send_failed(struct rt_shell *s, const struct rt_peer *peer, const struct msg *m)
{
    bool matters = m->type == MSG_TOKENS_EMITTED || m->type == MSG_WORKER_ASSIGN;
    if (!matters || s->later_count == LATER_MAX)
        return; /* timers of the core make up for it */
    struct rt_event *e = &s->later[s->later_count++];
    memset(e, 0, sizeof(*e));
    e->type = RT_EVENT_UNSENT;
    e->u.unsent.peer = *peer;
    e->u.unsent.type = m->type;
    e->u.unsent.id = m->id;
    if (m->type == MSG_TOKENS_EMITTED)
        e->u.unsent.seq = m->u.tokens.seq;
}

static void send(struct rt_shell *s, const struct rt_peer *peer, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    struct bus_peer to = {.count = peer->count};
    uint32_t count = 0;
    arena_reset(&s->wire_out);
    enum err e = wire_encode(&s->wire_out, m, frames, &count);
    if (e == ERR_OK) {
        memcpy(to.bytes, peer->bytes, sizeof(to.bytes));
        for (uint32_t i = 0; i < count; i++)
            out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
        e = bus_send(s->socket, &to, out, count);
    }
    if (e == ERR_OK)
        return;
    char text[2 * RT_PEER_BYTES_MAX + 1];
    peer_text(peer, text);
    log_debug(ROUTER, "message not sent", "peer=%s type=%s code=%s", text, msg_type_name(m->type),
              err_name(e));
    send_failed(s, peer, m);
}

static void look_up(struct rt_shell *s, const struct rt_action *a)
{
    loop_timer_start(s->look_end, s->params->map_ms_max * 1000ull + 1000, false);
    if (s->look != NULL && rt_shell_look_ask(s->look, &a->u.look_up.id, a->u.look_up.session_key,
                                             a->u.look_up.cache_salt) == ERR_OK)
        return;
    if (s->later_count < LATER_MAX) {
        struct rt_event *e = &s->later[s->later_count++];
        memset(e, 0, sizeof(*e));
        e->type = RT_EVENT_MAP;
        e->u.map.id = a->u.look_up.id;
    }
}

static void actions_run(struct rt_shell *s)
{
    for (uint32_t i = 0; i < s->actions->count; i++) {
        const struct rt_action *a = &s->actions->items[i];
        switch (a->type) {
        case RT_SEND:
            send(s, &a->u.send.peer, &a->u.send.msg);
            break;
        case RT_TRACE:
            trace(&a->u.trace);
            break;
        case RT_OBSERVE:
            rt_shell_status_observe(s->status, a->u.observe.what, a->u.observe.value);
            break;
        case RT_LOOK_UP:
            look_up(s, a);
            break;
        }
    }
}

static void step(struct rt_shell *s, struct rt_event *e)
{
    e->now_us = loop_now_us(s->loop);
    e->unix_us = clock_unix_us();
    rt_core_step(s->core, e, s->actions);
    actions_run(s);
    /* Every round hands over up to RT_ACTIONS_MAX actions: the work that is left shrinks.  Failed
     * sends wait in the core for its next tick, so they cannot keep this loop going. */
    while (s->actions->more || s->later_count > 0) {
        struct rt_event next = {.type = RT_EVENT_TICK};
        if (s->later_count > 0)
            next = s->later[--s->later_count];
        next.now_us = loop_now_us(s->loop);
        next.unix_us = e->unix_us;
        rt_core_step(s->core, &next, s->actions);
        actions_run(s);
    }
}

static void on_message(void *arg, const struct bus_peer *from, const struct bus_frame *frames,
                       uint32_t count)
{
    struct rt_shell *s = arg;
    CHECK_OBJ(s, SHELL_MAGIC);
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail;
    struct rt_peer peer = {.count = from->count};
    struct msg m;
    CHECK(count <= BUS_FRAMES_MAX);
    memcpy(peer.bytes, from->bytes, sizeof(peer.bytes));
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&s->wire_in);
    enum err e = wire_decode(&s->wire_in, in, count, &m, &detail);
    if (e != ERR_OK) {
        char text[2 * RT_PEER_BYTES_MAX + 1];
        peer_text(&peer, text);
        s->malformed++;
        log_warn(ROUTER, "malformed message dropped", "peer=%s code=%s reason=\"%s\"", text,
                 err_name(e), detail.text);
        return;
    }
    struct rt_event event = {.type = RT_EVENT_MSG, .u.msg = {.peer = &peer, .msg = &m}};
    step(s, &event);
}

static void on_map(void *arg, const struct msg_id *id, const struct rt_map *map)
{
    struct rt_shell *s = arg;
    CHECK_OBJ(s, SHELL_MAGIC);
    struct rt_event event = {.type = RT_EVENT_MAP, .u.map = {.id = *id, .map = map}};
    if (!s->closing)
        step(s, &event);
}

static void on_look_end(void *arg)
{
    struct rt_shell *s = arg;
    CHECK_OBJ(s, SHELL_MAGIC);
    struct rt_event event = {.type = RT_EVENT_TICK};
    step(s, &event);
}

static void on_tick(void *arg)
{
    struct rt_shell *s = arg;
    CHECK_OBJ(s, SHELL_MAGIC);
    struct rt_event event = {.type = RT_EVENT_TICK};
    step(s, &event);
    rt_shell_status_tick(s->status, s->malformed);
}

/* drain:<worker> in Redis, for who looks there: since when, until when, what runs. */
static void drain_tell(struct rt_shell *s, bool drain, const struct status_command *c,
                       uint32_t running)
{
    char key[160], since[24], deadline[24], left[16];
    uint64_t now_ms = clock_unix_us() / 1000;
    if (s->redis == NULL)
        return;
    snprintf(key, sizeof(key), "tandem:{%.64s}:drain:%" PRIu64, s->params->cluster, c->worker);
    snprintf(since, sizeof(since), "%" PRIu64, now_ms);
    snprintf(deadline, sizeof(deadline), "%" PRIu64,
             c->deadline_ms > 0 ? now_ms + c->deadline_ms : 0);
    snprintf(left, sizeof(left), "%u", running);
    const char *const set[] = {"HSET",          key,   "by",       "operator",
                               "since",         since, "deadline", deadline,
                               "sessions_left", left,  "target",   ""};
    const char *const expire[] = {"EXPIRE", key, "3600"}, *const gone[] = {"DEL", key};
    enum err e = drain ? redis_command(s->redis, NULL, NULL, ARRAY_COUNT(set), set, NULL)
                       : redis_command(s->redis, NULL, NULL, ARRAY_COUNT(gone), gone, NULL);
    if (e == ERR_OK && drain)
        e = redis_command(s->redis, NULL, NULL, ARRAY_COUNT(expire), expire, NULL);
    if (e != ERR_OK)
        log_debug(ROUTER, "drain not told to redis", "code=%s", err_name(e));
}

/* Of the router itself, or with worker=N of that worker. */
static enum err on_command(void *arg, const struct status_command *c, struct err_detail *detail)
{
    struct rt_shell *s = arg;
    CHECK_OBJ(s, SHELL_MAGIC);
    bool drain = strcmp(c->name, "drain") == 0;
    if (!c->has_worker) {
        struct rt_event event = {.type = RT_EVENT_DRAIN, .u.drain = drain};
        step(s, &event);
        return ERR_OK;
    }
    bool known = false;
    uint32_t running = 0;
    for (uint32_t i = 0; i < RT_WORKERS_MAX && !known; i++) {
        const struct rt_worker *w = rt_core_worker(s->core, i);
        known = w != NULL && w->info.worker_id == c->worker;
        running = known ? w->request_count : 0;
    }
    if (!known)
        return err_set(detail, ERR_NOT_FOUND, "worker: no worker %" PRIu64 " is known", c->worker);
    static const struct rt_peer operator_peer = {.count = 8, .bytes = "operator"};
    struct msg m = {.type = drain ? MSG_WORKER_DRAIN : MSG_WORKER_RESUME};
    memcpy(m.id.bytes, &c->worker, sizeof(c->worker));
    if (drain && c->deadline_ms > 0)
        m.u.drain.deadline_unix_us = clock_unix_us() + c->deadline_ms * 1000u;
    struct rt_event event = {.type = RT_EVENT_MSG, .u.msg = {.peer = &operator_peer, .msg = &m}};
    step(s, &event);
    drain_tell(s, drain, c, running);
    return ERR_OK;
}

static struct rt_core *core_create(const struct rt_params *p)
{
    struct rt_options o = {
        .requests_max = p->requests_max,
        .queue_requests_max = p->queue_requests_max,
        .queue_tokens_max = p->queue_tokens_max,
        .store_tokens_max = p->store_tokens_max,
        .workers_max = p->workers_max,
        .gateways_max = p->gateways_max,
        .worker_silence_us_max = p->worker_silence_ms * 1000ull,
        .gateway_silence_us_max = p->gateway_silence_ms * 1000ull,
        .cancel_us_max = p->cancel_ms * 1000ull,
        .no_worker_us_max = p->no_worker_ms * 1000ull,
        .canary_us = p->canary_ms * 1000ull,
        .canary_silence_us_max = p->canary_silence_ms * 1000ull,
        .progress_us_max = p->progress_ms_max * 1000ull,
        .sessions_max = p->sessions_max,
        .map_us_max = strcmp(p->redis, "off") == 0 ? 0 : p->map_ms_max * 1000ull,
    };
    return rt_core_create(&o);
}

static enum err redis_open(struct rt_shell *s, struct err_detail *detail)
{
    struct redis_options redis = {0};
    struct rt_shell_look_options look = {.cluster = s->params->cluster, .fn = on_map, .arg = s};
    if (strcmp(s->params->redis, "off") == 0)
        return ERR_OK;
    TRY(block_hash_key_load(s->params->state_dir, &look.key, detail));
    redis_address(s->params->redis, s->params->run_dir, &redis);
    s->redis = redis_create(s->loop, &redis);
    look.redis = s->redis;
    s->look = rt_shell_look_create(&look);
    return ERR_OK;
}

static void start(struct rt_shell *s, uint64_t incarnation)
{
    struct rt_event e = {.type = RT_EVENT_START};
    e.u.start.incarnation = incarnation;
    rng_system(&e.u.start.seed, sizeof(e.u.start.seed));
    step(s, &e);
    loop_timer_start(s->tick, TICK_US, true);
}

enum err rt_shell_create(struct loop *l, const struct rt_params *params,
                         struct rt_shell **ret_shell, struct err_detail *detail)
{
    struct rt_shell *s = mem_take(sizeof(*s));
    uint64_t incarnation = 0;
    s->magic = SHELL_MAGIC;
    s->params = params;
    s->loop = l;
    rng_system(&incarnation, sizeof(incarnation));
    arena_init(&s->wire_in, WIRE_BYTES, WIRE_BYTES_MAX);
    arena_init(&s->wire_out, WIRE_BYTES, WIRE_BYTES_MAX);
    s->actions = mem_take(sizeof(*s->actions));
    s->core = core_create(params);
    s->tick = loop_timer_create(l, on_tick, s);
    s->look_end = loop_timer_create(l, on_look_end, s);
    s->bus = bus_create(l);
    enum err e = redis_open(s, detail);
    if (e != ERR_OK)
        goto out;
    struct rt_shell_status_options o = {.loop = l,
                                        .params = params,
                                        .core = s->core,
                                        .redis = s->redis,
                                        .look = s->look,
                                        .incarnation = incarnation,
                                        .command = on_command,
                                        .arg = s};
    e = rt_shell_status_create(&o, &s->status, detail);
    if (e != ERR_OK)
        goto out;
    int bytes = snprintf(s->endpoint, sizeof(s->endpoint), "ipc://%s/router.sock", params->run_dir);
    CHECK(bytes > 0 && (size_t)bytes < sizeof(s->endpoint));
    e = bus_bind(s->bus, s->endpoint, QUEUE_MAX, on_message, s, &s->socket, detail);
    if (e != ERR_OK)
        goto out;
    start(s, incarnation);
    *ret_shell = s;
    return ERR_OK;
out:
    rt_shell_destroy(&s);
    return e;
}

void rt_shell_destroy(struct rt_shell **shell_p)
{
    struct rt_shell *s = *shell_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, SHELL_MAGIC);
    s->closing = true;
    loop_timer_destroy(&s->tick);
    loop_timer_destroy(&s->look_end);
    if (s->socket != NULL)
        bus_socket_destroy(&s->socket);
    bus_destroy(&s->bus);
    rt_shell_status_destroy(&s->status);
    if (s->redis != NULL)
        redis_destroy(&s->redis);
    rt_shell_look_destroy(&s->look);
    rt_core_destroy(&s->core);
    mem_give(s->actions);
    arena_fini(&s->wire_in);
    arena_fini(&s->wire_out);
    s->magic = 0;
    mem_give(s);
    *shell_p = NULL;
}
