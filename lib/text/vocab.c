/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/vocab.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define VOCAB_MAGIC 0x766f6361u

/* Eight bytes a round; the table is filled from the tokenizer file alone, so the mix needs to be
 * quick and even, not secret. */
static uint32_t vocab_hash(const uint8_t *bytes, size_t count)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ count;
    while (count >= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        h = (h ^ word) * 0xd6e8feb86659fd93u;
        h ^= h >> 32;
        bytes += 8;
        count -= 8;
    }
    uint64_t tail = 0;
    if (count > 0)
        memcpy(&tail, bytes, count);
    h = (h ^ tail) * 0xd6e8feb86659fd93u;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9u;
    return (uint32_t)(h >> 32);
}

void vocab_init(struct vocab *v)
{
    *v = (struct vocab){.magic = VOCAB_MAGIC};
}

void vocab_fini(struct vocab *v)
{
    if (v == NULL)
        return;
    free(v->tokens);
    free(v->bytes);
    free(v->slots);
    *v = (struct vocab){0};
}

static enum err vocab_reserve_id(struct vocab *v, uint32_t id)
{
    if (id >= VOCAB_IDS_MAX)
        return ERR_TOO_LARGE;
    if (id < v->token_capacity)
        return ERR_OK;
    uint32_t capacity = v->token_capacity ? v->token_capacity : 1024;
    while (capacity <= id)
        capacity *= 2;
    struct vocab_token *tokens = realloc(v->tokens, (size_t)capacity * sizeof(*tokens));
    if (tokens == NULL)
        return ERR_NOMEM;
    memset(tokens + v->token_capacity, 0, (capacity - v->token_capacity) * sizeof(*tokens));
    v->tokens = tokens;
    v->token_capacity = capacity;
    return ERR_OK;
}

static enum err vocab_reserve_bytes(struct vocab *v, size_t count)
{
    if (count > VOCAB_BYTES_MAX - v->byte_count)
        return ERR_TOO_LARGE;
    size_t needed = v->byte_count + count;
    if (needed <= v->byte_capacity)
        return ERR_OK;
    size_t capacity = v->byte_capacity ? v->byte_capacity : 4096;
    while (capacity < needed)
        capacity *= 2;
    uint8_t *bytes = realloc(v->bytes, capacity);
    if (bytes == NULL)
        return ERR_NOMEM;
    v->bytes = bytes;
    v->byte_capacity = (uint32_t)capacity;
    return ERR_OK;
}

enum err vocab_add(struct vocab *v, uint32_t id, const void *bytes, size_t count, uint8_t flags)
{
    CHECK_OBJ(v, VOCAB_MAGIC);
    CHECK(v->slots == NULL); /* not after vocab_index */
    TRY(vocab_reserve_id(v, id));
    struct vocab_token *token = &v->tokens[id];
    if (token->flags & VOCAB_PRESENT)
        return ERR_INVALID;
    TRY(vocab_reserve_bytes(v, count));
    token->offset = v->byte_count;
    token->count = (uint32_t)count;
    token->flags = flags | VOCAB_PRESENT;
    if (count > 0)
        memcpy(v->bytes + v->byte_count, bytes, count);
    v->byte_count += (uint32_t)count;
    v->token_count++;
    if (id >= v->id_count)
        v->id_count = id + 1;
    if ((flags & VOCAB_TEXT) && count > v->longest)
        v->longest = (uint32_t)count;
    return ERR_OK;
}

static bool vocab_probe(const struct vocab *v, const uint8_t *bytes, size_t count,
                        uint32_t *ret_slot)
{
    uint32_t slot = vocab_hash(bytes, count) & v->slot_mask;
    while (v->slots[slot] != 0) {
        const struct vocab_token *token = &v->tokens[v->slots[slot] - 1];
        if (token->count == count && memcmp(v->bytes + token->offset, bytes, count) == 0) {
            *ret_slot = slot;
            return true;
        }
        slot = (slot + 1) & v->slot_mask;
    }
    *ret_slot = slot;
    return false;
}

enum err vocab_index(struct vocab *v, uint32_t *ret_id)
{
    CHECK_OBJ(v, VOCAB_MAGIC);
    CHECK(v->slots == NULL);
    uint32_t slot_count = 16;
    while (slot_count < 2 * v->token_count) /* at most half full, so a probe always ends */
        slot_count *= 2;
    v->slots = calloc(slot_count, sizeof(*v->slots));
    if (v->slots == NULL)
        return ERR_NOMEM;
    v->slot_mask = slot_count - 1;
    for (uint32_t id = 0; id < v->id_count; id++) {
        const struct vocab_token *token = &v->tokens[id];
        if (!(token->flags & VOCAB_TEXT))
            continue;
        uint32_t slot;
        if (vocab_probe(v, v->bytes + token->offset, token->count, &slot)) {
            *ret_id = id;
            return ERR_INVALID;
        }
        v->slots[slot] = id + 1;
    }
    return ERR_OK;
}

bool vocab_find(const struct vocab *v, const void *bytes, size_t count, uint32_t *ret_id)
{
    DCHECK(v->slots != NULL);
    uint32_t slot;
    if (count > v->longest || !vocab_probe(v, bytes, count, &slot))
        return false;
    *ret_id = v->slots[slot] - 1;
    return true;
}

const struct vocab_token *vocab_token(const struct vocab *v, uint32_t id)
{
    if (id >= v->id_count || !(v->tokens[id].flags & VOCAB_PRESENT))
        return NULL;
    return &v->tokens[id];
}

const uint8_t *vocab_bytes(const struct vocab *v, const struct vocab_token *token)
{
    CHECK(token->offset <= v->byte_count && token->count <= v->byte_count - token->offset);
    return v->bytes + token->offset;
}
