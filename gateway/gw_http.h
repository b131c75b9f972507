/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_http.h - strict HTTP/1.1 server on libevent bufferevents.
 *
 * Owned by the loop thread.  Bounded by the options: connections, header bytes and fields, body
 * bytes each and together, output bytes waiting per connection.  One request at a time per
 * connection; pipelined ones wait unread, also for the client to read the answers so far.  The
 * handler gets a request whose framing is beyond doubt; every other one is answered here, in JSON.
 * A client that hangs up, also half, is told to the handler at once, always from the loop and never
 * from inside a call of these functions. */
#ifndef GATEWAY_GW_HTTP_H
#define GATEWAY_GW_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct loop;
struct gw_http;
struct gw_http_request; /* valid until answered in full, or until gone() */

enum gw_http_gone {
    GW_HTTP_GONE_CLIENT, /* closed, half-closed or reset */
    GW_HTTP_GONE_SLOW,   /* does not read: output bound or write deadline */
    GW_HTTP_GONE_STOP,   /* the server is being destroyed */
};

struct gw_http_handler {
    /* The head is complete and good, the body not read.  May answer now; the body is then thrown
     * away.  May be NULL. */
    void (*head)(void *arg, struct gw_http_request *r);
    /* The whole request is there.  Answers now or later. */
    void (*request)(void *arg, struct gw_http_request *r);
    /* The answer can no longer be delivered; r is dead after the call. */
    void (*gone)(void *arg, struct gw_http_request *r, enum gw_http_gone why);
    /* Counts what was refused here before a handler saw it.  May be NULL. */
    void (*refused)(void *arg, int status);
};

struct gw_http_options {
    const char *server;      /* Server: field */
    const char *cors_origin; /* "" = no CORS fields */
    uint32_t connections_max;
    uint32_t header_bytes_max;
    uint32_t header_fields_max;
    uint32_t target_bytes_max;
    uint64_t body_bytes_max;   /* of one request */
    uint64_t bodies_bytes_max; /* of all requests together */
    uint64_t output_bytes_max; /* of a stream, waiting for one client; one larger event may */
    uint32_t idle_ms;          /* between requests */
    uint32_t header_ms;        /* first byte to end of head */
    uint32_t body_ms;          /* grace; after it body_rate_min holds on average */
    uint32_t body_rate_min;    /* bytes a second */
    uint32_t write_ms;         /* output waiting, and less than body_rate_min going out */
    uint32_t linger_ms;        /* after the last answer, for the client to read it */
    struct gw_http_handler handler;
    void *arg;
};

struct gw_http_body {
    char *bytes; /* malloc; NULL when empty */
    size_t count, capacity;
};

struct gw_http_reply {
    int status;
    const char *content_type; /* NULL = application/json */
    const char *headers;      /* further fields, each with CRLF; NULL = none */
    const void *body;
    size_t body_bytes;
    bool close; /* no further request on this connection */
};

struct gw_http_stats {
    uint64_t accepted, refused_full, requests, bad_requests;
    uint32_t connections;
    uint64_t bodies_bytes;
};

/* Listens nowhere yet. */
struct gw_http *gw_http_create(struct loop *l, const struct gw_http_options *options);
/* Tells gone() for every open request. */
void gw_http_destroy(struct gw_http **http_p);
/* address "HOST:PORT" (IPv4, or [IPv6]).  ERR_INVALID, ERR_IO. */
MUST_USE enum err gw_http_listen(struct gw_http *h, const char *address, struct err_detail *detail);
uint32_t gw_http_port(const struct gw_http *h); /* bound port; 0 = not listening */
/* No new connections, idle ones are closed, answers say Connection: close. */
void gw_http_drain(struct gw_http *h);
/* Takes a connected stream socket as if accepted; false (and closed) when full. */
bool gw_http_adopt(struct gw_http *h, int fd);
const struct gw_http_stats *gw_http_stats(const struct gw_http *h);

const char *gw_http_method(const struct gw_http_request *r);
const char *gw_http_path(const struct gw_http_request *r);
const char *gw_http_query(const struct gw_http_request *r);
const char *gw_http_field(const struct gw_http_request *r, const char *name); /* NULL if absent */
/* What every answer says in x-request-id: the client's, if it sent a usable one, else made. */
const char *gw_http_request_id(struct gw_http_request *r);
void gw_http_set_request_id(struct gw_http_request *r, const char *id); /* a valid one */
void gw_http_set_user(struct gw_http_request *r, void *user);           /* NULL at the start */
void *gw_http_user(const struct gw_http_request *r);

/* Moves the body out; it counts against bodies_bytes_max until it is given back. */
void gw_http_take_body(struct gw_http_request *r, struct gw_http_body *ret_body);
void gw_http_give_body(struct gw_http *h, struct gw_http_body *body);

/* A whole answer.  HEAD gets the same head without a body. */
void gw_http_reply(struct gw_http_request *r, const struct gw_http_reply *reply);
/* An answer in pieces: chunked, or ended by closing for HTTP/1.0. */
void gw_http_stream_begin(struct gw_http_request *r, int status, const char *content_type,
                          const char *headers);
/* One chunk.  False: the client is too slow or gone; gone() follows, further writes are dropped. */
bool gw_http_stream_write(struct gw_http_request *r, const void *bytes, size_t count);
void gw_http_stream_end(struct gw_http_request *r);

const char *gw_http_reason(int status);

#endif
