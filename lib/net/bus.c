/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/bus.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/net/loop.h"
#include "lib/net/zsock.h"

#define BUS_MAGIC        0x42555321u
#define BUS_SOCKET_MAGIC 0x42555353u

/* The largest payload frame of the wire plus room for one header. */
#define BUS_FRAME_BYTES_MAX ((8u << 20) + 64u)
/* Above this ZeroMQ itself cuts the connection before it takes the memory.  Frames between the two
 * bounds are dropped and counted, and the peer stays connected. */
#define BUS_CUT_BYTES (2u * BUS_FRAME_BYTES_MAX)
/* Messages handled in a row before timers and other descriptors get their turn. */
#define BUS_BURST_MAX 256u
#define BUS_LINGER_MS 200

struct bus {
    uint32_t magic;
    uint32_t socket_count;
    uint32_t monitor_count; /* ever made: each has its own name */
    struct loop *loop;
    void *context;
};

struct bus_socket {
    uint32_t magic;
    bool bound;
    bool draining;
    bool connected;  /* as of the last event taken from `monitor` */
    bool beat_waits; /* one was queued since the connection went away */
    struct bus *bus;
    void *zmq;
    void *monitor; /* of a connected socket: its connections come and go */
    struct loop_watch *watch;
    struct loop_timer *again; /* fires at once: events that the descriptor will not announce */
    bus_fn fn;
    void *arg;
    struct bus_stats stats;
    char name[128]; /* the endpoint, for logs */
    char file[128]; /* of a bound unix socket, else "" */
};

struct bus *bus_create(struct loop *l)
{
    struct bus *b = mem_take(sizeof(*b));
    b->magic = BUS_MAGIC;
    b->loop = l;
    b->context = zmq_ctx_new();
    CHECK(b->context != NULL);
    return b;
}

void bus_destroy(struct bus **bus_p)
{
    struct bus *b = *bus_p;
    if (b == NULL)
        return;
    CHECK_OBJ(b, BUS_MAGIC);
    CHECK(b->socket_count == 0);
    while (zmq_ctx_term(b->context) != 0)
        CHECK(errno == EINTR); /* bounded: every socket has BUS_LINGER_MS */
    b->magic = 0;
    mem_give(b);
    *bus_p = NULL;
}

/* The parts of one message: all of them are read, those within the bounds are kept. */
struct bus_parts {
    zmq_msg_t msgs[BUS_FRAMES_MAX + 1];
    uint32_t kept;
    uint32_t total;
    const char *fault;
};

static void parts_close(struct bus_parts *p)
{
    for (uint32_t i = 0; i < p->kept; i++)
        zmq_msg_close(&p->msgs[i]);
    p->kept = 0;
}

/* False when there is no message.  ZeroMQ hands over messages whole: after the first part the
 * others are there. */
static bool parts_receive(struct bus_socket *s, struct bus_parts *p)
{
    uint32_t kept_max = BUS_FRAMES_MAX + (s->bound ? 1u : 0u);
    p->kept = 0;
    p->total = 0;
    p->fault = NULL;
    bool more = true;
    while (more) {
        zmq_msg_t part;
        CHECK(zmq_msg_init(&part) == 0);
        if (zsock_part(&part, s->zmq) < 0) {
            zmq_msg_close(&part);
            if (p->total > 0)
                p->fault = "incomplete";
            return p->total > 0;
        }
        more = zmq_msg_more(&part) != 0;
        p->total++;
        if (zmq_msg_size(&part) > BUS_FRAME_BYTES_MAX)
            p->fault = "frame too large";
        if (p->kept == kept_max)
            p->fault = "too many frames";
        if (p->fault != NULL) {
            zmq_msg_close(&part);
            continue;
        }
        zmq_msg_t *keep = &p->msgs[p->kept++];
        CHECK(zmq_msg_init(keep) == 0);
        CHECK(zmq_msg_move(keep, &part) == 0);
        zmq_msg_close(&part);
    }
    return true;
}

