/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/peers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/net/zsock.h"

#define PEERS_MAGIC 0x50454552u
#define QUEUE_MAX   64
#define HEAD_MAX    256u
#define ZAP_FRAMES  7u
#define KEY_BYTES   32u
/* A connection to a lower rank that has brought nothing for twice the silence and this is begun
 * again from nothing: what arrives damaged ends it inside ZeroMQ for good, without a word. */
#define RENEW_MS    2000u
#define WATCH_TURNS 64u

STATIC_CHECK(PEERS_KEY_CHARS == ZSOCK_KEY_CHARS);

struct kept {
    zmq_msg_t head, bytes;
};

struct kept_ring {
    struct kept items[PEERS_KEPT];
    uint32_t first, count;
    uint8_t note[HEAD_MAX];
    size_t note_bytes; /* 0 = none */
};

struct peers {
    uint32_t magic, rank, ranks;
    uint32_t message_bytes_max;
    bool curve;
    uint8_t key[KEY_BYTES];
    void *context;
    void *listener;           /* ROUTER for the higher ranks; NULL on the last */
    void *dealers[PEERS_MAX]; /* to the lower ranks */
    void *zap;                /* answers ZeroMQ's question whether a key may come in */
    void *watches[PEERS_MAX]; /* tell of handshakes that came to nothing; ours: the listener's */
    uint32_t watch_count;
    struct {
        char address[128];
        uint64_t heard_us; /* or begun anew */
    } lower[PEERS_MAX];
    uint32_t silence_ms;
    char key_public[PEERS_KEY_CHARS + 1], key_secret[PEERS_KEY_CHARS + 1];
    struct kept_ring rings[PEERS_MAX];
    struct peers_stats stats;
};

static enum err socket_open(struct peers *p, int type, void **ret_socket, struct err_detail *detail)
{
    char id[16];
    snprintf(id, sizeof id, "rank-%u", p->rank);
    struct zsock_options z = {.type = type,
                              .queue_max = QUEUE_MAX,
                              .cut_bytes = (int64_t)p->message_bytes_max + HEAD_MAX,
                              .only_present = true,
                              .silence_ms = p->silence_ms,
                              .identity = type == ZMQ_DEALER ? id : NULL};
    *ret_socket = zsock_create(p->context, &z);
    if (p->curve && !zsock_curve(*ret_socket, type == ZMQ_ROUTER, p->key_public, p->key_secret))
        return err_set(detail, ERR_INVALID, "fabric keys: not usable as CURVE keys");
    return ERR_OK;
}

/* Without a bound of its own: ZeroMQ's thread would wait for room.  Every pump empties it. */
static void *watch_open(struct peers *p, void *zmq)
{
    char name[32];
    snprintf(name, sizeof name, "inproc://watch-%u", p->watch_count++);
    CHECK(zmq_socket_monitor(zmq, name, ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) == 0);
    void *watch = zmq_socket(p->context, ZMQ_PAIR);
    CHECK(watch != NULL);
    zsock_option(watch, ZMQ_LINGER, 0);
    zsock_option(watch, ZMQ_RCVHWM, 0);
    CHECK(zmq_connect(watch, name) == 0);
    return watch;
}

static void socket_end(void **zmq_p)
{
    if (*zmq_p != NULL) {
        zmq_socket_monitor(*zmq_p, NULL, 0); /* its thread would wait for a watch that is gone */
        zmq_close(*zmq_p);
    }
    *zmq_p = NULL;
}

static enum err dealer_open(struct peers *p, uint32_t peer, struct err_detail *detail)
{
    const char *address = p->lower[peer].address;
    p->lower[peer].heard_us = clock_mono_us();
    TRY(socket_open(p, ZMQ_DEALER, &p->dealers[peer], detail));
    p->watches[peer] = watch_open(p, p->dealers[peer]);
    if (zmq_connect(p->dealers[peer], address) != 0)
        return err_set(detail, ERR_IO, "connect %s: %s", address, zmq_strerror(errno));
    return ERR_OK;
}

