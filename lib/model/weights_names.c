/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/weights_names.h"

#include <stdio.h>

#include "lib/base/check.h"
#include "lib/model/config.h"
#include "lib/model/shard.h"
#include "lib/model/weights.h"

struct walk {
    const struct model_config *config;
    const struct shard *shard;
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

/* Parts by head or column: `each` rows or columns belong to one unit of the range. */
static void matrix_rows(struct walk *k, const char *name, struct op_weight *place, uint64_t out,
                        uint64_t in, struct shard_range r, uint32_t each)
{
    struct weights_want t = {.shape = {out, in},
                             .dims = 2,
                             .matrix = place,
                             .cut = WEIGHTS_ROWS,
                             .first = r.first * each,
                             .count = r.count * each};
    want(k, &t, name);
}

static void matrix_columns(struct walk *k, const char *name, struct op_weight *place, uint64_t out,
                           uint64_t in, struct shard_range r, uint32_t each)
{
    struct weights_want t = {.shape = {out, in},
                             .dims = 2,
                             .matrix = place,
                             .cut = WEIGHTS_COLUMNS,
                             .first = r.first * each,
                             .count = r.count * each};
    want(k, &t, name);
}

static void vector_rows(struct walk *k, const char *name, float **place, uint64_t n,
                        struct shard_range r, uint32_t each)
{
    struct weights_want t = {.shape = {n},
                             .dims = 1,
                             .vector = place,
                             .cut = WEIGHTS_ROWS,
                             .first = r.first * each,
                             .count = r.count * each};
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
    struct shard_range heads = k->shard->kda_heads;
    uint32_t each = c->kda_dim;
    set_prefix(k, layer, "self_attn.");
    matrix_rows(k, "q_proj.weight", &w->q, inner, hidden, heads, each);
    matrix_rows(k, "k_proj.weight", &w->k, inner, hidden, heads, each);
    matrix_rows(k, "v_proj.weight", &w->v, inner, hidden, heads, each);
    for (int i = 0; i < 3; i++) {
        struct weights_want t = {.shape = {inner, 1, c->conv_taps},
                                 .dims = 3,
                                 .vector = &w->conv_part[i],
                                 .cut = WEIGHTS_ROWS,
                                 .first = heads.first * each,
                                 .count = heads.count * each};
        want(k, &t, conv[i]);
    }
    matrix(k, "f_a_proj.weight", &w->f_a, dim, hidden);
    matrix_rows(k, "f_b_proj.weight", &w->f_b, inner, dim, heads, each);
    matrix(k, "g_a_proj.weight", &w->g_a, dim, hidden);
    matrix_rows(k, "g_b_proj.weight", &w->g_b, inner, dim, heads, each);
    matrix_rows(k, "b_proj.weight", &w->b, c->kda_heads, hidden, heads, 1);
    struct weights_want a_log = {.shape = {c->kda_heads},
                                 .dims = 1,
                                 .squeeze = true,
                                 .vector = &w->a_log,
                                 .cut = WEIGHTS_ROWS,
                                 .first = heads.first,
                                 .count = heads.count};
    want(k, &a_log, "A_log");
    vector_rows(k, "dt_bias", &w->dt_bias, inner, heads, each);
    vector(k, "o_norm.weight", &w->o_norm, dim);
    matrix_columns(k, "o_proj.weight", &w->o, hidden, inner, heads, each);
}

static void walk_dsa(struct walk *k, struct weights_dsa *w, uint32_t layer)
{
    const struct model_config *c = k->config;
    uint64_t hidden = c->hidden, heads = c->heads;
    struct shard_range own = k->shard->heads;
    set_prefix(k, layer, "self_attn.");
    matrix(k, "q_a_proj.weight", &w->q_a, c->q_rank, hidden);
    vector(k, "q_a_layernorm.weight", &w->q_a_norm, c->q_rank);
    matrix_rows(k, "q_b_proj.weight", &w->q_b, heads * c->nope_dim, c->q_rank, own, c->nope_dim);
    matrix(k, "kv_a_proj_with_mqa.weight", &w->kv_a, c->kv_rank, hidden);
    vector(k, "kv_a_layernorm.weight", &w->kv_a_norm, c->kv_rank);
    struct weights_want kv_b = {.shape = {heads * (c->nope_dim + c->v_dim), c->kv_rank},
                                .dims = 2,
                                .dense_quantised = true, /* read by rows, and by columns too */
                                .matrix = &w->kv_b,
                                .cut = WEIGHTS_ROWS,
                                .first = own.first * (c->nope_dim + c->v_dim),
                                .count = own.count * (c->nope_dim + c->v_dim)};
    want(k, &kv_b, "kv_b_proj.weight");
    matrix_columns(k, "o_proj.weight", &w->o, hidden, heads * c->v_dim, own, c->v_dim);
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
                     struct op_weight *down, uint64_t width, struct shard_range own)
{
    uint64_t hidden = k->config->hidden;
    matrix_rows(k, "gate_proj.weight", gate, width, hidden, own, 1);
    matrix_rows(k, "up_proj.weight", up, width, hidden, own, 1);
    matrix_columns(k, "down_proj.weight", down, hidden, width, own, 1);
}

/* An expert of another rank is walked too: its tensors are expected in the checkpoint. */
static void walk_expert(struct walk *k, struct weights_layer *l, uint32_t expert)
{
    struct shard_range own = k->shard->experts;
    static struct op_weight nowhere[3];
    bool ours = expert - own.first < own.count;
    uint32_t at = expert - own.first;
    walk_mlp(k, ours ? &l->gate[at] : &nowhere[0], ours ? &l->up[at] : &nowhere[1],
             ours ? &l->down[at] : &nowhere[2], k->config->expert_width,
             ours ? k->shard->expert : (struct shard_range){0, 0});
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
        walk_expert(k, l, e);
    }
    set_prefix(k, layer, "mlp.shared_experts.");
    walk_mlp(k, &l->shared.gate, &l->shared.up, &l->shared.down, c->expert_width, k->shard->shared);
}

