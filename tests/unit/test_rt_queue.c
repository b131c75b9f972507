/* SPDX-License-Identifier: Apache-2.0 */
/* Stories of the router's core: who is admitted, who waits for whom, who goes where. */
#include "tests/unit/rt_story.h"

#include "router/rt_table.h"

static void test_queue_full(void **state)
{
    (void)state;
    begin(1, 1);
    w.options.queue_requests_max = 3;
    router_restart(&w);
    world_run_ms(&w, 1000);
    w.workers[0].seqs_max = 2;
    world_run_ms(&w, 600);
    struct stream *s[8];
    for (uint32_t i = 0; i < 8; i++)
        s[i] = open_long(0, 300);
    world_run_ms(&w, 50);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(s[i]->reply, i < 5 ? ERR_OK : ERR_BUSY);
        assert_true(i < 5 || (s[i]->retry_ms >= 1000 && s[i]->retry_ms <= 400000));
    }
    world_run_ms(&w, 12000);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
    assert_int_equal(world_info(&w).router.ledger.accepted, 5);
    end();
}

static void test_queue_full_by_tokens(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].seqs_max = 1;
    world_run_ms(&w, 600);
    struct stream *s[8];
    for (uint32_t i = 0; i < 8; i++)
        s[i] = stream_open(&w, 0, 4000, 300);
    world_run_ms(&w, 50);
    /* 20000 tokens may wait: one runs, five wait. */
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(s[i]->reply, i < 6 ? ERR_OK : ERR_BUSY);
    world_run_ms(&w, 15000);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(s[i]->state, S_OVER);
    end();
}

/* Coming back later would not help them: no 429. */
static void test_never_fits_the_queue(void **state)
{
    (void)state;
    begin(1, 1);
    w.options.queue_tokens_max = 1000;
    w.options.store_tokens_max = 4096;
    router_restart(&w);
    world_run_ms(&w, 1000);
    struct stream *over = stream_open(&w, 0, 1001, 5);
    struct stream *fits = stream_open(&w, 0, 1000, 5);
    world_run_ms(&w, 100);
    assert_int_equal(over->reply, ERR_TOO_LARGE);
    assert_int_equal(fits->reply, ERR_OK);
    end();
    begin(1, 1);
    w.options.store_tokens_max = 4096; /* the reserve for output leaves less */
    router_restart(&w);
    world_run_ms(&w, 1000);
    over = stream_open(&w, 0, 3800, 5);
    world_run_ms(&w, 100);
    assert_int_equal(over->reply, ERR_TOO_LARGE);
    end();
}

/* `count` choices of one request, submitted in order; returns the first. */
static struct stream **open_group(uint32_t count, uint32_t tokens, uint32_t max)
{
    static struct stream *s[STREAMS];
    for (uint32_t i = 0; i < count; i++) {
        s[i] = stream_new(&w, 0, tokens, max);
        s[i]->group_index = i;
        s[i]->group_count = count;
        s[i]->group_tokens = (uint64_t)count * tokens;
        stream_submit(&w, 0, s[i]);
    }
    return s;
}

/* All choices of a request are admitted or none, and what an idle cluster cannot hold never is. */
static void test_choices_as_one(void **state)
{
    (void)state;
    begin(1, 1);
    w.options.queue_requests_max = 3;
    w.options.queue_tokens_max = 1000;
    router_restart(&w);
    world_run_ms(&w, 1000);
    w.workers[0].seqs_max = 2;
    world_run_ms(&w, 600);
    /* 2 run, 3 wait: fits although the queue alone would not hold it. */
    struct stream **s = open_group(5, 100, 60);
    world_run_ms(&w, 50);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(s[i]->reply, ERR_OK);
    /* Not now, but later. */
    struct stream *kept[5];
    memcpy(kept, s, sizeof(kept));
    s = open_group(2, 100, 5);
    world_run_ms(&w, 50);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(s[i]->reply, ERR_BUSY);
    world_run_ms(&w, 6000);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(kept[i]->state, S_OVER);
    /* Never: too many, too long together, more than the token memory. */
    s = open_group(6, 10, 5);
    world_run_ms(&w, 50);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(s[i]->reply, ERR_TOO_LARGE);
    s = open_group(5, 334, 5);
    world_run_ms(&w, 50);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(s[i]->reply, ERR_TOO_LARGE);
    s = open_group(5, 333, 5);
    world_run_ms(&w, 50);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(s[i]->reply, ERR_OK);
    world_run_ms(&w, 2000);
    /* It comes again and again while a canary may hold a sequence: admitted every time. */
    for (uint32_t n = 0; n < 60; n++) {
        s = open_group(5, 100, 3);
        world_run_ms(&w, 5);
        for (uint32_t i = 0; i < 5; i++)
            assert_int_equal(s[i]->reply, ERR_OK);
        world_run_ms(&w, 240);
        for (uint32_t i = 0; i < 5; i++) {
            assert_int_equal(s[i]->state, S_OVER);
            s[i]->state = S_FREE;
        }
    }
    end();
}

