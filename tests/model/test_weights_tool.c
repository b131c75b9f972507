/* SPDX-License-Identifier: Apache-2.0 */
/* tandem-model inspect, manifest, verify, archive, synth, compare: as a user runs them. */
#include "tests/model/tool_run.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "tests/model/golden_formats.h"

#define BF16_MODEL "tests/golden/tiny-glm"

static char scratch[256];

static int start(void **state)
{
    (void)state;
    scratch_init(scratch);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    scratch_fini(scratch);
    return 0;
}

static void shell(const char *format, ...)
{
    char command[4096];
    va_list values;
    va_start(values, format);
    vsnprintf(command, sizeof(command), format, values);
    va_end(values);
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    assert_int_equal(chdir(root), 0);
    if (system(command) != 0)
        fail_msg("%s", command);
}

static void flip(const char *path, long at)
{
    int fd = open(path, O_RDWR);
    uint8_t byte;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void poke(const char *path, long at, char value)
{
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, &value, 1, at), 1);
    close(fd);
}

/* Where the data of a safetensors file begin. */
static long header_end(const char *path)
{
    uint64_t bytes = 0;
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(&bytes, 8, 1, f), 1);
    fclose(f);
    return (long)bytes + 8;
}

/* ---- inspect ---- */

/* Every linear of a fixture stands there with its sizes and its format. */
static void check_fixture(const char *name, bool exl3)
{
    char file[64];
    snprintf(file, sizeof(file), "%s.json", name);
    const struct json *root = golden_json(file);
    const char *text = tool(0, "inspect tests/golden/formats/%s.safetensors", name);
    GOLDEN_EACH(linear, json_get(root, "linears"))
    {
        char line[512], title[64];
        if (exl3)
            snprintf(title, sizeof(title), "exl3-%s %.2f bpw", text_of(linear, "codebook"),
                     number_of(linear, "K"));
        else
            snprintf(title, sizeof(title), "%s", text_of(linear, "format"));
        snprintf(line, sizeof(line), "linear: %s [%u, %u] %s", text_of(linear, "name"),
                 u32_of(linear, exl3 ? "out_padded" : "out"),
                 u32_of(linear, exl3 ? "in_padded" : "in"), title);
        if (strstr(text, line) == NULL)
            fail_msg("\"%s\" not in: %s", line, text);
    }
}

static void test_inspect_fixtures(void **state)
{
    (void)state;
    static const char *const names[] = {"nvfp4_modelopt", "nvfp4_ct",    "mxfp8", "fp8_block",
                                        "fp8_tensor",     "fp8_channel", "bf16",  "f16"};
    check_fixture("exl3", true);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        check_fixture(names[i], false);
    assert_non_null(strstr(tool(0, "inspect tests/golden/formats/quantizer.safetensors"),
                           "example.k6 [256, 256] exl3-mcg 6.00 bpw"));
}

static void test_inspect_edges(void **state)
{
    (void)state;
    const struct json *root = golden_json("edge.json");
    const char *text = tool(1, "inspect tests/golden/formats/edge.safetensors");
    uint32_t refused = 0;
    char line[512];
    GOLDEN_EACH(linear, json_get(root, "linears"))
    {
        const struct json *refuse = json_get(linear, "refuse");
        snprintf(line, sizeof(line), "linear: %s ", text_of(linear, "name"));
        const char *at = strstr(text, line);
        if (at == NULL)
            fail_msg("%s", line);
        const char *end = strchr(at, '\n'), *word = strstr(at, "refused: ");
        bool said = word != NULL && word < end;
        if (said != (json_is(refuse, JSON_OBJECT)))
            fail_msg("%s: refused %d", line, said);
        if (said) {
            refused++;
            snprintf(line, sizeof(line), "refused: %s: %s", text_of(refuse, "class"),
                     text_of(refuse, "tensor"));
            assert_true(strncmp(word, line, strlen(line)) == 0);
        }
    }
    snprintf(line, sizeof(line), "refused: %u linears", refused);
    assert_non_null(strstr(text, line));
}

static bool names_class(const char *text, const struct json *bad)
{
    char word[64];
    snprintf(word, sizeof(word), "%s:", text_of(bad, "expect"));
    if (strstr(text, word) != NULL)
        return true;
    GOLDEN_EACH(also, json_get(bad, "also"))
    {
        snprintf(word, sizeof(word), "%s:", string_of(also));
        if (strstr(text, word) != NULL)
            return true;
    }
    return false;
}

