/* SPDX-License-Identifier: Apache-2.0 */
/* The core's side of the NVMe tier: what is written before it leaves the arena, what is read back
 * for an open.  Operations go out in order and each is answered once; at most KM_STORE_MAX are in
 * flight.  A block or slot is referred to while one is. */
#include "kvmgr/km_core_state.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define READS_A_LOAD    16u /* in flight for one open: a long chain does not keep others out */
#define CHAIN_WRITE_MAX 64u

/* --- operations */

bool core_store_room(const struct km_core *core, uint32_t count)
{
    return core->store_inflight + count <= KM_STORE_MAX;
}

void core_store_add(struct km_core *core, enum km_store_op op, enum km_object_kind kind,
                    const struct hash128 *hash, uint32_t index, uint32_t token_count)
{
    CHECK(core_store_room(core, 1) && core->store_count < KM_STORE_MAX);
    core->store_items[core->store_count++] = (struct km_store_item){
        .op = op, .kind = kind, .index = index, .token_count = token_count, .hash = *hash};
    core->store_inflight++;
}

static uint32_t tokens_of(const struct km_core *core, const struct km_node *n)
{
    return (n->position + 1) * core->options.block_tokens;
}

/* Writes a block, or its snapshot from a slot. */
static void store_write(struct km_core *core, enum km_object_kind kind, const struct km_node *n,
                        uint32_t index)
{
    core_store_add(core, KM_STORE_WRITE, kind, &n->hash, index, tokens_of(core, n));
    if (n->parent != KM_NONE)
        core->store_items[core->store_count - 1].parent =
            km_index_node(km_pool_index(core->pool), n->parent)->hash;
}

static bool tier_has(const struct km_core *core, enum km_object_kind kind,
                     const struct hash128 *hash)
{
    return core->tier_on && km_tier_has(core->tier, kind, hash);
}

bool core_stored(const struct km_core *core, uint32_t block)
{
    const struct km_node *n = km_index_node(km_pool_index(core->pool), block);
    return tier_has(core, KM_OBJECT_BLOCK, &n->hash) &&
           (n->snapshot == KM_NONE || tier_has(core, KM_OBJECT_SNAPSHOT, &n->hash));
}

/* What the tier has no place for; without room in flight it stays until the next start. */
static void store_remove(struct km_core *core, enum km_object_kind kind, const struct hash128 *hash)
{
    if (core_store_room(core, 1))
        core_store_add(core, KM_STORE_REMOVE, kind, hash, 0, 0);
}

static void tier_trim(struct km_core *core)
{
    const struct km_object *o;
    while (core_store_room(core, 1) && (o = km_tier_excess(core->tier)) != NULL) {
        struct hash128 hash = o->hash;
        enum km_object_kind kind = (enum km_object_kind)o->kind;
        core->stats.objects_evicted++;
        CHECK(km_tier_remove(core->tier, kind, &hash));
        core_store_add(core, KM_STORE_REMOVE, kind, &hash, 0, 0);
    }
}

/* --- writing */

/* Asks for what lacks of one node; false: no room in flight, or what it was computed from is
 * damaged: its own sum is right, its rows are not. */
static bool node_write(struct km_core *core, uint32_t block)
{
    struct km_index *ix = km_pool_index(core->pool);
    struct km_node *n = km_index_node(ix, block);
    if (!core_store_room(core, 2) || core_on_damaged(core, block) ||
        core->arena.object_bytes[KM_OBJECT_BLOCK] + core->arena.object_bytes[KM_OBJECT_SNAPSHOT] >
            core->options.tier_bytes_max)
        return false;
    if (!n->storing && !tier_has(core, KM_OBJECT_BLOCK, &n->hash)) {
        n->storing = 1;
        km_index_ref(ix, block);
        store_write(core, KM_OBJECT_BLOCK, n, block);
    }
    struct km_snap *s = n->snapshot != KM_NONE ? km_index_snap(ix, n->snapshot) : NULL;
    if (s && !s->storing && !tier_has(core, KM_OBJECT_SNAPSHOT, &n->hash)) {
        s->storing = 1;
        s->refs++;
        /* The block stays while its snapshot is read. */
        km_index_ref(ix, block);
        store_write(core, KM_OBJECT_SNAPSHOT, n, n->snapshot);
    }
    return true;
}

