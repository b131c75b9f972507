/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/kv_layout.h"

#include <stddef.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/kv_row.h"

#define ROW_ALIGN        64u /* a layer's rows and the index rows start on a cache line */
#define DIM_MAX          65536u
#define LAYERS_MAX       1024u
#define BLOCK_TOKENS_MAX 65536u
#define RANKS_MAX        8u
#define ARENA_BYTES_MAX  (1ull << 46)
#define BLOCK_BYTES_MAX  (1ull << 34)
#define SLOTS_MAX        (1u << 24)

STATIC_CHECK(sizeof(struct kv_superblock) == 136);
STATIC_CHECK(sizeof(struct kv_superblock) <= KV_SUPERBLOCK_BYTES);
STATIC_CHECK(offsetof(struct kv_superblock, version) == 4);
STATIC_CHECK(offsetof(struct kv_superblock, layout_fp) == 8);
STATIC_CHECK(offsetof(struct kv_superblock, model_fp) == 24);
STATIC_CHECK(offsetof(struct kv_superblock, epoch) == 40);
STATIC_CHECK(offsetof(struct kv_superblock, flags) == 44);
STATIC_CHECK(offsetof(struct kv_superblock, incarnation) == 48);
STATIC_CHECK(offsetof(struct kv_superblock, arena_bytes) == 56);
STATIC_CHECK(offsetof(struct kv_superblock, block_count) == 64);
STATIC_CHECK(offsetof(struct kv_superblock, slot_count) == 68);
STATIC_CHECK(offsetof(struct kv_superblock, dsa_layers) == 72);
STATIC_CHECK(offsetof(struct kv_superblock, latent_dim) == 76);
STATIC_CHECK(offsetof(struct kv_superblock, index_dim) == 80);
STATIC_CHECK(offsetof(struct kv_superblock, index_kpool) == 84);
STATIC_CHECK(offsetof(struct kv_superblock, block_tokens) == 88);
STATIC_CHECK(offsetof(struct kv_superblock, kv_dtype) == 92);
STATIC_CHECK(offsetof(struct kv_superblock, index_dtype) == 96);
STATIC_CHECK(offsetof(struct kv_superblock, rank) == 100);
STATIC_CHECK(offsetof(struct kv_superblock, ranks) == 104);
STATIC_CHECK(offsetof(struct kv_superblock, interleave) == 108);
STATIC_CHECK(offsetof(struct kv_superblock, state_bytes) == 112);
STATIC_CHECK(offsetof(struct kv_superblock, snapshot_dtype) == 120);
STATIC_CHECK(offsetof(struct kv_superblock, live_count) == 124);
STATIC_CHECK(offsetof(struct kv_superblock, boot) == 128);
STATIC_CHECK(offsetof(struct kv_superblock, crc) == 132);

STATIC_CHECK(sizeof(struct kv_block_header) == KV_HEADER_BYTES);
STATIC_CHECK(offsetof(struct kv_block_header, parent) == 16);
STATIC_CHECK(offsetof(struct kv_block_header, state) == 32);
STATIC_CHECK(offsetof(struct kv_block_header, epoch) == 36);
STATIC_CHECK(offsetof(struct kv_block_header, generation) == 40);
STATIC_CHECK(offsetof(struct kv_block_header, position) == 48);
STATIC_CHECK(offsetof(struct kv_block_header, data_crc) == 52);
STATIC_CHECK(offsetof(struct kv_block_header, reserved) == 56);
STATIC_CHECK(offsetof(struct kv_block_header, crc) == 60);

STATIC_CHECK(sizeof(struct kv_slot_header) == KV_HEADER_BYTES);
STATIC_CHECK(offsetof(struct kv_slot_header, kind) == 16);
STATIC_CHECK(offsetof(struct kv_slot_header, state) == 20);
STATIC_CHECK(offsetof(struct kv_slot_header, epoch) == 24);
STATIC_CHECK(offsetof(struct kv_slot_header, token_count) == 28);
STATIC_CHECK(offsetof(struct kv_slot_header, generation) == 32);
STATIC_CHECK(offsetof(struct kv_slot_header, reserved0) == 40);
STATIC_CHECK(offsetof(struct kv_slot_header, data_crc) == 48);
STATIC_CHECK(offsetof(struct kv_slot_header, crc) == 60);

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    CHECK(unit != 0 && value <= UINT64_MAX - unit);
    return (value + unit - 1) / unit * unit;
}

