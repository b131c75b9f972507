/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_fields.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"

void bench_fields_fini(struct bench_fields *f)
{
    for (uint32_t i = 0; i < f->count; i++)
        mem_give(f->items[i].value);
    memset(f, 0, sizeof(*f));
}

static struct bench_field *find(const struct bench_fields *f, const char *key, size_t key_bytes)
{
    for (uint32_t i = 0; i < f->count; i++) {
        const struct bench_field *item = &f->items[i];
        if (strlen(item->key) == key_bytes && memcmp(item->key, key, key_bytes) == 0)
            return (struct bench_field *)item;
    }
    return NULL;
}

enum err bench_fields_set(struct bench_fields *f, const char *key, size_t key_bytes,
                          const char *value, size_t value_bytes, struct err_detail *detail)
{
    CHECK(f->count <= BENCH_FIELDS_MAX);
    if (key_bytes == 0 || key_bytes > BENCH_FIELD_KEY_MAX)
        return err_set(detail, ERR_INVALID, "a body member's name has %zu bytes, not 1 to %d",
                       key_bytes, BENCH_FIELD_KEY_MAX);
    struct bench_field *item = find(f, key, key_bytes);
    if (item == NULL) {
        if (f->count == BENCH_FIELDS_MAX)
            return err_set(detail, ERR_TOO_LARGE, "more than %d body members", BENCH_FIELDS_MAX);
        item = &f->items[f->count++];
        memcpy(item->key, key, key_bytes);
        item->key[key_bytes] = '\0';
    }
    mem_give(item->value);
    item->value = mem_take(value_bytes + 1);
    memcpy(item->value, value, value_bytes);
    return ERR_OK;
}

enum err bench_fields_set_u64(struct bench_fields *f, const char *key, uint64_t value)
{
    char text[24];
    int n = snprintf(text, sizeof(text), "%" PRIu64, value);
    return bench_fields_set(f, key, strlen(key), text, (size_t)n, NULL);
}

enum err bench_fields_set_object(struct bench_fields *f, const struct json *object,
                                 struct err_detail *detail)
{
    CHECK(json_is(object, JSON_OBJECT));
    struct str value;
    str_init(&value, 0);
    enum err e = ERR_OK;
    for (const struct json *m = object->child; m != NULL && e == ERR_OK; m = m->next) {
        str_clear(&value);
        json_write_compact(&value, m);
        e = value.overflow
                ? ERR_NOMEM
                : bench_fields_set(f, m->key, m->key_bytes, value.text, value.bytes, detail);
    }
    str_fini(&value);
    return e;
}

/* Where one setting ends: the next comma that stands outside quotes and brackets. */
static size_t setting_bytes(const char *text)
{
    int depth = 0;
    bool quoted = false;
    size_t at = 0;
    for (; text[at] != '\0'; at++) {
        char c = text[at];
        if (quoted) {
            if (c == '\\' && text[at + 1] != '\0')
                at++;
            else if (c == '"')
                quoted = false;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '[' || c == '{') {
            depth++;
        } else if (c == ']' || c == '}') {
            depth--;
        } else if (c == ',' && depth <= 0) {
            break;
        }
    }
    return at;
}

enum err bench_fields_set_text(struct bench_fields *f, struct arena *arena, const char *text,
                               struct err_detail *detail)
{
    struct str quoted;
    str_init(&quoted, 0);
    enum err e = ERR_OK;
    for (const char *at = text;;) {
        size_t bytes = setting_bytes(at);
        const char *equals = memchr(at, '=', bytes);
        if (equals == NULL) {
            e = err_set(detail, ERR_INVALID, "\"%.*s\" is not name=value",
                        (int)(bytes > 80 ? 80 : bytes), at);
            break;
        }
        const char *value = equals + 1;
        size_t value_bytes = bytes - (size_t)(value - at);
        struct json *parsed;
        struct json_error fault;
        arena_reset(arena);
        str_clear(&quoted);
        if (json_parse(arena, NULL, value, value_bytes, &parsed, &fault) == ERR_OK)
            json_write_compact(&quoted, parsed);
        else
            json_write_string(&quoted, value, value_bytes);
        e = bench_fields_set(f, at, (size_t)(equals - at), quoted.text, quoted.bytes, detail);
        if (e != ERR_OK || at[bytes] == '\0')
            break;
        at += bytes + 1;
    }
    str_fini(&quoted);
    return e;
}

const char *bench_fields_get(const struct bench_fields *f, const char *key)
{
    const struct bench_field *item = find(f, key, strlen(key));
    return item ? item->value : NULL;
}

void bench_fields_write(struct str *out, const struct bench_fields *const *layers, size_t count)
{
    bool first = true;
    str_add_char(out, '{');
    for (size_t layer = 0; layer < count; layer++) {
        for (uint32_t i = 0; i < layers[layer]->count; i++) {
            const struct bench_field *item = &layers[layer]->items[i];
            bool replaced = false;
            for (size_t later = layer + 1; later < count && !replaced; later++)
                replaced = find(layers[later], item->key, strlen(item->key)) != NULL;
            if (replaced)
                continue;
            if (!first)
                str_add_char(out, ',');
            first = false;
            json_write_string(out, item->key, strlen(item->key));
            str_add_char(out, ':');
            str_add_text(out, item->value);
        }
    }
    str_add_char(out, '}');
}
