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
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvmgr/km_epoch.h"
#include "kvmgr/km_event.h"
#include "kvmgr/km_map.h"
#include "lib/base/hash.h"
#include "lib/base/log.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"

#define GIVE_UP_US 30000000u
#define EPOCH      5u
#define SESSIONS   8u
#define SID_B      "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a"
#define SID_A      "0123456789abcdef0123456789abcdef"

/* A real server on a unix socket in a folder of its own, and the client that the map uses. */
struct rig {
    char dir[64], path[96];
    pid_t server;
    struct loop *loop;
    struct loop_timer *limit, *tick;
    struct redis *redis;
    struct km_map *map;
    bool gave_up, answered;
    bool (*until)(struct rig *r);
    char text[8192];
    size_t bytes;
    int64_t integer;
    enum redis_type type;
    uint64_t want;
    struct hash128 hashes[1024];
    uint32_t blocks[1024];
};

static uint64_t fixed_ms(void)
{
    return 1700000000123u;
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
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", r->path, "--save", "",
               "--appendonly", "no", "--dir", r->dir, (char *)NULL);
        _exit(127);
    }
}

static void server_end(struct rig *r)
{
    if (r->server <= 0)
        return;
    kill(r->server, SIGKILL);
    assert_int_equal(waitpid(r->server, NULL, 0), r->server);
    r->server = 0;
    unlink(r->path);
}

static void on_limit(void *arg)
{
    struct rig *r = arg;
    r->gave_up = true;
    loop_stop(r->loop);
}

static void on_tick(void *arg)
{
    struct rig *r = arg;
    if (r->until(r))
        loop_stop(r->loop);
}

static void run_until(struct rig *r, bool (*until)(struct rig *r))
{
    r->until = until;
    loop_timer_start(r->tick, 2000, true);
    loop_run(r->loop);
    loop_timer_stop(r->tick);
    assert_false(r->gave_up);
}

static bool is_answered(struct rig *r)
{
    return r->answered;
}

static bool is_up(struct rig *r)
{
    return redis_up(r->redis);
}

static bool is_down(struct rig *r)
{
    return !redis_up(r->redis);
}

static bool has_writes(struct rig *r)
{
    return km_map_stats(r->map)->writes >= r->want;
}

static bool has_refusals(struct rig *r)
{
    return km_map_stats(r->map)->refused_epoch >= r->want;
}

static bool knows_redis_epoch(struct rig *r)
{
    return km_map_stats(r->map)->redis_epoch == r->want;
}

static void on_answer(void *arg, enum err e, const struct redis_value *value)
{
    struct rig *r = arg;
    assert_int_equal(e, ERR_OK);
    r->answered = true;
    r->type = value->type;
    r->integer = value->integer;
    r->bytes = 0;
    if (value->text) {
        assert_true(value->bytes < sizeof(r->text));
        memcpy(r->text, value->text, value->bytes);
        r->bytes = value->bytes;
    }
    for (size_t i = 0; i < value->count; i++) { /* an array: joined by newlines */
        int wrote = snprintf(r->text + r->bytes, sizeof(r->text) - r->bytes, "%.*s\n",
                             (int)value->items[i].bytes, value->items[i].text);
        r->bytes += (size_t)wrote;
        assert_true(r->bytes < sizeof(r->text));
    }
    r->text[r->bytes] = '\0';
}

static const char *ask(struct rig *r, int argc, const char *const *argv)
{
    size_t bytes[8];
    for (int i = 0; i < argc; i++)
        bytes[i] = strlen(argv[i]);
    r->answered = false;
    assert_int_equal(redis_command(r->redis, on_answer, r, argc, argv, bytes), ERR_OK);
    run_until(r, is_answered);
    return r->text;
}

#define ASK(r, ...)                                                                                \
    ask(r, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)),                          \
        (const char *[]){__VA_ARGS__})

static const char *field(struct rig *r, const char *name)
{
    return ASK(r, "HGET", "tandem:{test}:sess:" SID_A, name);
}

static void on_change(void *arg, bool up)
{
    struct rig *r = arg;
    if (r->map)
        km_map_redis_up(r->map, up);
}

