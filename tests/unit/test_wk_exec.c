/* SPDX-License-Identifier: Apache-2.0 */
/* Core and device thread together on the demo model: whatever the slices, drafts, neighbours and
 * penalties, the text is that of the request alone without drafts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/arena.h"
#include "lib/base/rng.h"
#include "lib/model/sampler.h"
#include "lib/net/loop.h"
#include "worker/wk_canary.h"
#include "worker/wk_core.h"
#include "worker/wk_exec.h"
#include "worker/wk_exec_tables.h"

#define REQS   6u
#define OUT    16u
#define PROMPT 80u
#define BT     16u
#define BLOCKS 96u

struct rig {
    struct loop *loop;
    struct loop_waker *waker;
    struct loop_timer *late;
    struct wk_exec *exec;
    struct wk_core *core;
    struct wk_core_options options;
    struct wk_actions actions;
    struct arena arena;
    struct model_kv kv;
    struct rng rng;
    uint32_t prompts[REQS][PROMPT], prompt_count[REQS];
    struct msg_sampling sampling[REQS];
    uint32_t out[REQS][OUT], count[REQS], finish[REQS];
    float logprob[REQS][OUT];
    uint32_t held[REQS], accepted, drafted, next_block;
    uint32_t (*truth)[OUT]; /* for drafts; NULL = none */
    bool loaded, done;
};

static struct rig rig;

static void step(struct wk_event *event);

static void msg_in(struct msg *m)
{
    struct wk_event e = {.type = WK_EV_MSG, .msg = m};
    step(&e);
}

static uint32_t index_of(const struct msg_id *id)
{
    assert_true(id->bytes[0] < REQS);
    return id->bytes[0];
}

static void kv_answer(const struct msg *m)
{
    static uint32_t blocks[BLOCKS];
    uint32_t i = index_of(&m->id);
    if (m->type == MSG_KV_OPEN) {
        uint32_t count = m->u.kv_open.blocks_wanted;
        for (uint32_t k = 0; k < count; k++) /* scattered, no two requests share one */
            blocks[k] = (rig.next_block++ * 37u) % BLOCKS;
        assert_true(rig.next_block <= BLOCKS);
        rig.held[i] = count;
        struct msg r = {.type = MSG_KV_OPEN_REPLY, .id = m->id};
        r.u.kv_open_reply = (struct msg_kv_open_reply){.lease = i + 1u,
                                                       .state_slot = REQS - 1 - i,
                                                       .snapshot_slot = UINT32_MAX,
                                                       .block_count = count,
                                                       .blocks = blocks};
        msg_in(&r);
    } else if (m->type == MSG_KV_EXTEND) {
        uint32_t count = m->u.kv_extend.blocks_wanted;
        for (uint32_t k = 0; k < count; k++)
            blocks[k] = (rig.next_block++ * 37u) % BLOCKS;
        assert_true(rig.next_block <= BLOCKS);
        struct msg r = {.type = MSG_KV_EXTEND_REPLY, .id = m->id};
        r.u.kv_extend_reply =
            (struct msg_kv_extend_reply){.lease = i + 1u,
                                         .blocks_have = m->u.kv_extend.blocks_have,
                                         .block_count = count,
                                         .blocks = blocks};
        msg_in(&r);
    }
}

static void draft_answer(const struct msg *m)
{
    if (m->type != MSG_DRAFT_PROPOSE)
        return;
    uint32_t i = index_of(&m->id), ids[MSG_DRAFT_IDS_MAX];
    const struct msg_draft_propose *p = &m->u.draft_propose;
    for (uint32_t k = 0; k < p->draft_count; k++) {
        uint32_t at = rig.count[i] + k;
        ids[k] = at < OUT && rng_below(&rig.rng, 4) ? rig.truth[i][at] : rng_below(&rig.rng, 900);
    }
    struct msg r = {.type = MSG_DRAFT_REPLY, .id = m->id};
    r.u.draft_reply = (struct msg_draft_reply){.base_length = rig.prompt_count[i] + rig.count[i],
                                               .step = p->step,
                                               .epoch = p->epoch,
                                               .ids_count = p->draft_count,
                                               .ids = ids};
    msg_in(&r);
}

