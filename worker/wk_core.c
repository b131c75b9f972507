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
#define DRAFT_US_GUESS  100.0 /* of one sequence, before the first was waited for */
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
    core->hashes = mem_take_array((size_t)core->entry_count * blocks_max, sizeof *core->hashes);
    for (uint32_t i = 0; i < core->entry_count; i++) {
        core->seqs[i].magic = WK_SEQ_MAGIC;
        wk_blocks_init(&core->seqs[i].kv, core->block_ids + (size_t)i * blocks_max,
                       core->hashes + (size_t)i * blocks_max, blocks_max);
    }
    core->ids = wk_ids_create(o->ids_max, core->entry_count, o->context_max);
    uint32_t rows = o->slice_rows_max > o->decode_rows_max ? o->slice_rows_max : o->decode_rows_max;
    /* A sequence that comes with blocks brings its whole table and, for penalties, its tokens. */
    core->plan = wk_plan_create(wk_core_plan_seqs(o), rows,
                                rows + 4 * core->entry_count + blocks_max, o->context_max);
    core->ring = wk_plan_ring_create(RING_BYTES);
}

static void shape_set(struct wk_core *core, const struct wk_arena_shape *shape)
{
    CHECK(shape->block_tokens > 0 && shape->block_count > 0 && shape->slot_count > 0);
    CHECK(shape->block_tokens == core->options.shape.block_tokens);
    CHECK(shape->live_slots > 0 && shape->live_slots <= shape->slot_count);
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
    wk_cost_init(&core->cost_draft, 0, DRAFT_US_GUESS);
    core->draft_pause_next = 1;
    core->step = options->step_first;
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
    mem_give(core->hashes);
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

void wk_core_free(struct wk_core *core, struct wk_seq *seq)
{
    CHECK(!seq->in_flight && !seq->in_batch && seq->kv.state != WK_KV_HELD);
    CHECK(seq->snap_tokens == 0);
    uint32_t entry = wk_core_entry(core, seq), at = 0;
    wk_ids_drop(core->ids, entry);
    while (at < core->order_count && core->order[at] != entry)
        at++;
    CHECK(at < core->order_count);
    core->order_count--;
    memmove(&core->order[at], &core->order[at + 1], (core->order_count - at) * sizeof *core->order);
    struct wk_blocks kv = seq->kv;
    wk_blocks_reset(&kv);
    kv.hash_count = 0;
    *seq = (struct wk_seq){.magic = WK_SEQ_MAGIC, .state = WK_SEQ_FREE, .kv = kv};
}

void wk_core_flush_end(struct wk_core *core, struct wk_seq *seq)
{
    CHECK(seq->state == WK_SEQ_ZOMBIE && seq->flush && !seq->in_flight);
    wk_core_kv_release(core, seq, true);
    wk_core_free(core, seq);
}

static void on_msg(struct wk_core *core, const struct msg *m)
{
    struct wk_seq *seq;
    switch (m->type) {
    case MSG_WORKER_ASSIGN:
        wk_core_assign(core, m);
        break;
    case MSG_WORKER_CANCEL:
        seq = wk_core_find(core, &m->id);
        if (seq != NULL)
            wk_core_fail(core, seq, MSG_FINISH_CANCELLED, ERR_CANCELLED);
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
        wk_core_router_state(core, m);
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
        wk_core_hand_back(core);
    } else {
        uint64_t deadline_us = wk_core_deadlines(core);
        if (deadline_us > core->now_us)
            wake_at(ret_actions, deadline_us);
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

bool wk_core_draining(const struct wk_core *core)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    return core->draining || core->stopping;
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
    ret_info->state = wk_core_draining(core) ? MSG_WORKER_DRAINING : MSG_WORKER_READY;
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
    bool well = wk_core_drafter_up(core, now_us) && !core->drafter_poor;
    ret_info->drafter_state = core->drafter_incarnation == 0 ? 0 : well ? 1 : 2;
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

void wk_core_key(struct wk_core *core, const struct block_hash_key *key)
{
    CHECK_OBJ(core, WK_CORE_MAGIC);
    CHECK(!core->kv_attached);
    core->options.key = *key;
    for (uint32_t i = 0; i < core->entry_count; i++)
        core->seqs[i].kv.hash_count = 0; /* made with the key before */
}
