/* SPDX-License-Identifier: Apache-2.0 */
/* One model over several ranks against the whole model: logits within 1e-4, and the same bits on
 * every rank, over prefill slices and verify steps; what cannot be split is refused. */
#include "tests/model/harness.h"
#include "tests/model/tool_run.h"
#include "tests/unit/fabric_world.h"

#include <arpa/inet.h>
#include <math.h>
#include <sys/socket.h>

#include "lib/model/config.h"
#include "lib/net/peers.h"
#include "worker/wk_group.h"
#include "worker/wk_link_tcp.h"

/* jemalloc's, where the program is linked with it. */
int mallctl(const char *name, void *old, size_t *old_bytes, void *new, size_t new_bytes)
    __attribute__((weak));

#define TOKENS_MAX 333
#define CLOSE      1e-4

static uint32_t ids[TOKENS_MAX], tokens;

/* tcp between the ranks of the runs that follow. */
static char addresses[2][48];

/* What this thread has taken so far; a step takes nothing, nor does a collective. */
static uint64_t allocated(void)
{
    uint64_t bytes = 0;
    size_t size = sizeof(bytes);
    if (mallctl != NULL)
        MUST(mallctl("thread.allocated", &bytes, &size, NULL, 0) == 0);
    return bytes;
}

/* Runs the sequence in a random walk of slices and verify steps, the same on every rank; out gets
 * the logits of every position once it is final.  holders: ranks that share the cache rows. */
static enum err walk(struct model *m, uint64_t seed, uint32_t holders, float *out)
{
    struct rng rng;
    struct test_cache t;
    uint32_t vocab = model_info(m)->vocab_size, at = 0, replay = 0;
    uint32_t block_tokens = holders * 64;
    rng_init(&rng, seed);
    /* Room for a rank's own rows and not one more. */
    cache_init(&t, m, block_tokens / holders, 12, 2, &rng);
    t.kv.block_tokens = block_tokens;
    rng_init(&rng, seed); /* the walk itself does not depend on the blocks */
    struct model_cursor *c = test_cursor(m, 64, 1, tokens + MODEL_DRAFT_ROWS_MAX);
    const uint32_t *blocks = cache_take(&t, tokens / block_tokens + 2);
    enum err fault = ERR_OK;
    while (at < tokens && fault == ERR_OK) {
        bool journal = rng_below(&rng, 3) != 0;
        uint32_t rows = 1 + rng_below(&rng, journal ? MODEL_DRAFT_ROWS_MAX : 64), right = rows;
        uint32_t batch_ids[64];
        rows = rows < tokens - at ? rows : tokens - at;
        right = journal ? 1 + rng_below(&rng, rows) : rows;
        memcpy(batch_ids, ids + at, rows * sizeof(*ids));
        for (uint32_t r = right; r < rows; r++)
            batch_ids[r] = rng_below(&rng, vocab);
        struct model_seq seq = {.state_slot = 1,
                                .position_start = at,
                                .row_count = rows,
                                .replay_count = replay,
                                .fresh = at == 0,
                                .journal = journal,
                                .blocks = blocks,
                                .block_count = tokens / block_tokens + 2};
        struct model_batch batch = {1, rows, &seq, batch_ids};
        uint64_t before = allocated();
        model_begin(c, &t.kv, &batch);
        model_advance(c, rng_below(&rng, model_info(m)->layer_count));
        const float *logits = model_finish(c);
        fault = model_cursor_fault(c);
        MUST(allocated() == before || addresses[0][0] != '\0'); /* ZeroMQ takes memory */
        memcpy(out + (size_t)at * vocab, logits, (size_t)right * vocab * sizeof(float));
        at += right;
        replay = journal ? right : 0;
    }
    cache_check(&t, m);
    model_cursor_destroy(&c);
    cache_fini(&t);
    return fault;
}

struct run {
    const char *below;
    uint32_t interleave;
    enum shard_moe moe;
    enum model_numerics numerics;
    uint32_t vocab;
    float *out[SHARD_RANKS_MAX];
    uint64_t state_bytes[SHARD_RANKS_MAX];
    enum err fault[SHARD_RANKS_MAX];
    uint32_t leave_after; /* collectives until rank 1 leaves; 0 = never */
};

static void addresses_take(void)
{
    int fds[2];
    for (int r = 0; r < 2; r++) { /* ports that are free for a moment */
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t bytes = sizeof(a);
        fds[r] = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(bind(fds[r], (struct sockaddr *)&a, sizeof(a)), 0);
        assert_int_equal(getsockname(fds[r], (struct sockaddr *)&a, &bytes), 0);
        snprintf(addresses[r], sizeof(addresses[r]), "tcp://127.0.0.1:%u", ntohs(a.sin_port));
    }
    for (int r = 0; r < 2; r++)
        close(fds[r]);
}

