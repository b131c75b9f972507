/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/format_scan.h - every linear of a checkpoint and its format, from the tensors alone.
 *
 * Start-up only, one thread.  No config is needed: sizes are those stored, so an EXL3 linear that
 * was padded counts with its padding.  What fits no rule is reported with its refusal. */
#ifndef LIB_MODEL_FORMAT_SCAN_H
#define LIB_MODEL_FORMAT_SCAN_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/format.h"

#define FORMAT_PREFIX_BYTES 1024

struct format_linear {
    const char *prefix; /* the name without its suffix */
    uint32_t out, in;
    uint64_t bytes; /* of all tensors under the prefix that the format knows */
    enum err err;   /* not ERR_OK: why in detail; info and weight say nothing */
    enum format_fault fault;
    const struct err_detail *detail;
    struct format_info info;
    struct op_quantised weight; /* not for FORMAT_EXL3_RANKED */
};

/* Borrowed for the call.  False ends the scan. */
typedef bool (*format_scan_fn)(void *arg, const struct format_linear *linear);

/* Calls fn for every linear in name order.  hint may be NULL. */
void format_scan(const struct safetensors *set, const struct format_hint *hint, format_scan_fn fn,
                 void *arg);

/* Whether the tensor is part of some linear: not a norm, a convolution or a parameter alone. */
bool format_is_part(const struct safetensors_tensor *t);

/* Whether a prefix or a tensor's name belongs to a routed expert. */
bool format_is_expert(const char *name);

/* Bits of a weight as the format stores them, scales left out: 4 for NVFP4, 16 for BF16. */
double format_bits(const struct format_info *info);
/* "exl3-mcg 4.00 bpw", "nvfp4", "bf16". */
void format_title(const struct format_info *info, char *ret_text, size_t bytes);

#endif
