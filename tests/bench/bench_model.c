/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of a whole model against what the machine and the kernels allow, in one run.
 *
 * Loading: bytes per second against read() of the same files, and the peak of memory.  Decode: time
 * of a step against the sum over formats of bytes read divided by that format's own rate, measured
 * on this model's matrices, and the share of the bandwidth of a plain sum.  Prefill: multiply-adds
 * per second against the rate of one large bf16 matrix.
 *
 * With --steps 0 it only loads.
 *
 *   bench_model DIR [--threads N] [--loads N] [--prefill ROWS] [--steps N] [--slice ROWS] */
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/model/format_scan.h"
#include "lib/model/model_parts.h"
#include "lib/model/safetensors.h"
#include "lib/model/weights.h"

#define STEPS_MAX   512
#define LOADS_MAX   64
#define FORMATS_MAX 24
#define BLOCK       256u
#define SUM_BYTES   ((size_t)256 << 20)
#define GEMM        4096u
#define GEMM_ROWS   512u

static volatile uint64_t sink;

static double seconds(void)
{
    return (double)clock_mono_us() / 1e6;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, uint32_t n)
{
    qsort(x, n, sizeof(*x), by_value);
    return n % 2 != 0 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* ---- loading ---- */

/* Reads the model's files as cat would; bytes. */
static uint64_t read_files(const char *directory)
{
    static char buffer[1 << 17];
    uint64_t bytes = 0;
    DIR *d = opendir(directory);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        const char *dot = strrchr(e->d_name, '.');
        if (dot == NULL || strcmp(dot, ".safetensors") != 0)
            continue;
        int fd = openat(dirfd(d), e->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;)
            bytes += (uint64_t)n;
        close(fd);
    }
    if (d != NULL)
        closedir(d);
    return bytes;
}

static uint64_t peak_bytes(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return (uint64_t)usage.ru_maxrss << 10;
}

struct load_rate {
    double share, cat, rate; /* share of read(); bytes a second */
};

/* One read of the files and one load, one after the other. */
static struct model *load_once(const char *directory, uint32_t threads, struct load_rate *ret)
{
    struct err_detail detail = {{0}};
    struct model *m = NULL;
    double t0 = seconds();
    uint64_t file = read_files(directory);
    double cat = seconds() - t0;
    t0 = seconds();
    struct model_options options = {
        .directory = directory, .numerics = MODEL_FAST, .threads = threads};
    if (model_load(&options, &m, &detail) != ERR_OK) {
        fprintf(stderr, "%s\n", detail.text);
        exit(1);
    }
    double took = seconds() - t0;
    ret->cat = (double)file / cat;
    ret->rate = (double)model_info(m)->weight_bytes / took;
    ret->share = ret->rate / ret->cat;
    return m;
}

/* The last model of `loads`; rates are medians. */
static struct model *load(const char *directory, uint32_t threads, uint32_t loads)
{
    static double share[LOADS_MAX], cat[LOADS_MAX], rate[LOADS_MAX];
    struct model *m = NULL;
    uint64_t peak = 0;
    (void)read_files(directory); /* into the page cache */
    uint64_t before = peak_bytes();
    for (uint32_t i = 0; i < loads; i++) {
        struct load_rate r;
        model_destroy(&m);
        m = load_once(directory, threads, &r);
        share[i] = r.share;
        cat[i] = r.cat;
        rate[i] = r.rate;
        peak = i == 0 ? peak_bytes() : peak; /* a later one finds the first one's heap */
    }
    const struct model_info *info = model_info(m);
    printf("model: %s, %u threads\n", info->quantization, info->threads);
    double middle = median(share, loads);
    printf("load: %.2f GB at %.2f GB/s; read() of the file %.2f GB/s; share %.2f, best %.2f "
           "(median of %u)\n",
           (double)info->weight_bytes / 1e9, median(rate, loads) / 1e9, median(cat, loads) / 1e9,
           middle, share[loads - 1], loads);
    printf("memory: peak %.0f MiB before loading, %.0f MiB after, weights %.0f MiB\n",
           (double)before / 1048576, (double)peak / 1048576, (double)info->weight_bytes / 1048576);
    return m;
}

