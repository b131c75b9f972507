/* SPDX-License-Identifier: Apache-2.0 */
/* Every message there and back with random fields, and every way a frame can be wrong. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/arena.h"
#include "lib/base/rng.h"
#include "proto/kv_layout.h"
#include "proto/wire.h"
#include "proto/wire_check.h"
#include "proto/wire_table.h"

static const struct {
    const struct wire_type *types;
    const size_t *count;
} lists[] = {{wire_route_types, &wire_route_type_count},
             {wire_kv_types, &wire_kv_type_count},
             {wire_draft_types, &wire_draft_type_count},
             {wire_plan_types, &wire_plan_type_count}};

/* ---- random messages ---- */

static uint64_t u64_random(struct rng *r)
{
    return rng_u64(r) >> rng_below(r, 64);
}

static uint32_t u32_random(struct rng *r)
{
    return rng_u32(r) >> rng_below(r, 32);
}

static const char *text_random(struct arena *a, struct rng *r)
{
    static const char *const pieces[] = {"a", "xyz", "0", " ", "\xc3\xa9", "\xe4\xb8\xad", "/"};
    char text[64];
    size_t bytes = 0;
    for (uint32_t i = rng_below(r, 8); i > 0; i--) {
        const char *piece = pieces[rng_below(r, ARRAY_COUNT(pieces))];
        memcpy(text + bytes, piece, strlen(piece));
        bytes += strlen(piece);
    }
    return arena_strndup(a, text, bytes);
}

static uint32_t *ids_random(struct arena *a, struct rng *r, uint32_t count)
{
    uint32_t *ids = arena_alloc_array(a, count + 1, sizeof(*ids));
    for (uint32_t i = 0; i < count; i++)
        ids[i] = u32_random(r);
    return ids;
}

static float *floats_random(struct arena *a, struct rng *r, uint32_t count)
{
    float *values = arena_alloc_array(a, count + 1, sizeof(*values));
    for (uint32_t i = 0; i < count; i++)
        values[i] = (float)(rng_unit(r) * 20 - 10);
    return values;
}

static void struct_random(struct arena *a, struct rng *r, const struct wire_struct *table,
                          uint8_t *plain)
{
    for (size_t i = 0; i < table->field_count; i++) {
        const struct wire_field *f = &table->fields[i];
        uint8_t *at = plain + f->at;
        switch (f->kind) {
        case WIRE_U32:
        case WIRE_I32:
            *(uint32_t *)at = f->kind == WIRE_I32 ? rng_u32(r) : u32_random(r);
            break;
        case WIRE_U64:
            *(uint64_t *)at = u64_random(r);
            break;
        case WIRE_F64:
            *(double *)at = rng_unit(r) * 0.9 + 0.05;
            break;
        case WIRE_BOOL:
            *(bool *)at = rng_below(r, 2) != 0;
            break;
        case WIRE_TEXT:
            *(const char **)at = text_random(a, r);
            break;
        case WIRE_HASH:
            for (uint32_t b = 0; b < 16; b++)
                at[b] = (uint8_t)rng_u32(r);
            break;
        case WIRE_IDS: {
            uint32_t count = rng_below(r, 16);
            *(uint32_t *)(plain + f->count_at) = count;
            *(const uint32_t **)at = ids_random(a, r, count);
            break;
        }
        case WIRE_FLOATS_AGREE:
            *(const float **)at = floats_random(a, r, *(uint32_t *)(plain + f->count_at));
            break;
        case WIRE_SUB:
            struct_random(a, r, f->sub, at);
            break;
        }
    }
}

