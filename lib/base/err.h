/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/err.h - the three kinds of error: enum err (the world), CHECK (check.h), die().
 *
 * Pure but for die().  Codes live in err.def; the values travel on the wire. */
#ifndef LIB_BASE_ERR_H
#define LIB_BASE_ERR_H

#include <stdbool.h>
#include <stddef.h>

#define MUST_USE          __attribute__((warn_unused_result))
#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))

enum err {
#define ERR(code, text, retry, http) code,
#include "lib/base/err.def"
#undef ERR
    ERR_COUNT
};

/* Stable upper-case name ("ERR_BUSY"); "ERR_?" for a value outside the table. */
const char *err_name(enum err e);
const char *err_text(enum err e);
bool err_retryable(enum err e);
int err_http_status(enum err e);

/* What exactly was refused: filled beside an enum err wherever input comes from outside.
 * The text names the field, file or offset; it ends up in logs and in HTTP error messages. */
#define ERR_DETAIL_BYTES 512
struct err_detail {
    char text[ERR_DETAIL_BYTES];
};

/* Writes the message (truncated to fit, always terminated) and returns e, so that a refusal is
 * one line: return err_set(detail, ERR_INVALID, "hc_mult: %u, only 4 is supported", n);
 * detail may be NULL. */
enum err err_set(struct err_detail *detail, enum err e, const char *format, ...) PRINTF_LIKE(3, 4);

/* Returns early with the error.  Only where nothing is held; else use one out: label. */
#define TRY(expression)                                                                            \
    do {                                                                                           \
        enum err try_err_ = (expression);                                                          \
        if (try_err_ != ERR_OK)                                                                    \
            return try_err_;                                                                       \
    } while (0)

/* Start-up only, in main.c: prints "NAME: message" to stderr and exits with 2. */
_Noreturn void die(const char *format, ...) PRINTF_LIKE(1, 2);

#endif
