/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/hash.h - BLAKE2b-128 (libsodium), sha256 (libcrypto), xxh3-128, crc32c.
 *
 * Pure.  The only file that may include libsodium and libcrypto is hash.c. */
#ifndef LIB_BASE_HASH_H
#define LIB_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

struct hash128 {
    uint8_t bytes[16];
};

/* Keyed BLAKE2b with 16 bytes of output over up to three pieces, in order (NULL, 0 allowed).
 * key_bytes 0..64. */
struct hash128 hash_blake2b(const void *key, size_t key_bytes, const void *a, size_t a_bytes,
                            const void *b, size_t b_bytes, const void *c, size_t c_bytes);

struct hash_xxh3 { /* streaming xxh3-128; canonical (big-endian) result bytes */
    void *state;
};
void hash_xxh3_init(struct hash_xxh3 *h);
void hash_xxh3_add(struct hash_xxh3 *h, const void *bytes, size_t count);
struct hash128 hash_xxh3_end(struct hash_xxh3 *h); /* also frees */
struct hash128 hash_xxh3_once(const void *bytes, size_t count);

void hash_sha256(const void *bytes, size_t count, uint8_t ret_digest[32]);
uint32_t hash_crc32c(uint32_t seed, const void *bytes, size_t count); /* seed 0 to start */

#endif
