/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_fields.h - members of a request body in layers: options, prompt, arm, request.
 *
 * Pure; one owner thread.  At most BENCH_FIELDS_MAX members; a later value of a key replaces an
 * earlier one at its place.  Values are JSON text, owned by the set. */
#ifndef TESTS_BENCH_BENCH_FIELDS_H
#define TESTS_BENCH_BENCH_FIELDS_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct arena;
struct json;
struct str;

#define BENCH_FIELDS_MAX    40
#define BENCH_FIELD_KEY_MAX 63

struct bench_field {
    char key[BENCH_FIELD_KEY_MAX + 1];
    char *value; /* JSON */
};

struct bench_fields {
    uint32_t count;
    struct bench_field items[BENCH_FIELDS_MAX];
};

void bench_fields_fini(struct bench_fields *f); /* leaves an empty set */

/* ERR_INVALID for an empty or overlong key, ERR_TOO_LARGE for a full set. */
MUST_USE enum err bench_fields_set(struct bench_fields *f, const char *key, size_t key_bytes,
                                   const char *value, size_t value_bytes,
                                   struct err_detail *detail);
MUST_USE enum err bench_fields_set_u64(struct bench_fields *f, const char *key, uint64_t value);
MUST_USE enum err bench_fields_set_object(struct bench_fields *f, const struct json *object,
                                          struct err_detail *detail);

/* "key=value" settings, several between commas: a value that is JSON stays JSON, any other text
 * becomes a string (spec=fixed:7).  Commas inside brackets, braces and quotes do not separate. */
MUST_USE enum err bench_fields_set_text(struct bench_fields *f, struct arena *arena,
                                        const char *text, struct err_detail *detail);

const char *bench_fields_get(const struct bench_fields *f, const char *key); /* NULL = absent */

/* Appends one object of all members; of two layers with one key the last wins. */
void bench_fields_write(struct str *out, const struct bench_fields *const *layers, size_t count);

#endif
