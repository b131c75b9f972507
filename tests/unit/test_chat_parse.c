/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/golden_lines.h"

#include "gateway/gw_parse.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer.h"

#define TINY     "tests/golden/tokenizer/tiny/tokenizer.json"
#define CALLS    64
#define CUTTINGS 20

/* All deltas of one output, joined; checks each as it comes. */
struct joined {
    struct str reasoning, content;
    struct str names[CALLS], arguments[CALLS];
    bool ended[CALLS], whole[CALLS];
    uint32_t calls;
    uint32_t events;
};

static void joined_init(struct joined *j)
{
    *j = (struct joined){0};
    str_init(&j->reasoning, 0);
    str_init(&j->content, 0);
    for (size_t i = 0; i < CALLS; i++) {
        str_init(&j->names[i], 0);
        str_init(&j->arguments[i], 0);
    }
}

static void joined_fini(struct joined *j)
{
    str_fini(&j->reasoning);
    str_fini(&j->content);
    for (size_t i = 0; i < CALLS; i++) {
        str_fini(&j->names[i]);
        str_fini(&j->arguments[i]);
    }
}

static void on_event(void *context, const struct gw_parse_event *event)
{
    struct joined *j = context;
    j->events++;
    if (event->type == GW_PARSE_CALL_END) {
        assert_int_equal(event->call_index + 1, j->calls);
        assert_false(j->ended[event->call_index]);
        j->ended[event->call_index] = true;
        j->whole[event->call_index] = event->whole;
        return;
    }
    assert_true(event->bytes > 0);
    assert_int_equal(utf8_valid_prefix(event->text, event->bytes), event->bytes);
    struct str *into = NULL;
    switch (event->type) {
    case GW_PARSE_REASONING:
        into = &j->reasoning;
        break;
    case GW_PARSE_CONTENT:
        into = &j->content;
        break;
    case GW_PARSE_CALL:
        assert_int_equal(event->call_index, j->calls);
        assert_true(j->calls < CALLS);
        assert_true(j->calls == 0 || j->ended[j->calls - 1]);
        into = &j->names[j->calls++];
        break;
    default:
        assert_int_equal(event->call_index + 1, j->calls);
        assert_false(j->ended[event->call_index]);
        into = &j->arguments[event->call_index];
    }
    str_add(into, event->text, event->bytes);
}

/* How a text is cut: lengths of the pieces, 0 ends. */
typedef size_t (*cut_fn)(void *context, size_t left);

static size_t cut_whole(void *context, size_t left)
{
    return left;
}

static size_t cut_bytes(void *context, size_t left)
{
    return 1;
}

static size_t cut_random(void *context, size_t left)
{
    uint32_t most = rng_below(context, 4) == 0 ? 30 : 6;
    size_t count = rng_below(context, most) + 1;
    return count < left ? count : left;
}

struct token_cut {
    const struct tokenizer *tokenizer;
    struct token_ids ids;
    size_t at;
};

static size_t cut_tokens(void *context, size_t left)
{
    struct token_cut *c = context;
    size_t count = 0;
    assert_true(c->at < c->ids.count);
    assert_non_null(tokenizer_bytes(c->tokenizer, c->ids.ids[c->at++], &count));
    assert_true(count <= left);
    return count;
}

static struct gw_parse_options options_of(const struct json *line, struct joined *joined)
{
    const struct json *tail = golden_string(line, "prompt_tail");
    const struct json *choice = json_get(line, "tool_choice");
    struct gw_parse_options o = {.tools = json_get(line, "tools"),
                                 .prompt_tail = tail->text,
                                 .prompt_tail_bytes = tail->bytes,
                                 .on_event = on_event,
                                 .context = joined};
    if (json_string_is(choice, "none"))
        o.choice = GW_PARSE_CHOICE_NONE;
    else if (json_string_is(choice, "required"))
        o.choice = GW_PARSE_CHOICE_REQUIRED;
    return o;
}

static void expect_text(const struct json *name, const char *field, const struct json *want,
                        const struct str *got)
{
    const char *text = got->bytes ? got->text : "";
    bool same = json_is(want, JSON_NULL)
                    ? got->bytes == 0
                    : want->bytes == got->bytes && memcmp(want->text, text, got->bytes) == 0;
    if (!same)
        fail_msg("%.*s: %s:\n%.*s\n%.*s", (int)name->bytes, name->text, field,
                 json_is(want, JSON_NULL) ? 4 : (int)want->bytes,
                 json_is(want, JSON_NULL) ? "null" : want->text, (int)got->bytes, text);
}

