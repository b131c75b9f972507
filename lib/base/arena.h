/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/arena.h - bump allocation with an overflow mark; no free, reset at the end.
 *
 * One owner thread.  Takes chunks from malloc up to bytes_max in all; the first chunk is kept
 * over resets, so a steady state allocates nothing.  Memory is zeroed and 16-byte aligned.
 * When the bound is reached arena_alloc returns NULL and sets `overflow`, which stays set until
 * the next reset; it is tested once before answering. */
#ifndef LIB_BASE_ARENA_H
#define LIB_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct arena_chunk;

struct arena {
    uint32_t magic;
    bool overflow;
    size_t bytes_used; /* handed out since the last reset, padding included */
    size_t bytes_max;
    size_t chunk_bytes; /* size of the first and of further chunks (at least) */
    struct arena_chunk *first;
    struct arena_chunk *current;
};

/* Allocates nothing yet.  bytes_max 0 = no bound (start-up use only). */
void arena_init(struct arena *a, size_t chunk_bytes, size_t bytes_max);
void arena_fini(struct arena *a);  /* frees all chunks */
void arena_reset(struct arena *a); /* keeps the first chunk */

void *arena_alloc(struct arena *a, size_t bytes);                          /* NULL on overflow */
void *arena_alloc_array(struct arena *a, size_t count, size_t item_bytes); /* checks count*item */
void *arena_copy(struct arena *a, const void *bytes, size_t count);
char *arena_strndup(struct arena *a, const char *text, size_t bytes); /* NUL-terminated */

#endif
