/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/dflash.h - the DFlash and DFlash2 drafters: context vectors in, a block of drafts out.
 *
 * One thread owns a drafter.  A sequence's context is the drafter's own K and V, made from the
 * target's hidden states ("taps") of final tokens only; memory is the caller's.  Appends are
 * contiguous; positions that are missing are never read: a context begins after its last hole.
 * Every draft runs the whole trained block, whose K and V are never kept.  After create nothing
 * allocates.  The results of a sequence do not depend on the other sequences of a batch. */
#ifndef LIB_MODEL_DFLASH_H
#define LIB_MODEL_DFLASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "lib/model/dflash_config.h"

struct dflash;
struct op_ctx;

struct dflash_options {
    const char *directory; /* config.json, *.safetensors, perhaps mask_embedding.pt */
    const char *target;    /* the target's: tokenizer.json, and the tensors that are borrowed */
    uint32_t seqs_max;     /* sequences of one batch */
    uint32_t context_max;  /* tokens of a sequence, for layers that see all of them */
    uint32_t threads;      /* 0 = one per core */
    bool exact;            /* reference sums; else the fast ones */
    bool head_8bit;        /* a plain head is quantised at load */
    /* Nothing but what makes context vectors of taps: no target is read, nothing is drafted. */
    bool context_only;
    const struct op_ctx *ctx; /* whose threads to use, borrowed; NULL = own ones */
};

/* Refusals name the file, tensor or key in detail. */
MUST_USE enum err dflash_load(const struct dflash_options *options, struct dflash **ret_drafter,
                              struct err_detail *detail);
void dflash_destroy(struct dflash **drafter_p);
const struct dflash_config *dflash_config(const struct dflash *d);
struct hash128 dflash_tokenizer(const struct dflash *d); /* fingerprint of the target's */
const char *dflash_formats(const struct dflash *d);      /* "bf16 (54), mxfp8 (27)", for the log */

/* Positions [first, length) are held, as far as each layer's window reaches back. */
struct dflash_context {
    float *rows; /* dflash_context_bytes, any content; kept */
    uint32_t first, length;
    uint32_t high; /* one past the highest position ever written; rings hold what is below it */
};

size_t dflash_context_bytes(const struct dflash *d);
/* Most context that a draft can see: rows further back need not be appended.  UINT32_MAX where a
 * layer sees everything. */
uint32_t dflash_reach(const struct dflash *d);

/* Empties the context; the next append is for position `start`. */
void dflash_context_begin(struct dflash_context *c, uint32_t start);
/* Forgets positions from `length` on; length <= c->length. */
void dflash_context_crop(const struct dflash *d, struct dflash_context *c, uint32_t length);
/* Appends `count` positions from c->length on.  taps [count, tap_count, hidden] in the order of
 * the config.  c->length + count <= context_max. */
void dflash_context_append(struct dflash *d, struct dflash_context *c, const float *taps,
                           uint32_t count);

/* The first half of an append, which may happen elsewhere: taps to context vectors [count, hidden]
 * (fc and its norm), and what is appended of these. */
void dflash_reduce(struct dflash *d, const float *taps, uint32_t count, float *ret_vectors);
void dflash_context_append_reduced(struct dflash *d, struct dflash_context *c, const float *vectors,
                                   uint32_t count);
/* Of all that context vectors depend on beside the taps: where it is equal they are. */
struct hash128 dflash_context_fp(const struct dflash *d);

struct dflash_block {
    const struct dflash_context *context; /* the anchor's position is its length */
    uint32_t anchor;                      /* < vocab_size */
    uint32_t ids[DFLASH_BLOCK_MAX];       /* out: block_size - 1 drafts */
};
/* count <= seqs_max */
void dflash_draft(struct dflash *d, struct dflash_block *blocks, uint32_t count);

/* Test hook: called with what was computed, rows [rows, width] of f32.  name is one of context,
 * ctx_k, ctx_v, block_in, block_out, hidden, top_ids (bits of u32), top_logits, scores. */
typedef void (*dflash_probe_fn)(void *arg, const char *name, uint32_t layer, const float *values,
                                uint32_t rows, uint32_t width);
void dflash_probe(struct dflash *d, dflash_probe_fn probe, void *arg); /* NULL = off */

#endif
