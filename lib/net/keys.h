/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/keys.h - the CURVE key pair of a cluster, in a file of mode 0600.
 *
 * Two lines: `public KEY` and `secret KEY`, each key 40 characters of Z85.  Every node has the same
 * file; who does not hold it cannot speak with any of them. */
#ifndef LIB_NET_KEYS_H
#define LIB_NET_KEYS_H

#include "lib/base/err.h"

#define KEYS_CHARS 40u /* Z85 of 32 bytes */

struct keys {
    char key_public[KEYS_CHARS + 1], key_secret[KEYS_CHARS + 1];
};

/* ERR_IO: not there, or others may read it; ERR_INVALID: no two keys, or they are no pair.  The
 * text names the path and never a key. */
MUST_USE enum err keys_read(const char *path, struct keys *ret_keys, struct err_detail *detail);
/* Makes a new pair in a new file; a file that exists is left alone (ERR_IO). */
MUST_USE enum err keys_make(const char *path, struct err_detail *detail);

#endif
