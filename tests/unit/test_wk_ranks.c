/* SPDX-License-Identifier: Apache-2.0 */
/* A group of two ranks from inside: what rank 1 admits, which shapes it takes, what waits. */
#include "tests/unit/fabric_world.h"
#include "tests/unit/rows_world.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include "lib/base/clock.h"
#include "lib/net/loop.h"
#include "worker/wk_exec.h"
#include "worker/wk_exec_tables.h"
#include "worker/wk_params.h"
#include "worker/wk_plan.h"
#include "worker/wk_ranks.h"
#include "worker/wk_taps.h"

/* ---- admission ---- */

#define ENTRIES 4u
#define VOCAB   50u
#define BT      16u

static const struct wk_tables_room room_free = {
    .prefill_rows = 32, .prefill_seqs = 2, .decode_rows = 8, .decode_seqs = 2, .block_tokens = BT};

/* Two sequences of 20 and 5 rows that begin. */
static void prefill_fill(struct wk_plan *p)
{
    wk_plan_clear(p, 1, 1, WK_PLAN_PREFILL);
    p->begin = true;
    p->seq_count = p->setup_count = 2;
    p->row_count = 25;
    p->block_count = 3;
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t rows = i == 0 ? 20 : 5;
        p->seqs[i] = (struct wk_plan_seq){.entry = i,
                                          .setup = i,
                                          .state_slot = i,
                                          .fresh = true,
                                          .row_count = rows,
                                          .logits_from = rows - 1,
                                          .ids_at = i == 0 ? 0 : 20,
                                          .block_count = i == 0 ? 2 : 1,
                                          .blocks_at = i == 0 ? 0 : 2};
        p->setups[i] = (struct wk_plan_setup){.repetition_penalty = 1.5};
    }
}

/* A step of the first of them. */
static void decode_fill(struct wk_plan *p)
{
    wk_plan_clear(p, 2, 1, WK_PLAN_DECODE);
    p->seq_count = 1;
    p->row_count = 3;
    p->seqs[0] = (struct wk_plan_seq){.setup = WK_NONE,
                                      .position_start = 20,
                                      .row_count = 3,
                                      .journal = true,
                                      .block_first = 2,
                                      .final_count = 1};
}

#define REFUSED(words)                                                                             \
    do {                                                                                           \
        struct err_detail d_ = {{0}};                                                              \
        assert_int_equal(wk_tables_admit(t, &room, p, &d_), ERR_INVALID);                          \
        if (strstr(d_.text, words) == NULL)                                                        \
            fail_msg("%s", d_.text);                                                               \
    } while (0)

static void test_admission(void **state)
{
    (void)state;
    struct err_detail detail;
    struct wk_tables_room room = room_free;
    struct wk_tables *t = wk_tables_create(ENTRIES, VOCAB);
    struct wk_plan *p = wk_plan_create(4, 64, 16, 64);
    wk_tables_blocks(t, 4);
    prefill_fill(p);
    assert_int_equal(wk_tables_admit(t, &room, p, &detail), ERR_OK);
    p->seqs[1].entry = ENTRIES;
    REFUSED("no such entry");
    prefill_fill(p);
    p->seqs[1].setup = 2;
    REFUSED("does not have");
    prefill_fill(p);
    p->seqs[0].setup = WK_NONE;
    REFUSED("fresh without");
    prefill_fill(p);
    p->seqs[0].fresh = false;
    p->seqs[0].position_start = 10; /* penalties, and nothing to count */
    REFUSED("before its rows are missing");
    prefill_fill(p);
    p->seqs[0].block_first = 1;
    REFUSED("continue its table");
    prefill_fill(p);
    p->seqs[0].block_count = 5;
    REFUSED("continue its table");
    prefill_fill(p);
    p->seqs[0].block_count = 1;
    REFUSED("beyond its blocks");
    prefill_fill(p);
    p->seqs[0].logits_from = 0;
    REFUSED("rows with logits");
    prefill_fill(p);
    p->seqs[1].ids_at = 19;
    REFUSED("not next");
    prefill_fill(p);
    p->row_count = 26;
    REFUSED("26 rows, its sequences have 25");
    prefill_fill(p);
    p->seqs[1].entry = 0;
    REFUSED("twice");
    prefill_fill(p);
    p->seqs[1].state_slot = 0;
    REFUSED("another's");
    prefill_fill(p);
    room.prefill_rows = 24;
    REFUSED("at most 24");
    room = room_free;
    room.prefill_seqs = 1;
    REFUSED("of 1");
    room = room_free;
    room.paused = true;
    REFUSED("one is paused");
    p->begin = false;
    REFUSED("names rows");
    wk_plan_clear(p, 1, 1, WK_PLAN_ABANDON);
    assert_int_equal(wk_tables_admit(t, &room, p, &detail), ERR_OK);
    room = room_free;
    REFUSED("none is paused");

    prefill_fill(p);
    wk_tables_take(t, p);
    decode_fill(p);
    assert_int_equal(wk_tables_admit(t, &room, p, &detail), ERR_OK);
    p->seqs[0].logits_from = 1;
    REFUSED("rows with logits");
    decode_fill(p);
    p->seqs[0].final_count = 0;
    REFUSED("tokens before them");
    decode_fill(p);
    p->seqs[0].position_start = 30;
    REFUSED("beyond its blocks");
    decode_fill(p);
    p->seqs[0].block_first = 0;
    REFUSED("continue its table");
    decode_fill(p);
    p->seq_count = 0;
    REFUSED("0 sequences");
    wk_plan_destroy(&p);
    wk_tables_destroy(&t);
}

