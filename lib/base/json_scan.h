/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/json_scan.h - the lexical part of the JSON parser; for json_parse.c only.
 *
 * Pure.  Every function reads from a cursor, moves it past what it accepted, and on a refusal
 * leaves offset and reason in it. */
#ifndef LIB_BASE_JSON_SCAN_H
#define LIB_BASE_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct arena;
struct json;

struct json_cursor {
    const char *begin;
    const char *at;
    const char *end;
    struct arena *arena;
    bool lone_surrogate_replace;
    const char *error_at;
    const char *reason;
};

/* Notes where and why, and returns ERR_INVALID. */
enum err json_refuse(struct json_cursor *c, const char *at, const char *reason);

/* The cursor stands on the opening quote.  The text is borrowed from the input if it holds no
 * escape, else decoded into the arena (ERR_NOMEM). */
MUST_USE enum err json_scan_string(struct json_cursor *c, const char **ret_text, size_t *ret_bytes);

/* The cursor stands on '-' or a digit.  The text is always borrowed. */
MUST_USE enum err json_scan_number(struct json_cursor *c, const char **ret_text, size_t *ret_bytes);

/* The cursor stands on a letter.  Exactly true, false or null. */
MUST_USE enum err json_scan_word(struct json_cursor *c, struct json *node);

/* Finds the members of one object by key in constant time, once there are many.  Starts empty
 * when zeroed; memory comes from the arena.  The hash has a start value of its own for each run
 * of the program, so that a peer cannot choose keys that collide. */
struct json_keys {
    struct json **slots;
    uint32_t slot_count; /* power of two, at least twice the number of members */
    uint32_t used;
};

/* The member of `object` with this key, or NULL. */
struct json *json_keys_find(const struct json_keys *keys, const struct json *object,
                            const char *key, size_t key_bytes);

/* member was just linked into object.  False when the arena is full. */
bool json_keys_add(struct json_keys *keys, struct arena *arena, const struct json *object,
                   struct json *member);

#endif