/* Brings the random values of one message inside the bounds of wire_check. */
static void bounds_apply(struct arena *a, struct rng *r, struct msg *m)
{
    switch ((int)m->type) {
    case MSG_ROUTER_SUBMIT:
    case MSG_WORKER_ASSIGN: {
        struct msg_request *q = &m->u.request;
        q->ids_count = 1 + rng_below(r, 3000);
        q->prompt_count = 1 + rng_below(r, q->ids_count);
        q->ids = ids_random(a, r, q->ids_count);
        if (q->ids_count == q->prompt_count) /* nobody has made a token yet */
            q->made_by = (struct hash128){{0}};
        q->sampling.top_logprobs %= MSG_TOP_LOGPROBS_MAX + 1;
        q->limits.output_tokens_max |= 1;
        q->group_count %= 200;
        q->group_index = q->group_count > 0 ? rng_below(r, q->group_count) : 0;
        break;
    }
    case MSG_SUBMIT_REPLY:
        m->u.submit_reply.code %= ERR_COUNT;
        break;
    case MSG_ASSIGN_REPLY:
        m->u.assign_reply.code %= ERR_COUNT;
        break;
    case MSG_TOKENS_EMITTED: {
        struct msg_tokens *t = &m->u.tokens;
        t->seq %= MSG_IDS_MAX;
        t->finish %= MSG_FINISH_FAILED + 1;
        if (t->count == 0)
            t->finish = MSG_FINISH_FAILED;
        t->code = t->finish == MSG_FINISH_FAILED ? 1 + t->code % (ERR_COUNT - 1) : 0;
        t->top_count = t->logprobs ? t->top_count % (MSG_TOP_LOGPROBS_MAX + 1) : 0;
        if (t->logprobs) {
            t->logprob = floats_random(a, r, t->count);
            t->top_ids = ids_random(a, r, t->count * t->top_count);
            t->top_logprobs = floats_random(a, r, t->count * t->top_count);
        }
        break;
    }
    case MSG_WORKER_STATE: {
        struct msg_worker_info *w = &m->u.worker;
        w->state = 1 + w->state % MSG_WORKER_FAILED;
        w->blocks_free = rng_below(r, (w->blocks_total | 1));
        w->context_max %= MSG_IDS_MAX;
        w->canary_output_count %= MSG_CANARY_IDS_MAX;
        w->drafter_state %= 3;
        w->kv_state %= 3;
        w->group %= MSG_GROUPS_MAX;
        w->blocks_total |= 1;
        break;
    }
    case MSG_ROUTER_STATE:
        m->u.router.blocks_total |= 1;
        m->u.router.blocks_free %= m->u.router.blocks_total;
        break;
    case MSG_ROUTER_ANNOUNCE:
        m->u.announce.live_count %= 300;
        break;
    case MSG_KV_ATTACH:
        m->u.kv_attach.ranks |= 1;
        m->u.kv_attach.rank %= m->u.kv_attach.ranks;
        m->u.kv_attach.state_bytes %= KV_STATE_BYTES_MAX + 1;
        m->u.kv_attach.block_count %= KV_BLOCKS_MAX + 1;
        m->u.kv_attach.kv_dtype %= KV_FP8 + 1;
        m->u.kv_attach.index_dtype %= KV_FP8 + 1;
        m->u.kv_attach.snapshot_dtype %= KV_BF16 + 1;
        m->u.kv_attach.live_slots %= m->u.kv_attach.slot_count | 1;
        break;
    case MSG_KV_ATTACH_REPLY:
        m->u.kv_attach_reply.code %= ERR_COUNT;
        m->u.kv_attach_reply.kv_dtype %= 4;
        m->u.kv_attach_reply.index_dtype %= 4;
        m->u.kv_attach_reply.snapshot_dtype %= 3;
        m->u.kv_attach_reply.live_slots %= m->u.kv_attach_reply.slot_count | 1;
        m->u.kv_attach_reply.granted_count %= MSG_GRANTS_MAX + 1;
        break;
    case MSG_KV_OPEN:
        m->u.kv_open.prompt_count %= MSG_IDS_MAX;
        m->u.kv_open.blocks_wanted = 1 + m->u.kv_open.blocks_wanted % MSG_BLOCKS_MAX;
        m->u.kv_open.hash_count %= 500;
        m->u.kv_open.reuse_max %= MSG_IDS_MAX;
        break;
    case MSG_KV_OPEN_REPLY:
        m->u.kv_open_reply.code %= ERR_COUNT;
        m->u.kv_open_reply.reusable_tokens %= MSG_IDS_MAX;
        m->u.kv_open_reply.block_count %= 500;
        break;
    case MSG_KV_EXTEND:
        m->u.kv_extend.blocks_have %= MSG_BLOCKS_MAX;
        m->u.kv_extend.blocks_wanted = 1 + m->u.kv_extend.blocks_wanted % MSG_BLOCKS_MAX;
        break;
    case MSG_KV_EXTEND_REPLY:
        m->u.kv_extend_reply.code %= ERR_COUNT;
        m->u.kv_extend_reply.blocks_have %= MSG_BLOCKS_MAX;
        m->u.kv_extend_reply.block_count %= 500;
        break;
    case MSG_KV_COMMIT:
        m->u.kv_commit.first_block %= MSG_BLOCKS_MAX;
        m->u.kv_commit.token_count %= MSG_IDS_MAX;
        m->u.kv_commit.hash_count %= 500;
        break;
    case MSG_KV_SNAPSHOT:
        m->u.kv_snapshot.token_count %= MSG_IDS_MAX;
        break;
    case MSG_KV_SNAPSHOT_REPLY:
        m->u.kv_snapshot_reply.code %= ERR_COUNT;
        m->u.kv_snapshot_reply.granted_count %= MSG_GRANTS_MAX + 1;
        break;
    case MSG_KV_RELEASE:
        m->u.kv_release.token_count %= MSG_IDS_MAX;
        break;
    case MSG_KV_PRESSURE:
        m->u.kv_pressure.blocks_total |= 1;
        m->u.kv_pressure.blocks_free %= m->u.kv_pressure.blocks_total;
        break;
    case MSG_KV_ADOPT:
        m->u.kv_adopt.count %= 500;
        break;
    case MSG_KV_ADOPT_REPLY:
        m->u.kv_adopt_reply.code %= ERR_COUNT;
        m->u.kv_adopt_reply.valid_count %= MSG_BLOCKS_MAX;
        break;
    case MSG_KV_PING:
        m->u.kv_ping.lease_count %= 500;
        break;
    case MSG_KV_STATE:
        m->u.kv_state.blocks_free %= 1000;
        m->u.kv_state.blocks_leased %= 1000;
        m->u.kv_state.blocks_cached %= 1000;
        m->u.kv_state.blocks_total = 3000;
        m->u.kv_state.slots_total |= 1;
        m->u.kv_state.slots_free %= m->u.kv_state.slots_total;
        m->u.kv_state.snapshots_total |= 1;
        m->u.kv_state.snapshots_free %= m->u.kv_state.snapshots_total;
        m->u.kv_state.granted_count %= MSG_GRANTS_MAX + 1;
        break;
    case MSG_DRAFT_HELLO_REPLY:
        m->u.draft_hello_reply.draft_tokens_max %= MSG_DRAFT_IDS_MAX;
        m->u.draft_hello_reply.tap_layer_count %= MSG_TAPS_MAX + 1;
        break;
    case MSG_DRAFT_OPEN:
        m->u.draft_open.ids_count %= 500;
        break;
    case MSG_DRAFT_CONTEXT:
        m->u.draft_context.base_length %= MSG_IDS_MAX;
        m->u.draft_context.ids_count %= 500;
        break;
    case MSG_DRAFT_PROPOSE:
        m->u.draft_propose.base_length %= MSG_IDS_MAX;
        m->u.draft_propose.draft_count = 1 + m->u.draft_propose.draft_count % MSG_DRAFT_IDS_MAX;
        m->u.draft_propose.ids_count %= 500;
        break;
    case MSG_DRAFT_REPLY:
        m->u.draft_reply.code %= ERR_COUNT;
        m->u.draft_reply.base_length %= MSG_IDS_MAX;
        break;
    case MSG_STEP_PLAN:
        m->u.step_plan.plan_bytes %= 5000;
        break;
    case MSG_STEP_DONE:
        m->u.step_done.status %= ERR_COUNT;
        break;
    }
}

