/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_shell_status.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/str.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"
#include "router/rt_core.h"
#include "router/rt_shell_look.h"
#include "router/rt_params.h"
#include "router/rt_table.h"

#define STATUS_MAGIC     0x52545353u
#define REDIS_DOWN_TICKS 20u /* a second: after that the state says so */

enum rt_metric {
#define COUNTER(ident, name, labels, help)            RT_METRIC_##ident,
#define GAUGE(ident, name, labels, help)              RT_METRIC_##ident,
#define HISTOGRAM(ident, name, labels, buckets, help) RT_METRIC_##ident,
#include "router/rt_metrics.def"
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
    RT_METRIC_COUNT
};

static const struct metric_row rt_metric_rows[RT_METRIC_COUNT] = {
#define COUNTER(ident, name, labels, help) {METRIC_COUNTER, name, labels, NULL, help},
#define GAUGE(ident, name, labels, help)   {METRIC_GAUGE, name, labels, NULL, help},
#define HISTOGRAM(ident, name, labels, buckets, help)                                              \
    {METRIC_HISTOGRAM, name, labels, &buckets, help},
#include "router/rt_metrics.def"
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
};

struct rt_shell_status {
    uint32_t magic;
    struct rt_core *core;
    struct status *status;
    struct redis *redis;        /* NULL = off */
    struct rt_shell_look *look; /* NULL without redis */
    uint32_t redis_down_ticks;
    uint64_t malformed;
    enum err (*command)(void *arg, const struct status_command *c, struct err_detail *detail);
    void *command_arg;
    struct metric values[RT_METRIC_COUNT];
};

static void set(struct rt_shell_status *s, enum rt_metric m, double value)
{
    metric_set(&s->values[m], value);
}

static void refresh_stats(struct rt_shell_status *s, const struct rt_stats *t)
{
    set(s, RT_METRIC_finished_stop, (double)t->finished_stop);
    set(s, RT_METRIC_finished_length, (double)t->finished_length);
    set(s, RT_METRIC_submits, (double)t->submits);
    set(s, RT_METRIC_resubmits, (double)t->resubmits);
    set(s, RT_METRIC_refused_busy, (double)t->refused_busy);
    set(s, RT_METRIC_refused_context, (double)t->refused_context);
    set(s, RT_METRIC_refused_other, (double)t->refused_other);
    set(s, RT_METRIC_assigned, (double)t->assigned);
    set(s, RT_METRIC_resumed, (double)t->resumed);
    set(s, RT_METRIC_requeued, (double)t->requeued);
    set(s, RT_METRIC_tokens_in, (double)t->tokens_in);
    set(s, RT_METRIC_tokens_out, (double)t->tokens_out);
    set(s, RT_METRIC_tokens_repeated, (double)t->tokens_repeated);
    set(s, RT_METRIC_gaps, (double)t->gaps);
    set(s, RT_METRIC_strays, (double)t->strays);
    set(s, RT_METRIC_unexpected, (double)t->unexpected);
    set(s, RT_METRIC_unsent, (double)t->unsent);
    set(s, RT_METRIC_workers_lost_total, (double)t->workers_lost);
    set(s, RT_METRIC_gateways_lost_total, (double)t->gateways_lost);
    set(s, RT_METRIC_canaries, (double)t->canaries);
    set(s, RT_METRIC_canaries_failed, (double)t->canaries_failed);
}

static void refresh_affinity(struct rt_shell_status *s, const struct rt_info *info)
{
    static const enum rt_metric rows[RT_AFFINITY_COUNT] = {
        [RT_HIT_SESSION] = RT_METRIC_hit_session, [RT_HIT_PREFIX] = RT_METRIC_hit_prefix,
        [RT_HIT_MAP] = RT_METRIC_hit_map,         [RT_MISS_NEW] = RT_METRIC_miss_new,
        [RT_MISS_GONE] = RT_METRIC_miss_gone,     [RT_MISS_FULL] = RT_METRIC_miss_full,
        [RT_MISS_LOAD] = RT_METRIC_miss_load,     [RT_MISS_SMALL] = RT_METRIC_miss_small,
    };
    for (uint32_t i = 0; i < RT_AFFINITY_COUNT; i++)
        set(s, rows[i], (double)info->stats.affinity[i]);
    set(s, RT_METRIC_groups_ready, info->groups_ready);
    set(s, RT_METRIC_groups_other, info->groups - info->groups_ready);
    set(s, RT_METRIC_sessions, info->sessions);
    set(s, RT_METRIC_maps_used, (double)info->stats.maps_used);
    set(s, RT_METRIC_maps_stale, (double)info->stats.maps_stale);
    set(s, RT_METRIC_maps_late, (double)info->stats.maps_late);
    if (s->look == NULL)
        return;
    const struct rt_shell_look_stats *l = rt_shell_look_stats(s->look);
    set(s, RT_METRIC_maps_absent, (double)l->absent);
    set(s, RT_METRIC_maps_corrupt, (double)l->corrupt);
    set(s, RT_METRIC_maps_failed, (double)l->failed);
}

