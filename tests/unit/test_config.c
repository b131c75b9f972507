/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/golden_lines.h"

#include "lib/base/str.h"
#include "lib/model/config.h"
#include "lib/model/weights.h"

/* The text of the demo model's config.json with one piece replaced by another. */
static char *edited(const char *from, const char *to)
{
    char path[1024];
    size_t bytes = 0;
    golden_path(path, sizeof(path), "tests/golden/model-random/config.json");
    char *text = golden_read(path, &bytes);
    char *all = malloc(bytes + strlen(to) + 1);
    assert_non_null(all);
    char *copy = strndup(text, bytes);
    char *at = strstr(copy, from);
    if (at == NULL)
        fail_msg("config.json holds no %s", from);
    size_t head = (size_t)(at - copy);
    memcpy(all, copy, head);
    strcpy(all + head, to);
    strcat(all, at + strlen(from));
    free(copy);
    free(text);
    return all;
}

static enum err parse(const char *from, const char *to, struct model_config *c,
                      struct err_detail *detail)
{
    char *text = edited(from, to);
    enum err e = model_config_parse(text, strlen(text), c, detail);
    free(text);
    return e;
}

static void test_values(void **state)
{
    (void)state;
    struct model_config c;
    struct err_detail detail = {{0}};
    assert_int_equal(parse("\"hidden_size\": 128", "\"hidden_size\": 128", &c, &detail), ERR_OK);
    assert_int_equal(c.layers, 8);
    assert_int_equal(c.mtp_layers, 1);
    assert_int_equal(c.context_max, 65536);
    assert_int_equal(c.expert_width, 256);
    assert_int_equal(c.dense_width, 384);
    assert_true(c.swiglu_limit == 2 && c.rms_eps == 1e-5 && c.hc_eps == 1e-6);
    assert_true(c.gate_lower_bound == -5 && c.routed_scale == 2.5);
    assert_int_equal(c.index_topk, 64);
    assert_int_equal(c.index_kpool, 4);
    assert_int_equal(c.sinkhorn_iters, 20);
    assert_int_equal(c.conv_taps, 4);
    assert_int_equal(c.eos_count, 3);
    assert_int_equal(c.eos_ids[2], 985);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(c.layer_dsa[i], i % 4 == 3);
        assert_int_equal(c.layer_moe[i], i > 0);
    }
}

