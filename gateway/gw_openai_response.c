/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_openai_response.h"

#include <inttypes.h>
#include <string.h>

#include "gateway/gw_answer.h"
#include "gateway/gw_checkpoint.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/text/tokenizer.h"

static bool is_chat(const struct gw_answer *a)
{
    return a->request->endpoint == GW_CHAT;
}

/* ---- logprobs and ids ---- */

/* A token's text, and its bytes if wanted: half a character becomes U+FFFD in the text only. */
static void write_token(const struct gw_answer *a, uint32_t id, bool with_bytes, struct str *out,
                        uint32_t *ret_characters)
{
    size_t bytes = 0;
    const uint8_t *raw = tokenizer_bytes(a->options.checkpoint->tokenizer, id, &bytes);
    struct str text;
    struct utf8_stream u = {0};
    str_init(&text, 0);
    if (a->request->tokens_as_ids) {
        str_add_format(&text, "token_id:%u", id);
    } else if (raw) {
        utf8_stream_add(&u, raw, bytes, &text);
        utf8_stream_end(&u, &text);
    }
    json_write_string(out, text.bytes ? text.text : "", text.bytes);
    if (ret_characters)
        for (size_t i = 0; i < text.bytes; i++)
            *ret_characters += (text.text[i] & 0xc0) != 0x80;
    str_fini(&text);
    if (!with_bytes)
        return;
    str_add_text(out, ",\"bytes\":[");
    for (size_t i = 0; raw && i < bytes; i++)
        str_add_format(out, i ? ",%u" : "%u", raw[i]);
    str_add_char(out, ']');
}

/* Tokens that the router sent once more from its store come without: null, never a made-up number.
 */
static bool write_value(const struct msg_tokens *t, uint32_t i, struct str *out)
{
    bool known = t->logprobs && t->logprob;
    if (known)
        json_write_f64(out, t->logprob[i]);
    else
        str_add_text(out, "null");
    return known;
}

static void note_chat(struct gw_answer *a, struct gw_choice *c, const struct msg_tokens *t,
                      uint32_t i, uint32_t id)
{
    struct str *out = &c->logprobs;
    str_add_text(out, out->bytes ? ",{\"token\":" : "{\"token\":");
    write_token(a, id, true, out, NULL);
    str_add_text(out, ",\"logprob\":");
    uint32_t top = write_value(t, i, out) ? t->top_count : 0;
    str_add_text(out, ",\"top_logprobs\":[");
    if (top > a->request->top_logprobs)
        top = a->request->top_logprobs;
    for (uint32_t k = 0; k < top; k++) {
        size_t at = (size_t)i * t->top_count + k;
        str_add_text(out, k ? ",{\"token\":" : "{\"token\":");
        write_token(a, t->top_ids[at], true, out, NULL);
        str_add_text(out, ",\"logprob\":");
        json_write_f64(out, t->top_logprobs[at]);
        str_add_char(out, '}');
    }
    str_add_text(out, "]}");
}

static void add_top(struct gw_answer *a, struct gw_choice *c, uint32_t id, double value, bool comma)
{
    if (comma)
        str_add_char(&c->lp_top, ',');
    write_token(a, id, false, &c->lp_top, NULL);
    str_add_char(&c->lp_top, ':');
    json_write_f64(&c->lp_top, value);
}

static void note_plain(struct gw_answer *a, struct gw_choice *c, const struct msg_tokens *t,
                       uint32_t i, uint32_t id)
{
    const char *comma = c->lp_tokens.bytes ? "," : "";
    uint32_t characters = 0;
    str_add_text(&c->lp_tokens, comma);
    write_token(a, id, false, &c->lp_tokens, &characters);
    str_add_format(&c->lp_offsets, "%s%u", comma, c->text_offset);
    c->text_offset += characters;
    str_add_text(&c->logprobs, comma);
    str_add_text(&c->lp_top, comma);
    if (!write_value(t, i, &c->logprobs)) {
        str_add_text(&c->lp_top, "null");
        return;
    }
    str_add_char(&c->lp_top, '{');
    bool chosen = false;
    uint32_t k = 0;
    for (; k < t->top_count && k < a->request->top_logprobs; k++) {
        size_t at = (size_t)i * t->top_count + k;
        add_top(a, c, t->top_ids[at], t->top_logprobs[at], k > 0);
        chosen |= t->top_ids[at] == id;
    }
    if (!chosen) /* one more than asked for, as OpenAI has it */
        add_top(a, c, id, t->logprob[i], k > 0);
    str_add_char(&c->lp_top, '}');
}

