/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/net/keys.h"
#include "lib/net/peers.h"
#include "worker/wk_agree.h"
#include "worker/wk_fabric.h"
#include "worker/wk_group.h"
#include "worker/wk_link_local.h"
#include "worker/wk_link_tcp.h"
#include "worker/wk_nccl_host.h"
#include "worker/wk_plan.h"
#include "worker/wk_rows.h"

#define RANKS_MAGIC    0x574b5253u
#define MESSAGE_BYTES  16384u /* the quickest of those measured, for an exchange of 64 KiB */
#define SPIN_US        50u
#define JOIN_WAIT_MS   500u
#define WAITS_PER_WORD 20u /* a line every 10 s of who is not there */
#define TALE_BYTES_MAX (16u << 20)

STATIC_CHECK(sizeof(struct wk_seal) == 48);
STATIC_CHECK(WK_RANKS_SEALS_MAX * sizeof(struct wk_seal) < TALE_BYTES_MAX);

/* Before every tale. */
struct tale {
    uint32_t order; /* enum wk_order */
    uint32_t zero;
};

struct wk_ranks {
    uint32_t magic;
    struct wk_ranks_options options; /* its texts: below, or gone after create */
    char addresses[PEERS_MAX][96];
    struct wk_local *local;
    struct wk_link link; /* until the fabric takes it */
    struct wk_paths paths;
    struct wk_nccl_table nccl;
    struct hash128 settings;
    uint8_t *tale;                 /* [TALE_BYTES_MAX] */
    struct wk_agree_epochs epochs; /* of the shape that holds */
};

struct model_group wk_ranks_group(struct wk_ranks *r)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    return wk_group(&r->paths, r->options.rank, r->options.ranks, r->options.moe,
                    r->options.interleave);
}

/* ---- links ---- */

static enum err nodes_split(struct wk_ranks *r, struct err_detail *detail)
{
    const char *at = r->options.nodes;
    for (uint32_t i = 0; i < r->options.ranks; i++) {
        size_t count = strcspn(at, ",");
        if (count == 0 || count + 7 > sizeof r->addresses[i])
            return err_set(detail, ERR_INVALID, "fabric_nodes: HOST:PORT for each of %u ranks",
                           r->options.ranks);
        snprintf(r->addresses[i], sizeof r->addresses[i], "tcp://%.*s", (int)count, at);
        at += count + (at[count] == ',');
    }
    return ERR_OK;
}

static enum err link_open(struct wk_ranks *r, struct err_detail *detail)
{
    const struct wk_ranks_options *o = &r->options;
    if (o->nodes[0] == '\0') {
        struct wk_local_options l = {o->path, o->ranks, MESSAGE_BYTES, SPIN_US};
        TRY(wk_local_open(&l, &r->local, detail));
        return wk_link_local(r->local, o->rank, &r->link, detail);
    }
    struct peers_options p = {.rank = o->rank,
                              .ranks = o->ranks,
                              .message_bytes_max = 4 * MESSAGE_BYTES,
                              .silence_ms = o->silence_ms};
    struct keys keys;
    TRY(nodes_split(r, detail));
    if (o->keys != NULL && o->keys[0] != '\0') {
        TRY(keys_read(o->keys, &keys, detail));
        p.key_public = keys.key_public;
        p.key_secret = keys.key_secret;
    }
    for (uint32_t i = 0; i < o->ranks; i++)
        p.addresses[i] = r->addresses[i];
    return wk_link_tcp(&p, &r->link, detail);
}

static enum err nccl_open(struct wk_ranks *r, struct err_detail *detail)
{
    const struct wk_ranks_options *o = &r->options;
    if (!wk_nccl_built())
        return err_set(detail, ERR_UNSUPPORTED,
                       "fabric=nccl: this build is without it, nccl.h was not found then; use tcp");
    TRY(wk_nccl_load(o->nccl_library, o->cuda_library, &o->nccl_settings, &r->nccl, detail));
    log_info(WORKER, "nccl found", "version=%d compiled_for=%d", r->nccl.version, wk_nccl_built());
    return wk_nccl_device(&r->nccl, o->cuda_device, detail);
}

