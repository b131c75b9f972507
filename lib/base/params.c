/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/params.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/hash.h"
#include "lib/base/json.h"
#include "lib/base/log.h"
#include "lib/base/params_file.h"
#include "lib/base/str.h"

#define PARAM_COUNT_MAX 512u

static const struct param *param_find(const struct param *table, size_t count, const char *name,
                                      size_t name_bytes)
{
    for (size_t i = 0; i < count; i++)
        if (strlen(table[i].name) == name_bytes && memcmp(table[i].name, name, name_bytes) == 0)
            return &table[i];
    return NULL;
}

static bool bool_parse(const char *text, size_t bytes, bool *ret_value)
{
    static const char *const words[] = {"false", "true", "0", "1", "off", "on", "no", "yes"};
    for (size_t i = 0; i < ARRAY_COUNT(words); i++)
        if (strlen(words[i]) == bytes && memcmp(words[i], text, bytes) == 0) {
            *ret_value = i % 2 == 1;
            return true;
        }
    return false;
}

/* Bounds of 0 and 0 mean: whatever the type holds. */
static bool in_range(const struct param *p, double value)
{
    return (p->min == 0 && p->max == 0) || (value >= p->min && value <= p->max);
}

static size_t str_bytes_max(const struct param *p)
{
    return p->max > 0 && p->max < PARAM_STR_BYTES ? (size_t)p->max : PARAM_STR_BYTES - 1;
}

/* Says in ret_why what is wrong with the value. */
static bool value_set(const struct param *p, void *object, const char *text, size_t bytes,
                      char *ret_why, size_t why_bytes)
{
    void *field = (char *)object + p->offset;
    uint64_t integer;
    double number;
    switch (p->type) {
    case PARAM_u32:
    case PARAM_u64:
        if (!text_to_u64(text, bytes, &integer) || (p->type == PARAM_u32 && integer > UINT32_MAX)) {
            snprintf(ret_why, why_bytes, "not a whole number");
            return false;
        }
        number = (double)integer;
        if (!in_range(p, number))
            break;
        if (p->type == PARAM_u32)
            *(uint32_t *)field = (uint32_t)integer;
        else
            *(uint64_t *)field = integer;
        return true;
    case PARAM_f64:
        if (!text_to_f64(text, bytes, &number)) {
            snprintf(ret_why, why_bytes, "not a number");
            return false;
        }
        if (!in_range(p, number))
            break;
        *(double *)field = number;
        return true;
    case PARAM_bool:
        if (bool_parse(text, bytes, field))
            return true;
        snprintf(ret_why, why_bytes, "neither true nor false");
        return false;
    case PARAM_str:
        if (bytes > str_bytes_max(p)) {
            snprintf(ret_why, why_bytes, "longer than %zu bytes", str_bytes_max(p));
            return false;
        }
        if (memchr(text, '\0', bytes) != NULL || utf8_valid_prefix(text, bytes) != bytes) {
            snprintf(ret_why, why_bytes, "not UTF-8 text");
            return false;
        }
        memset(field, 0, PARAM_STR_BYTES);
        memcpy(field, text, bytes);
        return true;
    }
    snprintf(ret_why, why_bytes, "out of range %.17g to %.17g", p->min, p->max);
    return false;
}

/* All faults in one text; what does not fit is counted. */
struct faults {
    struct err_detail *detail;
    size_t used;
    unsigned count;
    unsigned left_out;
};

#define FAULTS_TAIL_BYTES 32u /* kept free for "and N more" */

static void fault_add(void *arg, const char *text)
{
    struct faults *f = arg;
    size_t bytes = strlen(text);
    size_t room = sizeof f->detail->text - FAULTS_TAIL_BYTES;
    f->count++;
    if (f->left_out > 0 || f->used + bytes + 2 > room) {
        f->left_out++;
        snprintf(f->detail->text + f->used, sizeof f->detail->text - f->used, "\nand %u more",
                 f->left_out);
        return;
    }
    f->used += (size_t)snprintf(f->detail->text + f->used, room - f->used, "%s%s",
                                f->used > 0 ? "\n" : "", text);
    CHECK(f->used < room);
}

struct load {
    const struct param *table;
    size_t count;
    void *object;
    struct faults faults;
    bool seen[PARAM_COUNT_MAX]; /* in the present file */
};

/* where: "FILE:LINE" or "". */
static void assign(struct load *l, const char *where, bool once, const char *name,
                   size_t name_bytes, const char *value, size_t value_bytes)
{
    char text[320];
    char why[96];
    const char *colon = where[0] == '\0' ? "" : ": ";
    const char *dashes = where[0] == '\0' ? "--" : "";
    int shown = name_bytes > 64 ? 64 : (int)name_bytes;
    const struct param *p = param_find(l->table, l->count, name, name_bytes);
    if (p == NULL) {
        snprintf(text, sizeof text, "%s%s%s%.*s: no such parameter", where, colon, dashes, shown,
                 name);
        fault_add(&l->faults, text);
        return;
    }
    bool *seen = &l->seen[p - l->table];
    if (once && *seen) {
        snprintf(text, sizeof text, "%s%s%s: given twice", where, colon, p->name);
        fault_add(&l->faults, text);
        return;
    }
    *seen = true;
    if (!value_set(p, l->object, value, value_bytes, why, sizeof why)) {
        int value_shown = value_bytes > 64 ? 64 : (int)value_bytes;
        snprintf(text, sizeof text, "%s%s%s%s: \"%.*s\" is %s", where, colon, dashes, p->name,
                 value_shown, value, why);
        fault_add(&l->faults, text);
    }
}

