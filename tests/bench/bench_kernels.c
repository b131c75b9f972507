/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the kernels against limits measured in the same run on the same machine.
 *
 * GEMV: share of the read bandwidth of a plain sum over the same bytes.  GEMM: share of OpenBLAS
 * sgemm where its library is installed.  Every figure is the median over repetitions of the
 * ratio inside one repetition, so that a noisy neighbour slows both sides alike.
 *
 * --gemv-kib with a size that stays in a cache gives the pace of the instructions alone.
 *
 *   bench_kernels [--seconds S] [--only TEXT] [--limit ref|avx2|avx512|neon] [--gemv-kib N] */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/op_format.h"
#include "kernels/op_table.h"
#include "lib/base/rng.h"
#include "lib/model/cpu_pool.h"

#define REPETITIONS_MAX 200
#define GEMV_BYTES      ((size_t)256 << 20) /* beyond every cache */
#define GEMV_BYTES_MIN  ((size_t)256 << 10)

static struct op_table ops;
static double seconds_each = 1.5;
static size_t gemv_bytes = GEMV_BYTES;
static const char *only = "";
static volatile uint64_t sink;

/* Time of the calling thread where one thread does all the work: neighbours do not count. */
static clockid_t timer = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    struct timespec t;
    clock_gettime(timer, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof(*x), by_value);
    return n % 2 != 0 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* The two sides of a comparison. */
struct side {
    void (*run)(void *arg);
    void *arg;
};

/* Median seconds of both sides and of limit / subject, measured alternately. */
static double compare(struct side subject, struct side limit, double *ret_subject,
                      double *ret_limit)
{
    static double s[REPETITIONS_MAX], l[REPETITIONS_MAX], ratio[REPETITIONS_MAX];
    int n = 0;
    subject.run(subject.arg);
    limit.run(limit.arg);
    double end = now() + seconds_each;
    while (n < REPETITIONS_MAX && (n < 5 || now() < end)) {
        double t0 = now();
        limit.run(limit.arg);
        double t1 = now();
        subject.run(subject.arg);
        double t2 = now();
        l[n] = t1 - t0;
        s[n] = t2 - t1;
        ratio[n] = l[n] / s[n];
        n++;
    }
    *ret_subject = median(s, n);
    *ret_limit = median(l, n);
    return median(ratio, n);
}

/* Plain sum over the bytes, split over the same threads. */
struct sum {
    const struct op_ctx *ctx;
    const uint64_t *words;
    size_t count;
    uint64_t totals[4096];
};

#define SUM_ITEMS 4096

static void sum_items(const void *arg, uint32_t begin, uint32_t end)
{
    struct sum *s = (struct sum *)(uintptr_t)arg;
    size_t each = s->count / SUM_ITEMS;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    const uint64_t *w = s->words + begin * each;
    for (size_t i = 0; i + 4 <= (end - begin) * each; i += 4) {
        a += w[i];
        b += w[i + 1];
        c += w[i + 2];
        d += w[i + 3];
    }
    s->totals[begin] = a + b + c + d;
}

static void run_sum(void *arg)
{
    struct sum *s = arg;
    for (size_t at = 0; at < GEMV_BYTES; at += gemv_bytes)
        op_for(s->ctx, SUM_ITEMS, s->count / SUM_ITEMS, sum_items, s);
    sink += s->totals[0];
}

struct linear {
    const struct op_ctx *ctx;
    struct op_linear_args args;
};

static void run_linear(void *arg)
{
    struct linear *l = arg;
    if (ops.linear(&l->args, l->ctx) != ERR_OK)
        abort();
}

static void run_gemv(void *arg)
{
    for (size_t at = 0; at < GEMV_BYTES; at += gemv_bytes)
        run_linear(arg);
}

static float *random_floats(size_t count, struct rng *rng)
{
    float *x = aligned_alloc(64, (count * sizeof(float) + 63) & ~(size_t)63);
    if (x == NULL)
        abort();
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(rng_unit(rng) * 2 - 1);
    return x;
}

