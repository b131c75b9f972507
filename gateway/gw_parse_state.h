/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_parse_state.h - what gw_parse.c and gw_parse_call.c share; nobody else. */
#ifndef GATEWAY_GW_PARSE_STATE_H
#define GATEWAY_GW_PARSE_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gateway/gw_parse.h"
#include "gateway/gw_parse_stop.h"
#include "gateway/gw_parse_tools.h"
#include "lib/base/arena.h"
#include "lib/base/hash.h"
#include "lib/base/str.h"
#include "lib/text/utf8_stream.h"

#define GW_PARSE_MAGIC 0x67777061u

enum gw_parse_tag {
    GW_PARSE_TAG_THINK,
    GW_PARSE_TAG_THINK_END,
    GW_PARSE_TAG_CALL,
    GW_PARSE_TAG_CALL_END,
    GW_PARSE_TAG_KEY,
    GW_PARSE_TAG_KEY_END,
    GW_PARSE_TAG_VALUE,
    GW_PARSE_TAG_VALUE_END,
    GW_PARSE_TAG_COUNT,
};
#define GW_PARSE_TAG_BIT(tag) (1u << (tag))
#define GW_PARSE_TAGS_ALL     ((1u << GW_PARSE_TAG_COUNT) - 1)

enum gw_parse_match { GW_PARSE_MATCH_NONE, GW_PARSE_MATCH_PARTIAL, GW_PARSE_MATCH_FULL };

enum gw_parse_state {
    GW_PARSE_STATE_START, /* white space that a <think> may follow, which drops both */
    GW_PARSE_STATE_REASONING,
    GW_PARSE_STATE_CONTENT,
    GW_PARSE_STATE_NAME,      /* after <tool_call> */
    GW_PARSE_STATE_KEY,       /* after <arg_key> */
    GW_PARSE_STATE_AFTER_KEY, /* white space, then <arg_value> or a repair */
    GW_PARSE_STATE_VALUE,
    GW_PARSE_STATE_VALUE_CLOSED,   /* after </arg_value>: structure, or text of the value? */
    GW_PARSE_STATE_VALUE_CALL_END, /* after </tool_call> in a value: the end, or text? */
};

enum gw_parse_value {
    GW_PARSE_VALUE_DISCARD,  /* empty key, or one that came before */
    GW_PARSE_VALUE_STRING,   /* text alone: sent as it comes */
    GW_PARSE_VALUE_NULLABLE, /* text or null: held while it is a beginning of "null" */
    GW_PARSE_VALUE_HELD,     /* decided when it is whole */
};

/* Keys of the call at hand, by hash: open addressing, all-zero = free. */
struct gw_parse_keys {
    struct hash128 *slots;
    uint32_t slot_count; /* power of two */
    uint32_t used;
};

struct gw_parse {
    uint32_t magic;
    enum gw_parse_state state;
    enum gw_parse_state base; /* reasoning or content: where a name that is none returns to */
    bool tools_on;
    bool late_closer;    /* a call ended reasoning: the next </think> is dropped */
    bool ends_with_call; /* but for white space, the output so far ends with a whole call */
    bool content_begun;  /* a character that is not white was sent */
    bool final;          /* no more text: a beginning of a tag is text */
    bool finished;
    enum err error;
    uint32_t call_count;
    gw_parse_fn on_event;
    void *context;

    struct utf8_stream utf8;
    struct str in; /* whole characters; at the end of a feed at most a beginning of a tag */
    size_t at;
    struct str held; /* text that waits for a decision, in START, NAME and after a value */

    struct gw_parse_tools tools;
    struct gw_parse_walk walk;        /* of the name */
    bool name_over;                   /* white space after the name */
    const struct gw_parse_tool *tool; /* of the call at hand; NULL = unknown */

    struct str key;
    struct str value;
    enum gw_parse_value value_kind;
    uint32_t value_types;
    bool pair_written;
    struct gw_parse_keys keys;
    struct arena arena; /* JSON of one value */

    struct gw_parse_stops stops;
    struct str passed; /* content that came through the stop strings, within one call */
    struct str blank;  /* white space before the first other character of the content */

    enum gw_parse_event_type out_type; /* of out */
    struct str out;                    /* delta being joined, sent at the end of a feed at last */
};

static inline bool gw_parse_is_white(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* gw_parse.c */
/* Which tag of the mask stands at in[at]. */
enum gw_parse_match gw_parse_tag_at(const struct gw_parse *p, uint32_t mask,
                                    enum gw_parse_tag *ret_tag);
const char *gw_parse_tag_text(enum gw_parse_tag tag);
size_t gw_parse_tag_bytes(enum gw_parse_tag tag);
/* Where to append text of an event; sends what is there of another kind first. */
struct str *gw_parse_out(struct gw_parse *p, enum gw_parse_event_type type);
void gw_parse_send(struct gw_parse *p); /* what is joined so far */
void gw_parse_send_event(struct gw_parse *p, const struct gw_parse_event *event);
/* Text of reasoning or content. */
void gw_parse_text(struct gw_parse *p, enum gw_parse_state state, const char *text, size_t bytes);
/* Content is interrupted: nothing held back for stop strings stays. */
void gw_parse_content_release(struct gw_parse *p);

/* gw_parse_call.c: one step in a state of a call.  False: more text is needed. */
void gw_parse_name_begin(struct gw_parse *p);
bool gw_parse_call_step(struct gw_parse *p);
/* The end of the output in a state of a call. */
void gw_parse_call_finish(struct gw_parse *p, enum gw_parse_end end);
/* At the end by length, before a cut tag becomes text: does the name stay open with it? */
bool gw_parse_name_stays_open(const struct gw_parse *p);
void gw_parse_keys_fini(struct gw_parse_keys *k);

#endif
