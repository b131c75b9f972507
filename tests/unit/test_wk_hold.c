/* SPDX-License-Identifier: Apache-2.0 */
/* What the shell of rank 0 says to kvmgr while other ranks have to seal it first: order, content,
 * losses; and its words before there is a core.  The device thread, the socket and the core's turn
 * are played here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "proto/wire.h"
#include "worker/wk_ranks.h"
#include "worker/wk_rows.h"
#include "worker/wk_shell_state.h"

#define SENT_MAX 64u

/* ---- what the files under test call ---- */

static struct {
    struct arena arena;
    struct msg sent[SENT_MAX]; /* in the order on the wire, with what came at once */
    uint32_t sent_count;
    const struct wk_seal *seals; /* handed to the device thread */
    uint32_t seal_count, seal_calls;
    uint32_t steps, fails;
    enum err bus;
} seen;

static void sent_add(const struct msg *m)
{
    assert_true(seen.sent_count < SENT_MAX);
    seen.sent[seen.sent_count++] = *m;
}

enum err bus_send(struct bus_socket *s, const struct bus_peer *peer, const struct bus_frame *frames,
                  uint32_t frame_count)
{
    struct wire_frame f[WIRE_FRAMES_MAX];
    struct err_detail detail;
    struct msg m;
    assert_true(s == NULL && peer == NULL && frame_count <= WIRE_FRAMES_MAX);
    if (seen.bus != ERR_OK)
        return seen.bus;
    for (uint32_t i = 0; i < frame_count; i++)
        f[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    if (wire_decode(&seen.arena, f, frame_count, &m, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    sent_add(&m);
    return ERR_OK;
}

void wk_shell_send(struct wk_shell *s, enum wk_peer to, const struct msg *m)
{
    (void)s;
    assert_int_equal(to, WK_KVMGR);
    sent_add(m);
}

void wk_shell_beat(struct wk_shell *s, enum wk_peer to, const struct msg *m)
{
    wk_shell_send(s, to, m);
}

void wk_exec_seal(struct wk_exec *x, const struct wk_seal *seals, uint32_t count)
{
    assert_null(x);
    seen.seals = seals;
    seen.seal_count = count;
    seen.seal_calls++;
}

static struct model_info info = {.dsa_layers = 1};
static const struct wk_loaded loaded = {.info = &info};

const struct wk_loaded *wk_exec_loaded(const struct wk_exec *x)
{
    (void)x;
    return &loaded;
}

enum err wk_exec_attach(struct wk_exec *x, const struct model_kv *kv, uint32_t epoch)
{
    (void)x;
    (void)kv;
    (void)epoch;
    return ERR_BUSY;
}

void wk_shell_step(struct wk_shell *s, struct wk_event *event)
{
    (void)s;
    assert_int_equal(event->type, WK_EV_KV_DETACHED);
    seen.steps++;
}

void wk_shell_fail(struct wk_shell *s, const char *why)
{
    (void)s;
    (void)why;
    seen.fails++;
}

void wk_shell_draft_beat(struct wk_shell *s)
{
    (void)s;
}

/* ---- a shell without a process ---- */

static struct wk_params params = {.numerics = "fast", .dcp = 1, .seqs_max = 4};
static char ranks_there; /* whose address stands for a group */

static struct wk_shell *shell_make(void)
{
    struct wk_shell *s = mem_take(sizeof *s);
    memset(&seen, 0, sizeof seen);
    arena_init(&seen.arena, 1 << 16, 64 << 20);
    s->magic = WK_SHELL_MAGIC;
    s->loop = loop_create();
    s->params = &params;
    s->ranks = (struct wk_ranks *)(void *)&ranks_there;
    s->loaded = true;
    s->core_options.seqs_max = params.seqs_max;
    s->incarnation = 77;
    s->kv.attached = true;
    s->kv.incarnation = 8;
    s->kv.epoch = 5;
    wk_shell_hold_init(s);
    return s;
}

static void shell_end(struct wk_shell *s)
{
    wk_shell_hold_fini(s);
    loop_destroy(&s->loop);
    arena_fini(&seen.arena);
    mem_give(s);
}

/* Two blocks of a sequence, whose memory is gone as soon as they are said. */
static void commit_say(struct wk_shell *s, uint64_t lease, uint32_t first_block)
{
    struct hash128 hashes[2];
    uint32_t blocks[2] = {40 + first_block, 41 + first_block};
    memset(&hashes[0], (int)(lease + 1), sizeof hashes[0]);
    memset(&hashes[1], (int)(lease + 2), sizeof hashes[1]);
    struct wk_action a = {.type = WK_ACT_KVMGR, .msg = {.type = MSG_KV_COMMIT, .epoch = 5}};
    a.msg.u.kv_commit = (struct msg_kv_commit){.lease = lease,
                                               .first_block = first_block,
                                               .token_count = 1000,
                                               .hash_count = 2,
                                               .hashes = hashes};
    a.blocks = blocks;
    memset(&a.parent, (int)lease, sizeof a.parent);
    wk_shell_hold(s, &a);
    memset(hashes, 0xee, sizeof hashes);
    memset(blocks, 0xee, sizeof blocks);
}

static void snapshot_say(struct wk_shell *s, uint64_t lease, uint32_t slot)
{
    struct wk_action a = {.type = WK_ACT_KVMGR, .msg = {.type = MSG_KV_SNAPSHOT, .epoch = 5}};
    a.msg.u.kv_snapshot =
        (struct msg_kv_snapshot){.lease = lease, .token_count = 512, .slot = slot};
    memset(&a.msg.u.kv_snapshot.hash, 9, sizeof a.msg.u.kv_snapshot.hash);
    wk_shell_hold(s, &a);
}

static void release_say(struct wk_shell *s, uint64_t lease)
{
    struct wk_action a = {.type = WK_ACT_KVMGR, .msg = {.type = MSG_KV_RELEASE, .epoch = 5}};
    a.msg.u.kv_release = (struct msg_kv_release){.lease = lease, .token_count = 7, .keep = true};
    wk_shell_hold(s, &a);
}

static bool all_bytes(const struct hash128 *h, uint64_t byte)
{
    for (size_t i = 0; i < sizeof h->bytes; i++)
        if (h->bytes[i] != byte)
            return false;
    return true;
}

static void expect_sent(uint32_t count, const enum msg_type *types)
{
    assert_int_equal(seen.sent_count, count);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(seen.sent[i].type, types[i]);
}
#define EXPECT(...)                                                                                \
    do {                                                                                           \
        const enum msg_type types_[] = {__VA_ARGS__};                                              \
        expect_sent(ARRAY_COUNT(types_), types_);                                                  \
    } while (0)

/* ---- tests ---- */

static void test_alone_nothing_waits(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    s->ranks = NULL;
    commit_say(s, 1, 0);
    release_say(s, 1);
    EXPECT(MSG_KV_COMMIT, MSG_KV_RELEASE);
    wk_shell_hold_pump(s);
    assert_true(wk_shell_hold_empty(s) && seen.seal_calls == 0);
    shell_end(s);
}

/* With ranks: what needs no seal goes at once while nothing waits, behind what does otherwise. */
static void test_order_and_content(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    release_say(s, 9);
    EXPECT(MSG_KV_RELEASE);
    assert_true(wk_shell_hold_empty(s));
    commit_say(s, 1, 6);
    snapshot_say(s, 1, 30);
    release_say(s, 1);
    assert_false(wk_shell_hold_empty(s));
    assert_int_equal(seen.sent_count, 1);
    wk_shell_hold_pump(s);
    assert_int_equal(seen.seal_calls, 1);
    wk_shell_hold_pump(s); /* one batch at a time */
    assert_int_equal(seen.seal_calls, 1);
    assert_int_equal(seen.seal_count, 3);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(seen.seals[i].snapshot, 0);
        assert_int_equal(seen.seals[i].index, 46 + i);
        assert_int_equal(seen.seals[i].place, 6 + i);
        assert_int_equal(seen.seals[i].zero, 0);
        assert_true(all_bytes(&seen.seals[i].hash, 2 + i));
        assert_true(all_bytes(&seen.seals[i].parent, 1 + i)); /* the one before it */
    }
    assert_int_equal(seen.seals[2].snapshot, 1);
    assert_int_equal(seen.seals[2].index, 30);
    assert_int_equal(seen.seals[2].place, 512);
    assert_true(all_bytes(&seen.seals[2].hash, 9) && all_bytes(&seen.seals[2].parent, 0));

    release_say(s, 2); /* of another request: kvmgr hears all in the order of the core */
    assert_int_equal(seen.sent_count, 1);
    wk_shell_hold_sealed(s, ERR_OK);
    EXPECT(MSG_KV_RELEASE, MSG_KV_COMMIT, MSG_KV_SNAPSHOT, MSG_KV_RELEASE, MSG_KV_RELEASE);
    const struct msg_kv_commit *c = &seen.sent[1].u.kv_commit;
    assert_int_equal(c->lease, 1);
    assert_int_equal(c->first_block, 6);
    assert_int_equal(c->hash_count, 2);
    assert_true(all_bytes(&c->hashes[0], 2) && all_bytes(&c->hashes[1], 3));
    assert_int_equal(seen.sent[1].epoch, 5);
    assert_int_equal(seen.sent[4].u.kv_release.lease, 2);
    assert_true(wk_shell_hold_empty(s));
    shell_end(s);
}

/* What is committed while a batch is sealed makes the next one, which begins by itself. */
static void test_next_batch(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    for (uint64_t turn = 1; turn < 20; turn++) {
        commit_say(s, turn, 0);
        wk_shell_hold_pump(s);
        assert_int_equal(seen.seal_calls,
                         turn == 1 ? 1 : turn - 1); /* the one before is under way */
        if (turn > 1) {
            wk_shell_hold_sealed(s, ERR_OK);
            assert_int_equal(seen.seal_calls, turn);
            assert_int_equal(seen.sent_count, turn - 1);
            assert_int_equal(seen.sent[turn - 2].u.kv_commit.lease, turn - 1);
        }
        assert_int_equal(seen.seal_count, 2);
        assert_true(all_bytes(&seen.seals[0].hash, turn + 1));
    }
    wk_shell_hold_sealed(s, ERR_OK);
    assert_int_equal(seen.sent_count, 19);
    assert_true(wk_shell_hold_empty(s));
    shell_end(s);
}

/* A rank that could not seal: nothing of it is said, and the leases are given up once. */
static void test_a_failed_seal(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    s->core = (struct wk_core *)(void *)&ranks_there; /* there is one; its turns are played */
    commit_say(s, 1, 0);
    wk_shell_hold_pump(s);
    commit_say(s, 2, 0);
    release_say(s, 2);
    wk_shell_hold_sealed(s, ERR_CLOSED);
    EXPECT(MSG_KV_ATTACH); /* asks anew */
    assert_int_equal(seen.steps, 1);
    assert_int_equal(seen.seal_calls, 1); /* the next batch went with the leases */
    assert_false(s->kv.attached);
    assert_true(wk_shell_hold_empty(s));
    shell_end(s);
}

/* Leases that are lost while ranks seal: the device thread reads that batch until its answer, which
 * then changes nothing; what is said under the next leases goes its own way. */
static void test_lost_while_sealing(void **state)
{
    (void)state;
    for (int failed = 0; failed < 2; failed++) {
        struct wk_shell *s = shell_make();
        commit_say(s, 1, 0);
        wk_shell_hold_pump(s);
        commit_say(s, 2, 0);
        wk_shell_hold_drop(s);
        assert_false(wk_shell_hold_empty(s));
        assert_non_null(s->hold.batches[0].first); /* still there */
        assert_null(s->hold.batches[1].first);
        assert_true(all_bytes(&seen.seals[1].hash, 3));
        commit_say(s, 3, 0);
        release_say(s, 3);
        wk_shell_hold_sealed(s, failed ? ERR_CLOSED : ERR_OK);
        assert_true(s->kv.attached && seen.steps == 0);
        assert_int_equal(seen.sent_count, 0);
        assert_int_equal(seen.seal_calls, 2);
        wk_shell_hold_sealed(s, ERR_OK);
        EXPECT(MSG_KV_COMMIT, MSG_KV_RELEASE);
        assert_int_equal(seen.sent[0].u.kv_commit.lease, 3);
        shell_end(s);
    }
}

/* More than fits: nothing more is said, not even what would fit again, until the leases end. */
static void test_too_much(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    for (uint64_t i = 0; i < WK_RANKS_SEALS_MAX / 2; i++)
        commit_say(s, 1, 0);
    assert_false(s->hold.spoilt);
    commit_say(s, 1, 0);
    assert_true(s->hold.spoilt);
    const struct wk_held *last = s->hold.batches[0].last;
    release_say(s, 1);
    assert_ptr_equal(s->hold.batches[0].last, last);
    wk_shell_hold_drop(s);
    assert_true(!s->hold.spoilt && wk_shell_hold_empty(s));
    release_say(s, 2);
    EXPECT(MSG_KV_RELEASE);
    assert_int_equal(seen.sent[0].u.kv_release.lease, 2);
    shell_end(s);
}

/* A message that kvmgr's socket does not take is counted; those behind it go on. */
static void test_unsent_is_counted(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    commit_say(s, 1, 0);
    wk_shell_hold_pump(s);
    seen.bus = ERR_CLOSED;
    wk_shell_hold_sealed(s, ERR_OK);
    assert_int_equal(s->unsent, 1);
    assert_true(wk_shell_hold_empty(s));
    shell_end(s);
}

/* A ping no longer names a lease whose last words may still be held: it waits behind them. */
static void test_a_ping_is_held(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    wk_shell_kv_beat(s);
    EXPECT(MSG_KV_PING);
    commit_say(s, 1, 0);
    release_say(s, 1);
    wk_shell_kv_beat(s);
    wk_shell_hold_pump(s);
    wk_shell_kv_beat(s);
    assert_int_equal(seen.sent_count, 1);
    wk_shell_hold_sealed(s, ERR_OK);
    EXPECT(MSG_KV_PING, MSG_KV_COMMIT, MSG_KV_RELEASE, MSG_KV_PING, MSG_KV_PING);
    assert_int_equal(seen.sent[3].u.kv_ping.incarnation, 77);
    wk_shell_kv_beat(s);
    assert_int_equal(seen.sent_count, 6);
    shell_end(s);
}

/* Before the first arena is whole (the other ranks refuse it) there is no core, but a kvmgr that
 * was started again with another arena is heard, and asked for it. */
static void test_a_new_kvmgr_before_the_core(void **state)
{
    (void)state;
    struct wk_shell *s = shell_make();
    assert_null(s->core);
    wk_shell_kv_beat(s);
    EXPECT(MSG_KV_PING);
    assert_int_equal(seen.sent[0].u.kv_ping.lease_count, 0);
    struct msg m = {.type = MSG_KV_STATE, .epoch = 5, .u.kv_state = {.incarnation = 8}};
    wk_shell_kv_message(s, &m);
    assert_true(s->kv.attached);
    m.u.kv_state.incarnation = 9;
    wk_shell_kv_message(s, &m);
    assert_false(s->kv.attached);
    EXPECT(MSG_KV_PING, MSG_KV_ATTACH);
    wk_shell_kv_message(s, &m); /* an answer to what was asked before */
    wk_shell_kv_beat(s);        /* and no question twice within a second */
    assert_int_equal(seen.sent_count, 2);
    assert_int_equal(seen.steps + seen.fails, 0);
    shell_end(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone_nothing_waits),
        cmocka_unit_test(test_order_and_content),
        cmocka_unit_test(test_next_batch),
        cmocka_unit_test(test_a_failed_seal),
        cmocka_unit_test(test_lost_while_sealing),
        cmocka_unit_test(test_too_much),
        cmocka_unit_test(test_unsent_is_counted),
        cmocka_unit_test(test_a_ping_is_held),
        cmocka_unit_test(test_a_new_kvmgr_before_the_core),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
