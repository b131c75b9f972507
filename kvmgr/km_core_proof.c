/* SPDX-License-Identifier: Apache-2.0 */
/* The core's side of proofs: what an earlier process committed is taken over by its headers alone,
 * and nobody is given it before its data were read and found to be what they were sealed for.  What
 * an open wants is read first, everything else in the background, so much a tick.  A block or slot
 * is referred to while it is read. */
#include "kvmgr/km_core_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"

#define BYTES_A_TICK  (128u << 20) /* read in the background */
#define ASIDE_MAX     (KM_PROOFS_MAX / 2)
#define LOOKED_A_TICK 65536u

enum mark { MARK_UNKNOWN = 0, MARK_SOUND = 1, MARK_DAMAGED = 2 };

/* --- asking */

static bool room(const struct km_core *core)
{
    return core->proofs_inflight < KM_PROOFS_MAX;
}

static void ask(struct km_core *core, enum km_object_kind kind, uint32_t index)
{
    CHECK(room(core) && core->proof_count < KM_PROOFS_MAX);
    core->proof_items[core->proof_count++] = (struct km_proof){.kind = kind, .index = index};
    core->proofs_inflight++;
}

void core_doubt(struct km_node *n)
{
    n->unproven = 1;
    n->proof_stale = n->proving;
    n->write_stale = n->storing;
}

void core_doubt_snapshot(struct km_snap *s)
{
    s->unproven = 1;
    s->proof_stale = s->proving;
    s->write_stale = s->storing;
}

/* False: no room in flight. */
static bool prove_block(struct km_core *core, uint32_t block)
{
    struct km_index *ix = km_pool_index(core->pool);
    struct km_node *n = km_index_node(ix, block);
    if (!n->unproven || n->proving)
        return true;
    if (!room(core))
        return false;
    n->proving = 1;
    km_index_ref(ix, block);
    ask(core, KM_OBJECT_BLOCK, block);
    return true;
}

static bool prove_slot(struct km_core *core, uint32_t slot)
{
    struct km_index *ix = km_pool_index(core->pool);
    struct km_snap *s = km_index_snap(ix, slot);
    if (!s || !s->unproven || s->proving)
        return true;
    if (!room(core))
        return false;
    CHECK(s->state == KM_SNAP_KEPT);
    s->proving = 1;
    s->refs++;
    km_index_ref(ix, s->node); /* it stays while its snapshot is read */
    ask(core, KM_OBJECT_SNAPSHOT, slot);
    return true;
}

bool core_proven(const struct km_core *core, uint32_t tail, uint32_t slot)
{
    const struct km_index *ix = km_pool_index(core->pool);
    if (!core->unproven)
        return true;
    const struct km_snap *s = slot != KM_NONE ? km_index_snap(ix, slot) : NULL;
    if (s && s->unproven)
        return false;
    for (; tail != KM_NONE; tail = km_index_node(ix, tail)->parent)
        if (km_index_node(ix, tail)->unproven)
            return false;
    return true;
}

bool core_snapshot_good(const struct km_core *core, const struct km_node *n)
{
    return n->snapshot != KM_NONE &&
           !km_index_snap(km_pool_index(core->pool), n->snapshot)->damaged;
}

bool core_on_damaged(const struct km_core *core, uint32_t block)
{
    const struct km_index *ix = km_pool_index(core->pool);
    for (; core->unproven && block != KM_NONE; block = km_index_node(ix, block)->parent)
        if (km_index_node(ix, block)->damaged)
            return true;
    return false;
}

/* Whether everything that it wants is read; what is damaged is not waited for. */
static bool want_pump(struct km_core *core, struct km_proof_want *w)
{
    const struct km_index *ix = km_pool_index(core->pool);
    const struct km_snap *s = w->slot != KM_NONE ? km_index_snap(ix, w->slot) : NULL;
    if (s && s->unproven && !s->damaged && !prove_slot(core, w->slot))
        return false;
    for (; w->cursor != KM_NONE; w->cursor = km_index_node(ix, w->cursor)->parent)
        if (!km_index_node(ix, w->cursor)->damaged && !prove_block(core, w->cursor))
            return false;
    return core_proven(core, w->tail, s && s->damaged ? KM_NONE : w->slot);
}

bool core_prove(struct km_core *core, uint32_t tail, uint32_t slot)
{
    struct km_proof_want *w = NULL;
    if (core_proven(core, tail, slot))
        return true;
    CHECK(tail != KM_NONE);
    for (uint32_t i = 0; i < KM_PROOF_WANTS_MAX; i++) {
        if (core->proof_wants[i].used && core->proof_wants[i].tail == tail)
            return false;
        if (!core->proof_wants[i].used)
            w = &core->proof_wants[i];
    }
    if (!w)
        return false; /* others first: it is asked again */
    *w = (struct km_proof_want){.used = true, .tail = tail, .cursor = tail, .slot = slot};
    km_index_ref(km_pool_index(core->pool), tail);
    CHECK(!want_pump(core, w));
    return false;
}

