/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_load.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "tests/bench/bench_http.h"
#include "tests/bench/bench_measure.h"

#define BENCH_RUN_MAGIC 0x4252554eu
#define TICK_US         2000u
#define AFTER_ERROR_US  100000u

struct place {      /* one stream's slot */
    uint64_t index; /* of the request in it */
    uint64_t free_at_us;
};

struct run {
    uint32_t magic;
    bool ending;
    const struct bench_load *load;
    struct bench_sink sink;
    struct loop_timer *timer;
    struct place *places;
    uint32_t *free_places; /* stack */
    uint32_t free_count;
    uint64_t next_index;
    uint64_t begin_us, due_us, said_us, said_tokens;
    struct rng arrivals;
    struct str body;
};

static bool more_to_start(const struct run *r)
{
    return !r->ending && (r->load->request_count == 0 || r->next_index < r->load->request_count);
}

static void stop_if_done(struct run *r)
{
    if (!more_to_start(r) && r->free_count == r->load->stream_count)
        loop_stop(r->load->loop);
}

static void start_in(struct run *r, uint32_t slot, uint64_t due_us)
{
    r->places[slot].index = r->next_index;
    str_clear(&r->body);
    r->load->write_body(r->load->arg, r->next_index, &r->body);
    CHECK(!r->body.overflow && r->body.bytes > 0);
    r->next_index++;
    bench_measure_start(r->load->measure);
    bench_client_start(r->load->client, slot, r->body.text, r->body.bytes, due_us, &r->sink);
}

/* Starts all that is due in the slots that are free. */
static void start_due(struct run *r)
{
    uint64_t now_us = loop_now_us(r->load->loop);
    uint32_t looked_at = 0, held = 0;
    /* Slots that must still wait are put back below the others. */
    uint32_t count = r->free_count;
    while (more_to_start(r) && looked_at < count) {
        if (r->load->rate > 0 && r->due_us > now_us)
            break;
        uint32_t slot = r->free_places[r->free_count - 1 - held];
        looked_at++;
        if (r->places[slot].free_at_us > now_us) {
            held++;
            continue;
        }
        /* Close the hole that the taken slot leaves. */
        for (uint32_t i = r->free_count - 1 - held; i + 1 < r->free_count; i++)
            r->free_places[i] = r->free_places[i + 1];
        r->free_count--;
        uint64_t due_us = r->load->rate > 0 ? r->due_us : loop_now_us(r->load->loop);
        start_in(r, slot, due_us);
        if (r->load->rate > 0)
            r->due_us += (uint64_t)(-log(1 - rng_unit(&r->arrivals)) * 1e6 / r->load->rate);
    }
}

static void end_all(struct run *r, enum bench_fault fault)
{
    r->ending = true;
    for (uint32_t slot = 0; slot < r->load->stream_count; slot++)
        if (bench_client_busy(r->load->client, slot))
            bench_client_cancel(r->load->client, slot, fault);
}

static void say_progress(struct run *r, uint64_t now_us)
{
    const struct bench_measure *m = r->load->measure;
    if (!r->load->progress || now_us - r->said_us < 1000000u)
        return;
    double rate =
        (double)(m->live_token_count - r->said_tokens) * 1e6 / (double)(now_us - r->said_us);
    fprintf(stderr, "%6.0f s  %u running  %" PRIu64 " done  %" PRIu64 " failed  %.1f tok/s\n",
            (double)(now_us - r->begin_us) / 1e6, r->load->stream_count - r->free_count,
            m->ended_count - m->failed_count, m->failed_count, rate);
    r->said_us = now_us;
    r->said_tokens = m->live_token_count;
}

static void on_tick(void *arg)
{
    struct run *r = arg;
    CHECK_OBJ(r, BENCH_RUN_MAGIC);
    uint64_t now_us = loop_now_us(r->load->loop);
    say_progress(r, now_us);
    if (*r->load->interrupted)
        end_all(r, BENCH_STOPPED);
    else if (r->load->run_us_max > 0 && now_us - r->begin_us >= r->load->run_us_max)
        end_all(r, r->load->run_us_max_is_fault ? BENCH_TIME_LIMIT : BENCH_STOPPED);
    else
        start_due(r);
    stop_if_done(r);
}

static void on_tokens(void *arg, uint32_t slot, uint64_t before_us, uint64_t now_us,
                      uint32_t tokens)
{
    struct run *r = arg;
    CHECK_OBJ(r, BENCH_RUN_MAGIC);
    bench_measure_tokens(r->load->measure, before_us, now_us, tokens);
}

static void on_end(void *arg, uint32_t slot, const struct bench_result *result)
{
    struct run *r = arg;
    CHECK_OBJ(r, BENCH_RUN_MAGIC);
    CHECK(r->free_count < r->load->stream_count);
    bench_measure_end(r->load->measure, result);
    if (r->load->on_result != NULL)
        r->load->on_result(r->load->arg, r->places[slot].index, result);
    r->free_places[r->free_count++] = slot;
    r->places[slot].free_at_us = bench_result_failed(result) ? result->end_us + AFTER_ERROR_US : 0;
    /* While ending, end_all walks over the slots itself. */
    if (!r->ending && !*r->load->interrupted) {
        start_due(r);
        stop_if_done(r);
    }
}

void bench_load_run(const struct bench_load *load)
{
    CHECK(load->stream_count > 0 && load->write_body != NULL && load->interrupted != NULL);
    CHECK(load->request_count > 0 || load->run_us_max > 0);
    struct run *r = mem_take(sizeof(*r));
    r->magic = BENCH_RUN_MAGIC;
    r->load = load;
    r->sink = (struct bench_sink){.on_tokens = on_tokens, .on_end = on_end, .arg = r};
    r->places = mem_take_array(load->stream_count, sizeof(*r->places));
    r->free_places = mem_take_array(load->stream_count, sizeof(*r->free_places));
    r->begin_us = r->due_us = r->said_us = loop_now_us(load->loop);
    r->said_tokens = load->measure->live_token_count;
    rng_init(&r->arrivals, load->seed);
    str_init(&r->body, 0);
    for (uint32_t i = 0; i < load->stream_count; i++) {
        r->free_places[load->stream_count - 1 - i] = i; /* slot 0 on top */
        r->places[i].free_at_us = r->begin_us + load->ramp_us * i / load->stream_count;
    }
    r->free_count = load->stream_count;
    r->timer = loop_timer_create(load->loop, on_tick, r);
    loop_timer_start(r->timer, TICK_US, true);
    loop_run(load->loop);
    CHECK(r->free_count == load->stream_count);
    load->measure->run_us += loop_now_us(load->loop) - r->begin_us;
    loop_timer_destroy(&r->timer);
    str_fini(&r->body);
    mem_give(r->places);
    mem_give(r->free_places);
    r->magic = 0;
    mem_give(r);
}
