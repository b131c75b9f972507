/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_table.h"

#include <stdbool.h>
#include <stdio.h>

#include "kernels/cpu/op_fast.h"
#include "lib/base/check.h"

void op_table_ref(struct op_table *ret_table)
{
#define FILL(name) ret_table->name = op_##name##_ref;
    OP_LIST(FILL)
#undef FILL
}

/* False if there is no such set in this build. */
static bool variants(enum op_numerics numerics, enum op_cpu cpu, struct op_table *ops)
{
    *ops = (struct op_table){0};
#if defined(__x86_64__)
    if (numerics == OP_EXACT && cpu == OP_CPU_AVX2) {
        ops->linear = op_linear_avx2;
        ops->grouped_linear = op_grouped_linear_avx2;
        return true;
    }
#define FILL_AVX2(name)   ops->name = OP_FAST_NAME(name, avx2);
#define FILL_AVX512(name) ops->name = OP_FAST_NAME(name, avx512);
    if (numerics == OP_FAST_F32 && cpu == OP_CPU_AVX2) {
        OP_FAST_LIST(FILL_AVX2)
        return true;
    }
    if (numerics == OP_FAST_F32 && cpu == OP_CPU_AVX512) {
        OP_FAST_LIST(FILL_AVX512)
        return true;
    }
#elif defined(__aarch64__)
#define FILL_NEON(name) ops->name = OP_FAST_NAME(name, neon);
    if (numerics == OP_FAST_F32 && cpu == OP_CPU_NEON) {
        OP_FAST_LIST(FILL_NEON)
        return true;
    }
#endif
    return false;
}

static void replace(struct op_table *table, const struct op_table *better)
{
#define REPLACE(name) table->name = better->name != NULL ? better->name : table->name;
    OP_LIST(REPLACE)
#undef REPLACE
}

void op_table_cpu(struct op_table *ret_table, enum op_numerics numerics, enum op_cpu limit)
{
    CHECK(limit < OP_CPU_COUNT);
    op_table_ref(ret_table);
    for (unsigned cpu = OP_CPU_REF; cpu <= (unsigned)limit; cpu++) {
        struct op_table better;
        if (!op_cpu_has((enum op_cpu)cpu))
            continue;
        if (variants(OP_EXACT, (enum op_cpu)cpu, &better))
            replace(ret_table, &better);
        if (numerics == OP_FAST_F32 && variants(OP_FAST_F32, (enum op_cpu)cpu, &better))
            replace(ret_table, &better);
    }
}

static void add_text(char *text, size_t bytes, size_t *at, const char *more)
{
    int n = snprintf(text + *at, bytes - *at, "%s", more);
    CHECK(n >= 0);
    *at = *at + (size_t)n < bytes ? *at + (size_t)n : bytes - 1;
}

/* The ops of `table` that come from `set`; nothing at all if there are none. */
static void add_set(const struct op_table *table, const struct op_table *set, const char *name,
                    char *text, size_t bytes, size_t *at)
{
    bool first = true;
#define ADD(op)                                                                                    \
    if (table->op == set->op) {                                                                    \
        add_text(text, bytes, at, first ? (*at > 0 ? "; " : "") : "");                             \
        add_text(text, bytes, at, first ? name : "");                                              \
        add_text(text, bytes, at, first ? ": " #op : " " #op);                                     \
        first = false;                                                                             \
    }
    OP_LIST(ADD)
#undef ADD
}

void op_table_text(const struct op_table *table, char *ret_text, size_t bytes)
{
    struct op_table set;
    char name[32];
    size_t at = 0;
    CHECK(bytes > 0);
    ret_text[0] = '\0';
    for (unsigned i = 2 * OP_CPU_COUNT; i-- > 0;) {
        enum op_cpu cpu = (enum op_cpu)(i / 2);
        if (!variants(i % 2 == 0 ? OP_EXACT : OP_FAST_F32, cpu, &set))
            continue;
        snprintf(name, sizeof(name), "%s %s", op_cpu_name(cpu), i % 2 == 0 ? "exact" : "fast");
        add_set(table, &set, name, ret_text, bytes, &at);
    }
    op_table_ref(&set);
    add_set(table, &set, "ref", ret_text, bytes, &at);
}
