/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_event.h - what goes into the router's core and what comes out (pure).
 *
 * Owned by the loop thread.  An event borrows its message for the step; actions borrow from the
 * event and from the core until the next step.  At most RT_ACTIONS_MAX actions a step: with `more`
 * set the shell carries out what it got and steps again with RT_EVENT_TICK at once. */
#ifndef ROUTER_RT_EVENT_H
#define ROUTER_RT_EVENT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/msg.h"
#include "router/rt_map.h"

#define RT_PEER_BYTES_MAX 32u
#define RT_ACTIONS_MAX    256u

struct rt_peer { /* a routing id, "worker-0" */
    uint8_t count;
    uint8_t bytes[RT_PEER_BYTES_MAX];
};

enum rt_event_type {
    RT_EVENT_START,  /* once, first */
    RT_EVENT_MSG,    /* decoded and checked */
    RT_EVENT_UNSENT, /* an action of the last steps could not be handed to the peer */
    RT_EVENT_TICK,   /* every 50 ms, and while `more` */
    RT_EVENT_DRAIN,  /* the operator: no new requests from now on, or again */
    RT_EVENT_MAP,    /* the answer to RT_LOOK_UP, exactly one */
};

struct rt_event {
    uint64_t now_us;  /* monotonic */
    uint64_t unix_us; /* for deadlines that come over the wire */
    enum rt_event_type type;
    union {
        struct {
            uint64_t incarnation;
            uint64_t seed;
        } start;
        struct {
            const struct rt_peer *peer;
            const struct msg *msg;
        } msg;
        bool drain;
        struct {
            struct msg_id id;
            const struct rt_map *map; /* NULL: none, or not to be had */
        } map;
        struct {
            struct rt_peer peer;
            enum msg_type type;
            struct msg_id id;
            uint32_t seq; /* of TokensEmitted */
        } unsent;
    } u;
};

enum rt_action_type {
    RT_SEND,
    RT_TRACE,
    RT_OBSERVE,
    RT_LOOK_UP, /* the session map of a key under a salt; RT_EVENT_MAP within map_us_max */
};
enum rt_trace_level { RT_TRACE_DEBUG, RT_TRACE_INFO, RT_TRACE_WARN };
enum rt_observe { RT_OBSERVE_QUEUE_US, RT_OBSERVE_PROMPT_TOKENS, RT_OBSERVE_OUTPUT_TOKENS };

struct rt_trace {
    enum rt_trace_level level;
    const char *text; /* constant */
    struct rt_peer peer;
    struct msg_id id; /* zeros = none */
    uint64_t value;   /* meaning belongs to the text */
};

struct rt_action {
    enum rt_action_type type;
    union {
        struct {
            struct rt_peer peer;
            struct msg msg;
        } send;
        struct rt_trace trace;
        struct {
            struct msg_id id;
            const char *session_key, *cache_salt;
        } look_up;
        struct {
            enum rt_observe what;
            double value;
        } observe;
    } u;
};

struct rt_actions {
    uint32_t count;
    bool more;
    struct rt_action items[RT_ACTIONS_MAX];
};

#endif
