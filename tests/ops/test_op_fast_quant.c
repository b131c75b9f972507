/* SPDX-License-Identifier: Apache-2.0 */
/* Fast linear ops over quantised weights: against the reference within tolerance, one row alone
 * and in any batch bit for bit, every format, odd sizes, scales in odd places, mixed experts. */
#include "tests/ops/check_fast.h"

#include "kernels/op_exl3.h"
#include "kernels/op_number.h"

static uint8_t *random_bytes(struct check *k, size_t bytes, struct rng *rng)
{
    uint8_t *out = check_words(k, (bytes + 3) / 4);
    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)rng_below(rng, 256);
    return out;
}

/* Moderate scales of any type: 2^-6 to 2^-3, give or take. */
static void *random_scales(struct check *k, size_t count, enum op_scale_dtype dtype,
                           struct rng *rng)
{
    uint8_t *bytes = random_bytes(k, count * 4, rng);
    for (size_t i = 0; i < count; i++) {
        float value = (float)(0.02 + 0.1 * rng_unit(rng));
        uint16_t half = dtype == OP_SCALE_F16 ? op_f16_from_f32(value) : op_bf16_from_f32(value);
        if (dtype == OP_SCALE_F32)
            memcpy(bytes + 4 * i, &value, 4);
        else if (dtype == OP_SCALE_BF16 || dtype == OP_SCALE_F16)
            memcpy(bytes + 2 * i, &half, 2);
        else
            bytes[i] = dtype == OP_SCALE_E8M0 ? (uint8_t)(120 + rng_below(rng, 6))
                                              : op_e4m3_from_f32(value * 64);
    }
    return bytes;
}

static struct op_quantised make_row_format(struct check *k, enum op_format format, uint32_t out,
                                           uint32_t in, uint32_t shared_rows, uint32_t shared,
                                           enum op_scale_dtype dtype, struct rng *rng)
{
    bool fp4 = format == OP_FORMAT_MXFP4 || format == OP_FORMAT_NVFP4;
    struct op_quantised w = {.format = format, .out = out, .in = in, .global = 0.017f};
    w.row_bytes = fp4 ? (in + 1) / 2 : in;
    uint8_t *codes = random_bytes(k, out * w.row_bytes, rng);
    for (uint64_t i = 0; !fp4 && i < out * w.row_bytes; i++)
        if ((codes[i] & OP_E4M3_NAN_MASK) == OP_E4M3_NAN_MASK)
            codes[i] = 0x7e;
    w.codes = codes;
    uint32_t columns = (in + shared - 1) / shared, rows = (out + shared_rows - 1) / shared_rows;
    w.scales = (struct op_scales){.data = random_scales(k, (size_t)rows * columns, dtype, rng),
                                  .dtype = dtype,
                                  .rows_shared = shared_rows,
                                  .columns_shared = shared,
                                  .stride = columns};
    return w;
}

static struct op_quantised make_exl3(struct check *k, uint32_t out, uint32_t in,
                                     enum op_codebook codebook, uint32_t half_bits, bool signs,
                                     struct rng *rng)
{
    uint32_t out_p = op_exl3_padded(out), in_p = op_exl3_padded(in);
    struct op_quantised w = {.format = OP_FORMAT_EXL3, .out = out, .in = in};
    w.codebook = codebook;
    w.half_bits = half_bits;
    w.row_bytes = (uint64_t)out_p / 16 * 2 * op_exl3_tile_u16(half_bits);
    w.codes = random_bytes(k, w.row_bytes * (in_p / 16), rng);
    if (signs) {
        w.su = random_bytes(k, in_p / 8, rng);
        w.sv = random_bytes(k, out_p / 8, rng);
    } else {
        w.suh = random_scales(k, in_p, OP_SCALE_F16, rng);
        w.svh = random_scales(k, out_p, OP_SCALE_F16, rng);
    }
    return w;
}

static void compare(const char *what, const float *have, const float *want, size_t count)
{
    double size = 0;
    for (size_t i = 0; i < count; i++)
        size = fmax(size, fabs((double)want[i]));
    fast_close(what, have, want, count, 2e-6, size + 1e-30);
}

