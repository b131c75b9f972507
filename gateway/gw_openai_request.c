/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_openai.h"

#include <string.h>

#include "gateway/gw_checkpoint.h"
#include "gateway/gw_openai_read.h"
#include "lib/base/check.h"
#include "lib/base/hash.h"
#include "lib/base/str.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"

#define OPENAI_MAGIC           0x67776f61u
#define SCRATCH_CHUNK_BYTES    (64u << 10)
#define IDS_KEEP               65536u
#define COMPLETION_MAX_DEFAULT 16u /* what OpenAI's and other servers' clients expect */
#define TOOLS_TEXT_MAX         (16u << 20)
#define DETOKENIZED_MAX        (256u << 20)

void gw_openai_init(struct gw_openai *o, const struct gw_checkpoint *checkpoint,
                    const char *effort_default, bool clear_thinking)
{
    memset(o, 0, sizeof(*o));
    o->magic = OPENAI_MAGIC;
    o->checkpoint = checkpoint;
    o->effort_default = effort_default;
    o->clear_thinking = clear_thinking;
    arena_init(&o->scratch, SCRATCH_CHUNK_BYTES, GW_PARSE_BYTES_MAX);
    token_ids_init(&o->ids, MSG_IDS_MAX);
}

void gw_openai_fini(struct gw_openai *o)
{
    CHECK_OBJ(o, OPENAI_MAGIC);
    arena_fini(&o->scratch);
    token_ids_fini(&o->ids);
    o->magic = 0;
}

/* A long prompt's memory is given back, a usual one's kept. */
static void openai_clear(struct gw_openai *o)
{
    arena_reset(&o->scratch);
    if (o->ids.capacity > IDS_KEEP) {
        token_ids_fini(&o->ids);
        token_ids_init(&o->ids, MSG_IDS_MAX);
    }
    token_ids_clear(&o->ids);
}

static void set_defaults(struct gw_reader *rd)
{
    struct gw_request *r = rd->r;
    const struct gw_checkpoint *c = rd->o->checkpoint;
    r->endpoint = rd->in->endpoint;
    memcpy(r->id, rd->in->request_id, strlen(rd->in->request_id) + 1);
    memcpy(r->model, c->name, strlen(c->name) + 1);
    r->n = 1;
    r->include_reasoning = r->skip_special = r->parallel_calls = true;
    struct msg_sampling *s = &r->base.sampling;
    s->temperature = c->temperature;
    s->top_p = c->top_p;
    s->top_k = c->top_k;
    s->min_p = c->min_p;
    s->repetition_penalty = c->repetition_penalty;
    r->base.spec = "";
    r->base.cache_salt = "";
    r->base.session_key = "";
    r->base.effort = "";
    r->base.client_id = "";
}

static bool tool_named(const struct json *tools, const struct json *name)
{
    if (!json_is(tools, JSON_ARRAY) || !json_is(name, JSON_STRING))
        return false;
    for (const struct json *t = tools->child; t; t = t->next) {
        const struct json *n = json_get(json_get(t, "function"), "name");
        if (json_is(n, JSON_STRING) && n->bytes == name->bytes &&
            memcmp(n->text, name->text, n->bytes) == 0)
            return true;
    }
    return false;
}

/* Forced calls need structured output: refused until it exists. */
static bool check_tool_choice(struct gw_reader *rd)
{
    const struct json *v = rd->tool_choice;
    bool tools = json_is(rd->tools, JSON_ARRAY) && rd->tools->count > 0;
    rd->field = "tool_choice";
    rd->r->tools_on = tools;
    if (!v || json_string_is(v, "auto"))
        return true;
    if (json_string_is(v, "none")) {
        rd->r->tools_on = false;
        return true;
    }
    bool named = json_is(v, JSON_OBJECT);
    if (!named && !json_string_is(v, "required"))
        return gw_reader_bad(rd, "must be none, auto, required or a function");
    if (!tools)
        return gw_reader_bad(rd, "a call is demanded, but there are no tools");
    if (named && !tool_named(rd->tools, json_get(json_get(v, "function"), "name")))
        return gw_reader_bad(rd, "names no function of tools");
    return gw_reader_unsupported(rd, "forced calls are not supported; use auto or none");
}

/* The parser needs the schemas for the whole answer: a tree of their own in the request. */
static bool keep_tools(struct gw_reader *rd)
{
    struct gw_request *r = rd->r;
    if (!r->tools_on)
        return true;
    struct str text;
    str_init(&text, TOOLS_TEXT_MAX);
    json_write_compact(&text, rd->tools);
    char *copy = text.overflow ? NULL : arena_strndup(&r->arena, text.text, text.bytes);
    size_t bytes = text.bytes;
    str_fini(&text);
    if (!copy)
        return gw_reader_nomem(rd);
    struct json *tree = NULL;
    struct json_error error;
    struct json_options options = {.depth_max = 256};
    enum err e = json_parse(&r->arena, &options, copy, bytes, &tree, &error);
    if (e == ERR_NOMEM)
        return gw_reader_nomem(rd);
    CHECK(e == ERR_OK); /* written by us from a checked tree */
    r->tools = tree;
    return true;
}

