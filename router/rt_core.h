/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_core.h - the router as a state machine: events in, actions out.
 *
 * Owned by the router's loop thread.  Pure: no clock, no I/O, no allocation after create, no log.
 * Flows: docs/architecture.md. */
#ifndef ROUTER_RT_CORE_H
#define ROUTER_RT_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "router/rt_event.h"

struct rt_core;
struct rt_worker;

struct rt_options {
    uint32_t requests_max;       /* live requests, waiting and running */
    uint32_t queue_requests_max; /* waiting ones */
    uint64_t queue_tokens_max;
    uint64_t store_tokens_max;          /* token memory of all live requests */
    uint32_t workers_max, gateways_max; /* at most RT_WORKERS_MAX, RT_GATEWAYS_MAX */
    uint64_t worker_silence_us_max;
    uint64_t gateway_silence_us_max;
    uint64_t cancel_us_max;    /* a worker's answer to WorkerCancel */
    uint64_t no_worker_us_max; /* waiting without any usable worker */
    uint64_t canary_us;        /* period while idle */
    uint64_t canary_silence_us_max;
    uint64_t progress_us_max; /* requests run and nothing is computed: not ready */
    uint32_t sessions_max;    /* conversations whose group is kept in mind */
    uint64_t map_us_max;      /* a session map may take so long; 0 = none are asked for */
};

#define RT_WORKERS_MAX  16u
#define RT_GATEWAYS_MAX 16u

/* Placements by what was known of the conversation's group. */
enum rt_affinity {
    RT_HIT_SESSION, /* its session key */
    RT_HIT_PREFIX,  /* the first tokens of its prompt */
    RT_HIT_MAP,     /* the session map in Redis */
    RT_MISS_NEW,    /* nothing */
    RT_MISS_GONE,   /* its group is lost, drained or not well */
    RT_MISS_FULL,   /* its group has no free sequence */
    RT_MISS_LOAD,   /* computing it again elsewhere is the shorter wait */
    RT_MISS_SMALL,  /* its group's context is too small by now */
    RT_AFFINITY_COUNT
};

struct rt_stats {
    uint64_t affinity[RT_AFFINITY_COUNT];
    uint64_t maps_asked, maps_used, maps_stale, maps_late;
    uint64_t submits, resubmits, refused_busy, refused_context, refused_other;
    uint64_t assigned, resumed, requeued;
    uint64_t tokens_in, tokens_out, tokens_repeated, gaps, strays, unexpected;
    uint64_t workers_lost, gateways_lost, canaries, canaries_failed, unsent;
    uint64_t finished_stop, finished_length;
};

struct rt_info {
    struct msg_router_info router; /* borrows from the core until the next step */
    struct rt_stats stats;
    uint64_t store_tokens_free;
    double tokens_per_s;
    uint32_t workers, workers_lost, gateways;
    uint32_t groups, groups_ready, sessions;
    bool draining;
};

struct rt_core *rt_core_create(const struct rt_options *options);
void rt_core_destroy(struct rt_core **core_p);
void rt_core_step(struct rt_core *core, const struct rt_event *event,
                  struct rt_actions *ret_actions);
void rt_core_info(struct rt_core *core, struct rt_info *ret_info);
/* For the status page: NULL for an unused index below RT_WORKERS_MAX. */
const struct rt_worker *rt_core_worker(struct rt_core *core, uint32_t index);

#endif
