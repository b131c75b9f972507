/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format_scan.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/format_parts.h"

#define EXL3_TILE 16u

/* Position of the suffix after the linear's dot: "rank0.trellis" is one suffix. */
static const char *suffix_of(const char *name)
{
    const char *dot = strrchr(name, '.'), *rest;
    uint32_t rank;
    if (dot == NULL)
        return NULL;
    for (const char *p = dot; p > name;) {
        p--;
        if (*p == '.')
            return format_rank_suffix(p + 1, &rank, &rest) ? p + 1 : dot + 1;
    }
    return dot + 1;
}

/* The tensor that makes a linear a linear; companions are found from it. */
static bool leads(const struct safetensors_tensor *t, const char *suffix)
{
    uint32_t rank = 0;
    const char *rest = suffix;
    bool ranked = format_rank_suffix(suffix, &rank, &rest);
    enum format_role role = format_role_of(rest);
    if (role == ROLE_TRELLIS)
        return true;
    if (ranked)
        return false;
    if (role == ROLE_WEIGHT_PACKED)
        return true;
    return role == ROLE_WEIGHT && (t->dims == 2 || safetensors_dtype_bytes(t->dtype) == 1);
}

static uint32_t narrow(uint64_t value)
{
    return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static const struct safetensors_tensor *beside(const struct safetensors *set, const char *prefix,
                                               const char *suffix)
{
    char name[FORMAT_PREFIX_BYTES + 64];
    snprintf(name, sizeof(name), "%s.%s", prefix, suffix);
    return safetensors_find(set, name);
}

/* Sizes of a sliced linear: down projections are split by inputs, the others by outputs. */
static void ranked_sizes(const struct safetensors *set, struct format_linear *l)
{
    const char *last = strrchr(l->prefix, '.');
    bool by_rows = last != NULL && strcmp(last, ".down_proj") == 0;
    uint64_t in = 0, out = 0;
    for (uint32_t rank = 0; rank < FORMAT_RANKS_MAX; rank++) {
        char suffix[32];
        snprintf(suffix, sizeof(suffix), "rank%u.trellis", rank);
        const struct safetensors_tensor *t = beside(set, l->prefix, suffix);
        if (t == NULL || t->dims != 3)
            continue; /* detection names the slice that is missing or is none */
        in = by_rows ? in + t->shape[0] * EXL3_TILE : t->shape[0] * EXL3_TILE;
        out = by_rows ? t->shape[1] * EXL3_TILE : out + t->shape[1] * EXL3_TILE;
    }
    l->in = narrow(in);
    l->out = narrow(out);
}

static void sizes_of(const struct safetensors *set, const struct safetensors_tensor *t,
                     const char *suffix, struct format_linear *l)
{
    uint64_t first = t->dims > 0 ? t->shape[0] : 1, second = t->dims > 1 ? t->shape[1] : 1;
    if (suffix[0] == 'r') {
        ranked_sizes(set, l);
    } else if (format_role_of(suffix) == ROLE_TRELLIS) {
        l->in = narrow(first * EXL3_TILE);
        l->out = narrow(second * EXL3_TILE);
    } else {
        bool nibbles = t->dtype == SAFETENSORS_U8;
        l->out = narrow(first);
        l->in = narrow(nibbles ? second * 2 : second);
    }
}

struct under {
    uint64_t bytes;
    uint32_t first_lead; /* index of the first leading tensor */
};

/* Tensors under the prefix lie side by side in name order, submodules among them. */
static struct under look_under(const struct safetensors *set, const char *prefix, uint32_t from)
{
    struct under u = {0, UINT32_MAX};
    size_t bytes = strlen(prefix);
    uint32_t first = from;
    while (first > 0) {
        const char *name = safetensors_at(set, first - 1)->name;
        if (strncmp(name, prefix, bytes) != 0 || name[bytes] != '.')
            break;
        first--;
    }
    for (uint32_t i = first; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        if (strncmp(t->name, prefix, bytes) != 0 || t->name[bytes] != '.')
            break;
        const char *suffix = suffix_of(t->name);
        uint32_t rank;
        const char *rest = suffix;
        if (suffix != t->name + bytes + 1)
            continue;
        (void)format_rank_suffix(suffix, &rank, &rest);
        if (format_role_of(rest) != ROLE_COUNT)
            u.bytes += t->bytes;
        if (u.first_lead == UINT32_MAX && leads(t, suffix))
            u.first_lead = i;
    }
    return u;
}

/* Rank-sliced linears cannot be bound, only recognised. */
static void detect_ranked(const struct safetensors *set, const struct format_hint *hint,
                          struct format_linear *l, struct err_detail *detail)
{
    struct format_tensor *tensors = mem_take_array(FORMAT_TENSORS_MAX, sizeof(*tensors));
    uint32_t count = 0;
    size_t bytes = strlen(l->prefix);
    for (uint32_t i = 0; i < safetensors_count(set) && count < FORMAT_TENSORS_MAX; i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        if (strncmp(t->name, l->prefix, bytes) != 0 || t->name[bytes] != '.' ||
            suffix_of(t->name) != t->name + bytes + 1)
            continue;
        bool marker = t->dtype == SAFETENSORS_I32 && t->bytes == 4;
        tensors[count++] = (struct format_tensor){.suffix = t->name + bytes + 1,
                                                  .dtype = t->dtype,
                                                  .dims = t->dims,
                                                  .shape = t->shape,
                                                  .marker = marker ? t->data : NULL};
    }
    l->err =
        format_detect(l->prefix, l->out, l->in, tensors, count, hint, &l->info, &l->fault, detail);
    mem_give(tensors);
}

static void detect(const struct safetensors *set, const struct format_hint *hint,
                   const char *suffix, struct format_linear *l, struct err_detail *detail)
{
    if (l->in == 0 || l->out == 0) {
        struct format_case c = {.prefix = l->prefix, .detail = detail};
        l->err = format_refuse(&c, FORMAT_FAULT_BAD_SHAPE, suffix, "makes a linear of [%u, %u]",
                               l->out, l->in);
        l->fault = c.fault;
        return;
    }
    l->err =
        format_bind(set, l->prefix, l->out, l->in, hint, &l->info, &l->weight, &l->fault, detail);
    if (l->err != ERR_OK && suffix[0] == 'r')
        detect_ranked(set, hint, l, detail);
}

void format_scan(const struct safetensors *set, const struct format_hint *hint, format_scan_fn fn,
                 void *arg)
{
    char prefix[FORMAT_PREFIX_BYTES];
    struct err_detail detail;
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        const char *suffix = suffix_of(t->name);
        if (suffix == NULL || !leads(t, suffix) ||
            (size_t)(suffix - t->name) > sizeof(prefix)) /* the dot makes room for the NUL */
            continue;
        memcpy(prefix, t->name, (size_t)(suffix - t->name) - 1);
        prefix[suffix - t->name - 1] = '\0';
        struct under under = look_under(set, prefix, i);
        if (under.first_lead != i)
            continue;
        struct format_linear l = {.prefix = prefix, .bytes = under.bytes, .detail = &detail};
        detail.text[0] = '\0';
        sizes_of(set, t, suffix, &l);
        detect(set, hint, suffix, &l, &detail);
        if (!fn(arg, &l))
            return;
    }
}

