/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_pool.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define KM_POOL_MAGIC  0x4b4d504fu
#define ID_INDEX_BITS  16u
#define ID_SERIAL_BITS 24u
#define ID_EPOCH_MASK  0xffffffu

/* A lease id is {epoch 24 bits, serial 24 bits, entry 16 bits}.  The serial runs into the epoch's
 * bits after 16 M opens; ids stay unique within a process, which is what they are for. */

struct km_pool {
    uint32_t magic;
    uint32_t block_count, slot_count;
    uint32_t fresh;                  /* blocks from here on were never used */
    uint32_t free_head, free_listed; /* used and given back: last in, first out */
    uint32_t leased, cached;
    uint32_t entry_free_head, entries_free;
    uint64_t serial;
    uint32_t *next;          /* [block_count]: in the free list or in its lease's chain */
    uint32_t *holder;        /* [block_count]: entry that holds it, KM_NONE */
    struct hash128 *hash;    /* [block_count]: of committed blocks */
    struct km_lease *leases; /* [slot_count] */
    uint32_t *entry_next;    /* [slot_count] */
    struct km_pool_scratch scratch;
};

enum err km_pool_create(const struct km_pool_options *options, struct km_pool **ret_pool)
{
    CHECK(options->block_count > 0 && options->block_count < KM_NONE);
    /* km_arena keeps the slots of a file within a small multiple of what is asked for. */
    CHECK(options->slot_count > 0 && options->slot_count <= 1u << ID_INDEX_BITS);
    struct km_pool *p = calloc(1, sizeof(*p));
    if (!p)
        return ERR_NOMEM;
    p->magic = KM_POOL_MAGIC;
    p->block_count = options->block_count;
    p->slot_count = options->slot_count;
    p->free_head = KM_NONE;
    p->serial = ((uint64_t)(options->epoch & ID_EPOCH_MASK) << ID_SERIAL_BITS) + 1;
    /* calloc leaves untouched pages of a large pool to the kernel: a block's words are written when
     * the block is used first. */
    p->next = calloc(p->block_count, sizeof(*p->next));
    p->holder = calloc(p->block_count, sizeof(*p->holder));
    p->hash = calloc(p->block_count, sizeof(*p->hash));
    p->leases = calloc(p->slot_count, sizeof(*p->leases));
    p->entry_next = calloc(p->slot_count, sizeof(*p->entry_next));
    p->scratch.freed = calloc(p->block_count, sizeof(uint32_t));
    p->scratch.taken = calloc(p->block_count, sizeof(uint32_t));
    p->scratch.slots = calloc(p->slot_count, sizeof(uint32_t));
    if (!p->next || !p->holder || !p->hash || !p->leases || !p->entry_next || !p->scratch.freed ||
        !p->scratch.taken || !p->scratch.slots) {
        km_pool_destroy(&p);
        return ERR_NOMEM;
    }
    for (uint32_t i = 0; i < p->slot_count; i++)
        p->entry_next[i] = i + 1 < p->slot_count ? i + 1 : KM_NONE;
    p->entries_free = p->slot_count;
    *ret_pool = p;
    return ERR_OK;
}

void km_pool_destroy(struct km_pool **pool_p)
{
    struct km_pool *p = *pool_p;
    if (!p)
        return;
    CHECK_OBJ(p, KM_POOL_MAGIC);
    free(p->next);
    free(p->holder);
    free(p->hash);
    free(p->leases);
    free(p->entry_next);
    free(p->scratch.freed);
    free(p->scratch.taken);
    free(p->scratch.slots);
    p->magic = 0;
    free(p);
    *pool_p = NULL;
}

static uint32_t pool_blocks_free(const struct km_pool *p)
{
    return p->free_listed + (p->block_count - p->fresh);
}

static void pool_check_sums(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    CHECK(p->fresh <= p->block_count);
    CHECK(pool_blocks_free(p) + p->leased + p->cached == p->block_count);
    CHECK(p->entries_free <= p->slot_count);
    CHECK(p->leased == 0 || p->entries_free < p->slot_count);
}

struct km_pool_counts km_pool_counts(const struct km_pool *p)
{
    pool_check_sums(p);
    return (struct km_pool_counts){
        .blocks_free = pool_blocks_free(p),
        .blocks_leased = p->leased,
        .blocks_cached = p->cached,
        .blocks_total = p->block_count,
        .slots_free = p->entries_free,
        .slots_total = p->slot_count,
    };
}

