/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces for tensor parallelism: same W, and outputs that concatenate or add up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/op_exl3.h"
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

static float *linear_of(const struct op_quantised *w, const float *x, uint64_t x_stride)
{
    float *y = malloc(4ull * X_ROWS * w->out);
    assert_non_null(y);
    struct op_quantised_linear_args args = {
        .x = x, .w = w, .y = y, .rows = X_ROWS, .x_stride = x_stride, .y_stride = w->out};
    assert_int_equal(op_quantised_linear_ref(&args, &one_thread), ERR_OK);
    return y;
}

/* The piece's W is the rectangle of the whole, bit for bit. */
static void check_piece_w(const struct op_quantised *whole, const float *dense,
                          const struct op_quantised *piece, uint32_t out_first, uint32_t in_first)
{
    float *part = dense_of(piece);
    for (uint32_t o = 0; o < piece->out; o++)
        assert_memory_equal(part + (uint64_t)o * piece->in,
                            dense + (uint64_t)(out_first + o) * whole->in + in_first,
                            4ull * piece->in);
    free(part);
}

static void cut_by_outputs(const struct op_quantised *w, const float *x, uint32_t ranks)
{
    float *dense = dense_of(w), *y = linear_of(w, x, w->in);
    uint32_t next = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct op_quantised piece;
        uint32_t first, count;
        op_cut_range(w->out, ranks, rank, &first, &count);
        assert_int_equal(first, next);
        next += count;
        if (count == 0)
            continue;
        assert_int_equal(op_quantised_cut(w, first, count, 0, w->in, &piece), ERR_OK);
        check_piece_w(w, dense, &piece, first, 0);
        float *part = linear_of(&piece, x, w->in);
        for (uint32_t r = 0; r < X_ROWS; r++)
            assert_memory_equal(part + (uint64_t)r * count, y + (uint64_t)r * w->out + first,
                                4ull * count);
        free(part);
    }
    assert_int_equal(next, w->out);
    free(dense);
    free(y);
}

static void cut_by_inputs(const char *name, const struct op_quantised *w, const float *x,
                          uint32_t ranks)
{
    float *dense = dense_of(w), *y = linear_of(w, x, w->in);
    double *sum = calloc((uint64_t)X_ROWS * w->out, sizeof(*sum));
    float *rounded = malloc(4ull * X_ROWS * w->out);
    assert_true(sum != NULL && rounded != NULL);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct op_quantised piece;
        uint32_t first, count;
        op_cut_range(w->in, ranks, rank, &first, &count);
        if (count == 0)
            continue;
        assert_int_equal(op_quantised_cut(w, 0, w->out, first, count, &piece), ERR_OK);
        assert_int_equal(piece.bias != NULL, w->bias != NULL && first == 0);
        check_piece_w(w, dense, &piece, 0, first);
        float *part = linear_of(&piece, x + first, w->in);
        for (uint32_t i = 0; i < X_ROWS * w->out; i++)
            sum[i] += part[i];
        free(part);
    }
    for (uint32_t i = 0; i < X_ROWS * w->out; i++)
        rounded[i] = (float)sum[i];
    compare_rows(name, rounded, y, X_ROWS, w->out, w->format == OP_FORMAT_EXL3 ? 4e-5 : 2e-5);
    free(dense);
    free(y);
    free(sum);
    free(rounded);
}

static void cut_format(const char *name)
{
    char file[64];
    snprintf(file, sizeof(file), "%s.json", name);
    const struct json *root = golden_json(file);
    snprintf(file, sizeof(file), "%s.safetensors", name);
    struct safetensors *set = golden_tensors(file);
    snprintf(file, sizeof(file), "%s_expect.safetensors", name);
    struct safetensors *expect = golden_tensors(file);
    GOLDEN_EACH(linear, json_get(root, "linears"))
    {
        struct format_info info;
        struct op_quantised w;
        golden_bind(set, linear, &info, &w);
        float *x = golden_floats(expect, text_of(linear, "x"));
        for (uint32_t ranks = 1; ranks <= 4; ranks++) {
            cut_by_outputs(&w, x, ranks);
            cut_by_inputs(text_of(linear, "name"), &w, x, ranks);
        }
        free(x);
    }
    safetensors_close(&set);
    safetensors_close(&expect);
}

