/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_options.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

enum option_type { OPTION_u32, OPTION_u64, OPTION_f64, OPTION_str, OPTION_flag };

struct option_row {
    const char *name;
    enum option_type type;
    const char *default_text;
    double min, max;
    const char *unit, *help;
    size_t offset;
};

/* Texts of defaults: a string's own, a number's spelling. */
#define TEXT_u32(d)  #d
#define TEXT_u64(d)  #d
#define TEXT_f64(d)  #d
#define TEXT_str(d)  d
#define TEXT_flag(d) #d

static const struct option_row rows[] = {
#define BENCH_OPTION(name_, type_, def_, min_, max_, unit_, help_)                                 \
    {#name_,                                                                                       \
     OPTION_##type_,                                                                               \
     TEXT_##type_(def_),                                                                           \
     min_,                                                                                         \
     max_,                                                                                         \
     unit_,                                                                                        \
     help_,                                                                                        \
     offsetof(struct bench_options, name_)},
#include "tests/bench/bench_options.def"
#undef BENCH_OPTION
};

static void option_name(const char *name, char ret_text[40])
{
    size_t n = 0;
    for (; name[n] != '\0' && n < 39; n++)
        ret_text[n] = name[n] == '_' ? '-' : name[n];
    ret_text[n] = '\0';
}

static _Noreturn void print_help(void)
{
    printf("tandem-bench [--OPTION VALUE]... - load generator for OpenAI-compatible servers\n\n");
    for (size_t i = 0; i < ARRAY_COUNT(rows); i++) {
        char name[40];
        option_name(rows[i].name, name);
        printf("  --%-14s %s", name, rows[i].help);
        if (rows[i].type != OPTION_flag && rows[i].default_text[0] != '\0')
            printf(" [%s%s%s]", rows[i].default_text, rows[i].unit[0] ? " " : "", rows[i].unit);
        printf("\n");
    }
    printf("  --%-14s %s\n  --%-14s %s\n", "set K=V[,K=V]", "Further members of the request body.",
           "ab A B",
           "Compare two settings of the body, as \"spec=fixed:7\" \"spec=ema\": same prompts and "
           "seeds,\n                   runs in turn, bootstrap intervals.");
    printf("\nThe key of the server comes from TANDEM_API_KEY.  Members of a JSON prompt line win "
           "over options.\nExit status: 0, 1 after an error of any stream, 2 for a bad command "
           "line.\n");
    exit(0);
}

static enum err set_value(struct bench_options *o, const struct option_row *row, const char *text,
                          struct err_detail *detail)
{
    char *at = (char *)o + row->offset, name[40];
    option_name(row->name, name);
    size_t bytes = strlen(text);
    uint64_t whole = 0;
    double number = 0;
    bool good = true;
    switch (row->type) {
    case OPTION_str:
        if ((double)bytes > row->max)
            return err_set(detail, ERR_INVALID, "--%s: over %.0f bytes", name, row->max);
        *(const char **)(void *)at = text;
        return ERR_OK;
    case OPTION_flag:
    case OPTION_u32:
    case OPTION_u64:
        good = text_to_u64(text, bytes, &whole);
        number = (double)whole;
        break;
    case OPTION_f64:
        good = text_to_f64(text, bytes, &number);
        break;
    }
    if (row->type == OPTION_flag ? whole > 1 : !good || number < row->min || number > row->max)
        return err_set(detail, ERR_INVALID, "--%s: \"%.40s\" is not a number from %.16g to %.16g",
                       name, text, row->min, row->max);
    if (row->type == OPTION_f64)
        *(double *)(void *)at = number;
    else if (row->type == OPTION_u64)
        *(uint64_t *)(void *)at = whole;
    else
        *(uint32_t *)(void *)at = (uint32_t)whole;
    return ERR_OK;
}

static const struct option_row *find_row(const char *name, size_t bytes)
{
    for (size_t i = 0; i < ARRAY_COUNT(rows); i++) {
        char text[40];
        option_name(rows[i].name, text);
        if (strlen(text) == bytes && memcmp(text, name, bytes) == 0)
            return &rows[i];
    }
    return NULL;
}

