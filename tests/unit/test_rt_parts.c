/* SPDX-License-Identifier: Apache-2.0 */
/* The router's smaller parts: token store, queue, rate, canary. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/hash.h"
#include "lib/base/rng.h"
#include "router/rt_canary.h"
#include "router/rt_queue.h"
#include "router/rt_rate.h"
#include "router/rt_store.h"

static struct msg_id id_of(uint64_t n)
{
    struct msg_id id = {{0}};
    memcpy(id.bytes, &n, sizeof(n));
    return id;
}

static void test_store_against_arrays(void **state)
{
    enum { REQUESTS = 20, WORDS = 6000 };
    struct rt_store *s = rt_store_create(REQUESTS, 64 * RT_PAGE_TOKENS);
    static uint32_t mirror[REQUESTS][WORDS], read[WORDS], piece[WORDS];
    struct rt_request *r[REQUESTS] = {NULL};
    struct rng rng;
    uint32_t refused = 0;
    (void)state;
    rng_init(&rng, 5);
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t i = rng_below(&rng, REQUESTS);
        struct msg_id id = id_of(i + 1);
        assert_ptr_equal(rt_store_find(s, &id), r[i]);
        if (r[i] == NULL) {
            r[i] = rt_store_take(s, &id);
            assert_non_null(r[i]);
        } else if (rng_below(&rng, 20) == 0) {
            rt_store_give(s, &r[i]);
            assert_null(r[i]);
        } else {
            uint32_t n = rng_below(&rng, 300), count = r[i]->ids.count;
            for (uint32_t k = 0; k < n; k++)
                piece[k] = rng_u32(&rng);
            if (count + n > WORDS)
                continue;
            uint64_t free_before = rt_store_free_tokens(s);
            if (!rt_chain_append(s, &r[i]->ids, piece, n)) {
                refused++;
                assert_int_equal(r[i]->ids.count, count);
                assert_int_equal(rt_store_free_tokens(s), free_before);
                continue;
            }
            memcpy(mirror[i] + count, piece, n * sizeof(piece[0]));
            count += n;
            assert_int_equal(r[i]->ids.count, count);
            uint32_t from = rng_below(&rng, count + 1);
            uint32_t length = rng_below(&rng, count - from + 1);
            rt_chain_read(s, &r[i]->ids, from, length, read);
            assert_memory_equal(read, mirror[i] + from, length * sizeof(read[0]));
        }
    }
    assert_true(refused > 0);
    struct msg_id more = id_of(99);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        struct msg_id id = id_of(i + 1);
        if (r[i] == NULL)
            r[i] = rt_store_take(s, &id);
    }
    assert_null(rt_store_take(s, &more));
    assert_int_equal(rt_store_count(s), REQUESTS);
    for (uint32_t i = 0; i < REQUESTS; i++)
        rt_store_give(s, &r[i]);
    assert_int_equal(rt_store_free_tokens(s), 64 * RT_PAGE_TOKENS);
    rt_store_destroy(&s);
}

static void test_queue_turns(void **state)
{
    struct rt_store *s = rt_store_create(32, 64 * RT_PAGE_TOKENS);
    struct rt_queue *q = rt_queue_create(32);
    static const struct {
        int32_t priority;
        const char *client;
    } pushed[] = {{0, "a"}, {0, "a"}, {0, "a"}, {0, "b"}, {1, "c"}, {0, "c"}, {-1, "b"}, {0, "b"}};
    static const uint32_t wanted[] = {6, 0, 3, 5, 1, 7, 2, 4};
    (void)state;
    assert_null(rt_queue_first(q, UINT32_MAX, NULL, NULL));
    for (uint32_t i = 0; i < 8; i++) {
        struct msg_id id = id_of(i + 1);
        struct rt_request *r = rt_store_take(s, &id);
        rt_text_set(&r->client_id, pushed[i].client);
        r->priority = pushed[i].priority;
        r->order = i;
        assert_true(rt_chain_append(s, &r->ids, (const uint32_t[]){1, 2, 3}, 3));
        rt_queue_push(q, r);
    }
    assert_int_equal(rt_queue_count(q), 8);
    assert_int_equal(rt_queue_tokens(q), 24);
    for (uint32_t n = 0; n < 8; n++) {
        struct rt_request *r = rt_queue_first(q, UINT32_MAX, NULL, NULL);
        assert_int_equal(r->order, wanted[n]);
        rt_queue_serve(q, r);
        if (n == 4) { /* comes back: first in line, whoever it is */
            rt_queue_push_front(q, r);
            assert_ptr_equal(rt_queue_first(q, 3, NULL, NULL), r);
            assert_null(rt_queue_first(q, 2, NULL, NULL));
            rt_queue_remove(q, r);
        }
        rt_store_give(s, &r);
    }
    assert_null(rt_queue_first(q, UINT32_MAX, NULL, NULL));
    assert_int_equal(rt_queue_tokens(q), 0);
    rt_queue_destroy(&q);
    rt_store_destroy(&s);
}

static void test_queue_front_is_by_age(void **state)
{
    struct rt_store *s = rt_store_create(8, 64 * RT_PAGE_TOKENS);
    struct rt_queue *q = rt_queue_create(8);
    static const uint32_t orders[] = {5, 1, 7, 3};
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct msg_id id = id_of(i + 1);
        struct rt_request *r = rt_store_take(s, &id);
        r->order = orders[i];
        rt_queue_push_front(q, r);
    }
    for (uint32_t wanted = 1; wanted <= 7; wanted += 2) {
        struct rt_request *r = rt_queue_first(q, UINT32_MAX, NULL, NULL);
        assert_int_equal(r->order, wanted);
        rt_queue_remove(q, r);
        rt_store_give(s, &r);
    }
    rt_queue_destroy(&q);
    rt_store_destroy(&s);
}

