/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/synth.h"

#include <math.h>
#include <string.h>

#include "lib/base/str.h"
#include "lib/model/format_scan.h"
#include "lib/model/weights.h"
#include "lib/model/weights_names.h"

#define SIZE_TOLERANCE 0.05
#define EXPERTS_MIN    4.0
#define EXPERTS_MAX    512.0
#define EXPERTS_USUAL  64.0

/* Sizes in the proportions of the published model; small ones have small heads. */
static void fill_config(struct model_config *c, uint32_t hidden, uint32_t layers)
{
    bool small = hidden < 512;
    memset(c, 0, sizeof(*c));
    c->vocab_size = small ? 1024 : 16384;
    c->hidden = hidden;
    c->layers = layers;
    c->context_max = 1u << 20;
    c->dense_width = hidden * 3;
    c->expert_width = hidden / 2 < 128 ? 128 : hidden / 2 / 128 * 128;
    c->experts = 1;
    c->experts_per_token = 1;
    c->routed_scale = 2.5;
    c->swiglu_limit = 10;
    c->rms_eps = 1e-5;
    for (uint32_t i = 0; i < layers; i++) {
        c->layer_dsa[i] = i % 4 == 3;
        c->layer_moe[i] = i > 0;
    }
    c->kda_dim = small ? 32 : 128;
    c->kda_heads = hidden * 2 / c->kda_dim;
    c->heads = small ? 4 : hidden / 64;
    c->nope_dim = small ? 64 : 256;
    c->v_dim = c->nope_dim;
    c->q_rank = hidden * 3 / 8 / 128 * 128 < 128 ? 128 : hidden * 3 / 8 / 128 * 128;
    c->kv_rank = small ? 128 : 512;
    c->index_heads = small ? 4 : 32;
    c->index_dim = small ? 32 : 128;
    c->index_topk = small ? 64 : 2048;
    c->index_kpool = 4;
    c->conv_taps = 4;
    c->gate_lower_bound = -5;
    c->sinkhorn_iters = 20;
    c->hc_eps = 1e-6;
    c->eos_count = 1;
    c->eos_ids[0] = c->vocab_size - 1;
}

struct counts {
    double experts, others, embed, vectors;
};

static void count_one(void *arg, const struct weights_want *want)
{
    struct counts *n = arg;
    double elements = 1;
    for (uint32_t d = 0; d < want->dims; d++)
        elements *= (double)want->shape[d];
    if (format_is_expert(want->name))
        n->experts += elements;
    else if (strstr(want->name, "embed_tokens") != NULL)
        n->embed += elements;
    else if (want->matrix != NULL)
        n->others += elements;
    else
        n->vectors += elements;
}

static struct counts count(const struct model_config *c)
{
    struct counts n = {0, 0, 0, 0};
    struct weights *w = weights_create(c);
    weights_each(w, c, count_one, &n);
    weights_destroy(&w);
    return n;
}

/* How far from a usual model; negative: not to be used. */
static double judge(uint64_t parameters, uint32_t hidden, uint32_t layers, struct synth_shape *s)
{
    fill_config(&s->config, hidden, layers);
    struct counts n = count(&s->config); /* of one expert a layer */
    double want = (double)parameters;
    double experts = round((want - n.others - n.embed - n.vectors) / n.experts);
    double top_k = round(n.others / n.experts);
    top_k = top_k < 1 ? 1 : top_k > 16 ? 16 : top_k;
    if (experts < EXPERTS_MIN || experts < top_k * 2 || experts > EXPERTS_MAX)
        return -1;
    s->config.experts = (uint32_t)experts;
    s->config.experts_per_token = (uint32_t)top_k;
    n = count(&s->config);
    double all = n.experts + n.others + n.embed + n.vectors;
    s->parameters = (uint64_t)all;
    s->active_experts = n.experts / experts * top_k;
    s->others = n.others;
    double ratio = s->active_experts / s->others;
    if (fabs(all - want) > SIZE_TOLERANCE * want || ratio < 0.8 || ratio > 1.2)
        return -1;
    return fabs(log(experts / EXPERTS_USUAL)) + fabs(log(ratio)) * 4 +
           fabs(log(hidden / (64.0 * layers))) * 0.5;
}

enum err synth_shape_find(uint64_t parameters, struct synth_shape *ret_shape,
                          struct err_detail *detail)
{
    static const uint32_t layers[] = {4, 8, 12, 16, 24, 32, 45};
    double best = -1;
    for (uint32_t hidden = 128; hidden <= 8192; hidden += 128)
        for (size_t i = 0; i < sizeof(layers) / sizeof(layers[0]); i++) {
            struct synth_shape s;
            double far = judge(parameters, hidden, layers[i], &s);
            if (far >= 0 && (best < 0 || far < best)) {
                best = far;
                *ret_shape = s;
            }
        }
    return best >= 0 ? ERR_OK
                     : err_set(detail, ERR_UNSUPPORTED, "--params: no shape of %llu parameters",
                               (unsigned long long)parameters);
}

