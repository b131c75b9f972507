/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives over the local link: sums, gathers, faults below the interface, divergence. */
#include "tests/unit/fabric_world.h"

#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "worker/wk_fabric_parts.h"

#define COUNT_MAX 5000u

int mallctl(const char *name, void *old, size_t *old_bytes, void *new_value, size_t new_bytes)
    __attribute__((weak));

/* Values of a rank in a round: any thread can make every rank's. */
static void fill(float *values, size_t count, uint32_t round, uint32_t rank)
{
    struct rng rng;
    rng_init(&rng, (uint64_t)round * 64 + rank);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)((rng_unit(&rng) - 0.5) * (i % 7 == 0 ? 1e6 : 1));
}

static void expect_sum(float *sum, float *work, size_t count, uint32_t round, uint32_t ranks)
{
    fill(sum, count, round, 0);
    for (uint32_t r = 1; r < ranks; r++) {
        fill(work, count, round, r);
        for (size_t i = 0; i < count; i++)
            sum[i] += work[i];
    }
}

struct buffers {
    float *values, *sum, *work, *all;
};

static struct buffers buffers_take(uint32_t ranks)
{
    return (struct buffers){mem_take_array(COUNT_MAX, sizeof(float)),
                            mem_take_array(COUNT_MAX, sizeof(float)),
                            mem_take_array(COUNT_MAX, sizeof(float)),
                            mem_take_array((size_t)COUNT_MAX * ranks * 2, sizeof(float))};
}

static void buffers_give(struct buffers *b)
{
    mem_give(b->values);
    mem_give(b->sum);
    mem_give(b->work);
    mem_give(b->all);
}

/* One round of every collective; an error is the fabric's, a wrong value ends the program. */
static enum err round_run(struct world *w, struct wk_fabric *f, struct buffers *b, uint32_t round)
{
    static const size_t counts[] = {1, 0, 7, 256, 255, 257, COUNT_MAX};
    size_t count = counts[round % ARRAY_COUNT(counts)], bytes = count * sizeof(float);
    uint32_t rank = wk_fabric_rank(f);
    wk_fabric_step(f, round);
    fill(b->values, count, round, rank);
    TRY(wk_all_reduce(f, b->values, count));
    expect_sum(b->sum, b->work, count, round, w->ranks);
    MUST(memcmp(b->values, b->sum, bytes) == 0);
    fill(b->values, count, round, rank);
    TRY(wk_all_gather(f, b->values, bytes, b->all));
    for (uint32_t r = 0; r < w->ranks; r++) {
        fill(b->work, count, round, r);
        MUST(memcmp((uint8_t *)b->all + r * bytes, b->work, bytes) == 0);
    }
    /* Rank r's part for rank p is its values of round 1000 + p. */
    float *parts = b->all + (size_t)w->ranks * COUNT_MAX;
    for (uint32_t p = 0; p < w->ranks; p++)
        fill(parts + p * count, count, 1000 + p, rank);
    TRY(wk_all_to_all(f, parts, bytes, b->all));
    for (uint32_t r = 0; r < w->ranks; r++) {
        fill(b->work, count, 1000 + rank, r);
        MUST(memcmp((uint8_t *)b->all + r * bytes, b->work, bytes) == 0);
    }
    fill(b->values, count, round, rank);
    uint32_t peer = rank ^ 1u; /* pairs 0-1, 2-3, ... */
    if (peer < w->ranks) {
        TRY(wk_pair_exchange(f, peer, b->values, bytes, b->sum));
        fill(b->work, count, round, peer);
        MUST(memcmp(b->sum, b->work, bytes) == 0);
    }
    return wk_barrier(f);
}

static void body_rounds(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    (void)rank;
    struct buffers b = buffers_take(w->ranks);
    must_join(f, 10000);
    MUST(wk_fabric_epoch(f) == 1);
    for (uint32_t round = 0; round < 30; round++)
        MUST(round_run(w, f, &b, round) == ERR_OK);
    MUST(wk_fabric_fault(f, NULL) == ERR_OK);
    buffers_give(&b);
    world_all_done(w);
}

static void test_rounds(void **state)
{
    (void)state;
    static const uint32_t ranks[] = {2, 3, 8};
    for (uint32_t i = 0; i < ARRAY_COUNT(ranks); i++) {
        struct world w;
        world_init(&w, ranks[i], 1024);
        world_run(&w, body_rounds, NULL);
        world_fini(&w);
    }
}

