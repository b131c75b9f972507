/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/model.h - a loaded glm5_next text model and its forward pass as a cursor.
 *
 * One device thread owns a model's cursors; the model itself is immutable after load.  The
 * forward pass of a batch is begin, advance (any number of times, up to a layer), finish; between
 * two calls other cursors of the same model may run, as long as no two cursors in flight share a
 * state slot.  After create nothing allocates.
 *
 * Cache memory is the caller's: `struct model_kv` says where paged rows and state slots lie.
 * Equations: specs of glm5_next as restated in docs/architecture.md ("The forward pass"). */
#ifndef LIB_MODEL_MODEL_H
#define LIB_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "lib/base/kv_row.h"
#include "lib/model/shard.h"

#define MODEL_DRAFT_ROWS_MAX 8 /* rows of a verify step: one committed token + K <= 7 */
#define MODEL_STOP_IDS_MAX   16

struct model;
struct model_cursor;
struct op_ctx;
struct model_config; /* lib/model/config.h: every value of config.json */

enum model_numerics { MODEL_EXACT, MODEL_FAST };

/* Called during load from the loading thread; may be NULL. */
typedef void (*model_progress_fn)(void *arg, uint64_t bytes_done, uint64_t bytes_total);

/* One model over several ranks: who this one is, and how it meets the others.  Every rank calls the
 * same collectives in the same order; sums come back with the same bits on every rank.  A call
 * that fails has left the group: see model_cursor_fault. */
struct model_group {
    uint32_t rank, ranks;
    enum shard_moe moe;
    /* 0: every rank keeps the cache rows of all positions.  Else latent and index rows go round the
     * ranks, this many positions at a time: a multiple of index_kpool that divides a block. */
    uint32_t interleave;
    enum err (*all_reduce)(void *arg, float *values, size_t count);
    enum err (*all_gather)(void *arg, const void *own, size_t bytes, void *ret_all);
    /* part r of own [ranks, bytes] goes to rank r; needed with an interleave */
    enum err (*all_to_all)(void *arg, const void *own, size_t bytes, void *ret_all);
    void *arg;
};

struct model_options {
    const char *directory; /* config.json, *.safetensors, optionally tokenizer.json */
    enum model_numerics numerics;
    uint32_t threads; /* 0 = one per core */
    /* NULL: this process holds the whole model.  Copied; not called while loading. */
    const struct model_group *group;
    bool mtp; /* the MTP layer too, for lib/model/mtp.h; of several ranks rank 0 takes all of it */
    model_progress_fn progress;
    void *progress_arg;
};

/* Refusals name the file, tensor or config key in detail. */
MUST_USE enum err model_load(const struct model_options *options, struct model **ret_model,
                             struct err_detail *detail);
void model_destroy(struct model **model_p);

const struct model_config *model_config(const struct model *m);

/* What others must know of the model. */
struct model_info {
    uint32_t vocab_size; /* rows of lm_head; logits rows have this width */
    uint32_t layer_count;
    uint32_t hidden;
    uint32_t context_max;   /* max_position_embeddings */
    uint32_t stop_id_count; /* eos ids of the config, plus <|assistant|> if known */
    uint32_t stop_ids[MODEL_STOP_IDS_MAX];
    /* [vocab_size] 1 where the id has a token (tokenizer.json; all 1 without one); borrowed
     * from the model */
    const uint8_t *has_token;
    /* over tensors (name, dtype, shape, xxh3-128), config, tokenizer */
    struct hash128 model_fp;     /* weights, config, tokenizer, chat template */
    struct hash128 tokenizer_fp; /* lib/model/vocabulary.h; zero without one */
    struct hash128 weights_fp;   /* names, shapes and bytes of the tensors alone */
    const char *kernels;    /* variants in use, for the log: "avx2 fast: linear ...; ref: ..." */
    uint32_t threads;       /* in use */
    char quantization[192]; /* from the tensors, as identity_quantization says it */
    char warnings[1024];    /* one a line: what config or path say otherwise; "" = none */
    uint64_t weight_bytes;  /* of all tensors in the files */
    /* geometry of the cache, for kvmgr */
    uint32_t dsa_layers;  /* layers with latent and index rows */
    uint32_t latent_dim;  /* kv_lora_rank */
    uint32_t index_dim;   /* index_head_dim */
    uint32_t index_kpool; /* tokens per pooled index row */
    uint64_t state_bytes; /* of one state slot's body; multiple of 64 */
};
const struct model_info *model_info(const struct model *m);
/* Its threads, for other work of the thread that runs it. */
const struct op_ctx *model_ctx(const struct model *m);

/* Paged rows and state slots.  Block b begins at blocks + b * block_stride; in it,
 * DSA layer d (0-based among DSA layers) begins at d * layer_stride with block_tokens latent rows
 * [latent_dim] and, at + index_offset, block_tokens / index_kpool pooled rows [index_dim]; rows are
 * stored as lib/base/kv_row.h says, live state in f32.
 * Position p of a sequence is row p % block_tokens of the sequence's block p / block_tokens.  With
 * an interleave a rank has only its own 1 / ranks of a block's rows, in the same order and without
 * gaps; block_tokens is that of the whole, a multiple of ranks * interleave. */
