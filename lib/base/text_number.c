/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/str.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

/* A double is decided by its first 767 significant digits and by whether anything follows. */
#define F64_DIGITS_MAX 780u
/* Far outside what a double can hold, near enough to add up without overflow. */
#define F64_EXPONENT_CAP 1000000000000000ll

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

bool text_to_u64(const char *text, size_t chars, uint64_t *ret_value)
{
    CHECK(text != NULL || chars == 0);
    CHECK(ret_value != NULL);
    if (chars == 0)
        return false;
    uint64_t value = 0;
    for (size_t i = 0; i < chars; i++) {
        if (!is_digit(text[i]))
            return false;
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value))
            return false;
    }
    *ret_value = value;
    return true;
}

bool text_to_i64(const char *text, size_t chars, int64_t *ret_value)
{
    CHECK(text != NULL || chars == 0);
    CHECK(ret_value != NULL);
    bool negative = chars > 0 && text[0] == '-';
    uint64_t magnitude;
    if (!text_to_u64(text + negative, chars - negative, &magnitude))
        return false;
    if (magnitude > (uint64_t)INT64_MAX + negative)
        return false;
    *ret_value = negative ? (int64_t)(0 - magnitude) : (int64_t)magnitude;
    return true;
}

/* Length of the longest run of digits at text[at..chars). */
static size_t digit_run(const char *text, size_t at, size_t chars)
{
    size_t end = at;
    while (end < chars && is_digit(text[end]))
        end++;
    return end - at;
}

/* Does the whole text read [-] digits [. digits] [e [+-] digits]?  Then sets where the digits of
 * the exponent begin, sign included; == chars when there is none. */
static bool f64_shape(const char *text, size_t chars, size_t *ret_exponent)
{
    size_t at = chars > 0 && text[0] == '-' ? 1 : 0;
    size_t run = digit_run(text, at, chars);
    if (run == 0)
        return false;
    at += run;
    if (at < chars && text[at] == '.') {
        run = digit_run(text, at + 1, chars);
        if (run == 0)
            return false;
        at += 1 + run;
    }
    *ret_exponent = chars;
    if (at < chars && (text[at] == 'e' || text[at] == 'E')) {
        at++;
        *ret_exponent = at;
        if (at < chars && (text[at] == '+' || text[at] == '-'))
            at++;
        run = digit_run(text, at, chars);
        if (run == 0)
            return false;
        at += run;
    }
    return at == chars;
}

static int64_t exponent_read(const char *text, size_t at, size_t chars)
{
    if (at >= chars)
        return 0;
    bool negative = text[at] == '-';
    if (text[at] == '-' || text[at] == '+')
        at++;
    int64_t value = 0;
    for (; at < chars && value < F64_EXPONENT_CAP; at++)
        value = value * 10 + (text[at] - '0');
    if (value > F64_EXPONENT_CAP)
        value = F64_EXPONENT_CAP;
    return negative ? -value : value;
}

/* Texts of any length in bounded space: 0.DIGITS e EXPONENT with what cannot matter cut off. */
static double f64_long(const char *text, size_t chars, size_t exponent_at)
{
    char short_text[F64_DIGITS_MAX + 64];
    size_t used = 0;
    size_t significant = 0;
    bool past_point = false;
    bool rest_nonzero = false;
    int64_t point = 0; /* value = 0.DIGITS * 10^point */
    if (text[0] == '-')
        short_text[used++] = '-';
    short_text[used++] = '0';
    short_text[used++] = '.';
    size_t end = exponent_at < chars ? exponent_at - 1 : chars;
    for (size_t i = text[0] == '-' ? 1 : 0; i < end; i++) {
        if (text[i] == '.') {
            past_point = true;
            continue;
        }
        if (significant == 0 && text[i] == '0') {
            point -= past_point;
            continue;
        }
        point += !past_point;
        if (significant < F64_DIGITS_MAX)
            short_text[used + significant++] = text[i];
        else
            rest_nonzero = rest_nonzero || text[i] != '0';
    }
    used += significant;
    short_text[used++] = rest_nonzero ? '1' : '0';
    int64_t exponent = point + exponent_read(text, exponent_at, chars);
    if (exponent > 100000)
        exponent = 100000;
    if (exponent < -100000)
        exponent = -100000;
    CHECK(used + 16 < sizeof short_text);
    snprintf(short_text + used, sizeof short_text - used, "e%d", (int)exponent);
    return strtod(short_text, NULL);
}

bool text_to_f64(const char *text, size_t chars, double *ret_value)
{
    CHECK(text != NULL || chars == 0);
    CHECK(ret_value != NULL);
    size_t exponent_at;
    if (!f64_shape(text, chars, &exponent_at))
        return false;
    double value;
    char copy[128];
    if (chars < sizeof copy) {
        memcpy(copy, text, chars);
        copy[chars] = '\0';
        char *end;
        value = strtod(copy, &end);
        CHECK(end == copy + chars);
    } else {
        value = f64_long(text, chars, exponent_at);
    }
    if (!isfinite(value))
        return false;
    *ret_value = value;
    return true;
}
