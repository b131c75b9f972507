/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/file_io.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"

#define WRITER_MAGIC 0x77727472u
#define PATH_BYTES   4096
#define DATA_ALIGN   64u

struct entry {
    const char *name;
    enum safetensors_dtype dtype;
    uint32_t dims;
    uint64_t shape[WRITER_DIMS_MAX];
    uint64_t bytes;
    uint32_t shard;
    uint64_t at; /* in the shard's file */
};

struct shard {
    int fd;
    bool dirty;
    uint64_t file_bytes;
};

struct writer {
    uint32_t magic;
    char directory[PATH_BYTES - 300];
    uint64_t shard_bytes_max;
    struct arena arena;
    struct entry *entries;
    uint32_t count, capacity;
    struct shard *shards;
    uint32_t shard_count;
    bool opened;
};

enum err writer_make_directory(const char *directory, struct err_detail *detail)
{
    struct stat st;
    if (mkdir(directory, 0777) == 0)
        return ERR_OK;
    if (errno == EEXIST && stat(directory, &st) == 0 && S_ISDIR(st.st_mode))
        return ERR_OK;
    return err_set(detail, ERR_IO, "%s: %s", directory, strerror(errno));
}

enum err writer_create(const char *directory, uint64_t shard_bytes_max, struct writer **ret_writer,
                       struct err_detail *detail)
{
    if (strlen(directory) >= PATH_BYTES - 300)
        return err_set(detail, ERR_INVALID, "%.200s...: path too long", directory);
    TRY(writer_make_directory(directory, detail));
    struct writer *w = mem_take(sizeof(*w));
    w->magic = WRITER_MAGIC;
    strcpy(w->directory, directory);
    w->shard_bytes_max = shard_bytes_max > 0 ? shard_bytes_max : WRITER_SHARD_BYTES;
    arena_init(&w->arena, 64 << 10, 0);
    *ret_writer = w;
    return ERR_OK;
}

void writer_destroy(struct writer **w_p)
{
    struct writer *w = *w_p;
    if (w == NULL)
        return;
    CHECK_OBJ(w, WRITER_MAGIC);
    for (uint32_t i = 0; i < w->shard_count; i++)
        if (w->shards[i].fd >= 0)
            close(w->shards[i].fd);
    mem_give(w->shards);
    free(w->entries);
    arena_fini(&w->arena);
    w->magic = 0;
    mem_give(w);
    *w_p = NULL;
}

uint32_t writer_add(struct writer *w, const char *name, enum safetensors_dtype dtype, uint32_t dims,
                    const uint64_t *shape)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    CHECK(!w->opened);
    CHECK(dims <= WRITER_DIMS_MAX);
    if (w->count == w->capacity) {
        w->capacity = w->capacity == 0 ? 1024 : w->capacity * 2;
        w->entries = realloc(w->entries, w->capacity * sizeof(*w->entries));
        CHECK(w->entries != NULL);
    }
    struct entry *e = &w->entries[w->count];
    *e = (struct entry){.name = arena_strndup(&w->arena, name, strlen(name)),
                        .dtype = dtype,
                        .dims = dims,
                        .bytes = safetensors_dtype_bytes(dtype)};
    CHECK(e->name != NULL);
    for (uint32_t d = 0; d < dims; d++) {
        e->shape[d] = shape[d];
        e->bytes *= shape[d];
    }
    return w->count++;
}

/* Wide elements first, so that every tensor is aligned to its element. */
static int by_place(const void *a, const void *b)
{
    const struct entry *x = *(const struct entry *const *)a, *y = *(const struct entry *const *)b;
    uint32_t wide_x = safetensors_dtype_bytes(x->dtype), wide_y = safetensors_dtype_bytes(y->dtype);
    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    if (wide_x != wide_y)
        return wide_x > wide_y ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void shard_name(const struct writer *w, uint32_t shard, char name[64])
{
    if (w->shard_count == 1)
        strcpy(name, "model.safetensors");
    else
        snprintf(name, 64, "model-%05u-of-%05u.safetensors", shard + 1, w->shard_count);
}

static void assign_shards(struct writer *w)
{
    uint64_t filled = 0;
    uint32_t shard = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        struct entry *e = &w->entries[i];
        if (filled > 0 && filled + e->bytes > w->shard_bytes_max) {
            shard++;
            filled = 0;
        }
        e->shard = shard;
        filled += e->bytes;
    }
    w->shard_count = shard + 1;
    w->shards = mem_take_array(w->shard_count, sizeof(*w->shards));
    for (uint32_t i = 0; i < w->shard_count; i++)
        w->shards[i].fd = -1;
}

