/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_core_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "proto/block_hash.h"

bool core_epoch_stale(const struct km_core *core, const struct msg *m)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return m->epoch != core->options.epoch; /* 0, "not attached", is none of ours either */
}

struct km_lease *core_lease_of(struct km_core *core, const struct km_event *event, uint64_t id,
                               enum err *ret_code)
{
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    *ret_code = ERR_EPOCH;
    struct km_lease *lease = NULL;
    if (w && !core_epoch_stale(core, event->u.msg.msg)) {
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

static void send_state(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                       const struct msg *asked, bool with_grants)
{
    const struct km_worker *w = core_worker(core, peer);
    /* Before the answer: a slot's header says WRITING before its worker hears of it. */
    uint32_t granted =
        core->pool && w && !w->lost && with_grants ? core_grants(core, actions, w) : 0;
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
    struct msg_kv_state *state = &reply->u.kv_state;
    if (!core->pool)
        return;
    state->snapshots_total = km_index_snap_count(km_pool_index(core->pool));
    state->snapshots_free = km_index_snaps(km_pool_index(core->pool), KM_SNAP_FREE);
    state->tokens_keepable = km_evict_keepable(core->pool);
    state->granted_count = granted;
    state->granted = core->granted;
}

void core_send_state(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                     const struct msg *asked)
{
    const struct km_worker *w = core_worker(core, peer);
    /* Not to a later process behind the same name: it must attach first. */
    send_state(core, actions, peer, asked,
               w && asked && asked->type == MSG_KV_PING &&
                   asked->u.kv_ping.incarnation == w->incarnation);
}

void core_send_grants(struct km_core *core, struct km_actions *actions, const struct km_peer *peer)
{
    send_state(core, actions, peer, NULL, true);
}

void core_taken(struct km_core *core, struct km_actions *actions, uint32_t count)
{
    CHECK(count <= core->arena.block_count);
    core->taking = true;
    if (count == 0)
        return;
    struct km_action *action = core_act(core, actions, KM_ACTION_BLOCKS);
    action->u.blocks.state = KM_WRITING;
    action->u.blocks.count = count;
    action->u.blocks.blocks = km_pool_scratch(core->pool)->taken;
}

/* Checks that need no pool.  ERR_OK, or the refusal with its text. */
static enum err open_check(struct km_core *core, const struct km_event *event,
                           const struct km_worker *w)
{
    const struct msg_kv_open *open = &event->u.msg.msg->u.kv_open;
    core->text[0] = '\0';
    if (!w || core_epoch_stale(core, event->u.msg.msg)) {
        core->stats.stale++;
        snprintf(core->text, sizeof(core->text),
                 w ? "the epoch is %u now: attach again" : "epoch %u: attach first",
                 core->options.epoch);
        return ERR_EPOCH;
    }
    CHECK(core->pool != NULL);
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

/* The end of the longest resident front of the prompt whose state was kept too, KM_NONE if there is
 * none; *ret_known: the end of what is resident at all.  At least one token and one block are left
 * to the request. */
static uint32_t front_find(const struct km_core *core, const struct msg_kv_open *open,
                           uint32_t *ret_known)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t max = open->reuse_max / core->options.block_tokens;
    uint32_t found = KM_NONE, known = KM_NONE;
    max = max < open->hash_count ? max : open->hash_count;
    max = max < open->blocks_wanted ? max : open->blocks_wanted - 1;
    for (uint32_t i = 0; i < max; i++) {
        uint32_t block = km_index_find(ix, &open->hashes[i]);
        if (block == KM_NONE)
            break;
        const struct km_node *n = km_index_node(ix, block);
        if (n->state != KM_NODE_INDEXED || n->parent != known || n->damaged)
            break;
        known = block;
        if (core_snapshot_good(core, n))
            found = block;
    }
    *ret_known = known;
    return found;
}

static uint32_t tokens_to(const struct km_core *core, uint32_t front)
{
    if (front == KM_NONE)
        return 0;
    uint32_t blocks = km_index_node(km_pool_index(core->pool), front)->position + 1;
    CHECK(blocks <= core->arena.block_count);
    return blocks * core->options.block_tokens;
}

static uint32_t snapshot_of(const struct km_core *core, uint32_t block)
{
    return km_index_node(km_pool_index(core->pool), block)->snapshot;
}

static void open_count(struct km_core *core, const struct msg_kv_open *open, uint32_t front,
                       uint32_t known)
{
    struct km_core_stats *stats = &core->stats;
    uint32_t bt = core->options.block_tokens, got = tokens_to(core, front);
    uint32_t best =
        open->reuse_max / bt < open->hash_count ? open->reuse_max / bt : open->hash_count;
    if (best == 0)
        stats->misses_asked++;
    else if (got / bt == best)
        stats->hits++;
    else if (got > 0)
        stats->hits_part++;
    else if (known != KM_NONE)
        stats->misses_bare++;
    else
        stats->misses_cold++;
}

static void open_answer(struct km_core *core, struct km_actions *actions, const struct km_ask *ask,
                        enum err code, const struct km_lease *lease, uint32_t front)
{
    struct msg asked = {.id = ask->id};
    struct msg *reply = core_reply(core, actions, &ask->peer, MSG_KV_OPEN_REPLY, &asked);
    struct msg_kv_open_reply *r = &reply->u.kv_open_reply;
    r->code = code;
    r->text = core->text;
    r->epoch = core->options.epoch;
    r->snapshot_slot = KM_NONE;
    if (code != ERR_OK)
        return;
    CHECK(lease != NULL && lease->block_count == ask->blocks_wanted);
    r->lease = lease->id;
    r->state_slot = lease->state_slot;
    r->block_count = lease->block_count;
    r->blocks = km_pool_scratch(core->pool)->taken;
    r->reusable_tokens = tokens_to(core, front);
    r->snapshot_slot = lease->restore;
}

static enum err open_lease(struct km_core *core, const struct km_ask *ask, uint32_t front,
                           struct km_lease **ret_lease)
{
    struct km_index *ix = km_pool_index(core->pool);
    uint32_t shared = front == KM_NONE ? 0 : km_index_node(ix, front)->position + 1;
    struct km_snap *snap = NULL;
    CHECK(shared < ask->blocks_wanted);
    if (front != KM_NONE) { /* so that it is not given up to make room */
        snap = km_index_snap(ix, km_index_node(ix, front)->snapshot);
        CHECK(snap != NULL && snap->state == KM_SNAP_KEPT);
        snap->refs++;
        km_index_ref(ix, front);
    }
    struct km_pool_open open = {
        .owner = ask->owner,
        .request = ask->id,
        .blocks_wanted = ask->blocks_wanted,
        .shared_tail = front,
        .sid_hash = ask->sid_hash,
        .salt = ask->salt,
        .now_us = core->now_us,
    };
    enum err e = ERR_KV_FULL;
    if (km_pool_counts(core->pool).slots_free > 0)
        (void)core_make_room(core, ask->blocks_wanted - shared);
    e = km_pool_open(core->pool, &open, km_pool_scratch(core->pool)->taken, ret_lease);
    if (front != KM_NONE)
        km_pool_unref(core->pool, front);
    if (snap && e != ERR_OK)
        snap->refs--;
    else if (snap)
        (*ret_lease)->restore = km_index_node(ix, front)->snapshot;
    return e;
}

void core_open_with(struct km_core *core, struct km_actions *actions, const struct km_ask *ask,
                    uint32_t front)
{
    struct km_lease *lease = NULL;
    if (front != KM_NONE && !core_proven(core, front, snapshot_of(core, front)))
        front = KM_NONE; /* its open did not wait for it */
    enum err e = open_lease(core, ask, front, &lease);
    if (e == ERR_OK) {
        core->stats.opens++;
        core->stats.tokens_reused += tokens_to(core, front);
        lease->named_ping = core->ping_serial;
        memcpy(lease->sid, ask->sid, sizeof(lease->sid));
        core_taken(core, actions, lease->block_count);
        actions->list[actions->count - 1].u.blocks.count -= lease->shared_count;
        actions->list[actions->count - 1].u.blocks.blocks += lease->shared_count;
        core->slot_taken = lease->state_slot;
        struct km_action *slot = core_act(core, actions, KM_ACTION_SLOTS);
        slot->u.slots.state = KM_WRITING;
        slot->u.slots.count = 1;
        slot->u.slots.slots = &core->slot_taken;
    } else {
        struct km_pool_counts c = km_pool_counts(core->pool);
        CHECK(e == ERR_KV_FULL);
        core->stats.opens_full++;
        core->workers[ask->owner].hungry = true;
        snprintf(core->text, sizeof(core->text),
                 "%u blocks wanted, %u of %u free, %u cached, %u slots free", ask->blocks_wanted,
                 c.blocks_free, c.blocks_total, c.blocks_cached, c.slots_free);
    }
    open_answer(core, actions, ask, e, lease, front);
}

void core_open(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_open *open = &m->u.kv_open;
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    struct km_ask ask = {.peer = event->u.msg.peer, .id = m->id};
    enum err e = open_check(core, event, w);
    if (e != ERR_OK) {
        if (e == ERR_EPOCH)
            core_send_state(core, actions, &event->u.msg.peer, NULL);
        open_answer(core, actions, &ask, e, NULL, KM_NONE);
        return;
    }
    ask.owner = (uint32_t)(w - core->workers);
    ask.blocks_wanted = open->blocks_wanted;
    ask.salt = block_hash_salt(&core->options.key, open->cache_salt ? open->cache_salt : "");
    if (open->session_key && open->session_key[0]) {
        block_hash_session(&core->options.key, open->session_key, ask.sid);
        CHECK(hex_decode(ask.sid, 32, &ask.sid_hash));
    }
    struct km_load *load = NULL;
    if (core_load_find(core, ask.owner, &m->id, &load))
        return; /* asked again while its blocks are being read: the answer comes */
    struct km_lease *old = km_pool_find_request(core->pool, ask.owner, &m->id);
    if (old)
        core_free_lease(core, old, KM_RELEASE_LOST);
    uint32_t known = KM_NONE, code = ERR_OK;
    uint32_t front = front_find(core, open, &known);
    /* All that is known of the chain: what is computed anew beyond the front joins it. */
    if (!core_prove(core, known, front == KM_NONE ? KM_NONE : snapshot_of(core, front)))
        code = ERR_LOADING;
    else if (core_load(core, actions, &ask, open, front, &code))
        return;
    if (code != ERR_OK) {
        core->workers[ask.owner].hungry = true;
        snprintf(core->text, sizeof(core->text), "blocks of it are being read");
        open_answer(core, actions, &ask, (enum err)code, NULL, KM_NONE);
        return;
    }
    /* A load that found no room may have given up what the front stood on. */
    front = front_find(core, open, &known);
    uint64_t full = core->stats.opens_full;
    core_open_with(core, actions, &ask, front);
    if (core->stats.opens_full == full)
        open_count(core, open, front, known);
}

static enum err lease_extend(struct km_core *core, struct km_lease *lease, uint32_t wanted,
                             const struct msg_kv_extend *extend)
{
    if (wanted > lease->block_count)
        (void)core_make_room(core, wanted - lease->block_count);
    enum err e = km_pool_extend(core->pool, lease, extend->blocks_have, extend->blocks_wanted,
                                km_pool_scratch(core->pool)->taken);
    if (e == ERR_OK)
        lease->starving_us = 0;
    else if (e == ERR_KV_FULL && lease->starving_us == 0)
        lease->starving_us = core->now_us;
    return e;
}

/* What computing a lease's tokens again would cost, in blocks: those beyond the last one whose
 * state is kept. */
static uint32_t lease_cost(const struct km_core *core, const struct km_lease *lease)
{
    const struct km_index *ix = km_pool_index(core->pool);
    uint32_t block = lease->chain_tail, kept = 0;
    while (block != KM_NONE && kept == 0) {
        const struct km_node *n = km_index_node(ix, block);
        if (n->snapshot != KM_NONE)
            kept = n->position + 1;
        block = n->parent;
    }
    CHECK(kept <= lease->block_count);
    return lease->block_count - kept;
}

/* Blocks are all in use and a running request waits for more: the one that is cheapest to compute
 * again gives way, never the same one twice in a row. */
static void give_way(struct km_core *core, struct km_actions *actions, const struct km_lease *needy)
{
    struct km_lease *victim = NULL;
    uint32_t slots = km_pool_counts(core->pool).slots_total, best = UINT32_MAX;
    if (core->now_us - needy->starving_us < core->options.starving_us_max)
        return;
    for (uint32_t i = 0; i < slots; i++) {
        struct km_lease *lease = km_pool_lease_at(core->pool, i);
        if (!lease || core->workers[lease->owner].lost)
            continue;
        if (lease->reclaimed)
            return; /* one at a time */
        if (lease == needy ||
            memcmp(&lease->request, &core->reclaimed, sizeof(lease->request)) == 0)
            continue;
        uint32_t cost = lease_cost(core, lease);
        if (cost < best) {
            best = cost;
            victim = lease;
        }
    }
    if (!victim)
        return;
    victim->reclaimed = true;
    core->reclaimed = victim->request;
    core->stats.reclaims++;
    const struct km_worker *w = &core->workers[victim->owner];
    CHECK(w->used);
    struct msg *reclaim = core_reply(core, actions, &w->peer, MSG_KV_RECLAIM, NULL);
    reclaim->u.kv_reclaim.lease = victim->id;
    core_trace(core, actions, "request gives way", w->worker_id, 1, "");
}

void core_extend(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_extend *extend = &m->u.kv_extend;
    enum err e;
    struct km_lease *lease = core_lease_of(core, event, extend->lease, &e);
    uint32_t given = 0;
    if (lease) {
        uint32_t before = lease->block_count;
        uint64_t wanted = (uint64_t)extend->blocks_have + extend->blocks_wanted;
        if (wanted > core->arena.block_count || wanted > MSG_BLOCKS_MAX)
            e = ERR_TOO_LARGE;
        else
            e = lease_extend(core, lease, (uint32_t)wanted, extend);
        if (e == ERR_OK) {
            /* New blocks are the tail of what is returned. */
            uint32_t fresh = lease->block_count - before;
            given = extend->blocks_wanted;
            CHECK(fresh <= given);
            core_taken(core, actions, fresh);
            if (fresh > 0)
                actions->list[actions->count - 1].u.blocks.blocks += given - fresh;
            core->stats.extends++;
        } else if (e == ERR_KV_FULL) {
            core->stats.extends_full++;
            core->workers[lease->owner].hungry = true;
            give_way(core, actions, lease);
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
    r->blocks = given > 0 ? km_pool_scratch(core->pool)->taken : NULL;
}

/* Its worker has computed beyond the front: the snapshot it began from was read. */
static void lease_restored(struct km_core *core, struct km_lease *lease)
{
    if (lease->restore == KM_NONE)
        return;
    struct km_snap *snap = km_index_snap(km_pool_index(core->pool), lease->restore);
    CHECK(snap != NULL && snap->refs > 0);
    snap->refs--;
    lease->restore = KM_NONE;
}

void core_session_note(struct km_core *core, struct km_actions *actions,
                       const struct km_lease *lease, uint32_t snapshot_tokens, uint64_t pin_us)
{
    CHECK(lease->id != 0);
    if (lease->sid[0] == '\0' || !lease->mapped)
        return;
    memcpy(core->session_sid, lease->sid, sizeof(core->session_sid));
    core_act(core, actions, KM_ACTION_SESSION)->u.session =
        (struct km_session_change){.sid = core->session_sid,
                                   .lease = lease->id,
                                   .snapshot_tokens = snapshot_tokens,
                                   .pin_us = pin_us};
}

/* Tokens up to the last boundary of a chain whose state is kept. */
static uint32_t kept_tokens(const struct km_core *core, uint32_t tail)
{
    const struct km_index *ix = km_pool_index(core->pool);
    while (tail != KM_NONE && km_index_node(ix, tail)->snapshot == KM_NONE)
        tail = km_index_node(ix, tail)->parent;
    return tokens_to(core, tail);
}

/* The first commit of a lease with a shared front tells its session's map of the front too. */
static void commit_session(struct km_core *core, struct km_actions *actions, struct km_lease *lease,
                           const struct km_committed *done, const uint32_t *blocks,
                           const struct hash128 *hashes, const struct hash128 *parent,
                           uint32_t token_count)
{
    struct km_session_change change = {
        .sid = lease->sid,
        .salt = lease->salt,
        .request = lease->request,
        .lease = lease->id,
        .first_block = done->first,
        .count = done->count,
        .parent = *parent,
        .blocks = blocks,
        .hashes = hashes,
        .token_count = token_count,
        .snapshot_tokens = kept_tokens(core, lease->chain_tail),
    };
    uint32_t total = done->first + done->count;
    if (!lease->mapped && done->first > 0) {
        const struct km_index *ix = km_pool_index(core->pool);
        uint32_t block = lease->chain_tail;
        for (uint32_t i = total; i > 0; i--) {
            const struct km_node *n = km_index_node(ix, block);
            CHECK(n->position == i - 1);
            if (i <= KM_SESSION_BLOCKS_MAX) {
                core->hashes[i - 1] = n->hash;
                core->front_blocks[i - 1] = block;
            }
            block = n->parent;
        }
        change.first_block = 0;
        change.count = total < KM_SESSION_BLOCKS_MAX ? total : KM_SESSION_BLOCKS_MAX;
        change.blocks = core->front_blocks;
        change.hashes = core->hashes;
    }
    lease->mapped = true;
    core_act(core, actions, KM_ACTION_SESSION)->u.session = change;
}

void core_commit(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    const struct msg_kv_commit *commit = &event->u.msg.msg->u.kv_commit;
    enum err e;
    struct km_lease *lease = core_lease_of(core, event, commit->lease, &e);
    if (!lease)
        return;
    uint64_t tokens =
        ((uint64_t)commit->first_block + commit->hash_count) * core->options.block_tokens;
    struct km_committed done;
    uint32_t *blocks = km_pool_scratch(core->pool)->taken, before = lease->committed_count;
    struct hash128 chain = lease->chain; /* before what is new */
    if (tokens > commit->token_count ||
        km_pool_commit(core->pool, lease, commit->first_block, commit->hashes, commit->hash_count,
                       blocks, &done) != ERR_OK) {
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
    core->stats.blocks_committed += lease->committed_count - before;
    core->stats.duplicates += done.fresh;
    if (lease->committed_count > before)
        lease_restored(core, lease);
    if (done.count == 0)
        return;
    CHECK(done.first >= commit->first_block && done.first + done.count <= lease->block_count);
    const struct hash128 *hashes = commit->hashes + done.skip;
    if (done.fresh < done.count) {
        struct km_action *action = core_act(core, actions, KM_ACTION_BLOCKS);
        action->u.blocks.state = KM_COMMITTED;
        action->u.blocks.count = done.count - done.fresh;
        action->u.blocks.blocks = blocks + done.fresh;
        action->u.blocks.first_position = done.first + done.fresh;
        action->u.blocks.parent = done.parent;
        action->u.blocks.hashes = hashes + done.fresh;
    }
    if (lease->sid[0] != '\0')
        commit_session(core, actions, lease, &done, blocks, hashes, &chain, commit->token_count);
}

void core_release(struct km_core *core, struct km_actions *actions, const struct km_event *event)
{
    enum err e;
    const struct msg_kv_release *release = &event->u.msg.msg->u.kv_release;
    struct km_lease *lease = core_lease_of(core, event, release->lease, &e);
    if (!lease)
        return;
    uint32_t before = km_core_leases(core);
    if (release->keep)
        core_session_note(core, actions, lease, kept_tokens(core, lease->chain_tail),
                          core->options.pin_us);
    core_free_lease(core, lease, release->keep ? KM_RELEASE_KEEP : KM_RELEASE_DROP);
    CHECK(km_core_leases(core) + 1 == before);
    core->stats.releases++;
    core_tell_hungry(core, actions);
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
    uint32_t slots = km_pool_counts(core->pool).slots_total, freed = 0;
    for (uint32_t i = 0; i < slots; i++) {
        struct km_lease *lease = km_pool_lease_at(core->pool, i);
        if (!lease || lease->owner != owner || lease->named_ping == core->ping_serial ||
            core->now_us - lease->opened_us <= core->options.unnamed_us_max)
            continue;
        core_free_lease(core, lease, KM_RELEASE_LOST);
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
