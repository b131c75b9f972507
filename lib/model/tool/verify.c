/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/read_file.h"
#include "lib/model/safetensors.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/manifest.h"
#include "lib/model/tool/tool.h"

#define MANIFEST_BYTES_MAX ((size_t)1 << 30)

struct checking {
    const struct manifest *m;
    uint8_t *tensor_faults; /* [files of the set] a tensor in it differs */
    uint32_t faults;
};

static void fault(struct checking *c, const char *format, ...) PRINTF_LIKE(2, 3);

static void fault(struct checking *c, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
    putchar('\n');
    c->faults++;
}

static bool copy_text(const struct json *value, char *ret_text, size_t bytes)
{
    if (!json_is(value, JSON_STRING) || value->bytes == 0 || value->bytes >= bytes ||
        memchr(value->text, 0, value->bytes) != NULL)
        return false;
    memcpy(ret_text, value->text, value->bytes);
    ret_text[value->bytes] = '\0';
    return true;
}

static bool same_shape(const struct json *shape, const struct safetensors_tensor *t)
{
    uint32_t d = 0;
    if (!json_is(shape, JSON_ARRAY) || shape->count != t->dims)
        return false;
    for (const struct json *v = shape->child; v != NULL; v = v->next, d++) {
        uint64_t size = 0;
        if (!json_u64(v, &size) || size != t->shape[d])
            return false;
    }
    return true;
}

static enum err check_tensor(struct checking *c, const struct json *entry, uint8_t *seen,
                             struct err_detail *detail)
{
    char name[4096], file[256], hex[33];
    const struct manifest *m = c->m;
    if (!copy_text(json_get(entry, "name"), name, sizeof(name)) ||
        !copy_text(json_get(entry, "file"), file, sizeof(file)))
        return err_set(detail, ERR_CORRUPT, "manifest: a tensor lacks name or file");
    const struct safetensors_tensor *t = safetensors_find(m->set, name);
    if (t == NULL) {
        fault(c, "tensor \"%s\" in %s: missing", name, file);
        return ERR_OK;
    }
    uint32_t index = (uint32_t)(t - safetensors_at(m->set, 0));
    hex_encode(m->hashes[index].bytes, 16, hex);
    seen[index] = 1;
    if (strcmp(file, safetensors_file_name(m->set, t->shard)) != 0)
        fault(c, "tensor \"%s\": in %s, the manifest says %s", name,
              safetensors_file_name(m->set, t->shard), file);
    if (!json_string_is(json_get(entry, "dtype"), safetensors_dtype_name(t->dtype)) ||
        !same_shape(json_get(entry, "shape"), t)) {
        c->tensor_faults[t->shard] = 1;
        fault(c, "tensor \"%s\" in %s: type or shape differs", name, file);
    } else if (!json_string_is(json_get(entry, "xxh3"), hex)) {
        c->tensor_faults[t->shard] = 1;
        fault(c, "tensor \"%s\" in %s: bytes differ", name, file);
    }
    return ERR_OK;
}

static enum err check_tensors(struct checking *c, const struct json *tensors,
                              struct err_detail *detail)
{
    uint32_t count = safetensors_count(c->m->set);
    uint8_t *seen = mem_take(count + 1u);
    enum err e = ERR_OK;
    for (const struct json *v = tensors->child; v != NULL && e == ERR_OK; v = v->next)
        e = check_tensor(c, v, seen, detail);
    for (uint32_t i = 0; i < count && e == ERR_OK; i++)
        if (!seen[i])
            fault(c, "tensor \"%s\" in %s: not in the manifest", safetensors_at(c->m->set, i)->name,
                  safetensors_file_name(c->m->set, safetensors_at(c->m->set, i)->shard));
    mem_give(seen);
    return e;
}

/* What the manifest says of the whole follows from files and tensors. */
static void check_titles(struct checking *c, const struct json *root)
{
    struct manifest_titles titles;
    manifest_titles(c->m, &titles);
    const struct {
        const char *key, *have;
    } fields[] = {{"name", titles.name},
                  {"quantization", titles.quantization},
                  {"fingerprint", titles.fingerprint},
                  {"licence", c->m->licence}};
    for (size_t i = 0; i < ARRAY_COUNT(fields); i++) {
        const struct json *said = json_get(root, fields[i].key);
        bool none = fields[i].have[0] == '\0';
        if (none ? json_is(said, JSON_NULL) : json_string_is(said, fields[i].have))
            continue;
        fault(c, "manifest: another %s than \"%s\"", fields[i].key, fields[i].have);
    }
}

static uint32_t find_file(const struct manifest *m, const char *name)
{
    for (uint32_t i = 0; i < m->list.count; i++)
        if (strcmp(m->list.names[i], name) == 0)
            return i;
    return UINT32_MAX;
}

/* Whether a differing file is explained by a tensor that was named. */
static bool explained(const struct checking *c, const char *name)
{
    if (c->m->set == NULL)
        return true;
    for (uint32_t s = 0; s < safetensors_files(c->m->set); s++)
        if (strcmp(safetensors_file_name(c->m->set, s), name) == 0)
            return c->tensor_faults[s] != 0;
    return true;
}

