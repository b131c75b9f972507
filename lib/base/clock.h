/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/clock.h - time; shells only, cores get now_us in events. */
#ifndef LIB_BASE_CLOCK_H
#define LIB_BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_mono_us(void); /* CLOCK_MONOTONIC */
uint64_t clock_unix_us(void); /* CLOCK_REALTIME */

#endif
