/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_core.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kvmgr/km_core_state.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"

#define SILENCE_US 5000000u
#define UNNAMED_US 2000000u

#define STARVING_US   1000000u
#define LOAD_US       4000000u
#define WRITE_WAIT_US 500000u
#define SESSIONS_MAX  4096u
#define TENANTS_MAX   1024u
#define TIER_OBJECTS  (1u << 20)

STATIC_CHECK(KM_SEQS_MAX + 1024 < 65536); /* live slots, and so leases */
/* Worst step: a ping that frees and is answered, with every reclaim and a trace beside it; or
 * results of the tier that end every waiting open (an answer, headers, a state each). */
STATIC_CHECK(KM_RECLAIMS_MAX + KM_WORKERS_MAX + 12 <= KM_ACTIONS_MAX);

struct km_core *km_core_create(const struct km_core_options *options)
{
    CHECK(options->epoch > 0);
    CHECK(options->block_tokens > 0);
    struct km_core *core = mem_take(sizeof(*core));
    core->magic = KM_CORE_MAGIC;
    core->options = *options;
    if (core->options.silence_us_max == 0)
        core->options.silence_us_max = SILENCE_US;
    if (core->options.unnamed_us_max == 0)
        core->options.unnamed_us_max = UNNAMED_US;
    if (core->options.starving_us_max == 0)
        core->options.starving_us_max = STARVING_US;
    if (core->options.load_us_max == 0)
        core->options.load_us_max = LOAD_US;
    if (core->options.write_wait_us_max == 0)
        core->options.write_wait_us_max = WRITE_WAIT_US;
    if (core->options.sessions_max == 0)
        core->options.sessions_max = SESSIONS_MAX;
    if (core->options.tier_objects_max == 0)
        core->options.tier_objects_max = TIER_OBJECTS;
    CHECK(core->options.session_percent <= 100 && core->options.tenant_percent <= 100);
    CHECK(core->options.pin_percent <= 100);
    if (core->options.tier_bytes_max > 0)
        CHECK(km_tier_create(core->options.tier_objects_max, core->options.tier_bytes_max,
                             &core->tier) == ERR_OK);
    return core;
}

void km_core_destroy(struct km_core **core_p)
{
    struct km_core *core = *core_p;
    if (!core)
        return;
    CHECK_OBJ(core, KM_CORE_MAGIC);
    km_pool_destroy(&core->pool);
    km_tier_destroy(&core->tier);
    core->magic = 0;
    mem_give(core);
    *core_p = NULL;
}

struct km_action *core_act(struct km_core *core, struct km_actions *actions,
                           enum km_action_type type)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    CHECK(actions->count < KM_ACTIONS_MAX);
    struct km_action *action = &actions->list[actions->count++];
    memset(action, 0, sizeof(*action));
    action->type = type;
    return action;
}

struct msg *core_reply(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                       enum msg_type type, const struct msg *asked)
{
    struct km_action *action = core_act(core, actions, KM_ACTION_SEND);
    action->u.send.peer = *peer;
    action->u.send.msg.type = type;
    action->u.send.msg.epoch = core->options.epoch;
    if (asked)
        action->u.send.msg.id = asked->id;
    return &action->u.send.msg;
}

void core_trace(struct km_core *core, struct km_actions *actions, const char *what,
                uint32_t worker_id, uint32_t leases, const char *text)
{
    struct km_action *action = core_act(core, actions, KM_ACTION_TRACE);
    action->u.trace.what = what;
    action->u.trace.worker_id = worker_id;
    action->u.trace.leases = leases;
    action->u.trace.text = text;
}

/* What a step frees is collected by the pool and goes into the first two actions of the step:
 * before anything is taken, since a block may be freed and taken again in one step. */
void core_free_lease(struct km_core *core, struct km_lease *lease, enum km_release how)
{
    CHECK(core->pool != NULL);
    CHECK(!core->taking);
    km_pool_release(core->pool, lease, how);
}

static void frees_begin(struct km_core *core, struct km_actions *actions)
{
    CHECK(actions->count == 0);
    core->frees_blocks = core_act(core, actions, KM_ACTION_BLOCKS);
    core->frees_blocks->u.blocks.state = KM_FREE;
    core->frees_slots = core_act(core, actions, KM_ACTION_SLOTS);
    core->frees_slots->u.slots.state = KM_FREE;
}

