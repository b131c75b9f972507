/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "kvmgr/km_core.h"
#include "lib/base/rng.h"

#define BLOCKS      40u
#define EPOCH       9u
#define TOKENS      16u
#define SECOND      1000000u
#define PEERS       3u
#define INCARNATION 0xfeedu

/* What a world of kvmgr, arena headers and workers looks like from outside. */
struct world {
    struct km_core *core;
    uint64_t now_us;
    uint32_t slot_count; /* of the arena */
    enum err arena_code; /* answer to the next ARENA_OPEN */
    uint32_t arenas;
    uint8_t blocks[BLOCKS]; /* header states as the actions left them */
    uint8_t slots[64];
    struct km_actions actions;
    struct msg last;              /* last message sent */
    uint32_t blocks_last[BLOCKS]; /* its block ids */
    uint32_t sent, reclaims, sessions, traces;
    uint64_t heard_us[KM_WORKERS_MAX + 1]; /* last message of each peer */
    struct km_session_change session;
    char sid[33];
    uint64_t mapped[PEERS]; /* incarnations that have the arena mapped, however silent */
};

static struct km_peer peer_of(uint32_t n)
{
    struct km_peer peer = {.count = 8};
    snprintf((char *)peer.bytes, sizeof(peer.bytes), "worker-%u", n);
    return peer;
}

static struct msg_id id_of(uint32_t n)
{
    struct msg_id id = {{0}};
    memcpy(id.bytes, &n, sizeof(n));
    return id;
}

static void apply_blocks(struct world *w, const struct km_action *action)
{
    for (uint32_t i = 0; i < action->u.blocks.count; i++) {
        uint32_t block = action->u.blocks.blocks[i];
        assert_true(block < BLOCKS);
        uint8_t *state = &w->blocks[block];
        if (action->u.blocks.state == KM_WRITING)
            assert_int_equal(*state, KM_FREE);
        else if (action->u.blocks.state == KM_COMMITTED)
            assert_int_equal(*state, KM_WRITING);
        else
            assert_int_not_equal(*state, KM_FREE);
        *state = (uint8_t)action->u.blocks.state;
    }
}

static void apply_slots(struct world *w, const struct km_action *action)
{
    for (uint32_t i = 0; i < action->u.slots.count; i++) {
        uint32_t slot = action->u.slots.slots[i];
        assert_true(slot < w->slot_count);
        assert_int_not_equal(w->slots[slot], action->u.slots.state);
        w->slots[slot] = (uint8_t)action->u.slots.state;
    }
}

static void apply_sent(struct world *w, const struct msg *m)
{
    w->sent++;
    assert_int_equal(m->epoch, EPOCH);
    if (m->type == MSG_KV_RECLAIM) {
        w->reclaims++;
        return;
    }
    w->last = *m;
    if (m->type == MSG_KV_OPEN_REPLY && m->u.kv_open_reply.block_count > 0)
        memcpy(w->blocks_last, m->u.kv_open_reply.blocks,
               m->u.kv_open_reply.block_count * sizeof(uint32_t));
    if (m->type == MSG_KV_EXTEND_REPLY && m->u.kv_extend_reply.block_count > 0)
        memcpy(w->blocks_last, m->u.kv_extend_reply.blocks,
               m->u.kv_extend_reply.block_count * sizeof(uint32_t));
}

/* Steps the core and carries its actions out, the arena included. */
static void step(struct world *w, struct km_event event)
{
    event.now_us = w->now_us;
    for (bool more = true; more;) {
        more = false;
        km_core_step(w->core, &event, &w->actions);
        for (uint32_t i = 0; i < w->actions.count; i++) {
            const struct km_action *action = &w->actions.list[i];
            switch (action->type) {
            case KM_ACTION_SEND:
                apply_sent(w, &action->u.send.msg);
                break;
            case KM_ACTION_ARENA_OPEN:
                assert_int_equal(i + 1, w->actions.count);
                w->arenas++;
                w->slot_count = action->u.arena.slot_count;
                memset(w->blocks, 0, sizeof(w->blocks));
                memset(w->slots, 0, sizeof(w->slots));
                event = (struct km_event){.now_us = w->now_us, .type = KM_EVENT_ARENA};
                event.u.arena = (struct km_arena_result){.code = w->arena_code,
                                                         .text = "no such luck",
                                                         .path = "/dev/shm/x",
                                                         .arena_bytes = 12345,
                                                         .block_count = BLOCKS,
                                                         .live_count = w->slot_count,
                                                         .slot_count = w->slot_count};
                more = true;
                break;
            case KM_ACTION_BLOCKS:
                apply_blocks(w, action);
                break;
            case KM_ACTION_SLOTS:
                apply_slots(w, action);
                break;
            case KM_ACTION_SESSION:
                w->sessions++;
                w->session = action->u.session;
                snprintf(w->sid, sizeof(w->sid), "%s", action->u.session.sid);
                break;
            case KM_ACTION_STORE:
                fail_msg("there is no tier");
                break;
            case KM_ACTION_PROVE:
            case KM_ACTION_MOVED:
            case KM_ACTION_TRACE:
                w->traces++;
                break;
            }
        }
    }
    struct km_pool_counts c = km_core_counts(w->core);
    uint32_t used = 0, slots = 0;
    for (uint32_t i = 0; i < BLOCKS; i++)
        used += w->blocks[i] != KM_FREE;
    for (uint32_t i = 0; i < w->slot_count; i++)
        slots += w->slots[i] != KM_FREE;
    assert_int_equal(used, c.blocks_leased);
    if (c.slots_total > 0)
        assert_int_equal(slots, c.slots_total - c.slots_free);
}

