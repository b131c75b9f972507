/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_arena_file.h - opening, locking, making and reading the arena's file (I/O, loop thread).
 *
 * What lies at a path is hostile until its superblock is checked. */
#ifndef KVMGR_KM_ARENA_FILE_H
#define KVMGR_KM_ARENA_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "proto/kv_layout.h"

/* O_NOFOLLOW, regular file, our own, mode 0600, one link; locked for writing.
 * ERR_NOT_FOUND: nothing there.  ERR_CORRUPT: a regular file of ours that is not to be trusted
 * (mode, links): may be replaced. */
MUST_USE enum err km_arena_file_open(const char *path, bool write, int *ret_fd, uint64_t *ret_bytes,
                                     struct err_detail *detail);
/* A new sparse file of that size, locked, under a temporary name beside path. */
MUST_USE enum err km_arena_file_make(const char *path, uint64_t bytes, char *ret_temp,
                                     size_t temp_bytes, int *ret_fd, struct err_detail *detail);
/* The sum in headers' data_crc: kv_data_sum of the file's bytes. */
MUST_USE enum err km_arena_file_sum(int fd, uint64_t at, uint64_t count, uint32_t *ret_sum);
/* The sum that the header of a committed block or slot has.  ERR_CORRUPT: it is not a sound header
 * of something committed. */
MUST_USE enum err km_arena_file_sealed(int fd, const struct kv_layout *l, bool slot, uint32_t index,
                                       uint32_t *ret_sum);
/* Size of the file system below path's folder, 0 if unknown. */
uint64_t km_arena_file_system_bytes(const char *path);

bool km_arena_header_unused(const void *header); /* 64 zero bytes */

#endif
