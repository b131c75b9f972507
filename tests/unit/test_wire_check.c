/* SPDX-License-Identifier: Apache-2.0 */
/* Each bound of wire_check: the last legal value passes, the first illegal one is named. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/check.h"
#include "proto/kv_layout.h"
#include "proto/wire_check.h"

static const uint32_t ids[MSG_EMIT_IDS_MAX];
static float floats[MSG_EMIT_IDS_MAX];
static char text[8192];

static void passes(const struct msg *m)
{
    struct err_detail detail = {{0}};
    if (wire_check(m, &detail) != ERR_OK)
        fail_msg("refused: %s", detail.text);
}

static void names(const struct msg *m, const char *field)
{
    struct err_detail detail = {{0}};
    assert_int_equal(wire_check(m, &detail), ERR_INVALID);
    if (strncmp(detail.text, field, strlen(field)) != 0)
        fail_msg("'%s' does not begin with '%s'", detail.text, field);
}

static const char *text_of(size_t bytes)
{
    memset(text, 'x', sizeof(text));
    text[bytes] = '\0';
    return text;
}

/* OK(field, value): passes with it.  NO(field, value): refused by that name. */
#define OK(field, value)                                                                           \
    do {                                                                                           \
        struct msg m_ = base;                                                                      \
        m_.u.BODY.field = (value);                                                                 \
        passes(&m_);                                                                               \
    } while (0)
