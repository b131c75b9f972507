/* SPDX-License-Identifier: Apache-2.0 */
/* Stories and seeded simulations of the batching core; the world around it is in wk_world.h.
 * TANDEM_SEED=N runs the simulation of that start value alone. */
#include "tests/unit/wk_world.h"

/* ---- stories ---- */

static void one_request(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(4, 16);
    struct world *w = world_new(1, &o, 64);
    w->drafter = DRAFT_RIGHT;
    hello(w);
    struct request *r = request_add(w, 100, 50, "fixed:7");
    r->q.limits.ignore_eos = true;
    r->q.limits.output_tokens_min = 0;
    r->q.sampling.logprobs = true;
    r->q.sampling.top_logprobs = 3;
    plain_run(w, r);
    r->q.limits.ignore_eos = false;
    assign(w, r);
    run_all(w);
    check_over(w);
    assert_string_equal(r->receipt_spec, "fixed:7");
    assert_int_equal(w->drafter_asked, r->receipt.steps); /* from its first step on */
    /* What decoding took is waiting for drafts and computing, and the statistics have the sums. */
    const struct wk_stats *s = wk_core_stats(w->core);
    assert_true(r->receipt.draft_us > 0 && r->receipt.verify_us > 0);
    assert_in_range(r->receipt.draft_us + r->receipt.verify_us, 1, r->receipt.decode_us);
    assert_true(s->draft_us == r->receipt.draft_us && s->verify_us == r->receipt.verify_us);
    assert_int_equal(s->draft_waits, r->receipt.steps);
    assert_true(r->receipt.accepted > 0 || r->text_count < 3);
    assert_true(r->receipt.steps < r->text_count || r->text_count < 3);
    assert_int_equal(r->receipt.concurrency, 1);
    assert_int_equal(r->receipt.preempted, 0);
    world_free(w);
}

static void every_policy_gives_the_same_text(void **state)
{
    (void)state;
    static const char *const specs[] = {"off",     "fixed:0", "fixed:1", "fixed:2", "fixed:3",
                                        "fixed:4", "fixed:5", "fixed:6", "fixed:7", "ngram:4",
                                        "ema",     "goodput", "",        "mtp:1",   "mtp:7"};
    struct wk_core_options o = options_of(16, 8);
    o.mtp = true;
    for (int mode = DRAFT_RIGHT; mode <= DRAFT_NONE; mode++) {
        struct world *w = world_new(2, &o, 250);
        w->drafter = mode == DRAFT_SILENT ? DRAFT_RIGHT : (enum drafter_mode)mode;
        hello(w);
        w->drafter = (enum drafter_mode)mode;
        for (uint32_t i = 0; i < 15; i++) {
            struct request *r = request_add(w, 30 + i, 60, specs[i]);
            r->q.limits.output_tokens_min = i >= 13 ? 60 : i % 2 ? 20 : 0;
            plain_run(w, r);
            assign(w, r);
        }
        run_all(w);
        check_over(w);
        const struct wk_stats *s = wk_core_stats(w->core);
        assert_true(s->accepted > 0 || mode >= DRAFT_WRONG);
        assert_true(s->drafted > s->accepted || mode == DRAFT_RIGHT || mode >= DRAFT_SILENT);
        /* The model's own drafts need no drafter. */
        for (uint32_t i = 13; i < 15; i++) {
            const struct msg_receipt *own = &w->reqs[i].receipt;
            assert_true(own->drafted > own->accepted && own->accepted > 5);
        }
        assert_true(mode != DRAFT_NONE ||
                    s->drafted == w->reqs[13].receipt.drafted + w->reqs[14].receipt.drafted);
        world_free(w);
    }
}

