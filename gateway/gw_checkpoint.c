/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_checkpoint.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/hash.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer.h"
#include "proto/msg.h"

#define CONFIG_BYTES_MAX (4u << 20)

/* SHA-256 of the chat template that gw_chat implements. */
static const char template_sha256[] =
    "0c4099f3382d6c92700dfb99725025360966fd73032f0ecf32377c0d9e6309c5";

/* The whole file; ERR_NOT_FOUND when there is none. */
static enum err read_file(const char *path, struct str *ret_text, struct err_detail *detail)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return err_set(detail, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", path,
                       strerror(errno));
    char block[16384];
    size_t n;
    while ((n = fread(block, 1, sizeof(block), f)) > 0 && !ret_text->overflow)
        str_add(ret_text, block, n);
    bool failed = ferror(f) != 0;
    fclose(f);
    if (failed)
        return err_set(detail, ERR_IO, "%s: read failed", path);
    if (ret_text->overflow)
        return err_set(detail, ERR_TOO_LARGE, "%s: larger than %u bytes", path, CONFIG_BYTES_MAX);
    return ERR_OK;
}

static enum err read_json(const char *path, struct str *text, struct arena *arena,
                          struct json **ret_json, struct err_detail *detail)
{
    TRY(read_file(path, text, detail));
    struct json_error error;
    struct json_options options = {0};
    enum err e = json_parse(arena, &options, text->text, text->bytes, ret_json, &error);
    if (e != ERR_OK)
        return err_set(detail, e, "%s: %s at byte %zu", path, error.reason, error.offset);
    if (!json_is(*ret_json, JSON_OBJECT))
        return err_set(detail, ERR_INVALID, "%s: not an object", path);
    return ERR_OK;
}

static enum err take_context(const char *path, const struct json *config, struct gw_checkpoint *c,
                             struct err_detail *detail)
{
    const struct json *text = json_get(config, "text_config");
    const struct json *value = json_get(text ? text : config, "max_position_embeddings");
    uint64_t n = 0;
    if (!json_u64(value, &n) || n < 2 || n > UINT32_MAX / 2)
        return err_set(detail, ERR_INVALID, "%s: max_position_embeddings is no token count", path);
    c->context_max = (uint32_t)n;
    return ERR_OK;
}

static enum err take_stop_id(struct gw_checkpoint *c, const struct json *value, const char *path,
                             struct err_detail *detail)
{
    uint64_t id = 0;
    if (!json_u64(value, &id) || id > UINT32_MAX)
        return err_set(detail, ERR_INVALID, "%s: eos_token_id is no token id", path);
    if (c->stop_id_count == GW_STOP_IDS_MAX)
        return err_set(detail, ERR_INVALID, "%s: more than %u eos_token_id", path, GW_STOP_IDS_MAX);
    c->stop_ids[c->stop_id_count++] = (uint32_t)id;
    return ERR_OK;
}

static enum err take_number(const struct json *config, const char *path, const char *name,
                            double low, double high, double *ret, struct err_detail *detail)
{
    const struct json *value = json_get(config, name);
    if (!value || json_is(value, JSON_NULL))
        return ERR_OK;
    double d = 0;
    if (!json_f64(value, &d) || d < low || d > high)
        return err_set(detail, ERR_INVALID, "%s: %s is outside %g..%g", path, name, low, high);
    *ret = d;
    return ERR_OK;
}

static enum err take_generation(const char *path, const struct json *config,
                                struct gw_checkpoint *c, struct err_detail *detail)
{
    double top_k = 0;
    TRY(take_number(config, path, "temperature", 0, 100, &c->temperature, detail));
    TRY(take_number(config, path, "top_p", 1e-9, 1, &c->top_p, detail));
    TRY(take_number(config, path, "min_p", 0, 1, &c->min_p, detail));
    TRY(take_number(config, path, "repetition_penalty", 1e-9, 10, &c->repetition_penalty, detail));
    TRY(take_number(config, path, "top_k", -1, 1e9, &top_k, detail));
    c->top_k = top_k > 0 ? (uint32_t)top_k : 0;
    const struct json *sample = json_get(config, "do_sample");
    bool on = true;
    if (json_bool(sample, &on) && !on)
        c->temperature = 0;
    const struct json *stops = json_get(config, "eos_token_id");
    if (json_is(stops, JSON_ARRAY)) {
        for (const struct json *v = stops->child; v; v = v->next)
            TRY(take_stop_id(c, v, path, detail));
    } else if (json_is(stops, JSON_NUMBER)) {
        TRY(take_stop_id(c, stops, path, detail));
    }
    return ERR_OK;
}

