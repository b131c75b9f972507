/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/splitter.h"

#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

#define SPLITTER_MAGIC         0x73706c74u
#define SPLITTER_STEPS_DEFAULT 200000000u
#define SPLITTER_HEAP_KIB_MAX  (256u << 10)
#define SPLITTER_NEST_MAX      32
/* Unicode property White_Space. */
#define SPLITTER_WHITE                                                                             \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"        \
    "\\x{205f}\\x{3000}"

struct splitter {
    uint32_t magic;
    bool jit;
    pcre2_code *code;
    pcre2_match_context *context; /* limits only: never changed after create */
};

/* One escape of the pattern, at text[0] == '\\'.  Returns the bytes it took, 0 = refused: only
 * escapes that mean the same in both engines pass (\h, \v, \w, \b and others do not). */
static size_t rewrite_escape(const char *text, size_t bytes, bool in_class, struct str *out)
{
    if (bytes < 2)
        return 0;
    char c = text[1];
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (c == 's') {
        str_add_text(out, in_class ? SPLITTER_WHITE : "[" SPLITTER_WHITE "]");
    } else if (c == 'S' && !in_class) {
        str_add_text(out, "[^" SPLITTER_WHITE "]");
    } else if (letter && strchr("pPdDrntfx", c) == NULL) {
        return 0;
    } else {
        str_add(out, text, 2);
    }
    return 2;
}

/* Bytes that mean one thing to PCRE2 and another to the engine the files are written for. */
static bool is_foreign(const char *text, size_t bytes, bool in_class)
{
    if (bytes < 2)
        return false;
    if (in_class)
        return text[0] == '[' || (text[0] == '&' && text[1] == '&');
    return text[0] == '(' && text[1] == '*';
}

static enum err rewrite_pattern(const char *pattern, size_t bytes, struct str *out,
                                struct err_detail *detail)
{
    bool in_class = false;
    size_t class_begin = 0;
    for (size_t i = 0; i < bytes;) {
        size_t taken = 1;
        if (pattern[i] == '\\')
            taken = rewrite_escape(pattern + i, bytes - i, in_class, out);
        else if (is_foreign(pattern + i, bytes - i, in_class))
            taken = 0;
        else
            str_add_char(out, pattern[i]);
        if (taken == 0)
            return err_set(detail, ERR_UNSUPPORTED,
                           "pre_tokenizer: construct at byte %zu of the pattern is not supported",
                           i);
        if (!in_class && pattern[i] == '[') {
            in_class = true;
            class_begin = i + 1;
            if (class_begin < bytes && pattern[class_begin] == '^')
                class_begin++;
        } else if (in_class && pattern[i] == ']' && i != class_begin) {
            in_class = false;
        }
        i += taken;
    }
    return out->overflow ? ERR_NOMEM : ERR_OK;
}

static enum err compile(struct splitter *s, const struct str *pattern, struct err_detail *detail)
{
    int code = 0;
    PCRE2_SIZE offset = 0;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context == NULL)
        return ERR_NOMEM;
    pcre2_set_parens_nest_limit(context, SPLITTER_NEST_MAX);
    s->code =
        pcre2_compile((PCRE2_SPTR)pattern->text, pattern->bytes,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset, context);
    pcre2_compile_context_free(context);
    if (s->code == NULL) {
        PCRE2_UCHAR message[128] = {0};
        (void)pcre2_get_error_message(code, message, sizeof(message));
        return err_set(detail, ERR_INVALID, "pre_tokenizer: pattern: %s (byte %zu)",
                       (const char *)message, (size_t)offset);
    }
    return ERR_OK;
}

static enum err splitter_setup(struct splitter *s, const char *pattern, size_t bytes,
                               const struct splitter_options *options, struct err_detail *detail)
{
    struct str rewritten;
    str_init(&rewritten, 64 * SPLITTER_PATTERN_BYTES_MAX);
    enum err e = rewrite_pattern(pattern, bytes, &rewritten, detail);
    if (e == ERR_OK)
        e = compile(s, &rewritten, detail);
    str_fini(&rewritten);
    if (e != ERR_OK)
        return e;
    s->context = pcre2_match_context_create(NULL);
    if (s->context == NULL)
        return ERR_NOMEM;
    pcre2_set_match_limit(s->context,
                          options->steps_max ? options->steps_max : SPLITTER_STEPS_DEFAULT);
    pcre2_set_heap_limit(s->context, SPLITTER_HEAP_KIB_MAX);
    /* Where the machine forbids executable memory the interpreter gives the same pieces. */
    s->jit = !options->jit_off && pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE) == 0;
    return ERR_OK;
}