void gw_openai_note_logprob(struct gw_answer *a, struct gw_choice *c, const struct msg_tokens *t,
                            uint32_t i, uint32_t id)
{
    if (is_chat(a))
        note_chat(a, c, t, i, id);
    else
        note_plain(a, c, t, i, id);
}

static void add_str(struct str *out, const struct str *s)
{
    if (s->bytes)
        str_add(out, s->text, s->bytes);
}

static void write_logprobs(const struct gw_answer *a, const struct gw_choice *c, struct str *out)
{
    str_add_text(out, ",\"logprobs\":");
    bool any = c->logprobs.bytes > 0 || (a->request->logprobs && !a->request->stream);
    if (!any) {
        str_add_text(out, "null");
    } else if (is_chat(a)) {
        str_add_text(out, "{\"content\":[");
        add_str(out, &c->logprobs);
        str_add_text(out, "],\"refusal\":null}");
    } else {
        str_add_text(out, "{\"tokens\":[");
        add_str(out, &c->lp_tokens);
        str_add_text(out, "],\"token_logprobs\":[");
        add_str(out, &c->logprobs);
        str_add_text(out, "],\"top_logprobs\":[");
        add_str(out, &c->lp_top);
        str_add_text(out, "],\"text_offset\":[");
        add_str(out, &c->lp_offsets);
        str_add_text(out, "]}");
    }
}

static void write_prompt_ids(const struct gw_prompt *p, struct str *out)
{
    str_add_text(out, ",\"prompt_token_ids\":[");
    for (uint32_t i = 0; i < p->count; i++)
        str_add_format(out, i ? ",%u" : "%u", p->ids[i]);
    str_add_char(out, ']');
}

static void write_ids(const struct gw_answer *a, const struct gw_choice *c, struct str *out)
{
    if (!a->request->return_token_ids)
        return;
    str_add_text(out, ",\"token_ids\":[");
    add_str(out, &c->ids);
    str_add_char(out, ']');
}

/* ---- usage ---- */

static void write_ms(struct str *out, const char *name, uint64_t us)
{
    str_add_format(out, ",\"%s\":%" PRIu64 ".%03" PRIu64, name, us / 1000, us % 1000);
}

static void write_text(struct str *out, const char *text)
{
    json_write_string(out, text, strlen(text));
}

static void write_receipt(const struct gw_answer *a, struct str *out)
{
    const struct gw_receipt *r = &a->receipt;
    str_add_text(out, ",\"tandem\":{\"effort\":");
    if (a->request->base.effort[0])
        write_text(out, a->request->base.effort);
    else
        str_add_text(out, "null");
    str_add_format(out, ",\"concurrency\":%u,\"spec\":", r->concurrency);
    write_text(out, r->spec);
    str_add_format(out,
                   ",\"drafted\":%u,\"accepted\":%u,\"steps\":%u,\"cached_tokens\":%u"
                   ",\"preempted\":%u,\"resumed\":%u",
                   r->drafted, r->accepted, r->steps, r->cached_tokens, r->preempted, r->resumed);
    write_ms(out, "queue_ms", r->queue_us);
    write_ms(out, "prefill_ms", r->prefill_us);
    write_ms(out, "decode_ms", r->decode_us);
    write_ms(out, "draft_ms", r->draft_us);
    write_ms(out, "verify_ms", r->verify_us);
    str_add_text(out, ",\"model_fp\":");
    write_text(out, r->model_fp);
    str_add_text(out, ",\"config_hash\":");
    write_text(out, r->config_hash);
    str_add_format(out, ",\"seed\":\"%" PRIu64 "\"}", a->request->seed);
}

static void write_usage(const struct gw_answer *a, bool final, struct str *out)
{
    uint32_t prompt = gw_answer_prompt_tokens(a), output = gw_answer_output_tokens(a);
    uint32_t reasoning = 0;
    for (uint32_t i = 0; i < a->request->choice_count; i++)
        reasoning += a->choices[i].reasoning_tokens;
    str_add_format(out, "{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u",
                   prompt, output, prompt + output);
    if (final) {
        str_add_format(out,
                       ",\"prompt_tokens_details\":{\"cached_tokens\":%u}"
                       ",\"completion_tokens_details\":{\"reasoning_tokens\":%u}",
                       a->receipt.cached_tokens, reasoning);
        write_receipt(a, out);
    }
    str_add_char(out, '}');
}

