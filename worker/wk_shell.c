/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_shell.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/role.h"
#include "lib/net/status.h"
#include "proto/wire.h"
#include "worker/wk_ranks.h"
#include "worker/wk_shell_state.h"

/* A message's payload is at most 8 MiB; an answer's arrays lie beside the core's own. */
#define ARENA_BYTES       (256u << 10)
#define ARENA_BYTES_MAX   (64u << 20)
#define STOP_US_MAX       1500000u
#define PROGRESS_US       1000000u
#define ROUTER_SILENCE_US 3000000u
#define PAUSE_US_MAX      4000000u /* kvmgr gives up on a silent worker after 5 s */

STATIC_CHECK(WIRE_FRAMES_MAX <= BUS_FRAMES_MAX);

static const char *const peer_names[WK_PEER_COUNT] = {"router", "kvmgr", "drafter"};

/* ---- messages ---- */

static void send_frames(struct wk_shell *s, enum wk_peer to, const struct msg *m, bool beat)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    arena_reset(&s->arena_out);
    enum err e = wire_encode(&s->arena_out, m, frames, &count);
    for (uint32_t i = 0; e == ERR_OK && i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    if (e == ERR_OK)
        e = beat ? bus_send_beat(s->sockets[to], out, count)
                 : bus_send(s->sockets[to], NULL, out, count);
    if (e != ERR_OK && !(beat && e == ERR_CLOSED)) {
        s->unsent++;
        log_warn(WORKER, "message not sent", "to=%s type=%s code=%s", peer_names[to],
                 msg_type_name(m->type), err_name(e));
    }
}

void wk_shell_send(struct wk_shell *s, enum wk_peer to, const struct msg *m)
{
    send_frames(s, to, m, false);
}

void wk_shell_beat(struct wk_shell *s, enum wk_peer to, const struct msg *m)
{
    send_frames(s, to, m, true);
}

static void carry_out(struct wk_shell *s)
{
    for (uint32_t i = 0; i < s->actions.count; i++) {
        const struct wk_action *a = &s->actions.items[i];
        switch (a->type) {
        case WK_ACT_ROUTER:
            wk_shell_send(s, WK_ROUTER, &a->msg);
            break;
        case WK_ACT_KVMGR:
            wk_shell_hold(s, a);
            break;
        case WK_ACT_DRAFTER:
            wk_shell_send(s, WK_DRAFTER, &a->msg);
            break;
        case WK_ACT_RUN:
            CHECK(!s->busy);
            wk_shell_hold_pump(s); /* before the device thread is taken again */
            s->busy = true;
            s->run_us = loop_now_us(s->loop);
            wk_exec_run(s->exec, s->actions.plan);
            break;
        }
    }
    wk_shell_hold_pump(s);
}

/* kvmgr gives up on a worker that was silent for so long: what we held is not ours any more.  Until
 * then nothing is spoilt, since no block goes to others while we have the file mapped. */
static void pause_check(struct wk_shell *s)
{
    uint64_t now = loop_now_us(s->loop), before = s->beat_us;
    if (before == 0 || now - before <= PAUSE_US_MAX)
        return;
    s->beat_us = now;
    if (s->kv.attached)
        wk_shell_kv_lost(s, "this process stood still");
}

static void stopped_check(struct wk_shell *s)
{
    if (s->stopping && wk_core_stopped(s->core) && wk_shell_hold_empty(s))
        loop_stop(s->loop);
}

void wk_shell_step(struct wk_shell *s, struct wk_event *event)
{
    CHECK(s->core != NULL);
    pause_check(s);
    if (s->hold.spoilt && s->kv.attached)
        wk_shell_kv_lost(s, "too much to seal at once");
    event->now_us = loop_now_us(s->loop);
    event->now_unix_us = clock_unix_us();
    arena_reset(&s->arena_core);
    wk_core_step(s->core, event, &s->actions);
    carry_out(s);
    if (s->actions.wake_us != 0) {
        uint64_t now = loop_now_us(s->loop);
        loop_timer_start(s->wake, s->actions.wake_us > now ? s->actions.wake_us - now : 0, false);
    } else {
        loop_timer_stop(s->wake);
    }
    wk_shell_observe(s);
    if (event->type != WK_EV_KV_ATTACHED && event->type != WK_EV_KV_DETACHED)
        wk_shell_kv_settle(s);
    wk_shell_publish(s, false);
    stopped_check(s);
}