static struct wk_link link_tcp(const struct world *w, uint32_t rank)
{
    struct peers_options o = {.rank = rank,
                              .ranks = 2,
                              .message_bytes_max = w->message_bytes_max,
                              .addresses = {addresses[0], addresses[1]}};
    struct err_detail detail = {{0}};
    struct wk_link link;
    MUST(wk_link_tcp(&o, &link, &detail) == ERR_OK);
    return link;
}

static struct model *load(const struct run *run, const struct model_group *group)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    if (run->below[0] == '/')
        snprintf(path, sizeof(path), "%s", run->below);
    else
        test_path(path, sizeof(path), run->below);
    struct model_options options = {
        .directory = path, .threads = 1, .numerics = run->numerics, .group = group};
    if (model_load(&options, &m, &detail) != ERR_OK) {
        fprintf(stderr, "%s\n", detail.text);
        abort();
    }
    return m;
}

struct leaver {
    struct wk_fabric *f;
    struct model_group inner;
    uint32_t left;
};

static enum err leaver_reduce(void *arg, float *values, size_t count)
{
    struct leaver *l = arg;
    if (l->left > 0 && --l->left == 0)
        wk_fabric_leave(l->f);
    return l->inner.all_reduce(l->inner.arg, values, count);
}

static enum err leaver_gather(void *arg, const void *own, size_t bytes, void *ret_all)
{
    struct leaver *l = arg;
    return l->inner.all_gather(l->inner.arg, own, bytes, ret_all);
}

static enum err leaver_to_all(void *arg, const void *own, size_t bytes, void *ret_all)
{
    struct leaver *l = arg;
    return l->inner.all_to_all(l->inner.arg, own, bytes, ret_all);
}

static void body(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct run *run = w->arg;
    struct wk_paths paths = {.fabric = f};
    struct model_group group = wk_group(&paths, rank, w->ranks, run->moe, run->interleave);
    struct leaver leaver = {f, group, rank == 1 ? run->leave_after : 0};
    group.all_reduce = leaver_reduce;
    group.all_gather = leaver_gather;
    group.all_to_all = leaver_to_all;
    group.arg = &leaver;
    struct model *m = load(run, &group);
    run->state_bytes[rank] = model_info(m)->state_bytes;
    must_join(f, 20000);
    run->fault[rank] = walk(m, 77, run->interleave > 0 ? w->ranks : 1, run->out[rank]);
    if (run->fault[rank] == ERR_OK)
        MUST(wk_barrier(f) == ERR_OK);
    model_destroy(&m);
}

static void run_ranks(struct run *run, uint32_t ranks)
{
    struct world w;
    size_t values = (size_t)TOKENS_MAX * run->vocab;
    for (uint32_t r = 0; r < ranks; r++)
        run->out[r] = mem_take_array(values, sizeof(float));
    world_init(&w, ranks, 16384);
    w.deadline_ms = 20000;
    w.silence_ms = 10000; /* a busy machine */
    if (addresses[0][0] != '\0')
        w.link = link_tcp;
    world_run(&w, body, run);
    world_fini(&w);
}

static void run_end(struct run *run, uint32_t ranks)
{
    for (uint32_t r = 0; r < ranks; r++)
        mem_give(run->out[r]);
}

/* A stored value that lies between two codes may be rounded the other way for the last bits of a
 * sum in another order, and everything after it feels that: what must stay is the greedy text. */
static void greedy_equal(const float *got, const float *expected, uint32_t vocab)
{
    double mean = 0;
    for (uint32_t t = 0; t < tokens; t++, got += vocab, expected += vocab) {
        uint32_t best = 0, own = 0;
        double worst = 0;
        for (uint32_t v = 1; v < vocab; v++) {
            best = expected[v] > expected[best] ? v : best;
            own = got[v] > got[own] ? v : own;
            worst = fmax(worst, fabs((double)got[v] - expected[v]));
        }
        assert_int_equal(own, best);
        mean += worst / tokens;
    }
    assert_true(mean <= 1e-3);
}

