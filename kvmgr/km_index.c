/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_index.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define KM_INDEX_MAGIC 0x4b4d4958u
#define TICK_SHIFT     14u /* microseconds to ticks */
/* A block that lies 1,024 tokens deeper outlives one of the same age by a second, by ten minutes at
 * most: about what computing the tokens before it costs. */
#define TICKS_A_SECOND 61u
#define BONUS_TOKENS   1024u
#define BONUS_MAX      (600u * TICKS_A_SECOND)

struct km_index {
    uint32_t magic;
    struct km_index_options options;
    struct km_node *nodes;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t *heap;
    uint32_t heap_count, count, cached;
    struct km_snap *snaps;
    uint32_t snaps_by_state[4];
};

STATIC_CHECK(sizeof(struct km_node) == 52);
STATIC_CHECK(KM_INDEX_BLOCKS_END <= 1u << 24); /* bits of km_node.position */

enum err km_index_create(const struct km_index_options *options, struct km_index **ret)
{
    CHECK(options->block_count > 0 && options->block_count < KM_INDEX_BLOCKS_END);
    CHECK(options->block_tokens > 0);
    struct km_index *ix = calloc(1, sizeof(*ix));
    if (!ix)
        return ERR_NOMEM;
    ix->magic = KM_INDEX_MAGIC;
    ix->options = *options;
    uint32_t buckets = 16;
    while (buckets < options->block_count)
        buckets *= 2;
    ix->bucket_mask = buckets - 1;
    /* calloc leaves the pages of a large table to the kernel until they are used. */
    ix->nodes = calloc(options->block_count, sizeof(*ix->nodes));
    ix->heap = calloc(options->block_count, sizeof(*ix->heap));
    ix->buckets = malloc(buckets * sizeof(*ix->buckets));
    ix->snaps = calloc(options->snapshot_count + 1, sizeof(*ix->snaps));
    if (!ix->nodes || !ix->heap || !ix->buckets || !ix->snaps) {
        km_index_destroy(&ix);
        return ERR_NOMEM;
    }
    memset(ix->buckets, 0xff, buckets * sizeof(*ix->buckets));
    ix->snaps_by_state[KM_SNAP_FREE] = options->snapshot_count;
    *ret = ix;
    return ERR_OK;
}

void km_index_destroy(struct km_index **index_p)
{
    struct km_index *ix = *index_p;
    if (!ix)
        return;
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    free(ix->nodes);
    free(ix->heap);
    free(ix->buckets);
    free(ix->snaps);
    ix->magic = 0;
    free(ix);
    *index_p = NULL;
}

uint64_t km_index_bytes(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return (uint64_t)ix->options.block_count * (sizeof(*ix->nodes) + sizeof(*ix->heap)) +
           ((uint64_t)ix->bucket_mask + 1) * sizeof(*ix->buckets);
}

uint32_t km_index_ticks(uint64_t now_us)
{
    return (uint32_t)(now_us >> TICK_SHIFT);
}

struct km_node *km_index_node(const struct km_index *ix, uint32_t block)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    CHECK(block < ix->options.block_count);
    return &ix->nodes[block];
}

/* --- table */

static uint32_t *bucket_of(const struct km_index *ix, const struct hash128 *hash)
{
    uint32_t word;
    memcpy(&word, hash->bytes, sizeof(word));
    return &ix->buckets[word & ix->bucket_mask];
}

uint32_t km_index_find(const struct km_index *ix, const struct hash128 *hash)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    for (uint32_t b = *bucket_of(ix, hash); b != KM_NONE; b = ix->nodes[b].bucket_next) {
        DCHECK(ix->nodes[b].state >= KM_NODE_INDEXED);
        if (memcmp(&ix->nodes[b].hash, hash, sizeof(*hash)) == 0)
            return b;
    }
    return KM_NONE;
}

static void table_drop(struct km_index *ix, uint32_t block)
{
    struct km_node *n = &ix->nodes[block];
    uint32_t *at = bucket_of(ix, &n->hash);
    while (*at != block) {
        CHECK(*at != KM_NONE);
        at = &ix->nodes[*at].bucket_next;
    }
    *at = n->bucket_next;
    n->bucket_next = KM_NONE;
}

