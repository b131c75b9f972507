/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_core.h"

#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "worker/wk_core_state.h"

#define ACTIONS_PER_SEQ 8u
#define ACTIONS_EXTRA   64u
#define RING_BYTES      (4u << 20)
#define RATE_UNKNOWN    0.0

/* ---- life ---- */

uint32_t wk_core_entries(const struct wk_core_options *options)
{
    CHECK(options != NULL && options->seqs_max > 0);
    return options->seqs_max + WK_PREFILL_SEQS_MAX;
}

uint32_t wk_core_plan_seqs(const struct wk_core_options *options)
{
    uint32_t decode =
        options->seqs_max < options->decode_rows_max ? options->seqs_max : options->decode_rows_max;
    return decode > WK_PREFILL_SEQS_MAX ? decode : WK_PREFILL_SEQS_MAX;
}

uint32_t wk_core_actions_max(const struct wk_core_options *options)
{
    return wk_core_entries(options) * ACTIONS_PER_SEQ + ACTIONS_EXTRA;
}

static void arrays_take(struct wk_core *core)
{
    const struct wk_core_options *o = &core->options;
    uint32_t blocks_max = wk_blocks_for(&o->shape, o->context_max) + 1;
    core->seqs = mem_take_array(core->entry_count, sizeof *core->seqs);
    core->order = mem_take_array(core->entry_count, sizeof *core->order);
    core->chosen = mem_take_array(core->entry_count, sizeof *core->chosen);
    core->flight.entries = mem_take_array(core->entry_count, sizeof *core->flight.entries);
    core->block_ids =
        mem_take_array((size_t)core->entry_count * blocks_max, sizeof *core->block_ids);
    for (uint32_t i = 0; i < core->entry_count; i++) {
        core->seqs[i].magic = WK_SEQ_MAGIC;
        wk_blocks_init(&core->seqs[i].kv, core->block_ids + (size_t)i * blocks_max, blocks_max);
    }
    core->ids = wk_ids_create(o->ids_max, core->entry_count, o->context_max);
    uint32_t rows = o->slice_rows_max > o->decode_rows_max ? o->slice_rows_max : o->decode_rows_max;
    core->plan = wk_plan_create(wk_core_plan_seqs(o), rows, rows + 4 * core->entry_count);
    core->ring = wk_plan_ring_create(RING_BYTES);
}

static void shape_set(struct wk_core *core, const struct wk_arena_shape *shape)
{
    CHECK(shape->block_tokens > 0 && shape->block_count > 0 && shape->slot_count > 0);
    CHECK(shape->block_tokens == core->options.shape.block_tokens);
    core->shape = *shape;
    uint64_t pool = (uint64_t)shape->block_count * shape->block_tokens;
    core->context_max =
        pool < core->options.context_max ? (uint32_t)pool : core->options.context_max;
    core->kv_blocks_free = shape->block_count;
}

struct wk_core *wk_core_create(const struct wk_core_options *options)
{
    CHECK(options != NULL && options->has_token != NULL);
    CHECK(options->seqs_max > 0 && options->slice_rows_max > 0 && options->decode_rows_max > 0);
    CHECK(options->vocab_size > 0 && options->layer_count > 0 && options->context_max > 1);
    CHECK(options->stop_id_count <= ARRAY_COUNT(((struct wk_core *)0)->stop_ids));
    struct wk_core *core = mem_take(sizeof *core);
    core->magic = WK_CORE_MAGIC;
    core->options = *options;
    if (options->stop_id_count > 0)
        memcpy(core->stop_ids, options->stop_ids, options->stop_id_count * sizeof(uint32_t));
    core->options.stop_ids = core->stop_ids;
    core->entry_count = wk_core_entries(options);
    arrays_take(core);
    shape_set(core, &options->shape);
    wk_cost_init(&core->cost_prefill, 0, options->prefill_us_per_row);
    wk_cost_init(&core->cost_decode, options->decode_us_per_step, options->prefill_us_per_row);
    core->decode_rate = RATE_UNKNOWN;
    core->prefill_rate = RATE_UNKNOWN;
    return core;
}

