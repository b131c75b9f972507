/* SPDX-License-Identifier: Apache-2.0 */
/* tests/model/harness.h - a cache for many sequences, with guards around all of it.
 *
 * For tests only; one thread.  Blocks and slots start as NaN patterns, blocks are handed out in
 * random order, and every block and slot is followed by words that must not change. */
#ifndef TESTS_MODEL_HARNESS_H
#define TESTS_MODEL_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/model/model.h"
#include "lib/model/safetensors.h"

#define GUARD_BYTES 64
#define GUARD_BYTE  0xa5
#define FILL_BYTE   0xff /* as f32: a NaN */

/* How rows are stored in all caches that are made from now on. */
static enum kv_row cache_kv_type, cache_index_type;

struct test_cache {
    struct model_kv kv;
    uint32_t *order; /* block ids in random order */
    uint32_t taken;
};

static inline void test_path(char *path, size_t bytes, const char *below)
{
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    assert_non_null(root);
    int n = snprintf(path, bytes, "%s/%s", root, below);
    assert_true(n > 0 && (size_t)n < bytes);
}

static inline struct model *test_model(const char *below, uint32_t threads)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    test_path(path, sizeof(path), below);
    struct model_options options = {.directory = path, .threads = threads};
    if (model_load(&options, &m, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return m;
}

static inline struct model_cursor *test_cursor(struct model *m, uint32_t rows, uint32_t seqs,
                                               uint32_t context)
{
    struct model_cursor *c = NULL;
    struct err_detail detail = {{0}};
    struct model_cursor_options options = {rows, seqs, rows, context};
    assert_int_equal(model_cursor_create(m, &options, &c, &detail), ERR_OK);
    return c;
}

static inline void cache_init(struct test_cache *t, const struct model *m, uint32_t block_tokens,
                              uint32_t block_count, uint32_t slot_count, struct rng *rng)
{
    const struct model_info *info = model_info(m);
    uint64_t latent = block_tokens * kv_row_bytes(cache_kv_type, info->latent_dim);
    uint64_t pools =
        block_tokens / info->index_kpool * kv_row_bytes(cache_index_type, info->index_dim);
    memset(t, 0, sizeof(*t));
    t->kv.kv_type = cache_kv_type;
    t->kv.index_type = cache_index_type;
    t->kv.block_tokens = block_tokens;
    t->kv.block_count = block_count;
    t->kv.index_offset = latent + GUARD_BYTES;
    t->kv.layer_stride = t->kv.index_offset + pools + GUARD_BYTES;
    t->kv.block_stride = t->kv.layer_stride * info->dsa_layers;
    t->kv.blocks = mem_take_array(block_count, t->kv.block_stride);
    memset(t->kv.blocks, GUARD_BYTE, block_count * t->kv.block_stride);
    for (uint32_t b = 0; b < block_count; b++) {
        for (uint32_t l = 0; l < info->dsa_layers; l++) {
            uint8_t *at = t->kv.blocks + b * t->kv.block_stride + l * t->kv.layer_stride;
            memset(at, FILL_BYTE, latent);
            memset(at + t->kv.index_offset, FILL_BYTE, pools);
        }
    }
    t->kv.slot_count = slot_count;
    t->kv.slot_stride = info->state_bytes + GUARD_BYTES;
    t->kv.slots = mem_take_array(slot_count, t->kv.slot_stride);
    memset(t->kv.slots, GUARD_BYTE, slot_count * t->kv.slot_stride);
    for (uint32_t s = 0; s < slot_count; s++)
        memset(t->kv.slots + s * t->kv.slot_stride, FILL_BYTE, info->state_bytes);
    t->order = mem_take_array(block_count, sizeof(uint32_t));
    for (uint32_t b = 0; b < block_count; b++) {
        uint32_t j = rng_below(rng, b + 1);
        t->order[b] = t->order[j];
        t->order[j] = b;
    }
}

static inline void cache_fini(struct test_cache *t)
{
    mem_give(t->kv.blocks);
    mem_give(t->kv.slots);
    mem_give(t->order);
}

/* Blocks for one sequence: the next `count` of the random order. */
static inline const uint32_t *cache_take(struct test_cache *t, uint32_t count)
{
    assert_true(t->taken + count <= t->kv.block_count);
    t->taken += count;
    return t->order + t->taken - count;
}

static inline bool guard_holds(const uint8_t *at)
{
    for (uint32_t i = 0; i < GUARD_BYTES; i++)
        if (at[i] != GUARD_BYTE)
            return false;
    return true;
}

static inline void cache_check(const struct test_cache *t, const struct model *m)
{
    const struct model_info *info = model_info(m);
    for (uint32_t b = 0; b < t->kv.block_count; b++) {
        for (uint32_t l = 0; l < info->dsa_layers; l++) {
            const uint8_t *at = t->kv.blocks + b * t->kv.block_stride + l * t->kv.layer_stride;
            if (!guard_holds(at + t->kv.index_offset - GUARD_BYTES) ||
                !guard_holds(at + t->kv.layer_stride - GUARD_BYTES))
                fail_msg("block %u, layer %u: written outside its rows", b, l);
        }
    }
    for (uint32_t s = 0; s < t->kv.slot_count; s++)
        if (!guard_holds(t->kv.slots + s * t->kv.slot_stride + info->state_bytes))
            fail_msg("slot %u: written beyond its end", s);
}

/* Ids of a case of the random model's vectors. */
static inline uint32_t test_ids(const char *below, const char *name, uint32_t *ids, uint32_t max)
{
    char path[1024];
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    test_path(path, sizeof(path), below);
    assert_int_equal(safetensors_open_file(path, &set, &detail), ERR_OK);
    const struct safetensors_tensor *t = safetensors_find(set, name);
    assert_non_null(t);
    uint32_t count = t->elements < max ? (uint32_t)t->elements : max;
    memcpy(ids, t->data, count * sizeof(uint32_t));
    safetensors_close(&set);
    return count;
}

#endif
