/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer_state.h"

#define PARSE_ARENA_CHUNK_BYTES (256u << 10)
#define PARSE_ARENA_BYTES_MAX   ((size_t)4 << 30)

static enum err read_file(const char *path, char **ret_text, size_t *ret_bytes,
                          struct err_detail *detail)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    enum err e = ERR_OK;
    struct stat st;
    char *text = NULL;
    size_t bytes = 0;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        e = err_set(detail, ERR_IO, "%s: not a regular file", path);
    } else if (st.st_size > (off_t)TOKENIZER_FILE_BYTES_MAX) {
        e = err_set(detail, ERR_TOO_LARGE, "%s: %lld bytes, at most %u are allowed", path,
                    (long long)st.st_size, TOKENIZER_FILE_BYTES_MAX);
    } else if ((text = malloc((size_t)st.st_size + 1)) == NULL) {
        e = ERR_NOMEM;
    }
    while (e == ERR_OK && bytes < (size_t)st.st_size) {
        ssize_t got = read(fd, text + bytes, (size_t)st.st_size - bytes);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            e = err_set(detail, ERR_IO, "%s: short read at byte %zu", path, bytes);
        else
            bytes += (size_t)got;
    }
    (void)close(fd);
    if (e != ERR_OK) {
        free(text);
        return e;
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return ERR_OK;
}

enum err tokenizer_load(const char *path, const struct tokenizer_options *options,
                        struct tokenizer **ret_tokenizer, struct err_detail *detail)
{
    CHECK(path != NULL && ret_tokenizer != NULL);
    char *text = NULL;
    size_t bytes = 0;
    TRY(read_file(path, &text, &bytes, detail));
    enum err e = tokenizer_parse(text, bytes, options, ret_tokenizer, detail);
    free(text);
    return e;
}

static enum err parse_document(struct tokenizer *t, struct arena *arena, const char *text,
                               size_t bytes, const struct tokenizer_options *options,
                               struct err_detail *detail)
{
    const struct json_options json_options = {.bytes_max = TOKENIZER_FILE_BYTES_MAX};
    struct json *root = NULL;
    struct json_error error = {0};
    enum err e = json_parse(arena, &json_options, text, bytes, &root, &error);
    if (e != ERR_OK)
        return err_set(detail, e, "tokenizer.json: byte %zu: %s", error.offset,
                       error.reason ? error.reason : err_text(e));
    return tokenizer_fill(t, root, options, detail);
}

enum err tokenizer_parse(const char *text, size_t bytes, const struct tokenizer_options *options,
                         struct tokenizer **ret_tokenizer, struct err_detail *detail)
{
    static const struct tokenizer_options production;
    CHECK(text != NULL && ret_tokenizer != NULL);
    if (bytes > TOKENIZER_FILE_BYTES_MAX)
        return err_set(detail, ERR_TOO_LARGE, "tokenizer.json: %zu bytes, at most %u are allowed",
                       bytes, TOKENIZER_FILE_BYTES_MAX);
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return ERR_NOMEM;
    t->magic = TOKENIZER_MAGIC;
    vocab_init(&t->vocab);
    added_init(&t->added_first);
    added_init(&t->added_second);
    struct arena arena;
    arena_init(&arena, PARSE_ARENA_CHUNK_BYTES, PARSE_ARENA_BYTES_MAX);
    enum err e = parse_document(t, &arena, text, bytes, options ? options : &production, detail);
    arena_fini(&arena);
    if (e != ERR_OK) {
        tokenizer_destroy(&t);
        return e;
    }
    *ret_tokenizer = t;
    return ERR_OK;
}

void tokenizer_destroy(struct tokenizer **tokenizer_p)
{
    struct tokenizer *t = *tokenizer_p;
    *tokenizer_p = NULL;
    if (t == NULL)
        return;
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    vocab_fini(&t->vocab);
    bpe_fini(&t->bpe);
    splitter_destroy(&t->splitter);
    added_fini(&t->added_first);
    added_fini(&t->added_second);
    t->magic = 0;
    free(t);
}

/* What one call needs besides the tokenizer. */
struct encode_call {
    const struct tokenizer *t;
    struct token_ids *out;
    struct splitter_walk walk;
    struct bpe_scratch scratch;
};

static enum err encode_piece(struct encode_call *c, const char *piece, size_t bytes)
{
    const struct tokenizer *t = c->t;
    uint32_t id;
    if (vocab_find(&t->vocab, piece, bytes, &id) &&
        (t->ignore_merges || (t->vocab.tokens[id].flags & VOCAB_DIRECT)))
        return token_ids_add(c->out, id) ? ERR_OK : ERR_TOO_LARGE;
    return bpe_encode(&t->bpe, &c->scratch, (const uint8_t *)piece, bytes, c->out);
}

/* A run of plain text: pieces, each merged by itself. */
static enum err encode_run(struct encode_call *c, const char *text, size_t bytes)
{
    splitter_walk_begin(&c->walk, text, bytes);
    for (;;) {
        size_t begin, count;
        TRY(splitter_walk_next(&c->walk, &begin, &count));
        if (count == 0)
            return ERR_OK;
        TRY(encode_piece(c, text + begin, count));
    }
}

