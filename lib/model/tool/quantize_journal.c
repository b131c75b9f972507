/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/quantize.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/model/read_file.h"
#include "lib/model/tool/writer.h"

#define JOURNAL_NAME      "quantize.journal"
#define JOURNAL_BYTES_MAX ((size_t)1 << 30)
#define PROXY_ERROR_MAX   4.0

/* Everything that decides the output's bytes. */
static enum err describe(const struct quantize_options *o, const struct hash128 *source,
                         struct str *out, struct err_detail *detail)
{
    char hex[65], digest[65] = "";
    if (o->calib != NULL) {
        char *text = NULL;
        size_t bytes = 0;
        uint8_t sum[32];
        TRY(read_file(NULL, o->calib, (size_t)256 << 20, &text, &bytes, detail));
        hash_sha256(text, bytes, sum);
        free(text);
        hex_encode(sum, sizeof(sum), digest);
    }
    hex_encode(source->bytes, sizeof(source->bytes), hex);
    str_add_format(out,
                   "{\"source\": \"%s\", \"format\": \"%s\", \"bits\": %u, \"codebook\": %u, "
                   "\"all\": %s, \"beam\": %u, \"seed\": %llu, \"calib\": \"%s\", "
                   "\"calib_rows\": %llu, \"shard_bytes\": %llu}\n",
                   hex, quantize_format_name(o->format), o->bits, (unsigned)o->codebook,
                   o->all ? "true" : "false", o->beam, (unsigned long long)o->seed, digest,
                   (unsigned long long)o->calib_rows, (unsigned long long)o->shard_bytes);
    return ERR_OK;
}

static enum err append(struct quantize_journal *j, const struct str *line,
                       struct err_detail *detail)
{
    ssize_t n = write(j->fd, line->text, line->bytes);
    if (n != (ssize_t)line->bytes || fdatasync(j->fd) != 0)
        return err_set(detail, ERR_IO, "%s: %s", j->path, n < 0 ? strerror(errno) : "cut short");
    return ERR_OK;
}

enum err quantize_journal_open(struct quantize_journal *j, const struct quantize_options *options,
                               const struct hash128 *source, bool *ret_resumed,
                               struct err_detail *detail)
{
    struct str line;
    char *text = NULL;
    size_t bytes = 0;
    j->fd = -1;
    if (snprintf(j->path, sizeof(j->path), "%s/" JOURNAL_NAME, options->out) >=
        (int)sizeof(j->path))
        return err_set(detail, ERR_INVALID, "%.200s...: path too long", options->out);
    str_init(&line, 0);
    enum err e = describe(options, source, &line, detail);
    if (e == ERR_OK)
        e = read_file(NULL, j->path, JOURNAL_BYTES_MAX, &text, &bytes, detail);
    bool fresh = e == ERR_NOT_FOUND || (e == ERR_OK && memchr(text, '\n', bytes) == NULL);
    if (e == ERR_OK && !fresh && (bytes < line.bytes || memcmp(text, line.text, line.bytes) != 0))
        e = err_set(detail, ERR_INVALID,
                    "%s holds an unfinished run with other input or options: give those, or "
                    "remove the directory",
                    options->out);
    else if (e == ERR_NOT_FOUND)
        e = ERR_OK;
    free(text);
    if (e == ERR_OK) {
        j->fd =
            open(j->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | (fresh ? O_TRUNC : 0), 0666);
        if (j->fd < 0)
            e = err_set(detail, ERR_IO, "%s: %s", j->path, strerror(errno));
        else if (fresh)
            e = append(j, &line, detail);
    }
    str_fini(&line);
    *ret_resumed = !fresh;
    return e;
}

void quantize_journal_close(struct quantize_journal *j)
{
    if (j->fd >= 0)
        close(j->fd);
    j->fd = -1;
}

