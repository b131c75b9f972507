/* SPDX-License-Identifier: Apache-2.0 */
/* One request: its states, and what it still has to send. */
#include "router/rt_core_state.h"

#include <string.h>

#include "lib/base/check.h"

bool rt_request_full(const struct rt_core *c, const struct rt_request *r)
{
    uint64_t tokens = (uint64_t)r->prompt_count + r->output_count;
    return r->output_count >= r->limits.output_tokens_max ||
           (c->context_max != 0 && r->output_count > 0 && tokens >= c->context_max);
}

static void leave(struct rt_core *c, struct rt_request *r)
{
    if (r->state == RT_WAITING && !rt_link_alone(&r->place)) {
        rt_queue_remove(c->queue, r);
        r->queue_us += c->now_us - r->queued_us;
    }
    if (r->worker != NULL)
        rt_worker_leave(r);
    r->acked = false;
    r->again = false;
    r->send_assign = false;
    r->send_cancel = false;
    CHECK(rt_link_alone(&r->place));
}

void rt_request_receipt(const struct rt_request *r, struct msg_receipt *receipt)
{
    const struct msg_receipt *b = &r->before;
    receipt->prompt_tokens = r->prompt_count;
    receipt->output_tokens = r->output_count;
    /* A worker counts the assignment that brought it a resumed request. */
    bool counted = receipt->resumed > 0 && r->resumed > 0;
    receipt->resumed += counted ? r->resumed - 1 : r->resumed;
    receipt->queue_us += r->queue_us + b->queue_us;
    receipt->drafted += b->drafted;
    receipt->accepted += b->accepted;
    receipt->steps += b->steps;
    receipt->preempted += b->preempted;
    receipt->prefill_us += b->prefill_us;
    receipt->decode_us += b->decode_us;
    receipt->draft_us += b->draft_us;
    receipt->verify_us += b->verify_us;
    if (b->output_tokens > 0) /* later ones find what this request itself has left */
        receipt->cached_tokens = b->cached_tokens;
}

/* The worker is lost; what it had done for the request stays done. */
static void receipt_keep(struct rt_request *r)
{
    struct msg_receipt *b = &r->before;
    const struct msg_receipt *m = &r->running;
    if (!r->has_running)
        return;
    if (b->output_tokens == 0)
        b->cached_tokens = m->cached_tokens;
    b->output_tokens = r->output_count;
    b->queue_us += m->queue_us;
    b->drafted += m->drafted;
    b->accepted += m->accepted;
    b->steps += m->steps;
    b->preempted += m->preempted;
    b->prefill_us += m->prefill_us;
    b->decode_us += m->decode_us;
    b->draft_us += m->draft_us;
    b->verify_us += m->verify_us;
    r->has_running = false;
}

static void receipt_set(struct rt_request *r, enum msg_finish finish,
                        const struct msg_receipt *receipt)
{
    struct msg_tokens *t = &r->finish;
    if (receipt == NULL && finish == MSG_FINISH_CANCELLED)
        return;
    t->has_receipt = true;
    if (receipt != NULL)
        t->receipt = *receipt;
    else if (r->has_running)
        t->receipt = r->running;
    rt_text_set(&r->receipt_spec, receipt != NULL ? receipt->spec : "");
    rt_text_set(&r->receipt_config_hash, receipt != NULL ? receipt->config_hash : "");
    t->receipt.spec = r->receipt_spec.bytes;
    t->receipt.config_hash = r->receipt_config_hash.bytes;
    rt_request_receipt(r, &t->receipt);
}

static void count_finish(struct rt_core *c, const struct rt_request *r, enum msg_finish finish)
{
    CHECK(c->ledger.live > 0);
    c->ledger.live--;
    switch (finish) {
    case MSG_FINISH_STOP:
    case MSG_FINISH_LENGTH:
        c->ledger.finished++;
        if (finish == MSG_FINISH_STOP)
            c->stats.finished_stop++;
        else
            c->stats.finished_length++;
        rt_rate_finished(&c->rate, r->output_count);
        rt_observe(c, RT_OBSERVE_PROMPT_TOKENS, r->prompt_count);
        rt_observe(c, RT_OBSERVE_OUTPUT_TOKENS, r->output_count);
        break;
    case MSG_FINISH_CANCELLED:
        c->ledger.cancelled++;
        break;
    case MSG_FINISH_FAILED:
        c->ledger.failed++;
        break;
    case MSG_FINISH_NONE:
        CHECK(false);
    }
    const struct msg_ledger *l = &c->ledger;
    CHECK(l->accepted == l->finished + l->failed + l->cancelled + l->live);
}

