/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/rt_world.h - the router's core between fake workers and gateways, in simulated time.
 *
 * Messages travel as real frames in FIFO order per link.  A fake worker answers a prompt with
 * tokens that are a function of the prompt alone, so that any receiver can check any of them. */
#ifndef TESTS_UNIT_RT_WORLD_H
#define TESTS_UNIT_RT_WORLD_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/hash.h"
#include "lib/base/rng.h"
#include "proto/wire.h"
#include "router/rt_core.h"
#include "tests/unit/rt_world_ids.h"

#define WORKERS   3u
#define GATEWAYS  2u
#define PEERS     (WORKERS + GATEWAYS)
#define SEQS_MAX  64u
#define STREAMS   128u
#define OUT_MAX   600u
#define STEP_US   5000u
#define UNIX_BASE 1700000000000000ull

struct packet {
    struct packet *next;
    uint64_t at_us;
    uint32_t frame_count;
    size_t bytes[WIRE_FRAMES_MAX];
    uint8_t data[];
};

struct link {
    struct packet *first, *last;
    uint32_t count;
    uint64_t last_us;
};

struct fake_seq {
    bool used;
    struct msg_id id;
    uint64_t prompt;
    uint32_t prompt_count, k, max, stop_at, left; /* left: prompt tokens to compute */
    uint32_t steps;                               /* verify steps: messages with tokens */
    bool canary, cancelled, resumed;
};

struct fake_worker {
    bool up, frozen, drain, wrong_canary, mute_canary, lossy;
    bool hung; /* heard and taking requests, computing nothing */
    uint32_t kv_state, context_max;
    uint32_t prefill_per_s; /* 0: prompts cost nothing */
    uint64_t step_us;
    uint32_t seqs_max, state;
    uint64_t incarnation, router_incarnation, state_us;
    struct fake_seq seqs[SEQS_MAX];
    struct msg_ledger ledger;
    uint32_t assigned, resumed_with; /* assignments; output ids that the last one brought */
    uint32_t group;
    uint64_t kv_incarnation, model; /* of its arena; 0 = none */
    uint32_t adopts, adopt_valid;   /* session maps asked about; blocks of one that are there */
    bool adopt_mute;
    uint32_t blocks_total, blocks_free; /* as it says */
};

enum stream_state { S_FREE, S_SENT, S_LIVE, S_OVER };
struct stream { /* a request as its gateway follows it */
    enum stream_state state;
    struct msg_id id;
    uint64_t prompt, sent_us;
    uint32_t prompt_count, max, k, finish, code, reply, retry_ms, finishes, concurrency;
    int32_t priority;
    uint32_t client;
    uint64_t deadline_unix_us;
    uint32_t group_index, group_count;
    uint64_t group_tokens;
    bool cancelled, frozen_over; /* a CANCELLED finish may come: asked, or the gateway slept */
    uint32_t session;            /* 0 = no key */
    uint32_t prompt_seed;        /* 0 = of its own */
    uint32_t worker;             /* that took it last */
    bool receipt;
    struct msg_receipt r;
    uint32_t steps_told; /* by the newest receipt, also of a stream that goes on */
    struct hash128 made_by;
};

struct fake_gateway {
    bool up, frozen;
    uint64_t incarnation, router_incarnation, announce_us;
    struct msg_router_info router;
    uint64_t router_us;
    char reason[128];
    uint32_t router_count;
    struct stream streams[STREAMS];
};

/* What the fake Redis says to a question for a session map. */
enum look_answer { LOOK_ABSENT, LOOK_SILENT, LOOK_OF_WORKER, LOOK_STALE };

struct look_up {
    bool open;
    struct msg_id id;
    uint64_t at_us;
};

struct world {
    struct rng rng;
    uint64_t now_us, tick_us;
    struct rt_options options;
    struct rt_core *core;
    struct rt_actions *actions;
    uint64_t incarnation;
    struct arena arena, out;
    struct link to_router[PEERS], from_router[PEERS];
    struct fake_worker workers[WORKERS];
    struct fake_gateway gateways[GATEWAYS];
    uint32_t worker_count, gateway_count;
    uint32_t delay_us_max, unsent_permille, lose_permille, repeat_permille, busy_permille;
    bool assign_replaces; /* a second WorkerAssign begins anew, else it is ignored */
    bool faults;          /* anything was broken in this run */
    enum look_answer look_answer;
    uint32_t look_worker, looks; /* whose map it is; questions so far */
    uint64_t look_us;            /* how long an answer takes */
    struct look_up look_ups[256];
    uint32_t steps_per_emit;
    uint64_t ids_made;
};

