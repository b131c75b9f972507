/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_cost.h - online fit of a step's time over rows, context and share of the layers.
 *
 * Loop thread.  Pure.  One per plan kind.  us = a + f (b + c rows + d rows context), no term
 * negative, by least squares of the relative error with forgetting: what the machine did last
 * counts most.  A weak pull towards the prior keeps terms in place that recent steps say nothing
 * about. */
#ifndef WORKER_WK_COST_H
#define WORKER_WK_COST_H

#include <stdint.h>

#define WK_COST_TERMS 4

struct wk_cost {
    double weight[WK_COST_TERMS];
    double prior[WK_COST_TERMS], scale[WK_COST_TERMS];
    double moments[WK_COST_TERMS][WK_COST_TERMS], targets[WK_COST_TERMS];
    uint64_t samples;
};

/* Prior: us_per_row for a full pass, from a measurement at load or a guess. */
void wk_cost_init(struct wk_cost *c, double us_fixed, double us_per_row);
/* share = layers run / layers of the model; context = mean position of the rows. */
double wk_cost_predict(const struct wk_cost *c, double rows, double context, double share);
void wk_cost_learn(struct wk_cost *c, double rows, double context, double share, double us);

#endif
