/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes: killed, stopped, restarted; and the self-test of the fabric. */
#include "tests/unit/fabric_world.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "lib/base/clock.h"
#include "worker/wk_group.h"
#include "worker/wk_probe.h"

#define COUNT 4096u

/* The other rank: takes part in collectives for ever, forming the group anew when it must. */
static void other_main(const struct world *w, int go_fd)
{
    char byte;
    if (read(go_fd, &byte, 1) != 1)
        _exit(0);
    struct wk_local *local = world_open(w);
    struct wk_fabric *f = world_fabric(w, local, 1);
    static float values[COUNT];
    for (;;) {
        must_join(f, 20000);
        enum err e = ERR_OK;
        while (e == ERR_OK) {
            for (uint32_t i = 0; i < COUNT; i++)
                values[i] = (float)i;
            e = wk_all_reduce(f, values, COUNT);
        }
    }
}

struct other {
    pid_t pid;
    int go_fd;
};

static struct other other_fork(const struct world *w)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(fds[1]);
        other_main(w, fds[0]);
    }
    close(fds[0]);
    return (struct other){pid, fds[1]};
}

static void other_start(const struct other *o)
{
    assert_int_equal(write(o->go_fd, "g", 1), 1);
}

static void other_end(struct other *o)
{
    close(o->go_fd);
    kill(o->pid, SIGCONT);
    kill(o->pid, SIGKILL);
    assert_int_equal(waitpid(o->pid, NULL, 0), o->pid);
}

static enum err rounds(struct wk_fabric *f, uint32_t count)
{
    static float values[COUNT];
    for (uint32_t round = 0; round < count; round++) {
        for (uint32_t i = 0; i < COUNT; i++)
            values[i] = (float)(2 * i);
        TRY(wk_all_reduce(f, values, COUNT));
        for (uint32_t i = 0; i < COUNT; i++)
            assert_true(values[i] == (float)(3 * i));
    }
    return ERR_OK;
}

/* Runs until the group fails; returns the microseconds that it took to see it. */
static uint64_t until_fault(struct wk_fabric *f)
{
    uint64_t begun = clock_mono_us();
    while (rounds(f, 1) == ERR_OK)
        assert_true(clock_mono_us() - begun < 10000000);
    return clock_mono_us() - begun;
}

static struct world process_world(void)
{
    struct world w;
    world_init(&w, 2, 8192);
    w.deadline_ms = 10000;
    w.silence_ms = 1000;
    return w;
}

static void test_kill(void **state)
{
    (void)state;
    struct world w = process_world();
    struct other first = other_fork(&w), second = other_fork(&w);
    other_start(&first);
    struct wk_local *local = world_open(&w);
    struct wk_fabric *f = world_fabric(&w, local, 0);
    struct err_detail detail;
    must_join(f, 20000);
    uint32_t epoch = wk_fabric_epoch(f);
    assert_int_equal(rounds(f, 50), ERR_OK);
    kill(first.pid, SIGKILL); /* not reaped: a dead process that still has its pid */
    uint64_t us = until_fault(f);
    assert_true(us < 1000000);
    assert_int_equal(wk_fabric_fault(f, &detail), ERR_CLOSED);
    assert_non_null(strstr(detail.text, "rank 1 is gone"));
    /* Nobody else: joining ends at its bound and says who is missing. */
    assert_int_equal(wk_fabric_join(f, 100, &detail), ERR_TIMEOUT);
    assert_non_null(strstr(detail.text, "for: 1"));
    other_start(&second);
    must_join(f, 20000);
    assert_true(wk_fabric_epoch(f) > epoch);
    assert_int_equal(rounds(f, 50), ERR_OK);
    wk_fabric_destroy(&f);
    wk_local_close(&local);
    other_end(&first);
    other_end(&second);
    world_fini(&w);
}

static void test_stop(void **state)
{
    (void)state;
    struct world w = process_world();
    struct other other = other_fork(&w);
    other_start(&other);
    struct wk_local *local = world_open(&w);
    struct wk_fabric *f = world_fabric(&w, local, 0);
    struct err_detail detail;
    must_join(f, 20000);
    for (int turn = 0; turn < 2; turn++) {
        assert_int_equal(rounds(f, 20), ERR_OK);
        kill(other.pid, SIGSTOP);
        uint64_t us = until_fault(f);
        assert_true(us >= 500000 && us < 3000000);
        assert_int_equal(wk_fabric_fault(f, &detail), ERR_CLOSED);
        assert_non_null(strstr(detail.text, "silent"));
        kill(other.pid, SIGCONT);
        must_join(f, 20000);
    }
    assert_int_equal(rounds(f, 20), ERR_OK);
    wk_fabric_destroy(&f);
    wk_local_close(&local);
    other_end(&other);
    world_fini(&w);
}

