/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/params_file.h"

#include <errno.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/params.h"

#define FILE_BYTES_MAX (1u << 20)
#define LINE_BYTES     4096u
#define WHERE_BYTES    160u
#define HELP_COLUMNS   80
#define HELP_INDENT    6

struct file {
    char where[WHERE_BYTES];
    params_value_fn value;
    params_fault_fn fault;
    void *arg;
};

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

static void file_fault(const struct file *f, const char *what)
{
    char text[WHERE_BYTES + 128];
    snprintf(text, sizeof text, "%s: %s", f->where, what);
    f->fault(f->arg, text);
}

/* A quoted value ends at the next quote; there are no escapes.  Then only blanks or a comment
 * may follow.  A bare value ends at " #" or the end of the line. */
static const char *value_cut(char **begin_p, char **end_p)
{
    char *begin = *begin_p;
    char *end = *end_p;
    CHECK(begin <= end);
    if (begin < end && *begin == '"') {
        begin++;
        char *quote = memchr(begin, '"', (size_t)(end - begin));
        if (quote == NULL)
            return "closing quote missing";
        char *rest = quote + 1;
        while (rest < end && is_space(*rest))
            rest++;
        if (rest < end && *rest != '#')
            return "text after the closing quote";
        end = quote;
    } else {
        for (char *p = begin; p < end; p++)
            if (*p == '#' && (p == begin || is_space(p[-1]))) {
                end = p;
                break;
            }
        while (end > begin && is_space(end[-1]))
            end--;
    }
    *begin_p = begin;
    *end_p = end;
    return NULL;
}

static void line_read(const struct file *f, char *line, size_t bytes)
{
    char *at = line;
    char *end = line + bytes;
    while (at < end && is_space(*at))
        at++;
    if (at == end || *at == '#')
        return;
    char *equals = memchr(at, '=', (size_t)(end - at));
    if (equals == NULL || equals == at) {
        file_fault(f, "want name = value");
        return;
    }
    char *name_end = equals;
    while (name_end > at && is_space(name_end[-1]))
        name_end--;
    char *value = equals + 1;
    while (value < end && is_space(*value))
        value++;
    const char *wrong = value_cut(&value, &end);
    if (wrong != NULL) {
        file_fault(f, wrong);
        return;
    }
    CHECK(name_end >= at && value <= end);
    f->value(f->arg, f->where, at, (size_t)(name_end - at), value, (size_t)(end - value));
}

static void lines_read(struct file *f, const char *path, FILE *stream)
{
    char line[LINE_BYTES];
    size_t total = 0;
    for (unsigned number = 1; fgets(line, sizeof line, stream) != NULL; number++) {
        size_t bytes = strlen(line);
        total += bytes;
        snprintf(f->where, sizeof f->where, "%.*s:%u", (int)(sizeof f->where - 16), path, number);
        if (total > FILE_BYTES_MAX) {
            file_fault(f, "file longer than 1 MiB");
            return;
        }
        if (bytes > 0 && line[bytes - 1] == '\n') {
            bytes--;
        } else if (!feof(stream)) {
            /* Either too long or with a NUL in it: what follows cannot be told apart. */
            file_fault(f, "line longer than 4095 bytes, or not text");
            return;
        }
        line_read(f, line, bytes);
    }
    if (ferror(stream))
        file_fault(f, strerror(errno));
}

void params_file_read(const char *path, params_value_fn value, params_fault_fn fault, void *arg)
{
    CHECK(path != NULL && value != NULL && fault != NULL);
    struct file f = {.value = value, .fault = fault, .arg = arg};
    snprintf(f.where, sizeof f.where, "--config=%.*s", (int)(sizeof f.where - 16), path);
    FILE *stream = fopen(path, "re");
    if (stream == NULL) {
        file_fault(&f, strerror(errno));
        return;
    }
    lines_read(&f, path, stream);
    fclose(stream);
}

static void help_wrapped(FILE *out, const char *text)
{
    int column = 0;
    while (*text != '\0') {
        int bytes = (int)strcspn(text, " ");
        if (column > 0 && column + 1 + bytes > HELP_COLUMNS) {
            fputc('\n', out);
            column = 0;
        }
        if (column == 0)
            column = fprintf(out, "%*s", HELP_INDENT, "");
        else
            column += fprintf(out, " ");
        column += fprintf(out, "%.*s", bytes, text);
        text += bytes;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static void help_row(FILE *out, const struct param *p)
{
    static const char *const types[] = {"number", "number", "true|false", "number", "text"};
    STATIC_CHECK(PARAM_str == 4);
    CHECK((size_t)p->type < ARRAY_COUNT(types));
    CHECK(p->help != NULL && p->unit != NULL);
    fprintf(out, "  --%s=%s", p->name, p->unit[0] != '\0' ? p->unit : types[p->type]);
    const char *shown = p->default_text;
    if (p->type == PARAM_bool)
        shown = strcmp(shown, "1") == 0 || strcmp(shown, "true") == 0 ? "true" : "false";
    fprintf(out, "  [%s%s%s", p->type == PARAM_str ? "\"" : "", shown,
            p->type == PARAM_str ? "\"" : "");
    bool ranged = p->type != PARAM_str && p->type != PARAM_bool && (p->min != 0 || p->max != 0);
    if (ranged)
        fprintf(out, "; %.15g to %.15g", p->min, p->max);
    fprintf(out, "%s]\n", p->apply == PARAM_LIVE ? "; live" : "");
    help_wrapped(out, p->help);
}

void params_help(const struct param *table, size_t count, FILE *out)
{
    CHECK(table != NULL || count == 0);
    CHECK(out != NULL);
    fprintf(out,
            "%s (tandem %s)\n\n"
            "  --config=FILE\n"
            "      Reads name = value lines; may be given more than once.\n"
            "  --help, --version\n\n"
            "Parameters [default; range; \"live\" if it can change while running]:\n\n",
            program_invocation_short_name, TANDEM_VERSION);
    for (size_t i = 0; i < count; i++)
        help_row(out, &table[i]);
}