enum err wk_ranks_create(const struct wk_ranks_options *options, struct wk_ranks **ret_r,
                         struct err_detail *detail)
{
    CHECK(options->ranks > 1 && options->ranks <= WK_RANKS_MAX && options->rank < options->ranks);
    struct wk_ranks *r = mem_take(sizeof *r);
    r->magic = RANKS_MAGIC;
    r->options = *options;
    r->tale = mem_take(TALE_BYTES_MAX);
    enum err e = options->nccl ? nccl_open(r, detail) : ERR_OK;
    if (e == ERR_OK)
        e = link_open(r, detail);
    if (e != ERR_OK) {
        wk_ranks_destroy(&r);
        return e;
    }
    *ret_r = r;
    return ERR_OK;
}

void wk_ranks_destroy(struct wk_ranks **r_p)
{
    struct wk_ranks *r = *r_p;
    if (r == NULL)
        return;
    CHECK_OBJ(r, RANKS_MAGIC);
    wk_nccl_host_destroy(&r->paths.nccl);
    wk_fabric_destroy(&r->paths.fabric);
    wk_link_destroy(&r->link);
    wk_local_close(&r->local);
    mem_give(r->tale);
    r->magic = 0;
    mem_give(r);
    *r_p = NULL;
}

/* A communicator is of one group: each forming makes its own. */
static enum err nccl_form(struct wk_ranks *r, struct err_detail *detail)
{
    const struct wk_nccl_options o = {.table = &r->nccl,
                                      .fabric = r->paths.fabric,
                                      .deadline_ms = r->options.deadline_ms,
                                      .ctas_max = r->options.nccl_settings.ctas_max,
                                      .device = r->options.cuda_device};
    return r->options.nccl ? wk_nccl_host_create(&o, &r->paths.nccl, detail) : ERR_OK;
}

/* Ranks that exchange their activations over different things would wait for each other; NCCL wants
 * one version of itself everywhere. */
static struct hash128 settings_all(const struct wk_ranks *r, const struct hash128 *settings)
{
    struct hash128 all[2] = {*settings, {{0}}};
    all[1].bytes[0] = r->options.nccl;
    memcpy(all[1].bytes + 4, &r->nccl.version, sizeof r->nccl.version);
    return hash_xxh3_once(all, sizeof all);
}

enum err wk_ranks_form(struct wk_ranks *r, const struct hash128 *settings, const atomic_bool *stop,
                       struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    if (r->paths.fabric == NULL) {
        struct wk_fabric_options o = {.deadline_ms = r->options.deadline_ms,
                                      .silence_ms = r->options.silence_ms,
                                      .settings = settings_all(r, settings),
                                      .link = r->link};
        r->settings = *settings;
        r->link = (struct wk_link){0};
        r->paths.fabric = wk_fabric_create(&o);
    }
    wk_nccl_host_destroy(&r->paths.nccl); /* of the group that is lost */
    enum err e = ERR_TIMEOUT;
    for (uint32_t waits = 1; e == ERR_TIMEOUT && !atomic_load(stop); waits++) {
        struct err_detail late = {{0}};
        e = wk_fabric_join(r->paths.fabric, JOIN_WAIT_MS, &late);
        if (e != ERR_OK && detail != NULL)
            *detail = late;
        if (e == ERR_TIMEOUT && waits % WAITS_PER_WORD == 0)
            log_warn(WORKER, "group waits", "reason=\"%s\"", late.text);
    }
    return e == ERR_OK ? nccl_form(r, detail) : e == ERR_TIMEOUT ? ERR_CANCELLED : e;
}

bool wk_ranks_formed(const struct wk_ranks *r)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    return r->paths.fabric != NULL && wk_fabric_fault(r->paths.fabric, NULL) == ERR_OK;
}

struct wk_fabric *wk_ranks_fabric(struct wk_ranks *r)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    return r->paths.fabric;
}

