/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_pool.h"

#include <stdlib.h>
#include <string.h>

#include "kvmgr/km_evict.h"
#include "kvmgr/km_pool_state.h"
#include "lib/base/check.h"

#define ID_INDEX_BITS  16u
#define ID_SERIAL_BITS 24u
#define ID_EPOCH_MASK  0xffffffu

/* A lease id is {epoch 24 bits, serial 24 bits, entry 16 bits}.  The serial runs into the epoch's
 * bits after 16 M opens; ids stay unique within a process, which is what they are for. */

enum err km_pool_create(const struct km_pool_options *options, struct km_pool **ret_pool)
{
    CHECK(options->block_count > 0 && options->block_count < KM_NONE);
    /* km_arena keeps the slots of a file within a small multiple of what is asked for. */
    CHECK(options->slot_count > 0 && options->slot_count < 1u << ID_INDEX_BITS);
    struct km_pool *p = calloc(1, sizeof(*p));
    if (!p)
        return ERR_NOMEM;
    p->magic = KM_POOL_MAGIC;
    p->options = *options;
    p->free_head = KM_NONE;
    p->serial = ((uint64_t)(options->epoch & ID_EPOCH_MASK) << ID_SERIAL_BITS) + 1;
    struct km_index_options index = {options->block_count, options->slot_count,
                                     options->snapshot_count, options->block_tokens};
    p->leases = calloc(options->slot_count, sizeof(*p->leases));
    p->entry_next = calloc(options->slot_count, sizeof(*p->entry_next));
    p->scratch.freed = calloc(options->block_count, sizeof(uint32_t));
    p->scratch.taken = calloc(options->block_count, sizeof(uint32_t));
    p->scratch.order = calloc(options->block_count, sizeof(uint32_t));
    p->scratch.slots =
        calloc((size_t)options->slot_count + options->snapshot_count, sizeof(uint32_t));
    enum err e = km_index_create(&index, &p->index);
    if (e == ERR_OK)
        e = km_sessions_create(options->sessions_max, options->tenants_max, &p->sessions);
    if (e != ERR_OK || !p->leases || !p->entry_next || !p->scratch.freed || !p->scratch.taken ||
        !p->scratch.order || !p->scratch.slots) {
        km_pool_destroy(&p);
        return ERR_NOMEM;
    }
    for (uint32_t i = 0; i < options->slot_count; i++)
        p->entry_next[i] = i + 1 < options->slot_count ? i + 1 : KM_NONE;
    p->entries_free = options->slot_count;
    *ret_pool = p;
    return ERR_OK;
}

void km_pool_destroy(struct km_pool **pool_p)
{
    struct km_pool *p = *pool_p;
    if (!p)
        return;
    CHECK_OBJ(p, KM_POOL_MAGIC);
    km_index_destroy(&p->index);
    km_sessions_destroy(&p->sessions);
    free(p->leases);
    free(p->entry_next);
    free(p->scratch.freed);
    free(p->scratch.taken);
    free(p->scratch.order);
    free(p->scratch.slots);
    p->magic = 0;
    free(p);
    *pool_p = NULL;
}

static uint32_t pool_blocks_free(const struct km_pool *p)
{
    return p->free_listed + (p->options.block_count - p->fresh);
}

static void pool_check_sums(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    CHECK(p->fresh <= p->options.block_count);
    CHECK(pool_blocks_free(p) + p->used == p->options.block_count);
    CHECK(km_index_cached(p->index) <= p->used);
    CHECK(p->entries_free <= p->options.slot_count);
}

struct km_pool_counts km_pool_counts(const struct km_pool *p)
{
    pool_check_sums(p);
    uint32_t cached = km_index_cached(p->index);
    return (struct km_pool_counts){
        .blocks_free = pool_blocks_free(p),
        .blocks_leased = p->used - cached,
        .blocks_cached = cached,
        .blocks_total = p->options.block_count,
        .slots_free = p->entries_free,
        .slots_total = p->options.slot_count,
    };
}

