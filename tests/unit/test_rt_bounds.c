/* SPDX-License-Identifier: Apache-2.0 */
/* As many workers, gateways and requests as a router takes: no step has more actions than fit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/hash.h"
#include "router/rt_core.h"

#define REQUESTS 480u
#define SEQS     40u
#define UNIX_US  1700000000000000ull

struct rig {
    struct rt_core *core;
    struct rt_actions *actions;
    uint64_t now_us;
    uint32_t actions_most, sends_most;
    uint32_t assigned, states, traces; /* in all */
    uint32_t submits_ok;
    bool still; /* only the last worker computes anything any more */
};

static const uint32_t answer[4] = {5, 6, 7, 8}; /* of every canary */

static struct rt_peer peer_of(char kind, uint32_t i)
{
    struct rt_peer peer = {.count = 3};
    peer.bytes[0] = (uint8_t)kind;
    peer.bytes[1] = (uint8_t)(i / 10 + '0');
    peer.bytes[2] = (uint8_t)(i % 10 + '0');
    return peer;
}

static void taken_by(struct rig *g, const struct rt_peer *worker, const struct msg_id *id,
                     bool canary);

/* Steps until the router has no more to do; who is given a request takes it. */
static void step(struct rig *g, struct rt_event e)
{
    struct given {
        struct rt_peer peer;
        struct msg_id id;
        bool canary;
    } *given = calloc(2 * REQUESTS, sizeof(*given));
    uint32_t given_count = 0;
    assert_non_null(given);
    do {
        e.now_us = g->now_us;
        e.unix_us = UNIX_US + g->now_us;
        rt_core_step(g->core, &e, g->actions);
        uint32_t sends = 0;
        for (uint32_t i = 0; i < g->actions->count; i++) {
            const struct rt_action *a = &g->actions->items[i];
            g->traces += a->type == RT_TRACE;
            if (a->type != RT_SEND)
                continue;
            const struct msg *m = &a->u.send.msg;
            sends++;
            g->states += m->type == MSG_ROUTER_STATE;
            g->submits_ok += m->type == MSG_SUBMIT_REPLY && m->u.submit_reply.code == ERR_OK;
            if (m->type != MSG_WORKER_ASSIGN)
                continue;
            g->assigned += !m->u.request.canary;
            assert_true(given_count < 2 * REQUESTS);
            given[given_count++] = (struct given){a->u.send.peer, m->id, m->u.request.canary};
        }
        if (g->actions->count > g->actions_most)
            g->actions_most = g->actions->count;
        if (sends > g->sends_most)
            g->sends_most = sends;
        e = (struct rt_event){.type = RT_EVENT_TICK};
    } while (g->actions->more);
    for (uint32_t i = 0; i < given_count; i++)
        taken_by(g, &given[i].peer, &given[i].id, given[i].canary);
    free(given);
}

static void tell(struct rig *g, const struct rt_peer *peer, const struct msg *m)
{
    step(g, (struct rt_event){.type = RT_EVENT_MSG, .u.msg = {.peer = peer, .msg = m}});
}

static void taken_by(struct rig *g, const struct rt_peer *worker, const struct msg_id *id,
                     bool canary)
{
    struct msg m = {.type = MSG_ASSIGN_REPLY, .id = *id};
    m.u.assign_reply.text = "";
    tell(g, worker, &m);
    bool last = memcmp(worker->bytes, "w15", 3) == 0;
    if (!canary || (g->still && !last))
        return;
    m = (struct msg){.type = MSG_TOKENS_EMITTED, .id = *id};
    m.u.tokens = (struct msg_tokens){.count = 4, .ids = answer, .finish = MSG_FINISH_LENGTH};
    tell(g, worker, &m);
}

/* The same at every call: nothing was computed since. */
static void worker_says(struct rig *g, uint32_t i)
{
    static const uint32_t canary[4] = {1, 2, 3, 4};
    struct hash128 hash = hash_xxh3_once(answer, sizeof(answer));
    struct rt_peer peer = peer_of('w', i);
    struct msg m = {.type = MSG_WORKER_STATE};
    m.u.worker = (struct msg_worker_info){.worker_id = i,
                                          .incarnation = 100 + i,
                                          .state = MSG_WORKER_READY,
                                          .seqs_max = SEQS,
                                          .context_max = 4096,
                                          .blocks_total = 1000,
                                          .blocks_free = 1000,
                                          .block_tokens = 16,
                                          .quantization = "bf16",
                                          .spec = "off",
                                          .config_hash = "a",
                                          .canary_count = 4,
                                          .canary_ids = canary,
                                          .canary_output_count = 4,
                                          .group = i,
                                          .kv_epoch = 7};
    memcpy(&m.u.worker.canary_hash, hash.bytes, sizeof(m.u.worker.canary_hash));
    tell(g, &peer, &m);
}