/* A leaf and, behind it, the blocks that will be leaves when it is gone: they leave one after the
 * other as the answers come in. */
bool core_write_out(struct km_core *core, uint32_t block, bool leaving)
{
    struct km_index *ix = km_pool_index(core->pool);
    bool any = false;
    for (uint32_t i = 0; i < CHAIN_WRITE_MAX && block != KM_NONE; i++) {
        struct km_node *n = km_index_node(ix, block);
        bool alone = n->refs == 0 && n->children <= (i > 0 ? 1u : 0u);
        if (n->state != KM_NODE_INDEXED || !alone || core_stored(core, block) ||
            !node_write(core, block))
            break;
        km_pool_leaving(core->pool, block, leaving);
        any = true;
        block = n->parent;
    }
    return any;
}

void core_evict(struct km_core *core, uint32_t block)
{
    const struct km_node *n = km_index_node(km_pool_index(core->pool), block);
    const struct km_session *s = km_sessions_at(km_pool_sessions(core->pool), n->session);
    bool stored = core_stored(core, block);
    *(stored ? &core->stats.evicted_written : &core->stats.evicted_dropped) += 1;
    if (stored && s && core->moved_count < KM_MOVED_MAX)
        core->moved[core->moved_count++] =
            (struct km_moved){.sid = s->sid, .hash = n->hash, .position = n->position};
    km_pool_evict(core->pool, block);
}

void core_leave(struct km_core *core, uint32_t block)
{
    struct km_index *ix = km_pool_index(core->pool);
    while (block != KM_NONE) {
        struct km_node *n = km_index_node(ix, block);
        if (!n->leaving || n->refs > 0 || n->children > 0 || n->state != KM_NODE_INDEXED)
            return;
        if (n->snapshot != KM_NONE && km_index_snap(ix, n->snapshot)->refs > 0)
            return;
        uint32_t parent = n->parent;
        core_evict(core, block);
        block = parent;
    }
}

/* KM_NONE, or the block whose data are not what was committed. */
static uint32_t write_done(struct km_core *core, const struct km_store_result *r)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t block = r->item.index, damaged = KM_NONE;
    if (r->item.kind == KM_OBJECT_SNAPSHOT) {
        struct km_snap *s = km_index_snap(ix, r->item.index);
        CHECK(s != NULL && s->storing && s->refs > 0);
        bool stale = s->write_stale;
        s->refs--;
        s->storing = s->write_stale = 0;
        block = s->node;
        bool leaving = s->leaving || r->code == ERR_CORRUPT;
        s->leaving = 0;
        if (r->code == ERR_OK && !stale) {
            s->unproven = s->damaged = 0;
        } else if (r->code == ERR_CORRUPT) {
            core->stats.snapshots_damaged += !s->damaged;
            core_doubt_snapshot(s);
            s->damaged = 1;
        }
        if (r->code == ERR_CORRUPT)
            core->unproven = core->unproven_seen = true;
        if (leaving && s->refs == 0) /* else an open came for it */
            km_pool_snap_free(core->pool, r->item.index);
    } else {
        struct km_node *n = km_index_node(ix, block);
        bool stale = n->write_stale;
        n->storing = n->write_stale = 0;
        if (r->code == ERR_OK && !stale) {
            n->unproven = n->damaged = 0;
        } else if (r->code == ERR_CORRUPT) {
            core_doubt(n);
            damaged = block;
            core->stats.blocks_damaged += !n->damaged;
        }
    }
    CHECK(memcmp(&km_index_node(ix, block)->hash, &r->item.hash, sizeof(r->item.hash)) == 0);
    if (r->code == ERR_OK && core->tier_on) {
        core->stats.writes++;
        if (!km_tier_add(core->tier, (enum km_object_kind)r->item.kind, &r->item.hash,
                         &r->item.parent, r->bytes))
            store_remove(core, (enum km_object_kind)r->item.kind, &r->item.hash);
    } else {
        core->stats.write_failures++;
    }
    km_pool_unref(core->pool, block);
    core_leave(core, block);
    return damaged;
}

/* --- the flush at the end */