/* As the shell does: of those that are not heard, who has the arena mapped no more? */
static void suspects(struct world *w, const struct km_peer *asker, uint64_t incarnation)
{
    uint64_t who[KM_WORKERS_MAX];
    uint32_t count = km_core_suspects(w->core, asker, incarnation, who);
    for (uint32_t i = 0; i < count; i++) {
        bool mapped = false;
        for (uint32_t k = 0; k < PEERS; k++)
            mapped |= w->mapped[k] == who[i];
        struct km_event event = {.type = KM_EVENT_WORKER_GONE, .u.gone = who[i]};
        if (!mapped)
            step(w, event);
    }
}

static void send_msg(struct world *w, uint32_t peer, const struct msg *m)
{
    struct km_peer from = peer_of(peer);
    if (m->type == MSG_KV_ATTACH)
        suspects(w, &from, m->u.kv_attach.incarnation);
    struct km_event event = {.type = KM_EVENT_MSG};
    event.u.msg.peer = peer_of(peer);
    event.u.msg.msg = m;
    if (m->type == MSG_KV_ATTACH || m->epoch == EPOCH)
        w->heard_us[peer] = w->now_us;
    step(w, event);
}

static void tick(struct world *w)
{
    step(w, (struct km_event){.type = KM_EVENT_TICK});
    suspects(w, NULL, 0);
}

static struct world world_new(void)
{
    struct world w = {.now_us = SECOND};
    struct km_core_options options = {.epoch = EPOCH,
                                      .incarnation = INCARNATION,
                                      .block_tokens = TOKENS,
                                      .kv_dtype = 1,
                                      .index_dtype = 1,
                                      .snapshot_dtype = 2,
                                      .slots_spare = 2};
    memset(&options.key, 3, sizeof(options.key));
    w.core = km_core_create(&options);
    return w;
}

static void attach_as(struct world *w, uint32_t peer, uint64_t incarnation, uint32_t layers,
                      uint32_t seqs)
{
    struct msg m = {.type = MSG_KV_ATTACH};
    m.u.kv_attach = (struct msg_kv_attach){.worker_id = peer,
                                           .incarnation = incarnation,
                                           .dsa_layers = layers,
                                           .latent_dim = 8,
                                           .index_dim = 8,
                                           .index_kpool = 4,
                                           .state_bytes = 100,
                                           .seqs_max = seqs,
                                           .ranks = 1};
    send_msg(w, peer, &m);
    assert_int_equal(w->last.type, MSG_KV_ATTACH_REPLY);
    assert_int_equal(w->last.u.kv_attach_reply.incarnation, INCARNATION);
}

static void attach(struct world *w, uint32_t peer)
{
    attach_as(w, peer, 100 + peer, 2, 6);
    assert_int_equal(w->last.u.kv_attach_reply.code, ERR_OK);
}

static uint32_t open_code(struct world *w, uint32_t peer, uint32_t request, uint32_t wanted,
                          const char *session, uint32_t epoch)
{
    struct msg m = {.type = MSG_KV_OPEN, .epoch = epoch, .id = id_of(request)};
    m.u.kv_open = (struct msg_kv_open){
        .session_key = session, .cache_salt = "", .prompt_count = 1, .blocks_wanted = wanted};
    send_msg(w, peer, &m);
    assert_int_equal(w->last.type, MSG_KV_OPEN_REPLY);
    assert_memory_equal(&w->last.id, &m.id, sizeof(m.id));
    return w->last.u.kv_open_reply.code;
}

static uint64_t open_ok(struct world *w, uint32_t peer, uint32_t request, uint32_t wanted)
{
    assert_int_equal(open_code(w, peer, request, wanted, "", EPOCH), ERR_OK);
    assert_int_equal(w->last.u.kv_open_reply.block_count, wanted);
    assert_int_equal(w->last.u.kv_open_reply.snapshot_slot, UINT32_MAX);
    return w->last.u.kv_open_reply.lease;
}

