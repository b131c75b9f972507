/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_blocks.h"

#include <stddef.h>
#include <string.h>

#include "lib/base/check.h"

void wk_blocks_init(struct wk_blocks *b, uint32_t *ids, struct hash128 *hashes, uint32_t count_max)
{
    CHECK(b != NULL && ids != NULL && hashes != NULL && count_max > 0);
    memset(b, 0, sizeof *b);
    b->ids = ids;
    b->hashes = hashes;
    b->count_max = count_max;
}

void wk_blocks_reset(struct wk_blocks *b)
{
    CHECK(b != NULL && b->ids != NULL && b->hash_count <= b->count_max);
    uint32_t hash_count = b->hash_count;
    wk_blocks_init(b, b->ids, b->hashes, b->count_max);
    b->hash_count = hash_count;
}

static bool ids_take(struct wk_blocks *b, const struct wk_arena_shape *shape, const uint32_t *ids,
                     uint32_t count)
{
    if (count > b->count_max - b->count)
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= shape->block_count)
            return false;
    memcpy(b->ids + b->count, ids, (size_t)count * sizeof *ids);
    b->count += count;
    return true;
}

/* What is said to come from the cache must be what was asked for, and have its state. */
static bool reuse_fits(const struct wk_blocks *b, const struct wk_arena_shape *shape,
                       const struct msg_kv_open_reply *reply)
{
    uint32_t tokens = reply->reusable_tokens;
    if (tokens == 0)
        return true;
    return tokens % shape->block_tokens == 0 && tokens <= b->asked_max &&
           tokens / shape->block_tokens <= b->hash_count &&
           reply->snapshot_slot >= shape->live_slots && reply->snapshot_slot < shape->slot_count;
}

/* ERR_EPOCH at an open: kvmgr was restarted, the shell attaches again. */
static bool try_again(uint32_t code)
{
    return code < ERR_COUNT && (err_retryable((enum err)code) || code == ERR_EPOCH);
}

enum err wk_blocks_opened(struct wk_blocks *b, const struct wk_arena_shape *shape,
                          const struct msg_kv_open_reply *reply, uint32_t blocks_wanted,
                          uint64_t now_us)
{
    CHECK(b != NULL && shape != NULL && reply != NULL);
    CHECK(b->state == WK_KV_OPENING && b->count == 0);
    if (try_again(reply->code)) {
        if (b->full_since_us == 0)
            b->full_since_us = now_us;
        b->state = WK_KV_FULL;
        return ERR_KV_FULL;
    }
    b->state = WK_KV_NONE;
    if (reply->code != ERR_OK)
        return reply->code < ERR_COUNT ? (enum err)reply->code : ERR_INTERNAL;
    if (reply->state_slot >= shape->live_slots || reply->block_count < blocks_wanted ||
        !reuse_fits(b, shape, reply))
        return ERR_CORRUPT;
    if (!ids_take(b, shape, reply->blocks, reply->block_count))
        return ERR_CORRUPT;
    b->state = WK_KV_HELD;
    b->extend = WK_EXTEND_NONE;
    b->lease = reply->lease;
    b->state_slot = reply->state_slot;
    b->full_since_us = 0;
    b->reused = reply->reusable_tokens;
    b->restore_slot = reply->snapshot_slot;
    b->snapped = reply->reusable_tokens;
    CHECK(b->count > 0 && b->sent == 0 && b->committed == 0);
    b->committed = b->reused / shape->block_tokens;
    CHECK(b->committed <= b->count);
    return ERR_OK;
}

enum err wk_blocks_extended(struct wk_blocks *b, const struct wk_arena_shape *shape,
                            const struct msg_kv_extend_reply *reply, uint64_t now_us)
{
    CHECK(b != NULL && shape != NULL && reply != NULL);
    CHECK(b->state == WK_KV_HELD);
    if (reply->lease != b->lease || b->extend == WK_EXTEND_NONE)
        return ERR_OK;
    if (try_again(reply->code) && reply->code != ERR_EPOCH) {
        if (b->extend != WK_EXTEND_FULL || b->full_since_us == 0)
            b->full_since_us = now_us;
        b->extend = WK_EXTEND_FULL;
        return ERR_KV_FULL;
    }
    if (reply->code != ERR_OK)
        return reply->code < ERR_COUNT ? (enum err)reply->code : ERR_INTERNAL;
    if (reply->blocks_have != b->count)
        return ERR_OK; /* of an earlier question */
    if (reply->block_count == 0 || !ids_take(b, shape, reply->blocks, reply->block_count))
        return ERR_CORRUPT;
    b->extend = WK_EXTEND_NONE;
    b->full_since_us = 0;
    return ERR_OK;
}

uint32_t wk_blocks_for(const struct wk_arena_shape *shape, uint32_t tokens)
{
    CHECK(shape != NULL && shape->block_tokens > 0);
    return (uint32_t)(((uint64_t)tokens + shape->block_tokens - 1) / shape->block_tokens);
}

uint64_t wk_blocks_room(const struct wk_blocks *b, const struct wk_arena_shape *shape)
{
    CHECK(b != NULL && shape != NULL);
    return (uint64_t)b->count * shape->block_tokens;
}
