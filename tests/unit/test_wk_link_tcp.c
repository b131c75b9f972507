/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives over the tcp link: sums, keys, a peer that dies, stops, comes back or never was. */
#include "tests/unit/fabric_world.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <zmq.h>

#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/net/peers.h"
#include "worker/wk_link_tcp.h"

#define COUNT 3000u

struct net {
    uint32_t ranks, message_bytes_max, deadline_ms, silence_ms;
    char addresses[WK_RANKS_MAX][48];
    const char *key_public[WK_RANKS_MAX], *key_secret[WK_RANKS_MAX];
    const struct wk_fault_options *faults[WK_RANKS_MAX];
    void (*body)(struct net *n, struct wk_fabric *f, uint32_t rank);
    bool garbage;
    char via[48]; /* where rank 1 sees rank 0; "" = where it is */
    atomic_uint done;
    uint32_t ended[WK_RANKS_MAX];
    char said[WK_RANKS_MAX][512];
};

/* Ports that were free a moment ago. */
static void net_init(struct net *n, uint32_t ranks)
{
    int fds[WK_RANKS_MAX];
    memset(n, 0, sizeof *n);
    n->ranks = ranks;
    n->message_bytes_max = 4096;
    n->deadline_ms = 8000;
    n->silence_ms = 3000;
    for (uint32_t r = 0; r < ranks; r++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t bytes = sizeof a;
        fds[r] = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(bind(fds[r], (struct sockaddr *)&a, sizeof a), 0);
        assert_int_equal(getsockname(fds[r], (struct sockaddr *)&a, &bytes), 0);
        snprintf(n->addresses[r], sizeof n->addresses[r], "tcp://127.0.0.1:%u", ntohs(a.sin_port));
    }
    for (uint32_t r = 0; r < ranks; r++)
        close(fds[r]);
}

static struct wk_fabric *net_fabric(const struct net *n, uint32_t rank)
{
    struct peers_options o = {.rank = rank,
                              .ranks = n->ranks,
                              .key_public = n->key_public[rank],
                              .key_secret = n->key_secret[rank],
                              .message_bytes_max = n->message_bytes_max,
                              .silence_ms = n->silence_ms};
    struct err_detail detail = {{0}};
    struct wk_link link;
    for (uint32_t r = 0; r < n->ranks; r++)
        o.addresses[r] = n->addresses[r];
    if (rank == 1 && n->via[0] != '\0')
        o.addresses[0] = n->via;
    enum err e = ERR_IO;
    for (int i = 0; i < 50 && e != ERR_OK; i++) { /* a killed listener's port may linger */
        e = wk_link_tcp(&o, &link, &detail);
        if (e != ERR_OK)
            usleep(100000);
    }
    if (e != ERR_OK) {
        fprintf(stderr, "%s\n", detail.text);
        abort();
    }
    if (n->faults[rank] != NULL)
        link = wk_link_fault(&link, n->faults[rank]);
    struct wk_fabric_options f = {
        .deadline_ms = n->deadline_ms, .silence_ms = n->silence_ms, .link = link};
    return wk_fabric_create(&f);
}

struct net_rank {
    struct net *net;
    uint32_t rank;
    pthread_t thread;
};

static void *net_main(void *arg)
{
    struct net_rank *r = arg;
    struct wk_fabric *f = net_fabric(r->net, r->rank);
    r->net->body(r->net, f, r->rank);
    atomic_fetch_add(&r->net->done, 1); /* who leaves ends the group for one that still looks */
    while (atomic_load(&r->net->done) < r->net->ranks)
        usleep(1000);
    wk_fabric_destroy(&f);
    return NULL;
}

static void net_run(struct net *n, void (*body)(struct net *, struct wk_fabric *, uint32_t))
{
    struct net_rank ranks[WK_RANKS_MAX];
    n->body = body;
    atomic_store(&n->done, 0);
    for (uint32_t r = 0; r < n->ranks; r++) {
        ranks[r] = (struct net_rank){.net = n, .rank = r};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, net_main, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < n->ranks; r++)
        pthread_join(ranks[r].thread, NULL);
}