static enum err sockets_open(struct peers *p, const struct peers_options *o,
                             struct err_detail *detail)
{
    if (p->curve) {
        p->zap = zmq_socket(p->context, ZMQ_REP);
        CHECK(p->zap != NULL);
        zsock_option(p->zap, ZMQ_LINGER, 0);
        CHECK(zmq_bind(p->zap, "inproc://zeromq.zap.01") == 0);
    }
    if (p->rank + 1 < p->ranks) {
        TRY(socket_open(p, ZMQ_ROUTER, &p->listener, detail));
        p->watches[p->rank] = watch_open(p, p->listener);
        if (zmq_bind(p->listener, o->addresses[p->rank]) != 0) {
            /* One before us is not gone yet, or the interface is not up yet. */
            enum err e = errno == EADDRINUSE || errno == EADDRNOTAVAIL ? ERR_BUSY : ERR_IO;
            return err_set(detail, e, "bind %s: %s", o->addresses[p->rank], zmq_strerror(errno));
        }
    }
    for (uint32_t peer = 0; peer < p->rank; peer++) {
        snprintf(p->lower[peer].address, sizeof p->lower[peer].address, "%s", o->addresses[peer]);
        TRY(dealer_open(p, peer, detail));
    }
    return ERR_OK;
}

static enum err options_check(const struct peers_options *o, struct err_detail *detail)
{
    if (o->ranks < 2 || o->ranks > PEERS_MAX || o->rank >= o->ranks)
        return err_set(detail, ERR_INVALID, "fabric: rank %u of %u", o->rank, o->ranks);
    for (uint32_t i = 0; i < o->ranks; i++) {
        const char *a = o->addresses[i];
        if (a == NULL || strncmp(a, "tcp://", 6) != 0 || strlen(a) >= 128)
            return err_set(detail, ERR_INVALID, "fabric: address of rank %u: %.100s: no tcp://", i,
                           a != NULL ? a : "(none)");
    }
    if ((o->key_public == NULL) != (o->key_secret == NULL))
        return err_set(detail, ERR_INVALID, "fabric keys: one of the two is missing");
    if (o->key_public != NULL &&
        (strlen(o->key_public) != PEERS_KEY_CHARS || strlen(o->key_secret) != PEERS_KEY_CHARS))
        return err_set(detail, ERR_INVALID, "fabric keys: not %u characters of Z85",
                       PEERS_KEY_CHARS);
    return ERR_OK;
}

enum err peers_create(const struct peers_options *options, struct peers **ret_peers,
                      struct err_detail *detail)
{
    TRY(options_check(options, detail));
    struct peers *p = mem_take(sizeof *p);
    p->magic = PEERS_MAGIC;
    p->rank = options->rank;
    p->ranks = options->ranks;
    p->message_bytes_max = options->message_bytes_max;
    p->silence_ms = options->silence_ms;
    p->curve = options->key_public != NULL;
    if (p->curve) {
        memcpy(p->key_public, options->key_public, sizeof p->key_public);
        memcpy(p->key_secret, options->key_secret, sizeof p->key_secret);
    }
    p->context = zmq_ctx_new();
    CHECK(p->context != NULL);
    enum err e = ERR_OK;
    if (p->curve && zmq_z85_decode(p->key, options->key_public) == NULL)
        e = err_set(detail, ERR_INVALID, "fabric keys: the public key is no Z85");
    if (e == ERR_OK)
        e = sockets_open(p, options, detail);
    if (e != ERR_OK) {
        peers_destroy(&p);
        return e;
    }
    *ret_peers = p;
    return ERR_OK;
}

void peers_destroy(struct peers **peers_p)
{
    struct peers *p = *peers_p;
    if (p == NULL)
        return;
    CHECK_OBJ(p, PEERS_MAGIC);
    socket_end(&p->listener); /* before its watch */
    for (uint32_t peer = 0; peer < p->ranks; peer++) {
        while (p->rings[peer].count > 0)
            peers_drop(p, peer);
        socket_end(&p->dealers[peer]);
        socket_end(&p->watches[peer]);
    }
    socket_end(&p->zap);
    while (zmq_ctx_term(p->context) != 0)
        CHECK(errno == EINTR);
    p->magic = 0;
    mem_give(p);
    *peers_p = NULL;
}

static int part_send(void *zmq, const void *bytes, size_t count, bool more)
{
    int rc;
    do {
        rc = zmq_send(zmq, bytes, count, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0));
    } while (rc < 0 && errno == EINTR);
    return rc;
}

enum err peers_send(struct peers *p, uint32_t peer, const void *head, size_t head_bytes,
                    const void *bytes, size_t count)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    CHECK(peer < p->ranks && peer != p->rank);
    CHECK(head_bytes > 0 && head_bytes <= HEAD_MAX && count <= p->message_bytes_max);
    void *zmq = peer > p->rank ? p->listener : p->dealers[peer];
    bool second = bytes != NULL;
    if (peer > p->rank) {
        char id[16];
        snprintf(id, sizeof id, "rank-%u", peer);
        if (part_send(zmq, id, strlen(id), true) < 0) {
            CHECK(errno == EHOSTUNREACH || errno == EAGAIN);
            return ERR_BUSY;
        }
    }
    if (part_send(zmq, head, head_bytes, second) < 0) {
        CHECK(errno == EAGAIN || errno == EHOSTUNREACH);
        /* A pipe that broke after the routing id takes the rest of the message with it. */
        if (peer > p->rank && second)
            part_send(zmq, bytes, count, false);
        return ERR_BUSY;
    }
    if (second)
        part_send(zmq, bytes, count, false);
    p->stats.sent++;
    return ERR_OK;
}

