/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/wk_world.h - the batching core against a fake executor, kvmgr, drafter and router on
 * a virtual clock.
 *
 * The fake model's token is a hash of the whole history, read back through the block tables that
 * the plans carry and checked against the state slot, so a wrong table, slot, replay count or
 * position changes the text.  With shape.snapshot_every > 0 the fake kvmgr keeps committed blocks
 * and snapshots, gives them to whoever asks for their hashes, and drops them at random.
 * For test_wk_core.c alone: functions are static inline. */
#ifndef TESTS_UNIT_WK_WORLD_H
#define TESTS_UNIT_WK_WORLD_H

#include "tests/unit/wk_world_base.h"
#include "tests/unit/wk_world_kv.h"

/* ---- fake drafter ---- */

static inline void draft_reply(struct world *w, struct request *r, const struct msg *m)
{
    const struct msg_draft_propose *p = &m->u.draft_propose;
    uint64_t delay = 20 + rng_below(&w->rng, 1000);
    enum drafter_mode mode = w->drafter;
    if (mode == DRAFT_SILENT)
        return;
    if (mode == DRAFT_SLOW)
        delay += rng_below(&w->rng, 200000);
    if (w->drafter_us_per_ask > 0) {
        uint64_t from = w->drafter_free_us > w->now_us ? w->drafter_free_us : w->now_us;
        w->drafter_free_us = from + w->drafter_us_per_ask;
        delay = w->drafter_free_us - w->now_us;
    }
    struct item *it = later(w, delay);
    it->msg.type = MSG_DRAFT_REPLY;
    it->msg.id = m->id;
    struct msg_draft_reply *reply = &it->msg.u.draft_reply;
    reply->step = p->step;
    reply->epoch = p->epoch;
    if (!r->drafter_open || r->drafter_count != p->base_length) {
        reply->code = r->drafter_open ? ERR_EPOCH : ERR_NOT_FOUND;
        return;
    }
    memcpy(r->drafter_ids + r->drafter_count, p->ids, p->ids_count * sizeof *p->ids);
    r->drafter_count += p->ids_count;
    assert_int_equal(p->anchor, r->drafter_ids[r->drafter_count - 1]);
    reply->base_length = r->drafter_count;
    reply->code = w->drafter_code;
    if (reply->code != ERR_OK)
        return;
    reply->ids_count = rng_below(&w->rng, 8) ? p->draft_count : rng_below(&w->rng, 8);
    for (uint32_t j = 0; j < reply->ids_count; j++) {
        uint32_t at = r->drafter_count - r->q.prompt_count + j;
        it->ids[j] = at < r->text_count ? r->text[at] : 1;
        if (mode == DRAFT_WRONG || (mode == DRAFT_MIXED && rng_below(&w->rng, 3) == 0))
            it->ids[j] = rng_below(&w->rng, VOCAB);
        if (mode == DRAFT_GARBAGE && rng_below(&w->rng, 3) == 0)
            it->ids[j] = rng_u32(&w->rng);
    }
    if (rng_below(&w->rng, 10) == 0) { /* the same answer again, late */
        struct item *twice = later(w, delay + rng_below(&w->rng, 100000));
        uint64_t at = twice->at_us, order = twice->order;
        *twice = *it;
        twice->at_us = at;
        twice->order = order;
    }
}

static inline void draft_message(struct world *w, const struct msg *m)
{
    struct request *r = request_of(w, &m->id);
    if (m->type == MSG_DRAFT_OPEN) {
        r->drafter_open = true;
        w->drafter_opens++;
        r->drafter_count = m->u.draft_open.ids_count;
        memcpy(r->drafter_ids, m->u.draft_open.ids, r->drafter_count * sizeof(uint32_t));
    } else if (m->type == MSG_DRAFT_PROPOSE) {
        assert_true(m->u.draft_propose.draft_count >= 1 && m->u.draft_propose.draft_count <= 7);
        w->drafter_asked++;
        draft_reply(w, r, m);
    } else if (m->type == MSG_DRAFT_CONTEXT) {
        const struct msg_draft_context *c = &m->u.draft_context;
        assert_true(r->drafter_open && r->drafter_count == c->base_length);
        if (c->ids_count > 0)
            memcpy(r->drafter_ids + r->drafter_count, c->ids, c->ids_count * sizeof *c->ids);
        r->drafter_count += c->ids_count;
        w->drafter_fed += c->ids_count;
    } else {
        assert_int_equal(m->type, MSG_DRAFT_CLOSE);
        r->drafter_open = false;
    }
}

