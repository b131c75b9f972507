/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_solo.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "tests/bench/bench_measure.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/bench_session.h"

#define BENCH_SOLO_MAGIC 0x42534f4cu
#define COLD_FIRST_INDEX (UINT64_C(1) << 41)
#define TICK_US          10000u
#define EVENTS_BEFORE    4u /* of each decoder, before the cold prompt comes */
#define COLD_LEAD_US     200000u
#define RESAMPLINGS      2000u

enum phase { PHASE_ALONE, PHASE_COLD, PHASE_BESIDE };

struct decoder {
    bool started;
    uint64_t event_count;
    uint64_t first_us, last_us;
    uint64_t window_begin_us, window_end_us; /* the part of the prefill it decoded beside */
    uint64_t window_tokens;
};

struct solo {
    uint32_t magic;
    enum phase phase;
    uint32_t round, decoder_count, running_count;
    bool ended_early; /* a decoder was done before the prefill began */
    struct bench_session *session;
    struct bench_sink sink;
    struct bench_measure *measure; /* all streams of all phases */
    struct bench_hist *gap_alone, *gap_beside, *cold_alone, *cold_beside, *newcomer;
    struct decoder *decoders;
    double rate_sum; /* of the decoders of this phase */
    uint64_t phase_us, cold_start_us, cold_first_us, cold_tokens;
    bool cold_started;
    double *alone, *beside, *ratios, *covers, *cold_factors; /* a round; NAN = none */
    double cold_ttft[2];                                     /* alone, beside, of this round */
    double *scratch, *medians, *kept;
    struct str body;
};

static void start_decoder(struct solo *o, uint32_t slot)
{
    const struct bench_body body = {.index = (uint64_t)o->round * o->decoder_count + slot,
                                    .prompt_tokens = o->session->options.prompt_tokens};
    str_clear(&o->body);
    bench_session_write(o->session, &body, &o->body);
    o->decoders[slot].started = true;
    o->running_count++;
    bench_measure_start(o->measure);
    bench_client_start(o->session->client, slot, o->body.text, o->body.bytes,
                       loop_now_us(o->session->loop), &o->sink);
}

static void start_cold(struct solo *o)
{
    const struct bench_body body = {.index = COLD_FIRST_INDEX + 2ull * o->round +
                                             (o->phase == PHASE_BESIDE),
                                    .prompt_tokens = o->session->options.cold_tokens,
                                    .drawn = true,
                                    .max_tokens = 1};
    CHECK(!o->cold_started);
    str_clear(&o->body);
    bench_session_write(o->session, &body, &o->body);
    o->cold_started = true;
    o->running_count++;
    o->cold_start_us = loop_now_us(o->session->loop);
    bench_measure_start(o->measure);
    bench_client_start(o->session->client, o->decoder_count, o->body.text, o->body.bytes,
                       o->cold_start_us, &o->sink);
}

static bool all_decoders_run(const struct solo *o)
{
    for (uint32_t i = 0; i < o->decoder_count; i++)
        if (o->decoders[i].event_count < EVENTS_BEFORE)
            return false;
    return true;
}

/* A decoder's event beside the prefill: its tokens, and the gap before it. */
static void count_beside(struct solo *o, uint32_t slot, uint64_t before_us, uint64_t now_us,
                         uint32_t tokens)
{
    struct decoder *d = &o->decoders[slot];
    bool prefill_over = o->cold_first_us != 0;
    if (before_us != 0 && (!prefill_over || before_us < o->cold_first_us))
        bench_hist_add(o->gap_beside, now_us - before_us, 1);
    if (d->window_begin_us == 0) /* from the arrival of the prompt, or the decoder's first token */
        d->window_begin_us = before_us == 0 ? now_us : o->cold_start_us;
    if (prefill_over)
        return;
    d->window_end_us = now_us;
    if (before_us != 0)
        d->window_tokens += tokens;
}