/* Random bf16 or f16 values of magnitude below one; f32 when asked. */
static void *random_weights(size_t count, enum op_dtype dtype, struct rng *rng)
{
    if (dtype == OP_F32)
        return random_floats(count, rng);
    uint16_t *w = aligned_alloc(64, (count * 2 + 63) & ~(size_t)63);
    if (w == NULL)
        abort();
    for (size_t i = 0; i < count; i++) {
        uint32_t r = rng_below(rng, 1u << 16);
        uint32_t exponent = dtype == OP_BF16 ? 0x3f00u : 0x3800u;
        w[i] = (uint16_t)((r & 0x8000u) | exponent | (r & 0x7fu));
    }
    return w;
}

static const char *dtype_name(enum op_dtype dtype)
{
    return dtype == OP_F32 ? "f32" : dtype == OP_BF16 ? "bf16" : "f16";
}

static bool wanted(const char *name)
{
    return strstr(name, only) != NULL;
}

static void bench_gemv(enum op_dtype dtype, const struct op_ctx *ctx, int threads)
{
    char name[64];
    snprintf(name, sizeof(name), "gemv_%s_threads%d", dtype_name(dtype), threads);
    if (!wanted(name))
        return;
    struct rng rng;
    rng_init(&rng, 1);
    uint32_t in = 4096, out = (uint32_t)(gemv_bytes / in / (dtype == OP_F32 ? 4 : 2));
    float *x = random_floats(in, &rng), *y = random_floats(out, &rng);
    void *w = random_weights((size_t)in * out, dtype, &rng);
    struct linear l = {ctx, {x, {w, dtype, NULL}, y, 1, in, out, in, out}};
    static struct sum sum;
    sum.ctx = ctx;
    sum.words = w;
    sum.count = gemv_bytes / 8;
    double subject, limit;
    double share =
        compare((struct side){run_gemv, &l}, (struct side){run_sum, &sum}, &subject, &limit);
    printf("%-24s %7.2f GB/s, read %7.2f GB/s, share %.3f\n", name, GEMV_BYTES / subject * 1e-9,
           GEMV_BYTES / limit * 1e-9, share);
    fflush(stdout);
    free(x);
    free(y);
    free(w);
}

/* Bytes of the scales that a product reads. */
static size_t scale_bytes(const struct op_quantised *w)
{
    const struct op_scales *s = &w->scales;
    size_t each = s->dtype == OP_SCALE_F32 ? 4 : 1;
    return w->format == OP_FORMAT_EXL3 ? 0 : w->out / s->rows_shared * s->stride * each;
}

/* A quantised weight of about gemv_bytes with random bits that no format forbids; the scales follow
 * the codes. */
static struct op_quantised make_quantised(enum op_format format, uint32_t in, struct rng *rng)
{
    struct op_quantised w = {
        .format = format, .in = in, .global = 1, .half_bits = 8, .no_nan = true};
    bool fp4 = format == OP_FORMAT_NVFP4, exl3 = format == OP_FORMAT_EXL3;
    uint32_t shared = fp4 ? 16 : format == OP_FORMAT_MXFP8 ? 32 : 128;
    w.codebook = OP_CODEBOOK_MCG;
    w.out = (uint32_t)(gemv_bytes / in) * (fp4 || exl3 ? 2 : 1);
    w.row_bytes = exl3 ? (uint64_t)w.out * 8 : fp4 ? in / 2 : in;
    size_t scales = (size_t)w.out * in / shared;
    uint8_t *codes = aligned_alloc(64, gemv_bytes + scales * 4), *s = codes + gemv_bytes;
    uint16_t *sides = malloc(((size_t)in + w.out) * 2);
    if (codes == NULL || sides == NULL)
        abort();
    for (size_t i = 0; i < gemv_bytes; i++)
        codes[i] = (uint8_t)(rng_below(rng, 256) & (fp4 || exl3 ? 0xffu : 0xf7u));
    memset(s, format == OP_FORMAT_FP8 ? 0x3c : 0x38, scales * 4);
    for (size_t i = 0; i < (size_t)in + w.out; i++)
        sides[i] = 0x3c00;
    w.codes = codes;
    w.suh = sides;
    w.svh = sides + in;
    w.scales.data = s;
    w.scales.dtype = fp4 ? OP_SCALE_E4M3 : shared == 32 ? OP_SCALE_E8M0 : OP_SCALE_F32;
    w.scales.rows_shared = shared == 128 ? 128 : 1;
    w.scales.columns_shared = shared;
    w.scales.stride = in / shared;
    return w;
}

