/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/rng.h"
#include "lib/base/str.h"

static void adding(void **state)
{
    (void)state;
    struct str s;
    str_init(&s, 0);
    assert_null(s.text);
    str_add(&s, NULL, 0);
    assert_string_equal(s.text, "");
    str_add_text(&s, "ab");
    str_add_char(&s, 'c');
    str_add(&s, "\0d", 2);
    assert_int_equal(s.bytes, 5);
    assert_memory_equal(s.text, "abc\0d", 6);
    str_drop_front(&s, 4);
    assert_string_equal(s.text, "d");
    str_drop_front(&s, 1);
    assert_int_equal(s.bytes, 0);
    str_add_format(&s, "%d-%s", 12, "x");
    assert_string_equal(s.text, "12-x");
    for (int i = 0; i < 300; i++)
        str_add_format(&s, "[%d]", i);
    assert_int_equal(s.bytes, 4 + 10 * 3 + 90 * 4 + 200 * 5);
    assert_int_equal(strlen(s.text), s.bytes);
    char *memory = s.text;
    str_clear(&s);
    assert_ptr_equal(s.text, memory);
    assert_string_equal(s.text, "");
    str_fini(&s);
    assert_null(s.text);
}

static void bound_keeps_a_prefix(void **state)
{
    (void)state;
    struct str s;
    str_init(&s, 10);
    str_add_text(&s, "12345678");
    str_add_format(&s, "%s", "9ab");
    assert_true(s.overflow);
    assert_string_equal(s.text, "12345678");
    str_add_char(&s, '9'); /* would fit, but must not close the gap */
    assert_string_equal(s.text, "12345678");
    str_clear(&s);
    assert_false(s.overflow);
    str_add_text(&s, "0123456789");
    assert_false(s.overflow);
    assert_string_equal(s.text, "0123456789");
    str_add_char(&s, 'x');
    assert_true(s.overflow);
    str_fini(&s);

    str_init(&s, 3);
    str_add_format(&s, "%d", 12345);
    assert_true(s.overflow);
    assert_int_equal(s.bytes, 0);
    str_fini(&s);
}

static void utf8_round_trip_of_every_code_point(void **state)
{
    (void)state;
    for (uint32_t code_point = 0; code_point < 0x120000; code_point++) {
        char bytes[4];
        size_t length = utf8_encode(code_point, bytes);
        bool legal = code_point <= 0x10ffff && (code_point < 0xd800 || code_point > 0xdfff);
        if (!legal) {
            if (length != 0)
                fail_msg("U+%04X was encoded", code_point);
            continue;
        }
        uint32_t back = ~0u;
        if (utf8_decode(bytes, length, &back) != length || back != code_point ||
            utf8_valid_prefix(bytes, length) != length)
            fail_msg("U+%04X does not come back", code_point);
        if (length > 1 && utf8_decode(bytes, length - 1, &back) != 0)
            fail_msg("U+%04X is read though cut", code_point);
    }
}

static void utf8_refuses(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "\x80",
        "\xbf",
        "\xc0\x80",
        "\xc1\xbf",
        "\xc2",
        "\xe0\x80\x80",
        "\xe0\x9f\xbf",
        "\xed\xa0\x80",
        "\xed\xbf\xbf",
        "\xe2\x82",
        "\xf0\x80\x80\x80",
        "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80",
        "\xff",
        "\xfe",
        "\xc3(",
        "\xe2(\xa1",
        "\xe2\x82(",
        "\xf0\x9f\x98",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint32_t code_point = 77;
        assert_int_equal(utf8_decode(bad[i], strlen(bad[i]), &code_point), 0);
        assert_int_equal(code_point, 77);
        /* At every distance from the start, so that the fast path is met in every phase. */
        for (size_t lead = 0; lead < 20; lead++) {
            char text[64];
            memset(text, 'a', sizeof text);
            memcpy(text + lead, bad[i], strlen(bad[i]));
            assert_int_equal(utf8_valid_prefix(text, sizeof text), lead);
        }
    }
    assert_int_equal(utf8_valid_prefix(NULL, 0), 0);
    assert_int_equal(utf8_valid_prefix("a\0b", 3), 3);
}

static void hex(void **state)
{
    (void)state;
    unsigned char bytes[256], back[256];
    char text[513];
    for (int i = 0; i < 256; i++)
        bytes[i] = (unsigned char)i;
    hex_encode(bytes, 256, text);
    assert_int_equal(strlen(text), 512);
    assert_memory_equal(text, "000102", 6);
    assert_memory_equal(text + 508, "feff", 4);
    assert_true(hex_decode(text, 512, back));
    assert_memory_equal(bytes, back, 256);
    assert_true(hex_decode("aAFf", 4, back));
    assert_int_equal(back[0], 0xaa);
    assert_int_equal(back[1], 0xff);
    back[0] = 1;
    assert_false(hex_decode("abc", 3, back));
    assert_false(hex_decode("0g", 2, back));
    assert_false(hex_decode("0 ", 2, back));
    assert_int_equal(back[0], 1);
    assert_true(hex_decode("", 0, back));
}

