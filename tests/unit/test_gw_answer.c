/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_answer, gw_openai_response: what a client reads, streamed and whole, from token ids.
 *
 * Every case of golden/chat/parse.jsonl is sent as tokens in messages of random sizes and as single
 * tokens, streamed and not; the joined deltas, the whole answer and the golden must agree. */
#include "tests/unit/golden_lines.h"

#include "gateway/gw_answer.h"
#include "gateway/gw_checkpoint.h"
#include "gateway/gw_openai.h"
#include "lib/base/rng.h"
#include "lib/text/token_ids.h"
#include "lib/text/tokenizer.h"

#define CALLS 40

struct joined {
    struct str reasoning, content, names[CALLS], arguments[CALLS], token_ids, logprob_tokens;
    bool reasoning_null, content_null;
    uint32_t calls, chunks, roles, usages;
    char finish[20];
    uint64_t completion_tokens, reasoning_tokens;
};

static struct gw_checkpoint checkpoint;
static struct gw_openai openai;
static struct gw_request request;
static struct str scratch[3], whole;
static struct joined got;
static uint32_t stop_id;
static struct rng rng;

static void joined_reset(struct joined *j)
{
    struct str *strings[] = {&j->reasoning, &j->content, &j->token_ids, &j->logprob_tokens};
    for (size_t i = 0; i < 4; i++)
        str_fini(strings[i]);
    for (size_t i = 0; i < CALLS; i++) {
        str_fini(&j->names[i]);
        str_fini(&j->arguments[i]);
    }
    memset(j, 0, sizeof(*j));
}

static void add_json(struct str *out, const struct json *v)
{
    if (json_is(v, JSON_STRING))
        str_add(out, v->text, v->bytes);
}

static void take_logprobs(const struct json *choice)
{
    const struct json *list = json_get(json_get(choice, "logprobs"), "content");
    for (const struct json *v = list ? list->child : NULL; v; v = v->next)
        add_json(&got.logprob_tokens, json_get(v, "token"));
    const struct json *plain = json_get(json_get(choice, "logprobs"), "tokens");
    for (const struct json *v = plain ? plain->child : NULL; v; v = v->next)
        add_json(&got.logprob_tokens, v);
}

static void take_ids(const struct json *choice)
{
    const struct json *ids = json_get(choice, "token_ids");
    for (const struct json *v = ids ? ids->child : NULL; v; v = v->next) {
        str_add(&got.token_ids, v->text, v->bytes);
        str_add_char(&got.token_ids, ' ');
    }
}

static void take_call_delta(const struct json *v)
{
    uint64_t index = 99;
    assert_true(json_u64(json_get(v, "index"), &index));
    assert_true(index < CALLS);
    const struct json *f = json_get(v, "function");
    if (json_get(v, "id")) {
        assert_int_equal(index, got.calls);
        assert_true(json_string_is(json_get(v, "type"), "function"));
        assert_true(json_string_is(json_get(f, "arguments"), ""));
        add_json(&got.names[index], json_get(f, "name"));
        got.calls++;
    } else {
        assert_null(json_get(f, "name"));
        assert_true(json_get(f, "arguments")->bytes > 0);
    }
    add_json(&got.arguments[index], json_get(f, "arguments"));
}

static void take_usage(const struct json *usage)
{
    got.usages++;
    assert_true(json_u64(json_get(usage, "completion_tokens"), &got.completion_tokens));
    const struct json *details = json_get(usage, "completion_tokens_details");
    assert_true(json_u64(json_get(details, "reasoning_tokens"), &got.reasoning_tokens));
    assert_non_null(json_get(json_get(usage, "tandem"), "seed"));
}

