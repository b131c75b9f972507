/* SPDX-License-Identifier: Apache-2.0 */
/* The EXL3 quantiser against the errors that a correct one reaches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/quant.h"
#include "tests/model/golden_formats.h"

/* Under a sanitizer one rate has to do. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW_BUILD 1
#else
#define SLOW_BUILD 0
#endif

static struct op_ctx threads;

static struct quant_matrix golden_matrix(const float *w, uint32_t in, uint32_t out)
{
    return (struct quant_matrix){.w = w, .in = in, .out = out, .in_stride = out, .out_stride = 1};
}

static enum op_codebook codebook_named(const char *name)
{
    for (uint32_t i = OP_CODEBOOK_3INST; i <= OP_CODEBOOK_MUL1; i++)
        if (strcmp(name, format_codebook_name((enum op_codebook)i)) == 0)
            return (enum op_codebook)i;
    fail_msg("codebook %s", name);
    return OP_CODEBOOK_3INST;
}

static void check_recurrence(const struct quant_exl3 *q)
{
    uint32_t tile_u16 = 16 * q->bits;
    for (uint64_t tile = 0; tile < q->trellis_bytes / 2 / tile_u16; tile++) {
        uint16_t states[256];
        op_exl3_states((const uint8_t *)(q->trellis + tile * tile_u16), 2 * q->bits, states);
        for (uint32_t t = 0; t < 256; t++) {
            uint32_t before = states[(t + 255) % 256], mask = (1u << q->bits) - 1;
            assert_int_equal(states[t], (before << q->bits | (states[t] & mask)) & 0xffff);
        }
    }
}

static double quantise(const struct quant_matrix *m, const struct quant_exl3_options *options)
{
    struct quant_exl3 q;
    struct err_detail detail = {""};
    if (quant_exl3(m, NULL, options, &threads, &q, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    double error = q.relative_error;
    check_recurrence(&q);
    quant_exl3_fini(&q);
    return error;
}

/* Every rate and codebook of the golden results.  The scale is given, its search tested apart. */
static void check_result(const struct quant_matrix *m, const struct json *result, uint32_t beam)
{
    char key[32] = "bound";
    struct quant_exl3_options options = {.bits = u32_of(result, "K"),
                                         .codebook = codebook_named(text_of(result, "codebook")),
                                         .beam = beam,
                                         .scale = number_of(result, "global_scale"),
                                         .seed = 1};
    double error = quantise(m, &options);
    if (beam != 0)
        snprintf(key, sizeof(key), "bound_beam%u", beam);
    print_message("K=%u %s beam %u: %.6f, bound %.6f, full %.6f\n", options.bits,
                  text_of(result, "codebook"), beam, error, number_of(result, key),
                  number_of(result, "full"));
    assert_true(error <= number_of(result, key));
    assert_true(error >= 0.8 * number_of(result, "full"));
}

static void bounds(uint32_t beam, const char *codebook)
{
    struct safetensors *set = golden_tensors("quantizer.safetensors");
    float *w = golden_floats(set, "W");
    struct quant_matrix m = golden_matrix(w, 256, 256);
    GOLDEN_EACH(result, json_get(golden_json("quantizer.json"), "results"))
    {
        bool chosen = codebook == NULL || json_string_is(json_get(result, "codebook"), codebook);
        if (chosen && (!SLOW_BUILD || u32_of(result, "K") == 4))
            check_result(&m, result, beam);
    }
    free(w);
    safetensors_close(&set);
}

static void full_search(void **state)
{
    (void)state;
    bounds(0, NULL);
}

static void beam_of_16(void **state)
{
    (void)state;
    bounds(16, NULL);
}

static void beam_of_64(void **state)
{
    (void)state;
    bounds(64, "mcg");
}

/* Slower than the full search, and there to compare with it. */
static void beam_of_256(void **state)
{
    (void)state;
    bounds(256, "mul1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_search),
        cmocka_unit_test(beam_of_16),
        cmocka_unit_test(beam_of_64),
        cmocka_unit_test(beam_of_256),
    };
    struct cpu_pool *pool = cpu_pool_create(2);
    threads = (struct op_ctx){cpu_pool_run, pool};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cpu_pool_destroy(&pool);
    return failed;
}
