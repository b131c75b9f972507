/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "lib/base/check.h"

struct err_row {
    const char *name;
    const char *text;
    bool retryable;
    int http_status;
};

static const struct err_row err_rows[] = {
#define ERR(code, text_, retry, http) [code] = {#code, text_, retry, http},
#include "lib/base/err.def"
#undef ERR
};

STATIC_CHECK(ARRAY_COUNT(err_rows) == ERR_COUNT);
STATIC_CHECK(ERR_OK == 0);

/* A code may come from a newer peer, so a value outside the table is answered, not asserted on. */
static const struct err_row err_row_unknown = {"ERR_?", "unknown error", false, 500};

static const struct err_row *err_row_of(enum err e)
{
    if ((unsigned)e >= ERR_COUNT)
        return &err_row_unknown;
    return &err_rows[e];
}

const char *err_name(enum err e)
{
    return err_row_of(e)->name;
}

const char *err_text(enum err e)
{
    return err_row_of(e)->text;
}

bool err_retryable(enum err e)
{
    return err_row_of(e)->retryable;
}

int err_http_status(enum err e)
{
    return err_row_of(e)->http_status;
}

enum err err_set(struct err_detail *detail, enum err e, const char *format, ...)
{
    CHECK(format != NULL);
    CHECK(e != ERR_OK);
    if (detail == NULL)
        return e;
    va_list args;
    va_start(args, format);
    int count = vsnprintf(detail->text, sizeof detail->text, format, args);
    va_end(args);
    CHECK(count >= 0);
    return e;
}

void die(const char *format, ...)
{
    CHECK(format != NULL);
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(2);
}
