/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/shard.h - which part of every tensor a rank holds, and which cache rows are its own.
 *
 * Pure.  Heads are split evenly, earlier ranks taking one more where they do not come out even.
 * FFN columns are split in blocks of 128, the unit that every storage format can be cut at; a
 * share may then be empty.  Cache rows go round the ranks by position, `interleave` at a time. */
#ifndef LIB_MODEL_SHARD_H
#define LIB_MODEL_SHARD_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"

#define SHARD_RANKS_MAX 8u
#define SHARD_BLOCK     128u /* FFN columns are cut at multiples of it */

struct model_config;

enum shard_moe { SHARD_MOE_AUTO, SHARD_MOE_TP, SHARD_MOE_EP };
bool shard_moe_parse(const char *text, enum shard_moe *ret_moe); /* auto tp ep */

struct shard_range {
    uint32_t first, count;
};

struct shard {
    uint32_t rank, ranks;
    bool experts_whole; /* ep: each routed expert is on one rank, whole */
    struct shard_range kda_heads, heads;
    struct shard_range dense;   /* columns of the dense layers' MLP */
    struct shard_range shared;  /* columns of the shared expert */
    struct shard_range expert;  /* columns of a routed expert; all with ep */
    struct shard_range experts; /* routed experts; all with tp */
    struct shard_range vocab;   /* rows of lm_head */
};

/* The part of `rank` of `ranks` over `size`, in units of `unit`. */
struct shard_range shard_split(uint32_t size, uint32_t unit, uint32_t ranks, uint32_t rank);

/* ERR_UNSUPPORTED says which width or count does not fit: fewer heads or experts than ranks, or
 * moe_split tp where a rank's columns are no multiple of 128. */
MUST_USE enum err shard_plan(const struct model_config *config, uint32_t rank, uint32_t ranks,
                             enum shard_moe moe, struct shard *ret_shard,
                             struct err_detail *detail);

/* The same model as one rank's ops see it: its own heads and widths. */
struct model_config shard_config(const struct model_config *config, const struct shard *shard);

#endif
