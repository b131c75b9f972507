/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/rng.h"
#include "lib/text/bpe.h"
#include "lib/text/token_ids.h"

#define LETTERS     3
#define MERGES      60
#define PIECE_BYTES 300
#define ROUNDS      300

/* The definition: the best pair of the whole piece, one at a time.  merges[i] makes id 256 + i. */
struct reference {
    uint32_t left[MERGES], right[MERGES];
    uint32_t count;
};

static size_t reference_encode(const struct reference *r, const uint8_t *piece, size_t count,
                               uint32_t *ids)
{
    for (size_t i = 0; i < count; i++)
        ids[i] = piece[i];
    for (;;) {
        uint32_t best = r->count;
        size_t at = 0;
        for (size_t i = 0; i + 1 < count; i++)
            for (uint32_t m = 0; m < best; m++)
                if (r->left[m] == ids[i] && r->right[m] == ids[i + 1]) {
                    best = m;
                    at = i;
                    break;
                }
        if (best == r->count)
            return count;
        ids[at] = 256 + best;
        memmove(&ids[at + 1], &ids[at + 2], (count - at - 2) * sizeof(ids[0]));
        count--;
    }
}

static bool has_pair(const struct reference *r, uint32_t left, uint32_t right)
{
    for (uint32_t i = 0; i < r->count; i++)
        if (r->left[i] == left && r->right[i] == right)
            return true;
    return false;
}

static uint32_t random_symbol(struct rng *rng, const struct reference *r)
{
    if (r->count == 0 || rng_below(rng, 2) == 0)
        return 'a' + rng_below(rng, LETTERS);
    return 256 + rng_below(rng, r->count);
}

/* Random merges, and the same in both. */
static void make_merges(struct rng *rng, struct reference *r, struct bpe *b)
{
    r->count = 0;
    assert_int_equal(bpe_init(b, MERGES), ERR_OK);
    for (uint32_t byte = 0; byte < 256; byte++)
        b->byte_ids[byte] = byte;
    while (r->count < MERGES) {
        uint32_t left = random_symbol(rng, r), right = random_symbol(rng, r);
        if (has_pair(r, left, right))
            continue;
        bpe_put(b, left, right, r->count, 256 + r->count);
        r->left[r->count] = left;
        r->right[r->count] = right;
        r->count++;
    }
}

static void compare(struct rng *rng, const struct reference *r, const struct bpe *b,
                    struct bpe_scratch *s, size_t count)
{
    uint8_t piece[PIECE_BYTES];
    uint32_t want[PIECE_BYTES];
    uint32_t letters = 1 + rng_below(rng, LETTERS);
    for (size_t i = 0; i < count; i++)
        piece[i] = (uint8_t)('a' + rng_below(rng, letters));
    size_t want_count = reference_encode(r, piece, count, want);
    struct token_ids ids;
    token_ids_init(&ids, PIECE_BYTES);
    assert_int_equal(bpe_encode(b, s, piece, count, &ids), ERR_OK);
    assert_int_equal(ids.count, want_count);
    assert_memory_equal(ids.ids, want, want_count * sizeof(want[0]));
    token_ids_fini(&ids);
}

static void test_against_definition(void **state)
{
    struct rng rng;
    struct bpe_scratch s;
    rng_init(&rng, 11);
    bpe_scratch_init(&s);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct reference r;
        struct bpe b;
        make_merges(&rng, &r, &b);
        for (size_t count = 1; count <= 40; count++)
            compare(&rng, &r, &b, &s, count);
        compare(&rng, &r, &b, &s, 41 + rng_below(&rng, PIECE_BYTES - 41));
        bpe_fini(&b);
    }
    bpe_scratch_fini(&s);
}

/* Of a pair that is put twice the later rank counts. */
static void test_pair_twice(void **state)
{
    struct bpe b;
    struct bpe_scratch s;
    struct token_ids ids;
    bpe_scratch_init(&s);
    token_ids_init(&ids, 16);
    assert_int_equal(bpe_init(&b, 3), ERR_OK);
    for (uint32_t byte = 0; byte < 256; byte++)
        b.byte_ids[byte] = byte;
    bpe_put(&b, 'a', 'b', 0, 256);
    bpe_put(&b, 'b', 'c', 1, 257);
    bpe_put(&b, 'a', 'b', 2, 256);
    assert_int_equal(b.merge_count, 2);
    assert_int_equal(bpe_encode(&b, &s, (const uint8_t *)"abc", 3, &ids), ERR_OK);
    assert_int_equal(ids.count, 2);
    assert_int_equal(ids.ids[1], 257);
    bpe_fini(&b);
    bpe_scratch_fini(&s);
    token_ids_fini(&ids);
}

static void test_full(void **state)
{
    struct bpe b;
    struct bpe_scratch s;
    struct token_ids ids;
    uint8_t piece[64];
    memset(piece, 'x', sizeof(piece));
    bpe_scratch_init(&s);
    assert_int_equal(bpe_init(&b, 0), ERR_OK);
    static const size_t counts[] = {1, 8, 64};
    for (size_t i = 0; i < 3; i++) {
        token_ids_init(&ids, counts[i]);
        assert_int_equal(bpe_encode(&b, &s, piece, counts[i], &ids), ERR_OK);
        assert_int_equal(bpe_encode(&b, &s, piece, counts[i], &ids), ERR_TOO_LARGE);
        assert_int_equal(ids.count, counts[i]);
        assert_true(ids.overflow);
        token_ids_fini(&ids);
    }
    bpe_fini(&b);
    bpe_scratch_fini(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_definition),
        cmocka_unit_test(test_pair_twice),
        cmocka_unit_test(test_full),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
