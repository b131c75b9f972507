/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/utf8_stream.h - bytes in pieces of any size to valid UTF-8.
 *
 * One owner thread; pure.  Holds at most three bytes of a sequence that is not finished.  An
 * ill-formed sequence gives one U+FFFD for each maximal part that can begin a character, at the
 * first byte which shows that it cannot be completed, or at the end (Unicode Standard 3.9,
 * "U+FFFD substitution of maximal subparts"; the WHATWG decoder does the same). */
#ifndef LIB_TEXT_UTF8_STREAM_H
#define LIB_TEXT_UTF8_STREAM_H

#include <stddef.h>
#include <stdint.h>

struct str;

/* All zero = nothing pending. */
struct utf8_stream {
    uint8_t pending[4];
    uint8_t pending_bytes;
    uint8_t needed_bytes; /* length of the sequence that pending begins; 0 = none */
    uint8_t lower;        /* range of the next continuation byte */
    uint8_t upper;
};

/* Appends what is certain to out. */
void utf8_stream_add(struct utf8_stream *u, const void *bytes, size_t count, struct str *out);
/* The end of the stream: a pending sequence becomes one U+FFFD. */
void utf8_stream_end(struct utf8_stream *u, struct str *out);

#endif