enum err quantize_journal_add(struct quantize_journal *j, const struct quantize_linear *l,
                              const struct hash128 *bytes, struct err_detail *detail)
{
    struct str line;
    char hex[33];
    hex_encode(bytes->bytes, sizeof(bytes->bytes), hex);
    str_init(&line, 0);
    str_add_text(&line, "{\"linear\": ");
    json_write_string(&line, l->prefix, strlen(l->prefix));
    str_add_format(&line, ", \"xxh3\": \"%s\", \"rows\": %llu, \"proxy_error\": ", hex,
                   (unsigned long long)l->result.rows);
    json_write_f64(&line, l->result.proxy_error);
    str_add_text(&line, "}\n");
    enum err e = append(j, &line, detail);
    str_fini(&line);
    return e;
}

static struct quantize_linear *find(const struct quantize_plan *plan, const struct json *name)
{
    for (uint32_t i = 0; json_is(name, JSON_STRING) && i < plan->count; i++)
        if (json_string_is(name, plan->linears[i].prefix))
            return &plan->linears[i];
    return NULL;
}

/* What only the run knew.  All weights zero would be an error of 1. */
static bool read_result(const struct json *line, const struct quantize_options *o,
                        struct quantize_result *ret)
{
    return json_u64(json_get(line, "rows"), &ret->rows) &&
           ret->rows <= (o->calib != NULL ? o->calib_rows : 0) &&
           json_f64(json_get(line, "proxy_error"), &ret->proxy_error) && ret->proxy_error >= 0 &&
           ret->proxy_error <= PROXY_ERROR_MAX;
}

/* A line counts only if the bytes in the output are those that it was written for. */
static enum err take_line(const struct json *line, const struct quantize_options *o,
                          struct quantize_plan *plan, struct writer *writer,
                          const struct op_ctx *ctx, struct err_detail *detail)
{
    struct quantize_linear *l = find(plan, json_get(line, "linear"));
    struct quantize_result r = {0};
    char hex[33];
    if (l == NULL || l->done || !read_result(line, o, &r))
        return ERR_OK;
    uint8_t *bytes = mem_take(l->bytes);
    enum err e = ERR_OK;
    uint64_t at = 0;
    for (uint32_t k = 0; k < l->part_count && e == ERR_OK; k++) {
        e = writer_get(writer, l->parts[k].tensor, 0, bytes + at, l->parts[k].bytes, detail);
        at += l->parts[k].bytes;
    }
    struct hash128 have = hash_xxh3_once(bytes, l->bytes);
    hex_encode(have.bytes, sizeof(have.bytes), hex);
    if (e == ERR_OK && json_string_is(json_get(line, "xxh3"), hex)) {
        r.relative_error = quantize_error(l, o, bytes, ctx);
        if (o->format != QUANTIZE_EXL3)
            r.proxy_error = r.relative_error;
        l->done = true;
        l->result = r;
    }
    mem_give(bytes);
    return e;
}

enum err quantize_journal_read(struct quantize_journal *j, const struct quantize_options *options,
                               struct quantize_plan *plan, struct writer *writer,
                               const struct op_ctx *ctx, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0, at = 0;
    struct arena nodes;
    enum err e = read_file(NULL, j->path, JOURNAL_BYTES_MAX, &text, &bytes, detail);
    if (e != ERR_OK)
        return e;
    arena_init(&nodes, 16 << 10, 1 << 20);
    for (const char *end; e == ERR_OK && (end = memchr(text + at, '\n', bytes - at)) != NULL;) {
        struct json *line = NULL;
        struct json_error where = {0, ""};
        arena_reset(&nodes);
        /* A torn line is no news: its linear is done again. */
        if (json_parse(&nodes, NULL, text + at, (size_t)(end - text) - at, &line, &where) == ERR_OK)
            e = take_line(line, options, plan, writer, ctx, detail);
        at = (size_t)(end - text) + 1;
    }
    arena_fini(&nodes);
    free(text);
    /* What was torn goes, so that the next line begins on its own. */
    if (e == ERR_OK && at < bytes && ftruncate(j->fd, (off_t)at) != 0)
        e = err_set(detail, ERR_IO, "%s: %s", j->path, strerror(errno));
    return e;
}
