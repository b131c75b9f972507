/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_cost.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "lib/base/check.h"

#define COST_FORGET  0.97 /* half the weight is on the last 23 steps */
#define COST_PULL    1e-5 /* of the prior, in samples */
#define COST_OUTLIER 8.0  /* a step of more times its prediction counts as that many */
#define COST_US_MIN  1.0
#define COST_US_EVEN 50.0 /* shorter steps are all timer noise: no finer relative error */

/* Scaled so that all terms are near 1 at usual sizes. */
#define COST_ROWS_UNIT    64.0
#define COST_CONTEXT_UNIT 4096.0

void wk_cost_init(struct wk_cost *c, double us_fixed, double us_per_row)
{
    CHECK(c != NULL && us_fixed >= 0 && us_per_row > 0);
    memset(c, 0, sizeof *c);
    double rows = us_per_row * COST_ROWS_UNIT;
    c->prior[1] = us_fixed;
    c->prior[2] = rows;
    for (int i = 0; i < WK_COST_TERMS; i++) {
        c->scale[i] = c->prior[i] > 0.1 * rows ? c->prior[i] : 0.1 * rows;
        c->weight[i] = c->prior[i];
    }
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

/* Solves for the terms that are not fixed at 0.  The pull makes the matrix positive definite, so
 * elimination without pivoting is safe. */
static void solve(const struct wk_cost *c, const bool zero[WK_COST_TERMS],
                  double ret_weight[WK_COST_TERMS])
{
    double m[WK_COST_TERMS][WK_COST_TERMS], t[WK_COST_TERMS];
    for (int i = 0; i < WK_COST_TERMS; i++) {
        double pull = COST_PULL / (c->scale[i] * c->scale[i]);
        for (int j = 0; j < WK_COST_TERMS; j++)
            m[i][j] = zero[i] || zero[j] ? 0 : c->moments[i][j];
        m[i][i] = zero[i] ? 1 : c->moments[i][i] + pull;
        t[i] = zero[i] ? 0 : c->targets[i] + pull * c->prior[i];
    }
    for (int k = 0; k < WK_COST_TERMS; k++)
        for (int i = k + 1; i < WK_COST_TERMS; i++) {
            double factor = m[i][k] / m[k][k];
            for (int j = k; j < WK_COST_TERMS; j++)
                m[i][j] -= factor * m[k][j];
            t[i] -= factor * t[k];
        }
    for (int i = WK_COST_TERMS - 1; i >= 0; i--) {
        for (int j = i + 1; j < WK_COST_TERMS; j++)
            t[i] -= m[i][j] * ret_weight[j];
        ret_weight[i] = t[i] / m[i][i];
    }
}

void wk_cost_learn(struct wk_cost *c, double rows, double context, double share, double us)
{
    CHECK(c != NULL && share >= 0);
    double x[WK_COST_TERMS];
    double predicted = wk_cost_predict(c, rows, context, share);
    if (c->samples > 8 && us > predicted * COST_OUTLIER)
        us = predicted * COST_OUTLIER;
    double even = us > COST_US_EVEN ? us : COST_US_EVEN;
    terms(rows, context, share, x);
    for (int i = 0; i < WK_COST_TERMS; i++) {
        for (int j = 0; j < WK_COST_TERMS; j++)
            c->moments[i][j] = COST_FORGET * c->moments[i][j] + x[i] * x[j] / (even * even);
        c->targets[i] = COST_FORGET * c->targets[i] + x[i] * us / (even * even);
    }
    /* A negative cost is an artefact of few samples and would invite endless slices. */
    bool zero[WK_COST_TERMS] = {false};
    double weight[WK_COST_TERMS];
    for (int round = 0; round < WK_COST_TERMS; round++) {
        int least = 0;
        solve(c, zero, weight);
        for (int i = 1; i < WK_COST_TERMS; i++)
            if (weight[i] < weight[least])
                least = i;
        if (weight[least] >= 0)
            break;
        zero[least] = true;
    }
    for (int i = 0; i < WK_COST_TERMS; i++) {
        CHECK(isfinite(weight[i]));
        c->weight[i] = weight[i] > 0 ? weight[i] : 0;
    }
    c->samples++;
}
