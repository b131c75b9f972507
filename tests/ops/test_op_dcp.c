/* SPDX-License-Identifier: Apache-2.0 */
/* Rows shared over ranks: ownership by brute force, choice of pools with many ties against the
 * whole, merging of attention against attention over everything, empty parts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/op_dcp.h"
#include "kernels/op_index.h"
#include "kernels/op_mla.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"

static const struct op_ctx one = {NULL, NULL};

static void test_ownership(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 4; ranks++) {
        for (uint32_t interleave = 1; interleave <= 64; interleave++) {
            uint32_t next[4] = {0};
            for (uint32_t p = 0; p < 700; p++) {
                uint32_t owners = 0;
                for (uint32_t r = 0; r < ranks; r++) {
                    struct op_shard s = {r, ranks, interleave};
                    if (!op_shard_owns(&s, p))
                        continue;
                    owners++;
                    /* Own rows follow each other without gaps. */
                    assert_int_equal(op_shard_local(&s, p), next[r]++);
                }
                assert_int_equal(owners, 1);
            }
        }
    }
}

#define KPOOL      4u
#define POOLS_MAX  200u
#define KEPT_MAX   40u
#define ROWS       3u
#define SELECT_MAX ((KEPT_MAX + 1) * KPOOL)

static double score[ROWS * POOLS_MAX];
static struct op_candidate all[4 * ROWS * KEPT_MAX];
static uint32_t whole[ROWS * SELECT_MAX], whole_count[ROWS];
static uint32_t part[ROWS * SELECT_MAX], part_count[ROWS];
static uint8_t seen[ROWS][POOLS_MAX * KPOOL + KPOOL];

static void choose_once(struct rng *rng)
{
    uint32_t ranks = 2 + rng_below(rng, 3), kept = 1 + rng_below(rng, KEPT_MAX);
    uint32_t interleave = KPOOL << rng_below(rng, 4), levels = 1 + rng_below(rng, 6);
    uint32_t tokens = 1 + rng_below(rng, POOLS_MAX * KPOOL - ROWS);
    const struct op_seq seq = {.row_count = ROWS, .position_start = tokens - 1};
    const uint32_t seq_of[ROWS] = {0};
    for (uint32_t i = 0; i < ROWS * POOLS_MAX; i++)
        score[i] = (double)rng_below(rng, levels) - 2; /* ties everywhere, negative ones too */
    struct op_index_select_args select = {.seqs = &seq,
                                          .seq_of = seq_of,
                                          .score = score,
                                          .score_stride = POOLS_MAX,
                                          .selected = whole,
                                          .selected_count = whole_count,
                                          .row_count = ROWS,
                                          .kpool = KPOOL,
                                          .pools_kept = kept,
                                          .selected_stride = SELECT_MAX};
    assert_int_equal(op_index_select_ref(&select, &one), ERR_OK);
    for (uint32_t r = 0; r < ranks; r++) {
        struct op_index_best_args best = {.seqs = &seq,
                                          .seq_of = seq_of,
                                          .score = score,
                                          .score_stride = POOLS_MAX,
                                          .best = all + r * ROWS * kept,
                                          .shard = {r, ranks, interleave / KPOOL},
                                          .row_count = ROWS,
                                          .kpool = KPOOL,
                                          .pools_kept = kept};
        assert_int_equal(op_index_best_ref(&best, &one), ERR_OK);
    }
    memset(seen, 0, sizeof(seen));
    for (uint32_t r = 0; r < ranks; r++) {
        struct op_index_merge_args merge = {.seqs = &seq,
                                            .seq_of = seq_of,
                                            .all = all,
                                            .selected = part,
                                            .selected_count = part_count,
                                            .shard = {r, ranks, interleave},
                                            .row_count = ROWS,
                                            .kpool = KPOOL,
                                            .pools_kept = kept,
                                            .selected_stride = SELECT_MAX};
        assert_int_equal(op_index_merge_ref(&merge, &one), ERR_OK);
        for (uint32_t row = 0; row < ROWS; row++) {
            for (uint32_t i = 0; i < part_count[row]; i++) {
                uint32_t p = part[row * SELECT_MAX + i];
                assert_true(op_shard_owns(&merge.shard, p));
                assert_true(i == 0 || p > part[row * SELECT_MAX + i - 1]);
                assert_int_equal(seen[row][p]++, 0);
            }
        }
    }
    /* Together the ranks attend to exactly what one rank would. */
    for (uint32_t row = 0; row < ROWS; row++) {
        uint32_t count = 0;
        for (uint32_t p = 0; p < sizeof(seen[row]); p++)
            count += seen[row][p];
        assert_int_equal(count, whole_count[row]);
        for (uint32_t i = 0; i < count; i++)
            assert_int_equal(seen[row][whole[row * SELECT_MAX + i]], 1);
    }
}

