/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/str.h"
#include "tests/unit/km_cache_run.h"

static void a_second_turn_reuses_the_first(void **state)
{
    struct run first = turn(1, 1, 0, words_a, 5 * CW_BT + 3);
    assert_int_equal(first.reused, 0);
    assert_int_equal(km_core_counts(W->core).blocks_cached, 5);
    struct run second = turn(2, 1, 0, words_a, 8 * CW_BT + 1);
    assert_int_equal(second.reused, 5);
    assert_memory_equal(second.blocks, first.blocks, 5 * sizeof(uint32_t));
    assert_int_equal(km_core_counts(W->core).blocks_cached, 8);
    assert_int_equal(km_core_stats(W->core)->hits_part, 1);
    assert_int_equal(km_core_stats(W->core)->misses_cold, 1);
    assert_int_equal(km_core_stats(W->core)->tokens_reused, 5 * CW_BT);
    /* The session's map of the second turn begins at the front of the chain. */
    assert_int_equal(W->session.first_block, 0);
    assert_int_equal(W->session.count, 8);
    assert_int_equal(W->session.snapshot_tokens, 5 * CW_BT); /* of the turn before */
    assert_int_equal(W->snapshot_tokens, 8 * CW_BT);         /* at its end */
    W->options.pin_us = 30 * CW_SECOND;
    cw_start(W);
    cw_attach(W, 0, 100);
    (void)turn(3, 1, 0, words_a, 9 * CW_BT + 1);
    assert_true(W->pin_us == 30 * CW_SECOND);
}

/* Lengths around the boundaries: at least one token is always computed. */
static void boundaries_by_one(void **state)
{
    (void)turn(1, 0, 0, words_a, 4 * CW_BT);
    static const struct {
        uint32_t tokens, reused;
    } cases[] = {{4 * CW_BT - 1, 0},
                 {4 * CW_BT, 0},
                 {4 * CW_BT + 1, 4},
                 {5 * CW_BT - 1, 4},
                 {5 * CW_BT, 4},
                 {1, 0},
                 {0, 0}};
    for (uint32_t i = 0; i < ARRAY_COUNT(cases); i++) {
        struct run r = {.request = 10 + i};
        run_chain(&r, words_a, cases[i].tokens);
        assert_int_equal(run_open(&r), ERR_OK);
        assert_int_equal(r.reused, cases[i].reused);
        run_release(&r, true);
        cw_check(W);
    }
}

static void blocks_without_a_state_are_no_hit(void **state)
{
    struct run r = {.request = 1};
    run_chain(&r, words_a, 6 * CW_BT + 1);
    assert_int_equal(run_open(&r), ERR_OK);
    run_commit(&r);
    assert_int_equal(run_snapshot(&r, 2), ERR_OK);
    assert_int_equal(run_snapshot(&r, 2), ERR_OK); /* known: its slot stays granted */
    uint32_t granted = W->granted_count;
    struct run other = {.request = 2};
    run_chain(&other, words_a, 6 * CW_BT + 1);
    assert_int_equal(run_open(&other), ERR_OK); /* beside the first: shared up to the state */
    assert_int_equal(other.reused, 2);
    run_commit(&other); /* duplicates of what the first has committed */
    assert_int_equal(km_core_stats(W->core)->duplicates, 4);
    cw_check(W);
    run_release(&r, true);
    cw_check(W);
    run_release(&other, true);
    assert_int_equal(km_core_counts(W->core).blocks_cached, 2);
    assert_int_equal(W->granted_count, granted);
    cw_check(W);
}

static void tenants_share_nothing(void **state)
{
    (void)turn(1, 1, 0, words_a, 5 * CW_BT);
    assert_int_equal(turn(2, 1, 1, words_a, 5 * CW_BT + 1).reused, 0);
    assert_int_equal(turn(3, 1, 2, words_a, 5 * CW_BT + 1).reused, 0);
    assert_int_equal(turn(4, 1, 1, words_a, 6 * CW_BT).reused, 5);
}

static void nobody_gets_what_is_in_use(void **state)
{
    struct run r = {.request = 1};
    run_chain(&r, words_a, 10 * CW_BT);
    assert_int_equal(run_open(&r), ERR_OK);
    run_commit(&r);
    assert_int_equal(run_snapshot(&r, 10), ERR_OK);
    struct run big = {.request = 2};
    run_chain(&big, words_b, 30 * CW_BT);
    assert_int_equal(run_open(&big), ERR_KV_FULL); /* 31 of 40, 11 leased */
    run_release(&r, true);
    assert_int_equal(W->pressures, 1); /* the refused one is told */
    assert_int_equal(run_open(&big), ERR_OK);
    assert_int_equal(big.reused, 0); /* what would have been shared had to go */
    cw_check(W);
    run_release(&big, false);
    assert_int_equal(km_core_counts(W->core).blocks_cached + km_core_counts(W->core).blocks_free,
                     40);
}

