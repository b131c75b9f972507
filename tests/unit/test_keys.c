/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/keys.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[] = "/tmp/tandem-keys-XXXXXX";
static char path[64];
static struct err_detail detail; /* of the last refusal */

static void file_write(const char *text, size_t count, mode_t mode)
{
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, count), (ssize_t)count);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static void refused(enum err code, const char *why)
{
    struct keys k;
    assert_int_equal(keys_read(path, &k, &detail), code);
    if (strstr(detail.text, why) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", detail.text, why);
    assert_non_null(strstr(detail.text, path));
}

static void a_pair_is_made_once(void **state)
{
    (void)state;
    struct keys a, b;
    struct stat st;
    unlink(path);
    assert_int_equal(keys_make(path, &detail), ERR_OK);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(keys_read(path, &a, &detail), ERR_OK);
    assert_int_equal(strlen(a.key_public), KEYS_CHARS);
    assert_int_equal(strlen(a.key_secret), KEYS_CHARS);
    assert_int_equal(keys_make(path, &detail), ERR_IO); /* never over an old one */
    assert_int_equal(keys_read(path, &b, &detail), ERR_OK);
    assert_memory_equal(&a, &b, sizeof a);
    unlink(path);
    assert_int_equal(keys_make(path, &detail), ERR_OK);
    assert_int_equal(keys_read(path, &b, &detail), ERR_OK);
    assert_string_not_equal(a.key_secret, b.key_secret);
}

static void what_is_no_pair_is_refused(void **state)
{
    (void)state;
    struct keys a, b;
    char text[256];
    unlink(path);
    refused(ERR_IO, "No such file");
    assert_int_equal(keys_make(path, &detail), ERR_OK);
    assert_int_equal(keys_read(path, &a, &detail), ERR_OK);
    int count = snprintf(text, sizeof text, "public %s\nsecret %s\n", a.key_public, a.key_secret);
    for (int cut = 0; cut < count; cut++) {
        file_write(text, (size_t)cut, 0600);
        refused(ERR_INVALID, "two lines");
    }
    file_write(text, (size_t)count, 0640);
    refused(ERR_IO, "mode 640");
    /* Any other byte makes another key or no key; but Curve25519 ignores two bits of the last. */
    for (int at = 0; at < count - 2; at++) {
        char hurt[256];
        memcpy(hurt, text, sizeof hurt);
        hurt[at] = hurt[at] == '0' ? '1' : '0';
        file_write(hurt, (size_t)count, 0600);
        refused(ERR_INVALID, "");
        assert_null(strstr(detail.text, a.key_secret));
    }
    unlink(path);
    assert_int_equal(keys_make(path, &detail), ERR_OK);
    assert_int_equal(keys_read(path, &b, &detail), ERR_OK);
    count = snprintf(text, sizeof text, "public %s\nsecret %s\n", a.key_public, b.key_secret);
    file_write(text, (size_t)count, 0600);
    refused(ERR_INVALID, "no pair");
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    refused(ERR_IO, "no file");
    rmdir(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pair_is_made_once),
        cmocka_unit_test(what_is_no_pair_is_refused),
    };
    if (mkdtemp(folder) == NULL)
        return 1;
    snprintf(path, sizeof path, "%s/fabric.keys", folder);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    rmdir(folder);
    return failed;
}