/* ---- fake router ---- */

static inline void router_message(struct world *w, const struct msg *m)
{
    struct request *r = request_of(w, &m->id);
    if (m->type == MSG_ASSIGN_REPLY) {
        if (m->u.assign_reply.code == ERR_OK) {
            r->live = true;
            return;
        }
        assert_true(strlen(m->u.assign_reply.text) > 0);
        assert_true(m->u.assign_reply.code == ERR_BUSY || m->u.assign_reply.code == ERR_DRAINING);
        struct item *it = later(w, 20000);
        it->arrive = (uint32_t)(r - w->reqs) + 1;
        return;
    }
    assert_int_equal(m->type, MSG_TOKENS_EMITTED);
    const struct msg_tokens *t = &m->u.tokens;
    assert_int_equal(t->seq, r->got_count);
    assert_int_equal(r->finishes, 0);
    for (uint32_t i = 0; i < t->count; i++) {
        assert_int_equal(t->ids[i], r->text[r->got_count]);
        r->got[r->got_count++] = t->ids[i];
        if (r->q.sampling.logprobs) {
            assert_true(t->logprob[i] == -(float)t->ids[i]);
            assert_int_equal(t->top_count, r->q.sampling.top_logprobs);
            for (uint32_t j = 0; j < t->top_count; j++)
                assert_int_equal(t->top_ids[i * t->top_count + j], t->ids[i] + j);
        }
    }
    if (t->finish != MSG_FINISH_NONE) {
        r->finishes++;
        r->finish_seen = t->finish;
        r->code = t->code;
        r->live = false;
        assert_true(t->has_receipt);
        r->receipt = t->receipt;
        snprintf(r->receipt_spec, sizeof r->receipt_spec, "%s", t->receipt.spec);
        assert_int_equal(t->receipt.output_tokens, r->got_count);
        assert_int_equal(t->receipt.prompt_tokens, r->q.prompt_count);
    }
}

/* ---- fake executor ---- */

static inline uint32_t *row(struct world *w, uint32_t entry, uint32_t position)
{
    uint32_t bt = w->options.shape.block_tokens;
    assert_true(position / bt < w->table_count[entry]);
    return &w->rows[w->table[entry][position / bt] * BT_MAX + position % bt];
}

static inline void tables_take(struct world *w, const struct wk_plan *p)
{
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        assert_true(!s->fresh || s->setup != WK_NONE);
        if (s->setup != WK_NONE) {
            assert_true(s->fresh != s->restore);
            w->setups[s->entry] = p->setups[s->setup];
            w->table_count[s->entry] = 0;
        }
        assert_int_equal(s->block_first, w->table_count[s->entry]);
        for (uint32_t j = 0; j < s->block_count; j++)
            w->table[s->entry][w->table_count[s->entry]++] = p->blocks[s->blocks_at + j];
    }
}

/* The model's own drafts: mostly right, some wrong, sometimes fewer; none without a next token. */
static inline void own_drafts(struct world *w, const struct wk_plan_seq *s,
                              struct wk_result_seq *ret, uint64_t state)
{
    const struct wk_plan_setup *setup = &w->setups[s->entry];
    ret->draft_count = 0;
    if (setup->mtp == 0 || ret->count == 0)
        return;
    ret->draft_count = rng_below(&w->rng, 8) ? setup->mtp : rng_below(&w->rng, setup->mtp + 1);
    uint32_t position = s->position_start + s->logits_from + ret->count + 1;
    for (uint32_t k = 0; k < ret->draft_count; k++) {
        ret->draft_ids[k] = model_token(state, position + k, setup);
        state = mix(state, ret->draft_ids[k]);
        if (rng_below(&w->rng, 8) == 0)
            ret->draft_ids[k] = rng_below(&w->rng, VOCAB);
    }
}

