/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/json.h - strict RFC 8259 JSON: parse into an arena, read, write.
 *
 * Pure.  The parser is iterative and bounded in depth and size.  It keeps key order and the text
 * of numbers (integers of any length), and decodes strings to UTF-8 (which may hold NUL: always
 * use `bytes`).  Nodes and decoded text live in the arena; text without escapes is borrowed from
 * the input, which must outlive the tree. */
#ifndef LIB_BASE_JSON_H
#define LIB_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct arena;
struct str;

enum json_type { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

/* All zero = strictest: lone surrogates, a byte order mark and duplicate keys are errors. */
struct json_options {
    bool lone_surrogate_replace; /* "\ud83d" alone becomes U+FFFD */
    bool bom_skip;
    bool duplicate_keys_last; /* the last value wins and stands at the first place */
    uint32_t depth_max;       /* 0 = 64 */
    size_t bytes_max;         /* 0 = 64 MiB */
};

struct json {
    uint8_t type; /* enum json_type */
    bool boolean;
    uint32_t count;  /* items of an array, members of an object */
    const char *key; /* as member of an object; not NUL-terminated */
    size_t key_bytes;
    const char *text; /* decoded string, or the number's own spelling */
    size_t bytes;
    struct json *child; /* first item or member */
    struct json *next;  /* next sibling */
};

struct json_error {
    size_t offset;      /* byte at which the text stops being JSON */
    const char *reason; /* constant text */
};

/* ERR_INVALID (ret_error says where and why), ERR_TOO_LARGE (bytes_max), ERR_NOMEM (arena). */
MUST_USE enum err json_parse(struct arena *arena, const struct json_options *options,
                             const char *text, size_t bytes, struct json **ret_value,
                             struct json_error *ret_error);

/* NULL if value is NULL, no object, or has no such key. */
struct json *json_get(const struct json *value, const char *key);
struct json *json_at(const struct json *array, uint32_t index);  /* O(index) */
bool json_is(const struct json *value, enum json_type type);     /* NULL-safe */
bool json_string_is(const struct json *value, const char *text); /* NULL-safe */

/* False, leaving *ret alone, unless the value is a number that fits exactly (u64, i64: spelled
 * as an integer, no fraction or exponent) or is finite (f64). */
bool json_u64(const struct json *value, uint64_t *ret);
bool json_i64(const struct json *value, int64_t *ret);
bool json_f64(const struct json *value, double *ret);
bool json_bool(const struct json *value, bool *ret);

/* Walk: for (struct json *v = value->child; v; v = v->next) */

enum json_numbers { JSON_NUMBERS_VERBATIM, JSON_NUMBERS_PYTHON };

/* Appends the value as Python's json.dumps(ensure_ascii=False) spaces it: ", " and ": ".
 * Strings: short escapes, \u00XX for other controls below U+0020, all else verbatim.
 * JSON_NUMBERS_PYTHON spells numbers as Python prints them after json.loads (integers with all
 * digits, -0 -> 0, floats by the shortest form that reads back; overflow -> Infinity). */
void json_write(struct str *out, const struct json *value, enum json_numbers numbers);
/* Same without any space: for our own protocol output. */
void json_write_compact(struct str *out, const struct json *value);
/* Appends a quoted, escaped string. */
void json_write_string(struct str *out, const char *text, size_t bytes);
/* Escaped without quotes: for strings that are streamed in pieces. */
void json_write_escaped(struct str *out, const char *text, size_t bytes);
/* Shortest text that reads back to the same double, Python's spelling. */
void json_write_f64(struct str *out, double value);

#endif
