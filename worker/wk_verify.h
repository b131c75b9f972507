/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_verify.h - which tokens of a step become final: accept, then truncate.
 *
 * Pure.  Sample-and-match: row j's token is the target's own; draft j+1 is accepted iff it equals
 * it, so the first miss is already the right token.  Truncation at a stop id or a limit comes
 * before the accept count (docs/architecture.md, "Drafts and verification"). */
#ifndef WORKER_WK_VERIFY_H
#define WORKER_WK_VERIFY_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/msg.h"

struct wk_limits {
    uint32_t output_tokens_max;
    uint32_t output_tokens_min; /* stop ids do not stop before this many */
    uint32_t context_max;       /* prompt and output together */
    uint32_t stop_id_count;     /* the effective set: request's and, unless ignored, the model's */
    const uint32_t *stop_ids;
};

struct wk_verdict {
    uint32_t final_count; /* sampled[0, final_count) are final */
    /* final tokens that were drafts: final_count - 1, or all of them where a right draft was the
     * last token of the request */
    uint32_t accepted;
    uint32_t finish; /* enum msg_finish: NONE, STOP or LENGTH */
};

/* drafts[0, draft_count) were rows 1...; sampled[0, sampled_count) are the tokens of rows 0... up
 * to the first miss or further.  length = final tokens before the step, output_count of them
 * output.  sampled_count >= 1, output_count < output_tokens_max, length < context_max. */
struct wk_verdict wk_verify(const struct wk_limits *limits, uint32_t length, uint32_t output_count,
                            const uint32_t *drafts, uint32_t draft_count, const uint32_t *sampled,
                            uint32_t sampled_count);

/* A request that is over before its next token: after a resumption the last output token may be a
 * stop id or the last one allowed.  last_id is only read when output_count > 0. */
uint32_t wk_verify_over(const struct wk_limits *limits, uint32_t length, uint32_t output_count,
                        uint32_t last_id);

/* Length of the longest prefix whose ids are below vocab_size and have a token. */
uint32_t wk_verify_usable(const uint32_t *drafts, uint32_t count, uint32_t vocab_size,
                          const uint8_t *has_token);

/* Most drafts that a step may carry: never past the output limit or the context. */
uint32_t wk_verify_drafts_max(const struct wk_limits *limits, uint32_t length,
                              uint32_t output_count, uint32_t wanted);

#endif
