/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_table.h - the workers and gateways that the router hears of.
 *
 * Owned by the router's loop thread.  Pure.  At most workers_max and gateways_max entries, taken at
 * create.  A worker's own count of sequences is not trusted for placement: the router counts. */
#ifndef ROUTER_RT_TABLE_H
#define ROUTER_RT_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/msg.h"
#include "router/rt_canary.h"
#include "router/rt_event.h"
#include "router/rt_list.h"
#include "router/rt_store.h"

#define RT_LONG_TEXT_BYTES 4097u
#define RT_KV_SILENT       2u /* WorkerState.kv_state */

struct rt_table;

struct rt_worker {
    uint32_t magic; /* 0 = unused entry */
    struct rt_peer peer;
    struct msg_worker_info info; /* last WorkerState; texts and ids point into this struct */
    char quantization[RT_LONG_TEXT_BYTES], warnings[RT_LONG_TEXT_BYTES];
    struct rt_text numerics, spec, config_hash;
    uint32_t canary_ids[MSG_CANARY_IDS_MAX];

    uint32_t context_max;   /* when it was usable last; 0 = never was */
    bool lost;              /* silent for too long */
    uint64_t heard_us;      /* any message */
    uint64_t busy_until_us; /* it refused an assignment: none before this */
    /* The operator wants it empty: no new conversations.  The next turns of those that live in its
     * group come on until resident_until_us, or until it stood idle; then it is told. */
    bool drain, drain_told;
    uint64_t drain_deadline_unix_us, drain_sent_us;
    uint64_t resident_until_us, idle_since_us; /* idle_since_us 0 = it was not */
    uint32_t idle_reports; /* WorkerStates in a row that know of no request of ours */

    uint64_t progress_us; /* last token, prefill progress or right canary */
    bool stalled;         /* requests run and nothing of that came for too long */
    /* Prompt tokens of its requests before their first token, and how many of those were counted
     * as computed already from one WorkerState to the next. */
    uint64_t prompt_pending, prompt_counted;

    struct rt_canary canary;
    struct rt_link requests; /* RT_RUNNING and RT_CANCELLING */
    uint32_t request_count;
};

struct rt_gateway {
    uint32_t magic;
    struct rt_peer peer;
    uint32_t id;
    uint64_t incarnation; /* 0 = not announced yet */
    uint64_t heard_us;
    bool lost;
    uint32_t group_left; /* choices still to come of the request that it is submitting */
    uint32_t group_code; /* ERR_OK: those are admitted; else how the first was refused */
    struct rt_link requests;
    uint32_t request_count;
};

struct rt_table *rt_table_create(uint32_t workers_max, uint32_t gateways_max);
void rt_table_destroy(struct rt_table **table_p);

bool rt_peer_equal(const struct rt_peer *a, const struct rt_peer *b);

struct rt_worker *rt_table_worker(struct rt_table *t, const struct rt_peer *peer);
struct rt_worker *rt_table_worker_by_id(struct rt_table *t, uint64_t worker_id);
/* NULL when the table is full. */
struct rt_worker *rt_table_worker_add(struct rt_table *t, const struct rt_peer *peer,
                                      uint64_t now_us);
void rt_table_worker_remove(struct rt_table *t, struct rt_worker *w);
/* NULL for an unused entry. */
struct rt_worker *rt_table_worker_at(struct rt_table *t, uint32_t index);
uint32_t rt_table_workers_max(const struct rt_table *t);

struct rt_gateway *rt_table_gateway(struct rt_table *t, const struct rt_peer *peer);
struct rt_gateway *rt_table_gateway_add(struct rt_table *t, const struct rt_peer *peer,
                                        uint64_t now_us);
void rt_table_gateway_remove(struct rt_table *t, struct rt_gateway *g);
struct rt_gateway *rt_table_gateway_at(struct rt_table *t, uint32_t index);
uint32_t rt_table_gateways_max(const struct rt_table *t);

/* Copies everything, texts included. */
void rt_worker_info_set(struct rt_worker *w, const struct msg_worker_info *info);
/* Heard, ready, not draining, its kvmgr is heard, it computes, and its last canary was right. */
bool rt_worker_usable(const struct rt_worker *w);
/* As usable, or draining but still open to its own conversations. */
bool rt_worker_open(const struct rt_worker *w, uint64_t now_us);
/* Heard, but takes nothing until `undrain` or a restart. */
bool rt_worker_drained(const struct rt_worker *w);
/* A canary in flight takes a sequence too. */
uint32_t rt_worker_taken(const struct rt_worker *w);
/* Something was computed: it is well. */
void rt_worker_progress(struct rt_worker *w, uint64_t now_us);
/* `n` prompt tokens were seen computed before the first token of their request. */
void rt_worker_prompt_counted(struct rt_worker *w, uint64_t n);
/* The first token of r has come: its prompt tokens that were not counted yet. */
uint64_t rt_worker_prompt_done(struct rt_worker *w, struct rt_request *r);
/* Prompt tokens that its requests still need, as far as known here or there. */
uint64_t rt_worker_prompt_left(const struct rt_worker *w);
void rt_worker_join(struct rt_worker *w, struct rt_request *r);
void rt_worker_leave(struct rt_request *r);
void rt_gateway_join(struct rt_gateway *g, struct rt_request *r);
void rt_gateway_leave(struct rt_request *r);

/* What a request asks of a worker. */
struct rt_need {
    uint32_t tokens; /* and one more */
    bool of_model;   /* begun: only who computes the same goes on with it */
    struct hash128 made_by;
};

/* What a need meets among the workers known. */
enum rt_fit {
    RT_FIT_NEVER,   /* workers have said their contexts, and none is large enough */
    RT_FIT_ABSENT,  /* one that is not usable now could hold them, or none is known */
    RT_FIT_DRAINED, /* a drained worker that lives could hold them, no usable one does */
    RT_FIT_USABLE,  /* some usable worker holds them, if it has a free sequence */
};
enum rt_fit rt_table_fit(const struct rt_table *t, const struct rt_need *need);
/* The largest context of the usable workers that could take a request now; 0 = none. */
uint32_t rt_table_context_free(const struct rt_table *t, uint64_t now_us);
/* The largest context of workers that are or have been usable; 0 = none known. */
uint32_t rt_table_context_max(const struct rt_table *t);
/* Sequences of all workers that have been usable, and those free on usable ones. */
uint64_t rt_table_seqs(const struct rt_table *t, uint64_t *ret_free);
/* The least loaded usable worker with a free sequence that the need fits; NULL if there is none
 * now. */
struct rt_worker *rt_table_pick(struct rt_table *t, const struct rt_need *need, uint64_t now_us);
/* The same within the group that holds the conversation: a draining one may still take it.  NULL
 * with the reason why there is none now. */
enum rt_absence { RT_ABSENCE_GONE, RT_ABSENCE_FULL, RT_ABSENCE_SMALL };
struct rt_worker *rt_table_pick_group(struct rt_table *t, const struct rt_need *need,
                                      uint32_t group, uint64_t now_us,
                                      enum rt_absence *ret_absence);
/* Prompt tokens that a newcomer waits for, and what the running ones slow it down, as tokens. */
uint64_t rt_worker_load(const struct rt_worker *w);
/* Groups with a worker that is heard, and those with a usable one. */
uint32_t rt_table_groups(const struct rt_table *t, uint32_t *ret_ready);

#endif
