// SPDX-License-Identifier: Apache-2.0
/* The MTP layer against vectors in double precision; what must not matter; how much is right. */
#include "tests/model/harness.h"

#include <math.h>
#include <unistd.h>

#include "lib/model/mtp.h"

/* Times max(1, |x|).  Published is 1e-4; measured 4e-6, as for the trunk. */
#define BOUND    8e-6
#define TEXT_MAX 400u

static struct model *load(const char *below)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    test_path(path, sizeof(path), below);
    struct model_options options = {.directory = path, .threads = 1, .mtp = true};
    if (model_load(&options, &m, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return m;
}

static struct mtp *mtp_new(struct model *m, uint64_t tokens_max, enum mtp_recycle recycle)
{
    struct err_detail detail = {{0}};
    struct mtp *t = NULL;
    struct mtp_options o = {
        .entries = 4, .context_max = TEXT_MAX, .tokens_max = tokens_max, .recycle = recycle};
    if (mtp_create(m, &o, &t, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return t;
}

/* A text through the target in one batch. */
struct text {
    struct model *model;
    struct model_cursor *cursor;
    struct test_cache cache;
    uint32_t ids[TEXT_MAX], count;
    const float *logits;
};

static void text_run(struct text *x, struct model *m, uint32_t logits_from)
{
    struct rng rng;
    rng_init(&rng, 0x5eed0061);
    x->model = m;
    x->cursor = test_cursor(m, TEXT_MAX, 1, TEXT_MAX);
    cache_init(&x->cache, m, 16, TEXT_MAX / 16, 1, &rng);
    struct model_seq seq = {.row_count = x->count,
                            .fresh = true,
                            .logits_from = logits_from,
                            .blocks = cache_take(&x->cache, TEXT_MAX / 16),
                            .block_count = TEXT_MAX / 16};
    struct model_batch batch = {.seq_count = 1, .row_count = x->count, .seqs = &seq, .ids = x->ids};
    model_begin(x->cursor, &x->cache.kv, &batch);
    x->logits = model_finish(x->cursor);
}

static void text_end(struct text *x)
{
    cache_fini(&x->cache);
    model_cursor_destroy(&x->cursor);
}

static struct mtp_feed feed_of(const struct text *x, uint32_t entry, uint32_t first, uint32_t count,
                               bool known, uint32_t drafts)
{
    return (struct mtp_feed){.rows = {.entry = entry,
                                      .cursor = x->cursor,
                                      .first = first,
                                      .count = count,
                                      .position = first,
                                      .ids = x->ids + first,
                                      .next = known ? x->ids[first + count] : MTP_NO_ID},
                             .drafts_max = drafts};
}

static uint32_t feed(struct mtp *t, const struct text *x, uint32_t entry, uint32_t first,
                     uint32_t count, bool known, uint32_t drafts, uint32_t *ids)
{
    struct mtp_feed f = feed_of(x, entry, first, count, known, drafts);
    mtp_feed(t, &f, 1);
    memcpy(ids, f.ids, f.count * sizeof(*ids));
    return f.count;
}

static void test_golden(void **state)
{
    (void)state;
    static const char *const cases[] = {"short", "exact64", "sparse"};
    struct model *m = load("tests/golden/model-random");
    const uint32_t vocab = model_info(m)->vocab_size;
    char path[1024], name[64];
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    double worst = 0;
    test_path(path, sizeof(path), "tests/golden/model-random/golden.safetensors");
    assert_int_equal(safetensors_open_file(path, &set, &detail), ERR_OK);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct text x = {.count = 0};
        snprintf(name, sizeof(name), "%s.ids", cases[i]);
        x.count = test_ids("tests/golden/model-random/golden.safetensors", name, x.ids, TEXT_MAX);
        snprintf(name, sizeof(name), "%s.mtp_logits", cases[i]);
        const struct safetensors_tensor *want = safetensors_find(set, name);
        assert_non_null(want);
        assert_int_equal(want->elements, (uint64_t)(x.count - 1) * vocab);
        text_run(&x, m, x.count);
        struct mtp *t = mtp_new(m, 4 * TEXT_MAX, MTP_POST_NORM);
        for (uint32_t r = 0; r + 1 < x.count; r++) {
            /* Row by row, sometimes with drafts beyond it, which must leave nothing behind. */
            uint32_t ids[8], best = 0, drafts = r % 3 == 0 ? 7 : 1;
            assert_int_equal(feed(t, &x, 0, r, 1, true, drafts, ids), drafts);
            for (uint32_t v = 0; v < vocab; v++) {
                float golden, got = mtp_logits(t)[v];
                memcpy(&golden, want->data + ((uint64_t)r * vocab + v) * 4, sizeof(golden));
                double apart = fabs((double)got - golden) / fmax(1, fabs((double)golden));
                if (!(apart <= BOUND))
                    fail_msg("%s row %u id %u: %.9g, golden %.9g", cases[i], r, v, (double)got,
                             (double)golden);
                worst = apart > worst ? apart : worst;
                best = got > mtp_logits(t)[best] ? v : best;
            }
            assert_int_equal(ids[0], best);
        }
        mtp_destroy(&t);
        text_end(&x);
    }
    print_message("worst %.2g of max(1, |x|)\n", worst);
    safetensors_close(&set);
    model_destroy(&m);
}

/* In any pieces, with the next token known at once or later, at any base: the same bits. */
static void test_pieces_change_nothing(void **state)
{
    (void)state;
    struct model *m = load("tests/golden/model-random");
    const size_t bytes = model_info(m)->vocab_size * sizeof(float);
    struct text x = {.count = 0};
    x.count = test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", x.ids, 300);
    text_run(&x, m, x.count);
    struct mtp *t = mtp_new(m, 4 * TEXT_MAX, MTP_POST_NORM);
    float *logits = mem_take(bytes);
    uint32_t want[8], got[8], end = x.count - 1;
    assert_int_equal(feed(t, &x, 0, 0, end, true, 7, want), 7);
    memcpy(logits, mtp_logits(t), bytes);
    struct rng rng;
    rng_init(&rng, 0x5eed0062);
    for (uint32_t run = 0; run < 4; run++) {
        uint32_t entry = 1 + run % 3;
        mtp_begin(t, entry);
        for (uint32_t at = 0; at < end;) {
            uint32_t count = 1 + rng_below(&rng, run < 2 ? 9 : 90);
            count = count < end - at ? count : end - at;
            bool known = at + count == end || rng_below(&rng, 2) == 0;
            uint32_t drafts = at + count == end ? 7 : rng_below(&rng, 8);
            uint32_t n = feed(t, &x, entry, at, count, known, drafts, got);
            assert_int_equal(n, known ? drafts : 0);
            at += count;
        }
        assert_memory_equal(got, want, 7 * sizeof(*got));
        assert_memory_equal(mtp_logits(t), logits, bytes);
    }
    /* Behind a gap it begins anew, as one that never had more. */
    mtp_begin(t, 1);
    mtp_begin(t, 2);
    assert_int_equal(feed(t, &x, 1, 100, end - 100, true, 7, want), 7);
    memcpy(logits, mtp_logits(t), bytes);
    assert_int_equal(feed(t, &x, 2, 0, 50, true, 3, got), 3);
    assert_int_equal(feed(t, &x, 2, 100, end - 100, true, 7, got), 7);
    assert_memory_equal(mtp_logits(t), logits, bytes);
    assert_memory_equal(got, want, 7 * sizeof(*got));
    mem_give(logits);
    mtp_destroy(&t);
    text_end(&x);
    model_destroy(&m);
}

/* Many sequences in one pass: each as if it were alone, whatever their rows and drafts. */
static void test_batches_change_nothing(void **state)
{
    (void)state;
    enum { ENTRIES = 24 };
    struct model *m = load("tests/golden/model-random");
    struct text x = {.count = 0};
    x.count = test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", x.ids, 300);
    text_run(&x, m, x.count);
    struct mtp *alone = NULL, *together = NULL;
    struct err_detail detail = {{0}};
    struct mtp_options o = {
        .entries = ENTRIES, .context_max = TEXT_MAX, .tokens_max = ENTRIES * TEXT_MAX};
    assert_int_equal(mtp_create(m, &o, &alone, &detail), ERR_OK);
    assert_int_equal(mtp_create(m, &o, &together, &detail), ERR_OK);
    uint32_t at[ENTRIES] = {0}, drafted = 0;
    struct rng rng;
    rng_init(&rng, 0x5eed0063);
    for (uint32_t round = 0; round < 6; round++) {
        struct mtp_feed feeds[ENTRIES], one;
        uint32_t count = 0;
        for (uint32_t e = 0; e < ENTRIES; e++) {
            uint32_t left = x.count - 1 - at[e], rows = 1 + rng_below(&rng, round == 0 ? 90 : 9);
            if (rng_below(&rng, 5) == 0 || left < rows)
                continue; /* not in this batch */
            feeds[count++] =
                feed_of(&x, e, at[e], rows, rng_below(&rng, 4) > 0, rng_below(&rng, 8));
            at[e] += rows;
        }
        for (uint32_t i = count; i > 1; i--) { /* in any order */
            uint32_t k = rng_below(&rng, i);
            one = feeds[k];
            feeds[k] = feeds[i - 1];
            feeds[i - 1] = one;
        }
        mtp_feed(together, feeds, count);
        for (uint32_t i = 0; i < count; i++) {
            one = feeds[i];
            mtp_feed(alone, &one, 1);
            assert_int_equal(one.count, feeds[i].count);
            assert_int_equal(one.count, one.rows.next == MTP_NO_ID ? 0 : one.drafts_max);
            assert_memory_equal(one.ids, feeds[i].ids, one.count * sizeof(*one.ids));
            drafted += one.count;
        }
    }
    assert_true(drafted > 200);
    /* One that finds no room has no drafts, and takes none from the others. */
    mtp_destroy(&together);
    o.tokens_max = 128; /* 3 blocks of 64 */
    assert_int_equal(mtp_create(m, &o, &together, &detail), ERR_OK);
    struct mtp_feed three[3] = {feed_of(&x, 0, 0, 60, true, 3), feed_of(&x, 1, 0, 250, true, 3),
                                feed_of(&x, 2, 0, 60, true, 3)};
    mtp_feed(together, three, 3);
    assert_int_equal(three[0].count, 3);
    assert_int_equal(three[1].count, 0);
    assert_int_equal(three[2].count, 3);
    assert_memory_equal(three[0].ids, three[2].ids, 3 * sizeof(uint32_t));
    mtp_destroy(&alone);
    mtp_destroy(&together);
    text_end(&x);
    model_destroy(&m);
}

/* The sequence not fed for longest makes room; one longer than all there is has no drafts. */
static void test_memory_is_bounded(void **state)
{
    (void)state;
    struct model *m = load("tests/golden/model-random");
    struct text x = {.count = 0};
    x.count = test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", x.ids, 300);
    text_run(&x, m, x.count);
    struct mtp *t = mtp_new(m, 128, MTP_POST_NORM); /* 3 blocks of 64 */
    uint32_t ids[8], whole[8], suffix[8];
    uint64_t bytes = mtp_bytes(t);
    assert_int_equal(feed(t, &x, 0, 0, 60, true, 3, ids), 3);
    assert_int_equal(feed(t, &x, 0, 60, 10, true, 7, whole), 7);
    assert_int_equal(feed(t, &x, 1, 0, 299, true, 3, ids), 0);
    assert_int_equal(feed(t, &x, 1, 100, 10, true, 3, ids), 3);
    /* 0 had to go: what it has now begins with these rows. */
    mtp_begin(t, 2);
    assert_int_equal(feed(t, &x, 2, 60, 10, true, 7, suffix), 7);
    assert_int_equal(feed(t, &x, 0, 60, 10, true, 7, ids), 7);
    assert_memory_equal(ids, suffix, 7 * sizeof(*ids));
    assert_memory_not_equal(ids, whole, 7 * sizeof(*ids));
    for (uint32_t run = 0; run < 50; run++) { /* nothing is lost on the way */
        uint32_t entry = run % 4;
        mtp_begin(t, entry);
        assert_int_equal(feed(t, &x, entry, 0, 100, true, 7, ids), 7);
    }
    assert_int_equal(mtp_bytes(t), bytes);
    mtp_destroy(&t);
    text_end(&x);
    model_destroy(&m);
}

/* The trained model on a text of its own: how many drafts in a row are right. */
static void test_recycling(void **state)
{
    (void)state;
    struct model *m = load("tests/golden/tiny-glm");
    double mean[2] = {0};
    for (int which = 0; which < 2; which++) {
        uint32_t right = 0, asked = 0;
        struct mtp *t = mtp_new(m, 4 * TEXT_MAX, which == 0 ? MTP_POST_NORM : MTP_PRE_NORM);
        struct text x = {.count = 0};
        x.count = test_ids("tests/golden/dflash2/trained.safetensors", "case2_repeat.ids", x.ids,
                           TEXT_MAX);
        text_run(&x, m, x.count);
        for (uint32_t r = 0; r + 5 < x.count; r++) {
            uint32_t ids[8];
            assert_int_equal(feed(t, &x, 0, r, 1, true, 4, ids), 4);
            for (uint32_t k = 0; k < 4 && ids[k] == x.ids[r + 2 + k]; k++)
                right++;
            asked++;
        }
        mean[which] = (double)right / asked;
        mtp_destroy(&t);
        text_end(&x);
    }
    print_message("right of 4 on a text: %.2f recycling behind the norm, %.2f before it\n", mean[0],
                  mean[1]);
    /* Measured 1.22 on this text, most of which is a prompt. */
    assert_true(mean[0] > 1 && mean[1] > 1);
    model_destroy(&m);
}

/* What is recycled matters to all drafts but the first. */
static void test_the_switch(void **state)
{
    (void)state;
    struct model *m = load("tests/golden/model-random");
    struct text x = {.count = 0};
    x.count = test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", x.ids, 200);
    text_run(&x, m, x.count);
    uint32_t ids[2][8], others = 0;
    struct mtp *post = mtp_new(m, TEXT_MAX, MTP_POST_NORM);
    struct mtp *pre = mtp_new(m, TEXT_MAX, MTP_PRE_NORM);
    for (uint32_t r = 0; r + 1 < x.count; r++) {
        assert_int_equal(feed(post, &x, 0, r, 1, true, 4, ids[0]), 4);
        assert_int_equal(feed(pre, &x, 0, r, 1, true, 4, ids[1]), 4);
        assert_int_equal(ids[0][0], ids[1][0]);
        others += memcmp(ids[0], ids[1], 4 * sizeof(uint32_t)) != 0;
    }
    assert_true(others > 10);
    mtp_destroy(&post);
    mtp_destroy(&pre);
    text_end(&x);
    model_destroy(&m);
}

/* A collective that must not be called. */
static enum err no_reduce(void *arg, float *values, size_t count)
{
    (void)arg, (void)values, (void)count;
    fail_msg("all_reduce");
    return ERR_CLOSED;
}

static enum err no_gather(void *arg, const void *own, size_t bytes, void *ret_all)
{
    (void)arg, (void)own, (void)bytes, (void)ret_all;
    fail_msg("all_gather");
    return ERR_CLOSED;
}

/* Rank 0 of two has the layer whole: the drafts of one that is alone, without a collective. */
static void test_rank_0_has_it_whole(void **state)
{
    (void)state;
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = load("tests/golden/model-random"), *ranked = NULL;
    struct text x = {.count = 0};
    uint32_t want[8], got[8];
    x.count = test_ids("tests/golden/model-random/golden.safetensors", "sparse.ids", x.ids, 300);
    text_run(&x, m, x.count);
    test_path(path, sizeof(path), "tests/golden/model-random");
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct model_group group = {.rank = rank,
                                    .ranks = 2,
                                    .moe = SHARD_MOE_EP,
                                    .all_reduce = no_reduce,
                                    .all_gather = no_gather};
        struct model_options options = {
            .directory = path, .threads = 1, .mtp = true, .group = &group};
        if (model_load(&options, &ranked, &detail) != ERR_OK)
            fail_msg("%s", detail.text);
        if (rank == 0) {
            struct mtp *alone = mtp_new(m, 4 * TEXT_MAX, MTP_POST_NORM);
            struct mtp *whole = mtp_new(ranked, 4 * TEXT_MAX, MTP_POST_NORM);
            for (uint32_t at = 0; at + 20 < x.count; at += 20) {
                assert_int_equal(feed(alone, &x, 0, at, 20, true, 7, want), 7);
                assert_int_equal(feed(whole, &x, 0, at, 20, true, 7, got), 7);
                assert_memory_equal(got, want, 7 * sizeof(*got));
                assert_memory_equal(mtp_logits(whole), mtp_logits(alone),
                                    model_info(m)->vocab_size * sizeof(float));
            }
            mtp_destroy(&alone);
            mtp_destroy(&whole);
        }
        model_destroy(&ranked);
    }
    text_end(&x);
    model_destroy(&m);
}

static void test_refusals(void **state)
{
    (void)state;
    char path[1024], dir[] = P_tmpdir "/tandem-mtp-XXXXXX", from[1100], to[64], text[8192];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    test_path(path, sizeof(path), "tests/golden/model-random");
    struct model_group group = {
        .ranks = 2, .moe = SHARD_MOE_EP, .all_reduce = no_reduce, .all_gather = no_gather};
    struct model_options options;
    /* A checkpoint that has none. */
    assert_non_null(mkdtemp(dir));
    snprintf(from, sizeof(from), "%s/model.safetensors", path);
    snprintf(to, sizeof(to), "%s/model.safetensors", dir);
    assert_int_equal(symlink(from, to), 0);
    snprintf(from, sizeof(from), "%s/config.json", path);
    FILE *f = fopen(from, "rb");
    assert_non_null(f);
    size_t bytes = fread(text, 1, sizeof(text) - 1, f);
    fclose(f);
    text[bytes] = 0;
    char *key = strstr(text, "\"num_nextn_predict_layers\": 1");
    assert_non_null(key);
    key[strlen("\"num_nextn_predict_layers\": ")] = '0';
    char config[64];
    snprintf(config, sizeof(config), "%s/config.json", dir);
    f = fopen(config, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
    for (uint32_t ranked = 0; ranked < 2; ranked++) {
        options = (struct model_options){
            .directory = dir, .threads = 1, .mtp = true, .group = ranked == 1 ? &group : NULL};
        detail.text[0] = 0;
        assert_int_equal(model_load(&options, &m, &detail), ERR_INVALID);
        assert_non_null(strstr(detail.text, "num_nextn_predict_layers"));
    }
    unlink(config);
    unlink(to);
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_pieces_change_nothing),
        cmocka_unit_test(test_batches_change_nothing),
        cmocka_unit_test(test_memory_is_bounded),
        cmocka_unit_test(test_rank_0_has_it_whole),
        cmocka_unit_test(test_recycling),
        cmocka_unit_test(test_the_switch),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
