/* SPDX-License-Identifier: Apache-2.0 */
/* The core's cache: snapshots and their grants, making room, adopted chains, recovery. */
#include "kvmgr/km_core_state.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "proto/block_hash.h"

#define GRANTS_WANTED 4u /* slots that a worker may write at any time */
#define EVICTS_A_TICK 512u

/* --- snapshots */

static uint32_t grants_of(struct km_core *core, uint32_t owner, uint32_t *ret_slots)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t first = km_index_snap_first(ix), total = km_index_snap_count(ix), count = 0;
    if (km_index_snaps(ix, KM_SNAP_GRANTED) == 0)
        return 0;
    for (uint32_t i = 0; i < total && count < MSG_GRANTS_MAX; i++) {
        const struct km_snap *s = km_index_snap(ix, first + i);
        if (s->state == KM_SNAP_GRANTED && s->worker == owner)
            ret_slots[count++] = first + i;
    }
    return count;
}

static uint32_t grants_wanted(const struct km_index *ix)
{
    uint32_t wanted = km_index_snap_count(ix) / 4;
    if (wanted == 0 && km_index_snap_count(ix) > 0)
        wanted = 1;
    return wanted > GRANTS_WANTED ? GRANTS_WANTED : wanted;
}

uint32_t core_snapshot_slot(struct km_core *core, uint32_t spare_node, bool *ret_coming)
{
    struct km_index *ix = km_pool_index(core->pool);
    *ret_coming = false;
    if (core->tier_on && km_index_snaps(ix, KM_SNAP_FREE) == 0) {
        uint32_t next = km_evict_snapshot_next(core->pool, spare_node);
        bool late = core->slots_starved_us != 0 &&
                    core->now_us - core->slots_starved_us >= core->options.write_wait_us_max;
        if (next != KM_NONE && !late && core_snapshot_wanted(core, next)) {
            if (core->slots_starved_us == 0)
                core->slots_starved_us = core->now_us;
            *ret_coming = core_snapshots_write(core, grants_wanted(ix), spare_node);
            if (*ret_coming)
                return KM_NONE;
        } else if (next == KM_NONE) {
            *ret_coming = core_snapshots_leaving(core) > 0;
        }
    }
    uint32_t slot = km_evict_snapshot(core->pool, spare_node);
    if (slot != KM_NONE)
        core->slots_starved_us = 0;
    return slot;
}

uint32_t core_grants(struct km_core *core, struct km_actions *actions, const struct km_worker *w)
{
    CHECK(core->pool != NULL);
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t owner = (uint32_t)(w - core->workers), taken = 0;
    CHECK(owner < KM_WORKERS_MAX);
    uint32_t wanted = grants_wanted(ix);
    bool coming;
    uint32_t count = grants_of(core, owner, core->granted);
    while (count < wanted) {
        /* Given up only for a slot that is needed: a full list costs nothing. */
        uint32_t kept = km_index_snaps(ix, KM_SNAP_KEPT);
        uint32_t slot = core_snapshot_slot(core, KM_NONE, &coming);
        if (slot == KM_NONE)
            break;
        core->stats.snapshots_dropped += kept - km_index_snaps(ix, KM_SNAP_KEPT);
        km_index_snap_set(ix, slot, KM_SNAP_GRANTED);
        km_index_snap(ix, slot)->worker = (uint8_t)owner;
        core->granted[count++] = slot;
        core->snapshot_taken[taken++] = slot;
    }
    if (taken > 0) {
        struct km_action *action = core_act(core, actions, KM_ACTION_SLOTS);
        action->u.slots.state = KM_WRITING;
        action->u.slots.snapshot = true;
        action->u.slots.count = taken;
        action->u.slots.slots = core->snapshot_taken;
    }
    return count;
}

