/* SPDX-License-Identifier: Apache-2.0 */
/* Stories of the router's core; the random ones are in test_rt_sim.c. */
#include "tests/unit/rt_story.h"

#include "router/rt_table.h"

static void test_one_request(void **state)
{
    (void)state;
    begin(1, 1);
    assert_true(w.gateways[0].router.ready);
    assert_int_equal(w.gateways[0].router.context_max, 4096);
    struct stream *s = open_long(0, 50);
    world_run_ms(&w, 1000);
    assert_int_equal(s->state, S_OVER);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(s->k, 50);
    assert_int_equal(s->concurrency, 1);
    assert_int_equal(s->r.resumed, 0);
    end();
}

static void test_context_and_start(void **state)
{
    (void)state;
    world_init(&w, 1, 0, 1);
    /* At first requests may come before a worker does. */
    struct stream *early = stream_open(&w, 0, 10, 5);
    world_run_ms(&w, 5500);
    assert_int_equal(early->state, S_LIVE);
    assert_false(w.gateways[0].router.ready);
    struct stream *s = stream_open(&w, 0, 10, 5);
    world_run_ms(&w, 50);
    assert_int_equal(s->reply, ERR_LOADING);
    assert_true(s->retry_ms >= 1000);
    world_run_ms(&w, 25500);
    assert_int_equal(early->state, S_OVER);
    assert_int_equal(early->code, ERR_LOADING);

    w.worker_count = 1;
    worker_up(&w, 0, 8);
    world_run_ms(&w, 500);
    s = stream_open(&w, 0, 4096, 5);
    struct stream *t = stream_open(&w, 0, 4095, 5);
    world_run_ms(&w, 500);
    assert_int_equal(s->reply, ERR_CONTEXT);
    assert_int_equal(t->reply, ERR_OK);
    assert_int_equal(t->finish, MSG_FINISH_LENGTH);
    end();
}

static void test_worker_killed_in_the_middle(void **state)
{
    (void)state;
    begin(2, 1);
    struct stream *s[6];
    for (uint32_t i = 0; i < 6; i++)
        s[i] = open_long(0, 500);
    world_run_ms(&w, 500);
    uint32_t before = s[0]->k, steps_before[6];
    assert_true(before > 10 && before < 500);
    for (uint32_t i = 0; i < 6; i++) /* a message has at most 8 tokens and counts as one step */
        assert_true((steps_before[i] = s[i]->steps_told) * 8 >= s[i]->k && s[i]->steps_told > 1);
    assert_int_equal(seqs_live(&w.workers[0]), 3);
    worker_kill(&w, 0);
    uint64_t killed_us = w.now_us;
    while (w.workers[1].resumed_with == 0)
        world_step(&w);
    assert_true(w.now_us - killed_us < 3000000);
    world_run_ms(&w, 6000);
    uint32_t resumed = 0;
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s[i]->k, 500);
        resumed += s[i]->r.resumed;
        /* What the lost worker had done counts. */
        assert_true(s[i]->r.steps > steps_before[i] && s[i]->r.steps * 8 >= 500);
        assert_true(s[i]->r.steps <= 500);
    }
    assert_int_equal(resumed, 3);
    assert_int_equal(stats().workers_lost, 1);
    end();
}

static void test_worker_restarted_at_once(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 400);
    world_run_ms(&w, 400);
    assert_true(s->k > 0);
    worker_kill(&w, 0);
    worker_up(&w, 0, 8);
    uint64_t killed_us = w.now_us;
    uint32_t k = s->k;
    while (s->k == k)
        world_step(&w);
    assert_true(w.now_us - killed_us < 1000000); /* one state, one canary */
    world_run_ms(&w, 5000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(s->r.resumed, 1);
    end();
}

static void test_worker_stopped_and_continued(void **state)
{
    (void)state;
    for (uint32_t replaces = 0; replaces < 2; replaces++) {
        begin(1, 1);
        w.assign_replaces = replaces != 0;
        struct stream *s = open_long(0, 600);
        world_run_ms(&w, 400);
        w.workers[0].frozen = true;
        w.faults = true;
        world_run_ms(&w, 3500);
        assert_false(w.gateways[0].router.ready);
        assert_int_equal(world_info(&w).router.waiting, 1);
        w.workers[0].frozen = false;
        world_run_ms(&w, 12000);
        assert_int_equal(s->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s->k, 600);
        assert_true(w.gateways[0].router.ready);
        end();
    }
}

