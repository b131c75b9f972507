/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_core.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define CORE_MAGIC    0x6777636fu
#define NONE          UINT32_MAX
#define SEGMENT_IDS   63u
#define RETRY_US      500000u /* between two attempts to have a leg taken again */
#define CANCELLED_MAX 8u      /* unasked-for ends without a token between them */
#define BACKOFF_MAX   4u

enum leg_state { LEG_FREE, LEG_SUBMITTED, LEG_LIVE };

struct segment { /* output ids; a power of two of bytes */
    uint32_t next;
    uint32_t ids[SEGMENT_IDS];
};
STATIC_CHECK(sizeof(struct segment) == 256);

struct leg {
    enum leg_state state;
    struct msg_id id;
    uint32_t flow, choice;
    uint32_t output_max;
    uint32_t have;          /* output tokens received */
    struct hash128 made_by; /* of these, as the router said */
    uint32_t first_segment, last_segment;
    uint64_t progress_us;
    uint64_t retry_us; /* 0 = no re-submission is due */
    uint32_t backoff;
    uint32_t cancelled; /* since the last token */
    uint32_t next_of_flow, next_free;
};

struct flow {
    void *owner; /* NULL = free */
    uint32_t first_leg;
    uint32_t legs_open;
    uint32_t legs_waiting; /* not accepted yet */
    uint32_t concurrency;
    bool accepted;
    uint64_t submitted_us;
    uint64_t trouble_us; /* since when a leg is refused again and again; 0 = not */
    uint32_t next_free;
};

struct gw_core {
    uint32_t magic;
    struct gw_core_options options;
    struct leg *legs;
    struct flow *flows;
    struct segment *segments;
    uint32_t free_leg, free_flow, free_segment, segments_max;
    uint32_t *table; /* leg by id, open addressing; NONE = empty */
    uint32_t table_mask;
    uint64_t router_incarnation;
    uint64_t router_seen_us; /* 0 = never */
    uint64_t now_us;
    struct gw_actions *actions; /* of this step */
    struct gw_core_stats stats;
};

/* ---- legs by id ---- */

static uint32_t id_slot(const struct gw_core *c, const struct msg_id *id)
{
    uint32_t h;
    memcpy(&h, id->bytes, sizeof(h)); /* ids are random */
    return h & c->table_mask;
}

static uint32_t table_find(const struct gw_core *c, const struct msg_id *id)
{
    for (uint32_t i = id_slot(c, id); c->table[i] != NONE; i = (i + 1) & c->table_mask)
        if (memcmp(&c->legs[c->table[i]].id, id, sizeof(*id)) == 0)
            return c->table[i];
    return NONE;
}

static void table_add(struct gw_core *c, uint32_t leg)
{
    uint32_t i = id_slot(c, &c->legs[leg].id);
    while (c->table[i] != NONE)
        i = (i + 1) & c->table_mask;
    c->table[i] = leg;
}

static void table_drop(struct gw_core *c, uint32_t leg)
{
    uint32_t i = id_slot(c, &c->legs[leg].id);
    while (c->table[i] != leg) {
        CHECK(c->table[i] != NONE);
        i = (i + 1) & c->table_mask;
    }
    /* Close the hole: whatever could not be found past it moves back. */
    for (uint32_t j = (i + 1) & c->table_mask; c->table[j] != NONE; j = (j + 1) & c->table_mask) {
        uint32_t home = id_slot(c, &c->legs[c->table[j]].id);
        if (((j - home) & c->table_mask) >= ((j - i) & c->table_mask)) {
            c->table[i] = c->table[j];
            i = j;
        }
    }
    c->table[i] = NONE;
}

/* ---- actions ---- */

static struct gw_action *act(struct gw_core *c, enum gw_action_type type, uint32_t flow)
{
    CHECK(c->actions->count < c->actions->max);
    CHECK(flow < c->options.flows_max && c->flows[flow].owner != NULL);
    struct gw_action *a = &c->actions->items[c->actions->count++];
    memset(a, 0, sizeof(*a));
    a->type = type;
    a->flow = flow;
    a->owner = c->flows[flow].owner;
    return a;
}

