/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_core_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "proto/block_hash.h"

static bool epoch_stale(const struct km_core *core, const struct msg *m)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return m->epoch != 0 && m->epoch != core->options.epoch;
}

/* The sender's lease, or NULL with *ret_code saying why. */
static struct km_lease *lease_of(struct km_core *core, const struct km_event *event, uint64_t id,
                                 enum err *ret_code)
{
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    *ret_code = ERR_EPOCH;
    struct km_lease *lease = NULL;
    if (w && !epoch_stale(core, event->u.msg.msg)) {
        CHECK(core->pool != NULL);
        lease = km_pool_find(core->pool, (uint32_t)(w - core->workers), id);
        if (lease)
            *ret_code = ERR_OK;
        else if (km_pool_id_epoch(id) == (core->options.epoch & 0xffffffu))
            *ret_code = ERR_NOT_FOUND;
    }
    if (!lease)
        core->stats.stale++;
    return lease;
}

void core_send_state(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                     const struct msg *asked)
{
    struct km_pool_counts c = km_core_counts(core);
    CHECK(c.blocks_free + c.blocks_leased + c.blocks_cached == c.blocks_total);
    struct msg *reply = core_reply(core, actions, peer, MSG_KV_STATE, asked);
    reply->u.kv_state = (struct msg_kv_state){
        .incarnation = core->options.incarnation,
        .epoch = core->options.epoch,
        .blocks_free = c.blocks_free,
        .blocks_leased = c.blocks_leased,
        .blocks_cached = c.blocks_cached,
        .blocks_total = c.blocks_total,
        .slots_free = c.slots_free,
        .slots_total = c.slots_total,
    };
}

static void act_taken(struct km_core *core, struct km_actions *actions, uint32_t count)
{
    CHECK(count <= core->arena.block_count);
    core->taking = true;
    if (count == 0)
        return;
    struct km_action *action = core_act(core, actions, KM_ACTION_BLOCKS);
    action->u.blocks.state = KM_WRITING;
    action->u.blocks.count = count;
    action->u.blocks.blocks = core->scratch.taken;
}

/* Checks that need no pool.  ERR_OK, or the refusal with its text. */
static enum err open_check(struct km_core *core, const struct km_event *event,
                           const struct km_worker *w)
{
    const struct msg_kv_open *open = &event->u.msg.msg->u.kv_open;
    core->text[0] = '\0';
    if (!w || epoch_stale(core, event->u.msg.msg)) {
        core->stats.stale++;
        snprintf(core->text, sizeof(core->text),
                 w ? "the epoch is %u now: attach again" : "epoch %u: attach first",
                 core->options.epoch);
        return ERR_EPOCH;
    }
    CHECK(core->pool != NULL);
    if (w->lost) {
        core->stats.waits++;
        snprintf(core->text, sizeof(core->text), "silent for too long: a ping must come first");
        return ERR_KV_FULL;
    }
    uint32_t total = core->arena.block_count;
    if (open->blocks_wanted == 0) {
        snprintf(core->text, sizeof(core->text), "blocks_wanted: 0");
        core->stats.refused++;
        return ERR_INVALID;
    }
    if (open->blocks_wanted > total || open->blocks_wanted > MSG_BLOCKS_MAX) {
        snprintf(core->text, sizeof(core->text), "blocks_wanted: %u, the arena has %u",
                 open->blocks_wanted, total);
        core->stats.refused++;
        return ERR_TOO_LARGE;
    }
    return ERR_OK;
}

