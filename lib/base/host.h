/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/host.h - facts of this host: where shared memory lies and how long it is good.
 *
 * What was written before the host's last start may be of any time: a file remembers host_boot and
 * is not taken up under another one. */
#ifndef LIB_BASE_HOST_H
#define LIB_BASE_HOST_H

#include <stdint.h>

#include "lib/base/err.h"

#define HOST_BOOT_BYTES 40u
#define HOST_PATH_BYTES 512u

void host_boot_id(char ret_id[HOST_BOOT_BYTES]); /* "" = unknown */
uint32_t host_boot(void);                        /* crc32c of it; 0 = unknown */

/* /dev/shm/tandem-<cluster>-<16 hex of the hash of run_dir's absolute path><suffix> */
MUST_USE enum err host_memory_path(const char *cluster, const char *run_dir, const char *suffix,
                                   char ret_path[HOST_PATH_BYTES], struct err_detail *detail);

#endif
