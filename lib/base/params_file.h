/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/params_file.h - configuration files and the help text; for params.c only.
 *
 * Start-up only.  A file holds at most 1 MiB, a line at most 4095 bytes. */
#ifndef LIB_BASE_PARAMS_FILE_H
#define LIB_BASE_PARAMS_FILE_H

#include <stddef.h>
#include <stdio.h>

struct param;

/* where is "FILE:LINE". */
typedef void (*params_value_fn)(void *arg, const char *where, const char *name, size_t name_bytes,
                                const char *value, size_t value_bytes);
typedef void (*params_fault_fn)(void *arg, const char *text);

/* Calls back once for each `name = value` and once for each fault, in the order of the lines. */
void params_file_read(const char *path, params_value_fn value, params_fault_fn fault, void *arg);

/* Prints the table for --help. */
void params_help(const struct param *table, size_t count, FILE *out);

#endif
