/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_options.h - the command line.
 *
 * Start-up only.  Names and bounds stand in bench_options.def. */
#ifndef TESTS_BENCH_BENCH_OPTIONS_H
#define TESTS_BENCH_BENCH_OPTIONS_H

#include <stdint.h>

#include "lib/base/err.h"

#define BENCH_SETS_MAX    16u
#define BENCH_OPTION_u32  uint32_t
#define BENCH_OPTION_u64  uint64_t
#define BENCH_OPTION_f64  double
#define BENCH_OPTION_str  const char *
#define BENCH_OPTION_flag uint32_t

struct bench_options {
#define BENCH_OPTION(name, type, ...) BENCH_OPTION_##type name;
#include "tests/bench/bench_options.def"
#undef BENCH_OPTION
    const char *ab[2]; /* both or none */
    uint32_t set_count;
    const char *sets[BENCH_SETS_MAX];
};

/* Borrows argv.  --help and --version print and exit with 0. */
MUST_USE enum err bench_options_parse(int argc, char **argv, struct bench_options *ret_options,
                                      struct err_detail *detail);

#endif
