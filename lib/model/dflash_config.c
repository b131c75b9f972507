/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/dflash_config.h"

#include <math.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

#define CONFIG_BYTES_MAX (4u << 20)

/* Where keys may stand, in the order of who wins; absent objects are NULL.  Remembers the first
 * fault, so that the code reads as a list of keys. */
struct reader {
    const struct json *nested; /* dflash_config */
    const struct json *layer;  /* transformer_layer_config */
    const struct json *top;
    enum err err;
    struct err_detail *detail;
};

static void fault(struct reader *r, enum err e, const char *key, const char *why)
{
    if (r->err == ERR_OK)
        r->err = err_set(r->detail, e, "config.json: %s: %s", key, why);
}

static const struct json *in_object(const struct json *object, const char *key)
{
    const struct json *value = json_get(object, key);
    return value == NULL || value->type == JSON_NULL ? NULL : value;
}

static const struct json *get(const struct reader *r, const char *key)
{
    const struct json *value = in_object(r->nested, key);
    if (value == NULL)
        value = in_object(r->layer, key);
    return value != NULL ? value : in_object(r->top, key);
}

static uint32_t get_u32(struct reader *r, const char *key, uint32_t low, uint32_t high)
{
    uint64_t value = 0;
    const struct json *node = get(r, key);
    if (node == NULL)
        fault(r, ERR_INVALID, key, "missing");
    else if (!json_u64(node, &value))
        fault(r, ERR_INVALID, key, "not a whole number");
    else if (value < low || value > high)
        fault(r, ERR_UNSUPPORTED, key, "out of the supported range");
    else
        return (uint32_t)value;
    return low;
}

static double get_f64(struct reader *r, const struct json *node, const char *key, double otherwise,
                      bool positive)
{
    double value = otherwise;
    if (node == NULL)
        return otherwise;
    if (!json_f64(node, &value))
        fault(r, ERR_INVALID, key, "not a finite number");
    else if (positive && !(value > 0))
        fault(r, ERR_UNSUPPORTED, key, "not above zero");
    return value;
}

/* -1 where the key is absent. */
static int get_bool(struct reader *r, const struct json *node, const char *key)
{
    bool value = false;
    if (node == NULL)
        return -1;
    if (!json_bool(node, &value))
        fault(r, ERR_INVALID, key, "not true or false");
    return value;
}

static void only_false(struct reader *r, const char *key)
{
    if (get_bool(r, get(r, key), key) == 1)
        fault(r, ERR_UNSUPPORTED, key, "only false is supported");
}

/* ---- who it is ---- */

static void refuse_relatives(struct reader *r)
{
    static const struct {
        const char *key, *who;
    } keys[] = {
        {"markov_w1", "DSpark"},
        {"markov_w2", "DSpark"},
        {"markov_rank", "DSpark"},
        {"shift_label", "Domino"},
        {"gru_hidden_dim", "Domino"},
        {"emb_dim", "Domino"},
        {"projector_type", "Domino"},
        {"pure_draft_prefix_len", "Domino"},
        {"use_swa", "a MiMo drafter"},
        {"swa_window_size", "a MiMo drafter"},
        {"attention_sink_bias", "a MiMo drafter"},
        {"attention_value_scale", "a MiMo drafter"},
    };
    for (size_t i = 0; i < ARRAY_COUNT(keys); i++) {
        const struct json *value = get(r, keys[i].key);
        bool set = value != NULL && !(value->type == JSON_BOOL && !value->boolean);
        if (set && r->err == ERR_OK)
            r->err = err_set(r->detail, ERR_UNSUPPORTED,
                             "config.json: %s: belongs to %s, which is another network",
                             keys[i].key, keys[i].who);
    }
    if (get_bool(r, get(r, "sample_from_anchor"), "sample_from_anchor") == 1)
        fault(r, ERR_UNSUPPORTED, "sample_from_anchor",
              "belongs to DSpark, which is another network");
}

static void read_kind(struct reader *r, struct dflash_config *c)
{
    const struct json *speculators = in_object(r->top, "speculators_model_type");
    const struct json *list = in_object(r->top, "architectures");
    if (speculators != NULL) {
        c->v2 = json_string_is(speculators, "dflash2");
        if (!c->v2 && !json_string_is(speculators, "dflash"))
            fault(r, ERR_UNSUPPORTED, "speculators_model_type", "only dflash and dflash2");
        return;
    }
    const struct json *name = json_is(list, JSON_ARRAY) && list->count == 1 ? list->child : NULL;
    c->v2 = json_string_is(name, "DFlash2DraftModel");
    if (c->v2 || json_string_is(name, "DFlashDraftModel") || r->err != ERR_OK)
        return;
    bool text = json_is(name, JSON_STRING) && name->bytes < 80;
    r->err = err_set(r->detail, ERR_UNSUPPORTED,
                     "config.json: architectures: %.*s: only DFlashDraftModel and "
                     "DFlash2DraftModel are supported, not their relatives",
                     text ? (int)name->bytes : 1, text ? name->text : "?");
}

