/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/token_ids.h"

#include <stdlib.h>

#include "lib/base/check.h"

#define TOKEN_IDS_FIRST 64

void token_ids_init(struct token_ids *t, size_t count_max)
{
    CHECK(t != NULL);
    CHECK(count_max >= 1 && count_max <= SIZE_MAX / sizeof(uint32_t) / 2);
    *t = (struct token_ids){.count_max = count_max};
}

void token_ids_fini(struct token_ids *t)
{
    if (t == NULL)
        return;
    free(t->ids);
    *t = (struct token_ids){0};
}

void token_ids_clear(struct token_ids *t)
{
    CHECK(t != NULL && t->count <= t->capacity);
    t->count = 0;
    t->overflow = false;
}

static bool token_ids_grow(struct token_ids *t)
{
    size_t capacity = t->capacity ? t->capacity * 2 : TOKEN_IDS_FIRST;
    if (capacity > t->count_max)
        capacity = t->count_max;
    if (capacity <= t->count)
        return false;
    uint32_t *ids = realloc(t->ids, capacity * sizeof(*ids));
    if (ids == NULL)
        return false;
    t->ids = ids;
    t->capacity = capacity;
    return true;
}

bool token_ids_add(struct token_ids *t, uint32_t id)
{
    CHECK(t->count <= t->capacity && t->capacity <= t->count_max);
    if (t->count == t->capacity && !token_ids_grow(t)) {
        t->overflow = true;
        return false;
    }
    t->ids[t->count++] = id;
    return true;
}
