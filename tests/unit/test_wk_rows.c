/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a rank above 0: what is committed there survives every death of worker and kvmgr;
 * what is not as it was committed is never taken for it. */
#include "tests/unit/rows_world.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "kvmgr/km_audit.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"

#define BOOT 7u
#define LIVE 2u

static const struct kv_geometry geometry = {.dsa_layers = 2,
                                            .latent_dim = 32,
                                            .index_dim = 8,
                                            .index_kpool = 4,
                                            .block_tokens = 32,
                                            .kv_dtype = KV_BF16,
                                            .index_dtype = KV_F32,
                                            .snapshot_dtype = KV_BF16,
                                            .rank = 1,
                                            .ranks = 2,
                                            .interleave = 16,
                                            .state_bytes = 5000};
static const struct kv_slots slots = {LIVE, 4};
static const struct hash128 settings = {{3}};

struct fixture {
    char dir[64];
    struct rows_world w;
    struct kv_layout layout;
    struct model_kv kv;
    struct err_detail detail;
};

static void begin(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "/tmp/rows-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    rows_world_init(&f->w, f->dir, BOOT);
    assert_int_equal(kv_layout_of(&geometry, 8, slots, &f->layout, NULL), ERR_OK);
}

static void end(struct fixture *f)
{
    rows_world_fini(&f->w);
    assert_int_equal(rmdir(f->dir), 0);
}

static enum err rows_open(struct fixture *f)
{
    return wk_rows_open(f->w.rows, &f->layout, &settings, 200, NULL, &f->kv, &f->detail);
}

static void must_open(struct fixture *f)
{
    if (rows_open(f) != ERR_OK)
        fail_msg("%s", f->detail.text);
}

static struct wk_seal block_seal(uint32_t block, uint32_t place)
{
    struct wk_seal s = {.index = block, .place = place, .hash = {{(uint8_t)(10 + block)}}};
    if (place > 0)
        s.parent.bytes[0] = 1;
    return s;
}

static struct wk_seal slot_seal(uint32_t slot)
{
    return (struct wk_seal){.snapshot = 1, .index = slot, .place = 32, .hash = {{10}}};
}

static void write_block(struct fixture *f, uint32_t block, uint8_t value)
{
    wk_rows_write_block(f->w.rows, block);
    memset(f->kv.blocks + block * f->kv.block_stride, value, f->kv.block_stride);
}

static void write_slot(struct fixture *f, uint32_t slot, uint8_t value)
{
    wk_rows_write_slot(f->w.rows, slot, true);
    memset(f->kv.slots + slot * f->kv.slot_stride, value, f->kv.slot_stride);
}

static enum err seal(struct fixture *f, struct wk_seal s)
{
    return wk_rows_seal(f->w.rows, &s, 1, &f->detail);
}

/* Block 0, block 1 and a snapshot in slot 2 committed, block 3 half written. */
static struct wk_rows_identity fill(struct fixture *f)
{
    must_open(f);
    write_block(f, 0, 5);
    assert_int_equal(seal(f, block_seal(0, 0)), ERR_OK);
    write_block(f, 1, 6);
    assert_int_equal(seal(f, block_seal(1, 1)), ERR_OK);
    write_slot(f, 2, 7);
    assert_int_equal(seal(f, slot_seal(2)), ERR_OK);
    write_block(f, 3, 8);
    return wk_rows_identity(f->w.rows);
}

static bool same(struct wk_rows_identity a, struct wk_rows_identity b)
{
    return a.incarnation == b.incarnation && a.epoch == b.epoch;
}

/* The worker alone, kvmgr alone, both: all that was committed is there, under the same identity. */
static void test_what_is_committed_survives(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    struct wk_rows_identity first = fill(&f);
    assert_int_not_equal(first.incarnation, 0);
    assert_int_not_equal(first.epoch, 0);
    for (uint32_t death = 1; death <= 3; death++) {
        if (death & 1)
            rows_world_worker(&f.w, 1000 + death);
        else
            wk_rows_close(f.w.rows);
        if (death & 2)
            rows_world_kvmgr(&f.w, BOOT);
        must_open(&f);
        assert_true(same(wk_rows_identity(f.w.rows), first));
        assert_int_equal(f.kv.blocks[0], 5);
        assert_int_equal(f.kv.blocks[f.kv.block_stride], 6);
        assert_int_equal(f.kv.slots[2 * f.kv.slot_stride], 7);
    }
    struct km_audit audit;
    assert_int_equal(km_audit_read(f.w.path, &audit, NULL), ERR_OK);
    assert_true(km_audit_sound(&audit) && km_audit_chained(&audit));
    assert_int_equal(audit.blocks_by_state[KV_COMMITTED], 2);
    assert_int_equal(audit.blocks_by_state[KV_WRITING], 0); /* freed */
    assert_int_equal(audit.slots_by_state[KV_COMMITTED], 1);
    assert_int_equal(audit.superblock.flags, KV_FLAG_FOLLOWS);
    end(&f);
}

