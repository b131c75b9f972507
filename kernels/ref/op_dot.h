/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/ref/op_dot.h - the one dot product of the reference ops.
 *
 * Pure.  Eight f64 lanes, lane l takes the products of indices i with i % 8 == l in rising order;
 * the lanes are added pairwise in a fixed order.  The product of two f32 is exact in f64, so the
 * result does not depend on fused multiply-add.  Two rows at a time share the widened weights. */
#ifndef KERNELS_REF_OP_DOT_H
#define KERNELS_REF_OP_DOT_H

#include <stdint.h>

typedef float op_v2f __attribute__((vector_size(8), aligned(4), may_alias));
typedef double op_v2d __attribute__((vector_size(16)));

struct op_lanes {
    op_v2d lane[4];
};

static inline op_v2d op_widen2(const float *p)
{
    return __builtin_convertvector(*(const op_v2f *)(const void *)p, op_v2d);
}

static inline void op_lanes_clear(struct op_lanes *s)
{
    for (int i = 0; i < 4; i++)
        s->lane[i] = (op_v2d){0, 0};
}

static inline void op_lanes_tail(struct op_lanes *s, const float *w, const float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        s->lane[i / 2][i % 2] += (double)w[i] * (double)x[i];
}

static inline double op_lanes_sum(const struct op_lanes *s)
{
    op_v2d sum = (s->lane[0] + s->lane[1]) + (s->lane[2] + s->lane[3]);
    return sum[0] + sum[1];
}

/* Adds n products; n must be a multiple of 8 in every call of a sum but the last. */
static inline void op_lanes_add(struct op_lanes *s, const float *w, const float *x, uint32_t n)
{
    uint32_t whole = n & ~7u;
    op_v2d l0 = s->lane[0], l1 = s->lane[1], l2 = s->lane[2], l3 = s->lane[3];
    for (uint32_t i = 0; i < whole; i += 8) {
        l0 += op_widen2(w + i) * op_widen2(x + i);
        l1 += op_widen2(w + i + 2) * op_widen2(x + i + 2);
        l2 += op_widen2(w + i + 4) * op_widen2(x + i + 4);
        l3 += op_widen2(w + i + 6) * op_widen2(x + i + 6);
    }
    *s = (struct op_lanes){{l0, l1, l2, l3}};
    op_lanes_tail(s, w + whole, x + whole, n - whole);
}

static inline void op_lanes_add2(struct op_lanes *s, struct op_lanes *t, const float *w,
                                 const float *x, const float *z, uint32_t n)
{
    uint32_t whole = n & ~7u;
    op_v2d s0 = s->lane[0], s1 = s->lane[1], s2 = s->lane[2], s3 = s->lane[3];
    op_v2d t0 = t->lane[0], t1 = t->lane[1], t2 = t->lane[2], t3 = t->lane[3];
    for (uint32_t i = 0; i < whole; i += 8) {
        op_v2d w0 = op_widen2(w + i), w1 = op_widen2(w + i + 2);
        s0 += w0 * op_widen2(x + i);
        t0 += w0 * op_widen2(z + i);
        s1 += w1 * op_widen2(x + i + 2);
        t1 += w1 * op_widen2(z + i + 2);
        op_v2d w2 = op_widen2(w + i + 4), w3 = op_widen2(w + i + 6);
        s2 += w2 * op_widen2(x + i + 4);
        t2 += w2 * op_widen2(z + i + 4);
        s3 += w3 * op_widen2(x + i + 6);
        t3 += w3 * op_widen2(z + i + 6);
    }
    *s = (struct op_lanes){{s0, s1, s2, s3}};
    *t = (struct op_lanes){{t0, t1, t2, t3}};
    op_lanes_tail(s, w + whole, x + whole, n - whole);
    op_lanes_tail(t, w + whole, z + whole, n - whole);
}

static inline double op_dot(const float *w, const float *x, uint32_t n)
{
    struct op_lanes s;
    op_lanes_clear(&s);
    op_lanes_add(&s, w, x, n);
    return op_lanes_sum(&s);
}

#endif
