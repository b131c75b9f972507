/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_core: single events, and seeded random deliveries with duplicates, gaps, refusals,
 * unasked-for ends, router restarts and clients that leave. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "gateway/gw_core.h"
#include "lib/base/rng.h"

#define FLOWS      12
#define LEGS       24
#define OUTPUT_MAX 90
#define ACTIONS    256

enum { FLOW_NONE, FLOW_OPEN, FLOW_ENDED };

struct sim_leg {
    struct msg_id id;
    uint32_t total; /* tokens that the engine will make */
    uint32_t got;   /* delivered to the client, in order */
    uint32_t finish;
    bool over;
    /* the router's side */
    bool at_router, finished_at_router;
    uint32_t cursor;
};

struct sim_flow {
    int state;
    bool accepted;
    uint32_t handle, leg_count, legs_over;
    struct sim_leg legs[3];
};

struct sim {
    struct rng rng;
    struct gw_core *core;
    struct gw_actions actions;
    struct gw_action items[ACTIONS];
    struct sim_flow flows[400];
    uint32_t flow_count;
    uint64_t now_us, incarnation;
    uint32_t ended;
    const struct msg_tokens *tokens; /* of the event being handled */
};

static uint32_t token_of(const struct msg_id *id, uint32_t i)
{
    uint32_t h;
    memcpy(&h, id->bytes, 4);
    return (h * 2654435761u + i * 40503u) % 1000;
}

static struct gw_core_options options(void)
{
    return (struct gw_core_options){
        .flows_max = FLOWS,
        .legs_max = LEGS,
        .output_ids_max = LEGS * (OUTPUT_MAX + 63),
        .submit_us_max = 10000000,
        .router_silent_us = 2500000,
        .router_lost_us = 60000000,
        .stall_us = 5000000,
    };
}

static struct sim_flow *flow_of(struct sim *s, void *owner)
{
    struct sim_flow *f = owner;
    assert_true(f >= s->flows && f < s->flows + s->flow_count);
    return f;
}

static void step(struct sim *s, struct gw_event *e);

static void flow_over(struct sim *s, struct sim_flow *f)
{
    assert_int_equal(f->state, FLOW_OPEN);
    f->state = FLOW_ENDED;
    s->ended++;
}

static void router_submit(struct sim *s, const struct gw_action *a)
{
    struct sim_flow *f = flow_of(s, a->owner);
    struct sim_leg *l = &f->legs[a->choice];
    uint32_t count = gw_core_output_count(s->core, a->leg), ids[OUTPUT_MAX];
    assert_memory_equal(&l->id, &a->id, sizeof(a->id));
    assert_int_equal(count, l->got);
    gw_core_output(s->core, a->leg, ids);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(ids[i], token_of(&l->id, i));
    static const struct msg_id nobody;
    assert_memory_equal(&a->made_by, count > 0 ? &l->id : &nobody, sizeof(a->made_by));
    l->at_router = true;
    l->finished_at_router = false;
    l->cursor = count;
}

static void leg_over(struct sim *s, struct sim_flow *f, struct sim_leg *l)
{
    assert_false(l->over);
    l->over = true;
    l->at_router = false;
    if (++f->legs_over == f->leg_count)
        flow_over(s, f);
}

static void take_action(struct sim *s, const struct gw_action *a)
{
    struct sim_flow *f = flow_of(s, a->owner);
    struct sim_leg *l = &f->legs[a->choice];
    switch (a->type) {
    case GW_ACTION_OPENED:
        f->handle = a->flow;
        break;
    case GW_ACTION_SUBMIT:
        router_submit(s, a);
        break;
    case GW_ACTION_CANCEL:
        l->at_router = false;
        break;
    case GW_ACTION_ACCEPTED:
        assert_false(f->accepted);
        f->accepted = true;
        break;
    case GW_ACTION_TOKENS:
        assert_true(f->accepted);
        assert_int_equal(s->tokens->seq + a->skip, l->got);
        for (uint32_t i = a->skip; i < s->tokens->count; i++)
            assert_int_equal(s->tokens->ids[i], token_of(&l->id, l->got++));
        break;
    case GW_ACTION_FINISH:
        assert_int_equal(l->got, l->total);
        assert_int_equal(a->finish, l->finish);
        leg_over(s, f, l);
        break;
    case GW_ACTION_REFUSED:
        assert_false(f->accepted);
        flow_over(s, f);
        break;
    case GW_ACTION_FAILED:
        assert_true(f->accepted);
        flow_over(s, f);
        break;
    }
}