static void frees_end(struct km_core *core)
{
    if (!core->pool)
        return;
    struct km_pool_scratch *scratch = km_pool_scratch(core->pool);
    CHECK(scratch->freed_count <= core->arena.block_count);
    core->frees_blocks->u.blocks.count = scratch->freed_count;
    core->frees_blocks->u.blocks.blocks = scratch->freed;
    core->frees_slots->u.slots.count = scratch->slots_count;
    core->frees_slots->u.slots.slots = scratch->slots;
    scratch->freed_count = scratch->slots_count = 0;
}

struct km_worker *core_worker(struct km_core *core, const struct km_peer *peer)
{
    CHECK(peer->count <= KM_PEER_BYTES_MAX);
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        struct km_worker *w = &core->workers[i];
        if (w->used && !w->replaced && w->peer.count == peer->count &&
            memcmp(w->peer.bytes, peer->bytes, peer->count) == 0)
            return w;
    }
    return NULL;
}

/* How many leases a worker holds; with `end` they are ended. */
static uint32_t worker_leases(struct km_core *core, const struct km_worker *w, bool end)
{
    uint32_t owner = (uint32_t)(w - core->workers), count = 0;
    CHECK(owner < KM_WORKERS_MAX);
    if (!core->pool)
        return 0;
    uint32_t slots = km_pool_counts(core->pool).slots_total;
    for (uint32_t i = 0; i < slots; i++) {
        struct km_lease *lease = km_pool_lease_at(core->pool, i);
        if (!lease || lease->owner != owner)
            continue;
        count++;
        if (end)
            core_free_lease(core, lease, KM_RELEASE_LOST);
    }
    core->stats.leases_expired += end ? count : 0;
    return count;
}

static uint32_t core_forget_worker(struct km_core *core, struct km_worker *w)
{
    CHECK(w->used && core->stats.workers >= (w->replaced ? 0u : 1u));
    uint32_t freed = worker_leases(core, w, true);
    core_grants_revoke(core, w);
    core->stats.workers -= w->replaced ? 0 : 1;
    *w = (struct km_worker){0};
    return freed;
}

uint32_t km_core_suspects(const struct km_core *core, const struct km_peer *asker,
                          uint64_t incarnation, uint64_t ret[KM_WORKERS_MAX])
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    uint32_t count = 0;
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        const struct km_worker *w = &core->workers[i];
        bool named = asker && w->peer.count == asker->count &&
                     memcmp(w->peer.bytes, asker->bytes, asker->count) == 0;
        if (w->used && (w->lost || named) && !(asker && w->incarnation == incarnation))
            ret[count++] = w->incarnation;
    }
    return count;
}

static void core_gone(struct km_core *core, struct km_actions *actions, uint64_t incarnation)
{
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        struct km_worker *w = &core->workers[i];
        if (!w->used || w->incarnation != incarnation)
            continue;
        uint32_t worker_id = w->worker_id;
        core_trace(core, actions, "worker gone", worker_id, core_forget_worker(core, w), "");
    }
    if (!core->pool)
        return;
    core_tell_hungry(core, actions);
    core_grants_offer(core, actions);
}

/* Puts what differs into the text; false if an arena of the first serves the second. */
static bool geometry_differs(const struct km_arena_wanted *have, const struct km_arena_wanted *want,
                             char *text, size_t text_bytes)
{
    const struct {
        const char *name;
        uint64_t have, want;
    } fields[] = {
        {"dsa_layers", have->dsa_layers, want->dsa_layers},
        {"latent_dim", have->latent_dim, want->latent_dim},
        {"index_dim", have->index_dim, want->index_dim},
        {"index_kpool", have->index_kpool, want->index_kpool},
        {"state_bytes", have->state_bytes, want->state_bytes},
        {"rank", have->rank, want->rank},
        {"ranks", have->ranks, want->ranks},
        {"interleave", have->interleave, want->interleave},
    };
    for (uint32_t i = 0; i < ARRAY_COUNT(fields); i++) {
        if (fields[i].have != fields[i].want) {
            snprintf(text, text_bytes, "%s is %" PRIu64 " in the arena, %" PRIu64 " wanted",
                     fields[i].name, fields[i].have, fields[i].want);
            return true;
        }
    }
    if (memcmp(&have->model_fp, &want->model_fp, sizeof(have->model_fp)) != 0) {
        snprintf(text, text_bytes, "model_fp differs");
        return true;
    }
    return false;
}