static void parts_deliver(struct bus_socket *s, struct bus_parts *p)
{
    struct bus_peer peer = {0};
    struct bus_frame frames[BUS_FRAMES_MAX];
    uint32_t at = 0;
    if (p->fault == NULL && s->bound) {
        size_t bytes = zmq_msg_size(&p->msgs[0]);
        if (bytes == 0 || bytes > BUS_PEER_BYTES_MAX) {
            p->fault = "routing id length";
        } else {
            peer.count = (uint8_t)bytes;
            memcpy(peer.bytes, zmq_msg_data(&p->msgs[0]), bytes);
        }
        at = 1;
    }
    if (p->fault == NULL && p->kept == at)
        p->fault = "no frames";
    if (p->fault != NULL) {
        s->stats.dropped_bounds++;
        log_warn(BUS, "message dropped", "socket=%s reason=\"%s\" frames=%u", s->name, p->fault,
                 p->total);
        return;
    }
    uint32_t count = p->kept - at;
    CHECK(count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < count; i++) {
        frames[i].bytes = zmq_msg_data(&p->msgs[at + i]);
        frames[i].count = zmq_msg_size(&p->msgs[at + i]);
    }
    s->stats.received++;
    s->fn(s->arg, s->bound ? &peer : NULL, frames, count);
}

static bool socket_readable(struct bus_socket *s)
{
    int events = 0;
    size_t bytes = sizeof(events);
    while (zmq_getsockopt(s->zmq, ZMQ_EVENTS, &events, &bytes) != 0)
        CHECK(errno == EINTR);
    return (events & ZMQ_POLLIN) != 0;
}

/* The one place that empties a socket.  ZeroMQ's descriptor announces only changes, so nothing may
 * be left behind without a timer that brings us back. */
static void socket_drain(void *arg)
{
    struct bus_socket *s = arg;
    CHECK_OBJ(s, BUS_SOCKET_MAGIC);
    CHECK(!s->draining);
    s->draining = true;
    uint32_t burst = 0;
    while (burst < BUS_BURST_MAX && socket_readable(s)) {
        struct bus_parts parts;
        if (!parts_receive(s, &parts))
            continue;
        parts_deliver(s, &parts);
        parts_close(&parts);
        burst++;
    }
    s->draining = false;
    if (burst == BUS_BURST_MAX && socket_readable(s))
        loop_timer_start(s->again, 0, false);
}

static struct bus_socket *socket_create(struct bus *b, const char *endpoint, bool bound,
                                        uint32_t queue_max, bus_fn fn, void *arg)
{
    CHECK_OBJ(b, BUS_MAGIC);
    CHECK(fn != NULL && queue_max > 0);
    struct bus_socket *s = mem_take(sizeof(*s));
    s->magic = BUS_SOCKET_MAGIC;
    s->bus = b;
    s->bound = bound;
    s->fn = fn;
    s->arg = arg;
    snprintf(s->name, sizeof(s->name), "%s", endpoint);
    struct zsock_options o = {.type = bound ? ZMQ_ROUTER : ZMQ_DEALER,
                              .queue_max = queue_max,
                              .cut_bytes = BUS_CUT_BYTES,
                              .linger_ms = BUS_LINGER_MS};
    s->zmq = zsock_create(b->context, &o);
    if (strncmp(endpoint, "tcp://", 6) == 0) {
        /* Unix sockets tell when a peer dies; a cut cable does not. */
        zsock_option(s->zmq, ZMQ_HEARTBEAT_IVL, 1000);
        zsock_option(s->zmq, ZMQ_HEARTBEAT_TIMEOUT, 5000);
    }
    b->socket_count++;
    return s;
}

static void monitor_open(struct bus_socket *s)
{
    char name[48];
    snprintf(name, sizeof(name), "inproc://monitor-%u", s->bus->monitor_count++);
    CHECK(zmq_socket_monitor(s->zmq, name,
                             ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) == 0);
    s->monitor = zmq_socket(s->bus->context, ZMQ_PAIR);
    CHECK(s->monitor != NULL && zmq_connect(s->monitor, name) == 0);
}

static void monitor_close(struct bus_socket *s)
{
    if (s->monitor == NULL)
        return;
    CHECK(zmq_socket_monitor(s->zmq, NULL, 0) == 0);
    zsock_option(s->monitor, ZMQ_LINGER, 0);
    CHECK(zmq_close(s->monitor) == 0);
    s->monitor = NULL;
}

