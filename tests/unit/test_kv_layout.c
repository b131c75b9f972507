/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/check.h"
#include "lib/base/rng.h"
#include "proto/kv_layout.h"

#define SLOTS(live, all) ((struct kv_slots){live, all})

static struct kv_geometry geometry(void)
{
    return (struct kv_geometry){.dsa_layers = 2,
                                .latent_dim = 64,
                                .index_dim = 16,
                                .index_kpool = 4,
                                .block_tokens = 16,
                                .kv_dtype = KV_F32,
                                .index_dtype = KV_F32,
                                .snapshot_dtype = KV_F32,
                                .rank = 0,
                                .ranks = 1,
                                .interleave = 16,
                                .state_bytes = 5000};
}

static void test_row_bytes(void **state)
{
    (void)state;
    assert_int_equal(kv_latent_row_bytes(KV_FP8, 512), 528);
    assert_int_equal(kv_index_row_bytes(KV_FP8, 128), 132);
    assert_int_equal(kv_latent_row_bytes(KV_BF16, 512), 1024);
    assert_int_equal(kv_latent_row_bytes(KV_F32, 512), 2048);
    assert_int_equal(kv_latent_row_bytes(KV_FP8, 129), 129 + 8);
}

/* Marks [at, at + bytes) as taken; each byte of the arena may be taken once. */
static void take(uint8_t *map, uint64_t map_bytes, uint64_t at, uint64_t bytes)
{
    assert_true(at + bytes <= map_bytes);
    for (uint64_t i = at; i < at + bytes; i++) {
        assert_int_equal(map[i], 0);
        map[i] = 1;
    }
}

static void layout_walk(const struct kv_layout *l)
{
    const struct kv_geometry *g = &l->geometry;
    uint64_t tokens = g->block_tokens / g->ranks;
    uint8_t *map = calloc(1, l->arena_bytes);
    assert_non_null(map);
    take(map, l->arena_bytes, 0, KV_SUPERBLOCK_BYTES);
    for (uint32_t b = 0; b < l->block_count; b++) {
        take(map, l->arena_bytes, l->block_headers_at + b * (uint64_t)KV_HEADER_BYTES,
             KV_HEADER_BYTES);
        struct kv_place place = kv_block_place(l, b);
        uint64_t block_at = place.at;
        assert_int_equal(place.bytes, l->block_bytes);
        assert_int_equal(block_at % KV_PAGE_BYTES, 0);
        for (uint32_t d = 0; d < g->dsa_layers; d++) {
            uint64_t at = block_at + d * l->layer_stride;
            uint64_t latent = kv_latent_row_bytes(g->kv_dtype, g->latent_dim);
            uint64_t index = kv_index_row_bytes(g->index_dtype, g->index_dim);
            assert_int_equal(at % 64, 0);
            assert_int_equal((at + l->index_offset) % 64, 0);
            for (uint64_t t = 0; t < tokens; t++)
                take(map, l->arena_bytes, at + t * latent, latent);
            for (uint64_t t = 0; t < tokens / g->index_kpool; t++)
                take(map, l->arena_bytes, at + l->index_offset + t * index, index);
            assert_true(at + l->layer_stride <= block_at + l->block_guard_at);
        }
        take(map, l->arena_bytes, place.guard_at, place.guard_bytes);
        assert_int_equal(place.guard_at + place.guard_bytes, place.at + place.bytes);
        assert_true(place.guard_bytes >= KV_GUARD_BYTES_MIN);
        assert_true(place.guard_bytes <= KV_GUARD_BYTES_MAX);
    }
    for (uint32_t s = 0; s < l->slot_count; s++) {
        take(map, l->arena_bytes, l->slot_headers_at + s * (uint64_t)KV_HEADER_BYTES,
             KV_HEADER_BYTES);
        bool half = s >= l->live_count && g->snapshot_dtype == KV_BF16;
        uint64_t body = half ? g->state_bytes / 2 : g->state_bytes;
        struct kv_place place = kv_slot_place(l, s);
        assert_int_equal(place.at % KV_PAGE_BYTES, 0);
        assert_int_equal(place.bytes, (body + KV_GUARD_BYTES_MIN + 4095) / 4096 * 4096);
        take(map, l->arena_bytes, place.at, body);
        take(map, l->arena_bytes, place.guard_at, place.guard_bytes);
        assert_int_equal(place.guard_at + place.guard_bytes, place.at + place.bytes);
        assert_true(place.guard_bytes >= KV_GUARD_BYTES_MIN);
        assert_true(place.guard_bytes <= KV_GUARD_BYTES_MAX);
    }
    free(map);
}

