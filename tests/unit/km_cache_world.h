/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/km_cache_world.h - a world around kvmgr's core: an arena whose blocks and slots
 * hold the hash of what was computed into them, a tier that copies it, workers that check every
 * copy. */
#ifndef TESTS_UNIT_KM_CACHE_WORLD_H
#define TESTS_UNIT_KM_CACHE_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvmgr/km_core.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"
#include "lib/base/rng.h"

#define CW_BLOCKS  64u
#define CW_SLOTS   64u
#define CW_BT      16u
#define CW_SECOND  1000000u
#define CW_OBJECTS 4096u

struct cw_header {
    enum km_header_state state;
    struct hash128 hash, parent;
    uint32_t position, token_count;
    bool snapshot;
};

struct cw_object {
    bool used, corrupt;
    struct km_store_object object;
    struct hash128 content;
};

struct cw_world {
    struct km_core_options options;
    struct km_core *core;
    uint64_t now_us;
    uint32_t block_count, slot_count, live_slots, seqs;
    struct cw_header blocks[CW_BLOCKS], slots[CW_SLOTS];
    struct hash128 block_data[CW_BLOCKS], slot_data[CW_SLOTS];
    struct km_actions actions;
    struct msg last; /* last message that was no reclaim, pressure or pushed state */
    uint32_t blocks_last[CW_BLOCKS];
    uint32_t granted[MSG_GRANTS_MAX], granted_count;
    uint64_t reclaimed;
    uint32_t reclaims, pressures, answers, offers;
    struct cw_object *objects; /* of the tier */
    struct km_store_item queue[KM_STORE_MAX];
    uint32_t queued;
    bool tier_fails;
    struct km_proof proofs[KM_PROOFS_MAX]; /* asked for and not told yet */
    uint32_t proof_count, proved;
    bool proofs_held;
    struct km_session_change session;
    uint32_t sessions, snapshot_tokens;
    struct km_moved moved[64]; /* the last ones */
    uint32_t moved_count;
    uint64_t pin_us;
    uint64_t mapped; /* incarnation that has the arena mapped, however silent */
};

static inline struct hash128 cw_hash(const struct hash128 *parent, uint32_t token, uint32_t salt)
{
    uint32_t pair[2] = {token, salt};
    return hash_blake2b("k", 1, parent, sizeof(*parent), pair, sizeof(pair), NULL, 0);
}