static void the_order_of_eviction(void **state)
{
    static const uint32_t other[] = {50, 51, 52, 53, 54, 55, 56, 57};
    static const uint32_t fresh[] = {70, 71, 72, 73, 74, 75, 76, 77};
    W->options.pin_us = 100 * CW_SECOND;
    cw_start(W);
    cw_attach(W, 0, 100);
    (void)turn(1, 1, 0, words_a, 8 * CW_BT); /* pinned */
    W->now_us += 10 * CW_SECOND;
    (void)turn(2, 0, 0, other, 8 * CW_BT); /* no session */
    W->now_us += 10 * CW_SECOND;
    (void)turn(3, 2, 0, fresh, 8 * CW_BT); /* pinned later */
    struct run big = {.request = 9};
    uint32_t words[CHAIN_MAX] = {1000};
    run_chain(&big, words, 22 * CW_BT);
    assert_int_equal(run_open(&big), ERR_OK);
    run_release(&big, false);
    assert_int_equal(turn(4, 0, 0, other, 8 * CW_BT + 1).reused, 0); /* went first */
    assert_int_equal(turn(5, 1, 0, words_a, 8 * CW_BT + 1).reused, 8);
    assert_int_equal(turn(6, 2, 0, fresh, 8 * CW_BT + 1).reused, 8);
}

/* A turn that forks off near the end of the one before took its place. */
static void spent_turns_go_first(void **state)
{
    uint32_t edited[CHAIN_MAX];
    memcpy(edited, words_a, sizeof(edited));
    edited[6] = 600;
    (void)turn(1, 1, 0, words_a, 8 * CW_BT);
    (void)turn(2, 1, 0, words_a, 6 * CW_BT + 1);
    (void)turn(3, 1, 0, edited, 8 * CW_BT);
    (void)turn(4, 2, 0, words_b, 10 * CW_BT);
    struct run big = {.request = 9};
    uint32_t words[CHAIN_MAX] = {1000};
    run_chain(&big, words, 24 * CW_BT);
    uint32_t cached = km_core_counts(W->core).blocks_cached;
    assert_int_equal(run_open(&big), ERR_OK);
    assert_true(km_core_counts(W->core).blocks_cached < cached);
    run_release(&big, false);
    assert_int_equal(turn(5, 0, 0, edited, 8 * CW_BT + 1).reused, 8);
    assert_true(turn(6, 0, 0, words_a, 8 * CW_BT + 1).reused < 8);
}

static void a_session_keeps_its_share(void **state)
{
    W->options.session_percent = 25; /* 10 blocks */
    cw_start(W);
    cw_attach(W, 0, 100);
    static const uint32_t other[] = {50, 51, 52, 53, 54, 55, 56, 57};
    (void)turn(1, 1, 0, other, 8 * CW_BT);
    W->now_us += 60 * CW_SECOND;
    (void)turn(2, 2, 0, words_a, 16 * CW_BT); /* newer, but beyond its share */
    struct run big = {.request = 9};
    uint32_t words[CHAIN_MAX] = {1000};
    run_chain(&big, words, 20 * CW_BT);
    assert_int_equal(run_open(&big), ERR_OK);
    run_release(&big, false);
    assert_int_equal(turn(5, 1, 0, other, 8 * CW_BT + 1).reused, 8);
}

/* Requests without a session are not one that has more than its share. */
static void the_nameless_have_no_share(void **state)
{
    W->options.session_percent = 25; /* 10 blocks */
    cw_start(W);
    cw_attach(W, 0, 100);
    static const uint32_t other[] = {50, 51, 52, 53, 54, 55, 56, 57};
    (void)turn(1, 1, 0, other, 8 * CW_BT);
    W->now_us += 60 * CW_SECOND;
    (void)turn(2, 0, 0, words_a, 16 * CW_BT);
    struct run big = {.request = 9};
    uint32_t words[CHAIN_MAX] = {1000};
    run_chain(&big, words, 20 * CW_BT);
    assert_int_equal(run_open(&big), ERR_OK);
    run_release(&big, false);
    assert_int_equal(turn(5, 0, 0, words_a, 16 * CW_BT + 1).reused, 16);
}

