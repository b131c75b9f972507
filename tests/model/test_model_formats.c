/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint whose linears are stored in every format: bound to the model, computed exactly with
 * the decoded values, fast within its bounds, the same alone and in any batch; refused by name. */
#include "tests/model/checkpoint.h"

#include <math.h>

#define SOURCE "tests/golden/tiny-glm"
#define TOKENS 300
#define BLOCK  64

static char work[] = "/tmp/test_model_formats_XXXXXX";
static uint32_t vocab, ids[TOKENS];

/* Every row format in some place, but no EXL3. */
static enum made_format rule_rows(const char *name)
{
    if (name_has(name, "layers.8.") || !name_has(name, ".weight"))
        return MADE_SAME;
    if (name_has(name, "embed_tokens"))
        return MADE_MXFP8;
    if (name_has(name, "lm_head"))
        return MADE_NVFP4;
    if (name_has(name, ".kv_b_proj") || name_has(name, ".o_proj"))
        return MADE_FP8_BLOCK;
    if (name_has(name, ".q_proj") || name_has(name, ".q_a_proj") || name_has(name, ".mlp.gate."))
        return MADE_FP8_CHANNEL;
    if (name_has(name, ".v_proj") || name_has(name, ".wq_b"))
        return MADE_FP8_TENSOR;
    if (name_has(name, "up_proj"))
        return MADE_MXFP8;
    if (name_has(name, "down_proj"))
        return MADE_NVFP4_CT;
    return name_has(name, "gate_proj") ? MADE_NVFP4 : MADE_SAME;
}

/* As people have it: routed experts in EXL3, the rest in others. */
static enum made_format rule_mixed(const char *name)
{
    if (name_has(name, "layers.8.") || !name_has(name, ".weight"))
        return MADE_SAME;
    if (name_has(name, ".mlp.experts.3.")) /* of one layer's experts, one by one */
        return MADE_MXFP8;
    if (name_has(name, ".mlp.experts.") || name_has(name, ".kv_b_proj"))
        return MADE_EXL3;
    return rule_rows(name);
}

static const char *directory_of(char path[1024], const char *name)
{
    snprintf(path, 1024, "%s/%s", work, name);
    return path;
}

static struct model *load(const char *name, enum model_numerics numerics, uint32_t threads)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    struct model_options options = {
        .directory = directory_of(path, name), .numerics = numerics, .threads = threads};
    if (model_load(&options, &m, &detail) != ERR_OK)
        fail_msg("%s: %s", name, detail.text);
    return m;
}

/* Logits of all rows of one sequence that is run in slices. */
static float *run(struct model *m, uint32_t tokens, uint32_t slice)
{
    struct rng rng;
    struct test_cache t;
    uint32_t need = (tokens + BLOCK - 1) / BLOCK;
    float *out = mem_take_array((uint64_t)tokens * vocab, sizeof(float));
    rng_init(&rng, slice);
    cache_init(&t, m, BLOCK, need + 2, 1, &rng);
    struct model_cursor *c = test_cursor(m, slice, 1, tokens);
    const uint32_t *blocks = cache_take(&t, need);
    for (uint32_t at = 0; at < tokens; at += slice) {
        uint32_t count = tokens - at < slice ? tokens - at : slice;
        struct model_seq seq = {.position_start = at,
                                .row_count = count,
                                .fresh = at == 0,
                                .blocks = blocks,
                                .block_count = need};
        struct model_batch batch = {1, count, &seq, ids + at};
        model_begin(c, &t.kv, &batch);
        memcpy(out + (uint64_t)at * vocab, model_finish(c), (uint64_t)count * vocab * 4);
    }
    cache_check(&t, m);
    model_cursor_destroy(&c);
    cache_fini(&t);
    return out;
}

static double largest_difference(const float *a, const float *b, uint64_t count)
{
    double most = 0;
    for (uint64_t i = 0; i < count; i++)
        most = fmax(most, fabs((double)a[i] - b[i]));
    return most;
}

static void test_rows_are_exact(void **state)
{
    (void)state;
    struct model *stored = load("rows", MODEL_EXACT, 2), *twin = load("rows_twin", MODEL_EXACT, 2);
    float *a = run(stored, 100, 50), *b = run(twin, 100, 50);
    assert_memory_equal(a, b, 100ull * vocab * sizeof(float));
    mem_give(a);
    mem_give(b);
    model_destroy(&stored);
    model_destroy(&twin);
}

