/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/weights_names.h"

#include <stdio.h>

#include "lib/base/check.h"
#include "lib/model/config.h"
#include "lib/model/weights.h"

struct walk {
    const struct model_config *config;
    weights_want_fn fn;
    void *arg;
    char prefix[128]; /* of the group being named */
};

static void want(struct walk *k, struct weights_want *t, const char *name)
{
    int n = snprintf(t->name, sizeof(t->name), "%s%s", k->prefix, name);
    CHECK(n > 0 && (size_t)n < sizeof(t->name));
    k->fn(k->arg, t);
}

static void matrix(struct walk *k, const char *name, struct op_weight *place, uint64_t out,
                   uint64_t in)
{
    struct weights_want t = {.shape = {out, in}, .dims = 2, .matrix = place};
    want(k, &t, name);
}

static void vector(struct walk *k, const char *name, float **place, uint64_t n)
{
    struct weights_want t = {.shape = {n}, .dims = 1, .vector = place};
    want(k, &t, name);
}

static void set_prefix(struct walk *k, uint32_t layer, const char *group)
{
    snprintf(k->prefix, sizeof(k->prefix), WEIGHTS_PREFIX "layers.%u.%s", layer, group);
}

static void walk_sites(struct walk *k, struct weights_layer *l, uint32_t layer)
{
    uint64_t hidden = k->config->hidden;
    set_prefix(k, layer, "");
    for (int i = 0; i < 2; i++) { /* small, and every token reads all of it twice a layer */
        struct weights_want fn = {.shape = {OP_MHC_ROWS, OP_STREAMS * hidden},
                                  .dims = 2,
                                  .dense = true,
                                  .matrix = &l->site[i].fn};
        want(k, &fn, i == 0 ? "hc_attn_fn" : "hc_ffn_fn");
    }
    vector(k, "hc_attn_base", &l->site[0].base, OP_MHC_ROWS);
    vector(k, "hc_attn_scale", &l->site[0].scale, 3);
    vector(k, "input_layernorm.weight", &l->site[0].norm, hidden);
    vector(k, "hc_ffn_base", &l->site[1].base, OP_MHC_ROWS);
    vector(k, "hc_ffn_scale", &l->site[1].scale, 3);
    vector(k, "post_attention_layernorm.weight", &l->site[1].norm, hidden);
}

