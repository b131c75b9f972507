/* SPDX-License-Identifier: Apache-2.0 */
/* Session maps as Redis may have them: whole ones are read, all else is named and refused. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/rng.h"
#include "router/rt_map.h"

#define HEX16 "00112233445566778899aabbccddeeff"

static struct rt_map_bytes fields[RT_MAP_FIELDS], chunks[RT_MAP_CHUNKS_MAX];
static char blocks_text[24];
static uint8_t data[3][RT_MAP_CHUNK_BYTES + 1];
static uint8_t items[RT_MAP_BLOCKS_MAX * RT_MAP_ITEM_BYTES];
static struct rt_map map;
static struct err_detail detail;

static void text(enum rt_map_field f, const char *value)
{
    fields[f] = (struct rt_map_bytes){value, strlen(value)};
}

static void seal(uint32_t chunk, uint64_t epoch, uint64_t gen, uint32_t count)
{
    uint8_t *b = data[chunk];
    memcpy(b, &epoch, 8);
    memcpy(b + 8, &gen, 8);
    uint32_t crc = hash_crc32c(hash_crc32c(0, b, 16), b + 20, 22u * count);
    memcpy(b + 16, &crc, 4);
    chunks[chunk] = (struct rt_map_bytes){(const char *)b, 20 + 22u * count};
}

/* A map of so many blocks, entry i full of i. */
static uint32_t good(uint32_t blocks)
{
    uint32_t count = (blocks + 255) / 256;
    text(RT_MAP_EPOCH, "41");
    text(RT_MAP_INCARNATION, "8000000000000001");
    text(RT_MAP_LAYOUT_FP, HEX16);
    text(RT_MAP_MODEL_FP, HEX16);
    text(RT_MAP_SALT, HEX16);
    text(RT_MAP_TOKENS, "99999");
    snprintf(blocks_text, sizeof(blocks_text), "%u", blocks);
    text(RT_MAP_BLOCKS, blocks_text);
    text(RT_MAP_GEN, "3");
    for (uint32_t c = 0; c < count; c++) {
        uint32_t n = blocks - c * 256 < 256 ? blocks - c * 256 : 256;
        for (uint32_t i = 0; i < n; i++)
            memset(data[c] + 20 + 22 * i, (int)((c * 256 + i) & 0xff), 22);
        seal(c, 41, 3, n);
    }
    return count;
}

static enum err read_map(uint32_t chunk_count)
{
    map.item_count = 4711;
    return rt_map_read(fields, chunks, chunk_count, items, &map, &detail);
}

static void test_whole_maps(void **state)
{
    (void)state;
    for (uint32_t blocks = 1; blocks <= 700; blocks += blocks < 4 ? 1 : 63) {
        assert_int_equal(read_map(good(blocks)), ERR_OK);
        assert_int_equal(map.item_count, blocks);
        assert_true(map.epoch == 41 && map.gen == 3 && map.incarnation == 0x8000000000000001u);
        assert_int_equal(map.token_count, 99999);
        assert_int_equal(map.salt.bytes[15], 0xff);
        for (uint32_t i = 0; i < blocks; i++) {
            for (uint32_t k = 0; k < RT_MAP_ITEM_BYTES; k++)
                assert_int_equal(map.items[i * RT_MAP_ITEM_BYTES + k], i & 0xff);
        }
    }
    good(1);
    fields[RT_MAP_EPOCH].bytes = NULL;
    assert_int_equal(read_map(0), ERR_NOT_FOUND);
    assert_int_equal(map.item_count, 4711); /* untouched */
}

