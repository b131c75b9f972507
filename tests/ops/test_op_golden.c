/* SPDX-License-Identifier: Apache-2.0 */
/* Single ops against vectors computed in double precision: bounds of tests/golden/ops/README.md,
 * tight enough to see a wrong eps, a Sinkhorn round more or another order of ties. */
#include "tests/ops/check.h"

#define BOUND     2e-6
#define BOUND_PRE 5e-7

static struct safetensors *golden;
static struct op_table table;

static int setup(void **state)
{
    (void)state;
    golden = check_golden();
    op_table_ref(&table);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    safetensors_close(&golden);
    return 0;
}

static void test_norms(void **state)
{
    (void)state;
    struct check k = {0};
    float *y = check_words(&k, 8 * 96);
    CHECK_RUN(&k, &table, rms_norm, .x = check_load(&k, golden, "rms.x"),
              .w = check_load(&k, golden, "rms.w"), .y = y, .rows = 8, .groups = 1, .n = 96,
              .x_stride = 96, .y_stride = 96, .eps = 1e-5);
    check_close(golden, "rms.y", y, BOUND);
    CHECK_RUN(&k, &table, l2norm, .x = check_load(&k, golden, "l2norm.x"), .y = y, .rows = 8,
              .groups = 1, .n = 96, .x_stride = 96, .y_stride = 96, .eps = 1e-6, .scale = 1);
    check_close(golden, "l2norm.y", y, BOUND);
    CHECK_RUN(&k, &table, layer_norm, .x = check_load(&k, golden, "index_k_norm.x"),
              .w = check_load(&k, golden, "index_k_norm.w"),
              .b = check_load(&k, golden, "index_k_norm.b"), .y = y, .rows = 8, .n = 96,
              .x_stride = 96, .y_stride = 96, .eps = 1e-6);
    check_close(golden, "index_k_norm.y", y, BOUND);
    check_end(&k);
}

static void mhc_case(int n)
{
    struct check k = {0};
    char name[32];
#define NAME(tail) (snprintf(name, sizeof(name), "mhc%d." tail, n), name)
    float *pre = check_words(&k, 24), *post = check_words(&k, 24), *mix = check_words(&k, 96);
    float *x = check_words(&k, 6 * 64), *h = check_load(&k, golden, NAME("h"));
    struct op_weight fn = {.data = check_load(&k, golden, NAME("fn")), .dtype = OP_F32};
    float *scale = check_load(&k, golden, NAME("scale"));
    float *base = check_load(&k, golden, NAME("base"));
    CHECK_RUN(&k, &table, mhc_pre, .h = h, .fn = fn, .scale = scale, .base = base, .pre = pre,
              .post = post, .mix = mix, .x = x, .rows = 6, .hidden = 64, .sinkhorn_iters = 20,
              .hc_eps = 1e-6, .norm_eps = 1e-5);
    check_close(golden, NAME("pre"), pre, BOUND_PRE);
    check_close(golden, NAME("post"), post, BOUND);
    check_close(golden, NAME("C"), mix, BOUND);
    check_close(golden, NAME("x"), x, BOUND);
    CHECK_RUN(&k, &table, mhc_post, .h = h, .y = check_load(&k, golden, NAME("y")), .post = post,
              .mix = mix, .rows = 6, .hidden = 64);
    check_close(golden, NAME("merged"), h, BOUND);
#undef NAME
    check_end(&k);
}

static void test_mhc(void **state)
{
    (void)state;
    for (int n = 0; n < 4; n++)
        mhc_case(n);
}

static void test_swiglu(void **state)
{
    (void)state;
    struct check k = {0};
    float *y = check_words(&k, 121);
    CHECK_RUN(&k, &table, swiglu, .gate = check_load(&k, golden, "swiglu.gate"),
              .up = check_load(&k, golden, "swiglu.up"), .y = y, .rows = 11, .n = 11, .limit = 10);
    check_close(golden, "swiglu.y", y, BOUND);
    check_end(&k);
}

static void test_router(void **state)
{
    (void)state;
    struct check k = {0};
    int32_t *chosen = check_words(&k, 32);
    float *weights = check_words(&k, 32);
    CHECK_RUN(&k, &table, router, .logits = check_load(&k, golden, "router.logits"),
              .bias = check_load(&k, golden, "router.bias"), .chosen = chosen, .weights = weights,
              .rows = 8, .experts = 12, .top_k = 4, .scale = 2.5);
    assert_memory_equal(chosen, check_find(golden, "router.experts")->data, 32 * sizeof(int32_t));
    check_close(golden, "router.weights", weights, BOUND);
    check_end(&k);
}

static void test_index_select(void **state)
{
    (void)state;
    struct check k = {0};
    const uint8_t *attend = check_find(golden, "index_select.attend")->data;
    float *score = check_load(&k, golden, "index_select.score");
    double *wide = (double *)check_words(&k, (size_t)2 * 43 * 10);
    uint32_t *selected = check_words(&k, 43 * 19), *counts = check_words(&k, 43);
    uint32_t *seq_of = check_words(&k, 43);
    for (int i = 0; i < 430; i++)
        wide[i] = score[i];
    memset(seq_of, 0, 43 * sizeof(uint32_t));
    struct op_seq seq = {.row_count = 43};
    CHECK_RUN(&k, &table, index_select, .seqs = &seq, .seq_of = seq_of, .score = wide,
              .score_stride = 10, .selected = selected, .selected_count = counts, .row_count = 43,
              .kpool = 4, .pools_kept = 4, .selected_stride = 19);
    for (uint32_t r = 0; r < 43; r++) {
        uint8_t have[43] = {0};
        for (uint32_t j = 0; j < counts[r]; j++) {
            assert_true(selected[r * 19 + j] < 43);
            assert_true(j == 0 || selected[r * 19 + j] > selected[r * 19 + j - 1]);
            have[selected[r * 19 + j]] = 1;
        }
        assert_memory_equal(have, attend + (size_t)r * 43, 43);
    }
    check_end(&k);
}

