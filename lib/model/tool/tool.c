/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/tool.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/clock.h"
#include "lib/model/cpu_pool.h"

int tool_fail(const struct err_detail *detail)
{
    fprintf(stderr, "tandem-model: %s\n", detail->text);
    return 2;
}

void tool_progress(const char *what, uint64_t done, uint64_t total)
{
    static uint64_t shown_us;
    if (!isatty(STDERR_FILENO) || total == 0)
        return;
    uint64_t now = clock_mono_us();
    if (done < total && now - shown_us < 100000)
        return;
    shown_us = now;
    fprintf(stderr, "\r%s %3d %%%s", what, (int)((double)done * 100 / (double)total),
            done >= total ? "\r\033[K" : "");
    fflush(stderr);
}

void tool_threads_start(struct tool_threads *t, uint32_t count)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (count == 0)
        count = cores > 0 ? (uint32_t)cores : 1;
    if (count > CPU_POOL_THREADS_MAX)
        count = CPU_POOL_THREADS_MAX;
    *t = (struct tool_threads){.pool = NULL};
    if (count < 2)
        return;
    t->pool = cpu_pool_create(count);
    t->ctx = (struct op_ctx){cpu_pool_run, t->pool};
}

void tool_threads_end(struct tool_threads *t)
{
    cpu_pool_destroy(&t->pool);
    t->ctx = (struct op_ctx){NULL, NULL};
}

#define TERMINAL_US 200000u
#define LINE_US     10000000u

void tool_eta_start(struct tool_eta *t, const char *what, uint64_t total, const char *unit)
{
    uint64_t now = clock_mono_us();
    bool terminal = isatty(STDERR_FILENO) != 0;
    *t = (struct tool_eta){what, unit, total, now, now, terminal, false};
}

static void eta_print(const struct tool_eta *t, uint64_t done, double seconds)
{
    double rate = seconds > 0 ? (double)done / seconds : 0;
    double left = rate > 0 ? (double)(t->total - done) / rate : 0;
    fprintf(stderr, "%s%s %3d %%, %.3g %s/s, %d:%02d:%02d left%s", t->terminal ? "\r" : "", t->what,
            (int)((double)done * 100 / (double)t->total), rate, t->unit, (int)(left / 3600),
            (int)(left / 60) % 60, (int)left % 60, t->terminal ? "\033[K" : "\n");
    fflush(stderr);
}

void tool_eta_show(struct tool_eta *t, uint64_t done)
{
    if (t->total == 0 || __atomic_test_and_set(&t->busy, __ATOMIC_ACQUIRE))
        return;
    uint64_t now = clock_mono_us();
    done = done < t->total ? done : t->total;
    if (done > 0 && now - t->shown_us >= (t->terminal ? TERMINAL_US : LINE_US)) {
        t->shown_us = now;
        eta_print(t, done, (double)(now - t->begin_us) / 1e6);
    }
    __atomic_clear(&t->busy, __ATOMIC_RELEASE);
}

void tool_eta_clear(struct tool_eta *t)
{
    if (t->terminal) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
}

static void show_load(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    tool_progress("loading", done, total);
}

enum err tool_load(const char *directory, const char *numerics, uint32_t threads,
                   struct model **ret_model, struct err_detail *detail)
{
    struct model_options options = {
        .directory = directory, .numerics = MODEL_EXACT, .threads = threads, .progress = show_load};
    if (numerics != NULL && strcmp(numerics, "fast") == 0)
        options.numerics = MODEL_FAST;
    else if (numerics != NULL && strcmp(numerics, "exact") != 0)
        return err_set(detail, ERR_INVALID, "--numerics: exact or fast, not \"%s\"", numerics);
    return model_load(&options, ret_model, detail);
}
