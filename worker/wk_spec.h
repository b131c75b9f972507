/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_spec.h - the speculation policy of a request or of the worker, from its text.
 *
 * Pure.  off, fixed:K, ema and goodput use the source that the drafter has loaded; ngram:K chooses
 * a source of it at fixed K.  mtp:K takes the drafts of the model's own layer, with no drafter. */
#ifndef WORKER_WK_SPEC_H
#define WORKER_WK_SPEC_H

#include <stdint.h>

#include "lib/base/err.h"

#define WK_SPEC_DRAFTS_MAX 7u
#define WK_SOURCE_MTP      "mtp"

enum wk_policy { WK_POLICY_OFF, WK_POLICY_FIXED, WK_POLICY_EMA, WK_POLICY_GOODPUT };

struct wk_spec {
    enum wk_policy policy;
    uint32_t draft_count; /* most drafts that a step verifies, 0 = off */
    const char *source;   /* static: "" = the drafter's own, "ngram", "mtp" */
    char effective[16];   /* "fixed:7": what the receipt shows */
};

/* "" is not a policy: callers put the worker's own in its place. */
MUST_USE enum err wk_spec_parse(const char *text, struct wk_spec *ret_spec,
                                struct err_detail *detail);

#endif