static void expect(const struct json *line, const struct joined *j, enum gw_parse_finish finish)
{
    const struct json *name = golden_string(line, "name");
    const struct json *want = json_get(line, "expect");
    expect_text(name, "reasoning_content", json_get(want, "reasoning_content"), &j->reasoning);
    expect_text(name, "content", json_get(want, "content"), &j->content);
    const struct json *calls = json_get(want, "tool_calls");
    if (calls->count != j->calls)
        fail_msg("%.*s: %u calls, not %u", (int)name->bytes, name->text, j->calls, calls->count);
    uint32_t i = 0;
    for (const struct json *call = calls->child; call; call = call->next, i++) {
        expect_text(name, "name", json_get(call, "name"), &j->names[i]);
        expect_text(name, "arguments", json_get(call, "arguments"), &j->arguments[i]);
        assert_true(j->ended[i]);
        const struct str *a = &j->arguments[i];
        if (j->whole[i])
            assert_int_equal(a->text[a->bytes - 1], '}');
    }
    if (!json_string_is(json_get(want, "finish_reason"), gw_parse_finish_name(finish)))
        fail_msg("%.*s: finish_reason %s", (int)name->bytes, name->text,
                 gw_parse_finish_name(finish));
}

static void parse_line(const struct json *line, cut_fn cut, void *context)
{
    const struct json *text = golden_string(line, "text");
    bool length = json_string_is(json_get(line, "engine_finish"), "length");
    struct joined j;
    joined_init(&j);
    const struct gw_parse_options o = options_of(line, &j);
    struct gw_parse *p = NULL;
    enum gw_parse_finish finish;
    assert_int_equal(gw_parse_create(&o, &p), ERR_OK);
    for (size_t at = 0; at < text->bytes;) {
        size_t count = cut(context, text->bytes - at);
        assert_int_equal(gw_parse_feed(p, text->text + at, count), ERR_OK);
        at += count;
    }
    assert_int_equal(gw_parse_finish(p, length ? GW_PARSE_END_LENGTH : GW_PARSE_END_STOP, &finish),
                     ERR_OK);
    assert_int_equal(gw_parse_call_count(p), j.calls);
    gw_parse_destroy(&p);
    expect(line, &j, finish);
    joined_fini(&j);
}

static void on_whole(void *context, struct arena *arena, const struct json *line)
{
    parse_line(line, cut_whole, NULL);
}

static void on_bytes(void *context, struct arena *arena, const struct json *line)
{
    parse_line(line, cut_bytes, NULL);
}

static void on_random(void *context, struct arena *arena, const struct json *line)
{
    for (uint32_t i = 0; i < CUTTINGS; i++)
        parse_line(line, cut_random, context);
}

static void on_tokens(void *context, struct arena *arena, const struct json *line)
{
    const struct json *text = golden_string(line, "text");
    struct token_cut cut = {.tokenizer = context};
    token_ids_init(&cut.ids, 1 << 20);
    assert_int_equal(tokenizer_encode(context, text->text, text->bytes, true, &cut.ids), ERR_OK);
    parse_line(line, cut_tokens, &cut);
    assert_int_equal(cut.at, cut.ids.count);
    token_ids_fini(&cut.ids);
}

static void golden(golden_line_fn fn, void *context)
{
    assert_int_equal(golden_lines("tests/golden/chat/parse.jsonl", fn, context), 190);
}

static void test_whole(void **state)
{
    golden(on_whole, NULL);
}

static void test_one_byte(void **state)
{
    golden(on_bytes, NULL);
}

