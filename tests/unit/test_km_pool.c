/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "kvmgr/km_pool.h"
#include "lib/base/rng.h"

static struct msg_id request_of(uint32_t n)
{
    struct msg_id id = {{0}};
    memcpy(id.bytes, &n, sizeof(n));
    return id;
}

static struct km_pool *pool_of(uint32_t blocks, uint32_t slots)
{
    struct km_pool_options options = {.block_count = blocks,
                                      .slot_count = slots,
                                      .epoch = 7,
                                      .snapshot_count = 4,
                                      .block_tokens = 16,
                                      .sessions_max = 16,
                                      .tenants_max = 4};
    struct km_pool *p = NULL;
    assert_int_equal(km_pool_create(&options, &p), ERR_OK);
    return p;
}

static enum err open_code(struct km_pool *p, uint32_t request, uint32_t wanted,
                          uint32_t *ret_blocks, struct km_lease **ret_lease)
{
    struct km_pool_open open = {
        .request = request_of(request), .blocks_wanted = wanted, .shared_tail = KM_NONE};
    return km_pool_open(p, &open, ret_blocks, ret_lease);
}

/* Ends the lease and takes what it freed. */
static uint32_t release_some(struct km_pool *p, struct km_lease *lease, uint32_t *ret_blocks)
{
    km_pool_release(p, lease, KM_RELEASE_KEEP);
    struct km_pool_scratch *scratch = km_pool_scratch(p);
    uint32_t count = scratch->freed_count;
    memcpy(ret_blocks, scratch->freed, count * sizeof(uint32_t));
    scratch->freed_count = scratch->slots_count = 0;
    return count;
}

static struct km_lease *open_some(struct km_pool *p, uint32_t request, uint32_t wanted,
                                  uint32_t *ret_blocks)
{
    struct km_lease *lease = NULL;
    assert_int_equal(open_code(p, request, wanted, ret_blocks, &lease), ERR_OK);
    return lease;
}

static void open_and_release_balance(void **state)
{
    struct km_pool *p = pool_of(10, 3);
    uint32_t a[10], b[10], freed[10];
    struct km_lease *first = open_some(p, 1, 4, a);
    struct km_lease *second = open_some(p, 2, 5, b);
    assert_int_not_equal(first->state_slot, second->state_slot);
    assert_int_not_equal(first->id, second->id);
    assert_int_equal(km_pool_id_epoch(first->id), 7);
    struct km_pool_counts c = km_pool_counts(p);
    assert_int_equal(c.blocks_free, 1);
    assert_int_equal(c.blocks_leased, 9);
    assert_int_equal(c.slots_free, 1);

    struct km_lease *none = NULL;
    assert_int_equal(open_code(p, 3, 2, a, &none), ERR_KV_FULL);
    assert_null(none);
    assert_int_equal(km_pool_counts(p).slots_free, 1); /* nothing was taken */

    uint64_t id = first->id;
    assert_int_equal(release_some(p, first, freed), 4);
    assert_memory_equal(freed, a, 4 * sizeof(uint32_t));
    assert_null(km_pool_find(p, 0, id));
    assert_int_equal(release_some(p, second, freed), 5);
    c = km_pool_counts(p);
    assert_int_equal(c.blocks_free, 10);
    assert_int_equal(c.slots_free, 3);
    km_pool_audit(p);
    km_pool_destroy(&p);
    assert_null(p);
    km_pool_destroy(&p);
}

static void slots_run_out_before_blocks(void **state)
{
    struct km_pool *p = pool_of(10, 1);
    uint32_t blocks[10];
    struct km_lease *lease = open_some(p, 1, 1, blocks);
    struct km_lease *none = NULL;
    assert_int_equal(open_code(p, 2, 1, blocks, &none), ERR_KV_FULL);
    (void)release_some(p, lease, blocks);
    assert_int_equal(open_code(p, 2, 1, blocks, &none), ERR_OK);
    km_pool_destroy(&p);
}

