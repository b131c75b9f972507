/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvmgr/km_arena_file.h"
#include "kvmgr/km_event.h"
#include "kvmgr/km_index.h"
#include "lib/base/check.h"
#include "lib/base/file_io.h"
#include "lib/base/host.h"
#include "lib/base/mem.h"

#define KM_ARENA_MAGIC 0x4b4d4152u
#define SCAN_HEADERS   64u
/* A file with more than about this many times the slots wanted is not worth its space. */
#define SLOTS_SURPLUS 4u

STATIC_CHECK(KV_BLOCKS_MAX < KM_INDEX_BLOCKS_END);
STATIC_CHECK(sizeof(struct kv_block_header) == KV_HEADER_BYTES);
STATIC_CHECK(sizeof(struct kv_slot_header) == KV_HEADER_BYTES);
STATIC_CHECK(sizeof(struct kv_superblock) <= KV_SUPERBLOCK_BYTES);

struct km_arena {
    uint32_t magic;
    uint32_t epoch;
    int fd;
    uint8_t *map; /* superblock and headers: [0, layout.blocks_at) */
    size_t map_bytes;
    struct kv_layout layout;
    uint64_t headers_repaired, guards_broken;
    struct km_arena_guard guard_last;
    uint8_t guard[KV_GUARD_BYTES_MAX]; /* as it is to be */
    struct km_found_block *found;      /* NULL before and after adoption */
    struct km_found_snapshot *found_snapshots;
    uint32_t found_count, found_snapshot_count;
};

/* --- headers */

static struct kv_block_header *block_header(const struct km_arena *a, uint32_t block)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    CHECK(block < a->layout.block_count);
    return (void *)(a->map + a->layout.block_headers_at + (uint64_t)block * KV_HEADER_BYTES);
}

static struct kv_slot_header *slot_header(const struct km_arena *a, uint32_t slot)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    CHECK(slot < a->layout.slot_count);
    return (void *)(a->map + a->layout.slot_headers_at + (uint64_t)slot * KV_HEADER_BYTES);
}

/* The generation goes on from a sound header.  A broken one counts from the epoch's own range: no
 * earlier epoch can have reached it. */
static uint64_t generation_of(struct km_arena *a, const void *header, enum err sound,
                              uint64_t generation)
{
    if (km_arena_header_unused(header))
        return 0;
    if (sound == ERR_OK)
        return generation;
    a->headers_repaired++;
    return (uint64_t)a->epoch << 32;
}

static struct kv_block_header block_read(struct km_arena *a, uint32_t block)
{
    struct kv_block_header h = *block_header(a, block);
    h.generation = generation_of(a, &h, kv_block_header_check(&h), h.generation);
    return h;
}

static void block_write(struct km_arena *a, uint32_t block, struct kv_block_header *h)
{
    h->epoch = a->epoch;
    kv_block_header_seal(h);
    CHECK(kv_block_header_check(h) == ERR_OK);
    *block_header(a, block) = *h;
}

/* Makes the guard of a block or slot whole; what was never used (by its header) has none yet. */
static void guard_check(struct km_arena *a, bool slot, uint32_t index, bool used)
{
    static const uint8_t zeros[KV_GUARD_BYTES_MAX];
    uint8_t found[KV_GUARD_BYTES_MAX];
    struct kv_place place =
        slot ? kv_slot_place(&a->layout, index) : kv_block_place(&a->layout, index);
    uint64_t at = place.guard_at, count = place.guard_bytes;
    CHECK(count >= KV_GUARD_BYTES_MIN && count <= sizeof(found));
    bool read = file_read_at(a->fd, at, found, count) == ERR_OK;
    if (read && memcmp(found, a->guard, count) == 0)
        return;
    if (used || !read || memcmp(found, zeros, count) != 0) {
        a->guards_broken++;
        a->guard_last = (struct km_arena_guard){slot, index};
    }
    if (file_write_at(a->fd, at, a->guard, count) != ERR_OK)
        a->guards_broken++; /* found again, and said again, the next time */
}