static void test_rate(void **state)
{
    struct rt_rate r;
    struct rng rng;
    uint64_t now_us = 0;
    (void)state;
    rng_init(&rng, 3);
    rt_rate_init(&r, now_us);
    uint32_t unknown = rt_rate_retry_ms(&r, 100000, 5, &rng);
    assert_in_range(unknown, 1000, 2000);
    for (uint32_t i = 0; i < 400; i++) { /* 1000 tokens a second, 50 ms ticks */
        now_us += 50000;
        rt_rate_done(&r, 50);
        rt_rate_tick(&r, now_us, true);
    }
    assert_true(r.tokens_per_s > 990 && r.tokens_per_s < 1010);
    for (uint32_t i = 0; i < 400; i++) { /* idleness teaches nothing */
        now_us += 50000;
        rt_rate_tick(&r, now_us, false);
    }
    assert_true(r.tokens_per_s > 990);
    struct rt_rate stalled = r;
    for (uint32_t i = 0; i < 100; i++) { /* work waits and nothing comes of it */
        now_us += 50000;
        rt_rate_tick(&stalled, now_us, true);
    }
    assert_true(stalled.tokens_per_s < 300);
    rt_rate_finished(&r, 500);
    for (uint32_t i = 0; i < 100; i++) { /* (9100 + 2 x 500) / 1000, up, and a quarter at most */
        uint32_t ms = rt_rate_retry_ms(&r, 9100, 2, &rng);
        assert_in_range(ms, 11000, 11000 + 2750);
    }
    assert_in_range(rt_rate_retry_ms(&r, 1ull << 40, 2, &rng), 300000, 375000);
    assert_in_range(rt_rate_retry_ms(&r, 0, 0, &rng), 1000, 2000);
}

static const struct rt_canary_times times = {2000000, 3000000, 15000000};

static void test_canary(void **state)
{
    struct rt_canary c = {0};
    static const uint32_t answer[] = {10, 20, 30, 40};
    struct hash128 h = hash_xxh3_once(answer, sizeof(answer));
    struct msg_worker_info info = {.canary_output_count = 4};
    memcpy(&info.canary_hash, h.bytes, 8);
    struct msg_id id = id_of(77), other = id_of(78), zero = id_of(0);
    (void)state;
    rt_canary_reset(&c, 1000);
    assert_false(rt_canary_is(&c, &zero));
    assert_true(rt_canary_due(&c, 1000));
    rt_canary_asked(&c, &id, 1000);
    assert_true(rt_canary_is(&c, &id) && !rt_canary_is(&c, &other));
    assert_false(rt_canary_due(&c, 1000));
    struct msg_tokens t = {.seq = 0, .count = 3, .ids = answer};
    assert_false(rt_canary_answer(&c, &t, &info, &times, 2000));
    t = (struct msg_tokens){.seq = 1, .count = 3, .ids = answer + 1, .finish = MSG_FINISH_LENGTH};
    assert_true(rt_canary_answer(&c, &t, &info, &times, 3000)); /* the repetition does not matter */
    assert_int_equal(c.verdict, RT_CANARY_RIGHT);
    assert_false(rt_canary_due(&c, 1000 + 1999999)); /* the period runs from question to question */
    assert_true(rt_canary_due(&c, 1000 + 2000000));
    /* Refused: the verdict stays. */
    rt_canary_asked(&c, &id, 2003000);
    t = (struct msg_tokens){.finish = MSG_FINISH_FAILED, .code = ERR_KV_FULL};
    assert_true(rt_canary_answer(&c, &t, &info, &times, 2004000));
    assert_int_equal(c.verdict, RT_CANARY_RIGHT);
    /* A jump, a short answer, a failure: wrong. */
    static const struct msg_tokens bad[] = {
        {.seq = 1, .count = 1, .ids = answer},
        {.seq = 0, .count = 3, .ids = answer, .finish = MSG_FINISH_STOP},
        {.finish = MSG_FINISH_FAILED, .code = ERR_INTERNAL},
        {.seq = 0, .count = 4, .ids = answer + 0, .finish = MSG_FINISH_CANCELLED},
    };
    for (uint32_t i = 0; i < 4; i++) {
        c.verdict = RT_CANARY_RIGHT;
        rt_canary_asked(&c, &id, 5000000);
        assert_true(rt_canary_answer(&c, &bad[i], &info, &times, 5000001));
        assert_int_equal(c.verdict, i < 3 ? RT_CANARY_WRONG : RT_CANARY_RIGHT);
    }
    /* Late after 3 s, or 15 s while busy; asked again at once. */
    rt_canary_asked(&c, &id, 10000000);
    assert_false(rt_canary_expire(&c, &times, 13000000, false));
    assert_false(rt_canary_expire(&c, &times, 13000001, true));
    assert_true(rt_canary_expire(&c, &times, 13000001, false));
    assert_int_equal(c.verdict, RT_CANARY_LATE);
    assert_true(rt_canary_due(&c, 13000001));
    assert_false(rt_canary_expire(&c, &times, 99000000, false));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_store_against_arrays),
        cmocka_unit_test(test_queue_turns),
        cmocka_unit_test(test_queue_front_is_by_age),
        cmocka_unit_test(test_rate),
        cmocka_unit_test(test_canary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
