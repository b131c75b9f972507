/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_fabric.h - the collectives of a group of ranks, over any link.
 *
 * Owner: the device thread.  At most 8 ranks.  Every message carries epoch and step; every call
 * has a deadline and allocates nothing.  A call that fails leaves the group: it tells the others,
 * which fail too instead of waiting, and every later call fails at once until wk_fabric_join has
 * formed the group anew under a higher epoch.  A peer that is late is waited for up to the
 * deadline, one that shows no life for silence_ms is dead: a second thread keeps showing ours
 * while the device thread computes. */
#ifndef WORKER_WK_FABRIC_H
#define WORKER_WK_FABRIC_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "worker/wk_link.h"

struct wk_fabric;

struct wk_fabric_options {
    uint32_t deadline_ms;    /* of one collective */
    uint32_t silence_ms;     /* several times WK_BEAT_MS */
    struct hash128 settings; /* weights, layout, parameters: equal on all ranks or no group */
    struct wk_link link;     /* taken */
};

struct wk_fabric_stats {
    uint64_t collectives, bytes_sent;
    uint64_t duplicates, stale; /* messages that were dropped: seen before; of an older epoch */
    uint64_t faults, joins;
};

struct wk_fabric *wk_fabric_create(const struct wk_fabric_options *options);
void wk_fabric_destroy(struct wk_fabric **fabric_p);

/* Forms the group with all other ranks, under an epoch higher than any that they have seen.
 * ERR_TIMEOUT names the ranks that did not come, ERR_INVALID one with other settings. */
MUST_USE enum err wk_fabric_join(struct wk_fabric *f, uint32_t wait_ms, struct err_detail *detail);
/* Leaves on purpose: the others' calls fail with ERR_EPOCH. */
void wk_fabric_leave(struct wk_fabric *f);

uint32_t wk_fabric_rank(const struct wk_fabric *f);
uint32_t wk_fabric_ranks(const struct wk_fabric *f);
uint32_t wk_fabric_epoch(const struct wk_fabric *f); /* 0 before the first join */
/* Why the group was left; the text names rank, collective and step. */
enum err wk_fabric_fault(const struct wk_fabric *f, struct err_detail *ret_detail);
const struct wk_fabric_stats *wk_fabric_stats(const struct wk_fabric *f);

/* Stamps the messages that follow; a peer in another step is refused. */
void wk_fabric_step(struct wk_fabric *f, uint64_t step);

/* values[i] = sum over ranks, in rank order, in f32: the same bits on every rank. */
MUST_USE enum err wk_all_reduce(struct wk_fabric *f, float *values, size_t count);
/* ret_all [ranks, bytes] in rank order; own may lie at its place in it.  A share may be empty. */
MUST_USE enum err wk_all_gather(struct wk_fabric *f, const void *own, size_t bytes, void *ret_all);
/* Part r of own [ranks, bytes] goes to rank r; ret_all [ranks, bytes]: the parts for this one. */
MUST_USE enum err wk_all_to_all(struct wk_fabric *f, const void *own, size_t bytes, void *ret_all);
/* With one peer; both sides call it. */
MUST_USE enum err wk_pair_exchange(struct wk_fabric *f, uint32_t peer, const void *own,
                                   size_t bytes, void *ret_theirs);
MUST_USE enum err wk_barrier(struct wk_fabric *f);

/* Rank 0 tells all others; they hear it, in order, between their collectives.  Waiting to hear is
 * no collective and has no deadline: ERR_BUSY when nothing was told within wait_ms, while all
 * ranks live.  More than bytes_max is a fault. */
MUST_USE enum err wk_tell(struct wk_fabric *f, const void *bytes, size_t count);
MUST_USE enum err wk_hear(struct wk_fabric *f, void *ret_bytes, size_t bytes_max, size_t *ret_count,
                          uint32_t wait_ms);

#endif
