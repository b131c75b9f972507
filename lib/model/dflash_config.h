/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/dflash_config.h - a DFlash drafter's config.json in one internal form.
 *
 * Pure: text in, struct out.  Reads the flat spelling, the nested rope and dflash_config, and the
 * speculators spelling, whose layer ids count from one.  Relatives that share names with DFlash
 * (DSpark, Domino, Laguna, Muse) are refused by the key that gives them away: one of their own, or
 * the name in `architectures`. */
#ifndef LIB_MODEL_DFLASH_CONFIG_H
#define LIB_MODEL_DFLASH_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define DFLASH_LAYERS_MAX 64u
#define DFLASH_TAPS_MAX   16u
#define DFLASH_BLOCK_MAX  16u
#define DFLASH_TOP_K_MAX  64u
#define DFLASH_CONV_MAX   8u

struct dflash_config {
    bool v2; /* convolutions and the candidate selector */
    uint32_t hidden, ffn, layers, heads, kv_heads, head_dim;
    uint32_t vocab_size;
    uint32_t draft_vocab; /* rows of the own head where it is reduced, else 0 */
    double rms_eps, rope_theta;
    double output_multiplier, softcap, embed_scale; /* softcap 0 = none */
    uint32_t window;                                /* of sliding layers */
    bool layer_sliding[DFLASH_LAYERS_MAX], layer_causal[DFLASH_LAYERS_MAX];
    uint32_t block_size; /* rows: the anchor and the masks */
    uint32_t mask_id;
    uint32_t target_layers;         /* 0 = the file does not say */
    uint32_t tap_count;             /* 0 = no list: dflash_default_taps, once fc tells how many */
    uint32_t taps[DFLASH_TAPS_MAX]; /* after this layer, counted from 0, in the order of fc */
    uint32_t conv_taps, conv_group, selector_rank, selector_top_k; /* v2 */
};

/* detail names the key. */
MUST_USE enum err dflash_config_parse(const char *text, size_t bytes,
                                      struct dflash_config *ret_config, struct err_detail *detail);

/* The published rule for a missing list; count 1..DFLASH_TAPS_MAX. */
MUST_USE enum err dflash_default_taps(uint32_t target_layers, uint32_t count, uint32_t *ret_taps,
                                      struct err_detail *detail);

/* Every tap below the target's depth. */
MUST_USE enum err dflash_check_taps(const struct dflash_config *config, uint32_t target_layers,
                                    struct err_detail *detail);

#endif