static void test_index_pool(void **state)
{
    (void)state;
    struct check k = {0};
    float *pools = check_words(&k, 5 * 32), *slot = check_words(&k, 11 * 2 * 32);
    uint32_t *seq_of = check_words(&k, 20), block = 0;
    memset(seq_of, 0, 20 * sizeof(uint32_t));
    float *key = check_load(&k, golden, "index_pool.k");
    float *gate = check_load(&k, golden, "index_pool.gate");
    float *ape = check_load(&k, golden, "index_pool.ape");
    struct op_pages pages = {
        .base = (uint8_t *)pools, .block_stride = 5 * 32 * sizeof(float), .rows_per_block = 5};
    /* In two launches that cut a pool: its first half comes from the ring. */
    for (uint32_t at = 0; at < 20; at += 10) {
        struct op_seq seq = {.row_count = 10,
                             .position_start = at,
                             .fresh = at == 0,
                             .slot = (uint8_t *)slot,
                             .blocks = &block};
        CHECK_RUN(&k, &table, index_pool, .seqs = &seq, .seq_of = seq_of, .key = key + at * 32,
                  .gate = gate + at * 32, .ape = ape, .pages = pages, .seq_count = 1, .rows = 10,
                  .dim = 32, .kpool = 4, .ring_rows = 11);
    }
    check_close(golden, "index_pool.pool", pools, BOUND);
    check_end(&k);
}

static void test_short_conv(void **state)
{
    (void)state;
    struct check k = {0};
    float *slot = check_words(&k, 11 * 32), *y = check_words(&k, 70 * 32);
    memcpy(slot, check_find(golden, "short_conv.history")->data, 3 * 32 * sizeof(float));
    float *x = check_load(&k, golden, "short_conv.x"), *w = check_load(&k, golden, "short_conv.w");
    for (uint32_t at = 0; at < 70; at += 35) {
        struct op_seq seq = {.row_count = 35, .position_start = 3 + at, .slot = (uint8_t *)slot};
        CHECK_RUN(&k, &table, short_conv, .seqs = &seq, .x = x + at * 32, .w = w, .y = y + at * 32,
                  .seq_count = 1, .row_count = 35, .channels = 32, .taps = 4, .ring_rows = 11);
    }
    check_close(golden, "short_conv.y", y, BOUND);
    float last[3 * 32];
    for (uint32_t i = 0; i < 3; i++)
        memcpy(last + i * 32, slot + (70 + i) % 11 * 32, 32 * sizeof(float));
    check_close(golden, "short_conv.history_out", last, BOUND);
    check_end(&k);
}

/* rows in launches of `step`, each of them a verify step with all rows accepted if journal. */
static void kda_case(uint32_t step, uint32_t journal)
{
    struct check k = {0};
    uint64_t row_floats = op_kda_journal_floats(2, 16);
    float *slot = check_words(&k, 512 + 8 * row_floats), *o = check_words(&k, 70 * 32);
    memcpy(slot, check_find(golden, "kda.state")->data, 512 * sizeof(float));
    float *q = check_load(&k, golden, "kda.q"), *key = check_load(&k, golden, "kda.k");
    float *v = check_load(&k, golden, "kda.v"), *g = check_load(&k, golden, "kda.log_decay");
    float *beta = check_load(&k, golden, "kda.beta");
    uint32_t replay = 0;
    for (uint32_t at = 0; at < 70; at += step) {
        uint32_t rows = 70 - at < step ? 70 - at : step;
        struct op_seq seq = {.row_count = rows,
                             .position_start = at,
                             .replay_count = replay,
                             .journal = journal && at + rows < 70,
                             .slot = (uint8_t *)slot};
        CHECK_RUN(&k, &table, kda, .seqs = &seq, .q = q + at * 32, .k = key + at * 32,
                  .v = v + at * 32, .qkv_stride = 32, .log_decay = g + at * 32,
                  .beta = beta + at * 2, .o = o + at * 32, .journal_offset = 512 * sizeof(float),
                  .seq_count = 1, .row_count = rows, .heads = 2, .dim = 16, .journal_rows = 8);
        replay = journal ? rows : 0;
    }
    check_close(golden, "kda.o", o, BOUND);
    check_close(golden, "kda.state_out", slot, BOUND);
    check_end(&k);
}

static void test_kda(void **state)
{
    (void)state;
    kda_case(70, 0);
    kda_case(17, 0);
    kda_case(8, 1);
    kda_case(3, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norms),        cmocka_unit_test(test_mhc),
        cmocka_unit_test(test_swiglu),       cmocka_unit_test(test_router),
        cmocka_unit_test(test_index_select), cmocka_unit_test(test_index_pool),
        cmocka_unit_test(test_short_conv),   cmocka_unit_test(test_kda)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
