/* SPDX-License-Identifier: Apache-2.0 */
/* numerics = fast: close to exact on every position of the golden prompts and answers, and bit for
 * bit the same alone and in a batch, threaded or not, in slices that are multiples of 64. */
#include "tests/model/harness.h"

#include <jansson.h>
#include <math.h>

#define TOKENS_MAX 4096
#define SLICE      512
#define BLOCK      64

static struct model *exact, *fast, *fast_threads;
static uint32_t vocab;

static struct model *load(const char *below, enum model_numerics numerics, uint32_t threads)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    test_path(path, sizeof(path), below);
    struct model_options options = {.directory = path, .numerics = numerics, .threads = threads};
    if (model_load(&options, &m, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return m;
}

static int setup(void **state)
{
    (void)state;
    exact = load("deploy/demo", MODEL_EXACT, 2);
    fast = load("deploy/demo", MODEL_FAST, 1);
    fast_threads = load("deploy/demo", MODEL_FAST, 3);
    vocab = model_info(fast)->vocab_size;
    print_message("exact: %s\nfast: %s\n", model_info(exact)->kernels, model_info(fast)->kernels);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    model_destroy(&exact);
    model_destroy(&fast);
    model_destroy(&fast_threads);
    return 0;
}

static uint32_t blocks_for(uint32_t tokens)
{
    return (tokens + BLOCK - 1) / BLOCK;
}

/* Logits of all rows of a sequence that is run in slices of `slice`. */
static void run_rows(struct model *m, const uint32_t *ids, uint32_t tokens, uint32_t slice,
                     float *out)
{
    struct rng rng;
    struct test_cache t;
    rng_init(&rng, slice);
    cache_init(&t, m, BLOCK, blocks_for(tokens) + 2, 1, &rng);
    struct model_cursor *c = test_cursor(m, slice, 1, tokens);
    const uint32_t *blocks = cache_take(&t, blocks_for(tokens));
    for (uint32_t at = 0; at < tokens; at += slice) {
        uint32_t count = tokens - at < slice ? tokens - at : slice;
        struct model_seq seq = {.position_start = at,
                                .row_count = count,
                                .fresh = at == 0,
                                .blocks = blocks,
                                .block_count = blocks_for(tokens)};
        struct model_batch batch = {1, count, &seq, ids + at};
        model_begin(c, &t.kv, &batch);
        memcpy(out + (uint64_t)at * vocab, model_finish(c), (uint64_t)count * vocab * 4);
    }
    cache_check(&t, m);
    model_cursor_destroy(&c);
    cache_fini(&t);
}

struct agreement {
    uint64_t positions, same_top;
    double kld;
};

static void compare_row(const float *want, const float *have, struct agreement *a)
{
    uint32_t top_w = 0, top_h = 0;
    double sum_w = 0, sum_h = 0, kld = 0;
    for (uint32_t v = 1; v < vocab; v++) {
        top_w = want[v] > want[top_w] ? v : top_w;
        top_h = have[v] > have[top_h] ? v : top_h;
    }
    for (uint32_t v = 0; v < vocab; v++) {
        sum_w += exp((double)want[v] - want[top_w]);
        sum_h += exp((double)have[v] - have[top_h]);
    }
    double log_w = log(sum_w) + want[top_w], log_h = log(sum_h) + have[top_h];
    for (uint32_t v = 0; v < vocab; v++)
        kld += exp(want[v] - log_w) * ((want[v] - log_w) - (have[v] - log_h));
    a->positions++;
    a->same_top += top_w == top_h;
    a->kld += kld;
}

/* Prompt and greedy answer of a line of greedy.jsonl. */
static uint32_t read_case(const char *line, uint32_t *ids)
{
    char name[256];
    json_t *root = json_loads(line, 0, NULL);
    assert_non_null(root);
    snprintf(name, sizeof(name), "%s.prompt_ids", json_string_value(json_object_get(root, "name")));
    uint32_t count =
        test_ids("tests/golden/model-trained/golden.safetensors", name, ids, TOKENS_MAX);
    json_t *answer = json_object_get(root, "ids");
    for (size_t i = 0; i < json_array_size(answer); i++) {
        assert_true(count < TOKENS_MAX);
        ids[count++] = (uint32_t)json_integer_value(json_array_get(answer, i));
    }
    json_decref(root);
    return count;
}

static void test_close_to_exact(void **state)
{
    (void)state;
    char path[1024];
    test_path(path, sizeof(path), "tests/golden/model-trained/greedy.jsonl");
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    uint32_t *ids = mem_take_array(TOKENS_MAX, sizeof(*ids));
    float *want = mem_take_array((uint64_t)TOKENS_MAX * vocab, sizeof(float));
    float *have = mem_take_array((uint64_t)TOKENS_MAX * vocab, sizeof(float));
    struct agreement a = {0};
    char *line = NULL;
    size_t bytes = 0;
    uint32_t cases = 0;
    while (getline(&line, &bytes, f) > 0) {
        uint32_t tokens = read_case(line, ids);
        run_rows(exact, ids, tokens, SLICE, want);
        run_rows(fast, ids, tokens, SLICE, have);
        for (uint32_t r = 0; r < tokens; r++)
            compare_row(want + (uint64_t)r * vocab, have + (uint64_t)r * vocab, &a);
        cases++;
    }
    free(line);
    fclose(f);
    double top = (double)a.same_top / (double)a.positions, kld = a.kld / (double)a.positions;
    print_message("%u cases, %llu positions: top-1 %.5f, mean KLD %.3g\n", cases,
                  (unsigned long long)a.positions, top, kld);
    assert_int_equal(cases, 51);
    assert_true(top >= 0.995);
    assert_true(kld <= 1e-4);
    mem_give(ids);
    mem_give(want);
    mem_give(have);
}

#define RUN_TOKENS 300

static uint32_t run_ids[RUN_TOKENS];
static float *run_want;

static void same_rows(const float *have, uint32_t row, uint32_t count, const char *what)
{
    if (memcmp(have, run_want + (uint64_t)row * vocab, (uint64_t)count * vocab * 4) != 0)
        fail_msg("%s: logits differ in rows %u to %u", what, row, row + count - 1);
}

static void test_slices(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 9);
    for (uint32_t i = 0; i < RUN_TOKENS; i++)
        run_ids[i] = rng_below(&rng, vocab);
    float *have = mem_take_array((uint64_t)RUN_TOKENS * vocab, sizeof(float));
    run_want = mem_take_array((uint64_t)RUN_TOKENS * vocab, sizeof(float));
    run_rows(fast, run_ids, RUN_TOKENS, 320, run_want);
    static const uint32_t slices[] = {64, 128, 192, 256};
    for (size_t i = 0; i < sizeof(slices) / sizeof(slices[0]); i++) {
        run_rows(i % 2 == 0 ? fast : fast_threads, run_ids, RUN_TOKENS, slices[i], have);
        same_rows(have, 0, RUN_TOKENS, "slices");
    }
    mem_give(have);
}

