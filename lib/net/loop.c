/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/loop.h"

#include <event2/event.h>
#include <event2/event_struct.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/time.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"

#define LOOP_MAGIC       0x4c4f4f50u
#define LOOP_TIMER_MAGIC 0x4c54494du
#define LOOP_WATCH_MAGIC 0x4c574154u
#define LOOP_WAKER_MAGIC 0x4c57414bu

struct loop {
    uint32_t magic;
    bool stop;
    uint32_t user_count; /* timers, watches and wakers that still hold this loop */
    struct event_base *base;
    struct event sigint, sigterm;
    bool signals;
    loop_fn stop_fn;
    void *stop_arg;
};

struct loop_timer {
    uint32_t magic;
    struct loop *loop;
    struct event event;
    loop_fn fn;
    void *arg;
};

struct loop_watch {
    uint32_t magic;
    struct loop *loop;
    struct event event;
    loop_fn fn;
    void *arg;
};

struct loop_waker {
    uint32_t magic;
    int fd;
    atomic_bool pending;
    struct loop_watch *watch;
    loop_fn fn;
    void *arg;
};

struct loop *loop_create(void)
{
    /* A peer that goes away while we write is an error code, never the end of the process. */
    signal(SIGPIPE, SIG_IGN);
    struct loop *l = mem_take(sizeof(*l));
    l->magic = LOOP_MAGIC;
    struct event_config *config = event_config_new();
    CHECK(config != NULL);
    /* Without the cached time a timer that starts late in a long callback is not too short. */
    CHECK(event_config_set_flag(config, EVENT_BASE_FLAG_NO_CACHE_TIME) == 0);
    l->base = event_base_new_with_config(config);
    event_config_free(config);
    CHECK(l->base != NULL);
    return l;
}

void loop_destroy(struct loop **loop_p)
{
    struct loop *l = *loop_p;
    if (l == NULL)
        return;
    CHECK_OBJ(l, LOOP_MAGIC);
    CHECK(l->user_count == 0);
    if (l->signals) {
        event_del(&l->sigint);
        event_del(&l->sigterm);
    }
    event_base_free(l->base);
    l->magic = 0;
    mem_give(l);
    *loop_p = NULL;
}

struct event_base *loop_base(struct loop *l)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    return l->base;
}

void loop_run(struct loop *l)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    /* Our own flag remembers a stop from before the run, which libevent would forget. */
    while (!l->stop)
        CHECK(event_base_loop(l->base, EVLOOP_NO_EXIT_ON_EMPTY) >= 0);
    l->stop = false;
}

void loop_stop(struct loop *l)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    l->stop = true;
    event_base_loopbreak(l->base);
}

uint64_t loop_now_us(const struct loop *l)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    return clock_mono_us();
}

static void timer_fired(evutil_socket_t fd, short what, void *arg)
{
    struct loop_timer *t = arg;
    CHECK_OBJ(t, LOOP_TIMER_MAGIC);
    t->fn(t->arg);
}

struct loop_timer *loop_timer_create(struct loop *l, loop_fn fn, void *arg)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    CHECK(fn != NULL);
    struct loop_timer *t = mem_take(sizeof(*t));
    t->magic = LOOP_TIMER_MAGIC;
    t->loop = l;
    t->fn = fn;
    t->arg = arg;
    CHECK(event_assign(&t->event, l->base, -1, 0, timer_fired, t) == 0);
    l->user_count++;
    return t;
}

void loop_timer_start(struct loop_timer *t, uint64_t delay_us, bool repeat)
{
    CHECK_OBJ(t, LOOP_TIMER_MAGIC);
    CHECK(!repeat || delay_us > 0);
    event_del(&t->event);
    short flags = repeat ? EV_PERSIST : 0;
    CHECK(event_assign(&t->event, t->loop->base, -1, flags, timer_fired, t) == 0);
    struct timeval delay = {.tv_sec = (time_t)(delay_us / 1000000u),
                            .tv_usec = (suseconds_t)(delay_us % 1000000u)};
    CHECK(event_add(&t->event, &delay) == 0);
}

void loop_timer_stop(struct loop_timer *t)
{
    CHECK_OBJ(t, LOOP_TIMER_MAGIC);
    event_del(&t->event);
}

