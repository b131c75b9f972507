/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_core_state.h - the core's inside, for km_core*.c only (pure). */
#ifndef KVMGR_KM_CORE_STATE_H
#define KVMGR_KM_CORE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_core.h"
#include "kvmgr/km_evict.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"

#define KM_CORE_MAGIC      0x4b4d434fu
#define KM_LOADS_MAX       32u   /* opens that wait for the tier */
#define KM_LOAD_BLOCKS_MAX 8192u /* blocks read for one open */
#define KM_PROOF_WANTS_MAX 16u

STATIC_CHECK(KM_LOAD_BLOCKS_MAX <= KM_SESSION_BLOCKS_MAX);

struct km_worker {
    bool used;
    struct km_peer peer;
    uint32_t worker_id;
    uint64_t incarnation;
    uint64_t heard_us;
    bool lost;     /* was silent, or another process has its name: it keeps what it may write to */
    bool replaced; /* the latter */
    bool hungry;   /* was refused for want of blocks: told when there are some */
};

struct km_ask { /* an open, apart from the message it came in */
    struct km_peer peer;
    struct msg_id id;
    uint32_t owner;
    uint32_t blocks_wanted;
    char sid[33];
    struct hash128 sid_hash, salt;
};

struct km_load { /* an open whose blocks are being read from the tier */
    bool used, answered, failed;
    struct km_ask ask;
    uint64_t since_us;
    uint32_t front;  /* resident end of the chain, referred to; KM_NONE */
    uint32_t tail;   /* last block of the chain to load; = front if only the snapshot lacks */
    uint32_t cursor; /* next block to ask for, from the tail up; KM_NONE: all asked */
    uint32_t slot;   /* snapshot slot that is being filled, KM_NONE: resident */
    bool slot_asked, slot_good;
    uint32_t outstanding;
};

struct km_proof_want { /* a chain whose open waits until its data were read */
    bool used;
    uint32_t tail;   /* referred to */
    uint32_t cursor; /* next block to ask for, from the tail up; KM_NONE: all asked */
    uint32_t slot;   /* with the state to begin from, KM_NONE */
};

struct km_core {
    uint32_t magic;
    struct km_core_options options;
    struct km_core_stats stats;
    uint64_t now_us;
    struct km_worker workers[KM_WORKERS_MAX];

    struct km_pool *pool;            /* NULL without an arena */
    struct km_arena_wanted geometry; /* of the arena, or of the one being opened */
    struct km_arena_result arena;    /* path and text borrow the buffers below */
    uint32_t live_slots;             /* of the arena; the others are for snapshots */
    char arena_path[512];
    char text[ERR_DETAIL_BYTES]; /* of one reply; lives until the next step */

    bool pending; /* an arena is being opened for this attach */
    struct km_peer pending_peer;
    struct msg_kv_attach pending_attach;

    uint64_t ping_serial;
    char session_sid[33];                                           /* behind an action's pointer */
    uint32_t slot_taken, slot_kept, snapshot_taken[MSG_GRANTS_MAX]; /* behind actions' pointers */
    uint32_t granted[MSG_GRANTS_MAX];
    struct km_action *frees_blocks, *frees_slots; /* first of every step, filled at its end */
    bool taking;                                  /* blocks were taken in this step */
    struct msg_id reclaimed;                      /* request that had to give way last */

    struct km_tier *tier; /* NULL: there is none */
    bool tier_on;
    uint64_t slots_starved_us; /* since when slots are asked for while the tier writes; 0 = not */
    uint64_t starved_us;       /* since when opens are refused while the tier writes; 0 = not */
    uint32_t store_inflight, store_count;
    uint32_t flush_at, flush_count; /* in the pool's order */
    uint64_t flush_bytes;           /* that may still be written */
    struct km_store_item store_items[KM_STORE_MAX];
    struct km_load loads[KM_LOADS_MAX];

    uint32_t moved_count;
    struct km_moved moved[KM_MOVED_MAX]; /* behind an action's pointer */

    bool unproven, unproven_seen; /* something adopted was not read yet; in this round */
    uint32_t proof_at;            /* in the background: next block, or slot behind them */
    uint32_t proofs_inflight, proof_count;
    struct km_proof proof_items[KM_PROOFS_MAX]; /* behind an action's pointer */
    struct km_proof_want proof_wants[KM_PROOF_WANTS_MAX];

    bool more;                                    /* loads that ended wait for the next step */
    struct hash128 hashes[KM_SESSION_BLOCKS_MAX]; /* behind an action's pointer */
    uint32_t front_blocks[KM_SESSION_BLOCKS_MAX];
};

struct km_action *core_act(struct km_core *core, struct km_actions *actions,
                           enum km_action_type type);
/* A message back to a peer, with our epoch and the asked id in its header. */
struct msg *core_reply(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                       enum msg_type type, const struct msg *asked);
void core_trace(struct km_core *core, struct km_actions *actions, const char *what,
                uint32_t worker_id, uint32_t leases, const char *text);
void core_free_lease(struct km_core *core, struct km_lease *lease, enum km_release how);
/* The attached worker behind a peer, or NULL. */
struct km_worker *core_worker(struct km_core *core, const struct km_peer *peer);
/* The sender's lease, or NULL with *ret_code saying why. */
struct km_lease *core_lease_of(struct km_core *core, const struct km_event *event, uint64_t id,
                               enum err *ret_code);