static void block_guard_check(struct km_arena *a, uint32_t block)
{
    const struct kv_block_header *h = block_header(a, block);
    guard_check(a, false, block, !km_arena_header_unused(h) && kv_block_header_check(h) == ERR_OK);
}

static void slot_guard_check(struct km_arena *a, uint32_t slot)
{
    const struct kv_slot_header *h = slot_header(a, slot);
    guard_check(a, true, slot, !km_arena_header_unused(h) && kv_slot_header_check(h) == ERR_OK);
}

/* 0, "none", if the data cannot be read. */
static uint32_t place_sum(const struct km_arena *a, struct kv_place place)
{
    uint32_t sum = 0;
    return km_arena_file_sum(a->fd, place.at, place.bytes, &sum) == ERR_OK ? sum : 0;
}

static uint32_t block_sum(const struct km_arena *a, uint32_t block)
{
    return place_sum(a, kv_block_place(&a->layout, block));
}

static uint32_t slot_sum(const struct km_arena *a, uint32_t slot)
{
    return place_sum(a, kv_slot_place(&a->layout, slot));
}

static void slot_write(struct km_arena *a, uint32_t slot, enum kv_slot_kind kind, uint32_t state,
                       uint32_t generation_step, uint32_t token_count, const struct hash128 *hash)
{
    slot_guard_check(a, slot);
    struct kv_slot_header old = *slot_header(a, slot);
    struct kv_slot_header h = {
        .kind = kind,
        .state = state,
        .token_count = token_count,
        .epoch = a->epoch,
        .generation =
            generation_of(a, &old, kv_slot_header_check(&old), old.generation) + generation_step,
    };
    if (hash) {
        h.hash = *hash;
        h.data_crc = slot_sum(a, slot);
    }
    kv_slot_header_seal(&h);
    CHECK(kv_slot_header_check(&h) == ERR_OK);
    *slot_header(a, slot) = h;
}

void km_arena_blocks_writing(struct km_arena *a, const uint32_t *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        block_guard_check(a, blocks[i]);
        struct kv_block_header h = {.state = KV_WRITING,
                                    .generation = block_read(a, blocks[i]).generation};
        block_write(a, blocks[i], &h);
    }
    /* Written before the answer leaves, hence before the worker writes data. */
    atomic_thread_fence(memory_order_release);
}

void km_arena_blocks_commit(struct km_arena *a, const uint32_t *blocks, uint32_t count,
                            uint32_t first_position, const struct hash128 *parent,
                            const struct hash128 *hashes)
{
    /* The worker's data came before its message; COMMITTED may not become visible before either. */
    atomic_thread_fence(memory_order_acq_rel);
    for (uint32_t i = 0; i < count; i++) {
        block_guard_check(a, blocks[i]);
        struct kv_block_header h = {.state = KV_COMMITTED,
                                    .hash = hashes[i],
                                    .parent = i > 0 ? hashes[i - 1] : *parent,
                                    .position = first_position + i,
                                    .data_crc = block_sum(a, blocks[i]),
                                    .generation = block_read(a, blocks[i]).generation};
        block_write(a, blocks[i], &h);
    }
}

void km_arena_blocks_free(struct km_arena *a, const uint32_t *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        block_guard_check(a, blocks[i]);
        struct kv_block_header h = {.state = KV_FREE,
                                    .generation = block_read(a, blocks[i]).generation + 1};
        block_write(a, blocks[i], &h);
    }
    atomic_thread_fence(memory_order_release);
}

void km_arena_slots_writing(struct km_arena *a, const uint32_t *slots, uint32_t count,
                            bool snapshot)
{
    for (uint32_t i = 0; i < count; i++)
        slot_write(a, slots[i], snapshot ? KV_SLOT_SNAPSHOT : KV_SLOT_LIVE, KV_WRITING, 0, 0, NULL);
    atomic_thread_fence(memory_order_release);
}

