/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvmgr/km_audit.h"
#include "kvmgr/km_params.h"
#include "kvmgr/km_shell.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/rng.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "proto/block_hash.h"
#include "proto/kv_layout.h"
#include "proto/wire.h"

#define GIVE_UP_US  30000000u
#define SESSION_KEY "alice's private chat"

/* kvmgr's shell, a worker's socket and a real Redis on one loop. */
struct rig {
    char dir[64], redis_path[96], arena_path[96];
    pid_t server;
    struct loop *loop;
    struct loop_timer *limit, *again, *nap;
    bool gave_up;
    struct km_params params;
    struct km_shell *shell;
    struct bus *bus;
    struct bus_socket *worker;
    struct redis *redis;
    struct arena arena; /* of the last message in */
    struct arena out;
    struct msg asked, last;
    enum msg_type want;
    char text[65536];
    size_t bytes;
};

static void on_limit(void *arg)
{
    struct rig *r = arg;
    r->gave_up = true;
    loop_stop(r->loop);
}

static void on_nap(void *arg)
{
    struct rig *r = arg;
    loop_stop(r->loop);
}

static void server_start(struct rig *r)
{
    r->server = fork();
    assert_true(r->server >= 0);
    if (r->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 1);
        dup2(null, 2);
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", r->redis_path,
               "--save", "", "--appendonly", "no", "--dir", r->dir, (char *)NULL);
        _exit(127);
    }
}

static void on_reply(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                     uint32_t count)
{
    struct rig *r = arg;
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail;
    assert_null(peer);
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&r->arena);
    struct msg msg;
    assert_int_equal(wire_decode(&r->arena, in, count, &msg, &detail), ERR_OK);
    if (msg.type != r->want)
        return;
    /* Arrays of the payload lie in the frames, which end with this call. */
    if (msg.type == MSG_KV_OPEN_REPLY)
        msg.u.kv_open_reply.blocks = arena_copy(&r->arena, msg.u.kv_open_reply.blocks,
                                                msg.u.kv_open_reply.block_count * sizeof(uint32_t));
    r->last = msg;
    loop_stop(r->loop);
}

static void ask_send(void *arg)
{
    struct rig *r = arg;
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count;
    arena_reset(&r->out);
    assert_int_equal(wire_encode(&r->out, &r->asked, frames, &count), ERR_OK);
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    assert_int_equal(bus_send(r->worker, NULL, out, count), ERR_OK);
}

/* Sends and waits for the answer; asks again every 200 ms, as workers do. */
static const struct msg *ask(struct rig *r, enum msg_type want)
{
    r->want = want;
    r->last = (struct msg){0};
    ask_send(r);
    loop_timer_start(r->again, 200000, true);
    loop_run(r->loop);
    loop_timer_stop(r->again);
    assert_false(r->gave_up);
    return &r->last;
}