static void tokens_take(const struct msg *m)
{
    if (m->type == MSG_ASSIGN_REPLY) {
        assert_int_equal(m->u.assign_reply.code, ERR_OK);
        return;
    }
    uint32_t i = index_of(&m->id);
    const struct msg_tokens *t = &m->u.tokens;
    assert_int_equal(t->seq, rig.count[i]);
    for (uint32_t k = 0; k < t->count; k++) {
        rig.logprob[i][rig.count[i]] = t->logprob[k];
        rig.out[i][rig.count[i]++] = t->ids[k];
    }
    if (t->finish != MSG_FINISH_NONE) {
        rig.finish[i] = t->finish;
        rig.drafted += t->receipt.drafted;
        rig.accepted += t->receipt.accepted;
    }
}

/* Actions may cause events whose actions overwrite these: messages out first, answers after. */
static void step(struct wk_event *event)
{
    static struct wk_action kept[256];
    static struct arena arenas[8];
    static uint32_t depth;
    static uint32_t kept_count;
    assert_true(depth < 8);
    struct arena *arena = &arenas[depth++];
    if (arena->magic == 0)
        arena_init(arena, 1 << 16, 1 << 24);
    arena_reset(arena);
    rig.actions.arena = arena;
    event->now_us = loop_now_us(rig.loop);
    wk_core_step(rig.core, event, &rig.actions);
    uint32_t first = kept_count, count = 0;
    for (uint32_t i = 0; i < rig.actions.count; i++) {
        struct wk_action *a = &rig.actions.items[i];
        if (a->type == WK_ACT_RUN)
            wk_exec_run(rig.exec, rig.actions.plan);
        else if (a->type == WK_ACT_ROUTER)
            tokens_take(&a->msg);
        else
            kept[first + count++] = *a;
        assert_true(first + count < 256);
    }
    kept_count += count;
    for (uint32_t i = first; i < first + count; i++) {
        if (kept[i].type == WK_ACT_KVMGR)
            kv_answer(&kept[i].msg);
        else
            draft_answer(&kept[i].msg);
    }
    kept_count = first;
    depth--;
}

/* Sent as often as the drafter's answers would be: a slow machine must not make it look silent. */
static void hello(void)
{
    struct msg m = {.type = MSG_DRAFT_HELLO_REPLY};
    m.u.draft_hello_reply =
        (struct msg_draft_hello_reply){.incarnation = 1, .source = "ngram", .draft_tokens_max = 7};
    if (rig.truth != NULL)
        msg_in(&m);
}

static void on_news(void *arg)
{
    struct wk_news news;
    (void)arg;
    while (wk_exec_news(rig.exec, &news)) {
        if (news.type == WK_NEWS_DONE) {
            struct wk_event e = {.type = WK_EV_DONE, .result = news.result};
            hello();
            step(&e);
        } else {
            if (news.type == WK_NEWS_FAILED)
                print_error("%s\n", wk_exec_failure(rig.exec)->text);
            assert_int_equal(news.type, WK_NEWS_LOADED);
            rig.loaded = true;
        }
    }
    bool over = rig.core == NULL;
    for (uint32_t i = 0; i < REQS && !over && rig.prompt_count[i] > 0; i++)
        if (rig.finish[i] == 0)
            return;
    loop_stop(rig.loop);
}

static void on_late(void *arg)
{
    (void)arg;
    fail_msg("takes too long");
}

static void memory_take(const struct model_info *info)
{
    uint64_t latents = (uint64_t)BT * info->latent_dim * sizeof(float);
    rig.kv = (struct model_kv){.block_tokens = BT, .block_count = BLOCKS, .slot_count = REQS};
    rig.kv.index_offset = latents;
    rig.kv.layer_stride = latents + BT / info->index_kpool * info->index_dim * sizeof(float);
    rig.kv.block_stride = rig.kv.layer_stride * info->dsa_layers;
    rig.kv.slot_stride = info->state_bytes;
    rig.kv.blocks = calloc(BLOCKS, rig.kv.block_stride);
    rig.kv.slots = aligned_alloc(64, REQS * info->state_bytes);
    memset(rig.kv.slots, 0x7f, REQS * info->state_bytes); /* what an earlier owner left */
}

