/* SPDX-License-Identifier: Apache-2.0 */
/* What loading refuses, by name, and what it says about a model. */
#include "tests/model/harness.h"

#include <sys/stat.h>
#include <unistd.h>

#define RANDOM_DIR "tests/golden/model-random"
#define DEMO_DIR   "tests/golden/tiny-glm"

static char directory[] = "/tmp/test_model_load_XXXXXX";

static char *read_all(const char *path, size_t *ret_bytes)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        fail_msg("cannot open %s", path);
    struct stat st;
    assert_int_equal(fstat(fileno(f), &st), 0);
    char *text = malloc((size_t)st.st_size + 1);
    assert_non_null(text);
    *ret_bytes = fread(text, 1, (size_t)st.st_size, f);
    assert_int_equal(*ret_bytes, st.st_size);
    text[*ret_bytes] = 0;
    fclose(f);
    return text;
}

static void write_file(const char *name, const char *text, size_t bytes)
{
    char path[1200];
    snprintf(path, sizeof(path), "%s/%s", directory, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

/* A copy of the random model with `from` overwritten by `to` (no longer) in the named file. */
static void make_copy(const char *edited_file, const char *from, const char *to)
{
    static const char *const names[] = {"config.json", "model.safetensors"};
    for (int i = 0; i < 2; i++) {
        char path[1200], below[256];
        size_t bytes = 0;
        snprintf(below, sizeof(below), RANDOM_DIR "/%s", names[i]);
        test_path(path, sizeof(path), below);
        char *text = read_all(path, &bytes);
        if (edited_file != NULL && strcmp(edited_file, names[i]) == 0) {
            char *at = memmem(text, bytes, from, strlen(from));
            if (at == NULL)
                fail_msg("%s holds no %s", names[i], from);
            assert_true(strlen(to) <= strlen(from));
            memset(at, ' ', strlen(from));
            memcpy(at, to, strlen(to));
        }
        write_file(names[i], text, bytes);
        free(text);
    }
}

static enum err load(struct model **m, struct err_detail *detail)
{
    struct model_options options = {.directory = directory, .threads = 1};
    return model_load(&options, m, detail);
}

/* Where in model.safetensors the tensor's data begin. */
static size_t place_of(const char *text, size_t bytes, const char *tensor)
{
    char key[256];
    uint64_t header = 0;
    snprintf(key, sizeof(key), "\"%s\":", tensor);
    const char *at = memmem(text, bytes, key, strlen(key));
    if (at == NULL)
        fail_msg("no tensor %s", tensor);
    at = strstr(at, "data_offsets");
    assert_non_null(at);
    memcpy(&header, text, 8);
    return 8 + header + strtoull(strchr(at, '[') + 1, NULL, 10);
}

/* Values of every kind of plain tensor: vectors, parameters without a linear, plain matrices. */
static void test_values_that_are_no_numbers(void **state)
{
    (void)state;
    static const char *const names[] = {"model.language_model.norm.weight",
                                        "model.language_model.layers.1.input_layernorm.weight",
                                        "model.language_model.layers.0.hc_ffn_base",
                                        "model.language_model.layers.0.hc_attn_fn",
                                        "model.language_model.layers.0.self_attn.A_log",
                                        "model.language_model.layers.0.self_attn.q_conv1d.weight",
                                        "model.language_model.layers.0.self_attn.q_proj.weight",
                                        "model.language_model.layers.2.mlp.gate.weight",
                                        "model.language_model.embed_tokens.weight",
                                        "lm_head.weight"};
    static const uint16_t values[] = {0x7fc0, 0x7f80, 0xff80}; /* the high half of NaN, inf, -inf */
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct model *m = NULL;
        struct err_detail detail = {{0}};
        char path[1200];
        size_t bytes = 0;
        make_copy(NULL, NULL, NULL);
        snprintf(path, sizeof(path), "%s/model.safetensors", directory);
        char *text = read_all(path, &bytes);
        memcpy(text + place_of(text, bytes, names[i]) + 2, &values[i % 3], 2);
        write_file("model.safetensors", text, bytes);
        free(text);
        enum err e = load(&m, &detail);
        assert_null(m);
        if (e == ERR_OK || strstr(detail.text, names[i]) == NULL ||
            strstr(detail.text, "not finite at [") == NULL)
            fail_msg("%s: %s", names[i], detail.text);
    }
}

static void refuse(const char *file, const char *from, const char *to, enum err want,
                   const char *named)
{
    struct model *m = NULL;
    struct err_detail detail = {{0}};
    make_copy(file, from, to);
    enum err e = load(&m, &detail);
    assert_null(m);
    if (e != want || strstr(detail.text, named) == NULL)
        fail_msg("%s: %s: \"%s\", expected %s with \"%s\"", to, err_name(e), detail.text,
                 err_name(want), named);
}

static void test_refusals(void **state)
{
    (void)state;
    const char *tensors = "model.safetensors";
    refuse(tensors, "\"lm_head.weight\"", "\"lm_head.weighs\"", ERR_INVALID, "lm_head.weight");
    refuse(tensors, "layers.2.mlp.experts.3.up_proj.weight",
           "layers.2.mlp.experts.9.up_proj.weight", ERR_INVALID,
           "layers.2.mlp.experts.3.up_proj.weight");
    refuse(tensors, "layers.0.self_attn.A_log", "layers.0.self_attn.B_log", ERR_INVALID, "A_log");
    refuse(tensors, "\"model.language_model.layers.8.enorm.weight\"",
           "\"model.language_model.layers.9.enorm.weight\"", ERR_INVALID, "layers.9.enorm.weight");
    refuse(tensors, "[24,512]", "[512,24]", ERR_INVALID, "hc_attn_fn");
    refuse(tensors, "\"BF16\"", "\"I16\"", ERR_UNSUPPORTED, "I16");
    refuse("config.json", "\"hidden_size\": 128", "\"hidden_size\": 129", ERR_INVALID, "shape");
    refuse("config.json", "\"num_attention_heads\": 4,", "\"num_attention_heads\":10,",
           ERR_UNSUPPORTED, "num_key_value_heads");
}

static void test_vision_and_mtp_are_left_alone(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct err_detail detail = {{0}};
    make_copy("model.safetensors", "\"model.language_model.layers.8.enorm.weight\"",
              "\"model.visual.norm.weight\"");
    if (load(&m, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    model_destroy(&m);
    assert_null(m);
}

static void test_tokenizer(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct err_detail detail = {{0}};
    make_copy(NULL, NULL, NULL);
    static const char good[] = "{\"model\": {\"vocab\": {\"a\": 0, \"b\": 5}}, \"added_tokens\": "
                               "[{\"id\": 9, \"content\": \"<|assistant|>\"}]}";
    write_file("tokenizer.json", good, sizeof(good) - 1);
    assert_int_equal(load(&m, &detail), ERR_OK);
    const struct model_info *info = model_info(m);
    for (uint32_t v = 0; v < info->vocab_size; v++)
        assert_int_equal(info->has_token[v], v == 0 || v == 5 || v == 9);
    assert_int_equal(info->stop_id_count, 4);
    assert_int_equal(info->stop_ids[3], 9);
    model_destroy(&m);
    static const char *const bad[] = {"{\"model\": {\"vocab\": {\"a\": 1024}}}",
                                      "{\"model\": {\"vocab\": {\"a\": -1}}}",
                                      "{\"model\": {\"vocab\": {}}}",
                                      "{\"model\": 3}",
                                      "[",
                                      ""};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_file("tokenizer.json", bad[i], strlen(bad[i]));
        assert_true(load(&m, &detail) != ERR_OK);
        assert_non_null(strstr(detail.text, "tokenizer.json"));
    }
    char path[1200];
    snprintf(path, sizeof(path), "%s/tokenizer.json", directory);
    unlink(path);
}

static void test_missing_files(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct err_detail detail = {{0}};
    char path[1200];
    make_copy(NULL, NULL, NULL);
    snprintf(path, sizeof(path), "%s/model.safetensors", directory);
    unlink(path);
    assert_int_equal(load(&m, &detail), ERR_NOT_FOUND);
    assert_non_null(strstr(detail.text, "model.safetensors"));
    snprintf(path, sizeof(path), "%s/config.json", directory);
    unlink(path);
    assert_int_equal(load(&m, &detail), ERR_NOT_FOUND);
    assert_non_null(strstr(detail.text, "config.json"));
}

/* The fingerprint moves with a value, a name, the config or the chat template. */
/* Called between two tensors: the file loses what has not been read yet. */
static void cut_file(void *arg, uint64_t done, uint64_t total)
{
    uint64_t *calls = arg;
    char path[1200];
    struct stat st;
    snprintf(path, sizeof(path), "%s/model.safetensors", directory);
    if ((*calls)++ > 0)
        return;
    assert_true(done > 0 && done < total);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size - (off_t)(total - done)), 0);
}

