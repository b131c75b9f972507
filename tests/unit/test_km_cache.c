/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>

#include "tests/unit/km_cache_world.h"

#define CHAIN_MAX 40u

/* A request as a worker sees it. */
struct run {
    bool live;
    uint32_t peer, request, salt, session;
    uint32_t tokens; /* length of its prompt, then of all it has */
    uint32_t full;   /* blocks of chain[] that it has hashes of */
    struct hash128 chain[CHAIN_MAX];
    uint64_t lease;
    uint32_t blocks[CW_BLOCKS], count, committed, reused;
};

static struct cw_world *W;

static uint32_t blocks_for(uint32_t tokens)
{
    return (tokens + CW_BT - 1) / CW_BT;
}

/* The chain's hashes from its contents: word i is what block i says. */
static void run_chain(struct run *r, const uint32_t *words, uint32_t tokens)
{
    struct hash128 parent = {{0}};
    r->tokens = tokens;
    r->full = tokens / CW_BT;
    assert_true(r->full <= CHAIN_MAX);
    for (uint32_t i = 0; i < r->full; i++) {
        r->chain[i] = cw_hash(&parent, words[i], r->salt);
        parent = r->chain[i];
    }
}

static void open_send(struct run *r)
{
    char key[16] = "", salt[16] = "";
    if (r->session)
        snprintf(key, sizeof(key), "s%u", r->session);
    if (r->salt)
        snprintf(salt, sizeof(salt), "t%u", r->salt);
    struct msg m = {.type = MSG_KV_OPEN, .epoch = W->options.epoch, .id = cw_id(r->request)};
    m.u.kv_open = (struct msg_kv_open){.session_key = key,
                                       .cache_salt = salt,
                                       .prompt_count = r->tokens,
                                       .blocks_wanted = blocks_for(r->tokens + 1),
                                       .hash_count = r->full,
                                       .hashes = r->chain,
                                       .reuse_max = r->tokens > 0 ? r->tokens - 1 : 0};
    W->last = (struct msg){0};
    cw_send(W, r->peer, &m);
}

/* Takes the answer: every shared block and the snapshot hold what the chain says. */
static enum err open_take(struct run *r)
{
    const struct msg_kv_open_reply *reply = &W->last.u.kv_open_reply;
    assert_int_equal(W->last.type, MSG_KV_OPEN_REPLY);
    if (reply->code != ERR_OK)
        return (enum err)reply->code;
    r->live = true;
    r->lease = reply->lease;
    r->count = reply->block_count;
    memcpy(r->blocks, W->blocks_last, r->count * sizeof(uint32_t));
    assert_int_equal(reply->reusable_tokens % CW_BT, 0);
    assert_true(reply->reusable_tokens < r->tokens || r->tokens == 0);
    r->reused = r->committed = reply->reusable_tokens / CW_BT;
    assert_int_equal(reply->snapshot_slot == UINT32_MAX, r->reused == 0);
    for (uint32_t i = 0; i < r->reused; i++)
        assert_true(cw_same(&W->block_data[r->blocks[i]], &r->chain[i]));
    if (r->reused > 0)
        assert_true(cw_same(&W->slot_data[reply->snapshot_slot], &r->chain[r->reused - 1]));
    for (uint32_t i = 0; i < r->count; i++)
        assert_int_equal(W->blocks[r->blocks[i]].state, i < r->reused ? KM_COMMITTED : KM_WRITING);
    /* What it computes: the full blocks of its prompt, and something in the last one. */
    for (uint32_t i = r->reused; i < r->count; i++)
        W->block_data[r->blocks[i]] = i < r->full ? r->chain[i] : (struct hash128){{0xee}};
    return ERR_OK;
}

static enum err run_open(struct run *r)
{
    open_send(r);
    return open_take(r);
}

static void run_commit(struct run *r)
{
    if (r->full <= r->committed)
        return;
    struct msg m = {.type = MSG_KV_COMMIT, .epoch = W->options.epoch};
    m.u.kv_commit = (struct msg_kv_commit){r->lease, r->committed, r->tokens,
                                           r->full - r->committed, r->chain + r->committed};
    cw_send(W, r->peer, &m);
    r->committed = r->full;
}

