/* SPDX-License-Identifier: Apache-2.0 */
/* What an earlier process committed is read before it is lent, and damage is never lent. */
#include "tests/unit/km_cache_run.h"

/* Restarts kvmgr and holds back what its reading thread says. */
static void restart_held(void)
{
    W->proofs_held = true;
    cw_start(W);
    cw_attach(W, 0, 100);
}

static void nothing_adopted_is_lent_before_it_was_read(void **state)
{
    (void)turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    restart_held();
    assert_int_equal(km_core_unproven(W->core), 6);
    struct run r = {.request = 4, .session = 1}, other = {.request = 5};
    run_chain(&r, words_a, 6 * CW_BT + 2);
    assert_int_equal(run_open(&r), ERR_LOADING);
    assert_int_equal(W->proof_count, 7); /* six blocks, one state; asked for once */
    assert_int_equal(run_open(&r), ERR_LOADING);
    assert_int_equal(W->proof_count, 7);
    assert_int_equal(km_core_leases(W->core), 0);
    run_chain(&other, words_b + 3, 2 * CW_BT); /* who needs nothing of it does not wait */
    assert_int_equal(run_open(&other), ERR_OK);
    uint32_t pressures = W->pressures;
    cw_prove(W);
    assert_int_equal(W->pressures, pressures + 1); /* told to try again */
    assert_int_equal(km_core_unproven(W->core), 0);
    assert_int_equal(run_open(&r), ERR_OK);
    assert_int_equal(r.reused, 6);
    cw_check(W);
}

static void one_that_wants_no_reuse_builds_on_nothing_unread(void **state)
{
    (void)turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    restart_held();
    struct run r = {.request = 4};
    run_chain(&r, words_a, 8 * CW_BT);
    r.full = 0; /* names no hash, then commits the same chain */
    assert_int_equal(run_open(&r), ERR_OK);
    r.full = 8;
    run_commit(&r);
    assert_int_equal(km_core_stats(W->core)->duplicates, 0);
    run_release(&r, true);
    cw_prove(W);
    cw_check(W);
    assert_int_equal(km_core_counts(W->core).blocks_cached, 6);
}

static void damaged_blocks_are_dropped_and_nothing_else(void **state)
{
    struct run a = turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    (void)turn(2, 2, 0, words_b, 7 * CW_BT + 2); /* has the first three in common */
    W->block_data[a.blocks[4]].bytes[0] ^= 1;
    cw_start(W);
    cw_attach(W, 0, 100);
    struct run r = turn(3, 1, 0, words_a, 6 * CW_BT + 2);
    assert_int_equal(r.reused, 0); /* its only state stood on the damaged block */
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
    struct run b = turn(4, 2, 0, words_b, 7 * CW_BT + 2);
    assert_int_equal(b.reused, 7);
    assert_int_equal(turn(5, 1, 0, words_a, 6 * CW_BT + 2).reused, 6); /* computed anew */
    /* A front that both stand on. */
    W->block_data[b.blocks[1]].bytes[0] ^= 1;
    cw_start(W);
    cw_attach(W, 0, 100);
    assert_int_equal(turn(6, 2, 0, words_b, 7 * CW_BT + 2).reused, 0);
    assert_int_equal(turn(7, 1, 0, words_a, 6 * CW_BT + 2).reused, 0);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
}

static void a_damaged_snapshot_is_dropped_alone(void **state)
{
    (void)turn(1, 1, 0, words_a, 4 * CW_BT + 2);
    struct run r = turn(2, 1, 0, words_a, 8 * CW_BT + 2);
    assert_int_equal(r.reused, 4);
    for (uint32_t i = W->live_slots; i < W->slot_count; i++)
        if (W->slots[i].state == KM_COMMITTED && cw_same(&W->slots[i].hash, &r.chain[7]))
            W->slot_data[i].bytes[9] ^= 1;
    cw_start(W);
    cw_attach(W, 0, 100);
    assert_int_equal(turn(3, 1, 0, words_a, 8 * CW_BT + 2).reused, 4);
    assert_int_equal(km_core_stats(W->core)->snapshots_damaged, 1);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 0);
}