struct verdict {
    uint64_t code; /* enum err */
    struct err_detail why;
};

enum err wk_ranks_verdict(struct wk_ranks *r, enum err own, struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    struct verdict mine = {.code = (uint64_t)own}, all[WK_RANKS_MAX];
    if (own != ERR_OK)
        mine.why = *detail;
    enum err e = wk_all_gather(r->paths.fabric, &mine, sizeof mine, all);
    if (own != ERR_OK)
        return own;
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    for (uint32_t rank = 0; rank < r->options.ranks; rank++) {
        all[rank].why.text[sizeof all[rank].why.text - 1] = '\0';
        if (all[rank].code != ERR_OK)
            return err_set(detail, ERR_UNSUPPORTED, "rank %u refuses the group: %.450s", rank,
                           all[rank].why.text);
    }
    return ERR_OK;
}

enum err wk_ranks_probe(struct wk_ranks *r, struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    struct wk_probe_report report = {{{0}}};
    char path[sizeof r->addresses[0] + 8] = "local";
    if (r->options.nccl)
        snprintf(path, sizeof path, "nccl");
    else if (r->local == NULL)
        snprintf(path, sizeof path, "%s", r->addresses[r->options.rank]);
    struct model_group group = wk_ranks_group(r);
    enum err e = wk_probe_run(r->paths.fabric, &group, &r->options.floors, path, &report, detail);
    if (e == ERR_OK || e == ERR_UNSUPPORTED)
        e = wk_ranks_verdict(r, e, detail);
    for (uint32_t i = 0; i < WK_PROBE_SIZES && e == ERR_OK; i++) /* a refusal says its numbers */
        log_info(WORKER, "fabric measured", "path=%s bytes=%u median_us=%u p95_us=%u mb_per_s=%u",
                 path, report.rows[i].bytes, report.rows[i].median_us, report.rows[i].p95_us,
                 report.rows[i].bandwidth_mb);
    return e;
}

/* ---- rank 0 ---- */

static enum err tell(struct wk_ranks *r, enum wk_order order, const void *bytes, size_t count)
{
    struct tale head = {.order = (uint32_t)order};
    CHECK(sizeof head + count <= TALE_BYTES_MAX);
    memcpy(r->tale, &head, sizeof head);
    memcpy(r->tale + sizeof head, bytes, count);
    return wk_tell(r->paths.fabric, r->tale, sizeof head + count);
}

/* What a rank shows of its memory. */
struct memory_show {
    struct wk_rows_identity
        memory; /* 0: it refuses the shape (rank 0 has no memory of its own here) */
    struct err_detail why;
};

static enum err memories_gather(struct wk_ranks *r, uint32_t epoch, const struct err_detail *why,
                                struct hash128 *ret_memory, struct err_detail *detail)
{
    struct memory_show own = {.why = *why}, all[WK_RANKS_MAX];
    struct wk_rows_identity memories[WK_RANKS_MAX];
    memset(memories, 0, sizeof memories);
    if (r->options.rows != NULL)
        own.memory = wk_rows_identity(r->options.rows);
    enum err e = wk_all_gather(r->paths.fabric, &own, sizeof own, all);
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    for (uint32_t rank = 1; rank < r->options.ranks; rank++) {
        all[rank].why.text[sizeof all[rank].why.text - 1] = '\0';
        memories[rank] = all[rank].memory;
        if (memories[rank].incarnation != 0)
            continue;
        wk_fabric_leave(r->paths.fabric);
        return err_set(detail, ERR_UNSUPPORTED, "rank %u refuses the shape of its memory: %.400s",
                       rank, all[rank].why.text);
    }
    *ret_memory = hash_xxh3_once(memories, r->options.ranks * sizeof *memories);
    uint32_t others;
    memcpy(&others, ret_memory->bytes, sizeof others);
    r->epochs = r->options.rank == 0 ? (struct wk_agree_epochs){epoch, others}
                                     : (struct wk_agree_epochs){others, epoch};
    return ERR_OK;
}

