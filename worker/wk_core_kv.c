/* SPDX-License-Identifier: Apache-2.0 */
/* The core's side of kvmgr: opens, extends, commits, releases, and what to do when blocks lack. */
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "worker/wk_core_state.h"

#define KV_SILENCE_US   2500000u
#define KV_RETRY_US     100000u  /* between two tries for blocks that lacked */
#define KV_RETRIES      4u       /* opens tried again at a time */
#define KV_PATIENCE_US  1000000u /* then younger requests no longer pass a refused one */
#define KV_ASK_AGAIN_US 5000000u /* a reply this late is taken for lost */
#define KV_AHEAD_TOKENS 16u      /* extends are asked for this early */

bool wk_core_kv_silent(const struct wk_core *core)
{
    return core->now_us > core->kv_seen_us + KV_SILENCE_US;
}

/* Tokens that seq can want room for soon. */
static uint32_t tokens_wanted(const struct wk_core *core, const struct wk_seq *seq)
{
    uint32_t length = wk_core_length(core, seq), outputs = wk_core_outputs(core, seq);
    uint32_t left = seq->limits.output_tokens_max - outputs;
    uint32_t ahead = left < KV_AHEAD_TOKENS ? left : KV_AHEAD_TOKENS;
    uint32_t room = core->context_max - length;
    return length + (ahead < room ? ahead : room);
}

/* Chain hashes of the first `count` blocks, which are full.  False: no room for it now. */
static bool hashes_reach(struct wk_core *core, struct wk_seq *seq, uint32_t count)
{
    struct wk_blocks *b = &seq->kv;
    uint32_t block_tokens = core->shape.block_tokens, entry = wk_core_entry(core, seq);
    CHECK(count <= b->count_max);
    if (count <= b->hash_count)
        return true;
    uint32_t *ids = arena_alloc_array(core->actions->arena, block_tokens, sizeof *ids);
    if (ids == NULL)
        return false;
    static const struct hash128 origin;
    for (uint32_t i = b->hash_count; i < count; i++) {
        wk_ids_copy(core->ids, entry, i * block_tokens, block_tokens, ids);
        b->hashes[i] = block_hash_next(&core->options.key, i > 0 ? &b->hashes[i - 1] : &origin,
                                       &seq->salt, ids, block_tokens);
    }
    b->hash_count = count;
    return true;
}

/* For a message: the place may be another sequence's before it is encoded. */
static const struct hash128 *hashes_copy(struct wk_core *core, const struct wk_seq *seq,
                                         uint32_t first, uint32_t count)
{
    CHECK(first + count <= seq->kv.hash_count);
    return arena_copy(core->actions->arena, seq->kv.hashes + first, count * sizeof *seq->kv.hashes);
}

static void open_send(struct wk_core *core, struct wk_seq *seq)
{
    CHECK(seq->state == WK_SEQ_WAITING && seq->kv.state != WK_KV_HELD);
    uint32_t length = wk_core_length(core, seq);
    uint32_t count = length / core->shape.block_tokens;
    const struct hash128 *hashes = NULL;
    if (count > MSG_BLOCKS_MAX)
        count = MSG_BLOCKS_MAX;
    if (count > 0 && hashes_reach(core, seq, count))
        hashes = hashes_copy(core, seq, 0, count);
    if (hashes == NULL)
        count = 0; /* hashes only help reuse */
    /* At least one token is computed; the canary proves the model, not the cache. */
    seq->kv.asked_max = seq->canary ? 0 : length - 1;
    struct msg *m = wk_core_send(core, WK_ACT_KVMGR, MSG_KV_OPEN, &seq->id);
    char *session = arena_strndup(core->actions->arena, seq->session_key, strlen(seq->session_key));
    char *salt = arena_strndup(core->actions->arena, seq->cache_salt, strlen(seq->cache_salt));
    CHECK(session != NULL && salt != NULL);
    m->u.kv_open = (struct msg_kv_open){
        .session_key = session,
        .cache_salt = salt,
        .prompt_count = seq->prompt_count,
        .blocks_wanted = wk_blocks_for(&core->shape, tokens_wanted(core, seq)),
        .hash_count = count,
        .hashes = hashes,
        .reuse_max = seq->kv.asked_max,
    };
    seq->kv.state = WK_KV_OPENING;
    seq->kv.asked_us = core->now_us;
}

