/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/json.h"

#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json_scan.h"

#define DEPTH_MAX_DEFAULT 64u
#define BYTES_MAX_DEFAULT ((size_t)64 << 20)

/* One open array or object.  Frames form a chain that is kept when a container closes and used
 * again by the next one of that depth. */
struct frame {
    struct frame *outer;
    struct frame *inner;
    struct json *node;
    struct json *last; /* last child, NULL while empty */
    struct json_keys keys;
};

struct parser {
    struct json_cursor c;
    struct frame *outermost;
    struct frame *frame; /* innermost open container */
    uint32_t depth;
    uint32_t depth_max;
    bool duplicate_keys_last;
};

static void skip_space(struct json_cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\r' || *c->at == '\t'))
        c->at++;
}

/* Opens the container at the cursor. */
static enum err container_open(struct parser *p, struct json *node)
{
    if (p->depth == p->depth_max)
        return json_refuse(&p->c, p->c.at, "nested too deeply");
    struct frame *frame = p->frame == NULL ? p->outermost : p->frame->inner;
    if (frame == NULL) {
        frame = arena_alloc(p->c.arena, sizeof *frame);
        if (frame == NULL)
            return ERR_NOMEM;
        frame->outer = p->frame;
        if (p->frame == NULL)
            p->outermost = frame;
        else
            p->frame->inner = frame;
    }
    CHECK(frame->outer == p->frame);
    node->type = *p->c.at == '{' ? JSON_OBJECT : JSON_ARRAY;
    frame->node = node;
    frame->last = NULL;
    frame->keys = (struct json_keys){0};
    p->frame = frame;
    p->depth++;
    p->c.at++;
    return ERR_OK;
}

static void container_close(struct parser *p)
{
    CHECK(p->frame != NULL && p->depth > 0);
    p->frame = p->frame->outer;
    p->depth--;
    p->c.at++;
}

static char closing(const struct frame *frame)
{
    return frame->node->type == JSON_OBJECT ? '}' : ']';
}

static enum err child_append(struct parser *p, struct json **ret_child)
{
    struct frame *frame = p->frame;
    CHECK(frame != NULL);
    CHECK((frame->last == NULL) == (frame->node->count == 0));
    if (frame->node->count == UINT32_MAX)
        return ERR_TOO_LARGE;
    struct json *child = arena_alloc(p->c.arena, sizeof *child);
    if (child == NULL)
        return ERR_NOMEM;
    if (frame->last == NULL)
        frame->node->child = child;
    else
        frame->last->next = child;
    frame->last = child;
    frame->node->count++;
    *ret_child = child;
    return ERR_OK;
}

/* Reads `"key":` and yields the member to fill: a new one, or the one that had the key before. */
static enum err member_begin(struct parser *p, struct json **ret_member)
{
    struct json_cursor *c = &p->c;
    struct frame *frame = p->frame;
    const char *key_at = c->at;
    CHECK(frame->node->type == JSON_OBJECT);
    const char *key;
    size_t key_bytes;
    if (c->at == c->end || *c->at != '"')
        return json_refuse(c, c->at, c->at == c->end ? "unexpected end" : "key expected");
    TRY(json_scan_string(c, &key, &key_bytes));
    struct json *member = json_keys_find(&frame->keys, frame->node, key, key_bytes);
    if (member != NULL && !p->duplicate_keys_last)
        return json_refuse(c, key_at, "duplicate key");
    skip_space(c);
    if (c->at == c->end || *c->at != ':')
        return json_refuse(c, c->at, c->at == c->end ? "unexpected end" : "':' expected");
    c->at++;
    if (member != NULL) {
        /* The new value takes the old one's place. */
        *member =
            (struct json){.key = member->key, .key_bytes = member->key_bytes, .next = member->next};
    } else {
        TRY(child_append(p, &member));
        member->key = key;
        member->key_bytes = key_bytes;
        if (!json_keys_add(&frame->keys, c->arena, frame->node, member))
            return ERR_NOMEM;
    }
    *ret_member = member;
    return ERR_OK;
}

static enum err child_begin(struct parser *p, struct json **ret_child)
{
    CHECK(p->frame != NULL);
    skip_space(&p->c);
    if (p->frame->node->type == JSON_OBJECT)
        return member_begin(p, ret_child);
    return child_append(p, ret_child);
}

