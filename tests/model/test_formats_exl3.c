/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/op_dtype.h"
#include "kernels/op_exl3.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"
#include "lib/base/hash.h"
#include "lib/base/str.h"
#include "tests/model/golden_formats.h"

#define X_ROWS 5u

static const struct op_ctx one_thread = {NULL, NULL};

static enum op_codebook codebook_named(const char *name)
{
    for (uint32_t i = OP_CODEBOOK_3INST; i <= OP_CODEBOOK_MUL1; i++)
        if (strcmp(name, format_codebook_name((enum op_codebook)i)) == 0)
            return (enum op_codebook)i;
    fail_msg("codebook %s", name);
    return OP_CODEBOOK_3INST;
}

static uint32_t half_bits_of(const struct json *object)
{
    return (uint32_t)(2 * number_of(object, "K"));
}

static void sha256_is(const void *data, size_t bytes, const char *expected)
{
    uint8_t digest[32];
    char text[65];
    hash_sha256(data, bytes, digest);
    hex_encode(digest, sizeof(digest), text);
    assert_string_equal(text, expected);
}

static void codebooks(void **state)
{
    (void)state;
    static uint16_t table[65536];
    GOLDEN_EACH(book, json_get(golden_json("exl3.json"), "codebooks"))
    {
        char name[16];
        snprintf(name, sizeof(name), "%.*s", (int)book->key_bytes, book->key);
        for (uint32_t s = 0; s < 65536; s++) {
            float value = op_exl3_value(codebook_named(name), (uint16_t)s);
            table[s] = op_f16_from_f32(value);
            assert_true(op_f32_from_f16(table[s]) == value);
        }
        assert_int_equal(crc32_of(table, sizeof(table)), hex_of(book, "crc32"));
        sha256_is(table, sizeof(table), text_of(book, "sha256"));
    }
}

/* Every state but for its new bits repeats the one before, around the ring. */
static void check_recurrence(const uint16_t states[256], uint32_t half_bits)
{
    for (uint32_t t = 0; t < 256; t++) {
        uint32_t before = states[(t + 255) % 256];
        uint32_t begin = t > 0 ? op_exl3_ring_end(half_bits, t - 1) : 0;
        uint32_t bits = op_exl3_ring_end(half_bits, t) - begin;
        uint32_t new_bits = states[t] & ((1u << bits) - 1);
        assert_int_equal(states[t], (before << bits | new_bits) & 0xffff);
    }
}

static void tile_values(const uint8_t *tile, uint32_t half_bits, enum op_codebook codebook,
                        uint16_t ret_f16[256])
{
    struct op_quantised w = {.format = OP_FORMAT_EXL3,
                             .out = 16,
                             .in = 16,
                             .codes = tile,
                             .codebook = codebook,
                             .half_bits = half_bits};
    float values[256];
    op_exl3_tile(&w, 0, 0, values, 16);
    for (uint32_t i = 0; i < 256; i++)
        ret_f16[i] = op_f16_from_f32(values[i]);
}

static void check_tile(const struct json *test)
{
    uint32_t half_bits = half_bits_of(test), x = u32_of(test, "seed"), index = 0;
    uint8_t tile[2 * OP_EXL3_TILE_U16_MAX], packed[2 * OP_EXL3_TILE_U16_MAX];
    uint16_t states[256], values[256];
    for (uint32_t i = 0; i < op_exl3_tile_u16(half_bits); i++) {
        uint16_t word = (uint16_t)(lcg_next(&x) >> 16);
        memcpy(tile + 2 * i, &word, 2);
    }
    op_exl3_states(tile, half_bits, states);
    GOLDEN_EACH(expected, json_get(test, "states"))
    {
        uint32_t t = index < 8 ? index : 254 + index - 8;
        assert_int_equal(states[t], strtoul(string_of(expected), NULL, 16));
        index++;
    }
    assert_int_equal(index, 10);
    assert_int_equal(crc32_of(states, sizeof(states)), hex_of(test, "states_crc32"));
    check_recurrence(states, half_bits);
    op_exl3_pack(states, half_bits, packed);
    assert_memory_equal(packed, tile, 2 * op_exl3_tile_u16(half_bits));
    GOLDEN_EACH(crc, json_get(test, "tile_crc32"))
    {
        char name[16];
        snprintf(name, sizeof(name), "%.*s", (int)crc->key_bytes, crc->key);
        assert_true(op_exl3_rate_exists(half_bits, codebook_named(name)));
        tile_values(tile, half_bits, codebook_named(name), values);
        assert_int_equal(crc32_of(values, sizeof(values)), strtoul(string_of(crc), NULL, 16));
    }
}

