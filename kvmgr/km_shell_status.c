/* SPDX-License-Identifier: Apache-2.0 */
/* What others see of kvmgr: metrics, /health, the heartbeat pool:<id>. */
#include "kvmgr/km_shell_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kvmgr/km_map.h"
#include "kvmgr/km_params.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/net/status.h"

#define PIN_SECONDS_MAX 604800u

static const struct metric_row km_metric_rows[KM_METRIC_COUNT] = {
#define COUNTER(ident, name, labels, help) {METRIC_COUNTER, name, labels, NULL, help},
#define GAUGE(ident, name, labels, help)   {METRIC_GAUGE, name, labels, NULL, help},
#include "kvmgr/km_metrics.def"
#undef COUNTER
#undef GAUGE
};

static void metrics_core(struct km_shell *s)
{
    struct metric *m = s->metrics;
    const struct km_core_stats *c = km_core_stats(s->core);
    struct km_pool_counts n = km_core_counts(s->core);
    struct km_core_cache cache = km_core_cache(s->core);
    const struct {
        enum km_metric metric;
        uint64_t value;
    } values[] = {
        {KM_METRIC_snapshots_refused, c->snapshots_refused},
        {KM_METRIC_snapshots_dropped, c->snapshots_dropped},
        {KM_METRIC_snapshots_free, cache.snapshots_free},
        {KM_METRIC_snapshots_kept, cache.snapshots_kept},
        {KM_METRIC_snapshots_total, cache.snapshots_total},
        {KM_METRIC_hits, c->hits},
        {KM_METRIC_hits_part, c->hits_part},
        {KM_METRIC_hits_loaded, c->hits_loaded},
        {KM_METRIC_misses_cold, c->misses_cold},
        {KM_METRIC_misses_bare, c->misses_bare},
        {KM_METRIC_misses_asked, c->misses_asked},
        {KM_METRIC_tokens_reused, c->tokens_reused},
        {KM_METRIC_duplicates, c->duplicates},
        {KM_METRIC_evicted_written, c->evicted_written},
        {KM_METRIC_evicted_dropped, c->evicted_dropped},
        {KM_METRIC_reclaims, c->reclaims},
        {KM_METRIC_pressures, c->pressures},
        {KM_METRIC_blocks_adopted, c->blocks_adopted},
        {KM_METRIC_snapshots_adopted, c->snapshots_adopted},
        {KM_METRIC_sessions, cache.sessions},
        {KM_METRIC_tier_on, cache.tier_on},
        {KM_METRIC_tier_bytes, cache.tier_bytes},
        {KM_METRIC_tier_blocks, cache.tier_blocks},
        {KM_METRIC_tier_snapshots, cache.tier_snapshots},
        {KM_METRIC_tier_writes, c->writes},
        {KM_METRIC_tier_write_failures, c->write_failures},
        {KM_METRIC_tier_loads, c->loads},
        {KM_METRIC_tier_loads_failed, c->loads_failed},
        {KM_METRIC_tier_loads_late, c->loads_late},
        {KM_METRIC_tier_tokens, c->tokens_loaded},
        {KM_METRIC_tier_corrupt, c->objects_corrupt},
        {KM_METRIC_tier_evicted, c->objects_evicted},
        {KM_METRIC_blocks_damaged, c->blocks_damaged},
        {KM_METRIC_snapshots_damaged, c->snapshots_damaged},
        {KM_METRIC_blocks_pinned, km_core_pinned(s->core)},
        {KM_METRIC_blocks_written,
         cache.tier_on ? km_core_indexed(s->core) - km_core_unwritten(s->core) : 0},
        {KM_METRIC_blocks_unproven, km_core_unproven(s->core)},
        {KM_METRIC_blocks_free, n.blocks_free},
        {KM_METRIC_blocks_leased, n.blocks_leased},
        {KM_METRIC_blocks_cached, n.blocks_cached},
        {KM_METRIC_blocks_total, n.blocks_total},
        {KM_METRIC_tokens_keepable, cache.tokens_keepable},
        {KM_METRIC_slots_free, n.slots_free},
        {KM_METRIC_slots_used, n.slots_total - n.slots_free},
        {KM_METRIC_workers, c->workers},
        {KM_METRIC_leases, km_core_leases(s->core)},
        {KM_METRIC_attaches, c->attaches},
        {KM_METRIC_attaches_refused, c->attaches_refused},
        {KM_METRIC_workers_lost, c->workers_lost},
        {KM_METRIC_opens, c->opens},
        {KM_METRIC_opens_full, c->opens_full},
        {KM_METRIC_extends, c->extends},
        {KM_METRIC_extends_full, c->extends_full},
        {KM_METRIC_commits, c->commits},
        {KM_METRIC_blocks_committed, c->blocks_committed},
        {KM_METRIC_snapshots, c->snapshots},
        {KM_METRIC_releases, c->releases},
        {KM_METRIC_expired, c->leases_expired},
        {KM_METRIC_stale, c->stale},
        {KM_METRIC_refused, c->refused},
    };
    for (size_t i = 0; i < ARRAY_COUNT(values); i++)
        metric_set(&m[values[i].metric], (double)values[i].value);
}

