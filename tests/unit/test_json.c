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

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

static struct arena arena;

static struct json *parse(const char *text, size_t bytes, const struct json_options *options)
{
    struct json *value = NULL;
    struct json_error error = {0, NULL};
    arena_reset(&arena);
    enum err e = json_parse(&arena, options, text, bytes, &value, &error);
    if (e != ERR_OK)
        fail_msg("%s: %s at %zu", text, error.reason, error.offset);
    return value;
}

static struct json *parse_text(const char *text)
{
    return parse(text, strlen(text), NULL);
}

static void written_as_python_spaces_it(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {" null ", "null"},
        {"[true,false]", "[true, false]"},
        {"{ }", "{}"},
        {"[\n]", "[]"},
        {"{\"a\":1,\"b\":[{},[],{\"c\":\"d\"}]}", "{\"a\": 1, \"b\": [{}, [], {\"c\": \"d\"}]}"},
        {"[[[[1]]],2]", "[[[[1]]], 2]"},
        {"\"\\b\\t\\n\\f\\r\\\"\\\\\\/\\u0001\\u001F\\u007f\\u2028<&\"",
         "\"\\b\\t\\n\\f\\r\\\"\\\\/\\u0001\\u001f\x7f\xe2\x80\xa8<&\""},
        {"\"\\u00e9\\uD83D\\ude00\"", "\"\xc3\xa9\xf0\x9f\x98\x80\""},
        {"{\"\":\"\"}", "{\"\": \"\"}"},
        {"{\"\\n\":0}", "{\"\\n\": 0}"},
        {"\"\\u0000\"", "\"\\u0000\""},
    };
    for (size_t i = 0; i < ARRAY_COUNT(cases); i++) {
        struct str out;
        str_init(&out, 0);
        json_write(&out, parse_text(cases[i][0]), JSON_NUMBERS_PYTHON);
        assert_string_equal(out.text, cases[i][1]);
        str_fini(&out);
    }
}

static void compact_and_parts(void **state)
{
    (void)state;
    struct str out;
    struct json *value = parse_text(" { \"a\" : [ 1 , 2.50 ] , \"b\" : { \"c\" : null } } ");
    str_init(&out, 0);
    json_write_compact(&out, value);
    assert_string_equal(out.text, "{\"a\":[1,2.50],\"b\":{\"c\":null}}");
    str_clear(&out);
    json_write(&out, json_get(value, "a"), JSON_NUMBERS_VERBATIM); /* no sibling with it */
    assert_string_equal(out.text, "[1, 2.50]");
    str_clear(&out);
    json_write_string(&out, "a\0\"", 3);
    json_write_escaped(&out, "\\\x1f", 2);
    json_write_string(&out, NULL, 0);
    assert_string_equal(out.text, "\"a\\u0000\\\"\"\\\\\\u001f\"\"");
    str_fini(&out);
}

/* Right column: what Python 3.11 prints for json.dumps(json.loads(left)). */
static const char *const python_numbers[][2] = {
    {"0", "0"},
    {"-0", "0"},
    {"0.0", "0.0"},
    {"-0.0", "-0.0"},
    {"-1", "-1"},
    {"1.0", "1.0"},
    {"1.10", "1.1"},
    {"1e10", "10000000000.0"},
    {"1E10", "10000000000.0"},
    {"1e+10", "10000000000.0"},
    {"1e15", "1000000000000000.0"},
    {"1e16", "1e+16"},
    {"123456789012345678", "123456789012345678"},
    {"-1234567890123456789012345678901234567890", "-1234567890123456789012345678901234567890"},
    {"0.0001", "0.0001"},
    {"0.00001", "1e-05"},
    {"-0.00001", "-1e-05"},
    {"5e-324", "5e-324"},
    {"4.9e-324", "5e-324"},
    {"2.225073858507201e-308", "2.225073858507201e-308"},
    {"2.2250738585072014e-308", "2.2250738585072014e-308"},
    {"1.7976931348623157e308", "1.7976931348623157e+308"},
    {"1e400", "Infinity"},
    {"-1e400", "-Infinity"},
    {"1e-400", "0.0"},
    {"-1e-400", "-0.0"},
    {"0.30000000000000004", "0.30000000000000004"},
    {"1e22", "1e+22"},
    {"1e23", "1e+23"},
    {"9007199254740993.0", "9007199254740992.0"},
    {"9999999999999998.0", "9999999999999998.0"},
    {"99999999999999999.0", "1e+17"},
    {"123456789.123456789", "123456789.12345679"},
    {"5.684341886080801e-14", "5.684341886080801e-14"},
    {"5.6843418860808015e-14", "5.684341886080802e-14"}, /* 2^-44 */
    {"-2.5e3", "-2500.0"},
    {"12345678901234567.0", "1.2345678901234568e+16"},
    {"0.5e-1", "0.05"},
    {"1.0E+2", "100.0"},
    {"-0e0", "-0.0"},
    {"0e5", "0.0"},
    {"179769313486231580793728971405301e276", "1.7976931348623157e+308"},
    {"1.09285889832135532e+07", "10928588.983213553"},
    {"1.41866135258496140e+134", "1.4186613525849614e+134"},
    {"-7.57196855605586746e-74", "-7.571968556055867e-74"},
    {"1.39960163039770102e-01", "0.1399601630397701"},
    {"1.01853664031721996e-244", "1.01853664031722e-244"},
    {"3.56409621163655981e+161", "3.56409621163656e+161"},
    {"-1.03951424156321175e+15", "-1039514241563211.8"},
    {"5.78040217714115058e-220", "5.7804021771411506e-220"},
};

