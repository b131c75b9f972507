/* SPDX-License-Identifier: Apache-2.0 */
/* The head, and one of 8 bits made at load: FP8 codes with a scale a row, which kernels read as
 * they lie.  These find the best rows, whose values in the file then say what they are worth. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/op_dtype.h"
#include "lib/base/mem.h"
#include "lib/model/dflash_parts.h"
#include "lib/model/quant.h"

struct head_work {
    const struct dflash_linear *head;
    uint8_t *codes;
    float *scales;
};

static void head_rows(const void *arg, uint32_t begin, uint32_t end)
{
    const struct head_work *w = arg;
    uint32_t in = w->head->in;
    float *row = mem_take_array(in, sizeof *row);
    struct quant_matrix m = {.w = row, .in = in, .out = 1, .in_stride = 1, .out_stride = in};
    for (uint32_t r = begin; r < end; r++) {
        op_widen(&w->head->weight, (uint64_t)r * in, in, row);
        enum err e = quant_fp8(&m, QUANT_FP8_CHANNEL, w->codes + (uint64_t)r * in, &w->scales[r]);
        CHECK(e == ERR_OK); /* the loader saw that all values are finite */
    }
    mem_give(row);
}

/* The values are read no more: a copy goes, pages of a file may be had again. */
static void values_release(struct dflash *d, const void *values, uint64_t bytes)
{
    for (uint32_t i = 0; i < d->owned_count; i++) {
        if (d->owned[i] == values) {
            mem_give(d->owned[i]);
            d->owned[i] = NULL;
            return;
        }
    }
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)values + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)values + bytes) / page * page;
    if (end > begin)
        (void)!madvise((void *)begin, end - begin, MADV_DONTNEED);
}

void dflash_head_quantise(struct dflash *d)
{
    struct dflash_linear *h = &d->weights.head;
    size_t at = strlen(d->formats);
    if (h->stored.format != OP_FORMAT_PLAIN) {
        snprintf(d->formats + at, sizeof d->formats - at, ", head as stored");
        return; /* it has 8 bits at most already */
    }
    struct head_work w = {.head = h,
                          .codes = dflash_take(d, h->out, h->in),
                          .scales = dflash_take(d, h->out, sizeof(float))};
    op_for(&d->ctx, h->out, (uint64_t)h->in * 16, head_rows, &w);
    values_release(d, h->weight.data, (uint64_t)h->out * h->in * op_dtype_bytes(h->weight.dtype));
    d->weights.head_values = h->stored.codes;
    d->weights.head_dtype = h->weight.dtype;
    d->b.again_values =
        dflash_take(d, (uint64_t)DFLASH_AGAIN_MAX * h->in, op_dtype_bytes(h->weight.dtype));
    h->stored = (struct op_quantised){.format = OP_FORMAT_FP8,
                                      .out = h->out,
                                      .in = h->in,
                                      .codes = w.codes,
                                      .row_bytes = h->in,
                                      .scales = {.data = w.scales,
                                                 .dtype = OP_SCALE_F32,
                                                 .rows_shared = 1,
                                                 .columns_shared = OP_SHARED_BY_ALL,
                                                 .stride = 1},
                                      .no_nan = true};
    h->weight = (struct op_weight){.quantised = &h->stored};
    snprintf(d->formats + at, sizeof d->formats - at, ", head fp8");
}

/* As the config says; logits of any rows of the head. */
static void scale(const struct dflash_config *c, float *logits, uint64_t count)
{
    if (c->output_multiplier == 1 && c->softcap == 0)
        return;
    for (uint64_t i = 0; i < count; i++) {
        double z = c->output_multiplier * logits[i];
        logits[i] = (float)(c->softcap > 0 ? c->softcap * tanh(z / c->softcap) : z);
    }
}

/* The logits of these rows of the head, from their values: bit for bit those of a head that was
 * not quantised. */
static void again(struct dflash *d, const float *x, const uint32_t *rows, uint32_t count,
                  float *ret_logits)
{
    struct dflash_buffers *b = &d->b;
    uint32_t in = d->weights.head.in;
    uint64_t bytes = (uint64_t)in * op_dtype_bytes(d->weights.head_dtype);
    for (uint32_t i = 0; i < count; i++)
        memcpy(b->again_values + i * bytes, d->weights.head_values + rows[i] * bytes, bytes);
    struct dflash_linear part = {
        .weight = {.data = b->again_values, .dtype = d->weights.head_dtype},
        .out = count,
        .in = in,
    };
    dflash_linear_run(d, &part, x, in, ret_logits, 1);
    scale(&d->config, ret_logits, count);
}

/* Best first, ties to the lower row. */
static void sort(uint32_t *rows, float *logits, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        uint32_t row = rows[i], at = i;
        float value = logits[i];
        while (at > 0 &&
               (value > logits[at - 1] || (value == logits[at - 1] && row < rows[at - 1]))) {
            rows[at] = rows[at - 1];
            logits[at] = logits[at - 1];
            at--;
        }
        rows[at] = row;
        logits[at] = value;
    }
}

void dflash_head_run(struct dflash *d, const float *x, uint32_t rows, uint32_t candidates,
                     uint32_t *ret_ids, float *ret_logits)
{
    struct dflash_buffers *b = &d->b;
    const struct dflash_linear *h = &d->weights.head;
    uint32_t most = candidates;
    if (b->again_values != NULL)
        most = DFLASH_AGAIN * candidates < DFLASH_AGAIN_MIN ? DFLASH_AGAIN_MIN
                                                            : DFLASH_AGAIN * candidates;
    CHECK(most <= DFLASH_AGAIN_MAX);
    dflash_linear_run(d, h, x, h->in, b->logits, rows);
    scale(&d->config, b->logits, (uint64_t)rows * h->out);
    for (uint32_t t = 0; t < rows; t++) {
        uint32_t count =
            dflash_top(d, b->logits + (uint64_t)t * h->out, most, b->best_rows, b->best_logits);
        CHECK(count >= candidates); /* the loader saw that there are so many tokens */
        if (b->again_values != NULL) {
            again(d, x + (uint64_t)t * h->in, b->best_rows, count, b->best_logits);
            sort(b->best_rows, b->best_logits, count);
        }
        for (uint32_t i = 0; i < candidates; i++) {
            uint32_t row = b->best_rows[i];
            ret_ids[t * candidates + i] =
                d->weights.head_ids != NULL ? d->weights.head_ids[row] : row;
            ret_logits[t * candidates + i] = b->best_logits[i];
        }
    }
}
