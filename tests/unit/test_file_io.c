/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lib/base/file_io.h"

/* These stand before the C library's: a kernel that moves `piece` bytes at the most, and is
 * interrupted before each of them. */
static size_t piece;
static unsigned calls, interrupts;

static bool interrupted(void)
{
    calls++;
    if (piece == 0 || calls % 2 == 0)
        return false;
    interrupts++;
    errno = EINTR;
    return true;
}

ssize_t pread(int fd, void *bytes, size_t count, off_t at)
{
    if (interrupted())
        return -1;
    return syscall(SYS_pread64, fd, bytes, piece != 0 && count > piece ? piece : count, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at)
{
    if (interrupted())
        return -1;
    return syscall(SYS_pwrite64, fd, bytes, piece != 0 && count > piece ? piece : count, at);
}

static int file_make(void **state)
{
    static FILE *file;
    file = tmpfile();
    *state = file;
    piece = calls = interrupts = 0;
    return file == NULL;
}

static int file_end(void **state)
{
    return fclose(*state);
}

static void pieces_and_interrupts_are_gone_on_with(void **state)
{
    int fd = fileno(*state);
    uint8_t wrote[1000], got[1002];
    for (size_t i = 0; i < sizeof(wrote); i++)
        wrote[i] = (uint8_t)(i * 7 + i / 256);
    for (piece = 1; piece < 400; piece += 57) {
        interrupts = 0;
        assert_int_equal(file_write_at(fd, piece, wrote, sizeof(wrote)), ERR_OK);
        memset(got, 0xee, sizeof(got));
        assert_int_equal(file_read_at(fd, piece, got + 1, sizeof(wrote)), ERR_OK);
        assert_memory_equal(got + 1, wrote, sizeof(wrote));
        assert_true(got[0] == 0xee && got[1001] == 0xee);
        assert_int_equal(interrupts, 2 * ((sizeof(wrote) + piece - 1) / piece));
    }
}

static void a_file_that_ends_before_is_a_fault(void **state)
{
    int fd = fileno(*state);
    uint8_t bytes[16] = {0};
    assert_int_equal(file_write_at(fd, 0, bytes, 10), ERR_OK);
    for (piece = 0; piece <= 4; piece += 4) {
        assert_int_equal(file_read_at(fd, 0, bytes, 10), ERR_OK);
        errno = 0;
        assert_int_equal(file_read_at(fd, 0, bytes, 11), ERR_IO);
        assert_int_equal(errno, ENODATA);
        assert_int_equal(file_read_at(fd, 10, bytes, 1), ERR_IO);
        assert_int_equal(file_read_at(fd, 1000, bytes, 1), ERR_IO);
        assert_int_equal(file_read_at(fd, 1000, bytes, 0), ERR_OK);
    }
}

static void faults_keep_their_reason(void **state)
{
    (void)state;
    uint8_t byte = 0;
    assert_int_equal(file_read_at(-1, 0, &byte, 1), ERR_IO);
    assert_int_equal(errno, EBADF);
    assert_int_equal(file_write_at(-1, 0, &byte, 1), ERR_IO);
    assert_int_equal(errno, EBADF);
    assert_int_equal(file_read_at(fileno(*state), UINT64_MAX, &byte, 1), ERR_IO);
    assert_int_equal(errno, EINVAL);
}

static void offsets_go_beyond_four_gigabytes(void **state)
{
    int fd = fileno(*state);
    const uint64_t at = (5ull << 30) + 3;
    char text[6] = "";
    assert_int_equal(file_write_at(fd, at, "hello", 6), ERR_OK);
    assert_int_equal(file_read_at(fd, at, text, 6), ERR_OK);
    assert_string_equal(text, "hello");
    assert_int_equal(file_read_at(fd, 3, text, 1), ERR_OK);
    assert_int_equal(text[0], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(pieces_and_interrupts_are_gone_on_with, file_make,
                                        file_end),
        cmocka_unit_test_setup_teardown(a_file_that_ends_before_is_a_fault, file_make, file_end),
        cmocka_unit_test_setup_teardown(faults_keep_their_reason, file_make, file_end),
        cmocka_unit_test_setup_teardown(offsets_go_beyond_four_gigabytes, file_make, file_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
