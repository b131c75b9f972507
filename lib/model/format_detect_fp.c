/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format_parts.h"

#include "lib/base/check.h"

#define FP8_BLOCK 128u

static const struct format_tensor *any_of(const struct format_case *c, enum format_role a,
                                          enum format_role b)
{
    return c->role[a] != NULL ? c->role[a] : c->role[b];
}

static enum err check_bias(struct format_case *c)
{
    const struct format_tensor *t = c->role[ROLE_BIAS];
    if (t == NULL)
        return ERR_OK;
    if (t->dtype != SAFETENSORS_BF16 && t->dtype != SAFETENSORS_F16 && t->dtype != SAFETENSORS_F32)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, t->suffix, "%s, not a float",
                             safetensors_dtype_name(t->dtype));
    if (!format_is_1d(t, c->out))
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, t->suffix, "not [%u]", c->out);
    c->info->has_bias = true;
    c->info->bias = t->suffix;
    return ERR_OK;
}

/* A single F32: the global and input scales. */
static enum err check_one_f32(struct format_case *c, const struct format_tensor *t)
{
    if (t->dtype != SAFETENSORS_F32)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, t->suffix, "%s, not F32",
                             safetensors_dtype_name(t->dtype));
    if (!format_is_one(t))
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, t->suffix, "not one element");
    return ERR_OK;
}

static enum err check_input_scale(struct format_case *c, enum format_role role)
{
    const struct format_tensor *t = c->role[role];
    if (t == NULL)
        return ERR_OK;
    TRY(check_one_f32(c, t));
    c->info->has_input_scale = true;
    c->info->input_scale = t->suffix;
    return ERR_OK;
}

static enum err check_2d(struct format_case *c, const struct format_tensor *t, uint64_t rows,
                         uint64_t columns)
{
    if (!format_is_2d(t, rows, columns))
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, t->suffix, "not [%llu, %llu]",
                             (unsigned long long)rows, (unsigned long long)columns);
    return ERR_OK;
}

static enum err refuse_beside(struct format_case *c, enum format_role role, const char *format)
{
    if (c->role[role] == NULL)
        return ERR_OK;
    return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, c->role[role]->suffix, "no part of %s", format);
}

static enum err missing(struct format_case *c, enum format_role role, const char *beside)
{
    return format_refuse(c, FORMAT_FAULT_MISSING_COMPANION, format_role_suffix(role),
                         "missing beside %s", beside);
}

/* Codes of four bits in bytes, one scale for `group` inputs. */
static enum err check_fp4_shapes(struct format_case *c, const struct format_tensor *weight,
                                 const struct format_tensor *scale, uint32_t group)
{
    if (c->in % group != 0)
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, weight->suffix,
                             "%u inputs are no multiple of the group of %u", c->in, group);
    TRY(check_2d(c, weight, c->out, c->in / 2));
    TRY(check_2d(c, scale, c->out, c->in / group));
    c->info->weight = weight->suffix;
    c->info->scale = scale->suffix;
    c->info->scale_dtype = scale->dtype;
    return ERR_OK;
}

static enum err detect_mxfp4(struct format_case *c, const struct format_tensor *weight,
                             const struct format_tensor *scale)
{
    if (c->role[ROLE_WEIGHT_GLOBAL_SCALE] != NULL || c->role[ROLE_WEIGHT_SCALE_2] != NULL)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, scale->suffix, "%s, not F8_E4M3",
                             safetensors_dtype_name(scale->dtype));
    TRY(refuse_beside(c, ROLE_INPUT_SCALE, "MXFP4"));
    TRY(refuse_beside(c, ROLE_INPUT_GLOBAL_SCALE, "MXFP4"));
    TRY(check_fp4_shapes(c, weight, scale, 32));
    TRY(check_bias(c));
    c->info->kind = FORMAT_MXFP4;
    return ERR_OK;
}

enum err format_detect_fp4(struct format_case *c)
{
    bool packed = c->role[ROLE_WEIGHT_PACKED] != NULL; /* compressed-tensors' names */
    const struct format_tensor *weight = any_of(c, ROLE_WEIGHT_PACKED, ROLE_WEIGHT);
    const struct format_tensor *scale = c->role[ROLE_WEIGHT_SCALE];
    enum format_role global = packed ? ROLE_WEIGHT_GLOBAL_SCALE : ROLE_WEIGHT_SCALE_2;
    enum format_role input = packed ? ROLE_INPUT_GLOBAL_SCALE : ROLE_INPUT_SCALE;
    if (weight->dtype != SAFETENSORS_U8)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, weight->suffix, "%s, not U8",
                             safetensors_dtype_name(weight->dtype));
    TRY(refuse_beside(c, ROLE_WEIGHT_SCALE_INV, "a format of four bits"));
    TRY(refuse_beside(c, ROLE_SCALE, "a format of four bits"));
    if (scale == NULL)
        return missing(c, ROLE_WEIGHT_SCALE, weight->suffix);
    bool e8m0 = scale->dtype == SAFETENSORS_U8 || scale->dtype == SAFETENSORS_F8_E8M0;
    if (packed && e8m0)
        return detect_mxfp4(c, weight, scale);
    if (c->role[global] == NULL)
        return missing(c, global, weight->suffix);
    if (scale->dtype != SAFETENSORS_F8_E4M3)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, scale->suffix, "%s, not F8_E4M3",
                             safetensors_dtype_name(scale->dtype));
    TRY(refuse_beside(c, packed ? ROLE_INPUT_SCALE : ROLE_INPUT_GLOBAL_SCALE,
                      "this family's names of NVFP4"));
    TRY(check_one_f32(c, c->role[global]));
    TRY(check_input_scale(c, input));
    TRY(check_fp4_shapes(c, weight, scale, 16));
    TRY(check_bias(c));
    c->info->global = c->role[global]->suffix;
    c->info->kind = packed ? FORMAT_NVFP4_CT : FORMAT_NVFP4_MODELOPT;
    return ERR_OK;
}