static void requests_make(void)
{
    for (uint32_t i = 0; i < REQS; i++) {
        rig.prompt_count[i] = 16 + 11 * i;
        for (uint32_t k = 0; k < rig.prompt_count[i]; k++)
            rig.prompts[i][k] = rng_below(&rig.rng, 900);
        rig.sampling[i] = (struct msg_sampling){.temperature = i % 3 == 0 ? 0 : 0.8,
                                                .top_p = i == 4 ? 0.9 : 1,
                                                .repetition_penalty = i % 2 ? 1.3 : 1,
                                                .presence_penalty = i == 3 ? 0.5 : 0,
                                                .frequency_penalty = i == 5 ? 0.4 : 0,
                                                .seed = 77 + i,
                                                .logprobs = true,
                                                .top_logprobs = 2};
    }
}

static int rig_open(void **state)
{
    static char directory[1024];
    (void)state;
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    snprintf(directory, sizeof directory, "%s/tests/golden/tiny-glm", root ? root : ".");
    rng_init(&rig.rng, 3);
    rig.loop = loop_create();
    rig.waker = loop_waker_create(rig.loop, on_news, NULL);
    struct wk_core_options *o = &rig.options;
    *o = (struct wk_core_options){
        .seqs_max = REQS,
        .slice_rows_max = 128,
        .slice_ms = 10000,
        .decode_rows_max = 48,
        .deadline_ms = 1000,
        .ids_max = 4096,
        .shape = {
            .block_tokens = BT, .block_count = BLOCKS, .slot_count = REQS, .live_slots = REQS}};
    struct wk_exec_options x = {.directory = directory,
                                .numerics = MODEL_EXACT,
                                .threads = 2,
                                .entries = wk_core_entries(o),
                                .plan_seqs = wk_core_plan_seqs(o),
                                .slice_rows_max = 128,
                                .decode_rows_max = 48,
                                .context_max = 512,
                                .waker = rig.waker};
    rig.late = loop_timer_create(rig.loop, on_late, NULL);
    loop_timer_start(rig.late, 100000000, false);
    rig.exec = wk_exec_create(&x);
    while (!rig.loaded)
        loop_run(rig.loop);
    memory_take(wk_exec_loaded(rig.exec)->info);
    requests_make();
    rig.actions.count_max = wk_core_actions_max(o);
    rig.actions.items = calloc(rig.actions.count_max, sizeof *rig.actions.items);
    return 0;
}

static int rig_close(void **state)
{
    (void)state;
    wk_exec_destroy(&rig.exec);
    loop_waker_destroy(&rig.waker);
    loop_timer_destroy(&rig.late);
    loop_destroy(&rig.loop);
    free(rig.actions.items);
    free(rig.kv.blocks);
    free(rig.kv.slots);
    return 0;
}

static uint32_t epoch = 1;
static uint64_t steps_run;

