/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/texts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/json.h"
#include "lib/model/read_file.h"
#include "lib/text/tokenizer.h"

#define FILE_BYTES_MAX ((size_t)256 << 20)

struct reader {
    const struct tokenizer *tokenizer;
    uint32_t vocab_size;
    uint64_t tokens_max;
    struct token_ids ids; /* of the text at hand */
    struct texts *texts;
    struct err_detail *detail;
};

static enum err encode(struct reader *r, const char *what, const char *text, size_t bytes)
{
    enum err e = tokenizer_encode(r->tokenizer, text, bytes, true, &r->ids);
    if (e != ERR_OK)
        return err_set(r->detail, e, "%s: %s", what, err_text(e));
    for (size_t i = 0; i < r->ids.count; i++)
        if (r->ids.ids[i] >= r->vocab_size)
            return err_set(r->detail, ERR_INVALID, "%s: id %u is outside the model's vocabulary",
                           what, r->ids.ids[i]);
    return ERR_OK;
}

/* Takes ids [first, first + count) of r->ids; what is past the bound counts as left out. */
static enum err keep(struct reader *r, const char *name, size_t first, size_t prompt, size_t count)
{
    struct texts *t = r->texts;
    if (count == 0)
        return ERR_OK;
    if (t->count == TEXTS_MAX || t->tokens + count > r->tokens_max) {
        t->tokens_left_out += count;
        return ERR_OK;
    }
    struct text_case *c = &t->cases[t->count];
    c->name = arena_strndup(&t->arena, name, strlen(name));
    c->ids = arena_alloc_array(&t->arena, count, sizeof(uint32_t));
    if (c->name == NULL || c->ids == NULL)
        return err_set(r->detail, ERR_NOMEM, "texts: out of memory");
    memcpy(c->ids, r->ids.ids + first, count * sizeof(uint32_t));
    c->count = (uint32_t)count;
    c->prompt_count = (uint32_t)prompt;
    t->tokens += count;
    t->count++;
    return ERR_OK;
}

static enum err add_ids(struct reader *r, const struct json *ids, const char *name)
{
    for (const struct json *v = ids->child; v != NULL; v = v->next) {
        uint64_t id = 0;
        if (!json_u64(v, &id) || id >= r->vocab_size || !token_ids_add(&r->ids, (uint32_t)id))
            return err_set(r->detail, ERR_INVALID, "%s: ids: not a list of ids of this model",
                           name);
    }
    return ERR_OK;
}

static enum err read_object(struct reader *r, const struct json *line, uint32_t number)
{
    char name[256];
    const struct json *prompt = json_get(line, "prompt"), *text = json_get(line, "text");
    const struct json *given = json_get(line, "name"), *ids = json_get(line, "ids");
    snprintf(name, sizeof(name), "line %u", number);
    if (json_is(given, JSON_STRING) && given->bytes < sizeof(name) &&
        memchr(given->text, 0, given->bytes) == NULL) {
        memcpy(name, given->text, given->bytes);
        name[given->bytes] = '\0';
    }
    if (!json_is(prompt, JSON_STRING) && !json_is(text, JSON_STRING))
        return err_set(r->detail, ERR_INVALID, "line %u: neither prompt nor text", number);
    token_ids_clear(&r->ids);
    if (json_is(prompt, JSON_STRING))
        TRY(encode(r, name, prompt->text, prompt->bytes));
    size_t prompt_count = r->ids.count;
    if (json_is(ids, JSON_ARRAY))
        TRY(add_ids(r, ids, name));
    else if (json_is(text, JSON_STRING))
        TRY(encode(r, name, text->text, text->bytes));
    return keep(r, name, 0, prompt_count, r->ids.count);
}

static enum err read_lines(struct reader *r, const char *text, size_t bytes)
{
    struct json_options options = {.bytes_max = 16u << 20};
    struct arena nodes;
    uint32_t number = 0;
    enum err e = ERR_OK;
    arena_init(&nodes, 64 << 10, 256u << 20);
    for (size_t at = 0; at < bytes && e == ERR_OK;) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t length = end != NULL ? (size_t)(end - text) - at : bytes - at;
        struct json *root = NULL;
        struct json_error where = {0, ""};
        number++;
        if (length > 0) {
            arena_reset(&nodes);
            e = json_parse(&nodes, &options, text + at, length, &root, &where);
            e = e == ERR_OK ? read_object(r, root, number)
                            : err_set(r->detail, ERR_INVALID, "line %u: not JSON: %s", number,
                                      where.reason);
        }
        at += length + 1;
    }
    arena_fini(&nodes);
    return e;
}

static enum err read_plain(struct reader *r, const char *text, size_t bytes)
{
    token_ids_clear(&r->ids);
    TRY(encode(r, "text", text, bytes));
    for (size_t at = 0; at < r->ids.count; at += TEXTS_PIECE_IDS) {
        char name[32];
        size_t left = r->ids.count - at;
        snprintf(name, sizeof(name), "piece %zu", at / TEXTS_PIECE_IDS);
        TRY(keep(r, name, at, 0, left < TEXTS_PIECE_IDS ? left : TEXTS_PIECE_IDS));
    }
    return ERR_OK;
}

enum err texts_read(const char *path, const struct tokenizer *tokenizer, uint32_t vocab_size,
                    uint64_t tokens_max, struct texts *ret_texts, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0, at = 0;
    TRY(read_file(NULL, path, FILE_BYTES_MAX, &text, &bytes, detail));
    struct texts t = {.count = 0};
    struct reader r = {tokenizer, vocab_size, tokens_max, {0}, &t, detail};
    struct err_detail inner = {{0}};
    r.detail = &inner;
    arena_init(&t.arena, 1 << 20, 0);
    t.cases = arena_alloc_array(&t.arena, TEXTS_MAX, sizeof(*t.cases));
    token_ids_init(&r.ids, FILE_BYTES_MAX);
    while (at < bytes && strchr(" \t\r\n", text[at]) != NULL)
        at++;
    enum err e =
        at < bytes && text[at] == '{' ? read_lines(&r, text, bytes) : read_plain(&r, text, bytes);
    if (e == ERR_OK && t.count == 0)
        e = err_set(&inner, ERR_INVALID, "no text");
    token_ids_fini(&r.ids);
    free(text);
    if (e != ERR_OK) {
        texts_fini(&t);
        return err_set(detail, e, "%s: %s", path, inner.text);
    }
    *ret_texts = t;
    return ERR_OK;
}

void texts_fini(struct texts *t)
{
    arena_fini(&t->arena);
    t->count = 0;
}
