/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/read_file.h - a whole small file of a model directory.
 *
 * Start-up only.  *ret_text is malloc'd, the caller frees it. */
#ifndef LIB_MODEL_READ_FILE_H
#define LIB_MODEL_READ_FILE_H

#include <stddef.h>

#include "lib/base/err.h"

/* directory NULL: name is the path.  ERR_NOT_FOUND if there is none, ERR_TOO_LARGE beyond
 * bytes_max, else ERR_IO. */
MUST_USE enum err read_file(const char *directory, const char *name, size_t bytes_max,
                            char **ret_text, size_t *ret_bytes, struct err_detail *detail);

#endif