/* ---- links ---- */

static inline void link_clear(struct link *l)
{
    while (l->first != NULL) {
        struct packet *p = l->first;
        l->first = p->next;
        free(p);
    }
    memset(l, 0, sizeof(*l));
}

static inline void link_push(struct world *w, struct link *l, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    size_t bytes = 0;
    arena_reset(&w->out);
    assert_int_equal(wire_encode(&w->out, m, frames, &count), ERR_OK);
    for (uint32_t i = 0; i < count; i++)
        bytes += frames[i].count;
    struct packet *p = malloc(sizeof(*p) + bytes);
    assert_non_null(p);
    p->next = NULL;
    p->frame_count = count;
    p->at_us = w->now_us + (w->delay_us_max != 0 ? rng_below(&w->rng, w->delay_us_max) : 0);
    if (p->at_us < l->last_us)
        p->at_us = l->last_us;
    l->last_us = p->at_us;
    bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        p->bytes[i] = frames[i].count;
        if (frames[i].count > 0)
            memcpy(p->data + bytes, frames[i].bytes, frames[i].count);
        bytes += frames[i].count;
    }
    if (l->last != NULL && l->count > 0)
        l->last->next = p;
    else
        l->first = p;
    l->last = p;
    l->count++;
}

static inline bool link_pop(struct world *w, struct link *l, struct msg *ret_m)
{
    struct packet *p = l->first;
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct err_detail detail;
    if (p == NULL || p->at_us > w->now_us)
        return false;
    l->first = p->next;
    l->count--;
    if (l->first == NULL)
        l->last = NULL;
    size_t at = 0;
    uint32_t frame_count = p->frame_count;
    arena_reset(&w->arena);
    for (uint32_t i = 0; i < frame_count; i++) {
        frames[i].bytes = arena_copy(&w->arena, p->data + at, p->bytes[i]);
        frames[i].count = p->bytes[i];
        at += p->bytes[i];
    }
    free(p);
    if (wire_decode(&w->arena, frames, frame_count, ret_m, &detail) != ERR_OK)
        fail_msg("decode: %s", detail.text);
    return true;
}

static inline struct rt_peer peer_of(uint32_t index)
{
    struct rt_peer peer;
    memset(&peer, 0, sizeof(peer));
    int n = index < WORKERS ? snprintf((char *)peer.bytes, 32, "worker-%u", index)
                            : snprintf((char *)peer.bytes, 32, "gateway-%u", index - WORKERS);
    peer.count = (uint8_t)n;
    return peer;
}

static inline uint32_t index_of(const struct rt_peer *peer)
{
    for (uint32_t i = 0; i < PEERS; i++) {
        struct rt_peer p = peer_of(i);
        if (p.count == peer->count && memcmp(p.bytes, peer->bytes, p.count) == 0)
            return i;
    }
    fail_msg("action for a peer that nobody is");
    return 0;
}

static inline bool peer_up(const struct world *w, uint32_t index)
{
    return index < WORKERS ? w->workers[index].up : w->gateways[index - WORKERS].up;
}

/* ---- Redis ---- */

static inline void look_up_begin(struct world *w, const struct rt_action *a)
{
    w->looks++;
    assert_true(a->u.look_up.session_key[0] != '\0' && a->u.look_up.cache_salt != NULL);
    for (uint32_t i = 0; i < ARRAY_COUNT(w->look_ups); i++) {
        if (w->look_ups[i].open)
            continue;
        w->look_ups[i] = (struct look_up){true, a->u.look_up.id, w->now_us + w->look_us};
        return;
    }
    fail_msg("too many questions for session maps");
}

/* ---- the router ---- */

static inline void router_step(struct world *w, const struct rt_event *first)
{
    static struct rt_event unsent[4096];
    struct rt_event e = *first;
    uint32_t unsent_count = 0, rounds = 0;
    for (;;) {
        e.now_us = w->now_us;
        e.unix_us = UNIX_BASE + w->now_us;
        rt_core_step(w->core, &e, w->actions);
        for (uint32_t i = 0; i < w->actions->count; i++) {
            struct rt_action *a = &w->actions->items[i];
            if (a->type == RT_LOOK_UP)
                look_up_begin(w, a);
            if (a->type != RT_SEND)
                continue;
            uint32_t to = index_of(&a->u.send.peer);
            bool sent = peer_up(w, to) && rng_below(&w->rng, 1000) >= w->unsent_permille;
            if (sent) {
                link_push(w, &w->from_router[to], &a->u.send.msg);
                continue;
            }
            enum msg_type type = a->u.send.msg.type;
            if ((type != MSG_TOKENS_EMITTED && type != MSG_WORKER_ASSIGN) ||
                unsent_count == ARRAY_COUNT(unsent))
                continue;
            struct rt_event *u = &unsent[unsent_count++];
            memset(u, 0, sizeof(*u));
            u->type = RT_EVENT_UNSENT;
            u->u.unsent.peer = a->u.send.peer;
            u->u.unsent.type = type;
            u->u.unsent.id = a->u.send.msg.id;
            if (type == MSG_TOKENS_EMITTED)
                u->u.unsent.seq = a->u.send.msg.u.tokens.seq;
        }
        if (unsent_count > 0) {
            e = unsent[--unsent_count];
        } else if (w->actions->more) {
            memset(&e, 0, sizeof(e));
            e.type = RT_EVENT_TICK;
        } else {
            break;
        }
        assert_true(++rounds < 100000);
    }
}

