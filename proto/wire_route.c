/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of route.proto. */
#include "proto/wire_table.h"

#include "proto/route.pb-c.h"

STATIC_CHECK((int)MSG_FINISH_FAILED == (int)TANDEM__V1__FINISH_REASON__FINISH_REASON_FAILED);
STATIC_CHECK((int)MSG_FINISH_STOP == (int)TANDEM__V1__FINISH_REASON__FINISH_REASON_STOP);
STATIC_CHECK((int)MSG_FINISH_LENGTH == (int)TANDEM__V1__FINISH_REASON__FINISH_REASON_LENGTH);
STATIC_CHECK((int)MSG_FINISH_CANCELLED == (int)TANDEM__V1__FINISH_REASON__FINISH_REASON_CANCELLED);
STATIC_CHECK((int)MSG_WORKER_LOADING == (int)TANDEM__V1__WORKER_PHASE__WORKER_PHASE_LOADING);
STATIC_CHECK((int)MSG_WORKER_READY == (int)TANDEM__V1__WORKER_PHASE__WORKER_PHASE_READY);
STATIC_CHECK((int)MSG_WORKER_DRAINING == (int)TANDEM__V1__WORKER_PHASE__WORKER_PHASE_DRAINING);
STATIC_CHECK((int)MSG_WORKER_FAILED == (int)TANDEM__V1__WORKER_PHASE__WORKER_PHASE_FAILED);

#define M struct msg_sampling
#define P Tandem__V1__Sampling
static const struct wire_field sampling_rows[] = {
    WIRE_ROW_F64(temperature),
    WIRE_ROW_F64(top_p),
    WIRE_ROW_F64(min_p),
    WIRE_ROW_U32(top_k),
    WIRE_ROW_F64(repetition_penalty),
    WIRE_ROW_F64(presence_penalty),
    WIRE_ROW_F64(frequency_penalty),
    WIRE_ROW_U64(seed),
    WIRE_ROW_U32(choice),
    WIRE_ROW_BOOL(logprobs),
    WIRE_ROW_U32(top_logprobs),
    WIRE_ROW_IDS(bias_ids, bias_count),
    WIRE_ROW_FLOATS(bias_values, bias_count),
};
#undef M
#undef P
static const struct wire_struct sampling_table =
    WIRE_STRUCT(tandem__v1__sampling__descriptor, sampling_rows);

#define M struct msg_limits
#define P Tandem__V1__Limits
static const struct wire_field limits_rows[] = {
    WIRE_ROW_U32(output_tokens_max), WIRE_ROW_U32(output_tokens_min),
    WIRE_ROW_BOOL(ignore_eos),       WIRE_ROW_IDS(stop_ids, stop_id_count),
    WIRE_ROW_U64(deadline_unix_us),
};
#undef M
#undef P
static const struct wire_struct limits_table =
    WIRE_STRUCT(tandem__v1__limits__descriptor, limits_rows);

#define M struct msg_request
#define P Tandem__V1__Request
static const struct wire_field request_rows[] = {
    WIRE_ROW_TEXT(session_key),
    WIRE_ROW_TEXT(cache_salt),
    WIRE_ROW_TEXT(effort),
    WIRE_ROW_TEXT(client_id),
    WIRE_ROW_TEXT(spec),
    WIRE_ROW_I32(priority),
    WIRE_ROW_U32(prompt_count),
    WIRE_ROW_U32(ids_count),
    WIRE_ROW_SUB(sampling, sampling_table),
    WIRE_ROW_SUB(limits, limits_table),
    WIRE_ROW_U32(attempt),
    WIRE_ROW_U32(group_index),
    WIRE_ROW_U32(group_count),
    WIRE_ROW_U64(group_tokens),
    WIRE_ROW_HASH(made_by),
};
#undef M
#undef P
static const struct wire_struct request_table =
    WIRE_STRUCT(tandem__v1__request__descriptor, request_rows);

#define M struct msg_request
#define P Tandem__V1__RouterSubmit
static const struct wire_field submit_rows[] = {
    WIRE_ROW_SELF(request, request_table),
};
#undef P
#define P Tandem__V1__WorkerAssign
static const struct wire_field assign_rows[] = {
    WIRE_ROW_SELF(request, request_table),
    WIRE_ROW_BOOL(canary),
};
#undef M
#undef P
static const struct wire_struct submit_table =
    WIRE_STRUCT(tandem__v1__router_submit__descriptor, submit_rows);
static const struct wire_struct assign_table =
    WIRE_STRUCT(tandem__v1__worker_assign__descriptor, assign_rows);

#define M struct msg_submit_reply
#define P Tandem__V1__SubmitReply
static const struct wire_field submit_reply_rows[] = {
    WIRE_ROW_U32(code),
    WIRE_ROW_U32(retry_after_ms),
    WIRE_ROW_U32(concurrency),
    WIRE_ROW_TEXT(text),
};
#undef M
#undef P
static const struct wire_struct submit_reply_table =
    WIRE_STRUCT(tandem__v1__submit_reply__descriptor, submit_reply_rows);

