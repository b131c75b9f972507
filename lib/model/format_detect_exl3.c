/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format_parts.h"

#include <string.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"

/* The four bytes of a marker repeat its codebook's multiplier. */
static enum err check_marker(struct format_case *c, enum format_role role, uint32_t value)
{
    const struct format_tensor *t = c->role[role];
    if (t == NULL)
        return ERR_OK;
    if (t->dtype != SAFETENSORS_I32)
        return format_refuse(c, FORMAT_FAULT_BAD_MARKER, t->suffix, "dtype %s, not I32",
                             safetensors_dtype_name(t->dtype));
    if (!format_is_one(t))
        return format_refuse(c, FORMAT_FAULT_BAD_MARKER, t->suffix, "not one element");
    if (t->marker == NULL)
        return ERR_OK;
    uint32_t found = t->marker[0] | (uint32_t)t->marker[1] << 8 | (uint32_t)t->marker[2] << 16 |
                     (uint32_t)t->marker[3] << 24;
    if (found != value)
        return format_refuse(c, FORMAT_FAULT_BAD_MARKER, t->suffix, "value %08x, not %08x", found,
                             value);
    return ERR_OK;
}

static enum err read_codebook(struct format_case *c)
{
    if (c->role[ROLE_MCG] != NULL && c->role[ROLE_MUL1] != NULL)
        return format_refuse(c, FORMAT_FAULT_TWO_MARKERS, c->role[ROLE_MUL1]->suffix,
                             "there beside %s", c->role[ROLE_MCG]->suffix);
    TRY(check_marker(c, ROLE_MCG, OP_EXL3_MARKER_MCG));
    TRY(check_marker(c, ROLE_MUL1, OP_EXL3_MARKER_MUL1));
    c->info->codebook = OP_CODEBOOK_3INST;
    if (c->role[ROLE_MCG] != NULL)
        c->info->codebook = OP_CODEBOOK_MCG;
    else if (c->role[ROLE_MUL1] != NULL)
        c->info->codebook = OP_CODEBOOK_MUL1;
    return ERR_OK;
}

/* Sizes come from the trellis; the caller compares them with the model's. */
static enum err read_trellis(struct format_case *c, uint64_t *ret_in, uint64_t *ret_out)
{
    const struct format_tensor *t = c->role[ROLE_TRELLIS];
    if (t == NULL)
        return format_refuse(c, FORMAT_FAULT_MISSING_COMPANION, "trellis",
                             "missing beside the other parts of an EXL3 weight");
    if (t->dtype != SAFETENSORS_I16)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, t->suffix, "%s, not I16",
                             safetensors_dtype_name(t->dtype));
    if (t->dims != 3)
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, t->suffix, "%u dimensions, not 3", t->dims);
    TRY(read_codebook(c));
    uint64_t width = t->shape[2];
    if (width % 8 != 0 || width > OP_EXL3_TILE_U16_MAX ||
        !op_exl3_rate_exists((uint32_t)width / 8, c->info->codebook))
        return format_refuse(c, FORMAT_FAULT_BAD_RATE, t->suffix,
                             "a tile of %llu I16 is no rate of codebook %s",
                             (unsigned long long)width, format_codebook_name(c->info->codebook));
    c->info->half_bits = (uint32_t)width / 8;
    if (t->shape[0] > UINT32_MAX / OP_EXL3_TILE || t->shape[1] > UINT32_MAX / OP_EXL3_TILE)
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, t->suffix, "too large");
    *ret_in = t->shape[0] * OP_EXL3_TILE;
    *ret_out = t->shape[1] * OP_EXL3_TILE;
    return ERR_OK;
}

/* One side's scales: f16 for every element, or the packed signs of old files.  Where both are
 * there the scales win and the signs are not looked at. */
static enum err check_side(struct format_case *c, enum format_role scale, enum format_role signs,
                           uint64_t size, bool *ret_signs)
{
    const struct format_tensor *t = c->role[scale] != NULL ? c->role[scale] : c->role[signs];
    if (t == NULL)
        return format_refuse(c, FORMAT_FAULT_MISSING_COMPANION, format_role_suffix(scale),
                             "missing beside trellis");
    *ret_signs = t != c->role[scale];
    enum safetensors_dtype dtype = *ret_signs ? SAFETENSORS_I16 : SAFETENSORS_F16;
    if (t->dtype != dtype)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, t->suffix, "%s, not %s",
                             safetensors_dtype_name(t->dtype), safetensors_dtype_name(dtype));
    uint64_t elements = *ret_signs ? size / 16 : size;
    if (!format_is_1d(t, elements))
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, t->suffix, "not [%llu]",
                             (unsigned long long)elements);
    return ERR_OK;
}

static enum err check_parts(struct format_case *c, uint64_t in_padded, uint64_t out_padded)
{
    TRY(check_side(c, ROLE_SUH, ROLE_SU, in_padded, &c->info->signs_in));
    TRY(check_side(c, ROLE_SVH, ROLE_SV, out_padded, &c->info->signs_out));
    const struct format_tensor *bias = c->role[ROLE_BIAS];
    if (bias == NULL)
        return ERR_OK;
    if (bias->dtype != SAFETENSORS_F16 && bias->dtype != SAFETENSORS_F32)
        return format_refuse(c, FORMAT_FAULT_BAD_DTYPE, bias->suffix, "%s, not F16 or F32",
                             safetensors_dtype_name(bias->dtype));
    if (!format_is_1d(bias, out_padded))
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, bias->suffix, "not [%llu]",
                             (unsigned long long)out_padded);
    c->info->has_bias = true;
    c->info->bias = bias->suffix;
    return ERR_OK;
}