static uint32_t extend_code(struct world *w, uint32_t peer, uint64_t lease, uint32_t have,
                            uint32_t wanted)
{
    struct msg m = {.type = MSG_KV_EXTEND, .epoch = EPOCH};
    m.u.kv_extend = (struct msg_kv_extend){lease, have, wanted};
    send_msg(w, peer, &m);
    assert_int_equal(w->last.type, MSG_KV_EXTEND_REPLY);
    assert_true(w->last.u.kv_extend_reply.lease == lease);
    return w->last.u.kv_extend_reply.code;
}

static void commit(struct world *w, uint32_t peer, uint64_t lease, uint32_t first, uint32_t count)
{
    struct hash128 hashes[BLOCKS];
    for (uint32_t i = 0; i < count; i++) { /* nothing in common with other leases */
        memset(&hashes[i], (int)(first + i + 1), sizeof(hashes[i]));
        memcpy(&hashes[i], &lease, sizeof(lease));
    }
    struct msg m = {.type = MSG_KV_COMMIT, .epoch = EPOCH};
    m.u.kv_commit =
        (struct msg_kv_commit){lease, first, (first + count) * TOKENS + 3, count, hashes};
    send_msg(w, peer, &m);
}

static void release(struct world *w, uint32_t peer, uint64_t lease)
{
    struct msg m = {.type = MSG_KV_RELEASE, .epoch = EPOCH};
    m.u.kv_release.lease = lease;
    send_msg(w, peer, &m);
}

static void ping(struct world *w, uint32_t peer, uint64_t incarnation, const uint64_t *leases,
                 uint32_t count)
{
    struct msg m = {.type = MSG_KV_PING, .epoch = EPOCH};
    m.u.kv_ping = (struct msg_kv_ping){incarnation, count, leases};
    send_msg(w, peer, &m);
    assert_int_equal(w->last.type, MSG_KV_STATE);
}

static void all_free(struct world *w)
{
    struct km_pool_counts c = km_core_counts(w->core);
    assert_int_equal(c.blocks_free, c.blocks_total);
    assert_int_equal(c.slots_free, c.slots_total);
    if (km_core_pool(w->core))
        km_pool_audit(km_core_pool(w->core));
}

/* --- stories */

static void a_request_from_open_to_release(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    assert_int_equal(w.last.u.kv_attach_reply.block_count, BLOCKS);
    assert_int_equal(w.last.u.kv_attach_reply.slot_count, 8);
    assert_string_equal(w.last.u.kv_attach_reply.arena_path, "/dev/shm/x");
    assert_int_equal(w.last.u.kv_attach_reply.epoch, EPOCH);

    assert_int_equal(open_code(&w, 0, 1, 2, "my session", EPOCH), ERR_OK);
    uint64_t lease = w.last.u.kv_open_reply.lease;
    uint32_t first = w.blocks_last[0];
    assert_int_equal(extend_code(&w, 0, lease, 2, 3), ERR_OK);
    assert_int_equal(w.last.u.kv_extend_reply.block_count, 3);
    assert_int_equal(w.last.u.kv_extend_reply.blocks_have, 2);
    commit(&w, 0, lease, 0, 2);
    assert_int_equal(w.blocks[first], KM_COMMITTED);
    assert_int_equal(w.sessions, 1);
    assert_int_equal(w.session.first_block, 0);
    assert_int_equal(w.session.count, 2);
    assert_int_equal(w.session.token_count, 2 * TOKENS + 3);
    assert_int_equal(strlen(w.sid), 32);
    assert_null(strstr(w.sid, "my"));
    commit(&w, 0, lease, 1, 3); /* one of it is known */
    assert_int_equal(w.session.first_block, 2);
    assert_int_equal(w.session.count, 2);
    assert_int_equal(km_core_stats(w.core)->blocks_committed, 4);
    release(&w, 0, lease);
    all_free(&w);
    release(&w, 0, lease); /* again: nothing */
    assert_int_equal(km_core_stats(w.core)->stale, 1);
    assert_int_equal(extend_code(&w, 0, lease, 2, 1), ERR_NOT_FOUND);
    commit(&w, 0, lease, 0, 1);
    all_free(&w);
    km_core_destroy(&w.core);
    assert_null(w.core);
}

static void a_second_open_releases_the_first(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    uint64_t first = open_ok(&w, 0, 1, BLOCKS);
    uint64_t second = open_ok(&w, 0, 1, BLOCKS);
    assert_true(first != second);
    assert_int_equal(km_core_leases(w.core), 1);
    assert_int_equal(extend_code(&w, 0, first, 1, 1), ERR_NOT_FOUND);
    release(&w, 0, second);
    all_free(&w);
    km_core_destroy(&w.core);
}

