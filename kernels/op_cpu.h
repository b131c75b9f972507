/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_cpu.h - what this processor can run; probed once at start.
 *
 * Pure but for reading the processor's own description. */
#ifndef KERNELS_OP_CPU_H
#define KERNELS_OP_CPU_H

#include <stdbool.h>

bool op_cpu_has_avx2(void); /* AVX2 and FMA */

#endif
