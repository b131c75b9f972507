/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_peers_sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

#define NAME_BYTES_MAX  512u
#define VALUE_BYTES_MAX 40u
#define LABELS_MAX      16u

static size_t name_bytes(const char *text, size_t bytes, bool colon)
{
    size_t n = 0;
    for (; n < bytes; n++) {
        char c = text[n];
        bool letter =
            (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (colon && c == ':');
        if (!letter && (n == 0 || c < '0' || c > '9'))
            break;
    }
    return n;
}

/* A label's quoted value at text, with its quotes; 0 = malformed. */
static size_t quoted_bytes(const char *text, size_t bytes)
{
    if (bytes < 2 || text[0] != '"')
        return 0;
    for (size_t i = 1; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"')
            return i + 1;
        if (c < ' ')
            return 0;
        if (c != '\\')
            continue;
        if (++i == bytes || (text[i] != '\\' && text[i] != '"' && text[i] != 'n'))
            return 0;
    }
    return 0;
}

struct labels {
    uint32_t count;
    struct {
        const char *text;
        size_t bytes;
    } names[LABELS_MAX];
    const char *le; /* where le's label starts, with the comma before it; NULL = none */
    size_t le_bytes;
    double le_value;
};

static bool has_label(const struct labels *l, const char *name, size_t bytes)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (l->names[i].bytes == bytes && memcmp(l->names[i].text, name, bytes) == 0)
            return true;
    return false;
}

static bool bound_check(const char *quoted, size_t bytes, double *ret)
{
    char text[VALUE_BYTES_MAX + 1], *end = NULL;
    if (bytes - 2 > VALUE_BYTES_MAX)
        return false;
    memcpy(text, quoted + 1, bytes - 2);
    text[bytes - 2] = '\0';
    *ret = strtod(text, &end);
    return end != text && *end == '\0' && !isnan(*ret);
}

/* Labels between the braces: name="value" with commas; le, if any, stands last. */
static bool labels_check(const char *text, size_t bytes, struct labels *ret)
{
    for (size_t at = 0; at < bytes;) {
        size_t begin = at ? at - 1 : at;
        size_t n = name_bytes(text + at, bytes - at, false);
        const char *name = text + at;
        if (n == 0 || at + n >= bytes || text[at + n] != '=' || ret->le ||
            ret->count == LABELS_MAX || has_label(ret, name, n))
            return false;
        ret->names[ret->count].text = name;
        ret->names[ret->count++].bytes = n;
        at += n + 1;
        size_t q = quoted_bytes(text + at, bytes - at);
        if (q == 0)
            return false;
        if (n == 2 && memcmp(name, "le", 2) == 0) {
            if (!bound_check(text + at, q, &ret->le_value))
                return false;
            ret->le = text + begin;
            ret->le_bytes = at + q - begin;
        }
        at += q;
        if (at == bytes)
            return true;
        if (text[at++] != ',' || at == bytes)
            return false;
    }
    return true;
}

static bool value_check(const char *text, size_t bytes)
{
    char copy[VALUE_BYTES_MAX + 1], *end = NULL;
    if (bytes == 0 || bytes > VALUE_BYTES_MAX || !strchr("+-.0123456789IN", text[0]))
        return false;
    for (size_t i = 0; i < bytes; i++)
        if (!strchr("0123456789+-.eEInfNa", text[i]))
            return false;
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    (void)strtod(copy, &end);
    return end != copy && *end == '\0';
}

static bool is_histogram(const char *help, const char *name, size_t bytes)
{
    for (const char *line = help; *line; line = strchr(line, '\n') + 1)
        if (strncmp(line, "# TYPE ", 7) == 0 && strncmp(line + 7, name, bytes) == 0 &&
            strncmp(line + 7 + bytes, " histogram\n", 11) == 0)
            return true;
    return false;
}

/* Bytes of the family's name, and which part of a histogram it is. */
static size_t family_bytes(const char *help, const char *name, size_t bytes, uint32_t *ret_part)
{
    static const char *const parts[] = {"_bucket", "_count", "_sum"};
    *ret_part = 0;
    for (uint32_t i = 0; i < ARRAY_COUNT(parts); i++) {
        size_t n = strlen(parts[i]);
        if (bytes <= n || memcmp(name + bytes - n, parts[i], n) != 0 ||
            !is_histogram(help, name, bytes - n))
            continue;
        *ret_part = i;
        return bytes - n;
    }
    return bytes;
}

