/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/config.h"

#include <string.h>

#include "kernels/op_types.h"
#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

/* config.json of the published model has 5 KB; a list of layers cannot make it large. */
#define CONFIG_BYTES_MAX (4u << 20)

/* Remembers the first fault; later reads are no-ops, so that the code reads as a list of keys. */
struct reader {
    const struct json *object;
    const char *path; /* "text_config." and the like, for messages */
    enum err err;
    struct err_detail *detail;
};

static void refuse(struct reader *r, const char *key, const char *why)
{
    if (r->err == ERR_OK)
        r->err = err_set(r->detail, ERR_UNSUPPORTED, "config.json: %s%s: %s", r->path, key, why);
}

static void malformed(struct reader *r, const char *key, const char *why)
{
    if (r->err == ERR_OK)
        r->err = err_set(r->detail, ERR_INVALID, "config.json: %s%s: %s", r->path, key, why);
}

/* NULL if absent or null. */
static const struct json *get(const struct reader *r, const char *key)
{
    const struct json *value = json_get(r->object, key);
    return value == NULL || value->type == JSON_NULL ? NULL : value;
}

static uint32_t get_u32(struct reader *r, const char *key, uint32_t low, uint32_t high)
{
    uint64_t value = 0;
    const struct json *node = get(r, key);
    if (node == NULL) {
        malformed(r, key, "missing");
    } else if (!json_u64(node, &value)) {
        malformed(r, key, "not a whole number");
    } else if (value < low || value > high) {
        if (r->err == ERR_OK)
            r->err = err_set(r->detail, ERR_UNSUPPORTED,
                             "config.json: %s%s: %llu, supported are %u to %u", r->path, key,
                             (unsigned long long)value, low, high);
    } else {
        return (uint32_t)value;
    }
    return low;
}

static double get_f64(struct reader *r, const char *key, double above, double below)
{
    double value = 0;
    const struct json *node = get(r, key);
    if (node == NULL)
        malformed(r, key, "missing");
    else if (!json_f64(node, &value))
        malformed(r, key, "not a finite number");
    else if (!(value > above && value < below))
        refuse(r, key, "value out of the supported range");
    return value;
}

/* The key may be absent when the value is structural for the family. */
static void need_u32(struct reader *r, const char *key, uint32_t only)
{
    if (get(r, key) != NULL)
        get_u32(r, key, only, only);
}

static void need_bool(struct reader *r, const char *key, bool only)
{
    bool value = only;
    const struct json *node = get(r, key);
    if (node == NULL)
        return;
    if (!json_bool(node, &value))
        malformed(r, key, "not true or false");
    else if (value != only)
        refuse(r, key, only ? "only true is supported" : "only false is supported");
}

static void need_text(struct reader *r, const char *key, const char *only)
{
    const struct json *node = get(r, key);
    if (node == NULL || json_string_is(node, only) || r->err != ERR_OK)
        return;
    int shown = node->type == JSON_STRING && node->bytes < 64 ? (int)node->bytes : 0;
    r->err = err_set(r->detail, ERR_UNSUPPORTED,
                     "config.json: %s%s: \"%.*s\", only \"%s\" is "
                     "supported",
                     r->path, key, shown, shown > 0 ? node->text : "", only);
}

static void need_absent(struct reader *r, const char *key)
{
    if (get(r, key) != NULL)
        refuse(r, key, "not supported");
}

/* The list of one string per layer; the MTP layers may be listed too. */
static const struct json *layer_list(struct reader *r, const char *key,
                                     const struct model_config *c)
{
    const struct json *list = get(r, key);
    if (list == NULL)
        return NULL;
    if (!json_is(list, JSON_ARRAY)) {
        malformed(r, key, "not a list");
        return NULL;
    }
    if (list->count != c->layers && list->count != c->layers + c->mtp_layers) {
        malformed(r, key, "its length is not num_hidden_layers");
        return NULL;
    }
    return list;
}

static void read_layer_types(struct reader *r, struct model_config *c)
{
    const struct json *list = layer_list(r, "layer_types", c);
    if (list == NULL) {
        malformed(r, "layer_types", "missing");
        return;
    }
    uint32_t i = 0;
    for (const struct json *v = list->child; v != NULL && i < c->layers; v = v->next, i++) {
        if (json_string_is(v, "deepseek_sparse_attention") || json_string_is(v, "full_attention"))
            c->layer_dsa[i] = true;
        else if (!json_string_is(v, "linear_attention"))
            refuse(r, "layer_types",
                   "only linear_attention and deepseek_sparse_attention are "
                   "supported");
    }
}