/* ---- shapes ---- */

static const struct kv_geometry own = {.dsa_layers = 2,
                                       .latent_dim = 32,
                                       .index_dim = 8,
                                       .index_kpool = 4,
                                       .ranks = 1,
                                       .state_bytes = 640};

struct duo {
    struct world w;
    struct wk_ranks *ranks[2];
    struct rows_world rows;             /* of rank 1 */
    uint64_t lives;                     /* of rank 1: each is a worker of its own */
    const struct kv_geometry *geometry; /* of rank 1 */
    uint32_t interleave, boot;
    uint32_t floor;         /* of the bandwidth, for rank 1 alone */
    struct err_detail told; /* of rank 0 */
    pthread_t thread;
    atomic_bool stop;
    bool formed; /* rank 1 goes on in the group that it has */
    /* of rank 1 */
    struct wk_ranks_heard heard;
    struct err_detail detail;
    enum err code;
};

static struct wk_ranks *duo_open(struct duo *d, uint32_t rank)
{
    struct wk_ranks *r = NULL;
    struct err_detail detail = {{0}};
    if (rank > 0 && d->rows.kvmgr == NULL)
        rows_world_init(&d->rows, d->w.dir, d->boot);
    if (rank > 0)
        rows_world_worker(&d->rows, 2000 + d->lives++);
    struct wk_ranks_options o = {.rank = rank,
                                 .ranks = 2,
                                 .path = d->w.path,
                                 .nodes = "",
                                 .rows = rank > 0 ? d->rows.rows : NULL,
                                 .deadline_ms = 5000,
                                 .silence_ms = 3000,
                                 .interleave = d->interleave,
                                 .floors.bandwidth_mb_min = rank > 0 ? d->floor : 0};
    if (wk_ranks_create(&o, &r, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return r;
}

static void duo_fini(struct duo *d)
{
    wk_ranks_destroy(&d->ranks[1]);
    wk_ranks_destroy(&d->ranks[0]);
    if (d->rows.kvmgr != NULL)
        rows_world_fini(&d->rows);
    world_fini(&d->w);
}

/* Rank 1 forms the group and hears one order. */
static void *other_main(void *arg)
{
    static const struct hash128 settings = {{1}};
    struct duo *d = arg;
    struct wk_ranks_hear want = {.geometry = d->geometry};
    MUST(d->formed || wk_ranks_form(d->ranks[1], &settings, &d->stop, &d->detail) == ERR_OK);
    d->heard.order = WK_ORDER_NONE;
    do {
        d->code = wk_ranks_hear(d->ranks[1], &want, 100, &d->heard, &d->detail);
    } while (d->code == ERR_OK && d->heard.order == WK_ORDER_NONE);
    return NULL;
}

static enum err shape_tell(struct duo *d, const struct wk_ranks_shape *shape,
                           struct hash128 *ret_memory)
{
    static const struct hash128 settings = {{1}};
    struct err_detail detail;
    assert_int_equal(pthread_create(&d->thread, NULL, other_main, d), 0);
    assert_int_equal(wk_ranks_form(d->ranks[0], &settings, &d->stop, &detail), ERR_OK);
    enum err e = wk_ranks_tell_shape(d->ranks[0], shape, ret_memory, &d->told);
    pthread_join(d->thread, NULL);
    return e;
}

static struct wk_ranks_shape shape_good(void)
{
    struct wk_ranks_shape s;
    memset(&s, 0, sizeof s);
    s.geometry = own;
    s.geometry.block_tokens = s.geometry.interleave = BT;
    s.geometry.kv_dtype = KV_BF16;
    s.geometry.index_dtype = KV_F32;
    s.geometry.snapshot_dtype = KV_F32;
    s.geometry.state_bytes = 1280; /* rank 0 may have more heads */
    s.block_count = 12;
    s.live_count = 2;
    s.slot_count = 3;
    s.epoch = 41;
    s.step_last = 9;
    return s;
}

/* Whatever rank 0 says, rank 1 computes its own layout or refuses by name. */
static void test_shapes(void **state)
{
    (void)state;
    struct duo d = {.geometry = &own, .boot = 7};
    struct hash128 memory, again;
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++)
        d.ranks[r] = duo_open(&d, r);
    struct wk_ranks_shape good = shape_good();
    assert_int_equal(shape_tell(&d, &good, &memory), ERR_OK);
    assert_int_equal(d.code, ERR_OK);
    assert_int_equal(d.heard.order, WK_ORDER_SHAPE);
    const struct model_kv *kv = &d.heard.kv;
    assert_int_equal(kv->block_tokens, BT);
    assert_int_equal(kv->index_offset, BT * 32 * 2);
    assert_int_equal(kv->slot_stride, 4096);
    memset(kv->blocks, 5, kv->block_count * kv->block_stride);
    memset(kv->slots, 5, kv->slot_count * kv->slot_stride);
    /* Both show the same pair, and it says something. */
    struct wk_agree_epochs a = wk_ranks_epochs(d.ranks[0]), b = wk_ranks_epochs(d.ranks[1]);
    assert_int_equal(a.self, 41);
    assert_int_equal(b.peer, a.self);
    assert_int_equal(b.self, a.peer);
    assert_int_not_equal(a.peer, 0);

    static const struct {
        size_t at;
        uint32_t value;
        const char *words;
    } bad[] = {
        {offsetof(struct wk_ranks_shape, geometry.latent_dim), 33, "latent_dim is 33, here 32"},
        {offsetof(struct wk_ranks_shape, geometry.dsa_layers), 1u << 30, "dsa_layers"},
        {offsetof(struct wk_ranks_shape, geometry.index_kpool), 0, "index_kpool"},
        {offsetof(struct wk_ranks_shape, geometry.ranks), 2, "ranks is 2"},
        {offsetof(struct wk_ranks_shape, geometry.block_tokens), 0, "block_tokens"},
        {offsetof(struct wk_ranks_shape, geometry.block_tokens), 18, "block_tokens"},
        {offsetof(struct wk_ranks_shape, geometry.interleave), 6, "interleave"},
        {offsetof(struct wk_ranks_shape, geometry.kv_dtype), 9, "kv_dtype"},
        {offsetof(struct wk_ranks_shape, geometry.index_dtype), 0, "index_dtype"},
        {offsetof(struct wk_ranks_shape, geometry.snapshot_dtype), KV_FP8, "snapshot_dtype"},
        {offsetof(struct wk_ranks_shape, block_count), UINT32_MAX, "block_count"},
        {offsetof(struct wk_ranks_shape, slot_count), 0, "slot_count"},
        {offsetof(struct wk_ranks_shape, live_count), 4, "live_count: 4 of 3"},
    };
    for (size_t i = 0; i < ARRAY_COUNT(bad); i++) {
        struct wk_ranks_shape s = good;
        memcpy((uint8_t *)&s + bad[i].at, &bad[i].value, sizeof bad[i].value);
        assert_int_not_equal(shape_tell(&d, &s, &again), ERR_OK);
        assert_int_not_equal(d.code, ERR_OK);
        if (strstr(d.detail.text, bad[i].words) == NULL)
            fail_msg("%zu: %s", i, d.detail.text);
        if (strstr(d.told.text, "rank 1 refuses") == NULL ||
            strstr(d.told.text, bad[i].words) == NULL)
            fail_msg("%zu: %s", i, d.told.text);
    }

    /* The same shape finds the same rows; other types of the same size are other rows. */
    wk_fabric_leave(wk_ranks_fabric(d.ranks[0]));
    assert_int_equal(shape_tell(&d, &good, &again), ERR_OK);
    assert_memory_equal(&memory, &again, sizeof memory);
    assert_int_equal(d.heard.kv.blocks[0], 5);
    struct wk_ranks_shape other = good;
    other.geometry.kv_dtype = KV_FP8;
    assert_int_equal(shape_tell(&d, &other, &again), ERR_OK);
    assert_int_equal(d.heard.kv.blocks[0], 0);
    assert_memory_not_equal(&memory, &again, sizeof memory);
    assert_int_equal(d.heard.kv.snapshot_type, KV_ROW_F32);
    other.geometry.snapshot_dtype = KV_BF16;
    assert_int_equal(shape_tell(&d, &other, &again), ERR_OK);
    assert_int_equal(d.heard.kv.slot_count, 2);
    assert_int_equal(d.heard.kv.snapshot_count, 1);
    assert_int_equal(d.heard.kv.snapshot_type, KV_ROW_BF16);
    duo_fini(&d);
}

static uint64_t memory_bytes(const struct duo *d)
{
    char memory[128];
    struct stat st;
    snprintf(memory, sizeof memory, "%s/rows", d->w.dir);
    assert_int_equal(stat(memory, &st), 0);
    return (uint64_t)st.st_size;
}

/* With rows by position a block is half as large on each of two ranks. */
static void test_shapes_by_position(void **state)
{
    (void)state;
    struct kv_geometry half = own;
    struct hash128 memory;
    half.rank = 1;
    half.ranks = 2;
    half.interleave = 16;
    struct duo d = {.geometry = &half};
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++)
        d.ranks[r] = duo_open(&d, r);
    struct wk_ranks_shape good = shape_good();
    good.geometry.block_tokens = 512;
    good.geometry.ranks = 2;
    good.geometry.interleave = 16;
    assert_int_equal(shape_tell(&d, &good, &memory), ERR_OK);
    assert_int_equal(d.code, ERR_OK);
    const struct model_kv *kv = &d.heard.kv;
    assert_int_equal(kv->block_tokens, 512);
    assert_int_equal(kv->index_offset, 256 * 32 * 2);
    assert_int_equal(kv->block_stride, 2 * (256 * 32 * 2 + 256 / 4 * 8 * 4) + 4096); /* guard */
    assert_int_equal(memory_bytes(&d), 3 * 4096 + 12 * kv->block_stride + 3 * 4096);