static void act_leg(struct gw_core *c, enum gw_action_type type, uint32_t leg)
{
    const struct leg *l = &c->legs[leg];
    struct gw_action *a = act(c, type, l->flow);
    a->leg = leg;
    a->choice = l->choice;
    a->id = l->id;
}

static void submit_again(struct gw_core *c, uint32_t leg)
{
    struct leg *l = &c->legs[leg];
    CHECK(l->state != LEG_FREE);
    l->retry_us = 0;
    l->progress_us = c->now_us;
    c->stats.resubmits++;
    act_leg(c, GW_ACTION_SUBMIT, leg);
    c->actions->items[c->actions->count - 1].again = true;
    c->actions->items[c->actions->count - 1].made_by = l->made_by;
}

/* ---- output ids ---- */

static bool output_add(struct gw_core *c, struct leg *l, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = l->have % SEGMENT_IDS;
        if (at == 0) {
            uint32_t s = c->free_segment;
            if (s == NONE)
                return false;
            c->free_segment = c->segments[s].next;
            c->segments[s].next = NONE;
            if (l->first_segment == NONE)
                l->first_segment = s;
            else
                c->segments[l->last_segment].next = s;
            l->last_segment = s;
        }
        c->segments[l->last_segment].ids[at] = ids[i];
        l->have++;
        c->stats.output_ids++;
    }
    return true;
}

static void output_free(struct gw_core *c, struct leg *l)
{
    CHECK(c->stats.output_ids >= l->have);
    c->stats.output_ids -= l->have;
    if (l->first_segment != NONE) {
        c->segments[l->last_segment].next = c->free_segment;
        c->free_segment = l->first_segment;
    }
    l->first_segment = l->last_segment = NONE;
    l->have = 0;
}

uint32_t gw_core_output_count(const struct gw_core *c, uint32_t leg)
{
    CHECK_OBJ(c, CORE_MAGIC);
    CHECK(leg < c->options.legs_max && c->legs[leg].state != LEG_FREE);
    return c->legs[leg].have;
}

void gw_core_output(const struct gw_core *c, uint32_t leg, uint32_t *ret_ids)
{
    CHECK_OBJ(c, CORE_MAGIC);
    const struct leg *l = &c->legs[leg];
    CHECK(l->state != LEG_FREE);
    uint32_t done = 0;
    for (uint32_t s = l->first_segment; done < l->have; s = c->segments[s].next) {
        CHECK(s != NONE);
        uint32_t n = l->have - done < SEGMENT_IDS ? l->have - done : SEGMENT_IDS;
        memcpy(ret_ids + done, c->segments[s].ids, n * sizeof(uint32_t));
        done += n;
    }
}

/* ---- ends ---- */

static void leg_free(struct gw_core *c, uint32_t leg)
{
    struct leg *l = &c->legs[leg];
    struct flow *f = &c->flows[l->flow];
    CHECK(l->state != LEG_FREE && f->legs_open > 0);
    uint32_t *link = &f->first_leg;
    while (*link != leg) {
        CHECK(*link != NONE);
        link = &c->legs[*link].next_of_flow;
    }
    *link = l->next_of_flow;
    f->legs_open--;
    if (l->state == LEG_SUBMITTED)
        f->legs_waiting--;
    else
        c->stats.legs_accepted--;
    output_free(c, l);
    table_drop(c, leg);
    l->state = LEG_FREE;
    l->next_free = c->free_leg;
    c->free_leg = leg;
    c->stats.legs_live--;
}

static void flow_free(struct gw_core *c, uint32_t flow, bool cancel)
{
    struct flow *f = &c->flows[flow];
    while (f->first_leg != NONE) {
        uint32_t leg = f->first_leg;
        if (cancel)
            act_leg(c, GW_ACTION_CANCEL, leg);
        leg_free(c, leg);
    }
    CHECK(f->legs_open == 0 && f->legs_waiting == 0);
    f->owner = NULL;
    f->next_free = c->free_flow;
    c->free_flow = flow;
    c->stats.flows_live--;
}