void km_arena_snapshot_commit(struct km_arena *a, uint32_t slot, uint32_t token_count,
                              const struct hash128 *hash)
{
    atomic_thread_fence(memory_order_acq_rel);
    slot_write(a, slot, KV_SLOT_SNAPSHOT, KV_COMMITTED, 0, token_count, hash);
}

void km_arena_slots_free(struct km_arena *a, const uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        slot_write(a, slots[i], KV_SLOT_LIVE, KV_FREE, 1, 0, NULL);
    atomic_thread_fence(memory_order_release);
}

/* --- recovery */

static bool locked(int fd, int64_t from, int64_t count)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = count};
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

/* Workers of the kvmgr before may be in the middle of a step: what they write to is not known. */
static bool mapped_by_others(int fd, uint64_t worker)
{
    int64_t own = kv_lock_at(worker);
    return (own > 0 && locked(fd, 0, own)) || (own < INT64_MAX && locked(fd, own + 1, 0));
}

/* Whether its slots will do, and how many of them are live.  Where both kinds are of one size the
 * border between them may move. */
static enum err slots_fit(const struct kv_layout *found, const struct km_arena_options *o,
                          struct kv_slots *ret_slots, struct err_detail *detail)
{
    bool moves = o->geometry.snapshot_dtype == KV_F32;
    uint32_t live = moves ? o->live_count : found->live_count;
    uint32_t least = o->slot_count_min > 0 ? o->slot_count_min : o->slot_count;
    if (live < o->live_count || (o->follows && live != o->live_count))
        return err_set(detail, ERR_UNSUPPORTED, "it has %u live slots, %u are needed", live,
                       o->live_count);
    if (live / SLOTS_SURPLUS > o->live_count + SLOTS_SURPLUS)
        return err_set(detail, ERR_UNSUPPORTED, "it has %u live slots, only %u are needed", live,
                       o->live_count);
    least += live - o->live_count;
    if (found->slot_count < least)
        return err_set(detail, ERR_UNSUPPORTED, "it has %u state slots, %u are needed",
                       found->slot_count, least);
    if (found->slot_count / SLOTS_SURPLUS > o->slot_count + SLOTS_SURPLUS)
        return err_set(detail, ERR_UNSUPPORTED, "it has %u state slots, only %u are needed",
                       found->slot_count, o->slot_count);
    *ret_slots = (struct kv_slots){live, found->slot_count};
    return ERR_OK;
}

