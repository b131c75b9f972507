/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_follower.h"

#include <inttypes.h>
#include <stdio.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/role.h"
#include "lib/net/status.h"
#include "proto/wire.h"
#include "worker/wk_exec.h"
#include "worker/wk_params.h"
#include "worker/wk_ranks.h"
#include "worker/wk_rows.h"

#define FOLLOWER_MAGIC  0x574b464fu
#define ARENA_BYTES     (64u << 10)
#define ARENA_BYTES_MAX (16u << 20)
#define BEAT_US         500000u

struct wk_follower {
    uint32_t magic;
    struct loop *loop;
    const struct wk_params *params;
    struct redis *redis;
    struct status *status;
    struct loop_waker *waker;
    struct bus *bus;
    struct bus_socket *kvmgr;
    struct loop_timer *beat;
    struct arena arena_in, arena_out;
    uint64_t bad_messages;
    struct wk_rows *rows;
    struct wk_ranks *ranks;
    struct wk_exec *exec;
    bool loaded, ready;
    int exit_code;
};

static void on_health(void *arg, struct str *out)
{
    struct wk_follower *w = arg;
    str_add_format(out, ",\"rank\":%u,\"ranks\":%u,\"steps\":%" PRIu64 ",\"bad_messages\":%" PRIu64,
                   w->params->rank, w->params->ranks, w->exec != NULL ? wk_exec_steps(w->exec) : 0,
                   w->bad_messages);
}

/* Ready is who would carry out rank 0's next plan. */
static void group_show(struct wk_follower *w)
{
    bool ready = w->loaded && wk_exec_grouped(w->exec);
    if (ready == w->ready)
        return;
    w->ready = ready;
    log_info(WORKER, ready ? "ready" : "not ready", "rank=%u group=%s", w->params->rank,
             ready ? "formed" : "lost");
    status_set_state(w->status, ready ? "ready" : "degraded");
}

/* ---- its kvmgr ---- */

/* A beat does not pile up for one that is away. */
static void kvmgr_send(struct wk_follower *w, const struct msg *m, bool beat)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    arena_reset(&w->arena_out);
    enum err e = wire_encode(&w->arena_out, m, frames, &count);
    for (uint32_t i = 0; e == ERR_OK && i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    if (e == ERR_OK)
        e = beat ? bus_send_beat(w->kvmgr, out, count) : bus_send(w->kvmgr, NULL, out, count);
    if (e != ERR_OK && !(beat && e == ERR_CLOSED))
        log_warn(WORKER, "message not sent", "to=kvmgr type=%s code=%s", msg_type_name(m->type),
                 err_name(e));
}

static void questions_send(struct wk_follower *w)
{
    struct msg m;
    while (wk_rows_question(w->rows, &m))
        kvmgr_send(w, &m, false);
}

static void on_kvmgr(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                     uint32_t count)
{
    struct wk_follower *w = arg;
    struct wire_frame in[BUS_FRAMES_MAX];
    struct msg m;
    struct err_detail detail = {{0}};
    CHECK(count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&w->arena_in);
    enum err e = wire_decode(&w->arena_in, in, count, &m, &detail);
    if (e == ERR_OK && m.type != MSG_KV_ATTACH_REPLY && m.type != MSG_KV_STATE)
        e = err_set(&detail, ERR_INVALID, "type %s", msg_type_name(m.type));
    if (e != ERR_OK) {
        w->bad_messages++;
        log_warn(WORKER, "bad message dropped", "from=kvmgr code=%s reason=\"%s\"", err_name(e),
                 detail.text);
        return;
    }
    wk_rows_answer(w->rows, &m);
}

/* Its answer says whether it is still the one that we have the memory from. */
static void on_beat(void *arg)
{
    struct wk_follower *w = arg;
    struct msg m = {.type = MSG_KV_PING};
    m.u.kv_ping.incarnation = wk_rows_worker(w->rows);
    kvmgr_send(w, &m, true);
}

static enum err kvmgr_connect(struct wk_follower *w, struct err_detail *detail)
{
    const struct wk_params *p = w->params;
    char id[BUS_PEER_BYTES_MAX + 1], endpoint[PARAM_STR_BYTES + 32];
    snprintf(id, sizeof id, "worker-%u", p->id);
    role_endpoint(p->run_dir, "kvmgr", wk_params_kvmgr(p), endpoint, sizeof endpoint);
    w->bus = bus_create(w->loop);
    w->beat = loop_timer_create(w->loop, on_beat, w);
    loop_timer_start(w->beat, BEAT_US, true);
    return bus_connect(w->bus, endpoint, id, p->queue_max, on_kvmgr, w, &w->kvmgr, detail);
}

