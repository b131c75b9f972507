/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "proto/tap_ring.h"

static struct tap_record record_of(uint32_t n)
{
    struct tap_record r = {.position = n, .step = n * UINT64_C(3)};
    memset(r.id.bytes, (int)(n & 255u), sizeof r.id.bytes);
    return r;
}

static void values_of(uint32_t n, float *values, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        values[i] = (float)((n * 7 + i) % 256); /* exact in bf16 */
}

static void what_is_written_is_read(void **state)
{
    (void)state;
    for (uint32_t type = TAP_BF16; type <= TAP_F32; type++) {
        struct tap_ring_geometry g = {.type = type, .tap_count = 3, .hidden = 5, .slots = 4};
        uint64_t bytes = tap_ring_bytes(&g);
        void *memory = mem_take(bytes);
        struct tap_ring w, r;
        float in[15], out[15];
        struct tap_record seen;
        tap_ring_format(&w, memory, &g, 77);
        assert_int_equal(tap_ring_open(&r, memory, bytes, NULL), ERR_OK);
        assert_int_equal(r.incarnation, 77);
        assert_false(tap_ring_read(&r, 0, &seen, out)); /* not written yet */
        for (uint32_t n = 0; n < 11; n++) {
            struct tap_record record = record_of(n);
            values_of(n, in, 15);
            tap_ring_write(&w, &record, in);
            assert_int_equal(tap_ring_head(&r), n + 1);
            assert_true(tap_ring_read(&r, n, &seen, out));
            assert_memory_equal(&seen.id, &record.id, sizeof record.id);
            assert_int_equal(seen.position, n);
            assert_int_equal(seen.step, n * 3);
            assert_memory_equal(in, out, sizeof in);
            assert_int_equal(tap_ring_peek(&r, n >= 3 ? n - 3 : 0, &seen), true);
            if (n >= 4) /* the oldest has made room */
                assert_false(tap_ring_peek(&r, n - 4, &seen));
        }
        mem_give(memory);
    }
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    struct tap_ring_geometry g = {.type = TAP_BF16, .tap_count = 1, .hidden = 4, .slots = 1};
    void *memory = mem_take(tap_ring_bytes(&g));
    struct tap_ring ring;
    struct tap_record record = record_of(0);
    float in[4] = {1.00390625f, 1.01171875f, -3.4028235e38f, 1e-40f}, out[4];
    tap_ring_format(&ring, memory, &g, 1);
    tap_ring_write(&ring, &record, in);
    assert_true(tap_ring_read(&ring, 0, &record, out));
    assert_true(out[0] == 1.0f && out[1] == 1.015625f);
    assert_true(out[2] < -3.4e38f); /* overflows to minus infinity */
    assert_true(out[3] > 0.9e-40f && out[3] < 1.01e-40f);
    mem_give(memory);
}

/* A header from outside is refused, and an accepted one never leads beyond its bytes. */
static void hostile_headers(void **state)
{
    (void)state;
    struct rng rng;
    struct tap_ring_geometry g = {.type = TAP_F32, .tap_count = 2, .hidden = 3, .slots = 4};
    uint64_t bytes = tap_ring_bytes(&g), opened = 0, refused = 0;
    uint8_t *memory = mem_take(bytes);
    struct tap_ring ring;
    struct err_detail detail;
    rng_init(&rng, 0x5eed0051);
    for (uint32_t run = 0; run < 20000; run++) {
        memset(memory, 0, bytes);
        tap_ring_format(&ring, memory, &g, run);
        uint32_t changes = rng_below(&rng, 4);
        for (uint32_t i = 0; i < changes; i++)
            memory[rng_below(&rng, 24)] = (uint8_t)rng_below(&rng, 256);
        detail.text[0] = 0;
        enum err e = tap_ring_open(&ring, memory, bytes, &detail);
        if (e != ERR_OK) {
            assert_true(strncmp(detail.text, "tap ring: ", 10) == 0);
            refused++;
            continue;
        }
        opened++;
        float out[2 * 65536];
        struct tap_record record;
        assert_true(tap_ring_bytes(&ring.geometry) <= bytes);
        for (uint32_t i = 0; i < 8; i++)
            assert_false(tap_ring_read(&ring, rng_u64(&rng), &record, out));
    }
    assert_true(opened > 1000 && refused > 1000);
    assert_int_equal(tap_ring_open(&ring, memory, 100, &detail), ERR_CORRUPT);
    mem_give(memory);
}

static void geometry_is_bounded(void **state)
{
    (void)state;
    static const struct tap_ring_geometry bad[] = {
        {0, 1, 1, 1},          {3, 1, 1, 1},        {1, 0, 1, 1},
        {1, 17, 1, 1},         {1, 1, 0, 1},        {1, 1, 65537, 1},
        {1, 1, 1, 0},          {1, 1, 1, 1u << 25}, {2, 16, 65536, 1u << 24},
        {1, 1, 1, UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(tap_ring_bytes(&bad[i]), 0);
}

/* ---- a writer that does not wait, a reader that must see through it ---- */

#define RECORDS 30000u
#define HIDDEN  33u

static void *write_all(void *arg)
{
    struct tap_ring *ring = arg;
    float values[2 * HIDDEN];
    for (uint32_t n = 0; n < RECORDS; n++) {
        struct tap_record record = record_of(n);
        values_of(n, values, 2 * HIDDEN);
        tap_ring_write(ring, &record, values);
    }
    return NULL;
}

static void torn_records_are_never_taken(void **state)
{
    (void)state;
    struct tap_ring_geometry g = {.type = TAP_BF16, .tap_count = 2, .hidden = HIDDEN, .slots = 4};
    uint64_t bytes = tap_ring_bytes(&g), taken = 0, lost = 0;
    void *memory = mem_take(bytes);
    struct tap_ring w, r;
    pthread_t thread;
    tap_ring_format(&w, memory, &g, 5);
    assert_int_equal(tap_ring_open(&r, memory, bytes, NULL), ERR_OK);
    assert_int_equal(pthread_create(&thread, NULL, write_all, &w), 0);
    for (uint64_t next = 0; next < RECORDS;) {
        float values[2 * HIDDEN], expected[2 * HIDDEN];
        struct tap_record record;
        uint64_t head = tap_ring_head(&r);
        if (next == head)
            continue;
        if (tap_ring_read(&r, next, &record, values)) {
            struct tap_record whole = record_of((uint32_t)next);
            values_of((uint32_t)next, expected, 2 * HIDDEN);
            assert_int_equal(record.position, next);
            assert_memory_equal(&record.id, &whole.id, sizeof whole.id);
            assert_memory_equal(values, expected, sizeof values);
            taken++;
        } else {
            lost++;
        }
        next++;
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(taken + lost, RECORDS);
    assert_true(taken >= g.slots); /* the last ones at least */
    mem_give(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(hostile_headers),
        cmocka_unit_test(geometry_is_bounded),
        cmocka_unit_test(torn_records_are_never_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