static int last_used_first(const void *x, const void *y, void *arg)
{
    const struct km_index *ix = arg;
    uint32_t a = km_index_node(ix, *(const uint32_t *)x)->used;
    uint32_t b = km_index_node(ix, *(const uint32_t *)y)->used;
    return a < b ? 1 : a > b ? -1 : 0;
}

static void flush_begin(struct km_core *core)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t *order = km_pool_scratch(core->pool)->order, count = 0;
    for (uint32_t block = 0; block < core->arena.block_count; block++) {
        if (km_index_node(ix, block)->state == KM_NODE_INDEXED && !core_stored(core, block))
            order[count++] = block;
    }
    qsort_r(order, count, sizeof(*order), last_used_first, ix);
    core->flush_at = 0;
    core->flush_count = count;
    core->flush_bytes = core->options.tier_bytes_max;
}

/* What a node adds to the tier. */
static uint64_t node_bytes(const struct km_core *core, uint32_t block)
{
    const struct km_index *ix = km_pool_index(core->pool);
    const struct km_node *n = km_index_node(ix, block);
    uint64_t bytes = 0;
    if (!n->storing && !tier_has(core, KM_OBJECT_BLOCK, &n->hash))
        bytes += core->arena.object_bytes[KM_OBJECT_BLOCK];
    if (n->snapshot != KM_NONE && !km_index_snap(ix, n->snapshot)->storing &&
        !tier_has(core, KM_OBJECT_SNAPSHOT, &n->hash))
        bytes += core->arena.object_bytes[KM_OBJECT_SNAPSHOT];
    return bytes;
}

/* The bytes that a block and what it stands on add; what is beyond the bound is not counted. */
static uint64_t chain_bytes(const struct km_core *core, uint32_t block)
{
    uint64_t bytes = 0;
    for (; block != KM_NONE && bytes <= core->flush_bytes;
         block = km_index_node(km_pool_index(core->pool), block)->parent)
        bytes += node_bytes(core, block);
    return bytes;
}

/* Last used first, whole chains, and no more than the tier holds: else what is written would push
 * out what was written before, for ever. */
void core_flush(struct km_core *core, bool begins)
{
    if (!core->pool || !core->tier_on)
        return;
    if (begins)
        flush_begin(core);
    struct km_index *ix = km_pool_index(core->pool);
    for (; core->flush_at < core->flush_count; core->flush_at++) {
        uint32_t block = km_pool_scratch(core->pool)->order[core->flush_at];
        if (km_index_node(ix, block)->state != KM_NODE_INDEXED || core_on_damaged(core, block) ||
            chain_bytes(core, block) > core->flush_bytes)
            continue;
        for (; block != KM_NONE; block = km_index_node(ix, block)->parent) {
            uint64_t bytes = node_bytes(core, block);
            if (bytes > 0 && !node_write(core, block))
                return;
            core->flush_bytes -= bytes;
        }
    }
}

uint32_t km_core_unwritten(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    uint32_t count = 0;
    for (uint32_t b = 0; core->pool && core->tier_on && b < core->arena.block_count; b++)
        count += km_index_node(km_pool_index(core->pool), b)->state == KM_NODE_INDEXED &&
                 !core_stored(core, b);
    return count;
}

/* --- reading */

bool core_load_find(struct km_core *core, uint32_t owner, const struct msg_id *id,
                    struct km_load **ret)
{
    for (uint32_t i = 0; i < KM_LOADS_MAX; i++) {
        struct km_load *l = &core->loads[i];
        if (l->used && !l->answered && l->ask.owner == owner &&
            memcmp(&l->ask.id, id, sizeof(*id)) == 0) {
            *ret = l;
            return true;
        }
    }
    return false;
}

/* How far the arena and the tier reach together: the last boundary with a snapshot in either.
 * Blocks known only to the tier begin at *ret_resident.  0: nothing beyond the resident front. */