static void tiles(void **state)
{
    (void)state;
    uint32_t count = 0;
    GOLDEN_EACH(test, json_get(golden_json("exl3.json"), "tiles"))
    {
        check_tile(test);
        count++;
    }
    assert_true(count >= 11);
    assert_false(op_exl3_rate_exists(5, OP_CODEBOOK_MCG));
    assert_false(op_exl3_rate_exists(9, OP_CODEBOOK_MUL1));
    assert_false(op_exl3_rate_exists(1, OP_CODEBOOK_MUL1));
    assert_false(op_exl3_rate_exists(18, OP_CODEBOOK_MCG));
}

static void places_in_a_tile(void **state)
{
    (void)state;
    bool taken[16][16] = {{false}};
    for (uint32_t t = 0; t < 256; t++) {
        uint32_t r = op_exl3_row_of(t), c = op_exl3_column_of(t);
        uint32_t lane = 4 * (c & 7) + ((r & 7) >> 1);
        assert_int_equal(8 * lane + (r & 1) + 2 * (r >> 3) + 4 * (c >> 3), t);
        assert_false(taken[r][c]);
        taken[r][c] = true;
    }
}

static void hadamard(void **state)
{
    (void)state;
    const struct json *expected = json_get(json_get(golden_json("exl3.json"), "hadamard"), "H_v");
    double v[128], original[128];
    uint32_t index = 0;
    for (uint32_t i = 0; i < 128; i++)
        original[i] = v[i] = (double)(i * i % 17) - 8;
    op_hadamard128(v);
    GOLDEN_EACH(value, expected)
    {
        double number = 0;
        assert_true(json_f64(value, &number));
        assert_true(v[index++] == number);
    }
    assert_int_equal(index, 128);
    op_hadamard128(v);
    for (uint32_t i = 0; i < 128; i++)
        assert_true(v[i] == 128 * original[i]);
}

static void check_states_and_d(const struct json *linear, const struct op_quantised *w)
{
    uint32_t in = op_exl3_padded(w->in), out = op_exl3_padded(w->out), at = 0;
    uint16_t *states = malloc(2ull * in * out), *d = malloc(2ull * in * out);
    float *values = malloc(4ull * in * out);
    uint8_t packed[2 * OP_EXL3_TILE_U16_MAX];
    assert_true(states != NULL && d != NULL && values != NULL);
    for (uint32_t kt = 0; kt < in / 16; kt++)
        for (uint32_t nt = 0; nt < out / 16; nt++) {
            uint32_t bytes = 2 * op_exl3_tile_u16(w->half_bits);
            const uint8_t *tile = w->codes + kt * w->row_bytes + (uint64_t)nt * bytes;
            op_exl3_states(tile, w->half_bits, states + at);
            check_recurrence(states + at, w->half_bits);
            op_exl3_pack(states + at, w->half_bits, packed);
            assert_memory_equal(packed, tile, bytes);
            op_exl3_tile(w, kt, nt, values + (uint64_t)kt * 16 * out + nt * 16, out);
            at += 256;
        }
    for (uint32_t i = 0; i < in * out; i++)
        d[i] = op_f16_from_f32(values[i]);
    assert_int_equal(crc32_of(states, 2ull * in * out), hex_of(linear, "states_crc32"));
    assert_int_equal(crc32_of(d, 2ull * in * out), hex_of(linear, "D_crc32"));
    sha256_is(d, 2ull * in * out, text_of(linear, "D_sha256"));
    free(states);
    free(d);
    free(values);
}

