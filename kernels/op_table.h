/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_table.h - one table of ops: the reference fills every slot, variants replace it.
 *
 * Pure.  Callers use ops->x(&args, ctx) and never ask which device they run on. */
#ifndef KERNELS_OP_TABLE_H
#define KERNELS_OP_TABLE_H

#include <stddef.h>

#include "kernels/op_cpu.h"
#include "kernels/op_dcp.h"
#include "kernels/op_index.h"
#include "kernels/op_kda.h"
#include "kernels/op_linear.h"
#include "kernels/op_mhc.h"
#include "kernels/op_mla.h"
#include "kernels/op_moe.h"
#include "kernels/op_norm.h"
#include "kernels/op_types.h"

/* Every op once: name and, by rule, struct op_<name>_args and op_<name>_ref. */
#define OP_LIST(X)                                                                                 \
    X(embed)                                                                                       \
    X(index_best)                                                                                  \
    X(index_merge)                                                                                 \
    X(mla_merge)                                                                                   \
    X(rms_norm)                                                                                    \
    X(l2norm)                                                                                      \
    X(layer_norm)                                                                                  \
    X(linear)                                                                                      \
    X(grouped_linear)                                                                              \
    X(mhc_pre)                                                                                     \
    X(mhc_post)                                                                                    \
    X(stream_mean)                                                                                 \
    X(swiglu)                                                                                      \
    X(router)                                                                                      \
    X(moe_dispatch)                                                                                \
    X(moe_combine)                                                                                 \
    X(short_conv)                                                                                  \
    X(kda_gates)                                                                                   \
    X(kda)                                                                                         \
    X(kda_out)                                                                                     \
    X(latent_write)                                                                                \
    X(mla_absorb)                                                                                  \
    X(mla_attend)                                                                                  \
    X(mla_value)                                                                                   \
    X(index_pool)                                                                                  \
    X(index_rotate)                                                                                \
    X(index_score)                                                                                 \
    X(index_select)

struct op_table {
#define OP_SLOT(name) enum err (*name)(const struct op_##name##_args *, const struct op_ctx *);
    OP_LIST(OP_SLOT)
#undef OP_SLOT
};

/* The reference in every slot. */
void op_table_ref(struct op_table *ret_table);

/* exact: every slot gives the reference's bits.  fast: f32 sums with fused multiply-add, within the
 * contract's tolerances for it, and still row-invariant. */
enum op_numerics { OP_EXACT, OP_FAST_F32 };

/* The reference, then the variants of each instruction set up to `limit` that the processor has,
 * better ones replacing lesser ones. */
void op_table_cpu(struct op_table *ret_table, enum op_numerics numerics, enum op_cpu limit);

/* For the log: "avx2 exact: linear grouped_linear; ref: embed ...".  bytes >= OP_TABLE_TEXT_BYTES
 * holds any table. */
#define OP_TABLE_TEXT_BYTES 1024
void op_table_text(const struct op_table *table, char *ret_text, size_t bytes);

#endif
