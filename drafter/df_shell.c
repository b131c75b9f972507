/* SPDX-License-Identifier: Apache-2.0 */
#include "drafter/df_shell.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "drafter/df_core.h"
#include "drafter/df_model.h"
#include "drafter/df_params.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/model/dflash.h"
#include "lib/net/bus.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/role.h"
#include "lib/net/status.h"
#include "proto/tap_ring.h"
#include "proto/wire.h"

#define DF_SHELL_MAGIC 0x44465348u
#define TICK_US        1000000u
#define PENDING_MAX    64u /* a burst of more is answered in parts */
/* A body is at most 1 MiB on the wire; its fields and a copy of a misaligned payload fit too. */
#define ARENA_BYTES_MAX (32u << 20)
#define ARENA_BYTES     (256u << 10)

STATIC_CHECK(DF_PEER_BYTES == BUS_PEER_BYTES_MAX);
STATIC_CHECK(WIRE_FRAMES_MAX <= BUS_FRAMES_MAX);

enum df_metric {
#define COUNTER(ident, name, labels, help) DF_METRIC_##ident,
#define GAUGE(ident, name, labels, help)   DF_METRIC_##ident,
#include "drafter/df_metrics.def"
#undef COUNTER
#undef GAUGE
    DF_METRIC_COUNT
};

static const struct metric_row df_metric_rows[DF_METRIC_COUNT] = {
#define COUNTER(ident, name, labels, help) {METRIC_COUNTER, name, labels, NULL, help},
#define GAUGE(ident, name, labels, help)   {METRIC_GAUGE, name, labels, NULL, help},
#include "drafter/df_metrics.def"
#undef COUNTER
#undef GAUGE
};

/* A proposal that waits for the network: answered at the end of the burst. */
struct df_pending {
    struct bus_peer peer;
    struct msg reply;
    uint64_t received_us;
    uint32_t sequence, wanted, anchor;
};

struct df_shell {
    uint32_t magic;
    struct loop *loop;
    struct bus *bus;
    struct bus_socket *socket;
    struct redis *redis;
    struct status *status;
    struct loop_timer *tick;
    struct loop_timer *turn; /* ends the current burst */
    uint64_t burst_us;       /* 0 = no message yet in this turn of the loop */
    struct arena arena;
    struct df_core core;
    struct df_actions actions;
    struct df_model *model; /* NULL = n-gram only */
    struct df_pending pending[PENDING_MAX];
    struct df_model_ask asks[PENDING_MAX];
    uint32_t pending_count;
    bool ring_refused[DF_PEERS_MAX];
    void *memory;
    size_t memory_bytes, sequence_bytes;
    bool draining; /* answers nobody: workers go on without drafts */
    uint64_t bad_frames, unsent;
    struct metric metrics[DF_METRIC_COUNT];
};

/* ---- messages ---- */

static void freed_return(struct df_shell *s)
{
    for (uint32_t i = 0; i < s->actions.freed_count; i++) {
        char *at = (char *)s->memory + s->actions.freed[i] * s->sequence_bytes;
        if (madvise(at, s->sequence_bytes, MADV_DONTNEED) != 0)
            log_warn(DRAFTER, "memory not returned", "reason=\"%s\"", strerror(errno));
        if (s->model != NULL)
            df_model_drop(s->model, s->actions.freed[i]);
    }
}

