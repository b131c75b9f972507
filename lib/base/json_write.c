/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/json.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json_number.h"
#include "lib/base/str.h"

struct writer {
    struct str *out;
    enum json_numbers numbers;
    bool compact;
};

/* 0: stands for itself; 1: \u00XX; else the letter after the backslash. */
static const char escapes[256] = {
    [0x00] = 1, 1, 1, 1, 1, 1, 1, 1, 'b', 't', 'n', 1, 'f', 'r', 1, 1,           1,
    1,          1, 1, 1, 1, 1, 1, 1, 1,   1,   1,   1, 1,   1,   1, ['"'] = '"', ['\\'] = '\\',
};

void json_write_escaped(struct str *out, const char *text, size_t bytes)
{
    CHECK(out != NULL);
    CHECK(text != NULL || bytes == 0);
    size_t plain = 0;
    for (size_t i = 0; i < bytes; i++) {
        char letter = escapes[(unsigned char)text[i]];
        if (letter == 0)
            continue;
        str_add(out, text + plain, i - plain);
        plain = i + 1;
        if (letter == 1) {
            str_add_format(out, "\\u%04x", (unsigned)(unsigned char)text[i]);
        } else {
            const char pair[2] = {'\\', letter};
            str_add(out, pair, 2);
        }
    }
    if (bytes > plain)
        str_add(out, text + plain, bytes - plain);
}

void json_write_string(struct str *out, const char *text, size_t bytes)
{
    str_add_char(out, '"');
    json_write_escaped(out, text, bytes);
    str_add_char(out, '"');
}

/* A scalar whole; of a container the opening bracket. */
static void write_begin(const struct writer *w, const struct json *value)
{
    switch ((enum json_type)value->type) {
    case JSON_NULL:
        str_add_text(w->out, "null");
        return;
    case JSON_BOOL:
        str_add_text(w->out, value->boolean ? "true" : "false");
        return;
    case JSON_NUMBER:
        if (w->numbers == JSON_NUMBERS_PYTHON)
            json_write_number_python(w->out, value->text, value->bytes);
        else
            str_add(w->out, value->text, value->bytes);
        return;
    case JSON_STRING:
        json_write_string(w->out, value->text, value->bytes);
        return;
    case JSON_ARRAY:
        str_add_char(w->out, '[');
        return;
    case JSON_OBJECT:
        str_add_char(w->out, '{');
        return;
    }
    CHECK(!"JSON type");
}

static void write_key(const struct writer *w, const struct json *parent, const struct json *member)
{
    if (parent->type != JSON_OBJECT)
        return;
    json_write_string(w->out, member->key, member->key_bytes);
    str_add_text(w->out, w->compact ? ":" : ": ");
}

/* The open containers lie on a stack of pointers, since the tree may be deeper than ours. */
static const struct json *stack_top(const struct str *stack)
{
    const struct json *top;
    CHECK(stack->bytes >= sizeof top);
    memcpy(&top, stack->text + stack->bytes - sizeof top, sizeof top);
    return top;
}

static void write_value(const struct writer *w, const struct json *root)
{
    CHECK(root != NULL && w->out != NULL);
    struct str stack;
    str_init(&stack, 0);
    const struct json *value = root;
    for (;;) {
        write_begin(w, value);
        if (value->type == JSON_ARRAY || value->type == JSON_OBJECT) {
            if (value->child != NULL) {
                str_add(&stack, &value, sizeof value);
                if (stack.overflow) {
                    w->out->overflow = true;
                    break;
                }
                write_key(w, value, value->child);
                value = value->child;
                continue;
            }
            str_add_char(w->out, value->type == JSON_ARRAY ? ']' : '}');
        }
        while (stack.bytes > 0 && value->next == NULL) {
            value = stack_top(&stack);
            stack.bytes -= sizeof value;
            str_add_char(w->out, value->type == JSON_ARRAY ? ']' : '}');
        }
        /* The root may itself be a member of something: its siblings are not written. */
        if (stack.bytes == 0)
            break;
        str_add_text(w->out, w->compact ? "," : ", ");
        value = value->next;
        write_key(w, stack_top(&stack), value);
    }
    str_fini(&stack);
}

void json_write(struct str *out, const struct json *value, enum json_numbers numbers)
{
    CHECK(out != NULL && value != NULL);
    const struct writer w = {.out = out, .numbers = numbers};
    write_value(&w, value);
}

void json_write_compact(struct str *out, const struct json *value)
{
    CHECK(out != NULL && value != NULL);
    const struct writer w = {.out = out, .numbers = JSON_NUMBERS_VERBATIM, .compact = true};
    write_value(&w, value);
}
