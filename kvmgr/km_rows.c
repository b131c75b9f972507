/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "kvmgr/km_audit.h"
#include "kvmgr/km_epoch.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

#define ROWS_MAGIC 0x4b4d5257u

struct km_rows {
    uint32_t magic;
    struct km_rows_options options; /* its texts: below */
    char path[KM_ARENA_PATH_BYTES];
    char state_dir[512];
    uint32_t epoch_local; /* used up, on disk */
    struct km_arena *arena;
    uint64_t worker; /* that the arena was opened for */
    struct hash128 model_fp;
    struct err_detail text;
    struct km_rows_counts counts;
};

enum err km_rows_create(const struct km_rows_options *options, struct km_rows **ret_rows,
                        struct err_detail *detail)
{
    struct km_rows *r = mem_take(sizeof(*r));
    r->magic = ROWS_MAGIC;
    r->options = *options;
    CHECK(strlen(options->path) < sizeof(r->path));
    snprintf(r->path, sizeof(r->path), "%s", options->path);
    snprintf(r->state_dir, sizeof(r->state_dir), "%s", options->state_dir);
    enum err e = km_epoch_read(r->state_dir, options->id, &r->epoch_local, detail);
    if (e == ERR_CORRUPT) {
        log_warn(KVMGR, "epoch file ignored", "reason=\"%s\"", detail->text);
        e = ERR_OK;
    }
    if (e != ERR_OK) {
        km_rows_destroy(&r);
        return e;
    }
    *ret_rows = r;
    return ERR_OK;
}

void km_rows_destroy(struct km_rows **rows_p)
{
    struct km_rows *r = *rows_p;
    if (!r)
        return;
    CHECK_OBJ(r, ROWS_MAGIC);
    km_arena_close(&r->arena);
    r->magic = 0;
    mem_give(r);
    *rows_p = NULL;
}

/* The layout that the authority's counts give with this rank's geometry. */
static enum err layout_of(const struct msg_kv_attach *want, struct kv_layout *ret_layout,
                          struct err_detail *detail)
{
    struct kv_geometry g = {
        .dsa_layers = want->dsa_layers,
        .latent_dim = want->latent_dim,
        .index_dim = want->index_dim,
        .index_kpool = want->index_kpool,
        .block_tokens = want->block_tokens,
        .kv_dtype = want->kv_dtype,
        .index_dtype = want->index_dtype,
        .snapshot_dtype = want->snapshot_dtype,
        .rank = want->rank,
        .ranks = want->ranks,
        .interleave = want->interleave,
        .state_bytes = want->state_bytes,
    };
    if (want->block_count == 0)
        return err_set(detail, ERR_UNSUPPORTED,
                       "this kvmgr has the role arena: it leases nothing; rank 0 needs one of role "
                       "authority");
    struct kv_slots slots = {want->live_slots, want->slot_count};
    return kv_layout_of(&g, want->block_count, slots, ret_layout, detail);
}

/* Pages are taken when they are first used: what does not fit would end the worker then. */
static enum err room_check(const struct km_rows *r, uint64_t bytes, struct err_detail *detail)
{
    char folder[KM_ARENA_PATH_BYTES];
    struct stat st;
    struct statvfs fs;
    uint64_t taken = 0;
    if (lstat(r->path, &st) == 0 && S_ISREG(st.st_mode))
        taken = (uint64_t)st.st_blocks * 512;
    snprintf(folder, sizeof(folder), "%s", r->path);
    char *slash = strrchr(folder, '/');
    CHECK(slash != NULL); /* main refuses other paths */
    slash[slash == folder ? 1 : 0] = '\0';
    if (statvfs(folder, &fs) != 0)
        return err_set(detail, ERR_IO, "%s cannot be asked for its room", folder);
    uint64_t left = (uint64_t)fs.f_bavail * fs.f_frsize;
    uint64_t missing = taken < bytes ? bytes - taken : 0;
    if (missing > left)
        return err_set(detail, ERR_NOMEM,
                       "%.200s: the arena needs %" PRIu64 " bytes more, %" PRIu64
                       " are free: lower kvmgr.arena_bytes of rank 0 or choose another arena_path",
                       r->path, missing, left);
    return ERR_OK;
}

static void report_log(struct km_rows *r, const struct km_arena_report *report)
{
    struct kv_superblock s = km_arena_superblock(r->arena);
    uint32_t broken = report->headers_broken + report->data_broken;
    r->counts.broken += broken;
    r->counts.blocks_adopted += report->blocks_found;
    r->counts.snapshots_adopted += report->snapshots_found;
    if (report->replaced)
        log_warn(KVMGR, "arena replaced", "path=%s reason=\"%s\"", r->path, report->reason);
    if (broken > 0)
        log_warn(KVMGR, "damage in the arena, nothing kept counts any more",
                 "headers=%u data=%u epoch=%u", report->headers_broken, report->data_broken,
                 s.epoch);
    log_info(KVMGR, report->adopted ? "arena adopted" : "arena made",
             "path=%s bytes=%" PRIu64
             " blocks=%u slots=%u freed=%u committed=%u snapshots=%u epoch=%u",
             r->path, s.arena_bytes, s.block_count, s.slot_count, report->blocks_freed,
             report->blocks_found, report->snapshots_found, s.epoch);
}

