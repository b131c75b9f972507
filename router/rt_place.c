/* SPDX-License-Identifier: Apache-2.0 */
/* Workers: their state, canary, loss and drain, and which request goes where. */
#include "router/rt_core_state.h"

#include <string.h>

#include "lib/base/check.h"

/* Its requests go back to the queue with the tokens that we have; cancelled ones are over. */
static void worker_lose(struct rt_core *c, struct rt_worker *w)
{
    uint32_t count = w->request_count;
    for (uint32_t i = 0; i < count; i++) {
        CHECK(!rt_link_alone(&w->requests));
        struct rt_request *r = rt_link_item(w->requests.next, struct rt_request, place);
        CHECK(r->worker == w);
        if (r->state == RT_CANCELLING && !r->again)
            rt_request_finish(c, r, MSG_FINISH_CANCELLED, ERR_OK, NULL);
        else
            rt_request_requeue(c, r, true);
    }
    CHECK(rt_link_alone(&w->requests) && w->request_count == 0);
    rt_canary_reset(&w->canary, c->now_us);
    w->idle_reports = 0;
    rt_worker_progress(w, c->now_us);
    c->stats.workers_lost++;
}

/* The worker says again and again that it has nothing of ours: an assignment went astray. */
static void reconcile(struct rt_core *c, struct rt_worker *w)
{
    const struct msg_ledger *l = &w->info.ledger;
    if (w->request_count == 0 || l->accepted == 0 || l->live != 0) {
        w->idle_reports = 0;
        return;
    }
    w->idle_reports++;
    if (w->idle_reports < RT_IDLE_REPORTS)
        return;
    w->idle_reports = 0;
    uint32_t count = w->request_count;
    CHECK(count > 0 && !w->lost);
    struct rt_link *l_next = w->requests.next;
    for (uint32_t i = 0; i < count; i++) {
        struct rt_request *r = rt_link_item(l_next, struct rt_request, place);
        l_next = l_next->next;
        bool old = c->now_us - r->assigned_us > RT_IDLE_REPORTS * RT_BROADCAST_US;
        if (r->state != RT_RUNNING || !r->acked || !old)
            continue;
        rt_trace(c, RT_TRACE_WARN, "worker does not know its request", &w->peer, &r->id, 0);
        rt_request_requeue(c, r, true);
    }
}

static bool canary_differs(const struct msg_worker_info *a, const struct msg_worker_info *b)
{
    return a->canary_hash != b->canary_hash || a->canary_count != b->canary_count ||
           a->canary_output_count != b->canary_output_count;
}

/* Between two reports of one incarnation: was anything computed, and how much of prompts?  What the
 * worker's loop can do alone (take, cancel) is no progress: the device may hang behind it. */
static void reported(struct rt_core *c, struct rt_worker *w, const struct msg_worker_info *now)
{
    const struct msg_worker_info *was = &w->info;
    CHECK(was->incarnation == now->incarnation);
    bool dropped =
        now->ledger.cancelled != was->ledger.cancelled || now->ledger.failed != was->ledger.failed;
    uint64_t computed = 0;
    if (!dropped && now->tokens_queued < was->tokens_queued)
        computed = was->tokens_queued - now->tokens_queued;
    rt_rate_done(&c->rate, computed);
    rt_worker_prompt_counted(w, computed);
    if (computed > 0 || now->step_us_last != was->step_us_last ||
        now->decode_tokens_per_s != was->decode_tokens_per_s ||
        now->prefill_tokens_per_s != was->prefill_tokens_per_s ||
        now->ledger.finished != was->ledger.finished)
        rt_worker_progress(w, c->now_us);
}

static void drain_send(struct rt_core *c, struct rt_worker *w)
{
    struct msg *d = rt_send(c, &w->peer, MSG_WORKER_DRAIN, &(struct msg_id){{0}});
    CHECK(w->drain);
    d->u.drain.deadline_unix_us = w->drain_deadline_unix_us;
    w->drain_told = true;
    w->drain_sent_us = c->now_us;
}

/* Next turns follow at once or not soon: one that stands still has none to wait for. */
static void drain_tick(struct rt_core *c, struct rt_worker *w)
{
    if (!w->drain || w->drain_told)
        return;
    if (w->request_count > 0)
        w->idle_since_us = 0;
    else if (w->idle_since_us == 0)
        w->idle_since_us = c->now_us;
    bool idle = w->idle_since_us != 0 && c->now_us - w->idle_since_us >= RT_DRAIN_IDLE_US;
    if (idle || c->now_us >= w->resident_until_us)
        drain_send(c, w);
}