static void extend_send(struct wk_core *core, struct wk_seq *seq)
{
    CHECK(seq->kv.state == WK_KV_HELD);
    uint32_t blocks = wk_blocks_for(&core->shape, tokens_wanted(core, seq));
    CHECK(blocks > seq->kv.count);
    struct msg *m = wk_core_send(core, WK_ACT_KVMGR, MSG_KV_EXTEND, &seq->id);
    m->u.kv_extend = (struct msg_kv_extend){
        .lease = seq->kv.lease,
        .blocks_have = seq->kv.count,
        .blocks_wanted = blocks - seq->kv.count,
    };
    seq->kv.extend = WK_EXTEND_ASKED;
    seq->kv.asked_us = core->now_us;
}

static void release_send(struct wk_core *core, const struct msg_id *id, uint64_t lease,
                         uint32_t token_count, bool keep)
{
    struct msg *m = wk_core_send(core, WK_ACT_KVMGR, MSG_KV_RELEASE, id);
    m->u.kv_release =
        (struct msg_kv_release){.lease = lease, .token_count = token_count, .keep = keep};
}

void wk_core_kv_release(struct wk_core *core, struct wk_seq *seq, bool keep)
{
    if (seq->kv.state == WK_KV_HELD && core->kv_attached) {
        release_send(core, &seq->id, seq->kv.lease, seq->computed, keep);
        core->kv_retry_us = core->now_us; /* others may have its blocks */
    }
    wk_blocks_reset(&seq->kv);
}

void wk_core_kv_commit(struct wk_core *core, struct wk_seq *seq)
{
    uint32_t block_tokens = core->shape.block_tokens;
    uint32_t full = seq->computed / block_tokens;
    if (seq->kv.state != WK_KV_HELD || full <= seq->kv.committed)
        return;
    CHECK(full <= seq->kv.count);
    uint32_t count = full - seq->kv.committed;
    if (!hashes_reach(core, seq, full))
        return; /* the next commit takes these blocks along */
    uint32_t first = seq->kv.committed;
    const struct hash128 *hashes = hashes_copy(core, seq, first, count);
    const uint32_t *blocks =
        arena_copy(core->actions->arena, seq->kv.ids + first, count * sizeof *seq->kv.ids);
    if (hashes == NULL || blocks == NULL)
        return;
    struct msg *m = wk_core_send(core, WK_ACT_KVMGR, MSG_KV_COMMIT, &seq->id);
    m->u.kv_commit = (struct msg_kv_commit){
        .lease = seq->kv.lease,
        .first_block = first,
        .token_count = seq->computed,
        .hash_count = count,
        .hashes = hashes,
    };
    struct wk_action *action = &core->actions->items[core->actions->count - 1];
    action->blocks = blocks;
    if (first > 0)
        action->parent = seq->kv.hashes[first - 1];
    seq->kv.committed = full;
}

void wk_core_replan(struct wk_core *core, struct wk_seq *seq, bool release)
{
    CHECK(seq->state != WK_SEQ_FREE && seq->state != WK_SEQ_ZOMBIE);
    if (seq->in_flight || seq->in_batch) {
        seq->replan = true;
        seq->replan_release = release;
        return;
    }
    if (release)
        wk_core_kv_release(core, seq, true);
    else
        wk_blocks_reset(&seq->kv);
    seq->state = WK_SEQ_WAITING;
    seq->computed = 0;
    seq->replay = 0;
    seq->final_count = 0;
    seq->served_us = 0;
    seq->draft.state = WK_DRAFT_NONE;
}

void wk_core_kv_attached(struct wk_core *core, const struct wk_event *event)
{
    CHECK(wk_core_quiet(core));
    core->kv_attached = true;
    core->kv_epoch = event->kv_epoch;
    core->kv_seen_us = core->now_us;
    core->kv_retry_us = 0;
    core->grant_count = 0;
    wk_snap_granted(core, event->granted, event->granted_count);
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        CHECK(seq->kv.state != WK_KV_HELD);
        seq->limits.context_max = core->context_max;
    }
    /* A smaller arena may no longer hold what is already there. */
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (wk_core_length(core, seq) >= core->context_max) {
            wk_core_emit(core, seq, NULL, 0, MSG_FINISH_FAILED, ERR_KV_FULL);
            wk_core_end(core, seq, MSG_FINISH_FAILED);
        }
    }
}

