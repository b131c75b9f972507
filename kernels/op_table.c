/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_table.h"

void op_table_ref(struct op_table *ret_table)
{
#define OP_FILL(name) ret_table->name = op_##name##_ref;
    OP_LIST(OP_FILL)
#undef OP_FILL
}
