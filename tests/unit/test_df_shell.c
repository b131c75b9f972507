/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "drafter/df_params.h"
#include "drafter/df_shell.h"
#include "lib/base/arena.h"
#include "lib/base/clock.h"
#include "lib/base/rng.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "proto/wire.h"

#define GIVE_UP_US 30000000u

/* The drafter's shell and a worker's socket on one loop. */
struct rig {
    char dir[64];
    struct loop *loop;
    struct loop_timer *limit;
    struct df_shell *shell;
    struct bus *bus;
    struct bus_socket *worker;
    struct arena arena, in;
    uint32_t replies, want;
    struct msg last;
    uint32_t last_ids[MSG_DRAFT_IDS_MAX];
    bool gave_up;
};

static void on_limit(void *arg)
{
    struct rig *r = arg;
    r->gave_up = true;
    loop_stop(r->loop);
}

static void on_reply(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                     uint32_t frame_count)
{
    struct rig *r = arg;
    struct wire_frame in[BUS_FRAMES_MAX];
    for (uint32_t i = 0; i < frame_count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&r->in);
    assert_int_equal(wire_decode(&r->in, in, frame_count, &r->last, NULL), ERR_OK);
    if (r->last.type == MSG_DRAFT_REPLY && r->last.u.draft_reply.ids_count > 0)
        memcpy(r->last_ids, r->last.u.draft_reply.ids,
               r->last.u.draft_reply.ids_count * sizeof(uint32_t));
    if (++r->replies == r->want)
        loop_stop(r->loop);
}

static void rig_open(struct rig *r)
{
    memset(r, 0, sizeof(*r));
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-drafter-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    r->loop = loop_create();
    r->limit = loop_timer_create(r->loop, on_limit, r);
    loop_timer_start(r->limit, GIVE_UP_US, false);
    arena_init(&r->arena, 65536, 0);
    arena_init(&r->in, 65536, 0);
    struct df_params p = {.cluster = "test",
                          .redis = "off",
                          .deadline_ms = 10000,
                          .sequences_max = 8,
                          .context_max = 65536,
                          .tokens_max = 100000,
                          .match_min = 1,
                          .match_max = 4,
                          .silence_s = 60,
                          .queue_max = 10000};
    snprintf(p.run_dir, sizeof(p.run_dir), "%s", r->dir);
    struct err_detail detail;
    assert_int_equal(df_shell_create(r->loop, &p, &r->shell, &detail), ERR_OK);
    r->bus = bus_create(r->loop);
    char endpoint[128];
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/drafter.sock", r->dir);
    assert_int_equal(
        bus_connect(r->bus, endpoint, "worker-0", 10000, on_reply, r, &r->worker, &detail), ERR_OK);
}

static void rig_close(struct rig *r)
{
    bus_socket_destroy(&r->worker);
    bus_destroy(&r->bus);
    df_shell_destroy(&r->shell);
    loop_timer_destroy(&r->limit);
    loop_destroy(&r->loop);
    arena_fini(&r->arena);
    arena_fini(&r->in);
    assert_int_equal(rmdir(r->dir), 0); /* nothing is left in it */
}

static void wait_replies(struct rig *r, uint32_t count)
{
    r->want = count;
    if (r->replies < count)
        loop_run(r->loop);
    assert_false(r->gave_up);
    assert_int_equal(r->replies, count);
    r->replies = 0;
}

static void send_msg(struct rig *r, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count;
    arena_reset(&r->arena);
    assert_int_equal(wire_encode(&r->arena, m, frames, &count), ERR_OK);
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    assert_int_equal(bus_send(r->worker, NULL, out, count), ERR_OK);
}

static void send_propose(struct rig *r, uint8_t id, uint32_t base, const uint32_t *ids,
                         uint32_t count, uint32_t anchor, uint64_t step)
{
    struct msg m = {.type = MSG_DRAFT_PROPOSE,
                    .id = {{id}},
                    .u.draft_propose = {.epoch = 3,
                                        .base_length = base,
                                        .anchor = anchor,
                                        .draft_count = 7,
                                        .step = step,
                                        .source = "",
                                        .ids_count = count,
                                        .ids = ids}};
    send_msg(r, &m);
}