static void extend_is_idempotent(void **state)
{
    struct km_pool *p = pool_of(10, 2);
    uint32_t blocks[10], again[10];
    struct km_lease *lease = open_some(p, 1, 2, blocks);
    assert_int_equal(km_pool_extend(p, lease, 2, 3, blocks + 2), ERR_OK);
    assert_int_equal(lease->block_count, 5);
    /* The answer was lost: the same blocks again, no more are taken. */
    assert_int_equal(km_pool_extend(p, lease, 2, 3, again), ERR_OK);
    assert_memory_equal(again, blocks + 2, 3 * sizeof(uint32_t));
    assert_int_equal(lease->block_count, 5);
    /* It asks for more than the lost answer gave. */
    assert_int_equal(km_pool_extend(p, lease, 4, 3, again), ERR_OK);
    assert_int_equal(again[0], blocks[4]);
    assert_int_equal(lease->block_count, 7);
    assert_int_equal(km_pool_extend(p, lease, 0, 1, again), ERR_OK);
    assert_int_equal(again[0], blocks[0]);
    assert_int_equal(km_pool_extend(p, lease, 8, 1, again), ERR_INVALID);
    assert_int_equal(km_pool_extend(p, lease, 7, 4, again), ERR_KV_FULL);
    assert_int_equal(lease->block_count, 7);
    assert_int_equal(km_pool_extend(p, lease, 7, 3, again), ERR_OK);
    assert_int_equal(km_pool_counts(p).blocks_free, 0);
    km_pool_audit(p);
    km_pool_destroy(&p);
}

static void commit_goes_forward_only(void **state)
{
    struct km_pool *p = pool_of(8, 1);
    uint32_t blocks[8], got[8];
    struct hash128 hashes[8];
    struct km_committed done;
    for (uint32_t i = 0; i < 8; i++)
        memset(&hashes[i], (int)i + 1, sizeof(hashes[i]));
    struct hash128 zero = {{0}};
    struct km_lease *lease = open_some(p, 1, 6, blocks);
    assert_int_equal(km_pool_commit(p, lease, 0, hashes, 2, got, &done), ERR_OK);
    assert_int_equal(done.first, 0);
    assert_int_equal(done.count, 2);
    assert_int_equal(done.fresh, 0);
    assert_memory_equal(&done.parent, &zero, sizeof(zero));
    assert_memory_equal(got, blocks, 2 * sizeof(uint32_t));
    /* Overlapping: only what is new. */
    assert_int_equal(km_pool_commit(p, lease, 1, hashes + 1, 3, got, &done), ERR_OK);
    assert_int_equal(done.first, 2);
    assert_int_equal(done.skip, 1);
    assert_int_equal(done.count, 2);
    assert_memory_equal(&done.parent, &hashes[1], sizeof(done.parent));
    assert_memory_equal(got, blocks + 2, 2 * sizeof(uint32_t));
    /* All known, a gap, beyond the end. */
    assert_int_equal(km_pool_commit(p, lease, 0, hashes, 2, got, &done), ERR_OK);
    assert_int_equal(done.count, 0);
    assert_int_equal(km_pool_commit(p, lease, 5, hashes, 1, got, &done), ERR_INVALID);
    assert_int_equal(km_pool_commit(p, lease, 4, hashes, 3, got, &done), ERR_INVALID);
    assert_int_equal(km_pool_commit(p, lease, UINT32_MAX, hashes, UINT32_MAX, got, &done),
                     ERR_INVALID);
    assert_int_equal(lease->committed_count, 4);
    km_pool_audit(p);
    km_pool_destroy(&p);
}