static void refusals_name_the_field(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(2, 16);
    struct world *w = world_new(3, &o, 8); /* pool of 128 tokens */
    static const struct {
        uint32_t prompt, id;
        const char *spec;
        uint32_t code;
        const char *word;
    } cases[] = {
        {10, 0, "mtp:3", ERR_UNSUPPORTED, "spec"}, {10, 0, "fixed:8", ERR_INVALID, "spec"},
        {10, VOCAB, "off", ERR_INVALID, "ids[2]"}, {128, 0, "off", ERR_CONTEXT, "context"},
        {300, 0, "off", ERR_CONTEXT, "context"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct request *r = request_add(w, cases[i].prompt, 5, cases[i].spec);
        r->ids[2] = cases[i].id;
        struct msg m = {.type = MSG_WORKER_ASSIGN, .id = r->id, .u.request = r->q};
        m.u.request.ids_count = r->q.prompt_count;
        struct wk_event e = {.now_us = w->now_us, .type = WK_EV_MSG, .msg = &m};
        arena_reset(&w->arena);
        wk_core_step(w->core, &e, &w->actions);
        assert_int_equal(w->actions.count, 1);
        assert_int_equal(w->actions.items[0].msg.type, MSG_ASSIGN_REPLY);
        assert_int_equal(w->actions.items[0].msg.u.assign_reply.code, cases[i].code);
        assert_non_null(strstr(w->actions.items[0].msg.u.assign_reply.text, cases[i].word));
        r->cancelled = true;
    }
    assert_int_equal(wk_core_stats(w->core)->ledger.accepted, 0);
    world_free(w);
}

/* A resumption goes on at the right token, and one that was over already only gets its finish. */
static void resumptions(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(4, 16);
    for (uint32_t have = 0; have <= 40; have++) {
        struct world *w = world_new(4, &o, 64);
        struct request *r = request_add(w, 20, 40, "off");
        r->q.limits.output_tokens_min = 30;
        plain_run(w, r);
        r->got_count = have < r->text_count ? have : r->text_count;
        memcpy(r->got, r->text, r->got_count * sizeof *r->got);
        r->q.attempt = 1;
        assign(w, r);
        run_all(w);
        check_over(w);
        assert_int_equal(r->receipt.resumed, 1);
        world_free(w);
    }
}

static void cancel(struct world *w, struct request *r)
{
    struct msg m = {.type = MSG_WORKER_CANCEL, .id = r->id};
    r->cancelled = true;
    event_msg(w, &m);
    assert_int_equal(r->finishes, 1);
    assert_int_equal(r->finish_seen, MSG_FINISH_CANCELLED);
}

/* Cancelled after any number of turns: the finish is there at once, and all it held is free after
 * the slices of one pass at most. */
static void cancels_in_every_state(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(4, 8);
    o.slice_layers_max = 3;
    for (uint32_t turns = 0; turns < 60; turns++) {
        struct world *w = world_new(5, &o, 64);
        w->drafter = DRAFT_MIXED;
        hello(w);
        struct request *a = request_add(w, 150, 60, ""), *b = request_add(w, 90, 60, "");
        plain_run(w, a);
        plain_run(w, b);
        assign(w, a);
        assign(w, b);
        for (uint32_t i = 0; i < turns && a->finishes == 0; i++)
            advance(w);
        if (a->finishes == 0) {
            uint64_t at = w->now_us;
            cancel(w, a);
            for (bool held = true; held;) {
                held = false;
                for (uint32_t i = 0; i < ENTRIES; i++)
                    held |= w->leases[i].lease != 0 && w->leases[i].request == 0;
                if (held)
                    assert_true(advance(w));
            }
            assert_true(w->now_us - at <= 500000);
        }
        run_all(w);
        check_over(w);
        world_free(w);
    }
}

static void all_wait_for_blocks(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(3, 4);
    struct world *w = world_new(6, &o, 24); /* 96 tokens: three of 62 tokens never fit at once */
    for (uint32_t i = 0; i < 3; i++) {
        struct request *r = request_add(w, 12, 50, "off");
        r->q.limits.output_tokens_min = 50;
        plain_run(w, r);
        assign(w, r);
    }
    run_all(w);
    check_over(w);
    const struct wk_stats *s = wk_core_stats(w->core);
    assert_true(s->preempted >= 1 && s->kv_full >= 1);
    uint32_t preempted = 0;
    for (uint32_t i = 0; i < 3; i++)
        preempted += w->reqs[i].receipt.preempted;
    assert_int_equal(preempted, s->preempted);
    assert_int_equal(w->reqs[0].receipt.preempted, 0); /* the oldest never */
    world_free(w);
}

/* One stream decodes while a long prompt comes: gaps stay near a slice, and it keeps its share. */
static void a_long_prompt_does_not_freeze_a_stream(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(8, 16);
    o.slice_rows_max = 512;
    o.context_max = 500;
    o.prefill_us_per_row = 3000; /* as measured at load */
    struct world *w = world_new(7, &o, 200);
    w->us_per_row = 3000; /* 400 rows: 1.2 s */
    w->us_fixed = 30000;
    struct request *r = request_add(w, 10, 100, "off");
    r->q.limits.output_tokens_min = 100;
    plain_run(w, r);
    assign(w, r);
    while (r->got_count < 5)
        advance(w);
    for (uint32_t i = 0; i < 4; i++) {
        struct request *p = request_add(w, 400, 2, "off");
        plain_run(w, p);
        assign(w, p);
    }
    run_all(w);
    check_over(w);
    const struct wk_stats *s = wk_core_stats(w->core);
    assert_true(s->gap_us_max <= 500000);
    assert_true(s->steps_prefill >= 5);
    for (uint32_t i = 1; i < 5; i++)
        assert_true(w->reqs[i].sliced_us - w->reqs[i].opened_us <= 2000000);
    world_free(w);
}

static void short_prompts_share_a_slice(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(8, 16);
    struct world *w = world_new(8, &o, 64);
    for (uint32_t i = 0; i < 6; i++) {
        struct request *r = request_add(w, 10, 1, "off");
        plain_run(w, r);
        assign(w, r);
    }
    run_all(w);
    check_over(w);
    assert_true(wk_core_stats(w->core)->steps_prefill <= 3);
    world_free(w);
}

static void drain_stop_and_deadlines(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(4, 16);
    struct world *w = world_new(9, &o, 64);
    struct request *a = request_add(w, 10, 40, "off"), *b = request_add(w, 10, 40, "off");
    plain_run(w, a);
    plain_run(w, b);
    b->q.limits.deadline_unix_us = w->now_us + 1000000000000ull + 30000;
    b->q.limits.output_tokens_min = a->q.limits.output_tokens_min = 40;
    b->text_count = a->text_count = 0;
    plain_run(w, a);
    plain_run(w, b);
    assign(w, a);
    assign(w, b);
    while (b->finishes == 0)
        advance(w);
    assert_int_equal(b->finish_seen, MSG_FINISH_FAILED);
    assert_int_equal(b->code, ERR_TIMEOUT);
    struct msg drain = {.type = MSG_WORKER_DRAIN};
    assert_false(wk_core_draining(w->core));
    event_msg(w, &drain);
    assert_true(wk_core_draining(w->core));
    struct request *c = request_add(w, 10, 4, "off");
    plain_run(w, c);
    assign(w, c); /* refused: tried again by the router */
    assert_false(c->live);
    while (a->got_count < 20)
        advance(w);
    struct msg resume = {.type = MSG_WORKER_RESUME};
    event_msg(w, &resume);
    assert_false(wk_core_draining(w->core));
    while (c->finishes == 0)
        advance(w);
    assert_int_equal(a->finishes, 0);
    struct request *d = request_add(w, 200, 40, "off"); /* stopped in its prefill */
    plain_run(w, d);
    assign(w, d);
    while (d->sliced_us == 0)
        advance(w);
    event_plain(w, WK_EV_STOP);
    while (!wk_core_stopped(w->core))
        assert_true(advance(w));
    assert_int_equal(w->block_used, 0);
    assert_int_equal(a->finish_seen, MSG_FINISH_FAILED); /* the router resumes it elsewhere */
    assert_int_equal(a->code, ERR_DRAINING);
    world_free(w);
}

static void a_new_router_starts_over(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(4, 16);
    struct world *w = world_new(10, &o, 64);
    struct msg router = {.type = MSG_ROUTER_STATE, .u.router = {.incarnation = 1}};
    event_msg(w, &router);
    struct request *a = request_add(w, 40, 40, "off");
    a->q.limits.output_tokens_min = 40;
    plain_run(w, a);
    assign(w, a);
    for (uint32_t i = 0; i < 6; i++)
        advance(w);
    event_msg(w, &router);
    assert_int_equal(wk_core_stats(w->core)->ledger.live, 1);
    router.u.router.incarnation = 2;
    event_msg(w, &router);
    assert_int_equal(wk_core_stats(w->core)->ledger.live, 0);
    a->q.attempt = 1;
    assign(w, a);
    run_all(w);
    check_over(w);
    assert_int_equal(wk_core_stats(w->core)->ledger.cancelled, 1);
    world_free(w);
}

static void a_silent_drafter_is_not_waited_for(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(4, 16);
    struct world *w = world_new(11, &o, 64);
    w->drafter = DRAFT_RIGHT;
    w->us_per_row = 10;
    w->us_fixed = 5000;
    hello(w);
    struct request *r = request_add(w, 10, 380, "fixed:7");
    r->q.limits.output_tokens_min = 380;
    plain_run(w, r);
    assign(w, r);
    while (r->got_count < 10)
        advance(w);
    w->drafter = DRAFT_SILENT;
    uint64_t from = w->now_us;
    while (w->now_us < from + 960000 && r->finishes == 0)
        advance(w);
    uint64_t gap = wk_core_stats(w->core)->gap_us_max;
    assert_true(gap <= 60000); /* the deadline and a step */
    while (wk_core_drafter_up(w->core, w->now_us) && r->finishes == 0)
        advance(w);
    uint32_t had = r->got_count;
    from = w->now_us;
    for (uint32_t i = 0; i < 40 && r->finishes == 0; i++)
        advance(w);
    uint64_t steps_us = 5100 * (uint64_t)(r->got_count - had + 1);
    assert_true(r->got_count >= had + 20 && w->now_us - from < steps_us); /* no waiting at all */
    w->drafter = DRAFT_RIGHT;
    w->drafter_incarnation++;
    hello(w);
    uint64_t drafted = wk_core_stats(w->core)->drafted;
    run_all(w);
    check_over(w);
    assert_true(wk_core_stats(w->core)->drafted > drafted);
    world_free(w);
}

/* Only a drafter that does not hold the sequence is told it anew; one that cannot is left alone. */
static void a_refusal_says_what_follows(void **state)
{
    (void)state;
    static const struct {
        uint32_t code, opens_min, opens_max, asked_min, asked_max;
    } cases[] = {
        {ERR_NOT_FOUND, 20, 400, 20, 400}, {ERR_EPOCH, 20, 400, 20, 400},
        {ERR_TIMEOUT, 1, 1, 20, 400},      {ERR_CONTEXT, 1, 1, 1, 1},
        {ERR_UNSUPPORTED, 1, 1, 20, 400},  {ERR_INTERNAL, 1, 1, 20, 400},
    };
    struct wk_core_options o = options_of(4, 16);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct world *w = world_new(12, &o, 64);
        w->drafter = DRAFT_RIGHT;
        hello(w);
        struct request *r = request_add(w, 10, 80, "fixed:7");
        r->q.limits.output_tokens_min = 80;
        plain_run(w, r);
        assign(w, r);
        w->drafter_code = cases[i].code;
        while (r->got_count < 40)
            advance(w);
        assert_in_range(w->drafter_opens, cases[i].opens_min, cases[i].opens_max);
        assert_in_range(w->drafter_asked, cases[i].asked_min, cases[i].asked_max);
        /* The last answer may still be on its way. */
        uint32_t counted = cases[i].code == ERR_TIMEOUT ? w->drafter_asked : 0;
        assert_in_range(wk_core_stats(w->core)->drafts_timeout, counted > 0 ? counted - 1 : 0,
                        counted);
        /* What went well again goes on; what was too long does so with another drafter. */
        w->drafter_code = ERR_OK;
        if (cases[i].code == ERR_CONTEXT) {
            w->drafter_incarnation++;
            r->drafter_open = false;
            hello(w);
        }
        uint32_t opens = w->drafter_opens;
        run_all(w);
        check_over(w);
        assert_true(w->drafter_opens <= opens + 1);
        assert_true(wk_core_stats(w->core)->accepted > 10);
        world_free(w);
    }
}