    static const struct {
        size_t at;
        uint32_t value;
        const char *words;
    } bad[] = {
        {offsetof(struct wk_ranks_shape, geometry.rank), 1, "rank is 1, here 0"},
        {offsetof(struct wk_ranks_shape, geometry.ranks), 1, "ranks is 1, here 2"},
        {offsetof(struct wk_ranks_shape, geometry.interleave), 32, "interleave is 32, here 16"},
        {offsetof(struct wk_ranks_shape, geometry.block_tokens), 16, "block_tokens"},
    };
    for (size_t i = 0; i < ARRAY_COUNT(bad); i++) {
        struct wk_ranks_shape s = good;
        memcpy((uint8_t *)&s + bad[i].at, &bad[i].value, sizeof bad[i].value);
        assert_int_not_equal(shape_tell(&d, &s, &memory), ERR_OK);
        if (strstr(d.detail.text, bad[i].words) == NULL)
            fail_msg("%zu: %s", i, d.detail.text);
    }
    duo_fini(&d);
}

/* Rows live as long as the host is up, in whichever process. */
static void test_rows_end_with_the_host(void **state)
{
    (void)state;
    static const struct {
        uint32_t boot;
        bool kept;
    } lives[] = {{7, false}, {7, true}, {8, false}, {8, true}};
    struct duo d = {.geometry = &own};
    struct hash128 memory[ARRAY_COUNT(lives)];
    struct wk_ranks_shape good = shape_good();
    world_init(&d.w, 2, 1024);
    d.ranks[0] = duo_open(&d, 0);
    for (size_t i = 0; i < ARRAY_COUNT(lives); i++) {
        d.boot = lives[i].boot;
        d.ranks[1] = duo_open(&d, 1);
        rows_world_kvmgr(&d.rows, d.boot);
        assert_int_equal(shape_tell(&d, &good, &memory[i]), ERR_OK);
        assert_int_equal(d.heard.kv.blocks[0], lives[i].kept ? 5 : 0);
        if (i > 0)
            assert_int_equal(memcmp(&memory[i], &memory[i - 1], sizeof *memory) == 0,
                             lives[i].kept);
        memset(d.heard.kv.blocks, 5, d.heard.kv.block_stride);
        wk_ranks_destroy(&d.ranks[1]);
        wk_fabric_leave(wk_ranks_fabric(d.ranks[0]));
    }
    d.ranks[1] = duo_open(&d, 1);
    duo_fini(&d);
}