void loop_timer_destroy(struct loop_timer **timer_p)
{
    struct loop_timer *t = *timer_p;
    if (t == NULL)
        return;
    CHECK_OBJ(t, LOOP_TIMER_MAGIC);
    event_del(&t->event);
    t->loop->user_count--;
    t->magic = 0;
    mem_give(t);
    *timer_p = NULL;
}

static void watch_fired(evutil_socket_t fd, short what, void *arg)
{
    struct loop_watch *w = arg;
    CHECK_OBJ(w, LOOP_WATCH_MAGIC);
    w->fn(w->arg);
}

struct loop_watch *loop_watch_create(struct loop *l, int fd, loop_fn fn, void *arg)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    CHECK(fd >= 0 && fn != NULL);
    struct loop_watch *w = mem_take(sizeof(*w));
    w->magic = LOOP_WATCH_MAGIC;
    w->loop = l;
    w->fn = fn;
    w->arg = arg;
    CHECK(event_assign(&w->event, l->base, fd, EV_READ | EV_PERSIST, watch_fired, w) == 0);
    CHECK(event_add(&w->event, NULL) == 0);
    l->user_count++;
    return w;
}

void loop_watch_destroy(struct loop_watch **watch_p)
{
    struct loop_watch *w = *watch_p;
    if (w == NULL)
        return;
    CHECK_OBJ(w, LOOP_WATCH_MAGIC);
    event_del(&w->event);
    w->loop->user_count--;
    w->magic = 0;
    mem_give(w);
    *watch_p = NULL;
}

static void signal_fired(evutil_socket_t signo, short what, void *arg)
{
    struct loop *l = arg;
    CHECK_OBJ(l, LOOP_MAGIC);
    log_info(LOOP, "stop signal", "signal=%d", (int)signo);
    l->stop_fn(l->stop_arg);
}

void loop_on_stop_signal(struct loop *l, loop_fn fn, void *arg)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    CHECK(fn != NULL);
    l->stop_fn = fn;
    l->stop_arg = arg;
    if (l->signals)
        return;
    CHECK(evsignal_assign(&l->sigint, l->base, SIGINT, signal_fired, l) == 0);
    CHECK(evsignal_assign(&l->sigterm, l->base, SIGTERM, signal_fired, l) == 0);
    CHECK(event_add(&l->sigint, NULL) == 0);
    CHECK(event_add(&l->sigterm, NULL) == 0);
    l->signals = true;
}

static void waker_readable(void *arg)
{
    struct loop_waker *w = arg;
    CHECK_OBJ(w, LOOP_WAKER_MAGIC);
    uint64_t count;
    ssize_t got = read(w->fd, &count, sizeof(count));
    (void)got; /* non-blocking: nothing to read is as good as read */
    /* Cleared before fn: a wake-up during fn makes it run again. */
    atomic_store(&w->pending, false);
    w->fn(w->arg);
}

struct loop_waker *loop_waker_create(struct loop *l, loop_fn fn, void *arg)
{
    CHECK_OBJ(l, LOOP_MAGIC);
    CHECK(fn != NULL);
    struct loop_waker *w = mem_take(sizeof(*w));
    w->magic = LOOP_WAKER_MAGIC;
    w->fn = fn;
    w->arg = arg;
    w->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK(w->fd >= 0);
    w->watch = loop_watch_create(l, w->fd, waker_readable, w);
    return w;
}

void loop_wake(struct loop_waker *w)
{
    CHECK_OBJ(w, LOOP_WAKER_MAGIC);
    if (atomic_exchange(&w->pending, true))
        return;
    uint64_t one = 1;
    ssize_t put = write(w->fd, &one, sizeof(one));
    (void)put; /* a full counter is already readable */
}

void loop_waker_destroy(struct loop_waker **waker_p)
{
    struct loop_waker *w = *waker_p;
    if (w == NULL)
        return;
    CHECK_OBJ(w, LOOP_WAKER_MAGIC);
    loop_watch_destroy(&w->watch);
    close(w->fd);
    w->magic = 0;
    mem_give(w);
    *waker_p = NULL;
}
