/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_http_chunk.h"

#include "lib/base/check.h"

enum { SIZE, EXTENSION, SIZE_LF, DATA, DATA_CR, DATA_LF, END };

#define SIZE_DIGITS_MAX 15 /* fits u64 with room */

void gw_http_chunk_init(struct gw_http_chunk *c)
{
    *c = (struct gw_http_chunk){.state = SIZE};
}

static int hex_digit(char byte)
{
    if (byte >= '0' && byte <= '9')
        return byte - '0';
    char low = (char)(byte | 0x20);
    return low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
}

/* One byte of a size line. */
static bool size_byte(struct gw_http_chunk *c, char byte)
{
    int digit = hex_digit(byte);
    if (digit >= 0) {
        c->left = c->left * 16 + (uint64_t)digit;
        return ++c->digits <= SIZE_DIGITS_MAX;
    }
    if (c->digits == 0)
        return false;
    if (byte == '\r') {
        c->state = SIZE_LF;
        return true;
    }
    c->state = EXTENSION;
    return byte == ';' || byte == ' ' || byte == '\t';
}

static bool line_byte(struct gw_http_chunk *c, char byte)
{
    switch (c->state) {
    case SIZE:
        return size_byte(c, byte);
    case EXTENSION:
        if (byte == '\r')
            c->state = SIZE_LF;
        return byte == '\r' || byte == '\t' || ((unsigned char)byte >= 0x20 && byte != 0x7f);
    case SIZE_LF:
        c->state = c->left > 0 ? DATA : END;
        return byte == '\n';
    case DATA_CR:
        c->state = DATA_LF;
        return byte == '\r';
    case DATA_LF:
        gw_http_chunk_init(c);
        return byte == '\n';
    default:
        return true;
    }
}

bool gw_http_chunk_feed(struct gw_http_chunk *c, const char *bytes, size_t count)
{
    CHECK(c->state <= END);
    for (size_t i = 0; i < count && c->state != END;) {
        if (c->state == DATA) {
            size_t step = count - i < c->left ? count - i : (size_t)c->left;
            c->left -= step;
            i += step;
            if (c->left == 0)
                c->state = DATA_CR;
        } else if (!line_byte(c, bytes[i++])) {
            return false;
        }
    }
    return true;
}