static uint32_t load_reach(const struct km_core *core, const struct msg_kv_open *open,
                           uint32_t *ret_resident, bool *ret_busy)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t max = open->reuse_max / core->options.block_tokens, reach = 0, parent = KM_NONE;
    bool resident = true;
    max = max < open->hash_count ? max : open->hash_count;
    max = max < open->blocks_wanted ? max : open->blocks_wanted - 1;
    *ret_resident = 0;
    for (uint32_t i = 0; i < max; i++) {
        const struct hash128 *hash = &open->hashes[i];
        uint32_t block = km_index_find(ix, hash);
        bool snapshot = false, lost = false;
        if (block != KM_NONE) {
            const struct km_node *n = km_index_node(ix, block);
            if (n->state == KM_NODE_LOADING)
                *ret_busy = true;
            if (n->state != KM_NODE_INDEXED || n->parent != parent || n->damaged || !resident)
                break;
            snapshot = core_snapshot_good(core, n);
            lost = n->snapshot != KM_NONE && !snapshot;
            parent = block;
            *ret_resident = i + 1;
        } else {
            resident = false;
            if (i - *ret_resident >= KM_LOAD_BLOCKS_MAX ||
                !km_tier_has(core->tier, KM_OBJECT_BLOCK, hash))
                break;
        }
        if (snapshot || (!lost && km_tier_has(core->tier, KM_OBJECT_SNAPSHOT, hash)))
            reach = i + 1;
    }
    return reach;
}

/* Takes blocks and a slot for what is not resident. */
static bool load_take(struct km_core *core, struct km_load *l, const struct msg_kv_open *open,
                      uint32_t resident, uint32_t reach, struct km_actions *actions,
                      bool *ret_coming)
{
    *ret_coming = false;
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t parent = KM_NONE, taken = 0;
    if (resident > 0)
        parent = km_index_find(ix, &open->hashes[resident - 1]);
    l->front = l->tail = parent;
    l->cursor = l->slot = KM_NONE;
    if (parent != KM_NONE)
        km_index_ref(ix, parent);
    bool kept = reach <= resident && km_index_node(ix, parent)->snapshot != KM_NONE;
    if (!kept) {
        l->slot = core_snapshot_slot(core, parent, ret_coming);
        if (l->slot == KM_NONE || (reach > resident && !core_make_room(core, reach - resident))) {
            if (parent != KM_NONE)
                km_pool_unref(core->pool, parent);
            return false;
        }
        km_index_snap_set(ix, l->slot, KM_SNAP_LOADING);
        struct km_action *action = core_act(core, actions, KM_ACTION_SLOTS);
        core->slot_taken = l->slot;
        action->u.slots.state = KM_WRITING;
        action->u.slots.snapshot = true;
        action->u.slots.count = 1;
        action->u.slots.slots = &core->slot_taken;
    }
    for (uint32_t i = resident; i < reach; i++) {
        parent = km_pool_load(core->pool, &open->hashes[i], parent, KM_NONE);
        km_pool_scratch(core->pool)->taken[taken++] = parent;
        km_tier_touch(core->tier, KM_OBJECT_BLOCK, &open->hashes[i]);
    }
    if (taken > 0) {
        core_taken(core, actions, taken);
        l->tail = l->cursor = parent;
    }
    km_tier_touch(core->tier, KM_OBJECT_SNAPSHOT, &open->hashes[reach - 1]);
    return true;
}

/* Asks for the next reads of a load, as far as its share goes. */
static void load_pump(struct km_core *core, struct km_load *l)
{
    struct km_index *ix = km_pool_index(core->pool);
    while (l->outstanding < READS_A_LOAD && core_store_room(core, 1)) {
        if (l->slot != KM_NONE && !l->slot_asked) {
            const struct km_node *n = km_index_node(ix, l->tail);
            core_store_add(core, KM_STORE_READ, KM_OBJECT_SNAPSHOT, &n->hash, l->slot,
                           tokens_of(core, n));
            l->slot_asked = true;
        } else if (l->cursor != KM_NONE && !l->failed) {
            const struct km_node *n = km_index_node(ix, l->cursor);
            core_store_add(core, KM_STORE_READ, KM_OBJECT_BLOCK, &n->hash, l->cursor,
                           tokens_of(core, n));
            l->cursor = n->parent == l->front ? KM_NONE : n->parent;
        } else {
            return;
        }
        l->outstanding++;
    }
}