/* Reads a scalar whole, or only the opening bracket of a container. */
static enum err value_begin(struct parser *p, struct json *node)
{
    struct json_cursor *c = &p->c;
    CHECK(node->child == NULL && node->text == NULL);
    skip_space(c);
    if (c->at == c->end)
        return json_refuse(c, c->at, "unexpected end");
    switch (*c->at) {
    case '{':
    case '[':
        return container_open(p, node);
    case '"':
        node->type = JSON_STRING;
        return json_scan_string(c, &node->text, &node->bytes);
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9':
        node->type = JSON_NUMBER;
        return json_scan_number(c, &node->text, &node->bytes);
    default:
        return json_scan_word(c, node);
    }
}

/* A value is complete.  Closes what closes after it; *ret_next is the next value to read, NULL
 * when the outermost one is complete. */
static enum err value_end(struct parser *p, struct json **ret_next)
{
    struct json_cursor *c = &p->c;
    *ret_next = NULL;
    while (p->frame != NULL) {
        skip_space(c);
        if (c->at == c->end)
            return json_refuse(c, c->at, "unexpected end");
        if (*c->at == ',') {
            c->at++;
            return child_begin(p, ret_next);
        }
        if (*c->at != closing(p->frame))
            return json_refuse(
                c, c->at, closing(p->frame) == '}' ? "',' or '}' expected" : "',' or ']' expected");
        container_close(p);
    }
    return ERR_OK;
}

static enum err value_parse(struct parser *p, struct json *root)
{
    struct json_cursor *c = &p->c;
    struct json *node = root;
    while (node != NULL) {
        uint32_t depth_before = p->depth;
        TRY(value_begin(p, node));
        if (p->depth > depth_before) {
            skip_space(c);
            if (c->at == c->end || *c->at != closing(p->frame)) {
                TRY(child_begin(p, &node));
                continue;
            }
            container_close(p);
        }
        TRY(value_end(p, &node));
    }
    CHECK(p->frame == NULL && p->depth == 0);
    skip_space(c);
    if (c->at != c->end)
        return json_refuse(c, c->at, "text after the value");
    return ERR_OK;
}

static void bom_check(struct json_cursor *c, bool skip)
{
    /* Where it is not skipped it fails by itself: no value begins with it. */
    if (skip && c->end - c->at >= 3 && memcmp(c->at, "\xef\xbb\xbf", 3) == 0)
        c->at += 3;
}

enum err json_parse(struct arena *arena, const struct json_options *options, const char *text,
                    size_t bytes, struct json **ret_value, struct json_error *ret_error)
{
    static const struct json_options strictest;
    CHECK(arena != NULL && ret_value != NULL);
    CHECK(text != NULL || bytes == 0);
    if (options == NULL)
        options = &strictest;
    if (text == NULL)
        text = "";
    struct json_error error = {0, ""};
    size_t bytes_max = options->bytes_max == 0 ? BYTES_MAX_DEFAULT : options->bytes_max;
    struct parser p = {
        .c = {.begin = text,
              .at = text,
              .end = text + bytes,
              .arena = arena,
              .lone_surrogate_replace = options->lone_surrogate_replace},
        .depth_max = options->depth_max == 0 ? DEPTH_MAX_DEFAULT : options->depth_max,
        .duplicate_keys_last = options->duplicate_keys_last,
    };
    enum err e = ERR_TOO_LARGE;
    struct json *root = NULL;
    if (bytes > bytes_max) {
        error = (struct json_error){bytes_max, "text too large"};
    } else if ((root = arena_alloc(arena, sizeof *root)) == NULL) {
        e = ERR_NOMEM;
    } else {
        bom_check(&p.c, options->bom_skip);
        e = value_parse(&p, root);
    }
    if (e == ERR_OK) {
        *ret_value = root;
        return ERR_OK;
    }
    if (e == ERR_INVALID)
        error = (struct json_error){(size_t)(p.c.error_at - text), p.c.reason};
    else if (e == ERR_TOO_LARGE && bytes <= bytes_max)
        error = (struct json_error){(size_t)(p.c.at - text), "too many members"};
    else if (e == ERR_NOMEM)
        error = (struct json_error){(size_t)(p.c.at - text), "no room left"};
    if (ret_error != NULL)
        *ret_error = error;
    return e;
}
