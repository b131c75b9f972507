/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/peers.h - ZeroMQ between the ranks of a group: every pair connected, messages by rank.
 *
 * Not on the loop: one thread at a time owns it, and may wait in it; whoever shares it between
 * threads holds a lock around each call.  A message has two frames and is kept by sender in a ring
 * of PEERS_KEPT; more than that is dropped and counted.  A note has one frame: the newest of each
 * sender replaces the one before.  With keys all
 * traffic is CURVE, and only a peer with the same key pair is let in; without keys anyone who
 * reaches the address is. */
#ifndef LIB_NET_PEERS_H
#define LIB_NET_PEERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define PEERS_MAX       8u
#define PEERS_KEPT      272u /* the longest tale, 16 MiB in pieces of 64 KiB, and some more */
#define PEERS_KEY_CHARS 40u  /* Z85 */

struct peers;

struct peers_options {
    uint32_t rank, ranks;
    const char *addresses[PEERS_MAX];    /* "tcp://HOST:PORT" of each rank, where it listens */
    const char *key_public, *key_secret; /* Z85; NULL = in the clear */
    uint32_t message_bytes_max;          /* of a second frame */
    /* A connection that brings nothing for so long is made anew; 0 = kept.  The ranks say
     * something more often than that. */
    uint32_t silence_ms;
};

struct peers_message {
    const void *head, *bytes; /* valid until the next peers_drop of this peer */
    size_t head_bytes, count;
};

struct peers_stats {
    uint64_t received, sent, dropped_bounds, dropped_full;
    uint64_t renewed;      /* connections to lower ranks begun again, after silence */
    uint64_t refused_keys; /* connections turned away: other keys, or keys on one side only */
};

/* ERR_BUSY: our address is taken or not there yet. */
MUST_USE enum err peers_create(const struct peers_options *options, struct peers **ret_peers,
                               struct err_detail *detail);
void peers_destroy(struct peers **peers_p);

/* Never waits.  bytes NULL: a note.  ERR_BUSY: the peer is not connected or its queue is full. */
MUST_USE enum err peers_send(struct peers *p, uint32_t peer, const void *head, size_t head_bytes,
                             const void *bytes, size_t count);
/* Takes in what has come; waits up to wait_ms for something if nothing has. */
void peers_pump(struct peers *p, uint32_t wait_ms);
/* The peer's oldest message without taking it; false when there is none. */
bool peers_oldest(const struct peers *p, uint32_t peer, struct peers_message *ret_message);
void peers_drop(struct peers *p, uint32_t peer); /* the oldest one */
/* Copies the peer's newest note if it has `bytes` bytes; false when none came since the last. */
bool peers_note(struct peers *p, uint32_t peer, void *ret_note, size_t bytes);
const struct peers_stats *peers_stats(const struct peers *p);

#endif