/* ---- chunks ---- */

static void write_head(const struct gw_answer *a, const char *object, struct str *out)
{
    const struct gw_request *r = a->request;
    str_add_text(out, is_chat(a) ? "{\"id\":\"chatcmpl-" : "{\"id\":\"cmpl-");
    json_write_escaped(out, r->id, strlen(r->id));
    str_add_format(out, "\",\"object\":\"%s\",\"created\":%" PRIu64 ",\"model\":", object,
                   a->options.created_unix_s);
    write_text(out, r->model);
    str_add_text(out, ",\"system_fingerprint\":");
    write_text(out, a->fingerprint);
}

void gw_openai_chunk_head(const struct gw_answer *a, struct str *out)
{
    write_head(a, is_chat(a) ? "chat.completion.chunk" : "text_completion", out);
    str_add_text(out, ",\"choices\":[{\"index\":");
}

static void write_chunk_usage(const struct gw_answer *a, struct str *out)
{
    if (a->request->continuous_usage) {
        str_add_text(out, ",\"usage\":");
        write_usage(a, false, out);
    } else if (a->request->include_usage) {
        str_add_text(out, ",\"usage\":null");
    }
}

static void chunk_begin(const struct gw_answer *a, const struct gw_choice *c, struct str *out)
{
    add_str(out, &a->head);
    str_add_format(out, "%u", c->index);
}

/* From the end of the delta to the end of the chunk; takes the notes along. */
static void chunk_end(const struct gw_answer *a, struct gw_choice *c, const char *finish,
                      struct str *out)
{
    write_logprobs(a, c, out);
    if (!is_chat(a) && a->request->return_token_ids && !c->prompt_told)
        write_prompt_ids(c->prompt, out);
    c->prompt_told = true;
    if (c->ids.bytes)
        write_ids(a, c, out);
    if (finish)
        str_add_format(out, ",\"finish_reason\":\"%s\"}]", finish);
    else
        str_add_text(out, ",\"finish_reason\":null}]");
    write_chunk_usage(a, out);
    str_add_char(out, '}');
    str_clear(&c->logprobs);
    str_clear(&c->ids);
    str_clear(&c->lp_tokens);
    str_clear(&c->lp_top);
    str_clear(&c->lp_offsets);
}

void gw_openai_role_chunk(const struct gw_answer *a, struct gw_choice *c, struct str *out)
{
    chunk_begin(a, c, out);
    str_add_text(out, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                      "\"finish_reason\":null}]");
    if (a->request->return_token_ids)
        write_prompt_ids(c->prompt, out);
    write_chunk_usage(a, out);
    str_add_char(out, '}');
}

void gw_openai_text_chunk(const struct gw_answer *a, struct gw_choice *c, bool reasoning,
                          const char *text, size_t bytes, struct str *out)
{
    chunk_begin(a, c, out);
    if (!is_chat(a)) {
        str_add_text(out, ",\"text\":\"");
        json_write_escaped(out, text, bytes);
        str_add_char(out, '"');
        chunk_end(a, c, NULL, out);
        return;
    }
    enum gw_reasoning_field f = a->options.reasoning_field;
    str_add_text(out, ",\"delta\":{");
    if (!reasoning)
        str_add_text(out, "\"content\":\"");
    else
        str_add_text(out,
                     f == GW_REASONING_PLAIN ? "\"reasoning\":\"" : "\"reasoning_content\":\"");
    json_write_escaped(out, text, bytes);
    if (reasoning && f == GW_REASONING_BOTH) {
        str_add_text(out, "\",\"reasoning\":\"");
        json_write_escaped(out, text, bytes);
    }
    str_add_text(out, "\"}");
    chunk_end(a, c, NULL, out);
}

/* Unique in a conversation: random part of the answer, choice, position. */
static void write_call_id(const struct gw_answer *a, const struct gw_choice *c, uint32_t call,
                          struct str *out)
{
    str_add_format(out, "\"id\":\"call_%016" PRIx64 "%02x%04x\",\"type\":\"function\"",
                   a->options.nonce, c->index, call);
}

