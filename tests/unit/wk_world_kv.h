/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/wk_world_kv.h - the fake kvmgr of the core's world: leases, a cache, snapshots. */
#ifndef TESTS_UNIT_WK_WORLD_KV_H
#define TESTS_UNIT_WK_WORLD_KV_H

#include "tests/unit/wk_world_base.h"

static inline struct lease *lease_find(struct world *w, uint64_t lease)
{
    for (uint32_t i = 0; i < ENTRIES; i++)
        if (w->leases[i].lease == lease && lease != 0)
            return &w->leases[i];
    return NULL;
}

/* Whoever reads these rows now reads nonsense. */
static inline void block_poison(struct world *w, uint32_t block)
{
    memset(&w->rows[block * BT_MAX], 0xee, BT_MAX * sizeof *w->rows);
}

static inline void block_unref(struct world *w, uint32_t block)
{
    assert_true(w->refs[block] > 0);
    if (--w->refs[block] > 0)
        return;
    w->block_used--;
    if (!w->known[block])
        block_poison(w, block);
}

static inline void block_forget(struct world *w, uint32_t block)
{
    assert_true(w->known[block] && w->refs[block] == 0);
    w->known[block] = false;
    if (w->snap[block] != 0)
        w->snaps[w->snap[block]] = SNAP_FREE;
    w->snap[block] = 0;
    block_poison(w, block);
}

static inline void lease_drop(struct world *w, struct lease *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        block_unref(w, l->blocks[i]);
    w->slot_taken[l->slot] = false;
    memset(l, 0, sizeof *l);
}

static inline void block_hold(struct world *w, struct lease *l, uint32_t block)
{
    w->block_used += w->refs[block]++ == 0;
    l->blocks[l->count++] = block;
}

/* Free ones first; else what is cached goes. */
static inline void blocks_give(struct world *w, struct lease *l, uint32_t count, uint32_t *ret_ids)
{
    uint32_t at = rng_below(&w->rng, w->block_count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t turn = 0;
        while (w->refs[at] > 0 || (w->known[at] && turn < w->block_count)) {
            at = (at + 1) % w->block_count;
            turn++;
        }
        if (w->known[at])
            block_forget(w, at);
        block_hold(w, l, at);
        ret_ids[i] = at;
    }
}

static inline uint32_t block_find(struct world *w, const struct hash128 *hash)
{
    for (uint32_t i = 0; i < w->block_count; i++)
        if (w->known[i] && memcmp(&w->hashes[i], hash, sizeof *hash) == 0)
            return i;
    return WK_NONE;
}

/* The slots that the worker may write, topped up where there is room; sometimes a snapshot that
 * nobody reads goes for one. */
static inline uint32_t grants(struct world *w, uint32_t *ret_slots)
{
    uint32_t count = 0;
    for (uint32_t s = w->slot_count; s < w->slot_count + w->snap_count; s++)
        if (w->snaps[s] == SNAP_GRANTED)
            ret_slots[count++] = s;
    for (uint32_t turn = 0; turn < 2; turn++) {
        for (uint32_t s = w->slot_count; s < w->slot_count + w->snap_count && count < GRANTS; s++)
            if (w->snaps[s] == SNAP_FREE) {
                w->snaps[s] = SNAP_GRANTED;
                ret_slots[count++] = s;
            }
        for (uint32_t b = 0; b < w->block_count && count < GRANTS && turn == 0; b++) {
            bool read = w->snap[b] == 0 || rng_below(&w->rng, 16) != 0;
            for (uint32_t i = 0; i < ENTRIES; i++)
                read |= w->leases[i].restore == w->snap[b];
            if (!read) {
                w->snaps[w->snap[b]] = SNAP_FREE;
                w->snap[b] = 0;
            }
        }
    }
    return count;
}

/* Shares the longest front of the asked chain that ends with a snapshot. */
static inline void front_share(struct world *w, struct lease *l, const struct msg_kv_open *open,
                               struct msg_kv_open_reply *reply, uint32_t *ret_ids)
{
    uint32_t found[BLOCKS_MAX], best = 0, bt = w->options.shape.block_tokens;
    for (uint32_t i = 0; i < open->hash_count && (i + 1) * bt <= open->reuse_max; i++) {
        found[i] = block_find(w, &open->hashes[i]);
        if (found[i] == WK_NONE)
            break;
        if (w->snap[found[i]] != 0)
            best = i + 1;
    }
    reply->snapshot_slot = UINT32_MAX;
    if (best == 0)
        return;
    for (uint32_t i = 0; i < best; i++) {
        block_hold(w, l, found[i]);
        ret_ids[i] = found[i];
    }
    l->shared = best;
    l->restore = w->snap[found[best - 1]];
    reply->snapshot_slot = l->restore;
    reply->reusable_tokens = best * bt;
    w->reused += best * bt;
}

static inline void kv_commit(struct world *w, const struct msg_kv_commit *c)
{
    struct lease *l = lease_find(w, c->lease);
    assert_non_null(l);
    assert_true(c->first_block + c->hash_count <= l->count && c->first_block >= l->shared);
    assert_true((c->first_block + c->hash_count) * w->options.shape.block_tokens <= c->token_count);
    l->restore = 0;
    for (uint32_t i = 0; i < c->hash_count && w->snap_count > 0; i++) {
        uint32_t block = l->blocks[c->first_block + i];
        assert_false(w->known[block]);
        if (block_find(w, &c->hashes[i]) != WK_NONE)
            continue; /* stays the lease's own copy */
        w->known[block] = true;
        w->hashes[block] = c->hashes[i];
    }
}

