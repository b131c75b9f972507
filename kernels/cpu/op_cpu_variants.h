/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_cpu_variants.h - entry points of the variants per instruction set.
 *
 * Called through the op table only, after op_cpu.h has said that the processor has them. */
#ifndef KERNELS_CPU_OP_CPU_VARIANTS_H
#define KERNELS_CPU_OP_CPU_VARIANTS_H

#include "kernels/op_linear.h"

MUST_USE enum err op_linear_avx2(const struct op_linear_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_grouped_linear_avx2(const struct op_grouped_linear_args *a,
                                         const struct op_ctx *ctx);

#endif
