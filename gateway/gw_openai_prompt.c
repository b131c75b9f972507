/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_openai_read.h"

#include <stdio.h>
#include <string.h>

#include "gateway/gw_chat.h"
#include "gateway/gw_checkpoint.h"
#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"

#define PROMPTS_MAX    32u
#define BODY_DEPTH_MAX 128u

bool gw_reader_body(struct gw_reader *rd, struct json **ret_body)
{
    struct json_options options = {.lone_surrogate_replace = true,
                                   .bom_skip = true,
                                   .duplicate_keys_last = true,
                                   .depth_max = BODY_DEPTH_MAX,
                                   .bytes_max = SIZE_MAX};
    struct json_error error = {0};
    enum err e = json_parse(&rd->o->scratch, &options, rd->in->body ? rd->in->body : "",
                            rd->in->body_bytes, ret_body, &error);
    if (e == ERR_NOMEM || e == ERR_TOO_LARGE)
        return gw_reader_nomem(rd);
    if (e != ERR_OK) {
        gw_refuse_invalid(rd->refusal, "invalid_json", NULL,
                          "The body is not valid JSON: %s at byte %zu.", error.reason,
                          error.offset);
        return false;
    }
    if (!json_is(*ret_body, JSON_OBJECT)) {
        gw_refuse_invalid(rd->refusal, "invalid_json", NULL, "The body must be a JSON object.");
        return false;
    }
    return true;
}

static bool encode_failed(struct gw_reader *rd, enum err e, const char *param)
{
    if (e == ERR_TOO_LARGE && rd->o->ids.overflow) {
        gw_refuse_context(rd->refusal, param, rd->in->window, rd->o->ids.count, true);
        return false;
    }
    if (e == ERR_NOMEM)
        return gw_reader_nomem(rd);
    gw_refuse_invalid(rd->refusal, "invalid_value", param, "%s: the text cannot be tokenised",
                      param);
    return false;
}

bool gw_reader_encode(struct gw_reader *rd, const char *param, const char *text, size_t bytes)
{
    token_ids_clear(&rd->o->ids);
    enum err e = tokenizer_encode(rd->o->checkpoint->tokenizer, text, bytes, true, &rd->o->ids);
    return e == ERR_OK || encode_failed(rd, e, param);
}

/* Moves what was encoded into the request. */
static bool take_ids(struct gw_reader *rd, const char *param, struct gw_prompt *ret_prompt)
{
    const struct token_ids *ids = &rd->o->ids;
    if (ids->count == 0) {
        gw_refuse_invalid(rd->refusal, "invalid_value", param, "%s: the prompt is empty", param);
        return false;
    }
    if (ids->count >= rd->in->window) {
        gw_refuse_context(rd->refusal, param, rd->in->window, ids->count, false);
        return false;
    }
    ret_prompt->ids = arena_copy(&rd->r->arena, ids->ids, ids->count * sizeof(uint32_t));
    ret_prompt->count = (uint32_t)ids->count;
    return ret_prompt->ids || gw_reader_nomem(rd);
}

/* ---- chat ---- */

static const char *chat_code(enum gw_chat_refusal refusal)
{
    switch (refusal) {
    case GW_CHAT_PART_TYPE:
    case GW_CHAT_TOOL_REFERENCE:
        return "unsupported_value";
    case GW_CHAT_MESSAGES_EMPTY:
        return "missing_field";
    default:
        return "invalid_value";
    }
}

static bool render(struct gw_reader *rd, struct gw_chat_prompt *prompt)
{
    const struct gw_chat_request request = {rd->messages, rd->tools, rd->kwargs, rd->effort,
                                            rd->add_generation_prompt};
    const struct gw_chat_options options = {rd->o->effort_default, rd->o->clear_thinking, 0};
    struct gw_chat_error error = {0};
    if (!gw_reader_check_chat(rd))
        return false;
    enum err e = gw_chat_render(&rd->o->scratch, &request, &options, prompt, &error);
    if (e == ERR_NOMEM)
        return gw_reader_nomem(rd);
    if (e != ERR_OK) {
        gw_refuse_invalid(rd->refusal, chat_code(error.refusal), error.param, "%s", error.message);
        return false;
    }
    token_ids_clear(&rd->o->ids);
    e = gw_chat_encode(rd->o->checkpoint->tokenizer, prompt, &rd->o->ids);
    return e == ERR_OK || encode_failed(rd, e, "messages");
}

static bool known_variable(const struct json *m)
{
    static const char *const names[] = {"reasoning_effort", "clear_thinking"};
    for (size_t i = 0; i < ARRAY_COUNT(names); i++)
        if (strlen(names[i]) == m->key_bytes && memcmp(names[i], m->key, m->key_bytes) == 0)
            return true;
    return false;
}

