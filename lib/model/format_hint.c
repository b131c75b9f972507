/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"

#define KIND(kind) (1u << FORMAT_##kind)
#define ANY_FP8    (KIND(FP8_BLOCK) | KIND(FP8_TENSOR) | KIND(FP8_CHANNEL))
#define ANY_KIND   ((1u << FORMAT_KIND_COUNT) - 1)

struct announcement {
    const char *name;
    uint32_t kinds;
};

static const struct announcement algorithms[] = {
    {"FP8", KIND(FP8_TENSOR)},
    {"FP8_PER_CHANNEL_PER_TOKEN", KIND(FP8_CHANNEL)},
    {"FP8_PB_WO", KIND(FP8_BLOCK)},
    {"NVFP4", KIND(NVFP4_MODELOPT)},
    {"W4A16_NVFP4", KIND(NVFP4_MODELOPT)},
    {"MXFP8", KIND(MXFP8)},
    {"MIXED_PRECISION", ANY_KIND},
};

static const struct announcement packings[] = {
    {"nvfp4-pack-quantized", KIND(NVFP4_CT)},
    {"mxfp4-pack-quantized", KIND(MXFP4)},
    {"mxfp8-quantized", KIND(MXFP8)},
    {"float-quantized", ANY_FP8},
    {"naive-quantized", ANY_FP8},
    {"mixed-precision", ANY_KIND},
};

/* A name that is not in the table is a method that is not known. */
static void announce(const struct json *value, const struct announcement *table, size_t count,
                     struct format_hint *hint)
{
    if (value == NULL)
        return;
    for (size_t i = 0; i < count; i++)
        if (json_string_is(value, table[i].name)) {
            hint->kinds = table[i].kinds;
            return;
        }
    hint->unknown = true;
}

static void read_exl3(const struct json *quantization, struct format_hint *hint)
{
    const struct json *codebook = json_get(quantization, "codebook");
    hint->kinds = KIND(EXL3) | KIND(EXL3_RANKED);
    if (codebook == NULL)
        return;
    for (uint32_t i = OP_CODEBOOK_3INST; i <= OP_CODEBOOK_MUL1; i++)
        if (json_string_is(codebook, format_codebook_name((enum op_codebook)i))) {
            hint->has_codebook = true;
            hint->codebook = (enum op_codebook)i;
            return;
        }
    hint->unknown = true;
}

/* "fp8" says by its block size which of the rules it means. */
static void read_fp8(const struct json *quantization, struct format_hint *hint)
{
    const struct json *block = json_get(quantization, "weight_block_size");
    uint64_t rows = 0, columns = 0;
    if (!json_is(block, JSON_ARRAY)) {
        hint->kinds = KIND(FP8_TENSOR) | KIND(FP8_CHANNEL);
        return;
    }
    bool pair = block->count == 2 && json_u64(json_at(block, 0), &rows) &&
                json_u64(json_at(block, 1), &columns);
    if (pair && rows == 1 && columns == 32)
        hint->kinds = KIND(MXFP8);
    else if (pair && rows == 128 && columns == 128)
        hint->kinds = KIND(FP8_BLOCK);
    else
        hint->unknown = true;
}

static void read_method(const struct json *quantization, const struct json *hf_algorithm,
                        struct format_hint *hint)
{
    const struct json *method = json_get(quantization, "quant_method");
    const struct json *algorithm = json_get(quantization, "quant_algo");
    if (method == NULL && algorithm == NULL)
        return;
    if (json_string_is(method, "exl3"))
        read_exl3(quantization, hint);
    else if (json_string_is(method, "fp8"))
        read_fp8(quantization, hint);
    else if (json_string_is(method, "mxfp8"))
        hint->kinds = KIND(MXFP8);
    else if (json_string_is(method, "mxfp4"))
        hint->kinds = KIND(MXFP4);
    else if (json_string_is(method, "compressed-tensors"))
        announce(json_get(quantization, "format"), packings, ARRAY_COUNT(packings), hint);
    else if (method == NULL || json_string_is(method, "modelopt") ||
             json_string_is(method, "modelopt_fp4"))
        announce(algorithm != NULL ? algorithm : hf_algorithm, algorithms, ARRAY_COUNT(algorithms),
                 hint);
    else
        hint->unknown = true;
}

void format_hint_read(const struct json *config, const struct json *hf_quant_config,
                      struct format_hint *ret_hint)
{
    struct format_hint hint;
    memset(&hint, 0, sizeof(hint));
    const struct json *quantization = json_get(config, "quantization_config");
    const struct json *hf = json_get(hf_quant_config, "quantization");
    const struct json *algorithm = json_get(hf, "quant_algo");
    if (json_is(algorithm, JSON_NULL))
        algorithm = NULL;
    if (json_is(quantization, JSON_OBJECT))
        read_method(quantization, algorithm, &hint);
    else
        announce(algorithm, algorithms, ARRAY_COUNT(algorithms), &hint);
    *ret_hint = hint;
}
