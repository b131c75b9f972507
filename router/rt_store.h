/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_store.h - live requests and their tokens, so that another worker can go on.
 *
 * Owned by the router's loop thread.  Pure.  At most requests_max requests and tokens_max token ids
 * (in pages of RT_PAGE_TOKENS), all taken at create; nothing grows afterwards. */
#ifndef ROUTER_RT_STORE_H
#define ROUTER_RT_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "proto/msg.h"
#include "router/rt_list.h"

#define RT_PAGE_TOKENS 128u
#define RT_FRONTS_MAX  15u /* RT_PAGE_TOKENS << 14 = MSG_IDS_MAX */
#define RT_PAGE_NONE   UINT32_MAX

struct rt_worker;
struct rt_gateway;
struct rt_flow;
struct rt_store;

/* A list of pages with `count` words in them. */
struct rt_chain {
    uint32_t first, last;
    uint32_t count;
};

enum rt_state {
    RT_FREE = 0,
    RT_WAITING,    /* in the queue */
    RT_RUNNING,    /* assigned to a worker */
    RT_CANCELLING, /* the worker was told to end it; its slot stays taken until it says so */
    RT_DONE,       /* counted; what the gateway lacks is still to be delivered */
};

/* How a waiting request without a known group asks for its session map. */
enum rt_looking {
    RT_LOOK_NONE = 0, /* not asked */
    RT_LOOK_REDIS,    /* for the map */
    RT_LOOK_POOL,     /* the group that it names, what of it is there */
    RT_LOOK_DONE,
};

struct rt_text {
    char bytes[MSG_TEXT_MAX + 1];
};

struct rt_request {
    uint32_t magic;
    enum rt_state state;
    struct msg_id id;
    struct rt_request *hash_next;

    struct rt_link place;      /* in the queue or in its worker's list */
    struct rt_link of_gateway; /* in its gateway's list */
    struct rt_link pending;    /* something has to be sent */
    struct rt_link done;       /* in the core's list of RT_DONE requests */
    struct rt_flow *flow;      /* while RT_WAITING: NULL = the front */
    struct rt_worker *worker;
    struct rt_gateway *gateway; /* NULL = nobody wants it any more */

    struct rt_text session_key, cache_salt, effort, client_id, spec;
    int32_t priority;
    struct msg_sampling sampling; /* bias pointers unused: see `bias` */
    struct msg_limits limits;
    uint32_t stop_ids[MSG_STOP_IDS_MAX];
    struct rt_chain ids;  /* prompt and output tokens */
    struct rt_chain bias; /* ids, then values as bits */
    uint32_t prompt_count;
    uint32_t output_count; /* tokens known to be final; = ids.count - prompt_count if stored */
    uint32_t delivered;    /* output tokens handed to the gateway */
    bool unstored;         /* token memory was full: it cannot be resumed elsewhere */

    uint32_t attempt; /* assignments so far */
    uint32_t resumed; /* assignments after a loss */
    uint32_t lost_at; /* output_count at the last loss */
    uint32_t losses;  /* losses in a row without a new token */
    bool acked;       /* the worker answered the assignment */
    bool send_assign, send_cancel;
    bool again; /* RT_CANCELLING only to be queued anew */

    uint64_t order;        /* admission number: age */
    uint64_t named_serial; /* of the last announcement that named it */
    uint64_t queue_us;     /* waited so far */
    uint64_t accepted_us, submitted_us, queued_us, assigned_us, cancel_us, done_us;
    uint64_t deadline_us; /* monotonic; 0 = none */
    uint64_t fit_us;      /* when some usable worker was large enough last */
    bool first_token;

    /* Where its conversation lives; rt_affinity.c. */
    bool named;                           /* it has a session key */
    struct hash128 name;                  /* rt_session_name */
    struct hash128 fronts[RT_FRONTS_MAX]; /* of the prompt's first 128, 256, 512 … tokens */
    uint32_t front_count;
    enum rt_looking look;
    uint32_t look_group;
    uint64_t look_until_us; /* not placed before; 0 = it asks nothing */
    bool mapped;            /* its group is known from a map */
    bool begun;             /* made_by is that of who gave its first tokens */
    struct hash128 made_by;

    bool has_running;
    struct msg_receipt running; /* of its worker so far; texts unused */
    struct msg_receipt before;  /* sums of the workers that were lost */

    bool finish_sent;
    struct msg_tokens finish; /* terminal message; its texts point at the two below */
    struct rt_text receipt_spec, receipt_config_hash;
};

struct rt_store *rt_store_create(uint32_t requests_max, uint64_t tokens_max);
void rt_store_destroy(struct rt_store **store_p);

struct rt_request *rt_store_find(const struct rt_store *s, const struct msg_id *id);
/* A cleared request under this id; NULL when all are taken.  The id must not be live. */
struct rt_request *rt_store_take(struct rt_store *s, const struct msg_id *id);
/* Must be in no list any more. */
void rt_store_give(struct rt_store *s, struct rt_request **request_p);
uint32_t rt_store_count(const struct rt_store *s);
/* Walks all slots; NULL for a free one. */
uint32_t rt_store_slots(const struct rt_store *s);
struct rt_request *rt_store_at(struct rt_store *s, uint32_t slot);

uint64_t rt_store_free_tokens(const struct rt_store *s);
/* All or nothing; false when the pages do not suffice. */
bool rt_chain_append(struct rt_store *s, struct rt_chain *c, const uint32_t *words, uint32_t count);
void rt_chain_read(const struct rt_store *s, const struct rt_chain *c, uint32_t from,
                   uint32_t count, uint32_t *ret_words);
void rt_chain_free(struct rt_store *s, struct rt_chain *c);

void rt_text_set(struct rt_text *t, const char *text);

#endif
