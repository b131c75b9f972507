/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_openai_response.h - the JSON of OpenAI's answers, formatted directly, no tree.
 *
 * Owned by the loop thread; pure.  Everything appends to out. */
#ifndef GATEWAY_GW_OPENAI_RESPONSE_H
#define GATEWAY_GW_OPENAI_RESPONSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/str.h"

struct gw_answer;
struct gw_choice;
struct msg_tokens;

/* {"id":...,"choices":[{"index": : the same for all chunks of an answer. */
void gw_openai_chunk_head(const struct gw_answer *a, struct str *out);
void gw_openai_role_chunk(const struct gw_answer *a, struct gw_choice *c, struct str *out);
void gw_openai_text_chunk(const struct gw_answer *a, struct gw_choice *c, bool reasoning,
                          const char *text, size_t bytes, struct str *out);
void gw_openai_call_chunk(const struct gw_answer *a, struct gw_choice *c, uint32_t call,
                          const char *name, size_t bytes, struct str *out);
void gw_openai_arguments_chunk(const struct gw_answer *a, struct gw_choice *c, uint32_t call,
                               const char *text, size_t bytes, struct str *out);
void gw_openai_finish_chunk(const struct gw_answer *a, struct gw_choice *c, struct str *out);
void gw_openai_usage_chunk(const struct gw_answer *a, struct str *out);

/* Whole answers: a call's beginning, and the object. */
void gw_openai_call_begin(const struct gw_answer *a, const struct gw_choice *c, uint32_t call,
                          const char *name, size_t bytes, struct str *out);
void gw_openai_object(const struct gw_answer *a, struct str *out);

/* Notes of token i of a message in the choice's lists. */
void gw_openai_note_logprob(struct gw_answer *a, struct gw_choice *c, const struct msg_tokens *t,
                            uint32_t i, uint32_t id);

#endif
