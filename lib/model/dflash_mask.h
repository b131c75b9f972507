/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/dflash_mask.h - a learned mask vector from mask_embedding.pt.
 *
 * Start-up only.  The file is a torch archive: a zip whose members are stored, not compressed.  Of
 * it, only the raw values and the name of their type are read; the pickle is never run. */
#ifndef LIB_MODEL_DFLASH_MASK_H
#define LIB_MODEL_DFLASH_MASK_H

#include <stdint.h>

#include "lib/base/err.h"

struct dflash;

/* *ret_mask [hidden] belongs to the drafter; NULL where the directory has no such file. */
MUST_USE enum err dflash_mask_read(const char *directory, uint32_t hidden, struct dflash *d,
                                   float **ret_mask, struct err_detail *detail);

#endif