static void compare(const char *below, uint32_t ranks, enum shard_moe moe, uint32_t interleave,
                    enum model_numerics numerics)
{
    struct run run = {.below = below, .moe = moe, .interleave = interleave, .numerics = numerics};
    struct model *whole = load(&run, NULL);
    run.vocab = model_info(whole)->vocab_size;
    size_t values = (size_t)tokens * run.vocab;
    float *expected = mem_take_array(values, sizeof(float));
    assert_int_equal(walk(whole, 77, 1, expected), ERR_OK);
    uint64_t state_bytes = model_info(whole)->state_bytes;
    model_destroy(&whole);
    run_ranks(&run, ranks);
    double worst = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        assert_int_equal(run.fault[r], ERR_OK);
        assert_memory_equal(run.out[r], run.out[0], values * sizeof(float));
        assert_true(run.state_bytes[r] < state_bytes);
    }
    for (size_t i = 0; i < values; i++)
        worst = fmax(worst, fabs((double)run.out[0][i] - expected[i]));
    print_message("%s, %u ranks, moe %d, interleave %u, numerics %d: logits differ by %.2g\n",
                  below, ranks, moe, interleave, numerics, worst);
    if (cache_kv_type != KV_ROW_F32)
        greedy_equal(run.out[0], expected, run.vocab);
    else if (!(worst <= CLOSE))
        fail_msg("%u ranks, moe %d: logits differ by %g", ranks, moe, worst);
    /* A split that sums nothing would give the same bits as the whole. */
    assert_true(worst > 0);
    run_end(&run, ranks);
    mem_give(expected);
}

static int setup(void **state)
{
    (void)state;
    tokens =
        test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", ids, TOKENS_MAX);
    return 0;
}

static void test_two_tp(void **state)
{
    (void)state;
    compare("tests/golden/model-random", 2, SHARD_MOE_TP, 0, MODEL_EXACT);
}

static void test_two_ep(void **state)
{
    (void)state;
    compare("tests/golden/model-random", 2, SHARD_MOE_EP, 0, MODEL_EXACT);
    compare("tests/golden/tiny-glm", 2, SHARD_MOE_AUTO, 0, MODEL_EXACT);
}

static void test_two_fast(void **state)
{
    (void)state;
    compare("tests/golden/model-random", 2, SHARD_MOE_AUTO, 0, MODEL_FAST);
}

/* Heads, columns, experts and vocabulary that do not come out even; empty shares. */
static void test_uneven(void **state)
{
    (void)state;
    compare("tests/golden/model-random", 3, SHARD_MOE_AUTO, 0, MODEL_EXACT);
    compare("tests/golden/model-random", 4, SHARD_MOE_EP, 0, MODEL_EXACT);
}

/* Cache rows by position.  Interleave 64: short sequences leave the second rank without a row. */
static void test_positions(void **state)
{
    (void)state;
    for (uint32_t interleave = 4; interleave <= 64; interleave *= 4)
        compare("tests/golden/model-random", 2, SHARD_MOE_TP, interleave, MODEL_EXACT);
    compare("tests/golden/model-random", 2, SHARD_MOE_TP, 16, MODEL_FAST);
    compare("tests/golden/tiny-glm", 2, SHARD_MOE_EP, 4, MODEL_EXACT);
    compare("tests/golden/model-random", 3, SHARD_MOE_EP, 16, MODEL_EXACT);
}

static void test_tcp(void **state)
{
    (void)state;
    addresses_take();
    compare("tests/golden/model-random", 2, SHARD_MOE_TP, 16, MODEL_EXACT);
    addresses[0][0] = '\0';
}

/* Rows rounded where they are stored, on one rank as on two. */
static void test_rows_stored(void **state)
{
    (void)state;
    for (uint32_t type = KV_ROW_BF16; type <= KV_ROW_FP8; type++) {
        cache_kv_type = cache_index_type = (enum kv_row)type;
        compare("tests/golden/model-random", 2, SHARD_MOE_TP, 0, MODEL_EXACT);
        compare("tests/golden/model-random", 2, SHARD_MOE_TP, 16, MODEL_EXACT);
        compare("tests/golden/tiny-glm", 2, SHARD_MOE_EP, 16, MODEL_EXACT);
    }
    cache_kv_type = cache_index_type = KV_ROW_F32;
}

/* Every storage format, cut at multiples of 128 columns: the sums of a quantised layer as of the
 * whole.  With `all` heads and lm_head are cut too, inside the units that share a scale; EXL3 has
 * none smaller than 128, and this model's heads are. */
static void test_formats(void **state)
{
    static const char *const formats[] = {"exl3 --bits 4 --beam 1", "nvfp4", "mxfp8 --layers all",
                                          "fp8 --layers all"};
    char scratch[256], out[300];
    (void)state;
    scratch_init(scratch);
    for (size_t i = 0; i < ARRAY_COUNT(formats); i++) {
        snprintf(out, sizeof(out), "%s/%zu", scratch, i);
        tool(0, "quantize tests/golden/model-random %s --format %s", out, formats[i]);
        print_message("%s: ", formats[i]);
        compare(out, 2, SHARD_MOE_TP, i == 0 ? 16 : 0, MODEL_EXACT);
        compare(out, 2, SHARD_MOE_EP, i == 0 ? 0 : 4, MODEL_EXACT);
    }
    scratch_fini(scratch);
}