bool core_load(struct km_core *core, struct km_actions *actions, const struct km_ask *ask,
               const struct msg_kv_open *open, uint32_t resident_front, uint32_t *ret_code)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t resident = 0, have = 0;
    bool busy = false;
    if (!core->tier_on || open->reuse_max < core->options.block_tokens || open->hash_count == 0)
        return false;
    if (resident_front != KM_NONE)
        have = km_index_node(ix, resident_front)->position + 1;
    uint32_t reach = load_reach(core, open, &resident, &busy);
    if (busy) {
        *ret_code = ERR_LOADING;
        return false;
    }
    if (reach <= have)
        return false;
    for (uint32_t i = 0; i < KM_LOADS_MAX; i++) {
        struct km_load *l = &core->loads[i];
        if (l->used)
            continue;
        *l = (struct km_load){.used = true, .ask = *ask, .since_us = core->now_us};
        if (!load_take(core, l, open, resident < reach ? resident : reach, reach, actions, &busy)) {
            l->used = false;
            if (busy) /* a slot is being made free for it */
                *ret_code = ERR_LOADING;
            return false;
        }
        core->stats.loads++;
        load_pump(core, l);
        return true;
    }
    return false;
}

/* Loaded blocks up to the first that failed become cached ones; the rest goes back.  Returns the
 * last good one. */
static uint32_t load_settle_blocks(struct km_core *core, struct km_actions *actions,
                                   struct km_load *l)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t *path = core->front_blocks, count = 0, good = 0;
    for (uint32_t b = l->tail; b != l->front; b = km_index_node(ix, b)->parent)
        count++;
    uint32_t at = count;
    for (uint32_t b = l->tail; b != l->front; b = km_index_node(ix, b)->parent)
        path[--at] = b;
    CHECK(count <= KM_LOAD_BLOCKS_MAX);
    while (good < count && km_index_node(ix, path[good])->tested &&
           !km_index_node(ix, path[good])->write_stale)
        good++;
    for (uint32_t i = count; i > good; i--)
        km_pool_unref(core->pool, path[i - 1]);
    if (good > 0) {
        struct km_action *action = core_act(core, actions, KM_ACTION_BLOCKS);
        const struct km_node *first = km_index_node(ix, path[0]);
        action->u.blocks.state = KM_COMMITTED;
        action->u.blocks.count = good;
        action->u.blocks.blocks = path;
        action->u.blocks.first_position = first->position;
        if (first->parent != KM_NONE)
            action->u.blocks.parent = km_index_node(ix, first->parent)->hash;
        action->u.blocks.hashes = core->hashes;
    }
    for (uint32_t i = 0; i < good; i++) {
        core->hashes[i] = km_index_node(ix, path[i])->hash;
        km_index_loaded(ix, path[i]);
    }
    core->stats.tokens_loaded += (uint64_t)good * core->options.block_tokens;
    return good > 0 ? path[good - 1] : l->front;
}

static void load_settle_slot(struct km_core *core, struct km_actions *actions, struct km_load *l,
                             uint32_t good)
{
    struct km_index *ix = km_pool_index(core->pool);
    if (l->slot == KM_NONE)
        return;
    if (!l->slot_good || km_index_snap(ix, l->slot)->write_stale || good != l->tail ||
        good == KM_NONE || km_index_node(ix, good)->snapshot != KM_NONE) {
        km_pool_snap_free(core->pool, l->slot);
        return;
    }
    km_index_snap_attach(ix, l->slot, good, km_index_ticks(core->now_us));
    core->slot_kept = l->slot;
    struct km_action *action = core_act(core, actions, KM_ACTION_SLOTS);
    action->u.slots.state = KM_COMMITTED;
    action->u.slots.snapshot = true;
    action->u.slots.count = 1;
    action->u.slots.slots = &core->slot_kept;
    action->u.slots.token_count = tokens_of(core, km_index_node(ix, good));
    action->u.slots.hash = km_index_node(ix, good)->hash;
}

static bool load_owner_there(struct km_core *core, const struct km_load *l)
{
    const struct km_worker *w = core_worker(core, &l->ask.peer);
    return w == &core->workers[l->ask.owner] && !w->lost;
}

