/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/rng.h"
#include "worker/wk_batch.h"
#include "worker/wk_blocks.h"
#include "worker/wk_cost.h"
#include "worker/wk_ids.h"
#include "worker/wk_plan.h"

static void fill(struct wk_plan *p, uint64_t step)
{
    wk_plan_clear(p, step, 3, WK_PLAN_PREFILL);
    p->begin = true;
    p->layer_end = 4;
    p->seq_count = 2;
    p->row_count = 5;
    p->block_count = 2;
    p->setup_count = 1;
    memset(p->seqs, 0, 2 * sizeof *p->seqs);
    memset(p->setups, 0, sizeof *p->setups);
    for (uint32_t i = 0; i < 5; i++)
        p->ids[i] = 100 + i;
    p->blocks[0] = 8;
    p->blocks[1] = 9;
    p->seqs[0] = (struct wk_plan_seq){
        .entry = 1, .row_count = 3, .logits_from = 3, .fresh = true, .block_count = 1};
    p->history[0] = 0;
    p->seqs[1] = (struct wk_plan_seq){.entry = 2,
                                      .setup = WK_NONE,
                                      .position_start = 40,
                                      .row_count = 2,
                                      .logits_from = 1,
                                      .ids_at = 3,
                                      .block_count = 1,
                                      .blocks_at = 1};
    p->setups[0].seed = 77;
    p->setups[0].bias_count = 2;
    p->setups[0].bias_values[1] = 1.5f;
    wk_plan_seal(p);
}