static inline void seq_run(struct world *w, const struct wk_plan_seq *s, const uint32_t *ids,
                           struct wk_result_seq *ret)
{
    struct state_slot *slot = &w->slots[s->state_slot];
    assert_true(s->state_slot < w->slot_count && s->row_count >= 1);
    if (s->restore) {
        assert_int_equal(w->snaps[s->restore_slot], SNAP_KEPT);
        *slot = w->slots[s->restore_slot];
    }
    if (s->fresh)
        memset(slot, 0, sizeof *slot);
    assert_true(s->replay_count <= slot->journal_count);
    for (uint32_t j = 0; j < s->replay_count; j++, slot->count++)
        slot->hash = mix(slot->hash, slot->journal[j]);
    slot->journal_count = 0;
    assert_int_equal(slot->count, s->position_start);
    uint64_t state = slot->hash, history = 0;
    for (uint32_t p = 0; p < s->position_start; p++)
        history = mix(history, *row(w, s->entry, p));
    assert_true(history == state);
    ret->entry = s->entry;
    ret->count = 0;
    ret->top_count = w->setups[s->entry].top_logprobs;
    uint64_t good = state;
    for (uint32_t j = 0; j < s->row_count; j++) {
        uint32_t *at = row(w, s->entry, s->position_start + j);
        assert_false(w->known[(uint32_t)(at - w->rows) / BT_MAX]); /* shared or to be shared */
        *at = ids[j];
        state = mix(state, ids[j]);
        if (j >= s->logits_from && (ret->count == j - s->logits_from)) {
            uint32_t id = model_token(state, s->position_start + j + 1, &w->setups[s->entry]);
            uint32_t n = ret->count++;
            good = mix(state, id);
            ret->ids[n] = id;
            ret->logprob[n] = -(float)id;
            for (uint32_t k = 0; k < ret->top_count; k++)
                ret->top_ids[n * ret->top_count + k] = id + k;
            if (s->journal && j + 1 < s->row_count && ids[j + 1] != id)
                ret->count |= 0x80000000u; /* the first miss ends it */
        }
    }
    ret->count &= 0x7fffffffu;
    own_drafts(w, s, ret, good);
    if (s->journal) {
        slot->journal_count = s->row_count;
        memcpy(slot->journal, ids, s->row_count * sizeof *ids);
    } else {
        slot->count += s->row_count;
        slot->hash = state;
    }
    if (s->snapshot) {
        assert_int_equal(w->snaps[s->snapshot_slot], SNAP_GRANTED);
        w->slots[s->snapshot_slot] = *slot;
    }
}

static inline void note_first_slices(struct world *w, const struct wk_plan *p)
{
    for (uint32_t i = 0; i < p->seq_count; i++) {
        if (p->seqs[i].setup == WK_NONE)
            continue;
        for (uint32_t k = 0; k < ENTRIES; k++)
            if (w->leases[k].lease != 0 && w->leases[k].slot == p->seqs[i].state_slot) {
                struct request *r = &w->reqs[w->leases[k].request];
                if (r->sliced_us == 0)
                    r->sliced_us = w->now_us;
            }
    }
}

static inline void plan_run(struct world *w, const struct wk_plan *p)
{
    struct err_detail d;
    uint32_t rows = p->row_count, layers = 1;
    assert_false(w->running);
    assert_int_equal(wk_plan_admit(p, w->step, w->core ? p->epoch : 0, &d), ERR_OK);
    w->step = p->step;
    w->running = true;
    note_first_slices(w, p);
    tables_take(w, p);
    w->result.step = p->step;
    w->result.plan_hash = p->hash;
    w->result.status = ERR_OK;
    w->result.seq_count = 0;
    if (w->fail_steps > 0 && rng_below(&w->rng, 20) == 0) {
        w->fail_steps--;
        w->result.status = ERR_IO;
        w->batch_count = p->kind == WK_PLAN_DECODE ? w->batch_count : 0;
    } else if (p->kind == WK_PLAN_ABANDON) {
        assert_true(w->batch_count > 0 && p->seq_count == 0);
        w->batch_count = 0;
    } else if (p->kind == WK_PLAN_PREFILL) {
        if (p->begin) {
            assert_int_equal(w->batch_count, 0);
            w->batch_count = p->seq_count;
            w->batch_layer = 0;
            memcpy(w->batch, p->seqs, p->seq_count * sizeof *p->seqs);
            memcpy(w->batch_ids, p->ids, p->row_count * sizeof *p->ids);
        }
        assert_true(w->batch_count > 0 && p->layer_end > w->batch_layer);
        assert_true(p->layer_end <= w->options.layer_count);
        layers = p->layer_end - w->batch_layer;
        assert_true(w->options.slice_layers_max == 0 || layers <= w->options.slice_layers_max);
        w->batch_layer = p->layer_end;
        rows = 0;
        for (uint32_t i = 0; i < w->batch_count; i++)
            rows += w->batch[i].row_count;
        assert_true(rows <= w->options.slice_rows_max);
        if (p->finish) {
            assert_int_equal(w->batch_layer, w->options.layer_count);
            for (uint32_t i = 0; i < w->batch_count; i++)
                seq_run(w, &w->batch[i], w->batch_ids + w->batch[i].ids_at, &w->result.seqs[i]);
            w->result.seq_count = w->batch_count;
            w->batch_count = 0;
        }
    } else {
        for (uint32_t i = 0; i < p->seq_count; i++)
            seq_run(w, &p->seqs[i], p->ids + p->seqs[i].ids_at, &w->result.seqs[i]);
        w->result.seq_count = p->seq_count;
        layers = w->options.layer_count;
        if (p->row_count > w->step_rows_max)
            w->step_rows_max = p->row_count;
    }
    double share = (double)layers / w->options.layer_count;
    w->result.step_us = (uint64_t)(5 + share * (w->us_fixed + w->us_per_row * rows));
    if (p->kind == WK_PLAN_PREFILL && w->result.step_us > w->slice_us_max)
        w->slice_us_max = w->result.step_us;
    later(w, w->result.step_us)->type = WK_EV_DONE;
}