/* ---- what a step reads ---- */

struct format_use {
    char title[40];
    double token_bytes; /* a decode step of one row reads */
    double token_weights;
    double all_bytes;
    double rate; /* bytes a second, of all matrices of the format one after another */
};

struct use {
    struct format_use formats[FORMATS_MAX];
    uint32_t count;
    double token_bytes, token_weights;
};

static double linear_bytes(const struct weights_linear *l)
{
    return l->dense ? 4.0 * l->info.out * l->info.in : (double)format_bytes(&l->stored);
}

static struct format_use *use_of(struct use *u, const struct weights_linear *l)
{
    char title[sizeof(u->formats[0].title)] = "f32 (dense)";
    uint32_t i = 0;
    if (!l->dense)
        format_title(&l->info, title, sizeof(title));
    while (i < u->count && strcmp(u->formats[i].title, title) != 0)
        i++;
    CHECK(i < FORMATS_MAX);
    if (i == u->count)
        memcpy(u->formats[u->count++].title, title, sizeof(title));
    return &u->formats[i];
}

static struct use count_use(const struct model *m)
{
    struct use u = {.count = 0};
    for (uint32_t i = 0; i < m->weights->linear_count; i++) {
        const struct weights_linear *l = &m->weights->linears[i];
        struct format_use *f = use_of(&u, l);
        double share = 1;
        if (l->place == &m->weights->embed)
            share = 1.0 / m->config.vocab_size; /* one row of it */
        else if (format_is_expert(l->tensor->name))
            share = (double)m->config.experts_per_token / m->config.experts;
        f->all_bytes += linear_bytes(l);
        f->token_bytes += share * linear_bytes(l);
        f->token_weights += share * l->info.out * l->info.in;
    }
    for (uint32_t i = 0; i < u.count; i++) {
        u.token_bytes += u.formats[i].token_bytes;
        u.token_weights += u.formats[i].token_weights;
    }
    return u;
}

/* All matrices of a format against one row each, until half a second has gone by. */
static void measure_rates(const struct model *m, struct use *u)
{
    uint32_t widest = GEMM;
    for (uint32_t i = 0; i < m->weights->linear_count; i++) {
        const struct format_info *info = &m->weights->linears[i].info;
        widest = info->in > widest ? info->in : widest;
        widest = info->out > widest ? info->out : widest;
    }
    float *x = mem_take_array(widest, sizeof(float)), *y = mem_take_array(widest, sizeof(float));
    for (uint32_t i = 0; i < widest; i++)
        x[i] = (float)(i % 17) * 0.1f;
    for (uint32_t f = 0; f < u->count; f++) {
        double bytes = 0, begin = seconds(), took = 0;
        while (took < 0.5) {
            for (uint32_t i = 0; i < m->weights->linear_count; i++) {
                const struct weights_linear *l = &m->weights->linears[i];
                if (use_of(u, l) != &u->formats[f] || l->place == &m->weights->embed)
                    continue;
                struct op_linear_args a = {.x = x,
                                           .w = *l->place,
                                           .y = y,
                                           .rows = 1,
                                           .in = l->info.in,
                                           .out = l->info.out,
                                           .x_stride = l->info.in,
                                           .y_stride = l->info.out};
                CHECK(m->ops.linear(&a, &m->ctx) == ERR_OK);
                bytes += linear_bytes(l);
            }
            took = seconds() - begin;
            if (bytes == 0)
                break;
        }
        u->formats[f].rate = bytes / took;
    }
    mem_give(x);
    mem_give(y);
}

/* ---- limits ---- */

struct sum {
    const uint64_t *words;
    uint64_t totals[4096];
};

static void sum_items(const void *arg, uint32_t begin, uint32_t end)
{
    struct sum *s = (struct sum *)(uintptr_t)arg;
    size_t each = SUM_BYTES / 8 / 4096;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = begin * each; i + 4 <= end * each; i += 4) {
        a += s->words[i];
        b += s->words[i + 1];
        c += s->words[i + 2];
        d += s->words[i + 3];
    }
    s->totals[begin] = a + b + c + d;
}

