/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_group.h"

#include "worker/wk_fabric.h"

static enum err group_reduce(void *arg, float *values, size_t count)
{
    return wk_all_reduce(arg, values, count);
}

static enum err group_gather(void *arg, const void *own, size_t bytes, void *ret_all)
{
    return wk_all_gather(arg, own, bytes, ret_all);
}

struct model_group wk_group(struct wk_fabric *f, enum shard_moe moe)
{
    return (struct model_group){.rank = wk_fabric_rank(f),
                                .ranks = wk_fabric_ranks(f),
                                .moe = moe,
                                .all_reduce = group_reduce,
                                .all_gather = group_gather,
                                .arg = f};
}