void rt_on_worker_state(struct rt_core *c, const struct rt_peer *peer, const struct msg *m)
{
    const struct msg_worker_info *info = &m->u.worker;
    CHECK(m->type == MSG_WORKER_STATE);
    struct rt_worker *w = rt_table_worker(c->table, peer);
    if (w == NULL) {
        w = rt_table_worker_add(c->table, peer, c->now_us);
        if (w == NULL) {
            rt_trace(c, RT_TRACE_WARN, "too many workers", peer, NULL, info->worker_id);
            return;
        }
        rt_trace(c, RT_TRACE_INFO, "worker up", peer, NULL, info->worker_id);
        /* Before any assignment: a worker of our predecessor drops what it still has. */
        rt_state_send(c, peer);
    } else if (w->info.incarnation != info->incarnation) {
        rt_trace(c, RT_TRACE_INFO, "worker restarted", peer, NULL, w->request_count);
        worker_lose(c, w);
        w->drain = w->drain_told = false;
        w->busy_until_us = 0;
        rt_state_send(c, peer);
    } else if (w->lost) {
        rt_trace(c, RT_TRACE_INFO, "worker heard again", peer, NULL,
                 (c->now_us - w->heard_us) / 1000);
        rt_state_send(c, peer);
    }
    if (w->info.incarnation == info->incarnation && w->info.state != info->state)
        rt_trace(c, RT_TRACE_INFO, "worker state", peer, NULL, info->state);
    if (w->info.incarnation == info->incarnation)
        reported(c, w, info);
    if (canary_differs(&w->info, info) || w->info.state != info->state)
        rt_canary_reset(&w->canary, c->now_us);
    w->lost = false;
    w->heard_us = c->now_us;
    rt_worker_info_set(w, info);
    reconcile(c, w);
    if (w->drain_told && info->state == MSG_WORKER_READY &&
        c->now_us - w->drain_sent_us > 2 * RT_BROADCAST_US)
        drain_send(c, w);
}

void rt_on_drain(struct rt_core *c, const struct msg *m)
{
    uint64_t worker_id;
    memcpy(&worker_id, m->id.bytes, sizeof(worker_id));
    struct rt_worker *w = rt_table_worker_by_id(c->table, worker_id);
    if (w == NULL) {
        rt_trace(c, RT_TRACE_WARN, "drain or resume of an unknown worker", NULL, NULL, worker_id);
        return;
    }
    bool drain = m->type == MSG_WORKER_DRAIN;
    CHECK(drain || m->type == MSG_WORKER_RESUME);
    rt_trace(c, RT_TRACE_INFO, drain ? "worker drain" : "worker resume", &w->peer, NULL, worker_id);
    w->drain = drain;
    w->drain_told = false;
    w->idle_since_us = 0;
    if (!drain) {
        rt_send(c, &w->peer, MSG_WORKER_RESUME, &m->id);
        return;
    }
    uint64_t deadline_us = m->u.drain.deadline_unix_us;
    w->drain_deadline_unix_us = deadline_us;
    w->resident_until_us =
        c->now_us + (deadline_us > c->unix_us ? (deadline_us - c->unix_us) / 2 : 0);
    drain_tick(c, w);
}

static void canary_send(struct rt_core *c, struct rt_worker *w)
{
    struct msg_id id;
    CHECK(!w->lost && !w->canary.active && w->info.state == MSG_WORKER_READY);
    for (uint32_t i = 0; i < sizeof(id.bytes); i += 8) {
        uint64_t word = rng_u64(&c->rng);
        memcpy(id.bytes + i, &word, sizeof(word));
    }
    struct msg *m = rt_send(c, &w->peer, MSG_WORKER_ASSIGN, &id);
    rt_canary_request(&w->info, &m->u.request);
    rt_canary_asked(&w->canary, &id, c->now_us);
    c->stats.canaries++;
}

static void canary_tick(struct rt_core *c, struct rt_worker *w)
{
    struct rt_canary_times t = {
        .period_us = c->options.canary_us,
        .silence_us_max = c->options.canary_silence_us_max,
        .silence_busy_us_max = 5 * c->options.canary_silence_us_max,
    };
    struct msg_id id = w->canary.id;
    if (rt_canary_expire(&w->canary, &t, c->now_us, w->request_count > 0)) {
        rt_send(c, &w->peer, MSG_WORKER_CANCEL, &id);
        rt_trace(c, RT_TRACE_WARN, "canary not answered", &w->peer, NULL,
                 (c->now_us - w->canary.sent_us) / 1000);
        c->stats.canaries_failed++;
    }
    bool doubt =
        w->canary.verdict != RT_CANARY_RIGHT || c->now_us - w->progress_us >= c->options.canary_us;
    bool wanted = w->request_count == 0 || (doubt && rt_worker_taken(w) < w->info.seqs_max);
    if (wanted && w->info.state == MSG_WORKER_READY && w->info.canary_count > 0 &&
        rt_canary_due(&w->canary, c->now_us))
        canary_send(c, w);
}

/* The gap between two tokens is what a user sees of a hang, whoever causes it. */
static void stall_tick(struct rt_core *c, struct rt_worker *w)
{
    uint64_t still_us = c->now_us - w->progress_us;
    CHECK(w->progress_us <= c->now_us);
    if (w->stalled || w->request_count == 0 || still_us <= c->options.progress_us_max)
        return;
    w->stalled = true;
    rt_trace(c, RT_TRACE_WARN, "worker makes no progress", &w->peer, NULL, still_us / 1000);
}

