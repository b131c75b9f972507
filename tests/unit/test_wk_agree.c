/* SPDX-License-Identifier: Apache-2.0 */
/* Plans between ranks: decoding hostile bytes, agreement before a step, the dump of past plans. */
#include "tests/unit/fabric_world.h"

#include <jansson.h>
#include <math.h>
#include <sys/stat.h>

#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "worker/wk_agree.h"
#include "worker/wk_plan.h"
#include "worker/wk_plan_decode.h"
#include "worker/wk_plan_dump.h"

#define SEQS    8u
#define ROWS    64u
#define BLOCKS  64u
#define HISTORY 3100u

static const struct wk_plan_limits limits = {.entries = 8,
                                             .live_slots = 4,
                                             .slot_count = 7,
                                             .block_count = 100,
                                             .table_max = 40,
                                             .context_max = 4096,
                                             .vocab_size = 300,
                                             .layer_count = 5};

static void random_setup(struct rng *rng, struct wk_plan_setup *s)
{
    memset(s, 0, sizeof *s);
    s->prompt_count = rng_below(rng, 4000);
    s->temperature = rng_unit(rng);
    s->top_p = rng_unit(rng);
    s->repetition_penalty = 1 + rng_unit(rng);
    s->seed = rng_u64(rng);
    s->choice = rng_below(rng, 3);
    s->logprobs = rng_below(rng, 2) != 0;
    s->id.bytes[3] = (uint8_t)rng_u32(rng);
    s->taps = rng_below(rng, 2) != 0;
    s->bias_count = rng_below(rng, 5);
    for (uint32_t i = 0; i < s->bias_count; i++) {
        s->bias_ids[i] = rng_below(rng, limits.vocab_size);
        s->bias_values[i] = (float)rng_unit(rng);
    }
    s->banned_count = rng_below(rng, 4);
    for (uint32_t i = 0; i < s->banned_count; i++)
        s->banned_ids[i] = rng_below(rng, limits.vocab_size);
}

static void random_seq(struct rng *rng, struct wk_plan *p, struct wk_plan_seq *s)
{
    memset(s, 0, sizeof *s);
    s->entry = rng_below(rng, limits.entries);
    s->setup = WK_NONE;
    s->state_slot = rng_below(rng, limits.live_slots);
    s->position_start = 10 + rng_below(rng, 3000);
    s->row_count = 1 + rng_below(rng, WK_STEP_ROWS_MAX);
    s->replay_count = rng_below(rng, WK_STEP_ROWS_MAX + 1);
    s->logits_from = rng_below(rng, s->row_count + 1);
    s->journal = rng_below(rng, 2) != 0;
    s->ids_at = p->row_count;
    for (uint32_t i = 0; i < s->row_count; i++)
        p->ids[p->row_count++] = rng_below(rng, limits.vocab_size);
    s->final_count = rng_below(rng, WK_STEP_ROWS_MAX + 1);
    for (uint32_t i = 0; i < s->final_count; i++)
        s->final_ids[i] = rng_below(rng, limits.vocab_size);
    s->blocks_at = p->block_count;
    s->block_first = rng_below(rng, 30);
    s->block_count = rng_below(rng, 5);
    for (uint32_t i = 0; i < s->block_count; i++)
        p->blocks[p->block_count++] = rng_below(rng, limits.block_count);
    if (p->setup_count < 4 && rng_below(rng, 2) != 0) {
        random_setup(rng, &p->setups[p->setup_count]);
        s->setup = p->setup_count++;
        if (s->position_start <= HISTORY - p->history_total) {
            s->history_at = p->history_total;
            s->history_count = s->position_start;
            for (uint32_t i = 0; i < s->history_count; i++)
                p->history[p->history_total++] = rng_below(rng, limits.vocab_size);
        }
        s->restore = rng_below(rng, 2) != 0;
        s->restore_slot = limits.live_slots + rng_below(rng, 3);
    }
    s->snapshot = rng_below(rng, 2) != 0;
    s->snapshot_slot = limits.live_slots + rng_below(rng, 3);
}

static void random_plan(struct rng *rng, struct wk_plan *p, uint64_t step, uint32_t epoch)
{
    wk_plan_clear(p, step, epoch, rng_below(rng, 2) != 0 ? WK_PLAN_DECODE : WK_PLAN_PREFILL);
    p->begin = rng_below(rng, 2) != 0;
    p->layer_end = rng_below(rng, limits.layer_count + 1);
    uint32_t seqs = rng_below(rng, SEQS + 1);
    for (uint32_t i = 0; i < seqs; i++)
        random_seq(rng, p, &p->seqs[p->seq_count++]);
    wk_plan_seal(p);
}