static void test_choice(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 1);
    for (int i = 0; i < 5000; i++)
        choose_once(&rng);
}

/* A peer that sends nonsense may spoil the choice, never memory. */
static void test_hostile_candidates(void **state)
{
    (void)state;
    struct rng rng;
    const struct op_seq seq = {.row_count = ROWS, .position_start = 600};
    const uint32_t seq_of[ROWS] = {0};
    rng_init(&rng, 2);
    for (int turn = 0; turn < 500; turn++) {
        struct op_index_best_args best = {.seqs = &seq,
                                          .seq_of = seq_of,
                                          .score = score,
                                          .score_stride = POOLS_MAX,
                                          .best = all,
                                          .shard = {0, 2, 1},
                                          .row_count = ROWS,
                                          .kpool = KPOOL,
                                          .pools_kept = 20};
        assert_int_equal(op_index_best_ref(&best, &one), ERR_OK);
        for (uint32_t i = ROWS * 20; i < 2 * ROWS * 20; i++)
            all[i] = (struct op_candidate){turn % 3 ? rng_unit(&rng) : (double)NAN,
                                           rng_below(&rng, 4) ? rng_u32(&rng) : OP_NO_POOL, 0};
        struct op_index_merge_args merge = {.seqs = &seq,
                                            .seq_of = seq_of,
                                            .all = all,
                                            .selected = part,
                                            .selected_count = part_count,
                                            .shard = {0, 2, KPOOL},
                                            .row_count = ROWS,
                                            .kpool = KPOOL,
                                            .pools_kept = 20,
                                            .selected_stride = SELECT_MAX};
        assert_int_equal(op_index_merge_ref(&merge, &one), ERR_OK);
        for (uint32_t row = 0; row < ROWS; row++) {
            assert_true(part_count[row] <= 20 * KPOOL + KPOOL - 1);
            for (uint32_t i = 0; i < part_count[row]; i++)
                assert_true(part[row * SELECT_MAX + i] <= 600 + row);
        }
    }
}

#define LATENT 24u
#define HEADS  2u
#define TOKENS 60u
#define BLOCK  16u /* rows of a block here */

static float latents[2 * TOKENS * LATENT], rows_of[4][8 * BLOCK * LATENT];
static float q[HEADS * LATENT], expected[HEADS * LATENT], merged[HEADS * LATENT];
static float parts[4 * HEADS * (LATENT + 1)];
static double work[HEADS * TOKENS];

static enum err attend(const struct op_pages *pages, const uint32_t *selected, uint32_t count,
                       float *o, float *lse)
{
    static const uint32_t blocks[8] = {3, 1, 0, 2, 5, 4, 7, 6}, row_seq[1] = {0};
    const struct op_seq seq = {.blocks = blocks};
    struct op_mla_attend_args a = {.seqs = &seq,
                                   .seq_of = row_seq,
                                   .q_abs = q,
                                   .pages = *pages,
                                   .selected = selected,
                                   .selected_count = &count,
                                   .o_abs = o,
                                   .lse = lse,
                                   .work = work,
                                   .rows = 1,
                                   .heads = HEADS,
                                   .latent = LATENT,
                                   .selected_stride = TOKENS,
                                   .scale = 0.7};
    return op_mla_attend_ref(&a, &one);
}