struct km_pool_scratch *km_pool_scratch(struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return &p->scratch;
}

struct km_index *km_pool_index(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return p->index;
}

struct km_sessions *km_pool_sessions(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return p->sessions;
}

const struct km_pool_options *km_pool_options(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return &p->options;
}

void km_pool_now(struct km_pool *p, uint64_t now_us)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    CHECK(now_us >= p->now_us);
    p->now_us = now_us;
    p->ticks = km_index_ticks(now_us);
}

uint64_t km_pool_time(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return p->now_us;
}

void km_pool_keep_bare(struct km_pool *p, bool keep)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    p->keep_bare = keep;
}

/* --- blocks */

/* Used blocks are taken before fresh ones, so the pages of a sparse arena that were never needed
 * stay untouched. */
uint32_t pool_take(struct km_pool *p, uint16_t holder)
{
    uint32_t block;
    if (p->free_head != KM_NONE) {
        block = p->free_head;
        p->free_head = km_index_node(p->index, block)->link;
        CHECK(p->free_listed > 0);
        p->free_listed--;
    } else {
        CHECK(p->fresh < p->options.block_count);
        block = p->fresh++;
    }
    struct km_node *n = km_index_node(p->index, block);
    CHECK(n->state == KM_NODE_FREE && n->refs == 0);
    *n = (struct km_node){.parent = KM_NONE,
                          .bucket_next = KM_NONE,
                          .link = KM_NONE,
                          .snapshot = KM_NONE,
                          .session = KM_NONE,
                          .holder = holder};
    p->used++;
    return block;
}

/* The block is FREE in the index. */
static void pool_give(struct km_pool *p, uint32_t block)
{
    struct km_node *n = km_index_node(p->index, block);
    CHECK(n->state == KM_NODE_FREE && n->refs == 0 && p->used > 0);
    n->link = p->free_head;
    p->free_head = block;
    p->free_listed++;
    p->used--;
    CHECK(p->scratch.freed_count < p->options.block_count);
    p->scratch.freed[p->scratch.freed_count++] = block;
}

/* block is used again: neither it nor what it stands on leaves. */
static void pool_stay(struct km_pool *p, uint32_t block)
{
    while (block != KM_NONE && km_index_node(p->index, block)->leaving) {
        km_pool_leaving(p, block, false);
        block = km_index_node(p->index, block)->parent;
    }
}

void pool_insert(struct km_pool *p, uint32_t block, const struct hash128 *hash, uint32_t parent,
                 enum km_node_state state, uint32_t session)
{
    pool_stay(p, parent);
    km_index_insert(p->index, block, hash, parent, state, p->ticks);
    km_index_node(p->index, block)->session = session;
    km_sessions_charge(p->sessions, session, 1);
}

static void pool_remove(struct km_pool *p, uint32_t block)
{
    struct km_node *n = km_index_node(p->index, block);
    uint32_t parent = n->parent;
    km_pool_leaving(p, block, false);
    km_sessions_charge(p->sessions, n->session, -1);
    km_index_remove(p->index, block);
    pool_give(p, block);
    if (parent != KM_NONE)
        km_pool_settle(p, parent);
}

void km_pool_settle(struct km_pool *p, uint32_t block)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    km_index_settle(p->index, block, km_evict_class(p, block));
}

void km_pool_unref(struct km_pool *p, uint32_t block)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    struct km_node *n = km_index_node(p->index, block);
    km_index_unref(p->index, block);
    if (n->state == KM_NODE_INDEXED)
        km_pool_settle(p, block);
    else if (n->refs == 0 && n->children == 0)
        pool_remove(p, block); /* a load that nobody waits for any more */
}

void km_pool_snap_free(struct km_pool *p, uint32_t slot)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    km_index_snap_detach(p->index, slot);
    CHECK(p->scratch.slots_count < p->options.slot_count + p->options.snapshot_count);
    p->scratch.slots[p->scratch.slots_count++] = slot;
}

