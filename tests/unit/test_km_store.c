/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_store.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"
#include "lib/base/rng.h"

#define BLOCKS 8u
#define LIVE   1u

struct rig {
    char dir[64], arena_path[96], store_dir[96];
    struct km_arena *arena;
    struct km_store *store;
    struct kv_layout layout;
    struct hash128 model_fp;
    int zstd;
    struct km_store_object found[64];
    uint32_t found_count;
    uint64_t others_bytes;
    char off[ERR_DETAIL_BYTES];
};

static void wake(void *arg)
{
}

static struct hash128 hash_of(uint32_t n)
{
    struct hash128 h;
    memset(&h, (int)n, sizeof(h));
    return h;
}

static void store_start(struct rig *r)
{
    struct km_store_options o = {.dir = r->store_dir,
                                 .arena_fd = km_arena_fd(r->arena),
                                 .layout = &r->layout,
                                 .model_fp = r->model_fp,
                                 .zstd_level = r->zstd,
                                 .wake = wake};
    struct err_detail detail = {{0}};
    r->found_count = 0;
    r->others_bytes = 0;
    r->off[0] = '\0';
    if (km_store_open(&o, &r->store, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
}

static void store_restart(struct rig *r)
{
    km_store_close(&r->store);
    store_start(r);
}

/* Polls until there is a result, or, without `result`, for a while. */
static bool poll_one(struct rig *r, struct km_store_result *result)
{
    for (uint32_t i = 0; i < (result ? 5000u : 50u); i++) {
        struct km_store_poll news;
        km_store_poll(r->store, &news);
        switch (news.news) {
        case KM_STORE_RESULT:
            assert_non_null(result);
            *result = news.result;
            return true;
        case KM_STORE_FOUND:
            assert_true(r->found_count < ARRAY_COUNT(r->found));
            r->found[r->found_count++] = news.object;
            break;
        case KM_STORE_OFF:
            snprintf(r->off, sizeof(r->off), "%s", news.text);
            break;
        case KM_STORE_OTHERS:
            r->others_bytes = news.bytes;
            assert_non_null(strstr(news.text, "1 folders"));
            break;
        case KM_STORE_NOTHING:
            usleep(1000);
            break;
        }
    }
    return false;
}

/* Snapshots are counted from 0 here; their slots lie behind the live one. */
static uint32_t index_of(uint32_t kind, uint32_t place)
{
    return kind == KM_OBJECT_SNAPSHOT ? LIVE + place : place;
}

/* What is written was committed before. */
static void commit(struct rig *r, uint32_t kind, uint32_t n, uint32_t place)
{
    uint32_t index = index_of(kind, place);
    struct hash128 hash = hash_of(n), parent = hash_of(n + 100);
    if (kind == KM_OBJECT_BLOCK) {
        km_arena_blocks_writing(r->arena, &index, 1);
        km_arena_blocks_commit(r->arena, &index, 1, n, &parent, &hash);
    } else {
        km_arena_slots_writing(r->arena, &index, 1, true);
        km_arena_snapshot_commit(r->arena, index, 16 * (n + 1), &hash);
    }
}

static struct km_store_result again(struct rig *r, enum km_store_op op, uint32_t kind, uint32_t n,
                                    uint32_t index)
{
    struct km_store_item it = {.op = op,
                               .kind = kind,
                               .index = index_of(kind, index),
                               .token_count = 16 * (n + 1),
                               .hash = hash_of(n),
                               .parent = hash_of(n + 100)};
    struct km_store_result result;
    km_store_submit(r->store, &it);
    assert_true(poll_one(r, &result));
    assert_int_equal(result.item.op, op);
    assert_memory_equal(&result.item.hash, &it.hash, sizeof(it.hash));
    return result;
}

static struct km_store_result run(struct rig *r, enum km_store_op op, uint32_t kind, uint32_t n,
                                  uint32_t index)
{
    if (op == KM_STORE_WRITE)
        commit(r, kind, n, index);
    return again(r, op, kind, n, index);
}

static uint64_t data_at(const struct rig *r, uint32_t kind, uint32_t index, uint64_t *ret_bytes)
{
    const struct kv_layout *l = &r->layout;
    struct kv_place place =
        kind == KM_OBJECT_BLOCK ? kv_block_place(l, index) : kv_slot_place(l, LIVE + index);
    *ret_bytes = place.bytes;
    return place.at;
}

static void data_fill(const struct rig *r, uint32_t kind, uint32_t index, uint64_t seed)
{
    uint64_t bytes, at = data_at(r, kind, index, &bytes);
    struct rng rng;
    rng_init(&rng, seed);
    uint8_t *data = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++) /* half of it compresses */
        data[i] = i % 2 ? (uint8_t)rng_u32(&rng) : 7;
    uint64_t body = kv_snapshot_body_bytes(KV_BF16, r->layout.geometry.state_bytes);
    uint64_t guard = kind == KM_OBJECT_BLOCK ? r->layout.block_guard_at : body;
    kv_guard_fill(data + guard, bytes - guard);
    assert_int_equal(pwrite(km_arena_fd(r->arena), data, bytes, (off_t)at), (ssize_t)bytes);
    free(data);
}

static void data_same(const struct rig *r, uint32_t kind, uint32_t a, uint32_t b, bool same)
{
    uint64_t bytes, at_a = data_at(r, kind, a, &bytes), at_b = data_at(r, kind, b, &bytes);
    uint8_t *x = malloc(bytes), *y = malloc(bytes);
    assert_int_equal(pread(km_arena_fd(r->arena), x, bytes, (off_t)at_a), (ssize_t)bytes);
    assert_int_equal(pread(km_arena_fd(r->arena), y, bytes, (off_t)at_b), (ssize_t)bytes);
    assert_int_equal(memcmp(x, y, bytes) == 0, same);
    free(x);
    free(y);
}

static void object_path(const struct rig *r, uint32_t kind, uint32_t n, char *ret, size_t bytes)
{
    char hex[33], pattern[200];
    for (uint32_t i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", n);
    snprintf(pattern, sizeof(pattern), "echo %s/*/%.2s/%s.%c", r->store_dir, hex, hex,
             kind == KM_OBJECT_BLOCK ? 'b' : 's');
    FILE *f = popen(pattern, "re");
    assert_non_null(fgets(ret, (int)bytes, f));
    pclose(f);
    ret[strcspn(ret, "\n")] = '\0';
}

static void flip(const char *path, uint64_t at)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static int setup(void **state)
{
    struct rig *r = calloc(1, sizeof(*r));
    *state = r;
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-store-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->arena_path, sizeof(r->arena_path), "%s/arena.kv", r->dir);
    snprintf(r->store_dir, sizeof(r->store_dir), "%s/store", r->dir);
    struct km_arena_options o = {.path = r->arena_path,
                                 .arena_bytes = 4u << 20,
                                 .geometry = {.dsa_layers = 2,
                                              .latent_dim = 32,
                                              .index_dim = 16,
                                              .index_kpool = 4,
                                              .block_tokens = 64,
                                              .kv_dtype = KV_F32,
                                              .index_dtype = KV_F32,
                                              .snapshot_dtype = KV_BF16,
                                              .ranks = 1,
                                              .interleave = 64,
                                              .state_bytes = 9000},
                                 .live_count = LIVE,
                                 .slot_count = LIVE + 4,
                                 .epoch = 1};
    struct km_arena_report report;
    struct err_detail detail = {{0}};
    memset(&r->model_fp, 0x5a, sizeof(r->model_fp));
    o.model_fp = r->model_fp;
    if (km_arena_open(&o, &r->arena, &report, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    r->layout = *km_arena_layout(r->arena);
    for (uint32_t i = 0; i < BLOCKS; i++)
        data_fill(r, KM_OBJECT_BLOCK, i, 100 + i);
    for (uint32_t i = 0; i < 4; i++)
        data_fill(r, KM_OBJECT_SNAPSHOT, i, 200 + i);
    store_start(r);
    return 0;
}

static int teardown(void **state)
{
    struct rig *r = *state;
    char command[160];
    km_store_close(&r->store);
    km_arena_close(&r->arena);
    snprintf(command, sizeof(command), "rm -rf '%s'", r->dir);
    int rc = system(command);
    free(r);
    return rc;
}

static void there_and_back(struct rig *r)
{
    struct km_store_result w = run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 1, 0);
    assert_int_equal(w.code, ERR_OK);
    assert_true(w.bytes > 0 && w.bytes % 4096 == 0);
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_SNAPSHOT, 1, 2).code, ERR_OK);
    data_same(r, KM_OBJECT_BLOCK, 0, 5, false);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_OK);
    data_same(r, KM_OBJECT_BLOCK, 0, 5, true);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_SNAPSHOT, 1, 3).code, ERR_OK);
    data_same(r, KM_OBJECT_SNAPSHOT, 2, 3, true);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 9, 5).code, ERR_NOT_FOUND);
    assert_int_equal(run(r, KM_STORE_REMOVE, KM_OBJECT_BLOCK, 1, 0).code, ERR_OK);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_NOT_FOUND);
    assert_int_equal(run(r, KM_STORE_REMOVE, KM_OBJECT_BLOCK, 1, 0).code, ERR_OK);
    assert_string_equal(r->off, "");
}

