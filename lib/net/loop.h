/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/loop.h - one event loop per process (libevent): timers, descriptors, signals, wake-ups.
 *
 * Owned by the loop thread; only loop_wake may be called from elsewhere.  Timers, watches and
 * signals are bounded by memory taken at their creation; none is created in steady state. */
#ifndef LIB_NET_LOOP_H
#define LIB_NET_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct event_base;
struct loop;
struct loop_timer;
struct loop_watch;
struct loop_waker;

typedef void (*loop_fn)(void *arg);

struct loop *loop_create(void);
void loop_destroy(struct loop **loop_p);
struct event_base *loop_base(struct loop *l); /* for bufferevents and hiredis */
void loop_run(struct loop *l);                /* until loop_stop */
void loop_stop(struct loop *l);               /* after the current callback */
uint64_t loop_now_us(const struct loop *l);   /* monotonic, fresh */

/* A timer is created idle.  start: fires once after delay_us, or every delay_us if repeat. */
struct loop_timer *loop_timer_create(struct loop *l, loop_fn fn, void *arg);
void loop_timer_start(struct loop_timer *t, uint64_t delay_us, bool repeat);
void loop_timer_stop(struct loop_timer *t);
void loop_timer_destroy(struct loop_timer **timer_p);

/* Calls fn when fd is readable (level-triggered). */
struct loop_watch *loop_watch_create(struct loop *l, int fd, loop_fn fn, void *arg);
void loop_watch_destroy(struct loop_watch **watch_p);

/* fn runs on the loop after SIGINT or SIGTERM (signo in the process's first signal). */
void loop_on_stop_signal(struct loop *l, loop_fn fn, void *arg);

/* Wakes the loop from any thread; fn runs there once per burst of wake-ups. */
struct loop_waker *loop_waker_create(struct loop *l, loop_fn fn, void *arg);
void loop_wake(struct loop_waker *w); /* any thread, never blocks */
void loop_waker_destroy(struct loop_waker **waker_p);

#endif