void wk_core_destroy(struct wk_core **core_p)
{
    CHECK(core_p != NULL);
    struct wk_core *core = *core_p;
    if (core == NULL)
        return;
    CHECK_OBJ(core, WK_CORE_MAGIC);
    mem_give(core->seqs);
    mem_give(core->order);
    mem_give(core->chosen);
    mem_give(core->flight.entries);
    mem_give(core->block_ids);
    wk_ids_destroy(&core->ids);
    wk_plan_destroy(&core->plan);
    wk_plan_ring_destroy(&core->ring);
    core->magic = 0;
    mem_give(core);
    *core_p = NULL;
}

/* ---- what the other parts use ---- */

struct msg *wk_core_send(struct wk_core *core, enum wk_action_type to, enum msg_type type,
                         const struct msg_id *id)
{
    struct wk_actions *a = core->actions;
    CHECK(a != NULL && a->count < a->count_max);
    struct wk_action *action = &a->items[a->count++];
    memset(action, 0, sizeof *action);
    action->type = to;
    action->msg.type = type;
    action->msg.epoch = core->kv_epoch;
    if (id != NULL)
        action->msg.id = *id;
    return &action->msg;
}

uint32_t wk_core_entry(const struct wk_core *core, const struct wk_seq *seq)
{
    CHECK_OBJ(seq, WK_SEQ_MAGIC);
    CHECK(seq >= core->seqs && seq < core->seqs + core->entry_count);
    return (uint32_t)(seq - core->seqs);
}

uint32_t wk_core_length(const struct wk_core *core, const struct wk_seq *seq)
{
    return wk_ids_count(core->ids, wk_core_entry(core, seq));
}

uint32_t wk_core_outputs(const struct wk_core *core, const struct wk_seq *seq)
{
    uint32_t length = wk_core_length(core, seq);
    CHECK(length >= seq->prompt_count);
    return length - seq->prompt_count;
}

struct wk_seq *wk_core_find(struct wk_core *core, const struct msg_id *id)
{
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state != WK_SEQ_ZOMBIE && memcmp(&seq->id, id, sizeof *id) == 0)
            return seq;
    }
    return NULL;
}

static void receipt_fill(struct wk_core *core, const struct wk_seq *seq, struct msg_receipt *r)
{
    uint64_t now = core->now_us;
    uint64_t first_slice = seq->first_slice_us ? seq->first_slice_us : now;
    uint64_t first_token = seq->first_token_us ? seq->first_token_us : now;
    *r = (struct msg_receipt){
        .prompt_tokens = seq->prompt_count,
        .output_tokens = wk_core_outputs(core, seq),
        .drafted = seq->drafted,
        .accepted = seq->accepted,
        .steps = seq->steps,
        .preempted = seq->preempted,
        .resumed = seq->resumed,
        .concurrency = seq->concurrency,
        .queue_us = first_slice - seq->assigned_us,
        .prefill_us = first_token - first_slice,
        .decode_us = now - first_token,
        .spec = seq->spec.effective,
        .model_fp = core->options.model_fp,
        .config_hash = core->options.config_hash,
    };
}

static const void *kept(struct wk_core *core, const void *items, size_t bytes)
{
    const void *copy = arena_copy(core->actions->arena, items, bytes);
    CHECK(copy != NULL); /* drafts leave half of the arena free, see wk_core_draft.c */
    return copy;
}