static void take_delta(const struct json *choice)
{
    const struct json *delta = json_get(choice, "delta");
    const struct json *text = json_get(choice, "text");
    const struct json *role = json_get(delta, "role");
    assert_int_equal(got.finish[0], 0);
    if (role) {
        got.roles++;
        assert_int_equal(got.chunks, 0);
        assert_int_equal(json_get(delta, "content")->bytes, 0);
        got.chunks++;
        return;
    }
    got.chunks++;
    const struct json *finish = json_get(choice, "finish_reason");
    if (json_is(finish, JSON_STRING)) {
        snprintf(got.finish, sizeof(got.finish), "%.*s", (int)finish->bytes, finish->text);
        if (delta)
            assert_int_equal(delta->count, 0);
    } else if (delta) {
        assert_int_equal(delta->count, 1);
    }
    for (const struct json *v = delta ? delta->child : NULL; v; v = v->next)
        if (json_is(v, JSON_STRING))
            assert_true(v->bytes > 0);
    add_json(&got.content, json_get(delta, "content"));
    add_json(&got.content, text);
    add_json(&got.reasoning, json_get(delta, "reasoning_content"));
    const struct json *calls = json_get(delta, "tool_calls");
    for (const struct json *v = calls ? calls->child : NULL; v; v = v->next)
        take_call_delta(v);
}

static void on_event(void *arg, const char *text, size_t bytes)
{
    struct arena arena;
    struct json *v = NULL;
    struct json_error error;
    const struct json_options options = {.depth_max = 128};
    arena_init(&arena, 1 << 16, 64 << 20);
    assert_null(memchr(text, '\n', bytes));
    if (json_parse(&arena, &options, text, bytes, &v, &error) != ERR_OK)
        fail_msg("%.*s", (int)bytes, text);
    const struct json *choices = json_get(v, "choices");
    if (choices->count == 0) {
        take_usage(json_get(v, "usage"));
    } else {
        const struct json *choice = choices->child;
        take_delta(choice);
        take_logprobs(choice);
        take_ids(choice);
    }
    arena_fini(&arena);
}

static void take_whole(void)
{
    struct arena arena;
    struct json *v = NULL;
    struct json_error error;
    const struct json_options options = {.depth_max = 128};
    arena_init(&arena, 1 << 16, 64 << 20);
    if (json_parse(&arena, &options, whole.text, whole.bytes, &v, &error) != ERR_OK)
        fail_msg("%s", whole.text);
    const struct json *choice = json_get(v, "choices")->child;
    const struct json *message = json_get(choice, "message");
    if (message) {
        assert_non_null(json_get(message, "refusal"));
        got.content_null = json_is(json_get(message, "content"), JSON_NULL);
        got.reasoning_null = json_is(json_get(message, "reasoning_content"), JSON_NULL);
    }
    add_json(&got.content, json_get(message ? message : choice, message ? "content" : "text"));
    add_json(&got.reasoning, json_get(message, "reasoning_content"));
    const struct json *calls = json_get(message, "tool_calls");
    assert_true(!calls || calls->count > 0);
    for (const struct json *c = calls ? calls->child : NULL; c; c = c->next) {
        const struct json *f = json_get(c, "function");
        add_json(&got.names[got.calls], json_get(f, "name"));
        add_json(&got.arguments[got.calls++], json_get(f, "arguments"));
    }
    const struct json *finish = json_get(choice, "finish_reason");
    snprintf(got.finish, sizeof(got.finish), "%.*s", (int)finish->bytes, finish->text);
    take_usage(json_get(v, "usage"));
    take_logprobs(choice);
    take_ids(choice);
    arena_fini(&arena);
}

static void read_request(enum gw_endpoint endpoint, const char *body)
{
    struct gw_refusal refusal;
    const struct gw_openai_input in = {endpoint, body, strlen(body), "", "r", "", 1, 100000};
    gw_request_reset(&request);
    if (!gw_openai_request(&openai, &in, &request, &refusal))
        fail_msg("%s: %s", body, refusal.message);
}

static bool forgotten;        /* messages without logprobs, as the router's store sends them */
static uint32_t last_message; /* how many were taken */

