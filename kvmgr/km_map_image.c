/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_map_image.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

STATIC_CHECK(KM_MAP_BLOCKS_MAX % KM_MAP_CHUNK_BLOCKS == 0);
STATIC_CHECK(sizeof(struct hash128) + 4 + 1 + 1 == KM_MAP_ENTRY_BYTES);
STATIC_CHECK(8 + 8 + 4 == KM_MAP_HEADER_BYTES);

static void put_u32(uint8_t *to, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(value >> (8 * i));
}

static void put_u64(uint8_t *to, uint64_t value)
{
    put_u32(to, (uint32_t)value);
    put_u32(to + 4, (uint32_t)(value >> 32));
}

void km_map_args_reset(struct km_map_args *args)
{
    args->count = 0;
    args->texts = 0;
}

void km_map_args_fini(struct km_map_args *args)
{
    free(args->chunks);
    args->chunks = NULL;
    args->chunk_bytes = 0;
}

static void args_bytes(struct km_map_args *args, const void *bytes, size_t count)
{
    CHECK(args->count < (int)KM_MAP_ARGS_MAX);
    args->argv[args->count] = bytes;
    args->bytes[args->count++] = count;
}

void km_map_args_text(struct km_map_args *args, const char *text)
{
    args_bytes(args, text, strlen(text));
}

static char *args_room(struct km_map_args *args)
{
    CHECK(args->texts < ARRAY_COUNT(args->text));
    return args->text[args->texts++];
}

void km_map_args_u64(struct km_map_args *args, uint64_t value)
{
    char *text = args_room(args);
    snprintf(text, sizeof(args->text[0]), "%" PRIu64, value);
    km_map_args_text(args, text);
}

static void add_u64(struct km_map_args *args, const char *name, uint64_t value)
{
    km_map_args_text(args, name);
    km_map_args_u64(args, value);
}

static void add_hex(struct km_map_args *args, const char *name, const uint8_t bytes[16])
{
    char *text = args_room(args);
    hex_encode(bytes, 16, text);
    km_map_args_text(args, name);
    km_map_args_text(args, text);
}

void km_map_image_fields(struct km_map_args *args, const struct km_map_image *image)
{
    CHECK(image->entry_count > 0 && image->entry_count <= KM_MAP_BLOCKS_MAX);
    int before = args->count;
    add_u64(args, "epoch", image->epoch);
    char *incarnation = args_room(args);
    snprintf(incarnation, sizeof(args->text[0]), "%016" PRIx64, image->incarnation);
    km_map_args_text(args, "incarnation");
    km_map_args_text(args, incarnation);
    add_hex(args, "layout_fp", image->layout_fp.bytes);
    add_hex(args, "model_fp", image->model_fp.bytes);
    add_hex(args, "salt", image->salt.bytes);
    add_u64(args, "n_tokens", image->token_count);
    add_u64(args, "n_blocks", image->entry_count);
    add_hex(args, "tail_hash",
            image->entries + (size_t)(image->entry_count - 1) * KM_MAP_ENTRY_BYTES);
    add_u64(args, "kda_snap_pos", image->snapshot_tokens);
    add_u64(args, "drafter_pos", 0); /* nothing of the drafter's is kept */
    add_u64(args, "tier", image->on_tier);
    add_u64(args, "pin_until", image->pin_until_ms);
    add_u64(args, "gen", image->gen);
    add_hex(args, "last_request", image->request.bytes);
    add_u64(args, "updated_ms", image->updated_ms);
    CHECK(args->count - before == 2 * (int)KM_MAP_FIELDS);
}

void km_map_entry_put(uint8_t *entry, const struct hash128 *hash, uint32_t block, uint8_t tier,
                      uint8_t flags)
{
    memcpy(entry, hash, sizeof(*hash));
    put_u32(entry + 16, block);
    entry[20] = tier;
    entry[21] = flags;
}

enum err km_map_image_chunks(struct km_map_args *args, const struct km_map_image *image)
{
    CHECK(image->entry_count > 0 && image->entry_count <= KM_MAP_BLOCKS_MAX);
    uint32_t chunks = (image->entry_count + KM_MAP_CHUNK_BLOCKS - 1) / KM_MAP_CHUNK_BLOCKS;
    size_t need =
        (size_t)chunks * KM_MAP_HEADER_BYTES + (size_t)image->entry_count * KM_MAP_ENTRY_BYTES;
    if (need > args->chunk_bytes) {
        uint8_t *bigger = realloc(args->chunks, need);
        if (!bigger)
            return ERR_NOMEM;
        args->chunks = bigger;
        args->chunk_bytes = need;
    }
    uint8_t *at = args->chunks;
    for (uint32_t first = 0; first < image->entry_count; first += KM_MAP_CHUNK_BLOCKS) {
        uint32_t left = image->entry_count - first;
        uint32_t count = left < KM_MAP_CHUNK_BLOCKS ? left : KM_MAP_CHUNK_BLOCKS;
        size_t bytes = (size_t)count * KM_MAP_ENTRY_BYTES;
        put_u64(at, image->epoch);
        put_u64(at + 8, image->gen);
        memcpy(at + KM_MAP_HEADER_BYTES, image->entries + (size_t)first * KM_MAP_ENTRY_BYTES,
               bytes);
        uint32_t crc = hash_crc32c(0, at, 16);
        put_u32(at + 16, hash_crc32c(crc, at + KM_MAP_HEADER_BYTES, bytes));
        args_bytes(args, at, KM_MAP_HEADER_BYTES + bytes);
        at += KM_MAP_HEADER_BYTES + bytes;
    }
    CHECK(at == args->chunks + need);
    return ERR_OK;
}
