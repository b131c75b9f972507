/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_map_image.h - a session map as bytes: hash fields and chunks (pure but for malloc).
 *
 * The formats of record are told in km_map.h.  Bound: KM_MAP_BLOCKS_MAX entries. */
#ifndef KVMGR_KM_MAP_IMAGE_H
#define KVMGR_KM_MAP_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvmgr/km_event.h"
#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

#define KM_MAP_CHUNK_BLOCKS 256u
#define KM_MAP_ENTRY_BYTES  22u
#define KM_MAP_HEADER_BYTES 20u
#define KM_MAP_BLOCKS_MAX   KM_SESSION_BLOCKS_MAX
#define KM_MAP_FIELDS       15u
#define KM_MAP_CHUNKS_MAX   (KM_MAP_BLOCKS_MAX / KM_MAP_CHUNK_BLOCKS)
#define KM_MAP_ARGS_MAX     (16u + 2 * KM_MAP_FIELDS + KM_MAP_CHUNKS_MAX)

struct km_map_image {
    uint32_t epoch;
    uint64_t incarnation;
    uint64_t gen; /* that this write will have */
    struct hash128 layout_fp, model_fp, salt;
    struct msg_id request;
    uint32_t token_count;
    uint32_t entry_count;   /* >= 1 */
    const uint8_t *entries; /* KM_MAP_ENTRY_BYTES each */
    uint64_t updated_ms;
    uint32_t snapshot_tokens;
    uint64_t pin_until_ms;
    bool on_tier; /* some entries are on the tier only */
};

/* Arguments of one command; texts of numbers and hashes lie inside, all else is borrowed. */
struct km_map_args {
    int count;
    const char *argv[KM_MAP_ARGS_MAX];
    size_t bytes[KM_MAP_ARGS_MAX];
    char text[KM_MAP_FIELDS + 8][40];
    uint32_t texts;
    uint8_t *chunks; /* kept over writes; km_map_args_fini frees it */
    size_t chunk_bytes;
};

void km_map_args_reset(struct km_map_args *args);
void km_map_args_fini(struct km_map_args *args);
void km_map_args_text(struct km_map_args *args, const char *text); /* borrowed */
void km_map_args_u64(struct km_map_args *args, uint64_t value);

void km_map_entry_put(uint8_t *entry, const struct hash128 *hash, uint32_t block, uint8_t tier,
                      uint8_t flags);
/* KM_MAP_FIELDS names and values. */
void km_map_image_fields(struct km_map_args *args, const struct km_map_image *image);
/* One value a chunk.  ERR_NOMEM. */
MUST_USE enum err km_map_image_chunks(struct km_map_args *args, const struct km_map_image *image);

#endif
