/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/draft_ngram.h - drafts from the text itself: what followed the last time.
 *
 * Pure.  Looks for the latest earlier occurrence of the last 4, 3, 2 or 1 ids. */
#ifndef LIB_MODEL_TOOL_DRAFT_NGRAM_H
#define LIB_MODEL_TOOL_DRAFT_NGRAM_H

#include <stdint.h>

/* Fills at most count_max drafts, returns how many. */
uint32_t draft_ngram(const uint32_t *ids, uint32_t count, uint32_t *drafts, uint32_t count_max);

#endif