/* Sends the ids in messages of at most piece tokens (0 = random sizes); true if it was cut. */
static bool run_answer(const uint32_t *ids, uint32_t count, uint32_t piece, uint32_t finish)
{
    struct gw_answer a;
    const struct gw_answer_options options = {
        .checkpoint = &checkpoint,
        .created_unix_s = 1,
        .nonce = 7,
        .text_bytes_max = 1 << 24,
        .event = on_event,
        .scratch = scratch,
    };
    const struct gw_receipt known = {.concurrency = 1, .spec = "off"};
    float logprob[256];
    for (uint32_t i = 0; i < 256; i++)
        logprob[i] = -0.5f;
    bool cut = false;
    uint32_t messages = 0;
    joined_reset(&got);
    request.include_usage = request.stream;
    assert_true(gw_answer_init(&a, &request, &options));
    gw_answer_begin(&a, &known, 10);
    for (uint32_t at = 0; at < count && !cut;) {
        uint32_t n = piece ? piece : 1 + rng_below(&rng, 9);
        if (n > count - at)
            n = count - at;
        struct msg_tokens t = {.seq = at, .count = n, .ids = ids + at};
        t.logprobs = request.logprobs && !forgotten;
        t.logprob = logprob;
        t.has_receipt = true;
        last_message = messages++ + 1;
        t.receipt = (struct msg_receipt){.steps = last_message,
                                         .accepted = last_message * 3,
                                         .drafted = last_message * 4,
                                         .queue_us = 5,
                                         .prefill_us = 7,
                                         .draft_us = 1000,
                                         .verify_us = 12345,
                                         .spec = "fixed:4"};
        cut = gw_answer_tokens(&a, 0, &t, 0, 20 + at);
        at += n;
    }
    gw_answer_finish(&a, 0, finish, NULL, 1000);
    assert_true(gw_answer_over(&a));
    assert_false(a.failed);
    gw_answer_settle(&a);
    if (request.stream) {
        gw_answer_usage_event(&a);
    } else {
        str_clear(&whole);
        gw_answer_write(&a, &whole);
        take_whole();
    }
    assert_int_equal(got.usages, 1);
    gw_answer_fini(&a);
    for (int i = 1; i < 3; i++)
        assert_int_equal(scratch[i].bytes, 0);
    return cut;
}

static void same_text(const char *name, const char *what, const struct str *is,
                      const struct json *want)
{
    size_t bytes = json_is(want, JSON_STRING) ? want->bytes : 0;
    if (is->bytes != bytes || (bytes && memcmp(is->text, want->text, bytes) != 0))
        fail_msg("%s: %s is \"%.*s\", not \"%.*s\"", name, what, (int)is->bytes,
                 is->bytes ? is->text : "", (int)bytes, bytes ? want->text : "");
}

static void compare(const char *name, const struct json *expect, bool stream)
{
    same_text(name, "reasoning", &got.reasoning, json_get(expect, "reasoning_content"));
    same_text(name, "content", &got.content, json_get(expect, "content"));
    const struct json *calls = json_get(expect, "tool_calls");
    if (got.calls != calls->count)
        fail_msg("%s: %u calls, not %u", name, got.calls, calls->count);
    uint32_t i = 0;
    for (const struct json *c = calls->child; c; c = c->next, i++) {
        same_text(name, "name", &got.names[i], json_get(c, "name"));
        same_text(name, "arguments", &got.arguments[i], json_get(c, "arguments"));
    }
    if (!json_string_is(json_get(expect, "finish_reason"), got.finish))
        fail_msg("%s: finish %s", name, got.finish);
    if (stream)
        assert_int_equal(got.roles, 1);
    else
        assert_int_equal(got.content_null, json_is(json_get(expect, "content"), JSON_NULL));
}

/* The request of a golden case, around the tail of its prompt. */
static void golden_request(const struct json *line)
{
    struct str body;
    str_init(&body, 0);
    str_add_text(&body, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":");
    json_write_compact(&body, json_get(line, "tools"));
    if (json_string_is(json_get(line, "tool_choice"), "none"))
        str_add_text(&body, ",\"tool_choice\":\"none\"");
    str_add_char(&body, '}');
    read_request(GW_CHAT, body.text);
    str_fini(&body);
    const struct json *tail = golden_string(line, "prompt_tail");
    size_t n = tail->bytes < GW_TAIL_BYTES ? tail->bytes : GW_TAIL_BYTES;
    memcpy(request.prompt_tail, tail->text + tail->bytes - n, n);
    request.prompt_tail_bytes = (uint32_t)n;
}

