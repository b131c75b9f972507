/* SPDX-License-Identifier: Apache-2.0 */
/* What drafting costs beside the drafter's own forward: hidden states into the tap ring, messages
 * to a process in the drafter's place and back, as a share of a verify step of eight rows.  Where
 * the model has an MTP layer, also eight sequences through it one by one and together.
 *
 *   bench_draft DIR [--threads N] [--steps N] */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/model/config.h"
#include "lib/model/model.h"
#include "lib/model/mtp.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "proto/wire.h"
#include "worker/wk_taps.h"

#define ROWS      8u /* the anchor and seven drafts */
#define STEPS_MAX 512u
#define BLOCK     256u
#define PROMPT    256u
#define TAPS      5u
#define SEQUENCES 8u

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, uint32_t n)
{
    qsort(x, n, sizeof(*x), by_value);
    return n % 2 != 0 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* ---- messages ---- */

struct party {
    struct loop *loop;
    struct bus *bus;
    struct bus_socket *socket;
    struct arena arena;
    bool answered;
};

static void party_send(struct party *p, const struct bus_peer *peer, const struct msg *msg)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    CHECK(wire_encode(&p->arena, msg, frames, &count) == ERR_OK);
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    CHECK(bus_send(p->socket, peer, out, count) == ERR_OK);
}