/* ---- parts ---- */

static void read_geometry(struct reader *r, struct dflash_config *c)
{
    const struct json *act = get(r, "hidden_act");
    c->hidden = get_u32(r, "hidden_size", 1, 1u << 16);
    c->ffn = get_u32(r, "intermediate_size", 1, 1u << 20);
    c->layers = get_u32(r, "num_hidden_layers", 1, DFLASH_LAYERS_MAX);
    c->heads = get_u32(r, "num_attention_heads", 1, 1024);
    c->kv_heads = get_u32(r, "num_key_value_heads", 1, 1024);
    c->head_dim = get_u32(r, "head_dim", 2, 1024);
    c->vocab_size = get_u32(r, "vocab_size", 2, 1u << 24);
    if (get(r, "rms_norm_eps") == NULL)
        fault(r, ERR_INVALID, "rms_norm_eps", "missing");
    c->rms_eps = get_f64(r, get(r, "rms_norm_eps"), "rms_norm_eps", 1, true);
    if (c->heads % c->kv_heads != 0)
        fault(r, ERR_INVALID, "num_key_value_heads", "does not divide num_attention_heads");
    if (c->head_dim % 2 != 0)
        fault(r, ERR_UNSUPPORTED, "head_dim", "odd");
    if (act != NULL && !json_string_is(act, "silu"))
        fault(r, ERR_UNSUPPORTED, "hidden_act", "only silu is supported");
    only_false(r, "attention_bias");
    only_false(r, "tie_word_embeddings");
    c->output_multiplier = get_f64(r, get(r, "output_multiplier"), "output_multiplier", 1, true);
    c->softcap = get_f64(r, get(r, "final_logit_softcapping"), "final_logit_softcapping", 0, true);
    c->embed_scale = get_f64(r, get(r, "input_embedding_scale"), "input_embedding_scale", 1, true);
}

static void read_rope(struct reader *r, struct dflash_config *c)
{
    const struct json *rope = get(r, "rope_parameters");
    const struct json *scaling = get(r, "rope_scaling");
    const struct json *theta = in_object(rope, "rope_theta");
    const struct json *type = in_object(rope, "rope_type");
    if (theta == NULL)
        theta = get(r, "rope_theta");
    if (theta == NULL)
        fault(r, ERR_INVALID, "rope_theta", "missing, also in rope_parameters");
    c->rope_theta = get_f64(r, theta, "rope_theta", 1, true);
    if (type != NULL && !json_string_is(type, "default"))
        fault(r, ERR_UNSUPPORTED, "rope_parameters.rope_type", "only default is supported");
    type = in_object(scaling, "rope_type");
    if (scaling != NULL && !json_string_is(type, "default"))
        fault(r, ERR_UNSUPPORTED, "rope_scaling", "not supported");
}

static void read_layers(struct reader *r, struct dflash_config *c)
{
    const struct json *list = get(r, "layer_types");
    bool any = false;
    if (list != NULL && (!json_is(list, JSON_ARRAY) || list->count != c->layers)) {
        fault(r, ERR_INVALID, "layer_types", "not a list of num_hidden_layers names");
        return;
    }
    uint32_t i = 0;
    for (const struct json *v = list != NULL ? list->child : NULL; v != NULL; v = v->next, i++) {
        c->layer_sliding[i] = json_string_is(v, "sliding_attention");
        any |= c->layer_sliding[i];
        if (!c->layer_sliding[i] && !json_string_is(v, "full_attention"))
            fault(r, ERR_UNSUPPORTED, "layer_types",
                  "only full_attention and sliding_attention are supported");
    }
    if (list == NULL && get_bool(r, get(r, "use_sliding_window"), "use_sliding_window") == 1)
        fault(r, ERR_INVALID, "layer_types", "missing, but use_sliding_window is true");
    if (any)
        c->window = get_u32(r, "sliding_window", 2, 1u << 24);
    /* Top level, then dflash_config.causal, then by the layer's type. */
    int causal = get_bool(r, in_object(r->top, "is_causal"), "is_causal");
    if (causal < 0)
        causal = get_bool(r, in_object(r->nested, "causal"), "causal");
    if (causal < 0 && get_bool(r, in_object(r->top, "sliding_window_non_causal"),
                               "sliding_window_non_causal") == 1)
        causal = 0;
    for (i = 0; i < c->layers; i++)
        c->layer_causal[i] = causal < 0 ? c->layer_sliding[i] : causal == 1;
}