static void numbers_as_python_prints_them(void **state)
{
    (void)state;
    struct str out;
    str_init(&out, 0);
    for (size_t i = 0; i < ARRAY_COUNT(python_numbers); i++) {
        struct json *value = parse_text(python_numbers[i][0]);
        str_clear(&out);
        json_write(&out, value, JSON_NUMBERS_PYTHON);
        assert_string_equal(out.text, python_numbers[i][1]);
        str_clear(&out);
        json_write(&out, value, JSON_NUMBERS_VERBATIM);
        assert_string_equal(out.text, python_numbers[i][0]);
    }
    str_clear(&out);
    json_write_f64(&out, NAN);
    assert_string_equal(out.text, "NaN");
    str_fini(&out);
}

static void shortest_doubles_read_back(void **state)
{
    (void)state;
    struct rng rng;
    struct str out;
    rng_init(&rng, 0x5eed0007);
    str_init(&out, 0);
    for (int i = 0; i < 30000; i++) {
        uint64_t bits = rng_u64(&rng);
        double value;
        if (i % 3 == 0)
            bits &= 0xfff0000000000000u; /* powers of two */
        if (i % 3 == 1)
            bits &= 0x800fffffffffffffu; /* subnormal */
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value))
            continue;
        str_clear(&out);
        json_write_f64(&out, value);
        double back = strtod(out.text, NULL);
        if (memcmp(&back, &value, sizeof value) != 0)
            fail_msg("%s is not %.17g", out.text, value);
        /* Nothing with fewer digits reads back. */
        int digits = 0;
        for (const char *p = out.text; *p != '\0' && *p != 'e'; p++)
            digits += (*p >= '1' && *p <= '9') || (*p == '0' && digits > 0);
        char text[40];
        for (int precision = 1; precision < digits && strchr(out.text, 'e'); precision++) {
            snprintf(text, sizeof text, "%.*e", precision - 1, value);
            if (strtod(text, NULL) == value)
                fail_msg("%s is shorter than %s", text, out.text);
        }
    }
    str_fini(&out);
}

struct bad_case {
    const char *text;
    int offset; /* -1: the end */
};