enum err wk_ranks_tell_shape(struct wk_ranks *r, const struct wk_ranks_shape *shape,
                             struct hash128 *ret_memory, struct err_detail *detail)
{
    static const struct err_detail none;
    CHECK_OBJ(r, RANKS_MAGIC);
    enum err e = tell(r, WK_ORDER_SHAPE, shape, sizeof *shape);
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    return memories_gather(r, shape->epoch, &none, ret_memory, detail);
}

struct wk_agree_epochs wk_ranks_epochs(const struct wk_ranks *r)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    return r->epochs;
}

enum err wk_ranks_tell_plan(struct wk_ranks *r, const struct wk_plan *plan, enum err own,
                            struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    enum err e = tell(r, WK_ORDER_PLAN, plan->encoding, plan->encoding_bytes);
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    return wk_agree_step(r->paths.fabric, plan, plan->step, &r->epochs, own, detail);
}

enum err wk_ranks_tell_seals(struct wk_ranks *r, const struct wk_seal *seals, uint32_t count,
                             struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    CHECK(count > 0 && count <= WK_RANKS_SEALS_MAX);
    enum err e = tell(r, WK_ORDER_SEAL, seals, count * sizeof *seals);
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    e = wk_ranks_verdict(r, ERR_OK, detail);
    if (e != ERR_OK)
        wk_fabric_leave(r->paths.fabric);
    return e;
}

/* ---- ranks above 0 ---- */

/* Numbers alone come from rank 0, and what they lead to is computed here. */
static enum err shape_layout(const struct wk_ranks_shape *s, const struct kv_geometry *own,
                             struct kv_layout *ret_layout, struct err_detail *detail)
{
    struct kv_geometry g = s->geometry;
    const struct {
        const char *name;
        uint32_t theirs, ours;
    } rows[] = {{"dsa_layers", g.dsa_layers, own->dsa_layers},
                {"latent_dim", g.latent_dim, own->latent_dim},
                {"index_dim", g.index_dim, own->index_dim},
                {"index_kpool", g.index_kpool, own->index_kpool},
                {"rank", g.rank, 0},
                {"ranks", g.ranks, own->ranks},
                {"interleave", g.interleave, own->ranks > 1 ? own->interleave : g.interleave}};
    for (size_t i = 0; i < ARRAY_COUNT(rows); i++)
        if (rows[i].theirs != rows[i].ours)
            return err_set(detail, ERR_INVALID, "shape of rank 0: %s is %u, here %u", rows[i].name,
                           rows[i].theirs, rows[i].ours);
    struct err_detail why = {{0}};
    g.rank = own->rank;
    g.state_bytes = own->state_bytes; /* the heads may be split unevenly */
    struct kv_slots slots = {s->live_count, s->slot_count};
    enum err e = kv_layout_of(&g, s->block_count, slots, ret_layout, &why);
    return e == ERR_OK ? e : err_set(detail, e, "shape of rank 0: %.200s", why.text);
}

static enum err shape_take(struct wk_ranks *r, const struct wk_ranks_hear *want,
                           struct wk_ranks_heard *h, struct err_detail *detail)
{
    struct kv_layout l;
    wk_rows_close(r->options.rows);
    TRY(shape_layout(&h->shape, want->geometry, &l, detail));
    return wk_rows_open(r->options.rows, &l, &r->settings, r->options.deadline_ms / 2, want->stop,
                        &h->kv, detail);
}

/* What we think of it is shown to all, so that rank 0 can say why it does not serve. */
static enum err shape_judge(struct wk_ranks *r, const struct wk_ranks_hear *want,
                            struct wk_ranks_heard *h, bool *ret_refused, struct err_detail *detail)
{
    struct err_detail why = {{0}};
    struct hash128 memory;
    enum err own = shape_take(r, want, h, &why);
    enum err e = memories_gather(r, h->shape.epoch, &why, &memory, detail);
    if (own == ERR_OK)
        return e;
    *ret_refused = true;
    if (detail != NULL)
        *detail = why;
    return own;
}