static void on_refresh(void *arg)
{
    struct km_shell *s = arg;
    struct metric *m = s->metrics;
    metric_set(&m[KM_METRIC_malformed], (double)s->malformed);
    metric_set(&m[KM_METRIC_unsent], (double)s->unsent);
    metric_set(&m[KM_METRIC_epoch], (double)s->epoch);
    uint64_t repaired = s->repaired, guards = s->guards_broken, bytes = 0;
    if (s->arena) {
        struct km_arena_guard last;
        guards += km_arena_guards_broken(s->arena, &last);
        repaired += km_arena_headers_repaired(s->arena);
        bytes = km_arena_layout(s->arena)->arena_bytes;
    }
    metric_set(&m[KM_METRIC_headers_repaired], (double)repaired);
    metric_set(&m[KM_METRIC_arena_bytes], (double)bytes);
    metric_set(&m[KM_METRIC_guards_broken], (double)guards);
    metric_set(&m[KM_METRIC_tier_others], (double)s->store_others);
    if (!s->core || !s->map)
        return;
    metrics_core(s);
    const struct km_map_stats *map = km_map_stats(s->map);
    metric_set(&m[KM_METRIC_map_writes], (double)map->writes);
    metric_set(&m[KM_METRIC_map_epoch], (double)map->refused_epoch);
    metric_set(&m[KM_METRIC_map_gen], (double)map->refused_gen);
    metric_set(&m[KM_METRIC_map_failed], (double)map->failed);
    metric_set(&m[KM_METRIC_map_dropped], (double)map->dropped);
    metric_set(&m[KM_METRIC_map_superseded], (double)map->superseded);
    metric_set(&m[KM_METRIC_map_sessions], (double)map->sessions);
}

static struct km_pool_counts counts_now(const struct km_shell *s)
{
    return s->core ? km_core_counts(s->core) : (struct km_pool_counts){0};
}

static void on_health(void *arg, struct str *out)
{
    struct km_shell *s = arg;
    struct km_pool_counts n = counts_now(s);
    struct km_core_cache cache = {0};
    if (s->core)
        cache = km_core_cache(s->core);
    str_add_format(out,
                   ",\"epoch\":%u,\"blocks_free\":%u,\"blocks_leased\":%u,\"blocks_cached\":%u,"
                   "\"blocks_total\":%u,\"block_tokens\":%u,\"tokens_keepable\":%" PRIu64
                   ",\"slots_free\":%u,\"slots_total\":%u,\"workers\":%u,\"leases\":%u",
                   s->epoch, n.blocks_free, n.blocks_leased, n.blocks_cached, n.blocks_total,
                   s->params->block_tokens, cache.tokens_keepable, n.slots_free, n.slots_total,
                   s->core ? km_core_stats(s->core)->workers : 0, n.slots_total - n.slots_free);
    if (!s->core)
        return;
    const struct km_core_stats *c = km_core_stats(s->core);
    uint64_t lookups = c->hits + c->hits_part + c->hits_loaded + c->misses_cold + c->misses_bare;
    str_add_format(
        out,
        ",\"snapshots_kept\":%u,\"snapshots_total\":%u,\"sessions\":%u,\"lookups\":%" PRIu64
        ",\"hits\":%" PRIu64 ",\"tokens_reused\":%" PRIu64,
        cache.snapshots_kept, cache.snapshots_total, cache.sessions, lookups,
        c->hits + c->hits_part + c->hits_loaded, c->tokens_reused);
    str_add_format(out,
                   ",\"tier\":\"%s\",\"tier_bytes\":%" PRIu64 ",\"tier_blocks\":%u,"
                   "\"tier_snapshots\":%u,\"tier_text\":",
                   cache.tier_on      ? "on"
                   : s->store_text[0] ? "failed"
                                      : "off",
                   cache.tier_bytes, cache.tier_blocks, cache.tier_snapshots);
    json_write_string(out, s->store_text, strlen(s->store_text));
    str_add_format(out,
                   ",\"blocks_pinned\":%u,\"flushing\":%s,\"unwritten\":%u,\"unproven\":%u,\"maps_"
                   "waiting\":%u",
                   km_core_pinned(s->core), s->flushing ? "true" : "false",
                   km_core_unwritten(s->core), km_core_unproven(s->core),
                   s->map ? km_map_waiting(s->map) : 0);
}