static void test_nothing_overlaps(void **state)
{
    struct rng r;
    struct err_detail detail;
    uint32_t planned = 0;
    (void)state;
    rng_init(&r, 11);
    for (uint32_t round = 0; round < 300; round++) {
        struct kv_geometry g = geometry();
        struct kv_layout l, tight, less;
        g.dsa_layers = 1 + rng_below(&r, 4);
        g.latent_dim = 1 + rng_below(&r, 200);
        g.index_dim = 1 + rng_below(&r, 200);
        g.index_kpool = 1u << rng_below(&r, 3);
        g.ranks = 1 + rng_below(&r, 4);
        g.rank = rng_below(&r, g.ranks);
        g.interleave = g.index_kpool * (1 + rng_below(&r, 4));
        g.block_tokens = g.ranks * g.interleave * (1 + rng_below(&r, 4));
        g.kv_dtype = 1 + rng_below(&r, 3);
        g.index_dtype = 1 + rng_below(&r, 3);
        g.snapshot_dtype = 1 + rng_below(&r, 2);
        g.state_bytes = 4 + 4 * rng_below(&r, 5000);
        uint64_t bytes = rng_below(&r, 3u << 20);
        struct kv_slots slots = {.count = 1 + rng_below(&r, 20)};
        slots.live = 1 + rng_below(&r, slots.count);
        enum err e = kv_layout_plan(&g, bytes, slots, &l, &detail);
        if (e != ERR_OK) {
            assert_int_equal(e, ERR_NOMEM);
            continue;
        }
        planned++;
        assert_true(l.arena_bytes <= bytes);
        assert_true(l.arena_bytes + l.block_bytes + KV_PAGE_BYTES > bytes);
        assert_int_equal(l.slot_count, slots.count);
        assert_int_equal(l.live_count, slots.live);
        layout_walk(&l);
        /* Planning into exactly what was used gives the same; one byte less, one block less. */
        assert_int_equal(kv_layout_plan(&g, l.arena_bytes, slots, &tight, &detail), ERR_OK);
        assert_memory_equal(&tight, &l, sizeof(l));
        e = kv_layout_plan(&g, l.arena_bytes - 1, slots, &less, &detail);
        if (l.block_count == 1)
            assert_int_equal(e, ERR_NOMEM);
        else
            assert_int_equal(less.block_count, l.block_count - 1);
    }
    assert_true(planned > 100);
}

static void test_fingerprint(void **state)
{
    struct kv_layout l, m;
    struct err_detail detail;
    (void)state;
    struct kv_geometry g = geometry();
    assert_int_equal(kv_layout_plan(&g, 1 << 22, SLOTS(1, 3), &l, &detail), ERR_OK);
    struct kv_geometry changed[12];
    for (size_t i = 0; i < ARRAY_COUNT(changed); i++)
        changed[i] = g;
    changed[0].dsa_layers = 3;
    changed[1].latent_dim = 65;
    changed[2].index_dim = 17;
    changed[3].index_kpool = 8;
    changed[4].block_tokens = 32;
    changed[5].kv_dtype = KV_BF16;
    changed[6].index_dtype = KV_FP8;
    changed[7].interleave = 8;
    changed[8].interleave = 4;
    changed[8].ranks = 2;
    changed[9].interleave = 4;
    changed[9].ranks = 2;
    changed[9].rank = 1;
    changed[10].state_bytes = 5001;
    changed[11].snapshot_dtype = KV_BF16;
    struct hash128 seen[13] = {l.layout_fp};
    for (size_t i = 0; i < ARRAY_COUNT(changed); i++) {
        assert_int_equal(kv_layout_plan(&changed[i], 1 << 22, SLOTS(1, 3), &m, &detail), ERR_OK);
        for (size_t k = 0; k <= i; k++)
            assert_memory_not_equal(&m.layout_fp, &seen[k], 16);
        seen[i + 1] = m.layout_fp;
    }
    assert_int_equal(kv_layout_plan(&g, 1 << 21, SLOTS(2, 5), &m, &detail), ERR_OK);
    assert_memory_equal(&m.layout_fp, &l.layout_fp, 16);
}