void core_grants_offer(struct km_core *core, struct km_actions *actions)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t slots[MSG_GRANTS_MAX];
    for (uint32_t i = 0; i < KM_WORKERS_MAX && km_index_snaps(ix, KM_SNAP_FREE) > 0; i++) {
        struct km_worker *w = &core->workers[i];
        if (!w->used || w->lost || grants_of(core, i, slots) >= grants_wanted(ix))
            continue;
        core_send_grants(core, actions, &w->peer);
        return; /* one list a step */
    }
}

/* Only of a worker that is known to be gone: one that is merely silent may still write there. */
void core_grants_revoke(struct km_core *core, const struct km_worker *w)
{
    uint32_t owner = (uint32_t)(w - core->workers), slots[MSG_GRANTS_MAX];
    CHECK(owner < KM_WORKERS_MAX);
    if (!core->pool)
        return;
    uint32_t count = grants_of(core, owner, slots);
    for (uint32_t i = 0; i < count; i++)
        km_pool_snap_free(core->pool, slots[i]);
}

/* Whether the copy in a granted slot is kept; ERR_OK also if it is known already. */
static enum err snapshot_keep(struct km_core *core, struct km_actions *actions, uint32_t owner,
                              const struct msg_kv_snapshot *s)
{
    struct km_index *ix = km_pool_index(core->pool);
    struct km_snap *snap = km_index_snap(ix, s->slot);
    uint32_t block = km_index_find(ix, &s->hash);
    if (!snap)
        return ERR_INVALID;
    if (block == KM_NONE)
        return ERR_NOT_FOUND;
    struct km_node *n = km_index_node(ix, block);
    if (n->state != KM_NODE_INDEXED ||
        s->token_count != (uint64_t)(n->position + 1) * core->options.block_tokens)
        return ERR_INVALID;
    if (core_on_damaged(core, block))
        return ERR_INVALID;
    if (n->snapshot != KM_NONE) /* the same state, whoever computed it */
        return ERR_OK;
    if (snap->state != KM_SNAP_GRANTED || snap->worker != owner)
        return ERR_INVALID;
    km_index_snap_attach(ix, s->slot, block, km_index_ticks(core->now_us));
    km_evict_snapshot_kept(core->pool, block);
    struct km_action *action = core_act(core, actions, KM_ACTION_SLOTS);
    core->slot_taken = s->slot;
    action->u.slots.state = KM_COMMITTED;
    action->u.slots.snapshot = true;
    action->u.slots.count = 1;
    action->u.slots.slots = &core->slot_taken;
    action->u.slots.token_count = s->token_count;
    action->u.slots.hash = s->hash;
    core->stats.snapshots++;
    return ERR_OK;
}

void core_snapshot(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_snapshot *s = &m->u.kv_snapshot;
    enum err e;
    struct km_lease *lease = core_lease_of(core, event, s->lease, &e);
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    uint32_t granted = 0;
    if (lease) {
        CHECK(w != NULL && lease->owner == (uint32_t)(w - core->workers));
        e = snapshot_keep(core, actions, lease->owner, s);
        if (e != ERR_OK)
            core->stats.snapshots_refused++;
        else
            core_session_note(core, actions, lease, s->token_count, 0);
    }
    if (w && core->pool && !w->lost)
        granted = core_grants(core, actions, w);
    struct msg *reply = core_reply(core, actions, &event->u.msg.peer, MSG_KV_SNAPSHOT_REPLY, m);
    reply->u.kv_snapshot_reply = (struct msg_kv_snapshot_reply){
        .code = e,
        .lease = s->lease,
        .slot = s->slot,
        .granted_count = granted,
        .granted = core->granted,
    };
}

/* --- room */

/* With a tier, what it does not have is written first and leaves when that is done; while that is
 * too slow for those who wait, it is dropped. */
static bool give_up(struct km_core *core, uint32_t block)
{
    bool stored = core_stored(core, block);
    if (core->tier_on && !stored) {
        bool late = core->starved_us != 0 &&
                    core->now_us - core->starved_us >= core->options.write_wait_us_max;
        if (!late && core_write_out(core, block, true))
            return true;
        if (!late && core->store_inflight > 0)
            return false; /* as much is being written as may be */
    }
    uint32_t parent = km_index_node(km_pool_index(core->pool), block)->parent;
    core_evict(core, block);
    (void)km_pool_prune(core->pool, parent);
    return true;
}