/* EXL3 multiplies rotated inputs by the code book's values: the same sums in another order. */
static void test_mixed_is_exact(void **state)
{
    (void)state;
    struct model *stored = load("mixed", MODEL_EXACT, 2),
                 *twin = load("mixed_twin", MODEL_EXACT, 2);
    float *a = run(stored, 100, 50), *b = run(twin, 100, 50), *c = run(stored, 100, 7);
    double most = largest_difference(a, b, 100ull * vocab);
    print_message("mixed against its decoded twin: largest logit difference %.3g\n", most);
    assert_true(most < 2e-4);
    assert_memory_equal(a, c, 100ull * vocab * sizeof(float)); /* whatever the slices */
    mem_give(a);
    mem_give(b);
    mem_give(c);
    model_destroy(&stored);
    model_destroy(&twin);
}

static void test_fast_is_close(void **state)
{
    (void)state;
    struct model *exact = load("mixed", MODEL_EXACT, 2), *fast = load("mixed", MODEL_FAST, 2);
    float *want = run(exact, TOKENS, 100), *have = run(fast, TOKENS, 256);
    double kld = 0;
    uint32_t same = 0;
    for (uint32_t r = 0; r < TOKENS; r++) {
        const float *w = want + (uint64_t)r * vocab, *h = have + (uint64_t)r * vocab;
        uint32_t top_w = 0, top_h = 0;
        double sum_w = 0, sum_h = 0;
        for (uint32_t v = 0; v < vocab; v++) {
            top_w = w[v] > w[top_w] ? v : top_w;
            top_h = h[v] > h[top_h] ? v : top_h;
        }
        for (uint32_t v = 0; v < vocab; v++) {
            sum_w += exp((double)w[v] - w[top_w]);
            sum_h += exp((double)h[v] - h[top_h]);
        }
        double log_w = log(sum_w) + w[top_w], log_h = log(sum_h) + h[top_h];
        for (uint32_t v = 0; v < vocab; v++)
            kld += exp(w[v] - log_w) * ((w[v] - log_w) - (h[v] - log_h));
        same += top_w == top_h;
    }
    print_message("fast against exact: top-1 %u of %u, mean KLD %.3g\n", same, TOKENS,
                  kld / TOKENS);
    assert_true(same * 1000ull >= TOKENS * 995ull);
    assert_true(kld / TOKENS <= 1e-4);
    mem_give(want);
    mem_give(have);
    model_destroy(&exact);
    model_destroy(&fast);
}

static void test_fast_slices(void **state)
{
    (void)state;
    struct model *one = load("mixed", MODEL_FAST, 1), *three = load("mixed", MODEL_FAST, 3);
    static const uint32_t slices[] = {64, 128, 192, 256};
    float *want = run(one, TOKENS, 320);
    for (size_t i = 0; i < sizeof(slices) / sizeof(slices[0]); i++) {
        float *have = run(i % 2 == 0 ? three : one, TOKENS, slices[i]);
        assert_memory_equal(have, want, (uint64_t)TOKENS * vocab * sizeof(float));
        mem_give(have);
    }
    mem_give(want);
    model_destroy(&one);
    model_destroy(&three);
}

