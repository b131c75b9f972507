/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_tier.h - what the NVMe tier holds: hash and kind -> size, leaves in order of use.
 *
 * Owned by kvmgr's loop thread.  Everything is taken at create: 60 bytes an object and a word of
 * buckets: 64.  Pure: km_store has the files.
 *
 * A block stands on the one before it in its chain, a snapshot on the block that it ends: without
 * what it stands on an object is of little use, so what others stand on never goes first. */
#ifndef KVMGR_KM_TIER_H
#define KVMGR_KM_TIER_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define KM_TIER_UNIT 4096u /* sizes are counted in these */

enum km_object_kind { KM_OBJECT_BLOCK = 0, KM_OBJECT_SNAPSHOT = 1 };

struct km_object {
    struct hash128 hash, base;          /* base: of the block that it stands on; zeros: none */
    uint32_t bucket_next, sibling_next; /* the latter: same bucket of base */
    uint32_t prev, next;                /* list of leaves, used longest ago first */
    uint32_t above;                     /* objects that stand on it */
    uint32_t used;                      /* number of its last use */
    unsigned units : 31, kind : 1;      /* units 0 = the entry is unused */
};

struct km_tier;

MUST_USE enum err km_tier_create(uint32_t objects_max, uint64_t bytes_max, struct km_tier **ret);
void km_tier_destroy(struct km_tier **tier_p);
uint64_t km_tier_memory(const struct km_tier *t);

bool km_tier_has(const struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash);
/* Newest in use.  parent: of a block, the one before it in its chain; zeros: none.  False: no entry
 * left, or too big for the tier; known ones are made newest. */
bool km_tier_add(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                 const struct hash128 *parent, uint64_t bytes);
/* The same for what was there before the start, told newest first: older than all known. */
bool km_tier_found(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                   const struct hash128 *parent, uint64_t bytes);
void km_tier_touch(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash);
bool km_tier_remove(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash);
/* The object that is to go because the tier holds more than it may; NULL: none. */
const struct km_object *km_tier_excess(const struct km_tier *t);
uint64_t km_tier_bytes(const struct km_tier *t);
uint32_t km_tier_count(const struct km_tier *t, enum km_object_kind kind);
void km_tier_clear(struct km_tier *t);
/* Walks everything and CHECKs counts, lists and buckets: for tests. */
void km_tier_audit(const struct km_tier *t);

#endif