static void make_room(struct km_core *core, uint32_t blocks, uint32_t steps_max, bool pinned)
{
    struct km_index *ix = km_pool_index(core->pool);
    CHECK(!core->taking);
    for (uint32_t i = 0; i < steps_max; i++) {
        /* Without a write in flight those that leave are damaged and still in use. */
        uint32_t coming = core->store_inflight > 0 ? km_pool_leaving_count(core->pool) : 0;
        uint32_t block = km_index_first_out(ix);
        if (km_pool_counts(core->pool).blocks_free + coming >= blocks || block == KM_NONE ||
            (!pinned && km_index_node(ix, block)->class == KM_CLASS_PINNED) ||
            (km_index_node(ix, block)->class == KM_CLASS_HELD &&
             (!pinned || km_evict_holds(core->pool))) ||
            !give_up(core, block))
            return;
    }
}

bool core_make_room(struct km_core *core, uint32_t blocks)
{
    make_room(core, blocks, UINT32_MAX, true);
    bool enough = km_pool_counts(core->pool).blocks_free >= blocks;
    if (enough)
        core->starved_us = 0;
    if (!enough && core->tier_on && core->starved_us == 0)
        core->starved_us = core->now_us;
    return enough;
}

void core_tell_hungry(struct km_core *core, struct km_actions *actions)
{
    if (km_core_counts(core).blocks_free > 0)
        core_tell_waiting(core, actions);
}

void core_tell_waiting(struct km_core *core, struct km_actions *actions)
{
    struct km_pool_counts c = km_core_counts(core);
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        struct km_worker *w = &core->workers[i];
        if (!w->used || w->lost || !w->hungry)
            continue;
        w->hungry = false;
        core->stats.pressures++;
        struct msg *m = core_reply(core, actions, &w->peer, MSG_KV_PRESSURE, NULL);
        m->u.kv_pressure.blocks_free = c.blocks_free;
        m->u.kv_pressure.blocks_total = c.blocks_total;
    }
}

void core_cache_tick(struct km_core *core, struct km_actions *actions)
{
    uint32_t wanted = 0;
    km_evict_tick(core->pool);
    if (km_evict_high(core->pool, &wanted))
        make_room(core, wanted, EVICTS_A_TICK, false);
    core_tell_hungry(core, actions);
}

/* --- pins */

enum err km_core_pin(struct km_core *core, const char *session_key, const char *cache_salt,
                     uint64_t for_us, char ret_sid[33], struct err_detail *detail)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    struct hash128 sid, salt = block_hash_salt(&core->options.key, cache_salt);
    block_hash_session(&core->options.key, session_key, ret_sid);
    CHECK(hex_decode(ret_sid, 32, &sid));
    uint32_t index = KM_NONE;
    if (core->pool)
        index = km_sessions_find(km_pool_sessions(core->pool), &sid, &salt);
    if (index == KM_NONE)
        return err_set(detail, ERR_NOT_FOUND, "session: nothing of it is cached under that salt");
    struct km_sessions *sessions = km_pool_sessions(core->pool);
    const struct km_session *s = km_sessions_at(sessions, index);
    uint32_t max = km_pool_options(core->pool)->held_blocks_max;
    uint32_t others = km_sessions_held(sessions) - (s->held ? s->blocks : 0);
    if (for_us > 0 && (uint64_t)others + s->blocks > max)
        return err_set(detail, ERR_TOO_LARGE,
                       "session: it keeps %u blocks, other pins %u, pin_percent allows %u",
                       s->blocks, others, max);
    km_evict_hold(core->pool, index, for_us > 0 ? core->now_us + for_us : 0);
    return ERR_OK;
}

uint32_t km_core_pinned(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    uint32_t count = 0, cursor = 0;
    const struct km_session *s;
    while (core->pool && (s = km_sessions_next(km_pool_sessions(core->pool), &cursor)) != NULL)
        count += s->pinned && s->pin_until_us > core->now_us ? s->blocks : 0;
    return count;
}

