/* SPDX-License-Identifier: Apache-2.0 */
/* Tool calls in the model's text: name, keys, values, and the repairs of what is missing. */
#include "gateway/gw_parse_state.h"

#include <stdlib.h>
#include <string.h>

#include "gateway/gw_parse_types.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

#define KEYS_FIRST 16

/* A view that leaves out white space at both ends. */
struct trimmed {
    const char *text;
    size_t bytes;
};

static struct trimmed trim(const struct str *s)
{
    struct trimmed t = {s->text, s->bytes};
    while (t.bytes > 0 && gw_parse_is_white(t.text[0])) {
        t.text++;
        t.bytes--;
    }
    while (t.bytes > 0 && gw_parse_is_white(t.text[t.bytes - 1]))
        t.bytes--;
    return t;
}

void gw_parse_keys_fini(struct gw_parse_keys *k)
{
    free(k->slots);
    *k = (struct gw_parse_keys){0};
}

static void keys_clear(struct gw_parse_keys *k)
{
    if (k->used > 0)
        memset(k->slots, 0, k->slot_count * sizeof(*k->slots));
    k->used = 0;
}

/* Slot of the hash, or the free one where it belongs. */
static struct hash128 *keys_slot(struct hash128 *slots, uint32_t slot_count,
                                 const struct hash128 *hash)
{
    static const struct hash128 none;
    uint32_t at;
    memcpy(&at, hash->bytes, sizeof(at));
    for (at &= slot_count - 1; memcmp(&slots[at], &none, sizeof(none)) != 0;
         at = (at + 1) & (slot_count - 1))
        if (memcmp(&slots[at], hash, sizeof(*hash)) == 0)
            break;
    return &slots[at];
}

static enum err keys_grow(struct gw_parse_keys *k)
{
    static const struct hash128 none;
    uint32_t slot_count = k->slot_count ? 2 * k->slot_count : KEYS_FIRST;
    struct hash128 *slots = calloc(slot_count, sizeof(*slots));
    if (slots == NULL)
        return ERR_NOMEM;
    for (uint32_t i = 0; i < k->slot_count; i++)
        if (memcmp(&k->slots[i], &none, sizeof(none)) != 0)
            *keys_slot(slots, slot_count, &k->slots[i]) = k->slots[i];
    free(k->slots);
    k->slots = slots;
    k->slot_count = slot_count;
    return ERR_OK;
}

/* True when the key is new in this call. */
static bool keys_add(struct gw_parse *p, struct trimmed key)
{
    static const struct hash128 none;
    struct gw_parse_keys *k = &p->keys;
    if (2 * k->used >= k->slot_count && keys_grow(k) != ERR_OK) {
        p->error = ERR_NOMEM;
        return false;
    }
    const struct hash128 hash = hash_xxh3_once(key.text, key.bytes);
    struct hash128 *slot = keys_slot(k->slots, k->slot_count, &hash);
    if (memcmp(slot, &none, sizeof(none)) != 0)
        return false;
    *slot = hash;
    k->used++;
    return true;
}

void gw_parse_name_begin(struct gw_parse *p)
{
    p->state = GW_PARSE_STATE_NAME;
    p->name_over = false;
    str_clear(&p->held);
    gw_parse_walk_begin(&p->walk, &p->tools);
}

/* The <tool_call> was text; reading goes on right after it.  What is held has no tag in it. */
static void name_is_text(struct gw_parse *p)
{
    p->state = p->base;
    gw_parse_text(p, p->base, gw_parse_tag_text(GW_PARSE_TAG_CALL),
                  gw_parse_tag_bytes(GW_PARSE_TAG_CALL));
    gw_parse_text(p, p->base, p->held.text, p->held.bytes);
    str_clear(&p->held);
}

static void call_begin(struct gw_parse *p, const char *name, size_t bytes,
                       const struct gw_parse_tool *tool)
{
    CHECK(bytes > 0);
    gw_parse_content_release(p);
    gw_parse_send(p);
    if (p->base == GW_PARSE_STATE_REASONING)
        p->late_closer = true;
    p->tool = tool;
    p->pair_written = false;
    keys_clear(&p->keys);
    str_clear(&p->key);
    p->call_count++;
    const struct gw_parse_event event = {
        .type = GW_PARSE_CALL, .call_index = p->call_count - 1, .text = name, .bytes = bytes};
    gw_parse_send_event(p, &event);
    str_add_char(gw_parse_out(p, GW_PARSE_ARGUMENTS), '{');
}

static void call_end(struct gw_parse *p, bool whole)
{
    CHECK(p->call_count > 0);
    if (whole)
        str_add_char(gw_parse_out(p, GW_PARSE_ARGUMENTS), '}');
    gw_parse_send(p);
    const struct gw_parse_event event = {
        .type = GW_PARSE_CALL_END, .call_index = p->call_count - 1, .whole = whole};
    gw_parse_send_event(p, &event);
    p->ends_with_call = whole;
    p->state = GW_PARSE_STATE_CONTENT;
}