static double read_rate(const struct model *m)
{
    static struct sum s;
    uint64_t *words = mem_take(SUM_BYTES);
    double best[7];
    memset(words, 1, SUM_BYTES);
    s.words = words;
    for (uint32_t i = 0; i < ARRAY_COUNT(best); i++) {
        double t0 = seconds();
        op_for(&m->ctx, 4096, 1u << 16, sum_items, &s);
        best[i] = SUM_BYTES / (seconds() - t0);
        sink += s.totals[0];
    }
    mem_give(words);
    return median(best, ARRAY_COUNT(best));
}

static double gemm_rate(const struct model *m)
{
    float *x = mem_take_array((size_t)GEMM_ROWS * GEMM, sizeof(float));
    float *y = mem_take_array((size_t)GEMM_ROWS * GEMM, sizeof(float));
    uint16_t *w = mem_take_array((size_t)GEMM * GEMM, sizeof(*w));
    double rate[5];
    for (size_t i = 0; i < (size_t)GEMM * GEMM; i++)
        w[i] = (uint16_t)(0x3f00u | (i * 37 & 0x7fu));
    for (size_t i = 0; i < (size_t)GEMM_ROWS * GEMM; i++)
        x[i] = (float)(i % 13) * 0.1f;
    for (uint32_t i = 0; i < ARRAY_COUNT(rate); i++) {
        struct op_linear_args a = {.x = x,
                                   .w = {.data = w, .dtype = OP_BF16},
                                   .y = y,
                                   .rows = GEMM_ROWS,
                                   .in = GEMM,
                                   .out = GEMM,
                                   .x_stride = GEMM,
                                   .y_stride = GEMM};
        double t0 = seconds();
        CHECK(m->ops.linear(&a, &m->ctx) == ERR_OK);
        rate[i] = (double)GEMM_ROWS * GEMM * GEMM / (seconds() - t0);
    }
    mem_give(x);
    mem_give(y);
    mem_give(w);
    return median(rate, ARRAY_COUNT(rate));
}

/* ---- the model itself ---- */

struct rig {
    struct model *m;
    struct model_cursor *c;
    struct model_kv kv;
    uint32_t *blocks;
    uint32_t block_count, position;
};

static void rig_open(struct rig *r, struct model *m, uint32_t slice, uint32_t tokens)
{
    const struct model_info *info = model_info(m);
    struct err_detail detail;
    r->m = m;
    struct model_cursor_options options = {slice, 1, 1, tokens};
    CHECK(model_cursor_create(m, &options, &r->c, &detail) == ERR_OK);
    r->kv.kv_type = r->kv.index_type = KV_ROW_FP8;
    r->kv.block_tokens = BLOCK;
    r->kv.index_offset = (BLOCK * kv_row_bytes(KV_ROW_FP8, info->latent_dim) + 63) / 64 * 64;
    r->kv.layer_stride =
        r->kv.index_offset +
        (BLOCK / info->index_kpool * kv_row_bytes(KV_ROW_FP8, info->index_dim) + 63) / 64 * 64;
    r->kv.block_stride = r->kv.layer_stride * (info->dsa_layers > 0 ? info->dsa_layers : 1);
    r->block_count = r->kv.block_count = (tokens + BLOCK - 1) / BLOCK;
    r->kv.blocks = mem_take_array(r->block_count, r->kv.block_stride);
    r->kv.slot_count = 1;
    r->kv.slot_stride = info->state_bytes;
    r->kv.slots = mem_take(info->state_bytes);
    r->blocks = mem_take_array(r->block_count, sizeof(uint32_t));
    for (uint32_t i = 0; i < r->block_count; i++)
        r->blocks[i] = i;
}

static void rig_close(struct rig *r)
{
    model_cursor_destroy(&r->c);
    mem_give(r->kv.blocks);
    mem_give(r->kv.slots);
    mem_give(r->blocks);
}