/* ---- the loop ---- */

static inline void step(struct world *w, struct wk_event *event)
{
    event->now_us = w->now_us;
    event->now_unix_us = w->now_us + 1000000000000ull;
    arena_reset(&w->arena);
    wk_core_step(w->core, event, &w->actions);
    assert_false(w->arena.overflow);
    w->wake_us = w->actions.wake_us;
    for (uint32_t i = 0; i < w->actions.count; i++) {
        const struct wk_action *a = &w->actions.items[i];
        if (a->type == WK_ACT_RUN) {
            assert_int_equal(i + 1, w->actions.count);
            plan_run(w, w->actions.plan);
        } else if (a->type == WK_ACT_KVMGR) {
            kv_message(w, &a->msg);
        } else if (a->type == WK_ACT_DRAFTER) {
            draft_message(w, &a->msg);
        } else {
            router_message(w, &a->msg);
        }
    }
}

static inline void event_msg(struct world *w, struct msg *m)
{
    struct wk_event e = {.type = WK_EV_MSG, .msg = m};
    step(w, &e);
}

static inline void event_plain(struct world *w, enum wk_event_type type)
{
    struct wk_event e = {
        .type = type, .kv_epoch = (uint32_t)w->kv_incarnation, .shape = w->options.shape};
    if (type == WK_EV_KV_ATTACHED) {
        e.granted_count = grants(w, w->granted);
        e.granted = w->granted;
    }
    step(w, &e);
}

static inline void assign(struct world *w, struct request *r)
{
    struct msg m = {.type = MSG_WORKER_ASSIGN, .id = r->id, .u.request = r->q};
    m.u.request.ids_count = r->q.prompt_count + r->got_count;
    memcpy(r->ids + r->q.prompt_count, r->got, r->got_count * sizeof *r->got);
    event_msg(w, &m);
}

static inline void kv_lose(struct world *w)
{
    w->kv_restart_pending = true;
    event_plain(w, WK_EV_KV_DETACHED);
}

static inline void kv_return(struct world *w)
{
    w->kv_restart_pending = false;
    w->kv_incarnation++;
    for (uint32_t i = 0; i < ENTRIES; i++)
        if (w->leases[i].lease != 0)
            lease_drop(w, &w->leases[i]);
    for (uint32_t s = w->slot_count; s < w->slot_count + w->snap_count; s++)
        if (w->snaps[s] == SNAP_GRANTED)
            w->snaps[s] = SNAP_FREE;
    for (uint32_t i = 0; i < w->queue_end; i++) /* its old answers die with it */
        if (w->queue[i].used &&
            (w->queue[i].msg.type == MSG_KV_OPEN_REPLY ||
             w->queue[i].msg.type == MSG_KV_SNAPSHOT_REPLY ||
             w->queue[i].msg.type == MSG_KV_STATE || w->queue[i].msg.type == MSG_KV_EXTEND_REPLY))
            w->queue[i].used = false;
    event_plain(w, WK_EV_KV_ATTACHED);
}

