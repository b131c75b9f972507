/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/format.h - which storage format a linear layer has, decided from its tensors alone.
 *
 * Pure but for format_bind, which reads the mapped checkpoint; start-up only.  The decision rests
 * on suffixes, dtypes and shapes under one prefix, never on a path or a config: those may only
 * raise a warning.  Whatever fits no rule is refused by the name of the tensor. */
#ifndef LIB_MODEL_FORMAT_H
#define LIB_MODEL_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_format.h"
#include "lib/base/err.h"
#include "lib/model/safetensors.h"

struct json;

enum format_kind {
    FORMAT_EXL3,
    FORMAT_EXL3_RANKED, /* slices quantised on their own, `rank{r}.` before the suffix */
    FORMAT_NVFP4_MODELOPT,
    FORMAT_NVFP4_CT,
    FORMAT_MXFP4,
    FORMAT_MXFP8,
    FORMAT_FP8_BLOCK,
    FORMAT_FP8_TENSOR,
    FORMAT_FP8_CHANNEL,
    FORMAT_BF16,
    FORMAT_F16,
    FORMAT_F32,
    FORMAT_KIND_COUNT
};

enum format_fault {
#define FORMAT_FAULT(code, name) FORMAT_FAULT_##code,
#include "lib/model/format_faults.def"
#undef FORMAT_FAULT
    FORMAT_FAULT_COUNT
};

const char *format_kind_name(enum format_kind kind);
const char *format_fault_name(enum format_fault fault);
const char *format_codebook_name(enum op_codebook codebook);

#define FORMAT_RANKS_MAX   64u
#define FORMAT_DTYPE_OTHER SAFETENSORS_DTYPE_COUNT /* a dtype name that nobody knows */
/* Tensors that can stand under one prefix: every known suffix, and five for each rank. */
#define FORMAT_TENSORS_MAX 512u

/* One tensor under the prefix, by its header. */
struct format_tensor {
    const char *suffix; /* "weight", "rank0.trellis" */
    enum safetensors_dtype dtype;
    uint32_t dims;
    const uint64_t *shape; /* [dims] */
    const uint8_t *marker; /* the four bytes of a one-element I32; NULL: not looked at */
    bool shared_h;         /* found under `...experts.shared_h.` in place of the prefix */
};

/* What a config announces.  All zero: nothing, so nothing can disagree. */
struct format_hint {
    uint32_t kinds; /* bit per format_kind that the announcement allows; 0: says nothing */
    bool unknown;   /* announces a method that is not known */
    bool has_codebook;
    enum op_codebook codebook;
};

#define FORMAT_WARN_CONFIG_MISMATCH 1u /* tensors disagree with the hint; the tensors win */

/* The names are suffixes of the tensors given, borrowed from them; NULL where there is none. */
struct format_info {
    enum format_kind kind;
    uint32_t out, in;
    bool has_bias, has_input_scale;
    uint32_t warnings; /* FORMAT_WARN_* */
    const char *weight, *scale, *global, *bias, *input_scale;
    enum safetensors_dtype scale_dtype;
    /* EXL3; of the first slice where it is rank-sliced */
    enum op_codebook codebook;
    uint32_t half_bits;
    uint32_t in_padded, out_padded;
    bool signs_in, signs_out; /* packed signs in place of suh, svh */
    uint32_t ranks;
    bool ranks_by_rows; /* slices split the inputs and add up, else they split the outputs */
    bool shared_h;      /* one side's scales lie once per layer */
};

/* Decides the format of the linear `prefix` of shape [out, in].  The tensors are those whose name
 * is the prefix, a dot and the suffix; names that no format knows are passed over.  hint may be
 * NULL.  A refusal returns ERR_NOT_FOUND (no tensors), ERR_UNSUPPORTED or ERR_INVALID, its class in
 * *ret_fault, and a detail "class: tensor: reason". */
MUST_USE enum err format_detect(const char *prefix, uint32_t out, uint32_t in,
                                const struct format_tensor *tensors, uint32_t count,
                                const struct format_hint *hint, struct format_info *ret_info,
                                enum format_fault *ret_fault, struct err_detail *detail);

/* The hint of a config.json and, for what it leaves open, of a hf_quant_config.json; either may be
 * NULL. */
void format_hint_read(const struct json *config, const struct json *hf_quant_config,
                      struct format_hint *ret_hint);

/* Finds the tensors of the prefix in the checkpoint, decides, and fills the weight as it lies in
 * the mapping.  Rank-sliced EXL3 is refused.  Values are not looked at: see format_check_values. */
MUST_USE enum err format_bind(const struct safetensors *set, const char *prefix, uint32_t out,
                              uint32_t in, const struct format_hint *hint,
                              struct format_info *ret_info, struct op_quantised *ret_weight,
                              enum format_fault *ret_fault, struct err_detail *detail);

/* Marks in used [safetensors_count] every tensor under the prefix that formats know by its suffix;
 * returns how many there are. */
uint32_t format_mark(const struct safetensors *set, const char *prefix, uint8_t *used);

/* Refuses codes and scales that no sound writer produces: NaN codes, NaN or negative block
 * scales, a global scale that is not finite and positive, infinities in plain weights. */
MUST_USE enum err format_check_values(const char *prefix, const struct format_info *info,
                                      const struct op_quantised *weight,
                                      enum format_fault *ret_fault, struct err_detail *detail);

/* What of a weight has values to be checked, each in a tensor of its own. */
enum format_part {
    FORMAT_PART_CODES,
    FORMAT_PART_SCALES,
    FORMAT_PART_BIAS,
    FORMAT_PART_SUH,
    FORMAT_PART_SVH,
    FORMAT_PART_COUNT
};

/* Where the part lies in the mapping; NULL if there is none. */
const void *format_part_data(const struct op_quantised *w, enum format_part part);

/* format_check_values bit by bit, without a name for what is wrong: false if one of count bytes of
 * the part, whole elements, is not sound; or if the global scale is not. */
bool format_part_sound(const struct op_quantised *w, enum format_part part, const void *bytes,
                       uint64_t count);
bool format_global_sound(const struct op_quantised *w);

/* First of a run of floats, aligned or not, that is infinite or NaN; count if there is none. */
uint64_t format_not_finite(const void *data, enum op_dtype dtype, uint64_t count);

/* Bytes of the stored weight without bias, padding included. */
uint64_t format_bytes(const struct op_quantised *weight);

#endif