static void full_is_an_answer(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    uint64_t lease = open_ok(&w, 0, 1, BLOCKS - 1);
    assert_int_equal(open_code(&w, 0, 2, 2, "", EPOCH), ERR_KV_FULL);
    assert_non_null(strstr(w.last.u.kv_open_reply.text, "2 blocks wanted, 1 of 40 free"));
    assert_int_equal(extend_code(&w, 0, lease, BLOCKS - 1, 2), ERR_TOO_LARGE);
    assert_int_equal(extend_code(&w, 0, lease, BLOCKS - 1, 1), ERR_OK);
    assert_int_equal(open_code(&w, 0, 3, BLOCKS + 1, "", EPOCH), ERR_TOO_LARGE);
    assert_int_equal(open_code(&w, 0, 3, 0, "", EPOCH), ERR_INVALID);
    assert_int_equal(open_code(&w, 0, 3, UINT32_MAX, "", EPOCH), ERR_TOO_LARGE);
    assert_int_equal(extend_code(&w, 0, lease, UINT32_MAX, UINT32_MAX), ERR_TOO_LARGE);
    release(&w, 0, lease);
    for (uint32_t i = 0; i < 8; i++)
        (void)open_ok(&w, 0, 10 + i, 1);
    assert_int_equal(open_code(&w, 0, 20, 1, "", EPOCH), ERR_KV_FULL);
    assert_non_null(strstr(w.last.u.kv_open_reply.text, "0 slots free"));
    km_core_destroy(&w.core);
}

static void old_epochs_and_strangers_are_told(void **state)
{
    struct world w = world_new();
    assert_int_equal(open_code(&w, 0, 1, 1, "", 0), ERR_EPOCH); /* not attached */
    attach(&w, 0);
    assert_int_equal(open_code(&w, 0, 1, 1, "", EPOCH - 1), ERR_EPOCH);
    assert_int_equal(open_code(&w, 0, 1, 1, "", 0), ERR_EPOCH); /* of no epoch: of none of ours */
    assert_int_equal(open_code(&w, 1, 1, 1, "", EPOCH), ERR_EPOCH);
    uint64_t lease = open_ok(&w, 0, 1, 1);
    attach(&w, 1);
    assert_int_equal(extend_code(&w, 1, lease, 1, 1), ERR_NOT_FOUND); /* another's */
    release(&w, 1, lease);
    assert_int_equal(km_core_leases(w.core), 1);
    assert_int_equal(extend_code(&w, 0, lease ^ (5ull << 40), 1, 1), ERR_EPOCH);
    assert_int_equal(extend_code(&w, 0, 0, 1, 1), ERR_EPOCH);
    struct msg m = {.type = MSG_KV_ADOPT, .epoch = EPOCH};
    send_msg(&w, 0, &m);
    assert_int_equal(w.last.u.kv_adopt_reply.code, ERR_OK);
    assert_int_equal(w.last.u.kv_adopt_reply.valid_count, 0);
    send_msg(&w, 2, &m);
    assert_int_equal(w.last.u.kv_adopt_reply.code, ERR_EPOCH);
    m = (struct msg){.type = MSG_KV_SNAPSHOT, .epoch = EPOCH};
    m.u.kv_snapshot.lease = lease;
    send_msg(&w, 0, &m);
    assert_int_equal(w.last.u.kv_snapshot_reply.code, ERR_INVALID); /* no slot was granted */
    assert_int_equal(km_core_stats(w.core)->snapshots_refused, 1);
    m = (struct msg){.type = MSG_TOKENS_EMITTED};
    send_msg(&w, 0, &m);
    assert_int_equal(km_core_stats(w.core)->refused, 1);
    km_core_destroy(&w.core);
}

static void bad_commits_change_nothing(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    uint64_t lease = open_ok(&w, 0, 1, 4);
    commit(&w, 0, lease, 1, 1); /* a gap */
    commit(&w, 0, lease, 0, 5); /* beyond the lease */
    struct msg m = {.type = MSG_KV_COMMIT, .epoch = EPOCH};
    struct hash128 hash = {{1}};
    m.u.kv_commit = (struct msg_kv_commit){lease, 0, TOKENS - 1, 1, &hash}; /* not full */
    send_msg(&w, 0, &m);
    assert_int_equal(km_core_stats(w.core)->refused, 3);
    assert_int_equal(km_core_stats(w.core)->blocks_committed, 0);
    commit(&w, 0, lease, 0, 4);
    assert_int_equal(km_core_stats(w.core)->blocks_committed, 4);
    assert_int_equal(w.sessions, 0); /* no session key */
    km_core_destroy(&w.core);
}

