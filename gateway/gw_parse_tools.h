/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_parse_tools.h - the tools of a request by name, and a walk along a name as it comes.
 *
 * Owned by one parser, immutable after init.  Borrows names and schemas from the request. */
#ifndef GATEWAY_GW_PARSE_TOOLS_H
#define GATEWAY_GW_PARSE_TOOLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct json;

struct gw_parse_tool {
    const char *name;
    size_t name_bytes;
    uint32_t index; /* in the request: of equal names the first one counts */
    const struct json *parameters;
};

struct gw_parse_tools {
    struct gw_parse_tool *items; /* sorted by name, then index */
    uint32_t count;
};

/* tools: an array, or anything else for none.  Items without a name are left out. */
MUST_USE enum err gw_parse_tools_init(struct gw_parse_tools *t, const struct json *tools);
void gw_parse_tools_fini(struct gw_parse_tools *t);

/* Which names the bytes so far begin, and which is the longest that they begin with. */
struct gw_parse_walk {
    uint32_t low, high; /* names that start with the bytes so far */
    size_t bytes;
    const struct gw_parse_tool *longest; /* NULL = none */
};

void gw_parse_walk_begin(struct gw_parse_walk *w, const struct gw_parse_tools *t);
void gw_parse_walk_byte(struct gw_parse_walk *w, const struct gw_parse_tools *t, uint8_t byte);
/* False when no continuation is a name, nor begins with one. */
bool gw_parse_walk_open(const struct gw_parse_walk *w);
/* The tool whose name is exactly the bytes so far, or NULL. */
const struct gw_parse_tool *gw_parse_walk_exact(const struct gw_parse_walk *w);

#endif