/* What each rank saw when a planted fault hit. */
struct seen {
    enum err code[2];
    struct err_detail detail[2];
    uint64_t us[2];
    uint64_t duplicates[2];
};

/* Runs rounds until the fabric fails or they are done, then forms the group anew and goes on. */
static void body_fault(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct seen *seen = w->arg;
    struct buffers b = buffers_take(w->ranks);
    must_join(f, 10000);
    uint64_t begun = 0;
    for (uint32_t round = 0; round < 14 && seen->code[rank] == ERR_OK; round++) {
        begun = clock_mono_us();
        seen->code[rank] = round_run(w, f, &b, round);
    }
    seen->us[rank] = clock_mono_us() - begun;
    seen->duplicates[rank] = wk_fabric_stats(f)->duplicates;
    wk_fabric_fault(f, &seen->detail[rank]);
    if (seen->code[rank] != ERR_OK) {
        /* Latched: nothing is sent or waited for until the group is formed anew. */
        MUST(wk_barrier(f) == seen->code[rank]);
        MUST(wk_fabric_stats(f)->faults >= 1);
    }
    buffers_give(&b);
}

static void body_fault_rejoin(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    body_fault(w, f, rank);
    struct buffers b = buffers_take(w->ranks);
    must_join(f, 10000);
    for (uint32_t round = 0; round < 14; round++)
        MUST(round_run(w, f, &b, round) == ERR_OK);
    MUST(wk_barrier(f) == ERR_OK);
    buffers_give(&b);
}

static struct seen fault_run(enum wk_fault fault, uint64_t message, uint64_t value, bool rejoin)
{
    struct world w;
    struct seen seen = {0};
    struct wk_fault_options faults = {.rule_count = 1, .rules = {{message, fault, value}}};
    world_init(&w, 2, 1024);
    /* Also the bound of the rounds after the group is formed anew: with 300 ms a machine that runs
     * other tests beside this one missed it now and then. */
    w.deadline_ms = 900;
    w.silence_ms = 3000;
    w.faults[1] = &faults;
    world_run(&w, rejoin ? body_fault_rejoin : body_fault, &seen);
    world_fini(&w);
    return seen;
}

static void test_harmless(void **state)
{
    (void)state;
    struct seen s = fault_run(WK_FAULT_DUPLICATE, 20, 0, true);
    assert_int_equal(s.code[0], ERR_OK);
    assert_int_equal(s.code[1], ERR_OK);
    assert_int_equal(s.duplicates[0], 1);
    s = fault_run(WK_FAULT_DELAY, 20, 30000, true);
    assert_int_equal(s.code[0], ERR_OK);
    assert_int_equal(s.code[1], ERR_OK);
    s = fault_run(WK_FAULT_STALL, 20, 100000, true);
    assert_int_equal(s.code[0], ERR_OK);
    assert_int_equal(s.code[1], ERR_OK);
}

static void test_drop(void **state)
{
    (void)state;
    struct seen s = fault_run(WK_FAULT_DROP, 20, 0, true);
    assert_int_not_equal(s.code[0], ERR_OK);
    assert_int_not_equal(s.code[1], ERR_OK);
    for (int r = 0; r < 2; r++)
        assert_true(s.us[r] < 2000000);
}

/* The last messages of both go astray, and each waits for the other: that is known long before the
 * deadline. */
static void test_drop_both_ways(void **state)
{
    (void)state;
    struct world w;
    struct seen seen = {0};
    struct wk_fault_options faults = {.rule_count = 1, .rules = {{20, WK_FAULT_DROP, 0}}};
    world_init(&w, 2, 1024);
    w.deadline_ms = 20000;
    w.faults[0] = w.faults[1] = &faults;
    world_run(&w, body_fault_rejoin, &seen);
    world_fini(&w);
    assert_true(seen.code[0] == ERR_CORRUPT || seen.code[1] == ERR_CORRUPT);
    for (int r = 0; r < 2; r++) {
        assert_int_not_equal(seen.code[r], ERR_OK);
        assert_true(seen.us[r] < 3000000);
    }
    int r = seen.code[0] == ERR_CORRUPT ? 0 : 1;
    assert_non_null(strstr(seen.detail[r].text, "1 messages of rank"));
}

static void body_answer_lost(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct seen *seen = w->arg;
    uint8_t byte = 1;
    size_t count = 0;
    must_join(f, 10000);
    uint64_t begun = clock_mono_us();
    if (rank == 0)
        seen->code[0] = wk_barrier(f);
    else
        MUST(wk_barrier(f) == ERR_OK); /* what it sends is lost */
    while (rank == 1 && (seen->code[1] = wk_hear(f, &byte, 1, &count, 50)) == ERR_BUSY)
        continue;
    seen->us[rank] = clock_mono_us() - begun;
}