/* The stored W is padded and [in, out]; ours is neither. */
static void check_w(const struct safetensors *expect, const struct json *linear,
                    const struct op_quantised *w)
{
    uint32_t out_padded = op_exl3_padded(w->out);
    float *expected = golden_floats(expect, text_of(linear, "W"));
    float *dense = malloc(4ull * w->in * w->out);
    assert_non_null(dense);
    struct op_dequantise_args args = {.w = w, .y = dense};
    assert_int_equal(op_dequantise_ref(&args, &one_thread), ERR_OK);
    for (uint32_t i = 0; i < w->in; i++)
        for (uint32_t o = 0; o < w->out; o++) {
            double e = expected[(uint64_t)i * out_padded + o], v = dense[(uint64_t)o * w->in + i];
            double scale = fabs(op_exl3_in_scale(w, i)) * fabs(op_exl3_out_scale(w, o));
            if (!(fabs(v - e) <= 2e-5 * scale + 1e-30) || (scale == 0 && v != 0))
                fail_msg("%s: W[%u][%u] is %g, not %g", text_of(linear, "name"), i, o, v, e);
        }
    free(dense);
    free(expected);
}

static float *linear_of(const struct op_quantised *w, const float *x, uint32_t rows,
                        uint64_t x_stride)
{
    float *y = malloc(4ull * rows * w->out);
    assert_non_null(y);
    for (uint64_t i = 0; i < (uint64_t)rows * w->out; i++)
        y[i] = NAN;
    struct op_quantised_linear_args args = {
        .x = x, .w = w, .y = y, .rows = rows, .x_stride = x_stride, .y_stride = w->out};
    assert_int_equal(op_quantised_linear_ref(&args, &one_thread), ERR_OK);
    return y;
}

static void check_y(const struct safetensors *expect, const struct json *linear,
                    const struct op_quantised *w)
{
    float *x = golden_floats(expect, text_of(linear, "x"));
    float *expected = golden_floats(expect, text_of(linear, "y"));
    const struct safetensors_tensor *t = golden_tensor(expect, text_of(linear, "y"));
    float *y = linear_of(w, x, X_ROWS, w->in);
    uint64_t columns = t->shape[1];
    assert_int_equal(t->shape[0], X_ROWS);
    assert_true(columns >= w->out);
    for (uint32_t r = 0; r < X_ROWS; r++)
        memmove(expected + (uint64_t)r * w->out, expected + r * columns, 4ull * w->out);
    compare_rows(text_of(linear, "name"), y, expected, X_ROWS, w->out, 4e-5);
    /* A row alone has the same bits as in the batch. */
    for (uint32_t r = 0; r < X_ROWS; r++) {
        float *alone = linear_of(w, x + (uint64_t)r * w->in, 1, w->in);
        assert_memory_equal(alone, y + (uint64_t)r * w->out, 4ull * w->out);
        free(alone);
    }
    free(x);
    free(y);
    free(expected);
}

static void check_description(const struct json *linear, const struct format_info *info)
{
    assert_int_equal(info->kind, FORMAT_EXL3);
    assert_string_equal(format_codebook_name(info->codebook), text_of(linear, "codebook"));
    assert_int_equal(info->half_bits, half_bits_of(linear));
    assert_int_equal(info->in_padded, u32_of(linear, "in_padded"));
    assert_int_equal(info->out_padded, u32_of(linear, "out_padded"));
    assert_int_equal(info->has_bias, bool_of(linear, "bias"));
    assert_string_equal(info->signs_in ? "su_sv" : "suh_svh", text_of(linear, "scales"));
    assert_string_equal(info->signs_out ? "su_sv" : "suh_svh", text_of(linear, "scales"));
}