static void test_tokens(void **state)
{
    char path[4096];
    golden_path(path, sizeof(path), TINY);
    struct err_detail detail = {{0}};
    struct tokenizer *t = NULL;
    if (tokenizer_load(path, NULL, &t, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    golden(on_tokens, t);
    tokenizer_destroy(&t);
}

static void test_random_cuttings(void **state)
{
    struct rng rng;
    rng_init(&rng, 20);
    golden(on_random, &rng);
}

static const char TOOLS[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"now\"}}, {\"type\": \"function\", "
    "\"function\": {\"name\": \"search\", \"parameters\": {\"properties\": {\"q\": {\"type\": "
    "\"string\"}, \"n\": {\"type\": \"integer\"}, \"o\": {\"type\": [\"string\", \"null\"]}}}}}]";

/* A parser by hand, over TOOLS. */
struct bench {
    struct arena arena;
    struct joined joined;
    struct gw_parse *parse;
};

static void bench_init(struct bench *b, const char *tail, const struct gw_parse_stop *stops,
                       size_t stop_count)
{
    struct json *tools = NULL;
    struct json_error error;
    arena_init(&b->arena, 1 << 14, 1 << 20);
    joined_init(&b->joined);
    assert_int_equal(json_parse(&b->arena, NULL, TOOLS, sizeof(TOOLS) - 1, &tools, &error), ERR_OK);
    const struct gw_parse_options o = {.tools = tools,
                                       .prompt_tail = tail,
                                       .prompt_tail_bytes = strlen(tail),
                                       .stops = stops,
                                       .stop_count = stop_count,
                                       .held_bytes_max = 4096,
                                       .on_event = on_event,
                                       .context = &b->joined};
    assert_int_equal(gw_parse_create(&o, &b->parse), ERR_OK);
}

static void bench_feed(struct bench *b, const char *text)
{
    assert_int_equal(gw_parse_feed(b->parse, text, strlen(text)), ERR_OK);
}

static void bench_fini(struct bench *b)
{
    gw_parse_destroy(&b->parse);
    joined_fini(&b->joined);
    arena_fini(&b->arena);
}

static void expect_so_far(const struct str *got, const char *want)
{
    assert_int_equal(got->bytes, strlen(want));
    assert_memory_equal(got->bytes ? got->text : "", want, got->bytes);
}

/* Nothing is held that is already decided. */
static void test_sends_at_once(void **state)
{
    struct bench b;
    bench_init(&b, "<think>", NULL, 0);
    bench_feed(&b, "I think");
    expect_so_far(&b.joined.reasoning, "I think");
    assert_true(gw_parse_in_reasoning(b.parse));
    bench_feed(&b, " <");
    expect_so_far(&b.joined.reasoning, "I think ");
    bench_feed(&b, "b");
    expect_so_far(&b.joined.reasoning, "I think <b");
    bench_feed(&b, "</think>\n");
    assert_false(gw_parse_in_reasoning(b.parse));
    expect_so_far(&b.joined.content, "");
    bench_feed(&b, "\xe6");
    expect_so_far(&b.joined.content, "");
    bench_feed(&b, "\xbc\xa2 ");
    expect_so_far(&b.joined.content, "\n\xe6\xbc\xa2 ");
    bench_feed(&b, "<tool_call>search");
    assert_int_equal(b.joined.calls, 0);
    bench_feed(&b, "<arg_key>");
    assert_int_equal(b.joined.calls, 1);
    expect_so_far(&b.joined.names[0], "search");
    expect_so_far(&b.joined.arguments[0], "{");
    bench_feed(&b, "q</arg_key><arg_value>");
    expect_so_far(&b.joined.arguments[0], "{\"q\": \"");
    bench_feed(&b, "a\n</arg_value");
    expect_so_far(&b.joined.arguments[0], "{\"q\": \"a\\n");
    bench_feed(&b, "> x");
    expect_so_far(&b.joined.arguments[0], "{\"q\": \"a\\n</arg_value> x");
    bench_feed(&b, "</arg_value><arg_key>o</arg_key><arg_value>nul");
    expect_so_far(&b.joined.arguments[0], "{\"q\": \"a\\n</arg_value> x\"");
    bench_feed(&b, "k");
    expect_so_far(&b.joined.arguments[0], "{\"q\": \"a\\n</arg_value> x\", \"o\": \"nulk");
    bench_feed(&b, "</arg_value></tool_call>");
    assert_true(b.joined.ended[0] && b.joined.whole[0]);
    enum gw_parse_finish finish;
    assert_int_equal(gw_parse_finish(b.parse, GW_PARSE_END_STOP, &finish), ERR_OK);
    assert_int_equal(finish, GW_PARSE_FINISH_TOOL_CALLS);
    bench_fini(&b);
}

static void stop_case(const char *text, const char *reasoning, const char *content, bool found,
                      size_t which, size_t piece)
{
    const struct gw_parse_stop stops[] = {{"own fox", 7}, {"\nUser:", 6}, {"fox j", 5}};
    struct bench b;
    bench_init(&b, "<think>", stops, 3);
    size_t bytes = strlen(text);
    for (size_t at = 0; at < bytes; at += piece) {
        size_t count = bytes - at < piece ? bytes - at : piece;
        assert_int_equal(gw_parse_feed(b.parse, text + at, count), ERR_OK);
    }
    enum gw_parse_finish finish;
    size_t index = SIZE_MAX;
    assert_int_equal(gw_parse_finish(b.parse, GW_PARSE_END_STOP, &finish), ERR_OK);
    assert_int_equal(gw_parse_stopped(b.parse, &index), found);
    assert_int_equal(index, found ? which : SIZE_MAX);
    expect_so_far(&b.joined.reasoning, reasoning);
    expect_so_far(&b.joined.content, content);
    bench_fini(&b);
}

static void test_stop_strings(void **state)
{
    for (size_t piece = 1; piece < 40; piece++) {
        stop_case("own fox</think>A brown fox jumps", "own fox", "A br", true, 0, piece);
        stop_case("</think>A red fox jumps", "", "A red ", true, 2, piece);
        stop_case("</think>ownown fox", "", "own", true, 0, piece);
        stop_case("</think>own fo", "", "own fo", false, 0, piece);
        stop_case("</think>a\n\nUser:", "", "a\n", true, 1, piece);
        stop_case("</think>\nUser: x", "", "", true, 1, piece);
        stop_case("</think>own <tool_call>now</tool_call>fox", "", "own fox", false, 0, piece);
        stop_case("</think><tool_call>search<arg_key>q</arg_key><arg_value>own fox</arg_value>"
                  "</tool_call>x",
                  "", "x", false, 0, piece);
    }
}

static void test_refused_stops(void **state)
{
    const struct gw_parse_stop empty = {"", 0};
    struct gw_parse_stop many[GW_PARSE_STOPS_MAX + 1];
    for (size_t i = 0; i < GW_PARSE_STOPS_MAX + 1; i++)
        many[i] = (struct gw_parse_stop){"x", 1};
    struct gw_parse_options o = {.on_event = on_event, .stops = &empty, .stop_count = 1};
    struct gw_parse *p = NULL;
    assert_int_equal(gw_parse_create(&o, &p), ERR_INVALID);
    o.stops = many;
    o.stop_count = GW_PARSE_STOPS_MAX + 1;
    assert_int_equal(gw_parse_create(&o, &p), ERR_INVALID);
    assert_null(p);
}

/* What must be held is bounded, and the parser stays in error. */
static void test_held_bound(void **state)
{
    static const char *const heads[] = {
        "</think>", "</think><tool_call>", "</think><tool_call>search<arg_key>",
        "</think><tool_call>search<arg_key>n</arg_key><arg_value>",
        "</think><tool_call>search<arg_key>q</arg_key><arg_value></arg_value>"};
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        struct bench b;
        bench_init(&b, "<think>", NULL, 0);
        bench_feed(&b, heads[i]);
        enum err e = ERR_OK;
        for (size_t n = 0; n < 5000 && e == ERR_OK; n++)
            e = gw_parse_feed(b.parse, i == 0 || i == 4 ? " " : "7", 1);
        assert_int_equal(e, ERR_TOO_LARGE);
        assert_int_equal(gw_parse_feed(b.parse, "x", 1), ERR_TOO_LARGE);
        enum gw_parse_finish finish;
        assert_int_equal(gw_parse_finish(b.parse, GW_PARSE_END_STOP, &finish), ERR_TOO_LARGE);
        bench_fini(&b);
    }
}

/* A megabyte byte by byte of each kind of undecided text: linear, so done in an instant. */
static void test_linear(void **state)
{
    static const char *const units[] = {
        "<", "<tool_call>", "</arg_value> ", "</tool_call> ", "<tool_call>now\n", "</think>", "a "};
    for (size_t u = 0; u < sizeof(units) / sizeof(units[0]); u++) {
        struct bench b;
        bench_init(&b, "<think>", NULL, 0);
        bench_feed(&b, u == 2 || u == 3 ? "<tool_call>search<arg_key>q</arg_key><arg_value>" : "");
        size_t bytes = strlen(units[u]);
        for (size_t n = 0; n < 1 << 18; n++)
            assert_int_equal(gw_parse_feed(b.parse, units[u] + n % bytes, 1), ERR_OK);
        enum gw_parse_finish finish;
        assert_int_equal(gw_parse_finish(b.parse, GW_PARSE_END_STOP, &finish), ERR_OK);
        bench_fini(&b);
    }
}

/* Many keys in one call, each twice. */
static void test_many_keys(void **state)
{
    struct bench b;
    bench_init(&b, "", NULL, 0);
    bench_feed(&b, "<tool_call>now");
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 0; i < 500; i++) {
            char pair[96];
            (void)snprintf(pair, sizeof(pair), "<arg_key>k%u</arg_key><arg_value>%u</arg_value>", i,
                           round);
            bench_feed(&b, pair);
        }
    bench_feed(&b, "</tool_call>");
    struct str want;
    str_init(&want, 0);
    for (uint32_t i = 0; i < 500; i++)
        str_add_format(&want, "%s\"k%u\": 0", i ? ", " : "{", i);
    str_add_char(&want, '}');
    expect_so_far(&b.joined.arguments[0], want.text);
    str_fini(&want);
    bench_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),         cmocka_unit_test(test_one_byte),
        cmocka_unit_test(test_tokens),        cmocka_unit_test(test_random_cuttings),
        cmocka_unit_test(test_sends_at_once), cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_refused_stops), cmocka_unit_test(test_held_bound),
        cmocka_unit_test(test_linear),        cmocka_unit_test(test_many_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