static void snapshots_have_a_budget(void **state)
{
    uint32_t words[CHAIN_MAX];
    for (uint32_t i = 0; i < 20; i++) {
        for (uint32_t k = 0; k < CHAIN_MAX; k++)
            words[k] = 100 * (i + 1) + k;
        (void)turn(1 + i, 0, 0, words, 1 * CW_BT);
        W->now_us += CW_SECOND;
        struct km_core_cache c = km_core_cache(W->core);
        assert_true(c.snapshots_kept + W->granted_count <= 8);
        /* A state that is given up takes its blocks along. */
        assert_int_equal(km_core_counts(W->core).blocks_cached, c.snapshots_kept);
    }
    assert_true(km_core_stats(W->core)->snapshots_dropped > 0);
}

static void snapshots_against_the_rules(void **state)
{
    struct run r = {.request = 1};
    run_chain(&r, words_a, 4 * CW_BT);
    assert_int_equal(run_open(&r), ERR_OK);
    assert_int_equal(run_snapshot(&r, 2), ERR_NOT_FOUND); /* not committed */
    run_commit(&r);
    struct msg m = {.type = MSG_KV_SNAPSHOT, .epoch = W->options.epoch};
    m.u.kv_snapshot = (struct msg_kv_snapshot){r.lease, 2 * CW_BT + 1, r.chain[1], W->granted[0]};
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_snapshot_reply.code, ERR_INVALID);
    m.u.kv_snapshot = (struct msg_kv_snapshot){r.lease, 2 * CW_BT, r.chain[1], 0};
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_snapshot_reply.code, ERR_INVALID); /* a live slot */
    uint32_t not_granted = W->slot_count - 1;
    m.u.kv_snapshot.slot = not_granted;
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_snapshot_reply.code, ERR_INVALID);
    m.u.kv_snapshot.slot = UINT32_MAX;
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_snapshot_reply.code, ERR_INVALID);
    m.u.kv_snapshot.lease = 77;
    cw_send(W, 0, &m);
    assert_int_not_equal(W->last.u.kv_snapshot_reply.code, ERR_OK);
    uint32_t slot = W->granted[0];
    assert_int_equal(run_snapshot(&r, 2), ERR_OK);
    m.u.kv_snapshot = (struct msg_kv_snapshot){r.lease, 2 * CW_BT, r.chain[1], slot};
    cw_send(W, 0, &m); /* the answer was lost: asked again */
    assert_int_equal(W->last.u.kv_snapshot_reply.code, ERR_OK);
    cw_check(W);
}

/* The snapshot that an open handed out is not written over while its worker may still read it. */
static void a_restore_is_safe(void **state)
{
    (void)turn(1, 0, 0, words_a, 3 * CW_BT);
    struct run r = {.request = 2};
    run_chain(&r, words_a, 3 * CW_BT + 5);
    assert_int_equal(run_open(&r), ERR_OK);
    uint32_t slot = W->last.u.kv_open_reply.snapshot_slot;
    uint32_t words[CHAIN_MAX];
    for (uint32_t i = 0; i < 20; i++) {
        for (uint32_t k = 0; k < CHAIN_MAX; k++)
            words[k] = 100 * (i + 1) + k;
        (void)turn(10 + i, 0, 0, words, 1 * CW_BT);
        assert_true(cw_same(&W->slot_data[slot], &r.chain[2]));
        assert_int_equal(W->slots[slot].state, KM_COMMITTED);
    }
    run_release(&r, true);
    cw_check(W);
}

static void a_restart_keeps_the_cache(void **state)
{
    struct run a = turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    struct run b = turn(2, 2, 1, words_b, 7 * CW_BT);
    struct run busy = {.request = 3};
    run_chain(&busy, words_a, 9 * CW_BT);
    assert_int_equal(run_open(&busy), ERR_OK);
    run_commit(&busy); /* committed, but no state: of no use after the restart */
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_check(W);
    assert_int_equal(km_core_counts(W->core).blocks_cached, 13);
    assert_int_equal(km_core_counts(W->core).blocks_leased, 0);
    assert_int_equal(km_core_stats(W->core)->snapshots_adopted, 2);
    assert_int_equal(turn(4, 1, 0, words_a, 6 * CW_BT + 2).reused, 6);
    assert_int_equal(turn(5, 2, 1, words_b, 7 * CW_BT + 1).reused, 7);
    /* A hole: what lies behind it is dropped, the front has no state left. */
    W->blocks[a.blocks[2]].state = KM_FREE;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_check(W);
    assert_int_equal(turn(6, 1, 0, words_a, 6 * CW_BT + 2).reused, 0);
    assert_int_equal(turn(7, 2, 1, words_b, 7 * CW_BT + 1).reused, 7);
    /* A snapshot that says another length than its block. */
    for (uint32_t i = 0; i < W->slot_count; i++) {
        if (W->slots[i].state == KM_COMMITTED && cw_same(&W->slots[i].hash, &b.chain[6]))
            W->slots[i].token_count += CW_BT;
    }
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_check(W);
    assert_int_equal(turn(8, 2, 1, words_b, 7 * CW_BT + 1).reused, 0);
}

