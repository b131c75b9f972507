/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/prompt.h - what tandem-model generate starts from: ids and defaults. */
#ifndef LIB_MODEL_TOOL_PROMPT_H
#define LIB_MODEL_TOOL_PROMPT_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/text/token_ids.h"

struct tokenizer;

/* tokenizer.json of the directory; *ret NULL if there is none. */
MUST_USE enum err prompt_tokenizer(const char *directory, struct tokenizer **ret,
                                   struct err_detail *detail);
/* Ids from a file: numbers between white space, or a JSON list of numbers. */
MUST_USE enum err prompt_read_ids(const char *path, uint32_t vocab_size, struct token_ids *out,
                                  struct err_detail *detail);
/* temperature and top_p of generation_config.json; left alone where it says nothing. */
MUST_USE enum err prompt_defaults(const char *directory, double *temperature, double *top_p,
                                  struct err_detail *detail);

#endif