/* The gateway says less of the group than its first choice alone has, or more than can be. */
static void test_choices_that_lie(void **state)
{
    (void)state;
    begin(1, 1);
    w.options.store_tokens_max = 4096;
    router_restart(&w);
    world_run_ms(&w, 1000);
    struct stream *other = stream_open(&w, 0, 2000, 300);
    world_run_ms(&w, 50);
    assert_int_equal(other->reply, ERR_OK);
    static const uint64_t said[] = {0, 1, UINT64_MAX, UINT64_MAX - 4096};
    for (uint32_t n = 0; n < 4; n++) {
        struct stream *s[2];
        for (uint32_t i = 0; i < 2; i++) {
            s[i] = stream_new(&w, 0, 2500, 5);
            s[i]->group_index = i;
            s[i]->group_count = 2;
            s[i]->group_tokens = said[n];
            stream_submit(&w, 0, s[i]);
        }
        world_run_ms(&w, 50);
        for (uint32_t i = 0; i < 2; i++)
            assert_int_equal(s[i]->reply, n < 2 ? ERR_BUSY : ERR_TOO_LARGE);
    }
    end();
}

/* A long request that waits for the large worker lets short ones pass to the small one. */
static void test_contexts_differ(void **state)
{
    (void)state;
    begin(2, 1);
    w.workers[0].context_max = 300;
    w.workers[0].seqs_max = 1;
    w.workers[1].seqs_max = 1;
    world_run_ms(&w, 600);
    struct stream *large = stream_new(&w, 0, 1000, 500); /* takes the large one */
    while (stop_of(large->prompt) != UINT32_MAX) {
        large->state = S_FREE;
        large = stream_new(&w, 0, 1000, 500);
    }
    stream_submit(&w, 0, large);
    world_run_ms(&w, 50);
    assert_int_equal(w.workers[1].assigned, 1);
    struct stream *next = stream_open(&w, 0, 1001, 5);
    struct stream *small[3];
    for (uint32_t i = 0; i < 3; i++)
        small[i] = stream_open(&w, 0, 20, 5);
    world_run_ms(&w, 500);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(small[i]->state, S_OVER);
    assert_int_equal(next->state, S_LIVE);
    assert_int_equal(w.workers[0].assigned, 3);
    world_run_ms(&w, 4000);
    assert_int_equal(next->finish, MSG_FINISH_LENGTH);
    /* The large one restarts: a long request waits for it, and is not refused meanwhile. */
    worker_kill(&w, 1);
    world_run_ms(&w, 3000);
    struct stream *late = stream_open(&w, 0, 1000, 5);
    world_run_ms(&w, 1000);
    assert_int_equal(late->state, S_LIVE);
    worker_up(&w, 1, 1);
    world_run_ms(&w, 1000);
    assert_int_equal(late->state, S_OVER);
    assert_int_equal(late->code, ERR_OK);
    /* Nobody else is large enough and it stays away: the wait has an end. */
    worker_kill(&w, 1);
    world_run_ms(&w, 3000);
    late = stream_open(&w, 0, 1000, 5);
    world_run_ms(&w, 31000);
    assert_int_equal(late->state, S_OVER);
    assert_int_equal(late->code, ERR_NO_WORKER);
    end();
}

/* A worker hangs with requests and another one is free: they go on there. */
static void test_stalled_worker_loses_its_requests(void **state)
{
    (void)state;
    begin(2, 1);
    struct stream *s[4];
    for (uint32_t i = 0; i < 4; i++)
        s[i] = open_long(0, 500);
    world_run_ms(&w, 300);
    assert_int_equal(seqs_live(&w.workers[0]), 2);
    w.workers[0].hung = true;
    w.faults = true;
    uint64_t begun_us = w.now_us;
    while (w.workers[1].resumed_with == 0)
        world_step(&w);
    assert_true(w.now_us - begun_us < 4500000);
    world_run_ms(&w, 6000);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s[i]->k, 500);
    }
    w.workers[0].hung = false; /* it wakes with requests that are not its own any more */
    world_run_ms(&w, 200);
    for (uint32_t n = 0; n < SEQS_MAX; n++)
        assert_true(!w.workers[0].seqs[n].used || w.workers[0].seqs[n].canary);
    end();
}

