/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_chunk.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

static const struct json_options json_lenient = {.lone_surrogate_replace = true,
                                                 .duplicate_keys_last = true};

/* Copies what fits of a JSON string, without control characters. */
static void copy_text(const struct json *value, char *ret_text, size_t ret_bytes)
{
    CHECK(ret_bytes > 0);
    size_t n = 0;
    if (json_is(value, JSON_STRING)) {
        for (; n < value->bytes && n + 1 < ret_bytes; n++)
            ret_text[n] = (unsigned char)value->text[n] < ' ' ? ' ' : value->text[n];
    }
    ret_text[n] = '\0';
}

static void error_text(const struct json *error, char ret_text[BENCH_TEXT_BYTES])
{
    char code[48], message[128];
    if (json_is(error, JSON_STRING)) {
        copy_text(error, ret_text, BENCH_TEXT_BYTES);
        return;
    }
    copy_text(json_get(error, "code"), code, sizeof(code));
    if (code[0] == '\0')
        copy_text(json_get(error, "type"), code, sizeof(code));
    copy_text(json_get(error, "message"), message, sizeof(message));
    snprintf(ret_text, BENCH_TEXT_BYTES, "%s: %s", code[0] ? code : "error", message);
}

bool bench_error_text(struct arena *arena, const char *body, size_t bytes,
                      char ret_text[BENCH_TEXT_BYTES])
{
    arena_reset(arena);
    struct json *root;
    struct json_error fault;
    if (json_parse(arena, &json_lenient, body, bytes, &root, &fault) != ERR_OK)
        return false;
    const struct json *error = json_get(root, "error");
    if (!json_is(error, JSON_OBJECT) && !json_is(error, JSON_STRING))
        return false;
    error_text(error, ret_text);
    return true;
}

static uint64_t hash_bytes(uint64_t hash, const char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ (unsigned char)bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Takes in one string of a delta; returns whether it holds anything. */
static bool take_text(const struct json *value, bool ids, uint64_t *hash)
{
    if (!json_is(value, JSON_STRING) || value->bytes == 0)
        return false;
    if (!ids)
        *hash = hash_bytes(*hash, value->text, value->bytes);
    return true;
}

static bool take_delta(const struct json *delta, bool ids, uint64_t *hash)
{
    bool any = take_text(json_get(delta, "reasoning_content"), ids, hash);
    if (!any) /* one of two spellings of the same text */
        any = take_text(json_get(delta, "reasoning"), ids, hash);
    any |= take_text(json_get(delta, "content"), ids, hash);
    const struct json *calls = json_get(delta, "tool_calls");
    if (!json_is(calls, JSON_ARRAY))
        return any;
    for (const struct json *call = calls->child; call != NULL; call = call->next) {
        const struct json *function = json_get(call, "function");
        any |= take_text(json_get(function, "name"), ids, hash);
        any |= take_text(json_get(function, "arguments"), ids, hash);
    }
    return any;
}

static enum err take_choice(const struct json *choice, uint64_t *hash, struct bench_chunk *chunk,
                            struct err_detail *detail)
{
    const struct json *ids = json_get(choice, "token_ids");
    if (json_is(ids, JSON_ARRAY)) {
        chunk->has_ids = true;
        chunk->id_count = ids->count;
        for (const struct json *id = ids->child; id != NULL; id = id->next) {
            uint64_t value;
            if (!json_u64(id, &value))
                return err_set(detail, ERR_INVALID, "choices[0].token_ids: not all integers");
            *hash = hash_bytes(*hash, id->text, id->bytes);
            *hash = hash_bytes(*hash, ",", 1);
        }
    }
    const struct json *delta = json_get(choice, "delta");
    if (!json_is(delta, JSON_OBJECT))
        return err_set(detail, ERR_INVALID, "choices[0].delta: no object");
    chunk->has_text = take_delta(delta, chunk->has_ids, hash);
    copy_text(json_get(choice, "finish_reason"), chunk->finish, sizeof(chunk->finish));
    return ERR_OK;
}

static void take_receipt(const struct json *tandem, struct bench_receipt *r)
{
    copy_text(json_get(tandem, "spec"), r->spec, sizeof(r->spec));
    (void)json_u64(json_get(tandem, "concurrency"), &r->concurrency);
    (void)json_u64(json_get(tandem, "drafted"), &r->drafted);
    (void)json_u64(json_get(tandem, "accepted"), &r->accepted);
    (void)json_u64(json_get(tandem, "steps"), &r->steps);
    (void)json_u64(json_get(tandem, "preempted"), &r->preempted);
    (void)json_u64(json_get(tandem, "resumed"), &r->resumed);
    (void)json_f64(json_get(tandem, "queue_ms"), &r->queue_ms);
    (void)json_f64(json_get(tandem, "prefill_ms"), &r->prefill_ms);
    (void)json_f64(json_get(tandem, "decode_ms"), &r->decode_ms);
}

static void take_usage(const struct json *usage, struct bench_chunk *chunk)
{
    if (!json_u64(json_get(usage, "completion_tokens"), &chunk->completion_tokens))
        return;
    chunk->has_usage = true;
    (void)json_u64(json_get(usage, "prompt_tokens"), &chunk->prompt_tokens);
    (void)json_u64(json_get(json_get(usage, "prompt_tokens_details"), "cached_tokens"),
                   &chunk->cached_tokens);
    const struct json *tandem = json_get(usage, "tandem");
    if (json_is(tandem, JSON_OBJECT)) {
        chunk->has_receipt = true;
        take_receipt(tandem, &chunk->receipt);
    }
}

enum err bench_chunk_parse(struct arena *arena, const char *data, size_t bytes, uint64_t *hash,
                           struct bench_chunk *ret_chunk, struct err_detail *detail)
{
    CHECK(hash != NULL && ret_chunk != NULL);
    memset(ret_chunk, 0, sizeof(*ret_chunk));
    if (bytes == 6 && memcmp(data, "[DONE]", 6) == 0) {
        ret_chunk->done = true;
        return ERR_OK;
    }
    arena_reset(arena);
    struct json *root;
    struct json_error fault;
    enum err e = json_parse(arena, &json_lenient, data, bytes, &root, &fault);
    if (e == ERR_INVALID)
        return err_set(detail, e, "event is no JSON: %s at byte %zu", fault.reason, fault.offset);
    if (e != ERR_OK)
        return err_set(detail, e, "event of %zu bytes: %s", bytes, err_text(e));
    if (!json_is(root, JSON_OBJECT))
        return err_set(detail, ERR_INVALID, "event is no JSON object");
    const struct json *error = json_get(root, "error");
    if (error != NULL && error->type != JSON_NULL) {
        ret_chunk->is_error = true;
        error_text(error, ret_chunk->detail);
        return ERR_OK;
    }
    const struct json *choices = json_get(root, "choices");
    if (!json_is(choices, JSON_ARRAY))
        return err_set(detail, ERR_INVALID, "event has no array `choices`");
    if (choices->count > 0)
        TRY(take_choice(choices->child, hash, ret_chunk, detail));
    const struct json *usage = json_get(root, "usage");
    if (json_is(usage, JSON_OBJECT))
        take_usage(usage, ret_chunk);
    return ERR_OK;
}
