/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/rng.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/quant.h"
#include "lib/model/quant_search.h"
#include "tests/model/golden_formats.h"

/* Under a sanitizer the search for the scale takes minutes. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define GIVEN_SCALE 0.9
#else
#define GIVEN_SCALE 0
#endif

static struct op_ctx threads;
static const struct op_ctx one_thread = {NULL, NULL};

static struct quant_matrix golden_matrix(const float *w, uint32_t in, uint32_t out)
{
    return (struct quant_matrix){.w = w, .in = in, .out = out, .in_stride = out, .out_stride = 1};
}

/* With its own scale; the result does not depend on the threads. */
static void scale_is_found(void **state)
{
    (void)state;
    struct safetensors *set = golden_tensors("quantizer.safetensors");
    float *w = golden_floats(set, "W");
    struct quant_matrix m = golden_matrix(w, 256, 256);
    struct quant_exl3_options options = {
        .bits = 6, .codebook = OP_CODEBOOK_MCG, .beam = 64, .seed = 3};
    struct err_detail detail = {""};
    struct quant_exl3 q, again;
    assert_int_equal(quant_exl3(&m, NULL, &options, &threads, &q, &detail), ERR_OK);
    print_message("K=6 mcg: scale %.4f, error %.6f\n", q.scale, q.relative_error);
    assert_true(q.scale > 0.7 && q.scale < 0.9);
    assert_true(q.relative_error <= 0.000526);
    quant_exl3_fini(&q);
    options.bits = 2;
    options.beam = 16;
    assert_int_equal(quant_exl3(&m, NULL, &options, &threads, &q, &detail), ERR_OK);
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &again, &detail), ERR_OK);
    assert_true(q.relative_error <= 0.137);
    assert_true(q.scale == again.scale && q.relative_error == again.relative_error);
    assert_memory_equal(q.trellis, again.trellis, q.trellis_bytes);
    assert_memory_equal(q.suh, again.suh, 2ull * q.in_padded);
    assert_memory_equal(q.svh, again.svh, 2ull * q.out_padded);
    quant_exl3_fini(&q);
    quant_exl3_fini(&again);
    free(w);
    safetensors_close(&set);
}

static void outliers(void **state)
{
    (void)state;
    const struct json *outlier = json_get(golden_json("quantizer.json"), "outlier");
    struct safetensors *set = golden_tensors("quantizer.safetensors");
    float *w = golden_floats(set, "W_outlier"), *dense = malloc(4 * 256 * 128);
    struct quant_matrix m = golden_matrix(w, 256, 128);
    struct quant_exl3_options options = {
        .bits = 4, .codebook = OP_CODEBOOK_MCG, .scale = GIVEN_SCALE, .seed = 1};
    struct err_detail detail = {""};
    struct quant_exl3 q;
    assert_int_equal(quant_exl3(&m, NULL, &options, &threads, &q, &detail), ERR_OK);
    print_message("outlier: scale %.3f, error %.6f\n", q.scale, q.relative_error);
    assert_true(q.relative_error <= number_of(json_get(outlier, "mcg_k4"), "bound"));
    assert_int_equal(q.svh[17] & 0x7fff, 0);
    struct op_quantised weight = quant_exl3_weight(&q);
    struct op_dequantise_args args = {.w = &weight, .y = dense};
    assert_int_equal(op_dequantise_ref(&args, &one_thread), ERR_OK);
    for (uint32_t i = 0; i < 256; i++)
        assert_true(dense[17 * 256 + i] == 0);
    quant_exl3_fini(&q);
    free(dense);
    free(w);
    safetensors_close(&set);
}

static float normal(struct rng *rng)
{
    double radius = sqrt(-2 * log(rng_unit(rng) + 1e-12));
    return (float)(radius * cos(6.283185307179586 * rng_unit(rng)));
}