static void step(struct sim *s, struct gw_event *e)
{
    e->now_us = s->now_us;
    s->tokens = e->type == GW_EVENT_TOKENS ? e->u.tokens.tokens : NULL;
    gw_core_step(s->core, e, &s->actions);
    for (uint32_t i = 0; i < s->actions.count; i++)
        take_action(s, &s->actions.items[i]);
}

static void router_state(struct sim *s)
{
    struct gw_event e = {.type = GW_EVENT_ROUTER};
    e.u.router.incarnation = s->incarnation;
    e.u.router.reconnected =
        s->now_us > 2000000 && s->flow_count > 20 && rng_below(&s->rng, 30) == 0;
    step(s, &e);
}

static void sim_begin(struct sim *s, uint64_t seed)
{
    memset(s, 0, sizeof(*s));
    rng_init(&s->rng, seed);
    struct gw_core_options o = options();
    s->core = gw_core_create(&o);
    s->actions.items = s->items;
    s->actions.max = ACTIONS;
    s->now_us = 1000000;
    s->incarnation = 1;
}

static void sim_end(struct sim *s)
{
    const struct gw_core_stats *st = gw_core_stats(s->core);
    assert_int_equal(st->flows_live, 0);
    assert_int_equal(st->legs_live, 0);
    assert_int_equal(st->legs_accepted, 0);
    assert_int_equal(st->output_ids, 0);
    assert_int_equal(st->opened, st->finished + st->refused + st->failed + st->closed);
    gw_core_destroy(&s->core);
}

static struct sim_flow *open_flow(struct sim *s, uint32_t legs)
{
    struct sim_flow *f = &s->flows[s->flow_count++];
    struct gw_leg_open open[3];
    f->state = FLOW_OPEN;
    f->leg_count = legs;
    for (uint32_t i = 0; i < legs; i++) {
        for (uint32_t b = 0; b < 16; b += 8) {
            uint64_t r = rng_u64(&s->rng);
            memcpy(f->legs[i].id.bytes + b, &r, 8);
        }
        f->legs[i].total = 1 + rng_below(&s->rng, OUTPUT_MAX);
        f->legs[i].finish = rng_below(&s->rng, 2) ? MSG_FINISH_STOP : MSG_FINISH_LENGTH;
        open[i] = (struct gw_leg_open){f->legs[i].id, f->legs[i].total};
    }
    struct gw_event e = {.type = GW_EVENT_OPEN};
    e.u.open.owner = f;
    e.u.open.leg_count = legs;
    e.u.open.legs = open;
    step(s, &e);
    return f;
}

static void reply(struct sim *s, const struct sim_leg *l, enum err code)
{
    struct msg_submit_reply r = {.code = code, .concurrency = 3, .retry_after_ms = 10, .text = ""};
    struct gw_event e = {.type = GW_EVENT_SUBMIT_REPLY};
    e.u.submit_reply.id = l->id;
    e.u.submit_reply.reply = &r;
    step(s, &e);
}

static void emit(struct sim *s, const struct sim_leg *l, uint32_t seq, uint32_t count,
                 uint32_t finish)
{
    uint32_t ids[OUTPUT_MAX];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = token_of(&l->id, seq + i);
    struct msg_tokens t = {.seq = seq, .count = count, .ids = ids, .finish = finish};
    memcpy(&t.made_by, &l->id, sizeof(t.made_by)); /* any 16 bytes of its own */
    if (finish == MSG_FINISH_FAILED)
        t.code = ERR_INTERNAL;
    struct gw_event e = {.type = GW_EVENT_TOKENS};
    e.u.tokens.id = l->id;
    e.u.tokens.tokens = &t;
    step(s, &e);
}

