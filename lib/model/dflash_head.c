/* SPDX-License-Identifier: Apache-2.0 */
/* A head of 8 bits, made at load: FP8 codes with a scale a row, which kernels read as they lie. */
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
