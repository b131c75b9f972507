/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_parse_types.h - declared types of an argument, and its value as JSON text.
 *
 * Pure.  Schemas come from clients: nesting and the number of visited schemas are bounded
 * (GW_PARSE_TYPES_DEPTH_MAX, GW_PARSE_TYPES_VISITS_MAX), past them a type counts as undeclared. */
#ifndef GATEWAY_GW_PARSE_TYPES_H
#define GATEWAY_GW_PARSE_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define GW_PARSE_TYPES_DEPTH_MAX  32
#define GW_PARSE_TYPES_VISITS_MAX 1024

struct arena;
struct json;
struct str;

/* A set; 0 = undeclared. */
enum gw_parse_type {
    GW_PARSE_TYPE_STRING = 1,
    GW_PARSE_TYPE_NUMBER = 2,
    GW_PARSE_TYPE_INTEGER = 4,
    GW_PARSE_TYPE_BOOLEAN = 8,
    GW_PARSE_TYPE_ARRAY = 16,
    GW_PARSE_TYPE_OBJECT = 32,
    GW_PARSE_TYPE_NULL = 64,
};

/* parameters: the schema of all arguments, NULL = none. */
uint32_t gw_parse_types(const struct json *parameters, const char *key, size_t key_bytes);

/* Appends the value that the text stands for.  The arena is for parsing; the caller resets it. */
void gw_parse_value_write(struct str *out, struct arena *arena, uint32_t types, const char *text,
                          size_t bytes);

#endif
