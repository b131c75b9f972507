/* SPDX-License-Identifier: Apache-2.0 */
/* The document tokenizer.json to the tables of struct tokenizer; refuses by name. */
#include "lib/text/tokenizer_state.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/text/token_ids.h"
#include "lib/text/tokenizer.h"

#define ADDED_TOKENS_MAX     65536u
#define ADDED_TEXT_BYTES_MAX 1024u
#define TOKEN_BYTES_MAX      65536u
#define LEVEL_CODE_POINTS    324u /* 256 + the bytes that do not stand for themselves */

/* State of one load: the tokenizer, where to report, and the alphabet of the byte level. */
struct load {
    struct tokenizer *t;
    struct err_detail *detail;
    int16_t byte_of[LEVEL_CODE_POINTS]; /* byte a code point stands for, or -1 */
    struct str left, right;             /* decoded texts */
};

/* Printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order. */
static bool stands_for_itself(uint32_t byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static void alphabet_init(struct load *l)
{
    for (size_t i = 0; i < LEVEL_CODE_POINTS; i++)
        l->byte_of[i] = -1;
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; byte++)
        l->byte_of[stands_for_itself(byte) ? byte : next++] = (int16_t)byte;
    CHECK(next == LEVEL_CODE_POINTS);
}

/* Byte-level spelling to bytes.  False: a character outside the alphabet. */
static bool level_decode(const struct load *l, const char *text, size_t bytes, struct str *out)
{
    str_clear(out);
    for (size_t at = 0; at < bytes;) {
        uint32_t code_point = 0;
        size_t taken = utf8_decode(text + at, bytes - at, &code_point);
        if (taken == 0 || code_point >= LEVEL_CODE_POINTS || l->byte_of[code_point] < 0)
            return false;
        str_add_char(out, (char)l->byte_of[code_point]);
        at += taken;
    }
    return !out->overflow;
}

static bool absent(const struct json *value)
{
    return value == NULL || json_is(value, JSON_NULL);
}

static enum err expect_absent(struct load *l, const struct json *root, const char *key)
{
    if (!absent(json_get(root, key)))
        return err_set(l->detail, ERR_UNSUPPORTED, "tokenizer.json: %s is not supported", key);
    return ERR_OK;
}

/* A flag that is false, or not there. */
static enum err expect_false(struct load *l, const struct json *object, const char *key,
                             const char *where)
{
    const struct json *value = json_get(object, key);
    bool set = false;
    if (absent(value))
        return ERR_OK;
    if (!json_bool(value, &set))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: %s.%s: not a boolean", where, key);
    if (set)
        return err_set(l->detail, ERR_UNSUPPORTED, "tokenizer.json: %s.%s: true is not supported",
                       where, key);
    return ERR_OK;
}

static enum err expect_type(struct load *l, const struct json *object, const char *type,
                            const char *where)
{
    const struct json *value = json_get(object, "type");
    if (json_string_is(value, type))
        return ERR_OK;
    if (!json_is(value, JSON_STRING))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: %s.type: not a string", where);
    return err_set(l->detail, ERR_UNSUPPORTED,
                   "tokenizer.json: %s.type: \"%.*s\" is not supported, only \"%s\" is", where,
                   (int)(value->bytes < 64 ? value->bytes : 64), value->text, type);
}

static enum err load_split(struct load *l, const struct json *split,
                           const struct tokenizer_options *options)
{
    TRY(expect_type(l, split, "Split", "pre_tokenizer.pretokenizers[0]"));
    TRY(expect_false(l, split, "invert", "pre_tokenizer.pretokenizers[0]"));
    if (!json_string_is(json_get(split, "behavior"), "Isolated"))
        return err_set(l->detail, ERR_UNSUPPORTED,
                       "tokenizer.json: pre_tokenizer.pretokenizers[0].behavior: only "
                       "\"Isolated\" is supported");
    const struct json *pattern = json_get(json_get(split, "pattern"), "Regex");
    if (!json_is(pattern, JSON_STRING))
        return err_set(l->detail, ERR_UNSUPPORTED,
                       "tokenizer.json: pre_tokenizer.pretokenizers[0].pattern: only {\"Regex\": "
                       "text} is supported");
    const struct splitter_options splitter_options = {.jit_off = options->jit_off,
                                                      .steps_max = options->pattern_steps_max};
    return splitter_create(pattern->text, pattern->bytes, &splitter_options, &l->t->splitter,
                           l->detail);
}

