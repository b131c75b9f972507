// SPDX-License-Identifier: Apache-2.0
/* lib/model/mtp.h - the checkpoint's own multi-token prediction layer as a source of drafts.
 *
 * Owned by the thread that runs the model, whose buffers it reads after a finished batch.  Row t of
 * the layer is the target's normed hidden state of position t with the embedding of token t + 1,
 * and says token t + 2; further drafts feed the layer's own hidden state back.  Rows lie in a cache
 * of its own, counted from the first row that came: what a prefix cache skipped is not missed.
 * Memory is bounded at create; the sequence not fed for longest makes room.  With several ranks the
 * layer is rank 0's alone, whole and without collectives: model_load keeps it beside the shares. */
#ifndef LIB_MODEL_MTP_H
#define LIB_MODEL_MTP_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/model.h"

#define MTP_NO_ID UINT32_MAX

struct mtp;

/* What the next draft reads in place of the target's hidden state. */
enum mtp_recycle { MTP_POST_NORM, MTP_PRE_NORM };

struct mtp_options {
    uint32_t entries;     /* sequences */
    uint32_t context_max; /* rows of one */
    uint64_t tokens_max;  /* rows of all */
    enum mtp_recycle recycle;
};

/* The model was loaded with its MTP layer, is that of rank 0, and outlives this. */
MUST_USE enum err mtp_create(struct model *m, const struct mtp_options *options,
                             struct mtp **ret_mtp, struct err_detail *detail);
void mtp_destroy(struct mtp **mtp_p);

/* A sequence begins, or ends: nothing of an earlier one under this number is left. */
void mtp_begin(struct mtp *t, uint32_t entry);

/* Rows of a finished batch whose tokens are final. */
struct mtp_rows {
    uint32_t entry;
    const struct model_cursor *cursor; /* that finished; no begin since */
    uint32_t first, count;             /* rows of it */
    uint32_t position;                 /* of the first */
    const uint32_t *ids;               /* [count] tokens of the rows */
    uint32_t next;                     /* token after them; MTP_NO_ID: not known yet */
};
struct mtp_feed {
    struct mtp_rows rows;
    uint32_t drafts_max;                /* at most MODEL_DRAFT_ROWS_MAX */
    uint32_t count;                     /* out: drafts */
    uint32_t ids[MODEL_DRAFT_ROWS_MAX]; /* out */
};
/* Takes the rows of several sequences in, each at most once, and, where the next token is known,
 * drafts what follows it.  All go through the layer together; none depends on the others, but that
 * they do not make room for one another. */
void mtp_feed(struct mtp *t, struct mtp_feed *feeds, uint32_t count);

uint64_t mtp_bytes(const struct mtp *t); /* of the cache */
/* Test hook: logits [vocab_size] of the first draft of the last feed with drafts. */
const float *mtp_logits(const struct mtp *t);

#endif
