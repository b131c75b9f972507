/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_epoch.h - the epoch on local disk: state_dir/kv-epoch, kv-epoch-N of kvmgr-N (file
 * I/O, start-up only).
 *
 * A decimal number and a newline.  Redis may come back from an old dump; this file makes sure that
 * the epoch never goes back with it. */
#ifndef KVMGR_KM_EPOCH_H
#define KVMGR_KM_EPOCH_H

#include <stdint.h>

#include "lib/base/err.h"

#define KM_EPOCH_MAX (UINT32_MAX - 1)

/* 0 and ERR_OK if there is no file; ERR_CORRUPT if it holds something else. */
MUST_USE enum err km_epoch_read(const char *state_dir, uint32_t id, uint32_t *ret_epoch,
                                struct err_detail *detail);
/* By rename, with fsync of file and folder: after it the epoch is used up. */
MUST_USE enum err km_epoch_write(const char *state_dir, uint32_t id, uint32_t epoch,
                                 struct err_detail *detail);

#endif
