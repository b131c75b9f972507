/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_format.h"

#include <string.h>

#include "kernels/op_dtype.h"
#include "kernels/op_number.h"
#include "lib/base/check.h"

static float element_at(const void *data, enum op_dtype dtype, uint64_t index)
{
    const uint8_t *at = (const uint8_t *)data + index * op_dtype_bytes(dtype);
    if (dtype == OP_F32) {
        float value;
        memcpy(&value, at, sizeof(value));
        return value;
    }
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    return dtype == OP_BF16 ? op_f32_from_bf16(bits) : op_f32_from_f16(bits);
}

static float scale_at(const struct op_scales *s, uint64_t index)
{
    const uint8_t *bytes = s->data;
    switch (s->dtype) {
    case OP_SCALE_F32:
        return element_at(s->data, OP_F32, index);
    case OP_SCALE_BF16:
        return element_at(s->data, OP_BF16, index);
    case OP_SCALE_F16:
        return element_at(s->data, OP_F16, index);
    case OP_SCALE_E8M0:
        return op_f32_from_e8m0(bytes[index]);
    case OP_SCALE_E4M3:
        return op_e4m3_values[bytes[index]];
    }
    CHECK(!"scale dtype");
    return 0;
}

/* A run of columns of one row that share a scale. */
struct run {
    uint32_t column, end;
    float scale;
};

static void run_next(const struct op_quantised *w, uint32_t row, uint32_t end, struct run *r)
{
    const struct op_scales *s = &w->scales;
    uint64_t scale_row = ((uint64_t)s->row_phase + row) / s->rows_shared;
    uint64_t scale_column = ((uint64_t)s->column_phase + r->column) / s->columns_shared;
    uint64_t next = (scale_column + 1) * s->columns_shared - s->column_phase;
    r->end = next < end ? (uint32_t)next : end;
    r->scale = scale_at(s, scale_row * s->stride + scale_column);
}

float op_quantised_scale(const struct op_quantised *w, uint32_t row, uint32_t column,
                         uint32_t *ret_end)
{
    CHECK(row < w->out && column < w->in);
    struct run r = {.column = column};
    run_next(w, row, w->in, &r);
    *ret_end = r.end;
    return r.scale;
}

static void fp8_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t end,
                    float *out)
{
    const uint8_t *codes = w->codes + row * w->row_bytes;
    struct run r = {.column = first};
    for (; r.column < end; r.column = r.end) {
        run_next(w, row, end, &r);
        for (uint32_t i = r.column; i < r.end; i++)
            out[i - first] = op_e4m3_values[codes[i]] * r.scale;
    }
}

static void fp4_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t end,
                    float *out)
{
    const uint8_t *codes = w->codes + row * w->row_bytes;
    struct run r = {.column = first};
    for (; r.column < end; r.column = r.end) {
        run_next(w, row, end, &r);
        for (uint32_t i = r.column; i < r.end; i++)
            out[i - first] = op_e2m1_values[codes[i / 2] >> (i % 2 * 4) & 15] * r.scale;
    }
    if (w->format != OP_FORMAT_NVFP4)
        return;
    /* NOTE: the product above is exact, so that this is the one rounding. */
    for (uint32_t i = 0; i < end - first; i++)
        out[i] = w->global_divides ? out[i] / w->global : out[i] * w->global;
}

/* A loop for each dtype, which the compiler turns into vectors. */
static void plain_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t count,
                      float *out)
{
    const uint8_t *from = w->codes + row * w->row_bytes + first * op_dtype_bytes(w->dtype);
    if (w->dtype == OP_F32) {
        memcpy(out, from, count * sizeof(*out));
    } else if (w->dtype == OP_BF16) {
        for (uint32_t i = 0; i < count; i++) {
            uint16_t bits;
            memcpy(&bits, from + i * sizeof(bits), sizeof(bits));
            out[i] = op_f32_from_bf16(bits);
        }
    } else {
        for (uint32_t i = 0; i < count; i++)
            out[i] = element_at(from, OP_F16, i);
    }
}

void op_quantised_row(const struct op_quantised *w, uint32_t row, uint32_t first, uint32_t count,
                      float *ret_values)
{
    CHECK(row < w->out);
    CHECK(first <= w->in && count <= w->in - first);
    switch (w->format) {
    case OP_FORMAT_PLAIN:
        plain_row(w, row, first, count, ret_values);
        return;
    case OP_FORMAT_FP8:
    case OP_FORMAT_MXFP8:
        fp8_row(w, row, first, first + count, ret_values);
        return;
    case OP_FORMAT_MXFP4:
    case OP_FORMAT_NVFP4:
        fp4_row(w, row, first, first + count, ret_values);
        return;
    case OP_FORMAT_EXL3:
        break;
    }
    CHECK(!"rows of EXL3 are spread over tiles");
}

float op_quantised_bias(const struct op_quantised *w, uint32_t out)
{
    CHECK(out < w->out);
    if (w->bias == NULL)
        return 0;
    float value = element_at(w->bias, w->bias_dtype, out);
    return w->format == OP_FORMAT_EXL3 ? op_f32_from_f16(op_f16_from_f32(value)) : value;
}
