/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format.h"

#include <stdio.h>
#include <string.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/model/format_parts.h"

#define PREFIX_BYTES 1024

/* Every tensor under a prefix, as detection wants it and as it lies in the file.  Markers and
 * single scales are read, not mapped: a page fault for every four bytes would be most of a bind. */
struct found {
    struct format_tensor tensors[FORMAT_TENSORS_MAX];
    const struct safetensors_tensor *stored[FORMAT_TENSORS_MAX];
    uint8_t fours[FORMAT_TENSORS_MAX][4]; /* of tensors of four bytes */
    uint32_t count;
    bool overflow;
    const struct safetensors_tensor *unread; /* could not be read; NULL as a rule */
};

static uint32_t first_not_before(const struct safetensors *set, const char *name)
{
    uint32_t low = 0, high = safetensors_count(set);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (strcmp(safetensors_at(set, middle)->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A suffix with a dot belongs to another module, unless it names a rank's slice. */
static bool is_part(const char *suffix)
{
    uint32_t rank;
    const char *rest;
    if (format_rank_suffix(suffix, &rank, &rest))
        suffix = rest;
    return strchr(suffix, '.') == NULL;
}

/* start ends with the dot. */
static void find_under(const struct safetensors *set, const char *start, bool shared,
                       struct found *f)
{
    size_t bytes = strlen(start);
    for (uint32_t i = first_not_before(set, start); i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        if (strncmp(t->name, start, bytes) != 0)
            return;
        if (!is_part(t->name + bytes))
            continue;
        if (f->count == FORMAT_TENSORS_MAX) {
            f->overflow = true;
            return;
        }
        uint8_t *four = f->fours[f->count];
        if (t->bytes == 4 && safetensors_read(set, t, 0, four, 4) != ERR_OK)
            f->unread = t;
        bool marker = t->dtype == SAFETENSORS_I32 && t->bytes == 4;
        f->stored[f->count] = t;
        f->tensors[f->count++] = (struct format_tensor){.suffix = t->name + bytes,
                                                        .dtype = t->dtype,
                                                        .dims = t->dims,
                                                        .shape = t->shape,
                                                        .marker = marker ? four : NULL,
                                                        .shared_h = shared};
    }
}

/* "x.experts.7.down_proj" -> "x.experts.shared_h.down_proj."; false for other prefixes. */
static bool shared_prefix(const char *prefix, char ret_start[PREFIX_BYTES])
{
    const char *projection = strrchr(prefix, '.');
    const char *number = projection;
    while (number != NULL && number > prefix && number[-1] != '.')
        number--;
    if (number == NULL || number == projection || number == prefix)
        return false;
    if (strspn(number, "0123456789") != (size_t)(projection - number))
        return false;
    int bytes = snprintf(ret_start, PREFIX_BYTES, "%.*sshared_h%s.", (int)(number - prefix), prefix,
                         projection);
    return bytes > 0 && bytes < PREFIX_BYTES;
}

/* f->count if there is none. */
static uint32_t stored_at(const struct found *f, const char *suffix)
{
    uint32_t i = 0;
    while (i < f->count &&
           (suffix == NULL || f->tensors[i].shared_h || strcmp(f->tensors[i].suffix, suffix) != 0))
        i++;
    return i;
}

static const struct safetensors_tensor *stored(const struct found *f, const char *suffix)
{
    uint32_t i = stored_at(f, suffix);
    return i < f->count ? f->stored[i] : NULL;
}

static const uint8_t *stored_data(const struct found *f, const char *suffix)
{
    const struct safetensors_tensor *t = stored(f, suffix);
    return t != NULL ? t->data : NULL;
}

static enum op_dtype dtype_of(enum safetensors_dtype dtype)
{
    if (dtype == SAFETENSORS_F32)
        return OP_F32;
    return dtype == SAFETENSORS_BF16 ? OP_BF16 : OP_F16;
}

static enum op_scale_dtype scale_dtype_of(enum safetensors_dtype dtype)
{
    switch (dtype) {
    case SAFETENSORS_F32:
        return OP_SCALE_F32;
    case SAFETENSORS_BF16:
        return OP_SCALE_BF16;
    case SAFETENSORS_F16:
        return OP_SCALE_F16;
    case SAFETENSORS_F8_E4M3:
        return OP_SCALE_E4M3;
    default:
        return OP_SCALE_E8M0;
    }
}

static struct op_scales scales_of(const struct format_info *info, const void *data)
{
    struct op_scales s = {.data = data,
                          .dtype = scale_dtype_of(info->scale_dtype),
                          .rows_shared = 1,
                          .columns_shared = OP_SHARED_BY_ALL,
                          .stride = 1};
    switch (info->kind) {
    case FORMAT_FP8_TENSOR:
        s.rows_shared = OP_SHARED_BY_ALL;
        break;
    case FORMAT_FP8_BLOCK:
        s.rows_shared = 128;
        s.columns_shared = 128;
        s.stride = info->in / 128 + (info->in % 128 != 0 ? 1 : 0);
        break;
    case FORMAT_MXFP8:
    case FORMAT_MXFP4:
        s.columns_shared = 32;
        s.stride = info->in / 32;
        break;
    case FORMAT_NVFP4_MODELOPT:
    case FORMAT_NVFP4_CT:
        s.columns_shared = 16;
        s.stride = info->in / 16;
        break;
    default:
        break;
    }
    return s;
}

static enum op_format format_of(enum format_kind kind)
{
    switch (kind) {
    case FORMAT_EXL3:
    case FORMAT_EXL3_RANKED:
        return OP_FORMAT_EXL3;
    case FORMAT_NVFP4_MODELOPT:
    case FORMAT_NVFP4_CT:
        return OP_FORMAT_NVFP4;
    case FORMAT_MXFP4:
        return OP_FORMAT_MXFP4;
    case FORMAT_MXFP8:
        return OP_FORMAT_MXFP8;
    case FORMAT_FP8_BLOCK:
    case FORMAT_FP8_TENSOR:
    case FORMAT_FP8_CHANNEL:
        return OP_FORMAT_FP8;
    default:
        return OP_FORMAT_PLAIN;
    }
}

static void fill_exl3(const struct found *f, const struct format_info *info, struct op_quantised *w)
{
    w->codebook = info->codebook;
    w->half_bits = info->half_bits;
    w->row_bytes = (uint64_t)info->out_padded / OP_EXL3_TILE * 2 * op_exl3_tile_u16(w->half_bits);
    w->suh = info->signs_in ? NULL : stored_data(f, "suh");
    w->svh = info->signs_out ? NULL : stored_data(f, "svh");
    w->su = info->signs_in ? stored_data(f, "su") : NULL;
    w->sv = info->signs_out ? stored_data(f, "sv") : NULL;
    CHECK(w->suh != NULL || w->su != NULL);
    CHECK(w->svh != NULL || w->sv != NULL);
}

static void fill_weight(const struct found *f, const struct format_info *info,
                        struct op_quantised *w)
{
    const struct safetensors_tensor *weight = stored(f, info->weight);
    const struct safetensors_tensor *bias = stored(f, info->bias);
    CHECK(weight != NULL);
    memset(w, 0, sizeof(*w));
    w->format = format_of(info->kind);
    w->out = info->out;
    w->in = info->in;
    w->codes = weight->data;
    if (bias != NULL) {
        w->bias = bias->data;
        w->bias_dtype = dtype_of(bias->dtype);
    }
    if (w->format == OP_FORMAT_EXL3) {
        fill_exl3(f, info, w);
        return;
    }
    w->row_bytes = weight->bytes / info->out;
    if (w->format == OP_FORMAT_PLAIN) {
        w->dtype = dtype_of(weight->dtype);
        return;
    }
    w->scales = scales_of(info, stored_data(f, info->scale));
    if (w->format == OP_FORMAT_NVFP4) {
        uint32_t global = stored_at(f, info->global);
        CHECK(global < f->count && f->stored[global]->bytes == sizeof(w->global));
        memcpy(&w->global, f->fours[global], sizeof(w->global));
        w->global_divides = info->kind == FORMAT_NVFP4_CT;
    }
}

enum err format_bind(const struct safetensors *set, const char *prefix, uint32_t out, uint32_t in,
                     const struct format_hint *hint, struct format_info *ret_info,
                     struct op_quantised *ret_weight, enum format_fault *ret_fault,
                     struct err_detail *detail)
{
    char start[PREFIX_BYTES];
    struct found f;
    struct format_info info;
    f.count = 0;
    f.overflow = false;
    f.unread = NULL;
    int bytes = snprintf(start, sizeof(start), "%s.", prefix);
    if (bytes < 0 || (size_t)bytes >= sizeof(start)) {
        *ret_fault = FORMAT_FAULT_UNSUPPORTED;
        return err_set(detail, ERR_UNSUPPORTED, "unsupported: %.64s...: prefix too long", prefix);
    }
    find_under(set, start, false, &f);
    if (shared_prefix(prefix, start))
        find_under(set, start, true, &f);
    if (f.overflow) {
        *ret_fault = FORMAT_FAULT_UNSUPPORTED;
        return err_set(detail, ERR_UNSUPPORTED, "unsupported: %s: more than %u tensors", prefix,
                       FORMAT_TENSORS_MAX);
    }
    if (f.unread != NULL) {
        *ret_fault = FORMAT_FAULT_MISSING_TENSOR;
        return err_set(detail, ERR_IO, "%s: tensor \"%s\" cannot be read",
                       safetensors_file_name(set, f.unread->shard), f.unread->name);
    }
    TRY(format_detect(prefix, out, in, f.tensors, f.count, hint, &info, ret_fault, detail));
    if (info.kind == FORMAT_EXL3_RANKED) {
        *ret_fault = FORMAT_FAULT_UNSUPPORTED;
        return err_set(detail, ERR_UNSUPPORTED, "unsupported: %s.%s: EXL3 sliced by rank", prefix,
                       info.weight);
    }
    fill_weight(&f, &info, ret_weight);
    *ret_info = info;
    return ERR_OK;
}

static bool is_known(const char *suffix)
{
    uint32_t rank;
    const char *rest;
    if (format_rank_suffix(suffix, &rank, &rest))
        suffix = rest;
    return format_role_of(suffix) != ROLE_COUNT;
}

static uint32_t mark_under(const struct safetensors *set, const char *start, uint8_t *used)
{
    size_t bytes = strlen(start);
    uint32_t count = 0;
    for (uint32_t i = first_not_before(set, start); i < safetensors_count(set); i++) {
        const char *name = safetensors_at(set, i)->name;
        if (strncmp(name, start, bytes) != 0)
            break;
        if (!is_part(name + bytes) || !is_known(name + bytes))
            continue;
        used[i] = 1;
        count++;
    }
    return count;
}

uint32_t format_mark(const struct safetensors *set, const char *prefix, uint8_t *used)
{
    char start[PREFIX_BYTES];
    int bytes = snprintf(start, sizeof(start), "%s.", prefix);
    if (bytes < 0 || (size_t)bytes >= sizeof(start))
        return 0;
    uint32_t count = mark_under(set, start, used);
    if (shared_prefix(prefix, start))
        (void)mark_under(set, start, used);
    return count;
}
