/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_tokenize.h - threads that take bodies apart: JSON, checks, template, token ids.
 *
 * Owned by the loop thread, which pushes jobs and gets them back by a call on the loop.  Each thread
 * has two bounded rings (jobs in, jobs out) and shares nothing else but the immutable checkpoint.
 * A job belongs to its thread from push until it comes back. */
#ifndef GATEWAY_GW_TOKENIZE_H
#define GATEWAY_GW_TOKENIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "gateway/gw_api.h"
#include "gateway/gw_http.h"
#include "lib/base/str.h"

struct gw_checkpoint;
struct gw_tokenize;
struct loop;

struct gw_job {
    /* in */
    enum gw_endpoint endpoint;
    struct gw_http_body body;
    char session_id[MSG_TEXT_MAX + 1];
    char request_id[GW_REQUEST_ID_BYTES + 1];
    char client_id[64];
    uint64_t seed;
    uint32_t window;
    void *owner;
    /* out */
    struct gw_request request; /* chat and completions */
    struct str answer;         /* tokenize and detokenize */
    struct gw_refusal refusal;
    bool ok;
};

typedef void (*gw_tokenize_fn)(void *arg, struct gw_job *job);

struct gw_tokenize_options {
    uint32_t threads;
    uint32_t queue_max; /* jobs per thread */
    const char *effort_default;
    bool clear_thinking;
    gw_tokenize_fn done; /* on the loop */
    void *arg;
};

struct gw_tokenize *gw_tokenize_create(struct loop *l, const struct gw_checkpoint *checkpoint,
                                       const struct gw_tokenize_options *options);
/* Waits for the threads; jobs that they still hold do not come back. */
void gw_tokenize_destroy(struct gw_tokenize **tokenize_p);

/* To the thread with the fewest jobs.  False: all are full. */
bool gw_tokenize_push(struct gw_tokenize *t, struct gw_job *job);
uint32_t gw_tokenize_pending(const struct gw_tokenize *t);

#endif
