/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_http_head.h - the head of an HTTP/1.x request, byte by byte and strict.
 *
 * Owned by the loop thread.  Bounded by the limits given at init: bytes, fields, target.  Pure: no
 * sockets, no clock.  Refuses what http-parser lets through: bare LF, folded fields, space before
 * the colon, a missing or second Host, unknown versions, any transfer coding but chunked. */
#ifndef GATEWAY_GW_HTTP_HEAD_H
#define GATEWAY_GW_HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GW_HEAD_FIELDS_MAX 100u

struct gw_head_limits {
    uint32_t bytes_max;
    uint32_t fields_max; /* <= GW_HEAD_FIELDS_MAX */
    uint32_t target_bytes_max;
};

struct gw_head_field { /* offsets into text */
    uint32_t name, name_bytes;
    uint32_t value, value_bytes;
};

enum gw_head_state { GW_HEAD_MORE, GW_HEAD_DONE, GW_HEAD_REFUSED };

struct gw_head {
    uint32_t magic;
    struct gw_head_limits limits;
    char *text; /* owned; NUL-terminated pieces once done */
    uint32_t bytes, capacity;
    uint32_t line_start;
    uint32_t blank_lines; /* skipped before the request line */
    enum gw_head_state state;
    int status; /* REFUSED: what to answer, and why (constant text) */
    const char *reason;

    /* DONE: */
    const char *method;
    const char *path;  /* without query; NUL-terminated */
    const char *query; /* "" if none */
    uint32_t minor;    /* HTTP/1.minor, 0 or 1 */
    uint32_t field_count;
    struct gw_head_field fields[GW_HEAD_FIELDS_MAX];
    bool chunked;
    bool has_length;
    uint64_t length; /* Content-Length */
    bool expect_continue;
    bool expect_unknown;
    bool keep_alive; /* what the client asks for, by version and Connection */
};

void gw_head_init(struct gw_head *h, const struct gw_head_limits *limits);
void gw_head_fini(struct gw_head *h);
/* Ready for the next request; gives back a large buffer. */
void gw_head_reset(struct gw_head *h);

/* Takes bytes up to and including the end of the head; *ret_used says how many were taken.  After
 * DONE or REFUSED nothing more is taken until reset. */
enum gw_head_state gw_head_feed(struct gw_head *h, const char *bytes, size_t count,
                                size_t *ret_used);

/* Value of a field by lower-case name, NUL-terminated; NULL if absent; the first if repeated. */
const char *gw_head_value(const struct gw_head *h, const char *name);
/* The same of a head in any state: of the lines that are there, well formed or not.  Not
 * terminated; NULL if there is none. */
const char *gw_head_seen(const struct gw_head *h, const char *name, size_t *ret_bytes);

/* Trailer fields of a chunked body: same line rules, content thrown away. */
struct gw_trailer {
    uint32_t bytes, line_bytes;
    bool colon; /* this line has had one */
    bool carriage_return;
};
void gw_trailer_init(struct gw_trailer *t);
enum gw_head_state gw_trailer_feed(struct gw_trailer *t, const char *bytes, size_t count,
                                   size_t *ret_used);

#endif