/* Copies the state at a boundary into a granted slot and tells. */
static enum err run_snapshot(struct run *r, uint32_t boundary)
{
    if (W->granted_count == 0)
        return ERR_BUSY;
    uint32_t slot = W->granted[0];
    W->slot_data[slot] = r->chain[boundary - 1];
    struct msg m = {.type = MSG_KV_SNAPSHOT, .epoch = W->options.epoch};
    m.u.kv_snapshot =
        (struct msg_kv_snapshot){r->lease, boundary * CW_BT, r->chain[boundary - 1], slot};
    cw_send(W, r->peer, &m);
    assert_int_equal(W->last.type, MSG_KV_SNAPSHOT_REPLY);
    assert_int_equal(W->last.u.kv_snapshot_reply.slot, slot);
    return (enum err)W->last.u.kv_snapshot_reply.code;
}

static void run_release(struct run *r, bool keep)
{
    struct msg m = {.type = MSG_KV_RELEASE, .epoch = W->options.epoch};
    m.u.kv_release = (struct msg_kv_release){r->lease, r->tokens, keep};
    cw_send(W, r->peer, &m);
    r->live = false;
}

/* A whole turn: opened, computed, committed, its state kept at the last boundary, released. */
static struct run turn(uint32_t request, uint32_t session, uint32_t salt, const uint32_t *words,
                       uint32_t tokens)
{
    struct run r = {.request = request, .session = session, .salt = salt};
    run_chain(&r, words, tokens);
    assert_int_equal(run_open(&r), ERR_OK);
    run_commit(&r);
    if (r.full > r.reused)
        assert_int_equal(run_snapshot(&r, r.full), ERR_OK);
    run_release(&r, true);
    cw_check(W);
    return r;
}

static const uint32_t words_a[CHAIN_MAX] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint32_t words_b[CHAIN_MAX] = {1, 2, 3, 99, 98, 97, 96, 95, 94, 93, 92, 91};

static int setup(void **state)
{
    W = calloc(1, sizeof(*W));
    cw_init(W, 40, 8, 6);
    cw_attach(W, 0, 100);
    return 0;
}

static int teardown(void **state)
{
    cw_fini(W);
    free(W);
    return 0;
}

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
    while (km_core_unwritten(W->core) > 0) {
        cw_step(W, (struct km_event){.type = KM_EVENT_FLUSH, .u.flush_begins = true});
        cw_store_all(W);
    }
    memset(W->blocks, 0, sizeof(W->blocks));
    memset(W->slots, 0, sizeof(W->slots));
    memset(W->block_data, 0, sizeof(W->block_data));
    memset(W->slot_data, 0, sizeof(W->slot_data));
    cw_start(W);
    cw_attach(W, 0, 102);
    cw_tier_on(W);
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

/* --- random lives */

#define SIM_RUNS 6u

struct sim {
    struct rng rng;
    struct run runs[SIM_RUNS];
    uint32_t words[4][CHAIN_MAX]; /* conversations; they begin alike */
    uint32_t requests, incarnation;
    bool tier;
};

static void sim_words(struct sim *s)
{
    for (uint32_t c = 0; c < 4; c++) {
        uint32_t common = rng_below(&s->rng, 12);
        for (uint32_t i = 0; i < CHAIN_MAX; i++)
            s->words[c][i] = i < common ? i : rng_u32(&s->rng);
    }
}

static void sim_drop_all(struct sim *s)
{
    for (uint32_t i = 0; i < SIM_RUNS; i++)
        s->runs[i].live = false;
}

/* Blocks in use are never touched by others, shared or not. */
static void sim_look(struct sim *s)
{
    for (uint32_t i = 0; i < SIM_RUNS; i++) {
        const struct run *r = &s->runs[i];
        for (uint32_t k = 0; r->live && k < r->count; k++) {
            assert_int_not_equal(W->blocks[r->blocks[k]].state, KM_FREE);
            if (k < r->full)
                assert_true(cw_same(&W->block_data[r->blocks[k]], &r->chain[k]));
        }
    }
    /* Whatever is committed holds what its hash says: so no copy is ever wrong. */
    for (uint32_t b = 0; b < W->block_count; b++)
        assert_true(W->blocks[b].state != KM_COMMITTED ||
                    cw_same(&W->blocks[b].hash, &W->block_data[b]));
    for (uint32_t i = W->live_slots; i < W->slot_count; i++)
        assert_true(W->slots[i].state != KM_COMMITTED ||
                    cw_same(&W->slots[i].hash, &W->slot_data[i]));
}

