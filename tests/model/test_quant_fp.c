/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "lib/base/check.h"
#include "lib/base/rng.h"
#include "lib/model/quant.h"
#include "tests/model/golden_formats.h"

enum { OUT = 200, IN = 320 };

static const struct op_ctx one_thread = {NULL, NULL};
static float matrix[OUT * IN], dense[OUT * IN];
static uint8_t codes[OUT * IN];
static const struct quant_matrix m = {
    .w = matrix, .in = IN, .out = OUT, .in_stride = 1, .out_stride = IN};

static int fill(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 21);
    for (uint32_t i = 0; i < OUT * IN; i++) {
        double radius = sqrt(-2 * log(rng_unit(&rng) + 1e-12));
        matrix[i] = (float)(0.02 * radius * cos(6.283185307179586 * rng_unit(&rng)));
    }
    return 0;
}

static double error_of(const struct op_quantised *w)
{
    struct op_dequantise_args args = {.w = w, .y = dense};
    double error = 0, square = 0;
    assert_int_equal(op_dequantise_ref(&args, &one_thread), ERR_OK);
    for (uint32_t i = 0; i < OUT * IN; i++) {
        double difference = (double)dense[i] - matrix[i];
        error += difference * difference;
        square += (double)matrix[i] * matrix[i];
    }
    return error / square;
}

static struct op_quantised weight(enum op_format format, const void *scales,
                                  enum op_scale_dtype dtype, uint32_t rows, uint32_t columns,
                                  uint64_t stride)
{
    struct op_quantised w = {
        .format = format, .out = OUT, .in = IN, .codes = codes, .row_bytes = IN};
    w.scales = (struct op_scales){.data = scales,
                                  .dtype = dtype,
                                  .rows_shared = rows,
                                  .columns_shared = columns,
                                  .stride = stride};
    return w;
}

static void fp8(void **state)
{
    (void)state;
    static float scales[OUT];
    assert_int_equal(quant_fp8(&m, QUANT_FP8_BLOCK, codes, scales), ERR_OK);
    struct op_quantised w = weight(OP_FORMAT_FP8, scales, OP_SCALE_F32, 128, 128, 3);
    double block = error_of(&w);
    assert_int_equal(quant_fp8(&m, QUANT_FP8_CHANNEL, codes, scales), ERR_OK);
    w = weight(OP_FORMAT_FP8, scales, OP_SCALE_F32, 1, OP_SHARED_BY_ALL, 1);
    double channel = error_of(&w);
    assert_int_equal(quant_fp8(&m, QUANT_FP8_TENSOR, codes, scales), ERR_OK);
    w = weight(OP_FORMAT_FP8, scales, OP_SCALE_F32, OP_SHARED_BY_ALL, OP_SHARED_BY_ALL, 1);
    double tensor = error_of(&w);
    print_message("fp8: block %.6f, channel %.6f, tensor %.6f\n", block, channel, tensor);
    assert_true(block < 0.0009 && channel < 0.0009 && tensor < 0.0009);
    assert_true(block > 0.0005);
}

static void mxfp8(void **state)
{
    (void)state;
    static uint8_t scales[OUT * IN / 32];
    assert_int_equal(quant_mxfp8(&m, codes, scales), ERR_OK);
    struct op_quantised w = weight(OP_FORMAT_MXFP8, scales, OP_SCALE_E8M0, 1, 32, IN / 32);
    double error = error_of(&w);
    print_message("mxfp8: %.6f\n", error);
    assert_true(error > 0.0005 && error < 0.0008);
}