static void shell_start(struct rig *r)
{
    struct err_detail detail = {{0}};
    if (km_shell_create(r->loop, &r->params, &r->shell, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
}

static int setup(void **state)
{
    struct rig *r = calloc(1, sizeof(*r));
    *state = r;
    log_init("test", LOG_ERROR);
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-kvmgr-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->redis_path, sizeof(r->redis_path), "%s/redis.sock", r->dir);
    snprintf(r->arena_path, sizeof(r->arena_path), "%s/arena.kv", r->dir);
    struct km_params *p = &r->params;
    snprintf(p->run_dir, sizeof(p->run_dir), "%s", r->dir);
    snprintf(p->state_dir, sizeof(p->state_dir), "%s", r->dir);
    snprintf(p->cluster, sizeof(p->cluster), "test");
    snprintf(p->kv_dtype, sizeof(p->kv_dtype), "f32");
    snprintf(p->snapshot_dtype, sizeof(p->snapshot_dtype), "bf16");
    snprintf(p->arena_path, sizeof(p->arena_path), "%s", r->arena_path);
    p->arena_bytes = 4u << 20;
    p->block_tokens = 16;
    p->slots_spare = 2;
    p->snapshots_max = 8;
    p->snapshot_percent = 12;
    p->session_percent = p->tenant_percent = 100;
    p->sessions_max = 16;
    p->session_ttl_s = 100;
    r->loop = loop_create();
    r->limit = loop_timer_create(r->loop, on_limit, r);
    loop_timer_start(r->limit, GIVE_UP_US, false);
    r->again = loop_timer_create(r->loop, ask_send, r);
    r->nap = loop_timer_create(r->loop, on_nap, r);
    arena_init(&r->arena, 65536, 1u << 24);
    arena_init(&r->out, 65536, 1u << 24);
    server_start(r);
    r->bus = bus_create(r->loop);
    char endpoint[128];
    struct err_detail detail;
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/kvmgr.sock", r->dir);
    assert_int_equal(
        bus_connect(r->bus, endpoint, "worker-0", 1000, on_reply, r, &r->worker, &detail), ERR_OK);
    shell_start(r);
    return 0;
}

static int teardown(void **state)
{
    struct rig *r = *state;
    km_shell_destroy(&r->shell);
    if (r->redis)
        redis_destroy(&r->redis);
    bus_socket_destroy(&r->worker);
    bus_destroy(&r->bus);
    arena_fini(&r->arena);
    arena_fini(&r->out);
    loop_timer_destroy(&r->limit);
    loop_timer_destroy(&r->again);
    loop_timer_destroy(&r->nap);
    loop_destroy(&r->loop);
    kill(r->server, SIGKILL);
    waitpid(r->server, NULL, 0);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", r->dir);
    int rc = system(command);
    free(r);
    return rc;
}

static const struct msg_kv_attach_reply *attach(struct rig *r, uint64_t incarnation,
                                                uint64_t state_bytes)
{
    r->asked = (struct msg){.type = MSG_KV_ATTACH};
    r->asked.u.kv_attach = (struct msg_kv_attach){.incarnation = incarnation,
                                                  .dsa_layers = 2,
                                                  .latent_dim = 16,
                                                  .index_dim = 8,
                                                  .index_kpool = 4,
                                                  .state_bytes = state_bytes,
                                                  .seqs_max = 4,
                                                  .ranks = 1};
    return &ask(r, MSG_KV_ATTACH_REPLY)->u.kv_attach_reply;
}

static uint64_t open_lease(struct rig *r, uint32_t epoch, uint32_t blocks, uint8_t request)
{
    r->asked = (struct msg){.type = MSG_KV_OPEN, .epoch = epoch, .id = {{request}}};
    r->asked.u.kv_open = (struct msg_kv_open){
        .session_key = SESSION_KEY, .prompt_count = 1, .blocks_wanted = blocks};
    const struct msg_kv_open_reply *reply = &ask(r, MSG_KV_OPEN_REPLY)->u.kv_open_reply;
    assert_int_equal(reply->code, ERR_OK);
    assert_int_equal(reply->block_count, blocks);
    return reply->lease;
}

static void on_value(void *arg, enum err e, const struct redis_value *value)
{
    struct rig *r = arg;
    r->bytes = 0;
    if (e == ERR_OK && value->text) {
        assert_true(value->bytes < sizeof(r->text));
        memcpy(r->text, value->text, value->bytes);
        r->bytes = value->bytes;
    }
    for (size_t i = 0; e == ERR_OK && i < value->count; i++)
        r->bytes += (size_t)snprintf(r->text + r->bytes, sizeof(r->text) - r->bytes, "%.*s\n",
                                     (int)value->items[i].bytes, value->items[i].text);
    r->text[r->bytes] = '\0';
    loop_stop(r->loop);
}

static const char *redis_ask(struct rig *r, int argc, const char *const *argv)
{
    size_t bytes[4];
    for (int i = 0; i < argc; i++)
        bytes[i] = strlen(argv[i]);
    if (!r->redis) {
        struct redis_options options = {.connect_ms = 1000, .operation_ms = 2000};
        snprintf(options.address, sizeof(options.address), "unix:%s", r->redis_path);
        r->redis = redis_create(r->loop, &options);
    }
    r->want = MSG_NONE;
    enum err e;
    for (;;) { /* until it is up, or answers */
        e = redis_command(r->redis, on_value, r, argc, argv, bytes);
        if (e == ERR_OK)
            break;
        r->asked = (struct msg){.type = MSG_KV_PING};
        (void)ask(r, MSG_KV_STATE);
    }
    r->want = MSG_NONE;
    loop_run(r->loop);
    assert_false(r->gave_up);
    return r->text;
}

#define REDIS(r, ...)                                                                              \
    redis_ask(r, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)),                    \
              (const char *[]){__VA_ARGS__})