bool format_is_part(const struct safetensors_tensor *t)
{
    const char *suffix = suffix_of(t->name), *rest = suffix;
    uint32_t rank;
    if (suffix == NULL)
        return false;
    (void)format_rank_suffix(suffix, &rank, &rest);
    enum format_role role = format_role_of(rest);
    return role == ROLE_WEIGHT ? leads(t, suffix) : role != ROLE_COUNT && role != ROLE_BIAS;
}

bool format_is_expert(const char *name)
{
    const char *at = strstr(name, ".mlp.experts.");
    return at != NULL && at[sizeof(".mlp.experts.") - 1] >= '0' &&
           at[sizeof(".mlp.experts.") - 1] <= '9';
}

double format_bits(const struct format_info *info)
{
    switch (info->kind) {
    case FORMAT_EXL3:
    case FORMAT_EXL3_RANKED:
        return info->half_bits / 2.0;
    case FORMAT_NVFP4_MODELOPT:
    case FORMAT_NVFP4_CT:
    case FORMAT_MXFP4:
        return 4;
    case FORMAT_BF16:
    case FORMAT_F16:
        return 16;
    case FORMAT_F32:
        return 32;
    default:
        return 8;
    }
}

void format_title(const struct format_info *info, char *ret_text, size_t bytes)
{
    if (info->kind == FORMAT_EXL3 || info->kind == FORMAT_EXL3_RANKED)
        snprintf(ret_text, bytes, "%s-%s %.2f bpw",
                 info->kind == FORMAT_EXL3 ? "exl3" : "exl3_ranked",
                 format_codebook_name(info->codebook), format_bits(info));
    else
        snprintf(ret_text, bytes, "%s", format_kind_name(info->kind));
}
