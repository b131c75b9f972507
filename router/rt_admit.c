/* SPDX-License-Identifier: Apache-2.0 */
/* Gateways: submissions, cancels, announcements and silence. */
#include "router/rt_core_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"

static struct rt_gateway *gateway_touch(struct rt_core *c, const struct rt_peer *peer)
{
    struct rt_gateway *g = rt_table_gateway(c->table, peer);
    if (g == NULL) {
        g = rt_table_gateway_add(c->table, peer, c->now_us);
        if (g == NULL) {
            rt_trace(c, RT_TRACE_WARN, "too many gateways", peer, NULL, 0);
            return NULL;
        }
        rt_trace(c, RT_TRACE_INFO, "gateway up", peer, NULL, 0);
        rt_state_send(c, peer);
    }
    if (g->lost)
        rt_trace(c, RT_TRACE_INFO, "gateway heard again", peer, NULL,
                 (c->now_us - g->heard_us) / 1000);
    g->lost = false;
    g->heard_us = c->now_us;
    return g;
}

static uint32_t running(struct rt_core *c)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        const struct rt_worker *w = rt_table_worker_at(c->table, i);
        count += w != NULL ? w->request_count : 0;
    }
    return count;
}

#define REFUSE(code, ...) (snprintf(c->text, sizeof(c->text), __VA_ARGS__), (code))

/* It was admitted before, by this router or its predecessor. */
static bool comes_back(const struct msg_request *q)
{
    return q->ids_count > q->prompt_count || q->attempt > 0;
}

static enum err readiness_check(struct rt_core *c, const struct msg_request *q)
{
    bool early = !c->ever_usable && c->now_us - c->start_us <= RT_START_GRACE_US;
    bool recent = c->ever_usable && c->now_us - c->usable_us <= c->options.no_worker_us_max;
    if (early || recent)
        return ERR_OK;
    struct rt_need need = {.tokens = q->ids_count};
    if (rt_table_fit(c->table, &need) == RT_FIT_DRAINED)
        return comes_back(q) ? ERR_OK : REFUSE(ERR_DRAINING, "the worker is drained");
    return c->ever_usable ? REFUSE(ERR_NO_WORKER, "no worker is ready")
                          : REFUSE(ERR_LOADING, "no worker has been ready yet");
}

/* Token memory that must be free for it; a stream that comes back may take the last of it. */
static uint64_t store_words(const struct rt_core *c, const struct msg_request *q)
{
    uint64_t words = q->ids_count + 2ull * q->sampling.bias_count + 2ull * RT_PAGE_TOKENS;
    uint64_t reserve = c->options.store_tokens_max / 32; /* for output of what is live */
    return words + (comes_back(q) ? 0 : reserve);
}

/* Prompt tokens of all choices as the gateway says, but never fewer than the first one has. */
static uint64_t group_tokens(const struct msg_request *q)
{
    uint64_t most = (uint64_t)MSG_IDS_MAX * q->group_count;
    uint64_t said = q->group_tokens < most ? q->group_tokens : most;
    return said > q->ids_count ? said : q->ids_count;
}

static uint64_t group_words(const struct rt_core *c, const struct msg_request *q)
{
    uint64_t each = 2ull * q->sampling.bias_count + 2ull * RT_PAGE_TOKENS;
    return group_tokens(q) + q->group_count * each + c->options.store_tokens_max / 32;
}

static enum err size_check(struct rt_core *c, const struct msg_request *q)
{
    if (c->context_max != 0 && (uint64_t)q->prompt_count + 1 > c->context_max)
        return REFUSE(ERR_CONTEXT, "prompt has %u tokens, with one of output at most %u fit",
                      q->prompt_count, c->context_max);
    /* What could never wait here is refused for good: to come back later would not help it. */
    if (!comes_back(q) && q->ids_count > c->options.queue_tokens_max)
        return REFUSE(ERR_TOO_LARGE,
                      "prompt has %u tokens, at most %llu may wait (queue_tokens_max)",
                      q->prompt_count, (unsigned long long)c->options.queue_tokens_max);
    if (store_words(c, q) > c->options.store_tokens_max)
        return REFUSE(ERR_TOO_LARGE,
                      "prompt has %u tokens, the router keeps at most %llu (store_tokens_max)",
                      q->prompt_count, (unsigned long long)c->options.store_tokens_max);
    return ERR_OK;
}

