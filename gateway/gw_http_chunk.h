/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_http_chunk.h - strict look at the framing of a chunked body.
 *
 * Pure.  http-parser's Debian build takes any two bytes for the line end after a chunk and any byte
 * in an extension; two readers that differ there disagree about where a message ends.  This
 * follows RFC 9112 7.1 to the letter, up to the line of the last chunk; trailers are read
 * elsewhere. */
#ifndef GATEWAY_GW_HTTP_CHUNK_H
#define GATEWAY_GW_HTTP_CHUNK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gw_http_chunk {
    uint8_t state;
    uint8_t digits;
    uint64_t left; /* of the size line being read, then of the data */
};

void gw_http_chunk_init(struct gw_http_chunk *c);

/* False at the first byte that a strict reader refuses.  Bytes after the last chunk's line are not
 * looked at. */
bool gw_http_chunk_feed(struct gw_http_chunk *c, const char *bytes, size_t count);

#endif