static uint32_t count_of(const struct wire_type *t, const struct msg *m)
{
    return *(const uint32_t *)((const uint8_t *)&m->u + t->payload.count_at);
}

static void msg_random(struct arena *a, struct rng *r, const struct wire_type *t, struct msg *m)
{
    struct err_detail detail = {{0}};
    memset(m, 0, sizeof(*m));
    m->type = t->type;
    m->flags = (uint16_t)rng_u32(r);
    m->epoch = rng_u32(r);
    for (uint32_t i = 0; i < sizeof(m->id.bytes); i++)
        m->id.bytes[i] = (uint8_t)rng_u32(r);
    struct_random(a, r, t->body, (uint8_t *)&m->u);
    bounds_apply(a, r, m);
    if (t->payload.item_bytes != 0) {
        size_t bytes = (size_t)count_of(t, m) * t->payload.item_bytes;
        uint8_t *payload = arena_alloc(a, bytes + 1);
        for (size_t i = 0; i < bytes; i++)
            payload[i] = (uint8_t)rng_u32(r);
        memcpy((uint8_t *)&m->u + t->payload.at, &payload, sizeof(payload));
    }
    if (wire_check(m, &detail) != ERR_OK)
        fail_msg("%s: %s", t->name, detail.text);
}

/* ---- comparison ---- */

