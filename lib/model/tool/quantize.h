/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/quantize.h - inner part of tandem-model quantize: plan, encoder, journal, config.
 *
 * One thread, ops spread over a pool.  The journal in the output directory names every linear that
 * is finished and on the disk, with the hash of its bytes; an interrupted run goes on from it. */
#ifndef LIB_MODEL_TOOL_QUANTIZE_H
#define LIB_MODEL_TOOL_QUANTIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_format.h"
#include "kernels/op_types.h"
#include "lib/base/arena.h"
#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "lib/model/model.h"
#include "lib/model/safetensors.h"

struct json;
struct quant_hessian;
struct str;
struct writer;

enum quantize_format { QUANTIZE_EXL3, QUANTIZE_NVFP4, QUANTIZE_MXFP8, QUANTIZE_FP8 };

struct quantize_options {
    const char *in, *out, *calib; /* calib may be NULL */
    enum quantize_format format;
    uint32_t bits;
    enum op_codebook codebook;
    bool all; /* else routed experts only */
    uint32_t beam;
    uint64_t seed;
    uint64_t calib_rows;
    uint64_t shard_bytes;
};

const char *quantize_format_name(enum quantize_format format);
/* "exl3-mcg 4.00 bpw". */
MUST_USE enum err quantize_read_format(const char *format, const char *bits, const char *codebook,
                                       struct quantize_options *ret_options,
                                       struct err_detail *detail);
void quantize_title(const struct quantize_options *o, char *ret_text, size_t bytes);

#define QUANTIZE_PARTS_MAX 4
#define QUANTIZE_NO_LAYER  UINT32_MAX

struct quantize_part {
    const char *suffix;
    enum safetensors_dtype dtype;
    uint32_t dims;
    uint64_t shape[3];
    uint32_t tensor; /* of the writer */
    uint64_t bytes;
};

struct quantize_result {
    double relative_error, proxy_error;
    uint64_t rows; /* of calibration; 0: none */
};

struct quantize_linear {
    const char *prefix;
    uint32_t layer, expert;
    enum model_input which;     /* MODEL_INPUT_COUNT: its input is not observed */
    struct op_quantised source; /* in the mapped input */
    struct quantize_part parts[QUANTIZE_PARTS_MAX];
    uint32_t part_count;
    uint64_t bytes; /* of all parts */
    bool done;
    struct quantize_result result;
};

/* What becomes what: linears in order of layers, and the tensors that stay. */
struct quantize_plan {
    struct arena arena;
    struct quantize_linear *linears;
    uint32_t count;
    uint32_t *copies; /* numbers of input tensors ... */
    uint32_t *copied; /* ... and of the output's */
    uint32_t copy_count;
    uint64_t weights; /* to quantise */
};

/* The stored tensors of l->source's sizes; l has none yet. */
MUST_USE enum err quantize_parts(struct quantize_linear *l, const struct quantize_options *options,
                                 struct err_detail *detail);
MUST_USE enum err quantize_plan_make(const struct safetensors *set,
                                     const struct quantize_options *options, struct writer *writer,
                                     struct quantize_plan *ret_plan, struct err_detail *detail);
void quantize_plan_fini(struct quantize_plan *p);

/* The parts of one linear, one after another, into bytes [l->bytes].  h may be NULL. */
MUST_USE enum err
quantize_encode(const struct quantize_linear *l, const struct quantize_options *options,
                const struct quant_hessian *h, uint64_t seed, const struct op_ctx *ctx,
                void (*progress)(void *arg, uint64_t done, uint64_t total), void *progress_arg,
                uint8_t *ret_bytes, struct quantize_result *ret_result, struct err_detail *detail);

/* Squared error of the parts' values over the squares of the source's. */
double quantize_error(const struct quantize_linear *l, const struct quantize_options *options,
                      const uint8_t *bytes, const struct op_ctx *ctx);

/* The first line says what the run is; the others what is done. */
struct quantize_journal {
    char path[4096];
    int fd;
};

MUST_USE enum err quantize_journal_open(struct quantize_journal *j,
                                        const struct quantize_options *options,
                                        const struct hash128 *source, bool *ret_resumed,
                                        struct err_detail *detail);
/* Marks the linears whose bytes are in the output as the journal says. */
MUST_USE enum err quantize_journal_read(struct quantize_journal *j,
                                        const struct quantize_options *options,
                                        struct quantize_plan *plan, struct writer *writer,
                                        const struct op_ctx *ctx, struct err_detail *detail);
MUST_USE enum err quantize_journal_add(struct quantize_journal *j, const struct quantize_linear *l,
                                       const struct hash128 *bytes, struct err_detail *detail);
void quantize_journal_close(struct quantize_journal *j);

/* The value of config.json's quantization_config. */
void quantize_config_entry(struct str *out, const struct quantize_options *options,
                           uint64_t calib_tokens);
/* What quantize_write_files will read, so that a long run does not fail at its end. */
MUST_USE enum err quantize_check_files(const struct quantize_options *options,
                                       struct err_detail *detail);
/* config.json with its quantization entry, the other files beside the weights, the report. */
MUST_USE enum err quantize_write_files(const struct quantize_options *options,
                                       const struct quantize_plan *plan, uint64_t calib_tokens,
                                       struct err_detail *detail);

#endif
