/* SPDX-License-Identifier: Apache-2.0 */
/* tandem-model quantize: what it writes is valid, complete, and the same after an interruption. */
#include "tests/model/tool_run.h"

#include <fcntl.h>
#include <math.h>

#include "kernels/op_format.h"
#include "lib/base/arena.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/model/format_scan.h"
#include "lib/model/read_file.h"
#include "lib/model/tool/writer.h"

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

static struct format_hint hint_of(const char *directory)
{
    struct format_hint hint;
    struct arena nodes;
    struct err_detail detail;
    struct json *configs[2] = {NULL, NULL};
    static const char *const names[] = {"config.json", "hf_quant_config.json"};
    char *texts[2] = {NULL, NULL};
    arena_init(&nodes, 1 << 16, 0);
    for (int i = 0; i < 2; i++) {
        size_t bytes = 0;
        struct json_error where = {0, ""};
        if (read_file(directory, names[i], 1 << 20, &texts[i], &bytes, &detail) == ERR_OK)
            assert_int_equal(json_parse(&nodes, NULL, texts[i], bytes, &configs[i], &where),
                             ERR_OK);
    }
    assert_non_null(configs[0]);
    format_hint_read(configs[0], configs[1], &hint);
    arena_fini(&nodes);
    free(texts[0]);
    free(texts[1]);
    return hint;
}

/* Looks at every linear of an output beside the same of its source. */
struct look {
    struct safetensors *source;
    enum format_kind kind;
    bool all;
    double error_max;
    uint32_t chosen, left;
};

static double error_between(const struct op_quantised *a, const struct op_quantised *b)
{
    size_t count = (size_t)a->in * a->out;
    float *x = mem_take_array(count, sizeof(*x)), *y = mem_take_array(count, sizeof(*y));
    struct op_ctx ctx = {NULL, NULL};
    double error = 0, square = 0;
    assert_int_equal(op_dequantise_ref(&(struct op_dequantise_args){a, x}, &ctx), ERR_OK);
    assert_int_equal(op_dequantise_ref(&(struct op_dequantise_args){b, y}, &ctx), ERR_OK);
    for (size_t i = 0; i < count; i++) {
        error += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        square += (double)x[i] * x[i];
    }
    mem_give(x);
    mem_give(y);
    return error / square;
}

static bool ends_with(const char *name, const char *end)
{
    size_t bytes = strlen(name), tail = strlen(end);
    return bytes >= tail && strcmp(name + bytes - tail, end) == 0;
}

static bool look_at(void *arg, const struct format_linear *l)
{
    struct look *k = arg;
    struct format_info info;
    struct op_quantised weight;
    enum format_fault fault;
    struct err_detail detail;
    if (l->err != ERR_OK)
        fail_msg("%s", l->detail->text);
    assert_int_equal(l->info.warnings, 0);
    bool chosen = format_is_expert(l->prefix);
    if (k->all)
        chosen = !ends_with(l->prefix, ".mlp.gate") && !ends_with(l->prefix, ".kv_b_proj") &&
                 !ends_with(l->prefix, "embed_tokens");
    if (k->all && k->kind == FORMAT_EXL3)
        chosen = chosen && l->in % 128 == 0 && l->out % 128 == 0;
    if (!chosen) {
        k->left++;
        assert_int_equal(l->info.kind, FORMAT_BF16);
        return true;
    }
    k->chosen++;
    if (l->info.kind != k->kind)
        fail_msg("%s is %s", l->prefix, format_kind_name(l->info.kind));
    assert_int_equal(format_check_values(l->prefix, &l->info, &l->weight, &fault, &detail), ERR_OK);
    assert_int_equal(
        format_bind(k->source, l->prefix, l->out, l->in, NULL, &info, &weight, &fault, &detail),
        ERR_OK);
    double error = error_between(&weight, &l->weight);
    if (!(error > 0 && error <= k->error_max))
        fail_msg("%s: error %g", l->prefix, error);
    return true;
}

/* A tensor that is no part of a chosen linear is there, with the same bytes. */
static void check_rest(const struct safetensors *source, const struct safetensors *set,
                       uint32_t chosen)
{
    uint32_t same = 0;
    for (uint32_t i = 0; i < safetensors_count(source); i++) {
        const struct safetensors_tensor *t = safetensors_at(source, i);
        const struct safetensors_tensor *u = safetensors_find(set, t->name);
        if (u == NULL || u->dtype != t->dtype)
            continue;
        assert_int_equal(u->bytes, t->bytes);
        assert_memory_equal(u->data, t->data, t->bytes);
        same++;
    }
    assert_int_equal(same + chosen, safetensors_count(source));
}

