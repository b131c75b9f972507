/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of the cache as bytes: sizes, codes and scales by hand, bounds of the error, rotation. */
#include "tests/ops/check.h"

#include <float.h>

#include "kernels/op_kv_row.h"
#include "kernels/op_number.h"

static void test_sizes(void **state)
{
    (void)state;
    assert_int_equal(kv_row_bytes(KV_ROW_FP8, 512), 528);
    assert_int_equal(kv_row_bytes(KV_ROW_FP8, 128), 132);
    assert_int_equal(kv_row_bytes(KV_ROW_FP8, 129), 137);
    assert_int_equal(kv_row_bytes(KV_ROW_FP8, 32), 36);
    assert_int_equal(kv_row_bytes(KV_ROW_BF16, 512), 1024);
    assert_int_equal(kv_row_bytes(KV_ROW_F32, 512), 2048);
}

static float scale_of(const uint8_t *row, uint32_t dim, uint32_t group)
{
    float scale;
    memcpy(&scale, row + dim + 4 * group, sizeof(scale));
    return scale;
}

/* The layout byte for byte: 512 codes, four scales, none of them a power of two. */
static void test_latent_bytes(void **state)
{
    (void)state;
    float x[512], back[512];
    uint8_t row[528 + 4];
    memset(row, 0xa5, sizeof(row));
    for (int i = 0; i < 512; i++)
        x[i] = (float)((i % 9) - 4) * (float)(1 + i / 128); /* amax 4, 8, 12, 16 */
    op_latent_row_store(KV_ROW_FP8, x, 512, row);
    for (uint32_t g = 0; g < 4; g++)
        assert_true(scale_of(row, 512, g) == 4.0f * (float)(g + 1) / 448);
    assert_int_equal(row[0], 0xfe); /* -4 is the largest: -448 */
    assert_int_equal(row[4], 0x00);
    assert_int_equal(row[8], 0x7e);
    assert_int_equal(row[6], 0x76); /* half of it: 224 */
    for (int i = 528; i < 532; i++)
        assert_int_equal(row[i], 0xa5);
    op_kv_row_load(KV_ROW_FP8, row, 512, back);
    for (int i = 0; i < 512; i++)
        assert_true(back[i] == op_e4m3_values[row[i]] * scale_of(row, 512, (uint32_t)i / 128));
    /* A row that another writer gave scales that are powers of two reads by the same rule. */
    float two = 0.03125f;
    memcpy(row + 512 + 4, &two, sizeof(two));
    op_kv_row_load(KV_ROW_FP8, row, 512, back);
    assert_true(back[128] == op_e4m3_values[row[128]] * 0.03125f);
    assert_true(back[127] == op_e4m3_values[row[127]] * (4.0f / 448));
}

static void test_latent_extremes(void **state)
{
    (void)state;
    float x[130] = {0}, back[130];
    uint8_t row[138];
    op_latent_row_store(KV_ROW_FP8, x, 130, row);
    assert_true(scale_of(row, 130, 0) == FLT_MIN && scale_of(row, 130, 1) == FLT_MIN);
    op_kv_row_load(KV_ROW_FP8, row, 130, back);
    for (int i = 0; i < 130; i++)
        assert_true(back[i] == 0);
    x[3] = NAN; /* spoils its own group, seen by whoever reads it, and no other */
    x[129] = 5;
    op_latent_row_store(KV_ROW_FP8, x, 130, row);
    op_kv_row_load(KV_ROW_FP8, row, 130, back);
    for (int i = 0; i < 128; i++)
        assert_true(isnan(back[i]));
    assert_true(back[128] == 0 && fabsf(back[129] - 5) < 1e-6f);
    x[3] = FLT_MAX;
    op_latent_row_store(KV_ROW_FP8, x, 130, row);
    op_kv_row_load(KV_ROW_FP8, row, 130, back);
    assert_true(isfinite(back[3]) && back[3] >= FLT_MAX * 0.99f);
}