/* chat_template.jinja beside the weights, or the text inside tokenizer_config.json. */
static void compare_template(const char *directory, struct gw_checkpoint *c)
{
    char path[PATH_MAX];
    struct str text;
    struct arena arena;
    str_init(&text, CONFIG_BYTES_MAX);
    arena_init(&arena, 1u << 16, 64u << 20);
    const char *found = NULL;
    size_t bytes = 0;
    snprintf(path, sizeof(path), "%s/chat_template.jinja", directory);
    if (read_file(path, &text, NULL) == ERR_OK) {
        found = text.text;
        bytes = text.bytes;
    } else {
        struct json *config = NULL;
        str_clear(&text);
        snprintf(path, sizeof(path), "%s/tokenizer_config.json", directory);
        if (read_json(path, &text, &arena, &config, NULL) == ERR_OK) {
            const struct json *value = json_get(config, "chat_template");
            if (json_is(value, JSON_STRING)) {
                found = value->text;
                bytes = value->bytes;
            }
        }
    }
    if (found) {
        uint8_t digest[32];
        char hex[65];
        hash_sha256(found, bytes, digest);
        hex_encode(digest, sizeof(digest), hex);
        if (strcmp(hex, template_sha256) != 0)
            snprintf(c->warning, sizeof(c->warning),
                     "the checkpoint's chat template (sha256 %.16s...) is not the one built in "
                     "(%.16s...); prompts are rendered by the built-in one",
                     hex, template_sha256);
    }
    arena_fini(&arena);
    str_fini(&text);
}

static enum err load_names(const char *directory, const char *served_name, struct gw_checkpoint *c,
                           struct err_detail *detail)
{
    char real[PATH_MAX];
    if (!realpath(directory, real))
        return err_set(detail, ERR_NOT_FOUND, "model: %s: %s", directory, strerror(errno));
    const char *base = strrchr(real, '/');
    base = base && base[1] ? base + 1 : real;
    snprintf(c->directory_name, sizeof(c->directory_name), "%.255s", base);
    const char *name = served_name[0] ? served_name : base;
    if (strlen(name) >= sizeof(c->name))
        return err_set(detail, ERR_INVALID, "served_name: longer than %zu bytes",
                       sizeof(c->name) - 1);
    snprintf(c->name, sizeof(c->name), "%.255s", name);
    if (utf8_valid_prefix(c->name, strlen(c->name)) != strlen(c->name) ||
        utf8_valid_prefix(c->directory_name, strlen(c->directory_name)) !=
            strlen(c->directory_name))
        return err_set(detail, ERR_INVALID, "served_name: not UTF-8");
    return ERR_OK;
}

static enum err load_json(const char *directory, struct gw_checkpoint *c, struct str *text,
                          struct arena *arena, struct err_detail *detail)
{
    char path[PATH_MAX];
    struct json *config = NULL;
    struct stat st;
    snprintf(path, sizeof(path), "%s/config.json", directory);
    TRY(read_json(path, text, arena, &config, detail));
    TRY(take_context(path, config, c, detail));
    if (stat(path, &st) == 0)
        c->created_unix_s = (uint64_t)st.st_mtime;
    str_clear(text);
    snprintf(path, sizeof(path), "%s/generation_config.json", directory);
    struct json *generation = NULL;
    enum err e = read_json(path, text, arena, &generation, detail);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    TRY(e);
    return take_generation(path, generation, c, detail);
}

enum err gw_checkpoint_load(const char *directory, const char *served_name, uint32_t context_max,
                            struct gw_checkpoint *ret_checkpoint, struct err_detail *detail)
{
    struct gw_checkpoint c = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    char path[PATH_MAX];
    struct str text;
    struct arena arena;
    TRY(load_names(directory, served_name, &c, detail));
    str_init(&text, CONFIG_BYTES_MAX);
    arena_init(&arena, 1u << 16, 64u << 20);
    enum err e = load_json(directory, &c, &text, &arena, detail);
    arena_fini(&arena);
    str_fini(&text);
    TRY(e);
    if (context_max > c.context_max)
        return err_set(detail, ERR_INVALID, "max_model_len: %u is above the model's %u",
                       context_max, c.context_max);
    if (context_max)
        c.context_max = context_max;
    if (c.context_max > MSG_IDS_MAX)
        c.context_max = MSG_IDS_MAX;
    snprintf(path, sizeof(path), "%s/tokenizer.json", directory);
    TRY(tokenizer_load(path, NULL, &c.tokenizer, detail));
    c.id_count = tokenizer_id_count(c.tokenizer);
    static const char assistant[] = "<|assistant|>";
    c.has_assistant_id =
        tokenizer_find(c.tokenizer, assistant, sizeof(assistant) - 1, &c.assistant_id);
    compare_template(directory, &c);
    *ret_checkpoint = c;
    return ERR_OK;
}

void gw_checkpoint_fini(struct gw_checkpoint *c)
{
    tokenizer_destroy(&c->tokenizer);
}

bool gw_checkpoint_stops(const struct gw_checkpoint *c, uint32_t id)
{
    for (uint32_t i = 0; i < c->stop_id_count; i++)
        if (c->stop_ids[i] == id)
            return true;
    return c->has_assistant_id && id == c->assistant_id;
}