static void test_round_trip(void **state)
{
    (void)state;
    struct rng rng;
    struct wk_plan *a = wk_plan_create(SEQS, ROWS, BLOCKS, HISTORY);
    struct wk_plan *b = wk_plan_create(SEQS, ROWS, BLOCKS, HISTORY);
    struct err_detail detail = {{0}};
    rng_init(&rng, 1);
    for (uint32_t i = 1; i <= 300; i++) {
        random_plan(&rng, a, i, 7);
        if (wk_plan_decode(a->encoding, a->encoding_bytes, &limits, b, &detail) != ERR_OK)
            fail_msg("%s", detail.text);
        assert_int_equal(wk_plan_admit(b, i - 1, 7, &detail), ERR_OK);
        assert_memory_equal(&a->hash, &b->hash, sizeof a->hash);
        /* Sealing what was read gives the same bytes: nothing was lost. */
        wk_plan_seal(b);
        assert_int_equal(b->encoding_bytes, a->encoding_bytes);
        assert_memory_equal(b->encoding, a->encoding, a->encoding_bytes);
    }
    wk_plan_destroy(&a);
    wk_plan_destroy(&b);
}

/* What a decoded plan may hold, whatever the bytes were. */
static void check_bounds(const struct wk_plan *p)
{
    assert_true(p->seq_count <= SEQS && p->row_count <= ROWS && p->block_count <= BLOCKS);
    for (uint32_t i = 0; i < p->row_count; i++)
        assert_true(p->ids[i] < limits.vocab_size);
    for (uint32_t i = 0; i < p->block_count; i++)
        assert_true(p->blocks[i] < limits.block_count);
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        assert_true(s->entry < limits.entries && s->state_slot < limits.live_slots);
        assert_true(s->row_count > 0 && s->ids_at + s->row_count <= p->row_count);
        assert_true(s->position_start + s->row_count <= limits.context_max);
        assert_true(s->setup == WK_NONE || s->setup < p->setup_count);
        assert_true(s->block_first + s->block_count <= limits.table_max);
        assert_true(s->blocks_at + s->block_count <= p->block_count);
        assert_true(!s->restore || s->restore_slot < limits.slot_count);
        assert_true(!s->snapshot || s->snapshot_slot < limits.slot_count);
        assert_true(s->history_at + s->history_count <= p->history_total);
        assert_true(s->history_count == 0 || s->history_count == s->position_start);
    }
}

static void test_hostile(void **state)
{
    (void)state;
    struct rng rng;
    struct wk_plan *a = wk_plan_create(SEQS, ROWS, BLOCKS, HISTORY);
    struct wk_plan *b = wk_plan_create(SEQS, ROWS, BLOCKS, HISTORY);
    struct err_detail detail;
    uint32_t refused = 0;
    rng_init(&rng, 2);
    for (uint32_t i = 1; i <= 4000; i++) {
        random_plan(&rng, a, i, 7);
        size_t count = a->encoding_bytes;
        if (i % 4 == 0)
            count = rng_below(&rng, (uint32_t)count); /* cut anywhere */
        for (uint32_t k = 0; k < 1 + i % 3 && count > 0; k++) {
            uint32_t at = rng_below(&rng, (uint32_t)count);
            a->encoding[at] = i % 2 ? (uint8_t)rng_u32(&rng) : 0xff;
        }
        /* A copy of the exact size, so that a sanitizer sees a read beyond it. */
        uint8_t *bytes = malloc(count > 0 ? count : 1);
        memcpy(bytes, a->encoding, count);
        if (wk_plan_decode(bytes, count, &limits, b, &detail) != ERR_OK)
            refused++;
        else
            check_bounds(b);
        free(bytes);
    }
    assert_true(refused > 1500);
    wk_plan_destroy(&a);
    wk_plan_destroy(&b);
}

/* ---- agreement ---- */

enum { SAME, OTHER_HASH, OTHER_STEP, OTHER_EPOCH, REFUSES, CASES };

struct verdicts {
    int how;
    enum err code[3], after[3];
    struct err_detail detail[3];
};

static void body_agree(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct verdicts *v = w->arg;
    struct rng rng;
    struct wk_plan *p = wk_plan_create(SEQS, ROWS, BLOCKS, HISTORY);
    struct wk_agree_epochs epochs =
        rank == 0 ? (struct wk_agree_epochs){3, 4} : (struct wk_agree_epochs){4, 3};
    struct err_detail detail;
    float value = 1;
    must_join(f, 10000);
    rng_init(&rng, 3);
    for (uint64_t step = 1; step <= 5; step++) {
        random_plan(&rng, p, step, 3);
        MUST(wk_agree_step(f, p, step, &epochs, ERR_OK, &detail) == ERR_OK);
        MUST(wk_all_reduce(f, &value, 1) == ERR_OK);
    }
    MUST(value == powf(w->ranks, 5));
    uint64_t step = 6;
    bool odd = rank == w->ranks - 1;
    if (odd && v->how == OTHER_HASH)
        rng_u32(&rng);
    if (odd && v->how == OTHER_STEP)
        step = 7;
    if (odd && v->how == OTHER_EPOCH)
        epochs.self = 5;
    random_plan(&rng, p, step, 3);
    enum err own = odd && v->how == REFUSES ? ERR_CORRUPT : ERR_OK;
    v->code[rank] =
        wk_agree_step(f, own == ERR_OK ? p : NULL, step, &epochs, own, &v->detail[rank]);
    v->after[rank] = wk_all_reduce(f, &value, 1);
    wk_plan_destroy(&p);
}

