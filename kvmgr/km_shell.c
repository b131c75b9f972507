/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_shell_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_audit.h"
#include "kvmgr/km_core.h"
#include "kvmgr/km_epoch.h"
#include "kvmgr/km_map.h"
#include "kvmgr/km_params.h"
#include "kvmgr/km_store.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/clock.h"
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

#define TICK_US        250000u
#define PAUSE_US_MIN   1000000u /* a tick this late means that we were stopped */
#define EPOCH_WAIT_US  50000u
#define QUEUE_MAX      8192u
#define WIRE_BYTES     (256u << 10)
#define WIRE_BYTES_MAX (32u << 20)
#define SNAPSHOTS_MAX  16384u

STATIC_CHECK(KM_PEER_BYTES_MAX == BUS_PEER_BYTES_MAX);
STATIC_CHECK(WIRE_FRAMES_MAX <= BUS_FRAMES_MAX);
STATIC_CHECK((int)KM_FREE == (int)KV_FREE && (int)KM_WRITING == (int)KV_WRITING &&
             (int)KM_COMMITTED == (int)KV_COMMITTED);

/* ---- actions ---- */

static void message_send(struct km_shell *s, const struct km_peer *to, const struct msg *m)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    struct bus_peer peer = {.count = to->count};
    uint32_t count = 0;
    memcpy(peer.bytes, to->bytes, sizeof(peer.bytes));
    arena_reset(&s->wire_out);
    enum err e = wire_encode(&s->wire_out, m, frames, &count);
    if (e != ERR_OK) {
        log_error(KVMGR, "reply not encoded", "type=%s reason=\"%s\"", msg_type_name(m->type),
                  err_text(e));
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    /* A worker that does not take its reply asks again; every request is idempotent. */
    if (bus_send(s->socket, &peer, out, count) != ERR_OK)
        s->unsent++;
}

/* The index rows are stored as the latents unless a type is named. */
static enum kv_dtype dtype_of(const char *name, const char *otherwise)
{
    const char *type = name[0] != '\0' ? name : otherwise;
    if (strcmp(type, "bf16") == 0)
        return KV_BF16;
    if (strcmp(type, "fp8") == 0)
        return KV_FP8;
    CHECK(strcmp(type, "f32") == 0); /* main has refused all others */
    return KV_F32;
}

/* Snapshot slots: as many as asked for, or what their share of the arena holds. */
static uint32_t snapshots_wanted(const struct km_shell *s, const struct km_arena_wanted *want)
{
    uint64_t slot_bytes =
        kv_snapshot_slot_bytes(dtype_of(s->params->snapshot_dtype, ""), want->state_bytes);
    uint64_t room = s->params->arena_bytes / 100 * s->params->snapshot_percent / slot_bytes;
    if (s->params->snapshots_max < room)
        room = s->params->snapshots_max;
    return (uint32_t)(room < SNAPSHOTS_MAX ? room : SNAPSHOTS_MAX);
}

static struct km_arena_options arena_options(const struct km_shell *s,
                                             const struct km_arena_wanted *want)
{
    uint32_t snapshots = snapshots_wanted(s, want);
    return (struct km_arena_options){
        .path = s->arena_path,
        .arena_bytes = s->params->arena_bytes,
        .geometry = {.dsa_layers = want->dsa_layers,
                     .latent_dim = want->latent_dim,
                     .index_dim = want->index_dim,
                     .index_kpool = want->index_kpool,
                     .block_tokens = s->params->block_tokens,
                     .kv_dtype = dtype_of(s->params->kv_dtype, ""),
                     .index_dtype = dtype_of(s->params->index_dtype, s->params->kv_dtype),
                     .snapshot_dtype = dtype_of(s->params->snapshot_dtype, ""),
                     .rank = want->rank,
                     .ranks = want->ranks,
                     .interleave = want->interleave > 0 ? want->interleave
                                                        : s->params->block_tokens / want->ranks,
                     .state_bytes = want->state_bytes},
        .model_fp = want->model_fp,
        .live_count = want->slot_count,
        .slot_count = want->slot_count + snapshots,
        .slot_count_min = want->slot_count + (snapshots > 0 ? 1 : 0),
        .epoch = s->epoch,
        .incarnation = s->incarnation,
        .worker = want->worker,
        .boot = s->boot_id[0] ? hash_crc32c(0, s->boot_id, strlen(s->boot_id)) : 0,
    };
}

