/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_openai_read.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "gateway/gw_checkpoint.h"
#include "lib/base/check.h"
#include "lib/base/str.h"

#define SPEC_DRAFTS_MAX '7'

bool gw_reader_bad(struct gw_reader *rd, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    gw_refuse_invalid(rd->refusal, "invalid_value", rd->field, "%s: %s", rd->field, text);
    return false;
}

bool gw_reader_unsupported(struct gw_reader *rd, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    gw_refuse_invalid(rd->refusal, "unsupported_value", rd->field, "%s: %s", rd->field, text);
    return false;
}

bool gw_reader_nomem(struct gw_reader *rd)
{
    gw_refuse(rd->refusal, 413, "invalid_request_error", "body_too_large", NULL,
              "the request is too large to be taken apart");
    return false;
}

bool gw_read_bool(struct gw_reader *rd, const struct json *v, bool *ret)
{
    return json_bool(v, ret) || gw_reader_bad(rd, "must be true or false");
}

bool gw_read_u32(struct gw_reader *rd, const struct json *v, uint32_t min, uint32_t max,
                 uint32_t *ret)
{
    double d = 0;
    if (!json_f64(v, &d) || d != floor(d))
        return gw_reader_bad(rd, "must be an integer");
    if (d < min || d > max)
        return gw_reader_bad(rd, "must be between %u and %u", min, max);
    *ret = (uint32_t)d;
    return true;
}

bool gw_read_f64(struct gw_reader *rd, const struct json *v, double min, double max, double *ret)
{
    double d = 0;
    if (!json_f64(v, &d))
        return gw_reader_bad(rd, "must be a number");
    if (d < min || d > max)
        return gw_reader_bad(rd, "must be between %g and %g", min, max);
    *ret = d;
    return true;
}

bool gw_read_text(struct gw_reader *rd, const struct json *v, uint32_t min_bytes,
                  uint32_t max_bytes, const char **ret)
{
    if (!json_is(v, JSON_STRING))
        return gw_reader_bad(rd, "must be a string");
    if (v->bytes < min_bytes)
        return gw_reader_bad(rd, "must not be empty");
    if (v->bytes > max_bytes)
        return gw_reader_bad(rd, "must be at most %u bytes long", max_bytes);
    if (memchr(v->text, '\0', v->bytes))
        return gw_reader_bad(rd, "must not hold NUL");
    *ret = arena_strndup(&rd->o->scratch, v->text, v->bytes);
    return *ret || gw_reader_nomem(rd);
}

/* ---- fields that act ---- */

static bool f_messages(struct gw_reader *rd, const struct json *v)
{
    rd->messages = v;
    return true;
}

static bool f_prompt(struct gw_reader *rd, const struct json *v)
{
    rd->prompt = v;
    return true;
}

static bool f_tokens(struct gw_reader *rd, const struct json *v)
{
    rd->tokens = v;
    return true;
}

static bool f_tools(struct gw_reader *rd, const struct json *v)
{
    rd->tools = v;
    return true;
}

static bool f_tool_choice(struct gw_reader *rd, const struct json *v)
{
    rd->tool_choice = v;
    return true;
}

static bool f_kwargs(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_OBJECT))
        return gw_reader_bad(rd, "must be an object");
    const struct json *effort = json_get(v, "reasoning_effort");
    if (effort && !json_is(effort, JSON_NULL) && !json_is(effort, JSON_STRING)) {
        rd->field = "chat_template_kwargs.reasoning_effort";
        return gw_reader_bad(rd, "must be a string");
    }
    rd->kwargs = v;
    return true;
}

static bool f_effort(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_STRING))
        return gw_reader_bad(rd, "must be a string");
    rd->effort = v;
    return true;
}

static bool f_model(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_STRING))
        return gw_reader_bad(rd, "must be a string");
    const struct gw_checkpoint *c = rd->o->checkpoint;
    if (json_string_is(v, c->name))
        return true;
    gw_refuse(rd->refusal, 404, "invalid_request_error", "model_not_found", "model",
              "The model `%.*s` does not exist; this server has `%s`.",
              v->bytes > 100 ? 100 : (int)v->bytes, v->text, c->name);
    return false;
}