static inline void router_start(struct world *w)
{
    struct rt_event e = {.type = RT_EVENT_START};
    w->core = rt_core_create(&w->options);
    w->incarnation = rng_u64(&w->rng);
    e.u.start.incarnation = w->incarnation;
    e.u.start.seed = rng_u64(&w->rng);
    router_step(w, &e);
}

static inline void router_restart(struct world *w)
{
    rt_core_destroy(&w->core);
    for (uint32_t i = 0; i < PEERS; i++)
        link_clear(&w->to_router[i]);
    memset(w->look_ups, 0, sizeof(w->look_ups));
    w->faults = true;
    router_start(w);
}

static inline void look_up_end(struct world *w, struct look_up *l)
{
    static uint8_t items[3 * RT_MAP_ITEM_BYTES];
    const struct fake_worker *f = &w->workers[w->look_worker];
    struct rt_map map = {.epoch = 7 + (w->look_answer == LOOK_STALE),
                         .incarnation = f->kv_incarnation,
                         .token_count = 48,
                         .item_count = 3,
                         .items = items};
    struct rt_event e = {.type = RT_EVENT_MAP};
    memcpy(&map.model_fp, &f->model, sizeof(f->model));
    l->open = false;
    if (w->look_answer == LOOK_SILENT)
        return; /* the router's shell would say so after its deadline */
    e.u.map.id = l->id;
    e.u.map.map = w->look_answer == LOOK_ABSENT ? NULL : &map;
    router_step(w, &e);
}

static inline void look_ups_run(struct world *w)
{
    for (uint32_t i = 0; i < ARRAY_COUNT(w->look_ups); i++) {
        if (w->look_ups[i].open && w->now_us >= w->look_ups[i].at_us)
            look_up_end(w, &w->look_ups[i]);
    }
}

static inline void router_tick(struct world *w)
{
    struct rt_event e = {.type = RT_EVENT_TICK};
    router_step(w, &e);
}

/* ---- a worker ---- */

static inline void worker_up(struct world *w, uint32_t i, uint32_t seqs_max)
{
    struct fake_worker *f = &w->workers[i];
    memset(f, 0, sizeof(*f));
    f->up = true;
    f->seqs_max = seqs_max;
    f->blocks_total = 100;
    f->blocks_free = 50;
    f->context_max = 4096;
    f->state = MSG_WORKER_READY;
    f->incarnation = rng_u64(&w->rng) | 1;
    f->group = i;
    f->kv_incarnation = 1000 + i; /* kvmgr outlives its worker */
    f->adopt_valid = 3;
}

static inline void worker_kill(struct world *w, uint32_t i)
{
    w->workers[i].up = false;
    w->faults = true;
    link_clear(&w->to_router[i]);
    link_clear(&w->from_router[i]);
}

static inline struct fake_seq *seq_find(struct fake_worker *f, const struct msg_id *id)
{
    for (uint32_t s = 0; s < SEQS_MAX; s++) {
        if (f->seqs[s].used && memcmp(&f->seqs[s].id, id, sizeof(*id)) == 0)
            return &f->seqs[s];
    }
    return NULL;
}

static inline uint32_t seqs_live(const struct fake_worker *f)
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < SEQS_MAX; s++)
        count += f->seqs[s].used;
    return count;
}

static inline void worker_send(struct world *w, uint32_t i, const struct msg *m)
{
    struct fake_worker *f = &w->workers[i];
    if (m->type == MSG_TOKENS_EMITTED && f->lossy && rng_below(&w->rng, 1000) < w->lose_permille) {
        w->faults = true;
        if (m->u.tokens.finish == MSG_FINISH_NONE)
            return;
    }
    link_push(w, &w->to_router[i], m);
    if (m->type == MSG_TOKENS_EMITTED && rng_below(&w->rng, 1000) < w->repeat_permille)
        link_push(w, &w->to_router[i], m);
}