/* Error of the outputs over calibration rows: sum |x (Wq - W)|^2 / sum |x W|^2. */
static double output_error(const struct quant_matrix *m, const struct quant_exl3 *q, const float *x,
                           uint32_t rows)
{
    struct op_quantised w = quant_exl3_weight(q);
    float *y = malloc(4ull * rows * m->out);
    assert_non_null(y);
    struct op_quantised_linear_args args = {
        .x = x, .w = &w, .y = y, .rows = rows, .x_stride = m->in, .y_stride = m->out};
    assert_int_equal(op_quantised_linear_ref(&args, &one_thread), ERR_OK);
    double error = 0, square = 0;
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t o = 0; o < m->out; o++) {
            double exact = 0;
            for (uint32_t i = 0; i < m->in; i++)
                exact +=
                    (double)x[(uint64_t)r * m->in + i] * m->w[i * m->in_stride + o * m->out_stride];
            double difference = y[(uint64_t)r * m->out + o] - exact;
            error += difference * difference;
            square += exact * exact;
        }
    free(y);
    return error / square;
}

/* Correlated inputs: with the Hessian the outputs come out closer, and the proxy says by how
 * much.  Sizes off the block are padded. */
static void hessian(void **state)
{
    (void)state;
    enum { IN = 200, OUT = 100, ROWS = 512 };
    static float w[OUT * IN], x[ROWS * IN];
    struct rng rng;
    struct err_detail detail = {""};
    struct quant_exl3 plain, guided;
    rng_init(&rng, 11);
    for (uint32_t i = 0; i < OUT * IN; i++)
        w[i] = 0.02f * normal(&rng);
    for (uint32_t r = 0; r < ROWS; r++) {
        float common = normal(&rng), other = normal(&rng);
        for (uint32_t i = 0; i < IN; i++)
            x[r * IN + i] = (i % 2 == 0 ? common : other) + 0.3f * normal(&rng);
    }
    struct quant_matrix m = {.w = w, .in = IN, .out = OUT, .in_stride = 1, .out_stride = IN};
    struct quant_hessian *h = quant_hessian_create(IN);
    quant_hessian_add(h, x, 300, IN, &threads);
    quant_hessian_add(h, x + 300 * IN, ROWS - 300, IN, &threads);
    quant_hessian_finish(h, 5, &threads);
    assert_true(quant_hessian_usable(h));
    struct quant_exl3_options options = {
        .bits = 3, .codebook = OP_CODEBOOK_MUL1, .beam = 64, .seed = 5};
    assert_int_equal(quant_exl3(&m, NULL, &options, &threads, &plain, &detail), ERR_OK);
    assert_int_equal(quant_exl3(&m, h, &options, &threads, &guided, &detail), ERR_OK);
    double before = output_error(&m, &plain, x, ROWS), after = output_error(&m, &guided, x, ROWS);
    print_message("outputs: %.5f without, %.5f with the Hessian (proxy %.5f)\n", before, after,
                  guided.proxy_error);
    assert_true(after < 0.5 * before);
    assert_true(guided.proxy_error > 0.3 * after && guided.proxy_error < 3 * after);
    assert_int_equal(guided.in_padded, 256);
    assert_int_equal(guided.out_padded, 128);
    quant_exl3_fini(&plain);
    quant_exl3_fini(&guided);
    quant_hessian_destroy(&h);
}

static void unusable_hessians(void **state)
{
    (void)state;
    static float x[128], w[128 * 128];
    struct err_detail detail = {""};
    struct quant_exl3 a, b;
    struct quant_matrix m = golden_matrix(w, 128, 128);
    struct quant_exl3_options options = {
        .bits = 4, .codebook = OP_CODEBOOK_MCG, .beam = 4, .scale = 0.9, .seed = 2};
    struct rng rng;
    rng_init(&rng, 4);
    for (uint32_t i = 0; i < 128 * 128; i++)
        w[i] = normal(&rng);
    for (uint32_t pass = 0; pass < 3; pass++) {
        struct quant_hessian *h = quant_hessian_create(128);
        x[5] = pass == 1 ? INFINITY : 0;
        if (pass > 0)
            quant_hessian_add(h, x, 1, 128, &one_thread);
        quant_hessian_finish(h, 2, &one_thread);
        assert_false(quant_hessian_usable(h));
        assert_int_equal(quant_exl3(&m, h, &options, &one_thread, &a, &detail), ERR_OK);
        assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &b, &detail), ERR_OK);
        assert_memory_equal(a.trellis, b.trellis, a.trellis_bytes);
        quant_exl3_fini(&a);
        quant_exl3_fini(&b);
        quant_hessian_destroy(&h);
    }
}