static enum err check_files(struct checking *c, const struct json *files, struct err_detail *detail)
{
    uint8_t *seen = mem_take(c->m->list.count + 1u);
    enum err e = ERR_OK;
    for (const struct json *v = files->child; v != NULL && e == ERR_OK; v = v->next) {
        char name[256], hex[65];
        uint64_t bytes = 0;
        if (!copy_text(json_get(v, "name"), name, sizeof(name)) ||
            !json_u64(json_get(v, "bytes"), &bytes)) {
            e = err_set(detail, ERR_CORRUPT, "manifest: a file lacks name or bytes");
            break;
        }
        uint32_t i = find_file(c->m, name);
        if (i == UINT32_MAX) {
            fault(c, "file %s: missing", name);
            continue;
        }
        seen[i] = 1;
        hex_encode(c->m->files[i].sha256, 32, hex);
        if (c->m->files[i].bytes != bytes)
            fault(c, "file %s: %" PRIu64 " bytes, the manifest says %" PRIu64, name,
                  c->m->files[i].bytes, bytes);
        else if (!json_string_is(json_get(v, "sha256"), hex))
            fault(c, "file %s: sha256 differs%s", name,
                  explained(c, name) ? "" : ", outside the tensors: header or padding");
    }
    for (uint32_t i = 0; i < c->m->list.count && e == ERR_OK; i++)
        if (!seen[i])
            fault(c, "file %s: not in the manifest", c->m->list.names[i]);
    mem_give(seen);
    return e;
}

enum err manifest_check(const char *text, uint64_t bytes, const struct manifest *m,
                        const char *set_fault, uint32_t *ret_faults, struct err_detail *detail)
{
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = 8, .bytes_max = MANIFEST_BYTES_MAX};
    struct checking c = {.m = m};
    arena_init(&nodes, 1 << 20, (size_t)bytes * 24 + (4u << 20));
    enum err e = json_parse(&nodes, &options, text, bytes, &root, &where);
    const struct json *files = json_get(root, "files"), *tensors = json_get(root, "tensors");
    uint64_t version = 0;
    if (e != ERR_OK)
        e = err_set(detail, ERR_CORRUPT, "manifest: byte %zu: %s", where.offset, where.reason);
    else if (!json_u64(json_get(root, "version"), &version) || version != 1 ||
             !json_is(files, JSON_ARRAY) || !json_is(tensors, JSON_ARRAY))
        e = err_set(detail, ERR_CORRUPT, "manifest: version 1 with files and tensors expected");
    if (e == ERR_OK && set_fault != NULL)
        fault(&c, "%s", set_fault);
    if (e == ERR_OK && m->set != NULL) {
        c.tensor_faults = mem_take(safetensors_files(m->set) + 1u);
        e = check_tensors(&c, tensors, detail);
        check_titles(&c, root);
    }
    if (e == ERR_OK)
        e = check_files(&c, files, detail);
    mem_give(c.tensor_faults);
    arena_fini(&nodes);
    *ret_faults = c.faults;
    return e;
}

enum err manifest_verify(const char *directory, const struct op_ctx *ctx, uint32_t *ret_faults,
                         struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    struct manifest m = {.set = NULL};
    struct err_detail why = {{0}};
    TRY(read_file(directory, FILE_MANIFEST_NAME, MANIFEST_BYTES_MAX, &text, &bytes, detail));
    enum err e = manifest_read_files(directory, ctx, &m, detail);
    if (e == ERR_OK) {
        bool opened = manifest_read_tensors(directory, ctx, &m, &why) == ERR_OK;
        if (!opened)
            safetensors_close(&m.set);
        e = manifest_check(text, bytes, &m, opened ? NULL : why.text, ret_faults, detail);
        if (e == ERR_OK && *ret_faults == 0)
            printf("ok: %u files, %u tensors, %.1f MB\n", m.list.count, safetensors_count(m.set),
                   (double)safetensors_file_bytes(m.set) / 1e6);
    }
    manifest_fini(&m);
    free(text);
    return e;
}

static enum err read_arguments(int argc, char **argv, const char **ret_directory,
                               struct tool_threads *threads, struct err_detail *detail)
{
    const char *count = NULL;
    const struct tool_option table[] = {{"threads", &count, NULL}};
    uint64_t value = 0;
    TRY(tool_args(argc, argv, table, ARRAY_COUNT(table), ret_directory, detail));
    TRY(tool_u64("threads", count, 0, CPU_POOL_THREADS_MAX, &value, detail));
    tool_threads_start(threads, (uint32_t)value);
    return ERR_OK;
}

int tool_verify(int argc, char **argv)
{
    const char *directory = NULL;
    struct err_detail detail = {{0}};
    struct tool_threads threads = {.pool = NULL};
    uint32_t faults = 0;
    enum err e = read_arguments(argc, argv, &directory, &threads, &detail);
    if (e == ERR_OK)
        e = manifest_verify(directory, &threads.ctx, &faults, &detail);
    tool_threads_end(&threads);
    if (e != ERR_OK)
        return tool_fail(&detail);
    return faults > 0 ? 1 : 0;
}

int tool_manifest(int argc, char **argv)
{
    const char *directory = NULL;
    struct err_detail detail = {{0}};
    struct tool_threads threads = {.pool = NULL};
    enum err e = read_arguments(argc, argv, &directory, &threads, &detail);
    if (e == ERR_OK)
        e = manifest_store(directory, directory, &threads.ctx, &detail);
    tool_threads_end(&threads);
    if (e != ERR_OK)
        return tool_fail(&detail);
    printf("%s/" FILE_MANIFEST_NAME "\n", directory);
    return 0;
}