/* --- heap */

static uint64_t order_of(const struct km_index *ix, uint32_t block)
{
    const struct km_node *n = &ix->nodes[block];
    uint64_t bonus =
        (uint64_t)n->position * ix->options.block_tokens * TICKS_A_SECOND / BONUS_TOKENS;
    if (bonus > BONUS_MAX)
        bonus = BONUS_MAX;
    return ((uint64_t)n->class << 40) + n->used + bonus;
}

static bool goes_before(const struct km_index *ix, uint32_t a, uint32_t b)
{
    uint64_t x = order_of(ix, a), y = order_of(ix, b);
    return x != y ? x < y : a < b;
}

static void heap_put(struct km_index *ix, uint32_t at, uint32_t block)
{
    ix->heap[at] = block;
    ix->nodes[block].link = at;
}

static void heap_up(struct km_index *ix, uint32_t at)
{
    uint32_t block = ix->heap[at];
    while (at > 0 && goes_before(ix, block, ix->heap[(at - 1) / 2])) {
        heap_put(ix, at, ix->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_put(ix, at, block);
}

static void heap_down(struct km_index *ix, uint32_t at)
{
    uint32_t block = ix->heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= ix->heap_count)
            break;
        if (child + 1 < ix->heap_count && goes_before(ix, ix->heap[child + 1], ix->heap[child]))
            child++;
        if (!goes_before(ix, ix->heap[child], block))
            break;
        heap_put(ix, at, ix->heap[child]);
        at = child;
    }
    heap_put(ix, at, block);
}

static void heap_add(struct km_index *ix, uint32_t block)
{
    CHECK(!ix->nodes[block].queued && ix->heap_count < ix->options.block_count);
    ix->nodes[block].queued = 1;
    heap_put(ix, ix->heap_count, block);
    ix->heap_count++;
    heap_up(ix, ix->heap_count - 1);
}

static void heap_drop(struct km_index *ix, uint32_t block)
{
    uint32_t at = ix->nodes[block].link;
    CHECK(at < ix->heap_count && ix->heap[at] == block);
    ix->nodes[block].queued = 0;
    ix->nodes[block].link = KM_NONE;
    uint32_t last = ix->heap[--ix->heap_count];
    if (last == block)
        return;
    heap_put(ix, at, last);
    heap_up(ix, at);
    heap_down(ix, ix->nodes[last].link);
}

/* --- nodes */

void km_index_insert(struct km_index *ix, uint32_t block, const struct hash128 *hash,
                     uint32_t parent, enum km_node_state state, uint32_t now_ticks)
{
    struct km_node *n = km_index_node(ix, block);
    CHECK(n->state == KM_NODE_PRIVATE || n->state == KM_NODE_FREE);
    CHECK(state == KM_NODE_INDEXED || state == KM_NODE_LOADING);
    CHECK(n->refs > 0 || n->state == KM_NODE_FREE);
    n->position = 0;
    if (parent != KM_NONE) {
        struct km_node *p = km_index_node(ix, parent);
        CHECK(p->state == KM_NODE_INDEXED || (uint32_t)p->state == (uint32_t)state);
        if (p->queued)
            heap_drop(ix, parent);
        p->children++;
        n->position = (p->position + 1) & 0xffffffu;
    }
    uint32_t *bucket = bucket_of(ix, hash);
    n->hash = *hash;
    n->parent = parent;
    n->bucket_next = *bucket;
    *bucket = block;
    n->children = 0;
    n->state = state;
    n->class = KM_CLASS_PLAIN;
    n->queued = n->superseded = n->leaving = n->storing = n->tested = 0;
    n->unproven = n->proving = n->damaged = n->proof_stale = n->write_stale = 0;
    n->snapshot = KM_NONE;
    n->session = KM_NONE;
    n->used = now_ticks;
    ix->count++;
    if (state == KM_NODE_INDEXED && n->refs == 0) {
        ix->cached++;
        n->link = KM_NONE;
    }
}

