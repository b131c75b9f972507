/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "lib/net/loop.h"

struct seen {
    struct loop *loop;
    struct loop_timer *timer;
    struct loop_waker *waker;
    int fired, stop_at;
};

static void count_and_stop(void *arg)
{
    struct seen *s = arg;
    if (++s->fired >= s->stop_at)
        loop_stop(s->loop);
}

static void give_up(void *arg)
{
    struct loop *l = arg;
    loop_stop(l);
}

static void timer_once_and_repeat(void **state)
{
    struct seen s = {.loop = loop_create(), .stop_at = 1};
    s.timer = loop_timer_create(s.loop, count_and_stop, &s);
    uint64_t start_us = loop_now_us(s.loop);
    loop_timer_start(s.timer, 20000, false);
    loop_run(s.loop);
    assert_int_equal(s.fired, 1);
    assert_true(loop_now_us(s.loop) - start_us >= 19000);

    s.fired = 0;
    s.stop_at = 5;
    loop_timer_start(s.timer, 2000, true);
    loop_run(s.loop);
    assert_int_equal(s.fired, 5);

    /* Stopped and restarted: only the last start counts. */
    s.fired = 0;
    s.stop_at = 1;
    loop_timer_start(s.timer, 10000000, false);
    loop_timer_stop(s.timer);
    loop_timer_start(s.timer, 1000, false);
    loop_run(s.loop);
    assert_int_equal(s.fired, 1);
    loop_timer_destroy(&s.timer);
    loop_timer_destroy(&s.timer);
    loop_destroy(&s.loop);
    assert_null(s.loop);
}

static void stop_before_run_is_kept(void **state)
{
    struct loop *l = loop_create();
    loop_stop(l);
    loop_run(l); /* returns at once */
    struct loop_timer *t = loop_timer_create(l, give_up, l);
    loop_timer_start(t, 1000, false);
    loop_run(l); /* and the stop is used up: this one waits for the timer */
    loop_timer_destroy(&t);
    loop_destroy(&l);
}

static void read_byte(void *arg)
{
    struct seen *s = arg;
    char byte;
    assert_int_equal(read(s->stop_at, &byte, 1), 1);
    if (++s->fired == 3)
        loop_stop(s->loop);
}

static void watch_is_level_triggered(void **state)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    struct seen s = {.loop = loop_create(), .stop_at = fds[0]};
    struct loop_watch *w = loop_watch_create(s.loop, fds[0], read_byte, &s);
    assert_int_equal(write(fds[1], "abc", 3), 3); /* one write, read a byte at a time */
    loop_run(s.loop);
    assert_int_equal(s.fired, 3);
    loop_watch_destroy(&w);
    loop_destroy(&s.loop);
    close(fds[0]);
    close(fds[1]);
}

static void stop_signal(void **state)
{
    struct seen s = {.loop = loop_create(), .stop_at = 2};
    loop_on_stop_signal(s.loop, count_and_stop, &s);
    kill(getpid(), SIGTERM);
    kill(getpid(), SIGINT);
    loop_run(s.loop);
    assert_int_equal(s.fired, 2);
    loop_destroy(&s.loop);
}

#define WAKES 20000

struct wake_test {
    struct seen seen;
    uint32_t posted; /* atomic by the __atomic builtins */
};

static void woken(void *arg)
{
    struct wake_test *w = arg;
    w->seen.fired++;
    if (__atomic_load_n(&w->posted, __ATOMIC_SEQ_CST) == 2 * WAKES)
        loop_stop(w->seen.loop);
}

static void *waker_thread(void *arg)
{
    struct wake_test *w = arg;
    for (uint32_t i = 0; i < WAKES; i++) {
        __atomic_add_fetch(&w->posted, 1, __ATOMIC_SEQ_CST);
        loop_wake(w->seen.waker);
    }
    return NULL;
}

static void wake_from_threads_loses_nothing(void **state)
{
    struct wake_test w = {.seen = {.loop = loop_create()}};
    w.seen.waker = loop_waker_create(w.seen.loop, woken, &w);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, waker_thread, &w), 0);
    loop_run(w.seen.loop); /* ends only if the last wake-up came through */
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_true(w.seen.fired >= 1 && w.seen.fired <= 2 * WAKES);
    loop_waker_destroy(&w.seen.waker);
    loop_destroy(&w.seen.loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(timer_once_and_repeat),
        cmocka_unit_test(stop_before_run_is_kept),
        cmocka_unit_test(watch_is_level_triggered),
        cmocka_unit_test(stop_signal),
        cmocka_unit_test(wake_from_threads_loses_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
