/* SPDX-License-Identifier: Apache-2.0 */
/* The core's side of the drafter: questions, answers, deadlines.  Nothing here changes the text. */
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "worker/wk_core_state.h"

#define DRAFTER_SILENCE_US 1000000u
#define ACCEPT_SMOOTH      0.02 /* about the last 50 steps */
#define ACCEPT_STEPS_MIN   64u  /* no alarm before so many steps */
/* New ones of a sequence that asks nothing, before they are told: few, or the tap ring laps, and
 * what a drafter must catch up with makes the first answer after a pause late again. */
#define FEED_TOKENS 8u

bool wk_core_drafter_up(const struct wk_core *core, uint64_t now_us)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    return core->drafter_incarnation != 0 && now_us < core->drafter_seen_us + DRAFTER_SILENCE_US;
}

bool wk_core_draft_own(const struct wk_spec *spec)
{
    return strcmp(spec->source, WK_SOURCE_MTP) == 0;
}

static void forget_all(struct wk_core *core)
{
    for (uint32_t i = 0; i < core->order_count; i++) {
        struct wk_seq *seq = &core->seqs[core->order[i]];
        seq->draft.opened = false;
        if (!wk_core_draft_own(&seq->spec))
            seq->draft.state = WK_DRAFT_NONE;
    }
}

/* Another drafter may hold what this one could not. */
static void barred_forget(struct wk_core *core)
{
    for (uint32_t i = 0; i < core->order_count; i++)
        core->seqs[core->order[i]].draft.barred = false;
}

/* A silent drafter is not waited for; what it missed meanwhile it gets with the next DraftOpen. */
void wk_core_draft_check(struct wk_core *core)
{
    if (core->drafter_incarnation != 0 && !wk_core_drafter_up(core, core->now_us))
        forget_all(core);
}

void wk_core_draft_close(struct wk_core *core, struct wk_seq *seq)
{
    if (seq->draft.opened && wk_core_drafter_up(core, core->now_us))
        wk_core_send(core, WK_ACT_DRAFTER, MSG_DRAFT_CLOSE, &seq->id);
    seq->draft.opened = false;
    seq->draft.state = WK_DRAFT_NONE;
}

/* False when the ids do not fit beside everything else that this step has to say. */
static bool open_send(struct wk_core *core, struct wk_seq *seq, uint32_t length)
{
    struct arena *arena = core->actions->arena;
    size_t bytes = (size_t)length * sizeof(uint32_t);
    if (arena->bytes_max != 0 && arena->bytes_used + bytes > arena->bytes_max / 2)
        return false;
    uint32_t *ids = arena_alloc(arena, bytes);
    if (ids == NULL)
        return false;
    wk_ids_copy(core->ids, wk_core_entry(core, seq), 0, length, ids);
    struct msg *m = wk_core_send(core, WK_ACT_DRAFTER, MSG_DRAFT_OPEN, &seq->id);
    m->u.draft_open = (struct msg_draft_open){
        .epoch = core->kv_epoch, .tap_end = core->tap_end, .ids_count = length, .ids = ids};
    seq->draft.opened = true;
    seq->draft.epoch = core->kv_epoch;
    seq->draft.length = length;
    return true;
}

/* Tokens that the drafter does not hold yet; NULL: no room to say them in. */
static uint32_t *news_of(struct wk_core *core, const struct wk_seq *seq, uint32_t length,
                         uint32_t *ret_count)
{
    CHECK(seq->draft.length <= length);
    uint32_t count = length - seq->draft.length;
    uint32_t *ids = arena_alloc_array(core->actions->arena, count + 1, sizeof *ids);
    if (ids != NULL)
        wk_ids_copy(core->ids, wk_core_entry(core, seq), seq->draft.length, count, ids);
    *ret_count = count;
    return ids;
}

void wk_core_draft_feed(struct wk_core *core, struct wk_seq *seq)
{
    struct wk_draft *d = &seq->draft;
    uint32_t length = wk_core_length(core, seq), count = 0;
    if (!core->drafter_taps || !seq->setup.taps || d->barred ||
        !wk_core_drafter_up(core, core->now_us))
        return;
    if (!d->opened || d->epoch != core->kv_epoch) {
        open_send(core, seq, length);
        return;
    }
    uint32_t *ids = news_of(core, seq, length, &count);
    if (ids == NULL)
        return;
    struct msg *m = wk_core_send(core, WK_ACT_DRAFTER, MSG_DRAFT_CONTEXT, &seq->id);
    m->u.draft_context = (struct msg_draft_context){.epoch = d->epoch,
                                                    .base_length = d->length,
                                                    .tap_end = core->tap_end,
                                                    .ids_count = count,
                                                    .ids = ids};
    d->length = length;
}

