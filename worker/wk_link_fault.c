/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_link_fault.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"

#define FAULT_MAGIC 0x574b464cu

struct fault_link {
    uint32_t magic;
    struct wk_link inner;
    struct wk_fault_options options;
    struct rng rng;
    uint64_t message, stalled_until_us;
    uint64_t done[WK_FAULT_COUNT];
    atomic_bool closed;
    uint8_t *damaged; /* a message's payload */
};

static void sleep_us(uint64_t us)
{
    struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

/* The first rule or chance that hits this message; 0 = none. */
static enum wk_fault fault_pick(struct fault_link *k, uint64_t *ret_value)
{
    for (uint32_t i = 0; i < k->options.rule_count; i++) {
        const struct wk_fault_rule *r = &k->options.rules[i];
        if (r->message != k->message)
            continue;
        *ret_value = r->value;
        return r->fault;
    }
    for (uint32_t fault = 1; fault < WK_FAULT_COUNT; fault++) {
        if (k->options.permille[fault] == 0 ||
            rng_below(&k->rng, 1000) >= k->options.permille[fault])
            continue;
        uint64_t max = k->options.chance_value_max;
        *ret_value = fault == WK_FAULT_CORRUPT ? rng_u64(&k->rng)
                     : max > 0                 ? rng_u64(&k->rng) % max
                                               : 0;
        return (enum wk_fault)fault;
    }
    return (enum wk_fault)0;
}

static enum err send_damaged(struct fault_link *k, uint32_t peer, const struct wk_head *head,
                             const void *bytes, uint64_t wait_us, uint64_t bit)
{
    struct wk_head h = *head;
    uint64_t head_bits = 8 * sizeof h, bits = head_bits + 8 * (uint64_t)head->bytes;
    if (head->bytes > 0)
        memcpy(k->damaged, bytes, head->bytes);
    bit %= bits;
    /* The length stays: a transport that framed it wrongly would be another fault. */
    uint64_t length = 8 * offsetof(struct wk_head, bytes);
    if (bit >= length && bit < length + 32)
        bit += 32;
    if (bit < head_bits)
        ((uint8_t *)&h)[bit / 8] ^= (uint8_t)(1u << bit % 8);
    else
        k->damaged[(bit - head_bits) / 8] ^= (uint8_t)(1u << bit % 8);
    return k->inner.ops->send(k->inner.self, peer, &h, k->damaged, wait_us);
}

static enum err fault_do(struct fault_link *k, enum wk_fault fault, uint64_t value, uint32_t peer,
                         const struct wk_head *head, const void *bytes, uint64_t wait_us)
{
    const struct wk_link *in = &k->inner;
    switch (fault) {
    case WK_FAULT_DROP:
        return ERR_OK;
    case WK_FAULT_DUPLICATE: {
        enum err e = in->ops->send(in->self, peer, head, bytes, wait_us);
        /* Where there is no room for the second copy it is lost, as copies may be. */
        if (e == ERR_OK && in->ops->send(in->self, peer, head, bytes, wait_us) != ERR_OK)
            k->done[WK_FAULT_DUPLICATE]--;
        return e;
    }
    case WK_FAULT_CORRUPT:
        return send_damaged(k, peer, head, bytes, wait_us, value);
    case WK_FAULT_STALL:
        k->stalled_until_us = clock_mono_us() + value;
        return ERR_BUSY;
    case WK_FAULT_CLOSE:
        atomic_store(&k->closed, true);
        return ERR_CLOSED;
    case WK_FAULT_DELAY:
        sleep_us(value);
        break;
    case WK_FAULT_COUNT:
        break;
    }
    return in->ops->send(in->self, peer, head, bytes, wait_us);
}

static enum err fault_send(void *self, uint32_t peer, const struct wk_head *head, const void *bytes,
                           uint64_t wait_us)
{
    struct fault_link *k = self;
    CHECK_OBJ(k, FAULT_MAGIC);
    if (atomic_load(&k->closed))
        return ERR_CLOSED;
    if (clock_mono_us() < k->stalled_until_us) {
        sleep_us(wait_us);
        return ERR_BUSY;
    }
    uint64_t value = 0;
    k->message++;
    enum wk_fault fault = fault_pick(k, &value);
    k->done[fault]++;
    enum err e = fault_do(k, fault, value, peer, head, bytes, wait_us);
    if (e == ERR_BUSY && fault != WK_FAULT_STALL)
        k->message--; /* the same message comes again */
    return e;
}

static enum err fault_receive(void *self, uint32_t peer, struct wk_link_message *ret_message,
                              uint64_t wait_us)
{
    struct fault_link *k = self;
    CHECK_OBJ(k, FAULT_MAGIC);
    if (atomic_load(&k->closed))
        return ERR_CLOSED;
    return k->inner.ops->receive(k->inner.self, peer, ret_message, wait_us);
}

static void fault_release(void *self, uint32_t peer)
{
    struct fault_link *k = self;
    k->inner.ops->release(k->inner.self, peer);
}

static void fault_publish(void *self, const struct wk_status *own)
{
    struct fault_link *k = self;
    if (!atomic_load(&k->closed))
        k->inner.ops->publish(k->inner.self, own);
}

static void fault_peer(void *self, uint32_t peer, struct wk_status *ret_status,
                       uint64_t *ret_heard_us)
{
    struct fault_link *k = self;
    k->inner.ops->peer(k->inner.self, peer, ret_status, ret_heard_us);
}

static void fault_beat(void *self)
{
    struct fault_link *k = self;
    if (!atomic_load(&k->closed))
        k->inner.ops->beat(k->inner.self);
}

static uint64_t fault_refused(void *self)
{
    struct fault_link *k = self;
    return k->inner.ops->refused != NULL ? k->inner.ops->refused(k->inner.self) : 0;
}

static void fault_destroy(void *self)
{
    struct fault_link *k = self;
    CHECK_OBJ(k, FAULT_MAGIC);
    wk_link_destroy(&k->inner);
    mem_give(k->damaged);
    k->magic = 0;
    mem_give(k);
}

static const struct wk_link_ops fault_ops = {
    .name = "fault",
    .send = fault_send,
    .receive = fault_receive,
    .release = fault_release,
    .publish = fault_publish,
    .peer = fault_peer,
    .beat = fault_beat,
    .refused = fault_refused,
    .destroy = fault_destroy,
};

struct wk_link wk_link_fault(const struct wk_link *inner, const struct wk_fault_options *options)
{
    CHECK(options->rule_count <= WK_FAULT_RULES_MAX);
    struct fault_link *k = mem_take(sizeof *k);
    k->magic = FAULT_MAGIC;
    k->inner = *inner;
    k->options = *options;
    k->damaged = mem_take(inner->message_bytes_max);
    rng_init(&k->rng, options->seed);
    struct wk_link link = *inner;
    link.ops = &fault_ops;
    link.self = k;
    return link;
}

uint64_t wk_link_fault_done(const struct wk_link *link, enum wk_fault fault)
{
    const struct fault_link *k = link->self;
    CHECK_OBJ(k, FAULT_MAGIC);
    CHECK(fault < WK_FAULT_COUNT);
    return k->done[fault];
}
