/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/vocab.h - the table of tokens: bytes and flags by id, id by bytes.
 *
 * Filled at load by one thread, immutable and shared after vocab_index.  Ids may have gaps (rows
 * of padding).  Holds at most VOCAB_IDS_MAX ids and VOCAB_BYTES_MAX bytes of token text. */
#ifndef LIB_TEXT_VOCAB_H
#define LIB_TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define VOCAB_IDS_MAX   (1u << 21)
#define VOCAB_BYTES_MAX (256u << 20)

enum vocab_flag {
    VOCAB_PRESENT = 1, /* the id has a token */
    VOCAB_TEXT = 2,    /* reachable from text: found by vocab_find */
    VOCAB_ADDED = 4,
    VOCAB_SPECIAL = 8,
    VOCAB_DIRECT = 16, /* a piece with exactly these bytes encodes to this id alone */
};

struct vocab_token {
    uint32_t offset; /* into bytes */
    uint32_t count;
    uint8_t flags;
};

struct vocab {
    uint32_t magic;
    uint32_t id_count;    /* highest id + 1 */
    uint32_t token_count; /* ids that are present */
    uint32_t longest;     /* bytes of the longest VOCAB_TEXT token */
    struct vocab_token *tokens;
    uint32_t token_capacity;
    uint8_t *bytes;
    uint32_t byte_count, byte_capacity;
    uint32_t *slots; /* id + 1, or 0; open addressing */
    uint32_t slot_mask;
};

void vocab_init(struct vocab *v);
void vocab_fini(struct vocab *v);

/* ERR_INVALID: the id is taken.  ERR_TOO_LARGE: past a bound.  ERR_NOMEM. */
MUST_USE enum err vocab_add(struct vocab *v, uint32_t id, const void *bytes, size_t count,
                            uint8_t flags);
/* Builds the table behind vocab_find.  ERR_INVALID: two VOCAB_TEXT tokens with the same bytes
 * (ret_id is the second). */
MUST_USE enum err vocab_index(struct vocab *v, uint32_t *ret_id);

/* False when no VOCAB_TEXT token has exactly these bytes. */
bool vocab_find(const struct vocab *v, const void *bytes, size_t count, uint32_t *ret_id);
/* NULL when the id has no token. */
const struct vocab_token *vocab_token(const struct vocab *v, uint32_t id);
const uint8_t *vocab_bytes(const struct vocab *v, const struct vocab_token *token);

#endif
