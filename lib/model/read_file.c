/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/read_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum err read_file(const char *directory, const char *name, size_t bytes_max, char **ret_text,
                   size_t *ret_bytes, struct err_detail *detail)
{
    char path[4096];
    int n = snprintf(path, sizeof(path), "%s%s%s", directory != NULL ? directory : "",
                     directory != NULL ? "/" : "", name);
    if (n < 0 || (size_t)n >= sizeof(path))
        return err_set(detail, ERR_INVALID, "%s: path too long", name);
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return err_set(detail, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", path,
                       strerror(errno));
    char *text = NULL;
    size_t bytes = 0, capacity = 0;
    enum err e = ERR_OK;
    for (;;) {
        if (bytes == capacity) {
            capacity = capacity == 0 ? 65536 : capacity * 2;
            char *grown = bytes < bytes_max ? realloc(text, capacity) : NULL;
            if (grown == NULL) {
                e = err_set(detail, ERR_TOO_LARGE, "%s: too large", path);
                break;
            }
            text = grown;
        }
        size_t got = fread(text + bytes, 1, capacity - bytes, file);
        if (got == 0)
            break;
        bytes += got;
    }
    if (e == ERR_OK && ferror(file))
        e = err_set(detail, ERR_IO, "%s: read error", path);
    fclose(file);
    if (e != ERR_OK) {
        free(text);
        return e;
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return ERR_OK;
}