/* The watched sequence decodes the same tokens alone and among others. */
static void batch_equals_alone(enum model_numerics numerics)
{
    enum { SEQS = 3, STEPS = 6, FIRST = 64 };
    struct rng rng;
    struct test_cache t;
    struct model *m = load("mixed", numerics, 2);
    rng_init(&rng, 4);
    cache_init(&t, m, BLOCK, SEQS * 4, SEQS, &rng);
    struct model_cursor *c = test_cursor(m, FIRST * SEQS, SEQS, BLOCK * 4);
    const uint32_t *blocks[SEQS];
    float *alone = mem_take_array((uint64_t)(STEPS + 1) * vocab, sizeof(float));
    for (uint32_t s = 0; s < SEQS; s++)
        blocks[s] = cache_take(&t, 4);
    for (uint32_t count = 1; count <= SEQS; count += SEQS - 1) {
        uint32_t at[SEQS] = {0};
        for (uint32_t step = 0; step <= STEPS; step++) {
            struct model_seq seqs[SEQS];
            uint32_t rows[FIRST * SEQS], row_count = 0;
            for (uint32_t s = 0; s < count; s++) {
                uint32_t own = s == 0 ? (step == 0 ? FIRST : 1) : 1 + rng_below(&rng, 9);
                seqs[s] = (struct model_seq){.state_slot = s,
                                             .position_start = at[s],
                                             .row_count = own,
                                             .fresh = at[s] == 0,
                                             .logits_from = own - 1,
                                             .blocks = blocks[s],
                                             .block_count = 4};
                for (uint32_t r = 0; r < own; r++)
                    rows[row_count++] = s == 0 ? ids[at[0] + r] : rng_below(&rng, vocab);
                at[s] += own;
            }
            struct model_batch batch = {count, row_count, seqs, rows};
            model_begin(c, &t.kv, &batch);
            const float *logits = model_finish(c);
            if (count == 1)
                memcpy(alone + (uint64_t)step * vocab, logits, vocab * sizeof(float));
            else if (memcmp(alone + (uint64_t)step * vocab, logits, vocab * sizeof(float)) != 0)
                fail_msg("numerics %d, step %u: other logits in a batch", (int)numerics, step);
        }
    }
    cache_check(&t, m);
    mem_give(alone);
    model_cursor_destroy(&c);
    cache_fini(&t);
    model_destroy(&m);
}

static void test_batch(void **state)
{
    (void)state;
    batch_equals_alone(MODEL_EXACT);
    batch_equals_alone(MODEL_FAST);
}

/* ---- what it says of itself ---- */

