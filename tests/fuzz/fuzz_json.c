/* SPDX-License-Identifier: Apache-2.0 */
/* First byte: options.  The rest: the text.  What is parsed must come back from what is written. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static bool text_equal(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    return a_bytes == b_bytes && (a_bytes == 0 || memcmp(a, b, a_bytes) == 0);
}

/* Both trees in step, with the way up kept in a list of fixed depth. */
#define DEPTH_MAX 40u

static bool node_equal(const struct json *a, const struct json *b)
{
    if (a->type != b->type || a->boolean != b->boolean || a->count != b->count)
        return false;
    if ((a->child == NULL) != (b->child == NULL) || (a->next == NULL) != (b->next == NULL))
        return false;
    if ((a->key == NULL) != (b->key == NULL))
        return false;
    return text_equal(a->key, a->key_bytes, b->key, b->key_bytes) &&
           text_equal(a->text, a->bytes, b->text, b->bytes);
}

static void node_check(const struct json *node)
{
    CHECK(node->key_bytes == 0 || utf8_valid_prefix(node->key, node->key_bytes) == node->key_bytes);
    CHECK(node->bytes == 0 || utf8_valid_prefix(node->text, node->bytes) == node->bytes);
    uint32_t count = 0;
    for (const struct json *child = node->child; child != NULL; child = child->next, count++)
        CHECK((child->key != NULL) == (node->type == JSON_OBJECT));
    CHECK(count == node->count);
    double number;
    int64_t integer;
    if (json_i64(node, &integer))
        CHECK(json_f64(node, &number) && number == (double)integer);
}

static void trees_check_equal(const struct json *a, const struct json *b)
{
    const struct json *up[DEPTH_MAX][2];
    uint32_t depth = 0;
    for (;;) {
        CHECK(node_equal(a, b));
        node_check(a);
        if (a->child != NULL) {
            CHECK(depth < DEPTH_MAX);
            up[depth][0] = a;
            up[depth][1] = b;
            depth++;
            a = a->child;
            b = b->child;
            continue;
        }
        while (depth > 0 && a->next == NULL) {
            depth--;
            a = up[depth][0];
            b = up[depth][1];
        }
        if (depth == 0)
            return;
        a = a->next;
        b = b->next;
    }
}

static void write_and_compare(struct arena *arena, const struct json *value, bool compact)
{
    static const struct json_options strict = {.depth_max = DEPTH_MAX};
    struct str out;
    struct json *again;
    str_init(&out, 0);
    if (compact)
        json_write_compact(&out, value);
    else
        json_write(&out, value, JSON_NUMBERS_VERBATIM);
    CHECK(!out.overflow);
    CHECK(json_parse(arena, &strict, out.text, out.bytes, &again, NULL) == ERR_OK);
    trees_check_equal(value, again);
    str_fini(&out);
}

/* Python's spelling is stable: printed again it stays as it is. */
static void python_is_stable(struct arena *arena, const struct json *value)
{
    static const struct json_options strict = {.depth_max = DEPTH_MAX};
    struct str first, second;
    struct json *again;
    str_init(&first, 0);
    str_init(&second, 0);
    json_write(&first, value, JSON_NUMBERS_PYTHON);
    enum err e = json_parse(arena, &strict, first.text, first.bytes, &again, NULL);
    if (e == ERR_OK) {
        json_write(&second, again, JSON_NUMBERS_PYTHON);
        CHECK(text_equal(first.text, first.bytes, second.text, second.bytes));
    } else {
        CHECK(strstr(first.text, "Infinity") != NULL);
    }
    str_fini(&first);
    str_fini(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0)
        return 0;
    const struct json_options options = {
        .lone_surrogate_replace = data[0] & 1,
        .bom_skip = data[0] & 2,
        .duplicate_keys_last = data[0] & 4,
        .depth_max = DEPTH_MAX,
        .bytes_max = data[0] & 8 ? 100 : 0,
    };
    /* A tight arena now and then: running out must be an answer at every place. */
    size_t arena_bytes = data[0] & 16 ? (size_t)(data[0] >> 5) * 256 + 64 : (size_t)1 << 26;
    struct arena arena, second;
    struct json *value = NULL;
    struct json_error error = {0, NULL};
    arena_init(&arena, 512, arena_bytes);
    arena_init(&second, 4096, 0);
    enum err e = json_parse(&arena, &options, (const char *)data + 1, bytes - 1, &value, &error);
    CHECK((e == ERR_NOMEM) == arena.overflow);
    if (e == ERR_OK) {
        write_and_compare(&second, value, false);
        write_and_compare(&second, value, true);
        python_is_stable(&second, value);
    } else {
        CHECK(value == NULL);
        CHECK(error.reason != NULL && error.offset <= bytes - 1);
        struct json_options strict = options;
        strict.lone_surrogate_replace = strict.bom_skip = strict.duplicate_keys_last = false;
        /* What is refused with the doors open is refused with them closed. */
        if (e == ERR_INVALID)
            CHECK(json_parse(&second, &strict, (const char *)data + 1, bytes - 1, &value, NULL) ==
                  ERR_INVALID);
    }
    arena_fini(&arena);
    arena_fini(&second);
    return 0;
}
