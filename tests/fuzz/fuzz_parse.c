/* SPDX-License-Identifier: Apache-2.0 */
/* The output parser: joined deltas must not depend on how the text is cut.
 *
 * Input: a byte of flags, a byte that seeds the cutting, then the text, in which bytes below
 * TAG_BYTES stand for tags and words so that structure is found quickly. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_parse.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

static const char *const WORDS[] = {
    "<think>",     "</think>",     "<tool_call>", "</tool_call>", "<arg_key>",   "</arg_key>",
    "<arg_value>", "</arg_value>", "\n",          "now",          "search",      "q",
    "n",           "null",         "[1, {\"a\":", "}]",           "\xe6\xbc\xa2"};
#define TEXT_BYTES_MAX ((size_t)1 << 16)

static const char TOOLS[] =
    "[{\"name\": \"now\"}, {\"name\": \"search\", \"parameters\": {\"properties\": {\"q\": "
    "{\"type\": \"string\"}, \"n\": {\"type\": \"integer\"}, \"null\": {\"anyOf\": [{\"type\": "
    "\"string\"}, {\"type\": \"null\"}]}, \"now\": {\"$ref\": \"#/$defs/u\"}}, \"$defs\": {\"u\": "
    "{\"type\": [\"string\", \"array\", \"boolean\"]}}}}]";

/* Everything that came, in one text for each kind. */
struct joined {
    struct str reasoning, content, calls;
    struct str arguments; /* of the call at hand */
    enum gw_parse_finish finish;
    bool stopped;
    bool open; /* a call that has begun and not ended */
};

/* Arguments of a whole call are one JSON object. */
static void check_json(const struct str *text)
{
    struct arena arena;
    struct json *value = NULL;
    struct json_error error;
    const struct json_options options = {.depth_max = 80};
    arena_init(&arena, 1 << 14, 64 << 20);
    CHECK(json_parse(&arena, &options, text->text, text->bytes, &value, &error) == ERR_OK);
    CHECK(json_is(value, JSON_OBJECT));
    arena_fini(&arena);
}

static void on_event(void *context, const struct gw_parse_event *event)
{
    struct joined *j = context;
    CHECK(event->type == GW_PARSE_CALL_END || event->bytes > 0);
    CHECK(event->bytes == 0 || utf8_valid_prefix(event->text, event->bytes) == event->bytes);
    switch (event->type) {
    case GW_PARSE_REASONING:
        str_add(&j->reasoning, event->text, event->bytes);
        break;
    case GW_PARSE_CONTENT:
        str_add(&j->content, event->text, event->bytes);
        break;
    case GW_PARSE_CALL:
        CHECK(!j->open);
        j->open = true;
        str_add_format(&j->calls, "[%u ", event->call_index);
        str_add(&j->calls, event->text, event->bytes);
        str_add_char(&j->calls, ' ');
        break;
    case GW_PARSE_ARGUMENTS:
        CHECK(j->open);
        str_add(&j->calls, event->text, event->bytes);
        str_add(&j->arguments, event->text, event->bytes);
        break;
    case GW_PARSE_CALL_END:
        CHECK(j->open);
        j->open = false;
        if (event->whole)
            check_json(&j->arguments);
        str_clear(&j->arguments);
        str_add_text(&j->calls, event->whole ? " whole]" : " cut]");
        break;
    }
}

static void parse(struct joined *j, const struct gw_parse_options *base, const struct str *text,
                  bool length, struct rng *cut)
{
    struct gw_parse_options o = *base;
    struct gw_parse *p = NULL;
    *j = (struct joined){0};
    str_init(&j->reasoning, 0);
    str_init(&j->content, 0);
    str_init(&j->calls, 0);
    str_init(&j->arguments, 0);
    o.on_event = on_event;
    o.context = j;
    CHECK(gw_parse_create(&o, &p) == ERR_OK);
    for (size_t at = 0; at < text->bytes;) {
        size_t count = text->bytes - at;
        if (cut != NULL) {
            size_t some = rng_below(cut, 12) + 1;
            count = some < count ? some : count;
        }
        CHECK(gw_parse_feed(p, text->text + at, count) == ERR_OK);
        at += count;
    }
    CHECK(gw_parse_finish(p, length ? GW_PARSE_END_LENGTH : GW_PARSE_END_STOP, &j->finish) ==
          ERR_OK);
    CHECK(!j->open);
    j->stopped = gw_parse_stopped(p, NULL);
    gw_parse_destroy(&p);
}

static void joined_fini(struct joined *j)
{
    str_fini(&j->reasoning);
    str_fini(&j->content);
    str_fini(&j->calls);
    str_fini(&j->arguments);
}

static bool same(const struct str *a, const struct str *b)
{
    return a->bytes == b->bytes && (a->bytes == 0 || memcmp(a->text, b->text, a->bytes) == 0);
}

static void expand(const uint8_t *data, size_t size, struct str *text)
{
    for (size_t i = 0; i < size && text->bytes < TEXT_BYTES_MAX; i++) {
        if (data[i] < ARRAY_COUNT(WORDS))
            str_add_text(text, WORDS[data[i]]);
        else
            str_add_char(text, (char)data[i]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    const struct gw_parse_stop stops[] = {{"nown", 4}, {"\nq", 2}, {"now<", 4}};
    const bool think = data[0] & 1, length = data[0] & 2, tools_on = data[0] & 4;
    struct arena arena;
    struct json *tools = NULL;
    struct json_error error;
    arena_init(&arena, 1 << 14, 16 << 20);
    CHECK(json_parse(&arena, NULL, TOOLS, sizeof(TOOLS) - 1, &tools, &error) == ERR_OK);
    const struct gw_parse_options o = {.tools = tools_on ? tools : NULL,
                                       .prompt_tail = "<think>",
                                       .prompt_tail_bytes = think ? 7 : 6,
                                       .stops = stops,
                                       .stop_count = data[0] & 8 ? 3 : 0};
    struct str text;
    struct rng rng;
    struct joined whole, pieces;
    str_init(&text, 0);
    expand(data + 2, size - 2, &text);
    rng_init(&rng, data[1]);
    parse(&whole, &o, &text, length, NULL);
    parse(&pieces, &o, &text, length, &rng);
    CHECK(same(&whole.reasoning, &pieces.reasoning));
    CHECK(same(&whole.content, &pieces.content));
    CHECK(same(&whole.calls, &pieces.calls));
    CHECK(whole.finish == pieces.finish && whole.stopped == pieces.stopped);
    joined_fini(&whole);
    joined_fini(&pieces);
    str_fini(&text);
    arena_fini(&arena);
    return 0;
}
