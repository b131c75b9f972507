/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/text/token_ids.h"

#define BPE_MAGIC       0x62706531u
#define BPE_NO_PAIR     UINT64_MAX
#define BPE_NO_RANK     UINT32_MAX
#define BPE_NONE        UINT32_MAX
#define BPE_SHORT_BYTES 32 /* up to here a plain scan beats the heap */

/* A symbol of a long piece: part of a doubly linked list by position. */
struct bpe_node {
    uint32_t id;
    uint32_t previous;
    uint32_t next; /* BPE_NONE at the end */
    bool dead;     /* merged into its left neighbour */
};

enum err bpe_init(struct bpe *b, uint32_t merges_max)
{
    CHECK(merges_max <= BPE_MERGES_MAX);
    *b = (struct bpe){.magic = BPE_MAGIC};
    uint32_t slot_count = 16;
    while (slot_count < 2 * merges_max) /* at most half full, so a probe always ends */
        slot_count *= 2;
    b->slots = malloc((size_t)slot_count * sizeof(*b->slots));
    if (b->slots == NULL)
        return ERR_NOMEM;
    memset(b->slots, 0xff, (size_t)slot_count * sizeof(*b->slots));
    b->slot_mask = slot_count - 1;
    return ERR_OK;
}

void bpe_fini(struct bpe *b)
{
    if (b == NULL)
        return;
    free(b->slots);
    *b = (struct bpe){0};
}

static uint32_t bpe_slot(uint64_t pair)
{
    pair *= 0x9e3779b97f4a7c15u;
    pair ^= pair >> 29;
    pair *= 0xbf58476d1ce4e5b9u;
    return (uint32_t)(pair >> 32);
}

void bpe_put(struct bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t result)
{
    CHECK_OBJ(b, BPE_MAGIC);
    CHECK(left != UINT32_MAX && rank != BPE_NO_RANK);
    CHECK(b->merge_count <= b->slot_mask / 2);
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t slot = bpe_slot(pair) & b->slot_mask;
    while (b->slots[slot].pair != BPE_NO_PAIR && b->slots[slot].pair != pair)
        slot = (slot + 1) & b->slot_mask;
    if (b->slots[slot].pair == BPE_NO_PAIR)
        b->merge_count++;
    b->slots[slot] = (struct bpe_merge){.pair = pair, .rank = rank, .id = result};
}

/* NULL: the two do not merge. */
static const struct bpe_merge *bpe_find(const struct bpe *b, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t slot = bpe_slot(pair) & b->slot_mask;
    while (b->slots[slot].pair != pair) {
        if (b->slots[slot].pair == BPE_NO_PAIR)
            return NULL;
        slot = (slot + 1) & b->slot_mask;
    }
    return &b->slots[slot];
}

void bpe_scratch_init(struct bpe_scratch *s)
{
    *s = (struct bpe_scratch){0};
}

void bpe_scratch_fini(struct bpe_scratch *s)
{
    free(s->nodes);
    free(s->heap);
    *s = (struct bpe_scratch){0};
}

/* A short piece: arrays that shrink by one at each merge. */
static enum err encode_short(const struct bpe *b, const uint8_t *piece, size_t count,
                             struct token_ids *out)
{
    uint32_t ids[BPE_SHORT_BYTES];
    const struct bpe_merge *merges[BPE_SHORT_BYTES]; /* of symbol i with its right neighbour */
    CHECK(count >= 1 && count <= BPE_SHORT_BYTES);
    for (size_t i = 0; i < count; i++)
        ids[i] = b->byte_ids[piece[i]];
    for (size_t i = 0; i + 1 < count; i++)
        merges[i] = bpe_find(b, ids[i], ids[i + 1]);
    for (;;) {
        size_t best = count;
        uint32_t best_rank = BPE_NO_RANK;
        for (size_t i = 0; i + 1 < count; i++)
            if (merges[i] != NULL && merges[i]->rank < best_rank) {
                best_rank = merges[i]->rank;
                best = i;
            }
        if (best == count)
            break;
        ids[best] = merges[best]->id;
        size_t rest = count - best - 2;
        if (rest > 0) {
            memmove(&ids[best + 1], &ids[best + 2], rest * sizeof(ids[0]));
            memmove(&merges[best + 1], &merges[best + 2], (rest - 1) * sizeof(merges[0]));
        }
        count--;
        if (best + 1 < count)
            merges[best] = bpe_find(b, ids[best], ids[best + 1]);
        if (best > 0)
            merges[best - 1] = bpe_find(b, ids[best - 1], ids[best]);
    }
    for (size_t i = 0; i < count; i++)
        if (!token_ids_add(out, ids[i]))
            return ERR_TOO_LARGE;
    return ERR_OK;
}