/* ---- single events ---- */

static void no_router_no_service(void **state)
{
    static struct sim s;
    sim_begin(&s, 1);
    struct sim_flow *f = open_flow(&s, 1);
    assert_int_equal(f->state, FLOW_ENDED);
    assert_int_equal(s.items[0].code, ERR_LOADING);
    router_state(&s);
    s.now_us += 3000000;
    f = open_flow(&s, 1);
    assert_int_equal(f->state, FLOW_ENDED);
    assert_int_equal(s.items[0].code, ERR_NO_WORKER);
    sim_end(&s);
}

/* What it sends after it stood still shows that it lives, before it says its state. */
static void any_answer_shows_a_router(void **state)
{
    static struct sim s;
    sim_begin(&s, 1);
    router_state(&s);
    struct sim_flow *f = open_flow(&s, 1);
    reply(&s, &f->legs[0], ERR_OK);
    s.now_us += 4000000;
    emit(&s, &f->legs[0], 0, f->legs[0].total, f->legs[0].finish);
    assert_int_equal(f->state, FLOW_ENDED);
    f = open_flow(&s, 1);
    assert_int_not_equal(f->state, FLOW_ENDED);
    reply(&s, &f->legs[0], ERR_OK);
    emit(&s, &f->legs[0], 0, f->legs[0].total, f->legs[0].finish);
    sim_end(&s);
}

static void acceptance_needs_every_leg(void **state)
{
    static struct sim s;
    sim_begin(&s, 2);
    router_state(&s);
    struct sim_flow *f = open_flow(&s, 3);
    reply(&s, &f->legs[0], ERR_OK);
    reply(&s, &f->legs[1], ERR_OK);
    assert_false(f->accepted);
    reply(&s, &f->legs[2], ERR_OK);
    assert_true(f->accepted);
    for (int i = 0; i < 3; i++)
        emit(&s, &f->legs[i], 0, f->legs[i].total, f->legs[i].finish);
    assert_int_equal(f->state, FLOW_ENDED);
    f = open_flow(&s, 3);
    reply(&s, &f->legs[0], ERR_OK);
    reply(&s, &f->legs[1], ERR_BUSY);
    assert_int_equal(f->state, FLOW_ENDED);
    assert_false(f->legs[0].at_router); /* cancelled */
    sim_end(&s);
}

static void silence_of_the_router(void **state)
{
    static struct sim s;
    struct gw_event tick = {.type = GW_EVENT_TICK};
    sim_begin(&s, 3);
    router_state(&s);
    struct sim_flow *f = open_flow(&s, 1);
    for (int i = 0; i < 101; i++) {
        s.now_us += 100000;
        router_state(&s);
        step(&s, &tick);
    }
    assert_int_equal(f->state, FLOW_ENDED); /* no reply in 10 s */
    assert_int_equal(gw_core_stats(s.core)->refused, 1);
    f = open_flow(&s, 1);
    reply(&s, &f->legs[0], ERR_OK);
    s.now_us += 59000000;
    step(&s, &tick);
    assert_int_equal(f->state, FLOW_OPEN);
    s.now_us += 2000000;
    step(&s, &tick);
    assert_int_equal(f->state, FLOW_ENDED);
    assert_int_equal(gw_core_stats(s.core)->failed, 1);
    sim_end(&s);
}