static void what_is_written_comes_back(void **state)
{
    there_and_back(*state);
    print_message("O_DIRECT: %s\n", km_store_direct(((struct rig *)*state)->store) ? "yes" : "no");
}

static void compressed_too(void **state)
{
    struct rig *r = *state;
    uint64_t plain = run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 7, 3).bytes;
    r->zstd = 3;
    store_restart(r);
    there_and_back(r);
    assert_true(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 8, 3).bytes < plain);
    r->zstd = 0;
    store_restart(r);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 8, 4).code, ERR_OK);
    data_same(r, KM_OBJECT_BLOCK, 3, 4, true);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 7, 4).code, ERR_OK);
}

static void a_restart_lists_what_is_there(void **state)
{
    struct rig *r = *state;
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 10 + i, i).code, ERR_OK);
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_SNAPSHOT, 10, 0).code, ERR_OK);
    char command[300];
    snprintf(command, sizeof(command),
             "cd '%s'/*/ && touch tmp-17 junk && mkdir -p 11 && touch 11/junk && : > "
             "11/11111111111111111111111111111111.b",
             r->store_dir);
    assert_int_equal(system(command), 0);
    store_restart(r);
    (void)poll_one(r, NULL);
    assert_int_equal(r->found_count, 6);
    uint32_t snapshots = 0;
    for (uint32_t i = 0; i < r->found_count; i++) {
        assert_true(r->found[i].bytes % 4096 == 0 && r->found[i].bytes > 0);
        snapshots += r->found[i].kind == KM_OBJECT_SNAPSHOT;
    }
    assert_int_equal(snapshots, 1);
    snprintf(command, sizeof(command), "test ! -e '%s'/*/tmp-17", r->store_dir);
    assert_int_equal(system(command), 0);
}