static void struct_equal(const struct wire_struct *table, const uint8_t *x, const uint8_t *y)
{
    for (size_t i = 0; i < table->field_count; i++) {
        const struct wire_field *f = &table->fields[i];
        const uint8_t *p = x + f->at, *q = y + f->at;
        switch (f->kind) {
        case WIRE_U32:
        case WIRE_I32:
            assert_memory_equal(p, q, 4);
            break;
        case WIRE_U64:
        case WIRE_F64:
            assert_memory_equal(p, q, 8);
            break;
        case WIRE_BOOL:
            assert_int_equal(*(const bool *)p, *(const bool *)q);
            break;
        case WIRE_TEXT:
            assert_string_equal(*(const char *const *)p, *(const char *const *)q);
            break;
        case WIRE_HASH:
            assert_memory_equal(p, q, 16);
            break;
        case WIRE_IDS:
        case WIRE_FLOATS_AGREE: {
            uint32_t count = *(const uint32_t *)(x + f->count_at);
            assert_int_equal(count, *(const uint32_t *)(y + f->count_at));
            if (count != 0)
                assert_memory_equal(*(const void *const *)p, *(const void *const *)q, count * 4u);
            break;
        }
        case WIRE_SUB:
            struct_equal(f->sub, p, q);
            break;
        }
    }
}

static void msg_equal(const struct wire_type *t, const struct msg *x, const struct msg *y)
{
    assert_int_equal(x->type, y->type);
    assert_int_equal(x->flags, y->flags);
    assert_int_equal(x->epoch, y->epoch);
    assert_memory_equal(x->id.bytes, y->id.bytes, 16);
    struct_equal(t->body, (const uint8_t *)&x->u, (const uint8_t *)&y->u);
    if (t->payload.item_bytes != 0 && count_of(t, x) != 0) {
        const void *p, *q;
        memcpy(&p, (const uint8_t *)&x->u + t->payload.at, sizeof(p));
        memcpy(&q, (const uint8_t *)&y->u + t->payload.at, sizeof(q));
        assert_int_equal((uintptr_t)q % t->payload.align, 0);
        assert_memory_equal(p, q, (size_t)count_of(t, x) * t->payload.item_bytes);
    }
    if (x->type == MSG_TOKENS_EMITTED && x->u.tokens.logprobs) {
        const struct msg_tokens *p = &x->u.tokens, *q = &y->u.tokens;
        size_t top = (size_t)p->count * p->top_count;
        if (p->count != 0)
            assert_memory_equal(p->logprob, q->logprob, p->count * sizeof(float));
        if (top != 0) {
            assert_memory_equal(p->top_ids, q->top_ids, top * 4);
            assert_memory_equal(p->top_logprobs, q->top_logprobs, top * 4);
        }
    }
}

/* Frames as the network delivers them: own memory, the payload at any alignment. */
static void frames_copy(struct arena *a, struct wire_frame *frames, uint32_t count, uint32_t shift)
{
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *copy = arena_alloc(a, frames[i].count + 16);
        copy += shift;
        if (frames[i].count != 0)
            memcpy(copy, frames[i].bytes, frames[i].count);
        frames[i].bytes = copy;
    }
}