static void integers(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      " 1",
                                      "1 ",
                                      "+1",
                                      "-",
                                      "0x1",
                                      "1.0",
                                      "1e3",
                                      "18446744073709551616",
                                      "99999999999999999999999",
                                      "--1"};
    uint64_t u = 5;
    int64_t i = 5;
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        assert_false(text_to_u64(bad[k], strlen(bad[k]), &u));
        assert_false(text_to_i64(bad[k], strlen(bad[k]), &i));
    }
    assert_false(text_to_u64("-1", 2, &u));
    assert_int_equal(u, 5);
    assert_true(text_to_u64("18446744073709551615", 20, &u));
    assert_true(u == UINT64_MAX);
    assert_true(text_to_u64("12x", 2, &u));
    assert_int_equal(u, 12);
    assert_true(text_to_i64("9223372036854775807", 19, &i));
    assert_true(i == INT64_MAX);
    assert_true(text_to_i64("-9223372036854775808", 20, &i));
    assert_true(i == INT64_MIN);
    assert_false(text_to_i64("9223372036854775808", 19, &i));
    assert_false(text_to_i64("-9223372036854775809", 20, &i));
    assert_true(text_to_i64("-0", 2, &i));
    assert_true(i == 0);
}

static void doubles(void **state)
{
    (void)state;
    static const char *const bad[] = {"",    "-",    ".5", "1.", "1e",    "1e+", "nan",   "inf",
                                      "0x1", "1.e2", "1 ", " 1", "1e400", "+1",  "1e1.0", "1..2"};
    double d = 5;
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++)
        assert_false(text_to_f64(bad[k], strlen(bad[k]), &d));
    assert_true(d == 5);
    assert_true(text_to_f64("-1.5e-3", 7, &d));
    assert_true(d == -1.5e-3);
    assert_true(text_to_f64("5e-324", 6, &d));
    assert_true(d == 5e-324);
    assert_true(text_to_f64("-0", 2, &d));
    assert_true(d == 0 && signbit(d));
    assert_true(text_to_f64("1e-99999999999999999999", 23, &d));
    assert_true(d == 0);
}

/* Texts too long for one call of strtod on the stack must round as strtod rounds them. */
static void long_doubles_round_as_strtod(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 0x5eed0004);
    struct str s;
    str_init(&s, 0);
    for (int round = 0; round < 2000; round++) {
        str_clear(&s);
        if (rng_below(&rng, 2))
            str_add_char(&s, '-');
        uint32_t zeros = rng_below(&rng, 3) == 0 ? rng_below(&rng, 400) : 0;
        for (uint32_t i = 0; i < zeros; i++)
            str_add_char(&s, '0');
        uint32_t digits = 1 + rng_below(&rng, 1200);
        uint32_t point = rng_below(&rng, digits + 1);
        bool sparse = rng_below(&rng, 2) == 0;
        for (uint32_t i = 0; i < digits; i++) {
            bool nonzero = !sparse || i < 20 || rng_below(&rng, 300) == 0;
            str_add_char(&s, (char)('0' + (nonzero ? rng_below(&rng, 10) : 0)));
            if (i == point && i + 1 < digits)
                str_add_char(&s, '.');
        }
        if (rng_below(&rng, 2))
            str_add_format(&s, "e%d", (int)rng_below(&rng, 2400) - 1200);
        double want = strtod(s.text, NULL);
        double got = 12345;
        bool finite = text_to_f64(s.text, s.bytes, &got);
        assert_int_equal(finite, isfinite(want));
        if (finite && memcmp(&want, &got, sizeof got) != 0)
            fail_msg("%s is %.17g, not %.17g", s.text, want, got);
    }
    /* A half way case whose decision lies beyond digit 780: 2^53 + 1 and a far away 1. */
    str_clear(&s);
    str_add_text(&s, "9007199254740993.");
    for (int i = 0; i < 2000; i++)
        str_add_char(&s, '0');
    double d;
    assert_true(text_to_f64(s.text, s.bytes, &d));
    assert_true(d == 9007199254740992.0);
    str_add_char(&s, '1');
    assert_true(text_to_f64(s.text, s.bytes, &d));
    assert_true(d == 9007199254740994.0);
    str_fini(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adding),
        cmocka_unit_test(bound_keeps_a_prefix),
        cmocka_unit_test(utf8_round_trip_of_every_code_point),
        cmocka_unit_test(utf8_refuses),
        cmocka_unit_test(hex),
        cmocka_unit_test(integers),
        cmocka_unit_test(doubles),
        cmocka_unit_test(long_doubles_round_as_strtod),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
