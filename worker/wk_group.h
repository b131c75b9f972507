/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_group.h - a fabric as the model wants to see it.
 *
 * Pure glue; the fabric is borrowed and must outlive the model. */
#ifndef WORKER_WK_GROUP_H
#define WORKER_WK_GROUP_H

#include "lib/model/model.h"

struct wk_fabric;

struct model_group wk_group(struct wk_fabric *f, enum shard_moe moe);

#endif
