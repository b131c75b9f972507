/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/check.h"

#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Frames below the one that failed; enough to name the event handler and the loop. */
#define CHECK_FRAMES_MAX 64

void check_failed(const char *file, int line, const char *function, const char *expression)
{
    /* A check that fails while this one is being printed must not loop. */
    static _Thread_local int depth;
    if (depth++ > 0)
        abort();

    /* No heap and no stdio buffer: the failed check may be about exactly those. */
    char text[1024];
    int count = snprintf(text, sizeof text, "%s:%d: %s: CHECK(%s) failed\n", file, line, function,
                         expression);
    if (count > 0) {
        size_t bytes = (size_t)count < sizeof text ? (size_t)count : sizeof text - 1;
        ssize_t written = write(STDERR_FILENO, text, bytes);
        (void)written;
    }
    void *frames[CHECK_FRAMES_MAX];
    int frame_count = backtrace(frames, CHECK_FRAMES_MAX);
    backtrace_symbols_fd(frames, frame_count, STDERR_FILENO);
    abort();
}