static bool wants_pump(struct km_core *core)
{
    bool ended = false;
    for (uint32_t i = 0; i < KM_PROOF_WANTS_MAX; i++) {
        struct km_proof_want *w = &core->proof_wants[i];
        if (!w->used || !want_pump(core, w))
            continue;
        w->used = false;
        ended = true;
        km_pool_unref(core->pool, w->tail);
        core_leave(core, w->tail);
    }
    return ended;
}

/* --- what turned out to be damaged */

/* Marks what stands on a damaged block: below it nothing is of use. */
static void marks_spread(const struct km_core *core, uint32_t *marks)
{
    const struct km_index *ix = km_pool_index(core->pool);
    for (uint32_t block = 0; block < core->arena.block_count; block++) {
        uint32_t at = block;
        if (km_index_node(ix, block)->state < KM_NODE_INDEXED)
            continue;
        while (at != KM_NONE && marks[at] == MARK_UNKNOWN)
            at = km_index_node(ix, at)->parent;
        uint32_t mark = at == KM_NONE ? MARK_SOUND : marks[at];
        for (at = block; at != KM_NONE && marks[at] == MARK_UNKNOWN;
             at = km_index_node(ix, at)->parent)
            marks[at] = mark;
    }
}

void core_damaged(struct km_core *core, struct km_actions *actions, const uint32_t *blocks,
                  uint32_t count)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t *marks = km_pool_scratch(core->pool)->taken, first = KM_NONE;
    CHECK(!core->taking);
    memset(marks, 0, core->arena.block_count * sizeof(*marks));
    for (uint32_t i = 0; i < count; i++) {
        const struct km_node *n = km_index_node(ix, blocks[i]);
        if (n->state != KM_NODE_INDEXED || !n->unproven)
            continue; /* gone meanwhile */
        marks[blocks[i]] = MARK_DAMAGED;
        km_index_node(ix, blocks[i])->damaged = 1;
        first = blocks[i];
    }
    if (first == KM_NONE)
        return;
    core->unproven = core->unproven_seen = true; /* those in use are not given to others either */
    marks_spread(core, marks);
    for (uint32_t i = 0; i < KM_PROOF_WANTS_MAX; i++) {
        struct km_proof_want *w = &core->proof_wants[i];
        if (!w->used || marks[w->tail] != MARK_DAMAGED)
            continue;
        w->used = false;
        km_pool_unref(core->pool, w->tail);
    }
    uint32_t dropped = 0;
    for (uint32_t block = 0; block < core->arena.block_count; block++) {
        if (marks[block] != MARK_DAMAGED || km_index_node(ix, block)->state != KM_NODE_INDEXED)
            continue;
        km_pool_leaving(core->pool, block, true);
        dropped++;
    }
    for (uint32_t block = 0; block < core->arena.block_count; block++)
        if (marks[block] == MARK_DAMAGED && km_index_node(ix, block)->children == 0)
            core_leave(core, block);
    snprintf(core->text, sizeof(core->text), "block %u; %u blocks leave with it", first, dropped);
    core_trace(core, actions, "damaged data found", 0, 0, core->text);
}

/* Whether it was found damaged. */
static bool slot_proved(struct km_core *core, const struct km_proof *r)
{
    struct km_snap *s = km_index_snap(km_pool_index(core->pool), r->index);
    CHECK(s != NULL && s->proving && s->refs > 0 && s->state == KM_SNAP_KEPT);
    uint32_t node = s->node;
    bool stale = s->proof_stale;
    s->refs--;
    s->proving = s->proof_stale = 0;
    if (r->code == ERR_OK && !stale) {
        s->unproven = s->damaged = 0;
    } else if (r->code == ERR_OK) {
        if (!s->damaged)
            (void)prove_slot(core, r->index);
    } else {
        core->stats.snapshots_damaged += !s->damaged;
        core_doubt_snapshot(s);
        core->unproven = core->unproven_seen = true; /* it goes when nothing uses it */
        if (s->refs == 0)
            km_pool_snap_free(core->pool, r->index);
        else
            s->leaving = s->damaged = 1; /* when it is written */
    }
    km_pool_unref(core->pool, node);
    core_leave(core, node);
    if (km_index_node(km_pool_index(core->pool), node)->state == KM_NODE_INDEXED)
        (void)km_pool_prune(core->pool, node);
    return r->code != ERR_OK;
}