static inline void seq_end(struct world *w, uint32_t i, struct fake_seq *s, uint32_t finish,
                           uint32_t code)
{
    struct msg m = {.type = MSG_TOKENS_EMITTED, .id = s->id};
    struct fake_worker *f = &w->workers[i];
    m.u.tokens.seq = s->k;
    m.u.tokens.finish = finish;
    m.u.tokens.code = code;
    m.u.tokens.has_receipt = true;
    m.u.tokens.receipt.spec = "fixed:7";
    m.u.tokens.receipt.resumed = s->resumed;
    s->used = false;
    f->ledger.live--;
    if (finish == MSG_FINISH_CANCELLED)
        f->ledger.cancelled++;
    else
        f->ledger.failed++;
    worker_send(w, i, &m);
}

static inline uint32_t stop_of(uint64_t prompt)
{
    return prompt % 3 == 0 ? 1 + (uint32_t)(prompt / 3 % 200) : UINT32_MAX;
}

static inline void stream_placed(struct world *w, uint32_t worker, const struct msg_id *id)
{
    for (uint32_t i = 0; i < GATEWAYS * STREAMS; i++) {
        struct stream *s = &w->gateways[i / STREAMS].streams[i % STREAMS];
        if (s->state != S_FREE && memcmp(&s->id, id, sizeof(*id)) == 0)
            s->worker = worker;
    }
}

static inline void worker_assign(struct world *w, uint32_t i, const struct msg *m)
{
    struct fake_worker *f = &w->workers[i];
    const struct msg_request *q = &m->u.request;
    struct msg reply = {.type = MSG_ASSIGN_REPLY, .id = m->id};
    struct fake_seq *s = seq_find(f, &m->id);
    bool fresh = s == NULL;
    for (uint32_t n = 0; s == NULL && n < f->seqs_max; n++) {
        if (!f->seqs[n].used)
            s = &f->seqs[n];
    }
    if (f->drain)
        reply.u.assign_reply.code = ERR_DRAINING;
    else if (s == NULL || rng_below(&w->rng, 1000) < w->busy_permille)
        reply.u.assign_reply.code = ERR_BUSY;
    if (!fresh)
        reply.u.assign_reply.code = ERR_OK;
    worker_send(w, i, &reply);
    if (reply.u.assign_reply.code != ERR_OK || (!fresh && !w->assign_replaces))
        return;
    uint64_t prompt = prompt_of(q->ids, q->prompt_count);
    uint32_t k = q->ids_count - q->prompt_count;
    assert_true(k < q->limits.output_tokens_max);
    for (uint32_t n = 0; n < k; n++) /* what comes back are the very tokens */
        assert_int_equal(q->ids[q->prompt_count + n], token_at(prompt, n));
    *s = (struct fake_seq){.used = true,
                           .id = m->id,
                           .prompt = prompt,
                           .prompt_count = q->prompt_count,
                           .k = k,
                           .left = f->prefill_per_s > 0 && !q->canary ? q->ids_count : 0,
                           .max = q->limits.output_tokens_max,
                           .stop_at = q->limits.ignore_eos ? UINT32_MAX : stop_of(prompt),
                           .canary = q->canary,
                           .resumed = q->attempt > 0 || k > 0};
    if (fresh) {
        f->ledger.accepted++;
        f->ledger.live++;
    }
    if (!q->canary) {
        stream_placed(w, i, &m->id);
        f->assigned++;
        f->resumed_with = k;
    }
}

static inline void seq_emit(struct world *w, uint32_t i, struct fake_seq *s)
{
    struct fake_worker *f = &w->workers[i];
    struct msg m = {.type = MSG_TOKENS_EMITTED, .id = s->id};
    uint32_t ids[16], count = 1 + rng_below(&w->rng, 8);
    float logprob[16];
    if (count > s->max - s->k)
        count = s->max - s->k;
    if (s->stop_at != UINT32_MAX && s->k + count > s->stop_at)
        count = s->stop_at > s->k ? s->stop_at - s->k : 1;
    for (uint32_t n = 0; n < count; n++) {
        ids[n] = token_at(s->prompt, s->k + n) + (s->canary && f->wrong_canary);
        logprob[n] = (float)(ids[n] % 1000);
    }
    m.u.tokens.seq = s->k;
    m.u.tokens.count = count;
    m.u.tokens.ids = ids;
    m.u.tokens.logprobs = true;
    m.u.tokens.logprob = logprob;
    m.u.tokens.has_receipt = true;
    m.u.tokens.receipt.steps = ++s->steps;
    s->k += count;
    if (s->k == s->stop_at)
        m.u.tokens.finish = MSG_FINISH_STOP;
    else if (s->k >= s->max)
        m.u.tokens.finish = MSG_FINISH_LENGTH;
    if (m.u.tokens.finish != MSG_FINISH_NONE) {
        m.u.tokens.receipt.spec = "fixed:7";
        m.u.tokens.receipt.output_tokens = 1;
        m.u.tokens.receipt.resumed = s->resumed;
        s->used = false;
        f->ledger.live--;
        f->ledger.finished++;
    }
    worker_send(w, i, &m);
}

