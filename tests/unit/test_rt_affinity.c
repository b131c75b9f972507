/* SPDX-License-Identifier: Apache-2.0 */
/* Stories of where conversations go: home, and why elsewhere.  Worker i is group i. */
#include "tests/unit/rt_story.h"

#include "router/rt_session.h"

/* One turn of a conversation; `seed` 0: a prompt that nobody had. */
static struct stream *turn(uint32_t session, uint32_t seed, uint32_t tokens, uint32_t max)
{
    struct stream *s = stream_new(&w, 0, tokens, max);
    uint32_t ids[65536];
    assert_non_null(s);
    s->session = session;
    for (s->prompt_seed = seed != 0 ? seed : (uint32_t)w.ids_made * 131 + 7;; s->prompt_seed++) {
        ids_of(s->prompt_seed, tokens, ids);
        s->prompt = prompt_of(ids, tokens);
        if (seed != 0 || stop_of(s->prompt) == UINT32_MAX)
            break; /* it does not stop before max */
    }
    s->worker = UINT32_MAX;
    stream_submit(&w, 0, s);
    return s;
}

static uint32_t home_after(uint32_t session, uint32_t tokens)
{
    struct stream *s = turn(session, 0, tokens, 4);
    world_run_ms(&w, 300);
    assert_int_equal(s->state, S_OVER);
    return s->worker;
}

static uint64_t why(enum rt_affinity a)
{
    return stats().affinity[a];
}

static void test_turns_go_home(void **state)
{
    (void)state;
    begin(3, 1);
    uint32_t homes[12];
    for (uint32_t i = 0; i < 12; i++)
        homes[i] = home_after(i + 1, 100);
    /* The lightest in rising order: without a key all of these would go to worker 0. */
    struct stream *s[3];
    for (uint32_t i = 0; i < 3; i++) {
        s[i] = turn(100 + i, 0, 900, 400);
        world_run_ms(&w, 100);
        assert_int_equal(s[i]->worker, i);
    }
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 12; i++)
            assert_int_equal(home_after(i + 1, 100 + round), homes[i]);
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(home_after(100 + i, 800), i);
    }
    assert_int_equal(why(RT_HIT_SESSION), 45);
    assert_int_equal(world_info(&w).groups, 3);
    assert_int_equal(world_info(&w).groups_ready, 3);
    end();
}

static void test_one_tenant_is_not_the_other(void **state)
{
    (void)state;
    struct hash128 a = rt_session_name("talk", ""), b = rt_session_name("talk", "x"),
                   c = rt_session_name("tal", "kx"), none = {{0}};
    assert_memory_not_equal(&a, &b, sizeof(a));
    assert_memory_not_equal(&b, &c, sizeof(a));
    uint32_t ids[4] = {1, 2, 3, 4};
    struct hash128 f = rt_session_front(&none, "", ids, 4),
                   g = rt_session_front(&none, "x", ids, 4);
    assert_memory_not_equal(&f, &g, sizeof(f));
    struct hash128 two = rt_session_front(&f, "", ids, 2);
    assert_memory_not_equal(&two, &f, sizeof(f));
}

/* What is saved at home against what waits there. */
static void test_load_moves_short_ones(void **state)
{
    (void)state;
    begin(2, 1);
    struct stream *held = turn(1, 0, 20, 500), *big = turn(2, 0, 2000, 500);
    world_run_ms(&w, 100);
    uint32_t home = held->worker;
    assert_true(big->worker != home);
    world_run_ms(&w, 8000);
    for (uint32_t i = 0; i < 4; i++) { /* four conversations run at home */
        turn(1, 0, 700, 500);
        world_run_ms(&w, 20);
    }
    assert_int_equal(seqs_live(&w.workers[home]), 4);
    struct stream *small = turn(1, 0, 30, 100);
    world_run_ms(&w, 20);
    assert_int_equal(small->worker, 1 - home);
    assert_int_equal(why(RT_MISS_LOAD), 1);
    /* It lives there now. */
    small = turn(1, 0, 30, 10);
    world_run_ms(&w, 20);
    assert_int_equal(small->worker, 1 - home);
    assert_int_equal(why(RT_MISS_LOAD), 1);
    end();
}