static void party_decode(struct party *p, const struct bus_frame *frames, uint32_t count,
                         struct msg *ret_msg)
{
    struct wire_frame in[BUS_FRAMES_MAX];
    struct err_detail detail;
    arena_reset(&p->arena);
    for (uint32_t i = 0; i < count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    CHECK(wire_decode(&p->arena, in, count, ret_msg, &detail) == ERR_OK);
}

/* In the drafter's place: seven ids for every proposal. */
static void on_proposal(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                        uint32_t count)
{
    static const uint32_t ids[ROWS - 1] = {1, 2, 3, 4, 5, 6, 7};
    struct party *p = arg;
    struct msg msg;
    party_decode(p, frames, count, &msg);
    struct msg reply = {.type = MSG_DRAFT_REPLY, .id = msg.id};
    reply.u.draft_reply = (struct msg_draft_reply){.code = ERR_OK,
                                                   .base_length = msg.u.draft_propose.base_length,
                                                   .step = msg.u.draft_propose.step,
                                                   .ids_count = ROWS - 1,
                                                   .ids = ids};
    party_send(p, peer, &reply);
}

static void on_reply(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                     uint32_t count)
{
    struct party *p = arg;
    struct msg msg;
    (void)peer;
    party_decode(p, frames, count, &msg);
    CHECK(msg.type == MSG_DRAFT_REPLY && msg.u.draft_reply.ids_count == ROWS - 1);
    p->answered = true;
    loop_stop(p->loop);
}

static void party_open(struct party *p)
{
    *p = (struct party){.loop = loop_create()};
    arena_init(&p->arena, 1u << 16, 1u << 20);
    p->bus = bus_create(p->loop);
}

static void drafter_run(const char *endpoint)
{
    struct party p;
    struct err_detail detail;
    party_open(&p);
    CHECK(bus_bind(p.bus, endpoint, 64, on_proposal, &p, &p.socket, &detail) == ERR_OK);
    loop_run(p.loop);
    _exit(0);
}

/* From the proposal's encoding to the reply's decoding, as a worker does it. */
static double exchange_us(struct party *p, uint64_t step)
{
    uint32_t ids[ROWS] = {9, 8, 7, 6, 5, 4, 3, 2};
    struct msg msg = {.type = MSG_DRAFT_PROPOSE, .id = {{1, 2, 3}}};
    msg.u.draft_propose = (struct msg_draft_propose){.epoch = 1,
                                                     .base_length = 1000,
                                                     .anchor = 2,
                                                     .draft_count = ROWS - 1,
                                                     .step = step,
                                                     .source = "",
                                                     .ids_count = ROWS,
                                                     .ids = ids,
                                                     .tap_end = step * ROWS};
    uint64_t begun = clock_mono_us();
    p->answered = false;
    arena_reset(&p->arena);
    party_send(p, NULL, &msg);
    while (!p->answered)
        loop_run(p->loop);
    return (double)(clock_mono_us() - begun);
}

/* ---- the model ---- */

struct rig {
    struct model *m;
    struct model_cursor *c;
    struct model_kv kv;
    uint32_t *blocks, *ids;
    uint32_t block_count, position;
};

static struct model *load(const char *directory, uint32_t threads, bool mtp)
{
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    struct model_options options = {
        .directory = directory, .numerics = MODEL_FAST, .threads = threads, .mtp = mtp};
    if (model_load(&options, &m, &detail) == ERR_OK)
        return m;
    if (mtp)
        return load(directory, threads, false);
    fprintf(stderr, "%s\n", detail.text);
    exit(1);
}

static void rig_open(struct rig *r, struct model *m, uint32_t tokens)
{
    const struct model_info *info = model_info(m);
    struct err_detail detail;
    struct model_cursor_options options = {PROMPT, 1, ROWS, tokens};
    struct model_kv *kv = &r->kv;
    *r = (struct rig){.m = m, .block_count = (tokens + BLOCK - 1) / BLOCK};
    CHECK(model_cursor_create(m, &options, &r->c, &detail) == ERR_OK);
    kv->kv_type = kv->index_type = KV_ROW_F32;
    kv->block_tokens = BLOCK;
    kv->index_offset = BLOCK * kv_row_bytes(KV_ROW_F32, info->latent_dim);
    kv->layer_stride =
        kv->index_offset + BLOCK / info->index_kpool * kv_row_bytes(KV_ROW_F32, info->index_dim);
    kv->block_stride = kv->layer_stride * (info->dsa_layers > 0 ? info->dsa_layers : 1);
    kv->block_count = r->block_count;
    kv->blocks = mem_take_array(kv->block_count, kv->block_stride);
    kv->slot_count = 1;
    kv->slot_stride = info->state_bytes;
    kv->slots = mem_take(info->state_bytes);
    r->blocks = mem_take_array(r->block_count, sizeof(uint32_t));
    r->ids = mem_take_array(tokens, sizeof(uint32_t));
    for (uint32_t i = 0; i < r->block_count; i++)
        r->blocks[i] = i;
    for (uint32_t i = 0; i < tokens; i++) /* other experts for each token */
        r->ids[i] = (uint32_t)((i * 2654435761u) >> 8) % info->vocab_size;
}

static void rig_close(struct rig *r)
{
    model_cursor_destroy(&r->c);
    mem_give(r->kv.blocks);
    mem_give(r->kv.slots);
    mem_give(r->blocks);
    mem_give(r->ids);
}

static double forward_us(struct rig *r, uint32_t rows, uint32_t logits_from)
{
    struct model_seq seq = {.position_start = r->position,
                            .row_count = rows,
                            .fresh = r->position == 0,
                            .logits_from = logits_from,
                            .blocks = r->blocks,
                            .block_count = r->block_count};
    struct model_batch batch = {1, rows, &seq, r->ids + r->position};
    uint64_t begun = clock_mono_us();
    model_begin(r->c, &r->kv, &batch);
    (void)model_finish(r->c);
    r->position += rows;
    return (double)(clock_mono_us() - begun);
}

static struct wk_taps *taps_new(const struct model_info *info)
{
    struct wk_taps *taps = NULL;
    struct err_detail detail;
    struct wk_taps_options o = {.type = TAP_BF16,
                                .hidden = info->hidden,
                                .layer_count = info->layer_count < TAPS ? info->layer_count : TAPS,
                                .bytes_max = 16u << 20};
    rng_system(&o.incarnation, sizeof o.incarnation);
    for (uint32_t i = 0; i < o.layer_count; i++)
        o.layers[i] = (i + 1) * (info->layer_count - 1) / o.layer_count;
    if (wk_taps_create(&o, &taps, &detail) == ERR_OK)
        return taps;
    fprintf(stderr, "%s\n", detail.text);
    exit(1);
}

static void bench_transport(struct rig *r, struct party *p, uint32_t steps)
{
    static double plain[STEPS_MAX], watched[STEPS_MAX], write[STEPS_MAX], told[STEPS_MAX];
    struct wk_taps *taps = taps_new(model_info(r->m));
    struct msg_id id = {{7}};
    forward_us(r, PROMPT, PROMPT);
    for (uint32_t i = 0; i < steps; i++) { /* in turn: the machine's moods hit all alike */
        wk_taps_watch(NULL, r->c);
        plain[i] = forward_us(r, ROWS, 0);
        wk_taps_watch(taps, r->c);
        watched[i] = forward_us(r, ROWS, 0);
        uint64_t begun = clock_mono_us();
        for (uint32_t k = 0; k < 16; k++)
            wk_taps_write(taps, r->c, &id, i, 0, ROWS, r->position);
        write[i] = (double)(clock_mono_us() - begun) / 16;
        told[i] = exchange_us(p, i);
    }
    double step = median(plain, steps), tap = median(write, steps), tell = median(told, steps);
    printf("verify step of %u rows %.2f ms, with %u layers watched %.2f ms; taps of %u rows into "
           "the ring %.1f us, proposal and reply %.1f us (medians of %u)\n",
           ROWS, step / 1e3, TAPS, median(watched, steps) / 1e3, ROWS, tap, tell, steps);
    printf("tap write and messages: %.2f %% of a step; of the least of each, %.1f and %.1f us in "
           "%.2f ms, %.2f %%\n",
           100 * (tap + tell) / step, write[0], told[0], plain[0] / 1e3,
           100 * (write[0] + told[0]) / plain[0]);
    wk_taps_destroy(&taps);
}

/* Drafts of the model's own layer for several sequences after one step. */
static void bench_mtp(struct rig *r, uint32_t steps)
{
    static double alone[STEPS_MAX], together[STEPS_MAX];
    struct mtp_options o = {.entries = SEQUENCES, .context_max = 8192, .tokens_max = 65536};
    struct mtp_feed feeds[SEQUENCES];
    struct err_detail detail;
    struct mtp *t = NULL;
    CHECK(mtp_create(r->m, &o, &t, &detail) == ERR_OK);
    for (uint32_t i = 0; i < 2 * steps; i++) {
        for (uint32_t s = 0; s < SEQUENCES; s++) /* four rows of the last step */
            feeds[s] = (struct mtp_feed){.rows = {.entry = s,
                                                  .cursor = r->c,
                                                  .count = 4,
                                                  .position = 4 * i,
                                                  .ids = r->ids + 4 * s,
                                                  .next = r->ids[4 * s + 4]},
                                         .drafts_max = 3};
        uint64_t begun = clock_mono_us();
        for (uint32_t s = 0; i % 2 == 0 && s < SEQUENCES; s++)
            mtp_feed(t, &feeds[s], 1);
        if (i % 2 != 0)
            mtp_feed(t, feeds, SEQUENCES);
        (i % 2 == 0 ? alone : together)[i / 2] = (double)(clock_mono_us() - begun);
    }
    double one = median(alone, steps), all = median(together, steps);
    printf("MTP, %u sequences, four rows and three drafts each: one by one %.2f ms, together "
           "%.2f ms, %.2f of it\n",
           SEQUENCES, one / 1e3, all / 1e3, all / one);
    mtp_destroy(&t);
}

int main(int argc, char **argv)
{
    uint32_t threads = 0, steps = 32;
    const char *directory = argc > 1 ? argv[1] : NULL;
    for (int i = 2; i + 1 < argc; i += 2) {
        uint32_t value = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--threads") == 0)
            threads = value;
        else if (strcmp(argv[i], "--steps") == 0)
            steps = value;
        else
            directory = NULL;
    }
    if (directory == NULL || steps == 0 || steps > STEPS_MAX) {
        fprintf(stderr, "bench_draft DIR [--threads N] [--steps N]\n");
        return 2;
    }
    char endpoint[64];
    snprintf(endpoint, sizeof(endpoint), "ipc://" P_tmpdir "/bench_draft.%d", (int)getpid());
    pid_t drafter = fork();
    CHECK(drafter >= 0);
    if (drafter == 0)
        drafter_run(endpoint);
    struct party p;
    struct err_detail detail;
    party_open(&p);
    CHECK(bus_connect(p.bus, endpoint, "worker-0", 64, on_reply, &p, &p.socket, &detail) == ERR_OK);
    struct model *m = load(directory, threads, true);
    struct rig r;
    rig_open(&r, m, PROMPT + 2 * ROWS * steps + BLOCK);
    exchange_us(&p, 0); /* the connection is there */
    bench_transport(&r, &p, steps);
    if (model_config(m)->mtp_layers > 0)
        bench_mtp(&r, steps);
    rig_close(&r);
    model_destroy(&m);
    bus_socket_destroy(&p.socket);
    bus_destroy(&p.bus);
    arena_fini(&p.arena);
    loop_destroy(&p.loop);
    CHECK(kill(drafter, SIGTERM) == 0 && waitpid(drafter, NULL, 0) == drafter);
    unlink(endpoint + strlen("ipc://"));
    return 0;
}
