/* SPDX-License-Identifier: Apache-2.0 */
/* Random runs of the router's core with everything breaking: each accepted request ends once, the
 * ledger balances, tokens are dense and right, nothing is left behind.
 *
 *     test_rt_sim [SEED [RUNS]]      one seed prints what went wrong in it again */
#include "tests/unit/rt_world.h"

#ifdef __SANITIZE_ADDRESS__
#define RUNS 150u /* a sanitizer makes each run three times as long */
#else
#define RUNS 1000u
#endif

static uint64_t seed_first = 1;
static uint32_t run_count = RUNS;

struct totals {
    uint64_t streams, finished, failed, cancelled, refused, resumed, gaps, lost, resubmits;
    uint64_t affinity[RT_AFFINITY_COUNT], maps_asked, maps_used, maps_stale, maps_late;
    uint64_t codes[ERR_COUNT];
};
static struct totals totals;

static void streams_begin(struct world *w, uint32_t i)
{
    uint32_t count = rng_below(&w->rng, 4);
    for (uint32_t n = 0; n < count; n++) {
        struct stream *s =
            stream_new(w, i, 1 + rng_below(&w->rng, 400), 1 + rng_below(&w->rng, 200));
        if (s == NULL)
            return;
        s->client = rng_below(&w->rng, 4);
        s->session = rng_below(&w->rng, 2) ? 1 + rng_below(&w->rng, 40) : 0;
        s->priority = (int32_t)rng_below(&w->rng, 3) - 1;
        if (rng_below(&w->rng, 20) == 0)
            s->deadline_unix_us = UNIX_BASE + w->now_us + rng_below(&w->rng, 3000000);
        stream_submit(w, i, s);
    }
}

static void streams_touch(struct world *w, uint32_t i)
{
    struct fake_gateway *g = &w->gateways[i];
    uint32_t n = rng_below(&w->rng, STREAMS);
    if (g->streams[n].state != S_LIVE)
        return;
    if (rng_below(&w->rng, 3) == 0)
        stream_cancel(w, i, &g->streams[n]);
    else if (rng_below(&w->rng, 3) == 0)
        stream_submit(w, i, &g->streams[n]); /* again, for no reason */
}

/* Counts what is over and makes its place free. */
static void streams_reap(struct world *w, uint32_t i)
{
    for (uint32_t n = 0; n < STREAMS; n++) {
        struct stream *s = &w->gateways[i].streams[n];
        if (s->state != S_OVER)
            continue;
        totals.streams++;
        totals.refused += s->reply != ERR_OK;
        totals.finished += s->finish == MSG_FINISH_STOP || s->finish == MSG_FINISH_LENGTH;
        totals.cancelled += s->finish == MSG_FINISH_CANCELLED;
        totals.failed += s->finish == MSG_FINISH_FAILED;
        totals.resumed += s->r.resumed;
        if (s->finish == MSG_FINISH_FAILED)
            totals.codes[s->code]++;
        if (s->finish == MSG_FINISH_FAILED)
            assert_true(s->code == ERR_TIMEOUT || w->faults);
        s->state = S_FREE;
    }
}

static void gateway_freeze(struct world *w, uint32_t i)
{
    struct fake_gateway *g = &w->gateways[i];
    g->frozen = true;
    w->faults = true;
    for (uint32_t n = 0; n < STREAMS; n++)
        g->streams[n].frozen_over = true;
}

static void worker_fault(struct world *w, uint32_t i)
{
    struct fake_worker *f = &w->workers[i];
    w->faults = true;
    if (!f->up) {
        worker_up(w, i, 1 + rng_below(&w->rng, 12));
        return;
    }
    switch (rng_below(&w->rng, 6)) {
    case 0:
        worker_kill(w, i);
        break;
    case 1:
        worker_kill(w, i);
        worker_up(w, i, 1 + rng_below(&w->rng, 12));
        break;
    case 2:
    case 3:
        f->frozen = !f->frozen;
        break;
    case 4:
        f->drain = !f->drain;
        break;
    default:
        f->wrong_canary = !f->wrong_canary;
        break;
    }
}

