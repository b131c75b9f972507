/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_audit.h"
#include "kvmgr/km_event.h"
#include "kvmgr/km_proof.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"
#include "lib/base/rng.h"

#define SLOTS 5u
#define LIVE  3u

static char folder[64];
static char path[128];

static struct km_arena_options options_of(uint32_t epoch)
{
    struct km_arena_options o = {
        .path = path,
        .arena_bytes = 4u << 20,
        .geometry = {.dsa_layers = 2,
                     .latent_dim = 32,
                     .index_dim = 16,
                     .index_kpool = 4,
                     .block_tokens = 64,
                     .kv_dtype = KV_F32,
                     .index_dtype = KV_F32,
                     .snapshot_dtype = KV_F32,
                     .rank = 0,
                     .ranks = 1,
                     .interleave = 64,
                     .state_bytes = 5000},
        .live_count = LIVE,
        .slot_count = SLOTS,
        .epoch = epoch,
        .incarnation = 0x1234567890abcdefull + epoch,
    };
    memset(&o.model_fp, 0x5a, sizeof(o.model_fp));
    return o;
}

static struct km_arena *open_good(const struct km_arena_options *o, struct km_arena_report *report)
{
    struct km_arena *a = NULL;
    struct err_detail detail = {{0}};
    enum err e = km_arena_open(o, &a, report, &detail);
    if (e != ERR_OK)
        fail_msg("%s: %s", err_name(e), detail.text);
    return a;
}

static enum err open_bad(const struct km_arena_options *o, struct err_detail *detail)
{
    struct km_arena *a = NULL;
    struct km_arena_report report;
    memset(detail, 0, sizeof(*detail));
    enum err e = km_arena_open(o, &a, &report, detail);
    assert_int_not_equal(e, ERR_OK);
    assert_null(a);
    assert_true(detail->text[0] != '\0');
    return e;
}

static struct km_audit audit_now(void)
{
    struct km_audit audit;
    struct err_detail detail = {{0}};
    enum err e = km_audit_read(path, &audit, &detail);
    if (e != ERR_OK)
        fail_msg("%s: %s", err_name(e), detail.text);
    return audit;
}

static void poke(uint64_t at, const void *bytes, size_t count)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, count, (off_t)at), (ssize_t)count);
    close(fd);
}

static void flip(uint64_t at, uint8_t mask)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= mask;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

/* Leaves an arena with 3 writing and 2 committed blocks and one slot in use. */
static struct kv_layout make_used(void)
{
    struct km_arena_options o = options_of(1);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    struct kv_layout layout = *km_arena_layout(a);
    uint32_t blocks[] = {0, 3, 7, 8, 100}, slot = 2;
    struct hash128 parent = {{0}}, hashes[2];
    memset(hashes, 0x77, sizeof(hashes));
    km_arena_blocks_writing(a, blocks, 5);
    km_arena_blocks_commit(a, blocks, 2, 0, &parent, hashes);
    km_arena_slots_writing(a, &slot, 1, false);
    km_arena_close(&a);
    assert_null(a);
    return layout;
}

