/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_api.h - one internal form of a request, whatever the end point's JSON looks like.
 *
 * Made by a codec on a tokenizer thread, then owned by the loop thread until the answer is over.
 * Everything a request keeps lives in its own arena.  Pure. */
#ifndef GATEWAY_GW_API_H
#define GATEWAY_GW_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gateway/gw_parse.h"
#include "lib/base/arena.h"
#include "lib/base/err.h"
#include "proto/msg.h"

struct json;
struct str;

#define GW_REQUEST_MAGIC     0x67775271u
#define GW_CHOICES_MAX       128u /* prompts x n */
#define GW_N_MAX             128u
#define GW_STOPS_MAX         16u
#define GW_STOP_BYTES_MAX    1024u
#define GW_REQUEST_ID_BYTES  128u
#define GW_SESSION_BYTES_MAX (MSG_TEXT_MAX - 1u)
#define GW_TAIL_BYTES        16u
#define GW_IGNORED_BYTES     160u

enum gw_endpoint { GW_CHAT, GW_COMPLETION, GW_TOKENIZE, GW_DETOKENIZE };

/* Why a request is not served, as the client will read it. */
struct gw_refusal {
    int status;
    const char *type;       /* constant text */
    const char *code;       /* constant text; NULL = null */
    uint32_t retry_after_s; /* 0 = none */
    char param[96];         /* "" = null */
    char message[400];
};

struct gw_prompt {
    const uint32_t *ids;
    uint32_t count;
    const char *text; /* for echo; NULL unless wanted */
    size_t bytes;
};

struct gw_request {
    uint32_t magic;
    struct arena arena;
    enum gw_endpoint endpoint;
    char id[GW_REQUEST_ID_BYTES + 1]; /* visible ASCII */
    char model[256];                  /* as served */

    /* what is asked of the engine; ids and choice are filled in per choice */
    struct msg_request base;
    uint64_t seed;
    const struct gw_prompt *prompts;
    uint32_t prompt_count;
    uint32_t n;
    uint32_t choice_count; /* prompt_count * n */
    uint32_t max_tokens;   /* 0 = what is left of the window */
    bool echo_only;        /* ... and nothing else: no token is asked for */
    uint32_t min_tokens;

    /* how the answer is cut and shaped */
    bool stream, include_usage, continuous_usage;
    bool logprobs, tokens_as_ids, return_token_ids, echo;
    uint32_t top_logprobs;
    bool include_reasoning, skip_special, include_stop, ignore_eos;
    bool tools_on, parallel_calls;
    const struct json *tools; /* in the arena; NULL = none */
    struct gw_parse_stop stops[GW_STOPS_MAX];
    uint32_t stop_count;
    char prompt_tail[GW_TAIL_BYTES]; /* end of the rendered prompt: where the parser starts */
    uint32_t prompt_tail_bytes;

    uint32_t unknown_fields;        /* named nowhere, ignored, counted */
    char ignored[GW_IGNORED_BYTES]; /* template variables without effect: "a, b" */
};

/* The arena takes nothing until the first request. */
void gw_request_init(struct gw_request *r, size_t arena_bytes_max);
void gw_request_fini(struct gw_request *r);
void gw_request_reset(struct gw_request *r);

/* Fill a refusal.  invalid: 400 invalid_request_error. */
void gw_refuse_invalid(struct gw_refusal *r, const char *code, const char *param,
                       const char *format, ...) PRINTF_LIKE(4, 5);
void gw_refuse(struct gw_refusal *r, int status, const char *type, const char *code,
               const char *param, const char *format, ...) PRINTF_LIKE(6, 7);
/* A refusal by the engine: status, type and code follow from the error. */
void gw_refuse_err(struct gw_refusal *r, enum err e, uint32_t retry_after_ms, const char *text);
void gw_refuse_context(struct gw_refusal *r, const char *param, uint64_t window,
                       uint64_t prompt_tokens, bool at_least);

/* {"error":{...}} */
void gw_refusal_write(struct str *out, const struct gw_refusal *r);
/* Retry-After and x-should-retry as header lines. */
void gw_refusal_headers(const struct gw_refusal *r, char *ret_text, size_t bytes);

/* Visible ASCII, 1..GW_REQUEST_ID_BYTES bytes: fit to be echoed in a header. */
bool gw_request_id_valid(const char *text, size_t bytes);
/* A random one; ret_id has GW_REQUEST_ID_BYTES + 1 bytes. */
void gw_request_id_make(char *ret_id);

#endif