/* session_id or its header, else prompt_cache_key, else user, whatever is not empty; long ones by
 * their hash. */
static bool set_session(struct gw_reader *rd)
{
    const char *key = rd->session_id                      ? rd->session_id
                      : rd->in->session_id[0]             ? rd->in->session_id
                      : rd->cache_key && rd->cache_key[0] ? rd->cache_key
                      : rd->user                          ? rd->user
                                                          : "";
    size_t bytes = strlen(key);
    char hex[33];
    if (bytes >= MSG_TEXT_MAX || utf8_valid_prefix(key, bytes) != bytes) {
        struct hash128 h = hash_xxh3_once(key, bytes);
        hex_encode(h.bytes, sizeof(h.bytes), hex);
        key = hex;
        bytes = 32;
    }
    rd->r->base.session_key = arena_strndup(&rd->r->arena, key, bytes);
    rd->r->base.client_id =
        arena_strndup(&rd->r->arena, rd->in->client_id, strlen(rd->in->client_id));
    return (rd->r->base.session_key && rd->r->base.client_id) || gw_reader_nomem(rd);
}

/* A prompt's own logprobs would need the logits of all of its rows; no token asked for makes sense
 * only where the prompt itself is the answer. */
static bool check_echo(struct gw_reader *rd)
{
    struct gw_request *r = rd->r;
    if (r->endpoint == GW_COMPLETION && r->echo && r->logprobs) {
        rd->field = "logprobs";
        return gw_reader_unsupported(rd, "are not supported together with echo");
    }
    if (!rd->no_tokens || rd->max_completion_tokens)
        return true;
    rd->field = "max_tokens";
    if (!r->echo || r->min_tokens)
        return gw_reader_bad(rd, "must be at least 1, or 0 with echo and without min_tokens");
    r->echo_only = true;
    return true;
}

static bool set_limits(struct gw_reader *rd)
{
    struct gw_request *r = rd->r;
    r->max_tokens = rd->max_completion_tokens ? rd->max_completion_tokens : rd->max_tokens;
    if (!r->max_tokens && r->endpoint == GW_COMPLETION && !r->echo_only)
        r->max_tokens = COMPLETION_MAX_DEFAULT;
    if (r->max_tokens && r->min_tokens > r->max_tokens) {
        rd->field = "min_tokens";
        return gw_reader_bad(rd, "is above max_tokens");
    }
    r->base.limits.ignore_eos = r->ignore_eos;
    const struct gw_checkpoint *c = rd->o->checkpoint;
    if (r->endpoint == GW_CHAT && c->has_assistant_id && !r->ignore_eos) {
        uint32_t *ids = (uint32_t *)r->base.limits.stop_ids;
        if (!ids && !(ids = arena_alloc_array(&r->arena, 1, sizeof(*ids))))
            return gw_reader_nomem(rd);
        ids[r->base.limits.stop_id_count++] = c->assistant_id;
        r->base.limits.stop_ids = ids;
    }
    return true;
}

static bool check_together(struct gw_reader *rd)
{
    struct gw_request *r = rd->r;
    if (rd->best_of_given && rd->best_of != r->n) {
        rd->field = "best_of";
        return gw_reader_unsupported(rd, "must be equal to n");
    }
    if (r->endpoint == GW_CHAT && r->top_logprobs && !r->logprobs) {
        rd->field = "top_logprobs";
        return gw_reader_bad(rd, "needs logprobs: true");
    }
    if (!rd->seed_given)
        r->seed = rd->in->seed;
    r->base.sampling.seed = r->seed;
    r->base.sampling.logprobs = r->logprobs;
    r->base.sampling.top_logprobs = r->logprobs ? r->top_logprobs : 0;
    return check_echo(rd) && set_session(rd) && set_limits(rd) && check_tool_choice(rd) &&
           keep_tools(rd);
}

static bool read_prompts(struct gw_reader *rd)
{
    struct gw_request *r = rd->r;
    if (r->endpoint == GW_CHAT) {
        struct gw_prompt *prompt = arena_alloc(&r->arena, sizeof(*prompt));
        if (!prompt)
            return gw_reader_nomem(rd);
        if (!rd->messages) {
            gw_refuse_invalid(rd->refusal, "missing_field", "messages", "messages: is required");
            return false;
        }
        if (!gw_reader_chat_prompt(rd, prompt))
            return false;
        r->prompts = prompt;
        r->prompt_count = 1;
    } else if (!gw_reader_prompts(rd)) {
        return false;
    }
    r->choice_count = r->prompt_count * r->n;
    if (r->choice_count > GW_CHOICES_MAX) {
        rd->field = "n";
        return gw_reader_bad(rd, "prompts times n is above %u", GW_CHOICES_MAX);
    }
    return true;
}

static void reader_init(struct gw_reader *rd, struct gw_openai *o,
                        const struct gw_openai_input *input, struct gw_request *r,
                        struct gw_refusal *refusal)
{
    CHECK_OBJ(o, OPENAI_MAGIC);
    CHECK(input->window >= 2 && input->session_id && input->request_id && input->client_id);
    memset(rd, 0, sizeof(*rd));
    rd->o = o;
    rd->in = input;
    rd->r = r;
    rd->refusal = refusal;
    rd->field = "";
    rd->add_generation_prompt = true;
}

