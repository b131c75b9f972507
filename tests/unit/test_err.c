/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/err.h"

static void table_is_complete(void **state)
{
    (void)state;
    for (int e = 0; e < ERR_COUNT; e++) {
        assert_memory_equal(err_name((enum err)e), "ERR_", 4);
        assert_true(strlen(err_text((enum err)e)) > 0);
        int status = err_http_status((enum err)e);
        assert_true(status >= 200 && status <= 599);
        for (int other = 0; other < e; other++)
            assert_string_not_equal(err_name((enum err)e), err_name((enum err)other));
    }
    assert_string_equal(err_name(ERR_BUSY), "ERR_BUSY");
    assert_int_equal(err_http_status(ERR_BUSY), 429);
    assert_true(err_retryable(ERR_BUSY));
    assert_false(err_retryable(ERR_INVALID));
    /* These numbers travel on the wire: they may never move. */
    assert_int_equal(ERR_OK, 0);
    assert_int_equal(ERR_INVALID, 1);
    assert_int_equal(ERR_INTERNAL, 18);
}

static void unknown_code_has_a_name(void **state)
{
    (void)state;
    assert_string_equal(err_name((enum err)ERR_COUNT), "ERR_?");
    assert_string_equal(err_name((enum err) - 1), "ERR_?");
    assert_int_equal(err_http_status((enum err)4711), 500);
    assert_false(err_retryable((enum err)4711));
}

static void set_formats_and_cuts(void **state)
{
    (void)state;
    struct err_detail detail;
    assert_int_equal(err_set(&detail, ERR_INVALID, "n: %u, only %d", 7u, 4), ERR_INVALID);
    assert_string_equal(detail.text, "n: 7, only 4");
    assert_int_equal(err_set(NULL, ERR_BUSY, "x"), ERR_BUSY);
    char text[2 * ERR_DETAIL_BYTES];
    memset(text, 'y', sizeof text);
    text[sizeof text - 1] = '\0';
    assert_int_equal(err_set(&detail, ERR_IO, "%s", text), ERR_IO);
    assert_int_equal(strlen(detail.text), ERR_DETAIL_BYTES - 1);
}

static enum err try_twice(enum err first, int *steps)
{
    TRY(first);
    (*steps)++;
    return ERR_OK;
}

static void try_returns_early(void **state)
{
    (void)state;
    int steps = 0;
    assert_int_equal(try_twice(ERR_EPOCH, &steps), ERR_EPOCH);
    assert_int_equal(steps, 0);
    assert_int_equal(try_twice(ERR_OK, &steps), ERR_OK);
    assert_int_equal(steps, 1);
}

/* Runs the child with stderr in a pipe; returns its wait status and what it wrote. */
static int run_child(void (*body)(void), char *ret_text, size_t text_bytes)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        body();
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while ((got = read(ends[0], ret_text + used, text_bytes - 1 - used)) > 0)
        used += (size_t)got;
    ret_text[used] = '\0';
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void child_check(void)
{
    int one = 1;
    CHECK(one == 2);
}

static void child_object(void)
{
    struct {
        uint32_t magic;
    } object = {0x11111111u};
    CHECK_OBJ(&object, 0x22222222u);
}

static void child_die(void)
{
    die("config: %s is %d", "port", 0);
}

static void check_names_the_place_and_aborts(void **state)
{
    (void)state;
    char text[8192];
    int status = run_child(child_check, text, sizeof text);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(text, "test_err.c:"));
    assert_non_null(strstr(text, "one == 2"));
    assert_non_null(strstr(text, "child_check"));
    assert_non_null(strstr(text, "\n/")); /* a frame of the backtrace */
    status = run_child(child_object, text, sizeof text);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void die_names_the_program_and_exits_2(void **state)
{
    (void)state;
    char text[8192];
    int status = run_child(child_die, text, sizeof text);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 2);
    assert_string_equal(text, "test_err: config: port is 0\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table_is_complete),
        cmocka_unit_test(unknown_code_has_a_name),
        cmocka_unit_test(set_formats_and_cuts),
        cmocka_unit_test(try_returns_early),
        cmocka_unit_test(check_names_the_place_and_aborts),
        cmocka_unit_test(die_names_the_program_and_exits_2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