/* A block that is used again is not what it was, wherever the worker dies. */
static void test_used_again_is_no_damage(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    struct wk_rows_identity first = fill(&f);
    write_block(&f, 1, 99);
    write_slot(&f, 2, 99);
    rows_world_worker(&f.w, 1001);
    must_open(&f);
    assert_true(same(wk_rows_identity(f.w.rows), first));
    assert_int_equal(seal(&f, block_seal(1, 1)), ERR_INVALID); /* freed: nobody wrote it */
    assert_int_equal(seal(&f, slot_seal(2)), ERR_INVALID);
    end(&f);
}

static void test_seals(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    assert_int_equal(seal(&f, block_seal(0, 0)), ERR_INVALID); /* before any memory */
    fill(&f);
    assert_int_equal(seal(&f, block_seal(0, 0)), ERR_OK); /* said again */
    assert_int_equal(seal(&f, slot_seal(2)), ERR_OK);
    struct wk_seal other = block_seal(0, 0);
    other.hash.bytes[1] = 1;
    assert_int_equal(seal(&f, other), ERR_INVALID);
    assert_int_equal(seal(&f, block_seal(2, 0)), ERR_INVALID); /* never written */
    assert_int_equal(seal(&f, block_seal(8, 0)), ERR_INVALID);
    assert_int_equal(seal(&f, block_seal(3, 8)), ERR_INVALID);
    assert_int_equal(seal(&f, slot_seal(4)), ERR_INVALID);
    wk_rows_write_slot(f.w.rows, 0, false);
    assert_int_equal(seal(&f, slot_seal(0)), ERR_INVALID); /* a live one */
    assert_int_equal(seal(&f, block_seal(3, 2)), ERR_OK);
    end(&f);
}

/* Whatever is not as it was committed: nothing that was kept counts any more. */
static void test_damage_gives_a_new_identity(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    uint64_t block_headers = f.layout.block_headers_at, slot_headers = f.layout.slot_headers_at;
    const uint64_t places[] = {
        f.layout.blocks_at + f.layout.block_bytes + 77,          /* data of block 1 */
        f.layout.blocks_at + 2 * f.layout.block_bytes - 1,       /* its padding */
        kv_slot_place(&f.layout, 2).at,                          /* a snapshot */
        block_headers + offsetof(struct kv_block_header, state), /* headers */
        block_headers + KV_HEADER_BYTES + offsetof(struct kv_block_header, data_crc),
        slot_headers + 2 * KV_HEADER_BYTES + offsetof(struct kv_slot_header, token_count),
        offsetof(struct kv_superblock, incarnation),
        offsetof(struct kv_superblock, epoch),
    };
    for (size_t i = 0; i < ARRAY_COUNT(places); i++) {
        struct wk_rows_identity before = fill(&f);
        wk_rows_close(f.w.rows);
        int fd = open(f.w.path, O_RDWR);
        uint8_t byte;
        assert_int_equal(pread(fd, &byte, 1, (off_t)places[i]), 1);
        byte ^= 0x10;
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)places[i]), 1);
        close(fd);
        rows_world_worker(&f.w, 2000 + i);
        must_open(&f);
        struct wk_rows_identity after = wk_rows_identity(f.w.rows);
        assert_int_not_equal(after.incarnation, before.incarnation);
        assert_true(after.epoch > before.epoch);
        rows_world_worker(&f.w, 3000 + i); /* and it stays at that */
        must_open(&f);
        assert_true(same(wk_rows_identity(f.w.rows), after));
        for (uint32_t block = 0; block < 8; block++)
            wk_rows_write_block(f.w.rows, block); /* so that it can be filled again */
    }
    end(&f);
}

/* Cut short, another's, of another boot, of another shape: a new file, and none of the old rows. */
static void test_foreign_files(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    struct wk_rows_identity before = fill(&f);
    wk_rows_close(f.w.rows);
    rows_world_kvmgr(&f.w, BOOT);
    assert_int_equal(truncate(f.w.path, (off_t)f.layout.blocks_at + 5), 0);
    must_open(&f);
    assert_int_not_equal(wk_rows_identity(f.w.rows).incarnation, before.incarnation);
    assert_int_equal(f.kv.blocks[0], 0);

    before = fill(&f);
    rows_world_worker(&f.w, 2000);
    rows_world_kvmgr(&f.w, BOOT + 1);
    must_open(&f);
    assert_int_not_equal(wk_rows_identity(f.w.rows).incarnation, before.incarnation);

    before = fill(&f);
    assert_int_equal(kv_layout_of(&geometry, 9, slots, &f.layout, NULL), ERR_OK);
    must_open(&f);
    assert_int_not_equal(wk_rows_identity(f.w.rows).incarnation, before.incarnation);

    /* The authority's own file. */
    before = fill(&f);
    wk_rows_close(f.w.rows);
    rows_world_kvmgr(&f.w, BOOT + 1);
    int fd = open(f.w.path, O_RDWR);
    struct kv_superblock s;
    assert_int_equal(pread(fd, &s, sizeof s, 0), sizeof s);
    s.flags = 0;
    kv_superblock_seal(&s);
    assert_int_equal(pwrite(fd, &s, sizeof s, 0), sizeof s);
    close(fd);
    must_open(&f);
    assert_int_not_equal(wk_rows_identity(f.w.rows).incarnation, before.incarnation);
    assert_int_equal(f.kv.blocks[0], 0);
    end(&f);
}

