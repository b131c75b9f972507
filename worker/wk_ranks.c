/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/net/keys.h"
#include "lib/net/peers.h"
#include "worker/wk_agree.h"
#include "worker/wk_fabric.h"
#include "worker/wk_group.h"
#include "worker/wk_link_local.h"
#include "worker/wk_link_tcp.h"
#include "worker/wk_nccl_host.h"
#include "worker/wk_plan.h"

#define RANKS_MAGIC       0x574b5253u
#define MEMORY_MAGIC      0x334d5254u /* "TRM3" */
#define MEMORY_HEAD_BYTES 4096u
#define MESSAGE_BYTES     16384u /* the quickest of those measured, for an exchange of 64 KiB */
#define SPIN_US           50u
#define JOIN_WAIT_MS      500u
#define TALE_BYTES_MAX    (16u << 20)

struct memory_head {
    uint32_t magic, boot;
    uint64_t incarnation;
    uint32_t block_count, slot_count;
    struct hash128 layout_fp, settings;
};

/* Before every tale. */
struct tale {
    uint32_t order; /* enum wk_order */
    uint32_t zero;
};

struct wk_ranks {
    uint32_t magic;
    struct wk_ranks_options options; /* its texts: below, or gone after create */
    char memory_path[512];
    char addresses[PEERS_MAX][96];
    struct wk_local *local;
    struct wk_link link; /* until the fabric takes it */
    struct wk_paths paths;
    struct wk_nccl_table nccl;
    struct hash128 settings;
    uint8_t *tale; /* [TALE_BYTES_MAX] */
    uint8_t *memory;
    uint64_t memory_bytes;
    int memory_fd;                 /* holds the lock on the file while it is mapped */
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
    struct peers_options p = {
        .rank = o->rank, .ranks = o->ranks, .message_bytes_max = 4 * MESSAGE_BYTES};
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
    return wk_nccl_device(&r->nccl, o->cuda_device, detail);
}

