/* SPDX-License-Identifier: Apache-2.0 */
/* Random tensor sets under one prefix: detection must answer, and what it accepts must hold
 * together.  Each tensor takes a few bytes: suffix, dtype, shape, marker. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/model/format.h"

#define TENSORS_MAX 24u
#define DIMS_MAX    5u

static const char *const suffixes[] = {
    "trellis",
    "suh",
    "svh",
    "su",
    "sv",
    "mcg",
    "mul1",
    "scale",
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "bias",
    "pre_quant_scale",
    "weight_zero_point",
    "svdquant_lora_a",
    "rank0.trellis",
    "rank0.suh",
    "rank0.svh",
    "rank1.trellis",
    "rank1.suh",
    "rank1.svh",
    "rank1.mcg",
    "rank63.trellis",
    "rank64.trellis",
    "qweight",
    "",
    "rank.",
};

static const uint64_t sizes[] = {0,   1,   2,   4,   7,   8,    12,         16,        24,
                                 32,  40,  48,  56,  64,  96,   100,        128,       136,
                                 144, 200, 256, 300, 384, 4096, 1ull << 32, UINT64_MAX};

struct input {
    const uint8_t *bytes;
    size_t left;
};

static uint8_t next(struct input *in)
{
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->bytes++;
}

static void check_answer(const struct format_info *info, uint32_t out, uint32_t in)
{
    CHECK(info->kind < FORMAT_KIND_COUNT);
    CHECK(info->out == out && info->in == in);
    CHECK(info->weight != NULL);
    if (info->kind == FORMAT_EXL3 || info->kind == FORMAT_EXL3_RANKED) {
        CHECK(op_exl3_rate_exists(info->half_bits, info->codebook));
        CHECK(info->in_padded >= in && info->in_padded % 128 == 0);
        CHECK(info->out_padded >= out && info->out_padded % 128 == 0);
        CHECK(info->kind == FORMAT_EXL3 || info->ranks > 0);
    } else {
        bool plain = info->kind >= FORMAT_BF16;
        CHECK((info->scale == NULL) == plain);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct format_tensor tensors[TENSORS_MAX];
    static uint64_t shapes[TENSORS_MAX][DIMS_MAX];
    static uint8_t markers[TENSORS_MAX][4];
    struct input in = {data, size};
    uint32_t out = (uint32_t)sizes[1 + next(&in) % 23],
             inputs = (uint32_t)sizes[1 + next(&in) % 23];
    struct format_hint hint = {.kinds = next(&in), .has_codebook = (next(&in) & 1) != 0};
    uint32_t count = next(&in) % (TENSORS_MAX + 1);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t kind = next(&in), dims = next(&in) % (DIMS_MAX + 1);
        tensors[i] = (struct format_tensor){
            .suffix = suffixes[kind % ARRAY_COUNT(suffixes)],
            .dtype = (enum safetensors_dtype)(next(&in) % (SAFETENSORS_DTYPE_COUNT + 1)),
            .dims = dims,
            .shape = shapes[i],
            .shared_h = kind >= 224};
        for (uint32_t d = 0; d < dims; d++)
            shapes[i][d] = sizes[next(&in) % ARRAY_COUNT(sizes)];
        uint32_t marker = kind % 3 == 0 ? OP_EXL3_MARKER_MCG : OP_EXL3_MARKER_MUL1;
        memcpy(markers[i], &marker, 4);
        if (kind >= 64)
            tensors[i].marker = markers[i];
    }
    struct format_info info = {.kind = FORMAT_KIND_COUNT};
    struct err_detail detail = {""};
    enum format_fault fault = FORMAT_FAULT_COUNT;
    enum err e = format_detect("p", out, inputs, tensors, count, &hint, &info, &fault, &detail);
    CHECK(fault < FORMAT_FAULT_COUNT);
    if (e == ERR_OK) {
        CHECK(fault == FORMAT_FAULT_NONE);
        check_answer(&info, out, inputs);
    } else {
        const char *name = format_fault_name(fault);
        CHECK(fault != FORMAT_FAULT_NONE);
        CHECK(info.kind == FORMAT_KIND_COUNT);
        CHECK(strncmp(detail.text, name, strlen(name)) == 0);
        CHECK(strstr(detail.text, ": p") != NULL);
    }
    return 0;
}
