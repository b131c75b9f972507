/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/vocabulary.h"

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

#define TOKENIZER_BYTES_MAX (256u << 20)

static enum err mark(const struct json *node, uint32_t vocab_size, uint8_t *has_token,
                     uint32_t *ret_id, struct err_detail *detail)
{
    uint64_t id = 0;
    if (!json_u64(node, &id))
        return err_set(detail, ERR_INVALID, "tokenizer.json: an id is not a whole number");
    if (id >= vocab_size)
        return err_set(detail, ERR_INVALID,
                       "tokenizer.json: id %llu is outside the model's vocab_size %u",
                       (unsigned long long)id, vocab_size);
    has_token[id] = 1;
    *ret_id = (uint32_t)id;
    return ERR_OK;
}

static enum err mark_all(const struct json *root, uint32_t vocab_size, uint8_t *has_token,
                         uint32_t *ret_assistant_id, struct err_detail *detail)
{
    uint32_t id = 0;
    const struct json *vocab = json_get(json_get(root, "model"), "vocab");
    if (!json_is(vocab, JSON_OBJECT))
        return err_set(detail, ERR_INVALID, "tokenizer.json: model.vocab is not an object");
    for (const struct json *v = vocab->child; v != NULL; v = v->next)
        TRY(mark(v, vocab_size, has_token, &id, detail));
    const struct json *added = json_get(root, "added_tokens");
    if (added != NULL && !json_is(added, JSON_ARRAY))
        return err_set(detail, ERR_INVALID, "tokenizer.json: added_tokens is not a list");
    for (const struct json *v = added != NULL ? added->child : NULL; v != NULL; v = v->next) {
        TRY(mark(json_get(v, "id"), vocab_size, has_token, &id, detail));
        if (json_string_is(json_get(v, "content"), "<|assistant|>"))
            *ret_assistant_id = id;
    }
    if (vocab->count == 0)
        return err_set(detail, ERR_INVALID, "tokenizer.json: model.vocab is empty");
    return ERR_OK;
}

enum err vocabulary_read(const char *text, size_t bytes, uint32_t vocab_size, uint8_t *has_token,
                         uint32_t *ret_assistant_id, struct err_detail *detail)
{
    struct arena arena;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.bytes_max = TOKENIZER_BYTES_MAX};
    CHECK(vocab_size > 0);
    *ret_assistant_id = VOCABULARY_NO_ID;
    arena_init(&arena, 1 << 20, bytes * 48 + (4u << 20));
    enum err e = json_parse(&arena, &options, text, bytes, &root, &where);
    if (e != ERR_OK)
        e = err_set(detail, ERR_INVALID, "tokenizer.json: byte %zu: %s", where.offset,
                    where.reason != NULL ? where.reason : err_text(e));
    else
        e = mark_all(root, vocab_size, has_token, ret_assistant_id, detail);
    arena_fini(&arena);
    return e;
}

struct hash128 vocabulary_fp(const char *text, size_t bytes)
{
    return hash_blake2b(NULL, 0, text, bytes, NULL, 0, NULL, 0);
}