/* Ends the run that began at *run at `begin`, appends the added token, goes on at `end`. */
static enum err encode_added(struct encode_call *c, const char *text, size_t *run, size_t begin,
                             size_t end, uint32_t id)
{
    CHECK(*run <= begin && begin < end);
    TRY(encode_run(c, text + *run, begin - *run));
    *run = end;
    return token_ids_add(c->out, id) ? ERR_OK : ERR_TOO_LARGE;
}

/* Added tokens of the second pass in text[from, to). */
static enum err encode_second(struct encode_call *c, const char *text, size_t from, size_t to,
                              size_t *run)
{
    size_t begin, end;
    uint32_t id;
    while (added_next(&c->t->added_second, text, to, from, &begin, &end, &id)) {
        TRY(encode_added(c, text, run, begin, end, id));
        from = end;
    }
    return ERR_OK;
}

static enum err encode_special_span(struct encode_call *c, const char *text, size_t from, size_t to,
                                    size_t *run)
{
    size_t begin, end;
    uint32_t id;
    while (added_next(&c->t->added_first, text, to, from, &begin, &end, &id)) {
        TRY(encode_second(c, text, from, begin, run));
        TRY(encode_added(c, text, run, begin, end, id));
        from = end;
    }
    return encode_second(c, text, from, to, run);
}

static enum err encode_all(struct encode_call *c, const char *text, size_t bytes,
                           const struct tokenizer_span *spans, size_t span_count)
{
    size_t run = 0, at = 0;
    for (size_t i = 0; i < span_count; i++) {
        CHECK(spans[i].bytes <= bytes - at);
        if (spans[i].parse_special)
            TRY(encode_special_span(c, text, at, at + spans[i].bytes, &run));
        at += spans[i].bytes;
    }
    CHECK(at == bytes);
    return encode_run(c, text + run, bytes - run);
}

enum err tokenizer_encode_spans(const struct tokenizer *t, const char *text, size_t bytes,
                                const struct tokenizer_span *spans, size_t span_count,
                                struct token_ids *out)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    CHECK(out != NULL && (text != NULL || bytes == 0));
    if (bytes == 0)
        return ERR_OK;
    if (utf8_valid_prefix(text, bytes) != bytes)
        return ERR_INVALID;
    struct encode_call c = {.t = t, .out = out};
    bpe_scratch_init(&c.scratch);
    enum err e = splitter_walk_init(&c.walk, t->splitter);
    if (e == ERR_OK)
        e = encode_all(&c, text, bytes, spans, span_count);
    splitter_walk_fini(&c.walk);
    bpe_scratch_fini(&c.scratch);
    return e;
}

enum err tokenizer_encode(const struct tokenizer *t, const char *text, size_t bytes,
                          bool parse_special, struct token_ids *out)
{
    const struct tokenizer_span span = {.bytes = bytes, .parse_special = parse_special};
    return tokenizer_encode_spans(t, text, bytes, &span, 1, out);
}

uint32_t tokenizer_id_count(const struct tokenizer *t)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    return t->vocab.id_count;
}

uint32_t tokenizer_token_count(const struct tokenizer *t)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    return t->vocab.token_count;
}

uint32_t tokenizer_bytes_longest(const struct tokenizer *t)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    uint32_t longest = 0;
    for (uint32_t id = 0; id < t->vocab.id_count; id++)
        if (t->vocab.tokens[id].count > longest)
            longest = t->vocab.tokens[id].count;
    return longest;
}

const uint8_t *tokenizer_bytes(const struct tokenizer *t, uint32_t id, size_t *ret_count)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    const struct vocab_token *token = vocab_token(&t->vocab, id);
    if (token == NULL)
        return NULL;
    *ret_count = token->count;
    return vocab_bytes(&t->vocab, token);
}

static bool has_flag(const struct tokenizer *t, uint32_t id, uint8_t flag)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    const struct vocab_token *token = vocab_token(&t->vocab, id);
    return token != NULL && (token->flags & flag) != 0;
}

bool tokenizer_is_special(const struct tokenizer *t, uint32_t id)
{
    return has_flag(t, id, VOCAB_SPECIAL);
}

bool tokenizer_is_added(const struct tokenizer *t, uint32_t id)
{
    return has_flag(t, id, VOCAB_ADDED);
}

bool tokenizer_find(const struct tokenizer *t, const char *text, size_t bytes, uint32_t *ret_id)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    size_t begin, end;
    uint32_t id;
    if ((added_next(&t->added_first, text, bytes, 0, &begin, &end, &id) ||
         added_next(&t->added_second, text, bytes, 0, &begin, &end, &id)) &&
        begin == 0 && end == bytes) {
        *ret_id = id;
        return true;
    }
    return vocab_find(&t->vocab, text, bytes, ret_id);
}
