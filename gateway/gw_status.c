/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_peers.h"
#include "gateway/gw_shell.h"
#include "gateway/gw_shell_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"

#define STATUS_MAGIC 0x67775374u

struct gw_status {
    uint32_t magic;
    struct gw_shell *shell;
    struct status *status;
    struct gw_peers *peers;
    char labels[320];
};

/* ---- gauges ---- */

static void set(struct gw_shell *s, uint32_t metric, double value)
{
    metric_set(&s->metrics[metric], value);
}

static void refresh(void *arg)
{
    struct gw_status *t = arg;
    CHECK_OBJ(t, STATUS_MAGIC);
    struct gw_shell *s = t->shell;
    const struct gw_core_stats *c = gw_core_stats(s->core);
    const struct gw_http_stats *h = gw_http_stats(s->http);
    const struct gw_router *r = &s->router;
    const char *reason = "";
    double usage = r->blocks_total ? 1.0 - (double)r->blocks_free / (double)r->blocks_total : 0.0;
    set(s, GW_M_running, r->running);
    set(s, GW_M_waiting, r->waiting);
    set(s, GW_M_waiting_capacity, r->waiting);
    set(s, GW_M_sleep_awake, 1);
    set(s, GW_M_kv_usage, usage);
    set(s, GW_M_kv_usage_gpu, usage);
    set(s, GW_M_ready, gw_shell_ready(s, &reason));
    set(s, GW_M_router_up, gw_core_router_up(s->core, gw_shell_now(s)));
    set(s, GW_M_connections, h->connections);
    set(s, GW_M_exchanges, s->live_count);
    set(s, GW_M_body_bytes, (double)h->bodies_bytes);
    set(s, GW_M_accepted, (double)h->accepted);
    set(s, GW_M_refused_full, (double)h->refused_full);
    set(s, GW_M_http_requests, (double)h->requests);
    set(s, GW_M_http_bad, (double)h->bad_requests);
    set(s, GW_M_flows_opened, (double)c->opened);
    set(s, GW_M_flows_finished, (double)c->finished);
    set(s, GW_M_flows_refused, (double)c->refused);
    set(s, GW_M_flows_failed, (double)c->failed);
    set(s, GW_M_flows_closed, (double)c->closed);
    set(s, GW_M_flows_live, c->flows_live);
    set(s, GW_M_duplicates, (double)c->duplicates);
    set(s, GW_M_gaps, (double)c->gaps);
    set(s, GW_M_resubmits, (double)c->resubmits);
    set(s, GW_M_strays, (double)c->strays);
}

static void health(void *arg, struct str *out)
{
    struct gw_status *t = arg;
    struct gw_shell *s = t->shell;
    const struct gw_core_stats *c = gw_core_stats(s->core);
    /* It resolved and is bound, so it is plain text; port 0 shows what it became. */
    const char *colon = strrchr(s->params->listen, ':');
    int host_bytes = colon != NULL ? (int)(colon - s->params->listen) : 0;
    str_add_format(out, ",\"listen\":\"%.*s:%u\"", host_bytes, s->params->listen,
                   gw_http_port(s->http));
    str_add_format(out,
                   ",\"connections\":%u,\"requests_live\":%u,\"router_up\":%s,\"flows\":{"
                   "\"opened\":%llu,\"finished\":%llu,\"refused\":%llu,\"failed\":%llu,"
                   "\"closed\":%llu,\"live\":%u}",
                   gw_http_stats(s->http)->connections, s->live_count,
                   gw_core_router_up(s->core, gw_shell_now(s)) ? "true" : "false",
                   (unsigned long long)c->opened, (unsigned long long)c->finished,
                   (unsigned long long)c->refused, (unsigned long long)c->failed,
                   (unsigned long long)c->closed, c->flows_live);
}

