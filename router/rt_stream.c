/* SPDX-License-Identifier: Apache-2.0 */
/* What workers answer: assignments taken or refused, tokens in order. */
#include "router/rt_core_state.h"

#include <string.h>

#include "lib/base/check.h"

void rt_on_assign_reply(struct rt_core *c, struct rt_worker *w, const struct msg *m)
{
    const struct msg_assign_reply *a = &m->u.assign_reply;
    CHECK(m->type == MSG_ASSIGN_REPLY);
    if (rt_canary_is(&w->canary, &m->id)) {
        if (w->canary.active && a->code != ERR_OK) {
            struct rt_canary_times t = {.period_us = c->options.canary_us};
            rt_canary_refused(&w->canary, &t, c->now_us);
        }
        return;
    }
    struct rt_request *r = rt_store_find(c->store, &m->id);
    if (r == NULL || r->worker != w || r->acked) {
        c->stats.strays++;
        return;
    }
    if (a->code == ERR_OK) {
        r->acked = true;
        return;
    }
    /* It has not got the request: a cancel that waits for its answer is over too. */
    if (r->state == RT_CANCELLING && !r->again) {
        rt_request_finish(c, r, MSG_FINISH_CANCELLED, ERR_OK, NULL);
        return;
    }
    bool later = a->code == ERR_BUSY || a->code == ERR_DRAINING || a->code == ERR_LOADING;
    rt_trace(c, later ? RT_TRACE_DEBUG : RT_TRACE_WARN, "assignment refused", &w->peer, &m->id,
             a->code);
    if (later) {
        w->busy_until_us = c->now_us + RT_REFUSED_US;
        rt_request_requeue(c, r, false);
    } else {
        rt_request_finish(c, r, MSG_FINISH_FAILED, (enum err)a->code, NULL);
    }
}

static bool canary_tokens(struct rt_core *c, struct rt_worker *w, const struct msg *m)
{
    if (!rt_canary_is(&w->canary, &m->id))
        return false;
    struct rt_canary_times t = {.period_us = c->options.canary_us};
    enum rt_canary_verdict before = w->canary.verdict;
    if (!w->canary.active || !rt_canary_answer(&w->canary, &m->u.tokens, &w->info, &t, c->now_us))
        return true;
    if (w->canary.right_us == c->now_us && w->canary.verdict == RT_CANARY_RIGHT)
        rt_worker_progress(w, c->now_us);
    if (w->canary.verdict == RT_CANARY_WRONG) {
        c->stats.canaries_failed++;
        rt_trace(c, RT_TRACE_WARN, "canary answered wrong", &w->peer, NULL, w->canary.count);
        if (m->u.tokens.finish == MSG_FINISH_NONE)
            rt_send(c, &w->peer, MSG_WORKER_CANCEL, &m->id);
    } else if (w->canary.verdict != before) {
        rt_trace(c, RT_TRACE_INFO, "canary right", &w->peer, NULL, c->now_us - w->canary.sent_us);
    }
    return true;
}

static void slice(const struct msg_tokens *t, uint32_t skip, struct msg_tokens *ret_t)
{
    CHECK(skip <= t->count);
    *ret_t = *t;
    ret_t->seq = t->seq + skip;
    ret_t->count = t->count - skip;
    ret_t->ids = ret_t->count > 0 ? t->ids + skip : NULL;
    if (t->logprobs && ret_t->count > 0) {
        ret_t->logprob = t->logprob + skip;
        if (t->top_count > 0) { /* else there are no lists to step in */
            ret_t->top_ids = t->top_ids + (size_t)skip * t->top_count;
            ret_t->top_logprobs = t->top_logprobs + (size_t)skip * t->top_count;
        }
    }
}

/* New tokens become final: recorded, counted; false when they could not be recorded and the
 * gateway has not got all before them either. */
static bool take_tokens(struct rt_core *c, struct rt_request *r, const struct msg_tokens *t)
{
    if (t->count == 0)
        return true;
    CHECK(t->seq == r->output_count);
    if (!r->first_token)
        rt_rate_done(&c->rate, rt_worker_prompt_done(r->worker, r));
    if (!r->begun)
        r->made_by = r->worker->info.kv_model_fp;
    r->begun = true;
    rt_rate_done(&c->rate, t->count);
    c->stats.tokens_in += t->count;
    if (!r->unstored && !rt_chain_append(c->store, &r->ids, t->ids, t->count)) {
        r->unstored = true;
        rt_trace(c, RT_TRACE_WARN, "token memory full, stream cannot be resumed", NULL, &r->id,
                 r->output_count);
    }
    bool all_before = r->delivered == r->output_count;
    r->output_count += t->count;
    CHECK(r->unstored || r->ids.count == r->prompt_count + r->output_count);
    return !r->unstored || all_before;
}