static bool decode(struct wk_shell *s, enum wk_peer from, const struct bus_frame *frames,
                   uint32_t count, struct msg *ret_msg)
{
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail = {.text = ""};
    CHECK(count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&s->arena_in);
    enum err e = wire_decode(&s->arena_in, in, count, ret_msg, &detail);
    if (e == ERR_OK)
        return true;
    s->bad_messages++;
    log_warn(WORKER, "bad message dropped", "from=%s code=%s reason=\"%s\"", peer_names[from],
             err_name(e), detail.text);
    return false;
}

static void event_msg(struct wk_shell *s, const struct msg *m)
{
    struct wk_event event = {.type = WK_EV_MSG, .msg = m};
    wk_shell_step(s, &event);
}

static void assign_refuse(struct wk_shell *s, const struct msg *m)
{
    struct msg reply = {.type = MSG_ASSIGN_REPLY, .id = m->id};
    reply.u.assign_reply.code = s->stopping ? ERR_DRAINING : ERR_LOADING;
    reply.u.assign_reply.text = s->loaded ? "waiting for kvmgr" : "loading the model";
    wk_shell_send(s, WK_ROUTER, &reply);
}

static void on_router(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                      uint32_t count)
{
    struct wk_shell *s = arg;
    struct msg m;
    s->router_us = loop_now_us(s->loop);
    if (!decode(s, WK_ROUTER, frames, count, &m))
        return;
    switch (m.type) {
    case MSG_WORKER_ASSIGN:
        if (s->core == NULL) {
            assign_refuse(s, &m);
            return;
        }
        break;
    case MSG_KV_ADOPT:
        wk_shell_kv_adopt(s, &m);
        return;
    case MSG_WORKER_CANCEL:
    case MSG_WORKER_DRAIN:
    case MSG_WORKER_RESUME:
    case MSG_ROUTER_STATE:
        if (s->core == NULL)
            return;
        break;
    default:
        s->bad_messages++;
        return;
    }
    event_msg(s, &m);
}

static void on_kvmgr(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                     uint32_t count)
{
    struct wk_shell *s = arg;
    struct msg m;
    if (!decode(s, WK_KVMGR, frames, count, &m))
        return;
    if (m.type < MSG_KV_ATTACH || m.type > MSG_KV_SNAPSHOT_REPLY) {
        s->bad_messages++;
        return;
    }
    wk_shell_kv_message(s, &m);
}

static void on_drafter(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t count)
{
    struct wk_shell *s = arg;
    struct msg m;
    if (!decode(s, WK_DRAFTER, frames, count, &m))
        return;
    if (m.type != MSG_DRAFT_HELLO_REPLY && m.type != MSG_DRAFT_REPLY) {
        s->bad_messages++;
        return;
    }
    wk_shell_draft_message(s, &m);
}

/* ---- timers and the device thread ---- */

static void on_wake(void *arg)
{
    struct wk_shell *s = arg;
    struct wk_event event = {.type = WK_EV_TICK};
    if (s->core != NULL)
        wk_shell_step(s, &event);
}

static enum err connect_peer(struct wk_shell *s, enum wk_peer peer, struct err_detail *detail)
{
    static const bus_fn handlers[WK_PEER_COUNT] = {on_router, on_kvmgr, on_drafter};
    char id[BUS_PEER_BYTES_MAX + 1], endpoint[PARAM_STR_BYTES + 32];
    snprintf(id, sizeof id, "worker-%u", s->params->id);
    role_endpoint(s->params->run_dir, peer_names[peer], peer == WK_ROUTER ? 0 : s->params->group,
                  endpoint, sizeof endpoint);
    return bus_connect(s->bus, endpoint, id, s->params->queue_max, handlers[peer], s,
                       &s->sockets[peer], detail);
}

/* A router that sees another connection under our name forgets ours without closing it, so ZeroMQ
 * will not connect again by itself: silence is answered with a new connection.  What was queued on
 * the old one is lost; the router, having lost us meanwhile, assigns again from what it has. */
static void router_check(struct wk_shell *s)
{
    struct err_detail detail = {.text = ""};
    uint64_t now_us = loop_now_us(s->loop);
    if (s->router_us == 0 || now_us - s->router_us < ROUTER_SILENCE_US)
        return;
    s->router_us = now_us;
    log_info(WORKER, "router is silent, connecting again", "");
    bus_socket_destroy(&s->sockets[WK_ROUTER]);
    enum err e = connect_peer(s, WK_ROUTER, &detail);
    CHECK(e == ERR_OK); /* the same endpoint was good at start */
}

static void on_beat(void *arg)
{
    struct wk_shell *s = arg;
    pause_check(s);
    router_check(s);
    s->beat_us = loop_now_us(s->loop);
    if (s->loaded) {
        wk_shell_kv_beat(s);
        wk_shell_draft_beat(s);
    }
    on_wake(s);
    wk_shell_publish(s, true);
}

