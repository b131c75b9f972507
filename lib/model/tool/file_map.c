/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/file_map.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/mem.h"

#define PATH_BYTES 4096

enum err file_map_open(const char *directory, const char *name, struct file_map *ret_map,
                       struct err_detail *detail)
{
    char path[PATH_BYTES];
    struct stat st;
    int n = snprintf(path, sizeof(path), "%s%s%s", directory != NULL ? directory : "",
                     directory != NULL ? "/" : "", name);
    if (n < 0 || (size_t)n >= sizeof(path))
        return err_set(detail, ERR_INVALID, "%.200s: path too long", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(detail, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", path,
                       strerror(errno));
    *ret_map = (struct file_map){NULL, 0};
    enum err e = ERR_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        e = err_set(detail, ERR_IO, "%s: not a regular file", path);
    } else if (st.st_size > 0) {
        void *bytes = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (bytes == MAP_FAILED)
            e = err_set(detail, ERR_IO, "%s: mmap: %s", path, strerror(errno));
        else
            *ret_map = (struct file_map){bytes, (uint64_t)st.st_size};
    }
    close(fd);
    return e;
}

void file_map_close(struct file_map *m)
{
    if (m->bytes != NULL)
        munmap((void *)(uintptr_t)m->bytes, m->size);
    *m = (struct file_map){NULL, 0};
}

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

static bool is_listed(const char *directory, const char *name)
{
    char path[PATH_BYTES];
    struct stat st;
    size_t bytes = strlen(name);
    if (name[0] == '.' || bytes > 255 || strcmp(name, FILE_MANIFEST_NAME) == 0 ||
        (bytes > 8 && strcmp(name + bytes - 8, ".partial") == 0))
        return false;
    int n = snprintf(path, sizeof(path), "%s/%s", directory, name);
    return n > 0 && (size_t)n < sizeof(path) && stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

enum err file_list_read(const char *directory, struct file_list *ret_list,
                        struct err_detail *detail)
{
    DIR *dir = opendir(directory);
    if (dir == NULL)
        return err_set(detail, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", directory,
                       strerror(errno));
    struct file_list l = {mem_take_array(FILE_LIST_MAX, sizeof(*l.names)), 0};
    enum err e = ERR_OK;
    for (struct dirent *d = readdir(dir); d != NULL && e == ERR_OK; d = readdir(dir)) {
        if (!is_listed(directory, d->d_name))
            continue;
        if (l.count == FILE_LIST_MAX)
            e = err_set(detail, ERR_TOO_LARGE, "%s: more than %u files", directory, FILE_LIST_MAX);
        else
            strcpy(l.names[l.count++], d->d_name);
    }
    closedir(dir);
    if (e != ERR_OK) {
        file_list_free(&l);
        return e;
    }
    qsort(l.names, l.count, sizeof(*l.names), by_name);
    *ret_list = l;
    return ERR_OK;
}

void file_list_free(struct file_list *l)
{
    mem_give(l->names);
    *l = (struct file_list){NULL, 0};
}
