/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_api.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/hash.h"
#include "lib/base/json.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

#define REQUEST_CHUNK_BYTES (8u << 10)

void gw_request_init(struct gw_request *r, size_t arena_bytes_max)
{
    memset(r, 0, sizeof(*r));
    r->magic = GW_REQUEST_MAGIC;
    arena_init(&r->arena, REQUEST_CHUNK_BYTES, arena_bytes_max);
}

void gw_request_fini(struct gw_request *r)
{
    CHECK_OBJ(r, GW_REQUEST_MAGIC);
    arena_fini(&r->arena);
    r->magic = 0;
}

void gw_request_reset(struct gw_request *r)
{
    CHECK_OBJ(r, GW_REQUEST_MAGIC);
    struct arena arena = r->arena;
    arena_reset(&arena);
    memset(r, 0, sizeof(*r));
    r->magic = GW_REQUEST_MAGIC;
    r->arena = arena;
}

static void refusal_text(struct gw_refusal *r, const char *param, const char *format, va_list args)
{
    snprintf(r->param, sizeof(r->param), "%s", param ? param : "");
    vsnprintf(r->message, sizeof(r->message), format, args);
    /* A cut in the middle of a character would spoil the JSON. */
    r->message[utf8_valid_prefix(r->message, strlen(r->message))] = '\0';
    r->param[utf8_valid_prefix(r->param, strlen(r->param))] = '\0';
}

void gw_refuse_invalid(struct gw_refusal *r, const char *code, const char *param,
                       const char *format, ...)
{
    memset(r, 0, sizeof(*r));
    r->status = 400;
    r->type = "invalid_request_error";
    r->code = code;
    va_list args;
    va_start(args, format);
    refusal_text(r, param, format, args);
    va_end(args);
}

void gw_refuse(struct gw_refusal *r, int status, const char *type, const char *code,
               const char *param, const char *format, ...)
{
    memset(r, 0, sizeof(*r));
    r->status = status;
    r->type = type;
    r->code = code;
    va_list args;
    va_start(args, format);
    refusal_text(r, param, format, args);
    va_end(args);
}

static const char *code_of(enum err e)
{
    switch (e) {
    case ERR_BUSY:
    case ERR_KV_FULL:
        return "queue_full";
    case ERR_LOADING:
        return "loading";
    case ERR_DRAINING:
        return "draining";
    case ERR_CONTEXT:
        return "context_length_exceeded";
    case ERR_INVALID:
        return "invalid_value";
    case ERR_UNSUPPORTED:
        return "unsupported_value";
    default:
        return NULL;
    }
}

void gw_refuse_err(struct gw_refusal *r, enum err e, uint32_t retry_after_ms, const char *text)
{
    int status = err_http_status(e);
    if (status < 400 || status == 404 || status == 499)
        status = 500; /* the engine's own trouble, not the client's */
    const char *type = status == 429  ? "rate_limit_error"
                       : status < 500 ? "invalid_request_error"
                                      : "server_error";
    bool told = text && text[0];
    gw_refuse(r, status, type, code_of(e), NULL, "%s", told ? text : err_text(e));
    if (status == 429 || status == 503)
        r->retry_after_s = retry_after_ms ? (retry_after_ms + 999) / 1000 : 1;
}

void gw_refuse_context(struct gw_refusal *r, const char *param, uint64_t window,
                       uint64_t prompt_tokens, bool at_least)
{
    /* Agents search for "maximum context length is N tokens" to know when to compact. */
    gw_refuse_invalid(
        r, "context_length_exceeded", param,
        "This model's maximum context length is %llu tokens, but the prompt has %s%llu "
        "tokens and at least one more is needed for the answer. Please shorten the "
        "prompt.",
        (unsigned long long)window, at_least ? "at least " : "", (unsigned long long)prompt_tokens);
}

static void write_or_null(struct str *out, const char *text)
{
    if (text && text[0])
        json_write_string(out, text, strlen(text));
    else
        str_add_text(out, "null");
}

void gw_refusal_write(struct str *out, const struct gw_refusal *r)
{
    CHECK(r->status >= 400 && r->type != NULL);
    str_add_text(out, "{\"error\":{\"message\":");
    json_write_string(out, r->message, strlen(r->message));
    str_add_text(out, ",\"type\":");
    write_or_null(out, r->type);
    str_add_text(out, ",\"param\":");
    write_or_null(out, r->param);
    str_add_text(out, ",\"code\":");
    write_or_null(out, r->code);
    str_add_text(out, "}}");
}

void gw_refusal_headers(const struct gw_refusal *r, char *ret_text, size_t bytes)
{
    ret_text[0] = '\0';
    if (r->retry_after_s)
        snprintf(ret_text, bytes, "Retry-After: %u\r\n", r->retry_after_s);
    else if (r->status != 429 && r->status != 503)
        snprintf(ret_text, bytes, "x-should-retry: false\r\n");
}

bool gw_request_id_valid(const char *text, size_t bytes)
{
    if (bytes == 0 || bytes > GW_REQUEST_ID_BYTES)
        return false;
    for (size_t i = 0; i < bytes; i++)
        if (text[i] <= ' ' || text[i] > '~')
            return false;
    return true;
}

void gw_request_id_make(char *ret_id)
{
    uint8_t bytes[16];
    STATIC_CHECK(2 * sizeof(bytes) <= GW_REQUEST_ID_BYTES);
    rng_system(bytes, sizeof(bytes));
    hex_encode(bytes, sizeof(bytes), ret_id);
}
