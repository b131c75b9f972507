// SPDX-License-Identifier: Apache-2.0
/* The trained drafter's acceptance on the target's own greedy texts, and that each way of feeding
 * it wrongly shows in that figure.  Figures of the vectors, of the same prompts: 5.77 drafts right
 * in a step; taps in another order 5.35, one layer late 3.33, eight positions missing before the
 * anchor 2.60, context one position late 2.47, a wrong anchor 1.57. */
#include "tests/model/harness.h"

#include <jansson.h>

#include "lib/model/dflash.h"

#define PROMPTS  12u
#define NEW_MAX  64u
#define TEXT_MAX 400u
#define HOLE     8u
#define TAP_SETS 2u /* sets of taps: as the config says, and of the layers after those */

enum fault { NONE, ORDER, LAYER_LATE, HOLE_BEFORE, POSITION_LATE, ANCHOR, FAULT_COUNT };

/* A text, and what the target's streams were at each of its tokens. */
struct text {
    uint32_t ids[TEXT_MAX], prompt, count;
    float *taps[TAP_SETS]; /* [count, tap_count, hidden] */
};

static struct text texts[PROMPTS];

static struct dflash *load(void)
{
    char path[1024], target[1024];
    struct err_detail detail = {{0}};
    struct dflash *d = NULL;
    test_path(path, sizeof(path), "deploy/demo-drafter");
    test_path(target, sizeof(target), "tests/golden/tiny-glm");
    struct dflash_options options = {.directory = path,
                                     .target = target,
                                     .seqs_max = 1,
                                     .context_max = TEXT_MAX,
                                     .threads = 1,
                                     .exact = true};
    if (dflash_load(&options, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return d;
}

static bool stops(const struct model_info *info, uint32_t id)
{
    for (uint32_t i = 0; i < info->stop_id_count; i++)
        if (info->stop_ids[i] == id)
            return true;
    return false;
}

/* The taps of the batch that finished, rows from `at` of the text on. */
static void taps_keep(struct text *t, const struct model_cursor *cursor, uint32_t at, uint32_t rows,
                      uint32_t taps, uint32_t hidden)
{
    for (uint32_t set = 0; set < TAP_SETS; set++)
        for (uint32_t j = 0; j < taps; j++)
            for (uint32_t r = 0; r < rows; r++)
                memcpy(t->taps[set] + ((size_t)(at + r) * taps + j) * hidden,
                       model_cursor_watched(cursor, set * taps + j) + (size_t)r * hidden,
                       hidden * sizeof(float));
}

/* The target alone, greedily, token by token. */
static void text_make(struct text *t, struct model *m, struct model_cursor *cursor,
                      const struct dflash_config *d)
{
    const struct model_info *info = model_info(m);
    struct test_cache cache;
    struct rng rng;
    rng_init(&rng, 0x5eed0071);
    cache_init(&cache, m, 16, TEXT_MAX / 16, 1, &rng);
    const uint32_t *blocks = cache_take(&cache, TEXT_MAX / 16);
    for (uint32_t set = 0; set < TAP_SETS; set++)
        t->taps[set] = mem_take_array((uint64_t)TEXT_MAX * d->tap_count * d->hidden, 4);
    t->count = t->prompt;
    for (uint32_t done = 0; t->count < t->prompt + NEW_MAX;) {
        uint32_t rows = t->count - done, best = UINT32_MAX;
        struct model_seq seq = {.position_start = done,
                                .row_count = rows,
                                .fresh = done == 0,
                                .logits_from = rows - 1,
                                .blocks = blocks,
                                .block_count = TEXT_MAX / 16};
        struct model_batch batch = {
            .seq_count = 1, .row_count = rows, .seqs = &seq, .ids = t->ids + done};
        model_begin(cursor, &cache.kv, &batch);
        const float *logits = model_finish(cursor);
        taps_keep(t, cursor, done, rows, d->tap_count, d->hidden);
        done = t->count;
        for (uint32_t v = 0; v < info->vocab_size; v++)
            if (info->has_token[v] && (best == UINT32_MAX || logits[v] > logits[best]))
                best = v;
        t->ids[t->count++] = best;
        if (stops(info, best))
            break;
    }
    cache_fini(&cache);
}

static int setup(void **state)
{
    (void)state;
    char path[1024];
    json_error_t error;
    struct dflash *d = load();
    const struct dflash_config *c = dflash_config(d);
    struct model *m = test_model("tests/golden/tiny-glm", 1);
    struct model_cursor *cursor = test_cursor(m, TEXT_MAX, 1, TEXT_MAX);
    uint32_t watch[MODEL_WATCH_MAX];
    assert_true(TAP_SETS * c->tap_count <= MODEL_WATCH_MAX);
    for (uint32_t j = 0; j < c->tap_count; j++) {
        watch[j] = c->taps[j];
        watch[c->tap_count + j] = c->taps[j] + 1;
        assert_true(c->taps[j] + 1 < model_info(m)->layer_count);
    }
    model_cursor_watch(cursor, watch, TAP_SETS * c->tap_count);
    test_path(path, sizeof(path), "tests/golden/dflash2/acceptance-prompts.json");
    json_t *prompts = json_load_file(path, 0, &error);
    assert_true(json_array_size(prompts) >= PROMPTS);
    for (uint32_t i = 0; i < PROMPTS; i++) {
        const json_t *ids = json_object_get(json_array_get(prompts, i), "ids");
        struct text *t = &texts[i];
        t->prompt = (uint32_t)json_array_size(ids);
        assert_in_range(t->prompt, HOLE, TEXT_MAX - NEW_MAX);
        for (uint32_t k = 0; k < t->prompt; k++)
            t->ids[k] = (uint32_t)json_integer_value(json_array_get(ids, k));
        text_make(t, m, cursor, c);
    }
    json_decref(prompts);
    model_cursor_destroy(&cursor);
    model_destroy(&m);
    dflash_destroy(&d);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < PROMPTS; i++)
        for (uint32_t set = 0; set < TAP_SETS; set++)
            mem_give(texts[i].taps[set]);
    return 0;
}

/* The taps of tokens [0, n) as the fault leaves them: [n, tap_count, hidden]. */
static void taps_hurt(const struct text *t, enum fault fault, uint32_t n, uint32_t taps,
                      uint32_t hidden, float *ret)
{
    const float *from = t->taps[fault == LAYER_LATE];
    const size_t row = (size_t)taps * hidden;
    for (uint32_t r = 0; r < n; r++) {
        for (uint32_t j = 0; j < taps; j++) {
            uint32_t of = fault == ORDER ? (j + 1) % taps : j;
            memcpy(ret + r * row + (size_t)j * hidden, from + r * row + (size_t)of * hidden,
                   hidden * sizeof(float));
        }
    }
    if (fault == HOLE_BEFORE)
        memset(ret + (n - HOLE) * row, 0, HOLE * row * sizeof(float));
    if (fault == POSITION_LATE) {
        memmove(ret + row, ret, (n - 1) * row * sizeof(float));
        memset(ret, 0, row * sizeof(float));
    }
}

/* Drafts of 7, each step's accepted ones as verification would find them: equal to the text. */
static double accepted_mean(struct dflash *d, enum fault fault, uint32_t *ret_steps)
{
    const struct dflash_config *c = dflash_config(d);
    uint32_t steps = 0, accepted = 0;
    float *taps = mem_take_array((uint64_t)TEXT_MAX * c->tap_count * c->hidden, sizeof(float));
    struct dflash_context context = {.rows = mem_take(dflash_context_bytes(d))};
    for (uint32_t i = 0; i < PROMPTS; i++) {
        const struct text *t = &texts[i];
        for (uint32_t n = t->prompt; n + 1 < t->count; steps++) {
            struct dflash_block block = {.context = &context, .anchor = t->ids[n]};
            if (fault == ANCHOR)
                block.anchor = t->ids[0];
            taps_hurt(t, fault, n, c->tap_count, c->hidden, taps);
            dflash_context_begin(&context, 0);
            dflash_context_append(d, &context, taps, n);
            dflash_draft(d, &block, 1);
            uint32_t right = 0;
            while (right < c->block_size - 1 && n + 1 + right < t->count &&
                   block.ids[right] == t->ids[n + 1 + right])
                right++;
            accepted += right;
            n += right + 1;
        }
    }
    mem_give(taps);
    mem_give(context.rows);
    *ret_steps = steps;
    return (double)accepted / steps;
}

static void wrong_context_lowers_acceptance(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        double least, most;
    } expect[FAULT_COUNT] = {
        [NONE] = {"as trained", 5.7, 5.85},
        [ORDER] = {"taps in another order", 1, 5.6},
        [LAYER_LATE] = {"taps one layer late", 1, 4},
        [HOLE_BEFORE] = {"8 positions missing before the anchor", 1, 4},
        [POSITION_LATE] = {"context one position late", 1, 3.5},
        [ANCHOR] = {"another anchor", 0.1, 2.5},
    };
    struct dflash *d = load();
    for (uint32_t f = 0; f < FAULT_COUNT; f++) {
        uint32_t steps;
        double mean = accepted_mean(d, (enum fault)f, &steps);
        print_message("%s: %.2f right of 7 in %u steps\n", expect[f].what, mean, steps);
        assert_true(mean >= expect[f].least && mean <= expect[f].most);
    }
    dflash_destroy(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(wrong_context_lowers_acceptance, setup, teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