static void walk_kda(struct walk *k, struct weights_kda *w, uint32_t layer)
{
    static const char *const conv[] = {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"};
    const struct model_config *c = k->config;
    uint64_t hidden = c->hidden, dim = c->kda_dim, inner = (uint64_t)c->kda_heads * dim;
    set_prefix(k, layer, "self_attn.");
    matrix(k, "q_proj.weight", &w->q, inner, hidden);
    matrix(k, "k_proj.weight", &w->k, inner, hidden);
    matrix(k, "v_proj.weight", &w->v, inner, hidden);
    for (int i = 0; i < 3; i++) {
        struct weights_want t = {
            .shape = {inner, 1, c->conv_taps}, .dims = 3, .vector = &w->conv_part[i]};
        want(k, &t, conv[i]);
    }
    matrix(k, "f_a_proj.weight", &w->f_a, dim, hidden);
    matrix(k, "f_b_proj.weight", &w->f_b, inner, dim);
    matrix(k, "g_a_proj.weight", &w->g_a, dim, hidden);
    matrix(k, "g_b_proj.weight", &w->g_b, inner, dim);
    matrix(k, "b_proj.weight", &w->b, c->kda_heads, hidden);
    struct weights_want a_log = {
        .shape = {c->kda_heads}, .dims = 1, .squeeze = true, .vector = &w->a_log};
    want(k, &a_log, "A_log");
    vector(k, "dt_bias", &w->dt_bias, inner);
    vector(k, "o_norm.weight", &w->o_norm, dim);
    matrix(k, "o_proj.weight", &w->o, hidden, inner);
}

static void walk_dsa(struct walk *k, struct weights_dsa *w, uint32_t layer)
{
    const struct model_config *c = k->config;
    uint64_t hidden = c->hidden, heads = c->heads;
    set_prefix(k, layer, "self_attn.");
    matrix(k, "q_a_proj.weight", &w->q_a, c->q_rank, hidden);
    vector(k, "q_a_layernorm.weight", &w->q_a_norm, c->q_rank);
    matrix(k, "q_b_proj.weight", &w->q_b, heads * c->nope_dim, c->q_rank);
    matrix(k, "kv_a_proj_with_mqa.weight", &w->kv_a, c->kv_rank, hidden);
    vector(k, "kv_a_layernorm.weight", &w->kv_a_norm, c->kv_rank);
    struct weights_want kv_b = {.shape = {heads * (c->nope_dim + c->v_dim), c->kv_rank},
                                .dims = 2,
                                .dense_quantised = true, /* read by rows, and by columns too */
                                .matrix = &w->kv_b};
    want(k, &kv_b, "kv_b_proj.weight");
    matrix(k, "o_proj.weight", &w->o, hidden, heads * c->v_dim);
    set_prefix(k, layer, "self_attn.indexer.");
    matrix(k, "wq_b.weight", &w->index_q, (uint64_t)c->index_heads * c->index_dim, c->q_rank);
    matrix(k, "wk.weight", &w->index_k, c->index_dim, hidden);
    matrix(k, "weights_proj.weight", &w->index_w, c->index_heads, hidden);
    vector(k, "k_norm.weight", &w->index_norm, c->index_dim);
    vector(k, "k_norm.bias", &w->index_norm_bias, c->index_dim);
    matrix(k, "index_kpool_compress_gate", &w->index_gate, c->index_dim, hidden);
    struct weights_want ape = {
        .shape = {c->index_kpool, c->index_dim}, .dims = 2, .vector = &w->index_ape};
    want(k, &ape, "index_kpool_compress_ape");
}

static void walk_mlp(struct walk *k, struct op_weight *gate, struct op_weight *up,
                     struct op_weight *down, uint64_t width)
{
    matrix(k, "gate_proj.weight", gate, width, k->config->hidden);
    matrix(k, "up_proj.weight", up, width, k->config->hidden);
    matrix(k, "down_proj.weight", down, k->config->hidden, width);
}

static void walk_experts(struct walk *k, struct weights_layer *l, uint32_t layer)
{
    const struct model_config *c = k->config;
    set_prefix(k, layer, "mlp.");
    matrix(k, "gate.weight", &l->router, c->experts, c->hidden);
    vector(k, "gate.e_score_correction_bias", &l->router_bias, c->experts);
    for (uint32_t e = 0; e < c->experts; e++) {
        char group[40];
        snprintf(group, sizeof(group), "mlp.experts.%u.", e);
        set_prefix(k, layer, group);
        walk_mlp(k, &l->gate[e], &l->up[e], &l->down[e], c->expert_width);
    }
    set_prefix(k, layer, "mlp.shared_experts.");
    walk_mlp(k, &l->shared.gate, &l->shared.up, &l->shared.down, c->expert_width);
}

void weights_each(struct weights *w, const struct model_config *config, weights_want_fn fn,
                  void *arg)
{
    struct walk k = {.config = config, .fn = fn, .arg = arg};
    CHECK(w->layer_count == config->layers);
    matrix(&k, "lm_head.weight", &w->head, config->vocab_size, config->hidden);
    snprintf(k.prefix, sizeof(k.prefix), WEIGHTS_PREFIX);
    struct weights_want embed = {.shape = {config->vocab_size, config->hidden},
                                 .dims = 2,
                                 .dense_exl3 = true,
                                 .matrix = &w->embed};
    want(&k, &embed, "embed_tokens.weight");
    vector(&k, "norm.weight", &w->norm, config->hidden);
    for (uint32_t i = 0; i < config->layers; i++) {
        struct weights_layer *l = &w->layers[i];
        walk_sites(&k, l, i);
        if (config->layer_dsa[i])
            walk_dsa(&k, &l->dsa, i);
        else
            walk_kda(&k, &l->kda, i);
        if (config->layer_moe[i]) {
            walk_experts(&k, l, i);
        } else {
            set_prefix(&k, i, "mlp.");
            walk_mlp(&k, &l->dense.gate, &l->dense.up, &l->dense.down, config->dense_width);
        }
    }
}