/* What a hanging worker holds goes to others that can take it, with the tokens that we have.  If it
 * wakes, what it says of them is a stray and is answered with a cancel. */
static void stalled_move(struct rt_core *c, struct rt_worker *w)
{
    uint32_t count = w->request_count;
    struct rt_link *next = w->requests.next;
    for (uint32_t i = 0; i < count; i++) {
        struct rt_request *r = rt_link_item(next, struct rt_request, place);
        next = next->next;
        struct rt_need need = rt_request_need(r);
        CHECK(r->worker == w);
        if (r->state != RT_RUNNING || r->unstored || rt_table_fit(c->table, &need) != RT_FIT_USABLE)
            continue;
        rt_trace(c, RT_TRACE_INFO, "moved away from a standstill", &w->peer, &r->id,
                 r->output_count);
        rt_request_requeue(c, r, true);
    }
}

void rt_workers_tick(struct rt_core *c)
{
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        struct rt_worker *w = rt_table_worker_at(c->table, i);
        if (w == NULL)
            continue;
        uint64_t silent_us = c->now_us - w->heard_us;
        if (!w->lost && silent_us > c->options.worker_silence_us_max) {
            rt_trace(c, RT_TRACE_WARN, "worker lost", &w->peer, NULL, silent_us / 1000);
            worker_lose(c, w);
            w->lost = true;
        }
        if (w->lost && silent_us > RT_FORGET_US) {
            rt_table_worker_remove(c->table, w);
            continue;
        }
        if (!w->lost) {
            drain_tick(c, w);
            stall_tick(c, w);
            if (w->stalled)
                stalled_move(c, w);
            canary_tick(c, w);
        }
        if (!rt_worker_usable(w))
            continue;
        w->context_max = w->info.context_max;
        c->ever_usable = true;
        c->usable_us = c->now_us;
    }
    uint32_t context_max = rt_table_context_max(c->table);
    if (context_max != 0)
        c->context_max = context_max;
}

void rt_on_unsent_assign(struct rt_core *c, const struct rt_peer *peer, const struct msg_id *id)
{
    struct rt_worker *w = rt_table_worker(c->table, peer);
    if (w == NULL)
        return;
    if (w->canary.active && rt_canary_is(&w->canary, id)) {
        struct rt_canary_times t = {.period_us = c->options.canary_us};
        rt_canary_refused(&w->canary, &t, c->now_us);
        return;
    }
    struct rt_request *r = rt_store_find(c->store, id);
    if (r == NULL || r->worker != w || r->acked || r->state != RT_RUNNING)
        return;
    w->busy_until_us = c->now_us + RT_REFUSED_US;
    rt_request_requeue(c, r, false);
}

struct choice {
    struct rt_core *core;
    struct rt_worker *worker;
    enum rt_affinity why;
};

static bool may_go(void *arg, struct rt_request *r)
{
    struct choice *ch = arg;
    ch->worker = rt_affinity_choose(ch->core, r, &ch->why);
    return ch->worker != NULL;
}

void rt_place(struct rt_core *c)
{
    struct choice ch = {.core = c};
    while (rt_queue_count(c->queue) > 0) {
        if (!rt_room(c)) {
            c->actions->more = true;
            return;
        }
        /* One that waits for a larger worker, for its own group or for its session map holds up
         * nobody whom a free one could take. */
        uint32_t context_max = rt_table_context_free(c->table, c->now_us);
        if (context_max == 0)
            return;
        struct rt_request *r = rt_queue_first(c->queue, context_max - 1, may_go, &ch);
        if (r == NULL)
            return;
        struct rt_worker *w = ch.worker;
        CHECK(w != NULL);
        CHECK(r->state == RT_WAITING && !r->unstored && r->gateway != NULL);
        rt_queue_serve(c->queue, r);
        r->queue_us += c->now_us - r->queued_us;
        r->state = RT_RUNNING;
        r->acked = false;
        bool first = r->assigned_us == 0;
        /* Idle and not asked for longer than the period: that was no standstill. */
        if (w->request_count == 0 && !w->canary.active &&
            c->now_us - w->progress_us > c->options.canary_us)
            w->progress_us = c->now_us - c->options.canary_us;
        rt_worker_join(w, r);
        if (!rt_assign_send(c, r)) { /* no room for its ids in this step */
            rt_worker_leave(r);
            r->state = RT_WAITING;
            r->queued_us = c->now_us;
            rt_queue_push_front(c->queue, r);
            c->actions->more = true;
            return;
        }
        if (first)
            rt_observe(c, RT_OBSERVE_QUEUE_US, (double)r->queue_us);
        r->attempt++;
        CHECK(w->request_count <= w->info.seqs_max && rt_worker_open(w, c->now_us));
        rt_affinity_placed(c, r, w);
        c->stats.affinity[ch.why]++;
        c->stats.assigned++;
        if (r->resumed > 0)
            c->stats.resumed++;
        rt_trace(c, RT_TRACE_DEBUG, "assigned", &w->peer, &r->id, r->ids.count);
    }
}