static const struct bad_case bad_cases[] = {
    {"", -1},
    {" ", -1},
    {"[", -1},
    {"]", 0},
    {"{", -1},
    {"}", 0},
    {"[1", -1},
    {"[1,", -1},
    {"[1,]", 3},
    {"[,1]", 1},
    {"[1 2]", 3},
    {"[1}", 2},
    {"{\"a\"}", 4},
    {"{\"a\":}", 5},
    {"{\"a\":1,}", 7},
    {"{a:1}", 1},
    {"{\"a\" 1}", 5},
    {"{\"a\":1]", 6},
    {"{1:2}", 1},
    {"{\"a\":1", -1},
    {"{\"a\"", -1},
    {"{\"a\":", -1},
    {"\"", -1},
    {"\"abc", -1},
    {"\"\\", -1},
    {"\"\\\"", -1},
    {"\"\\x\"", 1},
    {"\"\\u\"", 1},
    {"\"\\u12\"", 1},
    {"\"\\u12g4\"", 1},
    {"\"\\u123", 1},
    {"\"a\\'\"", 2},
    {"\"\n\"", 1},
    {"\"\t\"", 1},
    {"\"\x1f\"", 1},
    {"\"\\ud800\"", 1},
    {"\"\\udc00\"", 1},
    {"\"\\ud800\\ud800\"", 1},
    {"\"\\ud800\\u0041\"", 1},
    {"\"\\ud800x\"", 1},
    {"\"\\ud83d\\ude0\"", 1},
    {"'a'", 0},
    {"01", 1},
    {"-01", 2},
    {"-", -1},
    {"+1", 0},
    {"1.", -1},
    {".5", 0},
    {"1.e1", 2},
    {"1e", -1},
    {"1e+", -1},
    {"--1", 1},
    {"0x1", 1},
    {"1 1", 2},
    {"NaN", 0},
    {"Infinity", 0},
    {"-Infinity", 1},
    {"tru", 0},
    {"truee", 4},
    {"True", 0},
    {"nul", 0},
    {"nullx", 4},
    {"[1]]", 3},
    {"{}{}", 2},
    {"// c\n1", 0},
    {"[1/**/]", 2},
    {"\xef\xbb\xbf"
     "1",
     0},
    {"\xc2\xa0"
     "1",
     0},
    {"\f1", 0},
    {"\"\x80\"", 1},
    {"\"\xc0\xaf\"", 1},
    {"\"\xed\xa0\x80\"", 1},
    {"\"\xf4\x90\x80\x80\"", 1},
    {"\"ab\xe2\x82\"", 3},
    {"\"\xf0\x9f\x98", 1},
    {"{\"a\":1,\"a\":2}", 7},
    {"{\"a\":1,\"\\u0061\":2}", 7},
    {"{\"\":1,\"\":2}", 6},
    {"[{\"k\":{\"a\":1,\"b\":2,\"a\":3}}]", 19},
};

static void refusals_say_where(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_COUNT(bad_cases); i++) {
        const struct bad_case *c = &bad_cases[i];
        struct json *value = NULL;
        struct json_error error = {99, NULL};
        size_t bytes = strlen(c->text);
        size_t want = c->offset < 0 ? bytes : (size_t)c->offset;
        arena_reset(&arena);
        if (json_parse(&arena, NULL, c->text, bytes, &value, &error) != ERR_INVALID)
            fail_msg("%s was accepted", c->text);
        assert_null(value);
        assert_non_null(error.reason);
        assert_true(error.reason[0] != '\0');
        if (error.offset != want)
            fail_msg("%s: offset %zu, want %zu (%s)", c->text, error.offset, want, error.reason);
        /* A cut copy in memory of its own, so that a sanitizer sees a read past the end. */
        char *copy = malloc(bytes == 0 ? 1 : bytes);
        memcpy(copy, c->text, bytes);
        arena_reset(&arena);
        assert_int_equal(json_parse(&arena, NULL, copy, bytes, &value, NULL), ERR_INVALID);
        free(copy);
    }
    struct json *value = NULL;
    assert_int_equal(json_parse(&arena, NULL, "1\0", 2, &value, NULL), ERR_INVALID);
    assert_int_equal(json_parse(&arena, NULL, "\"\0\"", 3, &value, NULL), ERR_INVALID);
    assert_int_equal(json_parse(&arena, NULL, "\"\\\0\"", 4, &value, NULL), ERR_INVALID);
    assert_int_equal(json_parse(&arena, NULL, NULL, 0, &value, NULL), ERR_INVALID);
}

static void options_relax(void **state)
{
    (void)state;
    const struct json_options replace = {.lone_surrogate_replace = true};
    const char *text = "\"a\\ud83dx\\udE00\\ud83d\\ud83d\\ude00\\ud800\\n\"";
    struct json *value = parse(text, strlen(text), &replace);
    assert_true(json_string_is(value, "a\xef\xbf\xbdx\xef\xbf\xbd\xef\xbf\xbd\xf0\x9f\x98\x80"
                                      "\xef\xbf\xbd\n"));
    const struct json_options bom = {.bom_skip = true};
    assert_true(json_is(parse("\xef\xbb\xbf[]", 5, &bom), JSON_ARRAY));
    assert_true(json_is(parse("[]", 2, &bom), JSON_ARRAY));
    struct json_error error;
    assert_int_equal(json_parse(&arena, &bom, "\xef\xbb\xbf\xef\xbb\xbf[]", 8, &value, &error),
                     ERR_INVALID);
    assert_int_equal(error.offset, 3);
}

