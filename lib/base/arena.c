/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/arena.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

#define ARENA_MAGIC       0x41524e41u
#define ARENA_ALIGN       16u
#define ARENA_CHUNK_BYTES 4096u

struct arena_chunk {
    struct arena_chunk *next;
    size_t bytes; /* usable bytes behind this header */
    size_t used;
    size_t bytes_before; /* usable bytes of all chunks before this one */
};

STATIC_CHECK(sizeof(struct arena_chunk) % ARENA_ALIGN == 0);

static unsigned char *chunk_bytes_of(struct arena_chunk *chunk)
{
    return (unsigned char *)(chunk + 1);
}

void arena_init(struct arena *a, size_t chunk_bytes, size_t bytes_max)
{
    CHECK(a != NULL);
    *a = (struct arena){
        .magic = ARENA_MAGIC,
        .bytes_max = bytes_max,
        .chunk_bytes = chunk_bytes == 0 ? ARENA_CHUNK_BYTES : chunk_bytes,
    };
}

static void chunk_list_free(struct arena_chunk *chunk)
{
    while (chunk != NULL) {
        struct arena_chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
}

void arena_fini(struct arena *a)
{
    CHECK_OBJ(a, ARENA_MAGIC);
    chunk_list_free(a->first);
    *a = (struct arena){0};
}

void arena_reset(struct arena *a)
{
    CHECK_OBJ(a, ARENA_MAGIC);
    if (a->first != NULL) {
        chunk_list_free(a->first->next);
        a->first->next = NULL;
        a->first->used = 0;
    }
    a->current = a->first;
    a->bytes_used = 0;
    a->overflow = false;
}

/* A chunk that holds `bytes` behind the current one; NULL at the bound or when malloc fails. */
static struct arena_chunk *chunk_add(struct arena *a, size_t bytes)
{
    size_t before = a->current == NULL ? 0 : a->current->bytes_before + a->current->bytes;
    size_t want = bytes > a->chunk_bytes ? bytes : a->chunk_bytes;
    if (a->bytes_max != 0) {
        CHECK(before <= a->bytes_max);
        size_t left = a->bytes_max - before;
        if (bytes > left)
            return NULL;
        if (want > left)
            want = left;
    }
    if (want > SIZE_MAX - sizeof(struct arena_chunk))
        return NULL;
    struct arena_chunk *chunk = malloc(sizeof *chunk + want);
    if (chunk == NULL)
        return NULL;
    *chunk = (struct arena_chunk){.bytes = want, .bytes_before = before};
    if (a->current == NULL) {
        CHECK(a->first == NULL);
        a->first = chunk;
    } else {
        CHECK(a->current->next == NULL);
        a->current->next = chunk;
    }
    a->current = chunk;
    return chunk;
}

/* Memory as it comes: the callers below fill it. */
static void *arena_take(struct arena *a, size_t bytes)
{
    CHECK_OBJ(a, ARENA_MAGIC);
    if (bytes > SIZE_MAX / 2) {
        a->overflow = true;
        return NULL;
    }
    size_t padded =
        bytes == 0 ? ARENA_ALIGN : (bytes + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    struct arena_chunk *chunk = a->current;
    if (chunk == NULL || chunk->bytes - chunk->used < padded)
        chunk = chunk_add(a, padded);
    if (chunk == NULL) {
        a->overflow = true;
        return NULL;
    }
    CHECK(chunk->bytes - chunk->used >= padded);
    void *memory = chunk_bytes_of(chunk) + chunk->used;
    chunk->used += padded;
    a->bytes_used += padded;
    return memory;
}

void *arena_alloc(struct arena *a, size_t bytes)
{
    void *memory = arena_take(a, bytes);
    if (memory != NULL)
        memset(memory, 0, bytes);
    return memory;
}

void *arena_alloc_array(struct arena *a, size_t count, size_t item_bytes)
{
    CHECK_OBJ(a, ARENA_MAGIC);
    size_t bytes;
    if (__builtin_mul_overflow(count, item_bytes, &bytes)) {
        a->overflow = true;
        return NULL;
    }
    return arena_alloc(a, bytes);
}

void *arena_copy(struct arena *a, const void *bytes, size_t count)
{
    CHECK(bytes != NULL || count == 0);
    void *memory = arena_take(a, count);
    if (memory != NULL && count > 0)
        memcpy(memory, bytes, count);
    return memory;
}

char *arena_strndup(struct arena *a, const char *text, size_t bytes)
{
    CHECK(text != NULL || bytes == 0);
    CHECK(bytes < SIZE_MAX);
    char *copy = arena_take(a, bytes + 1);
    if (copy == NULL)
        return NULL;
    if (bytes > 0)
        memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    return copy;
}
