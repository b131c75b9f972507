/* SPDX-License-Identifier: Apache-2.0 */
/* The authority alone at the size it is made for: 23,438 blocks (6 M tokens), 100,000 sessions,
 * 1,000,000 objects on the tier.  Prints what it measures; with TANDEM_LONG it also holds the
 * bounds on time, which a busy machine may miss. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_core.h"
#include "kvmgr/km_event.h"
#include "kvmgr/km_pool.h"
#include "kvmgr/km_session.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/rng.h"

#define BLOCKS    23438u
#define SNAPSHOTS 2048u
#define SESSIONS  100000u
#define OBJECTS   1000000u
#define BT        256u
#define SEQS      16u
#define TURNS_MAX 100000u
#define CHAIN     64u

struct timing {
    const char *what;
    uint32_t count;
    uint64_t *ns;
};

static uint32_t turns_wanted(void)
{
    return getenv("TANDEM_LONG") ? TURNS_MAX : 20000;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int by_value(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return a < b ? -1 : a > b;
}

static void timing_print(struct timing *t)
{
    qsort(t->ns, t->count, sizeof(*t->ns), by_value);
    uint64_t p99 = t->ns[(uint64_t)t->count * 99 / 100];
    print_message("%-8s %7u times: p50 %6.1f us, p99 %6.1f us, max %7.1f us\n", t->what, t->count,
                  (double)t->ns[t->count / 2] / 1e3, (double)p99 / 1e3,
                  (double)t->ns[t->count - 1] / 1e3);
    if (getenv("TANDEM_LONG"))
        assert_true(p99 <= 100000);
    free(t->ns);
}

struct rig {
    struct km_core *core;
    struct km_actions actions;
    uint64_t now_us;
    uint32_t granted, live_slots;
    uint64_t lease;
    uint32_t reused, code;
};

static void step(struct rig *r, struct km_event event, struct timing *t)
{
    event.now_us = r->now_us += 5000;
    uint64_t begin = now_ns();
    km_core_step(r->core, &event, &r->actions);
    if (t)
        t->ns[t->count++] = now_ns() - begin;
    for (uint32_t i = 0; i < r->actions.count; i++) {
        const struct km_action *a = &r->actions.list[i];
        if (a->type != KM_ACTION_SEND)
            continue;
        const struct msg *m = &a->u.send.msg;
        if (m->type == MSG_KV_OPEN_REPLY) {
            r->code = m->u.kv_open_reply.code;
            r->lease = m->u.kv_open_reply.lease;
            r->reused = m->u.kv_open_reply.reusable_tokens / BT;
        } else if (m->type == MSG_KV_ATTACH_REPLY) {
            assert_int_equal(m->u.kv_attach_reply.code, ERR_OK);
            r->granted = m->u.kv_attach_reply.granted[0];
        } else if (m->type == MSG_KV_SNAPSHOT_REPLY) {
            assert_int_equal(m->u.kv_snapshot_reply.code, ERR_OK);
            r->granted = m->u.kv_snapshot_reply.granted[0];
        }
    }
}

static void send_msg(struct rig *r, const struct msg *m, struct timing *t)
{
    struct km_event event = {.type = KM_EVENT_MSG};
    event.u.msg.peer = (struct km_peer){.count = 1, .bytes = "w"};
    event.u.msg.msg = m;
    step(r, event, t);
}

static void rig_start(struct rig *r, const struct km_arena_result *arena)
{
    struct km_core_options o = {.epoch = 1,
                                .incarnation = 1,
                                .block_tokens = BT,
                                .sessions_max = SESSIONS,
                                .session_percent = 50,
                                .tenant_percent = 100,
                                .pin_us = 1800000000u,
                                .tier_bytes_max = 1ull << 50,
                                .tier_objects_max = OBJECTS + OBJECTS / 8};
    *r = (struct rig){.now_us = 1000000};
    r->core = km_core_create(&o);
    struct msg m = {.type = MSG_KV_ATTACH};
    m.u.kv_attach = (struct msg_kv_attach){
        .incarnation = 1, .dsa_layers = 11, .seqs_max = SEQS, .ranks = 1, .state_bytes = 1};
    send_msg(r, &m, NULL);
    struct km_event event = {.type = KM_EVENT_ARENA};
    event.u.arena = *arena;
    uint64_t begin = now_ns();
    step(r, event, NULL);
    if (arena->found_count > 0) {
        double seconds = (double)(now_ns() - begin) / 1e9;
        print_message("re-adoption of %u blocks, %u snapshots: %.3f s\n", arena->found_count,
                      arena->found_snapshot_count, seconds);
        assert_true(!getenv("TANDEM_LONG") || seconds <= 2);
    }
}

static const struct km_arena_result arena_empty = {.code = ERR_OK,
                                                   .text = "",
                                                   .path = "",
                                                   .block_count = BLOCKS,
                                                   .live_count = SEQS,
                                                   .slot_count = SEQS + SNAPSHOTS};

static void chain_of(uint32_t session, uint32_t count, struct hash128 *ret)
{
    struct rng rng;
    rng_init(&rng, session);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t words[2] = {rng_u64(&rng), rng_u64(&rng)};
        memcpy(&ret[i], words, sizeof(words));
    }
}

static void turns_at_full_size(void **state)
{
    struct rig r;
    struct rng rng;
    struct timing open = {"open", 0, calloc(TURNS_MAX, 8)};
    struct timing extend = {"extend", 0, calloc(TURNS_MAX, 8)};
    struct timing commit = {"commit", 0, calloc(TURNS_MAX, 8)};
    struct timing snapshot = {"snapshot", 0, calloc(TURNS_MAX, 8)};
    struct timing release = {"release", 0, calloc(TURNS_MAX, 8)};
    uint64_t hits = 0;
    uint32_t turns = turns_wanted();
    rig_start(&r, &arena_empty);
    rng_init(&rng, 0x5ca1e);
    for (uint32_t i = 0; i < turns; i++) {
        struct hash128 hashes[CHAIN];
        /* Half of the turns are of sessions that come often. */
        uint32_t session = rng_below(&rng, 2) ? rng_below(&rng, 150) : 1000 + i;
        uint32_t count = 4 + session % (CHAIN - 4);
        char key[32];
        snprintf(key, sizeof(key), "session-%u", session);
        chain_of(session, count, hashes);
        struct msg m = {.type = MSG_KV_OPEN, .epoch = 1, .id = {{1}}};
        m.u.kv_open = (struct msg_kv_open){.session_key = key,
                                           .cache_salt = "",
                                           .prompt_count = count * BT + 1,
                                           .blocks_wanted = count + 1,
                                           .hash_count = count,
                                           .hashes = hashes,
                                           .reuse_max = count * BT};
        send_msg(&r, &m, &open);
        assert_int_equal(r.code, ERR_OK);
        hits += r.reused > 0;
        m = (struct msg){.type = MSG_KV_EXTEND, .epoch = 1};
        m.u.kv_extend = (struct msg_kv_extend){r.lease, count + 1, 1};
        send_msg(&r, &m, &extend);
        if (r.reused < count) {
            m = (struct msg){.type = MSG_KV_COMMIT, .epoch = 1};
            m.u.kv_commit = (struct msg_kv_commit){r.lease, r.reused, count * BT + 1,
                                                   count - r.reused, hashes + r.reused};
            send_msg(&r, &m, &commit);
            m = (struct msg){.type = MSG_KV_SNAPSHOT, .epoch = 1};
            m.u.kv_snapshot =
                (struct msg_kv_snapshot){r.lease, count * BT, hashes[count - 1], r.granted};
            send_msg(&r, &m, &snapshot);
        }
        m = (struct msg){.type = MSG_KV_RELEASE, .epoch = 1};
        m.u.kv_release = (struct msg_kv_release){r.lease, count * BT + 1, true};
        send_msg(&r, &m, &release);
        if (i % 100 == 0)
            step(&r, (struct km_event){.type = KM_EVENT_TICK}, NULL);
    }
    timing_print(&open);
    timing_print(&extend);
    timing_print(&commit);
    timing_print(&snapshot);
    timing_print(&release);
    struct km_core_cache cache = km_core_cache(r.core);
    print_message("%llu of %u turns reused something; %u sessions, %u snapshots kept\n",
                  (unsigned long long)hits, turns, cache.sessions, cache.snapshots_kept);
    assert_true(hits > turns / 4);
    km_pool_audit(km_core_pool(r.core));
    const struct km_pool *p = km_core_pool(r.core);
    double index = (double)km_index_bytes(km_pool_index(p)) / BLOCKS;
    double sessions = (double)km_sessions_bytes(km_pool_sessions(p)) / SESSIONS;
    print_message("memory: %.1f bytes a block, %.1f a session\n", index, sessions);
    assert_true(index <= 64 && sessions <= 256);
    km_core_destroy(&r.core);
}

