/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/file_io.h"
#include "lib/base/json.h"
#include "lib/model/safetensors_header.h"

#define SET_MAGIC       0x73667465u
#define SHARDS_MAX      4096
#define INDEX_BYTES_MAX (256u << 20)
#define INDEX_NAME      "model.safetensors.index.json"
#define PATH_BYTES      4096
#define OPEN_FILES_MAX  256 /* beyond that only the mappings are kept */

struct mapping {
    const uint8_t *bytes;
    uint64_t size;
    int fd; /* -1 = closed again */
};

struct safetensors {
    uint32_t magic;
    struct arena arena; /* names and shapes */
    struct safetensors_list list;
    struct mapping *shards;
    const char **shard_names;
    uint32_t shard_count;
    uint64_t file_bytes;
};

static enum err map_file(const char *path, const char *file, struct mapping *ret,
                         struct err_detail *detail)
{
    struct stat st;
    *ret = (struct mapping){.fd = -1};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(detail, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", file,
                       strerror(errno));
    enum err e = ERR_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        e = err_set(detail, ERR_IO, "%s: not a regular file", file);
    } else if (st.st_size > 0) {
        void *bytes = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (bytes == MAP_FAILED) {
            e = err_set(detail, ERR_IO, "%s: mmap: %s", file, strerror(errno));
        } else {
            ret->bytes = bytes;
            ret->size = (uint64_t)st.st_size;
        }
    }
    ret->fd = fd;
    return e;
}

static void close_file(struct mapping *m)
{
    if (m->fd >= 0)
        close(m->fd);
    m->fd = -1;
}

static void unmap_file(struct mapping *m)
{
    if (m->bytes != NULL)
        munmap((void *)(uintptr_t)m->bytes, m->size);
    m->bytes = NULL;
    close_file(m);
}

static struct safetensors *set_create(void)
{
    struct safetensors *set = calloc(1, sizeof(*set));
    if (set == NULL)
        return NULL;
    set->magic = SET_MAGIC;
    set->shards = calloc(SHARDS_MAX, sizeof(*set->shards));
    set->shard_names = calloc(SHARDS_MAX, sizeof(*set->shard_names));
    arena_init(&set->arena, 64 << 10, (size_t)1 << 30);
    if (set->shards == NULL || set->shard_names == NULL)
        safetensors_close(&set);
    return set;
}

void safetensors_close(struct safetensors **set_p)
{
    struct safetensors *set = *set_p;
    if (set == NULL)
        return;
    CHECK_OBJ(set, SET_MAGIC);
    for (uint32_t i = 0; set->shards != NULL && i < set->shard_count; i++)
        unmap_file(&set->shards[i]);
    arena_fini(&set->arena);
    free(set->list.tensors);
    free(set->shards);
    free(set->shard_names);
    set->magic = 0;
    free(set);
    *set_p = NULL;
}

static enum err add_shard(struct safetensors *set, const char *path, const char *file,
                          struct err_detail *detail)
{
    if (set->shard_count == SHARDS_MAX)
        return err_set(detail, ERR_CORRUPT, "%s: bad_index: too many shards", file);
    struct mapping *m = &set->shards[set->shard_count];
    enum err e = map_file(path, file, m, detail);
    if (e != ERR_OK || set->shard_count >= OPEN_FILES_MAX)
        close_file(m);
    TRY(e);
    set->shard_names[set->shard_count] = file;
    set->shard_count++;
    set->file_bytes += m->size;
    return safetensors_read_header(m->bytes, m->size, file, set->shard_count - 1, &set->arena,
                                   &set->list, detail);
}

static int by_name(const void *x, const void *y)
{
    const struct safetensors_tensor *a = x, *b = y;
    return strcmp(a->name, b->name);
}

static enum err sort_names(struct safetensors *set, struct err_detail *detail)
{
    struct safetensors_list *list = &set->list;
    if (list->count > 0)
        qsort(list->tensors, list->count, sizeof(list->tensors[0]), by_name);
    for (uint32_t i = 1; i < list->count; i++) {
        if (strcmp(list->tensors[i - 1].name, list->tensors[i].name) == 0)
            return err_set(detail, ERR_CORRUPT,
                           "%s: duplicate_tensor: tensor \"%.200s\" is also in %s",
                           set->shard_names[list->tensors[i].shard], list->tensors[i].name,
                           set->shard_names[list->tensors[i - 1].shard]);
    }
    return ERR_OK;
}

enum err safetensors_open_file(const char *path, struct safetensors **ret_set,
                               struct err_detail *detail)
{
    struct safetensors *set = set_create();
    if (set == NULL)
        return err_set(detail, ERR_NOMEM, "%s: out of memory", path);
    const char *slash = strrchr(path, '/');
    const char *file = arena_strndup(&set->arena, slash != NULL ? slash + 1 : path,
                                     strlen(slash != NULL ? slash + 1 : path));
    enum err e = add_shard(set, path, file != NULL ? file : "file", detail);
    if (e == ERR_OK)
        e = sort_names(set, detail);
    if (e != ERR_OK) {
        safetensors_close(&set);
        return e;
    }
    *ret_set = set;
    return ERR_OK;
}

