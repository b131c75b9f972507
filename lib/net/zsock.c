/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/zsock.h"

#include <errno.h>
#include <string.h>
#include <zmq.h>

#include "lib/base/check.h"

#define HANDSHAKE_MS 2000
#define CONNECT_MS   1000

void zsock_option(void *zmq, int option, int value)
{
    CHECK(zmq_setsockopt(zmq, option, &value, sizeof(value)) == 0);
}

void *zsock_create(void *context, const struct zsock_options *o)
{
    CHECK(o->type == ZMQ_ROUTER || o->type == ZMQ_DEALER);
    CHECK(o->queue_max > 0 && o->cut_bytes > 0);
    void *zmq = zmq_socket(context, o->type);
    CHECK(zmq != NULL);
    CHECK(zmq_setsockopt(zmq, ZMQ_MAXMSGSIZE, &o->cut_bytes, sizeof(o->cut_bytes)) == 0);
    /* A domain without a handler refuses exactly the peers of protocols older than 3.  Any bytes
     * that are no ZeroMQ count as the oldest of them, and libzmq 4.3.4 aborts when one of those
     * arrives while its socket is being closed. */
    CHECK(zmq_setsockopt(zmq, ZMQ_ZAP_DOMAIN, "tandem", 6) == 0);
    zsock_option(zmq, ZMQ_SNDHWM, (int)o->queue_max);
    zsock_option(zmq, ZMQ_RCVHWM, (int)o->queue_max);
    zsock_option(zmq, ZMQ_LINGER, (int)o->linger_ms);
    if (o->silence_ms > 0) {
        /* Without these a cable that is plugged in again, or bytes out of step, cost what TCP has
         * come to wait meanwhile, or the 30 s that a handshake may take. */
        zsock_option(zmq, ZMQ_HEARTBEAT_IVL, (int)o->silence_ms / 2);
        zsock_option(zmq, ZMQ_HEARTBEAT_TIMEOUT, (int)o->silence_ms);
        zsock_option(zmq, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
        zsock_option(zmq, ZMQ_CONNECT_TIMEOUT, CONNECT_MS);
    }
    if (o->type == ZMQ_ROUTER) {
        zsock_option(zmq, ZMQ_ROUTER_MANDATORY, 1);
        zsock_option(zmq, ZMQ_ROUTER_HANDOVER, 1);
        return zmq;
    }
    if (o->identity != NULL)
        CHECK(zmq_setsockopt(zmq, ZMQ_ROUTING_ID, o->identity, strlen(o->identity)) == 0);
    if (o->only_present)
        zsock_option(zmq, ZMQ_IMMEDIATE, 1);
    /* A peer that restarts is found again in time for every bound of the failure table. */
    zsock_option(zmq, ZMQ_RECONNECT_IVL, 50);
    zsock_option(zmq, ZMQ_RECONNECT_IVL_MAX, 250);
    return zmq;
}

bool zsock_curve(void *zmq, bool server, const char *key_public, const char *key_secret)
{
    int rc = 0;
    CHECK(strlen(key_public) == ZSOCK_KEY_CHARS && strlen(key_secret) == ZSOCK_KEY_CHARS);
    if (server) {
        zsock_option(zmq, ZMQ_CURVE_SERVER, 1);
    } else {
        rc |= zmq_setsockopt(zmq, ZMQ_CURVE_SERVERKEY, key_public, ZSOCK_KEY_CHARS + 1);
        rc |= zmq_setsockopt(zmq, ZMQ_CURVE_PUBLICKEY, key_public, ZSOCK_KEY_CHARS + 1);
    }
    rc |= zmq_setsockopt(zmq, ZMQ_CURVE_SECRETKEY, key_secret, ZSOCK_KEY_CHARS + 1);
    return rc == 0;
}

int zsock_part(void *part, void *zmq)
{
    int got;
    do {
        got = zmq_msg_recv(part, zmq, ZMQ_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    CHECK(got >= 0 || errno == EAGAIN);
    return got;
}