/* Nothing more will come for this flow; the client is told how it ended. */
static void flow_end(struct gw_core *c, uint32_t flow, enum err code, uint32_t retry_after_ms,
                     const char *text)
{
    bool accepted = c->flows[flow].accepted;
    struct gw_action *a = act(c, accepted ? GW_ACTION_FAILED : GW_ACTION_REFUSED, flow);
    a->code = code;
    a->retry_after_ms = retry_after_ms;
    a->text = text;
    if (accepted)
        c->stats.failed++;
    else
        c->stats.refused++;
    flow_free(c, flow, true);
}

/* ---- events ---- */

bool gw_core_router_up(const struct gw_core *c, uint64_t now_us)
{
    CHECK_OBJ(c, CORE_MAGIC);
    return c->router_seen_us && now_us - c->router_seen_us <= c->options.router_silent_us;
}

static bool open_has_room(const struct gw_core *c, uint32_t legs)
{
    return c->free_flow != NONE && c->stats.legs_live + legs <= c->options.legs_max;
}

/* A refusal that never became a flow. */
static void open_refuse(struct gw_core *c, void *owner, enum err code, const char *text)
{
    struct gw_action *a = &c->actions->items[c->actions->count++];
    memset(a, 0, sizeof(*a));
    a->type = GW_ACTION_REFUSED;
    a->owner = owner;
    a->flow = NONE;
    a->code = code;
    a->retry_after_ms = 1000;
    a->text = text;
    c->stats.opened++;
    c->stats.refused++;
}

static void leg_open(struct gw_core *c, uint32_t flow, uint32_t choice,
                     const struct gw_leg_open *open)
{
    uint32_t leg = c->free_leg;
    CHECK(leg != NONE && open->output_max > 0);
    CHECK(table_find(c, &open->id) == NONE);
    struct leg *l = &c->legs[leg];
    c->free_leg = l->next_free;
    memset(l, 0, sizeof(*l));
    l->state = LEG_SUBMITTED;
    l->id = open->id;
    l->flow = flow;
    l->choice = choice;
    l->output_max = open->output_max;
    l->first_segment = l->last_segment = NONE;
    l->progress_us = c->now_us;
    struct flow *f = &c->flows[flow];
    l->next_of_flow = f->first_leg;
    f->first_leg = leg;
    f->legs_open++;
    f->legs_waiting++;
    c->stats.legs_live++;
    table_add(c, leg);
    act_leg(c, GW_ACTION_SUBMIT, leg);
}

static void on_open(struct gw_core *c, const struct gw_event *e)
{
    uint32_t count = e->u.open.leg_count;
    CHECK(e->u.open.owner != NULL && count > 0);
    if (!gw_core_router_up(c, c->now_us)) {
        open_refuse(c, e->u.open.owner, c->router_seen_us ? ERR_NO_WORKER : ERR_LOADING,
                    c->router_seen_us ? "the router does not answer"
                                      : "the router has not been seen yet");
        return;
    }
    if (!open_has_room(c, count)) {
        open_refuse(c, e->u.open.owner, ERR_BUSY, "the gateway has too many requests");
        return;
    }
    uint32_t flow = c->free_flow;
    struct flow *f = &c->flows[flow];
    c->free_flow = f->next_free;
    memset(f, 0, sizeof(*f));
    f->owner = e->u.open.owner;
    f->first_leg = NONE;
    f->submitted_us = c->now_us;
    c->stats.opened++;
    c->stats.flows_live++;
    act(c, GW_ACTION_OPENED, flow);
    for (uint32_t i = 0; i < count; i++)
        leg_open(c, flow, i, &e->u.open.legs[i]);
}