static void test_full_home(void **state)
{
    (void)state;
    begin(2, 1);
    w.workers[0].seqs_max = w.workers[1].seqs_max = 2;
    world_run_ms(&w, 600);
    uint32_t home = home_after(1, 1500);
    struct stream *s[3];
    for (uint32_t i = 0; i < 3; i++) {
        s[i] = turn(1, 0, 1500, 300);
        world_run_ms(&w, 20);
    }
    assert_int_equal(s[0]->worker, home);
    assert_int_equal(s[1]->worker, home);
    assert_int_equal(s[2]->worker, 1 - home);
    assert_int_equal(why(RT_MISS_FULL), 1);
    end();
}

static void test_home_lost_and_back(void **state)
{
    (void)state;
    begin(2, 1);
    uint32_t home = home_after(1, 300);
    struct stream *s = turn(1, 0, 300, 600);
    world_run_ms(&w, 300);
    assert_int_equal(s->worker, home);
    worker_kill(&w, home);
    world_run_ms(&w, 9000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH); /* rt_world.h looks at every token */
    assert_int_equal(s->worker, 1 - home);
    assert_int_equal(why(RT_MISS_GONE), 1);
    worker_up(&w, home, 8);
    world_run_ms(&w, 3000);
    assert_int_equal(home_after(1, 300), 1 - home); /* the newer blocks are there */
    end();
}

static void test_small_home(void **state)
{
    (void)state;
    begin(2, 1);
    w.workers[0].context_max = 500;
    world_run_ms(&w, 600);
    uint32_t home = home_after(1, 100);
    assert_int_equal(home, 0);
    assert_int_equal(home_after(1, 900), 1);
    assert_int_equal(why(RT_MISS_SMALL), 1);
    end();
}

/* Without a key the first tokens of the prompt say it. */
static void test_by_prefix(void **state)
{
    (void)state;
    begin(3, 1);
    struct stream *s = turn(0, 0, 3000, 400); /* worker 0 is taken */
    world_run_ms(&w, 50);
    assert_int_equal(s->worker, 0);
    uint32_t seed = 4242;
    struct stream *first = turn(0, seed, 300, 4);
    world_run_ms(&w, 4000);
    uint32_t home = first->worker;
    assert_int_not_equal(home, 0);
    s = turn(0, seed, 700, 4); /* shares its first 256 tokens */
    world_run_ms(&w, 300);
    assert_int_equal(s->worker, home);
    assert_int_equal(why(RT_HIT_PREFIX), 1);
    s = turn(9, seed, 300, 4); /* a new conversation with the same beginning */
    world_run_ms(&w, 300);
    assert_int_equal(s->worker, home);
    assert_int_equal(why(RT_HIT_PREFIX), 2);
    turn(0, seed, 100, 4); /* too short to tell */
    world_run_ms(&w, 300);
    assert_int_equal(why(RT_HIT_PREFIX), 2);
    end();
}

static void operator_says(enum msg_type type, uint32_t worker, uint64_t deadline_us)
{
    struct rt_peer peer = {.count = 8, .bytes = "operator"};
    struct msg m = {.type = type};
    m.id.bytes[0] = (uint8_t)worker;
    if (deadline_us > 0)
        m.u.drain.deadline_unix_us = UNIX_BASE + w.now_us + deadline_us;
    struct rt_event e = {.type = RT_EVENT_MSG, .u.msg = {.peer = &peer, .msg = &m}};
    router_step(&w, &e);
}

static void drain(uint32_t worker, uint64_t deadline_us)
{
    operator_says(MSG_WORKER_DRAIN, worker, deadline_us);
}

/* The last worker drains: what has no name finds its home by its front, a stranger waits. */
static void test_a_front_finds_the_last_one_open(void **state)
{
    (void)state;
    begin(1, 1);
    struct stream *runs = turn(9, 0, 900, 580); /* keeps it from being told for idleness */
    turn(0, 4, 400, 4);
    world_run_ms(&w, 400);
    drain(0, 60000000);
    world_run_ms(&w, 50);
    struct stream *next = turn(0, 4, 400, 4), *fresh = turn(0, 5, 400, 4);
    world_run_ms(&w, 200);
    assert_int_equal(runs->worker, 0);
    assert_int_equal(next->worker, 0);
    assert_int_equal(fresh->worker, UINT32_MAX);
    operator_says(MSG_WORKER_RESUME, 0, 0);
    world_run_ms(&w, 8000);
    assert_int_equal(fresh->worker, 0);
    end();
}