/* Runs requests [first, first + count) through a core of its own. */
static void run(uint32_t first, uint32_t count, const char *spec, uint32_t layers, uint32_t rows,
                uint32_t (*truth)[OUT])
{
    struct wk_core_options o = rig.options;
    const struct wk_loaded *l = wk_exec_loaded(rig.exec);
    struct err_detail d;
    o.slice_layers_max = layers;
    o.slice_rows_max = rows;
    o.context_max = l->context_max;
    o.vocab_size = l->info->vocab_size;
    o.layer_count = l->info->layer_count;
    o.has_token = l->info->has_token;
    o.stop_id_count = l->info->stop_id_count;
    o.stop_ids = l->info->stop_ids;
    o.prefill_us_per_row = 500;
    o.step_first = steps_run;
    assert_int_equal(wk_spec_parse(spec, &o.spec, &d), ERR_OK);
    rig.truth = truth;
    rig.next_block = 0;
    rig.drafted = rig.accepted = 0;
    for (uint32_t i = first; i < first + count; i++)
        rig.count[i] = rig.finish[i] = 0;
    rig.core = wk_core_create(&o);
    struct wk_event attach = {.type = WK_EV_KV_ATTACHED, .kv_epoch = ++epoch, .shape = o.shape};
    assert_int_equal(wk_exec_attach(rig.exec, &rig.kv, epoch), ERR_OK);
    step(&attach);
    hello();
    for (uint32_t i = first; i < first + count; i++) {
        struct msg m = {.type = MSG_WORKER_ASSIGN, .id = {{(uint8_t)i}}};
        m.u.request = (struct msg_request){
            .session_key = "",
            .cache_salt = "",
            .effort = "",
            .client_id = "",
            .spec = "",
            .prompt_count = rig.prompt_count[i],
            .ids_count = rig.prompt_count[i],
            .ids = rig.prompts[i],
            .sampling = rig.sampling[i],
            .limits = {.output_tokens_max = OUT, .output_tokens_min = i % 2 ? OUT : 8}};
        msg_in(&m);
    }
    loop_run(rig.loop);
    for (uint32_t i = first; i < first + count; i++)
        assert_true(rig.finish[i] == MSG_FINISH_LENGTH || rig.finish[i] == MSG_FINISH_STOP);
    struct wk_plan_past past;
    assert_true(wk_plan_ring_at(wk_core_ring(rig.core), 0, &past));
    steps_run = past.step;
    wk_core_destroy(&rig.core);
}

static void the_text_is_that_of_the_request_alone(void **state)
{
    (void)state;
    static uint32_t alone[REQS][OUT], counts[REQS], finishes[REQS];
    static float logprobs[REQS][OUT];
    for (uint32_t i = 0; i < REQS; i++) {
        for (uint32_t k = 0; k < REQS; k++)
            rig.finish[k] = MSG_FINISH_STOP;
        run(i, 1, "off", 0, 128, NULL);
        finishes[i] = rig.finish[i];
    }
    memcpy(alone, rig.out, sizeof alone);
    memcpy(counts, rig.count, sizeof counts);
    memcpy(logprobs, rig.logprob, sizeof logprobs);
    static const struct {
        const char *spec;
        uint32_t layers, rows;
    } cases[] = {{"off", 0, 128},
                 {"fixed:7", 0, 128},
                 {"fixed:3", 3, 37},
                 {"fixed:1", 1, 5},
                 {"fixed:7", 2, 64}};
    uint32_t accepted = 0, rejected = 0;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        run(0, REQS, cases[c].spec, cases[c].layers, cases[c].rows,
            cases[c].spec[0] == 'o' ? NULL : alone);
        assert_memory_equal(rig.count, counts, sizeof counts);
        assert_memory_equal(rig.finish, finishes, sizeof finishes);
        for (uint32_t i = 0; i < REQS; i++) {
            assert_memory_equal(rig.out[i], alone[i], counts[i] * sizeof(uint32_t));
            assert_memory_equal(rig.logprob[i], logprobs[i], counts[i] * sizeof(float));
        }
        accepted += rig.accepted;
        rejected += rig.drafted - rig.accepted;
    }
    assert_true(accepted > 40 && rejected > 40);
}

/* The canary computed at load in its own cache is what a request for it gives. */
static void the_canary_answers_itself(void **state)
{
    (void)state;
    const struct wk_loaded *l = wk_exec_loaded(rig.exec);
    assert_int_equal(WK_CANARY_PROMPT, 16);
    uint32_t ids[2] = {1, 2};
    struct hash128 h = hash_xxh3_once(ids, sizeof ids);
    uint64_t first;
    memcpy(&first, h.bytes, sizeof first);
    assert_true(wk_canary_hash(ids, 2) == first);
    for (uint32_t i = 0; i < WK_CANARY_PROMPT; i++)
        rig.prompts[0][i] = l->canary_ids[i];
    uint32_t count = rig.prompt_count[0];
    struct msg_sampling sampling = rig.sampling[0];
    rig.prompt_count[0] = WK_CANARY_PROMPT;
    rig.sampling[0] = (struct msg_sampling){.top_p = 1, .repetition_penalty = 1, .logprobs = true};
    for (uint32_t k = 0; k < REQS; k++)
        rig.finish[k] = MSG_FINISH_STOP;
    run(0, 1, "off", 0, 7, NULL);
    uint32_t same = rig.count[0] < WK_CANARY_OUTPUT ? rig.count[0] : WK_CANARY_OUTPUT;
    assert_true(same >= 1);
    assert_memory_equal(rig.out[0], l->canary_output[0][0], same * sizeof(uint32_t));
    rig.prompt_count[0] = count;
    rig.sampling[0] = sampling;
}

