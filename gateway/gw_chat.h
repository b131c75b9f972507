/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_chat.h - the chat template of GLM-5.3-Flash, natively: messages to prompt.
 *
 * Pure but for malloc of the prompt; any thread, one prompt per call.  The text of the prompt is
 * bounded by options.prompt_bytes_max.
 *
 * A prompt is one text in spans: scaffold (what the template itself prints: control tokens,
 * fixed wording) and text of the client (messages, reasoning, arguments, tool definitions).  Only
 * scaffold is searched for the strings of added tokens, so "<|assistant|>" in a message is plain
 * text.  Decisions that come before the template: `arguments` given as JSON text is decoded, role
 * developer counts as system, `reasoning` stands in for an absent reasoning_content, and what a
 * text-only server cannot render is refused with a class, the path of the field and a message. */
#ifndef GATEWAY_GW_CHAT_H
#define GATEWAY_GW_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/str.h"

struct arena;
struct json;
struct token_ids;
struct tokenizer;
struct tokenizer_span;

enum gw_chat_refusal {
    GW_CHAT_REFUSAL_NONE,
    GW_CHAT_MESSAGES_EMPTY,
    GW_CHAT_MESSAGES_TYPE, /* messages is no list, or one of them no object */
    GW_CHAT_ROLE,
    GW_CHAT_CONTENT_TYPE,
    GW_CHAT_PART_TYPE,
    GW_CHAT_TOOLS_TYPE,
    GW_CHAT_TOOL_CALL_NAME,
    GW_CHAT_TOOL_REFERENCE,
    GW_CHAT_KWARGS_TYPE, /* chat_template_kwargs is no object */
    GW_CHAT_TOO_LARGE,   /* the prompt passed prompt_bytes_max */
};

struct gw_chat_error {
    enum gw_chat_refusal refusal;
    char param[96];    /* "messages[2].content[0].type" */
    char message[224]; /* a sentence for the client */
};

enum gw_chat_effort { GW_CHAT_EFFORT_MAX, GW_CHAT_EFFORT_HIGH, GW_CHAT_EFFORT_LOW };

/* Members of the request; each may be NULL.  Borrowed for the call. */
struct gw_chat_request {
    const struct json *messages;
    const struct json *tools;
    const struct json *kwargs; /* chat_template_kwargs */
    const struct json *reasoning_effort;
    bool add_generation_prompt;
};

struct gw_chat_options {
    const char *effort_default;  /* for a request that names none; NULL = "max" */
    bool clear_thinking_default; /* false: reasoning of earlier turns is kept */
    size_t prompt_bytes_max;     /* 0 = 64 MiB */
};

struct gw_chat_prompt {
    struct str text;
    struct tokenizer_span *spans; /* together exactly text.bytes; kinds alternate */
    size_t span_count, span_capacity;
    enum gw_chat_effort effort; /* what the prompt says, for the receipt */
};

/* arena holds decoded arguments and work lists for the call.  ERR_INVALID and ERR_TOO_LARGE come
 * with ret_error; ERR_NOMEM: arena or malloc ran out.  prompt must be fresh from init; after an
 * error it holds a part. */
void gw_chat_prompt_init(struct gw_chat_prompt *p);
void gw_chat_prompt_fini(struct gw_chat_prompt *p);
MUST_USE enum err gw_chat_render(struct arena *arena, const struct gw_chat_request *request,
                                 const struct gw_chat_options *options,
                                 struct gw_chat_prompt *ret_prompt,
                                 struct gw_chat_error *ret_error);

/* Appends the ids: scaffold with control tokens, text of the client plain, runs between control
 * tokens as one.  Errors as tokenizer_encode: ERR_TOO_LARGE with out->overflow means more tokens
 * than out may hold. */
MUST_USE enum err gw_chat_encode(const struct tokenizer *tokenizer, const struct gw_chat_prompt *p,
                                 struct token_ids *out);

const char *gw_chat_refusal_name(enum gw_chat_refusal refusal); /* "content_type" */
const char *gw_chat_effort_name(enum gw_chat_effort effort);    /* "low" */

#endif
