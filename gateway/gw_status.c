/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_shell.h"
#include "gateway/gw_shell_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"

#define STATUS_MAGIC    0x67775374u
#define FETCH_US        2000000u
#define PEERS_MAX       32u
#define PEER_LINES_MAX  4096u
#define PEER_BYTES_MAX  (512u << 10)
#define SCAN_ROUNDS_MAX 64u

/* The metrics of another process, as it left them in Redis. */
struct peer {
    char key[160];
    char process[40]; /* "worker-0" */
    bool seen;        /* by the running scan */
    struct str lines;
};

struct gw_status {
    uint32_t magic;
    struct gw_shell *shell;
    struct status *status;
    char labels[320];
    char prefix[128]; /* tandem:{cluster}:metrics: */
    uint64_t fetched_us;
    bool scanning;
    uint32_t scan_rounds;
    uint32_t peer_count;
    struct peer peers[PEERS_MAX];
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

/* ---- the other processes' metrics ---- */

static int line_compare(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* name{labels} value with process="..." as the first label; only what looks like a sample. */
static void add_sample(struct peer *p, struct str *out, const struct redis_value *name,
                       const struct redis_value *value)
{
    if (name->type != REDIS_STRING || value->type != REDIS_STRING || name->bytes == 0 ||
        name->bytes > 512 || value->bytes == 0 || value->bytes > 40)
        return;
    for (size_t i = 0; i < name->bytes; i++)
        if ((unsigned char)name->text[i] < ' ')
            return;
    for (size_t i = 0; i < value->bytes; i++)
        if (!strchr("0123456789+-.eEInfNa", value->text[i]))
            return;
    const char *brace = memchr(name->text, '{', name->bytes);
    size_t head = brace ? (size_t)(brace - name->text) : name->bytes;
    str_add(out, name->text, head);
    str_add_format(out, "{process=\"%s\"", p->process);
    if (brace && name->bytes > head + 2) {
        str_add_char(out, ',');
        str_add(out, brace + 1, name->bytes - head - 1);
    } else {
        str_add_char(out, '}');
    }
    str_add_char(out, ' ');
    str_add(out, value->text, value->bytes);
    str_add_char(out, '\0');
}

/* Sorted, so that samples of one name stand together whatever order Redis keeps. */
static void take_lines(struct peer *p, const struct redis_value *value)
{
    struct str raw;
    static const char *lines[PEER_LINES_MAX];
    uint32_t count = 0;
    str_init(&raw, PEER_BYTES_MAX);
    for (size_t i = 0; i + 1 < value->count; i += 2)
        add_sample(p, &raw, &value->items[i], &value->items[i + 1]);
    for (size_t at = 0; at < raw.bytes && count < PEER_LINES_MAX && !raw.overflow;) {
        lines[count++] = raw.text + at;
        at += strlen(raw.text + at) + 1;
    }
    qsort(lines, count, sizeof(*lines), line_compare);
    str_clear(&p->lines);
    for (uint32_t i = 0; i < count; i++) {
        str_add_text(&p->lines, lines[i]);
        str_add_char(&p->lines, '\n');
    }
    str_fini(&raw);
}

#define ARGUMENTS_MAX 6

static enum err command(struct gw_status *t, redis_fn fn, void *arg, int argc,
                        const char *const *argv)
{
    size_t bytes[ARGUMENTS_MAX];
    CHECK(argc <= ARGUMENTS_MAX);
    for (int i = 0; i < argc; i++)
        bytes[i] = strlen(argv[i]);
    return redis_command(t->shell->redis, fn, arg, argc, argv, bytes);
}

static void on_hash(void *arg, enum err e, const struct redis_value *value)
{
    struct peer *p = arg;
    if (e == ERR_OK && value->type == REDIS_ARRAY && p->key[0])
        take_lines(p, value);
}

static struct peer *peer_by_key(struct gw_status *t, const char *key, size_t bytes)
{
    for (uint32_t i = 0; i < t->peer_count; i++)
        if (strlen(t->peers[i].key) == bytes && memcmp(t->peers[i].key, key, bytes) == 0)
            return &t->peers[i];
    if (t->peer_count == PEERS_MAX || bytes >= sizeof(t->peers[0].key))
        return NULL;
    struct peer *p = &t->peers[t->peer_count];
    const char *process = key + strlen(t->prefix);
    size_t n = bytes - strlen(t->prefix);
    if (n == 0 || n >= sizeof(p->process))
        return NULL;
    for (size_t i = 0; i < n; i++) {
        char c = process[i];
        bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == ':' || c == '-';
        if (!plain)
            return NULL;
        p->process[i] = c == ':' ? '-' : c;
    }
    p->process[n] = '\0';
    memcpy(p->key, key, bytes);
    p->key[bytes] = '\0';
    t->peer_count++;
    return p;
}

static void fetch_peer(struct gw_status *t, const struct redis_value *key)
{
    size_t prefix = strlen(t->prefix);
    char own[32];
    snprintf(own, sizeof(own), "gateway:%u", t->shell->params->id);
    if (key->type != REDIS_STRING || key->bytes <= prefix ||
        memcmp(key->text, t->prefix, prefix) != 0)
        return;
    if (key->bytes - prefix == strlen(own) && memcmp(key->text + prefix, own, strlen(own)) == 0)
        return;
    struct peer *p = peer_by_key(t, key->text, key->bytes);
    if (!p)
        return;
    p->seen = true;
    const char *argv[] = {"HGETALL", p->key};
    (void)!command(t, on_hash, p, 2, argv);
}

/* A process that left no key has gone: its lines go too. */
static void scan_over(struct gw_status *t)
{
    t->scanning = false;
    for (uint32_t i = 0; i < t->peer_count; i++)
        if (!t->peers[i].seen)
            str_clear(&t->peers[i].lines);
}

static void scan(struct gw_status *t, const char *cursor);

static void on_scan(void *arg, enum err e, const struct redis_value *value)
{
    struct gw_status *t = arg;
    CHECK_OBJ(t, STATUS_MAGIC);
    if (e != ERR_OK || value->type != REDIS_ARRAY || value->count != 2 ||
        value->items[0].type != REDIS_STRING || value->items[0].bytes > 20 ||
        value->items[1].type != REDIS_ARRAY) {
        t->scanning = false;
        return;
    }
    for (size_t i = 0; i < value->items[1].count; i++)
        fetch_peer(t, &value->items[1].items[i]);
    char cursor[24];
    snprintf(cursor, sizeof(cursor), "%.*s", (int)value->items[0].bytes, value->items[0].text);
    if (strcmp(cursor, "0") == 0 || ++t->scan_rounds > SCAN_ROUNDS_MAX)
        scan_over(t);
    else
        scan(t, cursor);
}

static void scan(struct gw_status *t, const char *cursor)
{
    char pattern[160];
    snprintf(pattern, sizeof(pattern), "%s*", t->prefix);
    const char *argv[] = {"SCAN", cursor, "MATCH", pattern, "COUNT", "1000"};
    if (command(t, on_scan, t, 6, argv) != ERR_OK)
        t->scanning = false;
}

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
    if (!t->shell->redis || t->scanning || now_us - t->fetched_us < FETCH_US ||
        !redis_up(t->shell->redis))
        return;
    t->fetched_us = now_us;
    t->scanning = true;
    t->scan_rounds = 0;
    for (uint32_t i = 0; i < t->peer_count; i++)
        t->peers[i].seen = false;
    scan(t, "0");
}

void gw_status_metrics(struct gw_status *t, struct str *out)
{
    CHECK_OBJ(t, STATUS_MAGIC);
    refresh(t);
    metrics_render(gw_metric_rows, t->shell->metrics, GW_M_COUNT, t->labels, out);
    for (uint32_t i = 0; i < t->peer_count; i++)
        if (t->peers[i].lines.bytes)
            str_add(out, t->peers[i].lines.text, t->peers[i].lines.bytes);
}

/* ---- life ---- */

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
    for (uint32_t i = 0; i < PEERS_MAX; i++)
        str_init(&t->peers[i].lines, PEER_BYTES_MAX);
    make_labels(t);
    snprintf(t->prefix, sizeof(t->prefix), "tandem:{%.64s}:metrics:", s->params->cluster);
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
    for (uint32_t i = 0; i < PEERS_MAX; i++)
        str_fini(&t->peers[i].lines);
    mem_give(t);
    *status_p = NULL;
}