static void test_request_that_kills_workers(void **state)
{
    (void)state;
    begin(1, 1);
    w.steps_per_emit = 100000; /* never answers */
    w.workers[0].state = MSG_WORKER_READY;
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 100);
    for (uint32_t i = 0; i < 8 && s->state != S_OVER; i++) {
        w.steps_per_emit = 1;
        worker_kill(&w, 0);
        worker_up(&w, 0, 8);
        while (w.workers[0].assigned == 0 && s->state != S_OVER)
            world_step(&w);
        memset(w.workers[0].seqs, 0, sizeof(w.workers[0].seqs)); /* dies before a token */
    }
    assert_int_equal(s->state, S_OVER);
    assert_int_equal(s->finish, MSG_FINISH_FAILED);
    assert_int_equal(s->code, ERR_INTERNAL);
    end();
}

static void test_cancel_in_every_state(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].seqs_max = 1;
    world_run_ms(&w, 600);
    struct stream *running = open_long(0, 600);
    world_run_ms(&w, 100);
    struct stream *waiting = open_long(0, 600);
    world_run_ms(&w, 100);
    assert_int_equal(world_info(&w).router.waiting, 1);
    stream_cancel(&w, 0, waiting);
    world_run_ms(&w, 20);
    assert_int_equal(waiting->finish, MSG_FINISH_CANCELLED);
    assert_int_equal(waiting->k, 0);
    /* Running: no token after the router knows, the end within a step of the worker. */
    stream_cancel(&w, 0, running);
    stream_cancel(&w, 0, running);
    world_run_ms(&w, 10);
    uint32_t k = running->k;
    world_run_ms(&w, 100);
    assert_int_equal(running->finish, MSG_FINISH_CANCELLED);
    assert_int_equal(running->k, k);
    /* Ended, unknown: nothing happens. */
    stream_cancel(&w, 0, running);
    world_run_ms(&w, 1000);
    stream_cancel(&w, 0, running);
    /* The worker does not answer: the place is free after 2 s. */
    struct stream *stuck = open_long(0, 600);
    world_run_ms(&w, 100);
    assert_true(stuck->k > 0);
    w.steps_per_emit = 100000;
    stream_cancel(&w, 0, stuck);
    world_run_ms(&w, 1800);
    assert_int_equal(world_info(&w).router.running, 1);
    world_run_ms(&w, 400);
    assert_int_equal(world_info(&w).router.running, 0);
    assert_int_equal(stuck->finish, MSG_FINISH_CANCELLED);
    w.steps_per_emit = 1;
    assert_int_equal(world_info(&w).router.ledger.cancelled, 3);
    end();
}

static void test_gateway_silent(void **state)
{
    (void)state;
    begin(1, 2);
    struct stream *s = open_long(0, 600);
    struct stream *t = open_long(1, 600);
    world_run_ms(&w, 300);
    gateway_kill(&w, 0);
    uint64_t killed_us = w.now_us;
    while (seqs_live(&w.workers[0]) == 2)
        world_step(&w);
    assert_true(w.now_us - killed_us <= 2200000);
    assert_int_equal(s->state, S_LIVE);
    world_run_ms(&w, 6000);
    assert_int_equal(t->finish, MSG_FINISH_LENGTH);
    assert_int_equal(stats().gateways_lost, 1);
    end();
}

static void test_gateway_stopped_and_continued(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 300);
    w.gateways[0].frozen = true;
    w.faults = true;
    s->frozen_over = true;
    world_run_ms(&w, 3000);
    assert_int_equal(seqs_live(&w.workers[0]), 0);
    w.gateways[0].frozen = false;
    world_run_ms(&w, 200);
    assert_int_equal(s->state, S_OVER); /* it does not hang */
    assert_int_equal(s->finish, MSG_FINISH_CANCELLED);
    end();
}