/* rank r's values are (r + 1) * i; every sum is exact. */
static enum err rounds(struct wk_fabric *f, uint32_t ranks, uint32_t count)
{
    float values[COUNT];
    float factor = (float)(ranks * (ranks + 1) / 2);
    for (uint32_t round = 0; round < count; round++) {
        wk_fabric_step(f, round);
        for (uint32_t i = 0; i < COUNT; i++)
            values[i] = (float)((wk_fabric_rank(f) + 1) * i);
        TRY(wk_all_reduce(f, values, COUNT));
        for (uint32_t i = 0; i < COUNT; i++)
            MUST(values[i] == factor * (float)i);
        uint32_t own = wk_fabric_rank(f) * 7 + round, all[WK_RANKS_MAX];
        TRY(wk_all_gather(f, &own, sizeof own, all));
        for (uint32_t r = 0; r < ranks; r++)
            MUST(all[r] == r * 7 + round);
    }
    return wk_barrier(f);
}

static void body_rounds(struct net *n, struct wk_fabric *f, uint32_t rank)
{
    must_join(f, 20000);
    MUST(rounds(f, n->ranks, 20) == ERR_OK);
    n->ended[rank] = 1;
}

static void test_rounds(void **state)
{
    (void)state;
    for (uint32_t ranks = 2; ranks <= 4; ranks += 2) {
        struct net n;
        net_init(&n, ranks);
        net_run(&n, body_rounds);
        for (uint32_t r = 0; r < ranks; r++)
            assert_int_equal(n.ended[r], 1);
    }
}

/* One rank computes for longer than the silence while the others wait inside a collective. */
static void body_late(struct net *n, struct wk_fabric *f, uint32_t rank)
{
    must_join(f, 20000);
    if (rank == 1)
        usleep(n->silence_ms * 2000);
    MUST(rounds(f, n->ranks, 3) == ERR_OK);
    if (rank == 0)
        usleep(n->silence_ms * 2000);
    MUST(rounds(f, n->ranks, 3) == ERR_OK);
    n->ended[rank] = 1;
}

static void test_late_is_not_dead(void **state)
{
    (void)state;
    struct net n;
    net_init(&n, 2);
    n.silence_ms = 600;
    net_run(&n, body_late);
    assert_int_equal(n.ended[0] + n.ended[1], 2);
}

/* The longest that a rank tells: all of it is on its way before the other one listens. */
static void body_long_tale(struct net *n, struct wk_fabric *f, uint32_t rank)
{
    const size_t bytes = (size_t)16 << 20;
    uint8_t *tale = mem_take(bytes);
    size_t count = 0;
    must_join(f, 20000);
    for (uint32_t turn = 0; turn < 2; turn++) {
        for (size_t i = 0; rank == 0 && i < bytes; i++)
            tale[i] = (uint8_t)(i * 31 + (i >> 16) + turn);
        if (rank == 0) {
            MUST(wk_tell(f, tale, bytes) == ERR_OK);
        } else {
            usleep(500000);
            MUST(wk_hear(f, tale, bytes, &count, 20000) == ERR_OK && count == bytes);
            for (size_t i = 0; i < bytes; i++)
                MUST(tale[i] == (uint8_t)(i * 31 + (i >> 16) + turn));
        }
        MUST(rounds(f, n->ranks, 2) == ERR_OK);
    }
    n->ended[rank] = 1;
    mem_give(tale);
}

static void test_a_long_tale_arrives_whole(void **state)
{
    (void)state;
    struct net n;
    net_init(&n, 2);
    n.message_bytes_max = 65536;
    net_run(&n, body_long_tale);
    assert_int_equal(n.ended[0] + n.ended[1], 2);
}

static void body_keys_differ(struct net *n, struct wk_fabric *f, uint32_t rank)
{
    struct err_detail detail;
    n->ended[rank] = (uint32_t)wk_fabric_join(f, 3000, &detail);
    snprintf(n->said[rank], sizeof n->said[rank], "%s", detail.text);
}

static void test_keys(void **state)
{
    (void)state;
    char pub[2][41], sec[2][41];
    struct net n;
    if (!zmq_has("curve"))
        skip();
    for (int i = 0; i < 2; i++)
        assert_int_equal(zmq_curve_keypair(pub[i], sec[i]), 0);
    net_init(&n, 2);
    for (uint32_t r = 0; r < 2; r++) {
        n.key_public[r] = pub[0];
        n.key_secret[r] = sec[0];
    }
    net_run(&n, body_rounds);
    assert_int_equal(n.ended[0] + n.ended[1], 2);
    /* Another key pair; none at all; only the other has one. */
    for (int i = 0; i < 3; i++) {
        net_init(&n, 2);
        n.key_public[0] = i < 2 ? pub[0] : NULL;
        n.key_secret[0] = i < 2 ? sec[0] : NULL;
        n.key_public[1] = i != 1 ? pub[1] : NULL;
        n.key_secret[1] = i != 1 ? sec[1] : NULL;
        net_run(&n, body_keys_differ);
        assert_int_equal(n.ended[0], ERR_TIMEOUT);
        assert_int_equal(n.ended[1], ERR_TIMEOUT);
        /* Without keys on one side it is a race who sees it first and hangs up. */
        if (strstr(n.said[0], "were turned away: other keys") == NULL &&
            (i == 0 || strstr(n.said[1], "were turned away: other keys") == NULL))
            fail_msg("%s, %s", n.said[0], n.said[1]);
    }
}