/* Whether the file is an arena that serves these options; the reason if not. */
static enum err arena_fits(int fd, uint64_t file_bytes, const struct km_arena_options *o,
                           uint64_t arena_bytes, struct kv_layout *ret_layout,
                           struct err_detail *detail)
{
    struct kv_superblock s;
    if (file_bytes < KV_SUPERBLOCK_BYTES)
        return err_set(detail, ERR_CORRUPT, "it has %" PRIu64 " bytes, no superblock", file_bytes);
    if (file_read_at(fd, 0, &s, sizeof(s)) != ERR_OK)
        return err_set(detail, ERR_IO, "its superblock cannot be read");
    struct kv_layout found, planned;
    TRY(kv_superblock_check(&s, file_bytes, &found, detail));
    if (found.geometry.snapshot_dtype != o->geometry.snapshot_dtype)
        return err_set(detail, ERR_UNSUPPORTED, "its snapshots are %s, snapshot_dtype says %s",
                       found.geometry.snapshot_dtype == KV_BF16 ? "bf16" : "f32",
                       o->geometry.snapshot_dtype == KV_BF16 ? "bf16" : "f32");
    struct kv_slots slots;
    TRY(slots_fit(&found, o, &slots, detail));
    TRY(kv_layout_plan(&o->geometry, arena_bytes, slots, &planned, detail));
    if (memcmp(&planned.layout_fp, &s.layout_fp, sizeof(s.layout_fp)) != 0)
        return err_set(detail, ERR_UNSUPPORTED, "it has another layout_fp");
    if (s.boot != 0 && o->boot != 0 && s.boot != o->boot) /* its pages may be of another time */
        return err_set(detail, ERR_UNSUPPORTED, "it is from before this host's last start");
    if (s.epoch > o->epoch)
        return err_set(detail, ERR_UNSUPPORTED, "its epoch %u is later than ours", s.epoch);
    if (s.flags != (o->follows ? KV_FLAG_FOLLOWS : 0))
        return err_set(detail, ERR_UNSUPPORTED, "it is of another rank's kind (flags %u)", s.flags);
    if (o->follows && found.slot_count != o->slot_count)
        return err_set(detail, ERR_UNSUPPORTED, "it has %u state slots, not %u", found.slot_count,
                       o->slot_count);
    if (memcmp(&o->model_fp, &s.model_fp, sizeof(s.model_fp)) != 0)
        return err_set(detail, ERR_UNSUPPORTED, "it belongs to another model (model_fp)");
    if (planned.block_count != found.block_count || planned.arena_bytes != found.arena_bytes ||
        planned.arena_bytes != file_bytes || planned.blocks_at != found.blocks_at)
        return err_set(detail, ERR_UNSUPPORTED,
                       "it has %u blocks in %" PRIu64 " bytes, arena_bytes gives %u in %" PRIu64,
                       found.block_count, file_bytes, planned.block_count, planned.arena_bytes);
    if (mapped_by_others(fd, o->worker))
        return err_set(detail, ERR_BUSY, "another worker has it mapped and may write to it");
    *ret_layout = planned;
    return ERR_OK;
}

static int by_position(const void *x, const void *y)
{
    const struct km_found_block *a = x, *b = y;
    if (a->position != b->position)
        return a->position < b->position ? -1 : 1;
    return a->block < b->block ? -1 : a->block > b->block;
}

/* What to do with one header: a sound COMMITTED one of this file's epochs is found, FREE ones stay,
 * all others become FREE.  What follows is read now: nobody here knows when it is used again. */
static void recover_block(struct km_arena *a, uint32_t block, const void *bytes, uint32_t epoch,
                          bool follows, struct km_arena_report *report)
{
    struct kv_block_header h;
    memcpy(&h, bytes, sizeof(h));
    if (km_arena_header_unused(&h))
        return;
    bool sound = kv_block_header_check(&h) == ERR_OK && h.epoch <= epoch;
    if (sound && h.state == KV_FREE) {
        block_guard_check(a, block);
        return;
    }
    bool intact =
        !follows || !sound || h.state != KV_COMMITTED || h.data_crc == block_sum(a, block);
    if (intact && sound && h.state == KV_COMMITTED && h.position < a->layout.block_count) {
        CHECK(a->found_count < a->layout.block_count);
        a->found[a->found_count++] = (struct km_found_block){.hash = h.hash,
                                                             .parent = h.parent,
                                                             .block = block,
                                                             .position = h.position,
                                                             .sealed = h.data_crc != 0};
        return;
    }
    *(!sound    ? &report->headers_broken
      : !intact ? &report->data_broken
                : &report->blocks_freed) += 1;
    km_arena_blocks_free(a, &block, 1);
}

static void recover_slot(struct km_arena *a, uint32_t slot, uint32_t epoch, bool follows,
                         struct km_arena_report *report)
{
    struct kv_slot_header h = *slot_header(a, slot);
    bool sound = kv_slot_header_check(&h) == ERR_OK && h.epoch <= epoch;
    if (km_arena_header_unused(&h))
        return;
    if (sound && h.state == KV_FREE && h.kind == KV_SLOT_LIVE) {
        slot_guard_check(a, slot);
        return;
    }
    bool snapshot = sound && h.kind == KV_SLOT_SNAPSHOT && h.state == KV_COMMITTED;
    if (snapshot && (!follows || h.data_crc == slot_sum(a, slot))) {
        a->found_snapshots[a->found_snapshot_count++] = (struct km_found_snapshot){
            .hash = h.hash, .slot = slot, .token_count = h.token_count, .sealed = h.data_crc != 0};
        return;
    }
    report->headers_broken += !sound;
    report->data_broken += snapshot;
    km_arena_slots_free(a, &slot, 1);
}