static void test_gateway_restarted(void **state)
{
    (void)state;
    begin(1, 1);
    open_long(0, 600);
    world_run_ms(&w, 300);
    assert_int_equal(seqs_live(&w.workers[0]), 1);
    gateway_kill(&w, 0);
    gateway_up(&w, 0);
    /* The new one submits before it has announced itself: that request stays. */
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 200);
    assert_int_equal(seqs_live(&w.workers[0]), 1);
    world_run_ms(&w, 5000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(world_info(&w).router.ledger.cancelled, 1);
    end();
}

static void test_unnamed_request(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 300);
    s->state = S_OVER; /* the gateway forgets it without a cancel */
    world_run_ms(&w, 500);
    assert_int_equal(seqs_live(&w.workers[0]), 1);
    world_run_ms(&w, 1000);
    assert_int_equal(seqs_live(&w.workers[0]), 0);
    assert_int_equal(world_info(&w).router.ledger.cancelled, 1);
    end();
}

static void test_repeats_and_gaps(void **state)
{
    (void)state;
    begin(1, 1);
    w.repeat_permille = 300;
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 8000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_true(stats().tokens_repeated > 0);
    assert_int_equal(stats().gaps, 0);
    w.workers[0].lossy = true;
    w.lose_permille = 30;
    struct stream *t = open_long(0, 600);
    world_run_ms(&w, 20000);
    assert_int_equal(t->finish, MSG_FINISH_LENGTH);
    assert_int_equal(t->k, 600);
    assert_true(stats().gaps > 0);
    w.workers[0].lossy = false;
    end();
}

static void test_no_worker_comes_back(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 300);
    assert_true(s->k > 0);
    worker_kill(&w, 0);
    world_run_ms(&w, 10000);
    assert_int_equal(s->state, S_LIVE);
    struct stream *t = open_long(0, 600); /* waits, too */
    world_run_ms(&w, 24000);
    assert_int_equal(s->finish, MSG_FINISH_FAILED);
    assert_int_equal(s->code, ERR_NO_WORKER);
    assert_int_equal(t->code, ERR_NO_WORKER);
    struct stream *u = open_long(0, 600);
    world_run_ms(&w, 50);
    assert_int_equal(u->reply, ERR_NO_WORKER);
    end();
}

static void test_canary_wrong(void **state)
{
    (void)state;
    begin(1, 1);
    assert_true(w.gateways[0].router.ready);
    w.workers[0].wrong_canary = true;
    world_run_ms(&w, 3000);
    assert_false(w.gateways[0].router.ready);
    uint32_t assigned = w.workers[0].assigned;
    struct stream *s = open_long(0, 20);
    world_run_ms(&w, 3000);
    assert_int_equal(w.workers[0].assigned, assigned);
    assert_int_equal(s->state, S_LIVE);
    w.workers[0].wrong_canary = false;
    world_run_ms(&w, 3000);
    assert_true(w.gateways[0].router.ready);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_true(stats().canaries_failed >= 2);
    end();
}

static void test_canary_late(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].mute_canary = true;
    world_run_ms(&w, 2200);
    assert_true(w.gateways[0].router.ready);
    world_run_ms(&w, 3300);
    assert_false(w.gateways[0].router.ready);
    w.workers[0].mute_canary = false;
    world_run_ms(&w, 3500);
    assert_true(w.gateways[0].router.ready);
    end();
}

/* How long until the gateway hears of not ready. */
static uint64_t red_after_us(uint64_t since_us)
{
    while (w.gateways[0].router.ready && w.now_us - since_us < 20000000)
        world_step(&w);
    return w.now_us - since_us;
}

