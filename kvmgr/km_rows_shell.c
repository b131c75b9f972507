/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_rows_shell.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kvmgr/km_params.h"
#include "kvmgr/km_rows.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/host.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/role.h"
#include "lib/net/status.h"
#include "proto/wire.h"

#define SHELL_MAGIC    0x4b4d5253u
#define QUEUE_MAX      64u
#define WIRE_BYTES     (256u << 10)
#define WIRE_BYTES_MAX (32u << 20)

enum rows_metric {
#define COUNTER(ident, name, labels, help) ROWS_METRIC_##ident,
#define GAUGE(ident, name, labels, help)   ROWS_METRIC_##ident,
#include "kvmgr/km_rows_metrics.def"
#undef COUNTER
#undef GAUGE
    ROWS_METRIC_COUNT
};

static const struct metric_row rows_metric_rows[ROWS_METRIC_COUNT] = {
#define COUNTER(ident, name, labels, help) {METRIC_COUNTER, name, labels, NULL, help},
#define GAUGE(ident, name, labels, help)   {METRIC_GAUGE, name, labels, NULL, help},
#include "kvmgr/km_rows_metrics.def"
#undef COUNTER
#undef GAUGE
};

struct km_rows_shell {
    uint32_t magic;
    struct km_rows *rows;
    struct bus *bus;
    struct bus_socket *socket;
    struct redis *redis;
    struct status *status;
    struct arena wire, wire_out;
    uint64_t malformed, refused, unsent;
    struct metric metrics[ROWS_METRIC_COUNT];
};