static enum err on_command(void *arg, const struct status_command *c, struct err_detail *detail)
{
    struct gw_status *t = arg;
    CHECK_OBJ(t, STATUS_MAGIC);
    if (c->has_worker)
        return err_set(detail, ERR_NOT_FOUND, "worker: ask the router");
    gw_shell_hold(t->shell, strcmp(c->name, "drain") == 0, c->deadline_ms * 1000u);
    return ERR_OK;
}

/* ---- life ---- */

void gw_status_tick(struct gw_status *t, uint64_t now_us)
{
    CHECK_OBJ(t, STATUS_MAGIC);
    const char *reason = "";
    bool ready = gw_shell_ready(t->shell, &reason);
    const char *state = t->shell->draining       ? "draining"
                        : ready                  ? "ready"
                        : t->shell->router.known ? "degraded"
                                                 : "starting";
    if (strcmp(state, status_state(t->status)) != 0)
        status_set_state(t->status, state);
    gw_peers_tick(t->peers, now_us);
}

/* What a benchmark takes for the size of the pool, so only while it is known: its product is the
 * number of tokens that all workers' pools hold. */
static void cache_info(const struct gw_status *t, struct str *out)
{
    const struct gw_router *r = &t->shell->router;
    if (!r->known || r->workers_ready == 0 || r->blocks_total == 0)
        return;
    str_add_format(out,
                   "# HELP vllm:cache_config_info Size of the KV pool.\n"
                   "# TYPE vllm:cache_config_info gauge\n"
                   "vllm:cache_config_info{%s,block_size=\"%u\",num_gpu_blocks=\"%u\"} 1\n",
                   t->labels, r->block_tokens, r->blocks_total);
}

void gw_status_metrics(struct gw_status *t, struct str *out)
{
    CHECK_OBJ(t, STATUS_MAGIC);
    refresh(t);
    gw_peers_render(t->peers, gw_metric_rows, t->shell->metrics, GW_M_COUNT, t->labels, out);
    cache_info(t, out);
}

static void make_labels(struct gw_status *t)
{
    const char *name = t->shell->checkpoint.name;
    size_t at = (size_t)snprintf(t->labels, sizeof(t->labels), "model_name=\"");
    for (; *name && at + 20 < sizeof(t->labels); name++) {
        if (*name == '"' || *name == '\\')
            t->labels[at++] = '\\';
        t->labels[at++] = *name == '\n' ? ' ' : *name;
    }
    snprintf(t->labels + at, sizeof(t->labels) - at, "\",engine=\"0\"");
}

enum err gw_status_create(struct gw_shell *s, struct gw_status **ret_status,
                          struct err_detail *detail)
{
    struct gw_status *t = mem_take(sizeof(*t));
    t->magic = STATUS_MAGIC;
    t->shell = s;
    make_labels(t);
    t->peers = gw_peers_create(
        &(struct gw_peers_options){s->redis, s->params->cluster, s->params->id, t->labels});
    const struct status_options o = {
        .role = "gateway",
        .id = s->params->id,
        .cluster = s->params->cluster,
        .run_dir = s->params->run_dir,
        .incarnation = s->incarnation,
        .redis = s->redis,
        .rows = gw_metric_rows,
        .values = s->metrics,
        .metric_count = GW_M_COUNT,
        .common_labels = t->labels,
        .extra = health,
        .command = on_command,
        .refresh = refresh,
        .arg = t,
    };
    enum err e = status_create(s->loop, &o, &t->status, detail);
    if (e != ERR_OK) {
        gw_peers_destroy(&t->peers);
        mem_give(t);
        return e;
    }
    status_set_state(t->status, "starting");
    *ret_status = t;
    return ERR_OK;
}

void gw_status_destroy(struct gw_status **status_p)
{
    struct gw_status *t = *status_p;
    if (!t)
        return;
    CHECK_OBJ(t, STATUS_MAGIC);
    status_destroy(&t->status);
    /* Replies still on their way may run inside redis_destroy: they need the object. */
    if (t->shell->redis)
        redis_destroy(&t->shell->redis);
    gw_peers_destroy(&t->peers);
    mem_give(t);
    *status_p = NULL;
}