/* `, "key": ` */
static struct str *write_key(struct gw_parse *p)
{
    struct trimmed key = trim(&p->key);
    struct str *out = gw_parse_out(p, GW_PARSE_ARGUMENTS);
    if (p->pair_written)
        str_add_text(out, ", ");
    p->pair_written = true;
    json_write_string(out, key.text, key.bytes);
    str_add_text(out, ": ");
    return out;
}

static void value_begin(struct gw_parse *p)
{
    struct trimmed key = trim(&p->key);
    p->state = GW_PARSE_STATE_VALUE;
    str_clear(&p->value);
    p->value_types = 0;
    if (key.bytes == 0 || !keys_add(p, key)) {
        p->value_kind = GW_PARSE_VALUE_DISCARD;
        return;
    }
    if (p->tool != NULL)
        p->value_types = gw_parse_types(p->tool->parameters, key.text, key.bytes);
    if (p->value_types == GW_PARSE_TYPE_STRING) {
        p->value_kind = GW_PARSE_VALUE_STRING;
        str_add_char(write_key(p), '"');
    } else if (p->value_types == (GW_PARSE_TYPE_STRING | GW_PARSE_TYPE_NULL)) {
        p->value_kind = GW_PARSE_VALUE_NULLABLE;
    } else {
        p->value_kind = GW_PARSE_VALUE_HELD;
    }
}

static void value_text(struct gw_parse *p, const char *text, size_t bytes)
{
    if (bytes == 0 || p->value_kind == GW_PARSE_VALUE_DISCARD)
        return;
    if (p->value_kind == GW_PARSE_VALUE_STRING) {
        json_write_escaped(gw_parse_out(p, GW_PARSE_ARGUMENTS), text, bytes);
        return;
    }
    str_add(&p->value, text, bytes);
    if (p->value_kind == GW_PARSE_VALUE_NULLABLE &&
        (p->value.bytes > 4 || memcmp(p->value.text, "null", p->value.bytes) != 0)) {
        struct str *out = write_key(p);
        str_add_char(out, '"');
        json_write_escaped(out, p->value.text, p->value.bytes);
        p->value_kind = GW_PARSE_VALUE_STRING;
        str_clear(&p->value);
    }
}

static void value_end(struct gw_parse *p)
{
    switch (p->value_kind) {
    case GW_PARSE_VALUE_DISCARD:
        return;
    case GW_PARSE_VALUE_STRING:
        str_add_char(gw_parse_out(p, GW_PARSE_ARGUMENTS), '"');
        return;
    default:
        gw_parse_value_write(write_key(p), &p->arena, p->value_types,
                             p->value.bytes ? p->value.text : "", p->value.bytes);
        arena_reset(&p->arena);
    }
}

/* What was held after a closer belongs to the value. */
static void value_goes_on(struct gw_parse *p)
{
    p->state = GW_PARSE_STATE_VALUE;
    value_text(p, p->held.text, p->held.bytes);
    str_clear(&p->held);
}

static void key_begin(struct gw_parse *p)
{
    str_clear(&p->key);
    p->state = GW_PARSE_STATE_KEY;
}

/* A tag stands after the name: a call, the repair of a missing <arg_key>, or text. */
static void name_tag(struct gw_parse *p, enum gw_parse_tag tag)
{
    struct trimmed name = trim(&p->held);
    const struct gw_parse_tool *exact = gw_parse_walk_exact(&p->walk);
    const struct gw_parse_tool *longest = p->walk.longest;
    bool closes = tag == GW_PARSE_TAG_KEY || tag == GW_PARSE_TAG_CALL_END;
    if (closes && name.bytes > 0 && (exact || p->base == GW_PARSE_STATE_CONTENT)) {
        p->at += gw_parse_tag_bytes(tag);
        call_begin(p, name.text, name.bytes, exact);
        str_clear(&p->held);
        if (tag == GW_PARSE_TAG_KEY)
            key_begin(p);
        else
            call_end(p, true);
    } else if (tag == GW_PARSE_TAG_KEY_END && longest != NULL) {
        p->at += gw_parse_tag_bytes(tag);
        call_begin(p, longest->name, longest->name_bytes, longest);
        str_add(&p->key, name.text + longest->name_bytes, name.bytes - longest->name_bytes);
        str_clear(&p->held);
        p->state = GW_PARSE_STATE_AFTER_KEY;
    } else {
        name_is_text(p);
    }
}

/* Bytes of the character that stands at in[at]; in holds whole characters. */
static size_t char_bytes(const struct gw_parse *p)
{
    size_t count = 1;
    while (p->at + count < p->in.bytes && ((uint8_t)p->in.text[p->at + count] & 0xc0) == 0x80)
        count++;
    return count;
}