static enum err pin(struct km_shell *s, const struct status_command *c, bool on,
                    struct err_detail *detail)
{
    char sid[33];
    if (c->session[0] == '\0')
        return err_set(detail, ERR_INVALID, "session: missing");
    if (on && (c->seconds == 0 || c->seconds > PIN_SECONDS_MAX))
        return err_set(detail, ERR_INVALID, "seconds: %" PRIu64 " is not in 1..%u", c->seconds,
                       PIN_SECONDS_MAX);
    if (!s->core)
        return err_set(detail, ERR_CLOSED, "not ready");
    TRY(km_core_pin(s->core, c->session, c->salt, on ? c->seconds * 1000000u : 0, sid, detail));
    km_map_pin(s->map, sid, on ? clock_unix_us() / 1000 + c->seconds * 1000 : 0);
    return ERR_OK;
}

/* Its part of draining a worker: others hold what it keeps, so it writes it down and serves on. */
static enum err on_command(void *arg, const struct status_command *c, struct err_detail *detail)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    if (strcmp(c->name, "pin") == 0 || strcmp(c->name, "unpin") == 0)
        return pin(s, c, strcmp(c->name, "pin") == 0, detail);
    if (c->has_worker || strcmp(c->name, "drain") != 0)
        return err_set(detail, ERR_NOT_FOUND,
                       "%.16s: kvmgr only knows pin, unpin, and drain, which writes what is cached",
                       c->name);
    km_shell_flush(s);
    return ERR_OK;
}

static void on_heartbeat(void *arg, void (*add)(void *add_arg, const char *name, const char *value),
                         void *add_arg)
{
    struct km_shell *s = arg;
    struct km_pool_counts n = counts_now(s);
    char layout[33] = "", model[33] = "";
    uint32_t dcp = 1, interleave = s->params->block_tokens;
    if (s->arena) {
        dcp = km_arena_layout(s->arena)->geometry.ranks;
        interleave = km_arena_layout(s->arena)->geometry.interleave;
        hex_encode(&km_arena_layout(s->arena)->layout_fp, sizeof(struct hash128), layout);
        hex_encode(&s->model_fp, sizeof(s->model_fp), model);
    }
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"epoch", s->epoch},
        {"blocks_total", n.blocks_total},
        {"blocks_free", n.blocks_free},
        {"block_tokens", s->params->block_tokens},
        {"rank", 0},
        {"dcp", dcp},
        {"interleave", interleave},
    };
    for (size_t i = 0; i < ARRAY_COUNT(numbers); i++) {
        char text[24];
        snprintf(text, sizeof(text), "%" PRIu64, numbers[i].value);
        add(add_arg, numbers[i].name, text);
    }
    add(add_arg, "boot_id", s->boot_id);
    add(add_arg, "host", s->host);
    add(add_arg, "pair_incarnation", "");
    add(add_arg, "layout_fp", layout);
    add(add_arg, "model_fp", model);
    add(add_arg, "addr", s->endpoint);
}

enum err km_shell_status_open(struct km_shell *s, struct err_detail *detail)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    const struct km_params *p = s->params;
    snprintf(s->heartbeat_key, sizeof(s->heartbeat_key), "pool:%u", p->id);
    struct status_options status = {
        .role = "kvmgr",
        .id = p->id,
        .cluster = p->cluster,
        .run_dir = p->run_dir,
        .incarnation = s->incarnation,
        .redis = s->redis,
        .rows = km_metric_rows,
        .values = s->metrics,
        .metric_count = KM_METRIC_COUNT,
        .common_labels = "",
        .extra = on_health,
        .refresh = on_refresh,
        .heartbeat = on_heartbeat,
        .heartbeat_key = s->heartbeat_key,
        .command = on_command,
        .pins = true,
        .arg = s,
    };
    return status_create(s->loop, &status, &s->status, detail);
}