/* Three sequences of other lengths beside the one that is watched, which decodes and verifies from
 * row 128 on. */
static void test_batch(void **state)
{
    (void)state;
    enum { SEQS = 4, STEPS = 12, ROWS = 256 };
    struct rng rng;
    struct test_cache t;
    struct model *m = fast_threads;
    rng_init(&rng, 10);
    cache_init(&t, m, BLOCK, SEQS * 8, SEQS, &rng);
    struct model_cursor *c = test_cursor(m, ROWS * SEQS, SEQS, 512);
    const uint32_t *blocks[SEQS];
    uint32_t at[SEQS] = {0}, ids[ROWS * SEQS];
    for (uint32_t s = 0; s < SEQS; s++)
        blocks[s] = cache_take(&t, 8);
    float *alone = mem_take_array((uint64_t)STEPS * vocab, sizeof(float));
    for (int batched = 0; batched < 2; batched++) {
        at[0] = 0;
        for (uint32_t step = 0; step < STEPS + 1; step++) {
            struct model_seq seqs[SEQS];
            uint32_t rows = 0, count = batched ? SEQS : 1;
            for (uint32_t s = 0; s < count; s++) {
                uint32_t own = s == 0 ? (step == 0 ? 128 : 1) : 1 + rng_below(&rng, 20);
                own = s != 0 && at[s] + own > 500 ? 1 : own;
                seqs[s] = (struct model_seq){.state_slot = s,
                                             .position_start = at[s],
                                             .row_count = own,
                                             .fresh = at[s] == 0,
                                             .logits_from = own - 1,
                                             .blocks = blocks[s],
                                             .block_count = 8};
                for (uint32_t r = 0; r < own; r++, rows++)
                    ids[rows] = s == 0 ? run_ids[at[0] + r] : rng_below(&rng, vocab);
                at[s] += own;
            }
            struct model_batch batch = {count, rows, seqs, ids};
            model_begin(c, &t.kv, &batch);
            const float *logits = model_finish(c);
            if (step == 0) {
                same_rows(logits, 127, 1, batched ? "prefill in a batch" : "prefill alone");
                continue;
            }
            float *kept = alone + (uint64_t)(step - 1) * vocab;
            if (!batched)
                memcpy(kept, logits, vocab * sizeof(float));
            else if (memcmp(kept, logits, vocab * sizeof(float)) != 0)
                fail_msg("step %u: other logits in a batch", step);
        }
    }
    cache_check(&t, m);
    mem_give(alone);
    mem_give(run_want);
    model_cursor_destroy(&c);
    cache_fini(&t);
}