static void read_mlp_types(struct reader *r, struct model_config *c)
{
    uint32_t dense_first = 0;
    bool has_first = get(r, "first_k_dense_replace") != NULL;
    if (has_first)
        dense_first = get_u32(r, "first_k_dense_replace", 0, MODEL_LAYERS_MAX);
    const struct json *list = layer_list(r, "mlp_layer_types", c);
    if (list == NULL && !has_first)
        malformed(r, "mlp_layer_types", "missing");
    const struct json *v = list != NULL ? list->child : NULL;
    for (uint32_t i = 0; i < c->layers; i++) {
        c->layer_moe[i] = i >= dense_first;
        if (v == NULL)
            continue;
        c->layer_moe[i] = json_string_is(v, "sparse");
        if (!c->layer_moe[i] && !json_string_is(v, "dense"))
            refuse(r, "mlp_layer_types", "only dense and sparse are supported");
        if (has_first && c->layer_moe[i] != (i >= dense_first))
            refuse(r, "first_k_dense_replace", "contradicts mlp_layer_types");
        v = v->next;
    }
}

/* linear_attn_config's own lists of layers must agree with layer_types where they are given. */
static void check_layers(struct reader *r, const char *key, const struct model_config *c, bool dsa)
{
    const struct json *list = get(r, key);
    if (list == NULL)
        return;
    if (!json_is(list, JSON_ARRAY)) {
        malformed(r, key, "not a list");
        return;
    }
    bool listed[MODEL_LAYERS_MAX] = {false};
    for (const struct json *v = list->child; v != NULL; v = v->next) {
        uint64_t layer = 0;
        if (!json_u64(v, &layer) || layer >= c->layers + c->mtp_layers)
            malformed(r, key, "not a list of layers");
        else if (layer < c->layers)
            listed[layer] = true;
    }
    for (uint32_t i = 0; i < c->layers; i++)
        if (listed[i] != (c->layer_dsa[i] == dsa))
            refuse(r, key, "contradicts layer_types");
}

static void read_linear_attention(struct reader *outer, struct model_config *c)
{
    const struct json *object = get(outer, "linear_attn_config");
    if (!json_is(object, JSON_OBJECT)) {
        malformed(outer, "linear_attn_config", "missing or not an object");
        return;
    }
    struct reader r = {object, "text_config.linear_attn_config.", outer->err, outer->detail};
    c->kda_heads = get_u32(&r, "num_heads", 1, 1024);
    c->kda_dim = get_u32(&r, "head_dim", 1, OP_HEAD_DIM_MAX);
    c->conv_taps = get_u32(&r, "short_conv_kernel_size", 2, OP_CONV_TAPS_MAX);
    bool early = get(&r, "gate_lower_bound") == NULL && get(&r, "lower_bound") != NULL;
    c->gate_lower_bound = get_f64(&r, early ? "lower_bound" : "gate_lower_bound", -80, 0);
    check_layers(&r, "kda_layers", c, false);
    check_layers(&r, "full_attn_layers", c, true);
    outer->err = r.err;
}

static void read_attention(struct reader *r, struct model_config *c)
{
    c->heads = get_u32(r, "num_attention_heads", 1, 1024);
    need_u32(r, "num_key_value_heads", c->heads);
    c->q_rank = get_u32(r, "q_lora_rank", 1, 65536);
    c->kv_rank = get_u32(r, "kv_lora_rank", 1, OP_LATENT_MAX);
    c->nope_dim = get_u32(r, "qk_nope_head_dim", 1, 4096);
    c->v_dim = get_u32(r, "v_head_dim", 1, 4096);
    get_u32(r, "qk_rope_head_dim", 0, 0);
    need_u32(r, "qk_head_dim", c->nope_dim);
    need_bool(r, "mla_use_nope", true);
    need_bool(r, "attention_bias", false);
    need_absent(r, "rope_theta");
    need_absent(r, "rope_scaling");
    need_absent(r, "rope_parameters");
}

static void read_indexer(struct reader *r, struct model_config *c)
{
    c->index_heads = get_u32(r, "index_n_heads", 1, 1024);
    c->index_dim = get_u32(r, "index_head_dim", 1, OP_INDEX_DIM_MAX);
    c->index_kpool = get_u32(r, "index_kpool", 2, OP_KPOOL_MAX);
    c->index_topk = get_u32(r, "index_topk", c->index_kpool, OP_POOLS_KEPT_MAX * c->index_kpool);
    if (c->index_topk % c->index_kpool != 0)
        refuse(r, "index_topk", "not a multiple of index_kpool");
    need_bool(r, "index_kpool_compress", true);
    need_bool(r, "index_kpool_always_select_tail", true);
    need_u32(r, "index_topk_freq", 1);
    need_absent(r, "index_topk_pattern");
    const struct json *types = layer_list(r, "indexer_types", c);
    for (const struct json *v = types != NULL ? types->child : NULL; v != NULL; v = v->next)
        if (!json_string_is(v, "full"))
            refuse(r, "indexer_types", "only \"full\" is supported");
}