static void map_make(struct rig *r, uint32_t epoch)
{
    struct km_map_options options = {.redis = r->redis,
                                     .cluster = "test",
                                     .epoch = epoch,
                                     .incarnation = 0x1122334455667788ull,
                                     .sessions_max = SESSIONS,
                                     .entries_max = 4096,
                                     .writes_max = 4,
                                     .ttl_ms = 7200000,
                                     .unix_ms = fixed_ms};
    r->map = km_map_create(&options);
    struct hash128 layout, model;
    memset(&layout, 0xa1, sizeof(layout));
    memset(&model, 0xb2, sizeof(model));
    km_map_arena(r->map, &layout, &model);
    if (redis_up(r->redis))
        km_map_redis_up(r->map, true);
}

static int setup(void **state)
{
    struct rig *r = calloc(1, sizeof(*r));
    *state = r;
    log_init("test", LOG_ERROR);
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-map-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->path, sizeof(r->path), "%s/redis.sock", r->dir);
    for (uint32_t i = 0; i < 1024; i++) {
        memset(&r->hashes[i], (int)(i % 251), sizeof(r->hashes[i]));
        r->blocks[i] = 70000 + i;
    }
    r->loop = loop_create();
    r->limit = loop_timer_create(r->loop, on_limit, r);
    r->tick = loop_timer_create(r->loop, on_tick, r);
    loop_timer_start(r->limit, GIVE_UP_US, false);
    server_start(r);
    struct redis_options options = {.connect_ms = 1000, .operation_ms = 2000};
    snprintf(options.address, sizeof(options.address), "unix:%s", r->path);
    r->redis = redis_create(r->loop, &options);
    redis_on_change(r->redis, on_change, r);
    run_until(r, is_up);
    map_make(r, EPOCH);
    return 0;
}

static int teardown(void **state)
{
    struct rig *r = *state;
    redis_destroy(&r->redis);
    km_map_destroy(&r->map);
    server_end(r);
    loop_timer_destroy(&r->limit);
    loop_timer_destroy(&r->tick);
    loop_destroy(&r->loop);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", r->dir);
    int rc = system(command);
    free(r);
    return rc;
}

static void commit(struct rig *r, const char *sid, uint64_t lease, uint32_t first, uint32_t count)
{
    struct km_session_change change = {.sid = sid,
                                       .lease = lease,
                                       .first_block = first,
                                       .count = count,
                                       .blocks = r->blocks + first,
                                       .hashes = r->hashes + first,
                                       .token_count = (first + count) * 256 + 7};
    memset(&change.salt, 0xc3, sizeof(change.salt));
    memset(&change.request, 0xd4, sizeof(change.request));
    km_map_commit(r->map, &change);
}

static void wrote(struct rig *r, uint64_t writes)
{
    r->want = writes;
    run_until(r, has_writes);
    assert_true(km_map_stats(r->map)->writes == writes);
}

static uint64_t le(const char *text, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;)
        value = value << 8 | (uint8_t)text[i];
    return value;
}

static void chunk_is(struct rig *r, const char *chunk, uint64_t gen, uint32_t first, uint32_t count)
{
    char key[128];
    snprintf(key, sizeof(key), "tandem:{test}:sess:" SID_A ":b:%s", chunk);
    const char *text = ASK(r, "GET", key);
    assert_int_equal(r->bytes, 20 + count * 22);
    assert_int_equal(le(text, 8), EPOCH);
    assert_int_equal(le(text + 8, 8), gen);
    char whole[8192];
    memcpy(whole, text, 16);
    memcpy(whole + 16, text + 20, count * 22);
    assert_int_equal(le(text + 16, 4), hash_crc32c(0, whole, 16 + count * 22));
    for (uint32_t i = 0; i < count; i++) {
        const char *entry = text + 20 + i * 22;
        assert_memory_equal(entry, &r->hashes[first + i], 16);
        assert_int_equal(le(entry + 16, 4), r->blocks[first + i]);
        assert_int_equal(entry[20], 0);
        assert_int_equal(entry[21], 0);
    }
}

