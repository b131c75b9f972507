/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/args.h - the command line of a subcommand: options by name and one directory.
 *
 * Pure.  Accepts --name value and --name=value; a flag takes no value. */
#ifndef LIB_MODEL_TOOL_ARGS_H
#define LIB_MODEL_TOOL_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct tool_option {
    const char *name;   /* without the dashes */
    const char **value; /* NULL for a flag */
    bool *flag;
};

/* Options not given leave their place alone.  detail names what is wrong. */
MUST_USE enum err tool_args(int argc, char **argv, const struct tool_option *options, size_t count,
                            const char **ret_directory, struct err_detail *detail);

/* The same with place_count things in order, all of them needed; names say what is missing. */
MUST_USE enum err tool_args_places(int argc, char **argv, const struct tool_option *options,
                                   size_t count, const char *const *names, const char **ret_places,
                                   size_t place_count, struct err_detail *detail);

/* text NULL: the default stays in *value. */
MUST_USE enum err tool_u64(const char *name, const char *text, uint64_t low, uint64_t high,
                           uint64_t *value, struct err_detail *detail);
MUST_USE enum err tool_f64(const char *name, const char *text, double low, double high,
                           double *value, struct err_detail *detail);

#endif