STATIC_CHECK(KV_BF16 - KV_F32 == KV_ROW_BF16 && KV_FP8 - KV_F32 == KV_ROW_FP8);

static uint64_t row_bytes(uint32_t dtype, uint32_t dim)
{
    CHECK(dtype >= KV_F32 && dtype <= KV_FP8);
    return kv_row_bytes((enum kv_row)(dtype - KV_F32), dim);
}

uint64_t kv_latent_row_bytes(uint32_t dtype, uint32_t dim)
{
    return row_bytes(dtype, dim);
}

uint64_t kv_index_row_bytes(uint32_t dtype, uint32_t dim)
{
    return row_bytes(dtype, dim);
}

uint64_t kv_snapshot_body_bytes(uint32_t snapshot_dtype, uint64_t state_bytes)
{
    CHECK(snapshot_dtype == KV_F32 || snapshot_dtype == KV_BF16);
    return snapshot_dtype == KV_BF16 ? state_bytes / 2 : state_bytes;
}

static uint64_t slot_bytes_of(uint64_t body_bytes)
{
    return round_up(body_bytes + KV_GUARD_BYTES_MIN, KV_PAGE_BYTES);
}

uint64_t kv_snapshot_slot_bytes(uint32_t snapshot_dtype, uint64_t state_bytes)
{
    return slot_bytes_of(kv_snapshot_body_bytes(snapshot_dtype, state_bytes));
}

#define IN_RANGE(field, min, max)                                                                  \
    do {                                                                                           \
        if (g->field < (min) || g->field > (max))                                                  \
            return err_set(detail, ERR_INVALID, "%s: %llu is outside %llu..%llu", #field,          \
                           (unsigned long long)g->field, (unsigned long long)(min),                \
                           (unsigned long long)(max));                                             \
    } while (0)

static enum err geometry_check(const struct kv_geometry *g, struct err_detail *detail)
{
    IN_RANGE(dsa_layers, 1, LAYERS_MAX);
    IN_RANGE(latent_dim, 1, DIM_MAX);
    IN_RANGE(index_dim, 1, DIM_MAX);
    IN_RANGE(index_kpool, 1, BLOCK_TOKENS_MAX);
    IN_RANGE(block_tokens, 1, BLOCK_TOKENS_MAX);
    IN_RANGE(kv_dtype, KV_F32, KV_FP8);
    IN_RANGE(index_dtype, KV_F32, KV_FP8);
    IN_RANGE(snapshot_dtype, KV_F32, KV_BF16);
    IN_RANGE(ranks, 1, RANKS_MAX);
    if (g->rank >= g->ranks)
        return err_set(detail, ERR_INVALID, "rank: %u of %u", g->rank, g->ranks);
    IN_RANGE(interleave, 1, g->block_tokens);
    IN_RANGE(state_bytes, 1, KV_STATE_BYTES_MAX);
    if (g->snapshot_dtype == KV_BF16 && g->state_bytes % sizeof(float) != 0)
        return err_set(detail, ERR_INVALID, "state_bytes: %llu, no whole floats for bf16",
                       (unsigned long long)g->state_bytes);
    if (g->interleave % g->index_kpool != 0)
        return err_set(detail, ERR_INVALID, "interleave: %u, not a multiple of index_kpool %u",
                       g->interleave, g->index_kpool);
    if (g->block_tokens % ((uint64_t)g->ranks * g->interleave) != 0)
        return err_set(detail, ERR_INVALID,
                       "block_tokens: %u, not a multiple of ranks %u times interleave %u",
                       g->block_tokens, g->ranks, g->interleave);
    return ERR_OK;
}

