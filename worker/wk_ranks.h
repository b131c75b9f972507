/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_ranks.h - this worker as one rank of a group: forming it, telling and hearing orders.
 *
 * Owner: the device thread.  Rank 0 leads: it tells the others which cache shape holds and which
 * plan is next, and all agree on the plan before it begins.  A rank above 0 has the cache memory
 * of its own node's kvmgr (wk_rows.h), whose identity tells whether the rows that rank 0 knows of
 * are still there.  Only what is needed at start is allocated. */
#ifndef WORKER_WK_RANKS_H
#define WORKER_WK_RANKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "lib/model/model.h"
#include "proto/kv_layout.h"
#include "worker/wk_agree.h"
#include "worker/wk_nccl.h"
#include "worker/wk_plan_decode.h"
#include "worker/wk_probe.h"

struct wk_fabric;
struct wk_plan;
struct wk_ranks;
struct wk_rows;
struct wk_seal;

struct wk_ranks_options {
    uint32_t rank, ranks;
    const char *path;     /* of one host: the shared file */
    const char *nodes;    /* over tcp: HOST:PORT of every rank, by commas; "": one host */
    const char *keys;     /* tcp: file of lib/net/keys.h; "": in the clear */
    struct wk_rows *rows; /* ranks above 0: the cache memory; borrowed */
    enum shard_moe moe;
    uint32_t deadline_ms, silence_ms;
    uint32_t interleave;           /* of cache rows by position; 0: every rank keeps all of them */
    struct wk_probe_floors floors; /* of the fabric's self-test */
    bool nccl;                     /* activations go over it, all else over the fabric */
    struct wk_nccl_settings nccl_settings;
    const char *nccl_library, *cuda_library; /* "" = the usual ones */
    uint32_t cuda_device;
};

/* ERR_UNSUPPORTED: NCCL is asked for and it, or a GPU, is not there. */
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

/* All ranks show what they think of the group: what one refuses all refuse, in its words, or the
 * others would hold it for settled. */
MUST_USE enum err wk_ranks_verdict(struct wk_ranks *r, enum err own, struct err_detail *detail);
/* Measures the path between the ranks of the formed group, all at once, and gathers the verdicts.
 * ERR_UNSUPPORTED: below a floor, with the numbers and the likely cause. */
MUST_USE enum err wk_ranks_probe(struct wk_ranks *r, struct err_detail *detail);

/* ---- orders ---- */

/* What a rank needs to know of rank 0's arena to lay out its own memory alike. */
struct wk_ranks_shape {
    struct kv_geometry geometry;
    uint32_t block_count;
    uint32_t live_count, slot_count;
    uint32_t epoch;
    uint64_t step_last;
};

/* Rank 0: a new shape; ret_memory is a hash over the others' memory incarnations.
 * ERR_UNSUPPORTED: a rank refuses it, with its words; all else is a fault of the group. */
MUST_USE enum err wk_ranks_tell_shape(struct wk_ranks *r, const struct wk_ranks_shape *shape,
                                      struct hash128 *ret_memory, struct err_detail *detail);
/* Rank 0: the plan that comes next; ERR_OK once all ranks agree on it. */
MUST_USE enum err wk_ranks_tell_plan(struct wk_ranks *r, const struct wk_plan *plan, enum err own,
                                     struct err_detail *detail);

/* The arenas that plans speak of: rank 0's epoch, and what stands for the others' memories.  All
 * ranks have the same pair once a shape is told, and show it with every plan. */
struct wk_agree_epochs wk_ranks_epochs(const struct wk_ranks *r);

/* Rank 0: what all are to mark as committed; ERR_OK once all have. */
#define WK_RANKS_SEALS_MAX 65536u
MUST_USE enum err wk_ranks_tell_seals(struct wk_ranks *r, const struct wk_seal *seals,
                                      uint32_t count, struct err_detail *detail);

enum wk_order { WK_ORDER_NONE, WK_ORDER_SHAPE, WK_ORDER_PLAN, WK_ORDER_SEAL };

/* Ranks above 0.  geometry: of this rank's model and its share of the rows (rank, ranks and
 * interleave with context sharding, else 0, 1, any), which the shape must fit.  A plan is decoded,
 * admitted after step_last in epoch and by `admit`, and agreed on. */
struct wk_ranks_hear {
    const struct kv_geometry *geometry;
    const struct wk_plan_limits *limits;
    struct wk_plan *plan;    /* NULL before the first shape */
    const atomic_bool *stop; /* no longer wait for this rank's kvmgr; NULL = never */
    uint64_t step_last;
    uint32_t epoch;
    enum err (*admit)(void *arg, const struct wk_plan *plan, struct err_detail *detail);
    void *arg;
};
struct wk_ranks_heard {
    enum wk_order order;         /* with an error SHAPE if it is we who refuse one, else NONE */
    struct wk_ranks_shape shape; /* SHAPE: ... */
    struct model_kv kv;          /* ... laid out in our own memory */
};
MUST_USE enum err wk_ranks_hear(struct wk_ranks *r, const struct wk_ranks_hear *want,
                                uint32_t wait_ms, struct wk_ranks_heard *ret_heard,
                                struct err_detail *detail);

#endif