/* Cost of a step in which this request verifies k drafts and the others do as it does: its rows,
 * and with any drafts the wait for all of them. */
static uint32_t goodput_drafts(const struct wk_core *core, const struct wk_seq *seq)
{
    double cost_us[WK_SPEC_DRAFTS_MAX + 1];
    uint32_t decoders = core->decoders > 0 ? core->decoders : 1;
    double wait_us = wk_cost_predict(&core->cost_draft, decoders, 0, 1);
    for (uint32_t k = 0; k <= WK_SPEC_DRAFTS_MAX; k++) {
        double us =
            wk_cost_predict(&core->cost_decode, decoders * (k + 1.0), core->decode_context, 1);
        cost_us[k] = (us > 1 ? us : 1) + (k > 0 ? wait_us : 0);
    }
    return wk_policy_goodput(&seq->history, cost_us);
}

static uint32_t drafts_verified(const struct wk_core *core, const struct wk_seq *seq)
{
    switch (seq->spec.policy) {
    case WK_POLICY_EMA:
        return wk_policy_ema(&seq->history, &core->options.ema);
    case WK_POLICY_GOODPUT:
        return goodput_drafts(core, seq);
    default:
        return seq->spec.draft_count;
    }
}

static void accept_watch(struct wk_core *core, const struct wk_seq *seq, uint32_t accepted)
{
    if (seq->spec.source[0] != '\0')
        return; /* a source by name is what the request asked for */
    double share = (double)accepted / seq->step_drafts;
    core->accept_rate += ACCEPT_SMOOTH * (share - core->accept_rate);
    core->accept_steps += core->accept_steps < ACCEPT_STEPS_MIN;
    core->drafter_poor =
        core->accept_steps == ACCEPT_STEPS_MIN && core->accept_rate < core->options.accept_floor;
}

void wk_core_draft_verdict(struct wk_core *core, struct wk_seq *seq, uint32_t accepted)
{
    if (seq->spec.policy == WK_POLICY_OFF)
        return;
    if (seq->step_drafts == 0) {
        wk_history_idle(&seq->history);
        return;
    }
    wk_history_add(&seq->history, &core->options.ema, seq->step_drafts, accepted);
    accept_watch(core, seq, accepted);
}

bool wk_core_drafter_poor(const struct wk_core *core)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    return core->drafter_poor;
}

void wk_core_draft_ask(struct wk_core *core, struct wk_seq *seq)
{
    struct wk_draft *d = &seq->draft;
    CHECK(seq->state == WK_SEQ_DECODE);
    d->state = WK_DRAFT_NONE;
    d->count = 0;
    uint32_t length = wk_core_length(core, seq), count = 0;
    /* What cannot ride along in the next step is not waited for, nor what would come too late. */
    bool asks = wk_batch_drafts_max(core, core->decoders) > 0 && core->draft_pause == 0;
    d->verify = asks ? drafts_verified(core, seq) : 0;
    /* The whole block is asked for: what is drafted does not depend on what is verified. */
    uint32_t wanted = wk_verify_drafts_max(&seq->limits, length, wk_core_outputs(core, seq),
                                           d->verify > 0 ? WK_SPEC_DRAFTS_MAX : 0);
    if (wanted > core->drafter_max)
        wanted = core->drafter_max;
    if (d->barred || !wk_core_drafter_up(core, core->now_us))
        return;
    if (wanted == 0) {
        if (!d->opened || length - d->length >= FEED_TOKENS)
            wk_core_draft_feed(core, seq);
        return;
    }
    if ((!d->opened || d->epoch != core->kv_epoch) && !open_send(core, seq, length))
        return;
    uint32_t *ids = news_of(core, seq, length, &count);
    if (ids == NULL)
        return;
    struct msg *m = wk_core_send(core, WK_ACT_DRAFTER, MSG_DRAFT_PROPOSE, &seq->id);
    m->u.draft_propose = (struct msg_draft_propose){
        .epoch = d->epoch,
        .tap_end = core->tap_end,
        .base_length = d->length,
        .anchor = wk_ids_at(core->ids, wk_core_entry(core, seq), length - 1),
        .draft_count = wanted,
        .step = ++core->draft_step,
        .source = seq->spec.source,
        .ids_count = count,
        .ids = ids,
    };
    d->length = length;
    d->step = core->draft_step;
    d->wanted = wanted;
    d->state = WK_DRAFT_ASKED;
    d->deadline_us = core->now_us + (uint64_t)core->options.deadline_ms * 1000;
}