static void arena_report(const struct km_shell *s, const struct km_arena_report *report)
{
    const struct kv_layout *l = km_arena_layout(s->arena);
    if (report->replaced)
        log_warn(KVMGR, "arena replaced", "path=%s reason=\"%s\"", s->arena_path, report->reason);
    if (report->headers_broken > 0)
        log_warn(KVMGR, "broken headers freed", "count=%u", report->headers_broken);
    log_info(KVMGR, report->adopted ? "arena adopted" : "arena made",
             "path=%s bytes=%" PRIu64
             " blocks=%u slots=%u freed=%u committed=%u snapshots=%u epoch=%u",
             s->arena_path, l->arena_bytes, l->block_count, l->slot_count, report->blocks_freed,
             report->blocks_found, report->snapshots_found, s->epoch);
}

/* Fills the answer to the core; its text borrows detail. */
static struct km_arena_result arena_open(struct km_shell *s, const struct km_arena_wanted *want,
                                         struct err_detail *detail)
{
    struct km_arena_options options = arena_options(s, want);
    struct km_arena_report report;
    if (s->arena) {
        struct km_arena_guard last;
        s->repaired += km_arena_headers_repaired(s->arena);
        s->guards_broken += km_arena_guards_broken(s->arena, &last);
        s->guards_told = 0;
    }
    km_shell_store_close(s);
    km_shell_proof_close(s);
    km_arena_close(&s->arena);
    detail->text[0] = '\0';
    enum err e = km_arena_open(&options, &s->arena, &report, detail);
    if (e == ERR_OK)
        e = km_shell_proof_open(s, detail);
    if (e != ERR_OK) {
        km_arena_close(&s->arena);
        log_error(KVMGR, "no arena", "path=%s reason=\"%s\"", s->arena_path, detail->text);
        return (struct km_arena_result){.code = e, .text = detail->text, .path = ""};
    }
    const struct kv_layout *l = km_arena_layout(s->arena);
    arena_report(s, &report);
    s->model_fp = want->model_fp;
    km_map_arena(s->map, &l->layout_fp, &want->model_fp);
    struct km_arena_found found = km_arena_found(s->arena);
    return (struct km_arena_result){
        .code = ERR_OK,
        .text = "",
        .found_count = found.block_count,
        .found = found.blocks,
        .found_snapshot_count = found.snapshot_count,
        .found_snapshots = found.snapshots,
        .path = s->arena_path,
        .arena_bytes = l->arena_bytes,
        .layout_fp = l->layout_fp,
        .block_count = l->block_count,
        .live_count = l->live_count,
        .slot_count = l->slot_count,
        .object_bytes = {l->block_bytes + KM_STORE_PAGE, l->snapshot_bytes + KM_STORE_PAGE},
    };
}

static void blocks_write(struct km_shell *s, const struct km_action *action)
{
    const uint32_t *blocks = action->u.blocks.blocks;
    uint32_t count = action->u.blocks.count;
    if (count == 0)
        return;
    CHECK(s->arena != NULL);
    switch (action->u.blocks.state) {
    case KM_FREE:
        km_arena_blocks_free(s->arena, blocks, count);
        break;
    case KM_WRITING:
        km_arena_blocks_writing(s->arena, blocks, count);
        break;
    case KM_COMMITTED:
        km_arena_blocks_commit(s->arena, blocks, count, action->u.blocks.first_position,
                               &action->u.blocks.parent, action->u.blocks.hashes);
        break;
    }
}

static void slots_write(struct km_shell *s, const struct km_action *action)
{
    if (action->u.slots.count == 0)
        return;
    CHECK(s->arena != NULL);
    switch (action->u.slots.state) {
    case KM_FREE:
        km_arena_slots_free(s->arena, action->u.slots.slots, action->u.slots.count);
        break;
    case KM_WRITING:
        km_arena_slots_writing(s->arena, action->u.slots.slots, action->u.slots.count,
                               action->u.slots.snapshot);
        break;
    case KM_COMMITTED:
        CHECK(action->u.slots.snapshot && action->u.slots.count == 1);
        km_arena_snapshot_commit(s->arena, action->u.slots.slots[0], action->u.slots.token_count,
                                 &action->u.slots.hash);
        break;
    }
}

