/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_arena.h - the named shared-memory arena: its file, superblock and headers.
 *
 * Owned by kvmgr's loop thread, the only writer of superblock and headers.  Maps those alone; data
 * pages belong to the worker (and, block by block, to km_store) and are only read here, to sum up
 * what is committed, so a sparse file stays sparse.  Does file I/O; one arena at a time holds a
 * lock on its file.
 *
 * A header of 64 zero bytes is a block that was never used.  The generation in a header counts how
 * often the block was given up.  An existing file is never shortened or overwritten in place when
 * it does not fit: a new one is made beside it and renamed over it, so that a process that still
 * maps the old one keeps its pages. */
#ifndef KVMGR_KM_ARENA_H
#define KVMGR_KM_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/host.h"
#include "lib/base/hash.h"
#include "proto/kv_layout.h"

#define KM_ARENA_PATH_BYTES HOST_PATH_BYTES

struct km_arena;
struct km_found_block;
struct km_found_snapshot;

struct km_arena_options {
    const char *path;     /* borrowed for the call */
    uint64_t arena_bytes; /* lowered to 7/8 of the file system if it is smaller */
    struct kv_geometry geometry;
    struct hash128 model_fp;
    uint32_t live_count;     /* slots for running sequences */
    uint32_t slot_count;     /* of a new file, with those for snapshots */
    uint32_t slot_count_min; /* a file with fewer is replaced; 0 = slot_count */
    uint32_t epoch;
    uint64_t incarnation;
    uint64_t worker; /* incarnation for which it is opened: a file that another maps is replaced */
    uint32_t boot;   /* of the host: a file of another one is replaced; 0 = unknown */
    /* Of a rank above 0, whose worker writes the headers: see KV_FLAG_FOLLOWS.  A file of just
     * these counts in which everything committed is sound keeps its epoch and incarnation, which
     * say that nothing of it is lost; any other takes the new ones before a byte is changed. */
    bool follows;
};

struct km_arena_report { /* what opening found and did */
    bool adopted;
    bool replaced;                          /* a file was there and did not do */
    char reason[ERR_DETAIL_BYTES];          /* why it was replaced */
    uint32_t blocks_freed;                  /* adopted: WRITING before */
    uint32_t headers_broken;                /* adopted: CRC, state or epoch was wrong */
    uint32_t data_broken;                   /* adopted, follows: committed data that are not */
    uint32_t guards_broken;                 /* adopted: behind blocks and slots not committed */
    uint32_t blocks_found, snapshots_found; /* adopted: still COMMITTED */
};

struct km_arena_found { /* what an adopted file holds, blocks by rising position */
    uint32_t block_count, snapshot_count;
    const struct km_found_block *blocks;
    const struct km_found_snapshot *snapshots;
};

/* Adopts the file at path, or makes it.  A good file of the same layout and model, with enough
 * slots, is adopted under the new epoch: WRITING becomes FREE, sound COMMITTED headers stay and are
 * told by km_arena_found (their data are not read here: see km_proof.h), others become FREE.  Where
 * live slots and snapshots are of one size, the file's live_count becomes that of the options; else
 * it stays, and a file with fewer is replaced.  A bad or foreign file is replaced.  Refused, and
 * left alone: a symbolic link, a directory or other special file, another owner's file
 * (ERR_UNSUPPORTED), one in use (ERR_BUSY), an arena too small for the geometry (ERR_NOMEM, with
 * the numbers), an impossible geometry (ERR_INVALID). */
MUST_USE enum err km_arena_open(const struct km_arena_options *options, struct km_arena **ret_arena,
                                struct km_arena_report *ret_report, struct err_detail *detail);
void km_arena_close(struct km_arena **arena_p); /* the file stays */
struct kv_superblock km_arena_superblock(const struct km_arena *a);
const struct kv_layout *km_arena_layout(const struct km_arena *a);
/* Lives until km_arena_found_drop or close. */
struct km_arena_found km_arena_found(const struct km_arena *a);
void km_arena_found_drop(struct km_arena *a);
/* The file, for reads and writes of data pages by kvmgr's I/O thread; owned by the arena. */
int km_arena_fd(const struct km_arena *a);
/* Whether the worker of that incarnation has the file mapped; true also if that is not known. */
bool km_arena_held(const struct km_arena *a, uint64_t incarnation);
uint64_t km_arena_headers_repaired(const struct km_arena *a);

struct km_arena_guard { /* the last one that was found overwritten; it is whole again */
    bool slot;
    uint32_t index;
};
/* How many were; guards are looked at whenever what they belong to changes its state. */
uint64_t km_arena_guards_broken(const struct km_arena *a, struct km_arena_guard *ret_last);

/* State changes, each sealed with our epoch and CRC.  Indices are CHECKed. */
void km_arena_blocks_writing(struct km_arena *a, const uint32_t *blocks, uint32_t count);
void km_arena_blocks_commit(struct km_arena *a, const uint32_t *blocks, uint32_t count,
                            uint32_t first_position, const struct hash128 *parent,
                            const struct hash128 *hashes);
void km_arena_blocks_free(struct km_arena *a, const uint32_t *blocks, uint32_t count);
void km_arena_slots_writing(struct km_arena *a, const uint32_t *slots, uint32_t count,
                            bool snapshot);
void km_arena_snapshot_commit(struct km_arena *a, uint32_t slot, uint32_t token_count,
                              const struct hash128 *hash);
void km_arena_slots_free(struct km_arena *a, const uint32_t *slots, uint32_t count);

/* /dev/shm/tandem-<cluster>-<16 hex of the hash of run_dir's absolute path>.kv, for others than
 * kvmgr-0 with -<id> before the suffix */
MUST_USE enum err km_arena_default_path(const char *cluster, const char *run_dir, uint32_t id,
                                        char ret_path[KM_ARENA_PATH_BYTES],
                                        struct err_detail *detail);

#endif
