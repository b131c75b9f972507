/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_map.h - a session map as it stands in Redis, read as hostile bytes (pure).
 *
 * The format of record is told in kvmgr/km_map.h, which writes it.  At most RT_MAP_CHUNKS_MAX
 * chunks are taken; blocks behind them are left out. */
#ifndef ROUTER_RT_MAP_H
#define ROUTER_RT_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define RT_MAP_FIELDS       8u  /* in the order of enum rt_map_field */
#define RT_MAP_FIELD_BYTES  64u /* longer ones are no map's */
#define RT_MAP_CHUNKS_MAX   64u
#define RT_MAP_CHUNK_BLOCKS 256u
#define RT_MAP_CHUNK_BYTES  (20u + 22u * RT_MAP_CHUNK_BLOCKS)
#define RT_MAP_BLOCKS_MAX   (RT_MAP_CHUNKS_MAX * RT_MAP_CHUNK_BLOCKS)
#define RT_MAP_ITEM_BYTES   20u /* of a KvAdopt: hash 16, block u32 LE */

enum rt_map_field {
    RT_MAP_EPOCH,
    RT_MAP_INCARNATION,
    RT_MAP_LAYOUT_FP,
    RT_MAP_MODEL_FP,
    RT_MAP_SALT,
    RT_MAP_TOKENS,
    RT_MAP_BLOCKS,
    RT_MAP_GEN,
};

struct rt_map_bytes { /* bytes NULL = not there */
    const char *bytes;
    size_t count;
};

struct rt_map {
    uint64_t epoch, incarnation, gen;
    struct hash128 layout_fp, model_fp, salt;
    uint32_t token_count;
    uint32_t item_count;  /* >= 1 */
    const uint8_t *items; /* RT_MAP_ITEM_BYTES each */
};

/* Fills ret_map and `items`, which has room for RT_MAP_BLOCKS_MAX of them.  ERR_NOT_FOUND: no map.
 * ERR_CORRUPT names what is wrong with it. */
MUST_USE enum err rt_map_read(const struct rt_map_bytes fields[RT_MAP_FIELDS],
                              const struct rt_map_bytes *chunks, uint32_t chunk_count,
                              uint8_t *items, struct rt_map *ret_map, struct err_detail *detail);

#endif
