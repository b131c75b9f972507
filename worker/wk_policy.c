/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_policy.h"

#include <math.h>

#include "lib/base/check.h"

#define CHANCE_PRIOR    0.7
#define CHANCE_RATE_MIN 0.2  /* weight of a new observation, at least */
#define CHANCE_RELAX    0.02 /* towards the position before, where nothing was ever seen */
#define PROBE_FIRST     8u   /* steps without drafts before the first probe */
#define PROBE_MAX       512u
#define PROBE_NEWS      0.1 /* a probe that raises the first chance by less has told nothing new */

enum err wk_ema_set_parse(const char *text, struct wk_ema_knobs *knobs, struct err_detail *detail)
{
    uint32_t count = 0, set[WK_EMA_SET_MAX];
    for (const char *at = text;; at++) {
        uint32_t k = (uint32_t)(at[0] - '0');
        if (at[0] < '1' || at[0] > '7' || (at[1] != ',' && at[1] != '\0'))
            return err_set(detail, ERR_INVALID,
                           "ema_set: %.32s: numbers of 1 to 7 with commas are expected", text);
        if (count > 0 && k <= set[count - 1])
            return err_set(detail, ERR_INVALID, "ema_set: %.32s: %u does not rise", text, k);
        set[count++] = k; /* rising, so at most 7 */
        at++;
        if (at[0] == '\0')
            break;
    }
    knobs->set_count = count;
    for (uint32_t i = 0; i < count; i++)
        knobs->set[i] = set[i];
    return ERR_OK;
}

void wk_history_begin(struct wk_history *h)
{
    *h = (struct wk_history){.mean = WK_SPEC_DRAFTS_MAX, .probe_every = PROBE_FIRST};
    for (uint32_t j = 0; j < WK_SPEC_DRAFTS_MAX; j++)
        h->chance[j] = CHANCE_PRIOR;
}

static void chances_add(struct wk_history *h, uint32_t drafted, uint32_t accepted)
{
    for (uint32_t j = 0; j < drafted && j <= accepted; j++) {
        h->seen[j]++;
        double rate = fmax(CHANCE_RATE_MIN, 1.0 / h->seen[j]);
        h->chance[j] += rate * ((j < accepted) - h->chance[j]);
    }
    for (uint32_t j = 1; j < WK_SPEC_DRAFTS_MAX; j++)
        if (h->seen[j] == 0)
            h->chance[j] += CHANCE_RELAX * (h->chance[j - 1] - h->chance[j]);
}

void wk_history_add(struct wk_history *h, const struct wk_ema_knobs *knobs, uint32_t drafted,
                    uint32_t accepted)
{
    CHECK(drafted >= 1 && drafted <= WK_SPEC_DRAFTS_MAX && accepted <= drafted);
    bool full = knobs->saturate && accepted == drafted;
    double observation = full ? WK_SPEC_DRAFTS_MAX : accepted;
    h->mean = knobs->alpha * observation + (1 - knobs->alpha) * h->mean;
    h->observed++;
    double chance = h->chance[0];
    chances_add(h, drafted, accepted);
    bool news = accepted > 0 && (h->idle_steps == 0 || h->chance[0] - chance > PROBE_NEWS);
    h->idle_steps = 0;
    h->probe_every = news                         ? PROBE_FIRST
                     : h->probe_every < PROBE_MAX ? 2 * h->probe_every
                                                  : PROBE_MAX;
}

void wk_history_idle(struct wk_history *h)
{
    h->idle_steps++;
}

uint32_t wk_policy_ema(const struct wk_history *h, const struct wk_ema_knobs *knobs)
{
    CHECK(knobs->set_count >= 1 && knobs->set_count <= WK_EMA_SET_MAX);
    uint32_t k = knobs->set[0];
    if (h->observed < knobs->steps_min)
        return WK_SPEC_DRAFTS_MAX;
    double most = fmin(ceil(h->mean + knobs->margin), WK_SPEC_DRAFTS_MAX);
    for (uint32_t i = 1; i < knobs->set_count && knobs->set[i] <= most; i++)
        k = knobs->set[i];
    return k;
}

uint32_t wk_policy_ema_batch(const uint32_t *wanted, uint32_t count)
{
    uint32_t least = WK_SPEC_DRAFTS_MAX;
    for (uint32_t i = 0; i < count; i++)
        least = wanted[i] < least ? wanted[i] : least;
    return least;
}

uint32_t wk_policy_goodput(const struct wk_history *h, const double cost_us[WK_SPEC_DRAFTS_MAX + 1])
{
    uint32_t best = 0;
    double survival = 1, tokens = 1, most = 0;
    CHECK(cost_us[0] > 0);
    for (uint32_t k = 0; k <= WK_SPEC_DRAFTS_MAX; k++) {
        if (k > 0) {
            survival *= h->chance[k - 1];
            tokens += survival;
        }
        if (tokens / cost_us[k] > most) {
            most = tokens / cost_us[k];
            best = k;
        }
    }
    if (best == 0 && h->idle_steps + 1 >= h->probe_every)
        best = 1; /* whether it would be worth it again is only seen by trying */
    return best;
}
