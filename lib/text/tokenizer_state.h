/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/tokenizer_state.h - what tokenizer.c and tokenizer_load.c share; nobody else.
 *
 * Written by the loading thread, immutable after. */
#ifndef LIB_TEXT_TOKENIZER_STATE_H
#define LIB_TEXT_TOKENIZER_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/text/added.h"
#include "lib/text/bpe.h"
#include "lib/text/splitter.h"
#include "lib/text/vocab.h"

#define TOKENIZER_MAGIC 0x746f6b6eu

struct json;
struct tokenizer_options;

struct tokenizer {
    uint32_t magic;
    bool ignore_merges; /* a piece that is an entry needs no merges */
    struct vocab vocab;
    struct bpe bpe;
    struct splitter *splitter;
    struct added added_first;  /* flag normalized false: looked for in the raw text */
    struct added added_second; /* flag normalized true: looked for in what is left */
};

/* Fills an all-zero tokenizer from the document; t is to be destroyed after an error too. */
MUST_USE enum err tokenizer_fill(struct tokenizer *t, const struct json *root,
                                 const struct tokenizer_options *options,
                                 struct err_detail *detail);

#endif
