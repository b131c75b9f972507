/* SPDX-License-Identifier: Apache-2.0 */
/* What others see of the worker: WorkerState, metrics, health, heartbeat, progress of loading. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/log.h"
#include "lib/base/str.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"
#include "worker/wk_canary.h"
#include "worker/wk_shell_state.h"

const struct metric_row wk_metric_rows[WK_METRIC_COUNT] = {
#define COUNTER(ident, name, labels, help) {METRIC_COUNTER, name, labels, NULL, help},
#define GAUGE(ident, name, labels, help)   {METRIC_GAUGE, name, labels, NULL, help},
#define HISTOGRAM(ident, name, labels, buckets, help)                                              \
    {METRIC_HISTOGRAM, name, labels, &buckets, help},
#include "worker/wk_metrics.def"
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
};

/* ---- WorkerState ---- */

static void info_fill(struct wk_shell *s, struct msg_worker_info *w)
{
    const struct wk_params *p = s->params;
    *w = (struct msg_worker_info){
        .state = s->load_failed ? MSG_WORKER_FAILED : MSG_WORKER_LOADING,
        .seqs_max = p->seqs_max,
        .quantization = "",
        .spec = s->core_options.spec.effective,
        .config_hash = s->config_hash,
    };
    if (s->loaded) {
        const struct wk_loaded *l = wk_exec_loaded(s->exec);
        w->model_fp = l->info->model_fp;
        w->kv_model_fp = wk_shell_rows_fp(s);
        w->quantization = l->info->quantization;
        w->vocab_size = l->info->vocab_size;
        w->context_max = l->context_max;
        w->canary_count = WK_CANARY_PROMPT;
        w->canary_ids = l->canary_ids;
        w->canary_output_count = WK_CANARY_OUTPUT;
        const struct kv_geometry *g = &s->kv.mapping.layout.geometry;
        uint32_t kv = g->kv_dtype > KV_F32 ? g->kv_dtype - KV_F32 : 0; /* 0: no arena yet */
        uint32_t index = g->index_dtype > KV_F32 ? g->index_dtype - KV_F32 : 0;
        w->canary_hash = wk_canary_hash(l->canary_output[kv][index], WK_CANARY_OUTPUT);
    }
    if (s->core != NULL)
        wk_core_info(s->core, loop_now_us(s->loop), w);
    if (s->load_failed)
        w->state = MSG_WORKER_FAILED;
    else if (s->stopping)
        w->state = MSG_WORKER_DRAINING;
    w->worker_id = p->id;
    w->group = p->group;
    w->incarnation = s->incarnation;
    if (s->kv.attached) {
        w->kv_epoch = s->kv.epoch;
        w->kv_incarnation = s->kv.incarnation;
        w->kv_layout_fp = s->kv.mapping.layout.layout_fp;
    }
    w->numerics = p->numerics;
    w->step_age_us = s->busy ? loop_now_us(s->loop) - s->run_us : 0;
    w->warnings = s->loaded ? wk_exec_loaded(s->exec)->info->warnings : "";
    if (w->blocks_free > w->blocks_total)
        w->blocks_free = w->blocks_total;
}

static struct wk_published published_now(const struct wk_shell *s)
{
    bool draining = s->stopping || (s->core != NULL && wk_core_draining(s->core));
    struct wk_published now = {.state = s->load_failed ? MSG_WORKER_FAILED
                                        : draining     ? MSG_WORKER_DRAINING
                                        : s->core      ? MSG_WORKER_READY
                                                       : MSG_WORKER_LOADING};
    now.kv_state = s->kv.attached;
    if (s->core != NULL) {
        now.seqs_live = (uint32_t)wk_core_stats(s->core)->ledger.live;
        now.drafter_state = wk_core_drafter_up(s->core, loop_now_us(s->loop));
        now.drafter_poor = wk_core_drafter_poor(s->core);
    }
    return now;
}

