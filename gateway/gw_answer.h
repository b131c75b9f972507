/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_answer.h - from token ids to an answer: text, reasoning, calls and counts by choice.
 *
 * Owned by the loop thread.  Pure but for the memory it grows: per choice a parser and, for an
 * answer in one piece, its text (bounded by text_bytes_max).  A streamed answer leaves as events
 * through `event`, a whole one is written at the end; both are made of the same deltas. */
#ifndef GATEWAY_GW_ANSWER_H
#define GATEWAY_GW_ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gateway/gw_api.h"
#include "lib/base/str.h"
#include "lib/text/detokenizer.h"

struct gw_answer;
struct gw_checkpoint;

enum gw_reasoning_field { GW_REASONING_CONTENT, GW_REASONING_PLAIN, GW_REASONING_BOTH };

/* What one delta of a stream carries. */
enum gw_delta { GW_DELTA_NONE, GW_DELTA_REASONING, GW_DELTA_CONTENT, GW_DELTA_ARGUMENTS };

struct gw_receipt {
    uint32_t concurrency, cached_tokens, drafted, accepted, steps, preempted, resumed;
    uint64_t queue_us, prefill_us, decode_us, draft_us, verify_us;
    char spec[32];
    char model_fp[33];
    char config_hash[65];
};

struct gw_choice {
    struct gw_answer *answer;
    uint32_t index;
    const struct gw_prompt *prompt;
    struct detokenizer detokenizer;
    struct gw_parse *parse;       /* chat; NULL for text completions */
    struct gw_parse_stops *stops; /* text completions with stop strings */
    uint32_t output_tokens, reasoning_tokens;
    uint32_t call_count;
    bool begun;                               /* role chunk or echo is out */
    bool prompt_told;                         /* ... and the prompt's ids, in a stream */
    bool muted;                               /* complete: what still comes is not part of it */
    bool over;                                /* finish reason is known and out */
    const char *finish_reason;                /* constant */
    struct str reasoning, content, calls;     /* whole answers only */
    struct str ids, logprobs;                 /* of tokens not yet told of (stream), or of all */
    struct str lp_tokens, lp_top, lp_offsets; /* text completions' parallel lists */
    uint32_t text_offset;
    uint64_t first_us, last_us; /* of its tokens */
    bool has_receipt;           /* the engine's last word: it is in the answer's sums */
    bool has_running;
    struct msg_receipt running; /* counts so far, of the newest message with tokens; no texts */
    uint32_t told_steps, told_drafted, told_accepted; /* of them are in the metrics */
};

struct gw_answer_options {
    const struct gw_checkpoint *checkpoint;
    enum gw_reasoning_field reasoning_field;
    uint64_t created_unix_s;
    uint64_t nonce; /* makes call ids unique */
    uint64_t now_us;
    size_t text_bytes_max; /* of one choice, whole answers */
    /* One event of the stream: JSON text.  Unused for whole answers. */
    void (*event)(void *arg, const char *json, size_t bytes);
    void *arg;
    struct str *scratch; /* three buffers of the loop thread, empty between calls */
};

struct gw_answer {
    uint32_t magic;
    const struct gw_request *request;
    struct gw_answer_options options;
    struct gw_choice *choices; /* in the request's arena */
    uint32_t choices_over;
    struct gw_receipt receipt; /* sums of all choices */
    uint64_t accepted_us;
    char fingerprint[40];
    struct str head;     /* start of every chunk */
    enum gw_delta delta; /* collected in scratch[1] for the current choice */
    uint32_t delta_call;
    bool failed; /* memory or bounds: the answer cannot go on */
};

/* request outlives the answer.  False: no memory. */
MUST_USE bool gw_answer_init(struct gw_answer *a, struct gw_request *request,
                             const struct gw_answer_options *options);
void gw_answer_fini(struct gw_answer *a);

/* All choices are accepted: fixes the fingerprint, and for a stream sends the first chunks. */
void gw_answer_begin(struct gw_answer *a, const struct gw_receipt *known, uint64_t now_us);

/* New tokens t->ids[skip..] of a choice.  True: the choice is complete before the engine says so
 * (a stop string, or the one call that is allowed): it is over, the generation to be cancelled. */
bool gw_answer_tokens(struct gw_answer *a, uint32_t choice, const struct msg_tokens *t,
                      uint32_t skip, uint64_t now_us);
/* The engine's end of a choice; receipt may be NULL.  Nothing happens if it is over already. */
void gw_answer_finish(struct gw_answer *a, uint32_t choice, uint32_t finish,
                      const struct msg_receipt *receipt, uint64_t now_us);
bool gw_answer_over(const struct gw_answer *a);
uint32_t gw_answer_output_tokens(const struct gw_answer *a);
uint32_t gw_answer_prompt_tokens(const struct gw_answer *a);

/* All choices are over: the receipt is final.  A choice that was cut has the counts that came with
 * its last tokens. */
void gw_answer_settle(struct gw_answer *a);
/* The usage chunk of a stream, if it was asked for; settled. */
void gw_answer_usage_event(struct gw_answer *a);
/* The whole answer as JSON; settled. */
void gw_answer_write(struct gw_answer *a, struct str *out);

#endif
