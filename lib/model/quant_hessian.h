/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/quant_hessian.h - inside of a Hessian: input signs and the block factors of H.
 *
 * Inner part of lib/model/quant*.c.  With H' = Hb (su H su) Hb of the padded size, H' = L D L^T in
 * blocks of 16: L has identity blocks on its diagonal, D = C C^T. */
#ifndef LIB_MODEL_QUANT_HESSIAN_H
#define LIB_MODEL_QUANT_HESSIAN_H

#include <stdbool.h>
#include <stdint.h>

#define QUANT_BLOCK   16u
#define HESSIAN_MAGIC 0x68657373u

struct quant_hessian {
    uint32_t magic;
    uint32_t in, size; /* size: padded to 128 */
    uint64_t rows;     /* of calibration */
    bool finished, usable;
    bool skewed;   /* few inputs carry much of the weight: `auto` leaves output scales alone */
    double *h;     /* [size][size] the sum; after finish the factor C, NULL if unusable */
    float *l;      /* [size][size] blocks below the diagonal of L, else 0 */
    double *c;     /* [size / 16][16][16] lower triangles */
    int8_t *signs; /* [size] +-1 */
};

/* Fills count random signs. */
void quant_signs(uint64_t seed, uint32_t stream, int8_t *ret_signs, uint32_t count);

#endif