bool gw_openai_request(struct gw_openai *o, const struct gw_openai_input *input,
                       struct gw_request *r, struct gw_refusal *ret_refusal)
{
    struct gw_reader rd;
    struct json *body = NULL;
    CHECK_OBJ(r, GW_REQUEST_MAGIC);
    CHECK(gw_request_id_valid(input->request_id, strlen(input->request_id)));
    reader_init(&rd, o, input, r, ret_refusal);
    set_defaults(&rd);
    bool ok = gw_reader_body(&rd, &body) && gw_reader_fields(&rd, body) && check_together(&rd) &&
              read_prompts(&rd);
    r->unknown_fields = rd.unknown_fields;
    if (ok && (o->scratch.overflow || r->arena.overflow))
        ok = gw_reader_nomem(&rd);
    openai_clear(o);
    return ok;
}

/* ---- /tokenize and /detokenize ---- */

static void write_tokens(struct gw_reader *rd, struct str *out)
{
    const struct token_ids *ids = &rd->o->ids;
    str_add_format(out, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", ids->count,
                   rd->in->window);
    for (size_t i = 0; i < ids->count; i++)
        str_add_format(out, "%s%u", i ? "," : "", ids->ids[i]);
    str_add_text(out, "],\"token_strs\":");
    if (!rd->token_strings) {
        str_add_text(out, "null}");
        return;
    }
    struct str text;
    str_init(&text, 4096);
    for (size_t i = 0; i < ids->count; i++) {
        struct utf8_stream u = {0};
        size_t bytes = 0;
        const uint8_t *raw = tokenizer_bytes(rd->o->checkpoint->tokenizer, ids->ids[i], &bytes);
        str_clear(&text);
        utf8_stream_add(&u, raw, bytes, &text);
        utf8_stream_end(&u, &text);
        str_add_char(out, i ? ',' : '[');
        json_write_string(out, text.bytes ? text.text : "", text.bytes);
    }
    str_add_text(out, ids->count ? "]}" : "[]}");
    str_fini(&text);
}

static bool tokenize(struct gw_reader *rd, struct str *out)
{
    if (rd->messages && rd->prompt) {
        rd->field = "prompt";
        return gw_reader_bad(rd, "cannot stand beside messages");
    }
    if (rd->messages) {
        if (!gw_reader_chat_prompt(rd, NULL))
            return false;
    } else if (!rd->prompt) {
        gw_refuse_invalid(rd->refusal, "missing_field", "prompt",
                          "prompt: is required, or messages");
        return false;
    } else {
        rd->field = "prompt";
        if (!json_is(rd->prompt, JSON_STRING))
            return gw_reader_bad(rd, "must be a string");
        if (!gw_reader_encode(rd, "prompt", rd->prompt->text, rd->prompt->bytes))
            return false;
    }
    write_tokens(rd, out);
    return true;
}

static bool detokenize(struct gw_reader *rd, struct str *out)
{
    rd->field = "tokens";
    if (!rd->tokens) {
        gw_refuse_invalid(rd->refusal, "missing_field", "tokens", "tokens: is required");
        return false;
    }
    if (!json_is(rd->tokens, JSON_ARRAY))
        return gw_reader_bad(rd, "must be a list of token ids");
    struct detokenizer d;
    struct str text;
    str_init(&text, DETOKENIZED_MAX);
    detokenizer_init(&d, rd->o->checkpoint->tokenizer, false);
    bool ok = true;
    for (const struct json *v = rd->tokens->child; v && ok; v = v->next) {
        uint64_t id = 0;
        ok = json_u64(v, &id) && id <= UINT32_MAX &&
             detokenizer_add(&d, (uint32_t)id, &text) == ERR_OK;
        if (text.overflow)
            break;
    }
    if (ok)
        detokenizer_end(&d, &text);
    if (ok && !text.overflow) {
        str_add_text(out, "{\"prompt\":");
        json_write_string(out, text.bytes ? text.text : "", text.bytes);
        str_add_char(out, '}');
    }
    bool whole = !text.overflow;
    str_fini(&text);
    if (!whole)
        return gw_reader_bad(rd, "their text is above %u bytes", DETOKENIZED_MAX);
    return ok || gw_reader_bad(rd, "every entry must be a token id of this model");
}

bool gw_openai_tokenize(struct gw_openai *o, const struct gw_openai_input *input, struct str *out,
                        struct gw_refusal *ret_refusal)
{
    struct gw_reader rd;
    struct json *body = NULL;
    reader_init(&rd, o, input, NULL, ret_refusal);
    bool ok = gw_reader_body(&rd, &body) && gw_reader_fields(&rd, body) &&
              (input->endpoint == GW_TOKENIZE ? tokenize(&rd, out) : detokenize(&rd, out));
    if (ok && out->overflow)
        ok = gw_reader_nomem(&rd);
    openai_clear(o);
    return ok;
}
