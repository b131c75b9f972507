/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/log.h"

static int stderr_kept = -1;
static int ends[2];
static char captured[65536];

/* A pipe is enough: no test writes more than its 64 KiB. */
static void capture_begin(void)
{
    assert_int_equal(pipe2(ends, O_NONBLOCK), 0);
    stderr_kept = dup(STDERR_FILENO);
    assert_true(stderr_kept >= 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
}

static const char *capture_end(void)
{
    dup2(stderr_kept, STDERR_FILENO);
    close(stderr_kept);
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while ((got = read(ends[0], captured + used, sizeof captured - 1 - used)) > 0)
        used += (size_t)got;
    close(ends[0]);
    captured[used] = '\0';
    return captured;
}

/* Every line begins with a time like 2026-01-31T23:59:59.123Z; returns what follows it. */
static const char *after_time(const char *line)
{
    static const char shape[] = "dddd-dd-ddTdd:dd:dd.dddZ ";
    for (size_t i = 0; shape[i] != '\0'; i++) {
        if (shape[i] == 'd')
            assert_true(isdigit((unsigned char)line[i]));
        else
            assert_int_equal(line[i], shape[i]);
    }
    return line + strlen(shape);
}

static void one_line_per_event(void **state)
{
    (void)state;
    log_init("router", LOG_INFO);
    capture_begin();
    log_warn(ROUTER, "worker lost", "req=%016x worker=%u", 0xa7u, 3u);
    const char *text = capture_end();
    assert_string_equal(after_time(text),
                        "warn router router \"worker lost\" req=00000000000000a7 worker=3\n");
    capture_begin();
    log_info(BASE, "started", "");
    log_error(BUS, "bad", "x=%d", 1);
    text = capture_end();
    static const char first[] = "info router base \"started\"\n";
    text = after_time(text);
    assert_memory_equal(text, first, strlen(first));
    assert_string_equal(after_time(text + strlen(first)), "error router bus \"bad\" x=1\n");
}

static void levels(void **state)
{
    (void)state;
    enum log_level level = LOG_WARN;
    assert_true(log_level_parse("debug", &level));
    assert_int_equal(level, LOG_DEBUG);
    assert_true(log_level_parse("error", &level));
    assert_int_equal(level, LOG_ERROR);
    assert_false(log_level_parse("Error", &level));
    assert_false(log_level_parse("", &level));
    assert_int_equal(level, LOG_ERROR);

    log_init("kvmgr", LOG_WARN);
    capture_begin();
    log_info(KVMGR, "quiet", "a=%d", 1);
    log_debug(KVMGR, "quiet", "a=%d", 1);
    log_error(KVMGR, "loud", "a=%d", 1);
    const char *text = capture_end();
    assert_null(strstr(text, "quiet"));
    assert_non_null(strstr(text, " error kvmgr kvmgr \"loud\" a=1\n"));
    log_set_level(LOG_DEBUG);
    capture_begin();
    log_debug(KVMGR, "now", "a=%d", 2);
    assert_non_null(strstr(capture_end(), " debug kvmgr kvmgr \"now\" a=2\n"));
}

static void hostile_text_stays_on_its_line(void **state)
{
    (void)state;
    log_init("gateway", LOG_INFO);
    capture_begin();
    log_warn(HTTP, "refused", "path=%s", "/a\nfake line\r\t\x1b[31m\x7f");
    const char *text = capture_end();
    assert_string_equal(after_time(text),
                        "warn gateway http \"refused\" path=/a?fake line???[31m?\n");
    char huge[10000];
    memset(huge, 'h', sizeof huge);
    huge[sizeof huge - 1] = '\0';
    capture_begin();
    log_warn(HTTP, "refused", "path=%s", huge);
    text = capture_end();
    assert_true(strlen(text) <= 2049);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
}

static int count_lines(const char *text)
{
    int lines = 0;
    for (; *text != '\0'; text++)
        lines += *text == '\n';
    return lines;
}

static void repeats_are_held_back_and_counted(void **state)
{
    (void)state;
    log_init("worker", LOG_INFO);
    static struct log_site site;
    capture_begin();
    for (int i = 0; i < 100; i++)
        log_event(&site, LOG_WARN, LOG_BUS, "frame dropped", "i=%d", i);
    int lines = count_lines(capture_end());
    /* The second may turn over once while we write. */
    assert_true(lines == 10 || (lines > 10 && lines <= 20));
    unsigned held = site.count - 10;
    /* As if the next one came in a later second. */
    site.second -= 1;
    capture_begin();
    log_event(&site, LOG_WARN, LOG_BUS, "frame dropped", "i=%d", 100);
    char want[64];
    snprintf(want, sizeof want, "\"frame dropped\" repeats=%u i=100\n", held);
    assert_non_null(strstr(capture_end(), want));
    assert_int_equal(site.count, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_line_per_event),
        cmocka_unit_test(levels),
        cmocka_unit_test(hostile_text_stays_on_its_line),
        cmocka_unit_test(repeats_are_held_back_and_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