static void a_worker_is_served_and_a_session_mapped(void **state)
{
    struct rig *r = *state;
    const struct msg_kv_attach_reply *reply = attach(r, 1, 1000);
    assert_int_equal(reply->code, ERR_OK);
    assert_string_equal(reply->arena_path, r->arena_path);
    assert_int_equal(reply->live_slots, 6);
    assert_int_equal(reply->slot_count, 14);
    assert_int_equal(reply->granted_count, 2);
    /* The worker plans the same layout from the answer. */
    struct kv_geometry g = {.dsa_layers = 2,
                            .latent_dim = 16,
                            .index_dim = 8,
                            .index_kpool = 4,
                            .block_tokens = reply->block_tokens,
                            .kv_dtype = reply->kv_dtype,
                            .index_dtype = reply->index_dtype,
                            .snapshot_dtype = reply->snapshot_dtype,
                            .ranks = 1,
                            .interleave = reply->block_tokens,
                            .state_bytes = 1000};
    struct kv_layout layout;
    struct kv_slots slots = {reply->live_slots, reply->slot_count};
    assert_int_equal(kv_layout_plan(&g, reply->arena_bytes, slots, &layout, NULL), ERR_OK);
    assert_int_equal(layout.block_count, reply->block_count);
    assert_memory_equal(&layout.layout_fp, &reply->layout_fp, sizeof(layout.layout_fp));
    uint32_t epoch = reply->epoch;

    uint64_t lease = open_lease(r, epoch, 3, 1);
    struct hash128 hashes[2];
    memset(&hashes[0], 0x42, sizeof(hashes[0]));
    memset(&hashes[1], 0x43, sizeof(hashes[1]));
    r->asked = (struct msg){.type = MSG_KV_COMMIT, .epoch = epoch};
    r->asked.u.kv_commit = (struct msg_kv_commit){lease, 0, 33, 2, hashes};
    ask_send(r);
    r->asked = (struct msg){.type = MSG_KV_PING, .epoch = epoch};
    r->asked.u.kv_ping = (struct msg_kv_ping){1, 1, &lease};
    assert_int_equal(ask(r, MSG_KV_STATE)->u.kv_state.blocks_leased, 3);
    struct km_audit audit;
    assert_int_equal(km_audit_read(r->arena_path, &audit, NULL), ERR_OK);
    assert_true(km_audit_sound(&audit));
    assert_int_equal(audit.blocks_by_state[KV_COMMITTED], 2);
    assert_int_equal(audit.blocks_by_state[KV_WRITING], 1);

    struct block_hash_key key;
    struct err_detail detail;
    assert_int_equal(block_hash_key_load(r->dir, &key, &detail), ERR_OK);
    char sid[33], name[128];
    block_hash_session(&key, SESSION_KEY, sid);
    snprintf(name, sizeof(name), "tandem:{test}:sess:%s", sid);
    for (int i = 0; i < 500 && strcmp(REDIS(r, "HGET", name, "n_blocks"), "2") != 0; i++) {
        loop_timer_start(r->nap, 10000, false);
        loop_run(r->loop);
    }
    assert_string_equal(REDIS(r, "HGET", name, "n_blocks"), "2");
    assert_string_equal(REDIS(r, "HGET", name, "n_tokens"), "33");
    const char *keys = REDIS(r, "KEYS", "*");
    assert_null(strstr(keys, "alice"));
    assert_non_null(strstr(keys, "tandem:{test}:epoch:0"));

    r->asked = (struct msg){.type = MSG_KV_RELEASE, .epoch = epoch};
    r->asked.u.kv_release.lease = lease;
    ask_send(r);
    r->asked = (struct msg){.type = MSG_KV_PING};
    r->asked.u.kv_ping.incarnation = 1;
    const struct msg_kv_state *s = &ask(r, MSG_KV_STATE)->u.kv_state;
    assert_int_equal(s->blocks_leased, 0);
    assert_int_equal(s->blocks_free, s->blocks_total);
}