static void write_line(const struct gw_sample_source *s, size_t head, const struct labels *l,
                       struct str *text, struct gw_sample *sample)
{
    bool vllm = head > 5 && memcmp(s->name, "vllm:", 5) == 0 && !has_label(l, "model_name", 10) &&
                !has_label(l, "engine", 6);
    size_t inner = s->name_bytes > head + 2 ? s->name_bytes - head - 2 : 0;
    sample->line_at = (uint32_t)text->bytes;
    str_add(text, s->name, head);
    str_add_format(text, "{process=\"%s\"", s->process);
    sample->labels_at = (uint32_t)(text->bytes - sample->line_at);
    if (vllm && s->vllm_labels[0])
        str_add_format(text, ",%s", s->vllm_labels);
    if (inner) {
        str_add_char(text, ',');
        str_add(text, s->name + head + 1, inner);
    }
    size_t bound = l->le ? l->le_bytes + (l->le == s->name + head + 1) : 0;
    sample->labels_bytes = (uint32_t)(text->bytes - sample->line_at - sample->labels_at - bound);
    str_add_text(text, "} ");
    str_add(text, s->value, s->value_bytes);
    str_add_char(text, '\0');
}

bool gw_sample_make(const struct gw_sample_source *s, struct str *text, struct gw_sample *ret)
{
    struct labels l = {0};
    if (s->name_bytes == 0 || s->name_bytes > NAME_BYTES_MAX || !s->process[0] ||
        utf8_valid_prefix(s->name, s->name_bytes) != s->name_bytes ||
        !value_check(s->value, s->value_bytes))
        return false;
    size_t head = name_bytes(s->name, s->name_bytes, true);
    if (head == 0)
        return false;
    if (head < s->name_bytes &&
        (s->name[head] != '{' || s->name_bytes < head + 2 || s->name[s->name_bytes - 1] != '}' ||
         !labels_check(s->name + head + 1, s->name_bytes - head - 2, &l)))
        return false;
    memset(ret, 0, sizeof(*ret));
    size_t family = family_bytes(s->help, s->name, head, &ret->part);
    bool bucket = family + 7 == head && ret->part == 0;
    if (has_label(&l, "process", 7) || bucket != (l.le != NULL))
        return false;
    ret->process = s->process;
    ret->le = l.le ? l.le_value : 0;
    ret->family_at = (uint32_t)text->bytes;
    str_add(text, s->name, family);
    str_add_char(text, '\0');
    write_line(s, head, &l, text, ret);
    return !text->overflow;
}

void gw_samples_settle(struct gw_sample *samples, uint32_t count, const char *text)
{
    for (uint32_t i = 0; i < count; i++) {
        samples[i].family = text + samples[i].family_at;
        samples[i].line = text + samples[i].line_at;
    }
}

int gw_sample_compare(const struct gw_sample *a, const struct gw_sample *b)
{
    uint32_t shorter = a->labels_bytes < b->labels_bytes ? a->labels_bytes : b->labels_bytes;
    int order = memcmp(a->line + a->labels_at, b->line + b->labels_at, shorter);
    if (order != 0)
        return order;
    if (a->labels_bytes != b->labels_bytes)
        return a->labels_bytes < b->labels_bytes ? -1 : 1;
    if (a->part != b->part)
        return a->part < b->part ? -1 : 1;
    return a->le < b->le ? -1 : a->le > b->le;
}

/* ---- HELP and TYPE ---- */

static bool help_line(const char *line, size_t bytes)
{
    static const char *const kinds[] = {"counter", "gauge", "histogram"};
    if (bytes < 9 || (memcmp(line, "# HELP ", 7) != 0 && memcmp(line, "# TYPE ", 7) != 0))
        return false;
    size_t n = name_bytes(line + 7, bytes - 7, true);
    size_t rest = 7 + n + 1;
    if (n == 0 || rest > bytes || line[7 + n] != ' ' || utf8_valid_prefix(line, bytes) != bytes)
        return false;
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == '\\')
            return false;
    if (line[2] == 'H')
        return true;
    for (size_t i = 0; i < ARRAY_COUNT(kinds); i++)
        if (strlen(kinds[i]) == bytes - rest && memcmp(kinds[i], line + rest, bytes - rest) == 0)
            return true;
    return false;
}

void gw_help_take(const char *text, size_t bytes, struct str *out)
{
    for (size_t at = 0; at < bytes;) {
        const char *lf = memchr(text + at, '\n', bytes - at);
        size_t n = lf ? (size_t)(lf - text) - at : bytes - at;
        if (help_line(text + at, n)) {
            str_add(out, text + at, n);
            str_add_char(out, '\n');
        }
        at += n + 1;
    }
    if (out->overflow)
        str_clear(out);
}

static const char *help_find(const char *help, const char *start, const char *family)
{
    size_t n = strlen(family);
    for (const char *line = help; *line; line = strchr(line, '\n') + 1)
        if (strncmp(line, start, 7) == 0 && strncmp(line + 7, family, n) == 0 && line[7 + n] == ' ')
            return line;
    return NULL;
}

static void add_line(struct str *out, const char *line)
{
    str_add(out, line, (size_t)(strchr(line, '\n') - line) + 1);
}

bool gw_help_write(const char *help, const char *family, struct str *out)
{
    const char *type = help_find(help, "# TYPE ", family);
    const char *text = help_find(help, "# HELP ", family);
    if (!type)
        return false;
    if (text)
        add_line(out, text);
    add_line(out, type);
    return true;
}
