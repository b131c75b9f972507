/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/dflash.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/mem.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/dflash_parts.h"
#include "lib/model/read_file.h"
#include "lib/model/safetensors.h"

#define CONFIG_BYTES_MAX (4u << 20)
#define OWNED_MAX        1024u

/* ---- small helpers ---- */

void *dflash_take(struct dflash *d, uint64_t count, uint64_t item_bytes)
{
    CHECK(d->owned_count < d->owned_max);
    void *p = mem_take_array(count, item_bytes);
    d->owned[d->owned_count++] = p;
    return p;
}

void dflash_linear_run(struct dflash *d, const struct dflash_linear *w, const float *x,
                       uint64_t x_stride, float *y, uint32_t rows)
{
    struct op_linear_args a = {.x = x,
                               .w = w->weight,
                               .y = y,
                               .rows = rows,
                               .in = w->in,
                               .out = w->out,
                               .x_stride = x_stride,
                               .y_stride = w->out};
    CHECK(d->ops.linear(&a, &d->ctx) == ERR_OK);
}

void dflash_norm(struct dflash *d, const float *w, const float *x, float *y, uint32_t rows,
                 uint32_t groups, uint32_t n)
{
    struct op_rms_norm_args a = {.x = x,
                                 .w = w,
                                 .y = y,
                                 .rows = rows,
                                 .groups = groups,
                                 .n = n,
                                 .x_stride = (uint64_t)groups * n,
                                 .y_stride = (uint64_t)groups * n,
                                 .eps = d->config.rms_eps};
    CHECK(d->ops.rms_norm(&a, &d->ctx) == ERR_OK);
}

void dflash_tell(struct dflash *d, const char *name, uint32_t layer, const float *values,
                 uint32_t rows, uint32_t width)
{
    if (d->probe != NULL)
        d->probe(d->probe_arg, name, layer, values, rows, width);
}

void dflash_probe(struct dflash *d, dflash_probe_fn probe, void *arg)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    d->probe = probe;
    d->probe_arg = arg;
}

/* ---- contexts ---- */

static void lay_out_context(struct dflash *d)
{
    const struct dflash_config *c = &d->config;
    uint64_t width = (uint64_t)c->kv_heads * c->head_dim, at = 0;
    for (uint32_t l = 0; l < c->layers; l++) {
        bool ring = c->layer_sliding[l] && c->window < d->options.context_max;
        d->layer_rows[l] = ring ? c->window : d->options.context_max;
        d->layer_at[l] = at;
        at += 2 * width * d->layer_rows[l];
    }
    d->context_floats = at;
}

size_t dflash_context_bytes(const struct dflash *d)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    return d->context_floats * sizeof(float);
}

uint32_t dflash_reach(const struct dflash *d)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    for (uint32_t l = 0; l < d->config.layers; l++)
        if (!d->config.layer_sliding[l])
            return UINT32_MAX;
    return d->config.window - 1;
}

void dflash_context_begin(struct dflash_context *c, uint32_t start)
{
    c->first = c->length = c->high = start;
}

void dflash_context_crop(const struct dflash *d, struct dflash_context *c, uint32_t length)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    CHECK(length <= c->length);
    c->length = length;
    /* What a ring has overwritten is a hole. */
    for (uint32_t l = 0; l < d->config.layers; l++) {
        uint32_t kept = c->high > d->layer_rows[l] ? c->high - d->layer_rows[l] : 0;
        if (c->first < kept)
            c->first = kept;
    }
    if (c->first > length)
        dflash_context_begin(c, length);
}

