/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_canary.h"

#include <stdbool.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/hash.h"
#include "lib/base/mem.h"
#include "lib/model/config.h"
#include "lib/model/model.h"
#include "lib/model/sampler.h"
#include "worker/wk_exec.h"

#define CANARY_TOKENS (WK_CANARY_PROMPT + WK_CANARY_OUTPUT)

/* One block that holds this rank's rows of the whole canary. */
static struct model_kv cache_take(const struct wk_canary *c, const struct model_info *info,
                                  enum kv_row kv_type, enum kv_row index_type)
{
    uint32_t kpool = info->index_kpool > 0 ? info->index_kpool : 1;
    uint32_t unit = c->shards > 1 ? c->shards * c->interleave : kpool;
    uint32_t tokens = (CANARY_TOKENS + unit - 1) / unit * unit, rows = tokens / c->shards;
    struct model_kv kv = {.block_tokens = tokens,
                          .block_count = 1,
                          .slot_count = 1,
                          .kv_type = kv_type,
                          .index_type = index_type};
    uint64_t latents = rows * kv_row_bytes(kv_type, info->latent_dim);
    uint64_t pools = rows / kpool * kv_row_bytes(index_type, info->index_dim);
    kv.index_offset = (latents + 3) / 4 * 4;
    kv.layer_stride = (kv.index_offset + pools + 3) / 4 * 4;
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

static void run(const struct wk_canary *c, enum kv_row kv_type, enum kv_row index_type,
                struct wk_loaded *loaded)
{
    struct model_kv kv = cache_take(c, loaded->info, kv_type, index_type);
    uint32_t *output = loaded->canary_output[kv_type][index_type];
    uint64_t begun = clock_mono_us();
    const float *logits = NULL;
    for (uint32_t at = 0; at < WK_CANARY_PROMPT;) {
        uint32_t left = WK_CANARY_PROMPT - at;
        uint32_t rows = left < c->rows_max ? left : c->rows_max;
        logits = forward(c->prefill, &kv, loaded->canary_ids + at, at, rows);
        at += rows;
    }
    uint64_t half = clock_mono_us();
    for (uint32_t i = 0; i < WK_CANARY_OUTPUT; i++) {
        output[i] = greedy(c, logits, WK_CANARY_PROMPT + i);
        if (i + 1 < WK_CANARY_OUTPUT)
            logits = forward(c->decode, &kv, &output[i], WK_CANARY_PROMPT + i, 1);
    }
    loaded->prefill_us_per_row = (double)(half - begun + 1) / WK_CANARY_PROMPT;
    loaded->decode_us_per_step = (double)(clock_mono_us() - half + 1) / WK_CANARY_OUTPUT;
    mem_give(kv.blocks);
    mem_give(kv.slots);
}

void wk_canary_run(const struct wk_canary *c, struct wk_loaded *ret_loaded)
{
    const struct model_info *info = ret_loaded->info;
    const struct model_config *config = model_config(c->model);
    CHECK(info != NULL && c->rows_max > 0 && c->shards > 0);
    CHECK(ret_loaded->context_max >= CANARY_TOKENS);
    for (uint32_t i = 0; i < WK_CANARY_PROMPT; i++)
        ret_loaded->canary_ids[i] = (i + 1) % info->vocab_size;
    /* Where every position is selected anyway, the index rows have no say. */
    bool all = CANARY_TOKENS <= config->index_topk;
    for (uint32_t kv = KV_ROW_F32; kv < KV_ROW_COUNT; kv++)
        for (uint32_t index = KV_ROW_F32; index < KV_ROW_COUNT; index++)
            if (all && index != KV_ROW_F32)
                memcpy(ret_loaded->canary_output[kv][index],
                       ret_loaded->canary_output[kv][KV_ROW_F32],
                       sizeof(ret_loaded->canary_output[kv][index]));
            else
                run(c, (enum kv_row)kv, (enum kv_row)index, ret_loaded);
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
