/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_pool.h - which lease uses which block: free list, leases, shared fronts, their sums.
 *
 * Owned by kvmgr's loop thread.  Everything is taken at create: the index, the sessions, three
 * words of scratch a block, one lease entry a live state slot (a lease is a slot and its blocks, so
 * entry i owns slot i).  Pure: time comes in as now_us.  Blocks cost O(1) each, the heap's log n
 * aside.  At every open, extend and release free + leased + cached = total is CHECKed.
 *
 * A lease's chain is a shared front (indexed blocks that it refers to and never writes) and its own
 * blocks.  An own block is indexed when it is committed; if its hash is known already it stays a
 * private duplicate and the chain goes on below the known one.
 *
 * What is given back is only worth keeping up to a block with a snapshot: the rest is freed. */
#ifndef KVMGR_KM_POOL_H
#define KVMGR_KM_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_index.h"
#include "kvmgr/km_session.h"
#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

struct km_pool;

struct km_pool_options {
    uint32_t block_count, slot_count; /* both >= 1; slots: live ones */
    uint32_t epoch;                   /* goes into lease ids, so that old ones are told apart */
    uint32_t snapshot_count;          /* slots behind the live ones */
    uint32_t block_tokens;
    uint32_t sessions_max, tenants_max;
    uint32_t session_blocks_max, tenant_blocks_max; /* kept at ordinary rank; 0 = no bound */
    uint32_t held_blocks_max;                       /* that the operator's pins may keep */
    uint64_t pin_us;                                /* of a session's last turn */
};

/* Read-only outside km_pool.c but for the fields marked "user". */
struct km_lease {
    uint64_t id; /* 0 = the entry is unused */
    struct msg_id request;
    uint32_t owner; /* index of the worker in the core */
    uint32_t state_slot;
    uint32_t block_count, committed_count; /* the shared front counts in both */
    uint32_t shared_count, shared_tail;
    uint32_t first, last;    /* ends of its chain of own blocks */
    uint32_t committed_last; /* last committed own block, KM_NONE if none */
    uint32_t chain_tail;     /* node of the last committed token block, KM_NONE if none */
    uint32_t held;           /* node referred to besides: it stands for an own duplicate */
    struct hash128 chain;    /* hash of the last committed block */
    bool unindexed;          /* below a block that is being loaded: commits only count */
    uint32_t session;
    uint32_t restore; /* user: snapshot slot that its worker may still read, KM_NONE */
    uint64_t opened_us;
    uint64_t named_ping;  /* user: number of the ping that named it last */
    char sid[33];         /* user: session id, "" = none */
    struct hash128 salt;  /* user */
    uint64_t starving_us; /* user: since when its extends are refused, 0 = not */
    bool reclaimed;       /* user: its worker was told to give it up */
    bool mapped;          /* user: its session's map knows its front */
};

struct km_pool_open {
    uint32_t owner;
    struct msg_id request;
    uint32_t blocks_wanted;  /* of the whole chain */
    uint32_t shared_tail;    /* last block of the shared front, KM_NONE */
    struct hash128 sid_hash; /* zeros: no session */
    struct hash128 salt;
    uint64_t now_us;
};

struct km_pool_counts { /* free + leased + cached = total, for blocks */
    uint32_t blocks_free, blocks_leased, blocks_cached, blocks_total;
    uint32_t slots_free, slots_total;
};

/* Room for the answers of one step of the core: every block freed and every block taken once. */
struct km_pool_scratch {
    uint32_t *freed, *taken; /* [block_count] each */
    uint32_t *order;         /* [block_count]: of a flush, kept over its steps */
    uint32_t *slots;         /* [live slots + snapshots]: freed */
    uint32_t freed_count, slots_count;
};

struct km_committed { /* what a commit changed; canonical blocks from first on */
    uint32_t first, count;
    uint32_t fresh; /* of them the first that was not known: [fresh, count) are new headers */
    struct hash128 parent; /* hash before block first + fresh */
    uint32_t skip;         /* first - the asked first */
};