static uint32_t adopt(const struct run *r, uint32_t count, int wrong_block, int wrong_hash)
{
    uint8_t items[CHAIN_MAX * 20];
    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = r->blocks[i] + ((int)i == wrong_block);
        memcpy(items + 20 * i, &r->chain[i], 16);
        memcpy(items + 20 * i + 16, &block, 4);
        items[20 * i + 3] ^= (uint8_t)((int)i == wrong_hash);
    }
    struct msg m = {.type = MSG_KV_ADOPT, .epoch = W->options.epoch};
    m.u.kv_adopt = (struct msg_kv_adopt){"s1", count, items};
    cw_send(W, 0, &m);
    assert_int_equal(W->last.type, MSG_KV_ADOPT_REPLY);
    assert_int_equal(W->last.u.kv_adopt_reply.code, ERR_OK);
    return W->last.u.kv_adopt_reply.valid_count;
}

static void maps_are_believed_only_as_far_as_headers_agree(void **state)
{
    struct run r = turn(1, 1, 0, words_a, 6 * CW_BT);
    assert_int_equal(adopt(&r, 6, -1, -1), 6);
    assert_int_equal(adopt(&r, 6, 3, -1), 3);
    assert_int_equal(adopt(&r, 6, -1, 4), 4);
    assert_int_equal(adopt(&r, 0, -1, -1), 0);
    cw_start(W);
    cw_attach(W, 0, 100);
    assert_int_equal(adopt(&r, 6, -1, -1), 6);
    W->blocks[r.blocks[1]].state = KM_FREE;
    cw_start(W);
    cw_attach(W, 0, 100);
    assert_int_equal(adopt(&r, 6, -1, -1), 0);
    struct msg m = {.type = MSG_KV_ADOPT, .epoch = W->options.epoch - 1};
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_adopt_reply.code, ERR_EPOCH);
}

static void a_dead_worker_leaves_what_it_committed(void **state)
{
    struct run r = {.request = 1, .session = 1};
    run_chain(&r, words_a, 8 * CW_BT);
    assert_int_equal(run_open(&r), ERR_OK);
    r.full = 5; /* killed in the middle */
    run_commit(&r);
    assert_int_equal(run_snapshot(&r, 4), ERR_OK);
    cw_attach(W, 0, 101);
    assert_int_equal(km_core_counts(W->core).blocks_cached, 4);
    assert_int_equal(km_core_counts(W->core).blocks_leased, 0);
    cw_check(W);
    r.request = 1;
    run_chain(&r, words_a, 8 * CW_BT);
    assert_int_equal(run_open(&r), ERR_OK);
    assert_int_equal(r.reused, 4);
}

static enum err pin(const char *session, uint64_t seconds)
{
    char sid[33];
    struct err_detail detail = {{0}};
    enum err e = km_core_pin(W->core, session, "", seconds * CW_SECOND, sid, &detail);
    assert_true((e == ERR_OK) == (detail.text[0] == '\0'));
    return e;
}

/* Others ask for everything there is, one after the other. */
static void flood(uint32_t request)
{
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t words[CHAIN_MAX];
        for (uint32_t k = 0; k < CHAIN_MAX; k++)
            words[k] = 1000 * (request + i) + k;
        W->now_us += CW_SECOND;
        (void)turn(request + i, 100 + i, 0, words, 20 * CW_BT + 1);
    }
    cw_tick(W);
}