#define NO(field, value)                                                                           \
    do {                                                                                           \
        struct msg m_ = base;                                                                      \
        m_.u.BODY.field = (value);                                                                 \
        const char *name_ = strrchr(#field, '.');                                                  \
        names(&m_, name_ != NULL ? name_ + 1 : #field);                                            \
    } while (0)
#define BOUND(field, last)                                                                         \
    do {                                                                                           \
        OK(field, last);                                                                           \
        NO(field, (last) + 1);                                                                     \
    } while (0)
#define TEXT_BOUND(field, bytes)                                                                   \
    do {                                                                                           \
        OK(field, text_of(bytes));                                                                 \
        NO(field, text_of((bytes) + 1));                                                           \
        OK(field, NULL);                                                                           \
        OK(field, "gr\xc3\xbc\xc3\x9f");                                                           \
        NO(field, "cut \xe4\xb8");                                                                 \
        NO(field, "\xed\xa0\x80");                                                                 \
    } while (0)
#define RANGE(field, lo, hi)                                                                       \
    do {                                                                                           \
        OK(field, lo);                                                                             \
        OK(field, hi);                                                                             \
        NO(field, nextafter(lo, -1e30));                                                           \
        NO(field, nextafter(hi, 1e30));                                                            \
        NO(field, NAN);                                                                            \
        NO(field, INFINITY);                                                                       \
    } while (0)

static struct msg request(enum msg_type type)
{
    struct msg m = {.type = type};
    m.u.request.prompt_count = 3;
    m.u.request.ids_count = 4;
    m.u.request.ids = ids;
    m.u.request.sampling.top_p = 1;
    m.u.request.sampling.repetition_penalty = 1;
    m.u.request.limits.output_tokens_max = 1;
    return m;
}

#define BODY request
static void test_request(void **state)
{
    struct msg base = request(MSG_ROUTER_SUBMIT);
    (void)state;
    passes(&base);
    TEXT_BOUND(session_key, MSG_TEXT_MAX);
    TEXT_BOUND(cache_salt, MSG_TEXT_MAX);
    TEXT_BOUND(effort, MSG_TEXT_MAX);
    TEXT_BOUND(client_id, MSG_TEXT_MAX);
    TEXT_BOUND(spec, MSG_TEXT_MAX);
    NO(prompt_count, 0);
    OK(prompt_count, 4);
    struct msg m = base;
    m.u.request.prompt_count = 5;
    names(&m, "ids_count");
    NO(ids_count, MSG_IDS_MAX + 1);
    NO(ids, NULL);
    base.u.request.made_by.bytes[15] = 1;
    passes(&base);
    m = base;
    m.u.request.ids_count = 3;
    names(&m, "made_by");
    RANGE(sampling.temperature, 0.0, 100.0);
    OK(sampling.top_p, 1e-9);
    NO(sampling.top_p, 0);
    NO(sampling.top_p, 1.0001);
    NO(sampling.top_p, NAN);
    RANGE(sampling.min_p, 0.0, 1.0);
    OK(sampling.repetition_penalty, 10);
    NO(sampling.repetition_penalty, 0);
    NO(sampling.repetition_penalty, 10.01);
    RANGE(sampling.presence_penalty, -2.0, 2.0);
    RANGE(sampling.frequency_penalty, -2.0, 2.0);
    BOUND(sampling.top_logprobs, MSG_TOP_LOGPROBS_MAX);
    NO(limits.output_tokens_max, 0);
    base.u.request.limits.stop_ids = ids;
    BOUND(limits.stop_id_count, MSG_STOP_IDS_MAX);
    base.u.request.limits.stop_id_count = 1;
    NO(limits.stop_ids, NULL);
    NO(canary, true);
    base = request(MSG_WORKER_ASSIGN);
    OK(canary, true);
}

static void test_bias(void **state)
{
    struct msg base = request(MSG_WORKER_ASSIGN);
    static float bias[MSG_BIAS_MAX];
    (void)state;
    base.u.request.sampling.bias_ids = ids;
    base.u.request.sampling.bias_values = bias;
    BOUND(sampling.bias_count, MSG_BIAS_MAX);
    base.u.request.sampling.bias_count = 2;
    NO(sampling.bias_ids, NULL);
    NO(sampling.bias_values, NULL);
    static const float good[] = {-100, 100}, low[] = {0, -100.5f}, bad[] = {0, NAN};
    OK(sampling.bias_values, good);
    NO(sampling.bias_values, low);
    NO(sampling.bias_values, bad);
}
#undef BODY

#define BODY tokens
static void test_tokens(void **state)
{
    struct msg base = {.type = MSG_TOKENS_EMITTED};
    (void)state;
    base.u.tokens.count = 1;
    base.u.tokens.ids = ids;
    passes(&base);
    BOUND(seq, MSG_IDS_MAX);
    BOUND(count, MSG_EMIT_IDS_MAX);
    NO(ids, NULL);
    NO(count, 0);
    NO(finish, MSG_FINISH_FAILED + 1);
    NO(code, ERR_COUNT);
    NO(top_count, MSG_TOP_LOGPROBS_MAX + 1);
    NO(top_count, 1);
    struct msg m = base;
    m.u.tokens.finish = MSG_FINISH_FAILED;
    names(&m, "code");
    m.u.tokens.code = ERR_TIMEOUT;
    passes(&m);
    m.u.tokens.count = 0;
    passes(&m);
    base.u.tokens.has_receipt = true;
    TEXT_BOUND(receipt.spec, MSG_TEXT_MAX);
    TEXT_BOUND(receipt.config_hash, MSG_TEXT_MAX);
}

static void test_logprobs(void **state)
{
    struct msg base = {.type = MSG_TOKENS_EMITTED};
    (void)state;
    base.u.tokens.count = 2;
    base.u.tokens.ids = ids;
    base.u.tokens.logprobs = true;
    base.u.tokens.top_count = 3;
    base.u.tokens.logprob = floats;
    base.u.tokens.top_ids = ids;
    base.u.tokens.top_logprobs = floats;
    passes(&base);
    NO(logprob, NULL);
    NO(top_ids, NULL);
    NO(top_logprobs, NULL);
    static const float bad[] = {0, -INFINITY, 0, 0, 0, NAN};
    NO(logprob, bad);
    NO(top_logprobs, bad);
}
#undef BODY

#define BODY worker
static void test_worker(void **state)
{
    struct msg base = {.type = MSG_WORKER_STATE};
    (void)state;
    base.u.worker.state = MSG_WORKER_READY;
    passes(&base);
    NO(state, 0);
    BOUND(state, MSG_WORKER_FAILED);
    NO(blocks_free, 1);
    BOUND(context_max, MSG_IDS_MAX);
    NO(decode_tokens_per_s, -1);
    NO(decode_tokens_per_s, NAN);
    NO(prefill_tokens_per_s, -1);
    NO(prefill_tokens_per_s, INFINITY);
    TEXT_BOUND(quantization, 4096);
    TEXT_BOUND(numerics, MSG_TEXT_MAX);
    TEXT_BOUND(spec, MSG_TEXT_MAX);
    TEXT_BOUND(config_hash, MSG_TEXT_MAX);
    TEXT_BOUND(warnings, 4096);
    base.u.worker.canary_ids = ids;
    BOUND(canary_count, MSG_CANARY_IDS_MAX);
    base.u.worker.canary_count = 1;
    NO(canary_ids, NULL);
    BOUND(canary_output_count, MSG_CANARY_IDS_MAX);
    BOUND(drafter_state, 2);
    BOUND(kv_state, 2);
    BOUND(group, MSG_GROUPS_MAX - 1);
}
#undef BODY

static void test_router_side(void **state)
{
    (void)state;
    struct msg base = {.type = MSG_ROUTER_STATE};
#define BODY router
    passes(&base);
    TEXT_BOUND(reason, 4096);
    NO(blocks_free, 1);
    TEXT_BOUND(quantization, 4096);
    TEXT_BOUND(spec, MSG_TEXT_MAX);
    TEXT_BOUND(config_hash, MSG_TEXT_MAX);
    TEXT_BOUND(warnings, 4096);
#undef BODY
#define BODY announce
    base = (struct msg){.type = MSG_ROUTER_ANNOUNCE};
    base.u.announce.live_ids = (const struct msg_id *)ids;
    TEXT_BOUND(kind, MSG_TEXT_MAX);
    BOUND(live_count, MSG_LIVE_IDS_MAX);
    base.u.announce.live_count = 1;
    NO(live_ids, NULL);
#undef BODY
#define BODY submit_reply
    base = (struct msg){.type = MSG_SUBMIT_REPLY};
    BOUND(code, ERR_COUNT - 1);
    TEXT_BOUND(text, 4096);
#undef BODY
#define BODY assign_reply
    base = (struct msg){.type = MSG_ASSIGN_REPLY};
    BOUND(code, ERR_COUNT - 1);
    TEXT_BOUND(text, 4096);
#undef BODY
    static const enum msg_type empty[] = {MSG_ROUTER_CANCEL, MSG_WORKER_CANCEL, MSG_WORKER_DRAIN,
                                          MSG_WORKER_RESUME, MSG_KV_RECLAIM,    MSG_DRAFT_HELLO,
                                          MSG_DRAFT_CLOSE};
    for (size_t i = 0; i < ARRAY_COUNT(empty); i++) {
        base = (struct msg){.type = empty[i]};
        passes(&base);
    }
    for (int type = 0; type < 256; type++) {
        bool known = (type >= 1 && type <= 12) || (type >= 20 && type <= 35) ||
                     (type >= 40 && type <= 46) || type == 50 || type == 51;
        base = (struct msg){.type = (enum msg_type)type};
        if (!known)
            names(&base, "type");
    }
}

static void test_kv_leases(void **state)
{
    (void)state;
#define BODY kv_attach
    struct msg base = {.type = MSG_KV_ATTACH};
    base.u.kv_attach.ranks = 2;
    BOUND(rank, 1);
    NO(ranks, 0);
    BOUND(state_bytes, KV_STATE_BYTES_MAX);
    NO(state_bytes, UINT64_MAX);
    BOUND(snapshot_dtype, 2);
    base.u.kv_attach.slot_count = 9;
    BOUND(live_slots, 9);
#undef BODY
#define BODY kv_attach_reply
    base = (struct msg){.type = MSG_KV_ATTACH_REPLY};
    BOUND(code, ERR_COUNT - 1);
    TEXT_BOUND(text, 4096);
    TEXT_BOUND(arena_path, 4096);
    BOUND(kv_dtype, 3);
    BOUND(index_dtype, 3);
    BOUND(snapshot_dtype, 2);
#undef BODY
#define BODY kv_open
    base = (struct msg){.type = MSG_KV_OPEN};
    base.u.kv_open.blocks_wanted = 1;
    base.u.kv_open.hashes = (const struct hash128 *)ids;
    TEXT_BOUND(session_key, MSG_TEXT_MAX);
    TEXT_BOUND(cache_salt, MSG_TEXT_MAX);
    BOUND(prompt_count, MSG_IDS_MAX);
    NO(blocks_wanted, 0);
    BOUND(blocks_wanted, MSG_BLOCKS_MAX);
    BOUND(hash_count, MSG_BLOCKS_MAX);
    base.u.kv_open.hash_count = 1;
    NO(hashes, NULL);
#undef BODY
#define BODY kv_open_reply
    base = (struct msg){.type = MSG_KV_OPEN_REPLY};
    base.u.kv_open_reply.blocks = ids;
    BOUND(code, ERR_COUNT - 1);
    TEXT_BOUND(text, 4096);
    BOUND(reusable_tokens, MSG_IDS_MAX);
    BOUND(block_count, MSG_BLOCKS_MAX);
    base.u.kv_open_reply.block_count = 1;
    NO(blocks, NULL);
#undef BODY
#define BODY kv_extend
    base = (struct msg){.type = MSG_KV_EXTEND};
    base.u.kv_extend.blocks_wanted = 1;
    BOUND(blocks_have, MSG_BLOCKS_MAX);
    NO(blocks_wanted, 0);
    BOUND(blocks_wanted, MSG_BLOCKS_MAX);
#undef BODY
#define BODY kv_extend_reply
    base = (struct msg){.type = MSG_KV_EXTEND_REPLY};
    base.u.kv_extend_reply.blocks = ids;
    BOUND(code, ERR_COUNT - 1);
    BOUND(blocks_have, MSG_BLOCKS_MAX);
    BOUND(block_count, MSG_BLOCKS_MAX);
    base.u.kv_extend_reply.block_count = 1;
    NO(blocks, NULL);
#undef BODY
}

static void test_kv_rest(void **state)
{
    (void)state;
#define BODY kv_commit
    struct msg base = {.type = MSG_KV_COMMIT};
    base.u.kv_commit.hashes = (const struct hash128 *)ids;
    BOUND(first_block, MSG_BLOCKS_MAX);
    BOUND(token_count, MSG_IDS_MAX);
    BOUND(hash_count, MSG_BLOCKS_MAX);
    base.u.kv_commit.hash_count = 1;
    NO(hashes, NULL);
#undef BODY
#define BODY kv_snapshot
    base = (struct msg){.type = MSG_KV_SNAPSHOT};
    BOUND(token_count, MSG_IDS_MAX);
#undef BODY
#define BODY kv_release
    base = (struct msg){.type = MSG_KV_RELEASE};
    BOUND(token_count, MSG_IDS_MAX);
#undef BODY
#define BODY kv_pressure
    base = (struct msg){.type = MSG_KV_PRESSURE};
    NO(blocks_free, 1);
    base.u.kv_pressure.blocks_total = 5;
    BOUND(blocks_free, 5);
#undef BODY
#define BODY kv_adopt
    base = (struct msg){.type = MSG_KV_ADOPT};
    base.u.kv_adopt.items = (const uint8_t *)ids;
    TEXT_BOUND(session_key, MSG_TEXT_MAX);
    BOUND(count, MSG_BLOCKS_MAX);
    base.u.kv_adopt.count = 1;
    NO(items, NULL);
#undef BODY
#define BODY kv_adopt_reply
    base = (struct msg){.type = MSG_KV_ADOPT_REPLY};
    BOUND(code, ERR_COUNT - 1);
    BOUND(valid_count, MSG_BLOCKS_MAX);
#undef BODY
#define BODY kv_ping
    base = (struct msg){.type = MSG_KV_PING};
    base.u.kv_ping.leases = (const uint64_t *)(uintptr_t)text;
    BOUND(lease_count, MSG_LIVE_IDS_MAX);
    base.u.kv_ping.lease_count = 1;
    NO(leases, NULL);
#undef BODY
#define BODY kv_state
    base = (struct msg){.type = MSG_KV_STATE};
    base.u.kv_state.blocks_total = 10;
    base.u.kv_state.blocks_leased = 3;
    base.u.kv_state.blocks_cached = 3;
    base.u.kv_state.slots_total = 2;
    BOUND(blocks_free, 4);
    BOUND(slots_free, 2);
    base.u.kv_state.snapshots_total = 3;
    BOUND(snapshots_free, 3);
    BOUND(granted_count, MSG_GRANTS_MAX);
#undef BODY
#define BODY kv_snapshot_reply
    base = (struct msg){.type = MSG_KV_SNAPSHOT_REPLY};
    BOUND(code, ERR_COUNT - 1);
    BOUND(granted_count, MSG_GRANTS_MAX);
#undef BODY
}

static void test_drafts_and_plans(void **state)
{
    (void)state;
#define BODY draft_hello_reply
    struct msg base = {.type = MSG_DRAFT_HELLO_REPLY};
    TEXT_BOUND(source, MSG_TEXT_MAX);
    BOUND(draft_tokens_max, MSG_DRAFT_IDS_MAX);
    NO(tap_layer_count, MSG_TAPS_MAX + 1);
    base.u.draft_hello_reply.tap_layer_count = 1;
    names(&base, "tap_layers");
#undef BODY
#define BODY draft_hello
    base = (struct msg){.type = MSG_DRAFT_HELLO};
    TEXT_BOUND(tap_ring, MSG_TEXT_MAX);
#undef BODY
#define BODY draft_open
    base = (struct msg){.type = MSG_DRAFT_OPEN};
    NO(ids_count, MSG_IDS_MAX + 1);
    NO(ids_count, 0x80000000u);
    base.u.draft_open.ids_count = 1;
    names(&base, "ids");
#undef BODY
#define BODY draft_context
    base = (struct msg){.type = MSG_DRAFT_CONTEXT};
    BOUND(base_length, MSG_IDS_MAX);
    NO(ids_count, MSG_IDS_MAX + 1);
#undef BODY
#define BODY draft_propose
    base = (struct msg){.type = MSG_DRAFT_PROPOSE};
    base.u.draft_propose.draft_count = 1;
    TEXT_BOUND(source, MSG_TEXT_MAX);
    NO(draft_count, 0);
    BOUND(draft_count, MSG_DRAFT_IDS_MAX);
    BOUND(base_length, MSG_IDS_MAX);
    NO(ids_count, MSG_IDS_MAX + 1);
#undef BODY
#define BODY draft_reply
    base = (struct msg){.type = MSG_DRAFT_REPLY};
    base.u.draft_reply.ids = ids;
    BOUND(code, ERR_COUNT - 1);
    BOUND(ids_count, MSG_DRAFT_IDS_MAX);
    BOUND(base_length, MSG_IDS_MAX);
#undef BODY
#define BODY step_plan
    base = (struct msg){.type = MSG_STEP_PLAN};
    base.u.step_plan.plan = (const uint8_t *)ids;
    BOUND(plan_bytes, 8u << 20);
    base.u.step_plan.plan_bytes = 1;
    NO(plan, NULL);
#undef BODY
#define BODY step_done
    base = (struct msg){.type = MSG_STEP_DONE};
    BOUND(status, ERR_COUNT - 1);
#undef BODY
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request),          cmocka_unit_test(test_bias),
        cmocka_unit_test(test_tokens),           cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_worker),           cmocka_unit_test(test_router_side),
        cmocka_unit_test(test_kv_leases),        cmocka_unit_test(test_kv_rest),
        cmocka_unit_test(test_drafts_and_plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