MUST_USE enum err km_pool_create(const struct km_pool_options *options, struct km_pool **ret_pool);
void km_pool_destroy(struct km_pool **pool_p);
struct km_pool_counts km_pool_counts(const struct km_pool *p);
struct km_pool_scratch *km_pool_scratch(struct km_pool *p); /* the core empties it every step */
struct km_index *km_pool_index(const struct km_pool *p);
struct km_sessions *km_pool_sessions(const struct km_pool *p);
const struct km_pool_options *km_pool_options(const struct km_pool *p);
/* Time of this step; never falls. */
void km_pool_now(struct km_pool *p, uint64_t now_us);
uint64_t km_pool_time(const struct km_pool *p);
/* With a tier, blocks without a snapshot in the arena may still be of use. */
void km_pool_keep_bare(struct km_pool *p, bool keep);

/* All or nothing.  ret_blocks takes blocks_wanted ids, the shared front first.  ERR_KV_FULL: no
 * slot or too few blocks.  The owner must not hold a lease of that request. */
MUST_USE enum err km_pool_open(struct km_pool *p, const struct km_pool_open *open,
                               uint32_t *ret_blocks, struct km_lease **ret_lease);
/* Brings the lease to blocks_have + blocks_wanted blocks (never fewer than it has) and returns ids
 * [blocks_have, have + wanted) of its chain: an extend whose answer was lost may be sent again.
 * ERR_INVALID: blocks_have is beyond what the lease holds. */
MUST_USE enum err km_pool_extend(struct km_pool *p, struct km_lease *lease, uint32_t blocks_have,
                                 uint32_t blocks_wanted, uint32_t *ret_blocks);
/* Records hashes of blocks [first, first + count) of the chain.  What is committed already is
 * skipped.  ret_blocks takes the canonical blocks of what is new.  ERR_INVALID: a gap, or beyond
 * the lease. */
MUST_USE enum err km_pool_commit(struct km_pool *p, struct km_lease *lease, uint32_t first,
                                 const struct hash128 *hashes, uint32_t count, uint32_t *ret_blocks,
                                 struct km_committed *ret);
/* Ends the lease.  KEEP: its turn is its session's last one.  DROP: what it committed goes
 * first when room is needed.  LOST: neither; its request may come again. */
enum km_release { KM_RELEASE_LOST, KM_RELEASE_DROP, KM_RELEASE_KEEP };
void km_pool_release(struct km_pool *p, struct km_lease *lease, enum km_release how);
/* Leaves when what is being written is written; a hit before that calls it off. */
void km_pool_leaving(struct km_pool *p, uint32_t block, bool leaving);
uint32_t km_pool_leaving_count(const struct km_pool *p);

/* A free block for a load, as a LOADING node with one ref.  The caller has made room. */
uint32_t km_pool_load(struct km_pool *p, const struct hash128 *hash, uint32_t parent,
                      uint32_t session);
/* As at a restart: a committed block that nobody uses; it must be free.  False: does not fit. */
bool km_pool_adopt(struct km_pool *p, uint32_t block, const struct hash128 *hash,
                   const struct hash128 *parent, uint32_t position);
/* The blocks that were not adopted become free; then everything useless is given up. */
void km_pool_adopted(struct km_pool *p);

void km_pool_unref(struct km_pool *p, uint32_t block); /* and settles it */
void km_pool_settle(struct km_pool *p, uint32_t block);
/* An idle leaf leaves the index, with its snapshot; its block becomes free. */
void km_pool_evict(struct km_pool *p, uint32_t block);
/* Gives up block and those before it while they are idle leaves that no snapshot makes useful;
 * returns the last one left, KM_NONE if none is. */
uint32_t km_pool_prune(struct km_pool *p, uint32_t block);
void km_pool_snap_free(struct km_pool *p, uint32_t slot); /* kept, granted or loading */

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