void wk_core_kv_detached(struct wk_core *core)
{
    core->kv_attached = false;
    core->grant_count = 0;
    CHECK(core->order_count <= core->entry_count);
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (seq->state == WK_SEQ_ZOMBIE) {
            wk_blocks_reset(&seq->kv); /* nothing to give back */
            if (seq->flush && !seq->in_flight)
                wk_core_flush_end(core, seq);
            continue;
        }
        if (seq->kv.state == WK_KV_HELD) {
            seq->resumed++;
            core->stats.replanned++;
        }
        wk_core_replan(core, seq, false);
        seq->replan_release = false;
    }
}

/* A request's cached tokens are those that it began with here. */
static void reuse_count(struct wk_core *core, struct wk_seq *seq)
{
    if (seq->opened || seq->canary)
        return;
    seq->opened = true;
    seq->cached = seq->kv.reused < seq->prompt_count ? seq->kv.reused : seq->prompt_count;
    core->stats.tokens_cached += seq->cached;
    *(seq->cached > 0 ? &core->stats.prompts_cached : &core->stats.prompts_cold) += 1;
}

static void opened(struct wk_core *core, const struct msg *m)
{
    const struct msg_kv_open_reply *reply = &m->u.kv_open_reply;
    struct wk_seq *seq = wk_core_find(core, &m->id);
    if (seq == NULL || seq->state != WK_SEQ_WAITING || seq->kv.state != WK_KV_OPENING) {
        if (reply->code != ERR_OK || !core->kv_attached)
            return;
        /* Nobody waits for this lease.  If it belongs to a live sequence, then its open was sent
         * twice and the lease it runs on is gone: plan it anew. */
        if (seq != NULL && seq->kv.state == WK_KV_HELD && seq->kv.lease == reply->lease)
            return;
        release_send(core, &m->id, reply->lease, 0, false);
        if (seq != NULL && seq->kv.state == WK_KV_HELD) {
            core->stats.replanned++;
            wk_core_replan(core, seq, false);
        }
        return;
    }
    uint32_t wanted = wk_blocks_for(&core->shape, tokens_wanted(core, seq));
    enum err e = wk_blocks_opened(&seq->kv, &core->shape, reply, wanted, core->now_us);
    if (e == ERR_OK) {
        seq->state = WK_SEQ_PREFILL;
        seq->computed = seq->kv.reused;
        reuse_count(core, seq);
        seq->ready_us = core->now_us;
        seq->served_us = 0;
    } else if (e == ERR_KV_FULL) {
        core->stats.kv_full++;
        core->kv_retry_us = core->now_us + KV_RETRY_US;
    } else {
        if (reply->code == ERR_OK)
            release_send(core, &m->id, reply->lease, 0, false);
        wk_core_emit(core, seq, NULL, 0, MSG_FINISH_FAILED, e);
        wk_core_end(core, seq, MSG_FINISH_FAILED);
    }
}

static struct wk_seq *by_lease(struct wk_core *core, uint64_t lease)
{
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state != WK_SEQ_ZOMBIE && seq->kv.state == WK_KV_HELD && seq->kv.lease == lease)
            return seq;
    }
    return NULL;
}

static void extended(struct wk_core *core, const struct msg_kv_extend_reply *reply)
{
    struct wk_seq *seq = by_lease(core, reply->lease);
    if (seq == NULL)
        return;
    enum err e = wk_blocks_extended(&seq->kv, &core->shape, reply, core->now_us);
    if (e == ERR_KV_FULL) {
        core->stats.kv_full++;
        core->kv_retry_us = core->now_us + KV_RETRY_US;
    } else if (e != ERR_OK) {
        core->stats.replanned++;
        seq->resumed++;
        wk_core_replan(core, seq, true);
    }
}

/* blocks: those that can be had, cached ones included. */
static void blocks_free_set(struct wk_core *core, uint32_t blocks)
{
    if (blocks > core->kv_blocks_free && core->kv_retry_us > core->now_us)
        core->kv_retry_us = core->now_us;
    core->kv_blocks_free = blocks;
}

void wk_core_kv_msg(struct wk_core *core, const struct msg *m)
{
    core->kv_seen_us = core->now_us;
    struct wk_seq *seq;
    switch (m->type) {
    case MSG_KV_OPEN_REPLY:
        opened(core, m);
        break;
    case MSG_KV_EXTEND_REPLY:
        extended(core, &m->u.kv_extend_reply);
        break;
    case MSG_KV_STATE:
        blocks_free_set(core, m->u.kv_state.blocks_free + m->u.kv_state.blocks_cached);
        wk_snap_granted(core, m->u.kv_state.granted, m->u.kv_state.granted_count);
        break;
    case MSG_KV_SNAPSHOT_REPLY:
        wk_snap_reply(core, &m->u.kv_snapshot_reply);
        break;
    case MSG_KV_PRESSURE:
        if (core->kv_retry_us > core->now_us)
            core->kv_retry_us = core->now_us;
        break;
    case MSG_KV_RECLAIM:
        seq = by_lease(core, m->u.kv_reclaim.lease);
        if (seq != NULL) {
            seq->preempted++;
            core->stats.preempted++;
            wk_core_replan(core, seq, true);
        }
        break;
    default: /* others are the shell's or nobody's */
        break;
    }
}