static enum err load_pre_tokenizer(struct load *l, const struct json *root,
                                   const struct tokenizer_options *options)
{
    const struct json *pre = json_get(root, "pre_tokenizer");
    if (absent(pre))
        return err_set(l->detail, ERR_UNSUPPORTED, "tokenizer.json: pre_tokenizer is missing");
    TRY(expect_type(l, pre, "Sequence", "pre_tokenizer"));
    const struct json *list = json_get(pre, "pretokenizers");
    if (!json_is(list, JSON_ARRAY) || list->count != 2)
        return err_set(l->detail, ERR_UNSUPPORTED,
                       "tokenizer.json: pre_tokenizer.pretokenizers: only [Split, ByteLevel] is "
                       "supported");
    const struct json *level = list->child->next;
    TRY(load_split(l, list->child, options));
    TRY(expect_type(l, level, "ByteLevel", "pre_tokenizer.pretokenizers[1]"));
    TRY(expect_false(l, level, "add_prefix_space", "pre_tokenizer.pretokenizers[1]"));
    bool use_regex = true; /* the default of the format */
    (void)json_bool(json_get(level, "use_regex"), &use_regex);
    if (use_regex)
        return err_set(l->detail, ERR_UNSUPPORTED,
                       "tokenizer.json: pre_tokenizer.pretokenizers[1].use_regex: true is not "
                       "supported");
    return ERR_OK;
}

static enum err check_frame(struct load *l, const struct json *root,
                            const struct tokenizer_options *options)
{
    if (!json_is(root, JSON_OBJECT))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: not an object");
    TRY(expect_absent(l, root, "truncation"));
    TRY(expect_absent(l, root, "padding"));
    if (!options->normalizer_leave_out)
        TRY(expect_absent(l, root, "normalizer"));
    /* A ByteLevel post-processor moves offsets only; any other could add tokens. */
    const struct json *post = json_get(root, "post_processor");
    if (!absent(post))
        TRY(expect_type(l, post, "ByteLevel", "post_processor"));
    return expect_type(l, json_get(root, "decoder"), "ByteLevel", "decoder");
}

static enum err check_model(struct load *l, const struct json *model)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    if (!json_is(model, JSON_OBJECT))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: model is missing or no object");
    TRY(expect_type(l, model, "BPE", "model"));
    TRY(expect_false(l, model, "byte_fallback", "model"));
    for (size_t i = 0; i < ARRAY_COUNT(affixes); i++) {
        const struct json *value = json_get(model, affixes[i]);
        if (!absent(value) && !json_string_is(value, ""))
            return err_set(l->detail, ERR_UNSUPPORTED, "tokenizer.json: model.%s is not supported",
                           affixes[i]);
    }
    double dropout = 0;
    const struct json *value = json_get(model, "dropout");
    if (!absent(value) && !(json_f64(value, &dropout) && dropout == 0))
        return err_set(l->detail, ERR_UNSUPPORTED,
                       "tokenizer.json: model.dropout is not supported");
    value = json_get(model, "ignore_merges");
    if (!absent(value) && !json_bool(value, &l->t->ignore_merges))
        return err_set(l->detail, ERR_INVALID,
                       "tokenizer.json: model.ignore_merges: not a boolean");
    return ERR_OK;
}

static enum err vocab_refused(struct load *l, enum err e, uint64_t id, const char *where,
                              size_t index)
{
    if (e == ERR_INVALID)
        return err_set(l->detail, e, "tokenizer.json: %s[%zu]: id %llu stands twice", where, index,
                       (unsigned long long)id);
    return err_set(l->detail, e, "tokenizer.json: %s[%zu]: id %llu: %s", where, index,
                   (unsigned long long)id, err_text(e));
}

static enum err load_vocab(struct load *l, const struct json *vocab)
{
    if (!json_is(vocab, JSON_OBJECT))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: model.vocab: not an object");
    size_t index = 0;
    for (const struct json *entry = vocab->child; entry; entry = entry->next, index++) {
        uint64_t id;
        if (!json_u64(entry, &id) || id >= VOCAB_IDS_MAX)
            return err_set(l->detail, ERR_INVALID,
                           "tokenizer.json: model.vocab[%zu]: id is no integer below %u", index,
                           VOCAB_IDS_MAX);
        if (entry->key_bytes == 0 || entry->key_bytes > TOKEN_BYTES_MAX)
            return err_set(l->detail, ERR_INVALID,
                           "tokenizer.json: model.vocab[%zu]: text of %zu bytes", index,
                           entry->key_bytes);
        /* A text outside the alphabet can stand here (a control token that is listed twice):
         * no merge reaches it, and it decodes to itself. */
        bool level = level_decode(l, entry->key, entry->key_bytes, &l->left);
        const char *bytes = level ? l->left.text : entry->key;
        size_t count = level ? l->left.bytes : entry->key_bytes;
        enum err e = vocab_add(&l->t->vocab, (uint32_t)id, bytes, count, level ? VOCAB_TEXT : 0);
        if (e != ERR_OK)
            return vocab_refused(l, e, id, "model.vocab", index);
    }
    return ERR_OK;
}

