/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_ab.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/err.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "tests/bench/bench_load.h"
#include "tests/bench/bench_measure.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/bench_session.h"

#define PAIRS_MAX        100000u
#define RESAMPLINGS      2000u
#define RESAMPLINGS_BUSY 200u /* where many pairs make the interval steady and the work long */

enum metric { METRIC_RATE, METRIC_TTFT, METRIC_DURATION, METRIC_RUN, METRIC_COUNT };
static const char *const metric_keys[] = {"stream_tokens_per_s", "ttft", "duration",
                                          "run_tokens_per_s"};
static const char *const metric_names[] = {"tok/s of a stream", "first token", "whole stream",
                                           "tok/s of a run"};

struct sample {
    bool good;
    uint64_t text_hash;
    double values[3]; /* METRIC_RATE, METRIC_TTFT, METRIC_DURATION */
};

struct ab {
    struct bench_session *session;
    uint32_t arm, round;
    uint64_t per_round, pair_count;
    uint64_t salt; /* of this process */
    struct sample *samples[2];
    double *run_rates[2]; /* a round */
    struct bench_measure *measures[2];
    double *ratios, *scratch, *medians;
    uint64_t same_text_count, compared_count;
};

static void write_body(void *arg, uint64_t index, struct str *out)
{
    struct ab *ab = arg;
    char salt[64];
    snprintf(salt, sizeof(salt), "bench-%016" PRIx64 "-%c-%u", ab->salt, ab->arm ? 'b' : 'a',
             ab->round);
    const struct bench_body body = {.index = ab->round * ab->per_round + index,
                                    .prompt_tokens = ab->session->options.prompt_tokens,
                                    .arm = &ab->session->arm[ab->arm],
                                    .cache_salt = salt};
    bench_session_write(ab->session, &body, out);
}

static void on_result(void *arg, uint64_t index, const struct bench_result *r)
{
    struct ab *ab = arg;
    uint64_t at = ab->round * ab->per_round + index;
    CHECK(at < ab->pair_count);
    struct sample *sample = &ab->samples[ab->arm][at];
    sample->good = r->fault == BENCH_NONE && r->first_us != 0;
    sample->text_hash = r->text_hash;
    sample->values[METRIC_RATE] = bench_result_rate(r);
    sample->values[METRIC_TTFT] = (double)bench_result_ttft_us(r);
    sample->values[METRIC_DURATION] = (double)(r->end_us - r->start_us);
}

static void run_arm(struct ab *ab, uint32_t round, uint32_t arm)
{
    struct bench_session *s = ab->session;
    struct bench_measure *m = ab->measures[arm];
    ab->round = round;
    ab->arm = arm;
    uint64_t tokens = m->token_count, begin_us = loop_now_us(s->loop);
    const struct bench_load load = {.loop = s->loop,
                                    .client = s->client,
                                    .measure = m,
                                    .stream_count = s->options.streams,
                                    .request_count = ab->per_round,
                                    .run_us_max = (uint64_t)(s->options.time_limit * 1e6),
                                    .run_us_max_is_fault = true,
                                    .ramp_us = (uint64_t)(s->options.ramp * 1e6),
                                    .progress = s->options.progress,
                                    .interrupted = &s->interrupted,
                                    .write_body = write_body,
                                    .on_result = on_result,
                                    .arg = ab};
    bench_load_run(&load);
    double seconds = (double)(loop_now_us(s->loop) - begin_us) / 1e6;
    ab->run_rates[arm][round] = seconds > 0 ? (double)(m->token_count - tokens) / seconds : 0;
}

static struct bench_interval interval(struct ab *ab, uint64_t count)
{
    if (count == 0)
        return (struct bench_interval){0};
    return bench_bootstrap(ab->ratios, count, count > 10000 ? RESAMPLINGS_BUSY : RESAMPLINGS,
                           ab->session->options.seed, ab->scratch, ab->medians);
}

/* Ratios B / A of one metric over all pairs in which both finished. */
static struct bench_interval compare(struct ab *ab, enum metric metric, uint32_t rounds)
{
    uint64_t count = 0;
    if (metric == METRIC_RUN) {
        for (uint32_t i = 0; i < rounds; i++)
            if (ab->run_rates[0][i] > 0 && ab->run_rates[1][i] > 0)
                ab->ratios[count++] = ab->run_rates[1][i] / ab->run_rates[0][i];
        return interval(ab, count);
    }
    for (uint64_t i = 0; i < ab->pair_count; i++) {
        const struct sample *a = &ab->samples[0][i], *b = &ab->samples[1][i];
        if (a->good && b->good && a->values[metric] > 0 && b->values[metric] > 0)
            ab->ratios[count++] = b->values[metric] / a->values[metric];
    }
    return interval(ab, count);
}

