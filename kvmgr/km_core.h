/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_core.h - who may use which block and slot, and for how long: events in, actions out.
 *
 * Owned by kvmgr's loop thread.  Holds KM_WORKERS_MAX workers and one lease a live slot; memory is
 * taken at create and when an arena is attached.  Pure: time and the arena come in as events.
 *
 * A worker with a new incarnation, or one that kvmgr does not know, must attach first; it is sent a
 * KvState before the refusal, so that it sees whom it talks to.  A worker that was silent loses its
 * leases and is lost: it may not open or extend until a ping of it names none of the leases that it
 * lost.  Else it could be given blocks twice: once by the lease it still believes in. */
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
    uint32_t slots_spare;           /* live slots beyond the worker's seqs_max */
    uint64_t silence_us_max;        /* 0 = 5 s */
    uint64_t unnamed_us_max;        /* 0 = 2 s: age at which a lease that no ping names is freed */
};

struct km_core_stats { /* running totals but for workers */
    uint64_t attaches, attaches_refused, workers_lost;
    uint64_t opens, opens_full, extends, extends_full;
    uint64_t commits, blocks_committed, snapshots, releases, adopts;
    uint64_t leases_expired; /* freed by silence, a new incarnation, or not being named */
    uint64_t stale;          /* of an old epoch, or naming a lease that is gone */
    uint64_t waits;          /* opens of lost workers, answered with ERR_KV_FULL */
    uint64_t refused;        /* against the rules: gaps, bounds, unexpected types */
    uint32_t workers;
};

struct km_core *km_core_create(const struct km_core_options *options);
void km_core_destroy(struct km_core **core_p);

/* Clears *ret_actions, then fills it. */
void km_core_step(struct km_core *core, const struct km_event *event,
                  struct km_actions *ret_actions);

const struct km_core_stats *km_core_stats(const struct km_core *core);
struct km_pool_counts km_core_counts(const struct km_core *core); /* zeros before an attach */
uint32_t km_core_leases(const struct km_core *core);
struct km_pool *km_core_pool(struct km_core *core); /* NULL before; for tests */

#endif
