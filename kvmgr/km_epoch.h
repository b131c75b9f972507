/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_epoch.h - the epoch on local disk: state_dir/kv-epoch, kv-epoch-N of kvmgr-N (file
 * I/O, start-up only).
 *
 * A decimal number and a newline.  Redis may come back from an old dump; this file makes sure that
 * the epoch never goes back with it. */
#ifndef KVMGR_KM_EPOCH_H
#define KVMGR_KM_EPOCH_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"

#define KM_EPOCH_MAX   (UINT32_MAX - 1)
#define KM_EPOCH_REACH 65536u /* further than this beyond what we know is no epoch of ours */

struct km_epoch_choice {
    uint32_t epoch;
    bool redis_ignored, arena_ignored; /* beyond reach: whoever wrote that may not use epochs up */
};

/* The epoch after all those known (0 = none).  ERR_UNSUPPORTED: the disk's is the last one. */
MUST_USE enum err km_epoch_choose(uint32_t local, uint32_t arena, uint32_t redis,
                                  struct km_epoch_choice *ret, struct err_detail *detail);

/* 0 and ERR_OK if there is no file; ERR_CORRUPT if it holds something else. */
MUST_USE enum err km_epoch_read(const char *state_dir, uint32_t id, uint32_t *ret_epoch,
                                struct err_detail *detail);
/* By rename, with fsync of file and folder: after it the epoch is used up. */
MUST_USE enum err km_epoch_write(const char *state_dir, uint32_t id, uint32_t epoch,
                                 struct err_detail *detail);

#endif
