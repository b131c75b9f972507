/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"

#define LOG_LINE_BYTES     2048u
#define LOG_PROCESS_BYTES  32u
#define LOG_SITE_LINES_MAX 10u /* of one call site in a second */

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static const char *const group_names[] = {
#define LOG_GROUP(name, text) text,
#include "lib/base/log_groups.def"
#undef LOG_GROUP
};

STATIC_CHECK(ARRAY_COUNT(group_names) == LOG_GROUP_COUNT);
STATIC_CHECK(ARRAY_COUNT(level_names) == LOG_DEBUG + 1);

static char log_process[LOG_PROCESS_BYTES] = "tandem";
static _Atomic int log_level_now = LOG_INFO;

void log_init(const char *process, enum log_level level)
{
    CHECK(process != NULL && process[0] != '\0');
    snprintf(log_process, sizeof log_process, "%s", process);
    log_set_level(level);
}

bool log_level_parse(const char *text, enum log_level *ret_level)
{
    CHECK(text != NULL && ret_level != NULL);
    for (size_t i = 0; i < ARRAY_COUNT(level_names); i++)
        if (strcmp(text, level_names[i]) == 0) {
            *ret_level = (enum log_level)i;
            return true;
        }
    return false;
}

void log_set_level(enum log_level level)
{
    CHECK((int)level >= LOG_ERROR && (int)level <= LOG_DEBUG);
    atomic_store(&log_level_now, (int)level);
}

/* False when this site had its share of the second; else *ret_repeats lines were held back since
 * its last one.  Two threads at one site may let one line more through: harmless. */
static bool site_admit(struct log_site *site, unsigned long long second, unsigned *ret_repeats)
{
    *ret_repeats = 0;
    if (__atomic_load_n(&site->second, __ATOMIC_RELAXED) != second) {
        __atomic_store_n(&site->second, second, __ATOMIC_RELAXED);
        unsigned before = __atomic_exchange_n(&site->count, 1, __ATOMIC_RELAXED);
        if (before > LOG_SITE_LINES_MAX)
            *ret_repeats = before - LOG_SITE_LINES_MAX;
        return true;
    }
    return __atomic_add_fetch(&site->count, 1, __ATOMIC_RELAXED) <= LOG_SITE_LINES_MAX;
}

/* Appends at *used; what does not fit is cut, and *used never passes the buffer's end. */
PRINTF_LIKE(3, 0)
static void line_add_va(char *line, size_t *used, const char *format, va_list args)
{
    CHECK(*used < LOG_LINE_BYTES);
    size_t room = LOG_LINE_BYTES - *used;
    int count = vsnprintf(line + *used, room, format, args);
    CHECK(count >= 0);
    *used += (size_t)count < room ? (size_t)count : room - 1;
}

PRINTF_LIKE(3, 4)
static void line_add(char *line, size_t *used, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    line_add_va(line, used, format, args);
    va_end(args);
}

/* Text of a peer may stand in a value: it must not be able to start a line of its own. */
static void line_clean(char *line, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
}

static void line_write(const char *line, size_t bytes)
{
    /* One write per line, so that lines of threads and processes do not mix.  There is nobody to
     * tell if stderr is gone. */
    ssize_t written;
    do {
        written = write(STDERR_FILENO, line, bytes);
    } while (written < 0 && errno == EINTR);
}

void log_event(struct log_site *site, enum log_level level, enum log_group group,
               const char *message, const char *format, ...)
{
    CHECK(site != NULL && message != NULL && format != NULL);
    CHECK((unsigned)level <= LOG_DEBUG);
    CHECK((unsigned)group < LOG_GROUP_COUNT);
    if ((int)level > atomic_load_explicit(&log_level_now, memory_order_relaxed))
        return;
    int errno_kept = errno;
    uint64_t now_us = clock_unix_us();
    unsigned repeats;
    if (!site_admit(site, now_us / 1000000u, &repeats))
        return;

    char line[LOG_LINE_BYTES + 1];
    size_t used = 0;
    time_t second = (time_t)(now_us / 1000000u);
    struct tm parts;
    gmtime_r(&second, &parts);
    used += strftime(line, LOG_LINE_BYTES, "%Y-%m-%dT%H:%M:%S", &parts);
    line_add(line, &used, ".%03uZ %s %s %s \"%s\"", (unsigned)(now_us / 1000u % 1000u),
             level_names[level], log_process, group_names[group], message);
    if (repeats > 0)
        line_add(line, &used, " repeats=%u", repeats);
    if (format[0] != '\0') {
        line_add(line, &used, " ");
        va_list args;
        va_start(args, format);
        line_add_va(line, &used, format, args);
        va_end(args);
    }
    line_clean(line, 0, used);
    line[used++] = '\n';
    line_write(line, used);
    errno = errno_kept;
}