static void quant_case(struct check *k, const struct op_quantised *q, uint32_t rows,
                       struct rng *rng)
{
    uint32_t in = q->in, out = q->out;
    float *x = check_random(k, (size_t)rows * in, rng, 1);
    float *y = check_words(k, (size_t)rows * out), *z = check_words(k, (size_t)rows * out);
    struct op_weight w = {.quantised = q};
    k->ctx = (struct op_ctx){fast_split, rng};
    CHECK_RUN(k, &fast_ref, linear, .x = x, .w = w, .y = y, .rows = rows, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    CHECK_RUN(k, &fast_table, linear, .x = x, .w = w, .y = z, .rows = rows, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    compare("quantised linear", z, y, (size_t)rows * out);
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t some = rows - r < 2 ? 1 : 1 + rng_below(rng, 2);
        CHECK_RUN(k, &fast_table, linear, .x = x + (size_t)r * in, .w = w, .y = y, .rows = some,
                  .in = in, .out = out, .x_stride = in, .y_stride = out);
        fast_same("quantised alone", y, z + (size_t)r * out, some * out * sizeof(float));
    }
}

static void row_case(struct rng *rng, enum op_format format, uint32_t out, uint32_t in,
                     uint32_t shared_rows, uint32_t shared, enum op_scale_dtype dtype)
{
    struct check k = {0};
    struct op_quantised w = make_row_format(&k, format, out, in, shared_rows, shared, dtype, rng);
    w.bias = check_random(&k, out, rng, 1);
    w.bias_dtype = OP_F32;
    w.global_divides = rng_below(rng, 2) != 0;
    w.no_nan = rng_below(rng, 2) != 0; /* which is true here */
    quant_case(&k, &w, 1 + rng_below(rng, 9), rng);
    check_end(&k);
}

static void run_row_formats(struct rng *rng)
{
    static const uint32_t ins[] = {1, 31, 32, 64, 100, 512, 544, 1056, 2048, 2657, 4192};
    for (size_t i = 0; i < sizeof(ins) / sizeof(ins[0]); i++) {
        uint32_t in = ins[i], out = 1 + rng_below(rng, 20);
        row_case(rng, OP_FORMAT_MXFP8, out, in, 1, 32, OP_SCALE_E8M0);
        row_case(rng, OP_FORMAT_MXFP4, out, in, 1, 32, OP_SCALE_E8M0);
        row_case(rng, OP_FORMAT_NVFP4, out, in, 1, 16, OP_SCALE_E4M3);
        row_case(rng, OP_FORMAT_FP8, out, in, 1, OP_SHARED_BY_ALL, OP_SCALE_F32);
        row_case(rng, OP_FORMAT_FP8, out, in, 3, 40, OP_SCALE_BF16);
        row_case(rng, OP_FORMAT_FP8, out, in, 3, 64, OP_SCALE_F32);
        row_case(rng, OP_FORMAT_FP8, out, in, 128, 128, OP_SCALE_F32);
    }
}

/* More rows than are summed where they lie, so that they are packed in the weight's order: less
 * than a run of columns, whole ones, some left over. */
static void run_packed_fp4(struct rng *rng)
{
    static const uint32_t ins[] = {96, 160, 512, 1184};
    for (size_t i = 0; i < sizeof(ins) / sizeof(ins[0]); i++)
        for (uint32_t rows = 6; rows <= 9; rows++)
            for (int nv = 0; nv < 2; nv++) {
                struct check k = {0};
                struct op_quantised w =
                    make_row_format(&k, nv ? OP_FORMAT_NVFP4 : OP_FORMAT_MXFP4, 13, ins[i], 1,
                                    nv ? 16 : 32, nv ? OP_SCALE_E4M3 : OP_SCALE_E8M0, rng);
                quant_case(&k, &w, rows, rng);
                check_end(&k);
            }
}

/* Powers of two at both ends of what the fast way takes, and beyond: same bits in every batch. */
static void run_far_scales(struct rng *rng)
{
    static const uint8_t far[][5] = {{0, 0, 1, 0, 2}, {0, 1, 127, 226, 225}, {0, 226, 227, 228, 1}};
    static const uint32_t ins[] = {544, 2144}; /* the second has a piece of four blocks */
    for (size_t i = 0; i < 2 * sizeof(far) / sizeof(far[0]); i++) {
        struct check k = {0};
        uint32_t in = ins[i % 2];
        struct op_quantised w =
            make_row_format(&k, OP_FORMAT_MXFP8, 12, in, 1, 32, OP_SCALE_E8M0, rng);
        uint8_t *scales = (uint8_t *)(uintptr_t)w.scales.data;
        for (uint32_t s = 0; s < 12 * in / 32; s++)
            scales[s] = far[i / 2][rng_below(rng, 5)];
        quant_case(&k, &w, 5, rng);
        check_end(&k);
    }
}

/* The same for FP8, with a code that is NaN or one scale too large in one row of several. */
static void run_far_fp8(struct rng *rng)
{
    enum { OUT = 9, IN = 2208, BAD = 4 };
    struct check k = {0};
    struct op_quantised w = make_row_format(&k, OP_FORMAT_FP8, OUT, IN, 1, 96, OP_SCALE_F32, rng);
    float *scales = (float *)(uintptr_t)w.scales.data;
    uint8_t *codes = (uint8_t *)(uintptr_t)w.codes;
    scales[BAD * IN / 96 + 7] = 300;
    quant_case(&k, &w, 8, rng);
    scales[BAD * IN / 96 + 7] = 0x1p101f;
    quant_case(&k, &w, 8, rng);
    scales[BAD * IN / 96 + 7] = 1;
    codes[BAD * IN + 700] = 0x7f;
    float y[OUT];
    struct op_weight weight = {.quantised = &w};
    float *x = check_random(&k, IN, rng, 1);
    CHECK_RUN(&k, &fast_table, linear, .x = x, .w = weight, .y = y, .rows = 1, .in = IN, .out = OUT,
              .x_stride = IN, .y_stride = OUT);
    for (int o = 0; o < OUT; o++)
        assert_true(isnan(y[o]) == (o == BAD));
    check_end(&k);
}

/* A piece that was cut inside a block, and a code that is NaN: the slow way, the same values. */
static void run_odd_rows(struct rng *rng)
{
    struct check k = {0};
    struct op_quantised w = make_row_format(&k, OP_FORMAT_NVFP4, 20, 96, 1, 16, OP_SCALE_E4M3, rng),
                        piece;
    assert_int_equal(op_quantised_cut(&w, 3, 9, 10, 70, &piece), ERR_OK);
    quant_case(&k, &piece, 4, rng);
    w = make_row_format(&k, OP_FORMAT_FP8, 20, 96, 8, 32, OP_SCALE_F16, rng);
    assert_int_equal(op_quantised_cut(&w, 5, 11, 7, 80, &piece), ERR_OK);
    quant_case(&k, &piece, 2, rng);
    uint8_t *codes = (uint8_t *)(uintptr_t)w.codes;
    codes[96 + 5] = 0xff;
    float row[96 + 16];
    struct op_weight weight = {.quantised = &w};
    float *x = check_random(&k, 96, rng, 1);
    CHECK_RUN(&k, &fast_table, linear, .x = x, .w = weight, .y = row, .rows = 1, .in = 96,
              .out = 20, .x_stride = 96, .y_stride = 20);
    for (int o = 0; o < 20; o++)
        assert_true(isnan(row[o]) == (o == 1));
    check_end(&k);
}

/* NVFP4 with one scale that is NaN, and with a global scale beyond what the fast way takes. */
static void run_odd_nvfp4(struct rng *rng)
{
    enum { OUT = 20, IN = 288 };
    struct check k = {0};
    struct op_quantised w =
        make_row_format(&k, OP_FORMAT_NVFP4, OUT, IN, 1, 16, OP_SCALE_E4M3, rng);
    w.global = 0x1p101f;
    quant_case(&k, &w, 7, rng);
    w.global = 0.017f;
    uint8_t *scales = (uint8_t *)(uintptr_t)w.scales.data;
    scales[IN / 16 + 3] = 0x7f;
    float row[OUT];
    struct op_weight weight = {.quantised = &w};
    float *x = check_random(&k, IN, rng, 1);
    CHECK_RUN(&k, &fast_table, linear, .x = x, .w = weight, .y = row, .rows = 1, .in = IN,
              .out = OUT, .x_stride = IN, .y_stride = OUT);
    for (int o = 0; o < OUT; o++)
        assert_true(isnan(row[o]) == (o == 1));
    check_end(&k);
}

static void run_exl3(struct rng *rng)
{
    static const struct {
        uint32_t out, in;
    } shapes[] = {{128, 128}, {256, 384}, {100, 72}, {130, 300}};
    for (int codebook = OP_CODEBOOK_3INST; codebook <= OP_CODEBOOK_MUL1; codebook++)
        for (uint32_t half_bits = 2; half_bits <= 16; half_bits++) {
            struct check k = {0};
            size_t s = rng_below(rng, 4);
            if (!op_exl3_rate_exists(half_bits, (enum op_codebook)codebook))
                continue;
            struct op_quantised w =
                make_exl3(&k, shapes[s].out, shapes[s].in, (enum op_codebook)codebook, half_bits,
                          rng_below(rng, 3) == 0, rng);
            w.bias = check_random(&k, op_exl3_padded(w.out), rng, 1);
            w.bias_dtype = OP_F32;
            quant_case(&k, &w, 1 + rng_below(rng, 6), rng);
            check_end(&k);
        }
}

static void run_mixed_experts(struct rng *rng)
{
    enum { EXPERTS = 4, IN = 160, OUT = 136, PAIRS = 9, ROWS = 5 };
    struct check k = {.ctx = {fast_split, rng}};
    struct op_quantised q[3] = {
        make_exl3(&k, OUT, IN, OP_CODEBOOK_MCG, 8, false, rng),
        make_row_format(&k, OP_FORMAT_MXFP8, OUT, IN, 1, 32, OP_SCALE_E8M0, rng),
        make_exl3(&k, OUT, IN, OP_CODEBOOK_MUL1, 6, false, rng)};
    struct op_weight w[EXPERTS] = {{.quantised = &q[0]},
                                   {.quantised = &q[1]},
                                   fast_weight(&k, IN * OUT, OP_BF16, rng),
                                   {.quantised = &q[2]}};
    uint32_t offsets[EXPERTS + 1] = {0, 3, 4, 7, 9}, x_rows[PAIRS];
    float *x = check_random(&k, ROWS * IN, rng, 1);
    float *y = check_words(&k, PAIRS * OUT), *z = check_words(&k, PAIRS * OUT);
    for (uint32_t p = 0; p < PAIRS; p++)
        x_rows[p] = rng_below(rng, ROWS);
    for (int t = 0; t < 2; t++)
        CHECK_RUN(&k, t == 0 ? &fast_ref : &fast_table, grouped_linear, .x = x, .w = w,
                  .y = t == 0 ? y : z, .offsets = offsets, .x_rows = x_rows, .experts = EXPERTS,
                  .pairs_max = PAIRS, .in = IN, .out = OUT, .x_stride = IN, .y_stride = OUT);
    compare("mixed experts", z, y, PAIRS * OUT);
    struct op_table exact;
    op_table_cpu(&exact, OP_EXACT, op_cpu_best());
    CHECK_RUN(&k, &exact, grouped_linear, .x = x, .w = w, .y = z, .offsets = offsets,
              .x_rows = x_rows, .experts = EXPERTS, .pairs_max = PAIRS, .in = IN, .out = OUT,
              .x_stride = IN, .y_stride = OUT);
    fast_same("exact mixed experts", z, y, PAIRS * OUT * sizeof(float));
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t p = offsets[e]; p < offsets[e + 1]; p++) {
            CHECK_RUN(&k, &fast_ref, linear, .x = x + x_rows[p] * IN, .w = w[e], .y = z, .rows = 1,
                      .in = IN, .out = OUT, .x_stride = IN, .y_stride = OUT);
            fast_same("reference expert alone", z, y + p * OUT, OUT * sizeof(float));
        }
    check_end(&k);
}

#define TEST(name)                                                                                 \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        fast_each(run_##name);                                                                     \
    }
TEST(row_formats)
TEST(packed_fp4)
TEST(far_scales)
TEST(far_fp8)
TEST(odd_rows)
TEST(odd_nvfp4)
TEST(exl3)
TEST(mixed_experts)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_formats), cmocka_unit_test(test_packed_fp4),
        cmocka_unit_test(test_far_scales),  cmocka_unit_test(test_far_fp8),
        cmocka_unit_test(test_odd_rows),    cmocka_unit_test(test_odd_nvfp4),
        cmocka_unit_test(test_exl3),        cmocka_unit_test(test_mixed_experts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