/* Rank 0 hears that all have sealed what it names, or whose fault it is; then the group is over. */
static void test_seals_are_agreed_on(void **state)
{
    (void)state;
    struct duo d = {.geometry = &own, .boot = 7};
    struct hash128 memory;
    struct err_detail detail = {{0}};
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++)
        d.ranks[r] = duo_open(&d, r);
    struct wk_ranks_shape good = shape_good();
    assert_int_equal(shape_tell(&d, &good, &memory), ERR_OK);
    d.formed = true;
    struct wk_seal seals[2] = {{.index = 4, .hash = {{1}}},
                               {.index = 5, .place = 1, .hash = {{2}}}};
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (turn == 0) {
            wk_rows_write_block(d.rows.rows, 4);
            wk_rows_write_block(d.rows.rows, 5);
        } else {
            seals[1].index = 6; /* where nothing was written */
        }
        assert_int_equal(pthread_create(&d.thread, NULL, other_main, &d), 0);
        enum err e = wk_ranks_tell_seals(d.ranks[0], seals, 2, &detail);
        pthread_join(d.thread, NULL);
        assert_int_equal(e, turn == 0 ? ERR_OK : ERR_UNSUPPORTED);
        assert_int_equal(d.code, turn == 0 ? ERR_OK : ERR_INVALID);
    }
    if (strstr(detail.text, "rank 1 refuses") == NULL || strstr(detail.text, "block 6") == NULL)
        fail_msg("%s", detail.text);
    assert_false(wk_ranks_formed(d.ranks[0]) || wk_ranks_formed(d.ranks[1]));
    duo_fini(&d);
}

