/* SPDX-License-Identifier: Apache-2.0 */
/* Live states kept as f32 and bf16 snapshots, and made live again. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "lib/base/rng.h"
#include "lib/model/model.h"
#include "worker/wk_state.h"

#define LIVE   3u
#define KEPT   2u
#define GUARD  64u   /* between bodies: not a byte of it may change */
#define FILLER 0xa5u /* what is there before */

struct world {
    struct model_kv kv;
    uint64_t state_bytes;
};

/* Bodies at their exact size between guards; a sanitizer sees what leaves the buffers. */
static struct world world(uint32_t floats, enum kv_row type)
{
    struct world w = {.state_bytes = floats * sizeof(float)};
    uint64_t kept_bytes = type == KV_ROW_BF16 ? w.state_bytes / 2 : w.state_bytes;
    w.kv.slot_count = LIVE;
    w.kv.snapshot_count = KEPT;
    w.kv.snapshot_type = type;
    w.kv.slot_stride = w.state_bytes + GUARD;
    w.kv.snapshot_stride = kept_bytes + GUARD;
    w.kv.slots = aligned_alloc(64, LIVE * w.kv.slot_stride);
    uint64_t bytes = (KEPT * w.kv.snapshot_stride + 63) / 64 * 64;
    w.kv.snapshots = aligned_alloc(64, bytes);
    assert_true(w.kv.slots != NULL && w.kv.snapshots != NULL);
    memset(w.kv.slots, FILLER, LIVE * w.kv.slot_stride);
    memset(w.kv.snapshots, FILLER, bytes);
    return w;
}

static void world_end(struct world *w)
{
    free(w->kv.slots);
    free(w->kv.snapshots);
}

static uint32_t *live(const struct world *w, uint32_t slot)
{
    return (uint32_t *)(void *)(w->kv.slots + slot * w->kv.slot_stride);
}

static void *kept(const struct world *w, uint32_t slot)
{
    return w->kv.snapshots + (slot - LIVE) * w->kv.snapshot_stride;
}

static bool filled(const void *from, const void *to)
{
    for (const uint8_t *at = from; at < (const uint8_t *)to; at++)
        if (*at != FILLER)
            return false;
    return true;
}

static double value_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* What the nearest bf16 is, by distances in double, which are exact.  Behind the largest comes
 * 2^128, which rounds as if it were the next number and is written as infinity. */
static uint32_t nearest(uint32_t bits)
{
    uint32_t below = (bits & 0x7fffffffu) >> 16, above = below + 1, sign = (bits >> 16) & 0x8000u;
    double x = fabs(value_of(bits));
    if (!isfinite(x))
        return sign | below;
    double from = x - value_of(below << 16);
    double to = (above == 0x7f80u ? ldexp(1, 128) : value_of(above << 16)) - x;
    assert_true(from >= 0 && to >= 0);
    return sign | (from < to || (from == to && below % 2 == 0) ? below : above);
}

/* Every upper half with the lower halves around both ends and the middle. */
static void floats_round_to_the_nearest_even(void **state)
{
    (void)state;
    static const uint32_t lower[] = {0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xffff};
    struct world w = world(65536, KV_ROW_BF16);
    for (uint32_t n = 0; n < sizeof lower / sizeof *lower; n++) {
        for (uint32_t i = 0; i < 65536; i++)
            live(&w, 1)[i] = i << 16 | lower[n];
        wk_state_keep(&w.kv, LIVE + 1, 1, w.state_bytes);
        const uint16_t *got = kept(&w, LIVE + 1);
        for (uint32_t i = 0; i < 65536; i++) {
            uint32_t bits = i << 16 | lower[n];
            if (isnan(value_of(bits)))
                continue;
            if (got[i] != nearest(bits))
                fail_msg("%08x became %04x, %04x is nearest", bits, got[i], nearest(bits));
        }
    }
    world_end(&w);
}

static void nan_and_infinity_stay(void **state)
{
    (void)state;
    /* Payload in the lower half alone, in both, all ones: cut or rounded up these are no NaN. */
    static const uint32_t bits[16] = {0x7f800001, 0x7f80ffff, 0x7fc00000, 0x7fffffff,
                                      0xff800001, 0xff808000, 0xffc12345, 0xffffffff,
                                      0x7f800000, 0xff800000, 0x7f7fffff, 0xff7fffff,
                                      0x00000000, 0x80000000, 0x00000001, 0x80000001};
    struct world w = world(16, KV_ROW_BF16);
    memcpy(live(&w, 0), bits, sizeof bits);
    wk_state_keep(&w.kv, LIVE, 0, w.state_bytes);
    wk_state_restore(&w.kv, 2, LIVE, w.state_bytes);
    for (uint32_t i = 0; i < 8; i++) {
        assert_true(isnan(value_of(live(&w, 2)[i])));
        assert_int_equal(live(&w, 2)[i] >> 31, bits[i] >> 31);
    }
    assert_int_equal(live(&w, 2)[6] >> 16, 0xffc1); /* the payload that there is room for */
    static const uint32_t want[8] = {0x7f800000, 0xff800000, 0x7f800000, 0xff800000,
                                     0x00000000, 0x80000000, 0x00000000, 0x80000000};
    assert_memory_equal(live(&w, 2) + 8, want, sizeof want);
    world_end(&w);
}

/* f32 gives back every bit.  bf16: what was kept once is kept the same again, and no value is
 * further off than half a unit in the last of its eight bits. */
