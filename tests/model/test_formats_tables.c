/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"
#include "tests/model/golden_formats.h"

#define SAMPLES 65536u

/* The two sequences of the tables: all magnitudes, and magnitudes near those of the format. */
static uint32_t samples(bool near, float *ret_values)
{
    uint32_t x = near ? 54321 : 12345, count = 0;
    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint32_t high = lcg_next(&x) >> 16;
        uint32_t bits = high << 16 | lcg_next(&x) >> 16;
        if (near)
            bits = (bits & 0x807fffffu) | (105 + (bits >> 23 & 255) % 33) << 23;
        if (!isnan(float_of(bits)))
            ret_values[count++] = float_of(bits);
    }
    return count;
}

static uint32_t code_of(const struct json *entry, const char *key)
{
    bool text = json_is(json_get(entry, key), JSON_STRING);
    return text ? hex_of(entry, key) : u32_of(entry, key);
}

static bool is_nan_entry(const struct json *entry)
{
    return json_string_is(json_get(entry, "class"), "nan");
}

static void check_decode(const struct json *table, const char *code_key,
                         float (*decode)(uint32_t code))
{
    GOLDEN_EACH(entry, json_get(table, "decode"))
    {
        float value = decode(code_of(entry, code_key));
        if (is_nan_entry(entry))
            assert_true(isnan(value));
        else
            assert_int_equal(bits_of_float(value), hex_of(entry, "f32"));
    }
}

static void check_encode(const struct json *table, const char *code_key,
                         uint32_t (*encode)(float value))
{
    GOLDEN_EACH(entry, json_get(table, "encode"))
    {
        uint32_t code = encode(float_of(hex_of(entry, "f32")));
        if (json_get(entry, "also") != NULL && code == hex_of(entry, "also"))
            continue;
        assert_int_equal(code, code_of(entry, code_key));
    }
}

static void check_samples(const struct json *table, const char *which, size_t code_bytes,
                          uint32_t (*encode)(float value))
{
    static float values[SAMPLES];
    static uint8_t codes[2 * SAMPLES];
    uint32_t count = samples(strcmp(which, "near") == 0, values);
    if (strcmp(which, "wide") == 0)
        assert_int_equal(count, 65242);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t code = encode(values[i]);
        memcpy(codes + i * code_bytes, &code, code_bytes);
    }
    assert_int_equal(crc32_of(codes, count * code_bytes),
                     hex_of(json_get(table, "encode_crc32"), which));
}

static void check_table_crc(const struct json *table, const char *key, const uint32_t *codes,
                            size_t count, float (*decode)(uint32_t code))
{
    uint32_t *bits = malloc(count * sizeof(*bits));
    assert_non_null(bits);
    for (size_t i = 0; i < count; i++) {
        float value = decode(codes[i]);
        bits[i] = isnan(value) ? 0x7fc00000u : bits_of_float(value);
    }
    assert_int_equal(crc32_of(bits, count * sizeof(*bits)), hex_of(table, key));
    free(bits);
}

static float decode_e4m3(uint32_t code)
{
    return op_e4m3_values[code];
}

static float decode_e2m1(uint32_t code)
{
    return op_e2m1_values[code];
}

static float decode_e8m0(uint32_t code)
{
    return op_f32_from_e8m0((uint8_t)code);
}

static float decode_f16(uint32_t code)
{
    return op_f32_from_f16((uint16_t)code);
}

static float decode_bf16(uint32_t code)
{
    return op_f32_from_bf16((uint16_t)code);
}

static uint32_t encode_e4m3(float value)
{
    return op_e4m3_from_f32(value);
}

static uint32_t encode_e2m1(float value)
{
    return op_e2m1_from_f32(value);
}

static uint32_t encode_f16(float value)
{
    return op_f16_from_f32(value);
}

static uint32_t encode_bf16(float value)
{
    return op_bf16_from_f32(value);
}

static void e4m3(void **state)
{
    (void)state;
    const struct json *table = golden_json("tables/e4m3.json");
    uint32_t codes[256];
    for (uint32_t i = 0; i < 256; i++)
        codes[i] = i;
    check_decode(table, "code", decode_e4m3);
    check_encode(table, "code", encode_e4m3);
    check_samples(table, "wide", 1, encode_e4m3);
    check_samples(table, "near", 1, encode_e4m3);
    check_table_crc(table, "decode_crc32", codes, 256, decode_e4m3);
    for (uint32_t i = 0; i < 256; i++)
        if ((i & OP_E4M3_NAN_MASK) != OP_E4M3_NAN_MASK)
            assert_int_equal(op_e4m3_from_f32(op_e4m3_values[i]), i);
}

static void e2m1(void **state)
{
    (void)state;
    const struct json *table = golden_json("tables/e2m1.json");
    check_decode(table, "code", decode_e2m1);
    check_encode(table, "code", encode_e2m1);
    check_samples(table, "near", 1, encode_e2m1);
    GOLDEN_EACH(tie, json_get(table, "ties"))
    {
        float value = (float)number_of(tie, "value");
        assert_int_equal(op_e2m1_from_f32(value), code_of(tie, "code"));
    }
}

static void e8m0(void **state)
{
    (void)state;
    const struct json *table = golden_json("tables/e8m0.json");
    uint32_t codes[256];
    for (uint32_t code = 0; code < 256; code++)
        codes[code] = code;
    check_decode(table, "code", decode_e8m0);
    check_table_crc(table, "decode_crc32", codes, 256, decode_e8m0);
    const struct json *cases = json_get(json_get(table, "scale_round_up"), "cases");
    GOLDEN_EACH(entry, cases)
    assert_int_equal(op_e8m0_for_e4m3(float_of(hex_of(entry, "amax"))), hex_of(entry, "code"));
}

static void check_nans(const struct json *table, uint32_t exponent, uint32_t (*encode)(float value))
{
    GOLDEN_EACH(bits, json_get(table, "encode_nan"))
    {
        uint32_t code = encode(float_of((uint32_t)strtoul(string_of(bits), NULL, 16)));
        assert_true((code & 0x7fff) > exponent);
    }
}

static void bf16(void **state)
{
    (void)state;
    const struct json *table = golden_json("tables/bf16.json");
    check_decode(table, "bf16", decode_bf16);
    check_encode(table, "bf16", encode_bf16);
    check_samples(table, "wide", 2, encode_bf16);
    check_samples(table, "near", 2, encode_bf16);
    check_nans(table, 0x7f80, encode_bf16);
}

static void f16(void **state)
{
    (void)state;
    const struct json *table = golden_json("tables/f16.json");
    static uint32_t codes[65536];
    uint32_t count = 0;
    check_decode(table, "f16", decode_f16);
    check_encode(table, "f16", encode_f16);
    check_samples(table, "wide", 2, encode_f16);
    check_samples(table, "near", 2, encode_f16);
    check_nans(table, 0x7c00, encode_f16);
    GOLDEN_EACH(bits, json_get(table, "decode_nan"))
    assert_true(isnan(decode_f16((uint32_t)strtoul(string_of(bits), NULL, 16))));
    for (uint32_t code = 0; code < 65536; code++)
        if (!isnan(decode_f16(code)))
            codes[count++] = code;
    assert_int_equal(count, 63490);
    check_table_crc(table, "decode_all_crc32", codes, count, decode_f16);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(op_f16_from_f32(decode_f16(codes[i])), codes[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3), cmocka_unit_test(e2m1), cmocka_unit_test(e8m0),
        cmocka_unit_test(bf16), cmocka_unit_test(f16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
