/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_params.h"

#include <stdio.h>
#include <string.h>

#include "worker/wk_core.h"
#include "worker/wk_exec.h"
#include "worker/wk_ranks.h"

/* Only tables' sizes hang on these: see wk_core_entries. */
static struct wk_core_options sizes_of(const struct wk_params *p)
{
    return (struct wk_core_options){.seqs_max = p->seqs_max,
                                    .slice_rows_max = p->slice_rows_max,
                                    .decode_rows_max = p->decode_rows_max};
}

bool wk_params_mtp(const struct wk_params *p)
{
    return p->mtp || strncmp(p->spec, "mtp:", 4) == 0;
}

bool wk_params_tcp(const struct wk_params *p)
{
    bool nccl = strcmp(p->fabric, "nccl") == 0;
    return strcmp(p->fabric, "tcp") == 0 || (nccl && p->fabric_nodes[0] != '\0');
}

struct wk_exec_options wk_params_exec(const struct wk_params *p)
{
    struct wk_core_options sizes = sizes_of(p);
    return (struct wk_exec_options){
        .directory = p->model,
        .numerics = strcmp(p->numerics, "exact") == 0 ? MODEL_EXACT : MODEL_FAST,
        .threads = p->threads,
        .entries = wk_core_entries(&sizes),
        .plan_seqs = wk_core_plan_seqs(&sizes),
        .slice_rows_max = p->slice_rows_max,
        .decode_rows_max = p->decode_rows_max,
        .context_max = p->context_max,
        .group = p->group,
        .mtp = wk_params_mtp(p),
        .mtp_tokens = p->mtp_tokens,
        .tap_fc = p->tap_fc,
        .mtp_recycle = strcmp(p->mtp_recycle, "pre_norm") == 0 ? MTP_PRE_NORM : MTP_POST_NORM,
    };
}

uint32_t wk_params_interleave(const struct wk_params *p)
{
    return p->dcp > 1 ? p->interleave : 0;
}

uint32_t wk_params_kvmgr(const struct wk_params *p)
{
    return p->group + p->rank * p->groups;
}

enum err wk_params_ranks(const struct wk_params *p, struct wk_rows *rows,
                         struct wk_ranks **ret_ranks, struct err_detail *detail)
{
    char path[PARAM_STR_BYTES + 32];
    struct wk_ranks_options o = {.rank = p->rank,
                                 .ranks = p->ranks,
                                 .path = path,
                                 .nodes = wk_params_tcp(p) ? p->fabric_nodes : "",
                                 .keys = p->fabric_keys,
                                 .rows = rows,
                                 .deadline_ms = p->fabric_deadline_ms,
                                 .silence_ms = p->fabric_silence_ms,
                                 .interleave = wk_params_interleave(p),
                                 .floors = {.latency_us_max = p->fabric_latency_us_max,
                                            .bandwidth_mb_min = p->fabric_bandwidth_mb_min},
                                 .nccl = strcmp(p->fabric, "nccl") == 0,
                                 .nccl_settings = {.buffer_bytes = p->nccl_buffer_bytes,
                                                   .ctas_max = p->nccl_ctas_max,
                                                   .hca = p->nccl_hca,
                                                   .interface = p->nccl_interface},
                                 .nccl_library = p->nccl_library,
                                 .cuda_library = p->cuda_library,
                                 .cuda_device = p->cuda_device};
    if (!shard_moe_parse(p->moe_split, &o.moe))
        return err_set(detail, ERR_INVALID, "moe_split: %s: auto, tp or ep", p->moe_split);
    int at = snprintf(path, sizeof path, "%s/fabric", p->run_dir);
    if (p->group > 0)
        snprintf(path + at, sizeof path - (size_t)at, "-%u", p->group);
    return wk_ranks_create(&o, ret_ranks, detail);
}
