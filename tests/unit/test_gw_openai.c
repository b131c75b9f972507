/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_openai*: every malformed field is refused by name, good requests come out whole. */
#include "tests/unit/golden_lines.h"

#include <math.h>

#include "gateway/gw_checkpoint.h"
#include "gateway/gw_openai.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer.h"

static struct gw_checkpoint checkpoint;
static struct gw_openai openai;
static struct gw_request request;
static struct gw_refusal refusal;
static uint32_t window;

static bool read_body(enum gw_endpoint endpoint, const char *body, size_t bytes)
{
    const struct gw_openai_input in = {
        .endpoint = endpoint,
        .body = body,
        .body_bytes = bytes,
        .session_id = "",
        .request_id = "given",
        .client_id = "",
        .seed = 77,
        .window = window,
    };
    gw_request_reset(&request);
    memset(&refusal, 0, sizeof(refusal));
    return gw_openai_request(&openai, &in, &request, &refusal);
}

static bool read_text(enum gw_endpoint endpoint, const char *body)
{
    return read_body(endpoint, body, strlen(body));
}

/* A good body with one more member (a later one wins). */
static bool read_field(enum gw_endpoint endpoint, const char *member)
{
    char body[4096];
    snprintf(body, sizeof(body), "{%s,%s}",
             endpoint == GW_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
                                 : "\"prompt\":\"Hi\"",
             member);
    return read_text(endpoint, body);
}

