/* SPDX-License-Identifier: Apache-2.0 */
/* Assistant messages of the history: think block, trimmed content, tool calls. */
#include "gateway/gw_chat_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

static const char THINK[] = "<think>";
static const char THINK_END[] = "</think>";

/* What Python's str.strip() takes away. */
static bool is_python_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static struct gw_chat_text trim(struct gw_chat_text t)
{
    uint32_t code_point = 0;
    size_t taken;
    while (t.bytes > 0 && (taken = utf8_decode(t.text, t.bytes, &code_point)) > 0 &&
           is_python_space(code_point)) {
        t.text += taken;
        t.bytes -= taken;
    }
    while (t.bytes > 0) {
        size_t begin = t.bytes - 1;
        while (begin > 0 && ((uint8_t)t.text[begin] & 0xc0) == 0x80)
            begin--;
        if (utf8_decode(t.text + begin, t.bytes - begin, &code_point) == 0 ||
            !is_python_space(code_point))
            break;
        t.bytes = begin;
    }
    return t;
}

static const char *find_first(struct gw_chat_text t, const char *tag, size_t tag_bytes)
{
    return t.bytes == 0 ? NULL : memmem(t.text, t.bytes, tag, tag_bytes);
}

/* Searches from the end, so that many tags cost no more than one. */
static const char *find_last(struct gw_chat_text t, const char *tag, size_t tag_bytes)
{
    while (t.bytes >= tag_bytes) {
        const char *last = memrchr(t.text, tag[0], t.bytes - tag_bytes + 1);
        if (last == NULL)
            return NULL;
        if (memcmp(last, tag, tag_bytes) == 0)
            return last;
        t.bytes = (size_t)(last - t.text) + tag_bytes - 1;
    }
    return NULL;
}

/* Content of a client that keeps no reasoning apart: text before the first </think>, after the
 * last <think> in it, is reasoning; text after the last </think> is content. */
static bool split_think(struct gw_chat_text *content, struct gw_chat_text *ret_reasoning)
{
    const char *first = find_first(*content, THINK_END, sizeof(THINK_END) - 1);
    if (first == NULL)
        return false;
    struct gw_chat_text reasoning = {content->text, (size_t)(first - content->text)};
    const char *opener = find_last(reasoning, THINK, sizeof(THINK) - 1);
    if (opener != NULL) {
        opener += sizeof(THINK) - 1;
        reasoning = (struct gw_chat_text){opener, (size_t)(first - opener)};
    }
    const char *last = find_last(*content, THINK_END, sizeof(THINK_END) - 1);
    CHECK(last != NULL);
    last += sizeof(THINK_END) - 1;
    *content = (struct gw_chat_text){last, (size_t)(content->text + content->bytes - last)};
    *ret_reasoning = reasoning;
    return true;
}

static void render_text(struct gw_chat *c, const struct json *message, uint32_t index,
                        struct gw_chat_text content)
{
    const struct json *field = json_get(message, "reasoning_content");
    struct gw_chat_text reasoning = {"", 0};
    if (gw_chat_absent(field))
        field = json_get(message, "reasoning");
    bool has_reasoning = json_is(field, JSON_STRING);
    if (has_reasoning)
        reasoning = (struct gw_chat_text){field->text, field->bytes};
    else
        has_reasoning = split_think(&content, &reasoning);
    gw_chat_scaffold(c, "<|assistant|><think>");
    if (has_reasoning && (!c->clear_thinking || (int64_t)index > c->last_user))
        gw_chat_client(c, reasoning.text, reasoning.bytes);
    gw_chat_scaffold(c, "</think>");
    content = trim(content);
    gw_chat_client(c, content.text, content.bytes);
}

const struct json *gw_chat_call_function(const struct json *call)
{
    const struct json *function = json_get(call, "function");
    return gw_chat_truthy(function) ? function : call;
}

/* Arguments are printed from an object.  Text that is no JSON object counts as no arguments: a
 * broken call in the history must not make every later request fail.  NULL = none. */
static const struct json *call_arguments(struct gw_chat *c, const struct json *function)
{
    const struct json *arguments = json_get(function, "arguments");
    if (json_is(arguments, JSON_OBJECT))
        return arguments;
    if (!json_is(arguments, JSON_STRING))
        return NULL;
    const struct json_options options = {.lone_surrogate_replace = true,
                                         .duplicate_keys_last = true};
    struct json *value = NULL;
    struct json_error error;
    if (json_parse(c->arena, &options, arguments->text, arguments->bytes, &value, &error) != ERR_OK)
        return NULL;
    return json_is(value, JSON_OBJECT) ? value : NULL;
}

static void render_call(struct gw_chat *c, const struct json *function)
{
    const struct json *name = json_get(function, "name");
    const struct json *arguments = call_arguments(c, function);
    gw_chat_scaffold(c, "<tool_call>");
    gw_chat_client(c, name->text, name->bytes);
    for (const struct json *a = arguments ? arguments->child : NULL; a; a = a->next) {
        gw_chat_scaffold(c, "<arg_key>");
        gw_chat_client(c, a->key, a->key_bytes);
        gw_chat_scaffold(c, "</arg_key><arg_value>");
        if (json_is(a, JSON_STRING))
            gw_chat_client(c, a->text, a->bytes);
        else
            gw_chat_client_json(c, a);
        gw_chat_scaffold(c, "</arg_value>");
    }
    gw_chat_scaffold(c, "</tool_call>");
}

enum err gw_chat_assistant(struct gw_chat *c, const struct json *message, uint32_t index)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    char path[64];
    struct gw_chat_text content;
    (void)snprintf(path, sizeof(path), "messages[%u].content", index);
    TRY(gw_chat_content(c, json_get(message, "content"), path, &content));
    render_text(c, message, index, content);
    const struct json *calls = json_get(message, "tool_calls");
    if (gw_chat_absent(calls))
        return ERR_OK;
    (void)snprintf(path, sizeof(path), "messages[%u].tool_calls", index);
    if (!json_is(calls, JSON_ARRAY))
        return gw_chat_refuse(c, GW_CHAT_TOOL_CALL_NAME, path, "must be a list of calls");
    uint32_t call_index = 0;
    for (const struct json *call = calls->child; call; call = call->next, call_index++) {
        const struct json *function = gw_chat_call_function(call);
        const struct json *name = json_get(function, "name");
        (void)snprintf(path, sizeof(path), "messages[%u].tool_calls[%u].function.name", index,
                       call_index);
        if (!json_is(name, JSON_STRING) || name->bytes == 0)
            return gw_chat_refuse(c, GW_CHAT_TOOL_CALL_NAME, path, "must be a string with a name");
        render_call(c, function);
    }
    return ERR_OK;
}
