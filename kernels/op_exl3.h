/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/op_exl3.h - EXL3: tiles, the bit ring, codebooks, the 128-point transform.
 *
 * Pure.  The padded matrix D is [in, out] in 16 x 16 tiles, tile row by tile row.  A tile is a
 * ring of 128 * half_bits bits in little-endian 32-bit words, most significant bit first; weight t
 * of a tile has the 16-bit state that ends at ring bit (t + 1) * half_bits / 2, the first ones
 * reaching back to the end of the ring.  A codebook maps a state to an f16 value.
 * With H the 128-point Hadamard matrix per block: W^T = diag(suh) H D H diag(svh) / 128. */
#ifndef KERNELS_OP_EXL3_H
#define KERNELS_OP_EXL3_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_format.h"

#define OP_EXL3_TILE         16u
#define OP_EXL3_TILE_WEIGHTS 256u
#define OP_EXL3_BLOCK        128u        /* of the transform; padding and cuts follow it */
#define OP_EXL3_MARKER_MCG   0xcbac1fedu /* the multipliers, which the markers repeat */
#define OP_EXL3_MARKER_MUL1  0x83dcd12du
#define OP_EXL3_TILE_U16_MAX 128u

/* Rates that exist: 1 to 8 bits; 1.5, 2.5 and 3.5 with mul1. */
bool op_exl3_rate_exists(uint32_t half_bits, enum op_codebook codebook);

static inline uint32_t op_exl3_tile_u16(uint32_t half_bits)
{
    return 8 * half_bits;
}

static inline uint32_t op_exl3_padded(uint32_t size)
{
    return (size + OP_EXL3_BLOCK - 1) & ~(OP_EXL3_BLOCK - 1);
}

/* Place of weight t in its tile: the register order of tensor cores. */
static inline uint32_t op_exl3_row_of(uint32_t t)
{
    return 2 * ((t >> 3) & 3) + (t & 1) + 8 * ((t >> 1) & 1);
}

static inline uint32_t op_exl3_column_of(uint32_t t)
{
    return (t >> 5) + 8 * ((t >> 2) & 1);
}

/* Bits of the ring up to and with weight t. */
static inline uint32_t op_exl3_ring_end(uint32_t half_bits, uint32_t t)
{
    return ((t + 1) * half_bits) >> 1;
}

void op_exl3_states(const uint8_t *tile, uint32_t half_bits, uint16_t ret_states[256]);

/* Writes the low bits of every state; the inverse of op_exl3_states for states that obey the
 * recurrence. */
void op_exl3_pack(const uint16_t states[256], uint32_t half_bits, uint8_t *ret_tile);

/* The codebook's value, exact in f16. */
float op_exl3_value(enum op_codebook codebook, uint16_t state);

/* Tile (tile_row, tile_column) of D, row-major 16 x 16 with the given stride in floats. */
void op_exl3_tile(const struct op_quantised *w, uint32_t tile_row, uint32_t tile_column,
                  float *ret_values, uint64_t stride);

/* Scale of an input or output element: suh / svh, or the packed sign. */
double op_exl3_in_scale(const struct op_quantised *w, uint32_t i);
double op_exl3_out_scale(const struct op_quantised *w, uint32_t o);

/* v = H v, natural order, unscaled: v[i] = sum over j of (-1)^popcount(i & j) v[j]. */
void op_hadamard128(double v[128]);

#endif