static bool is_block_grid(const struct format_tensor *t, uint64_t rows, uint64_t columns)
{
    if (t->dims == 4)
        return t->shape[0] == rows && t->shape[1] == 1 && t->shape[2] == columns &&
               t->shape[3] == 1;
    return format_is_2d(t, rows, columns);
}

/* Which rule of E4M3 weights the scale's dtype and shape fit. */
static enum err fp8_kind(struct format_case *c, const struct format_tensor *scale,
                         enum format_kind *ret_kind)
{
    uint64_t block_rows = ((uint64_t)c->out + FP8_BLOCK - 1) / FP8_BLOCK;
    uint64_t block_columns = ((uint64_t)c->in + FP8_BLOCK - 1) / FP8_BLOCK;
    bool named_scale = scale == c->role[ROLE_SCALE];
    bool weight_scale = scale == c->role[ROLE_WEIGHT_SCALE];
    bool e8m0 = scale->dtype == SAFETENSORS_F8_E8M0;
    bool floats = scale->dtype == SAFETENSORS_F32 || scale->dtype == SAFETENSORS_BF16 ||
                  scale->dtype == SAFETENSORS_F16;
    if (!floats && !e8m0 && scale->dtype != SAFETENSORS_U8)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, scale->suffix, "%s is no scale",
                             safetensors_dtype_name(scale->dtype));
    if (!floats && !named_scale && c->in % 32 == 0 && format_is_2d(scale, c->out, c->in / 32)) {
        *ret_kind = FORMAT_MXFP8;
        return ERR_OK;
    }
    if ((floats || e8m0) && is_block_grid(scale, block_rows, block_columns)) {
        *ret_kind = FORMAT_FP8_BLOCK;
        return ERR_OK;
    }
    if (floats && weight_scale && (format_is_one(scale) || format_is_2d(scale, 1, 1))) {
        *ret_kind = FORMAT_FP8_TENSOR;
        return ERR_OK;
    }
    if (floats && weight_scale && (format_is_1d(scale, c->out) || format_is_2d(scale, c->out, 1))) {
        *ret_kind = FORMAT_FP8_CHANNEL;
        return ERR_OK;
    }
    return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, scale->suffix,
                         "fits no rule of FP8 for a weight of [%u, %u]", c->out, c->in);
}

enum err format_detect_fp8(struct format_case *c)
{
    const struct format_tensor *weight = c->role[ROLE_WEIGHT];
    const struct format_tensor *scale = any_of(c, ROLE_WEIGHT_SCALE_INV, ROLE_WEIGHT_SCALE);
    scale = scale != NULL ? scale : c->role[ROLE_SCALE];
    TRY(refuse_beside(c, ROLE_WEIGHT_SCALE_2, "FP8"));
    TRY(refuse_beside(c, ROLE_WEIGHT_GLOBAL_SCALE, "FP8"));
    TRY(refuse_beside(c, ROLE_INPUT_GLOBAL_SCALE, "FP8"));
    if (scale == NULL)
        return missing(c, ROLE_WEIGHT_SCALE, "weight");
    TRY(check_2d(c, weight, c->out, c->in));
    TRY(fp8_kind(c, scale, &c->info->kind));
    TRY(check_input_scale(c, ROLE_INPUT_SCALE));
    TRY(check_bias(c));
    c->info->weight = weight->suffix;
    c->info->scale = scale->suffix;
    c->info->scale_dtype = scale->dtype;
    return ERR_OK;
}

enum err format_detect_plain(struct format_case *c)
{
    static const enum format_role companions[] = {
        ROLE_WEIGHT_SCALE,      ROLE_WEIGHT_SCALE_INV,    ROLE_SCALE,
        ROLE_WEIGHT_SCALE_2,    ROLE_WEIGHT_GLOBAL_SCALE, ROLE_INPUT_SCALE,
        ROLE_INPUT_GLOBAL_SCALE};
    const struct format_tensor *weight = c->role[ROLE_WEIGHT];
    for (size_t i = 0; i < ARRAY_COUNT(companions); i++)
        TRY(refuse_beside(c, companions[i], "a plain weight"));
    TRY(check_2d(c, weight, c->out, c->in));
    TRY(check_bias(c));
    c->info->kind = FORMAT_F32;
    if (weight->dtype == SAFETENSORS_BF16)
        c->info->kind = FORMAT_BF16;
    else if (weight->dtype == SAFETENSORS_F16)
        c->info->kind = FORMAT_F16;
    c->info->weight = weight->suffix;
    return ERR_OK;
}