static enum err index_fault(struct err_detail *detail, const char *what)
{
    return err_set(detail, ERR_CORRUPT, INDEX_NAME ": bad_index: %s", what);
}

static bool plain_shard_name(const char *name, size_t bytes)
{
    static const char suffix[] = ".safetensors";
    size_t suffix_bytes = sizeof(suffix) - 1;
    if (bytes <= suffix_bytes || bytes > 255 || name[0] == '.' ||
        safetensors_name_fault(name, bytes) != NULL || memchr(name, '/', bytes) != NULL)
        return false;
    return memcmp(name + bytes - suffix_bytes, suffix, suffix_bytes) == 0;
}

static uint32_t shard_number(const struct safetensors *set, const char *name, size_t bytes)
{
    for (uint32_t i = set->shard_count; i-- > 0;)
        if (strlen(set->shard_names[i]) == bytes && memcmp(set->shard_names[i], name, bytes) == 0)
            return i;
    return UINT32_MAX;
}

static enum err open_shard(struct safetensors *set, const char *directory, const char *name,
                           size_t bytes, struct err_detail *detail)
{
    char path[PATH_BYTES];
    char *file = arena_strndup(&set->arena, name, bytes);
    if (file == NULL)
        return err_set(detail, ERR_NOMEM, INDEX_NAME ": out of memory");
    int n = snprintf(path, sizeof(path), "%s/%s", directory, file);
    if (n < 0 || (size_t)n >= sizeof(path))
        return err_set(detail, ERR_INVALID, "%s: path too long", file);
    enum err e = add_shard(set, path, file, detail);
    if (e == ERR_NOT_FOUND)
        return err_set(detail, ERR_NOT_FOUND, INDEX_NAME ": missing_shard: %s", file);
    return e;
}

static enum err open_shards(struct safetensors *set, const struct json *map, const char *directory,
                            struct err_detail *detail)
{
    for (const struct json *v = map->child; v != NULL; v = v->next) {
        if (!json_is(v, JSON_STRING))
            return index_fault(detail, "weight_map holds something else than file names");
        if (!plain_shard_name(v->text, v->bytes))
            return err_set(detail, ERR_CORRUPT,
                           INDEX_NAME ": bad_shard_path: tensor \"%.*s\": "
                                      "not a plain name of a .safetensors file",
                           (int)(v->key_bytes > 200 ? 200 : v->key_bytes), v->key);
        if (shard_number(set, v->text, v->bytes) == UINT32_MAX)
            TRY(open_shard(set, directory, v->text, v->bytes, detail));
    }
    return ERR_OK;
}

/* A numbered shard that lies in the directory but that the index does not name is opened too, so
 * that its tensors are reported as duplicates or as not listed: the checkpoint is inconsistent. */
static enum err open_strays(struct safetensors *set, const char *directory,
                            struct err_detail *detail)
{
    DIR *dir = opendir(directory);
    if (dir == NULL)
        return err_set(detail, ERR_IO, "%s: %s", directory, strerror(errno));
    enum err e = ERR_OK;
    for (struct dirent *d = readdir(dir); d != NULL && e == ERR_OK; d = readdir(dir)) {
        size_t bytes = strlen(d->d_name);
        if (strncmp(d->d_name, "model-", 6) == 0 && strstr(d->d_name, "-of-") != NULL &&
            plain_shard_name(d->d_name, bytes) && shard_number(set, d->d_name, bytes) == UINT32_MAX)
            e = open_shard(set, directory, d->d_name, bytes, detail);
    }
    closedir(dir);
    return e;
}

/* Every tensor of the index is in its shard, and nothing else is. */
static enum err check_index(const struct safetensors *set, const struct json *map,
                            struct err_detail *detail)
{
    const struct safetensors_list *list = &set->list;
    uint8_t *listed = calloc(list->count + 1, 1);
    if (listed == NULL)
        return err_set(detail, ERR_NOMEM, INDEX_NAME ": out of memory");
    enum err e = ERR_OK;
    for (const struct json *v = map->child; v != NULL && e == ERR_OK; v = v->next) {
        char name[PATH_BYTES + 1];
        const struct safetensors_tensor *t = NULL;
        if (safetensors_name_fault(v->key, v->key_bytes) == NULL) {
            memcpy(name, v->key, v->key_bytes);
            name[v->key_bytes] = 0;
            t = safetensors_find(set, name);
        }
        if (t == NULL || t->shard != shard_number(set, v->text, v->bytes))
            e = err_set(detail, ERR_CORRUPT,
                        INDEX_NAME ": missing_tensor: tensor \"%.*s\" is not "
                                   "in %.*s",
                        (int)(v->key_bytes > 200 ? 200 : v->key_bytes), v->key, (int)v->bytes,
                        v->text);
        else
            listed[t - list->tensors] = 1;
    }
    for (uint32_t i = 0; i < list->count && e == ERR_OK; i++)
        if (!listed[i])
            e = err_set(detail, ERR_CORRUPT,
                        "%s: unlisted_tensor: the index does not name tensor "
                        "\"%.200s\"",
                        set->shard_names[list->tensors[i].shard], list->tensors[i].name);
    free(listed);
    return e;
}