static inline uint64_t tokens_queued(const struct fake_worker *f)
{
    uint64_t count = 0;
    for (uint32_t s = 0; s < SEQS_MAX; s++)
        count += f->seqs[s].used ? f->seqs[s].left : 0;
    return count;
}

static inline void worker_prefill(struct fake_worker *f)
{
    uint32_t budget = (uint32_t)((uint64_t)f->prefill_per_s * STEP_US / 1000000);
    for (uint32_t n = 0; n < SEQS_MAX && budget > 0; n++) {
        struct fake_seq *s = &f->seqs[n];
        uint32_t part = !s->used ? 0 : s->left < budget ? s->left : budget;
        s->left -= part;
        budget -= part;
        f->step_us = part > 0 ? f->step_us % 1000 + 1 : f->step_us;
    }
}

static inline void worker_state_send(struct world *w, uint32_t i)
{
    struct fake_worker *f = &w->workers[i];
    struct msg m = {.type = MSG_WORKER_STATE};
    uint32_t canary[16];
    for (uint32_t n = 0; n < 16; n++)
        canary[n] = n + 1;
    m.u.worker = (struct msg_worker_info){.worker_id = i,
                                          .incarnation = f->incarnation,
                                          .state = f->drain ? MSG_WORKER_DRAINING : f->state,
                                          .seqs_live = seqs_live(f),
                                          .seqs_max = f->seqs_max,
                                          .context_max = f->context_max,
                                          .tokens_queued = tokens_queued(f),
                                          .kv_state = f->kv_state,
                                          .step_us_last = f->step_us,
                                          .blocks_total = f->blocks_total,
                                          .blocks_free = f->blocks_free,
                                          .block_tokens = 16,
                                          .ledger = f->ledger,
                                          .quantization = "bf16",
                                          .spec = "fixed:7",
                                          .config_hash = "abc",
                                          .canary_count = 16,
                                          .canary_ids = canary,
                                          .canary_output_count = CANARY_N,
                                          .canary_hash = canary_hash(),
                                          .group = f->group,
                                          .kv_epoch = 7,
                                          .kv_incarnation = f->kv_incarnation};
    memcpy(&m.u.worker.kv_model_fp, &f->model, sizeof(f->model));
    f->state_us = w->now_us;
    link_push(w, &w->to_router[i], &m);
}

static inline void adopt_reply(struct world *w, uint32_t i, const struct msg *m)
{
    struct msg reply = {.type = MSG_KV_ADOPT_REPLY, .id = m->id};
    reply.u.kv_adopt_reply.valid_count = w->workers[i].adopt_valid;
    worker_send(w, i, &reply);
}

static inline void worker_msg(struct world *w, uint32_t i, const struct msg *m)
{
    struct fake_worker *f = &w->workers[i];
    struct fake_seq *s;
    switch ((int)m->type) {
    case MSG_WORKER_ASSIGN:
        worker_assign(w, i, m);
        break;
    case MSG_KV_ADOPT:
        f->adopts++;
        assert_true(m->u.kv_adopt.count == 3 && m->u.kv_adopt.session_key[0] != '\0');
        if (!f->adopt_mute)
            adopt_reply(w, i, m);
        break;
    case MSG_WORKER_CANCEL:
        s = seq_find(f, &m->id);
        if (s != NULL)
            s->cancelled = true;
        break;
    case MSG_WORKER_DRAIN:
        f->drain = true;
        worker_state_send(w, i);
        break;
    case MSG_WORKER_RESUME:
        f->drain = false;
        worker_state_send(w, i);
        break;
    case MSG_ROUTER_STATE:
        if (f->router_incarnation != m->u.router.incarnation) {
            memset(f->seqs, 0, sizeof(f->seqs));
            f->ledger.cancelled += f->ledger.live;
            f->ledger.live = 0;
        }
        f->router_incarnation = m->u.router.incarnation;
        break;
    default:
        fail_msg("worker got %s", msg_type_name(m->type));
    }
}