static void test_hung_while_busy(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 300);
    assert_true(s->k > 0);
    w.workers[0].hung = true;
    uint64_t since_us = w.now_us;
    struct stream *more[3];
    for (uint32_t i = 0; i < 3; i++) { /* that it takes requests is no progress */
        more[i] = open_long(0, 20);
        world_run_ms(&w, 1200);
    }
    assert_true(w.gateways[0].router.ready);
    assert_true(red_after_us(since_us) < 4500000);
    assert_string_equal(w.gateways[0].router.reason, "worker 0 makes no progress");
    uint32_t assigned = w.workers[0].assigned;
    struct stream *late = open_long(0, 20);
    world_run_ms(&w, 10000);
    assert_false(w.gateways[0].router.ready);
    assert_int_equal(w.workers[0].assigned, assigned);
    assert_int_equal(late->state, S_LIVE);
    w.workers[0].hung = false;
    world_run_ms(&w, 600);
    assert_true(w.gateways[0].router.ready);
    world_run_ms(&w, 8000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(late->finish, MSG_FINISH_LENGTH);
    assert_int_equal(more[2]->finish, MSG_FINISH_LENGTH);
    end();
}

/* A prompt of many minutes is no standstill. */
static void test_long_prompt_stays_ready(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].prefill_per_s = 200;
    w.workers[0].mute_canary = true; /* no help from there */
    world_run_ms(&w, 600);
    struct stream *s = stream_open(&w, 0, 4000, 5);
    for (uint32_t i = 0; i < 180; i++) {
        world_run_ms(&w, 100);
        assert_true(w.gateways[0].router.ready);
    }
    assert_int_equal(s->k, 0);
    w.workers[0].mute_canary = false;
    world_run_ms(&w, 3000);
    assert_int_equal(s->state, S_OVER);
    end();
}

static void test_hung_while_idle(void **state)
{
    (void)state;
    for (uint32_t ms = 0; ms < 2100; ms += 100) {
        begin(1, 1);
        world_run_ms(&w, 2000 + ms);
        assert_true(w.gateways[0].router.ready);
        w.workers[0].hung = true;
        assert_true(red_after_us(w.now_us) < 4500000);
        w.workers[0].hung = false;
        world_run_ms(&w, 600);
        assert_true(w.gateways[0].router.ready);
        end();
    }
}

static void test_kvmgr_silent(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].kv_state = 1;
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 600);
    assert_true(w.gateways[0].router.ready);
    w.workers[0].kv_state = 2; /* tokens still come */
    assert_true(red_after_us(w.now_us) <= 600000);
    assert_string_equal(w.gateways[0].router.reason, "worker 0: kvmgr is silent");
    w.workers[0].kv_state = 1;
    world_run_ms(&w, 600);
    assert_true(w.gateways[0].router.ready);
    world_run_ms(&w, 6000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    end();
}

static void test_busy_worker_needs_no_canary(void **state)
{
    (void)state;
    begin(1, 1);
    open_long(0, 600);
    world_run_ms(&w, 100);
    uint64_t asked = stats().canaries;
    w.steps_per_emit = 40;
    world_run_ms(&w, 10000);
    assert_int_equal(stats().canaries, asked);
    assert_true(w.gateways[0].router.ready);
    w.steps_per_emit = 1;
    end();
}

static void drain(uint32_t worker, enum msg_type type)
{
    struct msg m = {.type = type};
    uint64_t id = worker;
    memcpy(m.id.bytes, &id, sizeof(id));
    link_push(&w, &w.to_router[WORKERS], &m);
}

static void test_drain_and_resume(void **state)
{
    (void)state;
    begin(2, 1);
    struct stream *s[4];
    for (uint32_t i = 0; i < 4; i++)
        s[i] = open_long(0, 200);
    world_run_ms(&w, 100);
    drain(0, MSG_WORKER_DRAIN);
    world_run_ms(&w, 100);
    assert_true(w.workers[0].drain);
    uint32_t assigned = w.workers[0].assigned;
    for (uint32_t i = 0; i < 3; i++)
        open_long(0, 20);
    world_run_ms(&w, 5000);
    assert_int_equal(w.workers[0].assigned, assigned);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
    drain(0, MSG_WORKER_RESUME);
    drain(1, MSG_WORKER_DRAIN);
    drain(7, MSG_WORKER_DRAIN); /* nobody */
    world_run_ms(&w, 500);
    struct stream *t = open_long(0, 20);
    world_run_ms(&w, 1000);
    assert_int_equal(t->finish, MSG_FINISH_LENGTH);
    assert_int_equal(w.workers[0].assigned, assigned + 1);
    end();
}

