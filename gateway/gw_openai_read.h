/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_openai_read.h - what the files that read OpenAI's JSON share; nobody else includes it.
 *
 * Any thread; pure.  Every reader returns false after filling the refusal. */
#ifndef GATEWAY_GW_OPENAI_READ_H
#define GATEWAY_GW_OPENAI_READ_H

#include "gateway/gw_openai.h"
#include "lib/base/json.h"

struct gw_reader {
    struct gw_openai *o;
    const struct gw_openai_input *in;
    struct gw_request *r; /* NULL for tokenize and detokenize */
    struct gw_refusal *refusal;
    const char *field; /* being read */
    /* kept for later, when all fields are known */
    const struct json *messages, *tools, *tool_choice, *kwargs, *effort, *prompt, *tokens;
    const struct json *logprobs;
    bool add_generation_prompt, token_strings;
    uint32_t max_tokens, max_completion_tokens, best_of;
    bool best_of_given, seed_given, no_tokens;
    const char *session_id, *cache_key, *user;
    uint32_t unknown_fields;
};

/* gw_openai_fields.c: reads every member of the body by the table of fields. */
bool gw_reader_fields(struct gw_reader *rd, const struct json *body);

/* gw_openai_check.c: types inside messages and tools */
bool gw_reader_check_chat(struct gw_reader *rd);

/* gw_openai_prompt.c */
bool gw_reader_body(struct gw_reader *rd, struct json **ret_body);
bool gw_reader_chat_prompt(struct gw_reader *rd, struct gw_prompt *ret_prompt);
bool gw_reader_prompts(struct gw_reader *rd);
bool gw_reader_encode(struct gw_reader *rd, const char *param, const char *text, size_t bytes);

bool gw_reader_bad(struct gw_reader *rd, const char *format, ...) PRINTF_LIKE(2, 3);
bool gw_reader_unsupported(struct gw_reader *rd, const char *format, ...) PRINTF_LIKE(2, 3);
bool gw_reader_nomem(struct gw_reader *rd);
bool gw_read_bool(struct gw_reader *rd, const struct json *v, bool *ret);
bool gw_read_u32(struct gw_reader *rd, const struct json *v, uint32_t min, uint32_t max,
                 uint32_t *ret);
bool gw_read_f64(struct gw_reader *rd, const struct json *v, double min, double max, double *ret);
/* NUL-terminated copy in the scratch arena; min_bytes..max_bytes, no NUL inside. */
bool gw_read_text(struct gw_reader *rd, const struct json *v, uint32_t min_bytes,
                  uint32_t max_bytes, const char **ret);

#endif