/* The right public key alone is not enough: the client must own it. */
static void test_pinned_key(void **state)
{
    (void)state;
    char pub[2][41], sec[2][41];
    struct net n;
    struct err_detail detail;
    struct peers *p = NULL;
    if (!zmq_has("curve"))
        skip();
    for (int i = 0; i < 2; i++)
        assert_int_equal(zmq_curve_keypair(pub[i], sec[i]), 0);
    net_init(&n, 2);
    struct peers_options o = {.rank = 0,
                              .ranks = 2,
                              .addresses = {n.addresses[0], n.addresses[1]},
                              .key_public = pub[0],
                              .key_secret = sec[0],
                              .message_bytes_max = 64};
    assert_int_equal(peers_create(&o, &p, &detail), ERR_OK);
    void *context = zmq_ctx_new(), *client = zmq_socket(context, ZMQ_DEALER);
    assert_int_equal(zmq_setsockopt(client, ZMQ_CURVE_SERVERKEY, pub[0], 41), 0);
    assert_int_equal(zmq_setsockopt(client, ZMQ_CURVE_PUBLICKEY, pub[1], 41), 0);
    assert_int_equal(zmq_setsockopt(client, ZMQ_CURVE_SECRETKEY, sec[1], 41), 0);
    int zero = 0;
    zmq_setsockopt(client, ZMQ_LINGER, &zero, sizeof zero);
    assert_int_equal(zmq_setsockopt(client, ZMQ_ROUTING_ID, "rank-1", 6), 0);
    assert_int_equal(zmq_connect(client, n.addresses[0]), 0);
    assert_int_equal(zmq_send(client, "a", 1, ZMQ_SNDMORE), 1);
    assert_int_equal(zmq_send(client, "b", 1, 0), 1);
    for (int i = 0; i < 100 && peers_stats(p)->refused_keys == 0; i++)
        peers_pump(p, 20);
    assert_true(peers_stats(p)->refused_keys > 0);
    assert_int_equal(peers_stats(p)->received, 0);
    zmq_close(client);
    zmq_ctx_term(context);
    peers_destroy(&p);
}

/* What does not look like a rank's message is counted and dropped. */
static void test_strangers(void **state)
{
    (void)state;
    static const char *const ids[] = {"rank-1", "rank-0", "rank-9", "rank-11", "x"};
    struct net n;
    struct err_detail detail;
    struct peers *p = NULL;
    net_init(&n, 2);
    struct peers_options o = {.rank = 0,
                              .ranks = 2,
                              .addresses = {n.addresses[0], n.addresses[1]},
                              .message_bytes_max = 64};
    assert_int_equal(peers_create(&o, &p, &detail), ERR_OK);
    void *context = zmq_ctx_new();
    int zero = 0;
    char big[65] = {0};
    for (size_t i = 0; i < ARRAY_COUNT(ids); i++) {
        void *client = zmq_socket(context, ZMQ_DEALER);
        zmq_setsockopt(client, ZMQ_LINGER, &zero, sizeof zero);
        assert_int_equal(zmq_setsockopt(client, ZMQ_ROUTING_ID, ids[i], strlen(ids[i])), 0);
        assert_int_equal(zmq_connect(client, n.addresses[0]), 0);
        for (int frames = 1; frames <= 4; frames++)
            for (int f = 0; f < frames; f++)
                zmq_send(client, big, f == 1 ? sizeof big : 8, f + 1 < frames ? ZMQ_SNDMORE : 0);
        for (int turn = 0; turn < 10; turn++)
            peers_pump(p, 10);
        zmq_close(client);
    }
    /* Of the first stranger the note is within the bounds; nothing else ever is. */
    struct peers_message m;
    assert_false(peers_oldest(p, 1, &m));
    assert_int_equal(peers_stats(p)->received, 0);
    assert_true(peers_stats(p)->dropped_bounds >= 3);
    zmq_ctx_term(context);
    peers_destroy(&p);
}