static void leg_accept(struct gw_core *c, uint32_t leg, uint32_t concurrency)
{
    struct leg *l = &c->legs[leg];
    struct flow *f = &c->flows[l->flow];
    f->trouble_us = 0;
    if (l->state == LEG_LIVE)
        return;
    l->state = LEG_LIVE;
    l->progress_us = c->now_us;
    c->stats.legs_accepted++;
    CHECK(f->legs_waiting > 0);
    f->legs_waiting--;
    if (concurrency > f->concurrency)
        f->concurrency = concurrency;
    if (f->legs_waiting == 0 && !f->accepted) {
        f->accepted = true;
        act(c, GW_ACTION_ACCEPTED, l->flow)->concurrency = f->concurrency;
    }
}

/* A leg that was running is not taken back right now: keep trying for as long as a lost router is
 * waited for. */
static void leg_trouble(struct gw_core *c, uint32_t leg, enum err code, uint32_t retry_after_ms,
                        const char *text)
{
    struct leg *l = &c->legs[leg];
    struct flow *f = &c->flows[l->flow];
    if (f->trouble_us == 0)
        f->trouble_us = c->now_us;
    if (c->now_us - f->trouble_us > c->options.router_lost_us) {
        flow_end(c, l->flow, code, retry_after_ms, text);
        return;
    }
    uint64_t delay = (uint64_t)retry_after_ms * 1000;
    l->retry_us = c->now_us + (delay > RETRY_US ? delay : RETRY_US);
}

static void on_submit_reply(struct gw_core *c, const struct gw_event *e)
{
    const struct msg_submit_reply *r = e->u.submit_reply.reply;
    uint32_t leg = table_find(c, &e->u.submit_reply.id);
    if (leg == NONE) {
        c->stats.strays++;
        return;
    }
    if (r->code == ERR_OK)
        leg_accept(c, leg, r->concurrency);
    else if (c->legs[leg].state == LEG_LIVE && err_retryable((enum err)r->code))
        leg_trouble(c, leg, (enum err)r->code, r->retry_after_ms, r->text);
    else
        flow_end(c, c->legs[leg].flow, (enum err)r->code, r->retry_after_ms, r->text);
}

static void leg_finish(struct gw_core *c, uint32_t leg, const struct msg_tokens *t)
{
    uint32_t flow = c->legs[leg].flow;
    act_leg(c, GW_ACTION_FINISH, leg);
    struct gw_action *a = &c->actions->items[c->actions->count - 1];
    a->finish = t->finish;
    a->receipt = t->has_receipt ? &t->receipt : NULL;
    leg_free(c, leg);
    if (c->flows[flow].legs_open == 0) {
        c->stats.finished++;
        flow_free(c, flow, false);
    }
}

/* Nobody here asked for that end (a router that missed our heartbeat): the leg goes on. */
static void on_cancelled(struct gw_core *c, uint32_t leg)
{
    struct leg *l = &c->legs[leg];
    if (++l->cancelled > CANCELLED_MAX)
        flow_end(c, l->flow, ERR_CLOSED, 0, "the request was cancelled by the cluster");
    else
        leg_trouble(c, leg, ERR_CLOSED, 0, "the request was cancelled by the cluster");
}

static void on_gap(struct gw_core *c, uint32_t leg)
{
    struct leg *l = &c->legs[leg];
    c->stats.gaps++;
    if (l->retry_us == 0) {
        submit_again(c, leg);
        l->retry_us = c->now_us + RETRY_US; /* what is on its way may still show the gap */
    }
}

