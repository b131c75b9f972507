/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_pool.h - which lease holds which block: the free list, the leases, their sums.
 *
 * Owned by kvmgr's loop thread.  Everything is taken at create: four words and a hash a block, one
 * lease entry a live state slot (a lease is a slot and its blocks, so entry i owns slot i).  Pure:
 * time comes in as now_us.  Blocks cost O(1) each.  At every open, extend and release
 * free + leased + cached = total is CHECKed. */
#ifndef KVMGR_KM_POOL_H
#define KVMGR_KM_POOL_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

#define KM_NONE UINT32_MAX

struct km_pool;

struct km_pool_options {
    uint32_t block_count, slot_count; /* both >= 1 */
    uint32_t epoch;                   /* goes into lease ids, so that old ones are told apart */
};

/* Read-only outside km_pool.c but for the fields marked "user". */
struct km_lease {
    uint64_t id; /* 0 = the entry is unused */
    struct msg_id request;
    uint32_t owner; /* index of the worker in the core */
    uint32_t state_slot;
    uint32_t block_count, committed_count;
    uint32_t first, last;    /* ends of its chain of blocks */
    uint32_t committed_last; /* last committed block of the chain, KM_NONE if none */
    uint64_t opened_us;
    uint64_t named_ping; /* user: number of the ping that named it last */
    char sid[33];        /* user: session id, "" = none */
    struct hash128 salt; /* user */
};

struct km_pool_counts { /* free + leased + cached = total, for blocks */
    uint32_t blocks_free, blocks_leased, blocks_cached, blocks_total;
    uint32_t slots_free, slots_total;
};

/* Room for the answers of one step of the core: every block freed and every block taken once. */
struct km_pool_scratch {
    uint32_t *freed, *taken; /* [block_count] each */
    uint32_t *slots;         /* [slot_count] */
};

MUST_USE enum err km_pool_create(const struct km_pool_options *options, struct km_pool **ret_pool);
void km_pool_destroy(struct km_pool **pool_p);
struct km_pool_counts km_pool_counts(const struct km_pool *p);
struct km_pool_scratch km_pool_scratch(const struct km_pool *p);

/* All or nothing.  ret_blocks takes blocks_wanted ids.  ERR_KV_FULL: no slot or too few blocks.
 * The owner must not hold a lease of that request: the caller has released it. */
MUST_USE enum err km_pool_open(struct km_pool *p, uint32_t owner, const struct msg_id *request,
                               uint32_t blocks_wanted, uint64_t now_us, uint32_t *ret_blocks,
                               struct km_lease **ret_lease);
/* Brings the lease to blocks_have + blocks_wanted blocks (never fewer than it has) and returns ids
 * [blocks_have, have + wanted) of its chain: an extend whose answer was lost may be sent again.
 * ERR_INVALID: blocks_have is beyond what the lease holds. */
MUST_USE enum err km_pool_extend(struct km_pool *p, struct km_lease *lease, uint32_t blocks_have,
                                 uint32_t blocks_wanted, uint32_t *ret_blocks);
/* Records hashes of blocks [first, first + count) of the chain.  What is committed already is
 * skipped: *ret_first, *ret_count and ret_blocks tell what is new.  *ret_parent is the hash before
 * it (zero at the front).  ERR_INVALID: a gap, or beyond the lease. */
MUST_USE enum err km_pool_commit(struct km_pool *p, struct km_lease *lease, uint32_t first,
                                 const struct hash128 *hashes, uint32_t count, uint32_t *ret_blocks,
                                 uint32_t *ret_first, uint32_t *ret_count,
                                 struct hash128 *ret_parent);
/* Ends the lease; ret_blocks takes its block ids, the count is returned. */
uint32_t km_pool_release(struct km_pool *p, struct km_lease *lease, uint32_t *ret_blocks);

/* NULL for an unknown id, or one of another owner. */
struct km_lease *km_pool_find(struct km_pool *p, uint32_t owner, uint64_t id);
struct km_lease *km_pool_find_request(struct km_pool *p, uint32_t owner,
                                      const struct msg_id *request);
/* Walk: index 0 .. slots_total - 1; NULL where no lease is. */
struct km_lease *km_pool_lease_at(struct km_pool *p, uint32_t index);
/* The epoch that an id was made under (low 24 bits). */
uint32_t km_pool_id_epoch(uint64_t id);

/* Walks every chain and list and CHECKs that each block is in exactly one: for tests. */
void km_pool_audit(const struct km_pool *p);

#endif