void wk_shell_publish(struct wk_shell *s, bool always)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    struct wk_published now = published_now(s);
    if (!always && memcmp(&now, &s->published, sizeof now) == 0)
        return;
    if (now.drafter_state == 0 && s->published.drafter_state != 0)
        log_warn(WORKER, "drafter silent", "drafts=off");
    if (now.drafter_poor != s->published.drafter_poor)
        log_warn(WORKER, now.drafter_poor ? "drafter degraded" : "drafter recovered",
                 "accept_floor=%.3f", s->params->accept_floor);
    if (s->core != NULL && !s->load_failed)
        status_set_state(s->status, now.state == MSG_WORKER_DRAINING ? "draining" : "ready");
    s->published = now;
    struct msg m = {.type = MSG_WORKER_STATE, .epoch = s->kv.epoch};
    info_fill(s, &m.u.worker);
    wk_shell_beat(s, WK_ROUTER, &m);
}

/* ---- metrics ---- */

void wk_shell_observe(struct wk_shell *s)
{
    const struct wk_stats *t = wk_core_stats(s->core);
    uint64_t steps = t->steps_prefill + t->steps_decode;
    if (steps != s->steps_seen) {
        s->steps_seen = steps;
        enum wk_metric at =
            t->kind_last == WK_PLAN_DECODE ? WK_METRIC_step_decode : WK_METRIC_step_prefill;
        metric_observe(&wk_metric_rows[at], &s->metrics[at], (double)t->step_us_last / 1e6);
        if (t->kind_last == WK_PLAN_DECODE)
            metric_observe(&wk_metric_rows[WK_METRIC_step_rows], &s->metrics[WK_METRIC_step_rows],
                           t->rows_last);
    }
    if (t->draft_waits != s->draft_waits_seen) {
        s->draft_waits_seen = t->draft_waits;
        metric_observe(&wk_metric_rows[WK_METRIC_draft_wait], &s->metrics[WK_METRIC_draft_wait],
                       (double)t->draft_us_last / 1e6);
    }
    uint64_t tokens = t->rows_prefill + t->tokens_output;
    if (tokens != s->tokens_seen) { /* slices between the layers of a batch have none */
        metric_observe(&wk_metric_rows[WK_METRIC_iteration_tokens],
                       &s->metrics[WK_METRIC_iteration_tokens], (double)(tokens - s->tokens_seen));
        s->tokens_seen = tokens;
    }
    if (t->gaps != s->gaps_seen) { /* one of them stands for those of the same step */
        s->gaps_seen = t->gaps;
        metric_observe(&wk_metric_rows[WK_METRIC_gap], &s->metrics[WK_METRIC_gap],
                       (double)t->gap_us_last / 1e6);
    }
}

static void core_refresh(struct wk_shell *s)
{
    const struct wk_stats *t = wk_core_stats(s->core);
    struct wk_census c;
    wk_core_census(s->core, &c);
    const struct {
        enum wk_metric metric;
        uint64_t value;
    } values[] = {
        {WK_METRIC_steps_prefill, t->steps_prefill},
        {WK_METRIC_steps_decode, t->steps_decode},
        {WK_METRIC_steps_abandoned, t->steps_abandoned},
        {WK_METRIC_steps_failed, t->steps_failed},
        {WK_METRIC_rows_prefill, t->rows_prefill},
        {WK_METRIC_rows_decode, t->rows_decode},
        {WK_METRIC_tokens, t->tokens_output},
        {WK_METRIC_drafted, t->drafted},
        {WK_METRIC_accepted, t->accepted},
        {WK_METRIC_drafts_late, t->drafts_late},
        {WK_METRIC_drafts_garbage, t->drafts_garbage},
        {WK_METRIC_drafts_timeout, t->drafts_timeout},
        {WK_METRIC_accepted_requests, t->ledger.accepted},
        {WK_METRIC_finished_requests, t->ledger.finished},
        {WK_METRIC_failed_requests, t->ledger.failed},
        {WK_METRIC_cancelled_requests, t->ledger.cancelled},
        {WK_METRIC_preempted, t->preempted},
        {WK_METRIC_replanned, t->replanned},
        {WK_METRIC_kv_full, t->kv_full},
        {WK_METRIC_tokens_cached, t->tokens_cached},
        {WK_METRIC_prompts_cached, t->prompts_cached},
        {WK_METRIC_prompts_cold, t->prompts_cold},
        {WK_METRIC_snapshots, t->snapshots},
        {WK_METRIC_snapshots_refused, t->snapshots_refused},
        {WK_METRIC_snapshots_skipped, t->snapshots_skipped},
        {WK_METRIC_seqs_waiting, c.waiting},
        {WK_METRIC_seqs_opening, c.opening},
        {WK_METRIC_seqs_prefill, c.prefill},
        {WK_METRIC_seqs_decode, c.decode},
        {WK_METRIC_seqs_ending, c.zombie},
        {WK_METRIC_blocks_held, c.blocks_held},
        {WK_METRIC_drafter_up, wk_core_drafter_up(s->core, loop_now_us(s->loop))},
        {WK_METRIC_drafter_poor, wk_core_drafter_poor(s->core)},
        {WK_METRIC_tap_records, t->tap_records},
    };
    for (size_t i = 0; i < ARRAY_COUNT(values); i++)
        metric_set(&s->metrics[values[i].metric], (double)values[i].value);
    for (uint32_t j = 0; j < WK_SPEC_DRAFTS_MAX; j++) {
        metric_set(&s->metrics[WK_METRIC_drafted_1 + j], (double)t->drafted_at[j]);
        metric_set(&s->metrics[WK_METRIC_accepted_1 + j], (double)t->accepted_at[j]);
    }
}

