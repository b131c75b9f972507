/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/texts.h - texts from a file as token ids: for calibration and for comparing.
 *
 * A file whose first character is `{` holds a JSON object a line: "prompt" and "text" (either may
 * be missing), "name", and "ids" where the answer's ids matter exactly; strings of special tokens
 * become their ids.  Any other file is one text, cut into pieces.  Bounds: 256 MiB, TEXTS_MAX
 * texts, tokens_max in all; what lies beyond tokens_max is left out. */
#ifndef LIB_MODEL_TOOL_TEXTS_H
#define LIB_MODEL_TOOL_TEXTS_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/arena.h"
#include "lib/base/err.h"

struct tokenizer;

#define TEXTS_MAX       65536u
#define TEXTS_PIECE_IDS 2048u /* of a plain text */

struct text_case {
    const char *name;
    uint32_t *ids; /* prompt, then answer */
    uint32_t prompt_count, count;
};

struct texts {
    struct arena arena;
    struct text_case *cases;
    uint32_t count;
    uint64_t tokens;
    uint64_t tokens_left_out;
};

MUST_USE enum err texts_read(const char *path, const struct tokenizer *tokenizer,
                             uint32_t vocab_size, uint64_t tokens_max, struct texts *ret_texts,
                             struct err_detail *detail);
void texts_fini(struct texts *t);

#endif
