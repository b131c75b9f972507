/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_fabric.h"

#include <inttypes.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "worker/wk_fabric_parts.h"

/* One collective on its way: the same on every rank that takes part. */
struct call {
    enum wk_collective kind;
    uint64_t bytes_all;
    uint64_t deadline_us;
};

const char *wk_collective_name(uint32_t kind)
{
    static const char *const names[] = {"?",       "all_reduce", "all_gather", "pair_exchange",
                                        "barrier", "all_to_all", "tell"};
    return names[kind < ARRAY_COUNT(names) ? kind : 0];
}

/* Over the head up to the sum itself, then the payload. */
static uint64_t message_sum(const struct wk_head *head, const void *bytes)
{
    struct hash128 a = hash_xxh3_once(head, offsetof(struct wk_head, sum));
    uint64_t sum, other = 0;
    memcpy(&sum, a.bytes, sizeof sum);
    if (head->bytes > 0) {
        struct hash128 b = hash_xxh3_once(bytes, head->bytes);
        memcpy(&other, b.bytes, sizeof other);
    }
    return sum * 3 + other;
}

static struct call call_begin(struct wk_fabric *f, enum wk_collective kind, uint64_t bytes)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    f->stats.collectives++;
    return (struct call){kind, bytes, clock_mono_us() + (uint64_t)f->options.deadline_ms * 1000};
}

/* What to do after a wait without success. */
static enum err call_wait(struct wk_fabric *f, const struct call *c, uint32_t peer)
{
    TRY(wk_fabric_look(f, wk_collective_name(c->kind)));
    if (clock_mono_us() >= c->deadline_us)
        return wk_fabric_fail(f, ERR_TIMEOUT,
                              "%s of step %" PRIu64 ": rank %u lives but did not come in %u ms",
                              wk_collective_name(c->kind), f->step, peer, f->options.deadline_ms);
    return ERR_OK;
}

static enum err piece_send(struct wk_fabric *f, const struct call *c, uint32_t peer,
                           const void *bytes, size_t count)
{
    CHECK(count <= f->link.message_bytes_max);
    struct wk_head head = {.magic = WK_HEAD_MAGIC,
                           .kind = (uint8_t)c->kind,
                           .rank = (uint8_t)f->rank,
                           .epoch = f->own.epoch,
                           .bytes = (uint32_t)count,
                           .step = f->step,
                           .number = ++f->sent[peer],
                           .bytes_all = c->bytes_all};
    head.sum = message_sum(&head, bytes);
    for (;;) {
        enum err e = f->link.ops->send(f->link.self, peer, &head, bytes, WK_LOOK_US);
        if (e == ERR_OK) {
            f->stats.bytes_sent += count;
            return ERR_OK;
        }
        if (e != ERR_BUSY)
            return wk_fabric_fail(f, e, "%s of step %" PRIu64 ": link to rank %u: %s",
                                  wk_collective_name(c->kind), f->step, peer, err_text(e));
        TRY(call_wait(f, c, peer));
    }
}

/* ERR_BUSY: a message to drop and forget. */
static enum err head_check(struct wk_fabric *f, const struct call *c, uint32_t peer,
                           const struct wk_link_message *m, size_t count)
{
    const struct wk_head *h = &m->head;
    const char *name = wk_collective_name(c->kind);
    if (h->magic != WK_HEAD_MAGIC || h->rank != peer || h->zero != 0 ||
        h->bytes > f->link.message_bytes_max || message_sum(h, m->bytes) != h->sum)
        return wk_fabric_fail(f, ERR_CORRUPT, "%s of step %" PRIu64 ": message of rank %u damaged",
                              name, f->step, peer);
    if (h->epoch < f->own.epoch) {
        f->stats.stale++;
        return ERR_BUSY;
    }
    if (h->epoch > f->own.epoch)
        return wk_fabric_fail(f, ERR_EPOCH,
                              "%s of step %" PRIu64 ": rank %u is in epoch %u, this rank in %u",
                              name, f->step, peer, h->epoch, f->own.epoch);
    if (h->number <= f->received[peer]) {
        f->stats.duplicates++;
        return ERR_BUSY;
    }
    if (h->number != f->received[peer] + 1)
        return wk_fabric_fail(f, ERR_CORRUPT,
                              "%s of step %" PRIu64 ": %" PRIu64 " messages of rank %u lost", name,
                              f->step, h->number - f->received[peer] - 1, peer);
    if (h->step != f->step || h->kind != c->kind || h->bytes_all != c->bytes_all ||
        h->bytes != count)
        return wk_fabric_fail(f, ERR_INVALID,
                              "ranks differ: rank %u in %s of %" PRIu64 " bytes, step %" PRIu64
                              "; this rank in %s of %" PRIu64 " bytes, step %" PRIu64,
                              peer, wk_collective_name(h->kind), h->bytes_all, h->step, name,
                              c->bytes_all, f->step);
    f->received[peer]++;
    return ERR_OK;
}