static void bench_quantised(enum op_format format, const char *format_name,
                            const struct op_ctx *ctx, int threads)
{
    char name[64];
    snprintf(name, sizeof(name), "gemv_%s_threads%d", format_name, threads);
    if (!wanted(name))
        return;
    struct rng rng;
    rng_init(&rng, 3);
    uint32_t in = 4096;
    double times = (double)(GEMV_BYTES / gemv_bytes);
    struct op_quantised w = make_quantised(format, in, &rng);
    float *x = random_floats(in, &rng), *y = random_floats(w.out, &rng);
    struct linear l = {ctx, {x, {NULL, OP_F32, &w}, y, 1, in, w.out, in, w.out}};
    static struct sum sum;
    sum.ctx = ctx;
    double subject, limit, bytes = (double)(gemv_bytes + scale_bytes(&w));
    sum.words = (const uint64_t *)(const void *)w.codes;
    sum.count = (size_t)bytes / 8;
    double share =
        compare((struct side){run_gemv, &l}, (struct side){run_sum, &sum}, &subject, &limit);
    printf("%-24s %7.2f GB/s, read %7.2f GB/s, share %.3f, %.2f G weights/s\n", name,
           bytes * times / subject * 1e-9, bytes * times / limit * 1e-9, share,
           (double)w.out * in / subject * 1e-9 * times);
    fflush(stdout);
    free(x);
    free(y);
    free((void *)(uintptr_t)w.codes);
    free((void *)(uintptr_t)w.suh);
}

/* OpenBLAS, found when the program runs; sgemm NULL: it is not installed. */
static struct {
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                  const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
    void (*threads)(int count);
} openblas;

static void find_openblas(void)
{
    void *library = dlopen("libopenblas.so.0", RTLD_NOW);
    void *sgemm = library != NULL ? dlsym(library, "cblas_sgemm") : NULL;
    void *threads = library != NULL ? dlsym(library, "openblas_set_num_threads") : NULL;
    if (sgemm == NULL || threads == NULL)
        return;
    memcpy(&openblas.sgemm, &sgemm, sizeof(sgemm));
    memcpy(&openblas.threads, &threads, sizeof(threads));
}

#define ROW_MAJOR    101
#define NO_TRANSPOSE 111
#define TRANSPOSE    112

struct blas {
    const float *x, *w;
    float *y;
    int rows, in, out;
};

static void run_blas(void *arg)
{
    struct blas *b = arg;
    openblas.sgemm(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, b->rows, b->out, b->in, 1, b->x, b->in, b->w,
                   b->in, 0, b->y, b->out);
}

static void run_nothing(void *arg)
{
    (void)arg;
}

static void bench_gemm(enum op_dtype dtype, uint32_t rows, const struct op_ctx *ctx, int threads)
{
    char name[64];
    uint32_t in = 4096, out = 4096;
    snprintf(name, sizeof(name), "gemm_%s_%ux%ux%u_threads%d", dtype_name(dtype), rows, in, out,
             threads);
    if (!wanted(name))
        return;
    struct rng rng;
    rng_init(&rng, 2);
    float *x = random_floats((size_t)rows * in, &rng), *y = random_floats((size_t)rows * out, &rng);
    void *w = random_weights((size_t)in * out, dtype, &rng);
    float *wide = random_floats((size_t)in * out, &rng);
    float *z = random_floats((size_t)rows * out, &rng);
    struct linear l = {ctx, {x, {w, dtype, NULL}, y, rows, in, out, in, out}};
    struct blas blas = {x, wide, z, (int)rows, (int)in, (int)out};
    struct side other = {openblas.sgemm != NULL ? run_blas : run_nothing, &blas};
    if (openblas.sgemm != NULL)
        openblas.threads(threads);
    double subject, limit, flops = 2.0 * rows * in * out;
    double share = compare((struct side){run_linear, &l}, other, &subject, &limit);
    printf("%-36s %7.2f GFLOP/s", name, flops / subject * 1e-9);
    if (openblas.sgemm != NULL)
        printf(", sgemm %7.2f, share %.3f", flops / limit * 1e-9, share);
    printf("\n");
    fflush(stdout);
    free(x);
    free(y);
    free(w);
    free(wide);
    free(z);
}

