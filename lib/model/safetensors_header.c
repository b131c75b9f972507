/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/safetensors_header.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

#define NAME_BYTES_MAX 4096 /* real names have about 100 */
#define DEPTH_MAX      16   /* a legal header needs 3 */

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[] = {
#define DTYPE(name, bytes) {#name, bytes},
#include "lib/model/safetensors_dtypes.def"
#undef DTYPE
};
STATIC_CHECK(ARRAY_COUNT(dtypes) == SAFETENSORS_DTYPE_COUNT);

const char *safetensors_dtype_name(enum safetensors_dtype dtype)
{
    CHECK(dtype < SAFETENSORS_DTYPE_COUNT);
    return dtypes[dtype].name;
}

uint32_t safetensors_dtype_bytes(enum safetensors_dtype dtype)
{
    CHECK(dtype < SAFETENSORS_DTYPE_COUNT);
    return dtypes[dtype].bytes;
}

const char *safetensors_name_fault(const char *name, size_t bytes)
{
    if (bytes == 0)
        return "empty";
    if (bytes > NAME_BYTES_MAX)
        return "too long";
    if (name[0] == '/')
        return "an absolute path";
    for (size_t i = 0; i < bytes; i++) {
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return "control characters";
        bool starts = i == 0 || name[i - 1] == '/';
        if (starts && bytes - i >= 2 && name[i] == '.' && name[i + 1] == '.' &&
            (bytes - i == 2 || name[i + 2] == '/'))
            return "a path upward";
    }
    return NULL;
}

const char *safetensors_json_class(const struct json_error *error, const char *fallback)
{
    const char *reason = error->reason != NULL ? error->reason : "";
    if (strstr(reason, "duplicate") != NULL)
        return "duplicate_name";
    if (strstr(reason, "deep") != NULL || strstr(reason, "nest") != NULL)
        return "too_deep";
    return fallback;
}

/* What a message needs; entry is the member of the header at fault. */
struct place {
    const char *file;
    const struct json *entry;
    struct err_detail *detail;
};

static enum err fault(const struct place *p, const char *class, const char *what)
{
    int shown = p->entry->key_bytes > 200 ? 200 : (int)p->entry->key_bytes;
    return err_set(p->detail, ERR_CORRUPT, "%s: %s: tensor \"%.*s\": %s", p->file, class, shown,
                   p->entry->key, what);
}

/* Only plain digits count as a number here: no sign, fraction or exponent. */
static bool plain_u64(const struct json *node, uint64_t *ret)
{
    return json_is(node, JSON_NUMBER) && text_to_u64(node->text, node->bytes, ret);
}

static enum err read_dtype(const struct place *p, struct safetensors_tensor *t)
{
    const struct json *node = json_get(p->entry, "dtype");
    if (!json_is(node, JSON_STRING))
        return fault(p, "bad_entry", "dtype is missing or not a string");
    for (uint32_t i = 0; i < SAFETENSORS_DTYPE_COUNT; i++) {
        if (json_string_is(node, dtypes[i].name)) {
            t->dtype = (enum safetensors_dtype)i;
            return ERR_OK;
        }
    }
    return fault(p, "unknown_dtype", "dtype is not known");
}

static enum err read_shape(const struct place *p, struct arena *arena, struct safetensors_tensor *t)
{
    const struct json *node = json_get(p->entry, "shape");
    if (!json_is(node, JSON_ARRAY))
        return fault(p, "bad_entry", "shape is missing or not a list");
    if (node->count > SAFETENSORS_DIMS_MAX)
        return fault(p, "bad_entry", "shape has too many dimensions");
    uint64_t *shape = arena_alloc_array(arena, node->count + 1, sizeof(uint64_t));
    if (shape == NULL)
        return fault(p, "bad_entry", "out of memory");
    uint32_t i = 0;
    t->elements = 1;
    for (const struct json *v = node->child; v != NULL; v = v->next, i++) {
        if (!plain_u64(v, &shape[i]))
            return fault(p, "bad_entry", "shape holds something else than sizes");
        if (__builtin_mul_overflow(t->elements, shape[i], &t->elements))
            return fault(p, "bad_entry", "shape overflows");
    }
    t->shape = shape;
    t->dims = node->count;
    if (__builtin_mul_overflow(t->elements, (uint64_t)dtypes[t->dtype].bytes, &t->bytes))
        return fault(p, "bad_entry", "shape overflows");
    return ERR_OK;
}

static enum err read_offsets(const struct place *p, const uint8_t *data, uint64_t data_bytes,
                             struct safetensors_tensor *t)
{
    const struct json *node = json_get(p->entry, "data_offsets");
    uint64_t begin = 0, end = 0;
    if (!json_is(node, JSON_ARRAY) || node->count != 2 || !plain_u64(node->child, &begin) ||
        !plain_u64(node->child->next, &end))
        return fault(p, "bad_entry", "data_offsets is missing or not two offsets");
    if (begin > end)
        return fault(p, "bad_offsets", "data_offsets are reversed");
    if (end > data_bytes)
        return fault(p, "bad_offsets", "data_offsets point beyond the end of the file");
    if (end - begin != t->bytes)
        return fault(p, "size_mismatch", "data_offsets do not fit shape and dtype");
    t->data = data + begin;
    return ERR_OK;
}

static enum err list_push(struct safetensors_list *list, const struct safetensors_tensor *t)
{
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity == 0 ? 256 : list->capacity * 2;
        void *grown = realloc(list->tensors, capacity * sizeof(*list->tensors));
        if (grown == NULL)
            return ERR_NOMEM;
        list->tensors = grown;
        list->capacity = capacity;
    }
    list->tensors[list->count++] = *t;
    return ERR_OK;
}

