/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/model/format_parts.h"

static bool has(const struct format_case *c, enum format_role role)
{
    return c->role[role] != NULL;
}

/* Sorts the tensors into roles; what no format knows is passed over. */
static enum err roles_fill(struct format_case *c)
{
    bool any = false;
    for (uint32_t i = 0; i < c->count; i++) {
        const struct format_tensor *t = &c->tensors[i];
        uint32_t rank;
        const char *rest;
        if (t->shared_h)
            continue;
        any = true;
        bool ranked = format_rank_suffix(t->suffix, &rank, &rest);
        enum format_role role = format_role_of(ranked ? rest : t->suffix);
        if (role == ROLE_COUNT)
            continue;
        if (t->dtype >= FORMAT_DTYPE_OTHER)
            return format_refuse(c, FORMAT_FAULT_UNKNOWN_DTYPE, t->suffix,
                                 "its dtype is not known");
        if (ranked) {
            c->ranks = rank + 1 > c->ranks ? rank + 1 : c->ranks;
            continue;
        }
        if (role != ROLE_SVDQUANT && c->role[role] != NULL)
            return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, t->suffix, "there twice");
        c->role[role] = t;
    }
    if (!any)
        return format_refuse(c, FORMAT_FAULT_MISSING_TENSOR, "", "no tensor has this prefix");
    return ERR_OK;
}

/* What is refused even where a rule would match. */
static enum err refuse_unsupported(struct format_case *c)
{
    static const enum format_role unsupported[] = {ROLE_PRE_QUANT_SCALE, ROLE_SVDQUANT,
                                                   ROLE_WEIGHT_ZERO_POINT};
    for (size_t i = 0; i < ARRAY_COUNT(unsupported); i++)
        if (has(c, unsupported[i]))
            return format_refuse(c, FORMAT_FAULT_UNSUPPORTED, c->role[unsupported[i]]->suffix,
                                 "this variant of the format is not supported");
    if (has(c, ROLE_SCALE) && (has(c, ROLE_TRELLIS) || has(c, ROLE_SUH) || has(c, ROLE_SVH)))
        return format_refuse(c, FORMAT_FAULT_OBSOLETE, "scale",
                             "an EXL3 layout that was withdrawn");
    return ERR_OK;
}

static enum err refuse_ambiguous(struct format_case *c)
{
    static const enum format_role pairs[][2] = {
        {ROLE_TRELLIS, ROLE_WEIGHT},
        {ROLE_TRELLIS, ROLE_WEIGHT_PACKED},
        {ROLE_WEIGHT, ROLE_WEIGHT_PACKED},
        {ROLE_WEIGHT_SCALE, ROLE_WEIGHT_SCALE_INV},
        {ROLE_WEIGHT_SCALE, ROLE_SCALE},
        {ROLE_WEIGHT_SCALE_INV, ROLE_SCALE},
        {ROLE_WEIGHT_SCALE_2, ROLE_WEIGHT_GLOBAL_SCALE},
        {ROLE_INPUT_SCALE, ROLE_INPUT_GLOBAL_SCALE},
    };
    for (size_t i = 0; i < ARRAY_COUNT(pairs); i++)
        if (has(c, pairs[i][0]) && has(c, pairs[i][1]))
            return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, format_role_suffix(pairs[i][1]),
                                 "there beside %s", format_role_suffix(pairs[i][0]));
    if (c->ranks == 0)
        return ERR_OK;
    static const enum format_role whole[] = {ROLE_TRELLIS, ROLE_WEIGHT, ROLE_WEIGHT_PACKED};
    for (size_t i = 0; i < ARRAY_COUNT(whole); i++)
        if (has(c, whole[i]))
            return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, format_role_suffix(whole[i]),
                                 "there beside slices by rank");
    return ERR_OK;
}