/* Whatever is beyond the window is cut to it later, however large. */
static bool read_token_limit(struct gw_reader *rd, const struct json *v, uint32_t min,
                             uint32_t *ret)
{
    double d = 0;
    if (!json_f64(v, &d) || d != floor(d))
        return gw_reader_bad(rd, "must be an integer");
    if (d < min || d > 9007199254740992.0)
        return gw_reader_bad(rd, "must be at least %u", min);
    *ret = d < MSG_IDS_MAX ? (uint32_t)d : MSG_IDS_MAX;
    return true;
}

static bool f_max_tokens(struct gw_reader *rd, const struct json *v)
{
    double d = 1;
    if (rd->in->endpoint == GW_COMPLETION && json_f64(v, &d) && d == 0) {
        rd->no_tokens = true; /* nothing but the prompt: with echo only, see check_together */
        return true;
    }
    return read_token_limit(rd, v, 1, &rd->max_tokens);
}

static bool f_max_completion_tokens(struct gw_reader *rd, const struct json *v)
{
    return read_token_limit(rd, v, 1, &rd->max_completion_tokens);
}

static bool f_min_tokens(struct gw_reader *rd, const struct json *v)
{
    return gw_read_u32(rd, v, 0, MSG_IDS_MAX, &rd->r->min_tokens);
}

static bool f_temperature(struct gw_reader *rd, const struct json *v)
{
    return gw_read_f64(rd, v, 0, 2, &rd->r->base.sampling.temperature);
}

static bool f_top_p(struct gw_reader *rd, const struct json *v)
{
    double d = 0;
    if (!gw_read_f64(rd, v, 0, 1, &d))
        return false;
    if (d <= 0)
        return gw_reader_bad(rd, "must be above 0");
    rd->r->base.sampling.top_p = d;
    return true;
}

static bool f_top_k(struct gw_reader *rd, const struct json *v)
{
    double d = 0;
    if (!json_f64(v, &d) || d != floor(d))
        return gw_reader_bad(rd, "must be an integer");
    if (d < -1 || d > UINT32_MAX)
        return gw_reader_bad(rd, "must be -1, 0 (both: off) or a positive number");
    rd->r->base.sampling.top_k = d > 0 ? (uint32_t)d : 0;
    return true;
}

static bool f_min_p(struct gw_reader *rd, const struct json *v)
{
    return gw_read_f64(rd, v, 0, 1, &rd->r->base.sampling.min_p);
}

static bool f_n(struct gw_reader *rd, const struct json *v)
{
    return gw_read_u32(rd, v, 1, GW_N_MAX, &rd->r->n);
}

static bool f_best_of(struct gw_reader *rd, const struct json *v)
{
    rd->best_of_given = true;
    return gw_read_u32(rd, v, 1, UINT32_MAX, &rd->best_of);
}

static bool f_seed(struct gw_reader *rd, const struct json *v)
{
    int64_t i = 0;
    uint64_t u = 0;
    if (json_i64(v, &i))
        u = (uint64_t)i;
    else if (!json_u64(v, &u))
        return gw_reader_bad(rd, "must be an integer of at most 64 bits");
    rd->r->seed = u;
    rd->seed_given = true;
    return true;
}

static bool f_presence(struct gw_reader *rd, const struct json *v)
{
    return gw_read_f64(rd, v, -2, 2, &rd->r->base.sampling.presence_penalty);
}

static bool f_frequency(struct gw_reader *rd, const struct json *v)
{
    return gw_read_f64(rd, v, -2, 2, &rd->r->base.sampling.frequency_penalty);
}

static bool f_repetition(struct gw_reader *rd, const struct json *v)
{
    double d = 0;
    if (!gw_read_f64(rd, v, 0, 10, &d))
        return false;
    if (d <= 0)
        return gw_reader_bad(rd, "must be above 0");
    rd->r->base.sampling.repetition_penalty = d;
    return true;
}