void rt_request_finish(struct rt_core *c, struct rt_request *r, enum msg_finish finish,
                       enum err code, const struct msg_receipt *receipt)
{
    CHECK(r->state != RT_DONE && r->state != RT_FREE);
    CHECK((finish == MSG_FINISH_FAILED) == (code != ERR_OK));
    if (finish == MSG_FINISH_STOP || finish == MSG_FINISH_LENGTH)
        rt_affinity_finished(c, r);
    leave(c, r);
    r->state = RT_DONE;
    r->done_us = c->now_us;
    r->finish = (struct msg_tokens){.finish = finish, .code = code};
    receipt_set(r, finish, receipt);
    count_finish(c, r, finish);
    if (finish == MSG_FINISH_CANCELLED) { /* nothing of it will be delivered or resumed */
        rt_chain_free(c->store, &r->ids);
        rt_chain_free(c->store, &r->bias);
    }
    rt_link_insert_before(&c->done, &r->done);
    rt_pend(c, r);
}

void rt_request_cancel(struct rt_core *c, struct rt_request *r)
{
    switch (r->state) {
    case RT_WAITING:
        rt_request_finish(c, r, MSG_FINISH_CANCELLED, ERR_OK, NULL);
        break;
    case RT_RUNNING:
        r->state = RT_CANCELLING;
        r->again = false;
        r->send_assign = false;
        r->send_cancel = true;
        r->cancel_us = c->now_us;
        rt_pend(c, r);
        break;
    case RT_CANCELLING:
        r->again = false;
        break;
    case RT_DONE:
        break;
    case RT_FREE:
        CHECK(false);
    }
}

void rt_request_resync(struct rt_core *c, struct rt_request *r)
{
    CHECK(r->state == RT_RUNNING && r->worker != NULL);
    rt_request_cancel(c, r);
    r->again = true;
}

void rt_request_requeue(struct rt_core *c, struct rt_request *r, bool lost)
{
    CHECK(r->state == RT_RUNNING || r->state == RT_CANCELLING);
    leave(c, r);
    r->state = RT_WAITING;
    r->queued_us = c->now_us;
    c->stats.requeued++;
    receipt_keep(r);
    if (lost) {
        if (r->output_count > r->lost_at)
            r->losses = 0;
        r->lost_at = r->output_count;
        r->losses++;
        r->resumed++;
    }
    if (!lost && r->attempt > 0)
        r->attempt--; /* it was not taken */
    if (r->gateway == NULL)
        rt_request_finish(c, r, MSG_FINISH_CANCELLED, ERR_OK, NULL);
    else if (rt_request_full(c, r))
        rt_request_finish(c, r, MSG_FINISH_LENGTH, ERR_OK, NULL);
    else if (r->unstored)
        rt_request_finish(c, r, MSG_FINISH_FAILED, ERR_NO_WORKER, NULL);
    else if (r->losses > RT_LOSSES_MAX)
        rt_request_finish(c, r, MSG_FINISH_FAILED, ERR_INTERNAL, NULL);
    else
        rt_queue_push_front(c->queue, r);
}

void rt_request_release(struct rt_core *c, struct rt_request *r)
{
    CHECK(r->state == RT_DONE);
    rt_gateway_leave(r);
    rt_link_remove(&r->done);
    rt_link_remove(&r->pending);
    rt_store_give(c->store, &r);
}

/* ---- sending ---- */

bool rt_assign_send(struct rt_core *c, struct rt_request *r)
{
    uint32_t count = r->ids.count;
    uint32_t *words = rt_scratch(c, count + r->bias.count);
    if (words == NULL)
        return false;
    CHECK(r->worker != NULL && !r->unstored);
    CHECK(count == r->prompt_count + r->output_count);
    rt_chain_read(c->store, &r->ids, 0, count, words);
    struct msg *m = rt_send(c, &r->worker->peer, MSG_WORKER_ASSIGN, &r->id);
    struct msg_request *q = &m->u.request;
    *q = (struct msg_request){
        .session_key = r->session_key.bytes,
        .cache_salt = r->cache_salt.bytes,
        .effort = r->effort.bytes,
        .client_id = r->client_id.bytes,
        .spec = r->spec.bytes,
        .priority = r->priority,
        .prompt_count = r->prompt_count,
        .ids_count = count,
        .ids = words,
        .sampling = r->sampling,
        .limits = r->limits,
        .attempt = r->attempt,
    };
    q->limits.stop_ids = r->stop_ids;
    if (r->bias.count > 0) {
        uint32_t half = r->bias.count / 2;
        rt_chain_read(c->store, &r->bias, 0, r->bias.count, words + count);
        q->sampling.bias_ids = words + count;
        q->sampling.bias_values = (const float *)(const void *)(words + count + half);
    }
    r->assigned_us = c->now_us;
    return true;
}