static void what_is_pinned_by_name_stays(void **state)
{
    W->options.pin_percent = 25; /* of 40 */
    cw_start(W);
    cw_attach(W, 0, 100);
    assert_int_equal(pin("s1", 3600), ERR_NOT_FOUND);
    (void)turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    flood(10);
    assert_int_equal(turn(2, 1, 0, words_a, 6 * CW_BT + 2).reused, 0); /* without a pin */
    assert_int_equal(pin("s1", 3600), ERR_OK);
    assert_int_equal(pin("s2", 3600), ERR_NOT_FOUND);
    assert_int_equal(km_core_pinned(W->core), 6);
    flood(20);
    assert_int_equal(turn(3, 1, 0, words_a, 6 * CW_BT + 2).reused, 6);
    struct run greedy = {.request = 100, .session = 300};
    uint32_t words[CHAIN_MAX];
    for (uint32_t i = 0; i < CHAIN_MAX; i++)
        words[i] = 60000 + i;
    run_chain(&greedy, words, 34 * CW_BT + 1); /* all there is but for one of its blocks */
    assert_int_equal(run_open(&greedy), ERR_KV_FULL);
    for (uint32_t i = 0; i < 9; i++) { /* more states than there are slots */
        words[0]++;
        W->now_us += CW_SECOND;
        (void)turn(110 + i, 400 + i, 0, words, 2 * CW_BT + 1);
    }
    assert_int_equal(turn(8, 1, 0, words_a, 6 * CW_BT + 2).reused, 6);
    flood(20);
    assert_int_equal(turn(9, 1, 0, words_a, 6 * CW_BT + 2).reused, 6);
    assert_int_equal(pin("s105", 3600), ERR_TOO_LARGE); /* 20 blocks */
    assert_int_equal(pin("s1", 0), ERR_OK);
    flood(30);
    assert_int_equal(turn(4, 1, 0, words_a, 6 * CW_BT + 2).reused, 0);
    /* It runs out. */
    assert_int_equal(pin("s1", 3600), ERR_OK);
    W->now_us += 3601ull * CW_SECOND;
    cw_tick(W);
    assert_int_equal(km_core_pinned(W->core), 0);
    cw_attach(W, 0, 100); /* an hour of silence */
    flood(40);
    assert_int_equal(turn(5, 1, 0, words_a, 6 * CW_BT + 2).reused, 0);
    /* It grows beyond what pins may keep: then it is the last to go. */
    assert_int_equal(pin("s1", 3600), ERR_OK);
    assert_int_equal(turn(6, 1, 0, words_a, 12 * CW_BT + 2).reused, 6);
    flood(50);
    assert_int_equal(turn(7, 1, 0, words_a, 12 * CW_BT + 2).reused, 12);
    (void)turn(60, 200, 0, words, 30 * CW_BT + 1); /* more than there is beside it */
    assert_true(turn(10, 1, 0, words_a, 12 * CW_BT + 2).reused < 12);
}

/* Blocks are all in use: the cheapest to compute again gives way, but not the one that did last. */
static uint64_t starve(const struct run *r)
{
    struct msg m = {.type = MSG_KV_EXTEND, .epoch = W->options.epoch};
    uint32_t before = W->reclaims;
    for (uint32_t i = 0; i < 4; i++) {
        m.u.kv_extend = (struct msg_kv_extend){r->lease, r->count, 1};
        cw_send(W, 0, &m);
        assert_int_equal(W->last.u.kv_extend_reply.code, ERR_KV_FULL);
        W->now_us += CW_SECOND / 2;
    }
    assert_int_equal(W->reclaims, before + 1);
    return W->reclaimed;
}

static void grow(struct run *r)
{
    struct msg m = {.type = MSG_KV_EXTEND, .epoch = W->options.epoch};
    m.u.kv_extend = (struct msg_kv_extend){r->lease, r->count, 1};
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_extend_reply.code, ERR_OK);
    r->count++;
}

static void the_cheapest_gives_way_but_never_twice_in_a_row(void **state)
{
    uint32_t words_c[CHAIN_MAX];
    for (uint32_t i = 0; i < CHAIN_MAX; i++)
        words_c[i] = 700 + i;
    struct run a = {.request = 1}, b = {.request = 2}, c = {.request = 3};
    run_chain(&a, words_a, 13 * CW_BT + 1);
    run_chain(&b, words_b, 12 * CW_BT + 1);
    run_chain(&c, words_c, 12 * CW_BT + 1);
    assert_int_equal(run_open(&a), ERR_OK);
    assert_int_equal(run_open(&b), ERR_OK);
    assert_int_equal(run_open(&c), ERR_OK);
    assert_int_equal(km_core_counts(W->core).blocks_free, 0);
    run_commit(&b);
    assert_int_equal(run_snapshot(&b, 12), ERR_OK); /* one block to compute again */
    run_commit(&c);
    assert_int_equal(run_snapshot(&c, 6), ERR_OK); /* seven */
    assert_true(starve(&a) == b.lease);
    run_release(&b, true);
    grow(&a);
    run_chain(&b, words_b, 11 * CW_BT + 1);
    assert_int_equal(run_open(&b), ERR_OK);
    run_commit(&b);
    assert_int_equal(run_snapshot(&b, 11), ERR_OK); /* the cheapest again */
    assert_int_equal(km_core_counts(W->core).blocks_free, 0);
    assert_true(starve(&a) == c.lease);
    run_release(&c, true);
    grow(&a);
    run_chain(&c, words_c, 11 * CW_BT + 1);
    assert_int_equal(run_open(&c), ERR_OK);
    assert_int_equal(km_core_counts(W->core).blocks_free, 0);
    assert_true(starve(&a) == b.lease); /* not in a row any more */
    cw_check(W);
}

