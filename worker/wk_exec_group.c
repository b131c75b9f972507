/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_exec_state.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"
#include "worker/wk_fabric.h"

/* Between two looks of a following rank at whether it should end. */
#define FOLLOW_WAIT_MS 100u
#define REFUSED_US     10000000u

static void grouped_set(struct wk_exec *x, bool grouped)
{
    atomic_store(&x->grouped, grouped);
    loop_wake(x->options.waker);
}

void wk_exec_group_lost(struct wk_exec *x, enum err e, const char *text)
{
    struct err_detail why = {{0}};
    if (text == NULL) {
        wk_fabric_fault(wk_ranks_fabric(x->ranks), &why);
        text = why.text;
    }
    struct err_detail fault;
    struct wk_plan_dump_head head = {.rank = wk_fabric_rank(wk_ranks_fabric(x->ranks)),
                                     .ranks = wk_fabric_ranks(wk_ranks_fabric(x->ranks)),
                                     .epoch = wk_fabric_epoch(wk_ranks_fabric(x->ranks)),
                                     .now_us = clock_mono_us(),
                                     .reason = text};
    if (x->dump_path[0] != '\0' && wk_plan_dump(x->ring, &head, x->dump_path, &fault) != ERR_OK)
        log_warn(WORKER, "plans not dumped", "reason=\"%s\"", fault.text);
    log_warn(WORKER, "group lost", "code=%s step=%" PRIu64 " reason=\"%s\"", err_name(e),
             x->step_last, text);
    wk_exec_batch_drop(x);
    grouped_set(x, false);
}

/* Whatever must be the same on all ranks, or they would not compute the same. */
static struct hash128 settings_of(const struct wk_exec *x)
{
    const struct wk_exec_options *o = &x->options;
    const struct model_info *info = x->loaded.info;
    struct hash_xxh3 h;
    struct model_group group = wk_ranks_group(x->ranks);
    uint32_t numbers[] = {o->entries,        o->plan_seqs,
                          o->slice_rows_max, o->decode_rows_max,
                          o->context_max,    (uint32_t)o->numerics,
                          group.ranks,       group.moe,
                          group.interleave,  o->group};
    hash_xxh3_init(&h);
    hash_xxh3_add(&h, info->model_fp.bytes, sizeof info->model_fp.bytes);
    hash_xxh3_add(&h, info->kernels, strlen(info->kernels));
    hash_xxh3_add(&h, numbers, sizeof numbers);
    hash_xxh3_add(&h, TANDEM_VERSION, sizeof TANDEM_VERSION);
    return hash_xxh3_end(&h);
}

/* ERR_CORRUPT: the canary comes out otherwise than before. */
static enum err group_canary(struct wk_exec *x, struct err_detail *detail)
{
    struct wk_canary canary = wk_exec_canary(x);
    struct wk_loaded loaded = x->loaded;
    enum err e = ERR_OK;
    wk_canary_run(&canary, &loaded);
    if (x->settled &&
        memcmp(loaded.canary_output, x->loaded.canary_output, sizeof loaded.canary_output) != 0)
        e = err_set(detail, ERR_CORRUPT, "canary: the group computes otherwise than before");
    TRY(wk_ranks_verdict(x->ranks, e, detail));
    if (!x->settled) /* nobody else reads it before WK_NEWS_LOADED */
        x->loaded = loaded;
    return ERR_OK;
}

/* The probe and the canary of all ranks together, where one of them has seen neither: at the
 * start, and when one was restarted. */
static enum err group_settle(struct wk_exec *x, struct err_detail *detail)
{
    struct wk_fabric *f = wk_ranks_fabric(x->ranks);
    uint32_t needs = !x->settled, all[WK_RANKS_MAX], any = 0;
    TRY(wk_all_gather(f, &needs, sizeof needs, all));
    for (uint32_t r = 0; r < wk_fabric_ranks(f); r++)
        any |= all[r];
    if (any == 0)
        return ERR_OK;
    TRY(wk_ranks_probe(x->ranks, detail));
    TRY(group_canary(x, detail));
    x->settled = true;
    return ERR_OK;
}

/* Said once, then every REFUSED_US while it lasts; nobody would hear of a refusal that is repeated
 * without a pause. */