#define M struct msg_receipt
#define P Tandem__V1__Receipt
static const struct wire_field receipt_rows[] = {
    WIRE_ROW_U32(prompt_tokens), WIRE_ROW_U32(output_tokens), WIRE_ROW_U32(cached_tokens),
    WIRE_ROW_U32(drafted),       WIRE_ROW_U32(accepted),      WIRE_ROW_U32(steps),
    WIRE_ROW_U32(preempted),     WIRE_ROW_U32(resumed),       WIRE_ROW_U32(concurrency),
    WIRE_ROW_U64(queue_us),      WIRE_ROW_U64(prefill_us),    WIRE_ROW_U64(decode_us),
    WIRE_ROW_U64(draft_us),      WIRE_ROW_U64(verify_us),     WIRE_ROW_TEXT(spec),
    WIRE_ROW_HASH(model_fp),     WIRE_ROW_TEXT(config_hash),
};
#undef M
#undef P
static const struct wire_struct receipt_table =
    WIRE_STRUCT(tandem__v1__receipt__descriptor, receipt_rows);

#define M struct msg_tokens
#define P Tandem__V1__TokensEmitted
static const struct wire_field tokens_rows[] = {
    WIRE_ROW_U32(seq),          WIRE_ROW_IDS(ids, count),
    WIRE_ROW_BOOL(logprobs),    WIRE_ROW_U32(top_count),
    WIRE_ROW_U32(finish),       WIRE_ROW_U32(code),
    WIRE_ROW_BOOL(has_receipt), WIRE_ROW_SUB(receipt, receipt_table),
    WIRE_ROW_HASH(made_by),
};
#undef M
#undef P
static const struct wire_struct tokens_table =
    WIRE_STRUCT(tandem__v1__tokens_emitted__descriptor, tokens_rows);

/* The lengths of the three arrays follow from count, top_count and logprobs. */
static void tokens_encode_more(const void *plain, void *pb)
{
    const struct msg_tokens *t = plain;
    Tandem__V1__TokensEmitted *p = pb;
    if (!t->logprobs)
        return;
    p->n_logprob = t->count;
    p->logprob = (float *)(uintptr_t)t->logprob;
    p->n_top_ids = (size_t)t->count * t->top_count;
    p->top_ids = (uint32_t *)(uintptr_t)t->top_ids;
    p->n_top_logprobs = p->n_top_ids;
    p->top_logprobs = (float *)(uintptr_t)t->top_logprobs;
}

static enum err tokens_decode_more(void *plain, const void *pb, struct err_detail *detail)
{
    struct msg_tokens *t = plain;
    const Tandem__V1__TokensEmitted *p = pb;
    uint64_t count = t->logprobs ? t->count : 0;
    uint64_t top_count = count * t->top_count;
    if (p->n_logprob != count)
        return err_set(detail, ERR_INVALID, "logprob: %zu items, expected %u", p->n_logprob,
                       (unsigned)count);
    if (p->n_top_ids != top_count || p->n_top_logprobs != top_count)
        return err_set(detail, ERR_INVALID, "top_ids: %zu and %zu items, expected %u times %u",
                       p->n_top_ids, p->n_top_logprobs, (unsigned)count, t->top_count);
    t->logprob = p->logprob;
    t->top_ids = p->top_ids;
    t->top_logprobs = p->top_logprobs;
    return ERR_OK;
}

#define M struct msg_assign_reply
#define P Tandem__V1__AssignReply
static const struct wire_field assign_reply_rows[] = {
    WIRE_ROW_U32(code),
    WIRE_ROW_TEXT(text),
};
#undef M
#undef P
static const struct wire_struct assign_reply_table =
    WIRE_STRUCT(tandem__v1__assign_reply__descriptor, assign_reply_rows);

#define M __typeof__(((struct msg *)0)->u.drain)
#define P Tandem__V1__WorkerDrain
static const struct wire_field drain_rows[] = {
    WIRE_ROW_U64(deadline_unix_us),
};
#undef M
#undef P
static const struct wire_struct drain_table =
    WIRE_STRUCT(tandem__v1__worker_drain__descriptor, drain_rows);

#define M struct msg_ledger
#define P Tandem__V1__Ledger
static const struct wire_field ledger_rows[] = {
    WIRE_ROW_U64(accepted),  WIRE_ROW_U64(finished), WIRE_ROW_U64(failed),
    WIRE_ROW_U64(cancelled), WIRE_ROW_U64(live),
};
#undef M
#undef P
static const struct wire_struct ledger_table =
    WIRE_STRUCT(tandem__v1__ledger__descriptor, ledger_rows);

