/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_group.h - a fabric as the model wants to see it.
 *
 * Pure glue.  The model is loaded before the group can form, so the fabric is looked up at every
 * call: *fabric_p is borrowed and must be there by the model's first forward pass. */
#ifndef WORKER_WK_GROUP_H
#define WORKER_WK_GROUP_H

#include "lib/model/model.h"

struct wk_fabric;

/* interleave 0: every rank keeps all cache rows. */
struct model_group wk_group(struct wk_fabric **fabric_p, uint32_t rank, uint32_t ranks,
                            enum shard_moe moe, uint32_t interleave);

#endif