void km_index_loaded(struct km_index *ix, uint32_t block)
{
    struct km_node *n = km_index_node(ix, block);
    CHECK(n->state == KM_NODE_LOADING && n->refs > 0);
    CHECK(n->parent == KM_NONE || ix->nodes[n->parent].state == KM_NODE_INDEXED);
    n->state = KM_NODE_INDEXED;
}

void km_index_remove(struct km_index *ix, uint32_t block)
{
    struct km_node *n = km_index_node(ix, block);
    CHECK(n->state == KM_NODE_INDEXED || n->state == KM_NODE_LOADING);
    CHECK(n->refs == 0 && n->children == 0 && n->snapshot == KM_NONE);
    if (n->queued)
        heap_drop(ix, block);
    table_drop(ix, block);
    if (n->state == KM_NODE_INDEXED) {
        CHECK(ix->cached > 0);
        ix->cached--;
    }
    if (n->parent != KM_NONE) {
        CHECK(ix->nodes[n->parent].children > 0);
        ix->nodes[n->parent].children--;
    }
    CHECK(ix->count > 0);
    ix->count--;
    *n = (struct km_node){.parent = KM_NONE,
                          .bucket_next = KM_NONE,
                          .link = KM_NONE,
                          .snapshot = KM_NONE,
                          .session = KM_NONE,
                          .holder = KM_NO_HOLDER};
}

void km_index_ref(struct km_index *ix, uint32_t block)
{
    struct km_node *n = km_index_node(ix, block);
    CHECK(n->state >= KM_NODE_INDEXED && n->refs < UINT16_MAX);
    if (n->queued)
        heap_drop(ix, block);
    if (n->refs++ == 0 && n->state == KM_NODE_INDEXED)
        ix->cached--;
}

void km_index_unref(struct km_index *ix, uint32_t block)
{
    struct km_node *n = km_index_node(ix, block);
    CHECK(n->state >= KM_NODE_INDEXED && n->refs > 0 && !n->queued);
    if (--n->refs == 0) {
        if (n->state == KM_NODE_INDEXED)
            ix->cached++;
        CHECK(n->holder == KM_NO_HOLDER);
        n->link = KM_NONE;
    }
}

void km_index_settle(struct km_index *ix, uint32_t block, enum km_class class)
{
    struct km_node *n = km_index_node(ix, block);
    bool idle = n->state == KM_NODE_INDEXED && n->refs == 0 && n->children == 0;
    if (n->queued && (!idle || (uint32_t)n->class != (uint32_t) class))
        heap_drop(ix, block);
    n->class = class & 3u;
    if (idle && !n->queued)
        heap_add(ix, block);
}

void km_index_touch(struct km_index *ix, uint32_t block, uint32_t now_ticks)
{
    struct km_node *n = km_index_node(ix, block);
    if (n->used == now_ticks)
        return;
    if (!n->queued) {
        n->used = now_ticks;
        return;
    }
    heap_drop(ix, block);
    n->used = now_ticks;
    heap_add(ix, block);
}

uint32_t km_index_first_out(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return ix->heap_count > 0 ? ix->heap[0] : KM_NONE;
}

uint32_t km_index_cached(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return ix->cached;
}

uint32_t km_index_count(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return ix->count;
}

/* --- snapshots */

uint32_t km_index_snap_first(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return ix->options.snapshot_first;
}

uint32_t km_index_snap_count(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return ix->options.snapshot_count;
}

struct km_snap *km_index_snap(const struct km_index *ix, uint32_t slot)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    if (slot < ix->options.snapshot_first ||
        slot - ix->options.snapshot_first >= ix->options.snapshot_count)
        return NULL;
    return &ix->snaps[slot - ix->options.snapshot_first];
}

uint32_t km_index_snaps(const struct km_index *ix, enum km_snap_state state)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    return ix->snaps_by_state[state];
}

