/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_cost.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"

#define COST_FORGET    0.98 /* half the weight is on the last 34 steps */
#define COST_VARIANCE  1e4  /* of the prior, relative to the noise of a sample */
#define COST_TRACE_MAX 1e6  /* stops wind-up while all steps look alike */
#define COST_OUTLIER   8.0  /* a step of more times its prediction counts as that many */
#define COST_US_MIN    1.0

/* Scaled so that all terms are near 1 at usual sizes. */
#define COST_ROWS_UNIT    64.0
#define COST_CONTEXT_UNIT 4096.0

void wk_cost_init(struct wk_cost *c, double us_fixed, double us_per_row)
{
    CHECK(c != NULL && us_fixed >= 0 && us_per_row > 0);
    memset(c, 0, sizeof *c);
    c->weight[1] = us_fixed;
    c->weight[2] = us_per_row * COST_ROWS_UNIT;
    for (int i = 0; i < WK_COST_TERMS; i++)
        c->cov[i][i] = COST_VARIANCE;
}

static void terms(double rows, double context, double share, double ret_x[WK_COST_TERMS])
{
    ret_x[0] = 1.0;
    ret_x[1] = share;
    ret_x[2] = share * rows / COST_ROWS_UNIT;
    ret_x[3] = share * rows / COST_ROWS_UNIT * context / COST_CONTEXT_UNIT;
}

double wk_cost_predict(const struct wk_cost *c, double rows, double context, double share)
{
    CHECK(c != NULL && rows >= 0 && share >= 0);
    double x[WK_COST_TERMS], us = 0;
    terms(rows, context, share, x);
    for (int i = 0; i < WK_COST_TERMS; i++)
        us += c->weight[i] * x[i];
    return us > COST_US_MIN ? us : COST_US_MIN;
}

void wk_cost_learn(struct wk_cost *c, double rows, double context, double share, double us)
{
    CHECK(c != NULL && share >= 0);
    double x[WK_COST_TERMS], px[WK_COST_TERMS], scale = COST_FORGET;
    double predicted = wk_cost_predict(c, rows, context, share);
    if (c->samples > 8 && us > predicted * COST_OUTLIER)
        us = predicted * COST_OUTLIER;
    terms(rows, context, share, x);
    for (int i = 0; i < WK_COST_TERMS; i++) {
        px[i] = 0;
        for (int j = 0; j < WK_COST_TERMS; j++)
            px[i] += c->cov[i][j] * x[j];
    }
    double plain = 0;
    for (int i = 0; i < WK_COST_TERMS; i++) {
        scale += x[i] * px[i];
        plain += c->weight[i] * x[i];
    }
    double miss = us - plain, trace = 0;
    for (int i = 0; i < WK_COST_TERMS; i++) {
        c->weight[i] += px[i] / scale * miss;
        /* A negative cost is an artefact of few samples and would invite endless slices. */
        if (c->weight[i] < 0)
            c->weight[i] = 0;
        for (int j = 0; j < WK_COST_TERMS; j++)
            c->cov[i][j] = (c->cov[i][j] - px[i] * px[j] / scale) / COST_FORGET;
        trace += c->cov[i][i];
    }
    if (!isfinite(trace) || trace > COST_TRACE_MAX) {
        memset(c->cov, 0, sizeof c->cov);
        for (int i = 0; i < WK_COST_TERMS; i++)
            c->cov[i][i] = COST_VARIANCE;
    }
    c->samples++;
    CHECK(isfinite(c->weight[0]) && isfinite(c->weight[2]));
}
