/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_core.h - the life of requests between client and router as a state machine.
 *
 * Owned by the loop thread.  Pure: time, ids and messages come in as events, everything to be done
 * goes out as actions.  A flow is one HTTP request, a leg one of its choices (one router request).
 * Bounded: flows, legs, output ids kept for re-submission.  Every flow opened ends exactly once:
 * all legs finished, refused, failed, or closed by the client; the ledger proves it. */
#ifndef GATEWAY_GW_CORE_H
#define GATEWAY_GW_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "proto/msg.h"

struct gw_core;

struct gw_core_options {
    uint32_t flows_max;
    uint32_t legs_max;         /* <= MSG_LIVE_IDS_MAX */
    uint32_t output_ids_max;   /* of all legs together */
    uint64_t submit_us_max;    /* answer to a submission */
    uint64_t router_silent_us; /* no RouterState: new requests are refused */
    uint64_t router_lost_us;   /* ... and running ones given up */
    uint64_t stall_us;         /* a leg without a token asks the router again, with back-off */
};

struct gw_leg_open {
    struct msg_id id;
    uint32_t output_max; /* tokens asked for */
};

enum gw_event_type {
    GW_EVENT_OPEN,
    GW_EVENT_SUBMIT_REPLY,
    GW_EVENT_TOKENS,
    GW_EVENT_ROUTER, /* RouterState */
    GW_EVENT_CUT,    /* the text of one choice is complete: a stop string, one call */
    GW_EVENT_CLOSE,  /* the client is gone, or the answer cannot go on */
    GW_EVENT_TICK,
};

struct gw_event {
    uint64_t now_us;
    enum gw_event_type type;
    union {
        struct {
            void *owner; /* comes back in every action; non-NULL, unique while open */
            uint32_t leg_count;
            const struct gw_leg_open *legs;
        } open;
        struct {
            struct msg_id id;
            const struct msg_submit_reply *reply;
        } submit_reply;
        struct {
            struct msg_id id;
            const struct msg_tokens *tokens;
        } tokens;
        struct {
            uint64_t incarnation;
            bool reconnected; /* what was on its way may be lost: as if it had restarted */
        } router;
        struct {
            uint32_t flow;
            uint32_t choice;
        } cut;
        struct {
            uint32_t flow;
        } close;
    } u;
};

enum gw_action_type {
    GW_ACTION_SUBMIT,   /* send RouterSubmit for leg, output ids so far at the end */
    GW_ACTION_CANCEL,   /* send RouterCancel for id */
    GW_ACTION_OPENED,   /* flow is the handle for CUT and CLOSE */
    GW_ACTION_ACCEPTED, /* every leg is: the answer may begin */
    GW_ACTION_REFUSED,  /* before that; the flow is over */
    GW_ACTION_TOKENS,   /* tokens of the event from index skip on are new */
    GW_ACTION_FINISH,   /* a leg is over; the flow too with its last leg */
    GW_ACTION_FAILED,   /* after ACCEPTED; the flow is over */
};

struct gw_action {
    enum gw_action_type type;
    void *owner;
    uint32_t flow, choice, leg;
    struct msg_id id;
    bool again;             /* GW_ACTION_SUBMIT: the router may have it already, or has had it */
    struct hash128 made_by; /* ... whose its output ids are; zeros = not known */
    uint32_t concurrency;
    uint32_t skip;
    uint32_t finish;                   /* MSG_FINISH_STOP or _LENGTH */
    const struct msg_receipt *receipt; /* of the event; NULL if it has none */
    enum err code;
    uint32_t retry_after_ms;
    const char *text; /* of the event, or constant */
};

/* Given by the caller, filled from the start by every step. */
struct gw_actions {
    uint32_t count, max; /* max >= 2 * legs_max + 8 */
    struct gw_action *items;
};

struct gw_core_stats {
    uint64_t opened, finished, refused, failed, closed; /* flows; + live = opened */
    uint64_t duplicates, gaps, resubmits, strays, stalls;
    uint32_t flows_live, legs_live, legs_accepted;
    uint32_t output_ids;
};

struct gw_core *gw_core_create(const struct gw_core_options *options);
void gw_core_destroy(struct gw_core **core_p);
void gw_core_step(struct gw_core *c, const struct gw_event *event, struct gw_actions *ret_actions);

/* Output ids of a live leg so far; ret_ids has room for gw_core_output_count. */
uint32_t gw_core_output_count(const struct gw_core *c, uint32_t leg);
void gw_core_output(const struct gw_core *c, uint32_t leg, uint32_t *ret_ids);
/* Ids of all live legs, for RouterAnnounce; room for legs_max. */
uint32_t gw_core_live_ids(const struct gw_core *c, struct msg_id *ret_ids);
bool gw_core_router_up(const struct gw_core *c, uint64_t now_us);
const struct gw_core_stats *gw_core_stats(const struct gw_core *c);

#endif
