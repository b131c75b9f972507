/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/ring.h - bounded single-producer single-consumer ring of fixed-size items.
 *
 * One thread pushes, one thread pops; no locks.  Capacity is rounded up to a power of two.
 * Full is an answer (false), never growth. */
#ifndef LIB_BASE_RING_H
#define LIB_BASE_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ring;

struct ring *ring_create(uint32_t item_count_max, size_t item_bytes);
void ring_destroy(struct ring **ring_p);
bool ring_push(struct ring *r, const void *item); /* producer; false = full */
bool ring_pop(struct ring *r, void *ret_item);    /* consumer; false = empty */
uint32_t ring_count(const struct ring *r);        /* a moment's value */

#endif
