/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include "lib/base/clock.h"
#include "lib/base/rng.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"

#define GIVE_UP_US 20000000u

/* A loop with one bound socket and, mostly, one connected one. */
struct rig {
    char dir[64], path[96], endpoint[128];
    struct loop *loop;
    struct loop_timer *limit, *tick;
    struct bus *bus;
    struct bus_socket *server, *client;
    uint32_t server_got, client_got, want;
    bool echo;
    struct bus_peer last_peer;
    size_t last_bytes[BUS_FRAMES_MAX];
    uint32_t last_frames;
    unsigned char last_first;
    bool gave_up;
};

static void rig_check(struct rig *r)
{
    if (r->server_got + r->client_got >= r->want)
        loop_stop(r->loop);
}

static void on_server(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                      uint32_t frame_count)
{
    struct rig *r = arg;
    assert_non_null(peer);
    assert_true(frame_count >= 1 && frame_count <= BUS_FRAMES_MAX);
    r->server_got++;
    r->last_peer = *peer;
    r->last_frames = frame_count;
    for (uint32_t i = 0; i < frame_count; i++)
        r->last_bytes[i] = frames[i].count;
    r->last_first = frames[0].count > 0 ? *(const unsigned char *)frames[0].bytes : 0;
    if (r->echo)
        assert_int_equal(bus_send(r->server, peer, frames, frame_count), ERR_OK);
    rig_check(r);
}

static void on_client(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                      uint32_t frame_count)
{
    struct rig *r = arg;
    assert_null(peer);
    r->client_got++;
    rig_check(r);
}

static void on_limit(void *arg)
{
    struct rig *r = arg;
    r->gave_up = true;
    loop_stop(r->loop);
}

static void rig_open(struct rig *r, uint32_t queue_max)
{
    memset(r, 0, sizeof(*r));
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-bus-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->path, sizeof(r->path), "%s/bus.sock", r->dir);
    snprintf(r->endpoint, sizeof(r->endpoint), "ipc://%s", r->path);
    r->loop = loop_create();
    r->limit = loop_timer_create(r->loop, on_limit, r);
    loop_timer_start(r->limit, GIVE_UP_US, false);
    r->bus = bus_create(r->loop);
    assert_int_equal(bus_bind(r->bus, r->endpoint, queue_max, on_server, r, &r->server, NULL),
                     ERR_OK);
}

static void rig_connect(struct rig *r, uint32_t queue_max)
{
    assert_int_equal(
        bus_connect(r->bus, r->endpoint, "worker-0", queue_max, on_client, r, &r->client, NULL),
        ERR_OK);
}

static void rig_close(struct rig *r)
{
    bus_socket_destroy(&r->client);
    bus_socket_destroy(&r->server);
    loop_timer_destroy(&r->tick);
    loop_timer_destroy(&r->limit);
    bus_destroy(&r->bus);
    loop_destroy(&r->loop);
    unlink(r->path);
    rmdir(r->dir);
}

static void rig_run(struct rig *r, uint32_t want)
{
    r->want = want;
    loop_run(r->loop);
    assert_false(r->gave_up);
}

static void on_tick(void *arg)
{
    struct rig *r = arg;
    loop_stop(r->loop);
}

static void rig_run_for(struct rig *r, uint64_t us)
{
    r->want = UINT32_MAX;
    if (r->tick == NULL)
        r->tick = loop_timer_create(r->loop, on_tick, r);
    loop_timer_start(r->tick, us, false);
    loop_run(r->loop);
    assert_false(r->gave_up);
}

static void echo_with_frames_of_all_sizes(void **state)
{
    struct rig r;
    rig_open(&r, 1000);
    rig_connect(&r, 1000);
    r.echo = true;
    size_t big = (8u << 20) + 64;
    char *bytes = calloc(1, big);
    assert_non_null(bytes);
    struct bus_frame frames[BUS_FRAMES_MAX] = {{bytes, 32}, {bytes, 0}, {bytes, big}, {bytes, 1}};
    assert_int_equal(bus_send(r.client, NULL, frames, 4), ERR_OK);
    rig_run(&r, 2);
    assert_int_equal(r.last_frames, 4);
    assert_int_equal(r.last_bytes[0], 32);
    assert_int_equal(r.last_bytes[1], 0);
    assert_int_equal(r.last_bytes[2], big);
    assert_int_equal(r.last_peer.count, 8);
    assert_memory_equal(r.last_peer.bytes, "worker-0", 8);
    for (uint32_t i = 0; i < BUS_FRAMES_MAX; i++)
        frames[i] = (struct bus_frame){bytes, i};
    assert_int_equal(bus_send(r.client, NULL, frames, BUS_FRAMES_MAX), ERR_OK);
    rig_run(&r, 4);
    assert_int_equal(r.last_frames, BUS_FRAMES_MAX);
    free(bytes);
    rig_close(&r);
}