static void on_refresh(void *arg)
{
    struct wk_shell *s = arg;
    struct msg_worker_info info;
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    metric_set(&s->metrics[WK_METRIC_bad_messages], (double)s->bad_messages);
    metric_set(&s->metrics[WK_METRIC_unsent], (double)s->unsent);
    if (s->loaded)
        metric_set(&s->metrics[WK_METRIC_load_seconds],
                   (double)wk_exec_loaded(s->exec)->load_us / 1e6);
    if (s->core == NULL)
        return;
    core_refresh(s);
    info_fill(s, &info);
    metric_set(&s->metrics[WK_METRIC_blocks_free], info.blocks_free);
    metric_set(&s->metrics[WK_METRIC_decode_rate], info.decode_tokens_per_s);
    metric_set(&s->metrics[WK_METRIC_prefill_rate], info.prefill_tokens_per_s);
}

/* ---- health and heartbeat ---- */

static const char *phase(const struct wk_shell *s)
{
    return s->load_failed ? "failed"
           : !s->loaded   ? "loading"
           : !s->core     ? "waiting for kvmgr"
                          : "up";
}

static double mean_ms(uint64_t us, uint64_t count)
{
    return count == 0 ? 0 : (double)us / (double)count / 1e3;
}

/* What became of the drafts since the start, all together and by position. */
static void drafts_add(const struct wk_shell *s, struct str *out)
{
    static const struct wk_stats none;
    const struct wk_stats *t = s->core != NULL ? wk_core_stats(s->core) : &none;
    str_add_format(out,
                   ",\"drafts\":{\"drafted\":%" PRIu64 ",\"right\":%" PRIu64
                   ",\"drafts_late\":%" PRIu64 ",\"drafts_timeout\":%" PRIu64
                   ",\"draft_ms\":%.3f,\"verify_ms\":%.3f"
                   ",\"degraded\":%s,\"right_by_position\":[",
                   t->drafted, t->accepted, t->drafts_late, t->drafts_timeout,
                   mean_ms(t->draft_us, t->draft_waits), mean_ms(t->verify_us, t->steps_decode),
                   s->core != NULL && wk_core_drafter_poor(s->core) ? "true" : "false");
    for (uint32_t j = 0; j < WK_SPEC_DRAFTS_MAX && t->drafted_at[j] > 0; j++)
        str_add_format(out, "%s%.2f", j > 0 ? "," : "",
                       (double)t->accepted_at[j] / (double)t->drafted_at[j]);
    str_add_text(out, "]}");
}