/* ---- receiving ---- */

/* Reads one message of at most `max` frames; frames beyond are read and dropped.  Returns how many
 * there were, 0 = no message. */
static uint32_t parts_receive(void *zmq, zmq_msg_t *parts, uint32_t max)
{
    uint32_t count = 0;
    bool more = true;
    while (more) {
        zmq_msg_t part;
        CHECK(zmq_msg_init(&part) == 0);
        if (zsock_part(&part, zmq) < 0) {
            zmq_msg_close(&part);
            return count;
        }
        more = zmq_msg_more(&part) != 0;
        if (count < max) {
            CHECK(zmq_msg_init(&parts[count]) == 0);
            CHECK(zmq_msg_move(&parts[count], &part) == 0);
        }
        zmq_msg_close(&part);
        count++;
    }
    return count;
}

static uint32_t rank_of(const struct peers *p, zmq_msg_t *id)
{
    const char *text = zmq_msg_data(id);
    if (zmq_msg_size(id) != 6 || memcmp(text, "rank-", 5) != 0 || text[5] < '0' || text[5] > '7')
        return PEERS_MAX;
    uint32_t rank = (uint32_t)(text[5] - '0');
    return rank > p->rank && rank < p->ranks ? rank : PEERS_MAX;
}

static void message_keep(struct peers *p, uint32_t peer, zmq_msg_t *parts, uint32_t count)
{
    if (peer >= p->ranks || count < 1 || count > 2 || zmq_msg_size(&parts[0]) > HEAD_MAX ||
        (count == 2 && zmq_msg_size(&parts[1]) > p->message_bytes_max)) {
        p->stats.dropped_bounds++;
        return;
    }
    struct kept_ring *r = &p->rings[peer];
    if (count == 1) {
        r->note_bytes = zmq_msg_size(&parts[0]);
        memcpy(r->note, zmq_msg_data(&parts[0]), r->note_bytes);
        return;
    }
    if (r->count == PEERS_KEPT) {
        p->stats.dropped_full++;
        return;
    }
    struct kept *k = &r->items[(r->first + r->count++) % PEERS_KEPT];
    CHECK(zmq_msg_init(&k->head) == 0 && zmq_msg_init(&k->bytes) == 0);
    CHECK(zmq_msg_move(&k->head, &parts[0]) == 0);
    CHECK(zmq_msg_move(&k->bytes, &parts[1]) == 0);
    p->stats.received++;
}

static bool socket_take(struct peers *p, void *zmq, uint32_t peer)
{
    zmq_msg_t parts[3];
    uint32_t skip = peer == PEERS_MAX ? 1 : 0; /* the listener's messages begin with an id */
    uint32_t max = 2 + skip, count = parts_receive(zmq, parts, max);
    if (count == 0)
        return false;
    if (skip == 1)
        peer = rank_of(p, &parts[0]);
    message_keep(p, peer, parts + skip, count > skip ? count - skip : 0);
    for (uint32_t i = 0; i < count && i < max; i++)
        zmq_msg_close(&parts[i]);
    return true;
}

/* A client may come in whose long-term key is the group's own (RFC 27). */
static void zap_answer(struct peers *p)
{
    zmq_msg_t parts[ZAP_FRAMES];
    uint32_t count = parts_receive(p->zap, parts, ZAP_FRAMES);
    if (count == 0)
        return;
    bool good = count == ZAP_FRAMES && zmq_msg_size(&parts[6]) == KEY_BYTES &&
                memcmp(zmq_msg_data(&parts[6]), p->key, KEY_BYTES) == 0;
    if (!good)
        p->stats.refused_keys++;
    part_send(p->zap, "1.0", 3, true);
    if (count >= 2)
        part_send(p->zap, zmq_msg_data(&parts[1]), zmq_msg_size(&parts[1]), true);
    else
        part_send(p->zap, "", 0, true);
    part_send(p->zap, good ? "200" : "400", 3, true);
    part_send(p->zap, "", 0, true);
    part_send(p->zap, "", 0, true);
    part_send(p->zap, "", 0, false);
    for (uint32_t i = 0; i < count && i < ZAP_FRAMES; i++)
        zmq_msg_close(&parts[i]);
}

