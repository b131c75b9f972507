/* SPDX-License-Identifier: Apache-2.0 */
/* Bitwise equalities of the exact path: however the rows of a sequence are cut, batched, verified
 * or threaded, every row's logits have the same bits. */
#include "tests/model/harness.h"

#define TOKENS_MAX 333
#define SEQS       8

static struct model *model;
static uint32_t ids[TOKENS_MAX];
static uint32_t tokens;
static uint32_t vocab;
static float *expected; /* [tokens, vocab], one row at a time */

static uint32_t blocks_for(const struct test_cache *t, uint32_t count)
{
    return (count + t->kv.block_tokens - 1) / t->kv.block_tokens;
}

static void compare(const float *have, uint32_t row, uint32_t count, const char *what)
{
    if (memcmp(have, expected + (uint64_t)row * vocab, (uint64_t)count * vocab * sizeof(float)) !=
        0)
        fail_msg("%s: logits differ in rows %u to %u", what, row, row + count - 1);
}

/* Runs rows [0, tokens) in slices of at most `rows`, all with logits. */
static void run_sliced(struct model *m, uint32_t rows, uint32_t block_tokens, uint32_t layers,
                       float *out)
{
    struct rng rng;
    struct test_cache t;
    rng_init(&rng, rows * 1000 + block_tokens);
    cache_init(&t, m, block_tokens, (tokens + block_tokens - 1) / block_tokens + 3, 2, &rng);
    struct model_cursor *c = test_cursor(m, rows, 1, tokens);
    const uint32_t *blocks = cache_take(&t, blocks_for(&t, tokens));
    for (uint32_t at = 0; at < tokens;) {
        uint32_t count = tokens - at < rows ? tokens - at : rows;
        struct model_seq seq = {.state_slot = 1,
                                .position_start = at,
                                .row_count = count,
                                .fresh = at == 0,
                                .blocks = blocks,
                                .block_count = blocks_for(&t, tokens)};
        struct model_batch batch = {1, count, &seq, ids + at};
        model_begin(c, &t.kv, &batch);
        for (uint32_t l = layers; layers > 0 && l < model_info(m)->layer_count; l += layers) {
            model_advance(c, l);
            assert_int_equal(model_cursor_layer(c), l);
        }
        const float *logits = model_finish(c);
        if (out != NULL)
            memcpy(out + (uint64_t)at * vocab, logits, (uint64_t)count * vocab * sizeof(float));
        else
            compare(logits, at, count, "row slices");
        at += count;
    }
    cache_check(&t, m);
    model_cursor_destroy(&c);
    cache_fini(&t);
}

static int setup(void **state)
{
    (void)state;
    model = test_model("tests/golden/model-random", 1);
    vocab = model_info(model)->vocab_size;
    tokens =
        test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", ids, TOKENS_MAX);
    expected = mem_take_array((uint64_t)tokens * vocab, sizeof(float));
    run_sliced(model, 1, 64, 0, expected);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    mem_give(expected);
    model_destroy(&model);
    return 0;
}

static void test_row_slices(void **state)
{
    (void)state;
    static const uint32_t rows[] = {7, 17, 64, 512};
    static const uint32_t block_tokens[] = {4, 12, 64, 256};
    for (uint32_t i = 0; i < 4; i++)
        run_sliced(model, rows[i], block_tokens[i], 0, NULL);
}

static void test_layer_slices(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 5; layers += 2)
        run_sliced(model, 100, 8, layers, NULL);
}

static void test_threads(void **state)
{
    (void)state;
    for (uint32_t threads = 2; threads <= 5; threads += 3) {
        struct model *m = test_model("tests/golden/model-random", threads);
        run_sliced(m, 90, 16, 0, NULL);
        model_destroy(&m);
    }
}

/* Two cursors take turns layer by layer, as a prefill slice and a decode step do. */
static void test_two_cursors(void **state)
{
    (void)state;
    struct rng rng;
    struct test_cache t;
    rng_init(&rng, 11);
    cache_init(&t, model, 16, 64, 2, &rng);
    struct model_cursor *c[2];
    const uint32_t *blocks[2];
    uint32_t at[2] = {0, 0}, rows[2] = {60, 3};
    for (int i = 0; i < 2; i++) {
        c[i] = test_cursor(model, 60, 1, tokens);
        blocks[i] = cache_take(&t, blocks_for(&t, tokens));
    }
    for (uint32_t round = 0; round < 5; round++) {
        struct model_seq seq[2];
        struct model_batch batch[2];
        for (uint32_t i = 0; i < 2; i++) {
            seq[i] = (struct model_seq){.state_slot = i,
                                        .position_start = at[i],
                                        .row_count = rows[i],
                                        .fresh = round == 0,
                                        .blocks = blocks[i],
                                        .block_count = blocks_for(&t, tokens)};
            batch[i] = (struct model_batch){1, rows[i], &seq[i], ids + at[i]};
            model_begin(c[i], &t.kv, &batch[i]);
        }
        for (uint32_t l = 1; l <= model_info(model)->layer_count; l++)
            for (uint32_t i = 0; i < 2; i++)
                model_advance(c[i], l);
        for (uint32_t i = 0; i < 2; i++) {
            compare(model_finish(c[i]), at[i], rows[i], "two cursors");
            at[i] += rows[i];
        }
    }
    cache_check(&t, model);
    for (int i = 0; i < 2; i++)
        model_cursor_destroy(&c[i]);
    cache_fini(&t);
}

