/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/golden_lines.h"

#include <pthread.h>

#include "lib/base/hash.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"

#define TINY "tests/golden/tokenizer/tiny/tokenizer.json"

static struct tokenizer *tiny, *tiny_plain_engine;

static struct tokenizer *load(const char *below, const struct tokenizer_options *options)
{
    char path[4096];
    golden_path(path, sizeof(path), below);
    struct err_detail detail = {{0}};
    struct tokenizer *t = NULL;
    enum err e = tokenizer_load(path, options, &t, &detail);
    if (e != ERR_OK)
        fail_msg("%s: %s", err_name(e), detail.text);
    return t;
}

static int setup(void **state)
{
    const struct tokenizer_options jit_off = {.jit_off = true};
    tiny = load(TINY, NULL);
    tiny_plain_engine = load(TINY, &jit_off);
    return 0;
}

static int teardown(void **state)
{
    tokenizer_destroy(&tiny);
    tokenizer_destroy(&tiny_plain_engine);
    return 0;
}

static void expect_ids(const struct json *line, const struct token_ids *ids)
{
    const struct json *list = json_get(line, "ids");
    const struct json *text = golden_string(line, "text");
    uint32_t at = 0;
    for (const struct json *v = list->child; v; v = v->next, at++) {
        uint64_t id = 0;
        assert_true(json_u64(v, &id));
        if (at >= ids->count || ids->ids[at] != id)
            fail_msg("\"%.*s\": id %u of %u differs (%zu made)", (int)text->bytes, text->text, at,
                     list->count, ids->count);
    }
    assert_int_equal(ids->count, list->count);
}

static void encode_line(const struct tokenizer *t, const struct json *line, bool parse_special)
{
    const struct json *text = golden_string(line, "text");
    struct token_ids ids;
    token_ids_init(&ids, 1 << 20);
    assert_int_equal(tokenizer_encode(t, text->text, text->bytes, parse_special, &ids), ERR_OK);
    expect_ids(line, &ids);
    token_ids_fini(&ids);
}

/* Decoding with nothing skipped gives the text back. */
static void decode_line(const struct json *line)
{
    const struct json *text = golden_string(line, "text");
    struct detokenizer d;
    struct str out;
    str_init(&out, 0);
    detokenizer_init(&d, tiny, false);
    for (const struct json *v = json_get(line, "ids")->child; v; v = v->next) {
        uint64_t id = 0;
        assert_true(json_u64(v, &id));
        assert_int_equal(detokenizer_add(&d, (uint32_t)id, &out), ERR_OK);
    }
    detokenizer_end(&d, &out);
    assert_int_equal(out.bytes, text->bytes);
    assert_memory_equal(out.text ? out.text : "", text->text, text->bytes);
    str_fini(&out);
}

static void on_encode(void *context, struct arena *arena, const struct json *line)
{
    bool parse_special = golden_bool(line, "parse_special");
    encode_line(tiny, line, parse_special);
    encode_line(tiny_plain_engine, line, parse_special);
    decode_line(line);
}

static void test_encode(void **state)
{
    assert_int_equal(golden_lines("tests/golden/tokenizer/tiny/encode.jsonl", on_encode, NULL),
                     513);
}

/* Plain runs that are cut into spans, in the middle of characters too, give the same ids. */
static void on_spans(void *context, struct arena *arena, const struct json *line)
{
    struct rng *rng = context;
    const struct json *text = golden_string(line, "text");
    if (golden_bool(line, "parse_special") || text->bytes == 0)
        return;
    struct tokenizer_span spans[8];
    size_t left = text->bytes;
    for (size_t i = 0; i < 8; i++) {
        spans[i].parse_special = false;
        spans[i].bytes = i == 7 ? left : (size_t)rng_below(rng, (uint32_t)left + 1);
        left -= spans[i].bytes;
    }
    struct token_ids ids;
    token_ids_init(&ids, 1 << 20);
    assert_int_equal(tokenizer_encode_spans(tiny, text->text, text->bytes, spans, 8, &ids), ERR_OK);
    expect_ids(line, &ids);
    token_ids_fini(&ids);
}