static void round_trips(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 7);
    for (uint32_t type = 0; type < 2; type++) {
        enum kv_row row = type == 0 ? KV_ROW_F32 : KV_ROW_BF16;
        struct world w = world(4096 + 16, row);
        uint32_t floats = (uint32_t)(w.state_bytes / sizeof(float));
        for (uint32_t i = 0; i < floats; i++)
            live(&w, 0)[i] = rng_u32(&rng) & ~0x40000000u; /* below 2 */
        wk_state_keep(&w.kv, LIVE + 1, 0, w.state_bytes);
        wk_state_restore(&w.kv, 2, LIVE + 1, w.state_bytes);
        for (uint32_t i = 0; i < floats; i++) {
            double was = value_of(live(&w, 0)[i]), is = value_of(live(&w, 2)[i]);
            if (row == KV_ROW_F32)
                assert_int_equal(live(&w, 0)[i], live(&w, 2)[i]);
            else
                assert_true(fabs(was - is) <= fmax(fabs(was) / 256, ldexp(1, -134)));
        }
        wk_state_keep(&w.kv, LIVE, 2, w.state_bytes);
        assert_memory_equal(kept(&w, LIVE), kept(&w, LIVE + 1),
                            row == KV_ROW_F32 ? w.state_bytes : w.state_bytes / 2);
        world_end(&w);
    }
}

/* A copy touches its own body to the last byte and nothing else. */
static void nothing_beside_is_touched(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {16, 32, 48, 1008};
    for (uint32_t n = 0; n < 2 * sizeof sizes / sizeof *sizes; n++) {
        enum kv_row row = n % 2 ? KV_ROW_BF16 : KV_ROW_F32;
        struct world w = world(sizes[n / 2], row);
        uint64_t kept_bytes = w.kv.snapshot_stride - GUARD;
        uint8_t *end = w.kv.snapshots + KEPT * w.kv.snapshot_stride;
        memset(live(&w, 1), 0x3f, w.state_bytes);
        wk_state_keep(&w.kv, LIVE, 1, w.state_bytes);
        assert_true(filled((uint8_t *)kept(&w, LIVE) + kept_bytes, end));
        for (uint64_t i = 0; i < kept_bytes; i++) /* 0x3f3f3f3f is nearest to 0x3f3f */
            assert_int_equal(((uint8_t *)kept(&w, LIVE))[i], 0x3f);
        wk_state_keep(&w.kv, LIVE + 1, 1, w.state_bytes);
        assert_true(filled(end - GUARD, end));
        wk_state_restore(&w.kv, 2, LIVE + 1, w.state_bytes);
        assert_true(
            filled((uint8_t *)live(&w, 2) + w.state_bytes, w.kv.slots + 3 * w.kv.slot_stride));
        assert_true(filled((uint8_t *)live(&w, 1) + w.state_bytes, live(&w, 2)));
        assert_true(filled(live(&w, 0), live(&w, 1)));
        assert_false(filled((uint8_t *)live(&w, 2) + w.state_bytes - 1,
                            (uint8_t *)live(&w, 2) + w.state_bytes));
        world_end(&w);
    }
}

static bool aborts(void (*copy)(const struct model_kv *, uint32_t, uint32_t, uint64_t),
                   const struct world *w, uint32_t to, uint32_t from, uint64_t bytes)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        (void)close(STDERR_FILENO);
        copy(&w->kv, to, from, bytes);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void wrong_slots_and_sizes_abort(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 2; n++) {
        struct world w = world(64, n ? KV_ROW_BF16 : KV_ROW_F32);
        uint64_t bytes = w.state_bytes;
        assert_false(aborts(wk_state_keep, &w, LIVE + 1, LIVE - 1, bytes));
        assert_true(aborts(wk_state_keep, &w, LIVE - 1, 0, bytes));    /* live */
        assert_true(aborts(wk_state_keep, &w, LIVE + KEPT, 0, bytes)); /* beyond the last */
        assert_true(aborts(wk_state_keep, &w, UINT32_MAX, 0, bytes));
        assert_true(aborts(wk_state_keep, &w, LIVE, LIVE, bytes));       /* from a kept one */
        assert_true(aborts(wk_state_keep, &w, LIVE, 0, bytes - 32));     /* not of 64 */
        assert_true(aborts(wk_state_keep, &w, LIVE, 0, 2 * bytes + 64)); /* beyond the stride */
        assert_false(aborts(wk_state_restore, &w, LIVE - 1, LIVE + 1, bytes));
        assert_true(aborts(wk_state_restore, &w, LIVE, LIVE, bytes));
        assert_true(aborts(wk_state_restore, &w, 0, LIVE - 1, bytes));
        assert_true(aborts(wk_state_restore, &w, 0, LIVE + KEPT, bytes));
        assert_true(aborts(wk_state_restore, &w, 0, LIVE, bytes - 32));
        assert_true(aborts(wk_state_restore, &w, 0, LIVE, 2 * bytes + 64));
        uint64_t kept = w.kv.snapshot_stride, live = w.kv.slot_stride;
        w.kv.snapshot_stride = (n ? bytes / 2 : bytes) - 32;
        assert_true(aborts(wk_state_keep, &w, LIVE, 0, bytes));
        w.kv.snapshot_stride = kept;
        w.kv.slot_stride = bytes - 32;
        assert_true(aborts(wk_state_keep, &w, LIVE, 0, bytes));
        w.kv.slot_stride = live;
        assert_false(aborts(wk_state_keep, &w, LIVE, 0, bytes));
        w.kv.snapshot_type = KV_ROW_FP8;
        assert_true(aborts(wk_state_keep, &w, LIVE, 0, bytes));
        world_end(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(floats_round_to_the_nearest_even),
        cmocka_unit_test(nan_and_infinity_stay),
        cmocka_unit_test(round_trips),
        cmocka_unit_test(nothing_beside_is_touched),
        cmocka_unit_test(wrong_slots_and_sizes_abort),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
