/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_ranks.h - this worker as one rank of a group: forming it, telling and hearing orders.
 *
 * Owner: the device thread.  Rank 0 leads: it tells the others which cache shape holds and which
 * plan is next, and all agree on the plan before it begins.  A rank above 0 has cache memory of
 * its own, in a file that outlives it; its incarnation tells whether the rows that rank 0 knows of
 * are still there.  Only what is needed at start is allocated, and the file on a new shape. */
#ifndef WORKER_WK_RANKS_H
#define WORKER_WK_RANKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "lib/model/model.h"
#include "worker/wk_plan_decode.h"

struct wk_fabric;
struct wk_plan;
struct wk_ranks;

struct wk_ranks_options {
    uint32_t rank, ranks;
    const char *fabric; /* "local" or "tcp" */
    const char *path;   /* local: the shared file */
    const char *nodes;  /* tcp: HOST:PORT of every rank, by commas */
    const char *keys;   /* tcp: file of lib/net/keys.h; "": in the clear */
    const char *memory; /* ranks above 0: file of the cache rows */
    enum shard_moe moe;
    uint32_t deadline_ms, silence_ms;
    uint32_t interleave; /* of cache rows by position; 0: every rank keeps all of them */
};

MUST_USE enum err wk_ranks_create(const struct wk_ranks_options *options, struct wk_ranks **ret_r,
                                  struct err_detail *detail);
void wk_ranks_destroy(struct wk_ranks **r_p);

/* For model_load; calls work once the group is formed. */
struct model_group wk_ranks_group(struct wk_ranks *r);

/* Forms the group, the first time or anew; returns ERR_CANCELLED when *stop becomes true, and
 * ERR_INVALID where another rank has other settings. */
MUST_USE enum err wk_ranks_form(struct wk_ranks *r, const struct hash128 *settings,
                                const atomic_bool *stop, struct err_detail *detail);
bool wk_ranks_formed(const struct wk_ranks *r);
struct wk_fabric *wk_ranks_fabric(struct wk_ranks *r); /* NULL before the first forming */

/* ---- orders ---- */

struct wk_ranks_shape {
    struct model_kv kv; /* of rank 0, without its addresses */
    uint32_t epoch;
    uint64_t step_last;
};

/* Rank 0: a new shape; ret_memory is a hash over the others' memory incarnations. */
MUST_USE enum err wk_ranks_tell_shape(struct wk_ranks *r, const struct wk_ranks_shape *shape,
                                      struct hash128 *ret_memory);
/* Rank 0: the plan that comes next; ERR_OK once all ranks agree on it. */
MUST_USE enum err wk_ranks_tell_plan(struct wk_ranks *r, const struct wk_plan *plan, enum err own,
                                     struct err_detail *detail);

enum wk_order { WK_ORDER_NONE, WK_ORDER_SHAPE, WK_ORDER_PLAN };

/* Ranks above 0.  SHAPE: ret_shape->kv has addresses of our own memory, of state_bytes a slot.
 * PLAN: the plan is decoded, admitted after step_last in epoch, and agreed on. */
struct wk_ranks_hear {
    const struct wk_plan_limits *limits;
    struct wk_plan *plan;
    uint64_t step_last;
    uint32_t epoch;
    uint64_t state_bytes;
    uint32_t dsa_layers;
};
MUST_USE enum err wk_ranks_hear(struct wk_ranks *r, const struct wk_ranks_hear *want,
                                uint32_t wait_ms, enum wk_order *ret_order,
                                struct wk_ranks_shape *ret_shape, struct err_detail *detail);

#endif