void wk_core_emit(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r,
                  uint32_t count, uint32_t finish, enum err code)
{
    CHECK(count == 0 || (r != NULL && count <= r->count));
    struct msg *m = wk_core_send(core, WK_ACT_ROUTER, MSG_TOKENS_EMITTED, &seq->id);
    struct msg_tokens *t = &m->u.tokens;
    uint32_t outputs = wk_core_outputs(core, seq);
    CHECK(outputs >= count);
    t->seq = outputs - count;
    t->count = count;
    t->finish = finish;
    t->code = finish == MSG_FINISH_FAILED ? (uint32_t)code : (uint32_t)ERR_OK;
    if (count > 0) {
        t->ids = kept(core, r->ids, count * sizeof *r->ids);
        if (seq->setup.logprobs) {
            t->logprobs = true;
            t->logprob = kept(core, r->logprob, count * sizeof *r->logprob);
            t->top_count = r->top_count;
            size_t tops = (size_t)count * r->top_count;
            t->top_ids = kept(core, r->top_ids, tops * sizeof *r->top_ids);
            t->top_logprobs = kept(core, r->top_logprobs, tops * sizeof *r->top_logprobs);
        }
        core->stats.tokens_output += count;
        if (seq->first_token_us == 0)
            seq->first_token_us = core->now_us;
        if (seq->last_emit_us != 0) {
            uint64_t gap = core->now_us - seq->last_emit_us;
            core->stats.gap_us_last = gap;
            core->stats.gaps++;
            core->stats.gap_us_max = gap > core->stats.gap_us_max ? gap : core->stats.gap_us_max;
            core->gap_us_window = gap > core->gap_us_window ? gap : core->gap_us_window;
        }
        seq->last_emit_us = core->now_us;
    }
    if (finish != MSG_FINISH_NONE) {
        t->has_receipt = true;
        receipt_fill(core, seq, &t->receipt);
        /* The sequence's place may be reused before the message is encoded. */
        t->receipt.spec = kept(core, seq->spec.effective, sizeof seq->spec.effective);
    }
}

void wk_core_free(struct wk_core *core, struct wk_seq *seq)
{
    CHECK(!seq->in_flight && !seq->in_batch && seq->kv.state != WK_KV_HELD);
    uint32_t entry = wk_core_entry(core, seq), at = 0;
    wk_ids_drop(core->ids, entry);
    while (at < core->order_count && core->order[at] != entry)
        at++;
    CHECK(at < core->order_count);
    core->order_count--;
    memmove(&core->order[at], &core->order[at + 1], (core->order_count - at) * sizeof *core->order);
    struct wk_blocks kv = seq->kv;
    wk_blocks_reset(&kv);
    *seq = (struct wk_seq){.magic = WK_SEQ_MAGIC, .state = WK_SEQ_FREE, .kv = kv};
}

void wk_core_end(struct wk_core *core, struct wk_seq *seq, uint32_t finish)
{
    CHECK(seq->state != WK_SEQ_FREE && seq->state != WK_SEQ_ZOMBIE);
    struct msg_ledger *l = &core->stats.ledger;
    bool good = finish == MSG_FINISH_STOP || finish == MSG_FINISH_LENGTH;
    CHECK(l->live > 0 && core->live_count > 0);
    l->live--;
    core->live_count--;
    if (good)
        l->finished++;
    else if (finish == MSG_FINISH_FAILED)
        l->failed++;
    else
        l->cancelled++;
    CHECK(l->accepted == l->finished + l->failed + l->cancelled + l->live);
    wk_core_draft_close(core, seq);
    if (seq->in_flight || seq->in_batch) {
        seq->state = WK_SEQ_ZOMBIE;
        return;
    }
    wk_core_kv_release(core, seq, good);
    wk_core_free(core, seq);
}

/* ---- requests ---- */

static void assign_reply(struct wk_core *core, const struct msg_id *id, enum err code,
                         const struct err_detail *detail)
{
    struct msg *m = wk_core_send(core, WK_ACT_ROUTER, MSG_ASSIGN_REPLY, id);
    m->u.assign_reply.code = (uint32_t)code;
    m->u.assign_reply.text = "";
    if (code != ERR_OK) {
        size_t bytes = strnlen(detail->text, MSG_TEXT_MAX);
        char *text = arena_strndup(core->actions->arena, detail->text, bytes);
        CHECK(text != NULL);
        m->u.assign_reply.text = text;
    }
}