static inline void kv_snapshot(struct world *w, const struct msg *m)
{
    const struct msg_kv_snapshot *s = &m->u.kv_snapshot;
    struct request *r = request_of(w, &m->id);
    uint32_t block = block_find(w, &s->hash);
    uint64_t hash = 0;
    assert_int_equal(w->snaps[s->slot], SNAP_GRANTED);
    assert_true(s->token_count > 0 && s->token_count % w->options.shape.block_tokens == 0);
    /* The copy holds exactly these tokens. */
    assert_int_equal(w->slots[s->slot].count, s->token_count);
    for (uint32_t i = 0; i < s->token_count; i++)
        hash = mix(hash, i < r->q.prompt_count ? r->ids[i] : r->text[i - r->q.prompt_count]);
    assert_true(w->slots[s->slot].hash == hash);
    struct item *it = later_kv(w, MSG_KV_SNAPSHOT_REPLY);
    it->msg.id = m->id;
    struct msg_kv_snapshot_reply *reply = &it->msg.u.kv_snapshot_reply;
    reply->lease = s->lease;
    reply->slot = s->slot;
    reply->code = block == WK_NONE ? ERR_NOT_FOUND : ERR_OK;
    if (block != WK_NONE && w->snap[block] == 0) {
        w->snap[block] = s->slot;
        w->snaps[s->slot] = SNAP_KEPT;
        w->kept++;
    }
    reply->granted_count = grants(w, it->ids);
}

static inline void kv_open(struct world *w, const struct msg *m)
{
    struct request *r = request_of(w, &m->id);
    uint32_t index = (uint32_t)(r - w->reqs), slot = 0;
    struct lease *l = NULL;
    for (uint32_t i = 0; i < ENTRIES; i++)
        if (w->leases[i].lease != 0 && w->leases[i].request == index)
            lease_drop(w, &w->leases[i]);
    for (uint32_t i = 0; i < ENTRIES && l == NULL; i++)
        if (w->leases[i].lease == 0)
            l = &w->leases[i];
    assert_int_equal(m->u.kv_open.hash_count,
                     (r->q.prompt_count + r->got_count) / w->options.shape.block_tokens);
    struct item *it = later_kv(w, MSG_KV_OPEN_REPLY);
    it->msg.id = m->id;
    while (slot < w->slot_count && w->slot_taken[slot])
        slot++;
    struct msg_kv_open_reply *reply = &it->msg.u.kv_open_reply;
    bool refuse = w->kv_refusals > 0 && rng_below(&w->rng, 8) == 0;
    if (m->u.kv_open.blocks_wanted > w->block_count - w->block_used || slot == w->slot_count ||
        refuse) {
        reply->code = ERR_KV_FULL;
        return;
    }
    l->lease = ++w->lease_next;
    l->request = index;
    l->slot = slot;
    w->slot_taken[slot] = true;
    assert_int_equal(m->u.kv_open.reuse_max, r->q.prompt_count + r->got_count - 1);
    front_share(w, l, &m->u.kv_open, reply, it->ids);
    blocks_give(w, l, m->u.kv_open.blocks_wanted - l->count, it->ids + l->count);
    reply->lease = l->lease;
    reply->state_slot = slot;
    reply->block_count = l->count;
    r->opened_us = it->at_us;
    r->sliced_us = 0;
}

static inline void kv_extend(struct world *w, const struct msg *m)
{
    const struct msg_kv_extend *e = &m->u.kv_extend;
    struct lease *l = lease_find(w, e->lease);
    struct item *it = later_kv(w, MSG_KV_EXTEND_REPLY);
    it->msg.id = m->id;
    struct msg_kv_extend_reply *reply = &it->msg.u.kv_extend_reply;
    reply->lease = e->lease;
    reply->blocks_have = e->blocks_have;
    if (l == NULL) {
        reply->code = ERR_NOT_FOUND;
    } else if (e->blocks_wanted > w->block_count - w->block_used) {
        reply->code = ERR_KV_FULL;
    } else {
        assert_int_equal(l->count, e->blocks_have);
        blocks_give(w, l, e->blocks_wanted, it->ids);
        reply->block_count = e->blocks_wanted;
    }
}

static inline void kv_message(struct world *w, const struct msg *m)
{
    struct lease *l;
    switch (m->type) {
    case MSG_KV_OPEN:
        kv_open(w, m);
        break;
    case MSG_KV_EXTEND:
        kv_extend(w, m);
        break;
    case MSG_KV_RELEASE:
        l = lease_find(w, m->u.kv_release.lease);
        if (l != NULL)
            lease_drop(w, l);
        break;
    case MSG_KV_COMMIT:
        kv_commit(w, &m->u.kv_commit);
        break;
    case MSG_KV_SNAPSHOT:
        kv_snapshot(w, m);
        break;
    default:
        fail_msg("message %d to kvmgr", m->type);
    }
}

#endif
