/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/rt_story.h - one world of rt_world.h for the stories of the router's core. */
#ifndef TESTS_UNIT_RT_STORY_H
#define TESTS_UNIT_RT_STORY_H

#include "tests/unit/rt_world.h"

static struct world w;

static inline void begin(uint32_t workers, uint32_t gateways)
{
    world_init(&w, 42, workers, gateways);
    world_run_ms(&w, 300);
}

static inline void end(void)
{
    world_run_ms(&w, 4000);
    world_idle_check(&w);
    world_fini(&w);
}

static inline struct rt_stats stats(void)
{
    return world_info(&w).stats;
}

/* A prompt length whose answer does not stop by itself before max. */
static inline struct stream *open_long(uint32_t gateway, uint32_t max)
{
    for (;;) {
        struct stream *s = stream_new(&w, gateway, 5 + rng_below(&w.rng, 200), max);
        if (stop_of(s->prompt) != UINT32_MAX)
            continue;
        stream_submit(&w, gateway, s);
        return s;
    }
}

#endif