static bool same(const struct hash128 *a, const struct hash128 *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static void the_hash_covers_every_field(void **state)
{
    (void)state;
    struct wk_plan *p = wk_plan_create(16, 64, 64, 64);
    fill(p, 9);
    struct hash128 first = p->hash;
    fill(p, 9);
    assert_true(same(&first, &p->hash));
    fill(p, 10);
    assert_false(same(&first, &p->hash));
#define CHANGES(statement)                                                                         \
    do {                                                                                           \
        fill(p, 9);                                                                                \
        statement;                                                                                 \
        wk_plan_seal(p);                                                                           \
        assert_false(same(&first, &p->hash));                                                      \
    } while (0)
    CHANGES(p->epoch++);
    CHANGES(p->kind = WK_PLAN_DECODE);
    CHANGES(p->begin = false);
    CHANGES(p->finish = true);
    CHANGES(p->layer_end++);
    CHANGES(p->ids[4]++);
    CHANGES(p->blocks[1]++);
    CHANGES(p->seqs[0].entry++);
    CHANGES(p->seqs[0].state_slot++);
    CHANGES(p->seqs[1].position_start++);
    CHANGES(p->seqs[1].replay_count++);
    CHANGES(p->seqs[1].journal = true);
    CHANGES(p->seqs[1].final_count = 1);
    CHANGES(p->seqs[1].block_first++);
    CHANGES(p->seqs[1].restore = true);
    CHANGES(p->seqs[1].restore_slot++);
    CHANGES(p->seqs[1].snapshot = true);
    CHANGES(p->seqs[1].snapshot_slot++);
    CHANGES(p->seqs[1].history_count++);
    CHANGES(p->history[p->history_total++] = 1);
    CHANGES(p->setups[0].seed++);
    CHANGES(p->setups[0].temperature = 0.5);
    CHANGES(p->setups[0].bias_values[1] = 1.25f);
    CHANGES(p->setups[0].banned_count = 1);
    CHANGES(p->setups[0].output_tokens_min = 1);
    wk_plan_destroy(&p);
    assert_null(p);
}

static void only_the_next_plan_is_admitted(void **state)
{
    (void)state;
    struct wk_plan *p = wk_plan_create(16, 64, 64, 64);
    struct err_detail d;
    fill(p, 9);
    assert_int_equal(wk_plan_admit(p, 8, 3, &d), ERR_OK);
    assert_int_equal(wk_plan_admit(p, 9, 3, &d), ERR_INVALID); /* a duplicate */
    assert_int_equal(wk_plan_admit(p, 7, 3, &d), ERR_INVALID); /* a gap */
    assert_int_equal(wk_plan_admit(p, 8, 4, &d), ERR_EPOCH);
    p->encoding[p->encoding_bytes - 1] ^= 1;
    assert_int_equal(wk_plan_admit(p, 8, 3, &d), ERR_CORRUPT);
    wk_plan_destroy(&p);
}

static void the_ring_keeps_the_last_plans(void **state)
{
    (void)state;
    struct wk_plan *p = wk_plan_create(16, 64, 64, 64);
    struct wk_plan_ring *r = wk_plan_ring_create(2000); /* holds but a few encodings */
    struct wk_plan_past past;
    assert_false(wk_plan_ring_at(r, 0, &past));
    for (uint64_t step = 1; step <= 1000; step++) {
        fill(p, step);
        wk_plan_ring_add(r, p, step * 10);
        wk_plan_ring_done(r, step, step);
        assert_true(wk_plan_ring_at(r, 0, &past));
        assert_int_equal(past.bytes, p->encoding_bytes);
        assert_memory_equal(past.encoding, p->encoding, past.bytes);
        uint32_t with_bytes = 0, back = 0;
        for (; wk_plan_ring_at(r, back, &past); back++) {
            assert_int_equal(past.step, step - back);
            assert_int_equal(past.step_us, step - back);
            if (past.encoding != NULL) {
                struct hash128 h = hash_xxh3_once(past.encoding, past.bytes);
                assert_true(same(&h, &past.hash));
                with_bytes++;
            }
        }
        assert_int_equal(back, step < WK_PLAN_RING_COUNT ? step : WK_PLAN_RING_COUNT);
        assert_true(with_bytes >= 1 && with_bytes <= 2000 / past.bytes);
    }
    wk_plan_ring_destroy(&r);
    wk_plan_destroy(&p);
}

static void costs_are_learnt(void **state)
{
    (void)state;
    struct wk_cost c;
    struct rng r;
    rng_init(&r, 11);
    wk_cost_init(&c, 0, 50); /* far off: the truth is 700 a row and 20 ms fixed */
    for (int i = 0; i < 400; i++) {
        double rows = 1 + rng_below(&r, 512), context = rng_below(&r, 20000);
        double share = (1 + rng_below(&r, 8)) / 8.0;
        double us = 500 + share * (20000 + 700 * rows + 0.01 * rows * context);
        wk_cost_learn(&c, rows, context, share, us * (0.97 + 0.06 * rng_unit(&r)));
    }
    for (int i = 0; i < 100; i++) {
        double rows = 16 + rng_below(&r, 496), context = rng_below(&r, 20000);
        double us = 500 + 20000 + 700 * rows + 0.01 * rows * context;
        double guess = wk_cost_predict(&c, rows, context, 1);
        assert_true(guess > 0.9 * us && guess < 1.1 * us);
    }
    for (int i = 0; i < 400; i++) /* the machine becomes three times slower */
        wk_cost_learn(&c, 256, 1000, 1, 3 * (20500 + 700.0 * 256));
    double slow = wk_cost_predict(&c, 256, 1000, 1);
    assert_true(slow > 2.7 * 199700 && slow < 3.3 * 199700);
    /* One-sided for long, then something else: what was not seen is not made up. */
    wk_cost_init(&c, 0, 1300);
    for (int i = 0; i < 3000; i++)
        wk_cost_learn(&c, 1 + rng_below(&r, 3), rng_below(&r, 200), 1, 150 + rng_below(&r, 400));
    assert_true(wk_cost_predict(&c, 2, 100, 1) < 700);
    assert_true(wk_cost_predict(&c, 100, 0, 1) < 100000);
    for (int i = 0; i < 30; i++)
        wk_cost_learn(&c, 100, 100, 1, 13000 + rng_below(&r, 2000));
    double whole = wk_cost_predict(&c, 100, 100, 1);
    assert_true(whole > 10000 && whole < 18000);
    wk_cost_init(&c, 0, 1);
    for (int i = 0; i < 5000; i++) /* always the same: nothing winds up */
        wk_cost_learn(&c, 8, 0, 1, 1000);
    assert_true(wk_cost_predict(&c, 8, 0, 1) > 900 && wk_cost_predict(&c, 8, 0, 1) < 1100);
}

static void slices_fit_their_time(void **state)
{
    (void)state;
    struct wk_cost c;
    wk_cost_init(&c, 0, 1000);
    assert_int_equal(wk_batch_rows(&c, 512, 0, 1e9), 512);
    uint32_t rows = wk_batch_rows(&c, 512, 0, 400000);
    assert_true(rows <= 400 && rows >= 280);
    assert_int_equal(wk_batch_rows(&c, 512, 0, 1), 1);
    assert_int_equal(wk_batch_layers(&c, 400, 0, 8, 0, 8, 200000), 4);
    assert_int_equal(wk_batch_layers(&c, 400, 0, 8, 3, 8, 200000), 3);
    assert_int_equal(wk_batch_layers(&c, 400, 0, 2, 0, 8, 200000), 2);
    assert_int_equal(wk_batch_layers(&c, 400, 0, 8, 0, 8, 1), 1);
}

static void pages_of_ids(void **state)
{
    (void)state;
    uint32_t text[1000], out[1000];
    for (uint32_t i = 0; i < 1000; i++)
        text[i] = i * 7;
    struct wk_ids *s = wk_ids_create(1500, 3, 1000);
    uint64_t all = wk_ids_free(s);
    assert_true(wk_ids_append(s, 0, text, 300));
    assert_true(wk_ids_append(s, 1, text, 900));
    assert_true(wk_ids_append(s, 0, text + 300, 5));
    assert_false(wk_ids_append(s, 1, text, 101));  /* context */
    assert_false(wk_ids_append(s, 2, text, 1000)); /* pool */
    assert_int_equal(wk_ids_count(s, 2), 0);
    assert_int_equal(wk_ids_at(s, 0, 304), 304 * 7);
    wk_ids_copy(s, 1, 200, 700, out);
    assert_memory_equal(out, text + 200, 700 * sizeof *out);
    wk_ids_drop(s, 1);
    assert_true(wk_ids_append(s, 2, text, 1000));
    wk_ids_copy(s, 0, 0, 305, out);
    assert_memory_equal(out, text, 305 * sizeof *out);
    wk_ids_drop(s, 0);
    wk_ids_drop(s, 2);
    assert_int_equal(wk_ids_free(s), all);
    wk_ids_destroy(&s);
}

static void replies_of_kvmgr_are_checked(void **state)
{
    (void)state;
    uint32_t table[8], ids[] = {3, 4, 99};
    struct wk_arena_shape shape = {
        .block_tokens = 16, .block_count = 50, .slot_count = 6, .live_slots = 4};
    struct wk_blocks b;
    struct hash128 hashes[8];
    wk_blocks_init(&b, table, hashes, 8);
    struct msg_kv_open_reply good = {.lease = 5, .state_slot = 3, .block_count = 2, .blocks = ids};
    struct msg_kv_open_reply r = good;
    b.state = WK_KV_OPENING;
    r.block_count = 3; /* block 99 of 50 */
    assert_int_equal(wk_blocks_opened(&b, &shape, &r, 2, 1), ERR_CORRUPT);
    b.state = WK_KV_OPENING;
    r = good;
    r.state_slot = 4;
    assert_int_equal(wk_blocks_opened(&b, &shape, &r, 2, 1), ERR_CORRUPT);
    b.state = WK_KV_OPENING;
    assert_int_equal(wk_blocks_opened(&b, &shape, &good, 3, 1), ERR_CORRUPT);
    b.state = WK_KV_OPENING;
    r = good;
    r.code = ERR_KV_FULL;
    assert_int_equal(wk_blocks_opened(&b, &shape, &r, 2, 7), ERR_KV_FULL);
    assert_int_equal(b.full_since_us, 7);
    b.state = WK_KV_OPENING;
    r.code = 12345;
    assert_int_equal(wk_blocks_opened(&b, &shape, &r, 2, 7), ERR_INTERNAL);
    b.state = WK_KV_OPENING;
    assert_int_equal(wk_blocks_opened(&b, &shape, &good, 2, 8), ERR_OK);
    assert_int_equal(wk_blocks_room(&b, &shape), 32);
    assert_int_equal(b.committed, 0);
    struct msg_kv_extend_reply e = {.lease = 5, .blocks_have = 2, .block_count = 1, .blocks = ids};
    assert_int_equal(wk_blocks_extended(&b, &shape, &e, 9), ERR_OK); /* nobody asked */
    assert_int_equal(b.count, 2);
    b.extend = WK_EXTEND_ASKED;
    assert_int_equal(wk_blocks_extended(&b, &shape, &e, 9), ERR_OK);
    assert_int_equal(b.count, 3);
    b.extend = WK_EXTEND_ASKED;
    assert_int_equal(wk_blocks_extended(&b, &shape, &e, 9), ERR_OK); /* of an earlier question */
    assert_int_equal(b.count, 3);
    e.blocks_have = 3;
    e.blocks = ids + 2;
    assert_int_equal(wk_blocks_extended(&b, &shape, &e, 9), ERR_CORRUPT);
    e.code = ERR_NOT_FOUND;
    assert_int_equal(wk_blocks_extended(&b, &shape, &e, 9), ERR_NOT_FOUND);
}

/* What comes from the cache: whole blocks that were asked for, with a state of their own. */
static void reuse_is_checked(void **state)
{
    (void)state;
    uint32_t table[8], ids[] = {3, 4, 5};
    struct hash128 hashes[8];
    struct wk_arena_shape shape = {
        .block_tokens = 16, .block_count = 50, .slot_count = 6, .live_slots = 4};
    const struct msg_kv_open_reply good = {.lease = 5,
                                           .state_slot = 3,
                                           .reusable_tokens = 32,
                                           .snapshot_slot = 4,
                                           .block_count = 3,
                                           .blocks = ids};
    struct wk_blocks b;
    wk_blocks_init(&b, table, hashes, 8);
    b.hash_count = 3;
    for (uint32_t i = 0; i <= 6; i++) {
        struct msg_kv_open_reply r = good;
        b.asked_max = i == 0 ? 31 : 40;
        b.hash_count = i == 1 ? 1 : 3;
        r.reusable_tokens = i == 2 ? 24 : 32;
        r.snapshot_slot = i == 3 ? 3 : i == 4 ? 6 : i == 5 ? UINT32_MAX : 4;
        b.state = WK_KV_OPENING;
        assert_int_equal(wk_blocks_opened(&b, &shape, &r, 3, 1), i == 6 ? ERR_OK : ERR_CORRUPT);
    }
    assert_int_equal(b.reused, 32);
    assert_int_equal(b.committed, 2);
    assert_int_equal(b.snapped, 32);
    assert_int_equal(b.restore_slot, 4);
    wk_blocks_reset(&b);
    assert_int_equal(b.hash_count, 3); /* hashes belong to the tokens, not to the lease */
    assert_int_equal(b.reused + b.committed + b.snapped, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_hash_covers_every_field),
        cmocka_unit_test(only_the_next_plan_is_admitted),
        cmocka_unit_test(the_ring_keeps_the_last_plans),
        cmocka_unit_test(costs_are_learnt),
        cmocka_unit_test(slices_fit_their_time),
        cmocka_unit_test(pages_of_ids),
        cmocka_unit_test(replies_of_kvmgr_are_checked),
        cmocka_unit_test(reuse_is_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
