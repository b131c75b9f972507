/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_rows.h"

#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "worker/wk_arena.h"

#define ROWS_MAGIC 0x574b5257u
#define RING_ITEMS 4u
#define PATH_BYTES 4097u
/* A question again, and a look at whether the worker ends. */
#define ASK_AGAIN_US 1000000u
#define PIECE_NS     50000000

struct question {
    uint64_t number;
    struct msg_kv_attach attach;
};

struct answer {
    uint64_t number;
    struct msg_kv_attach_reply reply; /* its texts: below */
    char path[PATH_BYTES];
    struct err_detail text;
};

struct wk_rows {
    uint32_t magic;
    struct wk_rows_options options;
    struct ring *questions, *answers;
    sem_t answered;
    struct answer heard;     /* loop thread: on its way into the ring */
    _Atomic uint64_t mapped; /* incarnation of the arena in use; 0 = none */
    _Atomic uint64_t asked;  /* number of the newest question, and of the memory it led to */
    _Atomic uint64_t lost;   /* of the memory that its kvmgr no longer has */

    /* device thread */
    uint64_t number;
    struct answer answer;
    struct wk_mapping mapping;
    struct wk_rows_identity identity;
};

struct wk_rows *wk_rows_create(const struct wk_rows_options *options)
{
    struct wk_rows *r = mem_take(sizeof *r);
    r->magic = ROWS_MAGIC;
    r->options = *options;
    r->questions = ring_create(RING_ITEMS, sizeof(struct question));
    r->answers = ring_create(RING_ITEMS, sizeof(struct answer));
    CHECK(sem_init(&r->answered, 0, 0) == 0);
    return r;
}

void wk_rows_destroy(struct wk_rows **rows_p)
{
    struct wk_rows *r = *rows_p;
    if (r == NULL)
        return;
    wk_rows_close(r);
    ring_destroy(&r->questions);
    ring_destroy(&r->answers);
    sem_destroy(&r->answered);
    r->magic = 0;
    mem_give(r);
    *rows_p = NULL;
}

/* ---- opening ---- */

void wk_rows_close(struct wk_rows *r)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    atomic_store(&r->mapped, 0);
    wk_arena_unmap(&r->mapping);
    r->identity = (struct wk_rows_identity){0};
}

static struct hash128 fingerprint(const struct wk_rows *r, const struct hash128 *settings)
{
    uint8_t bytes[sizeof *settings + sizeof r->options.rank];
    memcpy(bytes, settings, sizeof *settings);
    memcpy(bytes + sizeof *settings, &r->options.rank, sizeof r->options.rank);
    return hash_xxh3_once(bytes, sizeof bytes);
}

/* Asks, and asks again: the kvmgr that took the question may have died over it.  ERR_CANCELLED:
 * *stop was set. */
static enum err answer_wait(struct wk_rows *r, const struct question *q, uint32_t wait_ms,
                            const atomic_bool *stop, struct err_detail *detail)
{
    uint64_t now = clock_mono_us(), end_us = now + (uint64_t)wait_ms * 1000, ask_us = now;
    while (now < end_us) {
        if (stop != NULL && atomic_load(stop))
            return err_set(detail, ERR_CANCELLED, "this worker ends");
        if (now >= ask_us && ring_push(r->questions, q)) {
            ask_us = now + ASK_AGAIN_US;
            r->options.wake(r->options.arg);
        }
        struct timespec piece;
        clock_gettime(CLOCK_REALTIME, &piece);
        piece.tv_nsec += PIECE_NS;
        piece.tv_sec += piece.tv_nsec / 1000000000;
        piece.tv_nsec %= 1000000000;
        if (sem_timedwait(&r->answered, &piece) == 0 && ring_pop(r->answers, &r->answer) &&
            r->answer.number == r->number)
            return ERR_OK; /* an earlier one came too late */
        now = clock_mono_us();
    }
    return err_set(detail, ERR_TIMEOUT,
                   "the kvmgr of this rank (role arena) does not answer within %u ms: it reads its "
                   "arena, or does not run",
                   wait_ms);
}

