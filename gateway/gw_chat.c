/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_chat_state.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/text/tokenizer.h"

#define PROMPT_BYTES_DEFAULT ((size_t)64 << 20)

void gw_chat_prompt_init(struct gw_chat_prompt *p)
{
    *p = (struct gw_chat_prompt){0};
    str_init(&p->text, PROMPT_BYTES_DEFAULT);
}

void gw_chat_prompt_fini(struct gw_chat_prompt *p)
{
    if (p == NULL)
        return;
    str_fini(&p->text);
    free(p->spans);
    *p = (struct gw_chat_prompt){0};
}

/* Accounts `bytes` at the end of the text to a kind; neighbours of one kind are one span. */
static void prompt_extend(struct gw_chat_prompt *p, bool scaffold, size_t bytes)
{
    if (bytes == 0)
        return;
    if (p->span_count > 0 && p->spans[p->span_count - 1].parse_special == scaffold) {
        p->spans[p->span_count - 1].bytes += bytes;
        return;
    }
    if (p->span_count == p->span_capacity) {
        size_t capacity = p->span_capacity ? p->span_capacity * 2 : 32;
        struct tokenizer_span *spans = realloc(p->spans, capacity * sizeof(*spans));
        if (spans == NULL) {
            p->text.overflow = true;
            return;
        }
        p->spans = spans;
        p->span_capacity = capacity;
    }
    p->spans[p->span_count++] = (struct tokenizer_span){.bytes = bytes, .parse_special = scaffold};
}

void gw_chat_scaffold(struct gw_chat *c, const char *text)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    size_t before = c->prompt->text.bytes;
    str_add_text(&c->prompt->text, text);
    prompt_extend(c->prompt, true, c->prompt->text.bytes - before);
}

void gw_chat_client(struct gw_chat *c, const char *text, size_t bytes)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    size_t before = c->prompt->text.bytes;
    if (bytes > 0)
        str_add(&c->prompt->text, text, bytes);
    prompt_extend(c->prompt, false, c->prompt->text.bytes - before);
}

void gw_chat_client_json(struct gw_chat *c, const struct json *value)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    size_t before = c->prompt->text.bytes;
    json_write(&c->prompt->text, value, JSON_NUMBERS_PYTHON);
    prompt_extend(c->prompt, false, c->prompt->text.bytes - before);
}

enum err gw_chat_refuse(struct gw_chat *c, enum gw_chat_refusal refusal, const char *param,
                        const char *message)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    CHECK(refusal != GW_CHAT_REFUSAL_NONE);
    c->error->refusal = refusal;
    (void)snprintf(c->error->param, sizeof(c->error->param), "%s", param);
    (void)snprintf(c->error->message, sizeof(c->error->message), "%s: %s", param, message);
    return ERR_INVALID;
}

bool gw_chat_absent(const struct json *value)
{
    return value == NULL || json_is(value, JSON_NULL);
}

bool gw_chat_truthy(const struct json *value)
{
    if (value == NULL)
        return false;
    double number = 0;
    switch (value->type) {
    case JSON_NULL:
        return false;
    case JSON_BOOL:
        return value->boolean;
    case JSON_NUMBER:
        return !json_f64(value, &number) || number != 0; /* not finite = true */
    case JSON_STRING:
        return value->bytes > 0;
    default:
        return value->count > 0;
    }
}

static enum err render_effort(struct gw_chat *c, const struct gw_chat_options *options)
{
    const struct json *effort = json_get(c->request->kwargs, "reasoning_effort");
    if (gw_chat_absent(effort))
        effort = c->request->reasoning_effort;
    c->prompt->effort = GW_CHAT_EFFORT_MAX;
    bool by_default = gw_chat_absent(effort) && options->effort_default != NULL;
    if (json_string_is(effort, "low") || (by_default && !strcmp(options->effort_default, "low")))
        c->prompt->effort = GW_CHAT_EFFORT_LOW;
    if (json_string_is(effort, "high") || (by_default && !strcmp(options->effort_default, "high")))
        c->prompt->effort = GW_CHAT_EFFORT_HIGH;
    static const char *const lines[] = {"<|system|>Reasoning Effort: Max",
                                        "<|system|>Reasoning Effort: High",
                                        "<|system|>Reasoning Effort: Low"};
    gw_chat_scaffold(c, "[gMASK]<sop>");
    gw_chat_scaffold(c, lines[c->prompt->effort]);
    return ERR_OK;
}

/* System and user messages: a control token and the text, never trimmed. */
static enum err render_plain(struct gw_chat *c, const struct json *message, uint32_t index,
                             const char *control)
{
    char path[48];
    struct gw_chat_text text;
    (void)snprintf(path, sizeof(path), "messages[%u].content", index);
    TRY(gw_chat_content(c, json_get(message, "content"), path, &text));
    gw_chat_scaffold(c, control);
    gw_chat_client(c, text.text, text.bytes);
    return ERR_OK;
}

static enum err refuse_message(struct gw_chat *c, const struct json *message, uint32_t index)
{
    char path[48];
    (void)snprintf(path, sizeof(path), "messages[%u]", index);
    if (!json_is(message, JSON_OBJECT))
        return gw_chat_refuse(c, GW_CHAT_MESSAGES_TYPE, path, "a message must be an object");
    (void)snprintf(path, sizeof(path), "messages[%u].role", index);
    return gw_chat_refuse(c, GW_CHAT_ROLE, path,
                          "must be system, developer, user, assistant or tool");
}