/* A restarted kvmgr of rank 1 ends the group; what was kept is there when it forms again. */
static void test_a_new_kvmgr_of_rank_1(void **state)
{
    (void)state;
    struct duo d = {.geometry = &own, .boot = 7};
    struct hash128 memory, again;
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++)
        d.ranks[r] = duo_open(&d, r);
    struct wk_ranks_shape good = shape_good();
    assert_int_equal(shape_tell(&d, &good, &memory), ERR_OK);
    rows_world_kvmgr(&d.rows, 7);
    rows_world_ping(&d.rows);
    d.formed = true;
    assert_int_equal(pthread_create(&d.thread, NULL, other_main, &d), 0);
    pthread_join(d.thread, NULL);
    assert_int_equal(d.code, ERR_CLOSED);
    assert_non_null(strstr(d.detail.text, "was restarted"));
    assert_false(wk_ranks_formed(d.ranks[1]));
    d.formed = false;
    wk_fabric_leave(wk_ranks_fabric(d.ranks[0]));
    assert_int_equal(shape_tell(&d, &good, &again), ERR_OK);
    assert_memory_equal(&memory, &again, sizeof memory);
    duo_fini(&d);
}

static void test_kvmgr_ids(void **state)
{
    (void)state;
    static struct wk_params p = {.groups = 2, .group = 1};
    assert_int_equal(wk_params_kvmgr(&p), 1);
    p.rank = 1;
    assert_int_equal(wk_params_kvmgr(&p), 3);
    p.groups = 1;
    p.group = 0;
    assert_int_equal(wk_params_kvmgr(&p), 1);
}

/* ---- orders that wait ---- */

struct side {
    struct loop *loop;
    struct loop_waker *waker;
    struct wk_exec *exec;
    uint32_t loaded, attached, failed, done, sealed;
    enum err status; /* of the last plan or seal */
    uint32_t seqs;   /* of the last plan */
    uint32_t group;
    char directory[1024];
};

static void on_news(void *arg)
{
    struct side *s = arg;
    struct wk_news news;
    while (s->exec != NULL && wk_exec_news(s->exec, &news)) {
        s->loaded += news.type == WK_NEWS_LOADED;
        s->attached += news.type == WK_NEWS_ATTACHED;
        s->failed += news.type == WK_NEWS_FAILED;
        if (news.type == WK_NEWS_DONE) {
            s->done++;
            s->status = news.result->status;
            s->seqs = news.result->seq_count;
        }
        if (news.type == WK_NEWS_SEALED) {
            s->sealed++;
            s->status = news.status;
        }
    }
    loop_stop(s->loop);
}

static void on_turn(void *arg)
{
    loop_stop(arg);
}

/* Until *value is so much; a timer ends each turn of the loop. */
static void until(struct side *s, const uint32_t *value, uint32_t least)
{
    struct loop_timer *turn = loop_timer_create(s->loop, on_turn, s->loop);
    loop_timer_start(turn, 50000, true);
    for (int i = 0; i < 1200 && *value < least; i++)
        loop_run(s->loop);
    loop_timer_destroy(&turn);
    assert_true(*value >= least);
}

static void side_open(struct side *s, struct duo *d, uint32_t rank)
{
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    snprintf(s->directory, sizeof s->directory, "%s/tests/golden/tiny-glm", root ? root : ".");
    s->loop = loop_create();
    s->waker = loop_waker_create(s->loop, on_news, s);
    struct wk_exec_options o = {.directory = s->directory,
                                .numerics = MODEL_EXACT,
                                .threads = 1,
                                .entries = 4,
                                .plan_seqs = WK_PREFILL_SEQS_MAX,
                                .slice_rows_max = 32,
                                .decode_rows_max = 16,
                                .context_max = 128,
                                .group = s->group,
                                .ranks = d->ranks[rank],
                                .rows = rank > 0 ? d->rows.rows : NULL,
                                .waker = s->waker};
    s->exec = wk_exec_create(&o);
}

static void side_close(struct side *s)
{
    wk_exec_destroy(&s->exec);
    loop_waker_destroy(&s->waker);
    loop_destroy(&s->loop);
}

/* While the device thread waits for a rank that is gone, arenas and rings that come are refused
 * after a few, and what was taken is done once the rank is back. */