struct km_pool_scratch km_pool_scratch(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return p->scratch;
}

/* Used blocks are taken before fresh ones, so the pages of a sparse arena that were never needed
 * stay untouched. */
static uint32_t pool_take(struct km_pool *p)
{
    uint32_t block;
    if (p->free_head != KM_NONE) {
        block = p->free_head;
        p->free_head = p->next[block];
        CHECK(p->free_listed > 0);
        p->free_listed--;
        CHECK(p->holder[block] == KM_NONE);
    } else {
        CHECK(p->fresh < p->block_count);
        block = p->fresh++;
    }
    p->leased++;
    return block;
}

static void pool_append(struct km_pool *p, struct km_lease *lease, uint32_t count,
                        uint32_t *ret_blocks)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = pool_take(p);
        p->holder[block] = lease->state_slot;
        p->next[block] = KM_NONE;
        if (lease->last == KM_NONE)
            lease->first = block;
        else
            p->next[lease->last] = block;
        lease->last = block;
        ret_blocks[i] = block;
    }
    lease->block_count += count;
}

enum err km_pool_open(struct km_pool *p, uint32_t owner, const struct msg_id *request,
                      uint32_t blocks_wanted, uint64_t now_us, uint32_t *ret_blocks,
                      struct km_lease **ret_lease)
{
    pool_check_sums(p);
    CHECK(km_pool_find_request(p, owner, request) == NULL);
    if (p->entries_free == 0 || blocks_wanted > pool_blocks_free(p))
        return ERR_KV_FULL;
    uint32_t index = p->entry_free_head;
    CHECK(index < p->slot_count);
    struct km_lease *lease = &p->leases[index];
    CHECK(lease->id == 0);
    p->entry_free_head = p->entry_next[index];
    p->entries_free--;
    *lease = (struct km_lease){
        .id = p->serial++ << ID_INDEX_BITS | index,
        .request = *request,
        .owner = owner,
        .state_slot = index,
        .first = KM_NONE,
        .last = KM_NONE,
        .committed_last = KM_NONE,
        .opened_us = now_us,
    };
    pool_append(p, lease, blocks_wanted, ret_blocks);
    pool_check_sums(p);
    *ret_lease = lease;
    return ERR_OK;
}

static void pool_check_lease(const struct km_pool *p, const struct km_lease *lease)
{
    CHECK(lease->state_slot < p->slot_count && &p->leases[lease->state_slot] == lease);
    CHECK(lease->id != 0);
    CHECK(lease->committed_count <= lease->block_count);
    CHECK((lease->block_count == 0) == (lease->last == KM_NONE));
}

enum err km_pool_extend(struct km_pool *p, struct km_lease *lease, uint32_t blocks_have,
                        uint32_t blocks_wanted, uint32_t *ret_blocks)
{
    pool_check_sums(p);
    pool_check_lease(p, lease);
    if (blocks_have > lease->block_count)
        return ERR_INVALID;
    uint32_t known = lease->block_count - blocks_have; /* given before, the answer was lost */
    if (known > blocks_wanted)
        known = blocks_wanted;
    if (blocks_wanted - known > pool_blocks_free(p))
        return ERR_KV_FULL;
    if (known > 0) {
        uint32_t block = lease->first;
        for (uint32_t i = 0; i < blocks_have; i++)
            block = p->next[block];
        for (uint32_t i = 0; i < known; i++, block = p->next[block]) {
            CHECK(block != KM_NONE && p->holder[block] == lease->state_slot);
            ret_blocks[i] = block;
        }
    }
    pool_append(p, lease, blocks_wanted - known, ret_blocks + known);
    pool_check_sums(p);
    return ERR_OK;
}

