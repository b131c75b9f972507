/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/json_scan.h"

#include <string.h>
#include <xxhash.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/rng.h"

/* Up to here comparing with each member is as fast as hashing. */
#define KEYS_LINEAR_MAX 16u

static uint64_t keys_seed;

/* What is parsed does not depend on it, only how long a chain of collisions gets. */
__attribute__((constructor)) static void keys_seed_take(void)
{
    rng_system(&keys_seed, sizeof keys_seed);
}

static bool key_is(const struct json *member, const char *key, size_t key_bytes)
{
    return member->key_bytes == key_bytes && memcmp(member->key, key, key_bytes) == 0;
}

struct json *json_keys_find(const struct json_keys *keys, const struct json *object,
                            const char *key, size_t key_bytes)
{
    CHECK(object->type == JSON_OBJECT);
    if (keys->slots == NULL) {
        CHECK(object->count <= KEYS_LINEAR_MAX);
        for (struct json *m = object->child; m != NULL; m = m->next)
            if (key_is(m, key, key_bytes))
                return m;
        return NULL;
    }
    CHECK(keys->used < keys->slot_count);
    uint32_t mask = keys->slot_count - 1;
    uint32_t at = (uint32_t)XXH3_64bits_withSeed(key, key_bytes, keys_seed) & mask;
    for (; keys->slots[at] != NULL; at = (at + 1) & mask)
        if (key_is(keys->slots[at], key, key_bytes))
            return keys->slots[at];
    return NULL;
}

static void keys_put(struct json_keys *keys, struct json *member)
{
    uint32_t mask = keys->slot_count - 1;
    uint32_t at = (uint32_t)XXH3_64bits_withSeed(member->key, member->key_bytes, keys_seed) & mask;
    while (keys->slots[at] != NULL)
        at = (at + 1) & mask;
    keys->slots[at] = member;
    keys->used++;
}

bool json_keys_add(struct json_keys *keys, struct arena *arena, const struct json *object,
                   struct json *member)
{
    CHECK(object->count > 0);
    CHECK(member->key != NULL);
    if (object->count <= KEYS_LINEAR_MAX)
        return true;
    if (object->count <= keys->slot_count / 2) {
        keys_put(keys, member);
        return true;
    }
    /* The old table stays in the arena: the sum of all of them is under twice the last. */
    uint32_t slot_count = keys->slot_count == 0 ? KEYS_LINEAR_MAX * 4 : keys->slot_count;
    while (slot_count / 2 < object->count) {
        if (slot_count > UINT32_MAX / 2)
            return false;
        slot_count *= 2;
    }
    struct json **slots = arena_alloc_array(arena, slot_count, sizeof *slots);
    if (slots == NULL)
        return false;
    *keys = (struct json_keys){.slots = slots, .slot_count = slot_count};
    for (struct json *m = object->child; m != NULL; m = m->next)
        keys_put(keys, m);
    CHECK(keys->used == object->count);
    return true;
}
