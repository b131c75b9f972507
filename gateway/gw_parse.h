/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_parse.h - the model's text as it comes: reasoning, content, tool calls.
 *
 * One owner thread, one parser per choice of a request; pure but for malloc.  Takes bytes cut
 * anywhere, also inside a character, and calls on_event with deltas.  Joined by kind, the deltas
 * do not depend on the cutting; none is empty, each is valid UTF-8, nothing is taken back.  Text
 * is held only while the rules leave it undecided: a beginning of a tag, a name, a key, a value
 * whose type is not text alone, white space that may turn out to be all of the content, a
 * beginning of a stop string.  What is held is bounded by held_bytes_max; work is linear in the
 * text.
 *
 * Stop strings are looked for in content alone, after the tags are recognised: never in
 * reasoning, never in calls. */
#ifndef GATEWAY_GW_PARSE_H
#define GATEWAY_GW_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct gw_parse;
struct json;

enum gw_parse_event_type {
    GW_PARSE_REASONING, /* text */
    GW_PARSE_CONTENT,   /* text */
    GW_PARSE_CALL,      /* a call begins; text = its whole name */
    GW_PARSE_ARGUMENTS, /* text = next piece of its JSON text */
    GW_PARSE_CALL_END,  /* no text; whole says whether the arguments are complete */
};

struct gw_parse_event {
    enum gw_parse_event_type type;
    uint32_t call_index; /* counts the calls of this output, not the tools */
    const char *text;    /* valid during the call back */
    size_t bytes;
    bool whole;
};

typedef void (*gw_parse_fn)(void *context, const struct gw_parse_event *event);

enum gw_parse_choice { GW_PARSE_CHOICE_AUTO, GW_PARSE_CHOICE_NONE, GW_PARSE_CHOICE_REQUIRED };

struct gw_parse_stop {
    const char *text;
    size_t bytes;
};

#define GW_PARSE_STOPS_MAX 64

struct gw_parse_options {
    const struct json *tools; /* of the request; NULL, null or [] = none.  Kept: must outlive */
    enum gw_parse_choice choice;
    const char *prompt_tail; /* end of the prompt (or all of it): says where the output begins */
    size_t prompt_tail_bytes;
    const struct gw_parse_stop *stops; /* copied; none may be empty */
    size_t stop_count;
    size_t held_bytes_max; /* 0 = 16 MiB */
    gw_parse_fn on_event;
    void *context;
};

enum gw_parse_end { GW_PARSE_END_STOP, GW_PARSE_END_LENGTH };

enum gw_parse_finish {
    GW_PARSE_FINISH_STOP,
    GW_PARSE_FINISH_LENGTH,
    GW_PARSE_FINISH_TOOL_CALLS,
};

/* ERR_INVALID: an empty stop string, or more than GW_PARSE_STOPS_MAX.  ERR_NOMEM. */
MUST_USE enum err gw_parse_create(const struct gw_parse_options *options,
                                  struct gw_parse **ret_parse);
void gw_parse_destroy(struct gw_parse **parse_p);

/* ERR_TOO_LARGE: more than held_bytes_max would have to be held; the parser stays in error. */
MUST_USE enum err gw_parse_feed(struct gw_parse *p, const void *bytes, size_t count);
/* The end of the output, once: what was held is decided. */
MUST_USE enum err gw_parse_finish(struct gw_parse *p, enum gw_parse_end end,
                                  enum gw_parse_finish *ret_finish);

/* True once a stop string was found (ret_stop: which).  Everything after it is ignored: the
 * caller cancels the generation and finishes with GW_PARSE_END_STOP. */
bool gw_parse_stopped(const struct gw_parse *p, size_t *ret_stop);
/* True while text counts as reasoning, for the token counts of the usage. */
bool gw_parse_in_reasoning(const struct gw_parse *p);
uint32_t gw_parse_call_count(const struct gw_parse *p);

const char *gw_parse_finish_name(enum gw_parse_finish finish); /* "tool_calls" */

#endif
