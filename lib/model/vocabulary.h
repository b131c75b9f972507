/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/vocabulary.h - which ids have a token, from tokenizer.json.
 *
 * Start-up only, pure.  Ids are those of model.vocab and added_tokens; an id outside the
 * vocabulary is refused. */
#ifndef LIB_MODEL_VOCABULARY_H
#define LIB_MODEL_VOCABULARY_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define VOCABULARY_NO_ID UINT32_MAX

/* Marks has_token[vocab_size]; *ret_assistant_id is the id of <|assistant|>, or
 * VOCABULARY_NO_ID. */
MUST_USE enum err vocabulary_read(const char *text, size_t bytes, uint32_t vocab_size,
                                  uint8_t *has_token, uint32_t *ret_assistant_id,
                                  struct err_detail *detail);

/* What two processes compare to know that their ids mean the same: BLAKE2b of the file. */
struct hash128 vocabulary_fp(const char *text, size_t bytes);

#endif
