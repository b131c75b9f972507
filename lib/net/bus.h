/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/bus.h - ZeroMQ sockets on the loop: one ROUTER to bind, DEALERs to connect.
 *
 * Owned by the loop thread.  A message is a list of frames [header][body][payload...]; on a bound
 * socket the peer's routing id travels beside it.  Bounds: frames per message, bytes per frame and
 * queued messages per peer; what exceeds them is dropped and counted.  Sending never blocks:
 * ERR_BUSY when the peer's queue is full, ERR_NOT_FOUND when a bound socket has no such peer. */
#ifndef LIB_NET_BUS_H
#define LIB_NET_BUS_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct loop;
struct bus; /* one ZeroMQ context per process */
struct bus_socket;

#define BUS_PEER_BYTES_MAX 32
#define BUS_FRAMES_MAX     8

struct bus_peer { /* routing id, chosen by the connecting side: "worker-0" */
    uint8_t count;
    uint8_t bytes[BUS_PEER_BYTES_MAX];
};

struct bus_frame {
    const void *bytes;
    size_t count;
};

/* peer is NULL on connected sockets.  Frames are borrowed for the call. */
typedef void (*bus_fn)(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t frame_count);

struct bus_stats {
    uint64_t received, sent, dropped_bounds, dropped_busy, dropped_no_peer, dropped_absent;
};

struct bus *bus_create(struct loop *l);
void bus_destroy(struct bus **bus_p); /* after all its sockets; bounded linger */

/* endpoint "ipc://PATH" (an old socket file is replaced; mode 0600) or "tcp://HOST:PORT".
 * A peer that connects again under the same id takes over (handover). */
MUST_USE enum err bus_bind(struct bus *b, const char *endpoint, uint32_t queue_max, bus_fn fn,
                           void *arg, struct bus_socket **ret_socket, struct err_detail *detail);
MUST_USE enum err bus_connect(struct bus *b, const char *endpoint, const char *routing_id,
                              uint32_t queue_max, bus_fn fn, void *arg,
                              struct bus_socket **ret_socket, struct err_detail *detail);
void bus_socket_destroy(struct bus_socket **socket_p);

/* peer: required on bound sockets, NULL on connected ones.  Frames are copied. */
MUST_USE enum err bus_send(struct bus_socket *s, const struct bus_peer *peer,
                           const struct bus_frame *frames, uint32_t frame_count);
/* On connected sockets, for what is said again and again: while nobody is connected one such
 * message waits at most, the others get ERR_CLOSED and do not pile up for an absent peer. */
MUST_USE enum err bus_send_beat(struct bus_socket *s, const struct bus_frame *frames,
                                uint32_t frame_count);
const struct bus_stats *bus_stats(const struct bus_socket *s);

#endif