static void gateway_fault(struct world *w, uint32_t i)
{
    struct fake_gateway *g = &w->gateways[i];
    w->faults = true;
    if (g->up && rng_below(&w->rng, 3) == 0) {
        gateway_kill(w, i);
        gateway_up(w, i);
    } else if (g->frozen) {
        g->frozen = false;
    } else {
        gateway_freeze(w, i);
    }
}

static void redis_settings(struct world *w)
{
    w->look_answer = (enum look_answer)rng_below(&w->rng, 4);
    w->look_worker = rng_below(&w->rng, w->worker_count);
    w->look_us = rng_below(&w->rng, 60000);
    for (uint32_t i = 0; i < w->worker_count; i++) {
        w->workers[i].adopt_mute = rng_below(&w->rng, 4) == 0;
        w->workers[i].adopt_valid = rng_below(&w->rng, 4);
    }
}

static void break_something(struct world *w)
{
    uint32_t dice = rng_below(&w->rng, 100);
    if (dice < 60)
        worker_fault(w, rng_below(&w->rng, w->worker_count));
    else if (dice < 85)
        gateway_fault(w, rng_below(&w->rng, w->gateway_count));
    else if (dice < 90)
        router_restart(w);
    else if (dice < 95)
        w->unsent_permille = rng_below(&w->rng, 2) ? rng_below(&w->rng, 200) : 0;
    else
        redis_settings(w);
}

static void heal(struct world *w)
{
    w->unsent_permille = 0;
    w->busy_permille = 0;
    for (uint32_t i = 0; i < w->worker_count; i++) {
        struct fake_worker *f = &w->workers[i];
        f->frozen = f->drain = f->wrong_canary = f->lossy = false;
        if (!f->up)
            worker_up(w, i, 8);
    }
    for (uint32_t i = 0; i < w->gateway_count; i++)
        w->gateways[i].frozen = false;
}

static bool all_over(const struct world *w)
{
    for (uint32_t i = 0; i < w->gateway_count; i++) {
        for (uint32_t n = 0; n < STREAMS; n++) {
            enum stream_state s = w->gateways[i].streams[n].state;
            if (s == S_SENT || s == S_LIVE)
                return false;
        }
    }
    return true;
}

static void settings(struct world *w)
{
    w->delay_us_max = rng_below(&w->rng, 3) == 0 ? 0 : rng_below(&w->rng, 40000);
    w->repeat_permille = rng_below(&w->rng, 2) ? rng_below(&w->rng, 100) : 0;
    w->busy_permille = rng_below(&w->rng, 3) == 0 ? rng_below(&w->rng, 400) : 0;
    w->assign_replaces = rng_below(&w->rng, 2) != 0;
    w->steps_per_emit = 1 + rng_below(&w->rng, 6);
    for (uint32_t i = 0; i < w->worker_count; i++) {
        w->workers[i].seqs_max = 1 + rng_below(&w->rng, 12);
        w->workers[i].lossy = rng_below(&w->rng, 4) == 0;
    }
    w->lose_permille = rng_below(&w->rng, 20);
    redis_settings(w);
}

static void hang_show(struct world *w)
{
    struct rt_info info = world_info(w);
    fprintf(stderr, "router: ready %d (%s) waiting %u running %u live %llu\n", info.router.ready,
            info.router.reason, info.router.waiting, info.router.running,
            (unsigned long long)info.router.ledger.live);
    for (uint32_t i = 0; i < w->worker_count; i++)
        fprintf(stderr, "worker %u: up %d live %u of %u\n", i, w->workers[i].up,
                seqs_live(&w->workers[i]), w->workers[i].seqs_max);
    for (uint32_t i = 0; i < w->gateway_count; i++) {
        for (uint32_t n = 0; n < STREAMS; n++) {
            struct stream *s = &w->gateways[i].streams[n];
            if (s->state == S_SENT || s->state == S_LIVE)
                fprintf(stderr, "gateway %u stream %u: state %d k %u of %u sent %llu ms ago\n", i,
                        n, s->state, s->k, s->max,
                        (unsigned long long)(w->now_us - s->sent_us) / 1000);
        }
    }
}

