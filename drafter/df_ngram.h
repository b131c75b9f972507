/* SPDX-License-Identifier: Apache-2.0 */
/* drafter/df_ngram.h - proposes what followed the same last tokens earlier in the same sequence.
 *
 * Owned by the drafter's loop thread.  Pure; the memory is the caller's: df_ngram_bytes bytes,
 * written only as far as the sequence is long.  For every n in 1..DF_NGRAM_MAX an
 * open-addressing table (at most half full) maps the last n tokens to the position after their most
 * recent occurrence; the one before it is remembered, so truncation restores the index exactly.
 * Appending, truncating and proposing cost O(1) per token, growth of the tables amortised. */
#ifndef DRAFTER_DF_NGRAM_H
#define DRAFTER_DF_NGRAM_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define DF_NGRAM_MAX 4u

struct df_ngram {
    uint32_t magic;
    uint32_t context_max;             /* tokens */
    uint32_t length;                  /* tokens held */
    uint32_t table_bits;              /* of the tables in use; grows with length */
    uint64_t seed;                    /* of the hash: a peer cannot choose collisions */
    uint32_t *ids;                    /* [context_max] */
    uint32_t *previous[DF_NGRAM_MAX]; /* [context_max]; 0 = first occurrence */
    uint32_t *table[DF_NGRAM_MAX];    /* [1 << table_bits]; 0 = empty */
};

size_t df_ngram_bytes(uint32_t context_max); /* context_max 1..2^30 */

/* memory: 64-byte aligned, any content, kept by g. */
void df_ngram_init(struct df_ngram *g, void *memory, size_t bytes, uint32_t context_max,
                   uint64_t seed);
void df_ngram_clear(struct df_ngram *g);

/* ERR_CONTEXT (and nothing appended) when the sequence would be longer than context_max. */
MUST_USE enum err df_ngram_append(struct df_ngram *g, const uint32_t *ids, uint32_t count);
void df_ngram_truncate(struct df_ngram *g, uint32_t length); /* length <= g->length */

/* Looks for the last n tokens, n from match_max down to match_min, and writes up to draft_count
 * ids that followed.  Returns how many (draft_count or 0): a continuation that reaches the end of
 * the sequence goes on with the drafts themselves, as a repetition would. */
uint32_t df_ngram_propose(const struct df_ngram *g, uint32_t match_min, uint32_t match_max,
                          uint32_t draft_count, uint32_t *ret_ids);

#endif