/* Tokens that the gateway lacks, from the store, without logprobs. */
static bool deliver(struct rt_core *c, struct rt_request *r)
{
    while (r->delivered < r->output_count) {
        uint32_t count = r->output_count - r->delivered;
        if (count > MSG_EMIT_IDS_MAX)
            count = MSG_EMIT_IDS_MAX;
        uint32_t *words = rt_room(c) ? rt_scratch(c, count) : NULL;
        if (words == NULL)
            return false;
        rt_chain_read(c->store, &r->ids, r->prompt_count + r->delivered, count, words);
        struct msg *m = rt_send(c, &r->gateway->peer, MSG_TOKENS_EMITTED, &r->id);
        m->u.tokens = (struct msg_tokens){
            .seq = r->delivered, .count = count, .ids = words, .made_by = r->made_by};
        m->u.tokens.has_receipt = r->has_running;
        m->u.tokens.receipt = r->running;
        if (r->has_running)
            rt_request_receipt(r, &m->u.tokens.receipt);
        r->delivered += count;
        c->stats.tokens_out += count;
    }
    return true;
}

static bool finish_send(struct rt_core *c, struct rt_request *r)
{
    if (!rt_room(c))
        return false;
    struct msg *m = rt_send(c, &r->gateway->peer, MSG_TOKENS_EMITTED, &r->id);
    m->u.tokens = r->finish;
    m->u.tokens.seq = r->delivered;
    r->finish_sent = true;
    return true;
}

bool rt_request_work(struct rt_core *c, struct rt_request *r)
{
    CHECK(r->state != RT_FREE);
    if (r->send_cancel) {
        CHECK(r->worker != NULL);
        rt_send(c, &r->worker->peer, MSG_WORKER_CANCEL, &r->id);
        r->send_cancel = false;
    }
    if (r->send_assign) {
        if (!rt_assign_send(c, r))
            return false;
        r->send_assign = false;
    }
    bool silenced = (r->state == RT_CANCELLING && !r->again) ||
                    (r->state == RT_DONE && r->finish.finish == MSG_FINISH_CANCELLED);
    if (r->gateway != NULL && !silenced && !r->unstored && !deliver(c, r))
        return false;
    if (r->state == RT_DONE && r->gateway == NULL) {
        rt_request_release(c, r);
        return true;
    }
    if (r->state == RT_DONE && !r->finish_sent && !finish_send(c, r))
        return false;
    rt_link_remove(&r->pending);
    return true;
}

/* A worker had it before, here or under our predecessor: its client waits in the middle. */
static bool begun(const struct rt_request *r)
{
    return r->output_count > 0 || r->attempt > 0;
}

static void waiting_tick(struct rt_core *c, struct rt_request *r)
{
    if (r->deadline_us != 0 && c->now_us >= r->deadline_us) {
        rt_request_finish(c, r, MSG_FINISH_FAILED, ERR_TIMEOUT, NULL);
        return;
    }
    struct rt_need need = rt_request_need(r);
    enum rt_fit fit = rt_table_fit(c->table, &need);
    if (fit == RT_FIT_NEVER) {
        rt_request_finish(c, r, MSG_FINISH_FAILED, ERR_CONTEXT, NULL);
        return;
    }
    /* What has begun waits for `undrain` or a restart, however long that takes; the clock of a
     * worker that does not come back starts after it. */
    if (fit == RT_FIT_USABLE || (fit == RT_FIT_DRAINED && begun(r)))
        r->fit_us = c->now_us;
    uint64_t usable_us = r->fit_us > c->usable_us ? r->fit_us : c->usable_us;
    uint64_t fit_us = r->fit_us > r->queued_us ? r->fit_us : r->queued_us;
    uint64_t max_us = c->options.no_worker_us_max;
    if (c->now_us - usable_us <= max_us && c->now_us - fit_us <= max_us)
        return;
    enum err code = fit == RT_FIT_DRAINED ? ERR_DRAINING
                    : c->ever_usable      ? ERR_NO_WORKER
                                          : ERR_LOADING;
    rt_request_finish(c, r, MSG_FINISH_FAILED, code, NULL);
}

void rt_request_tick(struct rt_core *c, struct rt_request *r)
{
    switch (r->state) {
    case RT_WAITING:
        waiting_tick(c, r);
        break;
    case RT_RUNNING:
        if (!r->acked && !r->unstored && c->now_us - r->assigned_us > RT_ACK_US_MAX) {
            r->send_assign = true;
            rt_pend(c, r);
        }
        break;
    case RT_CANCELLING:
        if (c->now_us - r->cancel_us <= c->options.cancel_us_max)
            break;
        if (r->again)
            rt_request_requeue(c, r, true);
        else
            rt_request_finish(c, r, MSG_FINISH_CANCELLED, ERR_OK, NULL);
        break;
    case RT_DONE:
        if (r->gateway != NULL && r->finish_sent && c->now_us - r->done_us > RT_LINGER_US) {
            rt_request_release(c, r);
            return;
        }
        break;
    case RT_FREE:
        CHECK(false);
    }
    /* What came back unsent is tried again here. */
    bool lacks = r->delivered < r->output_count || (r->state == RT_DONE && !r->finish_sent);
    if (lacks && r->gateway != NULL && !r->gateway->lost)
        rt_pend(c, r);
}
