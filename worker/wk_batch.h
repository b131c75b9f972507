/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_batch.h - what runs next and what is in it: decode step or prefill slice.
 *
 * Loop thread.  Pure; part of the core (wk_core_state.h declares wk_batch_next).  Fairness: with
 * decoders alive, prefill slices alternate with decode steps; a debt account keeps decoders their
 * share of the time (60 % for one, 80 % for three and more) until a newcomer has waited for
 * long. */
#ifndef WORKER_WK_BATCH_H
#define WORKER_WK_BATCH_H

#include <stdint.h>

struct wk_cost;

/* A newcomer's first slice is due after this long whatever the decoders are owed, and so is the
 * next one of a prompt that stands still. */
#define WK_NEWCOMER_US   700000u
#define WK_STANDSTILL_US 1500000u

/* Rows of a new prefill batch: as many of rows_max as a whole pass at this context fits into
 * pass_us, at least 1. */
uint32_t wk_batch_rows(const struct wk_cost *cost, uint32_t rows_max, double context,
                       double pass_us);
/* Layers of its next slice: as many of layers_left (and of layers_max, 0 = all) as fit into
 * slice_us, at least 1. */
uint32_t wk_batch_layers(const struct wk_cost *cost, uint32_t rows, double context,
                         uint32_t layers_left, uint32_t layers_max, uint32_t layer_count,
                         double slice_us);

#endif
