/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/tokenizer.h - byte-level BPE from a Hugging Face tokenizer.json.
 *
 * Loaded once, then immutable: any number of threads may encode and decode with it at the same
 * time.  Supported is what GLM's file and its relatives use: model BPE over all 256 bytes, no
 * normaliser, pre-tokenizer Sequence[Split(Regex, Isolated), ByteLevel], decoder ByteLevel,
 * added tokens without single_word, lstrip and rstrip.  Whatever else a file asks for is refused
 * by name.  The encoder adds no tokens of its own.
 *
 * Bounds: file TOKENIZER_FILE_BYTES_MAX, ids VOCAB_IDS_MAX, merges BPE_MERGES_MAX. */
#ifndef LIB_TEXT_TOKENIZER_H
#define LIB_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/text/token_ids.h"

#define TOKENIZER_FILE_BYTES_MAX (256u << 20)

struct tokenizer;

/* All zero = production. */
struct tokenizer_options {
    bool jit_off;               /* run the split pattern in the interpreter */
    uint32_t pattern_steps_max; /* of one match; 0 = default */
    bool normalizer_leave_out;  /* load a file that names a normaliser, without applying it */
};

/* A range of the text in which the strings of added tokens become their ids, or do not. */
struct tokenizer_span {
    size_t bytes;
    bool parse_special;
};

/* options may be NULL.  ERR_IO, ERR_INVALID, ERR_UNSUPPORTED, ERR_TOO_LARGE, ERR_NOMEM; detail
 * says what and where. */
MUST_USE enum err tokenizer_load(const char *path, const struct tokenizer_options *options,
                                 struct tokenizer **ret_tokenizer, struct err_detail *detail);
/* The same from memory; borrows the text for the call only. */
MUST_USE enum err tokenizer_parse(const char *text, size_t bytes,
                                  const struct tokenizer_options *options,
                                  struct tokenizer **ret_tokenizer, struct err_detail *detail);
void tokenizer_destroy(struct tokenizer **tokenizer_p);

/* Appends the ids of text.  parse_special: strings of added tokens become their ids; else the
 * whole text is plain, as text of a user must be.  ERR_INVALID: not UTF-8.  ERR_TOO_LARGE: out
 * is full (out->overflow) or the split pattern ran past its limit.  After an error out holds
 * some of the ids. */
MUST_USE enum err tokenizer_encode(const struct tokenizer *t, const char *text, size_t bytes,
                                   bool parse_special, struct token_ids *out);

/* Same for a text of several spans, which together are exactly its bytes.  Only strings that lie
 * inside one span with parse_special become added tokens; all text between two such tokens is
 * one run, so ids do not depend on how the run is cut into spans. */
MUST_USE enum err tokenizer_encode_spans(const struct tokenizer *t, const char *text, size_t bytes,
                                         const struct tokenizer_span *spans, size_t span_count,
                                         struct token_ids *out);

uint32_t tokenizer_id_count(const struct tokenizer *t);    /* highest id + 1 */
uint32_t tokenizer_token_count(const struct tokenizer *t); /* ids that have a token */
uint32_t tokenizer_bytes_longest(const struct tokenizer *t);
/* Bytes of a token, NULL when the id has none.  Lives as long as the tokenizer. */
const uint8_t *tokenizer_bytes(const struct tokenizer *t, uint32_t id, size_t *ret_count);
bool tokenizer_is_special(const struct tokenizer *t, uint32_t id); /* false without a token */
bool tokenizer_is_added(const struct tokenizer *t, uint32_t id);
/* By the exact text: added tokens first, then ordinary ones by their bytes. */
bool tokenizer_find(const struct tokenizer *t, const char *text, size_t bytes, uint32_t *ret_id);

#endif