static bool f_logit_bias(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_OBJECT))
        return gw_reader_bad(rd, "must be an object of token id: bias");
    if (v->count > MSG_BIAS_MAX)
        return gw_reader_bad(rd, "has more than %u entries", MSG_BIAS_MAX);
    uint32_t *ids = arena_alloc_array(&rd->r->arena, v->count + 1, sizeof(*ids));
    float *values = arena_alloc_array(&rd->r->arena, v->count + 1, sizeof(*values));
    if (!ids || !values)
        return gw_reader_nomem(rd);
    uint32_t count = 0;
    for (const struct json *m = v->child; m; m = m->next) {
        uint64_t id = 0;
        double bias = 0;
        if (!text_to_u64(m->key, m->key_bytes, &id) || id >= rd->o->checkpoint->id_count)
            return gw_reader_bad(rd, "`%.*s` is no token id of this model",
                                 m->key_bytes > 40 ? 40 : (int)m->key_bytes, m->key);
        if (!json_f64(m, &bias) || bias < -100 || bias > 100)
            return gw_reader_bad(rd, "the bias of %u must be between -100 and 100", (uint32_t)id);
        ids[count] = (uint32_t)id;
        values[count++] = (float)bias;
    }
    rd->r->base.sampling.bias_ids = ids;
    rd->r->base.sampling.bias_values = values;
    rd->r->base.sampling.bias_count = count;
    return true;
}

static bool add_stop(struct gw_reader *rd, const struct json *v)
{
    struct gw_request *r = rd->r;
    if (!json_is(v, JSON_STRING))
        return gw_reader_bad(rd, "must be a string or a list of strings");
    if (v->bytes == 0)
        return gw_reader_bad(rd, "a stop string must not be empty");
    if (v->bytes > GW_STOP_BYTES_MAX)
        return gw_reader_bad(rd, "a stop string must be at most %u bytes long", GW_STOP_BYTES_MAX);
    if (r->stop_count == GW_STOPS_MAX)
        return gw_reader_bad(rd, "at most %u stop strings", GW_STOPS_MAX);
    char *text = arena_strndup(&r->arena, v->text, v->bytes);
    if (!text)
        return gw_reader_nomem(rd);
    r->stops[r->stop_count++] = (struct gw_parse_stop){text, v->bytes};
    return true;
}

static bool f_stop(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_ARRAY))
        return add_stop(rd, v);
    for (const struct json *s = v->child; s; s = s->next)
        if (!add_stop(rd, s))
            return false;
    return true;
}

static bool f_stop_ids(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_ARRAY))
        return gw_reader_bad(rd, "must be a list of token ids");
    if (v->count > MSG_STOP_IDS_MAX - 1)
        return gw_reader_bad(rd, "at most %u token ids", MSG_STOP_IDS_MAX - 1);
    uint32_t *ids = arena_alloc_array(&rd->r->arena, v->count + 1, sizeof(*ids));
    if (!ids)
        return gw_reader_nomem(rd);
    uint32_t count = 0;
    for (const struct json *s = v->child; s; s = s->next) {
        uint64_t id = 0;
        if (!json_u64(s, &id) || id >= rd->o->checkpoint->id_count)
            return gw_reader_bad(rd, "every entry must be a token id of this model");
        ids[count++] = (uint32_t)id;
    }
    rd->r->base.limits.stop_ids = ids; /* room for one more */
    rd->r->base.limits.stop_id_count = count;
    return true;
}

static bool f_include_stop(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->include_stop);
}

static bool f_ignore_eos(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->ignore_eos);
}

static bool f_logprobs(struct gw_reader *rd, const struct json *v)
{
    rd->logprobs = v;
    if (rd->in->endpoint == GW_CHAT)
        return gw_read_bool(rd, v, &rd->r->logprobs);
    rd->r->logprobs = true;
    return gw_read_u32(rd, v, 0, MSG_TOP_LOGPROBS_MAX, &rd->r->top_logprobs);
}

