/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire_check.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "proto/kv_layout.h"

#define LONG_TEXT_MAX  4096u
#define PLAN_BYTES_MAX (8u << 20)

/* A refusal names its field; these macros keep one bound on one line. */
#define REFUSE(...) return err_set(detail, ERR_INVALID, __VA_ARGS__)
#define AT_MOST(field, value, max)                                                                 \
    do {                                                                                           \
        if ((uint64_t)(value) > (uint64_t)(max))                                                   \
            REFUSE("%s: %llu is above %llu", field, (unsigned long long)(value),                   \
                   (unsigned long long)(max));                                                     \
    } while (0)
#define AT_LEAST(field, value, min)                                                                \
    do {                                                                                           \
        if ((uint64_t)(value) < (uint64_t)(min))                                                   \
            REFUSE("%s: %llu is below %llu", field, (unsigned long long)(value),                   \
                   (unsigned long long)(min));                                                     \
    } while (0)
#define HAS_ARRAY(field, pointer, count)                                                           \
    do {                                                                                           \
        if ((count) != 0 && (pointer) == NULL)                                                     \
            REFUSE("%s: array is missing", field);                                                 \
    } while (0)

static enum err text_check(const char *field, const char *text, size_t bytes_max,
                           struct err_detail *detail)
{
    if (text == NULL)
        return ERR_OK; /* encoded as "" */
    size_t bytes = strnlen(text, bytes_max + 1);
    if (bytes > bytes_max)
        REFUSE("%s: text is longer than %zu bytes", field, bytes_max);
    if (utf8_valid_prefix(text, bytes) != bytes)
        REFUSE("%s: text is not valid UTF-8", field);
    return ERR_OK;
}
#define SHORT_TEXT(object, field) TRY(text_check(#field, (object)->field, MSG_TEXT_MAX, detail))
#define LONG_TEXT(object, field)  TRY(text_check(#field, (object)->field, LONG_TEXT_MAX, detail))

static enum err range_check(const char *field, double value, double min, double max,
                            struct err_detail *detail)
{
    if (!isfinite(value))
        REFUSE("%s: not a finite number", field);
    if (value < min || value > max)
        REFUSE("%s: %g is outside %g..%g", field, value, min, max);
    return ERR_OK;
}

static enum err rate_check(const char *field, double value, struct err_detail *detail)
{
    return range_check(field, value, 0, 1e15, detail);
}

static enum err finite_check(const char *field, const float *values, uint64_t count,
                             struct err_detail *detail)
{
    for (uint64_t i = 0; i < count; i++) {
        if (!isfinite(values[i]))
            REFUSE("%s[%llu]: not a finite number", field, (unsigned long long)i);
    }
    return ERR_OK;
}

static enum err code_check(const char *field, uint32_t code, struct err_detail *detail)
{
    if (code >= ERR_COUNT)
        REFUSE("%s: %u is no error code", field, code);
    return ERR_OK;
}

static enum err sampling_check(const struct msg_sampling *s, struct err_detail *detail)
{
    TRY(range_check("temperature", s->temperature, 0, 100, detail));
    TRY(range_check("top_p", s->top_p, 0, 1, detail));
    if (s->top_p <= 0)
        REFUSE("top_p: must be above 0");
    TRY(range_check("min_p", s->min_p, 0, 1, detail));
    TRY(range_check("repetition_penalty", s->repetition_penalty, 0, 10, detail));
    if (s->repetition_penalty <= 0)
        REFUSE("repetition_penalty: must be above 0");
    TRY(range_check("presence_penalty", s->presence_penalty, -2, 2, detail));
    TRY(range_check("frequency_penalty", s->frequency_penalty, -2, 2, detail));
    AT_MOST("top_logprobs", s->top_logprobs, MSG_TOP_LOGPROBS_MAX);
    AT_MOST("bias_count", s->bias_count, MSG_BIAS_MAX);
    HAS_ARRAY("bias_ids", s->bias_ids, s->bias_count);
    HAS_ARRAY("bias_values", s->bias_values, s->bias_count);
    for (uint32_t i = 0; i < s->bias_count; i++)
        TRY(range_check("bias_values", s->bias_values[i], -100, 100, detail));
    return ERR_OK;
}

