/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/op_number.h"
#include "lib/base/check.h"
#include "tests/model/golden_formats.h"

#define X_ROWS 5u

static const struct op_ctx one_thread = {NULL, NULL};

static float *dense_of(const struct op_quantised *w)
{
    float *dense = malloc(4ull * w->in * w->out);
    assert_non_null(dense);
    struct op_dequantise_args args = {.w = w, .y = dense};
    assert_int_equal(op_dequantise_ref(&args, &one_thread), ERR_OK);
    return dense;
}

/* Bit for bit, but any NaN stands for any NaN. */
static void check_w(const struct safetensors *expect, const struct json *linear,
                    const struct op_quantised *w)
{
    float *expected = golden_floats(expect, text_of(linear, "W"));
    float *dense = dense_of(w);
    for (uint64_t i = 0; i < (uint64_t)w->in * w->out; i++) {
        if (isnan(expected[i]) && isnan(dense[i]))
            continue;
        if (bits_of_float(expected[i]) != bits_of_float(dense[i]))
            fail_msg("%s: W[%llu] is %a, not %a", text_of(linear, "name"), (unsigned long long)i,
                     (double)dense[i], (double)expected[i]);
    }
    free(dense);
    free(expected);
}

static void check_y(const struct safetensors *expect, const struct json *linear,
                    const struct op_quantised *w)
{
    float *x = golden_floats(expect, text_of(linear, "x"));
    float *expected = golden_floats(expect, text_of(linear, "y"));
    float *y = malloc(4ull * X_ROWS * w->out);
    assert_non_null(y);
    struct op_quantised_linear_args args = {
        .x = x, .w = w, .y = y, .rows = X_ROWS, .x_stride = w->in, .y_stride = w->out};
    assert_int_equal(op_quantised_linear_ref(&args, &one_thread), ERR_OK);
    compare_rows(text_of(linear, "name"), y, expected, X_ROWS, w->out, 2e-5);
    free(x);
    free(y);
    free(expected);
}

static void check_format(const char *name)
{
    char file[64];
    enum format_fault fault;
    struct err_detail detail = {""};
    snprintf(file, sizeof(file), "%s.json", name);
    const struct json *root = golden_json(file);
    snprintf(file, sizeof(file), "%s.safetensors", name);
    struct safetensors *set = golden_tensors(file);
    snprintf(file, sizeof(file), "%s_expect.safetensors", name);
    struct safetensors *expect = golden_tensors(file);
    uint32_t count = 0;
    GOLDEN_EACH(linear, json_get(root, "linears"))
    {
        struct format_info info;
        struct op_quantised w;
        golden_bind(set, linear, &info, &w);
        assert_string_equal(format_kind_name(info.kind), text_of(linear, "format"));
        if (format_check_values(text_of(linear, "name"), &info, &w, &fault, &detail) != ERR_OK)
            fail_msg("%s", detail.text);
        check_w(expect, linear, &w);
        check_y(expect, linear, &w);
        count++;
    }
    assert_true(count >= 2);
    safetensors_close(&set);
    safetensors_close(&expect);
}

static void nvfp4_modelopt(void **state)
{
    (void)state;
    check_format("nvfp4_modelopt");
}

static void nvfp4_ct(void **state)
{
    (void)state;
    check_format("nvfp4_ct");
}

static void mxfp8(void **state)
{
    (void)state;
    check_format("mxfp8");
}

static void fp8_block(void **state)
{
    (void)state;
    check_format("fp8_block");
}

static void fp8_tensor(void **state)
{
    (void)state;
    check_format("fp8_tensor");
}

static void fp8_channel(void **state)
{
    (void)state;
    check_format("fp8_channel");
}

static void plain(void **state)
{
    (void)state;
    check_format("bf16");
    check_format("f16");
}

/* Everything decodes; what no sound writer produces is refused by the tensor's name. */
static void edges(void **state)
{
    (void)state;
    struct safetensors *set = golden_tensors("edge.safetensors");
    struct safetensors *expect = golden_tensors("edge_expect.safetensors");
    uint32_t count = 0;
    GOLDEN_EACH(linear, json_get(golden_json("edge.json"), "linears"))
    {
        struct format_info info;
        struct op_quantised w;
        enum format_fault fault;
        struct err_detail detail = {""};
        const struct json *refuse = json_get(linear, "refuse");
        golden_bind(set, linear, &info, &w);
        assert_string_equal(format_kind_name(info.kind), text_of(linear, "format"));
        check_w(expect, linear, &w);
        enum err e = format_check_values(text_of(linear, "name"), &info, &w, &fault, &detail);
        count++;
        if (refuse == NULL) {
            assert_int_equal(e, ERR_OK);
            continue;
        }
        assert_int_equal(e, ERR_CORRUPT);
        assert_string_equal(format_fault_name(fault), text_of(refuse, "class"));
        if (strstr(detail.text, text_of(refuse, "tensor")) == NULL)
            fail_msg("%s does not name %s", detail.text, text_of(refuse, "tensor"));
    }
    assert_int_equal(count, 15);
    safetensors_close(&set);
    safetensors_close(&expect);
}

