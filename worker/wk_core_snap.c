/* SPDX-License-Identifier: Apache-2.0 */
/* The core's side of state snapshots: which boundaries get one, and the slots granted for them.
 *
 * A slot is granted by kvmgr, named in a plan, written by the executor, named in a KvSnapshot, and
 * then no longer ours until an answer says so. */
#include <string.h>

#include "lib/base/check.h"
#include "worker/wk_core_state.h"

#define ANSWER_US_MAX 5000000u /* then the KvSnapshot is sent again */

static bool wanted(const struct wk_core *core, const struct wk_seq *seq)
{
    return core->grant_count > 0 && !seq->canary;
}

uint32_t wk_snap_prefill_end(const struct wk_core *core, const struct wk_seq *seq)
{
    uint32_t length = wk_core_length(core, seq), block_tokens = core->shape.block_tokens;
    CHECK(seq->computed < length);
    if (!wanted(core, seq))
        return length;
    uint32_t end = length, last = (length - 1) / block_tokens * block_tokens;
    if (last > seq->computed)
        end = last;
    if (core->shape.snapshot_every > 0) {
        uint64_t every = core->shape.snapshot_every + block_tokens - 1;
        every -= every % block_tokens;
        uint64_t next = (seq->computed / every + 1) * every;
        if (next < end)
            end = (uint32_t)next;
    }
    return end;
}

uint32_t wk_snap_drafts_max(const struct wk_core *core, const struct wk_seq *seq, uint32_t position,
                            uint32_t drafts)
{
    uint32_t block_tokens = core->shape.block_tokens;
    uint32_t most = block_tokens - 1 - position % block_tokens;
    return wanted(core, seq) && drafts > most ? most : drafts;
}

bool wk_snap_plan(struct wk_core *core, struct wk_seq *seq, uint32_t tokens, uint32_t *ret_slot)
{
    CHECK(seq->snap_tokens == 0);
    if (!wanted(core, seq) || tokens == 0 || tokens % core->shape.block_tokens != 0 ||
        tokens <= seq->kv.snapped)
        return false;
    for (uint32_t i = 0; i < core->grant_count; i++) {
        struct wk_grant *g = &core->grants[i];
        if (g->state != WK_GRANT_FREE)
            continue;
        g->state = WK_GRANT_PLANNED;
        seq->snap_tokens = tokens;
        seq->snap_slot = g->slot;
        *ret_slot = g->slot;
        return true;
    }
    core->stats.snapshots_skipped++;
    return false;
}

bool wk_snap_flush(const struct wk_core *core, const struct wk_seq *seq)
{
    return wanted(core, seq) && core->kv_attached && !core->stopping && seq->replay > 0 &&
           seq->computed % core->shape.block_tokens == 0 && seq->computed > seq->kv.snapped &&
           wk_blocks_room(&seq->kv, &core->shape) >= wk_core_length(core, seq);
}

static struct wk_grant *grant_of(struct wk_core *core, uint32_t slot)
{
    for (uint32_t i = 0; i < core->grant_count; i++)
        if (core->grants[i].slot == slot)
            return &core->grants[i];
    return NULL;
}

static void name(struct wk_core *core, struct wk_grant *g)
{
    struct msg *m = wk_core_send(core, WK_ACT_KVMGR, MSG_KV_SNAPSHOT, &g->request);
    m->u.kv_snapshot = (struct msg_kv_snapshot){
        .lease = g->lease, .token_count = g->tokens, .hash = g->hash, .slot = g->slot};
    g->asked_us = core->now_us;
}

void wk_snap_settle(struct wk_core *core, struct wk_seq *seq, bool good)
{
    uint32_t tokens = seq->snap_tokens, block_tokens = core->shape.block_tokens;
    seq->snap_tokens = 0;
    struct wk_grant *g = tokens > 0 ? grant_of(core, seq->snap_slot) : NULL;
    if (g == NULL || g->state != WK_GRANT_PLANNED)
        return; /* none, or of a kvmgr that is gone */
    g->state = WK_GRANT_FREE;
    if (!good || seq->kv.state != WK_KV_HELD || !core->kv_attached ||
        (uint64_t)seq->kv.committed * block_tokens < tokens)
        return;
    g->state = WK_GRANT_NAMED;
    g->request = seq->id;
    g->lease = seq->kv.lease;
    g->tokens = tokens;
    g->hash = seq->kv.hashes[tokens / block_tokens - 1];
    seq->kv.snapped = tokens;
    core->stats.snapshots++;
    name(core, g);
}

void wk_snap_granted(struct wk_core *core, const uint32_t *slots, uint32_t count)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < core->grant_count; i++)
        if (core->grants[i].state != WK_GRANT_FREE)
            core->grants[kept++] = core->grants[i];
    core->grant_count = kept;
    for (uint32_t i = 0; i < count && core->grant_count < WK_GRANTS_MAX; i++) {
        if (slots[i] < core->shape.live_slots || slots[i] >= core->shape.slot_count ||
            grant_of(core, slots[i]) != NULL)
            continue;
        core->grants[core->grant_count++] =
            (struct wk_grant){.slot = slots[i], .state = WK_GRANT_FREE};
    }
}

void wk_snap_reply(struct wk_core *core, const struct msg_kv_snapshot_reply *reply)
{
    struct wk_grant *g = grant_of(core, reply->slot);
    if (g != NULL && g->state == WK_GRANT_NAMED && g->lease == reply->lease) {
        g->state = WK_GRANT_FREE; /* ours only if the list says so */
        core->stats.snapshots_refused += reply->code != ERR_OK;
    }
    wk_snap_granted(core, reply->granted, reply->granted_count);
}

void wk_snap_pump(struct wk_core *core)
{
    for (uint32_t i = 0; i < core->grant_count; i++) {
        struct wk_grant *g = &core->grants[i];
        if (g->state == WK_GRANT_NAMED && core->now_us > g->asked_us + ANSWER_US_MAX)
            name(core, g);
    }
}
