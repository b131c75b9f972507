/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/quant_regular.h - a matrix made near Gaussian, and the best scale for a codebook.
 *
 * Inner part of lib/model/quant*.c.  W = diag(su) Hb R Hb diag(sv): R is what the tiles hold. */
#ifndef LIB_MODEL_QUANT_REGULAR_H
#define LIB_MODEL_QUANT_REGULAR_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_types.h"

struct quant_codebook;

struct quant_regular {
    uint32_t in, out; /* padded */
    float *r;         /* [in][out] */
    double *su, *sv;
};

/* su and sv come in as signs and leave as scales. */
void quant_regularise(struct quant_regular *m, bool out_scales, const struct op_ctx *ctx);

/* Tile (tile_row, tile_column) of R in tile order, times scale. */
void quant_tile_values(const struct quant_regular *m, uint32_t tile_row, uint32_t tile_column,
                       double scale, float ret_values[256]);

/* The factor for R that a sample of tiles likes best. */
double quant_scale_search(const struct quant_regular *m, const struct quant_codebook *book,
                          uint32_t bits, uint32_t beam, const struct op_ctx *ctx);

#endif