static void count_texts(struct ab *ab)
{
    for (uint64_t i = 0; i < ab->pair_count; i++) {
        if (!ab->samples[0][i].good || !ab->samples[1][i].good)
            continue;
        ab->compared_count++;
        ab->same_text_count += ab->samples[0][i].text_hash == ab->samples[1][i].text_hash;
    }
}

static void report(struct ab *ab, const struct bench_interval *intervals, struct str *out)
{
    const struct bench_options *o = &ab->session->options;
    if (o->json) {
        bench_report_json_open(out, o, "ab");
        for (uint32_t arm = 0; arm < 2; arm++) {
            str_add_format(out, ",\"%c\":{\"settings\":", arm ? 'b' : 'a');
            const struct bench_fields *const layer = &ab->session->arm[arm];
            bench_fields_write(out, &layer, 1);
            str_add_text(out, ",\"run\":");
            bench_report_json(out, ab->measures[arm]);
            str_add_char(out, '}');
        }
        str_add_text(out, ",\"ratios\":{");
        for (uint32_t i = 0; i < METRIC_COUNT; i++) {
            str_add_format(out, "%s\"%s\":", i ? "," : "", metric_keys[i]);
            bench_report_json_interval(out, &intervals[i]);
        }
        str_add_format(out, "},\"texts_compared\":%" PRIu64 ",\"texts_equal\":%" PRIu64 "}\n",
                       ab->compared_count, ab->same_text_count);
        return;
    }
    for (uint32_t arm = 0; arm < 2; arm++) {
        str_add_format(out, "== %c: %s\n", arm ? 'B' : 'A', o->ab[arm]);
        bench_report_table(out, ab->measures[arm]);
        str_add_char(out, '\n');
    }
    str_add_format(out, "%-26s %9s   %s\n", "== B / A", "median", "95 % interval");
    for (uint32_t i = 0; i < METRIC_COUNT; i++) {
        if (intervals[i].count == 0)
            str_add_format(out, "%-26s %9s\n", metric_names[i], "-");
        else
            str_add_format(out, "%-26s %9.4f   %.4f to %.4f (%zu pairs)\n", metric_names[i],
                           intervals[i].median, intervals[i].low, intervals[i].high,
                           intervals[i].count);
    }
    str_add_format(out, "%-26s %" PRIu64 " of %" PRIu64 " pairs\n", "equal texts",
                   ab->same_text_count, ab->compared_count);
}

uint64_t bench_ab_run(struct bench_session *s, struct str *out)
{
    uint32_t rounds = s->options.rounds;
    struct ab ab = {.session = s, .per_round = s->options.requests};
    if (ab.per_round > PAIRS_MAX / rounds)
        die("--ab: %u rounds of %" PRIu64 " requests are more than %u pairs", rounds, ab.per_round,
            PAIRS_MAX);
    ab.pair_count = ab.per_round * rounds;
    rng_system(&ab.salt, sizeof(ab.salt));
    uint64_t values_max = ab.pair_count > rounds ? ab.pair_count : rounds;
    for (uint32_t arm = 0; arm < 2; arm++) {
        ab.samples[arm] = mem_take_array(ab.pair_count, sizeof(struct sample));
        ab.run_rates[arm] = mem_take_array(rounds, sizeof(double));
        ab.measures[arm] = bench_measure_create();
    }
    ab.ratios = mem_take_array(values_max, sizeof(double));
    ab.scratch = mem_take_array(values_max, sizeof(double));
    ab.medians = mem_take_array(RESAMPLINGS, sizeof(double));
    for (uint32_t round = 0; round < rounds && !s->interrupted; round++) {
        run_arm(&ab, round, round % 2);
        if (!s->interrupted)
            run_arm(&ab, round, 1 - round % 2);
    }
    struct bench_interval intervals[METRIC_COUNT];
    for (uint32_t i = 0; i < METRIC_COUNT; i++)
        intervals[i] = compare(&ab, (enum metric)i, rounds);
    count_texts(&ab);
    report(&ab, intervals, out);
    uint64_t failed = ab.measures[0]->failed_count + ab.measures[1]->failed_count;
    for (uint32_t arm = 0; arm < 2; arm++) {
        mem_give(ab.samples[arm]);
        mem_give(ab.run_rates[arm]);
        bench_measure_destroy(&ab.measures[arm]);
    }
    mem_give(ab.ratios);
    mem_give(ab.scratch);
    mem_give(ab.medians);
    return failed;
}