static void read_experts(struct reader *r, struct model_config *c)
{
    c->dense_width = get_u32(r, "intermediate_size", 1, 1u << 20);
    c->expert_width = get_u32(r, "moe_intermediate_size", 1, 1u << 20);
    c->experts = get_u32(r, "n_routed_experts", 1, OP_EXPERTS_MAX);
    uint32_t most = c->experts < OP_TOP_K_MAX ? c->experts : OP_TOP_K_MAX;
    c->experts_per_token = get_u32(r, "num_experts_per_tok", 1, most);
    c->routed_scale = get_f64(r, "routed_scaling_factor", 0, 1e6);
    c->swiglu_limit = get_f64(r, "swiglu_limit", 0, 1e6);
    get_u32(r, "n_shared_experts", 1, 1);
    need_text(r, "scoring_func", "sigmoid");
    need_text(r, "topk_method", "noaux_tc");
    need_bool(r, "norm_topk_prob", true);
    need_u32(r, "n_group", 1);
    need_u32(r, "topk_group", 1);
    need_text(r, "moe_router_dtype", "float32");
    need_text(r, "hidden_act", "silu");
}

static void read_eos(struct reader *r, struct model_config *c)
{
    const struct json *node = get(r, "eos_token_id");
    if (node == NULL) {
        malformed(r, "eos_token_id", "missing");
        return;
    }
    const struct json *v = node;
    if (node->type == JSON_ARRAY)
        v = node->child;
    if (v == NULL)
        malformed(r, "eos_token_id", "empty");
    for (; v != NULL; v = node->type == JSON_ARRAY ? v->next : NULL) {
        uint64_t id = 0;
        if (!json_u64(v, &id) || id >= c->vocab_size)
            malformed(r, "eos_token_id", "not an id below vocab_size");
        else if (c->eos_count == MODEL_EOS_IDS_MAX)
            refuse(r, "eos_token_id", "too many ids");
        else
            c->eos_ids[c->eos_count++] = (uint32_t)id;
    }
}

static void read_text_config(struct reader *r, struct model_config *c)
{
    need_text(r, "model_type", "glm5_next_text");
    need_bool(r, "tie_word_embeddings", false);
    c->vocab_size = get_u32(r, "vocab_size", 1, 1u << 24);
    c->hidden = get_u32(r, "hidden_size", 1, 65536);
    c->layers = get_u32(r, "num_hidden_layers", 1, MODEL_LAYERS_MAX);
    if (get(r, "num_nextn_predict_layers") != NULL)
        c->mtp_layers = get_u32(r, "num_nextn_predict_layers", 0, 8);
    c->context_max = get_u32(r, "max_position_embeddings", 1, 1u << 26);
    c->rms_eps = get_f64(r, "rms_norm_eps", 0, 1);
    if (get(r, "mhc") == NULL)
        malformed(r, "mhc", "missing");
    need_bool(r, "mhc", true);
    get_u32(r, "hc_mult", OP_STREAMS, OP_STREAMS);
    c->sinkhorn_iters = get_u32(r, "hc_sinkhorn_iters", 1, 1000);
    c->hc_eps = get_f64(r, "hc_eps", 0, 1);
    if (r->err != ERR_OK)
        return; /* the lists below need sane counts */
    read_layer_types(r, c);
    read_mlp_types(r, c);
    read_attention(r, c);
    read_indexer(r, c);
    read_experts(r, c);
    read_linear_attention(r, c);
    read_eos(r, c);
}

static enum err read_root(const struct json *root, struct model_config *c,
                          struct err_detail *detail)
{
    if (!json_is(root, JSON_OBJECT))
        return err_set(detail, ERR_INVALID, "config.json: not an object");
    struct reader top = {root, "", ERR_OK, detail};
    if (get(&top, "model_type") == NULL)
        malformed(&top, "model_type", "missing");
    need_text(&top, "model_type", "glm5_next");
    need_bool(&top, "tie_word_embeddings", false);
    TRY(top.err);
    const struct json *text = get(&top, "text_config");
    if (!json_is(text, JSON_OBJECT))
        return err_set(detail, ERR_INVALID, "config.json: text_config: missing or not an object");
    struct reader r = {text, "text_config.", ERR_OK, detail};
    read_text_config(&r, c);
    return r.err;
}

enum err model_config_parse(const char *text, size_t bytes, struct model_config *ret_config,
                            struct err_detail *detail)
{
    struct arena arena;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = 16, .bytes_max = CONFIG_BYTES_MAX};
    struct model_config config;
    memset(&config, 0, sizeof(config));

    arena_init(&arena, 64 << 10, 64u << 20);
    enum err e = json_parse(&arena, &options, text, bytes, &root, &where);
    if (e != ERR_OK)
        e = err_set(detail, e, "config.json: byte %zu: %s", where.offset,
                    where.reason != NULL ? where.reason : err_text(e));
    else
        e = read_root(root, &config, detail);
    arena_fini(&arena);
    if (e != ERR_OK)
        return e;
    CHECK(config.layers > 0 && config.layers <= MODEL_LAYERS_MAX);
    *ret_config = config;
    return ERR_OK;
}