static void a_pause_of_our_own_is_nobody_elses_silence(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    (void)open_ok(&w, 0, 1, 3);
    w.now_us += 6 * SECOND;
    struct km_event late = {.type = KM_EVENT_TICK, .u.stood_still = true};
    step(&w, late);
    tick(&w);
    assert_int_equal(km_core_leases(w.core), 1);
    w.now_us += 6 * SECOND; /* real silence still counts */
    tick(&w);
    all_free(&w);
    km_core_destroy(&w.core);
}

static void silence_frees_and_asks_for_an_attach(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    attach(&w, 1);
    uint64_t lease = open_ok(&w, 0, 1, 3);
    (void)open_ok(&w, 1, 2, 4);
    w.now_us += 4 * SECOND;
    ping(&w, 0, 100, &lease, 1);
    w.now_us += 2 * SECOND;
    tick(&w);
    assert_int_equal(km_core_leases(w.core), 1); /* worker 1 is gone */
    assert_int_equal(km_core_stats(w.core)->workers_lost, 1);
    w.now_us += 4 * SECOND;
    tick(&w);
    all_free(&w);
    /* Should one of them be there after all: it must attach. */
    assert_int_equal(extend_code(&w, 0, lease, 3, 1), ERR_EPOCH);
    assert_int_equal(open_code(&w, 0, 5, 1, "", EPOCH), ERR_EPOCH);
    attach(&w, 0);
    (void)open_ok(&w, 0, 5, 1);
    attach(&w, 1);
    (void)open_ok(&w, 1, 6, 1);
    assert_int_equal(w.arenas, 1);
    km_core_destroy(&w.core);
}

/* Stopped in the middle of a step: what it may write to when it wakes is nobody else's. */
static void a_stopped_worker_keeps_what_it_may_write_to(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    attach(&w, 1);
    w.mapped[0] = 100;
    uint64_t lease = open_ok(&w, 0, 1, 30);
    uint32_t held[30];
    memcpy(held, w.blocks_last, sizeof(held));
    for (uint32_t i = 0; i < 20; i++) {
        w.now_us += SECOND;
        ping(&w, 1, 101, NULL, 0);
        tick(&w);
    }
    assert_int_equal(km_core_stats(w.core)->workers_lost, 1);
    assert_int_equal(open_code(&w, 1, 2, 11, "", EPOCH), ERR_KV_FULL);
    uint64_t other = open_ok(&w, 1, 3, 10);
    for (uint32_t i = 0; i < 10; i++)
        for (uint32_t k = 0; k < 30; k++)
            assert_int_not_equal(w.blocks_last[i], held[k]);
    /* It is not asked to give way, nor does a wait for it keep others from that. */
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(extend_code(&w, 1, other, 10, 1), ERR_KV_FULL);
        w.now_us += SECOND;
    }
    assert_int_equal(w.reclaims, 0);
    /* It wakes: its lease is whole, for as long as it names it. */
    ping(&w, 0, 100, &lease, 1);
    assert_int_equal(w.reclaims, 0);
    assert_int_equal(extend_code(&w, 0, lease, 29, 1), ERR_OK);
    /* Another process takes its name while it is stopped again. */
    attach_as(&w, 0, 500, 2, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_OK);
    assert_int_equal(km_core_stats(w.core)->workers, 2);
    assert_int_equal(km_core_counts(w.core).blocks_leased, 40);
    assert_int_equal(extend_code(&w, 0, lease, 29, 1), ERR_NOT_FOUND);
    assert_int_equal(open_code(&w, 0, 9, 1, "", EPOCH), ERR_KV_FULL);
    attach_as(&w, 0, 500, 2, 20); /* the file would be taken anew */
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_OK);
    release(&w, 1, other);
    w.now_us += 6 * SECOND;
    tick(&w);
    attach_as(&w, 0, 501, 2, 20);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_BUSY);
    assert_non_null(strstr(w.last.u.kv_attach_reply.text, "worker-0 is silent"));
    w.mapped[0] = 0; /* killed */
    attach_as(&w, 0, 501, 2, 20);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_OK);
    assert_int_equal(w.arenas, 2);
    all_free(&w);
    assert_int_equal(km_core_stats(w.core)->workers, 1);
    km_core_destroy(&w.core);
}

static void lost_workers_do_not_stand_in_the_way(void **state)
{
    struct world w = world_new();
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++)
        attach(&w, i);
    w.now_us += 6 * SECOND;
    tick(&w);
    attach(&w, KM_WORKERS_MAX); /* takes a lost one's place */
    w.now_us += 6 * SECOND;
    tick(&w);
    attach_as(&w, 0, 1, 3, 6); /* another geometry: nobody alive minds */
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_OK);
    assert_int_equal(w.arenas, 2);
    assert_int_equal(km_core_stats(w.core)->workers, 1);
    assert_int_equal(open_code(&w, 1, 5, 1, "", EPOCH), ERR_EPOCH);
    km_core_destroy(&w.core);
}