/* True: the answer to an action is the next event. */
static bool action_run(struct km_shell *s, const struct km_action *action, struct km_event *event,
                       struct err_detail *detail)
{
    switch (action->type) {
    case KM_ACTION_SEND:
        message_send(s, &action->u.send.peer, &action->u.send.msg);
        break;
    case KM_ACTION_ARENA_OPEN:
        *event = (struct km_event){.type = KM_EVENT_ARENA};
        event->u.arena = arena_open(s, &action->u.arena, detail);
        return true;
    case KM_ACTION_BLOCKS:
        blocks_write(s, action);
        break;
    case KM_ACTION_SLOTS:
        slots_write(s, action);
        break;
    case KM_ACTION_STORE:
        km_shell_store_submit(s, action);
        break;
    case KM_ACTION_PROVE:
        km_shell_proof_submit(s, action);
        break;
    case KM_ACTION_SESSION:
        km_map_commit(s->map, &action->u.session);
        break;
    case KM_ACTION_MOVED:
        km_map_moved(s->map, action->u.moved.items, action->u.moved.count);
        break;
    case KM_ACTION_TRACE:
        log_info(KVMGR, action->u.trace.what, "worker=%u leases=%u text=\"%s\"",
                 action->u.trace.worker_id, action->u.trace.leases, action->u.trace.text);
        break;
    }
    return false;
}

/* Somebody wrote beyond the end of a block or slot: said aloud, and what lies behind is read again
 * before it is lent to anybody. */
static void guards_tell(struct km_shell *s)
{
    struct km_arena_guard last;
    if (!s->arena)
        return;
    uint64_t count = km_arena_guards_broken(s->arena, &last);
    if (count == s->guards_told)
        return;
    log_error(KVMGR, "guard overwritten", "behind=\"%s %u\" count=%" PRIu64,
              last.slot ? "slot" : "block", last.index, count - s->guards_told);
    /* Only the last one is known by name. */
    bool named = !last.slot && count - s->guards_told == 1;
    s->guards_told = count;
    struct km_event event = {.type = KM_EVENT_SUSPECT,
                             .u.suspect = named ? last.index + 1 : KM_NONE};
    km_shell_step(s, event);
}

void km_shell_step(struct km_shell *s, struct km_event event)
{
    struct err_detail detail;
    bool opened = false;
    for (bool again = true; again;) {
        again = false;
        event.now_us = loop_now_us(s->loop);
        km_core_step(s->core, &event, &s->actions);
        for (uint32_t i = 0; i < s->actions.count; i++) {
            if (!action_run(s, &s->actions.list[i], &event, &detail))
                continue;
            CHECK(i + 1 == s->actions.count);
            again = opened = true;
        }
        if (!again && km_core_more(s->core)) {
            event = (struct km_event){.type = KM_EVENT_STORE_DONE};
            again = true;
        }
    }
    guards_tell(s);
    if (!opened || !s->arena)
        return;
    km_arena_found_drop(s->arena);
    km_shell_store_open(s);
}

/* Workers that are silent, or whose name the asker takes: those that can write no more are gone. */
static void suspects_check(struct km_shell *s, const struct km_peer *asker, uint64_t incarnation)
{
    uint64_t who[KM_WORKERS_MAX];
    uint32_t count = km_core_suspects(s->core, asker, incarnation, who);
    for (uint32_t i = 0; i < count; i++) {
        struct km_event event = {.type = KM_EVENT_WORKER_GONE};
        event.u.gone = who[i];
        if (!s->arena || !km_arena_held(s->arena, who[i]))
            km_shell_step(s, event);
    }
}

static void on_message(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t frame_count)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    struct wire_frame in[BUS_FRAMES_MAX];
    CHECK(frame_count <= BUS_FRAMES_MAX);
    for (uint32_t i = 0; i < frame_count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    struct msg msg;
    struct err_detail detail = {{0}};
    arena_reset(&s->wire);
    enum err e = wire_decode(&s->wire, in, frame_count, &msg, &detail);
    if (e != ERR_OK) {
        s->malformed++;
        char id[2 * BUS_PEER_BYTES_MAX + 1];
        hex_encode(peer->bytes, peer->count, id);
        log_warn(KVMGR, "bad message dropped", "peer=%s code=%s reason=\"%s\"", id, err_name(e),
                 detail.text);
        return;
    }
    struct km_event event = {.type = KM_EVENT_MSG};
    event.u.msg.peer.count = peer->count;
    memcpy(event.u.msg.peer.bytes, peer->bytes, peer->count);
    event.u.msg.msg = &msg;
    if (msg.type == MSG_KV_ATTACH)
        suspects_check(s, &event.u.msg.peer, msg.u.kv_attach.incarnation);
    km_shell_step(s, event);
}

static void on_tick(void *arg)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    struct km_event event = {.type = KM_EVENT_TICK};
    uint64_t now_us = loop_now_us(s->loop);
    event.u.stood_still = s->tick_us != 0 && now_us - s->tick_us > PAUSE_US_MIN;
    s->tick_us = now_us;
    km_shell_step(s, event);
    suspects_check(s, NULL, 0);
    if (s->map) {
        km_map_tick(s->map);
        km_shell_state_show(s);
    }
}