static void sim_open(struct sim *s, struct run *r)
{
    uint32_t c = rng_below(&s->rng, 4);
    if (rng_below(&s->rng, 6) == 0) /* an edit */
        s->words[c][rng_below(&s->rng, CHAIN_MAX)] = rng_u32(&s->rng);
    *r = (struct run){.request = ++s->requests,
                      .session = rng_below(&s->rng, 4),
                      .salt = rng_below(&s->rng, 8) == 0};
    run_chain(r, s->words[c], 1 + rng_below(&s->rng, 14 * CW_BT));
    uint32_t usable = (r->tokens - 1) / CW_BT;
    uint32_t naive = cw_naive(W, r->chain, usable < r->full ? usable : r->full);
    open_send(r);
    for (uint32_t i = 0; W->last.type == MSG_NONE; i++) { /* its blocks come from the tier */
        assert_true(s->tier && i < 100);
        cw_store_run(W, 1 + rng_below(&s->rng, 4));
    }
    if (open_take(r) == ERR_OK && s->tier)
        assert_true(r->reused >= naive || W->tier_fails);
    else if (r->live)
        assert_int_equal(r->reused, naive);
}

static void sim_use(struct sim *s, struct run *r)
{
    uint32_t full = r->full, kind = rng_below(&s->rng, 10);
    if (kind < 4) { /* some of its blocks */
        r->full = r->committed + rng_below(&s->rng, full - r->committed + 1);
        run_commit(r);
        r->full = full;
    } else if (kind < 7) {
        if (r->committed > 0)
            (void)run_snapshot(r, 1 + rng_below(&s->rng, r->committed));
    } else if (kind < 9) {
        run_release(r, rng_below(&s->rng, 3) > 0);
    } else if (r->count + 2 < CW_BLOCKS) {
        struct msg m = {.type = MSG_KV_EXTEND, .epoch = W->options.epoch};
        m.u.kv_extend = (struct msg_kv_extend){r->lease, r->count, 1 + rng_below(&s->rng, 2)};
        cw_send(W, 0, &m);
        const struct msg_kv_extend_reply *reply = &W->last.u.kv_extend_reply;
        for (uint32_t i = 0; reply->code == ERR_OK && i < reply->block_count; i++) {
            r->blocks[r->count] = W->blocks_last[i];
            W->block_data[r->blocks[r->count++]] = (struct hash128){{0xdd}};
        }
    }
}

static void sim_ping(struct sim *s)
{
    uint64_t leases[SIM_RUNS];
    struct msg m = {.type = MSG_KV_PING, .epoch = W->options.epoch};
    for (uint32_t i = 0; i < SIM_RUNS; i++)
        if (s->runs[i].live)
            leases[m.u.kv_ping.lease_count++] = s->runs[i].lease;
    m.u.kv_ping.incarnation = s->incarnation;
    m.u.kv_ping.leases = leases;
    cw_send(W, 0, &m);
}

/* kvmgr is killed: some of what was being written is torn; headers may be damaged. */
static void sim_restart(struct sim *s)
{
    if (rng_below(&s->rng, 2) == 0)
        W->blocks[rng_below(&s->rng, W->block_count)].state = KM_FREE;
    if (rng_below(&s->rng, 4) == 0)
        W->slots[rng_below(&s->rng, W->slot_count)].state = KM_FREE;
    cw_start(W);
    cw_attach(W, 0, s->incarnation);
    if (s->tier)
        cw_tier_on(W);
    sim_drop_all(s);
}

static void sim_step(struct sim *s)
{
    struct run *r = &s->runs[rng_below(&s->rng, SIM_RUNS)];
    uint32_t kind = rng_below(&s->rng, 200);
    W->now_us += rng_below(&s->rng, 50000);
    if (kind == 0) {
        sim_restart(s);
    } else if (kind == 1) { /* the worker is killed */
        cw_attach(W, 0, ++s->incarnation);
        sim_drop_all(s);
    } else if (kind < 12) {
        sim_ping(s);
        cw_tick(W);
    } else if (kind < 30 && s->tier) {
        W->tier_fails = rng_below(&s->rng, 20) == 0;
        cw_store_run(W, 1 + rng_below(&s->rng, 40));
        W->tier_fails = false;
    } else if (kind < 32 && s->tier) {
        struct cw_object *o = &W->objects[rng_below(&s->rng, 64)];
        o->corrupt = true;
        cw_step(W, (struct km_event){.type = KM_EVENT_FLUSH, .u.flush_begins = true});
    } else if (!r->live) {
        sim_open(s, r);
    } else {
        sim_use(s, r);
    }
}