/* Hands new tokens straight on, logprobs included, when the gateway has all before them. */
static void forward(struct rt_core *c, struct rt_request *r, const struct msg_tokens *t)
{
    CHECK(r->delivered <= r->output_count);
    if (r->gateway == NULL || t->count == 0 || r->delivered != t->seq) {
        rt_pend(c, r);
        return;
    }
    struct msg *m = rt_send(c, &r->gateway->peer, MSG_TOKENS_EMITTED, &r->id);
    m->u.tokens = *t;
    m->u.tokens.finish = MSG_FINISH_NONE;
    m->u.tokens.code = ERR_OK;
    m->u.tokens.made_by = r->made_by;
    if (t->has_receipt)
        rt_request_receipt(r, &m->u.tokens.receipt);
    r->delivered += t->count;
    c->stats.tokens_out += t->count;
}

static void end_of_stream(struct rt_core *c, struct rt_request *r, const struct msg_tokens *t)
{
    const struct msg_receipt *receipt = t->has_receipt ? &t->receipt : NULL;
    switch (t->finish) {
    case MSG_FINISH_STOP:
    case MSG_FINISH_LENGTH:
        rt_request_finish(c, r, (enum msg_finish)t->finish, ERR_OK, receipt);
        break;
    case MSG_FINISH_CANCELLED:
        /* Nobody here asked for it: the worker gave the request back. */
        rt_request_requeue(c, r, true);
        break;
    case MSG_FINISH_FAILED:
        if (t->code == ERR_DRAINING || t->code == ERR_CLOSED)
            rt_request_requeue(c, r, true);
        else
            rt_request_finish(c, r, MSG_FINISH_FAILED, (enum err)t->code, receipt);
        break;
    default:
        CHECK(false);
    }
}

/* The worker has gone past what we hold, or stands behind it with an end. */
static void out_of_step(struct rt_core *c, struct rt_request *r, const struct msg_tokens *t)
{
    c->stats.gaps++;
    rt_trace(c, RT_TRACE_WARN, "tokens out of step", &r->worker->peer, &r->id, t->seq);
    if (t->finish != MSG_FINISH_NONE)
        rt_request_requeue(c, r, true);
    else if (r->state == RT_RUNNING)
        rt_request_resync(c, r);
}

void rt_on_tokens(struct rt_core *c, struct rt_worker *w, const struct msg *m)
{
    const struct msg_tokens *t = &m->u.tokens;
    CHECK(m->type == MSG_TOKENS_EMITTED);
    if (canary_tokens(c, w, m))
        return;
    struct rt_request *r = rt_store_find(c->store, &m->id);
    if (r == NULL || r->worker != w) {
        /* A worker that was thought lost, or missed a cancel. */
        c->stats.strays++;
        if (t->finish == MSG_FINISH_NONE)
            rt_send(c, &w->peer, MSG_WORKER_CANCEL, &m->id);
        return;
    }
    CHECK(r->state == RT_RUNNING || r->state == RT_CANCELLING);
    if (t->count > 0)
        rt_worker_progress(w, c->now_us);
    r->acked = true;
    r->send_assign = false;
    if (r->state == RT_CANCELLING && !r->again) {
        if (t->finish != MSG_FINISH_NONE)
            rt_request_finish(c, r, MSG_FINISH_CANCELLED, ERR_OK,
                              t->has_receipt ? &t->receipt : NULL);
        return;
    }
    bool text_end = t->finish == MSG_FINISH_STOP || t->finish == MSG_FINISH_LENGTH;
    uint64_t end = (uint64_t)t->seq + t->count;
    if (t->seq > r->output_count || (text_end && end < r->output_count)) {
        if (!text_end && t->finish != MSG_FINISH_NONE)
            end_of_stream(c, r, t);
        else
            out_of_step(c, r, t);
        return;
    }
    uint32_t skip = r->output_count - t->seq;
    if (skip > t->count)
        skip = t->count;
    c->stats.tokens_repeated += skip;
    struct msg_tokens fresh;
    if (t->has_receipt) {
        r->running = t->receipt;
        r->running.spec = r->running.config_hash = ""; /* theirs do not outlive the message */
        r->has_running = true;
    }
    slice(t, skip, &fresh);
    if (!take_tokens(c, r, &fresh)) {
        rt_request_cancel(c, r);
        return;
    }
    forward(c, r, &fresh);
    if (t->finish != MSG_FINISH_NONE)
        end_of_stream(c, r, t);
}

void rt_on_unsent_tokens(struct rt_core *c, const struct msg_id *id, uint32_t seq)
{
    struct rt_request *r = rt_store_find(c->store, id);
    if (r == NULL || r->gateway == NULL)
        return;
    CHECK(r->delivered <= r->output_count);
    if (r->unstored) {
        rt_request_cancel(c, r);
        return;
    }
    /* Tried again at the next tick, while the gateway is heard. */
    if (seq < r->delivered)
        r->delivered = seq;
    r->finish_sent = false;
}