static void test_orders_wait(void **state)
{
    (void)state;
    struct duo d = {.stop = false};
    struct side sides[2] = {0};
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++) {
        d.ranks[r] = duo_open(&d, r);
        side_open(&sides[r], &d, r);
    }
    for (uint32_t r = 0; r < 2; r++)
        until(&sides[r], &sides[r].loaded, 1);
    assert_true(wk_exec_grouped(sides[0].exec) && wk_exec_grouped(sides[1].exec));
    side_close(&sides[1]);
    wk_ranks_destroy(&d.ranks[1]);

    static uint8_t nothing[64];
    struct model_kv kv = {.blocks = nothing,
                          .slots = nothing,
                          .block_tokens = BT,
                          .block_count = 9,
                          .slot_count = 2,
                          .kv_type = KV_ROW_F32,
                          .index_type = KV_ROW_F32};
    uint32_t taken = 0, refused = 0;
    for (uint32_t i = 0; i < 60; i++) { /* the thread has time to take the first one */
        *(wk_exec_attach(sides[0].exec, &kv, 2 + i) == ERR_OK ? &taken : &refused) += 1;
        usleep(5000);
    }
    assert_true(taken >= 1 && refused > 30);
    enum err e = ERR_OK;
    for (uint32_t turn = 0; turn < 2 && e == ERR_OK; turn++) { /* it may take that one only now */
        struct wk_taps *taps = NULL;
        struct err_detail detail;
        struct wk_taps_options o = {.incarnation = (uint64_t)getpid() << 8 | turn,
                                    .type = TAP_BF16,
                                    .hidden = 8,
                                    .layer_count = 1,
                                    .bytes_max = 1 << 16};
        while (wk_exec_attach(sides[0].exec, &kv, 99) == ERR_OK)
            taken++;
        assert_int_equal(wk_taps_create(&o, &taps, &detail), ERR_OK);
        e = wk_exec_taps(sides[0].exec, &taps);
        assert_true((taps == NULL) == (e == ERR_OK));
        wk_taps_destroy(&taps);
    }
    assert_int_equal(e, ERR_BUSY);

    d.ranks[1] = duo_open(&d, 1);
    side_open(&sides[1], &d, 1);
    until(&sides[1], &sides[1].loaded, 1);
    until(&sides[0], &sides[0].attached, taken);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 200), ERR_OK);
    until(&sides[0], &sides[0].attached, taken + 1);
    side_close(&sides[0]);
    wk_ranks_destroy(&d.ranks[0]);
    /* Rank 1 is alone: it knows. */
    for (int i = 0; i < 400 && wk_exec_grouped(sides[1].exec); i++)
        usleep(10000);
    assert_false(wk_exec_grouped(sides[1].exec));
    side_close(&sides[1]);
    duo_fini(&d);
}

/* What rank 1 keeps for so many blocks, without head, slots, and the blocks' guards. */
static uint64_t blocks_bytes(uint32_t interleave)
{
    static uint8_t nothing[64];
    struct duo d = {.interleave = interleave};
    struct side sides[2] = {0};
    struct model_kv kv = {.blocks = nothing,
                          .slots = nothing,
                          .block_tokens = 1024,
                          .block_count = 4,
                          .slot_count = 1};
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++) {
        d.ranks[r] = duo_open(&d, r);
        side_open(&sides[r], &d, r);
    }
    for (uint32_t r = 0; r < 2; r++)
        until(&sides[r], &sides[r].loaded, 1);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 2), ERR_OK);
    until(&sides[0], &sides[0].attached, 1);
    uint64_t slot = wk_exec_loaded(sides[1].exec)->info->state_bytes + KV_GUARD_BYTES_MIN;
    uint64_t bytes = memory_bytes(&d) - 3 * 4096 - (slot + 4095) / 4096 * 4096;
    bytes -= (uint64_t)kv.block_count * 4096; /* rows of whole pages: the guard is one more */
    for (uint32_t r = 0; r < 2; r++)
        side_close(&sides[r]);
    duo_fini(&d);
    return bytes;
}

static void test_rows_by_position_take_half(void **state)
{
    (void)state;
    assert_int_equal(blocks_bytes(0), 2 * blocks_bytes(16));
}

/* Turns both loops for so long. */
static void turn(struct side *sides, uint32_t ms)
{
    for (uint32_t spent = 0; spent < ms; spent += 10) {
        usleep(10000);
        for (uint32_t r = 0; r < 2; r++) {
            struct loop_timer *end = loop_timer_create(sides[r].loop, on_turn, sides[r].loop);
            loop_timer_start(end, 1, false);
            loop_run(sides[r].loop);
            loop_timer_destroy(&end);
        }
    }
}

/* Another group's rank, another's floor: both ranks refuse, neither gives up, and once rank 1 is
 * started anew in order both go on. */