/* Prompt tokens of those choices of a group that would wait with `free` sequences to go to. */
static uint64_t group_waiting(const struct msg_request *q, uint64_t free, uint64_t *ret_choices)
{
    *ret_choices = q->group_count > free ? q->group_count - free : 0;
    return (uint64_t)((double)group_tokens(q) / q->group_count * (double)*ret_choices);
}

/* A request of several choices is admitted as a whole or not at all, so that no choice holds a
 * place while another is refused.  One that would not fit an idle cluster never will. */
static enum err group_size_check(struct rt_core *c, const struct msg_request *q)
{
    uint64_t free = 0, choices = 0;
    uint64_t seqs = rt_table_seqs(c->table, &free);
    if (seqs == 0) /* no worker has said what it holds */
        return ERR_OK;
    uint64_t tokens = group_waiting(q, seqs, &choices);
    if (q->group_count > c->options.requests_max)
        return REFUSE(ERR_TOO_LARGE, "%u choices, the router holds at most %u (requests_max)",
                      q->group_count, c->options.requests_max);
    if (choices > c->options.queue_requests_max)
        return REFUSE(ERR_TOO_LARGE,
                      "%u choices: %llu run at once and at most %u may wait (queue_requests_max)",
                      q->group_count, (unsigned long long)seqs, c->options.queue_requests_max);
    if (tokens > c->options.queue_tokens_max)
        return REFUSE(ERR_TOO_LARGE,
                      "%u choices have %llu prompt tokens, at most %llu may wait "
                      "(queue_tokens_max)",
                      q->group_count, (unsigned long long)group_tokens(q),
                      (unsigned long long)c->options.queue_tokens_max);
    if (group_words(c, q) > c->options.store_tokens_max)
        return REFUSE(ERR_TOO_LARGE,
                      "%u choices have %llu prompt tokens, the router keeps at most %llu "
                      "(store_tokens_max)",
                      q->group_count, (unsigned long long)group_tokens(q),
                      (unsigned long long)c->options.store_tokens_max);
    return ERR_OK;
}

static enum err group_room_check(struct rt_core *c, const struct msg_request *q)
{
    uint64_t free = 0, choices = 0;
    uint32_t waiting = rt_queue_count(c->queue);
    uint64_t seqs = rt_table_seqs(c->table, &free);
    if (rt_store_free_tokens(c->store) < group_words(c, q))
        return REFUSE(ERR_BUSY, "token memory is full");
    if (c->options.requests_max - rt_store_count(c->store) < q->group_count)
        return REFUSE(ERR_BUSY, "%u requests are live", rt_store_count(c->store));
    /* Idle: what may be can be, whether or not a canary takes a sequence just now. */
    if (c->ledger.live == 0 && seqs > 0)
        free = seqs;
    uint64_t tokens = group_waiting(q, waiting == 0 ? free : 0, &choices);
    if (waiting + choices > c->options.queue_requests_max)
        return REFUSE(ERR_BUSY, "queue is full: %u requests wait", waiting);
    if (rt_queue_tokens(c->queue) + tokens > c->options.queue_tokens_max)
        return REFUSE(ERR_BUSY, "queue is full: %llu prompt tokens wait",
                      (unsigned long long)rt_queue_tokens(c->queue));
    return ERR_OK;
}

/* Streams that come back with tokens were admitted once and are only bounded by memory. */
static enum err room_check(struct rt_core *c, const struct msg_request *q)
{
    struct rt_need need = {.tokens = q->ids_count};
    if (rt_store_free_tokens(c->store) < store_words(c, q))
        return REFUSE(ERR_BUSY, "token memory is full");
    if (comes_back(q) ||
        (rt_queue_count(c->queue) == 0 && rt_table_pick(c->table, &need, c->now_us) != NULL))
        return ERR_OK;
    if (rt_queue_count(c->queue) >= c->options.queue_requests_max)
        return REFUSE(ERR_BUSY, "queue is full: %u requests wait", rt_queue_count(c->queue));
    if (rt_queue_tokens(c->queue) + q->ids_count > c->options.queue_tokens_max)
        return REFUSE(ERR_BUSY, "queue is full: %llu prompt tokens wait",
                      (unsigned long long)rt_queue_tokens(c->queue));
    return ERR_OK;
}

/* Tokens that running requests still need: prompts not yet computed, and outputs as long as those
 * of others were. */
