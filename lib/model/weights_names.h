/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/weights_names.h - every tensor of the text model: its name, shape and place.
 *
 * Inner part of weights.c.  Pure: walks the names in a fixed order and calls back.  Shapes are
 * those of the checkpoint, whatever a rank's share is. */
#ifndef LIB_MODEL_WEIGHTS_NAMES_H
#define LIB_MODEL_WEIGHTS_NAMES_H

#include <stdbool.h>
#include <stdint.h>

struct model_config;
struct op_weight;
struct weights;

#define WEIGHTS_PREFIX "model.language_model."

struct weights_want {
    char name[192];
    uint64_t shape[3];
    uint32_t dims;
    bool squeeze;             /* ones may surround the values in any number */
    bool dense;               /* a matrix that becomes f32 whatever the others are */
    bool dense_exl3;          /* ... if it is stored as EXL3: rows of it are wanted */
    bool dense_quantised;     /* ... if it is stored in any format but a plain one */
    struct op_weight *matrix; /* exactly one of the two is set */
    float **vector;           /* always f32; a place that is set is copied into */
    /* What this rank holds of it: rows [first, + count) or, of a matrix, columns; count 0: no
     * part, its place stays empty. */
    enum { WEIGHTS_WHOLE, WEIGHTS_ROWS, WEIGHTS_COLUMNS } cut;
    uint32_t first, count;
};

typedef void (*weights_want_fn)(void *arg, const struct weights_want *want);
void weights_each(struct weights *w, const struct model_config *config, weights_want_fn fn,
                  void *arg);

#endif
