/* SPDX-License-Identifier: Apache-2.0 */
/* Types of what stands inside messages and tools.  The template looks away from most of them; a
 * client that gets one wrong is told so. */
#include "gateway/gw_openai_read.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

#define TOOL_NAME_BYTES_MAX 256u

/* Bits of types that a member may have; null and absent are always fine. */
#define IS_STRING (1u << JSON_STRING)
#define IS_NUMBER (1u << JSON_NUMBER)
#define IS_BOOL   (1u << JSON_BOOL)
#define IS_ARRAY  (1u << JSON_ARRAY)
#define IS_OBJECT (1u << JSON_OBJECT)

static bool bad_at(struct gw_reader *rd, const char *path, const char *text)
{
    gw_refuse_invalid(rd->refusal, "invalid_value", path, "%s: %s", path, text);
    return false;
}

static bool member_is(struct gw_reader *rd, const struct json *object, const char *path,
                      const char *name, uint32_t types, const char *text)
{
    const struct json *v = json_get(object, name);
    if (v == NULL || json_is(v, JSON_NULL) || ((1u << v->type) & types))
        return true;
    char where[96];
    snprintf(where, sizeof(where), "%s.%s", path, name);
    return bad_at(rd, where, text);
}

static bool check_calls(struct gw_reader *rd, const struct json *calls, uint32_t message)
{
    uint32_t i = 0;
    if (!json_is(calls, JSON_ARRAY))
        return true; /* the template's part says so */
    for (const struct json *c = calls->child; c; c = c->next, i++) {
        char path[64];
        snprintf(path, sizeof(path), "messages[%u].tool_calls[%u]", message, i);
        if (!json_is(c, JSON_OBJECT))
            return bad_at(rd, path, "must be an object");
        if (!member_is(rd, c, path, "id", IS_STRING | IS_NUMBER, "must be a string or a number") ||
            !member_is(rd, c, path, "type", IS_STRING, "must be a string") ||
            !member_is(rd, c, path, "function", IS_OBJECT, "must be an object"))
            return false;
    }
    return true;
}

/* Reasoning that comes as a list of parts is passed over, as the template does it. */
static bool check_message(struct gw_reader *rd, const struct json *m, uint32_t index)
{
    char path[32];
    const struct json *role = json_get(m, "role");
    snprintf(path, sizeof(path), "messages[%u]", index);
    if (!member_is(rd, m, path, "name", IS_STRING, "must be a string"))
        return false;
    if (json_string_is(role, "assistant"))
        return member_is(rd, m, path, "reasoning_content", IS_STRING | IS_ARRAY,
                         "must be a string") &&
               member_is(rd, m, path, "reasoning", IS_STRING | IS_ARRAY, "must be a string") &&
               member_is(rd, m, path, "refusal", IS_STRING, "must be a string") &&
               check_calls(rd, json_get(m, "tool_calls"), index);
    if (json_string_is(role, "tool"))
        return member_is(rd, m, path, "tool_call_id", IS_STRING | IS_NUMBER,
                         "must be a string or a number");
    return true;
}

/* A name is written between tags, and read back up to the next one. */
static bool name_fits(const struct json *name)
{
    for (size_t i = 0; i < name->bytes; i++) {
        unsigned char c = (unsigned char)name->text[i];
        if (c <= ' ' || c == 0x7f || c == '<' || c == '>' || c == '"' || c == '\\')
            return false;
    }
    return name->bytes <= TOOL_NAME_BYTES_MAX;
}

static bool check_tool(struct gw_reader *rd, const struct json *tool, uint32_t index)
{
    char path[48];
    const struct json *type = json_get(tool, "type"), *function = json_get(tool, "function");
    snprintf(path, sizeof(path), "tools[%u]", index);
    if (!member_is(rd, tool, path, "type", IS_STRING, "must be a string"))
        return false;
    if (json_is(type, JSON_STRING) && !json_string_is(type, "function")) {
        char where[64];
        snprintf(where, sizeof(where), "%s.type", path);
        gw_refuse_invalid(rd->refusal, "unsupported_value", where,
                          "%s: only tools of type \"function\" are supported", where);
        return false;
    }
    if (function == NULL)
        function = tool;
    else
        snprintf(path, sizeof(path), "tools[%u].function", index);
    if (!json_is(function, JSON_OBJECT))
        return true; /* the template's part says so */
    const struct json *name = json_get(function, "name");
    if (json_is(name, JSON_STRING) && !name_fits(name)) {
        char where[64];
        snprintf(where, sizeof(where), "%s.name", path);
        return bad_at(rd, where,
                      "must be at most 256 bytes without white space, control characters, quotes, "
                      "backslashes and angle brackets");
    }
    return member_is(rd, function, path, "name", IS_STRING, "must be a string") &&
           member_is(rd, function, path, "description", IS_STRING, "must be a string") &&
           member_is(rd, function, path, "parameters", IS_OBJECT,
                     "must be an object: a JSON Schema") &&
           member_is(rd, function, path, "strict", IS_BOOL, "must be true or false");
}

bool gw_reader_check_chat(struct gw_reader *rd)
{
    uint32_t index = 0;
    if (json_is(rd->tools, JSON_ARRAY))
        for (const struct json *t = rd->tools->child; t; t = t->next)
            if (!check_tool(rd, t, index++))
                return false;
    index = 0;
    if (json_is(rd->messages, JSON_ARRAY))
        for (const struct json *m = rd->messages->child; m; m = m->next)
            if (!check_message(rd, m, index++))
                return false;
    return true;
}