static void attach_refuse(struct km_core *core, struct km_actions *actions,
                          const struct km_peer *peer, const struct msg *asked, enum err code)
{
    CHECK(code != ERR_OK);
    core->stats.attaches_refused++;
    struct msg *reply = core_reply(core, actions, peer, MSG_KV_ATTACH_REPLY, asked);
    struct msg_kv_attach_reply *r = &reply->u.kv_attach_reply;
    r->code = code;
    r->text = core->text;
    r->arena_path = "";
    r->incarnation = core->options.incarnation;
    r->epoch = core->options.epoch;
    r->block_tokens = core->options.block_tokens;
    r->kv_dtype = core->options.kv_dtype;
    r->index_dtype = core->options.index_dtype;
    r->snapshot_dtype = core->options.snapshot_dtype;
    core_trace(core, actions, "attach refused", 0, 0, core->text);
}

/* A free entry, counted as used; NULL: there is none. */
static struct km_worker *worker_entry(struct km_core *core)
{
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        if (core->workers[i].used)
            continue;
        core->stats.workers++;
        return &core->workers[i];
    }
    return NULL;
}

/* Another process has its name: what it may still write to stays its own until it is gone. */
static void worker_replaced(struct km_core *core, struct km_worker *w)
{
    CHECK(w->used && !w->replaced && core->stats.workers > 0);
    w->lost = w->replaced = true;
    core->stats.workers--;
}

/* The arena fits: registers the worker and answers. */
static void attach_accept(struct km_core *core, struct km_actions *actions,
                          const struct km_peer *peer, const struct msg_kv_attach *attach,
                          const struct msg *asked)
{
    CHECK(core->pool != NULL);
    struct km_worker *w = core_worker(core, peer);
    bool fresh = !w || w->incarnation != attach->incarnation;
    if (w && fresh)
        worker_replaced(core, w);
    if (fresh)
        w = worker_entry(core);
    if (!w) {
        snprintf(core->text, sizeof(core->text), "%u workers are attached, no more fit",
                 KM_WORKERS_MAX);
        attach_refuse(core, actions, peer, asked, ERR_BUSY);
        return;
    }
    *w = (struct km_worker){.used = true,
                            .peer = *peer,
                            .worker_id = attach->worker_id,
                            .incarnation = attach->incarnation,
                            .heard_us = core->now_us};
    core->stats.attaches++;
    uint32_t granted = core_grants(core, actions, w);
    struct msg *reply = core_reply(core, actions, peer, MSG_KV_ATTACH_REPLY, asked);
    reply->u.kv_attach_reply = (struct msg_kv_attach_reply){
        .code = ERR_OK,
        .text = "",
        .arena_path = core->arena_path,
        .incarnation = core->options.incarnation,
        .epoch = core->options.epoch,
        .arena_bytes = core->arena.arena_bytes,
        .layout_fp = core->arena.layout_fp,
        .block_tokens = core->options.block_tokens,
        .block_count = core->arena.block_count,
        .slot_count = core->arena.slot_count,
        .kv_dtype = core->options.kv_dtype,
        .index_dtype = core->options.index_dtype,
        .snapshot_dtype = core->options.snapshot_dtype,
        .live_slots = core->live_slots,
        .snapshot_every = core->options.snapshot_every,
        .granted_count = granted,
        .granted = core->granted,
    };
    if (fresh)
        core_trace(core, actions, "worker attached", attach->worker_id, 0, "");
}

static const struct km_worker *other_worker(const struct km_core *core, const struct km_worker *w)
{
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        if (core->workers[i].used && !core->workers[i].lost && &core->workers[i] != w)
            return &core->workers[i];
    }
    return NULL;
}

