/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "kvmgr/km_tier.h"
#include "lib/base/rng.h"

#define UNIT  KM_TIER_UNIT
#define NAMES 60u

static const struct hash128 none;

static struct hash128 name(uint32_t n)
{
    struct hash128 h = {{0}};
    memcpy(h.bytes, &n, sizeof(n));
    memcpy(h.bytes + 4, &n, sizeof(n));
    memcpy(h.bytes + 8, &n, sizeof(n));
    h.bytes[15] = 1;
    return h;
}

static struct km_tier *tier(uint32_t objects, uint64_t units)
{
    struct km_tier *t = NULL;
    assert_int_equal(km_tier_create(objects, units * UNIT, &t), ERR_OK);
    return t;
}

static void block_add(struct km_tier *t, uint32_t n, uint32_t parent)
{
    struct hash128 h = name(n), p = name(parent);
    assert_true(km_tier_add(t, KM_OBJECT_BLOCK, &h, parent ? &p : &none, UNIT));
}

static void snapshot_add(struct km_tier *t, uint32_t n)
{
    struct hash128 h = name(n);
    assert_true(km_tier_add(t, KM_OBJECT_SNAPSHOT, &h, &none, UNIT));
}

static bool has(const struct km_tier *t, enum km_object_kind kind, uint32_t n)
{
    struct hash128 h = name(n);
    return km_tier_has(t, kind, &h);
}

/* Gives up what is too much; the first name given up, 0: none. */
static uint32_t trim(struct km_tier *t)
{
    const struct km_object *o;
    uint32_t first = 0;
    while ((o = km_tier_excess(t)) != NULL) {
        struct hash128 h = o->hash;
        if (first == 0)
            memcpy(&first, h.bytes, sizeof(first));
        assert_true(km_tier_remove(t, (enum km_object_kind)o->kind, &h));
        km_tier_audit(t);
    }
    return first;
}

static void ends_go_before_beginnings(void **state)
{
    struct km_tier *t = tier(100, 6);
    for (uint32_t n = 1; n <= 5; n++) /* one chain, written from its beginning */
        block_add(t, n, n - 1);
    snapshot_add(t, 5);
    assert_int_equal(trim(t), 0);
    block_add(t, 20, 0); /* another one: the first loses its snapshot, then its end */
    assert_int_equal(trim(t), 5);
    assert_false(has(t, KM_OBJECT_SNAPSHOT, 5));
    assert_true(has(t, KM_OBJECT_BLOCK, 5));
    block_add(t, 21, 20);
    assert_int_equal(trim(t), 5);
    block_add(t, 22, 21);
    assert_int_equal(trim(t), 4);
    for (uint32_t n = 1; n <= 3; n++)
        assert_true(has(t, KM_OBJECT_BLOCK, n));
    km_tier_destroy(&t);
}

static void use_counts_among_ends(void **state)
{
    struct km_tier *t = tier(100, 5);
    block_add(t, 1, 0);
    block_add(t, 2, 1);
    block_add(t, 3, 1); /* a fork */
    block_add(t, 4, 0);
    block_add(t, 5, 0);
    struct hash128 used = name(2);
    km_tier_touch(t, KM_OBJECT_BLOCK, &used);
    block_add(t, 6, 0);
    assert_int_equal(trim(t), 3);
    used = name(1); /* stays as long as 2 does, and is used itself */
    km_tier_touch(t, KM_OBJECT_BLOCK, &used);
    block_add(t, 7, 0);
    assert_int_equal(trim(t), 4);
    block_add(t, 8, 0);
    assert_int_equal(trim(t), 5);
    block_add(t, 9, 0);
    assert_int_equal(trim(t), 2);
    block_add(t, 10, 0);
    assert_int_equal(trim(t), 6); /* 1 was used after it */
    block_add(t, 11, 0);
    assert_int_equal(trim(t), 1);
    km_tier_destroy(&t);
}

/* As a start tells them: newest first, and what others stand on after those at times. */
static void found_ones_are_in_order(void **state)
{
    struct km_tier *t = tier(100, 4);
    static const uint32_t names[][2] = {{3, 2}, {1, 0}, {2, 1}, {9, 0}};
    for (uint32_t i = 0; i < 4; i++) {
        struct hash128 h = name(names[i][0]), p = name(names[i][1]);
        assert_true(km_tier_found(t, KM_OBJECT_BLOCK, &h, names[i][1] ? &p : &none, UNIT));
        km_tier_audit(t);
    }
    block_add(t, 20, 0);
    assert_int_equal(trim(t), 9);
    block_add(t, 21, 0);
    assert_int_equal(trim(t), 3);
    block_add(t, 22, 0);
    assert_int_equal(trim(t), 2);
    km_tier_destroy(&t);
}

/* Rings and loops come only from files that were tampered with: the bound holds all the same. */
static void rings_are_survived(void **state)
{
    struct km_tier *t = tier(100, 3);
    block_add(t, 1, 2);
    block_add(t, 2, 3);
    block_add(t, 3, 1);
    block_add(t, 4, 4);
    km_tier_audit(t);
    (void)trim(t);
    block_add(t, 5, 2);
    block_add(t, 6, 2);
    (void)trim(t);
    assert_true(km_tier_bytes(t) <= 3 * UNIT);
    km_tier_destroy(&t);
}

static void random_trees(void **state)
{
    for (uint32_t run = 0; run < 300; run++) {
        struct rng rng;
        rng_init(&rng, 0x71e70000 + run);
        struct km_tier *t = tier(10 + rng_below(&rng, 60), 10 + rng_below(&rng, 60));
        for (uint32_t i = 0; i < 300; i++) {
            uint32_t n = 1 + rng_below(&rng, NAMES), kind = rng_below(&rng, 3) == 0;
            uint32_t parent = n / 2; /* a tree; whatever of it is there */
            struct hash128 h = name(n), p = name(parent);
            switch (rng_below(&rng, 6)) {
            case 0:
                km_tier_touch(t, kind, &h);
                break;
            case 1:
                (void)km_tier_remove(t, kind, &h);
                break;
            case 2:
                (void)km_tier_found(t, kind, &h, parent ? &p : &none, UNIT * (1 + n % 3));
                break;
            default:
                (void)km_tier_add(t, kind, &h, parent ? &p : &none, UNIT * (1 + n % 3));
            }
            km_tier_audit(t);
            const struct km_object *o = km_tier_excess(t);
            if (o)
                assert_int_equal(o->above, 0);
            (void)trim(t);
        }
        km_tier_clear(t);
        km_tier_audit(t);
        km_tier_destroy(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_go_before_beginnings),
        cmocka_unit_test(use_counts_among_ends),
        cmocka_unit_test(found_ones_are_in_order),
        cmocka_unit_test(rings_are_survived),
        cmocka_unit_test(random_trees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