/* Enters the id, or finds it in the vocabulary with the same text. */
static enum err add_added_id(struct load *l, uint32_t id, const struct json *content, uint8_t flags,
                             size_t index)
{
    struct vocab *v = &l->t->vocab;
    const struct vocab_token *token = vocab_token(v, id);
    if (token == NULL) {
        enum err e = vocab_add(v, id, content->text, content->bytes, flags);
        return e == ERR_OK ? e : vocab_refused(l, e, id, "added_tokens", index);
    }
    if ((token->flags & VOCAB_ADDED) || token->count != content->bytes ||
        memcmp(vocab_bytes(v, token), content->text, content->bytes) != 0)
        return vocab_refused(l, ERR_INVALID, id, "added_tokens", index);
    v->tokens[id].flags |= flags;
    return ERR_OK;
}

static enum err load_added_token(struct load *l, const struct json *entry, size_t index)
{
    char where[32];
    (void)snprintf(where, sizeof(where), "added_tokens[%zu]", index);
    const struct json *content = json_get(entry, "content");
    if (!json_is(content, JSON_STRING) || content->bytes == 0 ||
        content->bytes > ADDED_TEXT_BYTES_MAX)
        return err_set(l->detail, ERR_INVALID,
                       "tokenizer.json: %s.content: no text of 1 to %u bytes", where,
                       ADDED_TEXT_BYTES_MAX);
    uint64_t id;
    if (!json_u64(json_get(entry, "id"), &id) || id >= VOCAB_IDS_MAX)
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: %s.id: no integer below %u", where,
                       VOCAB_IDS_MAX);
    TRY(expect_false(l, entry, "single_word", where));
    TRY(expect_false(l, entry, "lstrip", where));
    TRY(expect_false(l, entry, "rstrip", where));
    bool special = false;
    const struct json *value = json_get(entry, "special");
    if (!absent(value) && !json_bool(value, &special))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: %s.special: not a boolean", where);
    bool normalized = !special; /* the default of the format */
    value = json_get(entry, "normalized");
    if (!absent(value) && !json_bool(value, &normalized))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: %s.normalized: not a boolean",
                       where);
    TRY(add_added_id(l, (uint32_t)id, content,
                     (uint8_t)(VOCAB_ADDED | (special ? VOCAB_SPECIAL : 0)), index));
    enum err e = added_put(normalized ? &l->t->added_second : &l->t->added_first, content->text,
                           content->bytes, (uint32_t)id);
    if (e == ERR_INVALID)
        return err_set(l->detail, e, "tokenizer.json: %s.content stands twice", where);
    return e;
}

static enum err load_added(struct load *l, const struct json *list)
{
    if (absent(list))
        return ERR_OK;
    if (!json_is(list, JSON_ARRAY))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: added_tokens: not an array");
    if (list->count > ADDED_TOKENS_MAX)
        return err_set(l->detail, ERR_TOO_LARGE,
                       "tokenizer.json: added_tokens: %u entries, at most %u are allowed",
                       list->count, ADDED_TOKENS_MAX);
    size_t index = 0;
    for (const struct json *entry = list->child; entry; entry = entry->next)
        TRY(load_added_token(l, entry, index++));
    return ERR_OK;
}

static enum err index_vocab(struct load *l)
{
    uint32_t id = 0;
    enum err e = vocab_index(&l->t->vocab, &id);
    if (e == ERR_INVALID)
        return err_set(l->detail, e, "tokenizer.json: model.vocab: text of id %u stands twice", id);
    return e;
}

static enum err load_byte_ids(struct load *l)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint8_t b = (uint8_t)byte;
        if (!vocab_find(&l->t->vocab, &b, 1, &l->t->bpe.byte_ids[byte]))
            return err_set(l->detail, ERR_INVALID,
                           "tokenizer.json: model.vocab: no entry for byte 0x%02x", byte);
    }
    return ERR_OK;
}

/* The two halves of a merge: "a b", or ["a", "b"]. */
static bool merge_halves(const struct json *merge, const char *half[2], size_t bytes[2])
{
    if (json_is(merge, JSON_ARRAY)) {
        if (merge->count != 2 || !json_is(merge->child, JSON_STRING) ||
            !json_is(merge->child->next, JSON_STRING))
            return false;
        half[0] = merge->child->text;
        bytes[0] = merge->child->bytes;
        half[1] = merge->child->next->text;
        bytes[1] = merge->child->next->bytes;
        return true;
    }
    if (!json_is(merge, JSON_STRING) || merge->bytes == 0)
        return false;
    const char *space = memchr(merge->text, ' ', merge->bytes);
    if (space == NULL)
        return false;
    half[0] = merge->text;
    bytes[0] = (size_t)(space - merge->text);
    half[1] = space + 1;
    bytes[1] = merge->bytes - bytes[0] - 1;
    return true;
}