static void on_tokens(struct gw_core *c, const struct gw_event *e)
{
    const struct msg_tokens *t = e->u.tokens.tokens;
    uint32_t leg = table_find(c, &e->u.tokens.id);
    if (leg == NONE) {
        c->stats.strays++;
        return;
    }
    struct leg *l = &c->legs[leg];
    bool text_end = t->finish == MSG_FINISH_STOP || t->finish == MSG_FINISH_LENGTH;
    if (t->finish == MSG_FINISH_FAILED) {
        flow_end(c, l->flow, (enum err)t->code, 0, NULL);
        return;
    }
    if (t->seq > l->have && (t->count > 0 || text_end)) {
        on_gap(c, leg);
        return;
    }
    leg_accept(c, leg, 0); /* tokens may come before the reply after a router restart */
    if (!c->flows[l->flow].accepted) {
        /* Another choice is not accepted yet, the answer may not begin: asked for again later. */
        l->retry_us = c->now_us + RETRY_US;
        return;
    }
    uint32_t skip = l->have - (t->seq < l->have ? t->seq : l->have);
    if (skip > t->count)
        skip = t->count;
    c->stats.duplicates += skip;
    uint32_t fresh = t->count - skip;
    if (fresh > l->output_max - l->have) {
        flow_end(c, l->flow, ERR_INTERNAL, 0, "more tokens than were asked for");
        return;
    }
    if (fresh > 0) {
        if (!output_add(c, l, t->ids + skip, fresh)) {
            flow_end(c, l->flow, ERR_NOMEM, 0, "the gateway's token memory is full");
            return;
        }
        l->made_by = t->made_by;
        l->progress_us = c->now_us;
        l->retry_us = 0;
        l->backoff = l->cancelled = 0;
        act_leg(c, GW_ACTION_TOKENS, leg);
        c->actions->items[c->actions->count - 1].skip = skip;
    }
    if (text_end && (uint64_t)t->seq + t->count == l->have)
        leg_finish(c, leg, t);
    else if (text_end)
        c->stats.strays++; /* an end behind what we have: not of this stream */
    else if (t->finish == MSG_FINISH_CANCELLED)
        on_cancelled(c, leg);
}

static void on_router(struct gw_core *c, const struct gw_event *e)
{
    uint64_t incarnation = e->u.router.incarnation;
    bool fresh =
        c->router_seen_us != 0 && (incarnation != c->router_incarnation || e->u.router.reconnected);
    c->router_seen_us = c->now_us;
    c->router_incarnation = incarnation;
    if (!fresh)
        return;
    for (uint32_t i = 0; i < c->options.legs_max; i++)
        if (c->legs[i].state != LEG_FREE)
            submit_again(c, i);
}

/* A router that has stood still sends what waited there before it says its state again. */
static void router_heard(struct gw_core *c)
{
    if (c->router_seen_us != 0)
        c->router_seen_us = c->now_us;
}

static void on_cut(struct gw_core *c, const struct gw_event *e)
{
    uint32_t flow = e->u.cut.flow;
    CHECK(flow < c->options.flows_max);
    struct flow *f = &c->flows[flow];
    if (f->owner == NULL)
        return; /* it ended in the same step that showed the cut */
    uint32_t leg = f->first_leg;
    while (leg != NONE && c->legs[leg].choice != e->u.cut.choice)
        leg = c->legs[leg].next_of_flow;
    if (leg == NONE)
        return;
    act_leg(c, GW_ACTION_CANCEL, leg);
    leg_free(c, leg);
    if (f->legs_open == 0) {
        c->stats.finished++;
        flow_free(c, flow, false);
    }
}

static void on_close(struct gw_core *c, const struct gw_event *e)
{
    uint32_t flow = e->u.close.flow;
    CHECK(flow < c->options.flows_max);
    if (c->flows[flow].owner == NULL)
        return;
    c->stats.closed++;
    flow_free(c, flow, true);
}

static void leg_tick(struct gw_core *c, uint32_t leg)
{
    struct leg *l = &c->legs[leg];
    if (l->retry_us && c->now_us >= l->retry_us) {
        submit_again(c, leg);
        return;
    }
    uint64_t patience = c->options.stall_us << l->backoff;
    if (l->state == LEG_LIVE && c->now_us - l->progress_us > patience) {
        c->stats.stalls++;
        if (l->backoff < BACKOFF_MAX)
            l->backoff++;
        submit_again(c, leg);
    }
}

static void on_tick(struct gw_core *c)
{
    bool up = gw_core_router_up(c, c->now_us);
    bool lost = c->router_seen_us && c->now_us - c->router_seen_us > c->options.router_lost_us;
    for (uint32_t i = 0; i < c->options.flows_max; i++) {
        const struct flow *f = &c->flows[i];
        if (f->owner == NULL)
            continue;
        if (lost)
            flow_end(c, i, ERR_NO_WORKER, 1000, "the router is gone");
        else if (!f->accepted && c->now_us - f->submitted_us > c->options.submit_us_max)
            flow_end(c, i, ERR_TIMEOUT, 1000, "the router did not answer in time");
    }
    if (!up)
        return;
    for (uint32_t i = 0; i < c->options.legs_max; i++)
        if (c->legs[i].state != LEG_FREE)
            leg_tick(c, i);
}