enum err splitter_create(const char *pattern, size_t bytes, const struct splitter_options *options,
                         struct splitter **ret_splitter, struct err_detail *detail)
{
    CHECK(pattern != NULL && options != NULL && ret_splitter != NULL);
    if (bytes == 0 || bytes > SPLITTER_PATTERN_BYTES_MAX)
        return err_set(detail, ERR_TOO_LARGE,
                       "pre_tokenizer: pattern of %zu bytes, 1 to %u are allowed", bytes,
                       SPLITTER_PATTERN_BYTES_MAX);
    struct splitter *s = calloc(1, sizeof(*s));
    if (s == NULL)
        return ERR_NOMEM;
    s->magic = SPLITTER_MAGIC;
    enum err e = splitter_setup(s, pattern, bytes, options, detail);
    if (e != ERR_OK) {
        splitter_destroy(&s);
        return e;
    }
    *ret_splitter = s;
    return ERR_OK;
}

void splitter_destroy(struct splitter **splitter_p)
{
    struct splitter *s = *splitter_p;
    *splitter_p = NULL;
    if (s == NULL)
        return;
    CHECK_OBJ(s, SPLITTER_MAGIC);
    pcre2_match_context_free(s->context);
    pcre2_code_free(s->code);
    s->magic = 0;
    free(s);
}

enum err splitter_walk_init(struct splitter_walk *w, const struct splitter *s)
{
    CHECK_OBJ(s, SPLITTER_MAGIC);
    *w = (struct splitter_walk){.splitter = s};
    w->match_data = pcre2_match_data_create(1, NULL);
    return w->match_data != NULL ? ERR_OK : ERR_NOMEM;
}

void splitter_walk_fini(struct splitter_walk *w)
{
    pcre2_match_data_free(w->match_data);
    *w = (struct splitter_walk){0};
}

void splitter_walk_begin(struct splitter_walk *w, const char *text, size_t bytes)
{
    CHECK(w->splitter != NULL);
    w->text = text;
    w->bytes = bytes;
    w->at = 0;
    w->match_begin = 0;
    w->match_end = 0;
}

static int match_once(const struct splitter_walk *w, size_t from)
{
    const struct splitter *s = w->splitter;
    int count;
    if (s->jit) {
        count = pcre2_jit_match(s->code, (PCRE2_SPTR)w->text, w->bytes, from, PCRE2_NO_UTF_CHECK,
                                w->match_data, s->context);
        if (count != PCRE2_ERROR_JIT_STACKLIMIT)
            return count;
    }
    return pcre2_match(s->code, (PCRE2_SPTR)w->text, w->bytes, from,
                       PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, w->match_data, s->context);
}

/* First match that is not empty, at or after w->at; match_end 0 = none. */
static enum err find_match(struct splitter_walk *w)
{
    w->match_end = 0;
    size_t from = w->at;
    while (from < w->bytes) {
        int count = match_once(w, from);
        if (count == PCRE2_ERROR_NOMATCH)
            return ERR_OK;
        if (count == PCRE2_ERROR_NOMEMORY)
            return ERR_NOMEM;
        if (count < 0)
            return ERR_TOO_LARGE;
        const PCRE2_SIZE *ovector = pcre2_get_ovector_pointer(w->match_data);
        /* \K may put the begin anywhere; such a pattern cannot cut text into pieces. */
        if (ovector[0] < from || ovector[1] < ovector[0] || ovector[1] > w->bytes)
            return ERR_UNSUPPORTED;
        if (ovector[1] > ovector[0]) {
            w->match_begin = ovector[0];
            w->match_end = ovector[1];
            return ERR_OK;
        }
        from = ovector[1] + 1;
        while (from < w->bytes && ((uint8_t)w->text[from] & 0xc0) == 0x80)
            from++;
    }
    return ERR_OK;
}

enum err splitter_walk_next(struct splitter_walk *w, size_t *ret_begin, size_t *ret_bytes)
{
    CHECK(w->splitter != NULL && w->at <= w->bytes);
    *ret_begin = w->at;
    if (w->at == w->bytes) {
        *ret_bytes = 0;
        return ERR_OK;
    }
    if (w->match_end == 0)
        TRY(find_match(w));
    size_t end;
    if (w->match_end == 0) {
        end = w->bytes; /* no further match: the rest is one gap */
    } else if (w->match_begin > w->at) {
        end = w->match_begin;
    } else {
        end = w->match_end;
        w->match_end = 0;
    }
    *ret_bytes = end - w->at;
    w->at = end;
    return ERR_OK;
}