/* What the link knows of rank 1 after rank 1 said this. */
static struct wk_status told(struct wk_link *link, struct peers *other,
                             const struct wk_status *status)
{
    struct wk_status known;
    uint64_t heard_us;
    for (int turn = 0; turn < 60; turn++) {
        while (peers_send(other, 0, status, sizeof *status, NULL, 0) != ERR_OK)
            peers_pump(other, 5);
        peers_pump(other, 1);
        link->ops->peer(link->self, 1, &known, &heard_us);
        if (memcmp(&known, status, sizeof known) == 0)
            break;
        usleep(2000);
    }
    return known;
}

/* What may pass by itself is told from what will not: the supervisor tries the first again. */
static void test_addresses_not_there(void **state)
{
    (void)state;
    struct net n;
    struct err_detail detail;
    struct peers *first = NULL, *other = NULL;
    net_init(&n, 2);
    struct peers_options o = {
        .ranks = 2, .addresses = {n.addresses[0], n.addresses[1]}, .message_bytes_max = 64};
    assert_int_equal(peers_create(&o, &first, &detail), ERR_OK);
    assert_int_equal(peers_create(&o, &other, &detail), ERR_BUSY); /* taken */
    assert_non_null(strstr(detail.text, n.addresses[0]));
    o.addresses[0] = "tcp://192.0.2.1:7000"; /* of no interface: RFC 5737 */
    assert_int_equal(peers_create(&o, &other, &detail), ERR_BUSY);
    o.addresses[0] = "tcp://127.0.0.1";
    assert_int_equal(peers_create(&o, &other, &detail), ERR_IO);
    peers_destroy(&first);
}

/* A status that was damaged on its way changes nothing, whichever bit it was; nor does one with an
 * epoch that nobody reaches, after which the next would wrap. */
static void test_damaged_statuses(void **state)
{
    (void)state;
    struct net n;
    struct err_detail detail;
    struct peers *other = NULL;
    struct wk_link link;
    net_init(&n, 2);
    struct peers_options o = {
        .ranks = 2, .addresses = {n.addresses[0], n.addresses[1]}, .message_bytes_max = 64};
    assert_int_equal(wk_link_tcp(&o, &link, &detail), ERR_OK);
    o.rank = 1;
    assert_int_equal(peers_create(&o, &other, &detail), ERR_OK);
    struct wk_status good = {.incarnation = 77, .epoch = 5, .joined = 1, .members = {1, 77}};
    good.sum = wk_status_sum(&good);
    struct wk_status known = told(&link, other, &good);
    assert_memory_equal(&known, &good, sizeof known);
    for (size_t bit = 0; bit < 8 * sizeof good; bit += 37) {
        struct wk_status bad = good;
        ((uint8_t *)&bad)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        while (peers_send(other, 0, &bad, sizeof bad, NULL, 0) != ERR_OK)
            peers_pump(other, 5);
        peers_pump(other, 1);
        usleep(500);
        uint64_t heard_us;
        link.ops->peer(link.self, 1, &known, &heard_us);
        assert_memory_equal(&known, &good, sizeof known);
    }
    struct wk_status far = good;
    far.epoch = UINT32_MAX;
    far.sum = wk_status_sum(&far);
    known = told(&link, other, &far);
    assert_memory_equal(&known, &good, sizeof known);
    good.epoch = 6;
    good.sum = wk_status_sum(&good);
    known = told(&link, other, &good);
    assert_memory_equal(&known, &good, sizeof known);
    peers_destroy(&other);
    wk_link_destroy(&link);
}

/* ---- a way that swallows what it is given ---- */

#define WAYS 32u

struct way {
    int fds[2];
    bool swallows;
};

struct relay {
    int listener;
    struct sockaddr_in to;
    atomic_bool garbage; /* once, to rank 1 */
    atomic_bool dead;    /* from here on the first connection swallows, and the next one too */
    atomic_bool stop;
    atomic_uint count;
    struct way ways[WAYS];
    pthread_t thread;
};

static void way_pass(struct way *w, int from)
{
    uint8_t bytes[65536];
    ssize_t n = recv(w->fds[from], bytes, sizeof bytes, 0);
    if (n <= 0) {
        shutdown(w->fds[!from], SHUT_RDWR);
        shutdown(w->fds[from], SHUT_RDWR);
        w->swallows = true;
        return;
    }
    for (ssize_t at = 0, k = 0; at < n && k >= 0; at += k)
        k = send(w->fds[!from], bytes + at, (size_t)(n - at), MSG_NOSIGNAL);
}