/* A session of more blocks than an open reads from the tier: its map gets the whole front. */
static void a_long_session_is_mapped_whole(void **state)
{
    enum { LONG = 9000, MORE = 50 };
    struct rig r;
    rig_start(&r, &arena_empty);
    struct hash128 *hashes = calloc(LONG + MORE, sizeof(*hashes));
    chain_of(77, LONG + MORE, hashes);
    for (uint32_t turn = 0; turn < 2; turn++) {
        uint32_t count = turn == 0 ? LONG : LONG + MORE;
        struct msg m = {.type = MSG_KV_OPEN, .epoch = 1, .id = {{1}}};
        m.u.kv_open = (struct msg_kv_open){.session_key = "long",
                                           .cache_salt = "",
                                           .prompt_count = count * BT + 1,
                                           .blocks_wanted = count + 1,
                                           .hash_count = count,
                                           .hashes = hashes,
                                           .reuse_max = count * BT};
        send_msg(&r, &m, NULL);
        assert_int_equal(r.code, ERR_OK);
        assert_int_equal(r.reused, turn == 0 ? 0 : LONG);
        m = (struct msg){.type = MSG_KV_COMMIT, .epoch = 1};
        m.u.kv_commit = (struct msg_kv_commit){r.lease, r.reused, count * BT + 1, count - r.reused,
                                               hashes + r.reused};
        send_msg(&r, &m, NULL);
        const struct km_action *a = &r.actions.list[r.actions.count - 1];
        assert_int_equal(a->type, KM_ACTION_SESSION);
        assert_int_equal(a->u.session.first_block, 0);
        assert_int_equal(a->u.session.count, count);
        for (uint32_t i = 0; i < count; i++)
            assert_memory_equal(&a->u.session.hashes[i], &hashes[i], sizeof(*hashes));
        m = (struct msg){.type = MSG_KV_SNAPSHOT, .epoch = 1};
        m.u.kv_snapshot =
            (struct msg_kv_snapshot){r.lease, count * BT, hashes[count - 1], r.granted};
        send_msg(&r, &m, NULL);
        m = (struct msg){.type = MSG_KV_RELEASE, .epoch = 1};
        m.u.kv_release = (struct msg_kv_release){r.lease, count * BT + 1, true};
        send_msg(&r, &m, NULL);
    }
    free(hashes);
    km_core_destroy(&r.core);
}

