/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/splitter.h - cuts text into pieces by the regular expression of the tokenizer file.
 *
 * The one file of lib/text that knows PCRE2.  Compiled at load, immutable and shared after; the
 * match data belongs to one call.  Behaviour "Isolated": every match is a piece, and so is every
 * gap between matches.
 *
 * PCRE2 and the engine the files are written for differ in \s: PCRE2 counts U+180E.  So \s and \S
 * are rewritten as the White_Space property before compiling. */
#ifndef LIB_TEXT_SPLITTER_H
#define LIB_TEXT_SPLITTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define SPLITTER_PATTERN_BYTES_MAX 4096

struct splitter;

struct splitter_options {
    bool jit_off;
    uint32_t steps_max; /* of one match; 0 = 200 million, enough for any linear pattern */
};

MUST_USE enum err splitter_create(const char *pattern, size_t bytes,
                                  const struct splitter_options *options,
                                  struct splitter **ret_splitter, struct err_detail *detail);
void splitter_destroy(struct splitter **splitter_p);

/* A walk over one text.  The text must be valid UTF-8 and outlive the walk. */
struct splitter_walk {
    const struct splitter *splitter;
    const char *text;
    size_t bytes;
    size_t at;          /* begin of the next piece */
    size_t match_begin; /* found already, behind a gap; match_end 0 = none */
    size_t match_end;
    void *match_data;
};

MUST_USE enum err splitter_walk_init(struct splitter_walk *w, const struct splitter *s);
void splitter_walk_fini(struct splitter_walk *w);
void splitter_walk_begin(struct splitter_walk *w, const char *text, size_t bytes);

/* Next piece, never empty; *ret_bytes 0 at the end.  ERR_TOO_LARGE: the pattern needs more than
 * steps_max steps for this text. */
MUST_USE enum err splitter_walk_next(struct splitter_walk *w, size_t *ret_begin, size_t *ret_bytes);

#endif