static bool f_top_logprobs(struct gw_reader *rd, const struct json *v)
{
    return gw_read_u32(rd, v, 0, MSG_TOP_LOGPROBS_MAX, &rd->r->top_logprobs);
}

static bool f_tokens_as_ids(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->tokens_as_ids);
}

static bool f_return_ids(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->return_token_ids);
}

static bool f_stream(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->stream);
}

static bool f_stream_options(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_OBJECT))
        return gw_reader_bad(rd, "must be an object");
    const struct json *usage = json_get(v, "include_usage");
    const struct json *running = json_get(v, "continuous_usage_stats");
    if (usage && !json_is(usage, JSON_NULL)) {
        rd->field = "stream_options.include_usage";
        if (!gw_read_bool(rd, usage, &rd->r->include_usage))
            return false;
    }
    if (running && !json_is(running, JSON_NULL)) {
        rd->field = "stream_options.continuous_usage_stats";
        if (!gw_read_bool(rd, running, &rd->r->continuous_usage))
            return false;
    }
    return true;
}

static bool f_parallel(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->parallel_calls);
}

static bool f_response_format(struct gw_reader *rd, const struct json *v)
{
    const struct json *type = json_get(v, "type");
    if (!json_is(v, JSON_OBJECT) || !json_is(type, JSON_STRING))
        return gw_reader_bad(rd, "must be an object with a type");
    if (json_string_is(type, "text"))
        return true;
    if (json_string_is(type, "json_schema") &&
        !json_is(json_get(json_get(v, "json_schema"), "schema"), JSON_OBJECT))
        return gw_reader_bad(rd, "json_schema needs an object with a schema");
    return gw_reader_unsupported(rd, "only {\"type\": \"text\"} is supported");
}

static bool f_include_reasoning(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->include_reasoning);
}

static bool f_skip_special(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->r->skip_special);
}

static bool f_echo(struct gw_reader *rd, const struct json *v)
{
    if (!gw_read_bool(rd, v, &rd->r->echo))
        return false;
    if (rd->r->echo && rd->in->endpoint == GW_CHAT)
        return gw_reader_unsupported(rd, "is for /v1/completions only");
    return true;
}

static bool f_priority(struct gw_reader *rd, const struct json *v)
{
    int64_t i = 0;
    if (!json_i64(v, &i) || i < INT32_MIN || i > INT32_MAX)
        return gw_reader_bad(rd, "must be an integer of 32 bits");
    rd->r->base.priority = (int32_t)i;
    return true;
}

static bool f_session(struct gw_reader *rd, const struct json *v)
{
    return gw_read_text(rd, v, 1, GW_SESSION_BYTES_MAX, &rd->session_id);
}

static bool f_cache_key(struct gw_reader *rd, const struct json *v)
{
    return gw_read_text(rd, v, 0, 4096, &rd->cache_key);
}

static bool f_user(struct gw_reader *rd, const struct json *v)
{
    return gw_read_text(rd, v, 0, 4096, &rd->user);
}

static bool f_salt(struct gw_reader *rd, const struct json *v)
{
    const char *text = NULL;
    if (!gw_read_text(rd, v, 1, MSG_TEXT_MAX - 1, &text))
        return false;
    rd->r->base.cache_salt = arena_strndup(&rd->r->arena, text, strlen(text));
    return rd->r->base.cache_salt || gw_reader_nomem(rd);
}

static bool f_request_id(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_STRING) || !gw_request_id_valid(v->text, v->bytes))
        return gw_reader_bad(rd, "must be 1 to %u visible ASCII characters", GW_REQUEST_ID_BYTES);
    memcpy(rd->r->id, v->text, v->bytes);
    rd->r->id[v->bytes] = '\0';
    return true;
}

static bool spec_valid(const char *s)
{
    if (strcmp(s, "off") == 0 || strcmp(s, "ema") == 0 || strcmp(s, "goodput") == 0)
        return true;
    static const char *const sources[] = {"fixed:", "ngram:", "mtp:"};
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        const char *digit = s + strlen(sources[i]);
        if (strncmp(s, sources[i], strlen(sources[i])) == 0)
            return digit[0] >= '0' && digit[0] <= SPEC_DRAFTS_MAX && digit[1] == '\0';
    }
    return false;
}