static void test_file_that_gets_shorter(void **state)
{
    (void)state;
    uint64_t calls = 0;
    struct model *m = NULL;
    struct err_detail detail = {{0}};
    make_copy(NULL, NULL, NULL);
    struct model_options options = {
        .directory = directory, .threads = 1, .progress = cut_file, .progress_arg = &calls};
    assert_int_equal(model_load(&options, &m, &detail), ERR_IO);
    assert_null(m);
    assert_true(calls >= 1);
    assert_non_null(strstr(detail.text, "model.safetensors: tensor \""));
    assert_non_null(strstr(detail.text, "cannot be read to its end"));
}

static void test_fingerprint(void **state)
{
    (void)state;
    struct hash128 fp[5], weights[5];
    char path[512];
    struct err_detail detail = {{0}};
    for (int i = 0; i < 5; i++) {
        struct model *m = NULL;
        if (i == 2)
            make_copy("config.json", "\"torch_dtype\": \"bfloat16\"",
                      "\"torch_dtype\": \"bfloat17\"");
        else if (i == 3)
            make_copy("model.safetensors", "layers.8.enorm.weight", "layers.8.anorm.weight");
        else
            make_copy(NULL, NULL, NULL);
        snprintf(path, sizeof(path), "%s/chat_template.jinja", directory);
        FILE *f = i == 4 ? fopen(path, "w") : NULL;
        if (f != NULL) {
            assert_true(fputs("{{ messages }}", f) >= 0);
            fclose(f);
        }
        assert_int_equal(load(&m, &detail), ERR_OK);
        unlink(path);
        fp[i] = model_info(m)->model_fp;
        weights[i] = model_info(m)->weights_fp;
        model_destroy(&m);
    }
    assert_memory_equal(&fp[0], &fp[1], sizeof(fp[0]));
    assert_memory_not_equal(&fp[0], &fp[2], sizeof(fp[0]));
    assert_memory_not_equal(&fp[0], &fp[3], sizeof(fp[0]));
    assert_memory_not_equal(&fp[2], &fp[3], sizeof(fp[0]));
    assert_memory_not_equal(&fp[0], &fp[4], sizeof(fp[0])); /* the chat template counts, too */
    assert_memory_equal(&weights[0], &weights[2], sizeof(fp[0])); /* texts are no weights */
    assert_memory_equal(&weights[0], &weights[4], sizeof(fp[0]));
    assert_memory_not_equal(&weights[0], &weights[3], sizeof(fp[0]));
}

