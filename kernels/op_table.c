/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_table.h"

#include "kernels/cpu/op_cpu_variants.h"
#include "kernels/op_cpu.h"

void op_table_ref(struct op_table *ret_table)
{
#define OP_FILL(name) ret_table->name = op_##name##_ref;
    OP_LIST(OP_FILL)
#undef OP_FILL
}

enum op_cpu op_table_cpu(struct op_table *ret_table)
{
    op_table_ref(ret_table);
#if defined(__x86_64__)
    if (op_cpu_has_avx2()) {
        ret_table->linear = op_linear_avx2;
        ret_table->grouped_linear = op_grouped_linear_avx2;
        return OP_CPU_AVX2;
    }
#endif
    return OP_CPU_REF;
}
