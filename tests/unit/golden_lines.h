/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/golden_lines.h - walks a file of JSON lines under the source root.
 *
 * For tests only; one thread.  Reads the whole file; one arena for the line at hand. */
#ifndef TESTS_UNIT_GOLDEN_LINES_H
#define TESTS_UNIT_GOLDEN_LINES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/arena.h"
#include "lib/base/json.h"

/* Path below the source root into ret_path. */
static inline void golden_path(char *ret_path, size_t bytes, const char *below)
{
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    assert_non_null(root);
    int n = snprintf(ret_path, bytes, "%s/%s", root, below);
    assert_true(n > 0 && (size_t)n < bytes);
}

/* The file's bytes, for the caller to free. */
static inline char *golden_read(const char *path, size_t *ret_bytes)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        fail_msg("cannot open %s", path);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long size = ftell(f);
    assert_true(size >= 0);
    rewind(f);
    char *text = malloc((size_t)size + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)size, f), (size_t)size);
    (void)fclose(f);
    text[size] = '\0';
    *ret_bytes = (size_t)size;
    return text;
}

typedef void (*golden_line_fn)(void *context, struct arena *arena, const struct json *line);

/* Calls fn for every line; returns how many there were. */
static inline uint32_t golden_lines(const char *below, golden_line_fn fn, void *context)
{
    char path[4096];
    golden_path(path, sizeof(path), below);
    size_t bytes = 0;
    char *text = golden_read(path, &bytes);
    struct arena arena;
    arena_init(&arena, 1 << 20, 64 << 20);
    uint32_t count = 0;
    for (size_t at = 0; at < bytes;) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t line_bytes = end ? (size_t)(end - text) - at : bytes - at;
        struct json *line = NULL;
        struct json_error error = {0};
        const struct json_options options = {.depth_max = 128};
        if (json_parse(&arena, &options, text + at, line_bytes, &line, &error) != ERR_OK)
            fail_msg("%s:%u: byte %zu: %s", below, count + 1, error.offset, error.reason);
        fn(context, &arena, line);
        arena_reset(&arena);
        count++;
        at += line_bytes + 1;
    }
    arena_fini(&arena);
    free(text);
    return count;
}

/* A member that must be a string. */
static inline const struct json *golden_string(const struct json *line, const char *key)
{
    const struct json *value = json_get(line, key);
    if (!json_is(value, JSON_STRING))
        fail_msg("%s: not a string", key);
    return value;
}

static inline bool golden_bool(const struct json *line, const char *key)
{
    bool value = false;
    if (!json_bool(json_get(line, key), &value))
        fail_msg("%s: not a boolean", key);
    return value;
}

#endif