/* Where no draft could ride along none is asked for; the drafter's context goes on all the same. */
static void a_full_step_waits_for_no_drafts(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(16, 16);
    o.decode_rows_max = 20; /* drafts for ten sequences at most */
    struct world *w = world_new(31, &o, 250);
    w->drafter = DRAFT_RIGHT;
    w->drafter_taps = true;
    w->us_per_row = 10;
    w->us_fixed = 100;
    hello(w);
    for (uint32_t i = 0; i < 16; i++) {
        struct request *r = request_add(w, 10 + i, i < 8 ? 200 : 130, "fixed:7");
        r->q.limits.output_tokens_min = r->q.limits.output_tokens_max;
        plain_run(w, r);
        assign(w, r);
    }
    while (w->reqs[15].got_count < 10)
        advance(w);
    uint32_t asked = w->drafter_asked;
    uint64_t from = w->now_us;
    while (w->reqs[15].got_count < 120)
        advance(w);
    assert_int_equal(w->drafter_asked, asked);
    assert_true(w->now_us - from < 110 * 500); /* steps of 16 rows, one after the other */
    assert_in_range(w->drafter_fed, 16 * (120 - 8 - 10), 16 * 130); /* never 9 behind */
    uint32_t fed = w->drafter_fed;
    run_all(w);
    check_over(w);
    /* Eight are left, each with a draft or two; the drafter lacked none of their tokens. */
    assert_true(w->drafter_asked > asked + 8 * 12);
    assert_true(wk_core_stats(w->core)->accepted > 100);
    assert_true(w->drafter_opens == 16 && w->drafter_fed - fed <= 16 * 64);
    world_free(w);
}

