/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/params.h - parameters of a process: an X-macro table, --name=value and files.
 *
 * Start-up only, loop thread.  A process writes its table in <role>/xx_params.def,
 *
 *     PARAM(queue_requests_max, u32, 1024, 1, 1000000, "requests", RESTART, "Sentence.")
 *     PARAM(listen, str, "127.0.0.1:8080", 0, 0, "address", RESTART, "Sentence.")
 *
 * and gets a struct and a description from it (see PARAM_STRUCT below; params_common.def first).
 * Sources in rising order: default, --config=FILE (name = value lines, # comments), --name=value.
 * Unknown names, bad values and values out of range are all reported at once.  --help prints the
 * table and exits 0; --version prints "tandem X" and exits 0.  Values are logged at start. */
#ifndef LIB_BASE_PARAMS_H
#define LIB_BASE_PARAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define PARAM_STR_BYTES 512
typedef char param_str[PARAM_STR_BYTES];

enum param_type { PARAM_u32, PARAM_u64, PARAM_bool, PARAM_f64, PARAM_str };
enum param_apply { PARAM_RESTART, PARAM_LIVE };

struct param {
    const char *name;
    enum param_type type;
    const char *default_text;
    double min, max; /* numbers; for str: max length, 0 = PARAM_STR_BYTES - 1 */
    const char *unit;
    enum param_apply apply;
    const char *help;
    size_t offset; /* in the process's struct */
};

#define PARAM_CTYPE_u32    uint32_t
#define PARAM_CTYPE_u64    uint64_t
#define PARAM_CTYPE_bool   bool
#define PARAM_CTYPE_f64    double
#define PARAM_CTYPE_str    param_str
#define PARAM_TEXT_u32(d)  #d
#define PARAM_TEXT_u64(d)  #d
#define PARAM_TEXT_bool(d) #d
#define PARAM_TEXT_f64(d)  #d
#define PARAM_TEXT_str(d)  d

/* bool is a macro of stdbool.h: behind a second macro it arrives as _Bool, true as 1. */
#define PARAM__Bool         PARAM_bool
#define PARAM_CTYPE__Bool   bool
#define PARAM_TEXT__Bool(d) #d

/* In the role's header:
 *     struct rt_params {
 *     #define PARAM(name, type, ...) PARAM_CTYPE_##type name;
 *     #include "lib/base/params_common.def"
 *     #include "router/rt_params.def"
 *     #undef PARAM
 *     };
 * In its main.c:
 *     #define PARAM(name, type, def, lo, hi, unit, apply, help) \
 *         PARAM_ROW(struct rt_params, name, type, def, lo, hi, unit, apply, help)
 *     static const struct param rt_param_table[] = { #include ... };                          */
#define PARAM_ROW(structure, name_, type_, def_, lo_, hi_, unit_, apply_, help_)                   \
    {#name_,         PARAM_##type_, PARAM_TEXT_##type_(def_),  lo_, hi_, unit_,                    \
     PARAM_##apply_, help_,         offsetof(structure, name_)},

/* Fills `object` from defaults, files and arguments.  On ERR_INVALID ret_faults holds every
 * fault, one a line.  Arguments other than --name=value are faults.  --help and --version print
 * and exit. */
MUST_USE enum err params_load(const struct param *table, size_t count, void *object, int argc,
                              char **argv, struct err_detail *ret_faults);

/* One value by name, as the command line would spell it; false for an unknown name. */
bool params_print(const struct param *table, size_t count, const void *object, const char *name,
                  char *ret_text, size_t ret_bytes);

/* xxh3-128 over all effective values, hex: the receipt's config_hash.  Names in skip (may be
 * NULL, NULL-terminated) do not count. */
void params_hash(const struct param *table, size_t count, const void *object,
                 const char *const *skip, char ret_hex[33]);

void params_log(const struct param *table, size_t count, const void *object);

#endif