static bool f_spec(struct gw_reader *rd, const struct json *v)
{
    const char *text = NULL;
    if (!gw_read_text(rd, v, 1, MSG_TEXT_MAX - 1, &text))
        return false;
    if (!spec_valid(text))
        return gw_reader_bad(rd, "must be off, fixed:K, ngram:K, mtp:K (K 0 to 7), ema or goodput");
    rd->r->base.spec = arena_strndup(&rd->r->arena, text, strlen(text));
    return rd->r->base.spec || gw_reader_nomem(rd);
}

static bool f_generation_prompt(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->add_generation_prompt);
}

static bool f_token_strings(struct gw_reader *rd, const struct json *v)
{
    return gw_read_bool(rd, v, &rd->token_strings);
}

/* ---- fields without effect, and fields that cannot be done ---- */

/* Without effect, but of the right type. */
static bool f_no_bool(struct gw_reader *rd, const struct json *v)
{
    bool unused;
    return gw_read_bool(rd, v, &unused);
}

static bool f_no_text(struct gw_reader *rd, const struct json *v)
{
    return json_is(v, JSON_STRING) || gw_reader_bad(rd, "must be a string");
}

static bool f_no_object(struct gw_reader *rd, const struct json *v)
{
    return json_is(v, JSON_OBJECT) || gw_reader_bad(rd, "must be an object");
}

static bool f_no_list(struct gw_reader *rd, const struct json *v)
{
    if (!json_is(v, JSON_ARRAY))
        return gw_reader_bad(rd, "must be a list of strings");
    for (const struct json *item = v->child; item; item = item->next)
        if (!json_is(item, JSON_STRING))
            return gw_reader_bad(rd, "must be a list of strings");
    return true;
}

/* Asks for nothing: false, "", [], {} or 0. */
static bool is_empty(const struct json *v)
{
    double d = 1;
    return (json_is(v, JSON_BOOL) && !v->boolean) || (json_is(v, JSON_STRING) && v->bytes == 0) ||
           ((json_is(v, JSON_ARRAY) || json_is(v, JSON_OBJECT)) && v->count == 0) ||
           (json_f64(v, &d) && d == 0);
}

static bool f_refused(struct gw_reader *rd, const struct json *v)
{
    return is_empty(v) || gw_reader_unsupported(rd, "is not supported by this server");
}

static bool f_template(struct gw_reader *rd, const struct json *v)
{
    return gw_reader_unsupported(rd, "templates of a client are refused");
}

/* Any value asks for something, 0 and [] too. */
static bool f_never(struct gw_reader *rd, const struct json *v)
{
    return gw_reader_unsupported(rd, "is not supported by this server");
}

#define C 1u /* chat */
#define T 2u /* completions */
#define K 4u /* tokenize */
#define D 8u /* detokenize */

struct field {
    const char *name;
    uint32_t endpoints;
    bool (*read)(struct gw_reader *rd, const struct json *v);
};

