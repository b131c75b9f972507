/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_evict.h"

#include <string.h>

#include "kvmgr/km_pool.h"
#include "kvmgr/km_pool_state.h"
#include "lib/base/check.h"

#define HIGH_PERCENT     90u
#define LOW_PERCENT      85u
#define PINS_LOOKED_AT   64u
#define SPENT_WALK_MAX   4096u /* blocks of an old turn that are marked at once */
#define COVERED_WALK_MAX 4096u

enum km_class km_evict_class(const struct km_pool *p, uint32_t block)
{
    const struct km_node *n = km_index_node(p->index, block);
    if (n->superseded)
        return KM_CLASS_SPENT;
    const struct km_session *s = km_sessions_at(p->sessions, n->session);
    if (!s)
        return KM_CLASS_PLAIN;
    if (s->held)
        return KM_CLASS_HELD;
    const struct km_tenant *t = km_sessions_tenant(p->sessions, s);
    static const struct hash128 nameless; /* those without a key are no one session */
    bool named = memcmp(&s->sid, &nameless, sizeof(nameless)) != 0;
    if ((named && p->options.session_blocks_max > 0 && s->blocks > p->options.session_blocks_max) ||
        (p->options.tenant_blocks_max > 0 && t->blocks > p->options.tenant_blocks_max))
        return KM_CLASS_SPENT;
    return s->pinned && s->pin_until_us > p->now_us ? KM_CLASS_PINNED : KM_CLASS_PLAIN;
}

/* Marks block and those before it down to the first that something else uses. */
static void mark_spent(struct km_pool *p, uint32_t block)
{
    for (uint32_t i = 0; i < SPENT_WALK_MAX && block != KM_NONE; i++) {
        struct km_node *n = km_index_node(p->index, block);
        if (n->state != KM_NODE_INDEXED || n->refs > 0 || n->children > (i > 0 ? 1u : 0u))
            return;
        n->superseded = 1;
        km_pool_settle(p, block);
        block = n->parent;
    }
}

/* How many blocks two chains have in common, by walking the longer one up. */
static uint32_t common_blocks(const struct km_pool *p, uint32_t a, uint32_t b)
{
    while (a != b && a != KM_NONE && b != KM_NONE) {
        const struct km_node *x = km_index_node(p->index, a), *y = km_index_node(p->index, b);
        if (x->position >= y->position)
            a = x->parent;
        else
            b = y->parent;
    }
    if (a == KM_NONE || b == KM_NONE)
        return 0;
    return km_index_node(p->index, a)->position + 1;
}

static bool tail_valid(const struct km_pool *p, const struct km_session *s)
{
    if (s->tail == KM_NONE)
        return false;
    const struct km_node *n = km_index_node(p->index, s->tail);
    return n->state == KM_NODE_INDEXED && memcmp(&n->hash, &s->tail_hash, sizeof(n->hash)) == 0;
}

/* The turn before may have had its place taken: an edit, a regeneration, or a template that drops
 * old reasoning forks off late.  A chain that shares little is another conversation under the same
 * key, and one that is a front of the old tail took nothing's place: both stay. */
static bool takes_the_place(const struct km_pool *p, uint32_t old, uint32_t tail)
{
    uint32_t old_length = km_index_node(p->index, old)->position + 1;
    uint32_t length = km_index_node(p->index, tail)->position + 1;
    uint32_t common = common_blocks(p, old, tail);
    CHECK(common <= old_length && common <= length);
    return common < old_length && common < length && common * 2 >= old_length;
}

static void session_ended(struct km_pool *p, struct km_session *s, uint32_t tail)
{
    if (tail_valid(p, s) && s->tail != tail) {
        uint32_t old = s->tail;
        if (takes_the_place(p, old, tail))
            mark_spent(p, old);
        else if (common_blocks(p, old, tail) == km_index_node(p->index, tail)->position + 1u)
            tail = old;
    }
    s->tail = tail;
    s->tail_hash = km_index_node(p->index, tail)->hash;
    if (s->held)
        return; /* until its own end */
    s->pinned = p->options.pin_us > 0;
    s->pin_until_us = p->now_us + p->options.pin_us;
}

void km_evict_hold(struct km_pool *p, uint32_t session, uint64_t until_us)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    struct km_session *s = km_sessions_at(p->sessions, session);
    CHECK(s != NULL);
    km_sessions_hold(p->sessions, session, until_us > p->now_us);
    s->pinned = until_us > p->now_us;
    s->pin_until_us = until_us;
    for (uint32_t block = 0; block < p->options.block_count; block++) {
        const struct km_node *n = km_index_node(p->index, block);
        if (n->queued && n->session == session)
            km_pool_settle(p, block);
    }
}

bool km_evict_holds(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    return km_sessions_held(p->sessions) <= p->options.held_blocks_max;
}