static void assign_from_file(void *arg, const char *where, const char *name, size_t name_bytes,
                             const char *value, size_t value_bytes)
{
    assign(arg, where, true, name, name_bytes, value, value_bytes);
}

static void fault_from_file(void *arg, const char *text)
{
    struct load *l = arg;
    fault_add(&l->faults, text);
}

static void defaults_set(struct load *l)
{
    CHECK(l->count <= PARAM_COUNT_MAX);
    for (size_t i = 0; i < l->count; i++) {
        const struct param *p = &l->table[i];
        char why[96];
        CHECK(p->name != NULL && p->default_text != NULL);
        CHECK(param_find(l->table, l->count, p->name, strlen(p->name)) == p);
        CHECK(value_set(p, l->object, p->default_text, strlen(p->default_text), why, sizeof why));
    }
}

static bool is_config(const char *argument)
{
    return strncmp(argument, "--config=", 9) == 0;
}

static void argument_assign(struct load *l, const char *argument)
{
    const char *equals = strchr(argument, '=');
    if (strncmp(argument, "--", 2) != 0 || equals == NULL || equals == argument + 2) {
        char text[160];
        snprintf(text, sizeof text, "%.100s: want --name=value", argument);
        fault_add(&l->faults, text);
        return;
    }
    assign(l, "", false, argument + 2, (size_t)(equals - argument) - 2, equals + 1,
           strlen(equals + 1));
}

static void print_and_exit(const struct param *table, size_t count, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            params_help(table, count, stdout);
            exit(0);
        }
        if (strcmp(argv[i], "--version") == 0) {
            printf("tandem %s\n", TANDEM_VERSION);
            exit(0);
        }
    }
}

enum err params_load(const struct param *table, size_t count, void *object, int argc, char **argv,
                     struct err_detail *ret_faults)
{
    CHECK(table != NULL && object != NULL && argv != NULL);
    CHECK(ret_faults != NULL);
    print_and_exit(table, count, argc, argv);
    struct load l = {.table = table, .count = count, .object = object, .faults.detail = ret_faults};
    defaults_set(&l);
    for (int i = 1; i < argc; i++)
        if (is_config(argv[i])) {
            memset(l.seen, 0, sizeof l.seen);
            params_file_read(argv[i] + 9, assign_from_file, fault_from_file, &l);
        }
    for (int i = 1; i < argc; i++)
        if (!is_config(argv[i]))
            argument_assign(&l, argv[i]);
    return l.faults.count == 0 ? ERR_OK : ERR_INVALID;
}

static void value_print(const struct param *p, const void *object, char *ret_text, size_t ret_bytes)
{
    const void *field = (const char *)object + p->offset;
    struct str number;
    switch (p->type) {
    case PARAM_u32:
        snprintf(ret_text, ret_bytes, "%" PRIu32, *(const uint32_t *)field);
        return;
    case PARAM_u64:
        snprintf(ret_text, ret_bytes, "%" PRIu64, *(const uint64_t *)field);
        return;
    case PARAM_bool:
        snprintf(ret_text, ret_bytes, "%s", *(const bool *)field ? "true" : "false");
        return;
    case PARAM_f64:
        str_init(&number, 0);
        json_write_f64(&number, *(const double *)field);
        CHECK(number.text != NULL);
        snprintf(ret_text, ret_bytes, "%s", number.text);
        str_fini(&number);
        return;
    case PARAM_str:
        snprintf(ret_text, ret_bytes, "%s", (const char *)field);
        return;
    }
    CHECK(!"parameter type");
}

bool params_print(const struct param *table, size_t count, const void *object, const char *name,
                  char *ret_text, size_t ret_bytes)
{
    CHECK(object != NULL && name != NULL);
    CHECK(ret_text != NULL && ret_bytes > 0);
    const struct param *p = param_find(table, count, name, strlen(name));
    if (p == NULL)
        return false;
    value_print(p, object, ret_text, ret_bytes);
    return true;
}

static bool is_skipped(const char *name, const char *const *skip)
{
    for (; skip != NULL && *skip != NULL; skip++)
        if (strcmp(name, *skip) == 0)
            return true;
    return false;
}

void params_hash(const struct param *table, size_t count, const void *object,
                 const char *const *skip, char ret_hex[33])
{
    CHECK(table != NULL && object != NULL && ret_hex != NULL);
    struct hash_xxh3 hash;
    hash_xxh3_init(&hash);
    for (size_t i = 0; i < count; i++) {
        if (is_skipped(table[i].name, skip))
            continue;
        char text[PARAM_STR_BYTES];
        value_print(&table[i], object, text, sizeof text);
        /* With the NULs, so that two pairs cannot run together into a third. */
        hash_xxh3_add(&hash, table[i].name, strlen(table[i].name) + 1);
        hash_xxh3_add(&hash, text, strlen(text) + 1);
    }
    struct hash128 result = hash_xxh3_end(&hash);
    hex_encode(result.bytes, sizeof result.bytes, ret_hex);
}

void params_log(const struct param *table, size_t count, const void *object)
{
    CHECK(table != NULL && object != NULL);
    for (size_t i = 0; i < count; i++) {
        char text[PARAM_STR_BYTES];
        value_print(&table[i], object, text, sizeof text);
        bool quote = text[0] == '\0' || strpbrk(text, " \"=") != NULL;
        /* A site of its own for each: a long table is no repetition. */
        struct log_site site = {0};
        log_event(&site, LOG_INFO, LOG_PARAM, "value", quote ? "%s=\"%s\"" : "%s=%s", table[i].name,
                  text);
    }
}
