/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_rate.h - how fast the cluster works off tokens, and when a refused client may return.
 *
 * Owned by the router's loop thread.  Pure: time comes in as now_us, jitter from the caller's
 * rng. */
#ifndef ROUTER_RT_RATE_H
#define ROUTER_RT_RATE_H

#include <stdbool.h>
#include <stdint.h>

struct rng;

struct rt_rate {
    double tokens_per_s; /* smoothed over windows in which something waited or ran; 0 = unknown */
    double output_mean;  /* output tokens of a finished request, smoothed */
    uint64_t window_us;  /* begin of the current window */
    uint64_t window_tokens; /* prompt and output tokens done in it */
    bool window_busy;       /* something ran during all of it */
};

void rt_rate_init(struct rt_rate *r, uint64_t now_us);
void rt_rate_done(struct rt_rate *r, uint64_t tokens);
void rt_rate_finished(struct rt_rate *r, uint32_t output_tokens);
void rt_rate_tick(struct rt_rate *r, uint64_t now_us, bool busy);
/* Time to work off the backlog, rounded up to a second, 1 s to 5 min, plus up to 25 % jitter (at
 * least 1 s wide) so that the refused do not return together. */
uint32_t rt_rate_retry_ms(const struct rt_rate *r, uint64_t waiting_tokens, uint32_t waiting,
                          struct rng *rng);

#endif