void km_index_snap_set(struct km_index *ix, uint32_t slot, enum km_snap_state state)
{
    struct km_snap *s = km_index_snap(ix, slot);
    CHECK(s != NULL && ix->snaps_by_state[s->state] > 0);
    ix->snaps_by_state[s->state]--;
    ix->snaps_by_state[state]++;
    s->state = (uint8_t)state;
    s->node = KM_NONE;
    s->covered = s->storing = s->leaving = s->unproven = s->proving = s->damaged = 0;
    s->proof_stale = s->write_stale = 0;
}

void km_index_snap_attach(struct km_index *ix, uint32_t slot, uint32_t block, uint32_t now_ticks)
{
    struct km_snap *s = km_index_snap(ix, slot);
    struct km_node *n = km_index_node(ix, block);
    CHECK(s != NULL && n->state >= KM_NODE_INDEXED);
    CHECK(n->snapshot == KM_NONE || n->snapshot == slot);
    km_index_snap_set(ix, slot, KM_SNAP_KEPT);
    s->node = block;
    s->used = now_ticks;
    n->snapshot = slot;
}

void km_index_snap_detach(struct km_index *ix, uint32_t slot)
{
    struct km_snap *s = km_index_snap(ix, slot);
    CHECK(s != NULL && s->refs == 0);
    if (s->node != KM_NONE) {
        struct km_node *n = km_index_node(ix, s->node);
        CHECK(n->snapshot == slot);
        n->snapshot = KM_NONE;
    }
    km_index_snap_set(ix, slot, KM_SNAP_FREE);
}

/* --- audit */

static void audit_node(const struct km_index *ix, uint32_t block, uint32_t *children)
{
    const struct km_node *n = &ix->nodes[block];
    CHECK(km_index_find(ix, &n->hash) == block);
    if (n->parent != KM_NONE) {
        const struct km_node *p = &ix->nodes[n->parent];
        CHECK(p->state >= KM_NODE_INDEXED && p->position + 1 == n->position);
        CHECK(n->state == KM_NODE_LOADING || p->state == KM_NODE_INDEXED);
        children[n->parent]++;
    } else {
        CHECK(n->position == 0);
    }
    bool idle = n->state == KM_NODE_INDEXED && n->refs == 0 && n->children == 0;
    CHECK(n->queued == idle);
    CHECK(!n->queued || ix->heap[n->link] == block);
    if (n->snapshot != KM_NONE) {
        const struct km_snap *s = km_index_snap(ix, n->snapshot);
        CHECK(s != NULL && s->node == block && s->state == KM_SNAP_KEPT);
    }
}

void km_index_audit(const struct km_index *ix)
{
    CHECK_OBJ(ix, KM_INDEX_MAGIC);
    uint32_t *children = calloc(ix->options.block_count, sizeof(*children));
    CHECK(children != NULL);
    uint32_t count = 0, cached = 0;
    for (uint32_t b = 0; b < ix->options.block_count; b++) {
        const struct km_node *n = &ix->nodes[b];
        if (n->state < KM_NODE_INDEXED)
            continue;
        count++;
        cached += n->state == KM_NODE_INDEXED && n->refs == 0;
        audit_node(ix, b, children);
    }
    for (uint32_t b = 0; b < ix->options.block_count; b++)
        CHECK(children[b] == (ix->nodes[b].state >= KM_NODE_INDEXED ? ix->nodes[b].children : 0));
    CHECK(count == ix->count && cached == ix->cached);
    for (uint32_t at = 1; at < ix->heap_count; at++)
        CHECK(!goes_before(ix, ix->heap[at], ix->heap[(at - 1) / 2]));
    uint32_t states[4] = {0};
    for (uint32_t i = 0; i < ix->options.snapshot_count; i++) {
        const struct km_snap *s = &ix->snaps[i];
        states[s->state]++;
        CHECK(s->state != KM_SNAP_KEPT ||
              ix->nodes[s->node].snapshot == ix->options.snapshot_first + i);
    }
    CHECK(memcmp(states, ix->snaps_by_state, sizeof(states)) == 0);
    free(children);
}
