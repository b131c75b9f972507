/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_ids.h - token ids of all live sequences in pages of one pool.
 *
 * Loop thread.  Pure.  The pool holds tokens_max ids in all and is taken at create; a sequence
 * that does not fit is refused, never grown into fresh memory. */
#ifndef WORKER_WK_IDS_H
#define WORKER_WK_IDS_H

#include <stdbool.h>
#include <stdint.h>

struct wk_ids;

/* seqs entries, each of up to context_max ids. */
struct wk_ids *wk_ids_create(uint64_t tokens_max, uint32_t seqs, uint32_t context_max);
void wk_ids_destroy(struct wk_ids **ids_p);

/* All or nothing; false when the pool or the entry's context is full. */
bool wk_ids_append(struct wk_ids *s, uint32_t entry, const uint32_t *ids, uint32_t count);
uint32_t wk_ids_count(const struct wk_ids *s, uint32_t entry);
uint32_t wk_ids_at(const struct wk_ids *s, uint32_t entry, uint32_t index);
void wk_ids_copy(const struct wk_ids *s, uint32_t entry, uint32_t first, uint32_t count,
                 uint32_t *ret_ids);
void wk_ids_drop(struct wk_ids *s, uint32_t entry);
uint64_t wk_ids_free(const struct wk_ids *s);

#endif