static uint32_t boundary_of(const struct km_core *core, uint32_t block)
{
    const struct km_index *ix = km_pool_index(core->pool);
    while (block != KM_NONE && !core_snapshot_good(core, km_index_node(ix, block)))
        block = km_index_node(ix, block)->parent;
    return block;
}

/* Everything that a load asked for came back: its open is answered from what is resident now.  The
 * load's references go only when the lease has its own. */
static void load_end(struct km_core *core, struct km_actions *actions, struct km_load *l)
{
    struct km_index *ix = km_pool_index(core->pool);
    CHECK(l->used && l->outstanding == 0);
    uint32_t good = load_settle_blocks(core, actions, l);
    load_settle_slot(core, actions, l, good);
    if (good != l->tail || (l->slot != KM_NONE && !l->slot_good))
        core->stats.loads_failed++;
    if (!l->answered && load_owner_there(core, l)) {
        core->text[0] = '\0';
        core->stats.hits_loaded++;
        core_open_with(core, actions, &l->ask, boundary_of(core, good));
    }
    for (uint32_t b = good; b != l->front;) {
        uint32_t parent = km_index_node(ix, b)->parent;
        km_pool_unref(core->pool, b);
        b = parent;
    }
    if (l->front != KM_NONE)
        km_pool_unref(core->pool, l->front);
    l->used = false;
}

static struct km_load *load_of(struct km_core *core, const struct km_store_item *item)
{
    for (uint32_t i = 0; i < KM_LOADS_MAX; i++) {
        struct km_load *l = &core->loads[i];
        if (!l->used || l->outstanding == 0)
            continue;
        if (item->kind == KM_OBJECT_SNAPSHOT) {
            if (l->slot == item->index && l->slot_asked)
                return l;
            continue;
        }
        for (uint32_t b = l->tail; b != l->front;
             b = km_index_node(km_pool_index(core->pool), b)->parent)
            if (b == item->index)
                return l;
    }
    return NULL;
}

static struct km_load *read_done(struct km_core *core, const struct km_store_result *r)
{
    struct km_load *l = load_of(core, &r->item);
    CHECK(l != NULL && l->outstanding > 0);
    l->outstanding--;
    if (r->code == ERR_OK) {
        if (r->item.kind == KM_OBJECT_SNAPSHOT)
            l->slot_good = true;
        else
            km_index_node(km_pool_index(core->pool), r->item.index)->tested = 1;
    } else {
        l->failed = true;
        if (r->code == ERR_CORRUPT || r->code == ERR_NOT_FOUND) {
            core->stats.objects_corrupt += r->code == ERR_CORRUPT;
            (void)km_tier_remove(core->tier, (enum km_object_kind)r->item.kind, &r->item.hash);
        }
    }
    return l;
}

/* --- events */

void core_store_state(struct km_core *core, struct km_actions *actions,
                      const struct km_event *event)
{
    CHECK(core->tier != NULL);
    bool on = event->u.store_state.on;
    if (core->tier_on == on)
        return;
    core->tier_on = on;
    if (!on)
        km_tier_clear(core->tier);
    if (core->pool)
        km_pool_keep_bare(core->pool, on);
    core_trace(core, actions, on ? "tier on" : "tier off", 0, 0, "");
}

/* At most one open is answered a step: what it takes lies behind the actions' pointers. */
static void loads_pump(struct km_core *core, struct km_actions *actions)
{
    core->more = false;
    for (uint32_t i = 0; i < KM_LOADS_MAX; i++) {
        struct km_load *l = &core->loads[i];
        if (!l->used)
            continue;
        load_pump(core, l);
        if (l->outstanding > 0)
            continue;
        if (core->taking) {
            core->more = true;
            continue;
        }
        load_end(core, actions, l);
        core->taking = true;
    }
}

void core_store_done(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    uint32_t damaged[KM_STORE_MAX], damaged_count = 0;
    CHECK(core->pool != NULL && event->u.store_done.count <= KM_STORE_MAX);
    for (uint32_t i = 0; i < event->u.store_done.count; i++) {
        const struct km_store_result *r = &event->u.store_done.results[i];
        CHECK(core->store_inflight > 0);
        core->store_inflight--;
        if (r->item.op == KM_STORE_WRITE)
            damaged_count += (damaged[damaged_count] = write_done(core, r)) != KM_NONE;
        else if (r->item.op == KM_STORE_READ)
            (void)read_done(core, r);
    }
    if (damaged_count > 0)
        core_damaged(core, actions, damaged, damaged_count);
    if (core->tier_on)
        tier_trim(core);
    loads_pump(core, actions);
    core_tell_hungry(core, actions);
    core_grants_offer(core, actions);
}