static void refresh(void *arg)
{
    struct rt_shell_status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    struct rt_info info;
    rt_core_info(s->core, &info);
    const struct msg_router_info *r = &info.router;
    set(s, RT_METRIC_ready, r->ready);
    set(s, RT_METRIC_waiting, r->waiting);
    set(s, RT_METRIC_running, r->running);
    set(s, RT_METRIC_tokens_waiting, (double)r->tokens_waiting);
    set(s, RT_METRIC_store_free, (double)info.store_tokens_free);
    set(s, RT_METRIC_tokens_per_s, info.tokens_per_s);
    set(s, RT_METRIC_workers_ready, r->workers_ready);
    set(s, RT_METRIC_workers_lost, info.workers_lost);
    set(s, RT_METRIC_workers_other, info.workers - info.workers_lost - r->workers_ready);
    set(s, RT_METRIC_gateways, info.gateways);
    set(s, RT_METRIC_accepted, (double)r->ledger.accepted);
    set(s, RT_METRIC_failed, (double)r->ledger.failed);
    set(s, RT_METRIC_cancelled, (double)r->ledger.cancelled);
    set(s, RT_METRIC_live, (double)r->ledger.live);
    set(s, RT_METRIC_malformed, (double)s->malformed);
    refresh_stats(s, &info.stats);
    refresh_affinity(s, &info);
}

static const char *worker_state(const struct rt_worker *w)
{
    static const char *const names[] = {"unknown", "loading", "ready", "draining", "failed"};
    if (w->lost)
        return "lost";
    if (w->drain && w->info.state == MSG_WORKER_READY)
        return "draining";
    return w->info.state < ARRAY_COUNT(names) ? names[w->info.state] : names[0];
}

static const char *canary_state(const struct rt_worker *w)
{
    static const char *const names[] = {"unknown", "right", "wrong", "late"};
    CHECK(w->canary.verdict < ARRAY_COUNT(names));
    return names[w->canary.verdict];
}

static void extra_worker(struct str *out, const struct rt_worker *w)
{
    str_add_text(out, "{\"name\":");
    json_write_string(out, (const char *)w->peer.bytes,
                      utf8_valid_prefix(w->peer.bytes, w->peer.count));
    str_add_format(
        out,
        ",\"id\":%u,\"group\":%u,\"incarnation\":\"%016" PRIx64 "\",\"state\":\"%s\","
        "\"canary\":\"%s\",\"usable\":%s,\"draining\":%s,\"stalled\":%s,\"step_age_ms\":%" PRIu64
        ",\"running\":%u,\"seqs_max\":%u,"
        "\"tokens_queued\":%" PRIu64 ",\"blocks_free\":%u,\"blocks_total\":%u,"
        "\"context_max\":%u,\"quantization\":",
        w->info.worker_id, w->info.group, w->info.incarnation, worker_state(w), canary_state(w),
        rt_worker_usable(w) ? "true" : "false", w->drain ? "true" : "false",
        w->stalled ? "true" : "false", w->info.step_age_us / 1000, w->request_count,
        w->info.seqs_max, w->info.tokens_queued, w->info.blocks_free, w->info.blocks_total,
        w->info.context_max);
    json_write_string(out, w->quantization, strlen(w->quantization));
    str_add_text(out, ",\"warnings\":");
    json_write_string(out, w->warnings, strlen(w->warnings));
    str_add_char(out, '}');
}

static void extra(void *arg, struct str *out)
{
    struct rt_shell_status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    struct rt_info info;
    rt_core_info(s->core, &info);
    const struct msg_router_info *r = &info.router;
    const struct msg_ledger *l = &r->ledger;
    str_add_format(out, ",\"ready\":%s,\"reason\":", r->ready ? "true" : "false");
    json_write_string(out, r->reason, strlen(r->reason));
    str_add_format(out,
                   ",\"queue\":%u,\"queue_tokens\":%" PRIu64 ",\"running\":%u,\"gateways\":%u,"
                   "\"ledger\":{\"accepted\":%" PRIu64 ",\"finished\":%" PRIu64
                   ",\"failed\":%" PRIu64 ",\"cancelled\":%" PRIu64 ",\"live\":%" PRIu64 "}",
                   r->waiting, r->tokens_waiting, r->running, info.gateways, l->accepted,
                   l->finished, l->failed, l->cancelled, l->live);
    uint64_t hits = 0, misses = 0;
    for (uint32_t i = 0; i < RT_AFFINITY_COUNT; i++)
        *(i < RT_MISS_NEW ? &hits : &misses) += info.stats.affinity[i];
    str_add_format(out,
                   ",\"groups\":%u,\"groups_ready\":%u,\"sessions\":%u,\"affinity_hits\":%" PRIu64
                   ",\"affinity_misses\":%" PRIu64,
                   info.groups, info.groups_ready, info.sessions, hits, misses);
    str_add_text(out, ",\"workers\":[");
    bool first = true;
    for (uint32_t i = 0; i < RT_WORKERS_MAX; i++) {
        const struct rt_worker *w = rt_core_worker(s->core, i);
        if (w == NULL)
            continue;
        if (!first)
            str_add_char(out, ',');
        first = false;
        extra_worker(out, w);
    }
    str_add_char(out, ']');
}