static void refused(struct kv_geometry g, const char *field)
{
    struct kv_layout l;
    struct err_detail detail = {{0}};
    assert_int_equal(kv_layout_plan(&g, 1ull << 40, SLOTS(1, 3), &l, &detail), ERR_INVALID);
    if (strstr(detail.text, field) != detail.text)
        fail_msg("'%s' does not begin with '%s'", detail.text, field);
}

#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        struct kv_geometry g_ = geometry();                                                        \
        g_.field = (value);                                                                        \
        refused(g_, #field);                                                                       \
    } while (0)

static void test_impossible_geometry(void **state)
{
    (void)state;
    REFUSED(dsa_layers, 0);
    REFUSED(dsa_layers, UINT32_MAX);
    REFUSED(latent_dim, 0);
    REFUSED(latent_dim, UINT32_MAX);
    REFUSED(index_dim, 0);
    REFUSED(index_kpool, 0);
    REFUSED(block_tokens, 0);
    REFUSED(block_tokens, UINT32_MAX);
    REFUSED(kv_dtype, 0);
    REFUSED(kv_dtype, 4);
    REFUSED(index_dtype, 4);
    REFUSED(snapshot_dtype, 0);
    REFUSED(snapshot_dtype, KV_FP8);
    REFUSED(rank, 1);
    REFUSED(ranks, 0);
    REFUSED(ranks, 9);
    REFUSED(interleave, 0);
    REFUSED(interleave, 6);
    REFUSED(state_bytes, 0);
    REFUSED(state_bytes, UINT64_MAX);
    REFUSED(block_tokens, 20);
    struct kv_geometry big = geometry();
    big.dsa_layers = 1024;
    big.latent_dim = 65536;
    big.block_tokens = 65536;
    big.interleave = 65536;
    refused(big, "block");
    struct kv_layout l;
    struct err_detail many = {{0}};
    struct kv_geometry small = geometry();
    small.latent_dim = small.index_dim = small.dsa_layers = 1;
    assert_int_equal(kv_layout_plan(&small, (uint64_t)KV_BLOCKS_MAX * 4096, SLOTS(1, 1), &l, &many),
                     ERR_OK);
    assert_int_equal(kv_layout_plan(&small, 1ull << 40, SLOTS(1, 1), &l, &many), ERR_INVALID);
    assert_non_null(strstr(many.text, "arena_bytes"));
    struct err_detail detail;
    struct kv_geometry g = geometry();
    assert_int_equal(kv_layout_plan(&g, UINT64_MAX, SLOTS(1, 1), &l, &detail), ERR_INVALID);
    assert_int_equal(kv_layout_plan(&g, 1 << 20, SLOTS(0, 0), &l, &detail), ERR_INVALID);
    assert_int_equal(kv_layout_plan(&g, 1 << 20, SLOTS(0, 3), &l, &detail), ERR_INVALID);
    assert_int_equal(kv_layout_plan(&g, 1 << 20, SLOTS(4, 3), &l, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "live_count: 4 of 3"));
    assert_int_equal(kv_layout_plan(&g, 0, SLOTS(1, 1), &l, &detail), ERR_NOMEM);
    g.snapshot_dtype = KV_BF16;
    g.state_bytes = 5002;
    refused(g, "state_bytes");
}

static struct kv_superblock superblock(const struct kv_layout *l)
{
    const struct kv_geometry *g = &l->geometry;
    struct kv_superblock s = {.magic = KV_MAGIC,
                              .version = KV_LAYOUT_VERSION,
                              .layout_fp = l->layout_fp,
                              .epoch = 3,
                              .incarnation = 99,
                              .arena_bytes = l->arena_bytes,
                              .block_count = l->block_count,
                              .slot_count = l->slot_count,
                              .dsa_layers = g->dsa_layers,
                              .latent_dim = g->latent_dim,
                              .index_dim = g->index_dim,
                              .index_kpool = g->index_kpool,
                              .block_tokens = g->block_tokens,
                              .kv_dtype = g->kv_dtype,
                              .index_dtype = g->index_dtype,
                              .rank = g->rank,
                              .ranks = g->ranks,
                              .interleave = g->interleave,
                              .state_bytes = g->state_bytes,
                              .snapshot_dtype = g->snapshot_dtype,
                              .live_count = l->live_count};
    kv_superblock_seal(&s);
    return s;
}