/* The two families of NVFP4 hold the same matrices. */
static void both_families_agree(void **state)
{
    (void)state;
    struct safetensors *a = golden_tensors("nvfp4_modelopt.safetensors");
    struct safetensors *b = golden_tensors("nvfp4_ct.safetensors");
    const struct json *ct = json_get(golden_json("nvfp4_ct.json"), "linears")->child;
    GOLDEN_EACH(linear, json_get(golden_json("nvfp4_modelopt.json"), "linears"))
    {
        struct format_info info;
        struct op_quantised multiply, divide;
        golden_bind(a, linear, &info, &multiply);
        golden_bind(b, ct, &info, &divide);
        float *v = dense_of(&multiply), *u = dense_of(&divide);
        assert_true(multiply.global < 1 && divide.global > 1);
        for (uint64_t i = 0; i < (uint64_t)multiply.in * multiply.out; i++)
            assert_true(fabsf(v[i] - u[i]) <= 2.5e-7f * fabsf(u[i]));
        free(v);
        free(u);
        ct = ct->next;
    }
    assert_null(ct);
    safetensors_close(&a);
    safetensors_close(&b);
}

static void examples_of_the_tables(void **state)
{
    (void)state;
    static const uint8_t nvfp4[8] = {0xa1, 0xb2, 0xc4, 0xd5, 0xe5, 0xe6, 0xf6, 0xf7};
    static const uint8_t mx[32] = {0xfc, 0xfc, 0xfb, 0xfa, 0xf9, 0xf8, 0xf7, 0xf6, 0xf4, 0xf2, 0xf1,
                                   0xee, 0xeb, 0xe8, 0xe2, 0xd5, 0x55, 0x62, 0x68, 0x6b, 0x6e, 0x71,
                                   0x72, 0x74, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x7b, 0x7c, 0x7c};
    uint8_t scale = 0x7e, exponent = 119;
    struct op_quantised w = {.format = OP_FORMAT_NVFP4,
                             .out = 1,
                             .in = 16,
                             .codes = nvfp4,
                             .row_bytes = 8,
                             .global = float_of(0x3879a934)};
    float row[32];
    w.scales = (struct op_scales){.data = &scale,
                                  .dtype = OP_SCALE_E4M3,
                                  .rows_shared = 1,
                                  .columns_shared = 16,
                                  .stride = 1};
    op_quantised_row(&w, 0, 0, 16, row);
    for (uint32_t i = 0; i < 16; i++) {
        float value = (i % 2 == 0 ? 1 : -1) * (float)(i + 1) / 100;
        assert_true(fabsf(row[i] - value) <= 0.0267f);
    }
    assert_true(fabsf(row[15] + 0.16f) < 1e-7f);
    w = (struct op_quantised){
        .format = OP_FORMAT_MXFP8, .out = 1, .in = 32, .codes = mx, .row_bytes = 32};
    w.scales = (struct op_scales){.data = &exponent,
                                  .dtype = OP_SCALE_E8M0,
                                  .rows_shared = 1,
                                  .columns_shared = 32,
                                  .stride = 1};
    op_quantised_row(&w, 0, 0, 32, row);
    for (uint32_t i = 0; i < 32; i++) {
        float value = ((float)i - 15.5f) / 10;
        assert_true(fabsf(row[i] - value) <= 0.0626f * fabsf(value));
        assert_int_equal(op_e4m3_from_f32(value * 256), mx[i]);
    }
    /* The same codes as MXFP4: two a byte, low nibble first. */
    w.format = OP_FORMAT_MXFP4;
    w.row_bytes = 16;
    op_quantised_row(&w, 0, 0, 32, row);
    assert_true(row[0] == op_e2m1_values[0xc] * 0x1p-8f);
    assert_true(row[1] == op_e2m1_values[0xf] * 0x1p-8f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nvfp4_modelopt),
        cmocka_unit_test(nvfp4_ct),
        cmocka_unit_test(mxfp8),
        cmocka_unit_test(fp8_block),
        cmocka_unit_test(fp8_tensor),
        cmocka_unit_test(fp8_channel),
        cmocka_unit_test(plain),
        cmocka_unit_test(edges),
        cmocka_unit_test(both_families_agree),
        cmocka_unit_test(examples_of_the_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