static uint64_t running_tokens(struct rt_core *c)
{
    uint64_t tokens = 0;
    uint32_t mean = (uint32_t)c->rate.output_mean;
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        struct rt_worker *w = rt_table_worker_at(c->table, i);
        if (w == NULL || w->lost)
            continue;
        tokens += rt_worker_prompt_left(w);
        for (struct rt_link *l = w->requests.next; l != &w->requests; l = l->next) {
            const struct rt_request *r = rt_link_item(l, struct rt_request, place);
            CHECK(r->worker == w);
            uint32_t most = r->limits.output_tokens_max;
            uint32_t wanted = most < mean ? most : mean;
            tokens += wanted > r->output_count ? wanted - r->output_count : 0;
        }
    }
    return tokens;
}

static void reply(struct rt_core *c, const struct rt_peer *peer, const struct msg_id *id,
                  enum err code)
{
    struct msg *m = rt_send(c, peer, MSG_SUBMIT_REPLY, id);
    struct msg_submit_reply *s = &m->u.submit_reply;
    s->code = code;
    s->text = code == ERR_OK ? "" : c->text;
    if (code == ERR_OK)
        s->concurrency = running(c) + 1;
    if (err_retryable(code))
        s->retry_after_ms =
            rt_rate_retry_ms(&c->rate, rt_queue_tokens(c->queue) + running_tokens(c),
                             rt_queue_count(c->queue), &c->rng);
    if (code == ERR_BUSY)
        c->stats.refused_busy++;
    else if (code == ERR_CONTEXT)
        c->stats.refused_context++;
    else if (code != ERR_OK)
        c->stats.refused_other++;
}

/* Requests that only linger make room for new ones. */
static struct rt_request *slot_take(struct rt_core *c, const struct msg_id *id)
{
    struct rt_request *r = rt_store_take(c->store, id);
    for (struct rt_link *l = c->done.next; r == NULL && l != &c->done; l = l->next) {
        struct rt_request *old = rt_link_item(l, struct rt_request, done);
        if (!old->finish_sent && old->gateway != NULL && !old->gateway->lost)
            continue;
        rt_request_release(c, old);
        return rt_store_take(c->store, id);
    }
    return r;
}

/* A predecessor of ours had it begun; what the gateway was told then still holds. */
static void begun_by(struct rt_request *r, const struct msg_request *q)
{
    static const struct hash128 none;
    if (r->begun || memcmp(&q->made_by, &none, sizeof none) == 0)
        return;
    r->begun = true;
    r->made_by = q->made_by;
}

/* False: no room for its tokens. */
static bool request_fill(struct rt_core *c, struct rt_request *r, const struct msg_request *q)
{
    CHECK(q->prompt_count > 0 && q->ids_count >= q->prompt_count);
    rt_text_set(&r->session_key, q->session_key);
    rt_text_set(&r->cache_salt, q->cache_salt);
    rt_text_set(&r->effort, q->effort);
    rt_text_set(&r->client_id, q->client_id);
    rt_text_set(&r->spec, q->spec);
    r->priority = q->priority;
    r->sampling = q->sampling;
    r->sampling.bias_ids = NULL;
    r->sampling.bias_values = NULL;
    r->limits = q->limits;
    r->limits.stop_ids = NULL;
    CHECK(q->limits.stop_id_count <= MSG_STOP_IDS_MAX);
    if (q->limits.stop_id_count > 0)
        memcpy(r->stop_ids, q->limits.stop_ids, q->limits.stop_id_count * sizeof(r->stop_ids[0]));
    r->prompt_count = q->prompt_count;
    r->output_count = q->ids_count - q->prompt_count;
    r->delivered = r->output_count;
    r->lost_at = r->output_count;
    r->first_token = r->output_count > 0;
    begun_by(r, q);
    rt_affinity_name(r, q->ids);
    bool stored = rt_chain_append(c->store, &r->ids, q->ids, q->ids_count);
    if (stored && q->sampling.bias_count > 0) {
        STATIC_CHECK(sizeof(float) == sizeof(uint32_t));
        stored =
            rt_chain_append(c->store, &r->bias, q->sampling.bias_ids, q->sampling.bias_count) &&
            rt_chain_append(c->store, &r->bias,
                            (const uint32_t *)(const void *)q->sampling.bias_values,
                            q->sampling.bias_count);
    }
    if (!stored)
        return false;
    r->order = c->order_next++;
    r->accepted_us = c->now_us;
    r->submitted_us = c->now_us;
    r->queued_us = c->now_us;
    r->named_serial = c->announce_serial;
    if (q->limits.deadline_unix_us > c->unix_us)
        r->deadline_us = c->now_us + (q->limits.deadline_unix_us - c->unix_us);
    return true;
}

