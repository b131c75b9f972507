/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_core_state.h - the core's inside, for km_core.c and km_core_lease.c only (pure). */
#ifndef KVMGR_KM_CORE_STATE_H
#define KVMGR_KM_CORE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_core.h"

#define KM_CORE_MAGIC 0x4b4d434fu

struct km_worker {
    bool used;
    struct km_peer peer;
    uint32_t worker_id;
    uint64_t incarnation;
    uint64_t heard_us;
    bool lost; /* was silent: holds no lease, may not open */
};

struct km_core {
    uint32_t magic;
    struct km_core_options options;
    struct km_core_stats stats;
    uint64_t now_us;
    struct km_worker workers[KM_WORKERS_MAX];

    struct km_pool *pool; /* NULL without an arena */
    struct km_pool_scratch scratch;
    struct km_arena_wanted geometry; /* of the arena, or of the one being opened */
    struct km_arena_result arena;    /* path and text borrow the buffers below */
    char arena_path[512];
    char text[ERR_DETAIL_BYTES]; /* of one reply; lives until the next step */

    bool pending; /* an arena is being opened for this attach */
    struct km_peer pending_peer;
    struct msg_kv_attach pending_attach;

    uint64_t ping_serial;
    uint32_t slot_taken;                        /* behind an action's pointer */
    struct km_action *free_blocks, *free_slots; /* this step's, so that frees are merged */
    bool taking;                                /* blocks were taken in this step */
};

struct km_action *core_act(struct km_core *core, struct km_actions *actions,
                           enum km_action_type type);
/* A message back to a peer, with our epoch and the asked id in its header. */
struct msg *core_reply(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                       enum msg_type type, const struct msg *asked);
void core_trace(struct km_core *core, struct km_actions *actions, const char *what,
                uint32_t worker_id, uint32_t leases, const char *text);
void core_free_lease(struct km_core *core, struct km_actions *actions, struct km_lease *lease);
/* The attached worker behind a peer, or NULL. */
struct km_worker *core_worker(struct km_core *core, const struct km_peer *peer);
/* KvState to a peer: the answer to its ping, and what tells a stranger our incarnation. */
void core_send_state(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                     const struct msg *asked);

void core_open(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_extend(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_commit(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_snapshot(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_release(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_adopt(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_ping(struct km_core *core, struct km_actions *actions, const struct km_event *event);

#endif