static void someone_gives_way(void **state)
{
    struct run a = {.request = 1}, b = {.request = 2};
    run_chain(&a, words_a, 19 * CW_BT);
    run_chain(&b, words_b, 19 * CW_BT);
    assert_int_equal(run_open(&a), ERR_OK);
    assert_int_equal(run_open(&b), ERR_OK);
    run_commit(&b);
    assert_int_equal(run_snapshot(&b, 18), ERR_OK);
    struct msg m = {.type = MSG_KV_EXTEND, .epoch = W->options.epoch};
    for (uint32_t i = 0; i < 4; i++) {
        m.u.kv_extend = (struct msg_kv_extend){a.lease, a.count, 1};
        cw_send(W, 0, &m);
        assert_int_equal(W->last.u.kv_extend_reply.code, ERR_KV_FULL);
        W->now_us += CW_SECOND / 2;
    }
    assert_int_equal(W->reclaims, 1);
    assert_true(W->reclaimed == b.lease);
    run_release(&b, true);
    cw_send(W, 0, &m);
    assert_int_equal(W->last.u.kv_extend_reply.code, ERR_OK);
    cw_check(W);
}

/* --- the tier */

static void tier_setup(void)
{
    cw_fini(W);
    cw_init(W, 40, 8, 6);
    W->objects = calloc(CW_OBJECTS, sizeof(*W->objects));
    W->options.tier_bytes_max = 8192 * 200;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_tier_on(W);
}

/* Fills the arena with other things until nothing of the first is left in it. */
static void push_out(uint32_t seed)
{
    uint32_t words[CHAIN_MAX];
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t k = 0; k < CHAIN_MAX; k++)
            words[k] = 1000 * (seed + i) + k;
        struct run r = {.request = 5000 + seed + i};
        run_chain(&r, words, 36 * CW_BT);
        for (uint32_t tries = 0; run_open(&r) != ERR_OK; tries++) {
            assert_true(tries < 10);
            cw_store_all(W);
        }
        run_release(&r, false);
        W->now_us += CW_SECOND;
    }
    cw_check(W);
}

static void evicted_turns_come_back_from_the_tier(void **state)
{
    tier_setup();
    struct run first = turn(1, 1, 0, words_a, 9 * CW_BT + 5);
    push_out(1);
    assert_int_equal(cw_naive(W, first.chain, 9), 0);
    assert_true(km_core_stats(W->core)->evicted_written >= 9);
    assert_int_equal(km_core_stats(W->core)->evicted_dropped, 0);
    struct run again = {.request = 2, .session = 1};
    run_chain(&again, words_a, 9 * CW_BT + 5);
    uint32_t answers = W->answers;
    open_send(&again);
    assert_int_equal(W->answers, answers); /* later */
    open_send(&again);                     /* asked again meanwhile: still one answer */
    cw_store_run(W, 3);
    cw_check(W);
    cw_store_all(W);
    assert_int_equal(W->answers, answers + 1);
    assert_int_equal(open_take(&again), ERR_OK);
    assert_int_equal(again.reused, 9);
    run_release(&again, true);
    cw_check(W);
    assert_int_equal(turn(3, 1, 0, words_a, 9 * CW_BT + 1).reused, 9); /* resident again */
}

/* What leaves for the tier is told to its session's map, and an adopt of it finds it there. */
static void maps_hear_what_moved_to_the_tier(void **state)
{
    tier_setup();
    struct run a = turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    assert_int_equal(adopt(&a, 6, -1, -1), 6);
    W->moved_count = 0;
    push_out(1);
    uint32_t told = 0;
    assert_true(W->moved_count > 0 && W->moved_count <= 1000);
    char sid[33], hex[33];
    block_hash_session(&W->options.key, "s1", sid);
    for (uint32_t i = 0; i < 64 && i < W->moved_count; i++) {
        hex_encode(&W->moved[i].sid, 16, hex);
        if (strcmp(hex, sid) != 0)
            continue;
        assert_true(W->moved[i].position < 6);
        assert_true(cw_same(&W->moved[i].hash, &a.chain[W->moved[i].position]));
        told++;
    }
    assert_true(told > 0 || W->moved_count > 64);
    assert_int_equal(adopt(&a, 6, -1, -1), 6); /* by their hashes, wherever they are */
    assert_int_equal(adopt(&a, 6, -1, 4), 4);
    /* Without the tier nothing of it is valid. */
    cw_step(W, (struct km_event){.type = KM_EVENT_STORE_STATE});
    assert_int_equal(adopt(&a, 6, -1, -1), 0);
}