/* Before the gateway knows of more tokens than we do, they are final all the same. */
static void catch_up(struct rt_core *c, struct rt_request *r, const struct msg_request *q)
{
    uint32_t theirs = q->ids_count - q->prompt_count;
    if (theirs <= r->output_count || r->state == RT_DONE || r->unstored)
        return;
    bool waiting = r->state == RT_WAITING;
    begun_by(r, q);
    if (waiting) {
        rt_queue_remove(c->queue, r);
        r->queue_us += c->now_us - r->queued_us;
        r->queued_us = c->now_us;
    }
    if (rt_chain_append(c->store, &r->ids, q->ids + q->prompt_count + r->output_count,
                        theirs - r->output_count))
        r->output_count = theirs;
    if (waiting)
        rt_queue_push_front(c->queue, r);
}

static void resubmit(struct rt_core *c, struct rt_gateway *g, struct rt_request *r,
                     const struct msg_request *q)
{
    c->stats.resubmits++;
    CHECK(r->state != RT_FREE);
    if (r->prompt_count != q->prompt_count) {
        reply(
            c, &g->peer, &r->id,
            REFUSE(ERR_INVALID, "request id is in use for a prompt of %u tokens", r->prompt_count));
        return;
    }
    rt_gateway_leave(r);
    rt_gateway_join(g, r);
    r->submitted_us = c->now_us;
    r->named_serial = c->announce_serial;
    catch_up(c, r, q);
    uint32_t theirs = q->ids_count - q->prompt_count;
    if (!r->unstored)
        r->delivered = theirs < r->output_count ? theirs : r->output_count;
    r->finish_sent = false;
    if (r->state == RT_CANCELLING)
        r->again = true;
    if (r->state == RT_DONE) /* linger anew */
        r->done_us = c->now_us;
    reply(c, &g->peer, &r->id, ERR_OK);
    rt_pend(c, r);
}

static enum err admit_check(struct rt_core *c, const struct msg_request *q)
{
    TRY(size_check(c, q));
    if (c->draining && !comes_back(q))
        return REFUSE(ERR_DRAINING, "the router is draining");
    TRY(readiness_check(c, q));
    if (q->limits.deadline_unix_us != 0 && q->limits.deadline_unix_us <= c->unix_us)
        return REFUSE(ERR_TIMEOUT, "deadline has passed already");
    return ERR_OK;
}

/* The choices of one request come one after the other; the first decides for all. */
static enum err group_check(struct rt_core *c, struct rt_gateway *g, const struct msg_request *q)
{
    if (q->group_index > 0 && g->group_left > 0) {
        g->group_left--;
        if (g->group_code != ERR_OK)
            return REFUSE((enum err)g->group_code, "another choice of the request was refused");
        TRY(admit_check(c, q));
        return rt_store_free_tokens(c->store) < store_words(c, q)
                   ? REFUSE(ERR_BUSY, "token memory is full")
                   : ERR_OK;
    }
    bool first = q->group_index == 0 && q->group_count > 1 && !comes_back(q);
    enum err e = admit_check(c, q);
    if (e == ERR_OK && first)
        e = group_size_check(c, q);
    if (e == ERR_OK)
        e = first ? group_room_check(c, q) : room_check(c, q);
    g->group_left = first ? q->group_count - 1 : 0;
    g->group_code = e;
    return e;
}

void rt_on_submit(struct rt_core *c, const struct rt_peer *peer, const struct msg *m)
{
    const struct msg_request *q = &m->u.request;
    CHECK(m->type == MSG_ROUTER_SUBMIT);
    c->stats.submits++;
    struct rt_gateway *g = gateway_touch(c, peer);
    if (g == NULL) {
        reply(c, peer, &m->id, REFUSE(ERR_BUSY, "too many gateways"));
        return;
    }
    struct rt_request *r = rt_store_find(c->store, &m->id);
    if (r != NULL && r->state == RT_DONE && r->finish.finish == MSG_FINISH_CANCELLED) {
        rt_request_release(c, r); /* ended before the gateway came back: begin anew */
        r = NULL;
    }
    if (r != NULL) {
        resubmit(c, g, r, q);
        return;
    }
    enum err e = group_check(c, g, q);
    if (e == ERR_OK && (r = slot_take(c, &m->id)) == NULL)
        e = REFUSE(ERR_BUSY, "%u requests are live", rt_store_count(c->store));
    if (e == ERR_OK && !request_fill(c, r, q)) {
        rt_store_give(c->store, &r);
        e = REFUSE(ERR_BUSY, "token memory is full");
        g->group_code = e;
    }
    reply(c, peer, &m->id, e);
    if (e != ERR_OK)
        return;
    CHECK(r->output_count <= r->ids.count && r->delivered == r->output_count);
    rt_gateway_join(g, r);
    c->ledger.accepted++;
    c->ledger.live++;
    if (rt_request_full(c, r))
        rt_request_finish(c, r, MSG_FINISH_LENGTH, ERR_OK, NULL);
    else if (r->output_count > 0)
        rt_queue_push_front(c->queue, r);
    else
        rt_queue_push(c->queue, r);
}