/* Takes what has happened; an event is a part of 6 bytes (event u16, value u32) and one with the
 * address.  ZeroMQ makes few: one when a connection is there and one when it is gone. */
static bool socket_connected(struct bus_socket *s)
{
    zmq_msg_t part;
    CHECK(zmq_msg_init(&part) == 0);
    bool first = true;
    while (zsock_part(&part, s->monitor) >= 0) {
        uint16_t event = 0;
        if (first && zmq_msg_size(&part) >= sizeof(event))
            memcpy(&event, zmq_msg_data(&part), sizeof(event));
        first = zmq_msg_more(&part) == 0;
        if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            s->connected = true;
        else if (event == ZMQ_EVENT_DISCONNECTED)
            s->connected = false;
    }
    zmq_msg_close(&part);
    return s->connected;
}

static void socket_watch(struct bus_socket *s)
{
    int fd = -1;
    size_t bytes = sizeof(fd);
    CHECK(zmq_getsockopt(s->zmq, ZMQ_FD, &fd, &bytes) == 0);
    s->again = loop_timer_create(s->bus->loop, socket_drain, s);
    s->watch = loop_watch_create(s->bus->loop, fd, socket_drain, s);
    loop_timer_start(s->again, 0, false);
}

void bus_socket_destroy(struct bus_socket **socket_p)
{
    struct bus_socket *s = *socket_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, BUS_SOCKET_MAGIC);
    CHECK(!s->draining); /* never from its own callback */
    loop_watch_destroy(&s->watch);
    loop_timer_destroy(&s->again);
    monitor_close(s);
    CHECK(zmq_close(s->zmq) == 0);
    if (s->file[0] != '\0')
        unlink(s->file); /* ZeroMQ leaves it */
    s->bus->socket_count--;
    s->magic = 0;
    mem_give(s);
    *socket_p = NULL;
}

static enum err endpoint_check(const char *endpoint, struct err_detail *detail)
{
    if (strncmp(endpoint, "ipc://", 6) != 0 && strncmp(endpoint, "tcp://", 6) != 0)
        return err_set(detail, ERR_INVALID, "endpoint %s: neither ipc:// nor tcp://", endpoint);
    if (strlen(endpoint) >= sizeof(((struct bus_socket *)0)->name))
        return err_set(detail, ERR_INVALID, "endpoint %s: longer than a socket path can be",
                       endpoint);
    return ERR_OK;
}

/* An old socket may be replaced, nothing else. */
static enum err ipc_path_check(const char *path, struct err_detail *detail)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return ERR_OK;
    if (!S_ISSOCK(st.st_mode))
        return err_set(detail, ERR_INVALID, "%s: exists and is no socket", path);
    return ERR_OK;
}

enum err bus_bind(struct bus *b, const char *endpoint, uint32_t queue_max, bus_fn fn, void *arg,
                  struct bus_socket **ret_socket, struct err_detail *detail)
{
    TRY(endpoint_check(endpoint, detail));
    const char *path = strncmp(endpoint, "ipc://", 6) == 0 ? endpoint + 6 : NULL;
    if (path != NULL)
        TRY(ipc_path_check(path, detail));
    struct bus_socket *s = socket_create(b, endpoint, true, queue_max, fn, arg);
    mode_t mask = umask(0177); /* the file has its mode from its first moment on */
    int rc = zmq_bind(s->zmq, endpoint);
    int fault = errno;
    umask(mask);
    if (rc == 0 && path != NULL && chmod(path, 0600) != 0) {
        rc = -1;
        fault = errno;
    }
    if (rc != 0) {
        bus_socket_destroy(&s);
        return err_set(detail, fault == EADDRINUSE ? ERR_BUSY : ERR_IO, "bind %s: %s", endpoint,
                       zmq_strerror(fault));
    }
    if (path != NULL)
        snprintf(s->file, sizeof(s->file), "%s", path);
    socket_watch(s);
    *ret_socket = s;
    return ERR_OK;
}