/* A worker that was stopped may wake in the middle of a step: what it has mapped is its own. */
static void test_a_stopped_worker_keeps_its_file(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    struct wk_rows_identity before = fill(&f);
    struct wk_rows *stopped = f.w.rows;
    uint8_t *its = f.kv.blocks;
    f.w.rows = NULL;
    rows_world_worker(&f.w, 2000);
    must_open(&f);
    assert_int_not_equal(wk_rows_identity(f.w.rows).incarnation, before.incarnation);
    its[0] = 77;
    assert_int_equal(f.kv.blocks[0], 0);
    wk_rows_destroy(&stopped);
    end(&f);
}

struct away {
    struct rows_world *world;
    atomic_bool stop;
    uint32_t after_ms;
    bool back; /* else stop */
};

/* The kvmgr that took the question dies over it, and the next one is there after a while. */
static void *away_main(void *arg)
{
    struct away *a = arg;
    struct msg taken;
    usleep(a->after_ms * 500);
    (void)wk_rows_question(a->world->rows, &taken);
    usleep(a->after_ms * 500);
    a->world->mute = !a->back;
    atomic_store(&a->stop, !a->back);
    return NULL;
}

static void test_a_question_is_asked_again(void **state)
{
    (void)state;
    for (int back = 0; back < 2; back++) {
        struct fixture f;
        pthread_t thread;
        begin(&f);
        f.w.mute = true;
        struct away a = {.world = &f.w, .after_ms = 400, .back = back};
        assert_int_equal(pthread_create(&thread, NULL, away_main, &a), 0);
        uint64_t begun = clock_mono_us();
        enum err e = wk_rows_open(f.w.rows, &f.layout, &settings, 20000, &a.stop, &f.kv, &f.detail);
        assert_int_equal(e, back ? ERR_OK : ERR_CANCELLED);
        assert_true(clock_mono_us() - begun < 5000000);
        pthread_join(thread, NULL);
        end(&f);
    }
}

static void test_kvmgr_comes_and_goes(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    f.w.mute = true;
    assert_int_equal(rows_open(&f), ERR_TIMEOUT);
    assert_non_null(strstr(f.detail.text, "does not answer"));
    assert_int_equal(wk_rows_identity(f.w.rows).incarnation, 0);
    f.w.mute = false;
    rows_world_wake(&f.w); /* the late answer is not taken for the next one's */
    must_open(&f);
    rows_world_ping(&f.w);
    assert_false(wk_rows_lost(f.w.rows));
    rows_world_kvmgr(&f.w, BOOT);
    rows_world_ping(&f.w);
    assert_true(wk_rows_lost(f.w.rows));
    must_open(&f);
    rows_world_ping(&f.w);
    assert_false(wk_rows_lost(f.w.rows));
    end(&f);
}

/* What does not fit is refused before the first byte, and so is a file that another kvmgr has. */
static void test_room_and_lock(void **state)
{
    (void)state;
    struct fixture f;
    struct kv_geometry huge = geometry;
    begin(&f);
    struct kv_layout good = f.layout;
    huge.block_tokens = 65536;
    assert_int_equal(kv_layout_of(&huge, 8u << 20 >> 1, slots, &f.layout, NULL), ERR_OK);
    assert_int_equal(rows_open(&f), ERR_NOMEM);
    assert_non_null(strstr(f.detail.text, "are free"));
    assert_non_null(strstr(f.detail.text, f.w.path));
    assert_int_not_equal(access(f.w.path, F_OK), 0);
    f.layout = good;
    int fd = open(f.w.path, O_RDWR | O_CREAT, 0600);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_int_equal(rows_open(&f), ERR_BUSY);
    assert_non_null(strstr(f.detail.text, "in use"));
    close(fd);
    must_open(&f);
    fd = open(f.w.path, O_RDWR);
    assert_int_not_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    close(fd);
    end(&f);
}

static void test_rank_0_is_refused(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    struct msg_kv_attach ask = {.incarnation = 5, .ranks = 1, .seqs_max = 4};
    struct msg_kv_attach_reply reply;
    km_rows_attach(f.w.kvmgr, &ask, &reply);
    assert_int_equal(reply.code, ERR_UNSUPPORTED);
    assert_non_null(strstr(reply.text, "role arena"));
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_committed_survives),
        cmocka_unit_test(test_used_again_is_no_damage),
        cmocka_unit_test(test_seals),
        cmocka_unit_test(test_damage_gives_a_new_identity),
        cmocka_unit_test(test_foreign_files),
        cmocka_unit_test(test_a_stopped_worker_keeps_its_file),
        cmocka_unit_test(test_kvmgr_comes_and_goes),
        cmocka_unit_test(test_a_question_is_asked_again),
        cmocka_unit_test(test_room_and_lock),
        cmocka_unit_test(test_rank_0_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