static void give_back(uint32_t worker)
{
    for (uint32_t n = 0; n < SEQS_MAX; n++) {
        if (w.workers[worker].seqs[n].used)
            seq_end(&w, worker, &w.workers[worker].seqs[n], MSG_FINISH_FAILED, ERR_DRAINING);
    }
}

/* At its deadline a draining worker gives its requests back; the other goes on. */
static void test_drain_gives_back(void **state)
{
    (void)state;
    begin(2, 1);
    struct stream *s[4];
    for (uint32_t i = 0; i < 4; i++)
        s[i] = open_long(0, 400);
    world_run_ms(&w, 400);
    drain(0, MSG_WORKER_DRAIN);
    world_run_ms(&w, 50);
    give_back(0);
    world_run_ms(&w, 6000);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
    assert_int_equal(stats().requeued, 2);
    end();
}

/* What has begun outlasts the drain of the only worker; what is new waits its time and is told. */
static void test_drain_of_the_only_worker(void **state)
{
    (void)state;
    for (uint32_t restarted = 0; restarted < 2; restarted++) {
        begin(1, 1);
        struct stream *s = open_long(0, 400);
        world_run_ms(&w, 400);
        assert_true(s->k > 0 && s->k < 400);
        drain(0, MSG_WORKER_DRAIN);
        world_run_ms(&w, 50);
        give_back(0);
        world_run_ms(&w, 1000);
        assert_false(w.gateways[0].router.ready);
        assert_int_equal(w.gateways[0].router.workers_live, 1);
        struct stream *t = open_long(0, 20);
        world_run_ms(&w, 25000);
        assert_int_equal(t->state, S_LIVE);
        world_run_ms(&w, 10000);
        assert_int_equal(t->finish, MSG_FINISH_FAILED);
        assert_int_equal(t->code, ERR_DRAINING);
        struct stream *u = open_long(0, 20);
        world_run_ms(&w, 50);
        assert_int_equal(u->reply, ERR_DRAINING);
        assert_true(u->retry_ms >= 1000);
        stream_submit(&w, 0, s); /* the gateway connects anew */
        world_run_ms(&w, 60000);
        assert_int_equal(s->state, S_LIVE);
        if (restarted) { /* its time to come back is counted from here */
            worker_kill(&w, 0);
            world_run_ms(&w, 20000);
            assert_int_equal(w.gateways[0].router.workers_live, 0);
            assert_int_equal(s->state, S_LIVE);
            worker_up(&w, 0, 8);
        } else {
            drain(0, MSG_WORKER_RESUME);
        }
        world_run_ms(&w, 6000);
        assert_int_equal(s->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s->k, 400);
        end();
    }
}

/* A drained worker that dies and stays away holds nobody. */
static void test_drained_worker_dies(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 400);
    world_run_ms(&w, 400);
    drain(0, MSG_WORKER_DRAIN);
    world_run_ms(&w, 50);
    give_back(0);
    world_run_ms(&w, 40000);
    worker_kill(&w, 0);
    world_run_ms(&w, 25000);
    assert_int_equal(s->state, S_LIVE);
    world_run_ms(&w, 10000);
    assert_int_equal(s->finish, MSG_FINISH_FAILED);
    assert_int_equal(s->code, ERR_NO_WORKER);
    struct stream *t = open_long(0, 20);
    world_run_ms(&w, 50);
    assert_int_equal(t->reply, ERR_NO_WORKER);
    end();
}

static void test_deadline(void **state)
{
    (void)state;
    begin(1, 1);
    w.workers[0].seqs_max = 1;
    world_run_ms(&w, 600);
    open_long(0, 600);
    world_run_ms(&w, 50);
    struct stream *s = stream_new(&w, 0, 20, 10);
    s->deadline_unix_us = UNIX_BASE + w.now_us + 700000;
    stream_submit(&w, 0, s);
    world_run_ms(&w, 650);
    assert_int_equal(s->state, S_LIVE);
    world_run_ms(&w, 200);
    assert_int_equal(s->finish, MSG_FINISH_FAILED);
    assert_int_equal(s->code, ERR_TIMEOUT);
    struct stream *t = stream_new(&w, 0, 20, 10);
    t->deadline_unix_us = UNIX_BASE + w.now_us;
    stream_submit(&w, 0, t);
    world_run_ms(&w, 50);
    assert_int_equal(t->reply, ERR_TIMEOUT);
    end();
}

