/* SPDX-License-Identifier: Apache-2.0 */
/* Our parser against jansson on random texts, good and broken. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

/* Both libraries name their types alike. */
#define JSON_OBJECT  JANSSON_OBJECT
#define JSON_ARRAY   JANSSON_ARRAY
#define JSON_STRING  JANSSON_STRING
#define JSON_INTEGER JANSSON_INTEGER
#define JSON_REAL    JANSSON_REAL
#define JSON_TRUE    JANSSON_TRUE
#define JSON_FALSE   JANSSON_FALSE
#define JSON_NULL    JANSSON_NULL
#include <jansson.h>
#undef JSON_OBJECT
#undef JSON_ARRAY
#undef JSON_STRING
#undef JSON_INTEGER
#undef JSON_REAL
#undef JSON_TRUE
#undef JSON_FALSE
#undef JSON_NULL

#include "lib/base/arena.h"
#include "lib/base/json.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

#define CASES     30000
#define DEPTH_MAX 6

static struct rng rng;

static void make_space(struct str *out)
{
    while (rng_below(&rng, 8) == 0)
        str_add_char(out, " \t\n\r"[rng_below(&rng, 4)]);
}

static void make_string(struct str *out)
{
    static const char *const pieces[] = {
        "a",
        "key",
        "\\n",
        "\\\"",
        "\\\\",
        "\\/",
        "\\u0041",
        "\\u00e9",
        "\\ud83d\\ude00",
        "\xc3\xa9",
        "\xe2\x82\xac",
        "\xf0\x9f\x98\x80",
        "\\u0000",
        "\\ud83d",
        "\x7f",
        "long plain text without anything in it",
        "\\b\\f\\r\\t",
        "'",
        "\\uFFFF",
    };
    str_add_char(out, '"');
    for (uint32_t i = rng_below(&rng, 5); i > 0; i--) {
        /* The lone surrogate (13) is rare, or hardly a text would be good. */
        uint32_t k = rng_below(&rng, sizeof pieces / sizeof pieces[0]);
        str_add_text(out, k == 13 && rng_below(&rng, 50) != 0 ? "k" : pieces[k]);
    }
    str_add_char(out, '"');
}

static void make_number(struct str *out)
{
    str_add_text(out, rng_below(&rng, 3) == 0 ? "-" : "");
    if (rng_below(&rng, 4) == 0)
        str_add_char(out, '0');
    else
        str_add_format(out, "%u", 1 + (rng_u32(&rng) >> rng_below(&rng, 31)) / 2);
    if (rng_below(&rng, 3) == 0)
        str_add_format(out, ".%u", rng_u32(&rng) >> rng_below(&rng, 31));
    if (rng_below(&rng, 4) == 0)
        str_add_format(out, "%c%s%u", "eE"[rng_below(&rng, 2)], rng_below(&rng, 2) ? "-" : "",
                       rng_below(&rng, 330));
}

static void make_value(struct str *out, int depth)
{
    uint32_t kind = rng_below(&rng, depth == 0 ? 5 : 9);
    make_space(out);
    if (kind < 3) {
        str_add_text(out, kind == 0 ? "null" : kind == 1 ? "true" : "false");
    } else if (kind == 3) {
        make_number(out);
    } else if (kind == 4) {
        make_string(out);
    } else {
        bool object = kind >= 7;
        uint32_t count = rng_below(&rng, 40) == 0 ? 40 : rng_below(&rng, 5);
        str_add_char(out, object ? '{' : '[');
        for (uint32_t i = 0; i < count; i++) {
            if (i > 0)
                str_add_char(out, ',');
            if (object) {
                make_space(out);
                if (rng_below(&rng, 6) == 0)
                    make_string(out);
                else
                    str_add_format(out, "\"%c%u\"", 'a' + rng_below(&rng, 26), i);
                make_space(out);
                str_add_char(out, ':');
            }
            make_value(out, count > 10 ? 0 : depth - 1);
        }
        make_space(out);
        str_add_char(out, object ? '}' : ']');
    }
    make_space(out);
}

/* A few bytes are changed, dropped or put in.  No NUL: jansson 2.14 swallows one that follows a
 * number. */
static void spoil(struct str *s)
{
    static const char bytes[] = "\"\\{}[],:0123456789-+.eE tfnu\x1f\x80\xc0\xe2\xed\xf4/";
    for (uint32_t i = 1 + rng_below(&rng, 3); i > 0 && s->bytes > 1; i--) {
        size_t at = rng_below(&rng, (uint32_t)s->bytes);
        char byte = bytes[rng_below(&rng, sizeof bytes - 1)];
        switch (rng_below(&rng, 3)) {
        case 0:
            s->text[at] = byte;
            break;
        case 1:
            memmove(s->text + at, s->text + at + 1, s->bytes - at);
            s->bytes--;
            break;
        default:
            str_add_char(s, ' ');
            memmove(s->text + at + 1, s->text + at, s->bytes - at - 1);
            s->text[at] = byte;
        }
    }
}

