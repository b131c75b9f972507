/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/golden_lines.h"

#include "gateway/gw_chat.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer.h"

#define TINY "tests/golden/tokenizer/tiny/tokenizer.json"

struct counts {
    uint32_t prompts, errors, other; /* other: render-raw cases that the gateway refuses */
};

static struct gw_chat_request request_of(const struct json *request)
{
    struct gw_chat_request r = {.messages = json_get(request, "messages"),
                                .tools = json_get(request, "tools"),
                                .kwargs = json_get(request, "chat_template_kwargs"),
                                .reasoning_effort = json_get(request, "reasoning_effort")};
    r.add_generation_prompt = golden_bool(request, "add_generation_prompt");
    return r;
}

static void expect_spans(const struct gw_chat_prompt *p)
{
    size_t bytes = 0;
    for (size_t i = 0; i < p->span_count; i++) {
        assert_true(p->spans[i].bytes > 0);
        if (i > 0)
            assert_true(p->spans[i].parse_special != p->spans[i - 1].parse_special);
        bytes += p->spans[i].bytes;
    }
    assert_int_equal(bytes, p->text.bytes);
}

static void on_render(void *context, struct arena *arena, const struct json *line)
{
    static const struct gw_chat_options options;
    struct counts *counts = context;
    const struct json *name = golden_string(line, "name");
    const struct gw_chat_request request = request_of(json_get(line, "request"));
    struct gw_chat_prompt p;
    struct gw_chat_error error;
    gw_chat_prompt_init(&p);
    enum err e = gw_chat_render(arena, &request, &options, &p, &error);
    const struct json *prompt = json_get(line, "prompt");
    if (prompt != NULL) {
        if (e != ERR_OK)
            fail_msg("%.*s: %s: %s", (int)name->bytes, name->text, err_name(e), error.message);
        if (p.text.bytes != prompt->bytes || memcmp(p.text.text, prompt->text, p.text.bytes) != 0)
            fail_msg("%.*s:\n%.*s\n%.*s", (int)name->bytes, name->text, (int)prompt->bytes,
                     prompt->text, (int)p.text.bytes, p.text.text);
        expect_spans(&p);
        counts->prompts++;
    } else {
        const char *refusal = gw_chat_refusal_name(error.refusal);
        if (e == ERR_OK || !json_string_is(json_get(line, "error"), refusal))
            fail_msg("%.*s: %s %s", (int)name->bytes, name->text, err_name(e), refusal);
        assert_true(strlen(error.param) > 0 && strlen(error.message) > strlen(error.param));
        counts->errors++;
    }
    gw_chat_prompt_fini(&p);
}

static void test_golden(void **state)
{
    struct counts counts = {0};
    assert_int_equal(golden_lines("tests/golden/chat/render.jsonl", on_render, &counts), 193);
    assert_int_equal(counts.prompts, 174);
    assert_int_equal(counts.errors, 19);
}

/* What the template alone does: where the gateway renders too, the text must be the same, but for
 * a developer (mapped to system) and arguments (decoded first). */
static void on_raw(void *context, struct arena *arena, const struct json *line)
{
    static const struct gw_chat_options options;
    struct counts *counts = context;
    const struct json *name = golden_string(line, "name");
    const struct gw_chat_request request = request_of(json_get(line, "request"));
    const struct json *prompt = json_get(line, "prompt");
    struct gw_chat_prompt p;
    struct gw_chat_error error;
    gw_chat_prompt_init(&p);
    enum err e = gw_chat_render(arena, &request, &options, &p, &error);
    bool mapped = json_string_is(name, "developer_prints_nothing") ||
                  (name->bytes > 9 && memcmp(name->text, "arguments", 9) == 0);
    if (e != ERR_OK) {
        assert_true(error.refusal != GW_CHAT_REFUSAL_NONE);
        counts->errors++;
    } else if (mapped) {
        counts->other++;
    } else {
        assert_non_null(prompt);
        assert_int_equal(p.text.bytes, prompt->bytes);
        assert_memory_equal(p.text.text, prompt->text, prompt->bytes);
        counts->prompts++;
    }
    gw_chat_prompt_fini(&p);
}

static void test_golden_raw(void **state)
{
    struct counts counts = {0};
    assert_int_equal(golden_lines("tests/golden/chat/render-raw.jsonl", on_raw, &counts), 19);
    assert_int_equal(counts.prompts, 1); /* numbers past the range of a double */
    assert_int_equal(counts.other, 4);
    assert_int_equal(counts.errors, 14);
}