static enum err slots_check(struct kv_slots slots, struct err_detail *detail)
{
    if (slots.count < 1 || slots.count > SLOTS_MAX)
        return err_set(detail, ERR_INVALID, "slot_count: %u is outside 1..%u", slots.count,
                       SLOTS_MAX);
    if (slots.live < 1 || slots.live > slots.count)
        return err_set(detail, ERR_INVALID, "live_count: %u of %u slots", slots.live, slots.count);
    return ERR_OK;
}

/* Everything that changes bytes inside the arena; counts are no part of it. */
static struct hash128 fingerprint(const struct kv_geometry *g)
{
    uint32_t words[] = {KV_MAGIC,
                        KV_LAYOUT_VERSION,
                        KV_SUPERBLOCK_BYTES,
                        KV_HEADER_BYTES,
                        KV_PAGE_BYTES,
                        KV_GUARD_BYTES_MIN,
                        ROW_ALIGN,
                        g->dsa_layers,
                        g->latent_dim,
                        g->index_dim,
                        g->index_kpool,
                        g->block_tokens,
                        g->kv_dtype,
                        g->index_dtype,
                        g->snapshot_dtype,
                        g->rank,
                        g->ranks,
                        g->interleave,
                        (uint32_t)g->state_bytes,
                        (uint32_t)(g->state_bytes >> 32)};
    return hash_blake2b(NULL, 0, words, sizeof(words), NULL, 0, NULL, 0);
}

static enum err sizes_fill(const struct kv_geometry *g, struct kv_layout *l,
                           struct err_detail *detail)
{
    uint64_t tokens = g->block_tokens / g->ranks; /* this rank's share of a block */
    uint64_t latent = tokens * kv_latent_row_bytes(g->kv_dtype, g->latent_dim);
    uint64_t index = tokens / g->index_kpool * kv_index_row_bytes(g->index_dtype, g->index_dim);
    l->geometry = *g;
    l->index_offset = round_up(latent, ROW_ALIGN);
    l->layer_stride = round_up(l->index_offset + index, ROW_ALIGN);
    l->block_guard_at = l->layer_stride * g->dsa_layers;
    l->block_bytes = round_up(l->block_guard_at + KV_GUARD_BYTES_MIN, KV_PAGE_BYTES);
    l->live_bytes = slot_bytes_of(g->state_bytes);
    l->snapshot_bytes = kv_snapshot_slot_bytes(g->snapshot_dtype, g->state_bytes);
    l->layout_fp = fingerprint(g);
    CHECK(l->block_bytes != 0 && l->live_bytes != 0 && l->snapshot_bytes != 0);
    /* Keeps every product of a size and a count inside 64 bits. */
    if (l->block_bytes > BLOCK_BYTES_MAX)
        return err_set(detail, ERR_INVALID, "block: %llu bytes, at most %llu",
                       (unsigned long long)l->block_bytes, BLOCK_BYTES_MAX);
    return ERR_OK;
}

static void offsets_fill(struct kv_layout *l, uint32_t block_count, struct kv_slots slots)
{
    l->block_count = block_count;
    l->live_count = slots.live;
    l->slot_count = slots.count;
    l->block_headers_at = KV_SUPERBLOCK_BYTES;
    l->slot_headers_at =
        l->block_headers_at + round_up((uint64_t)block_count * KV_HEADER_BYTES, KV_PAGE_BYTES);
    l->blocks_at =
        l->slot_headers_at + round_up((uint64_t)slots.count * KV_HEADER_BYTES, KV_PAGE_BYTES);
    l->slots_at = l->blocks_at + block_count * l->block_bytes;
    l->arena_bytes =
        l->slots_at + slots.live * l->live_bytes + (slots.count - slots.live) * l->snapshot_bytes;
    CHECK(l->arena_bytes >= l->slots_at && l->slots_at >= l->blocks_at);
}