enum err wk_rows_open(struct wk_rows *r, const struct kv_layout *layout,
                      const struct hash128 *settings, uint32_t wait_ms, const atomic_bool *stop,
                      struct model_kv *ret_kv, struct err_detail *detail)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    const struct kv_geometry *g = &layout->geometry;
    struct question q = {.number = ++r->number};
    wk_rows_close(r);
    q.attach = (struct msg_kv_attach){
        .worker_id = r->options.worker_id,
        .incarnation = r->options.incarnation,
        .dsa_layers = g->dsa_layers,
        .latent_dim = g->latent_dim,
        .index_dim = g->index_dim,
        .index_kpool = g->index_kpool,
        .state_bytes = g->state_bytes,
        .rank = g->rank,
        .ranks = g->ranks,
        .interleave = g->interleave,
        .model_fp = fingerprint(r, settings),
        .block_count = layout->block_count,
        .slot_count = layout->slot_count,
        .live_slots = layout->live_count,
        .block_tokens = g->block_tokens,
        .kv_dtype = g->kv_dtype,
        .index_dtype = g->index_dtype,
        .snapshot_dtype = g->snapshot_dtype,
    };
    atomic_store(&r->asked, q.number);
    while (ring_pop(r->answers, &r->answer)) /* a question asked twice is answered twice */
        (void)sem_trywait(&r->answered);
    TRY(answer_wait(r, &q, wait_ms, stop, detail));
    struct msg_kv_attach_reply *reply = &r->answer.reply;
    reply->arena_path = r->answer.path;
    if (reply->code != ERR_OK)
        return err_set(detail, (enum err)reply->code, "%.400s", r->answer.text.text);
    TRY(wk_arena_map(reply, layout, &q.attach.model_fp, r->options.incarnation, &r->mapping,
                     detail));
    r->identity =
        (struct wk_rows_identity){.incarnation = reply->incarnation, .epoch = reply->epoch};
    atomic_store(&r->mapped, reply->incarnation);
    *ret_kv = wk_arena_model_kv(&r->mapping);
    return ERR_OK;
}

struct wk_rows_identity wk_rows_identity(const struct wk_rows *r)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    return r->identity;
}

bool wk_rows_lost(const struct wk_rows *r)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    return atomic_load(&r->mapped) != 0 && atomic_load(&r->lost) == r->number;
}

/* ---- headers ---- */

static void *header_at(const struct wk_rows *r, uint64_t table, uint32_t index)
{
    return r->mapping.base + table + (uint64_t)index * KV_HEADER_BYTES;
}

/* 64 bytes that another process may find half written: its CRC tells. */
static void block_put(struct wk_rows *r, uint32_t block, struct kv_block_header *h)
{
    h->epoch = r->identity.epoch;
    kv_block_header_seal(h);
    atomic_thread_fence(memory_order_release); /* data before COMMITTED ... */
    memcpy(header_at(r, r->mapping.layout.block_headers_at, block), h, sizeof *h);
    atomic_thread_fence(memory_order_seq_cst); /* ... WRITING before data */
}

static void slot_put(struct wk_rows *r, uint32_t slot, struct kv_slot_header *h)
{
    h->epoch = r->identity.epoch;
    kv_slot_header_seal(h);
    atomic_thread_fence(memory_order_release);
    memcpy(header_at(r, r->mapping.layout.slot_headers_at, slot), h, sizeof *h);
    atomic_thread_fence(memory_order_seq_cst);
}

static struct kv_block_header block_get(const struct wk_rows *r, uint32_t block)
{
    struct kv_block_header h;
    memcpy(&h, header_at(r, r->mapping.layout.block_headers_at, block), sizeof h);
    return h;
}

static struct kv_slot_header slot_get(const struct wk_rows *r, uint32_t slot)
{
    struct kv_slot_header h;
    memcpy(&h, header_at(r, r->mapping.layout.slot_headers_at, slot), sizeof h);
    return h;
}

void wk_rows_write_block(struct wk_rows *r, uint32_t block)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    CHECK(r->mapping.base != NULL && block < r->mapping.layout.block_count);
    struct kv_block_header old = block_get(r, block);
    if (old.state == KV_WRITING)
        return;
    struct kv_block_header h = {.state = KV_WRITING, .generation = old.generation};
    h.generation += old.state == KV_COMMITTED; /* it was free in between */
    block_put(r, block, &h);
}

void wk_rows_write_slot(struct wk_rows *r, uint32_t slot, bool snapshot)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    CHECK(r->mapping.base != NULL && slot < r->mapping.layout.slot_count);
    struct kv_slot_header old = slot_get(r, slot);
    uint32_t kind = snapshot ? KV_SLOT_SNAPSHOT : KV_SLOT_LIVE;
    if (old.state == KV_WRITING && old.kind == kind)
        return;
    struct kv_slot_header h = {.kind = kind, .state = KV_WRITING, .generation = old.generation};
    h.generation += old.state == KV_COMMITTED;
    slot_put(r, slot, &h);
}