/* A drafter that is there and always too late costs less and less time. */
static void a_late_drafter_is_asked_seldom(void **state)
{
    (void)state;
    struct wk_core_options o = options_of(8, 16);
    struct world *w = world_new(33, &o, 250);
    w->drafter = DRAFT_RIGHT;
    w->us_per_row = 10;
    w->us_fixed = 1000;
    w->drafter_us_per_ask = 60000;
    w->drafter_taps = true;
    hello(w);
    for (uint32_t i = 0; i < 6; i++) {
        struct request *r = request_add(w, 10 + i, 300, "fixed:7");
        r->q.limits.output_tokens_min = 300;
        plain_run(w, r);
        assign(w, r);
    }
    while (w->reqs[5].got_count < 200) {
        hello(w);
        advance(w);
    }
    /* After 1, 2, 4 ... 64 steps. */
    assert_in_range(w->drafter_asked, 6 * 6, 6 * 11);
    assert_true(wk_core_stats(w->core)->drafts_timeout > 6 * 4);
    assert_true(w->drafter_fed > 6 * 100); /* its context goes on while nobody asks */
    /* Once it is quick it drafts again. */
    w->drafter_us_per_ask = 20;
    w->drafter_free_us = 0;
    uint64_t accepted = wk_core_stats(w->core)->accepted;
    run_all(w);
    check_over(w);
    assert_true(wk_core_stats(w->core)->accepted > accepted + 6 * 20);
    world_free(w);
}