/* Runs the next thing.  False when nothing is left but waiting. */
static inline bool advance(struct world *w)
{
    if (w->kv_restart_pending && wk_core_quiet(w->core)) {
        kv_return(w);
        return true;
    }
    struct item *it = earliest(w);
    if (w->wake_us != 0 && (it == NULL || w->wake_us < it->at_us)) {
        if (w->wake_us > w->now_us)
            w->now_us = w->wake_us;
        event_plain(w, WK_EV_TICK);
        return true;
    }
    if (it == NULL)
        return false;
    struct item now = *it;
    it->used = false;
    w->now_us = now.at_us;
    if (now.arrive != 0) {
        struct request *r = &w->reqs[now.arrive - 1];
        if (r->finishes == 0 && !r->cancelled)
            assign(w, r);
        return true;
    }
    if (now.type == WK_EV_DONE) {
        struct wk_event e = {.type = WK_EV_DONE, .result = &w->result};
        w->running = false;
        step(w, &e);
        return true;
    }
    if (now.type != WK_EV_MSG) {
        event_plain(w, now.type);
        return true;
    }
    if (now.msg.type == MSG_KV_OPEN_REPLY)
        now.msg.u.kv_open_reply.blocks = now.ids;
    if (now.msg.type == MSG_KV_EXTEND_REPLY)
        now.msg.u.kv_extend_reply.blocks = now.ids;
    if (now.msg.type == MSG_KV_STATE)
        now.msg.u.kv_state.granted = now.ids;
    if (now.msg.type == MSG_KV_SNAPSHOT_REPLY)
        now.msg.u.kv_snapshot_reply.granted = now.ids;
    if (now.msg.type == MSG_DRAFT_REPLY)
        now.msg.u.draft_reply.ids = now.msg.u.draft_reply.ids_count > 0 ? now.ids : NULL;
    event_msg(w, &now.msg);
    return true;
}

static inline void hello(struct world *w)
{
    struct msg m = {.type = MSG_DRAFT_HELLO_REPLY,
                    .u.draft_hello_reply = {.incarnation = w->drafter_incarnation,
                                            .source = "ngram",
                                            .tap_layer_count = w->drafter_taps,
                                            .draft_tokens_max = 7}};
    if (w->drafter != DRAFT_NONE && w->drafter != DRAFT_SILENT)
        event_msg(w, &m);
}

/* The shell's heartbeats: kvmgr is alive, the drafter too unless silent. */
static inline void heartbeat(struct world *w)
{
    if (!w->kv_restart_pending) {
        struct item *it = later_kv(w, MSG_KV_STATE);
        it->msg.u.kv_state.blocks_free = w->block_count - w->block_used;
        it->msg.u.kv_state.granted_count = grants(w, it->ids);
    }
    hello(w);
}

/* ---- set-up ---- */

static inline struct world *world_new(uint64_t seed, const struct wk_core_options *options,
                                      uint32_t block_count)
{
    struct world *w = calloc(1, sizeof *w);
    rng_init(&w->rng, seed);
    w->queue = calloc(QUEUE_MAX, sizeof *w->queue);
    w->options = *options;
    w->block_count = block_count;
    w->slot_count = options->seqs_max;
    w->kv_incarnation = 1;
    w->drafter_incarnation = 7;
    w->now_us = 1000000;
    w->us_per_row = 700;
    w->us_fixed = 5000;
    w->options.shape.block_count = block_count;
    w->snap_count =
        options->shape.snapshot_every > 0 ? 1 + options->shape.snapshot_every % SNAPS : 0;
    w->options.shape.slot_count = w->slot_count + w->snap_count;
    w->options.shape.live_slots = w->slot_count;
    uint32_t pool = block_count * options->shape.block_tokens;
    if (pool < w->options.context_max)
        w->options.context_max = pool;
    memset(has_token, 1, sizeof has_token);
    has_token[3] = 0;
    w->core = wk_core_create(&w->options);
    w->actions.count_max = wk_core_actions_max(&w->options);
    w->actions.items = calloc(w->actions.count_max, sizeof *w->actions.items);
    w->result.seqs = calloc(ENTRIES, sizeof *w->result.seqs);
    arena_init(&w->arena, 1 << 16, 1 << 22);
    w->actions.arena = &w->arena;
    event_plain(w, WK_EV_KV_ATTACHED);
    return w;
}

