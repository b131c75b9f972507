/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_event.h - what the core is told and what it asks for (pure data).
 *
 * Pointers in an event are borrowed for the step; pointers in actions live until the next step or
 * the end of the event's own data, so the shell carries actions out at once and in order.  Bounds:
 * KM_ACTIONS_MAX actions a step; block lists at most the arena's block count. */
#ifndef KVMGR_KM_EVENT_H
#define KVMGR_KM_EVENT_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

#define KM_PEER_BYTES_MAX     32
#define KM_ACTIONS_MAX        64u
#define KM_RECLAIMS_MAX       16u    /* KvReclaim per KvPing */
#define KM_SESSION_BLOCKS_MAX 65536u /* of one session's map; later ones are left out */
#define KM_STORE_MAX          256u   /* operations of the tier in flight, and in one action */
#define KM_MOVED_MAX          512u   /* told in one action; maps are hints, the rest is not told */
#define KM_PROOFS_MAX         256u   /* data being read, and in one action */

struct km_peer { /* routing id of a worker: "worker-0" */
    uint8_t count;
    uint8_t bytes[KM_PEER_BYTES_MAX];
};

enum km_event_type {
    KM_EVENT_MSG = 1,
    KM_EVENT_TICK,
    KM_EVENT_ARENA,
    KM_EVENT_STORE_STATE,   /* the tier came up, or is off from now on */
    KM_EVENT_STORE_DONE,    /* operations that ended */
    KM_EVENT_STORE_OBJECTS, /* found by the re-index */
    KM_EVENT_PROVED,        /* data that were read, see km_core_proof.c */
    KM_EVENT_SUSPECT,       /* somebody wrote where he must not: a block is to be read again */
    KM_EVENT_WORKER_GONE,   /* a silent or replaced worker has the arena mapped no more */
    KM_EVENT_FLUSH,         /* write what is cached to the tier; repeated until nothing is asked */
};

struct km_found_block { /* a committed header of an adopted arena */
    struct hash128 hash, parent;
    uint32_t block, position;
    bool sealed; /* its header has the sum of its data */
};
struct km_found_snapshot {
    struct hash128 hash;
    uint32_t slot, token_count;
    bool sealed;
};

struct km_arena_result { /* answer to KM_ACTION_ARENA_OPEN */
    enum err code;
    const char *text; /* why not; may be "" */
    const char *path;
    uint64_t arena_bytes;
    struct hash128 layout_fp;
    uint32_t block_count;
    uint32_t live_count, slot_count; /* slots below live_count are live, the others snapshots */
    uint64_t object_bytes[2]; /* of a file of the tier, by enum km_object_kind, uncompressed */
    /* What survived in it, blocks by rising position; the core frees what does not fit. */
    uint32_t found_count, found_snapshot_count;
    const struct km_found_block *found;
    const struct km_found_snapshot *found_snapshots;
};

enum km_store_op { KM_STORE_WRITE = 1, KM_STORE_READ, KM_STORE_REMOVE };

struct km_store_item {
    enum km_store_op op;
    uint32_t kind;  /* enum km_object_kind */
    uint32_t index; /* block or slot of the arena; REMOVE: none */
    uint32_t token_count;
    struct hash128 hash;
    struct hash128 parent; /* of a block that is written, the one before it in its chain */
};
struct km_store_result {
    struct km_store_item item;
    enum err code;  /* READ: ERR_CORRUPT and ERR_NOT_FOUND also end the object; WRITE: ERR_CORRUPT
                     * says that the arena's data are not what was committed */
    uint64_t bytes; /* on the tier; WRITE only */
};
struct km_store_object {
    uint32_t kind;
    struct hash128 hash, parent;
    uint64_t bytes;
};

struct km_proof {  /* data to read, and then what was found */
    uint32_t kind; /* enum km_object_kind */
    uint32_t index;
    enum err code; /* ERR_OK: what its header was sealed for */
};

struct km_event {
    uint64_t now_us; /* monotonic, never falls */
    enum km_event_type type;
    union {
        struct {
            struct km_peer peer;
            const struct msg *msg;
        } msg;
        struct km_arena_result arena;
        uint64_t gone;     /* its incarnation */
        bool flush_begins; /* of the first flush */
        uint32_t suspect;  /* block */
        bool stood_still;  /* of a tick: this process was stopped since the last one */
        struct {
            bool on;
        } store_state;
        struct {
            uint32_t count;
            const struct km_store_result *results;
        } store_done;
        struct {
            uint32_t count;
            const struct km_store_object *objects;
        } store_objects;
        struct {
            uint32_t count;
            const struct km_proof *results;
        } proved;
    } u;
};

enum km_header_state { KM_FREE = 0, KM_WRITING = 1, KM_COMMITTED = 2 }; /* as kv_block_state */

struct km_arena_wanted {
    uint32_t dsa_layers, latent_dim, index_dim, index_kpool;
    uint32_t rank, ranks, interleave; /* as in msg_kv_attach */
    uint64_t state_bytes;
    struct hash128 model_fp;
    uint32_t slot_count; /* at least */
    uint64_t worker;     /* incarnation of the one that attaches */
};

/* Blocks of a session's chain were committed; count 0: its state was kept, or its turn ended. */
struct km_session_change {
    const char *sid; /* 32 hex characters */
    struct hash128 salt;
    struct msg_id request;
    uint64_t lease;
    uint32_t first_block, count;
    struct hash128 parent;        /* hash of block first_block - 1 */
    const uint32_t *blocks;       /* [count] */
    const struct hash128 *hashes; /* [count] */
    uint32_t token_count;
    uint32_t snapshot_tokens; /* of the last boundary whose state is kept */
    uint64_t pin_us;          /* count 0: from now on; 0 = as before */
};

/* A block of a session's chain left the arena; the tier has it. */
struct km_moved {
    struct hash128 sid, hash;
    uint32_t position;
};

enum km_action_type {
    KM_ACTION_SEND = 1,
    KM_ACTION_ARENA_OPEN, /* the next event must be KM_EVENT_ARENA */
    KM_ACTION_BLOCKS,     /* write block headers */
    KM_ACTION_SLOTS,      /* write slots' headers */
    KM_ACTION_STORE,      /* operations for the tier, in order */
    KM_ACTION_PROVE,      /* read data and tell */
    KM_ACTION_SESSION,
    KM_ACTION_MOVED,
    KM_ACTION_TRACE
};

struct km_action {
    enum km_action_type type;
    union {
        struct {
            struct km_peer peer;
            struct msg msg;
        } send;
        struct km_arena_wanted arena;
        struct {
            enum km_header_state state;
            uint32_t count;
            const uint32_t *blocks;
            uint32_t first_position; /* the rest with KM_COMMITTED only */
            struct hash128 parent;
            const struct hash128 *hashes;
        } blocks;
        struct {
            enum km_header_state state;
            uint32_t count;
            const uint32_t *slots;
            bool snapshot;
            uint32_t token_count; /* the rest with KM_COMMITTED only */
            struct hash128 hash;
        } slots;
        struct {
            uint32_t count;
            const struct km_store_item *items;
        } store;
        struct {
            uint32_t count;
            const struct km_proof *items;
        } prove;
        struct km_session_change session;
        struct {
            uint32_t count;
            const struct km_moved *items;
        } moved;
        struct {
            const char *what; /* constant text */
            uint32_t worker_id;
            uint32_t leases;
            const char *text;
        } trace;
    } u;
};

struct km_actions {
    uint32_t count;
    struct km_action list[KM_ACTIONS_MAX];
};

#endif