static enum err request_check(const struct msg_request *r, bool from_router,
                              struct err_detail *detail)
{
    static const struct hash128 none;
    SHORT_TEXT(r, session_key);
    SHORT_TEXT(r, cache_salt);
    SHORT_TEXT(r, effort);
    SHORT_TEXT(r, client_id);
    SHORT_TEXT(r, spec);
    AT_LEAST("prompt_count", r->prompt_count, 1);
    AT_MOST("ids_count", r->ids_count, MSG_IDS_MAX);
    if (r->ids_count < r->prompt_count)
        REFUSE("ids_count: %u is below prompt_count %u", r->ids_count, r->prompt_count);
    HAS_ARRAY("ids", r->ids, r->ids_count);
    if (memcmp(&r->made_by, &none, sizeof none) != 0 && r->ids_count == r->prompt_count)
        REFUSE("made_by: the request has no output tokens");
    if (r->group_index >= r->group_count && r->group_index > 0)
        REFUSE("group_index: %u is not below group_count %u", r->group_index, r->group_count);
    TRY(sampling_check(&r->sampling, detail));
    AT_LEAST("output_tokens_max", r->limits.output_tokens_max, 1);
    AT_MOST("stop_id_count", r->limits.stop_id_count, MSG_STOP_IDS_MAX);
    HAS_ARRAY("stop_ids", r->limits.stop_ids, r->limits.stop_id_count);
    if (r->canary && !from_router)
        REFUSE("canary: only the router may set it");
    return ERR_OK;
}

static enum err receipt_check(const struct msg_receipt *r, struct err_detail *detail)
{
    SHORT_TEXT(r, spec);
    SHORT_TEXT(r, config_hash);
    return ERR_OK;
}

static enum err tokens_check(const struct msg_tokens *t, struct err_detail *detail)
{
    AT_MOST("seq", t->seq, MSG_IDS_MAX);
    AT_MOST("count", t->count, MSG_EMIT_IDS_MAX);
    HAS_ARRAY("ids", t->ids, t->count);
    AT_MOST("top_count", t->top_count, MSG_TOP_LOGPROBS_MAX);
    AT_MOST("finish", t->finish, MSG_FINISH_FAILED);
    TRY(code_check("code", t->code, detail));
    if (t->count == 0 && t->finish == MSG_FINISH_NONE)
        REFUSE("count: 0 without a finish");
    if (t->finish == MSG_FINISH_FAILED && t->code == ERR_OK)
        REFUSE("code: ERR_OK with a failed finish");
    if (t->logprobs) {
        uint64_t top = (uint64_t)t->count * t->top_count;
        HAS_ARRAY("logprob", t->logprob, t->count);
        HAS_ARRAY("top_ids", t->top_ids, top);
        HAS_ARRAY("top_logprobs", t->top_logprobs, top);
        TRY(finite_check("logprob", t->logprob, t->count, detail));
        TRY(finite_check("top_logprobs", t->top_logprobs, top, detail));
    } else if (t->top_count != 0) {
        REFUSE("top_count: %u without logprobs", t->top_count);
    }
    return t->has_receipt ? receipt_check(&t->receipt, detail) : ERR_OK;
}

static enum err worker_check(const struct msg_worker_info *w, struct err_detail *detail)
{
    if (w->state < MSG_WORKER_LOADING || w->state > MSG_WORKER_FAILED)
        REFUSE("state: %u is no worker state", w->state);
    AT_MOST("blocks_free", w->blocks_free, w->blocks_total);
    AT_MOST("context_max", w->context_max, MSG_IDS_MAX);
    TRY(rate_check("decode_tokens_per_s", w->decode_tokens_per_s, detail));
    TRY(rate_check("prefill_tokens_per_s", w->prefill_tokens_per_s, detail));
    LONG_TEXT(w, quantization);
    SHORT_TEXT(w, numerics);
    SHORT_TEXT(w, spec);
    SHORT_TEXT(w, config_hash);
    LONG_TEXT(w, warnings);
    AT_MOST("canary_count", w->canary_count, MSG_CANARY_IDS_MAX);
    HAS_ARRAY("canary_ids", w->canary_ids, w->canary_count);
    AT_MOST("canary_output_count", w->canary_output_count, MSG_CANARY_IDS_MAX);
    AT_MOST("drafter_state", w->drafter_state, 2);
    AT_MOST("kv_state", w->kv_state, 2);
    AT_MOST("group", w->group, MSG_GROUPS_MAX - 1);
    return ERR_OK;
}