#define M struct msg_worker_info
#define P Tandem__V1__WorkerState
static const struct wire_field worker_rows[] = {
    WIRE_ROW_U32(worker_id),
    WIRE_ROW_U64(incarnation),
    WIRE_ROW_U32(state),
    WIRE_ROW_U32(seqs_live),
    WIRE_ROW_U32(seqs_max),
    WIRE_ROW_U64(tokens_queued),
    WIRE_ROW_U32(blocks_free),
    WIRE_ROW_U32(blocks_total),
    WIRE_ROW_U32(block_tokens),
    WIRE_ROW_U32(context_max),
    WIRE_ROW_U32(vocab_size),
    WIRE_ROW_F64(decode_tokens_per_s),
    WIRE_ROW_F64(prefill_tokens_per_s),
    WIRE_ROW_U64(step_us_last),
    WIRE_ROW_U64(step_age_us),
    WIRE_ROW_U64(gap_us_max),
    WIRE_ROW_SUB(ledger, ledger_table),
    WIRE_ROW_HASH(model_fp),
    WIRE_ROW_TEXT(quantization),
    WIRE_ROW_TEXT(numerics),
    WIRE_ROW_TEXT(spec),
    WIRE_ROW_TEXT(config_hash),
    WIRE_ROW_TEXT(warnings),
    WIRE_ROW_IDS(canary_ids, canary_count),
    WIRE_ROW_U32(canary_output_count),
    WIRE_ROW_U64(canary_hash),
    WIRE_ROW_U32(drafter_state),
    WIRE_ROW_U32(kv_state),
    WIRE_ROW_U32(group),
    WIRE_ROW_U32(kv_epoch),
    WIRE_ROW_U64(kv_incarnation),
    WIRE_ROW_HASH(kv_layout_fp),
    WIRE_ROW_HASH(kv_model_fp),
};
#undef M
#undef P
static const struct wire_struct worker_table =
    WIRE_STRUCT(tandem__v1__worker_state__descriptor, worker_rows);

#define M struct msg_announce
#define P Tandem__V1__RouterAnnounce
static const struct wire_field announce_rows[] = {
    WIRE_ROW_TEXT(kind),
    WIRE_ROW_U32(id),
    WIRE_ROW_U64(incarnation),
    WIRE_ROW_U32(live_count),
};
#undef M
#undef P
static const struct wire_struct announce_table =
    WIRE_STRUCT(tandem__v1__router_announce__descriptor, announce_rows);

#define M struct msg_router_info
#define P Tandem__V1__RouterState
static const struct wire_field router_rows[] = {
    WIRE_ROW_U64(incarnation),   WIRE_ROW_BOOL(ready),         WIRE_ROW_TEXT(reason),
    WIRE_ROW_U32(workers_ready), WIRE_ROW_U32(workers_live),   WIRE_ROW_U32(running),
    WIRE_ROW_U32(waiting),       WIRE_ROW_U64(tokens_waiting), WIRE_ROW_U32(context_max),
    WIRE_ROW_U32(block_tokens),  WIRE_ROW_U32(blocks_total),   WIRE_ROW_U32(blocks_free),
    WIRE_ROW_HASH(model_fp),     WIRE_ROW_TEXT(quantization),  WIRE_ROW_TEXT(spec),
    WIRE_ROW_TEXT(config_hash),  WIRE_ROW_TEXT(warnings),      WIRE_ROW_SUB(ledger, ledger_table),
};
#undef M
#undef P
static const struct wire_struct router_table =
    WIRE_STRUCT(tandem__v1__router_state__descriptor, router_rows);

static const struct wire_struct router_cancel_table = {&tandem__v1__router_cancel__descriptor, NULL,
                                                       0};
static const struct wire_struct worker_cancel_table = {&tandem__v1__worker_cancel__descriptor, NULL,
                                                       0};
static const struct wire_struct worker_resume_table = {&tandem__v1__worker_resume__descriptor, NULL,
                                                       0};

#define REQUEST_PAYLOAD WIRE_PAYLOAD(struct msg_request, ids, ids_count, const uint32_t *, 4, 4)
#define ANNOUNCE_PAYLOAD                                                                           \
    WIRE_PAYLOAD(struct msg_announce, live_ids, live_count, const struct msg_id *, 16, 1)

const struct wire_type wire_route_types[] = {
    {MSG_ROUTER_SUBMIT, "RouterSubmit", &submit_table, REQUEST_PAYLOAD, NULL, NULL},
    {MSG_ROUTER_CANCEL, "RouterCancel", &router_cancel_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_SUBMIT_REPLY, "SubmitReply", &submit_reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_TOKENS_EMITTED, "TokensEmitted", &tokens_table, WIRE_NO_PAYLOAD, tokens_encode_more,
     tokens_decode_more},
    {MSG_WORKER_ASSIGN, "WorkerAssign", &assign_table, REQUEST_PAYLOAD, NULL, NULL},
    {MSG_WORKER_CANCEL, "WorkerCancel", &worker_cancel_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_WORKER_DRAIN, "WorkerDrain", &drain_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_WORKER_RESUME, "WorkerResume", &worker_resume_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_ASSIGN_REPLY, "AssignReply", &assign_reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_WORKER_STATE, "WorkerState", &worker_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_ROUTER_ANNOUNCE, "RouterAnnounce", &announce_table, ANNOUNCE_PAYLOAD, NULL, NULL},
    {MSG_ROUTER_STATE, "RouterState", &router_table, WIRE_NO_PAYLOAD, NULL, NULL},
};
const size_t wire_route_type_count = ARRAY_COUNT(wire_route_types);
