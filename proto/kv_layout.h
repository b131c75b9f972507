/* SPDX-License-Identifier: Apache-2.0 */
/* proto/kv_layout.h - the KV arena file, bit for bit (pure).
 *
 * File: superblock (4096 bytes), block headers (64 bytes each, table padded to 4096), state slot
 * headers (64 bytes each, padded to 4096), block data (each block padded to 4096), slot data (each
 * padded to 4096): first the live slots in f32, then those for snapshots, which may be in bf16.
 * What pads a block or slot is its guard: at least 64 bytes of a fixed pattern from its first use
 * on, which nobody may touch.  Little-endian, fixed offsets, STATIC_CHECKed.
 * kvmgr writes superblock, headers, guards; the worker writes block and slot data only, with
 * KV_FLAG_FOLLOWS the headers too. */
#ifndef PROTO_KV_LAYOUT_H
#define PROTO_KV_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define KV_MAGIC            0x414b4454u /* "TDKA" */
#define KV_LAYOUT_VERSION   3u
#define KV_SUPERBLOCK_BYTES 4096u
#define KV_HEADER_BYTES     64u
#define KV_PAGE_BYTES       4096u
#define KV_GUARD_BYTES_MIN  64u
#define KV_GUARD_BYTES_MAX  (KV_PAGE_BYTES + KV_GUARD_BYTES_MIN)
#define KV_BLOCKS_MAX       ((1u << 23) - 1)
#define KV_STATE_BYTES_MAX  (1ull << 34)
/* In a superblock: of a rank above 0.  Its worker writes the headers; what is committed here may
 * be given up by the authority already, so chains may have holes. */
#define KV_FLAG_FOLLOWS 1u

enum kv_dtype { KV_F32 = 1, KV_BF16 = 2, KV_FP8 = 3 };
enum kv_block_state { KV_FREE = 0, KV_WRITING = 1, KV_COMMITTED = 2 };
enum kv_slot_kind { KV_SLOT_LIVE = 1, KV_SLOT_SNAPSHOT = 2 };

struct kv_geometry { /* what decides the layout */
    uint32_t dsa_layers, latent_dim, index_dim, index_kpool;
    uint32_t block_tokens;
    uint32_t kv_dtype, index_dtype;
    uint32_t snapshot_dtype;          /* KV_F32 or KV_BF16 */
    uint32_t rank, ranks, interleave; /* 0, 1, block_tokens without context sharding */
    uint32_t zero;                    /* in place of padding: the bytes are told */
    uint64_t state_bytes;             /* of a live slot's body, floats */
};

struct kv_layout {
    struct kv_geometry geometry;
    uint64_t layer_stride, index_offset; /* inside a block, see lib/model/model.h */
    uint64_t block_bytes;                /* padded, as all three */
    uint64_t live_bytes, snapshot_bytes; /* of a slot below live_count; of the others */
    uint64_t block_guard_at;             /* inside a block, to its end */
    uint32_t block_count;
    uint32_t live_count, slot_count; /* slots below live_count are live, the others snapshots */
    uint64_t block_headers_at, slot_headers_at, blocks_at, slots_at, arena_bytes; /* offsets */
    struct hash128 layout_fp;
};

/* Row sizes in bytes for a dtype, as lib/base/kv_row.h says. */
uint64_t kv_latent_row_bytes(uint32_t dtype, uint32_t dim);
uint64_t kv_index_row_bytes(uint32_t dtype, uint32_t dim);

/* Bytes that a snapshot's body takes, and with its guard and padding. */
uint64_t kv_snapshot_body_bytes(uint32_t snapshot_dtype, uint64_t state_bytes);
uint64_t kv_snapshot_slot_bytes(uint32_t snapshot_dtype, uint64_t state_bytes);

struct kv_slots {
    uint32_t live;  /* at least 1 */
    uint32_t count; /* with those for snapshots */
};

/* As many blocks as fit in arena_bytes beside the slots.  ERR_INVALID for an impossible geometry
 * or more than KV_BLOCKS_MAX blocks, ERR_NOMEM when not even one block fits. */
