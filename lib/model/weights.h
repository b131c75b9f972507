/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/weights.h - the tensors of a checkpoint bound to their places in the model.
 *
 * Start-up only.  Every tensor that the config asks for is checked by name, shape and dtype; a
 * missing one, an extra one or a wrong one is refused by name.  Tensors of the vision tower and of
 * the MTP layers may be present and are left alone, unless the first of those is asked for.
 * Vectors are f32.  Matrices keep their format, whichever it is, in the mapped file; those that no
 * linear op reads become dense f32, and so do plain ones that lie unaligned or that the caller
 * wants widened.  Binding looks at headers only: values are checked by weights_check_values. */
#ifndef LIB_MODEL_WEIGHTS_H
#define LIB_MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_format.h"
#include "kernels/op_types.h"
#include "lib/base/err.h"
#include "lib/model/config.h"
#include "lib/model/format.h"
#include "lib/model/shard.h"

struct safetensors;

struct weights_mlp {
    struct op_weight gate, up, down;
};

struct weights_site { /* mHC parameters and norm before one sublayer */
    struct op_weight fn;
    float *base, *scale, *norm;
};

struct weights_kda {
    struct op_weight q, k, v, f_a, f_b, g_a, g_b, b, o;
    float *conv;         /* [3 * inner, taps]: q, k, v */
    float *conv_part[3]; /* into conv */
    float *a_log, *dt_bias, *o_norm;
};

struct weights_dsa {
    struct op_weight q_a, q_b, kv_a, kv_b, o;
    float *q_a_norm, *kv_a_norm;
    struct op_weight index_q, index_k, index_w, index_gate;
    float *index_norm, *index_norm_bias, *index_ape;
};

struct weights_layer {
    struct weights_site site[2]; /* before the mixer, before the MLP */
    struct weights_kda kda;
    struct weights_dsa dsa;
    struct weights_mlp dense;  /* dense layers */
    struct weights_mlp shared; /* MoE layers, and what follows */
    struct op_weight router;
    float *router_bias;
    struct op_weight *gate, *up, *down; /* [experts of this rank] */
};

/* What the MTP layer has beside a DSA and MoE layer without mixing of streams. */
struct weights_mtp {
    struct op_weight project; /* [hidden, 2 * hidden]: embedding, then hidden state */
    float *embed_norm, *hidden_norm, *norm;
};

/* A matrix as the checkpoint holds it. */
struct weights_linear {
    const struct safetensors_tensor *tensor; /* its codes */
    struct op_weight *place;
    bool dense;  /* becomes f32 */
    bool copied; /* a plain piece by columns: its rows are brought together */
    struct format_info info;
    struct op_quantised stored;
    struct op_quantised piece; /* what this rank holds of it: all, unless it is one of several */
};

struct weights {
    struct shard shard;
    struct op_weight embed, head;
    float *norm;
    uint32_t layer_count;
    struct weights_layer *layers; /* [layer_count + 1]: the last is the MTP layer's */
    bool has_mtp, only_mtp;       /* only: the MTP layer, and what it shares with the trunk */
    struct weights_mtp mtp;
    float *pool; /* all widened values */
    uint64_t pool_floats;
    struct weights_linear *linears; /* in the order of their names' walk */
    uint32_t linear_count;
};

/* The skeleton without values, for binding and for counting: of the whole model, or of one rank's
 * share of it.  The config is the whole model's. */
struct weights *weights_create(const struct model_config *config);
struct weights *weights_create_shard(const struct model_config *config, const struct shard *shard);
void weights_destroy(struct weights **w_p);
/* Before the bind: the MTP layer is bound too, which is else left alone. */
void weights_want_mtp(struct weights *w, const struct model_config *config);
/* The same, and of the trunk nothing but embedding, last norm and head.  Extra tensors are for the
 * bind of the trunk to find. */
void weights_want_mtp_only(struct weights *w, const struct model_config *config);

struct weights_bind_options {
    bool widen;                     /* plain matrices become f32 too */
    const struct format_hint *hint; /* what the config announces; may be NULL */
    const struct op_ctx *ctx;       /* decoding of dense matrices is spread over it */
};
MUST_USE enum err weights_bind(struct weights *w, const struct model_config *config,
                               const struct safetensors *set,
                               const struct weights_bind_options *options,
                               struct err_detail *detail);

/* Refuses values that no sound writer produces, by the tensor's name.  Any thread. */
MUST_USE enum err weights_check_values(const struct weights *w, uint32_t linear,
                                       struct err_detail *detail);

/* After weights_check_values has passed every linear: kernels need not look for NaN codes. */
void weights_trust_values(struct weights *w);

/* Parameters of the text model without MTP, from the config alone. */
uint64_t weights_parameters(const struct model_config *config);

#endif