enum err bus_connect(struct bus *b, const char *endpoint, const char *routing_id,
                     uint32_t queue_max, bus_fn fn, void *arg, struct bus_socket **ret_socket,
                     struct err_detail *detail)
{
    TRY(endpoint_check(endpoint, detail));
    size_t id_bytes = strlen(routing_id);
    if (id_bytes == 0 || id_bytes > BUS_PEER_BYTES_MAX)
        return err_set(detail, ERR_INVALID, "routing id %s: 1 to %d bytes", routing_id,
                       BUS_PEER_BYTES_MAX);
    struct bus_socket *s = socket_create(b, endpoint, false, queue_max, fn, arg);
    CHECK(zmq_setsockopt(s->zmq, ZMQ_ROUTING_ID, routing_id, id_bytes) == 0);
    monitor_open(s);
    if (zmq_connect(s->zmq, endpoint) != 0) {
        int fault = errno;
        bus_socket_destroy(&s);
        return err_set(detail, ERR_IO, "connect %s: %s", endpoint, zmq_strerror(fault));
    }
    socket_watch(s);
    *ret_socket = s;
    return ERR_OK;
}

static int part_send(void *zmq, const void *bytes, size_t count, bool more)
{
    int rc;
    do {
        rc = zmq_send(zmq, bytes, count, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0));
    } while (rc < 0 && errno == EINTR);
    return rc;
}

static enum err send_fault(struct bus_socket *s, int fault)
{
    if (fault == EHOSTUNREACH) {
        s->stats.dropped_no_peer++;
        return ERR_NOT_FOUND;
    }
    CHECK(fault == EAGAIN);
    s->stats.dropped_busy++;
    return ERR_BUSY;
}

/* Only the first part can be refused for the whole message.  A later fault means that the pipe
 * broke in the middle: ZeroMQ drops the message, and the remaining parts are offered all the same
 * so that the next message does not begin inside this one. */
static enum err parts_send(struct bus_socket *s, const struct bus_peer *peer,
                           const struct bus_frame *frames, uint32_t frame_count)
{
    bool begun = false, broken = false;
    if (peer != NULL) {
        if (part_send(s->zmq, peer->bytes, peer->count, true) < 0)
            return send_fault(s, errno);
        begun = true;
    }
    for (uint32_t i = 0; i < frame_count; i++) {
        if (part_send(s->zmq, frames[i].bytes, frames[i].count, i + 1 < frame_count) >= 0) {
            begun = true;
            continue;
        }
        if (!begun)
            return send_fault(s, errno);
        broken = true;
    }
    if (broken) {
        s->stats.dropped_busy++;
        return ERR_BUSY;
    }
    s->stats.sent++;
    return ERR_OK;
}

enum err bus_send(struct bus_socket *s, const struct bus_peer *peer, const struct bus_frame *frames,
                  uint32_t frame_count)
{
    CHECK_OBJ(s, BUS_SOCKET_MAGIC);
    CHECK(s->bound == (peer != NULL));
    CHECK(peer == NULL || (peer->count > 0 && peer->count <= BUS_PEER_BYTES_MAX));
    CHECK(frame_count > 0 && frame_count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < frame_count; i++)
        CHECK(frames[i].count <= BUS_FRAME_BYTES_MAX);
    enum err e = parts_send(s, peer, frames, frame_count);
    /* Sending takes in what the descriptor announced; bring the drain back if it was a message. */
    if (!s->draining && socket_readable(s))
        loop_timer_start(s->again, 0, false);
    return e;
}

enum err bus_send_beat(struct bus_socket *s, const struct bus_frame *frames, uint32_t frame_count)
{
    CHECK_OBJ(s, BUS_SOCKET_MAGIC);
    CHECK(!s->bound && s->monitor != NULL);
    bool connected = socket_connected(s);
    if (!connected && s->beat_waits) {
        s->stats.dropped_absent++;
        return ERR_CLOSED;
    }
    s->beat_waits = !connected;
    return bus_send(s, NULL, frames, frame_count);
}

const struct bus_stats *bus_stats(const struct bus_socket *s)
{
    CHECK_OBJ(s, BUS_SOCKET_MAGIC);
    return &s->stats;
}
