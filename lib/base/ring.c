/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/ring.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define RING_MAGIC     0x52494e47u
#define RING_COUNT_MAX (1u << 30)

/* head and tail run freely and wrap at 2^32; their difference is the count.  Each side keeps its
 * index on a line of its own, with a copy of the other side's that is renewed only when the ring
 * looks full or empty, so the two threads seldom touch the same line. */
struct ring {
    uint32_t magic;
    uint32_t mask;
    size_t item_bytes;
    unsigned char *items;

    alignas(64) _Atomic uint32_t head; /* next to pop; written by the consumer */
    uint32_t tail_seen;

    alignas(64) _Atomic uint32_t tail; /* next to push; written by the producer */
    uint32_t head_seen;
};

STATIC_CHECK(sizeof(struct ring) == 192);

struct ring *ring_create(uint32_t item_count_max, size_t item_bytes)
{
    CHECK(item_count_max > 0 && item_count_max <= RING_COUNT_MAX);
    CHECK(item_bytes > 0);
    uint32_t capacity = 1;
    while (capacity < item_count_max)
        capacity *= 2;
    struct ring *r = mem_take(sizeof *r);
    r->magic = RING_MAGIC;
    r->mask = capacity - 1;
    r->item_bytes = item_bytes;
    r->items = mem_take_array(capacity, item_bytes);
    return r;
}

void ring_destroy(struct ring **ring_p)
{
    CHECK(ring_p != NULL);
    struct ring *r = *ring_p;
    if (r == NULL)
        return;
    CHECK_OBJ(r, RING_MAGIC);
    mem_give(r->items);
    r->magic = 0;
    mem_give(r);
    *ring_p = NULL;
}

bool ring_push(struct ring *r, const void *item)
{
    CHECK_OBJ(r, RING_MAGIC);
    uint32_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    if (tail - r->head_seen > r->mask) {
        r->head_seen = atomic_load_explicit(&r->head, memory_order_acquire);
        if (tail - r->head_seen > r->mask)
            return false;
    }
    memcpy(r->items + (size_t)(tail & r->mask) * r->item_bytes, item, r->item_bytes);
    atomic_store_explicit(&r->tail, tail + 1, memory_order_release);
    return true;
}

bool ring_pop(struct ring *r, void *ret_item)
{
    CHECK_OBJ(r, RING_MAGIC);
    uint32_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    if (head == r->tail_seen) {
        r->tail_seen = atomic_load_explicit(&r->tail, memory_order_acquire);
        if (head == r->tail_seen)
            return false;
    }
    memcpy(ret_item, r->items + (size_t)(head & r->mask) * r->item_bytes, r->item_bytes);
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
    return true;
}

uint32_t ring_count(const struct ring *r)
{
    CHECK_OBJ(r, RING_MAGIC);
    /* head first: tail only grows, so the difference is never negative. */
    uint32_t head = atomic_load_explicit(&r->head, memory_order_acquire);
    uint32_t tail = atomic_load_explicit(&r->tail, memory_order_acquire);
    uint32_t count = tail - head;
    return count > r->mask + 1 ? r->mask + 1 : count;
}
