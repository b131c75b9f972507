/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_core.h - who may use which block and slot, and for how long: events in, actions out.
 *
 * Owned by kvmgr's loop thread.  Holds KM_WORKERS_MAX workers and one lease a live slot; memory is
 * taken at create and when an arena is attached.  Pure: time and the arena come in as events.
 *
 * A worker with a new incarnation, or one that kvmgr does not know, must attach first; it is sent a
 * KvState before the refusal, so that it sees whom it talks to.  A worker that was silent, or whose
 * name another process took, keeps its leases and grants while it has the arena mapped: it may wake
 * up in the middle of a step and write.  They end with KM_EVENT_WORKER_GONE; a silent one that is
 * heard again goes on with them.
 *
 * Cached blocks, snapshots, eviction: km_core_cache.c; the NVMe tier: km_core_tier.c; data that an
 * earlier process committed: km_core_proof.c. */
#ifndef KVMGR_KM_CORE_H
#define KVMGR_KM_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "kvmgr/km_event.h"
#include "kvmgr/km_pool.h"
#include "proto/block_hash.h"

#define KM_WORKERS_MAX 8u
#define KM_SEQS_MAX    8192u /* live slots that one attach may ask for */

struct km_core;

struct km_core_options {
    uint32_t epoch; /* >= 1 */
    uint64_t incarnation;
    struct block_hash_key key; /* for session ids and salts */
    uint32_t block_tokens;
    uint32_t kv_dtype, index_dtype; /* enum kv_dtype, echoed to workers */
    uint32_t snapshot_dtype;        /* the same */
    uint32_t slots_spare;           /* live slots beyond the worker's seqs_max */
    uint64_t silence_us_max;        /* 0 = 5 s */
    uint64_t unnamed_us_max;        /* 0 = 2 s: age at which a lease that no ping names is freed */
    uint32_t snapshot_every;        /* echoed to workers */
    uint32_t sessions_max;          /* 0 = 4,096 */
    uint32_t session_percent;       /* of the blocks that one session may keep; 0 = all */
    uint32_t tenant_percent;
    uint32_t pin_percent;       /* of the blocks that the operator's pins may keep */
    uint64_t pin_us;            /* of a session's last turn */
    uint64_t starving_us_max;   /* 0 = 1 s: then another lease has to give way */
    uint64_t tier_bytes_max;    /* 0 = no tier */
    uint32_t tier_objects_max;  /* 0 = 1 M */
    uint64_t load_us_max;       /* 0 = 4 s: then an open is answered without the tier */
    uint64_t write_wait_us_max; /* 0 = 0.5 s: then blocks are dropped unwritten */
};

struct km_core_stats { /* running totals but for workers */
    uint64_t attaches, attaches_refused, workers_lost;
    uint64_t opens, opens_full, extends, extends_full;
    uint64_t commits, blocks_committed, snapshots, releases, adopts;
    uint64_t leases_expired; /* freed as their worker is gone, or did not name them */
    uint64_t stale;          /* of an old epoch, or naming a lease that is gone */
    uint64_t refused;        /* against the rules: gaps, bounds, unexpected types */
    /* Opens by what the cache gave them. */
    uint64_t hits;         /* everything that may be reused */
    uint64_t hits_part;    /* less, but something */
    uint64_t misses_cold;  /* no block known */
    uint64_t misses_bare;  /* blocks, but no snapshot at any boundary */
    uint64_t misses_asked; /* the worker wants no reuse, or there is no full block */
    uint64_t tokens_reused;
    uint64_t duplicates; /* blocks committed that were known already */
    uint64_t snapshots_refused, snapshots_dropped;
    uint64_t evicted_written, evicted_dropped; /* blocks: on the tier, or gone */
    uint64_t reclaims, pressures;
    uint64_t blocks_adopted, snapshots_adopted;
    uint64_t hits_loaded; /* opens answered from the tier */
    uint64_t writes, write_failures, loads, loads_failed, loads_late, tokens_loaded;
    uint64_t objects_corrupt, objects_evicted;
    uint64_t blocks_damaged, snapshots_damaged; /* data other than committed */
    uint32_t workers;
};

struct km_core *km_core_create(const struct km_core_options *options);
void km_core_destroy(struct km_core **core_p);

/* Clears *ret_actions, then fills it. */
void km_core_step(struct km_core *core, const struct km_event *event,
                  struct km_actions *ret_actions);

/* Answers are ready that did not fit into the step: step again, with KM_EVENT_STORE_DONE of
 * none. */
bool km_core_more(const struct km_core *core);

/* Incarnations of workers of which it is to be found out whether they still have the arena mapped:
 * lost ones, and the one whose name the asker takes (NULL: nobody asks). */
uint32_t km_core_suspects(const struct km_core *core, const struct km_peer *asker,
                          uint64_t incarnation, uint64_t ret[KM_WORKERS_MAX]);

const struct km_core_stats *km_core_stats(const struct km_core *core);
struct km_pool_counts km_core_counts(const struct km_core *core); /* zeros before an attach */
uint32_t km_core_leases(const struct km_core *core);
struct km_pool *km_core_pool(struct km_core *core); /* NULL before; for tests */

struct km_core_cache { /* a moment's values */
    uint32_t snapshots_free, snapshots_kept, snapshots_total;
    uint32_t sessions;
    uint64_t tokens_keepable;
    bool tier_on;
    uint64_t tier_bytes;
    uint32_t tier_blocks, tier_snapshots;
    uint32_t writes_waiting, loads_waiting;
};
struct km_core_cache km_core_cache(const struct km_core *core);
/* Cached blocks that the tier does not have; a walk over all blocks. */
uint32_t km_core_unwritten(const struct km_core *core);
/* The operator's pin: what is cached of the session stays for so long, 0: no more.  ERR_NOT_FOUND:
 * nothing of it is; ERR_TOO_LARGE: more than pin_percent.  ret_sid: the session's id in maps. */
MUST_USE enum err km_core_pin(struct km_core *core, const char *session_key, const char *cache_salt,
                              uint64_t for_us, char ret_sid[33], struct err_detail *detail);
/* Blocks that are charged to sessions pinned by their last turn or the operator; a walk over
 * sessions. */
uint32_t km_core_pinned(const struct km_core *core);
uint32_t km_core_indexed(const struct km_core *core); /* blocks found by their hash */
/* Adopted blocks whose data were not read yet; a walk over all blocks. */
uint32_t km_core_unproven(const struct km_core *core);

#endif