static void duplicates_and_gaps(void **state)
{
    static struct sim s;
    sim_begin(&s, 4);
    router_state(&s);
    struct sim_flow *f = open_flow(&s, 1);
    struct sim_leg *l = &f->legs[0];
    while (l->total < 20) { /* a leg long enough for the story */
        struct gw_event close = {.type = GW_EVENT_CLOSE, .u.close.flow = f->handle};
        step(&s, &close);
        f = open_flow(&s, 1);
        l = &f->legs[0];
    }
    reply(&s, l, ERR_OK);
    emit(&s, l, 0, 5, MSG_FINISH_NONE);
    emit(&s, l, 0, 5, MSG_FINISH_NONE);
    emit(&s, l, 3, 6, MSG_FINISH_NONE);
    assert_int_equal(l->got, 9);
    assert_int_equal(gw_core_stats(s.core)->duplicates, 7);
    emit(&s, l, 12, 2, MSG_FINISH_NONE); /* 9..11 are missing */
    assert_int_equal(l->got, 9);
    assert_int_equal(gw_core_stats(s.core)->gaps, 1);
    assert_int_equal(gw_core_stats(s.core)->resubmits, 1);
    emit(&s, l, 14, 2, MSG_FINISH_NONE); /* still on its way: no second submission */
    assert_int_equal(gw_core_stats(s.core)->resubmits, 1);
    assert_int_equal(l->cursor, 9);
    emit(&s, l, l->total, 0, l->finish); /* an end that is ahead is a gap, not an end */
    assert_int_equal(f->state, FLOW_OPEN);
    emit(&s, l, 9, l->total - 9, MSG_FINISH_NONE);
    emit(&s, l, l->total, 0, l->finish);
    assert_int_equal(f->state, FLOW_ENDED);
    emit(&s, l, l->total, 0, l->finish); /* once more: nobody's */
    assert_true(gw_core_stats(s.core)->strays >= 1);
    sim_end(&s);
}

static void too_many_tokens(void **state)
{
    static struct sim s;
    sim_begin(&s, 5);
    router_state(&s);
    struct sim_flow *f = open_flow(&s, 1);
    reply(&s, &f->legs[0], ERR_OK);
    uint32_t total = f->legs[0].total;
    emit(&s, &f->legs[0], 0, total, MSG_FINISH_NONE);
    emit(&s, &f->legs[0], total, 1, MSG_FINISH_NONE);
    assert_int_equal(f->state, FLOW_ENDED);
    sim_end(&s);
}

static void room_is_bounded(void **state)
{
    static struct sim s;
    sim_begin(&s, 6);
    router_state(&s);
    uint32_t refused = 0;
    for (int i = 0; i < 20; i++)
        refused += open_flow(&s, 3)->state == FLOW_ENDED;
    assert_int_equal(refused, 12); /* 24 legs: eight flows of three */
    assert_int_equal(s.items[0].code, ERR_BUSY);
    for (uint32_t i = 0; i < s.flow_count; i++)
        if (s.flows[i].state == FLOW_OPEN) {
            struct gw_event e = {.type = GW_EVENT_CLOSE, .u.close.flow = s.flows[i].handle};
            step(&s, &e);
        }
    sim_end(&s);
}

static void stalls_ask_again(void **state)
{
    static struct sim s;
    struct gw_event tick = {.type = GW_EVENT_TICK};
    sim_begin(&s, 7);
    router_state(&s);
    struct sim_flow *f = open_flow(&s, 1);
    reply(&s, &f->legs[0], ERR_OK);
    for (int i = 0; i < 400; i++) {
        s.now_us += 100000;
        router_state(&s);
        step(&s, &tick);
    }
    /* after 5, then 10, then 20 seconds */
    assert_int_equal(gw_core_stats(s.core)->stalls, 3);
    emit(&s, &f->legs[0], 0, f->legs[0].total, f->legs[0].finish);
    assert_int_equal(f->state, FLOW_ENDED);
    sim_end(&s);
}

/* ---- random stories ---- */

static void router_turn(struct sim *s, struct sim_leg *l)
{
    uint32_t what = rng_below(&s->rng, 100);
    uint32_t left = l->total - l->cursor;
    uint32_t count = left < 5 ? left : 1 + rng_below(&s->rng, 5);
    if (what < 5 && l->cursor > 0) { /* something old again */
        uint32_t from = rng_below(&s->rng, l->cursor);
        emit(s, l, from, l->cursor - from < 4 ? l->cursor - from : 4, MSG_FINISH_NONE);
        return;
    }
    if (what < 8) { /* lost on the way */
        l->cursor += count;
        return;
    }
    if (what < 10) {
        l->at_router = false;
        emit(s, l, l->cursor, 0, MSG_FINISH_CANCELLED);
        return;
    }
    uint32_t seq = l->cursor;
    l->cursor += count;
    bool last = l->cursor == l->total;
    bool together = rng_below(&s->rng, 2) && count > 0;
    if (last)
        l->at_router = false;
    if (count > 0)
        emit(s, l, seq, count, last && together ? l->finish : MSG_FINISH_NONE);
    if (last && !together)
        emit(s, l, l->total, 0, l->finish);
}

