/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_pool_state.h - the pool's inside, for km_pool.c and km_pool_adopt.c only (pure). */
#ifndef KVMGR_KM_POOL_STATE_H
#define KVMGR_KM_POOL_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_pool.h"

#define KM_POOL_MAGIC 0x4b4d504fu

struct km_pool {
    uint32_t magic;
    struct km_pool_options options;
    uint64_t now_us;
    uint32_t ticks;
    bool keep_bare;
    uint32_t pin_cursor;
    uint32_t leaving;
    uint32_t fresh;                  /* blocks from here on were never used */
    uint32_t free_head, free_listed; /* used and given back: last in, first out */
    uint32_t used;                   /* leased or cached */
    uint32_t entry_free_head, entries_free;
    uint64_t serial;
    struct km_index *index;
    struct km_sessions *sessions;
    struct km_lease *leases; /* [slot_count] */
    uint32_t *entry_next;    /* [slot_count] */
    struct km_pool_scratch scratch;
};

uint32_t pool_take(struct km_pool *p, uint16_t holder);
void pool_insert(struct km_pool *p, uint32_t block, const struct hash128 *hash, uint32_t parent,
                 enum km_node_state state, uint32_t session);

#endif
