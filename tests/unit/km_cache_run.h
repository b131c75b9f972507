/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/km_cache_run.h - requests as a worker makes them, against the world of kvmgr's cache.
 *
 * Each test program has its own world. */
#ifndef TESTS_UNIT_KM_CACHE_RUN_H
#define TESTS_UNIT_KM_CACHE_RUN_H

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

static inline uint32_t blocks_for(uint32_t tokens)
{
    return (tokens + CW_BT - 1) / CW_BT;
}

/* The chain's hashes from its contents: word i is what block i says. */
static inline void run_chain(struct run *r, const uint32_t *words, uint32_t tokens)
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

static inline void open_send(struct run *r)
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
    /* Again when more was read, which ends. */
    for (uint32_t proved = UINT32_MAX, i = 0; W->proved != proved; i++) {
        assert_true(i < CW_BLOCKS);
        proved = W->proved;
        W->last = (struct msg){0};
        cw_send(W, r->peer, &m);
        if (W->last.type != MSG_KV_OPEN_REPLY || W->last.u.kv_open_reply.code != ERR_LOADING)
            break;
    }
}

/* Takes the answer: every shared block and the snapshot hold what the chain says. */
static inline enum err open_take(struct run *r)
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

static inline enum err run_open(struct run *r)
{
    open_send(r);
    return open_take(r);
}

static inline void run_commit(struct run *r)
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
static inline enum err run_snapshot(struct run *r, uint32_t boundary)
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

static inline void run_release(struct run *r, bool keep)
{
    struct msg m = {.type = MSG_KV_RELEASE, .epoch = W->options.epoch};
    m.u.kv_release = (struct msg_kv_release){r->lease, r->tokens, keep};
    cw_send(W, r->peer, &m);
    r->live = false;
}

/* A whole turn: opened, computed, committed, its state kept at the last boundary, released. */
static inline struct run turn(uint32_t request, uint32_t session, uint32_t salt,
                              const uint32_t *words, uint32_t tokens)
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

static inline int setup(void **state)
{
    (void)state;
    W = calloc(1, sizeof(*W));
    cw_init(W, 40, 8, 6);
    cw_attach(W, 0, 100);
    return 0;
}

static inline int teardown(void **state)
{
    (void)state;
    cw_fini(W);
    free(W);
    return 0;
}

/* Writes all that is cached to the tier; then the machine starts again with an empty arena. */
static inline void tier_reboot(void)
{
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
}

#endif
