/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_canary.h - greedy ids of a fixed prompt, computed at load in caches of its own, one for
 * each way that the arena may store rows.
 *
 * Device thread.  What the router later asks of the running worker must give the same ids.  The
 * times taken on the way start the cost fit. */
#ifndef WORKER_WK_CANARY_H
#define WORKER_WK_CANARY_H

#include <stdint.h>

struct model;
struct model_cursor;
struct sampler;
struct wk_loaded;

struct wk_canary {
    struct model *model;
    struct model_cursor *prefill, *decode; /* idle */
    struct sampler *sampler;
    uint32_t rows_max;           /* of the prefill cursor */
    uint32_t shards, interleave; /* ranks that share the cache rows by position, else 1 and 0 */
};

/* Fills the canary fields of ret_loaded, whose info is set. */
void wk_canary_run(const struct wk_canary *c, struct wk_loaded *ret_loaded);
/* First 8 bytes of xxh3-128 over the ids as u32 LE, read little-endian. */
uint64_t wk_canary_hash(const uint32_t *ids, uint32_t count);

#endif
