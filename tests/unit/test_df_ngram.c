/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "drafter/df_ngram.h"
#include "lib/base/clock.h"
#include "lib/base/rng.h"

#define CONTEXT 3000u

struct rig {
    struct df_ngram g;
    void *memory;
};

static void rig_open(struct rig *r, uint32_t context_max, uint64_t seed)
{
    size_t bytes = df_ngram_bytes(context_max);
    assert_int_equal(posix_memalign(&r->memory, 64, bytes), 0);
    memset(r->memory, 0xa5, bytes);
    df_ngram_init(&r->g, r->memory, bytes, context_max, seed);
}

static void rig_close(struct rig *r)
{
    free(r->memory);
}

/* What the head comment promises, by looking at every earlier place. */
static uint32_t naive(const uint32_t *ids, uint32_t length, uint32_t match_min, uint32_t match_max,
                      uint32_t draft_count, uint32_t *ret_ids)
{
    for (uint32_t n = match_max; n >= match_min; n--) {
        for (uint32_t from = length; from-- > n;) {
            if (memcmp(ids + from - n, ids + length - n, n * sizeof(*ids)) != 0)
                continue;
            for (uint32_t i = 0; i < draft_count; i++)
                ret_ids[i] = from + i < length ? ids[from + i] : ret_ids[from + i - length];
            return draft_count;
        }
    }
    return 0;
}

static void compare(const struct df_ngram *g, const uint32_t *ids, uint32_t length, struct rng *rng)
{
    uint32_t got[16], want[16];
    uint32_t match_max = 1 + rng_below(rng, DF_NGRAM_MAX),
             match_min = 1 + rng_below(rng, match_max);
    uint32_t count = 1 + rng_below(rng, 16);
    assert_int_equal(g->length, length);
    assert_memory_equal(g->ids, ids, length * sizeof(*ids));
    uint32_t found = df_ngram_propose(g, match_min, match_max, count, got);
    assert_int_equal(found, naive(ids, length, match_min, match_max, count, want));
    assert_memory_equal(got, want, found * sizeof(*got));
}

/* Appends and truncations of all sizes over alphabets that repeat much or little. */
static void agrees_with_naive_search(void **state)
{
    for (uint64_t seed = 1; seed <= 30; seed++) {
        struct rng rng;
        struct rig r;
        static uint32_t ids[CONTEXT];
        uint32_t length = 0;
        rng_init(&rng, seed);
        rig_open(&r, CONTEXT, rng_u64(&rng));
        uint32_t alphabet = 1 + rng_below(&rng, seed % 3 == 0 ? 4 : seed % 3 == 1 ? 40 : 5000);
        for (int step = 0; step < 300; step++) {
            uint32_t room = CONTEXT - length, count = rng_below(&rng, step % 50 == 0 ? 500 : 12);
            count = count < room ? count : room;
            for (uint32_t i = 0; i < count; i++)
                ids[length + i] = rng_below(&rng, alphabet);
            assert_int_equal(df_ngram_append(&r.g, ids + length, count), ERR_OK);
            length += count;
            compare(&r.g, ids, length, &rng);
            if (rng_below(&rng, 3) == 0) {
                length -= rng_below(&rng, (step % 40 == 0 ? length : length / 20) + 1);
                df_ngram_truncate(&r.g, length);
                compare(&r.g, ids, length, &rng);
            }
        }
        rig_close(&r);
    }
}

static void small_cases(void **state)
{
    struct rig r;
    rig_open(&r, 16, 1);
    uint32_t out[16];
    assert_int_equal(df_ngram_propose(&r.g, 1, 4, 8, out), 0);
    const uint32_t a[] = {UINT32_MAX};
    assert_int_equal(df_ngram_append(&r.g, a, 1), ERR_OK);
    assert_int_equal(df_ngram_propose(&r.g, 1, 4, 8, out), 0);
    assert_int_equal(df_ngram_append(&r.g, a, 1), ERR_OK);
    assert_int_equal(df_ngram_propose(&r.g, 1, 4, 8, out), 8); /* a run goes on */
    for (int i = 0; i < 8; i++)
        assert_int_equal(out[i], UINT32_MAX);
    df_ngram_truncate(&r.g, 0);

    /* The longest match wins over a more recent shorter one. */
    const uint32_t b[] = {1, 2, 3, 50, 9, 3, 60, 1, 2, 3};
    assert_int_equal(df_ngram_append(&r.g, b, 10), ERR_OK);
    assert_int_equal(df_ngram_propose(&r.g, 1, 4, 2, out), 2);
    assert_int_equal(out[0], 50);
    assert_int_equal(df_ngram_propose(&r.g, 1, 1, 2, out), 2);
    assert_int_equal(out[0], 60);

    /* Full: refused whole, nothing changed. */
    assert_int_equal(df_ngram_append(&r.g, b, 7), ERR_CONTEXT);
    assert_int_equal(r.g.length, 10);
    assert_int_equal(df_ngram_append(&r.g, b, 6), ERR_OK);
    assert_int_equal(df_ngram_append(&r.g, b, 1), ERR_CONTEXT);
    assert_int_equal(df_ngram_append(&r.g, b, 0), ERR_OK);
    rig_close(&r);
}

/* Long repetitive input in one go: linear, not quadratic. */
static void long_input_is_quick(void **state)
{
    uint32_t count = 1u << 19;
    struct rig r;
    rig_open(&r, count, 3);
    uint32_t *ids = malloc(count * sizeof(*ids));
    assert_non_null(ids);
    struct rng rng;
    rng_init(&rng, 5);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = i % 3 == 0 ? 7 : rng_below(&rng, 100);
    uint64_t start_us = clock_mono_us();
    for (uint32_t at = 0; at < count; at += 4096)
        assert_int_equal(df_ngram_append(&r.g, ids + at, 4096), ERR_OK);
    uint32_t out[16];
    for (int i = 0; i < 10000; i++)
        assert_int_equal(df_ngram_propose(&r.g, 1, 4, 16, out), 16);
    df_ngram_truncate(&r.g, count / 2);
    assert_true(clock_mono_us() - start_us < 20000000);
    free(ids);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_naive_search),
        cmocka_unit_test(small_cases),
        cmocka_unit_test(long_input_is_quick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
