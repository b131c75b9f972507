/* SPDX-License-Identifier: Apache-2.0 */
/* The shell's side of kvmgr: attaching, the arena's mapping, pings. */
#include <inttypes.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"
#include "lib/net/status.h"
#include "worker/wk_shell_state.h"

#define ATTACH_AGAIN_US 1000000u
#define IDS_MAX_LEAST   (64u << 10)

struct hash128 wk_shell_rows_fp(const struct wk_shell *s)
{
    const struct model_info *info = wk_exec_loaded(s->exec)->info;
    uint8_t bytes[sizeof info->model_fp + 8] = {0};
    memcpy(bytes, &info->model_fp, sizeof info->model_fp);
    memcpy(bytes + sizeof info->model_fp, s->params->numerics,
           strnlen(s->params->numerics, sizeof bytes - sizeof info->model_fp));
    return hash_xxh3_once(bytes, sizeof bytes);
}

static void attach_send(struct wk_shell *s)
{
    const struct model_info *info = wk_exec_loaded(s->exec)->info;
    struct msg m = {.type = MSG_KV_ATTACH};
    m.u.kv_attach = (struct msg_kv_attach){
        .worker_id = s->params->id,
        .incarnation = s->incarnation,
        .dsa_layers = info->dsa_layers,
        .latent_dim = info->latent_dim,
        .index_dim = info->index_dim,
        .index_kpool = info->index_kpool,
        .state_bytes = info->state_bytes,
        .seqs_max = s->params->seqs_max,
        .rank = 0,
        .ranks = s->params->dcp,
        .interleave = wk_params_interleave(s->params),
        .model_fp = wk_shell_rows_fp(s),
        .rows_ranks = s->params->ranks,
    };
    s->kv.asked_us = loop_now_us(s->loop);
    wk_shell_beat(s, WK_KVMGR, &m);
}

/* ---- mapping ---- */

static enum err arena_map(const struct wk_shell *s, const struct msg_kv_attach_reply *r,
                          struct wk_mapping *ret_mapping, struct err_detail *detail)
{
    if (s->core != NULL && r->block_tokens != s->core_options.shape.block_tokens)
        return err_set(detail, ERR_UNSUPPORTED, "block_tokens: %u now, %u before", r->block_tokens,
                       s->core_options.shape.block_tokens);
    const struct model_info *info = wk_exec_loaded(s->exec)->info;
    struct kv_geometry g = {
        .dsa_layers = info->dsa_layers,
        .latent_dim = info->latent_dim,
        .index_dim = info->index_dim,
        .index_kpool = info->index_kpool,
        .block_tokens = r->block_tokens,
        .kv_dtype = r->kv_dtype,
        .index_dtype = r->index_dtype,
        .snapshot_dtype = r->snapshot_dtype,
        .rank = 0,
        .ranks = s->params->dcp,
        .interleave = s->params->dcp > 1 ? s->params->interleave : r->block_tokens,
        .state_bytes = info->state_bytes,
    };
    struct kv_layout layout;
    struct hash128 fp = wk_shell_rows_fp(s);
    struct kv_slots slots = {r->live_slots, r->slot_count};
    TRY(kv_layout_plan(&g, r->arena_bytes, slots, &layout, detail));
    return wk_arena_map(r, &layout, &fp, s->incarnation, ret_mapping, detail);
}

void wk_shell_kv_close(struct wk_shell *s)
{
    wk_arena_unmap(&s->kv.mapping);
}

/* ---- the core comes to life with the first arena ---- */

static void core_open(struct wk_shell *s, const struct wk_arena_shape *shape)
{
    const struct wk_loaded *l = wk_exec_loaded(s->exec);
    struct wk_core_options *o = &s->core_options;
    CHECK(s->core == NULL);
    o->context_max = l->context_max;
    o->vocab_size = l->info->vocab_size;
    o->layer_count = l->info->layer_count;
    o->has_token = l->info->has_token;
    o->stop_id_count = l->info->stop_id_count;
    o->stop_ids = l->info->stop_ids;
    o->model_fp = l->info->model_fp;
    o->prefill_us_per_row = l->prefill_us_per_row;
    o->decode_us_per_step = l->decode_us_per_step;
    o->shape = *shape;
    if (o->ids_max == 0)
        o->ids_max = 2 * (uint64_t)shape->block_count * shape->block_tokens + IDS_MAX_LEAST;
    s->core = wk_core_create(o);
    wk_shell_draft_beat(s); /* its ring should be there before the first prompt */
}