static enum err load_merge(struct load *l, const struct json *merge, uint32_t rank)
{
    const char *half[2];
    size_t bytes[2];
    uint32_t left, right, result;
    if (!merge_halves(merge, half, bytes))
        return err_set(l->detail, ERR_INVALID,
                       "tokenizer.json: model.merges[%u]: neither \"a b\" nor [\"a\", \"b\"]",
                       rank);
    if (!level_decode(l, half[0], bytes[0], &l->left) ||
        !level_decode(l, half[1], bytes[1], &l->right) ||
        !vocab_find(&l->t->vocab, l->left.text, l->left.bytes, &left) ||
        !vocab_find(&l->t->vocab, l->right.text, l->right.bytes, &right))
        return err_set(l->detail, ERR_INVALID,
                       "tokenizer.json: model.merges[%u]: a part is not in model.vocab", rank);
    str_add(&l->left, l->right.text, l->right.bytes);
    if (!vocab_find(&l->t->vocab, l->left.text, l->left.bytes, &result))
        return err_set(l->detail, ERR_INVALID,
                       "tokenizer.json: model.merges[%u]: its result is not in model.vocab", rank);
    bpe_put(&l->t->bpe, left, right, rank, result);
    return ERR_OK;
}

static enum err load_merges(struct load *l, const struct json *merges)
{
    if (!json_is(merges, JSON_ARRAY))
        return err_set(l->detail, ERR_INVALID, "tokenizer.json: model.merges: not an array");
    if (merges->count > BPE_MERGES_MAX)
        return err_set(l->detail, ERR_TOO_LARGE,
                       "tokenizer.json: model.merges: %u entries, at most %u are allowed",
                       merges->count, BPE_MERGES_MAX);
    TRY(bpe_init(&l->t->bpe, merges->count));
    TRY(load_byte_ids(l));
    uint32_t rank = 0;
    for (const struct json *merge = merges->child; merge; merge = merge->next)
        TRY(load_merge(l, merge, rank++));
    return ERR_OK;
}

/* Marks the entries that their own merges lead to, so that most words cost one look-up.  Not
 * every entry is one: some are reachable only inside a longer piece, or not at all. */
static enum err mark_direct(struct tokenizer *t)
{
    struct token_ids ids;
    struct bpe_scratch scratch;
    enum err e = ERR_OK;
    token_ids_init(&ids, TOKEN_BYTES_MAX);
    bpe_scratch_init(&scratch);
    for (uint32_t id = 0; id < t->vocab.id_count && e == ERR_OK; id++) {
        struct vocab_token *token = &t->vocab.tokens[id];
        if (!(token->flags & VOCAB_TEXT))
            continue;
        token_ids_clear(&ids);
        e = bpe_encode(&t->bpe, &scratch, vocab_bytes(&t->vocab, token), token->count, &ids);
        if (e == ERR_OK && ids.count == 1 && ids.ids[0] == id)
            token->flags |= VOCAB_DIRECT;
    }
    bpe_scratch_fini(&scratch);
    token_ids_fini(&ids);
    return e;
}

static enum err fill_all(struct load *l, const struct json *root,
                         const struct tokenizer_options *options)
{
    const struct json *model = json_get(root, "model");
    TRY(check_frame(l, root, options));
    TRY(load_pre_tokenizer(l, root, options));
    TRY(check_model(l, model));
    TRY(load_vocab(l, json_get(model, "vocab")));
    TRY(load_added(l, json_get(root, "added_tokens")));
    TRY(index_vocab(l));
    TRY(load_merges(l, json_get(model, "merges")));
    return mark_direct(l->t);
}

enum err tokenizer_fill(struct tokenizer *t, const struct json *root,
                        const struct tokenizer_options *options, struct err_detail *detail)
{
    CHECK_OBJ(t, TOKENIZER_MAGIC);
    CHECK(root != NULL && options != NULL);
    struct load l = {.t = t, .detail = detail};
    alphabet_init(&l);
    str_init(&l.left, 2 * TOKEN_BYTES_MAX);
    str_init(&l.right, 2 * TOKEN_BYTES_MAX);
    enum err e = fill_all(&l, root, options);
    str_fini(&l.left);
    str_fini(&l.right);
    return e;
}