static void write_text(const char *directory, const char *name, const char *text)
{
    char path[1200];
    snprintf(path, sizeof(path), "%s/%s", directory, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

/* Loads the mixed checkpoint by another name, with another announcement. */
static void check_warnings(const char *name, const char *hf_quant_config, const char *want)
{
    char path[1024], other[1100], file[1200];
    directory_of(path, "mixed");
    snprintf(other, sizeof(other), "%s/%s", work, name);
    assert_int_equal(rename(path, other), 0);
    if (hf_quant_config != NULL)
        write_text(other, "hf_quant_config.json", hf_quant_config);
    struct model *m = load(name, MODEL_FAST, 1);
    if (strcmp(model_info(m)->warnings, want) != 0)
        fail_msg("%s: \"%s\", expected \"%s\"", name, model_info(m)->warnings, want);
    model_destroy(&m);
    snprintf(file, sizeof(file), "%s/hf_quant_config.json", other);
    unlink(file);
    assert_int_equal(rename(other, path), 0);
}

static void test_says_what_it_is(void **state)
{
    (void)state;
    struct model *mixed = load("mixed", MODEL_FAST, 1), *rows = load("rows", MODEL_FAST, 1);
    print_message("%s\n%s\n", model_info(mixed)->quantization, model_info(rows)->quantization);
    /* Experts of the MTP layers stay bf16 in the copies, and count. */
    assert_non_null(strstr(model_info(mixed)->quantization,
                           "exl3-mcg 4.00 bpw + bf16 + mxfp8 (routed experts) + "));
    assert_non_null(strstr(model_info(mixed)->quantization, " (rest), "));
    assert_null(strstr(model_info(rows)->quantization, "exl3"));
    assert_string_equal(model_info(mixed)->warnings, "");
    assert_string_equal(model_info(rows)->warnings, "");
    model_destroy(&mixed);
    model_destroy(&rows);
    check_warnings("GLM-EXL3-4.0bpw", NULL, "");
    check_warnings("GLM-mxfp4_bf16", NULL, "the directory's name says mxfp4, but no tensor is so");
    check_warnings("exl3-2.5bpw", NULL,
                   "the directory's name says 2.50 bits a weight, the EXL3 tensors have 4.00");
    check_warnings("fp8x.nvfp4", "{\"quantization\": {\"quant_algo\": \"MIXED_PRECISION\"}}", "");
    check_warnings("plain", "{\"quantization\": {\"quant_algo\": \"W9\"}}",
                   "the config announces a quantisation that is not known");
    char path[1024];
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    write_text(directory_of(path, "mixed"), "hf_quant_config.json",
               "{\"quantization\": {\"quant_algo\": \"NVFP4\"}}");
    struct model_options options = {.directory = path, .threads = 1};
    assert_int_equal(model_load(&options, &m, &detail), ERR_OK);
    const char *says = "the config announces nvfp4_modelopt, but ";
    if (strncmp(model_info(m)->warnings, says, strlen(says)) != 0)
        fail_msg("%s", model_info(m)->warnings);
    model_destroy(&m);
    strcat(path, "/hf_quant_config.json");
    unlink(path);
}

/* ---- refusals ---- */

/* Overwrites `bytes` at an offset of the tensor's data, loads, restores. */
static void refuse_value_in(const char *name, const char *tensor, uint64_t offset,
                            const void *value, size_t bytes, const char *named)
{
    char path[1024], below[1100];
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    uint8_t old[8];
    snprintf(below, sizeof(below), "%s/model.safetensors", directory_of(path, name));
    assert_int_equal(safetensors_open_file(below, &set, &detail), ERR_OK);
    const struct safetensors_tensor *t = safetensors_find(set, tensor);
    if (t == NULL)
        fail_msg("no %s", tensor);
    assert_true(bytes <= sizeof(old) && offset + bytes <= t->bytes);
    memcpy(old, t->data + offset, bytes);
    FILE *f = fopen(below, "r+b");
    assert_non_null(f);
    long at = -1;
    uint64_t header = 0;
    assert_int_equal(fread(&header, 8, 1, f), 1);
    char *text = malloc(header + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, header, f), header);
    text[header] = 0;
    char key[300];
    snprintf(key, sizeof(key), "\"%s\":", tensor);
    const char *entry = strstr(text, key);
    assert_non_null(entry);
    at = (long)(8 + header + strtoull(strstr(entry, "offsets\":[") + 10, NULL, 10) + offset);
    free(text);
    safetensors_close(&set);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    assert_int_equal(fwrite(value, 1, bytes, f), bytes);
    fflush(f);
    struct model *m = NULL;
    struct model_options options = {.directory = path, .threads = 2};
    enum err e = model_load(&options, &m, &detail);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    assert_int_equal(fwrite(old, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
    if (e != ERR_CORRUPT || strstr(detail.text, named) == NULL)
        fail_msg("%s: %s: \"%s\", expected \"%s\"", tensor, err_name(e), detail.text, named);
    assert_null(m);
}

static void refuse_value(const char *tensor, uint64_t offset, const void *value, size_t bytes,
                         const char *named)
{
    refuse_value_in("rows", tensor, offset, value, bytes, named);
}

static void test_bad_values(void **state)
{
    (void)state;
#define LAYER "model.language_model.layers."
    static const uint8_t nan8 = 0x7f, e8m0_nan = 0xff, negative = 0xb8, huge[2] = {0x80, 0x7f};
    static const float none = 0;
    static const float infinite = INFINITY;
    refuse_value(LAYER "0.self_attn.o_proj.weight", 77, &nan8, 1, "o_proj.weight");
    refuse_value("model.language_model.embed_tokens.weight_scale", 5, &e8m0_nan, 1,
                 "embed_tokens.weight_scale");
    refuse_value(LAYER "2.mlp.experts.1.down_proj.weight_scale", 3, &negative, 1,
                 "experts.1.down_proj.weight_scale");
    refuse_value("lm_head.weight_scale_2", 0, &none, 4, "lm_head.weight_scale_2");
    refuse_value(LAYER "0.self_attn.o_proj.weight_scale_inv", 0, &infinite, 4, "weight_scale_inv");
    refuse_value(LAYER "0.self_attn.k_proj.weight", 10, huge, 2, "k_proj.weight");
    refuse_value(LAYER "3.self_attn.indexer.index_kpool_compress_gate", 0, huge, 2,
                 "index_kpool_compress_gate");
    refuse_value(LAYER "3.input_layernorm.weight", 2, huge, 2, "layers.3.input_layernorm.weight");
    struct model *m = load("rows", MODEL_FAST, 1); /* all is as before */
    model_destroy(&m);
    static const uint8_t infinite16[2] = {0x00, 0xfc};
#define EXPERT LAYER "2.mlp.experts.1.up_proj."
    refuse_value_in("mixed", EXPERT "suh", 6, infinite16, 2, "up_proj.suh: not finite at [3]");
    refuse_value_in("mixed", EXPERT "svh", 2, infinite16, 2, "up_proj.svh: not finite at [1]");
}

/* Renames in the header (same length), loads, restores. */
static void refuse_header(const char *from, const char *to, enum err want, const char *named)
{
    char path[1024], below[1100];
    snprintf(below, sizeof(below), "%s/model.safetensors", directory_of(path, "rows"));
    FILE *f = fopen(below, "r+b");
    assert_non_null(f);
    uint64_t header = 0;
    assert_int_equal(fread(&header, 8, 1, f), 1);
    char *text = malloc(header + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, header, f), header);
    text[header] = 0;
    const char *at = strstr(text, from);
    if (at == NULL)
        fail_msg("header has no %s", from);
    assert_int_equal(strlen(from), strlen(to));
    assert_int_equal(fseek(f, 8 + (at - text), SEEK_SET), 0);
    assert_int_equal(fwrite(to, 1, strlen(to), f), strlen(to));
    fflush(f);
    struct model *m = NULL;
    struct err_detail detail = {{0}};
    struct model_options options = {.directory = path, .threads = 1};
    enum err e = model_load(&options, &m, &detail);
    assert_int_equal(fseek(f, 8 + (at - text), SEEK_SET), 0);
    assert_int_equal(fwrite(from, 1, strlen(from), f), strlen(from));
    assert_int_equal(fclose(f), 0);
    free(text);
    if (e != want || strstr(detail.text, named) == NULL)
        fail_msg("%s: %s: \"%s\", expected %s with \"%s\"", to, err_name(e), detail.text,
                 err_name(want), named);
    assert_null(m);
}

static void test_bad_headers(void **state)
{
    (void)state;
    refuse_header("1.mlp.experts.2.up_proj.weight_scale", "1.mlp.experts.2.up_proj.weight_skale",
                  ERR_INVALID, "experts.2.up_proj.weight");
    refuse_header("5.self_attn.q_proj.weight_scale", "5.self_attn.q_proj.weight_SCALE", ERR_INVALID,
                  "q_proj");
    refuse_header("1.mlp.experts.2.up_proj.weight\"", "1.mlp.experts.2.up_proj.weighd\"",
                  ERR_INVALID, "experts.2.up_proj");
    refuse_header("7.self_attn.o_proj.weight_scale_inv", "7.self_attn.o_proj.weight_scale_abc",
                  ERR_INVALID, "o_proj");
    refuse_header("\"F8_E4M3\"", "\"F8_E5M2\"", ERR_INVALID, "F8_E5M2");
}

static int setup(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        made_rule rule;
        bool twin;
    } made[] = {{"rows", rule_rows, false},
                {"rows_twin", rule_rows, true},
                {"mixed", rule_mixed, false},
                {"mixed_twin", rule_mixed, true}};
    if (mkdtemp(work) == NULL)
        return -1;
    for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); i++) {
        char path[1024];
        if (mkdir(directory_of(path, made[i].name), 0700) != 0)
            return -1;
        made_checkpoint(SOURCE, path, made[i].rule, made[i].twin);
    }
    struct rng rng;
    struct model *m = load("rows", MODEL_FAST, 1);
    vocab = model_info(m)->vocab_size;
    model_destroy(&m);
    rng_init(&rng, 21);
    for (uint32_t i = 0; i < TOKENS; i++)
        ids[i] = rng_below(&rng, vocab);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"rows", "rows_twin", "mixed", "mixed_twin"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[1024];
        made_remove(directory_of(path, names[i]));
    }
    return rmdir(work);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_exact), cmocka_unit_test(test_mixed_is_exact),
        cmocka_unit_test(test_fast_is_close),  cmocka_unit_test(test_fast_slices),
        cmocka_unit_test(test_batch),          cmocka_unit_test(test_says_what_it_is),
        cmocka_unit_test(test_bad_values),     cmocka_unit_test(test_bad_headers)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
