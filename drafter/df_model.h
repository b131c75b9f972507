/* SPDX-License-Identifier: Apache-2.0 */
/* drafter/df_model.h - the network as a draft source: contexts of all sequences, from tap rings.
 *
 * Owned by the drafter's loop thread; not pure: maps the workers' rings and its own memory.  A
 * sequence has the number that the core gave it.  What a ring says is checked record by record:
 * unknown sequences, positions out of order and torn records are passed over.  Context memory is
 * address space for sequences_max contexts; pages come as they are written and go back at drop. */
#ifndef DRAFTER_DF_MODEL_H
#define DRAFTER_DF_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

struct df_model;
struct dflash_config;

struct df_model_options {
    const char *directory, *target;
    uint32_t sequences_max, context_max;
    uint64_t tokens_max; /* of all sequences */
    uint64_t bytes_max;  /* all contexts together; more would be refused at start */
    uint32_t rings_max;
    uint32_t context_min; /* rows without a hole before the first draft */
    uint32_t threads;
    bool exact;
    bool head_8bit;
};

struct df_model_counters {
    uint64_t records;  /* appended to a context */
    uint64_t lost;     /* overwritten before they were read */
    uint64_t holes;    /* contexts that began anew behind missing positions */
    uint64_t refilled; /* records found in a ring when a sequence was opened */
    uint64_t batches, blocks;
    uint64_t no_context; /* proposals without enough context */
    uint64_t draft_us, append_us;
};

MUST_USE enum err df_model_create(const struct df_model_options *options,
                                  struct df_model **ret_model, struct err_detail *detail);
void df_model_destroy(struct df_model **model_p);
const struct dflash_config *df_model_config(const struct df_model *m);
struct hash128 df_model_tokenizer(const struct df_model *m); /* of the target it drafts for */
struct hash128 df_model_context_fp(const struct df_model *m);
const char *df_model_formats(const struct df_model *m);
const struct df_model_counters *df_model_counters(const struct df_model *m);

/* The ring that a worker announced, with the fingerprint of what made its vectors (zero: it holds
 * taps); the same incarnation again does nothing.  An error leaves the worker without a ring. */
MUST_USE enum err df_model_ring(struct df_model *m, uint32_t ring, const char *path,
                                uint64_t incarnation, const struct hash128 *context_fp,
                                struct err_detail *detail);

uint32_t df_model_rings(const struct df_model *m); /* in use */

/* A sequence begins: nothing of an earlier one under this number is left. */
void df_model_begin(struct df_model *m, uint32_t sequence, const struct msg_id *id, uint32_t ring);
/* Tokens from `length` on were other ones. */
void df_model_cut(struct df_model *m, uint32_t sequence, uint32_t length);
void df_model_drop(struct df_model *m, uint32_t sequence);
/* How many tokens the sequence has: rows that no draft can see any more are not computed.  Its
 * worker may have changed, and with it the ring. */
void df_model_length(struct df_model *m, uint32_t sequence, uint32_t ring, uint32_t length);
/* Takes what a ring still holds of a sequence. */
void df_model_refill(struct df_model *m, uint32_t sequence);
/* Takes everything new in a ring. */
void df_model_drain(struct df_model *m, uint32_t ring);

struct df_model_ask {
    uint32_t sequence;
    uint32_t position; /* of the anchor */
    uint32_t anchor;
    uint32_t count; /* out: drafts, 0 where the context is not there */
    uint32_t ids[MSG_DRAFT_IDS_MAX];
};
void df_model_draft(struct df_model *m, struct df_model_ask *asks, uint32_t count);

#endif