/* Two workers over one kvmgr are one home. */
static void test_two_workers_of_one_group(void **state)
{
    (void)state;
    begin(3, 1);
    w.workers[1].group = w.workers[2].group = 1;
    world_run_ms(&w, 600);
    struct stream *other = turn(7, 0, 2500, 600);
    world_run_ms(&w, 50);
    assert_int_equal(other->worker, 0);
    uint32_t home = home_after(1, 500), seen[3] = {0};
    assert_int_not_equal(home, 0);
    for (uint32_t i = 0; i < 4; i++) {
        struct stream *s = turn(1, 0, 500, 200);
        world_run_ms(&w, 20);
        seen[s->worker]++;
    }
    assert_int_equal(seen[0], 0);
    assert_int_equal(seen[1], 2);
    assert_int_equal(seen[2], 2);
    assert_int_equal(world_info(&w).groups, 2);
    world_run_ms(&w, 5000);
    drain(1, 60000000); /* open to next turns still, but its neighbour stays */
    struct stream *s = turn(1, 0, 500, 4);
    world_run_ms(&w, 100);
    assert_int_equal(s->worker, 2);
    end();
}

/* ---- session maps ---- */

static uint64_t us_until_placed(struct stream *s)
{
    uint64_t begun_us = w.now_us;
    while (s->worker == UINT32_MAX && w.now_us - begun_us < 5000000)
        world_step(&w);
    return w.now_us - begun_us;
}

static void test_map_names_the_home(void **state)
{
    (void)state;
    begin(3, 1);
    w.look_answer = LOOK_OF_WORKER;
    w.look_worker = 2;
    struct stream *s = turn(5, 0, 400, 4);
    assert_true(us_until_placed(s) < 50000);
    assert_int_equal(s->worker, 2);
    assert_int_equal(w.workers[2].adopts, 1);
    assert_int_equal(stats().maps_used, 1);
    assert_int_equal(why(RT_HIT_MAP), 1);
    world_run_ms(&w, 300);
    uint32_t looks = w.looks;
    assert_int_equal(home_after(5, 400), 2); /* known now: nobody is asked again */
    assert_int_equal(w.looks, looks);
    assert_int_equal(why(RT_HIT_SESSION), 1);
    turn(0, 0, 400, 4); /* no key, no map */
    world_run_ms(&w, 300);
    assert_int_equal(w.looks, looks);
    end();
}

static void test_maps_that_do_not_count(void **state)
{
    (void)state;
    begin(3, 1);
    const struct {
        enum look_answer answer;
        uint32_t valid;
        bool lost, mute;
        uint64_t stale, late;
    } cases[] = {
        {LOOK_ABSENT, 3, false, false, 0, 0},    {LOOK_STALE, 3, false, false, 1, 0},
        {LOOK_OF_WORKER, 0, false, false, 2, 0}, {LOOK_OF_WORKER, 3, true, false, 3, 0},
        {LOOK_SILENT, 3, false, false, 3, 1},    {LOOK_OF_WORKER, 3, false, true, 3, 2},
    };
    for (uint32_t i = 0; i < ARRAY_COUNT(cases); i++) {
        w.look_answer = cases[i].answer;
        w.look_worker = 1;
        w.workers[1].adopt_valid = cases[i].valid;
        w.workers[1].adopt_mute = cases[i].mute;
        w.workers[1].frozen = cases[i].lost;
        w.faults = true;
        world_run_ms(&w, 3500);
        struct stream *s = turn(10 + i, 0, 400, 4);
        /* the deadline of 40 ms and a tick of 50 ms behind it at most */
        assert_true(us_until_placed(s) <= 95000);
        assert_int_equal(s->worker, 0);
        assert_int_equal(stats().maps_stale, cases[i].stale);
        assert_int_equal(stats().maps_late, cases[i].late);
        w.workers[1].frozen = false;
        world_run_ms(&w, 3500);
    }
    assert_int_equal(why(RT_MISS_NEW), ARRAY_COUNT(cases));
    assert_int_equal(stats().maps_used, 0);
    end();
}