static void add_entry_text(struct str *s, const struct entry *e, uint64_t begin)
{
    str_add_char(s, ',');
    json_write_string(s, e->name, strlen(e->name));
    str_add_format(s, ":{\"dtype\":\"%s\",\"shape\":[", safetensors_dtype_name(e->dtype));
    for (uint32_t d = 0; d < e->dims; d++)
        str_add_format(s, "%s%llu", d > 0 ? "," : "", (unsigned long long)e->shape[d]);
    str_add_format(s, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                   (unsigned long long)(begin + e->bytes));
}

/* Header of the shard that sorted[0] begins, and the places of its tensors; returns how many. */
static uint32_t lay_out(struct writer *w, struct entry **sorted, uint32_t left, struct str *header)
{
    struct shard *shard = &w->shards[sorted[0]->shard];
    uint64_t at = 0;
    uint32_t count = 0;
    str_clear(header);
    str_add_text(header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (; count < left && sorted[count]->shard == sorted[0]->shard; count++) {
        add_entry_text(header, sorted[count], at);
        sorted[count]->at = at;
        at += sorted[count]->bytes;
    }
    str_add_char(header, '}');
    while ((header->bytes + 8) % DATA_ALIGN != 0)
        str_add_char(header, ' ');
    for (uint32_t i = 0; i < count; i++)
        sorted[i]->at += header->bytes + 8;
    shard->file_bytes = at + header->bytes + 8;
    return count;
}

static enum err io_fault(struct err_detail *detail, const char *path)
{
    return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
}

static enum err put_all(int fd, const void *data, uint64_t bytes, uint64_t at, const char *path,
                        struct err_detail *detail)
{
    return file_write_at(fd, at, data, bytes) == ERR_OK ? ERR_OK : io_fault(detail, path);
}

static enum err open_shard(struct writer *w, uint32_t index, bool keep, const struct str *header,
                           struct err_detail *detail)
{
    char name[64], path[PATH_BYTES], last[PATH_BYTES];
    struct shard *shard = &w->shards[index];
    shard_name(w, index, name);
    snprintf(path, sizeof(path), "%s/%s.partial", w->directory, name);
    snprintf(last, sizeof(last), "%s/%s", w->directory, name);
    if (keep && access(path, F_OK) != 0)
        (void)rename(last, path); /* an interrupted writer_finish */
    shard->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | (keep ? 0 : O_TRUNC), 0666);
    if (shard->fd < 0 || ftruncate(shard->fd, (off_t)shard->file_bytes) != 0)
        return io_fault(detail, path);
    uint8_t length[8];
    for (uint32_t i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)header->bytes >> (8 * i));
    TRY(put_all(shard->fd, length, 8, 0, path, detail));
    return put_all(shard->fd, header->text, header->bytes, 8, path, detail);
}

enum err writer_open(struct writer *w, bool keep, struct err_detail *detail)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    CHECK(!w->opened && w->count > 0);
    w->opened = true;
    assign_shards(w);
    struct entry **sorted = mem_take_array(w->count, sizeof(struct entry *));
    struct str header;
    enum err e = ERR_OK;
    str_init(&header, SAFETENSORS_HEADER_BYTES_MAX);
    for (uint32_t i = 0; i < w->count; i++)
        sorted[i] = &w->entries[i];
    qsort(sorted, w->count, sizeof(struct entry *), by_place);
    for (uint32_t i = 0; i < w->count && e == ERR_OK;) {
        uint32_t shard = sorted[i]->shard;
        i += lay_out(w, sorted + i, w->count - i, &header);
        e = header.overflow ? err_set(detail, ERR_TOO_LARGE, "%s: header too large", w->directory)
                            : open_shard(w, shard, keep, &header, detail);
    }
    str_fini(&header);
    mem_give(sorted);
    return e;
}

uint64_t writer_bytes(const struct writer *w, uint32_t tensor)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    CHECK(tensor < w->count);
    return w->entries[tensor].bytes;
}

