/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_parse_stop.h - stop strings in text that comes in pieces.
 *
 * Owned by one parser.  Passes text on as soon as no stop string can begin in it; the first
 * string that is complete cuts exactly before itself (of those complete at the same byte the
 * longest).  Holds fewer bytes than the longest string; cost: bytes times strings. */
#ifndef GATEWAY_GW_PARSE_STOP_H
#define GATEWAY_GW_PARSE_STOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gateway/gw_parse.h"
#include "lib/base/str.h"

struct gw_parse_stop_item {
    char *text;
    uint32_t *back; /* length of the longest border of text[0..i] */
    uint32_t bytes;
    uint32_t matched; /* bytes of it that the text so far ends with */
};

struct gw_parse_stops {
    struct gw_parse_stop_item *items;
    size_t count;
    struct str held; /* end of the text that may begin a stop string */
    bool found;
    size_t found_index;
};

MUST_USE enum err gw_parse_stops_init(struct gw_parse_stops *s, const struct gw_parse_stop *stops,
                                      size_t count);
void gw_parse_stops_fini(struct gw_parse_stops *s);

/* Appends to out what is certain.  After a find nothing more comes. */
void gw_parse_stops_add(struct gw_parse_stops *s, const char *text, size_t bytes, struct str *out);
/* The text ends or is interrupted: what is held was no stop string. */
void gw_parse_stops_release(struct gw_parse_stops *s, struct str *out);

#endif