/* goodput weighs the wait too: a drafter slower than a step is tried only now and then. */
static void goodput_sees_a_slow_drafter(void **state)
{
    (void)state;
    uint32_t asked[2];
    for (uint32_t slow = 0; slow < 2; slow++) {
        struct wk_core_options o = options_of(8, 16);
        struct world *w = world_new(32, &o, 250);
        w->drafter = DRAFT_RIGHT;
        w->us_per_row = 10;
        w->us_fixed = 1000;
        w->drafter_us_per_ask = slow ? 3000 : 20;
        hello(w);
        for (uint32_t i = 0; i < 6; i++) {
            struct request *r = request_add(w, 10 + i, 300, "goodput");
            r->q.limits.output_tokens_min = 300;
            plain_run(w, r);
            assign(w, r);
        }
        run_all(w);
        check_over(w);
        asked[slow] = w->drafter_asked;
        world_free(w);
    }
    print_message("asked %u times a fast drafter, %u times a slow one\n", asked[0], asked[1]);
    /* Fast: eight tokens a question.  Slow: 18 ms for what eight steps of 1 ms do. */
    assert_in_range(asked[0], 6 * 300 / 8, 6 * 300 / 6);
    assert_true(asked[1] < 6 * 20);
}

/* What one turn leaves is what the next one finds. */
static void turns_begin_where_the_last_one_ended(void **state)
{
    (void)state;
    static const char *const specs[] = {"off", "fixed:1", "fixed:4", "fixed:7"};
    enum { BT = 8 };
    struct wk_core_options o = options_of(2, BT);
    o.shape.snapshot_every = 83; /* as many slots as there can be */
    for (uint32_t first = 20; first < 20 + 4 * BT; first++) {
        struct world *w = world_new(first, &o, 200);
        w->drafter = DRAFT_RIGHT;
        hello(w);
        struct request *before = NULL;
        for (uint32_t turn = 0; turn < 4; turn++) {
            struct request *r = request_add(w, first, 30, specs[first % 4]);
            r->q.limits.output_tokens_min = 30;
            if (before != NULL) {
                uint32_t count = before->q.prompt_count;
                memcpy(r->ids, before->ids, count * sizeof *r->ids);
                memcpy(r->ids + count, before->text, before->text_count * sizeof *r->ids);
                r->q.prompt_count = count + before->text_count + 1 + first % 5;
                for (uint32_t i = count + before->text_count; i < r->q.prompt_count; i++)
                    r->ids[i] = rng_below(&w->rng, VOCAB);
            }
            plain_run(w, r);
            heartbeat(w);
            assign(w, r);
            run_all(w);
            uint32_t cached = r->receipt.cached_tokens;
            assert_true(before != NULL || cached == 0);
            if (before != NULL) /* all but what lies behind the last boundary */
                assert_true(cached + BT >= before->q.prompt_count + before->text_count);
            before = r;
        }
        check_over(w);
        assert_true(w->kept > 10 && w->reused > 100);
        world_free(w);
    }
}