static void test_superblock(void **state)
{
    struct kv_layout l, read;
    struct err_detail detail;
    (void)state;
    struct kv_geometry g = geometry();
    g.snapshot_dtype = KV_BF16;
    assert_int_equal(kv_layout_plan(&g, 1 << 20, SLOTS(2, 4), &l, &detail), ERR_OK);
    struct kv_superblock s = superblock(&l);
    assert_int_equal(kv_superblock_check(&s, l.arena_bytes, &read, &detail), ERR_OK);
    assert_memory_equal(&read, &l, sizeof(l));
    assert_int_equal(kv_superblock_check(&s, l.arena_bytes - 1, &read, &detail), ERR_CORRUPT);
    /* Any flipped bit is seen. */
    for (uint32_t bit = 0; bit < sizeof(s) * 8; bit++) {
        struct kv_superblock t = s;
        ((uint8_t *)&t)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    }
    /* Sealed lies are seen by the arithmetic. */
    struct kv_superblock t = s;
    t.block_count++;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    t = s;
    t.block_count = UINT32_MAX;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    t = s;
    t.latent_dim = 63;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    t = s;
    t.snapshot_dtype = KV_F32;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    t = s;
    t.live_count = 3; /* which takes more room */
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    t = s;
    t.live_count = 5;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    t = s;
    t.version = KV_LAYOUT_VERSION - 1;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
    assert_non_null(strstr(detail.text, "version: 2, only 3"));
    t = s;
    t.arena_bytes++;
    kv_superblock_seal(&t);
    assert_int_equal(kv_superblock_check(&t, l.arena_bytes, &read, &detail), ERR_CORRUPT);
}

static void test_headers(void **state)
{
    struct kv_block_header h = {.state = KV_COMMITTED, .epoch = 1, .generation = 5};
    struct kv_slot_header k = {.kind = KV_SLOT_LIVE, .state = KV_WRITING, .token_count = 7};
    (void)state;
    kv_block_header_seal(&h);
    kv_slot_header_seal(&k);
    assert_int_equal(kv_block_header_check(&h), ERR_OK);
    assert_int_equal(kv_slot_header_check(&k), ERR_OK);
    for (uint32_t bit = 0; bit < KV_HEADER_BYTES * 8; bit++) {
        struct kv_block_header x = h;
        struct kv_slot_header y = k;
        ((uint8_t *)&x)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        ((uint8_t *)&y)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(kv_block_header_check(&x), ERR_CORRUPT);
        assert_int_equal(kv_slot_header_check(&y), ERR_CORRUPT);
    }
    h.state = 3;
    kv_block_header_seal(&h);
    assert_int_equal(kv_block_header_check(&h), ERR_CORRUPT);
    k.kind = 3;
    kv_slot_header_seal(&k);
    assert_int_equal(kv_slot_header_check(&k), ERR_CORRUPT);
    static const struct kv_block_header zero;
    assert_int_equal(kv_block_header_check(&zero), ERR_CORRUPT);
}

/* Counts alone give the layout that the plan of a file came to; no product of them overflows. */
static void test_layout_of_counts(void **state)
{
    struct kv_geometry g = geometry();
    struct kv_layout planned, same;
    struct err_detail detail;
    (void)state;
    assert_int_equal(kv_layout_plan(&g, 1 << 20, SLOTS(3, 5), &planned, &detail), ERR_OK);
    assert_int_equal(kv_layout_of(&g, planned.block_count, SLOTS(3, 5), &same, &detail), ERR_OK);
    assert_memory_equal(&planned, &same, sizeof(same));
    static const uint32_t bad[][2] = {
        {0, 5}, {5, 0}, {UINT32_MAX, 5}, {5, UINT32_MAX}, {1u << 24, 1u << 24}};
    g.state_bytes = 1ull << 34;
    for (size_t i = 0; i < ARRAY_COUNT(bad); i++)
        assert_int_equal(kv_layout_of(&g, bad[i][0], SLOTS(1, bad[i][1]), &same, &detail),
                         ERR_INVALID);
    g.block_tokens = 0;
    assert_int_equal(kv_layout_of(&g, 5, SLOTS(5, 5), &same, &detail), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_bytes),        cmocka_unit_test(test_nothing_overlaps),
        cmocka_unit_test(test_fingerprint),      cmocka_unit_test(test_impossible_geometry),
        cmocka_unit_test(test_superblock),       cmocka_unit_test(test_headers),
        cmocka_unit_test(test_layout_of_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