enum err kv_layout_plan(const struct kv_geometry *g, uint64_t arena_bytes, struct kv_slots slots,
                        struct kv_layout *ret_layout, struct err_detail *detail)
{
    struct kv_layout l;
    memset(&l, 0, sizeof(l));
    CHECK(g != NULL && ret_layout != NULL);
    TRY(geometry_check(g, detail));
    if (arena_bytes > ARENA_BYTES_MAX)
        return err_set(detail, ERR_INVALID, "arena_bytes: %llu is above %llu",
                       (unsigned long long)arena_bytes, ARENA_BYTES_MAX);
    TRY(slots_check(slots, detail));
    TRY(sizes_fill(g, &l, detail));
    /* Size grows with the count: the largest that fits is found by halving. */
    uint32_t fits = 0, above = KV_BLOCKS_MAX + 2;
    while (above - fits > 1) {
        uint32_t middle = fits + (above - fits) / 2;
        offsets_fill(&l, middle, slots);
        if (l.arena_bytes <= arena_bytes)
            fits = middle;
        else
            above = middle;
    }
    if (fits == 0) {
        offsets_fill(&l, 1, slots);
        return err_set(detail, ERR_NOMEM, "arena_bytes: %llu, one block and %u slots need %llu",
                       (unsigned long long)arena_bytes, slots.count,
                       (unsigned long long)l.arena_bytes);
    }
    if (fits > KV_BLOCKS_MAX)
        return err_set(
            detail, ERR_INVALID,
            "arena_bytes: %llu hold more than %u blocks of %u tokens: lower it, or raise "
            "block_tokens",
            (unsigned long long)arena_bytes, KV_BLOCKS_MAX, g->block_tokens);
    offsets_fill(&l, fits, slots);
    CHECK(l.arena_bytes <= arena_bytes);
    *ret_layout = l;
    return ERR_OK;
}

enum err kv_layout_of(const struct kv_geometry *g, uint32_t block_count, struct kv_slots slots,
                      struct kv_layout *ret_layout, struct err_detail *detail)
{
    struct kv_layout l;
    memset(&l, 0, sizeof(l));
    CHECK(g != NULL && ret_layout != NULL);
    TRY(geometry_check(g, detail));
    TRY(sizes_fill(g, &l, detail));
    TRY(slots_check(slots, detail));
    if (block_count < 1 || block_count > KV_BLOCKS_MAX)
        return err_set(detail, ERR_INVALID, "block_count: %u is outside 1..%u", block_count,
                       KV_BLOCKS_MAX);
    offsets_fill(&l, block_count, slots);
    if (l.arena_bytes > ARENA_BYTES_MAX)
        return err_set(detail, ERR_INVALID, "%u blocks and %u slots need %llu bytes, above %llu",
                       block_count, slots.count, (unsigned long long)l.arena_bytes,
                       ARENA_BYTES_MAX);
    *ret_layout = l;
    return ERR_OK;
}

struct kv_place kv_block_place(const struct kv_layout *l, uint32_t block)
{
    CHECK(block < l->block_count);
    uint64_t at = l->blocks_at + block * l->block_bytes;
    return (struct kv_place){.at = at,
                             .bytes = l->block_bytes,
                             .guard_at = at + l->block_guard_at,
                             .guard_bytes = l->block_bytes - l->block_guard_at};
}

struct kv_place kv_slot_place(const struct kv_layout *l, uint32_t slot)
{
    CHECK(slot < l->slot_count && l->live_count <= l->slot_count);
    bool live = slot < l->live_count;
    uint64_t bytes = live ? l->live_bytes : l->snapshot_bytes;
    uint64_t body = l->geometry.state_bytes;
    uint64_t at = l->slots_at + slot * l->live_bytes;
    if (!live) {
        body = kv_snapshot_body_bytes(l->geometry.snapshot_dtype, body);
        at = l->slots_at + l->live_count * l->live_bytes + (slot - l->live_count) * bytes;
    }
    return (struct kv_place){
        .at = at, .bytes = bytes, .guard_at = at + body, .guard_bytes = bytes - body};
}

void kv_guard_fill(uint8_t *ret_guard, uint64_t count)
{
    static const uint8_t word[8] = {0xca, 0x9a, 0x47, 0xe5, 0x5e, 0x74, 0xa9, 0xac};
    for (uint64_t i = 0; i < count; i++)
        ret_guard[i] = word[i % sizeof(word)];
}

uint32_t kv_data_sum_add(uint32_t sum, const uint8_t *piece, size_t count)
{
    CHECK(count > 0 && count <= KV_SUM_PIECE_BYTES);
    struct hash128 h = hash_xxh3_once(piece, count);
    return hash_crc32c(sum, &h, sizeof(h));
}