/* Whoever has another server key in mind, or none, is turned away before its own key is asked. */
static void watch_take(struct peers *p, void *watch)
{
    zmq_msg_t parts[2];
    for (uint32_t turn = 0, count;
         turn < WATCH_TURNS && (count = parts_receive(watch, parts, 2)) > 0; turn++) {
        uint32_t value = 0;
        if (zmq_msg_size(&parts[0]) == 6) /* u16 event, u32 value */
            memcpy(&value, (const uint8_t *)zmq_msg_data(&parts[0]) + 2, sizeof value);
        p->stats.refused_keys += value == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC ||
                                 value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH;
        for (uint32_t i = 0; i < count && i < 2; i++)
            zmq_msg_close(&parts[i]);
    }
}

static void dealer_renew(struct peers *p, uint32_t peer, bool heard)
{
    struct err_detail detail;
    uint64_t now = clock_mono_us();
    if (heard)
        p->lower[peer].heard_us = now;
    if (p->silence_ms == 0 ||
        now - p->lower[peer].heard_us < ((uint64_t)p->silence_ms * 2 + RENEW_MS) * 1000)
        return;
    socket_end(&p->dealers[peer]);
    socket_end(&p->watches[peer]);
    if (dealer_open(p, peer, &detail) != ERR_OK)
        return; /* once more after the same time */
    p->stats.renewed++;
}

/* Bounded: a flood must not hold the caller. */
static bool pump_once(struct peers *p)
{
    bool any = false;
    if (p->zap != NULL)
        zap_answer(p);
    for (uint32_t i = 0; i <= p->rank; i++)
        if (p->watches[i] != NULL)
            watch_take(p, p->watches[i]);
    for (uint32_t i = 0; i < 2 * PEERS_KEPT && p->listener != NULL; i++) {
        if (!socket_take(p, p->listener, PEERS_MAX))
            break;
        any = true;
    }
    for (uint32_t peer = 0; peer < p->rank; peer++) {
        bool heard = false;
        for (uint32_t i = 0; i < PEERS_KEPT && socket_take(p, p->dealers[peer], peer); i++)
            heard = true;
        dealer_renew(p, peer, heard);
        any |= heard;
    }
    return any;
}

void peers_pump(struct peers *p, uint32_t wait_ms)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    if (pump_once(p) || wait_ms == 0)
        return;
    zmq_pollitem_t items[PEERS_MAX + 2];
    int count = 0;
    if (p->zap != NULL)
        items[count++] = (zmq_pollitem_t){p->zap, 0, ZMQ_POLLIN, 0};
    if (p->listener != NULL)
        items[count++] = (zmq_pollitem_t){p->listener, 0, ZMQ_POLLIN, 0};
    for (uint32_t peer = 0; peer < p->rank; peer++)
        items[count++] = (zmq_pollitem_t){p->dealers[peer], 0, ZMQ_POLLIN, 0};
    if (zmq_poll(items, count, (long)wait_ms) > 0)
        pump_once(p);
}

bool peers_oldest(const struct peers *p, uint32_t peer, struct peers_message *ret_message)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    CHECK(peer < p->ranks);
    const struct kept_ring *r = &p->rings[peer];
    if (r->count == 0)
        return false;
    struct kept *k = (struct kept *)(uintptr_t)&r->items[r->first];
    *ret_message = (struct peers_message){zmq_msg_data(&k->head), zmq_msg_data(&k->bytes),
                                          zmq_msg_size(&k->head), zmq_msg_size(&k->bytes)};
    return true;
}

void peers_drop(struct peers *p, uint32_t peer)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    CHECK(peer < p->ranks && p->rings[peer].count > 0);
    struct kept_ring *r = &p->rings[peer];
    zmq_msg_close(&r->items[r->first].head);
    zmq_msg_close(&r->items[r->first].bytes);
    r->first = (r->first + 1) % PEERS_KEPT;
    r->count--;
}

bool peers_note(struct peers *p, uint32_t peer, void *ret_note, size_t bytes)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    CHECK(peer < p->ranks && bytes > 0);
    struct kept_ring *r = &p->rings[peer];
    bool fits = r->note_bytes == bytes;
    if (fits)
        memcpy(ret_note, r->note, bytes);
    r->note_bytes = 0;
    return fits;
}

const struct peers_stats *peers_stats(const struct peers *p)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    return &p->stats;
}