/* The one whose message went astray no longer waits for an answer, but for what comes next. */
static void test_answer_lost(void **state)
{
    (void)state;
    struct world w;
    struct seen seen = {0};
    struct wk_fault_options faults = {.rule_count = 1, .rules = {{2, WK_FAULT_DROP, 0}}};
    world_init(&w, 2, 1024);
    w.deadline_ms = 20000;
    w.faults[1] = &faults;
    world_run(&w, body_answer_lost, &seen);
    world_fini(&w);
    assert_int_equal(seen.code[0], ERR_CORRUPT);
    assert_true(seen.code[1] == ERR_EPOCH || seen.code[1] == ERR_CLOSED);
    assert_true(seen.us[0] < 3000000 && seen.us[1] < 3000000);
}

/* Both wait for each other's message for a while, and show how many they have sent. */
static void long_wait(struct wk_fabric *f, uint32_t rank, uint32_t late)
{
    if (rank == late)
        usleep(WK_SHOW_US + WK_MISSING_US + 200000);
    MUST(wk_barrier(f) == ERR_OK);
}

static void body_anew(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    must_join(f, 10000);
    for (int i = 0; i < 20; i++)
        MUST(wk_barrier(f) == ERR_OK);
    long_wait(f, rank, 0);
    long_wait(f, rank, 1);
    wk_fabric_leave(f);
    must_join(f, 10000);
    long_wait(f, rank, 0); /* who waits here looks at what the other showed */
    long_wait(f, rank, 1);
    world_all_done(w);
}

/* What was sent in an epoch that is over is not missed in the next. */
static void test_sent_is_of_the_epoch(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 1024);
    world_run(&w, body_anew, NULL);
    world_fini(&w);
}

/* ---- a message that comes later than the word that it was sent ---- */

static const struct wk_link_ops *_Atomic shown;
static _Thread_local uint32_t hides_rank; /* whose messages, + 1; 0 = nobody's */
static _Thread_local uint64_t known_us;   /* when its third one was known as sent */

static enum err receive_hidden(void *self, uint32_t peer, struct wk_link_message *ret_message,
                               uint64_t wait_us)
{
    const struct wk_link_ops *ops = atomic_load(&shown);
    struct wk_status s;
    uint64_t heard_us;
    if (hides_rank != peer + 1 || (known_us != 0 && clock_mono_us() > known_us + 50000))
        return ops->receive(self, peer, ret_message, wait_us);
    ops->peer(self, peer, &s, &heard_us);
    if (known_us == 0 && s.sent[!peer] >= 3)
        known_us = clock_mono_us();
    usleep((useconds_t)wait_us);
    return ERR_BUSY;
}

static struct wk_link link_hiding(const struct world *w, uint32_t rank)
{
    static struct wk_link_ops ops[2];
    struct err_detail detail;
    struct wk_link link;
    MUST(wk_link_local(w->local, rank, &link, &detail) == ERR_OK);
    atomic_store(&shown, link.ops); /* one table for all ranks */
    ops[rank] = *link.ops;
    ops[rank].receive = receive_hidden;
    link.ops = &ops[rank];
    return link;
}

static void body_later(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    must_join(f, 10000);
    MUST(wk_barrier(f) == ERR_OK);
    hides_rank = !rank + 1;
    MUST(wk_barrier(f) == ERR_OK && known_us != 0);
    world_all_done(w);
}

static void test_later_is_not_lost(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 1024);
    w.link = link_hiding;
    world_run(&w, body_later, NULL);
    world_fini(&w);
}

static void test_corrupt(void **state)
{
    (void)state;
    /* Bits of every field of the head, then of the payload. */
    for (uint64_t bit = 3; bit < 8 * sizeof(struct wk_head) + 200; bit += 37) {
        struct seen s = fault_run(WK_FAULT_CORRUPT, 9, bit, bit % 2 == 0);
        assert_int_equal(s.code[0], ERR_CORRUPT);
        assert_non_null(strstr(s.detail[0].text, "rank 1 damaged"));
        /* The other one hears that rank 0 left, or finds it gone. */
        assert_true(s.code[1] == ERR_EPOCH || s.code[1] == ERR_CLOSED);
        assert_true(s.us[1] < 2000000);
    }
}

