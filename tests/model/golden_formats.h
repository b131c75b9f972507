/* SPDX-License-Identifier: Apache-2.0 */
/* tests/model/golden_formats.h - reading tests/golden/formats: JSON, checkpoints, comparisons.
 *
 * Include after cmocka.h.  Every function fails the test that calls it. */
#ifndef TESTS_MODEL_GOLDEN_FORMATS_H
#define TESTS_MODEL_GOLDEN_FORMATS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/json.h"
#include "lib/model/format.h"
#include "lib/model/safetensors.h"

static inline const char *golden_path(char *ret_path, size_t bytes, const char *name)
{
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    assert_non_null(root);
    snprintf(ret_path, bytes, "%s/tests/golden/formats/%s", root, name);
    return ret_path;
}

static struct arena golden_arena; /* of all JSON that a test reads; goes with the process */

static inline const struct json *golden_json(const char *name)
{
    char path[1024];
    struct json *value = NULL;
    struct json_error error = {0, ""};
    FILE *file = fopen(golden_path(path, sizeof(path), name), "rb");
    if (file == NULL)
        fail_msg("%s is missing", path);
    if (golden_arena.magic == 0)
        arena_init(&golden_arena, 1 << 20, 0);
    char *text = arena_alloc(&golden_arena, 1 << 20);
    assert_non_null(text);
    size_t bytes = fread(text, 1, 1 << 20, file);
    assert_true(bytes < 1 << 20);
    fclose(file);
    if (json_parse(&golden_arena, NULL, text, bytes, &value, &error) != ERR_OK)
        fail_msg("%s: %s at %zu", path, error.reason, error.offset);
    return value;
}

#define GOLDEN_EACH(item, value)                                                                   \
    for (const struct json *item = (value) != NULL ? (value)->child : NULL; item != NULL;          \
         item = item->next)

static inline struct safetensors *golden_tensors(const char *name)
{
    char path[1024];
    struct safetensors *set = NULL;
    struct err_detail detail = {""};
    golden_path(path, sizeof(path), name);
    if (safetensors_open_file(path, &set, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return set;
}

static inline const struct safetensors_tensor *golden_tensor(const struct safetensors *set,
                                                             const char *name)
{
    const struct safetensors_tensor *t = safetensors_find(set, name);
    if (t == NULL)
        fail_msg("no tensor %s", name);
    return t;
}

/* NUL-terminated text of a string. */
static inline const char *string_of(const struct json *value)
{
    if (!json_is(value, JSON_STRING))
        fail_msg("not a string");
    return arena_strndup(&golden_arena, value->text, value->bytes);
}

static inline const char *text_of(const struct json *object, const char *key)
{
    const struct json *value = json_get(object, key);
    if (value == NULL)
        fail_msg("no %s", key);
    return string_of(value);
}

static inline uint32_t hex_of(const struct json *object, const char *key)
{
    return (uint32_t)strtoul(text_of(object, key), NULL, 16);
}

static inline double number_of(const struct json *object, const char *key)
{
    double value = 0;
    if (!json_f64(json_get(object, key), &value))
        fail_msg("no number %s", key);
    return value;
}

static inline uint32_t u32_of(const struct json *object, const char *key)
{
    return (uint32_t)number_of(object, key);
}

static inline bool bool_of(const struct json *object, const char *key)
{
    bool value = false;
    return json_bool(json_get(object, key), &value) && value;
}

static inline uint32_t crc32_of(const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

static inline uint32_t lcg_next(uint32_t *x)
{
    return *x = *x * 1664525u + 1013904223u;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* Copies a tensor of F32 so that it is aligned. */
static inline float *golden_floats(const struct safetensors *set, const char *name)
{
    const struct safetensors_tensor *t = golden_tensor(set, name);
    assert_int_equal(t->dtype, SAFETENSORS_F32);
    float *values = malloc(t->bytes + sizeof(float));
    assert_non_null(values);
    memcpy(values, t->data, t->bytes);
    return values;
}

/* Row by row: max |y - expected| <= t * RMS(expected).  Returns the largest ratio. */
static inline double compare_rows(const char *name, const float *y, const float *expected,
                                  uint32_t rows, uint32_t columns, double tolerance)
{
    double worst = 0;
    for (uint32_t r = 0; r < rows; r++) {
        double square = 0, top = 0;
        for (uint32_t c = 0; c < columns; c++) {
            double e = expected[(size_t)r * columns + c];
            square += e * e;
            top = fmax(top, fabs(y[(size_t)r * columns + c] - e));
            if (!isfinite(y[(size_t)r * columns + c]))
                fail_msg("%s: y[%u][%u] is not finite", name, r, c);
        }
        double rms = sqrt(square / columns);
        worst = fmax(worst, rms > 0 ? top / rms : top);
        if (top > tolerance * rms)
            fail_msg("%s: row %u is off by %g RMS", name, r, rms > 0 ? top / rms : top);
    }
    return worst;
}

/* Binds a linear of a golden checkpoint; it must be accepted. */
static inline void golden_bind(const struct safetensors *set, const struct json *linear,
                               struct format_info *ret_info, struct op_quantised *ret_weight)
{
    enum format_fault fault;
    struct err_detail detail = {""};
    if (format_bind(set, text_of(linear, "name"), u32_of(linear, "out"), u32_of(linear, "in"), NULL,
                    ret_info, ret_weight, &fault, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
}

#endif
