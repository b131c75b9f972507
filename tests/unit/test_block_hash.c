/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "lib/base/hash.h"
#include "proto/block_hash.h"

static char directory[64], path[128];

static int setup(void **state)
{
    (void)state;
    strcpy(directory, "/tmp/tandem-block-hash-XXXXXX");
    if (mkdtemp(directory) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/cluster.key", directory);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    (void)unlink(path);
    return rmdir(directory);
}

static void test_key_is_made_once(void **state)
{
    struct block_hash_key first, second;
    struct err_detail detail;
    struct stat st;
    (void)state;
    assert_int_equal(block_hash_key_load(directory, &first, &detail), ERR_OK);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(st.st_size, 32);
    assert_int_equal(block_hash_key_load(directory, &second, &detail), ERR_OK);
    assert_memory_equal(&first, &second, sizeof(first));
    static const struct block_hash_key zero;
    assert_memory_not_equal(&first, &zero, sizeof(first));
}

static void test_bad_key_files(void **state)
{
    struct block_hash_key key, before;
    struct err_detail detail;
    (void)state;
    assert_int_equal(block_hash_key_load(directory, &key, &detail), ERR_OK);
    before = key;
    assert_int_equal(chmod(path, 0644), 0);
    assert_int_equal(block_hash_key_load(directory, &key, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "mode 644"));
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(truncate(path, 31), 0);
    assert_int_equal(block_hash_key_load(directory, &key, &detail), ERR_INVALID);
    assert_int_equal(truncate(path, 33), 0);
    assert_int_equal(block_hash_key_load(directory, &key, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "33 bytes"));
    assert_memory_equal(&key, &before, sizeof(key));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/dev/zero", path), 0);
    assert_int_not_equal(block_hash_key_load(directory, &key, &detail), ERR_OK);
    assert_int_not_equal(block_hash_key_load("/nowhere/at/all", &key, &detail), ERR_OK);
}

static void test_chain(void **state)
{
    struct block_hash_key key, other;
    struct hash128 zero = {{0}};
    uint32_t ids[300];
    (void)state;
    for (uint32_t i = 0; i < 300; i++)
        ids[i] = i * 7919u;
    for (uint32_t i = 0; i < 32; i++)
        key.bytes[i] = (uint8_t)i;
    other = key;
    other.bytes[31] ^= 1;

    struct hash128 salt = block_hash_salt(&key, "");
    assert_memory_equal(&salt, &zero, 16);
    salt = block_hash_salt(&key, "tenant");
    assert_memory_not_equal(&salt, &zero, 16);

    /* The definition, spelled out. */
    uint8_t flat[32 + sizeof(ids)];
    memset(flat, 0, 16);
    memcpy(flat + 16, &salt, 16);
    memcpy(flat + 32, ids, sizeof(ids));
    struct hash128 wanted = hash_blake2b(&key, 32, flat, sizeof(flat), NULL, 0, NULL, 0);
    struct hash128 h = block_hash_next(&key, &zero, &salt, ids, 300);
    assert_memory_equal(&h, &wanted, 16);

    struct hash128 t = block_hash_next(&other, &zero, &salt, ids, 300);
    assert_memory_not_equal(&h, &t, 16);
    t = block_hash_next(&key, &zero, &zero, ids, 300);
    assert_memory_not_equal(&h, &t, 16);
    t = block_hash_next(&key, &h, &salt, ids, 300);
    assert_memory_not_equal(&h, &t, 16);
    t = block_hash_next(&key, &zero, &salt, ids, 299);
    assert_memory_not_equal(&h, &t, 16);
    ids[299] ^= 0x80000000u;
    t = block_hash_next(&key, &zero, &salt, ids, 300);
    assert_memory_not_equal(&h, &t, 16);
}

/* Values of record: stored maps and arenas depend on them (an independent implementation of
 * keyed BLAKE2b gave them). */
static void test_values_of_record(void **state)
{
    struct block_hash_key key;
    struct hash128 zero = {{0}};
    static const uint32_t ids[] = {1, 2, 3, 4};
    char hex[33];
    (void)state;
    for (uint32_t i = 0; i < 32; i++)
        key.bytes[i] = (uint8_t)i;
    struct hash128 h = block_hash_next(&key, &zero, &zero, ids, 4);
    static const uint8_t wanted[16] = {0x05, 0x85, 0xae, 0x5e, 0x9d, 0x94, 0x12, 0xda,
                                       0x3c, 0x35, 0xf0, 0xf6, 0x2e, 0xa3, 0x40, 0xa4};
    assert_memory_equal(&h, wanted, 16);
    h = block_hash_salt(&key, "tenant-a");
    static const uint8_t wanted_salt[16] = {0x2b, 0x24, 0x2a, 0xc5, 0x2c, 0xca, 0x5a, 0xe9,
                                            0xd3, 0x5e, 0x06, 0x16, 0xa9, 0x78, 0x24, 0x5b};
    assert_memory_equal(&h, wanted_salt, 16);
    block_hash_session(&key, "session-1", hex);
    assert_string_equal(hex, "b1494fd932f61b84a9c93939446d843e");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_key_is_made_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_key_files, setup, teardown),
        cmocka_unit_test(test_chain),
        cmocka_unit_test(test_values_of_record),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
