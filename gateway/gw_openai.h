/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_openai.h - OpenAI's JSON of chat and text completions to the internal form.
 *
 * Any thread, one context per thread; pure but for the memory it grows in `ids`.  Every field that
 * specs name acts, is a no-op listed in gw_openai_fields.c, or is refused by name; a field named
 * nowhere is counted and ignored. */
#ifndef GATEWAY_GW_OPENAI_H
#define GATEWAY_GW_OPENAI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gateway/gw_api.h"
#include "lib/text/token_ids.h"

struct gw_checkpoint;
struct str;

#define GW_PARSE_BYTES_MAX ((size_t)768 << 20) /* JSON tree and prompt of one request */

struct gw_openai {
    uint32_t magic;
    const struct gw_checkpoint *checkpoint;
    const char *effort_default;
    bool clear_thinking;
    struct arena scratch; /* reset for every request */
    struct token_ids ids;
};

/* What comes beside the body. */
struct gw_openai_input {
    enum gw_endpoint endpoint;
    const char *body; /* borrowed for the call */
    size_t body_bytes;
    const char *session_id; /* X-Session-Id; "" = none */
    const char *request_id; /* valid id to use unless the body names one */
    const char *client_id;
    uint64_t seed;   /* drawn; used when the body gives none */
    uint32_t window; /* tokens of prompt and answer together */
};

void gw_openai_init(struct gw_openai *o, const struct gw_checkpoint *checkpoint,
                    const char *effort_default, bool clear_thinking);
void gw_openai_fini(struct gw_openai *o);

/* GW_CHAT, GW_COMPLETION: fills the request (fresh from reset).  False: ret_refusal says why. */
bool gw_openai_request(struct gw_openai *o, const struct gw_openai_input *input,
                       struct gw_request *r, struct gw_refusal *ret_refusal);
/* GW_TOKENIZE, GW_DETOKENIZE: appends the whole answer. */
bool gw_openai_tokenize(struct gw_openai *o, const struct gw_openai_input *input, struct str *out,
                        struct gw_refusal *ret_refusal);

#endif