static enum err render_messages(struct gw_chat *c)
{
    const struct json *previous = NULL;
    const struct json *message = c->request->messages->child;
    uint32_t index = 0;
    while (message != NULL) {
        const struct json *role = json_get(message, "role");
        const struct json *next = message->next;
        uint32_t next_index = index + 1;
        enum err e;
        if (json_string_is(role, "user"))
            e = render_plain(c, message, index, "<|user|>");
        else if (json_string_is(role, "system") || json_string_is(role, "developer"))
            e = render_plain(c, message, index, "<|system|>");
        else if (json_string_is(role, "assistant"))
            e = gw_chat_assistant(c, message, index);
        else if (json_string_is(role, "tool"))
            e = gw_chat_results(c, previous, message, index, &next, &next_index);
        else
            e = refuse_message(c, message, index);
        if (e != ERR_OK)
            return e;
        if (c->prompt->text.overflow || c->joined.overflow)
            return ERR_OK; /* reported by the caller; no use in going on */
        previous = message;
        message = next;
        index = next_index;
    }
    return ERR_OK;
}

static enum err check_request(struct gw_chat *c)
{
    const struct json *messages = c->request->messages;
    if (!json_is(messages, JSON_ARRAY))
        return gw_chat_refuse(c, GW_CHAT_MESSAGES_TYPE, "messages", "must be a list of messages");
    if (messages->count == 0)
        return gw_chat_refuse(c, GW_CHAT_MESSAGES_EMPTY, "messages", "must not be empty");
    if (!gw_chat_absent(c->request->kwargs) && !json_is(c->request->kwargs, JSON_OBJECT))
        return gw_chat_refuse(c, GW_CHAT_KWARGS_TYPE, "chat_template_kwargs", "must be an object");
    int64_t index = 0;
    for (const struct json *m = messages->child; m; m = m->next, index++)
        if (json_string_is(json_get(m, "role"), "user"))
            c->last_user = index;
    return ERR_OK;
}

static enum err render_all(struct gw_chat *c, const struct gw_chat_options *options)
{
    TRY(check_request(c));
    const struct json *clear = json_get(c->request->kwargs, "clear_thinking");
    c->clear_thinking =
        gw_chat_absent(clear) ? options->clear_thinking_default : gw_chat_truthy(clear);
    TRY(render_effort(c, options));
    TRY(gw_chat_tools(c));
    TRY(render_messages(c));
    if (c->request->add_generation_prompt)
        gw_chat_scaffold(c, "<|assistant|><think>");
    return ERR_OK;
}

enum err gw_chat_render(struct arena *arena, const struct gw_chat_request *request,
                        const struct gw_chat_options *options, struct gw_chat_prompt *ret_prompt,
                        struct gw_chat_error *ret_error)
{
    CHECK(arena != NULL && request != NULL && options != NULL);
    CHECK(ret_error != NULL && ret_prompt->text.bytes == 0 && ret_prompt->span_count == 0);
    struct gw_chat c = {.magic = GW_CHAT_MAGIC,
                        .arena = arena,
                        .request = request,
                        .prompt = ret_prompt,
                        .error = ret_error,
                        .last_user = -1};
    *ret_error = (struct gw_chat_error){0};
    if (options->prompt_bytes_max != 0)
        ret_prompt->text.bytes_max = options->prompt_bytes_max;
    str_init(&c.joined, ret_prompt->text.bytes_max);
    enum err e = render_all(&c, options);
    bool overflow = ret_prompt->text.overflow || c.joined.overflow;
    str_fini(&c.joined);
    if (e == ERR_OK && overflow) {
        (void)gw_chat_refuse(&c, GW_CHAT_TOO_LARGE, "messages", "the prompt is too large");
        return ERR_TOO_LARGE;
    }
    return e == ERR_OK && arena->overflow ? ERR_NOMEM : e;
}

enum err gw_chat_encode(const struct tokenizer *tokenizer, const struct gw_chat_prompt *p,
                        struct token_ids *out)
{
    CHECK(tokenizer != NULL && p != NULL && !p->text.overflow);
    return tokenizer_encode_spans(tokenizer, p->text.text, p->text.bytes, p->spans, p->span_count,
                                  out);
}

const char *gw_chat_refusal_name(enum gw_chat_refusal refusal)
{
    static const char *const names[] = {
        [GW_CHAT_REFUSAL_NONE] = "none",
        [GW_CHAT_MESSAGES_EMPTY] = "messages_empty",
        [GW_CHAT_MESSAGES_TYPE] = "messages_type",
        [GW_CHAT_ROLE] = "role",
        [GW_CHAT_CONTENT_TYPE] = "content_type",
        [GW_CHAT_PART_TYPE] = "part_type",
        [GW_CHAT_TOOLS_TYPE] = "tools_type",
        [GW_CHAT_TOOL_CALL_NAME] = "tool_call_name",
        [GW_CHAT_TOOL_REFERENCE] = "tool_reference",
        [GW_CHAT_KWARGS_TYPE] = "kwargs_type",
        [GW_CHAT_TOO_LARGE] = "too_large",
    };
    CHECK((size_t)refusal < ARRAY_COUNT(names));
    return names[refusal];
}

const char *gw_chat_effort_name(enum gw_chat_effort effort)
{
    static const char *const names[] = {"max", "high", "low"};
    CHECK((size_t)effort < ARRAY_COUNT(names));
    return names[effort];
}
