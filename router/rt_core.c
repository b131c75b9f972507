/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_core_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

struct rt_core *rt_core_create(const struct rt_options *options)
{
    CHECK(options->workers_max > 0 && options->workers_max <= RT_WORKERS_MAX);
    CHECK(options->gateways_max > 0 && options->gateways_max <= RT_GATEWAYS_MAX);
    struct rt_core *c = mem_take(sizeof(*c));
    c->magic = RT_CORE_MAGIC;
    c->options = *options;
    c->store = rt_store_create(options->requests_max, options->store_tokens_max);
    c->queue = rt_queue_create(options->requests_max);
    c->table = rt_table_create(options->workers_max, options->gateways_max);
    c->sessions = rt_sessions_create(options->sessions_max);
    c->scratch = mem_take_array(RT_SCRATCH_WORDS, sizeof(*c->scratch));
    rt_link_init(&c->pending);
    rt_link_init(&c->done);
    return c;
}

void rt_core_destroy(struct rt_core **core_p)
{
    struct rt_core *c = *core_p;
    if (c == NULL)
        return;
    CHECK_OBJ(c, RT_CORE_MAGIC);
    rt_sessions_destroy(&c->sessions);
    rt_table_destroy(&c->table);
    rt_queue_destroy(&c->queue);
    rt_store_destroy(&c->store);
    mem_give(c->scratch);
    c->magic = 0;
    mem_give(c);
    *core_p = NULL;
}

/* ---- actions ---- */

bool rt_room(const struct rt_core *c)
{
    return c->actions->count + RT_ACTIONS_RESERVED <= RT_ACTIONS_MAX;
}

struct msg *rt_send(struct rt_core *c, const struct rt_peer *peer, enum msg_type type,
                    const struct msg_id *id)
{
    CHECK(c->actions->count < RT_ACTIONS_MAX);
    struct rt_action *a = &c->actions->items[c->actions->count++];
    a->type = RT_SEND;
    a->u.send.peer = *peer;
    memset(&a->u.send.msg, 0, sizeof(a->u.send.msg));
    a->u.send.msg.type = type;
    a->u.send.msg.id = *id;
    return &a->u.send.msg;
}

/* Traces and observations give way when a step is full. */
static struct rt_action *note(struct rt_core *c, enum rt_action_type type)
{
    if (c->actions->count + RT_SENDS_UNASKED >= RT_ACTIONS_MAX)
        return NULL;
    struct rt_action *a = &c->actions->items[c->actions->count++];
    a->type = type;
    return a;
}

void rt_trace(struct rt_core *c, enum rt_trace_level level, const char *text,
              const struct rt_peer *peer, const struct msg_id *id, uint64_t value)
{
    struct rt_action *a = note(c, RT_TRACE);
    if (a == NULL)
        return;
    a->u.trace = (struct rt_trace){.level = level, .text = text, .value = value};
    if (peer != NULL)
        a->u.trace.peer = *peer;
    if (id != NULL)
        a->u.trace.id = *id;
}

void rt_observe(struct rt_core *c, enum rt_observe what, double value)
{
    struct rt_action *a = note(c, RT_OBSERVE);
    if (a == NULL)
        return;
    a->u.observe.what = what;
    a->u.observe.value = value;
}

uint32_t *rt_scratch(struct rt_core *c, uint32_t words)
{
    if (words > RT_SCRATCH_WORDS - c->scratch_used) {
        CHECK(words <= RT_SCRATCH_WORDS);
        return NULL;
    }
    uint32_t *at = c->scratch + c->scratch_used;
    c->scratch_used += words;
    return at;
}

void rt_pend(struct rt_core *c, struct rt_request *r)
{
    if (rt_link_alone(&r->pending))
        rt_link_insert_before(&c->pending, &r->pending);
}

/* ---- what the cluster looks like from here ---- */

enum { RT_WHY_STALLED = 9, RT_WHY_KV = 10 }; /* these name the worker */

