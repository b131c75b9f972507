/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_group.h"

#include "worker/wk_fabric.h"

static enum err group_reduce(void *arg, float *values, size_t count)
{
    struct wk_fabric **fabric_p = arg;
    return wk_all_reduce(*fabric_p, values, count);
}

static enum err group_gather(void *arg, const void *own, size_t bytes, void *ret_all)
{
    struct wk_fabric **fabric_p = arg;
    return wk_all_gather(*fabric_p, own, bytes, ret_all);
}

static enum err group_to_all(void *arg, const void *own, size_t bytes, void *ret_all)
{
    struct wk_fabric **fabric_p = arg;
    return wk_all_to_all(*fabric_p, own, bytes, ret_all);
}

struct model_group wk_group(struct wk_fabric **fabric_p, uint32_t rank, uint32_t ranks,
                            enum shard_moe moe, uint32_t interleave)
{
    return (struct model_group){.rank = rank,
                                .ranks = ranks,
                                .moe = moe,
                                .interleave = interleave,
                                .all_reduce = group_reduce,
                                .all_gather = group_gather,
                                .all_to_all = group_to_all,
                                .arg = fabric_p};
}
