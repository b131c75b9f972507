/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/token_ids.h - a growing array of token ids with a bound.
 *
 * One owner thread.  Growth doubles up to count_max; an id past it is dropped and `overflow`
 * stays set until token_ids_clear.  Pure but for malloc. */
#ifndef LIB_TEXT_TOKEN_IDS_H
#define LIB_TEXT_TOKEN_IDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct token_ids {
    uint32_t *ids;
    size_t count;
    size_t capacity;
    size_t count_max;
    bool overflow; /* past count_max, or out of memory */
};

/* Allocates nothing yet.  count_max is at least 1. */
void token_ids_init(struct token_ids *t, size_t count_max);
void token_ids_fini(struct token_ids *t);
void token_ids_clear(struct token_ids *t); /* keeps the memory */

/* False, with overflow set, when the id did not fit. */
bool token_ids_add(struct token_ids *t, uint32_t id);

#endif