static void rows_wake(void *arg) /* device thread */
{
    struct wk_follower *w = arg;
    loop_wake(w->waker);
}

static void on_news(void *arg)
{
    struct wk_follower *w = arg;
    struct wk_news news;
    questions_send(w);
    while (wk_exec_news(w->exec, &news)) {
        if (news.type == WK_NEWS_LOADED) {
            log_info(WORKER, "model loaded", "rank=%u ranks=%u", w->params->rank, w->params->ranks);
            w->loaded = true;
            continue;
        }
        CHECK(news.type == WK_NEWS_FAILED); /* nothing else comes without an order of ours */
        log_error(WORKER, "cannot go on", "reason=\"%s\"", wk_exec_failure(w->exec)->text);
        w->exit_code = 2;
        loop_stop(w->loop);
    }
    group_show(w);
}

static enum err status_open(struct wk_follower *w, struct err_detail *detail)
{
    const struct wk_params *p = w->params;
    struct redis_options redis = {0};
    uint64_t incarnation = 0;
    rng_system(&incarnation, sizeof incarnation);
    redis_address(p->redis, p->run_dir, &redis);
    w->redis = redis_create(w->loop, &redis);
    struct status_options o = {
        .role = "worker",
        .id = p->id,
        .cluster = p->cluster,
        .run_dir = p->run_dir,
        .incarnation = incarnation,
        .redis = w->redis,
        .common_labels = "",
        .extra = on_health,
        .arg = w,
    };
    return status_create(w->loop, &o, &w->status, detail);
}

enum err wk_follower_create(struct loop *l, const struct wk_params *params,
                            struct wk_follower **ret_follower, struct err_detail *detail)
{
    struct wk_follower *w = mem_take(sizeof *w);
    w->magic = FOLLOWER_MAGIC;
    w->loop = l;
    w->params = params;
    w->waker = loop_waker_create(l, on_news, w);
    arena_init(&w->arena_in, ARENA_BYTES, ARENA_BYTES_MAX);
    arena_init(&w->arena_out, ARENA_BYTES, ARENA_BYTES_MAX);
    struct wk_rows_options rows = {
        .worker_id = params->id, .rank = params->rank, .wake = rows_wake, .arg = w};
    while (rows.incarnation == 0) /* which means "none" elsewhere */
        rng_system(&rows.incarnation, sizeof rows.incarnation);
    w->rows = wk_rows_create(&rows);
    enum err e = wk_params_ranks(params, w->rows, &w->ranks, detail);
    if (e == ERR_OK)
        e = status_open(w, detail);
    if (e == ERR_OK)
        e = kvmgr_connect(w, detail);
    if (e != ERR_OK) {
        wk_follower_destroy(&w);
        return e;
    }
    struct wk_exec_options o = wk_params_exec(params);
    char dump[PARAM_STR_BYTES + 32];
    snprintf(dump, sizeof dump, "%s/worker-%u.plans", params->run_dir, params->id);
    o.ranks = w->ranks;
    o.rows = w->rows;
    o.dump_path = dump;
    o.waker = w->waker;
    w->exec = wk_exec_create(&o);
    *ret_follower = w;
    return ERR_OK;
}

int wk_follower_exit_code(const struct wk_follower *w)
{
    CHECK_OBJ(w, FOLLOWER_MAGIC);
    return w->exit_code;
}

void wk_follower_destroy(struct wk_follower **follower_p)
{
    struct wk_follower *w = *follower_p;
    if (w == NULL)
        return;
    CHECK_OBJ(w, FOLLOWER_MAGIC);
    wk_exec_destroy(&w->exec);
    wk_ranks_destroy(&w->ranks);
    wk_rows_destroy(&w->rows);
    loop_timer_destroy(&w->beat);
    bus_socket_destroy(&w->kvmgr);
    bus_destroy(&w->bus);
    arena_fini(&w->arena_in);
    arena_fini(&w->arena_out);
    status_destroy(&w->status);
    redis_destroy(&w->redis);
    loop_waker_destroy(&w->waker);
    w->magic = 0;
    mem_give(w);
    *follower_p = NULL;
}