enum err km_pool_commit(struct km_pool *p, struct km_lease *lease, uint32_t first,
                        const struct hash128 *hashes, uint32_t count, uint32_t *ret_blocks,
                        uint32_t *ret_first, uint32_t *ret_count, struct hash128 *ret_parent)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    pool_check_lease(p, lease);
    if (first > lease->committed_count || first > lease->block_count ||
        count > lease->block_count - first)
        return ERR_INVALID;
    uint32_t skip = lease->committed_count - first;
    if (skip > count)
        skip = count;
    uint32_t fresh_count = count - skip;
    struct hash128 parent = {{0}};
    if (lease->committed_last != KM_NONE)
        parent = p->hash[lease->committed_last];
    uint32_t block =
        lease->committed_last == KM_NONE ? lease->first : p->next[lease->committed_last];
    for (uint32_t i = 0; i < fresh_count; i++) {
        CHECK(block != KM_NONE && p->holder[block] == lease->state_slot);
        p->hash[block] = hashes[skip + i];
        ret_blocks[i] = block;
        lease->committed_last = block;
        block = p->next[block];
    }
    *ret_first = lease->committed_count;
    *ret_count = fresh_count;
    *ret_parent = parent;
    lease->committed_count += fresh_count;
    pool_check_lease(p, lease);
    return ERR_OK;
}

uint32_t km_pool_release(struct km_pool *p, struct km_lease *lease, uint32_t *ret_blocks)
{
    pool_check_sums(p);
    pool_check_lease(p, lease);
    uint32_t count = lease->block_count, index = lease->state_slot;
    uint32_t block = lease->first;
    for (uint32_t i = 0; i < count; i++) {
        CHECK(block < p->block_count && p->holder[block] == index);
        ret_blocks[i] = block;
        p->holder[block] = KM_NONE;
        block = p->next[block];
    }
    CHECK(block == KM_NONE);
    CHECK(p->leased >= count);
    if (count > 0) {
        p->next[lease->last] = p->free_head;
        p->free_head = lease->first;
    }
    p->free_listed += count;
    p->leased -= count;
    *lease = (struct km_lease){0};
    p->entry_next[index] = p->entries_free > 0 ? p->entry_free_head : KM_NONE;
    p->entry_free_head = index;
    p->entries_free++;
    pool_check_sums(p);
    return count;
}

struct km_lease *km_pool_find(struct km_pool *p, uint32_t owner, uint64_t id)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    uint32_t index = (uint32_t)(id & ((1u << ID_INDEX_BITS) - 1));
    if (id == 0 || index >= p->slot_count)
        return NULL;
    struct km_lease *lease = &p->leases[index];
    return lease->id == id && lease->owner == owner ? lease : NULL;
}

struct km_lease *km_pool_find_request(struct km_pool *p, uint32_t owner,
                                      const struct msg_id *request)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    if (p->entries_free == p->slot_count)
        return NULL;
    for (uint32_t i = 0; i < p->slot_count; i++) {
        struct km_lease *lease = &p->leases[i];
        if (lease->id != 0 && lease->owner == owner &&
            memcmp(&lease->request, request, sizeof(*request)) == 0)
            return lease;
    }
    return NULL;
}

struct km_lease *km_pool_lease_at(struct km_pool *p, uint32_t index)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    CHECK(index < p->slot_count);
    return p->leases[index].id != 0 ? &p->leases[index] : NULL;
}

uint32_t km_pool_id_epoch(uint64_t id)
{
    return (uint32_t)(id >> (ID_INDEX_BITS + ID_SERIAL_BITS)) & ID_EPOCH_MASK;
}

void km_pool_audit(const struct km_pool *p)
{
    pool_check_sums(p);
    uint32_t held = 0, leases = 0, listed = 0;
    for (uint32_t i = 0; i < p->slot_count; i++) {
        const struct km_lease *lease = &p->leases[i];
        if (lease->id == 0)
            continue;
        pool_check_lease(p, lease);
        leases++;
        uint32_t block = lease->first;
        for (uint32_t k = 0; k < lease->block_count; k++, block = p->next[block]) {
            CHECK(block < p->fresh && p->holder[block] == i);
            CHECK(k + 1 != lease->committed_count || block == lease->committed_last);
            held++;
        }
        CHECK(block == KM_NONE);
    }
    for (uint32_t block = p->free_head; block != KM_NONE; block = p->next[block]) {
        CHECK(block < p->fresh && p->holder[block] == KM_NONE);
        CHECK(listed++ < p->free_listed);
    }
    CHECK(listed == p->free_listed && held == p->leased);
    CHECK(leases + p->entries_free == p->slot_count);
}