static enum err piece_receive(struct wk_fabric *f, const struct call *c, uint32_t peer,
                              size_t count, const uint8_t **ret_bytes)
{
    for (;;) {
        struct wk_link_message m;
        enum err e = f->link.ops->receive(f->link.self, peer, &m, WK_LOOK_US);
        if (e == ERR_BUSY) {
            TRY(call_wait(f, c, peer));
            TRY(wk_fabric_missing(f, wk_collective_name(c->kind), peer));
            continue;
        }
        if (e != ERR_OK)
            return wk_fabric_fail(f, e, "%s of step %" PRIu64 ": link to rank %u: %s",
                                  wk_collective_name(c->kind), f->step, peer, err_text(e));
        e = head_check(f, c, peer, &m, count);
        if (e == ERR_OK) {
            f->waiting_us = f->missing_us = 0;
            *ret_bytes = m.bytes;
            return ERR_OK;
        }
        f->link.ops->release(f->link.self, peer);
        if (e != ERR_BUSY)
            return e;
        /* A flood of old messages must not outlast the deadline. */
        TRY(call_wait(f, c, peer));
    }
}

static enum err piece_send_all(struct wk_fabric *f, const struct call *c, const void *bytes,
                               size_t count)
{
    for (uint32_t peer = 0; peer < f->ranks; peer++)
        if (peer != f->rank)
            TRY(piece_send(f, c, peer, bytes, count));
    return ERR_OK;
}

static size_t piece_of(const struct wk_fabric *f, size_t left)
{
    return left < f->link.message_bytes_max ? left : f->link.message_bytes_max;
}

/* A link's memory need not be aligned. */
static float f32_at(const uint8_t *bytes, size_t i)
{
    float value;
    memcpy(&value, bytes + i * sizeof value, sizeof value);
    return value;
}

void wk_fabric_sum(const uint8_t *const *parts, uint32_t ranks, float *out, size_t count)
{
    if (ranks == 2) {
        for (size_t i = 0; i < count; i++)
            out[i] = f32_at(parts[0], i) + f32_at(parts[1], i);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        float sum = f32_at(parts[0], i);
        for (uint32_t r = 1; r < ranks; r++)
            sum += f32_at(parts[r], i);
        out[i] = sum;
    }
}

static enum err reduce_piece(struct wk_fabric *f, const struct call *c, float *values, size_t count)
{
    const uint8_t *parts[WK_RANKS_MAX];
    TRY(piece_send_all(f, c, values, count * sizeof *values));
    for (uint32_t peer = 0; peer < f->ranks; peer++) {
        const uint8_t *bytes = (const uint8_t *)values;
        if (peer != f->rank)
            TRY(piece_receive(f, c, peer, count * sizeof *values, &bytes));
        parts[peer] = bytes;
    }
    wk_fabric_sum(parts, f->ranks, values, count);
    for (uint32_t peer = 0; peer < f->ranks; peer++)
        if (peer != f->rank)
            f->link.ops->release(f->link.self, peer);
    return ERR_OK;
}

enum err wk_all_reduce(struct wk_fabric *f, float *values, size_t count)
{
    struct call c = call_begin(f, WK_ALL_REDUCE, (uint64_t)count * sizeof *values);
    if (f->fault != ERR_OK)
        return f->fault;
    size_t piece = f->link.message_bytes_max / sizeof *values;
    for (size_t at = 0; at < count; at += piece)
        TRY(reduce_piece(f, &c, values + at, count - at < piece ? count - at : piece));
    return ERR_OK;
}

/* Sends peer p the bytes at own + p * step, step 0 = the same to all, and takes in theirs. */
static enum err parts_exchange(struct wk_fabric *f, const struct call *c, const uint8_t *own,
                               size_t step, size_t bytes, uint8_t *all)
{
    size_t at = 0;
    do { /* an empty share sends its message too */
        size_t count = piece_of(f, bytes - at);
        for (uint32_t peer = 0; peer < f->ranks; peer++)
            if (peer != f->rank)
                TRY(piece_send(f, c, peer, own + peer * step + at, count));
        for (uint32_t peer = 0; peer < f->ranks; peer++) {
            const uint8_t *from = NULL;
            if (peer == f->rank)
                continue;
            TRY(piece_receive(f, c, peer, count, &from));
            memcpy(all + peer * bytes + at, from, count);
            f->link.ops->release(f->link.self, peer);
        }
        at += count;
    } while (at < bytes);
    return ERR_OK;
}

enum err wk_all_gather(struct wk_fabric *f, const void *own, size_t bytes, void *ret_all)
{
    struct call c = call_begin(f, WK_ALL_GATHER, bytes);
    if (f->fault != ERR_OK)
        return f->fault;
    uint8_t *mine = (uint8_t *)ret_all + f->rank * bytes;
    if (bytes > 0 && own != mine)
        memcpy(mine, own, bytes);
    return parts_exchange(f, &c, mine, 0, bytes, ret_all);
}

