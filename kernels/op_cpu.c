/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_cpu.h"

bool op_cpu_has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}