/* Reads headers through the descriptor, not the mapping: a page of a hole stays a hole. */
static enum err arena_recover(struct km_arena *a, uint32_t epoch, bool follows,
                              struct km_arena_report *report)
{
    uint8_t buffer[SCAN_HEADERS * KV_HEADER_BYTES];
    a->found = calloc(a->layout.block_count, sizeof(*a->found));
    a->found_snapshots = calloc(a->layout.slot_count, sizeof(*a->found_snapshots));
    if (!a->found || !a->found_snapshots)
        return ERR_NOMEM;
    for (uint32_t at = 0; at < a->layout.block_count; at += SCAN_HEADERS) {
        uint32_t count = a->layout.block_count - at;
        count = count < SCAN_HEADERS ? count : SCAN_HEADERS;
        TRY(file_read_at(a->fd, a->layout.block_headers_at + (uint64_t)at * KV_HEADER_BYTES, buffer,
                         (size_t)count * KV_HEADER_BYTES));
        for (uint32_t i = 0; i < count; i++)
            recover_block(a, at + i, buffer + (size_t)i * KV_HEADER_BYTES, epoch, follows, report);
    }
    for (uint32_t slot = 0; slot < a->layout.slot_count; slot++)
        recover_slot(a, slot, epoch, follows, report);
    qsort(a->found, a->found_count, sizeof(*a->found), by_position);
    report->blocks_found = a->found_count;
    report->snapshots_found = a->found_snapshot_count;
    report->guards_broken = (uint32_t)a->guards_broken;
    return ERR_OK;
}

static struct kv_superblock superblock_of(const struct km_arena_options *o,
                                          const struct kv_layout *l)
{
    struct kv_superblock s;
    memset(&s, 0, sizeof(s));
    s.magic = KV_MAGIC;
    s.version = KV_LAYOUT_VERSION;
    s.layout_fp = l->layout_fp;
    s.model_fp = o->model_fp;
    s.epoch = o->epoch;
    s.incarnation = o->incarnation;
    s.arena_bytes = l->arena_bytes;
    s.block_count = l->block_count;
    s.slot_count = l->slot_count;
    s.dsa_layers = l->geometry.dsa_layers;
    s.latent_dim = l->geometry.latent_dim;
    s.index_dim = l->geometry.index_dim;
    s.index_kpool = l->geometry.index_kpool;
    s.block_tokens = l->geometry.block_tokens;
    s.kv_dtype = l->geometry.kv_dtype;
    s.index_dtype = l->geometry.index_dtype;
    s.rank = l->geometry.rank;
    s.ranks = l->geometry.ranks;
    s.interleave = l->geometry.interleave;
    s.state_bytes = l->geometry.state_bytes;
    s.snapshot_dtype = l->geometry.snapshot_dtype;
    s.live_count = l->live_count;
    s.flags = o->follows ? KV_FLAG_FOLLOWS : 0;
    s.boot = o->boot;
    kv_superblock_seal(&s);
    return s;
}

static enum err arena_map(struct km_arena *a, struct err_detail *detail)
{
    a->map_bytes = (size_t)a->layout.blocks_at;
    CHECK(a->map_bytes >= KV_SUPERBLOCK_BYTES && a->map_bytes <= a->layout.arena_bytes);
    a->map = mmap(NULL, a->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0);
    if (a->map == MAP_FAILED) {
        a->map = NULL;
        return err_set(detail, ERR_IO, "mapping %zu bytes of headers: %s", a->map_bytes,
                       strerror(errno));
    }
    return ERR_OK;
}