void rt_on_cancel(struct rt_core *c, const struct rt_peer *peer, const struct msg *m)
{
    struct rt_request *r = rt_store_find(c->store, &m->id);
    /* A gateway that has handed the request over may not end it. */
    if (r != NULL && r->gateway != NULL && rt_peer_equal(&r->gateway->peer, peer))
        rt_request_cancel(c, r);
}

/* One that the gateway follows no more.  A finished one needs no delivery either. */
static void request_forget(struct rt_core *c, struct rt_request *r)
{
    if (r->state != RT_DONE)
        rt_request_cancel(c, r);
    rt_gateway_leave(r);
    rt_pend(c, r);
}

static void requests_forget(struct rt_core *c, struct rt_gateway *g, uint64_t serial,
                            uint64_t age_us_min)
{
    uint32_t count = g->request_count, forgotten = 0;
    struct rt_link *next = g->requests.next;
    for (uint32_t i = 0; i < count; i++) {
        struct rt_request *r = rt_link_item(next, struct rt_request, of_gateway);
        next = next->next;
        if (r->named_serial == serial || c->now_us - r->submitted_us < age_us_min)
            continue;
        forgotten += r->state != RT_DONE;
        request_forget(c, r);
    }
    if (forgotten > 0)
        rt_trace(c, RT_TRACE_INFO, "requests nobody follows", &g->peer, NULL, forgotten);
}

void rt_on_announce(struct rt_core *c, const struct rt_peer *peer, const struct msg *m)
{
    const struct msg_announce *a = &m->u.announce;
    CHECK(m->type == MSG_ROUTER_ANNOUNCE);
    if (strcmp(a->kind, "gateway") != 0) {
        c->stats.unexpected++;
        return;
    }
    struct rt_gateway *g = gateway_touch(c, peer);
    if (g == NULL)
        return;
    bool restarted = g->incarnation != 0 && g->incarnation != a->incarnation;
    if (restarted)
        rt_trace(c, RT_TRACE_INFO, "gateway restarted", peer, NULL, g->request_count);
    g->incarnation = a->incarnation;
    g->id = a->id;
    uint64_t serial = ++c->announce_serial;
    for (uint32_t i = 0; i < a->live_count; i++) {
        struct rt_request *r = rt_store_find(c->store, &a->live_ids[i]);
        if (r != NULL && r->gateway == g)
            r->named_serial = serial;
    }
    /* The new incarnation names what it has submitted itself; the rest is its predecessor's. */
    requests_forget(c, g, serial, restarted ? 0 : RT_NAMED_US);
}

/* The silent gateway may only sleep: the end of its requests is sent to it all the same, so that
 * nothing hangs there when it wakes. */
static void gateway_cancel(struct rt_core *c, struct rt_gateway *g)
{
    for (struct rt_link *l = g->requests.next; l != &g->requests; l = l->next) {
        struct rt_request *r = rt_link_item(l, struct rt_request, of_gateway);
        CHECK(r->gateway == g);
        rt_request_cancel(c, r);
    }
}

void rt_gateways_tick(struct rt_core *c)
{
    for (uint32_t i = 0; i < rt_table_gateways_max(c->table); i++) {
        struct rt_gateway *g = rt_table_gateway_at(c->table, i);
        if (g == NULL)
            continue;
        uint64_t silent_us = c->now_us - g->heard_us;
        if (!g->lost && silent_us > c->options.gateway_silence_us_max) {
            rt_trace(c, RT_TRACE_WARN, "gateway lost", &g->peer, NULL, silent_us / 1000);
            g->lost = true;
            c->stats.gateways_lost++;
            gateway_cancel(c, g);
        }
        if (!g->lost || silent_us <= RT_FORGET_US)
            continue;
        requests_forget(c, g, UINT64_MAX, 0); /* ends that could not be sent to it */
        CHECK(g->request_count == 0);
        rt_table_gateway_remove(c->table, g);
    }
}