/* The state that a held session is resumed from. */
static bool snapshot_held(const struct km_pool *p, const struct km_snap *snap)
{
    const struct km_node *n = km_index_node(p->index, snap->node);
    const struct km_session *s = km_sessions_at(p->sessions, n->session);
    return s && s->held && !n->superseded && !snap->covered && km_evict_holds(p);
}

void km_evict_turn_ended(struct km_pool *p, const struct km_lease *lease, uint32_t tail,
                         enum km_release how)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    if (tail == KM_NONE || how == KM_RELEASE_LOST)
        return;
    struct km_session *s = km_sessions_at(p->sessions, lease->session);
    if (how == KM_RELEASE_DROP) {
        /* Only what this request added: the front was someone's before. */
        if (km_index_node(p->index, tail)->position >= lease->shared_count &&
            !(s && s->tail == tail))
            mark_spent(p, tail);
    } else if (s && lease->sid[0] != '\0') {
        session_ended(p, s, tail);
        km_pool_settle(p, tail);
    }
}

/* --- snapshots */

static uint64_t snapshot_order(const struct km_pool *p, const struct km_snap *s)
{
    const struct km_node *n = km_index_node(p->index, s->node);
    uint64_t rank = n->superseded ? 0 : s->covered && n->children <= 1 ? 1 : 2;
    return rank << 32 | n->used;
}

uint32_t km_evict_snapshot_next(const struct km_pool *p, uint32_t spare_node)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    uint32_t first = km_index_snap_first(p->index), count = km_index_snap_count(p->index);
    uint32_t best = KM_NONE;
    uint64_t best_order = UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        const struct km_snap *s = km_index_snap(p->index, first + i);
        if (s->state != KM_SNAP_KEPT || s->refs > 0 || s->node == spare_node || snapshot_held(p, s))
            continue;
        uint64_t order = snapshot_order(p, s);
        if (order < best_order) {
            best_order = order;
            best = first + i;
        }
    }
    return best;
}

static uint32_t snapshot_free_slot(const struct km_pool *p)
{
    uint32_t first = km_index_snap_first(p->index), count = km_index_snap_count(p->index);
    for (uint32_t i = 0; i < count && km_index_snaps(p->index, KM_SNAP_FREE) > 0; i++) {
        if (km_index_snap(p->index, first + i)->state == KM_SNAP_FREE)
            return first + i;
    }
    return KM_NONE;
}

uint32_t km_evict_snapshot(struct km_pool *p, uint32_t spare_node)
{
    uint32_t slot = snapshot_free_slot(p);
    if (slot != KM_NONE)
        return slot;
    slot = km_evict_snapshot_next(p, spare_node);
    if (slot == KM_NONE)
        return KM_NONE;
    uint32_t node = km_index_snap(p->index, slot)->node;
    km_pool_snap_free(p, slot);
    (void)km_pool_prune(p, node);
    return slot;
}

void km_evict_snapshot_kept(struct km_pool *p, uint32_t block)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    uint32_t at = km_index_node(p->index, block)->parent;
    for (uint32_t i = 0; i < COVERED_WALK_MAX && at != KM_NONE; i++) {
        const struct km_node *n = km_index_node(p->index, at);
        if (n->children > 1)
            return; /* others branch off here: it is theirs too */
        if (n->snapshot != KM_NONE) {
            km_index_snap(p->index, n->snapshot)->covered = 1;
            return;
        }
        at = n->parent;
    }
}

/* --- time, marks, sums */

void km_evict_tick(struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    for (uint32_t i = 0; i < PINS_LOOKED_AT; i++) {
        struct km_session *s = km_sessions_next(p->sessions, &p->pin_cursor);
        if (!s)
            return;
        if (!s->pinned || s->pin_until_us > p->now_us)
            continue;
        if (s->held) {
            km_evict_hold(
                p,
                km_sessions_find(p->sessions, &s->sid, &km_sessions_tenant(p->sessions, s)->salt),
                0);
            continue;
        }
        s->pinned = false;
        if (tail_valid(p, s))
            km_pool_settle(p, s->tail);
    }
}

bool km_evict_high(const struct km_pool *p, uint32_t *ret_free_wanted)
{
    struct km_pool_counts c = km_pool_counts(p);
    uint64_t used = (uint64_t)c.blocks_total - c.blocks_free;
    if (used * 100 <= (uint64_t)c.blocks_total * HIGH_PERCENT || c.blocks_cached == 0)
        return false;
    *ret_free_wanted = (uint32_t)((uint64_t)c.blocks_total * (100 - LOW_PERCENT) / 100);
    return *ret_free_wanted > c.blocks_free;
}

uint64_t km_evict_keepable(const struct km_pool *p)
{
    struct km_pool_counts c = km_pool_counts(p);
    CHECK(c.blocks_free + c.blocks_leased + c.blocks_cached == c.blocks_total);
    if (km_index_snap_count(p->index) == 0)
        return 0;
    return (uint64_t)(c.blocks_free + c.blocks_cached) * p->options.block_tokens;
}