/* True while seq still lacks blocks that were refused. */
static bool extend_pump(struct wk_core *core, struct wk_seq *seq, bool retry)
{
    if (wk_blocks_room(&seq->kv, &core->shape) >= tokens_wanted(core, seq))
        return false;
    bool late = core->now_us > seq->kv.asked_us + KV_ASK_AGAIN_US;
    if (seq->kv.extend == WK_EXTEND_NONE || (seq->kv.extend == WK_EXTEND_FULL && retry) ||
        (seq->kv.extend == WK_EXTEND_ASKED && late))
        extend_send(core, seq);
    return seq->kv.full_since_us != 0;
}

/* kvmgr lets go of a request's first lease when it is opened again; not while rows of a cancelled
 * run of the same request are still being written there. */
static bool has_zombie(const struct wk_core *core, const struct msg_id *id)
{
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state == WK_SEQ_ZOMBIE && memcmp(&seq->id, id, sizeof *id) == 0)
            return true;
    }
    return false;
}

static void open_pump(struct wk_core *core, bool retry)
{
    uint32_t tries = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state != WK_SEQ_WAITING || has_zombie(core, &seq->id))
            continue;
        CHECK(!seq->in_flight && !seq->in_batch && !seq->replan);
        bool late = core->now_us > seq->kv.asked_us + KV_ASK_AGAIN_US;
        if (seq->kv.state == WK_KV_NONE || (seq->kv.state == WK_KV_OPENING && late)) {
            open_send(core, seq);
        } else if (seq->kv.state == WK_KV_FULL && retry && tries < KV_RETRIES) {
            tries++;
            open_send(core, seq);
        }
        /* Small requests may pass a big one for a while, not for ever. */
        if (seq->kv.full_since_us != 0 && core->now_us > seq->kv.full_since_us + KV_PATIENCE_US)
            break;
    }
}

void wk_core_kv_pump(struct wk_core *core)
{
    if (!core->kv_attached || wk_core_kv_silent(core))
        return;
    wk_snap_pump(core);
    bool retry = core->kv_retry_us != 0 && core->now_us >= core->kv_retry_us;
    bool refused = false;
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state == WK_SEQ_DECODE && !seq->replan)
            refused |= extend_pump(core, seq, retry);
    }
    /* Whoever runs goes first: a newcomer must not take what they wait for. */
    if (!refused)
        open_pump(core, retry);
    if (retry)
        core->kv_retry_us = core->now_us + KV_RETRY_US;
}

/* What a preemption costs: the tokens behind the last state that is kept. */
static uint32_t tokens_lost(const struct wk_core *core, const struct wk_seq *seq)
{
    uint32_t length = wk_core_length(core, seq);
    CHECK(seq->kv.snapped <= length);
    return length - seq->kv.snapped;
}

void wk_core_preempt_if_stuck(struct wk_core *core)
{
    if (core->flight.active || core->prefill.active || !core->kv_attached)
        return;
    uint32_t blocked = 0;
    struct wk_seq *victim = NULL;
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state == WK_SEQ_PREFILL || seq->kv.state == WK_KV_OPENING)
            return;
        if (seq->state != WK_SEQ_DECODE)
            continue;
        if (seq->kv.extend != WK_EXTEND_FULL ||
            wk_blocks_room(&seq->kv, &core->shape) >= wk_core_length(core, seq))
            return;
        blocked++;
        /* The cheapest to compute again, the youngest of those; never the same twice. */
        if (seq->serial != core->preempted_serial &&
            (victim == NULL || tokens_lost(core, seq) <= tokens_lost(core, victim)))
            victim = seq;
    }
    if (blocked < 2 || victim == NULL)
        return;
    core->preempted_serial = victim->serial;
    victim->preempted++;
    core->stats.preempted++;
    wk_core_replan(core, victim, true);
    wk_core_kv_pump(core);
}
