/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/safetensors_header.h - checks and reads the header of one mapped file.
 *
 * Inner part of safetensors.c.  Pure: bytes in, tensors out; names and shapes are copied into the
 * caller's arena, data points into the bytes. */
#ifndef LIB_MODEL_SAFETENSORS_HEADER_H
#define LIB_MODEL_SAFETENSORS_HEADER_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/safetensors.h"

struct arena;
struct json;
struct json_error;

/* Tensors are appended to *tensors_p (malloc'd, *count_p of *capacity_p); all get `shard`.
 * file is for messages. */
struct safetensors_list {
    struct safetensors_tensor *tensors;
    uint32_t count, capacity;
};

MUST_USE enum err safetensors_read_header(const uint8_t *bytes, uint64_t size, const char *file,
                                          uint32_t shard, struct arena *arena,
                                          struct safetensors_list *list, struct err_detail *detail);

/* NULL, or why the bytes cannot be a tensor name: they end up in logs and messages. */
const char *safetensors_name_fault(const char *name, size_t bytes);

/* The fault class of a JSON error: duplicate_name, too_deep, or fallback. */
const char *safetensors_json_class(const struct json_error *error, const char *fallback);

#endif