static void a_restart_adopts_the_arena(void **state)
{
    struct rig *r = *state;
    const struct msg_kv_attach_reply *reply = attach(r, 1, 1000);
    uint32_t epoch = reply->epoch, blocks = reply->block_count;
    uint64_t incarnation = reply->incarnation;
    uint64_t lease = open_lease(r, epoch, 3, 1);
    km_shell_destroy(&r->shell);
    assert_null(r->shell);
    shell_start(r);
    /* The worker does not know yet: its answers tell it. */
    r->asked = (struct msg){.type = MSG_KV_EXTEND, .epoch = epoch};
    r->asked.u.kv_extend = (struct msg_kv_extend){lease, 3, 1};
    assert_int_equal(ask(r, MSG_KV_EXTEND_REPLY)->u.kv_extend_reply.code, ERR_EPOCH);
    r->asked = (struct msg){.type = MSG_KV_PING, .epoch = epoch};
    r->asked.u.kv_ping = (struct msg_kv_ping){1, 1, &lease};
    assert_true(ask(r, MSG_KV_STATE)->u.kv_state.incarnation != incarnation);
    reply = attach(r, 1, 1000);
    assert_int_equal(reply->code, ERR_OK);
    assert_int_equal(reply->epoch, epoch + 1);
    assert_int_equal(reply->block_count, blocks);
    struct km_audit audit;
    assert_int_equal(km_audit_read(r->arena_path, &audit, NULL), ERR_OK);
    assert_true(km_audit_sound(&audit));
    assert_int_equal(audit.superblock.epoch, epoch + 1);
    assert_int_equal(audit.blocks_by_state[KV_FREE], 3);
    (void)open_lease(r, epoch + 1, 2, 1);
}

static void hashes_fill(struct hash128 *hashes, uint32_t count, uint8_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        memset(&hashes[i], (int)(seed + i), sizeof(hashes[i]));
}

static const struct msg_kv_open_reply *open_reusing(struct rig *r, uint32_t epoch, uint8_t request,
                                                    const struct hash128 *hashes, uint32_t count)
{
    r->asked = (struct msg){.type = MSG_KV_OPEN, .epoch = epoch, .id = {{request}}};
    r->asked.u.kv_open = (struct msg_kv_open){.session_key = SESSION_KEY,
                                              .prompt_count = 16 * count + 1,
                                              .blocks_wanted = count + 1,
                                              .hash_count = count,
                                              .hashes = hashes,
                                              .reuse_max = 16 * count};
    return &ask(r, MSG_KV_OPEN_REPLY)->u.kv_open_reply;
}

/* One turn with its state kept; its blocks and snapshot hold a pattern of the seed. */
static void one_turn(struct rig *r, const struct msg_kv_attach_reply *attached, uint8_t request,
                     const struct hash128 *hashes, uint32_t count)
{
    uint32_t epoch = attached->epoch, slot;
    assert_true(attached->granted_count > 0);
    slot = attached->granted[0];
    const struct msg_kv_open_reply *reply = open_reusing(r, epoch, request, hashes, count);
    assert_int_equal(reply->code, ERR_OK);
    uint64_t lease = reply->lease;
    r->asked = (struct msg){.type = MSG_KV_COMMIT, .epoch = epoch};
    r->asked.u.kv_commit = (struct msg_kv_commit){lease, 0, 16 * count + 1, count, hashes};
    ask_send(r);
    r->asked = (struct msg){.type = MSG_KV_SNAPSHOT, .epoch = epoch};
    r->asked.u.kv_snapshot = (struct msg_kv_snapshot){lease, 16 * count, hashes[count - 1], slot};
    assert_int_equal(ask(r, MSG_KV_SNAPSHOT_REPLY)->u.kv_snapshot_reply.code, ERR_OK);
    r->asked = (struct msg){.type = MSG_KV_RELEASE, .epoch = epoch};
    r->asked.u.kv_release = (struct msg_kv_release){lease, 16 * count + 1, true};
    ask_send(r);
    r->asked = (struct msg){.type = MSG_KV_PING};
    r->asked.u.kv_ping.incarnation = 1;
    assert_int_equal(ask(r, MSG_KV_STATE)->u.kv_state.blocks_cached % count, 0);
}