static void on_tokens(void *arg, uint32_t slot, uint64_t before_us, uint64_t now_us,
                      uint32_t tokens)
{
    struct solo *o = arg;
    CHECK_OBJ(o, BENCH_SOLO_MAGIC);
    bench_measure_tokens(o->measure, before_us, now_us, tokens);
    if (slot == o->decoder_count) {
        if (o->cold_first_us == 0)
            o->cold_first_us = now_us;
        return;
    }
    struct decoder *d = &o->decoders[slot];
    d->event_count++;
    if (d->first_us == 0)
        d->first_us = now_us;
    d->last_us = now_us;
    if (o->phase == PHASE_ALONE && before_us != 0)
        bench_hist_add(o->gap_alone, now_us - before_us, 1);
    if (o->phase != PHASE_BESIDE)
        return;
    if (o->cold_started)
        count_beside(o, slot, before_us, now_us, tokens);
    else if (all_decoders_run(o))
        start_cold(o);
    /* Once the gap that spans the end of the prefill is closed there is nothing left to see. */
    if (o->cold_first_us != 0 && before_us >= o->cold_first_us)
        bench_client_cancel(o->session->client, slot, BENCH_STOPPED);
}

static void on_end(void *arg, uint32_t slot, const struct bench_result *r)
{
    struct solo *o = arg;
    CHECK_OBJ(o, BENCH_SOLO_MAGIC);
    CHECK(o->running_count > 0);
    bench_measure_end(o->measure, r);
    if (slot == o->decoder_count) {
        double ttft = r->fault == BENCH_NONE ? (double)bench_result_ttft_us(r) : 0;
        o->cold_ttft[o->phase == PHASE_BESIDE] = ttft;
        if (ttft > 0)
            bench_hist_add(o->phase == PHASE_BESIDE ? o->cold_beside : o->cold_alone,
                           (uint64_t)ttft, 1);
        if (r->has_usage)
            o->cold_tokens = r->prompt_tokens;
    } else if (o->phase == PHASE_ALONE) {
        o->rate_sum += bench_result_rate(r);
    } else {
        o->ended_early |= !o->cold_started;
        if (r->first_us > o->cold_start_us && o->cold_started)
            bench_hist_add(o->newcomer, bench_result_ttft_us(r), 1);
    }
    /* The last one out ends the phase, unless decoders or the prompt are still to come. */
    if (--o->running_count == 0)
        loop_stop(o->session->loop);
}

static void on_tick(void *arg)
{
    struct solo *o = arg;
    CHECK_OBJ(o, BENCH_SOLO_MAGIC);
    const struct bench_options *options = &o->session->options;
    uint64_t ran_us = loop_now_us(o->session->loop) - o->phase_us;
    bool late = ran_us > (uint64_t)(options->time_limit * 1e6);
    if (o->session->interrupted || late) {
        for (uint32_t slot = 0; slot <= o->decoder_count; slot++)
            if (bench_client_busy(o->session->client, slot))
                bench_client_cancel(o->session->client, slot,
                                    late ? BENCH_TIME_LIMIT : BENCH_STOPPED);
        return;
    }
    if (o->phase == PHASE_BESIDE && options->cold_first && ran_us >= COLD_LEAD_US)
        for (uint32_t slot = 0; slot < o->decoder_count; slot++)
            if (!o->decoders[slot].started)
                start_decoder(o, slot);
}

static void run_phase(struct solo *o, enum phase phase)
{
    o->phase = phase;
    o->cold_started = false;
    o->cold_start_us = o->cold_first_us = 0;
    o->rate_sum = 0;
    memset(o->decoders, 0, o->decoder_count * sizeof(*o->decoders));
    o->phase_us = loop_now_us(o->session->loop);
    bool cold_now =
        phase == PHASE_COLD || (phase == PHASE_BESIDE && o->session->options.cold_first);
    if (cold_now)
        start_cold(o);
    for (uint32_t slot = 0; slot < o->decoder_count && !cold_now; slot++)
        start_decoder(o, slot);
    struct loop_timer *timer = loop_timer_create(o->session->loop, on_tick, o);
    loop_timer_start(timer, TICK_US, true);
    loop_run(o->session->loop);
    loop_timer_destroy(&timer);
    CHECK(o->running_count == 0);
}

/* The decoders' speed beside the prefill, and which share of the prefill they were there for. */
static void take_beside(struct solo *o)
{
    double rate = 0, cover = 0;
    for (uint32_t i = 0; i < o->decoder_count; i++) {
        const struct decoder *d = &o->decoders[i];
        if (!o->cold_started || o->cold_first_us == 0 || d->window_begin_us == 0)
            return; /* never were side by side */
        /* A decoder that is done leaves early; one that still runs waits for the prefill's end. */
        uint64_t end_us = d->last_us > o->cold_first_us ? o->cold_first_us : d->last_us;
        if (end_us <= d->window_begin_us)
            return;
        rate += (double)d->window_tokens * 1e6 / (double)(end_us - d->window_begin_us);
        cover +=
            (double)(end_us - d->window_begin_us) / (double)(o->cold_first_us - o->cold_start_us);
    }
    o->beside[o->round] = rate;
    o->covers[o->round] = cover / o->decoder_count;
}

