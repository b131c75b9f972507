/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/writer.h - writes a checkpoint of safetensors shards, streamed to disk.
 *
 * One thread.  Names, types and shapes are told first; then every tensor has its place and data may
 * come in any order and in pieces.  Memory: names and shapes alone.  Shards are called
 * NAME.partial until writer_finish, so nothing half-written is ever taken for a checkpoint. */
#ifndef LIB_MODEL_TOOL_WRITER_H
#define LIB_MODEL_TOOL_WRITER_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/safetensors.h"

#define WRITER_DIMS_MAX    4
#define WRITER_SHARD_BYTES ((uint64_t)4 << 30)

struct writer;

/* The directory is made if it is not there.  shard_bytes_max 0: WRITER_SHARD_BYTES. */
MUST_USE enum err writer_create(const char *directory, uint64_t shard_bytes_max,
                                struct writer **ret_writer, struct err_detail *detail);
void writer_destroy(struct writer **w_p); /* leaves partial shards where they are */

/* Number of the tensor for the calls below.  Only before writer_open; names must differ. */
uint32_t writer_add(struct writer *w, const char *name, enum safetensors_dtype dtype, uint32_t dims,
                    const uint64_t *shape);
/* Lays out the shards and opens them.  keep: shards of an earlier, interrupted run with the same
 * tensors are used on; else they are begun anew. */
MUST_USE enum err writer_open(struct writer *w, bool keep, struct err_detail *detail);

uint64_t writer_bytes(const struct writer *w, uint32_t tensor);
uint64_t writer_total(const struct writer *w); /* bytes of all tensors */
MUST_USE enum err writer_put(struct writer *w, uint32_t tensor, uint64_t offset, const void *data,
                             uint64_t bytes, struct err_detail *detail);
/* Reads back what lies there, for the check of an interrupted run. */
MUST_USE enum err writer_get(struct writer *w, uint32_t tensor, uint64_t offset, void *data,
                             uint64_t bytes, struct err_detail *detail);
/* What was put is on the disk when this returns. */
MUST_USE enum err writer_sync(struct writer *w, struct err_detail *detail);
/* Sync, final names, and the index where there is more than one shard. */
MUST_USE enum err writer_finish(struct writer *w, struct err_detail *detail);

/* A small file, whole or not at all: written beside, synced and renamed. */
MUST_USE enum err writer_file(const char *directory, const char *name, const void *text,
                              uint64_t bytes, struct err_detail *detail);
MUST_USE enum err writer_make_directory(const char *directory, struct err_detail *detail);

#endif