static void reply_send(struct df_shell *s, const struct bus_peer *peer, const struct msg *msg)
{
    struct wire_frame frames[WIRE_FRAMES_MAX];
    struct bus_frame out[WIRE_FRAMES_MAX];
    uint32_t count = 0;
    enum err e = wire_encode(&s->arena, msg, frames, &count);
    if (e != ERR_OK) {
        log_error(DRAFTER, "reply not encoded", "reason=\"%s\"", err_text(e));
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        out[i] = (struct bus_frame){frames[i].bytes, frames[i].count};
    /* A worker that does not take its reply goes on without drafts. */
    if (bus_send(s->socket, peer, out, count) != ERR_OK)
        s->unsent++;
}

/* ---- the network ---- */

static void ring_take(struct df_shell *s, const struct msg_draft_hello *h)
{
    struct err_detail detail;
    uint32_t peer = s->actions.peer;
    if (h->tap_ring == NULL || h->tap_ring[0] == '\0')
        return;
    enum err e = df_model_ring(s->model, peer, h->tap_ring, h->tap_ring_incarnation,
                               &h->tap_context_fp, &detail);
    if (e != ERR_OK && !s->ring_refused[peer])
        log_error(DRAFTER, "no tap ring", "reason=\"%s\"", detail.text);
    s->ring_refused[peer] = e != ERR_OK;
}

/* Said once for each process of a worker; it gets n-gram drafts. */
static void misfit_log(const struct df_shell *s, const struct msg_draft_hello *h)
{
    const struct df_core_options *o = &s->core.options;
    char theirs[33], ours[33], model[33];
    hex_encode(h->tokenizer_fp.bytes, sizeof h->tokenizer_fp.bytes, theirs);
    hex_encode(o->network_tokenizer.bytes, sizeof o->network_tokenizer.bytes, ours);
    hex_encode(h->model_fp.bytes, sizeof h->model_fp.bytes, model);
    log_error(DRAFTER, "the network was made for another model: n-gram drafts only",
              "field=%s hidden=%u/%u vocab_size=%u/%u layers=%u tokenizer_fp=%s/%s model_fp=%s",
              s->actions.misfit, h->hidden, o->network_hidden, h->vocab_size, o->network_vocab,
              h->layers, theirs, ours, model);
}

/* What a message means for the contexts. */
static void model_follow(struct df_shell *s, const struct msg *msg)
{
    const struct df_actions *a = &s->actions;
    if (msg->type == MSG_DRAFT_HELLO && a->misfit != NULL)
        misfit_log(s, &msg->u.draft_hello);
    if (msg->type == MSG_DRAFT_HELLO && a->fits)
        ring_take(s, &msg->u.draft_hello);
    if (a->sequence == DF_NONE || a->peer == DF_NONE)
        return;
    if (!a->fresh && a->cut)
        df_model_cut(s->model, a->sequence, a->cut_length);
    df_model_drain(s->model, a->peer);
    if (a->fresh)
        df_model_begin(s->model, a->sequence, &msg->id, a->peer);
    df_model_length(s->model, a->sequence, a->peer, a->length);
    if (msg->type == MSG_DRAFT_OPEN)
        df_model_refill(s->model, a->sequence);
}

/* One forward for all that asked in this burst. */
static void pending_answer(struct df_shell *s)
{
    uint64_t now_us = loop_now_us(s->loop);
    uint32_t count = 0, at[PENDING_MAX];
    for (uint32_t i = 0; i < s->pending_count; i++) {
        struct df_pending *p = &s->pending[i];
        const struct df_sequence *q = &s->core.sequences[p->sequence];
        bool there = q->used && memcmp(&q->id, &p->reply.id, sizeof q->id) == 0;
        if (!there) {
            p->reply.u.draft_reply.code = ERR_NOT_FOUND;
        } else if (now_us - p->received_us > s->core.options.deadline_us) {
            p->reply.u.draft_reply.code = ERR_TIMEOUT;
            s->core.counters.late++;
        } else {
            at[count] = i;
            s->asks[count++] =
                (struct df_model_ask){.sequence = p->sequence,
                                      .position = p->reply.u.draft_reply.base_length - 1,
                                      .anchor = p->anchor};
        }
    }
    df_model_draft(s->model, s->asks, count);
    for (uint32_t i = 0; i < count; i++) {
        struct df_pending *p = &s->pending[at[i]];
        struct msg_draft_reply *r = &p->reply.u.draft_reply;
        r->ids_count = s->asks[i].count < p->wanted ? s->asks[i].count : p->wanted;
        r->ids = s->asks[i].ids;
        df_core_drafted(&s->core, r->ids_count);
    }
    for (uint32_t i = 0; i < s->pending_count; i++) {
        arena_reset(&s->arena);
        reply_send(s, &s->pending[i].peer, &s->pending[i].reply);
    }
    s->pending_count = 0;
}

static void pending_add(struct df_shell *s, const struct bus_peer *peer, uint64_t received_us)
{
    if (s->pending_count == PENDING_MAX)
        pending_answer(s);
    struct df_pending *p = &s->pending[s->pending_count++];
    *p = (struct df_pending){.peer = *peer,
                             .reply = s->actions.msg,
                             .received_us = received_us,
                             .sequence = s->actions.sequence,
                             .wanted = s->actions.wanted,
                             .anchor = s->actions.anchor};
    p->reply.u.draft_reply.ids = NULL;
}

/* ---- messages from workers ---- */

static void on_message(void *arg, const struct bus_peer *peer, const struct bus_frame *frames,
                       uint32_t frame_count)
{
    struct df_shell *s = arg;
    CHECK_OBJ(s, DF_SHELL_MAGIC);
    struct wire_frame in[BUS_FRAMES_MAX];
    for (uint32_t i = 0; i < frame_count; i++)
        in[i] = (struct wire_frame){frames[i].bytes, frames[i].count};
    struct msg msg;
    struct err_detail detail;
    arena_reset(&s->arena);
    enum err e = wire_decode(&s->arena, in, frame_count, &msg, &detail);
    if (e != ERR_OK) {
        s->bad_frames++;
        char id[2 * BUS_PEER_BYTES_MAX + 1];
        hex_encode(peer->bytes, peer->count, id);
        log_warn(DRAFTER, "bad message dropped", "peer=%s code=%s reason=\"%s\"", id, err_name(e),
                 detail.text);
        return;
    }
    if (s->draining)
        return;
    struct df_event event = {.type = DF_MESSAGE, .now_us = loop_now_us(s->loop), .msg = &msg};
    if (s->burst_us == 0) {
        s->burst_us = event.now_us;
        loop_timer_start(s->turn, 0, false);
    }
    event.received_us = s->burst_us;
    event.peer.count = peer->count;
    memcpy(event.peer.bytes, peer->bytes, peer->count);
    df_core_step(&s->core, &event, &s->actions);
    freed_return(s);
    if (s->model != NULL)
        model_follow(s, &msg);
    if (s->actions.reply)
        reply_send(s, peer, &s->actions.msg);
    else if (s->actions.ask)
        pending_add(s, peer, event.received_us);
}

static void on_turn(void *arg)
{
    struct df_shell *s = arg;
    CHECK_OBJ(s, DF_SHELL_MAGIC);
    s->burst_us = 0;
    if (s->pending_count > 0)
        pending_answer(s);
}

static void on_tick(void *arg)
{
    struct df_shell *s = arg;
    CHECK_OBJ(s, DF_SHELL_MAGIC);
    struct df_event event = {.type = DF_TICK, .now_us = loop_now_us(s->loop)};
    df_core_step(&s->core, &event, &s->actions);
    freed_return(s);
}

/* ---- status ---- */

static void on_refresh(void *arg)
{
    struct df_shell *s = arg;
    const struct df_counters *c = &s->core.counters;
    const struct bus_stats *b = bus_stats(s->socket);
    struct df_model_counters n = {0};
    if (s->model != NULL)
        n = *df_model_counters(s->model);
    const struct {
        enum df_metric metric;
        uint64_t value;
    } values[] = {
        {DF_METRIC_opens, c->opens},
        {DF_METRIC_contexts, c->contexts},
        {DF_METRIC_proposals, c->proposals},
        {DF_METRIC_hits, c->hits},
        {DF_METRIC_draft_ids, c->draft_ids},
        {DF_METRIC_not_found, c->not_found},
        {DF_METRIC_stale, c->stale},
        {DF_METRIC_too_long, c->too_long},
        {DF_METRIC_late, c->late},
        {DF_METRIC_unsupported, c->unsupported},
        {DF_METRIC_misfits, c->misfits},
        {DF_METRIC_no_context, n.no_context},
        {DF_METRIC_tap_records, n.records},
        {DF_METRIC_tap_lost, n.lost},
        {DF_METRIC_tap_refilled, n.refilled},
        {DF_METRIC_holes, n.holes},
        {DF_METRIC_batches, n.batches},
        {DF_METRIC_blocks, n.blocks},
        {DF_METRIC_draft_us, n.draft_us},
        {DF_METRIC_append_us, n.append_us},
        {DF_METRIC_evicted, c->evicted},
        {DF_METRIC_silent, c->silent},
        {DF_METRIC_superseded, c->superseded},
        {DF_METRIC_bad_frames, s->bad_frames},
        {DF_METRIC_foreign, c->foreign},
        {DF_METRIC_bounds, b->dropped_bounds},
        {DF_METRIC_unsent, s->unsent},
        {DF_METRIC_live, s->core.live},
        {DF_METRIC_tokens, s->core.tokens},
    };
    STATIC_CHECK(ARRAY_COUNT(values) == DF_METRIC_COUNT);
    for (size_t i = 0; i < ARRAY_COUNT(values); i++)
        metric_set(&s->metrics[values[i].metric], (double)values[i].value);
}

static const char *source_name(const struct df_shell *s)
{
    return s->model != NULL ? "dflash" : "ngram";
}

static void on_health(void *arg, struct str *out)
{
    struct df_shell *s = arg;
    str_add_format(out, ",\"source\":\"%s\",\"rings\":%u,\"sequences\":%u,\"tokens\":%" PRIu64,
                   source_name(s), s->model != NULL ? df_model_rings(s->model) : 0, s->core.live,
                   s->core.tokens);
}

static void on_heartbeat(void *arg, void (*add)(void *add_arg, const char *name, const char *value),
                         void *add_arg)
{
    struct df_shell *s = arg;
    char text[32];
    snprintf(text, sizeof(text), "%u", s->core.live);
    add(add_arg, "source", source_name(s));
    add(add_arg, "sequences", text);
}

/* Sequences are kept; what they miss meanwhile the workers send again. */
static enum err on_command(void *arg, const struct status_command *c, struct err_detail *detail)
{
    struct df_shell *s = arg;
    CHECK_OBJ(s, DF_SHELL_MAGIC);
    if (c->has_worker)
        return err_set(detail, ERR_NOT_FOUND, "worker: the drafter drains as a whole");
    s->draining = strcmp(c->name, "drain") == 0;
    status_set_state(s->status, s->draining ? "draining" : "ready");
    return ERR_OK;
}

static enum err status_open(struct df_shell *s, const struct df_params *params,
                            struct err_detail *detail)
{
    struct redis_options redis = {0};
    redis_address(params->redis, params->run_dir, &redis);
    s->redis = redis_create(s->loop, &redis);
    struct status_options o = {
        .role = "drafter",
        .id = params->id,
        .cluster = params->cluster,
        .run_dir = params->run_dir,
        .incarnation = s->core.options.incarnation,
        .redis = s->redis,
        .rows = df_metric_rows,
        .values = s->metrics,
        .metric_count = DF_METRIC_COUNT,
        .common_labels = "",
        .extra = on_health,
        .refresh = on_refresh,
        .heartbeat = on_heartbeat,
        .command = on_command,
        .arg = s,
    };
    return status_create(s->loop, &o, &s->status, detail);
}

/* ---- life ---- */

/* The network and what the core must know of it. */
static enum err model_open(struct df_shell *s, const struct df_params *p,
                           struct df_core_options *core, struct err_detail *detail)
{
    struct df_model_options o = {
        .directory = p->model,
        .target = p->target,
        .sequences_max = p->sequences_max,
        .context_max = p->context_max,
        .tokens_max = p->tokens_max,
        .bytes_max = p->context_bytes_max,
        .rings_max = DF_PEERS_MAX,
        .context_min = p->context_min,
        .threads = p->threads,
        .exact = strcmp(p->numerics, "exact") == 0,
        .head_8bit = strcmp(p->draft_head, "own_8bit") == 0,
    };
    if (p->model[0] == '\0')
        return ERR_OK;
    TRY(df_model_create(&o, &s->model, detail));
    const struct dflash_config *c = df_model_config(s->model);
    uint32_t drafts = c->block_size - 1;
    core->network_drafts = drafts;
    core->network_hidden = c->hidden;
    core->network_vocab = c->vocab_size;
    core->network_tokenizer = df_model_tokenizer(s->model);
    core->network_context = df_model_context_fp(s->model);
    core->tap_layer_count = c->tap_count;
    memcpy(core->tap_layers, c->taps, c->tap_count * sizeof *c->taps);
    core->tap_type = strcmp(p->tap_type, "f32") == 0 ? TAP_F32 : TAP_BF16;
    core->ngram_first = p->ngram_first;
    log_info(DRAFTER, "drafter loaded", "kind=%s layers=%u block=%u taps=%u formats=\"%s\"",
             c->v2 ? "dflash2" : "dflash", c->layers, c->block_size, c->tap_count,
             df_model_formats(s->model));
    return ERR_OK;
}

static enum err core_open(struct df_shell *s, const struct df_params *params,
                          struct err_detail *detail)
{
    struct df_core_options o = {
        .sequences_max = params->sequences_max,
        .context_max = params->context_max,
        .tokens_max = params->tokens_max,
        .match_min = params->match_min,
        .match_max = params->match_max,
        .silence_us_max = params->silence_s * UINT64_C(1000000),
        .deadline_us = params->deadline_ms * UINT64_C(1000),
    };
    rng_system(&o.incarnation, sizeof(o.incarnation));
    rng_system(&o.seed, sizeof(o.seed));
    TRY(model_open(s, params, &o, detail));
    s->sequence_bytes = df_core_sequence_bytes(&o);
    s->memory_bytes = df_core_bytes(&o);
    s->memory = mmap(NULL, s->memory_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s->memory == MAP_FAILED) {
        s->memory = NULL;
        return err_set(detail, ERR_NOMEM,
                       "sequences_max x context_max: %zu bytes of address space: %s",
                       s->memory_bytes, strerror(errno));
    }
    df_core_init(&s->core, &o, s->memory, s->memory_bytes);
    return ERR_OK;
}

enum err df_shell_create(struct loop *l, const struct df_params *params,
                         struct df_shell **ret_shell, struct err_detail *detail)
{
    struct df_shell *s = mem_take(sizeof(*s));
    s->magic = DF_SHELL_MAGIC;
    s->loop = l;
    arena_init(&s->arena, ARENA_BYTES, ARENA_BYTES_MAX);
    s->tick = loop_timer_create(l, on_tick, s);
    s->turn = loop_timer_create(l, on_turn, s);
    s->bus = bus_create(l);
    char endpoint[PARAM_STR_BYTES + 32];
    role_endpoint(params->run_dir, "drafter", params->id, endpoint, sizeof(endpoint));
    enum err e = core_open(s, params, detail);
    if (e == ERR_OK)
        e = bus_bind(s->bus, endpoint, params->queue_max, on_message, s, &s->socket, detail);
    if (e == ERR_OK)
        e = status_open(s, params, detail);
    if (e != ERR_OK) {
        df_shell_destroy(&s);
        return e;
    }
    loop_timer_start(s->tick, TICK_US, true);
    status_set_state(s->status, "ready");
    *ret_shell = s;
    return ERR_OK;
}

void df_shell_destroy(struct df_shell **shell_p)
{
    struct df_shell *s = *shell_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, DF_SHELL_MAGIC);
    status_destroy(&s->status);
    redis_destroy(&s->redis);
    bus_socket_destroy(&s->socket);
    bus_destroy(&s->bus);
    loop_timer_destroy(&s->turn);
    loop_timer_destroy(&s->tick);
    arena_fini(&s->arena);
    df_model_destroy(&s->model);
    if (s->memory != NULL)
        munmap(s->memory, s->memory_bytes);
    s->magic = 0;
    mem_give(s);
    *shell_p = NULL;
}