static void test_spans(void **state)
{
    struct rng rng;
    rng_init(&rng, 7);
    (void)golden_lines("tests/golden/tokenizer/tiny/encode.jsonl", on_spans, &rng);
}

/* Control text counts in its own span only. */
static void test_spans_keep_user_text_plain(void **state)
{
    const char text[] = "<|user|><think><|user|></think>";
    const struct tokenizer_span spans[] = {{8, true}, {15, false}, {8, true}};
    struct token_ids ids;
    uint32_t user = 0, think_end = 0, think = 0;
    assert_true(tokenizer_find(tiny, "<|user|>", 8, &user));
    assert_true(tokenizer_find(tiny, "<think>", 7, &think));
    assert_true(tokenizer_find(tiny, "</think>", 8, &think_end));
    token_ids_init(&ids, 64);
    assert_int_equal(tokenizer_encode_spans(tiny, text, sizeof(text) - 1, spans, 3, &ids), ERR_OK);
    assert_true(ids.count > 4);
    assert_int_equal(ids.ids[0], user);
    assert_int_equal(ids.ids[ids.count - 1], think_end);
    for (size_t i = 1; i + 1 < ids.count; i++)
        assert_false(tokenizer_is_added(tiny, ids.ids[i]));
    assert_true(tokenizer_is_special(tiny, user));
    assert_false(tokenizer_is_special(tiny, think));
    token_ids_fini(&ids);
}

static void on_detokenize(void *context, struct arena *arena, const struct json *line)
{
    struct detokenizer d;
    struct str all, one;
    str_init(&all, 0);
    str_init(&one, 0);
    detokenizer_init(&d, tiny, golden_bool(line, "skip_special"));
    const struct json *chunk = json_get(line, "chunks")->child;
    for (const struct json *v = json_get(line, "ids")->child; v; v = v->next) {
        uint64_t id = 0;
        assert_true(json_u64(v, &id));
        str_clear(&one);
        assert_int_equal(detokenizer_add(&d, (uint32_t)id, &one), ERR_OK);
        assert_true(json_is(chunk, JSON_STRING));
        assert_int_equal(one.bytes, chunk->bytes);
        assert_memory_equal(one.text ? one.text : "", chunk->text, chunk->bytes);
        str_add(&all, one.text, one.bytes);
        chunk = chunk->next;
    }
    assert_null(chunk);
    str_clear(&one);
    detokenizer_end(&d, &one);
    const struct json *final = golden_string(line, "final");
    assert_int_equal(one.bytes, final->bytes);
    str_add(&all, one.text, one.bytes);
    const struct json *text = golden_string(line, "text");
    assert_int_equal(all.bytes, text->bytes);
    assert_memory_equal(all.text ? all.text : "", text->text, text->bytes);
    str_fini(&all);
    str_fini(&one);
}

static void test_detokenize(void **state)
{
    assert_int_equal(
        golden_lines("tests/golden/tokenizer/tiny/detokenize.jsonl", on_detokenize, NULL), 92);
}

static void test_accessors(void **state)
{
    size_t count = 0;
    assert_int_equal(tokenizer_id_count(tiny), 1012);
    assert_int_equal(tokenizer_token_count(tiny), 1012);
    assert_null(tokenizer_bytes(tiny, 1012, &count));
    assert_null(tokenizer_bytes(tiny, UINT32_MAX, &count));
    assert_false(tokenizer_is_special(tiny, UINT32_MAX));
    const uint8_t *bytes = tokenizer_bytes(tiny, 978, &count);
    assert_int_equal(count, 7);
    assert_memory_equal(bytes, "[gMASK]", 7);
    uint32_t id = 0;
    assert_false(tokenizer_find(tiny, "<think", 6, &id));
    assert_false(tokenizer_find(tiny, "", 0, &id));
    assert_true(tokenizer_find(tiny, "!", 1, &id));
    assert_int_equal(id, 0);
}