bool rt_ready(struct rt_core *c, const char **ret_reason)
{
    static const char *const reasons[] = {
        "no worker has connected",  "worker failed",        "worker is silent",
        "worker is loading",        "worker is draining",   "worker publishes no canary",
        "canary not answered yet",  "canary answered late", "canary answered wrong",
        "worker makes no progress", "kvmgr is silent",
    };
    uint32_t worst = 0, worker = 0;
    if (c->draining) {
        *ret_reason = "the router is draining";
        return false;
    }
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        const struct rt_worker *w = rt_table_worker_at(c->table, i);
        if (w == NULL)
            continue;
        if (rt_worker_usable(w)) {
            *ret_reason = "";
            return true;
        }
        uint32_t why = 1;
        if (w->lost)
            why = 2;
        else if (w->info.state == MSG_WORKER_LOADING)
            why = 3;
        else if (w->info.state == MSG_WORKER_DRAINING || w->drain)
            why = 4;
        else if (w->info.state == MSG_WORKER_READY && w->info.canary_count == 0)
            why = 5;
        else if (w->info.state == MSG_WORKER_READY && w->info.kv_state == RT_KV_SILENT)
            why = RT_WHY_KV;
        else if (w->info.state == MSG_WORKER_READY && w->stalled)
            why = RT_WHY_STALLED;
        else if (w->info.state == MSG_WORKER_READY)
            why = w->canary.verdict == RT_CANARY_LATE    ? 7
                  : w->canary.verdict == RT_CANARY_WRONG ? 8
                                                         : 6;
        if (why > worst) {
            worst = why;
            worker = w->info.worker_id;
        }
    }
    CHECK(worst < ARRAY_COUNT(reasons));
    *ret_reason = reasons[worst];
    if (worst == RT_WHY_STALLED)
        snprintf(c->reason, sizeof(c->reason), "worker %u makes no progress", worker);
    else if (worst == RT_WHY_KV)
        snprintf(c->reason, sizeof(c->reason), "worker %u: kvmgr is silent", worker);
    if (worst >= RT_WHY_STALLED)
        *ret_reason = c->reason;
    return false;
}

static void router_info(struct rt_core *c, struct msg_router_info *ret_info)
{
    struct msg_router_info info = {.incarnation = c->incarnation,
                                   .quantization = "",
                                   .spec = "",
                                   .config_hash = "",
                                   .warnings = "",
                                   .context_max = c->context_max,
                                   .waiting = rt_queue_count(c->queue),
                                   .tokens_waiting = rt_queue_tokens(c->queue),
                                   .ledger = c->ledger};
    const struct rt_worker *shown = NULL;
    uint64_t blocks_total = 0, blocks_free = 0; /* what workers say: may pass 32 bits together */
    info.ready = rt_ready(c, &info.reason);
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        const struct rt_worker *w = rt_table_worker_at(c->table, i);
        if (w == NULL)
            continue;
        info.running += w->request_count;
        bool usable = rt_worker_usable(w);
        info.workers_live += !w->lost && w->info.state != MSG_WORKER_FAILED;
        if (usable) {
            info.workers_ready++;
            blocks_total += w->info.blocks_total;
            blocks_free += w->info.blocks_free;
        }
        if (shown == NULL || (usable && !rt_worker_usable(shown)))
            shown = w;
    }
    info.blocks_total = blocks_total < UINT32_MAX ? (uint32_t)blocks_total : UINT32_MAX;
    info.blocks_free = blocks_free < UINT32_MAX ? (uint32_t)blocks_free : UINT32_MAX;
    CHECK(info.blocks_free <= info.blocks_total); /* of each worker, so of all */
    if (shown != NULL) {
        info.block_tokens = shown->info.block_tokens;
        info.model_fp = shown->info.model_fp;
        info.quantization = shown->info.quantization;
        info.spec = shown->info.spec;
        info.config_hash = shown->info.config_hash;
        info.warnings = shown->info.warnings;
    }
    *ret_info = info;
}