static void read_taps(struct reader *r, struct dflash_config *c)
{
    const char *key = "target_layer_ids";
    uint32_t from = 0;
    const struct json *list = get(r, key);
    if (list == NULL) {
        key = "aux_hidden_state_layer_ids";
        from = 1;
        list = get(r, key);
    }
    if (get(r, "num_target_layers") != NULL)
        c->target_layers = get_u32(r, "num_target_layers", 1, 4096);
    if (list == NULL)
        return;
    if (!json_is(list, JSON_ARRAY) || list->count == 0 || list->count > DFLASH_TAPS_MAX) {
        fault(r, ERR_UNSUPPORTED, key, "not a list of 1 to 16 layers");
        return;
    }
    for (const struct json *v = list->child; v != NULL; v = v->next) {
        uint64_t id = 0;
        if (!json_u64(v, &id) || id < from || id > 4096) {
            fault(r, ERR_INVALID, key, "an entry is no layer of a target");
            return;
        }
        for (uint32_t i = 0; i < c->tap_count; i++)
            if (c->taps[i] == id - from)
                fault(r, ERR_INVALID, key, "names a layer twice");
        c->taps[c->tap_count++] = (uint32_t)id - from;
    }
}

static void read_v2(struct reader *r, struct dflash_config *c)
{
    static const char *const keys[] = {"conv_kernel_size", "conv_group_size", "selector_rank",
                                       "selector_top_k"};
    if (!c->v2) {
        for (size_t i = 0; i < ARRAY_COUNT(keys); i++)
            if (get(r, keys[i]) != NULL)
                fault(r, ERR_INVALID, keys[i], "belongs to DFlash2, the file says DFlash");
        return;
    }
    c->conv_taps = get_u32(r, keys[0], 1, DFLASH_CONV_MAX);
    c->conv_group = get_u32(r, keys[1], 1, c->hidden);
    c->selector_rank = get_u32(r, keys[2], 1, 1u << 14);
    c->selector_top_k = get_u32(r, keys[3], 1, DFLASH_TOP_K_MAX);
    if (c->hidden % c->conv_group != 0)
        fault(r, ERR_INVALID, keys[1], "does not divide hidden_size");
}

static enum err read_all(struct reader *r, struct dflash_config *c)
{
    read_kind(r, c);
    refuse_relatives(r);
    read_geometry(r, c);
    read_rope(r, c);
    if (r->err == ERR_OK)
        read_layers(r, c);
    c->block_size = get_u32(r, "block_size", 2, DFLASH_BLOCK_MAX);
    c->mask_id = get_u32(r, "mask_token_id", 0, c->vocab_size - 1);
    if (get(r, "draft_vocab_size") != NULL)
        c->draft_vocab = get_u32(r, "draft_vocab_size", 1, c->vocab_size);
    if (c->draft_vocab == c->vocab_size)
        c->draft_vocab = 0;
    read_taps(r, c);
    read_v2(r, c);
    if (r->err == ERR_OK && c->target_layers != 0)
        return dflash_check_taps(c, c->target_layers, r->detail);
    return r->err;
}

enum err dflash_config_parse(const char *text, size_t bytes, struct dflash_config *ret_config,
                             struct err_detail *detail)
{
    struct arena arena;
    struct json *root = NULL;
    struct json_error where;
    struct json_options strict = {.bytes_max = CONFIG_BYTES_MAX};
    struct dflash_config c = {0};
    arena_init(&arena, 1u << 16, 64u << 20);
    enum err e = json_parse(&arena, &strict, text, bytes, &root, &where);
    if (e != ERR_OK) {
        err_set(detail, e, "config.json: byte %zu: %s", where.offset, where.reason);
    } else if (!json_is(root, JSON_OBJECT)) {
        e = err_set(detail, ERR_INVALID, "config.json: not an object");
    } else {
        struct reader r = {.nested = in_object(root, "dflash_config"),
                           .layer = in_object(root, "transformer_layer_config"),
                           .top = root,
                           .detail = detail};
        e = read_all(&r, &c);
    }
    arena_fini(&arena);
    if (e == ERR_OK)
        *ret_config = c;
    return e;
}

enum err dflash_default_taps(uint32_t target_layers, uint32_t count, uint32_t *ret_taps,
                             struct err_detail *detail)
{
    CHECK(count >= 1 && count <= DFLASH_TAPS_MAX);
    if (target_layers < 4 || target_layers < count)
        return err_set(detail, ERR_INVALID,
                       "config.json: target_layer_ids: missing, and %u target layers are too few "
                       "for the rule that replaces it",
                       target_layers);
    for (uint32_t i = 0; i < count; i++)
        ret_taps[i] = count == 1 ? target_layers / 2
                                 : (uint32_t)rint(1 + i * (target_layers - 4.0) / (count - 1.0));
    return ERR_OK;
}

enum err dflash_check_taps(const struct dflash_config *config, uint32_t target_layers,
                           struct err_detail *detail)
{
    for (uint32_t i = 0; i < config->tap_count; i++)
        if (config->taps[i] >= target_layers)
            return err_set(detail, ERR_INVALID,
                           "config.json: target_layer_ids: layer %u, the target has %u",
                           config->taps[i], target_layers);
    return ERR_OK;
}
