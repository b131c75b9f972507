/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/file_io.h - all of a piece of a file, at an offset.
 *
 * Short transfers and interrupts are gone on with.  ERR_IO leaves the reason in errno: ENODATA
 * where the file ends before the piece does.  Any thread; the file's own position stays. */
#ifndef LIB_BASE_FILE_IO_H
#define LIB_BASE_FILE_IO_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

MUST_USE enum err file_read_at(int fd, uint64_t at, void *ret_bytes, size_t count);
MUST_USE enum err file_write_at(int fd, uint64_t at, const void *bytes, size_t count);

#endif