void gw_openai_call_chunk(const struct gw_answer *a, struct gw_choice *c, uint32_t call,
                          const char *name, size_t bytes, struct str *out)
{
    chunk_begin(a, c, out);
    str_add_format(out, ",\"delta\":{\"tool_calls\":[{\"index\":%u,", call);
    write_call_id(a, c, call, out);
    str_add_text(out, ",\"function\":{\"name\":");
    json_write_string(out, name, bytes);
    str_add_text(out, ",\"arguments\":\"\"}}]}");
    chunk_end(a, c, NULL, out);
}

void gw_openai_arguments_chunk(const struct gw_answer *a, struct gw_choice *c, uint32_t call,
                               const char *text, size_t bytes, struct str *out)
{
    chunk_begin(a, c, out);
    str_add_format(out, ",\"delta\":{\"tool_calls\":[{\"index\":%u,\"function\":{\"arguments\":\"",
                   call);
    json_write_escaped(out, text, bytes);
    str_add_text(out, "\"}}]}");
    chunk_end(a, c, NULL, out);
}

void gw_openai_finish_chunk(const struct gw_answer *a, struct gw_choice *c, struct str *out)
{
    chunk_begin(a, c, out);
    str_add_text(out, is_chat(a) ? ",\"delta\":{}" : ",\"text\":\"\"");
    chunk_end(a, c, c->finish_reason, out);
}

void gw_openai_usage_chunk(const struct gw_answer *a, struct str *out)
{
    write_head(a, is_chat(a) ? "chat.completion.chunk" : "text_completion", out);
    str_add_text(out, ",\"choices\":[],\"usage\":");
    write_usage(a, true, out);
    str_add_char(out, '}');
}

/* ---- whole answers ---- */

void gw_openai_call_begin(const struct gw_answer *a, const struct gw_choice *c, uint32_t call,
                          const char *name, size_t bytes, struct str *out)
{
    str_add_text(out, call ? ",{" : "{");
    write_call_id(a, c, call, out);
    str_add_text(out, ",\"function\":{\"name\":");
    json_write_string(out, name, bytes);
    str_add_text(out, ",\"arguments\":\"");
}

static void write_field(struct str *out, const char *name, const struct str *text)
{
    str_add_format(out, ",\"%s\":", name);
    if (text->bytes)
        json_write_string(out, text->text, text->bytes);
    else
        str_add_text(out, "null");
}

static void write_message(const struct gw_answer *a, const struct gw_choice *c, struct str *out)
{
    str_add_text(out, ",\"message\":{\"role\":\"assistant\"");
    write_field(out, "content", &c->content);
    str_add_text(out, ",\"refusal\":null");
    if (a->request->include_reasoning) {
        if (a->options.reasoning_field != GW_REASONING_PLAIN)
            write_field(out, "reasoning_content", &c->reasoning);
        if (a->options.reasoning_field != GW_REASONING_CONTENT)
            write_field(out, "reasoning", &c->reasoning);
    }
    if (c->call_count) {
        str_add_text(out, ",\"tool_calls\":[");
        add_str(out, &c->calls);
        str_add_char(out, ']');
    }
    str_add_char(out, '}');
}

static void write_choice(const struct gw_answer *a, const struct gw_choice *c, struct str *out)
{
    str_add_format(out, "%s{\"index\":%u", c->index ? "," : "", c->index);
    if (is_chat(a)) {
        write_message(a, c, out);
    } else {
        str_add_text(out, ",\"text\":");
        json_write_string(out, c->content.bytes ? c->content.text : "", c->content.bytes);
        if (a->request->return_token_ids)
            write_prompt_ids(c->prompt, out);
    }
    write_logprobs(a, c, out);
    write_ids(a, c, out);
    str_add_format(out, ",\"finish_reason\":\"%s\"}", c->finish_reason);
}

void gw_openai_object(const struct gw_answer *a, struct str *out)
{
    write_head(a, is_chat(a) ? "chat.completion" : "text_completion", out);
    str_add_text(out, ",\"choices\":[");
    for (uint32_t i = 0; i < a->request->choice_count; i++)
        write_choice(a, &a->choices[i], out);
    str_add_text(out, "],\"usage\":");
    write_usage(a, true, out);
    if (is_chat(a) && a->request->return_token_ids)
        write_prompt_ids(&a->request->prompts[0], out);
    str_add_char(out, '}');
}