static void assert_equal_trees(const struct json *ours, const json_t *theirs)
{
    double d;
    int64_t i;
    bool b;
    switch (json_typeof(theirs)) {
    case JANSSON_NULL:
        assert_true(json_is(ours, JSON_NULL));
        return;
    case JANSSON_TRUE:
    case JANSSON_FALSE:
        assert_true(json_bool(ours, &b));
        assert_int_equal(b, json_typeof(theirs) == JANSSON_TRUE);
        return;
    case JANSSON_INTEGER:
        assert_true(json_i64(ours, &i));
        assert_true(i == json_integer_value(theirs));
        return;
    case JANSSON_REAL:
        assert_true(json_f64(ours, &d));
        assert_true(d == json_real_value(theirs));
        return;
    case JANSSON_STRING:
        assert_true(json_is(ours, JSON_STRING));
        assert_int_equal(ours->bytes, json_string_length(theirs));
        assert_memory_equal(ours->text, json_string_value(theirs), ours->bytes);
        return;
    case JANSSON_ARRAY:
        assert_true(json_is(ours, JSON_ARRAY));
        assert_int_equal(ours->count, json_array_size(theirs));
        const struct json *item = ours->child;
        for (uint32_t k = 0; k < ours->count; k++, item = item->next)
            assert_equal_trees(item, json_array_get(theirs, k));
        assert_null(item);
        return;
    case JANSSON_OBJECT:
        assert_true(json_is(ours, JSON_OBJECT));
        assert_int_equal(ours->count, json_object_size(theirs));
        uint32_t count = 0;
        for (const struct json *m = ours->child; m != NULL; m = m->next, count++) {
            char key[512];
            assert_true(m->key_bytes < sizeof key);
            memcpy(key, m->key, m->key_bytes);
            key[m->key_bytes] = '\0';
            const json_t *other = json_object_get(theirs, key);
            assert_non_null(other);
            assert_equal_trees(m, other);
        }
        assert_int_equal(count, ours->count);
        return;
    }
}

/* What jansson refuses though it is JSON. */
static bool is_limit_of_jansson(const json_error_t *error)
{
    return json_error_code(error) == json_error_numeric_overflow ||
           json_error_code(error) == json_error_null_byte_in_key;
}

static void compare(struct arena *arena, const struct str *s, int *good, int *bad)
{
    /* In memory of its own length, so that a sanitizer sees a read past the end. */
    char *copy = malloc(s->bytes == 0 ? 1 : s->bytes);
    memcpy(copy, s->text, s->bytes);
    json_error_t their_error;
    json_t *theirs = json_loadb(
        copy, s->bytes, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &their_error);
    struct json *ours = NULL;
    struct json_error error = {0, NULL};
    arena_reset(arena);
    enum err e = json_parse(arena, NULL, copy, s->bytes, &ours, &error);
    if (theirs != NULL && e != ERR_OK)
        fail_msg("only jansson accepts %s: %s at %zu", s->text, error.reason, error.offset);
    if (theirs == NULL && e == ERR_OK && !is_limit_of_jansson(&their_error))
        fail_msg("only we accept %s: %s", s->text, their_error.text);
    if (theirs != NULL) {
        assert_equal_trees(ours, theirs);
        ++*good;
    } else if (e != ERR_OK) {
        assert_int_equal(e, ERR_INVALID);
        assert_true(error.offset <= s->bytes);
        ++*bad;
    }
    json_decref(theirs);
    free(copy);
}

static void agrees_with_jansson(void **state)
{
    (void)state;
    struct arena arena;
    struct str s;
    int good = 0, bad = 0;
    rng_init(&rng, 0x5eed0008);
    arena_init(&arena, 1 << 16, (size_t)1 << 26);
    str_init(&s, 0);
    for (int i = 0; i < CASES; i++) {
        str_clear(&s);
        make_value(&s, (int)rng_below(&rng, DEPTH_MAX));
        if (i % 2 == 1)
            spoil(&s);
        compare(&arena, &s, &good, &bad);
    }
    /* The generator must keep feeding both sides. */
    assert_true(good > CASES / 3);
    assert_true(bad > CASES / 5);
    str_fini(&s);
    arena_fini(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(agrees_with_jansson)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