void core_store_objects(struct km_core *core, const struct km_event *event)
{
    CHECK(core->tier != NULL);
    for (uint32_t i = 0; i < event->u.store_objects.count && core->tier_on; i++) {
        const struct km_store_object *o = &event->u.store_objects.objects[i];
        CHECK(o->kind <= KM_OBJECT_SNAPSHOT);
        if (!km_tier_found(core->tier, (enum km_object_kind)o->kind, &o->hash, &o->parent,
                           o->bytes))
            store_remove(core, (enum km_object_kind)o->kind, &o->hash);
        tier_trim(core);
    }
}

bool core_snapshot_wanted(const struct km_core *core, uint32_t slot)
{
    const struct km_index *ix = km_pool_index(core->pool);
    const struct km_snap *s = km_index_snap(ix, slot);
    CHECK(s != NULL && s->state == KM_SNAP_KEPT);
    const struct km_node *n = km_index_node(ix, s->node);
    return !n->superseded && !(s->covered && n->children <= 1) &&
           !tier_has(core, KM_OBJECT_SNAPSHOT, &n->hash);
}

uint32_t core_snapshots_leaving(const struct km_core *core)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t first = km_index_snap_first(ix), total = km_index_snap_count(ix), count = 0;
    for (uint32_t i = 0; i < total; i++)
        count += km_index_snap(ix, first + i)->leaving != 0;
    return count;
}

bool core_snapshots_write(struct km_core *core, uint32_t count, uint32_t spare_node)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t leaving = core_snapshots_leaving(core);
    while (leaving < count) {
        uint32_t slot = km_evict_snapshot_next(core->pool, spare_node);
        if (slot == KM_NONE || !core_snapshot_wanted(core, slot) ||
            !node_write(core, km_index_snap(ix, slot)->node))
            break;
        km_index_snap(ix, slot)->leaving = 1;
        leaving++;
    }
    return leaving > 0;
}

/* Room in the slots is made ahead, so that a grant need not drop what was not written. */
static void snapshots_write_ahead(struct km_core *core)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t spare = km_index_snap_count(ix) / 16 + 1;
    uint32_t slot = km_evict_snapshot_next(core->pool, KM_NONE);
    if (km_index_snaps(ix, KM_SNAP_FREE) >= spare || slot == KM_NONE)
        return;
    struct km_snap *s = km_index_snap(ix, slot);
    CHECK(s->state == KM_SNAP_KEPT && !s->storing);
    uint32_t block = s->node;
    if (tier_has(core, KM_OBJECT_SNAPSHOT, &km_index_node(ix, block)->hash)) {
        km_pool_snap_free(core->pool, slot);
        return;
    }
    if (node_write(core, block))
        s->leaving = 1;
}

/* Opens that have waited for too long are answered with what the arena has; their reads go on. */
void core_tier_tick(struct km_core *core, struct km_actions *actions)
{
    if (core->tier_on)
        snapshots_write_ahead(core);
    loads_pump(core, actions);
    for (uint32_t i = 0; i < KM_LOADS_MAX && !core->taking; i++) {
        struct km_load *l = &core->loads[i];
        if (!l->used || l->answered || core->now_us - l->since_us < core->options.load_us_max)
            continue;
        l->answered = true;
        core->stats.loads_late++;
        if (!load_owner_there(core, l))
            continue;
        core->text[0] = '\0';
        core_open_with(core, actions, &l->ask, boundary_of(core, l->front));
        core->taking = true;
    }
}

void core_tier_reset(struct km_core *core)
{
    core->store_inflight = core->store_count = 0;
    memset(core->loads, 0, sizeof(core->loads));
    core->tier_on = false;
    core->starved_us = 0;
    core->flush_at = core->flush_count = 0;
    if (core->tier)
        km_tier_clear(core->tier);
}
