/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/hash.h"

#include <openssl/sha.h>
#include <pthread.h>
#include <sodium.h>
#include <string.h>
#include <xxhash.h>
#ifdef HAVE_XXH_DISPATCH
#include <xxh_x86dispatch.h> /* the same functions, by the vectors that the processor has */
#endif

#include "lib/base/check.h"

#define CRC32C_POLYNOMIAL 0x82F63B78u /* Castagnoli, bits reversed */

STATIC_CHECK(sizeof(struct hash128) == 16);
STATIC_CHECK(sizeof(XXH128_canonical_t) == sizeof(struct hash128));

static pthread_once_t sodium_once = PTHREAD_ONCE_INIT;

/* Without this libsodium works too, but with its portable code only. */
static void sodium_start(void)
{
    CHECK(sodium_init() >= 0);
}

static void blake2b_add(crypto_generichash_blake2b_state *state, const void *bytes, size_t count)
{
    CHECK(bytes != NULL || count == 0);
    if (count > 0)
        CHECK(crypto_generichash_blake2b_update(state, bytes, count) == 0);
}

struct hash128 hash_blake2b(const void *key, size_t key_bytes, const void *a, size_t a_bytes,
                            const void *b, size_t b_bytes, const void *c, size_t c_bytes)
{
    CHECK(key_bytes <= 64);
    CHECK(key != NULL || key_bytes == 0);
    CHECK(pthread_once(&sodium_once, sodium_start) == 0);
    crypto_generichash_blake2b_state state;
    struct hash128 result;
    CHECK(crypto_generichash_blake2b_init(&state, key, key_bytes, sizeof result) == 0);
    blake2b_add(&state, a, a_bytes);
    blake2b_add(&state, b, b_bytes);
    blake2b_add(&state, c, c_bytes);
    CHECK(crypto_generichash_blake2b_final(&state, result.bytes, sizeof result) == 0);
    return result;
}

static struct hash128 xxh3_canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    struct hash128 result;
    memcpy(result.bytes, canonical.digest, sizeof result);
    return result;
}

void hash_xxh3_init(struct hash_xxh3 *h)
{
    CHECK(h != NULL);
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL);
    CHECK(XXH3_128bits_reset(state) == XXH_OK);
    h->state = state;
}

void hash_xxh3_add(struct hash_xxh3 *h, const void *bytes, size_t count)
{
    CHECK(h != NULL && h->state != NULL);
    CHECK(bytes != NULL || count == 0);
    if (count > 0)
        CHECK(XXH3_128bits_update(h->state, bytes, count) == XXH_OK);
}

struct hash128 hash_xxh3_end(struct hash_xxh3 *h)
{
    CHECK(h != NULL && h->state != NULL);
    struct hash128 result = xxh3_canonical(XXH3_128bits_digest(h->state));
    XXH3_freeState(h->state);
    h->state = NULL;
    return result;
}

struct hash128 hash_xxh3_once(const void *bytes, size_t count)
{
    CHECK(bytes != NULL || count == 0);
    return xxh3_canonical(XXH3_128bits(count == 0 ? "" : bytes, count));
}

void hash_sha256(const void *bytes, size_t count, uint8_t ret_digest[32])
{
    STATIC_CHECK(SHA256_DIGEST_LENGTH == 32);
    CHECK(bytes != NULL || count == 0);
    CHECK(SHA256(count == 0 ? (const void *)"" : bytes, count, ret_digest) != NULL);
}

/* crc_table[k][b]: the remainder of byte b followed by k zero bytes. */
static uint32_t crc_table[8][256];

__attribute__((constructor)) static void crc_table_fill(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ CRC32C_POLYNOMIAL : crc >> 1;
        crc_table[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++) {
            uint32_t before = crc_table[k - 1][b];
            crc_table[k][b] = before >> 8 ^ crc_table[0][before & 0xff];
        }
}

uint32_t hash_crc32c(uint32_t seed, const void *bytes, size_t count)
{
    CHECK(bytes != NULL || count == 0);
    const uint8_t *p = bytes;
    uint32_t crc = ~seed;
    for (; count >= 8; count -= 8, p += 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                              (uint32_t)p[3] << 24);
        crc = crc_table[7][low & 0xff] ^ crc_table[6][low >> 8 & 0xff] ^
              crc_table[5][low >> 16 & 0xff] ^ crc_table[4][low >> 24] ^ crc_table[3][p[4]] ^
              crc_table[2][p[5]] ^ crc_table[1][p[6]] ^ crc_table[0][p[7]];
    }
    for (; count > 0; count--, p++)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *p) & 0xff];
    return ~crc;
}
