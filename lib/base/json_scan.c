/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/json_scan.h"

#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

#define ONES  0x0101010101010101u
#define HIGHS 0x8080808080808080u

enum err json_refuse(struct json_cursor *c, const char *at, const char *reason)
{
    CHECK(at >= c->begin && at <= c->end);
    CHECK(reason != NULL);
    c->error_at = at;
    c->reason = reason;
    return ERR_INVALID;
}

/* Nonzero if a byte of the word is a quote, a backslash, a control character or not ASCII.  May
 * also fire for a byte above such a one, never without one. */
static uint64_t word_stops(uint64_t word)
{
    uint64_t quote = word ^ (ONES * '"');
    uint64_t slash = word ^ (ONES * '\\');
    uint64_t hits = ((quote - ONES) & ~quote) | ((slash - ONES) & ~slash) | (word - ONES * 0x20);
    return (hits | word) & HIGHS;
}

/* Skips bytes that stand for themselves. */
static const char *skip_plain(const char *at, const char *end)
{
    while (end - at >= 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        if (word_stops(word) != 0)
            break;
        at += 8;
    }
    while (at < end && (unsigned char)*at >= 0x20 && (unsigned char)*at < 0x80 && *at != '"' &&
           *at != '\\')
        at++;
    return at;
}

/* Value of four hex digits, -1 if they are not there. */
static int32_t hex4(const char *at, const char *end)
{
    if (end - at < 4)
        return -1;
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t digit = (uint32_t)(unsigned char)at[i] - '0';
        if (digit > 9) {
            /* Letters of both cases fall together with bit 5 set. */
            digit = ((unsigned char)at[i] | 0x20u) - 'a';
            if (digit > 5)
                return -1;
            digit += 10;
        }
        value = value << 4 | (int32_t)digit;
    }
    return value;
}

static bool is_surrogate_high(int32_t unit)
{
    return unit >= 0xd800 && unit <= 0xdbff;
}

static bool is_surrogate_low(int32_t unit)
{
    return unit >= 0xdc00 && unit <= 0xdfff;
}

/* The code point written at \uXXXX or \uXXXX\uXXXX; returns the bytes it takes there.  0 = no hex
 * digits.  A lone surrogate sets *ret_code_point to itself. */
static size_t escape_unicode(const char *at, const char *end, uint32_t *ret_code_point)
{
    int32_t unit = hex4(at + 2, end);
    if (unit < 0)
        return 0;
    *ret_code_point = (uint32_t)unit;
    if (!is_surrogate_high(unit) || end - at < 12 || at[6] != '\\' || at[7] != 'u')
        return 6;
    int32_t low = hex4(at + 8, end);
    if (low < 0 || !is_surrogate_low(low))
        return 6;
    *ret_code_point = 0x10000u + ((uint32_t)unit - 0xd800u) * 0x400u + ((uint32_t)low - 0xdc00u);
    return 12;
}

/* Checks the escape at `at` and returns what follows it, or NULL when refused. */
static const char *escape_skip(struct json_cursor *c, const char *at)
{
    CHECK(*at == '\\');
    if (c->end - at < 2) {
        json_refuse(c, c->end, "string without end");
        return NULL;
    }
    if (at[1] != 'u') {
        if (at[1] != '\0' && strchr("\"\\/bfnrt", at[1]) != NULL)
            return at + 2;
        json_refuse(c, at, "unknown escape");
        return NULL;
    }
    uint32_t code_point;
    size_t bytes = escape_unicode(at, c->end, &code_point);
    if (bytes == 0) {
        json_refuse(c, at, "\\u without four hex digits");
        return NULL;
    }
    if (bytes == 6 && code_point >= 0xd800 && code_point <= 0xdfff && !c->lone_surrogate_replace) {
        json_refuse(c, at, "lone surrogate");
        return NULL;
    }
    return at + bytes;
}

/* Decodes the escape at *at_p, known to be good, to out; returns the bytes written, never more
 * than the escape takes. */