/* The next start tells last use first, and what each stands on. */
static void a_restart_knows_the_order_of_use(void **state)
{
    struct rig *r = *state;
    static const uint32_t order[] = {21, 23, 22, 20};
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 20 + i, i).code, ERR_OK);
        usleep(20000); /* more than a file system's clock ticks */
    }
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 21, 5).code, ERR_OK);
    char path[300];
    object_path(r, KM_OBJECT_BLOCK, 20, path, sizeof(path));
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    store_restart(r);
    (void)poll_one(r, NULL);
    assert_int_equal(r->found_count, 4);
    for (uint32_t i = 0; i < 4; i++) {
        struct hash128 h = hash_of(order[i]), p = hash_of(order[i] + 100);
        assert_memory_equal(&r->found[i].hash, &h, sizeof(h));
        assert_memory_equal(&r->found[i].parent, &p, sizeof(p));
    }
    flip(path, (uint64_t)st.st_size - 4096 + 30); /* of its parent's hash */
    store_restart(r);
    (void)poll_one(r, NULL);
    assert_int_equal(r->found_count, 3);
    assert_int_equal(access(path, F_OK), -1);
}

/* A bit that flips in memory does not get a good checksum on the disk. */
static void damage_in_memory_is_not_written(void **state)
{
    struct rig *r = *state;
    for (uint32_t kind = 0; kind < 2; kind++) {
        uint64_t bytes, at = data_at(r, kind, 1, &bytes);
        data_fill(r, kind, 1, 33);
        commit(r, kind, 7, 1);
        flip(r->arena_path, at + 77);
        assert_int_equal(again(r, KM_STORE_WRITE, kind, 7, 1).code, ERR_CORRUPT);
        assert_int_equal(again(r, KM_STORE_READ, kind, 7, 2).code, ERR_NOT_FOUND);
        flip(r->arena_path, at + 77);
        assert_int_equal(again(r, KM_STORE_WRITE, kind, 7, 1).code, ERR_OK); /* it is not off */
    }
}