static inline void worker_run(struct world *w, uint32_t i)
{
    struct fake_worker *f = &w->workers[i];
    struct msg m;
    if (!f->up || f->frozen)
        return;
    while (link_pop(w, &w->from_router[i], &m))
        worker_msg(w, i, &m);
    if (w->now_us - f->state_us >= 500000 || f->state_us == 0)
        worker_state_send(w, i);
    if (f->hung)
        return;
    worker_prefill(f);
    if (f->state != MSG_WORKER_READY || w->now_us / STEP_US % w->steps_per_emit != 0)
        return;
    for (uint32_t n = 0; n < SEQS_MAX; n++) {
        struct fake_seq *s = &f->seqs[n];
        if (!s->used || (s->canary && f->mute_canary))
            continue;
        if (s->left > 0 && !s->cancelled)
            continue;
        if (s->cancelled)
            seq_end(w, i, s, MSG_FINISH_CANCELLED, ERR_OK);
        else
            seq_emit(w, i, s);
    }
}

/* ---- a gateway ---- */

static inline void gateway_up(struct world *w, uint32_t i)
{
    struct fake_gateway *g = &w->gateways[i];
    memset(g, 0, sizeof(*g));
    g->up = true;
    g->incarnation = rng_u64(&w->rng) | 1;
}

static inline void gateway_kill(struct world *w, uint32_t i)
{
    w->gateways[i].up = false;
    w->faults = true;
    link_clear(&w->to_router[WORKERS + i]);
    link_clear(&w->from_router[WORKERS + i]);
}

static inline uint32_t seed_of(const struct stream *s)
{
    uint32_t own = (uint32_t)s->id.bytes[0] | (uint32_t)s->id.bytes[1] << 8;
    return s->prompt_seed != 0 ? s->prompt_seed : own;
}

static inline void stream_submit(struct world *w, uint32_t i, struct stream *s)
{
    struct msg m = {.type = MSG_ROUTER_SUBMIT, .id = s->id};
    uint32_t ids[65536];
    char client[16], session[16] = "";
    snprintf(client, sizeof(client), "client-%u", s->client);
    if (s->session != 0)
        snprintf(session, sizeof(session), "talk-%u", s->session);
    ids_of(seed_of(s), s->prompt_count, ids);
    for (uint32_t n = 0; n < s->k; n++)
        ids[s->prompt_count + n] = token_at(s->prompt, n);
    m.u.request.client_id = client;
    m.u.request.session_key = session;
    m.u.request.priority = s->priority;
    m.u.request.prompt_count = s->prompt_count;
    m.u.request.ids_count = s->prompt_count + s->k;
    m.u.request.ids = ids;
    m.u.request.sampling.top_p = 1;
    m.u.request.sampling.repetition_penalty = 1;
    m.u.request.limits.output_tokens_max = s->max;
    m.u.request.limits.deadline_unix_us = s->deadline_unix_us;
    m.u.request.group_index = s->group_index;
    m.u.request.group_count = s->group_count;
    m.u.request.group_tokens = s->group_tokens;
    m.u.request.attempt = s->sent_us != 0;
    m.u.request.made_by = s->made_by;
    s->state = S_SENT;
    s->sent_us = w->now_us;
    link_push(w, &w->to_router[WORKERS + i], &m);
}

static inline struct stream *stream_new(struct world *w, uint32_t i, uint32_t prompt_count,
                                        uint32_t max)
{
    struct fake_gateway *g = &w->gateways[i];
    for (uint32_t n = 0; n < STREAMS; n++) {
        struct stream *s = &g->streams[n];
        if (s->state != S_FREE)
            continue;
        memset(s, 0, sizeof(*s));
        uint64_t serial = ++w->ids_made;
        memcpy(s->id.bytes, &serial, 8);
        s->id.bytes[15] = (uint8_t)(i + 1);
        s->prompt_count = prompt_count;
        s->max = max;
        uint32_t ids[65536];
        ids_of(seed_of(s), prompt_count, ids);
        s->prompt = prompt_of(ids, prompt_count);
        return s;
    }
    return NULL;
}

static inline struct stream *stream_open(struct world *w, uint32_t i, uint32_t prompt_count,
                                         uint32_t max)
{
    struct stream *s = stream_new(w, i, prompt_count, max);
    assert_non_null(s);
    stream_submit(w, i, s);
    return s;
}

static inline void stream_cancel(struct world *w, uint32_t i, struct stream *s)
{
    struct msg m = {.type = MSG_ROUTER_CANCEL, .id = s->id};
    s->cancelled = true;
    link_push(w, &w->to_router[WORKERS + i], &m);
}

