/* SPDX-License-Identifier: Apache-2.0 */
/* Every variant against the reference, bit for bit, over nasty shapes; row invariance; splits. */
#include "tests/ops/check.h"

#include "kernels/op_dtype.h"

/* Splits a launch at random places and runs the parts backwards: no result may notice. */
static void run_split(void *pool, uint32_t items, op_range_fn fn, const void *arg)
{
    struct rng *rng = pool;
    uint32_t end = items;
    while (end > 0) {
        uint32_t begin = end - 1 - rng_below(rng, end < 9 ? end : 9);
        fn(arg, begin, end);
        end = begin;
    }
}

static struct op_table ref, best;

static int setup(void **state)
{
    (void)state;
    op_table_ref(&ref);
    op_table_cpu(&best, OP_EXACT, op_cpu_best());
    return 0;
}

/* A weight of any format with the values of x as far as the format has them. */
static struct op_weight make_weight(struct check *k, size_t count, enum op_dtype dtype,
                                    struct rng *rng)
{
    float *wide = check_random(k, count, rng, 2);
    if (dtype == OP_F32)
        return (struct op_weight){.data = wide, .dtype = OP_F32};
    uint16_t *narrow = check_words(k, (count + 1) / 2);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &wide[i], sizeof(bits));
        narrow[i] = dtype == OP_BF16 ? (uint16_t)(bits >> 16)
                                     : (uint16_t)((bits >> 16 & 0x8000) | rng_below(rng, 0x7c00));
    }
    return (struct op_weight){.data = narrow, .dtype = dtype};
}

static void linear_case(struct rng *rng, enum op_dtype dtype, uint32_t rows, uint32_t in,
                        uint32_t out)
{
    struct check k = {0};
    float *x = check_random(&k, (size_t)rows * in, rng, 3);
    struct op_weight w = make_weight(&k, (size_t)in * out, dtype, rng);
    float *y = check_words(&k, (size_t)rows * out), *z = check_words(&k, (size_t)rows * out);
    CHECK_RUN(&k, &ref, linear, .x = x, .w = w, .y = y, .rows = rows, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t o = 0; o < out; o++) {
            double sum = 0, size = 0;
            for (uint32_t i = 0; i < in; i++) {
                double product = (double)op_weight_at(&w, (uint64_t)o * in + i) * x[r * in + i];
                sum += product;
                size += fabs(product);
            }
            assert_true(fabs(y[r * out + o] - sum) <= 1e-7 * fabs(sum) + 1e-12 * size);
        }
    }
    k.ctx = (struct op_ctx){run_split, rng};
    CHECK_RUN(&k, &best, linear, .x = x, .w = w, .y = z, .rows = rows, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    if (memcmp(y, z, (size_t)rows * out * sizeof(float)) != 0)
        fail_msg("linear: variant differs, dtype %d, rows %u, in %u, out %u", (int)dtype, rows, in,
                 out);
    for (uint32_t r = 0; r < rows; r++) { /* alone, the same bits */
        CHECK_RUN(&k, &best, linear, .x = x + (size_t)r * in, .w = w, .y = z, .rows = 1, .in = in,
                  .out = out, .x_stride = in, .y_stride = out);
        assert_memory_equal(z, y + (size_t)r * out, out * sizeof(float));
    }
    check_end(&k);
}

static void test_linear(void **state)
{
    (void)state;
    static const uint32_t ins[] = {1, 7, 8, 9, 64, 511, 512, 513, 1030};
    static const uint32_t outs[] = {1, 2, 3, 4, 5, 33};
    struct rng rng;
    rng_init(&rng, 1);
    for (int dtype = OP_F32; dtype <= OP_F16; dtype++)
        for (size_t i = 0; i < sizeof(ins) / sizeof(ins[0]); i++)
            for (size_t o = 0; o < sizeof(outs) / sizeof(outs[0]); o++)
                linear_case(&rng, (enum op_dtype)dtype, 1 + rng_below(&rng, 6), ins[i], outs[o]);
}