static void test_router_restart(void **state)
{
    (void)state;
    begin(2, 2);
    struct stream *s[8];
    for (uint32_t i = 0; i < 8; i++)
        s[i] = open_long(i % 2, 500);
    world_run_ms(&w, 500);
    uint32_t k = s[0]->k;
    router_restart(&w);
    uint64_t killed_us = w.now_us;
    while (s[0]->k == k)
        world_step(&w);
    assert_true(w.now_us - killed_us < 3000000);
    world_run_ms(&w, 8000);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s[i]->k, 500);
    }
    assert_int_equal(world_info(&w).router.ledger.accepted, 8);
    end();
}

static void test_worker_says_busy(void **state)
{
    (void)state;
    begin(1, 1);
    w.busy_permille = 700;
    struct stream *s[5];
    for (uint32_t i = 0; i < 5; i++)
        s[i] = open_long(0, 30);
    world_run_ms(&w, 8000);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s[i]->r.resumed, 0);
    }
    assert_true(stats().requeued > 0);
    w.busy_permille = 0;
    end();
}

static void test_resubmitted_elsewhere(void **state)
{
    (void)state;
    begin(1, 2);
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 1500);
    uint32_t k = s->k;
    assert_true(k > 50);
    /* Another gateway takes it over and has seen only a part: the rest is sent again. */
    struct stream *t = &w.gateways[1].streams[0];
    *t = *s;
    t->k = 10;
    s->state = S_OVER;
    stream_submit(&w, 1, t);
    world_run_ms(&w, 50);
    assert_int_equal(t->reply, ERR_OK);
    assert_true(t->k > k);
    /* The old one may not end it. */
    stream_cancel(&w, 0, s);
    world_run_ms(&w, 8000);
    assert_int_equal(t->finish, MSG_FINISH_LENGTH);
    assert_int_equal(t->k, 600);
    assert_int_equal(world_info(&w).router.ledger.accepted, 1);
    end();
}

static void test_full_when_it_comes_back(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = stream_new(&w, 0, 20, 10);
    s->k = 10; /* all tokens were received, the end was not */
    stream_submit(&w, 0, s);
    world_run_ms(&w, 100);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(s->r.output_tokens, 10);
    end();
}

static void test_id_reused(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 600);
    world_run_ms(&w, 100);
    struct msg m = {.type = MSG_ROUTER_SUBMIT, .id = s->id};
    uint32_t ids[300] = {0};
    m.u.request.prompt_count = s->prompt_count + 33;
    m.u.request.ids_count = m.u.request.prompt_count;
    m.u.request.ids = ids;
    m.u.request.sampling.top_p = 1;
    m.u.request.sampling.repetition_penalty = 1;
    m.u.request.limits.output_tokens_max = 5;
    link_push(&w, &w.to_router[WORKERS], &m);
    world_run_ms(&w, 50);
    assert_int_equal(stats().refused_other, 1);
    world_run_ms(&w, 8000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    end();
}

/* A small token memory: streams go on, and are merely not resumable any more. */
static void test_token_memory_full(void **state)
{
    (void)state;
    begin(1, 1);
    w.options.store_tokens_max = 4096;
    router_restart(&w);
    world_run_ms(&w, 1000);
    w.workers[0].seqs_max = 64;
    world_run_ms(&w, 600);
    uint32_t accepted = 0;
    struct stream *s[40];
    for (uint32_t i = 0; i < 40; i++)
        s[i] = open_long(0, 600);
    world_run_ms(&w, 100);
    for (uint32_t i = 0; i < 40; i++)
        accepted += s[i]->reply == ERR_OK;
    assert_true(accepted >= 8 && accepted < 40);
    world_run_ms(&w, 10000);
    for (uint32_t i = 0; i < 40; i++) {
        if (s[i]->reply == ERR_OK)
            assert_int_equal(s[i]->finish, MSG_FINISH_LENGTH);
        else
            assert_int_equal(s[i]->reply, ERR_BUSY);
    }
    end();
}

