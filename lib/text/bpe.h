/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/bpe.h - byte-pair merges over one piece of text.
 *
 * The merge table is filled at load by one thread, immutable and shared after.  The scratch
 * belongs to one call.  Lowest rank first, leftmost among equals; O(n log n) in the piece.
 *
 * Bound: a piece longer than BPE_PIECE_BYTES_MAX is merged in parts of that size, so that one
 * endless word of a request cannot claim memory without end (about 30 bytes per byte). */
#ifndef LIB_TEXT_BPE_H
#define LIB_TEXT_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define BPE_PIECE_BYTES_MAX (1u << 20)
#define BPE_MERGES_MAX      (1u << 22)

struct token_ids;

struct bpe_merge {
    uint64_t pair; /* left << 32 | right; BPE_NO_PAIR = free slot */
    uint32_t rank;
    uint32_t id;
};

struct bpe {
    uint32_t magic;
    struct bpe_merge *slots;
    uint32_t slot_mask;
    uint32_t merge_count;
    uint32_t byte_ids[256];
};

struct bpe_node;

struct bpe_scratch {
    struct bpe_node *nodes;
    uint64_t *heap; /* rank << 32 | position */
    size_t node_capacity;
};

/* merges_max is the number of bpe_put to come. */
MUST_USE enum err bpe_init(struct bpe *b, uint32_t merges_max);
void bpe_fini(struct bpe *b);

/* A pair that is put twice takes the later rank and result. */
void bpe_put(struct bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t result);

void bpe_scratch_init(struct bpe_scratch *s);
void bpe_scratch_fini(struct bpe_scratch *s);

/* Appends the ids of the piece.  ERR_TOO_LARGE: out is full.  ERR_NOMEM. */
MUST_USE enum err bpe_encode(const struct bpe *b, struct bpe_scratch *s, const uint8_t *piece,
                             size_t count, struct token_ids *out);

#endif