static void test_inspect_bad_files(void **state)
{
    (void)state;
    const struct json *root = golden_json("bad.json");
    static const char *const lists[][2] = {{"files", "file"}, {"sharded", "dir"}};
    uint32_t refused = 0, taken = 0;
    for (int i = 0; i < 2; i++)
        GOLDEN_EACH(bad, json_get(root, lists[i][0]))
        {
            const char *path = text_of(bad, lists[i][1]);
            bool also_ok = false;
            GOLDEN_EACH(also, json_get(bad, "also"))
            also_ok = also_ok || json_string_is(also, "ok");
            if (strcmp(text_of(bad, "expect"), "ok") == 0) {
                tool(0, "inspect tests/golden/formats/%s", path);
                taken++;
            } else if (!also_ok) {
                const char *text = tool(2, "inspect tests/golden/formats/%s", path);
                if (!names_class(text, bad))
                    fail_msg("%s: %s", path, text);
                refused++;
            }
        }
    assert_true(taken > 10 && refused > 100);
}

/* Sizes of nothing: refused by name, by every command that looks at linears. */
static void test_empty_linears(void **state)
{
    (void)state;
    static const struct {
        const char *header, *why;
    } cases[] = {
        {"\"weight\":{\"dtype\":\"BF16\",\"shape\":[0,64],", "weight: makes a linear of [0, 64]"},
        {"\"weight\":{\"dtype\":\"BF16\",\"shape\":[64,0],", "weight: makes a linear of [64, 0]"},
        {"\"weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[0],", "weight: makes a linear of [0, 1]"},
        {"\"weight_packed\":{\"dtype\":\"U8\",\"shape\":[4,0],",
         "weight_packed: makes a linear of [4, 0]"},
        {"\"trellis\":{\"dtype\":\"I16\",\"shape\":[8,0,64],",
         "trellis: makes a linear of [0, 128]"},
        {"\"rank1.trellis\":{\"dtype\":\"I16\",\"shape\":[0,8,64],",
         "rank1.trellis: makes a linear of [128, 0]"},
    };
    shell("mkdir -p %s/empty && echo '{}' > %s/empty/config.json", scratch, scratch);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char path[400], header[400], line[400];
        snprintf(path, sizeof(path), "%s/empty/model.safetensors", scratch);
        snprintf(header, sizeof(header),
                 "{\"model.language_model.layers.0.mlp.experts.0.up_proj.%s"
                 "\"data_offsets\":[0,0]}}",
                 cases[i].header + 1);
        uint64_t bytes = strlen(header);
        FILE *f = fopen(path, "wb");
        assert_non_null(f);
        assert_int_equal(fwrite(&bytes, 8, 1, f), 1);
        assert_int_equal(fwrite(header, 1, bytes, f), bytes);
        assert_int_equal(fclose(f), 0);
        snprintf(line, sizeof(line),
                 "refused: bad_shape: model.language_model.layers.0.mlp.experts.0.up_proj.%s\n",
                 cases[i].why);
        const char *text = tool(1, "inspect %s", path);
        if (strstr(text, line) == NULL)
            fail_msg("%s not in: %s", line, text);
        text = tool(2, "quantize %s/empty %s/empty-q --format fp8", scratch, scratch);
        if (strstr(text, line + strlen("refused: ")) == NULL)
            fail_msg("%s not in: %s", line, text);
        tool(0, "manifest %s/empty", scratch);
    }
}

static void test_warnings(void **state)
{
    (void)state;
    shell("cp -r " BF16_MODEL " %s/GLM-NVFP4-6bpw", scratch);
    const char *text = tool(0, "inspect %s/GLM-NVFP4-6bpw", scratch);
    assert_non_null(
        strstr(text, "warning: the directory's name says nvfp4, but no tensor is so\n"));
    assert_non_null(strstr(text, "warning: the directory's name says 6.00 bits a weight, "));
    shell("cp -r " BF16_MODEL " %s/tiny-bf16 && sed -i 's/^{/{\"quantization_config\": "
          "{\"quant_method\": \"exl3\", \"codebook\": \"mcg\"},/' %s/tiny-bf16/config.json",
          scratch, scratch);
    text = tool(0, "inspect %s/tiny-bf16", scratch);
    assert_non_null(strstr(text, "warning: the config announces exl3"));
    assert_null(strstr(text, "the directory"));
    /* A quantised one, and the same with a config that says something else. */
    tool(0, "quantize " BF16_MODEL " %s/q-fp8 --format fp8", scratch);
    assert_null(strstr(tool(0, "inspect %s/q-fp8", scratch), "warning: "));
    shell("cp %s/tiny-bf16/config.json %s/q-fp8/", scratch, scratch);
    text = tool(0, "inspect %s/q-fp8", scratch);
    assert_non_null(strstr(text, "warning: the config announces exl3"));
    assert_non_null(strstr(text, "(the config says otherwise)"));
}