static void unnamed_leases_are_freed_when_old(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    uint64_t leases[3];
    leases[0] = open_ok(&w, 0, 1, 3);
    leases[1] = open_ok(&w, 0, 2, 3);
    w.now_us += SECOND;
    ping(&w, 0, 100, leases, 1);
    assert_int_equal(km_core_leases(w.core), 2); /* too young: its answer may be on the way */
    w.now_us += SECOND + 1;
    leases[2] = open_ok(&w, 0, 3, 1);
    ping(&w, 0, 100, leases, 1);
    assert_int_equal(km_core_leases(w.core), 2);
    assert_int_equal(w.last.u.kv_state.blocks_leased, 4);
    assert_int_equal(w.last.u.kv_state.blocks_free, BLOCKS - 4);
    assert_int_equal(w.last.u.kv_state.incarnation, INCARNATION);
    assert_int_equal(extend_code(&w, 0, leases[1], 3, 1), ERR_NOT_FOUND);
    ping(&w, 0, 100, leases, 3); /* names the one that is gone */
    assert_int_equal(w.reclaims, 1);
    /* A ping of another incarnation frees nothing. */
    w.now_us += 4 * SECOND;
    ping(&w, 0, 999, NULL, 0);
    assert_int_equal(km_core_leases(w.core), 2);
    km_core_destroy(&w.core);
}

static void a_new_incarnation_frees_at_once(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    (void)open_ok(&w, 0, 1, 3);
    attach(&w, 0); /* repeated: the same worker keeps its leases */
    assert_int_equal(km_core_leases(w.core), 1);
    attach_as(&w, 0, 555, 2, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_OK);
    all_free(&w);
    assert_int_equal(w.arenas, 1);
    km_core_destroy(&w.core);
}

static void another_geometry_waits_for_the_old_worker(void **state)
{
    struct world w = world_new();
    attach(&w, 0);
    uint64_t lease = open_ok(&w, 0, 1, 3);
    attach_as(&w, 1, 7, 3, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_INVALID);
    assert_non_null(
        strstr(w.last.u.kv_attach_reply.text, "dsa_layers is 2 in the arena, 3 wanted"));
    assert_int_equal(extend_code(&w, 0, lease, 3, 1), ERR_OK);
    struct msg m = {.type = MSG_KV_ATTACH};
    m.u.kv_attach = (struct msg_kv_attach){.worker_id = 1,
                                           .dsa_layers = 2,
                                           .latent_dim = 8,
                                           .index_dim = 8,
                                           .index_kpool = 4,
                                           .state_bytes = 100,
                                           .seqs_max = 1,
                                           .ranks = 1,
                                           .model_fp = {{1}}};
    send_msg(&w, 1, &m);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_INVALID);
    assert_non_null(strstr(w.last.u.kv_attach_reply.text, "model_fp"));
    /* Alone it may change its own mind; its leases go with the old arena. */
    attach_as(&w, 0, 8, 3, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_OK);
    assert_int_equal(w.arenas, 2);
    all_free(&w);
    attach_as(&w, 0, 8, 3, 20); /* more slots: a new arena too */
    assert_int_equal(w.arenas, 3);
    assert_int_equal(w.last.u.kv_attach_reply.slot_count, 22);
    attach_as(&w, 0, 8, 3, 2);
    assert_int_equal(w.arenas, 3);
    km_core_destroy(&w.core);
}

static void refused_arenas_leave_it_usable(void **state)
{
    struct world w = world_new();
    w.arena_code = ERR_NOMEM;
    attach_as(&w, 0, 1, 2, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_NOMEM);
    assert_string_equal(w.last.u.kv_attach_reply.text, "no such luck");
    assert_int_equal(open_code(&w, 0, 1, 1, "", EPOCH), ERR_EPOCH);
    ping(&w, 0, 1, NULL, 0);
    attach_as(&w, 0, 1, 2, 0);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_INVALID);
    attach_as(&w, 0, 1, 2, UINT32_MAX);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_INVALID);
    w.arena_code = ERR_OK;
    attach(&w, 0);
    (void)open_ok(&w, 0, 1, 1);
    w.arena_code = ERR_IO; /* a change of geometry that fails: nothing is held any more */
    attach_as(&w, 0, 2, 5, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_IO);
    assert_int_equal(open_code(&w, 0, 1, 1, "", EPOCH), ERR_EPOCH);
    tick(&w);
    km_core_destroy(&w.core);
}