MUST_USE enum err kv_layout_plan(const struct kv_geometry *g, uint64_t arena_bytes,
                                 struct kv_slots slots, struct kv_layout *ret_layout,
                                 struct err_detail *detail);

/* The layout of so many blocks and slots, whatever file holds them. */
MUST_USE enum err kv_layout_of(const struct kv_geometry *g, uint32_t block_count,
                               struct kv_slots slots, struct kv_layout *ret_layout,
                               struct err_detail *detail);

struct kv_place { /* in the file; the guard lies in the place's last bytes */
    uint64_t at, bytes;
    uint64_t guard_at, guard_bytes;
};
/* Indices are CHECKed. */
struct kv_place kv_block_place(const struct kv_layout *l, uint32_t block);
struct kv_place kv_slot_place(const struct kv_layout *l, uint32_t slot);

struct kv_superblock { /* at offset 0; rest of the 4096 bytes is zero */
    uint32_t magic, version;
    struct hash128 layout_fp, model_fp;
    uint32_t epoch, flags;
    uint64_t incarnation;
    uint64_t arena_bytes;
    uint32_t block_count, slot_count;
    uint32_t dsa_layers, latent_dim, index_dim, index_kpool;
    uint32_t block_tokens, kv_dtype, index_dtype, rank, ranks, interleave;
    uint64_t state_bytes;
    uint32_t snapshot_dtype;
    uint32_t live_count;
    uint32_t boot; /* crc32c of the host's boot id; 0 = unknown */
    uint32_t crc;  /* crc32c of all bytes before it */
};

struct kv_block_header {
    struct hash128 hash; /* chain hash when COMMITTED, else zero */
    struct hash128 parent;
    uint32_t state; /* enum kv_block_state */
    uint32_t epoch;
    uint64_t generation;
    uint32_t position; /* index of the block in its chain */
    uint32_t data_crc; /* when COMMITTED, of its data with padding: kv_data_sum; 0 = none */
    uint32_t reserved;
    uint32_t crc; /* crc32c of the 60 bytes before it */
};

struct kv_slot_header {
    struct hash128 hash; /* chain hash of a snapshot's boundary */
    uint32_t kind;       /* enum kv_slot_kind */
    uint32_t state;      /* enum kv_block_state */
    uint32_t epoch;
    uint32_t token_count;
    uint64_t generation;
    uint64_t reserved0;
    uint32_t data_crc;
    uint32_t reserved1;
    uint32_t reserved2;
    uint32_t crc;
};

/* Place of the byte that a worker holds a shared OFD lock on while it has the file mapped.  The
 * kernel gives the lock up with the mapping, however the process ends. */
static inline int64_t kv_lock_at(uint64_t incarnation)
{
    return (int64_t)(incarnation >> 1);
}

void kv_guard_fill(uint8_t *ret_guard, uint64_t count);

/* The sum in headers' data_crc: crc32c over the xxh3-128 of each 64 KiB; never 0, which means that
 * there is none. */
#define KV_SUM_PIECE_BYTES 65536u
uint32_t kv_data_sum(const uint8_t *bytes, uint64_t count);
uint32_t kv_data_sum_add(uint32_t sum, const uint8_t *piece, size_t count); /* begins with 0 */
uint32_t kv_data_sum_end(uint32_t sum);

void kv_superblock_seal(struct kv_superblock *s); /* fills crc */
void kv_block_header_seal(struct kv_block_header *h);
void kv_slot_header_seal(struct kv_slot_header *h);
/* Checks magic, version, crc, and that the counts and offsets agree with geometry and file size;
 * returns the layout. */
MUST_USE enum err kv_superblock_check(const struct kv_superblock *s, uint64_t file_bytes,
                                      struct kv_layout *ret_layout, struct err_detail *detail);
MUST_USE enum err kv_block_header_check(const struct kv_block_header *h); /* crc, state */
MUST_USE enum err kv_slot_header_check(const struct kv_slot_header *h);

#endif
