/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_parse.h"

#include <stdlib.h>
#include <string.h>

#include "gateway/gw_parse_state.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

#define HELD_BYTES_DEFAULT  ((size_t)16 << 20)
#define ARENA_CHUNK_BYTES   4096
#define ARENA_PER_HELD_BYTE 64 /* a node of JSON for every other byte of text */

static const struct {
    const char *text;
    size_t bytes;
} TAGS[GW_PARSE_TAG_COUNT] = {
    [GW_PARSE_TAG_THINK] = {"<think>", 7},      [GW_PARSE_TAG_THINK_END] = {"</think>", 8},
    [GW_PARSE_TAG_CALL] = {"<tool_call>", 11},  [GW_PARSE_TAG_CALL_END] = {"</tool_call>", 12},
    [GW_PARSE_TAG_KEY] = {"<arg_key>", 9},      [GW_PARSE_TAG_KEY_END] = {"</arg_key>", 10},
    [GW_PARSE_TAG_VALUE] = {"<arg_value>", 11}, [GW_PARSE_TAG_VALUE_END] = {"</arg_value>", 12},
};

const char *gw_parse_tag_text(enum gw_parse_tag tag)
{
    CHECK(tag < GW_PARSE_TAG_COUNT);
    return TAGS[tag].text;
}

size_t gw_parse_tag_bytes(enum gw_parse_tag tag)
{
    CHECK(tag < GW_PARSE_TAG_COUNT);
    return TAGS[tag].bytes;
}

enum gw_parse_match gw_parse_tag_at(const struct gw_parse *p, uint32_t mask,
                                    enum gw_parse_tag *ret_tag)
{
    const char *text = p->in.text + p->at;
    size_t left = p->in.bytes - p->at;
    bool partial = false;
    CHECK(left > 0);
    for (uint32_t tag = 0; tag < GW_PARSE_TAG_COUNT; tag++) {
        size_t shared = left < TAGS[tag].bytes ? left : TAGS[tag].bytes;
        if (!(mask & GW_PARSE_TAG_BIT(tag)) || memcmp(text, TAGS[tag].text, shared) != 0)
            continue;
        if (shared == TAGS[tag].bytes) {
            *ret_tag = (enum gw_parse_tag)tag;
            return GW_PARSE_MATCH_FULL;
        }
        partial = true;
    }
    return partial && !p->final ? GW_PARSE_MATCH_PARTIAL : GW_PARSE_MATCH_NONE;
}

void gw_parse_send_event(struct gw_parse *p, const struct gw_parse_event *event)
{
    p->on_event(p->context, event);
}

void gw_parse_send(struct gw_parse *p)
{
    if (p->out.bytes == 0)
        return;
    const struct gw_parse_event event = {.type = p->out_type,
                                         .call_index = p->call_count ? p->call_count - 1 : 0,
                                         .text = p->out.text,
                                         .bytes = p->out.bytes};
    gw_parse_send_event(p, &event);
    str_clear(&p->out);
}

struct str *gw_parse_out(struct gw_parse *p, enum gw_parse_event_type type)
{
    if (p->out_type != type)
        gw_parse_send(p);
    p->out_type = type;
    return &p->out;
}

/* Content that is white space alone counts as none, so white space waits for other text. */
static void send_content(struct gw_parse *p)
{
    const char *text = p->passed.text;
    size_t bytes = p->passed.bytes, white = 0;
    while (!p->content_begun && white < bytes && gw_parse_is_white(text[white]))
        white++;
    if (bytes == 0)
        return;
    if (!p->content_begun && white == bytes) {
        str_add(&p->blank, text, bytes);
    } else {
        struct str *out = gw_parse_out(p, GW_PARSE_CONTENT);
        if (p->blank.bytes > 0)
            str_add(out, p->blank.text, p->blank.bytes);
        str_clear(&p->blank);
        str_add(out, text, bytes);
        p->content_begun = true;
    }
    str_clear(&p->passed);
}

void gw_parse_content_release(struct gw_parse *p)
{
    gw_parse_stops_release(&p->stops, &p->passed);
    send_content(p);
}

void gw_parse_text(struct gw_parse *p, enum gw_parse_state state, const char *text, size_t bytes)
{
    CHECK(state == GW_PARSE_STATE_REASONING || state == GW_PARSE_STATE_CONTENT);
    if (bytes == 0)
        return;
    if (state == GW_PARSE_STATE_REASONING) {
        str_add(gw_parse_out(p, GW_PARSE_REASONING), text, bytes);
        return;
    }
    for (size_t i = 0; i < bytes && p->ends_with_call; i++)
        p->ends_with_call = gw_parse_is_white(text[i]);
    gw_parse_stops_add(&p->stops, text, bytes, &p->passed);
    send_content(p);
}

static void start_release(struct gw_parse *p)
{
    p->state = p->base;
    gw_parse_text(p, p->base, p->held.text, p->held.bytes);
    str_clear(&p->held);
}

