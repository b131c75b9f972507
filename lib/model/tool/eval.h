/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/eval.h - inner part of tandem-model eval: a case's verdict and tensor reading. */
#ifndef LIB_MODEL_TOOL_EVAL_H
#define LIB_MODEL_TOOL_EVAL_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"

struct model;
struct safetensors;
struct safetensors_tensor;

struct eval_options {
    const char *directory;            /* of the model */
    const char *golden;               /* of the vectors */
    uint32_t slice_rows;              /* 0 = whole prompts up to 512 rows */
    double logit_bound, stream_bound; /* 0 = those of the vectors' description */
    uint32_t slice_layers;            /* 0 = all */
};

struct eval_verdict {
    double max_abs_logit, max_abs_stream;
    bool sets_equal, ids_equal;
};

/* Prints the case's JSON line; true if it is ok within the two bounds. */
bool eval_report(const char *name, const struct eval_verdict *v, double logit_bound,
                 double stream_bound);

/* Grows *max_abs by |have - want|; a NaN on either side gives infinity. */
void eval_compare(const float *have, const struct safetensors_tensor *want, uint64_t first,
                  uint64_t count, double *max_abs);

float eval_f32(const struct safetensors_tensor *t, uint64_t index);
int32_t eval_i32(const struct safetensors_tensor *t, uint64_t index);

/* I32 [n] with 0 <= id < vocab_size; *ret_ids is mem_take'n. */
MUST_USE enum err eval_ids(const struct safetensors_tensor *t, uint32_t vocab_size,
                           uint32_t **ret_ids, struct err_detail *detail);
/* NULL in *ret if the name is absent; an error if dtype or shape differ. */
MUST_USE enum err eval_find(const struct safetensors *set, const char *name, const char *dtype,
                            uint64_t rows, uint64_t columns, const struct safetensors_tensor **ret,
                            struct err_detail *detail);

/* Both count their cases and the failed ones. */
MUST_USE enum err eval_random(struct model *m, const struct safetensors *set,
                              const struct eval_options *options, uint32_t *cases, uint32_t *failed,
                              struct err_detail *detail);
MUST_USE enum err eval_trained(struct model *m, const struct safetensors *set,
                               const struct eval_options *options, uint32_t *cases,
                               uint32_t *failed, struct err_detail *detail);

#endif