static enum err block_seal(struct wk_rows *r, const struct wk_seal *s, struct err_detail *detail)
{
    const struct kv_layout *l = &r->mapping.layout;
    if (s->index >= l->block_count || s->place >= l->block_count)
        return err_set(detail, ERR_INVALID, "seal: block %u at %u of %u", s->index, s->place,
                       l->block_count);
    struct kv_block_header old = block_get(r, s->index);
    if (old.state == KV_COMMITTED && memcmp(&old.hash, &s->hash, sizeof s->hash) == 0)
        return ERR_OK;
    if (old.state != KV_WRITING)
        return err_set(detail, ERR_INVALID, "seal: block %u has state %u here", s->index,
                       old.state);
    struct kv_place place = kv_block_place(l, s->index);
    struct kv_block_header h = {
        .state = KV_COMMITTED,
        .hash = s->hash,
        .parent = s->parent,
        .position = s->place,
        .generation = old.generation,
        .data_crc = kv_data_sum(r->mapping.base + place.at, place.bytes),
    };
    block_put(r, s->index, &h);
    return ERR_OK;
}

static enum err slot_seal(struct wk_rows *r, const struct wk_seal *s, struct err_detail *detail)
{
    const struct kv_layout *l = &r->mapping.layout;
    if (s->index < l->live_count || s->index >= l->slot_count)
        return err_set(detail, ERR_INVALID, "seal: slot %u is outside %u..%u", s->index,
                       l->live_count, l->slot_count - 1);
    struct kv_slot_header old = slot_get(r, s->index);
    if (old.kind == KV_SLOT_SNAPSHOT && old.state == KV_COMMITTED &&
        memcmp(&old.hash, &s->hash, sizeof s->hash) == 0)
        return ERR_OK;
    if (old.kind != KV_SLOT_SNAPSHOT || old.state != KV_WRITING)
        return err_set(detail, ERR_INVALID, "seal: slot %u has state %u here", s->index, old.state);
    struct kv_place place = kv_slot_place(l, s->index);
    struct kv_slot_header h = {
        .kind = KV_SLOT_SNAPSHOT,
        .state = KV_COMMITTED,
        .hash = s->hash,
        .token_count = s->place,
        .generation = old.generation,
        .data_crc = kv_data_sum(r->mapping.base + place.at, place.bytes),
    };
    slot_put(r, s->index, &h);
    return ERR_OK;
}

enum err wk_rows_seal(struct wk_rows *r, const struct wk_seal *seals, uint32_t count,
                      struct err_detail *detail)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    if (r->mapping.base == NULL)
        return err_set(detail, ERR_INVALID, "seal: before any shape");
    for (uint32_t i = 0; i < count; i++) {
        if (seals[i].snapshot != 0)
            TRY(slot_seal(r, &seals[i], detail));
        else
            TRY(block_seal(r, &seals[i], detail));
    }
    return ERR_OK;
}

/* ---- loop thread ---- */

bool wk_rows_question(struct wk_rows *r, struct msg *ret_attach)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    struct question q;
    if (!ring_pop(r->questions, &q))
        return false;
    *ret_attach = (struct msg){.type = MSG_KV_ATTACH};
    memcpy(ret_attach->id.bytes, &q.number, sizeof q.number);
    ret_attach->u.kv_attach = q.attach;
    return true;
}

void wk_rows_answer(struct wk_rows *r, const struct msg *m)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    if (m->type == MSG_KV_STATE) {
        uint64_t asked = atomic_load(&r->asked), mapped = atomic_load(&r->mapped);
        if (mapped != 0 && m->u.kv_state.incarnation != mapped)
            atomic_store(&r->lost, asked);
        return;
    }
    CHECK(m->type == MSG_KV_ATTACH_REPLY);
    struct answer *a = &r->heard;
    *a = (struct answer){.reply = m->u.kv_attach_reply};
    memcpy(&a->number, m->id.bytes, sizeof a->number);
    if (a->number != atomic_load(&r->asked))
        return; /* nobody waits for it any more */
    snprintf(a->path, sizeof a->path, "%s", m->u.kv_attach_reply.arena_path);
    snprintf(a->text.text, sizeof a->text.text, "%s", m->u.kv_attach_reply.text);
    a->reply.arena_path = a->reply.text = NULL; /* of the message alone */
    a->reply.granted = NULL;
    a->reply.granted_count = 0;
    if (ring_push(r->answers, a))
        CHECK(sem_post(&r->answered) == 0);
}

uint64_t wk_rows_worker(const struct wk_rows *r)
{
    CHECK_OBJ(r, ROWS_MAGIC);
    return r->options.incarnation;
}