/* Takes over fd and gives the file the new epoch.  On failure fd is still the caller's. */
static enum err arena_adopt(struct km_arena *a, const struct km_arena_options *o,
                            struct km_arena_report *report, struct err_detail *detail)
{
    TRY(arena_map(a, detail));
    struct kv_superblock old, s = superblock_of(o, &a->layout);
    memcpy(&old, a->map, sizeof(old));
    if (o->follows) { /* killed in the middle, it is not to look whole */
        memcpy(a->map, &s, sizeof(s));
        atomic_thread_fence(memory_order_release);
        a->epoch = old.epoch;
    }
    if (arena_recover(a, old.epoch, o->follows, report) != ERR_OK)
        return err_set(detail, ERR_IO, "its headers cannot be read");
    if (o->follows && report->headers_broken == 0 && report->data_broken == 0) {
        s.epoch = old.epoch;
        s.incarnation = old.incarnation;
        kv_superblock_seal(&s);
    }
    a->epoch = s.epoch;
    memcpy(a->map, &s, sizeof(s));
    report->adopted = true;
    return ERR_OK;
}

/* Headers that a worker writes: each guard is there before the first use. */
static enum err guards_make(struct km_arena *a)
{
    const struct kv_layout *l = &a->layout;
    for (uint32_t i = 0; i < l->block_count + l->slot_count; i++) {
        struct kv_place place =
            i < l->block_count ? kv_block_place(l, i) : kv_slot_place(l, i - l->block_count);
        TRY(file_write_at(a->fd, place.guard_at, a->guard, place.guard_bytes));
    }
    return ERR_OK;
}

static enum err arena_create(struct km_arena *a, const struct km_arena_options *o,
                             struct err_detail *detail)
{
    char temp[KM_ARENA_PATH_BYTES + 8];
    a->epoch = o->epoch;
    TRY(km_arena_file_make(o->path, a->layout.arena_bytes, temp, sizeof(temp), &a->fd, detail));
    struct kv_superblock s = superblock_of(o, &a->layout);
    enum err e = file_write_at(a->fd, 0, &s, sizeof(s));
    if (e != ERR_OK)
        e = err_set(detail, e, "%s: the superblock cannot be written", o->path);
    if (e == ERR_OK && o->follows && guards_make(a) != ERR_OK)
        e = err_set(detail, ERR_IO, "%s: the guards cannot be written", o->path);
    if (e == ERR_OK)
        e = arena_map(a, detail);
    if (e == ERR_OK && rename(temp, o->path) != 0)
        e = err_set(detail, ERR_IO, "%s: %s", o->path, strerror(errno));
    if (e != ERR_OK)
        unlink(temp);
    return e;
}

void km_arena_found_drop(struct km_arena *a)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    free(a->found);
    free(a->found_snapshots);
    a->found = NULL;
    a->found_snapshots = NULL;
    a->found_count = a->found_snapshot_count = 0;
}

static void arena_drop(struct km_arena *a)
{
    if (a->map)
        munmap(a->map, a->map_bytes);
    if (a->fd >= 0)
        close(a->fd);
    a->map = NULL;
    a->fd = -1;
    km_arena_found_drop(a);
}

/* ERR_OK: adopted.  ERR_NOT_FOUND: make a new one (report->replaced tells if something is there).
 * Anything else: refused. */