static void moe_case(struct rng *rng, uint32_t rows, uint32_t experts, uint32_t top_k, uint32_t in,
                     uint32_t out)
{
    struct check k = {0};
    uint32_t pairs = rows * top_k;
    float *logits = check_random(&k, (size_t)rows * experts, rng, 4);
    float *bias = check_random(&k, experts, rng, 1), *weights = check_words(&k, pairs);
    float *x = check_random(&k, (size_t)rows * in, rng, 1);
    int32_t *chosen = check_words(&k, pairs);
    uint32_t *offsets = check_words(&k, experts + 1), *pair_rows = check_words(&k, pairs);
    uint32_t *pair_of = check_words(&k, pairs);
    struct op_weight w[16];
    assert_true(experts <= 16);
    for (uint32_t e = 0; e < experts; e++)
        w[e] = make_weight(&k, (size_t)in * out, (enum op_dtype)(e % 3), rng);
    float *y = check_words(&k, (size_t)pairs * out), *z = check_words(&k, (size_t)pairs * out);
    float *sum = check_words(&k, (size_t)rows * out);
    float *shared = check_random(&k, (size_t)rows * out, rng, 1);
    CHECK_RUN(&k, &ref, router, .logits = logits, .bias = bias, .chosen = chosen,
              .weights = weights, .rows = rows, .experts = experts, .top_k = top_k, .scale = 2.5);
    CHECK_RUN(&k, &ref, moe_dispatch, .chosen = chosen, .offsets = offsets, .pair_rows = pair_rows,
              .pair_of = pair_of, .rows = rows, .experts = experts, .top_k = top_k);
    assert_int_equal(offsets[experts], pairs);
    CHECK_RUN(&k, &ref, grouped_linear, .x = x, .w = w, .y = y, .offsets = offsets,
              .x_rows = pair_rows, .experts = experts, .pairs_max = pairs, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    k.ctx = (struct op_ctx){run_split, rng};
    CHECK_RUN(&k, &best, grouped_linear, .x = x, .w = w, .y = z, .offsets = offsets,
              .x_rows = pair_rows, .experts = experts, .pairs_max = pairs, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    assert_memory_equal(y, z, (size_t)pairs * out * sizeof(float));
    CHECK_RUN(&k, &ref, moe_combine, .out = y, .pair_of = pair_of, .weights = weights,
              .shared = shared, .y = sum, .rows = rows, .top_k = top_k, .hidden = out);
    for (uint32_t r = 0; r < rows; r++) { /* by the definition, one expert at a time */
        for (uint32_t o = 0; o < out; o++) {
            double want = 0;
            for (uint32_t j = 0; j < top_k; j++) {
                int32_t e = chosen[r * top_k + j];
                double dot = 0;
                for (uint32_t i = 0; i < in; i++)
                    dot += (double)op_weight_at(&w[e], (uint64_t)o * in + i) * x[r * in + i];
                want += weights[r * top_k + j] * dot;
            }
            want += shared[r * out + o];
            assert_true(fabs(sum[r * out + o] - want) <= 1e-5 * fmax(1, fabs(want)));
        }
    }
    check_end(&k);
}

static void test_moe(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 2);
    moe_case(&rng, 1, 1, 1, 8, 4);
    moe_case(&rng, 1, 16, 3, 9, 5);
    moe_case(&rng, 23, 5, 5, 16, 7);
    moe_case(&rng, 40, 16, 2, 33, 12);
}

/* Absorbed attention over scattered pages equals the expanded form. */
static void test_mla(void **state)
{
    (void)state;
    enum { HEADS = 3, NOPE = 10, V = 6, LATENT = 20, TOKENS = 13, ROWS = 2 };
    struct check k = {0};
    struct rng rng;
    rng_init(&rng, 3);
    struct op_weight kv_b = make_weight(&k, HEADS * (NOPE + V) * LATENT, OP_BF16, &rng);
    float *q = check_random(&k, ROWS * HEADS * NOPE, &rng, 1);
    float *latent = check_random(&k, TOKENS * LATENT, &rng, 1);
    float *pages_mem = check_words(&k, 8 * 4 * LATENT);
    uint32_t blocks[] = {6, 1, 3, 0}, seq_of[ROWS] = {0, 0},
             selected[ROWS * 5] = {0, 3, 4, 9, 11, 12, 0, 0, 0, 0};
    uint32_t counts[ROWS] = {5, 1};
    struct op_pages pages = {.base = (uint8_t *)pages_mem,
                             .block_stride = 4 * LATENT * sizeof(float),
                             .rows_per_block = 4};
    struct op_seq seq = {.row_count = TOKENS, .blocks = blocks};
    float *q_abs = check_words(&k, ROWS * HEADS * LATENT);
    float *o_abs = check_words(&k, ROWS * HEADS * LATENT), *o = check_words(&k, ROWS * HEADS * V);
    double *work = (double *)check_words(&k, (size_t)2 * ROWS * HEADS * 5);
    k.ctx = (struct op_ctx){run_split, &rng};
    CHECK_RUN(&k, &best, latent_write, .seqs = &seq, .latent = latent, .pages = pages,
              .seq_count = 1, .latent_dim = LATENT);
    CHECK_RUN(&k, &best, mla_absorb, .q = q, .kv_b = kv_b, .q_abs = q_abs, .rows = ROWS,
              .heads = HEADS, .nope = NOPE, .v_dim = V, .latent = LATENT);
    CHECK_RUN(&k, &best, mla_attend, .seqs = &seq, .seq_of = seq_of, .q_abs = q_abs, .pages = pages,
              .selected = selected, .selected_count = counts, .o_abs = o_abs, .work = work,
              .rows = ROWS, .heads = HEADS, .latent = LATENT, .selected_stride = 5, .scale = 0.3);
    CHECK_RUN(&k, &best, mla_value, .o_abs = o_abs, .kv_b = kv_b, .o = o, .rows = ROWS,
              .heads = HEADS, .nope = NOPE, .v_dim = V, .latent = LATENT);
    for (uint32_t r = 0; r < ROWS; r++) {
        for (uint32_t h = 0; h < HEADS; h++) {
            double p[5], total = 0, value[V] = {0};
            for (uint32_t j = 0; j < counts[r]; j++) {
                const float *c = latent + selected[r * 5 + j] * LATENT;
                double score = 0;
                for (uint32_t d = 0; d < NOPE; d++)
                    for (uint32_t i = 0; i < LATENT; i++)
                        score += (double)q[(r * HEADS + h) * NOPE + d] *
                                 op_weight_at(&kv_b, (h * (NOPE + V) + d) * LATENT + i) * c[i];
                p[j] = exp(score * 0.3);
                total += p[j];
            }
            for (uint32_t j = 0; j < counts[r]; j++)
                for (uint32_t d = 0; d < V; d++)
                    for (uint32_t i = 0; i < LATENT; i++)
                        value[d] += p[j] / total *
                                    op_weight_at(&kv_b, (h * (NOPE + V) + NOPE + d) * LATENT + i) *
                                    latent[selected[r * 5 + j] * LATENT + i];
            for (uint32_t d = 0; d < V; d++)
                assert_true(fabs(o[(r * HEADS + h) * V + d] - value[d]) <= 2e-5);
        }
    }
    check_end(&k);
}

/* All scores equal: the lowest pools; random scores with many ties: as sorting says. */
static void test_select_ties(void **state)
{
    (void)state;
    enum { POOLS = 200, KEPT = 37, KPOOL = 4 };
    struct check k = {0};
    struct rng rng;
    rng_init(&rng, 4);
    uint32_t *selected = check_words(&k, (KEPT + 1) * KPOOL), *count = check_words(&k, 1);
    uint32_t seq_of = 0;
    double *score = (double *)check_words(&k, (size_t)2 * POOLS);
    for (int round = 0; round < 200; round++) {
        uint32_t tail = (uint32_t)round % KPOOL, kinds = 1 + (uint32_t)round / 4;
        for (uint32_t p = 0; p < POOLS; p++)
            score[p] = (double)rng_below(&rng, kinds) - 1;
        struct op_seq seq = {.position_start = POOLS * KPOOL + tail - 1, .row_count = 1};
        CHECK_RUN(&k, &best, index_select, .seqs = &seq, .seq_of = &seq_of, .score = score,
                  .score_stride = POOLS, .selected = selected, .selected_count = count,
                  .row_count = 1, .kpool = KPOOL, .pools_kept = KEPT,
                  .selected_stride = (KEPT + 1) * KPOOL);
        assert_int_equal(*count, KEPT * KPOOL + tail);
        uint32_t at = 0;
        for (uint32_t p = 0; p < POOLS; p++) {
            uint32_t better = 0;
            for (uint32_t o = 0; o < POOLS; o++)
                better += score[o] > score[p] || (score[o] == score[p] && o < p);
            for (uint32_t j = 0; j < KPOOL && better < KEPT; j++)
                assert_int_equal(selected[at++], p * KPOOL + j);
        }
        for (uint32_t j = 0; j < tail; j++)
            assert_int_equal(selected[at++], POOLS * KPOOL + j);
    }
    check_end(&k);
}

/* NaN goes through, infinities clamp, huge and tiny values stay finite. */
static void test_extremes(void **state)
{
    (void)state;
    struct check k = {0};
    float gate[] = {INFINITY, -INFINITY, NAN, 1e30f, -1e30f, 1e-40f, 3};
    float up[] = {INFINITY, INFINITY, 1, -1e30f, 1e30f, 1e-40f, NAN}, y[7];
    CHECK_RUN(&k, &best, swiglu, .gate = gate, .up = up, .y = y, .rows = 1, .n = 7, .limit = 10);
    assert_true(fabs(y[0] - 100 / (1 + exp(-10.0))) < 1e-4);
    assert_true(isnan(y[2]) && isnan(y[6]));
    assert_true(fabs(y[3] + 100 / (1 + exp(-10.0))) < 1e-4);
    assert_true(y[4] == 0 && y[5] == 0);
    float x[8] = {1e30f, -1e30f, 1e30f, 1, 1, 1, 1, 1}, w[8] = {1, 1, 1, 1, 1, 1, 1, 1}, z[8];
    CHECK_RUN(&k, &best, rms_norm, .x = x, .w = w, .y = z, .rows = 1, .groups = 1, .n = 8,
              .x_stride = 8, .y_stride = 8, .eps = 1e-5);
    for (int i = 0; i < 8; i++)
        assert_true(isfinite(z[i]));
    float zero[8] = {0};
    CHECK_RUN(&k, &best, l2norm, .x = zero, .y = z, .rows = 1, .groups = 1, .n = 8, .x_stride = 8,
              .y_stride = 8, .eps = 1e-6, .scale = 1);
    assert_memory_equal(z, zero, sizeof(zero));
    check_end(&k);
}

/* f16 and bf16 widening is exact: every f16 code against its definition. */
static void test_widen(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 65536; code++) {
        int exponent = (int)(code >> 10 & 31), fraction = (int)(code & 1023);
        double sign = code >> 15 ? -1 : 1, want;
        float have = op_f32_from_f16((uint16_t)code);
        if (exponent == 31) {
            assert_true(fraction != 0 ? isnan(have) : have == sign * (double)INFINITY);
            continue;
        }
        want = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
        assert_true(have == sign * want);
        assert_true((signbit(have) != 0) == (code >> 15 != 0));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),   cmocka_unit_test(test_moe),
        cmocka_unit_test(test_mla),      cmocka_unit_test(test_select_ties),
        cmocka_unit_test(test_extremes), cmocka_unit_test(test_widen)};
    return cmocka_run_group_tests(tests, setup, NULL);
}
