/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "lib/base/check.h"
#include "tests/model/golden_formats.h"

#define DIMS_MAX 8u

/* What detection sees of a case: the tensors under one prefix. */
struct view {
    struct format_tensor tensors[FORMAT_TENSORS_MAX];
    uint64_t shapes[FORMAT_TENSORS_MAX][DIMS_MAX];
    uint8_t markers[FORMAT_TENSORS_MAX][4];
    uint32_t count;
};

static enum safetensors_dtype dtype_named(const char *name)
{
    for (uint32_t i = 0; i < SAFETENSORS_DTYPE_COUNT; i++)
        if (strcmp(name, safetensors_dtype_name((enum safetensors_dtype)i)) == 0)
            return (enum safetensors_dtype)i;
    return FORMAT_DTYPE_OTHER;
}

static void view_add(struct view *v, const struct json *tensor, const char *suffix, bool shared)
{
    assert_true(v->count < FORMAT_TENSORS_MAX);
    struct format_tensor *t = &v->tensors[v->count];
    const struct json *shape = json_at(tensor, 2), *value = json_at(tensor, 3);
    assert_true(shape->count <= DIMS_MAX);
    *t = (struct format_tensor){.suffix = suffix,
                                .dtype = dtype_named(string_of(json_at(tensor, 1))),
                                .dims = shape->count,
                                .shape = v->shapes[v->count],
                                .shared_h = shared};
    for (uint32_t i = 0; i < t->dims; i++)
        assert_true(json_u64(json_at(shape, i), &v->shapes[v->count][i]));
    int64_t marker = 0;
    if (json_i64(value, &marker)) {
        uint32_t bits = (uint32_t)marker;
        memcpy(v->markers[v->count], &bits, 4);
        t->marker = v->markers[v->count];
    }
    v->count++;
}

/* "a.experts.2.gate_proj" -> "a.experts.shared_h.gate_proj" */
static void shared_name(const char *prefix, char *ret_name, size_t bytes)
{
    const char *projection = strrchr(prefix, '.'), *experts = strstr(prefix, ".experts.");
    ret_name[0] = '\0';
    if (experts != NULL)
        snprintf(ret_name, bytes, "%.*s.experts.shared_h%s", (int)(experts - prefix), prefix,
                 projection);
}

static void view_fill(struct view *v, const struct json *tensors, const char *prefix)
{
    char shared[512];
    shared_name(prefix, shared, sizeof(shared));
    v->count = 0;
    GOLDEN_EACH(tensor, tensors)
    {
        const char *name = string_of(json_at(tensor, 0));
        for (int pass = 0; pass < 2; pass++) {
            const char *start = pass == 0 ? prefix : shared;
            size_t bytes = strlen(start);
            if (bytes > 0 && strncmp(name, start, bytes) == 0 && name[bytes] == '.')
                view_add(v, tensor, name + bytes + 1, pass == 1);
        }
    }
}

static bool listed(const struct json *array, const char *text)
{
    GOLDEN_EACH(entry, array)
    {
        if (json_string_is(entry, text))
            return true;
    }
    return false;
}

static void check_refused(const char *id, const struct json *expect, enum err e,
                          enum format_fault fault, const char *prefix,
                          const struct err_detail *detail)
{
    const char *class = format_fault_name(fault);
    assert_int_not_equal(e, ERR_OK);
    if (strcmp(text_of(expect, "error"), class) != 0 && !listed(json_get(expect, "also"), class))
        fail_msg("%s: %s, expected %s", id, detail->text, text_of(expect, "error"));
    if (strncmp(detail->text, class, strlen(class)) != 0 || strstr(detail->text, prefix) == NULL)
        fail_msg("%s: the message names no tensor: %s", id, detail->text);
}

static void check_bool(const char *id, const struct json *expect, const char *key, bool found)
{
    if (json_get(expect, key) != NULL && bool_of(expect, key) != found)
        fail_msg("%s: %s is %d", id, key, found);
}

static void check_number(const char *id, const struct json *expect, const char *key, double found)
{
    if (json_get(expect, key) != NULL && number_of(expect, key) != found)
        fail_msg("%s: %s is %g", id, key, found);
}

static void check_text(const char *id, const struct json *expect, const char *key,
                       const char *found)
{
    const struct json *value = json_get(expect, key);
    if (value != NULL && !json_string_is(value, found))
        fail_msg("%s: %s is %s", id, key, found);
}