void core_proved(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    uint32_t damaged[KM_PROOFS_MAX], count = 0, slots = 0;
    CHECK(core->pool != NULL && event->u.proved.count <= KM_PROOFS_MAX);
    for (uint32_t i = 0; i < event->u.proved.count; i++) {
        const struct km_proof *r = &event->u.proved.results[i];
        CHECK(core->proofs_inflight > 0);
        core->proofs_inflight--;
        if (r->kind == KM_OBJECT_SNAPSHOT) {
            slots += slot_proved(core, r);
            continue;
        }
        struct km_node *n = km_index_node(km_pool_index(core->pool), r->index);
        CHECK(n->proving && n->state == KM_NODE_INDEXED);
        bool stale = n->proof_stale;
        n->proving = n->proof_stale = 0;
        if (r->code == ERR_OK && !stale) {
            n->unproven = n->damaged = 0;
        } else if (r->code == ERR_OK) {
            if (!n->damaged)
                (void)prove_block(core, r->index);
        } else {
            core->stats.blocks_damaged += !n->damaged;
            core_doubt(n);
            damaged[count++] = r->index;
        }
        km_pool_unref(core->pool, r->index);
        core_leave(core, r->index);
    }
    if (slots > 0) /* one line for all: the actions of a step are bounded */
        core_trace(core, actions, "damaged snapshots found", 0, 0, slots > 1 ? "several" : "one");
    if (count > 0)
        core_damaged(core, actions, damaged, count);
    if (wants_pump(core) || count > 0)
        core_tell_waiting(core, actions);
    core_tell_hungry(core, actions);
    core_grants_offer(core, actions);
}

/* What is being loaded is not sealed yet, and would be as it is now: its load fails. */
static void doubt_any(struct km_node *n)
{
    if (n->state == KM_NODE_INDEXED)
        core_doubt(n);
    else if (n->state == KM_NODE_LOADING)
        n->write_stale = 1;
}

static void suspect_all(struct km_core *core)
{
    struct km_index *ix = km_pool_index(core->pool);
    for (uint32_t b = 0; b < core->arena.block_count; b++)
        doubt_any(km_index_node(ix, b));
    for (uint32_t i = 0; i < km_index_snap_count(ix); i++) {
        struct km_snap *s = km_index_snap(ix, km_index_snap_first(ix) + i);
        if (s->state == KM_SNAP_KEPT)
            core_doubt_snapshot(s);
        else if (s->state == KM_SNAP_LOADING)
            s->write_stale = 1;
    }
    core->unproven = core->unproven_seen = true;
    core->proof_at = 0;
}

void core_suspect(struct km_core *core, uint32_t block)
{
    for (uint32_t i = 0; i < KM_PROOF_WANTS_MAX; i++) /* what was read for them may not count */
        if (core->proof_wants[i].used)
            core->proof_wants[i].cursor = core->proof_wants[i].tail;
    if (core->pool && block == KM_NONE)
        suspect_all(core);
    if (!core->pool || block >= core->arena.block_count)
        return;
    struct km_node *n = km_index_node(km_pool_index(core->pool), block);
    doubt_any(n);
    if (n->state != KM_NODE_INDEXED)
        return;
    core->unproven = core->unproven_seen = true;
    core->proof_at = block;
}

/* --- in the background */

/* Looks at one block or slot; the bytes that are asked for.  What is damaged is read again, and
 * leaves, when nothing uses it. */
static uint64_t look(struct km_core *core, uint32_t at)
{
    const struct km_index *ix = km_pool_index(core->pool);
    if (at < core->arena.block_count) {
        const struct km_node *n = km_index_node(ix, at);
        if (!n->unproven)
            return 0;
        core->unproven_seen = true;
        if (n->damaged && n->refs > 0)
            return 0;
        (void)prove_block(core, at);
        return core->arena.object_bytes[KM_OBJECT_BLOCK];
    }
    uint32_t slot = km_index_snap_first(ix) + at - core->arena.block_count;
    const struct km_snap *s = km_index_snap(ix, slot);
    if (!s->unproven)
        return 0;
    core->unproven_seen = true;
    if (s->damaged && s->refs > 0)
        return 0;
    (void)prove_slot(core, slot);
    return core->arena.object_bytes[KM_OBJECT_SNAPSHOT];
}

void core_proof_tick(struct km_core *core, struct km_actions *actions)
{
    if (core->unproven && wants_pump(core))
        core_tell_waiting(core, actions);
    uint32_t total = core->arena.block_count + km_index_snap_count(km_pool_index(core->pool));
    uint64_t bytes = 0;
    for (uint32_t i = 0; core->unproven && i < LOOKED_A_TICK && bytes < BYTES_A_TICK &&
                         core->proofs_inflight < ASIDE_MAX;
         i++) {
        if (core->proof_at >= total) {
            core->unproven = core->unproven_seen;
            core->unproven_seen = false;
            core->proof_at = 0;
            return;
        }
        bytes += look(core, core->proof_at++);
    }
}

void core_proof_reset(struct km_core *core)
{
    core->proofs_inflight = core->proof_count = core->proof_at = 0;
    core->unproven = core->unproven_seen = false;
    memset(core->proof_wants, 0, sizeof(core->proof_wants));
}

uint32_t km_core_unproven(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    uint32_t count = 0;
    for (uint32_t b = 0; core->pool && core->unproven && b < core->arena.block_count; b++)
        count += km_index_node(km_pool_index(core->pool), b)->unproven;
    return count;
}