struct model_kv {
    uint8_t *blocks;
    uint64_t block_stride;
    uint64_t layer_stride;
    uint64_t index_offset;
    uint32_t block_tokens; /* multiple of index_kpool */
    uint32_t block_count;
    uint8_t *slots; /* state slot s has its body at slots + s * slot_stride */
    uint64_t slot_stride;
    uint32_t slot_count;
    /* Kept states, which no pass of the model touches: slot slot_count + i is at
     * snapshots + i * snapshot_stride. */
    uint8_t *snapshots;
    uint64_t snapshot_stride;
    uint32_t snapshot_count;
    enum kv_row kv_type, index_type;
    enum kv_row snapshot_type; /* f32 or bf16 */
};

/* One sequence's rows in a batch. */
struct model_seq {
    uint32_t state_slot;
    uint32_t position_start; /* absolute position of the first row = tokens already final */
    uint32_t row_count;      /* >= 1 */
    /* journal rows of the last verify step to apply first (they are the positions just below
     * position_start) */
    uint32_t replay_count;
    bool fresh;             /* first rows of a sequence: the slot counts as all zero */
    bool journal;           /* verify step: state is not advanced, rows go to the journal
                                       (row_count <= MODEL_DRAFT_ROWS_MAX); else rows are final */
    uint32_t logits_from;   /* rows [logits_from, row_count) get logits; row_count = none */
    const uint32_t *blocks; /* block table, covers position_start + row_count tokens */
    uint32_t block_count;
};

struct model_batch {
    uint32_t seq_count;
    uint32_t row_count;           /* sum over seqs */
    const struct model_seq *seqs; /* borrowed until finish */
    const uint32_t *ids;          /* [row_count], sequences one after another; borrowed */
};

/* A cursor's work space for up to rows_max rows, seqs_max sequences and logits_rows_max logits
 * rows.  context_max bounds position + 1 (index score work space). */
struct model_cursor_options {
    uint32_t rows_max;
    uint32_t seqs_max;
    uint32_t logits_rows_max;
    uint32_t context_max;
};
MUST_USE enum err model_cursor_create(struct model *m, const struct model_cursor_options *options,
                                      struct model_cursor **ret_cursor, struct err_detail *detail);
void model_cursor_destroy(struct model_cursor **cursor_p);

/* All ids must be < vocab_size and every bound respected: violations are CHECKs (callers validated
 * their input).  begin embeds the rows; advance runs layers [current, layer_end); finish runs the
 * rest, the head, and returns the logits of the asked rows in batch order:
 * ret_logits [rows with logits, vocab_size] f32, valid until the cursor's next begin.
 * abandon drops a batch in flight (its sequences' slots and uncommitted rows are then
 * undefined). */
void model_begin(struct model_cursor *c, const struct model_kv *kv,
                 const struct model_batch *batch);
void model_advance(struct model_cursor *c, uint32_t layer_end);
uint32_t model_cursor_layer(const struct model_cursor *c); /* next layer to run */
const float *model_finish(struct model_cursor *c);
void model_abandon(struct model_cursor *c);
/* Why the batch in flight is worth nothing: a collective failed and the rest was skipped.  ERR_OK
 * else; begin starts afresh. */
enum err model_cursor_fault(const struct model_cursor *c);

/* Taps for a drafter: from the next begin on, keeps the mean stream after each of these layers.
 * count 0 = off.  Takes memory when more taps are asked for than ever before; not between begin
 * and finish. */
#define MODEL_WATCH_MAX 16
void model_cursor_watch(struct model_cursor *c, const uint32_t *layers, uint32_t count);
/* [rows, hidden] of tap `index` of the batch that finished; valid until the next begin. */
const float *model_cursor_watched(const struct model_cursor *c, uint32_t index);

/* Test and eval hook: called after each layer with the batch's rows.  mean_stream [rows, hidden];
 * experts [rows, top_k] ascending ids (NULL on dense layers); attend: for DSA layers, row r's
 * attended positions as a bitmap over positions [rows, attend_stride bytes], else NULL. */
struct model_probe {
    void (*layer)(void *arg, uint32_t layer, const float *mean_stream, const int32_t *experts,
                  const uint8_t *attend, size_t attend_stride);
    void *arg;
};
void model_cursor_probe(struct model_cursor *c, const struct model_probe *probe); /* NULL = off */

/* What groups of linears read, for calibration.  Called as the layer runs: row r of the group's
 * input is x + (rows_of != NULL ? rows_of[r] : r) * in.  Experts without rows are not called. */
enum model_input {
    MODEL_INPUT_MIXER, /* all that read the mixer's input: q, k, v, f_a, g_a, b; q_a, kv_a, index */
    MODEL_INPUT_Q_B,
    MODEL_INPUT_O,
    MODEL_INPUT_MLP,  /* gate and up, dense or shared */
    MODEL_INPUT_DOWN, /* dense or shared */
    MODEL_INPUT_EXPERT,
    MODEL_INPUT_EXPERT_DOWN,
    MODEL_INPUT_COUNT
};
struct model_tap {
    void (*input)(void *arg, uint32_t layer, enum model_input which, uint32_t expert,
                  const float *x, const uint32_t *rows_of, uint32_t rows, uint32_t in);
    void *arg;
};
void model_cursor_tap(struct model_cursor *c, const struct model_tap *tap); /* NULL = off */

#endif