static void *relay_main(void *arg)
{
    struct relay *y = arg;
    while (!atomic_load(&y->stop)) {
        if (atomic_exchange(&y->garbage, false)) {
            uint8_t bytes[64];
            memset(bytes, 0xff, sizeof bytes);
            MUST(send(y->ways[0].fds[0], bytes, sizeof bytes, MSG_NOSIGNAL) == sizeof bytes);
        }
        struct pollfd p[1 + 2 * WAYS] = {{y->listener, POLLIN, 0}};
        uint32_t count = atomic_load(&y->count);
        for (uint32_t i = 0; i < 2 * count; i++) {
            struct way *w = &y->ways[i / 2];
            bool swallows = w->swallows || (i < 4 && atomic_load(&y->dead));
            p[1 + i] = (struct pollfd){swallows ? -1 : w->fds[i % 2], POLLIN, 0};
        }
        if (poll(p, 1 + 2 * count, 20) <= 0)
            continue;
        for (uint32_t i = 0; i < 2 * count; i++)
            if (p[1 + i].revents != 0)
                way_pass(&y->ways[i / 2], (int)(i % 2));
        if ((p[0].revents & POLLIN) == 0 || count == WAYS)
            continue;
        struct way *w = &y->ways[count];
        w->fds[0] = accept(y->listener, NULL, NULL);
        w->fds[1] = socket(AF_INET, SOCK_STREAM, 0);
        MUST(w->fds[0] >= 0 && w->fds[1] >= 0);
        if (connect(w->fds[1], (struct sockaddr *)&y->to, sizeof y->to) != 0) {
            close(w->fds[0]);
            close(w->fds[1]);
            continue;
        }
        atomic_store(&y->count, count + 1);
    }
    return NULL;
}

static void relay_open(struct relay *y, struct net *n)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof a;
    memset(y, 0, sizeof *y);
    y->to = a;
    y->to.sin_port = htons((uint16_t)atoi(strrchr(n->addresses[0], ':') + 1));
    y->listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(y->listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(y->listener, (struct sockaddr *)&a, &bytes), 0);
    assert_int_equal(listen(y->listener, 8), 0);
    snprintf(n->via, sizeof n->via, "tcp://127.0.0.1:%u", ntohs(a.sin_port));
    assert_int_equal(pthread_create(&y->thread, NULL, relay_main, y), 0);
}

static void relay_close(struct relay *y)
{
    atomic_store(&y->stop, true);
    pthread_join(y->thread, NULL);
    for (uint32_t i = 0; i < y->count; i++) {
        close(y->ways[i].fds[0]);
        close(y->ways[i].fds[1]);
    }
    close(y->listener);
}

static struct relay relay;

static void body_swallowed(struct net *n, struct wk_fabric *f, uint32_t rank)
{
    must_join(f, 20000);
    MUST(rounds(f, 2, 3) == ERR_OK);
    if (rank == 0)
        atomic_store(n->garbage ? &relay.garbage : &relay.dead, true);
    while (rounds(f, 2, 1) == ERR_OK)
        continue;
    uint64_t begun = clock_mono_us();
    must_join(f, 20000);
    n->ended[rank] = (uint32_t)((clock_mono_us() - begun) / 1000);
    MUST(rounds(f, 2, 3) == ERR_OK);
}

/* A connection that stays open and brings nothing more is given up, and so is one that is taken in
 * without a word: the third one serves. */
static void test_dead_connections_are_replaced(void **state)
{
    (void)state;
    struct net n;
    net_init(&n, 2);
    n.silence_ms = 1000;
    relay_open(&relay, &n);
    net_run(&n, body_swallowed);
    assert_true(atomic_load(&relay.count) >= 3);
    relay_close(&relay);
    for (uint32_t r = 0; r < 2; r++)
        assert_true(n.ended[r] < 12000);
}

/* Bytes that are no ZeroMQ end a connection for good where they arrive, if nobody makes it anew. */
static void test_garbage_ends_nothing(void **state)
{
    (void)state;
    struct net n;
    net_init(&n, 2);
    n.silence_ms = 1000;
    n.garbage = true;
    relay_open(&relay, &n);
    net_run(&n, body_swallowed);
    relay_close(&relay);
    for (uint32_t r = 0; r < 2; r++)
        assert_true(n.ended[r] < 12000);
}