static void add_list(struct str *out, const char *key, const struct model_config *c,
                     const bool flags[MODEL_LAYERS_MAX], const char *yes, const char *no)
{
    str_add_format(out, "  \"%s\": [", key);
    for (uint32_t i = 0; i < c->layers; i++)
        str_add_format(out, "%s\"%s\"", i > 0 ? ", " : "", flags[i] ? yes : no);
    str_add_text(out, "],\n");
}

static void add_numbers(struct str *out, const char *key, const struct model_config *c, bool dsa)
{
    bool first = true;
    str_add_format(out, "\"%s\": [", key);
    for (uint32_t i = 0; i < c->layers; i++)
        if (c->layer_dsa[i] == dsa) {
            str_add_format(out, "%s%u", first ? "" : ", ", i);
            first = false;
        }
    str_add_char(out, ']');
}

static void add_attention(const struct model_config *c, struct str *out)
{
    str_add_format(out,
                   "  \"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"head_dim\": 0,\n"
                   "  \"q_lora_rank\": %u, \"kv_lora_rank\": %u, \"qk_nope_head_dim\": %u,\n"
                   "  \"qk_rope_head_dim\": 0, \"qk_head_dim\": %u, \"v_head_dim\": %u,\n"
                   "  \"mla_use_nope\": true, \"attention_bias\": false,\n",
                   c->heads, c->heads, c->q_rank, c->kv_rank, c->nope_dim, c->nope_dim, c->v_dim);
    str_add_format(out,
                   "  \"index_n_heads\": %u, \"index_head_dim\": %u, \"index_topk\": %u,\n"
                   "  \"index_kpool\": %u, \"index_kpool_compress\": true,\n"
                   "  \"index_kpool_always_select_tail\": true,\n",
                   c->index_heads, c->index_dim, c->index_topk, c->index_kpool);
    str_add_format(out,
                   "  \"linear_attn_config\": {\"num_heads\": %u, \"head_dim\": %u, "
                   "\"short_conv_kernel_size\": %u, \"gate_lower_bound\": %.1f,\n   ",
                   c->kda_heads, c->kda_dim, c->conv_taps, c->gate_lower_bound);
    add_numbers(out, "kda_layers", c, false);
    str_add_text(out, ", ");
    add_numbers(out, "full_attn_layers", c, true);
    str_add_text(out, "},\n");
}

void synth_config_write(const struct model_config *c, struct str *out)
{
    str_add_text(out, "{\n \"architectures\": [\"Glm5NextForConditionalGeneration\"],\n"
                      " \"model_type\": \"glm5_next\",\n \"tie_word_embeddings\": false,\n"
                      " \"torch_dtype\": \"bfloat16\",\n \"text_config\": {\n"
                      "  \"model_type\": \"glm5_next_text\",\n");
    str_add_format(out,
                   "  \"vocab_size\": %u, \"hidden_size\": %u, \"num_hidden_layers\": %u,\n"
                   "  \"num_nextn_predict_layers\": 0, \"intermediate_size\": %u,\n"
                   "  \"moe_intermediate_size\": %u, \"first_k_dense_replace\": 1,\n",
                   c->vocab_size, c->hidden, c->layers, c->dense_width, c->expert_width);
    add_list(out, "mlp_layer_types", c, c->layer_moe, "sparse", "dense");
    add_list(out, "layer_types", c, c->layer_dsa, "deepseek_sparse_attention", "linear_attention");
    add_attention(c, out);
    str_add_format(out,
                   "  \"n_routed_experts\": %u, \"n_shared_experts\": 1, "
                   "\"num_experts_per_tok\": %u,\n  \"routed_scaling_factor\": %.1f, "
                   "\"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\",\n"
                   "  \"norm_topk_prob\": true, \"n_group\": 1, \"topk_group\": 1,\n"
                   "  \"moe_router_dtype\": \"float32\", \"hidden_act\": \"silu\", "
                   "\"swiglu_limit\": %.1f,\n",
                   c->experts, c->experts_per_token, c->routed_scale, c->swiglu_limit);
    str_add_format(
        out,
        "  \"mhc\": true, \"hc_mult\": 4, \"hc_sinkhorn_iters\": %u, \"hc_eps\": 1e-06,\n"
        "  \"rms_norm_eps\": 1e-05, \"max_position_embeddings\": %u,\n"
        "  \"eos_token_id\": [%u], \"pad_token_id\": %u\n }",
        c->sinkhorn_iters, c->context_max, c->eos_ids[0], c->eos_ids[0]);
}