static void test_refusals_pass(void **state)
{
    (void)state;
    for (uint32_t what = 0; what < 2; what++) {
        struct duo d = {.floor = what == 0 ? 1000000000 : 0};
        struct side sides[2] = {{0}, {.group = what}};
        world_init(&d.w, 2, 1024);
        for (uint32_t r = 0; r < 2; r++) {
            d.ranks[r] = duo_open(&d, r);
            side_open(&sides[r], &d, r);
        }
        turn(sides, 4000);
        for (uint32_t r = 0; r < 2; r++)
            assert_int_equal(sides[r].loaded + sides[r].failed, 0);
        side_close(&sides[1]);
        wk_ranks_destroy(&d.ranks[1]);
        d.floor = sides[1].group = 0;
        d.ranks[1] = duo_open(&d, 1);
        side_open(&sides[1], &d, 1);
        for (uint32_t r = 0; r < 2; r++)
            until(&sides[r], &sides[r].loaded, 1);
        assert_int_equal(sides[0].failed + sides[1].failed, 0);
        for (uint32_t r = 0; r < 2; r++)
            side_close(&sides[r]);
        duo_fini(&d);
    }
}

/* A new rank that computes otherwise stays out, however often it comes. */
static void test_a_wrong_canary_stays_wrong(void **state)
{
    (void)state;
    static uint8_t nothing[64];
    struct duo d = {.boot = 1};
    struct side sides[2] = {0};
    struct model_kv kv = {
        .blocks = nothing, .slots = nothing, .block_tokens = BT, .block_count = 4, .slot_count = 1};
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++) {
        d.ranks[r] = duo_open(&d, r);
        side_open(&sides[r], &d, r);
    }
    for (uint32_t r = 0; r < 2; r++)
        until(&sides[r], &sides[r].loaded, 1);
    side_close(&sides[1]);
    wk_ranks_destroy(&d.ranks[1]);
    uint32_t *said = (uint32_t *)(uintptr_t)wk_exec_loaded(sides[0].exec)->canary_output;
    *said ^= 1;
    d.ranks[1] = duo_open(&d, 1);
    sides[1].loaded = 0;
    side_open(&sides[1], &d, 1);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 2), ERR_OK);
    turn(sides, 4000);
    assert_int_equal(sides[1].loaded + sides[1].failed + sides[0].attached, 0);
    for (uint32_t r = 0; r < 2; r++)
        side_close(&sides[r]);
    duo_fini(&d);
}

/* A shape that rank 1 refuses is told again with pauses, until it is taken. */
static void test_a_refused_shape_does_not_spin(void **state)
{
    (void)state;
    static uint8_t nothing[64];
    struct duo d = {.boot = 1};
    struct side sides[2] = {0};
    struct model_kv kv = {
        .blocks = nothing, .slots = nothing, .block_tokens = BT, .block_count = 4, .slot_count = 1};
    char path[128];
    world_init(&d.w, 2, 1024);
    snprintf(path, sizeof path, "%s/rows", d.w.dir);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    for (uint32_t r = 0; r < 2; r++) {
        d.ranks[r] = duo_open(&d, r);
        side_open(&sides[r], &d, r);
    }
    for (uint32_t r = 0; r < 2; r++)
        until(&sides[r], &sides[r].loaded, 1);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 2), ERR_OK);
    turn(sides, 3000);
    assert_int_equal(sides[0].attached, 0);
    close(fd);
    until(&sides[0], &sides[0].attached, 1);
    uint32_t epoch = wk_fabric_epoch(wk_ranks_fabric(d.ranks[0]));
    assert_true(epoch >= 4 && epoch < 20);
    for (uint32_t r = 0; r < 2; r++)
        side_close(&sides[r]);
    duo_fini(&d);
}

/* A shape that is refused makes way for the next one that rank 0 is given. */
static void test_another_shape_heals_a_refusal(void **state)
{
    (void)state;
    static uint8_t nothing[64];
    struct duo d = {.boot = 1};
    struct side sides[2] = {0};
    struct model_kv kv = {.blocks = nothing,
                          .slots = nothing,
                          .block_tokens = BT,
                          .block_count = 1u << 30, /* more than rank 1 has room for */
                          .slot_count = 1};
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++) {
        d.ranks[r] = duo_open(&d, r);
        side_open(&sides[r], &d, r);
    }
    for (uint32_t r = 0; r < 2; r++)
        until(&sides[r], &sides[r].loaded, 1);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 2), ERR_OK);
    turn(sides, 1500);
    assert_int_equal(sides[0].attached, 0);
    kv.block_count = 4;
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 3), ERR_OK);
    until(&sides[0], &sides[0].attached, 2);
    assert_true(wk_exec_grouped(sides[0].exec));
    for (uint32_t r = 0; r < 2; r++)
        side_close(&sides[r]);
    duo_fini(&d);
}