static void schema_is_byte_for_byte(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 3);
    wrote(r, 1);
    assert_string_equal(ASK(r, "GET", "tandem:{test}:epoch:0"), "5");
    assert_string_equal(ASK(r, "TYPE", "tandem:{test}:sess:" SID_A), "hash");
    (void)ASK(r, "HLEN", "tandem:{test}:sess:" SID_A);
    assert_int_equal(r->integer, 15);
    assert_string_equal(field(r, "epoch"), "5");
    assert_string_equal(field(r, "incarnation"), "1122334455667788");
    assert_string_equal(field(r, "layout_fp"), "a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1");
    assert_string_equal(field(r, "model_fp"), "b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2");
    assert_string_equal(field(r, "salt"), "c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3");
    assert_string_equal(field(r, "n_tokens"), "775");
    assert_string_equal(field(r, "n_blocks"), "3");
    assert_string_equal(field(r, "tail_hash"), "02020202020202020202020202020202");
    assert_string_equal(field(r, "kda_snap_pos"), "0");
    assert_string_equal(field(r, "drafter_pos"), "0");
    assert_string_equal(field(r, "tier"), "0");
    assert_string_equal(field(r, "pin_until"), "0");
    assert_string_equal(field(r, "gen"), "1");
    assert_string_equal(field(r, "last_request"), "d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4");
    assert_string_equal(field(r, "updated_ms"), "1700000000123");
    chunk_is(r, "0", 1, 0, 3);
    (void)ASK(r, "PTTL", "tandem:{test}:sess:" SID_A);
    assert_in_range(r->integer, 7100000, 7200000);
    (void)ASK(r, "PTTL", "tandem:{test}:sess:" SID_A ":b:0");
    assert_in_range(r->integer, 7100000, 7200000);
}

/* A state was kept, a turn ended: the map says so, and lives as long as the pin. */
static void kept_states_and_pins_are_told(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 3);
    wrote(r, 1);
    struct km_session_change note = {
        .sid = SID_A, .lease = 77, .snapshot_tokens = 512, .pin_us = 7200000000u};
    km_map_commit(r->map, &note);
    wrote(r, 2);
    assert_string_equal(field(r, "kda_snap_pos"), "512");
    char until[32];
    snprintf(until, sizeof(until), "%llu", (unsigned long long)(fixed_ms() + 7200000));
    assert_string_equal(field(r, "pin_until"), until);
    assert_string_equal(field(r, "n_blocks"), "3");
    (void)ASK(r, "PTTL", "tandem:{test}:sess:" SID_A);
    assert_in_range(r->integer, 7700000, 7800000);
    note.lease = 99; /* of another lease: nothing */
    note.snapshot_tokens = 16;
    km_map_commit(r->map, &note);
    commit(r, SID_A, 77, 3, 1);
    wrote(r, 3);
    assert_string_equal(field(r, "pin_until"), until);
    assert_string_equal(field(r, "kda_snap_pos"), "0"); /* as the commit said */
}

/* Blocks that only the tier has are told as such until they are committed again. */
static void moved_blocks_and_named_pins_are_told(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 4);
    wrote(r, 1);
    struct km_moved moved[4] = {{.hash = r->hashes[1], .position = 1},
                                {.hash = r->hashes[2], .position = 3}, /* another block's */
                                {.hash = r->hashes[2], .position = 2},
                                {.hash = r->hashes[2], .position = 400}};
    for (uint32_t i = 0; i < 4; i++)
        assert_true(hex_decode(SID_A, 32, &moved[i].sid));
    moved[2].sid.bytes[0] ^= 1; /* another session's */
    km_map_moved(r->map, moved, 4);
    wrote(r, 2);
    assert_string_equal(field(r, "tier"), "1");
    assert_string_equal(field(r, "n_blocks"), "4");
    const char *text = ASK(r, "GET", "tandem:{test}:sess:" SID_A ":b:0");
    for (uint32_t i = 0; i < 4; i++) {
        const char *entry = text + 20 + i * 22;
        assert_memory_equal(entry, &r->hashes[i], 16);
        assert_int_equal(le(entry + 16, 4), i == 1 ? UINT32_MAX : r->blocks[i]);
        assert_int_equal(entry[20], i == 1);
    }
    km_map_pin(r->map, SID_B, 5);
    km_map_pin(r->map, SID_A, fixed_ms() + 60000);
    wrote(r, 3);
    char until[32];
    snprintf(until, sizeof(until), "%llu", (unsigned long long)(fixed_ms() + 60000));
    assert_string_equal(field(r, "pin_until"), until);
    commit(r, SID_A, 78, 0, 4); /* the next turn has them back */
    wrote(r, 4);
    assert_string_equal(field(r, "tier"), "0");
    chunk_is(r, "0", 4, 0, 4);
}