static bool step_start(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    while (p->at < p->in.bytes && gw_parse_is_white(p->in.text[p->at]))
        str_add_char(&p->held, p->in.text[p->at++]);
    if (p->at == p->in.bytes)
        return true;
    switch (gw_parse_tag_at(p, GW_PARSE_TAG_BIT(GW_PARSE_TAG_THINK), &tag)) {
    case GW_PARSE_MATCH_FULL:
        p->at += gw_parse_tag_bytes(tag);
        str_clear(&p->held);
        p->state = GW_PARSE_STATE_REASONING;
        return true;
    case GW_PARSE_MATCH_PARTIAL:
        return false;
    default:
        start_release(p);
        return true;
    }
}

static void text_tag(struct gw_parse *p, enum gw_parse_tag tag)
{
    p->at += gw_parse_tag_bytes(tag);
    p->ends_with_call = false;
    if (tag == GW_PARSE_TAG_CALL) {
        p->base = p->state;
        gw_parse_name_begin(p);
    } else {
        CHECK(tag == GW_PARSE_TAG_THINK_END);
        p->late_closer = false;
        p->state = GW_PARSE_STATE_CONTENT;
    }
}

/* Reasoning and content: all text up to the next tag that counts here. */
static bool step_text(struct gw_parse *p)
{
    uint32_t mask = p->tools_on ? GW_PARSE_TAG_BIT(GW_PARSE_TAG_CALL) : 0;
    if (p->state == GW_PARSE_STATE_REASONING || p->late_closer)
        mask |= GW_PARSE_TAG_BIT(GW_PARSE_TAG_THINK_END);
    const char *begin = p->in.text + p->at;
    size_t left = p->in.bytes - p->at;
    const char *angle = mask != 0 ? memchr(begin, '<', left) : NULL;
    size_t plain = angle ? (size_t)(angle - begin) : left;
    gw_parse_text(p, p->state, begin, plain);
    p->at += plain;
    if (angle == NULL)
        return true;
    enum gw_parse_tag tag;
    switch (gw_parse_tag_at(p, mask, &tag)) {
    case GW_PARSE_MATCH_FULL:
        text_tag(p, tag);
        return true;
    case GW_PARSE_MATCH_PARTIAL:
        return false;
    default:
        gw_parse_text(p, p->state, "<", 1);
        p->at++;
        return true;
    }
}

static bool step(struct gw_parse *p)
{
    switch (p->state) {
    case GW_PARSE_STATE_START:
        return step_start(p);
    case GW_PARSE_STATE_REASONING:
    case GW_PARSE_STATE_CONTENT:
        return step_text(p);
    default:
        return gw_parse_call_step(p);
    }
}

static bool over_bound(const struct gw_parse *p)
{
    return p->in.overflow || p->held.overflow || p->key.overflow || p->value.overflow ||
           p->blank.overflow || p->out.overflow || p->passed.overflow || p->stops.held.overflow;
}

static enum err run(struct gw_parse *p)
{
    while (p->at < p->in.bytes && !p->stops.found && !over_bound(p) && step(p))
        ;
    if (over_bound(p))
        p->error = ERR_TOO_LARGE;
    if (p->stops.found || p->error != ERR_OK)
        p->at = p->in.bytes;
    str_drop_front(&p->in, p->at);
    p->at = 0;
    CHECK(p->in.bytes <= 12); /* less than the longest tag */
    return p->error;
}

static void init_buffers(struct gw_parse *p, size_t held_bytes_max)
{
    str_init(&p->in, 0);
    str_init(&p->out, 0);
    str_init(&p->passed, 0);
    str_init(&p->held, held_bytes_max);
    str_init(&p->key, held_bytes_max);
    str_init(&p->value, held_bytes_max);
    str_init(&p->blank, held_bytes_max);
    arena_init(&p->arena, ARENA_CHUNK_BYTES, held_bytes_max * ARENA_PER_HELD_BYTE);
}

static bool ends_in_think(const struct gw_parse_options *o)
{
    size_t bytes = TAGS[GW_PARSE_TAG_THINK].bytes;
    return o->prompt_tail_bytes >= bytes && memcmp(o->prompt_tail + o->prompt_tail_bytes - bytes,
                                                   TAGS[GW_PARSE_TAG_THINK].text, bytes) == 0;
}