static void objects_at_full_size(void **state)
{
    struct km_tier *t = NULL;
    struct rng rng;
    rng_init(&rng, 0x0b1ec7);
    assert_int_equal(km_tier_create(OBJECTS, 1ull << 50, &t), ERR_OK);
    double bytes = (double)km_tier_memory(t) / OBJECTS;
    print_message("memory: %.1f bytes an object of the tier\n", bytes);
    assert_true(bytes <= 64.01); /* two words of rounding in all */
    uint64_t begin = now_ns();
    struct hash128 h, before = {{0}};
    for (uint32_t i = 0; i < OBJECTS; i++) {
        uint64_t words[2] = {rng_u64(&rng), rng_u64(&rng)};
        memcpy(&h, words, sizeof(words));
        assert_true(km_tier_add(t, i % 8 == 0, &h, &before, 1500000));
        if (i % 8)
            before = h;
    }
    double seconds = (double)(now_ns() - begin) / 1e9;
    print_message("index of %u objects: %.3f s\n", OBJECTS, seconds);
    struct timing find = {"find", 0, calloc(100000, 8)};
    for (uint32_t i = 0; i < 100000; i++) {
        uint64_t words[2] = {rng_u64(&rng), rng_u64(&rng)};
        memcpy(&h, words, sizeof(words));
        uint64_t at = now_ns();
        assert_false(km_tier_has(t, KM_OBJECT_BLOCK, &h));
        find.ns[find.count++] = now_ns() - at;
    }
    timing_print(&find);
    km_tier_destroy(&t);
}

static void adoption_at_full_size(void **state)
{
    struct km_found_block *found = calloc(BLOCKS, sizeof(*found));
    struct km_found_snapshot *snapshots = calloc(SNAPSHOTS, sizeof(*snapshots));
    struct km_arena_result arena = arena_empty;
    uint32_t chains = BLOCKS / CHAIN < SNAPSHOTS ? BLOCKS / CHAIN : SNAPSHOTS;
    struct hash128 hashes[CHAIN];
    for (uint32_t position = 0; position < CHAIN; position++) {
        for (uint32_t c = 0; c < chains; c++) {
            chain_of(c, CHAIN, hashes);
            struct km_found_block *f = &found[arena.found_count];
            *f = (struct km_found_block){
                .hash = hashes[position], .block = arena.found_count, .position = position};
            if (position > 0)
                f->parent = hashes[position - 1];
            arena.found_count++;
            if (position + 1 == CHAIN)
                snapshots[arena.found_snapshot_count++] =
                    (struct km_found_snapshot){hashes[position], SEQS + c, CHAIN * BT, true};
        }
    }
    arena.found = found;
    arena.found_snapshots = snapshots;
    struct rig r;
    rig_start(&r, &arena);
    assert_int_equal(km_core_counts(r.core).blocks_cached, chains * CHAIN);
    km_pool_audit(km_core_pool(r.core));
    km_core_destroy(&r.core);
    free(found);
    free(snapshots);
}