static void on_progress(void *arg)
{
    wk_shell_progress(arg);
}

static void on_loaded(struct wk_shell *s)
{
    const struct wk_loaded *l = wk_exec_loaded(s->exec);
    const struct model_info *info = l->info;
    char fp[33];
    hex_encode(info->model_fp.bytes, sizeof info->model_fp.bytes, fp);
    s->loaded = true;
    loop_timer_stop(s->progress);
    /* One line of its own shape: what the tensors say, never what a path says. */
    fprintf(stderr, "quantization: %s, %.1f GiB, fp %.8s\n", info->quantization,
            (double)info->weight_bytes / (1u << 30), fp);
    for (const char *p = info->warnings; *p != 0;) {
        int n = (int)strcspn(p, "\n");
        log_warn(WORKER, "model is not what is said", "warning=\"%.*s\"", n, p);
        p += n + (p[n] == '\n');
    }
    log_info(WORKER, "model loaded",
             "seconds=%.1f layers=%u vocab=%u context_max=%u prefill_us_per_row=%.0f "
             "decode_us=%.0f model_fp=%s",
             (double)l->load_us / 1e6, info->layer_count, info->vocab_size, l->context_max,
             l->prefill_us_per_row, l->decode_us_per_step, fp);
    log_info(WORKER, "kernels", "variants=\"%s\" threads=%u", info->kernels, info->threads);
    wk_shell_kv_beat(s);
    wk_shell_publish(s, true);
}

static void on_news(void *arg)
{
    struct wk_shell *s = arg;
    struct wk_news news;
    while (wk_exec_news(s->exec, &news)) {
        if (news.type == WK_NEWS_DONE) {
            CHECK(s->busy && s->core != NULL);
            s->busy = false;
            /* Another rank is lost, and with it the rows that this step wrote there. */
            if (news.result->status != ERR_OK && s->kv.attached)
                wk_shell_kv_lost(s, "group lost");
            struct wk_event event = {.type = WK_EV_DONE, .result = news.result};
            wk_shell_step(s, &event);
        } else if (news.type == WK_NEWS_ATTACHED) {
            wk_shell_kv_formed(s, &news.memory);
        } else if (news.type == WK_NEWS_SEALED) {
            wk_shell_hold_sealed(s, news.status);
            stopped_check(s);
        } else if (news.type == WK_NEWS_LOADED) {
            wk_exec_progress(s->exec, &s->load_bytes, &(uint64_t){0});
            on_loaded(s);
        } else {
            s->load_failed = true;
            wk_shell_fail(s, wk_exec_failure(s->exec)->text);
        }
    }
}

/* ---- life ---- */

void wk_shell_fail(struct wk_shell *s, const char *why)
{
    log_error(WORKER, "cannot go on", "reason=\"%s\"", why);
    s->exit_code = 2;
    s->load_failed = true;
    wk_shell_publish(s, true);
    loop_stop(s->loop);
}

static void core_options_fill(struct wk_shell *s, const struct wk_spec *spec)
{
    const struct wk_params *p = s->params;
    s->core_options = (struct wk_core_options){
        .seqs_max = p->seqs_max,
        .slice_rows_max = p->slice_rows_max,
        .slice_layers_max = p->slice_layers_max,
        .slice_ms = p->slice_ms,
        .decode_rows_max = p->decode_rows_max,
        .deadline_ms = p->deadline_ms,
        .ids_max = p->ids_max,
        .mtp = wk_params_mtp(p),
        .spec = *spec,
        .ema = {.alpha = p->ema_alpha,
                .margin = p->ema_margin,
                .steps_min = p->ema_steps_min,
                .saturate = p->ema_saturate},
        .accept_floor = p->accept_floor,
        .key = s->key,
    };
    struct err_detail detail;
    enum err e = wk_ema_set_parse(p->ema_set, &s->core_options.ema, &detail);
    CHECK(e == ERR_OK); /* main.c looked at it */
    snprintf(s->core_options.config_hash, sizeof s->core_options.config_hash, "%s", s->config_hash);
    uint32_t entries = wk_core_entries(&s->core_options);
    s->leases = mem_take_array(entries, sizeof *s->leases);
    s->actions.count_max = wk_core_actions_max(&s->core_options);
    s->actions.items = mem_take_array(s->actions.count_max, sizeof *s->actions.items);
    s->actions.arena = &s->arena_core;
}

static enum err connect_all(struct wk_shell *s, struct err_detail *detail)
{
    for (uint32_t i = 0; i < WK_PEER_COUNT; i++)
        TRY(connect_peer(s, i, detail));
    return ERR_OK;
}