void km_pool_evict(struct km_pool *p, uint32_t block)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    struct km_node *n = km_index_node(p->index, block);
    CHECK(n->state == KM_NODE_INDEXED && n->refs == 0 && n->children == 0);
    if (n->snapshot != KM_NONE)
        km_pool_snap_free(p, n->snapshot);
    pool_remove(p, block);
}

void km_pool_leaving(struct km_pool *p, uint32_t block, bool leaving)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    struct km_node *n = km_index_node(p->index, block);
    if (n->leaving == (leaving ? 1u : 0u))
        return;
    n->leaving = leaving;
    p->leaving += leaving ? 1u : UINT32_MAX;
}

uint32_t km_pool_leaving_count(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return p->leaving;
}

uint32_t km_pool_prune(struct km_pool *p, uint32_t block)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    while (block != KM_NONE && !p->keep_bare) {
        struct km_node *n = km_index_node(p->index, block);
        if (n->state != KM_NODE_INDEXED || n->refs > 0 || n->children > 0 || n->snapshot != KM_NONE)
            break;
        uint32_t parent = n->parent;
        pool_remove(p, block);
        block = parent;
    }
    return block;
}

/* --- leases */

static void pool_append(struct km_pool *p, struct km_lease *lease, uint32_t count,
                        uint32_t *ret_blocks)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = pool_take(p, (uint16_t)lease->state_slot);
        struct km_node *n = km_index_node(p->index, block);
        n->state = KM_NODE_PRIVATE;
        n->refs = 1;
        if (lease->last == KM_NONE)
            lease->first = block;
        else
            km_index_node(p->index, lease->last)->link = block;
        lease->last = block;
        ret_blocks[i] = block;
    }
    lease->block_count += count;
}

/* Refers to every block of the front and writes their ids. */
static void pool_share(struct km_pool *p, struct km_lease *lease, uint32_t tail,
                       uint32_t *ret_blocks)
{
    uint32_t count = km_index_node(p->index, tail)->position + 1;
    lease->chain = km_index_node(p->index, tail)->hash;
    for (uint32_t block = tail, at = count; at > 0; at--) {
        struct km_node *n = km_index_node(p->index, block);
        CHECK(n->state == KM_NODE_INDEXED && n->position == at - 1);
        km_index_ref(p->index, block);
        n->superseded = 0;
        km_pool_leaving(p, block, false);
        km_index_touch(p->index, block, p->ticks);
        ret_blocks[at - 1] = block;
        block = n->parent;
    }
    lease->shared_count = lease->committed_count = lease->block_count = count;
    lease->shared_tail = lease->chain_tail = tail;
}

enum err km_pool_open(struct km_pool *p, const struct km_pool_open *open, uint32_t *ret_blocks,
                      struct km_lease **ret_lease)
{
    pool_check_sums(p);
    CHECK(km_pool_find_request(p, open->owner, &open->request) == NULL);
    uint32_t shared = 0;
    if (open->shared_tail != KM_NONE)
        shared = km_index_node(p->index, open->shared_tail)->position + 1;
    CHECK(shared == 0 || shared < open->blocks_wanted);
    if (p->entries_free == 0 || open->blocks_wanted - shared > pool_blocks_free(p))
        return ERR_KV_FULL;
    uint32_t index = p->entry_free_head;
    CHECK(index < p->options.slot_count);
    struct km_lease *lease = &p->leases[index];
    CHECK(lease->id == 0);
    p->entry_free_head = p->entry_next[index];
    p->entries_free--;
    *lease = (struct km_lease){
        .id = p->serial++ << ID_INDEX_BITS | index,
        .request = open->request,
        .owner = open->owner,
        .state_slot = index,
        .shared_tail = KM_NONE,
        .first = KM_NONE,
        .last = KM_NONE,
        .committed_last = KM_NONE,
        .chain_tail = KM_NONE,
        .held = KM_NONE,
        .restore = KM_NONE,
        .salt = open->salt,
        .opened_us = open->now_us,
        .session = km_sessions_use(p->sessions, &open->sid_hash, &open->salt),
    };
    /* One for the lease itself, so that its session's entry stays while it lives. */
    km_sessions_charge(p->sessions, lease->session, 1);
    if (shared > 0)
        pool_share(p, lease, open->shared_tail, ret_blocks);
    pool_append(p, lease, open->blocks_wanted - shared, ret_blocks + shared);
    pool_check_sums(p);
    *ret_lease = lease;
    return ERR_OK;
}