static enum err check_together(const struct bench_options *o, struct err_detail *detail)
{
    if (o->requests > 0 && o->seconds > 0)
        return err_set(detail, ERR_INVALID, "--requests and --seconds exclude each other");
    if (o->ab[0] != NULL && (o->solo_ratio || o->seconds > 0 || o->rate > 0))
        return err_set(detail, ERR_INVALID,
                       "--ab goes with --requests, not with --seconds, --rate or --solo-ratio");
    if (o->solo_ratio && (o->seconds > 0 || o->rate > 0 || o->requests > 0 || o->ramp > 0))
        return err_set(detail, ERR_INVALID,
                       "--solo-ratio goes with --rounds, not with --requests, --seconds, --rate or "
                       "--ramp");
    if (o->rate > 0 && o->ramp > 0)
        return err_set(detail, ERR_INVALID, "--rate and --ramp exclude each other");
    if (o->temperature < 0 && o->temperature != -1)
        return err_set(detail, ERR_INVALID, "--temperature: -1 or at least 0");
    return ERR_OK;
}

/* One option at argv[at]; *ret_used counts the arguments it took. */
static enum err parse_one(struct bench_options *o, int argc, char **argv, int at, int *ret_used,
                          struct err_detail *detail)
{
    const char *argument = argv[at];
    if (strncmp(argument, "--", 2) != 0)
        return err_set(detail, ERR_INVALID, "\"%.60s\" is no option", argument);
    const char *name = argument + 2, *equals = strchr(name, '=');
    size_t bytes = equals ? (size_t)(equals - name) : strlen(name);
    bool is_ab = bytes == 2 && memcmp(name, "ab", 2) == 0;
    bool is_set = bytes == 3 && memcmp(name, "set", 3) == 0;
    const struct option_row *row = find_row(name, bytes);
    *ret_used = 1;
    if (row == NULL && !is_ab && !is_set)
        return err_set(detail, ERR_INVALID, "--%.*s is no option", (int)bytes, name);
    if (row != NULL && row->type == OPTION_flag)
        return set_value(o, row, equals ? equals + 1 : "1", detail);
    if (is_ab) {
        if (equals != NULL || at + 2 >= argc)
            return err_set(detail, ERR_INVALID, "--ab takes two settings");
        o->ab[0] = argv[at + 1];
        o->ab[1] = argv[at + 2];
        *ret_used = 3;
        return ERR_OK;
    }
    const char *value = equals ? equals + 1 : at + 1 < argc ? argv[at + 1] : NULL;
    if (value == NULL)
        return err_set(detail, ERR_INVALID, "--%.*s has no value", (int)bytes, name);
    *ret_used = equals ? 1 : 2;
    if (row != NULL)
        return set_value(o, row, value, detail);
    if (o->set_count == BENCH_SETS_MAX)
        return err_set(detail, ERR_TOO_LARGE, "--set more than %u times", BENCH_SETS_MAX);
    o->sets[o->set_count++] = value;
    return ERR_OK;
}

enum err bench_options_parse(int argc, char **argv, struct bench_options *ret_options,
                             struct err_detail *detail)
{
    struct bench_options o;
    memset(&o, 0, sizeof(o));
    for (size_t i = 0; i < ARRAY_COUNT(rows); i++)
        CHECK(set_value(&o, &rows[i], rows[i].default_text, detail) == ERR_OK);
    for (int at = 1; at < argc;) {
        if (strcmp(argv[at], "--help") == 0)
            print_help();
        if (strcmp(argv[at], "--version") == 0) {
            printf("tandem %s\n", TANDEM_VERSION);
            exit(0);
        }
        int used = 0;
        TRY(parse_one(&o, argc, argv, at, &used, detail));
        CHECK(used > 0);
        at += used;
    }
    TRY(check_together(&o, detail));
    if (o.requests == 0 && o.seconds == 0)
        o.requests = 4ull * o.streams;
    *ret_options = o;
    return ERR_OK;
}