static void golden_case(void *context, struct arena *arena, const struct json *line)
{
    char name[80];
    const struct json *n = golden_string(line, "name"), *text = golden_string(line, "text");
    snprintf(name, sizeof(name), "%.*s", (int)n->bytes, n->text);
    struct token_ids ids;
    token_ids_init(&ids, 1 << 20);
    assert_int_equal(tokenizer_encode(checkpoint.tokenizer, text->text, text->bytes, true, &ids),
                     0);
    bool special = false; /* a special id would print nothing: these cases mean the text */
    for (size_t i = 0; i < ids.count; i++)
        special |= tokenizer_is_special(checkpoint.tokenizer, ids.ids[i]);
    if (special) {
        token_ids_clear(&ids);
        assert_int_equal(
            tokenizer_encode(checkpoint.tokenizer, text->text, text->bytes, false, &ids), 0);
    }
    bool stop = json_string_is(json_get(line, "engine_finish"), "stop");
    uint32_t text_ids = (uint32_t)ids.count;
    if (stop)
        token_ids_add(&ids, stop_id);
    golden_request(line);
    for (uint32_t run = 0; run < 8; run++) {
        request.stream = run & 1;
        request.return_token_ids = run & 2;
        request.logprobs = run & 4;
        assert_false(run_answer(ids.ids, (uint32_t)ids.count, run % 3,
                                stop ? MSG_FINISH_STOP : MSG_FINISH_LENGTH));
        compare(name, json_get(line, "expect"), request.stream);
        assert_int_equal(got.completion_tokens, ids.count);
        if (request.logprobs)
            assert_int_equal(got.logprob_tokens.bytes > 0, text_ids > 0);
        uint32_t spaces = 0;
        for (size_t i = 0; i < got.token_ids.bytes; i++)
            spaces += got.token_ids.text[i] == ' ';
        assert_int_equal(spaces, request.return_token_ids ? ids.count : 0);
    }
    token_ids_fini(&ids);
}

static void golden_answers(void **state)
{
    uint32_t count = golden_lines("tests/golden/chat/parse.jsonl", golden_case, NULL);
    assert_true(count >= 190);
}

/* ---- stop strings ---- */

struct stop_case {
    const char *stops; /* JSON */
    const char *text;
    const char *content; /* what is left */
    bool cut;
};

static const struct stop_case stop_cases[] = {
    {"\"own fox\"", "The quick brown fox jumps", "The quick br", true},
    {"\"\\nUser:\"", "Hello\nUser: x", "Hello", true},
    {"\"\\nUser:\"", "Hello\nUse it", "Hello\nUse it", false},
    {"[\"zz\",\"b\"]", "aaab", "aaa", true},
    {"[\"abc\",\"bc\"]", "xxabcd", "xx", true},
    {"[\"never\"]", "nev nev neve", "nev nev neve", false},
    {"[\"\xf0\x9f\x98\x80\"]", "a\xf0\x9f\x98\x81 b\xf0\x9f\x98\x80 c", "a\xf0\x9f\x98\x81 b",
     true},
    {"\"a\"", "abc", "", true},
};