/* Whoever is not heard, but may still write to the arena's file. */
static const struct km_worker *silent_worker(const struct km_core *core,
                                             const struct km_worker *asker, uint64_t incarnation)
{
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        const struct km_worker *w = &core->workers[i];
        if (w->used && w->incarnation != incarnation && (w->lost || w == asker))
            return w;
    }
    return NULL;
}

static void core_attach(struct km_core *core, struct km_actions *actions,
                        const struct km_event *event)
{
    const struct msg *m = event->u.msg.msg;
    const struct msg_kv_attach *attach = &m->u.kv_attach;
    const struct km_peer *peer = &event->u.msg.peer;
    if (attach->seqs_max == 0 || attach->seqs_max > KM_SEQS_MAX) {
        snprintf(core->text, sizeof(core->text), "seqs_max: %u is not in 1..%u", attach->seqs_max,
                 KM_SEQS_MAX);
        attach_refuse(core, actions, peer, m, ERR_INVALID);
        return;
    }
    if (attach->rank != 0 || attach->block_count != 0) { /* the others have its block ids */
        snprintf(core->text, sizeof(core->text),
                 "rank %u of %u: only rank 0 leases blocks; the others need a kvmgr of role arena",
                 attach->rank, attach->ranks);
        attach_refuse(core, actions, peer, m, ERR_UNSUPPORTED);
        return;
    }
    if (attach->rows_ranks > 1 && core->tier != NULL) {
        snprintf(core->text, sizeof(core->text),
                 "kv_store_dir: the tier would keep rank 0's rows only; leave it empty with "
                 "ranks %u",
                 attach->rows_ranks);
        attach_refuse(core, actions, peer, m, ERR_UNSUPPORTED);
        return;
    }
    struct km_arena_wanted want = {
        .dsa_layers = attach->dsa_layers,
        .latent_dim = attach->latent_dim,
        .index_dim = attach->index_dim,
        .index_kpool = attach->index_kpool,
        .rank = attach->rank,
        .ranks = attach->ranks,
        .interleave = attach->interleave,
        .state_bytes = attach->state_bytes,
        .model_fp = attach->model_fp,
        .slot_count = attach->seqs_max + core->options.slots_spare,
        .worker = attach->incarnation,
    };
    struct km_worker *w = core_worker(core, peer);
    const struct km_worker *other = other_worker(core, w);
    char difference[128];
    if (core->pool) {
        bool differs = geometry_differs(&core->geometry, &want, difference, sizeof(difference));
        if (differs && other) {
            snprintf(core->text, sizeof(core->text),
                     "worker-%u uses the arena and this one differs: %s", other->worker_id,
                     difference);
            attach_refuse(core, actions, peer, m, ERR_INVALID);
            return;
        }
        if (!differs && (other || want.slot_count <= core->live_slots)) {
            attach_accept(core, actions, peer, attach, m);
            return;
        }
        const struct km_worker *silent = silent_worker(core, w, attach->incarnation);
        if (!differs && silent) { /* the same file would be taken anew */
            snprintf(core->text, sizeof(core->text),
                     "worker-%u is silent and has the arena: no more slots before it is gone",
                     silent->worker_id);
            attach_refuse(core, actions, peer, m, ERR_BUSY);
            return;
        }
    }
    /* Whoever else is known is lost: it must attach to the new arena. */
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        if (core->workers[i].used)
            (void)core_forget_worker(core, &core->workers[i]);
    }
    core->geometry = want;
    core->pending = true;
    core->pending_peer = *peer;
    core->pending_attach = *attach;
    core_act(core, actions, KM_ACTION_ARENA_OPEN)->u.arena = want;
}

static enum err core_pool_create(struct km_core *core, const struct km_arena_result *result)
{
    const struct km_core_options *o = &core->options;
    CHECK(result->live_count >= core->geometry.slot_count);
    CHECK(result->slot_count >= result->live_count);
    core->live_slots = result->live_count;
    struct km_pool_options options = {
        .block_count = result->block_count,
        .slot_count = core->live_slots,
        .epoch = o->epoch,
        .snapshot_count = result->slot_count - core->live_slots,
        .block_tokens = o->block_tokens,
        .sessions_max = o->sessions_max,
        .tenants_max = TENANTS_MAX,
        .session_blocks_max = (uint32_t)((uint64_t)result->block_count * o->session_percent / 100),
        .tenant_blocks_max = (uint32_t)((uint64_t)result->block_count * o->tenant_percent / 100),
        .held_blocks_max = (uint32_t)((uint64_t)result->block_count * o->pin_percent / 100),
        .pin_us = o->pin_us,
    };
    enum err e = km_pool_create(&options, &core->pool);
    if (e == ERR_OK) {
        km_pool_now(core->pool, core->now_us);
        km_pool_keep_bare(core->pool, core->tier != NULL);
    }
    return e;
}