static void test_every_format(void **state)
{
    (void)state;
    static const struct {
        const char *arguments;
        enum format_kind kind;
        bool all;
        double error_max;
        uint32_t chosen;
    } cases[] = {
        {"--format fp8", FORMAT_FP8_BLOCK, false, 8e-4, 192},
        {"--format mxfp8 --layers all", FORMAT_MXFP8, true, 8e-4, 296},
        {"--format nvfp4 --layers experts --bits 4", FORMAT_NVFP4_MODELOPT, false, 1e-2, 192},
        {"--format nvfp4 --layers all --shard-bytes 1000000", FORMAT_NVFP4_MODELOPT, true, 1e-2,
         296},
        {"--format fp8 --layers all", FORMAT_FP8_BLOCK, true, 8e-4, 296},
        {"--format exl3 --bits 6 --beam 1 --layers all", FORMAT_EXL3, true, 3e-2, 260}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char out[300], a[600], b[600];
        snprintf(out, sizeof(out), "%s/regular%zu", scratch, i);
        const char *text =
            tool(0, "quantize " BF16_MODEL " %s %s --threads 2", out, cases[i].arguments);
        assert_non_null(strstr(text, "linears, "));
        struct look k = {
            open_checkpoint(BF16_MODEL), cases[i].kind, cases[i].all, cases[i].error_max, 0, 0};
        struct safetensors *set = open_checkpoint(out);
        struct format_hint hint = hint_of(out);
        assert_true(hint.kinds != 0 && !hint.unknown);
        format_scan(set, NULL, look_at, &k);
        assert_int_equal(k.chosen, cases[i].chosen);
        check_rest(k.source, set, k.chosen);
        safetensors_close(&set);
        safetensors_close(&k.source);
        snprintf(a, sizeof(a), "%s/tokenizer.json", out);
        snprintf(b, sizeof(b), BF16_MODEL "/tokenizer.json");
        assert_true(same_files(a, b));
        if (!cases[i].all)
            continue;
        /* It loads and computes. */
        snprintf(a, sizeof(a), "generate %s --prompt Hello --max-tokens 4 --temperature 0", out);
        tool(0, "%s", a);
    }
}

/* Two layers of two experts with sizes that need padding, and no config to speak of. */
static void write_source(const char *directory)
{
    static const char *const names[] = {"gate_proj", "up_proj", "down_proj"};
    static const char config[] = "{\"model_type\": \"none\", \"big\": 12345678901234567890}";
    struct writer *w = NULL;
    struct err_detail detail = {{0}};
    struct rng rng;
    uint32_t tensors[13];
    rng_init(&rng, 11);
    assert_int_equal(writer_create(directory, 0, &w, &detail), ERR_OK);
    for (uint32_t i = 0; i < 12; i++) {
        char name[200];
        uint64_t shape[2] = {i % 3 == 2 ? 200 : 100, i % 3 == 2 ? 100 : 200};
        snprintf(name, sizeof(name), "model.language_model.layers.%u.mlp.experts.%u.%s.weight",
                 i / 6, i / 3 % 2, names[i % 3]);
        tensors[i] = writer_add(w, name, SAFETENSORS_F32, 2, shape);
    }
    uint64_t norm[1] = {7};
    tensors[12] = writer_add(w, "model.language_model.norm.weight", SAFETENSORS_F32, 1, norm);
    assert_int_equal(writer_open(w, false, &detail), ERR_OK);
    for (uint32_t i = 0; i < 13; i++)
        for (uint64_t at = 0; at < writer_bytes(w, tensors[i]); at += 4) {
            float value = (float)((rng_unit(&rng) + rng_unit(&rng) + rng_unit(&rng) - 1.5) * 0.1);
            assert_int_equal(writer_put(w, tensors[i], at, &value, 4, &detail), ERR_OK);
        }
    assert_int_equal(writer_finish(w, &detail), ERR_OK);
    writer_destroy(&w);
    assert_int_equal(writer_file(directory, "config.json", config, sizeof(config) - 1, &detail),
                     ERR_OK);
}

#define EXL3_ARGUMENTS "--format exl3 --bits 3 --beam 8 --codebook mul1 --seed 5"

static bool look_exl3(void *arg, const struct format_linear *l)
{
    uint32_t *count = arg;
    if (l->err != ERR_OK)
        fail_msg("%s", l->detail->text);
    assert_int_equal(l->info.kind, FORMAT_EXL3);
    assert_int_equal(l->info.codebook, OP_CODEBOOK_MUL1);
    assert_int_equal(l->info.half_bits, 6);
    bool down = strstr(l->prefix, "down_proj") != NULL;
    assert_int_equal(l->in, down ? 128 : 256);
    assert_int_equal(l->out, down ? 256 : 128);
    assert_int_equal(l->info.warnings, 0);
    ++*count;
    return true;
}