void rt_state_send(struct rt_core *c, const struct rt_peer *peer)
{
    struct msg *m = rt_send(c, peer, MSG_ROUTER_STATE, &(struct msg_id){{0}});
    router_info(c, &m->u.router);
}

static void broadcast(struct rt_core *c)
{
    const char *reason;
    bool ready = rt_ready(c, &reason);
    if (c->now_us - c->broadcast_us < RT_BROADCAST_US && ready == c->ready_sent &&
        c->context_max == c->context_sent)
        return;
    if (ready != c->ready_sent)
        rt_trace(c, ready ? RT_TRACE_INFO : RT_TRACE_WARN, ready ? "ready" : reason, NULL, NULL, 0);
    c->broadcast_us = c->now_us;
    c->ready_sent = ready;
    c->context_sent = c->context_max; /* a larger worker came: gateways refuse by it */
    for (uint32_t i = 0; i < rt_table_gateways_max(c->table); i++) {
        const struct rt_gateway *g = rt_table_gateway_at(c->table, i);
        if (g != NULL && !g->lost)
            rt_state_send(c, &g->peer);
    }
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        const struct rt_worker *w = rt_table_worker_at(c->table, i);
        if (w != NULL && !w->lost)
            rt_state_send(c, &w->peer);
    }
}

/* ---- events ---- */

static void on_start(struct rt_core *c, const struct rt_event *e)
{
    CHECK(!c->started);
    c->started = true;
    c->incarnation = e->u.start.incarnation;
    c->start_us = e->now_us;
    c->usable_us = e->now_us;
    c->broadcast_us = e->now_us;
    rng_init(&c->rng, e->u.start.seed);
    rt_rate_init(&c->rate, e->now_us);
}

static void on_worker_msg(struct rt_core *c, const struct rt_peer *peer, const struct msg *m)
{
    struct rt_worker *w = rt_table_worker(c->table, peer);
    if (w == NULL) { /* it has not said who it is: its WorkerState will come */
        c->stats.unexpected++;
        return;
    }
    if (!w->lost)
        w->heard_us = c->now_us;
    if (m->type == MSG_ASSIGN_REPLY)
        rt_on_assign_reply(c, w, m);
    else if (m->type == MSG_KV_ADOPT_REPLY)
        rt_on_adopt_reply(c, w, m);
    else
        rt_on_tokens(c, w, m);
}

static void on_msg(struct rt_core *c, const struct rt_peer *peer, const struct msg *m)
{
    switch ((int)m->type) {
    case MSG_ROUTER_SUBMIT:
        rt_on_submit(c, peer, m);
        break;
    case MSG_ROUTER_CANCEL:
        rt_on_cancel(c, peer, m);
        break;
    case MSG_ROUTER_ANNOUNCE:
        rt_on_announce(c, peer, m);
        break;
    case MSG_WORKER_STATE:
        rt_on_worker_state(c, peer, m);
        break;
    case MSG_WORKER_DRAIN:
    case MSG_WORKER_RESUME:
        rt_on_drain(c, m);
        break;
    case MSG_ASSIGN_REPLY:
    case MSG_TOKENS_EMITTED:
    case MSG_KV_ADOPT_REPLY:
        on_worker_msg(c, peer, m);
        break;
    default:
        c->stats.unexpected++;
        rt_trace(c, RT_TRACE_WARN, "message is not for the router", peer, &m->id, m->type);
    }
}

static void on_unsent(struct rt_core *c, const struct rt_event *e)
{
    c->stats.unsent++;
    if (e->u.unsent.type == MSG_TOKENS_EMITTED)
        rt_on_unsent_tokens(c, &e->u.unsent.id, e->u.unsent.seq);
    else if (e->u.unsent.type == MSG_WORKER_ASSIGN)
        rt_on_unsent_assign(c, &e->u.unsent.peer, &e->u.unsent.id);
}

