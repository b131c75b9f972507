/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/model/format_parts.h"

static const char *const kind_names[FORMAT_KIND_COUNT] = {
    [FORMAT_EXL3] = "exl3",
    [FORMAT_EXL3_RANKED] = "exl3_ranked",
    [FORMAT_NVFP4_MODELOPT] = "nvfp4_modelopt",
    [FORMAT_NVFP4_CT] = "nvfp4_ct",
    [FORMAT_MXFP4] = "mxfp4",
    [FORMAT_MXFP8] = "mxfp8",
    [FORMAT_FP8_BLOCK] = "fp8_block",
    [FORMAT_FP8_TENSOR] = "fp8_tensor",
    [FORMAT_FP8_CHANNEL] = "fp8_channel",
    [FORMAT_BF16] = "bf16",
    [FORMAT_F16] = "f16",
    [FORMAT_F32] = "f32",
};

static const char *const fault_names[FORMAT_FAULT_COUNT] = {
#define FORMAT_FAULT(code, name) [FORMAT_FAULT_##code] = name,
#include "lib/model/format_faults.def"
#undef FORMAT_FAULT
};

static const char *const role_suffixes[ROLE_COUNT] = {
    [ROLE_TRELLIS] = "trellis",
    [ROLE_SUH] = "suh",
    [ROLE_SVH] = "svh",
    [ROLE_SU] = "su",
    [ROLE_SV] = "sv",
    [ROLE_MCG] = "mcg",
    [ROLE_MUL1] = "mul1",
    [ROLE_SCALE] = "scale",
    [ROLE_WEIGHT] = "weight",
    [ROLE_WEIGHT_PACKED] = "weight_packed",
    [ROLE_WEIGHT_SCALE] = "weight_scale",
    [ROLE_WEIGHT_SCALE_INV] = "weight_scale_inv",
    [ROLE_WEIGHT_SCALE_2] = "weight_scale_2",
    [ROLE_WEIGHT_GLOBAL_SCALE] = "weight_global_scale",
    [ROLE_INPUT_SCALE] = "input_scale",
    [ROLE_INPUT_GLOBAL_SCALE] = "input_global_scale",
    [ROLE_BIAS] = "bias",
    [ROLE_PRE_QUANT_SCALE] = "pre_quant_scale",
    [ROLE_WEIGHT_ZERO_POINT] = "weight_zero_point",
    [ROLE_SVDQUANT] = "svdquant_",
};

const char *format_kind_name(enum format_kind kind)
{
    CHECK(kind < FORMAT_KIND_COUNT);
    return kind_names[kind];
}

const char *format_fault_name(enum format_fault fault)
{
    CHECK(fault < FORMAT_FAULT_COUNT);
    return fault_names[fault];
}

const char *format_codebook_name(enum op_codebook codebook)
{
    if (codebook == OP_CODEBOOK_3INST)
        return "3inst";
    return codebook == OP_CODEBOOK_MCG ? "mcg" : "mul1";
}

const char *format_role_suffix(enum format_role role)
{
    CHECK(role < ROLE_COUNT);
    return role_suffixes[role];
}

enum format_role format_role_of(const char *suffix)
{
    for (uint32_t role = 0; role < ROLE_SVDQUANT; role++)
        if (strcmp(suffix, role_suffixes[role]) == 0)
            return (enum format_role)role;
    const char *start = role_suffixes[ROLE_SVDQUANT];
    return strncmp(suffix, start, strlen(start)) == 0 ? ROLE_SVDQUANT : ROLE_COUNT;
}

bool format_rank_suffix(const char *suffix, uint32_t *ret_rank, const char **ret_rest)
{
    if (strncmp(suffix, "rank", 4) != 0)
        return false;
    const char *digits = suffix + 4, *end = digits;
    uint32_t rank = 0;
    while (*end >= '0' && *end <= '9' && end - digits < 3)
        rank = rank * 10 + (uint32_t)(*end++ - '0');
    if (end == digits || *end != '.' || (*digits == '0' && end - digits > 1) ||
        rank >= FORMAT_RANKS_MAX)
        return false;
    *ret_rank = rank;
    *ret_rest = end + 1;
    return true;
}

static enum err err_of(enum format_fault fault)
{
    switch (fault) {
    case FORMAT_FAULT_MISSING_TENSOR:
        return ERR_NOT_FOUND;
    case FORMAT_FAULT_UNSUPPORTED:
    case FORMAT_FAULT_UNKNOWN_FORMAT:
    case FORMAT_FAULT_UNKNOWN_DTYPE:
    case FORMAT_FAULT_OBSOLETE:
        return ERR_UNSUPPORTED;
    case FORMAT_FAULT_BAD_VALUE:
        return ERR_CORRUPT;
    default:
        return ERR_INVALID;
    }
}

enum err format_refuse(struct format_case *c, enum format_fault fault, const char *suffix,
                       const char *format, ...)
{
    char reason[256];
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof(reason), format, values);
    va_end(values);
    c->fault = fault;
    return err_set(c->detail, err_of(fault), "%s: %s%s%s: %s", format_fault_name(fault), c->prefix,
                   suffix[0] != '\0' ? "." : "", suffix, reason);
}
