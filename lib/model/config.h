/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/config.h - every value of config.json that the text model uses.
 *
 * Pure: text in, struct out.  Values outside the supported set are refused by their key's name;
 * nothing is guessed from a rule of thumb.  At most MODEL_LAYERS_MAX layers. */
#ifndef LIB_MODEL_CONFIG_H
#define LIB_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define MODEL_LAYERS_MAX  256
#define MODEL_EOS_IDS_MAX 15

struct model_config {
    uint32_t vocab_size;
    uint32_t hidden;
    uint32_t layers;
    uint32_t mtp_layers;   /* num_nextn_predict_layers; the first can be run */
    uint32_t context_max;  /* max_position_embeddings */
    uint32_t dense_width;  /* intermediate_size */
    uint32_t expert_width; /* moe_intermediate_size */
    uint32_t experts;
    uint32_t experts_per_token;
    double routed_scale;
    double swiglu_limit;
    double rms_eps;

    bool layer_dsa[MODEL_LAYERS_MAX]; /* layer_types: DSA, else KDA */
    bool layer_moe[MODEL_LAYERS_MAX]; /* mlp_layer_types: sparse, else dense */

    uint32_t heads; /* of the MLA part */
    uint32_t q_rank, kv_rank;
    uint32_t nope_dim, v_dim;

    uint32_t index_heads, index_dim;
    uint32_t index_topk, index_kpool;

    uint32_t kda_heads, kda_dim; /* ranks of f_a and g_a = kda_dim */
    uint32_t conv_taps;
    double gate_lower_bound;

    uint32_t sinkhorn_iters;
    double hc_eps;

    uint32_t eos_count;
    uint32_t eos_ids[MODEL_EOS_IDS_MAX];
};

/* Parses the text of a config.json.  detail names the key. */
MUST_USE enum err model_config_parse(const char *text, size_t bytes,
                                     struct model_config *ret_config, struct err_detail *detail);

#endif