static void test_exl3_is_valid(void **state)
{
    (void)state;
    char in[300], out[300], path[600], *text = NULL;
    size_t bytes = 0;
    uint32_t count = 0;
    struct err_detail detail;
    snprintf(in, sizeof(in), "%s/in", scratch);
    snprintf(out, sizeof(out), "%s/exl3", scratch);
    write_source(in);
    tool(0, "quantize %s %s " EXL3_ARGUMENTS " --threads 1", in, out);
    struct safetensors *set = open_checkpoint(out), *source = open_checkpoint(in);
    struct format_hint hint = hint_of(out);
    assert_int_equal(hint.kinds, 1u << FORMAT_EXL3 | 1u << FORMAT_EXL3_RANKED);
    assert_true(hint.has_codebook && hint.codebook == OP_CODEBOOK_MUL1);
    format_scan(set, &hint, look_exl3, &count);
    assert_int_equal(count, 12);
    assert_int_equal(safetensors_count(set), 12 * 4 + 1);
    const struct safetensors_tensor *marker =
        safetensors_find(set, "model.language_model.layers.0.mlp.experts.1.up_proj.mul1");
    assert_non_null(marker);
    assert_int_equal(marker->dims, 0);
    assert_memory_equal(marker->data, "\x2d\xd1\xdc\x83", 4);
    check_rest(source, set, 12);
    safetensors_close(&set);
    safetensors_close(&source);
    /* Numbers of the config keep their text, and the report names every linear with its error. */
    assert_int_equal(read_file(out, "config.json", 1 << 20, &text, &bytes, &detail), ERR_OK);
    assert_non_null(memmem(text, bytes, "12345678901234567890", 20));
    free(text);
    snprintf(path, sizeof(path), "%s", out);
    assert_int_equal(read_file(path, "quantization_report.json", 1 << 20, &text, &bytes, &detail),
                     ERR_OK);
    assert_non_null(memmem(text, bytes, "layers.1.mlp.experts.1.down_proj", 32));
    free(text);
    /* Not again over a finished checkpoint. */
    assert_non_null(strstr(tool(2, "quantize %s %s " EXL3_ARGUMENTS, in, out), "not empty"));
    /* EXL3 is not quantised again. */
    assert_non_null(
        strstr(tool(2, "quantize %s %s/again --format fp8", out, scratch), "EXL3 already"));
}

static void corrupt(const char *path, long at)
{
    int fd = open(path, O_RDWR);
    uint8_t byte;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* Killed after some linears, then one of those damaged and the journal torn: the same bytes. */
static void test_goes_on(void **state)
{
    (void)state;
    char in[300], out[300], whole[600], have[600], journal[600];
    snprintf(in, sizeof(in), "%s/in", scratch);
    snprintf(out, sizeof(out), "%s/broken", scratch);
    snprintf(whole, sizeof(whole), "%s/exl3/model.safetensors", scratch);
    snprintf(have, sizeof(have), "%s/model.safetensors", out);
    snprintf(journal, sizeof(journal), "%s/quantize.journal", out);
    /* The pipe ends after four linears, and SIGPIPE with it the process. */
    tool(0, "quantize %s %s " EXL3_ARGUMENTS " --threads 1 | head -n 4 >/dev/null", in, out);
    assert_int_not_equal(access(have, F_OK), 0);
    assert_int_equal(access(journal, F_OK), 0);
    assert_non_null(
        strstr(tool(2, "quantize %s %s --format exl3 --bits 2", in, out), "unfinished"));
    snprintf(have, sizeof(have), "%s/model.safetensors.partial", out);
    FILE *f = fopen(have, "rb");
    uint64_t header = 0;
    assert_non_null(f);
    assert_int_equal(fread(&header, 8, 1, f), 1);
    fclose(f);
    struct safetensors *set = NULL;
    struct err_detail detail;
    assert_int_equal(safetensors_open_file(have, &set, &detail), ERR_OK);
    const struct safetensors_tensor *t =
        safetensors_find(set, "model.language_model.layers.0.mlp.experts.0.gate_proj.trellis");
    assert_non_null(t);
    uint64_t first = UINT64_MAX;
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        uint64_t at = (uintptr_t)safetensors_at(set, i)->data;
        first = at < first ? at : first;
    }
    uint64_t at = (uintptr_t)t->data - first + 8 + header + 5;
    safetensors_close(&set);
    corrupt(have, (long)at);
    f = fopen(journal, "a");
    assert_non_null(f);
    fputs("{\"linear\": \"model.language_model.layers.1.mlp.exp", f);
    fclose(f);
    /* Figures that no run writes are not believed, and the one that can be known is not asked. */
    char edit[1200];
    snprintf(edit, sizeof(edit),
             "sed -i -e '/experts.0.up_proj/s/\"relative_error\": [^,]*/\"relative_error\": 5/' "
             "-e '/experts.1.gate_proj/s/\"proxy_error\": [^,}]*/\"proxy_error\": 1e9/' "
             "-e '/experts.1.up_proj/s/\"rows\": 0/\"rows\": 7/' %s",
             journal);
    assert_int_equal(system(edit), 0);
    const char *text = tool(0, "quantize %s %s " EXL3_ARGUMENTS " --threads 3", in, out);
    assert_non_null(strstr(text, "going on: "));
    assert_null(strstr(text, "going on: 0 of"));
    assert_null(strstr(text, "layers.0.mlp.experts.0.up_proj   ")); /* it was done */
    assert_non_null(strstr(text, "layers.0.mlp.experts.0.gate_proj   "));
    assert_non_null(strstr(text, "layers.0.mlp.experts.1.gate_proj   "));
    assert_non_null(strstr(text, "layers.0.mlp.experts.1.up_proj   "));
    snprintf(have, sizeof(have), "%s/model.safetensors", out);
    assert_true(same_files(have, whole));
    assert_int_not_equal(access(journal, F_OK), 0);
    snprintf(whole, sizeof(whole), "%s/exl3/quantization_report.json", scratch);
    snprintf(have, sizeof(have), "%s/quantization_report.json", out);
    assert_true(same_files(have, whole));
}