static void group_refused(struct wk_exec *x, enum err e, const char *text)
{
    struct timespec piece = {0, 50000000};
    uint64_t now = clock_mono_us();
    if (e != x->refused || now - x->refused_us >= REFUSED_US) {
        log_error(WORKER, "group refused", "code=%s step=%" PRIu64 " reason=\"%s\"", err_name(e),
                  x->step_last, text);
        x->refused = e;
        x->refused_us = now;
    }
    for (uint32_t i = 0; i < 20 && !atomic_load(&x->ending); i++)
        nanosleep(&piece, NULL);
}

/* A group that breaks while it forms is formed again; one that is whole and no good is refused. */
static enum err group_try(struct wk_exec *x, struct err_detail *detail)
{
    enum err e;
    for (;;) {
        TRY(wk_ranks_form(x->ranks, &x->settings, &x->ending, detail));
        e = group_settle(x, detail);
        if (e == ERR_OK)
            return e;
        if (wk_fabric_fault(wk_ranks_fabric(x->ranks), NULL) == ERR_OK)
            break;
    }
    wk_fabric_leave(wk_ranks_fabric(x->ranks));
    return e;
}

/* Whatever speaks against the group may pass, since it takes another rank: that one is restarted
 * with other settings, the cable is mended.  ERR_CANCELLED alone comes back. */
static enum err group_form(struct wk_exec *x)
{
    struct err_detail detail = {{0}};
    enum err e;
    wk_exec_batch_drop(x);
    while ((e = group_try(x, &detail)) != ERR_OK) {
        if (e == ERR_CANCELLED)
            return e;
        group_refused(x, e, detail.text);
    }
    log_info(WORKER, "group formed", "rank=%u ranks=%u epoch=%u",
             wk_fabric_rank(wk_ranks_fabric(x->ranks)), wk_fabric_ranks(wk_ranks_fabric(x->ranks)),
             wk_fabric_epoch(wk_ranks_fabric(x->ranks)));
    grouped_set(x, true);
    return ERR_OK;
}

enum err wk_exec_group_begin(struct wk_exec *x)
{
    x->settings = settings_of(x);
    return group_form(x);
}

/* Of this rank's own model and its share of the rows. */
static struct kv_geometry geometry_of(const struct wk_exec *x)
{
    const struct model_info *info = x->loaded.info;
    struct model_group group = wk_ranks_group(x->ranks);
    bool shared = group.interleave > 0; /* else every rank keeps all rows */
    return (struct kv_geometry){.dsa_layers = info->dsa_layers,
                                .latent_dim = info->latent_dim,
                                .index_dim = info->index_dim,
                                .index_kpool = info->index_kpool,
                                .rank = shared ? group.rank : 0,
                                .ranks = shared ? group.ranks : 1,
                                .interleave = group.interleave,
                                .state_bytes = info->state_bytes};
}

static struct wk_ranks_shape shape_of(const struct wk_exec *x)
{
    struct wk_ranks_shape s;
    memset(&s, 0, sizeof s); /* its bytes are told */
    s.geometry = geometry_of(x);
    s.geometry.block_tokens = x->kv.block_tokens;
    if (s.geometry.ranks == 1)
        s.geometry.interleave = x->kv.block_tokens;
    s.geometry.kv_dtype = KV_F32 + (uint32_t)x->kv.kv_type;
    s.geometry.index_dtype = KV_F32 + (uint32_t)x->kv.index_type;
    s.block_count = x->kv.block_count;
    s.geometry.snapshot_dtype = KV_F32 + (uint32_t)x->kv.snapshot_type;
    s.live_count = x->kv.slot_count;
    s.slot_count = x->kv.slot_count + x->kv.snapshot_count;
    s.epoch = x->epoch;
    s.step_last = x->step_last;
    return s;
}

/* A shape that a rank refuses is no good until something else changes: another arena, room. */
static void shape_failed(struct wk_exec *x, enum err e, bool refused, const char *text)
{
    if (!refused) {
        wk_exec_group_lost(x, e, text);
        return;
    }
    wk_exec_batch_drop(x);
    grouped_set(x, false);
    group_refused(x, e, text);
}

