/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_parse_types.h"

#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

static const char *const COMBINATORS[] = {"anyOf", "oneOf", "allOf"};
#define COMBINATOR_ALL_OF 2

/* A schema whose branches are being visited. */
struct frame {
    const struct json *schema;
    const struct json *branch; /* next to visit */
    uint32_t combinator;       /* index of the list that branch is in */
    uint32_t types;            /* union so far */
    bool undeclared;           /* a branch of anyOf or oneOf has no type */
    bool is_reference;         /* the only branch is the target of $ref */
};

static const struct json *get_bytes(const struct json *object, const char *key, size_t key_bytes)
{
    if (!json_is(object, JSON_OBJECT))
        return NULL;
    for (const struct json *m = object->child; m; m = m->next)
        if (m->key_bytes == key_bytes && (key_bytes == 0 || memcmp(m->key, key, key_bytes) == 0))
            return m;
    return NULL;
}

/* Type by its name in JSON Schema; 0 = none of the seven. */
static uint32_t type_named(const struct json *name)
{
    static const char *const names[] = {"string", "number", "integer", "boolean",
                                        "array",  "object", "null"};
    for (uint32_t i = 0; i < ARRAY_COUNT(names); i++)
        if (json_string_is(name, names[i]))
            return 1u << i;
    return 0;
}

static bool is_integer(const struct json *number)
{
    for (size_t i = 0; i < number->bytes; i++)
        if (memchr(".eE", number->text[i], 3) != NULL)
            return false;
    return true;
}

static uint32_t type_of_value(const struct json *value)
{
    switch (value->type) {
    case JSON_NULL:
        return GW_PARSE_TYPE_NULL;
    case JSON_BOOL:
        return GW_PARSE_TYPE_BOOLEAN;
    case JSON_NUMBER:
        return is_integer(value) ? GW_PARSE_TYPE_INTEGER : GW_PARSE_TYPE_NUMBER;
    case JSON_STRING:
        return GW_PARSE_TYPE_STRING;
    case JSON_ARRAY:
        return GW_PARSE_TYPE_ARRAY;
    default:
        return GW_PARSE_TYPE_OBJECT;
    }
}

/* What a schema says by itself, without its branches.  True when it says something, be it that
 * the type is undeclared (0). */
static bool own_types(const struct json *schema, uint32_t *ret_types)
{
    *ret_types = 0;
    const struct json *type = json_get(schema, "type");
    if (type != NULL) {
        bool known = true;
        if (!json_is(type, JSON_ARRAY))
            *ret_types = type_named(type);
        else
            for (const struct json *t = type->child; t; t = t->next) {
                known = known && type_named(t) != 0;
                *ret_types |= type_named(t);
            }
        if (!known)
            *ret_types = 0;
        return true;
    }
    const struct json *list = json_get(schema, "enum");
    if (json_is(list, JSON_ARRAY)) {
        for (const struct json *v = list->child; v; v = v->next)
            *ret_types |= type_of_value(v);
        return true;
    }
    const struct json *constant = json_get(schema, "const");
    if (constant != NULL)
        *ret_types = type_of_value(constant);
    return constant != NULL;
}

/* Decodes ~0 and ~1 of a JSON pointer while comparing. */
static bool pointer_part_is(const char *part, size_t part_bytes, const struct json *member)
{
    size_t at = 0;
    for (size_t i = 0; i < part_bytes; i++, at++) {
        char c = part[i];
        if (c == '~' && i + 1 < part_bytes && (part[i + 1] == '0' || part[i + 1] == '1'))
            c = part[++i] == '0' ? '~' : '/';
        if (at >= member->key_bytes || member->key[at] != c)
            return false;
    }
    return at == member->key_bytes;
}

/* Target of a local reference ("#/$defs/x"), NULL = not found. */
static const struct json *resolve(const struct json *root, const struct json *reference)
{
    if (!json_is(reference, JSON_STRING) || reference->bytes == 0 || reference->text[0] != '#')
        return NULL;
    const struct json *at = root;
    const char *part = reference->text + 1;
    const char *end = reference->text + reference->bytes;
    while (part < end) {
        if (*part != '/' || !json_is(at, JSON_OBJECT))
            return NULL;
        part++;
        const char *slash = memchr(part, '/', (size_t)(end - part));
        size_t part_bytes = (size_t)((slash ? slash : end) - part);
        const struct json *member = at->child;
        while (member != NULL && !pointer_part_is(part, part_bytes, member))
            member = member->next;
        if (member == NULL)
            return NULL;
        at = member;
        part += part_bytes;
    }
    return at;
}

/* Next branch of a frame; NULL when all were visited. */
static const struct json *next_branch(struct frame *f)
{
    while (f->branch == NULL && !f->is_reference &&
           ++f->combinator < (uint32_t)ARRAY_COUNT(COMBINATORS)) {
        const struct json *list = json_get(f->schema, COMBINATORS[f->combinator]);
        f->branch = json_is(list, JSON_ARRAY) ? list->child : NULL;
    }
    const struct json *branch = f->branch;
    if (branch != NULL)
        f->branch = f->is_reference ? NULL : branch->next;
    return branch;
}

