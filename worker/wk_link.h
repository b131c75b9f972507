/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_link.h - what carries messages between the ranks of a group: one table per transport.
 *
 * A link moves whole messages between pairs of ranks, in order, and publishes each rank's status;
 * it knows nothing of collectives.  Its owner is the thread that calls the fabric, but for `beat`,
 * which a second thread calls at any time.  No call waits longer than its wait_us.  Nothing is
 * allocated after create, but for what ZeroMQ takes inside the tcp link. */
#ifndef WORKER_WK_LINK_H
#define WORKER_WK_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/err.h"
#include "lib/base/hash.h"

#define WK_RANKS_MAX 8u

enum wk_collective {
    WK_ALL_REDUCE = 1,
    WK_ALL_GATHER = 2,
    WK_PAIR_EXCHANGE = 3,
    WK_BARRIER = 4,
    WK_ALL_TO_ALL = 5,
    WK_TELL = 6, /* rank 0 to the others, outside of any step */
};

#define WK_HEAD_MAGIC 0x31424654u /* "TFB1" */

/* Before the payload of every message, in the host's byte order, which the magic shows. */
struct wk_head {
    uint32_t magic;
    uint8_t kind; /* enum wk_collective */
    uint8_t rank; /* sender */
    uint16_t zero;
    uint32_t epoch;
    uint32_t bytes;     /* of this message's payload */
    uint64_t step;      /* of the plan that the collective belongs to */
    uint64_t number;    /* messages from this sender to this receiver in the epoch, from 1 */
    uint64_t bytes_all; /* of the collective, per rank */
    uint64_t sum;       /* of the fields above and the payload */
};
STATIC_CHECK(sizeof(struct wk_head) == 48);

/* What a rank tells of itself at all times. */
struct wk_status {
    uint64_t incarnation; /* random, made at create; 0 = never seen */
    uint32_t epoch;       /* the one it is in, or the one it proposes */
    uint32_t joined;      /* 1: in a group of that epoch with these members */
    uint64_t members[WK_RANKS_MAX];
    uint64_t sent[WK_RANKS_MAX]; /* messages to each rank in that epoch, when it last had to wait */
    struct hash128 settings;
    uint64_t sum; /* of the fields above: wk_status_sum */
};
STATIC_CHECK(sizeof(struct wk_status) == 40 + 16 * WK_RANKS_MAX);

/* An epoch goes up by one when a group is lost: what is above came from nowhere. */
#define WK_EPOCH_MAX (1u << 31)

static inline uint64_t wk_status_sum(const struct wk_status *s)
{
    struct hash128 h = hash_xxh3_once(s, offsetof(struct wk_status, sum));
    uint64_t sum;
    memcpy(&sum, h.bytes, sizeof sum);
    return sum;
}

/* A status as its rank published it; another is nobody's. */
static inline bool wk_status_sound(const struct wk_status *s)
{
    return s->sum == wk_status_sum(s) && s->epoch <= WK_EPOCH_MAX && s->incarnation != 0;
}

struct wk_link_message {
    struct wk_head head;
    const uint8_t *bytes; /* valid until release */
};

struct wk_link_ops {
    const char *name;
    /* Copies.  ERR_BUSY: no room for wait_us; ERR_CLOSED: the link is gone for good. */
    enum err (*send)(void *self, uint32_t peer, const struct wk_head *head, const void *bytes,
                     uint64_t wait_us);
    /* The oldest message of the peer, which stays where it is until release: receiving again gives
     * it again.  ERR_BUSY: none within wait_us. */
    enum err (*receive)(void *self, uint32_t peer, struct wk_link_message *ret_message,
                        uint64_t wait_us);
    void (*release)(void *self, uint32_t peer);
    void (*publish)(void *self, const struct wk_status *own);
    /* The peer's last known status and when it last showed life (monotonic; 0 = not alive). */
    void (*peer)(void *self, uint32_t peer, struct wk_status *ret_status, uint64_t *ret_heard_us);
    void (*beat)(void *self); /* every WK_BEAT_MS, from another thread */
    /* Connections turned away so far because their keys are not ours; NULL = there are no keys. */
    uint64_t (*refused)(void *self);
    void (*destroy)(void *self);
};

struct wk_link {
    const struct wk_link_ops *ops;
    void *self;
    uint32_t rank, ranks;
    uint32_t message_bytes_max; /* of a payload */
};

#define WK_BEAT_MS 50u

static inline void wk_link_destroy(struct wk_link *l)
{
    if (l->ops != NULL)
        l->ops->destroy(l->self);
    l->ops = NULL;
}

#endif
