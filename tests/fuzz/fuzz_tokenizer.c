/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer: hostile tokenizer.json, and text that must come back from its ids.
 *
 * First byte odd: the rest is a document, whole; even: the rest is text for a fixed small
 * tokenizer.  A document that loads encodes a fixed text. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"
#include "lib/text/utf8_stream.h"

#define DOCUMENT_BYTES_MAX ((size_t)1 << 16)

static void add_level_char(struct str *out, uint32_t byte)
{
    uint32_t code_point = byte, others = 0;
    for (uint32_t b = 0; b <= byte; b++) {
        bool itself = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        if (b == byte && !itself)
            code_point = 256 + others;
        others += !itself;
    }
    char encoded[4];
    size_t count = utf8_encode(code_point, encoded);
    if (encoded[0] == '"' || encoded[0] == '\\')
        str_add_char(out, '\\');
    str_add(out, encoded, count);
}

static struct tokenizer *fixed_tokenizer(void)
{
    struct str s;
    str_init(&s, 0);
    str_add_text(&s, "{\"model\": {\"type\": \"BPE\", \"vocab\": {");
    for (uint32_t byte = 0; byte < 256; byte++) {
        str_add_text(&s, byte ? ", \"" : "\"");
        add_level_char(&s, byte);
        str_add_format(&s, "\": %u", byte);
    }
    str_add_text(
        &s,
        ", \"aa\": 256, \"aaaa\": 257, \"ab\": 258, \"ba\": 259, \"aab\": 260}, \"merges\": "
        "[\"a b\", \"a a\", \"b a\", \"aa aa\", \"aa b\"]}, \"pre_tokenizer\": {\"type\": "
        "\"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": \"(?i:'s"
        "|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| ?[^\\\\s"
        "\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"}, "
        "\"behavior\": \"Isolated\"}, {\"type\": \"ByteLevel\", \"use_regex\": false}]}, "
        "\"decoder\": {\"type\": \"ByteLevel\"}, \"added_tokens\": [{\"id\": 300, \"content\": "
        "\"<a>\", \"special\": true}, {\"id\": 301, \"content\": \"<aa\"}]}");
    struct tokenizer *t = NULL;
    struct err_detail detail;
    CHECK(tokenizer_parse(s.text, s.bytes, NULL, &t, &detail) == ERR_OK);
    str_fini(&s);
    return t;
}

static void round_trip(const struct tokenizer *t, const char *text, size_t bytes, bool special)
{
    struct token_ids ids;
    struct detokenizer d;
    struct str out;
    token_ids_init(&ids, 1 << 20);
    str_init(&out, 0);
    enum err e = tokenizer_encode(t, text, bytes, special, &ids);
    CHECK((e == ERR_INVALID) == (utf8_valid_prefix(text, bytes) != bytes));
    detokenizer_init(&d, t, false);
    for (size_t i = 0; i < ids.count; i++)
        CHECK(detokenizer_add(&d, ids.ids[i], &out) == ERR_OK);
    detokenizer_end(&d, &out);
    if (e == ERR_OK) {
        CHECK(out.bytes == bytes);
        CHECK(bytes == 0 || memcmp(out.text, text, bytes) == 0);
    }
    str_fini(&out);
    token_ids_fini(&ids);
}

/* Arbitrary bytes as ids of single bytes, and through the stream in two cuttings. */
static void decode_bytes(const struct tokenizer *t, const uint8_t *data, size_t size)
{
    struct detokenizer d;
    struct utf8_stream u = {0};
    struct str one, all;
    str_init(&one, 0);
    str_init(&all, 0);
    detokenizer_init(&d, t, true);
    for (size_t i = 0; i < size; i++)
        CHECK(detokenizer_add(&d, data[i], &one) == ERR_OK);
    detokenizer_end(&d, &one);
    utf8_stream_add(&u, data, size, &all);
    utf8_stream_end(&u, &all);
    CHECK(one.bytes == all.bytes);
    CHECK(utf8_valid_prefix(one.text, one.bytes) == one.bytes);
    CHECK(one.bytes == 0 || memcmp(one.text, all.text, one.bytes) == 0);
    if (all.bytes > 0) /* valid now, so it has to come back */
        round_trip(t, all.text, all.bytes, true);
    str_fini(&one);
    str_fini(&all);
}

static void load_document(const uint8_t *data, size_t size)
{
    static const char text[] = "Hello <a> world's 123\r\n  \xe6\xbc\xa2 <|user|> aabaa";
    const struct tokenizer_options options = {.pattern_steps_max = 10000,
                                              .normalizer_leave_out = data[0] & 2};
    struct tokenizer *t = NULL;
    struct err_detail detail = {{0}};
    enum err e = tokenizer_parse((const char *)data + 1, size - 1, &options, &t, &detail);
    CHECK((e == ERR_OK) == (t != NULL));
    if (t == NULL)
        return;
    struct token_ids ids;
    token_ids_init(&ids, 256);
    if (tokenizer_encode(t, text, sizeof(text) - 1, true, &ids) == ERR_OK)
        for (size_t i = 0; i < ids.count; i++) {
            size_t count = 0;
            CHECK(tokenizer_bytes(t, ids.ids[i], &count) != NULL && count > 0);
        }
    token_ids_fini(&ids);
    tokenizer_destroy(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tokenizer *fixed;
    if (fixed == NULL)
        fixed = fixed_tokenizer();
    if (size < 1 || size > DOCUMENT_BYTES_MAX)
        return 0;
    if (data[0] & 1) {
        load_document(data, size);
        return 0;
    }
    round_trip(fixed, (const char *)data + 1, size - 1, data[0] & 2);
    decode_bytes(fixed, data + 1, size - 1);
    return 0;
}
