/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_core_state.h - inside of the router's core, shared by its files (pure).
 *
 * Nothing outside router/rt_*.c of the core includes this. */
#ifndef ROUTER_RT_CORE_STATE_H
#define ROUTER_RT_CORE_STATE_H

#include "lib/base/rng.h"
#include "router/rt_core.h"
#include "lib/base/check.h"
#include "router/rt_queue.h"
#include "router/rt_rate.h"
#include "router/rt_session.h"
#include "router/rt_store.h"
#include "router/rt_table.h"

#define RT_CORE_MAGIC 0x5254434fu

/* What a step sends without asking: to each worker drain, cancel and question of its canary, and
 * the state to all.  Traces and observations leave that room. */
#define RT_SENDS_UNASKED (4u * RT_WORKERS_MAX + RT_GATEWAYS_MAX)
/* Loops that ask rt_room find room for more than one round of theirs. */
#define RT_ACTIONS_RESERVED 64u
STATIC_CHECK(RT_SENDS_UNASKED + RT_ACTIONS_RESERVED < RT_ACTIONS_MAX);
/* Room for one request of the largest size and its bias. */
#define RT_SCRATCH_WORDS (MSG_IDS_MAX + 2u * MSG_BIAS_MAX + 2u * MSG_EMIT_IDS_MAX)
/* A router that has just started takes requests before it knows of a worker: streams of its
 * predecessor come back. */
#define RT_START_GRACE_US 5000000u
#define RT_LOSSES_MAX     4u       /* in a row without a token: the request kills workers */
#define RT_ACK_US_MAX     2000000u /* then the assignment is sent again */
#define RT_LINGER_US      200000u  /* a finish may still come back unsent */
#define RT_NAMED_US       1000000u /* younger requests need not be named by an announcement */
#define RT_BROADCAST_US   500000u
#define RT_SCAN_US        40000u
#define RT_REFUSED_US     100000u   /* no assignment to a worker that has just refused one */
#define RT_FORGET_US      60000000u /* lost workers leave the table */
#define RT_IDLE_REPORTS   4u
#define RT_DRAIN_IDLE_US  500000u /* a draining worker without work this long has no next turns */

struct rt_core {
    uint32_t magic;
    bool started;
    struct rt_options options;
    struct rt_store *store;
    struct rt_queue *queue;
    struct rt_table *table;
    struct rt_sessions *sessions;
    struct rt_rate rate;
    struct rng rng;
    uint64_t incarnation, start_us, now_us, unix_us;
    struct rt_actions *actions;
    uint32_t *scratch;
    uint32_t scratch_used;
    struct rt_link pending, done;
    uint64_t order_next, announce_serial;
    struct msg_ledger ledger;
    struct rt_stats stats;
    bool ever_usable;
    uint64_t usable_us;   /* when some worker was usable last */
    uint32_t context_max; /* of the workers usable then */
    uint64_t broadcast_us, scan_us;
    bool ready_sent;
    uint32_t context_sent;
    bool draining;   /* nothing new is admitted; streams that come back are */
    char text[256];  /* of a refusal */
    char reason[64]; /* why no worker is ready, where it names one */
};

/* rt_core.c */
bool rt_room(const struct rt_core *c);
struct msg *rt_send(struct rt_core *c, const struct rt_peer *peer, enum msg_type type,
                    const struct msg_id *id);
void rt_trace(struct rt_core *c, enum rt_trace_level level, const char *text,
              const struct rt_peer *peer, const struct msg_id *id, uint64_t value);
void rt_observe(struct rt_core *c, enum rt_observe what, double value);
uint32_t *rt_scratch(struct rt_core *c, uint32_t words); /* NULL: not in this step */
void rt_pend(struct rt_core *c, struct rt_request *r);
void rt_state_send(struct rt_core *c, const struct rt_peer *peer);
bool rt_ready(struct rt_core *c, const char **ret_reason);

/* rt_request.c: what may happen to one request */
bool rt_request_full(const struct rt_core *c, const struct rt_request *r);
/* A worker knows only its own part of a resumed request: adds what was before it. */
void rt_request_receipt(const struct rt_request *r, struct msg_receipt *receipt);
void rt_request_finish(struct rt_core *c, struct rt_request *r, enum msg_finish finish,
                       enum err code, const struct msg_receipt *receipt);
void rt_request_cancel(struct rt_core *c, struct rt_request *r);
void rt_request_requeue(struct rt_core *c, struct rt_request *r, bool lost);
void rt_request_resync(struct rt_core *c, struct rt_request *r);
void rt_request_release(struct rt_core *c, struct rt_request *r);
bool rt_request_work(struct rt_core *c, struct rt_request *r); /* false: go on in the next step */
bool rt_assign_send(struct rt_core *c, struct rt_request *r);
void rt_request_tick(struct rt_core *c, struct rt_request *r);

/* rt_admit.c: gateways */
void rt_on_submit(struct rt_core *c, const struct rt_peer *peer, const struct msg *m);
void rt_on_cancel(struct rt_core *c, const struct rt_peer *peer, const struct msg *m);
void rt_on_announce(struct rt_core *c, const struct rt_peer *peer, const struct msg *m);
void rt_gateways_tick(struct rt_core *c);

/* rt_place.c: workers */
void rt_on_worker_state(struct rt_core *c, const struct rt_peer *peer, const struct msg *m);
void rt_on_drain(struct rt_core *c, const struct msg *m);
void rt_on_unsent_assign(struct rt_core *c, const struct rt_peer *peer, const struct msg_id *id);
void rt_workers_tick(struct rt_core *c);
void rt_place(struct rt_core *c);

/* rt_affinity.c: where conversations live */
void rt_affinity_name(struct rt_request *r, const uint32_t *ids);
struct rt_need rt_request_need(const struct rt_request *r);
/* The worker that shall have a waiting request now, and why that one; NULL = none, or not yet: it
 * may have asked for its session map. */
struct rt_worker *rt_affinity_choose(struct rt_core *c, struct rt_request *r,
                                     enum rt_affinity *ret_why);
void rt_affinity_placed(struct rt_core *c, struct rt_request *r, const struct rt_worker *w);
void rt_affinity_finished(struct rt_core *c, const struct rt_request *r);
void rt_on_map(struct rt_core *c, const struct msg_id *id, const struct rt_map *map);
void rt_on_adopt_reply(struct rt_core *c, const struct rt_worker *w, const struct msg *m);

/* rt_stream.c: what workers answer */
void rt_on_assign_reply(struct rt_core *c, struct rt_worker *w, const struct msg *m);
void rt_on_tokens(struct rt_core *c, struct rt_worker *w, const struct msg *m);
void rt_on_unsent_tokens(struct rt_core *c, const struct msg_id *id, uint32_t seq);

#endif
