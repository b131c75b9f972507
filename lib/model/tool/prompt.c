/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/prompt.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/model/read_file.h"
#include "lib/text/tokenizer.h"

#define IDS_BYTES_MAX    ((size_t)64 << 20)
#define CONFIG_BYTES_MAX ((size_t)1 << 20)

enum err prompt_tokenizer(const char *directory, struct tokenizer **ret, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    enum err e =
        read_file(directory, "tokenizer.json", TOKENIZER_FILE_BYTES_MAX, &text, &bytes, detail);
    *ret = NULL;
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e == ERR_OK)
        e = tokenizer_parse(text, bytes, NULL, ret, detail);
    free(text);
    return e;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static enum err add_id(const char *text, size_t bytes, uint32_t vocab_size, struct token_ids *out,
                       struct err_detail *detail)
{
    uint64_t id = 0;
    if (!text_to_u64(text, bytes, &id) || id >= vocab_size)
        return err_set(detail, ERR_INVALID, "--ids: \"%.*s\" is no id below %u",
                       (int)(bytes < 40 ? bytes : 40), text, vocab_size);
    return token_ids_add(out, (uint32_t)id) ? ERR_OK
                                            : err_set(detail, ERR_TOO_LARGE, "--ids: too many");
}

static enum err read_list(const char *text, size_t bytes, uint32_t vocab_size,
                          struct token_ids *out, struct err_detail *detail)
{
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = 4, .bytes_max = IDS_BYTES_MAX};
    arena_init(&nodes, 64 << 10, bytes * 64 + (1u << 20));
    enum err e = json_parse(&nodes, &options, text, bytes, &root, &where);
    if (e != ERR_OK)
        e = err_set(detail, ERR_INVALID, "--ids: byte %zu: %s", where.offset, where.reason);
    for (struct json *v = e == ERR_OK ? root->child : NULL; v != NULL && e == ERR_OK; v = v->next)
        e = json_is(v, JSON_NUMBER) ? add_id(v->text, v->bytes, vocab_size, out, detail)
                                    : err_set(detail, ERR_INVALID, "--ids: not a list of numbers");
    arena_fini(&nodes);
    return e;
}

static enum err read_words(const char *text, size_t bytes, uint32_t vocab_size,
                           struct token_ids *out, struct err_detail *detail)
{
    for (size_t at = 0; at < bytes;) {
        size_t end = at;
        while (end < bytes && !is_space(text[end]))
            end++;
        if (end > at)
            TRY(add_id(text + at, end - at, vocab_size, out, detail));
        at = end + 1;
    }
    return ERR_OK;
}

enum err prompt_read_ids(const char *path, uint32_t vocab_size, struct token_ids *out,
                         struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0, at = 0;
    TRY(read_file(NULL, path, IDS_BYTES_MAX, &text, &bytes, detail));
    while (at < bytes && is_space(text[at]))
        at++;
    enum err e = at < bytes && text[at] == '[' ? read_list(text, bytes, vocab_size, out, detail)
                                               : read_words(text, bytes, vocab_size, out, detail);
    free(text);
    return e;
}

static enum err read_defaults(const struct json *root, double *temperature, double *top_p,
                              struct err_detail *detail)
{
    const struct json *t = json_get(root, "temperature"), *p = json_get(root, "top_p");
    bool samples = true;
    if (t != NULL && (!json_f64(t, temperature) || !(*temperature >= 0 && *temperature <= 100)))
        return err_set(detail, ERR_INVALID, "generation_config.json: temperature");
    if (p != NULL && (!json_f64(p, top_p) || !(*top_p > 0 && *top_p <= 1)))
        return err_set(detail, ERR_INVALID, "generation_config.json: top_p");
    if (json_bool(json_get(root, "do_sample"), &samples) && !samples)
        *temperature = 0;
    return ERR_OK;
}

enum err prompt_defaults(const char *directory, double *temperature, double *top_p,
                         struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    enum err e =
        read_file(directory, "generation_config.json", CONFIG_BYTES_MAX, &text, &bytes, detail);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e != ERR_OK)
        return e;
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = 16};
    arena_init(&nodes, 64 << 10, 64u << 20);
    e = json_parse(&nodes, &options, text, bytes, &root, &where);
    e = e == ERR_OK ? read_defaults(root, temperature, top_p, detail)
                    : err_set(detail, ERR_INVALID, "generation_config.json: byte %zu: %s",
                              where.offset, where.reason);
    arena_fini(&nodes);
    free(text);
    return e;
}
