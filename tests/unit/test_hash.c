/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "lib/base/hash.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

static void assert_hash(struct hash128 hash, const char *want)
{
    char text[33];
    hex_encode(hash.bytes, sizeof hash.bytes, text);
    assert_string_equal(text, want);
}

/* The expected values are those of Python's hashlib.blake2b(digest_size=16). */
static void blake2b_known_answers(void **state)
{
    (void)state;
    unsigned char bytes[200];
    for (int i = 0; i < 200; i++)
        bytes[i] = (unsigned char)i;
    assert_hash(hash_blake2b(NULL, 0, NULL, 0, NULL, 0, NULL, 0),
                "cae66941d9efbd404e4d88758ea67670");
    assert_hash(hash_blake2b(NULL, 0, "abc", 3, NULL, 0, NULL, 0),
                "cf4ab791c62b8d2b2109c90275287816");
    assert_hash(hash_blake2b("k", 1, "hello", 5, " ", 1, "world", 5),
                "a78d4db11ff4568ad4a62414d3afbde2");
    assert_hash(hash_blake2b(bytes, 64, bytes, 200, NULL, 0, NULL, 0),
                "2a01c9f85e180cbecdcd41de4617aac7");
}

static void blake2b_pieces_join(void **state)
{
    (void)state;
    unsigned char bytes[300];
    struct rng rng;
    rng_init(&rng, 0x5eed0005);
    for (int i = 0; i < 300; i++)
        bytes[i] = (unsigned char)rng_u32(&rng);
    struct hash128 whole = hash_blake2b(bytes, 16, bytes, 300, NULL, 0, NULL, 0);
    for (int round = 0; round < 100; round++) {
        size_t first = rng_below(&rng, 301);
        size_t second = rng_below(&rng, (uint32_t)(301 - first));
        struct hash128 cut = hash_blake2b(bytes, 16, bytes, first, bytes + first, second,
                                          bytes + first + second, 300 - first - second);
        assert_memory_equal(cut.bytes, whole.bytes, 16);
    }
}

static void xxh3_known_answers_and_stream(void **state)
{
    (void)state;
    assert_hash(hash_xxh3_once(NULL, 0), "99aa06d3014798d86001c324468d497f");
    assert_hash(hash_xxh3_once("abc", 3), "06b05ab6733a618578af5f94892f3950");
    unsigned char bytes[5000];
    struct rng rng;
    rng_init(&rng, 0x5eed0006);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)rng_u32(&rng);
    for (int round = 0; round < 50; round++) {
        size_t count = rng_below(&rng, sizeof bytes + 1);
        struct hash_xxh3 h;
        hash_xxh3_init(&h);
        for (size_t at = 0; at < count;) {
            size_t piece = 1 + rng_below(&rng, 700);
            if (piece > count - at)
                piece = count - at;
            hash_xxh3_add(&h, bytes + at, piece);
            hash_xxh3_add(&h, NULL, 0);
            at += piece;
        }
        struct hash128 stream = hash_xxh3_end(&h);
        assert_null(h.state);
        struct hash128 once = hash_xxh3_once(bytes, count);
        assert_memory_equal(stream.bytes, once.bytes, 16);
    }
}

static void sha256_known_answers(void **state)
{
    (void)state;
    uint8_t digest[32];
    char text[65];
    hash_sha256("abc", 3, digest);
    hex_encode(digest, 32, text);
    assert_string_equal(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    hash_sha256(NULL, 0, digest);
    hex_encode(digest, 32, text);
    assert_string_equal(text, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

/* RFC 3720, B.4, and the usual check value. */
static void crc32c_known_answers(void **state)
{
    (void)state;
    unsigned char bytes[32];
    assert_int_equal(hash_crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(hash_crc32c(0, NULL, 0), 0);
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(hash_crc32c(0, bytes, 32), 0x8a9136aau);
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(hash_crc32c(0, bytes, 32), 0x62a8ab43u);
    for (int i = 0; i < 32; i++)
        bytes[i] = (unsigned char)i;
    assert_int_equal(hash_crc32c(0, bytes, 32), 0x46dd794eu);
    for (size_t cut = 0; cut <= 32; cut++) {
        uint32_t crc = hash_crc32c(0, bytes, cut);
        assert_int_equal(hash_crc32c(crc, bytes + cut, 32 - cut), 0x46dd794eu);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blake2b_known_answers),         cmocka_unit_test(blake2b_pieces_join),
        cmocka_unit_test(xxh3_known_answers_and_stream), cmocka_unit_test(sha256_known_answers),
        cmocka_unit_test(crc32c_known_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
