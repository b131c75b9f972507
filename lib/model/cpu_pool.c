/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/cpu_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define POOL_MAGIC 0x63707570u
/* About 20 us: longer than the gap between two ops of a step, shorter than anyone notices. */
#define SPIN_ROUNDS 400

/* `door` is OPEN while a launch takes workers, plus the number of workers inside.  A worker enters
 * by raising it only while it is open, so a late one can never see the next launch's fields half
 * written: the caller rewrites them only when the door is closed and nobody is inside. */
#define DOOR_OPEN 0x80000000u

struct cpu_pool {
    uint32_t magic;
    uint32_t worker_count;
    pthread_t workers[CPU_POOL_THREADS_MAX];
    op_range_fn fn;
    const void *arg;
    uint32_t items, chunk;
    _Alignas(64) atomic_uint next;
    _Alignas(64) atomic_uint door;
    _Alignas(64) atomic_uint generation; /* futex word: one more at every launch and at stop */
    atomic_uint sleepers;
    atomic_bool stop;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static void futex_wait(atomic_uint *word, unsigned seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void take_chunks(struct cpu_pool *p)
{
    for (;;) {
        uint32_t begin = atomic_fetch_add(&p->next, p->chunk);
        if (begin >= p->items)
            return;
        uint32_t left = p->items - begin;
        p->fn(p->arg, begin, begin + (left < p->chunk ? left : p->chunk));
    }
}

static bool enter(struct cpu_pool *p)
{
    unsigned door = atomic_load(&p->door);
    while ((door & DOOR_OPEN) != 0)
        if (atomic_compare_exchange_weak(&p->door, &door, door + 1))
            return true;
    return false;
}

static void *worker_main(void *arg)
{
    struct cpu_pool *p = arg;
    unsigned seen = 0; /* the last launch this worker has dealt with */
    for (;;) {
        unsigned now = atomic_load(&p->generation);
        for (int i = 0; i < SPIN_ROUNDS && now == seen; i++) {
            relax();
            now = atomic_load(&p->generation);
        }
        if (now == seen) {
            atomic_fetch_add(&p->sleepers, 1);
            futex_wait(&p->generation, seen);
            atomic_fetch_sub(&p->sleepers, 1);
            continue;
        }
        seen = now;
        if (atomic_load(&p->stop))
            return NULL;
        if (enter(p)) {
            take_chunks(p);
            atomic_fetch_sub(&p->door, 1);
        }
    }
}

static void launch(struct cpu_pool *p)
{
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers) > 0)
        futex_wake(&p->generation, (int)p->worker_count);
}

void cpu_pool_run(void *pool, uint32_t items, op_range_fn fn, const void *arg)
{
    struct cpu_pool *p = pool;
    CHECK_OBJ(p, POOL_MAGIC);
    CHECK(atomic_load(&p->door) == 0);
    p->fn = fn;
    p->arg = arg;
    p->items = items;
    p->chunk = items / ((p->worker_count + 1) * 4);
    if (p->chunk == 0)
        p->chunk = 1;
    CHECK(items <= UINT32_MAX - p->chunk * (p->worker_count + 2)); /* next must not wrap */
    atomic_store(&p->next, 0);
    atomic_store(&p->door, DOOR_OPEN);
    launch(p);
    take_chunks(p);
    atomic_fetch_and(&p->door, ~DOOR_OPEN);
    for (uint32_t round = 0; atomic_load(&p->door) != 0; round++) {
        relax();
        if (round > 10000) /* a worker lost its core in the middle of a chunk */
            usleep(20);
    }
}

struct cpu_pool *cpu_pool_create(uint32_t threads)
{
    CHECK(threads > 1 && threads <= CPU_POOL_THREADS_MAX);
    struct cpu_pool *p = mem_take(sizeof(*p));
    p->magic = POOL_MAGIC;
    for (uint32_t i = 0; i + 1 < threads; i++) {
        if (pthread_create(&p->workers[i], NULL, worker_main, p) != 0)
            break; /* fewer threads change the speed only */
        p->worker_count++;
    }
    return p;
}

void cpu_pool_destroy(struct cpu_pool **pool_p)
{
    struct cpu_pool *p = *pool_p;
    if (p == NULL)
        return;
    CHECK_OBJ(p, POOL_MAGIC);
    atomic_store(&p->stop, true);
    launch(p);
    for (uint32_t i = 0; i < p->worker_count; i++)
        CHECK(pthread_join(p->workers[i], NULL) == 0);
    p->magic = 0;
    mem_give(p);
    *pool_p = NULL;
}