/* The core may use the arena. */
static void attached(struct wk_shell *s)
{
    struct wk_arena_state *kv = &s->kv;
    const struct kv_layout *l = &kv->mapping.layout;
    struct wk_event event = {
        .type = WK_EV_KV_ATTACHED,
        .kv_epoch = kv->epoch,
        .shape = {.block_tokens = l->geometry.block_tokens,
                  .block_count = l->block_count,
                  .slot_count = l->slot_count,
                  .live_slots = kv->offer.live_slots,
                  .snapshot_every = kv->offer.snapshot_every},
        .granted_count = kv->offer.granted_count,
        .granted = kv->offer_granted,
    };
    if (s->core == NULL)
        core_open(s, &event.shape);
    log_info(WORKER, "arena attached",
             "path=%s blocks=%u block_tokens=%u slots=%u snapshots=%u epoch=%u kvmgr=%016" PRIx64,
             kv->offer_path, event.shape.block_count, event.shape.block_tokens,
             event.shape.live_slots, event.shape.slot_count - event.shape.live_slots, kv->epoch,
             kv->incarnation);
    wk_shell_step(s, &event);
}

static void arena_take(struct wk_shell *s)
{
    struct wk_arena_state *kv = &s->kv;
    CHECK(kv->offered && !kv->attached && s->loaded);
    struct err_detail detail = {.text = ""};
    struct wk_mapping mapping;
    kv->offered = false;
    enum err e = arena_map(s, &kv->offer, &mapping, &detail);
    if (e == ERR_UNSUPPORTED && s->core != NULL) {
        wk_shell_fail(s, detail.text); /* the tables are made for another block size ... */
        s->exit_code = 1;              /* ... and will be made anew after a new start */
        return;
    }
    if (e != ERR_OK) {
        log_error(WORKER, "arena refused", "code=%s reason=\"%s\"", err_name(e), detail.text);
        return;
    }
    struct model_kv memory = wk_arena_model_kv(&mapping);
    if (wk_exec_attach(s->exec, &memory, kv->offer.epoch) != ERR_OK) {
        wk_arena_unmap(
            &mapping); /* the device thread waits for another rank: tried again every beat */
        kv->offered = true;
        return;
    }
    wk_arena_unmap(&kv->mapping);
    kv->mapping = mapping;
    kv->attached = true;
    kv->incarnation = kv->offer.incarnation;
    kv->epoch = kv->offer.epoch;
    if (s->ranks == NULL)
        attached(s);
    else
        kv->forming++;
}

/* Rows that a rank above 0 has lost must not be found again by their hashes: the key of the hashes
 * changes with the memory that holds the rows. */
void wk_shell_kv_formed(struct wk_shell *s, const struct hash128 *memory)
{
    CHECK(s->kv.forming > 0);
    s->kv.forming--;
    if (s->kv.forming > 0 || !s->kv.attached)
        return; /* another memory has been named since, or this one is lost again */
    struct block_hash_key key;
    STATIC_CHECK(sizeof key.bytes == 2 * sizeof(struct hash128));
    for (uint8_t half = 0; half < 2; half++) {
        struct hash128 h = hash_blake2b(s->key.bytes, sizeof s->key.bytes, memory->bytes,
                                        sizeof memory->bytes, &half, 1, NULL, 0);
        memcpy(key.bytes + half * sizeof h, &h, sizeof h);
    }
    s->core_options.key = key;
    if (s->core != NULL)
        wk_core_key(s->core, &key);
    attached(s);
}

void wk_shell_kv_settle(struct wk_shell *s)
{
    if (s->kv.offered && (s->core == NULL || wk_core_quiet(s->core)))
        arena_take(s);
}

void wk_shell_kv_lost(struct wk_shell *s, const char *why)
{
    log_warn(WORKER, "leases lost", "reason=\"%s\"", why);
    s->kv.attached = false;
    s->kv.offered = false;
    wk_shell_hold_drop(s);
    attach_send(s);
    if (s->core == NULL)
        return;
    struct wk_event event = {.type = WK_EV_KV_DETACHED};
    wk_shell_step(s, &event);
}