static void test_info(void **state)
{
    (void)state;
    struct model *m = test_model(DEMO_DIR, 1);
    const struct model_info *info = model_info(m);
    assert_int_equal(info->vocab_size, 1024);
    assert_int_equal(info->layer_count, 8);
    assert_int_equal(info->dsa_layers, 2);
    assert_int_equal(info->context_max, 1048576);
    assert_int_equal(info->latent_dim, 128);
    assert_int_equal(info->index_dim, 32);
    assert_int_equal(info->index_kpool, 4);
    assert_int_equal(info->state_bytes % 64, 0);
    assert_string_equal(info->quantization, "bf16, 5.3 M parameters");
    uint32_t tokens = 0;
    for (uint32_t v = 0; v < info->vocab_size; v++)
        tokens += info->has_token[v];
    assert_int_equal(tokens, 1012);
    static const uint32_t stops[] = {976, 983, 985, 984};
    assert_int_equal(info->stop_id_count, 4);
    assert_memory_equal(info->stop_ids, stops, sizeof(stops));
    model_destroy(&m);
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(directory) != NULL ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors", "tokenizer.json"};
    for (int i = 0; i < 3; i++) {
        char path[1200];
        snprintf(path, sizeof(path), "%s/%s", directory, names[i]);
        unlink(path);
    }
    return rmdir(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_vision_and_mtp_are_left_alone),
                                       cmocka_unit_test(test_values_that_are_no_numbers),
                                       cmocka_unit_test(test_tokenizer),
                                       cmocka_unit_test(test_missing_files),
                                       cmocka_unit_test(test_file_that_gets_shorter),
                                       cmocka_unit_test(test_fingerprint),
                                       cmocka_unit_test(test_info)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
