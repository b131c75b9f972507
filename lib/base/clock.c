/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/clock.h"

#include <time.h>

#include "lib/base/check.h"

static uint64_t clock_read_us(clockid_t id)
{
    struct timespec now;
    CHECK(clock_gettime(id, &now) == 0);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

uint64_t clock_mono_us(void)
{
    return clock_read_us(CLOCK_MONOTONIC);
}

uint64_t clock_unix_us(void)
{
    return clock_read_us(CLOCK_REALTIME);
}
