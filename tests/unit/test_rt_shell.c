/* SPDX-License-Identifier: Apache-2.0 */
/* The router's shell over real sockets: many streams through it, malformed frames beside them,
 * and memory that stays as it is. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "lib/base/arena.h"
#include "lib/base/hash.h"
#include "lib/base/log.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "proto/wire.h"
#include "router/rt_params.h"
#include "router/rt_shell.h"

#define STREAMS 400u
#define OUTPUT  60u
#define TOTAL   8000u
#define CHUNK   5u

struct stream {
    bool live;
    uint32_t k;
};

struct bench {
    char directory[64];
    struct loop *loop;
    struct bus *bus;
    struct bus_socket *worker, *gateway;
    struct rt_shell *shell;
    struct rt_params params;
    struct arena arena, out;
    struct loop_timer *beat, *emit, *limit;
    struct stream streams[STREAMS]; /* as the gateway sees them */
    uint32_t worker_k[STREAMS];     /* UINT32_MAX = not assigned */
    uint32_t submitted, finished;
    uint32_t malformed_sent;
    bool ready, expired;
    long rss_kb[2]; /* peaks of the first and the second half */
};

static long rss_kb(void)
{
    long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%ld %ld", &pages, &resident), 2);
    fclose(f);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void send(struct bench *b, struct bus_socket *s, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    arena_reset(&b->out);
    assert_int_equal(wire_encode(&b->out, m, frames, &count), ERR_OK);
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    assert_int_equal(bus_send(s, NULL, out, count), ERR_OK);
}

static bool receive(struct bench *b, const struct bus_frame *frames, uint32_t count, struct msg *m)
{
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail;
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&b->arena);
    if (wire_decode(&b->arena, in, count, m, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return true;
}

static uint32_t slot_of(const struct msg_id *id)
{
    uint32_t slot;
    memcpy(&slot, id->bytes, sizeof(slot));
    return slot;
}

static void submit(struct bench *b, uint32_t slot)
{
    struct msg m = {.type = MSG_ROUTER_SUBMIT};
    uint32_t ids[50];
    uint32_t serial = ++b->submitted;
    memcpy(m.id.bytes, &slot, sizeof(slot));
    memcpy(m.id.bytes + 4, &serial, sizeof(serial));
    for (uint32_t i = 0; i < 50; i++)
        ids[i] = i;
    m.u.request.prompt_count = m.u.request.ids_count = 50;
    m.u.request.ids = ids;
    m.u.request.sampling.top_p = 1;
    m.u.request.sampling.repetition_penalty = 1;
    m.u.request.limits.output_tokens_max = OUTPUT;
    b->streams[slot] = (struct stream){.live = true};
    send(b, b->gateway, &m);
}

static void on_gateway(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t count)
{
    struct bench *b = arg;
    struct msg m;
    (void)peer;
    receive(b, frames, count, &m);
    if (m.type == MSG_ROUTER_STATE && m.u.router.ready && !b->ready) {
        b->ready = true;
        for (uint32_t i = 0; i < STREAMS; i++)
            submit(b, i);
    }
    if (m.type == MSG_SUBMIT_REPLY)
        assert_int_equal(m.u.submit_reply.code, ERR_OK);
    if (m.type != MSG_TOKENS_EMITTED)
        return;
    uint32_t slot = slot_of(&m.id);
    struct stream *s = &b->streams[slot];
    assert_true(s->live);
    assert_int_equal(m.u.tokens.seq, s->k);
    for (uint32_t i = 0; i < m.u.tokens.count; i++)
        assert_int_equal(m.u.tokens.ids[i], 1000 + s->k++);
    if (m.u.tokens.finish == MSG_FINISH_NONE)
        return;
    assert_int_equal(m.u.tokens.finish, MSG_FINISH_LENGTH);
    assert_int_equal(s->k, OUTPUT);
    s->live = false;
    b->finished++;
    if (b->finished % 200 == 0) {
        long *peak = &b->rss_kb[b->finished > TOTAL / 2];
        long now = rss_kb();
        *peak = now > *peak ? now : *peak;
    }
    if (b->submitted < TOTAL)
        submit(b, slot);
    if (b->finished == TOTAL)
        loop_stop(b->loop);
}

static void emit(struct bench *b, const struct msg_id *id, uint32_t seq, uint32_t count,
                 uint32_t first, bool last)
{
    struct msg m = {.type = MSG_TOKENS_EMITTED, .id = *id};
    uint32_t ids[16];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = first + i;
    m.u.tokens = (struct msg_tokens){.seq = seq, .count = count, .ids = ids};
    if (last)
        m.u.tokens.finish = MSG_FINISH_LENGTH;
    send(b, b->worker, &m);
}

static struct msg_id assigned_ids[STREAMS];

static void on_worker(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                      uint32_t count)
{
    struct bench *b = arg;
    struct msg m;
    (void)peer;
    receive(b, frames, count, &m);
    if (m.type != MSG_WORKER_ASSIGN)
        return;
    struct msg reply = {.type = MSG_ASSIGN_REPLY, .id = m.id};
    send(b, b->worker, &reply);
    if (m.u.request.canary) {
        emit(b, &m.id, 0, 8, 7, true);
        return;
    }
    uint32_t slot = slot_of(&m.id);
    assert_int_equal(b->worker_k[slot], UINT32_MAX);
    b->worker_k[slot] = 0;
    assigned_ids[slot] = m.id;
}

static void on_emit(void *arg)
{
    struct bench *b = arg;
    for (uint32_t i = 0; i < STREAMS; i++) {
        if (b->worker_k[i] == UINT32_MAX)
            continue;
        uint32_t k = b->worker_k[i];
        emit(b, &assigned_ids[i], k, CHUNK, 1000 + k, k + CHUNK == OUTPUT);
        b->worker_k[i] = k + CHUNK == OUTPUT ? UINT32_MAX : k + CHUNK;
    }
}

static void malformed(struct bench *b)
{
    static const char junk[64] = "TDM1 this is no header of ours, not even nearly, is it now?";
    struct bus_frame frames[4] = {{junk, 32}, {junk, 10}, {junk, 8}, {junk, 64}};
    for (uint32_t count = 1; count <= 4; count++) {
        assert_int_equal(bus_send(b->gateway, NULL, frames, count), ERR_OK);
        b->malformed_sent++;
    }
}

static void on_beat(void *arg)
{
    struct bench *b = arg;
    struct msg m = {.type = MSG_ROUTER_ANNOUNCE};
    struct msg_id ids[STREAMS];
    uint32_t live = 0, canary[16], answer[8];
    for (uint32_t i = 0; i < STREAMS; i++) {
        if (b->streams[i].live && b->worker_k[i] != UINT32_MAX)
            ids[live++] = assigned_ids[i];
    }
    m.u.announce = (struct msg_announce){
        .kind = "gateway", .incarnation = 5, .live_count = live, .live_ids = ids};
    send(b, b->gateway, &m);
    for (uint32_t i = 0; i < 16; i++)
        canary[i] = i + 1;
    for (uint32_t i = 0; i < 8; i++)
        answer[i] = 7 + i;
    struct hash128 h = hash_xxh3_once(answer, sizeof(answer));
    m = (struct msg){.type = MSG_WORKER_STATE};
    m.u.worker = (struct msg_worker_info){.incarnation = 9,
                                          .state = MSG_WORKER_READY,
                                          .seqs_max = 300,
                                          .context_max = 1000,
                                          .canary_count = 16,
                                          .canary_ids = canary,
                                          .canary_output_count = 8};
    memcpy(&m.u.worker.canary_hash, h.bytes, 8);
    send(b, b->worker, &m);
    malformed(b);
}

static void on_limit(void *arg)
{
    struct bench *b = arg;
    b->expired = true;
    loop_stop(b->loop);
}

static int setup(void **state)
{
    static struct bench bench;
    struct bench *b = &bench;
    struct err_detail detail;
    char endpoint[128];
    *state = b;
    log_set_level(LOG_ERROR);
    strcpy(b->directory, "/tmp/tandem-rt-shell-XXXXXX");
    assert_non_null(mkdtemp(b->directory));
    for (uint32_t i = 0; i < STREAMS; i++)
        b->worker_k[i] = UINT32_MAX;
    arena_init(&b->arena, 1 << 16, 1 << 24);
    arena_init(&b->out, 1 << 16, 1 << 24);
    struct rt_params *p = &b->params;
    strcpy(p->run_dir, b->directory);
    strcpy(p->state_dir, b->directory);
    strcpy(p->cluster, "test");
    strcpy(p->redis, "off");
    p->requests_max = 1024;
    p->queue_requests_max = 512;
    p->queue_tokens_max = p->store_tokens_max = 1 << 20;
    p->sessions_max = 1024;
    p->workers_max = p->gateways_max = 4;
    p->worker_silence_ms = p->gateway_silence_ms = 20000;
    p->cancel_ms = p->canary_ms = 2000;
    p->no_worker_ms = p->canary_silence_ms = p->progress_ms_max = 30000;
    b->loop = loop_create();
    assert_int_equal(rt_shell_create(b->loop, p, &b->shell, &detail), ERR_OK);
    b->bus = bus_create(b->loop);
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/router.sock", b->directory);
    assert_int_equal(
        bus_connect(b->bus, endpoint, "worker-0", 65536, on_worker, b, &b->worker, &detail),
        ERR_OK);
    assert_int_equal(
        bus_connect(b->bus, endpoint, "gateway-0", 65536, on_gateway, b, &b->gateway, &detail),
        ERR_OK);
    b->beat = loop_timer_create(b->loop, on_beat, b);
    b->emit = loop_timer_create(b->loop, on_emit, b);
    b->limit = loop_timer_create(b->loop, on_limit, b);
    loop_timer_start(b->beat, 200000, true);
    loop_timer_start(b->emit, 2000, true);
    loop_timer_start(b->limit, 90000000, false);
    return 0;
}

static int teardown(void **state)
{
    struct bench *b = *state;
    char path[128];
    loop_timer_destroy(&b->beat);
    loop_timer_destroy(&b->emit);
    loop_timer_destroy(&b->limit);
    bus_socket_destroy(&b->worker);
    bus_socket_destroy(&b->gateway);
    bus_destroy(&b->bus);
    rt_shell_destroy(&b->shell);
    loop_destroy(&b->loop);
    arena_fini(&b->arena);
    arena_fini(&b->out);
    snprintf(path, sizeof(path), "%s/router.sock", b->directory);
    (void)unlink(path);
    return rmdir(b->directory);
}

static void test_many_streams(void **state)
{
    struct bench *b = *state;
    loop_run(b->loop);
    assert_false(b->expired);
    assert_int_equal(b->finished, TOTAL);
    assert_true(b->malformed_sent > 0);
#ifndef __SANITIZE_ADDRESS__
    /* Buffers under way breathe by some MiB in this hurry; what leaks only grows. */
    if (b->rss_kb[1] > b->rss_kb[0] + b->rss_kb[0] / 4)
        fail_msg("resident memory grew from %ld to %ld KiB", b->rss_kb[0], b->rss_kb[1]);
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_many_streams, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