static enum err router_check(const struct msg_router_info *r, struct err_detail *detail)
{
    LONG_TEXT(r, reason);
    AT_MOST("blocks_free", r->blocks_free, r->blocks_total);
    LONG_TEXT(r, quantization);
    SHORT_TEXT(r, spec);
    SHORT_TEXT(r, config_hash);
    LONG_TEXT(r, warnings);
    return ERR_OK;
}

static enum err route_check(const struct msg *m, struct err_detail *detail)
{
    switch ((int)m->type) {
    case MSG_ROUTER_SUBMIT:
        return request_check(&m->u.request, false, detail);
    case MSG_WORKER_ASSIGN:
        return request_check(&m->u.request, true, detail);
    case MSG_SUBMIT_REPLY:
        TRY(code_check("code", m->u.submit_reply.code, detail));
        LONG_TEXT(&m->u.submit_reply, text);
        return ERR_OK;
    case MSG_ASSIGN_REPLY:
        TRY(code_check("code", m->u.assign_reply.code, detail));
        LONG_TEXT(&m->u.assign_reply, text);
        return ERR_OK;
    case MSG_TOKENS_EMITTED:
        return tokens_check(&m->u.tokens, detail);
    case MSG_WORKER_STATE:
        return worker_check(&m->u.worker, detail);
    case MSG_ROUTER_ANNOUNCE:
        SHORT_TEXT(&m->u.announce, kind);
        AT_MOST("live_count", m->u.announce.live_count, MSG_LIVE_IDS_MAX);
        HAS_ARRAY("live_ids", m->u.announce.live_ids, m->u.announce.live_count);
        return ERR_OK;
    case MSG_ROUTER_STATE:
        return router_check(&m->u.router, detail);
    case MSG_ROUTER_CANCEL:
    case MSG_WORKER_CANCEL:
    case MSG_WORKER_DRAIN:
    case MSG_WORKER_RESUME:
        return ERR_OK;
    default:
        REFUSE("type: %d is unknown", (int)m->type);
    }
}

static enum err attach_check(const struct msg *m, struct err_detail *detail)
{
    if (m->type == MSG_KV_ATTACH) {
        const struct msg_kv_attach *a = &m->u.kv_attach;
        AT_LEAST("ranks", a->ranks, 1);
        if (a->rank >= a->ranks)
            REFUSE("rank: %u of %u", a->rank, a->ranks);
        AT_MOST("state_bytes", a->state_bytes, KV_STATE_BYTES_MAX);
        AT_MOST("block_count", a->block_count, KV_BLOCKS_MAX);
        AT_MOST("kv_dtype", a->kv_dtype, KV_FP8);
        AT_MOST("index_dtype", a->index_dtype, KV_FP8);
        AT_MOST("snapshot_dtype", a->snapshot_dtype, KV_BF16);
        AT_MOST("live_slots", a->live_slots, a->slot_count);
        return ERR_OK;
    }
    const struct msg_kv_attach_reply *r = &m->u.kv_attach_reply;
    TRY(code_check("code", r->code, detail));
    LONG_TEXT(r, text);
    LONG_TEXT(r, arena_path);
    AT_MOST("kv_dtype", r->kv_dtype, KV_FP8);
    AT_MOST("index_dtype", r->index_dtype, KV_FP8);
    AT_MOST("snapshot_dtype", r->snapshot_dtype, KV_BF16);
    AT_MOST("live_slots", r->live_slots, r->slot_count);
    AT_MOST("granted_count", r->granted_count, MSG_GRANTS_MAX);
    return ERR_OK;
}