static void run_round(struct solo *o)
{
    const bool beside_first = o->round % 2 == 1;
    o->alone[o->round] = o->beside[o->round] = o->ratios[o->round] = (double)NAN;
    o->covers[o->round] = o->cold_factors[o->round] = (double)NAN;
    o->cold_ttft[0] = o->cold_ttft[1] = 0;
    for (uint32_t step = 0; step < 3 && !o->session->interrupted; step++) {
        enum phase phase = step == 1                     ? PHASE_COLD
                           : (step == 0) == beside_first ? PHASE_BESIDE
                                                         : PHASE_ALONE;
        run_phase(o, phase);
        if (phase == PHASE_ALONE && o->rate_sum > 0)
            o->alone[o->round] = o->rate_sum;
        if (phase == PHASE_BESIDE)
            take_beside(o);
    }
    if (o->alone[o->round] > 0)
        o->ratios[o->round] = o->beside[o->round] / o->alone[o->round];
    if (o->cold_ttft[0] > 0 && o->cold_ttft[1] > 0)
        o->cold_factors[o->round] = o->cold_ttft[1] / o->cold_ttft[0];
}

static struct bench_interval over_rounds(struct solo *o, const double *values, uint32_t rounds)
{
    size_t count = 0;
    for (uint32_t i = 0; i < rounds; i++)
        if (isfinite(values[i]))
            o->kept[count++] = values[i];
    if (count == 0)
        return (struct bench_interval){0};
    return bench_bootstrap(o->kept, count, RESAMPLINGS, o->session->options.seed, o->scratch,
                           o->medians);
}

struct verdict {
    struct bench_interval alone, beside, ratio, cover, cold_factor;
    bool ratio_held, p99_held, max_held;
};

static struct verdict judge(struct solo *o)
{
    const struct bench_options *options = &o->session->options;
    uint32_t rounds = options->rounds;
    struct verdict v = {.alone = over_rounds(o, o->alone, rounds),
                        .beside = over_rounds(o, o->beside, rounds),
                        .ratio = over_rounds(o, o->ratios, rounds),
                        .cover = over_rounds(o, o->covers, rounds),
                        .cold_factor = over_rounds(o, o->cold_factors, rounds)};
    v.ratio_held = v.ratio.count > 0 && v.ratio.median >= options->ratio_min;
    v.p99_held = o->gap_beside->count > 0 &&
                 (double)bench_hist_percentile(o->gap_beside, 0.99) <= options->gap_p99_max * 1e6;
    v.max_held = o->gap_beside->count > 0 && (double)o->gap_beside->max <= options->gap_max * 1e6;
    return v;
}

static void json_report(struct solo *o, const struct verdict *v, struct str *out)
{
    bench_report_json_open(out, &o->session->options, "solo-ratio");
    const struct {
        const char *key;
        const struct bench_interval *value;
    } intervals[] = {{"alone_tokens_per_s", &v->alone},
                     {"beside_tokens_per_s", &v->beside},
                     {"ratio", &v->ratio},
                     {"prefill_covered", &v->cover},
                     {"cold_ttft_factor", &v->cold_factor}};
    for (size_t i = 0; i < ARRAY_COUNT(intervals); i++) {
        str_add_format(out, ",\"%s\":", intervals[i].key);
        bench_report_json_interval(out, intervals[i].value);
    }
    const struct {
        const char *key;
        const struct bench_hist *value;
    } hists[] = {{"gap_alone_ms", o->gap_alone},
                 {"gap_beside_ms", o->gap_beside},
                 {"cold_ttft_alone_ms", o->cold_alone},
                 {"cold_ttft_beside_ms", o->cold_beside},
                 {"decoder_ttft_beside_ms", o->newcomer}};
    for (size_t i = 0; i < ARRAY_COUNT(hists); i++) {
        str_add_format(out, ",\"%s\":", hists[i].key);
        bench_report_json_hist(out, hists[i].value, 1000);
    }
    str_add_format(out,
                   ",\"cold_prompt_tokens\":%" PRIu64
                   ",\"contract\":{\"ratio\":%s,\"gap_p99\":%s,\"gap_max\":%s}",
                   o->cold_tokens, v->ratio_held ? "true" : "false", v->p99_held ? "true" : "false",
                   v->max_held ? "true" : "false");
    str_add_text(out, ",\"run\":");
    bench_report_json(out, o->measure);
    str_add_text(out, "}\n");
}