static void add_branch(struct frame *f, uint32_t types)
{
    f->types |= types;
    if (types == 0 && (f->is_reference || f->combinator != COMBINATOR_ALL_OF))
        f->undeclared = true;
}

static uint32_t with_nullable(const struct json *schema, uint32_t types)
{
    bool nullable = false;
    (void)json_bool(json_get(schema, "nullable"), &nullable);
    return types != 0 && nullable ? types | GW_PARSE_TYPE_NULL : types;
}

static struct frame frame_of(const struct json *schema, const struct json *root)
{
    struct frame f = {.schema = schema, .combinator = UINT32_MAX};
    const struct json *reference = json_get(schema, "$ref");
    if (reference != NULL) {
        f.is_reference = true;
        f.branch = resolve(root, reference);
        f.undeclared = f.branch == NULL;
    }
    return f;
}

/* Types of one schema: a walk over its branches with a stack of bounded depth. */
static uint32_t types_of(const struct json *schema, const struct json *root)
{
    struct frame stack[GW_PARSE_TYPES_DEPTH_MAX];
    uint32_t depth = 0, types = 0;
    if (own_types(schema, &types))
        return with_nullable(schema, types);
    stack[depth++] = frame_of(schema, root);
    for (uint32_t visits = 0; visits < GW_PARSE_TYPES_VISITS_MAX; visits++) {
        struct frame *top = &stack[depth - 1];
        const struct json *branch = next_branch(top);
        if (branch == NULL) {
            types = with_nullable(top->schema, top->undeclared ? 0 : top->types);
            if (--depth == 0)
                return types;
            add_branch(&stack[depth - 1], types);
        } else if (own_types(branch, &types)) {
            add_branch(top, with_nullable(branch, types));
        } else if (depth == GW_PARSE_TYPES_DEPTH_MAX) {
            return 0;
        } else {
            stack[depth++] = frame_of(branch, root);
        }
    }
    return 0;
}

uint32_t gw_parse_types(const struct json *parameters, const char *key, size_t key_bytes)
{
    const struct json *schema = get_bytes(json_get(parameters, "properties"), key, key_bytes);
    if (schema == NULL)
        schema = json_get(parameters, "additionalProperties");
    return json_is(schema, JSON_OBJECT) ? types_of(schema, parameters) : 0;
}

static bool trimmed_is(const char *text, size_t bytes, const char *word)
{
    static const char white[] = " \t\r\n";
    while (bytes > 0 && memchr(white, text[0], 4) != NULL) {
        text++;
        bytes--;
    }
    while (bytes > 0 && memchr(white, text[bytes - 1], 4) != NULL)
        bytes--;
    return bytes == strlen(word) && memcmp(text, word, bytes) == 0;
}

/* The words that Python prints; NULL = none of them, or its type is not declared. */
static const char *python_word(uint32_t types, const char *text, size_t bytes)
{
    if ((types & GW_PARSE_TYPE_BOOLEAN) && trimmed_is(text, bytes, "True"))
        return "true";
    if ((types & GW_PARSE_TYPE_BOOLEAN) && trimmed_is(text, bytes, "False"))
        return "false";
    if ((types & GW_PARSE_TYPE_NULL) && trimmed_is(text, bytes, "None"))
        return "null";
    return NULL;
}

/* Whether a JSON value stands for the text.  A set with string in it takes the other types it
 * names; any other set takes every value: one of a wrong type is still better than a text. */
static bool takes(uint32_t types, const struct json *value)
{
    if (json_is(value, JSON_STRING))
        return false;
    if (!(types & GW_PARSE_TYPE_STRING))
        return true;
    uint32_t type = type_of_value(value);
    if (type == GW_PARSE_TYPE_INTEGER)
        type |= GW_PARSE_TYPE_NUMBER;
    return (types & type) != 0;
}

void gw_parse_value_write(struct str *out, struct arena *arena, uint32_t types, const char *text,
                          size_t bytes)
{
    CHECK(out != NULL && arena != NULL);
    const struct json_options options = {.lone_surrogate_replace = true,
                                         .duplicate_keys_last = true};
    struct json *value = NULL;
    struct json_error error;
    const char *word = NULL;
    if (types == GW_PARSE_TYPE_STRING) {
        json_write_string(out, text, bytes);
    } else if (types == (GW_PARSE_TYPE_STRING | GW_PARSE_TYPE_NULL)) {
        if (bytes == 4 && memcmp(text, "null", 4) == 0)
            str_add_text(out, "null");
        else
            json_write_string(out, text, bytes);
    } else if (json_parse(arena, &options, text, bytes, &value, &error) == ERR_OK &&
               takes(types, value)) {
        json_write(out, value, JSON_NUMBERS_VERBATIM);
    } else if (!(types & GW_PARSE_TYPE_STRING) &&
               (word = python_word(types, text, bytes)) != NULL) {
        str_add_text(out, word);
    } else {
        json_write_string(out, text, bytes);
    }
}