/* The layer behind the last one, without mixing of streams; its own embedding and head, where a
 * checkpoint has them, are those of the trunk. */
static void walk_mtp(struct walk *k, struct weights *w)
{
    const struct model_config *c = k->config;
    struct weights_layer *l = &w->layers[c->layers];
    set_prefix(k, c->layers, "");
    vector(k, "enorm.weight", &w->mtp.embed_norm, c->hidden);
    vector(k, "hnorm.weight", &w->mtp.hidden_norm, c->hidden);
    vector(k, "shared_head.norm.weight", &w->mtp.norm, c->hidden);
    matrix(k, "eh_proj.weight", &w->mtp.project, c->hidden, 2 * (uint64_t)c->hidden);
    vector(k, "input_layernorm.weight", &l->site[0].norm, c->hidden);
    vector(k, "post_attention_layernorm.weight", &l->site[1].norm, c->hidden);
    walk_dsa(k, &l->dsa, c->layers);
    walk_experts(k, l, c->layers);
}

void weights_each(struct weights *w, const struct model_config *config, weights_want_fn fn,
                  void *arg)
{
    struct walk k = {.config = config, .shard = &w->shard, .fn = fn, .arg = arg};
    CHECK(w->layer_count == config->layers);
    matrix_rows(&k, "lm_head.weight", &w->head, config->vocab_size, config->hidden, w->shard.vocab,
                1);
    snprintf(k.prefix, sizeof(k.prefix), WEIGHTS_PREFIX);
    struct weights_want embed = {.shape = {config->vocab_size, config->hidden},
                                 .dims = 2,
                                 .dense_exl3 = true,
                                 .matrix = &w->embed};
    want(&k, &embed, "embed_tokens.weight");
    vector(&k, "norm.weight", &w->norm, config->hidden);
    for (uint32_t i = 0; i < config->layers && !w->only_mtp; i++) {
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
            walk_mlp(&k, &l->dense.gate, &l->dense.up, &l->dense.down, config->dense_width,
                     w->shard.dense);
        }
    }
    if (w->has_mtp)
        walk_mtp(&k, w);
}
