/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_evict.h - what is given up when room is needed (pure policy over the pool).
 *
 * Owned by kvmgr's loop thread.  Order of blocks: (0) spent: turns that a newer one of their
 * session took the place of, requests that were not worth keeping, and what a session or tenant
 * keeps beyond its budget; (1) idle leaves by last use, later positions a little longer; (2)
 * the last turns of sessions that are still pinned, the longest unused first.  Blocks in use
 * are never given up, nor are those of sessions that the operator pinned while these keep no more
 * than held_blocks_max.  Order of snapshots: spent; such that a later one of the same chain
 * covers; by last use. */
#ifndef KVMGR_KM_EVICT_H
#define KVMGR_KM_EVICT_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_index.h"
#include "kvmgr/km_pool.h"

enum km_class km_evict_class(const struct km_pool *p, uint32_t block);

/* From km_pool_release: the kept chain ends at tail (KM_NONE: nothing is kept). */
void km_evict_turn_ended(struct km_pool *p, const struct km_lease *lease, uint32_t tail,
                         enum km_release how);

/* The snapshot slot to write over next: a free one, else one given up for it and freed;
 * KM_NONE: all are in use.  spare: a kept one that must stay. */
uint32_t km_evict_snapshot(struct km_pool *p, uint32_t spare_node);
/* The kept one that would be given up first; nothing is. */
uint32_t km_evict_snapshot_next(const struct km_pool *p, uint32_t spare_node);
/* A snapshot was attached to block: the one before it in its chain is covered now. */
void km_evict_snapshot_kept(struct km_pool *p, uint32_t block);

/* The operator's pin of a session, until then; 0 ends it.  A walk over all blocks. */
void km_evict_hold(struct km_pool *p, uint32_t session, uint64_t until_us);
/* Whether what is held stays whatever is asked for. */
bool km_evict_holds(const struct km_pool *p);

/* Pins that ran out; looks at a bounded number of sessions a call. */
void km_evict_tick(struct km_pool *p);

/* Free blocks below which room is made in advance, and how many there shall be then. */
bool km_evict_high(const struct km_pool *p, uint32_t *ret_free_wanted);

/* Tokens of conversations that can be kept beside what is leased now. */
uint64_t km_evict_keepable(const struct km_pool *p);

#endif
