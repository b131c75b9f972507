/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/cpu_pool.h - threads that share the items of an op launch; the cpu device's "stream".
 *
 * One caller at a time (the device thread).  cpu_pool_run returns when all items are done; the
 * caller works too, so a late worker never holds it up.  Which thread runs an item has no
 * influence on the result: ops compute items independently. */
#ifndef LIB_MODEL_CPU_POOL_H
#define LIB_MODEL_CPU_POOL_H

#include <stdint.h>

#include "kernels/op_types.h"

#define CPU_POOL_THREADS_MAX 256

struct cpu_pool;

/* threads counts the caller; 1 needs no pool and is a CHECK. */
struct cpu_pool *cpu_pool_create(uint32_t threads);
void cpu_pool_destroy(struct cpu_pool **pool_p);
void cpu_pool_run(void *pool, uint32_t items, op_range_fn fn, const void *arg);

#endif