static enum err request_check(struct wk_core *core, const struct msg_request *q,
                              struct wk_spec *ret_spec, struct err_detail *detail)
{
    const struct wk_core_options *o = &core->options;
    if (core->stopping || core->draining)
        return err_set(detail, ERR_DRAINING, "worker is draining");
    if (q->prompt_count == 0 || q->ids_count < q->prompt_count || q->limits.output_tokens_max == 0)
        return err_set(detail, ERR_INVALID, "ids_count: %u below prompt_count %u", q->ids_count,
                       q->prompt_count);
    if (q->prompt_count >= core->context_max || q->ids_count > core->context_max)
        return err_set(detail, ERR_CONTEXT, "prompt of %u tokens, context of %u", q->prompt_count,
                       core->context_max);
    for (uint32_t i = 0; i < q->ids_count; i++)
        if (q->ids[i] >= o->vocab_size)
            return err_set(detail, ERR_INVALID, "ids[%u]: %u is not below %u", i, q->ids[i],
                           o->vocab_size);
    if (q->sampling.top_logprobs > MSG_TOP_LOGPROBS_MAX || q->sampling.bias_count > MSG_BIAS_MAX ||
        q->limits.stop_id_count > MSG_STOP_IDS_MAX)
        return err_set(detail, ERR_INVALID, "top_logprobs, bias or stop ids: too many");
    *ret_spec = o->spec;
    if (q->canary) /* the canary proves the model, not the drafter */
        TRY(wk_spec_parse("off", ret_spec, detail));
    else if (q->spec[0] != '\0')
        TRY(wk_spec_parse(q->spec, ret_spec, detail));
    if (core->live_count >= o->seqs_max)
        return err_set(detail, ERR_BUSY, "all %u sequences are taken", o->seqs_max);
    return ERR_OK;
}

static struct wk_seq *entry_take(struct wk_core *core)
{
    for (uint32_t i = 0; i < core->entry_count; i++)
        if (core->seqs[i].state == WK_SEQ_FREE) {
            core->order[core->order_count++] = i;
            return &core->seqs[i];
        }
    return NULL;
}

static void setup_fill(struct wk_seq *seq, const struct msg_request *q)
{
    struct wk_plan_setup *s = &seq->setup;
    const struct msg_sampling *p = &q->sampling;
    s->prompt_count = q->prompt_count;
    s->output_tokens_min = q->limits.output_tokens_min;
    s->temperature = p->temperature;
    s->top_p = p->top_p;
    s->min_p = p->min_p;
    s->top_k = p->top_k;
    s->repetition_penalty = p->repetition_penalty;
    s->presence_penalty = p->presence_penalty;
    s->frequency_penalty = p->frequency_penalty;
    s->seed = p->seed;
    s->choice = p->choice;
    s->logprobs = p->logprobs;
    s->top_logprobs = p->logprobs ? p->top_logprobs : 0;
    s->bias_count = p->bias_count;
    if (p->bias_count > 0) {
        memcpy(s->bias_ids, p->bias_ids, p->bias_count * sizeof *p->bias_ids);
        memcpy(s->bias_values, p->bias_values, p->bias_count * sizeof *p->bias_values);
    }
    if (seq->limits.output_tokens_min > 0) {
        s->banned_count = seq->limits.stop_id_count;
        memcpy(s->banned_ids, seq->stop_ids, s->banned_count * sizeof *s->banned_ids);
    }
}

static void limits_fill(struct wk_core *core, struct wk_seq *seq, const struct msg_limits *l)
{
    uint32_t count = 0;
    if (!l->ignore_eos)
        for (uint32_t i = 0; i < core->options.stop_id_count; i++)
            seq->stop_ids[count++] = core->stop_ids[i];
    for (uint32_t i = 0; i < l->stop_id_count; i++)
        if (l->stop_ids[i] < core->options.vocab_size)
            seq->stop_ids[count++] = l->stop_ids[i];
    CHECK(count <= WK_STOP_IDS_MAX);
    seq->limits = (struct wk_limits){
        .output_tokens_max = l->output_tokens_max,
        .output_tokens_min = l->output_tokens_min,
        .context_max = core->context_max,
        .stop_id_count = count,
        .stop_ids = seq->stop_ids,
    };
    if (l->deadline_unix_us != 0) {
        uint64_t left =
            l->deadline_unix_us > core->now_unix_us ? l->deadline_unix_us - core->now_unix_us : 0;
        seq->deadline_us = core->now_us + left;
    }
}