static void core_arena(struct km_core *core, struct km_actions *actions,
                       const struct km_event *event)
{
    const struct km_arena_result *result = &event->u.arena;
    CHECK(core->pending);
    CHECK(core->pool == NULL || km_core_leases(core) == 0);
    core->pending = false;
    core_tier_reset(core);
    core_proof_reset(core);
    km_pool_destroy(&core->pool);
    core->arena = (struct km_arena_result){0};
    enum err e = result->code;
    if (e == ERR_OK) {
        e = core_pool_create(core, result);
        if (e != ERR_OK)
            snprintf(core->text, sizeof(core->text), "no memory for the index of %u blocks",
                     result->block_count);
    } else {
        snprintf(core->text, sizeof(core->text), "%s", result->text);
        core->text[utf8_valid_prefix(core->text, strlen(core->text))] = '\0';
    }
    if (e != ERR_OK) {
        attach_refuse(core, actions, &core->pending_peer, NULL, e);
        return;
    }
    core->arena = *result;
    snprintf(core->arena_path, sizeof(core->arena_path), "%s", result->path);
    core->arena.path = core->arena_path;
    core->arena.text = "";
    core->arena.found = NULL;
    core->arena.found_snapshots = NULL;
    core_recover(core, result);
    attach_accept(core, actions, &core->pending_peer, &core->pending_attach, NULL);
}

static void core_tick(struct km_core *core, struct km_actions *actions, bool stood_still)
{
    /* While we stood still nobody could be heard: silence is counted anew. */
    for (uint32_t i = 0; stood_still && i < KM_WORKERS_MAX; i++)
        core->workers[i].heard_us = core->now_us;
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++) {
        struct km_worker *w = &core->workers[i];
        if (!w->used || w->lost || core->now_us - w->heard_us < core->options.silence_us_max)
            continue;
        w->lost = true;
        core->stats.workers_lost++;
        core_trace(core, actions, "worker silent", w->worker_id, worker_leases(core, w, false), "");
    }
    if (!core->pool)
        return;
    core_cache_tick(core, actions);
    core_tier_tick(core, actions);
    core_proof_tick(core, actions);
}

/* Not a later process behind the same name, which has to attach first. */
static bool is_itself(const struct km_core *core, const struct km_worker *w, const struct msg *m)
{
    if (m->type == MSG_KV_ATTACH)
        return m->u.kv_attach.incarnation == w->incarnation;
    if (m->type == MSG_KV_PING)
        return m->u.kv_ping.incarnation == w->incarnation;
    return !core_epoch_stale(core, m);
}

static void core_message(struct km_core *core, struct km_actions *actions,
                         const struct km_event *event)
{
    struct km_worker *w = core_worker(core, &event->u.msg.peer);
    if (w && is_itself(core, w, event->u.msg.msg)) {
        w->heard_us = core->now_us;
        if (w->lost)
            core_trace(core, actions, "worker back", w->worker_id, worker_leases(core, w, false),
                       "");
        w->lost = false;
    }
    switch (event->u.msg.msg->type) {
    case MSG_KV_ATTACH:
        core_attach(core, actions, event);
        break;
    case MSG_KV_OPEN:
        core_open(core, actions, event);
        break;
    case MSG_KV_EXTEND:
        core_extend(core, actions, event);
        break;
    case MSG_KV_COMMIT:
        core_commit(core, actions, event);
        break;
    case MSG_KV_SNAPSHOT:
        core_snapshot(core, actions, event);
        break;
    case MSG_KV_RELEASE:
        core_release(core, actions, event);
        break;
    case MSG_KV_ADOPT:
        core_adopt(core, actions, event);
        break;
    case MSG_KV_PING:
        core_ping(core, actions, event);
        break;
    default:
        core->stats.refused++;
        break;
    }
}