/* One character of the name; true when it can still become one. */
static bool name_char(struct gw_parse *p)
{
    size_t count = char_bytes(p);
    const char *c = p->in.text + p->at;
    if (gw_parse_is_white(*c)) {
        if (p->walk.bytes > 0)
            p->name_over = true;
        /* In reasoning a name that is over must be, or begin with, a known one. */
        if (p->name_over && p->base == GW_PARSE_STATE_REASONING && p->walk.longest == NULL)
            return false;
    } else {
        if (p->name_over)
            return false;
        for (size_t i = 0; i < count; i++)
            gw_parse_walk_byte(&p->walk, &p->tools, (uint8_t)c[i]);
        if (p->base == GW_PARSE_STATE_REASONING && !gw_parse_walk_open(&p->walk))
            return false;
    }
    str_add(&p->held, c, count);
    p->at += count;
    return true;
}

static bool step_name(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    while (p->at < p->in.bytes && !p->held.overflow) {
        if (p->in.text[p->at] == '<') {
            enum gw_parse_match match = gw_parse_tag_at(p, GW_PARSE_TAGS_ALL, &tag);
            if (match == GW_PARSE_MATCH_PARTIAL)
                return false;
            if (match == GW_PARSE_MATCH_FULL) {
                name_tag(p, tag);
                return true;
            }
        }
        if (!name_char(p)) {
            name_is_text(p);
            return true;
        }
    }
    return true;
}

/* Text up to the next '<' goes to `into`; then the tag there, if it is one of the mask.
 * GW_PARSE_MATCH_NONE: no tag, the '<' is not taken yet, or the text is used up. */
static enum gw_parse_match until_tag(struct gw_parse *p, uint32_t mask,
                                     void (*into)(struct gw_parse *, const char *, size_t),
                                     enum gw_parse_tag *ret_tag)
{
    const char *begin = p->in.text + p->at;
    size_t left = p->in.bytes - p->at;
    const char *angle = memchr(begin, '<', left);
    size_t plain = angle ? (size_t)(angle - begin) : left;
    into(p, begin, plain);
    p->at += plain;
    if (angle == NULL)
        return GW_PARSE_MATCH_NONE;
    enum gw_parse_match match = gw_parse_tag_at(p, mask, ret_tag);
    if (match == GW_PARSE_MATCH_NONE) {
        into(p, "<", 1);
        p->at++;
    } else if (match == GW_PARSE_MATCH_FULL) {
        p->at += gw_parse_tag_bytes(*ret_tag);
    }
    return match;
}

static void key_text(struct gw_parse *p, const char *text, size_t bytes)
{
    if (bytes > 0)
        str_add(&p->key, text, bytes);
}

static bool step_key(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    uint32_t mask = GW_PARSE_TAG_BIT(GW_PARSE_TAG_KEY_END) | GW_PARSE_TAG_BIT(GW_PARSE_TAG_VALUE);
    enum gw_parse_match match = until_tag(p, mask, key_text, &tag);
    if (match == GW_PARSE_MATCH_FULL && tag == GW_PARSE_TAG_VALUE)
        value_begin(p); /* </arg_key> is missing */
    else if (match == GW_PARSE_MATCH_FULL)
        p->state = GW_PARSE_STATE_AFTER_KEY;
    return match != GW_PARSE_MATCH_PARTIAL;
}

/* Skips white space, then looks for one of the tags.  *ret_white gets what was skipped. */
static enum gw_parse_match after_white(struct gw_parse *p, uint32_t mask, struct str *ret_white,
                                       enum gw_parse_tag *ret_tag)
{
    size_t begin = p->at;
    while (p->at < p->in.bytes && gw_parse_is_white(p->in.text[p->at]))
        p->at++;
    if (ret_white != NULL && p->at > begin)
        str_add(ret_white, p->in.text + begin, p->at - begin);
    if (p->at == p->in.bytes)
        return GW_PARSE_MATCH_PARTIAL;
    enum gw_parse_match match = gw_parse_tag_at(p, mask, ret_tag);
    if (match == GW_PARSE_MATCH_FULL)
        p->at += gw_parse_tag_bytes(*ret_tag);
    return match;
}

static bool step_after_key(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    uint32_t mask = GW_PARSE_TAG_BIT(GW_PARSE_TAG_VALUE) | GW_PARSE_TAG_BIT(GW_PARSE_TAG_KEY) |
                    GW_PARSE_TAG_BIT(GW_PARSE_TAG_CALL_END);
    enum gw_parse_match match = after_white(p, mask, NULL, &tag);
    if (match == GW_PARSE_MATCH_PARTIAL)
        return false;
    if (match == GW_PARSE_MATCH_NONE || tag == GW_PARSE_TAG_VALUE)
        value_begin(p); /* NONE: <arg_value> is missing */
    else if (tag == GW_PARSE_TAG_KEY)
        key_begin(p);
    else
        call_end(p, true);
    return true;
}

