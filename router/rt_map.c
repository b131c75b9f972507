/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_map.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

#define HEADER_BYTES 20u
#define ENTRY_BYTES  22u

STATIC_CHECK(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
STATIC_CHECK(RT_MAP_CHUNK_BYTES == HEADER_BYTES + ENTRY_BYTES * RT_MAP_CHUNK_BLOCKS);

static bool number(const struct rt_map_bytes *f, uint64_t most, uint64_t *ret_value)
{
    return f->bytes != NULL && text_to_u64(f->bytes, f->count, ret_value) && *ret_value <= most;
}

static bool hex(const struct rt_map_bytes *f, size_t bytes, void *ret_bytes)
{
    return f->bytes != NULL && f->count == 2 * bytes && hex_decode(f->bytes, f->count, ret_bytes);
}

static enum err head_read(const struct rt_map_bytes *f, struct rt_map *m, uint64_t *ret_blocks,
                          struct err_detail *detail)
{
    uint64_t tokens = 0;
    uint8_t incarnation[8];
    const char *bad = !number(&f[RT_MAP_EPOCH], UINT32_MAX, &m->epoch)     ? "epoch"
                      : !hex(&f[RT_MAP_INCARNATION], 8, incarnation)       ? "incarnation"
                      : !hex(&f[RT_MAP_LAYOUT_FP], 16, m->layout_fp.bytes) ? "layout_fp"
                      : !hex(&f[RT_MAP_MODEL_FP], 16, m->model_fp.bytes)   ? "model_fp"
                      : !hex(&f[RT_MAP_SALT], 16, m->salt.bytes)           ? "salt"
                      : !number(&f[RT_MAP_TOKENS], UINT32_MAX, &tokens)    ? "n_tokens"
                      : !number(&f[RT_MAP_BLOCKS], UINT32_MAX, ret_blocks) ? "n_blocks"
                      : !number(&f[RT_MAP_GEN], UINT64_MAX, &m->gen)       ? "gen"
                      : *ret_blocks == 0 || tokens < *ret_blocks           ? "n_blocks"
                                                                           : NULL;
    if (bad != NULL)
        return err_set(detail, ERR_CORRUPT, "session map: %s", bad);
    m->token_count = (uint32_t)tokens;
    m->incarnation = 0; /* written as a number in hex, the highest digit first */
    for (uint32_t i = 0; i < sizeof(incarnation); i++)
        m->incarnation = m->incarnation << 8 | incarnation[i];
    return ERR_OK;
}

static enum err chunk_read(const struct rt_map_bytes *chunk, const struct rt_map *m, uint32_t count,
                           uint8_t *items, struct err_detail *detail)
{
    uint64_t epoch, gen;
    uint32_t crc;
    CHECK(count > 0 && count <= RT_MAP_CHUNK_BLOCKS);
    if (chunk->bytes == NULL || chunk->count != HEADER_BYTES + (size_t)count * ENTRY_BYTES)
        return err_set(detail, ERR_CORRUPT, "session map: a chunk of %zu bytes for %u blocks",
                       chunk->bytes != NULL ? chunk->count : 0, count);
    memcpy(&epoch, chunk->bytes, 8);
    memcpy(&gen, chunk->bytes + 8, 8);
    memcpy(&crc, chunk->bytes + 16, 4);
    if (epoch != m->epoch || gen != m->gen)
        return err_set(detail, ERR_CORRUPT, "session map: a chunk of another generation");
    const char *entries = chunk->bytes + HEADER_BYTES;
    if (crc != hash_crc32c(hash_crc32c(0, chunk->bytes, 16), entries, (size_t)count * ENTRY_BYTES))
        return err_set(detail, ERR_CORRUPT, "session map: a chunk's crc32c");
    for (uint32_t i = 0; i < count; i++)
        memcpy(items + (size_t)i * RT_MAP_ITEM_BYTES, entries + (size_t)i * ENTRY_BYTES,
               RT_MAP_ITEM_BYTES);
    return ERR_OK;
}

enum err rt_map_read(const struct rt_map_bytes fields[RT_MAP_FIELDS],
                     const struct rt_map_bytes *chunks, uint32_t chunk_count, uint8_t *items,
                     struct rt_map *ret_map, struct err_detail *detail)
{
    struct rt_map m = {0};
    uint64_t blocks = 0;
    if (fields[RT_MAP_EPOCH].bytes == NULL)
        return err_set(detail, ERR_NOT_FOUND, "no session map");
    TRY(head_read(fields, &m, &blocks, detail));
    uint32_t left = blocks < RT_MAP_BLOCKS_MAX ? (uint32_t)blocks : RT_MAP_BLOCKS_MAX;
    if (chunk_count != (left + RT_MAP_CHUNK_BLOCKS - 1) / RT_MAP_CHUNK_BLOCKS)
        return err_set(detail, ERR_CORRUPT, "session map: %u chunks for %u blocks", chunk_count,
                       left);
    for (uint32_t i = 0; i < chunk_count; i++) {
        uint32_t count = left < RT_MAP_CHUNK_BLOCKS ? left : RT_MAP_CHUNK_BLOCKS;
        TRY(chunk_read(&chunks[i], &m, count, items + (size_t)m.item_count * RT_MAP_ITEM_BYTES,
                       detail));
        m.item_count += count;
        left -= count;
    }
    CHECK(left == 0 && m.item_count > 0);
    m.items = items;
    *ret_map = m;
    return ERR_OK;
}