static void test_stall_and_close(void **state)
{
    (void)state;
    struct seen s = fault_run(WK_FAULT_STALL, 20, 2700000, true);
    assert_true(s.code[0] == ERR_TIMEOUT || s.code[1] == ERR_TIMEOUT);
    s = fault_run(WK_FAULT_CLOSE, 20, 0, false);
    assert_int_equal(s.code[1], ERR_CLOSED);
    assert_true(s.code[0] == ERR_TIMEOUT || s.code[0] == ERR_CLOSED);
    assert_true(s.us[0] < 2000000);
}

/* Ranks that are not in the same collective of the same step never exchange a byte of it. */
static void body_diverge(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct seen *seen = w->arg;
    float values[8] = {0}, all[16];
    must_join(f, 10000);
    wk_fabric_step(f, 5);
    uint64_t how = (uint64_t)seen->us[0];
    if (rank == 1 && how == 0)
        seen->code[1] = wk_all_reduce(f, values, 7);
    else if (rank == 1 && how == 1)
        seen->code[1] = wk_all_gather(f, values, 32, all);
    else if (rank == 1) {
        wk_fabric_step(f, 6);
        seen->code[1] = wk_all_reduce(f, values, 8);
    } else {
        seen->code[0] = wk_all_reduce(f, values, 8);
    }
    wk_fabric_fault(f, &seen->detail[rank]);
}

static void test_diverge(void **state)
{
    (void)state;
    for (uint64_t how = 0; how < 3; how++) {
        struct world w;
        struct seen seen = {.us = {how}};
        world_init(&w, 2, 1024);
        world_run(&w, body_diverge, &seen);
        world_fini(&w);
        for (int r = 0; r < 2; r++)
            assert_true(seen.code[r] == ERR_INVALID || seen.code[r] == ERR_EPOCH ||
                        seen.code[r] == ERR_CLOSED);
        int r = seen.code[0] == ERR_INVALID ? 0 : 1;
        assert_int_equal(seen.code[r], ERR_INVALID);
        assert_non_null(strstr(seen.detail[r].text, "ranks differ"));
    }
}

static void body_settings(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct seen *seen = w->arg;
    seen->code[rank] = wk_fabric_join(f, 2000, &seen->detail[rank]);
}

static void test_settings(void **state)
{
    (void)state;
    struct world w;
    struct seen seen = {0};
    world_init(&w, 2, 1024);
    w.settings[1].bytes[3] = 9;
    world_run(&w, body_settings, &seen);
    world_fini(&w);
    /* One that looks when the other has already gone waits in vain; never a group. */
    assert_true(seen.code[0] == ERR_INVALID || seen.code[1] == ERR_INVALID);
    for (int r = 0; r < 2; r++)
        assert_true(seen.code[r] == ERR_INVALID || seen.code[r] == ERR_TIMEOUT);
    int r = seen.code[0] == ERR_INVALID ? 0 : 1;
    assert_non_null(strstr(seen.detail[r].text, "other weights or settings"));
}

/* Seeded chance on both sides: whatever happens, a sum that comes back is right, and the group
 * forms anew after every fault. */
static void body_chance(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    (void)rank;
    struct buffers b = buffers_take(w->ranks);
    uint32_t *progress = w->arg, round = 0;
    must_join(f, 20000);
    while (round < 120) {
        if (round_run(w, f, &b, round) == ERR_OK) {
            round++;
            continue;
        }
        must_join(f, 20000);
        /* Ranks may have ended the failed round differently: the lower one counts. */
        uint32_t own = round, all[WK_RANKS_MAX];
        while (wk_all_gather(f, &own, sizeof own, all) != ERR_OK)
            must_join(f, 20000);
        for (uint32_t r = 0; r < w->ranks; r++)
            round = all[r] < round ? all[r] : round;
    }
    progress[wk_fabric_rank(f)] = (uint32_t)wk_fabric_stats(f)->joins;
    buffers_give(&b);
}

static void test_chance(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 3; seed++) {
        struct world w;
        uint32_t progress[WK_RANKS_MAX] = {0};
        struct wk_fault_options faults[2];
        world_init(&w, 2, 1024);
        w.deadline_ms = 200;
        w.silence_ms = 2000;
        for (uint32_t r = 0; r < 2; r++) {
            faults[r] = (struct wk_fault_options){.seed = seed * 10 + r, .chance_value_max = 3000};
            faults[r].permille[WK_FAULT_DELAY] = 5;
            faults[r].permille[WK_FAULT_DROP] = 2;
            faults[r].permille[WK_FAULT_DUPLICATE] = 5;
            faults[r].permille[WK_FAULT_CORRUPT] = 3;
            faults[r].permille[WK_FAULT_STALL] = 3;
            w.faults[r] = &faults[r];
        }
        world_run(&w, body_chance, progress);
        world_fini(&w);
        assert_true(progress[0] > 1 && progress[1] > 1); /* faults did happen */
    }
}

