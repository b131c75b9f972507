/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/quant_search.h - the best ring of bits for the 256 values of one EXL3 tile.
 *
 * Inner part of lib/model/quant*.c.  A search object belongs to one thread; the codebook table is
 * shared.  Both searches go around the ring twice: the first pass, begun half way, finds the node
 * at which the ring may be closed, the second is bound to begin and end there. */
#ifndef LIB_MODEL_QUANT_SEARCH_H
#define LIB_MODEL_QUANT_SEARCH_H

#include <stdint.h>

#include "kernels/op_format.h"

#define QUANT_STATES 65536u

/* Value of every state. */
struct quant_codebook {
    enum op_codebook codebook;
    float values[QUANT_STATES];
    uint16_t order[QUANT_STATES]; /* states by rising value */
};

void quant_codebook_fill(struct quant_codebook *book, enum op_codebook codebook);

struct quant_search;

/* beam 0: every state survives. */
struct quant_search *quant_search_create(const struct quant_codebook *book, uint32_t bits,
                                         uint32_t beam);
void quant_search_destroy(struct quant_search **search_p);

/* values in tile order; the states obey the recurrence around the ring.  Returns the sum of
 * squared errors. */
double quant_search_tile(struct quant_search *search, const float values[256],
                         uint16_t ret_states[256]);

/* The two kinds, for quant_search_tile. */
struct quant_viterbi;
struct quant_viterbi *quant_viterbi_create(const struct quant_codebook *book, uint32_t bits);
void quant_viterbi_destroy(struct quant_viterbi **v_p);
void quant_viterbi_tile(struct quant_viterbi *v, const float values[256], uint16_t ret_states[256]);

struct quant_beam;
struct quant_beam *quant_beam_create(const struct quant_codebook *book, uint32_t bits,
                                     uint32_t beam);
void quant_beam_destroy(struct quant_beam **b_p);
void quant_beam_tile(struct quant_beam *b, const float values[256], uint16_t ret_states[256]);

#endif