static void chunks_grow_and_shrink(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 255);
    wrote(r, 1);
    commit(r, SID_A, 77, 255, 300);
    wrote(r, 2);
    assert_string_equal(field(r, "n_blocks"), "555");
    chunk_is(r, "0", 2, 0, 256);
    chunk_is(r, "1", 2, 256, 256);
    chunk_is(r, "2", 2, 512, 43);
    /* The session's next request begins anew. */
    commit(r, SID_A, 78, 0, 256);
    wrote(r, 3);
    chunk_is(r, "0", 3, 0, 256);
    (void)ASK(r, "EXISTS", "tandem:{test}:sess:" SID_A ":b:1", "tandem:{test}:sess:" SID_A ":b:2");
    assert_int_equal(r->integer, 0);
    /* A straggler of the older request does not mix in. */
    commit(r, SID_A, 77, 555, 1);
    assert_int_equal(km_map_stats(r->map)->superseded, 1);
    assert_string_equal(field(r, "n_blocks"), "256");
}

static void writes_are_coalesced(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    for (uint32_t i = 1; i < 100; i++) /* none of these waits for the loop */
        commit(r, SID_A, 77, i, 1);
    wrote(r, 3);
    assert_string_equal(field(r, "n_blocks"), "100");
    assert_string_equal(field(r, "gen"), "3");
    assert_int_equal(km_map_stats(r->map)->dropped, 0);
}

static void later_epoch_is_respected(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    (void)ASK(r, "SET", "tandem:{test}:epoch:0", "6");
    commit(r, SID_A, 77, 1, 1);
    r->want = 1;
    run_until(r, has_refusals);
    r->want = 6;
    run_until(r, knows_redis_epoch);
    commit(r, SID_A, 77, 2, 1);
    assert_int_equal(km_map_stats(r->map)->dropped, 1);
    assert_string_equal(field(r, "n_blocks"), "1");
    assert_string_equal(ASK(r, "GET", "tandem:{test}:epoch:0"), "6");
}

static void a_stored_gen_that_is_not_ours_is_refused_once(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    (void)ASK(r, "HSET", "tandem:{test}:sess:" SID_A, "gen", "40");
    commit(r, SID_A, 77, 1, 1);
    wrote(r, 2); /* refused, then written over the gen that it was told */
    assert_int_equal(km_map_stats(r->map)->refused_gen, 1);
    assert_string_equal(field(r, "gen"), "41");
    chunk_is(r, "0", 41, 0, 2);
}

static void an_older_epochs_map_counts_as_absent(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    (void)ASK(r, "HSET", "tandem:{test}:sess:" SID_A, "epoch", "4", "gen", "40", "n_blocks", "999");
    (void)ASK(r, "SET", "tandem:{test}:sess:" SID_A ":b:3", "old");
    (void)ASK(r, "DEL", "tandem:{test}:sess:" SID_A ":b:0");
    commit(r, "ffffffffffffffffffffffffffffffff", 1, 0, 1);
    wrote(r, 2);
    commit(r, SID_A, 77, 1, 1);
    wrote(r, 3);
    assert_int_equal(km_map_stats(r->map)->refused_gen, 1); /* 1 was expected, none is there */
    assert_string_equal(field(r, "gen"), "1");
    chunk_is(r, "0", 1, 0, 2);
    (void)ASK(r, "EXISTS", "tandem:{test}:sess:" SID_A ":b:3");
    assert_int_equal(r->integer, 0);
}

static void an_emptied_redis_is_filled_again(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 2);
    wrote(r, 1);
    (void)ASK(r, "FLUSHALL");
    commit(r, SID_A, 77, 2, 1);
    wrote(r, 2);
    assert_string_equal(ASK(r, "GET", "tandem:{test}:epoch:0"), "5");
    chunk_is(r, "0", 1, 0, 3);
}

