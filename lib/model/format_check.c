/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/format.h"

#include <math.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "kernels/op_exl3.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"
#include "lib/model/format_parts.h"

static uint64_t scale_rows(const struct op_quantised *w)
{
    const struct op_scales *s = &w->scales;
    return ((uint64_t)s->row_phase + w->out - 1) / s->rows_shared + 1;
}

static uint64_t scale_columns(const struct op_quantised *w)
{
    const struct op_scales *s = &w->scales;
    return ((uint64_t)s->column_phase + w->in - 1) / s->columns_shared + 1;
}

/* 16 bytes at a time: true if a lane under the mask has all bits of `all`. */
typedef uint16_t lanes __attribute__((vector_size(16)));

static bool lanes_hit(const uint8_t *bytes, uint64_t count, const lanes *mask, const lanes *all)
{
    lanes found = {0}, x;
    for (uint64_t i = 0; i < count; i += sizeof(x)) {
        memcpy(&x, bytes + i, sizeof(x));
        found |= (lanes)((x & *mask) == *all);
    }
    uint16_t any = 0;
    for (uint32_t i = 0; i < sizeof(x) / sizeof(any); i++)
        any |= found[i];
    return any != 0;
}

uint64_t format_not_finite(const void *data, enum op_dtype dtype, uint64_t count)
{
    const uint8_t *bytes = data;
    const uint32_t step = dtype == OP_F32 ? 4 : 2;
    const uint16_t exponent = dtype == OP_F16 ? 0x7c00u : 0x7f80u;
    const uint64_t chunk = 4096;
    lanes mask, all;
    for (uint32_t i = 0; i < sizeof(mask) / 2; i++) { /* of an F32 the upper half tells */
        bool tells = step == 2 || i % 2 == 1;
        mask[i] = tells ? exponent : 0;
        all[i] = tells ? exponent : 1;
    }
    for (uint64_t start = 0; start < count * step; start += chunk) {
        uint64_t left = count * step - start, bytes_now = left < chunk ? left : chunk;
        if (bytes_now % sizeof(mask) == 0 && !lanes_hit(bytes + start, bytes_now, &mask, &all))
            continue;
        for (uint64_t at = start; at < start + bytes_now; at += step) {
            uint16_t high;
            memcpy(&high, bytes + at + step - 2, sizeof(high));
            if ((high & exponent) == exponent)
                return at / step;
        }
    }
    return count;
}

static uint64_t find_code(const uint8_t *codes, uint64_t count, uint8_t mask, uint8_t value)
{
    const uint64_t chunk = 4096;
    for (uint64_t start = 0; start < count; start += chunk) {
        uint64_t end = count - start < chunk ? count : start + chunk;
        uint8_t found = 0;
        for (uint64_t i = start; i < end; i++)
            found |= (codes[i] & mask) == value;
        for (uint64_t i = start; found != 0 && i < end; i++)
            if ((codes[i] & mask) == value)
                return i;
    }
    return count;
}

static enum err refuse_at(struct format_case *c, const char *suffix, const char *what, uint64_t row,
                          uint64_t column)
{
    return format_refuse(c, FORMAT_FAULT_BAD_VALUE, suffix, "%s at [%llu, %llu]", what,
                         (unsigned long long)row, (unsigned long long)column);
}

/* E4M3 block scales are magnitudes, so a sign bit means corruption or another format. */
static enum err check_scales(struct format_case *c, const struct op_quantised *w)
{
    const struct op_scales *s = &w->scales;
    uint64_t rows = scale_rows(w), columns = scale_columns(w);
    uint64_t bytes = s->dtype == OP_SCALE_F32 ? 4 : 2;
    enum op_dtype dtype = OP_F16;
    if (s->dtype == OP_SCALE_F32)
        dtype = OP_F32;
    else if (s->dtype == OP_SCALE_BF16)
        dtype = OP_BF16;
    for (uint64_t row = 0; row < rows; row++) {
        const uint8_t *codes = (const uint8_t *)s->data;
        uint64_t column = columns;
        const char *what = "not finite";
        if (s->dtype == OP_SCALE_E8M0) {
            column = find_code(codes + row * s->stride, columns, 0xff, OP_E8M0_NAN);
            what = "NaN";
        } else if (s->dtype == OP_SCALE_E4M3) {
            column = find_code(codes + row * s->stride, columns, 0x80, 0x80);
            what = "negative";
            if (column == columns) {
                column = find_code(codes + row * s->stride, columns, 0xff, 0x7f);
                what = "NaN";
            }
        } else {
            column = format_not_finite(codes + row * s->stride * bytes, dtype, columns);
        }
        if (column < columns)
            return refuse_at(c, c->info->scale, what, row, column);
    }
    return ERR_OK;
}

bool format_global_sound(const struct op_quantised *w)
{
    return w->format != OP_FORMAT_NVFP4 || (isfinite(w->global) && w->global > 0);
}

static enum err check_global(struct format_case *c, const struct op_quantised *w)
{
    if (!format_global_sound(w))
        return format_refuse(c, FORMAT_FAULT_BAD_VALUE, c->info->global,
                             "%g, not finite and positive", (double)w->global);
    return ERR_OK;
}