/* Many rows against a quantised weight; the limit is the same shape with bf16 weights. */
static void bench_gemm_quantised(enum op_format format, const char *format_name, uint32_t rows,
                                 const struct op_ctx *ctx, int threads)
{
    char name[64];
    uint32_t in = 4096, out = 4096;
    snprintf(name, sizeof(name), "gemm_%s_%ux%ux%u_threads%d", format_name, rows, in, out, threads);
    if (!wanted(name))
        return;
    struct rng rng;
    rng_init(&rng, 4);
    struct op_quantised q = make_quantised(format, in, &rng);
    q.out = q.out < out ? q.out : out;
    float *x = random_floats((size_t)rows * in, &rng), *y = random_floats((size_t)rows * out, &rng);
    void *w = random_weights((size_t)in * out, OP_BF16, &rng);
    struct linear l = {ctx, {x, {NULL, OP_F32, &q}, y, rows, in, q.out, in, out}};
    struct linear plain = {ctx, {x, {w, OP_BF16, NULL}, y, rows, in, q.out, in, out}};
    double subject, limit, flops = 2.0 * rows * in * q.out;
    double share =
        compare((struct side){run_linear, &l}, (struct side){run_linear, &plain}, &subject, &limit);
    printf("%-36s %7.2f GFLOP/s, bf16 %7.2f, share %.3f\n", name, flops / subject * 1e-9,
           flops / limit * 1e-9, share);
    fflush(stdout);
    free(x);
    free(y);
    free(w);
    free((void *)(uintptr_t)q.codes);
    free((void *)(uintptr_t)q.suh);
}

static enum op_cpu parse_limit(const char *text)
{
    for (unsigned cpu = 0; cpu < OP_CPU_COUNT; cpu++)
        if (strcmp(op_cpu_name((enum op_cpu)cpu), text) == 0)
            return (enum op_cpu)cpu;
    fprintf(stderr, "--limit %s: no such instruction set\n", text);
    exit(2);
}

/* Whole rows of every format, and a part of the sum for every item. */
static size_t parse_kib(const char *text)
{
    size_t bytes = (size_t)strtoul(text, NULL, 10) << 10;
    if (bytes < GEMV_BYTES_MIN || bytes > GEMV_BYTES || (bytes & (bytes - 1)) != 0) {
        fprintf(stderr, "--gemv-kib %s: not a power of two from 256 to 262144\n", text);
        exit(2);
    }
    return bytes;
}

int main(int argc, char **argv)
{
    enum op_cpu limit = op_cpu_best();
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seconds") == 0)
            seconds_each = atof(argv[i + 1]);
        else if (strcmp(argv[i], "--only") == 0)
            only = argv[i + 1];
        else if (strcmp(argv[i], "--limit") == 0)
            limit = parse_limit(argv[i + 1]);
        else if (strcmp(argv[i], "--gemv-kib") == 0)
            gemv_bytes = parse_kib(argv[i + 1]);
    }
    char text[OP_TABLE_TEXT_BYTES];
    op_table_cpu(&ops, OP_FAST_F32, limit);
    op_table_text(&ops, text, sizeof(text));
    printf("kernels: %s\n", text);
    find_openblas();
    struct cpu_pool *pool = cpu_pool_create(2);
    struct op_ctx one = {NULL, NULL}, two = {cpu_pool_run, pool};
    for (int threads = 1; threads <= 2; threads++) {
        const struct op_ctx *ctx = threads == 1 ? &one : &two;
        timer = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
        bench_gemv(OP_BF16, ctx, threads);
        bench_gemv(OP_F16, ctx, threads);
        bench_gemv(OP_F32, ctx, threads);
        bench_quantised(OP_FORMAT_FP8, "fp8", ctx, threads);
        bench_quantised(OP_FORMAT_MXFP8, "mxfp8", ctx, threads);
        bench_quantised(OP_FORMAT_NVFP4, "nvfp4", ctx, threads);
        bench_quantised(OP_FORMAT_EXL3, "exl3_mcg_k4", ctx, threads);
        bench_gemm(OP_BF16, 512, ctx, threads);
        bench_gemm(OP_F32, 512, ctx, threads);
        bench_gemm(OP_BF16, 4, ctx, threads);
        bench_gemm_quantised(OP_FORMAT_FP8, "fp8", 512, ctx, threads);
        bench_gemm_quantised(OP_FORMAT_MXFP8, "mxfp8", 512, ctx, threads);
        bench_gemm_quantised(OP_FORMAT_NVFP4, "nvfp4", 512, ctx, threads);
    }
    cpu_pool_destroy(&pool);
    return 0;
}