/* Every kind of damage costs that object and nothing else. */
static void damage_is_found(void **state)
{
    struct rig *r = *state;
    static const int64_t places[] = {0, 5000, -4096, -4090, -4070, -4050, -4040, -4020, -4004};
    char path[300];
    for (uint32_t i = 0; i < ARRAY_COUNT(places) + 3; i++) {
        uint64_t bytes = run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 30 + i, 0).bytes;
        object_path(r, KM_OBJECT_BLOCK, 30 + i, path, sizeof(path));
        if (i < ARRAY_COUNT(places))
            flip(path, places[i] < 0 ? bytes - (uint64_t)-places[i] : (uint64_t)places[i]);
        else if (i == ARRAY_COUNT(places))
            assert_int_equal(truncate(path, (off_t)bytes - 4096), 0);
        else if (i == ARRAY_COUNT(places) + 1)
            assert_int_equal(truncate(path, 100), 0);
        else
            assert_int_equal(truncate(path, 1 << 30), 0);
        assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 30 + i, 5).code, ERR_CORRUPT);
        assert_int_equal(access(path, F_OK), -1);
        data_same(r, KM_OBJECT_BLOCK, 0, 5, false); /* nothing of it reached the arena */
    }
    /* A good object under another's name. */
    char other[300];
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 60, 0).code, ERR_OK);
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 61, 1).code, ERR_OK);
    object_path(r, KM_OBJECT_BLOCK, 60, path, sizeof(path));
    object_path(r, KM_OBJECT_BLOCK, 61, other, sizeof(other));
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 61, 5).code, ERR_CORRUPT);
    assert_string_equal(r->off, "");
}

/* Two models in turns on one folder: each finds what it left, and hears of the other. */
static void other_models_are_not_read_and_stay(void **state)
{
    struct rig *r = *state;
    uint64_t bytes = run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 1, 0).bytes;
    assert_int_equal(r->others_bytes, 0);
    r->model_fp.bytes[0] ^= 1;
    store_restart(r);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_NOT_FOUND);
    (void)poll_one(r, NULL);
    assert_int_equal(r->found_count, 0);
    assert_int_equal(r->others_bytes, bytes);
    data_fill(r, KM_OBJECT_BLOCK, 1, 4);
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 1, 1).code, ERR_OK);
    r->model_fp.bytes[0] ^= 1;
    store_restart(r);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_OK);
    data_same(r, KM_OBJECT_BLOCK, 0, 5, true);
    data_same(r, KM_OBJECT_BLOCK, 1, 5, false);
    (void)poll_one(r, NULL);
    assert_int_equal(r->found_count, 1);
    assert_int_equal(r->others_bytes, bytes);
}

