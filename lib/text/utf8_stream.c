/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/utf8_stream.h"

#include "lib/base/check.h"
#include "lib/base/str.h"

static const char REPLACEMENT[3] = {'\xef', '\xbf', '\xbd'};

static void stream_reset(struct utf8_stream *u)
{
    *u = (struct utf8_stream){0};
}

/* Begins a sequence; a byte that cannot begin one is replaced at once. */
static void stream_lead(struct utf8_stream *u, uint8_t byte, struct str *out)
{
    u->lower = 0x80;
    u->upper = 0xbf;
    if (byte >= 0xc2 && byte <= 0xdf) {
        u->needed_bytes = 2;
    } else if (byte >= 0xe0 && byte <= 0xef) {
        u->needed_bytes = 3;
        if (byte == 0xe0)
            u->lower = 0xa0; /* shorter forms exist */
        if (byte == 0xed)
            u->upper = 0x9f; /* surrogates */
    } else if (byte >= 0xf0 && byte <= 0xf4) {
        u->needed_bytes = 4;
        if (byte == 0xf0)
            u->lower = 0x90;
        if (byte == 0xf4)
            u->upper = 0x8f; /* past U+10FFFF */
    } else {
        str_add(out, REPLACEMENT, sizeof(REPLACEMENT));
        return;
    }
    u->pending[0] = byte;
    u->pending_bytes = 1;
}

/* Takes one byte as continuation; false when it does not fit and must be read afresh. */
static bool stream_continue(struct utf8_stream *u, uint8_t byte, struct str *out)
{
    CHECK(u->pending_bytes < u->needed_bytes && u->needed_bytes <= 4);
    if (byte < u->lower || byte > u->upper) {
        stream_reset(u);
        str_add(out, REPLACEMENT, sizeof(REPLACEMENT));
        return false;
    }
    u->pending[u->pending_bytes++] = byte;
    u->lower = 0x80;
    u->upper = 0xbf;
    if (u->pending_bytes == u->needed_bytes) {
        str_add(out, u->pending, u->pending_bytes);
        stream_reset(u);
    }
    return true;
}

void utf8_stream_add(struct utf8_stream *u, const void *bytes, size_t count, struct str *out)
{
    const uint8_t *b = bytes;
    size_t at = 0;
    while (at < count) {
        if (u->needed_bytes != 0) {
            if (stream_continue(u, b[at], out))
                at++;
            continue;
        }
        size_t valid = utf8_valid_prefix(b + at, count - at);
        if (valid > 0)
            str_add(out, b + at, valid);
        at += valid;
        if (at < count)
            stream_lead(u, b[at++], out);
    }
}

void utf8_stream_end(struct utf8_stream *u, struct str *out)
{
    CHECK(u->pending_bytes <= 3);
    if (u->needed_bytes != 0)
        str_add(out, REPLACEMENT, sizeof(REPLACEMENT));
    stream_reset(u);
}