/* Unasked, everything is read in time; what is damaged goes. */
static void the_background_reads_all(void **state)
{
    struct run a = turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    (void)turn(2, 2, 1, words_b, 7 * CW_BT);
    W->block_data[a.blocks[5]].bytes[15] ^= 0x80;
    cw_start(W);
    cw_attach(W, 0, 100);
    assert_int_equal(km_core_unproven(W->core), 13);
    for (uint32_t i = 0; i < 3; i++)
        cw_tick(W);
    assert_int_equal(km_core_unproven(W->core), 0);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
    cw_check(W);
    uint32_t proved = W->proved;
    for (uint32_t i = 0; i < 3; i++)
        cw_tick(W);
    assert_int_equal(W->proved, proved); /* once */
    /* Somebody wrote where he must not: read again, and found. */
    struct run b = turn(3, 2, 1, words_b, 7 * CW_BT + 1);
    assert_int_equal(b.reused, 7);
    W->block_data[b.blocks[6]].bytes[1] ^= 1;
    cw_step(W, (struct km_event){.type = KM_EVENT_SUSPECT, .u.suspect = b.blocks[6]});
    assert_int_equal(turn(4, 2, 1, words_b, 7 * CW_BT + 1).reused, 0);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 2);
}

/* What is damaged stays while it is in use; nobody waits for that. */
static void damage_in_use_is_a_miss(void **state)
{
    (void)turn(1, 1, 0, words_a, 3 * CW_BT + 2);
    (void)turn(2, 1, 0, words_a, 6 * CW_BT + 2);
    struct run user = {.request = 3, .session = 1}, other = {.request = 4, .session = 2};
    run_chain(&user, words_a, 6 * CW_BT + 2);
    run_chain(&other, words_a, 6 * CW_BT + 2);
    assert_int_equal(run_open(&user), ERR_OK);
    assert_int_equal(user.reused, 6);
    W->block_data[user.blocks[4]].bytes[0] ^= 1;
    cw_step(W, (struct km_event){.type = KM_EVENT_SUSPECT, .u.suspect = user.blocks[4]});
    assert_int_equal(run_open(&other), ERR_OK);
    assert_int_equal(other.reused, 3);
    assert_int_equal(W->proved, 1); /* and it is not read again for each open */
    run_commit(&other);
    cw_check(W);
    run_release(&user, true);
    run_release(&other, true);
    cw_tick(W); /* found again, and unused */
    cw_check(W);
    assert_int_equal(turn(5, 1, 0, words_a, 6 * CW_BT + 2).reused, 3);
    assert_int_equal(turn(6, 1, 0, words_a, 6 * CW_BT + 2).reused, 6);
}

static void damage_does_not_reach_the_tier(void **state)
{
    W->objects = calloc(CW_OBJECTS, sizeof(*W->objects));
    W->options.tier_bytes_max = 8192 * 100;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_tier_on(W);
    struct run a = turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    W->block_data[a.blocks[2]].bytes[0] ^= 1; /* unnoticed until it is written */
    cw_step(W, (struct km_event){.type = KM_EVENT_FLUSH, .u.flush_begins = true});
    cw_store_all(W);
    for (uint32_t i = 0; i < CW_OBJECTS; i++)
        assert_false(W->objects[i].used && cw_same(&W->objects[i].object.hash, &a.chain[2]));
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
    cw_check(W);
    struct run r = {.request = 2, .session = 1};
    run_chain(&r, words_a, 6 * CW_BT + 2);
    open_send(&r);
    cw_store_all(W);
    assert_int_equal(open_take(&r), ERR_OK); /* checks what it is given */
    assert_int_equal(r.reused, 0);
    cw_check(W);
}

/* Its own sum is right, but the rows it was computed from were not. */
static void what_stands_on_damage_does_not_either(void **state)
{
    W->objects = calloc(CW_OBJECTS, sizeof(*W->objects));
    W->options.tier_bytes_max = 8192 * 100;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_tier_on(W);
    (void)turn(1, 1, 0, words_a, 3 * CW_BT + 2);
    (void)turn(2, 1, 0, words_a, 6 * CW_BT + 2);
    struct run user = {.request = 3, .session = 1}, other = {.request = 4, .session = 2};
    run_chain(&user, words_a, 8 * CW_BT + 2);
    run_chain(&other, words_a, 6 * CW_BT + 2);
    assert_int_equal(run_open(&user), ERR_OK);
    assert_int_equal(user.reused, 6);
    W->block_data[user.blocks[4]].bytes[0] ^= 1;
    cw_step(W, (struct km_event){.type = KM_EVENT_SUSPECT, .u.suspect = user.blocks[4]});
    assert_int_equal(run_open(&other), ERR_OK);
    assert_int_equal(other.reused, 3);
    run_commit(&user); /* goes on with what it has read */
    assert_int_equal(run_snapshot(&user, 8), ERR_INVALID);
    cw_step(W, (struct km_event){.type = KM_EVENT_FLUSH, .u.flush_begins = true});
    cw_store_all(W);
    uint32_t found = 0;
    for (uint32_t i = 0; i < CW_OBJECTS; i++) {
        for (uint32_t b = 4; W->objects[i].used && b < 8; b++)
            assert_false(cw_same(&W->objects[i].object.hash, &user.chain[b]));
        found += W->objects[i].used && cw_same(&W->objects[i].object.hash, &user.chain[3]);
    }
    assert_true(found > 0); /* what it stands on is good */
    run_release(&user, false);
    run_release(&other, false);
    cw_check(W);
}

