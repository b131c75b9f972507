/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/peers_key.h - the key pair of a group, from a file of 32 secret bytes.
 *
 * Read at start; the same file lies on every node, readable by its owner alone. */
#ifndef LIB_NET_PEERS_KEY_H
#define LIB_NET_PEERS_KEY_H

#include "lib/base/err.h"
#include "lib/net/peers.h"

struct peers_key { /* Z85, for struct peers_options */
    char key_public[PEERS_KEY_CHARS + 1], key_secret[PEERS_KEY_CHARS + 1];
};

/* Refusals name the file and say what is wrong with it. */
MUST_USE enum err peers_key_load(const char *path, struct peers_key *ret_key,
                                 struct err_detail *detail);

#endif
