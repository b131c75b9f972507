/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_audit.h - reads an arena file and tells what is in it (I/O, no loop; changes nothing).
 *
 * For `tandem-kvmgr --audit`; takes no lock, so it may run beside a kvmgr. */
#ifndef KVMGR_KM_AUDIT_H
#define KVMGR_KM_AUDIT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "lib/base/err.h"
#include "proto/kv_layout.h"

struct km_audit {
    struct kv_superblock superblock;
    uint64_t blocks_unused, blocks_by_state[3]; /* by enum kv_block_state */
    uint64_t slots_unused, slots_by_state[3];
    uint64_t headers_broken; /* CRC or state does not hold */
    uint64_t epochs_ahead;   /* headers of a later epoch than the file's */
    /* Committed blocks by their chains: reachable from a front, or behind a hole; the same hash
     * twice; snapshots that belong to a reachable block, and those that do not. */
    uint64_t chained, unchained, doubled;
    uint64_t snapshots, snapshots_stray;
    uint64_t data_broken;   /* committed, but their data (padding too) are not what was committed */
    uint64_t guards_broken; /* overwritten, behind blocks and slots in any state */
    bool guard_slot;        /* the first of them */
    uint32_t guard_index;
};

/* ERR_OK even with broken headers; anything else: no arena there, or none to be trusted. */
MUST_USE enum err km_audit_read(const char *path, struct km_audit *ret_audit,
                                struct err_detail *detail);
bool km_audit_sound(
    const struct km_audit *audit); /* headers whole, free + cached + leased = total */
/* Every committed block is part of a chain, once, every snapshot belongs to one, and their data
 * are what was committed, and every guard is whole: nobody wrote where he must not.  Of a rank
 * above 0 only data and guards count: what its authority gave up may still stand there as
 * committed.  Beside a
 * kvmgr that works, a change may be caught in the middle: look again then. */
bool km_audit_chained(const struct km_audit *audit);
void km_audit_print(FILE *out, const char *path, const struct km_audit *audit);

/* The epoch in the superblock of the file at path; 0 if there is no sound one. */
uint32_t km_audit_epoch(const char *path);

#endif