/* More than one guard was overwritten at once: only the last is known by name. */
static void everything_is_suspect(void **state)
{
    struct run a = turn(1, 1, 0, words_a, 4 * CW_BT + 2);
    struct run b = turn(2, 2, 1, words_b, 4 * CW_BT + 2);
    W->block_data[a.blocks[1]].bytes[0] ^= 1;
    W->block_data[b.blocks[2]].bytes[0] ^= 1;
    cw_step(W, (struct km_event){.type = KM_EVENT_SUSPECT, .u.suspect = KM_NONE});
    for (uint32_t i = 0; i < 4; i++)
        cw_tick(W);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 2);
    assert_int_equal(km_core_unproven(W->core), 0);
    assert_int_equal(turn(3, 1, 0, words_a, 4 * CW_BT + 2).reused, 0);
    cw_check(W);
}

/* Answers what was asked for with what was there when it was read: all was good. */
static void proofs_were_good(void)
{
    struct km_event event = {.type = KM_EVENT_PROVED};
    static struct km_proof results[KM_PROOFS_MAX];
    assert_true(W->proof_count > 0);
    for (uint32_t i = 0; i < W->proof_count; i++)
        results[i] = W->proofs[i];
    event.u.proved.count = W->proof_count;
    event.u.proved.results = results;
    W->proof_count = 0;
    cw_step(W, event);
}

static void suspect(uint32_t block)
{
    cw_step(W, (struct km_event){.type = KM_EVENT_SUSPECT, .u.suspect = block});
}

/* What was read before somebody wrote there says nothing of what is there now. */
static void a_proof_begun_before_a_doubt_clears_nothing(void **state)
{
    struct run a = turn(1, 1, 0, words_a, 4 * CW_BT + 2);
    W->proofs_held = true;
    suspect(a.blocks[2]);
    cw_tick(W);
    assert_int_equal(W->proof_count, 1);
    W->block_data[a.blocks[2]].bytes[0] ^= 1; /* behind the reader */
    suspect(a.blocks[2]);
    proofs_were_good();
    assert_int_equal(km_core_unproven(W->core), 1);
    assert_int_equal(W->proof_count, 1); /* asked for anew at once */
    W->proofs_held = false;
    assert_int_equal(turn(2, 1, 0, words_a, 4 * CW_BT + 2).reused, 0);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
    assert_int_equal(km_core_unproven(W->core), 0);
    cw_check(W);
    /* An answer to what was asked after the doubt does clear it. */
    struct run b = turn(3, 2, 1, words_b, 4 * CW_BT + 2);
    W->proofs_held = true;
    suspect(b.blocks[1]);
    cw_tick(W);
    suspect(b.blocks[1]);
    proofs_were_good();
    proofs_were_good();
    assert_int_equal(km_core_unproven(W->core), 0);
    W->proofs_held = false;
    assert_int_equal(turn(4, 2, 1, words_b, 4 * CW_BT + 2).reused, 4);
}

static void nor_that_of_a_snapshot(void **state)
{
    (void)turn(1, 1, 0, words_a, 4 * CW_BT + 2);
    W->proofs_held = true;
    suspect(KM_NONE);
    for (uint32_t i = 0; i < 3; i++)
        cw_tick(W);
    assert_int_equal(W->proof_count, 5);
    for (uint32_t i = W->live_slots; i < W->slot_count; i++)
        W->slot_data[i].bytes[3] ^= W->slots[i].state == KM_COMMITTED;
    suspect(KM_NONE);
    proofs_were_good();
    assert_int_equal(W->proof_count, 5);
    W->proofs_held = false;
    assert_int_equal(turn(2, 1, 0, words_a, 4 * CW_BT + 2).reused, 0);
    assert_int_equal(km_core_stats(W->core)->snapshots_damaged, 1);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 0);
    cw_check(W);
}

static void tier_begin(void)
{
    W->objects = calloc(CW_OBJECTS, sizeof(*W->objects));
    W->options.tier_bytes_max = 8192 * 100;
    cw_start(W);
    cw_attach(W, 0, 100);
    cw_tier_on(W);
}

/* Writes what waits, as it was, but the answers come later. */
static struct km_event writes_held(void)
{
    static struct km_store_result results[KM_STORE_MAX];
    struct km_event event = {.type = KM_EVENT_STORE_DONE};
    assert_true(W->queued > 0);
    for (uint32_t i = 0; i < W->queued; i++)
        results[i] = cw_store_do(W, &W->queue[i]);
    event.u.store_done.count = W->queued;
    event.u.store_done.results = results;
    W->queued = 0;
    return event;
}