/* Template variables without effect, for the answer's header: a misspelt switch shows. */
static void list_ignored(struct gw_reader *rd)
{
    if (!rd->kwargs)
        return;
    char *out = rd->r->ignored;
    size_t used = 0;
    for (const struct json *m = rd->kwargs->child; m; m = m->next) {
        if (known_variable(m) || m->key_bytes == 0 || m->key_bytes > 60)
            continue;
        bool plain = true;
        for (size_t i = 0; i < m->key_bytes; i++)
            plain = plain && m->key[i] > ' ' && m->key[i] <= '~' && m->key[i] != ',';
        if (!plain || used + m->key_bytes + 3 > GW_IGNORED_BYTES)
            continue;
        used += (size_t)snprintf(out + used, GW_IGNORED_BYTES - used, "%s%.*s", used ? ", " : "",
                                 (int)m->key_bytes, m->key);
    }
}

bool gw_reader_chat_prompt(struct gw_reader *rd, struct gw_prompt *ret_prompt)
{
    struct gw_chat_prompt prompt;
    gw_chat_prompt_init(&prompt);
    bool ok = render(rd, &prompt);
    if (ok && rd->r) {
        rd->r->base.effort = gw_chat_effort_name(prompt.effort);
        size_t bytes = prompt.text.bytes < GW_TAIL_BYTES ? prompt.text.bytes : GW_TAIL_BYTES;
        if (bytes)
            memcpy(rd->r->prompt_tail, prompt.text.text + prompt.text.bytes - bytes, bytes);
        rd->r->prompt_tail_bytes = (uint32_t)bytes;
        list_ignored(rd);
        ok = take_ids(rd, "messages", ret_prompt);
    }
    gw_chat_prompt_fini(&prompt);
    return ok;
}

/* ---- text completions ---- */

static bool ids_prompt(struct gw_reader *rd, const struct json *list)
{
    token_ids_clear(&rd->o->ids);
    for (const struct json *v = list->child; v; v = v->next) {
        uint64_t id = 0;
        if (!json_u64(v, &id) || id >= rd->o->checkpoint->id_count)
            return gw_reader_bad(rd, "a list of numbers must hold token ids of this model");
        if (!token_ids_add(&rd->o->ids, (uint32_t)id))
            return encode_failed(rd, ERR_TOO_LARGE, "prompt");
    }
    return true;
}

/* The text of a prompt that was given as ids, for echo. */
static bool ids_to_text(struct gw_reader *rd, struct gw_prompt *p)
{
    struct detokenizer d;
    struct str text;
    str_init(&text, 64u << 20);
    detokenizer_init(&d, rd->o->checkpoint->tokenizer, rd->r->skip_special);
    for (uint32_t i = 0; i < p->count; i++)
        if (detokenizer_add(&d, p->ids[i], &text) != ERR_OK)
            continue; /* an id without a token prints nothing */
    detokenizer_end(&d, &text);
    p->text = arena_strndup(&rd->r->arena, text.bytes ? text.text : "", text.bytes);
    p->bytes = text.bytes;
    bool ok = p->text && !text.overflow;
    str_fini(&text);
    return ok || gw_reader_nomem(rd);
}

static bool one_prompt(struct gw_reader *rd, const struct json *v, struct gw_prompt *ret_prompt)
{
    rd->field = "prompt";
    if (json_is(v, JSON_STRING)) {
        if (!gw_reader_encode(rd, "prompt", v->text, v->bytes) ||
            !take_ids(rd, "prompt", ret_prompt))
            return false;
        if (!rd->r->echo)
            return true;
        ret_prompt->text = arena_strndup(&rd->r->arena, v->text, v->bytes);
        ret_prompt->bytes = v->bytes;
        return ret_prompt->text || gw_reader_nomem(rd);
    }
    if (!json_is(v, JSON_ARRAY))
        return gw_reader_bad(rd, "must be text, token ids, or a list of either");
    if (!ids_prompt(rd, v) || !take_ids(rd, "prompt", ret_prompt))
        return false;
    return !rd->r->echo || ids_to_text(rd, ret_prompt);
}

bool gw_reader_prompts(struct gw_reader *rd)
{
    const struct json *v = rd->prompt;
    rd->field = "prompt";
    if (!v) {
        gw_refuse_invalid(rd->refusal, "missing_field", "prompt", "prompt: is required");
        return false;
    }
    if (!json_is(v, JSON_STRING) && !json_is(v, JSON_ARRAY))
        return gw_reader_bad(rd, "must be text, token ids, or a list of either");
    if (json_is(v, JSON_ARRAY) && v->count == 0)
        return gw_reader_bad(rd, "must not be empty");
    bool list = json_is(v, JSON_ARRAY) && !json_is(v->child, JSON_NUMBER);
    uint32_t count = list ? v->count : 1;
    if (count > PROMPTS_MAX)
        return gw_reader_bad(rd, "at most %u prompts in one request", PROMPTS_MAX);
    struct gw_prompt *prompts = arena_alloc_array(&rd->r->arena, count, sizeof(*prompts));
    if (!prompts)
        return gw_reader_nomem(rd);
    const struct json *item = list ? v->child : v;
    for (uint32_t i = 0; i < count; i++, item = item->next)
        if (!one_prompt(rd, item, &prompts[i]))
            return false;
    rd->r->prompts = prompts;
    rd->r->prompt_count = count;
    return true;
}