static void merge_once(struct rng *rng, uint32_t ranks, uint32_t interleave, uint32_t count)
{
    static const uint32_t blocks[8] = {3, 1, 0, 2, 5, 4, 7, 6};
    uint32_t selected[TOKENS], own[TOKENS];
    uint64_t stride = HEADS * (LATENT + 1);
    struct op_pages pages = {.block_stride = BLOCK * LATENT * sizeof(float),
                             .rows_per_block = BLOCK};
    for (uint32_t i = 0; i < TOKENS * LATENT; i++)
        latents[i] = (float)(rng_unit(rng) - 0.5);
    for (uint32_t i = 0; i < HEADS * LATENT; i++)
        q[i] = (float)(10 * rng_unit(rng) - 5);
    for (uint32_t r = 0; r <= ranks && r < 4; r++) {
        struct op_shard s = {r, ranks, interleave};
        for (uint32_t p = 0; p < TOKENS; p++) {
            /* The last table is that of a single rank. */
            uint32_t at = r == ranks ? p : op_shard_local(&s, p);
            if (r < ranks && !op_shard_owns(&s, p))
                continue;
            memcpy(rows_of[r] + (blocks[at / BLOCK] * BLOCK + at % BLOCK) * LATENT,
                   latents + p * LATENT, LATENT * sizeof(float));
        }
    }
    for (uint32_t i = 0; i < count; i++)
        selected[i] = i * (TOKENS / count);
    pages.base = (uint8_t *)rows_of[ranks];
    assert_int_equal(attend(&pages, selected, count, expected, NULL), ERR_OK);
    for (uint32_t r = 0; r < ranks; r++) {
        uint32_t some = 0;
        pages.base = (uint8_t *)rows_of[r];
        pages.shard = (struct op_shard){r, ranks, interleave};
        for (uint32_t i = 0; i < count; i++)
            if (op_shard_owns(&pages.shard, selected[i]))
                own[some++] = selected[i];
        float *o = parts + r * stride, *lse = o + HEADS * LATENT;
        assert_int_equal(attend(&pages, own, some, o, lse), ERR_OK);
        assert_true(some > 0 || (lse[0] == -INFINITY && o[0] == 0));
    }
    struct op_mla_merge_args a = {.parts = parts,
                                  .lse = parts + HEADS * LATENT,
                                  .o_abs = merged,
                                  .part_stride = stride,
                                  .ranks = ranks,
                                  .items = HEADS,
                                  .latent = LATENT};
    assert_int_equal(op_mla_merge_ref(&a, &one), ERR_OK);
    for (uint32_t i = 0; i < HEADS * LATENT; i++)
        assert_true(fabsf(merged[i] - expected[i]) <= 3e-7f);
}

static void test_merge(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 3);
    for (uint32_t ranks = 2; ranks <= 3; ranks++)
        for (uint32_t interleave = 4; interleave <= 64; interleave *= 4)
            for (uint32_t count = 1; count <= TOKENS; count += 7)
                merge_once(&rng, ranks, interleave, count);
}

static void test_merge_empty(void **state)
{
    (void)state;
    uint64_t stride = HEADS * (LATENT + 1);
    float *lse = parts + HEADS * LATENT;
    struct op_mla_merge_args a = {.parts = parts,
                                  .lse = lse,
                                  .o_abs = merged,
                                  .part_stride = stride,
                                  .ranks = 2,
                                  .items = 1,
                                  .latent = LATENT};
    for (uint32_t d = 0; d < LATENT; d++) {
        parts[d] = (float)d;
        parts[stride + d] = NAN; /* of an empty part nothing is used */
    }
    lse[0] = 3;
    static const float empty[] = {-INFINITY, NAN, INFINITY};
    for (uint32_t i = 0; i < ARRAY_COUNT(empty); i++) {
        lse[stride] = empty[i];
        assert_int_equal(op_mla_merge_ref(&a, &one), ERR_OK);
        for (uint32_t d = 0; d < LATENT; d++)
            assert_true(merged[d] == (float)d);
    }
    lse[0] = -INFINITY;
    assert_int_equal(op_mla_merge_ref(&a, &one), ERR_OK);
    for (uint32_t d = 0; d < LATENT; d++)
        assert_true(merged[d] == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ownership),          cmocka_unit_test(test_choice),
        cmocka_unit_test(test_hostile_candidates), cmocka_unit_test(test_merge),
        cmocka_unit_test(test_merge_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