static void socket_file_is_private_and_replaced(void **state)
{
    struct rig r;
    rig_open(&r, 10);
    struct stat st;
    assert_int_equal(stat(r.path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    bus_socket_destroy(&r.server);
    bus_destroy(&r.bus);

    /* A socket file left by a killed process. */
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, r.path, strlen(r.path) + 1);
    unlink(r.path);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    close(fd);
    r.bus = bus_create(r.loop);
    assert_int_equal(bus_bind(r.bus, r.endpoint, 10, on_server, &r, &r.server, NULL), ERR_OK);
    bus_socket_destroy(&r.server);
    bus_destroy(&r.bus);

    /* Any other file is not ours to remove. */
    r.bus = bus_create(r.loop);
    unlink(r.path);
    fd = open(r.path, O_CREAT | O_WRONLY, 0600);
    close(fd);
    struct err_detail detail;
    assert_int_equal(bus_bind(r.bus, r.endpoint, 10, on_server, &r, &r.server, &detail),
                     ERR_INVALID);
    assert_non_null(strstr(detail.text, "no socket"));
    rig_close(&r);
}

static void refusals(void **state)
{
    struct rig r;
    rig_open(&r, 10);
    struct bus_socket *s = NULL;
    struct err_detail d;
    assert_int_equal(bus_connect(r.bus, "inproc://x", "a", 1, on_client, &r, &s, &d), ERR_INVALID);
    assert_int_equal(bus_connect(r.bus, r.endpoint, "", 1, on_client, &r, &s, &d), ERR_INVALID);
    assert_int_equal(bus_connect(r.bus, r.endpoint, "123456789012345678901234567890123", 1,
                                 on_client, &r, &s, &d),
                     ERR_INVALID);
    assert_int_equal(bus_bind(r.bus, "ipc:///nonexistent/folder/x.sock", 1, on_server, &r, &s, &d),
                     ERR_IO);
    assert_int_equal(bus_bind(r.bus, "tcp://127.0.0.1:notaport", 1, on_server, &r, &s, &d), ERR_IO);
    assert_null(s);
    struct bus_frame frame = {"x", 1};
    struct bus_peer nobody = {.count = 3, .bytes = "abc"};
    assert_int_equal(bus_send(r.server, &nobody, &frame, 1), ERR_NOT_FOUND);
    assert_int_equal(bus_stats(r.server)->dropped_no_peer, 1);
    rig_close(&r);
}

/* A burst far longer than one drain, with sends in between: nothing may be left lying. */
static void bursts_are_drained(void **state)
{
    struct rig r;
    rig_open(&r, 20000);
    rig_connect(&r, 20000);
    r.echo = true;
    uint32_t total = 0;
    struct rng rng;
    rng_init(&rng, 7);
    char bytes[200] = {0};
    for (int round = 0; round < 20; round++) {
        uint32_t count = 1 + rng_below(&rng, 2000);
        for (uint32_t i = 0; i < count; i++) {
            struct bus_frame f[2] = {{bytes, 32}, {bytes, rng_below(&rng, sizeof(bytes))}};
            assert_int_equal(bus_send(r.client, NULL, f, 2), ERR_OK);
        }
        total += 2 * count;
        rig_run(&r, total);
        assert_int_equal(r.server_got + r.client_got, total);
    }
    assert_int_equal(bus_stats(r.server)->received, total / 2);
    assert_int_equal(bus_stats(r.server)->sent, total / 2);
    rig_close(&r);
}

/* A peer that does not read: sending answers ERR_BUSY at once and never blocks. */
static void full_queue_is_an_answer(void **state)
{
    struct rig r;
    rig_open(&r, 4);
    rig_connect(&r, 4);
    struct bus_frame f = {"hello", 5};
    assert_int_equal(bus_send(r.client, NULL, &f, 1), ERR_OK);
    rig_run(&r, 1);
    size_t bytes = 1u << 20;
    char *big = calloc(1, bytes);
    struct bus_frame frames[3] = {{big, 32}, {big, bytes}, {big, bytes}};
    uint64_t start_us = clock_mono_us();
    int busy = 0;
    /* The loop does not run, so the client takes nothing. */
    for (int i = 0; i < 200; i++) {
        enum err e = bus_send(r.server, &r.last_peer, frames, 3);
        assert_true(e == ERR_OK || e == ERR_BUSY);
        busy += e == ERR_BUSY;
    }
    assert_true(busy > 100);
    assert_true(clock_mono_us() - start_us < 5000000);
    assert_int_equal(bus_stats(r.server)->dropped_busy, busy);
    /* What was accepted arrives whole. */
    uint32_t sent = (uint32_t)bus_stats(r.server)->sent;
    rig_run(&r, 1 + sent);
    assert_int_equal(bus_stats(r.client)->received, sent);
    free(big);
    rig_close(&r);
}

static void raw_send(void *zmq, int count, size_t bytes)
{
    static char zero[64];
    char *big = bytes > sizeof(zero) ? calloc(1, bytes) : NULL;
    for (int i = 0; i < count; i++) {
        int flags = i + 1 < count ? ZMQ_SNDMORE : 0;
        assert_int_equal(zmq_send(zmq, big != NULL ? big : zero, bytes, flags), bytes);
    }
    free(big);
}

static void bounds_drop_whole_messages(void **state)
{
    struct rig r;
    rig_open(&r, 1000);
    void *context = zmq_ctx_new();
    void *raw = zmq_socket(context, ZMQ_DEALER), *longid = zmq_socket(context, ZMQ_DEALER);
    char id[64];
    memset(id, 'x', sizeof(id));
    int linger = 0;
    zmq_setsockopt(longid, ZMQ_ROUTING_ID, id, 33);
    zmq_setsockopt(longid, ZMQ_LINGER, &linger, sizeof(linger));
    zmq_setsockopt(raw, ZMQ_LINGER, &linger, sizeof(linger));
    assert_int_equal(zmq_connect(raw, r.endpoint), 0);
    assert_int_equal(zmq_connect(longid, r.endpoint), 0);
    raw_send(raw, BUS_FRAMES_MAX + 1, 10);
    raw_send(raw, 500, 3);
    raw_send(raw, 2, (8u << 20) + 65);
    raw_send(raw, 1, 0);               /* legal: one empty frame */
    raw_send(raw, BUS_FRAMES_MAX, 10); /* legal */
    raw_send(longid, 2, 10);
    rig_run(&r, 2);
    while (bus_stats(r.server)->dropped_bounds < 4)
        rig_run_for(&r, 5000); /* ends by rig_run_for's own limit at the latest */
    rig_run_for(&r, 20000);
    assert_int_equal(bus_stats(r.server)->dropped_bounds, 4);
    assert_int_equal(r.server_got, 2);
    assert_int_equal(r.last_peer.count, 5); /* made by ZeroMQ for a peer without a name */
    zmq_close(raw);
    zmq_close(longid);
    zmq_ctx_term(context);
    rig_close(&r);
}

/* Greetings of every age of the protocol, so that the noise after them reaches all the code. */
static void noise_make(struct rng *rng, unsigned char bytes[512])
{
    for (size_t i = 0; i < 512; i++)
        bytes[i] = (unsigned char)rng_u32(rng);
    unsigned char *at = bytes;
    switch (rng_below(rng, 4)) {
    case 0: /* none */
        break;
    case 1: /* 1.0: a routing id */
        memcpy(at, "\x09\0worker-1", 10);
        at += 10;
        break;
    case 2: /* 2.0 */
        memcpy(at, "\xff\0\0\0\0\0\0\0\x09\x7f\x01\x05", 12);
        at += 12;
        break;
    default: /* 3.0 */
        memset(at, 0, 64);
        memcpy(at, "\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", 16);
        at += 64;
        break;
    }
    if (rng_below(rng, 2) == 0) /* a command frame around the noise */
        memcpy(at, "\x04\x60\x05READY\x08Identity\0\0\0\x08worker-1", 28);
}

/* Bytes that are no ZeroMQ at all, beside a peer that goes on working.  Every rig is closed with
 * some of them still arriving. */
static void garbage_on_the_socket(void **state)
{
    struct rng rng;
    rng_init(&rng, 99);
    for (int rigs = 0; rigs < 6; rigs++) {
        struct rig r;
        rig_open(&r, 1000);
        rig_connect(&r, 1000);
        r.echo = true;
        int fds[20];
        for (int round = 0; round < 20; round++) {
            int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
            struct sockaddr_un a = {.sun_family = AF_UNIX};
            memcpy(a.sun_path, r.path, strlen(r.path) + 1);
            assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
            unsigned char noise[512];
            noise_make(&rng, noise);
            ssize_t put = send(fd, noise, rng_below(&rng, sizeof(noise)) + 1, MSG_NOSIGNAL);
            assert_true(put != 0);
            fds[round] = fd;
            if (round >= 16)
                continue;
            struct bus_frame f = {"ping", 4};
            assert_int_equal(bus_send(r.client, NULL, &f, 1), ERR_OK);
            uint64_t had = bus_stats(r.client)->received;
            while (bus_stats(r.client)->received == had)
                rig_run(&r, r.server_got + r.client_got + 1);
            if (round % 2 == 0) {
                close(fd);
                fds[round] = -1;
            }
        }
        rig_close(&r);
        for (int round = 0; round < 20; round++)
            if (fds[round] >= 0)
                close(fds[round]);
    }
}

static void same_id_takes_over(void **state)
{
    struct rig r;
    rig_open(&r, 1000);
    rig_connect(&r, 1000);
    struct bus_frame f = {"1", 1};
    assert_int_equal(bus_send(r.client, NULL, &f, 1), ERR_OK);
    rig_run(&r, 1);
    struct bus_socket *second = NULL;
    assert_int_equal(bus_connect(r.bus, r.endpoint, "worker-0", 1000, on_client, &r, &second, NULL),
                     ERR_OK);
    assert_int_equal(bus_send(second, NULL, &f, 1), ERR_OK);
    rig_run(&r, 2);
    assert_int_equal(bus_send(r.server, &r.last_peer, &f, 1), ERR_OK);
    rig_run(&r, 3);
    assert_int_equal(bus_stats(second)->received, 1);
    assert_int_equal(bus_stats(r.client)->received, 0);
    bus_socket_destroy(&second);
    rig_close(&r);
}

/* Thousands of beats for a peer that is away: it gets one of them when it comes. */
static void beats_do_not_pile_up(void **state)
{
    struct rig r;
    rig_open(&r, 1000);
    bus_socket_destroy(&r.server);
    rig_connect(&r, 1000);
    struct bus_frame f = {"1", 1};
    for (uint32_t round = 0; round < 2; round++) {
        uint64_t before = bus_stats(r.client)->sent;
        r.server_got = 0;
        rig_run_for(&r, 50000); /* the end of the connection is noticed */
        for (uint32_t i = 0; i < 5000; i++) {
            enum err e = bus_send_beat(r.client, &f, 1);
            assert_int_equal(e, i == 0 ? ERR_OK : ERR_CLOSED);
        }
        assert_int_equal(bus_stats(r.client)->sent, before + 1);
        assert_int_equal(bus_bind(r.bus, r.endpoint, 1000, on_server, &r, &r.server, NULL), ERR_OK);
        rig_run(&r, 1);
        rig_run_for(&r, 50000);
        assert_int_equal(r.server_got, 1);
        for (uint32_t i = 0; i < 100; i++) /* connected: nothing is held back */
            assert_int_equal(bus_send_beat(r.client, &f, 1), ERR_OK);
        rig_run(&r, 101);
        if (round == 0)
            bus_socket_destroy(&r.server);
    }
    assert_int_equal(bus_stats(r.client)->dropped_absent, 2 * 4999);
    rig_close(&r);
}

/* The bound side goes away and comes back: the connected side finds it again by itself. */
static void reconnects_by_itself(void **state)
{
    struct rig r;
    rig_open(&r, 1000);
    rig_connect(&r, 1000);
    r.echo = true;
    struct bus_frame f = {"1", 1};
    assert_int_equal(bus_send(r.client, NULL, &f, 1), ERR_OK);
    rig_run(&r, 2);
    bus_socket_destroy(&r.server);
    rig_run_for(&r, 100000);
    assert_int_equal(bus_bind(r.bus, r.endpoint, 1000, on_server, &r, &r.server, NULL), ERR_OK);
    assert_int_equal(bus_send(r.client, NULL, &f, 1), ERR_OK);
    rig_run(&r, 4);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(echo_with_frames_of_all_sizes),
        cmocka_unit_test(socket_file_is_private_and_replaced),
        cmocka_unit_test(refusals),
        cmocka_unit_test(bursts_are_drained),
        cmocka_unit_test(full_queue_is_an_answer),
        cmocka_unit_test(bounds_drop_whole_messages),
        cmocka_unit_test(garbage_on_the_socket),
        cmocka_unit_test(same_id_takes_over),
        cmocka_unit_test(beats_do_not_pile_up),
        cmocka_unit_test(reconnects_by_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