/* ---- processes ---- */

static pid_t other_fork(const struct net *n, int *ret_go)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) {
        close(fds[0]);
        *ret_go = fds[1];
        return pid;
    }
    close(fds[1]);
    char byte;
    if (read(fds[0], &byte, 1) != 1)
        _exit(0);
    struct wk_fabric *f = net_fabric(n, 1);
    for (;;) {
        must_join(f, 30000);
        while (rounds(f, 2, 5) == ERR_OK)
            continue;
    }
}

static uint64_t until_fault(struct wk_fabric *f)
{
    uint64_t begun = clock_mono_us();
    while (rounds(f, 2, 5) == ERR_OK)
        assert_true(clock_mono_us() - begun < 10000000);
    return clock_mono_us() - begun;
}

static void test_kill_and_stop(void **state)
{
    (void)state;
    struct net n;
    struct err_detail detail;
    int go[2];
    net_init(&n, 2);
    n.silence_ms = 1000;
    pid_t first = other_fork(&n, &go[0]), second = other_fork(&n, &go[1]);
    assert_int_equal(write(go[0], "g", 1), 1);
    struct wk_fabric *f = net_fabric(&n, 0);
    must_join(f, 30000);
    assert_int_equal(rounds(f, 2, 5), ERR_OK);

    kill(first, SIGSTOP);
    assert_true(until_fault(f) < 3000000);
    assert_int_equal(wk_fabric_fault(f, &detail), ERR_CLOSED);
    assert_non_null(strstr(detail.text, "silent"));
    kill(first, SIGCONT);
    must_join(f, 30000);
    assert_int_equal(rounds(f, 2, 5), ERR_OK);

    kill(first, SIGKILL);
    assert_true(until_fault(f) < 3000000);
    assert_int_equal(waitpid(first, NULL, 0), first);
    uint32_t epoch = wk_fabric_epoch(f);
    assert_int_equal(write(go[1], "g", 1), 1);
    must_join(f, 30000);
    assert_true(wk_fabric_epoch(f) >= epoch);
    assert_int_equal(rounds(f, 2, 5), ERR_OK);
    wk_fabric_destroy(&f);
    kill(second, SIGKILL);
    waitpid(second, NULL, 0);
    close(go[0]);
    close(go[1]);
}

/* Seeded faults below the collectives: whatever comes back is right. */
static void body_chance(struct net *n, struct wk_fabric *f, uint32_t rank)
{
    uint32_t good = 0, own, all[WK_RANKS_MAX];
    must_join(f, 30000);
    while (good < 12) {
        enum err e = rounds(f, n->ranks, 5);
        own = e == ERR_OK;
        if (e == ERR_OK && wk_all_gather(f, &own, sizeof own, all) == ERR_OK) {
            good++;
            continue;
        }
        /* The others may be a round ahead or behind: the count starts over for all. */
        good = 0;
        must_join(f, 30000);
    }
    n->ended[rank] = (uint32_t)wk_fabric_stats(f)->joins;
}

static void test_chance(void **state)
{
    (void)state;
    struct net n;
    struct wk_fault_options faults = {.seed = 4, .chance_value_max = 3000};
    net_init(&n, 2);
    n.deadline_ms = 400;
    faults.rule_count = 3;
    faults.rules[0] = (struct wk_fault_rule){15, WK_FAULT_DROP, 0};
    faults.rules[1] = (struct wk_fault_rule){40, WK_FAULT_CORRUPT, 400};
    faults.rules[2] = (struct wk_fault_rule){60, WK_FAULT_STALL, 700000};
    faults.permille[WK_FAULT_DELAY] = 10;
    faults.permille[WK_FAULT_DUPLICATE] = 10;
    n.faults[1] = &faults;
    net_run(&n, body_chance);
    assert_true(n.ended[0] >= 4 && n.ended[1] >= 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounds),
        cmocka_unit_test(test_late_is_not_dead),
        cmocka_unit_test(test_a_long_tale_arrives_whole),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_pinned_key),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_kill_and_stop),
        cmocka_unit_test(test_chance),
        cmocka_unit_test(test_addresses_not_there),
        cmocka_unit_test(test_damaged_statuses),
        cmocka_unit_test(test_garbage_ends_nothing),
        cmocka_unit_test(test_dead_connections_are_replaced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