static int setup(void **state)
{
    snprintf(folder, sizeof(folder), P_tmpdir "/tandem-arena-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof(path), "%s/arena.kv", folder);
    return 0;
}

static int teardown(void **state)
{
    char command[160];
    snprintf(command, sizeof(command), "rm -rf '%s'", folder);
    return system(command);
}

static void fresh_file_is_private_and_sparse(void **state)
{
    struct km_arena_options o = options_of(3);
    o.arena_bytes = 64u << 20;
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    assert_false(report.adopted);
    assert_false(report.replaced);
    const struct kv_layout *layout = km_arena_layout(a);
    assert_true(layout->block_count > 1000);
    assert_int_equal(layout->slot_count, SLOTS);
    uint32_t last = layout->block_count - 1;
    km_arena_blocks_writing(a, &last, 1);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    assert_int_equal((uint64_t)st.st_size, layout->arena_bytes);
    assert_true((uint64_t)st.st_blocks * 512 < 256u << 10);
    km_arena_close(&a);
    struct km_audit audit = audit_now();
    assert_true(km_audit_sound(&audit));
    assert_int_equal(audit.superblock.epoch, 3);
    assert_int_equal(audit.blocks_by_state[KV_WRITING], 1);
    assert_int_equal(km_audit_epoch(path), 3);
}

static void states_generations_and_seals(void **state)
{
    struct km_arena_options o = options_of(1);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    struct kv_layout layout = *km_arena_layout(a);
    uint32_t blocks[] = {4, 2};
    struct hash128 parent, hashes[2];
    memset(&parent, 9, sizeof(parent));
    memset(hashes, 8, sizeof(hashes));
    for (uint64_t round = 0; round < 3; round++) {
        km_arena_blocks_writing(a, blocks, 2);
        km_arena_blocks_commit(a, blocks, 2, 10, &parent, hashes);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        struct kv_block_header h;
        assert_int_equal(
            pread(fd, &h, sizeof(h), (off_t)(layout.block_headers_at + 2 * KV_HEADER_BYTES)),
            sizeof(h));
        close(fd);
        assert_int_equal(kv_block_header_check(&h), ERR_OK);
        assert_int_equal(h.state, KV_COMMITTED);
        assert_int_equal(h.position, 11);
        assert_int_equal(h.epoch, 1);
        assert_int_equal(h.generation, round);
        assert_memory_equal(&h.parent, &hashes[0], sizeof(h.parent));
        km_arena_blocks_free(a, blocks, 2);
    }
    km_arena_close(&a);
    struct km_audit audit = audit_now();
    assert_int_equal(audit.blocks_by_state[KV_FREE], 2);
    assert_int_equal(audit.blocks_unused, layout.block_count - 2);
}

static void good_file_is_adopted(void **state)
{
    struct kv_layout layout = make_used();
    struct km_audit audit = audit_now();
    assert_int_equal(audit.blocks_by_state[KV_WRITING], 3);
    assert_int_equal(audit.blocks_by_state[KV_COMMITTED], 2);
    assert_int_equal(audit.slots_by_state[KV_WRITING], 1);
    struct stat before, after;
    assert_int_equal(stat(path, &before), 0);
    struct km_arena_options o = options_of(2);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    assert_true(report.adopted);
    assert_int_equal(report.blocks_freed, 3);
    assert_int_equal(report.blocks_found, 2);
    assert_int_equal(report.headers_broken, 0);
    assert_int_equal(km_arena_layout(a)->block_count, layout.block_count);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    km_arena_close(&a);
    audit = audit_now();
    assert_true(km_audit_sound(&audit));
    assert_int_equal(audit.superblock.epoch, 2);
    assert_int_equal(audit.blocks_by_state[KV_FREE], 3);
    assert_int_equal(audit.blocks_by_state[KV_WRITING], 0);
    assert_int_equal(audit.blocks_by_state[KV_COMMITTED], 2);
    assert_int_equal(audit.slots_by_state[KV_WRITING], 0);
}

static void fewer_slots_wanted_still_adopts(void **state)
{
    (void)make_used();
    struct km_arena_options o = options_of(2);
    o.live_count = LIVE - 2;
    o.slot_count = SLOTS - 2;
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    assert_true(report.adopted);
    assert_int_equal(km_arena_layout(a)->slot_count, SLOTS);
    assert_int_equal(km_arena_layout(a)->live_count, LIVE - 2); /* the border moves ... */
    km_arena_close(&a);
    assert_int_equal(audit_now().superblock.live_count, LIVE - 2);
}

static void expect_replaced(const struct km_arena_options *o, const char *why);

/* ... but not where snapshots are smaller than live states. */
static void the_border_stays_where_sizes_differ(void **state)
{
    struct km_arena_options o = options_of(1);
    struct km_arena_report report;
    uint32_t slot = SLOTS - 1;
    struct hash128 hash = {{9}};
    o.geometry.snapshot_dtype = KV_BF16;
    struct km_arena *a = open_good(&o, &report);
    struct kv_layout l = *km_arena_layout(a);
    assert_int_equal(l.live_bytes, 8192);
    assert_int_equal(l.snapshot_bytes, 4096);
    km_arena_slots_writing(a, &slot, 1, true);
    km_arena_snapshot_commit(a, slot, 64, &hash);
    km_arena_close(&a);

    o.epoch = 2;
    o.live_count = LIVE - 1;
    o.slot_count = SLOTS - 1;
    a = open_good(&o, &report);
    assert_true(report.adopted);
    assert_int_equal(report.snapshots_found, 1);
    assert_int_equal(km_arena_layout(a)->live_count, LIVE);
    km_arena_close(&a);
    flip(l.slots_at + LIVE * l.live_bytes + 4096 + 7, 1); /* what the snapshot's sum is of */
    struct km_audit audit = audit_now();
    assert_int_equal(audit.data_broken, 1);
    assert_int_equal(audit.superblock.snapshot_dtype, KV_BF16);

    o.epoch = 3;
    o.live_count = 1;
    o.slot_count = 2;
    o.slot_count_min = 2; /* two snapshots are left, of one that is asked for */
    a = open_good(&o, &report);
    assert_true(report.adopted);
    km_arena_close(&a);
    o.epoch = 4;
    o.slot_count = o.slot_count_min = 4; /* three are asked for */
    expect_replaced(&o, "5 state slots, 6 are needed");
    o.epoch = 5;
    o.live_count = 2;
    o.slot_count = o.slot_count_min = 4;
    expect_replaced(&o, "1 live slots, 2 are needed");
}

static void broken_headers_are_freed_and_counted(void **state)
{
    struct kv_layout layout = make_used();
    flip(layout.block_headers_at + 3 * KV_HEADER_BYTES + 40, 0x10);
    uint8_t junk[KV_HEADER_BYTES];
    memset(junk, 0xee, sizeof(junk));
    poke(layout.block_headers_at + 50 * KV_HEADER_BYTES, junk, sizeof(junk));
    poke(layout.slot_headers_at, junk, sizeof(junk));
    struct km_audit audit = audit_now();
    assert_false(km_audit_sound(&audit));
    assert_int_equal(audit.headers_broken, 3);
    struct km_arena_options o = options_of(2);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    assert_true(report.adopted);
    assert_int_equal(report.headers_broken, 3);
    assert_int_equal(report.blocks_freed, 3);
    assert_int_equal(report.blocks_found, 1);
    km_arena_close(&a);
    audit = audit_now();
    assert_true(km_audit_sound(&audit));
}

static void expect_replaced(const struct km_arena_options *o, const char *why)
{
    struct km_arena_report report;
    struct km_arena *a = open_good(o, &report);
    assert_false(report.adopted);
    assert_true(report.replaced);
    if (!strstr(report.reason, why))
        fail_msg("reason is \"%s\", not about \"%s\"", report.reason, why);
    km_arena_close(&a);
    struct km_audit audit = audit_now();
    assert_true(km_audit_sound(&audit));
    assert_int_equal(audit.blocks_by_state[KV_COMMITTED], 0);
}

static void bad_files_are_replaced(void **state)
{
    struct km_arena_options o = options_of(2);
    (void)make_used();
    flip(0, 1);
    expect_replaced(&o, "magic");
    (void)make_used();
    flip(4, 2);
    expect_replaced(&o, "version");
    (void)make_used();
    flip(44, 0x80);
    expect_replaced(&o, "crc");
    (void)make_used();
    assert_int_equal(truncate(path, 100), 0);
    expect_replaced(&o, "no superblock");
    (void)make_used();
    assert_int_equal(truncate(path, 0), 0);
    expect_replaced(&o, "no superblock");
    (void)make_used();
    assert_int_equal(truncate(path, 1u << 20), 0);
    expect_replaced(&o, "the file has");
    (void)make_used();
    assert_int_equal(truncate(path, 8u << 20), 0);
    expect_replaced(&o, "blocks in");
    (void)make_used();
    assert_int_equal(chmod(path, 0644), 0);
    expect_replaced(&o, "mode");
    (void)make_used();
    char other[160];
    snprintf(other, sizeof(other), "%s/link", folder);
    assert_int_equal(link(path, other), 0);
    expect_replaced(&o, "names");
}

static void foreign_files_are_replaced(void **state)
{
    (void)make_used();
    struct km_arena_options o = options_of(2);
    o.geometry.latent_dim = 40;
    expect_replaced(&o, "layout_fp");
    o = options_of(3);
    expect_replaced(&o, "layout_fp");
    o = options_of(4);
    o.model_fp.bytes[3] ^= 1;
    expect_replaced(&o, "model_fp");
    o = options_of(5);
    o.model_fp.bytes[3] ^= 1;
    o.arena_bytes = 6u << 20;
    expect_replaced(&o, "arena_bytes");
    o.slot_count = SLOTS + 1;
    expect_replaced(&o, "slots");
    o.slot_count = 100;
    expect_replaced(&o, "slots");
    o.live_count = 1;
    o.slot_count = 2;
    expect_replaced(&o, "only 2 are needed");
    o.geometry.snapshot_dtype = KV_BF16;
    expect_replaced(&o, "its snapshots are f32, snapshot_dtype says bf16");
    o.geometry.snapshot_dtype = KV_F32;
    expect_replaced(&o, "its snapshots are bf16, snapshot_dtype says f32");
    o.epoch = 1;
    expect_replaced(&o, "epoch 5 is later");
}

/* The old file keeps its bytes for whoever still maps it. */
static void replacing_leaves_the_old_inode(void **state)
{
    (void)make_used();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat before, after;
    assert_int_equal(fstat(fd, &before), 0);
    struct km_arena_options o = options_of(2);
    o.arena_bytes = 1u << 20;
    expect_replaced(&o, "arena_bytes");
    assert_int_equal(fstat(fd, &after), 0);
    assert_int_equal(before.st_size, after.st_size);
    struct kv_superblock s;
    assert_int_equal(pread(fd, &s, sizeof(s), 0), sizeof(s));
    assert_int_equal(s.epoch, 1);
    close(fd);
}

static void what_is_no_file_is_refused(void **state)
{
    struct km_arena_options o = options_of(1);
    struct err_detail detail;
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(open_bad(&o, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "directory"));
    assert_int_equal(rmdir(path), 0);

    char target[160];
    snprintf(target, sizeof(target), "%s/target", folder);
    int fd = open(target, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_int_equal(write(fd, "precious", 8), 8);
    close(fd);
    assert_int_equal(symlink(target, path), 0);
    assert_int_equal(open_bad(&o, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "symbolic link"));
    struct stat st;
    assert_int_equal(stat(target, &st), 0);
    assert_int_equal(st.st_size, 8);
    unlink(path);

    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(open_bad(&o, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "pipe"));
    unlink(path);

    if (geteuid() == 0) {
        (void)make_used();
        assert_int_equal(chown(path, 1, 1), 0);
        assert_int_equal(open_bad(&o, &detail), ERR_UNSUPPORTED);
        assert_non_null(strstr(detail.text, "belongs to"));
        unlink(path);
    }
    o.path = "/nonexistent-folder/arena.kv";
    assert_int_equal(open_bad(&o, &detail), ERR_IO);
}

static void one_owner_at_a_time(void **state)
{
    struct km_arena_options o = options_of(1);
    struct km_arena_report report;
    struct err_detail detail;
    struct km_arena *a = open_good(&o, &report);
    assert_int_equal(open_bad(&o, &detail), ERR_BUSY);
    assert_non_null(strstr(detail.text, "in use"));
    km_arena_close(&a);
    a = open_good(&o, &report);
    assert_true(report.adopted);
    km_arena_close(&a);
}

static void impossible_sizes_are_refused(void **state)
{
    struct km_arena_options o = options_of(1);
    struct err_detail detail;
    o.arena_bytes = 20000;
    assert_int_equal(open_bad(&o, &detail), ERR_NOMEM);
    assert_non_null(strstr(detail.text, "20000"));
    o = options_of(1);
    o.geometry.index_kpool = 5;
    assert_int_equal(open_bad(&o, &detail), ERR_INVALID);
    o = options_of(1);
    o.geometry.state_bytes = UINT64_MAX;
    assert_int_equal(open_bad(&o, &detail), ERR_INVALID);
    struct stat st;
    assert_int_not_equal(stat(path, &st), 0); /* nothing was made */
}

/* A good file with random bytes changed: opens, and is sound afterwards. */
static void random_damage_is_survived(void **state)
{
    struct rng rng;
    rng_init(&rng, 0x6b6d0002);
    for (uint32_t round = 0; round < 200; round++) {
        struct kv_layout layout = make_used();
        uint32_t flips = 1 + rng_below(&rng, 8);
        for (uint32_t i = 0; i < flips; i++) {
            uint64_t bound = rng_below(&rng, 2) ? 128 : layout.blocks_at;
            flip(rng_below(&rng, (uint32_t)bound), (uint8_t)(1u << rng_below(&rng, 8)));
        }
        if (rng_below(&rng, 10) == 0)
            assert_int_equal(truncate(path, rng_below(&rng, 5u << 20)), 0);
        struct km_arena_options o = options_of(2);
        struct km_arena_report report;
        struct km_arena *a = open_good(&o, &report);
        assert_true(report.adopted || report.replaced);
        uint32_t blocks[] = {0, 3, 7};
        km_arena_blocks_writing(a, blocks, 3);
        km_arena_close(&a);
        struct km_audit audit = audit_now();
        assert_true(km_audit_sound(&audit));
        assert_int_equal(audit.blocks_by_state[KV_WRITING], 3);
    }
}

/* Six committed blocks in a chain and the snapshot at its end. */
static struct kv_layout make_chain(void)
{
    struct km_arena_options o = options_of(1);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    struct kv_layout layout = *km_arena_layout(a);
    uint32_t blocks[] = {9, 4, 12, 5, 30, 31}, slot = SLOTS - 1;
    struct hash128 parent = {{0}}, hashes[6];
    for (uint32_t i = 0; i < 6; i++)
        memset(&hashes[i], 0x60 + (int)i, sizeof(hashes[i]));
    km_arena_blocks_writing(a, blocks, 6);
    km_arena_blocks_commit(a, blocks, 6, 0, &parent, hashes);
    km_arena_slots_writing(a, &slot, 1, true);
    km_arena_snapshot_commit(a, slot, 6 * 64, &hashes[5]);
    km_arena_close(&a);
    return layout;
}

static struct km_arena_report reopen(uint32_t *ret_found, uint32_t *ret_snapshots)
{
    struct km_arena_options o = options_of(2);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    assert_true(report.adopted);
    struct km_arena_found found = km_arena_found(a);
    for (uint32_t i = 1; i < found.block_count; i++)
        assert_true(found.blocks[i].position > found.blocks[i - 1].position);
    *ret_found = found.block_count;
    *ret_snapshots = found.snapshot_count;
    km_arena_close(&a);
    struct km_audit audit = audit_now();
    assert_true(km_audit_sound(&audit));
    return report;
}

/* Any bit of any header byte: that block is dropped, the others are found. */
static void one_bit_costs_one_block(void **state)
{
    uint32_t found, snapshots;
    (void)make_chain();
    (void)reopen(&found, &snapshots);
    assert_int_equal(found, 6);
    assert_int_equal(snapshots, 1);
    struct km_audit audit = audit_now();
    assert_true(km_audit_chained(&audit));
    assert_int_equal(audit.chained, 6);
    assert_int_equal(audit.snapshots, 1);
    unlink(path);
    for (uint32_t byte = 0; byte < KV_HEADER_BYTES; byte++) {
        struct kv_layout layout = make_chain();
        flip(layout.block_headers_at + 12 * KV_HEADER_BYTES + byte, (uint8_t)(1u << byte % 8));
        audit = audit_now();
        assert_false(km_audit_sound(&audit));
        assert_int_equal(audit.unchained, 3); /* what lay behind it */
        assert_int_equal(reopen(&found, &snapshots).headers_broken, 1);
        assert_int_equal(found, 5);
        assert_int_equal(snapshots, 1);
        unlink(path);
        layout = make_chain();
        flip(layout.slot_headers_at + (SLOTS - 1) * KV_HEADER_BYTES + byte,
             (uint8_t)(1u << byte % 8));
        assert_int_equal(reopen(&found, &snapshots).headers_broken, 1);
        assert_int_equal(found, 6);
        assert_int_equal(snapshots, 0);
        unlink(path);
    }
}

static void woken(void *arg)
{
    sem_post(arg);
}

/* How many of the committed blocks and snapshots are not what they were sealed for. */
static uint32_t damaged_count(void)
{
    struct km_arena_options o = options_of(2);
    struct km_arena_report report;
    struct km_arena *a = open_good(&o, &report);
    assert_true(report.adopted);
    struct km_arena_found found = km_arena_found(a);
    struct km_proofs *proofs = NULL;
    sem_t told;
    assert_int_equal(sem_init(&told, 0, 0), 0);
    struct km_proofs_options options = {
        .arena_fd = km_arena_fd(a), .layout = km_arena_layout(a), .wake = woken, .wake_arg = &told};
    assert_int_equal(km_proofs_open(&options, &proofs, NULL), ERR_OK);
    for (uint32_t i = 0; i < found.block_count; i++) {
        assert_true(found.blocks[i].sealed);
        km_proofs_submit(proofs,
                         &(struct km_proof){KM_OBJECT_BLOCK, found.blocks[i].block, ERR_OK});
    }
    for (uint32_t i = 0; i < found.snapshot_count; i++)
        km_proofs_submit(proofs,
                         &(struct km_proof){KM_OBJECT_SNAPSHOT, found.snapshots[i].slot, ERR_OK});
    uint32_t left = found.block_count + found.snapshot_count, damaged = 0;
    for (struct km_proof p; left > 0;) {
        if (!km_proofs_poll(proofs, &p)) {
            sem_wait(&told);
            continue;
        }
        damaged += p.code != ERR_OK;
        left--;
    }
    km_proofs_close(&proofs);
    km_arena_close(&a);
    sem_destroy(&told);
    return damaged;
}

/* One bit of the data, of their guard or of a snapshot: that one is found, and nothing else. */
static void one_bit_of_data_costs_one_block(void **state)
{
    for (uint32_t kind = 0; kind < 4; kind++) {
        struct kv_layout l = make_chain();
        uint64_t at = l.blocks_at + 30 * l.block_bytes;
        if (kind == 1)
            at += l.block_bytes - 1;
        else if (kind == 2)
            at = kv_slot_place(&l, SLOTS - 1).at + 5;
        else if (kind == 3)
            at = l.blocks_at + 32 * l.block_bytes; /* nothing is committed there */
        flip(at, 0x04);
        struct km_audit audit = audit_now();
        assert_int_equal(audit.data_broken, kind < 3);
        assert_int_equal(km_audit_chained(&audit), kind == 3);
        assert_int_equal(audit.guards_broken, kind == 1);
        assert_int_equal(damaged_count(), kind < 3);
        unlink(path);
    }
}

/* A writer that goes beyond the end of a block or slot, whatever its state is. */
static void an_overrun_is_found_and_named(void **state)
{
    static const uint8_t junk[24] = {0};
    for (uint32_t kind = 0; kind < 5; kind++) {
        struct kv_layout l = make_chain();
        struct km_arena_options o = options_of(2);
        struct km_arena_report report;
        struct km_arena_guard last;
        struct km_arena *a = open_good(&o, &report);
        assert_int_equal(report.guards_broken, 0);
        /* Never used, free, being written, committed; a live state. */
        uint32_t index = (uint32_t[]){40, 41, 42, 12, 0}[kind];
        assert_true(l.block_bytes - l.block_guard_at >= KV_GUARD_BYTES_MIN);
        if (kind == 1 || kind == 2)
            km_arena_blocks_writing(a, &index, 1);
        if (kind == 1)
            km_arena_blocks_free(a, &index, 1);
        if (kind == 4)
            km_arena_slots_writing(a, &index, 1, false);
        struct km_audit audit = audit_now();
        assert_true(km_audit_chained(&audit));
        uint64_t end = kind < 4 ? l.blocks_at + index * l.block_bytes + l.block_guard_at
                                : kv_slot_place(&l, index).guard_at;
        poke(end - 8, junk, sizeof(junk));
        if (kind == 0) /* zeros there are what was never used */
            poke(end + KV_GUARD_BYTES_MIN - 1, "x", 1);
        audit = audit_now();
        assert_true(km_audit_sound(&audit));
        assert_false(km_audit_chained(&audit));
        assert_int_equal(audit.guards_broken, 1);
        assert_int_equal(audit.guard_slot, kind == 4);
        assert_int_equal(audit.guard_index, index);
        char text[2000] = "", name[32];
        FILE *out = fmemopen(text, sizeof(text), "w");
        km_audit_print(out, path, &audit);
        fclose(out);
        snprintf(name, sizeof(name), "first behind %s %u\n", kind < 4 ? "block" : "slot", index);
        assert_non_null(strstr(text, name));
        assert_int_equal(km_arena_guards_broken(a, &last), 0);
        if (kind == 4)
            km_arena_slots_free(a, &index, 1);
        else if (kind == 2 || kind == 3)
            km_arena_blocks_free(a, &index, 1);
        else
            km_arena_blocks_writing(a, &index, 1);
        assert_int_equal(km_arena_guards_broken(a, &last), 1);
        assert_int_equal(last.slot, kind == 4);
        assert_int_equal(last.index, index);
        audit = audit_now(); /* whole again */
        assert_int_equal(audit.guards_broken, 0);
        if (kind == 1) { /* an adoption looks too */
            km_arena_blocks_free(a, &index, 1);
            poke(end, junk, sizeof(junk));
            km_arena_close(&a);
            o.epoch = 3;
            a = open_good(&o, &report);
            assert_int_equal(report.guards_broken, 1);
        }
        km_arena_close(&a);
        unlink(path);
    }
}

/* What a stopped worker of the kvmgr before has mapped is not taken over under its hands. */
static void a_file_that_others_map_is_replaced(void **state)
{
    static const uint64_t workers[] = {0, 77, UINT64_MAX};
    for (size_t i = 0; i < ARRAY_COUNT(workers); i++) {
        (void)make_used();
        struct km_arena_options o = options_of(2);
        struct km_arena_report report;
        struct flock lock = {
            .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = kv_lock_at(workers[i]), .l_len = 1};
        int fd = open(path, O_RDWR | O_CLOEXEC);
        assert_int_equal(fcntl(fd, F_OFD_SETLK, &lock), 0);
        void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        o.worker = workers[i];
        struct km_arena *a = open_good(&o, &report);
        assert_true(report.adopted); /* its own */
        assert_true(km_arena_held(a, workers[i]));
        assert_false(km_arena_held(a, 1000));
        km_arena_close(&a);
        o.epoch = 3;
        o.worker = 1000;
        expect_replaced(&o, "another worker");
        munmap(map, 4096);
        o.epoch = 4;
        a = open_good(&o, &report);
        assert_true(report.adopted);
        assert_false(km_arena_held(a, workers[i]));
        km_arena_close(&a);
        unlink(path);
    }
}

static void another_boot_begins_anew(void **state)
{
    struct km_arena_options o = options_of(2);
    struct km_arena_report report;
    struct km_arena *a;
    o.boot = 7;
    a = open_good(&o, &report);
    km_arena_close(&a);
    o = options_of(3);
    a = open_good(&o, &report); /* unknown now, and so from here on */
    assert_true(report.adopted);
    km_arena_close(&a);
    o.epoch = 4;
    o.boot = 8;
    a = open_good(&o, &report);
    assert_true(report.adopted);
    km_arena_close(&a);
    o.epoch = 5;
    a = open_good(&o, &report);
    assert_true(report.adopted);
    km_arena_close(&a);
    o.boot = 9;
    expect_replaced(&o, "last start");
}

/* Headers that are whole and lie: of a later epoch, of a position that cannot be. */
static void whole_headers_that_lie(void **state)
{
    uint32_t found, snapshots;
    for (uint32_t kind = 0; kind < 3; kind++) {
        struct kv_layout layout = make_chain();
        struct kv_block_header h;
        uint64_t at = layout.block_headers_at + 30 * KV_HEADER_BYTES;
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        assert_int_equal(pread(fd, &h, sizeof(h), (off_t)at), sizeof(h));
        close(fd);
        if (kind == 0)
            h.epoch = 2;
        else if (kind == 1)
            h.position = UINT32_MAX;
        else
            h.state = KV_WRITING;
        kv_block_header_seal(&h);
        poke(at, &h, sizeof(h));
        struct km_arena_report report = reopen(&found, &snapshots);
        assert_int_equal(found, 5);
        assert_int_equal(report.headers_broken, kind == 0);
        unlink(path);
    }
    struct kv_layout layout = make_chain();
    uint8_t half[KV_HEADER_BYTES / 2] = {0}; /* torn: half of it is of another time */
    poke(layout.block_headers_at + 30 * KV_HEADER_BYTES, half, sizeof(half));
    assert_int_equal(reopen(&found, &snapshots).headers_broken, 1);
    assert_int_equal(found, 5);
}

static void default_paths_differ_by_run_dir(void **state)
{
    char a[KM_ARENA_PATH_BYTES], b[KM_ARENA_PATH_BYTES], c[KM_ARENA_PATH_BYTES], sub[160];
    struct err_detail detail;
    assert_int_equal(km_arena_default_path("my/clus ter", folder, 0, a, &detail), ERR_OK);
    assert_non_null(strstr(a, "/dev/shm/tandem-my_clus_ter-"));
    assert_null(strchr(a + strlen("/dev/shm/"), '/'));
    snprintf(sub, sizeof(sub), "%s/x", folder);
    assert_int_equal(mkdir(sub, 0700), 0);
    assert_int_equal(km_arena_default_path("my/clus ter", sub, 0, b, &detail), ERR_OK);
    assert_string_not_equal(a, b);
    snprintf(sub, sizeof(sub), "%s/x/..", folder);
    assert_int_equal(km_arena_default_path("my/clus ter", sub, 0, c, &detail), ERR_OK);
    assert_string_equal(a, c);
    assert_int_equal(km_arena_default_path("my/clus ter", folder, 1, b, &detail), ERR_OK);
    assert_string_not_equal(a, b);
    assert_int_equal(km_arena_default_path("t", "/nonexistent-folder", 0, c, &detail), ERR_IO);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(fresh_file_is_private_and_sparse),
        CASE(states_generations_and_seals),
        CASE(good_file_is_adopted),
        CASE(fewer_slots_wanted_still_adopts),
        CASE(the_border_stays_where_sizes_differ),
        CASE(broken_headers_are_freed_and_counted),
        CASE(bad_files_are_replaced),
        CASE(foreign_files_are_replaced),
        CASE(replacing_leaves_the_old_inode),
        CASE(what_is_no_file_is_refused),
        CASE(one_owner_at_a_time),
        CASE(impossible_sizes_are_refused),
        CASE(random_damage_is_survived),
        CASE(one_bit_costs_one_block),
        CASE(one_bit_of_data_costs_one_block),
        CASE(an_overrun_is_found_and_named),
        CASE(a_file_that_others_map_is_replaced),
        CASE(another_boot_begins_anew),
        CASE(whole_headers_that_lie),
        CASE(default_paths_differ_by_run_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
