/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_canary.h - a known answer asked of one worker again and again.
 *
 * Owned by the router's loop thread.  Pure.  The worker publishes a prompt and the hash of its
 * greedy answer; the same request sent as a real one must bring the same ids in time. */
#ifndef ROUTER_RT_CANARY_H
#define ROUTER_RT_CANARY_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/msg.h"

enum rt_canary_verdict {
    RT_CANARY_UNKNOWN, /* not answered yet in this incarnation */
    RT_CANARY_RIGHT,
    RT_CANARY_WRONG,
    RT_CANARY_LATE,
};

struct rt_canary {
    enum rt_canary_verdict verdict;
    bool active;       /* asked, no answer yet; takes one of the worker's sequences */
    struct msg_id id;  /* of the last one asked */
    uint64_t sent_us;  /* when */
    uint64_t next_us;  /* not before */
    uint64_t right_us; /* last right answer */
    uint64_t asked, failed;
    uint32_t count;
    uint32_t ids[MSG_CANARY_IDS_MAX];
};

struct rt_canary_times {
    uint64_t period_us;
    uint64_t silence_us_max;      /* no answer for so long: late */
    uint64_t silence_busy_us_max; /* same while the worker computes for others */
};

/* Asked under this id, in this incarnation; active or over. */
bool rt_canary_is(const struct rt_canary *c, const struct msg_id *id);
void rt_canary_reset(struct rt_canary *c, uint64_t now_us);
bool rt_canary_due(const struct rt_canary *c, uint64_t now_us);
void rt_canary_asked(struct rt_canary *c, const struct msg_id *id, uint64_t now_us);
/* The worker could not take it: no verdict, ask again after the period. */
void rt_canary_refused(struct rt_canary *c, const struct rt_canary_times *t, uint64_t now_us);
/* Tokens for the active canary; true when the verdict was spoken (and it is no longer active). */
bool rt_canary_answer(struct rt_canary *c, const struct msg_tokens *tokens,
                      const struct msg_worker_info *expected, const struct rt_canary_times *t,
                      uint64_t now_us);
/* True when it has just become late. */
bool rt_canary_expire(struct rt_canary *c, const struct rt_canary_times *t, uint64_t now_us,
                      bool busy);
/* The request that asks; borrows the worker's canary ids. */
void rt_canary_request(const struct msg_worker_info *info, struct msg_request *ret_request);

#endif