static inline bool cw_same(const struct hash128 *a, const struct hash128 *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

static inline struct km_peer cw_peer(uint32_t n)
{
    struct km_peer peer = {.count = 8};
    snprintf((char *)peer.bytes, sizeof(peer.bytes), "worker-%u", n);
    return peer;
}

static inline struct msg_id cw_id(uint32_t n)
{
    struct msg_id id = {{0}};
    memcpy(id.bytes, &n, sizeof(n));
    return id;
}

static inline void cw_apply_blocks(struct cw_world *w, const struct km_action *a)
{
    for (uint32_t i = 0; i < a->u.blocks.count; i++) {
        uint32_t block = a->u.blocks.blocks[i];
        assert_true(block < w->block_count);
        struct cw_header *h = &w->blocks[block];
        switch (a->u.blocks.state) {
        case KM_FREE:
            assert_int_not_equal(h->state, KM_FREE);
            *h = (struct cw_header){.state = KM_FREE};
            break;
        case KM_WRITING:
            assert_int_equal(h->state, KM_FREE);
            h->state = KM_WRITING;
            break;
        case KM_COMMITTED:
            assert_int_equal(h->state, KM_WRITING);
            h->state = KM_COMMITTED;
            h->hash = a->u.blocks.hashes[i];
            h->parent = i > 0 ? a->u.blocks.hashes[i - 1] : a->u.blocks.parent;
            h->position = a->u.blocks.first_position + i;
            break;
        }
    }
}

static inline void cw_apply_slots(struct cw_world *w, const struct km_action *a)
{
    for (uint32_t i = 0; i < a->u.slots.count; i++) {
        uint32_t slot = a->u.slots.slots[i];
        assert_true(slot < w->slot_count);
        struct cw_header *h = &w->slots[slot];
        assert_int_not_equal(h->state, a->u.slots.state);
        if (a->u.slots.state != KM_FREE)
            assert_int_equal(a->u.slots.snapshot, slot >= w->live_slots);
        *h = (struct cw_header){.state = a->u.slots.state,
                                .hash = a->u.slots.hash,
                                .token_count = a->u.slots.token_count,
                                .snapshot = slot >= w->live_slots};
    }
}

static inline void cw_granted(struct cw_world *w, uint32_t count, const uint32_t *slots)
{
    assert_true(count <= MSG_GRANTS_MAX);
    w->granted_count = count;
    for (uint32_t i = 0; i < count; i++) {
        assert_true(slots[i] >= w->live_slots && slots[i] < w->slot_count);
        assert_int_equal(w->slots[slots[i]].state, KM_WRITING);
        w->granted[i] = slots[i];
    }
}

static inline void cw_sent(struct cw_world *w, const struct msg *m, bool asked)
{
    if (m->type == MSG_KV_STATE && !asked) { /* for the sake of its slots */
        cw_granted(w, m->u.kv_state.granted_count, m->u.kv_state.granted);
        w->offers++;
        return;
    }
    if (m->type == MSG_KV_RECLAIM) {
        w->reclaims++;
        w->reclaimed = m->u.kv_reclaim.lease;
        return;
    }
    if (m->type == MSG_KV_PRESSURE) {
        w->pressures++;
        return;
    }
    w->last = *m;
    w->answers++;
    if (m->type == MSG_KV_OPEN_REPLY && m->u.kv_open_reply.block_count > 0)
        memcpy(w->blocks_last, m->u.kv_open_reply.blocks,
               m->u.kv_open_reply.block_count * sizeof(uint32_t));
    if (m->type == MSG_KV_EXTEND_REPLY && m->u.kv_extend_reply.block_count > 0)
        memcpy(w->blocks_last, m->u.kv_extend_reply.blocks,
               m->u.kv_extend_reply.block_count * sizeof(uint32_t));
    if (m->type == MSG_KV_ATTACH_REPLY)
        cw_granted(w, m->u.kv_attach_reply.granted_count, m->u.kv_attach_reply.granted);
    if (m->type == MSG_KV_SNAPSHOT_REPLY && m->u.kv_snapshot_reply.code != ERR_EPOCH)
        cw_granted(w, m->u.kv_snapshot_reply.granted_count, m->u.kv_snapshot_reply.granted);
    if (m->type == MSG_KV_STATE && m->u.kv_state.granted_count > 0)
        cw_granted(w, m->u.kv_state.granted_count, m->u.kv_state.granted);
}

static inline int cw_by_position(const void *x, const void *y)
{
    const struct km_found_block *a = x, *b = y;
    return a->position < b->position ? -1 : a->position > b->position;
}

/* What km_arena does with a file: only sound committed headers are told, the others are freed. */
static inline struct km_arena_result cw_arena(struct cw_world *w)
{
    static struct km_found_block found[CW_BLOCKS];
    static struct km_found_snapshot snapshots[CW_SLOTS];
    struct km_arena_result r = {.code = ERR_OK,
                                .text = "",
                                .path = "/x",
                                .arena_bytes = 1,
                                .block_count = w->block_count,
                                .live_count = w->live_slots,
                                .slot_count = w->slot_count,
                                .object_bytes = {8192, 8192},
                                .found = found,
                                .found_snapshots = snapshots};
    for (uint32_t i = 0; i < w->block_count; i++) {
        struct cw_header *h = &w->blocks[i];
        if (h->state == KM_COMMITTED)
            found[r.found_count++] =
                (struct km_found_block){h->hash, h->parent, i, h->position, true};
        else
            *h = (struct cw_header){.state = KM_FREE};
    }
    qsort(found, r.found_count, sizeof(found[0]), cw_by_position);
    for (uint32_t i = 0; i < w->slot_count; i++) {
        struct cw_header *h = &w->slots[i];
        if (h->state == KM_COMMITTED && h->snapshot)
            snapshots[r.found_snapshot_count++] =
                (struct km_found_snapshot){h->hash, i, h->token_count, true};
        else
            *h = (struct cw_header){.state = KM_FREE};
    }
    return r;
}

static inline void cw_store(struct cw_world *w, const struct km_action *a)
{
    assert_non_null(w->objects);
    for (uint32_t i = 0; i < a->u.store.count; i++) {
        assert_true(w->queued < KM_STORE_MAX);
        w->queue[w->queued++] = a->u.store.items[i];
    }
}

static inline void cw_prove(struct cw_world *w);

static inline void cw_step(struct cw_world *w, struct km_event event)
{
    event.now_us = w->now_us;
    for (bool more = true; more;) {
        more = false;
        km_core_step(w->core, &event, &w->actions);
        for (uint32_t i = 0; i < w->actions.count; i++) {
            const struct km_action *a = &w->actions.list[i];
            switch (a->type) {
            case KM_ACTION_SEND:
                cw_sent(w, &a->u.send.msg, event.type == KM_EVENT_MSG);
                break;
            case KM_ACTION_ARENA_OPEN:
                event = (struct km_event){.now_us = w->now_us, .type = KM_EVENT_ARENA};
                w->live_slots = a->u.arena.slot_count;
                event.u.arena = cw_arena(w);
                w->queued = w->proof_count = 0;
                more = true;
                break;
            case KM_ACTION_BLOCKS:
                cw_apply_blocks(w, a);
                break;
            case KM_ACTION_SLOTS:
                cw_apply_slots(w, a);
                break;
            case KM_ACTION_STORE:
                cw_store(w, a);
                break;
            case KM_ACTION_PROVE:
                for (uint32_t k = 0; k < a->u.prove.count; k++) {
                    assert_true(w->proof_count < KM_PROOFS_MAX);
                    w->proofs[w->proof_count++] = a->u.prove.items[k];
                }
                break;
            case KM_ACTION_SESSION:
                w->snapshot_tokens = a->u.session.snapshot_tokens;
                w->pin_us = a->u.session.pin_us;
                if (a->u.session.count > 0) {
                    w->sessions++;
                    w->session = a->u.session;
                }
                break;
            case KM_ACTION_MOVED:
                for (uint32_t k = 0; k < a->u.moved.count; k++)
                    w->moved[w->moved_count++ % 64] = a->u.moved.items[k];
                break;
            case KM_ACTION_TRACE:
                break;
            }
        }
        if (!more && km_core_more(w->core)) {
            event = (struct km_event){.now_us = w->now_us, .type = KM_EVENT_STORE_DONE};
            more = true;
        }
    }
    if (!w->proofs_held)
        cw_prove(w);
}

/* Reads what was asked for and tells. */
static inline void cw_prove(struct cw_world *w)
{
    static struct km_proof results[KM_PROOFS_MAX];
    struct km_event event = {.type = KM_EVENT_PROVED};
    if (w->proof_count == 0)
        return;
    for (uint32_t i = 0; i < w->proof_count; i++) {
        results[i] = w->proofs[i];
        uint32_t at = results[i].index;
        bool block = results[i].kind == KM_OBJECT_BLOCK;
        const struct cw_header *h = block ? &w->blocks[at] : &w->slots[at];
        assert_int_equal(h->state, KM_COMMITTED); /* it stays while it is read */
        bool good = cw_same(&h->hash, block ? &w->block_data[at] : &w->slot_data[at]);
        results[i].code = good ? ERR_OK : ERR_CORRUPT;
    }
    event.u.proved.count = w->proof_count;
    event.u.proved.results = results;
    w->proved += w->proof_count;
    w->proof_count = 0;
    cw_step(w, event);
}

/* As the shell does: of those that are not heard, who has the arena mapped no more? */
static inline void cw_suspects(struct cw_world *w, const struct km_peer *asker,
                               uint64_t incarnation)
{
    uint64_t who[KM_WORKERS_MAX];
    uint32_t count = km_core_suspects(w->core, asker, incarnation, who);
    for (uint32_t i = 0; i < count; i++) {
        struct km_event event = {.type = KM_EVENT_WORKER_GONE};
        event.u.gone = who[i];
        if (who[i] != w->mapped)
            cw_step(w, event);
    }
}

static inline void cw_send(struct cw_world *w, uint32_t peer, const struct msg *m)
{
    struct km_peer from = cw_peer(peer);
    if (m->type == MSG_KV_ATTACH)
        cw_suspects(w, &from, m->u.kv_attach.incarnation);
    struct km_event event = {.type = KM_EVENT_MSG};
    event.u.msg.peer = cw_peer(peer);
    event.u.msg.msg = m;
    cw_step(w, event);
}

static inline void cw_tick(struct cw_world *w)
{
    cw_step(w, (struct km_event){.type = KM_EVENT_TICK});
    cw_suspects(w, NULL, 0);
}

/* --- the tier */

static inline struct cw_object *cw_object(struct cw_world *w, uint32_t kind,
                                          const struct hash128 *hash)
{
    struct cw_object *unused = NULL;
    for (uint32_t i = 0; i < CW_OBJECTS; i++) {
        struct cw_object *o = &w->objects[i];
        if (o->used && o->object.kind == kind && cw_same(&o->object.hash, hash))
            return o;
        if (!o->used && !unused)
            unused = o;
    }
    assert_non_null(unused);
    return unused;
}

static inline struct km_store_result cw_store_do(struct cw_world *w, const struct km_store_item *it)
{
    struct km_store_result r = {.item = *it, .code = ERR_OK, .bytes = 8192};
    struct cw_object *o = cw_object(w, it->kind, &it->hash);
    struct hash128 *data =
        it->kind == KM_OBJECT_BLOCK ? &w->block_data[it->index] : &w->slot_data[it->index];
    switch (it->op) {
    case KM_STORE_WRITE:
        if (!cw_same(data, &it->hash)) /* damaged while it was committed */
            r.code = ERR_CORRUPT;
        else if (w->tier_fails)
            r.code = ERR_IO;
        else
            *o = (struct cw_object){.used = true,
                                    .object = {it->kind, it->hash, it->parent, r.bytes},
                                    .content = *data};
        break;
    case KM_STORE_READ:
        if (w->tier_fails)
            r.code = ERR_IO;
        else if (!o->used)
            r.code = ERR_NOT_FOUND;
        else if (o->corrupt)
            r.code = ERR_CORRUPT;
        else
            *data = o->content;
        if (r.code == ERR_CORRUPT)
            o->used = false;
        break;
    case KM_STORE_REMOVE:
        o->used = false;
        break;
    }
    return r;
}

/* Carries out the first `count` operations and tells the core at once. */
static inline void cw_store_run(struct cw_world *w, uint32_t count)
{
    static struct km_store_result results[KM_STORE_MAX];
    count = count < w->queued ? count : w->queued;
    if (count == 0)
        return;
    for (uint32_t i = 0; i < count; i++)
        results[i] = cw_store_do(w, &w->queue[i]);
    memmove(w->queue, w->queue + count, (w->queued - count) * sizeof(w->queue[0]));
    w->queued -= count;
    struct km_event event = {.type = KM_EVENT_STORE_DONE};
    event.u.store_done.count = count;
    event.u.store_done.results = results;
    cw_step(w, event);
}

static inline void cw_store_all(struct cw_world *w)
{
    while (w->queued > 0)
        cw_store_run(w, w->queued);
}

static inline void cw_tier_on(struct cw_world *w)
{
    struct km_event event = {.type = KM_EVENT_STORE_STATE};
    event.u.store_state.on = true;
    cw_step(w, event);
    for (uint32_t i = 0; i < CW_OBJECTS; i++) {
        if (!w->objects[i].used)
            continue;
        event = (struct km_event){.type = KM_EVENT_STORE_OBJECTS};
        event.u.store_objects.count = 1;
        event.u.store_objects.objects = &w->objects[i].object;
        cw_step(w, event);
    }
}

/* --- life */

static inline void cw_attach(struct cw_world *w, uint32_t peer, uint64_t incarnation)
{
    struct msg m = {.type = MSG_KV_ATTACH};
    m.u.kv_attach = (struct msg_kv_attach){.worker_id = peer,
                                           .incarnation = incarnation,
                                           .dsa_layers = 1,
                                           .latent_dim = 8,
                                           .index_dim = 8,
                                           .index_kpool = 4,
                                           .state_bytes = 100,
                                           .seqs_max = w->seqs,
                                           .ranks = 1};
    cw_send(w, peer, &m);
    assert_int_equal(w->last.type, MSG_KV_ATTACH_REPLY);
    assert_int_equal(w->last.u.kv_attach_reply.code, ERR_OK);
    assert_int_equal(w->last.u.kv_attach_reply.live_slots, w->seqs);
}

/* kvmgr starts, or starts again on what the arena holds. */
static inline void cw_start(struct cw_world *w)
{
    km_core_destroy(&w->core);
    w->options.epoch++;
    w->options.incarnation = 0x1000 + w->options.epoch;
    w->queued = w->proof_count = 0;
    w->core = km_core_create(&w->options);
}

static inline void cw_prepare(struct cw_world *w, uint32_t blocks, uint32_t snapshots,
                              uint32_t seqs)
{
    memset(w, 0, sizeof(*w));
    w->now_us = CW_SECOND;
    w->block_count = blocks;
    w->seqs = seqs;
    w->slot_count = seqs + snapshots;
    assert_true(blocks <= CW_BLOCKS && w->slot_count <= CW_SLOTS);
    w->options = (struct km_core_options){.block_tokens = CW_BT,
                                          .kv_dtype = 1,
                                          .index_dtype = 1,
                                          .session_percent = 100,
                                          .tenant_percent = 100,
                                          .sessions_max = 64,
                                          .tier_objects_max = CW_OBJECTS};
    memset(&w->options.key, 3, sizeof(w->options.key));
}

static inline void cw_init(struct cw_world *w, uint32_t blocks, uint32_t snapshots, uint32_t seqs)
{
    cw_prepare(w, blocks, snapshots, seqs);
    cw_start(w);
}

static inline void cw_fini(struct cw_world *w)
{
    km_core_destroy(&w->core);
    free(w->objects);
    w->objects = NULL;
}

/* Headers and counts agree; the sums hold. */
static inline void cw_check(struct cw_world *w)
{
    struct km_pool_counts c = km_core_counts(w->core);
    if (c.blocks_total == 0)
        return;
    km_pool_audit(km_core_pool(w->core));
    uint32_t unused = 0, committed = 0;
    for (uint32_t i = 0; i < w->block_count; i++) {
        unused += w->blocks[i].state == KM_FREE;
        committed += w->blocks[i].state == KM_COMMITTED;
    }
    assert_int_equal(unused, c.blocks_free);
    assert_true(committed >= c.blocks_cached);
    assert_int_equal(c.blocks_free + c.blocks_cached + c.blocks_leased, c.blocks_total);
    uint32_t kept = 0;
    for (uint32_t i = w->live_slots; i < w->slot_count; i++)
        kept += w->slots[i].state == KM_COMMITTED;
    assert_int_equal(kept, km_core_cache(w->core).snapshots_kept);
}

/* The longest front of a chain that the headers alone make reusable, by brute force. */
static inline uint32_t cw_naive(const struct cw_world *w, const struct hash128 *chain,
                                uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < count; i++) {
        bool block = false, snapshot = false;
        for (uint32_t b = 0; b < w->block_count; b++)
            block |= w->blocks[b].state == KM_COMMITTED && cw_same(&w->blocks[b].hash, &chain[i]) &&
                     cw_same(&w->block_data[b], &chain[i]);
        if (!block)
            break;
        for (uint32_t s = w->live_slots; s < w->slot_count; s++)
            snapshot |= w->slots[s].state == KM_COMMITTED &&
                        cw_same(&w->slots[s].hash, &chain[i]) &&
                        cw_same(&w->slot_data[s], &chain[i]);
        if (snapshot)
            best = i + 1;
    }
    return best;
}

#endif