static enum err open_check(const struct msg *m, struct err_detail *detail)
{
    if (m->type == MSG_KV_OPEN) {
        const struct msg_kv_open *o = &m->u.kv_open;
        SHORT_TEXT(o, session_key);
        SHORT_TEXT(o, cache_salt);
        AT_MOST("prompt_count", o->prompt_count, MSG_IDS_MAX);
        AT_LEAST("blocks_wanted", o->blocks_wanted, 1);
        AT_MOST("blocks_wanted", o->blocks_wanted, MSG_BLOCKS_MAX);
        AT_MOST("hash_count", o->hash_count, MSG_BLOCKS_MAX);
        AT_MOST("reuse_max", o->reuse_max, MSG_IDS_MAX);
        HAS_ARRAY("hashes", o->hashes, o->hash_count);
        return ERR_OK;
    }
    const struct msg_kv_open_reply *r = &m->u.kv_open_reply;
    TRY(code_check("code", r->code, detail));
    LONG_TEXT(r, text);
    AT_MOST("reusable_tokens", r->reusable_tokens, MSG_IDS_MAX);
    AT_MOST("block_count", r->block_count, MSG_BLOCKS_MAX);
    HAS_ARRAY("blocks", r->blocks, r->block_count);
    return ERR_OK;
}

static enum err extend_check(const struct msg *m, struct err_detail *detail)
{
    if (m->type == MSG_KV_EXTEND) {
        AT_MOST("blocks_have", m->u.kv_extend.blocks_have, MSG_BLOCKS_MAX);
        AT_LEAST("blocks_wanted", m->u.kv_extend.blocks_wanted, 1);
        AT_MOST("blocks_wanted", m->u.kv_extend.blocks_wanted, MSG_BLOCKS_MAX);
        return ERR_OK;
    }
    const struct msg_kv_extend_reply *r = &m->u.kv_extend_reply;
    TRY(code_check("code", r->code, detail));
    AT_MOST("blocks_have", r->blocks_have, MSG_BLOCKS_MAX);
    AT_MOST("block_count", r->block_count, MSG_BLOCKS_MAX);
    HAS_ARRAY("blocks", r->blocks, r->block_count);
    return ERR_OK;
}

static enum err kv_state_check(const struct msg_kv_state *s, struct err_detail *detail)
{
    uint64_t sum = (uint64_t)s->blocks_free + s->blocks_leased + s->blocks_cached;
    AT_MOST("blocks_free", sum, s->blocks_total);
    AT_MOST("slots_free", s->slots_free, s->slots_total);
    AT_MOST("snapshots_free", s->snapshots_free, s->snapshots_total);
    AT_MOST("granted_count", s->granted_count, MSG_GRANTS_MAX);
    return ERR_OK;
}

static enum err kv_check(const struct msg *m, struct err_detail *detail)
{
    switch ((int)m->type) {
    case MSG_KV_ATTACH:
    case MSG_KV_ATTACH_REPLY:
        return attach_check(m, detail);
    case MSG_KV_OPEN:
    case MSG_KV_OPEN_REPLY:
        return open_check(m, detail);
    case MSG_KV_EXTEND:
    case MSG_KV_EXTEND_REPLY:
        return extend_check(m, detail);
    case MSG_KV_COMMIT:
        AT_MOST("first_block", m->u.kv_commit.first_block, MSG_BLOCKS_MAX);
        AT_MOST("hash_count", m->u.kv_commit.hash_count, MSG_BLOCKS_MAX);
        AT_MOST("token_count", m->u.kv_commit.token_count, MSG_IDS_MAX);
        HAS_ARRAY("hashes", m->u.kv_commit.hashes, m->u.kv_commit.hash_count);
        return ERR_OK;
    case MSG_KV_SNAPSHOT:
        AT_MOST("token_count", m->u.kv_snapshot.token_count, MSG_IDS_MAX);
        return ERR_OK;
    case MSG_KV_SNAPSHOT_REPLY:
        TRY(code_check("code", m->u.kv_snapshot_reply.code, detail));
        AT_MOST("granted_count", m->u.kv_snapshot_reply.granted_count, MSG_GRANTS_MAX);
        return ERR_OK;
    case MSG_KV_RELEASE:
        AT_MOST("token_count", m->u.kv_release.token_count, MSG_IDS_MAX);
        return ERR_OK;
    case MSG_KV_RECLAIM:
        return ERR_OK;
    case MSG_KV_PRESSURE:
        AT_MOST("blocks_free", m->u.kv_pressure.blocks_free, m->u.kv_pressure.blocks_total);
        return ERR_OK;
    case MSG_KV_ADOPT:
        SHORT_TEXT(&m->u.kv_adopt, session_key);
        AT_MOST("count", m->u.kv_adopt.count, MSG_BLOCKS_MAX);
        HAS_ARRAY("items", m->u.kv_adopt.items, m->u.kv_adopt.count);
        return ERR_OK;
    case MSG_KV_ADOPT_REPLY:
        TRY(code_check("code", m->u.kv_adopt_reply.code, detail));
        AT_MOST("valid_count", m->u.kv_adopt_reply.valid_count, MSG_BLOCKS_MAX);
        return ERR_OK;
    case MSG_KV_PING:
        AT_MOST("lease_count", m->u.kv_ping.lease_count, MSG_LIVE_IDS_MAX);
        HAS_ARRAY("leases", m->u.kv_ping.leases, m->u.kv_ping.lease_count);
        return ERR_OK;
    case MSG_KV_STATE:
        return kv_state_check(&m->u.kv_state, detail);
    default:
        REFUSE("type: %d is unknown", (int)m->type);
    }
}