static uint64_t padded(uint32_t size)
{
    return ((uint64_t)size + OP_EXL3_BLOCK - 1) / OP_EXL3_BLOCK * OP_EXL3_BLOCK;
}

enum err format_detect_exl3(struct format_case *c)
{
    uint64_t in_stored = 0, out_stored = 0;
    if (c->role[ROLE_WEIGHT_PACKED] != NULL)
        return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, "weight_packed",
                             "there beside parts of an EXL3 weight");
    TRY(read_trellis(c, &in_stored, &out_stored));
    if (in_stored != padded(c->in) || out_stored != padded(c->out))
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, "trellis",
                             "holds [%llu, %llu], a linear of [%u, %u] needs [%llu, %llu]",
                             (unsigned long long)in_stored, (unsigned long long)out_stored, c->in,
                             c->out, (unsigned long long)padded(c->in),
                             (unsigned long long)padded(c->out));
    TRY(check_parts(c, in_stored, out_stored));
    c->info->kind = FORMAT_EXL3;
    c->info->weight = c->role[ROLE_TRELLIS]->suffix;
    c->info->in_padded = (uint32_t)in_stored;
    c->info->out_padded = (uint32_t)out_stored;
    return ERR_OK;
}

/* Points the roles at one slice's tensors; what a slice lacks may lie in the layer's shared_h. */
static enum err roles_of_rank(struct format_case *c, uint32_t rank)
{
    memset(c->role, 0, sizeof(c->role));
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < c->count; i++) {
            const struct format_tensor *t = &c->tensors[i];
            uint32_t r;
            const char *rest;
            if (t->shared_h != (pass == 1) || !format_rank_suffix(t->suffix, &r, &rest) ||
                r != rank)
                continue;
            enum format_role role = format_role_of(rest);
            if (role == ROLE_COUNT || (pass == 1 && role != ROLE_SUH && role != ROLE_SVH))
                continue;
            if (t->dtype >= FORMAT_DTYPE_OTHER) /* nobody has looked at the shared ones yet */
                return format_refuse(c, FORMAT_FAULT_UNKNOWN_DTYPE, t->suffix,
                                     "its dtype is not known");
            if (c->role[role] != NULL && pass == 0)
                return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, t->suffix, "there twice");
            if (c->role[role] == NULL) {
                c->role[role] = t;
                c->info->shared_h = c->info->shared_h || pass == 1;
            }
        }
    return ERR_OK;
}

enum err format_detect_ranked(struct format_case *c)
{
    uint64_t in_sum = 0, out_sum = 0, in_first = 0, out_first = 0;
    bool in_same = true, out_same = true;
    struct format_info first = *c->info;
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        uint64_t in = 0, out = 0;
        TRY(roles_of_rank(c, rank));
        if (c->role[ROLE_SCALE] != NULL)
            return format_refuse(c, FORMAT_FAULT_OBSOLETE, c->role[ROLE_SCALE]->suffix,
                                 "an EXL3 layout that was withdrawn");
        if (c->role[ROLE_TRELLIS] == NULL)
            return format_refuse(c, FORMAT_FAULT_MISSING_COMPANION, "",
                                 "slice rank%u of %u has no trellis", rank, c->ranks);
        TRY(read_trellis(c, &in, &out));
        TRY(check_parts(c, in, out));
        if (in % OP_EXL3_BLOCK != 0 || out % OP_EXL3_BLOCK != 0)
            return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, c->role[ROLE_TRELLIS]->suffix,
                                 "not a multiple of %u", OP_EXL3_BLOCK);
        if (rank == 0) {
            in_first = in;
            out_first = out;
            first = *c->info;
            first.weight = c->role[ROLE_TRELLIS]->suffix;
        }
        if (c->info->codebook != first.codebook)
            return format_refuse(c, FORMAT_FAULT_AMBIGUOUS, c->role[ROLE_TRELLIS]->suffix,
                                 "another codebook than that of rank0");
        in_same = in_same && in == in_first;
        out_same = out_same && out == out_first;
        in_sum += in;
        out_sum += out;
    }
    bool by_outs = in_same && in_first == padded(c->in) && out_sum == padded(c->out);
    bool by_ins = out_same && out_first == padded(c->out) && in_sum == padded(c->in);
    if (!by_outs && !by_ins)
        return format_refuse(c, FORMAT_FAULT_BAD_SHAPE, first.weight,
                             "the slices do not make up [%u, %u]", c->in, c->out);
    first.shared_h = c->info->shared_h;
    *c->info = first;
    c->info->kind = FORMAT_EXL3_RANKED;
    c->info->ranks = c->ranks;
    c->info->ranks_by_rows = !by_outs;
    c->info->in_padded = (uint32_t)padded(c->in);
    c->info->out_padded = (uint32_t)padded(c->out);
    return ERR_OK;
}