static void text_keep(char *ret, const char *text)
{
    size_t bytes = strnlen(text, MSG_TEXT_MAX);
    memcpy(ret, text, bytes);
    ret[bytes] = '\0';
}

static void accept(struct wk_core *core, struct wk_seq *seq, const struct msg *m,
                   const struct wk_spec *spec)
{
    const struct msg_request *q = &m->u.request;
    CHECK(seq->state == WK_SEQ_FREE);
    seq->state = WK_SEQ_WAITING;
    seq->id = m->id;
    seq->attempt = q->attempt;
    seq->canary = q->canary;
    seq->serial = ++core->serial;
    seq->prompt_count = q->prompt_count;
    seq->spec = *spec;
    seq->resumed = q->attempt > 0 || q->ids_count > q->prompt_count ? 1 : 0;
    seq->assigned_us = core->now_us;
    text_keep(seq->session_key, q->session_key);
    text_keep(seq->cache_salt, q->cache_salt);
    seq->salt = block_hash_salt(&core->options.key, seq->cache_salt);
    limits_fill(core, seq, &q->limits);
    setup_fill(seq, q);
    core->stats.ledger.accepted++;
    core->stats.ledger.live++;
    core->live_count++;
    seq->concurrency = core->live_count;
    assign_reply(core, &m->id, ERR_OK, NULL);
    /* A resumption whose last token already ended it: only the finish got lost. */
    uint32_t over = wk_verify_over(&seq->limits, q->ids_count, q->ids_count - q->prompt_count,
                                   q->ids[q->ids_count - 1]);
    if (over != MSG_FINISH_NONE) {
        wk_core_emit(core, seq, NULL, 0, over, ERR_OK);
        wk_core_end(core, seq, over);
    }
}

static void on_assign(struct wk_core *core, const struct msg *m)
{
    struct err_detail detail = {.text = ""};
    struct wk_spec spec;
    struct wk_seq *old = wk_core_find(core, &m->id);
    if (old != NULL && old->attempt == m->u.request.attempt) {
        assign_reply(core, &m->id, ERR_OK, NULL); /* the same question twice */
        return;
    }
    if (old != NULL) /* the router starts it again from what it has */
        wk_core_end(core, old, MSG_FINISH_CANCELLED);
    enum err e = request_check(core, &m->u.request, &spec, &detail);
    struct wk_seq *seq = e == ERR_OK ? entry_take(core) : NULL;
    if (e == ERR_OK && seq == NULL)
        e = err_set(&detail, ERR_BUSY, "cancelled sequences still hold their places");
    if (e == ERR_OK && !wk_ids_append(core->ids, wk_core_entry(core, seq), m->u.request.ids,
                                      m->u.request.ids_count)) {
        wk_core_free(core, seq);
        e = err_set(&detail, ERR_BUSY, "token ids of live requests fill ids_max");
    }
    if (e != ERR_OK)
        assign_reply(core, &m->id, e, &detail);
    else
        accept(core, seq, m, &spec);
}

static void fail(struct wk_core *core, struct wk_seq *seq, uint32_t finish, enum err code)
{
    wk_core_emit(core, seq, NULL, 0, finish, code);
    wk_core_end(core, seq, finish);
}

static void on_router_state(struct wk_core *core, const struct msg *m)
{
    uint64_t incarnation = m->u.router.incarnation;
    if (core->router_incarnation == incarnation)
        return;
    bool first = core->router_incarnation == 0;
    core->router_incarnation = incarnation;
    if (first)
        return;
    /* A new router knows nothing of these; it will assign them again. */
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (seq->state != WK_SEQ_ZOMBIE)
            wk_core_end(core, seq, MSG_FINISH_CANCELLED);
    }
}