static void append_layer(struct dflash *d, struct dflash_context *c, uint32_t layer,
                         const float *vectors, uint32_t count)
{
    const struct dflash_config *config = &d->config;
    const struct dflash_layer *w = &d->weights.layers[layer];
    uint32_t width = config->kv_heads * config->head_dim;
    dflash_linear_run(d, &w->k, vectors, config->hidden, d->b.k, count);
    dflash_norm(d, w->k_norm, d->b.k, d->b.k, count, config->kv_heads, config->head_dim);
    dflash_rope(d->rope, d->b.k, count, config->kv_heads, config->head_dim, c->length);
    dflash_linear_run(d, &w->v, vectors, config->hidden, d->b.v, count);
    dflash_tell(d, "ctx_k", layer, d->b.k, count, width);
    dflash_tell(d, "ctx_v", layer, d->b.v, count, width);
    float *keys = dflash_rows(d, c, layer, 0), *values = dflash_rows(d, c, layer, 1);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t to = (uint64_t)((c->length + i) % d->layer_rows[layer]) * width;
        memcpy(keys + to, d->b.k + (uint64_t)i * width, width * sizeof(float));
        memcpy(values + to, d->b.v + (uint64_t)i * width, width * sizeof(float));
    }
}

void dflash_reduce(struct dflash *d, const float *taps, uint32_t count, float *ret_vectors)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    uint64_t width = (uint64_t)d->config.tap_count * d->config.hidden;
    dflash_linear_run(d, &d->weights.fc, taps, width, ret_vectors, count);
    dflash_norm(d, d->weights.hidden_norm, ret_vectors, ret_vectors, count, 1, d->config.hidden);
}

void dflash_context_append_reduced(struct dflash *d, struct dflash_context *c, const float *vectors,
                                   uint32_t count)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    CHECK(c->rows != NULL && c->first <= c->length && !d->options.context_only);
    CHECK(count <= d->options.context_max - c->length);
    while (count > 0) {
        uint32_t now = count < APPEND_ROWS ? count : APPEND_ROWS;
        dflash_tell(d, "context", 0, vectors, now, d->config.hidden);
        for (uint32_t l = 0; l < d->config.layers; l++)
            append_layer(d, c, l, vectors, now);
        c->length += now;
        if (c->length > c->high)
            c->high = c->length;
        vectors += (uint64_t)now * d->config.hidden;
        count -= now;
    }
}

void dflash_context_append(struct dflash *d, struct dflash_context *c, const float *taps,
                           uint32_t count)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    while (count > 0) {
        uint32_t now = count < APPEND_ROWS ? count : APPEND_ROWS;
        dflash_reduce(d, taps, now, d->b.context);
        dflash_context_append_reduced(d, c, d->b.context, now);
        taps += (uint64_t)now * d->config.tap_count * d->config.hidden;
        count -= now;
    }
}

/* ---- life ---- */

static void take_buffers(struct dflash *d)
{
    const struct dflash_config *c = &d->config;
    struct dflash_buffers *b = &d->b;
    uint64_t rows = (uint64_t)d->options.seqs_max * c->block_size, f = sizeof(float);
    if (rows < APPEND_ROWS)
        rows = APPEND_ROWS;
    uint64_t q_width = (uint64_t)c->heads * c->head_dim,
             kv_width = (uint64_t)c->kv_heads * c->head_dim;
    b->context = dflash_take(d, APPEND_ROWS * c->hidden, f);
    b->x = dflash_take(d, rows * c->hidden, f);
    b->h = dflash_take(d, rows * c->hidden, f);
    b->y = dflash_take(d, rows * c->hidden, f);
    b->q = dflash_take(d, rows * q_width, f);
    b->o = dflash_take(d, rows * q_width, f);
    b->k = dflash_take(d, rows * kv_width, f);
    b->v = dflash_take(d, rows * kv_width, f);
    b->gate = dflash_take(d, rows * c->ffn, f);
    b->up = dflash_take(d, rows * c->ffn, f);
    b->logits = dflash_take(d, (uint64_t)c->block_size * d->weights.head.out, f);
    b->best_rows = dflash_take(d, DFLASH_AGAIN_MAX, sizeof(uint32_t));
    b->best_logits = dflash_take(d, DFLASH_AGAIN_MAX, f);
    uint64_t top = (uint64_t)c->block_size * (c->v2 ? c->selector_top_k : 1);
    b->top_ids = dflash_take(d, top, sizeof(uint32_t));
    b->top_logits = dflash_take(d, top, f);
    b->scores = dflash_take(d, top, f);
    if (c->v2) {
        b->delta = dflash_take(d, rows * 2 * c->conv_taps * (c->hidden / c->conv_group), f);
        b->project = dflash_take(d, (uint64_t)c->block_size * c->selector_rank, f);
    }
    d->rope = dflash_take(d, c->head_dim / 2, sizeof(double));
    for (uint32_t i = 0; i < c->head_dim / 2; i++)
        d->rope[i] = pow(c->rope_theta, -2.0 * i / c->head_dim);
}