static void pool_check_lease(const struct km_pool *p, const struct km_lease *lease)
{
    CHECK(lease->state_slot < p->options.slot_count && &p->leases[lease->state_slot] == lease);
    CHECK(lease->id != 0);
    CHECK(lease->committed_count <= lease->block_count);
    CHECK(lease->shared_count <= lease->committed_count);
    CHECK((lease->block_count == lease->shared_count) == (lease->last == KM_NONE));
}

/* Ids [from, from + count) of the lease's chain. */
static void pool_ids(const struct km_pool *p, const struct km_lease *lease, uint32_t from,
                     uint32_t count, uint32_t *ret_blocks)
{
    CHECK(from + count <= lease->block_count);
    uint32_t block = lease->shared_tail;
    for (uint32_t at = lease->shared_count; at > from; at--) {
        if (at - 1 - from < count)
            ret_blocks[at - 1 - from] = block;
        block = km_index_node(p->index, block)->parent;
    }
    block = lease->first;
    for (uint32_t at = lease->shared_count; at < from + count; at++) {
        struct km_node *n = km_index_node(p->index, block);
        CHECK(n->holder == lease->state_slot);
        if (at >= from)
            ret_blocks[at - from] = block;
        block = n->link;
    }
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
    if (known > 0)
        pool_ids(p, lease, blocks_have, known, ret_blocks);
    pool_append(p, lease, blocks_wanted - known, ret_blocks + known);
    pool_check_sums(p);
    return ERR_OK;
}

static void lease_hold(struct km_pool *p, struct km_lease *lease, uint32_t node)
{
    if (node != KM_NONE)
        km_index_ref(p->index, node);
    if (lease->held != KM_NONE)
        km_pool_unref(p, lease->held);
    lease->held = node;
}

/* Puts one own block into the index, or takes the known node of that hash for it. */
static void commit_block(struct km_pool *p, struct km_lease *lease, uint32_t block,
                         const struct hash128 *hash)
{
    struct km_node *own = km_index_node(p->index, block);
    CHECK(own->state == KM_NODE_PRIVATE && own->holder == lease->state_slot);
    lease->committed_last = block;
    lease->committed_count++;
    lease->chain = *hash;
    if (lease->unindexed)
        return;
    uint32_t known = km_index_find(p->index, hash);
    if (known == KM_NONE) {
        uint32_t link = own->link;
        pool_insert(p, block, hash, lease->chain_tail, KM_NODE_INDEXED, lease->session);
        own->link = link;
        lease->chain_tail = block;
        lease_hold(p, lease, KM_NONE);
        return;
    }
    struct km_node *n = km_index_node(p->index, known);
    /* A hash that stands elsewhere in the tree, or whose data are not known to be good, ends what
     * we can index. */
    if (n->state != KM_NODE_INDEXED || n->parent != lease->chain_tail || n->unproven) {
        lease->unindexed = true;
        return;
    }
    n->superseded = 0;
    pool_stay(p, known);
    km_index_touch(p->index, known, p->ticks);
    lease_hold(p, lease, known);
    lease->chain_tail = known;
}

