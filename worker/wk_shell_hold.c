/* SPDX-License-Identifier: Apache-2.0 */
/* The shell's side of what all ranks must have committed before kvmgr hears of it.
 *
 * With several ranks a KvCommit or KvSnapshot waits, encoded, until every rank has sealed what it
 * names; all that the core says to kvmgr after it waits behind it.  One batch is being sealed while
 * the next one gathers.  A group that is lost takes what waits with it, as it takes the leases. */
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/bus.h"
#include "proto/wire.h"
#include "worker/wk_ranks.h"
#include "worker/wk_rows.h"
#include "worker/wk_shell_state.h"

#define HOLD_BYTES     (64u << 10)
#define HOLD_BYTES_MAX (64u << 20)

struct wk_held {
    struct wk_held *next;
    struct wk_seal *seals;
    uint32_t seal_count, frame_count;
    struct bus_frame frames[WIRE_FRAMES_MAX];
};

void wk_shell_hold_init(struct wk_shell *s)
{
    for (uint32_t i = 0; i < 2; i++)
        arena_init(&s->hold.batches[i].arena, HOLD_BYTES, HOLD_BYTES_MAX);
}

void wk_shell_hold_fini(struct wk_shell *s)
{
    for (uint32_t i = 0; i < 2; i++)
        arena_fini(&s->hold.batches[i].arena);
}

static void batch_reset(struct wk_hold_batch *b)
{
    arena_reset(&b->arena);
    b->first = b->last = NULL;
    b->seal_count = 0;
}

/* NULL: no memory. */
static struct wk_seal *seals_of(struct arena *arena, const struct wk_action *a, uint32_t *ret_count)
{
    const struct msg_kv_commit *c = &a->msg.u.kv_commit;
    const struct msg_kv_snapshot *n = &a->msg.u.kv_snapshot;
    uint32_t count = a->msg.type == MSG_KV_COMMIT ? c->hash_count : 1;
    struct wk_seal *seals = arena_alloc_array(arena, count, sizeof *seals);
    if (seals == NULL)
        return NULL;
    memset(seals, 0, count * sizeof *seals);
    *ret_count = count;
    if (a->msg.type == MSG_KV_SNAPSHOT) {
        *seals = (struct wk_seal){
            .snapshot = 1, .index = n->slot, .place = n->token_count, .hash = n->hash};
        return seals;
    }
    for (uint32_t i = 0; i < count; i++)
        seals[i] = (struct wk_seal){.index = a->blocks[i],
                                    .place = c->first_block + i,
                                    .hash = c->hashes[i],
                                    .parent = i > 0 ? c->hashes[i - 1] : a->parent};
    return seals;
}

static struct wk_held *held_make(struct wk_hold_batch *b, const struct wk_action *a)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct wk_held *h = arena_alloc(&b->arena, sizeof *h);
    if (h == NULL)
        return NULL;
    *h = (struct wk_held){0};
    if (wire_encode(&b->arena, &a->msg, frames, &h->frame_count) != ERR_OK)
        return NULL;
    for (uint32_t i = 0; i < h->frame_count; i++) { /* a payload lies in the core's arena */
        void *bytes = arena_alloc(&b->arena, frames[i].count + 1);
        if (bytes == NULL)
            return NULL;
        if (frames[i].count > 0)
            memcpy(bytes, frames[i].bytes, frames[i].count);
        h->frames[i] = (struct bus_frame){bytes, frames[i].count};
    }
    if (a->msg.type != MSG_KV_COMMIT && a->msg.type != MSG_KV_SNAPSHOT)
        return h;
    h->seals = seals_of(&b->arena, a, &h->seal_count);
    return h->seals != NULL ? h : NULL;
}

void wk_shell_hold(struct wk_shell *s, const struct wk_action *a)
{
    struct wk_hold_state *hold = &s->hold;
    struct wk_hold_batch *b = &hold->batches[hold->gathering];
    bool seals = a->msg.type == MSG_KV_COMMIT || a->msg.type == MSG_KV_SNAPSHOT;
    if (s->ranks == NULL || (!seals && !hold->sealing && b->first == NULL)) {
        wk_shell_send(s, WK_KVMGR, &a->msg);
        return;
    }
    if (hold->spoilt)
        return;
    struct wk_held *h = held_make(b, a);
    if (h == NULL || b->seal_count + h->seal_count > WK_RANKS_SEALS_MAX) {
        hold->spoilt = true; /* a gap would be worse: the leases end at the next turn */
        return;
    }
    if (b->last != NULL)
        b->last->next = h;
    else
        b->first = h;
    b->last = h;
    b->seal_count += h->seal_count;
}

static void batch_send(struct wk_shell *s, const struct wk_hold_batch *b)
{
    for (const struct wk_held *h = b->first; h != NULL; h = h->next) {
        if (bus_send(s->sockets[WK_KVMGR], NULL, h->frames, h->frame_count) == ERR_OK)
            continue;
        s->unsent++;
        log_warn(WORKER, "message not sent", "to=kvmgr");
    }
}

void wk_shell_hold_pump(struct wk_shell *s)
{
    struct wk_hold_state *hold = &s->hold;
    struct wk_hold_batch *b = &hold->batches[hold->gathering];
    if (hold->sealing || b->first == NULL)
        return;
    if (b->seal_count == 0) {
        batch_send(s, b);
        batch_reset(b);
        return;
    }
    struct wk_seal *all = arena_alloc_array(&b->arena, b->seal_count, sizeof *all), *to = all;
    if (all == NULL) {
        hold->spoilt = true;
        return;
    }
    for (const struct wk_held *h = b->first; h != NULL; h = h->next) {
        if (h->seal_count > 0)
            memcpy(to, h->seals, h->seal_count * sizeof *to);
        to += h->seal_count;
    }
    CHECK(to == all + b->seal_count);
    hold->sealing = true;
    hold->gathering ^= 1;
    wk_exec_seal(s->exec, all, b->seal_count);
}

void wk_shell_hold_sealed(struct wk_shell *s, enum err status)
{
    struct wk_hold_state *hold = &s->hold;
    struct wk_hold_batch *b = &hold->batches[hold->gathering ^ 1];
    CHECK(hold->sealing);
    hold->sealing = false;
    bool dropped = hold->dropped;
    hold->dropped = false;
    if (status == ERR_OK && !dropped)
        batch_send(s, b);
    batch_reset(b);
    if (status != ERR_OK && !dropped && s->kv.attached)
        wk_shell_kv_lost(s, "group lost");
    wk_shell_hold_pump(s);
}

void wk_shell_hold_drop(struct wk_shell *s)
{
    struct wk_hold_state *hold = &s->hold;
    hold->dropped = hold->sealing; /* the device thread reads that batch until its answer */
    hold->spoilt = false;
    batch_reset(&hold->batches[hold->gathering]);
}

bool wk_shell_hold_empty(const struct wk_shell *s)
{
    return !s->hold.sealing && s->hold.batches[s->hold.gathering].first == NULL;
}