static void one_stop(const struct stop_case *c, enum gw_endpoint endpoint, bool include)
{
    char body[600], want[200], stop[64] = "";
    struct token_ids ids;
    const char *think = endpoint == GW_CHAT ? "I see own fox, User: and zz, bc, a.</think>" : "";
    char text[300];
    snprintf(text, sizeof(text), "%s%s", think, c->text);
    snprintf(body, sizeof(body), "{%s,\"stop\":%s,\"include_stop_str_in_output\":%s}",
             endpoint == GW_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"
                                 : "\"prompt\":\"x\"",
             c->stops, include ? "true" : "false");
    read_request(endpoint, body);
    token_ids_init(&ids, 10000);
    assert_int_equal(tokenizer_encode(checkpoint.tokenizer, text, strlen(text), true, &ids), 0);
    uint32_t completing = 0;
    for (uint32_t run = 0; run < 6; run++) {
        request.stream = run & 1;
        bool cut = run_answer(ids.ids, (uint32_t)ids.count, run % 3, MSG_FINISH_LENGTH);
        assert_int_equal(cut, c->cut);
        assert_string_equal(got.finish, c->cut ? "stop" : "length");
        size_t left = strlen(c->content);
        if (c->cut && include)
            snprintf(stop, sizeof(stop), "%s", c->text + left);
        snprintf(want, sizeof(want), "%s", c->content);
        if (!include && (got.content.bytes != left ||
                         memcmp(got.content.text ? got.content.text : "", want, left) != 0))
            fail_msg("%s: \"%.*s\"", c->text, (int)got.content.bytes, got.content.text);
        if (c->cut && include)
            assert_true(got.content.bytes > left &&
                        memcmp(got.content.text, c->text, got.content.bytes) == 0);
        /* counted up to the token that completed the string, however they came */
        if (run == 0)
            completing = (uint32_t)got.completion_tokens;
        assert_int_equal(got.completion_tokens, completing);
    }
    token_ids_fini(&ids);
}

static void stop_strings(void **state)
{
    for (size_t i = 0; i < sizeof(stop_cases) / sizeof(*stop_cases); i++)
        for (int include = 0; include < 2; include++) {
            one_stop(&stop_cases[i], GW_CHAT, include);
            one_stop(&stop_cases[i], GW_COMPLETION, include);
        }
}

/* ---- other shapes ---- */

static uint32_t encode(const char *text, uint32_t *ids, uint32_t max)
{
    struct token_ids t;
    token_ids_init(&t, max);
    assert_int_equal(tokenizer_encode(checkpoint.tokenizer, text, strlen(text), true, &t), 0);
    memcpy(ids, t.ids, t.count * sizeof(*ids));
    uint32_t count = (uint32_t)t.count;
    token_ids_fini(&t);
    return count;
}

#define TWO_CALLS                                                                                  \
    "ok</think><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"               \
    "<tool_call>f<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"

static void one_call_only(void **state)
{
    uint32_t ids[300], count = encode(TWO_CALLS, ids, 300);
    for (int stream = 0; stream < 2; stream++)
        for (int parallel = 0; parallel < 2; parallel++) {
            char body[400];
            snprintf(body, sizeof(body),
                     "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"type\":"
                     "\"function\",\"function\":{\"name\":\"f\"}}],\"parallel_tool_calls\":%s}",
                     parallel ? "true" : "false");
            read_request(GW_CHAT, body);
            request.stream = stream;
            assert_int_equal(run_answer(ids, count, 0, MSG_FINISH_STOP), !parallel);
            assert_int_equal(got.calls, parallel ? 2 : 1);
            assert_string_equal(got.finish, "tool_calls");
            assert_memory_equal(got.arguments[0].text, "{\"a\": 1}", 8);
        }
}

static void stop_ids_are_not_printed(void **state)
{
    uint32_t ids[50], count = encode("hello you", ids, 40);
    uint32_t last = ids[count - 1];
    char body[200];
    for (int include = 0; include < 2; include++) {
        snprintf(body, sizeof(body),
                 "{\"prompt\":\"x\",\"stop_token_ids\":[%u],\"include_stop_str_in_output\":%s}",
                 last, include ? "true" : "false");
        read_request(GW_COMPLETION, body);
        run_answer(ids, count, 0, MSG_FINISH_STOP);
        assert_int_equal(got.content.bytes == 9, include);
        assert_int_equal(got.completion_tokens, count);
    }
    read_request(GW_COMPLETION,
                 "{\"prompt\":\"x\",\"ignore_eos\":true,\"skip_special_tokens\":false}");
    ids[count++] = stop_id;
    run_answer(ids, count, 0, MSG_FINISH_LENGTH);
    assert_true(got.content.bytes > 9);
}

static void reasoning_can_be_left_out(void **state)
{
    uint32_t ids[50], count = encode("thinking</think>said", ids, 50);
    for (int stream = 0; stream < 2; stream++) {
        read_request(GW_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
                              "\"include_reasoning\":false}");
        request.stream = stream;
        run_answer(ids, count, 1, MSG_FINISH_LENGTH);
        assert_int_equal(got.reasoning.bytes, 0);
        assert_int_equal(got.content.bytes, 4);
        assert_true(got.reasoning_tokens > 0);
    }
}