static void on_health(void *arg, struct str *out)
{
    struct wk_shell *s = arg;
    struct msg_worker_info info;
    uint64_t done = 0, total = 0;
    info_fill(s, &info);
    wk_exec_progress(s->exec, &done, &total);
    str_add_format(out,
                   ",\"phase\":\"%s\",\"load_bytes\":%" PRIu64 ",\"load_bytes_total\":%" PRIu64
                   ",\"seqs_live\":%u,\"seqs_max\":%u,\"tokens_queued\":%" PRIu64
                   ",\"blocks_free\":%u,\"blocks_total\":%u,\"context_max\":%u"
                   ",\"numerics\":\"%s\",\"spec\":\"%s\",\"quantization\":\"%s\""
                   ",\"step_age_ms\":%" PRIu64
                   ",\"kv_state\":%u,\"drafter_state\":%u,\"ledger\":{\"accepted\":%" PRIu64
                   ",\"finished\":%" PRIu64 ",\"failed\":%" PRIu64 ",\"cancelled\":%" PRIu64
                   ",\"live\":%" PRIu64 "}",
                   phase(s), done, total, info.seqs_live, info.seqs_max, info.tokens_queued,
                   info.blocks_free, info.blocks_total, info.context_max, info.numerics, info.spec,
                   info.quantization, info.step_age_us / 1000, info.kv_state, info.drafter_state,
                   info.ledger.accepted, info.ledger.finished, info.ledger.failed,
                   info.ledger.cancelled, info.ledger.live);
    str_add_text(out, ",\"drafter\":");
    json_write_string(out, s->drafter_source, strlen(s->drafter_source)); /* its own words */
    drafts_add(s, out);
}

static void on_heartbeat(void *arg, void (*add)(void *add_arg, const char *name, const char *value),
                         void *add_arg)
{
    struct wk_shell *s = arg;
    struct msg_worker_info info;
    char text[40];
    info_fill(s, &info);
    snprintf(text, sizeof text, "%u", s->kv.epoch);
    add(add_arg, "epoch", text);
    hex_encode(info.model_fp.bytes, sizeof info.model_fp.bytes, text);
    add(add_arg, "model_fp", text);
    if (s->loaded) {
        struct hash128 weights = wk_exec_loaded(s->exec)->info->weights_fp;
        hex_encode(weights.bytes, sizeof weights.bytes, text);
        add(add_arg, "weights_sha", text);
    }
    add(add_arg, "quantization", info.quantization);
    add(add_arg, "phase", phase(s));
    add(add_arg, "engine_build", TANDEM_VERSION);
    snprintf(text, sizeof text, "%" PRIu64, info.step_age_us / 1000);
    add(add_arg, "step_age_ms", text);
    add(add_arg, "drafter_fp", s->drafter_source);
    snprintf(text, sizeof text, "%u", info.seqs_live);
    add(add_arg, "inflight", text);
    snprintf(text, sizeof text, "%" PRIu64, info.tokens_queued);
    add(add_arg, "queue_tokens", text);
}

enum err wk_shell_status_open(struct wk_shell *s, struct err_detail *detail)
{
    const struct wk_params *p = s->params;
    struct redis_options redis = {0};
    static char key[32];
    redis_address(p->redis, p->run_dir, &redis);
    s->redis = redis_create(s->loop, &redis);
    snprintf(key, sizeof key, "worker:%u", p->id);
    struct status_options o = {
        .role = "worker",
        .id = p->id,
        .cluster = p->cluster,
        .run_dir = p->run_dir,
        .incarnation = s->incarnation,
        .redis = s->redis,
        .rows = wk_metric_rows,
        .values = s->metrics,
        .metric_count = WK_METRIC_COUNT,
        .common_labels = "",
        .extra = on_health,
        .refresh = on_refresh,
        .heartbeat = on_heartbeat,
        .heartbeat_key = key,
        .arg = s,
    };
    return status_create(s->loop, &o, &s->status, detail);
}

void wk_shell_progress(struct wk_shell *s)
{
    uint64_t done = 0, total = 0;
    if (s->loaded || s->load_failed)
        return;
    wk_exec_progress(s->exec, &done, &total);
    double seconds = (double)(loop_now_us(s->loop) - s->load_begun_us) / 1e6;
    double rate = seconds > 0 ? (double)done / seconds : 0;
    double left = rate > 0 ? (double)(total - (done < total ? done : total)) / rate : 0;
    log_info(WORKER, "loading", "mib=%.1f of_mib=%.1f mib_per_s=%.1f eta_s=%.0f",
             (double)done / 1048576.0, (double)total / 1048576.0, rate / 1048576.0, left);
}