static void run(uint64_t seed)
{
    static struct world w;
    world_init(&w, seed, 1 + (uint32_t)(seed % WORKERS), 1 + (uint32_t)(seed / 3 % GATEWAYS));
    settings(&w);
    bool calm = seed % 5 == 0; /* a fifth of the runs without faults: nothing may fail then */
    if (calm)
        w.lose_permille = 0;
    for (uint32_t tick = 0; tick < 40; tick++) {
        for (uint32_t i = 0; i < w.gateway_count; i++) {
            if (!w.gateways[i].up || w.gateways[i].frozen)
                continue;
            streams_begin(&w, i);
            streams_touch(&w, i);
            streams_reap(&w, i);
        }
        if (!calm && rng_below(&w.rng, 4) == 0)
            break_something(&w);
        world_run_ms(&w, 50 + rng_below(&w.rng, 400));
    }
    heal(&w);
    uint64_t healed_us = w.now_us;
    while (!all_over(&w) && w.now_us - healed_us < 120000000)
        world_run_ms(&w, 100);
    if (!all_over(&w))
        hang_show(&w);
    if (!all_over(&w))
        fail_msg("seed %llu: something hangs", (unsigned long long)seed);
    world_run_ms(&w, 5000);
    for (uint32_t i = 0; i < w.gateway_count; i++)
        streams_reap(&w, i);
    world_idle_check(&w);
    struct rt_stats s = world_info(&w).stats;
    totals.gaps += s.gaps;
    totals.lost += s.workers_lost;
    totals.resubmits += s.resubmits;
    totals.maps_asked += s.maps_asked;
    totals.maps_used += s.maps_used;
    totals.maps_stale += s.maps_stale;
    totals.maps_late += s.maps_late;
    uint64_t placed = 0;
    for (uint32_t i = 0; i < RT_AFFINITY_COUNT; i++) {
        totals.affinity[i] += s.affinity[i];
        placed += s.affinity[i];
    }
    assert_int_equal(placed, s.assigned); /* each assignment for exactly one reason */
    world_fini(&w);
}

static void test_random_runs(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < run_count; i++) {
        seed_first += i > 0;
        run(seed_first);
    }
    printf("streams %llu finished %llu failed %llu cancelled %llu refused %llu resumed %llu "
           "gaps %llu workers lost %llu resubmits %llu\n",
           (unsigned long long)totals.streams, (unsigned long long)totals.finished,
           (unsigned long long)totals.failed, (unsigned long long)totals.cancelled,
           (unsigned long long)totals.refused, (unsigned long long)totals.resumed,
           (unsigned long long)totals.gaps, (unsigned long long)totals.lost,
           (unsigned long long)totals.resubmits);
    printf("maps asked %llu used %llu stale %llu late %llu; assignments by affinity:",
           (unsigned long long)totals.maps_asked, (unsigned long long)totals.maps_used,
           (unsigned long long)totals.maps_stale, (unsigned long long)totals.maps_late);
    for (uint32_t i = 0; i < RT_AFFINITY_COUNT; i++)
        printf(" %llu", (unsigned long long)totals.affinity[i]);
    printf("\n");
    for (uint32_t i = 0; i < ERR_COUNT; i++) {
        if (totals.codes[i] > 0)
            printf("%s %llu\n", err_name((enum err)i), (unsigned long long)totals.codes[i]);
    }
    if (run_count < RUNS)
        return;
    /* The runs reach what they are there for. */
    assert_true(totals.finished > 20 * RUNS && totals.cancelled > RUNS / 2);
    assert_true(totals.resumed > RUNS && totals.resubmits > RUNS / 4);
    assert_true(totals.gaps > RUNS / 4 && totals.failed > 0);
    for (uint32_t i = 0; i < RT_AFFINITY_COUNT; i++)
        assert_true(totals.affinity[i] > 0 || i == RT_MISS_SMALL);
    assert_true(totals.maps_used > 0 && totals.maps_stale > 0 && totals.maps_late > 0);
}

static int report(void **state)
{
    (void)state;
    fprintf(stderr, "last seed %llu\n", (unsigned long long)seed_first);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        seed_first = strtoull(argv[1], NULL, 10);
        run_count = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_random_runs, report),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