/* ---- start: the epoch, then the socket ---- */

void km_shell_state_show(struct km_shell *s)
{
    bool off = strcmp(s->params->redis, "off") == 0;
    const struct km_map_stats *map = s->map ? km_map_stats(s->map) : NULL;
    bool maps = !map || (!map->refusing && map->redis_epoch <= s->epoch);
    bool hints = off || (redis_up(s->redis) && maps);
    if (s->begun && !s->failed && !s->stopping)
        status_set_state(s->status, hints && s->store_text[0] == '\0' ? "ready" : "degraded");
}

static enum err epoch_choose(struct km_shell *s, uint32_t redis_epoch, struct err_detail *detail)
{
    uint32_t in_arena = km_audit_epoch(s->arena_path);
    struct km_epoch_choice choice;
    TRY(km_epoch_choose(s->epoch_local, in_arena, redis_epoch, &choice, detail));
    if (choice.redis_ignored)
        log_error(KVMGR, "epoch in redis is ignored",
                  "reason=\"too far beyond the one on disk; remove its key\" redis=%u local=%u",
                  redis_epoch, s->epoch_local);
    if (choice.arena_ignored)
        log_error(KVMGR, "epoch in the arena is ignored",
                  "reason=\"too far beyond the one on disk\" arena=%u local=%u", in_arena,
                  s->epoch_local);
    s->epoch = choice.epoch;
    return km_epoch_write(s->params->state_dir, s->params->id, s->epoch, detail);
}

static uint64_t unix_ms(void)
{
    return clock_unix_us() / 1000;
}

static enum err serve(struct km_shell *s, uint32_t redis_epoch, struct err_detail *detail)
{
    TRY(epoch_choose(s, redis_epoch, detail));
    struct km_core_options core = {
        .epoch = s->epoch,
        .incarnation = s->incarnation,
        .key = s->key,
        .block_tokens = s->params->block_tokens,
        .kv_dtype = dtype_of(s->params->kv_dtype, ""),
        .index_dtype = dtype_of(s->params->index_dtype, s->params->kv_dtype),
        .snapshot_dtype = dtype_of(s->params->snapshot_dtype, ""),
        .slots_spare = s->params->slots_spare,
        .snapshot_every = (s->params->snapshot_every + s->params->block_tokens - 1) /
                          s->params->block_tokens * s->params->block_tokens,
        .sessions_max = s->params->sessions_max,
        .session_percent = s->params->session_percent,
        .tenant_percent = s->params->tenant_percent,
        .pin_percent = s->params->pin_percent,
        .pin_us = (uint64_t)s->params->pin_s * 1000000u,
        .tier_bytes_max = s->params->kv_store_dir[0] ? s->params->kv_store_bytes : 0,
        .tier_objects_max = s->params->kv_store_objects,
    };
    struct km_map_options map = {
        .redis = s->redis,
        .cluster = s->params->cluster,
        .pool_id = s->params->id,
        .epoch = s->epoch,
        .incarnation = s->incarnation,
        .sessions_max = s->params->sessions_max,
        .ttl_ms = (uint64_t)s->params->session_ttl_s * 1000,
        .unix_ms = unix_ms,
    };
    s->core = km_core_create(&core);
    s->map = km_map_create(&map);
    TRY(bus_bind(s->bus, s->endpoint, QUEUE_MAX, on_message, s, &s->socket, detail));
    loop_timer_start(s->tick, TICK_US, true);
    return ERR_OK;
}

static void begin(struct km_shell *s, uint32_t redis_epoch, const char *source)
{
    struct err_detail detail = {{0}};
    if (s->begun)
        return;
    s->begun = true;
    loop_timer_stop(s->epoch_timer);
    enum err e = serve(s, redis_epoch, &detail);
    if (e != ERR_OK) {
        log_error(KVMGR, "cannot start", "reason=\"%s\"", detail.text);
        s->failed = true;
        loop_stop(s->loop);
        return;
    }
    log_info(KVMGR, "serving", "endpoint=%s epoch=%u local=%u redis=%u source=%s", s->endpoint,
             s->epoch, s->epoch_local, redis_epoch, source);
    km_shell_state_show(s);
    if (redis_up(s->redis))
        km_map_redis_up(s->map, true);
}

static void on_epoch_timer(void *arg)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    begin(s, 0, "disk");
}