static enum err arena_try_existing(struct km_arena *a, const struct km_arena_options *o,
                                   uint64_t arena_bytes, struct km_arena_report *report,
                                   struct err_detail *detail)
{
    struct err_detail why = {{0}};
    uint64_t file_bytes = 0;
    enum err e = km_arena_file_open(o->path, true, &a->fd, &file_bytes, &why);
    if (e == ERR_NOT_FOUND)
        return e;
    if (e != ERR_OK && e != ERR_CORRUPT)
        return err_set(detail, e, "arena_path: %s", why.text);
    if (e == ERR_OK)
        e = arena_fits(a->fd, file_bytes, o, arena_bytes, &a->layout, &why);
    if (e == ERR_OK)
        e = arena_adopt(a, o, report, &why);
    if (e == ERR_OK)
        return e;
    arena_drop(a);
    report->replaced = true;
    snprintf(report->reason, sizeof(report->reason), "%s", why.text);
    return ERR_NOT_FOUND;
}

enum err km_arena_open(const struct km_arena_options *o, struct km_arena **ret_arena,
                       struct km_arena_report *ret_report, struct err_detail *detail)
{
    CHECK(o->epoch > 0 && o->live_count > 0 && o->live_count <= o->slot_count);
    uint64_t arena_bytes = o->arena_bytes;
    uint64_t system_bytes = km_arena_file_system_bytes(o->path);
    if (system_bytes > 0 && arena_bytes > system_bytes)
        arena_bytes = system_bytes / 8 * 7;
    /* Planned before anything at the path is touched: a bad geometry changes no file. */
    struct kv_layout layout;
    struct kv_slots slots = {o->live_count, o->slot_count};
    TRY(kv_layout_plan(&o->geometry, arena_bytes, slots, &layout, detail));

    struct km_arena_report report = {0};
    struct km_arena *a = mem_take(sizeof(*a));
    a->magic = KM_ARENA_MAGIC;
    a->epoch = o->epoch;
    a->fd = -1;
    kv_guard_fill(a->guard, sizeof(a->guard));
    enum err e = arena_try_existing(a, o, arena_bytes, &report, detail);
    if (e == ERR_NOT_FOUND) {
        a->layout = layout;
        e = arena_create(a, o, detail);
    }
    if (e != ERR_OK) {
        arena_drop(a);
        mem_give(a);
        return e;
    }
    CHECK(a->layout.slot_count >= (o->slot_count_min > 0 ? o->slot_count_min : o->slot_count));
    CHECK(a->layout.live_count >= o->live_count);
    *ret_report = report;
    *ret_arena = a;
    return ERR_OK;
}

void km_arena_close(struct km_arena **arena_p)
{
    struct km_arena *a = *arena_p;
    if (!a)
        return;
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    arena_drop(a);
    a->magic = 0;
    mem_give(a);
    *arena_p = NULL;
}

struct kv_superblock km_arena_superblock(const struct km_arena *a)
{
    struct kv_superblock s;
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    memcpy(&s, a->map, sizeof(s));
    return s;
}

const struct kv_layout *km_arena_layout(const struct km_arena *a)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    return &a->layout;
}

struct km_arena_found km_arena_found(const struct km_arena *a)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    return (struct km_arena_found){a->found_count, a->found_snapshot_count, a->found,
                                   a->found_snapshots};
}

int km_arena_fd(const struct km_arena *a)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    return a->fd;
}

bool km_arena_held(const struct km_arena *a, uint64_t incarnation)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    return locked(a->fd, kv_lock_at(incarnation), 1);
}

uint64_t km_arena_headers_repaired(const struct km_arena *a)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    return a->headers_repaired;
}

uint64_t km_arena_guards_broken(const struct km_arena *a, struct km_arena_guard *ret_last)
{
    CHECK_OBJ(a, KM_ARENA_MAGIC);
    *ret_last = a->guard_last;
    return a->guards_broken;
}

enum err km_arena_default_path(const char *cluster, const char *run_dir, uint32_t id,
                               char ret_path[KM_ARENA_PATH_BYTES], struct err_detail *detail)
{
    char suffix[24] = ".kv";
    if (id > 0)
        snprintf(suffix, sizeof(suffix), "-%u.kv", id);
    return host_memory_path(cluster, run_dir, suffix, ret_path, detail);
}