enum err wk_ranks_create(const struct wk_ranks_options *options, struct wk_ranks **ret_r,
                         struct err_detail *detail)
{
    CHECK(options->ranks > 1 && options->ranks <= WK_RANKS_MAX && options->rank < options->ranks);
    struct wk_ranks *r = mem_take(sizeof *r);
    r->magic = RANKS_MAGIC;
    r->options = *options;
    snprintf(r->memory_path, sizeof r->memory_path, "%s",
             options->memory != NULL ? options->memory : "");
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

static void memory_unmap(struct wk_ranks *r)
{
    if (r->memory == NULL)
        return;
    munmap(r->memory, r->memory_bytes);
    close(r->memory_fd);
    r->memory = NULL;
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
    memory_unmap(r);
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

/* Ranks that exchange their activations over different things would wait for each other. */
static struct hash128 settings_all(const struct wk_ranks *r, const struct hash128 *settings)
{
    struct hash128 all[2] = {*settings, {{0}}};
    all[1].bytes[0] = r->options.nccl;
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
    while (e == ERR_TIMEOUT && !atomic_load(stop))
        e = wk_fabric_join(r->paths.fabric, JOIN_WAIT_MS, detail);
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
    uint64_t incarnation; /* 0: it refuses the shape (rank 0 has no memory of its own here) */
    struct err_detail why;
};

static enum err memories_gather(struct wk_ranks *r, uint32_t epoch, const struct err_detail *why,
                                struct hash128 *ret_memory, struct err_detail *detail)
{
    const struct memory_head *head = (const struct memory_head *)(const void *)r->memory;
    struct memory_show own = {.why = *why}, all[WK_RANKS_MAX];
    uint64_t incarnations[WK_RANKS_MAX] = {0};
    if (head != NULL)
        own.incarnation = head->incarnation;
    enum err e = wk_all_gather(r->paths.fabric, &own, sizeof own, all);
    if (e != ERR_OK) {
        wk_fabric_fault(r->paths.fabric, detail);
        return e;
    }
    for (uint32_t rank = 1; rank < r->options.ranks; rank++) {
        all[rank].why.text[sizeof all[rank].why.text - 1] = '\0';
        incarnations[rank] = all[rank].incarnation;
        if (incarnations[rank] != 0)
            continue;
        wk_fabric_leave(r->paths.fabric);
        return err_set(detail, ERR_UNSUPPORTED, "rank %u refuses the shape of its memory: %.400s",
                       rank, all[rank].why.text);
    }
    *ret_memory = hash_xxh3_once(incarnations, r->options.ranks * sizeof *incarnations);
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
    enum err e = kv_layout_of(&g, s->block_count, s->slot_count, ret_layout, &why);
    return e == ERR_OK ? e : err_set(detail, e, "shape of rank 0: %.200s", why.text);
}

/* After a hard stop of the host a file holds any mixture of old and new pages. */
static bool memory_fits(const struct wk_ranks *r, const struct memory_head *have,
                        const struct memory_head *need)
{
    return have->magic == need->magic && have->boot == need->boot && need->boot != 0 &&
           have->block_count == need->block_count && have->slot_count == need->slot_count &&
           have->incarnation != 0 &&
           memcmp(&have->layout_fp, &need->layout_fp, sizeof have->layout_fp) == 0 &&
           memcmp(&have->settings, &r->settings, sizeof r->settings) == 0;
}

static enum err memory_open(const char *path, int *ret_fd, struct stat *ret_st,
                            struct err_detail *detail)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    enum err e = ERR_OK;
    if (fstat(fd, ret_st) != 0 || !S_ISREG(ret_st->st_mode))
        e = err_set(detail, ERR_IO, "%s: not a regular file", path);
    else if (flock(fd, LOCK_EX | LOCK_NB) != 0)
        e = err_set(detail, ERR_BUSY, "%s: another worker has it: each rank needs a rows_path",
                    path);
    if (e != ERR_OK)
        close(fd);
    else
        *ret_fd = fd;
    return e;
}

/* Pages are taken when they are first used: what does not fit would end in SIGBUS then. */
static enum err memory_room(int fd, const char *path, uint64_t bytes, struct err_detail *detail)
{
    struct stat st;
    struct statvfs fs;
    if (fstat(fd, &st) != 0 || fstatvfs(fd, &fs) != 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    uint64_t taken = (uint64_t)st.st_blocks * 512, left = (uint64_t)fs.f_bavail * fs.f_frsize;
    uint64_t missing = taken < bytes ? bytes - taken : 0;
    if (missing > left)
        return err_set(detail, ERR_NOMEM,
                       "%s: cache rows need %" PRIu64 " bytes more, %" PRIu64 " are free: lower "
                       "kvmgr.arena_bytes or choose another rows_path",
                       path, missing, left);
    return ERR_OK;
}

/* The file of an earlier life if it is of this shape, these weights and this start of the host,
 * else a new one. */
static enum err memory_map(struct wk_ranks *r, struct memory_head *need, uint64_t bytes,
                           struct err_detail *detail)
{
    const char *path = r->memory_path;
    struct stat st;
    struct memory_head have = {0};
    int fd = -1;
    TRY(memory_open(path, &fd, &st, detail));
    bool kept = (uint64_t)st.st_size == bytes &&
                pread(fd, &have, sizeof have, 0) == (ssize_t)sizeof have &&
                memory_fits(r, &have, need);
    enum err e = ERR_OK;
    if (!kept && ftruncate(fd, 0) != 0)
        e = err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    if (e == ERR_OK)
        e = memory_room(fd, path, bytes, detail);
    if (e == ERR_OK && !kept && ftruncate(fd, (off_t)bytes) != 0)
        e = err_set(detail, ERR_NOMEM, "%s: %s", path, strerror(errno));
    void *at = MAP_FAILED;
    if (e == ERR_OK)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (e == ERR_OK && at == MAP_FAILED)
        e = err_set(detail, ERR_NOMEM, "%s: %s", path, strerror(errno));
    if (e != ERR_OK) {
        close(fd);
        return e;
    }
    r->memory = at;
    r->memory_bytes = bytes;
    r->memory_fd = fd;
    if (!kept) {
        need->settings = r->settings;
        rng_system(&need->incarnation, sizeof need->incarnation);
        memcpy(r->memory, need, sizeof *need);
    }
    return ERR_OK;
}

static enum err shape_take(struct wk_ranks *r, const struct wk_ranks_hear *want,
                           struct wk_ranks_heard *h, struct err_detail *detail)
{
    struct kv_layout l;
    memory_unmap(r);
    TRY(shape_layout(&h->shape, want->geometry, &l, detail));
    struct memory_head need = {.magic = MEMORY_MAGIC,
                               .boot = r->options.boot,
                               .block_count = l.block_count,
                               .slot_count = l.slot_count,
                               .layout_fp = l.layout_fp};
    uint64_t blocks_bytes = l.block_count * l.block_bytes;
    uint64_t bytes = MEMORY_HEAD_BYTES + blocks_bytes + l.slot_count * l.slot_bytes;
    TRY(memory_map(r, &need, bytes, detail));
    h->kv = (struct model_kv){.blocks = r->memory + MEMORY_HEAD_BYTES,
                              .block_stride = l.block_bytes,
                              .layer_stride = l.layer_stride,
                              .index_offset = l.index_offset,
                              .block_tokens = l.geometry.block_tokens,
                              .block_count = l.block_count,
                              .slots = r->memory + MEMORY_HEAD_BYTES + blocks_bytes,
                              .slot_stride = l.slot_bytes,
                              .slot_count = l.slot_count,
                              .kv_type = (enum kv_row)(l.geometry.kv_dtype - KV_F32),
                              .index_type = (enum kv_row)(l.geometry.index_dtype - KV_F32)};
    return ERR_OK;
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

static enum err plan_judge(const struct wk_ranks_hear *want, const uint8_t *bytes, size_t count,
                           struct err_detail *detail)
{
    if (want->plan == NULL)
        return err_set(detail, ERR_INVALID, "a plan before any shape");
    TRY(wk_plan_decode(bytes, count, want->limits, want->plan, detail));
    TRY(wk_plan_admit(want->plan, want->step_last, want->epoch, detail));
    return want->admit(want->arg, want->plan, detail);
}

static enum err plan_take(struct wk_ranks *r, const struct wk_ranks_hear *want,
                          const uint8_t *bytes, size_t count, struct err_detail *detail)
{
    struct err_detail why = {{0}};
    enum err own = plan_judge(want, bytes, count, &why);
    uint64_t step = own == ERR_OK ? want->plan->step : want->step_last + 1;
    enum err e = wk_agree_step(r->paths.fabric, own == ERR_OK ? want->plan : NULL, step, &r->epochs,
                               own, detail);
    if (own != ERR_OK && detail != NULL)
        *detail = why; /* what was wrong with it here says more */
    return e;
}

enum err wk_ranks_hear(struct wk_ranks *r, const struct wk_ranks_hear *want, uint32_t wait_ms,
                       struct wk_ranks_heard *ret_heard, struct err_detail *detail)
{
    CHECK_OBJ(r, RANKS_MAGIC);
    size_t count = 0;
    struct tale head = {0};
    struct wk_ranks_heard heard = {.order = WK_ORDER_NONE};
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
