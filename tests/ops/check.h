/* SPDX-License-Identifier: Apache-2.0 */
/* tests/ops/check.h - guarded buffers, golden tensors and comparison for op checks.
 *
 * For tests only; one thread.  Outputs start as NaN and lie between guards. */
#ifndef TESTS_OPS_CHECK_H
#define TESTS_OPS_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "kernels/op_table.h"
#include "lib/base/rng.h"
#include "lib/model/safetensors.h"

#define CHECK_GUARD_FLOATS 16
#define CHECK_GUARD_BITS   0x7fa5a5a5u
#define CHECK_BUFFERS_MAX  64

/* Buffers of one test, freed and checked by check_end. */
struct check {
    struct op_ctx ctx;
    uint32_t *base[CHECK_BUFFERS_MAX];
    size_t floats[CHECK_BUFFERS_MAX];
    uint32_t count;
};

/* floats words of NaN between guards. */
static inline void *check_words(struct check *k, size_t floats)
{
    size_t all = floats + 2 * CHECK_GUARD_FLOATS;
    uint32_t *base = malloc(all * sizeof(uint32_t));
    assert_non_null(base);
    assert_true(k->count < CHECK_BUFFERS_MAX);
    for (size_t i = 0; i < all; i++)
        base[i] = i < CHECK_GUARD_FLOATS || i >= floats + CHECK_GUARD_FLOATS ? CHECK_GUARD_BITS
                                                                             : 0x7fc00000u;
    k->base[k->count] = base;
    k->floats[k->count++] = floats;
    return base + CHECK_GUARD_FLOATS;
}

static inline void check_end(struct check *k)
{
    for (uint32_t b = 0; b < k->count; b++) {
        for (size_t i = 0; i < CHECK_GUARD_FLOATS; i++)
            if (k->base[b][i] != CHECK_GUARD_BITS ||
                k->base[b][CHECK_GUARD_FLOATS + k->floats[b] + i] != CHECK_GUARD_BITS)
                fail_msg("buffer %u: written outside", b);
        free(k->base[b]);
    }
    k->count = 0;
}

static inline float *check_random(struct check *k, size_t floats, struct rng *rng, double scale)
{
    float *x = check_words(k, floats);
    for (size_t i = 0; i < floats; i++)
        x[i] = (float)((rng_unit(rng) * 2 - 1) * scale);
    return x;
}

static inline struct safetensors *check_golden(void)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct safetensors *set = NULL;
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    assert_non_null(root);
    snprintf(path, sizeof(path), "%s/tests/golden/ops/ops.safetensors", root);
    if (safetensors_open_file(path, &set, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return set;
}

static inline const struct safetensors_tensor *check_find(const struct safetensors *set,
                                                          const char *name)
{
    const struct safetensors_tensor *t = safetensors_find(set, name);
    if (t == NULL)
        fail_msg("golden tensor %s is missing", name);
    return t;
}

/* A golden tensor's words in a guarded buffer. */
static inline void *check_load(struct check *k, const struct safetensors *set, const char *name)
{
    const struct safetensors_tensor *t = check_find(set, name);
    void *words = check_words(k, (size_t)((t->bytes + 3) / 4));
    memcpy(words, t->data, t->bytes);
    return words;
}

static inline void check_close(const struct safetensors *set, const char *name, const float *have,
                               double bound)
{
    const struct safetensors_tensor *t = check_find(set, name);
    assert_int_equal(t->dtype, SAFETENSORS_F32);
    for (uint64_t i = 0; i < t->elements; i++) {
        float want;
        memcpy(&want, t->data + i * sizeof(want), sizeof(want));
        double allowed = bound * fmax(1, fabs((double)want));
        if (!(fabs((double)have[i] - want) <= allowed))
            fail_msg("%s[%llu]: %.9g, expected %.9g", name, (unsigned long long)i, (double)have[i],
                     (double)want);
    }
}

/* RUN(k, table, rms_norm, .x = ...) */
#define CHECK_RUN(k, table, op, ...)                                                               \
    assert_int_equal((table)->op(&(struct op_##op##_args){__VA_ARGS__}, &(k)->ctx), ERR_OK)

#endif