/* ---- manifest and verify ---- */

static void test_verify(void **state)
{
    (void)state;
    char model[300], weights[400];
    struct safetensors *set = NULL;
    struct stat st;
    snprintf(model, sizeof(model), "%s/model", scratch);
    snprintf(weights, sizeof(weights), "%s/model.safetensors", model);
    shell("cp -r " BF16_MODEL " %s", model);
    assert_non_null(strstr(tool(2, "verify %s", model), "tandem-manifest.json"));
    tool(0, "manifest %s", model);
    assert_non_null(strstr(tool(0, "verify %s --threads 3", model), "ok: 5 files, "));
    assert_int_equal(stat(weights, &st), 0);
    /* One bit of the last byte: the tensor that ends there, and its file. */
    set = open_checkpoint(model);
    const struct safetensors_tensor *last = safetensors_at(set, 0);
    for (uint32_t i = 0; i < safetensors_count(set); i++)
        if (safetensors_at(set, i)->data > last->data)
            last = safetensors_at(set, i);
    char name[400];
    snprintf(name, sizeof(name), "tensor \"%s\" in model.safetensors: bytes differ\n", last->name);
    safetensors_close(&set);
    flip(weights, (long)st.st_size - 1);
    const char *text = tool(1, "verify %s", model);
    assert_non_null(strstr(text, name));
    assert_non_null(strstr(text, "file model.safetensors: sha256 differs\n"));
    flip(weights, (long)st.st_size - 1);
    tool(0, "verify %s", model);
    /* The header: its first byte ends the file as a checkpoint, its padding does not. */
    flip(weights, 8);
    assert_non_null(strstr(tool(1, "verify %s", model), "file model.safetensors: sha256 differs"));
    flip(weights, 8);
    poke(weights, header_end(weights) - 1, '\n');
    text = tool(1, "verify %s", model);
    assert_string_equal(text, "file model.safetensors: sha256 differs, outside the tensors: header "
                              "or padding\n");
    poke(weights, header_end(weights) - 1, ' ');
    snprintf(name, sizeof(name), "%s/tokenizer.json", model);
    flip(name, 1000);
    assert_non_null(strstr(tool(1, "verify %s", model), "file tokenizer.json: sha256 differs\n"));
    flip(name, 1000);
    shell("touch %s/new && mv %s/generation_config.json %s/.kept", model, model, model);
    text = tool(1, "verify %s", model);
    assert_non_null(strstr(text, "file new: not in the manifest\n"));
    assert_non_null(strstr(text, "file generation_config.json: missing\n"));
    shell("rm %s/new && mv %s/.kept %s/generation_config.json", model, model, model);
    tool(0, "verify %s", model);
    /* What it says of the whole is checked, too. */
    static const char *const lies[][2] = {
        {"quantization", "\"exl3-mcg 4.00 bpw, 5.3 M parameters\""},
        {"fingerprint", "\"00000000000000000000000000000000\""},
        {"name", "\"something better\""},
        {"licence", "\"public-domain\""},
        {"quantization", "7"},
        {"fingerprint", "null"}};
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        shell("cp %s/tandem-manifest.json %s/kept.json", model, scratch);
        shell("sed -i 's/^ \"%s\": .*,$/ \"%s\": %s,/' %s/tandem-manifest.json && "
              "! cmp -s %s/tandem-manifest.json %s/kept.json",
              lies[i][0], lies[i][0], lies[i][1], model, model, scratch);
        text = tool(1, "verify %s", model);
        snprintf(name, sizeof(name), "manifest: another %s than \"", lies[i][0]);
        if (strncmp(text, name, strlen(name)) != 0 || strchr(text, '\n') != text + strlen(text) - 1)
            fail_msg("%s: %s", lies[i][0], text);
        shell("mv %s/kept.json %s/tandem-manifest.json", scratch, model);
    }
    tool(0, "verify %s", model);
    shell("echo '{\"version\": 1, \"files\": [' > %s/tandem-manifest.json", model);
    assert_non_null(strstr(tool(2, "verify %s", model), "manifest: byte"));
}

