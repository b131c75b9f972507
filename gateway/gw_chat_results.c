/* SPDX-License-Identifier: Apache-2.0 */
/* A run of tool messages: one <|observation|>, results in the order of the calls if all ids fit. */
#include "gateway/gw_chat_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

struct result {
    const struct json *id; /* string or number; NULL = none */
    const struct json *content;
    uint32_t message;
    int64_t item; /* of a list of outputs, -1 = the message itself */
};

struct call_id {
    const struct json *id;
    uint32_t index;
};

static int id_compare(const struct json *a, const struct json *b)
{
    size_t shorter = a->bytes < b->bytes ? a->bytes : b->bytes;
    int order = shorter ? memcmp(a->text, b->text, shorter) : 0;
    if (order != 0 || a->bytes == b->bytes)
        return order;
    return a->bytes < b->bytes ? -1 : 1;
}

static int call_id_compare(const void *a, const void *b)
{
    return id_compare(((const struct call_id *)a)->id, ((const struct call_id *)b)->id);
}

/* A number counts as its digits: some clients send 2 for "2". */
static const struct json *usable_id(const struct json *id)
{
    if (json_is(id, JSON_NUMBER) || (json_is(id, JSON_STRING) && id->bytes > 0))
        return id;
    return NULL;
}

static const struct json *result_id(const struct json *object)
{
    const struct json *id = usable_id(json_get(object, "tool_call_id"));
    return id ? id : usable_id(json_get(object, "id"));
}

/* A list whose items have `output` holds several results. */
static bool is_output_list(const struct json *content)
{
    return json_is(content, JSON_ARRAY) && content->count > 0 &&
           json_get(content->child, "output") != NULL;
}

static uint32_t run_count(const struct json *first)
{
    uint32_t count = 0;
    for (const struct json *m = first; m && json_string_is(json_get(m, "role"), "tool");
         m = m->next) {
        const struct json *content = json_get(m, "content");
        count += is_output_list(content) ? content->count : 1;
    }
    return count;
}

static enum err collect_outputs(struct gw_chat *c, const struct json *content, uint32_t index,
                                struct result *results, uint32_t *count)
{
    int64_t item = 0;
    for (const struct json *o = content->child; o; o = o->next, item++) {
        const struct json *output = json_get(o, "output");
        if (output == NULL) {
            char path[64];
            (void)snprintf(path, sizeof(path), "messages[%u].content[%u].output", index,
                           (uint32_t)item);
            return gw_chat_refuse(c, GW_CHAT_CONTENT_TYPE, path,
                                  "is missing, although an earlier item has one");
        }
        results[(*count)++] =
            (struct result){.id = result_id(o), .content = output, .message = index, .item = item};
    }
    return ERR_OK;
}

static enum err collect(struct gw_chat *c, const struct json *first, uint32_t index,
                        struct result *results, const struct json **ret_next, uint32_t *ret_index)
{
    uint32_t count = 0;
    const struct json *m = first;
    for (; m && json_string_is(json_get(m, "role"), "tool"); m = m->next, index++) {
        const struct json *content = json_get(m, "content");
        if (is_output_list(content))
            TRY(collect_outputs(c, content, index, results, &count));
        else
            results[count++] = (struct result){
                .id = result_id(m), .content = content, .message = index, .item = -1};
    }
    *ret_next = m;
    *ret_index = index;
    return ERR_OK;
}

/* Ids of the calls, sorted.  NULL: not every call has one, or two are equal, or no memory. */
static struct call_id *call_ids(struct gw_chat *c, const struct json *calls)
{
    struct call_id *ids = arena_alloc_array(c->arena, calls->count, sizeof(*ids));
    uint32_t count = 0;
    for (const struct json *call = calls->child; call && ids; call = call->next) {
        ids[count].id = usable_id(json_get(call, "id"));
        ids[count].index = count;
        if (ids[count++].id == NULL)
            return NULL;
    }
    if (ids == NULL)
        return NULL;
    qsort(ids, count, sizeof(*ids), call_id_compare);
    for (uint32_t i = 1; i < count; i++)
        if (id_compare(ids[i - 1].id, ids[i].id) == 0)
            return NULL;
    return ids;
}

/* Place of each call's result; NULL when the order of the messages is to be kept.  Calls without
 * a result have a NULL entry. */
static const struct result **order_by_calls(struct gw_chat *c, const struct json *calls,
                                            const struct result *results, uint32_t count)
{
    if (!json_is(calls, JSON_ARRAY) || calls->count == 0)
        return NULL;
    const struct call_id *ids = call_ids(c, calls);
    const struct result **ordered = arena_alloc_array(c->arena, calls->count, sizeof(*ordered));
    if (ids == NULL || ordered == NULL)
        return NULL;
    for (uint32_t i = 0; i < count; i++) {
        const struct call_id key = {.id = results[i].id};
        if (key.id == NULL)
            return NULL;
        const struct call_id *found =
            bsearch(&key, ids, calls->count, sizeof(*ids), call_id_compare);
        if (found == NULL || ordered[found->index] != NULL)
            return NULL;
        ordered[found->index] = &results[i];
    }
    return ordered;
}

static enum err render_result(struct gw_chat *c, const struct result *r)
{
    char path[64];
    if (r->item < 0)
        (void)snprintf(path, sizeof(path), "messages[%u].content", r->message);
    else
        (void)snprintf(path, sizeof(path), "messages[%u].content[%u].output", r->message,
                       (uint32_t)r->item);
    gw_chat_scaffold(c, "<tool_response>");
    if (json_is(r->content, JSON_ARRAY) &&
        json_string_is(json_get(r->content->child, "type"), "tool_reference")) {
        TRY(gw_chat_tool_lines_by_name(c, r->content, path));
    } else {
        struct gw_chat_text text;
        TRY(gw_chat_content(c, r->content, path, &text));
        gw_chat_client(c, text.text, text.bytes);
    }
    gw_chat_scaffold(c, "</tool_response>");
    return ERR_OK;
}

enum err gw_chat_results(struct gw_chat *c, const struct json *previous, const struct json *first,
                         uint32_t index, const struct json **ret_next, uint32_t *ret_index)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    uint32_t count = run_count(first);
    CHECK(count >= 1);
    struct result *results = arena_alloc_array(c->arena, count, sizeof(*results));
    if (results == NULL)
        return ERR_NOMEM;
    TRY(collect(c, first, index, results, ret_next, ret_index));
    const struct json *calls = NULL;
    if (json_string_is(json_get(previous, "role"), "assistant"))
        calls = json_get(previous, "tool_calls");
    const struct result **ordered = order_by_calls(c, calls, results, count);
    if (c->arena->overflow)
        return ERR_NOMEM;
    gw_chat_scaffold(c, "<|observation|>");
    uint32_t places = ordered ? calls->count : count;
    for (uint32_t i = 0; i < places; i++) {
        const struct result *r = ordered ? ordered[i] : &results[i];
        if (r != NULL)
            TRY(render_result(c, r));
    }
    return ERR_OK;
}