/* ---- simulations ---- */

/* The next turn of an earlier request, or another that begins like it. */
static void prompt_continue(struct world *w, struct request *r, const struct request *before)
{
    uint32_t count = before->q.prompt_count, most = r->q.prompt_count;
    if (rng_below(&w->rng, 2)) { /* all of it, and something new */
        most = w->options.context_max - 2;
        uint32_t end = count + before->text_count;
        r->q.prompt_count = end + 1 < most ? end + 1 + rng_below(&w->rng, most - end) : most;
        if (r->q.prompt_count > most)
            r->q.prompt_count = most;
    }
    for (uint32_t i = 0; i < r->q.prompt_count; i++)
        if (i < count + before->text_count)
            r->ids[i] = i < count ? before->ids[i] : before->text[i - count];
        else
            r->ids[i] = rng_below(&w->rng, VOCAB);
}

static void sim_requests(struct world *w)
{
    static const char *const specs[] = {"off",     "fixed:1", "fixed:3", "fixed:7",
                                        "ngram:5", "mtp:4",   ""};
    uint32_t count = 2 + rng_below(&w->rng, REQS_MAX - 2);
    uint32_t room = w->options.context_max;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t most = rng_below(&w->rng, 4) ? 40 : 200;
        if (most > room - 2)
            most = room - 2;
        struct request *r = request_add(w, 1 + rng_below(&w->rng, most), 1 + rng_below(&w->rng, 60),
                                        specs[rng_below(&w->rng, 7)]);
        r->q.limits.output_tokens_min = rng_below(&w->rng, 3) ? rng_below(&w->rng, 50) : 0;
        r->q.sampling.logprobs = rng_below(&w->rng, 3) == 0;
        r->q.sampling.top_logprobs = r->q.sampling.logprobs ? rng_below(&w->rng, 21) : 0;
        if (i > 0 && rng_below(&w->rng, 2))
            prompt_continue(w, r, &w->reqs[rng_below(&w->rng, i)]);
        plain_run(w, r);
        r->arrive_us = rng_below(&w->rng, 3000000);
        later(w, r->arrive_us)->arrive = i + 1;
        if (rng_below(&w->rng, 6) == 0)
            r->cancel_us = w->now_us + r->arrive_us + rng_below(&w->rng, 1000000);
    }
}