static struct msg_id id_of(uint32_t n)
{
    struct msg_id id = {{0xaa}};
    memcpy(id.bytes + 4, &n, sizeof(n));
    return id;
}

static void gateway_says(struct rig *g, uint32_t i)
{
    static struct msg_id live[REQUESTS];
    struct rt_peer peer = peer_of('g', i);
    struct msg m = {.type = MSG_ROUTER_ANNOUNCE};
    for (uint32_t n = 0; n < REQUESTS; n++)
        live[n] = id_of(n);
    m.u.announce = (struct msg_announce){.kind = "gateway",
                                         .id = i,
                                         .incarnation = 7,
                                         .live_count = i == 0 ? REQUESTS : 0,
                                         .live_ids = live};
    tell(g, &peer, &m);
}

static void submit(struct rig *g, uint32_t n)
{
    struct rt_peer peer = peer_of('g', 0);
    uint32_t ids[4] = {n, 2, 3, 4};
    struct msg m = {.type = MSG_ROUTER_SUBMIT, .id = id_of(n)};
    m.u.request = (struct msg_request){.session_key = "",
                                       .cache_salt = "",
                                       .effort = "",
                                       .client_id = "c",
                                       .spec = "",
                                       .prompt_count = 4,
                                       .ids_count = 4,
                                       .ids = ids};
    m.u.request.sampling.top_p = 1;
    m.u.request.sampling.repetition_penalty = 1;
    m.u.request.limits.output_tokens_max = 500;
    tell(g, &peer, &m);
}

static void rig_begin(struct rig *g)
{
    struct rt_options o = {.requests_max = 1024,
                           .queue_requests_max = 1024,
                           .queue_tokens_max = 100000,
                           .store_tokens_max = 200000,
                           .workers_max = RT_WORKERS_MAX,
                           .gateways_max = RT_GATEWAYS_MAX,
                           .worker_silence_us_max = 2500000,
                           .gateway_silence_us_max = 2500000,
                           .cancel_us_max = 2000000,
                           .no_worker_us_max = 30000000,
                           .canary_us = 500000,
                           .canary_silence_us_max = 500000,
                           .progress_us_max = 4000000,
                           .sessions_max = 256};
    *g = (struct rig){.core = rt_core_create(&o), .now_us = 1000000};
    g->actions = calloc(1, sizeof(*g->actions));
    assert_non_null(g->actions);
    step(g, (struct rt_event){.type = RT_EVENT_START, .u.start = {.incarnation = 1, .seed = 1}});
}

/* All workers but one stand still with everything they were given, one comes to take it: the tick
 * that sees it moves all, asks all canaries and says its state to all. */
static void everything_at_once(void **state)
{
    (void)state;
    struct rig g;
    rig_begin(&g);
    for (uint32_t i = 0; i < RT_GATEWAYS_MAX; i++)
        gateway_says(&g, i);
    for (uint32_t i = 0; i + 1 < RT_WORKERS_MAX; i++)
        worker_says(&g, i);
    step(&g, (struct rt_event){.type = RT_EVENT_TICK}); /* canaries */
    for (uint32_t n = 0; n < REQUESTS; n++)
        submit(&g, n);
    assert_int_equal(g.submits_ok, REQUESTS);
    assert_int_equal(g.assigned, REQUESTS);
    for (uint32_t round = 0; round < 24; round++) {
        g.now_us += 500000;
        g.still = true;
        for (uint32_t i = 0; i < RT_GATEWAYS_MAX; i++)
            gateway_says(&g, i);
        for (uint32_t i = 0; i < RT_WORKERS_MAX; i++)
            if (i + 1 < RT_WORKERS_MAX || round >= 5)
                worker_says(&g, i);
        g.states = 0;
        step(&g, (struct rt_event){.type = RT_EVENT_TICK});
        assert_true(g.states >= RT_GATEWAYS_MAX + RT_WORKERS_MAX - 1); /* nobody is left out */
    }
    print_message("at most %u actions a step, %u of them messages; %u assignments\n",
                  g.actions_most, g.sends_most, g.assigned);
    assert_true(g.actions_most <= RT_ACTIONS_MAX && g.actions_most > RT_ACTIONS_MAX / 2);
    assert_true(g.assigned > REQUESTS); /* what stood still went on */
    rt_core_destroy(&g.core);
    free(g.actions);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