static void corrupt_objects_cost_a_recompute(void **state)
{
    tier_setup();
    struct run first = turn(1, 1, 0, words_a, 9 * CW_BT);
    push_out(1);
    cw_object(W, KM_OBJECT_BLOCK, &first.chain[5])->corrupt = true;
    struct run again = {.request = 2, .session = 1};
    run_chain(&again, words_a, 9 * CW_BT + 1);
    open_send(&again);
    cw_store_all(W);
    assert_int_equal(open_take(&again), ERR_OK);
    assert_int_equal(again.reused, 0);
    assert_int_equal(km_core_stats(W->core)->objects_corrupt, 1);
    run_commit(&again);
    assert_int_equal(run_snapshot(&again, 9), ERR_OK);
    run_release(&again, true);
    cw_check(W);
    assert_int_equal(turn(3, 1, 0, words_a, 9 * CW_BT + 1).reused, 9);
}

static void a_tier_that_fails_is_done_without(void **state)
{
    tier_setup();
    (void)turn(1, 1, 0, words_a, 9 * CW_BT);
    W->tier_fails = true;
    push_out(1);
    struct km_event off = {.type = KM_EVENT_STORE_STATE};
    cw_step(W, off);
    assert_false(km_core_cache(W->core).tier_on);
    push_out(11);
    assert_int_equal(turn(3, 1, 0, words_b, 9 * CW_BT + 1).reused, 0);
    assert_int_equal(turn(4, 1, 0, words_b, 9 * CW_BT + 1).reused, 9);
    assert_int_equal(W->queued, 0);
}

/* A tier that does not come along: the open is answered with what there is. */
static void slow_reads_are_not_waited_for(void **state)
{
    tier_setup();
    (void)turn(1, 1, 0, words_a, 9 * CW_BT);
    push_out(1);
    struct run again = {.request = 2, .session = 1};
    run_chain(&again, words_a, 9 * CW_BT + 1);
    open_send(&again);
    assert_int_equal(W->last.type, MSG_NONE);
    W->now_us += 5 * CW_SECOND;
    struct msg ping = {.type = MSG_KV_PING, .epoch = W->options.epoch};
    ping.u.kv_ping.incarnation = 100;
    cw_send(W, 0, &ping);
    cw_tick(W);
    assert_int_equal(open_take(&again), ERR_OK);
    assert_int_equal(again.reused, 0);
    cw_check(W);
    cw_store_all(W);
    cw_check(W);
    run_commit(&again);
    run_release(&again, true);
    cw_check(W);
}

static void the_tier_survives_a_reboot(void **state)
{
    tier_setup();
    (void)turn(1, 1, 0, words_a, 9 * CW_BT);
    tier_reboot();
    struct run again = {.request = 2, .session = 1};
    run_chain(&again, words_a, 9 * CW_BT + 1);
    open_send(&again);
    cw_store_all(W);
    assert_int_equal(open_take(&again), ERR_OK);
    assert_int_equal(again.reused, 9);
    cw_check(W);
}

/* Blocks that are being written on their way out stay when somebody commits the same tokens. */
static void a_commit_calls_a_leave_off(void **state)
{
    tier_setup();
    struct run a = {.request = 1}, b = {.request = 2}, big = {.request = 3};
    uint32_t words[CHAIN_MAX] = {1000};
    run_chain(&a, words_a, 9 * CW_BT);
    run_chain(&b, words_a, 9 * CW_BT);
    assert_int_equal(run_open(&a), ERR_OK);
    assert_int_equal(run_open(&b), ERR_OK);
    run_commit(&a);
    assert_int_equal(run_snapshot(&a, 9), ERR_OK);
    run_release(&a, true);
    run_chain(&big, words, 25 * CW_BT);
    assert_int_equal(run_open(&big), ERR_KV_FULL); /* 26 of 40, 10 leased, 9 cached */
    assert_true(W->queued > 0 && km_pool_leaving_count(km_core_pool(W->core)) > 0);
    run_commit(&b);
    cw_check(W);
    assert_int_equal(km_pool_leaving_count(km_core_pool(W->core)), 0);
    cw_store_all(W);
    cw_check(W);
    assert_int_equal(cw_naive(W, a.chain, 9), 9);
    run_release(&b, true);
    assert_int_equal(run_open(&big), ERR_OK);
}