static void check_accepted(const char *id, const struct json *expect,
                           const struct format_info *info)
{
    static const char *const keys[] = {
        "format", "or_format",   "or_error", "codebook", "K",         "bias",      "scales",
        "ranks",  "input_scale", "shared_h", "scale",    "in_padded", "out_padded"};
    GOLDEN_EACH(value, expect)
    {
        bool known = false;
        for (size_t i = 0; i < ARRAY_COUNT(keys); i++)
            known = known || (strlen(keys[i]) == value->key_bytes &&
                              memcmp(keys[i], value->key, value->key_bytes) == 0);
        if (!known)
            fail_msg("%s: the test does not know %.*s", id, (int)value->key_bytes, value->key);
    }
    const char *kind = format_kind_name(info->kind);
    if (!json_string_is(json_get(expect, "or_format"), kind))
        check_text(id, expect, "format", kind);
    check_text(id, expect, "codebook", format_codebook_name(info->codebook));
    check_number(id, expect, "K", info->half_bits / 2.0);
    check_number(id, expect, "ranks", info->ranks);
    check_number(id, expect, "in_padded", info->in_padded);
    check_number(id, expect, "out_padded", info->out_padded);
    check_bool(id, expect, "bias", info->has_bias);
    check_bool(id, expect, "input_scale", info->has_input_scale);
    check_bool(id, expect, "shared_h", info->shared_h);
    check_text(id, expect, "scales", info->signs_in || info->signs_out ? "su_sv" : "suh_svh");
    if (info->scale != NULL)
        check_text(id, expect, "scale", safetensors_dtype_name(info->scale_dtype));
}

/* Returns the warnings of the case's linears together. */
static uint32_t check_case(const struct json *test, const struct format_hint *hint)
{
    static struct view view;
    const char *id = text_of(test, "id");
    uint32_t warnings = 0;
    GOLDEN_EACH(linear, json_get(test, "linears"))
    {
        const char *prefix = text_of(linear, "prefix");
        const struct json *expect = json_get(linear, "expect");
        struct format_info info = {.kind = FORMAT_KIND_COUNT};
        enum format_fault fault = FORMAT_FAULT_COUNT;
        struct err_detail detail = {""};
        view_fill(&view, json_get(test, "tensors"), prefix);
        enum err e = format_detect(prefix, u32_of(linear, "out"), u32_of(linear, "in"),
                                   view.tensors, view.count, hint, &info, &fault, &detail);
        if (json_get(expect, "error") != NULL) {
            check_refused(id, expect, e, fault, prefix, &detail);
            assert_int_equal(info.kind, FORMAT_KIND_COUNT);
            continue;
        }
        if (e != ERR_OK)
            fail_msg("%s: refused: %s", id, detail.text);
        assert_int_equal(fault, FORMAT_FAULT_NONE);
        check_accepted(id, expect, &info);
        warnings |= info.warnings;
    }
    return warnings;
}

static void every_listed_set(void **state)
{
    (void)state;
    const struct json *root = golden_json("detect.json");
    uint32_t count = 0;
    GOLDEN_EACH(test, json_get(root, "cases"))
    {
        struct format_hint hint = {.kinds = 0};
        format_hint_read(json_get(test, "config"), NULL, &hint);
        count++;
        uint32_t warnings = check_case(test, &hint);
        if (bool_of(test, "warnings_any"))
            continue;
        bool expected = listed(json_get(test, "warnings"), "config_mismatch");
        if (expected != ((warnings & FORMAT_WARN_CONFIG_MISMATCH) != 0))
            fail_msg("%s: warnings %x", text_of(test, "id"), warnings);
    }
    assert_int_equal(count, 140);
}

/* A row of our own: what the listed sets leave out. */
struct row {
    const char *suffix;
    enum safetensors_dtype dtype;
    uint32_t dims;
    uint64_t shape[4];
};

static enum format_fault detect_rows(const struct row *rows, uint32_t count, uint32_t out,
                                     uint32_t in, struct format_info *ret_info)
{
    struct format_tensor tensors[16];
    struct err_detail detail = {""};
    enum format_fault fault;
    assert_true(count <= ARRAY_COUNT(tensors));
    for (uint32_t i = 0; i < count; i++)
        tensors[i] = (struct format_tensor){.suffix = rows[i].suffix,
                                            .dtype = rows[i].dtype,
                                            .dims = rows[i].dims,
                                            .shape = rows[i].shape};
    enum err e = format_detect("p", out, in, tensors, count, NULL, ret_info, &fault, &detail);
    assert_int_equal(e == ERR_OK, fault == FORMAT_FAULT_NONE);
    return fault;
}