static enum err check_codes(struct format_case *c, const struct op_quantised *w)
{
    for (uint32_t row = 0; row < w->out; row++) {
        const uint8_t *codes = w->codes + row * w->row_bytes;
        uint64_t column = w->in;
        if (w->format == OP_FORMAT_FP8 || w->format == OP_FORMAT_MXFP8)
            column = find_code(codes, w->in, OP_E4M3_NAN_MASK, OP_E4M3_NAN_MASK);
        else if (w->format == OP_FORMAT_PLAIN)
            column = format_not_finite(codes, w->dtype, w->in);
        if (column < w->in)
            return refuse_at(c, c->info->weight,
                             w->format == OP_FORMAT_PLAIN ? "not finite" : "NaN", row, column);
    }
    return ERR_OK;
}

static enum err check_vector(struct format_case *c, const char *suffix, const void *data,
                             enum op_dtype dtype, uint64_t count)
{
    uint64_t at = data != NULL ? format_not_finite(data, dtype, count) : count;
    if (at < count)
        return format_refuse(c, FORMAT_FAULT_BAD_VALUE, suffix, "not finite at [%llu]",
                             (unsigned long long)at);
    return ERR_OK;
}

static enum err check_all(struct format_case *c, const struct op_quantised *w)
{
    if (w->format == OP_FORMAT_EXL3) {
        TRY(check_vector(c, "suh", w->suh, OP_F16, op_exl3_padded(w->in)));
        TRY(check_vector(c, "svh", w->svh, OP_F16, op_exl3_padded(w->out)));
    } else {
        if (w->format != OP_FORMAT_PLAIN)
            TRY(check_scales(c, w));
        TRY(check_global(c, w));
        TRY(check_codes(c, w));
    }
    return check_vector(c, "bias", w->bias, w->bias_dtype, w->out);
}

static bool all_finite(const void *bytes, enum op_dtype dtype, uint64_t count)
{
    uint64_t elements = count / op_dtype_bytes(dtype);
    return format_not_finite(bytes, dtype, elements) == elements;
}

static bool codes_sound(const struct op_quantised *w, const void *bytes, uint64_t count)
{
    if (w->format == OP_FORMAT_PLAIN)
        return all_finite(bytes, w->dtype, count);
    if (w->format == OP_FORMAT_FP8 || w->format == OP_FORMAT_MXFP8)
        return find_code(bytes, count, OP_E4M3_NAN_MASK, OP_E4M3_NAN_MASK) == count;
    return true; /* every code is a number */
}

static bool scales_sound(const struct op_quantised *w, const void *bytes, uint64_t count)
{
    switch (w->scales.dtype) {
    case OP_SCALE_E8M0:
        return find_code(bytes, count, 0xff, OP_E8M0_NAN) == count;
    case OP_SCALE_E4M3:
        return find_code(bytes, count, 0x80, 0x80) == count &&
               find_code(bytes, count, 0xff, 0x7f) == count;
    case OP_SCALE_F32:
        return all_finite(bytes, OP_F32, count);
    case OP_SCALE_BF16:
        return all_finite(bytes, OP_BF16, count);
    case OP_SCALE_F16:
        return all_finite(bytes, OP_F16, count);
    }
    return false;
}

bool format_part_sound(const struct op_quantised *w, enum format_part part, const void *bytes,
                       uint64_t count)
{
    switch (part) {
    case FORMAT_PART_CODES:
        return codes_sound(w, bytes, count);
    case FORMAT_PART_SCALES:
        return scales_sound(w, bytes, count);
    case FORMAT_PART_BIAS:
        return all_finite(bytes, w->bias_dtype, count);
    case FORMAT_PART_SUH:
    case FORMAT_PART_SVH:
        return all_finite(bytes, OP_F16, count);
    default:
        return false;
    }
}

const void *format_part_data(const struct op_quantised *w, enum format_part part)
{
    switch (part) {
    case FORMAT_PART_CODES:
        return w->codes;
    case FORMAT_PART_SCALES:
        return w->scales.data;
    case FORMAT_PART_BIAS:
        return w->bias;
    case FORMAT_PART_SUH:
        return w->suh;
    case FORMAT_PART_SVH:
        return w->svh;
    default:
        return NULL;
    }
}

enum err format_check_values(const char *prefix, const struct format_info *info,
                             const struct op_quantised *weight, enum format_fault *ret_fault,
                             struct err_detail *detail)
{
    CHECK(weight->out == info->out && weight->in == info->in);
    struct format_info copy = *info;
    struct format_case c = {
        .prefix = prefix, .out = info->out, .in = info->in, .info = &copy, .detail = detail};
    enum err e = check_all(&c, weight);
    *ret_fault = c.fault;
    return e;
}

uint64_t format_bytes(const struct op_quantised *w)
{
    if (w->format == OP_FORMAT_EXL3) {
        uint64_t in = op_exl3_padded(w->in), out = op_exl3_padded(w->out);
        uint64_t sides = (w->suh != NULL ? 2 * in : in / 8) + (w->svh != NULL ? 2 * out : out / 8);
        return in * out / OP_EXL3_TILE_WEIGHTS * 2 * op_exl3_tile_u16(w->half_bits) + sides;
    }
    bool fp4 = w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4;
    uint64_t row = fp4 ? w->in / 2 : w->in;
    if (w->format == OP_FORMAT_PLAIN)
        return (uint64_t)w->out * w->in * op_dtype_bytes(w->dtype);
    uint64_t each = 1;
    if (w->scales.dtype == OP_SCALE_F32)
        each = 4;
    else if (w->scales.dtype == OP_SCALE_BF16 || w->scales.dtype == OP_SCALE_F16)
        each = 2;
    return w->out * row + scale_rows(w) * scale_columns(w) * each +
           (w->format == OP_FORMAT_NVFP4 ? sizeof(w->global) : 0);
}