static void test_round_trip(void **state)
{
    struct rng r;
    struct arena a;
    (void)state;
    rng_init(&r, 20261101);
    arena_init(&a, 1 << 20, 1 << 26);
    for (uint32_t round = 0; round < 60; round++) {
        for (size_t l = 0; l < ARRAY_COUNT(lists); l++) {
            for (size_t i = 0; i < *lists[l].count; i++) {
                const struct wire_type *t = &lists[l].types[i];
                struct wire_frame frames[WIRE_FRAMES_MAX];
                struct err_detail detail = {{0}};
                struct msg in, out;
                uint32_t count = 0;
                arena_reset(&a);
                msg_random(&a, &r, t, &in);
                assert_int_equal(wire_encode(&a, &in, frames, &count), ERR_OK);
                assert_int_equal(count, t->payload.item_bytes != 0 ? 3 : 2);
                frames_copy(&a, frames, count, rng_below(&r, 16));
                if (wire_decode(&a, frames, count, &out, &detail) != ERR_OK)
                    fail_msg("%s: %s", t->name, detail.text);
                msg_equal(t, &in, &out);
            }
        }
    }
    arena_fini(&a);
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(msg_type_name(MSG_ROUTER_SUBMIT), "RouterSubmit");
    assert_string_equal(msg_type_name(MSG_KV_STATE), "KvState");
    assert_string_equal(msg_type_name(MSG_STEP_DONE), "StepDone");
    assert_string_equal(msg_type_name((enum msg_type)199), "?");
    size_t types = 0;
    for (size_t l = 0; l < ARRAY_COUNT(lists); l++)
        types += *lists[l].count;
    assert_int_equal(types, 37);
    for (uint32_t n = 0; n < 256; n++) {
        bool known = n >= 1 && (n <= 12 || (n >= 20 && n <= 35) || (n >= 40 && n <= 46) ||
                                n == 50 || n == 51);
        assert_int_equal(strcmp(msg_type_name((enum msg_type)n), "?") != 0, known);
    }
}

/* Every byte of a plain struct is named by a row or is padding, so no field is forgotten. */
static void rows_cover(const struct wire_struct *table, uint8_t *covered)
{
    static const uint8_t sizes[] = {
        [WIRE_U32] = 4,  [WIRE_I32] = 4,   [WIRE_U64] = 8, [WIRE_F64] = 8,         [WIRE_BOOL] = 1,
        [WIRE_TEXT] = 8, [WIRE_HASH] = 16, [WIRE_IDS] = 8, [WIRE_FLOATS_AGREE] = 8};
    for (size_t i = 0; i < table->field_count; i++) {
        const struct wire_field *f = &table->fields[i];
        if (f->kind == WIRE_SUB) {
            rows_cover(f->sub, covered + f->at);
            continue;
        }
        memset(covered + f->at, 1, sizes[f->kind]);
        if (f->kind == WIRE_IDS)
            memset(covered + f->count_at, 1, 4);
    }
}

static void test_no_field_is_forgotten(void **state)
{
    (void)state;
    /* The structs with the most fields, where one is the easiest to let slip. */
    static const struct {
        enum msg_type type;
        size_t bytes;
    } wanted[] = {
        {MSG_ROUTER_SUBMIT, sizeof(struct msg_request)},
        {MSG_WORKER_STATE, sizeof(struct msg_worker_info)},
        {MSG_ROUTER_STATE, sizeof(struct msg_router_info)},
        {MSG_KV_ATTACH, sizeof(struct msg_kv_attach)},
        {MSG_KV_ATTACH_REPLY, sizeof(struct msg_kv_attach_reply)},
        {MSG_DRAFT_PROPOSE, sizeof(struct msg_draft_propose)},
    };
    for (size_t w = 0; w < ARRAY_COUNT(wanted); w++) {
        for (size_t l = 0; l < ARRAY_COUNT(lists); l++) {
            for (size_t i = 0; i < *lists[l].count; i++) {
                const struct wire_type *t = &lists[l].types[i];
                uint8_t covered[sizeof(struct msg)] = {0};
                size_t run = 0;
                if (t->type != wanted[w].type)
                    continue;
                rows_cover(t->body, covered);
                if (t->payload.item_bytes != 0)
                    memset(covered + t->payload.at, 1, 8);
                for (size_t b = 0; b < wanted[w].bytes; b++) {
                    run = covered[b] ? 0 : run + 1;
                    /* Padding never reaches eight bytes. */
                    if (run >= 8)
                        fail_msg("%s: byte %zu has no row", t->name, b);
                }
            }
        }
    }
}