static void test_bound_and_utf8(void **state)
{
    struct token_ids ids;
    token_ids_init(&ids, 3);
    assert_int_equal(tokenizer_encode(tiny, "one two three four", 18, false, &ids), ERR_TOO_LARGE);
    assert_true(ids.overflow);
    assert_int_equal(ids.count, 3);
    token_ids_clear(&ids);
    assert_int_equal(tokenizer_encode(tiny, "a\xff", 2, false, &ids), ERR_INVALID);
    assert_int_equal(ids.count, 0);
    assert_int_equal(tokenizer_encode(tiny, NULL, 0, true, &ids), ERR_OK);
    assert_int_equal(ids.count, 0);
    struct detokenizer d;
    struct str out;
    str_init(&out, 0);
    detokenizer_init(&d, tiny, false);
    assert_int_equal(detokenizer_add(&d, 1012, &out), ERR_INVALID);
    assert_int_equal(out.bytes, 0);
    str_fini(&out);
    token_ids_fini(&ids);
}

/* One word without end, and white space without end: quick, and decodes to itself. */
static void test_long_pieces(void **state)
{
    static const char *const units[] = {"a", "er", " ", "\n ", "e\xcc\x81", "\xe6\xbc\xa2", "\"::"};
    size_t bytes = (1 << 20) + 4096; /* past the bound of one piece */
    char *text = malloc(bytes + 8);
    assert_non_null(text);
    for (size_t u = 0; u < sizeof(units) / sizeof(units[0]); u++) {
        size_t unit = strlen(units[u]), count = 0;
        while (count + unit <= bytes) {
            memcpy(text + count, units[u], unit);
            count += unit;
        }
        struct token_ids ids;
        token_ids_init(&ids, 8 << 20);
        assert_int_equal(tokenizer_encode(tiny, text, count, false, &ids), ERR_OK);
        struct detokenizer d;
        struct str out;
        str_init(&out, 0);
        detokenizer_init(&d, tiny, true);
        for (size_t i = 0; i < ids.count; i++)
            assert_int_equal(detokenizer_add(&d, ids.ids[i], &out), ERR_OK);
        detokenizer_end(&d, &out);
        assert_int_equal(out.bytes, count);
        assert_memory_equal(out.text, text, count);
        str_fini(&out);
        token_ids_fini(&ids);
    }
    free(text);
}

#define THREADS 4

struct shared_text {
    const struct tokenizer *tokenizer;
    const char *text;
    size_t bytes;
    const struct token_ids *want;
    uint32_t wrong; /* by one thread each, read after the join */
};

static void *encode_often(void *argument)
{
    struct shared_text *s = argument;
    for (uint32_t i = 0; i < 20; i++) {
        struct token_ids ids;
        token_ids_init(&ids, 1 << 20);
        if (tokenizer_encode(s->tokenizer, s->text, s->bytes, true, &ids) != ERR_OK ||
            ids.count != s->want->count ||
            memcmp(ids.ids, s->want->ids, ids.count * sizeof(ids.ids[0])) != 0)
            s->wrong++;
        token_ids_fini(&ids);
    }
    return NULL;
}

/* One tokenizer, many threads: the same ids in each. */
static void test_threads(void **state)
{
    char path[4096];
    golden_path(path, sizeof(path), "tests/golden/tokenizer/tiny/detokenize.jsonl");
    size_t bytes = 0;
    char *text = golden_read(path, &bytes);
    struct token_ids want;
    token_ids_init(&want, 1 << 20);
    assert_int_equal(tokenizer_encode(tiny, text, bytes, true, &want), ERR_OK);
    struct shared_text shared[THREADS];
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        shared[i] =
            (struct shared_text){.tokenizer = tiny, .text = text, .bytes = bytes, .want = &want};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &shared[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(shared[i].wrong, 0);
    }
    token_ids_fini(&want);
    free(text);
}

