/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_chat_state.h - what the gw_chat*.c files share; nobody else.
 *
 * State of one rendering, on the stack of gw_chat_render. */
#ifndef GATEWAY_GW_CHAT_STATE_H
#define GATEWAY_GW_CHAT_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gateway/gw_chat.h"

#define GW_CHAT_MAGIC 0x67776368u

struct gw_chat_tool; /* gw_chat_tools.c */

struct gw_chat {
    uint32_t magic;
    bool clear_thinking;
    struct arena *arena;
    const struct gw_chat_request *request;
    struct gw_chat_prompt *prompt;
    struct gw_chat_error *error;
    int64_t last_user;          /* index of the last user message, -1 = none */
    struct str joined;          /* content that comes in several parts, until it is printed */
    struct gw_chat_tool *tools; /* by name; NULL without tools */
    uint32_t tool_count;
};

/* Text of a field: borrowed from the request, or from c->joined until the next call. */
struct gw_chat_text {
    const char *text;
    size_t bytes;
};

/* gw_chat.c: output and refusals. */
void gw_chat_scaffold(struct gw_chat *c, const char *text);
void gw_chat_client(struct gw_chat *c, const char *text, size_t bytes);
void gw_chat_client_json(struct gw_chat *c, const struct json *value);
/* Fills the error; returns ERR_INVALID. */
enum err gw_chat_refuse(struct gw_chat *c, enum gw_chat_refusal refusal, const char *param,
                        const char *message);
bool gw_chat_truthy(const struct json *value); /* as Python's bool() */
bool gw_chat_absent(const struct json *value); /* not there, or null */

/* gw_chat_content.c: string, null or parts to one text.  path names the field. */
MUST_USE enum err gw_chat_content(struct gw_chat *c, const struct json *content, const char *path,
                                  struct gw_chat_text *ret_text);

/* gw_chat_assistant.c */
MUST_USE enum err gw_chat_assistant(struct gw_chat *c, const struct json *message, uint32_t index);
/* Every item of tool_calls is an object with a name. */
const struct json *gw_chat_call_function(const struct json *call);

/* gw_chat_tools.c: the definitions, and the lines that print them. */
MUST_USE enum err gw_chat_tools(struct gw_chat *c);
MUST_USE enum err gw_chat_tool_lines_by_name(struct gw_chat *c, const struct json *references,
                                             const char *path);

/* gw_chat_results.c: a run of tool messages, `first` being the first of them; previous is the
 * message before the run or NULL.  *ret_next is the first message after it. */
MUST_USE enum err gw_chat_results(struct gw_chat *c, const struct json *previous,
                                  const struct json *first, uint32_t index,
                                  const struct json **ret_next, uint32_t *ret_index);

#endif