static void reply_send(struct km_rows_shell *s, const struct bus_peer *to, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    arena_reset(&s->wire_out);
    enum err e = wire_encode(&s->wire_out, m, frames, &count);
    for (uint32_t i = 0; e == ERR_OK && i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    if (e != ERR_OK || bus_send(s->socket, to, out, count) != ERR_OK)
        s->unsent++; /* the worker asks again */
}

static void on_message(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t frame_count)
{
    struct km_rows_shell *s = arg;
    CHECK_OBJ(s, SHELL_MAGIC);
    struct wire_frame in[BUS_FRAMES_MAX];
    struct msg msg;
    struct err_detail detail = {{0}};
    CHECK(frame_count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < frame_count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    arena_reset(&s->wire);
    enum err e = wire_decode(&s->wire, in, frame_count, &msg, &detail);
    if (e != ERR_OK) {
        s->malformed++;
        log_warn(KVMGR, "bad message dropped", "code=%s reason=\"%s\"", err_name(e), detail.text);
        return;
    }
    struct msg reply = {.id = msg.id};
    if (msg.type == MSG_KV_ATTACH) {
        reply.type = MSG_KV_ATTACH_REPLY;
        km_rows_attach(s->rows, &msg.u.kv_attach, &reply.u.kv_attach_reply);
    } else if (msg.type == MSG_KV_PING) {
        reply.type = MSG_KV_STATE;
        km_rows_ping(s->rows, msg.u.kv_ping.incarnation, &reply.u.kv_state);
    } else { /* leases are the authority's */
        s->refused++;
        return;
    }
    reply_send(s, peer, &reply);
}

static void on_refresh(void *arg)
{
    struct km_rows_shell *s = arg;
    const struct km_rows_counts *c = km_rows_counts(s->rows);
    const struct km_arena *a = km_rows_arena(s->rows);
    struct metric *m = s->metrics;
    if (a != NULL) {
        struct kv_superblock b = km_arena_superblock(a);
        metric_set(&m[ROWS_METRIC_arena_bytes], (double)b.arena_bytes);
        metric_set(&m[ROWS_METRIC_blocks_total], (double)b.block_count);
        metric_set(&m[ROWS_METRIC_epoch], (double)b.epoch);
    }
    metric_set(&m[ROWS_METRIC_attaches], (double)c->attaches);
    metric_set(&m[ROWS_METRIC_attaches_refused], (double)c->refused);
    metric_set(&m[ROWS_METRIC_blocks_adopted], (double)c->blocks_adopted);
    metric_set(&m[ROWS_METRIC_snapshots_adopted], (double)c->snapshots_adopted);
    metric_set(&m[ROWS_METRIC_headers_repaired], (double)c->broken);
    metric_set(&m[ROWS_METRIC_refused], (double)s->refused);
    metric_set(&m[ROWS_METRIC_malformed], (double)s->malformed);
    metric_set(&m[ROWS_METRIC_unsent], (double)s->unsent);
}

static void on_health(void *arg, struct str *out)
{
    struct km_rows_shell *s = arg;
    const struct km_rows_counts *c = km_rows_counts(s->rows);
    struct kv_superblock b = {0};
    if (km_rows_arena(s->rows) != NULL)
        b = km_arena_superblock(km_rows_arena(s->rows));
    str_add_format(
        out,
        ",\"kv_role\":\"arena\",\"epoch\":%u,\"blocks_total\":%u,\"slots_total\":%u,"
        "\"arena_bytes\":%" PRIu64 ",\"blocks_adopted\":%" PRIu64 ",\"damaged\":%" PRIu64,
        b.epoch, b.block_count, b.slot_count, b.arena_bytes, c->blocks_adopted, c->broken);
}

static enum err shell_open(struct km_rows_shell *s, struct loop *l, const struct km_params *p,
                           struct err_detail *detail)
{
    char path[KM_ARENA_PATH_BYTES], endpoint[600];
    struct redis_options redis = {0};
    uint64_t incarnation = 0;
    if (p->arena_path[0] == '\0')
        TRY(km_arena_default_path(p->cluster, p->run_dir, p->id, path, detail));
    else
        snprintf(path, sizeof(path), "%s", p->arena_path);
    struct km_rows_options rows = {
        .path = path, .state_dir = p->state_dir, .id = p->id, .boot = host_boot()};
    TRY(km_rows_create(&rows, &s->rows, detail));
    redis_address(p->redis, p->run_dir, &redis);
    s->redis = redis_create(l, &redis);
    rng_system(&incarnation, sizeof(incarnation));
    struct status_options o = {
        .role = "kvmgr",
        .id = p->id,
        .cluster = p->cluster,
        .run_dir = p->run_dir,
        .incarnation = incarnation,
        .redis = s->redis,
        .rows = rows_metric_rows,
        .values = s->metrics,
        .metric_count = ROWS_METRIC_COUNT,
        .common_labels = "",
        .extra = on_health,
        .refresh = on_refresh,
        .arg = s,
    };
    TRY(status_create(l, &o, &s->status, detail));
    s->bus = bus_create(l);
    role_endpoint(p->run_dir, "kvmgr", p->id, endpoint, sizeof(endpoint));
    TRY(bus_bind(s->bus, endpoint, QUEUE_MAX, on_message, s, &s->socket, detail));
    status_set_state(s->status, "ready");
    log_info(KVMGR, "serving", "role=arena endpoint=%s path=%s", endpoint, path);
    return ERR_OK;
}

enum err km_rows_shell_create(struct loop *l, const struct km_params *params,
                              struct km_rows_shell **ret_shell, struct err_detail *detail)
{
    struct km_rows_shell *s = mem_take(sizeof(*s));
    s->magic = SHELL_MAGIC;
    arena_init(&s->wire, WIRE_BYTES, WIRE_BYTES_MAX);
    arena_init(&s->wire_out, WIRE_BYTES, WIRE_BYTES_MAX);
    enum err e = shell_open(s, l, params, detail);
    if (e != ERR_OK) {
        km_rows_shell_destroy(&s);
        return e;
    }
    *ret_shell = s;
    return ERR_OK;
}

void km_rows_shell_destroy(struct km_rows_shell **shell_p)
{
    struct km_rows_shell *s = *shell_p;
    if (!s)
        return;
    CHECK_OBJ(s, SHELL_MAGIC);
    bus_socket_destroy(&s->socket);
    bus_destroy(&s->bus);
    status_destroy(&s->status);
    redis_destroy(&s->redis);
    km_rows_destroy(&s->rows);
    arena_fini(&s->wire);
    arena_fini(&s->wire_out);
    s->magic = 0;
    mem_give(s);
    *shell_p = NULL;
}