static void heap_up(uint64_t *heap, size_t at)
{
    uint64_t value = heap[at];
    while (at > 0 && heap[(at - 1) / 2] > value) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = value;
}

static void heap_down(uint64_t *heap, size_t count, size_t at)
{
    uint64_t value = heap[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= value)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

static enum err scratch_reserve(struct bpe_scratch *s, size_t count)
{
    if (count <= s->node_capacity)
        return ERR_OK;
    free(s->nodes);
    free(s->heap);
    s->node_capacity = 0;
    s->nodes = malloc(count * sizeof(*s->nodes));
    /* One entry per pair at the start; a merge takes one out and puts at most two in. */
    s->heap = malloc(2 * count * sizeof(*s->heap));
    if (s->nodes == NULL || s->heap == NULL)
        return ERR_NOMEM;
    s->node_capacity = count;
    return ERR_OK;
}

/* Queues the pair that begins at position `at`, if there is one that merges. */
static void queue_pair(const struct bpe *b, struct bpe_scratch *s, uint32_t at, size_t *count)
{
    const struct bpe_node *node = &s->nodes[at];
    if (node->next == BPE_NONE)
        return;
    const struct bpe_merge *merge = bpe_find(b, node->id, s->nodes[node->next].id);
    if (merge == NULL)
        return;
    CHECK(*count < 2 * s->node_capacity);
    s->heap[*count] = (uint64_t)merge->rank << 32 | at;
    heap_up(s->heap, (*count)++);
}

static void merge_at(const struct bpe *b, struct bpe_scratch *s, uint64_t entry, size_t *count)
{
    uint32_t at = (uint32_t)entry;
    struct bpe_node *node = &s->nodes[at];
    if (node->dead || node->next == BPE_NONE)
        return;
    struct bpe_node *right = &s->nodes[node->next];
    const struct bpe_merge *merge = bpe_find(b, node->id, right->id);
    if (merge == NULL || merge->rank != entry >> 32)
        return; /* the pair changed since it was queued */
    node->id = merge->id;
    node->next = right->next;
    right->dead = true;
    if (node->next != BPE_NONE)
        s->nodes[node->next].previous = at;
    queue_pair(b, s, at, count);
    if (node->previous != BPE_NONE)
        queue_pair(b, s, node->previous, count);
}

static enum err encode_long(const struct bpe *b, struct bpe_scratch *s, const uint8_t *piece,
                            size_t count, struct token_ids *out)
{
    TRY(scratch_reserve(s, count));
    for (uint32_t i = 0; i < count; i++)
        s->nodes[i] = (struct bpe_node){.id = b->byte_ids[piece[i]],
                                        .previous = i == 0 ? BPE_NONE : i - 1,
                                        .next = i + 1 < count ? i + 1 : BPE_NONE};
    size_t heap_count = 0;
    for (uint32_t i = 0; i + 1 < count; i++)
        queue_pair(b, s, i, &heap_count);
    while (heap_count > 0) {
        uint64_t entry = s->heap[0];
        s->heap[0] = s->heap[--heap_count];
        if (heap_count > 0)
            heap_down(s->heap, heap_count, 0);
        merge_at(b, s, entry, &heap_count);
    }
    for (uint32_t i = 0; i != BPE_NONE; i = s->nodes[i].next)
        if (!token_ids_add(out, s->nodes[i].id))
            return ERR_TOO_LARGE;
    return ERR_OK;
}

enum err bpe_encode(const struct bpe *b, struct bpe_scratch *s, const uint8_t *piece, size_t count,
                    struct token_ids *out)
{
    CHECK_OBJ(b, BPE_MAGIC);
    CHECK(out != NULL && s != NULL);
    while (count > 0) {
        size_t part = count < BPE_PIECE_BYTES_MAX ? count : BPE_PIECE_BYTES_MAX;
        if (part == 1) {
            if (!token_ids_add(out, b->byte_ids[piece[0]]))
                return ERR_TOO_LARGE;
        } else if (part <= BPE_SHORT_BYTES) {
            TRY(encode_short(b, piece, part, out));
        } else {
            TRY(encode_long(b, s, piece, part, out));
        }
        piece += part;
        count -= part;
    }
    return ERR_OK;
}