static void test_archive(void **state)
{
    (void)state;
    char partial[400];
    shell("cp -r " BF16_MODEL " %s/source", scratch);
    /* An interrupted copy, with a fault in what was copied, and a file that is damaged. */
    shell("mkdir -p %s/kept/model && head -c 6000000 %s/source/model.safetensors > "
          "%s/kept/model/model.safetensors.partial && echo x > %s/kept/model/tokenizer.json",
          scratch, scratch, scratch, scratch);
    snprintf(partial, sizeof(partial), "%s/kept/model/model.safetensors.partial", scratch);
    flip(partial, 5000000);
    const char *text =
        tool(0, "archive %s/source %s/kept --drafter tests/golden/model-random", scratch, scratch);
    assert_non_null(strstr(text, "kept/model: 5 files copied, 0 were there"));
    /* Of the interrupted copy the whole chunk before the fault. */
    assert_non_null(strstr(text, "; 4194304 bytes of interrupted copies kept\n"));
    assert_non_null(strstr(text, "kept/drafter: "));
    shell("cmp %s/source/model.safetensors %s/kept/model/model.safetensors", scratch, scratch);
    shell("cmp %s/source/tokenizer.json %s/kept/model/tokenizer.json", scratch, scratch);
    assert_int_not_equal(access(partial, F_OK), 0);
    tool(0, "verify %s/kept/model", scratch);
    tool(0, "verify %s/kept/drafter", scratch);
    /* Again: nothing to do but to look; a damaged copy is mended. */
    assert_non_null(strstr(tool(0, "archive %s/source %s/kept", scratch, scratch),
                           "0 files copied, 5 were there"));
    snprintf(partial, sizeof(partial), "%s/kept/model/model.safetensors", scratch);
    flip(partial, 7000000);
    assert_non_null(strstr(tool(0, "archive %s/source %s/kept", scratch, scratch),
                           "1 files copied, 4 were there"));
    /* A source that is not what its manifest says is not kept. */
    shell("cp %s/kept/model/tandem-manifest.json %s/source/", scratch, scratch);
    snprintf(partial, sizeof(partial), "%s/source/model.safetensors", scratch);
    flip(partial, 7000000);
    assert_non_null(strstr(tool(2, "archive %s/source %s/other", scratch, scratch),
                           "differs from its own manifest"));
}

/* ---- synth ---- */

static void test_synth(void **state)
{
    (void)state;
    static const struct {
        const char *format, *title;
    } cases[] = {{"exl3", "exl3-mcg 4.00 bpw (routed experts) + bf16 (rest), 4.0 M parameters"},
                 {"exl3 --bits 2 --codebook mul1", "exl3-mul1 2.00 bpw (routed experts)"},
                 {"nvfp4", "nvfp4_modelopt (routed experts)"},
                 {"mxfp8", "mxfp8 (routed experts)"},
                 {"fp8", "fp8_block (routed experts)"},
                 {"bf16", "quantization: bf16, 4.0 M parameters"}};
    char ids[300];
    snprintf(ids, sizeof(ids), "%s/ids", scratch);
    shell("echo 5 6 7 8 9 > %s", ids);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *text =
            tool(0, "synth %s/synth%zu --params 4M --format %s", scratch, i, cases[i].format);
        const char *ratio = strstr(text, "ratio ");
        assert_non_null(ratio);
        assert_true(atof(ratio + 6) >= 0.8 && atof(ratio + 6) <= 1.2);
        text = tool(0, "inspect %s/synth%zu", scratch, i);
        if (strstr(text, cases[i].title) == NULL)
            fail_msg("%s: %s", cases[i].title, text);
        assert_null(strstr(text, "warning: "));
        text = tool(0, "generate %s/synth%zu --ids %s --max-tokens 4 --temperature 0 --json",
                    scratch, i, ids);
        assert_non_null(strstr(text, "\"ids\": ["));
    }
    tool(0, "synth %s/again --params 4M --shard-bytes 1000000", scratch);
    tool(0, "manifest %s/again", scratch);
    shell("test $(ls %s/again | grep -c -- -of-) -gt 1", scratch);
    assert_non_null(strstr(tool(2, "synth %s/again --params 4M", scratch), "exists"));
    assert_non_null(strstr(tool(2, "synth %s/x --params 4", scratch), "--params"));
    assert_non_null(strstr(tool(2, "synth %s/x --params 1.5X", scratch), "--params"));
    assert_non_null(strstr(tool(2, "synth %s/x", scratch), "--params"));
}