static void start_threads(struct dflash *d)
{
    uint32_t threads = d->options.threads;
    if (d->options.ctx != NULL) {
        d->ctx = *d->options.ctx;
        return;
    }
    if (threads == 0) {
        long cores = sysconf(_SC_NPROCESSORS_ONLN);
        threads = cores > 0 ? (uint32_t)cores : 1;
    }
    if (threads > CPU_POOL_THREADS_MAX)
        threads = CPU_POOL_THREADS_MAX;
    if (threads < 2)
        return;
    d->pool = cpu_pool_create(threads);
    d->ctx.run = cpu_pool_run;
    d->ctx.pool = d->pool;
}

static enum err load(struct dflash *d, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(read_file(d->options.directory, "config.json", CONFIG_BYTES_MAX, &text, &bytes, detail));
    enum err e = dflash_config_parse(text, bytes, &d->config, detail);
    free(text);
    if (e != ERR_OK)
        return e;
    TRY(safetensors_open_directory(d->options.directory, &d->tensors, detail));
    op_table_cpu(&d->ops, d->options.exact ? OP_EXACT : OP_FAST_F32, op_cpu_best());
    TRY(dflash_load_tensors(d, detail));
    start_threads(d);
    if (d->options.context_only)
        return ERR_OK;
    lay_out_context(d);
    take_buffers(d);
    if (d->options.head_8bit)
        dflash_head_quantise(d);
    return ERR_OK;
}

enum err dflash_load(const struct dflash_options *options, struct dflash **ret_drafter,
                     struct err_detail *detail)
{
    CHECK(options->directory != NULL);
    CHECK(options->context_only || (options->target != NULL && options->seqs_max > 0 &&
                                    options->seqs_max <= 4096 && options->context_max > 0));
    struct dflash *d = mem_take(sizeof *d);
    d->magic = DFLASH_MAGIC;
    d->options = *options;
    d->owned_max = OWNED_MAX + DFLASH_LAYERS_MAX * 32;
    d->owned = mem_take_array(d->owned_max, sizeof *d->owned);
    enum err e = load(d, detail);
    if (e != ERR_OK) {
        dflash_destroy(&d);
        return e;
    }
    *ret_drafter = d;
    return ERR_OK;
}

void dflash_destroy(struct dflash **drafter_p)
{
    struct dflash *d = *drafter_p;
    if (d == NULL)
        return;
    CHECK_OBJ(d, DFLASH_MAGIC);
    cpu_pool_destroy(&d->pool);
    safetensors_close(&d->tensors);
    safetensors_close(&d->borrowed);
    for (uint32_t i = 0; i < d->owned_count; i++)
        mem_give(d->owned[i]);
    mem_give(d->owned);
    d->magic = 0;
    mem_give(d);
    *drafter_p = NULL;
}

const struct dflash_config *dflash_config(const struct dflash *d)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    return &d->config;
}

struct hash128 dflash_tokenizer(const struct dflash *d)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    return d->tokenizer_fp;
}

struct hash128 dflash_context_fp(const struct dflash *d)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    return d->context_fp;
}

const char *dflash_formats(const struct dflash *d)
{
    CHECK_OBJ(d, DFLASH_MAGIC);
    return d->formats;
}