static enum err read_index(struct safetensors *set, const struct json *root, const char *directory,
                           struct err_detail *detail)
{
    const struct json *map = json_get(root, "weight_map");
    if (!json_is(root, JSON_OBJECT) || !json_is(map, JSON_OBJECT))
        return index_fault(detail, "weight_map is missing or not an object");
    if (map->count == 0)
        return index_fault(detail, "weight_map is empty");
    TRY(open_shards(set, map, directory, detail));
    TRY(open_strays(set, directory, detail));
    TRY(sort_names(set, detail));
    return check_index(set, map, detail);
}

static enum err open_index(struct safetensors *set, const struct mapping *index,
                           const char *directory, struct err_detail *detail)
{
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = 16, .bytes_max = INDEX_BYTES_MAX};
    if (index->size == 0)
        return index_fault(detail, "empty file");
    arena_init(&nodes, 256 << 10, (size_t)index->size * 16 + (4u << 20));
    enum err e =
        json_parse(&nodes, &options, (const char *)index->bytes, index->size, &root, &where);
    if (e != ERR_OK)
        e = err_set(detail, ERR_CORRUPT, INDEX_NAME ": bad_index: byte %zu: %s", where.offset,
                    where.reason != NULL ? where.reason : err_text(e));
    else
        e = read_index(set, root, directory, detail);
    arena_fini(&nodes);
    return e;
}

enum err safetensors_open_directory(const char *directory, struct safetensors **ret_set,
                                    struct err_detail *detail)
{
    char path[PATH_BYTES];
    int n = snprintf(path, sizeof(path), "%s/" INDEX_NAME, directory);
    if (n < 0 || (size_t)n >= sizeof(path))
        return err_set(detail, ERR_INVALID, "model directory: path too long");
    struct mapping index;
    enum err e = map_file(path, INDEX_NAME, &index, detail);
    if (e == ERR_NOT_FOUND) {
        snprintf(path, sizeof(path), "%s/model.safetensors", directory);
        return safetensors_open_file(path, ret_set, detail);
    }
    if (e != ERR_OK)
        return e;
    struct safetensors *set = set_create();
    e = set != NULL ? open_index(set, &index, directory, detail)
                    : err_set(detail, ERR_NOMEM, INDEX_NAME ": out of memory");
    unmap_file(&index);
    if (e != ERR_OK) {
        if (set != NULL)
            safetensors_close(&set);
        return e;
    }
    *ret_set = set;
    return ERR_OK;
}

uint32_t safetensors_count(const struct safetensors *set)
{
    CHECK_OBJ(set, SET_MAGIC);
    return set->list.count;
}

const struct safetensors_tensor *safetensors_at(const struct safetensors *set, uint32_t index)
{
    CHECK_OBJ(set, SET_MAGIC);
    CHECK(index < set->list.count);
    return &set->list.tensors[index];
}

static int name_against(const void *key, const void *item)
{
    return strcmp(key, ((const struct safetensors_tensor *)item)->name);
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *set, const char *name)
{
    CHECK_OBJ(set, SET_MAGIC);
    if (set->list.count == 0)
        return NULL;
    return bsearch(name, set->list.tensors, set->list.count, sizeof(set->list.tensors[0]),
                   name_against);
}

uint32_t safetensors_files(const struct safetensors *set)
{
    CHECK_OBJ(set, SET_MAGIC);
    return set->shard_count;
}

const char *safetensors_file_name(const struct safetensors *set, uint32_t shard)
{
    CHECK_OBJ(set, SET_MAGIC);
    CHECK(shard < set->shard_count);
    return set->shard_names[shard];
}

uint64_t safetensors_file_bytes(const struct safetensors *set)
{
    CHECK_OBJ(set, SET_MAGIC);
    return set->file_bytes;
}

enum err safetensors_read(const struct safetensors *set, const struct safetensors_tensor *t,
                          uint64_t offset, void *ret_bytes, size_t count)
{
    CHECK_OBJ(set, SET_MAGIC);
    const struct mapping *m = &set->shards[t->shard];
    uint64_t at = (uint64_t)(t->data - m->bytes) + offset;
    CHECK(offset <= t->bytes && count <= m->size - at);
    if (m->fd < 0) {
        memcpy(ret_bytes, m->bytes + at, count);
        return ERR_OK;
    }
    return file_read_at(m->fd, at, ret_bytes, count);
}
