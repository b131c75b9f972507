/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/check.h - assertions about our own code; on in release.
 *
 * Never used on bytes from outside: those get an enum err.  A failed CHECK prints file, line,
 * expression and a backtrace to stderr, then aborts. */
#ifndef LIB_BASE_CHECK_H
#define LIB_BASE_CHECK_H

#include <stddef.h>

_Noreturn void check_failed(const char *file, int line, const char *function,
                            const char *expression);

#define CHECK(expression)                                                                          \
    do {                                                                                           \
        if (__builtin_expect(!(expression), 0))                                                    \
            check_failed(__FILE__, __LINE__, __func__, #expression);                               \
    } while (0)

#ifdef TANDEM_HOT_CHECKS
#define DCHECK(expression) CHECK(expression)
#else
#define DCHECK(expression) ((void)sizeof(expression))
#endif

/* Objects begin with `uint32_t magic`; every function that receives one checks it. */
#define CHECK_OBJ(pointer, value)                                                                  \
    do {                                                                                           \
        CHECK((pointer) != NULL);                                                                  \
        CHECK((pointer)->magic == (value));                                                        \
    } while (0)

#define STATIC_CHECK(expression) _Static_assert(expression, #expression)

#define ARRAY_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