static void a_restart_finds_the_cache(void **state)
{
    struct rig *r = *state;
    struct hash128 hashes[5];
    hashes_fill(hashes, 5, 1);
    one_turn(r, attach(r, 1, 1000), 1, hashes, 5);
    km_shell_destroy(&r->shell);
    struct km_audit audit;
    assert_int_equal(km_audit_read(r->arena_path, &audit, NULL), ERR_OK);
    assert_true(km_audit_sound(&audit));
    assert_int_equal(audit.blocks_by_state[KV_COMMITTED], 5);
    assert_true(km_audit_chained(&audit));
    assert_int_equal(audit.snapshots, 1);
    shell_start(r);
    const struct msg_kv_attach_reply *attached = attach(r, 2, 1000);
    uint32_t epoch = attached->epoch;
    const struct msg_kv_open_reply *reply = open_reusing(r, epoch, 2, hashes, 5);
    for (uint32_t i = 0; i < 100 && reply->code == ERR_LOADING; i++) { /* it is read first */
        loop_timer_start(r->nap, 10000, false);
        r->want = MSG_NONE;
        loop_run(r->loop);
        reply = open_reusing(r, epoch, 2, hashes, 5);
    }
    assert_int_equal(reply->code, ERR_OK);
    assert_int_equal(reply->reusable_tokens, 80);
    assert_true(reply->snapshot_slot >= 6);
}

static void wait_stopped(struct rig *r)
{
    km_shell_stop(r->shell);
    r->want = MSG_NONE;
    loop_run(r->loop);
    assert_false(r->gave_up);
}

/* After a reboot there is no arena: the tier has what was flushed. */
static void a_reboot_finds_the_tier(void **state)
{
    struct rig *r = *state;
    struct hash128 hashes[5];
    hashes_fill(hashes, 5, 1);
    km_shell_destroy(&r->shell);
    snprintf(r->params.kv_store_dir, sizeof(r->params.kv_store_dir), "%s/store", r->dir);
    r->params.kv_store_bytes = 64u << 20;
    r->params.kv_store_objects = 1000;
    shell_start(r);
    one_turn(r, attach(r, 1, 1000), 1, hashes, 5);
    wait_stopped(r);
    km_shell_destroy(&r->shell);
    assert_int_equal(unlink(r->arena_path), 0);
    shell_start(r);
    const struct msg_kv_attach_reply *attached = attach(r, 2, 1000);
    uint32_t epoch = attached->epoch;
    for (uint32_t i = 0; i < 100; i++) { /* the listing of the tier takes a moment */
        const struct msg_kv_open_reply *reply =
            open_reusing(r, epoch, (uint8_t)(10 + i), hashes, 5);
        assert_int_equal(reply->code, ERR_OK);
        if (reply->reusable_tokens == 80)
            return;
        r->asked = (struct msg){.type = MSG_KV_RELEASE, .epoch = epoch};
        r->asked.u.kv_release.lease = reply->lease;
        ask_send(r);
        loop_timer_start(r->nap, 10000, false);
        r->want = MSG_NONE;
        loop_run(r->loop);
    }
    fail_msg("nothing came from the tier");
}