static void sim_events(struct world *w)
{
    for (uint32_t i = 0; i < w->req_count; i++) {
        struct request *r = &w->reqs[i];
        if (r->cancel_us != 0 && w->now_us >= r->cancel_us && r->live)
            cancel(w, r);
    }
    if (rng_below(&w->rng, 400) == 0) {
        w->drafter = (enum drafter_mode)rng_below(&w->rng, DRAFT_NONE + 1);
        if (rng_below(&w->rng, 2)) {
            w->drafter_incarnation++;
            for (uint32_t i = 0; i < w->req_count; i++)
                w->reqs[i].drafter_open = false;
        }
        hello(w);
    }
    if (!w->kv_restart_pending && rng_below(&w->rng, 1500) == 0)
        kv_lose(w);
    if (rng_below(&w->rng, 800) == 0) {
        uint32_t at = rng_below(&w->rng, ENTRIES);
        if (w->leases[at].lease != 0 && !w->kv_restart_pending) {
            struct msg m = {.type = MSG_KV_RECLAIM, .u.kv_reclaim = {.lease = w->leases[at].lease}};
            event_msg(w, &m);
        }
    }
    if (rng_below(&w->rng, 800) == 0) { /* assigned anew although it runs */
        struct request *r = &w->reqs[rng_below(&w->rng, w->req_count)];
        if (r->live && !r->cancelled) {
            r->q.attempt += rng_below(&w->rng, 2);
            assign(w, r);
        }
    }
}

/* What the simulations went through, to see that they do. */
static struct wk_stats seen;

static void totals_add(const struct wk_stats *s)
{
    seen.steps_prefill += s->steps_prefill;
    seen.steps_decode += s->steps_decode;
    seen.steps_abandoned += s->steps_abandoned;
    seen.steps_failed += s->steps_failed;
    seen.drafted += s->drafted;
    seen.accepted += s->accepted;
    seen.preempted += s->preempted;
    seen.replanned += s->replanned;
    seen.kv_full += s->kv_full;
    seen.drafts_late += s->drafts_late;
    seen.drafts_garbage += s->drafts_garbage;
    seen.drafts_timeout += s->drafts_timeout;
    seen.tokens_cached += s->tokens_cached;
    seen.snapshots += s->snapshots;
    seen.snapshots_refused += s->snapshots_refused;
    seen.snapshots_skipped += s->snapshots_skipped;
    seen.ledger.cancelled += s->ledger.cancelled;
    seen.ledger.finished += s->ledger.finished;
}

