/* SPDX-License-Identifier: Apache-2.0 */
#include "drafter/df_ngram.h"

#include <string.h>

#include "lib/base/check.h"

#define DF_NGRAM_MAGIC 0x44464e47u
#define BITS_MIN       8u
#define ALIGN_BYTES    64u

static uint32_t bits_for(uint32_t token_count)
{
    uint32_t bits = BITS_MIN;
    while (((uint64_t)1 << bits) < 2 * (uint64_t)token_count)
        bits++;
    return bits;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

size_t df_ngram_bytes(uint32_t context_max)
{
    CHECK(context_max > 0 && context_max <= 1u << 30);
    size_t row_bytes = aligned((size_t)context_max * sizeof(uint32_t));
    size_t table_bytes = aligned(((size_t)1 << bits_for(context_max)) * sizeof(uint32_t));
    return row_bytes + DF_NGRAM_MAX * (row_bytes + table_bytes);
}

void df_ngram_init(struct df_ngram *g, void *memory, size_t bytes, uint32_t context_max,
                   uint64_t seed)
{
    CHECK(bytes >= df_ngram_bytes(context_max));
    CHECK((uintptr_t)memory % ALIGN_BYTES == 0);
    size_t row_bytes = aligned((size_t)context_max * sizeof(uint32_t));
    size_t table_bytes = aligned(((size_t)1 << bits_for(context_max)) * sizeof(uint32_t));
    *g = (struct df_ngram){.magic = DF_NGRAM_MAGIC, .context_max = context_max, .seed = seed};
    char *at = memory;
    g->ids = (uint32_t *)(void *)at;
    at += row_bytes;
    for (uint32_t n = 0; n < DF_NGRAM_MAX; n++) {
        g->previous[n] = (uint32_t *)(void *)at;
        at += row_bytes;
        g->table[n] = (uint32_t *)(void *)at;
        at += table_bytes;
    }
    CHECK((size_t)(at - (char *)memory) == df_ngram_bytes(context_max));
    df_ngram_clear(g);
}

static void tables_clear(struct df_ngram *g, uint32_t bits)
{
    CHECK(bits >= BITS_MIN && bits <= bits_for(g->context_max));
    g->table_bits = bits;
    for (uint32_t n = 0; n < DF_NGRAM_MAX; n++)
        memset(g->table[n], 0, ((size_t)1 << bits) * sizeof(uint32_t));
}

void df_ngram_clear(struct df_ngram *g)
{
    CHECK_OBJ(g, DF_NGRAM_MAGIC);
    g->length = 0;
    tables_clear(g, BITS_MIN);
}

/* Slot where the n tokens before position belong by their hash. */
static uint32_t home_slot(const struct df_ngram *g, uint32_t n, uint32_t position)
{
    DCHECK(position >= n);
    uint64_t h = g->seed + n;
    for (uint32_t i = 1; i <= n; i++) {
        h = (h ^ g->ids[position - i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return (uint32_t)((h * 0xd6e8feb86659fd93u) >> (64 - g->table_bits));
}

/* Slot that holds the n tokens before position, or the empty slot that would.  Ends because a table
 * is at most half full. */
static uint32_t *slot_find(const struct df_ngram *g, uint32_t n, uint32_t position)
{
    uint32_t mask = (1u << g->table_bits) - 1;
    uint32_t at = home_slot(g, n, position);
    const uint32_t *key = g->ids + position - n;
    uint32_t *table = g->table[n - 1];
    while (table[at] != 0 && memcmp(g->ids + table[at] - n, key, n * sizeof(*key)) != 0)
        at = (at + 1) & mask;
    return &table[at];
}

/* Closes the gap: later entries of the run move up unless their home lies behind it. */
static void slot_remove(struct df_ngram *g, uint32_t n, uint32_t *slot)
{
    uint32_t mask = (1u << g->table_bits) - 1;
    uint32_t *table = g->table[n - 1];
    uint32_t gap = (uint32_t)(slot - table);
    for (uint32_t at = (gap + 1) & mask; table[at] != 0; at = (at + 1) & mask) {
        uint32_t from_home = (at - home_slot(g, n, table[at])) & mask;
        uint32_t from_gap = (at - gap) & mask;
        if (from_home < from_gap)
            continue;
        table[gap] = table[at];
        gap = at;
    }
    table[gap] = 0;
}

/* Tells the index that the tokens before position are continued at position. */
static void position_add(struct df_ngram *g, uint32_t position)
{
    for (uint32_t n = 1; n <= DF_NGRAM_MAX && n <= position; n++) {
        uint32_t *slot = slot_find(g, n, position);
        g->previous[n - 1][position] = *slot;
        *slot = position;
    }
}

static void position_remove(struct df_ngram *g, uint32_t position)
{
    for (uint32_t n = 1; n <= DF_NGRAM_MAX && n <= position; n++) {
        uint32_t *slot = slot_find(g, n, position);
        CHECK(*slot == position);
        if (g->previous[n - 1][position] != 0)
            *slot = g->previous[n - 1][position];
        else
            slot_remove(g, n, slot);
    }
}

static void tables_grow(struct df_ngram *g, uint32_t token_count)
{
    tables_clear(g, bits_for(token_count));
    for (uint32_t position = 1; position < g->length; position++) {
        for (uint32_t n = 1; n <= DF_NGRAM_MAX && n <= position; n++)
            *slot_find(g, n, position) = position;
    }
}

enum err df_ngram_append(struct df_ngram *g, const uint32_t *ids, uint32_t count)
{
    CHECK_OBJ(g, DF_NGRAM_MAGIC);
    if (count > g->context_max - g->length)
        return ERR_CONTEXT;
    if (bits_for(g->length + count) > g->table_bits)
        tables_grow(g, g->length + count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t position = g->length;
        g->ids[position] = ids[i];
        position_add(g, position);
        g->length++;
    }
    CHECK(g->length <= g->context_max);
    return ERR_OK;
}

void df_ngram_truncate(struct df_ngram *g, uint32_t length)
{
    CHECK_OBJ(g, DF_NGRAM_MAGIC);
    CHECK(length <= g->length);
    if (length == 0) {
        df_ngram_clear(g);
        return;
    }
    while (g->length > length) {
        position_remove(g, g->length - 1);
        g->length--;
    }
}

uint32_t df_ngram_propose(const struct df_ngram *g, uint32_t match_min, uint32_t match_max,
                          uint32_t draft_count, uint32_t *ret_ids)
{
    CHECK_OBJ(g, DF_NGRAM_MAGIC);
    CHECK(match_min >= 1 && match_min <= match_max && match_max <= DF_NGRAM_MAX);
    for (uint32_t n = match_max; n >= match_min; n--) {
        if (n > g->length)
            continue;
        uint32_t from = *slot_find(g, n, g->length);
        if (from == 0)
            continue;
        CHECK(from >= n && from < g->length);
        for (uint32_t i = 0; i < draft_count; i++)
            ret_ids[i] = from + i < g->length ? g->ids[from + i] : ret_ids[from + i - g->length];
        return draft_count;
    }
    return 0;
}
