/* SPDX-License-Identifier: Apache-2.0 */
/* proto/block_hash.h - hash chain of token blocks, same bits everywhere (pure but for the key
 * file).
 *
 * hash_i = BLAKE2b-128(key = cluster key, hash_{i-1} || salt || ids of block i as u32 LE); the
 * chain
 * starts from 16 zero bytes.  salt = BLAKE2b-128(key, cache_salt text), 16 zero bytes for "". */
#ifndef PROTO_BLOCK_HASH_H
#define PROTO_BLOCK_HASH_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define BLOCK_HASH_KEY_BYTES 32u

struct block_hash_key {
    uint8_t bytes[BLOCK_HASH_KEY_BYTES];
};

/* Reads state_dir/cluster.key, making it once (O_EXCL, mode 0600, random) if missing.  A file of
 * another size or mode is refused. */
MUST_USE enum err block_hash_key_load(const char *state_dir, struct block_hash_key *ret_key,
                                      struct err_detail *detail);
struct hash128 block_hash_salt(const struct block_hash_key *key, const char *cache_salt);
struct hash128 block_hash_next(const struct block_hash_key *key, const struct hash128 *parent,
                               const struct hash128 *salt, const uint32_t *ids, uint32_t count);
/* Session id in Redis: hex of the keyed hash of the session key (never the key itself). */
void block_hash_session(const struct block_hash_key *key, const char *session_key,
                        char ret_hex[33]);

#endif
