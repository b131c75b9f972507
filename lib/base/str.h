/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/str.h - a growing byte buffer with a bound, and UTF-8 checks.
 *
 * One owner thread.  Growth doubles up to bytes_max; past it the buffer keeps what it has and
 * sets `overflow`.  Always NUL-terminated after the first write (the NUL is not counted). */
#ifndef LIB_BASE_STR_H
#define LIB_BASE_STR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct str {
    char *text;
    size_t bytes;
    size_t capacity;
    size_t bytes_max; /* 0 = 1 GiB */
    bool overflow;
};

void str_init(struct str *s, size_t bytes_max);
void str_fini(struct str *s);
void str_clear(struct str *s); /* keeps the memory */
void str_add(struct str *s, const void *bytes, size_t count);
void str_add_text(struct str *s, const char *text); /* NUL-terminated */
void str_add_char(struct str *s, char c);
void str_add_format(struct str *s, const char *format, ...) PRINTF_LIKE(2, 3);
void str_drop_front(struct str *s, size_t count);

/* Length of the longest valid UTF-8 prefix; == count when all of it is valid. */
size_t utf8_valid_prefix(const void *bytes, size_t count);
/* Writes the code point's 1..4 bytes, returns how many; 0 for surrogates and > U+10FFFF. */
size_t utf8_encode(uint32_t code_point, char ret_bytes[4]);
/* Decodes one code point at bytes[0..count); returns its length, 0 if malformed or cut. */
size_t utf8_decode(const void *bytes, size_t count, uint32_t *ret_code_point);

void hex_encode(const void *bytes, size_t count, char *ret_text); /* 2*count + 1 chars */
bool hex_decode(const char *text, size_t chars, void *ret_bytes); /* chars even, lower or upper */

/* Strict decimal parsing of the whole text: no sign for u64, no spaces, range checked. */
bool text_to_u64(const char *text, size_t chars, uint64_t *ret_value);
bool text_to_i64(const char *text, size_t chars, int64_t *ret_value);
bool text_to_f64(const char *text, size_t chars, double *ret_value); /* finite only */

#endif
