/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/file_map.h - a file mapped for reading, and the files of a model's directory.
 *
 * Start-up only.  At most FILE_LIST_MAX files; hidden ones, unfinished ones (.partial) and the
 * manifest itself are not listed. */
#ifndef LIB_MODEL_TOOL_FILE_MAP_H
#define LIB_MODEL_TOOL_FILE_MAP_H

#include <stdint.h>

#include "lib/base/err.h"

#define FILE_LIST_MAX      8192u
#define FILE_MANIFEST_NAME "tandem-manifest.json"

struct file_map {
    const uint8_t *bytes; /* NULL if the file is empty */
    uint64_t size;
};

/* directory NULL: name is the path. */
MUST_USE enum err file_map_open(const char *directory, const char *name, struct file_map *ret_map,
                                struct err_detail *detail);
void file_map_close(struct file_map *m);

struct file_list {
    char (*names)[256]; /* sorted */
    uint32_t count;
};

MUST_USE enum err file_list_read(const char *directory, struct file_list *ret_list,
                                 struct err_detail *detail);
void file_list_free(struct file_list *l);

#endif