static void with_rows(enum kv_row kv, enum kv_row index)
{
    cache_kv_type = kv;
    cache_index_type = index;
    test_slices(NULL);
    test_batch(NULL);
    cache_kv_type = cache_index_type = KV_ROW_F32;
}

static void test_bf16_rows(void **state)
{
    (void)state;
    with_rows(KV_ROW_BF16, KV_ROW_BF16);
}

static void test_fp8_rows(void **state)
{
    (void)state;
    with_rows(KV_ROW_FP8, KV_ROW_FP8);
}

/* The same rows give the same attention, fast or exact; and what fp8 itself costs is bounded. */
static void test_fp8_close(void **state)
{
    (void)state;
    enum { N = 300 };
    struct rng rng;
    rng_init(&rng, 12);
    uint32_t count = test_ids("tests/golden/model-trained/golden.safetensors",
                              "48_needle.prompt_ids", run_ids, N);
    float *want = mem_take_array((uint64_t)N * vocab, sizeof(float));
    float *have = mem_take_array((uint64_t)N * vocab, sizeof(float));
    float *plain = mem_take_array((uint64_t)N * vocab, sizeof(float));
    run_rows(exact, run_ids, count, 64, plain);
    cache_kv_type = cache_index_type = KV_ROW_FP8;
    run_rows(exact, run_ids, count, 64, want);
    run_rows(fast, run_ids, count, 64, have);
    cache_kv_type = cache_index_type = KV_ROW_F32;
    struct agreement same = {0}, cost = {0};
    for (uint32_t r = 0; r < count; r++) {
        compare_row(want + (uint64_t)r * vocab, have + (uint64_t)r * vocab, &same);
        compare_row(plain + (uint64_t)r * vocab, want + (uint64_t)r * vocab, &cost);
    }
    print_message("fp8 rows, %u positions: fast against exact mean KLD %.3g; against f32 rows "
                  "top-1 %.4f, mean KLD %.3g\n",
                  count, same.kld / count, (double)cost.same_top / count, cost.kld / count);
    assert_true(count > 100);
    assert_true(same.kld / count <= 1e-4);
    assert_true(cost.kld / count > 0); /* they are stored in another way */
    assert_true(cost.kld / count <= 0.01);
    mem_give(want);
    mem_give(have);
    mem_give(plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_close_to_exact), cmocka_unit_test(test_slices),
        cmocka_unit_test(test_batch),          cmocka_unit_test(test_bf16_rows),
        cmocka_unit_test(test_fp8_rows),       cmocka_unit_test(test_fp8_close)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
