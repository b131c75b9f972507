/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_taps.h - the writer's side of the tap ring: its file, and rows of a finished batch.
 * With a reducer, the drafter's own fc, a record holds one context vector instead of all taps.
 *
 * Created by the loop thread, then owned by the device thread, which never waits for a reader: the
 * oldest records make room.  The file has a name of its own, is locked as long as its worker lives
 * and goes away with the object; what a killed worker left behind is swept. */
#ifndef WORKER_WK_TAPS_H
#define WORKER_WK_TAPS_H

#include <stdint.h>

#include "proto/tap_ring.h"

struct dflash;
struct model_cursor;
struct wk_taps;

struct wk_taps_options {
    uint64_t incarnation; /* random: names the file */
    uint32_t type;        /* enum tap_type */
    uint32_t hidden;
    uint32_t layer_count; /* 1..TAP_RING_TAPS_MAX */
    uint32_t layers[TAP_RING_TAPS_MAX];
    struct dflash *reducer; /* reads these layers; borrowed by the device thread; NULL = none */
    uint64_t bytes_max; /* of the file; room for WK_TAPS_SLOTS_MIN records is taken in any case */
};

#define WK_TAPS_SLOTS_MIN 64u
#define WK_TAPS_SLOTS_MAX 16384u

MUST_USE enum err wk_taps_create(const struct wk_taps_options *options, struct wk_taps **ret_taps,
                                 struct err_detail *detail);
void wk_taps_destroy(struct wk_taps **taps_p);

/* The cursor keeps these layers from its next begin on; NULL = none. */
void wk_taps_watch(const struct wk_taps *t, struct model_cursor *c);
/* Rows [first, first + count) of the batch that c finished are positions from `position` on. */
void wk_taps_write(struct wk_taps *t, const struct model_cursor *c, const struct msg_id *id,
                   uint64_t step, uint32_t first, uint32_t count, uint32_t position);
uint64_t wk_taps_end(const struct wk_taps *t); /* 0 for NULL */

/* "/dev/shm/tandem-taps.<incarnation>" */
void wk_taps_path(uint64_t incarnation, char ret_path[TAP_RING_PATH_BYTES]);
/* Removes the rings whose workers are gone, of any cluster on this machine; how many. */
uint32_t wk_taps_sweep(void);

#endif
