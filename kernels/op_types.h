/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_types.h - what all op contracts share: weights, sequences, pages, the launch context.
 *
 * Pure.  Every pointer in an args struct is device memory; every size is known from the plan, so
 * that an op enqueues and returns and nothing is read back to decide control flow.  Ops never
 * allocate.  Row invariance holds for all of them: a row's result does not depend on which other
 * rows share the launch, nor on how many threads the context has. */
#ifndef KERNELS_OP_TYPES_H
#define KERNELS_OP_TYPES_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/kv_row.h"

enum op_dtype { OP_F32, OP_BF16, OP_F16 };

struct op_quantised; /* kernels/op_format.h */

/* A weight as it lies in memory, row-major [out, in], aligned to its element; or, for the linear
 * ops and (EXL3 apart) the embedding, in any storage format. */
struct op_weight {
    const void *data;
    enum op_dtype dtype;
    const struct op_quantised *quantised; /* if not NULL, data and dtype do not count */
};

/* Bounds that reference code relies on for its scratch; the config loader refuses more. */
#define OP_HEAD_DIM_MAX   256 /* KDA key channels per head */
#define OP_CONV_TAPS_MAX  8
#define OP_STREAMS        4  /* residual streams */
#define OP_MHC_ROWS       24 /* pre 4, post 4, mixing 16 */
#define OP_TOP_K_MAX      32 /* experts per token */
#define OP_EXPERTS_MAX    1024
#define OP_POOLS_KEPT_MAX 2048 /* pools a query may select */
#define OP_LATENT_MAX     1024 /* width of a latent row */
#define OP_INDEX_DIM_MAX  256
#define OP_KPOOL_MAX      64

/* One sequence's rows in a launch.  State pointers are byte offsets from a slot's body, so that the
 * same table serves every layer. */
struct op_seq {
    uint32_t row_begin; /* first row of the batch */
    uint32_t row_count;
    uint32_t position_start; /* absolute position of the first row */
    uint32_t replay_count;   /* journal rows to apply first */
    uint32_t fresh;          /* 1: the slot counts as all zero; position_start is 0 */
    uint32_t journal;        /* 1: rows go to the journal, the state is not advanced */
    uint8_t *slot;           /* body of the state slot */
    const uint32_t *blocks;  /* block table, logical block -> block id */
};

/* Rows that go round several ranks, `interleave` at a time: row p is on rank p / interleave % ranks
 * and is there row p / (ranks * interleave) * interleave + p % interleave.  All zero: one rank has
 * them all. */
struct op_shard {
    uint32_t rank, ranks, interleave;
};

static inline int op_shard_owns(const struct op_shard *s, uint32_t row)
{
    return s->ranks <= 1 || row / s->interleave % s->ranks == s->rank;
}

/* Of a row of another rank: a row of the same round. */
static inline uint32_t op_shard_local(const struct op_shard *s, uint32_t row)
{
    if (s->ranks <= 1)
        return row;
    return row / (s->ranks * s->interleave) * s->interleave + row % s->interleave;
}

/* Paged rows of one layer, with p counted on the rank: row p of a sequence lies at
 * base + blocks[p / rows_per_block] * block_stride + (p % rows_per_block) * bytes of a row.
 * Rows of f32 are aligned to their elements. */
struct op_pages {
    uint8_t *base;
    uint64_t block_stride;
    uint32_t rows_per_block;
    enum kv_row type;
    struct op_shard shard;
};

static inline uint8_t *op_page_row(const struct op_pages *pages, const uint32_t *blocks,
                                   uint32_t row, uint32_t dim)
{
    row = op_shard_local(&pages->shard, row);
    uint8_t *block = pages->base + blocks[row / pages->rows_per_block] * pages->block_stride;
    return block + (row % pages->rows_per_block) * kv_row_bytes(pages->type, dim);
}

/* A launch context.  On the cpu device `run` splits [0, items) over threads and returns when all
 * are done; run == NULL means one thread.  fn must compute items independently of the split. */
typedef void (*op_range_fn)(const void *arg, uint32_t begin, uint32_t end);

struct op_ctx {
    void (*run)(void *pool, uint32_t items, op_range_fn fn, const void *arg);
    void *pool;
};

/* Below this many multiply-adds a launch costs less than waking a thread. */
#define OP_PARALLEL_COST_MIN 65536u

static inline void op_for(const struct op_ctx *ctx, uint32_t items, uint64_t cost_per_item,
                          op_range_fn fn, const void *arg)
{
    if (items == 0)
        return;
    if (ctx->run == NULL || items == 1 || items * cost_per_item < OP_PARALLEL_COST_MIN)
        fn(arg, 0, items);
    else
        ctx->run(ctx->pool, items, fn, arg);
}

#endif