static void on_epoch(void *arg, enum err e, const struct redis_value *value)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    uint64_t epoch = 0;
    if (e != ERR_OK)
        return; /* the timer decides */
    if (value->type == REDIS_STRING &&
        (!text_to_u64(value->text, value->bytes, &epoch) || epoch > UINT32_MAX)) {
        log_error(KVMGR, "epoch in redis is ignored",
                  "reason=\"no epoch; remove its key\" text=\"%.*s\"",
                  (int)(value->bytes < 31 ? value->bytes : 31), value->text);
        epoch = 0;
    }
    begin(s, (uint32_t)epoch, "redis");
}

static void on_redis(void *arg, bool up)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    if (s->begun) {
        if (s->map)
            km_map_redis_up(s->map, up);
        km_shell_state_show(s);
        return;
    }
    char key[128];
    snprintf(key, sizeof(key), "tandem:{%.64s}:epoch:%u", s->params->cluster, s->params->id);
    const char *argv[] = {"GET", key};
    size_t bytes[] = {3, strlen(key)};
    if (up && redis_command(s->redis, on_epoch, s, 2, argv, bytes) != ERR_OK)
        log_warn(KVMGR, "epoch not asked of redis", "");
}

/* ---- public ---- */

static void facts_read(struct km_shell *s)
{
    host_boot_id(s->boot_id);
    if (gethostname(s->host, sizeof(s->host) - 1) != 0)
        s->host[0] = '\0';
}

static enum err shell_open(struct km_shell *s, struct err_detail *detail)
{
    const struct km_params *p = s->params;
    TRY(block_hash_key_load(p->state_dir, &s->key, detail));
    if (p->arena_path[0] == '\0')
        TRY(km_arena_default_path(p->cluster, p->run_dir, p->id, s->arena_path, detail));
    else
        snprintf(s->arena_path, sizeof(s->arena_path), "%s", p->arena_path);
    enum err e = km_epoch_read(p->state_dir, p->id, &s->epoch_local, detail);
    if (e == ERR_CORRUPT)
        log_warn(KVMGR, "epoch file ignored", "reason=\"%s\"", detail->text);
    else if (e != ERR_OK)
        return e;
    struct redis_options redis = {0};
    redis_address(p->redis, p->run_dir, &redis);
    s->redis = redis_create(s->loop, &redis);
    redis_on_change(s->redis, on_redis, s);
    TRY(km_shell_status_open(s, detail));
    s->bus = bus_create(s->loop);
    s->tick = loop_timer_create(s->loop, on_tick, s);
    s->epoch_timer = loop_timer_create(s->loop, on_epoch_timer, s);
    loop_timer_start(s->epoch_timer, strcmp(p->redis, "off") == 0 ? 0 : EPOCH_WAIT_US, false);
    return ERR_OK;
}

enum err km_shell_create(struct loop *l, const struct km_params *params,
                         struct km_shell **ret_shell, struct err_detail *detail)
{
    struct km_shell *s = mem_take(sizeof(*s));
    s->magic = KM_SHELL_MAGIC;
    s->loop = l;
    s->params = params;
    arena_init(&s->wire, WIRE_BYTES, WIRE_BYTES_MAX);
    arena_init(&s->wire_out, WIRE_BYTES, WIRE_BYTES_MAX);
    while (s->incarnation == 0) /* which means "unknown" elsewhere */
        rng_system(&s->incarnation, sizeof(s->incarnation));
    role_endpoint(params->run_dir, "kvmgr", params->id, s->endpoint, sizeof(s->endpoint));
    facts_read(s);
    enum err e = shell_open(s, detail);
    if (e != ERR_OK) {
        km_shell_destroy(&s);
        return e;
    }
    *ret_shell = s;
    return ERR_OK;
}

void km_shell_destroy(struct km_shell **shell_p)
{
    struct km_shell *s = *shell_p;
    if (!s)
        return;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    loop_timer_destroy(&s->tick);
    loop_timer_destroy(&s->epoch_timer);
    bus_socket_destroy(&s->socket);
    bus_destroy(&s->bus);
    status_destroy(&s->status);
    if (s->redis)
        redis_destroy(&s->redis); /* answers for writes in flight: before the map */
    km_map_destroy(&s->map);
    km_shell_store_close(s);
    loop_waker_destroy(&s->store_waker);
    km_shell_proof_close(s);
    loop_waker_destroy(&s->proof_waker);
    loop_timer_destroy(&s->stop_timer);
    km_core_destroy(&s->core);
    km_arena_close(&s->arena);
    arena_fini(&s->wire);
    arena_fini(&s->wire_out);
    s->magic = 0;
    mem_give(s);
    *shell_p = NULL;
}

bool km_shell_failed(const struct km_shell *s)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    return s->failed;
}