static void simulate(uint64_t seed)
{
    struct rng r;
    rng_init(&r, seed);
    struct wk_core_options o = options_of(1 + rng_below(&r, 8), 4u << rng_below(&r, 3));
    o.mtp = true;
    o.slice_rows_max = 1 + rng_below(&r, 64);
    o.slice_layers_max = rng_below(&r, 3) ? 0 : 1 + rng_below(&r, 8);
    o.slice_ms = 10 + rng_below(&r, 200);
    o.decode_rows_max = rng_below(&r, 4) ? 64 : 1 + rng_below(&r, 12);
    o.shape.snapshot_every = rng_below(&r, 3) ? 1 + rng_below(&r, 100) : 0;
    uint32_t blocks = 256 / o.shape.block_tokens + rng_below(&r, 200);
    struct world *w = world_new(seed, &o, blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX);
    w->us_per_row = 1 + rng_below(&r, 1000);
    w->us_fixed = rng_below(&r, 20000);
    w->kv_refusals = rng_below(&r, 2);
    w->fail_steps = rng_below(&r, 3);
    w->drafter = (enum drafter_mode)rng_below(&r, DRAFT_NONE + 1);
    sim_requests(w);
    uint64_t beat = w->now_us;
    for (uint32_t turns = 0; turns < 40000; turns++) {
        bool over = true;
        for (uint32_t i = 0; i < w->req_count; i++)
            over &= w->reqs[i].finishes > 0;
        if (over)
            break;
        if (turns < 20000)
            sim_events(w);
        if (w->now_us >= beat) {
            heartbeat(w);
            beat = w->now_us + 200000;
        }
        if (!advance(w)) {
            w->now_us = beat;
            event_plain(w, WK_EV_TICK);
        }
    }
    run_all(w);
    check_over(w);
    for (uint32_t i = 0; i < w->req_count; i++) {
        const struct request *q = &w->reqs[i];
        uint64_t most = 2000000 + 6 * (w->slice_us_max + 64 * (uint64_t)w->us_per_row + 20000);
        if (q->sliced_us != 0 && q->opened_us != 0 && q->sliced_us >= q->opened_us)
            assert_true(q->sliced_us - q->opened_us <= most);
    }
    totals_add(wk_core_stats(w->core));
    world_free(w);
}

static void a_thousand_runs(void **state)
{
    (void)state;
    const char *text = getenv("TANDEM_SEED");
    if (text != NULL) {
        simulate(strtoull(text, NULL, 10));
        return;
    }
    for (uint64_t seed = 1; seed <= 1000; seed++) {
        simulate(seed);
    }
    assert_true(seen.steps_prefill > 1000 && seen.steps_decode > 1000);
    assert_true(seen.steps_abandoned > 0 && seen.steps_failed > 0);
    assert_true(seen.accepted > 1000 && seen.drafted > seen.accepted);
    assert_true(seen.preempted > 0 && seen.replanned > 0 && seen.kv_full > 0);
    assert_true(seen.drafts_late > 0 && seen.drafts_garbage > 0 && seen.drafts_timeout > 0);
    assert_true(seen.tokens_cached > 10000 && seen.snapshots > 1000 && seen.snapshots_skipped > 0);
    assert_true(seen.ledger.cancelled > 100 && seen.ledger.finished > 5000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_request),
        cmocka_unit_test(every_policy_gives_the_same_text),
        cmocka_unit_test(refusals_name_the_field),
        cmocka_unit_test(resumptions),
        cmocka_unit_test(cancels_in_every_state),
        cmocka_unit_test(all_wait_for_blocks),
        cmocka_unit_test(a_long_prompt_does_not_freeze_a_stream),
        cmocka_unit_test(short_prompts_share_a_slice),
        cmocka_unit_test(drain_stop_and_deadlines),
        cmocka_unit_test(a_new_router_starts_over),
        cmocka_unit_test(a_silent_drafter_is_not_waited_for),
        cmocka_unit_test(a_full_step_waits_for_no_drafts),
        cmocka_unit_test(a_late_drafter_is_asked_seldom),
        cmocka_unit_test(goodput_sees_a_slow_drafter),
        cmocka_unit_test(a_refusal_says_what_follows),
        cmocka_unit_test(turns_begin_where_the_last_one_ended),
        cmocka_unit_test(a_thousand_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