static void exl3(void **state)
{
    (void)state;
    cut_format("exl3");
}

static void other_formats(void **state)
{
    (void)state;
    static const char *const names[] = {"nvfp4_modelopt", "nvfp4_ct",    "mxfp8", "fp8_block",
                                        "fp8_tensor",     "fp8_channel", "bf16",  "f16"};
    for (size_t i = 0; i < ARRAY_COUNT(names); i++)
        cut_format(names[i]);
}

/* Any rectangle of an FP8 weight keeps the scales of the blocks it lies in. */
static void inside_a_block(void **state)
{
    (void)state;
    static const uint32_t firsts[] = {0, 1, 64, 127, 128, 129};
    struct safetensors *set = golden_tensors("fp8_block.safetensors");
    GOLDEN_EACH(linear, json_get(golden_json("fp8_block.json"), "linears"))
    {
        struct format_info info;
        struct op_quantised w, piece, again;
        golden_bind(set, linear, &info, &w);
        float *dense = dense_of(&w);
        for (size_t o = 0; o < ARRAY_COUNT(firsts); o++)
            for (size_t i = 0; i < ARRAY_COUNT(firsts); i++) {
                if (firsts[o] >= w.out || firsts[i] >= w.in)
                    continue;
                assert_int_equal(op_quantised_cut(&w, firsts[o], w.out - firsts[o], firsts[i],
                                                  w.in - firsts[i], &piece),
                                 ERR_OK);
                check_piece_w(&w, dense, &piece, firsts[o], firsts[i]);
                /* A piece of a piece. */
                if (piece.out < 3 || piece.in < 6)
                    continue;
                assert_int_equal(op_quantised_cut(&piece, 2, piece.out - 2, 5, 1, &again), ERR_OK);
                check_piece_w(&w, dense, &again, firsts[o] + 2, firsts[i] + 5);
            }
        free(dense);
    }
    safetensors_close(&set);
}

static void refused_cuts(void **state)
{
    (void)state;
    struct op_quantised w = {.format = OP_FORMAT_EXL3, .out = 256, .in = 200}, piece;
    static const uint32_t bad[][4] = {
        {0, 0, 0, 200},   {0, 256, 0, 0},     {0, 257, 0, 200},  {256, 1, 0, 200},
        {0, 256, 0, 201}, {64, 128, 0, 200},  {0, 64, 0, 200},   {0, 256, 64, 72},
        {0, 256, 0, 100}, {128, 256, 0, 200}, {0, 256, 128, 71}, {0, UINT32_MAX, 0, 200},
    };
    for (size_t i = 0; i < ARRAY_COUNT(bad); i++)
        assert_int_equal(op_quantised_cut(&w, bad[i][0], bad[i][1], bad[i][2], bad[i][3], &piece),
                         ERR_INVALID);
    w.format = OP_FORMAT_NVFP4;
    assert_int_equal(op_quantised_cut(&w, 0, 256, 1, 16, &piece), ERR_INVALID);
}

static void ranges(void **state)
{
    (void)state;
    static const uint32_t expected[3][2] = {{0, 768}, {768, 640}, {1408, 640}};
    uint32_t first, count;
    for (uint32_t rank = 0; rank < 3; rank++) {
        op_cut_range(2048, 3, rank, &first, &count);
        assert_int_equal(first, expected[rank][0]);
        assert_int_equal(count, expected[rank][1]);
    }
    op_cut_range(100, 2, 1, &first, &count);
    assert_int_equal(count, 0);
    op_cut_range(UINT32_MAX, 2, 1, &first, &count);
    assert_int_equal((uint64_t)first + count, UINT32_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exl3),           cmocka_unit_test(other_formats),
        cmocka_unit_test(inside_a_block), cmocka_unit_test(refused_cuts),
        cmocka_unit_test(ranges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
