/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/args.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

static const struct tool_option *find_option(const struct tool_option *options, size_t count,
                                             const char *name, size_t bytes)
{
    for (size_t i = 0; i < count; i++)
        if (strlen(options[i].name) == bytes && memcmp(options[i].name, name, bytes) == 0)
            return &options[i];
    return NULL;
}

/* *index stands on the option; it is moved over a value that stands apart. */
static enum err take_option(int argc, char **argv, int *index, const struct tool_option *options,
                            size_t count, struct err_detail *detail)
{
    const char *name = argv[*index] + 2, *equals = strchr(name, '=');
    size_t bytes = equals != NULL ? (size_t)(equals - name) : strlen(name);
    const struct tool_option *o = find_option(options, count, name, bytes);
    if (o == NULL)
        return err_set(detail, ERR_INVALID, "unknown option %s", argv[*index]);
    if (o->flag != NULL) {
        if (equals != NULL)
            return err_set(detail, ERR_INVALID, "--%s takes no value", o->name);
        *o->flag = true;
        return ERR_OK;
    }
    CHECK(o->value != NULL);
    if (equals == NULL && *index + 1 >= argc)
        return err_set(detail, ERR_INVALID, "--%s needs a value", o->name);
    *o->value = equals != NULL ? equals + 1 : argv[++*index];
    return ERR_OK;
}

enum err tool_args_places(int argc, char **argv, const struct tool_option *options, size_t count,
                          const char *const *names, const char **ret_places, size_t place_count,
                          struct err_detail *detail)
{
    size_t found = 0;
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) == 0)
            TRY(take_option(argc, argv, &i, options, count, detail));
        else if (found < place_count)
            ret_places[found++] = argv[i];
        else
            return err_set(detail, ERR_INVALID, "unexpected argument %s", argv[i]);
    }
    if (found < place_count)
        return err_set(detail, ERR_INVALID, "%s is missing", names[found]);
    return ERR_OK;
}

enum err tool_args(int argc, char **argv, const struct tool_option *options, size_t count,
                   const char **ret_directory, struct err_detail *detail)
{
    static const char *const names[] = {"the model directory"};
    return tool_args_places(argc, argv, options, count, names, ret_directory, 1, detail);
}

enum err tool_u64(const char *name, const char *text, uint64_t low, uint64_t high, uint64_t *value,
                  struct err_detail *detail)
{
    uint64_t parsed = 0;
    if (text == NULL)
        return ERR_OK;
    if (!text_to_u64(text, strlen(text), &parsed) || parsed < low || parsed > high)
        return err_set(detail, ERR_INVALID, "--%s: a number from %llu to %llu, not \"%s\"", name,
                       (unsigned long long)low, (unsigned long long)high, text);
    *value = parsed;
    return ERR_OK;
}

enum err tool_f64(const char *name, const char *text, double low, double high, double *value,
                  struct err_detail *detail)
{
    double parsed = 0;
    if (text == NULL)
        return ERR_OK;
    if (!text_to_f64(text, strlen(text), &parsed) || !(parsed >= low && parsed <= high))
        return err_set(detail, ERR_INVALID, "--%s: a number from %g to %g, not \"%s\"", name, low,
                       high, text);
    *value = parsed;
    return ERR_OK;
}
