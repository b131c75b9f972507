/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/dflash_parts.h - inside of struct dflash.
 *
 * Inner part of lib/model: dflash*.c.  Work buffers
 * are sized at load and never grow. */
#ifndef LIB_MODEL_DFLASH_PARTS_H
#define LIB_MODEL_DFLASH_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_format.h"
#include "kernels/op_table.h"
#include "lib/base/check.h"
#include "lib/model/dflash.h"

struct cpu_pool;
struct safetensors;

#define DFLASH_MAGIC 0x64666c73u
#define APPEND_ROWS  64u /* context rows that are computed at once */
/* Where the head was quantised at load, so many times the candidates are computed again from its
 * values, but so many at least. */
#define DFLASH_AGAIN     4u
#define DFLASH_AGAIN_MIN 16u
#define DFLASH_AGAIN_MAX (DFLASH_AGAIN * DFLASH_TOP_K_MAX)

struct dflash_linear {
    struct op_weight weight; /* as stored; points to `stored` unless it is plain */
    struct op_quantised stored;
    uint32_t out, in;
};

struct dflash_conv {
    float *base;                 /* [2, taps, hidden] */
    struct dflash_linear kernel; /* [2 * taps * groups, hidden] */
};

struct dflash_layer {
    float *input_norm, *post_norm, *q_norm, *k_norm;
    struct dflash_linear q, k, v, o, gate, up, down;
    struct dflash_conv attention_conv, mlp_conv;
};

struct dflash_weights {
    struct dflash_linear fc, embed, head, selector;
    /* Of a head that was quantised at load: its values where the file has them, perhaps
     * misaligned; NULL = there are none. */
    const uint8_t *head_values;
    enum op_dtype head_dtype;
    float *hidden_norm, *norm;
    float *mask;                             /* [hidden] learned vector, NULL = the table's row */
    struct op_weight predecessor, successor; /* [vocab, rank] */
    struct dflash_layer *layers;
    uint32_t *head_ids; /* [draft_vocab] target id of a reduced head's row, NULL = the row */
};

struct dflash_buffers { /* by row of the batch */
    float *context;     /* of an append: fc's input is the caller's */
    float *x, *h, *y, *delta;
    float *q, *k, *v, *o;
    float *gate, *up;
    float *logits, *project;
    uint32_t *best_rows; /* [DFLASH_AGAIN_MAX] of the head, for one row of the block */
    float *best_logits;
    uint8_t *again_values; /* [DFLASH_AGAIN_MAX, hidden] rows to compute again; NULL = none */
    uint32_t *top_ids;
    float *top_logits, *scores;
};

struct dflash {
    uint32_t magic;
    struct dflash_config config;
    struct dflash_options options;
    struct op_table ops;
    struct op_ctx ctx;
    struct cpu_pool *pool;
    struct safetensors *tensors, *borrowed;
    struct dflash_weights weights;
    uint8_t *has_token; /* [vocab] */
    struct hash128 tokenizer_fp, context_fp;
    void **owned; /* everything taken at load */
    uint32_t owned_count, owned_max;
    double *rope;                         /* [head_dim / 2] frequencies */
    uint64_t layer_at[DFLASH_LAYERS_MAX]; /* floats from a context's start */
    uint32_t layer_rows[DFLASH_LAYERS_MAX];
    uint64_t context_floats;
    struct dflash_buffers b;
    char formats[256];
    dflash_probe_fn probe;
    void *probe_arg;
};

/* Memory that lives as long as the drafter. */
void *dflash_take(struct dflash *d, uint64_t count, uint64_t item_bytes);

/* dflash_load.c */
MUST_USE enum err dflash_load_tensors(struct dflash *d, struct err_detail *detail);
/* dflash_head.c: a plain head becomes 8 bits wide; any other stays. */
void dflash_head_quantise(struct dflash *d);
/* Candidates each of one block's mask rows, x [rows, hidden]; best first. */
void dflash_head_run(struct dflash *d, const float *x, uint32_t rows, uint32_t candidates,
                     uint32_t *ret_ids, float *ret_logits);

void dflash_linear_run(struct dflash *d, const struct dflash_linear *w, const float *x,
                       uint64_t x_stride, float *y, uint32_t rows);
void dflash_norm(struct dflash *d, const float *w, const float *x, float *y, uint32_t rows,
                 uint32_t groups, uint32_t n);
void dflash_tell(struct dflash *d, const char *name, uint32_t layer, const float *values,
                 uint32_t rows, uint32_t width);

/* Rows of K (part 0) or V (part 1) of a layer; position p is row p % layer_rows. */
static inline float *dflash_rows(const struct dflash *d, const struct dflash_context *c,
                                 uint32_t layer, uint32_t part)
{
    uint64_t width = (uint64_t)d->config.kv_heads * d->config.head_dim;
    return c->rows + d->layer_at[layer] + part * d->layer_rows[layer] * width;
}

/* dflash_math.c: plain loops over rows */

/* In place: x [rows, heads, dim], row r at position[r % period] + ... = start + r. */
void dflash_rope(const double *frequencies, float *x, uint32_t rows, uint32_t heads, uint32_t dim,
                 uint32_t start);
/* y = conv(x) of one side; blocks of `block` rows do not see one another.  y must not be x. */
void dflash_conv_run(const struct dflash_config *config, const float *base, const float *delta,
                     uint32_t side, const float *x, float *y, uint32_t rows, uint32_t block);
/* Attention of one block: q [block, heads, dim], k and v [block, kv_heads, dim] of the block. */
struct dflash_attend {
    const struct dflash *drafter;
    const struct dflash_context *context;
    uint32_t layer;
    const float *q, *k, *v;
    float *o;
};
void dflash_attend_run(const struct dflash_attend *a);
/* Best k of a row of logits as rows of the head, best first, ties to the lower one; only those with
 * a token.  Returns how many there are. */
uint32_t dflash_top(const struct dflash *d, const float *logits, uint32_t k, uint32_t *ret_rows,
                    float *ret_logits);
/* Walks the candidates of draft rows 1...; scores [rows, top_k] out. */
void dflash_walk(const struct dflash *d, uint32_t anchor, const float *project,
                 const uint32_t *top_ids, const float *top_logits, float *scores,
                 uint32_t *ret_ids);

#endif