enum err gw_parse_create(const struct gw_parse_options *options, struct gw_parse **ret_parse)
{
    CHECK(options != NULL && options->on_event != NULL && ret_parse != NULL);
    struct gw_parse *p = calloc(1, sizeof(*p));
    if (p == NULL)
        return ERR_NOMEM;
    p->magic = GW_PARSE_MAGIC;
    p->on_event = options->on_event;
    p->context = options->context;
    init_buffers(p, options->held_bytes_max ? options->held_bytes_max : HELD_BYTES_DEFAULT);
    p->tools_on = json_is(options->tools, JSON_ARRAY) && options->tools->count > 0 &&
                  options->choice != GW_PARSE_CHOICE_NONE;
    p->base = ends_in_think(options) ? GW_PARSE_STATE_REASONING : GW_PARSE_STATE_CONTENT;
    enum err e = gw_parse_tools_init(&p->tools, p->tools_on ? options->tools : NULL);
    if (e == ERR_OK)
        e = gw_parse_stops_init(&p->stops, options->stops, options->stop_count);
    if (e != ERR_OK) {
        gw_parse_destroy(&p);
        return e;
    }
    *ret_parse = p;
    return ERR_OK;
}

void gw_parse_destroy(struct gw_parse **parse_p)
{
    struct gw_parse *p = *parse_p;
    *parse_p = NULL;
    if (p == NULL)
        return;
    CHECK_OBJ(p, GW_PARSE_MAGIC);
    gw_parse_tools_fini(&p->tools);
    gw_parse_stops_fini(&p->stops);
    gw_parse_keys_fini(&p->keys);
    str_fini(&p->in);
    str_fini(&p->out);
    str_fini(&p->passed);
    str_fini(&p->held);
    str_fini(&p->key);
    str_fini(&p->value);
    str_fini(&p->blank);
    arena_fini(&p->arena);
    p->magic = 0;
    free(p);
}

enum err gw_parse_feed(struct gw_parse *p, const void *bytes, size_t count)
{
    CHECK_OBJ(p, GW_PARSE_MAGIC);
    CHECK(!p->finished && (bytes != NULL || count == 0));
    if (p->error != ERR_OK || p->stops.found)
        return p->error;
    utf8_stream_add(&p->utf8, bytes, count, &p->in);
    enum err e = run(p);
    if (e == ERR_OK)
        gw_parse_send(p);
    return e;
}

/* Decides what is held, in whatever state the text ended. */
static void finish_state(struct gw_parse *p, enum gw_parse_end end)
{
    if (p->state == GW_PARSE_STATE_START)
        start_release(p);
    else if (p->state != GW_PARSE_STATE_REASONING && p->state != GW_PARSE_STATE_CONTENT)
        gw_parse_call_finish(p, end);
    if (!p->stops.found)
        gw_parse_content_release(p);
}

static enum gw_parse_finish finish_reason(const struct gw_parse *p, enum gw_parse_end end)
{
    if (end == GW_PARSE_END_LENGTH && !p->stops.found)
        return p->ends_with_call ? GW_PARSE_FINISH_TOOL_CALLS : GW_PARSE_FINISH_LENGTH;
    return p->call_count > 0 ? GW_PARSE_FINISH_TOOL_CALLS : GW_PARSE_FINISH_STOP;
}

enum err gw_parse_finish(struct gw_parse *p, enum gw_parse_end end,
                         enum gw_parse_finish *ret_finish)
{
    CHECK_OBJ(p, GW_PARSE_MAGIC);
    CHECK(!p->finished && ret_finish != NULL);
    p->finished = true;
    if (p->error != ERR_OK)
        return p->error;
    utf8_stream_end(&p->utf8, &p->in);
    TRY(run(p));
    if (p->state == GW_PARSE_STATE_NAME && end == GW_PARSE_END_LENGTH && p->in.bytes > 0 &&
        gw_parse_name_stays_open(p))
        str_clear(&p->in); /* dropped together with the name */
    p->final = true;
    TRY(run(p));
    if (!p->stops.found)
        finish_state(p, end);
    if (over_bound(p))
        p->error = ERR_TOO_LARGE;
    if (p->error != ERR_OK)
        return p->error;
    gw_parse_send(p);
    *ret_finish = finish_reason(p, end);
    return ERR_OK;
}

bool gw_parse_stopped(const struct gw_parse *p, size_t *ret_stop)
{
    CHECK_OBJ(p, GW_PARSE_MAGIC);
    if (p->stops.found && ret_stop != NULL)
        *ret_stop = p->stops.found_index;
    return p->stops.found;
}

bool gw_parse_in_reasoning(const struct gw_parse *p)
{
    CHECK_OBJ(p, GW_PARSE_MAGIC);
    return p->state == GW_PARSE_STATE_REASONING ||
           ((p->state == GW_PARSE_STATE_START || p->state == GW_PARSE_STATE_NAME) &&
            p->base == GW_PARSE_STATE_REASONING);
}

uint32_t gw_parse_call_count(const struct gw_parse *p)
{
    CHECK_OBJ(p, GW_PARSE_MAGIC);
    return p->call_count;
}

const char *gw_parse_finish_name(enum gw_parse_finish finish)
{
    static const char *const names[] = {"stop", "length", "tool_calls"};
    CHECK((size_t)finish < ARRAY_COUNT(names));
    return names[finish];
}