#define DETECT(out, in, ret_info, ...)                                                             \
    detect_rows((const struct row[]){__VA_ARGS__},                                                 \
                (uint32_t)ARRAY_COUNT(((const struct row[]){__VA_ARGS__})), out, in, ret_info)

static void rows_beyond_the_list(void **state)
{
    (void)state;
    struct format_info info;
    /* A plain weight stands alone. */
    assert_int_equal(DETECT(8, 16, &info, {"weight", SAFETENSORS_BF16, 2, {8, 16}},
                            {"weight_scale", SAFETENSORS_F32, 0, {0}}),
                     FORMAT_FAULT_AMBIGUOUS);
    /* Integer markers with a plain weight are parts of an EXL3 weight that lacks its trellis. */
    assert_int_equal(DETECT(8, 16, &info, {"weight", SAFETENSORS_BF16, 2, {8, 16}},
                            {"mcg", SAFETENSORS_I32, 0, {0}}),
                     FORMAT_FAULT_MISSING_COMPANION);
    assert_int_equal(DETECT(8, 16, &info, {"weight", SAFETENSORS_BF16, 2, {8, 16}},
                            {"bias", SAFETENSORS_I32, 1, {8}}),
                     FORMAT_FAULT_BAD_DTYPE);
    /* One name twice. */
    assert_int_equal(DETECT(8, 16, &info, {"weight", SAFETENSORS_BF16, 2, {8, 16}},
                            {"weight", SAFETENSORS_BF16, 2, {8, 16}}),
                     FORMAT_FAULT_AMBIGUOUS);
    /* The global scale of one family beside the codes of the other kind. */
    assert_int_equal(DETECT(8, 32, &info, {"weight", SAFETENSORS_F8_E4M3, 2, {8, 32}},
                            {"weight_scale", SAFETENSORS_U8, 2, {8, 1}},
                            {"weight_scale_2", SAFETENSORS_F32, 0, {0}}),
                     FORMAT_FAULT_AMBIGUOUS);
    /* A block of bytes is no grid of floats; E8M0 has no per-tensor form. */
    assert_int_equal(DETECT(200, 300, &info, {"weight", SAFETENSORS_F8_E4M3, 2, {200, 300}},
                            {"weight_scale_inv", SAFETENSORS_U8, 2, {2, 3}}),
                     FORMAT_FAULT_BAD_SHAPE);
    assert_int_equal(DETECT(200, 300, &info, {"weight", SAFETENSORS_F8_E4M3, 2, {200, 300}},
                            {"weight_scale", SAFETENSORS_F8_E8M0, 0, {0}}),
                     FORMAT_FAULT_BAD_SHAPE);
    /* MXFP8 wants its own scale names. */
    assert_int_equal(DETECT(64, 320, &info, {"weight", SAFETENSORS_F8_E4M3, 2, {64, 320}},
                            {"scale", SAFETENSORS_F8_E8M0, 2, {64, 10}}),
                     FORMAT_FAULT_BAD_SHAPE);
    /* A bias of an EXL3 weight is F16 or F32. */
    assert_int_equal(DETECT(128, 128, &info, {"trellis", SAFETENSORS_I16, 3, {8, 8, 64}},
                            {"suh", SAFETENSORS_F16, 1, {128}}, {"svh", SAFETENSORS_F16, 1, {128}},
                            {"bias", SAFETENSORS_BF16, 1, {128}}),
                     FORMAT_FAULT_BAD_DTYPE);
}

static void slices_by_rank(void **state)
{
    (void)state;
    struct format_info info;
    assert_int_equal(
        DETECT(128, 256, &info, {"rank0.trellis", SAFETENSORS_I16, 3, {8, 8, 64}},
               {"rank0.suh", SAFETENSORS_F16, 1, {128}}, {"rank0.svh", SAFETENSORS_F16, 1, {128}},
               {"rank1.trellis", SAFETENSORS_I16, 3, {8, 8, 64}},
               {"rank1.suh", SAFETENSORS_F16, 1, {128}}, {"rank1.svh", SAFETENSORS_F16, 1, {128}}),
        FORMAT_FAULT_NONE);
    assert_int_equal(info.kind, FORMAT_EXL3_RANKED);
    assert_true(info.ranks_by_rows);
    assert_false(info.shared_h);
    /* Leading zeros are another name. */
    assert_int_equal(DETECT(128, 128, &info, {"rank00.trellis", SAFETENSORS_I16, 3, {8, 8, 64}}),
                     FORMAT_FAULT_UNKNOWN_FORMAT);
    assert_int_equal(DETECT(128, 128, &info, {"rank64.trellis", SAFETENSORS_I16, 3, {8, 8, 64}}),
                     FORMAT_FAULT_UNKNOWN_FORMAT);
    /* Slices that do not add up. */
    assert_int_equal(
        DETECT(384, 128, &info, {"rank0.trellis", SAFETENSORS_I16, 3, {8, 8, 64}},
               {"rank0.suh", SAFETENSORS_F16, 1, {128}}, {"rank0.svh", SAFETENSORS_F16, 1, {128}},
               {"rank1.trellis", SAFETENSORS_I16, 3, {8, 8, 64}},
               {"rank1.suh", SAFETENSORS_F16, 1, {128}}, {"rank1.svh", SAFETENSORS_F16, 1, {128}}),
        FORMAT_FAULT_BAD_SHAPE);
}