/* A value that is not subnormal in its code is right to 1/16, all to half the smallest step. */
static void test_errors(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 31);
    for (int round = 0; round < 200; round++) {
        uint32_t dim = 1 + rng_below(&rng, 600);
        float x[600], back[600];
        uint8_t row[2400];
        double size = exp(rng_unit(&rng) * 40 - 20);
        for (uint32_t i = 0; i < dim; i++)
            x[i] = (float)((rng_unit(&rng) * 2 - 1) * size);
        op_latent_row_store(KV_ROW_FP8, x, dim, row);
        op_kv_row_load(KV_ROW_FP8, row, dim, back);
        for (uint32_t i = 0; i < dim; i++) {
            double scale = scale_of(row, dim, i / 128);
            assert_true(fabs(back[i] - (double)x[i]) <=
                        fmax(fabs((double)x[i]) / 15.9, scale * 0x1p-10 * 1.001));
        }
        op_latent_row_store(KV_ROW_BF16, x, dim, row);
        op_kv_row_load(KV_ROW_BF16, row, dim, back);
        for (uint32_t i = 0; i < dim; i++)
            assert_true(fabs(back[i] - (double)x[i]) <= fabs((double)x[i]) * 0x1p-8);
        op_latent_row_store(KV_ROW_F32, x, dim, row);
        op_kv_row_load(KV_ROW_F32, row, dim, back);
        assert_memory_equal(x, back, dim * sizeof(float));
    }
}

static void test_rotation(void **state)
{
    (void)state;
    static const uint32_t dims[] = {1, 2, 32, 40, 96, 128, 256};
    struct rng rng;
    rng_init(&rng, 32);
    for (size_t d = 0; d < sizeof(dims) / sizeof(dims[0]); d++) {
        float x[256], y[256], a[256], b[256];
        double dot = 0, rotated = 0;
        for (uint32_t i = 0; i < dims[d]; i++) {
            a[i] = x[i] = (float)(rng_unit(&rng) * 2 - 1);
            b[i] = y[i] = (float)(rng_unit(&rng) * 2 - 1);
            dot += (double)x[i] * y[i];
        }
        op_index_rotate_row(a, dims[d]);
        op_index_rotate_row(b, dims[d]);
        for (uint32_t i = 0; i < dims[d]; i++)
            rotated += (double)a[i] * b[i];
        assert_true(fabs(dot - rotated) < 1e-5);
        assert_true(dims[d] == 1 || fabsf(a[0] - x[0]) > 1e-6f);
        op_index_rotate_row(a, dims[d]);
        for (uint32_t i = 0; i < dims[d]; i++)
            assert_true(fabsf(a[i] - x[i]) < 1e-6f);
    }
    /* One spike of 128 becomes 128 values of 1 / sqrt(128), all the same size. */
    float spike[128] = {[5] = 1};
    op_index_rotate_row(spike, 128);
    for (int i = 0; i < 128; i++)
        assert_true(fabsf(fabsf(spike[i]) - 0.088388348f) < 1e-8f);
}

static void test_index_rows(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 33);
    float x[128], back[128], zero[128] = {0};
    uint8_t row[132];
    op_index_row_store(KV_ROW_FP8, zero, 128, row);
    assert_true(scale_of(row, 128, 0) == 0x1p-22f); /* 2^ceil(log2(1e-4 / 448)) */
    for (int round = 0; round < 100; round++) {
        double size = exp(rng_unit(&rng) * 20 - 10), error = 0, all = 0;
        for (int i = 0; i < 128; i++)
            x[i] = (float)((rng_unit(&rng) * 2 - 1) * size);
        op_index_row_store(KV_ROW_FP8, x, 128, row);
        int exponent;
        float scale = scale_of(row, 128, 0);
        assert_true(frexpf(scale, &exponent) == 0.5f);
        op_kv_row_load(KV_ROW_FP8, row, 128, back);
        op_index_rotate_row(back, 128); /* back where it was */
        for (int i = 0; i < 128; i++) {
            error += (back[i] - (double)x[i]) * (back[i] - (double)x[i]);
            all += (double)x[i] * x[i];
        }
        if (size > 1e-2) /* below, the floor of the scale takes over */
            assert_true(error / all < 0.002);
    }
    x[7] = NAN;
    op_index_row_store(KV_ROW_FP8, x, 128, row);
    op_kv_row_load(KV_ROW_FP8, row, 128, back);
    for (int i = 0; i < 128; i++)
        assert_true(isnan(back[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),           cmocka_unit_test(test_latent_bytes),
        cmocka_unit_test(test_latent_extremes), cmocka_unit_test(test_errors),
        cmocka_unit_test(test_rotation),        cmocka_unit_test(test_index_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
