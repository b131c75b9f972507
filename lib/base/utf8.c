/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/str.h"

#include <string.h>

#include "lib/base/check.h"

size_t utf8_decode(const void *bytes, size_t count, uint32_t *ret_code_point)
{
    CHECK(bytes != NULL || count == 0);
    CHECK(ret_code_point != NULL);
    const unsigned char *p = bytes;
    if (count == 0)
        return 0;
    uint32_t lead = p[0];
    if (lead < 0x80) {
        *ret_code_point = lead;
        return 1;
    }
    /* 0xc0 and 0xc1 could only start overlong forms; above 0xf4 lies nothing. */
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (count < length)
        return 0;
    uint32_t code_point = lead & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        code_point = code_point << 6 | (p[i] & 0x3fu);
    }
    if (length == 3 && (code_point < 0x800 || (code_point >= 0xd800 && code_point <= 0xdfff)))
        return 0;
    if (length == 4 && (code_point < 0x10000 || code_point > 0x10ffff))
        return 0;
    *ret_code_point = code_point;
    return length;
}

size_t utf8_valid_prefix(const void *bytes, size_t count)
{
    CHECK(bytes != NULL || count == 0);
    const unsigned char *p = bytes;
    size_t at = 0;
    while (at < count) {
        uint64_t word;
        if (count - at >= sizeof word) {
            memcpy(&word, p + at, sizeof word);
            if ((word & 0x8080808080808080u) == 0) {
                at += sizeof word;
                continue;
            }
        }
        uint32_t code_point;
        size_t length = utf8_decode(p + at, count - at, &code_point);
        if (length == 0)
            break;
        at += length;
    }
    CHECK(at <= count);
    return at;
}

size_t utf8_encode(uint32_t code_point, char ret_bytes[4])
{
    CHECK(ret_bytes != NULL);
    if (code_point < 0x80) {
        ret_bytes[0] = (char)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        ret_bytes[0] = (char)(0xc0 | code_point >> 6);
        ret_bytes[1] = (char)(0x80 | (code_point & 0x3f));
        return 2;
    }
    if (code_point >= 0xd800 && code_point <= 0xdfff)
        return 0;
    if (code_point < 0x10000) {
        ret_bytes[0] = (char)(0xe0 | code_point >> 12);
        ret_bytes[1] = (char)(0x80 | (code_point >> 6 & 0x3f));
        ret_bytes[2] = (char)(0x80 | (code_point & 0x3f));
        return 3;
    }
    if (code_point > 0x10ffff)
        return 0;
    ret_bytes[0] = (char)(0xf0 | code_point >> 18);
    ret_bytes[1] = (char)(0x80 | (code_point >> 12 & 0x3f));
    ret_bytes[2] = (char)(0x80 | (code_point >> 6 & 0x3f));
    ret_bytes[3] = (char)(0x80 | (code_point & 0x3f));
    return 4;
}