static void workers_are_bounded(void **state)
{
    struct world w = world_new();
    for (uint32_t i = 0; i < KM_WORKERS_MAX; i++)
        attach(&w, i);
    attach_as(&w, KM_WORKERS_MAX, 1, 2, 6);
    assert_int_equal(w.last.u.kv_attach_reply.code, ERR_BUSY);
    assert_int_equal(km_core_stats(w.core)->workers, KM_WORKERS_MAX);
    for (uint32_t i = 0; i < 6; i++)
        (void)open_ok(&w, i, i, 1);
    w.now_us += 6 * SECOND;
    tick(&w);
    assert_int_equal(km_core_stats(w.core)->workers_lost, KM_WORKERS_MAX);
    all_free(&w);
    km_core_destroy(&w.core);
}

/* --- random events against a naive model: what each worker believes to hold */

struct belief {
    bool live;
    uint64_t lease, opened_us;
    uint32_t request, count, committed;
    uint32_t blocks[BLOCKS];
};

struct believer {
    bool attached, stopped, lost;
    uint64_t incarnation;
    struct belief held[16];
};

struct model {
    struct world w;
    struct rng rng;
    struct believer workers[PEERS];
    uint32_t requests, incarnations;
};

static void model_check(struct model *m)
{
    uint8_t owner[BLOCKS] = {0};
    uint32_t leases = 0, blocks = 0;
    for (uint32_t i = 0; i < PEERS; i++) {
        for (uint32_t k = 0; k < 16; k++) {
            struct belief *b = &m->workers[i].held[k];
            if (!b->live)
                continue;
            leases++;
            blocks += b->count;
            for (uint32_t n = 0; n < b->count; n++) {
                assert_int_equal(owner[b->blocks[n]]++, 0); /* in one lease only */
                assert_int_equal(m->w.blocks[b->blocks[n]],
                                 n < b->committed ? KM_COMMITTED : KM_WRITING);
            }
        }
    }
    struct km_pool_counts c = km_core_counts(m->w.core);
    assert_int_equal(c.blocks_leased, blocks);
    assert_int_equal(c.slots_total - c.slots_free, leases);
}

static void drop_all(struct believer *b)
{
    memset(b->held, 0, sizeof(b->held));
}

static void random_open(struct model *m, uint32_t i)
{
    struct believer *worker = &m->workers[i];
    struct belief *b = &worker->held[rng_below(&m->rng, 16)];
    uint32_t wanted = 1 + rng_below(&m->rng, 6);
    bool again = b->live && rng_below(&m->rng, 3) == 0;
    if (b->live && !again)
        return;
    uint32_t request = again ? b->request : ++m->requests;
    uint32_t stale = rng_below(&m->rng, 20) == 0 ? EPOCH + 1 : EPOCH;
    uint32_t code = open_code(&m->w, i, request, wanted, rng_below(&m->rng, 2) ? "s" : "", stale);
    if (!worker->attached || stale != EPOCH) {
        assert_int_equal(code, ERR_EPOCH);
        return;
    }
    b->live = false; /* a second open has released the first, full or not */
    if (code == ERR_KV_FULL)
        return;
    assert_int_equal(code, ERR_OK);
    *b = (struct belief){.live = true,
                         .lease = m->w.last.u.kv_open_reply.lease,
                         .opened_us = m->w.now_us,
                         .request = request,
                         .count = wanted};
    memcpy(b->blocks, m->w.blocks_last, wanted * sizeof(uint32_t));
}

static void random_use(struct model *m, uint32_t i)
{
    struct believer *worker = &m->workers[i];
    struct belief *b = &worker->held[rng_below(&m->rng, 16)];
    if (!b->live) {
        uint64_t nonsense = rng_below(&m->rng, 2) ? rng_u64(&m->rng) : b->lease;
        (void)extend_code(&m->w, i, nonsense, rng_below(&m->rng, 4), 1 + rng_below(&m->rng, 4));
        assert_int_not_equal(m->w.last.u.kv_extend_reply.code, ERR_OK);
        release(&m->w, i, nonsense);
        commit(&m->w, i, nonsense, 0, 1);
        return;
    }
    uint32_t wanted = 1 + rng_below(&m->rng, 4);
    switch (rng_below(&m->rng, 4)) {
    case 0: /* cancel in any state */
        release(&m->w, i, b->lease);
        b->live = false;
        break;
    case 1: /* the answer may be lost: then it is asked again */
        if (b->count + wanted <= BLOCKS &&
            extend_code(&m->w, i, b->lease, b->count, wanted) == ERR_OK) {
            if (rng_below(&m->rng, 3) == 0)
                assert_int_equal(extend_code(&m->w, i, b->lease, b->count, wanted), ERR_OK);
            memcpy(b->blocks + b->count, m->w.blocks_last, wanted * sizeof(uint32_t));
            b->count += wanted;
        }
        break;
    case 2: {
        uint32_t back = rng_below(&m->rng, b->committed + 1);
        uint32_t count = rng_below(&m->rng, b->count - b->committed + 1);
        commit(&m->w, i, b->lease, b->committed - back, back + count);
        b->committed += count;
        break;
    }
    default:
        commit(&m->w, i, b->lease, b->committed + 1, b->count); /* bad: nothing happens */
    }
}