/* A sequence that goes through random plain and verify steps; each has a wanted end. */
struct walker {
    uint32_t slot, position, replay;
    const uint32_t *blocks;
    uint32_t block_count;
    uint32_t rows, right; /* of the step at hand; right = rows with true inputs */
    bool journal, started;
};

static void plan_rows(struct walker *w, struct rng *rng, uint32_t rows_max, uint32_t *out)
{
    uint32_t left = tokens - w->position;
    w->journal = rng_below(rng, 4) != 0;
    if (w->journal) {
        w->rows = 1 + rng_below(rng, MODEL_DRAFT_ROWS_MAX);
        w->rows = w->rows < left ? w->rows : left;
        w->right = 1 + rng_below(rng, w->rows);
    } else {
        w->rows = 1 + rng_below(rng, rows_max);
        w->rows = w->rows < left ? w->rows : left;
        w->right = w->rows;
    }
    for (uint32_t r = 0; r < w->rows; r++)
        out[r] = r < w->right ? ids[w->position + r] : rng_below(rng, vocab);
}

static void walk_batches(uint64_t start, uint32_t seq_count, uint32_t block_tokens)
{
    struct rng rng;
    struct test_cache t;
    struct walker w[SEQS];
    uint32_t rows_max = 24, step_ids[SEQS * 24];
    rng_init(&rng, start);
    uint32_t per_seq = (tokens + block_tokens - 1) / block_tokens;
    cache_init(&t, model, block_tokens, per_seq * seq_count + 5, seq_count + 1, &rng);
    struct model_cursor *c = test_cursor(model, SEQS * rows_max, SEQS, tokens);
    memset(w, 0, sizeof(w));
    for (uint32_t i = 0; i < seq_count; i++) {
        w[i].slot = seq_count - i;
        w[i].blocks = cache_take(&t, per_seq);
        w[i].block_count = per_seq;
    }
    for (;;) {
        struct model_seq seqs[SEQS];
        uint32_t who[SEQS], count = 0, rows = 0;
        for (uint32_t i = 0; i < seq_count; i++) {
            if (w[i].position == tokens || rng_below(&rng, 5) == 0)
                continue;
            plan_rows(&w[i], &rng, rows_max, step_ids + rows);
            seqs[count] = (struct model_seq){.state_slot = w[i].slot,
                                             .position_start = w[i].position,
                                             .row_count = w[i].rows,
                                             .replay_count = w[i].replay,
                                             .fresh = !w[i].started,
                                             .journal = w[i].journal,
                                             .blocks = w[i].blocks,
                                             .block_count = w[i].block_count};
            rows += w[i].rows;
            who[count++] = i;
        }
        bool done = true;
        for (uint32_t i = 0; i < seq_count; i++)
            done = done && w[i].position == tokens;
        if (done)
            break;
        if (count == 0)
            continue;
        struct model_batch batch = {count, rows, seqs, step_ids};
        model_begin(c, &t.kv, &batch);
        const float *logits = model_finish(c);
        for (uint32_t k = 0; k < count; k++) {
            struct walker *v = &w[who[k]];
            compare(logits, v->position, v->right, "batch of plain and verify steps");
            logits += (uint64_t)v->rows * vocab;
            v->position += v->right;
            v->replay = v->journal ? v->right : 0;
            v->started = true;
        }
    }
    cache_check(&t, model);
    model_cursor_destroy(&c);
    cache_fini(&t);
}

static void test_verify_alone(void **state)
{
    (void)state;
    static const uint32_t block_tokens[] = {4, 8, 20, 64, 256};
    for (uint32_t i = 0; i < 5; i++)
        walk_batches(100 + i, 1, block_tokens[i]);
}

static void test_verify_batched(void **state)
{
    (void)state;
    walk_batches(7, 3, 4);
    walk_batches(8, SEQS, 16);
}