/* A file of real size whose headers are all committed.  Its data are a hole: they are not read
 * before they are wanted, so what takes the time is all here. */
static void a_full_file_is_adopted_by_its_headers(void **state)
{
    char path[64] = P_tmpdir "/tandem-scale-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    unlink(path);
    struct km_arena_options o = {.path = path,
                                 .arena_bytes = 64ull << 30,
                                 .geometry = {.dsa_layers = 11,
                                              .latent_dim = 512,
                                              .index_dim = 128,
                                              .index_kpool = 4,
                                              .block_tokens = BT,
                                              .kv_dtype = KV_FP8,
                                              .index_dtype = KV_FP8,
                                              .snapshot_dtype = KV_F32,
                                              .ranks = 2,
                                              .interleave = 64,
                                              .state_bytes = 4096},
                                 .live_count = SEQS,
                                 .slot_count = SEQS + SNAPSHOTS,
                                 .epoch = 1,
                                 .incarnation = 1};
    struct km_arena_report report;
    struct km_arena *a = NULL;
    struct kv_layout l;
    struct err_detail detail = {{0}};
    struct kv_slots slots = {SEQS, SEQS + SNAPSHOTS};
    if (kv_layout_of(&o.geometry, BLOCKS, slots, &l, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    o.arena_bytes = l.arena_bytes;
    if (km_arena_open(&o, &a, &report, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    if (km_arena_layout(a)->block_count < BLOCKS) { /* the file system is smaller */
        print_message("no room for a file of %.1f GiB\n", (double)l.arena_bytes / (1u << 30));
        km_arena_close(&a);
        unlink(path);
        skip();
    }
    l = *km_arena_layout(a);
    fd = km_arena_fd(a);
    uint32_t chains = BLOCKS / CHAIN;
    struct hash128 hashes[CHAIN];
    for (uint32_t block = 0; block < chains * CHAIN; block++) {
        uint32_t at = block % CHAIN;
        if (at == 0)
            chain_of(block / CHAIN, CHAIN, hashes);
        struct kv_block_header h = {
            .hash = hashes[at], .state = KV_COMMITTED, .epoch = 1, .position = at, .data_crc = 1};
        if (at > 0)
            h.parent = hashes[at - 1];
        kv_block_header_seal(&h);
        assert_int_equal(pwrite(fd, &h, sizeof(h), (off_t)(l.block_headers_at + block * sizeof(h))),
                         sizeof(h));
    }
    for (uint32_t c = 0; c < chains; c++) {
        chain_of(c, CHAIN, hashes);
        struct kv_slot_header h = {.hash = hashes[CHAIN - 1],
                                   .kind = KV_SLOT_SNAPSHOT,
                                   .state = KV_COMMITTED,
                                   .epoch = 1,
                                   .token_count = CHAIN * BT,
                                   .data_crc = 1};
        kv_slot_header_seal(&h);
        assert_int_equal(
            pwrite(fd, &h, sizeof(h), (off_t)(l.slot_headers_at + (SEQS + c) * sizeof(h))),
            sizeof(h));
    }
    km_arena_close(&a);
    o.epoch = 2;
    uint64_t begin = now_ns();
    assert_int_equal(km_arena_open(&o, &a, &report, &detail), ERR_OK);
    double seconds = (double)(now_ns() - begin) / 1e9;
    assert_true(report.adopted);
    assert_int_equal(report.blocks_found, chains * CHAIN);
    assert_int_equal(report.snapshots_found, chains);
    print_message("file of %.1f GiB, %u blocks: %.3f s to its headers\n",
                  (double)l.arena_bytes / (1u << 30), report.blocks_found, seconds);
    assert_true(seconds <= 2);
    struct km_arena_found found = km_arena_found(a);
    struct km_arena_result result = arena_empty;
    result.found_count = found.block_count;
    result.found = found.blocks;
    result.found_snapshot_count = found.snapshot_count;
    result.found_snapshots = found.snapshots;
    struct rig r;
    rig_start(&r, &result);
    assert_int_equal(km_core_unproven(r.core), chains * CHAIN);
    km_core_destroy(&r.core);
    km_arena_close(&a);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(turns_at_full_size),
        cmocka_unit_test(a_long_session_is_mapped_whole),
        cmocka_unit_test(objects_at_full_size),
        cmocka_unit_test(adoption_at_full_size),
        cmocka_unit_test(a_full_file_is_adopted_by_its_headers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