static bool step_value(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    uint32_t mask =
        GW_PARSE_TAG_BIT(GW_PARSE_TAG_VALUE_END) | GW_PARSE_TAG_BIT(GW_PARSE_TAG_CALL_END);
    enum gw_parse_match match = until_tag(p, mask, value_text, &tag);
    if (match == GW_PARSE_MATCH_FULL) {
        str_clear(&p->held);
        str_add(&p->held, gw_parse_tag_text(tag), gw_parse_tag_bytes(tag));
        p->state = tag == GW_PARSE_TAG_VALUE_END ? GW_PARSE_STATE_VALUE_CLOSED
                                                 : GW_PARSE_STATE_VALUE_CALL_END;
    }
    return match != GW_PARSE_MATCH_PARTIAL;
}

/* </arg_value> closes the value only before <arg_key>, </tool_call> or the end. */
static bool step_value_closed(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    uint32_t mask = GW_PARSE_TAG_BIT(GW_PARSE_TAG_KEY) | GW_PARSE_TAG_BIT(GW_PARSE_TAG_CALL_END);
    enum gw_parse_match match = after_white(p, mask, &p->held, &tag);
    if (match == GW_PARSE_MATCH_PARTIAL)
        return false;
    if (match == GW_PARSE_MATCH_NONE) {
        value_goes_on(p);
        return true;
    }
    str_clear(&p->held);
    value_end(p);
    if (tag == GW_PARSE_TAG_KEY)
        key_begin(p);
    else
        call_end(p, true);
    return true;
}

/* </tool_call> in a value closes both only at the end of the output. */
static bool step_value_call_end(struct gw_parse *p)
{
    enum gw_parse_tag tag;
    enum gw_parse_match match = after_white(p, 0, &p->held, &tag);
    if (match == GW_PARSE_MATCH_PARTIAL)
        return false;
    value_goes_on(p);
    return true;
}

bool gw_parse_call_step(struct gw_parse *p)
{
    switch (p->state) {
    case GW_PARSE_STATE_NAME:
        return step_name(p);
    case GW_PARSE_STATE_KEY:
        return step_key(p);
    case GW_PARSE_STATE_AFTER_KEY:
        return step_after_key(p);
    case GW_PARSE_STATE_VALUE:
        return step_value(p);
    case GW_PARSE_STATE_VALUE_CLOSED:
        return step_value_closed(p);
    default:
        CHECK(p->state == GW_PARSE_STATE_VALUE_CALL_END);
        return step_value_call_end(p);
    }
}

bool gw_parse_name_stays_open(const struct gw_parse *p)
{
    CHECK(p->state == GW_PARSE_STATE_NAME && p->in.bytes > 0);
    if (!p->name_over)
        return false; /* the cut tag can be part of the name: read it as such */
    bool known = gw_parse_walk_exact(&p->walk) != NULL || p->base == GW_PARSE_STATE_CONTENT;
    for (uint32_t tag = 0; tag < GW_PARSE_TAG_COUNT; tag++) {
        if (memcmp(p->in.text, gw_parse_tag_text(tag), p->in.bytes) != 0)
            continue;
        if (known && (tag == GW_PARSE_TAG_KEY || tag == GW_PARSE_TAG_CALL_END))
            return true;
        if (p->walk.longest != NULL && tag == GW_PARSE_TAG_KEY_END)
            return true;
    }
    return false;
}

static void name_finish(struct gw_parse *p, enum gw_parse_end end)
{
    const struct gw_parse_tool *exact = gw_parse_walk_exact(&p->walk);
    if (end == GW_PARSE_END_LENGTH) {
        str_clear(&p->held); /* it may have become a call: no half of it is shown */
        p->state = p->base;
    } else if (exact != NULL) {
        call_begin(p, exact->name, exact->name_bytes, exact);
        call_end(p, true);
    } else {
        name_is_text(p);
    }
}

void gw_parse_call_finish(struct gw_parse *p, enum gw_parse_end end)
{
    CHECK(p->final && p->in.bytes == 0);
    bool whole = end == GW_PARSE_END_STOP;
    switch (p->state) {
    case GW_PARSE_STATE_NAME:
        name_finish(p, end);
        return;
    case GW_PARSE_STATE_VALUE:
        if (whole)
            value_end(p);
        break;
    case GW_PARSE_STATE_VALUE_CALL_END:
        value_end(p);
        whole = true;
        break;
    case GW_PARSE_STATE_VALUE_CLOSED:
        value_end(p);
        break;
    default: /* a key without a value is left out */
        break;
    }
    call_end(p, whole);
}