/* A verify step whose rows are all thrown away leaves no trace: replay 0 from the same place. */
static void test_verify_dropped(void **state)
{
    (void)state;
    struct rng rng;
    struct test_cache t;
    rng_init(&rng, 3);
    cache_init(&t, model, 8, 50, 1, &rng);
    struct model_cursor *c = test_cursor(model, 64, 1, tokens);
    uint32_t wrong[MODEL_DRAFT_ROWS_MAX], at = 0;
    struct model_seq seq = {.blocks = cache_take(&t, 42), .block_count = 42};
    while (at < 130) {
        for (uint32_t i = 0; i < MODEL_DRAFT_ROWS_MAX; i++)
            wrong[i] = rng_below(&rng, vocab);
        seq.fresh = at == 0;
        seq.position_start = at;
        seq.journal = true;
        seq.row_count = MODEL_DRAFT_ROWS_MAX;
        model_begin(c, &t.kv, &(struct model_batch){1, seq.row_count, &seq, wrong});
        (void)model_finish(c);
        seq.journal = false;
        seq.row_count = 13;
        model_begin(c, &t.kv, &(struct model_batch){1, seq.row_count, &seq, ids + at});
        compare(model_finish(c), at, seq.row_count, "after a dropped verify step");
        at += seq.row_count;
    }
    cache_check(&t, model);
    model_cursor_destroy(&c);
    cache_fini(&t);
}

static void test_logits_from(void **state)
{
    (void)state;
    struct rng rng;
    struct test_cache t;
    rng_init(&rng, 5);
    cache_init(&t, model, 64, 12, 2, &rng);
    struct model_cursor *c = test_cursor(model, 100, 2, tokens);
    uint32_t both[70];
    memcpy(both, ids, 40 * sizeof(uint32_t));
    memcpy(both + 40, ids, 30 * sizeof(uint32_t));
    struct model_seq seqs[2] = {{.state_slot = 0,
                                 .row_count = 40,
                                 .fresh = true,
                                 .logits_from = 37,
                                 .blocks = cache_take(&t, 6),
                                 .block_count = 6},
                                {.state_slot = 1,
                                 .row_count = 30,
                                 .fresh = true,
                                 .logits_from = 29,
                                 .blocks = cache_take(&t, 6),
                                 .block_count = 6}};
    model_begin(c, &t.kv, &(struct model_batch){2, 70, seqs, both});
    const float *logits = model_finish(c);
    compare(logits, 37, 3, "logits_from");
    compare(logits + (uint64_t)3 * vocab, 29, 1, "logits_from");
    model_cursor_destroy(&c);
    cache_fini(&t);
}

/* Mutations must be seen: another token anywhere in the visible past changes later logits. */
static void test_past_matters(void **state)
{
    (void)state;
    uint32_t saved = ids[10];
    float *changed = mem_take_array((uint64_t)tokens * vocab, sizeof(float));
    ids[10] = (ids[10] + 1) % vocab;
    run_sliced(model, 64, 64, 0, changed);
    ids[10] = saved;
    assert_memory_equal(changed, expected, (size_t)10 * vocab * sizeof(float));
    for (uint32_t r = 10; r < tokens; r++)
        assert_true(memcmp(changed + (uint64_t)r * vocab, expected + (uint64_t)r * vocab,
                           vocab * sizeof(float)) != 0);
    mem_give(changed);
}

int main(void)
{
    static const struct {
        const char *name;
        enum kv_row kv, index;
    } rows[] = {{"f32 rows", KV_ROW_F32, KV_ROW_F32},
                {"fp8 rows", KV_ROW_FP8, KV_ROW_FP8},
                {"bf16 rows", KV_ROW_BF16, KV_ROW_BF16}};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_slices),   cmocka_unit_test(test_verify_batched),
        cmocka_unit_test(test_logits_from),  cmocka_unit_test(test_layer_slices),
        cmocka_unit_test(test_threads),      cmocka_unit_test(test_two_cursors),
        cmocka_unit_test(test_verify_alone), cmocka_unit_test(test_verify_dropped),
        cmocka_unit_test(test_past_matters)};
    const struct CMUnitTest some[] = {cmocka_unit_test(test_row_slices),
                                      cmocka_unit_test(test_verify_batched),
                                      cmocka_unit_test(test_logits_from)};
    int failed = 0;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        print_message("%s\n", rows[i].name);
        cache_kv_type = rows[i].kv;
        cache_index_type = rows[i].index;
        failed += i == 0 ? cmocka_run_group_tests(tests, setup, teardown)
                         : cmocka_run_group_tests(some, setup, teardown);
    }
    return failed;
}
