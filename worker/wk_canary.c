/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_canary.h"

#include <stdbool.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/hash.h"
#include "lib/base/mem.h"
#include "lib/model/model.h"
#include "lib/model/sampler.h"
#include "worker/wk_exec.h"

#define CANARY_TOKENS (WK_CANARY_PROMPT + WK_CANARY_OUTPUT)

/* One block that holds the whole canary. */
static struct model_kv cache_take(const struct model_info *info)
{
    uint32_t kpool = info->index_kpool > 0 ? info->index_kpool : 1;
    uint32_t tokens = (CANARY_TOKENS + kpool - 1) / kpool * kpool;
    struct model_kv kv = {.block_tokens = tokens, .block_count = 1, .slot_count = 1};
    uint64_t latents = (uint64_t)tokens * info->latent_dim * sizeof(float);
    kv.index_offset = latents;
    kv.layer_stride = latents + (uint64_t)(tokens / kpool) * info->index_dim * sizeof(float);
    kv.block_stride = kv.layer_stride * (info->dsa_layers > 0 ? info->dsa_layers : 1);
    kv.slot_stride = info->state_bytes;
    kv.blocks = mem_take(kv.block_stride);
    kv.slots = mem_take(kv.slot_stride);
    return kv;
}

static uint32_t greedy(const struct wk_canary *c, const float *logits, uint32_t position)
{
    struct sampler_params params = {.top_p = 1, .repetition_penalty = 1};
    struct sampler_history none = {NULL, NULL};
    struct sampler_result picked;
    sampler_pick(c->sampler, &params, &none, logits, position, &picked);
    return picked.id;
}

static const float *forward(struct model_cursor *cursor, const struct model_kv *kv,
                            const uint32_t *ids, uint32_t position, uint32_t rows)
{
    static const uint32_t block = 0;
    struct model_seq seq = {
        .position_start = position,
        .row_count = rows,
        .fresh = position == 0,
        .logits_from = rows - 1,
        .blocks = &block,
        .block_count = 1,
    };
    struct model_batch batch = {.seq_count = 1, .row_count = rows, .seqs = &seq, .ids = ids};
    model_begin(cursor, kv, &batch);
    return model_finish(cursor);
}

void wk_canary_run(const struct wk_canary *c, struct wk_loaded *ret_loaded)
{
    const struct model_info *info = ret_loaded->info;
    CHECK(info != NULL && c->rows_max > 0);
    CHECK(ret_loaded->context_max >= CANARY_TOKENS);
    struct model_kv kv = cache_take(info);
    for (uint32_t i = 0; i < WK_CANARY_PROMPT; i++)
        ret_loaded->canary_ids[i] = (i + 1) % info->vocab_size;
    uint64_t begun = clock_mono_us();
    const float *logits = NULL;
    for (uint32_t at = 0; at < WK_CANARY_PROMPT;) {
        uint32_t left = WK_CANARY_PROMPT - at;
        uint32_t rows = left < c->rows_max ? left : c->rows_max;
        logits = forward(c->prefill, &kv, ret_loaded->canary_ids + at, at, rows);
        at += rows;
    }
    uint64_t half = clock_mono_us();
    for (uint32_t i = 0; i < WK_CANARY_OUTPUT; i++) {
        uint32_t *id = &ret_loaded->canary_output[i];
        *id = greedy(c, logits, WK_CANARY_PROMPT + i);
        if (i + 1 < WK_CANARY_OUTPUT)
            logits = forward(c->decode, &kv, id, WK_CANARY_PROMPT + i, 1);
    }
    ret_loaded->prefill_us_per_row = (double)(half - begun + 1) / WK_CANARY_PROMPT;
    ret_loaded->decode_us_per_step = (double)(clock_mono_us() - half + 1) / WK_CANARY_OUTPUT;
    mem_give(kv.blocks);
    mem_give(kv.slots);
}

uint64_t wk_canary_hash(const uint32_t *ids, uint32_t count)
{
    uint8_t bytes[4 * WK_CANARY_OUTPUT];
    CHECK(count <= WK_CANARY_OUTPUT);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t b = 0; b < 4; b++)
            bytes[4 * i + b] = (uint8_t)(ids[i] >> (8 * b));
    struct hash128 h = hash_xxh3_once(bytes, (size_t)count * 4);
    uint64_t first = 0;
    for (uint32_t b = 0; b < 8; b++)
        first |= (uint64_t)h.bytes[b] << (8 * b);
    return first;
}