/* The same of a write to the tier, which reads what it writes. */
static void nor_does_a_write_begun_before(void **state)
{
    tier_begin();
    struct run a = turn(1, 1, 0, words_a, 4 * CW_BT + 2);
    W->proofs_held = true;
    cw_step(W, (struct km_event){.type = KM_EVENT_FLUSH, .u.flush_begins = true});
    struct km_event written = writes_held();
    W->block_data[a.blocks[1]].bytes[0] ^= 1;
    suspect(KM_NONE);
    cw_step(W, written);
    assert_int_equal(km_core_unproven(W->core), 4);
    W->proofs_held = false;
    for (uint32_t i = 0; i < 4; i++)
        cw_tick(W);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
    assert_int_equal(km_core_unproven(W->core), 0);
    cw_check(W);
}

/* A load whose blocks are written over before it ends is no load: their sum would be that of the
 * damage. */
static void nor_is_a_load_that_was_written_over(void **state)
{
    tier_begin();
    struct run a = turn(1, 1, 0, words_a, 6 * CW_BT + 2);
    tier_reboot();
    struct run again = {.request = 2, .session = 1};
    run_chain(&again, words_a, 6 * CW_BT + 2);
    open_send(&again);
    assert_true(W->queued > 3);
    cw_store_run(W, 3);
    uint32_t hurt = 0;
    for (uint32_t b = 0; b < W->block_count; b++)
        for (uint32_t k = 0; k < 6 && hurt == 0; k++)
            if (cw_same(&W->block_data[b], &a.chain[k])) {
                W->block_data[b].bytes[5] ^= 1;
                hurt++;
            }
    assert_int_equal(hurt, 1);
    suspect(KM_NONE);
    cw_store_all(W);
    cw_check(W);
    for (uint32_t b = 0; b < W->block_count; b++) /* sealed is only what it should be */
        assert_true(W->blocks[b].state != KM_COMMITTED ||
                    cw_same(&W->block_data[b], &W->blocks[b].hash));
    struct run more = {.request = 3, .session = 1};
    run_chain(&more, words_a, 6 * CW_BT + 2);
    open_send(&more);
    cw_store_all(W);
    assert_int_equal(open_take(&more), ERR_OK);
    assert_int_equal(more.reused, 6); /* the tier still has it */
    cw_check(W);
}

/* Two readers: the later one found damage, the earlier one comes back and says that all is well. */
static void damage_stays_known(void **state)
{
    tier_begin();
    struct run a = turn(1, 1, 0, words_a, 4 * CW_BT + 2), user = {.request = 2, .session = 1};
    run_chain(&user, words_a, 4 * CW_BT + 2);
    assert_int_equal(run_open(&user), ERR_OK); /* in use: it cannot leave */
    assert_int_equal(user.reused, 4);
    W->proofs_held = true;
    suspect(a.blocks[1]);
    cw_tick(W);
    assert_int_equal(W->proof_count, 1);
    W->block_data[a.blocks[1]].bytes[0] ^= 1;
    cw_step(W, (struct km_event){.type = KM_EVENT_FLUSH, .u.flush_begins = true});
    cw_store_all(W);
    assert_int_equal(km_core_stats(W->core)->blocks_damaged, 1);
    proofs_were_good();
    W->proofs_held = false;
    assert_true(km_core_unproven(W->core) > 0);
    struct run other = {.request = 3, .session = 2};
    run_chain(&other, words_a, 4 * CW_BT + 2);
    assert_int_equal(run_open(&other), ERR_OK);
    assert_int_equal(other.reused, 0);
    run_release(&other, false);
    run_release(&user, true);
    cw_tick(W);
    cw_check(W);
    assert_int_equal(km_core_unproven(W->core), 0);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(nothing_adopted_is_lent_before_it_was_read),
        CASE(one_that_wants_no_reuse_builds_on_nothing_unread),
        CASE(damaged_blocks_are_dropped_and_nothing_else),
        CASE(a_damaged_snapshot_is_dropped_alone),
        CASE(the_background_reads_all),
        CASE(damage_in_use_is_a_miss),
        CASE(damage_does_not_reach_the_tier),
        CASE(what_stands_on_damage_does_not_either),
        CASE(everything_is_suspect),
        CASE(a_proof_begun_before_a_doubt_clears_nothing),
        CASE(nor_that_of_a_snapshot),
        CASE(nor_does_a_write_begun_before),
        CASE(nor_is_a_load_that_was_written_over),
        CASE(damage_stays_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