static void interval_line(struct str *out, const char *label, const struct bench_interval *i)
{
    if (i->count == 0)
        str_add_format(out, "%-26s -\n", label);
    else
        str_add_format(out, "%-26s %.3f (95 %%: %.3f to %.3f, %zu rounds)\n", label, i->median,
                       i->low, i->high, i->count);
}

static void table_report(struct solo *o, const struct verdict *v, struct str *out)
{
    const struct bench_options *options = &o->session->options;
    str_add_format(out, "%-26s %u decoding, a cold prompt of %" PRIu64 " tokens, %s first\n",
                   "streams", o->decoder_count, o->cold_tokens,
                   options->cold_first ? "the prompt" : "decoders");
    interval_line(out, "tok/s alone", &v->alone);
    interval_line(out, "tok/s beside the prefill", &v->beside);
    interval_line(out, "ratio", &v->ratio);
    interval_line(out, "share of prefill covered", &v->cover);
    interval_line(out, "cold first token, slower by", &v->cold_factor);
    str_add_char(out, '\n');
    bench_report_head(out, "");
    bench_report_row(out, "gap alone ms", o->gap_alone, 1000);
    bench_report_row(out, "gap beside ms", o->gap_beside, 1000);
    bench_report_row(out, "cold first token ms, alone", o->cold_alone, 1000);
    bench_report_row(out, "  beside decoders", o->cold_beside, 1000);
    if (o->newcomer->count > 0)
        bench_report_row(out, "decoder first token ms", o->newcomer, 1000);
    str_add_format(out, "\nratio at least %.2f: %s; gap p99 at most %.2f s: %s; max %.2f s: %s\n",
                   options->ratio_min, v->ratio_held ? "held" : "missed", options->gap_p99_max,
                   v->p99_held ? "held" : "missed", options->gap_max,
                   v->max_held ? "held" : "missed");
    if (o->ended_early)
        str_add_text(out, "note: replies ended before the prefill began: raise --max-tokens\n");
    else if (v->cover.count > 0 && v->cover.median < 0.5 && !options->cold_first)
        str_add_text(out, "note: replies ended before half of the prefill: raise --max-tokens\n");
    bench_report_errors(out, o->measure);
}

uint64_t bench_solo_run(struct bench_session *s, struct str *out, bool *ret_held)
{
    uint32_t rounds = s->options.rounds;
    struct solo *o = mem_take(sizeof(*o));
    o->magic = BENCH_SOLO_MAGIC;
    o->session = s;
    o->decoder_count = s->options.streams;
    o->sink = (struct bench_sink){.on_tokens = on_tokens, .on_end = on_end, .arg = o};
    o->measure = bench_measure_create();
    struct bench_hist *hists = mem_take_array(5, sizeof(*hists));
    o->gap_alone = &hists[0];
    o->gap_beside = &hists[1];
    o->cold_alone = &hists[2];
    o->cold_beside = &hists[3];
    o->newcomer = &hists[4];
    o->decoders = mem_take_array(o->decoder_count, sizeof(*o->decoders));
    double *values = mem_take_array(7ull * rounds + RESAMPLINGS, sizeof(*values));
    double **const arrays[] = {&o->alone,        &o->beside, &o->ratios, &o->covers,
                               &o->cold_factors, &o->kept,   &o->scratch};
    for (size_t i = 0; i < ARRAY_COUNT(arrays); i++)
        *arrays[i] = values + i * rounds;
    o->medians = values + 7ull * rounds;
    for (uint32_t i = 0; i < 5 * rounds; i++)
        values[i] = (double)NAN; /* an interrupted run leaves rounds out */
    str_init(&o->body, 0);
    for (; o->round < rounds && !s->interrupted; o->round++)
        run_round(o);

    struct verdict v = judge(o);
    if (s->options.json)
        json_report(o, &v, out);
    else
        table_report(o, &v, out);
    *ret_held = v.ratio_held && v.p99_held && v.max_held;
    uint64_t failed = o->measure->failed_count;
    str_fini(&o->body);
    bench_measure_destroy(&o->measure);
    mem_give(hists);
    mem_give(o->decoders);
    mem_give(values);
    o->magic = 0;
    mem_give(o);
    return failed;
}