void core_open(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_open *open = &m->u.kv_open;
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    struct km_lease *lease = NULL;
    enum err e = open_check(core, event, w);
    if (e == ERR_OK) {
        uint32_t owner = (uint32_t)(w - core->workers);
        struct km_lease *old = km_pool_find_request(core->pool, owner, &m->id);
        if (old)
            core_free_lease(core, actions, old);
        e = km_pool_open(core->pool, owner, &m->id, open->blocks_wanted, core->now_us,
                         core->scratch.taken, &lease);
        if (e == ERR_KV_FULL) {
            struct km_pool_counts c = km_pool_counts(core->pool);
            core->stats.opens_full++;
            snprintf(core->text, sizeof(core->text),
                     "%u blocks wanted, %u of %u free, %u slots free", open->blocks_wanted,
                     c.blocks_free, c.blocks_total, c.slots_free);
        }
    }
    if (e == ERR_OK) {
        CHECK(lease->block_count == open->blocks_wanted);
        core->stats.opens++;
        lease->named_ping = core->ping_serial;
        if (open->session_key && open->session_key[0])
            block_hash_session(&core->options.key, open->session_key, lease->sid);
        lease->salt = block_hash_salt(&core->options.key, open->cache_salt ? open->cache_salt : "");
        act_taken(core, actions, lease->block_count);
        core->slot_taken = lease->state_slot;
        struct km_action *slot = core_act(core, actions, KM_ACTION_SLOTS);
        slot->u.slots.state = KM_WRITING;
        slot->u.slots.count = 1;
        slot->u.slots.slots = &core->slot_taken;
    }
    if (e == ERR_EPOCH)
        core_send_state(core, actions, &event->u.msg.peer, NULL);
    struct msg *reply = core_reply(core, actions, &event->u.msg.peer, MSG_KV_OPEN_REPLY, m);
    struct msg_kv_open_reply *r = &reply->u.kv_open_reply;
    r->code = e;
    r->text = core->text;
    r->epoch = core->options.epoch;
    r->snapshot_slot = KM_NONE;
    if (e == ERR_OK) {
        r->lease = lease->id;
        r->state_slot = lease->state_slot;
        r->block_count = lease->block_count;
        r->blocks = core->scratch.taken;
    }
}

void core_extend(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_extend *extend = &m->u.kv_extend;
    enum err e;
    struct km_lease *lease = lease_of(core, event, extend->lease, &e);
    uint32_t given = 0;
    if (lease) {
        uint32_t before = lease->block_count;
        uint64_t wanted = (uint64_t)extend->blocks_have + extend->blocks_wanted;
        if (wanted > core->arena.block_count || wanted > MSG_BLOCKS_MAX)
            e = ERR_TOO_LARGE;
        else
            e = km_pool_extend(core->pool, lease, extend->blocks_have, extend->blocks_wanted,
                               core->scratch.taken);
        if (e == ERR_OK) {
            /* New blocks are the tail of what is returned. */
            uint32_t fresh = lease->block_count - before;
            given = extend->blocks_wanted;
            CHECK(fresh <= given);
            act_taken(core, actions, fresh);
            if (fresh > 0)
                actions->list[actions->count - 1].u.blocks.blocks += given - fresh;
            core->stats.extends++;
        } else if (e == ERR_KV_FULL) {
            core->stats.extends_full++;
        } else {
            core->stats.refused++;
        }
    }
    if (e == ERR_EPOCH)
        core_send_state(core, actions, &event->u.msg.peer, NULL);
    struct msg *reply = core_reply(core, actions, &event->u.msg.peer, MSG_KV_EXTEND_REPLY, m);
    struct msg_kv_extend_reply *r = &reply->u.kv_extend_reply;
    r->code = e;
    r->lease = extend->lease;
    r->blocks_have = extend->blocks_have;
    r->block_count = given;
    r->blocks = given > 0 ? core->scratch.taken : NULL;
}

void core_commit(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg_kv_commit *commit = &event->u.msg.msg->u.kv_commit;
    enum err e;
    struct km_lease *lease = lease_of(core, event, commit->lease, &e);
    if (!lease)
        return;
    uint64_t tokens =
        ((uint64_t)commit->first_block + commit->hash_count) * core->options.block_tokens;
    uint32_t first = 0, count = 0;
    struct hash128 parent;
    if (tokens > commit->token_count ||
        km_pool_commit(core->pool, lease, commit->first_block, commit->hashes, commit->hash_count,
                       core->scratch.taken, &first, &count, &parent) != ERR_OK) {
        core->stats.refused++;
        snprintf(core->text, sizeof(core->text),
                 "blocks %u + %u of %u tokens, the lease has %u blocks, %u committed",
                 commit->first_block, commit->hash_count, commit->token_count, lease->block_count,
                 lease->committed_count);
        core_trace(core, actions, "commit refused", core->workers[lease->owner].worker_id, 1,
                   core->text);
        return;
    }
    core->stats.commits++;
    core->stats.blocks_committed += count;
    if (count == 0)
        return;
    CHECK(first >= commit->first_block && first + count <= lease->block_count);
    const struct hash128 *hashes = commit->hashes + (first - commit->first_block);
    struct km_action *action = core_act(core, actions, KM_ACTION_BLOCKS);
    action->u.blocks.state = KM_COMMITTED;
    action->u.blocks.count = count;
    action->u.blocks.blocks = core->scratch.taken;
    action->u.blocks.first_position = first;
    action->u.blocks.parent = parent;
    action->u.blocks.hashes = hashes;
    if (lease->sid[0] == '\0')
        return;
    core_act(core, actions, KM_ACTION_SESSION)->u.session = (struct km_session_change){
        .sid = lease->sid,
        .salt = lease->salt,
        .request = lease->request,
        .lease = lease->id,
        .first_block = first,
        .count = count,
        .blocks = core->scratch.taken,
        .hashes = hashes,
        .token_count = commit->token_count,
    };
}