static void on_msg(struct wk_core *core, const struct msg *m)
{
    struct wk_seq *seq;
    switch (m->type) {
    case MSG_WORKER_ASSIGN:
        on_assign(core, m);
        break;
    case MSG_WORKER_CANCEL:
        seq = wk_core_find(core, &m->id);
        if (seq != NULL)
            fail(core, seq, MSG_FINISH_CANCELLED, ERR_CANCELLED);
        break;
    case MSG_WORKER_DRAIN:
        core->draining = true;
        core->drain_deadline_us = 0;
        if (m->u.drain.deadline_unix_us != 0) {
            uint64_t at = m->u.drain.deadline_unix_us;
            core->drain_deadline_us =
                core->now_us + (at > core->now_unix_us ? at - core->now_unix_us : 1);
        }
        break;
    case MSG_WORKER_RESUME:
        core->draining = false;
        core->drain_deadline_us = 0;
        break;
    case MSG_ROUTER_STATE:
        on_router_state(core, m);
        break;
    case MSG_DRAFT_HELLO_REPLY:
    case MSG_DRAFT_REPLY:
        wk_core_draft_msg(core, m);
        break;
    default:
        wk_core_kv_msg(core, m);
        break;
    }
}

static void deadlines(struct wk_core *core)
{
    bool drained = core->drain_deadline_us != 0 && core->now_us >= core->drain_deadline_us;
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (seq->state == WK_SEQ_ZOMBIE)
            continue;
        if (seq->deadline_us != 0 && core->now_us >= seq->deadline_us)
            fail(core, seq, MSG_FINISH_FAILED, ERR_TIMEOUT);
        else if (drained) /* retryable: the router carries on elsewhere with what it has */
            fail(core, seq, MSG_FINISH_FAILED, ERR_DRAINING);
    }
    if (drained)
        core->drain_deadline_us = 0;
}

/* Hands every request that no plan holds back to the router, which carries on elsewhere. */
static void hand_back(struct wk_core *core)
{
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (core->flight.active && (seq->in_flight || seq->in_batch))
            continue;
        if (seq->state == WK_SEQ_ZOMBIE) /* of a paused batch that will not go on */
            wk_core_kv_release(core, seq, false);
        else
            fail(core, seq, MSG_FINISH_FAILED, ERR_DRAINING);
    }
    for (uint32_t i = 0; i < core->order_count && !core->flight.active; i++)
        wk_core_kv_release(core, &core->seqs[core->order[i]], false);
}

static void wake_at(struct wk_actions *a, uint64_t at_us)
{
    if (a->wake_us == 0 || at_us < a->wake_us)
        a->wake_us = at_us;
}

void wk_core_step(struct wk_core *core, const struct wk_event *event,
                  struct wk_actions *ret_actions)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    CHECK(event != NULL && ret_actions != NULL && ret_actions->arena != NULL);
    CHECK(event->now_us >= core->now_us);
    core->now_us = event->now_us;
    core->now_unix_us = event->now_unix_us;
    core->actions = ret_actions;
    ret_actions->count = 0;
    ret_actions->wake_us = 0;
    ret_actions->plan = NULL;
    switch (event->type) {
    case WK_EV_MSG:
        on_msg(core, event->msg);
        break;
    case WK_EV_DONE:
        wk_core_done(core, event->result);
        break;
    case WK_EV_TICK:
        break;
    case WK_EV_KV_ATTACHED:
        shape_set(core, &event->shape);
        wk_core_kv_attached(core, event);
        break;
    case WK_EV_KV_DETACHED:
        wk_core_kv_detached(core);
        break;
    case WK_EV_STOP:
        core->stopping = true;
        break;
    }
    if (core->stopping) {
        hand_back(core);
    } else {
        deadlines(core);
        wk_core_draft_check(core);
        wk_core_kv_pump(core);
        wk_core_preempt_if_stuck(core);
        uint64_t wake = 0;
        if (!core->flight.active && wk_batch_next(core, &wake)) {
            CHECK(ret_actions->count < ret_actions->count_max);
            wk_plan_seal(core->plan);
            wk_plan_ring_add(core->ring, core->plan, core->now_us);
            ret_actions->items[ret_actions->count++].type = WK_ACT_RUN;
            ret_actions->plan = core->plan;
        } else if (wake != 0) {
            wake_at(ret_actions, wake);
        }
        if (core->kv_retry_us > core->now_us)
            wake_at(ret_actions, core->kv_retry_us);
    }
    core->actions = NULL;
}

