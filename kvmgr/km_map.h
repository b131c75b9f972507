/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_map.h - folds commits into session maps in Redis, behind the token path.
 *
 * Owned by kvmgr's loop thread.  Redis is a hint: whatever fails is dropped and counted, and comes
 * right with the session's next commit or when Redis returns.  At most one write per session is in
 * flight; what is committed meanwhile goes with the next one.  Bounds: sessions_max sessions, least
 * recently committed out first; entries_max block entries in all; writes_max writes in flight.
 *
 * Keys, all with prefix tandem:{<cluster>}: and never a session key, only its keyed hash `sid`:
 *   epoch:<pool>      the highest epoch any kvmgr of this pool had
 *   sess:<sid>        hash: epoch, incarnation, layout_fp, model_fp, salt, n_tokens, n_blocks,
 *                     tail_hash, kda_snap_pos (tokens up to the last kept state), drafter_pos (0:
 *                     nothing of it is kept), tier (1: some is on the tier only), pin_until
 *                     (Unix ms, 0 = none), gen, last_request, updated_ms
 *   sess:<sid>:b:<c>  string: epoch u64, gen u64, crc32c u32 of those 16 bytes and of what follows,
 *                     then 22 bytes a block {chain hash 16, block id u32, tier u8, flags u8}
 *                     (tier 0: in the arena, 1: on the tier only, with id 2^32 - 1) for
 *                     blocks [256 c, 256 c + 256); little-endian
 * A script writes all of a session or nothing: it refuses if epoch:<pool> is not ours or if the
 * stored gen (of our epoch; an older epoch's map counts as absent) is not the expected one. */
#ifndef KVMGR_KM_MAP_H
#define KVMGR_KM_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

struct redis;
struct km_map;
struct km_moved;
struct km_session_change;

struct km_map_options {
    struct redis *redis; /* borrowed; destroyed before the map */
    const char *cluster; /* borrowed for the call */
    uint32_t pool_id;
    uint32_t epoch;
    uint64_t incarnation;
    uint32_t sessions_max;
    uint32_t entries_max; /* 0 = 1 M */
    uint32_t writes_max;  /* 0 = 16 */
    uint64_t ttl_ms;
    uint64_t (*unix_ms)(void);
};

struct km_map_stats {
    uint64_t writes; /* accepted by the script */
    uint64_t refused_epoch, refused_gen;
    uint64_t failed;     /* no answer, or an error */
    uint64_t dropped;    /* commits not written: Redis away, or no room */
    uint64_t superseded; /* commits of a lease that is not its session's latest */
    uint32_t sessions;
    uint32_t redis_epoch; /* last seen in Redis; above ours: maps are off */
    bool refusing;        /* Redis answers, but takes no writes: full, read-only, loading */
};

struct km_map *km_map_create(const struct km_map_options *options);
void km_map_destroy(struct km_map **map_p);

/* What new maps are stamped with; forgets all sessions if it changes. */
void km_map_arena(struct km_map *m, const struct hash128 *layout_fp,
                  const struct hash128 *model_fp);
void km_map_commit(struct km_map *m, const struct km_session_change *change);
/* Blocks that only the tier has now; told with the session's next write. */
void km_map_moved(struct km_map *m, const struct km_moved *items, uint32_t count);
/* A session is pinned until then, 0 = no more; not known: nothing happens. */
void km_map_pin(struct km_map *m, const char *sid, uint64_t until_ms);
/* From redis_on_change: on return the epoch is raised and tracked sessions are written again. */
void km_map_redis_up(struct km_map *m, bool up);
/* A few times a second: tries again what Redis refused. */
void km_map_tick(struct km_map *m);
const struct km_map_stats *km_map_stats(const struct km_map *m);
uint32_t km_map_waiting(const struct km_map *m); /* sessions that Redis has not as they are now */

#endif