/* Nothing is exchanged while a model is loaded. */
static enum err never_reduce(void *arg, float *values, size_t count)
{
    (void)arg;
    (void)values;
    (void)count;
    abort();
}

static enum err never_gather(void *arg, const void *own, size_t bytes, void *ret_all)
{
    (void)arg;
    (void)own;
    (void)bytes;
    (void)ret_all;
    abort();
}

static void refused(const char *path, enum shard_moe moe, const char *words)
{
    struct model_group group = {
        .ranks = 2, .rank = 1, .moe = moe, .all_reduce = never_reduce, .all_gather = never_gather};
    struct model_options options = {.directory = path, .threads = 1, .group = &group};
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    assert_int_equal(model_load(&options, &m, &detail), ERR_UNSUPPORTED);
    assert_null(m);
    if (strstr(detail.text, words) == NULL)
        fail_msg("%s: %s", path, detail.text);
}

/* The model as it ships has EXL3 experts of 128 columns, which no two ranks can share; with every
 * layer in EXL3 there are heads that a rank would have to cut, too. */
static void test_exl3_refusals(void **state)
{
    char path[1024], scratch[256], out[300];
    (void)state;
    test_path(path, sizeof(path), "deploy/demo");
    refused(path, SHARD_MOE_TP, "moe_split=tp: experts are 128 columns wide, which 2 ranks");
    scratch_init(scratch);
    snprintf(out, sizeof(out), "%s/all", scratch);
    tool(0, "quantize tests/golden/tiny-glm %s --format exl3 --bits 2 --beam 1 --layers all", out);
    refused(out, SHARD_MOE_TP, "moe_split=tp: experts are 128 columns wide, which 2 ranks");
    refused(out, SHARD_MOE_EP, "128");
    scratch_fini(scratch);
}

/* A rank that leaves in the middle ends the step on both, neither hangs. */
static void test_leave(void **state)
{
    (void)state;
    struct run run = {.below = "tests/golden/model-random", .vocab = 1024, .leave_after = 50};
    run_ranks(&run, 2);
    assert_true(run.fault[0] == ERR_EPOCH || run.fault[0] == ERR_CLOSED);
    assert_int_equal(run.fault[1], ERR_CLOSED);
    run_end(&run, 2);
}

static void test_refusals(void **state)
{
    (void)state;
    struct model_group group = {.ranks = 2, .moe = SHARD_MOE_TP};
    struct run run = {.below = "tests/golden/model-random"};
    struct model *m = load(&run, NULL);
    struct model_config c = *model_config(m);
    struct shard s;
    struct err_detail detail;
    model_destroy(&m);
    assert_int_equal(shard_plan(&c, 1, 4, group.moe, &s, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "moe_split=tp: experts are 256 columns wide"));
    c.expert_width = 128;
    assert_int_equal(shard_plan(&c, 0, 2, SHARD_MOE_TP, &s, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "128 columns wide, which 2 ranks"));
    assert_int_equal(shard_plan(&c, 0, 2, SHARD_MOE_AUTO, &s, &detail), ERR_OK);
    assert_true(s.experts_whole);
    assert_int_equal(shard_plan(&c, 0, 1, SHARD_MOE_TP, &s, &detail), ERR_OK);
    assert_int_equal(shard_plan(&c, 0, 5, SHARD_MOE_AUTO, &s, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "4 attention and 4 KDA heads"));
    c.kda_heads = c.heads = 16;
    assert_int_equal(shard_plan(&c, 0, 9, SHARD_MOE_AUTO, &s, &detail), ERR_UNSUPPORTED);
    c.experts = 2;
    assert_int_equal(shard_plan(&c, 0, 4, SHARD_MOE_EP, &s, &detail), ERR_UNSUPPORTED);
}

/* Parts are disjoint, in order, and together the whole. */
static void test_split(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 8; ranks++) {
        for (uint32_t size = 0; size < 2000; size += 37) {
            for (uint32_t unit = 1; unit <= 128; unit += 127) {
                uint32_t at = 0, most = shard_split(size, unit, ranks, 0).count;
                for (uint32_t r = 0; r < ranks; r++) {
                    struct shard_range p = shard_split(size, unit, ranks, r);
                    assert_int_equal(p.first, at);
                    assert_true(p.first % unit == 0 || p.count == 0);
                    assert_true(p.count <= most);
                    at += p.count;
                }
                assert_int_equal(at, size);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_exl3_refusals), cmocka_unit_test(test_two_tp),
        cmocka_unit_test(test_two_ep),        cmocka_unit_test(test_two_fast),
        cmocka_unit_test(test_uneven),        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_rows_stored),   cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_formats),       cmocka_unit_test(test_leave),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
