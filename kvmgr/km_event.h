/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_event.h - what the core is told and what it asks for (pure data).
 *
 * Pointers in an event are borrowed for the step; pointers in actions live until the next step or
 * the end of the event's own data, so the shell carries actions out at once and in order.  Bounds:
 * KM_ACTIONS_MAX actions a step; block lists at most the arena's block count. */
#ifndef KVMGR_KM_EVENT_H
#define KVMGR_KM_EVENT_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "proto/msg.h"

#define KM_PEER_BYTES_MAX 32
#define KM_ACTIONS_MAX    40u
#define KM_RECLAIMS_MAX   16u /* KvReclaim per KvPing */

struct km_peer { /* routing id of a worker: "worker-0" */
    uint8_t count;
    uint8_t bytes[KM_PEER_BYTES_MAX];
};

enum km_event_type { KM_EVENT_MSG = 1, KM_EVENT_TICK, KM_EVENT_ARENA };

struct km_arena_result { /* answer to KM_ACTION_ARENA_OPEN */
    enum err code;
    const char *text; /* why not; may be "" */
    const char *path;
    uint64_t arena_bytes;
    struct hash128 layout_fp;
    uint32_t block_count, slot_count;
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
        bool stood_still; /* of a tick: this process was stopped since the last one */
    } u;
};

enum km_header_state { KM_FREE = 0, KM_WRITING = 1, KM_COMMITTED = 2 }; /* as kv_block_state */

struct km_arena_wanted {
    uint32_t dsa_layers, latent_dim, index_dim, index_kpool;
    uint32_t rank, ranks;
    uint64_t state_bytes;
    struct hash128 model_fp;
    uint32_t slot_count; /* at least */
};

struct km_session_change { /* blocks of a session's chain were committed */
    const char *sid;       /* 32 hex characters */
    struct hash128 salt;
    struct msg_id request;
    uint64_t lease;
    uint32_t first_block, count;
    const uint32_t *blocks;       /* [count] */
    const struct hash128 *hashes; /* [count] */
    uint32_t token_count;
};

enum km_action_type {
    KM_ACTION_SEND = 1,
    KM_ACTION_ARENA_OPEN, /* the next event must be KM_EVENT_ARENA */
    KM_ACTION_BLOCKS,     /* write block headers */
    KM_ACTION_SLOTS,      /* write live slots' headers */
    KM_ACTION_SESSION,
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
        } slots;
        struct km_session_change session;
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