enum err wk_all_to_all(struct wk_fabric *f, const void *own, size_t bytes, void *ret_all)
{
    struct call c = call_begin(f, WK_ALL_TO_ALL, bytes);
    CHECK(own != ret_all);
    if (f->fault != ERR_OK)
        return f->fault;
    if (bytes > 0)
        memcpy((uint8_t *)ret_all + f->rank * bytes, (const uint8_t *)own + f->rank * bytes, bytes);
    return parts_exchange(f, &c, own, bytes, bytes, ret_all);
}

enum err wk_pair_exchange(struct wk_fabric *f, uint32_t peer, const void *own, size_t bytes,
                          void *ret_theirs)
{
    struct call c = call_begin(f, WK_PAIR_EXCHANGE, bytes);
    CHECK(peer < f->ranks && peer != f->rank);
    if (f->fault != ERR_OK)
        return f->fault;
    size_t at = 0;
    do {
        size_t count = piece_of(f, bytes - at);
        const uint8_t *from = NULL;
        TRY(piece_send(f, &c, peer, (const uint8_t *)own + at, count));
        TRY(piece_receive(f, &c, peer, count, &from));
        memcpy((uint8_t *)ret_theirs + at, from, count);
        f->link.ops->release(f->link.self, peer);
        at += count;
    } while (at < bytes);
    return ERR_OK;
}

enum err wk_barrier(struct wk_fabric *f)
{
    struct call c = call_begin(f, WK_BARRIER, 0);
    if (f->fault != ERR_OK)
        return f->fault;
    TRY(piece_send_all(f, &c, NULL, 0));
    for (uint32_t peer = 0; peer < f->ranks; peer++) {
        const uint8_t *from = NULL;
        if (peer == f->rank)
            continue;
        TRY(piece_receive(f, &c, peer, 0, &from));
        f->link.ops->release(f->link.self, peer);
    }
    return ERR_OK;
}

enum err wk_tell(struct wk_fabric *f, const void *bytes, size_t count)
{
    struct call c = call_begin(f, WK_TELL, count);
    CHECK(f->rank == 0 && count > 0);
    if (f->fault != ERR_OK)
        return f->fault;
    f->step = 0;
    for (size_t at = 0; at < count;) {
        size_t piece = piece_of(f, count - at);
        TRY(piece_send_all(f, &c, (const uint8_t *)bytes + at, piece));
        at += piece;
    }
    return ERR_OK;
}

/* Until rank 0 has said something; what it is stays unread. */
static enum err tell_wait(struct wk_fabric *f, uint64_t end_us, uint64_t *ret_bytes_all)
{
    for (;;) {
        struct wk_link_message m;
        enum err e = f->link.ops->receive(f->link.self, 0, &m, WK_LOOK_US);
        if (e == ERR_OK && m.head.epoch >= f->own.epoch && m.head.number > f->received[0]) {
            /* Not released: it is received again, and only then believed. */
            *ret_bytes_all = m.head.bytes_all > 0 ? m.head.bytes_all : 1;
            return ERR_OK;
        }
        if (e == ERR_OK) {
            f->stats.stale++;
            f->link.ops->release(f->link.self, 0);
            continue;
        }
        if (e != ERR_BUSY)
            return wk_fabric_fail(f, e, "waiting for rank 0: %s", err_text(e));
        TRY(wk_fabric_look(f, "waiting for rank 0"));
        TRY(wk_fabric_missing(f, "waiting for rank 0", 0));
        if (clock_mono_us() >= end_us)
            return ERR_BUSY;
    }
}

enum err wk_hear(struct wk_fabric *f, void *ret_bytes, size_t bytes_max, size_t *ret_count,
                 uint32_t wait_ms)
{
    struct call c = call_begin(f, WK_TELL, 0);
    CHECK(f->rank > 0);
    if (f->fault != ERR_OK)
        return f->fault;
    f->step = 0;
    TRY(tell_wait(f, clock_mono_us() + (uint64_t)wait_ms * 1000, &c.bytes_all));
    if (c.bytes_all > bytes_max)
        return wk_fabric_fail(f, ERR_TOO_LARGE, "rank 0 tells %" PRIu64 " bytes, at most %zu",
                              c.bytes_all, bytes_max);
    c.deadline_us = clock_mono_us() + (uint64_t)f->options.deadline_ms * 1000;
    for (size_t at = 0; at < c.bytes_all;) {
        const uint8_t *from = NULL;
        size_t piece = piece_of(f, c.bytes_all - at);
        TRY(piece_receive(f, &c, 0, piece, &from));
        memcpy((uint8_t *)ret_bytes + at, from, piece);
        f->link.ops->release(f->link.self, 0);
        at += piece;
    }
    *ret_count = c.bytes_all;
    return ERR_OK;
}