static int setup(void **state)
{
    char path[4096];
    struct err_detail detail;
    golden_path(path, sizeof(path), "deploy/demo");
    if (gw_checkpoint_load(path, "tiny-glm", 0, &checkpoint, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    gw_openai_init(&openai, &checkpoint, "max", false);
    gw_request_init(&request, 64 << 20);
    window = 5000;
    return 0;
}

static int teardown(void **state)
{
    gw_request_fini(&request);
    gw_openai_fini(&openai);
    gw_checkpoint_fini(&checkpoint);
    return 0;
}

struct bad {
    const char *member;
    const char *param, *code;
};

#define HI   "{\"role\":\"user\",\"content\":\"Hi\"}"
#define TOOL "{\"type\":\"function\",\"function\":{\"name\":\"f\"}}"
#define V    "invalid_value"
#define U    "unsupported_value"

static const struct bad bad_both[] = {
    {"\"model\":5", "model", V},
    {"\"max_tokens\":0", "max_tokens", V},
    {"\"max_tokens\":-1", "max_tokens", V},
    {"\"max_tokens\":1.5", "max_tokens", V},
    {"\"max_tokens\":\"x\"", "max_tokens", V},
    {"\"max_completion_tokens\":0", "max_completion_tokens", V},
    {"\"min_tokens\":-1", "min_tokens", V},
    {"\"min_tokens\":9,\"max_tokens\":5", "min_tokens", V},
    {"\"temperature\":-1", "temperature", V},
    {"\"temperature\":101", "temperature", V},
    {"\"temperature\":\"hot\"", "temperature", V},
    {"\"temperature\":1e999", "temperature", V},
    {"\"top_p\":0", "top_p", V},
    {"\"top_p\":1.01", "top_p", V},
    {"\"top_k\":-2", "top_k", V},
    {"\"top_k\":2.5", "top_k", V},
    {"\"min_p\":-0.1", "min_p", V},
    {"\"min_p\":2", "min_p", V},
    {"\"n\":0", "n", V},
    {"\"n\":129", "n", V},
    {"\"n\":\"two\"", "n", V},
    {"\"best_of\":0", "best_of", V},
    {"\"best_of\":3", "best_of", U},
    {"\"seed\":1.5", "seed", V},
    {"\"seed\":18446744073709551616", "seed", V},
    {"\"seed\":\"x\"", "seed", V},
    {"\"presence_penalty\":2.1", "presence_penalty", V},
    {"\"frequency_penalty\":-3", "frequency_penalty", V},
    {"\"repetition_penalty\":0", "repetition_penalty", V},
    {"\"repetition_penalty\":11", "repetition_penalty", V},
    {"\"logit_bias\":[]", "logit_bias", V},
    {"\"logit_bias\":{\"x\":1}", "logit_bias", V},
    {"\"logit_bias\":{\"-1\":1}", "logit_bias", V},
    {"\"logit_bias\":{\"1\":101}", "logit_bias", V},
    {"\"logit_bias\":{\"99999\":1}", "logit_bias", V},
    {"\"stop\":5", "stop", V},
    {"\"stop\":\"\"", "stop", V},
    {"\"stop\":[\"a\",\"\"]", "stop", V},
    {"\"stop\":[1]", "stop", V},
    {"\"stop_token_ids\":5", "stop_token_ids", V},
    {"\"stop_token_ids\":[99999]", "stop_token_ids", V},
    {"\"stop_token_ids\":[1.5]", "stop_token_ids", V},
    {"\"include_stop_str_in_output\":1", "include_stop_str_in_output", V},
    {"\"ignore_eos\":\"x\"", "ignore_eos", V},
    {"\"logprobs\":\"x\"", "logprobs", V},
    {"\"return_token_ids\":0", "return_token_ids", V},
    {"\"return_tokens_as_token_ids\":0", "return_tokens_as_token_ids", V},
    {"\"stream\":1", "stream", V},
    {"\"stream_options\":[]", "stream_options", V},
    {"\"stream_options\":{\"include_usage\":1}", "stream_options.include_usage", V},
    {"\"stream_options\":{\"continuous_usage_stats\":1}", "stream_options.continuous_usage_stats",
     V},
    {"\"response_format\":5", "response_format", V},
    {"\"response_format\":{\"type\":\"json_object\"}", "response_format", U},
    {"\"response_format\":{\"type\":\"json_schema\"}", "response_format", V},
    {"\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{}}}",
     "response_format", U},
    {"\"skip_special_tokens\":3", "skip_special_tokens", V},
    {"\"echo\":3", "echo", V},
    {"\"priority\":\"x\"", "priority", V},
    {"\"priority\":4294967296", "priority", V},
    {"\"session_id\":5", "session_id", V},
    {"\"session_id\":\"\"", "session_id", V},
    {"\"session_id\":\"a\\u0000b\"", "session_id", V},
    {"\"prompt_cache_key\":5", "prompt_cache_key", V},
    {"\"user\":{}", "user", V},
    {"\"cache_salt\":\"\"", "cache_salt", V},
    {"\"request_id\":\"a b\"", "request_id", V},
    {"\"request_id\":\"\"", "request_id", V},
    {"\"spec\":\"fixed:8\"", "spec", V},
    {"\"spec\":\"fixed:\"", "spec", V},
    {"\"spec\":\"magic\"", "spec", V},
    {"\"spec\":\"mtp:8\"", "spec", V},
    {"\"spec\":\"mtp:\"", "spec", V},
    {"\"temperature\":2.1", "temperature", V},
    {"\"metadata\":5", "metadata", V},
    {"\"store\":1", "store", V},
    {"\"modalities\":[5]", "modalities", V},
    {"\"thinking_token_budget\":0", "thinking_token_budget", U},
    {"\"allowed_token_ids\":[]", "allowed_token_ids", U},
    {"\"bad_words\":[\"x\"]", "bad_words", U},
    {"\"allowed_token_ids\":[1]", "allowed_token_ids", U},
    {"\"thinking_token_budget\":5", "thinking_token_budget", U},
    {"\"repetition_detection\":{\"a\":1}", "repetition_detection", U},
    {"\"prompt_logprobs\":0", "prompt_logprobs", U},
    {"\"truncate_prompt_tokens\":5", "truncate_prompt_tokens", U},
    {"\"documents\":[{}]", "documents", U},
    {"\"structured_outputs\":{\"json\":{}}", "structured_outputs", U},
    {"\"guided_json\":{\"a\":1}", "guided_json", U},
    {"\"kv_transfer_params\":{\"a\":1}", "kv_transfer_params", U},
    {"\"vllm_xargs\":{\"a\":1}", "vllm_xargs", U},
    {"\"use_beam_search\":true", "use_beam_search", U},
};

static const struct bad bad_chat[] = {
    {"\"messages\":[]", "messages", "missing_field"},
    {"\"messages\":null", "messages", "missing_field"},
    {"\"messages\":\"x\"", "messages", V},
    {"\"messages\":[1]", "messages[0]", V},
    {"\"messages\":[{}]", "messages[0].role", V},
    {"\"messages\":[" HI ",{\"role\":\"wizard\",\"content\":\"x\"}]", "messages[1].role", V},
    {"\"messages\":[{\"role\":\"user\",\"content\":5}]", "messages[0].content", V},
    {"\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]",
     "messages[0].content[0]", U},
    {"\"logprobs\":1", "logprobs", V},
    {"\"top_logprobs\":5", "top_logprobs", V},
    {"\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", V},
    {"\"tools\":{}", "tools", V},
    {"\"tools\":[5]", "tools[0]", V},
    {"\"tools\":[{\"type\":\"function\"}]", "tools[0]", V},
    {"\"tool_choice\":\"required\"", "tool_choice", V},
    {"\"tool_choice\":\"sometimes\"", "tool_choice", V},
    {"\"tool_choice\":5", "tool_choice", V},
    {"\"tools\":[" TOOL "],\"tool_choice\":\"required\"", "tool_choice", U},
    {"\"tools\":[" TOOL "],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}",
     "tool_choice", U},
    {"\"tools\":[" TOOL "],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}",
     "tool_choice", V},
    {"\"tools\":[],\"tool_choice\":\"required\"", "tool_choice", V},
    {"\"parallel_tool_calls\":3", "parallel_tool_calls", V},
    {"\"reasoning_effort\":5", "reasoning_effort", V},
    {"\"chat_template_kwargs\":[]", "chat_template_kwargs", V},
    {"\"include_reasoning\":3", "include_reasoning", V},
    {"\"add_generation_prompt\":3", "add_generation_prompt", V},
    {"\"echo\":true", "echo", U},
    {"\"chat_template\":\"x\"", "chat_template", U},
    {"\"continue_final_message\":true", "continue_final_message", U},
    {"\"messages\":[" HI ",{\"role\":\"assistant\",\"reasoning_content\":5}]",
     "messages[1].reasoning_content", V},
    {"\"messages\":[" HI ",{\"role\":\"tool\",\"tool_call_id\":{}}]", "messages[1].tool_call_id",
     V},
    {"\"tools\":[{\"function\":{\"name\":\"f\",\"parameters\":\"x\"}}]",
     "tools[0].function.parameters", V},
    {"\"tools\":[{\"function\":{\"name\":\"a b\"}}]", "tools[0].function.name", V},
    {"\"tools\":[{\"name\":\"a\\nb\"}]", "tools[0].name", V},
    {"\"tools\":[{\"type\":\"custom\",\"function\":{\"name\":\"f\"}}]", "tools[0].type", U},
    {"\"chat_template_kwargs\":{\"reasoning_effort\":1}", "chat_template_kwargs.reasoning_effort",
     V},
    {"\"max_tokens\":0", "max_tokens", V},
    {"\"functions\":[{}]", "functions", U},
    {"\"function_call\":\"auto\"", "function_call", U},
};

static const struct bad bad_completion[] = {
    {"\"prompt\":null", "prompt", "missing_field"},
    {"\"prompt\":5", "prompt", V},
    {"\"prompt\":[]", "prompt", V},
    {"\"prompt\":\"\"", "prompt", V},
    {"\"prompt\":[[]]", "prompt", V},
    {"\"prompt\":[99999]", "prompt", V},
    {"\"prompt\":[-1]", "prompt", V},
    {"\"prompt\":[[1,2],[\"x\"]]", "prompt", V},
    {"\"prompt\":[{}]", "prompt", V},
    {"\"logprobs\":21", "logprobs", V},
    {"\"logprobs\":true", "logprobs", V},
    {"\"suffix\":\"x\"", "suffix", U},
    {"\"max_tokens\":0", "max_tokens", V},
    {"\"max_tokens\":0,\"echo\":true,\"min_tokens\":1", "max_tokens", V},
    {"\"echo\":true,\"logprobs\":1", "logprobs", U},
};

static void expect_bad(enum gw_endpoint endpoint, const struct bad *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct bad *b = &cases[i];
        if (read_field(endpoint, b->member))
            fail_msg("accepted: %s", b->member);
        if (refusal.status != 400 || strncmp(refusal.param, b->param, strlen(b->param)) != 0 ||
            strcmp(refusal.type, "invalid_request_error") != 0 || !refusal.code ||
            strcmp(refusal.code, b->code) != 0 || !refusal.message[0])
            fail_msg("%s: %d param=%s code=%s message=%s", b->member, refusal.status, refusal.param,
                     refusal.code ? refusal.code : "null", refusal.message);
    }
}

static void malformed_fields(void **state)
{
    expect_bad(GW_CHAT, bad_both, sizeof(bad_both) / sizeof(*bad_both));
    expect_bad(GW_COMPLETION, bad_both, sizeof(bad_both) / sizeof(*bad_both));
    expect_bad(GW_CHAT, bad_chat, sizeof(bad_chat) / sizeof(*bad_chat));
    expect_bad(GW_COMPLETION, bad_completion, sizeof(bad_completion) / sizeof(*bad_completion));
}

static void malformed_bodies(void **state)
{
    static const char *const bodies[] = {"",          "{",
                                         "[]",        "null",
                                         "5",         "{\"messages\":[}",
                                         "{} x",      "{\"a\":NaN}",
                                         "\xff{}",    "{\"a\":\"\xff\"}",
                                         "{\"a\":01}"};
    for (size_t i = 0; i < sizeof(bodies) / sizeof(*bodies); i++) {
        assert_false(read_text(GW_CHAT, bodies[i]));
        assert_int_equal(refusal.status, 400);
        assert_string_equal(refusal.code, "invalid_json");
    }
    static char deep[200000];
    memset(deep, '[', sizeof(deep) - 1);
    assert_false(read_text(GW_CHAT, deep));
    assert_string_equal(refusal.code, "invalid_json");
    assert_false(read_text(GW_CHAT, "{}"));
    assert_string_equal(refusal.code, "missing_field");
    assert_string_equal(refusal.param, "messages");
}

static void lenient_bodies(void **state)
{
    assert_true(read_text(GW_CHAT, "\xef\xbb\xbf{\"messages\":[" HI "]}"));
    assert_true(read_text(GW_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud83d\"}]}"));
    assert_true(read_text(GW_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"\\u0000\"}]}"));
    assert_true(read_field(GW_CHAT, "\"n\":5,\"n\":2"));
    assert_int_equal(request.n, 2);
    assert_true(read_field(GW_CHAT, "\"no_such_field\":{\"a\":[1]},\"other\":1"));
    assert_int_equal(request.unknown_fields, 2);
    assert_true(read_field(GW_CHAT, "\"tools\":[],\"tool_choice\":\"auto\""));
    assert_true(
        read_field(GW_CHAT, "\"tools\":null,\"tool_choice\":null,\"n\":null,\"stop\":null"));
    assert_true(read_field(GW_CHAT, "\"stop\":[],\"functions\":[],\"bad_words\":[]"));
    assert_true(read_field(GW_CHAT, "\"metadata\":{\"a\":1},\"store\":true,\"verbosity\":\"low\""));
    assert_int_equal(request.unknown_fields, 0);
    assert_true(read_field(GW_CHAT, "\"model\":\"tiny-glm\""));
    assert_false(read_field(GW_CHAT, "\"model\":\"gpt-9\""));
    assert_int_equal(refusal.status, 404);
    assert_string_equal(refusal.code, "model_not_found");
    assert_non_null(strstr(refusal.message, "gpt-9"));
}

static void defaults(void **state)
{
    assert_true(read_field(GW_CHAT, "\"user\":\"u\""));
    const struct msg_sampling *s = &request.base.sampling;
    assert_true(s->temperature == 1.0 && s->top_p == 0.95 && s->min_p == 0 && s->top_k == 0);
    assert_true(s->repetition_penalty == 1 && s->presence_penalty == 0);
    assert_int_equal(request.seed, 77);
    assert_int_equal(request.max_tokens, 0);
    assert_int_equal(request.choice_count, 1);
    assert_true(request.include_reasoning && request.skip_special && request.parallel_calls);
    assert_false(request.stream || request.logprobs || request.tools_on || request.ignore_eos);
    assert_string_equal(request.base.session_key, "u");
    assert_string_equal(request.base.effort, "max");
    assert_string_equal(request.id, "given");
    assert_int_equal(request.prompt_tail_bytes, GW_TAIL_BYTES);
    assert_memory_equal(request.prompt_tail + GW_TAIL_BYTES - 7, "<think>", 7);
    assert_int_equal(request.base.limits.stop_id_count, 1); /* <|assistant|> */
    assert_true(read_field(GW_COMPLETION, "\"seed\":-1"));
    assert_int_equal(request.max_tokens, 16);
    assert_true(request.seed == UINT64_MAX);
    assert_int_equal(request.base.limits.stop_id_count, 0);
}

static void everything_set(void **state)
{
    assert_true(read_field(
        GW_CHAT,
        "\"max_tokens\":9,\"max_completion_tokens\":7,\"min_tokens\":3,\"temperature\":0,"
        "\"top_p\":0.5,\"top_k\":40,\"min_p\":0.1,\"n\":2,\"best_of\":2,\"seed\":"
        "18446744073709551615,"
        "\"presence_penalty\":-2,\"frequency_penalty\":2,\"repetition_penalty\":1.5,"
        "\"logit_bias\":{\"5\":-100,\"7\":2.5},\"stop\":[\"a\",\"\\n\\n\"],\"stop_token_ids\":[5,6]"
        ","
        "\"include_stop_str_in_output\":true,\"ignore_eos\":true,\"logprobs\":true,"
        "\"top_logprobs\":20,\"stream\":true,\"stream_options\":{\"include_usage\":true,"
        "\"continuous_usage_stats\":true,\"other\":1},\"parallel_tool_calls\":false,"
        "\"response_format\":{\"type\":\"text\"},\"reasoning_effort\":\"high\","
        "\"chat_template_kwargs\":{\"enable_thinking\":false,\"clear_thinking\":true,"
        "\"reasoning_effort\":\"low\"},\"include_reasoning\":false,\"return_token_ids\":true,"
        "\"skip_special_tokens\":false,\"priority\":-3,\"session_id\":\"s\",\"user\":\"u\","
        "\"prompt_cache_key\":\"p\",\"cache_salt\":\"salt\",\"spec\":\"ngram:3\","
        "\"request_id\":\"mine-1\",\"return_tokens_as_token_ids\":true"));
    const struct msg_sampling *s = &request.base.sampling;
    const struct msg_limits *l = &request.base.limits;
    assert_int_equal(request.max_tokens, 7);
    assert_int_equal(request.min_tokens, 3);
    assert_true(s->temperature == 0 && s->top_p == 0.5 && s->top_k == 40 && s->min_p == 0.1);
    assert_true(s->seed == UINT64_MAX && s->presence_penalty == -2 && s->frequency_penalty == 2);
    assert_true(s->repetition_penalty == 1.5 && s->logprobs && s->top_logprobs == 20);
    assert_int_equal(s->bias_count, 2);
    assert_int_equal(s->bias_ids[0], 5);
    assert_true(s->bias_values[0] == -100 && s->bias_values[1] == 2.5f);
    assert_int_equal(request.stop_count, 2);
    assert_memory_equal(request.stops[1].text, "\n\n", 2);
    assert_int_equal(l->stop_id_count, 2); /* with ignore_eos nothing is added */
    assert_true(l->ignore_eos && request.include_stop && request.stream && request.include_usage);
    assert_true(request.continuous_usage && !request.parallel_calls && !request.include_reasoning);
    assert_true(request.return_token_ids && !request.skip_special && request.tokens_as_ids);
    assert_string_equal(request.base.effort, "low");
    assert_string_equal(request.ignored, "enable_thinking");
    assert_int_equal(request.base.priority, -3);
    assert_string_equal(request.base.session_key, "s");
    assert_string_equal(request.base.cache_salt, "salt");
    assert_string_equal(request.base.spec, "ngram:3");
    assert_string_equal(request.id, "mine-1");
    assert_int_equal(request.choice_count, 2);
}

static void tools_are_kept(void **state)
{
    assert_true(read_field(GW_CHAT, "\"tools\":[" TOOL "],\"tool_choice\":\"auto\""));
    assert_true(request.tools_on && json_is(request.tools, JSON_ARRAY));
    assert_true(
        json_string_is(json_get(json_get(json_at(request.tools, 0), "function"), "name"), "f"));
    assert_true(read_field(GW_CHAT, "\"tools\":[" TOOL "],\"tool_choice\":\"none\""));
    assert_false(request.tools_on);
}

static void prompts(void **state)
{
    assert_true(read_field(GW_COMPLETION, "\"prompt\":[\"a\",\"b c\"],\"n\":3,\"echo\":true"));
    assert_int_equal(request.prompt_count, 2);
    assert_int_equal(request.choice_count, 6);
    assert_int_equal(request.prompts[1].bytes, 3);
    assert_memory_equal(request.prompts[1].text, "b c", 3);
    assert_true(read_field(GW_COMPLETION, "\"prompt\":[1,2,3],\"echo\":true"));
    assert_int_equal(request.prompts[0].count, 3);
    assert_int_equal(request.prompts[0].ids[2], 3);
    assert_non_null(request.prompts[0].text);
    assert_true(read_field(GW_COMPLETION, "\"prompt\":[[1,2],[3]]"));
    assert_int_equal(request.prompt_count, 2);
    char many[400] = "\"prompt\":[";
    for (int i = 0; i < 33; i++)
        strcat(many, i ? ",\"a\"" : "\"a\"");
    strcat(many, "]");
    assert_false(read_field(GW_COMPLETION, many));
    assert_string_equal(refusal.param, "prompt");
}

static void context_is_exact(void **state)
{
    assert_true(read_field(GW_CHAT, "\"n\":1"));
    uint32_t tokens = request.prompts[0].count;
    window = tokens;
    assert_false(read_field(GW_CHAT, "\"n\":1"));
    assert_string_equal(refusal.code, "context_length_exceeded");
    char want[80];
    snprintf(want, sizeof(want), "maximum context length is %u tokens", tokens);
    assert_non_null(strstr(refusal.message, want));
    assert_string_equal(refusal.param, "messages");
    window = tokens + 1;
    assert_true(read_field(GW_CHAT, "\"max_tokens\":1000")); /* clamped later */
    window = 5000;
}

static void sessions(void **state)
{
    char member[400], long_key[300];
    memset(long_key, 'k', sizeof(long_key) - 1);
    long_key[sizeof(long_key) - 1] = '\0';
    snprintf(member, sizeof(member), "\"user\":\"%s\"", long_key);
    assert_true(read_field(GW_CHAT, member));
    assert_int_equal(strlen(request.base.session_key), 32);
    snprintf(member, sizeof(member), "\"session_id\":\"%s\"", long_key);
    assert_false(read_field(GW_CHAT, member));
    assert_true(read_field(GW_CHAT, "\"prompt_cache_key\":\"p\",\"user\":\"u\""));
    assert_string_equal(request.base.session_key, "p");
    assert_true(read_field(GW_CHAT, "\"prompt_cache_key\":\"\",\"user\":\"u\""));
    assert_string_equal(request.base.session_key, "u");
    assert_true(read_field(GW_CHAT, "\"prompt_cache_key\":\"\",\"user\":\"\""));
    assert_string_equal(request.base.session_key, "");
    assert_true(read_field(GW_CHAT, "\"n\":1"));
    assert_string_equal(request.base.session_key, "");
}

static void tokenize_and_back(void **state)
{
    struct str out;
    str_init(&out, 1 << 20);
    struct gw_openai_input in = {.endpoint = GW_TOKENIZE,
                                 .body = "{\"prompt\":\"Hi <think>\",\"return_token_strs\":true}",
                                 .session_id = "",
                                 .request_id = "x",
                                 .client_id = "",
                                 .window = window};
    in.body_bytes = strlen(in.body);
    assert_true(gw_openai_tokenize(&openai, &in, &out, &refusal));
    assert_non_null(strstr(out.text, "\"count\":"));
    assert_non_null(strstr(out.text, "\"<think>\"]}"));
    str_clear(&out);
    in.endpoint = GW_DETOKENIZE;
    in.body = "{\"tokens\":[997]}";
    in.body_bytes = strlen(in.body);
    assert_true(gw_openai_tokenize(&openai, &in, &out, &refusal));
    assert_string_equal(out.text, "{\"prompt\":\"<think>\"}");
    static const char *const bad[] = {"{}", "{\"tokens\":5}", "{\"tokens\":[99999]}",
                                      "{\"tokens\":[\"x\"]}"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        in.body = bad[i];
        in.body_bytes = strlen(in.body);
        assert_false(gw_openai_tokenize(&openai, &in, &out, &refusal));
        assert_string_equal(refusal.param, "tokens");
    }
    str_fini(&out);
}

/* A tokenizer like the demo's with one token of 1 KiB, for texts beyond any bound. */
static struct tokenizer *long_token(uint32_t *ret_id)
{
    static const char name[] = "<|begin_of_transcription|>";
    char path[4096], content[1025];
    struct err_detail detail;
    struct tokenizer *t = NULL;
    size_t bytes = 0;
    struct str text;
    golden_path(path, sizeof(path), "deploy/demo/tokenizer.json");
    char *file = golden_read(path, &bytes);
    char *at = strstr(file, name);
    assert_non_null(at);
    memset(content, 'x', sizeof(content) - 1);
    content[sizeof(content) - 1] = '\0';
    str_init(&text, 0);
    str_add(&text, file, (size_t)(at - file));
    str_add_text(&text, content);
    str_add_text(&text, at + sizeof(name) - 1);
    if (tokenizer_parse(text.text, text.bytes, NULL, &t, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    assert_true(tokenizer_find(t, content, sizeof(content) - 1, ret_id));
    str_fini(&text);
    free(file);
    return t;
}

/* More text than is given back at once is refused, not cut. */
static void detokenize_whole_or_not(void **state)
{
    uint32_t id = 0;
    struct gw_checkpoint other = checkpoint;
    struct gw_openai o;
    struct str body, out;
    other.tokenizer = long_token(&id);
    gw_openai_init(&o, &other, "max", false);
    str_init(&body, 0);
    str_init(&out, 0);
    str_add_text(&body, "{\"tokens\":[");
    for (uint32_t i = 0; i <= 256u << 10; i++)
        str_add_format(&body, i ? ",%u" : "%u", id);
    str_add_text(&body, "]}");
    struct gw_openai_input in = {.endpoint = GW_DETOKENIZE,
                                 .body = body.text,
                                 .body_bytes = body.bytes,
                                 .session_id = "",
                                 .request_id = "x",
                                 .client_id = "",
                                 .window = window};
    assert_false(gw_openai_tokenize(&o, &in, &out, &refusal));
    assert_string_equal(refusal.param, "tokens");
    assert_non_null(strstr(refusal.message, "above 268435456 bytes"));
    assert_int_equal(out.bytes, 0);
    str_fini(&body);
    str_fini(&out);
    gw_openai_fini(&o);
    tokenizer_destroy(&other.tokenizer);
}

/* No check of ours may refuse what the template is known to print. */
static void golden_case(void *context, struct arena *arena, const struct json *line)
{
    uint32_t *count = context;
    const struct json *name = json_get(line, "name"), *wanted = json_get(line, "prompt");
    struct str body, out;
    str_init(&body, 0);
    str_init(&out, 0);
    json_write_compact(&body, json_get(line, "request"));
    struct gw_openai_input in = {.endpoint = GW_TOKENIZE,
                                 .body = body.text,
                                 .body_bytes = body.bytes,
                                 .session_id = "",
                                 .request_id = "x",
                                 .client_id = "",
                                 .window = window};
    bool ok = gw_openai_tokenize(&openai, &in, &out, &refusal);
    if (ok != (wanted != NULL))
        fail_msg("%.*s: %s", (int)name->bytes, name->text, ok ? "accepted" : refusal.message);
    ++*count;
    str_fini(&body);
    str_fini(&out);
}

static void golden_requests(void **state)
{
    uint32_t count = 0;
    golden_lines("tests/golden/chat/render.jsonl", golden_case, &count);
    assert_true(count > 150);
}

static void refusals_as_json(void **state)
{
    struct str out;
    char headers[100];
    str_init(&out, 4096);
    gw_refuse_invalid(&refusal, "invalid_value", "a\"b", "no \"%s\"\n", "x");
    gw_refusal_write(&out, &refusal);
    assert_string_equal(out.text, "{\"error\":{\"message\":\"no \\\"x\\\"\\n\",\"type\":"
                                  "\"invalid_request_error\",\"param\":\"a\\\"b\",\"code\":"
                                  "\"invalid_value\"}}");
    gw_refusal_headers(&refusal, headers, sizeof(headers));
    assert_string_equal(headers, "x-should-retry: false\r\n");
    gw_refuse_err(&refusal, ERR_BUSY, 2500, NULL);
    gw_refusal_headers(&refusal, headers, sizeof(headers));
    assert_string_equal(headers, "Retry-After: 3\r\n");
    assert_int_equal(refusal.status, 429);
    assert_string_equal(refusal.code, "queue_full");
    gw_refuse_err(&refusal, ERR_LOADING, 0, "");
    assert_int_equal(refusal.status, 503);
    assert_int_equal(refusal.retry_after_s, 1);
    str_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(malformed_fields),
        cmocka_unit_test(malformed_bodies),
        cmocka_unit_test(lenient_bodies),
        cmocka_unit_test(defaults),
        cmocka_unit_test(everything_set),
        cmocka_unit_test(tools_are_kept),
        cmocka_unit_test(prompts),
        cmocka_unit_test(context_is_exact),
        cmocka_unit_test(sessions),
        cmocka_unit_test(tokenize_and_back),
        cmocka_unit_test(detokenize_whole_or_not),
        cmocka_unit_test(golden_requests),
        cmocka_unit_test(refusals_as_json),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