static const struct field fields[] = {
    {"messages", C | K, f_messages},
    {"prompt", T | K, f_prompt},
    {"tokens", D, f_tokens},
    {"model", C | T | K | D, f_model},
    {"max_tokens", C | T, f_max_tokens},
    {"max_completion_tokens", C | T, f_max_completion_tokens},
    {"min_tokens", C | T, f_min_tokens},
    {"temperature", C | T, f_temperature},
    {"top_p", C | T, f_top_p},
    {"top_k", C | T, f_top_k},
    {"min_p", C | T, f_min_p},
    {"n", C | T, f_n},
    {"best_of", C | T, f_best_of},
    {"seed", C | T, f_seed},
    {"presence_penalty", C | T, f_presence},
    {"frequency_penalty", C | T, f_frequency},
    {"repetition_penalty", C | T, f_repetition},
    {"logit_bias", C | T, f_logit_bias},
    {"stop", C | T, f_stop},
    {"stop_token_ids", C | T, f_stop_ids},
    {"include_stop_str_in_output", C | T, f_include_stop},
    {"ignore_eos", C | T, f_ignore_eos},
    {"logprobs", C | T, f_logprobs},
    {"top_logprobs", C, f_top_logprobs},
    {"return_tokens_as_token_ids", C | T, f_tokens_as_ids},
    {"return_token_ids", C | T, f_return_ids},
    {"stream", C | T, f_stream},
    {"stream_options", C | T, f_stream_options},
    {"tools", C | K, f_tools},
    {"tool_choice", C, f_tool_choice},
    {"parallel_tool_calls", C, f_parallel},
    {"response_format", C | T, f_response_format},
    {"reasoning_effort", C | K, f_effort},
    {"chat_template_kwargs", C | K, f_kwargs},
    {"include_reasoning", C, f_include_reasoning},
    {"skip_special_tokens", C | T, f_skip_special},
    {"echo", C | T, f_echo},
    {"priority", C | T, f_priority},
    {"session_id", C | T, f_session},
    {"prompt_cache_key", C | T, f_cache_key},
    {"user", C | T, f_user},
    {"cache_salt", C | T, f_salt},
    {"request_id", C | T, f_request_id},
    {"spec", C | T, f_spec},
    {"add_generation_prompt", C | K, f_generation_prompt},
    {"return_token_strs", K, f_token_strings},
    /* without effect */
    {"metadata", C | T, f_no_object},
    {"store", C | T, f_no_bool},
    {"service_tier", C | T, f_no_text},
    {"prediction", C | T, f_no_object},
    {"verbosity", C | T, f_no_text},
    {"safety_identifier", C | T, f_no_text},
    {"modalities", C | T, f_no_list},
    {"audio", C | T, f_no_object},
    {"web_search_options", C | T, f_no_object},
    {"spaces_between_special_tokens", C | T, f_no_bool},
    {"add_special_tokens", C | T | K, f_no_bool}, /* this tokenizer adds none */
    /* refused */
    {"suffix", T, f_refused},
    {"functions", C, f_refused},
    {"function_call", C, f_refused},
    {"bad_words", C | T, f_refused},
    {"allowed_token_ids", C | T, f_never},
    {"thinking_token_budget", C | T, f_never},
    {"repetition_detection", C | T, f_refused},
    {"prompt_logprobs", C | T, f_never},
    {"truncate_prompt_tokens", C | T, f_never},
    {"documents", C | T | K, f_refused},
    {"continue_final_message", C | K, f_refused},
    {"chat_template", C | K, f_template},
    {"structured_outputs", C | T, f_refused},
    {"guided_json", C | T, f_refused},
    {"guided_regex", C | T, f_refused},
    {"guided_choice", C | T, f_refused},
    {"guided_grammar", C | T, f_refused},
    {"kv_transfer_params", C | T, f_refused},
    {"vllm_xargs", C | T, f_refused},
    {"use_beam_search", C | T, f_refused},
};

static uint32_t endpoint_bit(enum gw_endpoint e)
{
    return e == GW_CHAT ? C : e == GW_COMPLETION ? T : e == GW_TOKENIZE ? K : D;
}

static const struct field *find_field(const struct json *m, uint32_t bit)
{
    for (size_t i = 0; i < ARRAY_COUNT(fields); i++)
        if ((fields[i].endpoints & bit) && strlen(fields[i].name) == m->key_bytes &&
            memcmp(fields[i].name, m->key, m->key_bytes) == 0)
            return &fields[i];
    return NULL;
}

bool gw_reader_fields(struct gw_reader *rd, const struct json *body)
{
    uint32_t bit = endpoint_bit(rd->in->endpoint);
    for (const struct json *m = body->child; m; m = m->next) {
        const struct field *f = find_field(m, bit);
        if (!f) {
            rd->unknown_fields++;
            continue;
        }
        if (json_is(m, JSON_NULL))
            continue; /* null = absent */
        rd->field = f->name;
        if (!f->read(rd, m))
            return false;
    }
    return true;
}