/* Each unsupported or impossible value is refused, and the message has the key's name. */
static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to, *key;
    } cases[] = {
        {"\"model_type\": \"glm5_next\"", "\"model_type\": \"glm4_moe\"", "model_type"},
        {"\"model_type\": \"glm5_next\",", "", "model_type"},
        {"\"glm5_next_text\"", "\"glm_text\"", "model_type"},
        {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", "tie_word_embeddings"},
        {"\"text_config\"", "\"txt_config\"", "text_config"},
        {"\"vocab_size\": 1024", "\"vocab_size\": 0", "vocab_size"},
        {"\"vocab_size\": 1024", "\"vocab_size\": 10.5", "vocab_size"},
        {"\"vocab_size\": 1024", "\"vocab_size\": -3", "vocab_size"},
        {"\"vocab_size\": 1024,", "", "vocab_size"},
        {"\"hidden_size\": 128", "\"hidden_size\": 99999999999999999999", "hidden_size"},
        {"\"hidden_size\": 128", "\"hidden_size\": null", "hidden_size"},
        {"\"num_hidden_layers\": 8", "\"num_hidden_layers\": 4000000000", "num_hidden_layers"},
        {"\"num_hidden_layers\": 8", "\"num_hidden_layers\": 6", "layer_types"},
        {"\"layer_types\": [", "\"layer_types\": [\"linear_attention\",", "layer_types"},
        {"\"linear_attention\",", "\"sliding_attention\",", "layer_types"},
        {"\"dense\",", "\"denser\",", "mlp_layer_types"},
        {"\"first_k_dense_replace\": 1", "\"first_k_dense_replace\": 2", "first_k_dense_replace"},
        {"\"num_key_value_heads\": 4", "\"num_key_value_heads\": 2", "num_key_value_heads"},
        {"\"qk_rope_head_dim\": 0", "\"qk_rope_head_dim\": 64", "qk_rope_head_dim"},
        {"\"qk_head_dim\": 64", "\"qk_head_dim\": 128", "qk_head_dim"},
        {"\"mla_use_nope\": true", "\"mla_use_nope\": false", "mla_use_nope"},
        {"\"mla_use_nope\": true", "\"mla_use_nope\": 1", "mla_use_nope"},
        {"\"head_dim\": 0,", "\"head_dim\": 0, \"rope_theta\": 10000,", "rope_theta"},
        {"\"head_dim\": 0,", "\"head_dim\": 0, \"rope_scaling\": {},", "rope_scaling"},
        {"\"n_shared_experts\": 1", "\"n_shared_experts\": 2", "n_shared_experts"},
        {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9", "num_experts_per_tok"},
        {"\"scoring_func\": \"sigmoid\"", "\"scoring_func\": \"softmax\"", "scoring_func"},
        {"\"topk_method\": \"noaux_tc\"", "\"topk_method\": \"greedy\"", "topk_method"},
        {"\"norm_topk_prob\": true", "\"norm_topk_prob\": false", "norm_topk_prob"},
        {"\"n_group\": 1", "\"n_group\": 8", "n_group"},
        {"\"topk_group\": 1", "\"topk_group\": 4", "topk_group"},
        {"\"moe_router_dtype\": \"float32\"", "\"moe_router_dtype\": \"bfloat16\"",
         "moe_router_dtype"},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act"},
        {"\"swiglu_limit\": 2.0", "\"swiglu_limit\": 0", "swiglu_limit"},
        {"\"index_topk\": 64", "\"index_topk\": 66", "index_topk"},
        {"\"index_topk\": 64", "\"index_topk\": 0", "index_topk"},
        {"\"index_kpool\": 4", "\"index_kpool\": 1", "index_kpool"},
        {"\"index_kpool_compress\": true", "\"index_kpool_compress\": false",
         "index_kpool_compress"},
        {"\"index_kpool_always_select_tail\": true", "\"index_kpool_always_select_tail\": false",
         "index_kpool_always_select_tail"},
        {"\"full\",", "\"shared\",", "indexer_types"},
        {"\"index_topk\": 64", "\"index_topk_freq\": 4, \"index_topk\": 64", "index_topk_freq"},
        {"\"index_topk\": 64", "\"index_topk_pattern\": \"FS\", \"index_topk\": 64",
         "index_topk_pattern"},
        {"\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
        {"\"mhc\": true", "\"mhc\": false", "mhc"},
        {"\"mhc\": true,", "", "mhc"},
        {"\"hc_mult\": 4", "\"hc_mult\": 2", "hc_mult"},
        {"\"hc_sinkhorn_iters\": 20", "\"hc_sinkhorn_iters\": 0", "hc_sinkhorn_iters"},
        {"\"hc_eps\": 1e-06", "\"hc_eps\": -1", "hc_eps"},
        {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": \"x\"", "rms_norm_eps"},
        {"\"linear_attn_config\"", "\"linear_attention\"", "linear_attn_config"},
        {"\"short_conv_kernel_size\": 4", "\"short_conv_kernel_size\": 9",
         "short_conv_kernel_size"},
        {"\"gate_lower_bound\": -5.0", "\"gate_lower_bound\": 5.0", "gate_lower_bound"},
        {"\"head_dim\": 32", "\"head_dim\": 512", "linear_attn_config.head_dim"},
        {"\"full_attn_layers\": [", "\"full_attn_layers\": [1,", "full_attn_layers"},
        {"976,", "1024,", "eos_token_id"},
        {"\"eos_token_id\"", "\"eos_token_ids\"", "eos_token_id"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct model_config c;
        struct err_detail detail = {{0}};
        enum err e = parse(cases[i].from, cases[i].to, &c, &detail);
        if (e == ERR_OK)
            fail_msg("accepted: %s", cases[i].to);
        if (strstr(detail.text, cases[i].key) == NULL)
            fail_msg("%s: the message does not name %s: %s", cases[i].to, cases[i].key,
                     detail.text);
    }
}

/* Structural keys may be missing in re-quantised configs. */
static void test_absent_structural(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "\"scoring_func\": \"sigmoid\",", "\"topk_method\": \"noaux_tc\",",
        "\"index_kpool_always_select_tail\": true,", "\"first_k_dense_replace\": 1,",
        "\"moe_router_dtype\": \"float32\","};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct model_config c;
        struct err_detail detail = {{0}};
        if (parse(keys[i], "", &c, &detail) != ERR_OK)
            fail_msg("without %s: %s", keys[i], detail.text);
    }
}

static void add_names(struct str *s, const char *key, const char *a, const char *b, bool by_four)
{
    str_add_format(s, "\"%s\": [", key);
    for (int i = 0; i < 45; i++)
        str_add_format(s, "%s\"%s\"", i > 0 ? ", " : "", (by_four ? i % 4 == 3 : i >= 3) ? b : a);
    str_add_text(s, "],");
}

/* The published model's sizes give its published parameter counts. */
static void test_published_counts(void **state)
{
    (void)state;
    struct str s;
    struct model_config c;
    struct err_detail detail = {{0}};
    str_init(&s, 0);
    str_add_text(&s, "{\"model_type\": \"glm5_next\", \"text_config\": {");
    add_names(&s, "layer_types", "linear_attention", "deepseek_sparse_attention", true);
    add_names(&s, "mlp_layer_types", "dense", "sparse", false);
    str_add_text(&s,
                 "\"vocab_size\": 154880, \"hidden_size\": 4096, \"num_hidden_layers\": 45,"
                 "\"num_nextn_predict_layers\": 1, \"intermediate_size\": 12288,"
                 "\"moe_intermediate_size\": 2048, \"first_k_dense_replace\": 3,"
                 "\"num_attention_heads\": 64, \"num_key_value_heads\": 64, \"q_lora_rank\": 1536,"
                 "\"kv_lora_rank\": 512, \"qk_nope_head_dim\": 256, \"qk_rope_head_dim\": 0,"
                 "\"v_head_dim\": 256, \"n_routed_experts\": 288, \"n_shared_experts\": 1,"
                 "\"num_experts_per_tok\": 8, \"routed_scaling_factor\": 2.5,"
                 "\"swiglu_limit\": 10.0, \"index_n_heads\": 32, \"index_head_dim\": 128,"
                 "\"index_topk\": 2048, \"index_kpool\": 4, \"mhc\": true, \"hc_mult\": 4,"
                 "\"hc_sinkhorn_iters\": 20, \"hc_eps\": 1e-6, \"rms_norm_eps\": 1e-5,"
                 "\"max_position_embeddings\": 1048576, \"eos_token_id\": [154820, 154827, 154829],"
                 "\"linear_attn_config\": {\"num_heads\": 64, \"head_dim\": 128,"
                 "\"short_conv_kernel_size\": 4, \"gate_lower_bound\": -5.0}}}");
    if (model_config_parse(s.text, s.bytes, &c, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    double billions = (double)weights_parameters(&c) / 1e9;
    assert_true(billions > 312.06 + 1.27 - 0.02 && billions < 312.06 + 1.27 + 0.02);
    str_fini(&s);
}

static void test_not_json(void **state)
{
    (void)state;
    static const char *const texts[] = {"",
                                        "[]",
                                        "{",
                                        "null",
                                        "{\"model_type\": 3}",
                                        "{\"model_type\": \"glm5_next\", \"text_config\": []}"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        struct model_config c;
        struct err_detail detail = {{0}};
        assert_true(model_config_parse(texts[i], strlen(texts[i]), &c, &detail) != ERR_OK);
        assert_non_null(strstr(detail.text, "config.json"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_absent_structural), cmocka_unit_test(test_published_counts),
        cmocka_unit_test(test_not_json)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