/* More is cached than the tier holds: the end does not wait for what cannot be. */
static void a_small_tier_does_not_hold_up_the_end(void **state)
{
    struct rig *r = *state;
    struct hash128 hashes[5];
    km_shell_destroy(&r->shell);
    snprintf(r->params.kv_store_dir, sizeof(r->params.kv_store_dir), "%s/store", r->dir);
    r->params.kv_store_bytes = 64u << 10;
    r->params.kv_store_objects = 1000;
    shell_start(r);
    const struct msg_kv_attach_reply *attached = attach(r, 1, 1000);
    for (uint8_t i = 0; i < 3; i++) {
        hashes_fill(hashes, 5, (uint8_t)(1 + 10 * i));
        one_turn(r, attached, (uint8_t)(1 + i), hashes, 5);
        attached = attach(r, 1, 1000);
    }
    uint64_t begun_us = clock_mono_us();
    wait_stopped(r);
    assert_true(clock_mono_us() - begun_us < 3000000);
}

static void an_arena_too_small_is_said_with_numbers(void **state)
{
    struct rig *r = *state;
    const struct msg_kv_attach_reply *reply = attach(r, 1, 1u << 30);
    assert_int_equal(reply->code, ERR_NOMEM);
    assert_non_null(strstr(reply->text, "4194304"));
    /* The first one may have been sent, and refused, more than once. */
    for (uint32_t i = 0; i < 20 && reply->code == ERR_NOMEM; i++)
        reply = attach(r, 1, 1000);
    assert_int_equal(reply->code, ERR_OK);
}

/* Bytes of a slot near 2^64: once they made a slot of no size. */
static void a_state_beyond_all_bounds_is_dropped(void **state)
{
    struct rig *r = *state;
    static const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 4095, (1ull << 63) + 1};
    for (size_t i = 0; i < ARRAY_COUNT(sizes); i++) {
        uint8_t frame[WIRE_HEADER_BYTES], body[256];
        struct wire_frame frames[WIRE_FRAMES_MAX];
        uint32_t count;
        r->asked = (struct msg){.type = MSG_KV_ATTACH};
        r->asked.u.kv_attach = (struct msg_kv_attach){.incarnation = 1,
                                                      .dsa_layers = 2,
                                                      .latent_dim = 16,
                                                      .index_dim = 8,
                                                      .index_kpool = 4,
                                                      .state_bytes = KV_STATE_BYTES_MAX,
                                                      .seqs_max = 4,
                                                      .ranks = 1};
        arena_reset(&r->out);
        assert_int_equal(wire_encode(&r->out, &r->asked, frames, &count), ERR_OK);
        assert_true(count == 2 && frames[1].count + 10 < sizeof(body));
        /* The varint of 2^34 is five bytes, the last 0x40; ten take its place. */
        const uint8_t *from = frames[1].bytes;
        static const uint8_t old[] = {0x38, 0x80, 0x80, 0x80, 0x80, 0x40};
        const uint8_t *at = memmem(from, frames[1].count, old, sizeof(old));
        assert_non_null(at);
        size_t bytes = (size_t)(at - from) + 1;
        memcpy(body, from, bytes);
        uint64_t value = sizes[i];
        for (; value >= 128; value >>= 7)
            body[bytes++] = (uint8_t)(value | 0x80);
        body[bytes++] = (uint8_t)value;
        size_t rest = frames[1].count - (size_t)(at - from) - sizeof(old);
        memcpy(body + bytes, at + sizeof(old), rest);
        bytes += rest;
        memcpy(frame, frames[0].bytes, sizeof(frame));
        uint32_t body_bytes = (uint32_t)bytes;
        memcpy(frame + 12, &body_bytes, 4);
        struct bus_frame out[] = {{frame, sizeof(frame)}, {body, bytes}};
        assert_int_equal(bus_send(r->worker, NULL, out, 2), ERR_OK);
    }
    assert_int_equal(attach(r, 1, 1000)->code, ERR_OK);
}

