/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_http_conn.h - the connection as gw_http.c (reading) and gw_http_write.c (answering)
 * share it; nobody else includes this.
 *
 * Owned by the loop thread.  A connection is freed only by conn_settle, never inside a handler. */
#ifndef GATEWAY_GW_HTTP_CONN_H
#define GATEWAY_GW_HTTP_CONN_H

#include <stdbool.h>
#include <stdint.h>

#include "gateway/gw_api.h"
#include "gateway/gw_http.h"
#include "gateway/gw_http_chunk.h"
#include "gateway/gw_http_head.h"

struct bufferevent;
struct evbuffer;
struct event;
struct evconnlistener;
struct gw_http_parser;
struct loop_timer;

#define GW_HTTP_MAGIC      0x67774854u
#define GW_HTTP_CONN_MAGIC 0x67774843u

enum conn_state {
    CONN_FREE,
    CONN_IDLE, /* no byte of the next request yet */
    CONN_HEAD,
    CONN_BODY,
    CONN_TRAILER,
    CONN_WAIT,   /* request complete, the handler works */
    CONN_FLUSH,  /* last answer written: send it, then close our side */
    CONN_LINGER, /* our side closed: read and drop until the client closes */
    CONN_DEAD,   /* to be freed by conn_settle */
};

struct gw_http_request { /* one connection; a request is its current exchange */
    uint32_t magic;
    struct gw_http *http;
    uint32_t live_index;
    enum conn_state state;
    int fd;
    struct bufferevent *bev;
    struct evbuffer *pending;   /* written in this round of the loop */
    struct event *closed_event; /* notices a hang-up while reading is suspended */
    struct gw_http_parser *parser;
    struct gw_head head;
    struct gw_trailer trailer;
    struct gw_http_chunk chunk;
    void *user;
    char request_id[GW_REQUEST_ID_BYTES + 1]; /* "" = not looked for yet */

    bool open;     /* the handler has it and has not finished the answer */
    bool answered; /* answer complete */
    bool streaming, stream_chunked;
    bool body_done, body_drop;
    bool last; /* close after this answer */
    bool lost; /* output bound hit or send failed: gone() is due */
    enum gw_http_gone lost_why;
    bool pumping;
    bool work_listed; /* waits for conn_settle */
    bool continue_sent;
    bool reading_paused;
    bool input_ended; /* the client has closed its side */

    struct gw_http_body body;
    uint64_t body_seen;
    uint64_t since_us;      /* of this state */
    uint64_t added_bytes;   /* to the output, ever */
    uint64_t written_bytes; /* out of it, when it was last seen to go on */
    uint64_t progress_us;   /* when that was */
    uint64_t large_end;     /* added_bytes behind an event above the output bound */
    uint64_t large_bytes;
    struct gw_http_request *work_next;
};

struct gw_http {
    uint32_t magic;
    struct loop *loop;
    struct gw_http_options options;
    struct evconnlistener *listener;
    struct event *work_event;
    struct loop_timer *sweep_timer;
    struct loop_timer *accept_timer;
    struct gw_http_request *conns;
    struct gw_http_request **free_list;
    uint32_t free_count;
    struct gw_http_request **live;
    uint32_t live_count;
    struct gw_http_request *work;
    struct gw_http_stats stats;
    bool draining;
    uint32_t port;
    char date[40];
    uint64_t now_us; /* of the latest callback */
};

/* gw_http.c */
void conn_work(struct gw_http_request *c); /* have conn_settle look at it soon */
/* gw_http_write.c */
void conn_send(struct gw_http_request *c, const void *bytes, size_t count); /* gathers */
void conn_flush(struct gw_http_request *c);                                 /* by conn_settle */
uint64_t conn_output_bytes(const struct gw_http_request *c);
void conn_refuse(struct gw_http_request *c, int status, const char *reason);
void conn_set_date(struct gw_http *h);

#endif