/* A file system of its own, of 256 KiB: what is there stays readable at the next start. */
static void a_full_file_system_turns_it_off(void **state)
{
    struct rig *r = *state;
    char small[80];
    snprintf(small, sizeof(small), "%s/small", r->dir);
    assert_int_equal(mkdir(small, 0700), 0);
    if (mount("small", small, "tmpfs", MS_NOSUID | MS_NODEV, "size=256k,mode=0700") != 0) {
        print_message("no file system of its own: %s\n", strerror(errno));
        skip();
    }
    km_store_close(&r->store);
    snprintf(r->store_dir, sizeof(r->store_dir), "%s/store", small);
    store_start(r);
    struct km_store_result w = {.code = ERR_OK};
    uint32_t written = 0;
    while (w.code == ERR_OK && written < 64) {
        written++;
        w = run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, written, written % 4);
    }
    assert_int_equal(w.code, ERR_IO);
    assert_true(written > 2 && written < 64);
    (void)poll_one(r, NULL);
    assert_non_null(strstr(r->off, strerror(ENOSPC)));
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_IO);
    store_restart(r);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_OK);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, written, 5).code, ERR_NOT_FOUND);
    (void)poll_one(r, NULL);
    assert_int_equal(r->found_count, written - 1);
    km_store_close(&r->store);
    assert_int_equal(umount(small), 0);
}

/* A write that fails (here for a bound on file sizes) turns the tier off, with the reason. */
static void a_full_disk_turns_it_off(void **state)
{
    struct rig *r = *state;
    struct rlimit old, small = {4096, 4096};
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 1, 0).code, ERR_OK);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct km_store_result w = run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 2, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(w.code, ERR_IO);
    (void)poll_one(r, NULL);
    assert_non_null(strstr(r->off, "cannot be written"));
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_IO);
    store_restart(r);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 1, 5).code, ERR_OK);
    assert_int_equal(run(r, KM_STORE_READ, KM_OBJECT_BLOCK, 2, 5).code, ERR_NOT_FOUND);
}

static void a_folder_that_goes_away_turns_it_off(void **state)
{
    struct rig *r = *state;
    char command[200];
    snprintf(command, sizeof(command), "rm -rf '%s'", r->store_dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(run(r, KM_STORE_WRITE, KM_OBJECT_BLOCK, 2, 1).code, ERR_IO);
    (void)poll_one(r, NULL);
    assert_non_null(strstr(r->off, "cannot be made"));
}

static void bad_folders_are_refused(void **state)
{
    struct rig *r = *state;
    struct km_store *other = NULL;
    struct err_detail detail = {{0}};
    struct km_store_options o = {
        .dir = r->store_dir, .arena_fd = km_arena_fd(r->arena), .layout = &r->layout, .wake = wake};
    assert_int_equal(km_store_open(&o, &other, &detail), ERR_BUSY);
    assert_non_null(strstr(detail.text, "in use"));
    char open_dir[128];
    snprintf(open_dir, sizeof(open_dir), "%s/open", r->dir);
    assert_int_equal(mkdir(open_dir, 0755), 0);
    o.dir = open_dir;
    assert_int_equal(km_store_open(&o, &other, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "0700"));
    o.dir = "/nonexistent-folder/store";
    assert_int_equal(km_store_open(&o, &other, &detail), ERR_IO);
    assert_null(other);
}

static void many_at_once(void **state)
{
    struct rig *r = *state;
    for (uint32_t i = 0; i < 5; i++)
        commit(r, KM_OBJECT_BLOCK, i, i);
    for (uint32_t i = 0; i < KM_STORE_MAX; i++) {
        struct km_store_item it = {.op = i % 2 ? KM_STORE_READ : KM_STORE_WRITE,
                                   .kind = KM_OBJECT_BLOCK,
                                   .index = i % 2 ? 5 + i % 3 : i % 5,
                                   .token_count = 16,
                                   .hash = hash_of(i / 2 % 100)};
        km_store_submit(r->store, &it);
    }
    struct km_store_result result;
    for (uint32_t i = 0; i < KM_STORE_MAX; i++) {
        assert_true(poll_one(r, &result));
        assert_int_equal(result.code, ERR_OK);
    }
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(what_is_written_comes_back),
        CASE(compressed_too),
        CASE(a_restart_lists_what_is_there),
        CASE(a_restart_knows_the_order_of_use),
        CASE(damage_is_found),
        CASE(damage_in_memory_is_not_written),
        CASE(other_models_are_not_read_and_stay),
        CASE(a_full_file_system_turns_it_off),
        CASE(a_full_disk_turns_it_off),
        CASE(a_folder_that_goes_away_turns_it_off),
        CASE(bad_folders_are_refused),
        CASE(many_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
