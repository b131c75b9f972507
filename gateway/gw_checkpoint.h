/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_checkpoint.h - what the gateway needs of the model's directory.
 *
 * Loaded at start, then immutable and shared by all threads: tokenizer, context length, stop ids,
 * sampling defaults of generation_config.json, name, and the warning when the chat template in the
 * directory is not the one that is built in. */
#ifndef GATEWAY_GW_CHECKPOINT_H
#define GATEWAY_GW_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"

struct tokenizer;

#define GW_STOP_IDS_MAX 16u

struct gw_checkpoint {
    struct tokenizer *tokenizer;
    char name[256];                     /* served name */
    char directory_name[256];           /* base name of the directory */
    uint32_t context_max;               /* max_position_embeddings */
    uint32_t id_count;                  /* ids that a request may name are below it */
    uint32_t stop_ids[GW_STOP_IDS_MAX]; /* eos_token_id */
    uint32_t stop_id_count;
    bool has_assistant_id; /* <|assistant|> also ends an answer */
    uint32_t assistant_id;
    double temperature, top_p, min_p, repetition_penalty;
    uint32_t top_k;
    char warning[256];       /* "" = none */
    uint64_t created_unix_s; /* config.json's time */
};

/* served_name "" = the directory's base name.  context_max 0 = the model's. */
MUST_USE enum err gw_checkpoint_load(const char *directory, const char *served_name,
                                     uint32_t context_max, struct gw_checkpoint *ret_checkpoint,
                                     struct err_detail *detail);
void gw_checkpoint_fini(struct gw_checkpoint *c);
bool gw_checkpoint_stops(const struct gw_checkpoint *c, uint32_t id);

#endif