/* Rank 0 speaks, the others listen: between collectives, in any sizes, idle for a while. */
static void body_tell(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    static const size_t sizes[] = {1, 1024, 1025, 4 * COUNT_MAX};
    uint8_t *bytes = mem_take(4 * COUNT_MAX);
    size_t count = 0;
    float value = 1;
    must_join(f, 10000);
    for (uint32_t i = 0; i < ARRAY_COUNT(sizes); i++) {
        if (rank == 0) {
            memset(bytes, (int)i + 1, sizes[i]);
            MUST(wk_tell(f, bytes, sizes[i]) == ERR_OK);
        } else {
            MUST(wk_hear(f, bytes, 4 * COUNT_MAX, &count, 5000) == ERR_OK);
            MUST(count == sizes[i] && bytes[0] == i + 1 && bytes[count - 1] == i + 1);
        }
        wk_fabric_step(f, i + 1);
        MUST(wk_all_reduce(f, &value, 1) == ERR_OK);
    }
    /* Nothing is told for a while: that is no fault. */
    MUST(wk_barrier(f) == ERR_OK);
    if (rank == 0)
        usleep(400000);
    else
        MUST(wk_hear(f, bytes, 10, &count, 30) == ERR_BUSY);
    wk_fabric_step(f, 9);
    MUST(wk_barrier(f) == ERR_OK);
    mem_give(bytes);
    world_all_done(w);
}

/* Hearing where the others are in a collective, and more than there is room for, are faults. */
static void body_tell_wrong(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct seen *seen = w->arg;
    uint8_t bytes[64] = {0};
    size_t count = 0;
    must_join(f, 10000);
    if (rank == 0 && seen->us[0] == 0)
        seen->code[0] = wk_barrier(f);
    else if (rank == 0)
        seen->code[0] = wk_tell(f, bytes, sizeof bytes);
    else
        seen->code[1] = wk_hear(f, bytes, 32, &count, 2000);
    if (rank == 0 && seen->code[0] == ERR_OK)
        seen->code[0] = wk_barrier(f);
}

static void test_tell(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 3, 1024);
    world_run(&w, body_tell, NULL);
    world_fini(&w);
    for (uint64_t how = 0; how < 2; how++) {
        struct seen seen = {.us = {how}};
        world_init(&w, 2, 1024);
        world_run(&w, body_tell_wrong, &seen);
        world_fini(&w);
        assert_int_equal(seen.code[1], how == 0 ? ERR_INVALID : ERR_TOO_LARGE);
        assert_int_not_equal(seen.code[0], ERR_OK);
    }
}

static void body_allocations(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    (void)rank;
    struct buffers b = buffers_take(w->ranks);
    uint64_t before = 0, after = 0;
    size_t bytes = sizeof before;
    must_join(f, 10000);
    for (uint32_t round = 0; round < 40; round++) {
        if (round == 10 && mallctl("thread.allocated", &before, &bytes, NULL, 0) != 0)
            abort();
        MUST(round_run(w, f, &b, round) == ERR_OK);
    }
    MUST(mallctl("thread.allocated", &after, &bytes, NULL, 0) == 0);
    MUST(after == before);
    MUST(wk_barrier(f) == ERR_OK);
    buffers_give(&b);
}

static void test_allocates_nothing(void **state)
{
    (void)state;
    struct world w;
    if (mallctl == NULL)
        skip();
    world_init(&w, 2, 1024);
    world_run(&w, body_allocations, NULL);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounds),
        cmocka_unit_test(test_harmless),
        cmocka_unit_test(test_drop),
        cmocka_unit_test(test_drop_both_ways),
        cmocka_unit_test(test_answer_lost),
        cmocka_unit_test(test_sent_is_of_the_epoch),
        cmocka_unit_test(test_later_is_not_lost),
        cmocka_unit_test(test_corrupt),
        cmocka_unit_test(test_stall_and_close),
        cmocka_unit_test(test_diverge),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_chance),
        cmocka_unit_test(test_tell),
        cmocka_unit_test(test_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
