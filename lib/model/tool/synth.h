/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/synth.h - inner part of tandem-model synth: the shape of a model of a given size.
 *
 * Pure.  Only for measuring speed: such a model says nothing. */
#ifndef LIB_MODEL_TOOL_SYNTH_H
#define LIB_MODEL_TOOL_SYNTH_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/config.h"

struct str;

struct synth_shape {
    struct model_config config;
    uint64_t parameters;
    double active_experts; /* expert weights that a token reads */
    double others;         /* weights of all other matrices that a token reads */
};

/* A glm5_next of about that many parameters whose tokens read 0.8 to 1.2 times as many expert
 * weights as others, as the published model's do.  ERR_UNSUPPORTED: none of that size. */
MUST_USE enum err synth_shape_find(uint64_t parameters, struct synth_shape *ret_shape,
                                   struct err_detail *detail);
/* config.json, but for its last members. */
void synth_config_write(const struct model_config *c, struct str *out);

#endif