void gw_core_step(struct gw_core *c, const struct gw_event *event, struct gw_actions *ret_actions)
{
    CHECK_OBJ(c, CORE_MAGIC);
    CHECK(ret_actions->max >= 2 * c->options.legs_max + 8);
    CHECK(event->now_us >= c->now_us);
    c->now_us = event->now_us;
    c->actions = ret_actions;
    ret_actions->count = 0;
    switch (event->type) {
    case GW_EVENT_OPEN:
        on_open(c, event);
        break;
    case GW_EVENT_SUBMIT_REPLY:
        router_heard(c);
        on_submit_reply(c, event);
        break;
    case GW_EVENT_TOKENS:
        router_heard(c);
        on_tokens(c, event);
        break;
    case GW_EVENT_ROUTER:
        on_router(c, event);
        break;
    case GW_EVENT_CUT:
        on_cut(c, event);
        break;
    case GW_EVENT_CLOSE:
        on_close(c, event);
        break;
    case GW_EVENT_TICK:
        on_tick(c);
        break;
    }
    const struct gw_core_stats *s = &c->stats;
    CHECK(s->opened == s->finished + s->refused + s->failed + s->closed + s->flows_live);
    c->actions = NULL;
}

/* ---- life of the core ---- */

struct gw_core *gw_core_create(const struct gw_core_options *options)
{
    CHECK(options->legs_max > 0 && options->legs_max <= MSG_LIVE_IDS_MAX);
    CHECK(options->flows_max > 0 && options->output_ids_max >= SEGMENT_IDS);
    struct gw_core *c = mem_take(sizeof(*c));
    c->magic = CORE_MAGIC;
    c->options = *options;
    c->legs = mem_take_array(options->legs_max, sizeof(*c->legs));
    c->flows = mem_take_array(options->flows_max, sizeof(*c->flows));
    c->segments_max = options->output_ids_max / SEGMENT_IDS;
    c->segments = mem_take_array(c->segments_max, sizeof(*c->segments));
    for (uint32_t i = 0; i < options->legs_max; i++)
        c->legs[i].next_free = i + 1 < options->legs_max ? i + 1 : NONE;
    for (uint32_t i = 0; i < options->flows_max; i++)
        c->flows[i].next_free = i + 1 < options->flows_max ? i + 1 : NONE;
    for (uint32_t i = 0; i < c->segments_max; i++)
        c->segments[i].next = i + 1 < c->segments_max ? i + 1 : NONE;
    uint32_t slots = 16;
    while (slots < options->legs_max * 2)
        slots *= 2;
    c->table_mask = slots - 1;
    c->table = mem_take_array(slots, sizeof(*c->table));
    memset(c->table, 0xff, slots * sizeof(*c->table));
    return c;
}

void gw_core_destroy(struct gw_core **core_p)
{
    struct gw_core *c = *core_p;
    if (!c)
        return;
    CHECK_OBJ(c, CORE_MAGIC);
    mem_give(c->legs);
    mem_give(c->flows);
    mem_give(c->segments);
    mem_give(c->table);
    mem_give(c);
    *core_p = NULL;
}

uint32_t gw_core_live_ids(const struct gw_core *c, struct msg_id *ret_ids)
{
    CHECK_OBJ(c, CORE_MAGIC);
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->options.legs_max; i++)
        if (c->legs[i].state != LEG_FREE)
            ret_ids[count++] = c->legs[i].id;
    CHECK(count == c->stats.legs_live);
    return count;
}

const struct gw_core_stats *gw_core_stats(const struct gw_core *c)
{
    CHECK_OBJ(c, CORE_MAGIC);
    return &c->stats;
}
