/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/quant.h - writing weights in the storage formats: EXL3, NVFP4, MXFP8, FP8.
 *
 * Offline; memory is taken per call, in proportion to the matrix.  Results depend on the matrix,
 * the options and the seed alone, never on the number of threads: ctx only spreads the work. */
#ifndef LIB_MODEL_QUANT_H
#define LIB_MODEL_QUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_format.h"
#include "kernels/op_types.h"
#include "lib/base/err.h"

struct quant_hessian;

/* W[i][o] = w[i * in_stride + o * out_stride]; [out, in] row-major has strides 1 and in. */
struct quant_matrix {
    const float *w;
    uint32_t in, out;
    uint64_t in_stride, out_stride;
};

enum quant_out_scales { QUANT_OUT_SCALES_ALWAYS, QUANT_OUT_SCALES_NEVER, QUANT_OUT_SCALES_AUTO };

#define QUANT_BEAM_MAX 4096u

struct quant_exl3_options {
    uint32_t bits; /* 1 to 8 */
    enum op_codebook codebook;
    uint32_t beam; /* survivors a step; 0: the full search */
    double scale;  /* global scale; 0: searched */
    uint64_t seed; /* of the output signs, and of the input signs without a Hessian */
    enum quant_out_scales out_scales;
    /* Told of finished tiles, from any thread; NULL: nobody. */
    void (*progress)(void *arg, uint64_t tiles_done, uint64_t tiles_total);
    void *progress_arg;
};

/* The tensors of one linear, padded; owned until quant_exl3_fini.  The caller stores trellis as
 * I16 [in_padded / 16, out_padded / 16, 16 bits], suh and svh as F16, and the codebook's marker
 * (an I32 of shape []; none for 3inst). */
struct quant_exl3 {
    uint32_t in, out, in_padded, out_padded;
    uint32_t bits;
    enum op_codebook codebook;
    uint16_t *trellis;
    uint64_t trellis_bytes;
    uint16_t *suh, *svh;
    double scale;          /* the global scale used */
    double relative_error; /* sum (Wq - W)^2 / sum W^2, without padding */
    double proxy_error;    /* the same weighted by the Hessian, in the transformed domain */
};

/* h may be NULL: every input counts alike.  ERR_INVALID: options out of range, W not finite or too
 * large for f16 scales. */
MUST_USE enum err quant_exl3(const struct quant_matrix *m, const struct quant_hessian *h,
                             const struct quant_exl3_options *options, const struct op_ctx *ctx,
                             struct quant_exl3 *ret_result, struct err_detail *detail);
void quant_exl3_fini(struct quant_exl3 *q);
/* The result as a weight, borrowing its memory. */
struct op_quantised quant_exl3_weight(const struct quant_exl3 *q);

/* What a layer's inputs look like: H = mean of x^T x over calibration rows, for one group of
 * linears that read the same input; they also share the input signs. */
struct quant_hessian *quant_hessian_create(uint32_t in);
void quant_hessian_destroy(struct quant_hessian **h_p);
/* Adds rows of x [rows, in].  Only before finish. */
void quant_hessian_add(struct quant_hessian *h, const float *x, uint32_t rows, uint64_t stride,
                       const struct op_ctx *ctx);
/* Transforms and factors.  A Hessian that cannot be used (no rows, not finite, nearly zero) makes
 * quant_exl3 work without error feedback: quant_hessian_usable tells. */
void quant_hessian_finish(struct quant_hessian *h, uint64_t seed, const struct op_ctx *ctx);
bool quant_hessian_usable(const struct quant_hessian *h);

/* Codes and scales as the checkpoint stores them, [out, in] row-major; the caller gives memory of
 * these sizes.  Not finite values are ERR_INVALID, as is an `in` off the group. */
enum quant_fp8 { QUANT_FP8_TENSOR, QUANT_FP8_CHANNEL, QUANT_FP8_BLOCK };

/* scales f32: 1, [out] or [ceil(out / 128), ceil(in / 128)]. */
MUST_USE enum err quant_fp8(const struct quant_matrix *m, enum quant_fp8 kind, uint8_t *ret_codes,
                            float *ret_scales);
/* scales [out, in / 32]; in is a multiple of 32. */
MUST_USE enum err quant_mxfp8(const struct quant_matrix *m, uint8_t *ret_codes,
                              uint8_t *ret_scales);
/* codes [out, in / 2], scales [out, in / 16]; in is a multiple of 16.  global: multiplying
 * (modelopt's weight_scale_2) or dividing (compressed-tensors' weight_global_scale). */
MUST_USE enum err quant_nvfp4(const struct quant_matrix *m, bool global_divides, uint8_t *ret_codes,
                              uint8_t *ret_scales, float *ret_global);

#endif