static struct km_core_stats sum;

static void sim_run(uint64_t seed, bool tier, uint32_t steps)
{
    struct sim s = {.incarnation = 100, .tier = tier};
    rng_init(&s.rng, seed);
    cw_fini(W);
    cw_init(W, 24 + rng_below(&s.rng, 40), 1 + rng_below(&s.rng, 12), SIM_RUNS);
    W->options.pin_us = rng_below(&s.rng, 2) * CW_SECOND;
    W->options.session_percent = 20 + rng_below(&s.rng, 81);
    W->options.sessions_max = 3 + rng_below(&s.rng, 8);
    if (tier) {
        W->objects = calloc(CW_OBJECTS, sizeof(*W->objects));
        W->options.tier_bytes_max = 8192 * (30 + rng_below(&s.rng, 200));
    }
    cw_start(W);
    cw_attach(W, 0, s.incarnation);
    if (tier)
        cw_tier_on(W);
    sim_words(&s);
    for (uint32_t i = 0; i < steps; i++) {
        sim_step(&s);
        sim_look(&s);
        cw_check(W);
    }
    for (uint32_t i = 0; i < SIM_RUNS; i++)
        if (s.runs[i].live)
            run_release(&s.runs[i], true);
    cw_store_all(W);
    cw_check(W);
    struct km_pool_counts c = km_core_counts(W->core);
    assert_int_equal(c.blocks_leased, 0);
    assert_int_equal(c.slots_free, c.slots_total);
    const struct km_core_stats *st = km_core_stats(W->core); /* of the last start */
    sum.hits += st->hits + st->hits_part;
    sum.hits_loaded += st->hits_loaded;
    sum.duplicates += st->duplicates;
    sum.snapshots_dropped += st->snapshots_dropped;
    sum.evicted_dropped += st->evicted_dropped;
    sum.evicted_written += st->evicted_written;
    sum.loads_failed += st->loads_failed;
    sum.blocks_adopted += st->blocks_adopted;
    sum.opens_full += st->opens_full;
}

/* The lives are worth something only if they come by everything. */
static void sim_sum_check(bool tier)
{
    print_message("hits %" PRIu64 ", from the tier %" PRIu64 ", evicted %" PRIu64 " + %" PRIu64
                  " written, loads failed %" PRIu64 "\n",
                  sum.hits, sum.hits_loaded, sum.evicted_dropped, sum.evicted_written,
                  sum.loads_failed);
    assert_true(sum.hits > 1000 && sum.duplicates > 1000 && sum.opens_full > 1000);
    assert_true(sum.snapshots_dropped > 100 && sum.evicted_dropped > 100);
    assert_true(sum.blocks_adopted > 100);
    if (tier)
        assert_true(sum.hits_loaded > 100 && sum.evicted_written > 100 && sum.loads_failed > 3);
    sum = (struct km_core_stats){0};
}

static uint32_t sim_rounds(void)
{
    return getenv("TANDEM_LONG") ? 20000 : 1000;
}

static void random_lives_match_the_naive_model(void **state)
{
    for (uint32_t i = 0; i < sim_rounds(); i++)
        sim_run(0x6b630000 + i, false, 150);
    sim_sum_check(false);
}

static void random_lives_with_a_tier(void **state)
{
    for (uint32_t i = 0; i < sim_rounds(); i++)
        sim_run(0x6b640000 + i, true, 150);
    sim_sum_check(true);
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
        CASE(someone_gives_way),
        CASE(evicted_turns_come_back_from_the_tier),
        CASE(corrupt_objects_cost_a_recompute),
        CASE(a_tier_that_fails_is_done_without),
        CASE(slow_reads_are_not_waited_for),
        CASE(the_tier_survives_a_reboot),
        CASE(a_commit_calls_a_leave_off),
        CASE(the_tier_is_bounded),
        CASE(a_flush_into_a_small_tier_ends),
        CASE(random_lives_match_the_naive_model),
        CASE(random_lives_with_a_tier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