/* The assignment never reached the worker, or the worker forgot: it is found out. */
static void test_worker_forgets(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *s = open_long(0, 400);
    world_run_ms(&w, 300);
    memset(w.workers[0].seqs, 0, sizeof(w.workers[0].seqs));
    w.workers[0].ledger.live = 0;
    w.workers[0].ledger.cancelled++;
    world_run_ms(&w, 10000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    end();
}

static void test_messages_of_strangers(void **state)
{
    (void)state;
    begin(1, 1);
    struct msg m = {.type = MSG_TOKENS_EMITTED};
    uint32_t id = 5;
    m.u.tokens.count = 1;
    m.u.tokens.ids = &id;
    link_push(&w, &w.to_router[WORKERS], &m); /* a gateway emits tokens */
    m = (struct msg){.type = MSG_KV_RECLAIM};
    link_push(&w, &w.to_router[WORKERS], &m);
    m = (struct msg){.type = MSG_ROUTER_ANNOUNCE};
    m.u.announce.kind = "worker";
    link_push(&w, &w.to_router[0], &m);
    world_run_ms(&w, 100);
    assert_int_equal(stats().unexpected, 3);
    end();
}

/* Workers that claim more blocks than 32 bits hold together: the sum says as many as it can, and
 * never more free ones than there are. */
static void test_blocks_that_wrap(void **state)
{
    (void)state;
    begin(2, 1);
    w.workers[0].blocks_total = w.workers[0].blocks_free = UINT32_MAX;
    w.workers[1].blocks_total = 2;
    w.workers[1].blocks_free = 0;
    world_run_ms(&w, 1200);
    assert_int_equal(w.gateways[0].router.blocks_total, UINT32_MAX);
    assert_int_equal(w.gateways[0].router.blocks_free, UINT32_MAX);
    w.workers[1].blocks_free = 2;
    world_run_ms(&w, 1200);
    assert_int_equal(w.gateways[0].router.blocks_free, UINT32_MAX);
    w.workers[0].blocks_free = 7;
    world_run_ms(&w, 1200);
    assert_int_equal(w.gateways[0].router.blocks_free, 9);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_request),
        cmocka_unit_test(test_context_and_start),
        cmocka_unit_test(test_worker_killed_in_the_middle),
        cmocka_unit_test(test_worker_restarted_at_once),
        cmocka_unit_test(test_worker_stopped_and_continued),
        cmocka_unit_test(test_request_that_kills_workers),
        cmocka_unit_test(test_cancel_in_every_state),
        cmocka_unit_test(test_gateway_silent),
        cmocka_unit_test(test_gateway_stopped_and_continued),
        cmocka_unit_test(test_gateway_restarted),
        cmocka_unit_test(test_unnamed_request),
        cmocka_unit_test(test_repeats_and_gaps),
        cmocka_unit_test(test_no_worker_comes_back),
        cmocka_unit_test(test_canary_wrong),
        cmocka_unit_test(test_canary_late),
        cmocka_unit_test(test_hung_while_busy),
        cmocka_unit_test(test_long_prompt_stays_ready),
        cmocka_unit_test(test_hung_while_idle),
        cmocka_unit_test(test_kvmgr_silent),
        cmocka_unit_test(test_busy_worker_needs_no_canary),
        cmocka_unit_test(test_drain_and_resume),
        cmocka_unit_test(test_drain_gives_back),
        cmocka_unit_test(test_drain_of_the_only_worker),
        cmocka_unit_test(test_drained_worker_dies),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_router_restart),
        cmocka_unit_test(test_worker_says_busy),
        cmocka_unit_test(test_resubmitted_elsewhere),
        cmocka_unit_test(test_full_when_it_comes_back),
        cmocka_unit_test(test_id_reused),
        cmocka_unit_test(test_token_memory_full),
        cmocka_unit_test(test_worker_forgets),
        cmocka_unit_test(test_messages_of_strangers),
        cmocka_unit_test(test_blocks_that_wrap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
