/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/model/format_scan.h"
#include "lib/model/identity.h"
#include "lib/model/load_pass.h"
#include "lib/model/read_file.h"
#include "lib/model/tool/tool.h"
#include "lib/model/tool/writer.h"

#define TEXT_BYTES_MAX ((size_t)256 << 20)

struct file_job {
    const char *directory;
    const struct manifest *m;
    enum err err;
    struct err_detail *detail;
    bool failed;
};

static void hash_files(const void *arg, uint32_t begin, uint32_t end)
{
    struct file_job *job = *(struct file_job *const *)arg;
    for (uint32_t i = begin; i < end; i++) {
        struct file_map map;
        struct err_detail detail;
        enum err e = file_map_open(job->directory, job->m->list.names[i], &map, &detail);
        if (e != ERR_OK) {
            if (!__atomic_test_and_set(&job->failed, __ATOMIC_ACQ_REL)) {
                job->err = e;
                *job->detail = detail;
            }
            continue;
        }
        job->m->files[i].bytes = map.size;
        hash_sha256(map.bytes, map.size, job->m->files[i].sha256);
        file_map_close(&map);
    }
}

enum err manifest_read_files(const char *directory, const struct op_ctx *ctx,
                             struct manifest *ret_manifest, struct err_detail *detail)
{
    struct manifest m = {.set = NULL};
    TRY(file_list_read(directory, &m.list, detail));
    m.files = mem_take_array(m.list.count + 1u, sizeof(*m.files));
    struct file_job job = {directory, &m, ERR_OK, detail, false}, *shared = &job;
    op_for(ctx, m.list.count, 1u << 30, hash_files, &shared);
    if (job.err != ERR_OK) {
        manifest_fini(&m);
        return job.err;
    }
    *ret_manifest = m;
    return ERR_OK;
}

void manifest_fini(struct manifest *m)
{
    file_list_free(&m->list);
    mem_give(m->files);
    mem_give(m->hashes);
    safetensors_close(&m->set);
    memset(m, 0, sizeof(*m));
}

static void read_model_type(const char *text, size_t bytes, char ret[64])
{
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    arena_init(&nodes, 64 << 10, 64u << 20);
    strcpy(ret, "unknown");
    if (json_parse(&nodes, NULL, text, bytes, &root, &where) == ERR_OK) {
        const struct json *type = json_get(root, "model_type");
        if (json_is(type, JSON_STRING) && type->bytes > 0 && type->bytes < 64 &&
            memchr(type->text, 0, type->bytes) == NULL) {
            memcpy(ret, type->text, type->bytes);
            ret[type->bytes] = '\0';
        }
    }
    arena_fini(&nodes);
}

/* "license: x" of a model card's head, as hubs write it. */
static void read_licence(const char *directory, char ret[128])
{
    char *text = NULL;
    size_t bytes = 0;
    struct err_detail detail;
    ret[0] = '\0';
    if (read_file(directory, "README.md", 1 << 20, &text, &bytes, &detail) != ERR_OK)
        return;
    for (size_t at = 0; at < bytes;) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t length = end != NULL ? (size_t)(end - text) - at : bytes - at;
        if (length > 9 && length < 120 && memcmp(text + at, "license: ", 9) == 0 &&
            utf8_valid_prefix(text + at, length) == length) {
            memcpy(ret, text + at + 9, length - 9);
            ret[length - 9] = '\0';
            break;
        }
        at += length + 1;
    }
    free(text);
}

static void show_hashing(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    tool_progress("hashing", done, total);
}

enum err manifest_read_tensors(const char *directory, const struct op_ctx *ctx, struct manifest *m,
                               struct err_detail *detail)
{
    char *config = NULL, *tokenizer = NULL, *chat = NULL;
    size_t config_bytes = 0, tokenizer_bytes = 0, chat_bytes = 0;
    TRY(safetensors_open_directory(directory, &m->set, detail));
    enum err e =
        read_file(directory, "config.json", TEXT_BYTES_MAX, &config, &config_bytes, detail);
    if (e == ERR_OK) {
        e = read_file(directory, "tokenizer.json", TEXT_BYTES_MAX, &tokenizer, &tokenizer_bytes,
                      detail);
        e = e == ERR_NOT_FOUND ? ERR_OK : e;
    }
    if (e == ERR_OK) {
        e = read_file(directory, "chat_template.jinja", TEXT_BYTES_MAX, &chat, &chat_bytes, detail);
        e = e == ERR_NOT_FOUND ? ERR_OK : e;
    }
    if (e == ERR_OK) {
        struct identity_texts texts = {.config = config,
                                       .config_bytes = config_bytes,
                                       .tokenizer = tokenizer,
                                       .tokenizer_bytes = tokenizer_bytes,
                                       .chat_template = chat,
                                       .chat_template_bytes = chat_bytes};
        m->hashes = mem_take_array(safetensors_count(m->set) + 1u, sizeof(*m->hashes));
        e = load_pass(m->set, NULL, ctx, show_hashing, NULL, m->hashes, detail);
        m->fingerprint = identity_fingerprint(m->set, &texts, m->hashes);
        read_model_type(config, config_bytes, m->model_type);
        read_licence(directory, m->licence);
    }
    free(config);
    free(tokenizer);
    free(chat);
    return e;
}

