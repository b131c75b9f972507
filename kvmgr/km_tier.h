/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_tier.h - which objects the NVMe tier holds: hash and kind -> size, in order of use.
 *
 * Owned by kvmgr's loop thread.  Everything is taken at create: 32 bytes an object and two words of
 * buckets at most.  Pure: km_store has the files. */
#ifndef KVMGR_KM_TIER_H
#define KVMGR_KM_TIER_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define KM_TIER_UNIT 4096u /* sizes are counted in these */

enum km_object_kind { KM_OBJECT_BLOCK = 0, KM_OBJECT_SNAPSHOT = 1 };

struct km_object {
    struct hash128 hash;
    uint32_t bucket_next, prev, next; /* list of use, oldest first */
    unsigned units : 31, kind : 1;    /* units 0 = the entry is unused */
};

struct km_tier;

MUST_USE enum err km_tier_create(uint32_t objects_max, uint64_t bytes_max, struct km_tier **ret);
void km_tier_destroy(struct km_tier **tier_p);
uint64_t km_tier_memory(const struct km_tier *t);

bool km_tier_has(const struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash);
/* Newest in use.  False: no entry left, or too big for the tier; known ones are made newest. */
bool km_tier_add(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                 uint64_t bytes);
void km_tier_touch(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash);
bool km_tier_remove(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash);
/* The object that is to go because the tier holds more than it may; NULL: none. */
const struct km_object *km_tier_excess(const struct km_tier *t);
uint64_t km_tier_bytes(const struct km_tier *t);
uint32_t km_tier_count(const struct km_tier *t, enum km_object_kind kind);
void km_tier_clear(struct km_tier *t);

#endif
