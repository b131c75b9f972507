/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_index.h - chain hash -> block: the tree of cached blocks, its leaves, its snapshots.
 *
 * Owned by kvmgr's loop thread.  Everything is taken at create: a node a block (the node's number
 * is the block's), a bucket table of at most two words a block, one word a block for the heap of
 * evictable leaves: at most 64 bytes a block.  Pure.
 *
 * A node is indexed only if its parent is: what is resident of a chain is always its front.  A leaf
 * that nobody refers to is in the heap, the one to give up first on top.  Order: class, then time
 * of use plus a bonus that grows with the position, since a late block costs more to compute. */
#ifndef KVMGR_KM_INDEX_H
#define KVMGR_KM_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define KM_NONE             UINT32_MAX
#define KM_NO_HOLDER        UINT16_MAX
#define KM_INDEX_BLOCKS_END (1u << 23) /* bits of km_node.children */

enum km_node_state {
    KM_NODE_FREE = 0,    /* in the free list, or never used */
    KM_NODE_PRIVATE = 1, /* in a lease; not committed, or a duplicate of a committed one */
    KM_NODE_INDEXED = 2, /* committed: found by its hash */
    KM_NODE_LOADING = 3, /* found by its hash, its data are being read from the tier */
};

/* What goes first when room is needed. */
enum km_class {
    KM_CLASS_SPENT = 0,
    KM_CLASS_PLAIN = 1,
    KM_CLASS_PINNED = 2,
    KM_CLASS_HELD = 3, /* not at all while the held ones are within their budget */
};

struct km_node { /* read-only outside km_index.c but for "user" fields */
    struct hash128 hash;
    uint32_t parent;        /* KM_NONE at the front of a chain */
    uint32_t bucket_next;   /* while indexed or loading */
    uint32_t link;          /* user: free list or lease's chain; in the heap: its place there */
    uint32_t snapshot;      /* slot with the state at the block's end, KM_NONE */
    unsigned position : 24, /* index of the block in its chain */
        unproven : 1,       /* user: of an earlier process, its data were not read yet */
        proving : 1,        /* user: they are being read */
        damaged : 1,        /* user: unproven, and were read: nothing waits for them */
        proof_stale : 1,    /* user: the reading began before they were last doubted */
        /* user: so did the write to the tier, which reads them too; of one that is being loaded:
         * it was written over meanwhile */
        write_stale : 1;
    uint32_t session; /* user: who is charged for it, KM_NONE */
    uint32_t used;    /* km_index_ticks of its last use */
    unsigned children : 23, state : 2, class : 2, queued : 1, /* in the heap */
        superseded : 1, /* user: a newer turn took its place */
        leaving : 1,    /* user: given up when it is written */
        storing : 1,    /* user: being written to the tier */
        tested : 1;     /* user: its data were read and found good since the start */
    uint16_t refs;      /* leases, loads and writes that use it */
    uint16_t holder;    /* user: lease whose chain it is in, KM_NO_HOLDER */
};

enum km_snap_state {
    KM_SNAP_FREE = 0,
    KM_SNAP_GRANTED = 1, /* a worker may write it */
    KM_SNAP_KEPT = 2,
    KM_SNAP_LOADING = 3,
};

struct km_snap { /* a snapshot slot; numbers run from snapshot_first */
    uint32_t node;
    uint32_t used;
    uint16_t refs;   /* opens whose worker may still read it, writes to the tier */
    uint8_t state;   /* enum km_snap_state */
    uint8_t worker;  /* that it is granted to */
    uint8_t covered; /* a later one of the same chain exists, and no fork between */
    uint8_t storing; /* user: being written to the tier */
    uint8_t leaving; /* user: given up when it is written */
    uint8_t unproven, proving, damaged, proof_stale, write_stale; /* user: as in km_node */
};

struct km_index;

struct km_index_options {
    uint32_t block_count; /* >= 1 */
    uint32_t snapshot_first, snapshot_count;
    uint32_t block_tokens;
};

MUST_USE enum err km_index_create(const struct km_index_options *options, struct km_index **ret);
void km_index_destroy(struct km_index **index_p);
uint64_t km_index_bytes(const struct km_index *ix); /* memory, snapshots left out */

/* Time of use in 16 ms steps: enough for two years in 32 bits. */
uint32_t km_index_ticks(uint64_t now_us);

struct km_node *km_index_node(const struct km_index *ix, uint32_t block);
/* KM_NONE: no node of that hash. */
uint32_t km_index_find(const struct km_index *ix, const struct hash128 *hash);

/* block must be PRIVATE or FREE; the parent INDEXED or, for a loading one, LOADING. */
void km_index_insert(struct km_index *ix, uint32_t block, const struct hash128 *hash,
                     uint32_t parent, enum km_node_state state, uint32_t now_ticks);
void km_index_loaded(struct km_index *ix, uint32_t block); /* LOADING -> INDEXED */
/* Out of the table: no refs, no children, no snapshot.  Becomes FREE. */
void km_index_remove(struct km_index *ix, uint32_t block);
void km_index_ref(struct km_index *ix, uint32_t block);
/* Afterwards the caller settles it. */
void km_index_unref(struct km_index *ix, uint32_t block);
/* In the heap if it is an idle leaf, with that class, else out of it. */
void km_index_settle(struct km_index *ix, uint32_t block, enum km_class class);
void km_index_touch(struct km_index *ix, uint32_t block, uint32_t now_ticks);
uint32_t km_index_first_out(const struct km_index *ix); /* KM_NONE: nothing to give up */
uint32_t km_index_cached(const struct km_index *ix);    /* indexed, nobody refers to */
uint32_t km_index_count(const struct km_index *ix);     /* indexed or loading */

/* Snapshots. */
uint32_t km_index_snap_first(const struct km_index *ix);
uint32_t km_index_snap_count(const struct km_index *ix);
struct km_snap *km_index_snap(const struct km_index *ix, uint32_t slot); /* NULL: no such slot */
uint32_t km_index_snaps(const struct km_index *ix, enum km_snap_state state); /* how many */
void km_index_snap_set(struct km_index *ix, uint32_t slot, enum km_snap_state state);
void km_index_snap_attach(struct km_index *ix, uint32_t slot, uint32_t block, uint32_t now_ticks);
void km_index_snap_detach(struct km_index *ix, uint32_t slot); /* becomes FREE */

/* Walks everything and CHECKs counts, parents, heap order and table: for tests. */
void km_index_audit(const struct km_index *ix);

#endif