bool core_epoch_stale(const struct km_core *core, const struct msg *m);
/* KvState to a peer: the answer to its ping, and what tells a stranger our incarnation. */
void core_send_state(struct km_core *core, struct km_actions *actions, const struct km_peer *peer,
                     const struct msg *asked);
/* KvState unasked, for the sake of its list of slots. */
void core_send_grants(struct km_core *core, struct km_actions *actions, const struct km_peer *peer);
/* Tells a session's map of a kept state (tokens up to there) or of a turn's end. */
void core_session_note(struct km_core *core, struct km_actions *actions,
                       const struct km_lease *lease, uint32_t snapshot_tokens, uint64_t pin_us);
void core_taken(struct km_core *core, struct km_actions *actions, uint32_t count);

void core_open(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_extend(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_commit(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_release(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_ping(struct km_core *core, struct km_actions *actions, const struct km_event *event);
/* The open itself, once it is known which front is shared (KM_NONE: none), and its answer. */
void core_open_with(struct km_core *core, struct km_actions *actions, const struct km_ask *ask,
                    uint32_t front);

/* km_core_cache.c */
void core_snapshot(struct km_core *core, struct km_actions *actions, const struct km_event *event);
void core_adopt(struct km_core *core, struct km_actions *actions, const struct km_event *event);
/* Grants slots up to the worker's share and lists them in core->granted; the count. */
uint32_t core_grants(struct km_core *core, struct km_actions *actions, const struct km_worker *w);
/* A snapshot slot to write over, KM_NONE: none now.  With a tier, what may be wanted again is
 * written before it is given up (for write_wait_us_max at most); *ret_coming: such a slot comes. */
uint32_t core_snapshot_slot(struct km_core *core, uint32_t spare_node, bool *ret_coming);
/* Slots became free: a worker that has too few hears of them. */
void core_grants_offer(struct km_core *core, struct km_actions *actions);
void core_grants_revoke(struct km_core *core, const struct km_worker *w);
void core_recover(struct km_core *core, const struct km_arena_result *result);
/* Gives up cached blocks until so many are free; false: not now. */
bool core_make_room(struct km_core *core, uint32_t blocks);
void core_cache_tick(struct km_core *core, struct km_actions *actions);
void core_tell_hungry(struct km_core *core, struct km_actions *actions);
void core_tell_waiting(struct km_core *core, struct km_actions *actions); /* try again now */

/* km_core_tier.c */
/* Starts reading what the tier has of the chain beyond the resident front.  True: the open is
 * answered later. */
bool core_load(struct km_core *core, struct km_actions *actions, const struct km_ask *ask,
               const struct msg_kv_open *open, uint32_t resident_front, uint32_t *ret_code);
bool core_stored(const struct km_core *core, uint32_t block); /* with its snapshot */
/* Neither on the tier nor covered by a later one nor spent. */
bool core_snapshot_wanted(const struct km_core *core, uint32_t slot);
uint32_t core_snapshots_leaving(const struct km_core *core);
/* Begins to write until so many are on their way out; whether any is. */
bool core_snapshots_write(struct km_core *core, uint32_t count, uint32_t spare_node);
bool core_write_out(struct km_core *core, uint32_t block, bool leaving);
void core_store_state(struct km_core *core, struct km_actions *actions,
                      const struct km_event *event);
void core_store_done(struct km_core *core, struct km_actions *actions,
                     const struct km_event *event);
void core_store_objects(struct km_core *core, const struct km_event *event);
void core_flush(struct km_core *core, bool begins);
/* An idle leaf goes; if the tier has it, its session's map is told. */
void core_evict(struct km_core *core, uint32_t block);
/* Gives up a node that was to leave, and those before it that were too. */
void core_leave(struct km_core *core, uint32_t block);
void core_tier_tick(struct km_core *core, struct km_actions *actions);
void core_tier_reset(struct km_core *core); /* the arena goes: nothing is in flight any more */
bool core_load_find(struct km_core *core, uint32_t owner, const struct msg_id *id,
                    struct km_load **ret);
void core_store_add(struct km_core *core, enum km_store_op op, enum km_object_kind kind,
                    const struct hash128 *hash, uint32_t index, uint32_t token_count);
bool core_store_room(const struct km_core *core, uint32_t count);

/* km_core_proof.c */
/* Whether a chain and a snapshot (KM_NONE: none) may be given to anybody. */
bool core_proven(const struct km_core *core, uint32_t tail, uint32_t slot);
/* Whether the node has a snapshot that is not known to be damaged. */
bool core_snapshot_good(const struct km_core *core, const struct km_node *n);
/* Whether a block, or what it stands on, is damaged. */
bool core_on_damaged(const struct km_core *core, uint32_t block);
/* The same; what lacks is read, and who waits is told. */
bool core_prove(struct km_core *core, uint32_t tail, uint32_t slot);
void core_proved(struct km_core *core, struct km_actions *actions, const struct km_event *event);
/* Blocks whose data are others than were committed leave, with all that stands on them. */
void core_damaged(struct km_core *core, struct km_actions *actions, const uint32_t *blocks,
                  uint32_t count);
/* What is known of its data counts no more, nor what a reading says that has begun. */
void core_doubt(struct km_node *n);
void core_doubt_snapshot(struct km_snap *s);
void core_suspect(struct km_core *core, uint32_t block); /* read again before it is given away */
void core_proof_tick(struct km_core *core, struct km_actions *actions);
void core_proof_reset(struct km_core *core); /* the arena goes */

#endif