/* A document around all 256 bytes: the parts a case wants to change are replaced. */
struct document {
    const char *frame;  /* members beside model, or NULL */
    const char *extra;  /* further members of model */
    const char *vocab;  /* further entries, each with a comma before it */
    const char *merges; /* of the list */
    const char *added;
    bool without_byte; /* leave 'z' out */
    uint32_t steps_max;
};

static bool stands_for_itself(uint32_t byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static void level_char(struct str *out, uint32_t byte)
{
    uint32_t code_point = byte;
    if (!stands_for_itself(byte)) {
        code_point = 256;
        for (uint32_t b = 0; b < byte; b++)
            code_point += !stands_for_itself(b);
    }
    char encoded[4];
    size_t count = utf8_encode(code_point, encoded);
    if (encoded[0] == '"' || encoded[0] == '\\')
        str_add_char(out, '\\');
    str_add(out, encoded, count);
}

static enum err parse_document(const struct document *d, struct tokenizer **ret_tokenizer,
                               struct err_detail *detail)
{
    struct str s;
    str_init(&s, 0);
    str_add_text(&s, "{\"model\": {\"type\": \"BPE\", \"vocab\": {");
    for (uint32_t byte = 0; byte < 256; byte++) {
        if (d->without_byte && byte == 'z')
            continue;
        str_add_text(&s, byte ? ", \"" : "\"");
        level_char(&s, byte);
        str_add_format(&s, "\": %u", byte);
    }
    str_add_format(&s, "%s}, \"merges\": [%s]%s}, ", d->vocab ? d->vocab : "",
                   d->merges ? d->merges : "", d->extra ? d->extra : "");
    str_add_text(&s, d->frame
                         ? d->frame
                         : "\"normalizer\": null, \"pre_tokenizer\": {\"type\": \"Sequence\", "
                           "\"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": "
                           "\"\\\\p{L}+|\\\\s+|[^\\\\s\\\\p{L}]+\"}, \"behavior\": "
                           "\"Isolated\"}, {\"type\": \"ByteLevel\", \"use_regex\": false}]}, "
                           "\"decoder\": {\"type\": \"ByteLevel\"}");
    str_add_format(&s, ", \"added_tokens\": [%s]}", d->added ? d->added : "");
    const struct tokenizer_options options = {.pattern_steps_max = d->steps_max};
    enum err e = tokenizer_parse(s.text, s.bytes, &options, ret_tokenizer, detail);
    str_fini(&s);
    return e;
}

static void encode_is(const struct tokenizer *t, const char *text, const uint32_t *want,
                      size_t count)
{
    struct token_ids ids;
    token_ids_init(&ids, 64);
    assert_int_equal(tokenizer_encode(t, text, strlen(text), true, &ids), ERR_OK);
    assert_int_equal(ids.count, count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(ids.ids[i], want[i]);
    token_ids_fini(&ids);
}

static void test_both_spellings_of_merges(void **state)
{
    static const char *const spellings[] = {
        "\"a b\", \"c d\", \"ab cd\", \"\xc4\xa0 a\"",
        "[\"a\", \"b\"], [\"c\", \"d\"], [\"ab\", \"cd\"], [\"\xc4\xa0\", \"a\"]"};
    for (size_t i = 0; i < 2; i++) {
        const struct document d = {
            .vocab = ", \"ab\": 300, \"cd\": 301, \"abcd\": 302, \"\xc4\xa0\x61\": 303",
            .merges = spellings[i]};
        struct tokenizer *t = NULL;
        struct err_detail detail = {{0}};
        assert_int_equal(parse_document(&d, &t, &detail), ERR_OK);
        encode_is(t, "abcd", (const uint32_t[]){302}, 1);
        encode_is(t, "abcab", (const uint32_t[]){300, 'c', 300}, 3);
        encode_is(t, "xabcdx", (const uint32_t[]){'x', 302, 'x'}, 3);
        assert_int_equal(tokenizer_id_count(t), 304);
        assert_int_equal(tokenizer_token_count(t), 260);
        size_t count;
        assert_null(tokenizer_bytes(t, 256, &count));
        tokenizer_destroy(&t);
    }
}

/* Rank decides before position; an entry without a way to it is used only with ignore_merges. */
static void test_rank_and_ignore_merges(void **state)
{
    struct document d = {.vocab = ", \"bc\": 300, \"ab\": 301, \"abc\": 302, \"abcx\": 303",
                         .merges = "\"b c\", \"a b\", \"ab c\""};
    struct tokenizer *t = NULL;
    struct err_detail detail = {{0}};
    assert_int_equal(parse_document(&d, &t, &detail), ERR_OK);
    encode_is(t, "abc", (const uint32_t[]){'a', 300}, 2);
    encode_is(t, "abcx", (const uint32_t[]){'a', 300, 'x'}, 3);
    tokenizer_destroy(&t);
    d.extra = ", \"ignore_merges\": true";
    assert_int_equal(parse_document(&d, &t, &detail), ERR_OK);
    encode_is(t, "abc", (const uint32_t[]){302}, 1);
    encode_is(t, "abcx", (const uint32_t[]){303}, 1);
    encode_is(t, "abcxa", (const uint32_t[]){'a', 300, 'x', 'a'}, 4);
    tokenizer_destroy(&t);
}

/* Longest added token wins; those with normalized true are looked for in what is left. */
static void test_added_passes(void **state)
{
    const struct document d = {
        .added =
            "{\"id\": 300, \"content\": \"<x\", \"special\": true}, {\"id\": 301, \"content\": "
            "\"<xy>\", \"special\": true}, {\"id\": 302, \"content\": \"y<\"}"};
    struct tokenizer *t = NULL;
    struct err_detail detail = {{0}};
    assert_int_equal(parse_document(&d, &t, &detail), ERR_OK);
    encode_is(t, "<xy>", (const uint32_t[]){301}, 1);
    encode_is(t, "y<x", (const uint32_t[]){'y', 300}, 2);
    encode_is(t, "y<y<xy", (const uint32_t[]){302, 'y', 300, 'y'}, 4);
    tokenizer_destroy(&t);
}

#define FRAME(normalizer, pre, decoder)                                                            \
    "\"normalizer\": " normalizer ", \"pre_tokenizer\": " pre ", \"decoder\": " decoder
#define SPLIT(pattern, behavior)                                                                   \
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": " \
    "\"" pattern "\"}, \"behavior\": \"" behavior "\"}, {\"type\": \"ByteLevel\", \"use_regex\": " \
    "false}]}"
#define LEVEL "{\"type\": \"ByteLevel\"}"

static void test_refusals(void **state)
{
    static const struct {
        struct document document;
        enum err error;
        const char *part; /* of the message */
    } cases[] = {
        {{.without_byte = true}, ERR_INVALID, "byte 0x7a"},
        {{.vocab = ", \"ab\": 97"}, ERR_INVALID, "id 97 stands twice"},
        {{.vocab = ", \"ab\": -1"}, ERR_INVALID, "model.vocab[256]"},
        {{.vocab = ", \"ab\": 99999999"}, ERR_INVALID, "model.vocab[256]"},
        {{.vocab = ", \"\": 300"}, ERR_INVALID, "text of 0 bytes"},
        {{.vocab = ", \"a\": 300"}, ERR_INVALID, "byte"},
        {{.merges = "\"a b\""}, ERR_INVALID, "merges[0]: its result"},
        {{.merges = "\"a bc\""}, ERR_INVALID, "merges[0]: a part"},
        {{.merges = "\"a\""}, ERR_INVALID, "merges[0]: neither"},
        {{.merges = "[\"a\"]"}, ERR_INVALID, "merges[0]: neither"},
        {{.merges = "3"}, ERR_INVALID, "merges[0]: neither"},
        {{.merges = "\"a b c\""}, ERR_INVALID, "merges[0]: a part"},
        {{.merges = "\"a \""}, ERR_INVALID, "merges[0]: a part"},
        {{.extra = ", \"dropout\": 0.1"}, ERR_UNSUPPORTED, "dropout"},
        {{.extra = ", \"byte_fallback\": true"}, ERR_UNSUPPORTED, "byte_fallback"},
        {{.extra = ", \"end_of_word_suffix\": \"</w>\""}, ERR_UNSUPPORTED, "end_of_word_suffix"},
        {{.extra = ", \"ignore_merges\": 1"}, ERR_INVALID, "ignore_merges"},
        {{.added = "{\"id\": 97, \"content\": \"x\"}"}, ERR_INVALID, "added_tokens[0]"},
        {{.added = "{\"id\": 300, \"content\": \"\"}"}, ERR_INVALID, "content"},
        {{.added = "{\"id\": 300, \"content\": \"x\", \"lstrip\": true}"},
         ERR_UNSUPPORTED,
         "added_tokens[0].lstrip"},
        {{.added = "{\"id\": 300, \"content\": \"x\", \"single_word\": true}"},
         ERR_UNSUPPORTED,
         "single_word"},
        {{.added = "{\"id\": 300, \"content\": \"x\"}, {\"id\": 301, \"content\": \"x\"}"},
         ERR_INVALID,
         "added_tokens[1].content stands twice"},
        {{.added = "{\"id\": 300, \"content\": \"x\"}, {\"id\": 300, \"content\": \"x\"}"},
         ERR_INVALID,
         "added_tokens[1]"},
        {{.frame = FRAME("{\"type\": \"NFC\"}", SPLIT("a+", "Isolated"), LEVEL)},
         ERR_UNSUPPORTED,
         "normalizer"},
        {{.frame = FRAME("null", LEVEL, LEVEL)}, ERR_UNSUPPORTED, "pre_tokenizer.type"},
        {{.frame = FRAME("null", "null", LEVEL)}, ERR_UNSUPPORTED, "pre_tokenizer"},
        {{.frame = FRAME("null", SPLIT("a+", "Removed"), LEVEL)}, ERR_UNSUPPORTED, "behavior"},
        {{.frame = FRAME("null", SPLIT("a(", "Isolated"), LEVEL)}, ERR_INVALID, "pattern"},
        {{.frame = FRAME("null", SPLIT("\\\\w+", "Isolated"), LEVEL)}, ERR_UNSUPPORTED, "byte 0"},
        {{.frame = FRAME("null", SPLIT("(*UCP)a", "Isolated"), LEVEL)}, ERR_UNSUPPORTED, "byte 0"},
        {{.frame = FRAME("null", SPLIT("", "Isolated"), LEVEL)}, ERR_TOO_LARGE, "pattern"},
        {{.frame = FRAME("null", SPLIT("a+", "Isolated"), "{\"type\": \"WordPiece\"}")},
         ERR_UNSUPPORTED,
         "decoder.type"},
        {{.frame = FRAME("null", SPLIT("a+", "Isolated"), LEVEL) ", \"truncation\": {}"},
         ERR_UNSUPPORTED,
         "truncation"},
        {{.frame = FRAME("null", SPLIT("a+", "Isolated"),
                         LEVEL) ", \"post_processor\": {\"type\": \"TemplateProcessing\"}"},
         ERR_UNSUPPORTED,
         "post_processor"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tokenizer *t = NULL;
        struct err_detail detail = {{0}};
        enum err e = parse_document(&cases[i].document, &t, &detail);
        if (e != cases[i].error || strstr(detail.text, cases[i].part) == NULL)
            fail_msg("case %zu: %s: %s", i, err_name(e), detail.text);
        assert_null(t);
    }
}

static void test_refused_files(void **state)
{
    struct tokenizer *t = NULL;
    struct err_detail detail = {{0}};
    char path[4096];
    golden_path(path, sizeof(path), "tests/golden/tokenizer/absent.json");
    assert_int_equal(tokenizer_load(path, NULL, &t, &detail), ERR_IO);
    golden_path(path, sizeof(path), "tests/golden/tokenizer");
    assert_int_equal(tokenizer_load(path, NULL, &t, &detail), ERR_IO);
    assert_int_equal(tokenizer_parse("", 0, NULL, &t, &detail), ERR_INVALID);
    assert_int_equal(tokenizer_parse("[]", 2, NULL, &t, &detail), ERR_INVALID);
    assert_int_equal(tokenizer_parse("{}", 2, NULL, &t, &detail), ERR_INVALID);
    assert_int_equal(tokenizer_parse("{\"model\": ", 10, NULL, &t, &detail), ERR_INVALID);
    assert_null(t);
}

/* A pattern that explodes is stopped, it does not hang. */
static void test_pattern_limit(void **state)
{
    const struct document d = {.frame = FRAME("null", SPLIT("(a+)+[bc]", "Isolated"), LEVEL),
                               .steps_max = 100000};
    struct tokenizer *t = NULL;
    struct err_detail detail = {{0}};
    assert_int_equal(parse_document(&d, &t, &detail), ERR_OK);
    struct token_ids ids;
    token_ids_init(&ids, 1024);
    char text[65];
    memset(text, 'a', sizeof(text));
    assert_int_equal(tokenizer_encode(t, text, sizeof(text), false, &ids), ERR_TOO_LARGE);
    assert_false(ids.overflow);
    token_ids_fini(&ids);
    tokenizer_destroy(&t);
}

/* Large vocabularies: only where the files are at hand (golden data says which). */
static void on_scale(void *context, struct arena *arena, const struct json *line)
{
    bool needs_nfc = false;
    (void)json_bool(json_get(line, "needs_nfc"), &needs_nfc);
    if (!needs_nfc)
        encode_line(context, line, true);
}

static void scale(const char *file, const char *sha256, const char *lines)
{
    const char *folder = getenv("TANDEM_SCALE_TOKENIZERS");
    if (folder == NULL) {
        print_message("TANDEM_SCALE_TOKENIZERS is not set: skipped\n");
        skip();
    }
    char path[4096], hex[65];
    assert_true(snprintf(path, sizeof(path), "%s/%s", folder, file) < (int)sizeof(path));
    size_t bytes = 0;
    char *text = golden_read(path, &bytes);
    uint8_t digest[32];
    hash_sha256(text, bytes, digest);
    hex_encode(digest, sizeof(digest), hex);
    if (strcmp(hex, sha256) != 0) {
        free(text);
        skip();
    }
    const struct tokenizer_options options = {.normalizer_leave_out = true};
    struct err_detail detail = {{0}};
    struct tokenizer *t = NULL;
    if (tokenizer_parse(text, bytes, &options, &t, &detail) != ERR_OK)
        fail_msg("%s: %s", file, detail.text);
    free(text);
    assert_int_equal(golden_lines(lines, on_scale, t), 200);
    tokenizer_destroy(&t);
}

static void test_scale_qwen3(void **state)
{
    scale("qwen3.json", "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
          "tests/golden/tokenizer/scale-qwen3.jsonl");
}

static void test_scale_gptoss(void **state)
{
    scale("gptoss.json", "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
          "tests/golden/tokenizer/scale-gptoss.jsonl");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encode),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_spans_keep_user_text_plain),
        cmocka_unit_test(test_detokenize),
        cmocka_unit_test(test_accessors),
        cmocka_unit_test(test_bound_and_utf8),
        cmocka_unit_test(test_long_pieces),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_both_spellings_of_merges),
        cmocka_unit_test(test_rank_and_ignore_merges),
        cmocka_unit_test(test_added_passes),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_refused_files),
        cmocka_unit_test(test_pattern_limit),
        cmocka_unit_test(test_scale_qwen3),
        cmocka_unit_test(test_scale_gptoss),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