static enum err command(void *arg, const struct status_command *c, struct err_detail *detail)
{
    struct rt_shell_status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    return s->command(s->command_arg, c, detail);
}

static void heartbeat(void *arg, void (*add)(void *add_arg, const char *name, const char *value),
                      void *add_arg)
{
    struct rt_shell_status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    struct rt_info info;
    char text[32];
    rt_core_info(s->core, &info);
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"ready", info.router.ready},
        {"workers_ready", info.router.workers_ready},
        {"running", info.router.running},
        {"waiting", info.router.waiting},
        {"tokens_waiting", info.router.tokens_waiting},
        {"gateways", info.gateways},
        {"accepted", info.router.ledger.accepted},
        {"live", info.router.ledger.live},
    };
    for (size_t i = 0; i < ARRAY_COUNT(rows); i++) {
        snprintf(text, sizeof(text), "%" PRIu64, rows[i].value);
        add(add_arg, rows[i].name, text);
    }
    add(add_arg, "reason", info.router.reason);
}

enum err rt_shell_status_create(const struct rt_shell_status_options *options,
                                struct rt_shell_status **ret_status, struct err_detail *detail)
{
    struct rt_shell_status *s = mem_take(sizeof(*s));
    s->magic = STATUS_MAGIC;
    s->core = options->core;
    s->redis = options->redis;
    s->look = options->look;
    s->command = options->command;
    s->command_arg = options->arg;
    struct status_options o = {
        .role = "router",
        .id = options->params->id,
        .cluster = options->params->cluster,
        .run_dir = options->params->run_dir,
        .incarnation = options->incarnation,
        .redis = options->redis,
        .rows = rt_metric_rows,
        .values = s->values,
        .metric_count = RT_METRIC_COUNT,
        .common_labels = "",
        .extra = extra,
        .refresh = refresh,
        .heartbeat = heartbeat,
        .command = command,
        .arg = s,
    };
    enum err e = status_create(options->loop, &o, &s->status, detail);
    if (e != ERR_OK) {
        mem_give(s);
        return e;
    }
    *ret_status = s;
    return ERR_OK;
}

void rt_shell_status_destroy(struct rt_shell_status **status_p)
{
    struct rt_shell_status *s = *status_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, STATUS_MAGIC);
    status_destroy(&s->status);
    s->magic = 0;
    mem_give(s);
    *status_p = NULL;
}

void rt_shell_status_observe(struct rt_shell_status *s, enum rt_observe what, double value)
{
    CHECK_OBJ(s, STATUS_MAGIC);
    enum rt_metric m = RT_METRIC_queue_time;
    switch (what) {
    case RT_OBSERVE_QUEUE_US:
        value /= 1e6;
        break;
    case RT_OBSERVE_PROMPT_TOKENS:
        m = RT_METRIC_prompt_tokens;
        break;
    case RT_OBSERVE_OUTPUT_TOKENS:
        m = RT_METRIC_output_tokens;
        break;
    }
    metric_observe(&rt_metric_rows[m], &s->values[m], value);
}

void rt_shell_status_tick(struct rt_shell_status *s, uint64_t malformed)
{
    CHECK_OBJ(s, STATUS_MAGIC);
    struct rt_info info;
    s->malformed = malformed;
    rt_core_info(s->core, &info);
    if (s->redis == NULL || redis_up(s->redis))
        s->redis_down_ticks = 0;
    else if (s->redis_down_ticks < REDIS_DOWN_TICKS)
        s->redis_down_ticks++;
    if (info.draining)
        status_set_state(s->status, "draining");
    else if (info.router.ready && s->redis_down_ticks < REDIS_DOWN_TICKS)
        status_set_state(s->status, "ready");
    else
        status_set_state(s->status, info.workers == 0 ? "starting" : "degraded");
}
