/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_state.h - a live state kept as a snapshot, and a snapshot made live again.
 *
 * Device thread's memory; pure.  A bf16 snapshot has each float of the state rounded to nearest,
 * ties to even; NaN stay NaN.  Widening is exact, so what was kept once is kept the same again. */
#ifndef WORKER_WK_STATE_H
#define WORKER_WK_STATE_H

#include <stdint.h>

struct model_kv;

/* state_bytes: of a live body, a multiple of 64.  Slots are CHECKed: live ones are below
 * kv->slot_count, snapshots behind them. */
void wk_state_keep(const struct model_kv *kv, uint32_t snapshot, uint32_t live,
                   uint64_t state_bytes);
void wk_state_restore(const struct model_kv *kv, uint32_t live, uint32_t snapshot,
                      uint64_t state_bytes);

#endif