/* --- chains that are told by others */

/* The longest front of the items that is committed here under the same hashes, and what the tier
 * has beyond. */
static uint32_t adopt_valid(struct km_core *core, const struct msg_kv_adopt *adopt)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t known = KM_NONE, count = 0;
    bool resident = true;
    for (; count < adopt->count; count++) {
        struct hash128 hash;
        uint32_t named;
        memcpy(&hash, adopt->items + (size_t)count * 20, sizeof(hash));
        memcpy(&named, adopt->items + (size_t)count * 20 + 16, sizeof(named));
        uint32_t block = km_index_find(ix, &hash);
        if (!resident || block == KM_NONE || block != named) {
            resident = false;
            if (!core->tier_on || !km_tier_has(core->tier, KM_OBJECT_BLOCK, &hash))
                break;
            continue;
        }
        struct km_node *n = km_index_node(ix, block);
        if (n->state != KM_NODE_INDEXED || n->parent != known || n->damaged)
            break;
        km_index_touch(km_pool_index(core->pool), block, km_index_ticks(core->now_us));
        known = block;
    }
    return count;
}

void core_adopt(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    bool known = core_worker(core, &event->u.msg.peer) && !core_epoch_stale(core, m);
    uint32_t valid = 0;
    if (known) {
        CHECK(core->pool != NULL);
        core->stats.adopts++;
        valid = adopt_valid(core, &m->u.kv_adopt);
    } else {
        core->stats.stale++;
    }
    struct msg *reply = core_reply(core, actions, &event->u.msg.peer, MSG_KV_ADOPT_REPLY, m);
    reply->u.kv_adopt_reply.code = known ? ERR_OK : ERR_EPOCH;
    reply->u.kv_adopt_reply.valid_count = valid;
}

/* --- recovery */

static bool recover_snapshot(struct km_core *core, const struct km_found_snapshot *f)
{
    struct km_index *ix = km_pool_index(core->pool);
    struct km_snap *snap = km_index_snap(ix, f->slot);
    uint32_t block = km_index_find(ix, &f->hash);
    if (!snap || snap->state != KM_SNAP_FREE || block == KM_NONE)
        return false;
    const struct km_node *n = km_index_node(ix, block);
    if (n->snapshot != KM_NONE ||
        f->token_count != (uint64_t)(n->position + 1) * core->options.block_tokens)
        return false;
    km_index_snap_attach(ix, f->slot, block, km_index_ticks(core->now_us));
    snap->unproven = f->sealed;
    km_evict_snapshot_kept(core->pool, block);
    return true;
}

/* Headers whose chain has a hole are of no use, nor are blocks that no state makes use of: both go
 * back to the free list, and their headers with them. */
void core_recover(struct km_core *core, const struct km_arena_result *result)
{
    struct km_pool_scratch *scratch = km_pool_scratch(core->pool);
    CHECK(scratch->freed_count == 0 && scratch->slots_count == 0);
    uint32_t position = 0;
    for (uint32_t i = 0; i < result->found_count; i++) {
        const struct km_found_block *f = &result->found[i];
        CHECK(f->position >= position);
        position = f->position;
        if (!km_pool_adopt(core->pool, f->block, &f->hash, &f->parent, f->position))
            scratch->freed[scratch->freed_count++] = f->block;
        else
            km_index_node(km_pool_index(core->pool), f->block)->unproven = f->sealed;
    }
    core->unproven = result->found_count > 0;
    for (uint32_t i = 0; i < result->found_snapshot_count; i++) {
        const struct km_found_snapshot *f = &result->found_snapshots[i];
        if (recover_snapshot(core, f))
            core->stats.snapshots_adopted++;
        else
            scratch->slots[scratch->slots_count++] = f->slot;
    }
    km_pool_adopted(core->pool);
    core->stats.blocks_adopted += km_index_count(km_pool_index(core->pool));
}