static struct tokenizer *load_tiny(void)
{
    char path[4096];
    golden_path(path, sizeof(path), TINY);
    struct err_detail detail = {{0}};
    struct tokenizer *t = NULL;
    if (tokenizer_load(path, NULL, &t, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return t;
}

/* True when a span of the client holds the string of an added token. */
static bool client_has_control(const struct tokenizer *t, const struct gw_chat_prompt *p)
{
    size_t at = 0;
    bool found = false;
    for (size_t i = 0; i < p->span_count; at += p->spans[i++].bytes) {
        if (p->spans[i].parse_special)
            continue;
        struct token_ids ids;
        token_ids_init(&ids, 1 << 20);
        assert_int_equal(tokenizer_encode(t, p->text.text + at, p->spans[i].bytes, true, &ids),
                         ERR_OK);
        for (size_t k = 0; k < ids.count; k++)
            found = found || tokenizer_is_added(t, ids.ids[k]);
        token_ids_fini(&ids);
    }
    return found;
}

/* Without control text of the client, ids are those of the whole prompt; with it, the number of
 * control tokens is that of the scaffold alone. */
static void on_encode(void *context, struct arena *arena, const struct json *line)
{
    static const struct gw_chat_options options;
    const struct tokenizer *t = context;
    const struct gw_chat_request request = request_of(json_get(line, "request"));
    struct gw_chat_prompt p;
    struct gw_chat_error error;
    gw_chat_prompt_init(&p);
    if (gw_chat_render(arena, &request, &options, &p, &error) == ERR_OK) {
        struct token_ids ids, whole;
        token_ids_init(&ids, 1 << 20);
        token_ids_init(&whole, 1 << 20);
        assert_int_equal(gw_chat_encode(t, &p, &ids), ERR_OK);
        assert_int_equal(tokenizer_encode(t, p.text.text, p.text.bytes, true, &whole), ERR_OK);
        if (client_has_control(t, &p)) {
            size_t added = 0, added_whole = 0;
            for (size_t i = 0; i < ids.count; i++)
                added += tokenizer_is_added(t, ids.ids[i]);
            for (size_t i = 0; i < whole.count; i++)
                added_whole += tokenizer_is_added(t, whole.ids[i]);
            assert_true(added < added_whole);
        } else {
            assert_int_equal(ids.count, whole.count);
            assert_memory_equal(ids.ids, whole.ids, ids.count * sizeof(ids.ids[0]));
        }
        token_ids_fini(&ids);
        token_ids_fini(&whole);
    }
    gw_chat_prompt_fini(&p);
}

static void test_encode(void **state)
{
    struct tokenizer *t = load_tiny();
    (void)golden_lines("tests/golden/chat/render.jsonl", on_encode, t);
    tokenizer_destroy(&t);
}

/* Renders a request given as text; NULL prompt: only the error matters. */
static enum err render(const char *text, const struct gw_chat_options *options,
                       struct gw_chat_prompt *p, struct gw_chat_error *error)
{
    struct arena arena;
    struct json *request = NULL;
    struct json_error json_error;
    arena_init(&arena, 1 << 16, 16 << 20);
    assert_int_equal(json_parse(&arena, NULL, text, strlen(text), &request, &json_error), ERR_OK);
    struct gw_chat_request r = {.messages = json_get(request, "messages"),
                                .tools = json_get(request, "tools"),
                                .kwargs = json_get(request, "chat_template_kwargs"),
                                .reasoning_effort = json_get(request, "reasoning_effort"),
                                .add_generation_prompt = true};
    gw_chat_prompt_init(p);
    enum err e = gw_chat_render(&arena, &r, options, p, error);
    arena_fini(&arena);
    return e;
}

static void expect_prompt(const char *request, const struct gw_chat_options *options,
                          const char *prompt, enum gw_chat_effort effort)
{
    struct gw_chat_prompt p;
    struct gw_chat_error error;
    assert_int_equal(render(request, options, &p, &error), ERR_OK);
    assert_string_equal(p.text.text, prompt);
    assert_int_equal(p.effort, effort);
    gw_chat_prompt_fini(&p);
}

static void test_decisions(void **state)
{
    static const struct gw_chat_options plain;
    const struct gw_chat_options clear = {.clear_thinking_default = true};
    const struct gw_chat_options low = {.effort_default = "low"};
    expect_prompt("{\"messages\": [{\"role\": \"developer\", \"content\": \"d\"}]}", &plain,
                  "[gMASK]<sop><|system|>Reasoning Effort: Max<|system|>d<|assistant|><think>",
                  GW_CHAT_EFFORT_MAX);
    expect_prompt("{\"messages\": [{\"role\": \"user\"}]}", &low,
                  "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|><|assistant|><think>",
                  GW_CHAT_EFFORT_LOW);
    expect_prompt("{\"messages\": [{\"role\": \"user\"}], \"reasoning_effort\": \"medium\"}", &low,
                  "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|><|assistant|><think>",
                  GW_CHAT_EFFORT_MAX);
    const char *two = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", "
                      "\"reasoning\": \"R\"}, {\"role\": \"user\", \"content\": \"q\"}]}";
    expect_prompt(two, &plain,
                  "[gMASK]<sop><|system|>Reasoning Effort: Max<|assistant|><think>R</think>a"
                  "<|user|>q<|assistant|><think>",
                  GW_CHAT_EFFORT_MAX);
    expect_prompt(two, &clear,
                  "[gMASK]<sop><|system|>Reasoning Effort: Max<|assistant|><think></think>a"
                  "<|user|>q<|assistant|><think>",
                  GW_CHAT_EFFORT_MAX);
}

static void test_refusals(void **state)
{
    static const struct gw_chat_options options;
    static const struct {
        const char *request;
        enum gw_chat_refusal refusal;
        const char *param;
    } cases[] = {
        {"{}", GW_CHAT_MESSAGES_TYPE, "messages"},
        {"{\"messages\": {}}", GW_CHAT_MESSAGES_TYPE, "messages"},
        {"{\"messages\": []}", GW_CHAT_MESSAGES_EMPTY, "messages"},
        {"{\"messages\": [3]}", GW_CHAT_MESSAGES_TYPE, "messages[0]"},
        {"{\"messages\": [{\"role\": \"user\"}, {\"role\": 1}]}", GW_CHAT_ROLE, "messages[1].role"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [\"x\", {\"type\": \"text\"}]}]}",
         GW_CHAT_CONTENT_TYPE, "messages[0].content[1].text"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}",
         GW_CHAT_PART_TYPE, "messages[0].content[0].type"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"text\": \"x\"}]}]}",
         GW_CHAT_PART_TYPE, "messages[0].content[0].type"},
        {"{\"messages\": [{\"role\": \"user\"}], \"tools\": {}}", GW_CHAT_TOOLS_TYPE, "tools"},
        {"{\"messages\": [{\"role\": \"user\"}], \"tools\": [{\"function\": 1}]}",
         GW_CHAT_TOOLS_TYPE, "tools[0].function"},
        {"{\"messages\": [{\"role\": \"assistant\", \"tool_calls\": {}}]}", GW_CHAT_TOOL_CALL_NAME,
         "messages[0].tool_calls"},
        {"{\"messages\": [{\"role\": \"assistant\", \"tool_calls\": [1]}]}", GW_CHAT_TOOL_CALL_NAME,
         "messages[0].tool_calls[0].function.name"},
        {"{\"messages\": [{\"role\": \"tool\", \"content\": [{\"output\": [{\"type\": "
         "\"image\"}]}]}]}",
         GW_CHAT_PART_TYPE, "messages[0].content[0].output[0].type"},
        {"{\"messages\": [{\"role\": \"tool\", \"content\": [{\"output\": \"x\"}, {}]}]}",
         GW_CHAT_CONTENT_TYPE, "messages[0].content[1].output"},
        {"{\"messages\": [{\"role\": \"tool\", \"content\": [{\"type\": \"tool_reference\"}, "
         "{\"type\": \"text\"}]}], \"tools\": [{\"name\": \"a\"}]}",
         GW_CHAT_PART_TYPE, "messages[0].content[1].type"},
        {"{\"messages\": [{\"role\": \"user\"}], \"chat_template_kwargs\": []}",
         GW_CHAT_KWARGS_TYPE, "chat_template_kwargs"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct gw_chat_prompt p;
        struct gw_chat_error error;
        assert_int_equal(render(cases[i].request, &options, &p, &error), ERR_INVALID);
        assert_int_equal(error.refusal, cases[i].refusal);
        assert_string_equal(error.param, cases[i].param);
        gw_chat_prompt_fini(&p);
    }
}

static void test_bounds(void **state)
{
    const struct gw_chat_options options = {.prompt_bytes_max = 70};
    struct gw_chat_prompt p;
    struct gw_chat_error error;
    assert_int_equal(render("{\"messages\": [{\"role\": \"user\", \"content\": \"0123456789\"}]}",
                            &options, &p, &error),
                     ERR_TOO_LARGE);
    assert_int_equal(error.refusal, GW_CHAT_TOO_LARGE);
    gw_chat_prompt_fini(&p);
    const struct gw_chat_options fits = {.prompt_bytes_max = 76};
    assert_int_equal(
        render("{\"messages\": [{\"role\": \"user\", \"content\": \"0\"}]}", &fits, &p, &error),
        ERR_OK);
    gw_chat_prompt_fini(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),   cmocka_unit_test(test_golden_raw),
        cmocka_unit_test(test_encode),   cmocka_unit_test(test_decisions),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
