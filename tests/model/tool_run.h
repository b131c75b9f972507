/* SPDX-License-Identifier: Apache-2.0 */
/* tests/model/tool_run.h - runs tandem-model as a user would, in a directory of the test's own.
 *
 * Include after cmocka.h.  For tests only; one thread. */
#ifndef TESTS_MODEL_TOOL_RUN_H
#define TESTS_MODEL_TOOL_RUN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "lib/model/safetensors.h"

/* Runs "tandem-model ARGUMENTS" in the source's root; it must end with the status.  Returns its
 * output, stderr included, until the next call. */
static inline const char *tool(int want, const char *format, ...)
{
    static char out[1 << 20];
    char arguments[4096], command[8192];
    const char *build = getenv("TANDEM_BUILD_ROOT"), *source = getenv("TANDEM_SOURCE_ROOT");
    va_list values;
    assert_non_null(build);
    assert_non_null(source);
    va_start(values, format);
    vsnprintf(arguments, sizeof(arguments), format, values);
    va_end(values);
    snprintf(command, sizeof(command),
             "cd '%s' && PATH='%s/lib/model/tool':$PATH && { tandem-model %s; } 2>&1", source,
             build, arguments);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    size_t got = fread(out, 1, sizeof(out) - 1, f);
    out[got] = '\0';
    int status = pclose(f);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != want)
        fail_msg("%s: status %x, not %d: %s", arguments, (unsigned)status, want, out);
    return out;
}

/* mkdtemp below the build root's temporary directory; removed by scratch_fini. */
static inline void scratch_init(char ret_path[256])
{
    const char *base = getenv("TMPDIR");
    snprintf(ret_path, 256, "%s/tandem-test-XXXXXX", base != NULL ? base : P_tmpdir);
    assert_non_null(mkdtemp(ret_path));
}

static inline void scratch_fini(const char *path)
{
    char command[512];
    snprintf(command, sizeof(command), "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static inline bool same_files(const char *a, const char *b)
{
    char command[4096];
    snprintf(command, sizeof(command), "cd '%s' && cmp -s '%s' '%s'", getenv("TANDEM_SOURCE_ROOT"),
             a, b);
    return system(command) == 0;
}

/* A directory below the source's root, or an absolute one. */
static inline struct safetensors *open_checkpoint(const char *directory)
{
    struct safetensors *set = NULL;
    char path[4096];
    if (directory[0] != '/') {
        snprintf(path, sizeof(path), "%s/%s", getenv("TANDEM_SOURCE_ROOT"), directory);
        directory = path;
    }
    struct err_detail detail = {{0}};
    if (safetensors_open_directory(directory, &set, &detail) != ERR_OK)
        fail_msg("%s: %s", directory, detail.text);
    return set;
}

#endif
