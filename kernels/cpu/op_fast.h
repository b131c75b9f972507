/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/cpu/op_fast.h - entry points of the variants per instruction set.
 *
 * Called through the op table only, after op_cpu.h has said that the processor has them.  Two kinds:
 * exact ones give the reference's bits; fast ones compute in f32 with fused multiply-add and are
 * row-invariant.  A fast file is compiled once per instruction set with -DOP_ISA=avx2 and the like,
 * and names its functions with OP_FAST. */
#ifndef KERNELS_CPU_OP_FAST_H
#define KERNELS_CPU_OP_FAST_H

#include "kernels/op_table.h"

/* Ops with a fast variant in every instruction set. */
#define OP_FAST_LIST(X)                                                                            \
    X(rms_norm)                                                                                    \
    X(l2norm)                                                                                      \
    X(layer_norm)                                                                                  \
    X(linear)                                                                                      \
    X(grouped_linear)                                                                              \
    X(mhc_pre)                                                                                     \
    X(mhc_post)                                                                                    \
    X(stream_mean)                                                                                 \
    X(swiglu)                                                                                      \
    X(moe_combine)                                                                                 \
    X(short_conv)                                                                                  \
    X(kda_gates)                                                                                   \
    X(kda)                                                                                         \
    X(kda_out)                                                                                     \
    X(mla_absorb)                                                                                  \
    X(mla_attend)                                                                                  \
    X(mla_value)                                                                                   \
    X(index_score)

#define OP_FAST_NAME_(name, isa) op_##name##_fast_##isa
#define OP_FAST_NAME(name, isa)  OP_FAST_NAME_(name, isa)
#ifdef OP_ISA
#define OP_FAST(name) OP_FAST_NAME(name, OP_ISA)
#endif

#define OP_DECLARE_FAST(name)                                                                      \
    MUST_USE enum err op_##name##_fast_avx2(const struct op_##name##_args *a,                      \
                                            const struct op_ctx *ctx);                             \
    MUST_USE enum err op_##name##_fast_avx512(const struct op_##name##_args *a,                    \
                                              const struct op_ctx *ctx);                           \
    MUST_USE enum err op_##name##_fast_neon(const struct op_##name##_args *a,                      \
                                            const struct op_ctx *ctx);
OP_FAST_LIST(OP_DECLARE_FAST)
#undef OP_DECLARE_FAST

/* Exact. */
MUST_USE enum err op_linear_avx2(const struct op_linear_args *a, const struct op_ctx *ctx);
MUST_USE enum err op_grouped_linear_avx2(const struct op_grouped_linear_args *a,
                                         const struct op_ctx *ctx);

#endif
