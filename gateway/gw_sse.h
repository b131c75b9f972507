/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_sse.h - server-sent events on one HTTP exchange.
 *
 * Owned by the loop thread.  Events are collected and leave with flush, in one write; what a slow
 * client leaves waiting is bounded by the HTTP layer, which then cancels.  Pure but for that. */
#ifndef GATEWAY_GW_SSE_H
#define GATEWAY_GW_SSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gw_http_request;
struct str;

struct gw_sse {
    struct gw_http_request *http;
    struct str *buffer; /* shared by all streams of the loop; empty between calls */
    uint64_t sent_us;   /* last bytes out */
};

/* 200 and the header fields, at once. */
void gw_sse_begin(struct gw_sse *s, struct gw_http_request *http, struct str *buffer,
                  const char *headers, uint64_t now_us);
/* data: JSON */
void gw_sse_event(struct gw_sse *s, const char *json, size_t bytes);
/* False: the client is too slow or gone; the HTTP layer tells so later. */
bool gw_sse_flush(struct gw_sse *s, uint64_t now_us);
/* A comment, if nothing was sent for ping_us. */
void gw_sse_ping(struct gw_sse *s, uint64_t ping_us, uint64_t now_us);
/* data: [DONE] and the end of the answer; the exchange is over. */
void gw_sse_done(struct gw_sse *s);

#endif
