/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/format_parts.h - inside of format detection: roles of tensors and the case at hand.
 *
 * Inner part of lib/model/format*.c.  Pure. */
#ifndef LIB_MODEL_FORMAT_PARTS_H
#define LIB_MODEL_FORMAT_PARTS_H

#include "lib/model/format.h"

enum format_role {
    ROLE_TRELLIS,
    ROLE_SUH,
    ROLE_SVH,
    ROLE_SU,
    ROLE_SV,
    ROLE_MCG,
    ROLE_MUL1,
    ROLE_SCALE,
    ROLE_WEIGHT,
    ROLE_WEIGHT_PACKED,
    ROLE_WEIGHT_SCALE,
    ROLE_WEIGHT_SCALE_INV,
    ROLE_WEIGHT_SCALE_2,
    ROLE_WEIGHT_GLOBAL_SCALE,
    ROLE_INPUT_SCALE,
    ROLE_INPUT_GLOBAL_SCALE,
    ROLE_BIAS,
    ROLE_PRE_QUANT_SCALE,
    ROLE_WEIGHT_ZERO_POINT,
    ROLE_SVDQUANT, /* any suffix that begins so */
    ROLE_COUNT
};

/* The linear under decision.  role[r] is its tensor in that role, NULL where there is none. */
struct format_case {
    const char *prefix;
    uint32_t out, in;
    const struct format_tensor *tensors;
    uint32_t count;
    const struct format_tensor *role[ROLE_COUNT];
    uint32_t ranks; /* highest rank met + 1 */
    struct format_info *info;
    enum format_fault fault;
    struct err_detail *detail;
};

const char *format_role_suffix(enum format_role role);
/* ROLE_COUNT for a suffix of no known role. */
enum format_role format_role_of(const char *suffix);
/* Splits "rank{r}.rest"; false for any other suffix, for leading zeros and too high a rank. */
bool format_rank_suffix(const char *suffix, uint32_t *ret_rank, const char **ret_rest);

/* Notes the fault and returns its err; the message names prefix and suffix. */
enum err format_refuse(struct format_case *c, enum format_fault fault, const char *suffix,
                       const char *format, ...) PRINTF_LIKE(4, 5);

static inline bool format_is_1d(const struct format_tensor *t, uint64_t a)
{
    return t->dims == 1 && t->shape[0] == a;
}

static inline bool format_is_2d(const struct format_tensor *t, uint64_t a, uint64_t b)
{
    return t->dims == 2 && t->shape[0] == a && t->shape[1] == b;
}

/* [] and [1] are read alike. */
static inline bool format_is_one(const struct format_tensor *t)
{
    return t->dims == 0 || format_is_1d(t, 1);
}

MUST_USE enum err format_detect_exl3(struct format_case *c);
MUST_USE enum err format_detect_ranked(struct format_case *c);
MUST_USE enum err format_detect_fp4(struct format_case *c);
MUST_USE enum err format_detect_fp8(struct format_case *c);
MUST_USE enum err format_detect_plain(struct format_case *c);

#endif