/* ---- calibration and compare ---- */

#define TEXTS "tests/golden/model-trained/greedy.jsonl"

/* Weighted error of the last layers' linears, from the report that the command prints. */
static double weighted_sum(const char *text, uint32_t *ret_count)
{
    double sum = 0;
    *ret_count = 0;
    for (const char *at = text; (at = strstr(at, "  weighted ")) != NULL; at += 10) {
        sum += atof(at + 11);
        ++*ret_count;
    }
    return sum;
}

static void test_calibrated(void **state)
{
    (void)state;
    uint32_t count = 0;
    tool(0, "synth %s/plain --params 4M --format bf16", scratch);
    shell("cp " BF16_MODEL "/tokenizer.json %s/plain/", scratch);
    shell("head -n 4 " TEXTS " > %s/texts.jsonl", scratch);
#define QUANTIZE "quantize %s/plain %s/%s --format exl3 --bits 3 --beam 1 --threads %d "
    const char *text =
        tool(0, QUANTIZE "--calib %s/texts.jsonl", scratch, scratch, "learned", 1, scratch);
    assert_non_null(strstr(text, "calibration: 4 texts, "));
    double sum = weighted_sum(text, &count);
    assert_true(count > 100);
    tool(0, QUANTIZE "--calib %s/texts.jsonl", scratch, scratch, "learned3", 3, scratch);
    shell("cmp %s/learned/model.safetensors %s/learned3/model.safetensors", scratch, scratch);
    tool(0, QUANTIZE, scratch, scratch, "blind", 2);
    assert_true(sum > 0);
    /* What was learned from the texts shows on them. */
    double kld[2];
    static const char *const names[] = {"blind", "learned"};
    for (int i = 0; i < 2; i++) {
        text = tool(0, "compare %s/plain %s/%s --texts %s/texts.jsonl", scratch, scratch, names[i],
                    scratch);
        const char *all = strstr(text, "{\"case\": \"all\"");
        assert_non_null(all);
        kld[i] = atof(strstr(all, "kld_mean\": ") + 11);
    }
    if (!(kld[1] > 0 && kld[1] < kld[0]))
        fail_msg("divergence %g blind, %g learned", kld[0], kld[1]);
    tool(1, "compare %s/plain %s/blind --texts %s/texts.jsonl --kld-max 1e-9", scratch, scratch,
         scratch);
    /* A model beside itself. */
    text = tool(0,
                "compare " BF16_MODEL " " BF16_MODEL " --texts %s/texts.jsonl --kld-max 0 "
                "--identical-min 1",
                scratch);
    assert_non_null(strstr(text, "\"answers\": 4, \"identical\": 4, \"own\": 4}"));
    assert_non_null(strstr(tool(2, "compare %s/plain %s/blind", scratch, scratch), "--texts"));
    shell("echo '{\"prompt\": 5}' > %s/bad.jsonl", scratch);
    assert_non_null(
        strstr(tool(2, "compare %s/plain %s/blind --texts %s/bad.jsonl", scratch, scratch, scratch),
               "line 1: neither prompt nor text"));
}

/* What is bundled: EXL3 experts, small, true to its manifest, close to its BF16 original. */
static void test_demo(void **state)
{
    (void)state;
    tool(0, "verify deploy/demo");
    shell("test $(du -sb deploy/demo | cut -f1) -lt 8000000");
    assert_non_null(strstr(tool(0, "inspect deploy/demo"),
                           "quantization: exl3-mcg 4.00 bpw (routed experts) + bf16 (rest)"));
    const char *text = tool(0, "compare " BF16_MODEL " deploy/demo --texts " TEXTS
                               " --kld-max 0.02 --identical-min 0.95");
    assert_non_null(strstr(text, "\"answers\": 51, "));
    assert_non_null(strstr(text, "\"own\": 51}"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inspect_fixtures),  cmocka_unit_test(test_inspect_edges),
        cmocka_unit_test(test_inspect_bad_files), cmocka_unit_test(test_empty_linears),
        cmocka_unit_test(test_warnings),          cmocka_unit_test(test_verify),
        cmocka_unit_test(test_archive),           cmocka_unit_test(test_synth),
        cmocka_unit_test(test_calibrated),        cmocka_unit_test(test_demo)};
    return cmocka_run_group_tests(tests, start, stop);
}