static void on_tick(struct rt_core *c)
{
    if (c->scan_us != 0 && c->now_us - c->scan_us < RT_SCAN_US)
        return;
    c->scan_us = c->now_us;
    rt_workers_tick(c);
    rt_gateways_tick(c);
    for (uint32_t i = 0; i < rt_store_slots(c->store); i++) {
        struct rt_request *r = rt_store_at(c->store, i);
        if (r != NULL)
            rt_request_tick(c, r);
    }
    rt_rate_tick(&c->rate, c->now_us, c->ledger.live > 0);
    broadcast(c);
}

/* The same facts counted from both sides. */
static void audit(struct rt_core *c)
{
    uint64_t held = rt_queue_count(c->queue), done = 0;
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        const struct rt_worker *w = rt_table_worker_at(c->table, i);
        held += w != NULL ? w->request_count : 0;
    }
    CHECK(held == c->ledger.live);
    CHECK(rt_store_count(c->store) >= held);
    done = rt_store_count(c->store) - held;
    CHECK(done > 0 || rt_link_alone(&c->done));
}

static void work(struct rt_core *c)
{
    rt_place(c);
    while (!rt_link_alone(&c->pending)) {
        struct rt_request *r = rt_link_item(c->pending.next, struct rt_request, pending);
        if (!rt_room(c) || !rt_request_work(c, r)) {
            c->actions->more = true;
            return;
        }
    }
}

void rt_core_step(struct rt_core *c, const struct rt_event *event, struct rt_actions *ret_actions)
{
    CHECK_OBJ(c, RT_CORE_MAGIC);
    CHECK(c->started == (event->type != RT_EVENT_START));
    CHECK(event->now_us >= c->now_us);
    c->now_us = event->now_us;
    c->unix_us = event->unix_us;
    ret_actions->count = 0;
    ret_actions->more = false;
    c->actions = ret_actions;
    c->scratch_used = 0;
    switch (event->type) {
    case RT_EVENT_START:
        on_start(c, event);
        break;
    case RT_EVENT_MSG:
        on_msg(c, event->u.msg.peer, event->u.msg.msg);
        break;
    case RT_EVENT_UNSENT:
        on_unsent(c, event);
        break;
    case RT_EVENT_TICK:
        on_tick(c);
        break;
    case RT_EVENT_DRAIN:
        c->draining = event->u.drain;
        rt_trace(c, RT_TRACE_INFO, c->draining ? "draining" : "admitting again", NULL, NULL,
                 c->ledger.live);
        break;
    case RT_EVENT_MAP:
        rt_on_map(c, &event->u.map.id, event->u.map.map);
        break;
    }
    work(c);
    audit(c);
    c->actions = NULL;
}

void rt_core_info(struct rt_core *c, struct rt_info *ret_info)
{
    CHECK_OBJ(c, RT_CORE_MAGIC);
    memset(ret_info, 0, sizeof(*ret_info));
    router_info(c, &ret_info->router);
    ret_info->stats = c->stats;
    ret_info->store_tokens_free = rt_store_free_tokens(c->store);
    ret_info->tokens_per_s = c->rate.tokens_per_s;
    ret_info->draining = c->draining;
    ret_info->groups = rt_table_groups(c->table, &ret_info->groups_ready);
    ret_info->sessions = rt_sessions_count(c->sessions);
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        const struct rt_worker *w = rt_table_worker_at(c->table, i);
        ret_info->workers += w != NULL;
        ret_info->workers_lost += w != NULL && w->lost;
    }
    for (uint32_t i = 0; i < rt_table_gateways_max(c->table); i++) {
        const struct rt_gateway *g = rt_table_gateway_at(c->table, i);
        ret_info->gateways += g != NULL && !g->lost;
    }
}

const struct rt_worker *rt_core_worker(struct rt_core *c, uint32_t index)
{
    CHECK_OBJ(c, RT_CORE_MAGIC);
    return index < rt_table_workers_max(c->table) ? rt_table_worker_at(c->table, index) : NULL;
}