static enum err read_entry(const struct place *p, const uint8_t *data, uint64_t data_bytes,
                           struct arena *arena, struct safetensors_list *list, uint32_t shard)
{
    const struct json *entry = p->entry;
    struct safetensors_tensor t = {.shard = shard};
    const char *why = safetensors_name_fault(entry->key, entry->key_bytes);
    if (why != NULL)
        return err_set(p->detail, ERR_CORRUPT, "%s: bad_name: a tensor's name is or holds %s",
                       p->file, why);
    if (!json_is(entry, JSON_OBJECT))
        return fault(p, "bad_entry", "not an object");
    TRY(read_dtype(p, &t));
    TRY(read_shape(p, arena, &t));
    TRY(read_offsets(p, data, data_bytes, &t));
    t.name = arena_strndup(arena, entry->key, entry->key_bytes);
    if (t.name == NULL || list_push(list, &t) != ERR_OK)
        return err_set(p->detail, ERR_NOMEM, "%s: out of memory", p->file);
    return ERR_OK;
}

static enum err check_metadata(const struct json *node, const char *file, struct err_detail *detail)
{
    bool good = json_is(node, JSON_OBJECT);
    for (const struct json *v = good ? node->child : NULL; v != NULL; v = v->next)
        good = good && v->type == JSON_STRING;
    if (!good)
        return err_set(detail, ERR_CORRUPT,
                       "%s: bad_metadata: __metadata__ is not a map of strings", file);
    return ERR_OK;
}

static int by_place(const void *x, const void *y)
{
    const struct safetensors_tensor *a = *(const struct safetensors_tensor *const *)x;
    const struct safetensors_tensor *b = *(const struct safetensors_tensor *const *)y;
    if (a->data != b->data)
        return a->data < b->data ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

/* The data must be covered exactly: no hole, no overlap, nothing after the last tensor. */
static enum err check_cover(const struct safetensors_tensor *tensors, uint32_t count,
                            const uint8_t *data, uint64_t data_bytes, const char *file,
                            struct err_detail *detail)
{
    const struct safetensors_tensor **order = malloc((count + 1) * sizeof(*order));
    if (order == NULL)
        return err_set(detail, ERR_NOMEM, "%s: out of memory", file);
    for (uint32_t i = 0; i < count; i++)
        order[i] = &tensors[i];
    qsort(order, count, sizeof(*order), by_place);
    const uint8_t *at = data;
    enum err e = ERR_OK;
    for (uint32_t i = 0; i < count && e == ERR_OK; i++) {
        if (order[i]->data != at)
            e = err_set(detail, ERR_CORRUPT,
                        "%s: bad_offsets: tensor \"%.200s\": data_offsets "
                        "leave a hole or overlap",
                        file, order[i]->name);
        at = order[i]->data + order[i]->bytes;
    }
    if (e == ERR_OK && at != data + data_bytes)
        e = err_set(detail, ERR_CORRUPT, "%s: trailing_data: bytes after the last tensor", file);
    free(order);
    return e;
}

static enum err read_members(const struct json *root, const uint8_t *data, uint64_t data_bytes,
                             const char *file, uint32_t shard, struct arena *arena,
                             struct safetensors_list *list, struct err_detail *detail)
{
    uint32_t first = list->count;
    for (const struct json *v = root->child; v != NULL; v = v->next) {
        if (v->key_bytes == 12 && memcmp(v->key, "__metadata__", 12) == 0) {
            TRY(check_metadata(v, file, detail));
            continue;
        }
        struct place p = {file, v, detail};
        TRY(read_entry(&p, data, data_bytes, arena, list, shard));
    }
    if (list->count == first)
        return data_bytes == 0 ? ERR_OK
                               : err_set(detail, ERR_CORRUPT,
                                         "%s: trailing_data: bytes without a tensor", file);
    return check_cover(list->tensors + first, list->count - first, data, data_bytes, file, detail);
}

enum err safetensors_read_header(const uint8_t *bytes, uint64_t size, const char *file,
                                 uint32_t shard, struct arena *arena, struct safetensors_list *list,
                                 struct err_detail *detail)
{
    uint64_t length = 0;
    if (size < 8)
        return err_set(detail, ERR_CORRUPT, "%s: truncated: shorter than the header length", file);
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)bytes[i] << (8 * i);
    if (length > SAFETENSORS_HEADER_BYTES_MAX)
        return err_set(detail, ERR_CORRUPT, "%s: header_too_large: no safetensors file", file);
    if (length > size - 8)
        return err_set(detail, ERR_CORRUPT, "%s: truncated: the header is longer than the file",
                       file);
    if (length == 0 || bytes[8] != '{')
        return err_set(detail, ERR_CORRUPT, "%s: bad_header: does not begin with {", file);

    /* A node is at most about fifty times its text; real headers need five times. */
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = DEPTH_MAX,
                                   .bytes_max = SAFETENSORS_HEADER_BYTES_MAX};
    arena_init(&nodes, 256 << 10, (size_t)length * 16 + (4u << 20));
    enum err e = json_parse(&nodes, &options, (const char *)bytes + 8, length, &root, &where);
    if (e != ERR_OK)
        e = err_set(detail, ERR_CORRUPT, "%s: %s: header byte %zu: %s", file,
                    safetensors_json_class(&where, "bad_header"), where.offset,
                    where.reason != NULL ? where.reason : err_text(e));
    else if (!json_is(root, JSON_OBJECT))
        e = err_set(detail, ERR_CORRUPT, "%s: bad_header: not an object", file);
    else
        e = read_members(root, bytes + 8 + length, size - 8 - length, file, shard, arena, list,
                         detail);
    arena_fini(&nodes);
    return e;
}