/* A verify step's rows are sampled as single steps would be, penalties and bans included. */
static void rows_are_sampled_as_single_steps(void **state)
{
    (void)state;
    enum { VOCAB = 50, ROWS = 8 };
    uint8_t has_token[VOCAB];
    static float logits[ROWS * VOCAB];
    struct rng r;
    rng_init(&r, 9);
    memset(has_token, 1, sizeof has_token);
    struct sampler *s = sampler_create(VOCAB, has_token);
    struct wk_tables *t = wk_tables_create(2, VOCAB);
    wk_tables_blocks(t, 4);
    struct wk_plan *p = wk_plan_create(2, 8, 8, 8);
    for (int round = 0; round < 300; round++) {
        wk_plan_clear(p, 1, 1, WK_PLAN_PREFILL);
        for (uint32_t e = 0; e < 2; e++) {
            p->seqs[e] = (struct wk_plan_seq){.entry = e, .setup = e, .fresh = true};
            p->setups[e] = (struct wk_plan_setup){.prompt_count = 3,
                                                  .output_tokens_min = 4,
                                                  .temperature = 0.9,
                                                  .top_p = 1,
                                                  .repetition_penalty = 1.5,
                                                  .presence_penalty = 0.5,
                                                  .frequency_penalty = 0.7,
                                                  .seed = (uint64_t)round,
                                                  .banned_count = 1,
                                                  .banned_ids = {7}};
        }
        p->seq_count = p->setup_count = 2;
        wk_tables_take(t, p);
        for (uint32_t i = 0; i < ROWS * VOCAB; i++)
            logits[i] = (float)(rng_unit(&r) * 3);
        uint32_t history[5] = {1, 2, 3, rng_below(&r, VOCAB), rng_below(&r, VOCAB)};
        wk_tables_add(t, 0, history, 5);
        wk_tables_add(t, 1, history, 5);
        struct wk_result_seq one, all = {0};
        uint32_t drafts[ROWS], want[ROWS];
        for (uint32_t j = 0; j < ROWS; j++) { /* entry 0: token by token */
            wk_tables_sample(t, s, 0, logits + j * VOCAB, 1, NULL, 4 + j, &one);
            assert_int_equal(one.count, 1);
            want[j] = drafts[j] = one.ids[0];
            wk_tables_add(t, 0, one.ids, 1);
            assert_true(j > 0 || one.ids[0] != 7); /* output token 3 of at least 4 */
        }
        uint32_t wrong = rng_below(&r, ROWS);
        if (wrong < ROWS - 1)
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB;
        wk_tables_sample(t, s, 1, logits, ROWS, drafts, 4, &all);
        assert_int_equal(all.count, wrong + 1);
        assert_memory_equal(all.ids, want, all.count * sizeof *want);
        struct wk_entry *e = wk_tables_at(t, 1);
        assert_int_equal(e->history_count, 5);
        wk_tables_sample(t, s, 1, logits, ROWS, drafts, 4, &all); /* the history is as it was */
        assert_int_equal(all.count, wrong + 1);
        assert_memory_equal(all.ids, want, all.count * sizeof *want);
    }
    wk_plan_destroy(&p);
    wk_tables_destroy(&t);
    sampler_destroy(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_sampled_as_single_steps),
        cmocka_unit_test(the_text_is_that_of_the_request_alone),
        cmocka_unit_test(the_canary_answers_itself),
    };
    return cmocka_run_group_tests(tests, rig_open, rig_close);
}