static const char *health_state(struct rig *r)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    static char page[4096];
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/kvmgr-0.http", r->dir);
    size_t bytes = 0;
    page[0] = '\0';
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_true(write(fd, "GET /health HTTP/1.0\r\n\r\n", 24) == 24);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    for (int i = 0; i < 500 && !strstr(page, "\"state\""); i++) {
        loop_timer_start(r->nap, 10000, false);
        loop_run(r->loop);
        ssize_t got = read(fd, page + bytes, sizeof(page) - 1 - bytes);
        bytes += got > 0 ? (size_t)got : 0;
        page[bytes] = '\0';
    }
    close(fd);
    return page;
}

/* Whatever stands under its key in Redis, kvmgr starts, again and again, and says so. */
static void no_epoch_in_redis_stops_it(void **state)
{
    struct rig *r = *state;
    static const char *const values[] = {
        "4294967293", "4294967294", "4294967295", "18446744073709551615", "99999999999999999999999",
        "-1",         "nan",        "a later one"};
    uint32_t before = attach(r, 1, 1000)->epoch;
    for (size_t i = 0; i < ARRAY_COUNT(values); i++) {
        (void)REDIS(r, "SET", "tandem:{test}:epoch:0", values[i]);
        km_shell_destroy(&r->shell);
        shell_start(r);
        const struct msg_kv_attach_reply *reply = attach(r, 1, 1000);
        assert_int_equal(reply->code, ERR_OK);
        assert_int_equal(reply->epoch, ++before);
        const char *page = NULL;
        bool degraded = false;
        for (int n = 0; i < 3 && n < 200 && !degraded; n++) {
            page = health_state(r);
            degraded = strstr(page, "\"state\":\"degraded\"") != NULL;
        }
        if (i < 3 && !degraded)
            fail_msg("%s: %s", values[i], page);
    }
    (void)REDIS(r, "SET", "tandem:{test}:epoch:0", "5000"); /* believable: it is followed */
    km_shell_destroy(&r->shell);
    shell_start(r);
    assert_int_equal(attach(r, 1, 1000)->epoch, 5001);
}

static void nonsense_is_dropped(void **state)
{
    struct rig *r = *state;
    (void)attach(r, 1, 1000);
    struct rng rng;
    rng_init(&rng, 0x6b6d0003);
    for (uint32_t round = 0; round < 300; round++) {
        uint8_t header[WIRE_HEADER_BYTES], body[64];
        for (size_t i = 0; i < sizeof(header); i++)
            header[i] = (uint8_t)rng_u32(&rng);
        for (size_t i = 0; i < sizeof(body); i++)
            body[i] = (uint8_t)rng_u32(&rng);
        if (rng_below(&rng, 2)) { /* a sound header: the body is wrong */
            uint32_t magic = WIRE_MAGIC, bytes = rng_below(&rng, sizeof(body));
            memset(header, 0, sizeof(header));
            memcpy(header, &magic, 4);
            header[4] = WIRE_VERSION;
            header[5] = (uint8_t)(MSG_KV_ATTACH + rng_below(&rng, 15));
            memcpy(header + 12, &bytes, 4);
        }
        struct bus_frame frames[] = {{header, sizeof(header)},
                                     {body, rng_below(&rng, sizeof(body))},
                                     {body, rng_below(&rng, sizeof(body))}};
        assert_int_equal(bus_send(r->worker, NULL, frames, 1 + rng_below(&rng, 3)), ERR_OK);
    }
    r->asked = (struct msg){.type = MSG_KV_PING};
    r->asked.u.kv_ping.incarnation = 1;
    assert_int_equal(ask(r, MSG_KV_STATE)->u.kv_state.blocks_leased, 0);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_worker_is_served_and_a_session_mapped),
        CASE(a_restart_adopts_the_arena),
        CASE(a_restart_finds_the_cache),
        CASE(a_reboot_finds_the_tier),
        CASE(a_small_tier_does_not_hold_up_the_end),
        CASE(an_arena_too_small_is_said_with_numbers),
        CASE(a_state_beyond_all_bounds_is_dropped),
        CASE(no_epoch_in_redis_stops_it),
        CASE(nonsense_is_dropped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
