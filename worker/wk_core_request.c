/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a request in the core: assignment, emissions, its one end. */
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/str.h"
#include "worker/wk_core_state.h"

static void receipt_fill(struct wk_core *core, const struct wk_seq *seq, struct msg_receipt *r)
{
    uint64_t now = core->now_us;
    uint64_t first_slice = seq->first_slice_us ? seq->first_slice_us : now;
    uint64_t first_token = seq->first_token_us ? seq->first_token_us : now;
    *r = (struct msg_receipt){
        .prompt_tokens = seq->prompt_count,
        .output_tokens = wk_core_outputs(core, seq),
        .cached_tokens = seq->cached,
        .drafted = seq->drafted,
        .accepted = seq->accepted,
        .steps = seq->steps,
        .preempted = seq->preempted,
        .resumed = seq->resumed,
        .concurrency = seq->concurrency,
        .queue_us = first_slice - seq->assigned_us,
        .prefill_us = first_token - first_slice,
        .decode_us = now - first_token,
        .draft_us = seq->draft_us,
        .verify_us = seq->verify_us,
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
    /* With every message: whoever cuts the stream, or loses this worker, knows the counts so far.
     * Who we are comes with the end only. */
    t->has_receipt = true;
    receipt_fill(core, seq, &t->receipt);
    /* The sequence's place may be reused before the message is encoded. */
    t->receipt.spec = kept(core, seq->spec.effective, sizeof seq->spec.effective);
    if (finish == MSG_FINISH_NONE) {
        t->receipt.config_hash = "";
        t->receipt.model_fp = (struct hash128){{0}};
    }
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
    seq->keep |= good;
    if (seq->in_flight || seq->in_batch) {
        seq->state = WK_SEQ_ZOMBIE;
        return;
    }
    if (good && seq->state == WK_SEQ_DECODE && wk_snap_flush(core, seq)) {
        seq->state = WK_SEQ_ZOMBIE;
        seq->flush = true;
        return;
    }
    wk_core_kv_release(core, seq, seq->keep);
    wk_core_free(core, seq);
}

static void assign_reply(struct wk_core *core, const struct msg_id *id, enum err code,
                         const struct err_detail *detail)
{
    struct msg *m = wk_core_send(core, WK_ACT_ROUTER, MSG_ASSIGN_REPLY, id);
    m->u.assign_reply.code = (uint32_t)code;
    m->u.assign_reply.text = "";
    if (code != ERR_OK) {
        size_t bytes = utf8_valid_prefix(detail->text, strnlen(detail->text, MSG_TEXT_MAX));
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
    if (wk_core_draft_own(ret_spec) && !o->mtp)
        return err_set(detail, ERR_UNSUPPORTED,
                       "spec: %s: this worker has no MTP layer loaded (worker.mtp)",
                       ret_spec->effective);
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
    s->id = seq->id;
    s->taps = seq->spec.policy != WK_POLICY_OFF && !wk_core_draft_own(&seq->spec);
    s->mtp = wk_core_draft_own(&seq->spec) ? seq->spec.draft_count : 0;
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
    wk_history_begin(&seq->history);
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

void wk_core_assign(struct wk_core *core, const struct msg *m)
{
    struct err_detail detail = {.text = ""};
    struct wk_spec spec;
    struct wk_seq *old = wk_core_find(core, &m->id);
    if (old != NULL && old->attempt == m->u.request.attempt) {
        assign_reply(core, &m->id, ERR_OK, NULL); /* the same question twice */
        return;
    }
    if (old != NULL) { /* the router starts it again from what it has */
        old->keep = true;
        wk_core_end(core, old, MSG_FINISH_CANCELLED);
    }
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

void wk_core_fail(struct wk_core *core, struct wk_seq *seq, uint32_t finish, enum err code)
{
    seq->keep = code == ERR_DRAINING;
    wk_core_emit(core, seq, NULL, 0, finish, code);
    wk_core_end(core, seq, finish);
}

void wk_core_router_state(struct wk_core *core, const struct msg *m)
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
        if (seq->state == WK_SEQ_ZOMBIE)
            continue;
        seq->keep = true;
        wk_core_end(core, seq, MSG_FINISH_CANCELLED);
    }
}

uint64_t wk_core_deadlines(struct wk_core *core)
{
    bool drained = core->drain_deadline_us != 0 && core->now_us >= core->drain_deadline_us;
    uint64_t next = drained ? 0 : core->drain_deadline_us;
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (seq->state == WK_SEQ_ZOMBIE)
            continue;
        if (seq->deadline_us != 0 && core->now_us >= seq->deadline_us)
            wk_core_fail(core, seq, MSG_FINISH_FAILED, ERR_TIMEOUT);
        else if (drained) /* retryable: the router carries on elsewhere with what it has */
            wk_core_fail(core, seq, MSG_FINISH_FAILED, ERR_DRAINING);
        else if (seq->deadline_us != 0 && (next == 0 || seq->deadline_us < next))
            next = seq->deadline_us;
    }
    if (drained)
        core->drain_deadline_us = 0;
    return next;
}

void wk_core_hand_back(struct wk_core *core)
{
    for (uint32_t i = core->order_count; i > 0; i--) {
        struct wk_seq *seq = &core->seqs[core->order[i - 1]];
        if (core->flight.active && (seq->in_flight || seq->in_batch))
            continue;
        if (seq->flush)
            wk_core_flush_end(core, seq);
        else if (seq->state == WK_SEQ_ZOMBIE) /* of a paused batch that will not go on */
            wk_core_kv_release(core, seq, seq->keep);
        else
            wk_core_fail(core, seq, MSG_FINISH_FAILED, ERR_DRAINING);
    }
    for (uint32_t i = 0; i < core->order_count && !core->flight.active; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        wk_core_kv_release(core, seq, seq->keep);
    }
}