static void last_duplicate_stands_at_the_first_place(void **state)
{
    (void)state;
    const struct json_options last = {.duplicate_keys_last = true};
    const char *text = "{\"a\":[1,{\"x\":2}],\"b\":2,\"a\":{\"c\":1,\"d\":0,\"c\":[]},\"b\":null,"
                       "\"e\":5,\"\\u0061\":[7]}";
    struct str out;
    struct json *value = parse(text, strlen(text), &last);
    assert_int_equal(value->count, 3);
    str_init(&out, 0);
    json_write_compact(&out, value);
    assert_string_equal(out.text, "{\"a\":[7],\"b\":null,\"e\":5}");

    /* Also where members are found by hash. */
    struct str big;
    str_init(&big, 0);
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 500; i++)
            str_add_format(&big, "%s\"key%d\":%d", big.bytes == 0 ? "{" : ",", i, round * 1000 + i);
    str_add_char(&big, '}');
    value = parse(big.text, big.bytes, &last);
    assert_int_equal(value->count, 500);
    int i = 0;
    for (struct json *m = value->child; m != NULL; m = m->next, i++) {
        uint64_t number;
        assert_true(json_u64(m, &number));
        assert_int_equal(number, 2000 + i);
    }
    struct json_error error;
    assert_int_equal(json_parse(&arena, NULL, big.text, big.bytes, &value, &error), ERR_INVALID);
    assert_memory_equal(big.text + error.offset, "\"key0\":1000", 11);
    str_fini(&out);
    str_fini(&big);
}

static void bounds(void **state)
{
    (void)state;
    char text[300];
    struct json *value = NULL;
    struct json_error error;
    memset(text, '[', 100);
    memset(text + 100, ']', 100);
    for (uint32_t depth = 1; depth < 100; depth++) {
        struct json_options options = {.depth_max = depth == 64 ? 0 : depth};
        assert_true(json_is(parse(text + 100 - depth, 2 * depth, &options), JSON_ARRAY));
        arena_reset(&arena);
        assert_int_equal(
            json_parse(&arena, &options, text + 99 - depth, 2 * depth + 1, &value, &error),
            ERR_INVALID);
        assert_int_equal(error.offset, depth);
    }
    const struct json_options small = {.bytes_max = 10};
    assert_non_null(parse("[1234567]  ", 10, &small));
    assert_int_equal(json_parse(&arena, &small, "[1234567]  ", 11, &value, &error), ERR_TOO_LARGE);
    /* An arena that is too small, at every place it can run out. */
    const char *object = "{\"a\":[1,2,\"\\n\"],\"b\":{\"c\":{}}}";
    size_t refused = 0;
    for (size_t bytes = 16; bytes < 4096; bytes += 16) {
        struct arena tight;
        arena_init(&tight, 64, bytes);
        enum err e = json_parse(&tight, NULL, object, strlen(object), &value, &error);
        assert_true(e == ERR_OK || e == ERR_NOMEM);
        assert_int_equal(e == ERR_NOMEM, tight.overflow);
        refused += e == ERR_NOMEM;
        arena_fini(&tight);
    }
    assert_in_range(refused, 20, 200);
    struct str out;
    str_init(&out, 5);
    json_write(&out, parse_text("[1,2,3]"), JSON_NUMBERS_VERBATIM);
    assert_true(out.overflow);
    str_fini(&out);
}

static void deep_trees_are_written_without_recursion(void **state)
{
    (void)state;
    const size_t depth = 200000;
    const struct json_options options = {.depth_max = 200000};
    struct str text, out;
    str_init(&text, 0);
    str_init(&out, 0);
    for (size_t i = 0; i < depth; i++)
        str_add_text(&text, i % 2 == 0 ? "[" : "{\"k\":");
    /* The innermost container is an object; its only member needs a value. */
    str_add_text(&text, "0");
    for (size_t i = depth; i-- > 0;)
        str_add_text(&text, i % 2 == 0 ? "]" : "}");
    json_write_compact(&out, parse(text.text, text.bytes, &options));
    assert_int_equal(out.bytes, text.bytes);
    assert_memory_equal(out.text, text.text, out.bytes);
    str_fini(&text);
    str_fini(&out);
}

