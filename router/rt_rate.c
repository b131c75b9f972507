/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_rate.h"

#include "lib/base/check.h"
#include "lib/base/rng.h"

#define WINDOW_US     1000000u
#define RATE_WEIGHT   0.3 /* of the newest window: half of the past is gone after two seconds */
#define OUTPUT_WEIGHT 0.1
#define RETRY_S_MAX   300u

void rt_rate_init(struct rt_rate *r, uint64_t now_us)
{
    CHECK(r != NULL);
    *r = (struct rt_rate){.window_us = now_us, .window_busy = true};
}

void rt_rate_done(struct rt_rate *r, uint64_t tokens)
{
    r->window_tokens += tokens;
}

void rt_rate_finished(struct rt_rate *r, uint32_t output_tokens)
{
    if (r->output_mean == 0)
        r->output_mean = output_tokens;
    else
        r->output_mean += OUTPUT_WEIGHT * (output_tokens - r->output_mean);
    CHECK(r->output_mean >= 0);
}

void rt_rate_tick(struct rt_rate *r, uint64_t now_us, bool busy)
{
    CHECK(now_us >= r->window_us);
    r->window_busy = r->window_busy && busy;
    uint64_t width_us = now_us - r->window_us;
    if (width_us < WINDOW_US)
        return;
    /* An idle second says nothing about how fast a busy one would be; one in which nothing came of
     * waiting work says a lot. */
    if (r->window_busy) {
        double rate = (double)r->window_tokens * 1e6 / (double)width_us;
        if (r->tokens_per_s == 0)
            r->tokens_per_s = rate;
        else
            r->tokens_per_s += RATE_WEIGHT * (rate - r->tokens_per_s);
    }
    r->window_us = now_us;
    r->window_tokens = 0;
    r->window_busy = busy;
}

uint32_t rt_rate_retry_ms(const struct rt_rate *r, uint64_t waiting_tokens, uint32_t waiting,
                          struct rng *rng)
{
    CHECK(r != NULL && rng != NULL);
    double backlog = (double)waiting_tokens + waiting * r->output_mean;
    double seconds = r->tokens_per_s > 0 ? backlog / r->tokens_per_s : 1;
    uint32_t whole = seconds >= RETRY_S_MAX ? RETRY_S_MAX : (uint32_t)seconds;
    if (whole < seconds && whole < RETRY_S_MAX)
        whole++;
    if (whole == 0)
        whole = 1;
    uint32_t jitter_ms = whole * 250u < 1000u ? 1000u : whole * 250u;
    return whole * 1000u + rng_below(rng, jitter_ms + 1);
}