static void test_bad_fields(void **state)
{
    (void)state;
    const struct {
        enum rt_map_field field;
        const char *value, *named;
    } bad[] = {
        {RT_MAP_EPOCH, "", "epoch"},
        {RT_MAP_EPOCH, "-1", "epoch"},
        {RT_MAP_EPOCH, "4294967296", "epoch"},
        {RT_MAP_INCARNATION, "80000000000000011", "incarnation"},
        {RT_MAP_INCARNATION, "800000000000000g", "incarnation"},
        {RT_MAP_LAYOUT_FP, "00", "layout_fp"},
        {RT_MAP_MODEL_FP, "", "model_fp"},
        {RT_MAP_SALT, HEX16 "0", "salt"},
        {RT_MAP_TOKENS, "1e9", "n_tokens"},
        {RT_MAP_TOKENS, "1", "n_blocks"}, /* fewer tokens than blocks */
        {RT_MAP_BLOCKS, "0", "n_blocks"},
        {RT_MAP_BLOCKS, "3.5", "n_blocks"},
        {RT_MAP_BLOCKS, "18446744073709551616", "n_blocks"},
        {RT_MAP_GEN, "0x3", "gen"},
    };
    for (uint32_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint32_t count = good(3);
        text(bad[i].field, bad[i].value);
        assert_int_equal(read_map(count), ERR_CORRUPT);
        assert_non_null(strstr(detail.text, bad[i].named));
    }
    for (uint32_t f = RT_MAP_INCARNATION; f < RT_MAP_FIELDS; f++) {
        uint32_t count = good(3);
        fields[f].bytes = NULL;
        assert_int_equal(read_map(count), ERR_CORRUPT);
    }
}

static void test_bad_chunks(void **state)
{
    (void)state;
    assert_int_equal(good(300), 2);
    assert_int_equal(read_map(1), ERR_CORRUPT); /* one is missing */
    assert_int_equal(read_map(0), ERR_CORRUPT);
    chunks[1].bytes = NULL;
    assert_int_equal(read_map(2), ERR_CORRUPT);
    for (uint32_t c = 0; c < 2; c++) {
        good(300);
        chunks[c].count--;
        assert_int_equal(read_map(2), ERR_CORRUPT);
        chunks[c].count += 2;
        assert_int_equal(read_map(2), ERR_CORRUPT);
        good(300);
        seal(c, 40, 3, c == 0 ? 256 : 44); /* whole, but of another write */
        assert_int_equal(read_map(2), ERR_CORRUPT);
        assert_non_null(strstr(detail.text, "generation"));
        seal(c, 41, 4, c == 0 ? 256 : 44);
        assert_int_equal(read_map(2), ERR_CORRUPT);
    }
    for (uint32_t at = 0; at < 20 + 22 * 5; at++) { /* any one bit of a chunk */
        assert_int_equal(good(5), 1);
        data[0][at] ^= (uint8_t)(1u << at % 8);
        assert_int_equal(read_map(1), ERR_CORRUPT);
    }
}

/* Random bytes everywhere, sizes as they come: refused, and nothing read beyond. */
static void test_random_bytes(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 99);
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t count = good(1 + rng_below(&rng, 520)), hurt = 1 + rng_below(&rng, 3);
        uint8_t *copies[RT_MAP_FIELDS + 3] = {NULL};
        for (uint32_t i = 0; i < RT_MAP_FIELDS + count; i++) { /* so that a sanitizer sees ends */
            struct rt_map_bytes *b = i < RT_MAP_FIELDS ? &fields[i] : &chunks[i - RT_MAP_FIELDS];
            copies[i] = malloc(b->count);
            memcpy(copies[i], b->bytes, b->count);
            b->bytes = (const char *)copies[i];
        }
        for (uint32_t n = 0; n < hurt; n++) {
            uint32_t i = rng_below(&rng, RT_MAP_FIELDS + count);
            struct rt_map_bytes *b = i < RT_MAP_FIELDS ? &fields[i] : &chunks[i - RT_MAP_FIELDS];
            if (rng_below(&rng, 2) == 0)
                b->count = rng_below(&rng, (uint32_t)b->count + 1);
            else if (b->count > 0)
                copies[i][rng_below(&rng, (uint32_t)b->count)] = (uint8_t)rng_u64(&rng);
        }
        enum err e = read_map(rng_below(&rng, 8) == 0 ? rng_below(&rng, count + 1) : count);
        assert_true(e == ERR_OK || e == ERR_CORRUPT);
        if (e == ERR_OK)
            assert_true(map.item_count <= RT_MAP_BLOCKS_MAX && map.item_count > 0);
        for (uint32_t i = 0; i < RT_MAP_FIELDS + count; i++)
            free(copies[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_maps),
        cmocka_unit_test(test_bad_fields),
        cmocka_unit_test(test_bad_chunks),
        cmocka_unit_test(test_random_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
