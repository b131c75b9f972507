/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/detokenizer.h - token ids to text as they come, never half a character.
 *
 * One owner thread; the tokenizer is shared and immutable.  Holds at most three bytes.  Pure. */
#ifndef LIB_TEXT_DETOKENIZER_H
#define LIB_TEXT_DETOKENIZER_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/text/utf8_stream.h"

struct str;
struct tokenizer;

struct detokenizer {
    uint32_t magic;
    bool skip_special; /* tokens marked special are taken out before bytes are joined */
    const struct tokenizer *tokenizer;
    struct utf8_stream utf8;
};

/* Keeps the pointer: the tokenizer must outlive the detokenizer. */
void detokenizer_init(struct detokenizer *d, const struct tokenizer *tokenizer, bool skip_special);

/* Appends the text that id makes certain.  ERR_INVALID: no such token; nothing changes. */
MUST_USE enum err detokenizer_add(struct detokenizer *d, uint32_t id, struct str *out);
/* The end: appends U+FFFD for a sequence that stayed open; ready for another stream. */
void detokenizer_end(struct detokenizer *d, struct str *out);

#endif