static double forward(struct rig *r, uint32_t rows)
{
    uint32_t vocab = model_info(r->m)->vocab_size;
    uint32_t *ids = mem_take_array(rows, sizeof(uint32_t));
    for (uint32_t i = 0; i < rows; i++) /* other experts for each token */
        ids[i] = (uint32_t)(((r->position + i) * 2654435761u) >> 8) % vocab;
    struct model_seq seq = {.position_start = r->position,
                            .row_count = rows,
                            .fresh = r->position == 0,
                            .logits_from = rows - 1,
                            .blocks = r->blocks,
                            .block_count = r->block_count};
    struct model_batch batch = {1, rows, &seq, ids};
    double t0 = seconds();
    model_begin(r->c, &r->kv, &batch);
    (void)model_finish(r->c);
    double took = seconds() - t0;
    r->position += rows;
    mem_give(ids);
    return took;
}

static void bench_prefill(struct rig *r, const struct use *u, uint32_t rows, uint32_t slice)
{
    double took = 0, gemm = gemm_rate(r->m);
    for (uint32_t at = 0; at < rows; at += slice)
        took += forward(r, rows - at < slice ? rows - at : slice);
    double rate = u->token_weights * rows / took;
    printf("prefill: %u tokens in %.2f s, %.1f tokens/s, %.1f G weights x rows/s; bf16 GEMM "
           "%.1f, share %.2f\n",
           rows, took, rows / took, rate / 1e9, gemm / 1e9, rate / gemm);
}

static void bench_decode(struct rig *r, struct use *u, uint32_t steps)
{
    static double took[STEPS_MAX];
    double limit = 0, read = read_rate(r->m);
    measure_rates(r->m, u);
    for (uint32_t i = 0; i < steps; i++)
        took[i] = forward(r, 1);
    double step = median(took, steps);
    for (uint32_t f = 0; f < u->count; f++) {
        const struct format_use *use = &u->formats[f];
        if (use->token_bytes == 0 || use->rate == 0)
            continue;
        limit += use->token_bytes / use->rate;
        printf("  %-24s %8.1f MB a token of %8.1f MB, GEMV %6.2f GB/s, %.2f G weights/s\n",
               use->title, use->token_bytes / 1e6, use->all_bytes / 1e6, use->rate / 1e9,
               use->rate / use->token_bytes * use->token_weights / 1e9);
    }
    printf("decode: %.2f ms a token (median of %u), %.1f tokens/s, %.1f MB a token, %.2f GB/s, "
           "share of %.2f GB/s read: %.2f; over the sum of GEMV times: %.2f\n",
           step * 1e3, steps, 1 / step, u->token_bytes / 1e6, u->token_bytes / step / 1e9,
           read / 1e9, u->token_bytes / step / read, step / limit);
}

int main(int argc, char **argv)
{
    uint32_t threads = 0, loads = 1, prefill = 2048, steps = 32, slice = 512;
    const char *directory = argc > 1 ? argv[1] : NULL;
    for (int i = 2; i + 1 < argc; i += 2) {
        uint32_t value = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--threads") == 0)
            threads = value;
        else if (strcmp(argv[i], "--loads") == 0)
            loads = value;
        else if (strcmp(argv[i], "--prefill") == 0)
            prefill = value;
        else if (strcmp(argv[i], "--steps") == 0)
            steps = value;
        else if (strcmp(argv[i], "--slice") == 0)
            slice = value;
        else
            directory = NULL;
    }
    if (directory == NULL || loads == 0 || loads > LOADS_MAX || steps > STEPS_MAX || slice == 0 ||
        slice > 1u << 16 || prefill == 0 || prefill > 1u << 20) {
        fprintf(stderr, "bench_model DIR [--threads N] [--loads N] [--prefill ROWS] "
                        "[--steps N] [--slice ROWS]\n");
        return 2;
    }
    struct model *m = load(directory, threads, loads);
    if (steps == 0) {
        model_destroy(&m);
        return 0;
    }
    struct use u = count_use(m);
    struct rig r = {.position = 0};
    rig_open(&r, m, slice, prefill + steps + BLOCK);
    bench_prefill(&r, &u, prefill, slice);
    bench_decode(&r, &u, steps);
    rig_close(&r);
    model_destroy(&m);
    return 0;
}
