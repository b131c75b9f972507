/* SPDX-License-Identifier: Apache-2.0 */
/* Random lives of kvmgr's cache against a naive model. */
#include "tests/unit/km_cache_run.h"

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
        W->options.tier_objects_max = CW_OBJECTS;
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
        CASE(random_lives_match_the_naive_model),
        CASE(random_lives_with_a_tier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
