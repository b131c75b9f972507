/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_group.h"

#include "worker/wk_fabric.h"
#include "worker/wk_nccl_host.h"

static enum err group_reduce(void *arg, float *values, size_t count)
{
    struct wk_paths *p = arg;
    return p->nccl != NULL ? wk_nccl_host_reduce(p->nccl, values, count)
                           : wk_all_reduce(p->fabric, values, count);
}

static enum err group_gather(void *arg, const void *own, size_t bytes, void *ret_all)
{
    struct wk_paths *p = arg;
    return p->nccl != NULL ? wk_nccl_host_gather(p->nccl, own, bytes, ret_all)
                           : wk_all_gather(p->fabric, own, bytes, ret_all);
}

static enum err group_to_all(void *arg, const void *own, size_t bytes, void *ret_all)
{
    struct wk_paths *p = arg;
    return p->nccl != NULL ? wk_nccl_host_to_all(p->nccl, own, bytes, ret_all)
                           : wk_all_to_all(p->fabric, own, bytes, ret_all);
}

struct model_group wk_group(struct wk_paths *paths, uint32_t rank, uint32_t ranks,
                            enum shard_moe moe, uint32_t interleave)
{
    return (struct model_group){.rank = rank,
                                .ranks = ranks,
                                .moe = moe,
                                .interleave = interleave,
                                .all_reduce = group_reduce,
                                .all_gather = group_gather,
                                .all_to_all = group_to_all,
                                .arg = paths};
}