static void test_rate_of_long_prompts(void **state)
{
    (void)state;
    world_init(&w, 7, 1, 1);
    w.options.queue_tokens_max = 70000;
    w.options.store_tokens_max = 400000;
    router_restart(&w);
    w.workers[0].context_max = 100000;
    w.workers[0].prefill_per_s = 1000;
    w.workers[0].seqs_max = 2;
    world_run_ms(&w, 600);
    for (uint32_t i = 0; i < 3; i++)
        stream_open(&w, 0, 60000, 5);
    world_run_ms(&w, 10000);
    struct stream *refused = stream_open(&w, 0, 60000, 5);
    for (uint32_t i = 0; i < 160; i++) {
        world_run_ms(&w, 1000);
        double rate = world_info(&w).tokens_per_s;
        assert_true(rate > 500 && rate < 2000);
    }
    /* 60,000 wait, 110,000 are still to be computed for those that run. */
    assert_int_equal(refused->reply, ERR_BUSY);
    assert_in_range(refused->retry_ms, 85000, 300000);
    world_run_ms(&w, 20000);
    end();
}

static void test_order_of_service(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].seqs_max = 1;
    world_run_ms(&w, 600);
    struct stream *first = open_long(0, 100);
    world_run_ms(&w, 50);
    /* Client 1 floods; client 2 has two; one request of client 1 matters more. */
    static const struct {
        uint32_t client;
        int32_t priority;
    } asked[] = {{1, 0}, {1, 0}, {1, 0}, {1, 0}, {2, 0}, {2, 0}, {1, -5}, {3, 9}};
    static const uint32_t wanted[] = {6, 0, 4, 1, 5, 2, 3, 7};
    struct stream *s[8];
    for (uint32_t i = 0; i < 8; i++) {
        do
            s[i] = stream_new(&w, 0, 10 + rng_below(&w.rng, 50), 30);
        while (stop_of(s[i]->prompt) != UINT32_MAX);
        s[i]->client = asked[i].client;
        s[i]->priority = asked[i].priority;
        stream_submit(&w, 0, s[i]);
    }
    for (uint32_t n = 0; n < 8; n++) {
        uint32_t served = 8;
        while (served == 8) {
            world_step(&w);
            for (uint32_t i = 0; i < 8; i++) {
                if (s[i]->state == S_OVER && s[i]->sent_us != 0) {
                    served = i;
                    s[i]->sent_us = 0;
                }
            }
        }
        assert_int_equal(served, wanted[n]);
    }
    assert_int_equal(first->state, S_OVER);
    end();
}

/* A draining router admits nothing new; what it has goes on, and what comes back is taken. */
static void test_router_drains(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 300);
    world_run_ms(&w, 200);
    struct rt_event e = {.type = RT_EVENT_DRAIN, .u.drain = true};
    router_step(&w, &e);
    struct stream *refused = stream_open(&w, 0, 20, 5);
    world_run_ms(&w, 600);
    assert_int_equal(refused->reply, ERR_DRAINING);
    assert_true(refused->retry_ms >= 1000);
    assert_false(w.gateways[0].router.ready);
    assert_string_equal(w.gateways[0].reason, "the router is draining");
    stream_submit(&w, 0, s); /* the gateway connects anew */
    world_run_ms(&w, 4000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(s->k, 300);
    e = (struct rt_event){.type = RT_EVENT_DRAIN};
    router_step(&w, &e);
    struct stream *again = stream_open(&w, 0, 20, 5);
    world_run_ms(&w, 600);
    assert_int_equal(again->reply, ERR_OK);
    assert_true(w.gateways[0].router.ready);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_router_drains),
        cmocka_unit_test(test_queue_full),
        cmocka_unit_test(test_queue_full_by_tokens),
        cmocka_unit_test(test_never_fits_the_queue),
        cmocka_unit_test(test_choices_as_one),
        cmocka_unit_test(test_choices_that_lie),
        cmocka_unit_test(test_contexts_differ),
        cmocka_unit_test(test_stalled_worker_loses_its_requests),
        cmocka_unit_test(test_rate_of_long_prompts),
        cmocka_unit_test(test_order_of_service),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