static void echo_and_logprobs(void **state)
{
    uint32_t ids[50], count = encode(" more", ids, 50);
    for (int stream = 0; stream < 2; stream++) {
        read_request(GW_COMPLETION, "{\"prompt\":\"Hello\",\"echo\":true}");
        request.stream = stream;
        run_answer(ids, count, 1, MSG_FINISH_LENGTH);
        assert_memory_equal(got.content.text, "Hello more", 10);
        assert_int_equal(got.content.bytes, 10);
        read_request(GW_COMPLETION, "{\"prompt\":\"Hello\",\"logprobs\":0}");
        request.stream = stream;
        run_answer(ids, count, 1, MSG_FINISH_LENGTH);
        assert_memory_equal(got.logprob_tokens.text, " more", 5);
    }
}

/* Tokens that were sent once more come without: never a number that nobody computed. */
static void unknown_logprobs_are_null(void **state)
{
    uint32_t ids[50], count = encode(" more", ids, 50);
    forgotten = true;
    read_request(GW_COMPLETION, "{\"prompt\":\"Hello\",\"logprobs\":2}");
    run_answer(ids, count, 0, MSG_FINISH_LENGTH);
    assert_non_null(strstr(whole.text, "\"token_logprobs\":[null"));
    assert_non_null(strstr(whole.text, "\"top_logprobs\":[null"));
    read_request(GW_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
                          "\"logprobs\":true,\"top_logprobs\":2}");
    run_answer(ids, count, 0, MSG_FINISH_LENGTH);
    assert_non_null(strstr(whole.text, "\"logprob\":null,\"top_logprobs\":[]}"));
    forgotten = false;
}

/* The engine's own end comes too late for an answer that was cut, or not at all. */
static void receipt_of_a_cut_answer(void **state)
{
    uint32_t ids[200], count = encode("one two three four five six seven", ids, 200);
    read_request(GW_COMPLETION, "{\"prompt\":\"x\",\"stop\":\"four\"}");
    assert_true(run_answer(ids, count, 1, MSG_FINISH_STOP));
    char want[64];
    snprintf(want, sizeof(want), "\"accepted\":%u,\"steps\":%u,", last_message * 3, last_message);
    assert_true(last_message > 3 && last_message < count);
    assert_non_null(strstr(whole.text, want));
    assert_non_null(strstr(whole.text, "\"queue_ms\":0.005,\"prefill_ms\":0.007,"));
    assert_non_null(strstr(whole.text, ",\"draft_ms\":1.000,\"verify_ms\":12.345,"));
    assert_non_null(strstr(whole.text, "\"spec\":\"fixed:4\""));
}

static int setup(void **state)
{
    char path[4096];
    struct err_detail detail;
    golden_path(path, sizeof(path), "deploy/demo");
    if (gw_checkpoint_load(path, "", 0, &checkpoint, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    gw_openai_init(&openai, &checkpoint, "max", false);
    gw_request_init(&request, 64 << 20);
    for (int i = 0; i < 3; i++)
        str_init(&scratch[i], 0);
    str_init(&whole, 0);
    assert_true(tokenizer_find(checkpoint.tokenizer, "<|user|>", 8, &stop_id));
    rng_init(&rng, 11);
    return 0;
}

static int teardown(void **state)
{
    joined_reset(&got);
    for (int i = 0; i < 3; i++)
        str_fini(&scratch[i]);
    str_fini(&whole);
    gw_request_fini(&request);
    gw_openai_fini(&openai);
    gw_checkpoint_fini(&checkpoint);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_answers),
        cmocka_unit_test(stop_strings),
        cmocka_unit_test(one_call_only),
        cmocka_unit_test(stop_ids_are_not_printed),
        cmocka_unit_test(reasoning_can_be_left_out),
        cmocka_unit_test(echo_and_logprobs),
        cmocka_unit_test(unknown_logprobs_are_null),
        cmocka_unit_test(receipt_of_a_cut_answer),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
