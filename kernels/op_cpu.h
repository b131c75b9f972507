/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_cpu.h - what this processor can run; probed once.
 *
 * Pure but for reading the processor's own description. */
#ifndef KERNELS_OP_CPU_H
#define KERNELS_OP_CPU_H

#include <stdbool.h>

/* Instruction sets that have variants, in rising order of capability on one machine. */
enum op_cpu {
    OP_CPU_REF,    /* plain C */
    OP_CPU_NEON,   /* Armv8 */
    OP_CPU_AVX2,   /* with FMA and F16C */
    OP_CPU_AVX512, /* F, BW, VL and DQ */
    OP_CPU_COUNT
};

bool op_cpu_has(enum op_cpu cpu); /* compiled in and present; REF always is */

enum op_cpu op_cpu_best(void);

const char *op_cpu_name(enum op_cpu cpu);

#endif