/* Rank 0's own rows, as test_wk_exec has them. */
static struct model_kv memory_take(const struct model_info *info)
{
    uint64_t latents = (uint64_t)BT * info->latent_dim * sizeof(float);
    struct model_kv kv = {.block_tokens = BT, .block_count = 4, .slot_count = 2};
    kv.index_offset = latents;
    kv.layer_stride = latents + BT / info->index_kpool * info->index_dim * sizeof(float);
    kv.block_stride = kv.layer_stride * info->dsa_layers;
    kv.slot_stride = info->state_bytes;
    kv.blocks = calloc(kv.block_count, kv.block_stride);
    kv.slots = aligned_alloc(64, kv.slot_count * kv.slot_stride);
    return kv;
}

/* A slice of a prefill batch is done and the group is lost by a seal: the batch went with it, and
 * the plan of its next slice, which the core had made by then, comes back at once. */
static void test_a_plan_meets_a_lost_group(void **state)
{
    (void)state;
    struct duo d = {.boot = 1};
    struct side sides[2] = {0};
    struct wk_plan *p = wk_plan_create(WK_PREFILL_SEQS_MAX, 32, 64, 128);
    world_init(&d.w, 2, 1024);
    for (uint32_t r = 0; r < 2; r++) {
        d.ranks[r] = duo_open(&d, r);
        side_open(&sides[r], &d, r);
    }
    for (uint32_t r = 0; r < 2; r++)
        until(&sides[r], &sides[r].loaded, 1);
    struct model_kv kv = memory_take(wk_exec_loaded(sides[0].exec)->info);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 2), ERR_OK);
    until(&sides[0], &sides[0].attached, 1);
    prefill_fill(p);
    p->epoch = 2;
    p->layer_end = 1;
    for (uint32_t i = 0; i < 3; i++)
        p->blocks[i] = i;
    wk_plan_seal(p);
    wk_exec_run(sides[0].exec, p);
    until(&sides[0], &sides[0].done, 1);
    assert_int_equal(sides[0].status, ERR_OK);
    assert_int_equal(wk_exec_steps(sides[1].exec), 1);

    side_close(&sides[1]);
    wk_ranks_destroy(&d.ranks[1]);
    struct wk_seal seal = {.index = 0};
    wk_exec_seal(sides[0].exec, &seal, 1);
    until(&sides[0], &sides[0].sealed, 1);
    assert_int_not_equal(sides[0].status, ERR_OK);
    assert_false(wk_exec_grouped(sides[0].exec));
    wk_plan_clear(p, 2, 2, WK_PLAN_PREFILL);
    p->layer_end = 2;
    wk_plan_seal(p);
    uint64_t begun = clock_mono_us();
    wk_exec_run(sides[0].exec, p);
    until(&sides[0], &sides[0].done, 2);
    assert_int_equal(sides[0].status, ERR_CLOSED);
    assert_int_equal(sides[0].seqs, 0);
    assert_true(clock_mono_us() - begun < 3000000); /* nobody is waited for */
    wk_exec_seal(sides[0].exec, &seal, 1);          /* nor for a seal */
    until(&sides[0], &sides[0].sealed, 2);
    assert_int_equal(sides[0].status, ERR_CLOSED);

    /* With rank 1 back and the memory named again it is served from the beginning. */
    d.ranks[1] = duo_open(&d, 1);
    side_open(&sides[1], &d, 1);
    until(&sides[1], &sides[1].loaded, 1);
    assert_int_equal(wk_exec_attach(sides[0].exec, &kv, 2), ERR_OK);
    until(&sides[0], &sides[0].attached, 2);
    prefill_fill(p);
    p->step = 3;
    p->epoch = 2;
    p->layer_end = 1;
    wk_plan_seal(p);
    wk_exec_run(sides[0].exec, p);
    until(&sides[0], &sides[0].done, 3);
    assert_int_equal(sides[0].status, ERR_OK);
    for (uint32_t r = 0; r < 2; r++)
        side_close(&sides[r]);
    wk_plan_destroy(&p);
    free(kv.blocks);
    free(kv.slots);
    duo_fini(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_shapes_by_position),
        cmocka_unit_test(test_rows_end_with_the_host),
        cmocka_unit_test(test_seals_are_agreed_on),
        cmocka_unit_test(test_a_new_kvmgr_of_rank_1),
        cmocka_unit_test(test_kvmgr_ids),
        cmocka_unit_test(test_orders_wait),
        cmocka_unit_test(test_rows_by_position_take_half),
        cmocka_unit_test(test_refusals_pass),
        cmocka_unit_test(test_a_wrong_canary_stays_wrong),
        cmocka_unit_test(test_a_refused_shape_does_not_spin),
        cmocka_unit_test(test_another_shape_heals_a_refusal),
        cmocka_unit_test(test_a_plan_meets_a_lost_group),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