/* Files beside the weights: of any size; what cannot be taken over is said before any work. */
static void test_other_files(void **state)
{
    (void)state;
    char in[300], out[300], a[600], b[600];
    struct err_detail detail;
    snprintf(in, sizeof(in), "%s/beside", scratch);
    snprintf(out, sizeof(out), "%s/beside-q", scratch);
    write_source(in);
    snprintf(a, sizeof(a), "%s/dump.bin", in);
    snprintf(b, sizeof(b), "%s/dump.bin", out);
    FILE *f = fopen(a, "wb");
    assert_non_null(f);
    assert_int_equal(fputs("begin", f) >= 0, 1);
    assert_int_equal(fseek(f, 257 << 20, SEEK_SET), 0);
    assert_int_equal(fputs("end", f) >= 0, 1);
    assert_int_equal(fclose(f), 0);
    tool(0, "quantize %s %s --format fp8", in, out);
    assert_true(same_files(a, b));
    assert_int_equal(unlink(a), 0);
    snprintf(out, sizeof(out), "%s/beside-r", scratch);
    static const char *const bad[] = {"[]", "{\"a\": ", ""};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(writer_file(in, "config.json", bad[i], strlen(bad[i]), &detail), ERR_OK);
        const char *text = tool(2, "quantize %s %s --format fp8", in, out);
        assert_non_null(strstr(text, "config.json: "));
        assert_null(strstr(text, "_proj"));
        assert_int_not_equal(access(out, F_OK), 0);
    }
}

static void test_faults(void **state)
{
    (void)state;
    static const struct {
        const char *arguments, *named;
    } cases[] = {
        {"--format exl3 --bits 9", "--bits"},
        {"--format exl2", "--format"},
        {"", "--format"},
        {"--format nvfp4 --bits 3", "--bits"},
        {"--format exl3 --codebook mg", "--codebook"},
        {"--format exl3 --layers most", "--layers"},
        {"--format exl3 --beam 100000", "--beam"},
        {"--format fp8 --calib x", "--calib"},
        {"--format exl3 --calib no-such-file", "no-such-file"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *text =
            tool(2, "quantize " BF16_MODEL " %s/faults%zu %s", scratch, i, cases[i].arguments);
        if (strstr(text, cases[i].named) == NULL)
            fail_msg("%s: \"%s\"", cases[i].arguments, text);
    }
    assert_non_null(strstr(tool(2, "quantize " BF16_MODEL " --format fp8"), "output directory"));
    assert_non_null(strstr(tool(2, "quantize no-such-dir %s/x --format fp8", scratch), "model"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_format), cmocka_unit_test(test_exl3_is_valid),
        cmocka_unit_test(test_goes_on), cmocka_unit_test(test_other_files),
        cmocka_unit_test(test_faults)};
    return cmocka_run_group_tests(tests, start, stop);
}
