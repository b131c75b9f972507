/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the fabric's local link between two processes, beside a plain copy of the same bytes.
 *
 *   bench_fabric [ROUNDS [MESSAGE_BYTES]]
 *
 * Prints per size the median and 95th percentile of an exchange and of an all_reduce, the median
 * of memcpy, and the ratio of exchange to memcpy. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "worker/wk_fabric.h"
#include "worker/wk_link_local.h"

#define ROUNDS_MAX 100000u
#define BYTES_MAX  (1u << 20)

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double *us;
static uint8_t *own, *theirs;

struct figure {
    double median, p95;
};

static struct figure figure_of(uint32_t rounds)
{
    qsort(us, rounds, sizeof *us, by_value);
    return (struct figure){us[rounds / 2], us[rounds - 1 - rounds / 20]};
}

static struct figure copies(size_t bytes, uint32_t rounds)
{
    for (uint32_t i = 0; i < rounds; i++) {
        double begun = now_us();
        memcpy(theirs, own, bytes);
        __asm__ volatile("" : : "r"(theirs) : "memory");
        us[i] = now_us() - begun;
    }
    return figure_of(rounds);
}

static struct figure exchanges(struct wk_fabric *f, size_t bytes, uint32_t rounds, bool reduce)
{
    for (uint32_t i = 0; i < rounds + 50; i++) {
        if (i % 16 == 0)
            CHECK(wk_barrier(f) == ERR_OK);
        double begun = now_us();
        enum err e = reduce ? wk_all_reduce(f, (float *)(void *)own, bytes / sizeof(float))
                            : wk_pair_exchange(f, 1 - wk_fabric_rank(f), own, bytes, theirs);
        CHECK(e == ERR_OK);
        if (i >= 50)
            us[i - 50] = now_us() - begun;
    }
    return figure_of(rounds);
}

static void run(const char *path, uint32_t rank, uint32_t rounds, uint32_t message_bytes)
{
    struct wk_local *local = NULL;
    struct wk_link link;
    struct err_detail detail;
    struct wk_local_options o = {path, 2, message_bytes, 50};
    if (wk_local_open(&o, &local, &detail) != ERR_OK ||
        wk_link_local(local, rank, &link, &detail) != ERR_OK)
        die("%s", detail.text);
    struct wk_fabric_options fabric = {.deadline_ms = 10000, .silence_ms = 5000, .link = link};
    struct wk_fabric *f = wk_fabric_create(&fabric);
    if (wk_fabric_join(f, 10000, &detail) != ERR_OK)
        die("%s", detail.text);
    if (rank == 0)
        printf("%8s %12s %12s %12s %12s %10s %8s\n", "bytes", "exchange us", "p95", "reduce us",
               "p95", "memcpy us", "ratio");
    for (size_t bytes = 64; bytes <= BYTES_MAX; bytes *= 4) {
        uint32_t count = bytes >= 262144 ? rounds / 10 + 1 : rounds;
        struct figure x = exchanges(f, bytes, count, false);
        struct figure r = exchanges(f, bytes, count, true);
        struct figure c = copies(bytes, count);
        CHECK(wk_barrier(f) == ERR_OK);
        if (rank == 0)
            printf("%8zu %12.1f %12.1f %12.1f %12.1f %10.2f %8.1f\n", bytes, x.median, x.p95,
                   r.median, r.p95, c.median, x.median / c.median);
    }
    CHECK(wk_barrier(f) == ERR_OK);
    wk_fabric_destroy(&f);
    wk_local_close(&local);
}

int main(int argc, char **argv)
{
    char dir[] = "/tmp/bench-fabric-XXXXXX", path[64];
    long rounds = argc > 1 ? atol(argv[1]) : 2000;
    if (rounds < 1 || rounds > (long)ROUNDS_MAX)
        die("rounds: 1 to %u", ROUNDS_MAX);
    long message_bytes = argc > 2 ? atol(argv[2]) : 16384;
    if (message_bytes < 64 || message_bytes > (long)BYTES_MAX)
        die("message bytes: 64 to %u", BYTES_MAX);
    if (mkdtemp(dir) == NULL)
        die("no directory for temporary files");
    snprintf(path, sizeof path, "%s/local", dir);
    us = mem_take_array((size_t)rounds, sizeof *us);
    own = mem_take(BYTES_MAX);
    theirs = mem_take(BYTES_MAX);
    pid_t pid = fork();
    if (pid < 0)
        die("fork failed");
    run(path, pid == 0 ? 1 : 0, (uint32_t)rounds, (uint32_t)message_bytes);
    if (pid == 0)
        _exit(0);
    int status = 0;
    waitpid(pid, &status, 0);
    unlink(path);
    rmdir(dir);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
