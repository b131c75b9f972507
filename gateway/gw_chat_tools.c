/* SPDX-License-Identifier: Apache-2.0 */
/* Tool definitions: the block after the effort line, and references in tool results. */
#include "gateway/gw_chat_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

static const char TOOLS_HEAD[] =
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
static const char TOOLS_TAIL[] =
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
    "<arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key>"
    "<arg_value>{arg-value-2}</arg_value>...</tool_call>";

/* Sorted by name, then by place in the request: a reference is found without a walk. */
struct gw_chat_tool {
    const struct json *function;
    const char *name;
    size_t name_bytes;
    uint32_t index;
};

static int name_compare(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    size_t shorter = a_bytes < b_bytes ? a_bytes : b_bytes;
    int order = shorter ? memcmp(a, b, shorter) : 0;
    if (order != 0 || a_bytes == b_bytes)
        return order;
    return a_bytes < b_bytes ? -1 : 1;
}

static int tool_compare(const void *a, const void *b)
{
    const struct gw_chat_tool *x = a, *y = b;
    int order = name_compare(x->name, x->name_bytes, y->name, y->name_bytes);
    if (order != 0)
        return order;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* One line.  Keys of the top level are printed as they are, two of them not at all. */
static void tool_line(struct gw_chat *c, const struct json *function)
{
    bool first = true;
    gw_chat_client(c, "{", 1);
    for (const struct json *member = function->child; member; member = member->next) {
        if ((member->key_bytes == 13 && memcmp(member->key, "defer_loading", 13) == 0) ||
            (member->key_bytes == 6 && memcmp(member->key, "strict", 6) == 0))
            continue;
        gw_chat_client(c, first ? "\"" : ", \"", first ? 1 : 3);
        gw_chat_client(c, member->key, member->key_bytes);
        gw_chat_client(c, "\": ", 3);
        gw_chat_client_json(c, member);
        first = false;
    }
    gw_chat_client(c, "}\n", 2);
}

/* The definition without its wrapper; NULL = refused. */
static const struct json *tool_function(struct gw_chat *c, const struct json *tool, uint32_t index)
{
    char path[64];
    const struct json *function = json_get(tool, "function");
    if (function == NULL)
        function = tool;
    (void)snprintf(path, sizeof(path), "tools[%u]%s", index,
                   json_is(tool, JSON_OBJECT) && function != tool ? ".function" : "");
    if (!json_is(function, JSON_OBJECT)) {
        (void)gw_chat_refuse(c, GW_CHAT_TOOLS_TYPE, path, "must be an object");
        return NULL;
    }
    const struct json *name = json_get(function, "name");
    if (!json_is(name, JSON_STRING) || name->bytes == 0) {
        (void)gw_chat_refuse(c, GW_CHAT_TOOLS_TYPE, path, "must have a name");
        return NULL;
    }
    return function;
}

enum err gw_chat_tools(struct gw_chat *c)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    const struct json *tools = c->request->tools;
    if (gw_chat_absent(tools))
        return ERR_OK;
    if (!json_is(tools, JSON_ARRAY))
        return gw_chat_refuse(c, GW_CHAT_TOOLS_TYPE, "tools", "must be a list of tools");
    if (tools->count == 0)
        return ERR_OK;
    c->tools = arena_alloc_array(c->arena, tools->count, sizeof(*c->tools));
    if (c->tools == NULL)
        return ERR_NOMEM;
    gw_chat_scaffold(c, TOOLS_HEAD);
    for (const struct json *tool = tools->child; tool; tool = tool->next) {
        const struct json *function = tool_function(c, tool, c->tool_count);
        if (function == NULL)
            return ERR_INVALID;
        if (!gw_chat_truthy(json_get(function, "defer_loading")))
            tool_line(c, function);
        const struct json *name = json_get(function, "name");
        c->tools[c->tool_count] = (struct gw_chat_tool){.function = function,
                                                        .name = name->text,
                                                        .name_bytes = name->bytes,
                                                        .index = c->tool_count};
        c->tool_count++;
    }
    CHECK(c->tool_count == tools->count);
    gw_chat_scaffold(c, TOOLS_TAIL);
    qsort(c->tools, c->tool_count, sizeof(*c->tools), tool_compare);
    return ERR_OK;
}

/* Index of the first tool that is not before the name. */
static uint32_t tool_lower_bound(const struct gw_chat *c, const struct json *name)
{
    uint32_t low = 0, high = c->tool_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct gw_chat_tool *t = &c->tools[middle];
        if (name_compare(t->name, t->name_bytes, name->text, name->bytes) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

enum err gw_chat_tool_lines_by_name(struct gw_chat *c, const struct json *references,
                                    const char *path)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    char where[96];
    uint32_t index = 0;
    if (c->tools == NULL)
        return gw_chat_refuse(c, GW_CHAT_TOOL_REFERENCE, path,
                              "refers to tools, but the request has none");
    gw_chat_scaffold(c, "<tools>\n");
    for (const struct json *r = references->child; r; r = r->next, index++) {
        const struct json *name = json_get(r, "name");
        if (!json_string_is(json_get(r, "type"), "tool_reference")) {
            (void)snprintf(where, sizeof(where), "%s[%u].type", path, index);
            return gw_chat_refuse(c, GW_CHAT_PART_TYPE, where,
                                  "references to tools cannot be mixed with other parts");
        }
        if (!json_is(name, JSON_STRING))
            continue; /* names nothing, so it prints nothing */
        for (uint32_t i = tool_lower_bound(c, name); i < c->tool_count; i++) {
            const struct gw_chat_tool *t = &c->tools[i];
            if (name_compare(t->name, t->name_bytes, name->text, name->bytes) != 0)
                break;
            tool_line(c, t->function);
        }
        if (c->prompt->text.overflow)
            return ERR_OK; /* reported at the end */
    }
    gw_chat_scaffold(c, "</tools>");
    return ERR_OK;
}