static void refused(void **state)
{
    (void)state;
    static float w[128 * 128];
    struct quant_matrix m = golden_matrix(w, 128, 128);
    struct quant_exl3_options options = {.bits = 9, .codebook = OP_CODEBOOK_MCG};
    struct err_detail detail = {""};
    struct quant_exl3 q;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_INVALID);
    options.bits = 0;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_INVALID);
    options.bits = 4;
    options.beam = QUANT_BEAM_MAX + 1;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_INVALID);
    options.beam = 2;
    options.scale = NAN;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_INVALID);
    options.scale = 1;
    w[77] = NAN;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "W[0][77]"));
    w[77] = 3e38f;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_INVALID);
    /* All zeros are legal and stay zero. */
    w[77] = 0;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_OK);
    assert_true(q.relative_error == 0);
    quant_exl3_fini(&q);
}

static void count_tiles(void *arg, uint64_t done, uint64_t total)
{
    assert_int_equal(total, 64);
    assert_true(done >= 1 && done <= total);
    ++*(uint64_t *)arg;
}

static void progress(void **state)
{
    (void)state;
    static float w[128 * 128] = {1};
    uint64_t calls = 0;
    struct quant_matrix m = golden_matrix(w, 128, 128);
    struct quant_exl3_options options = {.bits = 4,
                                         .codebook = OP_CODEBOOK_MCG,
                                         .beam = 2,
                                         .scale = 1,
                                         .progress = count_tiles,
                                         .progress_arg = &calls};
    struct err_detail detail = {""};
    struct quant_exl3 q;
    assert_int_equal(quant_exl3(&m, NULL, &options, &one_thread, &q, &detail), ERR_OK);
    assert_int_equal(calls, 64);
    quant_exl3_fini(&q);
}

/* Beams wider than the number of nodes, and every rate. */
static void all_rates_close_their_rings(void **state)
{
    (void)state;
    static struct quant_codebook book;
    static const uint32_t beams[] = {0, 1, 7, 300};
    struct rng rng;
    rng_init(&rng, 9);
    quant_codebook_fill(&book, OP_CODEBOOK_3INST);
    for (uint32_t bits = 1; bits <= 8; bits++)
        for (size_t b = 0; b < ARRAY_COUNT(beams); b++) {
            float values[256];
            uint16_t states[256];
            double square = 0;
            for (uint32_t t = 0; t < 256; t++) {
                values[t] = normal(&rng);
                square += (double)values[t] * values[t];
            }
            struct quant_search *search = quant_search_create(&book, bits, beams[b]);
            double error = quant_search_tile(search, values, states);
            for (uint32_t t = 0; t < 256; t++) {
                uint32_t mask = (1u << bits) - 1, before = states[(t + 255) % 256];
                assert_int_equal(states[t], (before << bits | (states[t] & mask)) & 0xffff);
            }
            assert_true(beams[b] == 1 || error < square);
            quant_search_destroy(&search);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_rates_close_their_rings),
        cmocka_unit_test(refused),
        cmocka_unit_test(progress),
        cmocka_unit_test(unusable_hessians),
        cmocka_unit_test(hessian),
        cmocka_unit_test(scale_is_found),
        cmocka_unit_test(outliers),
    };
    struct cpu_pool *pool = cpu_pool_create(2);
    threads = (struct op_ctx){cpu_pool_run, pool};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cpu_pool_destroy(&pool);
    return failed;
}