static void redis_away_is_counted_and_made_good(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    server_end(r);
    run_until(r, is_down);
    commit(r, SID_A, 77, 1, 1);
    commit(r, SID_A, 77, 2, 1);
    assert_int_equal(km_map_stats(r->map)->dropped, 2);
    server_start(r); /* empty: as if restored from nothing */
    run_until(r, is_up);
    wrote(r, 2);
    assert_string_equal(ASK(r, "GET", "tandem:{test}:epoch:0"), "5");
    chunk_is(r, "0", 1, 0, 3);
}

static bool is_refusing(struct rig *r)
{
    return km_map_stats(r->map)->refusing;
}

/* Redis is there but takes no writes: full, or somebody's replica.  Nothing is lost, one write at a
 * time asks again, and the first that is taken sends the others. */
static void a_redis_that_refuses_is_asked_again(void **state)
{
    static const char *const how[][3] = {{"maxmemory", "1", "0"},
                                         {"min-replicas-to-write", "1", "0"}};
    struct rig *r = *state;
    uint64_t writes = 0;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, ++writes);
    for (uint32_t i = 0; i < 2; i++) {
        (void)ASK(r, "CONFIG", "SET", how[i][0], how[i][1]);
        commit(r, SID_A, 77, 1 + i, 1);
        commit(r, SID_B, 78, i, 1);
        run_until(r, is_refusing);
        uint64_t failed = km_map_stats(r->map)->failed;
        for (int k = 0; k < 5; k++) {
            km_map_tick(r->map);
            (void)ASK(r, "PING");
        }
        assert_true(km_map_stats(r->map)->failed > failed);
        assert_true(km_map_stats(r->map)->failed <= failed + 7);
        (void)ASK(r, "CONFIG", "SET", how[i][0], how[i][2]);
        km_map_tick(r->map);
        wrote(r, writes += 2);
        assert_false(is_refusing(r));
        chunk_is(r, "0", 2 + i, 0, 2 + i);
    }
}

static void an_old_dump_is_overtaken(void **state)
{
    struct rig *r = *state;
    (void)ASK(r, "SET", "tandem:{test}:epoch:0", "3");
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    assert_true(km_map_stats(r->map)->refused_epoch >= 1);
    assert_string_equal(ASK(r, "GET", "tandem:{test}:epoch:0"), "5");
}

static void sessions_are_bounded(void **state)
{
    struct rig *r = *state;
    for (uint32_t i = 0; i < 100; i++) {
        char sid[33];
        snprintf(sid, sizeof(sid), "%032x", i);
        commit(r, sid, 1 + i, 0, 3);
        if (i % 3 == 0) {
            r->want = km_map_stats(r->map)->writes + 1;
            run_until(r, has_writes);
        }
        assert_true(km_map_stats(r->map)->sessions <= SESSIONS);
    }
    for (uint32_t i = 0; i < 6; i++) { /* 6 x 1024 entries in room for 4096 */
        char sid[33];
        snprintf(sid, sizeof(sid), "%031xx", i);
        commit(r, sid, 200 + i, 0, 1000);
    }
    assert_true(km_map_stats(r->map)->sessions <= 4);
    commit(r, "0000000000000000000000000000000x", 200, 1000, 1); /* the oldest is forgotten */
    assert_true(km_map_stats(r->map)->dropped > 0);
}

static void another_arena_forgets_sessions(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 1);
    wrote(r, 1);
    commit(r, SID_A, 77, 1, 1); /* in flight now */
    struct hash128 layout = {{9}}, model = {{8}};
    km_map_arena(r->map, &layout, &model);
    wrote(r, 2);
    commit(r, SID_A, 77, 2, 1); /* of blocks that are gone */
    assert_string_equal(field(r, "n_blocks"), "2");
    commit(r, SID_A, 90, 0, 1);
    wrote(r, 3);
    assert_string_equal(field(r, "layout_fp"), "09000000000000000000000000000000");
    assert_string_equal(field(r, "n_blocks"), "1");
}

static void keys_hold_hashes_only(void **state)
{
    struct rig *r = *state;
    commit(r, SID_A, 77, 0, 300);
    wrote(r, 1);
    assert_non_null(strstr(ASK(r, "KEYS", "*"), "tandem:{test}:sess:" SID_A ":b:1\n"));
    int keys = 0;
    for (char *line = strtok(r->text, "\n"); line; line = strtok(NULL, "\n"), keys++)
        assert_int_equal(strncmp(line, "tandem:{test}:", 14), 0);
    assert_int_equal(keys, 4);
}