static void the_tier_is_bounded(void **state)
{
    tier_setup();
    W->options.tier_bytes_max = 8192 * 20;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_tier_on(W);
    struct run chains[8];
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t words[CHAIN_MAX];
        for (uint32_t k = 0; k < CHAIN_MAX; k++)
            words[k] = 100 * (i + 1) + k;
        chains[i] = turn(1 + i, 0, 0, words, 5 * CW_BT);
        push_out(10 + 10 * i);
        cw_store_all(W);
        assert_true(km_core_cache(W->core).tier_bytes <= 8192 * 20);
        for (uint32_t c = 0; c <= i; c++) /* a chain loses its end first */
            for (uint32_t k = 1; k < 5; k++)
                assert_true(cw_object(W, KM_OBJECT_BLOCK, &chains[c].chain[k - 1])->used ||
                            !cw_object(W, KM_OBJECT_BLOCK, &chains[c].chain[k])->used);
    }
    uint32_t used = 0;
    for (uint32_t i = 0; i < CW_OBJECTS; i++)
        used += W->objects[i].used;
    assert_true(used > 10 && used <= 20);
    assert_true(km_core_stats(W->core)->objects_evicted > 0);
}

/* What is cached is more than the tier holds: the flush ends, with the last turns whole. */
static void a_flush_into_a_small_tier_ends(void **state)
{
    tier_setup();
    W->options.tier_bytes_max = 8192 * 13;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_tier_on(W);
    struct run chains[5];
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t words[CHAIN_MAX];
        for (uint32_t k = 0; k < CHAIN_MAX; k++)
            words[k] = 100 * (i + 1) + k;
        chains[i] = turn(1 + i, 0, 0, words, 5 * CW_BT);
        W->now_us += CW_SECOND;
    }
    struct km_event flush = {.type = KM_EVENT_FLUSH, .u.flush_begins = true};
    uint32_t asked;
    do {
        cw_step(W, flush);
        flush.u.flush_begins = false;
        asked = W->queued;
        cw_store_all(W);
        assert_true(km_core_stats(W->core)->writes <= 13);
    } while (asked > 0);
    assert_int_equal(km_core_stats(W->core)->objects_evicted, 0);
    for (uint32_t i = 3; i < 5; i++) { /* six objects each */
        for (uint32_t k = 0; k < 5; k++)
            assert_true(cw_object(W, KM_OBJECT_BLOCK, &chains[i].chain[k])->used);
        assert_true(cw_object(W, KM_OBJECT_SNAPSHOT, &chains[i].chain[4])->used);
    }
    W->options.tier_bytes_max = 8192; /* not even one block and its snapshot */
    cw_start(W);
    cw_attach(W, 0, 101);
    cw_tier_on(W);
    cw_store_all(W);
    flush.u.flush_begins = true;
    cw_step(W, flush);
    assert_int_equal(W->queued, 0);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_second_turn_reuses_the_first),
        CASE(boundaries_by_one),
        CASE(blocks_without_a_state_are_no_hit),
        CASE(tenants_share_nothing),
        CASE(nobody_gets_what_is_in_use),
        CASE(the_order_of_eviction),
        CASE(spent_turns_go_first),
        CASE(a_session_keeps_its_share),
        CASE(the_nameless_have_no_share),
        CASE(snapshots_have_a_budget),
        CASE(snapshots_against_the_rules),
        CASE(a_restore_is_safe),
        CASE(a_restart_keeps_the_cache),
        CASE(maps_are_believed_only_as_far_as_headers_agree),
        CASE(a_dead_worker_leaves_what_it_committed),
        CASE(what_is_pinned_by_name_stays),
        CASE(the_cheapest_gives_way_but_never_twice_in_a_row),
        CASE(someone_gives_way),
        CASE(evicted_turns_come_back_from_the_tier),
        CASE(maps_hear_what_moved_to_the_tier),
        CASE(corrupt_objects_cost_a_recompute),
        CASE(a_tier_that_fails_is_done_without),
        CASE(slow_reads_are_not_waited_for),
        CASE(the_tier_survives_a_reboot),
        CASE(a_commit_calls_a_leave_off),
        CASE(the_tier_is_bounded),
        CASE(a_flush_into_a_small_tier_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