/* Snapshots are counted only: without prefix reuse nothing would ever read one. */
void core_snapshot(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    enum err e;
    if (lease_of(core, event, event->u.msg.msg->u.kv_snapshot.lease, &e))
        core->stats.snapshots++;
    CHECK(actions->count == 0);
}

void core_release(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    enum err e;
    struct km_lease *lease = lease_of(core, event, event->u.msg.msg->u.kv_release.lease, &e);
    if (!lease)
        return;
    uint32_t before = km_core_leases(core);
    core_free_lease(core, actions, lease);
    CHECK(km_core_leases(core) + 1 == before);
    core->stats.releases++;
}

/* Nothing is kept over a restart or a release yet, so the valid prefix is empty. */
void core_adopt(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    bool known = core_worker(core, &event->u.msg.peer) && !epoch_stale(core, m);
    if (known)
        core->stats.adopts++;
    else
        core->stats.stale++;
    struct msg *reply = core_reply(core, actions, &event->u.msg.peer, MSG_KV_ADOPT_REPLY, m);
    reply->u.kv_adopt_reply.code = known ? ERR_OK : ERR_EPOCH;
}

static void ping_reclaim(struct km_core *core, struct km_actions *actions,
                         const struct km_event *event, uint64_t id)
{
    core->stats.stale++;
    struct msg *reclaim = core_reply(core, actions, &event->u.msg.peer, MSG_KV_RECLAIM, NULL);
    reclaim->u.kv_reclaim.lease = id;
}

/* Leases that the worker does not name are freed once they are old enough that the answer to their
 * open must have arrived.  Leases that it names and that are gone are taken from it. */
static void ping_reconcile(struct km_core *core, struct km_actions *actions,
                           const struct km_event *event, struct km_worker *w)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_ping *ping = &m->u.kv_ping;
    uint32_t owner = (uint32_t)(w - core->workers), gone = 0;
    core->ping_serial++;
    for (uint32_t i = 0; i < ping->lease_count; i++) {
        struct km_lease *lease = km_pool_find(core->pool, owner, ping->leases[i]);
        if (lease) {
            lease->named_ping = core->ping_serial;
        } else if (++gone <= KM_RECLAIMS_MAX) {
            ping_reclaim(core, actions, event, ping->leases[i]);
        }
    }
    if (w->lost && gone == 0) {
        w->lost = false;
        core_trace(core, actions, "worker back", w->worker_id, 0, "");
    }
    uint32_t slots = km_pool_counts(core->pool).slots_total, freed = 0;
    for (uint32_t i = 0; i < slots; i++) {
        struct km_lease *lease = km_pool_lease_at(core->pool, i);
        if (!lease || lease->owner != owner || lease->named_ping == core->ping_serial ||
            core->now_us - lease->opened_us <= core->options.unnamed_us_max)
            continue;
        core_free_lease(core, actions, lease);
        freed++;
    }
    core->stats.leases_expired += freed;
    if (freed > 0)
        core_trace(core, actions, "leases not named", w->worker_id, freed, "");
}

void core_ping(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    if (w && w->incarnation == m->u.kv_ping.incarnation) {
        CHECK(core->pool != NULL);
        ping_reconcile(core, actions, event, w);
    } else {
        /* Not attached: nothing that it names is its own any more. */
        uint32_t count = m->u.kv_ping.lease_count;
        for (uint32_t i = 0; i < count && i < KM_RECLAIMS_MAX; i++)
            ping_reclaim(core, actions, event, m->u.kv_ping.leases[i]);
    }
    core_send_state(core, actions, &event->u.msg.peer, m);
}