static void test_agree(void **state)
{
    (void)state;
    static const enum err expected[CASES] = {ERR_OK, ERR_INVALID, ERR_INVALID, ERR_EPOCH,
                                             ERR_CORRUPT};
    static const char *const words[CASES] = {"", "plans differ", "step 7", "epochs 3,5",
                                             "refuses the plan"};
    for (int how = 0; how < CASES; how++) {
        for (uint32_t ranks = 2; ranks <= 3; ranks++) {
            struct world w;
            struct verdicts v = {.how = how};
            world_init(&w, ranks, 1024);
            world_run(&w, body_agree, &v);
            world_fini(&w);
            const char *text = NULL;
            for (uint32_t r = 0; r < ranks; r++) {
                /* No collective runs after a refusal. */
                assert_int_equal(v.after[r], v.code[r]);
                /* Of three, one may hear that another left before it has all ballots. */
                if (ranks > 2 && how != SAME &&
                    (v.code[r] == ERR_CLOSED || strstr(v.detail[r].text, "has left") != NULL))
                    continue;
                assert_int_equal(v.code[r], expected[how]);
                assert_non_null(strstr(v.detail[r].text, words[how]));
                text = text != NULL ? text : v.detail[r].text;
                assert_string_equal(v.detail[r].text, text);
            }
            assert_non_null(text);
        }
    }
}

/* ---- dump ---- */

static void check_line(const char *line, const struct wk_plan_past *past)
{
    json_error_t error;
    json_t *j = json_loads(line, 0, &error);
    assert_non_null(j);
    assert_int_equal(json_integer_value(json_object_get(j, "step")), past->step);
    const char *hash = json_string_value(json_object_get(j, "hash"));
    const json_t *encoding = json_object_get(j, "encoding");
    assert_int_equal(strlen(hash), 32);
    if (past->encoding == NULL) {
        assert_true(json_is_null(encoding));
    } else {
        /* The hash is that of the bytes: a reader can prove what was run. */
        size_t chars = strlen(json_string_value(encoding));
        uint8_t *bytes = malloc(chars / 2 + 1);
        struct hash128 have;
        assert_true(hex_decode(json_string_value(encoding), chars, bytes));
        assert_true(hex_decode(hash, 32, have.bytes));
        struct hash128 need = hash_xxh3_once(bytes, chars / 2);
        assert_memory_equal(&have, &need, sizeof have);
        free(bytes);
    }
    json_decref(j);
}

static void test_dump(void **state)
{
    (void)state;
    struct world w;
    struct rng rng;
    struct err_detail detail;
    struct stat st;
    struct wk_plan *p = wk_plan_create(SEQS, ROWS, BLOCKS, HISTORY);
    struct wk_plan_ring *ring = wk_plan_ring_create(20000);
    world_init(&w, 2, 1024);
    rng_init(&rng, 5);
    for (uint32_t i = 1; i <= 300; i++) {
        random_plan(&rng, p, i, 3);
        wk_plan_ring_add(ring, p, 1000 * i);
        if (i < 300)
            wk_plan_ring_done(ring, i, 7);
    }
    struct wk_plan_dump_head head = {1, 2, 9, 400000, "rank 0 \"silent\"\n"};
    for (int turn = 0; turn < 2; turn++) /* a second dump replaces the first */
        assert_int_equal(wk_plan_dump(ring, &head, w.path, &detail), ERR_OK);
    assert_int_equal(stat(w.path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    FILE *file = fopen(w.path, "r");
    static char line[200000];
    assert_non_null(fgets(line, sizeof line, file));
    json_t *first = json_loads(line, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(first, "reason")), head.reason);
    assert_int_equal(json_integer_value(json_object_get(first, "epoch")), 9);
    json_decref(first);
    uint32_t back = 0;
    struct wk_plan_past past;
    while (fgets(line, sizeof line, file) != NULL) {
        assert_true(wk_plan_ring_at(ring, back, &past));
        check_line(line, &past);
        back++;
    }
    fclose(file);
    assert_int_equal(back, WK_PLAN_RING_COUNT);
    assert_int_not_equal(wk_plan_dump(ring, &head, "/nowhere/at/all", &detail), ERR_OK);
    wk_plan_ring_destroy(&ring);
    wk_plan_destroy(&p);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_agree),
        cmocka_unit_test(test_dump),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