static void linears(void **state)
{
    (void)state;
    const struct json *root = golden_json("exl3.json");
    struct safetensors *set = golden_tensors("exl3.safetensors");
    struct safetensors *expect = golden_tensors("exl3_expect.safetensors");
    uint32_t count = 0;
    GOLDEN_EACH(linear, json_get(root, "linears"))
    {
        struct format_info info;
        struct op_quantised w;
        enum format_fault fault;
        struct err_detail detail = {""};
        golden_bind(set, linear, &info, &w);
        check_description(linear, &info);
        assert_int_equal(format_check_values(text_of(linear, "name"), &info, &w, &fault, &detail),
                         ERR_OK);
        check_states_and_d(linear, &w);
        if (json_get(linear, "W") != NULL)
            check_w(expect, linear, &w);
        if (json_get(linear, "y") != NULL)
            check_y(expect, linear, &w);
        count++;
    }
    assert_int_equal(count, 40);
    safetensors_close(&set);
    safetensors_close(&expect);
}

/* The config says mcg: other codebooks load all the same, with a warning. */
static void codebooks_against_the_config(void **state)
{
    (void)state;
    const struct json *root = golden_json("exl3.json");
    struct safetensors *set = golden_tensors("exl3.safetensors");
    struct format_hint hint;
    format_hint_read(json_get(root, "config"), NULL, &hint);
    GOLDEN_EACH(linear, json_get(root, "linears"))
    {
        struct format_info info;
        struct op_quantised w;
        enum format_fault fault;
        struct err_detail detail = {""};
        assert_int_equal(format_bind(set, text_of(linear, "name"), u32_of(linear, "out"),
                                     u32_of(linear, "in"), &hint, &info, &w, &fault, &detail),
                         ERR_OK);
        assert_int_equal(info.warnings,
                         info.codebook == OP_CODEBOOK_MCG ? 0 : FORMAT_WARN_CONFIG_MISMATCH);
    }
    safetensors_close(&set);
}

static void experts_share_input_scales(void **state)
{
    (void)state;
    struct safetensors *set = golden_tensors("exl3.safetensors");
    GOLDEN_EACH(pair, json_get(golden_json("exl3.json"), "equal_suh"))
    {
        const struct safetensors_tensor *a = golden_tensor(set, string_of(json_at(pair, 0)));
        const struct safetensors_tensor *b = golden_tensor(set, string_of(json_at(pair, 1)));
        assert_int_equal(a->bytes, b->bytes);
        assert_memory_equal(a->data, b->data, a->bytes);
    }
    safetensors_close(&set);
}

/* Encodings of a Gaussian matrix: the error says whether W comes out in the right place. */
static void encodings_of_a_matrix(void **state)
{
    (void)state;
    const struct json *root = golden_json("quantizer.json");
    struct safetensors *set = golden_tensors("quantizer.safetensors");
    float *original = golden_floats(set, "W");
    uint32_t count = 0;
    GOLDEN_EACH(linear, json_get(json_get(root, "examples"), "linears"))
    {
        struct format_info info;
        struct op_quantised w;
        enum format_fault fault;
        struct err_detail detail = {""};
        static float dense[256 * 256];
        double error = 0, square = 0, expected = number_of(linear, "relative_error");
        if (format_bind(set, text_of(linear, "name"), 256, 256, NULL, &info, &w, &fault, &detail) !=
            ERR_OK)
            fail_msg("%s", detail.text);
        struct op_dequantise_args args = {.w = &w, .y = dense};
        assert_int_equal(op_dequantise_ref(&args, &one_thread), ERR_OK);
        for (uint32_t i = 0; i < 256; i++)
            for (uint32_t o = 0; o < 256; o++) {
                double e = original[i * 256 + o], v = dense[o * 256 + i];
                error += (v - e) * (v - e);
                square += e * e;
            }
        assert_true(fabs(error / square - expected) < 1e-5 * expected + 1e-9);
        count++;
    }
    assert_int_equal(count, 4);
    free(original);
    safetensors_close(&set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codebooks),
        cmocka_unit_test(tiles),
        cmocka_unit_test(places_in_a_tile),
        cmocka_unit_test(hadamard),
        cmocka_unit_test(linears),
        cmocka_unit_test(codebooks_against_the_config),
        cmocka_unit_test(experts_share_input_scales),
        cmocka_unit_test(encodings_of_a_matrix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