static void talks_to_a_worker(void **state)
{
    struct rig r;
    rig_open(&r);
    struct msg m = {.type = MSG_DRAFT_HELLO, .u.draft_hello = {.incarnation = 1}};
    send_msg(&r, &m);
    wait_replies(&r, 1);
    assert_int_equal(r.last.type, MSG_DRAFT_HELLO_REPLY);
    assert_string_equal(r.last.u.draft_hello_reply.source, "ngram");
    assert_true(r.last.u.draft_hello_reply.incarnation != 0);

    const uint32_t ids[] = {5, 6, 7, 8, 5, 6};
    send_propose(&r, 1, 6, NULL, 0, 6, 1);
    wait_replies(&r, 1);
    assert_int_equal(r.last.u.draft_reply.code, ERR_NOT_FOUND);
    m = (struct msg){.type = MSG_DRAFT_OPEN,
                     .id = {{1}},
                     .u.draft_open = {.epoch = 3, .ids_count = 6, .ids = ids}};
    send_msg(&r, &m);
    send_propose(&r, 1, 6, NULL, 0, 6, 2);
    wait_replies(&r, 1);
    assert_int_equal(r.last.u.draft_reply.code, ERR_OK);
    assert_int_equal(r.last.u.draft_reply.step, 2);
    assert_int_equal(r.last.u.draft_reply.ids_count, 7);
    const uint32_t want[] = {7, 8, 5, 6, 7, 8, 5};
    assert_memory_equal(r.last_ids, want, sizeof(want));

    /* Many steps in a burst, each with the token of the one before. */
    uint32_t length = 6;
    for (uint32_t i = 0; i < 5000; i++) {
        uint32_t next = (length + 3) % 4 + 5;
        send_propose(&r, 1, length, &next, 1, next, i);
        length++;
    }
    wait_replies(&r, 5000);
    assert_int_equal(r.last.u.draft_reply.base_length, length);
    assert_int_equal(r.last.u.draft_reply.step, 4999);
    m = (struct msg){.type = MSG_DRAFT_CLOSE, .id = {{1}}};
    send_msg(&r, &m);
    send_propose(&r, 1, length, NULL, 0, 5, 9);
    wait_replies(&r, 1);
    assert_int_equal(r.last.u.draft_reply.code, ERR_NOT_FOUND);
    rig_close(&r);
}

/* Noise, cut and altered messages in between: the drafter drops them and goes on. */
static void survives_garbage(void **state)
{
    struct rig r;
    rig_open(&r);
    struct rng rng;
    rng_init(&rng, 2026);
    const uint32_t ids[] = {1, 2, 1, 2};
    for (int round = 0; round < 2000; round++) {
        struct msg m = {.type = MSG_DRAFT_OPEN,
                        .id = {{(uint8_t)round}},
                        .u.draft_open = {.epoch = 3, .ids_count = 4, .ids = ids}};
        struct wire_frame frames[WIRE_FRAMES_MAX];
        struct bus_frame out[BUS_FRAMES_MAX];
        static unsigned char copy[BUS_FRAMES_MAX][256];
        uint32_t count;
        arena_reset(&r.arena);
        assert_int_equal(wire_encode(&r.arena, &m, frames, &count), ERR_OK);
        for (uint32_t i = 0; i < count; i++) {
            assert_true(frames[i].count <= sizeof(copy[0]));
            memcpy(copy[i], frames[i].bytes, frames[i].count);
            out[i] = (struct bus_frame){copy[i], frames[i].count};
        }
        for (uint32_t k = 0; k < 1 + rng_below(&rng, 3); k++) {
            uint32_t which = rng_below(&rng, count);
            switch (rng_below(&rng, 4)) {
            case 0:
                copy[which][rng_below(&rng, 60)] = (unsigned char)rng_u32(&rng);
                break;
            case 1:
                out[which].count = rng_below(&rng, (uint32_t)out[which].count + 1);
                break;
            case 2:
                if (count < BUS_FRAMES_MAX)
                    out[count++] = (struct bus_frame){copy[0], rng_below(&rng, 100)};
                break;
            default:
                copy[0][5] = (unsigned char)rng_below(&rng, 60);
                break;
            }
        }
        assert_int_equal(bus_send(r.worker, NULL, out, count), ERR_OK);
    }
    struct msg m = {.type = MSG_DRAFT_OPEN,
                    .id = {{250}},
                    .u.draft_open = {.epoch = 3, .ids_count = 4, .ids = ids}};
    send_msg(&r, &m);
    r.want = UINT32_MAX;
    send_propose(&r, 250, 4, NULL, 0, 2, 77);
    uint64_t start_us = clock_mono_us();
    /* Altered messages may have been answered too; ours is the one with step 77. */
    do {
        r.want = r.replies + 1;
        loop_run(r.loop);
        assert_false(r.gave_up);
    } while (r.last.type != MSG_DRAFT_REPLY || r.last.u.draft_reply.step != 77);
    assert_true(clock_mono_us() - start_us < GIVE_UP_US);
    assert_int_equal(r.last.u.draft_reply.code, ERR_OK);
    assert_int_equal(r.last_ids[0], 1);
    rig_close(&r);
}

static void refuses_what_it_cannot_bind(void **state)
{
    struct rig r;
    rig_open(&r);
    struct df_params p = {.cluster = "test",
                          .redis = "off",
                          .deadline_ms = 1,
                          .sequences_max = 1,
                          .context_max = 16,
                          .tokens_max = 16,
                          .match_min = 1,
                          .match_max = 1,
                          .silence_s = 60,
                          .queue_max = 16};
    snprintf(p.run_dir, sizeof(p.run_dir), "%s/absent", r.dir);
    struct df_shell *second = NULL;
    struct err_detail detail;
    assert_int_equal(df_shell_create(r.loop, &p, &second, &detail), ERR_IO);
    assert_non_null(strstr(detail.text, "drafter.sock"));
    assert_null(second);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(talks_to_a_worker),
        cmocka_unit_test(survives_garbage),
        cmocka_unit_test(refuses_what_it_cannot_bind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
