/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_tier.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define KM_TIER_MAGIC 0x4b4d5452u
#define NONE          UINT32_MAX
/* How far from the old end the place of a new leaf is looked for. */
#define PLACE_LOOK_MAX 64u
#define USE_FIRST      (1u << 31)

STATIC_CHECK(sizeof(struct km_object) == 60);

struct km_tier {
    uint32_t magic;
    uint32_t objects_max, fresh, free_head;
    uint64_t units_max, units;
    uint32_t counts[2];
    struct km_object *objects;
    uint32_t *buckets, *siblings; /* by hash, by base */
    uint32_t bucket_count;        /* of each table */
    uint32_t oldest, newest;
    uint32_t use_first, use_last; /* numbers of uses: of what was there before, and since */
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
    t->bucket_count = objects_max / 2 + 1;
    t->objects = calloc(objects_max, sizeof(*t->objects));
    t->buckets = malloc(t->bucket_count * sizeof(*t->buckets));
    t->siblings = malloc(t->bucket_count * sizeof(*t->siblings));
    if (!t->objects || !t->buckets || !t->siblings) {
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
    free(t->siblings);
    t->magic = 0;
    free(t);
    *tier_p = NULL;
}

void km_tier_clear(struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    memset(t->buckets, 0xff, t->bucket_count * sizeof(*t->buckets));
    memset(t->siblings, 0xff, t->bucket_count * sizeof(*t->siblings));
    t->use_first = t->use_last = USE_FIRST;
    t->fresh = t->counts[0] = t->counts[1] = 0;
    t->units = 0;
    t->free_head = t->oldest = t->newest = NONE;
}

uint64_t km_tier_memory(const struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    return (uint64_t)t->objects_max * sizeof(*t->objects) +
           (uint64_t)t->bucket_count * 2 * sizeof(*t->buckets);
}

/* Of a table of that many, by the high bits of a word that is spread evenly. */
static uint32_t bucket_at(const struct km_tier *t, uint32_t word)
{
    return (uint32_t)((uint64_t)word * t->bucket_count >> 32);
}

static uint32_t *bucket_of(const struct km_tier *t, enum km_object_kind kind,
                           const struct hash128 *hash)
{
    uint32_t word;
    memcpy(&word, hash->bytes + 4, sizeof(word));
    return &t->buckets[bucket_at(t, word ^ (uint32_t)kind * 0x5bd1e995u)];
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

/* --- leaves in order of use */

static void list_drop(struct km_tier *t, uint32_t index)
{
    struct km_object *o = &t->objects[index];
    *(o->prev == NONE ? &t->oldest : &t->objects[o->prev].next) = o->next;
    *(o->next == NONE ? &t->newest : &t->objects[o->next].prev) = o->prev;
}

/* Before `next`; NONE: at the newest end. */
static void list_put(struct km_tier *t, uint32_t index, uint32_t next)
{
    struct km_object *o = &t->objects[index];
    o->next = next;
    o->prev = next == NONE ? t->newest : t->objects[next].prev;
    *(o->prev == NONE ? &t->oldest : &t->objects[o->prev].next) = index;
    *(next == NONE ? &t->newest : &t->objects[next].prev) = index;
}

/* What nothing stands on any more goes to its place by use, which is near the old end: it was used
 * whenever what stood on it was. */
static void leaf_add(struct km_tier *t, uint32_t index)
{
    uint32_t next = t->oldest;
    for (uint32_t i = 0; i < PLACE_LOOK_MAX && next != NONE; i++) {
        if (t->objects[next].used > t->objects[index].used)
            break;
        next = t->objects[next].next;
    }
    list_put(t, index, next);
}

/* --- what stands on what */

static bool has_base(const struct km_object *o)
{
    static const struct hash128 zeros;
    return memcmp(&o->base, &zeros, sizeof(zeros)) != 0;
}

static uint32_t base_find(const struct km_tier *t, const struct km_object *o)
{
    return has_base(o) ? object_find(t, KM_OBJECT_BLOCK, &o->base) : NONE;
}

static uint32_t *siblings_of(const struct km_tier *t, const struct hash128 *base)
{
    uint32_t word;
    memcpy(&word, base->bytes + 8, sizeof(word));
    return &t->siblings[bucket_at(t, word)];
}

/* The new object at index and those that it has to do with. */
static void object_link(struct km_tier *t, uint32_t index)
{
    struct km_object *o = &t->objects[index];
    uint32_t base = base_find(t, o);
    if (base != NONE && t->objects[base].above++ == 0)
        list_drop(t, base);
    for (uint32_t i = o->kind == KM_OBJECT_BLOCK ? *siblings_of(t, &o->hash) : NONE; i != NONE;
         i = t->objects[i].sibling_next)
        o->above += memcmp(&t->objects[i].base, &o->hash, sizeof(o->hash)) == 0;
    if (has_base(o)) {
        uint32_t *bucket = siblings_of(t, &o->base);
        o->sibling_next = *bucket;
        *bucket = index;
    }
}

static void object_unlink(struct km_tier *t, uint32_t index)
{
    struct km_object *o = &t->objects[index];
    uint32_t base = base_find(t, o);
    if (base != NONE) {
        CHECK(t->objects[base].above > 0);
        if (--t->objects[base].above == 0)
            leaf_add(t, base);
    }
    if (has_base(o)) {
        uint32_t *at = siblings_of(t, &o->base);
        while (*at != index)
            at = &t->objects[*at].sibling_next;
        *at = o->sibling_next;
    }
}

bool km_tier_has(const struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash)
{
    return object_find(t, kind, hash) != NONE;
}

static uint32_t entry_take(struct km_tier *t)
{
    uint32_t index = t->free_head;
    if (index != NONE)
        t->free_head = t->objects[index].bucket_next;
    else if (t->fresh < t->objects_max)
        index = t->fresh++;
    return index;
}

static void object_touch(struct km_tier *t, uint32_t index)
{
    struct km_object *o = &t->objects[index];
    o->used = t->use_last++;
    if (o->above > 0)
        return;
    list_drop(t, index);
    list_put(t, index, NONE);
}

static bool object_add(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                       const struct hash128 *parent, uint64_t bytes, bool found)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    uint64_t units = (bytes + KM_TIER_UNIT - 1) / KM_TIER_UNIT;
    if (units == 0 || units > t->units_max || units >= 1u << 31)
        return false;
    uint32_t index = object_find(t, kind, hash);
    if (index != NONE) {
        t->units += units - t->objects[index].units;
        t->objects[index].units = units & 0x7fffffffu;
        if (!found)
            object_touch(t, index);
        return true;
    }
    index = entry_take(t);
    if (index == NONE)
        return false;
    uint32_t *bucket = bucket_of(t, kind, hash);
    struct km_object *o = &t->objects[index];
    *o = (struct km_object){.hash = *hash,
                            .base = kind == KM_OBJECT_SNAPSHOT ? *hash : *parent,
                            .used = found ? --t->use_first : t->use_last++,
                            .units = units & 0x7fffffffu,
                            .kind = kind & 1u};
    if (kind == KM_OBJECT_BLOCK && memcmp(hash, parent, sizeof(*hash)) == 0)
        o->base = (struct hash128){{0}}; /* nothing stands on itself */
    object_link(t, index);
    o->bucket_next = *bucket;
    *bucket = index;
    if (o->above == 0)
        list_put(t, index, found ? t->oldest : NONE);
    t->units += units;
    t->counts[kind]++;
    return true;
}

bool km_tier_add(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                 const struct hash128 *parent, uint64_t bytes)
{
    return object_add(t, kind, hash, parent, bytes, false);
}

bool km_tier_found(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash,
                   const struct hash128 *parent, uint64_t bytes)
{
    return object_add(t, kind, hash, parent, bytes, true);
}

void km_tier_touch(struct km_tier *t, enum km_object_kind kind, const struct hash128 *hash)
{
    uint32_t index = object_find(t, kind, hash);
    if (index != NONE)
        object_touch(t, index);
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
    if (o->above == 0)
        list_drop(t, index);
    object_unlink(t, index);
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
    if (t->units == 0 || (t->units <= t->units_max && !few))
        return NULL;
    if (t->oldest != NONE)
        return &t->objects[t->oldest];
    /* Only files that were tampered with stand on each other in a ring. */
    for (uint32_t i = 0; i < t->fresh; i++)
        if (t->objects[i].units > 0)
            return &t->objects[i];
    return NULL;
}

void km_tier_audit(const struct km_tier *t)
{
    CHECK_OBJ(t, KM_TIER_MAGIC);
    uint32_t leaves = 0, listed = 0, used = 0, counts[2] = {0};
    uint64_t units = 0;
    for (uint32_t i = 0; i < t->fresh; i++) {
        const struct km_object *o = &t->objects[i];
        if (o->units == 0)
            continue;
        uint32_t above = 0;
        for (uint32_t k = 0; k < t->fresh; k++)
            above += t->objects[k].units > 0 && base_find(t, &t->objects[k]) == i;
        CHECK(above == o->above && object_find(t, (enum km_object_kind)o->kind, &o->hash) == i);
        counts[o->kind]++;
        units += o->units;
        leaves += above == 0;
    }
    for (uint32_t i = t->oldest; i != NONE; i = t->objects[i].next) {
        CHECK(t->objects[i].above == 0 && listed++ < leaves);
        CHECK(t->objects[i].used >= used || leaves > PLACE_LOOK_MAX);
        used = t->objects[i].used;
    }
    CHECK(listed == leaves && units == t->units);
    CHECK(counts[0] == t->counts[0] && counts[1] == t->counts[1]);
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