enum err wk_exec_shape_tell(struct wk_exec *x, struct hash128 *ret_memory)
{
    struct err_detail detail = {{0}};
    struct wk_ranks_shape shape = shape_of(x);
    for (;;) {
        if (!wk_ranks_formed(x->ranks))
            TRY(group_form(x));
        enum err e = wk_ranks_tell_shape(x->ranks, &shape, ret_memory, &detail);
        if (e == ERR_OK)
            return e;
        shape_failed(x, e, e == ERR_UNSUPPORTED, detail.text);
        if (atomic_load(&x->attaches) > 0)
            return ERR_BUSY;
    }
}

enum err wk_exec_seal_tell(struct wk_exec *x, const struct wk_seal *seals, uint32_t count)
{
    struct err_detail detail = {{0}};
    if (!wk_ranks_formed(x->ranks))
        return ERR_CLOSED; /* with the group went what was to be kept */
    enum err e = wk_ranks_tell_seals(x->ranks, seals, count, &detail);
    if (e != ERR_OK)
        wk_exec_group_lost(x, e, detail.text);
    return e;
}

static struct wk_plan_limits heard_limits(const struct wk_exec *x)
{
    return (struct wk_plan_limits){
        .entries = x->options.entries,
        .live_slots = x->kv.slot_count,
        .slot_count = x->kv.slot_count + x->kv.snapshot_count,
        .block_count = x->kv.block_count,
        .table_max = x->loaded.context_max / x->kv.block_tokens + 2,
        .context_max = x->loaded.context_max,
        .vocab_size = x->loaded.info->vocab_size,
        .layer_count = x->loaded.info->layer_count,
    };
}

static enum err heard_admit(void *arg, const struct wk_plan *p, struct err_detail *detail)
{
    struct wk_exec *x = arg;
    struct wk_tables_room room = wk_exec_room(x);
    wk_plan_ring_add(x->ring, p, clock_mono_us());
    return wk_tables_admit(x->tables, &room, p, detail);
}

static void shape_take(struct wk_exec *x, const struct wk_ranks_heard *heard)
{
    uint32_t rows = x->options.slice_rows_max > x->options.decode_rows_max
                        ? x->options.slice_rows_max
                        : x->options.decode_rows_max;
    wk_exec_batch_drop(x);
    x->kv = heard->kv;
    x->epoch = heard->shape.epoch;
    x->step_last = heard->shape.step_last;
    uint32_t table = x->loaded.context_max / x->kv.block_tokens + 2;
    wk_tables_blocks(x->tables, table);
    wk_plan_destroy(&x->heard); /* as wide as the core's own, whose tables hang on the shape too */
    x->heard = wk_plan_create(x->options.plan_seqs, rows, rows + 4 * x->options.entries + table,
                              x->loaded.context_max);
}

void wk_exec_follow(struct wk_exec *x)
{
    struct err_detail detail = {{0}};
    struct wk_ranks_heard heard = {.order = WK_ORDER_NONE};
    enum err e = ERR_OK;
    if (!wk_ranks_formed(x->ranks) && group_form(x) != ERR_OK)
        return;
    struct wk_plan_limits limits = {0};
    struct kv_geometry geometry = geometry_of(x);
    if (x->heard != NULL)
        limits = heard_limits(x);
    struct wk_ranks_hear want = {.geometry = &geometry,
                                 .limits = &limits,
                                 .plan = x->heard,
                                 .stop = &x->ending,
                                 .step_last = x->step_last,
                                 .epoch = x->epoch,
                                 .admit = heard_admit,
                                 .arg = x};
    e = wk_ranks_hear(x->ranks, &want, FOLLOW_WAIT_MS, &heard, &detail);
    if (e == ERR_OK && heard.order == WK_ORDER_SHAPE)
        shape_take(x, &heard);
    if (e == ERR_OK && heard.order == WK_ORDER_PLAN) {
        e = wk_exec_carry_out(x, x->heard);
        wk_fabric_fault(wk_ranks_fabric(x->ranks), &detail);
    }
    if (e != ERR_OK)
        shape_failed(x, e, heard.order == WK_ORDER_SHAPE, detail.text);
}
