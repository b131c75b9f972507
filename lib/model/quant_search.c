/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_search.h"

#include <stdlib.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"

#define SEARCH_MAGIC 0x71736561u

struct quant_search {
    uint32_t magic;
    const struct quant_codebook *book;
    struct quant_viterbi *viterbi;
    struct quant_beam *beam;
};

struct valued {
    float value;
    uint16_t state;
};

static int by_value(const void *a, const void *b)
{
    const struct valued *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? -1 : 1;
    return (int)x->state - (int)y->state;
}

void quant_codebook_fill(struct quant_codebook *book, enum op_codebook codebook)
{
    struct valued *sorted = mem_take_array(QUANT_STATES, sizeof(*sorted));
    book->codebook = codebook;
    for (uint32_t s = 0; s < QUANT_STATES; s++) {
        book->values[s] = op_exl3_value(codebook, (uint16_t)s);
        sorted[s] = (struct valued){book->values[s], (uint16_t)s};
    }
    qsort(sorted, QUANT_STATES, sizeof(*sorted), by_value);
    for (uint32_t i = 0; i < QUANT_STATES; i++)
        book->order[i] = sorted[i].state;
    mem_give(sorted);
}

struct quant_search *quant_search_create(const struct quant_codebook *book, uint32_t bits,
                                         uint32_t beam)
{
    CHECK(bits >= 1 && bits <= 8);
    struct quant_search *search = mem_take(sizeof(*search));
    search->magic = SEARCH_MAGIC;
    search->book = book;
    if (beam == 0)
        search->viterbi = quant_viterbi_create(book, bits);
    else
        search->beam = quant_beam_create(book, bits, beam);
    return search;
}

void quant_search_destroy(struct quant_search **search_p)
{
    struct quant_search *search = *search_p;
    if (search == NULL)
        return;
    CHECK_OBJ(search, SEARCH_MAGIC);
    quant_viterbi_destroy(&search->viterbi);
    quant_beam_destroy(&search->beam);
    search->magic = 0;
    mem_give(search);
    *search_p = NULL;
}

double quant_search_tile(struct quant_search *search, const float values[256],
                         uint16_t ret_states[256])
{
    CHECK_OBJ(search, SEARCH_MAGIC);
    if (search->viterbi != NULL)
        quant_viterbi_tile(search->viterbi, values, ret_states);
    else
        quant_beam_tile(search->beam, values, ret_states);
    double error = 0;
    for (uint32_t t = 0; t < 256; t++) {
        double difference = (double)search->book->values[ret_states[t]] - values[t];
        error += difference * difference;
    }
    return error;
}