static inline void world_free(struct world *w)
{
    wk_core_destroy(&w->core);
    arena_fini(&w->arena);
    free(w->actions.items);
    free(w->result.seqs);
    free(w->queue);
    free(w);
}

static inline struct request *request_add(struct world *w, uint32_t prompt, uint32_t max,
                                          const char *spec)
{
    struct request *r = &w->reqs[w->req_count];
    memcpy(r->id.bytes, &w->req_count, sizeof w->req_count);
    w->req_count++;
    snprintf(r->spec, sizeof r->spec, "%s", spec);
    r->q = (struct msg_request){.session_key = "s",
                                .cache_salt = "",
                                .effort = "",
                                .client_id = "",
                                .spec = r->spec,
                                .prompt_count = prompt,
                                .ids = r->ids,
                                .limits = {.output_tokens_max = max}};
    r->q.sampling.seed = rng_u64(&w->rng);
    r->q.sampling.temperature = 1;
    for (uint32_t i = 0; i < prompt; i++)
        r->ids[i] = rng_below(&w->rng, VOCAB);
    return r;
}

static const uint32_t stop_ids[] = {STOP_ID};

static inline struct wk_core_options options_of(uint32_t seqs, uint32_t block_tokens)
{
    struct wk_core_options o = {
        .seqs_max = seqs,
        .slice_rows_max = 64,
        .slice_ms = 200,
        .decode_rows_max = 64,
        .deadline_ms = 50,
        .ids_max = 1 << 16,
        .context_max = 400,
        .vocab_size = VOCAB,
        .layer_count = 8,
        .has_token = has_token,
        .stop_id_count = 1,
        .stop_ids = stop_ids,
        .shape = {.block_tokens = block_tokens,
                  .block_count = 1,
                  .slot_count = seqs,
                  .live_slots = seqs},
        .prefill_us_per_row = 700,
        .decode_us_per_step = 5000,
    };
    struct err_detail d;
    assert_int_equal(wk_ema_set_parse("2,4,7", &o.ema, &d), ERR_OK);
    o.ema.alpha = 0.25;
    o.ema.margin = 1;
    o.ema.steps_min = 4;
    o.ema.saturate = true;
    assert_int_equal(wk_spec_parse("fixed:7", &o.spec, &d), ERR_OK);
    return o;
}

static inline void run_all(struct world *w)
{
    uint64_t beat = w->now_us;
    for (uint32_t turns = 0; turns < 400000; turns++) {
        bool over = true;
        for (uint32_t i = 0; i < w->req_count; i++)
            over &= w->reqs[i].finishes > 0 || w->reqs[i].cancelled;
        if (over && !w->running && wk_core_quiet(w->core))
            return;
        if (w->now_us >= beat) {
            heartbeat(w);
            beat = w->now_us + 200000;
        }
        if (!advance(w)) {
            w->now_us = beat;
            event_plain(w, WK_EV_TICK);
        }
    }
    fail_msg("does not end");
}

static inline void check_over(struct world *w)
{
    for (uint32_t i = 0; i < 2000 && advance(w); i++) /* answers still under way */
        ;
    const struct msg_ledger *l = &wk_core_stats(w->core)->ledger;
    assert_int_equal(l->live, 0);
    assert_int_equal(l->accepted, l->finished + l->failed + l->cancelled);
    assert_int_equal(w->block_used, 0);
    for (uint32_t i = 0; i < ENTRIES; i++)
        assert_int_equal(w->leases[i].lease, 0);
    assert_int_equal(wk_core_leases(w->core, NULL, 0), 0);
    struct wk_census c;
    wk_core_census(w->core, &c);
    assert_int_equal(c.waiting + c.opening + c.prefill + c.decode + c.zombie, 0);
    for (uint32_t i = 0; i < w->req_count; i++) {
        const struct request *r = &w->reqs[i];
        if (r->cancelled)
            continue;
        assert_int_equal(r->finishes, 1);
        assert_int_equal(r->finish_seen, r->finish);
        assert_int_equal(r->got_count, r->text_count);
        assert_memory_equal(r->got, r->text, r->text_count * sizeof *r->text);
    }
}

#endif