enum err km_pool_commit(struct km_pool *p, struct km_lease *lease, uint32_t first,
                        const struct hash128 *hashes, uint32_t count, uint32_t *ret_blocks,
                        struct km_committed *ret)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    pool_check_lease(p, lease);
    if (first > lease->committed_count || first > lease->block_count ||
        count > lease->block_count - first)
        return ERR_INVALID;
    uint32_t skip = lease->committed_count - first;
    if (skip > count)
        skip = count;
    *ret = (struct km_committed){.first = lease->committed_count, .skip = skip, .fresh = KM_NONE};
    uint32_t block = lease->first;
    if (lease->committed_last != KM_NONE)
        block = km_index_node(p->index, lease->committed_last)->link;
    for (uint32_t i = skip; i < count; i++) {
        CHECK(block != KM_NONE);
        uint32_t next = km_index_node(p->index, block)->link;
        struct hash128 before = lease->chain;
        commit_block(p, lease, block, &hashes[i]);
        if (!lease->unindexed) {
            if (lease->chain_tail == block && ret->fresh == KM_NONE) {
                ret->fresh = ret->count;
                ret->parent = before;
            }
            ret_blocks[ret->count++] = lease->chain_tail;
        }
        block = next;
    }
    if (ret->fresh == KM_NONE)
        ret->fresh = ret->count;
    pool_check_lease(p, lease);
    return ERR_OK;
}

/* Own blocks leave the chain: indexed ones stay as cached ones, the others are freed. */
static void release_own(struct km_pool *p, struct km_lease *lease)
{
    uint32_t block = lease->first;
    while (block != KM_NONE) {
        struct km_node *n = km_index_node(p->index, block);
        uint32_t next = n->link;
        CHECK(n->holder == lease->state_slot && n->refs > 0);
        n->holder = KM_NO_HOLDER;
        if (n->state == KM_NODE_PRIVATE) {
            CHECK(n->refs == 1);
            *n = (struct km_node){.parent = KM_NONE,
                                  .bucket_next = KM_NONE,
                                  .snapshot = KM_NONE,
                                  .session = KM_NONE,
                                  .holder = KM_NO_HOLDER};
            pool_give(p, block);
        } else {
            n->link = KM_NONE;
            km_pool_unref(p, block);
        }
        block = next;
    }
}

void km_pool_release(struct km_pool *p, struct km_lease *lease, enum km_release how)
{
    pool_check_sums(p);
    pool_check_lease(p, lease);
    uint32_t index = lease->state_slot;
    if (lease->restore != KM_NONE)
        km_index_snap(p->index, lease->restore)->refs--;
    release_own(p, lease);
    uint32_t block = lease->shared_tail;
    for (uint32_t i = 0; i < lease->shared_count; i++) {
        uint32_t parent = km_index_node(p->index, block)->parent;
        km_pool_unref(p, block);
        block = parent;
    }
    lease_hold(p, lease, KM_NONE);
    uint32_t tail = km_pool_prune(p, lease->chain_tail);
    km_evict_turn_ended(p, lease, tail, how);
    km_sessions_charge(p->sessions, lease->session, -1);
    *lease = (struct km_lease){0};
    p->entry_next[index] = p->entries_free > 0 ? p->entry_free_head : KM_NONE;
    p->entry_free_head = index;
    p->entries_free++;
    CHECK(p->scratch.slots_count < p->options.slot_count + p->options.snapshot_count);
    p->scratch.slots[p->scratch.slots_count++] = index;
    pool_check_sums(p);
}

struct km_lease *km_pool_find(struct km_pool *p, uint32_t owner, uint64_t id)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    uint32_t index = (uint32_t)(id & ((1u << ID_INDEX_BITS) - 1));
    if (id == 0 || index >= p->options.slot_count)
        return NULL;
    struct km_lease *lease = &p->leases[index];
    return lease->id == id && lease->owner == owner ? lease : NULL;
}

struct km_lease *km_pool_find_request(struct km_pool *p, uint32_t owner,
                                      const struct msg_id *request)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    if (p->entries_free == p->options.slot_count)
        return NULL;
    for (uint32_t i = 0; i < p->options.slot_count; i++) {
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
    CHECK(index < p->options.slot_count);
    return p->leases[index].id != 0 ? &p->leases[index] : NULL;
}

uint32_t km_pool_id_epoch(uint64_t id)
{
    return (uint32_t)(id >> (ID_INDEX_BITS + ID_SERIAL_BITS)) & ID_EPOCH_MASK;
}