/* ---- refusals ---- */

struct broken {
    struct arena arena;
    struct wire_frame frames[WIRE_FRAMES_MAX + 1];
    uint32_t count;
    uint8_t *header;
    struct err_detail detail;
};

static const uint32_t some_ids[] = {5, 6, 7, 8};

static struct msg request_msg(void)
{
    struct msg m = {.type = MSG_ROUTER_SUBMIT};
    m.u.request = (struct msg_request){
        .session_key = "s", .client_id = "c", .prompt_count = 4, .ids_count = 4, .ids = some_ids};
    m.u.request.sampling.top_p = 1;
    m.u.request.sampling.repetition_penalty = 1;
    m.u.request.limits.output_tokens_max = 10;
    return m;
}

static void broken_begin(struct broken *b)
{
    struct msg m = request_msg();
    memset(b, 0, sizeof(*b));
    arena_init(&b->arena, 1 << 16, 1 << 24);
    assert_int_equal(wire_encode(&b->arena, &m, b->frames, &b->count), ERR_OK);
    frames_copy(&b->arena, b->frames, b->count, 0);
    b->header = (uint8_t *)(uintptr_t)b->frames[0].bytes;
}

static void broken_end(struct broken *b, enum err wanted, const char *word)
{
    struct msg out;
    memset(&out, 0xee, sizeof(out));
    struct msg untouched = out;
    assert_int_equal(wire_decode(&b->arena, b->frames, b->count, &out, &b->detail), wanted);
    if (strstr(b->detail.text, word) == NULL)
        fail_msg("'%s' does not name '%s'", b->detail.text, word);
    assert_memory_equal(&out, &untouched, sizeof(out));
    arena_fini(&b->arena);
}

static void test_header_refusals(void **state)
{
    struct broken b;
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        broken_begin(&b);
        b.header[i] ^= 1;
        broken_end(&b, ERR_INVALID, "magic");
    }
    broken_begin(&b);
    b.header[4] = 2;
    broken_end(&b, ERR_INVALID, "version");
    static const uint8_t types[] = {0, 13, 19, 36, 39, 47, 49, 52, 255};
    for (uint32_t i = 0; i < sizeof(types); i++) {
        broken_begin(&b);
        b.header[5] = types[i];
        broken_end(&b, ERR_INVALID, "type");
    }
    for (uint32_t i = 12; i < 16; i++) {
        broken_begin(&b);
        b.header[i] ^= 1;
        broken_end(&b, ERR_INVALID, "body_bytes");
    }
    broken_begin(&b);
    b.frames[0].count = 31;
    broken_end(&b, ERR_INVALID, "header");
    broken_begin(&b);
    b.frames[0].count = 33;
    broken_end(&b, ERR_INVALID, "header");
}

static void test_frame_count_refusals(void **state)
{
    struct broken b;
    (void)state;
    for (uint32_t count = 0; count < 3; count++) {
        broken_begin(&b);
        b.count = count;
        broken_end(&b, ERR_INVALID, "frames");
    }
    broken_begin(&b);
    b.frames[3] = b.frames[2];
    b.count = 4;
    broken_end(&b, ERR_INVALID, "frames");
    /* A message without payload refuses one. */
    struct msg m = {.type = MSG_ROUTER_CANCEL};
    struct msg out;
    broken_begin(&b);
    assert_int_equal(wire_encode(&b.arena, &m, b.frames, &b.count), ERR_OK);
    assert_int_equal(b.count, 2);
    assert_int_equal(wire_decode(&b.arena, b.frames, 2, &out, &b.detail), ERR_OK);
    b.frames[2] = (struct wire_frame){"", 0};
    b.count = 3;
    broken_end(&b, ERR_INVALID, "frames");
}

static void body_set(struct broken *b, const void *bytes, uint32_t count)
{
    b->frames[1] = (struct wire_frame){bytes, count};
    memcpy(b->header + 12, &count, sizeof(count));
}