void wk_core_draft_take(struct wk_core *core, struct wk_seq *seq, const struct wk_result_seq *r)
{
    struct wk_draft *d = &seq->draft;
    CHECK(seq->state == WK_SEQ_DECODE && r->draft_count < WK_STEP_ROWS_MAX);
    d->state = WK_DRAFT_READY;
    d->verify = seq->spec.draft_count;
    d->count = wk_verify_drafts_max(&seq->limits, wk_core_length(core, seq),
                                    wk_core_outputs(core, seq), r->draft_count);
    memcpy(d->ids, r->draft_ids, d->count * sizeof *d->ids);
}

bool wk_core_draft_settled(const struct wk_core *core, const struct wk_seq *seq)
{
    return seq->draft.state != WK_DRAFT_ASKED || core->now_us >= seq->draft.deadline_us;
}

/* Whatever the refusal: this step runs without drafts. */
static void on_refusal(struct wk_core *core, struct wk_draft *d, uint32_t code)
{
    switch (code) {
    case ERR_NOT_FOUND:
    case ERR_EPOCH:
        d->opened = false; /* told everything again with the next question */
        break;
    case ERR_CONTEXT:
        d->barred = true; /* too long for it, and requests do not become shorter */
        break;
    case ERR_TIMEOUT:
        core->stats.drafts_timeout++;
        break;
    default: /* it holds the sequence; the next answer may be a better one */
        break;
    }
}

static void on_reply(struct wk_core *core, const struct msg *m)
{
    const struct msg_draft_reply *r = &m->u.draft_reply;
    struct wk_seq *seq = wk_core_find(core, &m->id);
    if (seq == NULL)
        return;
    struct wk_draft *d = &seq->draft;
    if (d->state != WK_DRAFT_ASKED || r->step != d->step) {
        core->stats.drafts_late++;
        return;
    }
    d->state = WK_DRAFT_READY;
    d->count = 0;
    if (r->code != ERR_OK) {
        on_refusal(core, d, r->code);
        return;
    }
    if (r->epoch != d->epoch || r->base_length != d->length) {
        core->stats.drafts_late++;
        d->opened = false; /* it does not hold what it should */
        return;
    }
    uint32_t count = r->ids_count < d->wanted ? r->ids_count : d->wanted;
    uint32_t usable =
        wk_verify_usable(r->ids, count, core->options.vocab_size, core->options.has_token);
    core->stats.drafts_garbage += usable < count;
    CHECK(usable <= MSG_DRAFT_IDS_MAX);
    if (usable > 0) /* an answer without drafts has no array */
        memcpy(d->ids, r->ids, usable * sizeof *r->ids);
    d->count = usable;
}

void wk_core_draft_msg(struct wk_core *core, const struct msg *m)
{
    if (m->type == MSG_DRAFT_REPLY) {
        /* Only a hello ends a silence: until then its words are about things long past. */
        if (!wk_core_drafter_up(core, core->now_us))
            return;
        core->drafter_seen_us = core->now_us;
        on_reply(core, m);
        return;
    }
    CHECK(m->type == MSG_DRAFT_HELLO_REPLY);
    const struct msg_draft_hello_reply *h = &m->u.draft_hello_reply;
    if (h->incarnation != core->drafter_incarnation) {
        core->draft_pause = 0;
        core->draft_pause_next = 1;
        forget_all(core);
        barred_forget(core);
        core->accept_rate = 1; /* another drafter begins with a clean sheet */
        core->accept_steps = 0;
        core->drafter_poor = false;
    }
    core->drafter_taps = h->tap_layer_count > 0;
    core->drafter_incarnation = h->incarnation;
    core->drafter_seen_us = core->now_us;
    core->drafter_max =
        h->draft_tokens_max < WK_SPEC_DRAFTS_MAX ? h->draft_tokens_max : WK_SPEC_DRAFTS_MAX;
}
