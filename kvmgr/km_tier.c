/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_tier.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define KM_TIER_MAGIC 0x4b4d5452u
#define NONE          UINT32_MAX

STATIC_CHECK(sizeof(struct km_object) == 32);

struct km_tier {
    uint32_t magic;
    uint32_t objects_max, fresh, free_head;
    uint64_t units_max, units;
    uint32_t counts[2];
    struct km_object *objects;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t oldest, newest;
};

enum err km_tier_create(uint32_t objects_max, uint64_t bytes_max, struct km_tier **ret)
{
    CHECK(objects_max > 0 && objects_max < 1u << 30);
    struct km_tier *t = calloc(1, sizeof(*t));
    if (!t)
        return ERR_NOMEM;
    t->magic = KM_TIER_MAGIC;
    t->objects_max = objects_max;
    t->units_max = bytes_max / KM_TIER_UNIT;
    uint32_t buckets = 16;
    while (buckets < objects_max)
        buckets *= 2;
    t->bucket_mask = buckets - 1;
    t->objects = calloc(objects_max, sizeof(*t->objects));
    t->buckets = malloc(buckets * sizeof(*t->buckets));
    if (!t->objects || !t->buckets) {
        km_tier_destroy(&t);
        return ERR_NOMEM;
    }
    km_tier_clear(t);
    *ret = t;
    return ERR_OK;
}

void km_tier_destroy(struct km_tier **tier_p)
{
    struct km_tier *t = *tier_p;
    if (!t)
        return;
    CHECK_OBJ(t, KM_TIER_MAGIC);
    free(t->objects);
    free(t->buckets);
    t->magic = 0;
    free(t);
    *tier_p = NULL;
}

void km_tier_clear(struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    memset(t->buckets, 0xff, ((size_t)t->bucket_mask + 1) * sizeof(*t->buckets));
    t->fresh = t->counts[0] = t->counts[1] = 0;
    t->units = 0;
    t->free_head = t->oldest = t->newest = NONE;
}

uint64_t km_tier_memory(const struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    return (uint64_t)t->objects_max * sizeof(*t->objects) +
           ((uint64_t)t->bucket_mask + 1) * sizeof(*t->buckets);
}

static uint32_t *bucket_of(const struct km_tier *t, enum km_object_kind kind,
                           const struct hash128 *hash)
{
    uint32_t word;
    memcpy(&word, hash->bytes + 4, sizeof(word));
    return &t->buckets[(word ^ (uint32_t)kind * 0x5bd1e995u) & t->bucket_mask];
}

static uint32_t object_find(const struct km_tier *t, enum km_object_kind kind,
                            const struct hash128 *hash)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    for (uint32_t i = *bucket_of(t, kind, hash); i != NONE; i = t->objects[i].bucket_next) {
        if (t->objects[i].kind == (uint32_t)kind &&
            memcmp(&t->objects[i].hash, hash, sizeof(*hash)) == 0)
            return i;
    }
    return NONE;
}

static void list_drop(struct km_tier *t, uint32_t index)
{
    struct km_object *o = &t->objects[index];
    *(o->prev == NONE ? &t->oldest : &t->objects[o->prev].next) = o->next;
    *(o->next == NONE ? &t->newest : &t->objects[o->next].prev) = o->prev;
}

static void list_add(struct km_tier *t, uint32_t index)
{
    struct km_object *o = &t->objects[index];
    o->prev = t->newest;
    o->next = NONE;
    *(t->newest == NONE ? &t->oldest : &t->objects[t->newest].next) = index;
    t->newest = index;
}

bool km_tier_has(const struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash)
{
    return object_find(t, kind, hash) != NONE;
}

bool km_tier_add(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                 uint64_t bytes)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    uint64_t units = (bytes + KM_TIER_UNIT - 1) / KM_TIER_UNIT;
    if (units == 0 || units > t->units_max || units >= 1u << 31)
        return false;
    uint32_t index = object_find(t, kind, hash);
    if (index != NONE) {
        t->units += units - t->objects[index].units;
        t->objects[index].units = units & 0x7fffffffu;
        list_drop(t, index);
        list_add(t, index);
        return true;
    }
    if (t->free_head != NONE) {
        index = t->free_head;
        t->free_head = t->objects[index].bucket_next;
    } else if (t->fresh < t->objects_max) {
        index = t->fresh++;
    } else {
        return false;
    }
    uint32_t *bucket = bucket_of(t, kind, hash);
    t->objects[index] = (struct km_object){
        .hash = *hash, .bucket_next = *bucket, .units = units & 0x7fffffffu, .kind = kind & 1u};
    *bucket = index;
    list_add(t, index);
    t->units += units;
    t->counts[kind]++;
    return true;
}

void km_tier_touch(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash)
{
    uint32_t index = object_find(t, kind, hash);
    if (index == NONE)
        return;
    list_drop(t, index);
    list_add(t, index);
}

bool km_tier_remove(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash)
{
    uint32_t index = object_find(t, kind, hash);
    if (index == NONE)
        return false;
    uint32_t *at = bucket_of(t, kind, hash);
    while (*at != index)
        at = &t->objects[*at].bucket_next;
    struct km_object *o = &t->objects[index];
    *at = o->bucket_next;
    list_drop(t, index);
    CHECK(t->units >= o->units && t->counts[kind] > 0);
    t->units -= o->units;
    t->counts[kind]--;
    *o = (struct km_object){.bucket_next = t->free_head};
    t->free_head = index;
    return true;
}

const struct km_object *km_tier_excess(const struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    /* A few entries are kept free, so that there is one for the next object. */
    bool few = t->free_head == NONE && t->fresh == t->objects_max;
    if (t->oldest == NONE || (t->units <= t->units_max && !few))
        return NULL;
    return &t->objects[t->oldest];
}

uint64_t km_tier_bytes(const struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    return t->units * KM_TIER_UNIT;
}

uint32_t km_tier_count(const struct km_tier *t, enum km_object_kind kind)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    return t->counts[kind];
}