static void exec_open(struct wk_shell *s)
{
    struct wk_exec_options o = wk_params_exec(s->params);
    char dump[PARAM_STR_BYTES + 32];
    snprintf(dump, sizeof dump, "%s/worker-%u.plans", s->params->run_dir, s->params->id);
    o.ranks = s->ranks;
    o.dump_path = dump;
    o.waker = s->waker;
    s->load_begun_us = loop_now_us(s->loop);
    s->exec = wk_exec_create(&o);
}

static void on_stop_timer(void *arg)
{
    struct wk_shell *s = arg;
    log_warn(WORKER, "step still running at the end of the stop", "");
    loop_stop(s->loop);
}

enum err wk_shell_create(struct loop *l, const struct wk_params *params, const char *config_hash,
                         struct wk_shell **ret_shell, struct err_detail *detail)
{
    struct wk_spec spec;
    TRY(wk_spec_parse(params->spec, &spec, detail));
    struct wk_shell *s = mem_take(sizeof *s);
    s->magic = WK_SHELL_MAGIC;
    s->loop = l;
    s->params = params;
    s->config_hash = config_hash;
    rng_system(&s->incarnation, sizeof s->incarnation);
    arena_init(&s->arena_in, ARENA_BYTES, ARENA_BYTES_MAX);
    arena_init(&s->arena_out, ARENA_BYTES, ARENA_BYTES_MAX);
    arena_init(&s->arena_core, ARENA_BYTES, ARENA_BYTES_MAX);
    wk_shell_hold_init(s);
    s->beat = loop_timer_create(l, on_beat, s);
    s->wake = loop_timer_create(l, on_wake, s);
    s->progress = loop_timer_create(l, on_progress, s);
    s->stop_timer = loop_timer_create(l, on_stop_timer, s);
    s->waker = loop_waker_create(l, on_news, s);
    s->bus = bus_create(l);
    enum err e = block_hash_key_load(params->state_dir, &s->key, detail);
    if (e == ERR_OK) {
        core_options_fill(s, &spec);
        e = connect_all(s, detail);
    }
    if (e == ERR_OK && params->ranks > 1)
        e = wk_params_ranks(params, NULL, &s->ranks, detail);
    if (e == ERR_OK)
        e = wk_shell_status_open(s, detail);
    if (e != ERR_OK) {
        wk_shell_destroy(&s);
        return e;
    }
    uint32_t swept = wk_taps_sweep();
    if (swept > 0)
        log_info(WORKER, "tap rings of dead workers removed", "count=%u", swept);
    exec_open(s);
    loop_timer_start(s->beat, WK_BEAT_US, true);
    loop_timer_start(s->progress, PROGRESS_US, true);
    wk_shell_publish(s, true);
    *ret_shell = s;
    return ERR_OK;
}

void wk_shell_stop(struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (s->stopping)
        return;
    s->stopping = true;
    status_set_state(s->status, "draining");
    if (s->core == NULL) {
        loop_stop(s->loop);
        return;
    }
    loop_timer_start(s->stop_timer, STOP_US_MAX, false);
    struct wk_event event = {.type = WK_EV_STOP};
    wk_shell_step(s, &event);
}

int wk_shell_exit_code(const struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    return s->exit_code;
}

bool wk_shell_idle(const struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    return !s->busy && (s->loaded || s->load_failed);
}

void wk_shell_leave(struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    status_destroy(&s->status);
    redis_destroy(&s->redis);
    for (uint32_t i = 0; i < WK_PEER_COUNT; i++)
        bus_socket_destroy(&s->sockets[i]);
    bus_destroy(&s->bus);
}

void wk_shell_destroy(struct wk_shell **shell_p)
{
    CHECK(shell_p != NULL);
    struct wk_shell *s = *shell_p;
    if (s == NULL)
        return;
    wk_shell_leave(s);
    wk_exec_destroy(&s->exec);
    wk_ranks_destroy(&s->ranks);
    wk_core_destroy(&s->core);
    wk_shell_kv_close(s);
    loop_waker_destroy(&s->waker);
    loop_timer_destroy(&s->stop_timer);
    loop_timer_destroy(&s->progress);
    loop_timer_destroy(&s->wake);
    loop_timer_destroy(&s->beat);
    arena_fini(&s->arena_in);
    arena_fini(&s->arena_out);
    arena_fini(&s->arena_core);
    wk_shell_hold_fini(s);
    mem_give(s->leases);
    mem_give(s->actions.items);
    s->magic = 0;
    mem_give(s);
    *shell_p = NULL;
}