static void hint_of(const char *config, const char *hf, struct format_hint *ret_hint)
{
    struct arena arena;
    struct json *a = NULL, *b = NULL;
    struct json_error error;
    arena_init(&arena, 1 << 14, 1 << 16);
    if (config != NULL)
        assert_int_equal(json_parse(&arena, NULL, config, strlen(config), &a, &error), ERR_OK);
    if (hf != NULL)
        assert_int_equal(json_parse(&arena, NULL, hf, strlen(hf), &b, &error), ERR_OK);
    format_hint_read(a, b, ret_hint);
    arena_fini(&arena);
}

static void announcements(void **state)
{
    (void)state;
    struct format_hint hint;
    hint_of(NULL, NULL, &hint);
    assert_int_equal(hint.kinds, 0);
    assert_false(hint.unknown);
    hint_of("[]", "3", &hint);
    assert_int_equal(hint.kinds, 0);
    hint_of("{}", "{\"quantization\": {\"quant_algo\": \"NVFP4\"}}", &hint);
    assert_int_equal(hint.kinds, 1u << FORMAT_NVFP4_MODELOPT);
    hint_of("{\"quantization_config\": {\"quant_method\": \"modelopt\"}}",
            "{\"quantization\": {\"quant_algo\": \"FP8_PB_WO\"}}", &hint);
    assert_int_equal(hint.kinds, 1u << FORMAT_FP8_BLOCK);
    hint_of("{\"quantization_config\": {\"quant_method\": \"mxfp8\", "
            "\"weight_block_size\": [1, 32]}}",
            NULL, &hint);
    assert_int_equal(hint.kinds, 1u << FORMAT_MXFP8);
    hint_of("{\"quantization_config\": {\"quant_method\": \"fp8\", "
            "\"weight_block_size\": [64, \"x\"]}}",
            NULL, &hint);
    assert_true(hint.unknown);
    hint_of("{\"quantization_config\": {\"quant_method\": 7}}", NULL, &hint);
    assert_true(hint.unknown);
    hint_of("{\"quantization_config\": {\"quant_method\": \"exl3\", \"codebook\": \"qtip\"}}", NULL,
            &hint);
    assert_true(hint.unknown);
}

/* Every golden checkpoint agrees with the config that lies beside it. */
static void checkpoints_agree_with_their_configs(void **state)
{
    (void)state;
    static const char *const names[] = {"nvfp4_modelopt", "nvfp4_ct",    "mxfp8", "fp8_block",
                                        "fp8_tensor",     "fp8_channel", "bf16",  "f16"};
    for (size_t n = 0; n < ARRAY_COUNT(names); n++) {
        char file[64];
        struct format_hint hint;
        snprintf(file, sizeof(file), "%s.json", names[n]);
        const struct json *root = golden_json(file);
        snprintf(file, sizeof(file), "%s.safetensors", names[n]);
        struct safetensors *set = golden_tensors(file);
        format_hint_read(json_get(root, "config"), NULL, &hint);
        GOLDEN_EACH(linear, json_get(root, "linears"))
        {
            struct format_info info;
            struct op_quantised w;
            enum format_fault fault;
            struct err_detail detail = {""};
            assert_int_equal(format_bind(set, text_of(linear, "name"), u32_of(linear, "out"),
                                         u32_of(linear, "in"), &hint, &info, &w, &fault, &detail),
                             ERR_OK);
            assert_string_equal(format_kind_name(info.kind), text_of(linear, "format"));
            assert_int_equal(info.warnings, 0);
        }
        safetensors_close(&set);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_listed_set),
        cmocka_unit_test(rows_beyond_the_list),
        cmocka_unit_test(slices_by_rank),
        cmocka_unit_test(announcements),
        cmocka_unit_test(checkpoints_agree_with_their_configs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
