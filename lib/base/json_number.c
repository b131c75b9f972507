/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/json_number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

/* 17 significant digits tell any two doubles apart (IEEE 754-2008, 5.12.2). */
#define F64_DIGITS_MAX 17

/* |value| = 0.DIGITS * 10^point, digits without trailing zeros. */
struct f64_digits {
    char digits[F64_DIGITS_MAX + 1];
    int count;
    int point;
};

/* Rounds to `precision` digits.  Away from zero if `up`: one more in the last place than the
 * nearest, for the wide side of a power of two. */
static void digits_take(double value, int precision, bool up, struct f64_digits *ret)
{
    char text[40];
    int length = snprintf(text, sizeof text, "%.*e", precision - 1, value);
    CHECK(length > 0 && (size_t)length < sizeof text);
    char *mark = strchr(text, 'e');
    CHECK(mark != NULL);
    ret->point = atoi(mark + 1) + 1;
    ret->count = 0;
    for (const char *p = text; p < mark; p++)
        if (*p != '.')
            ret->digits[ret->count++] = *p;
    CHECK(ret->count == precision);
    if (up) {
        int i = ret->count - 1;
        while (i >= 0 && ret->digits[i] == '9')
            ret->digits[i--] = '0';
        if (i >= 0) {
            ret->digits[i]++;
        } else {
            ret->digits[0] = '1';
            ret->point++;
        }
    }
    while (ret->count > 1 && ret->digits[ret->count - 1] == '0')
        ret->count--;
    ret->digits[ret->count] = '\0';
}

static bool digits_read_back(const struct f64_digits *d, double value)
{
    char text[48];
    snprintf(text, sizeof text, "0.%se%d", d->digits, d->point);
    return strtod(text, NULL) == value;
}

/* The fewest digits that read back to value > 0, and of those the nearest. */
static void digits_shortest(double value, struct f64_digits *ret)
{
    int exponent;
    /* Below a power of two the doubles lie twice as dense as above: the nearest decimal may be
     * out of reach there while the next one above is not. */
    bool power_of_two = frexp(value, &exponent) == 0.5;
    /* Up to 15 digits survive the way there and back, so for normal numbers nothing shorter
     * needs to be tried: trailing zeros fall away. */
    int precision = value < 2.2250738585072014e-308 ? 1 : 15;
    for (; precision < F64_DIGITS_MAX; precision++) {
        digits_take(value, precision, false, ret);
        if (digits_read_back(ret, value))
            return;
        if (power_of_two) {
            digits_take(value, precision, true, ret);
            if (digits_read_back(ret, value))
                return;
        }
    }
    digits_take(value, F64_DIGITS_MAX, false, ret);
    CHECK(digits_read_back(ret, value));
}

void json_write_f64(struct str *out, double value)
{
    CHECK(out != NULL);
    if (isnan(value)) {
        str_add_text(out, "NaN");
        return;
    }
    if (signbit(value))
        str_add_char(out, '-');
    value = fabs(value);
    if (isinf(value)) {
        str_add_text(out, "Infinity");
        return;
    }
    if (value == 0) {
        str_add_text(out, "0.0");
        return;
    }
    struct f64_digits d;
    digits_shortest(value, &d);
    if (d.point <= -4 || d.point > 16) {
        str_add(out, d.digits, 1);
        if (d.count > 1) {
            str_add_char(out, '.');
            str_add(out, d.digits + 1, (size_t)d.count - 1);
        }
        str_add_format(out, "e%c%02d", d.point > 0 ? '+' : '-', abs(d.point - 1));
    } else if (d.point <= 0) {
        str_add(out, "0.0000", 2 + (size_t)-d.point);
        str_add(out, d.digits, (size_t)d.count);
    } else if (d.count <= d.point) {
        str_add(out, d.digits, (size_t)d.count);
        str_add(out, "0000000000000000", (size_t)(d.point - d.count));
        str_add_text(out, ".0");
    } else {
        str_add(out, d.digits, (size_t)d.point);
        str_add_char(out, '.');
        str_add(out, d.digits + d.point, (size_t)(d.count - d.point));
    }
}

void json_write_number_python(struct str *out, const char *text, size_t bytes)
{
    CHECK(out != NULL);
    CHECK(text != NULL && bytes > 0);
    bool integer = true;
    for (size_t i = 0; i < bytes && integer; i++)
        integer = text[i] == '-' || (text[i] >= '0' && text[i] <= '9');
    if (integer) {
        if (bytes == 2 && text[0] == '-' && text[1] == '0')
            str_add_char(out, '0');
        else
            str_add(out, text, bytes);
        return;
    }
    /* The spelling was checked when the text was parsed, so only overflow is left to fail. */
    double value;
    if (!text_to_f64(text, bytes, &value))
        value = text[0] == '-' ? -INFINITY : INFINITY;
    json_write_f64(out, value);
}
