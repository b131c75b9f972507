/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_link_tcp.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/net/peers.h"

#define TCP_MAGIC 0x574b5443u

STATIC_CHECK(PEERS_MAX == WK_RANKS_MAX);

struct tcp_link {
    uint32_t magic, rank, ranks;
    /* Held by whoever is in the sockets.  The thread that waits in a collective keeps it and
     * beats itself meanwhile; the beating thread stays out when it is taken. */
    pthread_mutex_t lock;
    struct peers *peers;
    struct wk_status own;
    struct wk_status statuses[WK_RANKS_MAX];
    uint64_t heard_us[WK_RANKS_MAX];
    uint64_t beaten_us, notes_damaged;
};

static void beat_locked(struct tcp_link *k)
{
    k->beaten_us = clock_mono_us();
    for (uint32_t peer = 0; peer < k->ranks; peer++) {
        /* A peer that is not there misses a beat. */
        if (peer != k->rank && k->own.incarnation != 0 &&
            peers_send(k->peers, peer, &k->own, sizeof k->own, NULL, 0) != ERR_OK)
            continue;
    }
}

/* A damaged note is no sign of life: the one before stays. */
static void note_take(struct tcp_link *k, uint32_t peer, uint64_t now)
{
    struct wk_status s;
    if (!peers_note(k->peers, peer, &s, sizeof s))
        return;
    if (!wk_status_sound(&s)) {
        k->notes_damaged++;
        return;
    }
    k->statuses[peer] = s;
    k->heard_us[peer] = now;
}

static void pump_locked(struct tcp_link *k, uint32_t wait_ms)
{
    peers_pump(k->peers, wait_ms);
    uint64_t now = clock_mono_us();
    for (uint32_t peer = 0; peer < k->ranks; peer++)
        note_take(k, peer, now);
    if (now - k->beaten_us >= WK_BEAT_MS * 1000u)
        beat_locked(k);
}

static void sleep_us(uint64_t us)
{
    struct timespec t = {0, (long)us * 1000};
    nanosleep(&t, NULL);
}

static enum err tcp_send(void *self, uint32_t peer, const struct wk_head *head, const void *bytes,
                         uint64_t wait_us)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    uint64_t end_us = clock_mono_us() + wait_us;
    enum err e;
    pthread_mutex_lock(&k->lock);
    for (;;) {
        e = peers_send(k->peers, peer, head, sizeof *head, bytes != NULL ? bytes : "", head->bytes);
        if (e != ERR_BUSY || clock_mono_us() >= end_us)
            break;
        pump_locked(k, 0);
        sleep_us(200);
    }
    pthread_mutex_unlock(&k->lock);
    return e;
}

static bool message_at(struct tcp_link *k, uint32_t peer, struct wk_link_message *ret_message)
{
    struct peers_message m;
    while (peers_oldest(k->peers, peer, &m) && m.head_bytes != sizeof(struct wk_head))
        peers_drop(k->peers, peer);
    if (!peers_oldest(k->peers, peer, &m))
        return false;
    memcpy(&ret_message->head, m.head, sizeof(struct wk_head));
    /* The length that came decides what may be read. */
    if (ret_message->head.bytes != m.count)
        ret_message->head.magic = 0;
    ret_message->bytes = m.bytes;
    return true;
}

static enum err tcp_receive(void *self, uint32_t peer, struct wk_link_message *ret_message,
                            uint64_t wait_us)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    uint64_t end_us = clock_mono_us() + wait_us;
    bool found;
    pthread_mutex_lock(&k->lock);
    pump_locked(k, 0);
    for (;;) {
        uint64_t now = clock_mono_us();
        found = message_at(k, peer, ret_message);
        if (found || now >= end_us)
            break;
        pump_locked(k, (uint32_t)((end_us - now) / 1000 + 1));
    }
    pthread_mutex_unlock(&k->lock);
    return found ? ERR_OK : ERR_BUSY;
}

static void tcp_release(void *self, uint32_t peer)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    pthread_mutex_lock(&k->lock);
    peers_drop(k->peers, peer);
    pthread_mutex_unlock(&k->lock);
}

static void tcp_publish(void *self, const struct wk_status *own)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    pthread_mutex_lock(&k->lock);
    k->own = *own;
    beat_locked(k);
    pthread_mutex_unlock(&k->lock);
}

static void tcp_peer(void *self, uint32_t peer, struct wk_status *ret_status,
                     uint64_t *ret_heard_us)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    pthread_mutex_lock(&k->lock);
    pump_locked(k, 0);
    *ret_status = k->statuses[peer];
    *ret_heard_us = k->heard_us[peer];
    pthread_mutex_unlock(&k->lock);
}

static void tcp_beat(void *self)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    if (pthread_mutex_trylock(&k->lock) != 0)
        return;
    pump_locked(k, 0);
    pthread_mutex_unlock(&k->lock);
}

static uint64_t tcp_refused(void *self)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    pthread_mutex_lock(&k->lock);
    uint64_t count = peers_stats(k->peers)->refused_keys;
    pthread_mutex_unlock(&k->lock);
    return count;
}

static void tcp_destroy(void *self)
{
    struct tcp_link *k = self;
    CHECK_OBJ(k, TCP_MAGIC);
    peers_destroy(&k->peers);
    pthread_mutex_destroy(&k->lock);
    k->magic = 0;
    mem_give(k);
}

static const struct wk_link_ops tcp_ops = {
    .name = "tcp",
    .send = tcp_send,
    .receive = tcp_receive,
    .release = tcp_release,
    .publish = tcp_publish,
    .peer = tcp_peer,
    .beat = tcp_beat,
    .refused = tcp_refused,
    .destroy = tcp_destroy,
};

enum err wk_link_tcp(const struct peers_options *options, struct wk_link *ret_link,
                     struct err_detail *detail)
{
    struct peers *peers = NULL;
    CHECK(options->message_bytes_max >= 64 && options->message_bytes_max % 64 == 0);
    TRY(peers_create(options, &peers, detail));
    struct tcp_link *k = mem_take(sizeof *k);
    k->magic = TCP_MAGIC;
    k->rank = options->rank;
    k->ranks = options->ranks;
    k->peers = peers;
    CHECK(pthread_mutex_init(&k->lock, NULL) == 0);
    *ret_link =
        (struct wk_link){&tcp_ops, k, options->rank, options->ranks, options->message_bytes_max};
    return ERR_OK;
}