static inline struct stream *stream_find(struct fake_gateway *g, const struct msg_id *id)
{
    for (uint32_t n = 0; n < STREAMS; n++) {
        if (g->streams[n].state != S_FREE && memcmp(&g->streams[n].id, id, sizeof(*id)) == 0)
            return &g->streams[n];
    }
    return NULL;
}

static inline void stream_tokens(struct world *w, uint32_t i, const struct msg *m)
{
    const struct msg_tokens *t = &m->u.tokens;
    struct stream *s = stream_find(&w->gateways[i], &m->id);
    if (s == NULL || s->state == S_OVER) {
        return; /* a repetition of the end, or of a stream before our restart */
    }
    if (t->seq > s->k) { /* a gap: ask again from what we have */
        assert_true(w->faults || w->unsent_permille > 0);
        stream_submit(w, i, s);
        return;
    }
    for (uint32_t n = 0; n < t->count; n++) {
        assert_int_equal(t->ids[n], token_at(s->prompt, t->seq + n));
        if (t->logprobs)
            assert_true(t->logprob[n] == (float)(t->ids[n] % 1000));
        if (t->seq + n < s->k)
            continue;
        assert_false(s->cancelled && !w->faults && w->now_us - s->sent_us > 60000000);
        s->k++;
    }
    assert_true(s->k <= s->max);
    if (t->count > 0)
        s->made_by = t->made_by;
    if (t->has_receipt)
        s->steps_told = t->receipt.steps;
    if (t->finish == MSG_FINISH_NONE)
        return;
    assert_true(s->k == t->seq + t->count || t->finish >= MSG_FINISH_CANCELLED);
    s->finish = t->finish;
    s->code = t->code;
    s->finishes++;
    s->state = S_OVER;
    s->receipt = t->has_receipt;
    s->r = t->receipt;
    s->r.spec = s->r.config_hash = NULL;
    assert_int_equal(s->finishes, 1);
    if (t->finish == MSG_FINISH_LENGTH)
        assert_int_equal(s->k, s->max);
    if (t->finish == MSG_FINISH_STOP)
        assert_int_equal(s->k, stop_of(s->prompt));
    if (t->finish == MSG_FINISH_CANCELLED)
        assert_true(s->cancelled || s->frozen_over);
    if (t->finish != MSG_FINISH_CANCELLED) {
        assert_true(s->receipt);
        assert_int_equal(s->r.output_tokens, s->k);
        assert_int_equal(s->r.prompt_tokens, s->prompt_count);
    }
}

static inline void gateway_msg(struct world *w, uint32_t i, const struct msg *m)
{
    struct fake_gateway *g = &w->gateways[i];
    struct stream *s;
    switch ((int)m->type) {
    case MSG_SUBMIT_REPLY:
        s = stream_find(g, &m->id);
        if (s == NULL || s->state != S_SENT)
            break;
        s->reply = m->u.submit_reply.code;
        s->retry_ms = m->u.submit_reply.retry_after_ms;
        s->concurrency = m->u.submit_reply.concurrency;
        s->state = s->reply == ERR_OK ? S_LIVE : S_OVER;
        break;
    case MSG_TOKENS_EMITTED:
        stream_tokens(w, i, m);
        break;
    case MSG_ROUTER_STATE: {
        bool restarted =
            g->router_incarnation != 0 && g->router_incarnation != m->u.router.incarnation;
        g->router_incarnation = m->u.router.incarnation;
        g->router = m->u.router;
        snprintf(g->reason, sizeof(g->reason), "%s", m->u.router.reason);
        g->router.reason = g->reason;
        g->router_us = w->now_us;
        g->router_count++;
        for (uint32_t n = 0; restarted && n < STREAMS; n++) {
            if (g->streams[n].state == S_SENT || g->streams[n].state == S_LIVE)
                stream_submit(w, i, &g->streams[n]);
        }
        break;
    }
    default:
        fail_msg("gateway got %s", msg_type_name(m->type));
    }
}

static inline void announce(struct world *w, uint32_t i)
{
    struct fake_gateway *g = &w->gateways[i];
    struct msg m = {.type = MSG_ROUTER_ANNOUNCE};
    struct msg_id ids[STREAMS];
    uint32_t count = 0;
    for (uint32_t n = 0; n < STREAMS; n++) {
        if (g->streams[n].state == S_SENT || g->streams[n].state == S_LIVE)
            ids[count++] = g->streams[n].id;
    }
    m.u.announce = (struct msg_announce){.kind = "gateway",
                                         .id = i,
                                         .incarnation = g->incarnation,
                                         .live_count = count,
                                         .live_ids = ids};
    g->announce_us = w->now_us;
    link_push(w, &w->to_router[WORKERS + i], &m);
}