static enum err plan_judge(const struct wk_ranks *r, const struct wk_ranks_hear *want,
                           const uint8_t *bytes, size_t count, struct err_detail *detail)
{
    if (want->plan == NULL || wk_rows_identity(r->options.rows).incarnation == 0)
        return err_set(detail, ERR_INVALID, "a plan before any shape");
    TRY(wk_plan_decode(bytes, count, want->limits, want->plan, detail));
    TRY(wk_plan_admit(want->plan, want->step_last, want->epoch, detail));
    return want->admit(want->arg, want->plan, detail);
}

static enum err plan_take(struct wk_ranks *r, const struct wk_ranks_hear *want,
                          const uint8_t *bytes, size_t count, struct err_detail *detail)
{
    struct err_detail why = {{0}};
    enum err own = plan_judge(r, want, bytes, count, &why);
    uint64_t step = own == ERR_OK ? want->plan->step : want->step_last + 1;
    enum err e = wk_agree_step(r->paths.fabric, own == ERR_OK ? want->plan : NULL, step, &r->epochs,
                               own, detail);
    if (own != ERR_OK && detail != NULL)
        *detail = why; /* what was wrong with it here says more */
    return e;
}

/* Rank 0 tells the authority only of what all have sealed. */
static enum err seals_take(struct wk_ranks *r, const uint8_t *bytes, size_t count,
                           struct err_detail *detail)
{
    struct err_detail why = {{0}};
    struct wk_seal seal;
    enum err own = ERR_OK;
    if (count == 0 || count % sizeof seal != 0)
        own = err_set(&why, ERR_INVALID, "seals of %zu bytes", count);
    for (size_t at = 0; at < count && own == ERR_OK; at += sizeof seal) {
        memcpy(&seal, bytes + at, sizeof seal);
        own = wk_rows_seal(r->options.rows, &seal, 1, &why);
    }
    if (own != ERR_OK && detail != NULL)
        *detail = why;
    enum err e = wk_ranks_verdict(r, own, detail);
    if (e != ERR_OK)
        wk_fabric_leave(r->paths.fabric);
    return e;
}

enum err wk_ranks_hear(struct wk_ranks *r, const struct wk_ranks_hear *want, uint32_t wait_ms,
                       struct wk_ranks_heard *ret_heard, struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    size_t count = 0;
    struct tale head = {0};
    struct wk_ranks_heard heard = {.order = WK_ORDER_NONE};
    if (wk_rows_lost(r->options.rows)) { /* with the next shape it is asked again */
        wk_rows_close(r->options.rows);
        wk_fabric_leave(r->paths.fabric);
        return err_set(detail, ERR_CLOSED, "the kvmgr of this rank was restarted");
    }
    enum err e = wk_hear(r->paths.fabric, r->tale, TALE_BYTES_MAX, &count, wait_ms);
    ret_heard->order = WK_ORDER_NONE;
    if (e == ERR_BUSY)
        return ERR_OK;
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    if (count >= sizeof head)
        memcpy(&head, r->tale, sizeof head);
    if (head.order == WK_ORDER_PLAN) {
        TRY(plan_take(r, want, r->tale + sizeof head, count - sizeof head, detail));
    } else if (head.order == WK_ORDER_SEAL) {
        TRY(seals_take(r, r->tale + sizeof head, count - sizeof head, detail));
    } else if (head.order == WK_ORDER_SHAPE && count == sizeof head + sizeof heard.shape) {
        memcpy(&heard.shape, r->tale + sizeof head, sizeof heard.shape);
        bool refused = false;
        e = shape_judge(r, want, &heard, &refused, detail);
        if (refused)
            ret_heard->order = WK_ORDER_SHAPE;
        if (e != ERR_OK) {
            wk_fabric_leave(r->paths.fabric);
            return e;
        }
    } else {
        wk_fabric_leave(r->paths.fabric);
        return err_set(detail, ERR_INVALID, "rank 0 tells an order of %zu bytes that is none",
                       count);
    }
    heard.order = (enum wk_order)head.order;
    *ret_heard = heard;
    return ERR_OK;
}