uint32_t kv_data_sum_end(uint32_t sum)
{
    return sum != 0 ? sum : 1;
}

uint32_t kv_data_sum(const uint8_t *bytes, uint64_t count)
{
    uint32_t sum = 0;
    for (uint64_t at = 0; at < count; at += KV_SUM_PIECE_BYTES) {
        uint64_t left = count - at;
        sum = kv_data_sum_add(sum, bytes + at,
                              left < KV_SUM_PIECE_BYTES ? (size_t)left : KV_SUM_PIECE_BYTES);
    }
    return kv_data_sum_end(sum);
}

void kv_superblock_seal(struct kv_superblock *s)
{
    CHECK(s != NULL);
    s->crc = hash_crc32c(0, s, offsetof(struct kv_superblock, crc));
}

void kv_block_header_seal(struct kv_block_header *h)
{
    CHECK(h != NULL);
    h->crc = hash_crc32c(0, h, offsetof(struct kv_block_header, crc));
}

void kv_slot_header_seal(struct kv_slot_header *h)
{
    CHECK(h != NULL);
    h->crc = hash_crc32c(0, h, offsetof(struct kv_slot_header, crc));
}

enum err kv_superblock_check(const struct kv_superblock *s, uint64_t file_bytes,
                             struct kv_layout *ret_layout, struct err_detail *detail)
{
    struct kv_layout l;
    CHECK(s != NULL && ret_layout != NULL);
    if (s->magic != KV_MAGIC)
        return err_set(detail, ERR_CORRUPT, "superblock magic: 0x%08x is not ours", s->magic);
    if (s->version != KV_LAYOUT_VERSION)
        return err_set(detail, ERR_CORRUPT, "superblock version: %u, only %u is known", s->version,
                       KV_LAYOUT_VERSION);
    if (s->crc != hash_crc32c(0, s, offsetof(struct kv_superblock, crc)))
        return err_set(detail, ERR_CORRUPT, "superblock crc does not match");
    struct kv_geometry g = {
        .dsa_layers = s->dsa_layers,
        .latent_dim = s->latent_dim,
        .index_dim = s->index_dim,
        .index_kpool = s->index_kpool,
        .block_tokens = s->block_tokens,
        .kv_dtype = s->kv_dtype,
        .index_dtype = s->index_dtype,
        .snapshot_dtype = s->snapshot_dtype,
        .rank = s->rank,
        .ranks = s->ranks,
        .interleave = s->interleave,
        .state_bytes = s->state_bytes,
    };
    struct kv_slots slots = {s->live_count, s->slot_count};
    if (kv_layout_of(&g, s->block_count, slots, &l, detail) != ERR_OK)
        return ERR_CORRUPT;
    if (l.arena_bytes > s->arena_bytes || s->arena_bytes > file_bytes)
        return err_set(detail, ERR_CORRUPT,
                       "superblock arena_bytes: %llu, layout needs %llu, the file has %llu",
                       (unsigned long long)s->arena_bytes, (unsigned long long)l.arena_bytes,
                       (unsigned long long)file_bytes);
    if (memcmp(&l.layout_fp, &s->layout_fp, sizeof(l.layout_fp)) != 0)
        return err_set(detail, ERR_CORRUPT, "superblock layout_fp does not match its geometry");
    *ret_layout = l;
    return ERR_OK;
}

enum err kv_block_header_check(const struct kv_block_header *h)
{
    CHECK(h != NULL);
    if (h->crc != hash_crc32c(0, h, offsetof(struct kv_block_header, crc)))
        return ERR_CORRUPT;
    return h->state <= KV_COMMITTED ? ERR_OK : ERR_CORRUPT;
}

enum err kv_slot_header_check(const struct kv_slot_header *h)
{
    CHECK(h != NULL);
    if (h->crc != hash_crc32c(0, h, offsetof(struct kv_slot_header, crc)))
        return ERR_CORRUPT;
    if (h->kind > KV_SLOT_SNAPSHOT || h->state > KV_COMMITTED)
        return ERR_CORRUPT;
    return ERR_OK;
}