static void reading(void **state)
{
    (void)state;
    struct json *value =
        parse_text("{\"n\":18446744073709551615,\"i\":-9223372036854775808,\"f\":1.5,\"e\":1e2,"
                   "\"s\":\"a\\u0000b\",\"t\":true,\"z\":-0,\"h\":1e999,\"l\":[0,1,2],\"d\":1.0}");
    uint64_t u = 7;
    int64_t i = 7;
    double d = 7;
    bool b = false;
    assert_int_equal(value->count, 10);
    assert_true(json_u64(json_get(value, "n"), &u) && u == UINT64_MAX);
    assert_false(json_i64(json_get(value, "n"), &i));
    assert_true(json_i64(json_get(value, "i"), &i) && i == INT64_MIN);
    assert_false(json_u64(json_get(value, "i"), &u));
    assert_true(json_f64(json_get(value, "n"), &d) && d == 18446744073709551615.0);
    assert_true(json_f64(json_get(value, "f"), &d) && d == 1.5);
    assert_false(json_u64(json_get(value, "f"), &u));
    assert_false(json_u64(json_get(value, "e"), &u));
    assert_false(json_u64(json_get(value, "d"), &u));
    assert_true(json_f64(json_get(value, "e"), &d) && d == 100);
    assert_false(json_f64(json_get(value, "h"), &d));
    assert_true(d == 100);
    assert_true(json_u64(json_get(value, "z"), &u) && u == 0);
    assert_true(json_i64(json_get(value, "z"), &i) && i == 0);
    assert_true(json_bool(json_get(value, "t"), &b) && b);
    assert_false(json_bool(json_get(value, "n"), &b));
    assert_false(json_u64(json_get(value, "s"), &u));
    assert_false(json_u64(NULL, &u));
    struct json *s = json_get(value, "s");
    assert_int_equal(s->bytes, 3);
    assert_memory_equal(s->text, "a\0b", 3);
    assert_false(json_string_is(s, "a"));
    assert_false(json_string_is(NULL, "a"));
    assert_null(json_get(value, "x"));
    assert_null(json_get(s, "x"));
    assert_null(json_get(NULL, "x"));
    struct json *list = json_get(value, "l");
    assert_true(json_u64(json_at(list, 2), &u) && u == 2);
    assert_null(json_at(list, 3));
    assert_null(json_at(value, 0));
    assert_false(json_is(NULL, JSON_NULL));
}

static void plain_text_is_borrowed(void **state)
{
    (void)state;
    const char *text = "[\"plain \xc3\xa9\",\"esc\\n\",12]";
    struct json *value = parse_text(text);
    assert_ptr_equal(json_at(value, 0)->text, text + 2);
    assert_int_equal(json_at(value, 1)->bytes, 4);
    const char *decoded = json_at(value, 1)->text;
    assert_true(decoded < text || decoded > text + strlen(text));
    assert_ptr_equal(json_at(value, 2)->text, strstr(text, "12"));
}

/* Every stop byte in every phase of the eight-byte scan, with and without one before it. */
static void scan_finds_every_stop(void **state)
{
    (void)state;
    for (int byte = 0; byte < 256; byte++)
        for (size_t at = 1; at < 20; at++) {
            char text[26];
            memset(text, 'a', sizeof text);
            text[0] = '"';
            text[24] = '"';
            text[at] = (char)byte;
            struct json *value = NULL;
            struct json_error error = {0, NULL};
            arena_reset(&arena);
            enum err e = json_parse(&arena, NULL, text, 25, &value, &error);
            bool plain = byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\';
            assert_int_equal(e == ERR_OK, plain);
            if (!plain)
                assert_int_equal(error.offset, byte == '"' ? at + 1 : at);
        }
}

static int arena_up(void **state)
{
    (void)state;
    arena_init(&arena, 1 << 16, (size_t)1 << 28);
    return 0;
}

static int arena_down(void **state)
{
    (void)state;
    arena_fini(&arena);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_as_python_spaces_it),
        cmocka_unit_test(compact_and_parts),
        cmocka_unit_test(numbers_as_python_prints_them),
        cmocka_unit_test(shortest_doubles_read_back),
        cmocka_unit_test(refusals_say_where),
        cmocka_unit_test(options_relax),
        cmocka_unit_test(last_duplicate_stands_at_the_first_place),
        cmocka_unit_test(bounds),
        cmocka_unit_test(deep_trees_are_written_without_recursion),
        cmocka_unit_test(reading),
        cmocka_unit_test(plain_text_is_borrowed),
        cmocka_unit_test(scan_finds_every_stop),
    };
    return cmocka_run_group_tests(tests, arena_up, arena_down);
}
