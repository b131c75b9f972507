/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/safetensors.h - strict reader of safetensors files, single or sharded by an index.
 *
 * Start-up only, one thread.  Files are mapped read-only and stay mapped until destroy.  Every
 * length, offset and count is checked before it is used; a refusal names the file, the class of
 * the fault and the tensor or field.  Holds one entry per tensor, sorted by name. */
#ifndef LIB_MODEL_SAFETENSORS_H
#define LIB_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define SAFETENSORS_HEADER_BYTES_MAX 100000000u
#define SAFETENSORS_DIMS_MAX         64

enum safetensors_dtype {
#define DTYPE(name, bytes) SAFETENSORS_##name,
#include "lib/model/safetensors_dtypes.def"
#undef DTYPE
    SAFETENSORS_DTYPE_COUNT
};

struct safetensors_tensor {
    const char *name;    /* NUL-terminated; holds no control characters */
    const uint8_t *data; /* in the mapping; need not be aligned */
    uint64_t bytes;
    uint64_t elements;
    const uint64_t *shape; /* [dims] */
    uint32_t dims;
    uint32_t shard; /* number of its file */
    enum safetensors_dtype dtype;
};

struct safetensors;

MUST_USE enum err safetensors_open_file(const char *path, struct safetensors **ret_set,
                                        struct err_detail *detail);
/* model.safetensors.index.json and its shards if present, else model.safetensors. */
MUST_USE enum err safetensors_open_directory(const char *directory, struct safetensors **ret_set,
                                             struct err_detail *detail);
void safetensors_close(struct safetensors **set_p);

uint32_t safetensors_count(const struct safetensors *set);
const struct safetensors_tensor *safetensors_at(const struct safetensors *set, uint32_t index);
const struct safetensors_tensor *safetensors_find(const struct safetensors *set, const char *name);
/* Copies count bytes from offset in the tensor on; they may go on into what lies behind it in its
 * file.  Quicker than the mapping for bytes that are needed once, and a file that fails or has
 * become shorter is ERR_IO instead of a signal.  Any thread. */
MUST_USE enum err safetensors_read(const struct safetensors *set,
                                   const struct safetensors_tensor *t, uint64_t offset,
                                   void *ret_bytes, size_t count);
uint32_t safetensors_files(const struct safetensors *set);
const char *safetensors_file_name(const struct safetensors *set, uint32_t shard);
uint64_t safetensors_file_bytes(const struct safetensors *set); /* all shards */

const char *safetensors_dtype_name(enum safetensors_dtype dtype);
uint32_t safetensors_dtype_bytes(enum safetensors_dtype dtype);

#endif