static enum err detect_kind(struct format_case *c)
{
    static const enum format_role exl3[] = {ROLE_TRELLIS, ROLE_SUH, ROLE_SVH, ROLE_SU,
                                            ROLE_SV,      ROLE_MCG, ROLE_MUL1};
    static const enum format_role companions[] = {ROLE_WEIGHT_SCALE, ROLE_WEIGHT_SCALE_INV,
                                                  ROLE_WEIGHT_SCALE_2, ROLE_WEIGHT_GLOBAL_SCALE};
    if (c->ranks > 0)
        return format_detect_ranked(c);
    for (size_t i = 0; i < ARRAY_COUNT(exl3); i++)
        if (has(c, exl3[i]))
            return format_detect_exl3(c);
    if (has(c, ROLE_WEIGHT_PACKED))
        return format_detect_fp4(c);
    if (!has(c, ROLE_WEIGHT)) {
        for (size_t i = 0; i < ARRAY_COUNT(companions); i++)
            if (has(c, companions[i]))
                return format_refuse(c, FORMAT_FAULT_MISSING_COMPANION, "weight",
                                     "missing beside %s", c->role[companions[i]]->suffix);
        return format_refuse(c, FORMAT_FAULT_UNKNOWN_FORMAT, "",
                             "no format has these tensors (the first is %s)", c->tensors[0].suffix);
    }
    switch (c->role[ROLE_WEIGHT]->dtype) {
    case SAFETENSORS_U8:
        return format_detect_fp4(c);
    case SAFETENSORS_F8_E4M3:
        return format_detect_fp8(c);
    case SAFETENSORS_F8_E5M2:
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, "weight",
                             "F8_E5M2 has too few bits for weights");
    case SAFETENSORS_BF16:
    case SAFETENSORS_F16:
    case SAFETENSORS_F32:
        return format_detect_plain(c);
    default:
        return format_refuse(c, FORMAT_FAULT_UNKNOWN_FORMAT, "weight",
                             "no format stores weights as %s",
                             safetensors_dtype_name(c->role[ROLE_WEIGHT]->dtype));
    }
}

static bool is_plain(enum format_kind kind)
{
    return kind == FORMAT_BF16 || kind == FORMAT_F16 || kind == FORMAT_F32;
}

/* A linear left unquantised agrees with every announcement. */
static uint32_t warnings_of(const struct format_info *info, const struct format_hint *hint)
{
    if (hint == NULL || is_plain(info->kind))
        return 0;
    bool exl3 = info->kind == FORMAT_EXL3 || info->kind == FORMAT_EXL3_RANKED;
    bool differs = hint->unknown;
    differs = differs || (hint->kinds != 0 && (hint->kinds >> info->kind & 1u) == 0);
    differs = differs || (exl3 && hint->has_codebook && hint->codebook != info->codebook);
    return differs ? FORMAT_WARN_CONFIG_MISMATCH : 0;
}

enum err format_detect(const char *prefix, uint32_t out, uint32_t in,
                       const struct format_tensor *tensors, uint32_t count,
                       const struct format_hint *hint, struct format_info *ret_info,
                       enum format_fault *ret_fault, struct err_detail *detail)
{
    CHECK(out > 0 && in > 0);
    CHECK(count <= FORMAT_TENSORS_MAX);
    CHECK(tensors != NULL || count == 0);
    struct format_info info;
    memset(&info, 0, sizeof(info));
    info.out = out;
    info.in = in;
    struct format_case c = {.prefix = prefix,
                            .out = out,
                            .in = in,
                            .tensors = tensors,
                            .count = count,
                            .info = &info,
                            .detail = detail};
    enum err e = roles_fill(&c);
    if (e == ERR_OK)
        e = refuse_unsupported(&c);
    if (e == ERR_OK)
        e = refuse_ambiguous(&c);
    if (e == ERR_OK)
        e = detect_kind(&c);
    *ret_fault = c.fault;
    if (e != ERR_OK)
        return e;
    CHECK(c.fault == FORMAT_FAULT_NONE);
    info.warnings = warnings_of(&info, hint);
    *ret_info = info;
    return ERR_OK;
}