static void random_turn(struct sim *s, uint32_t i)
{
    struct sim_flow *f = &s->flows[i];
    if (f->state != FLOW_OPEN)
        return;
    if (rng_below(&s->rng, 400) == 0) { /* the client leaves */
        struct gw_event e = {.type = GW_EVENT_CLOSE, .u.close.flow = f->handle};
        step(s, &e);
        for (uint32_t k = 0; k < f->leg_count; k++)
            assert_false(f->legs[k].at_router && !f->legs[k].over);
        flow_over(s, f);
        return;
    }
    uint32_t k = rng_below(&s->rng, f->leg_count);
    struct sim_leg *l = &f->legs[k];
    if (l->over || !l->at_router)
        return;
    if (f->accepted && rng_below(&s->rng, 200) == 0) { /* a stop string */
        struct gw_event e = {.type = GW_EVENT_CUT};
        e.u.cut.flow = f->handle;
        e.u.cut.choice = k;
        step(s, &e);
        assert_false(l->at_router);
        leg_over(s, f, l);
        return;
    }
    if (rng_below(&s->rng, 4) == 0)
        reply(s, l, rng_below(&s->rng, 50) == 0 ? ERR_BUSY : ERR_OK);
    else if (f->accepted || rng_below(&s->rng, 20) == 0)
        router_turn(s, l);
}

static void random_story(uint64_t seed)
{
    static struct sim s;
    sim_begin(&s, seed);
    router_state(&s);
    uint32_t wanted = 60;
    for (uint32_t turn = 0; turn < 60000 && s.ended < wanted; turn++) {
        s.now_us += 1000;
        if (s.flow_count < wanted && rng_below(&s.rng, 20) == 0)
            open_flow(&s, 1 + rng_below(&s.rng, 3));
        if (turn % 100 == 0) {
            struct gw_event tick = {.type = GW_EVENT_TICK};
            router_state(&s);
            step(&s, &tick);
        }
        if (rng_below(&s.rng, 3000) == 0) { /* a new router knows nothing */
            for (uint32_t i = 0; i < s.flow_count; i++)
                for (uint32_t k = 0; k < 3; k++)
                    s.flows[i].legs[k].at_router = false;
            s.incarnation++;
            router_state(&s);
        }
        uint32_t first = s.flow_count > 14 ? s.flow_count - 14 : 0;
        for (uint32_t i = first; i < s.flow_count; i++)
            random_turn(&s, i);
        for (uint32_t i = 0; i < first; i++)
            if (s.flows[i].state == FLOW_OPEN)
                random_turn(&s, i);
    }
    if (s.ended != wanted)
        fail_msg("seed %llu: %u of %u flows ended", (unsigned long long)seed, s.ended, wanted);
    struct msg_id ids[LEGS];
    assert_int_equal(gw_core_live_ids(s.core, ids), 0);
    sim_end(&s);
}

static void random_stories(void **state)
{
    const char *text = getenv("TANDEM_SEED");
    uint64_t base = text ? strtoull(text, NULL, 10) : 1;
    for (uint64_t i = 0; i < 150; i++)
        random_story(base + i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_router_no_service),
        cmocka_unit_test(any_answer_shows_a_router),
        cmocka_unit_test(acceptance_needs_every_leg),
        cmocka_unit_test(silence_of_the_router),
        cmocka_unit_test(duplicates_and_gaps),
        cmocka_unit_test(too_many_tokens),
        cmocka_unit_test(room_is_bounded),
        cmocka_unit_test(stalls_ask_again),
        cmocka_unit_test(random_stories),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