static void nvfp4(void **state)
{
    (void)state;
    static uint8_t scales[OUT * IN / 16];
    for (uint32_t divides = 0; divides < 2; divides++) {
        float global = 0;
        assert_int_equal(quant_nvfp4(&m, divides != 0, codes, scales, &global), ERR_OK);
        assert_int_equal(global > 1, divides);
        struct op_quantised w = weight(OP_FORMAT_NVFP4, scales, OP_SCALE_E4M3, 1, 16, IN / 16);
        w.row_bytes = IN / 2;
        w.global = global;
        w.global_divides = divides != 0;
        double error = error_of(&w);
        print_message("nvfp4: %.6f\n", error);
        assert_true(error > 0.008 && error < 0.010);
    }
}

static void examples(void **state)
{
    (void)state;
    static const uint8_t nv[8] = {0xa1, 0xb2, 0xc4, 0xd5, 0xe5, 0xe6, 0xf6, 0xf7};
    static const uint8_t mx[32] = {0xfc, 0xfc, 0xfb, 0xfa, 0xf9, 0xf8, 0xf7, 0xf6, 0xf4, 0xf2, 0xf1,
                                   0xee, 0xeb, 0xe8, 0xe2, 0xd5, 0x55, 0x62, 0x68, 0x6b, 0x6e, 0x71,
                                   0x72, 0x74, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x7b, 0x7c, 0x7c};
    float block[32], global;
    uint8_t out[32], scale;
    struct quant_matrix one = {.w = block, .in = 16, .out = 1, .in_stride = 1, .out_stride = 16};
    for (uint32_t i = 0; i < 16; i++)
        block[i] = (i % 2 == 0 ? 1 : -1) * (float)(i + 1) / 100;
    assert_int_equal(quant_nvfp4(&one, false, out, &scale, &global), ERR_OK);
    assert_int_equal(bits_of_float(global), 0x3879a934);
    assert_int_equal(scale, 0x7e);
    /* .02 stands on a tie that falls to either side. */
    assert_true(out[0] == 0xa1 || out[0] == 0x91);
    assert_memory_equal(out + 1, nv + 1, 7);
    assert_int_equal(quant_nvfp4(&one, true, out, &scale, &global), ERR_OK);
    assert_true(fabsf(global - 16800) < 0.01f);
    for (uint32_t i = 0; i < 32; i++)
        block[i] = ((float)i - 15.5f) / 10;
    one.in = 32;
    assert_int_equal(quant_mxfp8(&one, out, &scale), ERR_OK);
    assert_int_equal(scale, 119);
    assert_memory_equal(out, mx, 32);
}

/* Zeros, and what cannot be written. */
static void edges(void **state)
{
    (void)state;
    float block[32] = {0}, global = 0, fp8_scale = 0;
    uint8_t out[32], scales[2];
    struct quant_matrix one = {.w = block, .in = 32, .out = 1, .in_stride = 1, .out_stride = 32};
    assert_int_equal(quant_nvfp4(&one, false, out, scales, &global), ERR_OK);
    assert_true(global > 0 && scales[0] == 0x38 && scales[1] == 0x38 && out[0] == 0);
    assert_int_equal(quant_mxfp8(&one, out, scales), ERR_OK);
    assert_true(scales[0] == 0 && out[31] == 0);
    assert_int_equal(quant_fp8(&one, QUANT_FP8_TENSOR, out, &fp8_scale), ERR_OK);
    assert_true(fp8_scale == 1 && out[0] == 0);
    one.in = 24;
    assert_int_equal(quant_mxfp8(&one, out, scales), ERR_INVALID);
    assert_int_equal(quant_nvfp4(&one, true, out, scales, &global), ERR_INVALID);
    one.in = 32;
    block[3] = -INFINITY;
    assert_int_equal(quant_nvfp4(&one, false, out, scales, &global), ERR_INVALID);
    assert_int_equal(quant_mxfp8(&one, out, scales), ERR_INVALID);
    assert_int_equal(quant_fp8(&one, QUANT_FP8_CHANNEL, out, &fp8_scale), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8),      cmocka_unit_test(mxfp8), cmocka_unit_test(nvfp4),
        cmocka_unit_test(examples), cmocka_unit_test(edges),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
