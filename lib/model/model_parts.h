/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/model_parts.h - inside of struct model and struct model_cursor.
 *
 * Inner part of lib/model: model_load.c, model_cursor.c and layer_*.c.  A cursor's buffers are
 * sized at create for its options and never grow. */
#ifndef LIB_MODEL_MODEL_PARTS_H
#define LIB_MODEL_MODEL_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_table.h"
#include "lib/base/check.h"
#include "lib/model/config.h"
#include "lib/model/model.h"

struct cpu_pool;
struct safetensors;
struct weights;
struct weights_layer;
struct weights_mlp;

#define MODEL_MAGIC  0x6d6f646cu
#define CURSOR_MAGIC 0x63757273u

/* Byte offsets in a state slot's body. */
struct state_layer {
    uint64_t state;   /* KDA: S [heads, dim, dim] */
    uint64_t ring;    /* KDA: pre-conv q, k, v rows; DSA: raw index keys and gates */
    uint64_t journal; /* KDA: rows of the last verify step */
};

struct model {
    uint32_t magic;
    struct model_config whole;  /* as the checkpoint says */
    struct model_config config; /* as this rank's ops see it: its own heads and widths */
    struct shard shard;
    struct model_group group;
    struct model_info info;
    struct op_table ops;
    char kernels[OP_TABLE_TEXT_BYTES];
    struct op_ctx ctx;
    struct cpu_pool *pool;
    struct model *mtp; /* rank 0 of several: the MTP layer whole, see load_mtp_whole; else NULL */
    struct weights *weights;
    struct safetensors *tensors; /* kept open where matrices stay in the file */
    uint8_t *has_token;
    uint32_t dsa_number[MODEL_LAYERS_MAX]; /* 0-based among DSA layers */
    struct state_layer state[MODEL_LAYERS_MAX];
    uint32_t conv_ring_rows, index_ring_rows;
    uint32_t pools_kept, selected_max; /* per query: pools; positions with the tail */
};

/* Work buffers by row of the batch; see layer_*.c for their widths. */
struct cursor_buffers {
    float *h, *x, *y;
    float *pre, *post, *mix;
    float *qkv_raw, *qkv, *rank, *decay, *beta, *gate, *o; /* KDA */
    float *c_q, *q, *latent, *q_abs, *o_abs;               /* DSA; o is shared */
    float *index_q, *index_key, *index_gate, *index_w;
    uint32_t *selected, *selected_count;
    double *score, *attend;
    uint32_t score_rows, attend_rows; /* rows of one launch over these two */
    uint64_t score_stride;
    float *router, *chosen_weights, *mlp_gate, *mlp_up, *expert_out; /* MLP */
    int32_t *chosen;
    uint32_t *offsets, *pair_rows, *pair_of;
    struct op_candidate *best, *best_all;           /* rows by position: pools of one launch */
    float *q_part, *q_gather, *q_all, *o_all, *lse; /* ... queries and results of all heads */
    float *merge_own, *merge_all;                   /* ... parts for each rank; parts of each */
    float *head_x, *logits;
    float *head_part, *head_all; /* several ranks: own columns of the logits; those of all */
    uint32_t *logits_rows;
};

struct model_cursor {
    uint32_t magic;
    struct model *model;
    struct model_cursor_options options;
    struct cursor_buffers b;
    struct op_seq *seqs; /* device tables of the batch */
    uint32_t *seq_of;
    uint32_t *ids;
    struct model_kv kv;
    uint32_t seq_count, row_count, logits_count;
    uint32_t layer; /* next to run */
    bool running;
    enum err fault;                   /* of a collective */
    uint32_t watch_count, watch_room; /* watch_room: of watch_rows */
    uint32_t watch_layers[MODEL_WATCH_MAX];
    float *watch_rows; /* [watch_room, rows_max, hidden] */
    struct model_probe probe;
    bool probing;
    struct model_tap tap; /* input NULL: off */
    float *probe_mean;
    uint8_t *probe_attend;
    size_t probe_stride;
};

/* The device cannot refuse on cpu: an error of a launch is our bug there. */
#define RUN(cursor, op, ...)                                                                       \
    CHECK((cursor)->model->ops.op(&(struct op_##op##_args){__VA_ARGS__}, &(cursor)->model->ctx) == \
          ERR_OK)

void cursor_linear(struct model_cursor *c, const struct op_weight *w, const float *x, uint32_t in,
                   float *y, uint32_t out);

/* Shows the tap what a group of linears reads: all rows of the batch. */
void cursor_tap(struct model_cursor *c, uint32_t layer, enum model_input which, const float *x,
                uint32_t in);

/* Sums b.y [rows, hidden] over the ranks. */
void cursor_reduce(struct model_cursor *c);

/* Where rows of the cache lie on this rank, in units of `unit` positions. */
uint32_t cursor_block_rows(const struct model_cursor *c); /* latent rows of a block here */
struct op_shard cursor_shard(const struct model_cursor *c, uint32_t unit);

/* dcp.c: cache rows by position.  Work space of a cursor; the row's own positions after the scores
 * of one launch; attention over them by all heads, merged for our own into b.o_abs. */
bool dcp_on(const struct model *m);
void dcp_take(struct model_cursor *c);
void dcp_give(struct model_cursor *c);
void dcp_select(struct model_cursor *c, uint32_t row_first, uint32_t row_count);
void dcp_attend(struct model_cursor *c, const struct op_pages *pages);

/* x: the normed input [rows, hidden]; the sublayer's result goes to b.y. */
void layer_kda(struct model_cursor *c, uint32_t layer);
void layer_dsa(struct model_cursor *c, uint32_t layer);
void layer_mlp(struct model_cursor *c, uint32_t layer);

#endif
