/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/str.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define STR_BYTES_MAX   ((size_t)1 << 30)
#define STR_BYTES_FIRST 64u

void str_init(struct str *s, size_t bytes_max)
{
    CHECK(s != NULL);
    *s = (struct str){.bytes_max = bytes_max};
}

void str_fini(struct str *s)
{
    CHECK(s != NULL);
    free(s->text);
    *s = (struct str){.bytes_max = s->bytes_max};
}

void str_clear(struct str *s)
{
    CHECK(s != NULL);
    s->bytes = 0;
    s->overflow = false;
    if (s->text != NULL)
        s->text[0] = '\0';
}

/* Makes room for count more bytes and the NUL.  Once something was refused everything after it
 * is refused too, so that what the buffer holds is always a prefix of what was meant. */
static bool str_reserve(struct str *s, size_t count)
{
    CHECK(s != NULL);
    if (s->overflow)
        return false;
    size_t bytes_max = s->bytes_max == 0 ? STR_BYTES_MAX : s->bytes_max;
    if (s->bytes > bytes_max || count > bytes_max - s->bytes) {
        s->overflow = true;
        return false;
    }
    size_t need = s->bytes + count + 1;
    if (need <= s->capacity)
        return true;
    size_t capacity = s->capacity < STR_BYTES_FIRST ? STR_BYTES_FIRST : s->capacity;
    while (capacity < need)
        capacity *= 2;
    if (capacity > bytes_max + 1)
        capacity = bytes_max + 1;
    CHECK(capacity >= need);
    char *text = realloc(s->text, capacity);
    if (text == NULL) {
        s->overflow = true;
        return false;
    }
    s->text = text;
    s->capacity = capacity;
    return true;
}

void str_add(struct str *s, const void *bytes, size_t count)
{
    CHECK(bytes != NULL || count == 0);
    if (!str_reserve(s, count))
        return;
    if (count > 0)
        memcpy(s->text + s->bytes, bytes, count);
    s->bytes += count;
    CHECK(s->bytes < s->capacity);
    s->text[s->bytes] = '\0';
}

void str_add_text(struct str *s, const char *text)
{
    CHECK(text != NULL);
    str_add(s, text, strlen(text));
}

void str_add_char(struct str *s, char c)
{
    if (!str_reserve(s, 1))
        return;
    s->text[s->bytes++] = c;
    s->text[s->bytes] = '\0';
}

void str_add_format(struct str *s, const char *format, ...)
{
    CHECK(s != NULL);
    CHECK(format != NULL);
    va_list args;
    va_list again;
    va_start(args, format);
    va_copy(again, args);
    size_t room = s->capacity - s->bytes;
    int count = vsnprintf(room > 0 ? s->text + s->bytes : NULL, room, format, args);
    CHECK(count >= 0);
    if (str_reserve(s, (size_t)count)) {
        if ((size_t)count >= room) {
            int second = vsnprintf(s->text + s->bytes, s->capacity - s->bytes, format, again);
            CHECK(second == count);
        }
        s->bytes += (size_t)count;
    } else if (s->text != NULL) {
        s->text[s->bytes] = '\0'; /* the first try may have written a part */
    }
    va_end(again);
    va_end(args);
}

void str_drop_front(struct str *s, size_t count)
{
    CHECK(s != NULL);
    CHECK(count <= s->bytes);
    if (count == 0)
        return;
    memmove(s->text, s->text + count, s->bytes - count);
    s->bytes -= count;
    s->text[s->bytes] = '\0';
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

void hex_encode(const void *bytes, size_t count, char *ret_text)
{
    CHECK(bytes != NULL || count == 0);
    CHECK(ret_text != NULL);
    const unsigned char *p = bytes;
    for (size_t i = 0; i < count; i++) {
        ret_text[2 * i] = "0123456789abcdef"[p[i] >> 4];
        ret_text[2 * i + 1] = "0123456789abcdef"[p[i] & 15];
    }
    ret_text[2 * count] = '\0';
}

bool hex_decode(const char *text, size_t chars, void *ret_bytes)
{
    CHECK(text != NULL || chars == 0);
    if (chars % 2 != 0)
        return false;
    for (size_t i = 0; i < chars; i++)
        if (hex_digit(text[i]) < 0)
            return false;
    unsigned char *out = ret_bytes;
    for (size_t i = 0; i < chars / 2; i++)
        out[i] = (unsigned char)(hex_digit(text[2 * i]) << 4 | hex_digit(text[2 * i + 1]));
    return true;
}