static void on_attach_reply(struct wk_shell *s, const struct msg_kv_attach_reply *r)
{
    if (r->code == ERR_UNSUPPORTED && s->ranks != NULL) { /* the tier, see rows_ranks */
        wk_shell_fail(s, r->text);
        return;
    }
    if (r->code != ERR_OK) {
        log_warn(WORKER, "kvmgr refused the attach", "code=%s reason=\"%s\"",
                 err_name((enum err)r->code), r->text);
        return;
    }
    if (r->snapshot_dtype > KV_F32 && strcmp(s->params->numerics, "exact") == 0) {
        wk_shell_fail(s, "numerics exact promises the same text from a cached state as without "
                         "one, kvmgr.snapshot_dtype bf16 does not: make it f32, or numerics fast");
        return;
    }
    if (s->kv.attached && s->kv.incarnation == r->incarnation && s->kv.epoch == r->epoch)
        return; /* a second answer to a question asked twice */
    size_t bytes = strnlen(r->arena_path, WK_PATH_BYTES);
    if (bytes == 0 || bytes >= WK_PATH_BYTES || r->block_tokens == 0) {
        log_error(WORKER, "arena refused", "reason=\"no path or no block_tokens\"");
        return;
    }
    s->kv.offer = *r;
    memcpy(s->kv.offer_path, r->arena_path, bytes + 1);
    s->kv.offer.arena_path = s->kv.offer_path;
    s->kv.offer.text = "";
    CHECK(r->granted_count <= MSG_GRANTS_MAX);
    for (uint32_t i = 0; i < r->granted_count; i++)
        s->kv.offer_granted[i] = r->granted[i];
    s->kv.offer.granted = s->kv.offer_granted;
    if (s->kv.attached) { /* an arena in place of the one that we use */
        s->kv.attached = false;
        wk_shell_hold_drop(s);
        struct wk_event event = {.type = WK_EV_KV_DETACHED};
        wk_shell_step(s, &event);
    }
    s->kv.offered = true;
    wk_shell_kv_settle(s);
}

void wk_shell_kv_adopt(struct wk_shell *s, struct msg *m)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    CHECK(m->type == MSG_KV_ADOPT);
    if (s->kv.attached) {
        m->epoch = s->kv.epoch;
        wk_shell_send(s, WK_KVMGR, m);
        return;
    }
    struct msg reply = {.type = MSG_KV_ADOPT_REPLY, .id = m->id};
    reply.u.kv_adopt_reply.code = ERR_CLOSED;
    wk_shell_send(s, WK_ROUTER, &reply);
}

void wk_shell_kv_message(struct wk_shell *s, const struct msg *m)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (m->type == MSG_KV_ADOPT_REPLY) {
        wk_shell_send(s, WK_ROUTER, m);
        return;
    }
    if (!s->loaded)
        return;
    if (m->type == MSG_KV_ATTACH_REPLY) {
        on_attach_reply(s, &m->u.kv_attach_reply);
        return;
    }
    if (!s->kv.attached)
        return; /* answers to what we asked before the loss */
    /* Also while the other ranks refuse the first arena: the next may suit them. */
    if (m->type == MSG_KV_STATE && m->u.kv_state.incarnation != s->kv.incarnation) {
        wk_shell_kv_lost(s, "kvmgr was restarted");
        return;
    }
    if (s->core == NULL)
        return;
    bool stale = (m->type == MSG_KV_OPEN_REPLY && m->u.kv_open_reply.code == ERR_EPOCH) ||
                 (m->type == MSG_KV_EXTEND_REPLY && m->u.kv_extend_reply.code == ERR_EPOCH);
    struct wk_event event = {.type = WK_EV_MSG, .msg = m};
    wk_shell_step(s, &event);
    if (stale && s->kv.attached)
        wk_shell_kv_lost(s, "kvmgr does not know this worker");
}

void wk_shell_kv_beat(struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (s->stopping)
        return;
    if (!s->kv.attached) {
        wk_shell_kv_settle(s);
        if (!s->kv.attached && !s->kv.offered &&
            (s->kv.asked_us == 0 || loop_now_us(s->loop) >= s->kv.asked_us + ATTACH_AGAIN_US))
            attach_send(s);
    }
    if (!s->kv.attached)
        return;
    struct msg m = {.type = MSG_KV_PING, .epoch = s->kv.epoch};
    uint32_t max = wk_core_entries(&s->core_options);
    m.u.kv_ping = (struct msg_kv_ping){
        .incarnation = s->incarnation,
        .lease_count = s->core != NULL ? wk_core_leases(s->core, s->leases, max) : 0,
        .leases = s->leases,
    };
    CHECK(m.u.kv_ping.lease_count <= max);
    /* What it no longer names may have its last words held back: not before those. */
    struct wk_action ping = {.msg = m};
    if (wk_shell_hold_empty(s))
        wk_shell_beat(s, WK_KVMGR, &m);
    else
        wk_shell_hold(s, &ping);
}