/* ---- what the shell asks ---- */

bool wk_core_quiet(const struct wk_core *core)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    return !core->flight.active && !core->prefill.active;
}

bool wk_core_stopped(const struct wk_core *core)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    if (!core->stopping || core->flight.active)
        return false;
    for (uint32_t i = 0; i < core->order_count; i++)
        if (core->seqs[core->order[i]].kv.state == WK_KV_HELD)
            return false;
    return true;
}

void wk_core_info(struct wk_core *core, uint64_t now_us, struct msg_worker_info *ret_info)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    uint64_t queued = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->state == WK_SEQ_WAITING || seq->state == WK_SEQ_PREFILL)
            queued += wk_core_length(core, seq) - seq->computed;
    }
    ret_info->state = core->draining || core->stopping ? MSG_WORKER_DRAINING : MSG_WORKER_READY;
    ret_info->seqs_live = core->live_count;
    ret_info->seqs_max = core->options.seqs_max;
    ret_info->tokens_queued = queued;
    ret_info->blocks_free = core->kv_blocks_free;
    ret_info->blocks_total = core->shape.block_count;
    ret_info->block_tokens = core->shape.block_tokens;
    ret_info->context_max = core->context_max;
    ret_info->vocab_size = core->options.vocab_size;
    ret_info->decode_tokens_per_s = core->decode_rate;
    ret_info->prefill_tokens_per_s = core->prefill_rate;
    ret_info->step_us_last = core->stats.step_us_last;
    ret_info->gap_us_max = core->gap_us_window;
    ret_info->ledger = core->stats.ledger;
    ret_info->model_fp = core->options.model_fp;
    ret_info->spec = core->options.spec.effective;
    ret_info->config_hash = core->options.config_hash;
    ret_info->drafter_state = core->drafter_incarnation == 0     ? 0
                              : wk_core_drafter_up(core, now_us) ? 1
                                                                 : 2;
    ret_info->kv_state = !core->kv_attached ? 0 : now_us > core->kv_seen_us + 2500000 ? 2 : 1;
    core->gap_us_window = 0;
}

uint32_t wk_core_leases(const struct wk_core *core, uint64_t *ret_leases, uint32_t max)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    uint32_t count = 0;
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        if (seq->kv.state == WK_KV_HELD) {
            if (count < max)
                ret_leases[count] = seq->kv.lease;
            count++;
        }
    }
    return count;
}

const struct wk_stats *wk_core_stats(const struct wk_core *core)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    return &core->stats;
}

void wk_core_census(const struct wk_core *core, struct wk_census *ret_census)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    struct wk_census c = {0};
    for (uint32_t i = 0; i < core->order_count; i++) {
        const struct wk_seq *seq = &core->seqs[core->order[i]];
        c.waiting += seq->state == WK_SEQ_WAITING && seq->kv.state != WK_KV_OPENING;
        c.opening += seq->state == WK_SEQ_WAITING && seq->kv.state == WK_KV_OPENING;
        c.prefill += seq->state == WK_SEQ_PREFILL;
        c.decode += seq->state == WK_SEQ_DECODE;
        c.zombie += seq->state == WK_SEQ_ZOMBIE;
        c.blocks_held += seq->kv.state == WK_KV_HELD ? seq->kv.count : 0;
    }
    *ret_census = c;
}

const struct wk_plan_ring *wk_core_ring(const struct wk_core *core)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    return core->ring;
}