/* An answer that comes when its question is over changes nothing. */
static void test_map_too_late(void **state)
{
    (void)state;
    begin(2, 1);
    w.look_answer = LOOK_OF_WORKER;
    w.look_worker = 1;
    w.look_us = 300000;
    struct stream *s = turn(5, 0, 400, 200);
    assert_true(us_until_placed(s) <= 95000);
    assert_int_equal(s->worker, 0);
    world_run_ms(&w, 1000);
    assert_int_equal(w.workers[1].adopts, 0);
    struct stream *gone = turn(6, 0, 400, 200);
    world_run_ms(&w, 10);
    stream_cancel(&w, 0, gone);
    world_run_ms(&w, 1000);
    assert_int_equal(gone->finish, MSG_FINISH_CANCELLED);
    end();
}

static void test_one_group_asks_nobody(void **state)
{
    (void)state;
    begin(1, 1);
    world_run_ms(&w, 6000);
    w.look_answer = LOOK_SILENT;
    for (uint32_t i = 0; i < 5; i++)
        home_after(20 + i, 100);
    assert_int_equal(w.looks, 0);
    end();
}

/* While one waits for its map, others pass. */
static void test_nobody_waits_for_anothers_map(void **state)
{
    (void)state;
    begin(2, 1);
    w.look_answer = LOOK_SILENT;
    struct stream *asks = turn(5, 0, 400, 4), *plain = turn(0, 0, 400, 4);
    assert_true(us_until_placed(plain) < 10000);
    assert_int_equal(asks->worker, UINT32_MAX);
    world_run_ms(&w, 1000);
    assert_int_equal(asks->finish, MSG_FINISH_LENGTH);
    end();
}

/* ---- drain ---- */

static void test_drain_lets_next_turns_in(void **state)
{
    (void)state;
    begin(2, 1);
    uint32_t home = home_after(1, 900);
    struct stream *runs = turn(1, 0, 900, 580);
    world_run_ms(&w, 100);
    assert_int_equal(runs->worker, home);
    drain(home, 4000000);
    world_run_ms(&w, 100);
    assert_false(w.workers[home].drain); /* not told yet */
    struct stream *next = turn(1, 0, 900, 4), *fresh = turn(2, 0, 50, 4);
    world_run_ms(&w, 300);
    assert_int_equal(next->worker, home);
    assert_int_equal(fresh->worker, 1 - home);
    for (uint32_t i = 0; i < 3; i++) { /* keeps it busy past half of the time */
        world_run_ms(&w, 700);
        turn(1, 0, 900, 580);
    }
    world_run_ms(&w, 200);
    assert_true(w.workers[home].drain);
    next = turn(1, 0, 900, 4);
    world_run_ms(&w, 300);
    assert_int_equal(next->worker, 1 - home);
    world_run_ms(&w, 8000);
    assert_int_equal(runs->finish, MSG_FINISH_LENGTH);
    end();
}

static void test_idle_drain_is_told_soon(void **state)
{
    (void)state;
    begin(2, 1);
    uint32_t home = home_after(1, 200);
    drain(home, 60000000);
    world_run_ms(&w, 700);
    assert_true(w.workers[home].drain);
    assert_int_equal(home_after(1, 200), 1 - home);
    drain(1 - home, 0); /* without a deadline at once */
    world_run_ms(&w, 50);
    assert_true(w.workers[1 - home].drain);
    end();
}

/* ---- text ---- */