void km_core_step(struct km_core *core, const struct km_event *event,
                  struct km_actions *ret_actions)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    CHECK(event->now_us >= core->now_us);
    CHECK(core->pending == (event->type == KM_EVENT_ARENA));
    core->now_us = event->now_us;
    ret_actions->count = 0;
    core->taking = false;
    core->store_count = core->proof_count = core->moved_count = 0;
    frees_begin(core, ret_actions);
    if (core->pool)
        km_pool_now(core->pool, core->now_us);
    switch (event->type) {
    case KM_EVENT_MSG:
        core_message(core, ret_actions, event);
        break;
    case KM_EVENT_TICK:
        core_tick(core, ret_actions, event->u.stood_still);
        break;
    case KM_EVENT_ARENA:
        core_arena(core, ret_actions, event);
        break;
    case KM_EVENT_STORE_STATE:
        core_store_state(core, ret_actions, event);
        break;
    case KM_EVENT_STORE_DONE:
        core_store_done(core, ret_actions, event);
        break;
    case KM_EVENT_STORE_OBJECTS:
        core_store_objects(core, event);
        break;
    case KM_EVENT_PROVED:
        core_proved(core, ret_actions, event);
        break;
    case KM_EVENT_SUSPECT:
        core_suspect(core, event->u.suspect);
        break;
    case KM_EVENT_WORKER_GONE:
        core_gone(core, ret_actions, event->u.gone);
        break;
    case KM_EVENT_FLUSH:
        core_flush(core, event->u.flush_begins);
        break;
    }
    frees_end(core);
    if (core->store_count > 0) {
        struct km_action *action = core_act(core, ret_actions, KM_ACTION_STORE);
        action->u.store.count = core->store_count;
        action->u.store.items = core->store_items;
    }
    if (core->moved_count > 0) {
        struct km_action *action = core_act(core, ret_actions, KM_ACTION_MOVED);
        action->u.moved.count = core->moved_count;
        action->u.moved.items = core->moved;
    }
    if (core->proof_count > 0) {
        struct km_action *action = core_act(core, ret_actions, KM_ACTION_PROVE);
        action->u.prove.count = core->proof_count;
        action->u.prove.items = core->proof_items;
    }
}

const struct km_core_stats *km_core_stats(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return &core->stats;
}

struct km_pool_counts km_core_counts(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return core->pool ? km_pool_counts(core->pool) : (struct km_pool_counts){0};
}

uint32_t km_core_indexed(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return core->pool ? km_index_count(km_pool_index(core->pool)) : 0;
}

uint32_t km_core_leases(const struct km_core *core)
{
    struct km_pool_counts counts = km_core_counts(core);
    return counts.slots_total - counts.slots_free;
}

struct km_pool *km_core_pool(struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return core->pool;
}

struct km_core_cache km_core_cache(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    struct km_core_cache c = {.tier_on = core->tier_on, .writes_waiting = core->store_inflight};
    for (uint32_t i = 0; i < KM_LOADS_MAX; i++)
        c.loads_waiting += core->loads[i].used;
    if (core->tier) {
        c.tier_bytes = km_tier_bytes(core->tier);
        c.tier_blocks = km_tier_count(core->tier, KM_OBJECT_BLOCK);
        c.tier_snapshots = km_tier_count(core->tier, KM_OBJECT_SNAPSHOT);
    }
    if (!core->pool)
        return c;
    const struct km_index *ix = km_pool_index(core->pool);
    c.snapshots_free = km_index_snaps(ix, KM_SNAP_FREE);
    c.snapshots_kept = km_index_snaps(ix, KM_SNAP_KEPT);
    c.snapshots_total = km_index_snap_count(ix);
    c.sessions = km_sessions_count(km_pool_sessions(core->pool));
    c.tokens_keepable = km_evict_keepable(core->pool);
    return c;
}

bool km_core_more(const struct km_core *core)
{
    CHECK_OBJ(core, KM_CORE_MAGIC);
    return core->more;
}