static void ids_of_others_find_nothing(void **state)
{
    struct km_pool *p = pool_of(4, 2);
    uint32_t blocks[4];
    struct km_lease *lease = open_some(p, 1, 1, blocks);
    assert_ptr_equal(km_pool_find(p, 0, lease->id), lease);
    assert_null(km_pool_find(p, 1, lease->id));
    assert_null(km_pool_find(p, 0, 0));
    assert_null(km_pool_find(p, 0, lease->id + 1));
    assert_null(km_pool_find(p, 0, lease->id ^ (1ull << 40)));
    assert_null(km_pool_find(p, 0, UINT64_MAX));
    struct msg_id id = request_of(1);
    assert_ptr_equal(km_pool_find_request(p, 0, &id), lease);
    assert_null(km_pool_find_request(p, 1, &id));
    km_pool_destroy(&p);
}

/* Used blocks come back before fresh ones are touched: a sparse arena stays sparse. */
static void used_blocks_come_first(void **state)
{
    struct km_pool *p = pool_of(1000, 2);
    uint32_t blocks[4];
    for (uint32_t i = 0; i < 100; i++) {
        struct km_lease *lease = open_some(p, i, 4, blocks);
        for (uint32_t k = 0; k < 4; k++)
            assert_true(blocks[k] < 4);
        (void)release_some(p, lease, blocks);
    }
    km_pool_destroy(&p);
}

static void random_leases_balance(void **state)
{
    enum { BLOCKS = 97, SLOTS = 9 };
    struct rng rng;
    rng_init(&rng, 0x6b6d0001);
    struct km_pool *p = pool_of(BLOCKS, SLOTS);
    uint32_t blocks[BLOCKS], held = 0, requests = 0;
    for (uint32_t step = 0; step < 20000; step++) {
        struct km_lease *lease = km_pool_lease_at(p, rng_below(&rng, SLOTS));
        uint32_t wanted = 1 + rng_below(&rng, 20);
        if (!lease) {
            if (open_code(p, ++requests, wanted, blocks, &lease) == ERR_OK)
                held += wanted;
        } else if (rng_below(&rng, 3) == 0) {
            held -= release_some(p, lease, blocks);
        } else if (km_pool_extend(p, lease, lease->block_count, wanted, blocks) == ERR_OK) {
            held += wanted;
        }
        assert_int_equal(km_pool_counts(p).blocks_leased, held);
        if (step % 100 == 0)
            km_pool_audit(p);
    }
    for (uint32_t i = 0; i < SLOTS; i++) {
        struct km_lease *lease = km_pool_lease_at(p, i);
        if (lease)
            (void)release_some(p, lease, blocks);
    }
    assert_int_equal(km_pool_counts(p).blocks_free, BLOCKS);
    km_pool_audit(p);
    km_pool_destroy(&p);
}

/* More tenants than there are entries: they go without, none is charged for another. */
static void tenants_beyond_the_entries(void **state)
{
    struct km_sessions *t = NULL;
    assert_int_equal(km_sessions_create(16, 2, &t), ERR_OK);
    struct hash128 sid = {{1}}, salts[3] = {{{1}}, {{2}}, {{3}}};
    uint32_t a = km_sessions_use(t, &sid, &salts[0]), b = km_sessions_use(t, &sid, &salts[1]);
    km_sessions_charge(t, a, 5);
    km_sessions_charge(t, b, 7);
    uint32_t c = km_sessions_use(t, &sid, &salts[2]);
    assert_int_equal(c, KM_NONE);
    km_sessions_charge(t, c, 9);
    assert_int_equal(km_sessions_tenant(t, km_sessions_at(t, b))->blocks, 7);
    assert_int_equal(km_sessions_use(t, &sid, &salts[1]), b);
    km_sessions_charge(t, a, -5);
    km_sessions_charge(t, b, -7);
    km_sessions_destroy(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tenants_beyond_the_entries),  cmocka_unit_test(open_and_release_balance),
        cmocka_unit_test(slots_run_out_before_blocks), cmocka_unit_test(extend_is_idempotent),
        cmocka_unit_test(commit_goes_forward_only),    cmocka_unit_test(ids_of_others_find_nothing),
        cmocka_unit_test(used_blocks_come_first),      cmocka_unit_test(random_leases_balance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