static enum err draft_ids_check(uint32_t base_length, uint32_t count, const uint32_t *ids,
                                struct err_detail *detail)
{
    AT_MOST("base_length", base_length, MSG_IDS_MAX);
    AT_MOST("ids_count", count, MSG_IDS_MAX);
    HAS_ARRAY("ids", ids, count);
    return ERR_OK;
}

static enum err draft_check(const struct msg *m, struct err_detail *detail)
{
    switch ((int)m->type) {
    case MSG_DRAFT_HELLO:
        SHORT_TEXT(&m->u.draft_hello, tap_ring);
        return ERR_OK;
    case MSG_DRAFT_CLOSE:
        return ERR_OK;
    case MSG_DRAFT_HELLO_REPLY:
        SHORT_TEXT(&m->u.draft_hello_reply, source);
        AT_MOST("draft_tokens_max", m->u.draft_hello_reply.draft_tokens_max, MSG_DRAFT_IDS_MAX);
        AT_MOST("tap_layer_count", m->u.draft_hello_reply.tap_layer_count, MSG_TAPS_MAX);
        HAS_ARRAY("tap_layers", m->u.draft_hello_reply.tap_layers,
                  m->u.draft_hello_reply.tap_layer_count);
        return ERR_OK;
    case MSG_DRAFT_OPEN:
        return draft_ids_check(0, m->u.draft_open.ids_count, m->u.draft_open.ids, detail);
    case MSG_DRAFT_CONTEXT:
        return draft_ids_check(m->u.draft_context.base_length, m->u.draft_context.ids_count,
                               m->u.draft_context.ids, detail);
    case MSG_DRAFT_PROPOSE:
        SHORT_TEXT(&m->u.draft_propose, source);
        AT_LEAST("draft_count", m->u.draft_propose.draft_count, 1);
        AT_MOST("draft_count", m->u.draft_propose.draft_count, MSG_DRAFT_IDS_MAX);
        return draft_ids_check(m->u.draft_propose.base_length, m->u.draft_propose.ids_count,
                               m->u.draft_propose.ids, detail);
    case MSG_DRAFT_REPLY:
        TRY(code_check("code", m->u.draft_reply.code, detail));
        AT_MOST("ids_count", m->u.draft_reply.ids_count, MSG_DRAFT_IDS_MAX);
        return draft_ids_check(m->u.draft_reply.base_length, m->u.draft_reply.ids_count,
                               m->u.draft_reply.ids, detail);
    case MSG_STEP_PLAN:
        AT_MOST("plan_bytes", m->u.step_plan.plan_bytes, PLAN_BYTES_MAX);
        HAS_ARRAY("plan", m->u.step_plan.plan, m->u.step_plan.plan_bytes);
        return ERR_OK;
    case MSG_STEP_DONE:
        return code_check("status", m->u.step_done.status, detail);
    default:
        REFUSE("type: %d is unknown", (int)m->type);
    }
}

enum err wire_check(const struct msg *m, struct err_detail *detail)
{
    CHECK(m != NULL);
    if ((int)m->type >= MSG_DRAFT_HELLO)
        return draft_check(m, detail);
    if ((int)m->type >= MSG_KV_ATTACH)
        return kv_check(m, detail);
    return route_check(m, detail);
}