static void add_name(struct str *out, const char *key, const char *text)
{
    str_add_format(out, "\"%s\": ", key);
    json_write_string(out, text, strlen(text));
}

static void add_files(const struct manifest *m, struct str *out)
{
    str_add_text(out, " \"files\": [");
    for (uint32_t i = 0; i < m->list.count; i++) {
        char hex[65];
        hex_encode(m->files[i].sha256, 32, hex);
        str_add_text(out, i > 0 ? ",\n  {" : "\n  {");
        add_name(out, "name", m->list.names[i]);
        str_add_format(out, ", \"bytes\": %llu, \"sha256\": \"%s\"}",
                       (unsigned long long)m->files[i].bytes, hex);
    }
    str_add_text(out, "\n ]");
}

static void add_tensors(const struct manifest *m, struct str *out)
{
    str_add_text(out, " \"tensors\": [");
    for (uint32_t i = 0; i < safetensors_count(m->set); i++) {
        const struct safetensors_tensor *t = safetensors_at(m->set, i);
        char hex[33];
        hex_encode(m->hashes[i].bytes, 16, hex);
        str_add_text(out, i > 0 ? ",\n  {" : "\n  {");
        add_name(out, "name", t->name);
        str_add_text(out, ", ");
        add_name(out, "file", safetensors_file_name(m->set, t->shard));
        str_add_format(out, ", \"dtype\": \"%s\", \"shape\": [", safetensors_dtype_name(t->dtype));
        for (uint32_t d = 0; d < t->dims; d++)
            str_add_format(out, "%s%llu", d > 0 ? ", " : "", (unsigned long long)t->shape[d]);
        str_add_format(out, "], \"xxh3\": \"%s\"}", hex);
    }
    str_add_text(out, "\n ]");
}

void manifest_titles(const struct manifest *m, struct manifest_titles *t)
{
    identity_quantization(m->set, t->quantization, sizeof(t->quantization));
    hex_encode(m->fingerprint.bytes, sizeof(m->fingerprint.bytes), t->fingerprint);
    snprintf(t->name, sizeof(t->name), "%s (%s, fp %.8s)", m->model_type, t->quantization,
             t->fingerprint);
}

void manifest_write(const struct manifest *m, struct str *out)
{
    struct manifest_titles titles;
    manifest_titles(m, &titles);
    str_add_text(out, "{\"version\": 1,\n ");
    add_name(out, "name", titles.name);
    str_add_text(out, ",\n ");
    add_name(out, "quantization", titles.quantization);
    str_add_text(out, ",\n ");
    add_name(out, "fingerprint", titles.fingerprint);
    str_add_text(out, ",\n ");
    if (m->licence[0] != '\0')
        add_name(out, "licence", m->licence);
    else
        str_add_text(out, "\"licence\": null");
    str_add_text(out, ",\n");
    add_files(m, out);
    str_add_text(out, ",\n");
    add_tensors(m, out);
    str_add_text(out, "\n}\n");
}

enum err manifest_store(const char *directory, const char *destination, const struct op_ctx *ctx,
                        struct err_detail *detail)
{
    struct manifest m;
    struct str text;
    TRY(manifest_read_files(directory, ctx, &m, detail));
    enum err e = manifest_read_tensors(directory, ctx, &m, detail);
    if (e == ERR_OK) {
        str_init(&text, (size_t)1 << 30);
        manifest_write(&m, &text);
        e = text.overflow
                ? err_set(detail, ERR_TOO_LARGE, "%s: manifest too large", directory)
                : writer_file(destination, FILE_MANIFEST_NAME, text.text, text.bytes, detail);
        str_fini(&text);
    }
    manifest_fini(&m);
    return e;
}
