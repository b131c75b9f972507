/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stddef.h>

#include "lib/base/check.h"

#define PROBED 0x100u /* set once the other bits count */

#if defined(__x86_64__)
/* clang 14 does not know the name "f16c" in its builtin. */
static bool has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

static unsigned probe(void)
{
    unsigned has = PROBED | 1u << OP_CPU_REF;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        has |= 1u << OP_CPU_AVX2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            has |= 1u << OP_CPU_AVX512;
    }
#elif defined(__aarch64__)
    has |= 1u << OP_CPU_NEON; /* part of the base architecture */
#endif
    return has;
}

static unsigned features(void)
{
    static atomic_uint known; /* whoever comes first writes what everyone would */
    unsigned has = atomic_load_explicit(&known, memory_order_relaxed);
    if ((has & PROBED) == 0) {
        has = probe();
        atomic_store_explicit(&known, has, memory_order_relaxed);
    }
    return has;
}

bool op_cpu_has(enum op_cpu cpu)
{
    CHECK(cpu < OP_CPU_COUNT);
    return (features() >> cpu & 1u) != 0;
}

enum op_cpu op_cpu_best(void)
{
    enum op_cpu best = OP_CPU_REF;
    for (unsigned cpu = OP_CPU_REF; cpu < OP_CPU_COUNT; cpu++)
        best = op_cpu_has((enum op_cpu)cpu) ? (enum op_cpu)cpu : best;
    return best;
}

const char *op_cpu_name(enum op_cpu cpu)
{
    static const char *const names[OP_CPU_COUNT] = {"ref", "neon", "avx2", "avx512"};
    CHECK(cpu < OP_CPU_COUNT);
    return names[cpu];
}
