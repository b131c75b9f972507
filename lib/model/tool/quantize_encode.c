/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/quantize.h"

#include <string.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/quant.h"

#define MARKER_MCG  0xCBAC1FEDu
#define MARKER_MUL1 0x83DCD12Du

static uint8_t *append(uint8_t *at, const void *bytes, uint64_t count)
{
    memcpy(at, bytes, count);
    return at + count;
}

static enum err encode_exl3(const struct quantize_linear *l, const struct quantize_options *o,
                            const struct quant_matrix *m, const struct quant_hessian *h,
                            const struct quant_exl3_options *how, const struct op_ctx *ctx,
                            uint8_t *at, struct quantize_result *ret, struct err_detail *detail)
{
    struct quant_exl3 q;
    struct err_detail inner = {{0}};
    enum err e = quant_exl3(m, h, how, ctx, &q, &inner);
    if (e != ERR_OK)
        return err_set(detail, e, "%s: %s", l->prefix, inner.text);
    CHECK(q.trellis_bytes == l->parts[0].bytes);
    at = append(at, q.trellis, q.trellis_bytes);
    at = append(at, q.suh, l->parts[1].bytes);
    at = append(at, q.svh, l->parts[2].bytes);
    uint32_t marker = o->codebook == OP_CODEBOOK_MCG ? MARKER_MCG : MARKER_MUL1;
    for (uint32_t i = 0; i < 4 && l->part_count == 4; i++)
        *at++ = (uint8_t)(marker >> (8 * i));
    ret->proxy_error = q.proxy_error;
    quant_exl3_fini(&q);
    return ERR_OK;
}

/* The parts as the loader would read them. */
static struct op_quantised weight_of(const struct quantize_linear *l,
                                     const struct quantize_options *o, const uint8_t *bytes)
{
    const uint8_t *second = bytes + l->parts[0].bytes, *third = second + l->parts[1].bytes;
    struct op_quantised w = {.format = OP_FORMAT_FP8,
                             .out = l->source.out,
                             .in = l->source.in,
                             .codes = bytes,
                             .row_bytes = l->source.in};
    w.scales = (struct op_scales){.data = second, .rows_shared = 1};
    switch (o->format) {
    case QUANTIZE_EXL3:
        w.format = OP_FORMAT_EXL3;
        w.codebook = o->codebook;
        w.half_bits = 2 * o->bits;
        w.row_bytes = l->parts[0].bytes / l->parts[0].shape[0];
        w.suh = second;
        w.svh = third;
        return w;
    case QUANTIZE_NVFP4:
        w.format = OP_FORMAT_NVFP4;
        w.row_bytes = l->source.in / 2;
        w.scales.dtype = OP_SCALE_E4M3;
        w.scales.columns_shared = 16;
        memcpy(&w.global, third, sizeof(w.global));
        break;
    case QUANTIZE_MXFP8:
        w.format = OP_FORMAT_MXFP8;
        w.scales.dtype = OP_SCALE_E8M0;
        w.scales.columns_shared = 32;
        break;
    case QUANTIZE_FP8:
        w.scales.dtype = OP_SCALE_F32;
        w.scales.rows_shared = 128;
        w.scales.columns_shared = 128;
        break;
    }
    w.scales.stride = (l->source.in + w.scales.columns_shared - 1) / w.scales.columns_shared;
    return w;
}

double quantize_error(const struct quantize_linear *l, const struct quantize_options *options,
                      const uint8_t *bytes, const struct op_ctx *ctx)
{
    size_t count = (size_t)l->source.in * l->source.out;
    float *have = mem_take_array(count, sizeof(*have)),
          *want = mem_take_array(count, sizeof(*want));
    struct op_quantised w = weight_of(l, options, bytes);
    double error = 0, square = 0;
    CHECK(op_dequantise_ref(&(struct op_dequantise_args){.w = &w, .y = have}, ctx) == ERR_OK);
    CHECK(op_dequantise_ref(&(struct op_dequantise_args){.w = &l->source, .y = want}, ctx) ==
          ERR_OK);
    for (size_t i = 0; i < count; i++) {
        double difference = (double)have[i] - want[i];
        error += difference * difference;
        square += (double)want[i] * want[i];
    }
    mem_give(have);
    mem_give(want);
    return square > 0 ? error / square : error;
}

static enum err encode_fp(const struct quantize_linear *l, enum quantize_format format,
                          const struct quant_matrix *m, uint8_t *at, struct err_detail *detail)
{
    uint8_t *scales = at + l->parts[0].bytes;
    enum err e;
    if (format == QUANTIZE_NVFP4) {
        float global = 0;
        e = quant_nvfp4(m, false, at, scales, &global);
        memcpy(scales + l->parts[1].bytes, &global, sizeof(global));
    } else if (format == QUANTIZE_MXFP8) {
        e = quant_mxfp8(m, at, scales);
    } else {
        float *aligned = mem_take(l->parts[1].bytes);
        e = quant_fp8(m, QUANT_FP8_BLOCK, at, aligned);
        memcpy(scales, aligned, l->parts[1].bytes);
        mem_give(aligned);
    }
    return e == ERR_OK ? ERR_OK : err_set(detail, e, "%s: a value is not finite", l->prefix);
}

enum err quantize_encode(const struct quantize_linear *l, const struct quantize_options *options,
                         const struct quant_hessian *h, uint64_t seed, const struct op_ctx *ctx,
                         void (*progress)(void *arg, uint64_t done, uint64_t total),
                         void *progress_arg, uint8_t *ret_bytes, struct quantize_result *ret_result,
                         struct err_detail *detail)
{
    float *dense = mem_take_array((size_t)l->source.in * l->source.out, sizeof(*dense));
    struct op_dequantise_args widen = {.w = &l->source, .y = dense};
    struct quant_matrix m = {.w = dense,
                             .in = l->source.in,
                             .out = l->source.out,
                             .in_stride = 1,
                             .out_stride = l->source.in};
    struct quant_exl3_options how = {.bits = options->bits,
                                     .codebook = options->codebook,
                                     .beam = options->beam,
                                     .seed = seed,
                                     .out_scales = QUANT_OUT_SCALES_AUTO,
                                     .progress = progress,
                                     .progress_arg = progress_arg};
    enum err e = op_dequantise_ref(&widen, ctx);
    if (e != ERR_OK)
        e = err_set(detail, e, "%s: cannot be decoded", l->prefix);
    else if (options->format == QUANTIZE_EXL3)
        e = encode_exl3(l, options, &m, h, &how, ctx, ret_bytes, ret_result, detail);
    else
        e = encode_fp(l, options->format, &m, ret_bytes, detail);
    mem_give(dense);
    if (e != ERR_OK)
        return e;
    ret_result->relative_error = quantize_error(l, options, ret_bytes, ctx);
    if (options->format != QUANTIZE_EXL3)
        ret_result->proxy_error = ret_result->relative_error;
    return ERR_OK;
}
