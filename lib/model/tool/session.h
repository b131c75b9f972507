/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/session.h - one sequence on a loaded model, with cache memory of its own.
 *
 * One thread.  Memory is sized at create for context_max tokens.  For the tools only: the worker
 * gets its cache from kvmgr. */
#ifndef LIB_MODEL_TOOL_SESSION_H
#define LIB_MODEL_TOOL_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/model.h"

struct session;

struct session_options {
    uint32_t context_max;
    uint32_t slice_rows;   /* rows of a forward pass at most */
    uint32_t slice_layers; /* layers of one advance; 0 = all */
    uint32_t logits_rows_max;
};

MUST_USE enum err session_create(struct model *m, const struct session_options *options,
                                 struct session **ret_session, struct err_detail *detail);
void session_destroy(struct session **s_p);
void session_reset(struct session *s);              /* the next rows begin a new sequence */
uint32_t session_position(const struct session *s); /* tokens that are final */
struct model_cursor *session_cursor(struct session *s);

/* Rows that are final.  logits: of the last logits_count rows, valid until the next call. */
const float *session_forward(struct session *s, const uint32_t *ids, uint32_t count,
                             uint32_t logits_count);
/* Any number of rows, in slices; progress may be NULL. */
typedef void (*session_progress_fn)(void *arg, uint32_t done, uint32_t total);
const float *session_prefill(struct session *s, const uint32_t *ids, uint32_t count,
                             session_progress_fn progress, void *arg);
/* Rows of a verify step, logits of all; then session_accept says how many were right. */
const float *session_verify(struct session *s, const uint32_t *ids, uint32_t count);
void session_accept(struct session *s, uint32_t count);

#endif
