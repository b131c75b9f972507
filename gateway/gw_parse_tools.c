/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_parse_tools.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"

static int tool_compare(const void *a, const void *b)
{
    const struct gw_parse_tool *x = a, *y = b;
    size_t shorter = x->name_bytes < y->name_bytes ? x->name_bytes : y->name_bytes;
    int order = memcmp(x->name, y->name, shorter);
    if (order != 0)
        return order;
    if (x->name_bytes != y->name_bytes)
        return x->name_bytes < y->name_bytes ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

enum err gw_parse_tools_init(struct gw_parse_tools *t, const struct json *tools)
{
    *t = (struct gw_parse_tools){0};
    if (!json_is(tools, JSON_ARRAY) || tools->count == 0)
        return ERR_OK;
    t->items = calloc(tools->count, sizeof(*t->items));
    if (t->items == NULL)
        return ERR_NOMEM;
    uint32_t index = 0;
    for (const struct json *tool = tools->child; tool; tool = tool->next, index++) {
        const struct json *function = json_get(tool, "function");
        if (!json_is(function, JSON_OBJECT))
            function = tool;
        const struct json *name = json_get(function, "name");
        if (!json_is(name, JSON_STRING) || name->bytes == 0)
            continue;
        t->items[t->count++] =
            (struct gw_parse_tool){.name = name->text,
                                   .name_bytes = name->bytes,
                                   .index = index,
                                   .parameters = json_get(function, "parameters")};
    }
    CHECK(t->count <= tools->count);
    qsort(t->items, t->count, sizeof(*t->items), tool_compare);
    return ERR_OK;
}

void gw_parse_tools_fini(struct gw_parse_tools *t)
{
    free(t->items);
    *t = (struct gw_parse_tools){0};
}

void gw_parse_walk_begin(struct gw_parse_walk *w, const struct gw_parse_tools *t)
{
    *w = (struct gw_parse_walk){.low = 0, .high = t->count};
}

/* First name in [low, high) whose byte at `depth` is at least `byte`; names that end there come
 * before all others. */
static uint32_t lower_bound(const struct gw_parse_tools *t, uint32_t low, uint32_t high,
                            size_t depth, uint32_t byte)
{
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct gw_parse_tool *tool = &t->items[middle];
        if (tool->name_bytes == depth || (uint8_t)tool->name[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void gw_parse_walk_byte(struct gw_parse_walk *w, const struct gw_parse_tools *t, uint8_t byte)
{
    CHECK(w->low <= w->high && w->high <= t->count);
    if (w->low < w->high) {
        w->low = lower_bound(t, w->low, w->high, w->bytes, byte);
        w->high = lower_bound(t, w->low, w->high, w->bytes, byte + 1u);
    }
    w->bytes++;
    if (w->low < w->high && t->items[w->low].name_bytes == w->bytes)
        w->longest = &t->items[w->low];
}

bool gw_parse_walk_open(const struct gw_parse_walk *w)
{
    return w->low < w->high || w->longest != NULL;
}

const struct gw_parse_tool *gw_parse_walk_exact(const struct gw_parse_walk *w)
{
    return w->longest != NULL && w->longest->name_bytes == w->bytes ? w->longest : NULL;
}
