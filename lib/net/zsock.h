/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/zsock.h - what every ZeroMQ socket of ours has in common, for bus.c and peers.c.
 *
 * Used by the thread that owns the socket.  Holds nothing. */
#ifndef LIB_NET_ZSOCK_H
#define LIB_NET_ZSOCK_H

#include <stdbool.h>
#include <stdint.h>

#define ZSOCK_KEY_CHARS 40u /* of a CURVE key in Z85 */

struct zsock_options {
    int type;             /* ZMQ_ROUTER binds, ZMQ_DEALER connects */
    uint32_t queue_max;   /* messages a peer, each way */
    int64_t cut_bytes;    /* a larger frame costs its sender the connection */
    uint32_t linger_ms;   /* for what is queued when the socket is closed */
    bool only_present;    /* nothing is queued for a peer that is not there */
    uint32_t silence_ms;  /* a connection that brings nothing for so long is made anew; 0 = kept */
    const char *identity; /* of a DEALER; NULL = random */
};

void *zsock_create(void *context, const struct zsock_options *options);
void zsock_option(void *zmq, int option, int value);
/* One key pair for all who may speak: the server asks ZAP who comes.  False: these are no keys. */
bool zsock_curve(void *zmq, bool server, const char *key_public, const char *key_secret);
/* One part without waiting, into an initialised zmq_msg_t; -1 = there is none. */
int zsock_part(void *part, void *zmq);

#endif
