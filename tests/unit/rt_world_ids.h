/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/rt_world_ids.h - what a fake worker says: a function of the prompt alone. */
#ifndef TESTS_UNIT_RT_WORLD_IDS_H
#define TESTS_UNIT_RT_WORLD_IDS_H

#include <stdint.h>
#include <string.h>

#include "lib/base/hash.h"

#define CANARY_N 8u

static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static inline uint32_t token_at(uint64_t prompt, uint32_t k)
{
    return (uint32_t)mix(prompt + 0x9e3779b97f4a7c15ull * (k + 1)) % 100000u;
}

static inline uint64_t prompt_of(const uint32_t *ids, uint32_t count)
{
    uint64_t h = count;
    for (uint32_t i = 0; i < count; i++)
        h = mix(h ^ ids[i]);
    return h;
}

static inline void ids_of(uint32_t seed, uint32_t count, uint32_t *ret_ids)
{
    for (uint32_t i = 0; i < count; i++)
        ret_ids[i] = (uint32_t)mix(seed * 7919ull + i) % 100000u;
}

static inline uint64_t canary_hash(void)
{
    uint32_t prompt[16], ids[CANARY_N];
    for (uint32_t i = 0; i < 16; i++)
        prompt[i] = i + 1;
    for (uint32_t k = 0; k < CANARY_N; k++)
        ids[k] = token_at(prompt_of(prompt, 16), k);
    struct hash128 h = hash_xxh3_once(ids, sizeof(ids));
    uint64_t first;
    memcpy(&first, h.bytes, 8);
    return first;
}

#endif