static size_t escape_decode(const char **at_p, const char *end, char *out)
{
    static const char names[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    const char *at = *at_p;
    if (at[1] != 'u') {
        const char *name = strchr(names, at[1]);
        CHECK(name != NULL);
        *out = meanings[name - names];
        *at_p = at + 2;
        return 1;
    }
    uint32_t code_point = 0;
    size_t taken = escape_unicode(at, end, &code_point);
    CHECK(taken == 6 || taken == 12);
    char utf8[4];
    size_t bytes = utf8_encode(code_point, utf8);
    if (bytes == 0)
        bytes = utf8_encode(0xfffd, utf8);
    memcpy(out, utf8, bytes);
    *at_p = at + taken;
    return bytes;
}

static enum err string_decode(struct json_cursor *c, const char *at, const char *end,
                              const char **ret_text, size_t *ret_bytes)
{
    /* No escape grows by decoding, so the raw length is enough. */
    char *text = arena_alloc(c->arena, (size_t)(end - at));
    if (text == NULL)
        return ERR_NOMEM;
    const char *limit = text + (end - at);
    char *out = text;
    while (at < end) {
        const char *slash = memchr(at, '\\', (size_t)(end - at));
        size_t plain = (size_t)((slash == NULL ? end : slash) - at);
        memcpy(out, at, plain);
        out += plain;
        at += plain;
        if (slash != NULL)
            out += escape_decode(&at, end, out);
    }
    CHECK(at == end);
    CHECK(out <= limit);
    *ret_text = text;
    *ret_bytes = (size_t)(out - text);
    return ERR_OK;
}

enum err json_scan_string(struct json_cursor *c, const char **ret_text, size_t *ret_bytes)
{
    CHECK(c->at < c->end && *c->at == '"');
    const char *begin = c->at + 1;
    const char *at = begin;
    bool escapes = false;
    for (;;) {
        at = skip_plain(at, c->end);
        if (at == c->end)
            return json_refuse(c, at, "string without end");
        if (*at == '"')
            break;
        if (*at == '\\') {
            escapes = true;
            at = escape_skip(c, at);
            if (at == NULL)
                return ERR_INVALID;
        } else if ((unsigned char)*at < 0x20) {
            return json_refuse(c, at, "control character in string");
        } else {
            uint32_t code_point;
            size_t bytes = 0;
            /* Text that is not ASCII comes in runs. */
            while (at < c->end && (unsigned char)*at >= 0x80) {
                bytes = utf8_decode(at, (size_t)(c->end - at), &code_point);
                if (bytes == 0)
                    return json_refuse(c, at, "string is not UTF-8");
                at += bytes;
            }
        }
    }
    c->at = at + 1;
    if (escapes)
        return string_decode(c, begin, at, ret_text, ret_bytes);
    *ret_text = begin;
    *ret_bytes = (size_t)(at - begin);
    return ERR_OK;
}

static const char *skip_digits(const char *at, const char *end)
{
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at;
}

enum err json_scan_number(struct json_cursor *c, const char **ret_text, size_t *ret_bytes)
{
    CHECK(c->at < c->end);
    const char *begin = c->at;
    const char *at = begin + (*begin == '-');
    const char *digits = at;
    at = skip_digits(at, c->end);
    if (at == digits)
        return json_refuse(c, at, "digit expected");
    if (*digits == '0' && at - digits > 1)
        return json_refuse(c, digits + 1, "leading zero");
    if (at < c->end && *at == '.') {
        digits = at + 1;
        at = skip_digits(digits, c->end);
        if (at == digits)
            return json_refuse(c, at, "digit expected after the point");
    }
    if (at < c->end && (*at == 'e' || *at == 'E')) {
        digits = at + 1;
        if (digits < c->end && (*digits == '+' || *digits == '-'))
            digits++;
        at = skip_digits(digits, c->end);
        if (at == digits)
            return json_refuse(c, at, "digit expected in the exponent");
    }
    CHECK(at > begin);
    *ret_text = begin;
    *ret_bytes = (size_t)(at - begin);
    c->at = at;
    return ERR_OK;
}

static bool word_is(const struct json_cursor *c, const char *word, size_t bytes)
{
    return (size_t)(c->end - c->at) >= bytes && memcmp(c->at, word, bytes) == 0;
}

enum err json_scan_word(struct json_cursor *c, struct json *node)
{
    CHECK(c->at < c->end);
    if (word_is(c, "true", 4) || word_is(c, "false", 5)) {
        node->type = JSON_BOOL;
        node->boolean = *c->at == 't';
        c->at += node->boolean ? 4 : 5;
        return ERR_OK;
    }
    if (word_is(c, "null", 4)) {
        node->type = JSON_NULL;
        c->at += 4;
        return ERR_OK;
    }
    return json_refuse(c, c->at, "value expected");
}
