/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/calib.h - what the linears of a model read on calibration texts.
 *
 * One thread.  All texts run as one batch, layer by layer; of the layer that ran last the inputs
 * are kept, of no other, so memory is rows times the widths of one layer. */
#ifndef LIB_MODEL_TOOL_CALIB_H
#define LIB_MODEL_TOOL_CALIB_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"
#include "lib/model/model.h"

struct calib;
struct quant_hessian;
struct texts;

/* Borrows the model. */
MUST_USE enum err calib_create(struct model *m, const struct texts *texts, struct calib **ret_calib,
                               struct err_detail *detail);
void calib_destroy(struct calib **c_p);

/* Runs the next layer; its inputs are kept if keep. */
void calib_layer(struct calib *c, bool keep);
/* The Hessian of a group's inputs in that layer, finished; NULL without rows. */
struct quant_hessian *calib_hessian(const struct calib *c, enum model_input which, uint32_t expert,
                                    uint64_t seed, const struct op_ctx *ctx, uint64_t *ret_rows);

#endif