static enum err arena_open(struct km_rows *r, const struct msg_kv_attach *want,
                           const struct kv_layout *layout, struct err_detail *detail)
{
    struct km_epoch_choice choice;
    struct km_arena_report report;
    TRY(room_check(r, layout->arena_bytes, detail));
    TRY(km_epoch_choose(r->epoch_local, km_audit_epoch(r->path), 0, &choice, detail));
    struct km_arena_options o = {
        .path = r->path,
        .arena_bytes = layout->arena_bytes,
        .geometry = layout->geometry,
        .model_fp = want->model_fp,
        .live_count = layout->live_count,
        .slot_count = layout->slot_count,
        .epoch = choice.epoch,
        .worker = want->incarnation,
        .boot = r->options.boot,
        .follows = true,
    };
    while (o.incarnation == 0) /* which means "none" elsewhere */
        rng_system(&o.incarnation, sizeof(o.incarnation));
    /* Used up before the file can show it. */
    TRY(km_epoch_write(r->state_dir, r->options.id, choice.epoch, detail));
    r->epoch_local = choice.epoch;
    TRY(km_arena_open(&o, &r->arena, &report, detail));
    report_log(r, &report);
    km_arena_found_drop(r->arena);
    r->worker = want->incarnation;
    r->model_fp = want->model_fp;
    if (km_arena_layout(r->arena)->block_count != layout->block_count) {
        km_arena_close(&r->arena);
        return err_set(detail, ERR_NOMEM, "%.200s: its file system is too small", r->path);
    }
    return ERR_OK;
}

/* Whether the path still names the file that is open: a worker maps by path. */
static bool still_there(const struct km_rows *r)
{
    struct stat opened, named;
    return fstat(km_arena_fd(r->arena), &opened) == 0 && lstat(r->path, &named) == 0 &&
           opened.st_ino == named.st_ino && opened.st_dev == named.st_dev &&
           (uint64_t)named.st_size == km_arena_layout(r->arena)->arena_bytes;
}

static bool has_it(const struct km_rows *r, const struct msg_kv_attach *want,
                   const struct kv_layout *layout)
{
    if (!r->arena || r->worker != want->incarnation ||
        memcmp(&r->model_fp, &want->model_fp, sizeof(r->model_fp)) != 0 || !still_there(r))
        return false;
    const struct kv_layout *have = km_arena_layout(r->arena);
    return have->block_count == layout->block_count && have->slot_count == layout->slot_count &&
           have->live_count == layout->live_count &&
           memcmp(&have->layout_fp, &layout->layout_fp, sizeof(have->layout_fp)) == 0;
}

void km_rows_attach(struct km_rows *r, const struct msg_kv_attach *want,
                    struct msg_kv_attach_reply *ret_reply)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    struct kv_layout layout;
    r->text = (struct err_detail){{0}};
    enum err e = layout_of(want, &layout, &r->text);
    if (e == ERR_OK && !has_it(r, want, &layout)) {
        km_arena_close(&r->arena);
        e = arena_open(r, want, &layout, &r->text);
    }
    if (e != ERR_OK) {
        r->counts.refused++;
        r->text.text[utf8_valid_prefix(r->text.text, strlen(r->text.text))] = '\0';
        log_warn(KVMGR, "attach refused", "worker=%u code=%s reason=\"%s\"", want->worker_id,
                 err_name(e), r->text.text);
        *ret_reply =
            (struct msg_kv_attach_reply){.code = e, .text = r->text.text, .arena_path = ""};
        return;
    }
    r->counts.attaches++;
    struct kv_superblock s = km_arena_superblock(r->arena);
    *ret_reply = (struct msg_kv_attach_reply){
        .code = ERR_OK,
        .text = "",
        .arena_path = r->path,
        .incarnation = s.incarnation,
        .epoch = s.epoch,
        .arena_bytes = s.arena_bytes,
        .layout_fp = s.layout_fp,
        .block_tokens = s.block_tokens,
        .block_count = s.block_count,
        .slot_count = s.slot_count,
        .kv_dtype = s.kv_dtype,
        .index_dtype = s.index_dtype,
        .snapshot_dtype = s.snapshot_dtype,
        .live_slots = s.live_count,
    };
}

void km_rows_ping(const struct km_rows *r, uint64_t worker, struct msg_kv_state *ret_state)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    *ret_state = (struct msg_kv_state){0};
    if (!r->arena || r->worker != worker)
        return;
    struct kv_superblock s = km_arena_superblock(r->arena);
    ret_state->incarnation = s.incarnation;
    ret_state->epoch = s.epoch;
}

const struct km_arena *km_rows_arena(const struct km_rows *r)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    return r->arena;
}

const struct km_rows_counts *km_rows_counts(const struct km_rows *r)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    return &r->counts;
}