static void epoch_file_survives(void **state)
{
    struct rig *r = *state;
    uint32_t epoch = 99;
    struct err_detail detail;
    assert_int_equal(km_epoch_read(r->dir, 0, &epoch, &detail), ERR_OK);
    assert_int_equal(epoch, 0);
    assert_int_equal(km_epoch_write(r->dir, 0, 41, &detail), ERR_OK);
    assert_int_equal(km_epoch_write(r->dir, 0, 42, &detail), ERR_OK);
    assert_int_equal(km_epoch_read(r->dir, 0, &epoch, &detail), ERR_OK);
    assert_int_equal(epoch, 42);
    assert_int_equal(km_epoch_read(r->dir, 1, &epoch, &detail), ERR_OK); /* another pool's */
    assert_int_equal(epoch, 0);
    epoch = 42;
    char path[96];
    snprintf(path, sizeof(path), "%s/kv-epoch", r->dir);
    const char *bad[] = {"",
                         "\n",
                         "12",
                         "-3\n",
                         "4x\n",
                         "99999999999\n",
                         "4294967295\n",
                         "111111111111111111111111\n"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        FILE *f = fopen(path, "w");
        fputs(bad[i], f);
        fclose(f);
        assert_int_equal(km_epoch_read(r->dir, 0, &epoch, &detail), ERR_CORRUPT);
        assert_int_equal(epoch, 42);
    }
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(km_epoch_read(r->dir, 0, &epoch, &detail), ERR_IO);
    assert_int_equal(km_epoch_write(r->dir, 0, 43, &detail), ERR_IO);
    rmdir(path);
    assert_int_equal(km_epoch_write("/nonexistent-folder", 0, 43, &detail), ERR_IO);
}

static void epochs_are_chosen_within_reach(void **state)
{
    static const struct {
        uint32_t local, arena, redis, epoch;
        bool arena_ignored, redis_ignored;
    } cases[] = {
        {0, 0, 0, 1, false, false},
        {5, 7, 6, 8, false, false},
        {5, 3, 70, 71, false, false},
        {0, 0, KM_EPOCH_REACH, KM_EPOCH_REACH + 1, false, false},
        {0, 0, KM_EPOCH_REACH + 1, 1, false, true},
        {0, KM_EPOCH_REACH, 2 * KM_EPOCH_REACH, 2 * KM_EPOCH_REACH + 1, false, false},
        {9, UINT32_MAX, UINT32_MAX, 10, true, true},
        {9, KM_EPOCH_MAX, KM_EPOCH_MAX - 1, 10, true, true},
        {KM_EPOCH_MAX - 1, 0, UINT32_MAX, KM_EPOCH_MAX, false, true},
    };
    struct km_epoch_choice got;
    struct err_detail detail;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(
            km_epoch_choose(cases[i].local, cases[i].arena, cases[i].redis, &got, &detail), ERR_OK);
        assert_int_equal(got.epoch, cases[i].epoch);
        assert_int_equal(got.arena_ignored, cases[i].arena_ignored);
        assert_int_equal(got.redis_ignored, cases[i].redis_ignored);
    }
    assert_int_equal(km_epoch_choose(KM_EPOCH_MAX, 0, 0, &got, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "kv-epoch"));
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(schema_is_byte_for_byte),
        CASE(kept_states_and_pins_are_told),
        CASE(moved_blocks_and_named_pins_are_told),
        CASE(chunks_grow_and_shrink),
        CASE(writes_are_coalesced),
        CASE(later_epoch_is_respected),
        CASE(a_stored_gen_that_is_not_ours_is_refused_once),
        CASE(an_older_epochs_map_counts_as_absent),
        CASE(an_emptied_redis_is_filled_again),
        CASE(redis_away_is_counted_and_made_good),
        CASE(a_redis_that_refuses_is_asked_again),
        CASE(an_old_dump_is_overtaken),
        CASE(sessions_are_bounded),
        CASE(another_arena_forgets_sessions),
        CASE(keys_hold_hashes_only),
        CASE(epoch_file_survives),
        CASE(epochs_are_chosen_within_reach),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