static inline void gateway_run(struct world *w, uint32_t i)
{
    struct fake_gateway *g = &w->gateways[i];
    struct msg m;
    if (!g->up || g->frozen)
        return;
    while (link_pop(w, &w->from_router[WORKERS + i], &m))
        gateway_msg(w, i, &m);
    if (w->now_us - g->announce_us >= 500000 || g->announce_us == 0)
        announce(w, i);
    for (uint32_t n = 0; n < STREAMS; n++) {
        struct stream *s = &g->streams[n];
        if (s->state != S_SENT || w->now_us - s->sent_us < 10000000)
            continue;
        stream_cancel(w, i, s);
        s->state = S_OVER;
        s->reply = ERR_TIMEOUT;
    }
}

/* ---- time ---- */

static inline void world_init(struct world *w, uint64_t seed, uint32_t workers, uint32_t gateways)
{
    memset(w, 0, sizeof(*w));
    rng_init(&w->rng, seed);
    arena_init(&w->arena, 1 << 18, 1 << 26);
    arena_init(&w->out, 1 << 18, 1 << 26);
    w->now_us = 1000000;
    w->worker_count = workers;
    w->gateway_count = gateways;
    w->steps_per_emit = 4;
    w->options = (struct rt_options){.requests_max = 256,
                                     .queue_requests_max = 64,
                                     .queue_tokens_max = 20000,
                                     .store_tokens_max = 200000,
                                     .workers_max = 4,
                                     .gateways_max = 4,
                                     .worker_silence_us_max = 2500000,
                                     .gateway_silence_us_max = 2000000,
                                     .cancel_us_max = 2000000,
                                     .no_worker_us_max = 30000000,
                                     .canary_us = 2000000,
                                     .canary_silence_us_max = 2300000,
                                     .progress_us_max = 4000000,
                                     .sessions_max = 256,
                                     .map_us_max = 40000};
    w->actions = calloc(1, sizeof(*w->actions));
    assert_non_null(w->actions);
    for (uint32_t i = 0; i < workers; i++)
        worker_up(w, i, 8);
    for (uint32_t i = 0; i < gateways; i++)
        gateway_up(w, i);
    router_start(w);
}

static inline void world_fini(struct world *w)
{
    rt_core_destroy(&w->core);
    free(w->actions);
    for (uint32_t i = 0; i < PEERS; i++) {
        link_clear(&w->to_router[i]);
        link_clear(&w->from_router[i]);
    }
    arena_fini(&w->arena);
    arena_fini(&w->out);
}

static inline void world_step(struct world *w)
{
    w->now_us += STEP_US;
    for (uint32_t i = 0; i < PEERS; i++) {
        struct msg m;
        struct rt_peer peer = peer_of(i);
        while (link_pop(w, &w->to_router[i], &m)) {
            struct rt_event e = {.type = RT_EVENT_MSG, .u.msg = {.peer = &peer, .msg = &m}};
            router_step(w, &e);
        }
    }
    if (w->now_us - w->tick_us >= 50000) {
        w->tick_us = w->now_us;
        router_tick(w);
    }
    look_ups_run(w);
    for (uint32_t i = 0; i < w->worker_count; i++)
        worker_run(w, i);
    for (uint32_t i = 0; i < w->gateway_count; i++)
        gateway_run(w, i);
}

static inline void world_run_ms(struct world *w, uint64_t ms)
{
    uint64_t end_us = w->now_us + ms * 1000;
    while (w->now_us < end_us)
        world_step(w);
}

static inline struct rt_info world_info(struct world *w)
{
    struct rt_info info;
    rt_core_info(w->core, &info);
    return info;
}

/* Nothing is live anywhere, all counts agree, all token memory is back. */
static inline void world_idle_check(struct world *w)
{
    struct rt_info info = world_info(w);
    const struct msg_ledger *l = &info.router.ledger;
    assert_int_equal(l->live, 0);
    assert_int_equal(l->accepted, l->finished + l->failed + l->cancelled);
    assert_int_equal(info.router.waiting, 0);
    assert_int_equal(info.router.running, 0);
    assert_int_equal(info.store_tokens_free, w->options.store_tokens_max / 128 * 128);
    for (uint32_t i = 0; i < w->worker_count; i++) {
        for (uint32_t n = 0; w->workers[i].up && n < SEQS_MAX; n++)
            assert_true(!w->workers[i].seqs[n].used || w->workers[i].seqs[n].canary);
    }
}

#endif