static void random_ping(struct model *m, uint32_t i)
{
    struct believer *worker = &m->workers[i];
    uint64_t leases[17];
    uint32_t count = 0;
    for (uint32_t k = 0; k < 16; k++) {
        struct belief *b = &worker->held[k];
        if (!b->live)
            continue;
        if (rng_below(&m->rng, 10) > 0)
            leases[count++] = b->lease;
        else if (worker->attached && m->w.now_us - b->opened_us > 2 * SECOND)
            b->live = false;
    }
    if (rng_below(&m->rng, 4) == 0)
        leases[count++] = rng_u64(&m->rng);
    ping(&m->w, i, worker->incarnation, leases, count);
}

/* Silent and mapped no more: kvmgr has taken what was theirs. */
static void random_killed(struct model *m, bool ticked)
{
    for (uint32_t k = 0; k < PEERS; k++) {
        struct believer *worker = &m->workers[k];
        bool silent = m->w.now_us - m->w.heard_us[k] >= 5 * SECOND;
        worker->lost = silent && (ticked || worker->lost);
        if (!worker->attached || m->w.mapped[k] || !worker->lost)
            continue;
        worker->attached = worker->stopped = false;
        drop_all(worker);
    }
}

/* A stopped worker: it sleeps on, for long at times, wakes with all it had, or is killed. */
static void random_sleep(struct model *m, uint32_t i, uint32_t kind)
{
    if (kind < 10) {
        m->w.now_us += 6 * SECOND;
        tick(&m->w);
        random_killed(m, true);
    } else if (kind < 15) {
        m->workers[i].stopped = false;
    } else if (kind < 20) {
        m->w.mapped[i] = 0;
    }
}

static void random_step(struct model *m)
{
    uint32_t i = rng_below(&m->rng, PEERS);
    struct believer *worker = &m->workers[i];
    uint32_t kind = rng_below(&m->rng, 100);
    m->w.now_us += rng_below(&m->rng, 200000);
    if (worker->stopped && kind > 0) {
        random_sleep(m, i, kind);
        return;
    }
    if (kind < 3 || (!worker->attached && kind < 20)) {
        if (!worker->attached || kind == 0) {
            worker->incarnation = ++m->incarnations;
            drop_all(worker); /* killed, stopped or not */
            m->w.mapped[i] = 0;
            worker->stopped = false;
        }
        attach_as(&m->w, i, worker->incarnation, 2, 6);
        assert_int_equal(m->w.last.u.kv_attach_reply.code, ERR_OK);
        worker->attached = true;
        m->w.mapped[i] = worker->incarnation;
        random_killed(m, false);
    } else if (kind < 40) {
        random_open(m, i);
    } else if (kind < 80) {
        random_use(m, i);
    } else if (kind < 98) {
        random_ping(m, i);
    } else if (kind == 98) {
        m->w.now_us += rng_below(&m->rng, 5 * SECOND);
        tick(&m->w);
        random_killed(m, true);
    } else {
        worker->stopped = worker->attached;
    }
}

static void random_events_leak_nothing(void **state)
{
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct model m = {.w = world_new()};
        rng_init(&m.rng, 0x6b6d0100 + seed);
        for (uint32_t n = 0; n < 1500; n++) {
            random_step(&m);
            model_check(&m);
        }
        km_pool_audit(km_core_pool(m.w.core));
        memset(m.w.mapped, 0, sizeof(m.w.mapped));
        m.w.now_us += 6 * SECOND;
        tick(&m.w);
        all_free(&m.w);
        km_core_destroy(&m.w.core);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_from_open_to_release),
        cmocka_unit_test(a_second_open_releases_the_first),
        cmocka_unit_test(full_is_an_answer),
        cmocka_unit_test(old_epochs_and_strangers_are_told),
        cmocka_unit_test(bad_commits_change_nothing),
        cmocka_unit_test(a_pause_of_our_own_is_nobody_elses_silence),
        cmocka_unit_test(silence_frees_and_asks_for_an_attach),
        cmocka_unit_test(a_stopped_worker_keeps_what_it_may_write_to),
        cmocka_unit_test(lost_workers_do_not_stand_in_the_way),
        cmocka_unit_test(unnamed_leases_are_freed_when_old),
        cmocka_unit_test(a_new_incarnation_frees_at_once),
        cmocka_unit_test(another_geometry_waits_for_the_old_worker),
        cmocka_unit_test(refused_arenas_leave_it_usable),
        cmocka_unit_test(workers_are_bounded),
        cmocka_unit_test(random_events_leak_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