static void test_body_refusals(void **state)
{
    struct broken b;
    (void)state;
    /* Cut anywhere: either the parser, the counts or wire_check refuses it. */
    broken_begin(&b);
    size_t bytes = b.frames[1].count;
    const void *body = b.frames[1].bytes;
    for (uint32_t cut = 0; cut < bytes; cut++) {
        struct msg out;
        body_set(&b, body, cut);
        assert_int_equal(wire_decode(&b.arena, b.frames, b.count, &out, &b.detail), ERR_INVALID);
    }
    arena_fini(&b.arena);

    broken_begin(&b);
    body_set(&b, "\xff\xff\xff\xff\xff\xff", 6);
    broken_end(&b, ERR_INVALID, "body");

    broken_begin(&b);
    b.frames[1].count = WIRE_BODY_BYTES_MAX + 1;
    broken_end(&b, ERR_TOO_LARGE, "body");

    /* A hash of the wrong length. */
    broken_begin(&b);
    b.header[5] = MSG_DRAFT_HELLO;
    b.count = 2;
    body_set(&b,
             "\x1a\x03"
             "abc",
             5);
    broken_end(&b, ERR_INVALID, "model_fp");
}

static void test_body_bound_of_arena(void **state)
{
    struct broken b;
    (void)state;
    /* Half a million unknown fields ask for far more memory than the arena may take. */
    uint8_t *body = malloc(WIRE_BODY_BYTES_MAX);
    assert_non_null(body);
    for (uint32_t i = 0; i + 1 < WIRE_BODY_BYTES_MAX; i += 2) {
        body[i] = 0x78;
        body[i + 1] = 1;
    }
    broken_begin(&b);
    body_set(&b, body, WIRE_BODY_BYTES_MAX);
    broken_end(&b, ERR_NOMEM, "arena");
    free(body);
}

static void test_payload_refusals(void **state)
{
    struct broken b;
    (void)state;
    for (uint32_t bytes = 0; bytes < 24; bytes++) {
        if (bytes == 16)
            continue;
        broken_begin(&b);
        b.frames[2].count = bytes;
        broken_end(&b, ERR_INVALID, "payload");
    }
    broken_begin(&b);
    b.frames[2].count = WIRE_PAYLOAD_BYTES_MAX + 4;
    broken_end(&b, ERR_TOO_LARGE, "payload");
}

static void test_arena_too_small(void **state)
{
    struct msg m = request_msg();
    struct wire_frame frames[WIRE_FRAMES_MAX];
    uint32_t count = 77;
    struct arena a;
    (void)state;
    for (size_t max = 64; max < 1024; max += 64) {
        arena_init(&a, 64, max);
        enum err e = wire_encode(&a, &m, frames, &count);
        assert_true(e == ERR_OK || e == ERR_NOMEM);
        if (max == 64)
            assert_int_equal(e, ERR_NOMEM);
        arena_fini(&a);
    }
}

static void test_random_damage(void **state)
{
    struct rng r;
    struct broken b;
    (void)state;
    rng_init(&r, 7);
    for (uint32_t i = 0; i < 20000; i++) {
        struct msg out;
        broken_begin(&b);
        for (uint32_t n = 1 + rng_below(&r, 3); n > 0; n--) {
            struct wire_frame *f = &b.frames[rng_below(&r, 2)];
            uint8_t *bytes = (uint8_t *)(uintptr_t)f->bytes;
            bytes[rng_below(&r, (uint32_t)f->count)] ^= (uint8_t)(1u << rng_below(&r, 8));
        }
        if (wire_decode(&b.arena, b.frames, b.count, &out, &b.detail) == ERR_OK)
            assert_int_equal(wire_check(&out, &b.detail), ERR_OK);
        arena_fini(&b.arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_no_field_is_forgotten),
        cmocka_unit_test(test_header_refusals),
        cmocka_unit_test(test_frame_count_refusals),
        cmocka_unit_test(test_body_refusals),
        cmocka_unit_test(test_body_bound_of_arena),
        cmocka_unit_test(test_payload_refusals),
        cmocka_unit_test(test_arena_too_small),
        cmocka_unit_test(test_random_damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