/* A process that left memory in any state, or a file that is none, harms nobody. */
static void test_files(void **state)
{
    (void)state;
    struct world w = process_world();
    struct err_detail detail;
    struct wk_local *local = NULL, *good = world_open(&w);
    struct wk_link link, again;
    assert_int_equal(wk_link_local(good, 1, &link, &detail), ERR_OK);
    assert_int_equal(wk_link_local(good, 1, &again, &detail), ERR_BUSY);
    assert_non_null(strstr(detail.text, "rank 1 is taken"));
    struct wk_local_options other = {w.path, 3, w.message_bytes_max, 20};
    assert_int_equal(wk_local_open(&other, &local, &detail), ERR_INVALID);
    other = (struct wk_local_options){w.path, 2, 2 * w.message_bytes_max, 20};
    assert_int_equal(wk_local_open(&other, &local, &detail), ERR_INVALID);
    other = (struct wk_local_options){w.dir, 2, w.message_bytes_max, 20};
    assert_int_equal(wk_local_open(&other, &local, &detail), ERR_IO);
    wk_link_destroy(&link);
    wk_local_close(&good);

    /* All counters and statuses set to nonsense, as after a wild write. */
    FILE *file = fopen(w.path, "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, 64, SEEK_SET), 0);
    for (int i = 0; i < 2048; i++)
        fputc(0xff, file);
    fclose(file);
    local = world_open(&w);
    w.deadline_ms = 200;
    struct wk_fabric *f = world_fabric(&w, local, 0);
    assert_int_not_equal(wk_fabric_join(f, 300, &detail), ERR_OK);
    wk_fabric_destroy(&f);
    wk_local_close(&local);
    world_fini(&w);
}

static void body_probe(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct wk_probe_report *reports = w->arg;
    struct err_detail detail = {{0}};
    struct wk_probe_floors none = {0, 0}, high = {0, 1u << 30};
    struct wk_paths paths = {.fabric = f};
    struct model_group group = wk_group(&paths, rank, w->ranks, SHARD_MOE_AUTO, 0);
    must_join(f, 10000);
    MUST(wk_probe_run(f, &group, &none, "local", &reports[rank], &detail) == ERR_OK);
    MUST(wk_probe_run(f, &group, &high, "local", &reports[rank], &detail) == ERR_UNSUPPORTED);
    MUST(strstr(detail.text, "the floor is 1073741824 MB/s") != NULL);
    MUST(wk_barrier(f) == ERR_OK);
}

static void test_probe(void **state)
{
    (void)state;
    struct world w;
    struct wk_probe_report reports[2] = {0};
    world_init(&w, 2, 65536);
    world_run(&w, body_probe, reports);
    world_fini(&w);
    assert_memory_equal(&reports[0], &reports[1], sizeof reports[0]);
    for (uint32_t i = 0; i < WK_PROBE_SIZES; i++) {
        assert_true(reports[0].rows[i].rounds >= 5);
        assert_true(reports[0].rows[i].median_us <= reports[0].rows[i].p95_us);
    }
}

static void test_judge(void **state)
{
    (void)state;
    struct err_detail detail;
    struct wk_probe_report r = {{{8, 9, 20, 30, 0},
                                 {4096, 9, 90, 442, 45},
                                 {65536, 9, 120, 200, 546},
                                 {1u << 20, 9, 9000, 9500, 116}}};
    struct wk_probe_floors floors = {90, 116};
    assert_int_equal(wk_probe_judge(&r, &floors, "tcp", &detail), ERR_OK);
    floors.bandwidth_mb_min = 1000;
    assert_int_equal(wk_probe_judge(&r, &floors, "tcp 10.0.0.1", &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "fabric tcp 10.0.0.1 is too slow: 116 MB/s"));
    assert_non_null(strstr(detail.text, "wrong interface"));
    floors = (struct wk_probe_floors){50, 0};
    assert_int_equal(wk_probe_judge(&r, &floors, "tcp", &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "4 KiB takes 90 us (p95 442 us), the floor is 50 us"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill),  cmocka_unit_test(test_stop),  cmocka_unit_test(test_files),
        cmocka_unit_test(test_probe), cmocka_unit_test(test_judge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