/* What another model would say does not follow what this one has said. */
static void test_begun_streams_stay_with_their_model(void **state)
{
    (void)state;
    begin(2, 1);
    w.workers[0].model = 111;
    w.workers[1].model = 222;
    world_run_ms(&w, 1000);
    struct stream *s = turn(1, 0, 100, 600);
    world_run_ms(&w, 300);
    uint32_t home = s->worker;
    assert_true(s->k > 0);
    worker_kill(&w, home);
    world_run_ms(&w, 6000);
    assert_int_equal(s->state, S_LIVE);
    assert_int_equal(s->worker, home);
    struct stream *fresh = turn(1, 0, 100, 20); /* what has not begun may go anywhere */
    world_run_ms(&w, 500);
    assert_int_equal(fresh->finish, MSG_FINISH_LENGTH);
    worker_up(&w, home, 8);
    w.workers[home].model = home == 0 ? 111 : 222;
    world_run_ms(&w, 8000);
    assert_int_equal(s->finish, MSG_FINISH_LENGTH);
    assert_int_equal(s->worker, home);
    end();
}

/* A new router learns from the gateway whose tokens these are. */
static void test_begun_streams_stay_with_their_model_under_a_new_router(void **state)
{
    (void)state;
    for (uint32_t delivered = 0; delivered < 2; delivered++) {
        begin(2, 1);
        w.workers[0].model = 111;
        w.workers[1].model = 222;
        world_run_ms(&w, 1000);
        struct stream *s = turn(1, 0, 100, 600);
        world_run_ms(&w, 300);
        uint32_t home = s->worker;
        assert_true(s->k > 0);
        worker_kill(&w, home);
        router_restart(&w);
        world_run_ms(&w, 6000);
        assert_int_equal(s->state, S_LIVE);
        assert_int_equal(s->worker, home);
        worker_up(&w, home, 8);
        w.workers[home].model = home == 0 ? 111 : 222;
        if (delivered == 1) { /* and from that one another learns it */
            for (uint32_t k = s->k; s->k < k + 50;)
                world_step(&w);
            worker_kill(&w, home);
            router_restart(&w);
            world_run_ms(&w, 6000);
            assert_int_equal(s->worker, home);
            worker_up(&w, home, 8);
            w.workers[home].model = home == 0 ? 111 : 222;
        }
        world_run_ms(&w, 8000);
        assert_int_equal(s->finish, MSG_FINISH_LENGTH);
        assert_int_equal(s->worker, home);
        end();
    }
}

/* ---- the table ---- */

static void test_table_forgets_the_oldest(void **state)
{
    (void)state;
    struct rt_sessions *s = rt_sessions_create(100);
    struct hash128 names[1000];
    struct rt_place place, keep = {.group = 9, .tokens = 9};
    for (uint32_t i = 0; i < 1000; i++) {
        char key[16];
        snprintf(key, sizeof(key), "k%u", i);
        names[i] = rt_session_name(key, "");
        place = (struct rt_place){.group = i % 16, .tokens = i};
        rt_sessions_put(s, &names[i], i == 0 ? &keep : &place);
        assert_int_equal(rt_sessions_count(s), i < 100 ? i + 1 : 100);
        assert_true(rt_sessions_find(s, &names[0], &place)); /* used again and again: it stays */
        assert_int_equal(place.tokens, 9);
    }
    assert_true(rt_sessions_find(s, &names[999], &place) && place.tokens == 999);
    assert_false(rt_sessions_find(s, &names[1], &place));
    rt_sessions_destroy(&s);
    assert_null(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns_go_home),
        cmocka_unit_test(test_one_tenant_is_not_the_other),
        cmocka_unit_test(test_load_moves_short_ones),
        cmocka_unit_test(test_full_home),
        cmocka_unit_test(test_home_lost_and_back),
        cmocka_unit_test(test_small_home),
        cmocka_unit_test(test_by_prefix),
        cmocka_unit_test(test_two_workers_of_one_group),
        cmocka_unit_test(test_map_names_the_home),
        cmocka_unit_test(test_maps_that_do_not_count),
        cmocka_unit_test(test_map_too_late),
        cmocka_unit_test(test_one_group_asks_nobody),
        cmocka_unit_test(test_nobody_waits_for_anothers_map),
        cmocka_unit_test(test_drain_lets_next_turns_in),
        cmocka_unit_test(test_a_front_finds_the_last_one_open),
        cmocka_unit_test(test_idle_drain_is_told_soon),
        cmocka_unit_test(test_begun_streams_stay_with_their_model),
        cmocka_unit_test(test_begun_streams_stay_with_their_model_under_a_new_router),
        cmocka_unit_test(test_table_forgets_the_oldest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