uint64_t writer_total(const struct writer *w)
{
    uint64_t bytes = 0;
    CHECK_OBJ(w, WRITER_MAGIC);
    for (uint32_t i = 0; i < w->count; i++)
        bytes += w->entries[i].bytes;
    return bytes;
}

enum err writer_put(struct writer *w, uint32_t tensor, uint64_t offset, const void *data,
                    uint64_t bytes, struct err_detail *detail)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    CHECK(w->opened && tensor < w->count);
    struct entry *e = &w->entries[tensor];
    CHECK(offset <= e->bytes && bytes <= e->bytes - offset);
    w->shards[e->shard].dirty = true;
    return put_all(w->shards[e->shard].fd, data, bytes, e->at + offset, e->name, detail);
}

enum err writer_get(struct writer *w, uint32_t tensor, uint64_t offset, void *data, uint64_t bytes,
                    struct err_detail *detail)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    CHECK(w->opened && tensor < w->count);
    struct entry *e = &w->entries[tensor];
    CHECK(offset <= e->bytes && bytes <= e->bytes - offset);
    int fd = w->shards[e->shard].fd;
    return file_read_at(fd, e->at + offset, data, bytes) == ERR_OK ? ERR_OK
                                                                   : io_fault(detail, e->name);
}

enum err writer_sync(struct writer *w, struct err_detail *detail)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    for (uint32_t i = 0; i < w->shard_count; i++) {
        if (w->shards[i].dirty && fdatasync(w->shards[i].fd) != 0)
            return io_fault(detail, w->directory);
        w->shards[i].dirty = false;
    }
    return ERR_OK;
}

static enum err write_index(const struct writer *w, struct err_detail *detail)
{
    struct str s;
    str_init(&s, SAFETENSORS_HEADER_BYTES_MAX);
    str_add_format(&s, "{\"metadata\": {\"total_size\": %llu}, \"weight_map\": {",
                   (unsigned long long)writer_total(w));
    for (uint32_t i = 0; i < w->count; i++) {
        char name[64];
        shard_name(w, w->entries[i].shard, name);
        str_add_text(&s, i > 0 ? ",\n" : "\n");
        json_write_string(&s, w->entries[i].name, strlen(w->entries[i].name));
        str_add_format(&s, ": \"%s\"", name);
    }
    str_add_text(&s, "}}\n");
    enum err e = s.overflow ? err_set(detail, ERR_TOO_LARGE, "%s: index too large", w->directory)
                            : writer_file(w->directory, "model.safetensors.index.json", s.text,
                                          s.bytes, detail);
    str_fini(&s);
    return e;
}

enum err writer_finish(struct writer *w, struct err_detail *detail)
{
    CHECK_OBJ(w, WRITER_MAGIC);
    CHECK(w->opened);
    for (uint32_t i = 0; i < w->shard_count; i++)
        w->shards[i].dirty = true;
    TRY(writer_sync(w, detail));
    for (uint32_t i = 0; i < w->shard_count; i++) {
        char name[64], path[PATH_BYTES], last[PATH_BYTES];
        shard_name(w, i, name);
        snprintf(path, sizeof(path), "%s/%s.partial", w->directory, name);
        snprintf(last, sizeof(last), "%s/%s", w->directory, name);
        if (rename(path, last) != 0)
            return io_fault(detail, path);
    }
    return w->shard_count > 1 ? write_index(w, detail) : ERR_OK;
}

enum err writer_file(const char *directory, const char *name, const void *text, uint64_t bytes,
                     struct err_detail *detail)
{
    char path[PATH_BYTES], last[PATH_BYTES];
    int n = snprintf(path, sizeof(path), "%s/%s.partial", directory, name);
    if (n < 0 || (size_t)n >= sizeof(path))
        return err_set(detail, ERR_INVALID, "%.200s: path too long", name);
    snprintf(last, sizeof(last), "%s/%s", directory, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return io_fault(detail, path);
    enum err e = put_all(fd, text, bytes, 0, path, detail);
    if (e == ERR_OK && fsync(fd) != 0)
        e = io_fault(detail, path);
    close(fd);
    if (e == ERR_OK && rename(path, last) != 0)
        e = io_fault(detail, last);
    if (e != ERR_OK)
        unlink(path);
    return e;
}
